/* The client of one session; see client.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "client/client.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "proto/frame.h"
#include "proto/paths.h"

int client_check(const bfc_client *client)
{
        if (!client)
                return error_set(-EINVAL, "client is NULL");
        if (!fork_guard_is_own(&client->fork))
                return error_set(-ECHILD,
                                 "this client belongs to the parent of this forked process: call "
                                 "bfc_connect() in the child to allocate memory; to use the parent's "
                                 "host blocks, the parent must connect with BFC_INHERIT");
        return 0;
}

int client_lost(bfc_client *client, int error)
{
        char why[sizeof(client->end_reason)];

        if (error == -ECONNRESET && call_read_end_reason(client->connection, why, sizeof(why)))
                error = -EIDRM;
        if (error == -ECONNRESET || error == -EPROTO || error == -EIDRM)
                __atomic_store_n(&client->lost, error, __ATOMIC_RELAXED);
        pthread_mutex_lock(&client->lock);
        memcpy(why, client->end_reason, sizeof(why));
        pthread_mutex_unlock(&client->lock);
        if (error == -EIDRM && (why[0] || call_read_end_reason(client->connection, why, sizeof(why))))
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

int client_end(bfc_client *client, int error, const char *why)
{
        pthread_mutex_lock(&client->lock);
        if (!client->end_reason[0])
                snprintf(client->end_reason, sizeof(client->end_reason), "%s", why);
        pthread_mutex_unlock(&client->lock);
        __atomic_store_n(&client->lost, error, __ATOMIC_RELAXED);
        call_end(client->connection, error);
        return error;
}

/* ---- the list of shared blocks ------------------------------------------------- */

void shared_clear(bfc_client *client)
{
        struct shared_block *s;

        while ((s = client->shared)) {
                client->shared = s->next;
                free(s);
        }
}

struct shared_block *shared_find(const bfc_client *client, const void *ptr)
{
        struct shared_block *s = client->shared;

        while (s && s->ptr != ptr)
                s = s->next;
        return s;
}

/* By the daemon's id: while the block is parked, its place is not mapped. */
struct shared_block *shared_find_id(const bfc_client *client, uint64_t block_id)
{
        struct shared_block *s = client->shared;

        while (s && s->block_id != block_id)
                s = s->next;
        return s;
}

bool shared_has(const bfc_client *client, const void *ptr)
{
        return shared_find(client, ptr) != NULL;
}

bool shared_is_read_only(const bfc_client *client, const void *ptr)
{
        const struct shared_block *s = shared_find(client, ptr);

        return s && s->is_read_only;
}

int shared_add(bfc_client *client, const void *ptr, uint64_t block_id)
{
        struct shared_block *s = malloc(sizeof(*s));

        if (!s)
                return -ENOMEM;
        *s = (struct shared_block){ client->shared, ptr, block_id, 1, 0, false, false };
        client->shared = s;
        return 0;
}

size_t shared_list(const bfc_client *client, struct shared_count *ret, size_t max)
{
        size_t n = 0;

        for (const struct shared_block *s = client->shared; s; s = s->next) {
                if (s->is_asked)
                        continue;
                if (n < max)
                        ret[n] = (struct shared_count){ s->block_id, s->n_refs };
                n++;
        }
        return n;
}

void shared_remove(bfc_client *client, struct shared_block *s)
{
        struct shared_block **at = &client->shared;

        while (*at != s)
                at = &(*at)->next;
        *at = s->next;
        free(s);
}

/* ---- for the program ------------------------------------------------------------- */

BFC_API const char *bfc_last_error(void)
{
        return error_last();
}

BFC_API const char *bfc_version(void)
{
        return BFC_VERSION;
}

/* ---- partitions -------------------------------------------------------------- */

