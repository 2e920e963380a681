/* Standby memory of a real daemon: jobs are given what was ready, nothing of another tenant's is in it, and
 * it is made again after each growth, reload, drain and restart.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "tests/integration/kept.h"
#include "tests/keeper_caller.h"
#include "tests/integration/tools.h"

#define READY_BYTES (64 * MIB)
#define JOB_BYTES   (48 * MIB)
#define MAX_FDS     1024
#define PAUSE_MS    10000 /* after a restart sessions come first */
#define PARTITIONS  "      - {name: train, limit: 128MiB}\n"
#define TENANTS                                                                                              \
        "  - name: red\n    match: {uid: @UID@}\n    quotas: [{partition: train}]\n"                         \
        "  - name: blue\n    match: {uid: @UID@}\n    quotas: [{partition: train}]\n"

static const struct rig_config stands_by = { .device = "    standby: 64MiB\n",
                                             .partitions = PARTITIONS,
                                             .tenants = TENANTS };
static const struct rig_config stands_by_little = { .device = "    standby: 16MiB\n",
                                                    .partitions = PARTITIONS,
                                                    .tenants = TENANTS };

/* ---- what the daemon says and has ------------------------------------------- */

static uint64_t ready_bytes(struct rig *rig)
{
        Bfcd__Reply *reply = NULL;
        uint64_t n_bytes;

        ck_assert_int_eq(raw_list(rig->admin, BFCD__LIST__KIND__STATUS, 0, &reply), 0);
        n_bytes = reply->list->status->devices[0]->bytes_standby;
        bfcd__reply__free_unpacked(reply, NULL);
        return n_bytes;
}

static void wait_until_ready(struct rig *rig, uint64_t n_bytes)
{
        ck_assert(WAIT_FOR(ready_bytes(rig) == n_bytes, SETTLE_MS));
}

static struct kept *start_with(const struct rig_config *config)
{
        struct kept *k = kept_start(config);

        wait_until_ready(k->rig, READY_BYTES);
        rig_look_at_rest(k->rig);
        return k;
}

static struct kept *start(void)
{
        return start_with(&stands_by);
}

static void stop(struct kept *k)
{
        wait_until_ready(k->rig, READY_BYTES);
        kept_stop(k);
}

/* Inodes of what the daemon has open, by its fds; 0: none. */
static void look_at_fds(struct rig *rig, ino_t ret[static MAX_FDS])
{
        for (int fd = 0; fd < MAX_FDS; fd++) {
                struct stat st;
                char path[64];

                snprintf(path, sizeof(path), "/proc/%d/fd/%d", (int)rig->pid, fd);
                ret[fd] = stat(path, &st) == 0 ? st.st_ino : 0;
        }
}

static bool has_inode(const ino_t inodes[static MAX_FDS], int fd)
{
        struct stat st;

        ck_assert_int_eq(fstat(fd, &st), 0);
        for (int i = 0; i < MAX_FDS; i++)
                if (inodes[i] == st.st_ino)
                        return true;
        return false;
}

/* On the host: all bytes are zero, and then none. */
static void write_all(const struct raw *raw)
{
        for (size_t i = 0; i < raw->n_extents; i++) {
                const struct raw_extent *e = &raw->extents[i];
                unsigned char *at = mmap(NULL, e->n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, e->fd, 0);

                ck_assert_ptr_ne(at, MAP_FAILED);
                ck_assert_uint_eq(at[0], 0);
                ck_assert_int_eq(memcmp(at, at + 1, e->n_bytes - 1), 0);
                memset(at, 0xa5, e->n_bytes);
                munmap(at, e->n_bytes);
        }
}

/* A job of the tenant begins, is given what was ready, and ends. */
static void run(struct rig *rig, const char *tenant)
{
        struct raw *raw = session_open(rig->socket, tenant);
        ino_t inodes[MAX_FDS];
        Bfcd__Block block;

        look_at_fds(rig, inodes);
        ck_assert_msg(raw_malloc(raw, 0, JOB_BYTES, &block) == 0, "%s", raw_refusal());
        ck_assert_uint_eq(raw->n_extents, JOB_BYTES / (2 * MIB));
        for (size_t i = 0; rig_device() == ON_HOST && i < raw->n_extents; i++)
                ck_assert(has_inode(inodes, raw->extents[i].fd));
        if (rig_device() == ON_HOST)
                write_all(raw);
        session_end(raw);
}

/* ---- the tests ------------------------------------------------------------ */

TEST(jobs_receive_standby_memory)
{
        struct kept *k = start();

        for (unsigned i = 0; i < 4; i++) {
                run(k->rig, i % 2 ? "red" : "blue");
                wait_until_ready(k->rig, READY_BYTES);
        }
        stop(k);
}

TEST(standby_memory_is_listed)
{
        struct kept *k = start();
        char *text = ctl_text(k->rig, WORDS("status", "-w"));

        ck_assert_ptr_nonnull(strstr(text, " STANDBY "));
        text_has(text, " 64.0 MiB ");
        ctl_says(k->rig, WORDS("status", "--json"), "\"bytes_standby\": 67108864");
        stop(k);
}

/* A tenant can have all of the partition, and then nothing is ready. */
TEST(a_tenant_can_use_all_standby_memory)
{
        struct kept *k = start();
        struct raw *raw = session_open(k->rig->socket, "red");
        Bfcd__Block block;

        ck_assert_msg(raw_malloc(raw, 0, 128 * MIB, &block) == 0, "%s", raw_refusal());
        wait_until_ready(k->rig, 0);
        session_end(raw);
        stop(k);
}

TEST(a_reload_changes_the_size)
{
        struct kept *k = start();

        rig_rewrite_config(k->rig, &stands_by_little);
        ctl_says(k->rig, WORDS("reload"), "': standby is 16MiB, was 64MiB\n");
        wait_until_ready(k->rig, 16 * MIB);
        rig_rewrite_config(k->rig, &stands_by);
        ctl_says(k->rig, WORDS("reload"), "");
        stop(k);
}

TEST(a_drain_releases_the_memory)
{
        struct kept *k = start();

        ctl_says(k->rig, WORDS("drain", rig_device_id(), "--wait"), "");
        ck_assert_uint_eq(ready_bytes(k->rig), 0);
        ctl_says(k->rig, WORDS("resume", rig_device_id()), "");
        wait_until_ready(k->rig, READY_BYTES);
        run(k->rig, "red");
        stop(k);
}

/* Nothing of it is with the keeper: that has the ledger alone. */
LOOP_TEST(the_memory_after_a_restart, 2)
{
        struct rig_config config = stands_by;
        struct kept *k;

        config.moves_clock = true;
        k = start_with(&config);
        ck_assert_uint_eq(keeper_count_in(k->rig->folder), 1);
        kept_restart(k, _i == 0 ? SIGTERM : SIGKILL);
        rig_pass(k->rig, PAUSE_MS);
        wait_until_ready(k->rig, READY_BYTES);
        run(k->rig, "red");
        stop(k);
}
