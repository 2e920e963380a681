/* An extent's next use: a process that kept an fd, a mapping or a child of a former
 * owner reads nothing of what the next tenant writes, and changes none of it.
 * And what a tenant gets for the first time is zero.
 *
 * The accomplice has no session. It got the fds over a socketpair or by fork,
 * and looks at them, forwards and backwards, after the owner has gone.
 *
 * Access to memory cannot be revoked. The next tenant does not get it at all while a process has it: it stays charged
 * to the tenant that had it. On the host it returns with the last process.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include "device/device.h"
#include "tests/integration/tools.h"

#define PARTITION   (32 * MIB)
#define OWNERS      0x0e /* what the first owner writes */
#define SECRET      0x5e /* what the next tenant writes */
#define INTRUDERS   0x66 /* what the accomplice writes */
#define MAX_EXTENTS 64

static const struct rig_config one_partition = {
        .partitions = "      - {name: train, limit: 32MiB, growth: on-demand}\n",
        .tenants =
                TENANT("red", "@UID@", "train, limit: 32MiB") TENANT("blue", "@UID@", "train, limit: 32MiB"),
        .top = "timeouts: {quarantine: 60m}\n",
};

/* ---- what was kept -------------------------------------------------------- */

struct kept {
        size_t n;
        int fds[MAX_EXTENTS]; /* -1: by a handle */
        uint8_t handles[MAX_EXTENTS][DEVICE_HANDLE_BYTES];
        uint8_t *mappings[MAX_EXTENTS];
        size_t n_bytes[MAX_EXTENTS];
};

/* For as long as the process lives. */
static uint8_t *open_handle(const uint8_t *handle, size_t n_bytes)
{
        struct device_extent extent = { .fd = -1, .share = DEVICE_SHARE_CUDA_IPC, .n_bytes = n_bytes };
        struct device_view view = { .is_cuda = true, .share = DEVICE_SHARE_CUDA_IPC };
        struct device_range *range;

        memcpy(extent.handle, handle, sizeof(extent.handle));
        REQUIRE(device_cuda_ordinal_uuid(0, view.uuid) == 0, "no GPU");
        REQUIRE(device_range_new(&view, n_bytes, &range) == 0, "no range");
        REQUIRE(device_range_map(range, 0, &extent) == 0, "the handle does not open");
        return device_range_base(range);
}

static void keep(struct kept *kept, int fd, const uint8_t *handle, size_t n_bytes)
{
        size_t i = kept->n++;

        kept->fds[i] = fd;
        kept->n_bytes[i] = n_bytes;
        memcpy(kept->handles[i], handle, DEVICE_HANDLE_BYTES);
        if (fd < 0) {
                kept->mappings[i] = open_handle(handle, n_bytes);
                return;
        }
        kept->mappings[i] = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        REQUIRE(kept->mappings[i] != MAP_FAILED, "mmap: %s", strerror(errno));
}

static sigjmp_buf fault;

static void on_fault(int number)
{
        siglongjmp(fault, number);
}

/* Looks for the secret through the mapping; a fault is as good as nothing found. */
static bool mapping_shows(const struct kept *kept, size_t i, uint8_t value)
{
        if (sigsetjmp(fault, 1))
                return false;
        return memchr(kept->mappings[i], value, kept->n_bytes[i]) != NULL;
}

static bool fd_shows(const struct kept *kept, size_t i, uint8_t value)
{
        static uint8_t piece[256 * 1024];
        off_t at = 0;
        ssize_t n;

        /* Behind the memory the fake driver's files say what they are. */
        while ((size_t)at < kept->n_bytes[i] && (n = pread(kept->fds[i], piece, sizeof(piece), at)) > 0) {
                if (memchr(piece, value, (size_t)n))
                        return true;
                at += n;
        }
        return false;
}

