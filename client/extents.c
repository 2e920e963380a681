/* Extents; see extents.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The thread that reads a reply first maps the extents that came before it. The tables change under the
 * client's lock, which is not held while a Retire is answered. */
#include "client/extents.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "client/client.h"
#include "client/streams.h"

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
