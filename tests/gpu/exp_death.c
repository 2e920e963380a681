/* Experiments: what is left running, or taken, when a process dies.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The word that a killed process's kernel counts up lies in memory of this
 * process, which outlives it: reading it tells whether the kernel still runs. */
#include "tests/gpu/experiments.h"

#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

#define SIZE (2 * MIB)

static uint64_t read_word(CUdeviceptr at)
{
        uint64_t word = UINT64_MAX;

        cu.cuMemcpyDtoH_v2(&word, at, sizeof(word));
        return word;
}

static bool is_counting(CUdeviceptr at)
{
        uint64_t first = read_word(at);

        usleep(2000);
        return read_word(at) != first;
}

/* Microseconds until the fd shows it, or -1; notes whether the kernel ran then. */
static void await_sign(const char *name, int fd, short events, double killed_at, CUdeviceptr at)
{
        struct pollfd p = { .fd = fd, .events = events };
        char text[64];
        int r = poll(&p, 1, 30000);
        double us = now_us() - killed_at;

        snprintf(text, sizeof(text), "%s_us", name);
        say_number(text, r > 0 ? us : -1);
        snprintf(text, sizeof(text), "counting_after_%s", name);
        say_flag(text, is_counting(at));
}

static CUdeviceptr start_counting(struct peer *p)
{
        struct peer_message m = { .op = PEER_OPEN };
        CUdeviceptr at = 0;

        if (cu.cuMemAlloc_v2(&at, SIZE) != CUDA_SUCCESS || cu.cuMemsetD8_v2(at, 0, SIZE) != CUDA_SUCCESS ||
            cu.cuIpcGetMemHandle(&m.handle, at) != CUDA_SUCCESS)
                skip("cannot export");
        if (ask(p, &m) != CUDA_SUCCESS)
                skip("the peer cannot open");
        m = (struct peer_message){ .op = PEER_SPIN, .a = m.a };
        if (ask(p, &m) != CUDA_SUCCESS) {
                say_error("launch", m.result);
                skip("the driver takes no kernel");
        }
        for (int i = 0; i < 1000 && !is_counting(at); i++)
                usleep(1000);
        return at;
}

static void killed_with_kernel(void)
{
        struct peer p = start_peer((uid_t)-1, 0);
        double killed_at, last_seen;
        CUdeviceptr at;
        uint64_t word;

        start_here();
        at = start_counting(&p);
        say_flag("counting", is_counting(at));
        killed_at = now_us();
        kill(p.pid, SIGKILL);
        await_sign("hang_up", p.fd, POLLRDHUP, killed_at, at);
        await_sign("pidfd", p.pidfd, POLLIN, killed_at, at);
        last_seen = now_us();
        word = read_word(at);
        for (double until = now_us() + 2e6; now_us() < until;) {
                uint64_t next = read_word(at);

                if (next != word)
                        last_seen = now_us();
                word = next;
        }
        say_number("last_count_seen_us", last_seen - killed_at);
        say_error("error_here", cu.cuCtxSynchronize());
        peer_kill(&p);
}

/* A process is killed during a kernel, and a child that it forked lives on. */
static void killed_with_kernel_and_child(void)
{
        struct peer p = start_peer((uid_t)-1, 0);
        struct peer_message m = { .op = PEER_FORK };
        CUdeviceptr at;
        pid_t child;

        start_here();
        at = start_counting(&p);
        ask(&p, &m);
        child = (pid_t)m.a;
        if (child <= 0)
                skip("no child");
        say_flag("counting", is_counting(at));
        kill(p.pid, SIGKILL);
        await_sign("pidfd", p.pidfd, POLLIN, now_us(), at);
        sleep(is_quick ? 0 : 1);
        say_flag("counting_beside_the_child", is_counting(at));
        kill(child, SIGKILL);
        sleep(is_quick ? 0 : 1);
        say_flag("counting_without_the_child", is_counting(at));
        say_error("error_here", cu.cuCtxSynchronize());
        peer_kill(&p);
}

static double freed_since(size_t n_free_before)
{
        return (double)gpu_n_free() - (double)n_free_before;
}

/* A child that a process fork()ed has its parent's fds of the driver too. */
static void forked_child_holds(void)
{
        struct peer p = start_peer((uid_t)-1, 0);
        struct peer_message m = { .op = PEER_ALLOC, .a = 8 * SIZE };
        size_t n_before;
        pid_t child;

        start_here();
        n_before = gpu_n_free();
        say_error("alloc", ask(&p, &m));
        say_number("freed_by_alloc", freed_since(n_before));
        m = (struct peer_message){ .op = PEER_FORK };
        ask(&p, &m);
        child = (pid_t)m.a;
        if (child <= 0)
                skip("no child");
        peer_kill(&p);
        usleep(is_quick ? 1000 : 500000);
        say_number("freed_when_the_parent_is_dead", freed_since(n_before));
        kill(child, SIGKILL);
        usleep(is_quick ? 100000 : 500000);
        say_number("freed_when_the_child_is_dead", freed_since(n_before));
}

/* When does the memory of a killed process return, by its pidfd's time? */
static void killed_returns(void)
{
        struct peer p = start_peer((uid_t)-1, 0);
        size_t n_bytes = max_n_bytes < 256 * MIB ? max_n_bytes : 256 * MIB, n_free;
        struct peer_message m = { .op = PEER_ALLOC, .a = n_bytes };
        struct pollfd hang_up = { .fd = p.fd, .events = POLLRDHUP },
                      gone = { .fd = p.pidfd, .events = POLLIN };
        double killed_at;

        start_here();
        n_free = gpu_n_free();
        say_error("alloc", ask(&p, &m));
        killed_at = now_us();
        kill(p.pid, SIGKILL);
        poll(&hang_up, 1, 30000);
        say_number("hang_up_us", now_us() - killed_at);
        say_flag("returned_at_hang_up", gpu_n_free() >= n_free);
        poll(&gone, 1, 30000);
        say_number("pidfd_us", now_us() - killed_at);
        say_flag("returned_at_pidfd", gpu_n_free() >= n_free);
        for (int i = 0; i < 2000 && gpu_n_free() < n_free; i++)
                usleep(1000);
        say_number("returned_us", gpu_n_free() >= n_free ? now_us() - killed_at : -1);
        peer_kill(&p);
}

const struct experiment death_experiments[] = {
        { "killed-with-kernel", "how long does a killed process's kernel write", killed_with_kernel },
        { "killed-kernel-and-child", "and where its child lives on", killed_with_kernel_and_child },
        { "killed-returns", "when does a killed process's memory return", killed_returns },
        { "forked-child-holds", "does a forked child keep a dead parent's memory", forked_child_holds },
        { NULL, NULL, NULL },
};
