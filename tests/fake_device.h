/* A device for tests: its extents are empty memfds, so it is fast and a leaked
 * extent is a leaked fd. One that is shared by a handle gets a made-up one, with the
 * number of the call that made it from byte 4 on. It counts what is asked of it and fails on command.
 *
 * Invariant: n_live extents of live_bytes in all are with the caller.
 * Its calls may come from several threads; look at it only when its worker is idle.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_FAKE_DEVICE_H
#define BFC_TESTS_FAKE_DEVICE_H

#include <stdint.h>

#include "device/device.h"

struct fake_device {
        struct device device; /* first: it is one */
        uint64_t granularity;
        unsigned n_makes; /* calls so far, failed ones too */
        unsigned n_destroys;
        unsigned n_live;
        uint64_t live_bytes;
        unsigned fail_make; /* at the call that makes n_makes this; 0: never */
        int make_error;     /* negative errno */
        unsigned fail_destroy;
        int destroy_error;
        bool is_huge;                /* of the pages that it makes */
        struct device_supply supply; /* of the last call */
        void (*on_make)(void);       /* called by each make before it does anything; NULL: nothing is */
        void (*on_destroy)(void);    /* the same */
        bool is_open_elsewhere;      /* processes have what was lent: destroy() fails, and it is as before */
        unsigned n_looks;            /* such calls */
        uint64_t foreign_bytes;      /* what device_foreign_bytes() answers */
        const struct device_use *uses; /* what device_uses() answers, by pid; NULL: -ENOENT */
        size_t n_uses;
        int uses_error;  /* what it answers instead; 0: the above */
        bool stays_lost; /* once a call failed with -ENODEV, as a real one; set it at will */
        bool is_lost;
        bool has_ended;            /* as its keeper would have: what device_has_ended() answers once */
        struct device_facts facts; /* what it says of itself; its name is "fake" at first */
        bool is_closed;
        unsigned n_closes, n_opens; /* calls; opening makes what was lost well */
        int open_error;             /* what opening answers instead; 0: it can be opened */
};

void fake_device_init(struct fake_device *f, uint64_t granularity);

/* It is a keeper: extents that are shared by a handle outlive their owner, and device_take() finds them. */
void fake_device_keep(struct fake_device *f);

/* The nth make (destroy) from now fails with that error, once; 1 is the next. */
void fake_device_fail_make(struct fake_device *f, unsigned nth, int error);
void fake_device_fail_destroy(struct fake_device *f, unsigned nth, int error);

#endif
