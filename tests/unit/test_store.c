/* The store against a real keeper, which outlives it; and the folder of the keepers.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "daemon/ledger/store.h"
#include "keeper/remote.h"
#include "keeper/wire.h"
#include "tests/keeper_caller.h"
#include "tests/suite.h"

enum { MUCH_MS = 300000, N_LOOKS = 10 };

static char folder[32], admin[64], path[64]; /* path: the keepers' folder */
static char sentence[PATH_MAX + 256];
static struct keepers *ks;
static struct store *s;

static void open_store(bool is_new)
{
        ck_assert_msg(store_new(ks, &s, sentence, sizeof(sentence)) == 0, "%s", sentence);
        ck_assert_int_eq(store_is_new(s), is_new);
}

static void open_keepers(void)
{
        ck_assert_msg(keepers_open(admin, &ks, sentence, sizeof(sentence)) == 0, "%s", sentence);
}

/* The process ends, and the next one starts. */
static void change_process(bool is_new)
{
        s = store_free(s);
        ks = keepers_close(ks);
        open_keepers();
        open_store(is_new);
}

static void setup(void)
{
        strcpy(folder, "/tmp/store-XXXXXX");
        ck_assert_ptr_nonnull(mkdtemp(folder));
        snprintf(admin, sizeof(admin), "%s/admin.sock", folder);
        snprintf(path, sizeof(path), "%s/keepers", folder);
        open_keepers();
}

static void teardown(void)
{
        s = store_free(s);
        if (ks)
                ck_assert_int_ge(keepers_end(ks, MUCH_MS, NULL, NULL), 0);
        ks = keepers_close(ks);
        ck_assert_int_eq(rmdir(path), 0);
        ck_assert_int_eq(rmdir(folder), 0);
}

FIXTURE(store, setup, teardown);

static int memfd(void)
{
        int fd = memfd_create("extent", MFD_CLOEXEC);

        ck_assert_int_ge(fd, 0);
        return fd;
}

static void expect_same(int taken, int fd)
{
        struct stat x, y;

        ck_assert_int_ge(taken, 0);
        ck_assert_int_eq(fstat(taken, &x), 0);
        ck_assert_int_eq(fstat(fd, &y), 0);
        ck_assert(x.st_dev == y.st_dev && x.st_ino == y.st_ino);
        close(taken);
}

static uint64_t put_next(int fd)
{
        uint64_t key = store_next_key(s);

        ck_assert_int_eq(store_put_extent(s, key, fd), 0);
        return key;
}

/* ---- what is kept -------------------------------------------------------------- */

TEST(without_a_store_nothing_is_kept)
{
        int fd = memfd();

        ck_assert(!store_keeps(NULL));
        ck_assert_uint_eq(store_next_key(NULL), 0);
        ck_assert_int_eq(store_put_ledger(NULL, fd), 0);
        ck_assert_int_eq(store_put_extent(NULL, 0, fd), 0);
        ck_assert_int_eq(store_put_extent(NULL, 1, fd), 0);
        ck_assert_int_eq(store_remove_extent(NULL, 1), 0);
        ck_assert_int_eq(store_take_ledger(NULL), -ENOENT);
        ck_assert_int_eq(store_take_extent(NULL, 1), -ENOENT);
        ck_assert_uint_eq(store_drop_rest(NULL), 0);
        store_end(NULL);
        close(fd);
}

