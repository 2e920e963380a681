/* bench-preload: what the proxy of libcuda.so.1 costs.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A call that is passed on to a driver without that function, beside the call of a function that returns the same; and
 * cuMemAlloc() and cuMemFree(), beside bfc_malloc() and bfc_free() of the same library. The proxy asks the
 * driver for the current context in each, which the fake driver takes long for: that time is measured, and not counted
 * as overhead. Batches alternate. The fastest tenth is compared, since other processes slow down the rest.
 *
 * A small cuMemCreate(), and its cuMemRelease(), are timed one by one, by the proxy and by the driver in turns, and their
 * distributions are compared: the overhead is the largest difference of a percentile of one and the same percentile of
 * the other, up to the 99th. Of several rounds that with the median overhead is shown. The fake driver makes handles without memory for it, because its files cost more than all
 * of this, and not always the same. */
#include <bfcclient.h>

#include <dlfcn.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "integrations/preload/api.h"
#include "tests/bench/daemon.h"
#include "tests/bench/options.h"

#define CALLS       10000u
#define BLOCKS      200u
#define BLOCK_BYTES 4096u

static struct {
        const char *bfcd, *proxy;
        long n_batches;
        double max_call_ns, max_alloc_ns, max_create_ns;
        bool json;
} o = { .n_batches = 200 };

static struct {
        CUresult (*missing)(void), (*device)(CUdevice *);
        CUresult (*alloc)(CUdeviceptr *, size_t), (*free)(CUdeviceptr), (*init)(unsigned int);
        CUresult (*retain)(CUcontext *, CUdevice), (*set)(CUcontext);
        struct maker {
                CUresult (*create)(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *,
                                   unsigned long long);
                CUresult (*release)(CUmemGenericAllocationHandle);
        } proxy, driver;
        int (*connect)(const struct bfc_options *, bfc_client **),
                (*client_alloc)(bfc_client *, size_t, void **);
        int (*client_free)(bfc_client *, void *);
} f;

static void *find(void *library, const char *symbol)
{
        void *found = library ? dlsym(library, symbol) : NULL;

        if (!found)
                die(symbol, dlerror());
        return found;
}

static void find_functions(void)
{
        void *proxy = dlopen(o.proxy, RTLD_NOW | RTLD_LOCAL), *(*driver)(void);

        if (!proxy)
                die(o.proxy, dlerror());
        *(void **)&driver = find(proxy, "bfc_preload_driver");
        if (dlsym(driver(), "cuArrayGetPlane"))
                die("cuArrayGetPlane", "the driver has it; use the fake one");
        *(void **)&f.missing = find(proxy, "cuArrayGetPlane");
        *(void **)&f.device = find(driver(), "cuCtxGetDevice");
        *(void **)&f.driver.create = find(driver(), "cuMemCreate");
        *(void **)&f.driver.release = find(driver(), "cuMemRelease");
        *(void **)&f.proxy.create = find(proxy, "cuMemCreate");
        *(void **)&f.proxy.release = find(proxy, "cuMemRelease");
        *(void **)&f.init = find(proxy, "cuInit");
        *(void **)&f.retain = find(proxy, "cuDevicePrimaryCtxRetain");
        *(void **)&f.set = find(proxy, "cuCtxSetCurrent");
        *(void **)&f.alloc = find(proxy, "cuMemAlloc_v2");
        *(void **)&f.free = find(proxy, "cuMemFree_v2");
        *(void **)&f.connect = find(proxy, "bfc_connect");
        *(void **)&f.client_alloc = find(proxy, "bfc_malloc");
        *(void **)&f.client_free = find(proxy, "bfc_free");
}

static void check(const char *what, int result)
{
        char text[32];

        snprintf(text, sizeof(text), "%d", result);
        if (result != 0)
                die(what, text);
}

/* ---- batches --------------------------------------------------------------------- */

static __attribute__((noinline)) CUresult not_supported(void)
{
        __asm__ volatile("");
        return CUDA_ERROR_NOT_SUPPORTED;
}

static double time_calls(CUresult (*call)(void))
{
        uint64_t begin = now_ns();

        for (unsigned i = 0; i < CALLS; i++)
                call();
        return (double)(now_ns() - begin) / CALLS;
}

static double time_contexts(void)
{
        uint64_t begin = now_ns();
        CUdevice device;

        for (unsigned i = 0; i < BLOCKS; i++)
                f.device(&device);
        return (double)(now_ns() - begin) / BLOCKS;
}

static void time_create(const struct maker *maker, double *ret_create, double *ret_release)
{
        const CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                           .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };
        CUmemGenericAllocationHandle handle;
        uint64_t begin = now_ns(), middle;

        check("cuMemCreate", (int)maker->create(&handle, 2 * MIB, &prop, 0));
        middle = now_ns();
        check("cuMemRelease", (int)maker->release(handle));
        *ret_create = (double)(middle - begin);
        *ret_release = (double)(now_ns() - middle);
}

