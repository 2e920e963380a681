/* What one client, user or tenant may take of the daemon itself, and that the
 * next one does not feel it. (Sessions and blocks are in test_identity and
 * test_quota, connections without a hello and fds in test_bad_input.)
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "tests/integration/tools.h"

#define READ_MS       30000
#define GENEROUS_MS   SETTLE_MS
#define N_FLOODERS    4u
#define N_HELLOS      50u
#define LIST_REQUESTS 240u

static const struct rig_config hasty = {
        .top = "timeouts: {quarantine: 200ms}\n",
        .moves_clock = true,
        .tenants = TENANT("red", "@UID@", "train, limit: 64MiB"),
};

static int ask_for_list(struct raw *raw)
{
        Bfcd__List list = BFCD__LIST__INIT;
        Bfcd__Request request = REQUEST(LIST, list, &list);

        list.kind = BFCD__LIST__KIND__BLOCKS;
        return raw_send(raw, &request);
}

/* A session whose replies the daemon cannot get rid of: more than the socket holds. */
static struct raw *glutton(struct rig *rig)
{
        struct raw *raw = session_open(rig->socket, "red");
        Bfcd__Block block;

        for (unsigned i = 0; i < 200; i++)
                ck_assert_int_eq(raw_malloc(raw, 0, 256, &block), 0);
        for (unsigned i = 0; i < LIST_REQUESTS; i++)
                if (ask_for_list(raw) != 0)
                        break;
        return raw;
}

static void stop_after_end(struct rig *rig)
{
        if (rig_device() == ON_HOST) {
                rig->forgiven = "quarantine";
                rig_stop(rig);
        } else { /* this process lives on, and has a GPU's memory */
                rig_terminate(rig);
                rig_discard(rig);
        }
}

TEST(a_session_that_reads_nothing_is_disconnected)
{
        struct rig *rig = rig_start(&hasty);
        struct raw *raw = glutton(rig);
        struct rig_counts counts;

        ck_assert_msg(WAIT_FOR((rig_pass(rig, READ_MS / 10),
                                rig_logged(rig, "the client did not read its replies within 30 s")),
                               SETTLE_MS),
                      "it still has its session");
        ck_assert(WAIT_FOR((counts = rig_count(rig), counts.n_sessions == counts.n_quarantined), SETTLE_MS));
        raw_close(raw);
        stop_after_end(rig);
}

/* In the steps of a daemon that looks now and then. */
static void pass_slowly(struct rig *rig, unsigned ms)
{
        for (unsigned i = 0; i < 10; i++)
                rig_pass(rig, ms / 10);
}

/* Takes a little now and then, for much longer than it may take nothing. */
TEST(a_session_that_reads_slowly_is_served)
{
        struct rig *rig = rig_start(&hasty);
        struct raw *raw = glutton(rig);
        unsigned n_asked = LIST_REQUESTS;

        for (unsigned i = 0; i < n_asked; i++) {
                Bfcd__Reply *reply;

                rig_pass(rig, READ_MS / 100);
                ck_assert_int_eq(raw_receive(raw, RAW_TIMEOUT_MS, &reply), 0);
                ck_assert_int_eq(reply->body_case, BFCD__REPLY__BODY_LIST);
                bfcd__reply__free_unpacked(reply, NULL);
                if (i < LIST_REQUESTS / 2 && ask_for_list(raw) == 0)
                        n_asked++;
        }
        pass_slowly(rig, 2 * READ_MS); /* it has read all: there is nothing that it does not take */
        ck_assert_int_eq(raw_goodbye(raw), 0);
        raw_close(raw);
        rig_stop(rig);
}

/* A stopped process does no harm to itself as long as its socket holds its replies. */
static void ask_and_stop(void *arg)
{
        struct raw *raw = raw_connect(arg, "red");
        Bfcd__Usage usage = BFCD__USAGE__INIT;
        Bfcd__Request request = REQUEST(USAGE, usage, &usage);
        Bfcd__Reply *reply;

        REQUIRE(raw, "no session");
        for (unsigned i = 0; i < 20; i++, request.id = 0)
                REQUIRE(raw_send(raw, &request) == 0, "usage");
        raise(SIGSTOP);
        for (unsigned i = 0; i < 20; i++) {
                REQUIRE(raw_receive(raw, RAW_TIMEOUT_MS, &reply) == 0, "its session has ended");
                bfcd__reply__free_unpacked(reply, NULL);
        }
        REQUIRE(raw_goodbye(raw) == 0, "goodbye");
        raw_close(raw);
}

RIG_TEST(a_stopped_client_continues, hasty)
{
        pid_t pid = child_start(ask_and_stop, rig->socket);
        int status;

        ck_assert_int_eq(waitpid(pid, &status, WUNTRACED), pid);
        ck_assert(WIFSTOPPED(status));
        pass_slowly(rig, 2 * READ_MS);
        kill(pid, SIGCONT);
        child_join(pid);
}

/* ---- accept ---------------------------------------------------------------- */

struct flood {
        const char *socket;
        _Atomic uint64_t *n_connects;
};

static void storm(void *arg)
{
        struct flood *flood = arg;

        for (;;) {
                struct raw *raw;

                if (raw_open(flood->socket, &raw) == 0)
                        raw_close(raw);
                atomic_fetch_add(flood->n_connects, 1);
        }
}

/* Other users connect and disconnect as fast as they can, and each hello of a member is answered meanwhile.
 * How long that takes is measured by bench-neighbours. */
RIG_TEST(hellos_pass_a_flood_of_connections, hasty)
{
        struct flood flood = { rig->socket, shared_memory(sizeof(*flood.n_connects)) };
        uid_t uid = is_root() ? OTHER_UID : getuid();
        pid_t pids[N_FLOODERS];

        for (unsigned i = 0; i < N_FLOODERS; i++)
                pids[i] = child_start_as(uid, is_root() ? OTHER_UID : getgid(), storm, &flood);
        for (unsigned i = 0; i < N_HELLOS; i++) {
                uint64_t before = atomic_load(flood.n_connects);
                struct raw *raw;

                ck_assert(WAIT_FOR(atomic_load(flood.n_connects) > before, GENEROUS_MS));
                raw = raw_connect(rig->socket, "red");
                ck_assert_msg(raw, "hello %u: %s", i, raw_refusal());
                session_end(raw);
        }
        for (unsigned i = 0; i < N_FLOODERS; i++)
                child_kill(pids[i]);
}
