/* libbfcclient: bfcclient.h on top of calls and regions.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Each function looks first whether it runs in a forked child: `alive` is a page
 * that the kernel wipes there, so this costs one load and no system call, and no
 * lock is taken that a thread of the parent may have held. Then it asks the
 * daemon without any lock, and last writes down the answer under `lock`.
 *
 * What the daemon tells unasked is handled by the client's own thread, also under
 * `lock`, and confirmed without it.
 *
 * Extents are mapped by whichever thread reads, before it hands out the reply
 * whose block lies in them. While a free waits for the device, its block is
 * marked as leaving: a second free of it, or another thread's, finds nothing, and
 * a Retire of where it lies is a lie, so its range lasts. It is removed before
 * the daemon is told, which may hand the same place to another thread at once.
 *
 * Where there is a cache (cache.h) it is asked before the daemon and given before it; its
 * slabs are the daemon's blocks, and ours are cut from them. bytes_reserved is the sum over the
 * slabs and over the blocks that are the daemon's own.
 *
 * Invariant: stats.num_blocks == blocks.n_used == num_allocs - num_frees, and
 * bytes_in_use is the sum over the blocks. */
#include "client/client.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "client/blocks.h"
#include "client/cache.h"
#include "client/call.h"
#include "client/error.h"
#include "client/events.h"
#include "client/recorder.h"
#include "client/region.h"
#include "device/device.h"

#define PROTOCOL_VERSION     1u
#define DEFAULT_SOCKET       "/run/bfcd/bfcd.sock"
#define GOODBYE_TIMEOUT_MS   5000u
#define OPTIONS_MIN_BYTES    offsetof(struct bfc_options, flags) /* the first version's */
#define BLOCK_INFO_MIN_BYTES offsetof(struct bfc_block_info, share)
#define BLOCK_GRANULE        256u
#define DEFAULT_SLAB_BYTES   (UINT64_C(2) << 20)
#define MAX_SLAB_BYTES       (UINT64_C(1) << 30)
#define BFC_API              __attribute__((visibility("default")))

struct bfc_client {
        const volatile char *alive; /* 0 in a forked child */
        size_t alive_bytes;
        struct call_connection *connection;
        struct events *events;      /* NULL: no thread */
        Bfcd__Reply *hello;         /* what the daemon said of us; constant */
        struct device_view *places; /* where its partitions are, one each; constant */
        bool *is_seen;              /* of a GPU's: it is one that this process sees; atomic */
        uint32_t partition;         /* index into its partitions */
        struct recorder *recorder;  /* NULL: none */
        uint64_t n_calls;           /* atomic */
        int lost;                   /* atomic: why the session ended, as far as is known; 0 */

        pthread_mutex_t lock; /* everything below; never held across a call */
        struct cache *cache;  /* NULL: none */
        struct regions regions;
        struct blocks blocks;
        struct bfc_client_stats stats;
        char end_reason[160]; /* why this end ended the session */
};

/* ---- shared pieces ------------------------------------------------------- */

int client_check(const bfc_client *client)
{
        if (!client)
                return error_set(-EINVAL, "there is no client: it is NULL");
        if (!*client->alive)
                return error_set(-ECHILD, "this client belongs to the parent of this process: "
                                          "connect again after fork()");
        return 0;
}

static int client_lost(bfc_client *client, int error)
{
        char why[sizeof(client->end_reason)];

        if (error == -ECONNRESET || error == -EPROTO)
                __atomic_store_n(&client->lost, error, __ATOMIC_RELAXED);
        pthread_mutex_lock(&client->lock);
        memcpy(why, client->end_reason, sizeof(why));
        pthread_mutex_unlock(&client->lock);
        if (why[0])
                return error_set(error, "the session ended: %s", why);
        if (error == -ECONNRESET)
                return error_set(error, "the daemon ended the session, or is gone");
        if (error == -EPROTO)
                return error_set(error,
                                 "the session ended: the daemon sent what makes no sense, or its fds found "
                                 "no room in this process (see RLIMIT_NOFILE)");
        return error_set(error, "asking the daemon failed: %s", strerror(-error));
}

/* One request and its reply, of the kind expected. A refusal is the error that
 * the daemon gives, with its sentence. */
static int client_ask(bfc_client *client, Bfcd__Request *request, Bfcd__Reply__BodyCase expected,
                      Bfcd__Reply **ret_reply)
{
        Bfcd__Reply *reply = NULL;
        int r = call_send(client->connection, request, &reply);

        __atomic_add_fetch(&client->n_calls, 1, __ATOMIC_RELAXED);
        if (r < 0)
                return client_lost(client, r);
        if (reply->body_case == expected) {
                *ret_reply = reply;
                return 0;
        }
        if (reply->body_case == BFCD__REPLY__BODY_REFUSAL && reply->refusal->error > 0 &&
            reply->refusal->error < 4096)
                r = error_set(-(int)reply->refusal->error, "%s", reply->refusal->message);
        else
                r = error_set(-EPROTO, "the daemon answered with something else than was asked");
        bfcd__reply__free_unpacked(reply, NULL);
        return r;
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
        return error_set(-ENOENT, "tenant %s has no quota in a partition named \"%s\"; it has in: %s",
                         hello->tenant, name, list[0] ? list : "none");
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

static int client_partition_index(const bfc_client *client, const char *name, uint32_t *ret_index)
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

/* Called by the reading thread, in the order of the stream. */
static int client_on_extents(void *userdata, const Bfcd__Extents *extents, int *fds)
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
                        if (r < 0)
                                snprintf(client->end_reason, sizeof(client->end_reason),
                                         "an extent of %llu bytes could not be mapped: %s",
                                         (unsigned long long)e->n_bytes, strerror(-r));
                }
                if (fds[i] >= 0)
                        close(fds[i]);
        }
        client->stats.bytes_mapped = client->regions.n_bytes_mapped;
        pthread_mutex_unlock(&client->lock);
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

