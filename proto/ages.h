/* Ages: the bytes of live blocks by age, in classes whose bounds double.
 *
 * Aging moves no counter per block: a block is counted in a class, and a whole class moves into the next
 * one. Class c moves whenever the clock passes a multiple of 2^c ticks. So the class of a block follows
 * from the tick of its allocation and the current one, and a free can compute it. A block in class c > 0
 * was allocated 2^(c-1) to 2^(c+1)-2 ticks ago; the last class has no upper bound.
 *
 * Counters of one client may be at different ticks, and a block may be subtracted in another counter than
 * it was added to. Only the sum is meaningful, after all were advanced to the same tick. So counters wrap
 * around.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_PROTO_AGES_H
#define BFC_PROTO_AGES_H

#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#define AGES_CLASSES 22u
#define AGES_TICK_MS UINT64_C(256)

struct ages {
        uint64_t tick; /* to which it was advanced; 0: it counts nothing yet */
        uint64_t bytes[AGES_CLASSES];
};

/* CLOCK_MONOTONIC in ticks, never 0; takes some nanoseconds. */
static inline uint32_t ages_now(void)
{
        struct timespec now;

        clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
        return (uint32_t)(((uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000) / AGES_TICK_MS) + 1;
}

/* The class at tick `to` of bytes that are in class c at tick `from`. */
static inline unsigned ages_move(unsigned c, uint64_t from, uint64_t to)
{
        uint64_t due = ((from >> c) + 1) << c;

        while (c + 1 < AGES_CLASSES && due <= to) {
                c++;
                due = ((due >> c) + 1) << c;
        }
        return c;
}

/* Advances to a tick. False: it is already there or later. */
static inline bool ages_advance(struct ages *a, uint64_t tick)
{
        if (tick <= a->tick)
                return false;
        for (unsigned c = AGES_CLASSES - 1; c-- > 0;) {
                unsigned to = ages_move(c, a->tick, tick);

                if (to == c)
                        continue;
                a->bytes[to] += a->bytes[c];
                a->bytes[c] = 0;
        }
        a->tick = tick;
        return true;
}

/* Adds n_bytes (or subtracts: -n_bytes) of a block that was allocated at tick `born`. Returns its class.
 * *ret_moved: other classes have changed, too. */
static inline unsigned ages_count(struct ages *a, uint64_t born, uint64_t n_bytes, bool *ret_moved)
{
        unsigned c;

        *ret_moved = ages_advance(a, born);
        c = ages_move(0, born, a->tick);
        a->bytes[c] += n_bytes;
        return c;
}

/* The minimum age of bytes in the class. */
static inline uint64_t ages_least_ms(unsigned c)
{
        return c == 0 ? 0 : ((UINT64_C(1) << (c - 1)) - 1) * AGES_TICK_MS;
}

#endif
