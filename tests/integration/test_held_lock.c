/* A client holds the lock of its extent's inode for as long as it likes, and its tenant gives the
 * extent up: other tenants grow and release, the daemon ends, and its successor starts and serves,
 * all while the lock is held. When it is not held any more, nothing is left and nothing charged.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
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
        struct gate begins, held, go, done;
        pid_t pid;
};

/* Is given an extent, holds its lock, gives it up, and stays. */
static void hold(void *arg)
{
        struct holder *h = arg;
        struct raw *raw = NULL;
        Bfcd__Block block;
        struct held_lock lock;
        char byte = 'x';
        int fd;

        if (gate_wait(&h->begins, LONG_MS))
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
        for (int64_t until_ms = clock_ms() + LONG_MS; byte != 0 && clock_ms() < until_ms;) {
                REQUIRE(pread(fd, &byte, 1, EXTENT - 1) == 1, "%d", errno);
                usleep(1000);
        }
        REQUIRE(byte == 0, "it was not emptied");
        gate_open(&h->done);
}

/* Waits until n_pending bytes, its extent's with them, are to be destroyed, and cannot be. It is in the lease, which is
 * made here; NULL: in none. */
static struct holder *holder_start_in(struct rig *rig, const char *lease, uint64_t n_pending)
{
        char pid[16];
        struct holder *h = calloc(1, sizeof(*h));

        ck_assert_ptr_nonnull(h);
        strcpy(h->socket, rig->socket);
        h->begins = gate_new();
        h->held = gate_new();
        h->go = gate_new();
        h->done = gate_new();
        h->pid = child_start(hold, h);
        snprintf(pid, sizeof(pid), "%d", (int)h->pid);
        if (lease)
                free(ctl_text(rig, WORDS("lease", "create", lease, "--tenant", "red", "--partition", "train",
                                         "--limit", "4MiB", "--pid", pid)));
        gate_open(&h->begins);
        ck_assert(gate_wait(&h->held, LONG_MS));
        ck_assert(WAIT_FOR(rig_count(rig).bytes_pending == n_pending, LONG_MS));
        return h;
}

static struct holder *holder_start(struct rig *rig)
{
        return holder_start_in(rig, NULL, EXTENT);
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
        k->rig->stuck_bytes = EXTENT;
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

/* No service manager keeps anything for a successor: the memory is emptied all the same, after the
 * daemon. */
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
        holder_end(h); /* which looks whether it is empty */
        rig_discard(rig);
}

/* Processes of that name whose parent is this one, the daemon or the helper; *ret_last: one of them, 0: there is none. */
static unsigned count_helpers(pid_t of, pid_t *ret_last)
{
        struct dirent *entry;
        unsigned n = 0;
        DIR *proc = opendir("/proc");

        ck_assert_ptr_nonnull(proc);
        *ret_last = 0;
        while ((entry = readdir(proc))) {
                char path[300], *text;
                int pid = 0, parent = 0;

                snprintf(path, sizeof(path), "/proc/%s/stat", entry->d_name);
                text = entry->d_name[0] >= '1' && entry->d_name[0] <= '9' ? file_text(path) : NULL;
                if (text && sscanf(text, "%d (bfcd-punch) %*c %d", &pid, &parent) == 2 && parent == of) {
                        *ret_last = pid;
                        n++;
                }
                free(text);
        }
        closedir(proc);
        return n;
}

static pid_t find_helper(pid_t daemon)
{
        pid_t found;

        (void)count_helpers(daemon, &found);
        return found;
}

/* A tenant with leases holds up one process of the helper, as a tenant without. */
TEST(held_locks_of_leases_are_of_one_tenant)
{
        static const char *const leases[] = { NULL, "one", "two" };
        enum { N = sizeof(leases) / sizeof(leases[0]) };
        struct holder *h[N];
        struct rig *rig;
        pid_t helper, child;

        if (!can_hold())
                return;
        rig = rig_start(&two_tenants);
        for (unsigned i = 0; i < N; i++)
                h[i] = holder_start_in(rig, leases[i], (i + 1) * EXTENT);
        assert_grows(rig); /* its requests came after theirs */
        helper = find_helper(rig->pid);
        ck_assert_int_gt(helper, 0);
        ck_assert_msg(WAIT_FOR(count_helpers(helper, &child) == 1, LONG_MS), "%u processes wait",
                      count_helpers(helper, &child));
        for (unsigned i = 0; i < N; i++)
                holder_end(h[i]);
        ck_assert(WAIT_FOR(rig_charge(rig, "red", "train") == 0, LONG_MS));
        rig_stop(rig);
}

TEST(a_helper_that_is_killed_is_replaced)
{
        struct holder *h;
        struct kept *k;
        pid_t helper, next = 0;

        if (!can_hold())
                return;
        k = kept_start(&two_tenants);
        h = holder_start(k->rig);
        helper = find_helper(k->rig->pid);
        ck_assert_int_gt(helper, 0);
        ck_assert_int_eq(kill(helper, SIGKILL), 0);
        ck_assert(WAIT_FOR((next = find_helper(k->rig->pid)) != 0 && next != helper, LONG_MS));
        ck_assert(kept_logged(k, "'bfcd-punch'"));
        assert_grows(k->rig);
        ck_assert_uint_eq(rig_charge(k->rig, "red", "train"), EXTENT);
        holder_end(h);
        ck_assert(WAIT_FOR(rig_charge(k->rig, "red", "train") == 0, LONG_MS));
        kept_stop(k);
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
                ck_assert_msg(strstr(out, "(being released)") && strstr(out, "red"), "%s", out);
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
