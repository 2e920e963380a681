/* A user with subordinate uids (/etc/subuid), who keeps the tenant's group: each connection is of another uid, sends half
 * a frame and then a byte at a time. One that the daemon closes is opened again.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "tests/attacks/attack.h"

#define N_UIDS    1200u /* more than all connections without a hello */
#define FIRST_UID 200000u

/* -1: not now. */
static int connect_as(const struct attack_stage *stage, uid_t uid)
{
        static const uint8_t half[16] = { 0xe8, 0xfd }; /* of a frame of 65,000 bytes */
        struct sockaddr_un address = { .sun_family = AF_UNIX };
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), r = -1;

        memcpy(address.sun_path, stage->socket, sizeof(address.sun_path));
        if (fd < 0)
                return -1;
        if (seteuid(uid) == 0)
                r = connect(fd, (struct sockaddr *)&address, sizeof(address));
        (void)!seteuid(getuid());
        if (r == 0 && send(fd, half, sizeof(half), MSG_NOSIGNAL) == (ssize_t)sizeof(half))
                return fd;
        close(fd);
        return -1;
}

static void act(struct attack_stage *stage)
{
        static int fds[N_UIDS];
        struct rlimit limit;

        if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
                limit.rlim_cur = limit.rlim_max;
                (void)setrlimit(RLIMIT_NOFILE, &limit);
        }
        for (unsigned i = 0; i < N_UIDS; i++)
                fds[i] = -1;
        attack_is_up(stage);
        for (;;) {
                for (unsigned i = 0; i < N_UIDS; i++) {
                        if (fds[i] < 0) {
                                fds[i] = connect_as(stage, FIRST_UID + i);
                        } else if (send(fds[i], "", 1, MSG_NOSIGNAL | MSG_DONTWAIT) < 0 && errno != EAGAIN) {
                                close(fds[i]);
                                fds[i] = -1;
                                attack_count(stage, 1);
                        }
                }
        }
}

const struct attack attack_uids = { .key = "uids",
                                    .what = "1,200 uids of a user in a tenant's group send half a frame",
                                    .n_processes = 1,
                                    .is_many = true,
                                    .act = act,
                                    .fills_places = true,
                                    .log_line = "have sent no hello" };
