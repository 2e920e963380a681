/* Uses of parkable blocks; see bfcclient.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A use is counted before the block is woken: from then on nothing parks it, also no call that was about to. */
#include <errno.h>
#include <limits.h>

#include "client/client.h"
#include "client/park.h"

/* -EINVAL: there are too many. The lock is held. */
static int count_use(struct parkable *p)
{
        if (p->n_uses == UINT32_MAX)
                return error_set(-EINVAL, "the block at %p is in use too often",
                                 (void *)(uintptr_t)p->block->ptr);
        p->n_uses++;
        parkable_sort(p);
        return 0;
}

/* False: there is none. The lock is held. */
static bool end_use(bfc_client *client, const void *ptr)
{
        struct parkable *p = client_find_parkable(client, ptr);

        if (!p || p->n_uses == 0)
                return false;
        p->n_uses--;
        parkable_touch(p);
        return true;
}

void client_begin_copy(struct parkable *p)
{
        p->n_copies++;
        parkable_sort(p);
}

void client_end_copy(bfc_client *client, const void *ptr)
{
        struct parkable *p;

        pthread_mutex_lock(&client->lock);
        p = client_find_parkable(client, ptr);
        if (p && p->n_copies > 0) { /* else it was freed meanwhile */
                p->n_copies--;
                parkable_touch(p);
        }
        pthread_mutex_unlock(&client->lock);
}

/* 0: all are counted. An error: none. The lock is held. */
static int count_uses(bfc_client *client, const struct block_set *set)
{
        for (size_t i = 0; i < set->n; i++) {
                struct parkable *p = client_find_parkable(client, set->ptrs[i]);
                int r = set->skips_others ? 0 : -ENOENT;

                if (p)
                        r = count_use(p);
                if (r < 0) {
                        while (i-- > 0)
                                (void)end_use(client, set->ptrs[i]);
                        return r;
                }
        }
        return 0;
}

static void end_uses(bfc_client *client, const struct block_set *set)
{
        pthread_mutex_lock(&client->lock);
        for (size_t i = 0; i < set->n; i++)
                (void)end_use(client, set->ptrs[i]);
        pthread_mutex_unlock(&client->lock);
}

static int use_set(bfc_client *client, const struct block_set *set, uint32_t wait_ms)
{
        int r = client_wake_set(client, set, wait_ms, NULL);

        if (r < 0)
                end_uses(client, set);
        return r;
}

BFC_API int bfc_use_begin(bfc_client *client, void *ptr, uint32_t wait_ms)
{
        const void *ptrs[1] = { ptr };
        const struct block_set set = { ptrs, 1, false };
        bool is_awake = false;
        int r = client_check(client);

        if (r < 0)
                return r;
        pthread_mutex_lock(&client->lock);
        r = count_uses(client, &set);
        if (r == 0) {
                const struct parkable *p = client_find_parkable(client, ptr);

                is_awake = !p->is_busy && !p->block->is_parked;
        }
        pthread_mutex_unlock(&client->lock);
        if (r == -ENOENT)
                return client_not_parkable(client, ptr);
        return r < 0 || is_awake ? r : use_set(client, &set, wait_ms);
}

BFC_API int bfc_use_end(bfc_client *client, void *ptr)
{
        const struct parkable *p;
        int r = client_check(client);
        bool was_used;

        if (r < 0)
                return r;
        pthread_mutex_lock(&client->lock);
        was_used = end_use(client, ptr);
        p = client_find_parkable(client, ptr);
        pthread_mutex_unlock(&client->lock);
        if (was_used)
                return 0;
        return p ? error_set(-EINVAL, "the block at %p is not in use", ptr)
                 : client_not_parkable(client, ptr);
}

/* One that a call is freeing counts as awake: it is skipped. The lock is held. */
static bool are_awake(bfc_client *client, const struct block_set *set)
{
        for (size_t i = 0; i < set->n; i++) {
                const struct parkable *p = client_find_parkable(client, set->ptrs[i]);

                if (p && (p->is_busy || p->block->is_parked))
                        return false;
        }
        return true;
}

/* Their begin is announced, or over. Some may have been freed meanwhile. The lock is held. */
static void note_begins(bfc_client *client, const struct block_set *set, bool is_over)
{
        for (size_t i = 0; i < set->n; i++) {
                struct parkable *p = client_find_parkable(client, set->ptrs[i]);

                if (p && !is_over)
                        p->n_begins++;
                else if (p && p->n_begins > 0)
                        p->n_begins--;
        }
}

/* Counts a use of each if all are awake now. 0: it did. 1: they are to be woken. */
static int begin_all(bfc_client *client, const char *tag, struct block_set *ret)
{
        int r;

        pthread_mutex_lock(&client->lock);
        r = client_find_tagged(client, UINT32_MAX, tag, ret);
        if (r == 0)
                r = are_awake(client, ret) ? count_uses(client, ret) : 1;
        if (r == 1)
                note_begins(client, ret, false);
        pthread_mutex_unlock(&client->lock);
        return r;
}

/* No use is counted before all are awake: blocks that wait for others of their group can be parked for those that
 * waited longer. Else two groups that need more than there is could each keep a part for ever. */
BFC_API int bfc_use_begin_tag(bfc_client *client, const char *tag, uint32_t wait_ms)
{
        int64_t until_ms = clock_now_ms() + wait_ms, left_ms;
        struct block_set set = { .ptrs = NULL };
        int r = client_check(client);

        if (r < 0)
                return r;
        for (left_ms = wait_ms; (r = begin_all(client, tag, &set)) == 1;
             left_ms = until_ms - clock_now_ms()) {
                r = client_wake_set(client, &set, left_ms > 0 ? (uint32_t)left_ms : 0, NULL);
                pthread_mutex_lock(&client->lock);
                note_begins(client, &set, true);
                pthread_mutex_unlock(&client->lock);
                block_set_clear(&set);
                if (r < 0)
                        return r;
        }
        block_set_clear(&set);
        return r;
}

BFC_API int bfc_use_end_tag(bfc_client *client, const char *tag)
{
        struct block_set set = { .ptrs = NULL };
        int r = client_check(client);

        if (r < 0)
                return r;
        pthread_mutex_lock(&client->lock);
        r = client_find_tagged(client, UINT32_MAX, tag, &set);
        pthread_mutex_unlock(&client->lock);
        if (r == 0)
                end_uses(client, &set);
        block_set_clear(&set);
        return r;
}
