/* Shared blocks: publishing, attaching, detaching; see client.h and bfcclient.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A shared block is in the table of blocks once, as any other of the daemon's own, and here
 * with the count of this process's references, which the daemon counts for this
 * session, too. Each attach that was answered adds one at both ends. Each detach drops one, and at this
 * end before the daemon is told. So the counts are the same
 * when no call is under way, whatever the order of threads. An attach beside the last detach of
 * another thread finds the block here still, or not at all.
 *
 * The last detach waits for the device first. Meanwhile it is counted in n_leaving, so no other thread
 * can drop that reference.
 *
 * A published block is entered before the daemon is asked: another thread that
 * attaches the name can have its answer before this one. Until one of the answers came it is unknown
 * whether the block is shared. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/client.h"
#include "client/session.h"
#include "client/park.h"
#include "client/alloc.h"

/* ---- publish ------------------------------------------------------------- */

/* A block that is all of its slab leaves the cache and is the daemon's own from now on. It leaves the table
 * first: another thread's free, an error of the program, could park a block without a slab. -EDOM: it is a
 * part of a slab. */
static int publish_take_whole(bfc_client *client, const struct block *found)
{
        uint64_t block_id = cache_block_id(found);
        struct block block;
        int r;

        if (blocks_take(&client->blocks, found->ptr, &block) < 0)
                return -EINVAL;
        r = cache_take_whole(&block);
        if (r == 0) {
                block.block_id = block_id;
                block.slab = NULL;
                block.may_stash = false;
        }
        if (blocks_add(&client->blocks, &block) < 0) /* into the place that was left */
                return -ENOMEM;
        return r == -EINVAL ? -EDOM : r;
}

/* The page of a session does not count shared blocks. The lock is held. */
static void publish_page(bfc_client *client, const struct block *block, bool is_on)
{
        int64_t n_bytes = (int64_t)block->n_bytes;

        if (block->parkable) {
                block->parkable->is_shared = !is_on;
                parkable_sort(block->parkable);
        }

        client_page_whole(client, regions_partition(&client->regions, block->region_id),
                          is_on ? n_bytes : -n_bytes);
        client_share_age(client, block, !is_on);
}

/* The lock is held. -EEXIST: it is shared already. -EDOM: it is a part of a slab. -EBUSY: it is parked. */
static int publish_begin(bfc_client *client, const void *ptr, uint64_t *ret_block_id)
{
        const struct block *block = blocks_find(&client->blocks, ptr);
        int r = 0;

        if (!block)
                return -EINVAL;
        if (shared_find(client, ptr))
                return -EEXIST;
        if (block->stream_alloc)
                return -EDOM;
        if (block->is_parked)
                return -EBUSY;
        *ret_block_id = block->slab ? cache_block_id(block) : block->block_id;
        if (block->slab) {
                r = publish_take_whole(client, block);
                if (r < 0)
                        return r;
                block = blocks_find(&client->blocks, ptr);
                client_page_whole(client, regions_partition(&client->regions, block->region_id),
                                  (int64_t)block->n_bytes); /* it is its own now */
        }
        r = shared_add(client, ptr, *ret_block_id);
        if (r == 0) {
                client->shared->is_asked = true;
                publish_page(client, block, false);
        }
        return r;
}

/* It is shared from now on. */
static void publish_end(bfc_client *client, const void *ptr, uint64_t block_id)
{
        struct shared_block *s;

        pthread_mutex_lock(&client->lock);
        s = shared_find(client, ptr);
        if (s && s->block_id == block_id)
                s->is_asked = false;
        pthread_mutex_unlock(&client->lock);
}

static int publish_failed(int error, const void *ptr)
{
        switch (error) {
        case -EEXIST:
                return error_set(-EINVAL, "%p is already shared", ptr);
        case -EDOM:
                return error_set(
                        -EINVAL,
                        "%p is part of a larger block of the client's cache: allocate blocks to share "
                        "with BFC_WHOLE",
                        ptr);
        case -EBUSY:
                return error_set(error, "the block at %p is parked: wake it first", ptr);
        case -ENOMEM:
                return error_set(error, "this process is out of memory");
        default:
                return error_set(-EINVAL, "%p is not a block of this client", ptr);
        }
}

