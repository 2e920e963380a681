/* The session at the daemon; see session.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "client/session.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include "client/client.h"
#include "client/streams.h"

/* ---- requests ---------------------------------------------------------------- */

int client_check_reply(Bfcd__Reply *reply, Bfcd__Reply__BodyCase expected)
{
        int r;

        if (reply->body_case == expected)
                return 0;
        if (reply->body_case == BFCD__REPLY__BODY_REFUSAL && reply->refusal->error > 0 &&
            reply->refusal->error < 4096)
                r = error_set(-(int)reply->refusal->error, "%s", reply->refusal->message);
        else
                r = error_set(-EPROTO, "the daemon sent a reply of another type than requested");
        bfcd__reply__free_unpacked(reply, NULL);
        return r;
}

int client_interrupted(void)
{
        return error_set(-EINTR, "the wait was interrupted by a signal or by cancel_fd");
}

/* The call is over. What the daemon granted before it read the Cancel is returned. */
static int request_interrupted(bfc_client *client, const Bfcd__Request *request, Bfcd__Reply *reply,
                               uint64_t epoch)
{
        const Bfcd__Block *block = NULL;

        if (reply && reply->body_case == BFCD__REPLY__BODY_BLOCK)
                block = reply->block;
        else if (reply && reply->body_case == BFCD__REPLY__BODY_ATTACHED)
                block = reply->attached->block;
        if (block)
                client_free_block(client, block->block_id, epoch);
        if (reply && reply->body_case == BFCD__REPLY__BODY_DONE &&
            request->body_case == BFCD__REQUEST__BODY_CHARGE)
                client_uncharge(client, request->charge->partition, request->charge->n_bytes, epoch);
        if (reply)
                bfcd__reply__free_unpacked(reply, NULL);
        return client_interrupted();
}

/* The wait_ms of a request; NULL: the request does not wait. */
static uint32_t *request_wait_ms(Bfcd__Request *request)
{
        uint32_t *wait_ms = request->body_case == BFCD__REQUEST__BODY_MALLOC   ? &request->malloc->wait_ms
                            : request->body_case == BFCD__REQUEST__BODY_ATTACH ? &request->attach->wait_ms
                            : request->body_case == BFCD__REQUEST__BODY_WAKE   ? &request->wake->wait_ms
                            : request->body_case == BFCD__REQUEST__BODY_CHARGE ? &request->charge->wait_ms
                                                                               : NULL;

        return wait_ms && *wait_ms > 0 ? wait_ms : NULL;
}

/* All requests of a call that wait have one end. A repeated one waits for at least 1 ms, because the daemon
 * refuses a request that waits by other errors than one that does not. */
static void request_limit_wait(struct client_call *call, Bfcd__Request *request)
{
        uint32_t *wait_ms = request_wait_ms(request);
        int64_t now_ms, left_ms;

        if (!wait_ms)
                return;
        now_ms = clock_now_ms();
        if (call->until_ms == 0)
                call->until_ms = now_ms + *wait_ms;
        left_ms = call->until_ms - now_ms;
        *wait_ms = left_ms > 0 ? (uint32_t)left_ms : 1;
}

int client_request(bfc_client *client, struct client_call *call, Bfcd__Request *request,
                   Bfcd__Reply__BodyCase expected, Bfcd__Reply **ret_reply, uint64_t *ret_epoch)
{
        struct call_interrupt *interrupt = call ? call->interrupt : NULL;
        Bfcd__Reply *reply = NULL;
        int r;

        do {
                if (call)
                        request_limit_wait(call, request);
                r = interrupt ? call_send_interruptible(client->connection, interrupt, request, &reply,
                                                        ret_epoch)
                              : call_send_at(client->connection, 0, request, &reply, ret_epoch);
                __atomic_add_fetch(&client->counters.n_requests, 1, __ATOMIC_RELAXED);
                if (interrupt && interrupt->is_interrupted && r != -EPROTO)
                        return request_interrupted(client, request, reply, *ret_epoch);
        } while (r == -ECONNRESET &&
                 (r = client_reconnect(client, *ret_epoch, client->reconnect.return_ms, interrupt)) == 0);
        if (r == -EINTR)
                return request_interrupted(client, request, NULL, *ret_epoch);
        if (r < 0)
                return client_lost(client, r);
        if (call)
                call->is_final = reply->body_case == BFCD__REPLY__BODY_REFUSAL && reply->refusal->is_final;
        r = client_check_reply(reply, expected);
        if (r == 0)
                *ret_reply = reply;
        return r;
}

int client_request_wakes(bfc_client *client, struct client_call *call, Bfcd__Request *const *requests,
                         size_t n, size_t n_replies, Bfcd__Reply **ret_replies, uint64_t *ret_epoch)
{
        int r;

        do {
                for (size_t i = 0; i < n; i++)
                        request_limit_wait(call, requests[i]);
                r = call_send_wakes(client->connection, call->interrupt, requests, n, n_replies, ret_replies,
                                    ret_epoch);
                __atomic_add_fetch(&client->counters.n_requests, n, __ATOMIC_RELAXED);
                for (size_t i = 0; r < 0 && i < n_replies; i++) {
                        if (ret_replies[i])
                                bfcd__reply__free_unpacked(ret_replies[i], NULL);
                        ret_replies[i] = NULL;
                }
                if (r == -ECONNRESET && call->interrupt && call->interrupt->is_interrupted)
                        r = -EINTR;
        } while (r == -ECONNRESET && (r = client_reconnect(client, *ret_epoch, client->reconnect.return_ms,
                                                           call->interrupt)) == 0);
        if (r == -ENOMEM)
                return error_no_memory();
        if (r == -EINTR)
                return client_interrupted();
        return r < 0 ? client_lost(client, r) : 0;
}

