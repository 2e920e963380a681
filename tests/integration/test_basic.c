/* A job's ordinary life: connect, malloc, write, read, free, statistics, leave;
 * several partitions, clients and tenants; both kinds of growth.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "tests/integration/tools.h"
#include "tests/suite.h"

static const struct rig_config one_tenant; /* all defaults */

static const struct rig_config two_by_two = {
        .partitions = "      - {name: train, limit: 96MiB, growth: on-demand}\n"
                      "      - {name: serve, limit: 64MiB, growth: on-demand}\n",
        .tenants = "  - name: red\n"
                   "    match: {uid: [@UID@]}\n"
                   "    quotas:\n"
                   "      - {partition: train, limit: 48MiB}\n"
                   "      - {partition: serve, limit: 32MiB}\n"
                   "  - name: blue\n"
                   "    match: {uid: [@UID@]}\n"
                   "    quotas:\n"
                   "      - {partition: serve, limit: 16MiB}\n",
};

static struct bfc_block_info info_of(bfc_client *client, const void *ptr)
{
        struct bfc_block_info info = { .struct_size = sizeof(info) };

        ck_assert_ok(bfc_block_info(client, ptr, &info));
        return info;
}

/* ---- blocks --------------------------------------------------------------- */

static const size_t sizes[] = { 1,       255,         256,     257,           4096,        1000003,
                                2 * MIB, 2 * MIB + 1, 3 * MIB, 10 * MIB + 77, 8 * GRANULE, 4 * MIB - 256 };
#define N_SIZES (sizeof(sizes) / sizeof(sizes[0]))

static int note_tls(struct dl_phdr_info *info, size_t n_bytes, void *userdata)
{
        size_t *tls = userdata;

        (void)n_bytes;
        for (size_t i = 0; strstr(info->dlpi_name, "libbfcclient.so") && i < info->dlpi_phnum; i++)
                if (info->dlpi_phdr[i].p_type == PT_TLS)
                        *tls = info->dlpi_phdr[i].p_memsz;
        return 0;
}

/* A program that loads the library late has a few hundred bytes for it. */
TEST(static_tls_is_small)
{
        size_t n_bytes = 0;

        dl_iterate_phdr(note_tls, &n_bytes);
        ck_assert_uint_gt(n_bytes, 0);
        ck_assert_uint_le(n_bytes, 64);
}

RIG_TEST(blocks_of_many_sizes, one_tenant)
{
        bfc_client *client = client_open(rig, NULL, NULL);
        struct bfc_tenant_usage usage;
        uint64_t requested = 0, in_use = 0;
        void *blocks[N_SIZES];

        ck_assert_str_eq(bfc_tenant(client), "red");
        ck_assert_str_eq(bfc_partition(client), "train");
        for (size_t i = 0; i < N_SIZES; i++) {
                struct bfc_block_info info;

                ck_assert_ok(bfc_malloc(client, sizes[i], blocks + i));
                ck_assert_uint_eq((uintptr_t)blocks[i] % GRANULE, 0);
                pattern_write(blocks[i], sizes[i], i);
                info = info_of(client, blocks[i]);
                ck_assert_uint_eq(info.n_bytes, rounded(sizes[i]));
                ck_assert_uint_eq(info.n_requested, sizes[i]);
                ck_assert_uint_eq(info.offset % GRANULE, 0);
                ck_assert_uint_ne(info.block_id, 0);
                requested += sizes[i];
                in_use += rounded(sizes[i]);
        }
        for (size_t i = 0; i < N_SIZES; i++)
                ck_assert_msg(pattern_holds(blocks[i], sizes[i], i), "block %zu was overwritten", i);
        usage = client_usage(client, NULL);
        ck_assert_uint_eq(usage.bytes_limit, 64 * MIB);
        ck_assert_uint_eq(usage.bytes_in_use, in_use);
        ck_assert_uint_eq(usage.peak_bytes_in_use, in_use);
        ck_assert_uint_eq(usage.bytes_requested, requested);
        ck_assert_uint_eq(usage.num_blocks, N_SIZES);
        ck_assert_uint_eq(usage.num_sessions, 1);
        ck_assert_uint_ge(usage.bytes_reserved, in_use);
        ck_assert_uint_le(usage.bytes_reserved, usage.bytes_limit);
        ck_assert_uint_eq(rig_stats(rig, "red", "train").bytes_in_use, in_use);
        for (size_t i = 0; i < N_SIZES; i++) /* out of order */
                ck_assert_ok(bfc_free(client, blocks[(i * 5) % N_SIZES]));
        usage = client_usage(client, NULL);
        ck_assert_uint_eq(usage.bytes_in_use, 0);
        ck_assert_uint_eq(usage.bytes_requested, 0);
        ck_assert_uint_eq(usage.num_blocks, 0);
        ck_assert_uint_eq(usage.peak_bytes_in_use, in_use);
        bfc_disconnect(client);
}

