/* The watch: what is found in destroyed extents that a process kept, and when it ends.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/watch.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/memory/arena.h"
#include "device/device.h"
#include "proto/memfd.h"
#include "tests/suite.h"

#define SIZE (2 * MIB)

static struct device *device;
static struct watch *watch;
static struct watch_owner owner;
static unsigned n_refilled, n_lessened;

static void on_refilled(struct watch_owner *o, int fd, uint64_t n_bytes)
{
        ck_assert_ptr_eq(o, &owner);
        if (fd < 0) {
                n_lessened++;
                return;
        }
        ck_assert_uint_eq(n_bytes, SIZE);
        ck_assert_int_ge(fcntl(fd, F_GETFD), 0);
        n_refilled++;
}

static void begin(size_t n_max)
{
        n_refilled = n_lessened = 0;
        ck_assert_int_eq(device_host_new(&device), 0);
        ck_assert_int_eq(watch_new(n_max, &watch), 0);
        watch_owner_init(&owner, on_refilled);
}

static void end(void)
{
        watch_leave(watch, &owner);
        ck_assert_uint_eq(owner.n_entries, 0);
        ck_assert_uint_eq(owner.n_bytes, 0);
        watch = watch_free(watch);
        device = device_free(device);
}

/* An extent that was destroyed and is watched; *ret_lent: as a client had it. */
static void destroy_one(int *ret_lent)
{
        struct device_extent e = DEVICE_EXTENT_EMPTY;
        int watched;

        ck_assert_int_eq(device_make(device, DEVICE_SHARE_FD, SIZE, &e), 0);
        if (ret_lent)
                *ret_lent = device_lend(device, &e, false);
        watched = fcntl(e.fd, F_DUPFD_CLOEXEC, 3);
        ck_assert_int_eq(device_destroy(device, &e), 0);
        watch_add(watch, &owner, watched, SIZE);
}

/* What is done with it where it is found: see arena.c. */
static void punch(int fd)
{
        struct device_extent e = { .fd = fcntl(fd, F_DUPFD_CLOEXEC, 3), .n_bytes = SIZE };

        ck_assert_int_eq(device_destroy(device, &e), 0);
}

TEST(unreferenced_memory)
{
        begin(8);
        destroy_one(NULL);
        ck_assert_uint_eq(watch_n_entries(watch), 1);
        watch_look(watch, 8);
        ck_assert_uint_eq(watch_n_entries(watch), 0);
        ck_assert_uint_eq(n_refilled, 0);
        end();
}

TEST(memory_with_an_open_fd)
{
        int fd;

        begin(8);
        destroy_one(&fd);
        watch_look(watch, 8);
        ck_assert_uint_eq(watch_n_entries(watch), 1);
        ck_assert_uint_eq(owner.n_bytes, 0);
        ck_assert_int_eq(pwrite(fd, "x", 1, 4096), 1);
        watch_look(watch, 8);
        ck_assert_uint_ge(owner.n_bytes, 4096);
        ck_assert_uint_eq(n_refilled, 1);
        watch_look(watch, 8);
        ck_assert_uint_eq(n_refilled, 2); /* it is there still */
        punch(fd);
        watch_look(watch, 8);
        ck_assert_uint_eq(owner.n_bytes, 0);
        ck_assert_uint_eq(n_refilled, 2);
        ck_assert_uint_eq(n_lessened, 1);
        close(fd);
        watch_look(watch, 8);
        ck_assert_uint_eq(watch_n_entries(watch), 0);
        end();
}

TEST(memory_with_a_mapping)
{
        volatile char *p;
        int fd;

        begin(8);
        destroy_one(&fd);
        p = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        ck_assert_ptr_ne((void *)(uintptr_t)p, MAP_FAILED);
        close(fd);
        p[SIZE - 1] = 1;
        watch_look(watch, 8);
        ck_assert_uint_eq(watch_n_entries(watch), 1);
        ck_assert_uint_ge(owner.n_bytes, 4096);
        munmap((void *)(uintptr_t)p, SIZE);
        watch_look(watch, 8);
        ck_assert_uint_eq(watch_n_entries(watch), 0);
        ck_assert_uint_eq(owner.n_bytes, 0);
        ck_assert_uint_eq(n_lessened, 1);
        end();
}

/* The oldest of the owner goes; where the owner has none, what is new is not watched. */
TEST(bounds)
{
        struct watch_owner other;
        int fds[4];

        begin(3);
        for (size_t i = 0; i < 4; i++) {
                destroy_one(&fds[i]);
                ck_assert_int_eq(pwrite(fds[i], "x", 1, 0), 1);
        }
        ck_assert_uint_eq(watch_n_entries(watch), 3);
        watch_look(watch, 2);
        ck_assert_uint_eq(n_refilled, 2);
        watch_look(watch, 1);
        ck_assert_uint_eq(n_refilled, 3);
        punch(fds[0]); /* the one that is not watched */
        watch_look(watch, 3);
        ck_assert_uint_eq(n_refilled, 6);
        watch_owner_init(&other, NULL);
        watch_add(watch, &other, fcntl(fds[0], F_DUPFD_CLOEXEC, 3), SIZE);
        ck_assert_uint_eq(other.n_entries, 0);
        watch_leave(watch, &other);
        watch_add(NULL, &other, fcntl(fds[0], F_DUPFD_CLOEXEC, 3), SIZE);
        for (size_t i = 0; i < 4; i++)
                close(fds[i]);
        end();
}

/* ---- an arena's --------------------------------------------------------------- */

struct on_host {
        struct worker *worker;
        struct ledger *ledger;
        struct account pool;
        struct account account;
        struct arena *arena;
        uint32_t quota;
};