/* The first refusal of these, which are all freed. */
static int check_replies(Bfcd__Reply **replies, size_t n)
{
        int r = 0;

        for (size_t i = 0; i < n; i++) {
                int error = replies[i] ? client_check_reply(replies[i], BFCD__REPLY__BODY_DONE) : 0;

                if (replies[i] && error == 0)
                        bfcd__reply__free_unpacked(replies[i], NULL);
                replies[i] = NULL;
                r = r < 0 ? r : error;
        }
        return r;
}

int client_free_blocks(bfc_client *client, const uint64_t *block_ids, size_t n, uint64_t epoch)
{
        Bfcd__Request requests[CALL_MAX_AT_ONCE], *pointers[CALL_MAX_AT_ONCE] = { NULL };
        Bfcd__Free frees[CALL_MAX_AT_ONCE];
        Bfcd__Reply *replies[CALL_MAX_AT_ONCE] = { NULL };
        uint64_t at = epoch;
        int lost, r = 0, error;

        for (size_t i = 0; i < n; i++) {
                bfcd__request__init(&requests[i]);
                bfcd__free__init(&frees[i]);
                frees[i].block_id = block_ids[i];
                requests[i].body_case = BFCD__REQUEST__BODY_FREE;
                requests[i].free = &frees[i];
                pointers[i] = &requests[i];
        }
        do {
                lost = call_send_all_at(client->connection, epoch, pointers, n, replies, &at);
                __atomic_add_fetch(&client->counters.n_requests, n, __ATOMIC_RELAXED);
                error = check_replies(replies, n);
                r = r < 0 ? r : error;
        } while (lost == -ECONNRESET &&
                 (lost = client_reconnect(client, at, client->reconnect.return_ms, NULL)) == 0);
        return lost < 0 && lost != -ESTALE ? client_lost(client, lost) : r;
}

int client_uncharge(bfc_client *client, uint32_t partition, uint64_t n_bytes, uint64_t epoch)
{
        Bfcd__Uncharge body = BFCD__UNCHARGE__INIT;
        Bfcd__Request request = REQUEST(UNCHARGE, uncharge, &body);
        Bfcd__Reply *reply = NULL;
        uint64_t at = epoch;
        int lost, r = 0;

        body.partition = partition;
        body.n_bytes = n_bytes;
        do {
                lost = call_send_at(client->connection, epoch, &request, &reply, &at);
                __atomic_add_fetch(&client->counters.n_requests, 1, __ATOMIC_RELAXED);
        } while (lost == -ECONNRESET &&
                 (lost = client_reconnect(client, at, client->reconnect.return_ms, NULL)) == 0);
        if (lost < 0)
                return lost == -ESTALE ? 0 : client_lost(client, lost);
        r = client_check_reply(reply, BFCD__REPLY__BODY_DONE);
        if (r == 0)
                bfcd__reply__free_unpacked(reply, NULL);
        return r;
}

int client_free_block(bfc_client *client, uint64_t block_id, uint64_t epoch)
{
        return client_free_blocks(client, &block_id, 1, epoch);
}

/* ---- extents -----------------------------------------------------------------
 *
 * The thread that reads a reply first maps the extents that came before it. The tables change under the
 * client's lock, which is not held while a Retire is answered. */

/* An extent has a handle if its partition is shared by handles. */
static int extent_handle(const Bfcd__Extent *e, const struct device_view *view, struct device_extent *ret)
{
        ret->share = view->share;
        if (view->share == DEVICE_SHARE_FD)
                return e->handle.len == 0 ? 0 : -EPROTO;
        if (e->handle.len != sizeof(ret->handle))
                return -EPROTO;
        memcpy(ret->handle, e->handle.data, sizeof(ret->handle));
        return 0;
}

int client_on_extents(void *userdata, const Bfcd__Extents *extents, int *fds)
{
        bfc_client *client = userdata;
        int r = 0;

        pthread_mutex_lock(&client->lock);
        for (size_t i = 0; i < extents->n_extents; i++) {
                const Bfcd__Extent *e = extents->extents[i];
                struct region_extent extent = { e->extent_id, e->region_id, e->region_bytes,
                                                e->offset,    e->n_bytes,   e->partition };
                struct device_extent memory = { .fd = fds[i],
                                                .n_bytes = e->n_bytes,
                                                .is_read_only = e->read_only };

                /* Before the hello's reply there are no partitions. */
                if (r == 0 && (!client->places || e->partition >= client->hello->hello->n_partitions))
                        r = -EPROTO;
                if (r == 0)
                        r = extent_handle(e, &client->places[e->partition], &memory);
                if (r == 0) {
                        r = regions_map(&client->regions, &extent, &client->places[e->partition], &memory);
                        if (r == REGIONS_UNMAPPED) { /* a call that is granted a block there fails */
                                fds[i] = -1;
                                r = 0;
                        }
                        if (r < 0)
                                snprintf(client->end_reason, sizeof(client->end_reason),
                                         "an extent of %llu bytes could not be mapped: %s",
                                         (unsigned long long)e->n_bytes, strerror(-r));
                }
                if (fds[i] >= 0)
                        close(fds[i]);
        }
        pthread_mutex_unlock(&client->lock);
        if (r < 0) /* the session cannot be resumed after that */
                __atomic_store_n(&client->lost, r == -EPROTO ? r : -ECONNRESET, __ATOMIC_RELAXED);
        return r;
}

