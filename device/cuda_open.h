/* Opens a GPU by the config's id: returns its context, or the reason why it cannot be used.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The driver reads the environment once, when it starts. So it is set before: ordinals are in PCI bus
 * order, and CUDA_VISIBLE_DEVICES is removed. A MIG device is the exception: a process sees at most one such
 * device and no other GPU, so the environment names it. A keeper opens one device, so nothing refuses another one. */
#ifndef BFC_DEVICE_CUDA_OPEN_H
#define BFC_DEVICE_CUDA_OPEN_H

#include "device/cuda_driver.h"

/* Errors and sentences as of device_cuda_new(); a sentence begins with the id. */
int cuda_open(const char *id, struct cuda_context *ret, char *ret_sentence, size_t n_sentence);

#endif
