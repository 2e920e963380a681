/* What one client, user or tenant may take of the daemon itself, and that the
 * next one does not feel it. (Sessions and blocks are in test_identity and
 * test_quota, connections without a hello and fds in test_bad_input.)
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "tests/integration/harness.h"

#define READ_MS       500
#define HELLO_MS      1000 /* far more than a hello takes, far less than a crowd would cost */
#define N_STRANGERS   4u
#define N_HELLOS      50u
#define LIST_REQUESTS 240u

static const struct rig_config hasty = {
        .top = "timeouts: {quarantine: 200ms, read: 500ms}\n",
        .tenants = "  - name: red\n"
                   "    match: {uid: [@UID@]}\n"
                   "    quotas: [{partition: train, limit: 64MiB}]\n",
};

static void ask_for_list(struct raw *raw)
{
        Bfcd__Request request = BFCD__REQUEST__INIT;
        Bfcd__List list = BFCD__LIST__INIT;

        request.body_case = BFCD__REQUEST__BODY_LIST;
        request.list = &list;
        list.kind = BFCD__LIST__KIND__BLOCKS;
        ck_assert_int_eq(raw_send(raw, &request), 0);
}

/* A session whose replies the daemon cannot get rid of: more than the socket holds. */
static struct raw *glutton(struct rig *rig)
{
        struct raw *raw = raw_connect(rig->socket, "red");
        Bfcd__Block block;

        ck_assert_ptr_nonnull(raw);
        for (unsigned i = 0; i < 200; i++)
                ck_assert_int_eq(raw_malloc(raw, 0, 256, &block), 0);
        for (unsigned i = 0; i < LIST_REQUESTS; i++)
                ask_for_list(raw);
        return raw;
}

static bool log_has(const struct rig *rig, const char *words)
{
        char *log = rig_log(rig);
        bool found = log && strstr(log, words);

        free(log);
        return found;
}

START_TEST(who_reads_nothing_is_ended)
{
        struct rig *rig = rig_start(&hasty);
        struct raw *raw = glutton(rig);

        ck_assert_msg(WAIT_FOR(log_has(rig, "it takes none of its replies"), READ_MS + SETTLE_MS),
                      "it still has its session");
        ck_assert_uint_eq(rig_count(rig).n_sessions, rig_count(rig).n_quarantined);
        raw_close(raw);
        if (rig_device() == ON_HOST) {
                rig->forgiven = "quarantine";
                rig_stop(rig);
        } else { /* this process lives on, and has a GPU's memory */
                rig_terminate(rig);
                rig_discard(rig);
        }
}
END_TEST

/* Slow is not dead: a little now and then, for much longer than it may take nothing, and all
 * replies come. */
START_TEST(who_reads_slowly_is_served)
{
        struct rig *rig = rig_start(&hasty);
        struct raw *raw = glutton(rig);
        unsigned n_asked = LIST_REQUESTS;

        for (unsigned i = 0; i < n_asked; i++) {
                Bfcd__Reply *reply;

                usleep(READ_MS * 4);
                ck_assert_int_eq(raw_receive(raw, RAW_TIMEOUT_MS, &reply), 0);
                ck_assert_int_eq(reply->body_case, BFCD__REPLY__BODY_LIST);
                bfcd__reply__free_unpacked(reply, NULL);
                if (i < 2 * LIST_REQUESTS && ++n_asked)
                        ask_for_list(raw);
        }
        usleep(READ_MS * 1500); /* it has read all: there is nothing that it does not take */
        ck_assert_int_eq(raw_goodbye(raw), 0);
        raw_close(raw);
        rig_stop(rig);
}
END_TEST

/* A stopped process does no harm to itself as long as its socket holds its replies. */
static void ask_and_stop(void *arg)
{
        struct raw *raw = raw_connect(arg, "red");
        Bfcd__Request request = BFCD__REQUEST__INIT;
        Bfcd__Usage usage = BFCD__USAGE__INIT;
        Bfcd__Reply *reply;

        REQUIRE(raw, "no session");
        request.body_case = BFCD__REQUEST__BODY_USAGE;
        request.usage = &usage;
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

START_TEST(who_is_stopped_goes_on)
{
        struct rig *rig = rig_start(&hasty);
        pid_t pid = child_start(ask_and_stop, rig->socket);
        int status;

        ck_assert_int_eq(waitpid(pid, &status, WUNTRACED), pid);
        ck_assert(WIFSTOPPED(status));
        usleep(READ_MS * 2000);
        kill(pid, SIGCONT);
        child_join(pid);
        rig_stop(rig);
}
END_TEST

/* ---- accept ---------------------------------------------------------------- */

static void storm(void *arg)
{
        for (;;) {
                struct raw *raw;

                if (raw_open(arg, &raw) == 0)
                        raw_close(raw);
        }
}

/* Strangers connect and disconnect as fast as they can; a member's hello takes no longer than
 * ever. */
START_TEST(a_flood_of_strangers_delays_no_hello)
{
        struct rig *rig = rig_start(&hasty);
        uid_t uid = is_root() ? OTHER_UID : getuid();
        pid_t pids[N_STRANGERS];
        int64_t worst_ms = 0;
        unsigned n_in = 0;

        for (unsigned i = 0; i < N_STRANGERS; i++)
                pids[i] = child_start_as(uid, is_root() ? OTHER_UID : getgid(), storm, rig->socket);
        for (unsigned i = 0; i < N_HELLOS; i++) {
                int64_t start = clock_ms();
                struct raw *raw = raw_connect(rig->socket, "red");

                if (raw && clock_ms() - start > worst_ms)
                        worst_ms = clock_ms() - start;
                n_in += raw != NULL;
                ck_assert(!raw || raw_goodbye(raw) == 0);
                raw_close(raw);
        }
        for (unsigned i = 0; i < N_STRANGERS; i++)
                child_kill(pids[i]);
        ck_assert_uint_eq(n_in, N_HELLOS);
        ck_assert_int_le(worst_ms, HELLO_MS);
        printf("# the slowest of %u hellos took %lld ms\n", N_HELLOS, (long long)worst_ms);
        rig_stop(rig);
}
END_TEST

int main(void)
{
        const TTest *const tests[] = {
                who_reads_nothing_is_ended,
                who_reads_slowly_is_served,
                who_is_stopped_goes_on,
                a_flood_of_strangers_delays_no_hello,
                NULL,
        };

        return harness_main(harness_suite("admission", tests));
}
