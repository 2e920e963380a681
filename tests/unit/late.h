/* A clock for tests of the patience with late memory. Time is what the processes of a test have slept, or what
 * the test lets pass. So memory that is 15 ms late returns while its owner waits for the 15th millisecond,
 * however slow the machine is.
 *
 * For a program that is linked with --wrap=clock_gettime and --wrap=nanosleep. It holds between late_begin()
 * and late_end().
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_UNIT_LATE_H
#define BFC_TESTS_UNIT_LATE_H

#include <stdint.h>

/* To be called before the processes are forked that shall have this clock. */
void late_begin(void);
void late_end(void);

uint64_t late_now_ms(void);
void late_pass(uint64_t ms);

/* function() is called, in a thread, when so much time has passed. A sleep that reaches this time returns after
 * the call. One call at a time. */
int late_call(uint64_t after_ms, void (*function)(void));

#endif