/* A mapping made now, by an accomplice that had kept the fd alone. */
static bool fresh_mapping_shows(const struct kept *kept, size_t i, uint8_t value)
{
        struct kept fresh = *kept;
        bool shows;

        fresh.mappings[i] = mmap(NULL, kept->n_bytes[i], PROT_READ, MAP_SHARED, kept->fds[i], 0);
        if (fresh.mappings[i] == MAP_FAILED)
                return false;
        shows = mapping_shows(&fresh, i, value);
        munmap(fresh.mappings[i], kept->n_bytes[i]);
        return shows;
}

static bool kept_shows(const struct kept *kept, uint8_t value)
{
        for (size_t i = 0; i < kept->n; i++) {
                if (mapping_shows(kept, i, value) || fd_shows(kept, i, value) ||
                    fresh_mapping_shows(kept, i, value))
                        return true;
        }
        return false;
}

static void mapping_deface(const struct kept *kept, size_t i)
{
        if (sigsetjmp(fault, 1) == 0)
                memset(kept->mappings[i], INTRUDERS, kept->n_bytes[i]);
}

static void kept_deface(const struct kept *kept)
{
        static uint8_t piece[256 * 1024];

        memset(piece, INTRUDERS, sizeof(piece));
        for (size_t i = 0; i < kept->n; i++) {
                mapping_deface(kept, i);
                for (size_t at = 0; at < kept->n_bytes[i]; at += sizeof(piece))
                        (void)!pwrite(kept->fds[i], piece, sizeof(piece), (off_t)at);
        }
}

/* Nor can it restore the memory itself. */
static void kept_misuse(const struct kept *kept)
{
        for (size_t i = 0; i < kept->n; i++) {
                (void)!ftruncate(kept->fds[i], 0);
                (void)!ftruncate(kept->fds[i], 1 << 20);
                (void)!fcntl(kept->fds[i], F_ADD_SEALS, F_SEAL_WRITE);
        }
}

/* ---- the owner ------------------------------------------------------------ */

struct play {
        char socket[96];
        bool by_fork;         /* the accomplice is the owner's child, not an unrelated process with fds */
        bool says_goodbye;    /* the owner leaves in peace, or is killed */
        int pair[2];          /* owner to accomplice */
        struct gate has_all;  /* accomplice: I keep everything */
        struct gate look_now; /* test: the next tenant has written */
        struct gate looked;
        struct gate finish;
};

/* Everything the tenant's limit holds, filled, as extents mapped by hand. */
static struct raw *own_everything(const struct play *play, struct kept *ret_kept)
{
        struct raw *raw = raw_connect(play->socket, "red");
        Bfcd__Block block;

        REQUIRE(raw, "no connection");
        while (raw_malloc(raw, 0, 1 * MIB, &block) == 0)
                ;
        REQUIRE(raw->n_extents > 0 && raw->n_extents <= MAX_EXTENTS, "%zu extents", raw->n_extents);
        for (size_t i = 0; i < raw->n_extents; i++) {
                const struct raw_extent *e = raw->extents + i;

                keep(ret_kept, e->fd, e->handle, e->n_bytes);
                REQUIRE(all_bytes_are(ret_kept->mappings[i], e->n_bytes, 0), "fresh memory is not zero");
                memset(ret_kept->mappings[i], OWNERS, e->n_bytes);
        }
        return raw;
}

struct parcel {
        size_t n_bytes;
        uint8_t handle[DEVICE_HANDLE_BYTES];
};

static void hand_over(int socket, const struct kept *kept)
{
        for (size_t i = 0; i < kept->n; i++) {
                struct raw wire = { .fd = socket }; /* for its way of sending fds */
                struct parcel parcel = { .n_bytes = kept->n_bytes[i] };

                memcpy(parcel.handle, kept->handles[i], sizeof(parcel.handle));
                REQUIRE(raw_send_fds(&wire, &parcel, sizeof(parcel), kept->fds + i, kept->fds[i] >= 0) == 0,
                        "handing over");
        }
        shutdown(socket, SHUT_WR);
}

