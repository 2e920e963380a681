/* bench-copy: how fast device_copy() moves an extent to one of the host and back, beside memcpy() between two
 * mapped extents of the host.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Extents have the size that arenas give them. The three ways take turns, so that all meet the same machine. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "device/device.h"
#include "device/host_pages.h"
#include "tests/bench/daemon.h"
#include "tests/bench/options.h"
#include "tests/bench/samples.h"

enum way { BY_MEMCPY, TO_HOST, FROM_HOST, N_WAYS };
static const char *const way_names[N_WAYS] = { "memcpy", "to_host", "from_host" };

static struct {
        const char *cuda; /* the GPU; NULL: from the host to the host */
        long n_mib, extent_mib, n_rounds;
        double min_ratio;
        bool json;
} o = { .n_mib = 2048, .extent_mib = 64, .n_rounds = 5 };

struct pair {
        struct device_extent extent, host;
        void *from, *to; /* of memcpy() */
};

static struct device *device, *host;
static struct pair *pairs;
static long n_pairs;

static void check(int r, const char *what)
{
        if (r < 0)
                die(what, strerror(-r));
}

/* In large pages, where the extent has them. */
static void *map(const struct device_extent *e)
{
        return need(host_pages_map(e->fd, 0, e->n_bytes));
}

static void begin(void)
{
        uint64_t n_bytes = (uint64_t)o.extent_mib * MIB;
        char sentence[400];

        check(device_host_new(&host), "the host");
        device = host;
        if (o.cuda && device_cuda_new(o.cuda, &device, sentence, sizeof(sentence)) < 0)
                die("the GPU", sentence);
        n_pairs = o.n_mib / o.extent_mib;
        pairs = need(calloc((size_t)n_pairs, sizeof(*pairs)));
        for (struct pair *p = pairs; p < pairs + n_pairs; p++) {
                struct device_extent source = DEVICE_EXTENT_EMPTY;

                check(device_make(device, DEVICE_SHARE_FD, n_bytes, &p->extent), "an extent");
                check(device_make(host, DEVICE_SHARE_FD, n_bytes, &p->host), "an extent of the host");
                p->to = map(&p->host);
                if (o.cuda)
                        check(device_make(host, DEVICE_SHARE_FD, n_bytes, &source), "an extent of the host");
                p->from = map(o.cuda ? &source : &p->extent); /* a mapping alone keeps the memory */
                memset(p->from, 1, n_bytes);
                memset(p->to, 2, n_bytes);
        }
}

static void end(void)
{
        for (struct pair *p = pairs; p < pairs + n_pairs; p++) {
                munmap(p->from, p->extent.n_bytes);
                munmap(p->to, p->host.n_bytes);
                check(device_destroy(device, &p->extent), "destroy");
                check(device_destroy(host, &p->host), "destroy");
        }
        if (device != host)
                device_free(device);
        device_free(host);
        free(pairs);
}

static double gib_per_s(enum way way)
{
        uint64_t began = now_ns();

        for (const struct pair *p = pairs; p < pairs + n_pairs; p++) {
                if (way == BY_MEMCPY)
                        memcpy(p->to, p->from, p->extent.n_bytes);
                else
                        check(device_copy(device,
                                          &(struct device_copy){ .extent = &p->extent,
                                                                 .host = &p->host,
                                                                 .n_bytes = p->extent.n_bytes,
                                                                 .to_host = way == TO_HOST },
                                          1),
                              "device_copy");
        }
        return (double)(n_pairs * o.extent_mib) / 1024 / (ms_since(began) / 1000);
}

static bool report(double values[N_WAYS][100])
{
        json_t *root = json_object();
        double medians[N_WAYS];
        bool is_good = true;

        for (enum way i = 0; i < N_WAYS; i++) {
                double ratio;

                medians[i] = quantile(values[i], (size_t)o.n_rounds, 50);
                ratio = medians[i] / medians[BY_MEMCPY];
                is_good = is_good && ratio >= (i == BY_MEMCPY ? 0 : o.min_ratio);
                json_object_set_new(root, way_names[i],
                                    json_pack("{s:f,s:f}", "gib_per_s", medians[i], "ratio", ratio));
                if (!o.json)
                        printf("%-10s %6.2f GiB/s  %.2f of memcpy\n", way_names[i], medians[i], ratio);
        }
        if (o.json)
                print_json(root);
        else
                json_decref(root);
        return is_good;
}

static void parse(int argc, char **argv)
{
        const struct bench_option options[] = {
                OPTION_JSON(&o.json),
                { "cuda", .text = &o.cuda, .unit = "ID", .help = "a GPU, as in the config" },
                { "mib", .count = &o.n_mib, .min = 2, .max = 1 << 20, .unit = "N",
                  .help = "memory that is copied" },
                { "extent-mib", .count = &o.extent_mib, .min = 2, .max = 1 << 20, .unit = "N",
                  .help = "size of an extent" },
                { "rounds", .count = &o.n_rounds, .min = 1, .max = 100, .unit = "N",
                  .help = "runs of each way" },
                { "min-ratio", .number = &o.min_ratio, .unit = "F",
                  .help = "least bandwidth of device_copy() over memcpy()'s" },
                { 0 },
        };

        options_parse(
                argc, argv,
                "Times copies between extents, beside memcpy(). Ends with 1 if a median ratio is too low.",
                options);
        o.extent_mib -= o.extent_mib % 2;
        options_require(o.extent_mib <= o.n_mib, "--extent-mib is more than --mib");
}

int main(int argc, char **argv)
{
        static double values[N_WAYS][100];
        bool is_good;

        parse(argc, argv);
        make_folder("bench-copy");
        begin();
        for (long round = 0; round < o.n_rounds; round++)
                for (enum way i = 0; i < N_WAYS; i++)
                        values[i][round] = gib_per_s(i);
        is_good = report(values);
        end();
        return is_good ? EXIT_SUCCESS : EXIT_FAILURE;
}
