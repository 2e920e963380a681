/* A program that has memory of bfcd and calls nothing of CUDA, under bfcctl run with a limit of 32 MiB; see test_preload.c.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * usage: library_only one|threads|fork|refused|off|restart FOLDER|reset */
#include <bfcclient.h>
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB       ((size_t)1 << 20)
#define N_THREADS 8

#define CHECK(condition)                                                                                     \
        do {                                                                                                 \
                if (!(condition)) {                                                                          \
                        fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition,                   \
                                bfc_last_error());                                                           \
                        _exit(1);                                                                            \
                }                                                                                            \
        } while (0)

static bfc_client *connect_one(void)
{
        bfc_client *client;

        CHECK(bfc_connect(NULL, &client) == 0);
        return client;
}

/* Of the lease. */
static size_t charged_bytes(bfc_client *client)
{
        struct bfc_tenant_usage usage = { .struct_size = sizeof(usage) };

        CHECK(bfc_usage(client, NULL, &usage) == 0);
        return usage.bytes_direct;
}

static void *have_block(bfc_client *client)
{
        void *block;

        CHECK(bfc_malloc(client, 256, &block) == 0);
        return block;
}

/* So many contexts of 4 MiB. For each the proxy may have charged 4 MiB that are not in use; one that was charged twice would
 * have 10 MiB or more. */
static void has_contexts(bfc_client *client, size_t n)
{
        size_t n_bytes = charged_bytes(client);

        if (n_bytes < n * 4 * MIB || n_bytes > n * 8 * MIB)
                fprintf(stderr, "%zu bytes are charged\n", n_bytes);
        CHECK(n_bytes >= n * 4 * MIB && n_bytes <= n * 8 * MIB);
}

static void have_one(void)
{
        bfc_client *client = connect_one(), *other = connect_one();

        CHECK(charged_bytes(client) == 0);
        (void)have_block(client);
        has_contexts(client, 1);
        (void)have_block(other);
        CHECK(bfc_malloc_async(other, 4096, 0, (void *[]){ NULL }) == 0);
        has_contexts(other, 1);
        bfc_disconnect(other);
        has_contexts(client, 1);
}

static void *be_thread(void *barrier)
{
        bfc_client *client;

        pthread_barrier_wait(barrier);
        client = connect_one();
        (void)have_block(client);
        return client;
}

static void have_threads(void)
{
        pthread_t threads[N_THREADS];
        pthread_barrier_t barrier;
        void *client = NULL;

        pthread_barrier_init(&barrier, NULL, N_THREADS);
        for (size_t i = 0; i < N_THREADS; i++)
                CHECK(pthread_create(&threads[i], NULL, be_thread, &barrier) == 0);
        for (size_t i = 0; i < N_THREADS; i++)
                CHECK(pthread_join(threads[i], &client) == 0);
        has_contexts(client, 1);
}

/* The child is made before CUDA is used. A later one has no CUDA, and no memory. */
static void have_children(void)
{
        int to_child[2], status;
        bfc_client *client;
        void *block;
        char byte;
        pid_t pid;

        CHECK(pipe(to_child) == 0);
        pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
                CHECK(read(to_child[0], &byte, 1) == 1);
                client = connect_one();
                (void)have_block(client);
                has_contexts(client, 2);
                _exit(0);
        }
        client = connect_one();
        (void)have_block(client);
        has_contexts(client, 1);
        CHECK(write(to_child[1], "", 1) == 1);
        CHECK(waitpid(pid, &status, 0) == pid && status == 0);
        for (int i = 0; charged_bytes(client) >= 8 * MIB; i++) { /* it ended with the process */
                CHECK(i < 6000);
                usleep(10000);
        }
        pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
                client = connect_one();
                CHECK(bfc_malloc(client, 256, &block) == -ENODEV);
                _exit(0);
        }
        CHECK(waitpid(pid, &status, 0) == pid && status == 0);
        has_contexts(client, 1);
}

static void be_refused(void)
{
        bfc_client *client = connect_one();
        void *block;

        for (int i = 0; i < 2; i++) {
                CHECK(bfc_malloc(client, 256, &block) == -ENOMEM);
                CHECK(strstr(bfc_last_error(), "there is no room for this process's CUDA context on device"));
        }
        CHECK(bfc_malloc_async(client, 256, 0, &block) == -ENOMEM);
        CHECK(bfc_attach(client, "none", 0, &block, NULL) == -ENOMEM);
        CHECK(charged_bytes(client) == 0);
}

static void have_none_charged(void)
{
        bfc_client *client = connect_one();

        (void)have_block(client);
        CHECK(charged_bytes(client) == 0);
}

/* Waits until the daemon was restarted. */
static void outlive_restarts(const char *folder)
{
        bfc_client *client = connect_one();
        char path[256];
        FILE *f;

        (void)have_block(client);
        has_contexts(client, 1);
        snprintf(path, sizeof(path), "%s/has-context", folder);
        f = fopen(path, "w");
        CHECK(f && fclose(f) == 0);
        while (access(path, F_OK) == 0)
                usleep(10000);
        (void)have_block(client);
        has_contexts(client, 1);
}

/* The charge ends with the context. */
static void reset_device(void)
{
        void *proxy = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        bfc_client *client = connect_one();
        int (*reset)(int device);

        CHECK(proxy);
        *(void **)&reset = dlsym(proxy, "cuDevicePrimaryCtxReset_v2");
        CHECK(reset);
        for (int i = 0; i < 3; i++) {
                (void)have_block(client);
                has_contexts(client, 1);
                CHECK(reset(0) == 0);
                CHECK(charged_bytes(client) < 4 * MIB);
                bfc_disconnect(client);
                client = connect_one();
        }
}

int main(int argc, char **argv)
{
        const char *name = argc > 1 ? argv[1] : "";

        if (strcmp(name, "one") == 0)
                have_one();
        else if (strcmp(name, "threads") == 0)
                have_threads();
        else if (strcmp(name, "fork") == 0)
                have_children();
        else if (strcmp(name, "refused") == 0)
                be_refused();
        else if (strcmp(name, "off") == 0)
                have_none_charged();
        else if (strcmp(name, "restart") == 0 && argc > 2)
                outlive_restarts(argv[2]);
        else if (strcmp(name, "reset") == 0)
                reset_device();
        else
                return 2;
        return 0;
}
