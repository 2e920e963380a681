/* Recorders: what bfc-replay's own reader makes of the files, on a healthy disk and a full
 * one, with threads, after exit(), kill and fork().
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/process.h"
#include "client/recorder.h"
#include "ctl/trace.h"
#include "tests/random.h"
#include "tests/suite.h"

#define HEADER "id,lower,upper,size,partition,tag,flags\n"

/* A line as it stands in the file: upper has 19 digits. */
#define LINE_OF(lower, upper, size, labels)                                                                  \
        lower "," lower ",00000000000000000" upper "," size "," labels "\n"
#define LINE(lower, upper, size) LINE_OF(lower, upper, size, ",,0")
#define OPEN_LINE(lower, size)   lower "," lower ",9223372036854775807," size ",,,0\n"

static char folder[64], path[96];

static void setup(void)
{
        snprintf(folder, sizeof(folder), "/tmp/bfcd-recorder-XXXXXX");
        ck_assert_ptr_nonnull(mkdtemp(folder));
        snprintf(path, sizeof(path), "%s/t.csv", folder);
}

static void teardown(void)
{
        char command[128];

        snprintf(command, sizeof(command), "rm -r %s", folder);
        ck_assert_int_eq(system(command), 0);
}

FIXTURE(lives, setup, teardown);

static struct recorder *record(void)
{
        struct recorder *r = NULL;

        ck_assert_msg(recorder_open(path, &r) == 0, "%s", error_last());
        return r;
}

static struct trace *read_back(void)
{
        FILE *in = fopen(path, "re");
        struct trace *t = NULL;
        char *error = NULL;

        ck_assert_ptr_nonnull(in);
        ck_assert_msg(trace_read(in, "t", &t, &error) == 0, "%s", error);
        fclose(in);
        return t;
}

static void given(struct recorder *r, const void *ptr, uint64_t n_bytes)
{
        recorder_given(r, ptr, &(struct recorder_block){ .n_bytes = n_bytes });
}

static void give_back(struct recorder *r, const void *ptr)
{
        struct recorder_lifetime lifetime;

        recorder_freeing(r, ptr, &lifetime);
        recorder_freed(r, &lifetime);
}

/* An address that is not read. */
static const void *at(size_t n)
{
        return (const void *)(uintptr_t)((n + 1) * 256);
}

static void expect_text(const char *text)
{
        char have[512] = "";
        FILE *in = fopen(path, "re");

        ck_assert_ptr_nonnull(in);
        have[fread(have, 1, sizeof(have) - 1, in)] = '\0';
        fclose(in);
        ck_assert_str_eq(have, text);
}

/* ---- lives --------------------------------------------------------------- */

TEST(allocations_in_order_of_their_start)
{
        struct recorder *r = record();

        given(r, at(0), 1000);
        given(r, at(1), 1);
        give_back(r, at(1));
        given(r, at(1), 4096); /* the same place again */
        give_back(r, at(7));   /* none of ours */
        give_back(r, at(0));
        ck_assert_ptr_null(recorder_free(r));
        expect_text(HEADER LINE("1", "05", "1000") LINE("2", "03", "1") LINE("4", "06", "4096"));
}

TEST(failed_free_continues_the_allocation)
{
        struct recorder *r = record();
        struct recorder_lifetime lifetime;

        given(r, at(0), 10);
        recorder_freeing(r, at(0), &lifetime);
        recorder_kept(r, &lifetime);
        given(r, at(1), 20);
        give_back(r, at(0));
        given(r, at(1), 30); /* its free was not seen */
        recorder_free(r);
        expect_text(HEADER LINE("1", "04", "10") LINE("3", "05", "20") LINE("6", "07", "30"));
}

TEST(no_recorder_at_all)
{
        struct recorder_lifetime lifetime = { .n_bytes = 1 };

        given(NULL, at(0), 1);
        recorder_freeing(NULL, at(0), &lifetime);
        ck_assert_uint_eq(lifetime.n_bytes, 0);
        recorder_freed(NULL, &lifetime);
        recorder_kept(NULL, &lifetime);
        ck_assert_ptr_null(recorder_free(NULL));
        recorder_free(record());
        expect_text(HEADER);
}

