/* One broker and its sessions, for the tests that look at them: the fixture, what must succeed, and the
 * checks of all invariants.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_SESSIONS_H
#define BFC_TESTS_SESSIONS_H

#include "tests/peer.h"

extern struct broker *b;
extern struct config *config;

/* The broker of this config; the end checks that nothing is left. */
void sessions_start(const char *config_text);
void sessions_start_sticky(const char *config_text); /* peer_broker_sticky() */
void sessions_end(void);

void check(void);  /* all invariants */
void settle(void); /* runs what is due, and checks them */

struct peer *say_hello(struct peer *p); /* which must be accepted; p */
struct peer *open_session(uid_t uid);
struct peer *open_admin_session(void);

uint64_t must_malloc(struct peer *p, uint32_t partition, uint64_t n_bytes); /* the block's id */
const Bfcd__Block *must_malloc_block(struct peer *p, uint32_t partition, uint64_t n_bytes);
void must_free(struct peer *p, uint64_t block_id);
void must_close(struct peer *p); /* the session and its process */

/* The request must be refused with this error; the message. */
const char *refusal_of(struct peer *p, uint64_t id, int error);

/* Of a partition of 400 MiB, all for uid 1: a block may take more extents than one message has. */
struct broker *open_large(struct config **ret_config);

/* Catches what is logged from now on; the text until now, and the log is as before. */
void log_catch(void);
const char *log_caught(void);

/* A page of a list. */
const Bfcd__ListReply *list_page(struct peer *p, Bfcd__List__Kind kind, uint64_t cursor);

#endif