int client_resolve(bfc_client *client, const Bfcd__Block *block, int *ret_why, void **ret_ptr)
{
        int r = regions_resolve(&client->regions, block->region_id, block->offset, block->n_bytes, ret_ptr);

        if (r == 0 || block->n_bytes == 0)
                return r;
        r = regions_retry(&client->regions, block->region_id, block->offset, block->n_bytes);
        if (r < 0 && r != -ENOENT && r != -EPROTO) {
                *ret_why = r;
                return -ECANCELED;
        }
        return regions_resolve(&client->regions, block->region_id, block->offset, block->n_bytes, ret_ptr);
}

int client_unmappable(const bfc_client *client, uint32_t partition, int why)
{
        const Bfcd__PartitionInfo *p = client->hello->hello->partitions[partition];
        bool by_handle = client->places[partition].share == DEVICE_SHARE_CUDA_IPC;
        const char *hint = "";

        if (why == -ENOMEM && !client->places[partition].is_cuda)
                return error_set(why,
                                 "partition '%s': this process has no room to map memory of device '%s': "
                                 "check its address space limit (RLIMIT_AS, ulimit -v) and "
                                 "vm.max_map_count",
                                 p->name, p->device);
        if (why == -EMFILE)
                return error_set(
                        why,
                        "partition '%s': memory of device '%s' could not be mapped in this process, which "
                        "is at its limit of open files: raise RLIMIT_NOFILE (ulimit -n)",
                        p->name, p->device);
        if (by_handle && why != -ENODEV && why != -ENOMEM)
                hint = "; the driver may refuse CUDA IPC handles to other users and containers: for these, set "
                       "'share: fd' for the partition in bfcd.yaml";
        else if (client->places[partition].peers != 0 && why == -ENOTSUP)
                hint = "; the driver may refuse the other GPUs that were given access to it "
                       "(bfc_enable_peer_access, cudaDeviceEnablePeerAccess)";
        return error_set(why,
                         "partition '%s': memory of device '%s' could not be mapped in this process: %s%s",
                         p->name, p->device, strerror(-why), hint);
}

enum { IS_UNMAPPED = 1 };

/* Its block is parked, or being parked or woken. */
static bool is_parked_at(const bfc_client *client, uint64_t region_id, uint64_t offset)
{
        for (size_t i = 0; i < client->hello->hello->n_partitions; i++)
                if (parkables_cover(&client->partitions[i].parkables, region_id, offset))
                        return true;
        return false;
}

/* The daemon of that epoch may take the extent back. IS_UNMAPPED: it was, because its block was parked. The lock
 * is held. */
static int check_retire(const bfc_client *client, uint64_t epoch, uint64_t extent_id, size_t n_unmapped,
                        bool *ret_keeps_region)
{
        struct region_place place;

        /* A later daemon was told that it is mapped. */
        if (client->epoch != epoch)
                return -ESTALE;
        if (regions_find_extent(&client->regions, extent_id, &place) < 0)
                return n_unmapped < client->n_unretired ? IS_UNMAPPED : -EPROTO;
        *ret_keeps_region = is_parked_at(client, place.region_id, place.offset);
        if (*ret_keeps_region)
                return 0;
        if (blocks_lie_in(&client->blocks, place.region_id, place.offset, place.n_bytes) ||
            (client->cache && cache_lies_in(client->cache, place.region_id, place.offset, place.n_bytes)))
                return -EPROTO;
        return 0;
}

/* No block of this client is in these extents. Their blocks were freed when no work used them any more: after
 * a wait, or an event. So this waits for nothing, which would break captures. If the driver refuses the first
 * extent for now, all are tried again. */
int client_on_retire(bfc_client *client, uint64_t epoch, const Bfcd__Retire *retire)
{
        size_t n_unmapped = 0, n_changed = 0; /* before, and now */
        int r = 0;

        pthread_mutex_lock(&client->lock);
        for (size_t i = 0; r == 0 && i < retire->n_extent_ids; i++) {
                bool keeps_region = false;

                r = check_retire(client, epoch, retire->extent_ids[i], n_unmapped, &keeps_region);
                if (r == IS_UNMAPPED) {
                        n_unmapped++;
                        r = 0;
                } else if (r == 0) {
                        r = regions_unmap(&client->regions, retire->extent_ids[i], keeps_region);
                        n_changed += r == 0;
                }
        }
        if (r == 0)
                client->n_unretired -= n_unmapped;
        pthread_mutex_unlock(&client->lock);
        if (r == 0 || r == -ESTALE || (r == -EBUSY && n_changed == 0))
                return r;
        if (r == -EPROTO)
                return client_end(client, r, "the daemon sent a Retire for memory that is in use");
        return client_end(client, -ECONNRESET, "memory could not be unmapped");
}

/* The block's next owner must not see our kernels write to it. The block is still ours, here and at the
 * daemon, so its region stays. */
