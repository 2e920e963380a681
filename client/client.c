/* The client: connecting, what the daemon tells, and the end; see client.h. What jobs do with
 * memory is in memory.c, copy.c and figures.c.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Events of the daemon are handled by the client's own threads, or in bfc_poll(). The tables
 * change under `lock`. It is not held while the daemon is asked, nor while an event is answered.
 *
 * Extents are mapped by whichever thread reads, before it hands out the reply
 * whose block lies in them. */
#include "client/client.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "client/clock.h"
#include "client/error.h"
#include "proto/frame.h"

#define PROTOCOL_VERSION   1u
#define DEFAULT_SOCKET     "/run/bfcd/bfcd.sock"
#define GOODBYE_TIMEOUT_MS 5000u
#define GOODBYE_LATE_MS    1000u                               /* of a session that was given up */
#define GOODBYE_EXIT_MS    1000u                               /* of a process that exits */
#define OPTIONS_MIN_BYTES  offsetof(struct bfc_options, flags) /* the first version's */
#define DEFAULT_SLAB_BYTES (UINT64_C(2) << 20)
#define MAX_SLAB_BYTES     (UINT64_C(1) << 30)
#define DEFAULT_RETURN_MS  30000u

/* ---- shared pieces ------------------------------------------------------- */

int client_check(const bfc_client *client)
{
        if (!client)
                return error_set(-EINVAL, "client is NULL");
        if (!*client->alive)
                return error_set(-ECHILD,
                                 "this client belongs to the parent of this forked process: call "
                                 "bfc_connect() in the child to allocate memory; to use the parent's "
                                 "host blocks, the parent must connect with BFC_INHERIT");
        return 0;
}

int client_lost(bfc_client *client, int error)
{
        char why[sizeof(client->end_reason)];

        if (error == -ECONNRESET && call_was_told(client->connection, why, sizeof(why)))
                error = -EIDRM;
        if (error == -ECONNRESET || error == -EPROTO || error == -EIDRM)
                __atomic_store_n(&client->lost, error, __ATOMIC_RELAXED);
        pthread_mutex_lock(&client->lock);
        memcpy(why, client->end_reason, sizeof(why));
        pthread_mutex_unlock(&client->lock);
        if (error == -EIDRM && (why[0] || call_was_told(client->connection, why, sizeof(why))))
                return error_set(error, "%s", why);
        if (why[0])
                return error_set(error, "the session ended: %s", why);
        if (error == -ECONNRESET)
                return error_set(error, "the daemon ended the session or is not running");
        if (error == -EPROTO)
                return error_set(error, "the session ended: the daemon sent an invalid message");
        if (error == -EMFILE)
                return error_set(error, "this process is at its limit of open files, so it cannot receive "
                                        "the daemon's: raise RLIMIT_NOFILE (ulimit -n)");
        return error_set(error, "the request to the daemon failed: %s", strerror(-error));
}

/* 0: a reply of the kind expected. Else what it says, and it is freed. */
static int client_judge(Bfcd__Reply *reply, Bfcd__Reply__BodyCase expected)
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

/* The call is over. What the daemon gave before it read of that is freed; where the daemon is gone,
 * its successor is not told that there is anything. */
static int client_interrupted(bfc_client *client, Bfcd__Reply *reply, uint64_t epoch)
{
        const Bfcd__Block *block = NULL;

        if (reply && reply->body_case == BFCD__REPLY__BODY_BLOCK)
                block = reply->block;
        else if (reply && reply->body_case == BFCD__REPLY__BODY_ATTACHED)
                block = reply->attached->block;
        if (block)
                client_give_back(client, block->block_id, epoch);
        if (reply)
                bfcd__reply__free_unpacked(reply, NULL);
        return error_set(-EINTR, "the wait was interrupted by a signal or by cancel_fd");
}

/* One request and its reply, of the kind expected. A refusal is the error that
 * the daemon gives, with its sentence. upto: as call_send_at() takes it; -ESTALE. call: NULL, or see
 * client_ask_for(); then upto is 0. */
