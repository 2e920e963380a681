/* The daemon under a service manager, which is this test: what it is told over
 * NOTIFY_SOCKET, and sockets that it hands over.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "tests/integration/tools.h"
#include "tests/integration/lingering.h"

#define MAX_FDS   4u
#define N_SENDERS 12
#define LINGER_S  3600 /* longer than any test */
#define QUEUE_MS  60000

static const struct rig_config config = { .top = NULL };

/* The service manager's side. */
struct manager {
        struct rig *rig;
        int notify_fd;        /* -1: it does not listen */
        char notify[108];     /* NOTIFY_SOCKET */
        unsigned watchdog_ms; /* 0: none */
        int fds[MAX_FDS];     /* to hand over */
        const char *fdnames;  /* LISTEN_FDNAMES */
        unsigned n_fds;
        bool is_for_another; /* LISTEN_PID is another process */
        char last[512];      /* the datagram that was awaited */
};

static void bind_to(int fd, const char *path)
{
        struct sockaddr_un address = { .sun_family = AF_UNIX };
        socklen_t n = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + strlen(path));

        strcpy(address.sun_path, path);
        if (path[0] == '@')
                address.sun_path[0] = '\0';
        ck_assert_int_eq(bind(fd, (struct sockaddr *)&address, path[0] == '@' ? n : n + 1), 0);
}

static void manager_listen(struct manager *m, bool is_abstract)
{
        snprintf(m->notify, sizeof(m->notify), "%s%s/notify", is_abstract ? "@" : "", m->rig->folder);
        m->notify_fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        ck_assert_int_ge(m->notify_fd, 0);
        bind_to(m->notify_fd, m->notify);
}

static void manager_init(struct manager *m)
{
        *m = (struct manager){ .rig = rig_folder(), .notify_fd = -1, .fdnames = "client:admin" };
        rig_rewrite_config(m->rig, &config);
}

static int listen_at(const char *path, mode_t mode)
{
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

        ck_assert_int_ge(fd, 0);
        bind_to(fd, path);
        ck_assert_int_eq(chmod(path, mode), 0);
        ck_assert_int_eq(listen(fd, 16), 0);
        return fd;
}

/* In the child: fds to 3 and up, as the protocol has it. */
static void place_fds(const struct manager *m)
{
        char number[16];

        for (unsigned i = 0; i < m->n_fds; i++)
                dup2(m->fds[i], 100 + (int)i);
        for (unsigned i = 0; i < m->n_fds; i++)
                dup2(100 + (int)i, 3 + (int)i);
        for (unsigned i = 0; i < m->n_fds; i++)
                close(100 + (int)i);
        snprintf(number, sizeof(number), "%u", m->n_fds);
        setenv("LISTEN_FDS", number, 1);
        setenv("LISTEN_FDNAMES", m->fdnames, 1);
        snprintf(number, sizeof(number), "%d", (int)getpid() + m->is_for_another);
        setenv("LISTEN_PID", number, 1);
}

/* In the daemon's process: what the service manager tells it. */
static void prepare(void *arg)
{
        const struct manager *m = arg;
        char number[32];

        if (m->notify_fd >= 0)
                setenv("NOTIFY_SOCKET", m->notify, 1);
        snprintf(number, sizeof(number), "%u000", m->watchdog_ms);
        if (m->watchdog_ms > 0)
                setenv("WATCHDOG_USEC", number, 1);
        if (m->n_fds > 0)
                place_fds(m);
}

static void manager_start(struct manager *m)
{
        m->rig->pid = rig_spawn_daemon_with(m->rig, prepare, m);
}

static bool receives(struct manager *m, const char *part)
{
        ssize_t n = recv(m->notify_fd, m->last, sizeof(m->last) - 1, 0);

        m->last[n > 0 ? n : 0] = '\0';
        return n > 0 && strstr(m->last, part);
}

