/* The daemon's part of a plan: a broker and one session in this process, on a device that makes no memory.
 *
 * This is the daemon's own code: accounts, quotas, arenas, the allocator, and the session that turns requests
 * into replies. Only the socket, the loop, the worker's thread and the memory are missing. So a plan cannot
 * differ from the daemon in a rule.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CTL_PLAN_DAEMON_H
#define BFC_CTL_PLAN_DAEMON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/bfcd.pb-c.h"

#define PLAN_STEP_BYTES (UINT64_C(2) << 20) /* limits are multiples of it */

#define PLAN_GPU_UUID                                                                                        \
        {                                                                                                    \
                'p', 'l', 'a', 'n'                                                                           \
        } /* of the GPU that a plan makes up */

/* What matters of a partition and of a tenant's quota in it. */
struct plan_place {
        bool is_cuda;
        bool is_ipc; /* share: cuda-ipc */
        bool is_preallocated;
        uint32_t max_blocks;
        uint64_t limit_bytes; /* that the config has now; 0: there is no config */
        uint64_t max_bytes; /* the highest limit that the config's partition allows; 0: there is no config */
        char partition[64], tenant[64];
};

/* The place of a config: a partition and a tenant by name, or NULL for the first. -EINVAL and -ENOENT, with a
 * sentence of the caller's to free. GPUs need not be there. */
int plan_place_read(const char *path, const char *partition, const char *tenant, struct plan_place *ret,
                    char **ret_error);

/* Without a config: host memory, on demand. */
void plan_place_init(struct plan_place *ret);

/* What the daemon sends. Borrowed during the call, as the fds. */
struct plan_daemon_ops {
        void (*reply)(void *userdata, const Bfcd__Reply *reply, const int *fds, size_t n_fds);
        void (*event)(void *userdata, const Bfcd__Event *event);
};

struct plan_daemon;

/* A daemon with this limit and without sessions. -ENOMEM, -EINVAL: with a sentence in ret_sentence. */
int plan_daemon_new(const struct plan_place *place, uint64_t limit_bytes, struct plan_daemon **ret,
                    char *ret_sentence, size_t n_sentence);
struct plan_daemon *plan_daemon_free(struct plan_daemon *d); /* takes NULL */

/* The one client connects. -ENOMEM. */
int plan_daemon_connect(struct plan_daemon *d, const struct plan_daemon_ops *ops, void *userdata);

/* Handles a message of the client. Replies are sent inside this call, or inside plan_daemon_turn(). A negative
 * errno: it was a violation of the protocol. */
int plan_daemon_handle(struct plan_daemon *d, const Bfcd__Request *request);
int plan_daemon_answer(struct plan_daemon *d, const Bfcd__EventReply *reply);

/* A turn of the daemon's loop. False: nothing was due, so only time or the client can change something. */
bool plan_daemon_turn(struct plan_daemon *d);

struct plan_daemon_stats {
        uint64_t peak_charged_bytes;   /* extents */
        uint64_t largest_extent_bytes; /* that the device has made so far */
};
void plan_daemon_read(const struct plan_daemon *d, struct plan_daemon_stats *ret);

#endif
