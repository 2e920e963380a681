/* A stand-in for the daemon that dies and is there again: what it had given out, its successor still
 * knows. For one session, whose client is in this process.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * One thread. A block takes whole units of 4 KiB of a region of 64 MiB, first fit. It believes no
 * list: what makes no sense counts as a violation. */
#ifndef BFC_TESTS_CRASH_SERVER_H
#define BFC_TESTS_CRASH_SERVER_H

#include <stdbool.h>
#include <stdint.h>

struct crash_server;

enum crash_server_hello { /* how the hello of a resuming session is answered */
                          CRASH_TAKES,
                          CRASH_HANGS_UP, /* before the answer */
                          CRASH_SILENT,
                          CRASH_STALE,  /* ESTALE */
                          CRASH_DENIES, /* EACCES */
                          CRASH_BUSY,   /* EBUSY */
                          CRASH_OTHER_ID,
                          CRASH_OTHER_SECRET,
                          CRASH_OTHER_TENANT,
                          CRASH_OTHER_NAMES, /* partitions in another order */
                          CRASH_OTHER_DEVICE,
                          CRASH_FEWER,         /* partitions */
                          CRASH_LESS,          /* without an events socket */
                          CRASH_NO_EVENTS_FD,  /* grants them and sends none */
                          CRASH_WRONG_BODY,    /* Done */
                          CRASH_GARBAGE,       /* no message */
                          CRASH_NO_PAGES,      /* grants none */
                          CRASH_ODD_PAGES,     /* not sealed */
                          CRASH_HELD_REFUSED,  /* the list: EACCES */
                          CRASH_HELD_HANGS_UP, /* at the last of the list, which is not taken */
                          CRASH_HELD_DONE,     /* the same, but it is taken */
                          CRASH_HELD_SILENT,
                          CRASH_HELD_BODY,    /* is answered with a Block */
                          CRASH_HELD_EVICTED, /* the session's end: EIDRM, with id 0 */
};

struct crash_server *crash_server_new(void);
struct crash_server *crash_server_free(struct crash_server *m);
const char *crash_server_path(const struct crash_server *m);

/* Hangs up on everybody; the next connection finds the successor. */
void crash_server_kill(struct crash_server *m);

/* It does so at the n-th request from now (Malloc, Free, Usage, Park, Wake, Publish, Attach, Goodbye), which
 * is done or not, and in no case answered. 0: not at all. */
void crash_server_kill_at(struct crash_server *m, unsigned n, bool is_done);
void crash_server_kill_at_held(struct crash_server *m, unsigned n); /* the n-th message of a list */

/* The next n hellos of a resuming session are answered so; later ones are accepted. */
void crash_server_set_hello(struct crash_server *m, enum crash_server_hello hello, unsigned n);

/* Its replies to hellos bring no pages, or say that the session cannot be resumed. */
void crash_server_refuse(struct crash_server *m, bool pages, bool resumption);

/* The usage page has so many entries from the next hello on, train's being the last, whose limit is `limit`. */
void crash_server_set_usage(struct crash_server *m, uint32_t n_entries, uint64_t limit);

/* Sends a Retire of all extents without a block, and says how many; the answer is waited for, for so many ms,
 * and then they are gone. Unanswered they are no longer retired after the next death. */
unsigned crash_server_retire(struct crash_server *m, int timeout_ms);

/* Sends a Trim of everything; whether it was answered in time. */
bool crash_server_trim(struct crash_server *m, int timeout_ms);
/* A Trim at once with a Draining of the first partition; does not wait. */
void crash_server_trim_and_drain(struct crash_server *m);

struct crash_server_counts {
        unsigned n_returns;
        unsigned n_hellos;                      /* of resuming sessions */
        unsigned n_helds;                       /* messages of the last list that was taken */
        unsigned n_extents, n_listed, n_shared; /* in it */
        unsigned n_dropped;                     /* blocks that it did not name */
        unsigned n_splits, n_splits_repeated;   /* a repeated one is not counted among the first */
        unsigned n_blocks;
        unsigned n_refs; /* of shared blocks, in all */
        unsigned n_extents_sent;
        unsigned n_goodbyes;
        unsigned n_requests;
        unsigned n_retired, n_trimmed;
        uint32_t wait_ms; /* of the last request that was put on hold, if it is a Malloc or an Attach */
        unsigned n_violations;
        char violation[96];    /* the first */
        uint64_t client_slabs; /* what the client page says */
        uint64_t client_whole;
        uint64_t client_streams;
};
struct crash_server_counts crash_server_count(struct crash_server *m);

/* A request does not come out of it before the next crash_server_kill() or crash_server_hold(false). */
void crash_server_hold(struct crash_server *m, bool refs);
unsigned crash_server_n_on_hold(struct crash_server *m);

#endif
