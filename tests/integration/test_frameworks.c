/* What PyTorch and CuPy load, called through exactly their types, against a real daemon; and
 * the client of the whole process beneath.
 *
 * That client ends with its process, so every job here is a child, and what it says on
 * stderr goes into a file.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/integration/tools.h"

/* As in the frameworks' sources; cudaStream_t as in the CUDA runtime's header. */
typedef struct CUstream_st *cudaStream_t;
typedef void *(*torch_malloc_fn)(ssize_t, int, cudaStream_t);
typedef void (*torch_free_fn)(void *, ssize_t, int, cudaStream_t);
typedef void (*torch_record_stream_fn)(void *, cudaStream_t);
typedef void *(*cupy_malloc_fn)(void *, size_t, int);
typedef void (*cupy_free_fn)(void *, void *, int);

static torch_malloc_fn torch_malloc;
static torch_free_fn torch_free;
static torch_malloc_fn torch_pool_malloc;
static torch_free_fn torch_pool_free;
static torch_malloc_fn torch_malloc_one_extent, torch_pool_malloc_one_extent;
static torch_record_stream_fn torch_record_stream;
static void (*torch_pool_free_begin)(void), (*torch_pool_free_end)(void);
static cupy_malloc_fn cupy_malloc;
static cupy_free_fn cupy_free;

static struct rig_config config; /* by device */
static char stderr_path[128];

static void load(void)
{
        void *library = dlopen("libbfcclient.so.0", RTLD_NOW | RTLD_LOCAL);

        REQUIRE(library, "%s", dlerror());
        *(void **)&torch_malloc = dlsym(library, "bfc_torch_malloc");
        *(void **)&torch_free = dlsym(library, "bfc_torch_free");
        *(void **)&torch_pool_malloc = dlsym(library, "bfc_torch_pool_malloc");
        *(void **)&torch_pool_free = dlsym(library, "bfc_torch_pool_free");
        *(void **)&torch_malloc_one_extent = dlsym(library, "bfc_torch_malloc_one_extent");
        *(void **)&torch_pool_malloc_one_extent = dlsym(library, "bfc_torch_pool_malloc_one_extent");
        *(void **)&torch_pool_free_begin = dlsym(library, "bfc_torch_pool_free_begin");
        *(void **)&torch_pool_free_end = dlsym(library, "bfc_torch_pool_free_end");
        *(void **)&torch_record_stream = dlsym(library, "bfc_torch_record_stream");
        *(void **)&cupy_malloc = dlsym(library, "bfc_cupy_malloc");
        *(void **)&cupy_free = dlsym(library, "bfc_cupy_free");
        REQUIRE(torch_malloc && torch_free && torch_pool_malloc && torch_pool_free && torch_record_stream &&
                        torch_pool_free_begin && torch_pool_free_end && torch_malloc_one_extent &&
                        torch_pool_malloc_one_extent && cupy_malloc && cupy_free,
                "a symbol is missing");
}

/* The GPUs are the fake driver's; on the host device the job shall see none. */
static struct rig *start(void)
{
        struct rig *rig;

        if (rig_device() == ON_HOST) {
                config = (struct rig_config){ 0 };
                setenv("CUDA_VISIBLE_DEVICES", "", 1);
        } else {
                config = (struct rig_config){
                        .size = "128MiB",
                        .partitions = "      - {name: train, limit: 100%}\n"
                                      "  - id: cuda:1\n"
                                      "    headroom: 32MiB\n"
                                      "    partitions:\n"
                                      "      - {name: other, limit: 100%}\n",
                        .tenants = TENANT_OF("red", "@UID@",
                                             "{partition: train, limit: 64MiB}, {partition: other}")
                                TENANT("one-gpu", "@UID@", "train"),
                };
        }
        rig = rig_start(&config);
        setenv("BFC_SOCKET", rig->socket, 1);
        snprintf(stderr_path, sizeof(stderr_path), "%s/stderr", rig->folder);
        return rig;
}

static void quiet(void)
{
        int fd = open(stderr_path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);

        REQUIRE(fd >= 0 && dup2(fd, STDERR_FILENO) >= 0, "stderr");
        close(fd);
}

/* Runs it in a child to its end; what it said, which the caller frees. */
static char *run(void (*job)(void *), void *arg)
{
        pid_t pid = child_start(job, arg);
        int status;
        char *said;

        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        said = file_text(stderr_path);
        ck_assert_msg(WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %d: %s", status,
                      said ? said : "");
        ck_assert_ptr_nonnull(said);
        return said;
}

