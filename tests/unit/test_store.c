/* SPDX-License-Identifier: Apache-2.0 */
/* The service manager's store against a manager in a thread: what it keeps, what it refuses,
 * and a manager that is slow, unresponsive, gone, or that outlives a process killed in the middle.
 * Names may have 606 bytes here, and the manager 40 ms of a burst. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "daemon/handover/store.h"
#include "keeper.h"
#include "tests/suite.h"

enum { TIMEOUT_MS = 150, MUCH_MS = 300000, N_QUEUE = 2000 };

static struct keeper *k;
static struct manager *m;
static struct store *s;

static void open_store(const char *says)
{
        k = keeper_new(says);
        ck_assert_int_eq(manager_new(&m), 0);
        ck_assert_int_eq(store_new(m, &s), 0);
        store_set_timeout(s, MUCH_MS);
}

static void teardown(void)
{
        s = store_free(s);
        m = manager_free(m);
        k = k ? keeper_free(k) : NULL;
}

FIXTURE(store, NULL, teardown);

static int memfd(void)
{
        int fd = memfd_create("extent", MFD_CLOEXEC);

        ck_assert_int_ge(fd, 0);
        return fd;
}

static bool is_same(int a, int b)
{
        struct stat x, y;

        return fstat(a, &x) == 0 && fstat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

static int64_t now_ms(void)
{
        struct timespec now;

        clock_gettime(CLOCK_MONOTONIC, &now);
        return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* ---- whether it keeps ----------------------------------------------------------- */

static void expect_keeps(const char *fdstore, const char *ours, bool keeps, size_t room)
{
        k = keeper_new(ours);
        if (fdstore)
                setenv("FDSTORE", fdstore, 1);
        ck_assert_int_eq(manager_new(&m), 0);
        ck_assert_int_eq(store_new(m, &s), 0);
        ck_assert_msg(store_keeps(s) == keeps, "FDSTORE=%s BFCD_FDSTORE=%s", fdstore, ours);
        ck_assert_uint_eq(store_room(s), room);
        ck_assert_int_eq(store_next_key(s) != 0, keeps);
        ck_assert_ptr_null(getenv("FDSTORE"));
        ck_assert_ptr_null(getenv("BFCD_FDSTORE"));
        s = store_free(s);
        m = manager_free(m);
        k = keeper_free(k);
}

TEST(store_size_from_the_environment)
{
        expect_keeps(NULL, NULL, false, SIZE_MAX);
        expect_keeps(NULL, "1", true, 16383);
        expect_keeps(NULL, "0", false, SIZE_MAX);
        expect_keeps(NULL, "yes", false, SIZE_MAX);
        expect_keeps(NULL, "10", true, 9);
        expect_keeps("500", NULL, true, 499);
        expect_keeps("500", "1", true, 499);
        expect_keeps("500", "10", true, 9);
        expect_keeps("500", "0", false, SIZE_MAX);
        expect_keeps("0", "1", false, SIZE_MAX);
        expect_keeps("1", NULL, false, SIZE_MAX); /* the ledger alone is worth nothing */
        expect_keeps("-5", NULL, false, SIZE_MAX);
}

/* Neither a store that there is none of, nor one whose manager there is none of. */
TEST(test_without_a_manager)
{
        int fd = memfd();

        unsetenv("NOTIFY_SOCKET");
        setenv("BFCD_FDSTORE", "1", 1);
        ck_assert_int_eq(manager_new(&m), 0);
        ck_assert_int_eq(store_new(m, &s), 0);
        for (int i = 0; i < 2; i++) {
                struct store *none = i == 0 ? s : NULL;

                ck_assert(!store_keeps(none));
                ck_assert_uint_eq(store_next_key(none), 0);
                ck_assert_int_eq(store_put_ledger(none, fd), 0);
                ck_assert_int_eq(store_put_extent(none, 0, fd), 0);
                ck_assert_int_eq(store_put_extent(none, 1, fd), 0);
                ck_assert_int_eq(store_remove_extent(none, 0, true), 0);
                ck_assert_int_eq(store_remove_ledger(none), 0);
                ck_assert_int_eq(store_take_ledger(none), -1);
                ck_assert_int_eq(store_take_extent(none, 1), -1);
                ck_assert_uint_eq(store_drop_rest(none), 0);
        }
        ck_assert_int_eq(manager_tell(m, "READY=1", -1, 10), 0);
        ck_assert_int_eq(manager_barrier(m, 10), 0);
        close(fd);
}