int client_finish(bfc_client *client, uint32_t partition, struct device_range *range)
{
        int r = streams_check_captured(client, partition) ? -EBUSY : device_range_finish(range);

        if (r == -EBUSY)
                return error_set(r, "a stream is being captured, so a kernel may still use the block: "
                                    "try again after the capture");
        /* No work of this process runs on a lost device, or in a broken context. */
        if (r == 0 || r == -ENODEV || r == -EIO)
                return 0;
        return error_set(r == -ENOMEM ? r : -EIO,
                         "waiting for the work on the device failed (%s), so the block stays as it is: "
                         "try again",
                         strerror(-r));
}

/* ---- resuming ----------------------------------------------------------------
 *
 * The first thread that notices does it, in a request or while it reads events; the others
 * wait for it. It uses a connection of its own: hello, pages and events are made ready
 * so that nothing can fail later, then the inventory is sent. With the
 * answer to its last message the session is resumed, and all threads use the connection.
 *
 * Meanwhile no lock is held that a request or an allocation takes: the cache works as
 * ever. Answers from before are valid or not by their epoch, which the inventory raises.
 *
 * A daemon that ended the session on purpose refuses to resume it. */

#define FIRST_PAUSE_MS 1
#define MAX_PAUSE_MS   50
#define IDLE_SPREAD_MS 256u  /* clients without a call reconnect within this time, in random order */
#define MAX_IDS        7000u /* in a message of the inventory, of 65,536 bytes at most */
#define MAX_SHARED     500u  /* 18 bytes each, at most */
#define INTERRUPT_MS   10    /* between looks of a thread that can be interrupted and waits for another */

enum { RETRY = 1, GAVE_UP = 2 }; /* the result of an attempt; 0: resumed */

/* What has been tried, for the message in the end. */
struct attempt {
        int64_t until_ms;
        struct call_interrupt *interrupt; /* of the thread that reconnects; NULL: none */
        int error;                        /* of the last attempt */
        char words[96];                   /* the daemon's message; "": none */
};

/* All extents and blocks of the session, which the daemon compares with its own list. Zero-initialised is empty. */
struct inventory {
        uint64_t *extents;
        size_t n_extents;
        uint64_t *blocks; /* sorted, each once, without the shared ones */
        size_t n_blocks;
        struct shared_count *shared;
        size_t n_shared;
        struct pending_split splitting;
        struct held_charge {
                uint64_t n_bytes, bytes_contexts;
        } * charges; /* direct ones, by partition */
        size_t n_charges;
};

static bool can_resume(const bfc_client *client)
{
        return client->hello && client->hello->hello->can_resume;
}

/* ---- the hello --------------------------------------------------------------- */

static bool data_is_same(const ProtobufCBinaryData *a, const ProtobufCBinaryData *b)
{
        return a->len == b->len && (a->len == 0 || memcmp(a->data, b->data, a->len) == 0);
}

static bool partition_is_same(const Bfcd__PartitionInfo *a, const Bfcd__PartitionInfo *b)
{
        return strcmp(a->name, b->name) == 0 && strcmp(a->share, b->share) == 0 &&
               data_is_same(&a->device_uuid, &b->device_uuid);
}

/* NULL: it is the same session. Without a page statistics are requested. */
static const char *find_difference(const Bfcd__HelloReply *old, const Bfcd__HelloReply *new)
{
        bool same = old->n_partitions == new->n_partitions;

        if (old->session_id != new->session_id || !data_is_same(&old->secret, &new->secret))
                return "the daemon restarted without this session";
        if (new->version != old->version || new->has_events != old->has_events || !new->can_resume ||
            new->takes_charges < old->takes_charges)
                return "the restarted daemon does not offer the same version, events, resumption or charges";
        if (strcmp(old->tenant, new->tenant) != 0)
                return "the restarted daemon assigned the session to another tenant";
        for (size_t i = 0; same && i < old->n_partitions; i++)
                same = partition_is_same(old->partitions[i], new->partitions[i]);
        return same ? NULL : "the restarted daemon lists other partitions for the session";
}

static void set_end_reason(bfc_client *client, const char *why)
{
        pthread_mutex_lock(&client->lock);
        if (!client->end_reason[0])
                snprintf(client->end_reason, sizeof(client->end_reason), "%s", why);
        pthread_mutex_unlock(&client->lock);
}

/* The daemon refused for good. */
static int give_up(bfc_client *client, const char *why)
{
        __atomic_store_n(&client->reconnect.is_refused, true, __ATOMIC_RELAXED);
        set_end_reason(client, why);
        return GAVE_UP;
}

/* The refusal may not last. */
static bool is_temporary(uint32_t error)
{
        return error == EAGAIN || error == EBUSY || error == ENOMEM || error == EDQUOT;
}

/* An administrator ended the session: its blocks are lost, and the program must know. */
static int evicted(bfc_client *client, const char *why)
{
        __atomic_store_n(&client->reconnect.is_refused, true, __ATOMIC_RELAXED);
        set_end_reason(client, why);
        return -EIDRM;
}

static int refused(bfc_client *client, const Bfcd__Refusal *refusal, struct attempt *a)
{
        char why[sizeof(client->end_reason)];

        if (refusal->error == EIDRM)
                return evicted(client, refusal->message);
        snprintf(a->words, sizeof(a->words), "%s", refusal->message);
        if (is_temporary(refusal->error))
                return RETRY;
        snprintf(why, sizeof(why), "the restarted daemon refused to resume it: %s", refusal->message);
        return give_up(client, why);
}

