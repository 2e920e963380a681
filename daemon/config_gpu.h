/* The part of the grammar that GPUs need. Only the files config*.c include this.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_CONFIG_GPU_H
#define BFCD_CONFIG_GPU_H

#include "daemon/config_reader.h"

/* For an id that is not "host". DEVICE_KIND_UNKNOWN: reported. */
enum device_kind config_read_gpu_id(struct config_reader *r, const struct yamltree_node *n);

/* Asks the machine; fills in uuid, size and the default headroom of a device
 * whose id and note are there. false: reported. */
bool config_look_at_gpu(struct config_reader *r, size_t device);

/* Of a GPU with so much memory. */
uint64_t config_default_headroom(uint64_t bytes_total);

#endif