TEST(puts_and_removes)
{
        int ledger = memfd(), second = memfd(), fd = memfd();
        uint64_t one, two;

        open_store(true);
        ck_assert(store_keeps(s));
        ck_assert_int_eq(store_take_ledger(s), -ENOENT);
        ck_assert_int_eq(store_put_ledger(s, ledger), 0);
        one = put_next(fd);
        two = put_next(fd);
        ck_assert_uint_ne(one, two);
        ck_assert_uint_ne(one, 0);
        ck_assert_uint_eq(keeper_count_in(folder), 3);
        ck_assert_int_eq(store_put_ledger(s, second), 0);
        expect_same(store_take_ledger(s), second);
        ck_assert_uint_eq(keeper_count_in(folder), 3);
        ck_assert_int_lt(store_put_extent(s, two, ledger), 0); /* there is one */
        expect_same(store_take_extent(s, two), fd);
        ck_assert_int_eq(store_remove_extent(s, one), 0);
        ck_assert_int_eq(store_remove_extent(s, one), 0);
        ck_assert_int_eq(store_remove_extent(s, 0), 0);
        ck_assert_int_eq(store_take_extent(s, one), -ENOENT);
        ck_assert_uint_eq(keeper_count_in(folder), 2);
        close(ledger);
        close(second);
        close(fd);
}

TEST(the_next_process_takes_what_is_kept)
{
        int ledger = memfd(), first = memfd(), other = memfd();
        uint64_t keys[3];

        open_store(true);
        ck_assert_int_eq(store_put_ledger(s, ledger), 0);
        keys[0] = put_next(first);
        keys[1] = put_next(other);
        change_process(false);
        expect_same(store_take_ledger(s), ledger);
        expect_same(store_take_extent(s, keys[0]), first);
        expect_same(store_take_extent(s, keys[0]), first); /* as often as it asks */
        ck_assert_int_eq(store_take_extent(s, 77), -ENOENT);
        keys[2] = put_next(other);
        ck_assert_uint_eq(keys[2], 78); /* that key may be in a record */
        ck_assert_uint_eq(store_drop_rest(s), 1);
        ck_assert_uint_eq(store_drop_rest(s), 0);
        ck_assert_int_eq(store_take_extent(s, keys[1]), -ENOENT);
        ck_assert_uint_eq(keeper_count_in(folder), 3);
        change_process(false);
        ck_assert_uint_eq(store_drop_rest(s), 2);
        expect_same(store_take_ledger(s), ledger);
        close(ledger);
        close(first);
        close(other);
}

/* A record of the process before may have it. */
TEST(a_removed_key_is_not_reused)
{
        uint64_t highest = 0;
        int fd = memfd();

        open_store(true);
        for (int i = 0; i < 3; i++)
                highest = put_next(fd);
        ck_assert_int_eq(store_remove_extent(s, highest), 0);
        change_process(false);
        ck_assert_uint_eq(store_next_key(s), highest + 1);
        close(fd);
}

/* ---- a keeper that fails ---------------------------------------------------------- */

/* It is a child of this process. */
static void end_keeper(void)
{
        pid_t pid = keeper_pid_in(folder, "host");

        ck_assert_int_gt(pid, 0);
        ck_assert_int_eq(kill(pid, SIGKILL), 0);
        ck_assert_int_eq(waitpid(pid, NULL, 0), pid);
}

TEST(calls_fail_when_the_keeper_has_ended)
{
        int fd = memfd();

        open_store(true);
        ck_assert_int_eq(store_put_ledger(s, fd), 0);
        end_keeper();
        ck_assert_int_lt(store_put_extent(s, store_next_key(s), fd), 0);
        ck_assert_int_eq(store_put_extent(s, store_next_key(s), fd), -ENOTCONN);
        ck_assert_int_eq(store_put_ledger(s, fd), -ENOTCONN);
        ck_assert_int_eq(store_remove_extent(s, 1), 0); /* no keeper has it */
        ck_assert_int_eq(store_take_ledger(s), -ENOTCONN);
        ck_assert_int_eq(store_take_extent(s, 1), -ENOTCONN);
        ck_assert_uint_eq(store_drop_rest(s), 0);
        change_process(true);
        ck_assert_int_eq(store_take_ledger(s), -ENOENT);
        close(fd);
}

/* ---- a keeper that is replaced ------------------------------------------------------ */

/* Until the keeper is another one. */
static void await_next(pid_t was)
{
        pid_t pid = was;

        while (pid <= 0 || pid == was || store_silent_since_ns(s) != 0) {
                usleep(2000);
                pid = keeper_pid_in(folder, "host");
        }
}

