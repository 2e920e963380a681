/* A GPU whose memory a keeper owns: starts the keeper and asks it, as a device of device.h. So no driver is loaded here.
 *
 * Any thread may call; calls of one device wait for each other. A keeper that has ended is a lost device: -ENODEV until it
 * is closed and opened again. device_close() ends the keeper, and device_open() starts another one. After device_end()
 * calls under way end with -ECANCELED, and further ones do nothing.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KEEPER_REMOTE_H
#define KEEPER_REMOTE_H

#include <stddef.h>

#include "device/device.h"
#include "keeper/start.h"

/* As device_cuda_new(). Also -ENOENT and other -errno: bfcd-keeper, which is searched beside this program, cannot be
 * started. keepers: borrowed; the keeper outlives this process, and device_take() finds what it has. NULL: it ends with it. */
int keeper_device_new(struct keepers *keepers, const char *id, struct device **ret, char *ret_sentence,
                      size_t n_sentence);

/* As device_cuda_allow_mps(), for the keepers that are started from now on. */
void keeper_device_allow_mps(void);

#endif
