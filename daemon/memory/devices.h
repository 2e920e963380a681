/* The devices of a config, each opened once for the whole daemon: the config reads their sizes, the
 * broker uses them.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_DEVICES_H
#define BFCD_DEVICES_H

#include <stddef.h>

#include "daemon/config/config.h"
#include "device/device.h"
#include "keeper/start.h"

struct devices;

enum devices_kind {
        DEVICES_KEPT,      /* what keepers have outlives this process, for the next one */
        DEVICES_EXTERNAL,  /* as DEVICES_KEPT, and another program starts the keepers */
        DEVICES_OWN,       /* all ends with this process */
        DEVICES_NO_MEMORY, /* as DEVICES_OWN, and of sizes only */
};
int devices_new(enum devices_kind kind, struct devices **ret);

/* The folder of keepers, opened if necessary; NULL: nothing is kept. On failure a sentence, see keepers_open(). */
int devices_keepers(struct devices *d, const char *admin_socket, struct keepers **ret, char *ret_sentence,
                    size_t n_sentence);

/* True: an earlier bfcd has left a keeper of the host there, when the folder was opened. */
bool devices_have_left(const struct devices *d);

/* The keepers of the host, which the caller then owns: close them after the devices. NULL: the folder was not
 * opened. */
struct keepers *devices_take_keepers(struct devices *d);

/* Ends the keepers of other devices, which the config of an earlier daemon had. */
void devices_drop_rest(const struct devices *d);

/* Closes all: no extent may be left. Takes NULL. */
struct devices *devices_free(struct devices *d);

/* The device with this id of the config, opened if necessary. It belongs to `d`. On failure a sentence,
 * "ID: what is missing". */
int devices_open(struct devices *d, const char *id, struct device **ret, char *ret_sentence,
                 size_t n_sentence);

/* Adds a device of the caller under a new id; taken over on success. -EEXIST, -ENOMEM. */
int devices_put(struct devices *d, const char *id, struct device *device);

/* A config_machine.look; userdata is the devices. */
int devices_look(void *userdata, const char *admin_socket, const char *id, struct config_gpu *ret,
                 char *ret_sentence, size_t n_sentence);

/* A config_machine.look_pages. */
int devices_look_pages(const struct config_partition *p, char *ret_clause, size_t n_clause);

/* How the memory of a partition is made. */
struct device_supply devices_supply(const struct config_partition *p);

#endif