RIG_TEST(statistics_of_a_client, one_tenant)
{
        bfc_client *client = client_open(rig, NULL, NULL);
        struct {
                struct bfc_client_stats known;
                uint64_t unknown;
        } later;
        struct bfc_client_stats stats;
        void *a, *b, *no = NULL;

        ck_assert_ok(bfc_malloc(client, 1000, &a));
        ck_assert_ok(bfc_malloc(client, 3 * MIB, &b));
        ck_assert_int_eq(bfc_malloc(client, 100 * MIB, &no), -EDQUOT);
        ck_assert_ptr_null(no);
        ck_assert_ok(bfc_free(client, a));
        stats = client_stats(client);
        ck_assert_uint_eq(stats.num_allocs, 2);
        ck_assert_uint_eq(stats.num_frees, 1);
        ck_assert_uint_eq(stats.num_blocks, 1);
        ck_assert_uint_eq(stats.num_failures, 1);
        ck_assert_uint_eq(stats.bytes_in_use, 3 * MIB);
        ck_assert_uint_eq(stats.peak_bytes_in_use, 3 * MIB + 1024);
        ck_assert_uint_eq(stats.bytes_requested, 3 * MIB);
        ck_assert_uint_eq(stats.largest_alloc_size, 3 * MIB);
        ck_assert_uint_ge(stats.bytes_mapped, 3 * MIB);

        /* A program built against a later header, with a longer structure: what this
         * library does not know is 0. One too short for what it does know is refused. */
        memset(&later, 0xaa, sizeof(later));
        later.known.struct_size = sizeof(later);
        ck_assert_ok(bfc_stats(client, &later.known));
        ck_assert_uint_eq(later.known.num_allocs, 2);
        ck_assert_uint_eq(later.unknown, 0);
        stats.struct_size = offsetof(struct bfc_client_stats, num_frees);
        ck_assert_int_eq(bfc_stats(client, &stats), -EINVAL);
        ck_assert_ok(bfc_free(client, b));
        bfc_disconnect(client);
}

RIG_TEST(wrong_arguments, one_tenant)
{
        struct bfc_options nowhere = { .struct_size = sizeof(nowhere), .socket = "/nowhere/bfcd.sock" };
        bfc_client *client = client_open(rig, NULL, NULL), *none = NULL;
        char on_stack[16], *untouched = on_stack;
        void *p, *ptr = untouched;

        ck_assert_int_eq(bfc_connect(&nowhere, &none), -ENOENT);
        ck_assert_ptr_null(none);
        ck_assert_str_ne(bfc_last_error(), "");
        ck_assert_int_eq(client_refused(rig, NULL, "nothing"), -ENOENT);
        ck_assert_int_eq(bfc_malloc(client, 0, &ptr), -EINVAL);
        ck_assert_int_eq(bfc_malloc(client, SIZE_MAX, &ptr) < 0, 1);
        ck_assert_int_eq(bfc_malloc(client, (size_t)1 << 63, &ptr) < 0, 1);
        ck_assert_int_eq(bfc_malloc_in(client, "nothing", 256, &ptr), -ENOENT);
        ck_assert_ptr_eq(ptr, untouched); /* outputs are touched on success only */
        ck_assert_int_eq(bfc_free(client, on_stack), -EINVAL);
        ck_assert_ok(bfc_free(client, NULL));
        ck_assert_ok(bfc_malloc(client, 4096, &p));
        ck_assert_int_eq(bfc_free(client, (char *)p + 256), -EINVAL);
        ck_assert_ok(bfc_free(client, p));
        ck_assert_int_eq(bfc_free(client, p), -EINVAL);
        ck_assert_str_ne(bfc_last_error(), "");
        bfc_disconnect(client);
        bfc_disconnect(NULL);
}