static void run_silent(void (*job)(void *), void *arg)
{
        char *said = run(job, arg);

        ck_assert_str_eq(said, "");
        free(said);
}

/* One line, with this in it. */
static void run_saying(void (*job)(void *), void *arg, const char *what)
{
        char *said = run(job, arg), *end = strchr(said, '\n');

        ck_assert_msg(strstr(said, what), "no \"%s\" in: %s", what, said);
        ck_assert_msg(end && end[1] == '\0', "not one line: %s", said);
        ck_assert_int_eq(strncmp(said, "libbfcclient: bfc_", 18), 0);
        free(said);
}

static uint64_t in_use(const char *partition)
{
        struct bfc_tenant_usage usage = { .struct_size = sizeof(usage) };
        bfc_client *client = NULL;

        REQUIRE(bfc_default(&client) == 0, "%s", bfc_last_error());
        REQUIRE(bfc_usage(client, partition, &usage) == 0, "%s", bfc_last_error());
        return usage.bytes_in_use;
}

/* What a stream's work held up may be done by now. */
static uint64_t in_use_after_look(const char *partition)
{
        bfc_client *client = NULL;

        REQUIRE(bfc_default(&client) == 0 && bfc_trim(client, SIZE_MAX) == 0, "%s", bfc_last_error());
        return in_use(partition);
}

/* ---- allocating ----------------------------------------------------------- */

static void allocate_with_both(void *arg)
{
        const char *other = rig_device() == ON_HOST ? "train" : "other";
        cudaStream_t stream = rig_device() == ON_HOST ? (cudaStream_t)(uintptr_t)0x10 : NULL;
        int param = 0;
        void *p, *q;

        (void)arg;
        quiet();
        load();
        REQUIRE(torch_malloc(0, 0, stream) == NULL && cupy_malloc(&param, 0, 0) == NULL, "0 bytes");
        for (int round = 0; round < 3; round++) { /* the second from what was looked up */
                p = torch_malloc(1000, 0, stream);
                q = cupy_malloc(&param, 3 * MIB, 1);
                REQUIRE(p && q && (uintptr_t)p % 256 == 0 && (uintptr_t)q % 256 == 0, "%p, %p", p, q);
                pattern_write(p, 1000, 1);
                pattern_write(q, 3 * MIB, 2);
                REQUIRE(pattern_holds(p, 1000, 1) && pattern_holds(q, 3 * MIB, 2), "contents");
                REQUIRE(in_use("train") == 1024 + (rig_device() == ON_HOST ? 3 * MIB : 0), "%llu bytes",
                        (unsigned long long)in_use("train"));
                REQUIRE(in_use(other) >= 3 * MIB, "in %s", other);
                torch_record_stream(p, (cudaStream_t)(uintptr_t)1);
                torch_free(p, 1000, 0, stream);
                cupy_free(&param, q, 1);
                REQUIRE(WAIT_FOR(in_use_after_look("train") == 0, SETTLE_MS) && in_use(other) == 0, "freed");
        }
        torch_free(NULL, 0, 0, stream);
        torch_record_stream(NULL, stream);
        cupy_free(&param, NULL, 0);
}

TEST(allocators_of_both_frameworks)
{
        struct rig *rig = start();

        run_silent(allocate_with_both, NULL);
        rig_stop(rig);
}

/* ---- failing -------------------------------------------------------------- */

static void exceed_the_limit(void *arg)
{
        void *p;

        (void)arg;
        quiet();
        load();
        REQUIRE(torch_malloc(65 * (ssize_t)MIB, 0, NULL) == NULL, "over the limit");
        REQUIRE(cupy_malloc(NULL, 66 * MIB, 0) == NULL, "over the limit");
        p = torch_malloc((ssize_t)MIB, 0, NULL);
        REQUIRE(p, "it goes on");
        torch_free(p, (ssize_t)MIB, 0, NULL);
}

static void ask_for_a_negative_size(void *arg)
{
        (void)arg;
        quiet();
        load();
        REQUIRE(torch_malloc(-1, 0, NULL) == NULL, "-1 bytes");
}

static void free_what_is_no_block(void *arg)
{
        void *p;

        quiet();
        load();
        p = torch_malloc(1, 0, NULL);
        REQUIRE(p, "1 byte");
        torch_free((char *)p + 1, 1, 0, NULL);
        cupy_free(NULL, arg, 0);
        torch_free(p, 1, 0, NULL);
}

