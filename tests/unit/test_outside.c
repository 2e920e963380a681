/* Memory outside of bfcd, as the devices tell it of processes: in which session it counts, and when it is logged. Without
 * sockets.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/base/log.h"
#include "daemon/session/outside.h"
#include "tests/suite.h"
#include "tests/unit/gpus.h"
#include "tests/unit/leases.h"
#include "tests/unit/still_clock.h"

static const char config_text[] =
        "devices:\n"
        "  - id: cuda:0\n"
        "    headroom: 0\n"
        "    partitions: [{name: one, limit: 64MiB}, {name: two, limit: 64MiB}]\n"
        "  - id: cuda:1\n"
        "    headroom: 0\n"
        "    partitions: [{name: other, limit: 100%%}]\n"
        "tenants:\n"
        "  - {name: a, match: {uid: 1}, quotas: [{partition: one, limit: 32MiB}, {partition: two, max_sessions: 400}, {partition: other}]}\n"
        "  - {name: b, match: {uid: 2}, quotas: [{partition: one}]}\n"
        "  - {name: c, match: {uid: %u, gid: %u}, quotas: [{partition: two}]}\n";

enum { ONE, TWO, OTHER }; /* a's */

static void setup(void)
{
        static char text[sizeof(config_text) + 20];

        snprintf(text, sizeof(text), config_text, geteuid(), getegid()); /* c is that of this process */
        gpus_start(text, false);
        log_open(LOG_LEVEL_INFO);
        a1->session->who.pid = 100; /* all peers are this process */
        b1->session->who.pid = 200;
}

FIXTURE(outside, setup, gpus_end);

/* Each device has the same. */
static void look(const struct device_use *uses, size_t n_uses)
{
        for (size_t i = 0; i < 2; i++) {
                gpus[i].uses = uses;
                gpus[i].n_uses = n_uses;
        }
        outside_look(b);
        settle();
}

#define LOOK(...)                                                                                            \
        look((struct device_use[]){ __VA_ARGS__ },                                                           \
             sizeof((struct device_use[]){ __VA_ARGS__ }) / sizeof(struct device_use))

static uint64_t row_bytes(const struct peer *p)
{
        const Bfcd__ListReply *page = list_page(admin, BFCD__LIST__KIND__SESSIONS, 0);

        for (size_t i = 0; i < page->n_sessions; i++)
                if (page->sessions[i]->session_id == p->session->id)
                        return page->sessions[i]->bytes_outside;
        ck_abort_msg("no such session");
}

static uint64_t tenant_bytes(const char *tenant, const char *partition)
{
        const Bfcd__ListReply *page = list_page(admin, BFCD__LIST__KIND__TENANTS, 0);

        for (size_t i = 0; i < page->n_tenants; i++)
                if (strcmp(page->tenants[i]->tenant, tenant) == 0 &&
                    strcmp(page->tenants[i]->partition, partition) == 0)
                        return page->tenants[i]->stats->bytes_outside;
        ck_abort_msg("no such quota");
}

static void charge(struct peer *p, uint32_t partition, uint64_t n_bytes)
{
        uint64_t id = peer_charge(p, partition, n_bytes, 0);

        settle();
        ck_assert_int_eq(peer_error(p, id), 0);
}

TEST_OF(outside, direct_charges_are_known)
{
        charge(a1, TWO, 6 * MIB);
        LOOK({ 50, MIB }, { 100, 10 * MIB }, { 200, 3 * MIB });
        /* 10 MiB on each GPU, of which 6 are charged on the first. */
        ck_assert_uint_eq(row_bytes(a1), 14 * MIB);
        ck_assert_uint_eq(tenant_bytes("a", "one"), 0);
        ck_assert_uint_eq(tenant_bytes("a", "two"), 4 * MIB);
        ck_assert_uint_eq(tenant_bytes("a", "other"), 10 * MIB);
        ck_assert_uint_eq(row_bytes(b1), 3 * MIB);
        ck_assert_uint_eq(
                list_page(admin, BFCD__LIST__KIND__PARTITIONS, 0)->partitions[0]->stats->bytes_outside,
                3 * MIB);
        /* What is charged and not taken is not negative. */
        LOOK({ 100, 5 * MIB });
        ck_assert_uint_eq(row_bytes(a1), 5 * MIB);
        ck_assert_uint_eq(tenant_bytes("a", "two"), 0);
        ck_assert_uint_eq(row_bytes(b1), 0);
        /* Devices that do not tell. */
        look(NULL, 0);
        ck_assert_uint_eq(outside_bytes(a1->session), UINT64_MAX);
        ck_assert_uint_eq(tenant_bytes("a", "other"), 0);
}