static void resume_kept(int socket, struct kept *ret_kept)
{
        union {
                char bytes[CMSG_SPACE(sizeof(int))];
                struct cmsghdr align;
        } control;

        for (;;) {
                struct parcel parcel;
                struct iovec iov = { .iov_base = &parcel, .iov_len = sizeof(parcel) };
                struct msghdr message = { .msg_iov = &iov, .msg_iovlen = 1 };
                int fd = -1;

                message.msg_control = control.bytes;
                message.msg_controllen = sizeof(control.bytes);
                if (recvmsg(socket, &message, 0) <= 0)
                        return;
                REQUIRE(ret_kept->n < MAX_EXTENTS, "taking over");
                if (CMSG_FIRSTHDR(&message))
                        memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(int));
                keep(ret_kept, fd, parcel.handle, parcel.n_bytes);
        }
}

static void spy(struct play *play, const struct kept *kept)
{
        REQUIRE(kept->n > 0, "the accomplice got nothing");
        signal(SIGSEGV, on_fault);
        signal(SIGBUS, on_fault);
        REQUIRE(kept_shows(kept, OWNERS), "the spy's eyes are no good");
        gate_meet(&play->has_all, &play->look_now);
        REQUIRE(!kept_shows(kept, SECRET), "the next tenant's bytes are readable");
        kept_deface(kept);
        kept_misuse(kept);
        gate_meet(&play->looked, &play->finish);
        REQUIRE(!kept_shows(kept, SECRET), "the next tenant's bytes are readable, in the end");
        gate_open(&play->looked);
}

static void be_accomplice(void *arg)
{
        struct play *play = arg;
        struct kept kept = { 0 };

        close(play->pair[0]);
        resume_kept(play->pair[1], &kept);
        spy(play, &kept);
}

static void be_owner(void *arg)
{
        struct play *play = arg;
        struct kept kept = { 0 };
        struct raw *raw = own_everything(play, &kept);

        if (play->by_fork) {
                if (fork() == 0) {
                        /* Not the socket: that the owner has gone must be seen. */
                        close(raw->fd);
                        spy(play, &kept);
                        _exit(0);
                }
        } else {
                hand_over(play->pair[0], &kept);
        }
        if (!play->says_goodbye)
                pause(); /* until killed */
        REQUIRE(gate_wait(&play->has_all, SETTLE_MS), "the accomplice never came");
        gate_open(&play->has_all);
        REQUIRE(raw_goodbye(raw) == 0, "%s", raw_refusal());
        pause();
}

/* ---- the next tenant ------------------------------------------------------ */

struct next {
        bfc_client *client;
        void *blocks[PARTITION / MIB];
};

/* Takes all of the partition; all of it is zero; writes everywhere. */
static void take_all(struct rig *rig, struct next *next)
{
        next->client = client_open(rig, "blue", NULL);
        for (size_t i = 0; i < PARTITION / MIB; i++) {
                ck_assert_ok(bfc_malloc(next->client, MIB, next->blocks + i));
                ck_assert_msg(all_bytes_are(next->blocks[i], MIB, 0),
                              "block %zu holds what another tenant wrote", i);
                memset(next->blocks[i], SECRET, MIB);
        }
}

/* The accomplice has all of it mapped, so no other process receives any of it. */
static void assert_unreclaimed(struct rig *rig, struct play *play, bool says_goodbye, pid_t owner)
{
        bfc_client *client;
        Bfcd__Statistics stats;
        void *p;

        ck_assert(gate_wait(&play->has_all, SETTLE_MS));
        if (says_goodbye)
                gate_open(&play->has_all); /* the owner waits for it, too */
        else
                child_kill(owner);
        ck_assert(WAIT_FOR(rig_stats(rig, "red", "train").bytes_unreclaimed == PARTITION, SETTLE_MS));
        stats = rig_stats(rig, "red", "train");
        ck_assert_uint_eq(stats.bytes_reserved, PARTITION);
        ck_assert_uint_eq(stats.bytes_in_use, 0);
        rig->unreclaimed_bytes = PARTITION;
        rig->forgiven = "unreclaimed";
        client = client_open(rig, "blue", NULL);
        ck_assert_int_eq(bfc_malloc(client, 4096, &p), -ENOMEM);
        ck_assert(has_stats(bfc_last_error()));
        bfc_disconnect(client);
        gate_open(&play->look_now);
        ck_assert_msg(gate_wait(&play->looked, SETTLE_MS), "the accomplice's message is on stderr");
        gate_open(&play->finish);
        ck_assert(gate_wait(&play->looked, SETTLE_MS));
}

