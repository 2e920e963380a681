/* bfc-replay against a real daemon: nothing corrupted, nothing left, and peaks
 * that are the trace's own. What the peak must be is worked out here once more,
 * from the file, so that daemon and replay cannot be wrong together.
 *
 * BFC_TRACES may name a folder with further traces; each *.csv in it is replayed
 * at a scale that fits.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "tests/integration/json.h"

enum { REFUSED = 1, USAGE = 2 }; /* exit statuses */

#define LIMIT       (256 * MIB)
#define SCALED_PEAK (96 * MIB) /* of a large trace, so that holes and rounding fit too */

static const struct rig_config roomy = {
        .size = "512MiB",
        .partitions = "      - {name: train, limit: 512MiB, growth: on-demand}\n",
        .tenants =
                TENANT("red", "@UID@", "train, limit: 256MiB") TENANT("small", "@UID@", "train, limit: 4MiB"),
};

/* ---- a trace, read by the test itself --------------------------------------- */

struct step {
        uint64_t time;
        bool is_malloc; /* at equal times frees come first */
        uint64_t n_bytes;
};

struct steps {
        struct step *all;
        size_t n;
};

static int compare_steps(const void *a, const void *b)
{
        const struct step *x = a, *y = b;

        if (x->time != y->time)
                return x->time < y->time ? -1 : 1;
        return (int)x->is_malloc - (int)y->is_malloc;
}

static struct steps read_steps(const char *path)
{
        FILE *in = fopen(path, "re");
        unsigned long long lower, upper, n_bytes;
        struct steps steps = { 0 };
        char line[256];

        ck_assert_msg(in, "%s cannot be read", path);
        while (fgets(line, sizeof(line), in)) {
                if (sscanf(line, "%*[^,],%llu,%llu,%llu", &lower, &upper, &n_bytes) != 3)
                        continue; /* the heading */
                steps.all = realloc(steps.all, (steps.n + 2) * sizeof(*steps.all));
                ck_assert_ptr_nonnull(steps.all);
                steps.all[steps.n++] = (struct step){ lower, true, n_bytes };
                steps.all[steps.n++] = (struct step){ upper, false, n_bytes };
        }
        fclose(in);
        ck_assert_uint_gt(steps.n, 0);
        qsort(steps.all, steps.n, sizeof(*steps.all), compare_steps);
        return steps;
}

/* The most bytes of blocks at once, each scaled up to a whole byte and then
 * rounded up to granule. */
static uint64_t peak_of(const struct steps *steps, double scale, uint64_t granule)
{
        uint64_t now = 0, peak = 0;

        for (size_t i = 0; i < steps->n; i++) {
                uint64_t n = (uint64_t)ceil((double)steps->all[i].n_bytes * scale);

                n = (n + granule - 1) / granule * granule;
                now = steps->all[i].is_malloc ? now + n : now - n;
                if (now > peak)
                        peak = now;
        }
        return peak;
}

/* ---- running it ------------------------------------------------------------- */

struct replay {
        int status;
        json_t *json; /* NULL where it printed none */
        char *err;
};

static struct replay replay(const struct rig *rig, const char *tenant, const char *path, const char *jobs,
                            double scale)
{
        char scale_text[40];
        const char *argv[] = { program_replay(), "--socket", rig->socket, "--tenant", tenant, "--jobs", jobs,
                               "--verify",       "--json",   "--scale",   scale_text, path,   NULL };
        struct replay run;
        char *out;

        snprintf(scale_text, sizeof(scale_text), "%.17g", scale);
        run.status = program_run(argv, &out, &run.err);
        run.json = json_loads(out, 0, NULL);
        free(out);
        return run;
}

static void replay_free(struct replay *run)
{
        json_decref(run->json);
        free(run->err);
}

static uint64_t count_of(const struct replay *run, const char *key)
{
        const json_t *value = json_object_get(run->json, key);

        ck_assert_msg(json_is_integer(value), "\"%s\" is no number; %s", key, run->err);
        return (uint64_t)json_integer_value(value);
}