RIG_TEST(the_environment_names_socket_partition_and_tenant, two_by_two)
{
        bfc_client *client;
        void *p;

        setenv("BFC_SOCKET", rig->socket, 1);
        setenv("BFC_TENANT", "red", 1);
        setenv("BFC_PARTITION", "serve", 1);
        ck_assert_ok(bfc_connect(NULL, &client));
        ck_assert_str_eq(bfc_tenant(client), "red");
        ck_assert_str_eq(bfc_partition(client), "serve");
        ck_assert_ok(bfc_malloc(client, 5 * MIB, &p));
        ck_assert_uint_eq(rig_stats(rig, "red", "serve").bytes_in_use, 5 * MIB);
        bfc_disconnect(client);
}

/* ---- several -------------------------------------------------------------- */

RIG_TEST(partitions_are_separate, two_by_two)
{
        bfc_client *client = client_open(rig, "red", NULL);
        void *train, *serve, *no;

        ck_assert_str_eq(bfc_partition(client), "train"); /* its first */
        ck_assert_ok(bfc_malloc(client, 40 * MIB, &train));
        ck_assert_ok(bfc_malloc_in(client, "serve", 30 * MIB, &serve));
        pattern_write(train, 40 * MIB, 1);
        pattern_write(serve, 30 * MIB, 2);
        ck_assert(pattern_holds(train, 40 * MIB, 1));
        ck_assert(pattern_holds(serve, 30 * MIB, 2));
        ck_assert_uint_eq(client_usage(client, NULL).bytes_in_use, 40 * MIB);
        ck_assert_uint_eq(client_usage(client, "serve").bytes_in_use, 30 * MIB);
        ck_assert_uint_eq(client_usage(client, "serve").bytes_limit, 32 * MIB);
        ck_assert_int_eq(bfc_malloc(client, 10 * MIB, &no), -EDQUOT);
        ck_assert_int_eq(bfc_malloc_in(client, "serve", 10 * MIB, &no), -EDQUOT);
        ck_assert_ok(bfc_free(client, train));
        ck_assert_ok(bfc_free(client, serve));
        bfc_disconnect(client);
}

RIG_TEST(clients_of_a_tenant_share_its_quota, two_by_two)
{
        bfc_client *a = client_open(rig, "red", "train"), *b = client_open(rig, "red", "train");
        bfc_client *other = client_open(rig, "blue", NULL);
        void *of_a, *of_b, *of_other, *no;

        ck_assert_str_eq(bfc_tenant(other), "blue");
        ck_assert_str_eq(bfc_partition(other), "serve");
        ck_assert_ok(bfc_malloc(a, 30 * MIB, &of_a));
        ck_assert_ok(bfc_malloc(b, 10 * MIB, &of_b));
        ck_assert_ok(bfc_malloc(other, 10 * MIB, &of_other));
        pattern_write(of_a, 30 * MIB, 1);
        pattern_write(of_b, 10 * MIB, 2);
        pattern_write(of_other, 10 * MIB, 3);
        ck_assert_uint_eq(client_usage(a, NULL).bytes_in_use, 40 * MIB);
        ck_assert_uint_eq(client_usage(b, NULL).bytes_in_use, 40 * MIB);
        ck_assert_uint_eq(client_usage(b, NULL).num_sessions, 2);
        ck_assert_uint_eq(client_usage(other, NULL).bytes_in_use, 10 * MIB);
        ck_assert_uint_eq(client_stats(b).bytes_in_use, 10 * MIB);
        ck_assert_int_eq(bfc_malloc(b, 10 * MIB, &no), -EDQUOT);
        ck_assert_int_eq(bfc_free(b, of_a), -EINVAL);
        ck_assert(pattern_holds(of_a, 30 * MIB, 1));
        ck_assert(pattern_holds(of_b, 10 * MIB, 2));
        bfc_disconnect(a); /* with a live block */
        ck_assert(WAIT_FOR(client_usage(b, NULL).bytes_in_use == 10 * MIB, SETTLE_MS));
        ck_assert(pattern_holds(of_b, 10 * MIB, 2));
        ck_assert(pattern_holds(of_other, 10 * MIB, 3));
        bfc_disconnect(b);
        bfc_disconnect(other);
}