static void assert_next_life(bool by_fork, bool says_goodbye)
{
        struct rig *rig = rig_start(&one_partition);
        struct play play = { .by_fork = by_fork, .says_goodbye = says_goodbye };
        pid_t owner, accomplice = 0;
        struct next next;

        strcpy(play.socket, rig->socket);
        play.has_all = gate_new();
        play.look_now = gate_new();
        play.looked = gate_new();
        play.finish = gate_new();
        ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, play.pair), 0);
        if (!by_fork)
                accomplice = child_start(be_accomplice, &play);
        owner = child_start(be_owner, &play);
        close(play.pair[0]);
        close(play.pair[1]);

        assert_unreclaimed(rig, &play, says_goodbye, owner);
        if (accomplice)
                child_join(accomplice);
        if (says_goodbye)
                child_kill(owner);
        if (rig_device() == ON_HOST) {
                rig->unreclaimed_bytes = 0;
                ck_assert(WAIT_FOR(rig_charge(rig, "red", "train") == 0, SETTLE_MS));
                take_all(rig, &next);
                bfc_disconnect(next.client);
        }
        rig_stop(rig);
}

TEST(fds_passed_on_owner_killed)
{
        assert_next_life(false, false);
}

TEST(fds_passed_on_owner_said_goodbye)
{
        assert_next_life(false, true);
}

TEST(fds_inherited_owner_killed)
{
        if (rig_device() == ON_CUDA_IPC)
                return; /* what is opened by a handle no child inherits */
        assert_next_life(true, false);
}

TEST(fds_inherited_owner_said_goodbye)
{
        if (rig_device() == ON_CUDA_IPC)
                return;
        assert_next_life(true, true);
}

/* ---- rights on an extent -------------------------------------------- */

/* A client cannot shrink, grow or freeze what it shares with its tenant and the
 * daemon (a shrunk one would be a SIGBUS for the others). */
TEST(extents_are_sealed)
{
        if (rig_device() != ON_HOST)
                return; /* a GPU's are no files: there is nothing to cut or to seal */

        struct rig *rig = rig_start(&one_partition);
        struct raw *raw = session_open(rig->socket, "red");
        Bfcd__Block block;
        uint8_t *p;
        int fd;

        ck_assert_int_eq(raw_malloc(raw, 0, 1 * MIB, &block), 0);
        ck_assert_ptr_nonnull(raw_find(raw, block.region_id, block.offset));
        fd = raw_find(raw, block.region_id, block.offset)->fd;
        ck_assert_int_lt(ftruncate(fd, 0), 0);
        ck_assert_int_lt(ftruncate(fd, 1 << 30), 0);
        ck_assert_int_lt(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), 0);
        ck_assert_int_ne(fcntl(fd, F_GETFD) & FD_CLOEXEC, 0);
        p = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        ck_assert(p != MAP_FAILED);
        p[0] = 1;
        munmap(p, 4096);
        session_end(raw);
        rig_stop(rig);
}

/* Two sessions of a tenant see each other's extents, and one tenant's ids never
 * turn up with another. */
