/* Streams with real work in them, slow on purpose: threads on the host device, the fake driver's
 * streams on a GPU. For programs that are linked against the static library, since the host's
 * have to tell it when work is done.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_WORK_H
#define BFC_TESTS_WORK_H

#include <stdint.h>

struct work_stream;

/* Loads the driver where the rig's device needs one; before a client connects. Each piece of work
 * takes so long. */
void work_setup(unsigned delay_us);

struct work_stream *work_stream_new(void);
struct work_stream *work_stream_free(struct work_stream *s); /* does what is left; takes NULL */
uintptr_t work_stream_number(const struct work_stream *s);

/* Puts a function in, to be called behind all that is there. In a capture it is never called. */
void work_put(struct work_stream *s, void (*function)(void *data), void *data);
void work_wait(struct work_stream *s); /* until all is done */

/* end: 0, or -1 where something has spoilt the capture. */
void work_begin_capture(struct work_stream *s);
int work_end_capture(struct work_stream *s);

#endif
