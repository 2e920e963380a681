/* Spies; see spies.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/integration/spies.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "device/device.h"

#define N_BLOCKS   4
#define MAX_BYTES  (4 * MIB) /* of each */
#define N_PASSES   8         /* over all, on the host, for each session */
#define AT_EASE_US 2000      /* between two passes of an accomplice, so that the tenants can work */
#define ALONE_US   30000     /* that an accomplice has for itself before the next thief */
#define TIMEOUT_MS SETTLE_MS

/* What is mapped of former extents, whichever tenant has their memory now. */
struct loot {
        struct {
                char *ptr;
                size_t n_bytes;
        } pieces[16];
        size_t next;
};
#define N_PIECES (sizeof(((struct loot *)NULL)->pieces) / sizeof(((struct loot *)NULL)->pieces[0]))

/* On the host the oldest makes room; a GPU's accomplices have few, and end with them. */
static void keep(struct spies *spies, struct loot *loot, char *ptr, size_t n_bytes)
{
        if (loot->pieces[loot->next].ptr)
                munmap(loot->pieces[loot->next].ptr, loot->pieces[loot->next].n_bytes);
        loot->pieces[loot->next].ptr = ptr;
        loot->pieces[loot->next].n_bytes = n_bytes;
        loot->next = (loot->next + 1) % N_PIECES;
        atomic_fetch_add(&spies->n_kept, 1);
}

static void keep_by_fd(struct spies *spies, struct loot *loot, const struct raw_extent *e)
{
        char *p = mmap(NULL, e->n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, e->fd, 0);

        REQUIRE(p != MAP_FAILED, "%s", strerror(errno));
        keep(spies, loot, p, e->n_bytes);
}

/* Open as long as the process lives. */
static void keep_by_handle(struct spies *spies, struct loot *loot, const uint8_t *handle, size_t n_bytes)
{
        struct device_extent extent = { .fd = -1, .share = DEVICE_SHARE_CUDA_IPC, .n_bytes = n_bytes };
        struct device_view view = { .is_cuda = true, .share = DEVICE_SHARE_CUDA_IPC };
        struct device_range *range;

        memcpy(extent.handle, handle, sizeof(extent.handle));
        REQUIRE(device_cuda_ordinal_uuid(0, view.uuid) == 0, "no GPU");
        REQUIRE(device_range_new(&view, n_bytes, &range) == 0, "no range");
        REQUIRE(device_range_map(range, 0, &extent) == 0, "the handle does not open");
        keep(spies, loot, device_range_base(range), n_bytes);
}

/* Reads all that it has; then writes its own stamp over it, which no other tenant may find. */
static void look(struct spies *spies, const struct loot *loot)
{
        const uint64_t mine = stamp_word(STAMP_SPIES);
        uint64_t word;

        for (size_t i = 0; i < N_PIECES; i++) {
                for (size_t at = 0; at < loot->pieces[i].n_bytes; at += GRANULE) {
                        memcpy(&word, loot->pieces[i].ptr + at, sizeof(word));
                        REQUIRE(!stamp_is_foreign(word, STAMP_SPIES),
                                "a spy reads what another tenant wrote");
                        memcpy(loot->pieces[i].ptr + at, &mine, sizeof(mine));
                }
                atomic_fetch_add(&spies->n_bytes, loot->pieces[i].n_bytes);
        }
}

static struct raw *take_some(struct spies *spies, unsigned short random[3])
{
        struct raw *raw = raw_connect(spies->socket, "green");
        Bfcd__Block block;

        for (unsigned i = 0; raw && i < N_BLOCKS; i++)
                (void)raw_malloc(raw, 0, (uint64_t)nrand48(random) % MAX_BYTES + 1, &block);
        return raw;
}

static void must_be_killed(pid_t pid)
{
        int status;

        kill(pid, SIGKILL);
        REQUIRE(waitpid(pid, &status, 0) == pid && WIFSIGNALED(status), "an accomplice ended by itself");
}

/* ---- on the host -------------------------------------------------------------- */

/* A child that has all mappings and the socket of its parent's session, and continues when that
 * has ended. */
static pid_t accomplice_start(struct spies *spies, const struct loot *loot)
{
        pid_t parent = getpid(), pid = fork();

        REQUIRE(pid >= 0, "%s", strerror(errno));
        if (pid > 0)
                return pid;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        while (getppid() == parent)
                look(spies, loot);
        _exit(0);
}

/* Takes blocks, keeps what it was given, ends its session in one way or another, and looks. */
static void spy_on_host(void *arg)
{
        static struct loot loot;
        struct spies *spies = arg;
        unsigned short random[3] = { 5, 6, 7 };

        while (!atomic_load(&spies->is_over)) {
                struct raw *raw = take_some(spies, random);
                pid_t pid;

                if (!raw)
                        continue;
                for (size_t i = 0; i < raw->n_extents; i++)
                        keep_by_fd(spies, &loot, &raw->extents[i]);
                pid = accomplice_start(spies, &loot);
                if (nrand48(random) % 4)
                        REQUIRE(raw_goodbye(raw) == 0, "goodbye");
                raw_close(raw);
                for (unsigned i = 0; i < N_PASSES; i++)
                        look(spies, &loot);
                must_be_killed(pid);
        }
}

/* ---- on a GPU ----------------------------------------------------------------- */

/* Until it is killed. Not for ever: no process kills it where the test was killed. */
static void look_on(struct spies *spies, struct haul *haul, const struct loot *loot)
{
        int64_t end_ms = clock_ms() + (int64_t)TEST_TIMEOUT * 1000;

        atomic_store(&haul->is_seen, true);
        while (clock_ms() < end_ms) {
                look(spies, loot);
                usleep(AT_EASE_US);
        }
        _exit(0);
}

