/* bfcctl's connection to the daemon: hello, then requests.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Every function returns 0 or a negative errno; after a failure `error` has a sentence that is ready to
 * print on a terminal, the daemon's own if it refused. The socket determines the kind of session: an
 * admin session has no tenant. */
#ifndef BFC_CTL_ASK_H
#define BFC_CTL_ASK_H

#include <stdbool.h>

#include "client/call.h"
#include "ctl/list.h"

struct ask {
        struct call_connection *connection;
        const char *socket;
        bool admin;
        bool monitor;        /* it sees everything as well, and changes nothing */
        bool scheduler;      /* it is only for leases, of all tenants */
        uint64_t session_id; /* its own */
        char error[1024];
};

/* On the client socket the session joins no lease and gets no memory. socket must outlive the connection. tenant: which
 * one, if several match; NULL or "": the daemon's choice. */
int ask_open(struct ask *a, const char *socket, const char *tenant);
void ask_close(struct ask *a); /* also after a failed ask_open() */

/* The caller frees *ret with list_free(). */
int ask_list(struct ask *a, Bfcd__List__Kind kind, struct list **ret);

/* Several kinds in one list. */
int ask_lists(struct ask *a, const Bfcd__List__Kind *kinds, size_t n_kinds, struct list **ret);

/* Whether a list has a tenant or a partition (kind) with this name. An unknown name would give an empty result, which
 * looks like no memory. -ENOENT. */
int ask_check_name(struct ask *a, const struct list *l, Bfcd__List__Kind kind, const char *name);

/* The report of memory usage; "": of all partitions or tenants. */
int ask_explain(struct ask *a, const char *partition, const char *tenant, struct list **ret);

/* Calls `each` for every block, page by page, in the daemon's order, which is stable; the row is invalid
 * afterwards. -ENOMEM or -EIO of `each` ends it. */
int ask_blocks(struct ask *a, int (*each)(void *userdata, const Bfcd__BlockRow *row), void *userdata);

/* It has no memory: its place is reserved. */
bool ask_block_is_parked(const Bfcd__BlockRow *row);

/* The current configuration; the caller frees it. */
int ask_config(struct ask *a, char **ret);

/* "": all. */
int ask_reset_peaks(struct ask *a, const char *tenant, const char *partition);

/* Makes the daemon read the config again. 0: the caller owns *ret, and frees it by
 * bfcd__reply__free_unpacked(): the changes (also possible ones), or the errors. */
int ask_reload(struct ask *a, bool dry_run, Bfcd__Reply **ret);

/* Sends the text of a file for a dry run, before ask_reload(); further calls with the same name continue
 * it. */
int ask_reload_text(struct ask *a, const char *name, const void *text, size_t n_bytes);

/* Asks sessions for idle memory. "": all; 0 bytes: all. It may take the daemon's reclaim time-out, or a
 * multiple of it if many sessions do not answer. Extents may still be in release after that:
 * bytes_pending in the list of tenants. */
int ask_trim(struct ask *a, const char *tenant, const char *partition, uint64_t n_bytes,
             uint64_t *ret_n_asked, uint64_t *ret_reserved_before);

/* Has the sessions of a tenant, or one session, park blocks or wake parked ones. session_id 0: those of the tenant.
 * "": every partition; every tag; to the partition that the config says. It may take a minute, or a multiple of
 * it if many sessions do not answer. */
struct ask_park {
        uint64_t session_id;
        const char *tenant, *partition, *tag, *to;
        bool wakes;
};
int ask_park(struct ask *a, const struct ask_park *park, uint64_t *ret_n_asked, uint64_t *ret_bytes);

/* reason: for its client and the log; "": none. */
int ask_evict(struct ask *a, uint64_t session_id, const char *reason);
int ask_forget(struct ask *a, const char *tenant, const char *name);

/* What still uses the lease: the caller frees *ret by bfcd__reply__free_unpacked(). */
int ask_lease_create(struct ask *a, Bfcd__LeaseCreate *question);
int ask_lease_set(struct ask *a, Bfcd__LeaseSet *question);
int ask_lease_end(struct ask *a, Bfcd__LeaseEnd *question, Bfcd__Reply **ret);

/* Begins to drain a device; and resumes it, which may take as long as its partitions' preallocation. */
int ask_drain(struct ask *a, const char *device);
int ask_resume(struct ask *a, const char *device);

/* The admin program's socket: `option` if given, else BFC_ADMIN_SOCKET, else BFC_MONITOR_SOCKET, else
 * BFC_SOCKET, else the first of the default admin, monitor and client sockets that this user may open. */
const char *ask_socket(const char *option);

/* For leases: `option` if given, else the admin socket (BFC_ADMIN_SOCKET or the default) unless this user may open only
 * the client socket (BFC_SOCKET or the default). */
const char *ask_manager_socket(const char *option);

/* The whole name of a lease of this user: on the client socket it begins with the uid. */
#define ASK_NAME_BYTES 64
int ask_lease_name(struct ask *a, const char *name, char ret[static ASK_NAME_BYTES]);

#endif
