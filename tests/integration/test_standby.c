/* Standby memory of a real daemon: jobs are given what was ready, nothing of another tenant's is in it, and
 * it is made again after each growth, reload, drain and restart.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "tests/integration/kept.h"

#define READY_BYTES (64 * MIB)
#define JOB_BYTES   (48 * MIB)
#define MAX_FDS     1024
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

static struct kept *start(void)
{
        struct kept *k = kept_start(&stands_by);

        wait_until_ready(k->rig, READY_BYTES);
        rig_look_at_rest(k->rig);
        return k;
}

static void stop(struct kept *k)
{
        wait_until_ready(k->rig, READY_BYTES);
        kept_stop(k);
}

static char *ctl(struct rig *rig, const char *command, const char *argument, const char *option)
{
        const char *argv[] = { program_bfcctl(), "--socket", rig->admin_socket, command, argument,
                               option,           NULL };
        char *out = NULL, *err = NULL;
        int status = program_run(argv, &out, &err);

        ck_assert_msg(status == 0, "bfcctl %s: %d: %s", command, status, err);
        free(err);
        return out;
}

static void write_config(struct rig *rig, const struct rig_config *config)
{
        char *text = rig_config_text(rig, config);

        rig_write_config(rig, text);
        free(text);
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
        struct raw *raw = raw_connect(rig->socket, tenant);
        ino_t inodes[MAX_FDS];
        Bfcd__Block block;

        ck_assert_ptr_nonnull(raw);
        look_at_fds(rig, inodes);
        ck_assert_msg(raw_malloc(raw, 0, JOB_BYTES, &block) == 0, "%s", raw_refusal());
        ck_assert_uint_eq(raw->n_extents, JOB_BYTES / (2 * MIB));
        for (size_t i = 0; rig_device() == ON_HOST && i < raw->n_extents; i++)
                ck_assert(has_inode(inodes, raw->extents[i].fd));
        if (rig_device() == ON_HOST)
                write_all(raw);
        ck_assert_int_eq(raw_goodbye(raw), 0);
        raw_close(raw);
}

/* ---- the tests ------------------------------------------------------------ */

START_TEST(jobs_are_given_what_is_ready)
{
        struct kept *k = start();

        for (unsigned i = 0; i < 4; i++) {
                run(k->rig, i % 2 ? "red" : "blue");
                wait_until_ready(k->rig, READY_BYTES);
        }
        stop(k);
}
END_TEST

START_TEST(it_is_shown)
{
        struct kept *k = start();
        char *text = ctl(k->rig, "status", "-w", NULL);

        ck_assert_ptr_nonnull(strstr(text, " STANDBY "));
        ck_assert_ptr_nonnull(strstr(text, " 64.0 MiB "));
        free(text);
        text = ctl(k->rig, "status", "--json", NULL);
        ck_assert_ptr_nonnull(strstr(text, "\"bytes_standby\": 67108864"));
        free(text);
        stop(k);
}
END_TEST

/* A tenant can have all of the partition, and then nothing is ready. */
START_TEST(a_tenant_has_all)
{
        struct kept *k = start();
        struct raw *raw = raw_connect(k->rig->socket, "red");
        Bfcd__Block block;

        ck_assert_ptr_nonnull(raw);
        ck_assert_msg(raw_malloc(raw, 0, 128 * MIB, &block) == 0, "%s", raw_refusal());
        wait_until_ready(k->rig, 0);
        ck_assert_int_eq(raw_goodbye(raw), 0);
        raw_close(raw);
        stop(k);
}
END_TEST

START_TEST(a_reload_changes_it)
{
        struct kept *k = start();
        char *said;

        write_config(k->rig, &stands_by_little);
        said = ctl(k->rig, "reload", NULL, NULL);
        ck_assert_ptr_nonnull(strstr(said, "': standby is 16MiB, was 64MiB\n"));
        free(said);
        wait_until_ready(k->rig, 16 * MIB);
        write_config(k->rig, &stands_by);
        free(ctl(k->rig, "reload", NULL, NULL));
        stop(k);
}
END_TEST

START_TEST(a_drain_has_it_back)
{
        struct kept *k = start();

        free(ctl(k->rig, "drain", rig_device_id(), "--wait"));
        ck_assert_uint_eq(ready_bytes(k->rig), 0);
        free(ctl(k->rig, "resume", rig_device_id(), NULL));
        wait_until_ready(k->rig, READY_BYTES);
        run(k->rig, "red");
        stop(k);
}
END_TEST

/* Nothing of it is with the service manager: that has the ledger alone. */
START_TEST(a_restart)
{
        struct kept *k = start();

        ck_assert_uint_eq(kept_state(k).n_stored, 1);
        kept_restart(k, _i == 0 ? SIGTERM : SIGKILL);
        wait_until_ready(k->rig, READY_BYTES);
        run(k->rig, "red");
        stop(k);
}
END_TEST

int main(void)
{
        Suite *suite = suite_create("standby");
        TCase *tc = tcase_create("standby");

        tcase_set_timeout(tc, TEST_TIMEOUT);
        tcase_add_test(tc, jobs_are_given_what_is_ready);
        tcase_add_test(tc, it_is_shown);
        tcase_add_test(tc, a_tenant_has_all);
        tcase_add_test(tc, a_reload_changes_it);
        tcase_add_test(tc, a_drain_has_it_back);
        tcase_add_loop_test(tc, a_restart, 0, 2);
        suite_add_tcase(suite, tc);
        return harness_main(suite);
}
