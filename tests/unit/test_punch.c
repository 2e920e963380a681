/* The helper process that punches extents: lanes, what it is sent wrong, its end, and its death.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "daemon/memory/punch.h"
#include "tests/held_lock.h"
#include "tests/suite.h"

#define LONG_MS 60000
#define N_MANY  500u

/* A memfd with pages. */
static int full_file(void)
{
        int fd = memfd_create("test", MFD_CLOEXEC);

        ck_assert_int_ge(fd, 0);
        ck_assert_int_eq(ftruncate(fd, (off_t)MIB), 0);
        ck_assert_int_eq(host_fallocate_whole(fd, 0, MIB), 0);
        return fd;
}

static uint64_t pages_of(int fd)
{
        struct stat st;

        ck_assert_int_eq(fstat(fd, &st), 0);
        return (uint64_t)st.st_blocks * 512;
}

static bool is_over(int fd)
{
        struct pollfd poll_fd = { .fd = fd, .events = POLLIN };

        return poll(&poll_fd, 1, LONG_MS) == 1;
}

static struct host_punch_answer next_answer(const struct host_punch *h)
{
        struct host_punch_answer answer = { 0 };

        ck_assert(is_over(h->fd));
        ck_assert_int_eq(host_punch_receive(h, &answer), 0);
        return answer;
}

static void reap(pid_t pid)
{
        ck_assert_int_eq(waitpid(pid, NULL, 0), pid);
}

/* And the helper ends. */
static void leave(struct host_punch *h)
{
        pid_t pid = h->pid;

        host_punch_leave(h);
        reap(pid);
}

/* Starts a helper, whose punches of this file wait for the lock. */
static bool start_held(struct host_punch *h, struct held_lock *lock, int fd)
{
        if (!held_lock_can()) {
                printf("# skipped: this process may not use userfaultfd(2)\n");
                return false;
        }
        ck_assert_int_eq(host_punch_start(h), 0);
        ck_assert(held_lock_take(lock, fd));
        return true;
}

/* ---- the helper --------------------------------------------------------------- */

TEST(test_punches)
{
        struct host_punch_request request = { .tag = 7, .n_bytes = MIB, .lane = 3 };
        struct host_punch_answer answer;
        int fd = full_file(), pidfd;
        struct host_punch h;
        pid_t pid;

        ck_assert_int_eq(host_punch_start(&h), 0);
        ck_assert_int_eq(host_punch_receive(&h, &answer), -EAGAIN);
        ck_assert_uint_eq(pages_of(fd), MIB);
        ck_assert_int_eq(host_punch_send(&h, &request, fd), 0);
        answer = next_answer(&h);
        ck_assert_uint_eq(answer.tag, 7);
        ck_assert_int_eq(answer.result, 0);
        ck_assert_uint_eq(pages_of(fd), 0);

        /* What it was sent is done when the other end is closed at once, and then it ends. */
        ck_assert_int_eq(host_fallocate_whole(fd, 0, MIB), 0);
        ck_assert_int_eq(host_punch_send(&h, &request, fd), 0);
        pid = h.pid;
        pidfd = dup(h.pidfd);
        host_punch_leave(&h);
        ck_assert(is_over(pidfd));
        ck_assert_uint_eq(pages_of(fd), 0);
        reap(pid);
        close(pidfd);
        close(fd);
}

/* The fds of its caller are not the helper's: a pipe ends with the last writer. */
TEST(test_keeps_nothing)
{
        struct host_punch h;
        int fds[2];
        char c;

        ck_assert_int_eq(pipe(fds), 0);
        ck_assert_int_eq(host_punch_start(&h), 0);
        close(fds[1]);
        ck_assert(is_over(fds[0]));
        ck_assert_int_eq(read(fds[0], &c, 1), 0);
        close(fds[0]);
        kill(h.pid, SIGTERM); /* not for it */
        kill(h.pid, SIGKILL);
        reap(h.pid);
        host_punch_leave(&h);
}

TEST(test_bad_requests)
{
        struct host_punch_request good = { .tag = 9, .n_bytes = MIB }, bad = { .tag = 8 };
        int fd = full_file(), read_only;
        char path[64];
        struct host_punch h;
        struct host_punch_answer answer;

        ck_assert_int_eq(host_punch_start(&h), 0);
        ck_assert_int_eq(send(h.fd, "short", 5, 0), 5);
        ck_assert_int_eq(send(h.fd, &(char[200]){ 0 }, 200, 0), 200);
        ck_assert_int_eq(host_punch_send(&h, &bad, fd), 0); /* no bytes */
        ck_assert_int_eq(next_answer(&h).result, -EINVAL);
        bad.n_bytes = UINT64_MAX;
        ck_assert_int_eq(host_punch_send(&h, &bad, fd), 0);
        ck_assert_int_eq(next_answer(&h).result, -EINVAL);
        ck_assert_int_eq(send(h.fd, &good, sizeof(good), 0), sizeof(good)); /* no fd */
        ck_assert_int_eq(next_answer(&h).result, -EAGAIN);
        snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
        read_only = open(path, O_RDONLY | O_CLOEXEC);
        ck_assert_int_ge(read_only, 0);
        ck_assert_int_eq(host_punch_send(&h, &good, read_only), 0);
        ck_assert_int_eq(next_answer(&h).result, -EBADF);
        ck_assert_int_eq(host_punch_send(&h, &good, fd), 0);
        answer = next_answer(&h);
        ck_assert_uint_eq(answer.tag, 9);
        ck_assert_int_eq(answer.result, 0);
        ck_assert_uint_eq(pages_of(fd), 0);
        leave(&h);
        close(read_only);
        close(fd);
}

