/* A stand-in for the daemon, in threads of the test: it speaks the protocol and
 * hands out real extents, and misbehaves on demand.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Blocks are cut first fit from a region of 64 MiB in units of 64 KiB. */
#ifndef BFC_TESTS_FAKE_SERVER_H
#define BFC_TESTS_FAKE_SERVER_H

#include <stdint.h>

#include "proto/pages.h"

enum fake_mood { /* how a Malloc is answered (the first group: the Hello) */
                 FAKE_GOOD,
                 FAKE_HELLO_REFUSED, /* EACCES, then hangs up */
                 FAKE_HELLO_VERSION_0,
                 FAKE_HELLO_VERSION_2,
                 FAKE_HELLO_BAD_DEFAULT,
                 FAKE_HELLO_NO_PARTITION,
                 FAKE_HELLO_HANG_UP,
                 FAKE_HELLO_HANG_UP_ONCE,
                 FAKE_HELLO_GPUS,      /* infer is on the fake driver's second GPU, by fd */
                 FAKE_HELLO_ODD_SHARE, /* infer is shared in a way of the future */
                 FAKE_HELLO_ODD_UUID,  /* infer's device has half a UUID */
                 FAKE_HELLO_IPC_ON_HOST,
                 FAKE_HELLO_NO_EVENTS,      /* grants none */
                 FAKE_HELLO_UNASKED_EVENTS, /* grants them to every client */
                 FAKE_HELLO_NO_EVENTS_FD,   /* grants them and sends no socket */
                 FAKE_HELLO_PAGES,          /* grants pages, as they must be; else there are none */
                 FAKE_HELLO_PAGES_NO_FDS,   /* grants them and sends none */
                 FAKE_HELLO_PAGES_UNSEALED,
                 FAKE_HELLO_PAGES_SHORT,    /* sealed, and of 64 bytes */
                 FAKE_HELLO_PAGES_VERSION,  /* of version 2 */
                 FAKE_HELLO_PAGES_NO_MEMFD, /* its own socket, twice */
                 FAKE_REFUSE,               /* EDQUOT with a sentence */
                 FAKE_REFUSE_ONCE,          /* the same, and is good from then on */
                 FAKE_WRONG_BODY,           /* Done instead of a Block */
                 FAKE_WRONG_ID,             /* a reply to nothing */
                 FAKE_GARBAGE,              /* a frame that is no message */
                 FAKE_BAD_LENGTH,           /* a frame of 4 GiB */
                 FAKE_HANG_UP,              /* closes at once */
                 FAKE_BAD_REGION,           /* a block in a region never announced */
                 FAKE_BAD_OFFSET,           /* a block beyond the extents */
                 FAKE_TOO_SMALL,            /* a block smaller than asked for */
                 FAKE_SAME_PLACE,           /* a block where one is already */
                 FAKE_UNSEALED,             /* an extent that is not sealed */
                 FAKE_NO_FD,                /* an extent without its fd */
                 FAKE_HANDLE,               /* an extent by a handle, of a partition that shares by fd */
                 FAKE_HANDLE_AND_FD,        /* the same, and an fd with it */
                 FAKE_SHORT_HANDLE,
                 FAKE_BAD_PARTITION,   /* an extent of a partition that was never told of */
                 FAKE_TWO_PARTITIONS,  /* a region's next extent of another partition */
                 FAKE_HOLD,            /* collects `n_hold` mallocs, then answers the last first */
                 FAKE_ONE_BY_ONE,      /* the same, but the first first, and some time between */
                 FAKE_FREE_REFUSED,    /* EINVAL to a Free */
                 FAKE_FREE_UNANSWERED, /* frees, and says nothing */
                 FAKE_FREE_SLOW,       /* takes 50 ms for a Free */
                 FAKE_DEAF,            /* never answers a Goodbye */
};

struct fake_server;

struct fake_server *fake_server_new(void);
struct fake_server *fake_server_free(struct fake_server *s); /* stops all threads */

const char *fake_server_path(const struct fake_server *s);
void fake_server_set_mood(struct fake_server *s, enum fake_mood mood, unsigned n_hold);
void fake_server_hang_up(struct fake_server *s); /* on all sessions */

/* Destroys the extents without blocks; the next block there gets a new
 * extent at the same place. */
void fake_server_renew_extents(struct fake_server *s);

enum fake_event {
        FAKE_RETIRE,         /* of the extents without blocks */
        FAKE_RETIRE_USED,    /* of one in which there is a block */
        FAKE_RETIRE_UNKNOWN, /* of one that was never given */
        FAKE_RETIRE_NOTHING, /* of no extent */
        FAKE_EVENT_UNKNOWN,  /* without a body */
        FAKE_EVENT_GARBAGE,  /* a frame that is no message */
        FAKE_EVENT_LENGTH,   /* a frame of 4 GiB */
        FAKE_EVENT_FD,       /* with an fd */
        FAKE_EVENT_HANG_UP,  /* closes its end */
        FAKE_TRIM,           /* of all there is in train; see fake_server_await_answer() */
        FAKE_PRESSURE,       /* of 1 MiB in train; the same */
        FAKE_RETIRE_FIRST,   /* of the first extent, and so not waited for */
        FAKE_DRAINING,       /* train is, */
        FAKE_DRAINING_OVER,  /* and is not any more */
        FAKE_DRAINING_WRONG, /* of a partition that was not listed */
};

/* Sends it to every session with events. With FAKE_RETIRE waits for the answers and
 * then destroys those extents; returns how many. */
unsigned fake_server_event(struct fake_server *s, enum fake_event event);

/* The sequence number of the next answer to an event in the first session that has them; -1: there is none
 * within so many ms. Not while fake_server_event() waits for answers. */
int fake_server_await_answer(struct fake_server *s, int timeout_ms);

/* The pages of the last session that has good ones. In `ret_usage` train has statistics that are their
 * index plus 1 (bytes_limit 1, bytes_reserved 2, ...), and infer has no entry. */
void fake_server_pages(struct fake_server *s, struct pages_usage **ret_usage,
                       struct pages_client **ret_client);

struct fake_counts {
        unsigned n_sessions; /* connected now */
        unsigned n_blocks;
        unsigned n_extents_sent;
        unsigned n_acks;
        unsigned n_goodbyes;
        bool wants_events, wants_pages, can_resume; /* of the last Hello */
        char name[64];                              /* of the last Hello */
        char tenant[64];
        char partition[64];
        uint32_t wait_ms; /* of the last Malloc */
        char tag[64];
};
struct fake_counts fake_server_count(struct fake_server *s);

#endif
