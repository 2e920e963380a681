/* Blocks that are parked while a process holds the locks of their pages: it punches holes into a large page that has many
 * mappings, and has the kernel collapse it again. It has the lowest priority, and another process takes its processor
 * while it has the locks. The daemon that copies such a block waits for them.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/attacks/attack.h"

#define N_MAPPINGS   15000u
#define N_BYTES      (UINT64_C(8) << 20)
#define HUGE_BYTES   (UINT64_C(2) << 20)
#define TOUCH_BYTES  65536u
#define BEGIN_US     200000 /* so long the pages are held before the block is parked */
#define COPIES_INDEX 1u     /* of the partition for copies */

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* Linux 6.1 */
#endif

/* Both processes are on one processor. */
static void share_processor(void)
{
        long n = sysconf(_SC_NPROCESSORS_ONLN);
        cpu_set_t set;

        CPU_ZERO(&set);
        CPU_SET((size_t)getppid() % (size_t)(n > 0 ? n : 1), &set);
        (void)sched_setaffinity(0, sizeof(set), &set);
}

/* Of the first large page of the extent. Returns how many. */
static size_t map_often(int fd, char **ret)
{
        size_t n = 0;

        while (n < N_MAPPINGS) {
                ret[n] = mmap(NULL, HUGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
                if (ret[n] == MAP_FAILED)
                        break;
                n++;
        }
        return n;
}

static void touch(char *const *maps, size_t n)
{
        for (size_t i = 0; i < n; i++)
                for (size_t at = 0; at < HUGE_BYTES; at += TOUCH_BYTES)
                        *(volatile char *)(maps[i] + at) = 1;
}

/* Until it is killed. Writes a byte to `up` when everything is mapped. */
static void hold(int fd, int up)
{
        static char *maps[N_MAPPINGS];
        char *room = mmap(NULL, 2 * HUGE_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), *huge;
        const struct sched_param none = { 0 };
        size_t n;

        if (room == MAP_FAILED)
                return;
        room += (HUGE_BYTES - (uintptr_t)room % HUGE_BYTES) % HUGE_BYTES;
        huge = mmap(room, HUGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
        n = map_often(fd, maps);
        touch(maps, n);
        share_processor();
        (void)sched_setscheduler(0, SCHED_IDLE, &none);
        (void)!write(up, "", 1);
        for (;;) {
                if (huge != MAP_FAILED)
                        (void)madvise(huge, HUGE_BYTES, MADV_COLLAPSE);
                (void)!fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 4096, 4096);
                touch(maps, n);
        }
}

static void spin(int fd, int up)
{
        (void)fd;
        (void)up;
        share_processor();
        for (volatile unsigned i = 0;; i++)
                ;
}

static pid_t start(void (*act)(int fd, int up), int fd, int up)
{
        pid_t parent = getpid(), pid = fork();

        if (pid != 0)
                return pid;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() == parent)
                act(fd, up);
        _exit(0);
}

static void end(pid_t pid)
{
        if (pid <= 0)
                return;
        kill(pid, SIGKILL);
        (void)waitpid(pid, NULL, 0);
}

static struct raw *session_with_events(const struct attack_stage *stage)
{
        for (;;) {
                struct raw *raw;

                if (raw_open(stage->socket, &raw) == 0) {
                        raw->wants_events = true;
                        if (raw_hello(raw, ATTACKER, NULL) == 0)
                                return raw;
                        raw_close(raw);
                }
                usleep(1000);
        }
}

/* Its id; 0: refused. */
static uint64_t make_parkable(struct raw *raw)
{
        Bfcd__Malloc body = BFCD__MALLOC__INIT;
        Bfcd__Request request = BFCD__REQUEST__INIT;
        Bfcd__Reply *reply = NULL;
        uint64_t id = 0;

        body.n_bytes = N_BYTES;
        body.flags = BFCD__MALLOC_FLAG__MALLOC_FLAG_PARKABLE;
        request.body_case = BFCD__REQUEST__BODY_MALLOC;
        request.malloc = &body;
        if (raw_call(raw, &request, &reply) < 0)
                return 0;
        if (reply->body_case == BFCD__REPLY__BODY_BLOCK)
                id = reply->block->block_id;
        bfcd__reply__free_unpacked(reply, NULL);
        return id;
}

static int park(struct raw *raw, uint64_t id)
{
        Bfcd__Park body = BFCD__PARK__INIT;
        Bfcd__Request request = BFCD__REQUEST__INIT;

        body.block_id = id;
        body.partition = COPIES_INDEX;
        request.body_case = BFCD__REQUEST__BODY_PARK;
        request.park = &body;
        return raw_do(raw, &request);
}

static bool park_held(struct raw *raw, uint64_t id)
{
        pid_t holder, spinner;
        bool is_parked;
        int fds[2];
        char byte;

        if (pipe2(fds, O_CLOEXEC) < 0)
                return false;
        holder = start(hold, raw->extents[0].fd, fds[1]);
        close(fds[1]);
        (void)!read(fds[0], &byte, 1);
        close(fds[0]);
        spinner = start(spin, -1, -1);
        usleep(BEGIN_US);
        is_parked = park(raw, id) == 0;
        end(spinner);
        end(holder);
        return is_parked;
}

static void one_round(struct attack_stage *stage)
{
        struct raw *raw = session_with_events(stage);
        uint64_t id = make_parkable(raw);

        if (id != 0 && raw->n_extents > 0)
                attack_count(stage, park_held(raw, id));
        (void)raw_goodbye(raw);
        raw_close(raw);
}

static void act(struct attack_stage *stage)
{
        attack_is_up(stage);
        for (;;)
                one_round(stage);
}

const struct attack attack_park = { .key = "park",
                                    .what = "blocks that are parked while their pages are locked",
                                    .n_processes = 4,
                                    .act = act };