static const char *track_of(const struct trace *t, size_t buffer)
{
        return t->labels[t->buffers[buffer].track];
}

static const char *tag_of(const struct trace *t, size_t buffer)
{
        return t->labels[t->buffers[buffer].tag];
}

TEST(partitions_and_tags)
{
        struct recorder *r = record();
        struct trace *t;

        recorder_given(r, at(0), &(struct recorder_block){ 10, "train", "weights", 0 });
        recorder_given(r, at(1), &(struct recorder_block){ 20, "serve", NULL, 2 });
        recorder_given(r, at(2), &(struct recorder_block){ 30, NULL, "a,b\n\"c\x7f\xe9 d", UINT64_MAX });
        give_back(r, at(1));
        recorder_free(r);
        expect_text(HEADER LINE_OF("1", "05", "10", "train,weights,0") LINE_OF("2", "04", "20", "serve,,2")
                            LINE_OF("3", "05", "30", ",a?b??c?? d,18446744073709551615"));
        t = read_back();
        ck_assert_uint_eq(t->n_buffers, 3);
        ck_assert_str_eq(track_of(t, 0), "train");
        ck_assert_str_eq(track_of(t, 1), "serve");
        ck_assert_str_eq(track_of(t, 2), "");
        ck_assert_uint_eq(t->buffers[0].flags, 0);
        ck_assert_uint_eq(t->buffers[1].flags, 2);
        ck_assert_str_eq(tag_of(t, 0), "weights");
        ck_assert_str_eq(tag_of(t, 1), "");
        ck_assert_str_eq(tag_of(t, 2), "a?b??c?? d");
        trace_free(t);
}

static void assert_no_line_crosses_a_page(void);

/* Lines of the greatest length, whose labels are cut. */
TEST(longest_lines)
{
        char partition[100], tag[100];
        struct recorder *r = record();
        struct trace *t;

        memset(partition, 'p', sizeof(partition) - 1);
        memset(tag, 't', sizeof(tag) - 1);
        partition[99] = tag[99] = '\0';
        for (size_t i = 0; i < 5000; i++)
                recorder_given(r, at(i), &(struct recorder_block){ INT64_MAX, partition, tag, UINT64_MAX });
        recorder_free(r);
        t = read_back();
        ck_assert_uint_eq(t->n_buffers, 5000);
        for (size_t i = 0; i < t->n_buffers; i++) {
                ck_assert_uint_eq(strlen(track_of(t, i)), RECORDER_LABEL_MAX);
                ck_assert_uint_eq(strlen(tag_of(t, i)), RECORDER_LABEL_MAX);
        }
        trace_free(t);
        assert_no_line_crosses_a_page();
}

/* A byte before each page's end ends a line, so a write that is cut there leaves whole ones. */
static void assert_no_line_crosses_a_page(void)
{
        FILE *in = fopen(path, "re");
        long n_pages = 0;

        ck_assert_ptr_nonnull(in);
        for (long page = 1; fseek(in, page * 4096 - 1, SEEK_SET) == 0; page++) {
                int c = fgetc(in);

                if (c == EOF)
                        break;
                ck_assert_msg(c == '\n', "page %ld ends in '%c'", page, c);
                n_pages++;
        }
        fclose(in);
        ck_assert_int_gt(n_pages, 100);
}

#define N_SLOTS 300

