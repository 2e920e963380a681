/* From the config's id of a GPU to its context, or to the reason why not.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The driver reads the environment once, when it starts. So the first call sets
 * it (before there are other threads): ordinals are in the order of the bus, and
 * what CUDA_VISIBLE_DEVICES hid from this process it hides no longer. A MIG
 * device is the exception: a process sees one such device at most, and beside it
 * no whole GPU, so the environment names it and no other is opened. */
#ifndef BFC_DEVICE_CUDA_OPEN_H
#define BFC_DEVICE_CUDA_OPEN_H

#include "device/cuda_driver.h"

/* As device_cuda_new(): the same errors, and a sentence that begins with the id. */
int cuda_open(const char *id, struct cuda_context *ret, char *ret_sentence, size_t n_sentence);

#endif
