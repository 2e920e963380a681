/* Extents whose inode locks and mappings are busy when the daemon is to destroy them: many
 * mappings in each of many processes, and holes punched all the time.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/attacks/attack.h"

#define N_PUNCHERS 3u     /* processes, for each that allocates */
#define N_MAPPINGS 16000u /* in each of them */
#define N_BYTES    (UINT64_C(8) << 20)
#define HOLD_US    500000 /* so long the extents stay busy before they are given up, and after */

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

static void busy(const struct raw *raw) /* until it is killed */
{
        const size_t n_bytes = (size_t)raw->extents[0].n_bytes;
        char *at = NULL;

        for (unsigned i = 0; i < N_MAPPINGS; i++) {
                const struct raw_extent *e = &raw->extents[i % raw->n_extents];
                char *p = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, e->fd, 0);

                at = p == MAP_FAILED ? at : p;
        }
        if (!at)
                return;
        for (unsigned i = 0;; i++) {
                const struct raw_extent *e = &raw->extents[i % raw->n_extents];

                for (size_t k = 0; k < n_bytes; k += 4096)
                        *(volatile char *)(at + k) = 1;
                (void)!fallocate(e->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, (off_t)n_bytes);
                (void)madvise(at, n_bytes, MADV_COLLAPSE);
        }
}

static pid_t start_puncher(const struct raw *raw)
{
        pid_t parent = getpid(), pid = fork();

        if (pid != 0)
                return pid;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() == parent)
                busy(raw);
        _exit(0);
}

static void one_round(struct attack_stage *stage)
{
        struct raw *raw = attack_session(stage);
        pid_t punchers[N_PUNCHERS] = { 0 };
        Bfcd__Block block;

        if (raw_malloc(raw, 0, N_BYTES, &block) == 0 && raw->n_extents > 0) {
                for (unsigned i = 0; i < N_PUNCHERS; i++)
                        punchers[i] = start_puncher(raw);
                usleep(HOLD_US);
                (void)raw_free(raw, block.block_id);
                (void)raw_goodbye(raw);
                usleep(HOLD_US);
                attack_count(stage, 1);
        }
        for (unsigned i = 0; i < N_PUNCHERS; i++) {
                if (punchers[i] <= 0)
                        continue;
                kill(punchers[i], SIGKILL);
                (void)waitpid(punchers[i], NULL, 0);
        }
        raw_close(raw);
}

static void act(struct attack_stage *stage)
{
        attack_is_up(stage);
        for (;;)
                one_round(stage);
}

const struct attack attack_punch = { .key = "punch",
                                     .what = "extents that are freed while many processes punch and map them",
                                     .n_processes = 2,
                                     .act = act,
                                     .log_line = "did not return memory of tenant" };
