/* Park and wake; see park.h and bfcclient.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A block that is being parked or woken is marked as leaving, so that no other call finds it, and as busy: calls
 * that need it wait for the end. It stays mapped until the daemon has answered: if the daemon refuses, nothing
 * has changed. A call takes all its blocks at once, when none of them is busy, so calls do not wait for each
 * other. After a restart of the daemon the requests are repeated; the daemon answers them also if it had carried
 * them out. */
#include "client/park.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>

#include "client/client.h"
#include "client/session.h"

/* ---- finding ------------------------------------------------------------------- */

static size_t n_partitions(const bfc_client *client)
{
        return client->hello->hello->n_partitions;
}

struct parkable *client_find_busy(const bfc_client *client, const void *ptr)
{
        struct parkable *p = NULL;

        for (size_t i = 0; !p && i < n_partitions(client); i++)
                p = parkables_find_busy(&client->partitions[i].parkables, ptr);
        return p;
}

/* Of a block that is in the table and not leaving, or one that is parked or woken now. NULL: there is none,
 * or it is not parkable. The lock is held. */
static struct parkable *client_find_parkable(bfc_client *client, const void *ptr)
{
        const struct block *block = blocks_find(&client->blocks, ptr);
        struct parkable *p = block ? block->parkable : client_find_busy(client, ptr);

        return p && p->block->ptr == ptr ? p : NULL;
}

/* Why there is none: sets the message. */
static int client_not_parkable(bfc_client *client, const void *ptr)
{
        bool is_block;

        pthread_mutex_lock(&client->lock);
        is_block = blocks_find(&client->blocks, ptr) != NULL;
        pthread_mutex_unlock(&client->lock);
        if (!is_block)
                return error_set(-EINVAL, "%p is not a block of this client, or another call is using it",
                                 ptr);
        return error_set(-EINVAL, "the block at %p was not allocated with BFC_PARKABLE", ptr);
}

static size_t add_tagged(const struct parkable_list *list, const char *tag, const void **ret)
{
        const struct parkable *p;
        size_t n = 0;

        TAILQ_FOREACH(p, list, link)
        {
                if (!parkable_has_tag(p, tag))
                        continue;
                if (ret)
                        ret[n] = p->block->ptr;
                n++;
        }
        return n;
}

static size_t list_tagged(const bfc_client *client, uint32_t partition, const char *tag, const void **ret)
{
        size_t n = 0;

        for (size_t i = 0; i < n_partitions(client); i++) {
                const struct parkables *s = &client->partitions[i].parkables;

                if (partition != UINT32_MAX && i != partition)
                        continue;
                n += add_tagged(&s->others, tag, ret ? ret + n : NULL);
                n += add_tagged(&s->idle, tag, ret ? ret + n : NULL);
        }
        return n;
}

/* The parkable blocks with a tag, in all partitions (UINT32_MAX) or one. -ENOMEM with a message. The lock is
 * held. */
static int client_find_tagged(bfc_client *client, uint32_t partition, const char *tag, struct block_set *ret)
{
        size_t n = list_tagged(client, partition, tag, NULL);
        const void **ptrs = calloc(n + 1, sizeof(*ptrs));

        if (!ptrs)
                return error_no_memory();
        *ret = (struct block_set){ ptrs, n, true };
        (void)list_tagged(client, partition, tag, ptrs);
        return 0;
}

static void block_set_clear(struct block_set *s)
{
        free(s->ptrs);
        *s = (struct block_set){ .ptrs = NULL };
}

/* ---- taking turns ---------------------------------------------------------------- */

bool client_wait_parkable(bfc_client *client, const void *ptr)
{
        if (!client_find_busy(client, ptr))
                return false;
        condition_wait(&client->changed, &client->lock, -1);
        return true;
}

/* Waits for the end of the call that has this block. A call that waits for room is waited for only until the
 * time: -EBUSY. The lock is held. */
static int wait_for(bfc_client *client, const struct parkable *p, int64_t until_ms)
{
        const void *ptr = p->block->ptr;

        if (!p->waits)
                condition_wait(&client->changed, &client->lock, -1);
        else if (clock_now_ms() < until_ms)
                condition_wait(&client->changed, &client->lock, until_ms);
        else
                return error_set(-EBUSY, "another call waits for room for the block at %p", ptr);
        return 0;
}