/* The other end is closed before an answer was read, and with requests unread: they are done. */
TEST(test_left_with_answers)
{
        struct host_punch_request request = { .tag = 1, .n_bytes = MIB };
        int first = full_file(), second = full_file(), pidfd;
        struct host_punch h;
        pid_t pid;

        ck_assert_int_eq(host_punch_start(&h), 0);
        ck_assert_int_eq(host_punch_send(&h, &request, first), 0);
        ck_assert(is_over(h.fd)); /* there is an answer */
        ck_assert_int_eq(kill(h.pid, SIGSTOP), 0);
        ck_assert_int_eq(waitpid(h.pid, NULL, WUNTRACED), h.pid);
        request.tag = 2;
        ck_assert_int_eq(host_punch_send(&h, &request, second), 0);
        pid = h.pid;
        pidfd = dup(h.pidfd);
        host_punch_leave(&h);
        ck_assert_int_eq(kill(pid, SIGCONT), 0);
        ck_assert(is_over(pidfd));
        ck_assert_uint_eq(pages_of(first) + pages_of(second), 0);
        reap(pid);
        close(pidfd);
        close(first);
        close(second);
}

TEST(test_lanes)
{
        struct host_punch_request request = { .n_bytes = MIB };
        int held = full_file(), behind = full_file(), other = full_file();
        struct held_lock lock;
        struct host_punch h;

        if (!start_held(&h, &lock, held)) {
                close(held);
                close(behind);
                close(other);
                return;
        }
        request.tag = 1;
        ck_assert_int_eq(host_punch_send(&h, &request, held), 0);
        request.tag = 2;
        ck_assert_int_eq(host_punch_send(&h, &request, behind), 0);
        request.tag = 3;
        request.lane = 1;
        ck_assert_int_eq(host_punch_send(&h, &request, other), 0);
        ck_assert_uint_eq(next_answer(&h).tag, 3); /* it passed the lane that is blocked */
        ck_assert_uint_eq(pages_of(behind), MIB);
        held_lock_release(&lock);
        ck_assert_uint_eq(next_answer(&h).tag, 1);
        ck_assert_uint_eq(next_answer(&h).tag, 2);
        ck_assert_uint_eq(pages_of(held) + pages_of(behind) + pages_of(other), 0);
        leave(&h);
        close(held);
        close(behind);
        close(other);
}

/* An extent that is punched is open in no process of the helper, also where its lane, or another
 * one, waits: a client would write pages into it again, and these would stay. A pipe cannot be
 * punched, and tells whether any process has it open. */
TEST(test_keeps_no_punched)
{
        struct host_punch_request request = { .n_bytes = MIB };
        int held = full_file(), pipes[2][2];
        struct held_lock lock;
        struct host_punch h;

        if (!start_held(&h, &lock, held)) {
                close(held);
                return;
        }
        ck_assert_int_eq(kill(h.pid, SIGSTOP), 0);
        ck_assert_int_eq(waitpid(h.pid, NULL, WUNTRACED), h.pid);
        for (unsigned i = 0; i < 2; i++) {
                ck_assert_int_eq(pipe2(pipes[i], O_CLOEXEC), 0);
                request.tag = request.lane = i;
                ck_assert_int_eq(host_punch_send(&h, &request, pipes[i][1]), 0);
                close(pipes[i][1]);
        }
        request.tag = 2; /* behind the second pipe; the first one is in another lane */
        ck_assert_int_eq(host_punch_send(&h, &request, held), 0);
        ck_assert_int_eq(kill(h.pid, SIGCONT), 0);
        ck_assert_int_eq(next_answer(&h).result, -ESPIPE);
        ck_assert_int_eq(next_answer(&h).result, -ESPIPE);
        for (unsigned i = 0; i < 2; i++) {
                ck_assert(is_over(pipes[i][0]));
                close(pipes[i][0]);
        }
        ck_assert_uint_eq(pages_of(held), MIB); /* it still waits */
        held_lock_release(&lock);
        ck_assert_uint_eq(next_answer(&h).tag, 2);
        leave(&h);
        close(held);
}

