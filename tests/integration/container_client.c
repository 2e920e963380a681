/* A job in a container, for check-containers.py and tests/kubernetes: prints what it gets, and what it reaches beside
 * the client socket. Then it waits for the end of its standard input, or uses its memory until there is a file.
 *
 * usage: container_client [MIB | PATH | until=FILE]...   a block of so many MiB; a socket, to which it tries to connect
 *
 * Exit status 1: there is no session, or what it had is lost.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <bfcclient.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { MAX_BLOCKS = 64, STEP_BYTES = 1 << 20, PERIOD_US = 50000 };

static struct block {
        char *start;
        size_t n_bytes;
} blocks[MAX_BLOCKS];
static size_t n_blocks;

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

/* What a block has at the beginning of each MiB. */
static uint64_t word_at(size_t block, size_t at)
{
        return UINT64_C(0x5a5a000000000000) | block << 40 | at;
}

static int fill(bfc_client *client, size_t i)
{
        for (size_t at = 0; at < blocks[i].n_bytes; at += STEP_BYTES) {
                uint64_t word = word_at(i, at);

                if (bfc_write(client, blocks[i].start + at, &word, sizeof(word)) < 0)
                        return -1;
        }
        return 0;
}

static void try_block(bfc_client *client, const char *mib)
{
        size_t n_bytes = (size_t)strtoul(mib, NULL, 10) << 20;
        void *block;

        if (n_blocks == MAX_BLOCKS || bfc_malloc(client, n_bytes, &block) < 0) {
                printf("refused: %s\n", bfc_last_error());
                return;
        }
        blocks[n_blocks] = (struct block){ block, n_bytes };
        if (fill(client, n_blocks) < 0) {
                printf("cannot write: %s\n", bfc_last_error());
                exit(1);
        }
        n_blocks++;
        printf("has %s\n", mib);
}

static int check(bfc_client *client)
{
        for (size_t i = 0; i < n_blocks; i++)
                for (size_t at = 0; at < blocks[i].n_bytes; at += STEP_BYTES) {
                        uint64_t word = 0;

                        if (bfc_read(client, &word, blocks[i].start + at, sizeof(word)) < 0) {
                                printf("lost: %s\n", bfc_last_error());
                                return -1;
                        }
                        if (word != word_at(i, at)) {
                                printf("lost: block %zu has %#llx at %zu\n", i, (unsigned long long)word, at);
                                return -1;
                        }
                }
        return 0;
}

/* Reads all blocks, and asks the daemon for one more: only a session that lives is granted or refused memory. */
static int use_until(bfc_client *client, const char *file)
{
        while (access(file, F_OK) < 0) {
                void *block;
                int r = bfc_malloc(client, STEP_BYTES, &block);

                if (r == 0)
                        r = bfc_free(client, block);
                if (r < 0 && r != -ENOMEM && r != -EDQUOT && r != -EBUSY) {
                        printf("lost: %s\n", bfc_last_error());
                        return -1;
                }
                if (check(client) < 0)
                        return -1;
                usleep(PERIOD_US);
        }
        return 0;
}

int main(int argc, char **argv)
{
        static const char until[] = "until=";
        const char *end = NULL;
        bfc_client *client;
        char byte;
        int r = 0;

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
                else if (strncmp(argv[i], until, sizeof(until) - 1) == 0)
                        end = argv[i] + sizeof(until) - 1;
                else
                        try_block(client, argv[i]);
        puts("waits");
        if (end)
                r = use_until(client, end);
        else
                while (read(STDIN_FILENO, &byte, 1) > 0)
                        ;
        bfc_disconnect(client);
        puts(r < 0 ? "failed" : "done");
        return r < 0;
}