/* ---- putting and removing ---------------------------------------------------------- */

TEST(test_puts_and_removes)
{
        int ledger = memfd(), one = memfd(), two = memfd();
        uint64_t first, second;

        open_store("1");
        first = store_next_key(s);
        second = store_next_key(s);
        ck_assert_uint_eq(first, 1);
        ck_assert_uint_eq(second, 2);
        ck_assert_int_eq(store_put_ledger(s, ledger), 0);
        ck_assert_int_eq(store_put_extent(s, first, one), 0);
        ck_assert_int_eq(store_put_extent(s, 32 * 31 + 10, two), 0);
        ck_assert_uint_eq(keeper_count(k), 3);
        ck_assert(is_same(keeper_fd(k, "ledger"), ledger));
        ck_assert(is_same(keeper_fd(k, "x1"), one));
        ck_assert(is_same(keeper_fd(k, "xva"), two));
        ck_assert_int_eq(store_remove_extent(s, first, false), 0);
        ck_assert_uint_eq(keeper_count_of(k, "x1"), 0);
        ck_assert_int_eq(store_remove_ledger(s), 0);
        ck_assert_int_eq(store_remove_extent(s, 32 * 31 + 10, true), 0);
        ck_assert_uint_eq(keeper_count(k), 0);
        close(ledger);
        close(one);
        close(two);
}

TEST(test_full)
{
        int fd = memfd();

        open_store("3"); /* the ledger and two more */
        ck_assert_int_eq(store_put_extent(s, 1, fd), 0);
        ck_assert_int_eq(store_put_extent(s, 2, fd), 0);
        ck_assert_uint_eq(store_room(s), 0);
        ck_assert_int_eq(store_put_extent(s, 3, fd), -EXFULL);
        ck_assert_int_eq(store_put_ledger(s, fd), 0);
        ck_assert_uint_eq(keeper_count(k), 3);
        ck_assert_uint_eq(keeper_count_of(k, "x3"), 0);
        ck_assert_int_eq(store_remove_extent(s, 1, false), 0);
        ck_assert_int_eq(store_put_extent(s, 3, fd), 0);
        ck_assert_uint_eq(keeper_count_of(k, "x3"), 1);
        close(fd);
}

/* All names together travel in one string. */
TEST(test_names_are_bounded)
{
        const uint64_t long_key = UINT64_MAX - 100; /* 14 letters, and what parts it from the next */
        int fd = memfd();
        unsigned n = 0;

        open_store("1");
        while (store_put_extent(s, long_key + n, fd) == 0)
                n++;
        ck_assert_uint_eq(n, 606 / 15);
        ck_assert_int_eq(store_put_extent(s, long_key + n, fd), -EXFULL);
        ck_assert_int_eq(store_put_extent(s, 32, fd), 0); /* "x10:" fits */
        ck_assert_int_eq(store_put_extent(s, 33, fd), -EXFULL);
        ck_assert_int_eq(store_remove_extent(s, long_key, false), 0);
        ck_assert_int_eq(store_put_extent(s, 33, fd), 0);
        ck_assert_uint_eq(keeper_count(k), n + 1);
        close(fd);
}

