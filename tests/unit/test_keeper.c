/* A keeper whose user has too many fds in flight, and one whose NVML hangs. The device is the host.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "keeper/serve.h"
#include "keeper/wire.h"
#include "tests/suite.h"

#define MIB (UINT64_C(1) << 20)

static int ends[2]; /* the keeper's is the second one */

static void *serve(void *userdata)
{
        struct keeper *k = keeper_new("host");

        ck_assert_ptr_nonnull(k);
        ck_assert_int_eq(keeper_serve(k, ends[1]), 0);
        keeper_free(k);
        close(ends[1]);
        return userdata;
}

static int ask(const struct keeper_request *request, struct keeper_reply *ret, int ret_fds[static KEEPER_FDS],
               size_t *ret_n_fds)
{
        ck_assert_int_eq(keeper_send(ends[0], request, sizeof(*request), NULL, 0), 0);
        return keeper_receive(ends[0], ret, sizeof(*ret), ret_fds, ret_n_fds);
}

static void start(pthread_t *ret)
{
        struct keeper_request q;
        struct keeper_reply reply;
        int fds[KEEPER_FDS];
        size_t n;

        memset(&q, 0, sizeof(q));
        q.version = KEEPER_VERSION;
        ck_assert_int_eq(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
        ck_assert_int_eq(pthread_create(ret, NULL, serve, NULL), 0);
        ck_assert_int_eq(ask(&q, &reply, fds, &n), 0);
        ck_assert_int_eq(reply.result, 0);
}

/* Not for root, whose fds are not counted. */
static void fill(int to)
{
        int fds[KEEPER_FDS];
        char byte = 0;

        for (size_t i = 0; i < KEEPER_FDS; i++)
                fds[i] = to;
        for (int i = 0, r = 0; r == 0; i++) {
                ck_assert_int_lt(i, 8);
                r = keeper_send(to, &byte, 1, fds, KEEPER_FDS);
                ck_assert(r == 0 || r == -EMFILE);
        }
}

TEST(too_many_fds_in_flight)
{
        struct rlimit limit;
        struct keeper_request q;
        struct keeper_reply reply;
        int other[2], fds[KEEPER_FDS];
        pthread_t thread;
        size_t n;

        if (geteuid() == 0 && setuid(54322) < 0)
                ck_abort_msg("setuid: %s", strerror(errno));
        start(&thread);
        ck_assert_int_eq(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, other), 0);
        ck_assert_int_eq(getrlimit(RLIMIT_NOFILE, &limit), 0);
        limit.rlim_cur = 30;
        ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
        fill(other[0]);
        memset(&q, 0, sizeof(q));
        q.version = KEEPER_VERSION;
        q.op = KEEPER_MAKE;
        q.key = 7;
        q.n = 2;
        q.n_bytes[0] = q.n_bytes[1] = 2 * MIB;
        ck_assert_int_eq(ask(&q, &reply, fds, &n), 0);
        ck_assert_int_eq(reply.result, -EMFILE);
        ck_assert_uint_eq(reply.n_extents, 0);
        ck_assert_uint_eq(n, 0);
        close(other[0]);
        close(other[1]);
        do /* the kernel collects what only its own fds keep, later */
                ck_assert_int_eq(ask(&q, &reply, fds, &n), 0);
        while (reply.result == -EMFILE && usleep(1000) == 0);
        ck_assert_int_eq(reply.result, 0);
        ck_assert_uint_eq(n, 2);
        while (n > 0)
                close(fds[--n]);
        close(ends[0]);
        ck_assert_int_eq(pthread_join(thread, NULL), 0);
}

static int ask_for(enum keeper_op op, uint64_t key, struct keeper_reply *ret)
{
        struct keeper_request q = keeper_request_of(op);
        int fds[KEEPER_FDS];
        size_t n;

        q.key = key;
        ck_assert_int_eq(ask(&q, ret, fds, &n), 0);
        return ret->result;
}

/* It delays no other request, and not the end. */
TEST(nvml_hangs)
{
        struct keeper_reply reply;
        pthread_t thread;

        ck_assert_int_eq(setenv("FAKE_NVML", "hang", 1), 0);
        ck_assert_ptr_nonnull(dlopen("libnvidia-ml.so.1", RTLD_NOW)); /* so that the thread opens no file */
        start(&thread);
        for (int i = 0; i < 3; i++) {
                ck_assert_int_eq(ask_for(KEEPER_USES, 0, &reply), -EAGAIN);
                ck_assert_int_eq(ask_for(KEEPER_USES, 7, &reply), -EAGAIN);
                ck_assert_int_eq(ask_for(KEEPER_FACTS, 0, &reply), 0);
        }
        close(ends[0]);
        suite_join(thread, NULL);
}

static uint64_t count_threads(void)
{
        struct stat st;

        ck_assert_int_eq(stat("/proc/self/task", &st), 0);
        return st.st_nlink;
}

/* The answer is that of the question before. */
TEST(uses_of_processes)
{
        uint64_t n_threads = count_threads();
        char path[] = "/tmp/test-keeper-XXXXXX";
        struct keeper_reply reply;
        pthread_t thread;
        FILE *f = fdopen(mkstemp(path), "w");

        ck_assert_ptr_nonnull(f);
        fprintf(f, "GPU-00000000-0000-0000-0000-000000000000 %d 4096\n", (int)getpid());
        fprintf(f, "GPU-00000000-0000-0000-0000-000000000000 1 2048\n");
        fprintf(f, "GPU-00000000-0000-0000-0000-000000000000 %u 8192\nGPU-a 7 1\n", UINT32_MAX);
        fclose(f);
        ck_assert_int_eq(setenv("FAKE_NVML", path, 1), 0);
        start(&thread);
        ck_assert_int_eq(ask_for(KEEPER_USES, 0, &reply), -EAGAIN);
        while (ask_for(KEEPER_USES, 0, &reply) == -EAGAIN)
                usleep(1000);
        if (suite_has_initial_pids()) {
                ck_assert_int_eq(reply.result, 0);
                ck_assert_uint_eq(reply.n_uses, 2); /* its own are left out */
                ck_assert_uint_eq(reply.uses[0].pid, 1);
                ck_assert_uint_eq(reply.uses[0].n_bytes, 2048);
                ck_assert_int_eq(ask_for(KEEPER_USES, 1, &reply), 0);
                ck_assert_uint_eq(reply.n_uses, 1);
                ck_assert_uint_eq(reply.uses[0].n_bytes, 8192);
        } else {
                ck_assert_int_eq(reply.result, -ENOENT);
        }
        close(ends[0]);
        suite_join(thread, NULL);
        while (count_threads() > n_threads) /* the last question's opens the file */
                usleep(1000);
        unlink(path);
}