/* The lock is held. */
static void take(bfc_client *client, struct parkable *p, bool waits, struct block *ret)
{
        (void)blocks_leave(&client->blocks, p->block->ptr, ret);
        p->is_busy = true;
        p->waits = waits;
        parkable_sort(p);
}

static void give_back(bfc_client *client, const struct block *block, bool is_parked)
{
        struct parkable *p = block->parkable;

        pthread_mutex_lock(&client->lock);
        blocks_stay(&client->blocks, block->ptr);
        blocks_set_parked(&client->blocks, block->ptr, is_parked);
        p->is_busy = false;
        if (block->is_parked && !is_parked)
                parkable_touch(p);
        else
                parkable_sort(p);
        pthread_cond_broadcast(&client->changed);
        pthread_mutex_unlock(&client->lock);
}

/* ---- park ------------------------------------------------------------------------ */

struct park_how {
        unsigned how; /* BFC_BACKUP, BFC_DISCARD */
        uint32_t to;
        const int64_t *used_ms; /* only if it is idle, and was not used after that; NULL */
};

/* How it may be parked: a partition for the copy. */
static int read_how(bfc_client *client, unsigned how, const char *partition, struct park_how *ret)
{
        int r;

        *ret = (struct park_how){ .how = how };
        if (how == BFC_DISCARD)
                return 0;
        if (how != BFC_BACKUP)
                return error_set(-EINVAL, "bfc_park: how is neither BFC_BACKUP nor BFC_DISCARD");
        if (!partition)
                return error_set(-EINVAL, "bfc_park: a backup needs the name of a partition");
        r = client_partition_index(client, partition, &ret->to);
        if (r == 0 && client->places[ret->to].is_cuda)
                r = error_set(-EINVAL, "partition '%s' is on a GPU: blocks are parked in host memory",
                              partition);
        return r;
}

static int send_park(bfc_client *client, const struct block *block, const struct park_how *how)
{
        Bfcd__Request request = BFCD__REQUEST__INIT;
        Bfcd__Park body = BFCD__PARK__INIT;
        Bfcd__Reply *reply = NULL;
        uint64_t epoch;
        int r;

        body.block_id = block->block_id;
        body.discard = how->how == BFC_DISCARD;
        body.partition = how->to;
        request.body_case = BFCD__REQUEST__BODY_PARK;
        request.park = &body;
        r = client_request(client, NULL, &request, BFCD__REPLY__BODY_DONE, &reply, &epoch);
        if (r == 0)
                bfcd__reply__free_unpacked(reply, NULL);
        return r;
}

/* With BFC_POLL no thread answers the Retires of what was parked. Only for calls of the program. */
static void look_at_events(bfc_client *client)
{
        if (events_fd(client->events) >= 0)
                (void)events_poll(client->events);
}

enum { NOT_PARKABLE = 1, IS_PARKED, IS_USED };

static int take_to_park(bfc_client *client, const void *ptr, const struct park_how *how, struct block *ret)
{
        struct parkable *p;

        /* Another call may free the block while this one waits, so it is looked up again. */
        while ((p = client_find_parkable(client, ptr)) && p->is_busy)
                if (wait_for(client, p, 0) < 0)
                        return IS_USED;
        if (!p)
                return NOT_PARKABLE;
        if (p->block->is_parked)
                return IS_PARKED;
        if (parkable_is_used(p) || (how->used_ms && (!p->is_idle || p->used_ms != *how->used_ms)))
                return IS_USED;
        take(client, p, false, ret);
        return 0;
}

/* -ESRCH: it is no parkable block. The message of any other error is set. */
static int park_block(bfc_client *client, const void *ptr, const struct park_how *how, uint64_t *ret_bytes)
{
        struct device_range *range = NULL;
        struct block block;
        int r;

        /* No other call can find the block from here on. */
        pthread_mutex_lock(&client->lock);
        r = take_to_park(client, ptr, how, &block);
        if (r == 0)
                range = regions_range(&client->regions, block.region_id);
        pthread_mutex_unlock(&client->lock);
        if (r == NOT_PARKABLE)
                return -ESRCH;
        if (r == IS_PARKED)
                return error_set(-EALREADY, "the block at %p is parked already", ptr);
        if (r == IS_USED)
                return error_set(-EBUSY, "the block at %p is in use", ptr);

        /* The daemon copies what the queued work of this process has written by then. */
        r = client_finish(client, block.partition, range);
        if (r == 0)
                r = send_park(client, &block, how);

        /* The block is unmapped only now, so that a refusal leaves it as it was. What the driver refuses to
         * unmap is unmapped at the daemon's Retire. */
        if (r == 0) {
                pthread_mutex_lock(&client->lock);
                client->n_unretired +=
                        regions_unmap_all_in(&client->regions, block.region_id, block.offset, block.n_bytes);
                pthread_mutex_unlock(&client->lock);
                *ret_bytes += block.n_bytes;
        }
        give_back(client, &block, r == 0);
        return r;
}

