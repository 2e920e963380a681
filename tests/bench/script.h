/* A workload as a list of allocations and frees, made before the clock starts:
 * generated ones, and traces read from a file.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_BENCH_SCRIPT_H
#define BFC_BENCH_SCRIPT_H

#include <stddef.h>
#include <stdint.h>

struct step {
        uint64_t n_bytes; /* 0: a free */
        uint32_t slot;    /* where the handle is kept */
};

/* Steps before n_fill build up what is live; those after it are timed. */
struct script {
        char name[64];
        struct step *steps;
        size_t n_steps, n_steps_room;
        size_t n_fill;
        uint32_t n_slots;
        size_t n_live;            /* at most, in blocks */
        uint64_t peak_live_bytes; /* sizes as asked for */
};

void script_done(struct script *s);

/* First in first out, last in first out, random; n_live blocks, n_timed steps. */
void script_fifo(struct script *s, uint32_t n_live, size_t n_timed);
void script_lifo(struct script *s, uint32_t n_live, size_t n_timed);
void script_random(struct script *s, uint32_t n_live, size_t n_timed);

/* Training steps of a transformer, from its layers' sizes: parameters and optimizer state that
 * stay, activations that are kept from forward to backward, temporaries. */
void script_transformer(struct script *s, unsigned n_training_steps);

/* id,lower,upper,size: a buffer lives from time `lower` to before `upper`; at equal times frees
 * come first, ties keep file order. 0, or -errno and a sentence on standard error. */
int script_read_trace(struct script *s, const char *path);

#endif
