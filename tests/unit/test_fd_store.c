/* SPDX-License-Identifier: Apache-2.0 */
/* Arenas whose extents the service manager keeps: in which order things are stored, written
 * down and given back; a process that is killed at each step of it; a manager that fails. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/memory/arena.h"
#include "daemon/memory/upcalls.h"
#include "keeper.h"
#include "tests/fake_device.h"
#include "tests/suite.h"
#include "tests/checks.h"

#define E (2 * MIB)

enum { MAX_KEYS = 31, TIMEOUT_MS = 150, MUCH_MS = 20000 };

static struct keeper *k;
static struct manager *m;
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

/* What happens around the device's calls and the messages to the manager. */
static unsigned n_steps, killed_at; /* 0: never */
static char story[4096];

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
int __real_store_remove_extent(struct store *s, uint64_t key, bool wait);
int __wrap_store_put_extent(struct store *store, uint64_t key, int fd);
int __wrap_store_remove_extent(struct store *store, uint64_t key, bool wait);

int __wrap_store_put_extent(struct store *store, uint64_t key, int fd)
{
        int r = __real_store_put_extent(store, key, fd);

        step(r == 0 ? "put" : "put-failed");
        return r;
}

int __wrap_store_remove_extent(struct store *store, uint64_t key, bool wait)
{
        int r = __real_store_remove_extent(store, key, wait);

        step(wait ? "remove-and-wait" : "remove");
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
        return (struct arena_options){
                .ledger = ledger,
                .device = &device.device,
                .worker = worker,
                .store = s,
                .quota = quota,
                .share = share,
                .limit_bytes = 20 * E,
                .sizes.extent_bytes = E,
                .upcalls = &upcalls,
        };
}

static void open_device(bool empties_mappings)
{
        fake_device_init(&device, MIB);
        fake = device.device.ops;
        ops = *fake;
        ops.make = make;
        ops.destroy = destroy;
        device.device.ops = &ops;
        device.device.empties_mappings = empties_mappings;
        worker_new_inline(&worker);
        account_init_root(&pool, 20 * E);
        account_init(&account, &pool, 20 * E, 0);
}

/* The first process. */
static int open_all(bool empties_mappings, enum device_share share)
{
        const struct ledger_limits limits = { 2, 2, 64, 64, 2, 0, 0, 0, 0 };
        struct ledger_quota facts = { .tenant = "t", .partition = "p", .extent_bytes = E };
        struct arena_options o;

        open_device(empties_mappings);
        if (manager_new(&m) < 0 || store_new(m, &s) < 0 || ledger_new(&limits, &ledger) < 0 ||
            ledger_quota_add(ledger, &facts, &quota) < 0 ||
            ledger_session_add(ledger, &(struct ledger_session){ .tenant = "t" }, &session) < 0)
                return -1;
        store_set_timeout(s, MUCH_MS);
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
        m = manager_free(m);
}

static void setup(void)
{
        n_steps = killed_at = 0;
        story[0] = '\0';
        k = keeper_new("1");
}

static void teardown(void)
{
        close_all();
        k = keeper_free(k);
        ck_assert_uint_eq(device.n_live, 0);
}

FIXTURE(fd_store, setup, teardown);

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

/* "x" and the digit. */
static void name_of(uint64_t key, char ret[3])
{
        ck_assert_uint_lt(key, MAX_KEYS);
        snprintf(ret, 3, "x%c", (char)(key < 10 ? '0' + key : 'a' + key - 10));
}

static bool is_kept(uint64_t key)
{
        char name[3];

        name_of(key, name);
        return keeper_count_of(k, name) == 1;
}

static bool is_same(int x, int y)
{
        struct stat p, q;

        return fstat(x, &p) == 0 && fstat(y, &q) == 0 && p.st_ino == q.st_ino && p.st_dev == q.st_dev;
}

/* ---- in order --------------------------------------------------------------------------- */

TEST(new_extents_are_stored)
{
        struct grown g;

        ck_assert_int_eq(open_all(true, DEVICE_SHARE_FD), 0);
        g = grow(3 * E);
        ck_assert_int_eq(g.result, 0);
        check();
        ck_assert_str_eq(story, "asked make put make put make put grown ");
        ck_assert_uint_eq(keeper_count(k), 4);
        for (uint32_t i = 0; i < 3; i++) {
                const struct ledger_extent *e = ledger_extent_get(ledger, i);
                char name[3];

                ck_assert_ptr_nonnull(e);
                name_of(e->store_key, name);
                ck_assert(is_same(keeper_fd(k, name), e->fd));
                ck_assert_uint_eq(e->is_leaving, 0);
        }
        ck_assert_int_eq(arena_dealloc(a, g.handle), 0);
}

