/* bfc-replay: replays a trace as a client of bfcd. For burn-in, for bug reports, and to size quotas.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Options, and the parent of the jobs. Each job is a process, forked before anything is connected, and
 * writes its counts into one shared mapping; the parent waits, adds up and reports. A job never outlives its
 * parent. Signals: the parent forwards INT and TERM, and a job frees its blocks and ends. */
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <limits.h>
#include <search.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "ctl/job.h"
#include "ctl/plan_place.h"
#include "ctl/process.h"
#include "ctl/progress.h"
#include "ctl/report.h"
#include "ctl/show.h"
#include "ctl/table.h"
#include "ctl/tools.h"
#include "proto/paths.h"

enum {
        EXIT_REFUSED = REPORT_REFUSED,
        EXIT_USAGE = 2,
        MAX_JOBS = 4096,
        PROGRESS_US = 200000,
};

struct invocation {
        const char *generate; /* NULL: replay */
        const char *trace_name;
        const char *socket;
        const char *partition;
        const char *tenant;
        const char *cache; /* on, off; NULL: the environment's */
        uint64_t n_jobs;
        uint64_t n_repeats;
        uint64_t seed;
        double scale;
        bool verify;
        bool json;
        bool until_refused;
        bool plan;
        const char *plan_share; /* fd, cuda-ipc; NULL: the config's, or fd */
        const char *plan_config;
        const char *snapshot, *timeline, *plot; /* files to write; NULL: none */
};

/* ---- jobs ---------------------------------------------------------------- */

struct shared {
        struct job_totals totals;
        struct job_result results[];
};

static volatile sig_atomic_t stop;

/* Only the parent has any; written while signals are blocked. */
static pid_t children[MAX_JOBS];
static volatile sig_atomic_t n_children;

static void on_signal(int signal)
{
        int saved = errno;

        stop = 1;
        for (int i = 0; i < n_children; i++)
                if (children[i] > 0)
                        kill(children[i], signal);
        errno = saved;
}

/* The child's part of the fork. */
static void __attribute__((noreturn))
run_child(const struct invocation *v, const struct trace *t, struct shared *shared, uint32_t job,
          pid_t parent, const sigset_t *unblocked)
{
        struct job_plan plan = {
                .trace = t,
                .socket = v->socket,
                .partition = v->partition,
                .tenant = v->tenant,
                .job = job,
                .n_repeats = (uint32_t)v->n_repeats,
                .verify = v->verify,
                .ends_at_refusal = v->until_refused,
                .stop = &stop,
        };

        n_children = 0;
        sigprocmask(SIG_SETMASK, unblocked, NULL);
        prctl(PR_SET_PDEATHSIG, SIGTERM);
        if (getppid() != parent)
                _exit(EXIT_REFUSED);
        if (v->cache)
                setenv("BFC_CACHE", v->cache, 1);
        job_run(&plan, &shared->totals, &shared->results[job]);
        _exit(EXIT_SUCCESS);
}

static int start_jobs(const struct invocation *v, const struct trace *t, struct shared *shared)
{
        struct sigaction action = { .sa_handler = on_signal, .sa_flags = SA_RESTART };
        sigset_t blocked, unblocked;
        pid_t parent = getpid();
        int r = 0;

        sigemptyset(&action.sa_mask);
        sigaction(SIGINT, &action, NULL);
        sigaction(SIGTERM, &action, NULL);
        sigemptyset(&blocked);
        sigaddset(&blocked, SIGINT);
        sigaddset(&blocked, SIGTERM);
        sigprocmask(SIG_BLOCK, &blocked, &unblocked);
        for (uint32_t i = 0; r == 0 && i < v->n_jobs; i++) {
                pid_t pid = fork();

                if (pid == 0)
                        run_child(v, t, shared, i, parent, &unblocked);
                if (pid < 0)
                        r = -errno;
                else
                        children[n_children++] = pid;
        }
        sigprocmask(SIG_SETMASK, &unblocked, NULL);
        if (r < 0)
                on_signal(SIGTERM);
        return r;
}

static uint64_t n_done(const struct shared *shared)
{
        uint64_t n = 0;

        for (int i = 0; i < n_children; i++) {
                const struct job_result *r = &shared->results[i];

                n += r->n_allocs + r->n_frees + 2 * r->n_refused; /* a refused buffer is not freed */
        }
        return n;
}

static void on_alarm(int signal)
{
        (void)signal; /* interrupts waitpid() */
}