TEST(many_allocations_and_their_peak)
{
        uint64_t sizes[N_SLOTS] = { 0 }, live = 0, peak = 0, n_given = 0, state = 42;
        struct recorder *r = record();
        struct trace *t;

        for (int i = 0; i < 100000; i++) {
                size_t slot = random_next(&state) % N_SLOTS;

                if (sizes[slot]) {
                        give_back(r, at(slot));
                        live -= sizes[slot];
                        sizes[slot] = 0;
                } else {
                        sizes[slot] = 1 + (random_next(&state) >> (14 + random_next(&state) % 50));
                        given(r, at(slot), sizes[slot]);
                        live += sizes[slot];
                        n_given++;
                }
                peak = live > peak ? live : peak;
        }
        recorder_free(r);
        t = read_back();
        ck_assert_uint_eq(t->n_buffers, n_given);
        ck_assert_uint_eq(trace_peak(t, 1), peak);
        trace_free(t);
        assert_no_line_crosses_a_page();
}

/* ---- threads -------------------------------------------------------------- */

enum { N_THREADS = 4, N_ROUNDS = 10000 };

struct part {
        struct recorder *r;
        size_t first;
};

static void *one_thread(void *userdata)
{
        const struct part *part = userdata;

        for (size_t i = 0; i < N_ROUNDS; i++) {
                if (i >= 10)
                        give_back(part->r, at(part->first + i % 10));
                given(part->r, at(part->first + i % 10), part->first + 1);
        }
        return NULL;
}

TEST(many_threads)
{
        struct recorder *r = record();
        pthread_t threads[N_THREADS];
        struct part parts[N_THREADS];
        uint64_t last = 0;
        struct trace *t;

        for (size_t i = 0; i < N_THREADS; i++) {
                parts[i] = (struct part){ r, i * 100 };
                ck_assert_int_eq(pthread_create(&threads[i], NULL, one_thread, &parts[i]), 0);
        }
        for (size_t i = 0; i < N_THREADS; i++)
                pthread_join(threads[i], NULL);
        recorder_free(r);
        t = read_back();
        ck_assert_uint_eq(t->n_buffers, N_THREADS * N_ROUNDS);
        for (size_t i = 0; i < t->n_events; i++) { /* no tick twice, but for the end */
                const struct trace_event *e = &t->events[i];
                uint64_t time = e->is_free ? t->buffers[e->buffer].upper : t->buffers[e->buffer].lower;

                ck_assert(time > last || i > t->n_events - 10 * N_THREADS);
                last = time;
        }
        /* Each thread always has ten, all of one size. */
        ck_assert_uint_eq(trace_peak(t, 1), 10 * (1 + 101 + 201 + 301));
        trace_free(t);
}

/* ---- files ---------------------------------------------------------------- */

static void expect_refusal(const char *name, int error, const char *why)
{
        struct recorder *r = NULL;

        ck_assert_msg(recorder_open(name, &r) == error, "%s: not %d", name, error);
        ck_assert_ptr_null(r);
        ck_assert_msg(strstr(error_last(), why), "\"%s\" does not say \"%s\"", error_last(), why);
}

FIXTURE(files, setup, teardown);

TEST(names)
{
        char name[96], wanted[128], long_name[5000];
        struct recorder *a, *b;

        snprintf(name, sizeof(name), "%s/%%p-%%%%.csv", folder);
        ck_assert_int_eq(recorder_open(name, &a), 0);
        snprintf(wanted, sizeof(wanted), "%s/%d-%%.csv", folder, (int)getpid());
        ck_assert_int_eq(access(wanted, F_OK), 0);
        expect_refusal(name, -EBUSY, "%p");
        recorder_free(a);
        snprintf(name, sizeof(name), "%s/%%n.csv", folder);
        ck_assert_int_eq(recorder_open(name, &a), 0);
        ck_assert_int_eq(recorder_open(name, &b), 0);
        recorder_free(a);
        recorder_free(b);
        expect_refusal("/tmp/%x.csv", -EINVAL, "%n");
        expect_refusal("/tmp/%", -EINVAL, "%n");
        memset(long_name, 'a', sizeof(long_name) - 1);
        long_name[sizeof(long_name) - 1] = '\0';
        expect_refusal(long_name, -ENAMETOOLONG, "4095");
        long_name[4094] = '%';
        long_name[4095] = 'p';
        long_name[4096] = '\0';
        expect_refusal(long_name, -ENAMETOOLONG, "4095");
}

