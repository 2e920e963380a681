/* See calls.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/calls.h"

#include <dirent.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/suite.h"

bfc_client *client;

void *get(size_t n_bytes)
{
        void *p = NULL;
        int r = bfc_malloc(client, n_bytes, &p);

        ck_assert_msg(r == 0, "bfc_malloc: %d: %s", r, bfc_last_error());
        ck_assert_ptr_nonnull(p);
        return p;
}

void put(void *p)
{
        int r = bfc_free(client, p);

        ck_assert_msg(r == 0, "bfc_free: %d: %s", r, bfc_last_error());
}

struct bfc_client_stats stats(void)
{
        struct bfc_client_stats s = { .struct_size = sizeof(s) };

        ck_assert_int_eq(bfc_stats(client, &s), 0);
        ck_assert_uint_eq(s.bytes_idle, s.bytes_reserved - s.bytes_in_use);
        ck_assert_uint_ge(s.peak_bytes_reserved, s.bytes_reserved);
        return s;
}

struct bfc_block_info info(const void *p)
{
        struct bfc_block_info i = { .struct_size = sizeof(i) };

        ck_assert_int_eq(bfc_block_info(client, p, &i), 0);
        return i;
}

struct bfc_tenant_usage usage_of(const char *partition)
{
        struct bfc_tenant_usage u = { .struct_size = sizeof(u) };

        ck_assert_msg(bfc_usage(client, partition, &u) == 0, "%s", bfc_last_error());
        ck_assert_uint_eq(u.struct_size, sizeof(u));
        return u;
}

void expect_error(int r, int expected, const char *part)
{
        ck_assert_int_eq(r, expected);
        ck_assert_msg(strstr(bfc_last_error(), part) != NULL, "\"%s\" does not say \"%s\"", bfc_last_error(),
                      part);
}

void expect_good_end(pid_t pid)
{
        int status = -1;

        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        ck_assert_int_eq(status, 0);
}

/* Its name in comm may contain spaces and parentheses. */
static bool thread_sleeps(const char *id)
{
        char path[300], line[512], *state = NULL;
        FILE *f;

        snprintf(path, sizeof(path), "/proc/self/task/%s/stat", id);
        f = fopen(path, "re");
        if (!f)
                return true; /* it has ended */
        if (fgets(line, sizeof(line), f))
                state = strrchr(line, ')');
        fclose(f);
        return state && strncmp(state, ") S", 3) == 0;
}

static bool others_sleep(void)
{
        DIR *folder = opendir("/proc/self/task");
        struct dirent *entry;
        bool sleep = true;

        ck_assert_ptr_nonnull(folder);
        while (sleep && (entry = readdir(folder)))
                if (entry->d_name[0] != '.' && atoi(entry->d_name) != gettid())
                        sleep = thread_sleeps(entry->d_name);
        closedir(folder);
        return sleep;
}

void wait_until_others_sleep(void)
{
        while (!others_sleep())
                usleep(1000);
}
