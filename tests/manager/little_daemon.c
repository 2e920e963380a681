/* A daemon that keeps texts in the service manager and obeys commands of every client that
 * connects: a line each, answered by a line.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

static struct sockaddr_un address = { .sun_family = AF_UNIX };
static int notify;

/* A datagram, with fds. */
static int say(const char *text, size_t n_bytes, const int *fds, size_t n_fds)
{
        static union {
                struct cmsghdr header;
                char bytes[CMSG_SPACE(sizeof(int) * 64)];
        } control;
        struct iovec iov = { .iov_base = (void *)(unsigned long)text, .iov_len = n_bytes };
        struct msghdr m = {
                .msg_name = &address, .msg_namelen = sizeof(address), .msg_iov = &iov, .msg_iovlen = 1
        };

        if (n_fds > 0) {
                m.msg_control = control.bytes;
                m.msg_controllen = CMSG_SPACE(sizeof(int) * n_fds);
                control.header.cmsg_level = SOL_SOCKET;
                control.header.cmsg_type = SCM_RIGHTS;
                control.header.cmsg_len = CMSG_LEN(sizeof(int) * n_fds);
                memcpy(CMSG_DATA(&control.header), fds, sizeof(int) * n_fds);
        }
        return sendmsg(notify, &m, 0) < 0 ? 1 : 0;
}

static int say_text(const char *text, const int *fds, size_t n_fds)
{
        return say(text, strlen(text), fds, n_fds);
}

static int text_fd(const char *text)
{
        int fd = memfd_create("text", MFD_CLOEXEC);

        (void)!write(fd, text, strlen(text));
        return fd;
}

static int store(const char *name, const char *text, int n_times)
{
        int fd = text_fd(text), fds[2] = { fd, fd };
        char buffer[600];
        int r;

        snprintf(buffer, sizeof(buffer), "FDSTORE=1\nFDNAME=%s\nFDPOLL=0", name);
        r = say_text(buffer, fds, (size_t)n_times);
        close(fd);
        return r;
}

/* Both ends of a pipe, of which the other is closed. */
static int store_hung_up(const char *more)
{
        char buffer[128];
        int fds[2], r;

        r = pipe2(fds, O_CLOEXEC);
        close(fds[1]);
        snprintf(buffer, sizeof(buffer), "FDSTORE=1\nFDNAME=pipe%s%s", *more ? "\n" : "", more);
        r |= say_text(buffer, fds, 1);
        close(fds[0]);
        return r;
}

/* Once all before it is done: the manager has closed its end. */
static int barrier(void)
{
        int fds[2], r;
        char byte;

        if (pipe2(fds, O_CLOEXEC) < 0)
                return 1;
        r = say_text("BARRIER=1", fds + 1, 1);
        close(fds[1]);
        if (r == 0 && read(fds[0], &byte, 1) != 0)
                r = 1;
        close(fds[0]);
        return r;
}

static int by_another(const char *name)
{
        pid_t pid = fork();
        int status;

        if (pid == 0)
                _exit(store(name, "another's", 1));
        return waitpid(pid, &status, 0) == pid && status == 0 ? 0 : 1;
}

/* "name=text" of each fd handed over, by a space. */
static void tell(int to, const char *names, int n)
{
        char text[256], all[4096] = "";

        for (int i = 0; i < n; i++) {
                size_t n_name = strcspn(names, ":");
                ssize_t n_text = pread(3 + i, text, sizeof(text) - 1, 0);

                text[n_text > 0 ? n_text : 0] = '\0';
                snprintf(all + strlen(all), sizeof(all) - strlen(all), "%s%.*s=%s", i > 0 ? " " : "",
                         (int)n_name, names, n_text >= 0 ? text : "?");
                names += names[n_name] == ':' ? n_name + 1 : n_name;
        }
        strcat(all, "\n");
        (void)!write(to, all, strlen(all));
}

static int obey(int to, char *line)
{
        char *verb = strtok(line, " \n"), *name = strtok(NULL, " \n"), *text = strtok(NULL, " \n");
        const char *names = getenv("LISTEN_FDNAMES"), *n = getenv("LISTEN_FDS");

        if (!verb)
                return 1;
        if (!name)
                name = "";
        if (strcmp(verb, "tell") == 0)
                return tell(to, names ? names : "", n ? atoi(n) : 0), -1;
        if (strcmp(verb, "store") == 0)
                return store(name, text ? text : "", 1);
        if (strcmp(verb, "store-twice") == 0) /* one message, the same file */
                return store(name, "twice", 2);
        if (strcmp(verb, "store-pipe") == 0)
                return store_hung_up(name);
        if (strcmp(verb, "store-and-die") == 0)
                return store(name, text ? text : "", 1) + raise(SIGKILL);
        if (strcmp(verb, "by-another") == 0)
                return by_another(name);
        if (strcmp(verb, "say") == 0) {
                for (char *p = name; *p; p++)
                        *p = *p == ',' ? '\n' : *p;
                return say_text(name, NULL, 0);
        }
        if (strcmp(verb, "say-nul") == 0)
                return say("STATUS=a\0b", 10, NULL, 0);
        if (strcmp(verb, "barrier") == 0)
                return barrier();
        if (strcmp(verb, "exit") == 0)
                _exit(atoi(name));
        return 1;
}

int main(void)
{
        static char line[4096];
        int fd, r;

        strcpy(address.sun_path, getenv("NOTIFY_SOCKET"));
        notify = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
        if (notify < 0 || say_text("READY=1\nSTATUS=up", NULL, 0) != 0)
                return EXIT_FAILURE;
        while ((fd = accept4(3, NULL, NULL, SOCK_CLOEXEC)) >= 0) {
                ssize_t n = read(fd, line, sizeof(line) - 1);

                line[n > 0 ? n : 0] = '\0';
                r = obey(fd, line);
                if (r >= 0)
                        (void)!write(fd, r == 0 ? "ok\n" : "no\n", 3);
                close(fd);
        }
        return EXIT_FAILURE;
}