static void kill_keeper(void)
{
        pid_t pid = keeper_pid_in(folder, "host");

        ck_assert_int_gt(pid, 0);
        ck_assert_int_eq(kill(pid, SIGKILL), 0);
}

/* Without a call that would notice it. */
TEST(a_keeper_that_ends_is_replaced)
{
        int ledger = memfd(), fd = memfd(), removed = memfd(), closed = memfd(), other = memfd();
        pid_t pid;
        uint64_t key, gone;

        open_store(true);
        ck_assert_int_eq(store_tend(s), 0);
        ck_assert_int_eq(store_put_ledger(s, ledger), 0);
        key = put_next(fd);
        ck_assert_int_eq(store_remove_extent(s, put_next(removed)), 0);
        gone = put_next(closed);
        ck_assert_int_eq(dup2(other, closed), closed); /* it was closed, and the number is another file's */
        pid = keeper_pid_in(folder, "host");
        kill_keeper();
        await_next(pid);
        ck_assert_uint_eq(keeper_count_in(folder), 2);
        ck_assert_int_eq(store_remove_extent(s, gone), 0);
        change_process(false);
        expect_same(store_take_ledger(s), ledger);
        expect_same(store_take_extent(s, key), fd);
        ck_assert_int_eq(store_take_extent(s, gone), -ENOENT);
        close(ledger);
        close(fd);
        close(removed);
        close(closed);
        close(other);
}

/* What was taken from it is given to the next one, too. */
TEST(calls_go_on_when_the_keeper_has_ended)
{
        int ledger = memfd(), fd = memfd(), second = memfd();
        uint64_t key, next;

        open_store(true);
        ck_assert_int_eq(store_put_ledger(s, ledger), 0);
        key = put_next(fd);
        change_process(false);
        close(ledger);
        close(fd);
        ledger = store_take_ledger(s);
        fd = store_take_extent(s, key);
        ck_assert_int_eq(store_tend(s), 0);
        kill_keeper();
        next = put_next(second);
        ck_assert_uint_eq(keeper_count_in(folder), 3);
        ck_assert_int_eq(store_remove_extent(s, next), 0);
        ck_assert_int_eq(store_put_ledger(s, second), 0);
        change_process(false);
        expect_same(store_take_ledger(s), second);
        expect_same(store_take_extent(s, key), fd);
        ck_assert_int_eq(store_take_extent(s, next), -ENOENT);
        close(ledger);
        close(fd);
        close(second);
}

static uint64_t now_ms(void)
{
        struct timespec now;

        clock_gettime(CLOCK_BOOTTIME, &now);
        return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

TEST(keepers_are_started_at_most_once_a_second)
{
        uint64_t began_ms;
        int fd = memfd();

        open_store(true);
        ck_assert_int_eq(store_tend(s), 0);
        began_ms = now_ms();
        kill_keeper();
        (void)put_next(fd);
        kill_keeper();
        (void)put_next(fd);
        ck_assert_uint_ge(now_ms() - began_ms, 1000);
        close(fd);
}

static void *put_one(void *userdata)
{
        *(int *)userdata = store_put_extent(s, 5, STDIN_FILENO);
        return NULL;
}

/* Whether the call waits already or not. */
TEST(the_end_ends_calls)
{
        pid_t pid;
        pthread_t thread;
        int r = 0;

        open_store(true);
        pid = keeper_pid_in(folder, "host");
        ck_assert_int_eq(kill(pid, SIGSTOP), 0);
        ck_assert_int_eq(pthread_create(&thread, NULL, put_one, &r), 0);
        usleep(2000);
        store_end(s);
        ck_assert_int_eq(pthread_join(thread, NULL), 0);
        ck_assert_int_lt(r, 0);
        ck_assert_int_lt(store_put_extent(s, 6, STDIN_FILENO), 0);
        ck_assert_int_eq(kill(pid, SIGCONT), 0);
}

static int listen_as(const char *in, const char *id)
{
        struct sockaddr_un address = { .sun_family = AF_UNIX };
        int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

        snprintf(address.sun_path, sizeof(address.sun_path), "%s/%s", in, id);
        ck_assert_int_eq(bind(fd, (struct sockaddr *)&address, sizeof(address)), 0);
        ck_assert_int_eq(listen(fd, 4), 0);
        return fd;
}

/* Answers one request by nothing that this bfcd knows; the next connection asks it to end. */
static void *be_another_version(void *userdata)
{
        static struct keeper_request request;
        int listener = *(int *)userdata;
        int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);

        ck_assert_int_eq(recv(fd, &request, sizeof(request), 0), sizeof(request));
        ck_assert_uint_eq(request.op, KEEPER_HELLO);
        ck_assert_int_eq(send(fd, "?", 1, 0), 1);
        ck_assert_int_eq(recv(fd, &request, sizeof(request), 0), sizeof(request));
        ck_assert_uint_eq(request.op, KEEPER_END);
        close(listener); /* as a process's end closes both */
        close(fd);
        return NULL;
}