/* It was refused: the block is this process's own, as before. */
static void publish_undo(bfc_client *client, const void *ptr, uint64_t block_id)
{
        const struct block *block;
        struct shared_block *s;

        pthread_mutex_lock(&client->lock);
        while (client_wait_parkable(client, ptr)) /* another thread parks it: it is in no table meanwhile */
                ;
        s = shared_find(client, ptr);
        block = blocks_find(&client->blocks, ptr);
        if (s && block && s->block_id == block_id && s->n_leaving == 0) {
                shared_remove(client, s);
                publish_page(client, block, true);
        }
        pthread_mutex_unlock(&client->lock);
}

BFC_API int bfc_publish_with(bfc_client *client, void *ptr, const char *name,
                             const struct bfc_publish_options *options)
{
        Bfcd__Publish body = BFCD__PUBLISH__INIT;
        Bfcd__Request request = REQUEST(PUBLISH, publish, &body);
        struct bfc_publish_options how;
        Bfcd__Reply *reply = NULL;
        uint64_t epoch;
        int r = client_check(client);

        if (r == 0)
                r = publish_options_read(options, &how);
        if (r < 0)
                return r;
        if (!name)
                return error_set(-EINVAL, "bfc_publish: name is NULL");
        pthread_mutex_lock(&client->lock);
        do
                r = publish_begin(client, ptr, &body.block_id);
        while (r == -EINVAL && client_wait_parkable(client, ptr));
        pthread_mutex_unlock(&client->lock);
        if (r < 0)
                return publish_failed(r, ptr);
        body.name = (char *)(uintptr_t)name;
        body.keep_ms = how.keep_ms;
        body.metadata = (ProtobufCBinaryData){ how.n_metadata_bytes, (uint8_t *)(uintptr_t)how.metadata };
        r = client_request(client, NULL, &request, BFCD__REPLY__BODY_DONE, &reply, &epoch);
        if (r < 0) {
                publish_undo(client, ptr, body.block_id);
                return r;
        }
        publish_end(client, ptr, body.block_id);
        bfcd__reply__free_unpacked(reply, NULL);
        return 0;
}

BFC_API int bfc_publish(bfc_client *client, void *ptr, const char *name)
{
        return bfc_publish_with(client, ptr, name, NULL);
}

/* ---- attach -------------------------------------------------------------- */

static int attach_again(struct shared_block *s, void **ret_ptr)
{
        if (s->n_refs == UINT32_MAX)
                return -EPROTO;
        s->n_refs++;
        s->is_asked = false;
        *ret_ptr = (void *)(uintptr_t)s->ptr;
        return 0;
}

/* A block that this process did not have. -EPROTO, -ENOMEM. */
static int attach_add(bfc_client *client, const Bfcd__Attached *got, void *ptr, struct block *ret)
{
        const Bfcd__Block *b = got->block;
        int r;

        *ret = (struct block){ .ptr = ptr,
                               .block_id = b->block_id,
                               .region_id = b->region_id,
                               .offset = b->offset,
                               .n_bytes = b->n_bytes,
                               .n_requested = got->n_requested,
                               .partition = (uint16_t)got->partition,
                               .parkable = got->parkable ? parkable_new(got->tag) : NULL };
        if (got->parkable && !ret->parkable)
                return -ENOMEM;
        if (ret->parkable)
                ret->parkable->is_shared = true;
        r = blocks_add(&client->blocks, ret);
        if (r == 0) {
                r = shared_add(client, ptr, b->block_id);
                if (r < 0)
                        (void)blocks_take(&client->blocks, ptr, &(struct block){ 0 });
        }
        if (r < 0)
                free(ret->parkable);
        return r == -EEXIST ? -EPROTO : r;
}

/* The lock is held. -EPROTO: the daemon's answer is invalid. -ECANCELED: client_resolve()'s, with *ret_why. -EAGAIN: it
 * is parked, and another thread has just detached it here. */
static int attach_keep(bfc_client *client, const Bfcd__Attached *got, bool is_read_only, int *ret_why,
                       void **ret_ptr)
{
        const Bfcd__Block *b = got->block;
        struct shared_block *s;
        struct block block;
        void *ptr;
        int r;

        if (got->partition >= client->hello->hello->n_partitions || got->n_requested == 0 ||
            got->n_requested > b->n_bytes)
                return -EPROTO;
        s = shared_find_id(client, b->block_id);
        if (s)
                return attach_again(s, ret_ptr);
        if (got->is_parked)
                return -EAGAIN;
        r = client_resolve(client, b, ret_why, &ptr);
        if (r < 0)
                return r;
        r = shared_find(client, ptr) ? -EPROTO : attach_add(client, got, ptr, &block);
        if (r < 0)
                return r;
        client->shared->is_read_only = is_read_only;
        client_count_alloc(client, &block);
        client_count_reserved(client, block.partition, block.n_bytes);
        *ret_ptr = ptr;
        return 0;
}

