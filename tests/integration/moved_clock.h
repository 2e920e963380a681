/* A clock that a test moves, in the programs that it runs or in its own: time-outs of seconds end at once. moved_clock.c
 * is linked into those programs. Their monotonic clocks go on as the machine's do, and are ahead of them.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_MOVED_CLOCK_H
#define BFC_TESTS_MOVED_CLOCK_H

#include <stdint.h>

/* The environment variable with the path of a file of one page. */
#define MOVED_CLOCK_FILE "BFC_TEST_CLOCK"

/* In a program that moves its own clock. */
void moved_clock_pass(uint64_t ms);

struct moved_clock {
        uint64_t passed_ms; /* which the test adds to the monotonic clocks */
        uint32_t is_read;   /* a program has the page */
};

#endif
