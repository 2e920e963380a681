/* Registers a client's mappings of host memory with CUDA (page-locked), where this process uses CUDA. Then an
 * asynchronous copy between them and a GPU returns at once and needs no buffer of the driver.
 *
 * Nothing here loads the driver, initialises it or makes a context: a mapping that comes before the program's
 * first use of a GPU is registered by a later host_pins_try(). Without a registration the memory works as any
 * other.
 *
 * One thread at a time, except as said.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_DEVICE_HOST_PIN_H
#define BFC_DEVICE_HOST_PIN_H

#include <stdbool.h>
#include <stdint.h>

struct host_pin;

struct host_pins {
        struct host_pin *first;
        uint64_t n_bytes; /* registered; atomic */
};

/* After something was mapped there, and before it is unmapped: what overlaps is unregistered, and no work may use
 * it. -EBUSY: the driver refuses during a capture. */
void host_pins_add(struct host_pins *p, void *at, uint64_t n_bytes, bool is_read_only);
int host_pins_remove(struct host_pins *p, const void *at, uint64_t n_bytes);

/* Registers what could not be yet. */
void host_pins_try(struct host_pins *p);

/* Waits for this process's work on all devices, if anything is registered. Any thread. -EBUSY: a capture forbids
 * to wait. */
int host_pins_finish(const struct host_pins *p);

/* Any thread. */
static inline uint64_t host_pins_bytes(const struct host_pins *p)
{
        return __atomic_load_n(&p->n_bytes, __ATOMIC_RELAXED);
}

#endif
