/* The devices that a config names, each opened once for the whole daemon: the
 * config asks for their size, the broker uses them.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_DEVICES_H
#define BFCD_DEVICES_H

#include <stddef.h>

#include "daemon/config.h"
#include "device/device.h"

struct devices;

int devices_new(struct devices **ret);

/* Closes all: no extent may be left. Takes NULL. */
struct devices *devices_free(struct devices *d);

/* The device of that id (the config's), opened if it is not yet. It stays with
 * `d`. On failure a sentence for people, "ID: what is missing". */
int devices_open(struct devices *d, const char *id, struct device **ret, char *ret_sentence,
                 size_t n_sentence);

/* Puts in a device of the caller's, taken over on success, under an id that is
 * not there yet. -EEXIST, -ENOMEM. */
int devices_put(struct devices *d, const char *id, struct device *device);

/* A config_machine.look; userdata is the devices. */
int devices_look(void *userdata, const char *id, struct config_gpu *ret, char *ret_sentence,
                 size_t n_sentence);

/* A config_machine.look_pages. */
int devices_look_pages(const struct config_partition *p, uint64_t n_bytes, char *ret_clause, size_t n_clause);

/* How the memory of a partition is made. */
struct device_supply devices_supply(const struct config_partition *p);

#endif
