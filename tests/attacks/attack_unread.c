/* A user's processes connect and send single bytes: each is a buffer, which the daemon frees when it closes the connection
 * for the next one.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <sys/socket.h>
#include <unistd.h>

#include "tests/attacks/attack.h"

#define N_KEPT  400u /* more than a user has places */
#define N_BYTES 250u /* about as many fit into a socket */

static void act(struct attack_stage *stage)
{
        static const uint8_t half[4] = { 0xe8, 0xfd }; /* of a frame of 65,000 bytes */
        int fds[N_KEPT];

        for (unsigned i = 0; i < N_KEPT; i++)
                fds[i] = -1;
        attack_is_up(stage);
        for (unsigned i = 0;; i = (i + 1) % N_KEPT) {
                if (fds[i] >= 0)
                        close(fds[i]);
                fds[i] = attack_socket(stage);
                (void)!send(fds[i], half, sizeof(half), MSG_NOSIGNAL | MSG_DONTWAIT);
                for (unsigned n = 0; n < N_BYTES; n++)
                        if (send(fds[i], "", 1, MSG_NOSIGNAL | MSG_DONTWAIT) < 0)
                                break;
                attack_count(stage, 1);
        }
}

const struct attack attack_unread = { .key = "unread",
                                      .what = "a user connects and sends single bytes that are not read",
                                      .n_processes = 2,
                                      .act = act,
                                      .fills_places = true,
                                      .log_line = "have sent no hello" };
