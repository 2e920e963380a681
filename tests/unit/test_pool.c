/* Pools: pieces, from many threads too; full, reset, given back; and in a forked child.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <bfcclient.h>
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/suite.h"
#include "tests/unit/server_rig.h"

static void setup(void)
{
        server_start(NULL);
        client = open_client(0, 0, 0);
}

static void teardown(void)
{
        ck_assert_uint_eq(stats().num_blocks, 0);
        server_end();
}

FIXTURE(all, setup, teardown);

static bfc_pool *new_pool(size_t n_bytes)
{
        bfc_pool *pool = NULL;

        ck_assert_msg(bfc_pool_new(client, n_bytes, &pool) == 0, "%s", bfc_last_error());
        return pool;
}

static unsigned char *piece_of(bfc_pool *pool, size_t n_bytes)
{
        void *ptr = NULL;

        ck_assert_msg(bfc_pool_alloc(pool, n_bytes, &ptr) == 0, "%s", bfc_last_error());
        ck_assert_uint_eq((uintptr_t)ptr % 256, 0);
        return ptr;
}

TEST(pieces_until_it_is_full)
{
        bfc_pool *pool = new_pool(64 * KIB - 100); /* rounded up */
        struct bfc_client_stats s = { .struct_size = sizeof(s) };
        unsigned char *a = piece_of(pool, 1), *b = piece_of(pool, 257), *c = piece_of(pool, 63 * KIB);
        void *no = &s;

        ck_assert_ptr_eq(b, a + 256);
        ck_assert_ptr_eq(c, b + 512);
        memset(a, 1, 256);
        memset(b, 2, 512);
        memset(c, 3, 63 * KIB);
        ck_assert_uint_eq(a[255], 1);
        ck_assert_uint_eq(b[511], 2);
        ck_assert_int_eq(bfc_pool_alloc(pool, 257, &no), -ENOMEM);
        ck_assert_ptr_eq(no, &s);
        ck_assert_str_eq(bfc_last_error(),
                         "257 bytes do not fit in the pool: its size is 65536 bytes, and 65280 bytes "
                         "are used");
        piece_of(pool, 256); /* what is left */
        ck_assert_int_eq(bfc_pool_alloc(pool, 1, &no), -ENOMEM);
        ck_assert_int_eq(bfc_stats(client, &s), 0);
        ck_assert_uint_eq(s.num_allocs, 1); /* it asks once, and for all */
        ck_assert_int_eq(bfc_pool_reset(pool), 0);
        ck_assert_ptr_eq(piece_of(pool, 64 * KIB), a);
        ck_assert_int_eq(bfc_pool_free(pool), 0);
}

TEST(wrong_use)
{
        bfc_pool *pool = NULL;
        void *ptr = NULL;

        ck_assert_int_eq(bfc_pool_new(NULL, 1, &pool), -EINVAL);
        ck_assert_int_eq(bfc_pool_new(client, 1, NULL), -EINVAL);
        ck_assert_int_eq(bfc_pool_new(client, 0, &pool), -EINVAL);
        ck_assert_ptr_null(pool);
        ck_assert_int_eq(bfc_pool_alloc(NULL, 1, &ptr), -EINVAL);
        ck_assert_int_eq(bfc_pool_reset(NULL), -EINVAL);
        ck_assert_int_eq(bfc_pool_free(NULL), 0);
        fake_server_set_mood(server, FAKE_REFUSE, 0);
        ck_assert_int_eq(bfc_pool_new(client, KIB, &pool), -EDQUOT);
        fake_server_set_mood(server, FAKE_GOOD, 0);
        pool = new_pool(1);
        ck_assert_int_eq(bfc_pool_alloc(pool, 0, &ptr), -EINVAL);
        ck_assert_int_eq(bfc_pool_alloc(pool, 1, NULL), -EINVAL);
        ck_assert_int_eq(bfc_pool_alloc(pool, SIZE_MAX, &ptr), -ENOMEM);
        ck_assert_int_eq(bfc_pool_alloc(pool, SIZE_MAX - 255, &ptr), -ENOMEM);
        ck_assert_ptr_null(ptr);
        ck_assert_int_eq(bfc_free(client, piece_of(pool, 256) + 1), -EINVAL);
        ck_assert_int_eq(bfc_pool_free(pool), 0);
}

/* ---- threads -------------------------------------------------------------- */

enum { N_THREADS = 4, N_PIECES = 1000 };

struct part {
        bfc_pool *pool;
        unsigned char *pieces[N_PIECES];
        unsigned char mark;
};

static void *take_pieces(void *userdata)
{
        struct part *part = userdata;
        void *ptr;

        for (int i = 0; i < N_PIECES; i++) {
                if (bfc_pool_alloc(part->pool, 300, &ptr) < 0)
                        return "an alloc failed";
                memset(ptr, part->mark, 512);
                part->pieces[i] = ptr;
        }
        return NULL;
}

static bool all_bytes_are(const unsigned char *bytes, unsigned char value, size_t n_bytes)
{
        return bytes[0] == value && memcmp(bytes, bytes + 1, n_bytes - 1) == 0;
}

TEST(many_threads)
{
        static struct part parts[N_THREADS];
        bfc_pool *pool = new_pool(N_THREADS * N_PIECES * 512); /* every byte of it is taken */
        pthread_t threads[N_THREADS];
        void *why;

        for (int i = 0; i < N_THREADS; i++) {
                parts[i].pool = pool;
                parts[i].mark = (unsigned char)(i + 1);
                ck_assert_int_eq(pthread_create(&threads[i], NULL, take_pieces, &parts[i]), 0);
        }
        for (int i = 0; i < N_THREADS; i++) {
                pthread_join(threads[i], &why);
                ck_assert_msg(!why, "%s", (const char *)why);
        }
        for (int i = 0; i < N_THREADS; i++)
                for (int j = 0; j < N_PIECES; j++)
                        ck_assert(all_bytes_are(parts[i].pieces[j], parts[i].mark, 512));
        ck_assert_int_eq(bfc_pool_free(pool), 0);
}

TEST(forked_child_does_not_use_the_pool)
{
        bfc_pool *pool = new_pool(KIB);
        int status;
        pid_t pid;

        wait_until_others_sleep();
        pid = fork();
        if (pid == 0) {
                void *ptr;

                _exit(bfc_pool_alloc(pool, 1, &ptr) == -ECHILD && bfc_pool_reset(pool) == -ECHILD &&
                                      bfc_pool_free(pool) == -ECHILD
                              ? 0
                              : 1);
        }
        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        ck_assert_int_eq(status, 0);
        memset(piece_of(pool, KIB), 7, KIB);
        ck_assert_int_eq(bfc_pool_free(pool), 0);
}
