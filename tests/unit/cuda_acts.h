/* What a process of test_cuda.c can be told to do: the daemon's part, with one
 * device and some extents, or a client's, with one range. Each is a function for
 * process_call(); what it takes from the message, and leaves there, stands beside
 * it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_UNIT_CUDA_ACTS_H
#define BFC_TESTS_UNIT_CUDA_ACTS_H

#include "tests/unit/process.h"

/* The daemon's part. Extents have numbers, from 0 as they are made. */
int act_open(struct message *m); /* text: id; → text: the sentence */
int act_allow_mps(struct message *m);
int act_facts(struct message *m);   /* → facts */
int act_make(struct message *m);    /* extent.share, extent.n_bytes → a: its number, extent, fd */
int act_destroy(struct message *m); /* a: number */
int act_clear(struct message *m);   /* a: number: it is to be cleared when it is destroyed */
int act_others(struct message *m);  /* → a: bytes */
int act_close(struct message *m);
int act_end(struct message *m);   /* device_end() */
int act_swap(struct message *m);  /* from now on it is about the other device */
int act_churn(struct message *m); /* one thread makes, another destroys: 0, or the first error */
/* a: number, b: offset, c: bytes; extent: the host's, with fd; extent.native: the offset there */
int act_copy_to_host(struct message *m);
int act_copy_from_host(struct message *m);
int act_look(struct message *m); /* a: number, b: value → c: how many bytes are not that */

/* A client's part. */
int act_range(struct message *m); /* view, a: bytes */
int act_map(struct message *m);   /* a: offset, extent, fd */
int act_unmap(struct message *m); /* a: offset, b: bytes */
int act_finish(struct message *m);
int act_free(struct message *m);
int act_leave(struct message *m);
int act_base(struct message *m);        /* → a */
int act_fill(struct message *m);        /* a: offset, b: value, c: bytes */
int act_count_other(struct message *m); /* a: offset, b: value, c: bytes → c: how many are not that */
int act_write(struct message *m);       /* a: offset, b: value, c: bytes; by the range's own copy */
int act_read(struct message *m);        /* a: offset, b: value, c: bytes → c: how many are not that */
int act_ordinal(struct message *m);     /* a: ordinal → view.uuid */

/* Anybody's. */
int act_keep_fd(struct message *m);   /* fd */
void act_drop_fd(void);               /* in that process: closes it */
int act_setenv(struct message *m);    /* text: "NAME=value" */
int act_count_fds(struct message *m); /* → a */
int act_n_free(struct message *m);    /* a: ordinal → b: by the driver's word */
/* 0: the thread's current context is as before the first call: there is none. */
int act_has_no_context(struct message *m);
int act_fork_and_wait(
        struct message *m);        /* → a: the pid of a child that does nothing, for a minute at most */
int act_forked(struct message *m); /* 0: a child of this process can do nothing and crashes nowhere */
int act_come_and_go(struct message *m);   /* a: 1: contexts come and go, in a thread; 0: no more */
int act_keep_context(struct message *m);  /* a: ordinal: a GPU is in use */
int act_begin_capture(struct message *m); /* a: flags of the stream, b: ordinal */
int act_end_capture(struct message *m);   /* b: ordinal; 0: the capture was not spoilt */
int act_busy(struct message
                     *m); /* a: offset, b: ordinal, c: bytes: starts work in a stream that fills with 0x77 */

#endif
