/* Partitions: the contents of the daemon's hello reply, by index.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_PARTITIONS_H
#define BFC_CLIENT_PARTITIONS_H

#include <bfcclient.h>
#include <stdbool.h>
#include <stdint.h>

#include "device/device.h"

#define CLIENT_PROTOCOL_VERSION 1u

/* Reads the devices of the hello's partitions. -EPROTO, -ENOMEM with a message. */
int client_read_places(bfc_client *client);
void client_free_partitions(bfc_client *client);
/* Checks the hello reply, and selects the client's partition: "" for the default. */
int client_check_hello(bfc_client *client, const char *partition);

/* By its name; NULL: the client's own. -ENOENT with a message. */
int client_partition_index(const bfc_client *client, const char *name, uint32_t *ret_index);

/* Its name, and its device as this process sees it. */
void client_describe_partition(const bfc_client *client, uint32_t partition, struct bfc_partition_info *ret);

/* True: this process can use the partition's device. A device that was found once is not looked up again. */
bool client_lookup_device(bfc_client *client, uint32_t partition);
/* Before the first memory there, and without a lock: see device_prepare(). With a message. */
int client_prepare_device(bfc_client *client, uint32_t partition);
/* Both, with a message: -ENODEV if it cannot. */
int client_check_device(bfc_client *client, uint32_t partition);

#endif