/* The partitions whose devices this process sees, if these are not all: others could not be mapped. *ret: the
 * caller's. */
static int attach_list_places(bfc_client *client, uint32_t **ret, size_t *ret_n)
{
        size_t n_all = client->hello->hello->n_partitions, n = 0;
        uint32_t *seen = calloc(n_all + 1, sizeof(*seen));

        if (!seen)
                return error_no_memory();
        for (size_t i = 0; i < n_all; i++)
                if (client_lookup_device(client, (uint32_t)i))
                        seen[n++] = (uint32_t)i;
        if (n == 0) {
                free(seen);
                return error_set(-ENODEV,
                                 "no device of the partitions of tenant '%s' is visible to this process: "
                                 "check CUDA_VISIBLE_DEVICES",
                                 client->hello->hello->tenant);
        }
        *ret = seen;
        *ret_n = n < n_all ? n : 0;
        return 0;
}

static int attach_ask(bfc_client *client, struct client_call *call, const char *name,
                      const struct bfc_attach_options *how, Bfcd__Reply **ret, uint64_t *ret_epoch)
{
        Bfcd__Attach body = BFCD__ATTACH__INIT;
        Bfcd__Request request = REQUEST(ATTACH, attach, &body);
        int r = attach_list_places(client, &body.partitions, &body.n_partitions);

        if (r < 0)
                return r;
        body.name = (char *)(uintptr_t)name;
        body.wait_ms = how->wait_ms;
        body.read_only = (how->flags & BFC_ATTACH_READ_ONLY) != 0;
        r = client_request(client, call, &request, BFCD__REPLY__BODY_ATTACHED, ret, ret_epoch);
        free(body.partitions);
        return r;
}

/* *ret_stale: the answer is not true any more, and dropped: ask again. */
static int attach_once(bfc_client *client, struct client_call *call, const char *name,
                       const struct bfc_attach_options *how, bool *ret_stale, void **ret_ptr,
                       size_t *ret_n_bytes)
{
        Bfcd__Reply *reply = NULL;
        void *ptr = NULL;
        uint64_t epoch;
        int why = 0, r = attach_ask(client, call, name, how, &reply, &epoch);

        *ret_stale = false;
        if (r < 0)
                return r;
        pthread_mutex_lock(&client->lock);
        *ret_stale = epoch != client->epoch;
        if (!*ret_stale)
                r = reply->attached->block ? attach_keep(client, reply->attached,
                                                         (how->flags & BFC_ATTACH_READ_ONLY) != 0, &why, &ptr)
                                           : -EPROTO;
        pthread_mutex_unlock(&client->lock);
        if (why < 0) {
                client_free_block(client, reply->attached->block->block_id, epoch);
                r = client_unmappable(client, reply->attached->partition, why);
        } else if (r == -EAGAIN) {
                r = client_free_block(client, reply->attached->block->block_id, epoch);
                *ret_stale = r == 0;
        } else if (r == -ENOMEM) {
                client_free_block(client, reply->attached->block->block_id, epoch);
                error_no_memory();
        } else if (r < 0) {
                error_set(r, "the daemon attached a block at an invalid place");
        } else if (!*ret_stale) {
                *ret_ptr = ptr;
                if (ret_n_bytes)
                        *ret_n_bytes = (size_t)reply->attached->n_requested;
        }
        bfcd__reply__free_unpacked(reply, NULL);
        return r;
}

/* This process has the block already, and has parked it. */
static int attach_wake(bfc_client *client, void *ptr, uint32_t wait_ms)
{
        const void *ptrs[1] = { ptr };
        const struct block_set set = { ptrs, 1, true };
        char why[256];
        bool stays;
        int r = client_wake_set(client, &set, wait_ms, NULL);

        if (r == 0)
                return 0;
        snprintf(why, sizeof(why), "%s", bfc_last_error());
        (void)shared_detach(client, ptr, true, &stays);
        return error_set(r, "%s", why);
}