TEST(a_keeper_of_another_version_is_replaced)
{
        int listener = listen_as(path, "host");
        pthread_t thread;

        ck_assert_int_eq(pthread_create(&thread, NULL, be_another_version, &listener), 0);
        open_store(true);
        ck_assert_int_eq(pthread_join(thread, NULL), 0);
        ck_assert_int_ne(keeper_pid_in(folder, "host"), getpid());
}

/* It has made two extents, and sends an fd of one. */
static void *lack_an_fd(void *userdata)
{
        static struct keeper_request q;
        static struct keeper_reply reply;
        int fd = accept4(*(int *)userdata, NULL, NULL, SOCK_CLOEXEC), one = STDIN_FILENO;

        while (recv(fd, &q, sizeof(q), 0) == sizeof(q) && q.op != KEEPER_END) {
                memset(&reply, 0, sizeof(reply));
                reply.version = KEEPER_VERSION;
                reply.granularity = 2 << 20;
                reply.n_extents = q.op == KEEPER_MAKE ? q.n : 0;
                for (size_t i = 0; i < reply.n_extents; i++)
                        reply.extents[i] =
                                (struct keeper_extent){ .key = q.key + i, .n_bytes = q.n_bytes[i] };
                ck_assert_int_eq(keeper_send(fd, &reply, sizeof(reply), &one, q.op == KEEPER_MAKE), 0);
        }
        close(*(int *)userdata);
        close(fd);
        return NULL;
}

TEST(a_reply_without_its_fds_is_a_lost_device)
{
        const struct device_supply supply = { 0 };
        struct device_extent extents[] = { { .n_bytes = 2 << 20 }, { .n_bytes = 2 << 20 } };
        int listener = listen_as(path, "cuda:7"), n_fds;
        struct device *device;
        pthread_t thread;

        ck_assert_int_eq(pthread_create(&thread, NULL, lack_an_fd, &listener), 0);
        ck_assert_int_eq(keeper_device_new(ks, "cuda:7", &device, sentence, sizeof(sentence)), 0);
        n_fds = suite_count_fds();
        ck_assert_int_eq(device_make_all(device, &supply, DEVICE_SHARE_FD, extents, 2), -ENODEV);
        ck_assert_int_eq(pthread_join(thread, NULL), 0);
        ck_assert_int_eq(suite_count_fds(), n_fds - 2); /* without the listener and its connection */
        device_free(device);
}

/* ---- the folder ------------------------------------------------------------------ */

static void expect_refused(int error, const char *says)
{
        struct keepers *other = NULL;

        ck_assert_int_eq(keepers_open(admin, &other, sentence, sizeof(sentence)), error);
        ck_assert_ptr_null(other);
        ck_assert_msg(strstr(sentence, says), "%s", sentence);
}

TEST(one_process_has_the_keepers)
{
        expect_refused(-EBUSY, "another bfcd runs there");
        ks = keepers_close(ks);
        open_keepers();
}

