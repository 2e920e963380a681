/* Experiments: what memory costs, in time and bytes, and what is in it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/experiments.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAX_SAMPLES 1000

struct samples {
        double us[MAX_SAMPLES];
        int n;
};

static int compare(const void *a, const void *b)
{
        double x = *(const double *)a, y = *(const double *)b;

        return (x > y) - (x < y);
}

static void say_samples(const char *name, struct samples *s)
{
        if (s->n == 0)
                return;
        qsort(s->us, (size_t)s->n, sizeof(s->us[0]), compare);
        say_open(name, '{');
        say_number("p50_us", s->us[s->n / 2]);
        say_number("p99_us", s->us[s->n * 99 / 100]);
        say_number("n", s->n);
        say_close('}');
}

/* Adds what `call` took; the value of the expression is the call's. */
#define TIMED(s, call)                                                                                       \
        ({                                                                                                   \
                double start_ = now_us();                                                                    \
                CUresult r_ = (call);                                                                        \
                (s)->us[(s)->n++] = now_us() - start_;                                                       \
                r_;                                                                                          \
        })

static int n_rounds(size_t n_bytes)
{
        int n = n_bytes <= 256 * MIB ? 200 : 20;

        return is_quick ? 3 : n;
}

/* Each size from 2 MiB to 16 GiB that fits twice over. */
static void for_sizes(void (*measure)(size_t n_bytes))
{
        start_here();
        say_open("sizes", '[');
        for (size_t n = 2 * MIB; n <= ((size_t)16 << 30) && n <= max_n_bytes; n *= 8) {
                if (n * 2 > gpu_n_free())
                        break;
                say_open(NULL, '{');
                say_number("bytes", (double)n);
                measure(n);
                say_close('}');
        }
        say_close(']');
}

/* ---- time ---------------------------------------------------------------- */

static void measure_alloc(size_t n_bytes)
{
        struct samples alloc = { .n = 0 }, to_free = { .n = 0 }, fill = { .n = 0 };
        CUresult r = CUDA_SUCCESS;

        for (int i = 0; i < n_rounds(n_bytes) && r == CUDA_SUCCESS; i++) {
                CUdeviceptr p;

                r = TIMED(&alloc, cu.cuMemAlloc_v2(&p, n_bytes));
                if (r != CUDA_SUCCESS)
                        break;
                TIMED(&fill, (cu.cuMemsetD8_v2(p, 1, n_bytes), cu.cuCtxSynchronize()));
                r = TIMED(&to_free, cu.cuMemFree_v2(p));
        }
        say_error("last", r);
        say_samples("cuMemAlloc", &alloc);
        say_samples("cuMemFree", &to_free);
        say_samples("fill", &fill);
}

static void latency_alloc(void)
{
        for_sizes(measure_alloc);
}

