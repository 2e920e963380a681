/* The smaller and the larger of two counts.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_NUMBER_H
#define BFCD_NUMBER_H

#include <stdint.h>

static inline uint64_t min_u64(uint64_t a, uint64_t b)
{
        return a < b ? a : b;
}

static inline uint64_t max_u64(uint64_t a, uint64_t b)
{
        return a > b ? a : b;
}

#endif
