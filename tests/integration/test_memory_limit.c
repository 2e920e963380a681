/* Memory limits of the daemon's control group: growth beyond them is refused with a sentence, and a
 * growth during which a daemon ended is not repeated at once. The control groups are files of this
 * test, in a mount namespace of its own; so it needs root.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "tests/integration/kept.h"

#define GROUPS  "/sys/fs/cgroup"
#define LONG_MS 60000

static const struct rig_config two_tenants = {
        .top = "timeouts: {quarantine: 100ms}\n",
        .tenants = "  - name: red\n"
                   "    match: {uid: @UID@}\n"
                   "    quotas: [{partition: train, limit: 64MiB}]\n"
                   "  - name: blue\n"
                   "    match: {uid: @UID@}\n"
                   "    quotas: [{partition: train, limit: 64MiB}]\n",
};

/* false: said why not. */
static bool have_groups(void)
{
        if (access(GROUPS, F_OK) == 0 && unshare(CLONE_NEWNS) == 0 &&
            mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0 &&
            mount("groups", GROUPS, "tmpfs", 0, "mode=0755") == 0)
                return true;
        printf("# skipped: this process may not mount a folder of its own over " GROUPS "\n");
        return false;
}

/* In its place at once: the daemon may read meanwhile. */
static void put(const char *name, uint64_t n_bytes)
{
        char path[96];
        FILE *f = fopen(GROUPS "/new", "we");

        ck_assert_ptr_nonnull(f);
        fprintf(f, "%llu\n", (unsigned long long)n_bytes);
        ck_assert_int_eq(fclose(f), 0);
        snprintf(path, sizeof(path), GROUPS "/%s", name);
        ck_assert_int_eq(rename(GROUPS "/new", path), 0);
}

START_TEST(growth_beyond_it_is_refused)
{
        struct rig *rig;
        struct raw *raw;
        Bfcd__Block block, more;

        if (!have_groups())
                return;
        rig = rig_start(&two_tenants);
        put("memory.current", 100 * MIB);
        put("memory.max", 100 * MIB + 40 * MIB); /* 16 MiB of it are for the kernel and the daemon */
        raw = raw_connect(rig->socket, "red");
        ck_assert_ptr_nonnull(raw);
        ck_assert_msg(raw_malloc(raw, 0, 20 * MIB, &block) == 0, "%s", raw_refusal());
        put("memory.current", 124 * MIB);
        ck_assert_int_eq(raw_malloc(raw, 0, 20 * MIB, &more), -ENOMEM);
        ck_assert_msg(strstr(raw_refusal(), "memory limit of the daemon's control group"), "%s",
                      raw_refusal());
        ck_assert_int_eq(raw_free(raw, block.block_id), 0);
        ck_assert_msg(raw_malloc(raw, 0, 20 * MIB, &block) == 0, "%s", raw_refusal()); /* it is there */
        put("memory.max", 200 * MIB);
        ck_assert_msg(raw_malloc(raw, 0, 20 * MIB, &more) == 0, "%s", raw_refusal());
        put("memory.high", 130 * MIB);
        ck_assert_int_eq(raw_malloc(raw, 0, 10 * MIB, &more), -ENOMEM);
        raw_close(raw);
        ck_assert(WAIT_FOR(rig_charge(rig, "red", "train") == 0, LONG_MS));
        rig_stop(rig);
}
END_TEST

/* What is more than may be had is warned of: where a config is checked, and at the start. */
START_TEST(a_larger_device_is_warned_of)
{
        struct rig *rig;
        char *text, *said = NULL;

        if (!have_groups())
                return;
        rig = rig_folder();
        text = rig_config_text(rig, &two_tenants);
        rig_write_config(rig, text);
        free(text);
        put("memory.max", 256 * MIB);
        ck_assert_int_eq(program_check(rig->config_path, &said), 0);
        ck_assert_str_eq(said, "");
        free(said);
        put("memory.max", 255 * MIB);
        ck_assert_int_eq(program_check(rig->config_path, &said), 0);
        ck_assert_msg(strstr(said, "warning: size 256MiB is more than the memory limit"), "%s", said);
        free(said);
        rig_discard(rig);
        rig = rig_start(&two_tenants);
        text = rig_log(rig);
        ck_assert_msg(strstr(text, "warning: size 256MiB is more than the memory limit"), "%s", text);
        free(text);
        rig_stop(rig);
}
END_TEST

