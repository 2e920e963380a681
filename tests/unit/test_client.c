/* libbfcclient against a stand-in for the daemon: what it promises, from many
 * threads, after a fork, and when the server hangs up or sends invalid replies.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <bfcclient.h>

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "device/device.h"
#include "proto/bfcd.pb-c.h"
#include "tests/suite.h"
#include "tests/unit/server_rig.h"

static struct bfc_options options(void)
{
        return (struct bfc_options){ .struct_size = sizeof(struct bfc_options),
                                     .socket = fake_server_path(server) };
}

static int connect_now(void)
{
        struct bfc_options o = options();

        return bfc_connect(&o, &client);
}

/* The daemon's blocks are counted; test_client_cache.c has the cache on. */
static void setup(void)
{
        server_start("off");
}

static void setup_connected(void)
{
        setup();
        ck_assert_int_eq(connect_now(), 0);
}

FIXTURE(connected, setup_connected, server_end);

/* ---- the ordinary -------------------------------------------------------- */

TEST(malloc_write_free_and_block_info)
{
        struct bfc_block_info info = { .struct_size = sizeof(info) };
        char *a = get(1000), *b = get(3 * MIB), *c = get(1);

        memset(a, 'a', 1000);
        memset(b, 'b', 3 * MIB); /* spans extents */
        *c = 'c';
        ck_assert_int_eq(a[999], 'a');
        ck_assert_int_eq(bfc_block_info(client, b, &info), 0);
        ck_assert_uint_eq(info.n_bytes, 3 * MIB);
        ck_assert_uint_eq(info.n_requested, 3 * MIB);
        ck_assert_uint_eq(info.offset, 65536);
        ck_assert_uint_eq(info.region_id, 7);
        ck_assert_uint_ne(info.block_id, 0);
        ck_assert_uint_eq(info.share, BFC_SHARE_FD);
        ck_assert_uint_gt(info.extent_bytes, 65536);
        ck_assert_uint_eq(info.extent_offset, 65536);
        ck_assert_uint_eq(info.ptr_extent_bytes, info.extent_bytes);
        ck_assert_uint_eq(info.ptr_extent_offset, 65536);
        ck_assert_uint_eq(info.handle[0], 0);
        ck_assert_int_eq(bfc_block_info(client, b + 3 * MIB - 1, &info), 0); /* in a later extent */
        ck_assert_uint_eq(info.extent_offset, 65536);
        ck_assert_uint_eq((65536 + 3 * MIB - 1 - info.ptr_extent_offset) % info.ptr_extent_bytes, 0);
        ck_assert_uint_ne(info.ptr_extent_offset, 65536 + 3 * MIB - 1);
        info.struct_size--;
        expect_error(bfc_block_info(client, b, &info), -EINVAL, "struct_size");
        info.struct_size = sizeof(info);
        for (size_t i = 1; i < 3 * MIB; i += MIB - 1) {
                ck_assert_int_eq(bfc_block_info(client, b + i, &info), 0);
                ck_assert_ptr_eq(info.base, b);
                ck_assert_uint_eq(info.n_requested, 3 * MIB);
        }
        expect_error(bfc_block_info(client, a - 1, &info), -EINVAL, "not inside a block");
        expect_error(bfc_block_info(client, c + 256, &info), -EINVAL, "not inside a block");
        expect_error(bfc_block_info(client, NULL, &info), -EINVAL, "not inside a block");

        struct bfc_client_stats s = stats();
        ck_assert_uint_eq(s.num_allocs, 3);
        ck_assert_uint_eq(s.num_blocks, 3);
        ck_assert_uint_eq(s.bytes_in_use, 1024 + 3 * MIB + 256);
        ck_assert_uint_eq(s.bytes_requested, 1000 + 3 * MIB + 1);
        ck_assert_uint_eq(s.largest_alloc_size, 3 * MIB);
        ck_assert_uint_eq(s.bytes_mapped, 4 * MIB);

        ck_assert_int_eq(bfc_free(client, b), 0);
        ck_assert_int_eq(bfc_free(client, a), 0);
        ck_assert_int_eq(bfc_free(client, c), 0);
        ck_assert_int_eq(bfc_free(client, NULL), 0);
        s = stats();
        ck_assert_uint_eq(s.num_frees, 3);
        ck_assert_uint_eq(s.num_blocks, 0);
        ck_assert_uint_eq(s.bytes_in_use, 0);
        ck_assert_uint_eq(s.bytes_requested, 0);
        ck_assert_uint_eq(s.peak_bytes_in_use, 1024 + 3 * MIB + 256);
        ck_assert_uint_eq(fake_server_count(server).n_blocks, 0);
        ck_assert_uint_eq(fake_server_count(server).n_acks, 2);
}

TEST(texts_of_a_new_client)
{
        ck_assert_str_eq(bfc_tenant(client), "vision");
        ck_assert_str_eq(bfc_partition(client), "train");
        ck_assert_str_eq(bfc_version(), BFC_VERSION);
        ck_assert_str_eq(bfc_last_error(), "");
        ck_assert_str_eq(fake_server_count(server).name, program_invocation_short_name);
}

TEST(partitions_by_name)
{
        struct bfc_tenant_usage u = { .struct_size = sizeof(u) };
        void *p = NULL;

        ck_assert_int_eq(bfc_malloc_in(client, "infer", 1, &p), 0);
        ck_assert_int_eq(bfc_usage(client, "infer", &u), 0);
        ck_assert_uint_eq(u.bytes_limit, 1001);
        ck_assert_int_eq(bfc_usage(client, NULL, &u), 0);
        ck_assert_uint_eq(u.bytes_limit, 1000);
        ck_assert_uint_eq(u.num_blocks, 1);
        expect_error(bfc_usage(client, "nowhere", &u), -ENOENT, "train, infer");
        expect_error(bfc_malloc_in(client, "nowhere", 1, &p), -ENOENT, "nowhere");
        ck_assert_int_eq(bfc_free(client, p), 0);
}

TEST(copies)
{
        char *a = get(1000), *b = get(3 * MIB); /* spans extents */
        static char in[3 * MIB], out[3 * MIB + 1];

        memset(in, 'i', sizeof(in));
        ck_assert_int_eq(bfc_write(client, b, in, sizeof(in)), 0);
        ck_assert_mem_eq(b, in, sizeof(in));
        b[MIB] = 'x';
        ck_assert_int_eq(bfc_read(client, out, b + MIB - 1, 3), 0);
        ck_assert_str_eq(out, "ixi");
        ck_assert_int_eq(bfc_write(client, a + 1023, "z", 1), 0); /* the block is 1024 bytes */
        ck_assert_int_eq(a[1023], 'z');
        expect_error(bfc_write(client, a + 1023, in, 2), -EINVAL, "2 bytes at");
        expect_error(bfc_write(client, a + 1024, in, SIZE_MAX), -EINVAL, "are not inside a block");
        expect_error(bfc_read(client, out, b, sizeof(out)), -EINVAL, "are not inside a block");
        expect_error(bfc_read(client, out, b - 1, 2), -EINVAL, "are not inside a block");
        expect_error(bfc_read(client, out, in, 1), -EINVAL, "are not inside a block");
        expect_error(bfc_read(client, out, NULL, 1), -EINVAL, "are not inside a block");
        expect_error(bfc_read(client, NULL, b, 1), -EINVAL, "NULL");
        expect_error(bfc_write(client, b, NULL, 1), -EINVAL, "NULL");
        expect_error(bfc_write(NULL, b, in, 1), -EINVAL, "NULL");
        ck_assert_int_eq(bfc_read(client, NULL, NULL, 0), 0);
        ck_assert_int_eq(bfc_write(client, b, NULL, 0), 0);
        ck_assert_int_eq(bfc_free(client, b), 0);
        expect_error(bfc_read(client, out, b, 1), -EINVAL, "are not inside a block");
        ck_assert_int_eq(bfc_free(client, a), 0);
}