TEST(unwritable_file)
{
        char name[128];

        snprintf(name, sizeof(name), "%s/nowhere/t.csv", folder);
        expect_refusal(name, -ENOENT, name);
        expect_refusal(folder, -EISDIR, folder);
        expect_refusal("/dev/null", -EINVAL, "not a regular file");
        ck_assert_int_eq(mkfifo(path, 0600), 0);
        expect_refusal(path, -ENXIO, path); /* without waiting for a reader */
}

static void expect_precious(const char *name)
{
        char got[64] = "";
        FILE *f = fopen(name, "r");

        ck_assert_ptr_nonnull(f);
        ck_assert_ptr_nonnull(fgets(got, sizeof(got), f));
        fclose(f);
        ck_assert_str_eq(got, "precious");
}

/* In a folder that others may write, the trace's name may be a link, or another user's file. */
TEST(files_of_others_are_left_alone)
{
        char other[128];
        FILE *f;

        snprintf(other, sizeof(other), "%s/other", folder);
        f = fopen(other, "w");
        ck_assert_ptr_nonnull(f);
        fputs("precious", f);
        fclose(f);
        ck_assert_int_eq(symlink(other, path), 0);
        expect_refusal(path, -ELOOP, "symbolic link");
        ck_assert_int_eq(unlink(path), 0);
        ck_assert_int_eq(link(other, path), 0);
        expect_refusal(path, -EPERM, "other names");
        ck_assert_int_eq(unlink(path), 0);
        expect_precious(other);
        if (geteuid() == 0) {
                ck_assert_int_eq(chown(other, 54321, 54321), 0);
                ck_assert_int_eq(rename(other, path), 0);
                expect_refusal(path, -EPERM, "another user's");
                expect_precious(path);
        }
}

TEST(one_recorder_per_file)
{
        struct recorder *r = record();
        int status;
        pid_t pid;

        given(r, at(0), 1);
        expect_refusal(path, -EBUSY, path);
        pid = fork();
        if (pid == 0) {
                struct recorder *mine;

                _exit(recorder_open(path, &mine) == -EBUSY ? 0 : 1);
        }
        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        ck_assert_int_eq(status, 0);
        recorder_free(r);
        expect_text(HEADER LINE("1", "02", "1"));
        recorder_free(record()); /* replaces it */
        expect_text(HEADER);
}

/* A child has no part in its parent's recording, however long it lives. */
TEST(a_child_of_the_recording_process)
{
        struct recorder *r = record();
        int status, pipe_fds[2];
        pid_t pid;
        char c;

        given(r, at(0), 1);
        ck_assert_int_eq(pipe(pipe_fds), 0);
        pid = fork();
        if (pid == 0) {
                close(pipe_fds[1]);
                exit(read(pipe_fds[0], &c, 1) == 0 ? 0 : 1); /* exit(): it writes nothing */
        }
        recorder_free(r);
        r = record(); /* the child does not hold the lock */
        given(r, at(0), 5);
        close(pipe_fds[0]);
        close(pipe_fds[1]);
        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        ck_assert_int_eq(status, 0);
        recorder_free(r);
        expect_text(HEADER LINE("1", "02", "5"));
}

/* Records, forks, and is gone while its child goes on. */
static void __attribute__((noreturn)) leave_a_child(const int fds[2])
{
        int ready[2];
        char c;

        if (pipe2(ready, O_CLOEXEC) < 0)
                _exit(1);
        record();
        if (fork() == 0) {
                close(fds[1]);
                close(ready[1]); /* fork() has returned */
                _exit(read(fds[0], &c, 1) == 0 ? 0 : 1);
        }
        close(ready[1]);
        _exit(read(ready[0], &c, 1) == 0 ? 0 : 1);
}

TEST(child_outlives_the_recording_process)
{
        int status, pipe_fds[2];
        pid_t pid;

        ck_assert_int_eq(pipe2(pipe_fds, O_CLOEXEC), 0);
        pid = fork();
        if (pid == 0)
                leave_a_child(pipe_fds);
        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        ck_assert_int_eq(status, 0);
        recorder_free(record());
        close(pipe_fds[0]);
        close(pipe_fds[1]);
}