/* A look at the counts every so many microseconds; 0: no more. Not where nothing is shown. */
static void set_alarm(const struct progress *progress, int us)
{
        struct itimerval every = { { 0, us }, { 0, us } };
        struct sigaction action = { .sa_handler = on_alarm };

        if (!progress_is_shown(progress))
                return;
        sigemptyset(&action.sa_mask);
        sigaction(SIGALRM, &action, NULL);
        setitimer(ITIMER_REAL, &every, NULL);
}

/* Waits for all; a job that was killed is said to be in its result. */
static void wait_jobs(struct shared *shared, struct progress *progress)
{
        for (int i = 0; i < n_children; i++) {
                struct job_result *result = &shared->results[i];
                pid_t pid = children[i];
                int status = 0;

                while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
                        progress_set(progress, n_done(shared), progress->n_total);
                children[i] = 0; /* its number may be another's now */
                if (!result->done && WIFSIGNALED(status))
                        snprintf(result->error, sizeof(result->error), "ended by signal %d (%s)",
                                 WTERMSIG(status), strsignal(WTERMSIG(status)));
                else if (!result->done)
                        snprintf(result->error, sizeof(result->error), "ended early with status %d",
                                 WEXITSTATUS(status));
        }
}

/* ---- replay -------------------------------------------------------------- */

static int complain(const char *what, int r)
{
        fprintf(stderr, "bfc-replay: %s: %s\n", what, strerror(-r));
        return EXIT_REFUSED;
}