TEST(a_folder_that_others_could_change_is_refused)
{
        ks = keepers_close(ks);
        ck_assert_int_eq(chmod(path, 0750), 0);
        expect_refused(-EPERM, "with mode 0700");
        ck_assert(!keepers_have(admin, KEEPER_HOST));
        ck_assert_int_eq(rmdir(path), 0);
        ck_assert_int_eq(symlink("/root", path), 0);
        expect_refused(-ENOTDIR, path);
        ck_assert_int_eq(unlink(path), 0);
        ck_assert_int_eq(mkdir(path, 0700), 0);
}

/* Longer than the address of a socket. */
TEST(a_folder_may_have_a_long_path)
{
        static char deep[PATH_MAX + 8];
        char name[161];
        struct keepers *other;

        memset(name, 'n', sizeof(name) - 1);
        name[sizeof(name) - 1] = '\0';
        snprintf(deep, sizeof(deep), "%s/%s", folder, name);
        ck_assert_int_eq(mkdir(deep, 0700), 0);
        strcat(deep, "/admin.sock");
        ck_assert_int_eq(keepers_open(deep, &other, sentence, sizeof(sentence)), 0);
        ck_assert_msg(store_new(other, &s, sentence, sizeof(sentence)) == 0, "%s", sentence);
        ck_assert(keepers_have(deep, KEEPER_HOST));
        s = store_free(s);
        ck_assert_int_eq(keepers_end(other, MUCH_MS, NULL, NULL), 1);
        keepers_close(other);
        ck_assert(!keepers_have(deep, KEEPER_HOST));
        snprintf(deep, sizeof(deep), "%s/%s/keepers", folder, name);
        ck_assert_int_eq(rmdir(deep), 0);
        *strrchr(deep, '/') = '\0';
        ck_assert_int_eq(rmdir(deep), 0);
        memset(deep, 'n', sizeof(deep) - 1);
        ck_assert_int_eq(keepers_open(deep, &other, sentence, sizeof(sentence)), -ENAMETOOLONG);
}

TEST(the_socket_of_a_keeper_that_was_killed_is_replaced)
{
        close(listen_as(path, "host"));
        ck_assert(!keepers_have(admin, KEEPER_HOST));
        open_store(true);
        ck_assert(keepers_have(admin, KEEPER_HOST));
}

/* As bfcd --check does, also beside a bfcd that the keeper serves. */
TEST(looking_for_a_keeper_does_not_wait)
{
        open_store(true);
        for (int i = 0; i < N_LOOKS; i++)
                ck_assert(keepers_have(admin, KEEPER_HOST));
        change_process(false);
}

/* ---- keepers that another program starts -------------------------------------------- */

static pid_t start_external(void)
{
        int null = open("/dev/null", O_RDWR | O_CLOEXEC);
        char socket[80];
        pid_t pid;

        snprintf(socket, sizeof(socket), "%s/host", path);
        ck_assert_int_eq(
                keeper_spawn("host", (const char *const[]){ KEEPER_SOCKET, socket, NULL }, null, true, &pid),
                0);
        close(null);
        return pid;
}

/* As a service manager does: when this one has ended (0: there was none), and not at once. */
static void *start_external_after(void *userdata)
{
        pid_t was = *(const pid_t *)userdata;

        if (was > 0)
                (void)waitpid(was, NULL, 0); /* unless that was done */
        usleep(20000);
        (void)start_external();
        return NULL;
}

static void open_external(void)
{
        ks = keepers_close(ks);
        open_keepers();
        keepers_set_external(ks);
}

/* So that the teardown ends them. */
static void close_external(void)
{
        s = store_free(s);
        ks = keepers_close(ks);
        open_keepers();
}

TEST(an_external_keeper_makes_the_folder)
{
        ks = keepers_close(ks);
        ck_assert_int_eq(rmdir(path), 0);
        (void)start_external();
        while (!keepers_have(admin, KEEPER_HOST))
                usleep(1000);
        open_external();
        open_store(false);
        ck_assert(store_is_external(s));
        close_external();
}