TEST(exit_ends_what_is_recorded)
{
        int status;
        pid_t pid = fork();

        if (pid == 0) {
                struct recorder *r = record();

                given(r, at(0), 77);
                exit(0);
        }
        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        ck_assert_int_eq(status, 0);
        expect_text(HEADER LINE("1", "02", "77"));
}

/* What is in the file before the end is what happened so far. */
TEST(each_event_is_in_the_file_at_once)
{
        struct recorder *r = record();
        struct recorder_lifetime lifetime;

        given(r, at(0), 1000);
        expect_text(HEADER OPEN_LINE("1", "1000"));
        given(r, at(1), 2);
        recorder_freeing(r, at(0), &lifetime);
        recorder_freed(r, &lifetime);
        expect_text(HEADER LINE("1", "03", "1000") OPEN_LINE("2", "2"));
        recorder_free(r);
        expect_text(HEADER LINE("1", "03", "1000") LINE("2", "04", "2"));
}

enum { N_KILLED = 4, N_WINDOW = 16, MAX_ROUNDS = 200000 };

/* In shared memory: how many calls of a thread have returned. */
struct progress {
        _Atomic uint32_t n_given, n_freed;
};

struct killed {
        struct recorder *r;
        struct progress *progress;
        size_t number;
};

static uint64_t killed_size(size_t thread, size_t round)
{
        return 1 + round * N_KILLED + thread;
}

static void *record_until_killed(void *userdata)
{
        const struct killed *k = userdata;

        for (uint32_t i = 0; i < MAX_ROUNDS; i++) {
                given(k->r, at(k->number * 1000 + i % N_WINDOW), killed_size(k->number, i));
                atomic_store(&k->progress->n_given, i + 1);
                if (i + 1 < N_WINDOW)
                        continue;
                give_back(k->r, at(k->number * 1000 + (i + 1) % N_WINDOW));
                atomic_store(&k->progress->n_freed, i + 2 - N_WINDOW);
        }
        pause();
        return NULL;
}

static void __attribute__((noreturn)) run_until_killed(struct progress *progress, pid_t parent)
{
        struct killed parts[N_KILLED];
        struct recorder *r;
        pthread_t thread;

        if (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0 || getppid() != parent)
                _exit(1);
        r = record();
        for (size_t i = 0; i < N_KILLED; i++) {
                parts[i] = (struct killed){ r, &progress[i], i };
                if (pthread_create(&thread, NULL, record_until_killed, &parts[i]) != 0)
                        _exit(1);
        }
        for (;;)
                pause();
}

static uint32_t sum_given(struct progress *progress)
{
        uint32_t sum = 0;

        for (size_t i = 0; i < N_KILLED; i++)
                sum += atomic_load(&progress[i].n_given);
        return sum;
}

/* Each call that had returned, and at most one more of each thread. */
static void check_killed(const struct trace *t, struct progress *progress)
{
        uint32_t n_given[N_KILLED] = { 0 }, n_freed[N_KILLED] = { 0 };

        for (size_t i = 0; i < t->n_buffers; i++) {
                const struct trace_buffer *b = &t->buffers[i];
                size_t thread = (b->n_bytes - 1) % N_KILLED, round = (b->n_bytes - 1) / N_KILLED;

                ck_assert_uint_eq(round, n_given[thread]++); /* in order, and each once */
                if (b->upper != INT64_MAX)
                        ck_assert_uint_eq(round, n_freed[thread]++);
        }
        for (size_t i = 0; i < N_KILLED; i++) {
                uint32_t given = atomic_load(&progress[i].n_given), freed = atomic_load(&progress[i].n_freed);

                ck_assert_msg(n_given[i] == given || n_given[i] == given + 1, "%u of %u", n_given[i], given);
                ck_assert_msg(n_freed[i] == freed || n_freed[i] == freed + 1, "%u of %u", n_freed[i], freed);
        }
}

