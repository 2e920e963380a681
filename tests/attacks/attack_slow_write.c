/* An extent that is freed while a write() into it never ends: its source page never comes, and the
 * lock of its inode is held meanwhile. The page is of userfaultfd(2), which is not served; where that
 * is not allowed, it is of a file from which it is taken away again and again.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "tests/attacks/attack.h"
#include "tests/held_lock.h"

#define N_BYTES      (UINT64_C(2) << 20)
#define SOURCE_BYTES ((size_t)64 << 20)
#define KEEP_US      2000000 /* then another extent is taken; the lock stays */

/* Each page fault of the source waits for a punch over all of it. */
static void write_slowly(int fd)
{
        pid_t parent = getpid();
        int source = memfd_create("source", MFD_CLOEXEC);
        char *at = MAP_FAILED;

        if (source >= 0 && ftruncate(source, (off_t)SOURCE_BYTES) == 0)
                at = mmap(NULL, SOURCE_BYTES, PROT_READ, MAP_SHARED, source, 0);
        if (at == MAP_FAILED)
                return;
        if (fork() == 0) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                while (getppid() == parent)
                        (void)!fallocate(source, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                                         (off_t)SOURCE_BYTES);
                _exit(0);
        }
        for (;;)
                (void)!pwrite(fd, at, N_BYTES, 0);
}

static void hold_lock(int fd)
{
        pid_t parent = getpid();
        struct held_lock lock;

        if (fork() != 0)
                return;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent)
                _exit(0);
        if (held_lock_take(&lock, fd))
                for (;;)
                        pause();
        write_slowly(fd);
        _exit(0);
}

static void act(struct attack_stage *stage)
{
        unsigned n_held = 0;

        attack_is_up(stage);
        for (;;) {
                struct raw *raw = attack_session(stage);
                Bfcd__Block block;

                if (n_held < 8 && raw_malloc(raw, 0, N_BYTES, &block) == 0 && raw->n_extents > 0) {
                        hold_lock(raw->extents[raw->n_extents - 1].fd);
                        usleep(KEEP_US / 10);
                        (void)raw_free(raw, block.block_id);
                        attack_count(stage, 1);
                        n_held++;
                }
                (void)raw_goodbye(raw);
                raw_close(raw);
                usleep(KEEP_US);
        }
}

const struct attack attack_slow_write = {
        .key = "slow-write",
        .what = "extents that are freed while a write() into them never ends",
        .n_processes = 2,
        .act = act,
        .log_line = "did not return memory of tenant",
};
