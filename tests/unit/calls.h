/* One client and the calls that must succeed, for the tests of libbfcclient; and its fixture with the
 * stand-in of fake_server.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_CALLS_H
#define BFC_TESTS_CALLS_H

#include <bfcclient.h>
#include <sys/types.h>

extern bfc_client *client;

void *get(size_t n_bytes);
void put(void *p);
struct bfc_client_stats stats(void);
struct bfc_block_info info(const void *p);
struct bfc_tenant_usage usage_of(const char *partition);

void expect_error(int r, int expected, const char *part); /* of bfc_last_error() */
void expect_good_end(pid_t pid);                          /* of a child */

/* Until all other threads of this process sleep. It comes before a fork() whose child allocates: if a thread is
 * in AddressSanitizer's allocator (gcc 12), the child waits for that allocator's lock for ever. */
void wait_until_others_sleep(void);

#endif
