/* The daemon under a service manager, which is this test: what it is told over
 * NOTIFY_SOCKET, and sockets that it hands over.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "tests/integration/harness.h"
#include "tests/integration/lingering.h"

#define MAX_FDS   4u
#define N_SENDERS 12
#define LINGER_S  3600 /* longer than any test */
#define QUEUE_MS  60000

static const struct rig_config config = { .top = NULL };

/* The service manager's side. */
struct manager {
        struct rig *rig;
        int notify_fd;        /* -1: it listens to nobody */
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
        char *text;

        *m = (struct manager){ .rig = rig_folder(), .notify_fd = -1, .fdnames = "client:admin" };
        text = rig_config_text(m->rig, &config);
        rig_write_config(m->rig, text);
        free(text);
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

static void manager_start(struct manager *m)
{
        struct rig *rig = m->rig;
        char number[32];
        int log;

        fflush(NULL);
        rig->pid = fork();
        ck_assert_int_ge(rig->pid, 0);
        if (rig->pid > 0)
                return;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        log = open(rig->log_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
        dup2(log, STDERR_FILENO);
        dup2(log, STDOUT_FILENO);
        unsetenv("JOURNAL_STREAM");
        if (m->notify_fd >= 0)
                setenv("NOTIFY_SOCKET", m->notify, 1);
        snprintf(number, sizeof(number), "%u000", m->watchdog_ms);
        if (m->watchdog_ms > 0)
                setenv("WATCHDOG_USEC", number, 1);
        if (m->n_fds > 0)
                place_fds(m);
        execl(program_bfcd(), "bfcd", "--config", rig->config_path, (char *)NULL);
        _exit(127);
}

static bool hear(struct manager *m, const char *part)
{
        ssize_t n = recv(m->notify_fd, m->last, sizeof(m->last) - 1, 0);

        m->last[n > 0 ? n : 0] = '\0';
        return n > 0 && strstr(m->last, part);
}

/* Reads until a datagram has this in it. */
static bool awaits(struct manager *m, const char *part)
{
        return WAIT_FOR(hear(m, part), SETTLE_MS);
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

static bool log_has(struct manager *m, const char *part)
{
        char *log = rig_log(m->rig);
        bool has = log && strstr(log, part);

        free(log);
        return has;
}

/* ---- what it is told ------------------------------------------------------ */

START_TEST(it_is_told_how_the_daemon_fares)
{
        struct manager m;
        bfc_client *client;
        void *block;

        manager_init(&m);
        manager_listen(&m, _i == 1); /* a path; an abstract name */
        m.watchdog_ms = 60;
        manager_start(&m);
        ck_assert(awaits(&m, "READY=1\n"));
        ck_assert_msg(strstr(m.last, "STATUS=0 sessions, 0 B in use, 0 B reserved"), "%s", m.last);
        ck_assert_ptr_nonnull(strstr(m.last, "WATCHDOG=1\n"));
        client = client_open(m.rig, NULL, NULL); /* ready is ready */
        ck_assert_ok(bfc_malloc_flags(client, "train", 10 * MIB, BFC_WHOLE, &block));
        ck_assert(awaits(&m, "STATUS=1 session, 10.0 MiB in use, 10.0 MiB reserved"));
        ck_assert_ptr_null(strstr(m.last, "READY")); /* once */
        drain(&m);
        ck_assert(awaits(&m, "WATCHDOG=1"));
        ck_assert_str_eq(m.last, "WATCHDOG=1\n"); /* no news */
        ck_assert_ok(bfc_free(client, block));
        bfc_disconnect(client);
        ck_assert(awaits(&m, "STATUS=0 sessions, 0 B in use"));
        manager_stop(&m);
        ck_assert(awaits(&m, "STOPPING=1\n"));
        ck_assert_ptr_nonnull(strstr(m.last, "WATCHDOG_USEC=0\n"));
        manager_end(&m);
}
END_TEST

/* What is owed is said as soon as the manager listens, and nobody waits for it. */
START_TEST(a_manager_that_does_not_listen_stops_nobody)
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
                usleep(2000); /* beats come and go */
                ck_assert(rig_answers(m.rig));
        }
        ck_assert(awaits(&m, "READY=1\n"));
        manager_stop(&m);
        close(fd);
        manager_end(&m);
}
END_TEST

/* A stopped process stands for a loop that hangs. */
START_TEST(a_loop_that_hangs_is_noticed)
{
        struct manager m;

        manager_init(&m);
        manager_listen(&m, false);
        m.watchdog_ms = 30;
        manager_start(&m);
        ck_assert(awaits(&m, "READY=1\n"));
        ck_assert(awaits(&m, "WATCHDOG=1\n"));
        kill(m.rig->pid, SIGSTOP);
        ck_assert(WAIT_FOR((usleep(100000), drain(&m) == 0), SETTLE_MS));
        usleep(200000);
        ck_assert_uint_eq(drain(&m), 0);
        kill(m.rig->pid, SIGCONT);
        ck_assert(awaits(&m, "WATCHDOG=1\n"));
        manager_stop(&m);
        manager_end(&m);
}
END_TEST

START_TEST(a_log_that_is_not_read_stops_nothing)
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
        ck_assert(awaits(&m, "READY=1\n"));
        while (write(log, rest, sizeof(rest)) > 0)
                ;
        while (write(log, rest, 1) > 0)
                ;
        kill(m.rig->pid, SIGHUP); /* which is logged */
        for (int i = 0; i < 10; i++) {
                drain(&m);
                ck_assert(awaits(&m, "WATCHDOG=1\n"));
        }
        ck_assert(rig_answers(m.rig));
        kill(m.rig->pid, SIGKILL);
        waitpid(m.rig->pid, NULL, 0);
        close(log);
        manager_end(&m);
}
END_TEST