/* Reads until a datagram has this in it. */
static bool waits_for(struct manager *m, const char *part)
{
        return WAIT_FOR(receives(m, part), SETTLE_MS);
}

static unsigned drain(struct manager *m)
{
        unsigned n = 0;

        while (recv(m->notify_fd, m->last, sizeof(m->last) - 1, 0) >= 0)
                n++;
        return n;
}

/* SIGTERM, and a good end. */
static void manager_stop(struct manager *m)
{
        int status = -1;

        m->rig->admin = raw_close(m->rig->admin);
        kill(m->rig->pid, SIGTERM);
        ck_assert_int_eq(waitpid(m->rig->pid, &status, 0), m->rig->pid);
        ck_assert_int_eq(status, 0);
}

static void manager_end(struct manager *m)
{
        for (unsigned i = 0; i < m->n_fds; i++)
                close(m->fds[i]);
        if (m->notify_fd >= 0)
                close(m->notify_fd);
        rig_discard(m->rig);
}

/* ---- what it is told ------------------------------------------------------ */

LOOP_TEST(the_manager_receives_state_and_status, 2)
{
        struct manager m;
        bfc_client *client;
        void *block;

        manager_init(&m);
        manager_listen(&m, _i == 1); /* a path; an abstract name */
        m.watchdog_ms = 60;
        manager_start(&m);
        ck_assert(waits_for(&m, "READY=1\n"));
        ck_assert_msg(strstr(m.last, "STATUS=0 sessions, 0 B in use, 0 B reserved"), "%s", m.last);
        ck_assert_ptr_nonnull(strstr(m.last, "WATCHDOG=1\n"));
        client = client_open(m.rig, NULL, NULL); /* ready is ready */
        ck_assert_ok(bfc_malloc_flags(client, "train", 10 * MIB, BFC_WHOLE, &block));
        ck_assert(waits_for(&m, "STATUS=1 session, 10.0 MiB in use, 10.0 MiB reserved"));
        ck_assert_ptr_null(strstr(m.last, "READY")); /* once */
        drain(&m);
        ck_assert(waits_for(&m, "WATCHDOG=1"));
        ck_assert_str_eq(m.last, "WATCHDOG=1\n"); /* no news */
        ck_assert_ok(bfc_free(client, block));
        bfc_disconnect(client);
        ck_assert(waits_for(&m, "STATUS=0 sessions, 0 B in use"));
        manager_stop(&m);
        ck_assert(waits_for(&m, "STOPPING=1\n"));
        ck_assert_ptr_nonnull(strstr(m.last, "WATCHDOG_USEC=0\n"));
        manager_end(&m);
}

/* Messages are sent as soon as the manager listens, and the daemon does not wait for that. */
TEST(an_unresponsive_manager_blocks_nothing)
{
        struct manager m;
        int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        struct sockaddr_un address = { .sun_family = AF_UNIX };

        manager_init(&m);
        manager_listen(&m, false);
        strcpy(address.sun_path, m.notify);
        while (sendto(fd, "X=1", 3, 0, (struct sockaddr *)&address, sizeof(address)) == 3)
                ; /* its queue is full */
        ck_assert_int_eq(errno, EAGAIN);
        m.watchdog_ms = 30;
        manager_start(&m);
        ck_assert(WAIT_FOR(rig_answers(m.rig), SETTLE_MS));
        for (unsigned i = 0; i < 20; i++) {
                usleep(2000); /* some watchdog messages are dropped */
                ck_assert(rig_answers(m.rig));
        }
        ck_assert(waits_for(&m, "READY=1\n"));
        manager_stop(&m);
        close(fd);
        manager_end(&m);
}