static void time_driver(double *ret_alloc, double *ret_free)
{
        CUdeviceptr p[BLOCKS];
        uint64_t begin = now_ns(), middle;

        for (unsigned i = 0; i < BLOCKS; i++)
                check("cuMemAlloc", (int)f.alloc(&p[i], BLOCK_BYTES));
        middle = now_ns();
        for (unsigned i = 0; i < BLOCKS; i++)
                check("cuMemFree", (int)f.free(p[i]));
        *ret_alloc = (double)(middle - begin) / BLOCKS;
        *ret_free = (double)(now_ns() - middle) / BLOCKS;
}

static void time_client(bfc_client *client, double *ret_alloc, double *ret_free)
{
        void *p[BLOCKS];
        uint64_t begin = now_ns(), middle;

        for (unsigned i = 0; i < BLOCKS; i++)
                check("bfc_malloc", f.client_alloc(client, BLOCK_BYTES, &p[i]));
        middle = now_ns();
        for (unsigned i = 0; i < BLOCKS; i++)
                check("bfc_free", f.client_free(client, p[i]));
        *ret_alloc = (double)(middle - begin) / BLOCKS;
        *ret_free = (double)(now_ns() - middle) / BLOCKS;
}

/* ---- the program -------------------------------------------------------------------- */

enum { CALL, PLAIN_CALL, ALLOC, CLIENT_ALLOC, FREE, CLIENT_FREE, CONTEXT, N_TIMES };
enum { CREATE, DRIVER_CREATE, RELEASE, DRIVER_RELEASE, N_CREATES };
#define MOST   99 /* calls of 100 */
#define ROUNDS 9

/* Percentiles. */
struct spread {
        double of[MOST + 1];
};

static void measure_creates(struct spread ret[static N_CREATES])
{
        size_t n = (size_t)o.n_batches * BLOCKS / ROUNDS;
        double *times[N_CREATES];

        for (size_t i = 0; i < N_CREATES; i++) {
                times[i] = need(malloc(n * sizeof(double)));
                memset(times[i], 1, n * sizeof(double)); /* so that no page is new while it is timed */
        }
        for (size_t i = 0; i < n; i++) {
                time_create(&f.proxy, &times[CREATE][i], &times[RELEASE][i]);
                time_create(&f.driver, &times[DRIVER_CREATE][i], &times[DRIVER_RELEASE][i]);
        }
        for (size_t i = 0; i < N_CREATES; i++) {
                (void)quantile(times[i], n, 50); /* which sorts them */
                for (unsigned percent = 1; percent <= MOST; percent++)
                        ret[i].of[percent] = times[i][n * percent / 100];
                free(times[i]);
        }
}

static double create_overhead(const struct spread *s, int proxy, int driver)
{
        double ret = 0;

        for (unsigned percent = 1; percent <= MOST; percent++)
                if (s[proxy].of[percent] - s[driver].of[percent] > ret)
                        ret = s[proxy].of[percent] - s[driver].of[percent];
        return ret;
}

static int compare_rounds(const void *a, const void *b)
{
        double x = create_overhead(a, CREATE, DRIVER_CREATE), y = create_overhead(b, CREATE, DRIVER_CREATE);

        return (x > y) - (x < y);
}

static void measure_rounds(struct spread ret[static N_CREATES])
{
        struct spread rounds[ROUNDS][N_CREATES];

        for (size_t i = 0; i < ROUNDS; i++)
                measure_creates(rounds[i]);
        qsort(rounds, ROUNDS, sizeof(rounds[0]), compare_rounds);
        memcpy(ret, rounds[ROUNDS / 2], sizeof(rounds[0]));
}

static void measure(bfc_client *client, double ret[static N_TIMES])
{
        size_t n = (size_t)o.n_batches;
        double *times[N_TIMES];

        for (size_t i = 0; i < N_TIMES; i++)
                times[i] = need(calloc(n, sizeof(double)));
        for (size_t i = 0; i < n; i++) {
                times[CALL][i] = time_calls(f.missing);
                times[PLAIN_CALL][i] = time_calls(not_supported);
                time_driver(&times[ALLOC][i], &times[FREE][i]);
                time_client(client, &times[CLIENT_ALLOC][i], &times[CLIENT_FREE][i]);
                times[CONTEXT][i] = time_contexts();
        }
        for (size_t i = 0; i < N_TIMES; i++) {
                ret[i] = quantile(times[i], n, 10);
                free(times[i]);
        }
}

/* Beyond the driver's answer. */
static double overhead(const double *t, int driver, int client)
{
        return t[driver] - t[client] - t[CONTEXT];
}

static void print_creates(const char *function, const struct spread *s, int proxy, int driver)
{
        printf("%-14s %6.0f ns (50 of 100), %6.0f ns (99), the driver %6.0f and %6.0f ns: at most %+.0f ns in 99 of "
               "100\n",
               function, s[proxy].of[50], s[proxy].of[MOST], s[driver].of[50], s[driver].of[MOST],
               create_overhead(s, proxy, driver));
}