static double now_seconds(void)
{
        struct timespec t;

        clock_gettime(CLOCK_MONOTONIC, &t);
        return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static int print_report(const struct invocation *v, const struct report *report)
{
        int r = v->json ? show_print(stdout, report_json(report)) : report_text(stdout, report);

        if (r == 0 && fflush(stdout) != 0)
                r = -errno;
        if (r < 0)
                complain("standard output", r);
        report_troubles(stderr, report);
        return report_status(report) == REPORT_FINE && r < 0 ? EXIT_REFUSED : report_status(report);
}

static int replay(const struct invocation *v, const struct trace *t)
{
        size_t n_bytes = sizeof(struct shared) + v->n_jobs * sizeof(struct job_result);
        struct shared *shared =
                mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        struct report report = {
                .trace_name = v->trace_name,
                .trace = t,
                .scale = v->scale,
                .n_jobs = (uint32_t)v->n_jobs,
                .n_repeats = (uint32_t)v->n_repeats,
                .verify = v->verify,
                .ends_at_refusal = v->until_refused,
        };
        double begin = now_seconds();
        struct progress progress;
        int r, status;

        if (shared == MAP_FAILED)
                return complain("memory for the results", -errno);
        r = start_jobs(v, t, shared);
        progress_begin(&progress, NULL, "replay", v->n_jobs * v->n_repeats * t->n_events);
        set_alarm(&progress, PROGRESS_US);
        wait_jobs(shared, &progress);
        set_alarm(&progress, 0);
        progress_end(&progress);
        report.seconds = now_seconds() - begin;
        report.totals = &shared->totals;
        report.results = shared->results;
        status = r < 0 ? complain("fork", r) : print_report(v, &report);
        munmap(shared, n_bytes);
        return status;
}

#define PICKLE_BYTE 0x80 /* the first one of a memory snapshot of PyTorch */

/* Closes `in` but standard input. NULL: it was said why. */
static FILE *as_csv(FILE *in, const char *name)
{
        FILE *pickle = tmpfile(), *csv = tmpfile();
        char buffer[1 << 16];
        struct tools_words words = { (const char *const[]){ "torch_trace", NULL },
                                     (const char *const[]){ "--name", name, NULL } };
        int r = pickle && csv ? 0 : -errno;
        size_t n;

        while (r == 0 && (n = fread(buffer, 1, sizeof(buffer), in)) > 0)
                if (fwrite(buffer, 1, n, pickle) != n)
                        r = -errno;
        if (r == 0)
                r = tools_call("bfc-replay", name, &words, pickle, csv);
        if (r < 0)
                fprintf(stderr, "bfc-replay: %s: %s\n", name, strerror(-r));
        if (pickle)
                fclose(pickle);
        if (in != stdin)
                fclose(in);
        if (r == 0)
                return csv;
        if (csv)
                fclose(csv);
        return NULL;
}

/* "-" is standard input. */
static int read_trace(const struct invocation *v, struct trace **ret)
{
        bool is_stdin = strcmp(v->trace_name, "-") == 0;
        const char *name = is_stdin ? "standard input" : v->trace_name;
        FILE *in = is_stdin ? stdin : fopen(v->trace_name, "re");
        char *error = NULL;
        int r, c;

        if (!in) {
                fprintf(stderr, "bfc-replay: %s: %s\n", v->trace_name, strerror(errno));
                return EXIT_USAGE;
        }
        c = getc(in);
        if (c != EOF)
                ungetc(c, in);
        if (c == PICKLE_BYTE) {
                in = as_csv(in, name);
                if (!in)
                        return EXIT_USAGE;
        }
        r = trace_read(in, name, ret, &error);
        if (in != stdin)
                fclose(in);
        if (r < 0)
                fprintf(stderr, "bfc-replay: %s\n", error ? error : strerror(-r));
        else if ((*ret)->cut_line > 0)
                fprintf(stderr, "bfc-replay: %s:%zu: the last line is incomplete and was ignored\n", name,
                        (*ret)->cut_line);
        if (r == 0 && (*ret)->left_out)
                fprintf(stderr, "bfc-replay: %s: left out: %s\n", name, (*ret)->left_out);
        free(error);
        return r == 0 ? 0 : EXIT_USAGE;
}

static int compare_names(const void *a, const void *b)
{
        return strcmp(a, b);
}

static void leave_name(void *name)
{
        (void)name; /* the trace's */
}

/* Each name once. */
static void print_partitions(const struct trace *t)
{
        void *seen = NULL;

        for (size_t i = 0; i < t->n_buffers; i++) {
                const char *name = trace_partition(t, i);

                if (tfind(name, &seen, compare_names))
                        continue;
                fprintf(stderr, " %s", *name ? name : "(none)");
                if (!tsearch(name, &seen, compare_names))
                        break;
        }
        tdestroy(seen, leave_name);
        fputc('\n', stderr);
}

/* NULL: the trace has none, or several. */
static const char *only_partition(const struct trace *t)
{
        const char *name = trace_partition(t, 0);

        for (size_t i = 1; i < t->n_buffers; i++)
                if (strcmp(trace_partition(t, i), name) != 0)
                        return NULL;
        return t->has_partitions && *name ? name : NULL;
}

/* A limit is that of one partition. EXIT_USAGE, or 0. */
static int choose_partition(const struct invocation *v, struct trace *t)
{
        int r = 0;

        if (!t->has_partitions || only_partition(t))
                return 0; /* recorded elsewhere, it is planned for any other one, too */
        if (v->partition)
                r = trace_keep_partition(t, v->partition);
        if (v->partition && r == 0)
                return 0;
        if (r == -ENOMEM)
                return complain("memory for the trace", r);
        fprintf(stderr,
                "bfc-replay: %s: the trace has several partitions%s%s; choose one of them by --partition:",
                v->trace_name, v->partition ? ", and not " : "", v->partition ? v->partition : "");
        print_partitions(t);
        return EXIT_USAGE;
}

static int read_config_place(const struct invocation *v, const char *partition, struct plan_place *ret,
                             char **ret_error)
{
        int r = plan_place_read(v->plan_config, partition, v->tenant, ret, ret_error);

        if (r != -ENOENT || !partition || v->partition)
                return r;
        free(*ret_error); /* the trace's own is not in this config */
        *ret_error = NULL;
        return plan_place_read(v->plan_config, NULL, v->tenant, ret, ret_error);
}

/* The place that is planned for: of the partition that is asked for, or else the trace's. EXIT_USAGE, or 0. */
static int read_place(const struct invocation *v, const struct trace *t, struct plan_place *ret)
{
        const char *partition = v->partition ? v->partition : only_partition(t);
        char *error = NULL;

        plan_place_init(ret);
        if (v->plan_config && read_config_place(v, partition, ret, &error) < 0) {
                fprintf(stderr, "bfc-replay: %s\n", error ? error : "out of memory");
                free(error);
                return EXIT_USAGE;
        }
        if (v->plan_share) {
                ret->is_ipc = strcmp(v->plan_share, "cuda-ipc") == 0;
                ret->is_cuda = ret->is_cuda || ret->is_ipc;
        }
        return 0;
}

static bool has_view(const struct invocation *v)
{
        return v->snapshot || v->timeline || v->plot;
}

/* A file as bfcd.tools.trace reads it. NULL, with errno. */
static FILE *put_trace(const struct trace *t)
{
        FILE *out = tmpfile();

        if (!out)
                return NULL;
        for (size_t i = 0; i < t->n_labels; i++) {
                fputs(i == 0 ? "[" : ", ", out);
                table_json_text(out, t->labels[i]);
        }
        fputs("]\n", out);
        for (size_t i = 0; i < t->n_buffers; i++) {
                const struct trace_buffer *b = &t->buffers[i];

                fprintf(out, "%" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu32 " %" PRIu32 " %" PRId64 "\n",
                        b->lower, b->upper, b->n_bytes, b->tag, b->track,
                        t->has_flags ? (int64_t)b->flags : -1);
        }
        return out;
}

/* This process becomes the tool, which runs bfcd and this program for each limit that it tries. */
static int run_plan(const struct invocation *v, const struct trace *t)
{
        char self[PATH_MAX], scale[32], max_blocks[16], bytes[32];
        struct plan_place p;
        FILE *in;
        int r = read_place(v, t, &p);

        if (r != 0)
                return r;
        in = put_trace(t);
        if (!in || !*process_own_path(self))
                return complain("a plan", -errno);
        snprintf(scale, sizeof(scale), "%.17g", v->scale);
        snprintf(max_blocks, sizeof(max_blocks), "%" PRIu32, p.max_blocks);
        snprintf(bytes, sizeof(bytes), "%" PRIu64, p.limit_bytes);
        r = tools_exec(
                "bfc-replay", "--plan",
                &(struct tools_words){
                        (const char *const[]){ v->json ? "--json" : "plan", v->json ? "plan" : NULL, NULL },
                        (const char *const[]){ "--replay",
                                               self,
                                               "--name",
                                               v->trace_name,
                                               "--scale",
                                               scale,
                                               "--left-out",
                                               t->left_out,
                                               "--cache",
                                               v->cache,
                                               "--device",
                                               p.is_cuda ? "cuda" : "host",
                                               "--share",
                                               p.is_ipc ? "cuda-ipc" : "fd",
                                               "--growth",
                                               p.is_preallocated ? "preallocate" : "on-demand",
                                               "--max-blocks",
                                               max_blocks,
                                               "--quota-bytes",
                                               bytes,
                                               "--partition",
                                               p.partition,
                                               "--tenant",
                                               p.tenant,
                                               NULL } },
                in);
        fclose(in);
        return r;
}

/* Pictures of the trace. */
static int write_views(const struct invocation *v, const struct trace *t)
{
        struct tools_words words = { (const char *const[]){ "trace", NULL },
                                     (const char *const[]){ "--name", v->trace_name, "--snapshot",
                                                            v->snapshot, "--timeline", v->timeline, "--plot",
                                                            v->plot, NULL } };
        FILE *in = put_trace(t);
        int r = in ? tools_call("bfc-replay", "pictures of a trace", &words, in, NULL) : -errno;

        if (in)
                fclose(in);
        return r < 0 ? complain("a picture", r) : r;
}

static int run_replay(const struct invocation *v)
{
        struct trace *t = NULL;
        int status = read_trace(v, &t);

        if (status == 0 && trace_scale(t, v->scale) < 0) {
                fprintf(stderr, "bfc-replay: --scale %g makes a buffer of 2^63 bytes or more\n", v->scale);
                status = EXIT_USAGE;
        }
        if (status == 0 && has_view(v))
                status = write_views(v, t);
        if (status == 0 && v->plan)
                status = choose_partition(v, t);
        if (status == 0 && (v->plan || !has_view(v)))
                status = v->plan ? run_plan(v, t) : replay(v, t);
        trace_free(t);
        return status;
}

static int run_generate(const struct invocation *v)
{
        char seed[32], scale[32];

        snprintf(seed, sizeof(seed), "%" PRIu64, v->seed);
        snprintf(scale, sizeof(scale), "%.17g", v->scale);
        return tools_exec("bfc-replay", "--generate",
                          &(struct tools_words){ (const char *const[]){ "generate", NULL },
                                                 (const char *const[]){ "--name", v->generate, "--seed", seed,
                                                                        "--scale", scale, NULL } },
                          NULL);
}

/* ---- options ------------------------------------------------------------- */

static void print_help(void)
{
        fputs("Usage: bfc-replay [OPTIONS] TRACE\n"
              "       bfc-replay --plan [OPTIONS] TRACE\n"
              "       bfc-replay [--snapshot FILE] [--timeline FILE] [--plot FILE] TRACE\n"
              "       bfc-replay --generate transformer|random [--seed N] [--scale F]\n"
              "\n"
              "Replays a trace of buffers as a client of bfcd. A trace is a CSV file\n"
              "with the header id,lower,upper,size, or a memory snapshot of PyTorch; -\n"
              "is standard input.\n"
              "\n"
              "  -s, --socket PATH     the daemon's socket ($BFC_SOCKET,\n"
              "                        " PATHS_CLIENT_SOCKET ")\n"
              "  -p, --partition NAME  the partition ($BFC_PARTITION, the tenant's first)\n"
              "  -t, --tenant NAME     the tenant, where several match ($BFC_TENANT)\n"
              "  -n, --jobs N          number of processes, each with the whole trace (1)\n"
              "  -r, --repeat N        number of repetitions of each process (1)\n"
              "      --scale F         multiply every size by F, rounded up (1)\n"
              "      --cache on|off    the client's cache ($BFC_CACHE, on)\n"
              "      --verify          write every block and check it before it is freed\n"
              "      --until-refused   end at the first refused allocation\n"
              "  -j, --json            print JSON\n"
              "      --plan            print the smallest limit that serves the trace;\n"
              "                        runs a bfcd without memory\n"
              "      --share MODE      plan for a partition shared by fd or cuda-ipc\n"
              "      --partition-config FILE  plan for the partition and tenant of a bfcd.yaml\n"
              "      --snapshot FILE   write a pickle for PyTorch's memory viewer\n"
              "      --timeline FILE   write JSON for Perfetto (Chrome trace)\n"
              "      --plot FILE       write an SVG of the live bytes over time\n"
              "      --generate NAME   print a trace instead: transformer or random\n"
              "      --seed N          the seed of the generated trace (1)\n"
              "  -h, --help            print this\n"
              "      --version         print the version\n"
              "\n"
              "Exit status: 0 success; 1 allocations were refused or a job failed; 2 usage or\n"
              "invalid trace; 3 memory was corrupted or blocks were left.\n",
              stdout);
}

static int usage(const char *what, const char *which, const char *right)
{
        fprintf(stderr, "bfc-replay: %s%s%s%s; %s\n", what, which ? " \"" : "", which ? which : "",
                which ? "\"" : "", right);
        return EXIT_USAGE;
}

static bool parse_number(const char *text, uint64_t least, uint64_t most, uint64_t *ret)
{
        char *end;
        uint64_t n;

        errno = 0;
        n = strtoull(text, &end, 10);
        if (*text < '0' || *text > '9' || *end || errno == ERANGE || n < least || n > most)
                return false;
        *ret = n;
        return true;
}

static bool parse_scale(const char *text, double *ret)
{
        char *end;
        double scale = strtod(text, &end);

        if (end == text || *end || !(scale > 0 && scale < 1e300))
                return false;
        *ret = scale;
        return true;
}

#define LETTERS   ":s:p:t:n:r:jh"
#define NO_LETTER 256 /* from here on: an option's place in the table */

static const struct {
        const char *name;
        char letter;
        enum { HELP, VERSION, FLAG, TEXT, CHOICE, NUMBER, SCALE } kind;
        size_t member; /* of struct invocation */
        uint64_t least, most;
        const char *choices[2], *right; /* what a value can be */
} own_options[] = {
#define OWN(member) offsetof(struct invocation, member)
        { "socket", 's', TEXT, OWN(socket), 0, 0, { 0 }, NULL },
        { "partition", 'p', TEXT, OWN(partition), 0, 0, { 0 }, NULL },
        { "tenant", 't', TEXT, OWN(tenant), 0, 0, { 0 }, NULL },
        { "jobs", 'n', NUMBER, OWN(n_jobs), 1, MAX_JOBS, { 0 }, "a number from 1 to 4096" },
        { "repeat", 'r', NUMBER, OWN(n_repeats), 1, UINT32_MAX, { 0 }, "a number from 1 to 4294967295" },
        { "scale", 0, SCALE, OWN(scale), 0, 0, { 0 }, "a number above 0, as in 0.5" },
        { "cache", 0, CHOICE, OWN(cache), 0, 0, { "on", "off" }, "on or off" },
        { "verify", 0, FLAG, OWN(verify), 0, 0, { 0 }, NULL },
        { "until-refused", 0, FLAG, OWN(until_refused), 0, 0, { 0 }, NULL },
        { "json", 'j', FLAG, OWN(json), 0, 0, { 0 }, NULL },
        { "plan", 0, FLAG, OWN(plan), 0, 0, { 0 }, NULL },
        { "share", 0, CHOICE, OWN(plan_share), 0, 0, { "fd", "cuda-ipc" }, "fd or cuda-ipc" },
        { "partition-config", 0, TEXT, OWN(plan_config), 0, 0, { 0 }, NULL },
        { "snapshot", 0, TEXT, OWN(snapshot), 0, 0, { 0 }, NULL },
        { "timeline", 0, TEXT, OWN(timeline), 0, 0, { 0 }, NULL },
        { "plot", 0, TEXT, OWN(plot), 0, 0, { 0 }, NULL },
        { "generate", 0, TEXT, OWN(generate), 0, 0, { 0 }, NULL },
        { "seed", 0, NUMBER, OWN(seed), 0, UINT64_MAX, { 0 }, "a number from 0" },
        { "help", 'h', HELP, 0, 0, 0, { 0 }, NULL },
        { "version", 0, VERSION, 0, 0, 0, { 0 }, NULL },
#undef OWN
};

#define N_OPTIONS (sizeof(own_options) / sizeof(own_options[0]))

/* EXIT_USAGE, or 0. */
static int take_value(struct invocation *v, size_t i, const char *value)
{
        char *member = (char *)v + own_options[i].member, what[64];
        bool is_right = true;

        switch (own_options[i].kind) {
        case FLAG:
                *(bool *)member = true;
                break;
        case NUMBER:
                is_right = parse_number(value, own_options[i].least, own_options[i].most,
                                        (uint64_t *)(void *)member);
                break;
        case SCALE:
                is_right = parse_scale(value, (double *)(void *)member);
                break;
        case CHOICE:
                is_right = strcmp(value, own_options[i].choices[0]) == 0 ||
                           strcmp(value, own_options[i].choices[1]) == 0;
                /* fallthrough */
        default:
                *(const char **)(void *)member = value;
        }
        snprintf(what, sizeof(what), "wrong value for --%s", own_options[i].name);
        return is_right ? 0 : usage(what, value, own_options[i].right);
}

/* The option's place in the table. */
static size_t find_option(int option)
{
        size_t i = 0;

        if (option >= NO_LETTER)
                return (size_t)(option - NO_LETTER);
        while (own_options[i].letter != option)
                i++;
        return i;
}

/* True: the process ends, with status *ret_status. */
static bool take_options(struct invocation *v, int argc, char **argv, int *ret_status)
{
        struct option options[N_OPTIONS + 1] = { 0 };
        bool is_given[N_OPTIONS] = { false };
        int option;

        for (size_t i = 0; i < N_OPTIONS; i++)
                options[i] =
                        (struct option){ own_options[i].name,
                                         own_options[i].kind <= FLAG ? no_argument : required_argument, NULL,
                                         own_options[i].letter ? own_options[i].letter : NO_LETTER + (int)i };
        *ret_status = 0;
        while (*ret_status == 0 && (option = getopt_long(argc, argv, LETTERS, options, NULL)) >= 0) {
                size_t i = option == ':' || option == '?' ? 0 : find_option(option);

                if (option == ':') {
                        *ret_status = usage("no value for", argv[optind - 1],
                                            "\"bfc-replay --help\" lists the options");
                } else if (option == '?') {
                        *ret_status =
                                usage("unknown option", argv[optind - 1], "\"bfc-replay --help\" lists them");
                } else if (is_given[i]) {
                        *ret_status = usage("an option is given twice:", own_options[i].name, "give it once");
                } else if (own_options[i].kind == HELP) {
                        print_help();
                        return true;
                } else if (own_options[i].kind == VERSION) {
                        puts("bfc-replay " BFCD_VERSION);
                        return true;
                } else {
                        is_given[i] = true;
                        *ret_status = take_value(v, i, optarg);
                }
        }
        return *ret_status != 0;
}

int main(int argc, char **argv)
{
        struct invocation v = { .n_jobs = 1, .n_repeats = 1, .seed = 1, .scale = 1 };
        int status;

        if (take_options(&v, argc, argv, &status))
                return status;
        if (v.generate && optind < argc)
                return usage("too many arguments from", argv[optind], "--generate reads no trace");
        if (v.generate)
                return run_generate(&v);
        if (optind == argc)
                return usage("no trace", NULL, "usage: bfc-replay [OPTIONS] TRACE");
        if (optind + 1 < argc)
                return usage("too many arguments from", argv[optind + 1],
                             "usage: bfc-replay [OPTIONS] TRACE");
        v.trace_name = argv[optind];
        return run_replay(&v);
}