BFC_API int bfc_park(bfc_client *client, void *ptr, unsigned how, const char *partition)
{
        struct park_how park;
        uint64_t n_bytes = 0;
        int r = client_check(client);

        if (r == 0)
                r = read_how(client, how, partition, &park);
        if (r == 0)
                r = park_block(client, ptr, &park, &n_bytes);
        if (r == -ESRCH)
                r = client_not_parkable(client, ptr);
        if (r == 0)
                look_at_events(client);
        return r;
}

BFC_API int bfc_park_tag(bfc_client *client, const char *tag, unsigned how, const char *partition)
{
        struct block_set set = { .ptrs = NULL };
        char why[256] = "";
        struct park_how park;
        uint64_t n_bytes = 0;
        int r = client_check(client);

        if (r == 0)
                r = read_how(client, how, partition, &park);
        if (r < 0)
                return r;

        /* The addresses are copied, because each park releases the lock. A block in use does not keep the others
         * from being parked. */
        pthread_mutex_lock(&client->lock);
        r = client_find_tagged(client, UINT32_MAX, tag, &set);
        pthread_mutex_unlock(&client->lock);
        for (size_t i = 0; r == 0 && i < set.n; i++) {
                r = park_block(client, set.ptrs[i], &park, &n_bytes);
                if (r == -EBUSY && !*why)
                        snprintf(why, sizeof(why), "%s", bfc_last_error());
                if (r == -EBUSY || r == -EALREADY || r == -ESRCH) /* the last: it was freed meanwhile */
                        r = 0;
        }
        block_set_clear(&set);
        look_at_events(client);
        return r == 0 && *why ? error_set(-EBUSY, "%s; the other blocks were parked", why) : r;
}

/* ---- park what is idle ------------------------------------------------------------- */

struct idle_block {
        const void *ptr;
        int64_t used_ms;
};

/* Those that come into question now. */
static size_t list_idle(const bfc_client *client, uint32_t partition, int64_t until_ms, const char *tag,
                        bool is_own, struct idle_block *ret)
{
        const struct parkable *p;
        size_t n = 0;

        TAILQ_FOREACH(p, &client->partitions[partition].parkables.idle, link)
        {
                if (p->used_ms > until_ms)
                        break;
                if (!parkable_has_tag(p, tag) || (is_own && p->n_begins > 0))
                        continue;
                if (ret)
                        ret[n] = (struct idle_block){ p->block->ptr, p->used_ms };
                n++;
        }
        return n;
}

int client_park_idle(bfc_client *client, uint32_t partition, uint64_t n_bytes, uint32_t idle_ms, uint32_t to,
                     const char *tag, bool is_own, uint64_t *ret_bytes)
{
        int64_t until_ms = clock_now_ms() - idle_ms;
        struct idle_block *found;
        size_t n;
        int r = 0, result = 0;

        /* The list has the last use of each block: one that is used after this look is not parked. */
        *ret_bytes = 0;
        pthread_mutex_lock(&client->lock);
        n = list_idle(client, partition, until_ms, tag, is_own, NULL);
        found = calloc(n + 1, sizeof(*found));
        if (found)
                (void)list_idle(client, partition, until_ms, tag, is_own, found);
        pthread_mutex_unlock(&client->lock);
        if (!found)
                return error_no_memory();
        for (size_t i = 0; i < n && *ret_bytes < n_bytes; i++) {
                const struct park_how how = { BFC_BACKUP, to, &found[i].used_ms };

                r = park_block(client, found[i].ptr, &how, ret_bytes);
                if (r == -EBUSY || r == -EALREADY || r == -ESRCH) /* it was used, parked or freed meanwhile */
                        continue;
                result = r;
                if (r < 0)
                        break;
        }
        free(found);
        return result;
}

/* ---- wake ------------------------------------------------------------------------ */

