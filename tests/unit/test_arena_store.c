/* Arenas whose extents a keeper has: the order in which they are stored, recorded and released; a process that is
 * killed at each step of that; a store that fails.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/ledger/store.h"
#include "daemon/memory/arena.h"
#include "daemon/memory/upcalls.h"
#include "tests/fake_device.h"
#include "tests/keeper_caller.h"
#include "tests/suite.h"
#include "tests/checks.h"

#define E (2 * MIB)

enum { MUCH_MS = 300000 };

static char folder[32], admin[64], path[64]; /* path: the keepers' folder */
static struct keepers *keepers;
static struct store *s;
static struct fake_device device;
static struct device_ops ops; /* the fake's, with steps before and after */
static const struct device_ops *fake;
static struct worker *worker;
static struct ledger *ledger;
static struct account pool;
static struct account account;
static struct arena *a;
static uint32_t quota, session;

/* ---- steps ------------------------------------------------------------------------ */

/* What happens around the device's calls and the store's. */
static unsigned n_steps, killed_at; /* 0: never */
static char story[4096];
static unsigned put_failing; /* this call fails, counted from 1; 0: none */

static void step(const char *what)
{
        if (strlen(story) + strlen(what) + 2 < sizeof(story)) {
                strcat(story, what);
                strcat(story, " ");
        }
        if (++n_steps == killed_at)
                kill(getpid(), SIGKILL);
}

int __real_store_put_extent(struct store *s, uint64_t key, int fd);
int __real_store_remove_extent(struct store *s, uint64_t key);
int __wrap_store_put_extent(struct store *store, uint64_t key, int fd);
int __wrap_store_remove_extent(struct store *store, uint64_t key);

int __wrap_store_put_extent(struct store *store, uint64_t key, int fd)
{
        bool fails = put_failing > 0 && --put_failing == 0;
        int r = fails ? -EMFILE : __real_store_put_extent(store, key, fd);

        step(r == 0 ? "put" : "put-failed");
        return r;
}

int __wrap_store_remove_extent(struct store *store, uint64_t key)
{
        int r = __real_store_remove_extent(store, key);

        step("remove");
        return r;
}

static int make(struct device *d, const struct device_supply *supply, enum device_share share,
                struct device_extent *extents, size_t n)
{
        int r = fake->make(d, supply, share, extents, n);

        step("make");
        return r;
}

static int destroy(struct device *d, struct device_extent *e)
{
        int r = fake->destroy(d, e);

        step("destroy");
        return r;
}

/* ---- a process ------------------------------------------------------------------------ */

static void on_retire(struct broker *b, const uint32_t *extents, size_t n_extents)
{
        (void)b;
        for (size_t i = 0; i < n_extents; i++) { /* what the session does later */
                (void)extents;
                step("retire");
        }
}

static bool on_unmaps_soon(const struct broker *b, uint32_t extent)
{
        (void)b;
        (void)extent;
        return true;
}

static const struct upcalls upcalls = { .retire = on_retire, .unmaps_soon = on_unmaps_soon };

static struct arena_options options(enum device_share share)
{
        static struct partition partition;

        partition = (struct partition){
                .ledger = ledger,
                .device = &device.device,
                .worker = worker,
                .store = share == DEVICE_SHARE_FD ? s : NULL,
                .share = share,
                .up.calls = &upcalls,
        };
        return (struct arena_options){
                .partition = &partition,
                .quota = quota,
                .limit_bytes = 20 * E,
                .sizes.extent_bytes = E,
        };
}

static void open_device(void)
{
        fake_device_init(&device, MIB);
        fake = device.device.ops;
        ops = *fake;
        ops.make = make;
        ops.destroy = destroy;
        device.device.ops = &ops;
        worker_new_inline(&worker);
        account_init_root(&pool, 20 * E);
        account_init(&account, &pool, 20 * E, 0);
}

static int open_store(void)
{
        char sentence[256] = "";
        int r = store_new(keepers, &s, sentence, sizeof(sentence));

        if (r < 0)
                fprintf(stderr, "# %s\n", sentence);
        return r;
}

/* The first process. */
static int open_all(enum device_share share)
{
        const struct ledger_limits limits = { 2, 2, 64, 64, 2, 0, 0, 0, 0 };
        struct ledger_quota facts = { .tenant = "t", .partition = "p", .extent_bytes = E };
        struct arena_options o;

        open_device();
        if (open_store() < 0 || ledger_new(&limits, &ledger) < 0 ||
            ledger_quota_add(ledger, &facts, &quota) < 0 ||
            ledger_session_add(ledger, &(struct ledger_session){ .tenant = "t" }, &session) < 0)
                return -1;
        o = options(share);
        return store_put_ledger(s, ledger_fd(ledger)) < 0 ? -1 : arena_new(&o, &a);
}