static void assert_fine(const struct replay *run, const char *path)
{
        ck_assert_msg(run->status == 0, "%s: status %d: %s", path, run->status, run->err);
        ck_assert_uint_eq(count_of(run, "corruptions"), 0);
        ck_assert_uint_eq(count_of(run, "blocks_left"), 0);
        ck_assert_uint_eq(count_of(run, "failures"), 0);
}

/* One job with the peaks compared, then four side by side. */
static void assert_replays(struct rig *rig, const char *path)
{
        struct steps steps = read_steps(path);
        uint64_t live = peak_of(&steps, 1, 1), peak;
        double scale = live > SCALED_PEAK ? (double)SCALED_PEAK / (double)live : 1;
        const char *name = strrchr(path, '/') + 1;
        struct replay run = replay(rig, "red", path, "1", scale);

        assert_fine(&run, name);
        peak = peak_of(&steps, scale, GRANULE);
        ck_assert_uint_eq(count_of(&run, "allocations"), steps.n / 2);
        ck_assert_uint_eq(count_of(&run, "frees"), steps.n / 2);
        ck_assert_uint_eq(count_of(&run, "peak_block_bytes"), peak);
        ck_assert_uint_eq(count_of(&run, "trace_peak_block_bytes"), peak);
        ck_assert_uint_eq(take_peak(rig), peak); /* to the byte */
        printf("# %s times %.4g: %zu buffers, peak %llu, %.1f us an operation\n", name, scale, steps.n / 2,
               (unsigned long long)peak,
               json_real_value(json_object_get(run.json, "ns_per_operation")) / 1000);
        replay_free(&run);
        free(steps.all);
        ck_assert(WAIT_FOR(rig_charge(rig, "red", "train") == 0, SETTLE_MS));
}

RIG_TEST(generated_traces, roomy)
{
        static const char *const generators[] = { "transformer", "random" };
        char path[128];

        for (size_t i = 0; i < 2; i++) {
                snprintf(path, sizeof(path), "%s/%s.csv", rig->folder, generators[i]);
                make_trace(path, generators[i], NULL);
                assert_replays(rig, path);
        }
}

RIG_TEST(four_jobs_side_by_side, roomy)
{
        struct steps steps;
        struct replay run;
        char path[128];
        uint64_t live;
        double scale;

        snprintf(path, sizeof(path), "%s/t.csv", rig->folder);
        make_trace(path, "transformer", NULL);
        steps = read_steps(path);
        live = peak_of(&steps, 1, 1);
        scale = (double)SCALED_PEAK / 3 / (double)live;
        run = replay(rig, "red", path, "4", scale < 1 ? scale : 1);
        assert_fine(&run, "four jobs");
        ck_assert_uint_eq(count_of(&run, "allocations"), steps.n / 2 * 4);
        ck_assert_uint_eq(json_array_size(json_object_get(run.json, "per_job")), 4);
        ck_assert_uint_ge(count_of(&run, "peak_block_bytes"),
                          peak_of(&steps, scale < 1 ? scale : 1, GRANULE));
        ck_assert_uint_le(take_peak(rig), 4 * peak_of(&steps, scale < 1 ? scale : 1, GRANULE));
        replay_free(&run);
        free(steps.all);
}

/* A quota that is too small is reported, and the replay continues to the end. */
RIG_TEST(a_job_runs_into_its_quota, roomy)
{
        struct replay run;
        char path[128];

        snprintf(path, sizeof(path), "%s/t.csv", rig->folder);
        make_trace(path, "transformer", NULL);
        run = replay(rig, "small", path, "2", 1);
        ck_assert_int_eq(run.status, REFUSED);
        ck_assert_uint_gt(count_of(&run, "failures"), 0);
        ck_assert_uint_eq(count_of(&run, "corruptions"), 0);
        ck_assert_uint_eq(count_of(&run, "blocks_left"), 0);
        ck_assert_ptr_nonnull(strstr(run.err, "refused"));
        ck_assert_ptr_nonnull(strstr(run.err, "limit"));
        ck_assert(has_stats(run.err));
        replay_free(&run);
}