/* Which is not 0. */
static void no_answer(int error)
{
        gpus[0].uses_error = gpus[1].uses_error = error;
        outside_look(b);
        settle();
        gpus[0].uses_error = gpus[1].uses_error = 0;
}

TEST_OF(outside, a_device_that_does_not_answer_changes_nothing)
{
        LOOK({ 100, 10 * MIB }, { 200, 3 * MIB });
        no_answer(-EAGAIN);
        ck_assert_uint_eq(row_bytes(a1), 20 * MIB);
        ck_assert_uint_eq(tenant_bytes("b", "one"), 3 * MIB);
        no_answer(-ENOMEM);
        ck_assert_uint_eq(outside_bytes(a1->session), 20 * MIB);
        ck_assert_uint_eq(tenant_bytes("a", "other"), 10 * MIB);
        no_answer(-ENODEV);
        ck_assert_uint_eq(outside_bytes(a1->session), UINT64_MAX);
        ck_assert_uint_eq(tenant_bytes("a", "other"), 0);
}

/* The process counts once. */
TEST_OF(outside, several_sessions_of_a_process)
{
        struct peer *second = open_gpu_session(1, false);

        second->session->who.pid = 100;
        charge(second, ONE, 2 * MIB);
        LOOK({ 100, 10 * MIB });
        ck_assert_uint_eq(row_bytes(second), 8 * MIB);
        ck_assert_uint_eq(row_bytes(a1), 10 * MIB); /* on the other GPU */
        ck_assert_uint_eq(tenant_bytes("a", "one"), 8 * MIB);
        second = peer_free(second);
        settle();
        LOOK({ 100, 10 * MIB });
        ck_assert_uint_eq(row_bytes(a1), 20 * MIB);
}

/* More than one answer has. */
TEST_OF(outside, many_processes)
{
        static struct device_use uses[3 * DEVICE_USES];

        for (size_t i = 0; i < 3 * DEVICE_USES; i++)
                uses[i] = (struct device_use){ 60 + i, (i + 1) * MIB };
        look(uses, 3 * DEVICE_USES);
        ck_assert_uint_eq(row_bytes(a1), 2 * 41 * MIB);
        ck_assert_uint_eq(row_bytes(b1), 141 * MIB);
}

TEST_OF(outside, much_is_logged_once)
{
        LOOK({ 200, OUTSIDE_LOG_BYTES - 1 });
        ck_assert_uint_eq(count_log("outside of bfcd"), 0);
        for (int i = 0; i < 3; i++)
                LOOK({ 200, OUTSIDE_LOG_BYTES + (uint64_t)i });
        ck_assert_uint_eq(
                count_log("process 200 (peer) of tenant 'b' has 1.0 GiB on device 'cuda:0' outside of bfcd"),
                1);
        ck_assert_uint_eq(count_log("outside of bfcd"), 1);
}

TEST_OF(outside, a_lost_device_has_none)
{
        LOOK({ 100, 10 * MIB });
        ck_assert_uint_eq(row_bytes(a1), 20 * MIB);
        b->devices[1].is_lost = true;
        outside_look(b);
        settle();
        ck_assert_uint_eq(row_bytes(a1), 10 * MIB);
        ck_assert_uint_eq(tenant_bytes("a", "other"), 0);
        b->devices[0].is_lost = true;
        outside_look(b);
        settle();
        ck_assert_uint_eq(outside_bytes(a1->session), UINT64_MAX);
        ck_assert_uint_eq(tenant_bytes("a", "one"), 0);
}

static uint64_t lease_bytes(void)
{
        const Bfcd__ListReply *page = list_page(admin, BFCD__LIST__KIND__LEASES, 0);

        ck_assert_uint_eq(page->n_leases, 1);
        return page->leases[0]->stats->bytes_outside;
}

static pid_t start_process(void)
{
        pid_t pid = fork();

        if (pid == 0 && prctl(PR_SET_PDEATHSIG, SIGKILL) == 0)
                pause();
        ck_assert_int_gt(pid, 0);
        return pid;
}