TEST(arguments)
{
        struct bfc_client_stats s = { .struct_size = sizeof(s) }, no_size = { 0 };
        struct bfc_tenant_usage u = { .struct_size = sizeof(u) };
        struct bfc_block_info i = { .struct_size = sizeof(i) };
        int fd;
        void *p = (void *)&s;

        expect_error(bfc_connect(NULL, NULL), -EINVAL, "ret_client");
        expect_error(bfc_malloc(NULL, 1, &p), -EINVAL, "NULL");
        expect_error(bfc_malloc(client, 1, NULL), -EINVAL, "NULL");
        expect_error(bfc_malloc(client, 0, &p), -EINVAL, "request at least 1");
        expect_error(bfc_malloc_flags(client, NULL, 1, 16, &p), -EINVAL, "flags 0x10");
        expect_error(bfc_malloc_flags(client, NULL, 1, BFC_SHAREABLE, &p), -EINVAL, "BFC_ONE_EXTENT");
        expect_error(bfc_extent_fd(client, &p, &fd), -EINVAL, "not inside a block");
        expect_error(bfc_malloc_flags(client, NULL, 1,
                                      ~(BFC_ONE_EXTENT | BFC_WHOLE | BFC_PARKABLE | BFC_SHAREABLE), &p),
                     -EINVAL, "BFC_ONE_EXTENT");
        expect_error(bfc_malloc(client, SIZE_MAX, &p), -ENOMEM, "full");
        expect_error(bfc_malloc(client, (size_t)1 << 63, &p), -ENOMEM, "full");
        ck_assert_ptr_eq(p, &s);
        expect_error(bfc_free(NULL, p), -EINVAL, "NULL");
        expect_error(bfc_free(client, p), -EINVAL, "not a block");
        expect_error(bfc_stats(NULL, &s), -EINVAL, "NULL");
        expect_error(bfc_stats(client, NULL), -EINVAL, "NULL");
        expect_error(bfc_stats(client, &no_size), -EINVAL, "struct_size");
        expect_error(bfc_usage(NULL, NULL, &u), -EINVAL, "NULL");
        expect_error(bfc_usage(client, NULL, NULL), -EINVAL, "NULL");
        expect_error(bfc_block_info(NULL, p, &i), -EINVAL, "NULL");
        expect_error(bfc_block_info(client, p, NULL), -EINVAL, "NULL");
        expect_error(bfc_block_info(client, NULL, &i), -EINVAL, "not inside a block");
        ck_assert_str_eq(bfc_tenant(NULL), "");
        ck_assert_str_eq(bfc_partition(NULL), "");
        bfc_disconnect(NULL);
}

TEST(structures_of_a_later_header)
{
        struct {
                struct bfc_client_stats s;
                uint64_t later;
        } wide = { .s.struct_size = sizeof(wide), .later = 1 };
        struct {
                struct bfc_options o;
                const char *later;
        } asks = { .o = options() };
        bfc_client *other = NULL;

        asks.o.struct_size = sizeof(asks);
        ck_assert_int_eq(bfc_stats(client, &wide.s), 0);
        ck_assert_uint_eq(wide.later, 0);
        ck_assert_uint_eq(wide.s.struct_size, sizeof(wide));
        ck_assert_int_eq(bfc_connect(&asks.o, &other), 0);
        bfc_disconnect(other);
        other = NULL;
        asks.later = "";
        expect_error(bfc_connect(&asks.o, &other), -EINVAL, "does not support");
        asks.o.struct_size = sizeof(asks.o) - 1;
        expect_error(bfc_connect(&asks.o, &other), -EINVAL, "struct_size");
        ck_assert_ptr_null(other);
}

TEST(double_free)
{
        void *a = get(100), *b = get(100);

        ck_assert_int_eq(bfc_free(client, a), 0);
        expect_error(bfc_free(client, a), -EINVAL, "already freed");
        expect_error(bfc_free(client, (char *)b + 256), -EINVAL, "not a block");
        ck_assert_int_eq(bfc_free(client, b), 0);
}

TEST(refusal_sets_last_error)
{
        void *p = NULL;

        fake_server_set_mood(server, FAKE_REFUSE, 0);
        expect_error(bfc_malloc(client, 1, &p), -EDQUOT, "tenant vision asked for much");
        ck_assert_ptr_null(p);
        ck_assert_uint_eq(stats().num_failures, 1);
        fake_server_set_mood(server, FAKE_GOOD, 0);
        ck_assert_int_eq(bfc_free(client, get(5)), 0);
}

TEST(free_refused)
{
        void *p = get(1);

        fake_server_set_mood(server, FAKE_FREE_REFUSED, 0);
        expect_error(bfc_free(client, p), -EINVAL, "no such block");
}

/* The successor of an extent takes its place in this process too. */
TEST(extents_renewed)
{
        char *p = get(1000);

        memset(p, 'x', 1000);
        ck_assert_int_eq(bfc_free(client, p), 0);
        fake_server_renew_extents(server);
        char *q = get(1000);
        ck_assert_ptr_eq(p, q);
        q[0] = 'y';
        ck_assert_uint_eq(stats().bytes_mapped, 2 * MIB);
        ck_assert_uint_eq(fake_server_count(server).n_extents_sent, 2);
        ck_assert_int_eq(bfc_free(client, q), 0);
}

TEST(goodbye_unmaps)
{
        char *p = get(1000);

        bfc_disconnect(client);
        client = NULL;
        ck_assert_int_eq(msync((void *)((uintptr_t)p & ~(uintptr_t)4095), 4096, MS_ASYNC), -1);
        ck_assert_uint_eq(fake_server_count(server).n_goodbyes, 1);
}

TEST(two_clients_in_one_process)
{
        bfc_client *first = client;
        char *p = get(100);

        ck_assert_int_eq(connect_now(), 0);
        char *q = get(100);
        ck_assert_ptr_ne(p, q);
        expect_error(bfc_free(client, p), -EINVAL, "not a block");
        ck_assert_int_eq(bfc_free(client, q), 0);
        ck_assert_int_eq(bfc_free(first, p), 0);
        bfc_disconnect(first);
}

