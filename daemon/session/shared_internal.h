/* The inside of shared blocks. Only their own files include this.
 *
 *   shared.c        names, references, publishing, attaching, waits
 *   shared_keep.c   kept blocks: their time, metadata, Forget
 *   shared_check.c  the check
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_SHARED_INTERNAL_H
#define BFCD_SHARED_INTERNAL_H

#include "daemon/session/shared.h"

struct shared_name {
        char tenant[LEDGER_NAME_BYTES];
        char name[LEDGER_NAME_BYTES];
        uint32_t shared;      /* in the ledger; LEDGER_NONE: it is only waited for */
        struct tenant *owner; /* while it is published */
        struct shared_wait_list waits;
        struct park_shared
                *parking; /* see park_shared.c; NULL: the block is neither being parked nor woken */
        bool is_busy;     /* in name_serve(), which ends with shared_name_drop() */
        bool is_counted;  /* in owner->n_kept */
        size_t idle_at;   /* its place in the broker's heap, from 1 on; 0: it is not there */
        TAILQ_ENTRY(shared_name) of_due; /* in the broker's list: waits can be served */
};

struct shared_wait {
        struct session *session;
        struct shared_name *name;
        uint64_t request_id;
        uint64_t until_ms;
        bool is_read_only; /* the attach */
        TAILQ_ENTRY(shared_wait) of_session, of_name;
        bool sees[]; /* by index of the session's partitions: the client can map what is there */
};

/* ---- shared.c ---------------------------------------------------------------- */

/* NULL: it is neither published nor waited for. */
struct shared_name *shared_name_find(const struct broker *b, const char *tenant, const char *text);

/* Forgets a name that is neither published nor waited for. */
void shared_name_drop(struct broker *b, struct shared_name *name);

/* Frees the block and its name. ref: its last reference; LEDGER_NONE: it has none. */
void shared_end(struct broker *b, struct shared_name *name, uint32_t ref);

/* True: it is no valid name, and the request was refused. */
bool shared_refuse_name(struct session *s, uint64_t id, const char *text);

/* ---- shared_keep.c ----------------------------------------------------------- */

/* Makes room for one more block that is kept, so that nothing can fail later. -ENOMEM. */
int keep_make_room(struct broker *b);

/* keep_add() is for a name that has been published: it counts the name if the block is kept or has metadata.
 * keep_remove() undoes this, and ends the keep time, before the name is removed. */
void keep_add(struct broker *b, struct shared_name *name);
void keep_remove(struct broker *b, struct shared_name *name);

/* The block stays without references. */
bool keep_allows(const struct broker *b, const struct shared_name *name);

/* keep_begin() starts the keep time, before the last reference is released; keep_allows() must be true.
 * keep_end() stops it when the block has a reference again. */
void keep_begin(struct broker *b, struct shared_name *name);
void keep_end(struct broker *b, struct shared_name *name);

/* keep_begin() for a block that an earlier process kept without references. */
void keep_restore(struct broker *b, struct shared_name *name);

/* A kept block is to be freed at once. */
bool shared_frees_kept_now(const struct broker *b);

/* Frees kept blocks whose time is up, as far as the budget allows. */
void keep_expire(struct broker *b, uint64_t now_ms, unsigned *budget);

#endif