static void close_all(void)
{
        a = arena_free(a);
        account_deinit(&account);
        ledger = ledger_free(ledger);
        worker = worker_free(worker);
        s = store_free(s);
}

static void setup(void)
{
        char sentence[256] = "";

        strcpy(folder, "/tmp/arena-store-XXXXXX");
        ck_assert_ptr_nonnull(mkdtemp(folder));
        snprintf(admin, sizeof(admin), "%s/admin.sock", folder);
        snprintf(path, sizeof(path), "%s/keepers", folder);
        ck_assert_msg(keepers_open(admin, &keepers, sentence, sizeof(sentence)) == 0, "%s", sentence);
}

static void teardown(void)
{
        close_all();
        ck_assert_int_ge(keepers_end(keepers, MUCH_MS, NULL, NULL), 0);
        keepers = keepers_close(keepers);
        ck_assert_int_eq(rmdir(path), 0);
        ck_assert_int_eq(rmdir(folder), 0);
        ck_assert_uint_eq(device.n_live, 0);
}

FIXTURE(arena_store, setup, teardown);

static void check(void)
{
        const char *why = "";

        ck_assert_msg(arena_check(a, &why) == 0, "arena_check: %s", why);
        ck_assert_msg(ledger_check(ledger, &why) == 0, "ledger_check: %s", why);
        ck_assert_uint_eq(account.charged_bytes, device.live_bytes + arena_unreclaimed_bytes(a));
}

/* ---- what it does ----------------------------------------------------------------------- */

struct grown {
        int result;
        bfc_handle handle;
};

static void on_grown(void *userdata, int result, bfc_handle handle, uint64_t offset)
{
        (void)offset;
        *(struct grown *)userdata = (struct grown){ result, handle };
        step("grown");
}

static void on_released(void *userdata, uint64_t n_bytes)
{
        (void)userdata;
        (void)n_bytes;
        step("released");
}

static struct grown grow(uint64_t n_bytes)
{
        struct grown g = { 1, 0 };
        struct bfc_growth plan;
        struct charge charge;
        uint64_t missing;

        if (arena_plan(a, n_bytes, account_room(&account), &plan) != 0 ||
            charge_take(&account, plan.new_bytes, &charge, &missing) != 0 ||
            arena_grow(a, &plan, &charge, on_grown, &g) != 0)
                abort();
        step("asked");
        worker_poll(worker);
        return g;
}

static void clear_exports(void)
{
        while (ledger_session_at(ledger, session)->links.first_export != LEDGER_NONE)
                ledger_export_clear(ledger, ledger_session_at(ledger, session)->links.first_export);
}

/* Two growths of three extents, given to a session, and all of it back. */
static void live(void)
{
        bfc_handle handles[2];
        uint32_t export;

        for (int i = 0; i < 2; i++) {
                handles[i] = grow(3 * E).handle;
                (void)ledger_export_add(ledger, session, (uint32_t)i * 3, &export);
                step("exported");
        }
        for (int i = 0; i < 2; i++)
                arena_dealloc(a, handles[i]);
        clear_exports();
        arena_release(a, 6 * E, NULL, on_released, NULL);
        step("given back");
        worker_poll(worker);
}

static bool is_kept_as(uint64_t key, int fd)
{
        int taken = store_take_extent(s, key);
        struct stat p, q;
        bool is_same = taken >= 0 && fstat(taken, &p) == 0 && fstat(fd, &q) == 0 && p.st_ino == q.st_ino &&
                       p.st_dev == q.st_dev;

        if (taken >= 0)
                close(taken);
        return is_same;
}

/* ---- in order --------------------------------------------------------------------------- */

TEST(new_extents_are_stored)
{
        struct grown g;

        ck_assert_int_eq(open_all(DEVICE_SHARE_FD), 0);
        g = grow(3 * E);
        ck_assert_int_eq(g.result, 0);
        check();
        ck_assert_str_eq(story, "asked make put make put make put grown ");
        ck_assert_uint_eq(keeper_count_in(folder), 4);
        for (uint32_t i = 0; i < 3; i++) {
                const struct ledger_extent *e = ledger_extent_get(ledger, i);

                ck_assert_ptr_nonnull(e);
                ck_assert(is_kept_as(e->store_key, e->fd));
                ck_assert_uint_eq(e->is_leaving, 0);
        }
        ck_assert_int_eq(arena_dealloc(a, g.handle), 0);
}

