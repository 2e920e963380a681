/* A daemon that obeys commands of every client that connects: a line each, answered by a line.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

static struct sockaddr_un address = { .sun_family = AF_UNIX };
static int notify;

/* A datagram; fd: with it, -1: none. */
static int say(const char *text, size_t n_bytes, int fd)
{
        union {
                struct cmsghdr header;
                char bytes[CMSG_SPACE(sizeof(int))];
        } control = { .bytes = { 0 } };
        struct iovec iov = { .iov_base = (void *)(unsigned long)text, .iov_len = n_bytes };
        struct msghdr m = {
                .msg_name = &address, .msg_namelen = sizeof(address), .msg_iov = &iov, .msg_iovlen = 1
        };

        if (fd >= 0) {
                m.msg_control = control.bytes;
                m.msg_controllen = sizeof(control.bytes);
                control.header = (struct cmsghdr){ .cmsg_level = SOL_SOCKET,
                                                   .cmsg_type = SCM_RIGHTS,
                                                   .cmsg_len = CMSG_LEN(sizeof(int)) };
                memcpy(CMSG_DATA(&control.header), &fd, sizeof(int));
        }
        return sendmsg(notify, &m, 0) < 0 ? 1 : 0;
}

static int say_text(const char *text)
{
        return say(text, strlen(text), -1);
}

static int by_another(const char *text)
{
        pid_t pid = fork();
        int status;

        if (pid == 0)
                _exit(say_text(text));
        return waitpid(pid, &status, 0) == pid && status == 0 ? 0 : 1;
}

/* What was handed over. */
static void tell(int to)
{
        const char *names = getenv("LISTEN_FDNAMES"), *n = getenv("LISTEN_FDS"), *keep = getenv("BFCD_KEEP");
        char all[256];

        snprintf(all, sizeof(all), "%s %s keep=%s\n", n ? n : "0", names ? names : "", keep ? keep : "");
        (void)!write(to, all, strlen(all));
}

static int obey(int to, char *line)
{
        char *verb = strtok(line, " \n"), *text = strtok(NULL, " \n");

        if (!verb)
                return 1;
        if (!text)
                text = "";
        if (strcmp(verb, "tell") == 0)
                return tell(to), -1;
        if (strcmp(verb, "say") == 0)
                return say_text(text);
        if (strcmp(verb, "say-and-die") == 0)
                return say_text(text) + raise(SIGKILL);
        if (strcmp(verb, "by-another") == 0)
                return by_another(text);
        if (strcmp(verb, "say-nul") == 0)
                return say("STATUS=a\0b", 10, -1);
        if (strcmp(verb, "say-fd") == 0)
                return say("STATUS=fd", 9, notify);
        if (strcmp(verb, "exit") == 0)
                _exit(atoi(text));
        return 1;
}

int main(void)
{
        static char line[4096];
        int fd, r;

        strcpy(address.sun_path, getenv("NOTIFY_SOCKET"));
        notify = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
        if (notify < 0 || say_text("READY=1\nSTATUS=up") != 0)
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
