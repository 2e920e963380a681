/* Spies: processes of a tenant named green that keep what they were given, by fd, mapping, handle and
 * child, when their session is over, and look for what other tenants write there, and write over it.
 *
 * On the host the memory was taken out of their mappings. Access to a GPU's cannot be revoked: there it
 * is unreclaimed, and no tenant receives it while a spy's accomplice lives.
 *
 * What tenants write is a stamp that nothing else looks like, on granules.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_SPIES_H
#define BFC_TESTS_SPIES_H

#include <stdatomic.h>

#include "tests/integration/harness.h"

#define STAMP_TENANTS 3u
#define STAMP_SPIES   2u /* the third of them */

/* What a tenant, by its number, writes. */
static inline uint64_t stamp_word(unsigned tenant)
{
        return UINT64_C(0xb10cb10cb10c0000) + tenant;
}

static inline bool stamp_is_foreign(uint64_t word, unsigned tenant)
{
        return word - stamp_word(0) < STAMP_TENANTS && word != stamp_word(tenant);
}

#define SPIES_MAX_EXTENTS 32
#define SPIES_ROUNDS      2 /* so many are remembered: an accomplice goes on while the next thief is at it */

struct haul {
        atomic_int n_kept;   /* extents that the thief was given; -1: it does not know yet */
        atomic_bool is_seen; /* its accomplice has them too */
        atomic_int child;    /* the thief's, where it has one */
        struct {
                size_t n_bytes;
                uint8_t handle[64];
        } extents[SPIES_MAX_EXTENTS];
};

struct spies { /* shared memory */
        char socket[96];
        atomic_bool is_over;
        _Atomic uint64_t n_bytes; /* that they have looked at */
        _Atomic uint64_t n_kept;  /* extents */
        struct haul hauls[SPIES_ROUNDS];
};

pid_t spies_start(struct spies *spies, const char *socket);

/* They have looked at enough. */
bool spies_are_done(const struct spies *spies);

/* Ends them, and waits for that; asserts that they had much to look at, and found nothing; on a GPU, that
 * unreclaimed memory is charged to no tenant any more. */
void spies_join(struct spies *spies, pid_t pid, struct rig *rig);

#endif