static int place_read(const Bfcd__PartitionInfo *info, struct device_view *ret)
{
        struct device_view place = { .is_cuda = info->device_uuid.len > 0, .has_no_memory = info->no_memory };

        place.is_pinned = info->pinned && !place.is_cuda;

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

int client_read_places(bfc_client *client)
{
        const Bfcd__HelloReply *hello = client->hello->hello;
        struct device_view *places = calloc(hello->n_partitions + 1, sizeof(*places));

        client->partitions = calloc(hello->n_partitions + 1, sizeof(*client->partitions));
        if (!places || !client->partitions) {
                free(places);
                return error_no_memory();
        }
        for (size_t i = 0; i < hello->n_partitions; i++)
                parkables_init(&client->partitions[i].parkables);
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

void client_free_partitions(bfc_client *client)
{
        for (size_t i = 0; client->partitions && i < client->hello->hello->n_partitions; i++) {
                parkables_clear(&client->partitions[i].parkables);
                if (client->partitions[i].order)
                        bfcd__event__free_unpacked(client->partitions[i].order, NULL);
        }
        free(client->partitions);
        free(client->places);
}

/* Lists what there is, for a name that there is not. */
static int no_partition(const Bfcd__HelloReply *hello, const char *name)
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

static int find_partition(const Bfcd__HelloReply *hello, const char *name, uint32_t *ret_index)
{
        for (size_t i = 0; i < hello->n_partitions; i++) {
                if (strcmp(hello->partitions[i]->name, name) == 0) {
                        *ret_index = (uint32_t)i;
                        return 0;
                }
        }
        return no_partition(hello, name);
}

int client_partition_index(const bfc_client *client, const char *name, uint32_t *ret_index)
{
        if (!name) {
                *ret_index = client->partition;
                return 0;
        }
        return find_partition(client->hello->hello, name, ret_index);
}

/* A partition takes two bytes of the reply at least, so the index of each fits into struct block. */
_Static_assert(FRAME_MAX_PAYLOAD / 2 <= UINT16_MAX, "struct block's partition");

/* What the daemon says of us must be something that the rest can rely on. */
int client_check_hello(bfc_client *client, const char *partition)
{
        const Bfcd__HelloReply *hello = client->hello->hello;

        if (hello->version != CLIENT_PROTOCOL_VERSION)
                return error_set(-EPROTO,
                                 "the daemon uses protocol version %u and this library uses version %u: "
                                 "install libbfcclient and bfcd of the same release",
                                 hello->version, CLIENT_PROTOCOL_VERSION);
        if (hello->n_partitions > 0 && hello->default_partition >= hello->n_partitions)
                return error_set(-EPROTO, "the daemon's default partition is not in its list of partitions");
        client->partition = hello->default_partition;
        if (partition[0])
                return find_partition(hello, partition, &client->partition);
        if (hello->n_partitions == 0)
                return error_set(-ENOENT, "tenant '%s' has no quota in any partition", hello->tenant);
        return 0;
}

/* The number under which this process knows the GPU; -1: it does not see it. */
static int place_ordinal(const struct device_view *place)
{
        uint8_t uuid[DEVICE_UUID_BYTES];

        for (int ordinal = 0; device_cuda_ordinal_uuid(ordinal, uuid) == 0; ordinal++)
                if (memcmp(uuid, place->uuid, sizeof(uuid)) == 0)
                        return ordinal;
        return -1;
}

static void place_print_uuid(const struct device_view *place, char *ret, size_t size)
{
        size_t n = (size_t)snprintf(ret, size, place->is_cuda ? "GPU-" : "host");

        for (size_t i = 0; place->is_cuda && i < sizeof(place->uuid); i++)
                n += (size_t)snprintf(ret + n, size - n, "%s%02x",
                                      i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", place->uuid[i]);
}

void client_describe_partition(const bfc_client *client, uint32_t partition, struct bfc_partition_info *ret)
{
        const struct device_view *place = &client->places[partition];
        const Bfcd__PartitionInfo *info = client->hello->hello->partitions[partition];

        *ret = (struct bfc_partition_info){
                .partition = info->name,
                .device = info->device,
                .device_ordinal = place->is_cuda ? place_ordinal(place) : -1,
                .share = place->share == DEVICE_SHARE_FD ? BFC_SHARE_FD : BFC_SHARE_CUDA_IPC,
                .is_pinned = place->is_pinned,
                .context_bytes = info->charges_contexts ? info->context_bytes : BFC_NO_CONTEXTS,
        };
        place_print_uuid(place, ret->device_uuid, sizeof(ret->device_uuid));
}

bool client_lookup_device(bfc_client *client, uint32_t partition)
{
        const struct device_view *place = &client->places[partition];

        if (!place->is_cuda || place->has_no_memory ||
            __atomic_load_n(&client->partitions[partition].is_seen, __ATOMIC_RELAXED))
                return true;
        if (place_ordinal(place) < 0)
                return false;
        __atomic_store_n(&client->partitions[partition].is_seen, true, __ATOMIC_RELAXED);
        return true;
}

int client_prepare_device(bfc_client *client, uint32_t partition)
{
        const Bfcd__PartitionInfo *p = client->hello->hello->partitions[partition];
        int r;

        if (!client->places[partition].is_cuda || client->places[partition].has_no_memory ||
            __atomic_load_n(&client->partitions[partition].is_prepared, __ATOMIC_RELAXED))
                return 0;
        r = device_prepare(&client->places[partition]);
        if (r == 0)
                __atomic_store_n(&client->partitions[partition].is_prepared, true, __ATOMIC_RELAXED);
        else if (r == -ENOMEM)
                r = error_set(r,
                              "partition '%s': there is no room for this process's CUDA context on device "
                              "'%s', which counts against the limit: allow that much more, or set "
                              "BFC_CONTEXT=off",
                              p->name, p->device);
        else
                r = error_set(r, "partition '%s': no CUDA context can be made on device '%s': %s", p->name,
                              p->device, strerror(-r));
        return r;
}

/* Found out before the daemon makes memory that this process cannot map. */
int client_check_device(bfc_client *client, uint32_t partition)
{
        if (client_lookup_device(client, partition))
                return client_prepare_device(client, partition);
        return error_set(-ENODEV,
                         "partition '%s' is on device '%s', which is not visible to this process: check "
                         "CUDA_VISIBLE_DEVICES and the devices of the container (a process forked from "
                         "one that used CUDA sees no device)",
                         client->hello->hello->partitions[partition]->name,
                         client->hello->hello->partitions[partition]->device);
}

BFC_API const char *bfc_tenant(const bfc_client *client)
{
        return client ? client->hello->hello->tenant : "";
}

BFC_API const char *bfc_partition(const bfc_client *client)
{
        return client ? client->hello->hello->partitions[client->partition]->name : "";
}

BFC_API int bfc_partition_info(bfc_client *client, size_t index, struct bfc_partition_info *ret)
{
        struct bfc_partition_info info;
        int r = client_check(client);

        if (r == 0)
                r = struct_check("bfc_partition_info", ret, sizeof(*ret));
        if (r < 0)
                return r;
        if (index >= client->hello->hello->n_partitions)
                return error_set(-ENOENT, "tenant '%s' has a quota in %zu partitions: none has index %zu",
                                 client->hello->hello->tenant, client->hello->hello->n_partitions, index);
        client_describe_partition(client, (uint32_t)index, &info);
        pthread_mutex_lock(&client->lock);
        info.bytes_pinned = regions_pinned(&client->regions, (uint32_t)index);
        pthread_mutex_unlock(&client->lock);
        struct_fill(ret, ret->struct_size, &info, sizeof(info));
        return 0;
}

/* False: not the UUID of a GPU. */
static bool parse_uuid(const char *text, uint8_t ret[static DEVICE_UUID_BYTES])
{
        static const char kinds[][5] = { "GPU-", "MIG-" };
        const char *at = text + 4;

        if (strncmp(text, kinds[0], 4) != 0 && strncmp(text, kinds[1], 4) != 0)
                return false;
        for (size_t i = 0; i < DEVICE_UUID_BYTES; i++) {
                unsigned int byte;
                int n = 0;

                at += (i == 4 || i == 6 || i == 8 || i == 10) && *at == '-';
                if (!isxdigit((unsigned char)at[0]) || !isxdigit((unsigned char)at[1]) ||
                    sscanf(at, "%2x%n", &byte, &n) != 1 || n != 2)
                        return false;
                ret[i] = (uint8_t)byte;
                at += 2;
        }
        return *at == '\0';
}

BFC_API int bfc_partition_for_uuid(bfc_client *client, const char *uuid, const char **ret_name)
{
        uint8_t bytes[DEVICE_UUID_BYTES];
        const Bfcd__HelloReply *hello;
        const char *found = NULL;
        int r = client_check(client);

        if (r < 0)
                return r;
        if (!uuid || !ret_name)
                return error_set(-EINVAL, "bfc_partition_for_uuid: uuid or ret_name is NULL");
        hello = client->hello->hello;
        for (uint32_t i = 0; parse_uuid(uuid, bytes) && i < hello->n_partitions; i++) {
                const struct device_view *place = &client->places[i];

                if (place->is_cuda && memcmp(place->uuid, bytes, sizeof(bytes)) == 0 &&
                    (!found || i == client->partition))
                        found = hello->partitions[i]->name;
        }
        if (!found)
                return error_set(-ENOENT, "tenant '%s' has no quota in a partition on GPU '%s'",
                                 hello->tenant, uuid);
        *ret_name = found;
        return 0;
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

/* ---- access of other GPUs ------------------------------------------------- */

static bool is_place(const struct device_view *place, const uint8_t uuid[static DEVICE_UUID_BYTES])
{
        return place->is_cuda && memcmp(place->uuid, uuid, sizeof(place->uuid)) == 0;
}

/* The lock is held. */
static int enable_peer_locked(bfc_client *client, const uint8_t uuid[static DEVICE_UUID_BYTES], int peer)
{
        int r = 0;

        for (uint32_t i = 0; r == 0 && i < client->hello->hello->n_partitions; i++) {
                if (!is_place(&client->places[i], uuid))
                        continue;
                r = regions_enable_peer(&client->regions, i, peer);
                if (r == 0)
                        client->places[i].peers |= UINT64_C(1) << peer;
        }
        return r;
}

BFC_API int bfc_enable_peer_access(bfc_client *client, int device, int peer)
{
        uint8_t uuid[DEVICE_UUID_BYTES];
        int r = client_check(client);

        if (r < 0)
                return r;
        if (device < 0 || peer < 0 || peer >= 64 || device == peer)
                return error_set(-EINVAL, "bfc_enable_peer_access: %d and %d are not two CUDA devices",
                                 device, peer);
        if (device_cuda_ordinal_uuid(peer, uuid) < 0 || device_cuda_ordinal_uuid(device, uuid) < 0)
                return error_set(-ENOENT, "CUDA device %d or %d is not visible to this process", device,
                                 peer);
        r = device_cuda_check_peer(device, peer);
        if (r == 0) {
                pthread_mutex_lock(&client->lock);
                r = enable_peer_locked(client, uuid, peer);
                pthread_mutex_unlock(&client->lock);
        }
        if (r == 0)
                return 0;
        return error_set(
                r,
                r == -ENOTSUP ? "CUDA device %d cannot be given access to memory of device %d: they do not "
                                "reach each other, or the driver refuses"
                              : "CUDA device %d cannot be given access to memory of device %d: the driver "
                                "fails",
                peer, device);
}

void client_set_draining(bfc_client *client, uint32_t partition, bool is_draining)
{
        if (client->cache)
                cache_set_draining(client->cache, partition, is_draining);
        if (client->stash.state != STASH_NONE && partition == client->partition)
                __atomic_store_n(&client->stash.state, is_draining ? STASH_DRAINS : STASH_ON,
                                 __ATOMIC_RELAXED);
}

void client_forget_drains(bfc_client *client)
{
        pthread_mutex_lock(&client->lock);
        for (uint32_t i = 0; i < client->hello->hello->n_partitions; i++)
                client_set_draining(client, i, false);
        pthread_mutex_unlock(&client->lock);
}

/* ---- pages and counters ------------------------------------------------------
 *
 * The cache and the magazines write into the client's page themselves: a store or two beside those to their
 * own counters. These counters stay, because the daemon has the page mapped too, and could write to it.
 *
 * Another daemon makes pages of its own. They are moved to the addresses of the old ones, because threads
 * read and write there without a lock. For the usage page as much address space is reserved as
 * the largest one needs: it may have grown. */

int client_pages_read(const bfc_client *client, uint32_t partition, struct bfc_tenant_usage *ret)
{
        const struct pages_entry *e =
                atomic_load_explicit(&client->partitions[partition].usage, memory_order_acquire);
        uint64_t f[PAGES_N_STATS];

        if (!e || pages_read(e, f) < 0)
                return -EAGAIN;
        *ret = (struct bfc_tenant_usage){
                .struct_size = ret->struct_size,
                .bytes_limit = f[PAGES_BYTES_LIMIT],
                .bytes_reserved = f[PAGES_BYTES_RESERVED],
                .peak_bytes_reserved = f[PAGES_PEAK_BYTES_RESERVED],
                .bytes_in_use = f[PAGES_BYTES_IN_USE],
                .peak_bytes_in_use = f[PAGES_PEAK_BYTES_IN_USE],
                .bytes_requested = f[PAGES_BYTES_REQUESTED],
                .num_blocks = f[PAGES_NUM_BLOCKS],
                .num_sessions = f[PAGES_NUM_SESSIONS],
                .largest_free_block_bytes = f[PAGES_LARGEST_FREE_BLOCK_BYTES],
                .lifetime_peak_bytes_in_use = f[PAGES_LIFETIME_PEAK_BYTES_IN_USE],
                .lifetime_peak_bytes_reserved = f[PAGES_LIFETIME_PEAK_BYTES_RESERVED],
                .bytes_direct = f[PAGES_BYTES_DIRECT],
        };
        return 0;
}

/* ---- the client's own page ------------------------------------------------- */

static struct pages_held *entry_of(const struct client_pages *p, uint32_t partition)
{
        return &p->own->held[partition < PAGES_MAX_PARTITIONS ? partition : PAGES_MAX_PARTITIONS];
}

static void put(_Atomic uint64_t *word, uint64_t n)
{
        atomic_store_explicit(word, n, memory_order_relaxed);
}

static void client_page_begin(bfc_client *client)
{
        struct pages_client *own = client->pages.own;

        for (uint32_t i = 0; client->cache && i < client->hello->hello->n_partitions; i++)
                cache_show(client->cache, i, entry_of(&client->pages, i));
        for (unsigned i = 0; client->cache && i < PAGES_AGES; i++) {
                client->counters.ages[i].tick = ages_now();
                client_page_ages(client, i, AGES_CLASSES);
        }
        for (uint32_t i = 0; i < client->hello->hello->n_partitions && i < PAGES_MAX_PARTITIONS; i++)
                parkables_show(&client->partitions[i].parkables, &own->idle[i]);
        put(&own->stashed_partition, (uint64_t)(entry_of(&client->pages, client->partition) - own->held));
        put(&own->n_stashed, magazines_show(client->stash.magazines, own->stashed, PAGES_MAX_STASHED));
        put(&own->version, PAGES_VERSION);
        atomic_store_explicit(&own->magic, PAGES_CLIENT_MAGIC, memory_order_release);
}

void client_page_whole(bfc_client *client, uint32_t partition, int64_t n_bytes)
{
        struct client_pages *p = &client->pages;

        if (p->own)
                pages_add(&entry_of(p, partition)->bytes_whole, (uint64_t)n_bytes);
}

void client_page_outside(bfc_client *client, uint32_t partition, int64_t n_bytes)
{
        struct pages_client *own = client->pages.own;

        if (own)
                pages_add(&own->bytes_outside[partition < PAGES_MAX_PARTITIONS ? partition
                                                                               : PAGES_MAX_PARTITIONS],
                          (uint64_t)n_bytes);
}

void client_page_ages(bfc_client *client, unsigned place, unsigned class)
{
        struct pages_client *own = client->pages.own;

        if (own && class == AGES_CLASSES)
                pages_show_ages(&own->ages[place], &client->counters.ages[place]);
        else if (own)
                pages_show_class(&own->ages[place], &client->counters.ages[place], class);
}

_Atomic uint64_t *client_page_streams(const bfc_client *client, uint32_t partition)
{
        return client->pages.own ? &entry_of(&client->pages, partition)->bytes_streams : NULL;
}

void client_page_pressure_fn(bfc_client *client)
{
        if (client->pages.own)
                put(&client->pages.own->has_pressure_fn,
                    __atomic_load_n(&client->pressure.fn, __ATOMIC_RELAXED) != NULL);
}

/* ---- both pages ------------------------------------------------------------- */

static void drop_usage(const struct pages_view *v)
{
        if (v->page)
                munmap((void *)(uintptr_t)v->page, v->n_bytes);
}

/* v: NULL: there are none from now on. */
static void show_entries(bfc_client *client, const struct pages_view *v, const Bfcd__HelloReply *hello)
{
        for (size_t i = 0; i < client->hello->hello->n_partitions; i++)
                atomic_store_explicit(&client->partitions[i].usage,
                                      v ? pages_view_entry(v, hello->partitions[i]->usage_entry) : NULL,
                                      memory_order_release);
}

/* Moves the page to the reserved addresses. False: it stays where it is. */
static bool place_usage(struct client_pages *p, struct pages_view *v)
{
        void *old = (void *)(uintptr_t)v->page;

        if (!p->usage || !v->page)
                return false;
        if (mremap(old, v->n_bytes, v->n_bytes, MREMAP_MAYMOVE | MREMAP_FIXED, p->usage) == MAP_FAILED)
                return false;
        v->page = p->usage;
        return true;
}

void client_pages_hide(const struct client_pages *p)
{
        if (p->usage)
                fork_hide_range(p->usage, PAGES_MAX_BYTES);
        if (p->own)
                fork_hide_range(p->own, pages_client_bytes());
}

/* Room for the largest page: that of another daemon may be larger. */
static void reserve_usage(bfc_client *client)
{
        void *place =
                mmap(NULL, PAGES_MAX_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

        if (place != MAP_FAILED)
                client->pages.usage = place;
}

void client_pages_keep(struct call_connection *connection, struct client_pages_next *ret)
{
        int fds[2];

        *ret = (struct client_pages_next){ .own = NULL };
        call_take_page_fds(connection, fds);
        if (fds[0] < 0)
                return;
        (void)pages_map_usage(fds[0], &ret->usage);
        (void)pages_map_client(fds[1], &ret->own);
        close(fds[0]);
        close(fds[1]);
}

void client_pages_drop(struct client_pages_next *next)
{
        drop_usage(&next->usage);
        if (next->own)
                munmap(next->own, pages_client_bytes());
        *next = (struct client_pages_next){ .own = NULL };
}

void client_pages_open(bfc_client *client)
{
        struct client_pages_next next;

        client_pages_keep(client->connection, &next);
        client->pages.own = next.own;
        if (next.own)
                client_page_begin(client);
        if (!next.usage.page)
                return;
        reserve_usage(client);
        if (place_usage(&client->pages, &next.usage))
                show_entries(client, &next.usage, client->hello->hello);
        else
                drop_usage(&next.usage);
}

/* ---- pages of another daemon ------------------------------------------------ */

void client_pages_invalidate(bfc_client *client)
{
        show_entries(client, NULL, NULL);
}

/* Copies the old page to the new one, the header's first word last. No thread writes to either. */
static void copy_own(const struct pages_client *from, struct pages_client *to)
{
        memcpy((char *)to + sizeof(to->magic), (const char *)from + sizeof(from->magic),
               sizeof(*to) - sizeof(to->magic));
        atomic_store_explicit(&to->magic, PAGES_CLIENT_MAGIC, memory_order_release);
}

/* No thread writes meanwhile. If the page cannot be moved the old one stays, which has no reader. */
static void renew_own(bfc_client *client, struct client_pages_next *next)
{
        size_t n_bytes = pages_client_bytes();

        pthread_mutex_lock(&client->lock);
        magazines_lock(client->stash.magazines);
        copy_own(client->pages.own, next->own);
        if (mremap(next->own, n_bytes, n_bytes, MREMAP_MAYMOVE | MREMAP_FIXED, client->pages.own) !=
            MAP_FAILED)
                next->own = NULL;
        magazines_unlock(client->stash.magazines);
        pthread_mutex_unlock(&client->lock);
}

void client_pages_renew(bfc_client *client, struct client_pages_next *next, const Bfcd__HelloReply *hello)
{
        if (client->pages.own && next->own)
                renew_own(client, next);
        if (place_usage(&client->pages, &next->usage)) {
                show_entries(client, &next->usage, hello);
                next->usage.page = NULL;
        }
        client_pages_drop(next);
}

void client_pages_close(struct client_pages *p)
{
        if (p->usage)
                munmap(p->usage, PAGES_MAX_BYTES);
        if (p->own)
                munmap(p->own, pages_client_bytes());
        *p = (struct client_pages){ .own = NULL };
}

/* ---- counters ------------------------------------------------------------------- */

uint64_t client_bytes_reserved(const bfc_client *client)
{
        uint64_t sum = 0;

        for (size_t i = 0; i < client->hello->hello->n_partitions; i++)
                sum += client->partitions[i].stats.bytes_reserved;
        return sum;
}

static void add_with_peak(uint64_t *sum, uint64_t *peak, uint64_t n_bytes)
{
        *sum += n_bytes;
        if (*sum > *peak)
                *peak = *sum;
}

void client_count_reserved(bfc_client *client, uint32_t partition, uint64_t n_bytes)
{
        struct bfc_client_stats *s = &client->partitions[partition].stats;
        uint64_t sum = client_bytes_reserved(client);

        add_with_peak(&s->bytes_reserved, &s->peak_bytes_reserved, n_bytes);
        add_with_peak(&sum, &client->counters.peak_bytes_reserved, n_bytes);
}

void client_count_released(bfc_client *client, uint32_t partition, uint64_t n_bytes)
{
        client->partitions[partition].stats.bytes_reserved -= n_bytes;
}

void client_count_restored(bfc_client *client, uint32_t partition, uint64_t n_bytes)
{
        client->partitions[partition].stats.bytes_reserved += n_bytes;
}

void client_stamp(const bfc_client *client, uint32_t partition, struct block *block)
{
        if (!client->cache)
                return; /* the daemon knows the ages of its own blocks */
        block->age_place = (uint8_t)(1 + (block->may_stash                   ? PAGES_SMALL
                                          : partition < PAGES_MAX_PARTITIONS ? partition
                                                                             : PAGES_MAX_PARTITIONS));
        block->born = ages_now();
}

/* The lock is held. */
static void count_age(bfc_client *client, const struct block *block, uint64_t n_bytes)
{
        unsigned place = block->age_place - 1u;
        bool moved;
        unsigned c;

        if (block->born == 0)
                return;
        c = ages_count(&client->counters.ages[place], block->born, n_bytes, &moved);
        client_page_ages(client, place, moved ? AGES_CLASSES : c);
}

void client_share_age(bfc_client *client, const struct block *block, bool is_shared)
{
        const void *ptr = block->ptr;

        if (block->age_place == 0)
                return;
        if (is_shared)
                count_age(client, block, -block->n_bytes);
        blocks_set_born(&client->blocks, ptr, is_shared ? 0 : ages_now());
        if (!is_shared)
                count_age(client, block, block->n_bytes);
}

void client_count_alloc(bfc_client *client, const struct block *block)
{
        struct bfc_client_stats *s = &client->partitions[block->partition].stats;

        s->num_allocs++;
        s->bytes_requested += block->n_requested;
        if (block->n_bytes > s->largest_alloc_size)
                s->largest_alloc_size = block->n_bytes;
        if (block->partition == client->partition) {
                magazines_count_alloc(client->stash.magazines, block->n_bytes);
        } else {
                s->bytes_in_use += block->n_bytes;
                if (s->bytes_in_use > s->peak_bytes_in_use)
                        s->peak_bytes_in_use = s->bytes_in_use;
                magazines_count_other_alloc(client->stash.magazines, block->n_bytes);
        }
        count_age(client, block, block->n_bytes);
        if (block->parkable)
                parkable_enter(&client->partitions[block->partition].parkables, block->parkable,
                               blocks_find(&client->blocks, block->ptr));
}

void client_count_free(bfc_client *client, const struct block *block)
{
        struct bfc_client_stats *s = &client->partitions[block->partition].stats;

        s->num_frees++;
        s->bytes_requested -= block->n_requested;
        if (block->partition == client->partition) {
                magazines_count_free(client->stash.magazines, block->n_bytes);
        } else {
                s->bytes_in_use -= block->n_bytes;
                magazines_count_other_free(client->stash.magazines, block->n_bytes);
        }
        count_age(client, block, -block->n_bytes);
        if (block->parkable)
                parkable_drop(block, block->parkable);
}

/* ---- options ----------------------------------------------------------------- */

#define DEFAULT_SLAB_BYTES (UINT64_C(2) << 20)
#define MAX_SLAB_BYTES     (UINT64_C(1) << 30)
#define DEFAULT_RETURN_MS  30000u
#define MAX_WAIT_MS        (10u * 60u * 1000u)
#define MAX_TAG_BYTES      31u
#define MAX_METADATA_BYTES 4096u

/* Each of these structures begins with its size. */
static size_t size_of_struct(const void *s)
{
        size_t n_bytes;

        memcpy(&n_bytes, s, sizeof(n_bytes));
        return n_bytes;
}

/* A caller built against a later header may have more options, but they must be 0; one built against an earlier
 * header has at least n_least bytes, and the rest keeps its value. options: NULL: none. */
static int options_copy_from(const char *name, const void *options, void *ret, size_t n_bytes, size_t n_least)
{
        size_t struct_size = options ? size_of_struct(options) : n_bytes;
        const unsigned char *bytes = options;

        if (struct_size < n_least)
                return error_set(-EINVAL, "%s.struct_size is %zu: set it to sizeof(struct %s), %zu", name,
                                 struct_size, name, n_bytes);
        for (size_t i = n_bytes; i < struct_size; i++)
                if (bytes[i] != 0)
                        return error_set(-EINVAL,
                                         "%s has an option that this library version, %s, does not support",
                                         name, bfc_version());
        if (options)
                memcpy(ret, options, struct_size < n_bytes ? struct_size : n_bytes);
        return 0;
}

static int options_copy(const char *name, const void *options, void *ret, size_t n_bytes)
{
        return options_copy_from(name, options, ret, n_bytes, n_bytes);
}

bool client_takes_events(const struct bfc_options *options)
{
        return (options->flags & (BFC_NO_THREAD | BFC_POLL)) != BFC_NO_THREAD;
}

/* The option, or the environment variable (not in a set-user-ID program), or the default. */
static const char *pick(const char *option, const char *variable, const char *fallback)
{
        const char *value = option ? option : variable ? secure_getenv(variable) : NULL;

        return value && value[0] ? value : fallback;
}

/* Of a program that has replaced its title, as setproctitle() does, the arguments may have left nothing. */
static const char *program_name(void)
{
        static _Thread_local char comm[17];
        FILE *file;

        if (program_invocation_short_name[0])
                return program_invocation_short_name;
        file = fopen("/proc/self/comm", "re");
        comm[0] = '\0';
        if (file) {
                if (!fgets(comm, sizeof(comm), file))
                        comm[0] = '\0';
                fclose(file);
        }
        comm[strcspn(comm, "\n")] = '\0';
        return comm;
}

/* An environment variable that is on or off: sets that bit of the flags if it has this value. */
static int read_switch(const char *variable, const char *fallback, const char *value, uint64_t flag,
                       struct bfc_options *options)
{
        const char *word = pick(NULL, variable, fallback);

        if (strcmp(word, "on") != 0 && strcmp(word, "off") != 0)
                return error_set(-EINVAL, "%s is \"%s\": it must be on or off", variable, word);
        if (strcmp(word, value) == 0)
                options->flags |= flag;
        return 0;
}

/* The cache is on by default, but only if the daemon can reclaim idle memory in it. Otherwise it must be
 * requested. */
static int options_read_cache(struct bfc_options *options)
{
        bool is_asked_for = options->cache_idle_bytes > 0 || options->cache_slab_bytes > 0;
        const char *fallback = is_asked_for || client_takes_events(options) ? "on" : "off";

        if (options->cache_slab_bytes > MAX_SLAB_BYTES)
                return error_set(-EINVAL, "bfc_options.cache_slab_bytes is %llu: the maximum is %llu",
                                 (unsigned long long)options->cache_slab_bytes,
                                 (unsigned long long)MAX_SLAB_BYTES);
        if (options->cache_slab_bytes == 0)
                options->cache_slab_bytes = DEFAULT_SLAB_BYTES;
        return read_switch("BFC_CACHE", fallback, "off", BFC_NO_CACHE, options);
}

/* A number in an environment variable: *ret stays as it is without one. */
static int read_number(const char *variable, uint32_t least, uint32_t *ret)
{
        const char *word = pick(NULL, variable, "");
        unsigned long long n;
        char *end;

        if (!word[0])
                return 0;
        errno = 0;
        n = strtoull(word, &end, 10);
        if (word[0] < '0' || word[0] > '9' || *end || errno || n < least || n > UINT32_MAX)
                return error_set(-EINVAL, "%s is \"%s\": it must be a number from %u to %u", variable, word,
                                 least, UINT32_MAX);
        *ret = (uint32_t)n;
        return 0;
}

static int options_read_return(struct bfc_options *options)
{
        int r = options->return_ms == 0 ? read_number("BFC_RETURN_MS", 1, &options->return_ms) : 0;

        if (options->return_ms == 0)
                options->return_ms = DEFAULT_RETURN_MS;
        return r;
}

int client_read_timeout(uint32_t *ret_ms)
{
        uint32_t ms = 0;
        int r = read_number("BFC_WAIT_MS", 0, &ms);

        if (r == 0)
                *ret_ms = ms < MAX_WAIT_MS ? ms : MAX_WAIT_MS;
        return r;
}

int client_options_read(const struct bfc_options *options, struct bfc_options *ret)
{
        struct bfc_options known = { .struct_size = sizeof(known) };
        int r = options_copy("bfc_options", options, &known, sizeof(known));

        if (r < 0)
                return r;
        if (known.flags & ~(BFC_NO_THREAD | BFC_NO_CACHE | BFC_POLL | BFC_INHERIT))
                return error_set(-EINVAL,
                                 "bfc_options.flags has bits that this library version, %s, does not support",
                                 bfc_version());
        known.socket = pick(known.socket, "BFC_SOCKET", PATHS_CLIENT_SOCKET);
        known.partition = pick(known.partition, "BFC_PARTITION", "");
        known.tenant = pick(known.tenant, "BFC_TENANT", "");
        known.name = known.name && known.name[0] ? known.name : program_name();
        known.trace = pick(known.trace, "BFC_TRACE", NULL);
        *ret = known;
        r = options_read_return(ret);
        if (r == 0)
                r = read_switch("BFC_INHERIT", "off", "on", BFC_INHERIT, ret);
        return r < 0 ? r : options_read_cache(ret);
}

static uint32_t wait_at_most(uint32_t wait_ms)
{
        return wait_ms < MAX_WAIT_MS ? wait_ms : MAX_WAIT_MS;
}

static int check_cancel_fd(const char *name, int fd)
{
        return fd >= 0 ? 0
                       : error_set(-EINVAL, "%s.cancel_fd is %d: it must be a file descriptor, or 0 for none",
                                   name, fd);
}

int malloc_how_read(const struct bfc_malloc_options *options, const char **ret_partition,
                    struct malloc_how *ret)
{
        struct bfc_malloc_options known = { .struct_size = sizeof(known) };
        int r = options_copy("bfc_malloc_options", options, &known, sizeof(known));

        if (r < 0)
                return r;
        if (known.tag && strnlen(known.tag, MAX_TAG_BYTES + 1) > MAX_TAG_BYTES)
                return error_set(-EINVAL, "bfc_malloc_options.tag is too long: at most %u bytes",
                                 MAX_TAG_BYTES);
        *ret = (struct malloc_how){ .cancel_fd = known.cancel_fd };
        ret->flags = known.flags;
        ret->wait_ms = wait_at_most(known.wait_ms);
        ret->tag = known.tag && known.tag[0] ? known.tag : NULL;
        *ret_partition = known.partition;
        return check_cancel_fd("bfc_malloc_options", known.cancel_fd);
}

int attach_options_read(const struct bfc_attach_options *options, struct bfc_attach_options *ret)
{
        struct bfc_attach_options known = { .struct_size = sizeof(known) };
        int r = options_copy_from("bfc_attach_options", options, &known, sizeof(known),
                                  offsetof(struct bfc_attach_options, flags));

        if (r < 0)
                return r;
        if (known.flags & ~BFC_ATTACH_READ_ONLY)
                return error_set(
                        -EINVAL,
                        "bfc_attach_options.flags has bits that this library version, %s, does not support",
                        bfc_version());
        known.wait_ms = wait_at_most(known.wait_ms);
        *ret = known;
        return check_cancel_fd("bfc_attach_options", known.cancel_fd);
}

int publish_options_read(const struct bfc_publish_options *options, struct bfc_publish_options *ret)
{
        struct bfc_publish_options known = { .struct_size = sizeof(known) };
        int r = options_copy("bfc_publish_options", options, &known, sizeof(known));

        if (r < 0)
                return r;
        if (known.n_metadata_bytes > 0 && !known.metadata)
                return error_set(-EINVAL, "bfc_publish_options.metadata is NULL");
        if (known.n_metadata_bytes > MAX_METADATA_BYTES)
                return error_set(-EINVAL, "bfc_publish_options.n_metadata_bytes is %zu: the maximum is %u",
                                 known.n_metadata_bytes, MAX_METADATA_BYTES);
        *ret = known;
        return 0;
}

int struct_check(const char *function, const void *ret, size_t n_least)
{
        if (!ret)
                return error_set(-EINVAL, "%s: ret is NULL", function);
        if (size_of_struct(ret) < n_least)
                return error_set(-EINVAL, "%s: struct_size is %zu: set it to the size of the structure, %zu",
                                 function, size_of_struct(ret), n_least);
        return 0;
}

void struct_fill(void *ret, size_t struct_size, const void *known, size_t n_bytes)
{
        memcpy((char *)ret + sizeof(size_t), (const char *)known + sizeof(size_t), n_bytes - sizeof(size_t));
        memset((char *)ret + n_bytes, 0, struct_size - n_bytes);
}
