/* Parkable blocks: those of BFC_PARKABLE, with their tags, their uses, and the time of their last use.
 *
 * A block is idle if it is awake, not in use, not shared, and no call parks or wakes it; only idle ones may be
 * parked. The idle blocks of a partition are a list in the order of their last uses.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * All functions need the client's lock. A parkable lives as long as its block is in the table: its owner is
 * the list that it is in. */
#ifndef BFC_CLIENT_PARKABLE_H
#define BFC_CLIENT_PARKABLE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

struct block;
struct pages_idle;

#define PARKABLE_TAG_BYTES 32u

struct parkable {
        const struct block *block; /* in the table */
        struct parkables *in;
        char tag[PARKABLE_TAG_BYTES];
        uint32_t n_uses;
        uint32_t n_copies; /* of bfc_read() and bfc_write(): the program cannot end these */
        uint32_t n_begins; /* calls that begin to use it together with others that are parked */
        int64_t used_ms;   /* the end of the last use, the wake or the allocation; CLOCK_MONOTONIC */
        bool is_busy;      /* a call parks or wakes it: it is leaving the table, or looks so */
        bool waits;        /* and that call waits for room */
        bool is_shared;
        bool is_idle; /* in which list it is */
        TAILQ_ENTRY(parkable) link;
};
TAILQ_HEAD(parkable_list, parkable);

/* Of one partition. */
struct parkables {
        struct parkable_list idle, others;
        uint64_t idle_bytes;
        struct pages_idle *page; /* where they are published; NULL: nowhere */
};

void parkables_init(struct parkables *s);
void parkables_clear(struct parkables *s);

/* NULL: no memory. tag: NULL for none. It is entered when its block is in the table. */
struct parkable *parkable_new(const char *tag);
void parkable_enter(struct parkables *s, struct parkable *p, const struct block *block);
/* The block leaves the table: frees it. */
void parkable_drop(const struct block *block, struct parkable *p);

static inline bool parkable_is_used(const struct parkable *p)
{
        return p->n_uses > 0 || p->n_copies > 0;
}

/* After any change of its members: moves it to the list where it belongs. */
void parkable_sort(struct parkable *p);
void parkable_touch(struct parkable *p); /* it was used until now */

/* tag: NULL matches all. */
bool parkable_has_tag(const struct parkable *p, const char *tag);

/* The busy one in which this place is; NULL: none. */
struct parkable *parkables_find_busy(const struct parkables *s, const void *ptr);

/* Publishes the idle blocks here from now on. */
void parkables_show(struct parkables *s, struct pages_idle *page);

/* Whether a place is part of a block that is parked, or being parked or woken. */
bool parkables_cover(const struct parkables *s, uint64_t region_id, uint64_t offset);

#endif