/* A GPU on which the tenant has nothing: another GPU's memory, or the host's, is none. */
static void ask_for_a_foreign_gpu(void *arg)
{
        (void)arg;
        quiet();
        load();
        if (rig_device() == ON_HOST)
                unsetenv("CUDA_VISIBLE_DEVICES");
        setenv("BFC_TENANT", rig_device() == ON_HOST ? "red" : "one-gpu", 1);
        REQUIRE(torch_malloc(1, rig_device() == ON_HOST ? 0 : 1, NULL) == NULL, "a foreign GPU");
        REQUIRE(cupy_malloc(NULL, 1, rig_device() == ON_HOST ? 0 : 1) == NULL, "a foreign GPU");
        REQUIRE(in_use(NULL) == 0, "something was given");
}

TEST(failures_are_reported_once)
{
        struct rig *rig = start();

        run_saying(exceed_the_limit, NULL, "bfc_torch_malloc: ");
        run_saying(exceed_the_limit, NULL, "limit");
        run_saying(ask_for_a_negative_size, NULL, "-1 bytes; it returns NULL");
        run_saying(free_what_is_no_block, rig, "is not a block of this client");
        run_saying(ask_for_a_foreign_gpu, NULL, "has no quota in a partition on CUDA device");
        rig_stop(rig);
}

static void begin_without_a_daemon(void *socket)
{
        void *p;

        quiet();
        load();
        setenv("BFC_SOCKET", "/nowhere/bfcd.sock", 1);
        REQUIRE(torch_malloc(1, 0, NULL) == NULL, "no daemon");
        REQUIRE(torch_malloc(1, 0, NULL) == NULL, "no daemon");
        setenv("BFC_SOCKET", socket, 1);
        p = torch_malloc(1, 0, NULL); /* tried again */
        REQUIRE(p, "the daemon is there now: %s", bfc_last_error());
        torch_free(p, 1, 0, NULL);
}

TEST(a_daemon_that_starts_later_is_found)
{
        struct rig *rig = start();

        run_saying(begin_without_a_daemon, rig->socket, "/nowhere/bfcd.sock");
        rig_stop(rig);
}

/* ---- the client of the process --------------------------------------------- */

static void *ask_for_the_default(void *barrier)
{
        bfc_client *client = NULL;

        pthread_barrier_wait(barrier);
        REQUIRE(bfc_default(&client) == 0, "%s", bfc_last_error());
        return client;
}

static void many_threads_ask(void *arg)
{
        struct bfc_tenant_usage usage = { .struct_size = sizeof(usage) };
        pthread_barrier_t barrier;
        pthread_t threads[8];
        bfc_client *client = NULL;
        void *got;

        (void)arg;
        quiet();
        REQUIRE(bfc_default(NULL) == -EINVAL && bfc_default_with(NULL, NULL) == -EINVAL, "NULL");
        REQUIRE(bfc_default_with(&(struct bfc_options){ .struct_size = 1 }, &client) == -EINVAL,
                "no options");
        pthread_barrier_init(&barrier, NULL, 8);
        for (int i = 0; i < 8; i++)
                REQUIRE(pthread_create(&threads[i], NULL, ask_for_the_default, &barrier) == 0, "a thread");
        for (int i = 0; i < 8; i++) {
                pthread_join(threads[i], &got);
                REQUIRE(i == 0 || got == client, "another client");
                client = got;
        }
        REQUIRE(bfc_usage(client, NULL, &usage) == 0, "%s", bfc_last_error());
        REQUIRE(usage.num_sessions == 1, "%llu sessions", (unsigned long long)usage.num_sessions);
}

TEST(one_client_for_all_threads)
{
        struct rig *rig = start();

        run_silent(many_threads_ask, NULL);
        rig_stop(rig);
}

/* CUDA itself works in no child of a process that used it. */
static void fork_and_go_on(void *arg)
{
        bfc_client *client = NULL, *mine = NULL;
        void *p, *q;
        int status;
        pid_t pid;

        (void)arg;
        quiet();
        load();
        p = torch_malloc(5000, 0, NULL);
        REQUIRE(p && bfc_default(&client) == 0, "before the fork");
        pattern_write(p, 5000, 3);
        pid = fork();
        if (pid == 0) {
                torch_free(p, 5000, 0, NULL); /* the parent's: nothing happens */
                REQUIRE(bfc_malloc(client, 1, &q) == -ECHILD, "the parent's client");
                REQUIRE(bfc_default(&mine) == 0 && mine != client, "%s", bfc_last_error());
                if (rig_device() != ON_HOST)
                        _exit(0);
                q = torch_malloc(700, 0, NULL);
                REQUIRE(q, "a block of the child's own");
                REQUIRE(in_use(NULL) == rounded(5000) + rounded(700), "in the child");
                torch_free(q, 700, 0, NULL);
                _exit(0);
        }
        REQUIRE(waitpid(pid, &status, 0) == pid && status == 0, "status %d", status);
        REQUIRE(pattern_holds(p, 5000, 3), "the parent's block");
        REQUIRE(bfc_default(&mine) == 0 && mine == client, "the parent's client");
        torch_free(p, 5000, 0, NULL);
        REQUIRE(WAIT_FOR(in_use_after_look(NULL) == 0, SETTLE_MS), "after the fork");
}

