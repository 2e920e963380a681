/* A job in a container, for check-containers.py: prints what it gets, and what it reaches beside the client socket.
 * Then it waits for the end of its standard input.
 *
 * usage: container_client [MIB | PATH]...      a block of so many MiB; a socket, to which it tries to connect
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <bfcclient.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static void try_socket(const char *path)
{
        struct sockaddr_un address = { .sun_family = AF_UNIX };
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), r;

        snprintf(address.sun_path, sizeof(address.sun_path), "%s", path);
        r = fd < 0 ? -1 : connect(fd, (const struct sockaddr *)&address, sizeof(address));
        printf("%s: %s\n", path, r < 0 ? strerror(errno) : "connected");
        if (fd >= 0)
                close(fd);
}

static void try_block(bfc_client *client, const char *mib)
{
        size_t n_bytes = (size_t)strtoul(mib, NULL, 10) << 20;
        void *block;

        if (bfc_malloc(client, n_bytes, &block) < 0) {
                printf("refused: %s\n", bfc_last_error());
                return;
        }
        memset(block, 0x5a, n_bytes);
        printf("has %s\n", mib);
}

int main(int argc, char **argv)
{
        bfc_client *client;
        char byte;

        setvbuf(stdout, NULL, _IOLBF, 0);
        printf("uid %u pid %d\n", (unsigned)getuid(), (int)getpid());
        if (bfc_connect(NULL, &client) < 0) {
                printf("no session: %s\n", bfc_last_error());
                return 1;
        }
        printf("tenant %s\n", bfc_tenant(client));
        for (int i = 1; i < argc; i++)
                if (argv[i][0] == '/')
                        try_socket(argv[i]);
                else
                        try_block(client, argv[i]);
        puts("waits");
        while (read(STDIN_FILENO, &byte, 1) > 0)
                ;
        bfc_disconnect(client);
        puts("done");
        return 0;
}
