/* A store for tests, in the place of daemon/ledger/store.c: it keeps fds in this process, and hands
 * them to the next broker. Linked in, it is what every broker of the program has.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_FAKE_STORE_H
#define BFC_TESTS_FAKE_STORE_H

#include "daemon/ledger/store.h"

struct store *fake_store_new(void);
struct store *fake_store_free(struct store *s); /* closes all; takes NULL */

/* The process that had it is no more: all that is kept can be taken. The ledger is a copy of
 * what it is now. */
void fake_store_die(struct store *s);

/* Forgets an extent, as a keeper must not; asserts that it was there. */
void fake_store_lose(struct store *s, uint64_t key);

#endif