/* The range of an extent that the daemon takes back. The lock is held. */
static int client_retired_range(const bfc_client *client, uint64_t extent_id, struct device_range **ret)
{
        struct region_place place;

        if (regions_find_extent(&client->regions, extent_id, &place) < 0 ||
            blocks_lie_in(&client->blocks, place.region_id, place.offset, place.n_bytes) ||
            (client->cache && cache_lies_in(client->cache, place.region_id, place.offset, place.n_bytes)))
                return -EPROTO;
        *ret = place.range;
        return 0;
}

static int client_unmap(bfc_client *client, const uint64_t *extent_ids, size_t n_extent_ids)
{
        struct device_range *range;
        int r = 0;

        /* Looked at once more: a daemon that lies can have put a block there meanwhile. */
        pthread_mutex_lock(&client->lock);
        for (size_t i = 0; r == 0 && i < n_extent_ids; i++) {
                r = client_retired_range(client, extent_ids[i], &range);
                if (r == 0)
                        r = regions_unmap(&client->regions, extent_ids[i]);
        }
        client->stats.bytes_mapped = client->regions.n_bytes_mapped;
        pthread_mutex_unlock(&client->lock);
        return r;
}

/* Nothing of this client lies in these extents, so no new work can touch them;
 * what is under way may take long, and nobody is held up by waiting for it. */
static int client_on_retire(void *userdata, const uint64_t *extent_ids, size_t n_extent_ids)
{
        bfc_client *client = userdata;
        struct device_range *range, *last = NULL;
        int r = 0;

        for (size_t i = 0; r == 0 && i < n_extent_ids; i++) {
                pthread_mutex_lock(&client->lock);
                r = client_retired_range(client, extent_ids[i], &range);
                pthread_mutex_unlock(&client->lock);
                if (r == 0 && range != last)
                        r = device_range_finish(range);
                /* On a device that is lost there is nothing to wait for, and the session
                 * goes on for what it has elsewhere. But memory that a broken context
                 * has mapped comes back with the process only: so the session ends. */
                if (r == -ENODEV)
                        r = 0;
                last = range;
        }
        if (r == -EBUSY)
                return r; /* a stream is being captured: asked again */
        if (r == 0)
                r = client_unmap(client, extent_ids, n_extent_ids);
        if (r == -EPROTO)
                return client_end(client, r, "the daemon takes back memory that is in use");
        return r < 0 ? client_end(client, -ECONNRESET, "memory could not be unmapped") : 0;
}

static void client_events_failed(void *userdata, int error)
{
        client_end(userdata, error, "the events socket failed");
}

static const struct events_ops client_events_ops = { client_on_retire, client_events_failed };

static int client_start_thread(bfc_client *client, const struct bfc_options *options)
{
        bool granted = client->hello->hello->capabilities & BFCD__CAPABILITY__CAPABILITY_EVENTS;
        int r;

        if (!granted)
                return 0;
        if (options->flags & BFC_NO_THREAD)
                return error_set(-EPROTO, "the daemon has events, which it was not asked for");
        r = events_start(call_take_events_fd(client->connection), &client_events_ops, client,
                         &client->events);
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

/* What the environment says of the cache. Off, where neither it nor the options ask
 * for one: nobody can yet fetch back what lies idle in it. */
static int options_read_cache(struct bfc_options *options)
{
        bool is_asked_for = options->cache_idle_bytes > 0 || options->cache_slab_bytes > 0;
        const char *word = pick(NULL, "BFC_CACHE", is_asked_for ? "on" : "off");

        if (options->cache_slab_bytes > MAX_SLAB_BYTES)
                return error_set(-EINVAL, "bfc_options.cache_slab_bytes is %llu: at most %llu make sense",
                                 (unsigned long long)options->cache_slab_bytes,
                                 (unsigned long long)MAX_SLAB_BYTES);
        if (strcmp(word, "off") == 0)
                options->flags |= BFC_NO_CACHE;
        else if (strcmp(word, "on") != 0)
                return error_set(-EINVAL, "BFC_CACHE is \"%s\": it can be on or off", word);
        if (options->cache_slab_bytes == 0)
                options->cache_slab_bytes = DEFAULT_SLAB_BYTES;
        return 0;
}

/* The options as this library knows them. A caller built against a later header
 * may have more, as long as it asks for nothing there; one built against an
 * earlier header has fewer. */
static int options_read(const struct bfc_options *options, struct bfc_options *ret)
{
        struct bfc_options known = { .struct_size = sizeof(known) };

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
                                                 "bfc_options has an option that this library, %s, "
                                                 "does not know",
                                                 bfc_version());
                memcpy(&known, options,
                       options->struct_size < sizeof(known) ? options->struct_size : sizeof(known));
                if (known.flags & ~(BFC_NO_THREAD | BFC_NO_CACHE))
                        return error_set(-EINVAL,
                                         "bfc_options.flags has bits that this library, %s, does not know",
                                         bfc_version());
        }
        known.socket = pick(known.socket, "BFC_SOCKET", DEFAULT_SOCKET);
        known.partition = pick(known.partition, "BFC_PARTITION", "");
        known.tenant = pick(known.tenant, "BFC_TENANT", "");
        known.name = pick(known.name, NULL, program_invocation_short_name);
        known.trace = pick(known.trace, "BFC_TRACE", NULL);
        *ret = known;
        return options_read_cache(ret);
}