TEST(a_forked_child_connects_itself)
{
        struct rig *rig = start();

        run_silent(fork_and_go_on, NULL);
        rig_stop(rig);
}

/* Freed memory is idle at once, whatever the stream. */
static void use_pool_functions(void *arg)
{
        struct bfc_client_stats stats = { .struct_size = sizeof(stats) };
        bfc_client *client;
        void *p, *q;

        (void)arg;
        load();
        quiet();
        p = torch_pool_malloc(4 << 20, 0, NULL);
        q = torch_pool_malloc(1000, 0, NULL);
        REQUIRE(p && q && p != q, "NULL");
        REQUIRE(bfc_default(&client) == 0 && bfc_stats(client, &stats) == 0, "%s", bfc_last_error());
        REQUIRE(stats.bytes_in_use == (4 << 20) + 1024, "%llu in use",
                (unsigned long long)stats.bytes_in_use);
        torch_pool_free(p, 4 << 20, 0, NULL);
        torch_pool_free(q, 1000, 0, NULL);
        REQUIRE(bfc_stats(client, &stats) == 0 && stats.bytes_in_use == 0 && stats.num_frees == 2, "in use");
        REQUIRE(!torch_pool_malloc(0, 0, NULL), "0 bytes");
        REQUIRE(!torch_pool_malloc(-1, 0, NULL), "-1 bytes");
}

static unsigned n_waits(const char *counts)
{
        char name[64];
        unsigned n, ret = 0;
        FILE *f = rig_device() == ON_HOST ? NULL : fopen(counts, "r");

        REQUIRE(f || rig_device() == ON_HOST, "%s", counts);
        while (f && fscanf(f, "%63s %u", name, &n) == 2)
                ret = strcmp(name, "cuCtxSynchronize") == 0 ? n : ret;
        if (f)
                fclose(f);
        return ret;
}

#define N_SEGMENTS 20

/* Each free alone waits for the device, and those of one call together once. Then all is free. */
static void free_pool_segments(void *arg)
{
        struct bfc_client_stats stats = { .struct_size = sizeof(stats) };
        void *segments[N_SEGMENTS];
        bfc_client *client;
        unsigned n;

        setenv("FAKE_CUDA_COUNTS", arg, 1);
        load();
        for (int together = 0; together < 2; together++) {
                for (int i = 0; i < N_SEGMENTS; i++) {
                        segments[i] = torch_pool_malloc(2 << 20, 0, NULL);
                        REQUIRE(segments[i], "NULL");
                }
                REQUIRE(bfc_default(&client) == 0, "%s", bfc_last_error());
                n = n_waits(arg);
                if (together)
                        torch_pool_free_begin();
                for (int i = 0; i < N_SEGMENTS; i++)
                        torch_pool_free(segments[i], 2 << 20, 0, NULL);
                if (together) {
                        REQUIRE(bfc_stats(client, &stats) == 0, "%s", bfc_last_error());
                        REQUIRE(stats.bytes_in_use == N_SEGMENTS * MIB * 2 && n_waits(arg) == n,
                                "freed early");
                        torch_pool_free_end();
                }
                REQUIRE(bfc_stats(client, &stats) == 0 && stats.bytes_in_use == 0, "in use");
                n = n_waits(arg) - n;
                REQUIRE(rig_device() == ON_HOST || n == (together ? 1 : N_SEGMENTS), "%u waits", n);
        }
        torch_pool_free_begin(); /* nothing is freed */
        torch_pool_free(NULL, 2 << 20, 0, NULL);
        torch_pool_free_end();
        torch_pool_free_end();
}

TEST(segments_of_a_pool_are_freed_together)
{
        struct rig *rig = start();
        char path[64];

        snprintf(path, sizeof(path), "/tmp/bfcd-waits-%d", (int)getpid());
        child_join(child_start(free_pool_segments, path));
        unlink(path);
        rig_stop(rig);
}

