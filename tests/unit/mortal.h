/* A stand-in for the daemon that dies and is there again: what it had given out, its successor still
 * knows. For one session, whose client is in this process.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * One thread. A block takes whole units of 4 KiB of a region of 64 MiB, first fit. It believes no
 * list: what makes no sense counts as a violation. */
#ifndef BFC_TESTS_MORTAL_H
#define BFC_TESTS_MORTAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct mortal;

enum mortal_hello { /* how the hello of who comes back is answered */
                    MORTAL_TAKES,
                    MORTAL_HANGS_UP, /* before the answer */
                    MORTAL_SILENT,
                    MORTAL_STALE,  /* ESTALE */
                    MORTAL_DENIES, /* EACCES */
                    MORTAL_BUSY,   /* EBUSY */
                    MORTAL_OTHER_ID,
                    MORTAL_OTHER_SECRET,
                    MORTAL_OTHER_TENANT,
                    MORTAL_OTHER_NAMES, /* partitions in another order */
                    MORTAL_OTHER_DEVICE,
                    MORTAL_FEWER,         /* partitions */
                    MORTAL_LESS,          /* without CAPABILITY_EVENTS */
                    MORTAL_NO_EVENTS_FD,  /* grants them and sends none */
                    MORTAL_WRONG_BODY,    /* Done */
                    MORTAL_GARBAGE,       /* no message */
                    MORTAL_NO_PAGES,      /* grants none */
                    MORTAL_ODD_PAGES,     /* not sealed */
                    MORTAL_HELD_REFUSED,  /* the list: EACCES */
                    MORTAL_HELD_HANGS_UP, /* at the last of the list, which is not taken */
                    MORTAL_HELD_DONE,     /* the same, but it is taken */
                    MORTAL_HELD_SILENT,
                    MORTAL_HELD_BODY, /* is answered with a Block */
};

struct mortal *mortal_new(void);
struct mortal *mortal_free(struct mortal *m);
const char *mortal_path(const struct mortal *m);

/* Hangs up on everybody; the next connection finds the successor. */
void mortal_kill(struct mortal *m);

/* It does so at the n-th request from now (Malloc, Free, Usage, Publish, Attach, Goodbye), which is done
 * or not, and in no case answered. 0: not at all. */
void mortal_kill_at(struct mortal *m, unsigned n, bool is_done);
void mortal_kill_at_held(struct mortal *m, unsigned n); /* the n-th message of a list */

/* The next n hellos of who comes back are answered so, then they are taken. */
void mortal_set_hello(struct mortal *m, enum mortal_hello hello, unsigned n);

/* Grants no more than these capabilities; at first all. */
void mortal_set_capabilities(struct mortal *m, uint64_t capabilities);

/* The usage page has so many entries from the next hello on, train's being the last, whose limit is `limit`. */
void mortal_set_usage(struct mortal *m, uint32_t n_entries, uint64_t limit);

/* Sends a Retire of all extents without a block, and says how many; the answer is waited for, for so many ms,
 * and then they are gone. Unanswered they are no longer retired after the next death. */
unsigned mortal_retire(struct mortal *m, int timeout_ms);

/* Sends a Trim of everything; whether it was answered in time. */
bool mortal_trim(struct mortal *m, int timeout_ms);

struct mortal_counts {
        unsigned n_returns;
        unsigned n_hellos;                      /* of who comes back */
        unsigned n_helds;                       /* messages of the last list that was taken */
        unsigned n_extents, n_listed, n_shared; /* in it */
        unsigned n_dropped;                     /* blocks that it did not name */
        unsigned n_splits, n_splits_repeated;   /* a repeated one is not counted among the first */
        unsigned n_blocks;
        unsigned n_holds; /* of shared blocks, in all */
        unsigned n_extents_sent;
        unsigned n_goodbyes;
        unsigned n_requests;
        unsigned n_retired, n_trimmed;
        unsigned n_violations;
        char violation[96];    /* the first */
        uint64_t client_slabs; /* what the client page says */
        uint64_t client_whole;
        uint64_t client_streams;
};
struct mortal_counts mortal_count(struct mortal *m);

/* A request does not come out of it before the next mortal_kill() or mortal_hold(false). */
void mortal_hold(struct mortal *m, bool holds);
unsigned mortal_n_on_hold(struct mortal *m);

#endif
