/* Holes in the client page, from many mappings of several processes, while the session asks for
 * lists for which the daemon reads the page. Or the kernel is asked to collapse the page into a
 * huge one, for which it unmaps all of these under the lock of the page.
 *
 * A daemon that reads it through a mapping of its own waits in the page fault for seconds; one that
 * reads the file waits for the lock.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "tests/attacks/attack.h"

#define N_WORKERS  2u
#define N_MAPS     20000u
#define N_TOUCHED  16u   /* of them, before each hole or collapse */
#define PAGE_BYTES 4096u /* so much of the client page */
#define HUGE_BYTES (UINT64_C(2) << 20)

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* Linux 6.1 */
#endif

static struct raw *session_with_page(const struct attack_stage *stage)
{
        for (;;) {
                struct raw *raw;

                if (raw_open(stage->socket, &raw) == 0) {
                        raw->wants_pages = true;
                        if (raw_hello(raw, ATTACKER, NULL) == 0 && raw->page_fds[1] >= 0)
                                return raw;
                        raw_close(raw);
                }
                usleep(1000);
        }
}

/* A mapping that can be a huge page; NULL. */
static void *map_aligned(int fd)
{
        char *room = mmap(NULL, 2 * HUGE_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        void *p;

        if (room == MAP_FAILED)
                return NULL;
        room += (HUGE_BYTES - (uintptr_t)room % HUGE_BYTES) % HUGE_BYTES;
        p = mmap(room, HUGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
        return p == MAP_FAILED ? NULL : p;
}

static void strike(struct attack_stage *stage, int fd, void *huge)
{
        if (huge)
                (void)madvise(huge, HUGE_BYTES, MADV_COLLAPSE);
        else
                (void)!fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, PAGE_BYTES);
        attack_count(stage, 1);
}

static void work(struct attack_stage *stage, int fd, bool collapses, pid_t parent)
{
        static volatile char *maps[N_MAPS];
        void *huge = collapses ? map_aligned(fd) : NULL;
        size_t n = 0;

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent)
                _exit(0);
        while (n < N_MAPS && (n == 0 || maps[n - 1] != MAP_FAILED))
                maps[n++] = mmap(NULL, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        n -= maps[n - 1] == MAP_FAILED;
        for (unsigned i = 0;; i++) {
                if (n > 0 && i % (N_TOUCHED + 1) < N_TOUCHED) {
                        *maps[(size_t)random() % n] = 1;
                        continue;
                }
                strike(stage, fd, huge);
        }
}

static void run(struct attack_stage *stage, bool collapses)
{
        struct raw *raw = session_with_page(stage);
        pid_t self = getpid();
        Bfcd__Block block;
        Bfcd__Reply *reply;

        (void)raw_malloc(raw, 0, 4096, &block); /* a session that holds nothing has no page to be read */
        for (unsigned i = 0; i < N_WORKERS; i++)
                if (fork() == 0)
                        work(stage, raw->page_fds[1], collapses, self);
        attack_is_up(stage);
        while (raw_list(raw, BFCD__LIST__KIND__SESSIONS, 0, &reply) == 0)
                bfcd__reply__free_unpacked(reply, NULL);
        for (;;)
                pause();
}

static void act_hole(struct attack_stage *stage)
{
        run(stage, false);
}

static void act_collapse(struct attack_stage *stage)
{
        run(stage, true);
}

const struct attack attack_collapse = {
        .key = "collapse",
        .what = "collapses of the client page beside many mappings",
        .n_processes = 3,
        .act = act_collapse,
};

const struct attack attack_page = {
        .key = "page",
        .what = "holes in the client page, from many mappings",
        .n_processes = 3,
        .act = act_hole,
};
