/* What the two files of the fake's own test share.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef FAKE_CUDA_TEST_FAKE_H
#define FAKE_CUDA_TEST_FAKE_H

#include "tests/gpu/driver.h"
#include "tests/gpu/peer.h"
#include "tests/suite.h"

#define OK(call)        ck_assert_int_eq((int)(call), CUDA_SUCCESS)
#define IS(error, call) ck_assert_int_eq((int)(call), (int)(error))

void in_folder(const char *name, char ret[static 128]); /* of the case's own state folder */
CUcontext start(void);                                  /* device 0, current */
void stop(void);
void fake_setup(void);
void fake_teardown(void);

#endif