/* The memory is destroyed before the fd goes: a successor has what is not destroyed. */
TEST(destroyed_extents_are_removed_from_the_store)
{
        struct grown g;

        ck_assert_int_eq(open_all(DEVICE_SHARE_FD), 0);
        g = grow(2 * E);
        ck_assert_int_eq(arena_dealloc(a, g.handle), 0);
        story[0] = '\0';
        ck_assert_uint_eq(arena_release(a, 2 * E, NULL, on_released, NULL), 2 * E);
        for (uint32_t i = 0; i < 2; i++) {
                const struct ledger_extent *e = ledger_extent_get(ledger, i);

                ck_assert_uint_eq(e->is_leaving, 1);
                ck_assert(is_kept_as(e->store_key, e->fd));
        }
        worker_poll(worker);
        ck_assert_str_eq(story, "destroy remove destroy remove released ");
        for (uint32_t i = 0; i < 2; i++)
                ck_assert_ptr_null(ledger_extent_get(ledger, i));
        ck_assert_uint_eq(keeper_count_in(folder), 1);
        check();
}

/* Sessions must unmap it first, and a successor would still have it. */
TEST(retired_extents_are_not_leaving)
{
        uint32_t export;
        struct grown g;

        ck_assert_int_eq(open_all(DEVICE_SHARE_FD), 0);
        g = grow(E);
        ck_assert_int_eq(ledger_export_add(ledger, session, 0, &export), 0);
        ck_assert_int_eq(arena_dealloc(a, g.handle), 0);
        ck_assert_uint_eq(arena_release(a, E, NULL, on_released, NULL), E);
        worker_poll(worker);
        ck_assert_uint_eq(ledger_extent_get(ledger, 0)->is_leaving, 0);
        ck_assert_uint_eq(keeper_count_in(folder), 2);
        ledger_export_clear(ledger, export);
        arena_note_export_gone(a, 0, false);
        ck_assert_uint_eq(ledger_extent_get(ledger, 0)->is_leaving, 1);
        worker_poll(worker);
        ck_assert_ptr_null(ledger_extent_get(ledger, 0));
        ck_assert_uint_eq(keeper_count_in(folder), 1);
        check();
}

TEST(extents_without_fds_are_not_stored)
{
        struct grown g;

        ck_assert_int_eq(open_all(DEVICE_SHARE_CUDA_IPC), 0);
        g = grow(E);
        ck_assert_int_eq(g.result, 0);
        ck_assert_uint_eq(ledger_extent_get(ledger, 0)->store_key, 0);
        ck_assert_uint_eq(keeper_count_in(folder), 1);
        ck_assert_int_eq(arena_dealloc(a, g.handle), 0);
}

LOOP_TEST(a_successor_gets_what_is_left, 2)
{
        struct charge charge;
        uint64_t missing;

        ck_assert_int_eq(open_all(DEVICE_SHARE_FD), 0);
        ck_assert_int_eq(charge_take(&account, 4 * E, &charge, &missing), 0);
        ck_assert_int_eq(arena_back(a, charge.n_bytes, &charge), 0);
        ck_assert_uint_eq(keeper_count_in(folder), 5);
        check();
        if (_i == 0)
                a = arena_free(a);
        else
                a = arena_leave(a);
        ck_assert_uint_eq(keeper_count_in(folder), _i == 0 ? 1 : 5);
        device.n_live = 0; /* those that are left, and their memory, are a successor's */
}

/* ---- a store that fails ------------------------------------------------------------------- */

static void expect_refused(uint64_t n_bytes, int result)
{
        uint32_t n_before = arena_n_extents(a);

        ck_assert_int_eq(grow(n_bytes).result, result);
        ck_assert_uint_eq(arena_n_extents(a), n_before);
        check();
}

/* All extents or none: those that were put before are removed. */
TEST(an_extent_that_cannot_be_stored_is_not_made)
{
        struct grown g;

        ck_assert_int_eq(open_all(DEVICE_SHARE_FD), 0);
        g = grow(3 * E);
        ck_assert_int_eq(g.result, 0);
        put_failing = 3;
        expect_refused(3 * E, -ECOMM);
        ck_assert_uint_eq(keeper_count_in(folder), 4);
        ck_assert_int_eq(arena_dealloc(a, grow(2 * E).handle), 0);
        ck_assert_uint_eq(keeper_count_in(folder), 6);
        ck_assert_int_eq(arena_dealloc(a, g.handle), 0);
}

/* Nothing grows any more, and what there is can be released. */
TEST(a_keeper_ends)
{
        struct grown g;
        pid_t pid;

        ck_assert_int_eq(open_all(DEVICE_SHARE_FD), 0);
        g = grow(2 * E);
        pid = keeper_pid_in(folder, "host");
        ck_assert_int_eq(kill(pid, SIGKILL), 0);
        ck_assert_int_eq(waitpid(pid, NULL, 0), pid);
        expect_refused(E, -ECOMM);
        expect_refused(E, -ECOMM);
        ck_assert_int_eq(arena_dealloc(a, g.handle), 0);
        ck_assert_uint_eq(arena_release(a, 2 * E, NULL, on_released, NULL), 2 * E);
        worker_poll(worker);
        ck_assert_uint_eq(arena_n_extents(a), 0);
        check();
}