/* A daemon that is starting may leave it unanswered for long. The session is resumed only after the
 * inventory, so this can be interrupted, and the inventory cannot. */
static int send_hello(struct call_connection *c, struct attempt *a, Bfcd__Request *request, Bfcd__Reply **ret)
{
        struct call_interrupt interrupt = { .cancel_fd = -1, .hangs_up = true };
        uint64_t epoch;
        int r;

        if (!a->interrupt)
                return call_send(c, request, ret);
        interrupt.cancel_fd = a->interrupt->cancel_fd;
        r = call_send_interruptible(c, &interrupt, request, ret, &epoch);
        a->interrupt->is_interrupted |= interrupt.is_interrupted;
        return r;
}

static int exchange_hello(bfc_client *client, struct call_connection *c, struct attempt *a, Bfcd__Reply **ret)
{
        const Bfcd__HelloReply *old = client->hello->hello;
        Bfcd__Hello hello = BFCD__HELLO__INIT;
        Bfcd__Request request = REQUEST(HELLO, hello, &hello);
        Bfcd__Reply *reply = NULL;
        const char *why;
        int r;

        hello.version = old->version;
        hello.wants_events = old->has_events;
        hello.wants_pages = old->has_pages;
        hello.can_resume = true;
        hello.name = client->reconnect.name;
        hello.tenant = old->tenant;
        hello.partition = old->partitions[client->partition]->name;
        hello.session_id = old->session_id;
        hello.secret = old->secret;
        r = send_hello(c, a, &request, &reply);
        if (r < 0)
                return r;
        if (reply->body_case == BFCD__REPLY__BODY_REFUSAL)
                r = refused(client, reply->refusal, a);
        else if (reply->body_case != BFCD__REPLY__BODY_HELLO)
                r = -EPROTO;
        else if ((why = find_difference(old, reply->hello)))
                r = give_up(client, why);
        if (r != 0)
                bfcd__reply__free_unpacked(reply, NULL);
        else
                *ret = reply;
        return r;
}

/* ---- the inventory ----------------------------------------------------------------
 *
 * It is taken under the client's lock, so it is of one moment, and it begins a new epoch. A block of an answer of an
 * earlier epoch that comes later is not in the inventory: so such an answer is dropped, and the request repeated. A
 * block that left the tables before is not in it either, and the daemon frees it: so a Free of an earlier epoch is not
 * sent.
 *
 * A block whose Publish is not answered is listed as an ordinary one: the daemon knows whether it is shared. */

static bool is_own(const struct block *block)
{
        return !block->slab && !block->stream_alloc;
}

/* How many there are; the first `max` of them. */
static size_t list_blocks(const bfc_client *client, uint64_t *ret, size_t max)
{
        const struct block *block;
        size_t cursor = 0, n = 0;

        while ((block = blocks_next_kept(&client->blocks, &cursor))) {
                if (!is_own(block))
                        continue;
                if (n < max)
                        ret[n] = block->block_id;
                n++;
        }
        if (client->cache)
                n += cache_list(client->cache, ret && n < max ? ret + n : NULL, n < max ? max - n : 0);
        return n;
}

static int list_charges(const bfc_client *client, struct inventory *h)
{
        size_t n = client->hello->hello->n_partitions;

        h->charges = calloc(n + 1, sizeof(*h->charges));
        if (!h->charges)
                return -ENOMEM;
        h->n_charges = n;
        for (size_t i = 0; i < n; i++)
                h->charges[i] = (struct held_charge){ client->partitions[i].stats.bytes_direct,
                                                      client->partitions[i].bytes_contexts };
        return 0;
}

static int list_everything(const bfc_client *client, struct inventory *h)
{
        size_t n_extents = regions_list(&client->regions, NULL, 0);
        size_t n_blocks = list_blocks(client, NULL, 0);
        size_t n_shared = shared_list(client, NULL, 0);

        h->extents = calloc(n_extents + 1, sizeof(*h->extents));
        h->blocks = calloc(n_blocks + 1, sizeof(*h->blocks));
        h->shared = calloc(n_shared + 1, sizeof(*h->shared));
        if (!h->extents || !h->blocks || !h->shared)
                return -ENOMEM;
        h->n_extents = regions_list(&client->regions, h->extents, n_extents);
        h->n_blocks = list_blocks(client, h->blocks, n_blocks);
        h->n_shared = shared_list(client, h->shared, n_shared);
        h->splitting = client->splitting;
        return list_charges(client, h);
}

/* ---- without the lock --------------------------------------------------------- */

static int compare_ids(const void *a, const void *b)
{
        uint64_t x, y;

        memcpy(&x, a, sizeof(x));
        memcpy(&y, b, sizeof(y));
        return (x > y) - (x < y);
}

/* A block may be a stream's slab, too, for a moment, and shared blocks are in the table.
 * shared_count begins with the id. */
static void remove_duplicates(struct inventory *h)
{
        size_t n = 0;

        if (!h->blocks) /* empty: it was not taken */
                return;
        qsort(h->blocks, h->n_blocks, sizeof(*h->blocks), compare_ids);
        qsort(h->shared, h->n_shared, sizeof(*h->shared), compare_ids);
        for (size_t i = 0; i < h->n_blocks; i++) {
                uint64_t id = h->blocks[i];

                if ((n > 0 && h->blocks[n - 1] == id) ||
                    bsearch(&id, h->shared, h->n_shared, sizeof(*h->shared), compare_ids))
                        continue;
                h->blocks[n++] = id;
        }
        h->n_blocks = n;
}