/* A device that empties mappings does it before the fd goes; of another one the fd must be
 * gone before anybody looks for the memory. */
LOOP_TEST(destroyed_extents_are_removed_from_the_store, 2)
{
        struct grown g;

        ck_assert_int_eq(open_all(_i == 0, DEVICE_SHARE_FD), 0);
        g = grow(2 * E);
        ck_assert_int_eq(arena_dealloc(a, g.handle), 0);
        story[0] = '\0';
        ck_assert_uint_eq(arena_release(a, 2 * E, NULL, on_released, NULL), 2 * E);
        for (uint32_t i = 0; i < 2; i++) {
                ck_assert_uint_eq(ledger_extent_get(ledger, i)->is_leaving, 1);
                ck_assert(is_kept(ledger_extent_get(ledger, i)->store_key));
        }
        worker_poll(worker);
        ck_assert_str_eq(story, _i == 0 ? "destroy remove destroy remove released "
                                        : "remove-and-wait destroy remove-and-wait destroy released ");
        for (uint32_t i = 0; i < 2; i++)
                ck_assert_ptr_null(ledger_extent_get(ledger, i));
        ck_assert_uint_eq(keeper_count(k), 1);
        check();
}

/* What sessions must let go of first does not leave yet: a successor would have it still. */
TEST(test_retired_is_not_leaving)
{
        uint32_t export;
        struct grown g;

        ck_assert_int_eq(open_all(false, DEVICE_SHARE_FD), 0);
        g = grow(E);
        ck_assert_int_eq(ledger_export_add(ledger, session, 0, &export), 0);
        ck_assert_int_eq(arena_dealloc(a, g.handle), 0);
        ck_assert_uint_eq(arena_release(a, E, NULL, on_released, NULL), E);
        worker_poll(worker);
        ck_assert_uint_eq(ledger_extent_get(ledger, 0)->is_leaving, 0);
        ck_assert_uint_eq(keeper_count(k), 2);
        ledger_export_clear(ledger, export);
        arena_note_export_gone(a, 0, false);
        ck_assert_uint_eq(ledger_extent_get(ledger, 0)->is_leaving, 1);
        worker_poll(worker);
        ck_assert_ptr_null(ledger_extent_get(ledger, 0));
        ck_assert_uint_eq(keeper_count(k), 1);
        check();
}

TEST(test_handles_are_not_kept)
{
        struct grown g;

        ck_assert_int_eq(open_all(true, DEVICE_SHARE_CUDA_IPC), 0);
        g = grow(E);
        ck_assert_int_eq(g.result, 0);
        ck_assert_uint_eq(ledger_extent_get(ledger, 0)->store_key, 0);
        ck_assert_uint_eq(keeper_count(k), 1);
        ck_assert_int_eq(arena_dealloc(a, g.handle), 0);
}

LOOP_TEST(test_end, 2)
{
        struct charge charge;
        uint64_t missing;

        ck_assert_int_eq(open_all(true, DEVICE_SHARE_FD), 0);
        ck_assert_int_eq(charge_take(&account, 4 * E, &charge, &missing), 0);
        ck_assert_int_eq(arena_back(a, charge.n_bytes, &charge), 0);
        ck_assert_uint_eq(keeper_count(k), 5);
        check();
        if (_i == 0)
                a = arena_free(a);
        else
                a = arena_leave(a);
        ck_assert_uint_eq(keeper_count(k), _i == 0 ? 1 : 5);
        device.n_live = 0; /* those that are left, and their memory, are a successor's */
}

/* ---- a manager that fails ------------------------------------------------------------------- */

static void expect_refused(uint64_t n_bytes, int result)
{
        uint32_t n_before = arena_n_extents(a);

        ck_assert_int_eq(grow(n_bytes).result, result);
        ck_assert_uint_eq(arena_n_extents(a), n_before);
        check();
}

