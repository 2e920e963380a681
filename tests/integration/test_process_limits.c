/* What a client's own process lacks ends one request and not the session; and what no limit ever holds is
 * refused before anything is given back for it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "tests/integration/tools.h"

/* ---- limits of the process --------------------------------------------------- */

static uint64_t address_space_bytes(void)
{
        unsigned long long n_pages = 0;
        FILE *f = fopen("/proc/self/statm", "re");

        REQUIRE(f && fscanf(f, "%llu", &n_pages) == 1, "statm");
        fclose(f);
        return n_pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

static void limit_address_space(rlim_t n_bytes)
{
        struct rlimit limit;

        REQUIRE(getrlimit(RLIMIT_AS, &limit) == 0, "%s", strerror(errno));
        limit.rlim_cur = n_bytes < limit.rlim_max ? n_bytes : limit.rlim_max;
        REQUIRE(setrlimit(RLIMIT_AS, &limit) == 0, "%s", strerror(errno));
}

/* In partition 'small' a region takes 8 MiB of address space, in 'train' 128 MiB. */
static void live_in_little_space(void *arg)
{
        struct bfc_tenant_usage usage = { .struct_size = sizeof(usage) };
        bfc_client *client = child_client_open(arg, NULL);
        void *p, *q;
        int r;

        limit_address_space(address_space_bytes() + 40 * MIB);
        for (int i = 0; i < 3; i++) {
                r = bfc_malloc(client, 10 * MIB, &p);
                REQUIRE(r == -ENOMEM, "%d: %s", r, bfc_last_error());
                REQUIRE(strstr(bfc_last_error(), "RLIMIT_AS"), "%s", bfc_last_error());
                REQUIRE(strstr(bfc_last_error(), "ulimit -v"), "%s", bfc_last_error());
                REQUIRE(bfc_usage(client, NULL, &usage) == 0, "%s", bfc_last_error());
                REQUIRE(usage.bytes_in_use == 0, "%llu bytes in use", (unsigned long long)usage.bytes_in_use);
        }
        r = bfc_malloc_in(client, "small", 1 * MIB, &q);
        REQUIRE(r == 0, "%d: %s", r, bfc_last_error());
        memset(q, 1, 1 * MIB);
        limit_address_space(RLIM_INFINITY);
        r = bfc_malloc(client, 10 * MIB, &p);
        REQUIRE(r == 0, "%d: %s", r, bfc_last_error());
        memset(p, 2, 10 * MIB);
        REQUIRE(all_bytes_are(q, 1 * MIB, 1), "another block");
        REQUIRE(bfc_free(client, p) == 0 && bfc_free(client, q) == 0, "%s", bfc_last_error());
        bfc_disconnect(client);
}

TEST(too_little_address_space_refuses_a_request)
{
        static const struct rig_config config = {
                .partitions = "      - {name: train, limit: 128MiB}\n"
                              "      - {name: small, limit: 8MiB}\n",
                .tenants = TENANT_OF("red", "@UID@",
                                     "{partition: train, limit: 64MiB}, {partition: small, limit: 4MiB}"),
        };
        struct rig *rig;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
        puts("# skipped: a sanitizer needs its address space");
        return;
#endif
        rig = rig_start(&config);
        child_join(child_start(live_in_little_space, rig->socket));
        rig_stop(rig);
}

/* No fd has a number any more, until release_fds(). */
static void take_all_fds(struct rlimit *ret_before)
{
        int at = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0);
        struct rlimit tight;

        REQUIRE(at >= 0 && close(at) == 0 && getrlimit(RLIMIT_NOFILE, ret_before) == 0, "%s",
                strerror(errno));
        tight = *ret_before;
        tight.rlim_cur = (rlim_t)at;
        REQUIRE(setrlimit(RLIMIT_NOFILE, &tight) == 0, "%s", strerror(errno));
}

static void require_no_fds(bfc_client *client, int r)
{
        struct bfc_tenant_usage usage = { .struct_size = sizeof(usage) };

        REQUIRE(r == -EMFILE, "%d: %s", r, bfc_last_error());
        REQUIRE(strstr(bfc_last_error(), "ulimit -n"), "%s", bfc_last_error());
        REQUIRE(bfc_usage(client, NULL, &usage) == 0, "%s", bfc_last_error());
        REQUIRE(usage.bytes_in_use == 4 * MIB, "%llu bytes in use", (unsigned long long)usage.bytes_in_use);
}

/* The first block's extents are there already. Few numbers are enough for a block of many extents, but not at
 * once. */