static int client_ask_upto(bfc_client *client, uint64_t upto, struct client_call *call,
                           Bfcd__Request *request, Bfcd__Reply__BodyCase expected, Bfcd__Reply **ret_reply,
                           uint64_t *ret_epoch)
{
        struct call_interrupt *interrupt = call ? call->interrupt : NULL;
        Bfcd__Reply *reply = NULL;
        int r;

        do {
                r = interrupt ? call_send_interruptible(client->connection, interrupt, request, &reply,
                                                        ret_epoch)
                              : call_send_at(client->connection, upto, request, &reply, ret_epoch);
                __atomic_add_fetch(&client->n_calls, 1, __ATOMIC_RELAXED);
                if (interrupt && interrupt->is_interrupted && r != -EPROTO)
                        return client_interrupted(client, reply, *ret_epoch);
        } while (r == -ECONNRESET && (r = client_come_back_for(client, *ret_epoch, interrupt)) == 0);
        if (r == -EINTR)
                return client_interrupted(client, NULL, *ret_epoch);
        if (r == -ESTALE)
                return r;
        if (r < 0)
                return client_lost(client, r);
        if (call)
                call->is_final = reply->body_case == BFCD__REPLY__BODY_REFUSAL && reply->refusal->is_final;
        r = client_judge(reply, expected);
        if (r == 0)
                *ret_reply = reply;
        return r;
}

int client_ask(bfc_client *client, Bfcd__Request *request, Bfcd__Reply__BodyCase expected,
               Bfcd__Reply **ret_reply, uint64_t *ret_epoch)
{
        return client_ask_upto(client, 0, NULL, request, expected, ret_reply, ret_epoch);
}

int client_ask_for(bfc_client *client, struct client_call *call, Bfcd__Request *request,
                   Bfcd__Reply__BodyCase expected, Bfcd__Reply **ret_reply, uint64_t *ret_epoch)
{
        return client_ask_upto(client, 0, call, request, expected, ret_reply, ret_epoch);
}

int client_give_back(bfc_client *client, uint64_t block_id, uint64_t epoch)
{
        Bfcd__Request request = BFCD__REQUEST__INIT;
        Bfcd__Free body = BFCD__FREE__INIT;
        Bfcd__Reply *reply = NULL;
        uint64_t at;
        int r;

        body.block_id = block_id;
        request.body_case = BFCD__REQUEST__BODY_FREE;
        request.free = &body;
        r = client_ask_upto(client, epoch, NULL, &request, BFCD__REPLY__BODY_DONE, &reply, &at);
        if (r == 0)
                bfcd__reply__free_unpacked(reply, NULL);
        return r == -ESTALE ? 0 : r;
}

/* The first refusal of these, all of which are freed. */
static int client_judge_all(Bfcd__Reply **replies, size_t n)
{
        int r = 0;

        for (size_t i = 0; i < n; i++) {
                int error = replies[i] ? client_judge(replies[i], BFCD__REPLY__BODY_DONE) : 0;

                if (replies[i] && error == 0)
                        bfcd__reply__free_unpacked(replies[i], NULL);
                replies[i] = NULL;
                r = r < 0 ? r : error;
        }
        return r;
}

int client_give_back_all(bfc_client *client, const uint64_t *block_ids, size_t n, uint64_t epoch)
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
                __atomic_add_fetch(&client->n_calls, n, __ATOMIC_RELAXED);
                error = client_judge_all(replies, n);
                r = r < 0 ? r : error;
        } while (lost == -ECONNRESET && (lost = client_come_back(client, at)) == 0);
        return lost < 0 && lost != -ESTALE ? client_lost(client, lost) : r;
}

/* Lists what there is, for a name that there is not. */
static int client_no_partition(const Bfcd__HelloReply *hello, const char *name)
{
        char list[600] = "";
        size_t n = 0;

        for (size_t i = 0; i < hello->n_partitions && n < sizeof(list); i++) {
                int w = snprintf(list + n, sizeof(list) - n, "%s%s", i > 0 ? ", " : "",
                                 hello->partitions[i]->name);

                n += w > 0 ? (size_t)w : 0;
        }
        return error_set(-ENOENT, "no quota for tenant '%s' in '%s'; you can see: %s", hello->tenant, name,
                         list[0] ? list : "none");
}

static int client_find_partition(const Bfcd__HelloReply *hello, const char *name, uint32_t *ret_index)
{
        for (size_t i = 0; i < hello->n_partitions; i++) {
                if (strcmp(hello->partitions[i]->name, name) == 0) {
                        *ret_index = (uint32_t)i;
                        return 0;
                }
        }
        return client_no_partition(hello, name);
}

int client_partition_index(const bfc_client *client, const char *name, uint32_t *ret_index)
{
        if (!name) {
                *ret_index = client->partition;
                return 0;
        }
        return client_find_partition(client->hello->hello, name, ret_index);
}