/* All extents or none: those that were put before go again. */
LOOP_TEST(test_full, 2)
{
        struct grown g;

        keeper_free(k);
        k = keeper_new("6"); /* the ledger and five */
        ck_assert_int_eq(open_all(_i == 0, DEVICE_SHARE_FD), 0);
        g = grow(3 * E);
        ck_assert_int_eq(g.result, 0);
        expect_refused(3 * E, -EXFULL);
        ck_assert_uint_eq(keeper_count(k), 4);
        ck_assert_int_eq(arena_dealloc(a, grow(2 * E).handle), 0);
        ck_assert_uint_eq(keeper_count(k), 6);
        ck_assert_int_eq(arena_dealloc(a, g.handle), 0);
}

static void fill_queue(void)
{
        keeper_settle(k);
        keeper_pause(k, true);
        while (manager_tell(m, "STATUS=busy", -1, 20) == 0)
                ;
}

LOOP_TEST(service_manager_rejects_fds, 2)
{
        struct grown g;

        ck_assert_int_eq(open_all(_i == 0, DEVICE_SHARE_FD), 0);
        g = grow(2 * E);
        fill_queue();
        store_set_timeout(s, TIMEOUT_MS);
        expect_refused(E, -ECOMM);
        /* What goes back goes; the store makes up for it. */
        ck_assert_int_eq(arena_dealloc(a, g.handle), 0);
        ck_assert_uint_eq(arena_release(a, 2 * E, NULL, on_released, NULL), 2 * E);
        worker_poll(worker);
        ck_assert_uint_eq(arena_n_extents(a), 0);
        keeper_pause(k, false);
        store_set_timeout(s, MUCH_MS);
        ck_assert_uint_eq(keeper_count(k), 3);
        g = grow(E);
        ck_assert_int_eq(g.result, 0);
        ck_assert_uint_eq(keeper_count(k), 2);
        ck_assert_int_eq(arena_dealloc(a, g.handle), 0);
        check();
}

/* Where the growth fails at the device, too, or only the giving back. */
LOOP_TEST(test_device_fails, 4)
{
        ck_assert_int_eq(open_all(_i % 2 == 0, DEVICE_SHARE_FD), 0);
        if (_i < 2) {
                fake_device_fail_make(&device, 3, -ENOMEM);
                expect_refused(4 * E, -ENOMEM);
        } else {
                keeper_free(k);
                close_all();
                k = keeper_new("3");
                ck_assert_int_eq(open_all(_i % 2 == 0, DEVICE_SHARE_FD), 0);
                fake_device_fail_destroy(&device, 1, -EBUSY); /* of the third, which could not be put */
                expect_refused(3 * E, -EXFULL);
                ck_assert_uint_eq(arena_unreclaimed_bytes(a), E);
        }
        ck_assert_uint_eq(keeper_count(k), 1);
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
                        IS(arena_finish(&o, i, fd) == 0);
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

/* By ascending offset: the allocator gave them so in this life. */
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

static bool go_on(struct manager *manager, void *userdata)
{
        size_t n;

        open_device(*(const bool *)userdata);
        m = manager;
        IS(store_new(m, &s) == 0);
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
        m = NULL;
        close_all();
        return true;
}

LOOP_TEST(test_killed_at_each_step, 2)
{
        const bool empties_mappings = _i == 0;
        int status = -1;
        unsigned n;

        for (n = 1; n < 200; n++) {
                bool empties = empties_mappings;
                pid_t pid;

                keeper_free(k);
                k = keeper_new("1");
                pid = fork();
                if (pid == 0) {
                        killed_at = n;
                        if (open_all(empties, DEVICE_SHARE_FD) < 0)
                                _exit(2);
                        live();
                        _exit(0);
                }
                ck_assert_int_eq(waitpid(pid, &status, 0), pid);
                ck_assert(WIFEXITED(status) ? WEXITSTATUS(status) == 0 : WTERMSIG(status) == SIGKILL);
                keeper_settle(k);
                keeper_succeed(k, go_on, &empties);
                ck_assert_msg(keeper_count(k) == 1 && keeper_count_of(k, "ledger") == 1,
                              "killed at %u, %u are left", n, keeper_count(k) - 1);
                if (WIFEXITED(status))
                        break;
        }
        ck_assert_uint_gt(n, 25);
        ck_assert_uint_lt(n, 200);
        fprintf(stderr, "# killed at %u steps\n", n - 1);
}
