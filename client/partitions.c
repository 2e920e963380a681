/* Partitions of a session; see partitions.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "client/partitions.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/client.h"
#include "client/options.h"
#include "proto/frame.h"

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
