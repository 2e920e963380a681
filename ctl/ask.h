/* bfcctl's conversation with the daemon: hello, then questions.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Every function returns 0 or a negative errno; after a failure `error` holds
 * the sentence for people, the daemon's own where it refused, ready to print
 * on a terminal. Which socket it is tells the daemon: an administrator's
 * session has no tenant. */
#ifndef BFC_CTL_ASK_H
#define BFC_CTL_ASK_H

#include <stdbool.h>

#include "client/call.h"
#include "ctl/list.h"

struct ask {
        struct call_connection *connection;
        const char *socket;
        bool admin;
        uint64_t session_id; /* its own */
        char error[1024];
};

/* socket must outlive the conversation. tenant: which of several matching ones
 * to be; NULL or "": the daemon's choice. */
int ask_open(struct ask *a, const char *socket, const char *tenant);
void ask_close(struct ask *a); /* also after a failed ask_open() */

/* The caller frees *ret with list_free(). */
int ask_list(struct ask *a, Bfcd__List__Kind kind, struct list **ret);

/* The report of who has the memory; "": all. As above. */
int ask_explain(struct ask *a, const char *partition, const char *tenant, struct list **ret);

/* Hands over each block, page by page, in the daemon's order, in which a block keeps its place; the row is
 * gone afterwards. -ENOMEM or -EIO of `each` ends it. */
int ask_blocks(struct ask *a, int (*each)(void *userdata, const Bfcd__BlockRow *row), void *userdata);

/* The configuration in force; the caller frees it. */
int ask_config(struct ask *a, char **ret);

/* "": all. */
int ask_reset_peaks(struct ask *a, const char *tenant, const char *partition);

/* Reads the config again. 0: *ret is the reply, the caller's, to be freed by
 * bfcd__reply__free_unpacked(): what changed (or would), or what is wrong. */
int ask_reload(struct ask *a, bool dry_run, Bfcd__Reply **ret);

/* Sends the text of a file for a dry run, before the question; more of the same name goes on in it. */
int ask_reload_text(struct ask *a, const char *name, const void *text, size_t n_bytes);

/* Asks sessions for what lies idle in them. "": all; 0 bytes: all there is. It may take the
 * daemon's reclaim time-out, or more of it where many do not answer. Extents may be on their way back
 * after that: bytes_pending of the tenants' list. */
int ask_trim(struct ask *a, const char *tenant, const char *partition, uint64_t n_bytes,
             uint64_t *ret_n_asked, uint64_t *ret_reserved_before);

/* reason: for its client and the log; "": none is told. */
int ask_evict(struct ask *a, uint64_t session_id, const char *reason);

/* Begins to drain a device; and has it again, which may take as long as making what its
 * partitions have in advance. */
int ask_drain(struct ask *a, const char *device);
int ask_resume(struct ask *a, const char *device);

/* The socket for a program that administers: `option` where given, else
 * BFC_ADMIN_SOCKET, else BFC_SOCKET, else the default admin socket where this
 * user may open it, else the default client socket. */
const char *ask_socket(const char *option);

#endif
