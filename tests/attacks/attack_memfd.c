/* The last reference of a full memfd of 256 MiB is sent to the daemon, again and again: each close
 * frees 65,536 pages.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/attacks/attack.h"
#include "tests/integration/lingering.h"

#define MEMFD_BYTES (256 << 20)

static void act(struct attack_stage *stage)
{
        attack_is_up(stage);
        for (;;) {
                int socket = attack_socket(stage);
                int fd = memfd_create("attack", MFD_CLOEXEC);

                if (fd >= 0 && fallocate(fd, 0, 0, MEMFD_BYTES) == 0)
                        (void)fd_send(socket, "x", 1, fd, 0);
                if (fd >= 0)
                        close(fd);
                close(socket);
                attack_count(stage, 1); /* also where the kernel refused it */
        }
}

const struct attack attack_memfd = {
        .key = "memfd",
        .what = "the last reference of a full memfd of 256 MiB is sent to the daemon",
        .n_processes = 1,
        .act = act,
        .log_line = "are not closed yet", /* before Linux 6.16 */
};
