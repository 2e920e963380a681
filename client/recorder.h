/* A recorder: writes the lifetimes of a client's blocks into a trace, the file that
 * bfc-replay replays: `id,lower,upper,size,partition,tag,flags`.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Times are ticks: one for each block that is allocated or freed, so all are different and
 * their order is the order of the calls. The id is the tick of the allocation. A
 * line is written when a block is allocated. Its upper is 2^63 - 1 until the block is freed, and
 * always has 19 digits. Blocks that are not freed by the end of the recording end there, together. The partition and
 * the tag have no commas: bytes other than printable ASCII, commas and quotes are written as '?'.
 *
 * Thread-safe. Every function takes NULL for the recorder and then does nothing. */
#ifndef BFC_CLIENT_RECORDER_H
#define BFC_CLIENT_RECORDER_H

#include <stdint.h>

struct recorder;

/* A lifetime that is about to end. n_bytes 0: there is none. */
struct recorder_lifetime {
        const void *ptr;
        uint64_t lower;
        uint64_t upper;
        uint64_t n_bytes;
        uint64_t end_at; /* the file offset of its upper */
};

/* Overwrites the file. In its name %p is the pid, %n a number that no other recorder of this process has,
 * %% a percent sign. The message is set: -EINVAL (another % or no regular file), -EBUSY (another recorder
 * writes it), -ENOMEM, -ENAMETOOLONG, or errors of open(2) and write(2). */
int recorder_open(const char *name, struct recorder **ret);

/* Ends the remaining lifetimes, and closes. If the file is incomplete, the message says so. Returns NULL. */
struct recorder *recorder_free(struct recorder *r);

/* What is written of a block. partition, tag: NULL for none; their first RECORDER_LABEL_MAX bytes are written. */
#define RECORDER_LABEL_MAX 63u
struct recorder_block {
        uint64_t n_bytes;
        const char *partition, *tag;
        uint64_t flags; /* of bfc_malloc_with() */
};

/* A block was allocated. Called before another thread can free it. The event is in the file on return and
 * survives a kill of the process, as after recorder_freed(). */
void recorder_given(struct recorder *r, const void *ptr, const struct recorder_block *block);

/* A block is about to be freed; called before its place can be reused. Followed by one of the two below. */
void recorder_freeing(struct recorder *r, const void *ptr, struct recorder_lifetime *ret);

void recorder_freed(struct recorder *r, const struct recorder_lifetime *lifetime);
void recorder_kept(struct recorder *r, const struct recorder_lifetime *lifetime); /* it was not freed */

#endif