/* examples/hello.c, as a process of its own with the shared library. */
TEST(example_program_runs)
{
        const char *program = getenv("BFC_EXAMPLE");
        pid_t pid;

        if (!program)
                return; /* not run by the build system */
        setenv("BFC_SOCKET", fake_server_path(server), 1);
        pid = fork();
        if (pid == 0) {
                dup2(STDERR_FILENO, STDOUT_FILENO); /* our output is TAP */
                execl(program, program, (char *)NULL);
                _exit(127);
        }
        expect_good_end(pid);
        ck_assert_uint_eq(fake_server_count(server).n_blocks, 0);
        ck_assert_uint_eq(fake_server_count(server).n_goodbyes, 1);
        ck_assert_str_eq(fake_server_count(server).name, "hello");
}

/* ---- connecting ---------------------------------------------------------- */

FIXTURE(unconnected, setup, server_end);

TEST(no_daemon)
{
        struct bfc_options o = options();
        char long_path[200];

        o.socket = "/nonexistent/bfcd.sock";
        expect_error(bfc_connect(&o, &client), -ENOENT, "/nonexistent/bfcd.sock");
        expect_error(bfc_connect(&o, &client), -ENOENT, "systemctl status bfcd");
        o.socket = "/dev/null";
        expect_error(bfc_connect(&o, &client), -ECONNREFUSED, "/dev/null");
        memset(long_path, 'x', sizeof(long_path) - 1);
        long_path[sizeof(long_path) - 1] = '\0';
        o.socket = long_path;
        expect_error(bfc_connect(&o, &client), -ENAMETOOLONG, "too long");
        ck_assert_ptr_null(client);
}

TEST(environment)
{
        struct bfc_options o = options();

        setenv("BFC_SOCKET", fake_server_path(server), 1);
        setenv("BFC_PARTITION", "infer", 1);
        setenv("BFC_TENANT", "vision", 1);
        ck_assert_int_eq(bfc_connect(NULL, &client), 0);
        ck_assert_str_eq(bfc_partition(client), "infer");
        ck_assert_str_eq(fake_server_count(server).tenant, "vision");
        ck_assert_str_eq(fake_server_count(server).partition, "infer");
        bfc_disconnect(client);
        o.partition = "train";
        o.tenant = "speech";
        o.name = "a name that is much longer than the sixty-three bytes that the daemon keeps of it";
        ck_assert_int_eq(bfc_connect(&o, &client), 0);
        ck_assert_str_eq(bfc_partition(client), "train");
        ck_assert_str_eq(fake_server_count(server).tenant, "speech");
        ck_assert_uint_eq(strlen(fake_server_count(server).name), 63);
        setenv("BFC_SOCKET", "/nonexistent/sock", 1);
        bfc_disconnect(client);
        client = NULL;
        expect_error(bfc_connect(NULL, &client), -ENOENT, "/nonexistent/sock");
}

static const struct {
        enum fake_mood mood;
        int error;
        const char *text;
} bad_hellos[] = {
        { FAKE_HELLO_REFUSED, -EACCES, "would match user alice" },
        { FAKE_HELLO_VERSION_0, -EPROTO, "version 0" },
        { FAKE_HELLO_VERSION_2, -EPROTO, "version 2" },
        { FAKE_HELLO_BAD_DEFAULT, -EPROTO, "default partition" },
        { FAKE_HELLO_NO_PARTITION, -ENOENT, "no quota" },
        { FAKE_HELLO_HANG_UP, -ECONNRESET, "not running" },
        { FAKE_HELLO_ODD_SHARE, -EPROTO, "partition 'infer' has a share mode that this library" },
        { FAKE_HELLO_ODD_UUID, -EPROTO, "partition 'infer'" },
        { FAKE_HELLO_IPC_ON_HOST, -EPROTO, "partition 'infer'" },
};

LOOP_TEST(invalid_hello_replies, sizeof(bad_hellos) / sizeof(bad_hellos[0]))
{
        setenv("BFC_RETURN_MS", "100", 1);
        fake_server_set_mood(server, bad_hellos[_i].mood, 0);
        expect_error(connect_now(), bad_hellos[_i].error, bad_hellos[_i].text);
        ck_assert_ptr_null(client);
}

/* As one that is displaced by others that connect in the same moment. */
TEST(a_connection_without_an_answer_is_repeated)
{
        fake_server_set_mood(server, FAKE_HELLO_HANG_UP_ONCE, 0);
        ck_assert_int_eq(connect_now(), 0);
}

TEST(no_such_partition)
{
        struct bfc_options o = options();

        o.partition = "elsewhere";
        expect_error(bfc_connect(&o, &client), -ENOENT, "train, infer");
        ck_assert_ptr_null(client);
}

/* ---- GPUs: the fake driver shows two, and infer is on the second ----------- */

static char gpu_state[64];

static void setup_gpus(const char *visible)
{
        uint8_t uuid[DEVICE_UUID_BYTES];

        snprintf(gpu_state, sizeof(gpu_state), "/tmp/bfc-client-gpus-%d", (int)getpid());
        setenv("FAKE_CUDA_STATE", gpu_state, 1);
        setenv("FAKE_CUDA_DEVICES", "64MiB,32MiB", 1);
        if (visible)
                setenv("CUDA_VISIBLE_DEVICES", visible, 1);
        else
                unsetenv("CUDA_VISIBLE_DEVICES");
        /* The driver keeps fds of its own: they count as there before. */
        (void)device_cuda_ordinal_uuid(0, uuid);
        setup();
        fake_server_set_mood(server, FAKE_HELLO_GPUS, 0);
        ck_assert_int_eq(connect_now(), 0);
        fake_server_set_mood(server, FAKE_GOOD, 0);
}

static void setup_two_gpus(void)
{
        setup_gpus(NULL);
}

static void setup_second_gpu(void)
{
        setup_gpus("1");
}

static void setup_first_gpu(void)
{
        setup_gpus("0");
}

static void teardown_gpus(void)
{
        char path[80];

        server_end();
        snprintf(path, sizeof(path), "%s/lock", gpu_state);
        unlink(path);
        ck_assert_int_eq(rmdir(gpu_state), 0);
}

FIXTURE(two_gpus, setup_two_gpus, teardown_gpus);

TEST(partition_for_device)
{
        const char *name = NULL;

        ck_assert_int_eq(bfc_partition_for_device(client, 1, &name), 0);
        ck_assert_str_eq(name, "infer");
        name = NULL;
        expect_error(bfc_partition_for_device(client, 0, &name), -ENOENT,
                     "tenant 'vision' has no quota in a partition on CUDA device 0");
        expect_error(bfc_partition_for_device(client, 2, &name), -ENOENT, "CUDA device 2 is not visible");
        expect_error(bfc_partition_for_device(client, -1, &name), -ENOENT, "CUDA device -1 is not visible");
        ck_assert_ptr_null(name);
        expect_error(bfc_partition_for_device(client, 1, NULL), -EINVAL, "ret_name");
        expect_error(bfc_partition_for_device(NULL, 1, &name), -EINVAL, "NULL");
}