static void inventory_clear(struct inventory *h)
{
        free(h->extents);
        free(h->blocks);
        free(h->shared);
        free(h->charges);
        *h = (struct inventory){ 0 };
}

/* A consistent snapshot, which begins a new epoch. -ENOMEM. The client's lock is not held. */
static int inventory_take(bfc_client *client, struct inventory *ret, uint64_t *ret_epoch)
{
        struct inventory h = { 0 };
        int r = 0;

        pthread_mutex_lock(&client->lock);
        if (!client->is_ending)
                r = list_everything(client, &h);
        if (r == 0) {
                regions_forget_unmapped(&client->regions); /* the next daemon is not told of them */
                client->n_unretired = 0;
                *ret_epoch = ++client->epoch;
        }
        pthread_mutex_unlock(&client->lock);
        if (r < 0) {
                inventory_clear(&h);
                return r;
        }
        remove_duplicates(&h);
        *ret = h;
        return 0;
}

/* ---- the inventory is sent ---------------------------------------------------------- */

static int send_part(struct call_connection *c, Bfcd__Held *body, Bfcd__Reply **ret_refusal)
{
        Bfcd__Request request = BFCD__REQUEST__INIT;
        Bfcd__Reply *reply = NULL;
        int r;

        request.body_case = BFCD__REQUEST__BODY_HELD;
        request.held = body;
        r = call_send(c, &request, &reply);
        if (r < 0)
                return r;
        if (reply->body_case == BFCD__REPLY__BODY_REFUSAL) {
                *ret_refusal = reply;
                return -EBADMSG;
        }
        r = reply->body_case == BFCD__REPLY__BODY_DONE ? 0 : -EPROTO;
        bfcd__reply__free_unpacked(reply, NULL);
        return r;
}

static size_t at_most(size_t n, size_t max)
{
        return n < max ? n : max;
}

/* So many shared ones, from there on. */
static void list_shared(const struct shared_count *from, size_t n, Bfcd__HeldShared *rows,
                        Bfcd__HeldShared **list)
{
        for (size_t i = 0; i < n; i++) {
                bfcd__held_shared__init(&rows[i]);
                rows[i].block_id = from[i].block_id;
                rows[i].count = from[i].count;
                list[i] = &rows[i];
        }
}

/* The direct charges, in a message of their own. */
static int send_charges(const struct inventory *h, struct call_connection *c, Bfcd__Reply **ret_refusal)
{
        Bfcd__HeldCharge *rows = calloc(h->n_charges + 1, sizeof(*rows));
        Bfcd__HeldCharge **list = calloc(h->n_charges + 1, sizeof(*list));
        Bfcd__Held body = BFCD__HELD__INIT;
        int r = rows && list ? 0 : -ENOMEM;

        for (size_t i = 0; r == 0 && i < h->n_charges; i++) {
                if (h->charges[i].n_bytes == 0)
                        continue;
                bfcd__held_charge__init(&rows[body.n_charges]);
                rows[body.n_charges].partition = (uint32_t)i;
                rows[body.n_charges].n_bytes = h->charges[i].n_bytes;
                rows[body.n_charges].bytes_contexts = h->charges[i].bytes_contexts;
                list[body.n_charges] = &rows[body.n_charges];
                body.n_charges++;
        }
        body.charges = list;
        if (r == 0 && body.n_charges > 0)
                r = send_part(c, &body, ret_refusal);
        free(rows);
        free(list);
        return r;
}

/* Sends it, and waits for the last reply. -ECONNRESET, -EPROTO; -EBADMSG: refused, and the caller owns
 * the reply *ret_refusal. */
static int inventory_send(const struct inventory *h, struct call_connection *c, Bfcd__Reply **ret_refusal)
{
        Bfcd__HeldShared rows[MAX_SHARED], *list[MAX_SHARED];
        Bfcd__Split splitting = BFCD__SPLIT__INIT;
        size_t n_extents = 0, n_blocks = 0, n_shared = 0;
        Bfcd__Held body;
        int r = send_charges(h, c, ret_refusal);

        if (r < 0)
                return r;
        splitting.block_id = h->splitting.block_id;
        splitting.n_bytes = h->splitting.n_bytes;
        do {
                bfcd__held__init(&body);
                body.n_shared = at_most(h->n_shared - n_shared, MAX_SHARED);
                list_shared(h->shared + n_shared, body.n_shared, rows, list);
                body.shared = list;
                body.n_extent_ids = body.n_shared > 0 ? 0 : at_most(h->n_extents - n_extents, MAX_IDS);
                body.extent_ids = h->extents + n_extents;
                body.n_block_ids =
                        body.n_shared > 0 ? 0 : at_most(h->n_blocks - n_blocks, MAX_IDS - body.n_extent_ids);
                body.block_ids = h->blocks + n_blocks;
                n_shared += body.n_shared;
                n_extents += body.n_extent_ids;
                n_blocks += body.n_block_ids;
                body.is_last =
                        n_shared == h->n_shared && n_extents == h->n_extents && n_blocks == h->n_blocks;
                if (body.is_last && splitting.block_id != 0)
                        body.splitting = &splitting;
                r = send_part(c, &body, ret_refusal);
        } while (r == 0 && !body.is_last);
        return r;
}

/* ---- one attempt --------------------------------------------------------------- */

