/* What the files of the conformance suite share.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_GPU_CONFORMANCE_H
#define BFC_TESTS_GPU_CONFORMANCE_H

#include "tests/gpu/driver.h"
#include "tests/gpu/peer.h"
#include "tests/suite.h"

#define IS(error, call)                                                                                      \
        do {                                                                                                 \
                CUresult got_ = (call);                                                                      \
                ck_assert_msg(got_ == (error), #call ": %s, not " #error, gpu_error(got_));                  \
        } while (0)
#define OK(call)      IS(CUDA_SUCCESS, call)
#define REFUSED(call) ck_assert_msg((call) != CUDA_SUCCESS, #call " was not refused")

/* The fixture: device 0, its primary context current, and how much was free. */
extern CUdevice device;
extern CUcontext context;
extern bool is_fake;
void conformance_setup(void);
void conformance_teardown(void);

/* What this machine can do: cases that need more are not registered. */
struct conformance_machine {
        bool has_device, has_vmm, has_kernels, has_two_devices, is_fake;
};
extern struct conformance_machine machine;

/* A peer that has started on device 0. */
struct peer conformance_peer(void);
/* peer_call() that must succeed. */
void tell(struct peer *p, struct peer_message *m, int fd, int *ret_fd);

#endif