static int connect_failed(int error, const char *path)
{
        switch (error) {
        case -ENOENT:
                return error_set(error,
                                 "no daemon at %s: there is no such socket; is bfcd running, and is "
                                 "BFC_SOCKET right?",
                                 path);
        case -ECONNREFUSED:
                return error_set(error, "no daemon at %s: nobody listens there; is bfcd running?", path);
        case -EACCES:
                return error_set(error,
                                 "the socket %s may not be used by this user: look at its mode and at "
                                 "the folders above it",
                                 path);
        case -ENAMETOOLONG:
                return error_set(error, "the socket's path is too long, at most 107 bytes: %s", path);
        default:
                return error_set(error, "connecting to %s: %s", path, strerror(-error));
        }
}

static void *client_free(bfc_client *client)
{
        if (!client)
                return NULL;
        events_stop(client->events);
        events_free(client->events);
        call_free(client->connection);
        regions_clear(&client->regions);
        blocks_clear(&client->blocks);
        cache_free(client->cache);
        free(client->places);
        free(client->is_seen);
        recorder_free(client->recorder);
        if (client->hello)
                bfcd__reply__free_unpacked(client->hello, NULL);
        if (client->alive)
                munmap((void *)(uintptr_t)client->alive, client->alive_bytes);
        pthread_mutex_destroy(&client->lock);
        free(client);
        return NULL;
}

static int client_new(bfc_client **ret)
{
        bfc_client *client = calloc(1, sizeof(*client));
        char *page;

        if (!client)
                return error_set(-ENOMEM, "this process is out of memory");
        pthread_mutex_init(&client->lock, NULL);
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
        if (!places || !client->is_seen) {
                free(places);
                return error_set(-ENOMEM, "this process is out of memory");
        }
        for (size_t i = 0; i < hello->n_partitions; i++) {
                if (place_read(hello->partitions[i], &places[i]) == 0)
                        continue;
                free(places);
                return error_set(-EPROTO,
                                 "the daemon shares partition %s in a way that this library, %s, "
                                 "does not know",
                                 hello->partitions[i]->name, bfc_version());
        }
        client->places = places;
        return 0;
}

/* What the daemon says of us must be something that the rest can rely on. */
static int client_check_hello(bfc_client *client, const char *partition)
{
        const Bfcd__HelloReply *hello = client->hello->hello;

        if (hello->version == 0 || hello->version > PROTOCOL_VERSION)
                return error_set(-EPROTO,
                                 "the daemon speaks version %u of the protocol, this library up to %u",
                                 hello->version, PROTOCOL_VERSION);
        if (hello->n_partitions > 0 && hello->default_partition >= hello->n_partitions)
                return error_set(-EPROTO, "the daemon names a default partition that it does not list");
        client->partition = hello->default_partition;
        if (partition[0])
                return client_find_partition(hello, partition, &client->partition);
        if (hello->n_partitions == 0)
                return error_set(-ENOENT, "tenant %s has no quota in any partition", hello->tenant);
        return 0;
}

static int client_say_hello(bfc_client *client, const struct bfc_options *options)
{
        Bfcd__Request request = BFCD__REQUEST__INIT;
        Bfcd__Hello hello = BFCD__HELLO__INIT;
        char name[64];
        int r;

        snprintf(name, sizeof(name), "%s", options->name);
        hello.version = PROTOCOL_VERSION;
        if (!(options->flags & BFC_NO_THREAD))
                hello.capabilities = BFCD__CAPABILITY__CAPABILITY_EVENTS;
        hello.name = name;
        hello.tenant = (char *)(uintptr_t)options->tenant;
        hello.partition = (char *)(uintptr_t)options->partition;
        request.body_case = BFCD__REQUEST__BODY_HELLO;
        request.hello = &hello;
        r = client_ask(client, &request, BFCD__REPLY__BODY_HELLO, &client->hello);
        if (r == 0)
                r = client_read_places(client);
        if (r < 0)
                return r;
        return client_check_hello(client, options->partition);
}

/* What is idle here nobody else can use. So by default half of the tenant's limit is left to
 * its other processes. */
static uint64_t client_idle_bytes(const struct bfc_options *options, const Bfcd__PartitionInfo *partition)
{
        if (options->cache_idle_bytes > 0)
                return options->cache_idle_bytes;
        return partition->bytes_limit > 0 ? partition->bytes_limit / 2 : UINT64_MAX;
}

static int client_start_cache(bfc_client *client, const struct bfc_options *options)
{
        const Bfcd__HelloReply *hello = client->hello->hello;
        struct cache_sizes *sizes;
        int r;

        if (options->flags & BFC_NO_CACHE)
                return 0;
        sizes = calloc(hello->n_partitions + 1, sizeof(*sizes));
        for (size_t i = 0; sizes && i < hello->n_partitions; i++)
                sizes[i] = (struct cache_sizes){ options->cache_slab_bytes,
                                                 client_idle_bytes(options, hello->partitions[i]) };
        r = sizes ? cache_new(sizes, (uint32_t)hello->n_partitions, &client->cache) : -ENOMEM;
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
                r = client_start_thread(client, &known);
        if (r < 0) {
                client_free(client);
                return r;
        }
        *ret_client = client;
        return 0;
}