static void measure_vmm(size_t n_bytes)
{
        struct samples create = { .n = 0 }, export = { .n = 0 }, import = { .n = 0 }, map = { .n = 0 },
                       unmap = { .n = 0 };
        CUmemAllocationProp prop = gpu_prop(0);
        CUresult r = CUDA_SUCCESS;

        for (int i = 0; i < n_rounds(n_bytes) && r == CUDA_SUCCESS; i++) {
                CUmemGenericAllocationHandle handle, imported;
                struct gpu_mapping mapping;
                int fd = -1;

                r = TIMED(&create, cu.cuMemCreate(&handle, n_bytes, &prop, 0));
                if (r != CUDA_SUCCESS)
                        break;
                r = TIMED(&export, cu.cuMemExportToShareableHandle(
                                           &fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
                if (r == CUDA_SUCCESS)
                        r = TIMED(&import, cu.cuMemImportFromShareableHandle(
                                                   &imported, (void *)(intptr_t)fd,
                                                   CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
                if (fd >= 0)
                        close(fd);
                if (r == CUDA_SUCCESS)
                        r = TIMED(&map, gpu_map(0, imported, n_bytes, &mapping));
                if (r == CUDA_SUCCESS)
                        r = TIMED(&unmap, gpu_unmap(&mapping));
                cu.cuMemRelease(handle);
        }
        say_error("last", r);
        say_samples("cuMemCreate", &create);
        say_samples("export", &export);
        say_samples("import", &import);
        say_samples("reserve_map_access", &map);
        say_samples("unmap_free_release", &unmap);
}

static void latency_vmm(void)
{
        for_sizes(measure_vmm);
}

static struct peer exporter;

static void measure_open(size_t n_bytes)
{
        struct peer_message m = { .op = PEER_ALLOC, .a = n_bytes };
        struct samples open = { .n = 0 }, close = { .n = 0 };
        CUresult r = ask(&exporter, &m);
        uint64_t at = m.a;

        if (r == CUDA_SUCCESS) {
                m = (struct peer_message){ .op = PEER_GET_HANDLE, .a = at };
                r = ask(&exporter, &m);
        }
        for (int i = 0; i < n_rounds(n_bytes) && r == CUDA_SUCCESS; i++) {
                CUdeviceptr p;

                r = TIMED(&open, cu.cuIpcOpenMemHandle_v2(&p, m.handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
                if (r == CUDA_SUCCESS)
                        r = TIMED(&close, cu.cuIpcCloseMemHandle(p));
        }
        say_error("last", r);
        say_samples("open", &open);
        say_samples("close", &close);
        m = (struct peer_message){ .op = PEER_FREE, .a = at };
        ask(&exporter, &m);
}

static void latency_open(void)
{
        exporter = start_peer((uid_t)-1, 0);
        for_sizes(measure_open);
        peer_end(&exporter);
}

static void latency_info(void)
{
        struct samples s = { .n = 0 };
        size_t n;

        start_here();
        for (int i = 0; i < (is_quick ? 3 : MAX_SAMPLES); i++)
                TIMED(&s, cu.cuMemGetInfo_v2(&n, &n));
        say_samples("cuMemGetInfo", &s);
}

/* ---- bytes --------------------------------------------------------------- */

static void context_memory(void)
{
        struct peer peers[4];
        size_t n_before;

        start_here();
        n_before = gpu_n_free();
        say_open("taken_by_each", '[');
        for (int i = 0; i < 4; i++) {
                size_t n_free = gpu_n_free();

                peers[i] = start_peer((uid_t)-1, 0);
                say_number(NULL, (double)(n_free - gpu_n_free()));
        }
        say_close(']');
        for (int i = 0; i < 4; i++)
                peer_end(&peers[i]);
        sleep(is_quick ? 0 : 1);
        say_flag("all_returned", gpu_n_free() >= n_before);
}

/* A context that has run a kernel costs more than one that has not. */
static void context_memory_kernel(void)
{
        struct peer p;
        struct peer_message m = { .op = PEER_ALLOC, .a = 2 * MIB };
        size_t n_free;

        start_here();
        p = start_peer((uid_t)-1, 0);
        ask(&p, &m);
        n_free = gpu_n_free();
        m = (struct peer_message){ .op = PEER_SPIN, .a = m.a };
        say_error("launch", ask(&p, &m));
        say_number("taken_by_the_launch", (double)(n_free - gpu_n_free()));
        peer_kill(&p);
}

/* 64 MiB: how many bytes of it are not zero. */
static void say_not_zero(const char *name, size_t n_bytes)
{
        CUdeviceptr p;

        if (cu.cuMemAlloc_v2(&p, n_bytes) != CUDA_SUCCESS)
                skip("cannot allocate");
        say_number(name, (double)gpu_count_other(p, 0, n_bytes));
        cu.cuMemsetD8_v2(p, 0x5a, n_bytes);
        cu.cuCtxSynchronize();
        cu.cuMemFree_v2(p);
}

static void fresh_alloc(void)
{
        size_t n_bytes = max_n_bytes < 64 * MIB ? max_n_bytes : 64 * MIB;
        struct peer p = start_peer((uid_t)-1, 0);
        struct peer_message m = { .op = PEER_ALLOC, .a = n_bytes };

        start_here();
        say_number("bytes", (double)n_bytes);
        say_not_zero("not_zero_first", n_bytes);
        say_not_zero("not_zero_after_own_free", n_bytes);
        if (ask(&p, &m) == CUDA_SUCCESS) {
                m = (struct peer_message){ .op = PEER_FILL, .a = m.a, .b = 0x5b, .c = n_bytes };
                ask(&p, &m);
        }
        peer_kill(&p);
        say_not_zero("not_zero_after_anothers_death", n_bytes);
}

static void fresh_vmm(void)
{
        size_t n_bytes = max_n_bytes < 64 * MIB ? max_n_bytes : 64 * MIB;
        struct gpu_mapping mapping;

        start_here();
        say_open("not_zero", '[');
        for (int i = 0; i < 3; i++) {
                if (gpu_create_and_map(0, n_bytes, &mapping) != CUDA_SUCCESS)
                        break;
                say_number(NULL, (double)gpu_count_other(mapping.at, 0, n_bytes));
                cu.cuMemsetD8_v2(mapping.at, 0x5a, n_bytes);
                cu.cuCtxSynchronize();
                gpu_unmap(&mapping);
        }
        say_close(']');
}

/* How long until cuMemGetInfo shows released memory; -1: not within
 * a second. */
static double us_until_free(size_t n_free)
{
        double began = now_us();

        while (now_us() - began < 1e6)
                if (gpu_n_free() >= n_free)
                        return now_us() - began;
        return -1;
}

static void returned_at_once(void)
{
        static const size_t sizes[] = { 2 * MIB, 6 * MIB, 64 * MIB };
        struct gpu_mapping mapping;
        CUdeviceptr p;

        start_here();
        say_open("returned", '[');
        for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]) && sizes[i] <= max_n_bytes; i++) {
                size_t n_free = gpu_n_free();

                say_open(NULL, '{');
                say_number("bytes", (double)sizes[i]);
                if (cu.cuMemAlloc_v2(&p, sizes[i]) == CUDA_SUCCESS) {
                        say_number("taken_by_alloc", (double)(n_free - gpu_n_free()));
                        cu.cuMemFree_v2(p);
                        say_number("alloc_us", us_until_free(n_free));
                }
                n_free = gpu_n_free();
                if (gpu_create_and_map(0, sizes[i], &mapping) == CUDA_SUCCESS) {
                        say_number("taken_by_create", (double)(n_free - gpu_n_free()));
                        gpu_unmap(&mapping);
                        say_number("create_us", us_until_free(n_free));
                }
                say_close('}');
        }
        say_close(']');
}

/* Starts jobs, one after another, until it is killed: each has a context and 64 MiB. */
static pid_t start_jobs(void)
{
        pid_t parent = getpid(), pid = fork();

        if (pid != 0)
                return pid;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        while (getppid() == parent) {
                struct peer_message start = { .op = PEER_START };
                struct peer_message alloc = { .op = PEER_ALLOC,
                                              .a = max_n_bytes < 64 * MIB ? MIB : 64 * MIB };
                struct peer p;

                if (peer_start((uid_t)-1, 0, &p) < 0)
                        break;
                if (ask(&p, &start) == CUDA_SUCCESS)
                        ask(&p, &alloc);
                peer_end(&p);
        }
        _exit(0);
}

/* bfcd compares free memory before and after a release. A context that another
 * process makes between the two looks hides a part of what has returned. */
static void released_beside_jobs(size_t n_bytes)
{
        CUmemAllocationProp prop = gpu_prop(0);
        int n = 0, n_less = 0, n_less_than_half = 0;
        double longest = 0, sum = 0, until;
        pid_t jobs = start_jobs();

        start_here();
        for (until = now_us() + (is_quick ? 2e5 : 1e7); now_us() < until; n++) {
                CUmemGenericAllocationHandle handle;
                size_t before, returned;
                double began;

                if (cu.cuMemCreate(&handle, n_bytes, &prop, 0) != CUDA_SUCCESS)
                        break;
                began = now_us();
                before = gpu_n_free();
                cu.cuMemRelease(handle);
                returned = gpu_n_free();
                returned = returned > before ? returned - before : 0;
                sum += now_us() - began;
                longest = now_us() - began > longest ? now_us() - began : longest;
                n_less += returned < n_bytes;
                n_less_than_half += returned < n_bytes / 2;
        }
        kill(jobs, SIGKILL);
        waitpid(jobs, NULL, 0);
        say_number("bytes", (double)n_bytes);
        say_number("releases", n);
        say_number("returned_less", n_less);
        say_number("returned_less_than_half", n_less_than_half);
        say_number("between_the_looks_us", n > 0 ? sum / n : 0);
        say_number("longest_us", longest);
}

static void released_small(void)
{
        released_beside_jobs(2 * MIB);
}

static void released_large(void)
{
        released_beside_jobs(max_n_bytes < 512 * MIB ? max_n_bytes : 512 * MIB);
}

const struct experiment memory_experiments[] = {
        { "latency-alloc", "cuMemAlloc, cuMemFree and a fill, 2 MiB to 16 GiB", latency_alloc },
        { "latency-vmm", "cuMemCreate, export, import, map and access", latency_vmm },
        { "latency-open", "cuIpcOpenMemHandle and close", latency_open },
        { "latency-info", "cuMemGetInfo", latency_info },
        { "context-memory", "what a context takes", context_memory },
        { "context-memory-kernel", "and what its first kernel adds", context_memory_kernel },
        { "returned-at-once", "when released memory shows as free", returned_at_once },
        { "released-beside-jobs-small", "do starting jobs hide that 2 MiB have returned", released_small },
        { "released-beside-jobs-large", "and 512 MiB", released_large },
        { "fresh-alloc", "is cuMemAlloc's memory zero: first, and after a free or a death", fresh_alloc },
        { "fresh-vmm", "is cuMemCreate's", fresh_vmm },
        { NULL, NULL, NULL },
};
