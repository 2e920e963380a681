/* The programs that libbfcclient(3) shows: they run, and say what they should.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/integration/harness.h"

static const struct rig_config one_tenant = {
        .partitions = "      - {name: train, limit: 64MiB, growth: on-demand}\n",
        .tenants = "  - name: red\n"
                   "    match: {uid: [@UID@]}\n"
                   "    quotas: [{partition: train, limit: 32MiB}]\n",
};

/* Standard output, the caller's. */
static char *run_example(const char *name)
{
        char path[512];
        const char *argv[] = { "/bin/sh", "-c", "exec \"$0\" </dev/null", path, NULL };
        char *out, *err;
        int status;

        snprintf(path, sizeof(path), "%s/example-%s", getenv("BFC_EXAMPLES"), name);
        status = program_run(argv, &out, &err);
        ck_assert_msg(status == 0 && err[0] == '\0', "%s: %d, %s", name, status, err);
        free(err);
        return out;
}

START_TEST(examples_run)
{
        static const char *const quiet[] = { "default", "poll", "pool" };
        struct rig *rig = rig_start(&one_tenant);
        unsigned long long n;
        char *out;

        if (!getenv("BFC_EXAMPLES")) {
                rig_stop(rig);
                return;
        }
        setenv("BFC_SOCKET", rig->socket, 1);
        unsetenv("BFC_CACHE");
        for (size_t i = 0; i < sizeof(quiet) / sizeof(quiet[0]); i++) {
                out = run_example(quiet[i]);
                ck_assert_str_eq(out, "");
                free(out);
        }
        out = run_example("cache");
        ck_assert_int_eq(sscanf(out, "1000 allocations, %llu requests", &n), 1);
        ck_assert_uint_lt(n, 10);
        free(out);
        out = run_example("figures");
        ck_assert_msg(strncmp(out, "this process: 1024 bytes in use, ", 33) == 0, "%s", out);
        ck_assert_ptr_nonnull(strstr(out, "\nred in train: "));
        ck_assert_ptr_nonnull(strstr(out, "\nthe block: 1024 bytes at "));
        free(out);
        unsetenv("BFC_SOCKET");
        rig_stop(rig);
}
END_TEST

int main(void)
{
        const TTest *const tests[] = { examples_run, NULL };

        return harness_main(harness_suite("examples", tests));
}