BFC_API void bfc_disconnect(bfc_client *client)
{
        Bfcd__Request request = BFCD__REQUEST__INIT;
        Bfcd__Goodbye goodbye = BFCD__GOODBYE__INIT;
        Bfcd__Reply *reply = NULL;
        int r;

        if (!client)
                return;
        if (!*client->alive) {
                /* The mappings are not here; the rest is memory that a thread of the
                 * parent may have been changing, so it is left alone. */
                call_forget(client->connection);
                events_forget(client->events);
                return;
        }
        events_stop(client->events);
        /* Unmapped before it is said: then the daemon may release at once. What cannot
         * be unmapped goes with the process, so there the daemon is left to see that
         * end; a device that is lost holds nothing. */
        r = regions_unmap_all(&client->regions);
        regions_clear(&client->regions);
        if (r == 0 || r == -ENODEV) {
                request.body_case = BFCD__REQUEST__BODY_GOODBYE;
                request.goodbye = &goodbye;
                call_set_timeout(client->connection, GOODBYE_TIMEOUT_MS);
                if (call_send(client->connection, &request, &reply) == 0)
                        bfcd__reply__free_unpacked(reply, NULL);
        }
        client_free(client);
}

/* ---- blocks -------------------------------------------------------------- */

static void count_alloc(struct bfc_client_stats *s, const struct block *block)
{
        s->num_allocs++;
        s->num_blocks++;
        s->bytes_in_use += block->n_bytes;
        s->bytes_requested += block->n_requested;
        if (s->bytes_in_use > s->peak_bytes_in_use)
                s->peak_bytes_in_use = s->bytes_in_use;
        if (block->n_bytes > s->largest_alloc_size)
                s->largest_alloc_size = block->n_bytes;
}

static void count_free(struct bfc_client_stats *s, const struct block *block)
{
        s->num_frees++;
        s->num_blocks--;
        s->bytes_in_use -= block->n_bytes;
        s->bytes_requested -= block->n_requested;
}

static void count_reserved(struct bfc_client_stats *s, uint64_t n_bytes)
{
        s->bytes_reserved += n_bytes;
        if (s->bytes_reserved > s->peak_bytes_reserved)
                s->peak_bytes_reserved = s->bytes_reserved;
}

/* Writes a new block down. Lock held. */
static int client_keep(bfc_client *client, struct block *block, uint64_t n_requested, void **ret_ptr)
{
        int r;

        block->n_requested = n_requested;
        r = blocks_add(&client->blocks, block);
        if (r < 0)
                return r == -EEXIST ? -EPROTO : r;
        count_alloc(&client->stats, block);
        *ret_ptr = (void *)(uintptr_t)block->ptr;
        return 0;
}

/* A block out of what this client has already. Lock held. CACHE_MISS. */
static int client_cut(bfc_client *client, uint32_t partition, uint64_t n_bytes, void **ret_ptr)
{
        struct block block;
        int r = cache_alloc(client->cache, partition, n_bytes, &block);

        if (r != 0)
                return r;
        r = client_keep(client, &block, n_bytes, ret_ptr);
        if (r < 0)
                cache_dealloc(&block);
        return r;
}

/* What the daemon gave: into the cache and cut, or as it is where the cache cannot take
 * it. Lock held. *kept: the daemon's block is written down, also where this fails. */
static int client_take(bfc_client *client, uint32_t partition, const Bfcd__Block *got, uint64_t n_bytes,
                       uint64_t flags, bool *kept, void **ret_ptr)
{
        struct block block = { .block_id = got->block_id,
                               .region_id = got->region_id,
                               .offset = got->offset,
                               .n_bytes = got->n_bytes };
        void *ptr;
        int r;

        r = regions_resolve(&client->regions, got->region_id, got->offset, got->n_bytes, &ptr);
        if (r < 0)
                return r;
        block.ptr = ptr;
        if (client->cache && flags == 0) {
                struct cache_given given = {
                        got->block_id, got->region_id, regions_size(&client->regions, got->region_id),
                        got->offset,   got->n_bytes,   ptr
                };

                r = cache_add(client->cache, partition, &given);
                if (r == -EEXIST)
                        return -EPROTO; /* it gave that place before */
                *kept = r == 0;
        }
        if (*kept) {
                r = client_cut(client, partition, n_bytes, ret_ptr);
                if (r == CACHE_MISS && cache_take_wrong(client->cache, partition, got->block_id) < 0)
                        r = -ENOMEM;
                *kept = r != CACHE_MISS;
                if (*kept)
                        count_reserved(&client->stats, got->n_bytes);
                return r;
        }
        if (got->n_bytes < n_bytes)
                return CACHE_MISS;
        r = client_keep(client, &block, n_bytes, ret_ptr);
        *kept = r == 0;
        if (*kept)
                count_reserved(&client->stats, got->n_bytes);
        return r;
}

static int client_give_back(bfc_client *client, uint64_t block_id)
{
        Bfcd__Request request = BFCD__REQUEST__INIT;
        Bfcd__Free body = BFCD__FREE__INIT;
        Bfcd__Reply *reply = NULL;
        int r;

        body.block_id = block_id;
        request.body_case = BFCD__REQUEST__BODY_FREE;
        request.free = &body;
        r = client_ask(client, &request, BFCD__REPLY__BODY_DONE, &reply);
        if (r < 0)
                return r;
        bfcd__reply__free_unpacked(reply, NULL);
        return 0;
}

static int client_malloc_failed(bfc_client *client, int error)
{
        pthread_mutex_lock(&client->lock);
        client->stats.num_failures++;
        pthread_mutex_unlock(&client->lock);
        return error;
}

/* An extent that cannot be mapped would end the session, so this is found out
 * before one is asked for. Looked up once for each partition. */