/* An extent has the handle that its partition's are opened by, or none. */
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
        return error_set(why,
                         "partition '%s': memory of device '%s' could not be mapped in this process: %s%s",
                         p->name, p->device, strerror(-why),
                         !by_handle || why == -ENODEV || why == -ENOMEM
                                 ? ""
                                 : "; the driver may refuse CUDA IPC handles to other users and "
                                   "containers: for these, set 'share: fd' for the partition in "
                                   "bfcd.yaml");
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
                struct device_extent memory = { .fd = fds[i], .n_bytes = e->n_bytes };

                /* Before the hello's reply there are no partitions. */
                if (r == 0 && (!client->places || e->partition >= client->hello->hello->n_partitions))
                        r = -EPROTO;
                if (r == 0)
                        r = extent_handle(e, &client->places[e->partition], &memory);
                if (r == 0) {
                        r = regions_map(&client->regions, &extent, &client->places[e->partition], &memory);
                        if (r == REGIONS_UNMAPPED) { /* the caller who gets a block there is told */
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
        if (r < 0) /* there is no coming back from that */
                __atomic_store_n(&client->lost, r == -EPROTO ? r : -ECONNRESET, __ATOMIC_RELAXED);
        return r;
}

/* ---- the client's thread -------------------------------------------------- */

static int client_end(bfc_client *client, int error, const char *why)
{
        pthread_mutex_lock(&client->lock);
        if (!client->end_reason[0])
                snprintf(client->end_reason, sizeof(client->end_reason), "%s", why);
        pthread_mutex_unlock(&client->lock);
        __atomic_store_n(&client->lost, error, __ATOMIC_RELAXED);
        call_end(client->connection, error);
        return error;
}

/* Whether the daemon of that epoch may take the extent back. The lock is held. */
static int client_may_retire(const bfc_client *client, uint64_t epoch, uint64_t extent_id)
{
        struct region_place place;

        /* Another was told that it is mapped, and reckons with that. */
        if (client->epoch != epoch)
                return -ESTALE;
        if (regions_find_extent(&client->regions, extent_id, &place) < 0 ||
            blocks_lie_in(&client->blocks, place.region_id, place.offset, place.n_bytes) ||
            blocks_lie_in(&client->slabs, place.region_id, place.offset, place.n_bytes) ||
            (client->cache && cache_lies_in(client->cache, place.region_id, place.offset, place.n_bytes)))
                return -EPROTO;
        return 0;
}

/* No block of this client is in these extents, and what was there was given back when no work touched
 * it any more: behind a wait, or an event. So nothing is waited for, which would spoil captures. Where the
 * driver refuses the first one for now, the whole is tried again. */
static int client_on_retire(void *userdata, uint64_t epoch, const uint64_t *extent_ids, size_t n_extent_ids)
{
        bfc_client *client = userdata;
        size_t i;
        int r = 0;

        pthread_mutex_lock(&client->lock);
        for (i = 0; r == 0 && i < n_extent_ids; i++) {
                r = client_may_retire(client, epoch, extent_ids[i]);
                if (r == 0)
                        r = regions_unmap(&client->regions, extent_ids[i]);
        }
        pthread_mutex_unlock(&client->lock);
        if (r == 0 || r == -ESTALE || (r == -EBUSY && i == 1)) /* i is one further */
                return r;
        if (r == -EPROTO)
                return client_end(client, r, "the daemon sent a Retire for memory that is in use");
        return client_end(client, -ECONNRESET, "memory could not be unmapped");
}

/* What is idle here is the daemon's by now, or soon: nothing may be cut from it any more, and
 * there may be no call for long that would find that out. What is known already stays. */
static void client_events_ended(void *userdata)
{
        bfc_client *client = userdata;
        int known = 0;

        if (!comeback_is_stopping(&client->comeback))
                __atomic_compare_exchange_n(&client->lost, &known, -ECONNRESET, false, __ATOMIC_RELAXED,
                                            __ATOMIC_RELAXED);
}

static int client_on_trim(void *userdata, const Bfcd__Trim *trim, uint64_t *ret_bytes)
{
        bfc_client *client = userdata;
        int r = client_trim_ranges(client, trim, ret_bytes);

        if (r == -EPROTO)
                return client_end(client, r, "the daemon sent a Trim with invalid ranges");
        return r;
}

static int client_events_lost(void *userdata, uint64_t epoch)
{
        return client_come_back(userdata, epoch);
}

/* What becomes idle goes back at once; what is idle now the daemon asks for. */
static int client_on_draining(void *userdata, uint32_t partition, bool is_over)
{
        bfc_client *client = userdata;

        if (partition >= client->hello->hello->n_partitions)
                return client_end(client, -EPROTO, "the daemon sent a drain of an unknown partition");
        pthread_mutex_lock(&client->lock);
        client_set_draining(client, partition, !is_over);
        pthread_mutex_unlock(&client->lock);
        return 0;
}

void client_forget_drains(bfc_client *client)
{
        pthread_mutex_lock(&client->lock);
        for (uint32_t i = 0; i < client->hello->hello->n_partitions; i++)
                client_set_draining(client, i, false);
        pthread_mutex_unlock(&client->lock);
}

static void client_events_failed(void *userdata, int error)
{
        client_end(userdata, error, "the events socket failed");
}

static int client_look(void *userdata)
{
        return streams_watch(userdata);
}

static const struct events_ops client_events_ops = { .retire = client_on_retire,
                                                     .trim = client_on_trim,
                                                     .draining = client_on_draining,
                                                     .look = client_look,
                                                     .lost = client_events_lost,
                                                     .ended = client_events_ended,
                                                     .failed = client_events_failed };

/* By its thread, or where the program polls. */
static bool client_takes_events(const struct bfc_options *options)
{
        return (options->flags & (BFC_NO_THREAD | BFC_POLL)) != BFC_NO_THREAD;
}

static int client_start_thread(bfc_client *client, const struct bfc_options *options)
{
        bool granted = client->hello->hello->capabilities & BFCD__CAPABILITY__CAPABILITY_EVENTS;
        int r;

        if (!granted)
                return 0;
        if (!client_takes_events(options))
                return error_set(-EPROTO, "the daemon sent an events socket that was not requested");
        r = (options->flags & BFC_POLL ? events_new : events_start)(
                call_take_events_fd(client->connection), &client_events_ops, client, &client->events);
        return r < 0 ? error_set(r, "the client's thread cannot be started: %s", strerror(-r)) : 0;
}

/* ---- connecting ---------------------------------------------------------- */

/* The option, or else the environment's word (not where it is somebody else's, in
 * a set-user-ID program), or else the default. */
static const char *pick(const char *option, const char *variable, const char *fallback)
{
        const char *value = option ? option : variable ? secure_getenv(variable) : NULL;

        return value && value[0] ? value : fallback;
}

/* What the environment says of the cache. It is on, but where the daemon could not have back what
 * lies idle in it: then it must be asked for. */
static int options_read_cache(struct bfc_options *options)
{
        bool is_asked_for = options->cache_idle_bytes > 0 || options->cache_slab_bytes > 0;
        const char *word =
                pick(NULL, "BFC_CACHE", is_asked_for || client_takes_events(options) ? "on" : "off");

        if (options->cache_slab_bytes > MAX_SLAB_BYTES)
                return error_set(-EINVAL, "bfc_options.cache_slab_bytes is %llu: the maximum is %llu",
                                 (unsigned long long)options->cache_slab_bytes,
                                 (unsigned long long)MAX_SLAB_BYTES);
        if (strcmp(word, "off") == 0)
                options->flags |= BFC_NO_CACHE;
        else if (strcmp(word, "on") != 0)
                return error_set(-EINVAL, "BFC_CACHE is \"%s\": it must be on or off", word);
        if (options->cache_slab_bytes == 0)
                options->cache_slab_bytes = DEFAULT_SLAB_BYTES;
        return 0;
}

static int options_read_inherit(struct bfc_options *options)
{
        const char *word = pick(NULL, "BFC_INHERIT", "off");

        if (strcmp(word, "on") == 0)
                options->flags |= BFC_INHERIT;
        else if (strcmp(word, "off") != 0)
                return error_set(-EINVAL, "BFC_INHERIT is \"%s\": it must be on or off", word);
        return 0;
}

static int options_read_return(struct bfc_options *options)
{
        const char *word = pick(NULL, "BFC_RETURN_MS", "");
        unsigned long long n;
        char *end;

        if (options->return_ms == 0 && word[0]) {
                errno = 0;
                n = strtoull(word, &end, 10);
                if (word[0] < '0' || word[0] > '9' || *end || errno || n == 0 || n > UINT32_MAX)
                        return error_set(-EINVAL, "BFC_RETURN_MS is \"%s\": it must be a number from 1 to %u",
                                         word, UINT32_MAX);
                options->return_ms = (uint32_t)n;
        }
        if (options->return_ms == 0)
                options->return_ms = DEFAULT_RETURN_MS;
        return 0;
}

/* The options as this library knows them. A caller built against a later header
 * may have more, as long as it asks for nothing there; one built against an
 * earlier header has fewer. */
static int options_read(const struct bfc_options *options, struct bfc_options *ret)
{
        struct bfc_options known = { .struct_size = sizeof(known) };
        int r;

        if (options) {
                const unsigned char *bytes = (const unsigned char *)options;

                if (options->struct_size < OPTIONS_MIN_BYTES)
                        return error_set(-EINVAL,
                                         "bfc_options.struct_size is %zu: set it to sizeof(struct "
                                         "bfc_options), %zu",
                                         options->struct_size, sizeof(known));
                for (size_t i = sizeof(known); i < options->struct_size; i++)
                        if (bytes[i] != 0)
                                return error_set(-EINVAL,
                                                 "bfc_options has an option that this library version, "
                                                 "%s, does not support",
                                                 bfc_version());
                memcpy(&known, options,
                       options->struct_size < sizeof(known) ? options->struct_size : sizeof(known));
                if (known.flags & ~(BFC_NO_THREAD | BFC_NO_CACHE | BFC_POLL | BFC_INHERIT))
                        return error_set(-EINVAL,
                                         "bfc_options.flags has bits that this library version, %s, does "
                                         "not support",
                                         bfc_version());
        }
        known.socket = pick(known.socket, "BFC_SOCKET", DEFAULT_SOCKET);
        known.partition = pick(known.partition, "BFC_PARTITION", "");
        known.tenant = pick(known.tenant, "BFC_TENANT", "");
        known.name = pick(known.name, NULL, program_invocation_short_name);
        known.trace = pick(known.trace, "BFC_TRACE", NULL);
        *ret = known;
        r = options_read_return(ret);
        if (r == 0)
                r = options_read_inherit(ret);
        return r < 0 ? r : options_read_cache(ret);
}

static int connect_failed(int error, const char *path)
{
        switch (error) {
        case -ENOENT:
                return error_set(
                        error,
                        "cannot reach bfcd at %s: the socket does not exist. Try: systemctl status bfcd; "
                        "or check BFC_SOCKET",
                        path);
        case -ECONNREFUSED:
                return error_set(
                        error,
                        "cannot reach bfcd at %s: no process listens there. Try: systemctl status bfcd",
                        path);
        case -EACCES:
                return error_set(
                        error,
                        "cannot reach bfcd at %s: permission denied for this user. Check the modes of the "
                        "socket and of its parent directories",
                        path);
        case -ENAMETOOLONG:
                return error_set(
                        error,
                        "cannot reach bfcd at %s: the path is too long; a socket path has at most 107 bytes",
                        path);
        default:
                return error_set(error, "cannot reach bfcd at %s: %s", path, strerror(-error));
        }
}

static void *client_free(bfc_client *client)
{
        if (!client)
                return NULL;
        if (client->is_watched)
                fork_remove(&client->fork);
        events_stop(client->events, 0);
        events_free(client->events);
        call_free(client->connection);
        streams_free(client);
        regions_clear(&client->regions);
        blocks_clear(&client->blocks);
        shared_clear(client);
        blocks_clear(&client->slabs);
        cache_free(client->cache);
        magazines_free(client->magazines);
        free(client->stats);
        client_pages_close(&client->pages);
        free(client->places);
        free(client->is_seen);
        recorder_free(client->recorder);
        if (client->hello)
                bfcd__reply__free_unpacked(client->hello, NULL);
        if (client->alive)
                munmap((void *)(uintptr_t)client->alive, client->alive_bytes);
        comeback_clear(&client->comeback);
        pthread_mutex_destroy(&client->lock);
        pthread_mutex_destroy(&client->split_lock);
        free(client);
        return NULL;
}

/* The child closes its copies of the sockets. An open copy would keep the session's place at the daemon
 * where the parent dies with file descriptors unread. */
static void client_in_child(struct fork_entry *entry)
{
        bfc_client *client = entry->userdata;

        call_forget(client->connection);
        events_forget(client->events);
}

static void client_watch_forks(bfc_client *client)
{
        client->fork = (struct fork_entry){ .in_child = client_in_child, .userdata = client };
        fork_add(&client->fork);
        client->is_watched = true;
}

/* It is held for a fraction of the time that a thread takes to sleep and to be woken, so who waits looks
 * again for a while before it sleeps. */
static void lock_init(pthread_mutex_t *lock)
{
        pthread_mutexattr_t attributes;

        pthread_mutexattr_init(&attributes);
#ifdef __GLIBC__
        pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_ADAPTIVE_NP);
#endif
        pthread_mutex_init(lock, &attributes);
        pthread_mutexattr_destroy(&attributes);
}

