/* The fixture of clients that talk to the stand-in of fake_server.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_SERVER_RIG_H
#define BFC_TESTS_SERVER_RIG_H

#include "tests/unit/calls.h"
#include "tests/unit/fake_server.h"

extern struct fake_server *server;

/* Starts the server; $BFC_CACHE is `cache`, or unset where that is NULL. No client yet. */
void server_start(const char *cache);
void server_end(void); /* disconnects the client, too; no fd may be left */

bfc_client *open_client(uint64_t flags, uint64_t idle_bytes, uint64_t slab_bytes);

unsigned n_blocks(void); /* that the server counts */

#endif