TEST(functions_of_a_pool)
{
        struct rig *rig = start();

        run_saying(use_pool_functions, NULL, "bfc_torch_pool_malloc: the size is negative: -1 bytes");
        rig_stop(rig);
}

/* ---- BFC_WAIT_MS ------------------------------------------------------------- */

#define TIMEOUT_MS "600000" /* longer than a test may take */

struct holder {
        bfc_client *client;
        void *block;
        pthread_t thread;
};

static void hold_most(struct holder *h)
{
        REQUIRE(bfc_connect(NULL, &h->client) == 0, "%s", bfc_last_error());
        REQUIRE(bfc_malloc(h->client, 60 * MIB, &h->block) == 0, "%s", bfc_last_error());
}

static void *free_soon(void *arg)
{
        struct holder *h = arg;

        usleep(100000); /* so that the request is likely to wait by then */
        REQUIRE(bfc_free(h->client, h->block) == 0, "%s", bfc_last_error());
        return NULL;
}

static void release_soon(struct holder *h)
{
        REQUIRE(pthread_create(&h->thread, NULL, free_soon, h) == 0, "a thread");
}

static void release_end(struct holder *h)
{
        pthread_join(h->thread, NULL);
        bfc_disconnect(h->client);
}

/* arg: NULL, or what is not: in a pool. */
static void wait_for_room(void *arg)
{
        ssize_t n_bytes = (arg ? 33 : 32) * (ssize_t)MIB;
        struct holder h;
        void *p;

        setenv("BFC_WAIT_MS", TIMEOUT_MS, 1);
        quiet();
        load();
        hold_most(&h);
        release_soon(&h);
        p = (arg ? torch_pool_malloc : torch_malloc)(n_bytes, 0, NULL);
        REQUIRE(p, "it did not wait: %s", bfc_last_error());
        release_end(&h);
        (arg ? torch_pool_free : torch_free)(p, n_bytes, 0, NULL);
}

static void wait_by_a_word(void *arg)
{
        (void)arg;
        setenv("BFC_WAIT_MS", "long", 1);
        quiet();
        load();
        REQUIRE(!torch_malloc(1, 0, NULL) && !torch_pool_malloc(1, 0, NULL), "it is no number");
}

TEST(allocations_wait_as_the_environment_says)
{
        struct rig *rig = start();

        run_silent(wait_for_room, NULL);
        run_silent(wait_for_room, "pool");
        run_saying(wait_by_a_word, NULL, "BFC_WAIT_MS is \"long\": it must be a number from 0 to");
        rig_stop(rig);
}

/* ---- one extent ----------------------------------------------------------------- */

static void require_one_extent(void *p)
{
        struct bfc_block_info info = { .struct_size = sizeof(info) };
        bfc_client *client;

        REQUIRE(p && bfc_default(&client) == 0 && bfc_block_info(client, p, &info) == 0, "%s",
                bfc_last_error());
        REQUIRE(info.extent_offset + info.n_bytes <= info.extent_bytes,
                "%llu bytes at %llu of an extent of %llu", (unsigned long long)info.n_bytes,
                (unsigned long long)info.extent_offset, (unsigned long long)info.extent_bytes);
}

/* Free memory begins in the middle of an extent: without the flag a block begins there, and spans two. */
static void allocate_in_one_extent(void *arg)
{
        void *p, *q, *r;

        (void)arg;
        setenv("BFC_CACHE", "off", 1);
        quiet();
        load();
        p = cupy_malloc(NULL, MIB, 0);
        r = cupy_malloc(NULL, 5 * MIB, 0);
        q = cupy_malloc(NULL, 2 * MIB, 0);
        REQUIRE(p && r && q, "%s", bfc_last_error());
        cupy_free(NULL, r, 0);
        cupy_free(NULL, q, 0);
        q = torch_malloc_one_extent(2 * (ssize_t)MIB, 0, NULL);
        require_one_extent(q);
        torch_record_stream(q, (cudaStream_t)(uintptr_t)1);
        torch_free(q, 2 * (ssize_t)MIB, 0, NULL);
        q = torch_pool_malloc_one_extent(2 * (ssize_t)MIB, 0, NULL);
        require_one_extent(q);
        torch_pool_free(q, 2 * (ssize_t)MIB, 0, NULL);
        cupy_free(NULL, p, 0);
        REQUIRE(WAIT_FOR(in_use_after_look(NULL) == 0, SETTLE_MS), "freed");
}

TEST(memory_in_one_extent)
{
        struct rig *rig = start();

        run_silent(allocate_in_one_extent, NULL);
        rig_stop(rig);
}