/* bfcd is there first; the keeper is killed, and started again; and bfcd is. */
TEST(an_external_keeper_is_waited_for)
{
        pid_t pid = 0;
        pthread_t thread;
        uint64_t key;
        int fd = memfd();

        open_external();
        ck_assert_int_eq(pthread_create(&thread, NULL, start_external_after, &pid), 0);
        open_store(false);
        ck_assert_int_eq(pthread_join(thread, NULL), 0);
        ck_assert_int_eq(store_tend(s), 0);
        key = put_next(fd);
        pid = keeper_pid_in(folder, "host");
        ck_assert_int_eq(pthread_create(&thread, NULL, start_external_after, &pid), 0);
        ck_assert_int_eq(kill(pid, SIGKILL), 0);
        ck_assert_int_eq(pthread_join(thread, NULL), 0);
        (void)put_next(fd);
        ck_assert_int_ne(keeper_pid_in(folder, "host"), pid);
        s = store_free(s);
        open_external();
        open_store(false);
        expect_same(store_take_extent(s, key), fd);
        close(fd);
        close_external();
}

/* It is not asked to end. */
static void *be_another_external(void *userdata)
{
        static struct keeper_request request;
        int fd = accept4(*(int *)userdata, NULL, NULL, SOCK_CLOEXEC);

        ck_assert_int_eq(recv(fd, &request, sizeof(request), 0), sizeof(request));
        ck_assert_uint_eq(request.op, KEEPER_HELLO);
        ck_assert_int_eq(send(fd, "?", 1, 0), 1);
        ck_assert_int_eq(recv(fd, &request, sizeof(request), 0), 0);
        close(fd);
        return NULL;
}

/* The store is refused by an external keeper whose part `keeper` plays; that still listens afterwards. */
static int refuse_external(void *(*keeper)(void *listener), const char *words)
{
        int listener = listen_as(path, "host"), r;
        pthread_t thread;

        keepers_set_external(ks);
        ck_assert_int_eq(pthread_create(&thread, NULL, keeper, &listener), 0);
        r = store_new(ks, &s, sentence, sizeof(sentence));
        ck_assert_int_lt(r, 0);
        ck_assert_msg(strstr(sentence, words), "%s", sentence);
        s = NULL;
        ck_assert(keepers_have(admin, KEEPER_HOST));
        ck_assert_int_eq(shutdown(listener, SHUT_RDWR), 0);
        ck_assert_int_eq(pthread_join(thread, NULL), 0);
        close(listener);
        close_external();
        return r;
}

/* What starts it again starts the same. */
TEST(an_external_keeper_of_another_version_is_not_ended)
{
        ck_assert_int_eq(refuse_external(be_another_external, "of another version: end all jobs"), -EPROTO);
}

static void *refuse_all(void *userdata)
{
        int fd;

        while ((fd = accept4(*(int *)userdata, NULL, NULL, SOCK_CLOEXEC)) >= 0)
                close(fd);
        return NULL;
}

TEST(an_external_keeper_of_another_user_is_named)
{
        ck_assert_int_lt(
                refuse_external(refuse_all, "which another program starts as bfcd's user, cannot be used"),
                0);
}

/* Its socket may already be the next one's. */
TEST(the_socket_of_an_external_keeper_stays)
{
        char socket[80];

        keepers_set_external(ks);
        close(listen_as(path, "host"));
        keepers_forget(ks, KEEPER_HOST);
        ck_assert_int_eq(keepers_end(ks, MUCH_MS, NULL, NULL), 0);
        snprintf(socket, sizeof(socket), "%s/host", path);
        ck_assert_int_eq(access(socket, F_OK), 0);
        close_external();
}

TEST(the_end_ends_the_wait_for_an_external_keeper)
{
        int cancel = eventfd(1, EFD_CLOEXEC);
        struct keeper_link link;

        keepers_set_external(ks);
        ck_assert_int_eq(keepers_connect(ks, KEEPER_HOST, NULL, cancel, &link), -ECANCELED);
        close(cancel);
        close_external();
}