static int make_socket(bfc_client *client, struct call_connection *c, struct events_socket **ret)
{
        if (!client->hello->hello->has_events)
                return 0;
        return events_socket_new(call_take_events_fd(c), ret);
}

static int send_inventory(bfc_client *client, struct call_connection *c, struct attempt *a,
                          uint64_t *ret_epoch)
{
        Bfcd__Reply *refusal = NULL;
        struct inventory inventory;
        int r = inventory_take(client, &inventory, ret_epoch);

        if (r < 0)
                return r;
        r = inventory_send(&inventory, c, &refusal);
        if (r == -EBADMSG) {
                r = refused(client, refusal->refusal, a);
                bfcd__reply__free_unpacked(refusal, NULL);
        }
        inventory_clear(&inventory);
        return r;
}

/* Nothing fails from here on. */
static void adopt_connection(bfc_client *client, struct call_connection *c, uint64_t epoch)
{
        pthread_mutex_lock(&client->lock);
        client->reconnect.next = NULL;
        call_set_timeout(c, 0);
        call_replace(client->connection, c, epoch);
        pthread_mutex_unlock(&client->lock);
        __atomic_add_fetch(&client->reconnect.n_resumed, 1, __ATOMIC_RELAXED);
}

/* The connection is taken over if 0 is returned. */
static int resume_over(bfc_client *client, struct call_connection *c, struct attempt *a)
{
        struct client_pages_next pages;
        struct events_socket *socket = NULL;
        Bfcd__Reply *hello = NULL;
        uint64_t epoch = 0;
        int r = exchange_hello(client, c, a, &hello);

        if (r != 0)
                return r;
        client_pages_keep(c, &pages);
        r = make_socket(client, c, &socket);
        if (r == 0)
                r = send_inventory(client, c, a, &epoch);
        if (r == 0) {
                streams_lock(client);
                client_pages_renew(client, &pages, hello->hello);
                streams_unlock(client);
                client_forget_drains(client); /* the new daemon announces its own */
                events_resume(client->events, socket, epoch);
                adopt_connection(client, c, epoch);
        } else {
                client_pages_drop(&pages);
                events_socket_free(socket);
        }
        bfcd__reply__free_unpacked(hello, NULL);
        return r;
}

static void show_next(bfc_client *client, struct call_connection *c)
{
        pthread_mutex_lock(&client->lock);
        client->reconnect.next = c;
        pthread_mutex_unlock(&client->lock);
}

static int try_once(bfc_client *client, struct attempt *a)
{
        int64_t left_ms = a->until_ms - clock_now_ms();
        char why[sizeof(client->end_reason)];
        struct call_connection *c = NULL;
        int r = call_connect_now(client->reconnect.path, client_on_extents, client, &c);

        if (r == 0) {
                call_set_timeout(c, left_ms > 0 ? (unsigned)left_ms : 1);
                show_next(client, c);
                r = resume_over(client, c, a);
                if (r == 0)
                        return 0;
                if (r == -EIDRM && call_read_end_reason(c, why, sizeof(why)))
                        r = evicted(client, why);
                show_next(client, NULL);
                call_free(c);
        }
        a->error = r < 0 ? r : a->error;
        return r < 0 && r != -EPROTO && r != -EIDRM ? RETRY : r;
}

/* ---- all of them ----------------------------------------------------------------- */

/* True: the thread was interrupted. */
static bool interruptible_pause(struct call_interrupt *interrupt, int pause_ms)
{
        struct pollfd p = { .fd = interrupt->cancel_fd, .events = POLLIN };
        int r = poll(&p, 1, pause_ms);

        interrupt->is_interrupted |= r > 0 || (r < 0 && errno == EINTR);
        return interrupt->is_interrupted;
}

/* False: reconnecting is stopped. */
static bool pause_until_stopped(bfc_client *client, int pause_ms)
{
        int64_t until_ms = clock_now_ms() + pause_ms;
        bool goes_on;

        pthread_mutex_lock(&client->lock);
        while (!client->is_stopping && clock_now_ms() < until_ms)
                condition_wait(&client->changed, &client->lock, until_ms);
        goes_on = !client->is_stopping;
        pthread_mutex_unlock(&client->lock);
        return goes_on;
}

/* False: reconnecting is stopped, or the thread was interrupted. */
static bool pause_for(bfc_client *client, struct call_interrupt *interrupt, int pause_ms)
{
        if (!interrupt)
                return pause_until_stopped(client, pause_ms);
        return !interruptible_pause(interrupt, pause_ms) && !reconnect_check_stopping(client);
}

static int time_out(bfc_client *client, unsigned return_ms, const struct attempt *a)
{
        char why[sizeof(client->end_reason)];

        snprintf(why, sizeof(why), "the daemon stopped and did not resume it within %u ms: %s", return_ms,
                 a->words[0] ? a->words : strerror(a->error < 0 ? -a->error : ETIMEDOUT));
        set_end_reason(client, why);
        return GAVE_UP;
}