/* Opens what the thief was given, by the handles; the thief waits for it. */
static pid_t handle_opener_start(struct spies *spies, struct haul *haul)
{
        struct loot loot = { .next = 0 };
        pid_t pid = fork();

        REQUIRE(pid >= 0, "%s", strerror(errno));
        if (pid > 0)
                return pid;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        REQUIRE(WAIT_FOR(atomic_load(&haul->n_kept) >= 0, TIMEOUT_MS), "the thief says nothing");
        for (int i = 0; i < atomic_load(&haul->n_kept); i++)
                keep_by_handle(spies, &loot, haul->extents[i].handle, haul->extents[i].n_bytes);
        look_on(spies, haul, &loot);
        return -1;
}

/* Has all fds and mappings of the thief, and outlives it. */
static void heir_start(struct spies *spies, struct haul *haul, struct raw *raw)
{
        struct loot loot = { .next = 0 };
        pid_t pid;

        for (size_t i = 0; i < raw->n_extents; i++)
                keep_by_fd(spies, &loot, &raw->extents[i]);
        pid = fork();
        REQUIRE(pid >= 0, "%s", strerror(errno));
        if (pid == 0) {
                close(raw->fd); /* that the thief has gone must be seen */
                look_on(spies, haul, &loot);
        }
        atomic_store(&haul->child, pid);
}

/* One session, in a process of its own: while that process lives its memory is not released. */
static void steal(struct spies *spies, struct haul *haul, unsigned short random[3])
{
        struct raw *raw = take_some(spies, random);
        size_t n = raw ? raw->n_extents : 0;

        REQUIRE(n <= SPIES_MAX_EXTENTS && n <= N_PIECES, "%zu extents", n);
        for (size_t i = 0; i < n; i++) {
                haul->extents[i].n_bytes = raw->extents[i].n_bytes;
                memcpy(haul->extents[i].handle, raw->extents[i].handle, sizeof(haul->extents[i].handle));
        }
        atomic_store(&haul->n_kept, (int)n);
        if (raw && rig_device() == ON_CUDA_FD)
                heir_start(spies, haul, raw);
        if (raw)
                REQUIRE(WAIT_FOR(atomic_load(&haul->is_seen), TIMEOUT_MS), "no accomplice is there");
        if (!raw || nrand48(random) % 4 == 0)
                _exit(0);
        if (nrand48(random) % 4 == 0)
                raise(SIGKILL);
        REQUIRE(raw_goodbye(raw) == 0, "goodbye"); /* which is a lie */
        _exit(0);
}

/* Its accomplice, which goes on; -1: none. */
static pid_t steal_once(struct spies *spies, struct haul *haul, unsigned short random[3])
{
        pid_t thief, accomplice = -1;
        int status;

        *haul = (struct haul){ .n_kept = -1, .child = -1 };
        if (rig_device() == ON_CUDA_IPC)
                accomplice = handle_opener_start(spies, haul);
        thief = fork();
        REQUIRE(thief >= 0, "%s", strerror(errno));
        if (thief == 0) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                steal(spies, haul, random);
        }
        (void)nrand48(random);
        REQUIRE(waitpid(thief, &status, 0) == thief &&
                        (WIFSIGNALED(status) ? WTERMSIG(status) == SIGKILL : WEXITSTATUS(status) == 0),
                "a thief failed");
        return rig_device() == ON_CUDA_IPC ? accomplice : atomic_load(&haul->child);
}

static void spy_on_gpu(void *arg)
{
        struct spies *spies = arg;
        pid_t accomplices[SPIES_ROUNDS];
        unsigned short random[3] = { 5, 6, 7 };
        unsigned n = 0;

        for (unsigned i = 0; i < SPIES_ROUNDS; i++)
                accomplices[i] = -1;
        prctl(PR_SET_CHILD_SUBREAPER, 1); /* heirs are to be waited for */
        while (!atomic_load(&spies->is_over)) {
                unsigned i = n++ % SPIES_ROUNDS;

                if (accomplices[i] > 0)
                        must_be_killed(accomplices[i]);
                accomplices[i] = steal_once(spies, &spies->hauls[i], random);
                usleep(ALONE_US);
        }
        for (unsigned i = 0; i < SPIES_ROUNDS; i++)
                if (accomplices[i] > 0)
                        must_be_killed(accomplices[i]);
}

/* ---- for the test ------------------------------------------------------------- */

pid_t spies_start(struct spies *spies, const char *socket)
{
        strcpy(spies->socket, socket);
        return child_start(rig_device() == ON_HOST ? spy_on_host : spy_on_gpu, spies);
}

bool spies_are_done(const struct spies *spies)
{
        return atomic_load(&spies->n_bytes) > MIB;
}

void spies_join(struct spies *spies, pid_t pid, struct rig *rig)
{
        atomic_store(&spies->is_over, true);
        child_join(pid);
        ck_assert(spies_are_done(spies));
        printf("# spies kept %llu extents and looked at %llu MiB\n", (unsigned long long)spies->n_kept,
               (unsigned long long)(spies->n_bytes / MIB));
        rig->forgiven = "unreclaimed"; /* logged where it was kept for a second */
        ck_assert_uint_gt(spies->n_kept, 0);
        ck_assert_msg(WAIT_FOR(rig_stats(rig, "green", "train").bytes_unreclaimed == 0, SETTLE_MS),
                      "unreclaimed memory is still charged after the last reference is gone");
}