/* A stopped process stands for a loop that hangs. */
TEST(a_hanging_loop_misses_the_watchdog)
{
        struct manager m;

        manager_init(&m);
        manager_listen(&m, false);
        m.watchdog_ms = 30;
        manager_start(&m);
        ck_assert(waits_for(&m, "READY=1\n"));
        ck_assert(waits_for(&m, "WATCHDOG=1\n"));
        child_stop(m.rig->pid);
        ck_assert(WAIT_FOR((usleep(100000), drain(&m) == 0), SETTLE_MS));
        usleep(200000);
        ck_assert_uint_eq(drain(&m), 0);
        kill(m.rig->pid, SIGCONT);
        ck_assert(waits_for(&m, "WATCHDOG=1\n"));
        manager_stop(&m);
        manager_end(&m);
}

TEST(an_unread_log_blocks_nothing)
{
        char rest[65536];
        struct manager m;
        int log;

        memset(rest, 'x', sizeof(rest));
        manager_init(&m);
        manager_listen(&m, false);
        m.watchdog_ms = 30;
        ck_assert_int_eq(mkfifo(m.rig->log_path, 0600), 0);
        log = open(m.rig->log_path, O_RDWR | O_NONBLOCK | O_CLOEXEC);
        ck_assert_int_ge(log, 0);
        manager_start(&m);
        ck_assert(waits_for(&m, "READY=1\n"));
        while (write(log, rest, sizeof(rest)) > 0)
                ;
        while (write(log, rest, 1) > 0)
                ;
        kill(m.rig->pid, SIGHUP); /* which is logged */
        for (int i = 0; i < 10; i++) {
                drain(&m);
                ck_assert(waits_for(&m, "WATCHDOG=1\n"));
        }
        ck_assert(rig_answers(m.rig));
        kill(m.rig->pid, SIGKILL);
        waitpid(m.rig->pid, NULL, 0);
        close(log);
        manager_end(&m);
}

/* ---- sockets that are passed to it --------------------------------------------------- */

static void hand_over(struct manager *m)
{
        m->fds[0] = listen_at(m->rig->socket, 0600);
        m->fds[1] = listen_at(m->rig->admin_socket, 0666);
        m->n_fds = 2;
}

static mode_t mode_of(const char *path)
{
        struct stat st;

        return stat(path, &st) == 0 ? st.st_mode & 07777 : 0;
}

static int connect_to(const char *path)
{
        struct sockaddr_un address = { .sun_family = AF_UNIX };
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

        strcpy(address.sun_path, path);
        ck_assert_int_eq(connect(fd, (struct sockaddr *)&address, sizeof(address)), 0);
        return fd;
}

/* A connection waits while no daemon runs, and is accepted by the next one. */
TEST(sockets_outlive_the_daemon)
{
        struct manager m;
        bfc_client *client;

        manager_init(&m);
        hand_over(&m);
        for (unsigned round = 0; round < 3; round++) {
                int fd = connect_to(m.rig->socket);
                char byte;

                ck_assert_int_eq(send(fd, "\0\0\0\1", 4, 0),
                                 4); /* no hello: it is accepted, and then disconnected */
                ck_assert_int_eq(send(fd, "\377", 1, 0), 1);
                manager_start(&m);
                ck_assert_int_le(recv(fd, &byte, 1, 0), 1);
                close(fd);
                ck_assert(WAIT_FOR(rig_answers(m.rig), SETTLE_MS));
                client = client_open(m.rig, NULL, NULL);
                bfc_disconnect(client);
                /* The config says which users may connect. */
                ck_assert_uint_eq(mode_of(m.rig->socket), 0666);
                ck_assert_uint_eq(mode_of(m.rig->admin_socket), 0600);
                manager_stop(&m);
                ck_assert_int_eq(access(m.rig->socket, F_OK), 0);
                ck_assert_int_eq(access(m.rig->admin_socket, F_OK), 0);
        }
        manager_end(&m);
}

/* They wait in the socket since before any daemon could have the kernel refuse them, and outlive
 * each daemon that hangs: none does. */