/* The memory is mapped again, at the same address. Frees the reply. 1: the answer is of an earlier epoch, and
 * dropped. */
static int take_woken(bfc_client *client, const struct block *block, Bfcd__Reply *reply, uint64_t epoch)
{
        bool is_stale;
        void *ptr = NULL;
        int why = 0, r = client_check_reply(reply, BFCD__REPLY__BODY_BLOCK);

        if (r < 0)
                return r;
        pthread_mutex_lock(&client->lock);
        is_stale = epoch != client->epoch;
        r = is_stale ? 0 : client_resolve(client, reply->block, &why, &ptr);
        pthread_mutex_unlock(&client->lock);
        bfcd__reply__free_unpacked(reply, NULL);
        if (is_stale)
                return 1;
        if (why < 0)
                return client_unmappable(client, block->partition, why);
        return r == 0 && ptr == block->ptr
                       ? 0
                       : error_set(-EPROTO, "the daemon returned the block at an invalid place");
}

/* Blocks that are woken together: their requests take consecutive places in the daemon's queue. */
struct wakes {
        struct block *blocks;
        int *results; /* 1: not woken yet */
        size_t n;
        struct client_call call;
        struct call_interrupt interrupt; /* of a wait */
        uint32_t wait_ms;
        uint64_t *ids;
        Bfcd__Reply **replies;
        Bfcd__Wake *bodies;
        Bfcd__Request *requests, **pointers;
};

#define WAKES_A_REQUEST 64u

static void wakes_clear(struct wakes *w)
{
        free(w->blocks);
        free(w->results);
        free(w->ids);
        free(w->replies);
        free(w->bodies);
        free(w->requests);
        free(w->pointers);
}

/* For as many blocks. -ENOMEM with a message. */
static int wakes_init(struct wakes *w, size_t n, uint32_t wait_ms)
{
        size_t n_requests = n / WAKES_A_REQUEST + 1;

        *w = (struct wakes){ .wait_ms = wait_ms,
                             .call.interrupt = wait_ms > 0 ? &w->interrupt : NULL,
                             .interrupt.cancel_fd = -1,
                             .blocks = calloc(n + 1, sizeof(*w->blocks)),
                             .results = calloc(n + 1, sizeof(*w->results)),
                             .ids = calloc(n + 1, sizeof(*w->ids)),
                             .replies = calloc(n + 1, sizeof(Bfcd__Reply *)),
                             .bodies = calloc(n_requests, sizeof(*w->bodies)),
                             .requests = calloc(n_requests, sizeof(*w->requests)),
                             .pointers = calloc(n_requests, sizeof(Bfcd__Request *)) };
        if (w->blocks && w->results && w->ids && w->replies && w->bodies && w->requests && w->pointers)
                return 0;
        wakes_clear(w);
        return error_no_memory();
}

/* For those that are not woken yet, so many. Returns the number of requests. */
static size_t wakes_fill(struct wakes *w, size_t *ret_n_ids)
{
        size_t n_ids = 0, n = 0;

        for (size_t i = 0; i < w->n; i++)
                if (w->results[i] == 1)
                        w->ids[n_ids++] = w->blocks[i].block_id;
        for (size_t i = 0; i < n_ids; i += WAKES_A_REQUEST, n++) {
                bfcd__wake__init(&w->bodies[n]);
                bfcd__request__init(&w->requests[n]);
                w->bodies[n].block_ids = w->ids + i;
                w->bodies[n].n_block_ids = n_ids - i < WAKES_A_REQUEST ? n_ids - i : WAKES_A_REQUEST;
                w->bodies[n].wait_ms = w->wait_ms;
                w->requests[n].body_case = BFCD__REQUEST__BODY_WAKE;
                w->requests[n].wake = &w->bodies[n];
                w->pointers[n] = &w->requests[n];
        }
        for (size_t i = 0; i < n_ids; i++)
                w->replies[i] = NULL;
        *ret_n_ids = n_ids;
        return n;
}