static void on_released(void *userdata, uint64_t n_bytes)
{
        *(uint64_t *)userdata += n_bytes;
}

static void open_arena(struct on_host *h, uint64_t limit_bytes)
{
        struct ledger_limits limits = {
                .n_quotas = 2, .n_sessions = 2, .n_extents = 16, .n_exports = 8, .n_blocks = 2
        };
        struct ledger_quota facts = { .tenant = "t", .partition = "p", .extent_bytes = SIZE };
        struct arena_options o = {
                .device = device,
                .watch = watch,
                .share = DEVICE_SHARE_FD,
                .limit_bytes = limit_bytes,
                .sizes.extent_bytes = SIZE,
        };

        ck_assert_int_eq(worker_new_inline(&h->worker), 0);
        ck_assert_int_eq(ledger_new(&limits, &h->ledger), 0);
        ck_assert_int_eq(ledger_quota_add(h->ledger, &facts, &h->quota), 0);
        account_init_root(&h->pool, limit_bytes);
        ck_assert_int_eq(account_init(&h->account, &h->pool, limit_bytes, 0), 0);
        o.worker = h->worker;
        o.ledger = h->ledger;
        o.quota = h->quota;
        ck_assert_int_eq(arena_new(&o, &h->arena), 0);
}

static void close_arena(struct on_host *h)
{
        arena_free(h->arena);
        ck_assert_uint_eq(h->account.charged_bytes, 0);
        account_deinit(&h->account);
        ledger_quota_clear(h->ledger, h->quota);
        ledger_free(h->ledger);
        worker_free(h->worker);
}

/* Makes the first extent and has it destroyed again; an fd of it as a client has it. */
static int release_one(struct on_host *h)
{
        uint64_t missing, n_released = 0;
        struct charge charge;
        int fd;

        ck_assert_int_eq(charge_take(&h->account, SIZE, &charge, &missing), 0);
        ck_assert_int_eq(arena_back(h->arena, SIZE, &charge), 0);
        fd = device_lend(device, arena_slot_memory(h->arena, 0), false);
        ck_assert_uint_eq(arena_release(h->arena, SIZE, NULL, on_released, &n_released), SIZE);
        ck_assert_uint_eq(worker_poll(h->worker), 1);
        ck_assert_uint_eq(n_released, SIZE);
        ck_assert_uint_eq(h->account.charged_bytes, 0);
        return fd;
}

/* What is there is charged while it is there, and punched by the worker. */
TEST(arena_charges_refills)
{
        static const uint8_t bytes[MIB] = { 1 };
        uint64_t missing, n_found;
        struct charge rest;
        struct on_host h;
        int fd;

        begin(8);
        open_arena(&h, 2 * SIZE);
        fd = release_one(&h);
        ck_assert_uint_eq(watch_n_entries(watch), 1);
        watch_look(watch, 8);
        ck_assert_uint_eq(h.account.charged_bytes, 0);
        ck_assert_int_eq(pwrite(fd, bytes, sizeof(bytes), 0), sizeof(bytes));
        watch_look(watch, 8);
        n_found = arena_refilled_bytes(h.arena);
        ck_assert_uint_ge(n_found, MIB);
        ck_assert_uint_eq(arena_n_refills(h.arena), 1);
        ck_assert_uint_eq(h.account.charged_bytes, n_found);
        ck_assert_uint_eq(arena_extentless_bytes(h.arena), n_found);
        ck_assert(!arena_is_quiet(h.arena));

        ck_assert_uint_eq(worker_poll(h.worker), 1);
        watch_look(watch, 8);
        ck_assert_uint_eq(arena_extentless_bytes(h.arena), 0);
        ck_assert_uint_eq(h.account.charged_bytes, 0);
        ck_assert(arena_is_quiet(h.arena));

        /* Where the account has no room it is shown all the same. */
        ck_assert_int_eq(charge_take(&h.account, 2 * SIZE - 4096, &rest, &missing), 0);
        ck_assert_int_eq(pwrite(fd, bytes, sizeof(bytes), 0), sizeof(bytes));
        watch_look(watch, 8);
        ck_assert_uint_eq(h.account.charged_bytes, 2 * SIZE);
        ck_assert_uint_ge(arena_extentless_bytes(h.arena), MIB);
        ck_assert_uint_eq(worker_poll(h.worker), 1);
        charge_drop(&rest);
        close(fd);
        close_arena(&h);
        end();
}

/* The watch may look again before the worker has punched what it found. */
TEST(refills_are_charged_once)
{
        static const uint8_t bytes[MIB] = { 1 };
        struct on_host h;
        uint64_t n_found;
        int fd;

        begin(8);
        open_arena(&h, 8 * SIZE);
        fd = release_one(&h);
        ck_assert_int_eq(pwrite(fd, bytes, sizeof(bytes), 0), sizeof(bytes));
        watch_look(watch, 8);
        n_found = arena_refilled_bytes(h.arena);
        ck_assert_uint_eq(h.account.charged_bytes, n_found);
        watch_look(watch, 8);
        ck_assert_uint_eq(arena_refilled_bytes(h.arena), n_found);
        ck_assert_uint_eq(h.account.charged_bytes, n_found);
        ck_assert_int_eq(pwrite(fd, bytes, sizeof(bytes), MIB), sizeof(bytes)); /* more of it */
        watch_look(watch, 8);
        ck_assert_uint_eq(arena_refilled_bytes(h.arena), SIZE);
        ck_assert_uint_eq(h.account.charged_bytes, SIZE);

        worker_drain(h.worker);
        watch_look(watch, 8);
        ck_assert_uint_eq(h.account.charged_bytes, 0);
        close(fd);
        close_arena(&h);
        end();
}