TEST(fds_in_the_backlog_block_no_start)
{
        struct lingering sent[N_SENDERS];
        int fds[N_SENDERS], r = 0;
        struct manager m;

        manager_init(&m);
        hand_over(&m);
        for (unsigned i = 0; i < N_SENDERS; i++) {
                fds[i] = connect_to(m.rig->socket);
                r = lingering_new(LINGER_S, &sent[i]);
                if (r < 0) {
                        printf("# skipped: no TCP over the loopback interface: %s\n", strerror(-r));
                        manager_end(&m);
                        return;
                }
                ck_assert_int_eq(fd_send(fds[i], "x", 1, sent[i].fd, 0), 0);
                lingering_close(&sent[i]);
                if (i % 2 == 0)
                        close(fds[i]);
        }
        for (unsigned round = 0; round < 2; round++) {
                manager_start(&m);
                ck_assert(WAIT_FOR(rig_answers(m.rig), QUEUE_MS));
                bfc_disconnect(client_open(m.rig, NULL, NULL));
                if (round == 0)
                        ck_assert(WAIT_FOR(rig_logged(m.rig, "the client sent file descriptors"), QUEUE_MS));
                manager_stop(&m);
        }
        for (unsigned i = 0; i < N_SENDERS; i++) {
                if (i % 2 == 1)
                        close(fds[i]);
                lingering_free(&sent[i]);
        }
        manager_end(&m);
}

/* By name, not by place; the one that is missing is made, and what is unknown is said. */
TEST(sockets_are_identified_by_name)
{
        struct manager m;

        manager_init(&m);
        m.fds[0] = open("/dev/null", O_RDONLY | O_CLOEXEC);
        m.fds[1] = listen_at(m.rig->admin_socket, 0600);
        m.n_fds = 2;
        m.fdnames = "unknown:admin";
        manager_start(&m);
        ck_assert(WAIT_FOR(rig_answers(m.rig), SETTLE_MS));
        ck_assert(rig_logged(m.rig, "'unknown'"));
        ctl_says(m.rig, WORDS("status"), "");
        bfc_disconnect(client_open(m.rig, NULL, NULL));
        manager_stop(&m);
        ck_assert_int_lt(access(m.rig->socket, F_OK), 0); /* its own */
        ck_assert_int_eq(access(m.rig->admin_socket, F_OK), 0);
        manager_end(&m);
}

TEST(sockets_for_another_process_are_ignored)
{
        struct manager m;

        manager_init(&m);
        m.fds[0] = open("/dev/null", O_RDONLY | O_CLOEXEC);
        m.fds[1] = open("/dev/null", O_RDONLY | O_CLOEXEC);
        m.n_fds = 2;
        m.is_for_another = true;
        manager_start(&m);
        ck_assert(WAIT_FOR(rig_answers(m.rig), SETTLE_MS));
        manager_stop(&m);
        manager_end(&m);
}

/* A wrong socket is an error, not a daemon that clients cannot find. */
LOOP_TEST(a_wrong_socket_is_refused, 4)
{
        struct manager m;
        char other[128];
        int status = -1;

        manager_init(&m);
        snprintf(other, sizeof(other), "%s/other", m.rig->folder);
        switch (_i) {
        case 0:
                m.fds[0] = listen_at(other, 0666); /* elsewhere */
                break;
        case 1:
                m.fds[0] = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
                bind_to(m.fds[0], m.rig->socket);
                break;
        case 2:
                m.fds[0] = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0); /* does not listen */
                bind_to(m.fds[0], m.rig->socket);
                break;
        default:
                m.fds[0] = open("/dev/null", O_RDONLY | O_CLOEXEC);
        }
        m.n_fds = 1;
        m.fdnames = "client";
        manager_start(&m);
        ck_assert_int_eq(waitpid(m.rig->pid, &status, 0), m.rig->pid);
        ck_assert(WIFEXITED(status) && WEXITSTATUS(status) == 1);
        ck_assert(rig_logged(m.rig, "ListenStream= of the socket unit"));
        manager_end(&m);
}
