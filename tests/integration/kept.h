/* A rig whose daemon is kept by the stand-in for the service manager: it is restarted and
 * killed, and clients go on. It ends as every rig does, with no session and no charge
 * left; and with nothing in the ledger, and nothing stored but the ledger and what
 * partitions have in advance.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_KEPT_H
#define BFC_TESTS_KEPT_H

#include <signal.h>

#include "tests/integration/harness.h"
#include "tests/manager/stand_in.h"

struct kept {
        struct rig *rig; /* its pid and admin session are those of the daemon that runs */
        struct stand_in *manager;
        char notify[96];
        const char *argv[8];
        unsigned n_bad; /* bad ends that the test caused */
};

/* Starts it and waits until it is ready. Freed by kept_stop() or kept_discard(). */
struct kept *kept_start(const struct rig_config *config);

/* SIGTERM or SIGKILL, and the next one is ready. */
void kept_restart(struct kept *k, int signal);

/* A restart in two parts, with no daemon between them. */
void kept_away(struct kept *k, int signal);
void kept_back(struct kept *k);

/* Waits until the daemon of this start, or of a later one, is ready. */
void kept_await(struct kept *k, unsigned n_starts);

/* The test has failed: says what the daemon, its keepers and the stand-in wait for, and what the daemon wrote. */
void kept_give_up(struct kept *k, const char *why);

/* Waits for a daemon that is ready, also where several fail before it. */
void kept_ready(struct kept *k);

/* Waits until no session is left, asserts all of the above, and ends it. */
void kept_stop(struct kept *k);
void kept_discard(struct kept *k);

struct stand_in_state kept_state(struct kept *k);
bool kept_logged(const struct kept *k, const char *part);
unsigned kept_count_logged(const struct kept *k, const char *part); /* lines */

/* ---- sessions by hand ---------------------------------------------------------- */

/* A session that can be resumed, with events; asserts. */
struct raw *kept_raw(struct kept *k, const char *tenant);

/* Another connection that resumes the session of `from`, which stays open. The result of raw_hello(). */
int kept_raw_try(struct kept *k, const struct raw *from, struct raw **ret);

/* A resume that succeeds: closes `from`. The list of its blocks is still to be sent. */
struct raw *kept_raw_back(struct kept *k, struct raw *from);

/* It still has these blocks, and all extents that `raw_extents` was given; asserts. */
struct raw_held kept_held(const struct raw *raw_extents, const uint64_t *block_ids, size_t n_blocks);
void raw_held_free(struct raw_held *held); /* of kept_held() */

/* ---- what must be the same before and after ---------------------------------- */

/* Lists as text, a line each, without what changes by itself (ages); the caller frees it.
 * Sessions are those of tenants. */
char *kept_tenants(struct kept *k);
char *kept_partitions(struct kept *k); /* lifetime peaks and refusals alone */
char *kept_sessions(struct kept *k);
char *kept_blocks(struct kept *k);
char *kept_shared(struct kept *k);

struct picture {
        char *tenants, *sessions, *blocks, *shared;
};
struct picture picture_take(struct kept *k);
/* Waits until it is so again; asserts. */
void picture_assert_same(struct kept *k, const struct picture *before);
void picture_free(struct picture *p);

/* A session in the lists; the text of its state, "" where there is no such session. */
const char *kept_session_state(struct kept *k, uint64_t session_id, char ret[16]);
/* All sessions of tenants are in this state, and there are so many. */
bool kept_all_are(struct kept *k, const char *state, unsigned n_sessions);

#endif
