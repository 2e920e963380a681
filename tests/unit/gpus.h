/* The fixture of sessions.h on the GPUs "cuda:0" and "cuda:1", which fail on command, with the log in a
 * memfd and with three sessions.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_GPUS_H
#define BFC_TESTS_GPUS_H

#include "tests/fake_device.h"
#include "tests/unit/sessions.h"

extern uint64_t gpu_bytes; /* of each, before the start */
extern struct fake_device gpus[2];
extern struct devices *devices;
extern struct peer *a1, *b1, *admin; /* uid 1, uid 2, the operator */

/* `has_events`: sessions of tenants take all events. */
void gpus_start(const char *config_text, bool has_events);
void gpus_end(void);

int gpus_find(void *userdata, const char *admin_socket, const char *id, struct config_gpu *ret,
              char *ret_sentence, size_t n_sentence);
struct peer *open_gpu_session(uid_t uid, bool has_events);

unsigned count_log(const char *part); /* lines of the log that contain it */

#endif