RIG_TEST(extents_stay_with_their_tenant, one_partition)
{
        uint64_t last_id = 0, newest_id = 0;

        for (unsigned round = 0; round < 6; round++) {
                struct raw *raw = session_open(rig->socket, round % 2 ? "red" : "blue");
                Bfcd__Block block;

                while (raw_malloc(raw, 0, 4 * MIB, &block) == 0)
                        ;
                ck_assert_uint_gt(raw->n_extents, 0);
                for (size_t i = 0; i < raw->n_extents; i++) {
                        ck_assert_uint_gt(raw->extents[i].id, last_id); /* never used again */
                        if (raw->extents[i].id > newest_id)
                                newest_id = raw->extents[i].id;
                }
                last_id = newest_id;
                session_end(raw);
                ck_assert(WAIT_FOR(rig_count(rig).n_extents == 0, SETTLE_MS));
        }
}

struct siblings {
        char socket[96];
        struct gate has_written;
};

static void read_siblings_block(void *arg)
{
        struct siblings *s = arg;
        bfc_client *client = child_client_open(s->socket, "red");
        struct bfc_block_info info = { .struct_size = sizeof(info) };
        uint8_t *p, *extent;
        void *block;

        REQUIRE(gate_wait(&s->has_written, SETTLE_MS), "the test did not open the gate");
        REQUIRE(bfc_malloc(client, 4096, &block) == 0, "%s", bfc_last_error());
        REQUIRE(bfc_block_info(client, block, &info) == 0, "%s", bfc_last_error());
        p = block;
        extent = p - info.offset; /* it is the region's first */
        REQUIRE(memchr(extent, OWNERS, MIB), "what the sibling wrote is not there");
        memset(p, SECRET, 4096);
        bfc_disconnect(client);
}

/* Processes of a tenant share extents: small blocks of two live in one. */
RIG_TEST(a_tenants_processes_share_extents, one_partition)
{
        struct siblings siblings = { .has_written = gate_new() };
        bfc_client *client;
        pid_t pid;
        void *p;

        strcpy(siblings.socket, rig->socket);
        pid = child_start(read_siblings_block, &siblings); /* before CUDA begins in this process */
        client = client_open(rig, "red", NULL);
        ck_assert_ok(bfc_malloc(client, 4096, &p));
        memset(p, OWNERS, 4096);
        gate_open(&siblings.has_written);
        child_join(pid);
        ck_assert(all_bytes_are(p, 4096, OWNERS));
        ck_assert_uint_eq(rig_stats(rig, "red", "train").num_extents, 1);
        bfc_disconnect(client);
}

/* ---- memory that a process keeps ------------------------------------------------- */

/* Also a process that was killed or has forked may have it for a moment: that is no reason to log it. */
TEST(kept_fds_are_charged_and_logged)
{
        Bfcd__Block block;
        bfc_client *blue;
        struct raw *raw;
        struct rig *rig;
        uint64_t n_bytes;
        void *p;
        int fd;

        if (rig_device() != ON_HOST)
                return; /* a GPU does not tell when it has its memory back */
        rig = rig_start(&one_partition);
        rig->forgiven = "unreclaimed";
        raw = raw_connect(rig->socket, "red");
        blue = client_open(rig, "blue", NULL);
        ck_assert_ptr_nonnull(raw);
        ck_assert_int_eq(raw_malloc(raw, 0, PARTITION / 2, &block), 0);
        ck_assert_int_eq(raw_free(raw, block.block_id), 0);
        n_bytes = raw->extents[0].n_bytes;
        fd = dup(raw->extents[0].fd);
        ck_assert_int_ge(fd, 0);
        session_end(raw);
        ck_assert(WAIT_FOR(rig_stats(rig, "red", "train").bytes_unreclaimed == n_bytes, SETTLE_MS));
        ck_assert_uint_eq(rig_charge(rig, "red", "train"), n_bytes);
        ck_assert_int_eq(bfc_malloc(blue, PARTITION, &p), -ENOMEM);
        text_has(rig_log(rig), "did not return memory of tenant 'red'");
        close(fd);
        ck_assert(WAIT_FOR(rig_charge(rig, "red", "train") == 0, SETTLE_MS));
        text_has(rig_log(rig), "returned unreclaimed memory of tenant 'red'");
        ck_assert_ok(bfc_malloc(blue, PARTITION, &p));
        bfc_disconnect(blue);
        rig_stop(rig);
}