static int client_check_place(bfc_client *client, uint32_t partition)
{
        const struct device_view *place = &client->places[partition];
        uint8_t uuid[DEVICE_UUID_BYTES];
        int r = 0;

        if (!place->is_cuda || __atomic_load_n(&client->is_seen[partition], __ATOMIC_RELAXED))
                return 0;
        for (int ordinal = 0; (r = device_cuda_ordinal_uuid(ordinal, uuid)) == 0; ordinal++) {
                if (memcmp(uuid, place->uuid, sizeof(uuid)) != 0)
                        continue;
                __atomic_store_n(&client->is_seen[partition], true, __ATOMIC_RELAXED);
                return 0;
        }
        return error_set(-ENODEV,
                         "partition %s is on device %s, which this process does not see: look at "
                         "CUDA_VISIBLE_DEVICES and at the devices of the container (and who was forked by a "
                         "process that used CUDA sees none)",
                         client->hello->hello->partitions[partition]->name,
                         client->hello->hello->partitions[partition]->device);
}

/* Asks the daemon for ask_bytes, and takes n_bytes of it. CACHE_MISS: they were less, and did
 * not come to lie beside what is free here; they went back. */
static int client_fetch(bfc_client *client, uint32_t partition, uint64_t ask_bytes, uint64_t n_bytes,
                        uint64_t flags, void **ret_ptr)
{
        Bfcd__Request request = BFCD__REQUEST__INIT;
        Bfcd__Malloc body = BFCD__MALLOC__INIT;
        Bfcd__Reply *reply = NULL;
        bool kept = false;
        int r;

        body.partition = partition;
        body.n_bytes = ask_bytes;
        body.flags = flags;
        request.body_case = BFCD__REQUEST__BODY_MALLOC;
        request.malloc = &body;
        r = client_ask(client, &request, BFCD__REPLY__BODY_BLOCK, &reply);
        if (r < 0)
                return r;
        pthread_mutex_lock(&client->lock);
        r = reply->block->n_bytes < ask_bytes
                    ? -EPROTO
                    : client_take(client, partition, reply->block, n_bytes, flags, &kept, ret_ptr);
        pthread_mutex_unlock(&client->lock);
        if ((r == -ENOMEM || r == CACHE_MISS) && !kept)
                client_give_back(client, reply->block->block_id);
        if (r == -ENOMEM)
                r = error_set(r, "this process is out of memory");
        else if (r < 0)
                r = error_set(r, "the daemon gave a block of %llu bytes where none can be",
                              (unsigned long long)reply->block->n_bytes);
        bfcd__reply__free_unpacked(reply, NULL);
        return r;
}

#define GIVE_BACK_AT_ONCE 32u

/* Gives whole idle slabs back, until they were want_bytes or there is none. */
static int client_give_back_idle(bfc_client *client, uint32_t partition, uint64_t want_bytes,
                                 uint64_t *ret_bytes)
{
        uint64_t block_ids[GIVE_BACK_AT_ONCE], sum = 0, n_bytes;
        size_t n;
        int r = 0;

        do {
                pthread_mutex_lock(&client->lock);
                n = cache_take_idle(client->cache, partition, want_bytes - sum, block_ids, GIVE_BACK_AT_ONCE,
                                    &n_bytes);
                client->stats.bytes_reserved -= n_bytes;
                pthread_mutex_unlock(&client->lock);
                sum += n_bytes;
                for (size_t i = 0; i < n; i++) {
                        int error = client_give_back(client, block_ids[i]);

                        r = r < 0 ? r : error;
                }
        } while (r == 0 && n == GIVE_BACK_AT_ONCE && sum < want_bytes);
        *ret_bytes = sum;
        return r;
}

/* CACHE_MISS: *ret_want is to be asked for. */
static int client_try_cut(bfc_client *client, uint32_t partition, uint64_t n_bytes, uint64_t *ret_want,
                          void **ret_ptr)
{
        int r;

        pthread_mutex_lock(&client->lock);
        r = client_cut(client, partition, n_bytes, ret_ptr);
        if (r == CACHE_MISS)
                *ret_want = cache_want(client->cache, partition, n_bytes);
        pthread_mutex_unlock(&client->lock);
        if (r < 0)
                return error_set(r, r == -ENOMEM ? "this process is out of memory"
                                                 : "the daemon gave the same place twice");
        return r;
}

/* What is idle here goes back, and no more is asked for than is needed. */
static int client_refused(bfc_client *client, uint32_t partition, int error, uint64_t n_asked,
                          uint64_t n_bytes, uint64_t flags, void **ret_ptr)
{
        uint64_t given_back = 0, want;
        int r = client_give_back_idle(client, partition, UINT64_MAX, &given_back);

        if (r < 0)
                return r;
        if (given_back == 0 && n_asked < n_bytes + BLOCK_GRANULE)
                return error;
        /* Another thread may have freed something meanwhile. */
        r = flags ? CACHE_MISS : client_try_cut(client, partition, n_bytes, &want, ret_ptr);
        return r == CACHE_MISS ? client_fetch(client, partition, n_bytes, n_bytes, flags, ret_ptr) : r;
}

/* From the cache, or else from the daemon. Where extents end only the daemon knows, so what has
 * flags is a block of its own. */