TEST(partition_for_uuid)
{
        struct bfc_partition_info info = { .struct_size = sizeof(info) };
        const char *name = NULL;
        char text[80];

        ck_assert_int_eq(bfc_partition_info(client, 1, &info), 0);
        ck_assert_int_eq(bfc_partition_for_uuid(client, info.device_uuid, &name), 0);
        ck_assert_str_eq(name, info.partition);
        name = NULL;
        snprintf(text, sizeof(text), "MIG-%s", info.device_uuid + 4);
        ck_assert_int_eq(bfc_partition_for_uuid(client, text, &name), 0);
        ck_assert_str_eq(name, info.partition);
        name = NULL;
        text[39] = text[39] == '0' ? '1' : '0'; /* the last digit */
        expect_error(bfc_partition_for_uuid(client, text, &name), -ENOENT, "tenant 'vision' has no quota");
        strcat(text, "0");
        expect_error(bfc_partition_for_uuid(client, text, &name), -ENOENT, "has no quota");
        expect_error(bfc_partition_for_uuid(client, info.device_uuid + 4, &name), -ENOENT, "has no quota");
        expect_error(bfc_partition_for_uuid(client, "GPU-", &name), -ENOENT, "has no quota");
        expect_error(bfc_partition_for_uuid(client, "GPU- 1", &name), -ENOENT, "has no quota");
        expect_error(bfc_partition_for_uuid(client, "host", &name), -ENOENT, "has no quota");
        expect_error(bfc_partition_for_uuid(client, "", &name), -ENOENT, "has no quota");
        ck_assert_ptr_null(name);
        expect_error(bfc_partition_for_uuid(client, NULL, &name), -EINVAL, "uuid");
        expect_error(bfc_partition_for_uuid(client, text, NULL), -EINVAL, "ret_name");
        expect_error(bfc_partition_for_uuid(NULL, text, &name), -EINVAL, "NULL");
}

/* The host and the second GPU, which has the UUID of the fake driver's. */
TEST(partition_info)
{
        struct bfc_partition_info info = { .struct_size = sizeof(info) };

        ck_assert_int_eq(bfc_partition_info(client, 0, &info), 0);
        ck_assert_str_eq(info.partition, "train");
        ck_assert_str_eq(info.device_uuid, "host");
        ck_assert_int_eq(info.device_ordinal, -1);
        ck_assert_uint_eq(info.share, BFC_SHARE_FD);
        ck_assert_int_eq(bfc_partition_info(client, 1, &info), 0);
        ck_assert_str_eq(info.partition, "infer");
        ck_assert_str_eq(info.device, "cuda:1");
        ck_assert_int_eq(info.device_ordinal, 1);
        ck_assert_str_eq(info.device_uuid, "GPU-fa4ec0da-0000-4000-8000-000000000002");
        ck_assert_uint_eq(info.context_bytes, BFC_NO_CONTEXTS); /* such a daemon says nothing of them */
        info.device_ordinal = 7;
        expect_error(bfc_partition_info(client, 2, &info), -ENOENT, "none has index 2");
        info.struct_size = 8;
        expect_error(bfc_partition_info(client, 0, &info), -EINVAL, "struct_size is 8");
        ck_assert_int_eq(info.device_ordinal, 7);
        expect_error(bfc_partition_info(client, 0, NULL), -EINVAL, "ret is NULL");
        expect_error(bfc_partition_info(NULL, 0, &info), -EINVAL, "NULL");
}

static void *driver(const char *function)
{
        void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        void *ret = library ? dlsym(library, function) : NULL;

        ck_assert_ptr_nonnull(ret);
        return ret;
}

/* A capture on a GPU is nothing to the host's memory. */
TEST(freed_beside_a_capture_on_a_gpu)
{
        int (*retain)(void **, int) = driver("cuDevicePrimaryCtxRetain");
        int (*set_current)(void *) = driver("cuCtxSetCurrent");
        int (*create)(void **, unsigned) = driver("cuStreamCreate");
        int (*begin)(void *, int) = driver("cuStreamBeginCapture_v2");
        int (*end)(void *, void **) = driver("cuStreamEndCapture");
        int (*destroy)(void *) = driver("cuGraphDestroy");
        void *context, *stream, *graph, *p = NULL, *q = NULL;
        unsigned n_blocks;

        ck_assert_int_eq(retain(&context, 1) | set_current(context) | create(&stream, 1), 0);
        ck_assert_int_eq(bfc_malloc_async_in(client, "infer", 100, (uintptr_t)stream, &q),
                         0); /* it is known */
        ck_assert_int_eq(bfc_malloc_flags(client, NULL, 100, BFC_WHOLE, &p), 0);
        n_blocks = fake_server_count(server).n_blocks;
        ck_assert_int_eq(begin(stream, 0), 0);
        ck_assert_int_eq(bfc_free(client, p), 0);
        ck_assert_uint_eq(fake_server_count(server).n_blocks, n_blocks - 1);
        ck_assert_int_eq(end(stream, &graph), 0);
        ck_assert_int_eq(destroy(graph), 0);
}

FIXTURE(second_gpu, setup_second_gpu, teardown_gpus);

/* CUDA_VISIBLE_DEVICES=1: the second GPU is this process's first. */
TEST(partition_for_visible_device)
{
        const char *name = NULL;

        ck_assert_int_eq(bfc_partition_for_device(client, 0, &name), 0);
        ck_assert_str_eq(name, "infer");
        expect_error(bfc_partition_for_device(client, 1, &name), -ENOENT, "CUDA device 1 is not visible");
}

FIXTURE(first_gpu, setup_first_gpu, teardown_gpus);

/* The second GPU is described, though this process does not see it. */
TEST(partition_info_of_an_invisible_gpu)
{
        struct bfc_partition_info info = { .struct_size = sizeof(info) };

        ck_assert_int_eq(bfc_partition_info(client, 1, &info), 0);
        ck_assert_int_eq(info.device_ordinal, -1);
        ck_assert_int_eq(strncmp(info.device_uuid, "GPU-", 4), 0);
}

/* Not asked of the daemon, whose extents could not be mapped here. */
TEST(malloc_on_invisible_gpu_is_refused)
{
        void *q = NULL;

        expect_error(bfc_malloc_in(client, "infer", 100, &q), -ENODEV,
                     "partition 'infer' is on device 'cuda:1', which is not visible to this process: "
                     "check CUDA_VISIBLE_DEVICES");
        ck_assert_ptr_null(q);
        ck_assert_uint_eq(fake_server_count(server).n_blocks, 0);
        ck_assert_int_eq(bfc_free(client, get(100)), 0); /* the session goes on */
}

/* ---- a daemon that hangs up or sends invalid replies ------------------------------------------ */

TEST_OF(connected, daemon_gone)
{
        char *p = get(100), *q = NULL;

        strcpy(p, "still here");
        fake_server_hang_up(server);
        expect_error(bfc_malloc(client, 1, (void **)&q), -ECONNRESET, "not running");
        expect_error(bfc_free(client, p), -ECONNRESET, "not running");
        expect_error(bfc_free(client, p), -ECONNRESET, "not running"); /* not: freed already */
        struct bfc_tenant_usage u = { .struct_size = sizeof(u) };
        expect_error(bfc_usage(client, NULL, &u), -ECONNRESET, "not running");
        ck_assert_str_eq(p, "still here");
        ck_assert_uint_eq(stats().num_blocks, 1);
        ck_assert_uint_eq(stats().num_allocs, 1);
        ck_assert_uint_eq(stats().bytes_in_use, 256);
        ck_assert_ptr_null(q);
}