static pid_t child_of(pid_t pid)
{
        char path[64];
        int child = 0;
        FILE *f;

        snprintf(path, sizeof(path), "/proc/%d/task/%d/children", (int)pid, (int)pid);
        for (int i = 0; i < LONG_MS && child == 0; i++) {
                f = fopen(path, "re");
                ck_assert_ptr_nonnull(f);
                (void)!fscanf(f, "%d", &child);
                fclose(f);
                nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
        }
        ck_assert_int_gt(child, 0);
        return child;
}

/* What a child did not answer before it was killed is to be sent again. */
TEST(test_killed_lane)
{
        struct host_punch_request request = { .tag = 1, .n_bytes = MIB };
        int held = full_file();
        struct host_punch_answer answer;
        struct held_lock lock;
        struct host_punch h;

        if (!start_held(&h, &lock, held)) {
                close(held);
                return;
        }
        ck_assert_int_eq(host_punch_send(&h, &request, held), 0);
        ck_assert_int_eq(kill(child_of(h.pid), SIGKILL), 0);
        held_lock_release(&lock);
        answer = next_answer(&h);
        ck_assert_uint_eq(answer.tag, 1);
        ck_assert_int_eq(answer.result, -EAGAIN);
        ck_assert_int_eq(host_punch_send(&h, &request, held), 0);
        ck_assert_int_eq(next_answer(&h).result, 0);
        ck_assert_uint_eq(pages_of(held), 0);
        leave(&h);
        close(held);
}

/* ---- the daemon's thread --------------------------------------------------------- */

struct job {
        struct punch_request request;
        _Atomic int result; /* 1: none yet */
        int fd;
};

static void job_done(struct punch_request *request, int result)
{
        ((struct job *)request)->result = result;
}

static void job_submit(struct punch *p, struct job *job, uint32_t lane)
{
        job->fd = full_file();
        job->result = 1;
        job->request =
                (struct punch_request){ .fd = dup(job->fd), .n_bytes = MIB, .lane = lane, .done = job_done };
        punch_submit(p, &job->request);
}

static bool job_ends(const struct job *job)
{
        for (int i = 0; i < LONG_MS && job->result == 1; i++)
                nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
        return job->result != 1;
}

static void job_check(struct job *job)
{
        ck_assert(job_ends(job));
        ck_assert_int_eq(job->result, 0);
        ck_assert_uint_eq(pages_of(job->fd), 0);
        close(job->fd);
}

TEST(test_many)
{
        struct job *jobs = calloc(N_MANY, sizeof(*jobs));
        struct host_punch none = HOST_PUNCH_NONE;
        struct punch *p;

        ck_assert_int_eq(punch_new(&none, &p), 0);
        for (unsigned i = 0; i < N_MANY; i++)
                job_submit(p, &jobs[i], i % 7);
        for (unsigned i = 0; i < N_MANY; i++)
                job_check(&jobs[i]);
        punch_free(p);
        free(jobs);
}

/* Whatever the helper has done by then, all is done in the end. */
TEST(test_killed_helper)
{
        struct job jobs[40];
        struct host_punch h;
        struct punch *p;

        for (int round = 0; round < 5; round++) {
                ck_assert_int_eq(host_punch_start(&h), 0);
                ck_assert_int_eq(punch_new(&h, &p), 0);
                for (unsigned i = 0; i < 40; i++) {
                        job_submit(p, &jobs[i], i % 3);
                        if (i == 8U * (unsigned)round)
                                kill(h.pid, SIGKILL);
                }
                for (unsigned i = 0; i < 40; i++)
                        job_check(&jobs[i]);
                punch_free(p);
        }
}

/* What is under way is given up, and done all the same; what is discarded then, too. */
TEST(test_stop)
{
        struct host_punch none = HOST_PUNCH_NONE;
        struct held_lock lock;
        struct job job, last;
        struct punch *p;
        int discarded = full_file();
        bool is_held;

        ck_assert_int_eq(punch_new(&none, &p), 0);
        job_submit(p, &last, 1);
        job_check(&last);
        last.fd = full_file();
        job = (struct job){ .fd = full_file(), .result = 1 };
        is_held = held_lock_take(&lock, job.fd);
        job.request = (struct punch_request){ .fd = dup(job.fd), .n_bytes = MIB, .done = job_done };
        punch_submit(p, &job.request);
        punch_discard(p, dup(discarded), MIB, 1);
        punch_stop(p);
        if (is_held)
                ck_assert_int_eq(job.result, 1);
        punch_discard(p, dup(last.fd), MIB, 2);
        punch_free(p);
        if (is_held)
                held_lock_release(&lock);
        for (int i = 0; i < LONG_MS && pages_of(job.fd) + pages_of(last.fd) + pages_of(discarded) > 0; i++)
                nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
        ck_assert_uint_eq(pages_of(job.fd) + pages_of(last.fd) + pages_of(discarded), 0);
        close(job.fd);
        close(last.fd);
        close(discarded);
}