static int client_malloc(bfc_client *client, uint32_t partition, uint64_t n_bytes, uint64_t flags,
                         void **ret_ptr)
{
        uint64_t want = n_bytes;
        int r;

        if (client->cache && flags == 0 && __atomic_load_n(&client->lost, __ATOMIC_RELAXED) == 0) {
                r = client_try_cut(client, partition, n_bytes, &want, ret_ptr);
                if (r != CACHE_MISS)
                        return r;
        }
        r = client_fetch(client, partition, want, n_bytes, flags, ret_ptr);
        if (r == CACHE_MISS) {
                want = cache_want_whole(client->cache, partition, n_bytes);
                r = client_fetch(client, partition, want, n_bytes, flags, ret_ptr);
        }
        if (client->cache && (r == -EDQUOT || r == -ENOMEM))
                r = client_refused(client, partition, r, want, n_bytes, flags, ret_ptr);
        return r;
}

BFC_API int bfc_malloc_flags(bfc_client *client, const char *partition, size_t n_bytes, uint64_t flags,
                             void **ret_ptr)
{
        uint32_t index = 0;
        int r = client_check(client);

        if (r < 0)
                return r;
        if (!ret_ptr)
                return error_set(-EINVAL, "bfc_malloc: ret_ptr is NULL");
        if (n_bytes == 0)
                return error_set(-EINVAL, "0 bytes: ask for at least 1");
        if ((flags & ~BFC_ONE_EXTENT) != 0)
                return error_set(-EINVAL, "flags 0x%llx: this library knows BFC_ONE_EXTENT and no other",
                                 (unsigned long long)flags);
        r = client_partition_index(client, partition, &index);
        if (r == 0)
                r = client_check_place(client, index);
        if (r < 0)
                return r;
        r = client_malloc(client, index, n_bytes, flags, ret_ptr);
        if (r < 0)
                return client_malloc_failed(client, r);
        recorder_given(client->recorder, *ret_ptr, n_bytes);
        return 0;
}

BFC_API int bfc_malloc(bfc_client *client, size_t n_bytes, void **ret_ptr)
{
        return bfc_malloc_flags(client, NULL, n_bytes, 0, ret_ptr);
}

BFC_API int bfc_malloc_in(bfc_client *client, const char *partition, size_t n_bytes, void **ret_ptr)
{
        return bfc_malloc_flags(client, partition, n_bytes, 0, ret_ptr);
}

/* Writes down again a block whose free did not come about, where its memory is still
 * there: once it was sent, the daemon may have taken that back before it went away. */
static void client_keep_on(bfc_client *client, const struct block *block)
{
        void *ptr;

        pthread_mutex_lock(&client->lock);
        if (regions_resolve(&client->regions, block->region_id, block->offset, block->n_bytes, &ptr) == 0 &&
            ptr == block->ptr && blocks_add(&client->blocks, block) == 0) {
                count_alloc(&client->stats, block);
                client->stats.num_allocs--;
                client->stats.num_frees--;
        }
        pthread_mutex_unlock(&client->lock);
}

/* The next owner of the block must not meet our kernels in it. The block is
 * still ours, here and at the daemon, so its region stays. */
static int client_finish(struct device_range *range)
{
        int r = device_range_finish(range);

        if (r == -EBUSY)
                return error_set(r, "a stream is being captured, and whether a kernel still uses the block "
                                    "cannot be known: free it after the capture");
        /* No work of ours runs on a device that is lost, or in a context that is broken. */
        if (r == 0 || r == -ENODEV || r == -EIO)
                return 0;
        return error_set(r == -ENOMEM ? r : -EIO,
                         "waiting for the work on the device failed (%s), so the block stays: free it again",
                         strerror(-r));
}

/* Its place is free for this process's next bfc_malloc(). Lock held. Returns how much is
 * to go back for that. */
static uint64_t client_uncut(bfc_client *client, const struct block *block)
{
        uint32_t partition = cache_partition(block);

        cache_dealloc(block);
        return cache_excess(client->cache, partition);
}

/* The common case in one step: a cached block of memory on which no device works.
 * False: it is no such block. */
static bool client_uncut_at_once(bfc_client *client, const void *ptr, uint32_t *ret_partition,
                                 uint64_t *ret_excess)
{
        const struct block *found;
        struct block block;
        bool done;

        pthread_mutex_lock(&client->lock);
        found = blocks_find(&client->blocks, ptr);
        done = found && found->slab && !client->places[cache_partition(found)].is_cuda &&
               !__atomic_load_n(&client->lost, __ATOMIC_RELAXED);
        if (done && blocks_take(&client->blocks, ptr, &block) == 0) {
                count_free(&client->stats, &block);
                *ret_partition = cache_partition(&block);
                *ret_excess = client_uncut(client, &block);
        }
        pthread_mutex_unlock(&client->lock);
        return done;
}

/* Waits for the work, and then takes the block out of the table. */
static int client_take_out(bfc_client *client, const void *ptr, struct block *ret)
{
        struct device_range *range = NULL;
        int r;

        pthread_mutex_lock(&client->lock);
        r = blocks_leave(&client->blocks, ptr, ret);
        if (r == 0)
                range = regions_range(&client->regions, ret->region_id);
        pthread_mutex_unlock(&client->lock);
        if (r < 0)
                return error_set(-EINVAL, "%p is not a block of this client: never given, or freed already",
                                 ptr);
        r = client_finish(range);
        pthread_mutex_lock(&client->lock);
        if (r < 0)
                blocks_stay(&client->blocks, ptr);
        else if (blocks_take(&client->blocks, ptr, ret) == 0)
                count_free(&client->stats, ret);
        pthread_mutex_unlock(&client->lock);
        return r;
}