/* Kills the daemon in the middle of a growth: it reads a limit that does not come. */
static void kill_while_it_grows(struct kept *k)
{
        struct raw *red = raw_connect(k->rig->socket, "red");
        Bfcd__Request request = BFCD__REQUEST__INIT;
        Bfcd__Malloc malloc_ = BFCD__MALLOC__INIT;

        ck_assert_ptr_nonnull(red);
        (void)unlink(GROUPS "/memory.max");
        ck_assert_int_eq(mkfifo(GROUPS "/memory.max", 0600), 0);
        request.body_case = BFCD__REQUEST__BODY_MALLOC;
        request.malloc = &malloc_;
        malloc_.n_bytes = 5 * MIB;
        ck_assert_int_eq(raw_send(red, &request), 0);
        ck_assert(WAIT_FOR(rig_count(k->rig).bytes_pending > 0, LONG_MS));
        kept_away(k, SIGKILL);
        raw_close(red);
        put("memory.max", 1024 * MIB);
        kept_back(k);
}

START_TEST(a_growth_that_ended_two_daemons_is_not_repeated)
{
        struct kept *k;
        struct raw *red, *blue;
        Bfcd__Block block;

        if (!have_groups())
                return;
        k = kept_start(&two_tenants);
        kill_while_it_grows(k);
        ck_assert(kept_logged(
                k, "tenant 'red' in partition 'train': the previous daemon ended during an allocation "
                   "of 6 MiB"));
        red = raw_connect(k->rig->socket, "red");
        ck_assert_ptr_nonnull(red);
        ck_assert_msg(raw_malloc(red, 0, MIB, &block) == 0, "%s", raw_refusal());
        raw_close(red);
        kill_while_it_grows(k);
        ck_assert(
                kept_logged(k, "tenant 'red' in partition 'train': two daemons ended during an allocation"));
        red = raw_connect(k->rig->socket, "red");
        blue = raw_connect(k->rig->socket, "blue");
        ck_assert(red && blue);
        ck_assert_int_eq(raw_malloc(red, 0, 5 * MIB, &block), -ENOMEM);
        ck_assert_msg(strstr(raw_refusal(), "two daemons ended"), "%s", raw_refusal());
        ck_assert_msg(raw_malloc(blue, 0, 5 * MIB, &block) == 0, "%s", raw_refusal());
        raw_close(red);
        raw_close(blue);
        ck_assert(WAIT_FOR(rig_charge(k->rig, "blue", "train") == 0, LONG_MS));
        kept_restart(k, SIGTERM);                                        /* one that did not die so */
        ck_assert_uint_eq(kept_count_logged(k, "two daemons ended"), 2); /* with the refusal */
        red = raw_connect(k->rig->socket, "red");
        ck_assert_ptr_nonnull(red);
        ck_assert_msg(raw_malloc(red, 0, 5 * MIB, &block) == 0, "%s", raw_refusal());
        raw_close(red);
        kept_stop(k);
}
END_TEST

int main(void)
{
        Suite *suite = suite_create("memory_limit");
        TCase *t = tcase_create("memory_limit");

        tcase_set_timeout(t, 3 * TEST_TIMEOUT);
        tcase_add_test(t, growth_beyond_it_is_refused);
        tcase_add_test(t, a_larger_device_is_warned_of);
        tcase_add_test(t, a_growth_that_ended_two_daemons_is_not_repeated);
        suite_add_tcase(suite, t);
        return harness_main(suite);
}
