/* The way into every function: counts calls, and makes them fail on demand.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * FAKE_CUDA_FAULT is a list of rules, joined by commas:
 *
 *   FUNCTION:N[:CODE][!]   the Nth call of it (from 1; "N+": and every later
 *                          one; "*": every) does nothing and returns CODE (2,
 *                          out of memory, if not said); "!": and the thread's
 *                          current context is broken from then on (sticky)
 *   hang:FUNCTION:N:MS     the Nth call waits so long before it does its work
 *   delay:FUNCTION:N:US    the same in microseconds, to be as slow as a real driver
 *   lost:DEVICE:N[:CODE]   after N calls, of any function, this process has lost
 *                          the device (214 if not said)
 *
 * FUNCTION is a name with or without its suffix, or "*" for all of them (then N
 * counts calls of any function). A file "lost-INDEX" in the state folder takes
 * the device from all processes.
 *
 * FAKE_CUDA_COUNTS names a file ("%p" in it becomes the pid) that always shows
 * how often each function was called: lines of one width, written in place
 * through a mapping, so that they are right after a SIGKILL too. A test reads
 * it to know up to which N it has to count. */
#include "tests/fake_cuda/fake.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define MAX_RULES  64
#define LINE_WIDTH 60

struct rule {
        enum { FAULT_FAIL, FAULT_HANG, FAULT_LOST } kind;
        char function[48];
        unsigned int device;
        uint64_t n;
        bool is_every, is_from, is_sticky;
        uint64_t value; /* a code, or microseconds */
};

#define F(symbol, base, version, arguments) { #symbol, base, version },
const struct fake_function_name fake_functions[N_FUNCTIONS] = {
#include "device/cuda_functions.h"
};
#undef F

static struct rule rules[MAX_RULES];
static unsigned int n_rules;
static uint64_t n_calls[N_FUNCTIONS], n_calls_total;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *counts; /* the mapped file */
static pid_t initialised_by;

/* ---- reading the rules --------------------------------------------------- */

static void check_function(const char *name)
{
        if (strcmp(name, "*") == 0)
                return;
        for (int i = 0; i < N_FUNCTIONS; i++)
                if (strcmp(name, fake_functions[i].symbol) == 0 || strcmp(name, fake_functions[i].base) == 0)
                        return;
        fake_die("FAKE_CUDA_FAULT: no function \"%s\"", name);
}

static char *need_part(char **rest, const char *rule)
{
        char *part = strsep(rest, ":");

        if (!part || !*part)
                fake_die("FAKE_CUDA_FAULT: \"%s\" lacks a part", rule);
        return part;
}

static void read_which(struct rule *r, char *text)
{
        size_t n = strlen(text);

        if (strcmp(text, "*") == 0) {
                r->is_every = true;
                return;
        }
        if (n > 0 && text[n - 1] == '+') {
                r->is_from = true;
                text[n - 1] = '\0';
        }
        r->n = fake_parse_number(text, "FAKE_CUDA_FAULT");
}

static void read_rule(char *text)
{
        struct rule *r = &rules[n_rules];
        char whole[128], *rest = text, *part;
        size_t n = strlen(text);
        bool is_in_ms = false;

        if (n_rules++ == MAX_RULES)
                fake_die("FAKE_CUDA_FAULT: more than %d rules", MAX_RULES);
        snprintf(whole, sizeof(whole), "%s", text);
        if (n > 0 && text[n - 1] == '!') {
                r->is_sticky = true;
                text[n - 1] = '\0';
        }
        part = need_part(&rest, whole);
        if (strcmp(part, "lost") == 0) {
                r->kind = FAULT_LOST;
                r->device = (unsigned int)fake_parse_number(need_part(&rest, whole), "FAKE_CUDA_FAULT");
                if (r->device >= fake.n_devices)
                        fake_die("FAKE_CUDA_FAULT: \"%s\": no such device", whole);
        } else {
                is_in_ms = strcmp(part, "hang") == 0;
                r->kind = is_in_ms || strcmp(part, "delay") == 0 ? FAULT_HANG : FAULT_FAIL;
                if (r->kind == FAULT_HANG)
                        part = need_part(&rest, whole);
                check_function(part);
                snprintf(r->function, sizeof(r->function), "%s", part);
        }
        read_which(r, need_part(&rest, whole));
        r->value = r->kind == FAULT_LOST ? CUDA_ERROR_ECC_UNCORRECTABLE : CUDA_ERROR_OUT_OF_MEMORY;
        if (rest)
                r->value = fake_parse_number(rest, "FAKE_CUDA_FAULT");
        else if (r->kind == FAULT_HANG)
                fake_die("FAKE_CUDA_FAULT: \"%s\" lacks the time", whole);
        if (is_in_ms)
                r->value *= 1000;
}

/* ---- the counts ---------------------------------------------------------- */

static void write_count(int line, const char *name, uint64_t n)
{
        char text[LINE_WIDTH + 1];

        snprintf(text, sizeof(text), "%-44s %14llu\n", name, (unsigned long long)n);
        memcpy(counts + line * LINE_WIDTH, text, LINE_WIDTH);
}