/* A block that no work touches any more goes to the cache, or to the daemon. */
static int client_put_back(bfc_client *client, const struct block *block, uint64_t *ret_excess)
{
        int r = block->slab ? __atomic_load_n(&client->lost, __ATOMIC_RELAXED) : 0;

        if (r != 0)
                return client_lost(client, r);
        if (!block->slab)
                r = client_give_back(client, block->block_id);
        if (r == -ECONNRESET)
                return r;
        pthread_mutex_lock(&client->lock);
        if (block->slab)
                *ret_excess = client_uncut(client, block);
        else
                client->stats.bytes_reserved -= block->n_bytes;
        pthread_mutex_unlock(&client->lock);
        return r;
}

/* *ret_stays: the block is still this process's, although the call failed. */
static int client_free_block(bfc_client *client, const void *ptr, bool *ret_stays)
{
        uint64_t excess = 0, n_bytes;
        uint32_t partition = 0;
        struct block block;
        int r = 0;

        *ret_stays = false;
        if (!client_uncut_at_once(client, ptr, &partition, &excess)) {
                r = client_take_out(client, ptr, &block);
                *ret_stays = r < 0 && r != -EINVAL;
                if (r < 0)
                        return r;
                if (block.slab)
                        partition = cache_partition(&block);
                r = client_put_back(client, &block, &excess);
                if (r == -ECONNRESET ||
                    (r < 0 && block.slab)) { /* mapped, and this process's, as long as it lasts */
                        block.is_leaving = false;
                        client_keep_on(client, &block);
                        *ret_stays = true;
                }
        }
        if (excess > 0)
                client_give_back_idle(client, partition, excess, &n_bytes);
        return r;
}

BFC_API int bfc_trim(bfc_client *client, size_t n_bytes)
{
        uint64_t sum = 0, given_back;
        int r = client_check(client);

        for (uint32_t i = 0; r == 0 && client->cache && i < client->hello->hello->n_partitions; i++) {
                r = client_give_back_idle(client, i, n_bytes - sum, &given_back);
                sum += given_back < n_bytes - sum ? given_back : n_bytes - sum;
        }
        return r;
}

BFC_API int bfc_free(bfc_client *client, void *ptr)
{
        struct recorder_life life;
        bool stays = false;
        int r = client_check(client);

        if (r < 0)
                return r;
        if (!ptr)
                return 0;
        recorder_freeing(client->recorder, ptr, &life);
        r = client_free_block(client, ptr, &stays);
        if (stays)
                recorder_kept(client->recorder, &life);
        else
                recorder_freed(client->recorder, &life);
        return r;
}

/* ---- copies -------------------------------------------------------------- */

static int copy_failed(int error)
{
        switch (error) {
        case -EBUSY:
                return error_set(error,
                                 "a stream is being captured that the copy would have to wait for: copy "
                                 "after the capture");
        case -ENODEV:
                return error_set(error, "the device is lost");
        case -EIO:
                return error_set(error, "this process's CUDA context is broken: an earlier kernel or call "
                                        "broke it");
        default:
                return error_set(error, "the copy failed: %s", strerror(-error));
        }
}

/* Where in which range these bytes lie. What a block's range is changes only when
 * the block is gone, so the copy needs no lock. */
static int client_locate(bfc_client *client, const void *ptr, size_t n_bytes, struct device_range **ret_range,
                         uint64_t *ret_offset)
{
        const struct block *block;

        pthread_mutex_lock(&client->lock);
        block = blocks_find_around(&client->blocks, ptr, n_bytes);
        if (block) {
                *ret_range = regions_range(&client->regions, block->region_id);
                *ret_offset = block->offset + (uint64_t)((uintptr_t)ptr - (uintptr_t)block->ptr);
        }
        pthread_mutex_unlock(&client->lock);
        return block ? 0
                     : error_set(-EINVAL, "%zu bytes at %p do not lie in a block of this client", n_bytes,
                                 ptr);
}

BFC_API int bfc_write(bfc_client *client, void *ptr, const void *src, size_t n_bytes)
{
        struct device_range *range;
        uint64_t offset;
        int r = client_check(client);

        if (r < 0 || n_bytes == 0)
                return r;
        if (!src)
                return error_set(-EINVAL, "bfc_write: src is NULL");
        r = client_locate(client, ptr, n_bytes, &range, &offset);
        if (r < 0)
                return r;
        r = device_range_write(range, offset, src, n_bytes);
        return r < 0 ? copy_failed(r) : 0;
}

BFC_API int bfc_read(bfc_client *client, void *dst, const void *ptr, size_t n_bytes)
{
        struct device_range *range;
        uint64_t offset;
        int r = client_check(client);

        if (r < 0 || n_bytes == 0)
                return r;
        if (!dst)
                return error_set(-EINVAL, "bfc_read: dst is NULL");
        r = client_locate(client, ptr, n_bytes, &range, &offset);
        if (r < 0)
                return r;
        r = device_range_read(range, offset, n_bytes, dst);
        return r < 0 ? copy_failed(r) : 0;
}

/* ---- figures ------------------------------------------------------------- */

/* n_bytes: what the first version's had. */
static int check_struct(const char *function, const void *ret, size_t struct_size, size_t n_bytes)
{
        if (!ret)
                return error_set(-EINVAL, "%s: ret is NULL", function);
        if (struct_size < n_bytes)
                return error_set(-EINVAL, "%s: struct_size is %zu: set it to the size of the structure, %zu",
                                 function, struct_size, n_bytes);
        return 0;
}

/* Fills a caller's structure, which may be of an earlier header, or of a later one: then the
 * rest is 0. */