/* The growth fails at the device; or its undoing does. */
LOOP_TEST(a_device_fails, 2)
{
        ck_assert_int_eq(open_all(DEVICE_SHARE_FD), 0);
        if (_i == 0) {
                fake_device_fail_make(&device, 3, -ENOMEM);
                expect_refused(4 * E, -ENOMEM);
        } else {
                put_failing = 3;
                fake_device_fail_destroy(&device, 1, -EBUSY); /* of the third */
                expect_refused(3 * E, -ECOMM);
                ck_assert_uint_eq(arena_unreclaimed_bytes(a), E);
        }
        ck_assert_uint_eq(keeper_count_in(folder), 1);
}

/* ---- killed at each step ------------------------------------------------------------------------- */

#define IS(condition)                                                                                        \
        do {                                                                                                 \
                if (!(condition)) {                                                                          \
                        fprintf(stderr, "# not so: %s\n", #condition);                                       \
                        return false;                                                                        \
                }                                                                                            \
        } while (0)

static bool is_sound(void)
{
        const char *why = "";
        int r = arena_check(a, &why);

        if (r == 0)
                r = ledger_check(ledger, &why);
        if (r < 0)
                fprintf(stderr, "# %s\n", why);
        return r == 0;
}

static uint32_t extents[64];
static int fds[64];

/* Finishes what was leaving, and finds the fds of the rest. */
static bool find_extents(size_t *ret_n)
{
        struct arena_options o = options(DEVICE_SHARE_FD);
        size_t n = 0;

        for (uint32_t i = 0; i < ledger_extent_end(ledger); i++) {
                const struct ledger_extent *e = ledger_extent_get(ledger, i);
                int fd = e ? store_take_extent(s, e->store_key) : -1;

                if (e && e->is_leaving) {
                        IS(arena_finish(o.partition, i, fd) == 0);
                        IS(!ledger_extent_get(ledger, i));
                } else if (e) {
                        IS(fd >= 0);
                        fds[n] = fd;
                        extents[n++] = i;
                }
        }
        *ret_n = n;
        return true;
}

/* In ascending order of offsets, in which the allocator gave them. */
static bool restore_arena(size_t n)
{
        struct arena_inherited inherited = { .extents = extents, .fds = fds, .n_extents = n };
        struct arena_options o = options(DEVICE_SHARE_FD);
        struct charge charge = { NULL, 0 };
        const char *why = "";
        uint64_t missing;

        IS(n == 0 || charge_take(&account, n * E, &charge, &missing) == 0);
        IS(arena_restore(&o, &inherited, &charge, &a, &why) == 0);
        return is_sound();
}

static bool go_on(void)
{
        size_t n;

        open_device();
        IS(open_store() == 0 && !store_is_new(s));
        IS(ledger_open(store_take_ledger(s), NULL, NULL, &ledger) == 0);
        quota = 0;
        IS(find_extents(&n));
        IS(restore_arena(n));
        (void)store_drop_rest(s);
        IS(arena_n_extents(a) == n && device.n_live == n);
        clear_exports();
        IS(arena_release(a, UINT64_MAX, NULL, on_released, NULL) ==
           n * E); /* its blocks were never written down */
        worker_poll(worker);
        IS(arena_n_extents(a) == 0 && device.n_live == 0 && is_sound());
        close_all();
        return true;
}

TEST(a_process_is_killed_at_each_step)
{
        int status = -1;
        unsigned n;

        for (n = 1; n < 200; n++) {
                pid_t pid = fork();

                if (pid == 0) {
                        n_steps = 0; /* of the successors */
                        killed_at = n;
                        if (open_all(DEVICE_SHARE_FD) < 0)
                                _exit(2);
                        live();
                        _exit(0);
                }
                ck_assert_int_eq(waitpid(pid, &status, 0), pid);
                ck_assert(WIFEXITED(status) ? WEXITSTATUS(status) == 0 : WTERMSIG(status) == SIGKILL);
                ck_assert(go_on());
                ck_assert_msg(keeper_count_in(folder) == 1, "killed at %u, %u are left", n,
                              keeper_count_in(folder) - 1);
                if (WIFEXITED(status))
                        break;
        }
        ck_assert_uint_gt(n, 25);
        ck_assert_uint_lt(n, 200);
        fprintf(stderr, "# killed at %u steps\n", n - 1);
}