static void setup_counts(const char *pattern)
{
        const char *p = strstr(pattern, "%p");
        size_t n_bytes = (size_t)(N_FUNCTIONS + 1) * LINE_WIDTH;
        char path[512];
        int fd;

        if (p)
                snprintf(path, sizeof(path), "%.*s%d%s", (int)(p - pattern), pattern, (int)getpid(), p + 2);
        else
                snprintf(path, sizeof(path), "%s", pattern);
        fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
        if (fd < 0 || ftruncate(fd, (off_t)n_bytes) < 0)
                fake_die("FAKE_CUDA_COUNTS: cannot write %s: %m", path);
        counts = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        close(fd);
        if (counts == MAP_FAILED)
                fake_die("FAKE_CUDA_COUNTS: cannot map %s: %m", path);
        madvise(counts, n_bytes, MADV_DONTFORK);
        write_count(0, "total", 0);
        for (int i = 0; i < N_FUNCTIONS; i++)
                write_count(i + 1, fake_functions[i].symbol, 0);
}

void fault_setup(void)
{
        const char *text = getenv("FAKE_CUDA_FAULT"), *file = getenv("FAKE_CUDA_COUNTS");
        char *copy = strdup(text ? text : ""), *rest = copy, *one;

        if (!copy)
                fake_die("out of memory");
        while ((one = strsep(&rest, ",")))
                if (*one)
                        read_rule(one);
        free(copy);
        if (file && *file)
                setup_counts(file);
}

/* ---- every call ---------------------------------------------------------- */

static bool rule_applies(const struct rule *r, enum fake_function f, uint64_t n, uint64_t n_total)
{
        if (strcmp(r->function, "*") == 0)
                n = n_total;
        else if (strcmp(r->function, fake_functions[f].symbol) != 0 &&
                 strcmp(r->function, fake_functions[f].base) != 0)
                return false;
        return r->is_every || n == r->n || (r->is_from && n > r->n);
}

static void sleep_us(uint64_t us)
{
        struct timespec t = { .tv_sec = (time_t)(us / 1000000), .tv_nsec = (long)(us % 1000000) * 1000 };

        while (nanosleep(&t, &t) < 0)
                ;
}

static void count_call(enum fake_function f, uint64_t *ret_n, uint64_t *ret_n_total)
{
        pthread_mutex_lock(&lock);
        *ret_n = ++n_calls[f];
        *ret_n_total = ++n_calls_total;
        if (counts) {
                write_count((int)f + 1, fake_functions[f].symbol, *ret_n);
                write_count(0, "total", *ret_n_total);
        }
        pthread_mutex_unlock(&lock);
}

/* Pointers and texts are for the asking, whether the driver is up or not. */
static bool works_before_init(enum fake_function f)
{
        return f == FN_cuInit || f == FN_cuDriverGetVersion || f == FN_cuGetProcAddress_v2 ||
               f == FN_cuGetErrorName || f == FN_cuGetErrorString;
}

static CUresult apply_rules(enum fake_function f, uint64_t n, uint64_t n_total)
{
        for (unsigned int i = 0; i < n_rules; i++) {
                const struct rule *r = &rules[i];

                if (r->kind == FAULT_LOST) {
                        if (n_total > r->n)
                                __atomic_store_n(&fake.devices[r->device].lost_here, (CUresult)r->value,
                                                 __ATOMIC_RELAXED);
                } else if (rule_applies(r, f, n, n_total)) {
                        if (r->kind == FAULT_FAIL) {
                                if (r->is_sticky && fake_context_current())
                                        fake_context_stick(fake_context_current(), (CUresult)r->value);
                                return (CUresult)r->value;
                        }
                        sleep_us(r->value);
                }
        }
        return CUDA_SUCCESS;
}

/* A real driver's calls need as much as they need: who makes them on a small stack is found out. */
static __attribute__((noinline)) void use_stack(void)
{
        size_t n_bytes = fake.stack_n_bytes;
        volatile char *bytes;

        if (n_bytes == 0)
                return;
        bytes = __builtin_alloca(n_bytes);
        for (size_t i = 0; i < n_bytes; i += 4096)
                bytes[n_bytes - 1 - i] = 1; /* from the top down, so that a guard page is met */
}

CUresult fake_enter(enum fake_function f)
{
        uint64_t n, n_total;
        pid_t by;
        CUresult r;

        fake_setup();
        use_stack();
        by = __atomic_load_n(&initialised_by, __ATOMIC_ACQUIRE);
        /* What a fork()ed child inherits of the driver is of no use to it. */
        if (by != 0 && by != getpid()) {
                if (fake.forked_dies)
                        fake_die("%s in a forked child", fake_functions[f].symbol);
                return works_before_init(f) && f != FN_cuInit ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
        }
        count_call(f, &n, &n_total);
        r = apply_rules(f, n, n_total);
        if (r != CUDA_SUCCESS)
                return r;
        if (by == 0 && !works_before_init(f))
                return CUDA_ERROR_NOT_INITIALIZED;
        return fake_call_is_unsafe(f) ? fake_capture_allows_unsafe() : CUDA_SUCCESS;
}

void fake_set_initialised(void)
{
        __atomic_store_n(&initialised_by, getpid(), __ATOMIC_RELEASE);
}