static const struct lie {
        enum fake_mood mood;
        int error;
        bool ends; /* the session */
} lies[] = {
        { FAKE_WRONG_BODY, -EPROTO, false },    { FAKE_WRONG_ID, -EPROTO, true },
        { FAKE_GARBAGE, -EPROTO, true },        { FAKE_BAD_LENGTH, -EPROTO, true },
        { FAKE_HANG_UP, -ECONNRESET, true },    { FAKE_BAD_REGION, -EPROTO, false },
        { FAKE_BAD_OFFSET, -EPROTO, false },    { FAKE_TOO_SMALL, -EPROTO, false },
        { FAKE_SAME_PLACE, -EPROTO, false },    { FAKE_UNSEALED, -EPROTO, true },
        { FAKE_NO_FD, -EPROTO, true },          { FAKE_BAD_PARTITION, -EPROTO, true },
        { FAKE_TWO_PARTITIONS, -EPROTO, true }, { FAKE_HANDLE, -EPROTO, true },
        { FAKE_HANDLE_AND_FD, -EPROTO, true },  { FAKE_SHORT_HANDLE, -EPROTO, true },
};

LOOP_TEST_OF(connected, invalid_replies_end_the_session, sizeof(lies) / sizeof(lies[0]))
{
        const struct lie *lie = &lies[_i];
        struct bfc_client_stats s;
        char *p = get(100), *q = NULL;

        fake_server_set_mood(server, lie->mood, 0);
        ck_assert_int_eq(bfc_malloc(client, 3 * MIB, (void **)&q), lie->error);
        ck_assert_str_ne(bfc_last_error(), "");
        ck_assert_ptr_null(q);
        s = stats();
        ck_assert_uint_eq(s.num_blocks, 1);
        p[0] = 1;
        fake_server_set_mood(server, FAKE_GOOD, 0);
        if (lie->ends)
                ck_assert_int_eq(bfc_malloc(client, 1, (void **)&q), lie->error);
        else
                ck_assert_int_eq(bfc_free(client, get(1)), 0);
}

/* An attach is believed no more than a malloc. */
TEST_OF(connected, invalid_attach_replies)
{
        static const char *const odd_names[] = {
                "-",                                   /* no block */
                "7 99 0 256 256 0",                    /* a region never announced */
                "7 %r 1099511627520 256 256 0",        /* beyond it */
                "7 %r 65536 18446744073709551360 1 0", /* longer than anything */
                "7 %r 65536 256 257 0",
                "7 %r 65536 256 0 0",         /* not what can have been asked for */
                "7 %r 65536 256 256 77",      /* a partition never told of */
                "7 %r 65536 256 256 2",       /* the first of those */
                "7 %r 0 256 256 0",           /* where a block of this client is */
                "21474836481 %r 0 256 256 0", /* the very same, though not shared */
        };
        struct bfc_block_info info = { .struct_size = sizeof(info) };
        char name[64], good[64], *p = get(100);
        void *q = NULL, *r = NULL;
        size_t n_bytes = 0;

        ck_assert_int_eq(bfc_block_info(client, p, &info), 0);
        for (size_t i = 0; i < sizeof(odd_names) / sizeof(odd_names[0]); i++) {
                const char *place = strstr(odd_names[i], "%r");

                snprintf(name, sizeof(name), "%s", odd_names[i]);
                if (place)
                        snprintf(name, sizeof(name), "%.*s%llu%s", (int)(place - odd_names[i]), odd_names[i],
                                 (unsigned long long)info.region_id, place + 2);
                expect_error(bfc_attach(client, name, 0, &q, &n_bytes), -EPROTO, "an invalid place");
        }
        expect_error(bfc_attach(client, "stale", 0, &q, &n_bytes), -ESTALE, "another one's"); /* and ends */
        ck_assert_ptr_null(q);
        ck_assert_uint_eq(stats().num_blocks, 1);
        snprintf(good, sizeof(good), "7 %llu 65536 256 200 0", (unsigned long long)info.region_id);
        ck_assert_int_eq(bfc_attach(client, good, 0, &q, &n_bytes), 0);
        ck_assert_uint_eq(n_bytes, 200);
        ck_assert_int_eq(bfc_attach(client, good, 0, &r, NULL), 0);
        ck_assert_ptr_eq(q, r);
        snprintf(name, sizeof(name), "8 %llu 65536 256 200 0", (unsigned long long)info.region_id);
        expect_error(bfc_attach(client, name, 0, &r, NULL), -EPROTO, "an invalid place");
        ck_assert_uint_eq(stats().num_blocks, 2);
        /* A publication that is refused leaves the block as it was. */
        expect_error(bfc_publish(client, p, "x"), -EEXIST, "every name");
        expect_error(bfc_publish(client, q, "x"), -EINVAL, "already shared");
        expect_error(bfc_detach(client, p), -EINVAL, "not a shared block");
        ck_assert_int_eq(bfc_free(client, p), 0);
        (void)bfc_detach(client, q); /* the fake has no such block */
        ck_assert_uint_eq(stats().num_blocks, 1);
        (void)bfc_free(client, q);
        ck_assert_uint_eq(stats().num_blocks, 0);
        ck_assert_uint_eq(stats().bytes_reserved, 0);
        expect_error(bfc_free(client, q), -EINVAL, "not a block");
}

TEST_OF(connected, usage_reply_without_statistics)
{
        struct bfc_tenant_usage u = { .struct_size = sizeof(u), .bytes_limit = 77 };

        fake_server_set_mood(server, FAKE_WRONG_BODY, 0);
        expect_error(bfc_usage(client, NULL, &u), -EPROTO, "statistics");
        ck_assert_uint_eq(u.bytes_limit, 77);
}

TEST_OF(connected, unanswered_goodbye)
{
        struct timespec begin, end;

        fake_server_set_mood(server, FAKE_DEAF, 0);
        clock_gettime(CLOCK_MONOTONIC, &begin);
        bfc_disconnect(client);
        client = NULL;
        clock_gettime(CLOCK_MONOTONIC, &end);
        ck_assert_int_ge(end.tv_sec - begin.tv_sec, 4);
}

/* ---- threads ------------------------------------------------------------- */

#define N_THREADS 8

static void *churn(void *userdata)
{
        unsigned seed = (unsigned)(uintptr_t)userdata * 7919u + 1;
        unsigned char *held[8] = { 0 };
        size_t sizes[8] = { 0 };

        for (int i = 0; i < 1500; i++) {
                size_t at, n;

                seed = seed * 1103515245u + 12345u;
                at = (seed >> 16) % 8;
                n = 1 + (seed >> 8) % 200000;
                if (!held[at]) {
                        held[at] = get(n);
                        sizes[at] = n;
                        memset(held[at], (int)(at + 1), n);
                        continue;
                }
                for (size_t j = 0; j < sizes[at]; j += 4096)
                        if (held[at][j] != at + 1)
                                ck_abort_msg("a block was written by somebody else");
                if (bfc_free(client, held[at]) != 0)
                        ck_abort_msg("free: %s", bfc_last_error());
                held[at] = NULL;
        }
        for (int i = 0; i < 8; i++)
                if (bfc_free(client, held[i]) != 0)
                        ck_abort_msg("free: %s", bfc_last_error());
        return NULL;
}

