/* A client holds the lock of its extent's inode for as long as it likes, and its tenant gives the
 * extent up: other tenants grow and release, the daemon ends, and its successor starts and serves,
 * all while the lock is held. The extent stays charged until the client has closed it, also by the successor.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "tests/held_lock.h"
#include "tests/integration/kept.h"
#include "tests/integration/tools.h"

#define LONG_MS 60000
#define EXTENT  (2 * MIB)

static const struct rig_config two_tenants = {
        .top = "timeouts: {quarantine: 100ms}\n",
        .tenants =
                TENANT("red", "@UID@", "train, limit: 64MiB") TENANT("blue", "@UID@", "train, limit: 64MiB"),
};

struct holder {
        char socket[96];
        struct gate held, go;
        pid_t pid;
};

/* Is given an extent, holds its lock, gives it up, and stays. */
static void hold(void *arg)
{
        struct holder *h = arg;
        struct raw *raw;
        Bfcd__Block block;
        struct held_lock lock;
        int fd;

        raw = raw_connect(h->socket, "red");
        REQUIRE(raw, "no session");
        REQUIRE(raw_malloc(raw, 0, EXTENT, &block) == 0, "%s", raw_refusal());
        fd = dup(raw->extents[0].fd);
        REQUIRE(pwrite(fd, "x", 1, EXTENT - 1) == 1, "%d", errno);
        REQUIRE(held_lock_take(&lock, fd), "%d", errno);
        REQUIRE(raw_free(raw, block.block_id) == 0, "%s", raw_refusal());
        REQUIRE(raw_goodbye(raw) == 0, "%s", raw_refusal());
        raw_close(raw);
        gate_open(&h->held);
        REQUIRE(gate_wait(&h->go, 2 * LONG_MS), "not in time");
        held_lock_release(&lock);
        close(fd);
}

/* Waits until its extent is to be destroyed, and cannot be. */
static struct holder *holder_start(struct rig *rig)
{
        struct holder *h = calloc(1, sizeof(*h));

        ck_assert_ptr_nonnull(h);
        strcpy(h->socket, rig->socket);
        h->held = gate_new();
        h->go = gate_new();
        rig->forgiven = "unreclaimed";
        h->pid = child_start(hold, h);
        ck_assert(gate_wait(&h->held, LONG_MS));
        ck_assert(WAIT_FOR(rig_stats(rig, "red", "train").bytes_unreclaimed == EXTENT, LONG_MS));
        return h;
}

static void holder_end(struct holder *h)
{
        gate_open(&h->go);
        child_join(h->pid);
        free(h);
}

/* It grows and shrinks by the same amount. */
static void assert_grows(struct rig *rig)
{
        struct raw *raw = session_open(rig->socket, "blue");
        Bfcd__Block block;

        ck_assert_msg(raw_malloc(raw, 0, 3 * EXTENT, &block) == 0, "%s", raw_refusal());
        ck_assert_int_eq(raw_free(raw, block.block_id), 0);
        session_end(raw);
        ck_assert(WAIT_FOR(rig_charge(rig, "blue", "train") == 0, LONG_MS));
}

static bool can_hold(void)
{
        if (held_lock_can())
                return true;
        printf("# skipped: this process may not use userfaultfd(2)\n");
        return false;
}

static const int signals[] = { SIGTERM, SIGKILL };

LOOP_TEST(a_held_lock_delays_no_other_client, 2)
{
        struct holder *h;
        struct kept *k;

        if (!can_hold())
                return;
        k = kept_start(&two_tenants);
        h = holder_start(k->rig);
        assert_grows(k->rig);
        for (int i = 0; i < 2; i++) {
                kept_restart(k, signals[_i]);
                ck_assert_uint_eq(rig_charge(k->rig, "red", "train"), EXTENT); /* it is not back */
                assert_grows(k->rig);
        }
        holder_end(h);
        ck_assert(WAIT_FOR(rig_charge(k->rig, "red", "train") == 0, LONG_MS));
        kept_stop(k);
}

/* No service manager keeps anything for a successor. */
TEST(a_held_lock_delays_no_successor)
{
        struct holder *h;
        struct rig *rig;

        if (!can_hold())
                return;
        rig = rig_start(&two_tenants);
        h = holder_start(rig);
        assert_grows(rig);
        rig->admin = raw_close(rig->admin);
        rig_terminate(rig);
        holder_end(h);
        rig_discard(rig);
}

/* The partition is full with what cannot be destroyed: a neighbour is refused, in time. */
TEST(a_missing_reply_is_not_waited_for)
{
        static const struct rig_config full = {
                .top = "timeouts: {quarantine: 100ms, reclaim: 60m}\n",
                .partitions = "      - {name: train, limit: 6MiB, growth: on-demand}\n",
                .tenants = TENANT("red", "@UID@", "train, limit: 6MiB")
                        TENANT("blue", "@UID@", "train, limit: 6MiB"),
        };
        struct holder *h;
        struct raw *raw;
        struct rig *rig;
        Bfcd__Block block;

        if (!can_hold())
                return;
        rig = rig_start(&full);
        h = holder_start(rig);
        raw = session_open(rig->socket, "blue");
        ck_assert_int_eq(raw_malloc(raw, 0, 3 * EXTENT, &block), -ENOMEM);
        ck_assert_msg(raw_malloc(raw, 0, 2 * EXTENT, &block) == 0, "%s", raw_refusal());
        raw_close(raw);
        holder_end(h);
        ck_assert(WAIT_FOR(rig_charge(rig, "red", "train") == 0, LONG_MS));
        rig_stop(rig);
}

/* bfcctl says what the drain waits for. */
TEST(a_drain_names_what_it_waits_for)
{
        struct holder *h;
        struct rig *rig;
        char *out = NULL;

        if (!can_hold())
                return;
        rig = rig_start(&two_tenants);
        h = holder_start(rig);
        {

                ck_assert_int_eq(ctl(rig->admin_socket, WORDS("drain", "host"), &out, NULL), 0);
                ck_assert_msg(strstr(out, "unreclaimed"), "%s", out);
                free(out);
                holder_end(h);
                ck_assert(WAIT_FOR(rig_charge(rig, "red", "train") == 0, LONG_MS));
                ck_assert_int_eq(ctl(rig->admin_socket, WORDS("resume", "host"), NULL, NULL), 0);
        }
        rig_stop(rig);
}

int main(void)
{
        return harness_cases_with("held_lock", 3 * TEST_TIMEOUT, NULL);
}