struct thread {
        pthread_t id;
        bfc_client *client;
        unsigned number;
        const char *problem;
};

/* Holds up to 16 blocks, changes one at random, checks each before its free. */
static void *live_at_random(void *arg)
{
        struct thread *thread = arg;
        unsigned short random[3] = { (unsigned short)thread->number, 2, 3 };
        void *blocks[16] = { NULL };
        size_t n_bytes[16] = { 0 };

        for (unsigned i = 0; i < 600; i++) {
                unsigned at = (unsigned)nrand48(random) % 16;

                if (blocks[at]) {
                        if (!pattern_holds(blocks[at], n_bytes[at], thread->number * 16 + at))
                                thread->problem = "a block was overwritten";
                        if (bfc_free(thread->client, blocks[at]) < 0)
                                thread->problem = "a free failed";
                        blocks[at] = NULL;
                        continue;
                }
                n_bytes[at] = 1 + (size_t)nrand48(random) % (64 * KIB);
                if (bfc_malloc(thread->client, n_bytes[at], blocks + at) < 0)
                        thread->problem = "a malloc failed";
                else
                        pattern_write(blocks[at], n_bytes[at], thread->number * 16 + at);
        }
        for (unsigned at = 0; at < 16; at++) {
                if (bfc_free(thread->client, blocks[at]) < 0)
                        thread->problem = "a last free failed";
        }
        return NULL;
}

RIG_TEST(threads_share_a_client, one_tenant)
{
        bfc_client *client = client_open(rig, NULL, NULL);
        struct thread threads[8] = { 0 };

        for (unsigned i = 0; i < 8; i++) {
                threads[i].client = client;
                threads[i].number = i;
                ck_assert_int_eq(pthread_create(&threads[i].id, NULL, live_at_random, threads + i), 0);
        }
        for (unsigned i = 0; i < 8; i++) {
                pthread_join(threads[i].id, NULL);
                ck_assert_msg(!threads[i].problem, "thread %u: %s", i, threads[i].problem);
        }
        ck_assert_uint_eq(client_usage(client, NULL).bytes_in_use, 0);
        ck_assert_uint_eq(client_stats(client).num_blocks, 0);
        bfc_disconnect(client);
}

/* More live blocks than a page of a list or one extent could hold. */
RIG_TEST(ten_thousand_blocks, one_tenant)
{
        static void *blocks[10000];
        bfc_client *client = client_open(rig, NULL, NULL);

        for (size_t i = 0; i < 10000; i++) {
                ck_assert_ok(bfc_malloc(client, 1024, blocks + i));
                memcpy(blocks[i], &i, sizeof(i));
        }
        ck_assert_uint_eq(rig_stats(rig, "red", "train").num_blocks, 10000);
        ck_assert_uint_eq(rig_stats(rig, "red", "train").bytes_in_use, 10000 * 1024);
        for (size_t i = 0; i < 10000; i++) {
                ck_assert_int_eq(memcmp(blocks[i], &i, sizeof(i)), 0);
                if (i % 2 == 0)
                        ck_assert_ok(bfc_free(client, blocks[i]));
        }
        bfc_disconnect(client); /* the rest goes with it */
}

/* ---- what a client costs -------------------------------------------------- */

static size_t count_mapped_extents(void)
{
        char *maps = file_text("/proc/self/maps");
        size_t n = 0;

        ck_assert_ptr_nonnull(maps);
        for (const char *at = maps; (at = strstr(at, rig_extent_mark())); at++)
                n++;
        free(maps);
        return n;
}