/* The fd is closed when the waiting thread continues. */
TEST(test_barrier)
{
        struct pollfd end = { .events = POLLIN };
        int pipes[2];

        open_store("1");
        for (int i = 0; i < 50; i++) {
                ck_assert_int_eq(pipe2(pipes, O_CLOEXEC), 0);
                ck_assert_int_eq(store_put_extent(s, 1, pipes[1]), 0);
                close(pipes[1]);
                ck_assert_int_eq(store_remove_extent(s, 1, true), 0);
                end.fd = pipes[0];
                ck_assert_int_eq(poll(&end, 1, 0), 1);
                ck_assert(end.revents & POLLHUP);
                close(pipes[0]);
        }
}

TEST(test_no_answer_to_a_barrier)
{
        int fd = memfd();
        int64_t begin;

        open_store("1");
        ck_assert_int_eq(store_put_extent(s, 1, fd), 0);
        keeper_ignore_barriers(k, true);
        store_set_timeout(s, TIMEOUT_MS);
        begin = now_ms();
        ck_assert_int_eq(store_remove_extent(s, 1, true), -ETIMEDOUT);
        ck_assert_int_ge(now_ms() - begin, TIMEOUT_MS - 1);
        ck_assert_uint_eq(keeper_count(k), 0); /* it did what it was told */
        keeper_ignore_barriers(k, false);
        store_set_timeout(s, MUCH_MS);
        ck_assert_int_eq(store_put_extent(s, 2, fd), 0);
        ck_assert_int_eq(store_remove_extent(s, 2, true), 0);
        close(fd);
}

/* ---- a manager that takes nothing --------------------------------------------------- */

/* Until its queue is full; how many it took. */
static unsigned fill_queue(void)
{
        const struct manager_stats stats[2] = { { .n_sessions = 1 }, { .n_sessions = 2 } };
        unsigned n = 0;

        keeper_pause(k, true);
        while (n < N_QUEUE && manager_tell(m, "STATUS=busy", -1, 20) == 0)
                n++;
        ck_assert_uint_lt(n, N_QUEUE);
        for (int i = 0; i < 100; i++) /* the loop does not wait for it: nothing would end that */
                manager_beat(m, &stats[i % 2]);
        return n;
}

TEST(test_full_queue)
{
        int fd = memfd();

        open_store("1");
        ck_assert_int_eq(store_put_extent(s, 1, fd), 0);
        keeper_settle(k);
        fill_queue();
        store_set_timeout(s, TIMEOUT_MS);
        ck_assert_int_eq(store_put_extent(s, 2, fd), -ETIMEDOUT);
        ck_assert_int_eq(store_put_extent(s, 2, fd), -ETIMEDOUT);
        ck_assert_uint_eq(store_room(s), 16382); /* it does not count */
        keeper_pause(k, false);
        store_set_timeout(s, MUCH_MS);
        keeper_settle(k);
        ck_assert_uint_eq(keeper_count(k), 1);
        ck_assert_int_eq(store_put_extent(s, 3, fd), 0);
        ck_assert_uint_eq(keeper_count(k), 2);
        close(fd);
}

static void *resume_soon(void *userdata)
{
        (void)userdata;
        usleep(TIMEOUT_MS * 1000 / 3); /* it is to come while the other waits */
        keeper_pause(k, false);
        return NULL;
}

TEST(waiting_put_continues)
{
        pthread_t thread;
        int fd = memfd();

        open_store("1");
        fill_queue();
        ck_assert_int_eq(pthread_create(&thread, NULL, resume_soon, NULL), 0);
        ck_assert_int_eq(store_put_extent(s, 1, fd), 0);
        pthread_join(thread, NULL);
        ck_assert_uint_eq(keeper_count_of(k, "x1"), 1);
        close(fd);
}