BFC_API int bfc_attach_with(bfc_client *client, const char *name, const struct bfc_attach_options *options,
                            void **ret_ptr, size_t *ret_n_bytes)
{
        struct call_interrupt interrupt = { .cancel_fd = -1 };
        struct client_call call = { .interrupt = NULL };
        struct bfc_attach_options how;
        int r = client_check(client);
        bool is_stale;

        if (r == 0)
                r = attach_options_read(options, &how);
        if (r < 0)
                return r;
        if (!name || !ret_ptr)
                return error_set(-EINVAL, "bfc_attach: %s is NULL", name ? "ret_ptr" : "name");
        if (how.cancel_fd > 0)
                interrupt.cancel_fd = how.cancel_fd;
        if (how.wait_ms > 0)
                call.interrupt = &interrupt;

        /* Where the block is, only the daemon knows: mostly in the client's own partition. */
        if (client_lookup_device(client, client->partition))
                r = client_prepare_device(client, client->partition);
        if (r < 0)
                return r;
        do
                r = attach_once(client, &call, name, &how, &is_stale, ret_ptr, ret_n_bytes);
        while (is_stale);
        return r < 0 ? r : attach_wake(client, *ret_ptr, how.wait_ms);
}

BFC_API int bfc_attach(bfc_client *client, const char *name, uint32_t wait_ms, void **ret_ptr,
                       size_t *ret_n_bytes)
{
        struct bfc_attach_options how = { .struct_size = sizeof(how), .wait_ms = wait_ms };

        return bfc_attach_with(client, name, &how, ret_ptr, ret_n_bytes);
}

/* ---- detach ----------------------------------------------------------- */

/* One reference begins to leave. SHARED_NONE. *ret_range: that of the last one, whose work must be waited
 * for; else NULL. */
static int leave_begin(bfc_client *client, const void *ptr, uint64_t *ret_block_id, uint32_t *ret_partition,
                       struct device_range **ret_range)
{
        const struct block *block;
        struct shared_block *s;
        int r = SHARED_NONE;

        pthread_mutex_lock(&client->lock);
        do {
                s = shared_find(client, ptr);
                block = s ? blocks_find(&client->blocks, ptr) : NULL;
        } while (s && !block && client_wait_parkable(client, ptr));
        if (s)
                r = block && s->n_leaving < s->n_refs ? 0 : -EINVAL;
        if (r == 0) {
                s->n_leaving++;
                *ret_block_id = s->block_id;
                *ret_partition = regions_partition(&client->regions, block->region_id);
                *ret_range =
                        s->n_leaving == s->n_refs ? regions_range(&client->regions, block->region_id) : NULL;
        }
        pthread_mutex_unlock(&client->lock);
        return r == -EINVAL ? error_set(r, "%p is being detached by another thread", ptr) : r;
}

/* It leaves, or stays if error < 0. 1: that was the last one, *ret is the block. */
static int leave_end(bfc_client *client, const void *ptr, uint64_t block_id, int error, struct block *ret,
                     uint64_t *ret_epoch)
{
        struct shared_block *s;
        int r = error;

        pthread_mutex_lock(&client->lock);
        while (client_wait_parkable(client, ptr)) /* an operator may have it woken */
                ;
        s = shared_find(client, ptr);
        if (!s || s->block_id != block_id)
                r = -EINVAL; /* it was being published, and was refused */
        else
                s->n_leaving--;
        if (r == 0 && --s->n_refs == 0) {
                shared_remove(client, s);
                if (blocks_take(&client->blocks, ptr, ret) == 0) {
                        client_count_free(client, ret);
                        client_count_released(client, ret->partition, ret->n_bytes);
                        if (ret->is_parked)
                                regions_unkeep(&client->regions, ret->region_id);
                        r = 1;
                }
        }
        *ret_epoch = client->epoch;
        pthread_mutex_unlock(&client->lock);
        return r;
}

int shared_detach(bfc_client *client, const void *ptr, bool waits, bool *ret_stays)
{
        struct device_range *range = NULL;
        struct block block;
        uint64_t block_id = 0, epoch;
        uint32_t partition = 0;
        int gone, r = leave_begin(client, ptr, &block_id, &partition, &range);

        if (r != 0)
                return r;
        if (range && waits)
                r = client_finish(client, partition, range);
        gone = leave_end(client, ptr, block_id, r, &block, &epoch);
        *ret_stays = gone != 1;
        if (gone < 0)
                return gone;
        r = client_free_block(client, block_id, epoch);
        if (client_has_ended(r) && gone == 1) { /* it stays mapped in this process */
                client_restore_block(client, &block);
                *ret_stays = true;
        }
        return r;
}