RIG_TEST(a_client_uses_two_fds_and_closes_them, one_tenant)
{
        int before = 0;

        for (unsigned round = 0; round < 4; round++) {
                bfc_client *client = client_open(rig, NULL, NULL);
                void *p;

                for (unsigned i = 0; i < 30; i++) /* extents' fds are not kept */
                        ck_assert_ok(bfc_malloc(client, 2 * MIB, &p));
                if (round == 0) { /* a driver takes fds of its own, and keeps them */
                        bfc_disconnect(client);
                        before = suite_count_fds();
                        continue;
                }
                ck_assert_int_eq(suite_count_fds(), before + 2); /* its two sockets */
                ck_assert_uint_gt(count_mapped_extents(), 0);
                bfc_disconnect(client);
                ck_assert_int_eq(suite_count_fds(), before);
                ck_assert_uint_eq(count_mapped_extents(), 0);
        }
}

/* A block in more extents than one message or the window of unacknowledged ones
 * holds (64). */
TEST(a_block_of_very_many_extents)
{
        static const struct rig_config config = {
                .size = "512MiB",
                .partitions = "      - {name: train, limit: 512MiB, growth: on-demand}\n",
                .tenants = TENANT("red", "@UID@", "train, limit: 512MiB"),
        };
        struct rig *rig = rig_start(&config);
        bfc_client *a = client_open(rig, NULL, NULL), *b = client_open(rig, NULL, NULL);
        size_t n_bytes = 310 * MIB + 77;
        char *p, *q;

        ck_assert_ok(bfc_malloc(a, n_bytes, (void **)&p));
        if (rig_device() != ON_CUDA_IPC) /* there it is one */
                ck_assert_uint_gt(rig_stats(rig, "red", "train").num_extents, 2 * 64);
        for (size_t at = 0; at < n_bytes; at += 64 * KIB)
                p[at] = (char)(at >> 16);
        p[n_bytes - 1] = 'z';
        ck_assert_ok(bfc_malloc(b, 150 * MIB, (void **)&q)); /* another session, other extents */
        memset(q, 'q', 150 * MIB);
        for (size_t at = 0; at < n_bytes; at += 64 * KIB)
                ck_assert_int_eq(p[at], (char)(at >> 16));
        ck_assert_int_eq(p[n_bytes - 1], 'z');
        ck_assert_ok(bfc_free(a, p));
        ck_assert_ok(bfc_malloc(b, n_bytes, (void **)&p)); /* extents that b meets for the first time */
        p[0] = p[n_bytes - 1] = 'b';
        ck_assert(all_bytes_are(q, 150 * MIB, 'q'));
        bfc_disconnect(a);
        bfc_disconnect(b);
        rig_stop(rig);
}

/* ---- growth --------------------------------------------------------------- */

RIG_TEST(on_demand_grows_by_extents, one_tenant)
{
        size_t n_bytes = rig_device() == ON_CUDA_IPC ? 16 * MIB : 10 * MIB; /* smaller ones share there */
        bfc_client *client;
        uint64_t before = 0;
        void *p[4];

        ck_assert_uint_eq(rig_stats(rig, "red", "train").bytes_reserved, 0);
        client = client_open(rig, NULL, NULL);
        ck_assert_uint_eq(rig_stats(rig, "red", "train").bytes_reserved, 0);
        for (size_t i = 0; i < 4; i++) {
                Bfcd__Statistics f;

                ck_assert_ok(bfc_malloc(client, n_bytes, p + i));
                f = rig_stats(rig, "red", "train");
                ck_assert_uint_gt(f.bytes_reserved, before);
                ck_assert_uint_eq(f.bytes_reserved % (2 * MIB), 0);
                ck_assert_uint_ge(f.bytes_reserved, f.bytes_in_use);
                ck_assert_uint_le(f.bytes_reserved, f.bytes_in_use + 4 * MIB); /* not more than asked for */
                ck_assert_uint_eq(f.bytes_free, f.bytes_reserved - f.bytes_in_use);
                before = f.bytes_reserved;
        }
        ck_assert_uint_eq(rig_stats(rig, "red", "train").peak_bytes_reserved, before);
        bfc_disconnect(client);
        ck_assert(WAIT_FOR(rig_charge(rig, "red", "train") == 0, SETTLE_MS));
        ck_assert_uint_eq(rig_count(rig).n_extents, 0);
}

