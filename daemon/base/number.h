/* Arithmetic on counts of bytes, and their text.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_NUMBER_H
#define BFCD_NUMBER_H

#include <stdint.h>
#include <stdio.h>

static inline uint64_t min_u64(uint64_t a, uint64_t b)
{
        return a < b ? a : b;
}

static inline uint64_t max_u64(uint64_t a, uint64_t b)
{
        return a > b ? a : b;
}

/* Rounds up to a multiple of `unit`. */
static inline uint64_t round_up_u64(uint64_t n, uint64_t unit)
{
        return (n + unit - 1) / unit * unit;
}

/* a - b, or 0 if b is larger. */
static inline uint64_t excess_u64(uint64_t a, uint64_t b)
{
        return a > b ? a - b : 0;
}

struct number_text {
        char text[24];
};

/* "64.0 MiB"; below 1 KiB exact. */
static inline const char *number_size(uint64_t n_bytes, struct number_text *t)
{
        static const char units[] = "KMGTPE";
        double value = (double)n_bytes / 1024;
        unsigned unit = 0;

        if (n_bytes < 1024) {
                snprintf(t->text, sizeof(t->text), "%u B", (unsigned)n_bytes);
                return t->text;
        }
        for (; value >= 1023.95 && units[unit + 1]; unit++)
                value /= 1024;
        snprintf(t->text, sizeof(t->text), "%.1f %ciB", value, units[unit]);
        return t->text;
}

/* Valid until the end of the enclosing block. */
#define NUMBER_SIZE(n_bytes) number_size(n_bytes, &(struct number_text){ { 0 } })

#endif