/* What could not be removed is made up for, and counts as kept until then. */
TEST(pending_removals)
{
        int fd = memfd();

        open_store("10");
        for (uint64_t key = 1; key <= 6; key++)
                ck_assert_int_eq(store_put_extent(s, key, fd), 0);
        keeper_settle(k);
        fill_queue();
        store_set_timeout(s, TIMEOUT_MS);
        for (uint64_t key = 1; key <= 5; key++)
                ck_assert_int_eq(store_remove_extent(s, key, key % 2), -ETIMEDOUT);
        ck_assert_uint_eq(store_room(s), 3);
        keeper_pause(k, false);
        store_set_timeout(s, MUCH_MS);
        keeper_settle(k);
        ck_assert_uint_eq(keeper_count(k), 6);
        ck_assert_int_eq(store_remove_extent(s, 6, false), 0);
        ck_assert_uint_eq(keeper_count(k), 0);
        ck_assert_uint_eq(store_room(s), 9);
        close(fd);
}

TEST(test_manager_is_gone)
{
        int fd = memfd();

        open_store("1");
        ck_assert_int_eq(store_put_extent(s, 1, fd), 0);
        keeper_settle(k);
        keeper_go(k);
        ck_assert_int_lt(store_put_extent(s, 2, fd), 0);
        ck_assert_int_lt(store_remove_extent(s, 1, true), 0);
        ck_assert_uint_eq(store_room(s), 16382);
        ck_assert_int_lt(store_put_ledger(s, fd), 0);
        ck_assert(!store_keeps(s)); /* extents without a ledger are dropped */
        ck_assert_uint_eq(store_next_key(s), 0);
        close(fd);
}

/* Whatever is told costs the manager no more than its share, once the burst is over. */
TEST(messages_are_paced)
{
        int64_t begin, ms;
        int fd = memfd();

        open_store("1");
        begin = now_ms();
        for (int i = 0; i < 200; i++) { /* of 62 us each, as reckoned: within the burst */
                ck_assert_int_eq(store_put_extent(s, 1, fd), 0);
                ck_assert_int_eq(store_remove_extent(s, 1, false), 0);
        }
        for (int i = 0; i < 3000; i++) { /* 186 ms */
                ck_assert_int_eq(store_put_extent(s, 1, fd), 0);
                ck_assert_int_eq(store_remove_extent(s, 1, false), 0);
        }
        ms = now_ms() - begin;
        ck_assert_msg(ms > (3200 * 62 / 1000 - 40) * 5 - 100, "%d", (int)ms);
        close(fd);
}

/* ---- many threads --------------------------------------------------------------------- */

/* Against a plain list, with keys whose places are near each other. */
TEST(test_keys)
{
        static const char DIGITS[] = "0123456789abcdefghijklmnopqrstuv";
        bool is_there[128] = { false };
        unsigned n = 0, state = 7;
        int fd = memfd();

        open_store("1");
        for (int i = 0; i < 1500; i++) {
                uint64_t key;
                unsigned which;

                state = state * 1103515245 + 12345;
                which = state >> 16 & 127;
                key = 1 + (which % 8) * 64 + which / 8;
                if (!is_there[which])
                        ck_assert_int_eq(store_put_extent(s, key, fd), 0);
                else if (state >> 24 & 1)
                        ck_assert_int_eq(store_remove_extent(s, key, false), 0);
                else
                        continue;
                is_there[which] = !is_there[which];
                n += is_there[which] ? 1 : (unsigned)-1;
                ck_assert_uint_eq(store_room(s), 16383 - n);
        }
        ck_assert_uint_gt(n, 50);
        ck_assert_uint_eq(keeper_count(k), n);
        for (unsigned which = 0; which < 128; which++) {
                uint64_t key = 1 + (which % 8) * 64 + which / 8;
                char name[4] = { 'x', DIGITS[key / 32], DIGITS[key % 32] };

                if (key < 32)
                        memcpy(name, (char[]){ 'x', DIGITS[key], '\0' }, 3);
                ck_assert_msg(keeper_count_of(k, name) == is_there[which], "%s", name);
                ck_assert_int_eq(store_remove_extent(s, key, false), 0);
        }
        ck_assert_uint_eq(keeper_count(k), 0);
        n = keeper_n_messages(k);
        ck_assert_int_eq(store_remove_extent(s, 1, true), 0); /* which is not there any more */
        ck_assert_int_eq(store_remove_extent(s, 99999, false), 0);
        ck_assert_uint_eq(keeper_n_messages(k), n);
        close(fd);
}