static void print(const double *t, const struct spread *s)
{
        if (o.json) {
                print_json(json_pack("{s:i, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "schema",
                                     1, "call_ns", t[CALL], "plain_call_ns", t[PLAIN_CALL], "alloc_ns",
                                     t[ALLOC], "client_alloc_ns", t[CLIENT_ALLOC], "free_ns", t[FREE],
                                     "client_free_ns", t[CLIENT_FREE], "context_ns", t[CONTEXT], "create_ns",
                                     s[CREATE].of[50], "driver_create_ns", s[DRIVER_CREATE].of[50],
                                     "create_overhead_ns", create_overhead(s, CREATE, DRIVER_CREATE),
                                     "release_overhead_ns", create_overhead(s, RELEASE, DRIVER_RELEASE)));
                return;
        }
        printf("a call that is passed on  %8.1f ns, of a function  %8.1f ns: %+.1f ns\n", t[CALL],
               t[PLAIN_CALL], t[CALL] - t[PLAIN_CALL]);
        printf("cuCtxGetDevice()          %8.1f ns\n", t[CONTEXT]);
        printf("cuMemAlloc()              %8.1f ns, bfc_malloc()   %8.1f ns: %+.1f ns beyond both\n",
               t[ALLOC], t[CLIENT_ALLOC], overhead(t, ALLOC, CLIENT_ALLOC));
        printf("cuMemFree()               %8.1f ns, bfc_free()     %8.1f ns: %+.1f ns beyond both\n", t[FREE],
               t[CLIENT_FREE], overhead(t, FREE, CLIENT_FREE));
        print_creates("cuMemCreate()", s, CREATE, DRIVER_CREATE);
        print_creates("cuMemRelease()", s, RELEASE, DRIVER_RELEASE);
}

/* With the size of its cache. */
static bfc_client *connect_like_proxy(void)
{
        const struct bfc_options options = { .struct_size = sizeof(options),
                                             .socket = socket_path,
                                             .cache_idle_bytes = 4 * MIB };
        bfc_client *client;

        check("bfc_connect", f.connect(&options, &client));
        return client;
}

int main(int argc, char **argv)
{
        const struct bench_option options[] = {
                OPTION_BFCD(&o.bfcd),
                OPTION_JSON(&o.json),
                { "proxy", .text = &o.proxy, .unit = "FILE", .help = "the proxy" },
                { "batches", .count = &o.n_batches, .min = 1, .max = 100000, .unit = "N",
                  .help = "of each kind" },
                { "max-call-ns", .number = &o.max_call_ns, .unit = "NS",
                  .help = "limit of a call's overhead" },
                { "max-alloc-ns", .number = &o.max_alloc_ns, .unit = "NS",
                  .help = "limit of an allocation's overhead" },
                { "max-create-ns", .number = &o.max_create_ns, .unit = "NS",
                  .help = "limit of the overhead of 99 of 100 small cuMemCreate()" },
                { 0 },
        };
        struct spread creates[N_CREATES];
        double times[N_TIMES];
        bfc_client *client;
        CUcontext context;
        pid_t daemon_pid;

        options_parse(
                argc, argv,
                "Times calls by the proxy of libcuda.so.1 and the same calls without it, on a driver that\n"
                "the dynamic linker finds. Ends with 1 if the overhead exceeds a limit.",
                options);
        options_require(o.bfcd && o.proxy, "--bfcd or --proxy is missing");
        make_folder("bench-preload");
        daemon_pid = daemon_start(
                o.bfcd, -1,
                "devices:\n  - {id: \"cuda:0\", partitions: [{name: bench, limit: 64MiB, share: fd}]}\n"
                "tenants:\n  - {name: bench, match: {uid: [%u]}, quotas: [{partition: bench, limit: "
                "64MiB}]}\n",
                (unsigned)getuid());
        bfc_disconnect(client_start(socket_path, "bench-preload", 0)); /* the daemon is there */
        setenv("BFC_SOCKET", socket_path, 1);
        setenv("FAKE_CUDA_INSTANT_CREATE", "1", 1);
        find_functions();
        client = connect_like_proxy();
        check("cuInit", (int)f.init(0));
        check("cuDevicePrimaryCtxRetain", (int)f.retain(&context, 0));
        check("cuCtxSetCurrent", (int)f.set(context));
        measure(client, times);
        measure_rounds(creates);
        process_stop(daemon_pid, SIGKILL);
        print(times, creates);
        return (o.max_call_ns > 0 && times[CALL] - times[PLAIN_CALL] > o.max_call_ns) ||
               (o.max_alloc_ns > 0 && overhead(times, ALLOC, CLIENT_ALLOC) > o.max_alloc_ns) ||
               (o.max_create_ns > 0 && create_overhead(creates, CREATE, DRIVER_CREATE) > o.max_create_ns);
}