static void fill_struct(void *ret, size_t struct_size, const void *known, size_t n_bytes)
{
        n_bytes = n_bytes < struct_size ? n_bytes : struct_size;
        memcpy((char *)ret + sizeof(size_t), (const char *)known + sizeof(size_t), n_bytes - sizeof(size_t));
        memset((char *)ret + n_bytes, 0, struct_size - n_bytes);
}

BFC_API int bfc_stats(bfc_client *client, struct bfc_client_stats *ret)
{
        struct bfc_client_stats stats;
        int r = client_check(client);

        if (r == 0)
                r = check_struct("bfc_stats", ret, ret ? ret->struct_size : 0,
                                 offsetof(struct bfc_client_stats, bytes_reserved));
        if (r < 0)
                return r;
        pthread_mutex_lock(&client->lock);
        stats = client->stats;
        pthread_mutex_unlock(&client->lock);
        stats.bytes_idle = stats.bytes_reserved - stats.bytes_in_use;
        stats.num_calls = __atomic_load_n(&client->n_calls, __ATOMIC_RELAXED);
        fill_struct(ret, ret->struct_size, &stats, sizeof(stats));
        return 0;
}

BFC_API int bfc_reset_peaks(bfc_client *client)
{
        int r = client_check(client);

        if (r < 0)
                return r;
        pthread_mutex_lock(&client->lock);
        client->stats.peak_bytes_in_use = client->stats.bytes_in_use;
        client->stats.peak_bytes_reserved = client->stats.bytes_reserved;
        pthread_mutex_unlock(&client->lock);
        return 0;
}

static int usage_ask(bfc_client *client, const char *partition, struct bfc_tenant_usage *ret)
{
        Bfcd__Request request = BFCD__REQUEST__INIT;
        Bfcd__Usage body = BFCD__USAGE__INIT;
        const Bfcd__Figures *f;
        Bfcd__Reply *reply = NULL;
        int r = client_partition_index(client, partition, &body.partition);

        if (r < 0)
                return r;
        request.body_case = BFCD__REQUEST__BODY_USAGE;
        request.usage = &body;
        r = client_ask(client, &request, BFCD__REPLY__BODY_USAGE, &reply);
        if (r < 0)
                return r;
        f = reply->usage->figures;
        if (f)
                *ret = (struct bfc_tenant_usage){
                        .bytes_limit = f->bytes_limit,
                        .bytes_reserved = f->bytes_reserved,
                        .peak_bytes_reserved = f->peak_bytes_reserved,
                        .bytes_in_use = f->bytes_in_use,
                        .peak_bytes_in_use = f->peak_bytes_in_use,
                        .bytes_requested = f->bytes_requested,
                        .num_blocks = f->num_blocks,
                        .num_sessions = f->num_sessions,
                        .largest_free_block_bytes = f->largest_free_block_bytes,
                };
        else
                r = error_set(-EPROTO, "the daemon's answer has no figures");
        bfcd__reply__free_unpacked(reply, NULL);
        return r;
}

BFC_API int bfc_usage(bfc_client *client, const char *partition, struct bfc_tenant_usage *ret)
{
        struct bfc_tenant_usage usage = { 0 };
        int r = client_check(client);

        if (r == 0)
                r = check_struct("bfc_usage", ret, ret ? ret->struct_size : 0, sizeof(usage));
        if (r == 0)
                r = usage_ask(client, partition, &usage);
        if (r < 0)
                return r;
        fill_struct(ret, ret->struct_size, &usage, sizeof(usage));
        return 0;
}

/* The lock is held. */
static void info_add_origin(const bfc_client *client, struct bfc_block_info *info)
{
        struct region_origin origin;

        if (regions_origin(&client->regions, info->region_id, info->offset, &origin) < 0)
                return; /* cannot be: the block was resolved there */
        info->share = origin.share == DEVICE_SHARE_FD ? BFC_SHARE_FD : BFC_SHARE_CUDA_IPC;
        info->extent_bytes = origin.n_bytes;
        info->extent_offset = info->offset - origin.offset;
        memcpy(info->handle, origin.handle, sizeof(info->handle));
}

BFC_API int bfc_block_info(bfc_client *client, const void *ptr, struct bfc_block_info *ret)
{
        struct bfc_block_info info = { 0 };
        const struct block *block;
        int r = client_check(client);

        if (r == 0)
                r = check_struct("bfc_block_info", ret, ret ? ret->struct_size : 0, BLOCK_INFO_MIN_BYTES);
        if (r < 0)
                return r;
        pthread_mutex_lock(&client->lock);
        block = blocks_find(&client->blocks, ptr);
        if (block)
                info = (struct bfc_block_info){
                        .block_id = block->block_id,
                        .region_id = block->region_id,
                        .offset = block->offset,
                        .n_bytes = block->n_bytes,
                        .n_requested = block->n_requested,
                        .block_offset = block->slab ? cache_offset(block) : 0,
                };
        if (block)
                info_add_origin(client, &info);
        pthread_mutex_unlock(&client->lock);
        if (!block)
                return error_set(-EINVAL, "%p is not a block of this client", ptr);
        fill_struct(ret, ret->struct_size, &info, sizeof(info));
        return 0;
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
                return error_set(-ENOENT, "this process sees no CUDA device %d: look at CUDA_VISIBLE_DEVICES",
                                 ordinal);
        hello = client->hello->hello;
        for (size_t i = 0; i < hello->n_partitions; i++) {
                if (client->places[i].is_cuda && memcmp(client->places[i].uuid, uuid, sizeof(uuid)) == 0) {
                        *ret_name = hello->partitions[i]->name;
                        return 0;
                }
        }
        return error_set(-ENOENT, "tenant %s has no quota in a partition on CUDA device %d", hello->tenant,
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