static void run_threads(void *(*function)(void *))
{
        pthread_t threads[N_THREADS];

        for (uintptr_t i = 0; i < N_THREADS; i++)
                ck_assert_int_eq(pthread_create(&threads[i], NULL, function, (void *)i), 0);
        for (int i = 0; i < N_THREADS; i++)
                suite_join(threads[i], NULL);
}

TEST_OF(connected, many_threads)
{
        run_threads(churn);
        struct bfc_client_stats s = stats();
        ck_assert_uint_eq(s.num_blocks, 0);
        ck_assert_uint_eq(s.bytes_in_use, 0);
        ck_assert_uint_eq(s.num_allocs, s.num_frees);
        ck_assert_uint_eq(fake_server_count(server).n_blocks, 0);
}

static void *one_malloc(void *userdata)
{
        unsigned char *p = get(65536 * (1 + (size_t)(uintptr_t)userdata));
        struct bfc_block_info info = { .struct_size = sizeof(info) };

        ck_assert_int_eq(bfc_block_info(client, p, &info), 0);
        ck_assert_uint_eq(info.n_requested, 65536 * (1 + (uint64_t)(uintptr_t)userdata));
        ck_assert_uint_eq(info.n_bytes, info.n_requested);
        return NULL;
}

/* No request is answered before all were sent, and the last is answered first. */
TEST_OF(connected, answers_in_another_order)
{
        fake_server_set_mood(server, FAKE_HOLD, N_THREADS);
        run_threads(one_malloc);
        ck_assert_uint_eq(stats().num_blocks, N_THREADS);
}

/* Each leader is answered and leaves while others sleep: one of them must wake up
 * and read. */
TEST_OF(connected, reader_role_passes_to_another_thread)
{
        fake_server_set_mood(server, FAKE_ONE_BY_ONE, N_THREADS);
        run_threads(one_malloc);
        ck_assert_uint_eq(stats().num_blocks, N_THREADS);
}

static void *malloc_or_reset(void *userdata)
{
        void *p = NULL;
        int r = 0;

        (void)userdata;
        while (r == 0)
                r = bfc_malloc(client, 1, &p);
        ck_assert_msg(r == -ECONNRESET || r == -ENOMEM, "%d: %s", r, bfc_last_error());
        return NULL;
}

static void *hang_up_soon(void *userdata)
{
        (void)userdata;
        usleep(20000);
        fake_server_hang_up(server);
        return NULL;
}

TEST_OF(connected, daemon_gone_under_threads)
{
        pthread_t killer;

        /* No request is ever answered: all threads wait when it happens. */
        fake_server_set_mood(server, FAKE_HOLD, N_THREADS + 1);
        ck_assert_int_eq(pthread_create(&killer, NULL, hang_up_soon, NULL), 0);
        run_threads(malloc_or_reset);
        pthread_join(killer, NULL);
}

static void *shared_block;
static int n_freed;

static void *free_shared(void *userdata)
{
        (void)userdata;
        if (bfc_free(client, shared_block) == 0)
                __atomic_add_fetch(&n_freed, 1, __ATOMIC_SEQ_CST);
        return NULL;
}

TEST_OF(connected, double_free_from_threads)
{
        for (int i = 0; i < 50; i++) {
                shared_block = get(1);
                n_freed = 0;
                run_threads(free_shared);
                ck_assert_int_eq(n_freed, 1);
        }
        ck_assert_uint_eq(fake_server_count(server).n_blocks, 0);
}

static void *fail_once(void *userdata)
{
        void *p = NULL;

        ck_assert_str_eq(bfc_last_error(), "");
        if ((uintptr_t)userdata % 2)
                expect_error(bfc_malloc(client, 0, &p), -EINVAL, "0 bytes");
        else
                expect_error(bfc_malloc_in(client, "nowhere", 1, &p), -ENOENT, "nowhere");
        usleep(1000);
        ck_assert_ptr_nonnull(strstr(bfc_last_error(), (uintptr_t)userdata % 2 ? "0 bytes" : "nowhere"));
        return NULL;
}

TEST_OF(connected, last_error_is_per_thread)
{
        run_threads(fail_once);
        ck_assert_str_eq(bfc_last_error(), "");
}

/* ---- fork ---------------------------------------------------------------- */