TEST(preallocated_memory_is_reserved_from_the_start)
{
        static const struct rig_config config = {
                .partitions = "      - {name: train, limit: 64MiB, growth: preallocate}\n",
                .tenants = TENANT("red", "@UID@", "train, limit: 24MiB")
                        TENANT("blue", "@UID@", "train, limit: 40MiB"),
        };
        struct rig *rig = rig_start(&config);

        ck_assert_uint_eq(rig_stats(rig, "red", "train").bytes_reserved, 24 * MIB);
        ck_assert_uint_eq(rig_stats(rig, "blue", "train").bytes_reserved, 40 * MIB);
        ck_assert_uint_gt(rig->n_extents, 0);
        for (unsigned i = 0; i < 3; i++) {
                bfc_client *client = client_open(rig, "red", NULL);
                void *p, *no;

                ck_assert_ok(bfc_malloc(client, 24 * MIB, &p));
                pattern_write(p, 24 * MIB, i);
                ck_assert(pattern_holds(p, 24 * MIB, i));
                ck_assert_int_eq(bfc_malloc(client, 1, &no), -EDQUOT);
                ck_assert_uint_eq(rig_stats(rig, "red", "train").bytes_reserved, 24 * MIB);
                bfc_disconnect(client);
                ck_assert(WAIT_FOR(rig_stats(rig, "red", "train").bytes_in_use == 0, SETTLE_MS));
                ck_assert(WAIT_FOR(rig_stats(rig, "red", "train").bytes_reserved == 24 * MIB, SETTLE_MS));
        }
        rig_stop(rig);
}

/* The whole limit in one block, and again in pieces: nothing is lost to either. */
RIG_TEST(the_limit_can_be_used_up_again_and_again, one_tenant)
{
        bfc_client *client = client_open(rig, NULL, NULL);
        void *whole, *pieces[16], *no;

        for (unsigned round = 0; round < 3; round++) {
                ck_assert_ok(bfc_malloc(client, 64 * MIB, &whole));
                ck_assert_int_eq(bfc_malloc(client, 1, &no), -EDQUOT);
                ck_assert_ok(bfc_free(client, whole));
                for (size_t i = 0; i < 16; i++)
                        ck_assert_ok(bfc_malloc(client, 4 * MIB, pieces + i));
                ck_assert_int_eq(bfc_malloc(client, 1, &no), -EDQUOT);
                for (size_t i = 0; i < 16; i++)
                        ck_assert_ok(bfc_free(client, pieces[i]));
        }
        bfc_disconnect(client);
}

/* ---- what is left to get --------------------------------------------------- */

static const struct rig_config with_reserve = {
        .partitions = "      - {name: train, limit: 64MiB, growth: on-demand}\n",
        .tenants = "  - name: red\n"
                   "    match: {uid: [@UID@]}\n"
                   "    quotas:\n"
                   "      - {partition: train, limit: 48MiB}\n"
                   "  - name: blue\n"
                   "    match: {uid: [@UID@]}\n"
                   "    quotas:\n"
                   "      - {partition: train, limit: 48MiB, reserve: 24MiB}\n",
};

static uint64_t free_bytes(bfc_client *client)
{
        size_t n_free = 0, n_total = 0;

        ck_assert_ok(bfc_mem_get_info(client, NULL, &n_free, &n_total));
        ck_assert_uint_eq(n_total, 48 * MIB);
        return n_free;
}

/* Pieces that were freed, and not trimmed: they are free wherever they are kept. */
static void take_and_free(bfc_client *client, size_t n_bytes, unsigned n)
{
        void *p[64];

        for (unsigned i = 0; i < n; i++)
                ck_assert_ok(bfc_malloc(client, n_bytes, &p[i]));
        ck_assert_uint_eq(free_bytes(client), 40 * MIB - n * n_bytes);
        for (unsigned i = 0; i < n; i++)
                ck_assert_ok(bfc_free(client, p[i]));
        ck_assert_uint_eq(free_bytes(client), 40 * MIB);
}