BFC_API int bfc_detach(bfc_client *client, void *ptr)
{
        struct recorder_lifetime lifetime;
        bool stays = true;
        int r = client_check(client);

        if (r < 0)
                return r;
        if (!ptr)
                return 0;
        recorder_freeing(client->recorder, ptr, &lifetime);
        r = shared_detach(client, ptr, true, &stays);
        if (r == SHARED_NONE)
                r = error_set(-EINVAL, "%p is not a shared block of this client", ptr);
        if (stays)
                recorder_kept(client->recorder, &lifetime);
        else
                recorder_freed(client->recorder, &lifetime);
        return r;
}

/* ---- metadata, lists and the end of keeping -------------------------------- */

BFC_API int bfc_shared_metadata(bfc_client *client, void *ptr, void *buffer, size_t n_buffer_bytes,
                                size_t *ret_n_bytes)
{
        Bfcd__Metadata body = BFCD__METADATA__INIT;
        Bfcd__Request request = REQUEST(METADATA, metadata, &body);
        const struct shared_block *s;
        Bfcd__Reply *reply = NULL;
        size_t n;
        int r = client_check(client);

        if (r < 0)
                return r;
        if (!ret_n_bytes || (!buffer && n_buffer_bytes > 0))
                return error_set(-EINVAL, "bfc_shared_metadata: %s is NULL",
                                 ret_n_bytes ? "buffer" : "ret_n_bytes");
        pthread_mutex_lock(&client->lock);
        s = shared_find(client, ptr);
        if (s)
                body.block_id = s->block_id;
        pthread_mutex_unlock(&client->lock);
        if (!s)
                return error_set(-EINVAL, "%p is not a shared block of this client", ptr);
        r = client_request(client, NULL, &request, BFCD__REPLY__BODY_METADATA, &reply, &(uint64_t){ 0 });
        if (r < 0)
                return r;
        n = reply->metadata->metadata.len;
        if (n > 0 && n_buffer_bytes > 0)
                memcpy(buffer, reply->metadata->metadata.data, n < n_buffer_bytes ? n : n_buffer_bytes);
        *ret_n_bytes = n;
        bfcd__reply__free_unpacked(reply, NULL);
        return 0;
}

static int list_row(const Bfcd__SharedRow *row, bfc_shared_fn fn, void *userdata)
{
        const struct bfc_shared_info info = {
                .struct_size = sizeof(info),
                .name = row->name,
                .partition = row->partition,
                .n_bytes = row->n_requested,
                .num_references = row->num_references,
                .keep_ms = row->keep_ms,
                .left_ms = row->kept_ms,
                .n_metadata_bytes = row->n_metadata_bytes,
        };

        return fn(userdata, &info);
}

/* The daemon's table is bounded, so a cursor that does not grow is invalid. */
BFC_API int bfc_list_shared(bfc_client *client, bfc_shared_fn fn, void *userdata)
{
        Bfcd__List body = BFCD__LIST__INIT;
        Bfcd__Request request = REQUEST(LIST, list, &body);
        int r = client_check(client);

        if (r < 0)
                return r;
        if (!fn)
                return error_set(-EINVAL, "bfc_list_shared: fn is NULL");
        body.kind = BFCD__LIST__KIND__SHARED;
        do {
                Bfcd__Reply *reply = NULL;
                uint64_t cursor = body.cursor;

                r = client_request(client, NULL, &request, BFCD__REPLY__BODY_LIST, &reply, &(uint64_t){ 0 });
                if (r < 0)
                        return r;
                for (size_t i = 0; r == 0 && i < reply->list->n_shared; i++)
                        r = list_row(reply->list->shared[i], fn, userdata);
                body.cursor = reply->list->next_cursor;
                bfcd__reply__free_unpacked(reply, NULL);
                if (r == 0 && body.cursor != 0 && body.cursor <= cursor)
                        return error_set(-EPROTO, "the daemon sent an invalid list of shared blocks");
        } while (r == 0 && body.cursor != 0);
        return r;
}

BFC_API int bfc_forget(bfc_client *client, const char *name)
{
        Bfcd__Forget body = BFCD__FORGET__INIT;
        Bfcd__Request request = REQUEST(FORGET, forget, &body);
        Bfcd__Reply *reply = NULL;
        int r = client_check(client);

        if (r < 0)
                return r;
        if (!name)
                return error_set(-EINVAL, "bfc_forget: name is NULL");
        body.name = (char *)(uintptr_t)name;
        r = client_request(client, NULL, &request, BFCD__REPLY__BODY_DONE, &reply, &(uint64_t){ 0 });
        if (r == 0)
                bfcd__reply__free_unpacked(reply, NULL);
        return r;
}