TEST(traces_of_a_folder)
{
        const char *folder_path = getenv("BFC_TRACES");
        struct dirent *entry;
        unsigned n_traces = 0;
        struct rig *rig;
        char path[512];
        DIR *folder;

        if (!folder_path || !*folder_path) {
                printf("# skipped: BFC_TRACES names no folder\n");
                return;
        }
        rig = rig_start(&roomy);
        folder = opendir(folder_path);
        ck_assert_msg(folder, "BFC_TRACES=%s cannot be read", folder_path);
        while ((entry = readdir(folder))) {
                size_t n = strlen(entry->d_name);

                if (n < 4 || strcmp(entry->d_name + n - 4, ".csv") != 0)
                        continue;
                ck_assert_uint_lt((size_t)snprintf(path, sizeof(path), "%s/%s", folder_path, entry->d_name),
                                  sizeof(path));
                assert_replays(rig, path);
                n_traces++;
        }
        closedir(folder);
        ck_assert_msg(n_traces > 0, "BFC_TRACES=%s holds no *.csv", folder_path);
        rig_stop(rig);
}

RIG_TEST(wrong_usage_and_wrong_traces, roomy)
{
        struct replay run;
        char path[128], *twice;
        FILE *out;

        run = replay(rig, "red", "/nowhere/t.csv", "1", 1);
        ck_assert_int_eq(run.status, USAGE);
        ck_assert_ptr_nonnull(strstr(run.err, "/nowhere/t.csv"));
        replay_free(&run);
        snprintf(path, sizeof(path), "%s/t.csv", rig->folder);
        out = fopen(path, "we");
        fputs("id,lower,upper,size\na,1,5,100\nb,9,2,100\n", out);
        fclose(out);
        run = replay(rig, "red", path, "1", 1);
        ck_assert_int_eq(run.status, USAGE);
        ck_assert_ptr_nonnull(strstr(run.err, ":3:")); /* the line */
        replay_free(&run);
        make_trace(path, "random", NULL);
        ck_assert_int_eq(
                program_run(((const char *const[]){ program_replay(), "-j", "--plan", "--json", path, NULL }),
                            NULL, &twice),
                USAGE);
        ck_assert_ptr_nonnull(strstr(twice, "an option is given twice: \"json\""));
        free(twice);
        run = replay(rig, "nobody", path, "1", 1);
        ck_assert_int_eq(run.status, REFUSED);
        ck_assert_ptr_nonnull(strstr(run.err, "nobody"));
        replay_free(&run);
}

/* SIGTERM in the middle: jobs give everything back and leave. */
RIG_TEST(a_replay_is_stopped, roomy)
{
        char path[128];
        pid_t pid;
        int status;

        snprintf(path, sizeof(path), "%s/t.csv", rig->folder);
        make_trace(path, "transformer", NULL);
        pid = fork();
        if (pid == 0) {
                if (!freopen("/dev/null", "w", stderr) || !freopen("/dev/null", "w", stdout))
                        _exit(126);
                execl(program_replay(), "bfc-replay", "--socket", rig->socket, "--tenant", "red", "--jobs",
                      "3", "--repeat", "1000000", "--scale", "0.01", path, (char *)NULL);
                _exit(127);
        }
        ck_assert(WAIT_FOR(rig_stats(rig, "red", "train").num_blocks > 10, SETTLE_MS));
        kill(pid, SIGTERM);
        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        ck_assert(WIFEXITED(status));
        ck_assert_int_eq(WEXITSTATUS(status), REFUSED);
        ck_assert(WAIT_FOR(rig_charge(rig, "red", "train") == 0, SETTLE_MS));
}
