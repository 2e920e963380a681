/* A client without a thread, in a program's event loop; it ends with its standard input.
 * SPDX-License-Identifier: Apache-2.0
 * cc poll.c $(pkg-config --cflags --libs bfcclient) -o poll */
#include <bfcclient.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <unistd.h>

static int failed(const char *what)
{
        fprintf(stderr, "%s: %s\n", what, bfc_last_error());
        return 1;
}

int main(void)
{
        struct bfc_options options = { .struct_size = sizeof(options), .flags = BFC_POLL };
        struct pollfd fds[2];
        bfc_client *client;
        char line[256];
        int r = 0;

        if (bfc_connect(&options, &client) < 0)
                return failed("connect");
        fds[0] = (struct pollfd){ .fd = bfc_poll_fd(client), .events = POLLIN };
        fds[1] = (struct pollfd){ .fd = STDIN_FILENO, .events = POLLIN };
        while (poll(fds, 2, r == -EBUSY ? 10 : -1) >= 0) { /* after a capture try again soon */
                if (fds[0].revents || r == -EBUSY)
                        r = bfc_poll(client);
                if (r < 0 && r != -EBUSY)
                        return failed("poll");
                if (fds[1].revents && read(STDIN_FILENO, line, sizeof(line)) <= 0)
                        break;
        }
        bfc_disconnect(client);
        return 0;
}
