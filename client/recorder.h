/* A recorder: writes the lifetimes of a client's blocks into a trace, the file that
 * bfc-replay lives through: `id,lower,upper,size`.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Times are ticks: one for each block that is given or taken, so all are different and
 * their order is the order of the calls. The id is the tick at which the block was given. A
 * line is written when a block is given. Its upper is 2^63 - 1 until the block is taken, and
 * always has 19 digits. Blocks that still live at the end of the recording end there, together.
 *
 * Thread-safe. Every function takes NULL for the recorder and then does nothing. */
#ifndef BFC_CLIENT_RECORDER_H
#define BFC_CLIENT_RECORDER_H

#include <stdint.h>

struct recorder;

/* A life that is about to end. n_bytes 0: there is none. */
struct recorder_life {
        const void *ptr;
        uint64_t lower;
        uint64_t upper;
        uint64_t n_bytes;
        uint64_t end_at; /* where the file has its upper */
};

/* Replaces what is in the file. In its name %p is the pid, %n a number that no other
 * recorder of this process has, %% a percent sign. The sentence is set: -EINVAL (another
 * % or no regular file), -EBUSY (somebody is recording into it), -ENOMEM, -ENAMETOOLONG,
 * or what open(2) and write(2) say. */
int recorder_open(const char *name, struct recorder **ret);

/* Ends the lives that are left, closes. Where the file could not be
 * written to its end, that is the sentence. Returns NULL. */
struct recorder *recorder_free(struct recorder *r);

/* A block was given. Before its pointer is known to a thread that could free it. The event is in the
 * file when this returns, and survives a kill of the process; so it does after recorder_freed(). */
void recorder_given(struct recorder *r, const void *ptr, uint64_t n_bytes);

/* A block is about to be given back: before anybody else can be given its place. It is
 * followed by one of the two below. */
void recorder_freeing(struct recorder *r, const void *ptr, struct recorder_life *ret);

void recorder_freed(struct recorder *r, const struct recorder_life *life);
void recorder_kept(struct recorder *r, const struct recorder_life *life); /* it lives on */

#endif