TEST(a_killed_process_leaves_all_events)
{
        struct progress *progress = mmap(NULL, N_KILLED * sizeof(*progress), PROT_READ | PROT_WRITE,
                                         MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        uint64_t state = 7;

        ck_assert_ptr_ne(progress, MAP_FAILED);
        for (int round = 0; round < 20; round++) {
                uint32_t n = 100 + (uint32_t)(random_next(&state) % 5000);
                pid_t parent = getpid(), pid;
                struct trace *t;
                int n_waits = 0;

                memset(progress, 0, N_KILLED * sizeof(*progress));
                pid = fork();
                if (pid == 0)
                        run_until_killed(progress, parent);
                while (sum_given(progress) < n && n_waits++ < 60000)
                        usleep(1000);
                kill(pid, SIGKILL);
                ck_assert_int_eq(waitpid(pid, NULL, 0), pid);
                ck_assert_uint_ge(sum_given(progress), n);
                t = read_back();
                ck_assert_uint_eq(t->cut_line, 0);
                check_killed(t, progress);
                trace_free(t);
                ck_assert_int_eq(unlink(path), 0);
        }
        munmap(progress, N_KILLED * sizeof(*progress));
}

/* Another process empties the file. The job goes on, and the reader says that it is no trace. */
TEST(a_truncated_file)
{
        struct recorder *r = record();
        struct trace *t = NULL;
        char *error = NULL;
        FILE *in;

        for (size_t i = 0; i < 1000; i++)
                given(r, at(i), 1000);
        ck_assert_int_eq(truncate(path, 0), 0);
        for (size_t i = 0; i < 1000; i++)
                give_back(r, at(i));
        given(r, at(0), 1000);
        recorder_free(r);
        in = fopen(path, "re");
        ck_assert_ptr_nonnull(in);
        ck_assert_int_eq(trace_read(in, "t", &t, &error), -EINVAL);
        ck_assert_str_eq(error, "t:1: a zero byte; the file is not text");
        fclose(in);
        free(error);
}

/* A child that uses the recorder nonetheless, and one that was made without fork(). */
TEST(a_child_that_calls_the_recorder)
{
        struct recorder *r = record();
        struct recorder_lifetime lifetime;
        int status;
        pid_t pid;

        given(r, at(0), 1);
        pid = fork();
        if (pid == 0) {
                if (open("/dev/null", O_WRONLY) < 0) /* in the place of the closed fd */
                        _exit(1);
                given(r, at(1), 1);
                recorder_freeing(r, at(0), &lifetime);
                recorder_freed(r, &lifetime);
                recorder_free(r);
                exit(0);
        }
        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        ck_assert_int_eq(status, 0);
        pid = (pid_t)syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, 0);
        if (pid == 0)
                exit(0);
        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        ck_assert_int_eq(status, 0);
        expect_text(HEADER OPEN_LINE("1", "1"));
        recorder_free(r);
        expect_text(HEADER LINE("1", "02", "1"));
}

/* The file ends in a whole line, recording stops, and the end says so. */
TEST(a_full_disk)
{
        struct rlimit before, limit;
        struct recorder *r;
        struct trace *t;
        struct stat st;

        /* SIGXFSZ would end this process. */
        ck_assert_int_eq(getrlimit(RLIMIT_FSIZE, &before), 0);
        limit = before;
        limit.rlim_cur = 50001;
        ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
        r = record();
        for (size_t i = 0; i < 10000; i++) {
                given(r, at(0), 1000);
                give_back(r, at(0));
        }
        recorder_free(r);
        ck_assert_ptr_nonnull(strstr(error_last(), "the trace is incomplete: File too large"));
        ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &before), 0);
        ck_assert_int_eq(stat(path, &st), 0);
        ck_assert_int_gt(st.st_size, 49900);
        t = read_back();
        ck_assert_uint_eq(trace_peak(t, 1), 1000);
        trace_free(t);
}