/* Fills the results: 0, or an error with a message. */
static void wakes_send(bfc_client *client, struct wakes *w)
{
        size_t n_ids, n_requests;

        for (size_t i = 0; i < w->n; i++)
                w->results[i] = 1;

        /* One round, and another one after each restart of the daemon, with what is not answered yet. */
        while ((n_requests = wakes_fill(w, &n_ids)) > 0) {
                uint64_t epoch = 0;
                size_t n = 0;
                int r = client_request_wakes(client, &w->call, w->pointers, n_requests, n_ids, w->replies,
                                             &epoch);

                for (size_t i = 0; i < w->n; i++)
                        if (w->results[i] == 1)
                                w->results[i] =
                                        r < 0 ? r : take_woken(client, &w->blocks[i], w->replies[n++], epoch);

                /* What is not woken stays parked. */
                for (size_t i = 0; w->interrupt.is_interrupted && i < w->n; i++)
                        if (w->results[i] == 1 || w->results[i] == -ECANCELED)
                                w->results[i] = client_interrupted();
        }
}

/* 0: none of the set is busy. 1: look again. The lock is held. */
static int check_set(bfc_client *client, const struct block_set *set, int64_t until_ms)
{
        for (size_t i = 0; i < set->n; i++) {
                struct parkable *p = client_find_parkable(client, set->ptrs[i]);

                if (p && p->is_busy) { /* during the wait, calls may take those before it */
                        int r = wait_for(client, p, until_ms);

                        return r < 0 ? r : 1;
                }
                if (!p && !set->skips_others)
                        return -ENOENT;
        }
        return 0;
}

/* The parked ones of the set, when no other call has any of it. */
static int take_to_wake(bfc_client *client, const struct block_set *set, uint32_t wait_ms, struct block *ret,
                        size_t *ret_n)
{
        int64_t until_ms = clock_now_ms() + wait_ms;
        size_t n = 0;
        int r;

        while ((r = check_set(client, set, until_ms)) == 1)
                ;
        for (size_t i = 0; r == 0 && i < set->n; i++) {
                struct parkable *p = client_find_parkable(client, set->ptrs[i]);

                if (p && p->block->is_parked && !p->is_busy)
                        take(client, p, wait_ms > 0, &ret[n++]);
        }
        *ret_n = n;
        return r;
}

int client_wake_set(bfc_client *client, const struct block_set *set, uint32_t wait_ms, uint64_t *ret_bytes)
{
        uint64_t n_bytes = 0;
        struct wakes w;
        int r = wakes_init(&w, set->n, wait_ms);

        if (r < 0)
                return r;

        /* All or none of the set are taken, so two calls never wait for each other's blocks. */
        pthread_mutex_lock(&client->lock);
        r = take_to_wake(client, set, wait_ms, w.blocks, &w.n);
        pthread_mutex_unlock(&client->lock);
        if (r == -ENOENT)
                r = client_not_parkable(client, set->ptrs[0]);

        /* Each block has its own result: those that woke stay awake when others are refused. */
        wakes_send(client, &w);
        for (size_t i = 0; i < w.n; i++) {
                give_back(client, &w.blocks[i], w.results[i] < 0);
                n_bytes += w.results[i] < 0 ? 0 : w.blocks[i].n_bytes;
                r = w.results[i] < 0 ? w.results[i] : r;
        }
        wakes_clear(&w);
        if (ret_bytes)
                *ret_bytes = n_bytes;
        return r;
}

BFC_API int bfc_wake(bfc_client *client, void *ptr, uint32_t wait_ms)
{
        const void *ptrs[1] = { ptr };
        const struct block_set set = { ptrs, 1, false };
        int r = client_check(client);

        if (r < 0)
                return r;
        look_at_events(client);
        return client_wake_set(client, &set, wait_ms, NULL);
}

int client_wake_all(bfc_client *client, uint32_t partition, const char *tag, uint32_t wait_ms,
                    uint64_t *ret_bytes)
{
        struct block_set set = { .ptrs = NULL };
        int r;

        *ret_bytes = 0;
        pthread_mutex_lock(&client->lock);
        r = client_find_tagged(client, partition, tag, &set);
        pthread_mutex_unlock(&client->lock);
        if (r == 0)
                r = client_wake_set(client, &set, wait_ms, ret_bytes);
        block_set_clear(&set);
        return r;
}

BFC_API int bfc_wake_tag(bfc_client *client, const char *tag, uint32_t wait_ms)
{
        uint64_t n_bytes;
        int r = client_check(client);

        if (r < 0)
                return r;
        look_at_events(client);
        return client_wake_all(client, UINT32_MAX, tag, wait_ms, &n_bytes);
}

/* ---- uses --------------------------------------------------------------------
 *
 * A use is counted before the block is woken: from then on nothing parks it, also no call that was about to. */

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