/* ---- what it hands over --------------------------------------------------- */

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

/* Who knocks while no daemon runs waits, and is let in by the next one. */
START_TEST(sockets_outlive_the_daemon)
{
        struct manager m;
        bfc_client *client;

        manager_init(&m);
        hand_over(&m);
        for (unsigned round = 0; round < 3; round++) {
                struct sockaddr_un address = { .sun_family = AF_UNIX };
                int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
                char byte;

                strcpy(address.sun_path, m.rig->socket);
                ck_assert_int_eq(connect(fd, (struct sockaddr *)&address, sizeof(address)), 0);
                ck_assert_int_eq(send(fd, "\0\0\0\1", 4, 0), 4); /* no hello: it is let in, and then out */
                ck_assert_int_eq(send(fd, "\377", 1, 0), 1);
                manager_start(&m);
                ck_assert_int_le(recv(fd, &byte, 1, 0), 1);
                close(fd);
                ck_assert(WAIT_FOR(rig_answers(m.rig), SETTLE_MS));
                client = client_open(m.rig, NULL, NULL);
                bfc_disconnect(client);
                /* Who may come in is what the config says. */
                ck_assert_uint_eq(mode_of(m.rig->socket), 0666);
                ck_assert_uint_eq(mode_of(m.rig->admin_socket), 0600);
                manager_stop(&m);
                ck_assert_int_eq(access(m.rig->socket, F_OK), 0);
                ck_assert_int_eq(access(m.rig->admin_socket, F_OK), 0);
        }
        manager_end(&m);
}
END_TEST

static int connect_to(const char *path)
{
        struct sockaddr_un address = { .sun_family = AF_UNIX };
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

        strcpy(address.sun_path, path);
        ck_assert_int_eq(connect(fd, (struct sockaddr *)&address, sizeof(address)), 0);
        return fd;
}

/* They wait in the socket since before any daemon could have the kernel refuse them, and outlive
 * each daemon that hangs: none does. */
START_TEST(fds_in_the_queue_stop_no_daemon)
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
                        ck_assert(WAIT_FOR(log_has(&m, "the client sent file descriptors"), QUEUE_MS));
                manager_stop(&m);
        }
        for (unsigned i = 0; i < N_SENDERS; i++) {
                if (i % 2 == 1)
                        close(fds[i]);
                lingering_free(&sent[i]);
        }
        manager_end(&m);
}
END_TEST

/* By name, not by place; the one that is missing is made, and what is unknown is said. */
START_TEST(sockets_are_told_apart_by_name)
{
        struct manager m;
        char *err = NULL;
        const char *status[] = { program_bfcctl(), "--socket", NULL, "status", NULL };

        manager_init(&m);
        m.fds[0] = open("/dev/null", O_RDONLY | O_CLOEXEC);
        m.fds[1] = listen_at(m.rig->admin_socket, 0600);
        m.n_fds = 2;
        m.fdnames = "stranger:admin";
        manager_start(&m);
        ck_assert(WAIT_FOR(rig_answers(m.rig), SETTLE_MS));
        ck_assert(log_has(&m, "'stranger'"));
        status[2] = m.rig->admin_socket;
        ck_assert_int_eq(program_run(status, NULL, &err), 0);
        free(err);
        bfc_disconnect(client_open(m.rig, NULL, NULL));
        manager_stop(&m);
        ck_assert_int_lt(access(m.rig->socket, F_OK), 0); /* its own */
        ck_assert_int_eq(access(m.rig->admin_socket, F_OK), 0);
        manager_end(&m);
}
END_TEST

START_TEST(what_is_for_another_process_is_left_alone)
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
END_TEST

/* A wrong socket is an error, not a daemon that nobody finds. */
START_TEST(a_wrong_socket_is_refused)
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
        ck_assert(log_has(&m, "ListenStream= of the socket unit"));
        manager_end(&m);
}
END_TEST

int main(void)
{
        Suite *s = suite_create("service");
        TCase *t = tcase_create("service");

        tcase_set_timeout(t, TEST_TIMEOUT);
        tcase_add_loop_test(t, it_is_told_how_the_daemon_fares, 0, 2);
        tcase_add_test(t, a_manager_that_does_not_listen_stops_nobody);
        tcase_add_test(t, a_loop_that_hangs_is_noticed);
        tcase_add_test(t, a_log_that_is_not_read_stops_nothing);
        tcase_add_test(t, sockets_outlive_the_daemon);
        tcase_add_test(t, fds_in_the_queue_stop_no_daemon);
        tcase_add_test(t, sockets_are_told_apart_by_name);
        tcase_add_test(t, what_is_for_another_process_is_left_alone);
        tcase_add_loop_test(t, a_wrong_socket_is_refused, 0, 4);
        suite_add_tcase(s, t);
        return harness_main(s);
}