static void assert_room(struct rig *rig)
{
        bfc_client *red = client_open(rig, "red", NULL), *blue = client_open(rig, "blue", NULL);
        uint64_t room;
        void *p, *q;

        ck_assert_uint_eq(free_bytes(red), 40 * MIB); /* the partition without blue's reserve */
        ck_assert_uint_eq(free_bytes(blue), 48 * MIB);
        ck_assert_ok(bfc_malloc(red, free_bytes(red), &p));
        ck_assert_uint_eq(free_bytes(red), 0);
        ck_assert_int_lt(bfc_malloc(red, 256, &q), 0);
        ck_assert_uint_eq(free_bytes(blue), 24 * MIB);
        ck_assert_ok(bfc_free(red, p));
        ck_assert_uint_eq(free_bytes(red), 40 * MIB); /* still reserved */
        ck_assert_ok(bfc_trim(red, SIZE_MAX));
        take_and_free(red, MIB, 20);
        take_and_free(red, 512, 64);
        ck_assert_ok(bfc_trim(red, SIZE_MAX));

        ck_assert_ok(bfc_malloc(blue, 36 * MIB, &q));
        room = 64 * MIB - client_usage(blue, NULL).bytes_reserved;
        ck_assert_uint_eq(free_bytes(red), room);
        ck_assert_ok(bfc_malloc(red, room, &p));
        ck_assert_ok(bfc_free(blue, q));
        ck_assert_ok(bfc_trim(blue, SIZE_MAX));
        ck_assert_uint_eq(free_bytes(red), 40 * MIB - room);
        ck_assert_ok(bfc_free(red, p));
        ck_assert_ok(bfc_trim(red, SIZE_MAX)); /* what is idle of red's does not count for blue */
        bfc_disconnect(blue);
        bfc_disconnect(red);
}

RIG_TEST(available_memory_is_reported, with_reserve)
{
        size_t n;

        assert_room(rig);
        setenv("BFC_CACHE", "on", 1);
        assert_room(rig);
        ck_assert_int_eq(bfc_mem_get_info(NULL, NULL, &n, &n), -EINVAL);
}

RIG_TEST(interior_pointers_are_known, one_tenant)
{
        bfc_client *client = client_open(rig, NULL, NULL);
        struct bfc_block_info info;
        char *blocks[40];

        for (size_t i = 0; i < 40; i++) {
                ck_assert_ok(bfc_malloc(client, i * 9000 + 1, (void **)&blocks[i]));
                if (i % 4 == 3) /* while there is an index */
                        ck_assert_ok(bfc_free(client, blocks[i - 2]));
                info = info_of(client, blocks[i] + i * 9000);
                ck_assert_ptr_eq(info.base, blocks[i]);
                ck_assert_uint_eq(info.n_requested, i * 9000 + 1);
        }
        info = info_of(client, blocks[39] + info.n_bytes - 1);
        ck_assert_str_eq(info.partition, "train");
        ck_assert_str_eq(info.device, rig_device_id());
        ck_assert_int_eq(info.device_ordinal, rig_device() == ON_HOST ? -1 : 0);
        ck_assert_uint_eq(strlen(info.device_uuid), rig_device() == ON_HOST ? 4 : 40);
        ck_assert_int_eq(strncmp(info.device_uuid, rig_device() == ON_HOST ? "host" : "GPU-", 4), 0);
        ck_assert_int_eq(bfc_block_info(client, blocks[1] + 1, &info), -EINVAL);
        for (size_t i = 0; i < 40; i++)
                if (i % 4 != 1)
                        ck_assert_ok(bfc_free(client, blocks[i]));
        ck_assert_int_eq(bfc_block_info(client, blocks[39] + 1, &info), -EINVAL);
        bfc_disconnect(client);
}

/* Also while the daemon ends: it still removes its sockets. One signal each millisecond: where each is followed by the next
 * at once, a daemon under ThreadSanitizer does nothing but take signals. */
TEST(further_sigterms_do_not_kill)
{
        struct rig *rig = rig_start(&one_tenant);
        siginfo_t info = { 0 };

        rig->admin = raw_close(rig->admin);
        do {
                ck_assert_int_eq(kill(rig->pid, SIGTERM), 0);
                usleep(1000);
                ck_assert_int_eq(waitid(P_PID, (id_t)rig->pid, &info, WEXITED | WNOHANG | WNOWAIT), 0);
        } while (info.si_pid == 0);
        rig_terminate(rig);
        rig_discard(rig);
}
