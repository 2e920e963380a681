/* What the session layer keeps in the broker and in each quota, embedded there. Lower layers only make and free it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_STATE_H
#define BFCD_STATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/queue.h>
#include <sys/types.h>

#include "daemon/base/log.h"
#include "daemon/memory/occupancy.h"

/* ---- in the broker ---- */

struct shared_name;
TAILQ_HEAD(shared_name_list, shared_name);

/* A session or an extent that this process inherited. */
struct kept_record {
        uint64_t id;
        uint32_t index; /* in the ledger; it may have been reused */
};

/* By id, for qsort() and bsearch(). */
static inline int kept_record_compare(const void *x, const void *y)
{
        const struct kept_record *p = x, *q = y;

        return p->id < q->id ? -1 : p->id > q->id;
}

/* Sessions of an earlier process: resume.c's. */
struct suspended_sessions {
        struct kept_record *records; /* by id */
        size_t n_slots;
        size_t n; /* those that may be resumed and have not been */
        struct suspended_user {
                uid_t uid;
                const struct tenant *tenant;
        } * users; /* those at the start, sorted */
        size_t n_users;
};

/* Names that are published or waited for: shared.c's. */
struct shared_names {
        void *tree;
        struct shared_name_list due; /* those whose waiters can be served */
        struct shared_name **idle;   /* kept blocks without references: a heap, see shared.c */
        size_t n_idle, n_idle_room;
        size_t n_kept;    /* published names that are kept or have metadata */
        bool must_review; /* in the next turn: what may be kept has changed */
        size_t n_waits;
        size_t n_slots;  /* of sessions still to be checked for expired waits */
        uint64_t now_ms; /* the time of that check */
};

/* Of the daemon's own memory, for reports: to look takes as long as there are free pieces. */
struct own_memory {
        uint64_t looked_ms; /* 0: never */
        uint64_t allocated_bytes, resident_bytes;
};

/* How long the loop was busy at once, by the server: clients wait for that. The longest times since the start, in this
 * minute and in the one before. No reader resets them, so that each sees all. */
#define LOOP_WINDOW_NS UINT64_C(60000000000)
struct loop_turns {
        uint64_t longest_ns, this_ns, previous_ns;
        uint64_t window_ns; /* when this minute began */
};

static inline void loop_turns_look(struct loop_turns *t, uint64_t now_ns)
{
        if (now_ns - t->window_ns < LOOP_WINDOW_NS)
                return;
        t->previous_ns = now_ns - t->window_ns < 2 * LOOP_WINDOW_NS ? t->this_ns : 0;
        t->this_ns = 0;
        t->window_ns = now_ns;
}

static inline void loop_turns_add(struct loop_turns *t, uint64_t now_ns, uint64_t ns)
{
        loop_turns_look(t, now_ns);
        if (ns > t->this_ns)
                t->this_ns = ns;
        if (ns > t->longest_ns)
                t->longest_ns = ns;
}

static inline uint64_t loop_turns_recent_ns(const struct loop_turns *t)
{
        return t->this_ns > t->previous_ns ? t->this_ns : t->previous_ns;
}

struct session_logs {
        struct log_limits refusals;   /* of hellos, by user */
        struct log_limits returns[5]; /* of resuming sessions, by fault */
        bool has_accounts;            /* lines of the log are due later: accounting_tick() */
};

/* ---- in a quota: which sessions use it, and which have the most; see share.h and explain.h ---- */

#define QUOTA_RANKS   3u
#define QUOTA_HOLDERS 16u

struct usage;
TAILQ_HEAD(usage_list, usage);

/* What is costly to find out, cached. */
struct quota_report {
        uint64_t ranks_ms; /* when the ranks were computed; 0: never */
        struct usage *by_bytes[QUOTA_RANKS], *by_blocks[QUOTA_RANKS];
        uint64_t since_ms; /* when the rest was, by explain.c; 0: never */
        struct usage *most[QUOTA_HOLDERS];
        uint64_t idle_bytes[QUOTA_HOLDERS]; /* as their clients reported then */
        char picture[PICTURE_CHARACTERS + 1];
};

struct quota_usages {
        struct usage_list list;
        struct quota_report *report; /* NULL: none yet */
        uint64_t bytes_contexts;     /* in direct charges, as clients say; those of leases, too */
};

static inline void quota_usages_init(struct quota_usages *u)
{
        TAILQ_INIT(&u->list);
}

static inline void quota_usages_deinit(struct quota_usages *u)
{
        free(u->report);
}

#endif
