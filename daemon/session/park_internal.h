/* The inside of park and wake. Only their own files include this.
 *
 *   park.c         the requests, and what they do to a session's own blocks
 *   park_shared.c  the same for shared blocks
 *   park_copy.c    the copying, by workers
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_PARK_INTERNAL_H
#define BFCD_PARK_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/memory/quota.h"
#include "daemon/memory/worker.h"
#include "daemon/session/park.h"

/* Memory of a quota. */
struct park_memory {
        struct quota *quota;
        bfc_handle handle; /* 0: none */
        uint64_t offset, n_bytes;
        bool is_owned; /* no record names it: it is freed with the park */
};

/* One of the jobs that copy pieces, in turns of a worker. */
struct park_copier {
        struct worker_job job;
        struct park_copying *copying;
        size_t n_a_turn; /* pieces */
};

struct park_piece;

/* The contents of a block between its memory and its copy. */
struct park_copying {
        struct park_memory memory, copy; /* the copy has at least the size of the memory */
        bool to_copy;                    /* else from the copy */
        struct park_copier copiers[2];
        unsigned n_copiers; /* that are not done; 0: it does not run */
        void (*done)(struct park_copying *c);
        struct park_piece *pieces; /* constant while they are copied */
        size_t n_pieces, n_taken;  /* atomic: the pieces before are copied or being copied */
        int result;                /* atomic; not 0: the copiers end */
};

/* Begins to copy; `memory`, `copy` and `to_copy` are set, and both memories stay until done(), which the
 * loop calls with `result`: 0 or negative. -ENOMEM: it is not called. */
int park_copy_start(struct park_copying *c, void (*done)(struct park_copying *c));

/* The contents are of no use any more: the copy ends soon, with -ECANCELED or 0. */
void park_copy_drop(struct park_copying *c);

/* Frees it if it is owned: perhaps no session is left that would release it later. */
void park_memory_free(struct park_memory *m);

/* After done(), or without a copy: frees memory that no record names. */
void park_copy_deinit(struct park_copying *c);

/* For the refusal of a request whose copy failed. */
const char *park_copy_sentence(int error);

/* ---- park.c ------------------------------------------------------------------ */

struct park_shared;

/* A request. */
struct park {
        struct quota_request wait; /* for the copy's memory, or the block's */
        struct park_copying copying;
        struct session *session; /* NULL: it has been freed */
        bool is_dropped;         /* the session ends: there is no answer */
        bool wakes;
        uint64_t id;         /* of the request */
        uint32_t block;      /* in the ledger */
        uint32_t copy_block; /* wake: in the ledger; LEDGER_NONE: the contents were discarded */
        TAILQ_ENTRY(park) link;
        /* Of a shared block: the copying is in `shared`, and in_delivery is counted in the reference. */
        struct park_shared *shared; /* NULL: the block is the session's own */
        uint32_t ref;
        bool attaches;  /* a wake for an Attach, whose reference it begins */
        bool is_queued; /* the wait is in the quota's queue */
        TAILQ_ENTRY(park) of_shared;
};

/* A request about a block that is not the session's own has a reference. NULL: it was refused. */
struct park *park_new(struct session *s, uint64_t id, uint32_t block, uint32_t ref);
void park_free(struct park *p);

/* Ends it without an answer. The block is the session's as before; or the reference ends that was begun. */
void park_end(struct park *p);

/* Ends a request that was not carried out. With the reason of the quota; or with a sentence. */
void park_refuse_room(struct park *p, int error);
void park_refuse(struct park *p, int error, const char *sentence);
void park_refuse_wake(struct park *p, int error);

/* Why the block cannot be parked; 0: it can. */
int park_fault(struct session *s, const struct ledger_block *b, const Bfcd__Park *m,
               const char **ret_sentence);
extern const char park_over_limit[];

/* The block is parked from now on; parked: as in its record. */
void park_record(const struct quota *q, uint32_t block, uint64_t parked);

/* The facts of a copy. */
void park_describe_copy(const struct park_copying *c, const struct ledger_block *block,
                        struct ledger_block *ret);

/* ---- park_shared.c ------------------------------------------------------------- */

/* A Park and a Wake of a shared block that the session has. NULL: it was answered, or waits for a copy. */
void park_shared_handle(struct session *s, uint64_t id, const Bfcd__Park *m, uint32_t block, uint32_t ref);
struct park *park_shared_wake(struct session *s, uint64_t id, uint32_t block, uint32_t ref, uint32_t wait_ms);

/* The client withdraws the request: false if it cannot any more. */
bool park_shared_cancel(struct park *p);
/* The session ends. Frees the request. */
void park_shared_drop(struct park *p);

#endif