static void live_without_fds(void *arg)
{
        bfc_client *client = child_client_open(arg, NULL);
        struct rlimit before;
        void *mine, *p = NULL;
        int r = bfc_malloc_flags(client, NULL, 4 * MIB, BFC_WHOLE, &mine);

        REQUIRE(r == 0 && bfc_publish(client, mine, "mine") == 0, "%s", bfc_last_error());
        pattern_write(mine, 4 * MIB, 1);
        take_all_fds(&before);
        for (int i = 0; i < 3; i++)
                require_no_fds(client, bfc_malloc(client, (size_t)(10 + 30 * i) * MIB, &p));
        require_no_fds(client, bfc_malloc_async(client, 10 * MIB, 0, &p));
        REQUIRE(!p, "a block that was refused");
        setrlimit(RLIMIT_NOFILE, &(struct rlimit){ before.rlim_cur, before.rlim_max });
        for (int i = 0; i < 2; i++) {
                r = bfc_malloc(client, 70 * MIB, &p);
                REQUIRE(r == 0, "%d: %s", r, bfc_last_error());
                pattern_write(p, 70 * MIB, 2);
                REQUIRE(pattern_holds(p, 70 * MIB, 2), "bytes were lost");
                REQUIRE(bfc_free(client, p) == 0 && bfc_trim(client, SIZE_MAX) == 0, "%s", bfc_last_error());
        }
        REQUIRE(pattern_holds(mine, 4 * MIB, 1), "another block");
        REQUIRE(bfc_free(client, mine) == 0, "%s", bfc_last_error());
        bfc_disconnect(client);
}

TEST(too_few_fds_refuse_a_request)
{
        static const struct rig_config config = {
                .partitions = "      - {name: train, limit: 128MiB}\n",
                .tenants = TENANT("red", "@UID@", "train, limit: 96MiB"),
        };
        struct rig *rig;

        if (rig_device() == ON_CUDA_IPC)
                return; /* its extents have no fds */
        rig = rig_start(&config);
        child_join(child_start(live_without_fds, rig->socket));
        ck_assert(WAIT_FOR(rig_count(rig).n_sessions == 0, SETTLE_MS));
        ck_assert_uint_eq(rig_stats(rig, "red", "train").bytes_in_use, 0);
        rig_stop(rig);
}

/* Nor is there a session: the hello's fds were not received. */
static void connect_without_fds(void *arg)
{
        struct bfc_options options = { .struct_size = sizeof(options), .socket = arg };
        int spare = dup(STDERR_FILENO), n_before;
        struct rlimit before;
        bfc_client *client;

        REQUIRE(spare >= 0, "%s", strerror(errno));
        take_all_fds(&before);
        close(spare); /* for the socket */
        REQUIRE(bfc_connect(&options, &client) == -EMFILE, "%s", bfc_last_error());
        REQUIRE(strstr(bfc_last_error(), "ulimit -n"), "%s", bfc_last_error());
        n_before = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0);
        REQUIRE(n_before == spare, "%d is open", spare);
        close(n_before);
        setrlimit(RLIMIT_NOFILE, &before);
        REQUIRE(bfc_connect(&options, &client) == 0, "%s", bfc_last_error());
        bfc_disconnect(client);
}

TEST(too_few_fds_for_a_session)
{
        struct rig *rig = rig_start(&(struct rig_config){ 0 });

        child_join(child_start(connect_without_fds, rig->socket));
        rig_stop(rig);
}

/* ---- what can never be granted ------------------------------------------------- */

static void keep_idle(bfc_client *client, uint64_t n_bytes)
{
        void *p;

        ck_assert_ok(bfc_malloc(client, n_bytes, &p));
        ck_assert_ok(bfc_free(client, p));
        ck_assert_uint_ge(client_stats(client).bytes_idle, n_bytes);
}

static void assert_refused_for_nothing(struct rig *rig, bfc_client *client, bfc_client *other,
                                       uint64_t n_bytes, int error)
{
        struct bfc_malloc_options how = { .struct_size = sizeof(how), .wait_ms = 600000 };
        uint64_t n_idle = client_stats(client).bytes_idle, n_others = client_stats(other).bytes_idle;
        uint64_t n_refusals = rig_stats(rig, "red", "train").num_refusals;
        void *p;

        ck_assert_int_eq(bfc_malloc(client, n_bytes, &p), error);
        ck_assert_msg(has_stats(bfc_last_error()), "%s", bfc_last_error());
        ck_assert_int_eq(bfc_malloc_with(client, n_bytes, &how, &p), error);
        ck_assert_uint_eq(client_stats(client).bytes_idle, n_idle);
        ck_assert_uint_eq(client_stats(other).bytes_idle, n_others);
        ck_assert_uint_eq(rig_stats(rig, "red", "train").num_refusals, n_refusals + 2);
}

TEST(an_impossible_request_keeps_the_cache)
{
        static const struct rig_config config = {
                .tenants = TENANT("red", "@UID@", "train, limit: 96MiB")
                        TENANT("blue", "@UID@", "train, limit: 64MiB, reserve: 64MiB"),
        };
        struct rig *rig = rig_start(&config);
        bfc_client *client, *other;

        setenv("BFC_CACHE", "on", 1);
        client = client_open(rig, "red", NULL);
        other = client_open(rig, "red", NULL);
        keep_idle(client, 20 * MIB);
        keep_idle(other, 8 * MIB);
        assert_refused_for_nothing(rig, client, other, 100 * MIB, -EDQUOT); /* beyond the limit */
        assert_refused_for_nothing(rig, client, other, 112 * MIB, -EDQUOT); /* the rest is below it */
        assert_refused_for_nothing(rig, client, other, 70 * MIB, -ENOMEM);  /* blue's reserve */
        bfc_disconnect(other);
        bfc_disconnect(client);
        rig_stop(rig);
}