/* They count as if they had one. */
TEST_OF(outside, processes_without_a_session)
{
        const struct wanted wanted = { .name = "l", .tenant = "c", .partition = "two", .limit = 2 * MIB };
        struct wanted w = wanted;
        pid_t pids[2];

        for (int i = 0; i < 2; i++) {
                pids[i] = start_process();
        }
        w.pid = (uint64_t)pids[0];
        ck_assert_int_eq(peer_error(admin, ask_create(admin, &w)), 0);
        for (int i = 0; i < 2; i++) {
                LOOK({ (uint64_t)pids[0], GIB });
                ck_assert_uint_eq(tenant_bytes("c", "two"), GIB);
                ck_assert_uint_eq(lease_bytes(), GIB);
        }
        no_answer(-EAGAIN);
        ck_assert_uint_eq(lease_bytes(), GIB);
        LOOK({ (uint64_t)pids[0], GIB }); /* it is logged once, see below */
        LOOK({ 100, MIB }, { (uint64_t)pids[1], 3 * MIB });
        ck_assert_uint_eq(tenant_bytes("c", "two"), 3 * MIB);
        ck_assert_uint_eq(lease_bytes(), 0);
        ck_assert_uint_eq(row_bytes(a1), 2 * MIB);
        ck_assert_uint_eq(
                count_log("(no session) of tenant 'c' has 1.0 GiB on device 'cuda:0' outside of bfcd"), 1);
        ck_assert_uint_eq(count_log("outside of bfcd"), 1);
        /* It has one now. */
        b1->session->who.pid = pids[1];
        LOOK({ (uint64_t)pids[1], 3 * MIB });
        ck_assert_uint_eq(tenant_bytes("c", "two"), 0);
        ck_assert_uint_eq(row_bytes(b1), 3 * MIB);
        for (int i = 0; i < 2; i++) {
                kill(pids[i], SIGKILL);
                waitpid(pids[i], NULL, 0);
        }
        LOOK({ (uint64_t)pids[0], GIB });
        ck_assert_uint_eq(tenant_bytes("c", "two"), 0);
}

/* In several turns of the loop. */
TEST_OF(outside, many_sessions)
{
        static struct device_use uses[600];
        struct peer *peers[300];

        for (size_t i = 0; i < 300; i++) {
                uint64_t id;

                peers[i] = peer_new(b, 1, false);
                id = peer_hello(peers[i], "", "two");
                settle();
                ck_assert_int_eq(peer_error(peers[i], id), 0);
                peers[i]->session->who.pid = 1000 + (pid_t)i;
                uses[i] = (struct device_use){ 1000 + i, (i + 1) * MIB };
        }
        look(uses, 300);
        for (size_t i = 0; i < 300; i++)
                ck_assert_uint_eq(outside_bytes(peers[i]->session), 2 * (i + 1) * MIB);
        ck_assert_uint_eq(tenant_bytes("a", "two"), 300 * 301 / 2 * MIB);
        gpus[0].n_uses = 299;
        outside_look(b);
        broker_poll(b); /* the first part of it */
        ck_assert_uint_gt(broker_n_pending(b), 0);
        peers[0] = peer_free(peers[0]);
        settle();
        ck_assert_uint_eq(outside_bytes(peers[298]->session), 2 * 299 * MIB);
        ck_assert_uint_eq(outside_bytes(peers[299]->session), 300 * MIB);
        ck_assert_uint_eq(tenant_bytes("a", "two"), (299 * 300 / 2 - 1) * MIB);
        for (size_t i = 0; i < 300; i++)
                peer_free(peers[i]);
        settle();
}

/* The largest are looked at. */
TEST_OF(outside, many_processes_without_a_session)
{
        static struct device_use uses[3 * DEVICE_USES];
        pid_t pid = start_process();

        for (size_t i = 0; i < 3 * DEVICE_USES; i++) /* processes that are not there */
                uses[i] = (struct device_use){ INT32_MAX - 3 * DEVICE_USES + i, (i + 1) * MIB };
        uses[0] = (struct device_use){ (uint64_t)pid, GIB };
        look(uses, 3 * DEVICE_USES);
        ck_assert_uint_eq(tenant_bytes("c", "two"), GIB);
        uses[0].n_bytes = MIB / 2;
        look(uses, 3 * DEVICE_USES);
        ck_assert_uint_eq(tenant_bytes("c", "two"), 0);
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
}

int main(void)
{
        return suite_main("outside");
}