static int reconnect_within(bfc_client *client, unsigned return_ms, struct call_interrupt *interrupt)
{
        struct attempt a = { .until_ms = clock_now_ms() + return_ms, .interrupt = interrupt };
        int r = RETRY, pause_ms = FIRST_PAUSE_MS;
        char why[sizeof(client->end_reason)];

        /* An invalid message ended the session for good. */
        if (call_end(client->connection, -ECONNRESET) == -EPROTO)
                return -EPROTO;
        client_pages_invalidate(client);
        call_drain(client->connection);
        if (call_read_end_reason(client->connection, why, sizeof(why)))
                return evicted(client, why);
        while (__atomic_load_n(&client->lost, __ATOMIC_RELAXED) == 0) {
                r = try_once(client, &a);
                if (r != RETRY)
                        break;
                if (interrupt && interrupt->is_interrupted)
                        return -EINTR;
                if (clock_now_ms() >= a.until_ms)
                        r = time_out(client, return_ms, &a);
                if (r != RETRY || !pause_for(client, interrupt, pause_ms))
                        break;
                pause_ms = pause_ms < MAX_PAUSE_MS / 2 ? pause_ms * 2 : MAX_PAUSE_MS;
        }
        if (r == RETRY && interrupt && interrupt->is_interrupted)
                return -EINTR;
        return r > 0 ? -ECONNRESET : r;
}

/* The lock is held, but not meanwhile. An interrupted attempt does not count. */
static int reconnect_now(bfc_client *client, unsigned return_ms, struct call_interrupt *interrupt)
{
        int known = 0, r;

        client->reconnect.is_under_way = true;
        pthread_mutex_unlock(&client->lock);
        r = reconnect_within(client, return_ms, interrupt);
        pthread_mutex_lock(&client->lock);
        if (r < 0 && r != -EINTR && !client->is_stopping)
                __atomic_compare_exchange_n(&client->lost, &known, r, false, __ATOMIC_RELAXED,
                                            __ATOMIC_RELAXED);
        client->reconnect.is_under_way = false;
        pthread_cond_broadcast(&client->changed);
        return r;
}

/* Another thread reconnects. The lock is held. */
static int wait_for_other(bfc_client *client, struct call_interrupt *interrupt)
{
        bool is_interrupted;

        if (!interrupt) {
                condition_wait(&client->changed, &client->lock, -1);
                return 0;
        }
        pthread_mutex_unlock(&client->lock);
        is_interrupted = interruptible_pause(interrupt, INTERRUPT_MS);
        pthread_mutex_lock(&client->lock);
        return is_interrupted ? -EINTR : 0;
}

static unsigned random_below(unsigned n)
{
        unsigned value = 0;

        (void)!getrandom(&value, sizeof(value), GRND_NONBLOCK); /* without one the pause is none */
        return value % n;
}

void reconnect_pause_at_random(void)
{
        struct timespec pause = { .tv_nsec = (long)random_below(IDLE_SPREAD_MS * 1000000) };

        nanosleep(&pause, NULL);
}

void reconnect_pause_idle(bfc_client *client, uint64_t epoch)
{
        int64_t until_ms = clock_now_ms() + random_below(IDLE_SPREAD_MS);

        pthread_mutex_lock(&client->lock);
        while (!client->is_stopping && call_epoch(client->connection) <= epoch && clock_now_ms() < until_ms)
                condition_wait(&client->changed, &client->lock, until_ms);
        pthread_mutex_unlock(&client->lock);
}

int client_reconnect(bfc_client *client, uint64_t epoch, unsigned return_ms, struct call_interrupt *interrupt)
{
        int r = 0, cancel_state;

        if (!can_resume(client))
                return -ECONNRESET;
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel_state);
        pthread_mutex_lock(&client->lock);
        while (r == 0 && call_epoch(client->connection) <= epoch) {
                r = client->is_stopping ? -ECONNRESET : __atomic_load_n(&client->lost, __ATOMIC_RELAXED);
                if (r == 0 && client->reconnect.is_under_way)
                        r = wait_for_other(client, interrupt);
                else if (r == 0)
                        r = reconnect_now(client, return_ms, interrupt);
        }
        if (r == 0 && interrupt && interrupt->is_interrupted)
                r = -EINTR;
        pthread_mutex_unlock(&client->lock);
        pthread_setcancelstate(cancel_state, NULL);
        return r;
}

/* ---- begin and end ---------------------------------------------------------------------- */

int reconnect_init(struct reconnect *b, const char *path, const char *name, unsigned return_ms)
{
        b->path = strdup(path);
        if (!b->path)
                return error_no_memory();
        snprintf(b->name, sizeof(b->name), "%s", name);
        b->return_ms = return_ms;
        return 0;
}

void reconnect_stop(bfc_client *client, bool stops)
{
        pthread_mutex_lock(&client->lock);
        client->is_stopping = stops;
        pthread_cond_broadcast(&client->changed);
        pthread_mutex_unlock(&client->lock);
}

bool reconnect_try_once_more(bfc_client *client)
{
        int given_up = -ECONNRESET;

        return !__atomic_load_n(&client->reconnect.is_refused, __ATOMIC_RELAXED) &&
               __atomic_compare_exchange_n(&client->lost, &given_up, 0, false, __ATOMIC_RELAXED,
                                           __ATOMIC_RELAXED);
}

bool reconnect_check_stopping(bfc_client *client)
{
        bool ret;

        pthread_mutex_lock(&client->lock);
        ret = client->is_stopping;
        pthread_mutex_unlock(&client->lock);
        return ret;
}

void reconnect_hang_up(bfc_client *client)
{
        pthread_mutex_lock(&client->lock);
        if (client->reconnect.next)
                call_end(client->reconnect.next, -ECONNRESET);
        pthread_mutex_unlock(&client->lock);
}