#define CHILD_CHECK(x)                                                                                       \
        do {                                                                                                 \
                if (!(x)) {                                                                                  \
                        fprintf(stderr, "# in the child: %s\n", #x);                                         \
                        _exit(1);                                                                            \
                }                                                                                            \
        } while (0)

/* TSan's book of threads does not survive a fork beside threads. */
static int connect_in_child(void)
{
        struct bfc_options o = options();

#ifdef __SANITIZE_THREAD__
        o.flags = BFC_NO_THREAD;
#endif
        return bfc_connect(&o, &client);
}

static int n_parents_fds; /* at the fork */

static void child(char *p)
{
        struct bfc_client_stats s = { .struct_size = sizeof(s) };
        struct bfc_tenant_usage u = { .struct_size = sizeof(u) };
        struct bfc_block_info i = { .struct_size = sizeof(i) };
        char *page = (char *)((uintptr_t)p & ~(uintptr_t)4095);
        void *q = NULL;

        alarm(20);
        CHILD_CHECK(bfc_malloc(client, 1, &q) == -ECHILD);
        CHILD_CHECK(strstr(bfc_last_error(), "fork") != NULL);
        CHILD_CHECK(bfc_free(client, p) == -ECHILD);
        CHILD_CHECK(bfc_stats(client, &s) == -ECHILD);
        CHILD_CHECK(bfc_usage(client, NULL, &u) == -ECHILD);
        CHILD_CHECK(bfc_block_info(client, p, &i) == -ECHILD);
        CHILD_CHECK(bfc_write(client, p, &i, 1) == -ECHILD);
        CHILD_CHECK(bfc_read(client, &i, p, 1) == -ECHILD);
        /* Its place is reserved. */
        CHILD_CHECK(mmap(page, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != page);
        CHILD_CHECK(suite_count_fds() == n_parents_fds - 2);
        bfc_disconnect(client);
        CHILD_CHECK(suite_count_fds() == n_parents_fds - 2);
        /* A session of its own works. */
        CHILD_CHECK(connect_in_child() == 0);
        CHILD_CHECK(bfc_malloc(client, 100, &q) == 0);
        memset(q, 1, 100);
        CHILD_CHECK(bfc_free(client, q) == 0);
        bfc_disconnect(client);
        _exit(0);
}

TEST_OF(connected, forked_child)
{
        char *p = get(100);
        pid_t pid;

        strcpy(p, "parent");
        wait_until_others_sleep();
        n_parents_fds = suite_count_fds();
        pid = fork();
        if (pid == 0)
                child(p);
        expect_good_end(pid);
        ck_assert_str_eq(p, "parent");
        ck_assert_int_eq(bfc_free(client, p), 0);
        ck_assert_int_eq(bfc_free(client, get(5)), 0);
        ck_assert_uint_eq(fake_server_count(server).n_goodbyes, 1); /* the child's own session */
}

static int stop_churning;

static void *churn_on(void *userdata)
{
        (void)userdata;
        while (!__atomic_load_n(&stop_churning, __ATOMIC_SEQ_CST))
                if (bfc_free(client, get(1)) != 0)
                        ck_abort_msg("free: %s", bfc_last_error());
        return NULL;
}

/* ---- events --------------------------------------------------------------- */

/* Finds the client's thread: its id, or 0. */
static int find_thread(void)
{
        struct dirent *entry;
        DIR *folder = opendir("/proc/self/task");
        char path[300], name[32];
        int id = 0;

        ck_assert_ptr_nonnull(folder);
        while ((entry = readdir(folder))) {
                FILE *f;

                snprintf(path, sizeof(path), "/proc/self/task/%s/comm", entry->d_name);
                f = fopen(path, "re");
                if (!f)
                        continue;
                if (fgets(name, sizeof(name), f) && strcmp(name, "bfc-events\n") == 0)
                        id = atoi(entry->d_name);
                fclose(f);
        }
        closedir(folder);
        return id;
}

/* What a thread says of itself in its status. */
static unsigned long long thread_mask(int id, const char *key)
{
        unsigned long long mask = 0;
        char path[64], line[256];
        FILE *f;

        snprintf(path, sizeof(path), "/proc/self/task/%d/status", id);
        f = fopen(path, "re");
        ck_assert_ptr_nonnull(f);
        while (fgets(line, sizeof(line), f))
                if (strncmp(line, key, strlen(key)) == 0)
                        mask = strtoull(line + strlen(key), NULL, 16);
        fclose(f);
        return mask;
}

static uint64_t bytes_mapped(void)
{
        return stats().bytes_mapped;
}

TEST_OF(connected, retired_is_unmapped)
{
        char *kept = get(100), *p = get(6 * MIB);
        unsigned char present;

        memset(p, 1, 6 * MIB);
        ck_assert_uint_eq(bytes_mapped(), 8 * MIB);
        ck_assert_uint_eq(fake_server_event(server, FAKE_RETIRE), 0); /* all are in use */
        ck_assert_int_eq(bfc_free(client, p), 0);
        ck_assert_uint_eq(fake_server_event(server, FAKE_RETIRE), 3);
        ck_assert_uint_eq(bytes_mapped(), 2 * MIB);
        /* Reserved as before, so that nothing else comes there, and not accessible. */
        ck_assert_int_eq(mincore((void *)((uintptr_t)(p + 4 * MIB) & ~(uintptr_t)4095), 4096, &present), 0);
        strcpy(kept, "kept");
        p = get(6 * MIB);
        memset(p, 2, 6 * MIB);
        ck_assert_uint_eq(bytes_mapped(), 8 * MIB);
        ck_assert_int_eq(bfc_free(client, p), 0);
        ck_assert_str_eq(kept, "kept");
        ck_assert_int_eq(bfc_free(client, kept), 0);
        ck_assert_uint_eq(fake_server_event(server, FAKE_RETIRE), 4);
        ck_assert_uint_eq(bytes_mapped(), 0);
        memset(get(100), 3, 100);
}

TEST_OF(connected, client_thread_blocks_all_signals)
{
        int id = find_thread();
        unsigned long long blocked;

        ck_assert_int_ne(id, 0);
        blocked = thread_mask(id, "SigBlk:");
        for (int i = 1; i < 32; i++)
                if (i != SIGKILL && i != SIGSTOP)
                        ck_assert_msg(blocked >> (i - 1) & 1, "signal %d is not blocked", i);
        ck_assert_uint_eq(thread_mask(getpid(), "SigBlk:"), 0);
        bfc_disconnect(client);
        client = NULL;
        ck_assert_int_eq(find_thread(), 0);
        ck_assert_int_eq(connect_now(), 0);
        ck_assert_int_ne(find_thread(), 0);
}

TEST_OF(unconnected, no_events_without_a_client_thread)
{
        struct bfc_options o = options();

        o.flags = BFC_NO_THREAD;
        ck_assert_int_eq(bfc_connect(&o, &client), 0);
        ck_assert(!fake_server_count(server).wants_events);
        ck_assert(fake_server_count(server).wants_pages && fake_server_count(server).can_resume);
        ck_assert_int_eq(find_thread(), 0);
        memset(get(3 * MIB), 1, 3 * MIB);
        bfc_disconnect(client);

        fake_server_set_mood(server, FAKE_HELLO_UNASKED_EVENTS, 0);
        expect_error(bfc_connect(&o, &client), -EPROTO, "not requested");
        o.flags = 0;
        fake_server_set_mood(server, FAKE_HELLO_NO_EVENTS_FD, 0);
        expect_error(bfc_connect(&o, &client), -EPROTO, "an invalid message");
        fake_server_set_mood(server, FAKE_HELLO_NO_EVENTS, 0);
        expect_error(bfc_connect(&o, &client), -EPROTO, "did not send an events socket");
        ck_assert(fake_server_count(server).wants_events);
        ck_assert(fake_server_count(server).wants_pages && fake_server_count(server).can_resume);
        ck_assert_int_eq(find_thread(), 0);

        o.flags = UINT64_C(1) << 63;
        expect_error(bfc_connect(&o, &client), -EINVAL, "flags");
        o.flags = 0;
        fake_server_set_mood(server, FAKE_GOOD, 0);
        ck_assert_int_eq(bfc_connect(&o, &client), 0);
        ck_assert_int_ne(find_thread(), 0);
}

static const struct {
        enum fake_event event;
        int error;
        const char *part;
} event_lies[] = {
        { FAKE_RETIRE_USED, -EPROTO, "in use" },
        { FAKE_RETIRE_UNKNOWN, -EPROTO, "in use" },
        { FAKE_RETIRE_NOTHING, -EPROTO, "events socket" },
        { FAKE_EVENT_UNKNOWN, -EPROTO, "events socket" },
        { FAKE_EVENT_GARBAGE, -EPROTO, "events socket" },
        { FAKE_EVENT_LENGTH, -EPROTO, "events socket" },
        { FAKE_EVENT_FD, -EPROTO, "events socket" },
        { FAKE_DRAINING_WRONG, -EPROTO, "an unknown partition" },
};

/* A daemon that takes back what is in use is not obeyed: the session ends, and the
 * memory stays. */
LOOP_TEST_OF(connected, invalid_events_end_the_session, sizeof(event_lies) / sizeof(event_lies[0]))
{
        char *p = get(100);
        void *q;

        strcpy(p, "mine");
        fake_server_event(server, event_lies[_i].event);
        for (int i = 0; i < 100000 && bfc_malloc(client, 1, &q) == 0; i++)
                usleep(1000);
        expect_error(bfc_malloc(client, 1, &q), event_lies[_i].error, event_lies[_i].part);
        ck_assert_str_eq(p, "mine");
}

/* Nothing new is given out from then on. What there is stays usable, and the rest is the other
 * socket's to tell. */
TEST_OF(connected, events_hang_up)
{
        char *p = get(100);
        void *q = NULL;

        fake_server_event(server, FAKE_EVENT_HANG_UP);
        for (int i = 0; i < 100000 && find_thread() != 0; i++)
                usleep(1000);
        ck_assert_int_eq(find_thread(), 0);
        strcpy(p, "mine");
        expect_error(bfc_malloc(client, 100, &q), -ECONNRESET, "not running");
        ck_assert_ptr_null(q);
        ck_assert_int_eq(bfc_free(client, p), 0);
}

static void *churn_large(void *userdata)
{
        unsigned n = 0;

        (void)userdata;
        while (!__atomic_load_n(&stop_churning, __ATOMIC_SEQ_CST)) {
                size_t n_bytes = (1 + n++ % 5) * MIB;
                char *p = get(n_bytes);

                p[0] = p[n_bytes - 1] = 'x';
                if (bfc_free(client, p) != 0)
                        ck_abort_msg("free: %s", bfc_last_error());
        }
        return NULL;
}

TEST_OF(connected, retired_under_threads)
{
        pthread_t threads[4];
        unsigned n = 0;

        for (int i = 0; i < 4; i++)
                ck_assert_int_eq(pthread_create(&threads[i], NULL, churn_large, NULL), 0);
        for (int i = 0; i < 100000 && n < 300; i++) {
                n += fake_server_event(server, FAKE_RETIRE);
                usleep(500);
        }
        __atomic_store_n(&stop_churning, 1, __ATOMIC_SEQ_CST);
        for (int i = 0; i < 4; i++)
                suite_join(threads[i], NULL);
        ck_assert_uint_ge(n, 300);
        n = fake_server_event(server, FAKE_RETIRE);
        ck_assert_uint_eq(bytes_mapped(), 0);
}

/* A child forked while other threads hold any of the locks is still answered. */
TEST_OF(connected, fork_under_threads)
{
        pthread_t threads[3];

        for (int i = 0; i < 3; i++)
                ck_assert_int_eq(pthread_create(&threads[i], NULL, churn_on, NULL), 0);
        for (int i = 0; i < 20; i++) {
                pid_t pid = fork();

                if (pid == 0) {
                        void *q = NULL;

                        alarm(20);
                        CHILD_CHECK(bfc_malloc(client, 1, &q) == -ECHILD);
                        CHILD_CHECK(bfc_free(client, (void *)4096) == -ECHILD);
                        bfc_disconnect(client);
                        _exit(0);
                }
                expect_good_end(pid);
        }
        __atomic_store_n(&stop_churning, 1, __ATOMIC_SEQ_CST);
        for (int i = 0; i < 3; i++)
                suite_join(threads[i], NULL);
        ck_assert_uint_eq(stats().num_blocks, 0);
}

/* ---- while a free waits for the device ------------------------------------- */

/* Where the linker leads device_range_new(): a host's range whose finish() is the test's. */
int __real_device_range_new(const struct device_view *view, uint64_t n_bytes, struct device_range **ret);
int __wrap_device_range_new(const struct device_view *view, uint64_t n_bytes, struct device_range **ret);

static _Atomic(int) finish_result, n_finishes, is_finish_held;

static int finish_as_told(struct device_range *r)
{
        (void)r;
        n_finishes++;
        while (is_finish_held)
                usleep(1000);
        return finish_result;
}

int __wrap_device_range_new(const struct device_view *view, uint64_t n_bytes, struct device_range **ret)
{
        static struct device_range_ops ops;
        int r = __real_device_range_new(view, n_bytes, ret);

        if (r < 0 || view->is_cuda)
                return r;
        ops = *(*ret)->ops;
        ops.finish = finish_as_told;
        (*ret)->ops = &ops;
        return 0;
}

static _Atomic(int) free_result;

static void *free_it(void *ptr)
{
        free_result = bfc_free(client, ptr);
        return NULL;
}

/* A Retire of the block's extent is a violation until the free was sent. */
TEST_OF(connected, retire_while_a_free_waits)
{
        struct bfc_block_info info = { .struct_size = sizeof(info) };
        uint64_t n_mapped;
        pthread_t freeing;
        void *p = get(100), *q = NULL;
        int r = 0;

        n_mapped = stats().bytes_mapped;
        is_finish_held = 1;
        ck_assert_int_eq(pthread_create(&freeing, NULL, free_it, p), 0);
        while (n_finishes == 0)
                usleep(1000);
        expect_error(bfc_free(client, p), -EINVAL, "already freed");
        expect_error(bfc_block_info(client, p, &info), -EINVAL, "not inside a block");
        ck_assert_uint_eq(stats().num_blocks, 1);
        fake_server_event(server, FAKE_RETIRE_USED);
        for (int i = 0; i < 100000 && r != -EPROTO; i++) {
                r = bfc_malloc(client, 1, &q);
                usleep(1000);
        }
        expect_error(r, -EPROTO, "in use");
        ck_assert_uint_ge(stats().bytes_mapped,
                          n_mapped); /* more: blocks that were made before the event came */
        ck_assert_int_eq(n_finishes, 1);
        is_finish_held = 0;
        pthread_join(freeing, NULL);
        ck_assert_int_eq(free_result, -EPROTO);
}

/* Work on the device may go on for long, and to wait for it may not be allowed. None of it touches idle
 * memory. */
TEST_OF(connected, retire_is_answered_without_calls)
{
        void *p = get(100);

        ck_assert_int_eq(bfc_free(client, p), 0);
        n_finishes = 0;
        is_finish_held = 1;
        fake_server_event(server, FAKE_RETIRE_FIRST);
        ck_assert_int_eq(fake_server_await_answer(server, 60000), 1);
        ck_assert_int_eq(n_finishes, 0);
        ck_assert_uint_eq(stats().bytes_mapped, 0);
        is_finish_held = 0;
}

TEST_OF(connected, free_while_a_capture_forbids_waiting)
{
        static const struct {
                int finish, free;
        } cases[] = { { -ENOMEM, -ENOMEM }, { -EINVAL, -EIO }, { -ENODEV, 0 }, { -EIO, 0 } };

        for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
                void *p = get(100);

                finish_result = cases[i].finish;
                ck_assert_int_eq(bfc_free(client, p), cases[i].free);
                finish_result = 0;
                ck_assert_uint_eq(stats().num_blocks, cases[i].free < 0);
                ck_assert_uint_eq(fake_server_count(server).n_blocks, cases[i].free < 0);
                ck_assert_int_eq(bfc_free(client, p), cases[i].free < 0 ? 0 : -EINVAL);
                ck_assert_uint_eq(stats().num_blocks, 0);
                ck_assert_uint_eq(stats().num_frees, i + 1);
        }
}

/* The daemon frees, takes the memory back, and goes before it answers: nothing is put back. */
TEST_OF(connected, free_without_an_answer)
{
        pthread_t freeing;
        void *p = get(100);

        fake_server_set_mood(server, FAKE_FREE_UNANSWERED, 0);
        ck_assert_int_eq(pthread_create(&freeing, NULL, free_it, p), 0);
        while (fake_server_count(server).n_blocks > 0)
                usleep(1000);
        ck_assert_uint_eq(stats().bytes_reserved, 0); /* another thread may have been given it */
        ck_assert_uint_eq(fake_server_event(server, FAKE_RETIRE), 1);
        fake_server_hang_up(server);
        pthread_join(freeing, NULL);
        ck_assert_int_eq(free_result, -ECONNRESET);
        ck_assert_uint_eq(stats().num_blocks, 0);
        expect_error(bfc_free(client, p), -EINVAL, "already freed");
}