/* The second of two that were started for one device ends, and takes nothing from the first. */
TEST(one_keeper_listens)
{
        pid_t first = start_external(), second;
        int status;

        while (!keepers_have(admin, KEEPER_HOST))
                usleep(1000);
        second = start_external();
        ck_assert_int_eq(waitpid(second, &status, 0), second);
        ck_assert(WIFEXITED(status) && WEXITSTATUS(status) == 1);
        ck_assert_int_eq(keeper_pid_in(folder, "host"), first);
}

/* ---- the end of keepers ------------------------------------------------------------- */

static bool is_ended(pid_t pid)
{
        (void)waitpid(pid, NULL, 0); /* unless that was done */
        return kill(pid, 0) < 0 && errno == ESRCH;
}

LOOP_TEST(keepers_are_ended, 2)
{
        pid_t pid;

        open_store(true);
        pid = keeper_pid_in(folder, "host");
        s = store_free(s);
        if (_i == 1)
                ck_assert_int_eq(kill(pid, SIGSTOP), 0);
        ck_assert_int_eq(keepers_end(ks, _i == 1 ? 50 : MUCH_MS, NULL, NULL), 1);
        ck_assert(is_ended(pid));
        ck_assert(!keepers_have(admin, KEEPER_HOST));
        ck_assert_int_eq(keepers_end(ks, MUCH_MS, NULL, NULL), 0);
}

/* What broke the connection does not matter: it need not be killed. */
TEST(a_keeper_is_asked_to_end_also_where_its_connection_is_broken)
{
        struct keeper_link link;

        ck_assert_int_eq(keepers_connect(ks, KEEPER_HOST, NULL, -1, &link), 0);
        ck_assert(link.is_new);
        ck_assert_int_eq(shutdown(link.fd, SHUT_RDWR), 0);
        keeper_end(&link, MUCH_MS);
        ck_assert(!keepers_have(admin, KEEPER_HOST));
}

/* The kernel tells the pid of the process that listens: never that of a bfcd, which may be another process's later. */
TEST(no_bfcd_listens_for_its_keeper)
{
        struct keeper_link link;

        ck_assert_int_eq(keepers_connect(ks, KEEPER_HOST, NULL, -1, &link), 0);
        ck_assert_int_eq(keeper_pid_in(folder, "host"), link.pid);
        keeper_leave(&link);
}

/* SIGTERM of bfcd does not wait for a keeper that does not listen yet. */
TEST(the_end_ends_the_wait_for_a_new_keeper)
{
        int cancel = eventfd(1, EFD_CLOEXEC);
        struct keeper_link link;

        ck_assert_int_ge(cancel, 0);
        ck_assert_int_eq(keepers_connect(ks, KEEPER_HOST, NULL, cancel, &link), -ECANCELED);
        ck_assert(!keepers_have(admin, KEEPER_HOST));
        close(cancel);
}

/* A signal to the group of bfcd does not reach it, and the kernel gives both the processors of one session. */
TEST(a_keeper_has_its_own_group_in_the_session_of_bfcd)
{
        struct keeper_link link;

        ck_assert_int_eq(keepers_connect(ks, KEEPER_HOST, NULL, -1, &link), 0);
        ck_assert_int_eq(getpgid(link.pid), link.pid);
        ck_assert_int_eq(getsid(link.pid), getsid(0));
        keeper_leave(&link);
}

/* SIGTERM, as at the end of the machine; the folder is deleted: no bfcd finds it. */
LOOP_TEST(a_keeper_ends_by_itself, 2)
{
        char socket[80];
        pid_t pid;

        open_store(true);
        pid = keeper_pid_in(folder, "host");
        s = store_free(s);
        snprintf(socket, sizeof(socket), "%s/host", path);
        if (_i == 0)
                ck_assert_int_eq(kill(pid, SIGTERM), 0);
        else
                ck_assert_int_eq(unlink(socket), 0);
        ck_assert(is_ended(pid));
}