static int client_new(bfc_client **ret)
{
        bfc_client *client = fork_watch() == 0 ? calloc(1, sizeof(*client)) : NULL;
        char *page;

        if (!client)
                return error_set(-ENOMEM, "this process is out of memory");
        client->n_forks = fork_count();
        client->epoch = 1;
        lock_init(&client->lock);
        pthread_mutex_init(&client->split_lock, NULL);
        client->alive_bytes = (size_t)sysconf(_SC_PAGESIZE);
        page = mmap(NULL, client->alive_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (page == MAP_FAILED) {
                client_free(client);
                return error_set(-ENOMEM, "this process is out of memory");
        }
        client->alive = page;
        if (madvise(page, client->alive_bytes, MADV_WIPEONFORK) < 0) {
                int error = -errno;

                client_free(client);
                return error_set(error,
                                 "this kernel cannot wipe a page on fork: Linux 4.14 or newer is needed");
        }
        page[0] = 1;
        *ret = client;
        return 0;
}

static int place_read(const Bfcd__PartitionInfo *info, struct device_view *ret)
{
        struct device_view place = { .is_cuda = info->device_uuid.len > 0 };

        if (place.is_cuda) {
                if (info->device_uuid.len != sizeof(place.uuid))
                        return -EPROTO;
                memcpy(place.uuid, info->device_uuid.data, sizeof(place.uuid));
        }
        if (place.is_cuda && strcmp(info->share, "cuda-ipc") == 0)
                place.share = DEVICE_SHARE_CUDA_IPC;
        else if (info->share[0] == '\0' || strcmp(info->share, "fd") == 0)
                place.share = DEVICE_SHARE_FD;
        else
                return -EPROTO;
        *ret = place;
        return 0;
}

static int client_read_places(bfc_client *client)
{
        const Bfcd__HelloReply *hello = client->hello->hello;
        struct device_view *places = calloc(hello->n_partitions + 1, sizeof(*places));

        client->is_seen = calloc(hello->n_partitions + 1, sizeof(*client->is_seen));
        client->stats = calloc(hello->n_partitions + 1, sizeof(*client->stats));
        if (!places || !client->is_seen || !client->stats) {
                free(places);
                return error_set(-ENOMEM, "this process is out of memory");
        }
        for (size_t i = 0; i < hello->n_partitions; i++) {
                if (place_read(hello->partitions[i], &places[i]) == 0)
                        continue;
                free(places);
                return error_set(-EPROTO,
                                 "partition '%s' has a share mode that this library version, %s, does not "
                                 "support",
                                 hello->partitions[i]->name, bfc_version());
        }
        client->places = places;
        return 0;
}

/* A partition takes two bytes of the reply at least, so the index of each fits into struct block. */
_Static_assert(FRAME_MAX_PAYLOAD / 2 <= UINT16_MAX, "struct block's partition");

/* What the daemon says of us must be something that the rest can rely on. */
static int client_check_hello(bfc_client *client, const char *partition)
{
        const Bfcd__HelloReply *hello = client->hello->hello;

        if (hello->version == 0 || hello->version > PROTOCOL_VERSION)
                return error_set(-EPROTO,
                                 "the daemon uses protocol version %u; this library supports versions up "
                                 "to %u",
                                 hello->version, PROTOCOL_VERSION);
        if (hello->n_partitions > 0 && hello->default_partition >= hello->n_partitions)
                return error_set(-EPROTO, "the daemon's default partition is not in its list of partitions");
        client->partition = hello->default_partition;
        if (partition[0])
                return client_find_partition(hello, partition, &client->partition);
        if (hello->n_partitions == 0)
                return error_set(-ENOENT, "tenant '%s' has no quota in any partition", hello->tenant);
        return 0;
}

static int client_say_hello(bfc_client *client, const struct bfc_options *options)
{
        Bfcd__Request request = BFCD__REQUEST__INIT;
        Bfcd__Hello hello = BFCD__HELLO__INIT;
        uint64_t epoch;
        int r;

        hello.version = PROTOCOL_VERSION;
        hello.capabilities = BFCD__CAPABILITY__CAPABILITY_PAGES | BFCD__CAPABILITY__CAPABILITY_AGAIN |
                             BFCD__CAPABILITY__CAPABILITY_RETURN;
        /* Without a cache, too: what was freed on a stream may wait to be looked at. */
        if (client_takes_events(options))
                hello.capabilities |= BFCD__CAPABILITY__CAPABILITY_EVENTS |
                                      BFCD__CAPABILITY__CAPABILITY_TRIM | BFCD__CAPABILITY__CAPABILITY_DRAIN;
        hello.name = client->comeback.name;
        hello.tenant = (char *)(uintptr_t)options->tenant;
        hello.partition = (char *)(uintptr_t)options->partition;
        request.body_case = BFCD__REQUEST__BODY_HELLO;
        request.hello = &hello;
        r = client_ask(client, &request, BFCD__REPLY__BODY_HELLO, &client->hello, &epoch);
        if (r == 0)
                r = client_read_places(client);
        if (r < 0)
                return r;
        return client_check_hello(client, options->partition);
}

/* What is idle here the daemon asks for where others need it. A client that it cannot ask leaves
 * half of the tenant's limit to its other processes. */
static uint64_t client_idle_bytes(const bfc_client *client, const struct bfc_options *options,
                                  const Bfcd__PartitionInfo *partition)
{
        bool can_be_asked = client->hello->hello->capabilities & BFCD__CAPABILITY__CAPABILITY_TRIM;

        if (options->cache_idle_bytes > 0)
                return options->cache_idle_bytes;
        return can_be_asked || partition->bytes_limit == 0 ? UINT64_MAX : partition->bytes_limit / 2;
}

static int client_start_cache(bfc_client *client, const struct bfc_options *options)
{
        const Bfcd__HelloReply *hello = client->hello->hello;
        struct cache_sizes *sizes;
        int r;

        sizes = calloc(hello->n_partitions + 1, sizeof(*sizes));
        for (size_t i = 0; sizes && i < hello->n_partitions; i++)
                sizes[i] = (struct cache_sizes){ .slab_bytes = options->cache_slab_bytes,
                                                 .idle_bytes = client_idle_bytes(client, options,
                                                                                 hello->partitions[i]),
                                                 .has_grid = client->places[i].share == DEVICE_SHARE_FD };
        r = sizes ? 0 : -ENOMEM;
        if (r == 0 && !(options->flags & BFC_NO_CACHE))
                r = cache_new(sizes, (uint32_t)hello->n_partitions, &client->cache);
        if (r == 0)
                r = client_start_magazines(client, sizes[client->partition].idle_bytes);
        free(sizes);
        return r < 0 ? error_set(r, "this process is out of memory") : 0;
}

BFC_API int bfc_connect(const struct bfc_options *options, bfc_client **ret_client)
{
        struct bfc_options known = { 0 };
        bfc_client *client = NULL;
        int r;

        if (!ret_client)
                return error_set(-EINVAL, "bfc_connect: ret_client is NULL");
        r = options_read(options, &known);
        if (r < 0)
                return r;
        r = client_new(&client);
        if (r < 0)
                return r;
        client->regions.inherits = known.flags & BFC_INHERIT;
        r = comeback_init(&client->comeback, known.socket, known.name, known.return_ms);
        if (r < 0) {
                client_free(client);
                return r;
        }
        r = call_connect(known.socket, client_on_extents, client, &client->connection);
        if (r < 0)
                r = connect_failed(r, known.socket);
        else
                r = client_say_hello(client, &known);
        if (r == 0 && known.trace)
                r = recorder_open(known.trace, &client->recorder);
        if (r == 0)
                r = client_start_cache(client, &known);
        if (r == 0)
                client_pages_open(client);
        if (r == 0)
                r = streams_new(client);
        if (r == 0)
                r = client_start_thread(client, &known);
        client->polls = client->events && (known.flags & BFC_POLL);
        if (r < 0) {
                client_free(client);
                return r;
        }
        client_watch_forks(client);
        *ret_client = client;
        return 0;
}

BFC_API int bfc_poll(bfc_client *client)
{
        int r = client_check(client);

        if (r < 0)
                return r;
        if (!client->polls)
                return error_set(-EINVAL, "this client has an event thread or no events: connect with "
                                          "BFC_POLL");
        if (__atomic_exchange_n(&client->is_polled, true, __ATOMIC_ACQUIRE))
                return 0; /* another thread is at it */
        r = events_poll(client->events);
        __atomic_store_n(&client->is_polled, false, __ATOMIC_RELEASE);
        if (r == -EBUSY)
                return error_set(r, "memory that the daemon reclaims cannot be unmapped now: the driver "
                                    "refuses this while a stream is captured");
        return r < 0 ? client_lost(client, r) : 0;
}

BFC_API int bfc_poll_fd(const bfc_client *client)
{
        int r = client_check(client);

        if (r < 0)
                return r;
        if (!client->polls)
                return error_set(-EINVAL, "this client has an event thread or no events: connect with "
                                          "BFC_POLL");
        return events_fd(client->events);
}

static int goodbye_once(bfc_client *client, int64_t until_ms, uint64_t *ret_epoch)
{
        Bfcd__Request request = BFCD__REQUEST__INIT;
        Bfcd__Goodbye goodbye = BFCD__GOODBYE__INIT;
        Bfcd__Reply *reply = NULL;
        int64_t left_ms = until_ms - clock_now_ms();
        int r;

        request.body_case = BFCD__REQUEST__BODY_GOODBYE;
        request.goodbye = &goodbye;
        call_set_timeout(client->connection, left_ms > 0 ? (unsigned)left_ms : 1);
        r = call_send_at(client->connection, 0, &request, &reply, ret_epoch);
        if (r == 0)
                bfcd__reply__free_unpacked(reply, NULL);
        return r;
}

/* A daemon that is being started anew would keep what this process has until it exits: so for some
 * time it is waited for. */
static void client_say_goodbye(bfc_client *client)
{
        unsigned timeout_ms = comeback_try_once_more(client) ? GOODBYE_LATE_MS : GOODBYE_TIMEOUT_MS;
        int64_t until_ms = clock_now_ms() + timeout_ms, left_ms;
        uint64_t epoch;

        pthread_mutex_lock(&client->lock);
        client->is_ending = true;
        pthread_mutex_unlock(&client->lock);
        while (goodbye_once(client, until_ms, &epoch) == -ECONNRESET) {
                left_ms = until_ms - clock_now_ms();
                if (left_ms > client->comeback.return_ms)
                        left_ms = client->comeback.return_ms;
                if (left_ms <= 0 || client_come_back_in(client, epoch, (unsigned)left_ms) < 0)
                        break;
        }
}

void client_say_exit(bfc_client *client)
{
        Bfcd__Request request = BFCD__REQUEST__INIT;
        Bfcd__Goodbye goodbye = BFCD__GOODBYE__INIT;

        if (!*client->alive)
                return;
        goodbye.exits = true;
        request.body_case = BFCD__REQUEST__BODY_GOODBYE;
        request.goodbye = &goodbye;
        (void)call_send_within(client->connection, GOODBYE_EXIT_MS, &request);
}

/* Children that have the blocks mapped read zeros from now on. Shared ones are others' as well. */
static void client_wipe_all(bfc_client *client)
{
        const struct block *block;
        size_t cursor = 0;

        if (!client->regions.inherits)
                return;
        pthread_mutex_lock(&client->lock);
        while ((block = blocks_next(&client->blocks, &cursor)))
                if (!shared_has(client, block->ptr))
                        client_wipe(client, regions_partition(&client->regions, block->region_id), block);
        pthread_mutex_unlock(&client->lock);
}

BFC_API void bfc_disconnect(bfc_client *client)
{
        bool is_captured = false;
        int r;

        if (!client)
                return;
        if (!*client->alive) {
                /* Its addresses stay reserved. The rest is memory that a thread of the
                 * parent may have been changing, so it is left alone. */
                call_forget(client->connection);
                events_forget(client->events);
                return;
        }
        /* The thread may wait for the daemon, which may have stopped. */
        comeback_stop(&client->comeback, true);
        if (events_stop(client->events, GOODBYE_TIMEOUT_MS) < 0) {
                call_end(client->connection, -ECONNRESET);
                comeback_hang_up(&client->comeback);
                events_stop(client->events, 0);
        }
        comeback_stop(&client->comeback, false);
        client_wipe_all(client);
        /* Unmapped before it is said: then the daemon may release at once. What cannot
         * be unmapped goes with the process, so there the daemon is left to see that
         * end; a device that is lost holds nothing. */
        for (size_t i = 0; i < client->hello->hello->n_partitions; i++)
                is_captured |= streams_are_captured(client, (uint32_t)i);
        r = regions_unmap_all(&client->regions, is_captured);
        regions_clear(&client->regions);
        if (r == 0 || r == -ENODEV)
                client_say_goodbye(client);
        client_free(client);
}

/* ---- words --------------------------------------------------------------- */

BFC_API const char *bfc_tenant(const bfc_client *client)
{
        return client ? client->hello->hello->tenant : "";
}

BFC_API const char *bfc_partition(const bfc_client *client)
{
        return client ? client->hello->hello->partitions[client->partition]->name : "";
}

BFC_API int bfc_partition_for_device(bfc_client *client, int ordinal, const char **ret_name)
{
        uint8_t uuid[DEVICE_UUID_BYTES];
        const Bfcd__HelloReply *hello;
        int r = client_check(client);

        if (r < 0)
                return r;
        if (!ret_name)
                return error_set(-EINVAL, "bfc_partition_for_device: ret_name is NULL");
        if (ordinal < 0 || device_cuda_ordinal_uuid(ordinal, uuid) < 0)
                return error_set(-ENOENT,
                                 "CUDA device %d is not visible to this process: check "
                                 "CUDA_VISIBLE_DEVICES",
                                 ordinal);
        hello = client->hello->hello;
        for (size_t i = 0; i < hello->n_partitions; i++) {
                if (client->places[i].is_cuda && memcmp(client->places[i].uuid, uuid, sizeof(uuid)) == 0) {
                        *ret_name = hello->partitions[i]->name;
                        return 0;
                }
        }
        return error_set(-ENOENT, "tenant '%s' has no quota in a partition on CUDA device %d", hello->tenant,
                         ordinal);
}

BFC_API const char *bfc_last_error(void)
{
        return error_last();
}

BFC_API const char *bfc_version(void)
{
        return BFC_VERSION;
}
