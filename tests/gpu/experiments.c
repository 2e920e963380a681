/* What does a real driver do? One case a question, one JSON line an answer.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * usage: experiments [--list] [--quick] [--max-bytes N] [CASE...]
 *
 * Nothing is asserted: the answers go into docs/cuda.md, with the driver and the
 * GPU that each line names. Every case is a process of its own, with a time
 * limit, because one may end the driver's life in it. On the fake they run as a
 * test of themselves. Exit status: 1 where a case crashed or hung, unless its crash
 * is the answer. */
#include "tests/gpu/experiments.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CASE_TIMEOUT_S 150

size_t max_n_bytes = (size_t)16 << 30;
bool is_quick;

/* ---- one line of JSON ---------------------------------------------------- */

/* Shared with the parent, which reports what a case had found when it crashed. */
static struct {
        char text[1 << 16];
        size_t n;
        bool may_crash;
} * line;

static void put(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void put(const char *format, ...)
{
        va_list ap;
        int n;

        va_start(ap, format);
        n = vsnprintf(line->text + line->n, sizeof(line->text) - line->n, format, ap);
        va_end(ap);
        if (n > 0 && (size_t)n < sizeof(line->text) - line->n)
                line->n += (size_t)n;
}

static void put_name(const char *name)
{
        char last = line->n > 0 ? line->text[line->n - 1] : ' ';

        if (last != '{' && last != '[')
                put(", ");
        if (name)
                put("\"%s\": ", name);
}

void say_text(const char *name, const char *value)
{
        put_name(name);
        put("\"");
        for (; *value; value++)
                put(*value == '"' || *value == '\\' ? "\\%c" : "%c",
                    (unsigned char)*value < 32 ? ' ' : *value);
        put("\"");
}

void say_error(const char *name, CUresult r)
{
        const char *text = gpu_error(r);

        say_text(name, strncmp(text, "CUDA_", 5) == 0 ? text + 5 : text);
}

void say_number(const char *name, double value)
{
        put_name(name);
        put("%.10g", (double)(int64_t)(value * 10) / 10);
}

void say_flag(const char *name, bool value)
{
        put_name(name);
        put(value ? "true" : "false");
}

void say_open(const char *name, char bracket)
{
        put_name(name);
        put("%c", bracket);
}

void say_close(char bracket)
{
        put("%c", bracket);
}

static void print_line(void)
{
        puts(line->text);
        fflush(stdout);
}

void skip(const char *why)
{
        say_text("skipped", why);
        put("}");
        print_line();
        _exit(0);
}

void crash_is_an_answer(void)
{
        line->may_crash = true;
}

/* ---- helpers ------------------------------------------------------------- */

double now_us(void)
{
        struct timespec t;

        clock_gettime(CLOCK_MONOTONIC, &t);
        return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

CUresult ask(struct peer *p, struct peer_message *m)
{
        return peer_call(p, m, -1, NULL);
}

struct peer start_peer(uid_t uid, unsigned int flags)
{
        struct peer_message m = { .op = PEER_START };
        struct peer p;

        if (peer_start(uid, flags, &p) < 0)
                skip("needs root");
        if (ask(&p, &m) != CUDA_SUCCESS) {
                say_error("peer_start", m.result);
                peer_kill(&p);
                skip("the other process has no context");
        }
        return p;
}

void start_here(void)
{
        CUcontext c;
        CUresult r = gpu_start(0, &c);

        if (r != CUDA_SUCCESS) {
                say_error("start", r);
                skip("no context");
        }
}

/* ---- running ------------------------------------------------------------- */

static const struct experiment *const groups[] = {
        ipc_experiments,   vmm_experiments,     memory_experiments,
        death_experiments, capture_experiments, stream_experiments
};
#define N_GROUPS (sizeof(groups) / sizeof(groups[0]))

/* Looked at by a child, once: a case begins in a process without a context. */
static char machine[512];

static void machine_look(void)
{
        char gpu[128] = "";
        struct utsname os;
        int version = 0, status;
        int fds[2];
        const char *why;
        ssize_t n;
        pid_t pid;

        if (pipe(fds) < 0)
                return;
        pid = fork();
        if (pid == 0) {
                uname(&os);
                if (gpu_load(&why) == 0 && cu.cuInit(0) == CUDA_SUCCESS) {
                        cu.cuDriverGetVersion(&version);
                        cu.cuDeviceGetName(gpu, sizeof(gpu), 0);
                }
                say_text("gpu", gpu);
                say_number("cuda", version);
                say_text("kernel", os.release);
                _exit(write(fds[1], line->text, line->n) < 0);
        }
        close(fds[1]);
        n = read(fds[0], machine, sizeof(machine) - 1);
        machine[n > 0 ? n : 0] = '\0';
        close(fds[0]);
        waitpid(pid, &status, 0);
}

/* The line that the case began gets its end. */
static int answer_crash(int signal)
{
        say_text("answer", "crashed");
        say_number("signal", signal);
        put("}");
        print_line();
        return 0;
}

static bool is_crash(int status)
{
        int signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;

        return signal == SIGSEGV || signal == SIGBUS || signal == SIGABRT;
}

static void report_crash(const struct experiment *e, int status)
{
        static char found[8192];
        char how[32];

        snprintf(found, sizeof(found), "%.8191s", line->text);
        snprintf(how, sizeof(how), "%s %d", WIFSIGNALED(status) ? "signal" : "exit",
                 WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
        line->n = 0;
        put("{");
        say_text("case", e->name);
        say_text("crashed", how);
        say_text("found_before", found);
        put("}");
        print_line();
}

static int run_case(const struct experiment *e)
{
        int status;
        pid_t pid;

        fflush(stdout);
        line->n = 0;
        line->may_crash = false;
        pid = fork();
        if (pid == 0) {
                alarm(CASE_TIMEOUT_S);
                put("{");
                say_text("case", e->name);
                put("%s", machine);
                e->run();
                put("}");
                print_line();
                _exit(0);
        }
        if (pid < 0 || waitpid(pid, &status, 0) < 0)
                return -1;
        if (status == 0)
                return 0;
        if (line->may_crash && is_crash(status))
                return answer_crash(WTERMSIG(status));
        report_crash(e, status);
        return -1;
}

static bool is_wanted(const char *name, int argc, char **argv)
{
        for (int i = 0; i < argc; i++)
                if (strcmp(argv[i], name) == 0)
                        return true;
        return argc == 0;
}

static int run_wanted(int argc, char **argv)
{
        int r = 0, n_run = 0;

        line = mmap(NULL, sizeof(*line), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (line == MAP_FAILED) {
                perror("experiments: mmap");
                return 1;
        }
        gpu_machine_new();
        machine_look();
        line->n = 0;

        for (size_t i = 0; i < N_GROUPS; i++) {
                for (const struct experiment *e = groups[i]; e->name; e++) {
                        if (!is_wanted(e->name, argc, argv))
                                continue;
                        n_run++;
                        if (run_case(e) < 0)
                                r = 1;
                }
        }
        gpu_machine_remove();
        if (n_run == 0) {
                fprintf(stderr, "experiments: no such case (see --list)\n");
                return 2;
        }
        return r;
}

int main(int argc, char **argv)
{
        if (argc > 1 && strcmp(argv[1], "--peer") == 0)
                return peer_main(argc, argv);
        for (argc--, argv++; argc > 0 && strncmp(argv[0], "--", 2) == 0; argc--, argv++) {
                if (strcmp(argv[0], "--list") == 0) {
                        for (size_t i = 0; i < N_GROUPS; i++)
                                for (const struct experiment *e = groups[i]; e->name; e++)
                                        printf("%-28s%s\n", e->name, e->question);
                        return 0;
                }
                if (strcmp(argv[0], "--quick") == 0) {
                        is_quick = true;
                } else if (strcmp(argv[0], "--max-bytes") == 0 && argc > 1) {
                        max_n_bytes = strtoull(argv[1], NULL, 0);
                        argc--;
                        argv++;
                } else {
                        fprintf(stderr, "usage: experiments [--list] [--quick] [--max-bytes N] [CASE...]\n");
                        return 2;
                }
        }
        return run_wanted(argc, argv);
}
