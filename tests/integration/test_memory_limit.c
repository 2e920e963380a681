/* Memory limits of the daemon's control group: growth beyond them is refused with a sentence, and a
 * growth during which the kernel ran out of memory is not repeated at once. The control groups are files of this
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

#include "tests/integration/kept.h"
#include "tests/integration/tools.h"

#define GROUPS  "/sys/fs/cgroup"
#define LONG_MS 60000

static const struct rig_config two_tenants = {
        .top = "timeouts: {quarantine: 100ms}\n",
        .tenants =
                TENANT("red", "@UID@", "train, limit: 64MiB") TENANT("blue", "@UID@", "train, limit: 64MiB"),
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

/* What the daemon reads in /proc/vmstat. false: it cannot be replaced. */
static bool put_oom_kills(unsigned n)
{
        FILE *f = fopen(GROUPS "/vmstat", "we");

        ck_assert_ptr_nonnull(f);
        fprintf(f, "nr_free_pages 1\noom_kill %u\n", n);
        ck_assert_int_eq(fclose(f), 0);
        return mount(GROUPS "/vmstat", "/proc/vmstat", NULL, MS_BIND, NULL) == 0;
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

TEST(growth_beyond_the_memory_limit_is_refused)
{
        struct rig *rig;
        struct raw *raw;
        Bfcd__Block block, more;

        if (!have_groups())
                return;
        rig = rig_start(&two_tenants);
        put("memory.current", 100 * MIB);
        put("memory.max", 100 * MIB + 40 * MIB); /* 16 MiB of it are for the kernel and the daemon */
        raw = session_open(rig->socket, "red");
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

/* What is more than may be had is warned of: where a config is checked, and at the start. */
TEST(a_device_above_the_memory_limit_is_warned_of)
{
        struct rig *rig;
        char *text, *said = NULL;

        if (!have_groups())
                return;
        rig = rig_folder();
        rig_rewrite_config(rig, &two_tenants);
        put("memory.max", 256 * MIB);
        ck_assert_int_eq(program_check(rig->config_path, &said), 0);
        ck_assert_str_eq(said, "");
        free(said);
        put("memory.max", 255 * MIB);
        ck_assert_int_eq(program_check(rig->config_path, &said), 0);
        text_has(said, "warning: size 256MiB is more than the memory limit");
        rig_discard(rig);
        rig = rig_start(&two_tenants);
        text = rig_log(rig);
        text_has(text, "warning: size 256MiB is more than the memory limit");
        rig_stop(rig);
}

/* Kills the daemon in the middle of a growth: it reads a limit that does not come. A FIFO can be opened for
 * writing without waiting only when it has a reader. n_oom_kills: what the kernel counts afterwards. */
static void kill_while_it_grows(struct kept *k, unsigned n_oom_kills)
{
        struct raw *red = session_open(k->rig->socket, "red");
        Bfcd__Malloc malloc_ = BFCD__MALLOC__INIT;
        Bfcd__Request request = REQUEST(MALLOC, malloc, &malloc_);
        int writer = -1;

        (void)unlink(GROUPS "/memory.max");
        ck_assert_int_eq(mkfifo(GROUPS "/memory.max", 0600), 0);
        malloc_.n_bytes = 5 * MIB;
        ck_assert_int_eq(raw_send(red, &request), 0);
        ck_assert(WAIT_FOR((writer = open(GROUPS "/memory.max", O_WRONLY | O_NONBLOCK | O_CLOEXEC)) >= 0,
                           LONG_MS));
        kept_away(k, SIGKILL);
        (void)close(writer);
        raw_close(red);
        ck_assert(put_oom_kills(n_oom_kills));
        put("memory.max", 1024 * MIB);
        kept_back(k);
}

TEST(a_failed_growth_is_not_repeated)
{
        struct kept *k;
        struct raw *red, *blue;
        Bfcd__Block block;

        if (!have_groups())
                return;
        ck_assert(put_oom_kills(3));
        k = kept_start(&two_tenants);
        kill_while_it_grows(k, 3); /* an operator's kill -9, say */
        red = session_open(k->rig->socket, "red");
        ck_assert_msg(raw_malloc(red, 0, MIB, &block) == 0, "%s", raw_refusal());
        raw_close(red);
        kill_while_it_grows(k, 4);
        ck_assert(kept_logged(
                k, "tenant 'red' in partition 'train': the kernel killed a process for lack of memory "
                   "while the previous daemon allocated "));
        red = raw_connect(k->rig->socket, "red");
        blue = raw_connect(k->rig->socket, "blue");
        ck_assert(red && blue);
        ck_assert_int_eq(raw_malloc(red, 0, 5 * MIB, &block), -ENOMEM);
        ck_assert_msg(strstr(raw_refusal(), "the kernel killed a process"), "%s", raw_refusal());
        ck_assert_msg(raw_malloc(blue, 0, 5 * MIB, &block) == 0, "%s", raw_refusal());
        raw_close(red);
        raw_close(blue);
        ck_assert(WAIT_FOR(rig_charge(k->rig, "blue", "train") == 0, LONG_MS));
        kept_restart(k, SIGTERM); /* one that did not die so */
        ck_assert_uint_eq(kept_count_logged(k, "the kernel killed a process"), 2); /* with the refusal */
        red = session_open(k->rig->socket, "red");
        ck_assert_msg(raw_malloc(red, 0, 5 * MIB, &block) == 0, "%s", raw_refusal());
        raw_close(red);
        kept_stop(k);
}

int main(void)
{
        return harness_cases_with("memory_limit", 3 * TEST_TIMEOUT, NULL);
}