static void *put_and_remove(void *userdata)
{
        const uint64_t first = *(const uint64_t *)userdata;
        int fd = memfd();

        for (uint64_t i = 0; i < 40; i++) {
                if (store_put_extent(s, first + i, fd) != 0 ||
                    (i > 0 && store_remove_extent(s, first + i - 1, i % 8 == 0) != 0))
                        return userdata;
        }
        close(fd);
        return NULL;
}

TEST(test_threads)
{
        uint64_t first[4];
        pthread_t threads[4];
        void *failed;

        open_store("1");
        for (int i = 0; i < 4; i++) {
                first[i] = (uint64_t)i * 40 + 1;
                ck_assert_int_eq(pthread_create(&threads[i], NULL, put_and_remove, &first[i]), 0);
        }
        for (int i = 0; i < 4; i++) {
                pthread_join(threads[i], &failed);
                ck_assert_ptr_null(failed);
        }
        ck_assert_uint_eq(keeper_count(k), 4); /* the last one of each */
        ck_assert_uint_eq(store_room(s), 16383 - 4);
}

/* ---- a successor ------------------------------------------------------------------------- */

#define IS(condition)                                                                                        \
        do {                                                                                                 \
                if (!(condition)) {                                                                          \
                        fprintf(stderr, "# not so: %s\n", #condition);                                       \
                        return false;                                                                        \
                }                                                                                            \
        } while (0)

static int files[4]; /* a ledger, two extents, and what is no extent */

static unsigned n_told;

static void tell(const char *name)
{
        n_told +=
                strcmp(name, "client") == 0 || strcmp(name, "x0") == 0 || strcmp(name, "xzz") == 0 ? 1 : 100;
}

TEST(test_manager_brings)
{
        char pid[16];

        snprintf(pid, sizeof(pid), "%d", (int)getpid());
        setenv("LISTEN_PID", pid, 1);
        unsetenv("LISTEN_FDNAMES");
        ck_assert(!manager_has_fd("ledger"));
        for (int i = 0; i < 7; i++) {
                static const char *const NAMES[] = { "",       "ledgers",       "aledger:led:x1", ":::",
                                                     "ledger", "client:ledger", "ledger:x1" };

                setenv("LISTEN_FDNAMES", NAMES[i], 1);
                ck_assert_msg(manager_has_fd("ledger") == (i >= 4), "%s", NAMES[i]);
                ck_assert(store_has_ledger() == (i >= 4));
        }
        setenv("LISTEN_FDNAMES", "client:ledger63:x1", 1);
        ck_assert(store_has_ledger());
        setenv("LISTEN_FDNAMES", "client:ledger64:x1", 1);
        ck_assert(!store_has_ledger());
        setenv("LISTEN_PID", "1", 1);
        ck_assert(!manager_has_fd("ledger"));
        unsetenv("LISTEN_PID");
        unsetenv("LISTEN_FDNAMES");
}

static bool takes_over(struct manager *manager, void *userdata)
{
        struct store *store = NULL;
        struct stat st;
        int ledger, extent;

        (void)userdata;
        IS(store_new(manager, &store) == 0 && store_keeps(store));
        ledger = store_take_ledger(store);
        IS(fstat(ledger, &st) == 0 && st.st_size == 111);
        IS(store_take_ledger(store) == -1);
        extent = store_take_extent(store, 5);
        IS(fstat(extent, &st) == 0 && st.st_size == 222);
        IS(store_take_extent(store, 5) == -1);
        IS(store_take_extent(store, 9) == -1); /* there are two */
        IS(store_take_extent(store, 6) == -1);
        IS(store_take_extent(store, 70) == -1);
        IS(store_remove_extent(store, 77, false) == 0); /* which is not there */
        IS(store_next_key(store) == 78);                /* nor any that was asked for */
        IS(store_remove_extent(store, 47, false) == 0); /* x1f, before anybody took it */
        IS(store_drop_rest(store) == 3);                /* x1f, and both of 9 */
        manager_drop_rest(manager, tell);
        IS(n_told == 3);
        IS(store_put_extent(store, 78, extent) == 0);
        close(ledger);
        close(extent);
        store_free(store);
        return true;
}

static void make_files(void)
{
        for (int i = 0; i < 4; i++) {
                files[i] = memfd();
                ck_assert_int_eq(ftruncate(files[i], 111 * (i + 1)), 0);
        }
}

static void close_files(void)
{
        for (int i = 0; i < 4; i++)
                close(files[i]);
}

TEST(test_successor)
{
        static const char *const EXTENTS[] = { "x5", "x1f", "x9", "x9" }, *const OTHERS[] = { "client", "x0",
                                                                                              "xzz" };

        make_files();
        k = keeper_new("1");
        keeper_keep(k, "ledger", files[0]);
        for (int i = 0; i < 4; i++)
                keeper_keep(k, EXTENTS[i], files[i == 0 ? 1 : 2]);
        for (int i = 0; i < 3; i++)
                keeper_keep(k, OTHERS[i], files[3]);
        keeper_succeed(k, takes_over, NULL);
        ck_assert_uint_eq(keeper_count_of(k, "ledger"), 1);
        ck_assert_uint_eq(keeper_count_of(k, "x5"), 1);
        ck_assert_uint_eq(keeper_count_of(k, "x1f"), 0);
        ck_assert_uint_eq(keeper_count_of(k, "x9"), 0);
        ck_assert_uint_eq(keeper_count_of(k, "x2e"), 1); /* 78 */
        ck_assert(is_same(keeper_fd(k, "x2e"), files[1]));
        close_files();
}

static bool wants_nothing(struct manager *manager, void *userdata)
{
        struct store *store = NULL;

        (void)userdata;
        IS(store_new(manager, &store) == 0 && !store_keeps(store));
        IS(store_take_ledger(store) == -1);
        IS(store_take_extent(store, 5) == -1);
        IS(store_put_ledger(store, files[2]) == 0);
        IS(store_drop_rest(store) == 0);
        store_free(store);
        return true;
}

/* BFCD_FDSTORE=0: fds that no daemon will ask for are removed. */
TEST(unwanted_fds_are_removed)
{
        make_files();
        k = keeper_new("0");
        keeper_keep(k, "ledger", files[0]);
        keeper_keep(k, "x5", files[1]);
        keeper_succeed(k, wants_nothing, NULL);
        ck_assert_uint_eq(keeper_count(k), 0);
        close_files();
}

static bool begins_anew(struct manager *manager, void *userdata)
{
        struct store *store = NULL;
        int fd = memfd();

        (void)userdata;
        IS(store_new(manager, &store) == 0 && store_keeps(store));
        IS(store_take_ledger(store) == -1);   /* of two it is not known which one is valid */
        IS(store_put_ledger(store, fd) == 0); /* and the extents of the others are dropped */
        IS(store_room(store) == 16383);
        IS(store_drop_rest(store) == 0);
        close(fd);
        store_free(store);
        return true;
}

TEST(test_two_ledgers)
{
        make_files();
        k = keeper_new(NULL); /* that it keeps is seen */
        keeper_keep(k, "ledger", files[0]);
        keeper_keep(k, "ledger", files[1]);
        keeper_keep(k, "x5", files[1]);
        keeper_keep(k, "x7", files[2]);
        keeper_succeed(k, begins_anew, NULL);
        ck_assert_uint_eq(keeper_count(k), 1);
        ck_assert(!is_same(keeper_fd(k, "ledger"), files[0]));
        close_files();
}

/* In place of another: at each moment there is one, and the next start takes the one that counts. */
static bool swaps(struct manager *manager, void *userdata)
{
        const int *step = userdata;
        struct store *store = NULL;
        struct stat st;
        int ledger, larger = memfd();

        IS(store_new(manager, &store) == 0 && store_keeps(store));
        ledger = store_take_ledger(store);
        IS(fstat(ledger, &st) == 0 && st.st_size == 111 * (*step + 1));
        IS(ftruncate(larger, 111 * (*step + 2)) == 0);
        IS(store_swap_ledger(store, larger) == 0);
        IS(store_drop_rest(store) == 0);
        close(ledger);
        close(larger);
        store_free(store);
        return true;
}

TEST(test_swaps)
{
        struct stat st;
        int step = 0;

        make_files();
        k = keeper_new("1");
        keeper_keep(k, "ledger", files[0]);
        keeper_succeed(k, swaps, &step);
        ck_assert_uint_eq(keeper_count(k), 1);
        ck_assert(fstat(keeper_fd(k, "ledger1"), &st) == 0 && st.st_size == 222);
        step = 1;
        keeper_succeed(k, swaps, &step);
        ck_assert_uint_eq(keeper_count(k), 1);
        ck_assert(fstat(keeper_fd(k, "ledger2"), &st) == 0 && st.st_size == 333);
        close_files();
}

static bool takes_the_higher(struct manager *manager, void *userdata)
{
        struct store *store = NULL;
        struct stat st;
        int ledger;

        (void)userdata;
        IS(store_new(manager, &store) == 0 && store_keeps(store));
        ledger = store_take_ledger(store);
        IS(fstat(ledger, &st) == 0 && st.st_size == 222);
        IS(store_drop_rest(store) == 1);
        close(ledger);
        store_free(store);
        return true;
}

/* A daemon that was killed in between leaves both, in either order. */
LOOP_TEST(test_killed_while_it_swaps, 2)
{
        make_files();
        k = keeper_new("1");
        keeper_keep(k, _i == 0 ? "ledger" : "ledger10", files[_i]);
        keeper_keep(k, _i == 0 ? "ledger10" : "ledger", files[1 - _i]);
        keeper_succeed(k, takes_the_higher, NULL);
        ck_assert_uint_eq(keeper_count(k), 1);
        ck_assert(is_same(keeper_fd(k, "ledger10"), files[1]));
        close_files();
}

/* There is no room for two: the new one is stored after the old one is removed. */
TEST(test_swap_when_full)
{
        int one = memfd(), two = memfd();

        open_store("2");
        ck_assert_int_eq(store_put_ledger(s, one), 0);
        ck_assert_int_eq(store_put_extent(s, store_next_key(s), two), 0);
        ck_assert_uint_eq(store_room(s), 0);
        ck_assert_int_eq(store_swap_ledger(s, two), 0);
        ck_assert(is_same(keeper_fd(k, "ledger1"), two));
        ck_assert_uint_eq(keeper_count_of(k, "ledger"), 0);
        ck_assert_int_eq(store_put_ledger(s, one), 0); /* and one that begins anew */
        ck_assert_uint_eq(keeper_count_of(k, "ledger1"), 0);
        ck_assert(is_same(keeper_fd(k, "ledger"), one));
        close(one);
        close(two);
}

/* What was told counts, also where the process is killed before anybody looks. */
TEST(test_killed)
{
        int fd = memfd(), status;
        pid_t pid;

        open_store("1");
        keeper_settle(k);
        keeper_pause(k, true);
        pid = fork();
        if (pid == 0) {
                if (store_put_extent(s, 7, fd) == 0)
                        kill(getpid(), SIGKILL);
                _exit(1);
        }
        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        ck_assert(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
        keeper_pause(k, false);
        ck_assert(is_same(keeper_fd(k, "x7"), fd));
        close(fd);
}
