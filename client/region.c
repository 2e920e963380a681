/* Regions of a session; see region.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A session has a handful of regions and at most a few hundred extents in each,
 * so a list of regions and a sorted array of extents are enough.
 *
 * Invariant, for each region: its extents are sorted by offset, do not overlap,
 * are inside of the range, and are what is mapped at their offsets. No unmapped
 * extent overlaps one of these. */
#include "client/region.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CLOSED_IN_CHILD (-2) /* an fd */

struct mapped {
        uint64_t offset;
        uint64_t n_bytes;
        uint64_t extent_id;
};

struct region {
        uint64_t id;
        uint64_t n_bytes;
        uint32_t partition;
        struct device_range *range;
        struct fork_entry fork;
        bool is_watched;           /* `fork` is registered */
        bool by_handle;            /* then it is one extent */
        int fd;                    /* of its extent; -1: none, nor an entry */
        bool is_shareable;         /* each extent's is kept */
        struct fork_entry fd_fork; /* where there is one */
        uint8_t handle[DEVICE_HANDLE_BYTES];
        struct mapped *extents;
        size_t n_extents;
        size_t n_room;
};

/* An extent that this process was given and could not map, with what it takes to
 * try again. */
struct unmapped {
        struct unmapped *next;
        struct region_extent extent;
        const struct device_view *view;
        struct device_extent memory; /* owns the fd */
};

static void region_drop_fd(struct region *region)
{
        int cancel_state;

        if (region->fd == -1)
                return;
        fork_remove(&region->fd_fork);
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel_state); /* the caller may have locks */
        if (region->fd >= 0)
                close(region->fd);
        pthread_setcancelstate(cancel_state, NULL);
        region->fd = -1;
}

static void close_in_child(struct fork_entry *entry)
{
        struct region *region = entry->object;

        if (region->fd >= 0)
                close(region->fd); /* it would keep the memory */
        region->fd = CLOSED_IN_CHILD;
}

/* Without one bfc_extent_fd() fails. */
static void region_keep_fd(struct region *region, int fd)
{
        region_drop_fd(region);
        region->fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);
        if (region->fd < 0)
                return;
        region->fd_fork = (struct fork_entry){ .in_child = close_in_child, .object = region };
        fork_add(&region->fd_fork);
}

static struct region *region_free(struct region *region)
{
        if (!region)
                return NULL;
        if (region->is_watched)
                fork_remove(&region->fork);
        region_drop_fd(region);
        device_range_free(region->range);
        free(region->extents);
        free(region);
        return NULL;
}

/* Takes the record at this place off the list. */
static void unmapped_remove(struct unmapped **at)
{
        struct unmapped *u = *at;
        int cancel_state;

        *at = u->next;
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel_state); /* the caller may have locks */
        if (u->memory.fd >= 0)
                close(u->memory.fd);
        pthread_setcancelstate(cancel_state, NULL);
        free(u);
}

void regions_forget_unmapped(struct regions *r)
{
        while (r->unmapped)
                unmapped_remove(&r->unmapped);
}

void regions_clear(struct regions *r)
{
        regions_forget_unmapped(r);
        for (size_t i = 0; i < r->n_items; i++)
                region_free(r->items[i]);
        free(r->items);
        *r = (struct regions){ .inherits = r->inherits };
}

static struct region *regions_find(const struct regions *r, uint64_t id)
{
        for (size_t i = 0; i < r->n_items; i++)
                if (r->items[i]->id == id)
                        return r->items[i];
        return NULL;
}

/* What forked children find at the region's addresses, once these are known. Of a GPU's memory they
 * inherit nothing. */
static void region_watch(struct region *region, const struct device_view *view, bool inherits)
{
        void *base = device_range_base(region->range);

        if (region->is_watched || !base || (inherits && !view->is_cuda))
                return;
        region->fork = (struct fork_entry){ .in_child = view->is_cuda ? fork_fill : fork_hide,
                                            .object = base,
                                            .n_bytes = region->n_bytes };
        fork_add(&region->fork);
        region->is_watched = true;
}

static int regions_add(struct regions *r, const struct region_extent *extent, const struct device_view *view,
                       struct region **ret)
{
        struct region **items = realloc(r->items, (r->n_items + 1) * sizeof(struct region *));
        struct region *region;
        int error;

        if (!items)
                return -ENOMEM;
        r->items = items;
        region = calloc(1, sizeof(*region));
        if (!region)
                return -ENOMEM;
        region->id = extent->region_id;
        region->n_bytes = extent->region_bytes;
        region->partition = extent->partition;
        region->fd = -1;
        error = device_range_new(view, extent->region_bytes, &region->range);
        if (error < 0) {
                region_free(region);
                return error == -EINVAL ? -EPROTO : error;
        }
        region_watch(region, view, r->inherits);
        r->items[r->n_items++] = region;
        *ret = region;
        return 0;
}

/* The first extent that ends behind offset; n_extents when there is none. */
static size_t region_first_behind(const struct region *region, uint64_t offset)
{
        size_t low = 0, high = region->n_extents;

        while (low < high) {
                size_t middle = low + (high - low) / 2;
                const struct mapped *m = &region->extents[middle];

                if (m->offset + m->n_bytes <= offset)
                        low = middle + 1;
                else
                        high = middle;
        }
        return low;
}

static int region_make_room(struct region *region)
{
        size_t n_room = region->n_room ? region->n_room * 2 : 16;
        struct mapped *extents;

        if (region->n_extents < region->n_room)
                return 0;
        extents = realloc(region->extents, n_room * sizeof(*extents));
        if (!extents)
                return -ENOMEM;
        region->extents = extents;
        region->n_room = n_room;
        return 0;
}

/* Puts the extent in the place of all that it overlaps, or nothing where it is
 * not mapped. Returns how many bytes those had. There is room for one more. */
static uint64_t region_replace(struct region *region, const struct region_extent *extent, bool is_mapped)
{
        size_t first = region_first_behind(region, extent->offset), last = first, n_new = is_mapped;
        uint64_t n_bytes_gone = 0;

        while (last < region->n_extents && region->extents[last].offset < extent->offset + extent->n_bytes)
                n_bytes_gone += region->extents[last++].n_bytes;
        if (region->n_extents > 0) /* else there may be no array */
                memmove(region->extents + first + n_new, region->extents + last,
                        (region->n_extents - last) * sizeof(*region->extents));
        if (is_mapped)
                region->extents[first] =
                        (struct mapped){ extent->offset, extent->n_bytes, extent->extent_id };
        region->n_extents = region->n_extents - (last - first) + n_new;
        return n_bytes_gone;
}

/* Such a region ends with its extent, and has the extent's id. */
static bool region_is_extent(const struct region *region)
{
        return region->id >> 63 != 0;
}

/* Back to before a region whose extent is not there, or no more. */
static void regions_remove(struct regions *r, struct region *region)
{
        size_t i = 0;

        while (r->items[i] != region)
                i++;
        r->items[i] = r->items[--r->n_items];
        region_free(region);
}

static int region_map(struct region *region, const struct region_extent *extent,
                      const struct device_extent *memory)
{
        int error = region_make_room(region);

        if (error == 0 && memory->share == DEVICE_SHARE_FD && memory->fd < 0)
                error = -EMFILE;
        if (error == 0)
                error = device_range_map(region->range, extent->offset, memory);
        if (error == 0 && !device_range_base(region->range))
                error = -EPROTO;
        return error == -EINVAL ? -EPROTO : error;
}

static int regions_map_now(struct regions *r, const struct region_extent *extent,
                           const struct device_view *view, const struct device_extent *memory)
{
        struct region *region = regions_find(r, extent->region_id);
        bool by_handle = view->share == DEVICE_SHARE_CUDA_IPC;
        bool is_new = !region;
        int error = 0;

        /* The driver chooses the address of such an extent: it is alone, and stays. */
        if (by_handle && (region || extent->offset != 0 || extent->n_bytes != extent->region_bytes))
                return -EPROTO;
        if (!region)
                error = regions_add(r, extent, view, &region);
        else if (region->n_bytes != extent->region_bytes || region->partition != extent->partition)
                error = -EPROTO;
        if (error < 0)
                return error;
        error = region_map(region, extent, memory);
        if (error < 0) {
                if (by_handle || (is_new && region_is_extent(region)))
                        regions_remove(r, region);
                else if (error != -EPROTO) /* the daemon has freed what was there */
                        r->n_bytes_mapped -= region_replace(region, extent, false);
                return error;
        }
        region_watch(region, view, r->inherits);
        for (size_t i = 0; i < r->n_items; i++) /* this may have been the process's first use of a GPU */
                device_range_pin(r->items[i]->range);
        region->is_shareable |= r->n_shareable > 0 && view->is_cuda && !by_handle && region_is_extent(region);
        if (region->is_shareable)
                region_keep_fd(region, memory->fd);
        region->by_handle = by_handle;
        memcpy(region->handle, memory->handle, sizeof(region->handle));
        r->n_bytes_mapped -= region_replace(region, extent, true);
        r->n_bytes_mapped += extent->n_bytes;
        return 0;
}

static bool unmapped_overlaps(const struct unmapped *u, uint64_t region_id, uint64_t offset, uint64_t n_bytes)
{
        const struct region_extent *e = &u->extent;

        return e->region_id == region_id && e->offset < offset + n_bytes && offset < e->offset + e->n_bytes;
}

int regions_map(struct regions *r, const struct region_extent *extent, const struct device_view *view,
                const struct device_extent *memory)
{
        struct unmapped *u;
        int error;

        for (struct unmapped **at = &r->unmapped; *at;)
                if (unmapped_overlaps(*at, extent->region_id, extent->offset, extent->n_bytes))
                        unmapped_remove(at);
                else
                        at = &(*at)->next;
        error = regions_map_now(r, extent, view, memory);
        if (error == 0 || error == -EPROTO)
                return error;
        u = malloc(sizeof(*u));
        if (!u)
                return -ENOMEM;
        *u = (struct unmapped){ r->unmapped, *extent, view, *memory };
        r->unmapped = u;
        return REGIONS_UNMAPPED;
}

int regions_retry(struct regions *r, uint64_t region_id, uint64_t offset, uint64_t n_bytes)
{
        int error = -ENOENT;

        for (struct unmapped **at = &r->unmapped; *at;) {
                if (!unmapped_overlaps(*at, region_id, offset, n_bytes)) {
                        at = &(*at)->next;
                        continue;
                }
                error = regions_map_now(r, &(*at)->extent, (*at)->view, &(*at)->memory);
                if (error < 0)
                        return error;
                unmapped_remove(at);
        }
        return error;
}

int regions_origin(const struct regions *r, uint64_t region_id, uint64_t offset, struct region_origin *ret)
{
        const struct region *region = regions_find(r, region_id);
        size_t i = region ? region_first_behind(region, offset) : 0;

        if (!region || i == region->n_extents || region->extents[i].offset > offset)
                return -ENOENT;
        *ret = (struct region_origin){
                .offset = region->extents[i].offset,
                .n_bytes = region->extents[i].n_bytes,
                .share = region->by_handle ? DEVICE_SHARE_CUDA_IPC : DEVICE_SHARE_FD,
        };
        if (region->by_handle)
                memcpy(ret->handle, region->handle, sizeof(ret->handle));
        return 0;
}

int regions_enable_peer(const struct regions *r, uint32_t partition, int ordinal)
{
        int error = 0;

        for (size_t i = 0; error == 0 && i < r->n_items; i++)
                if (r->items[i]->partition == partition)
                        error = device_range_enable_peer(r->items[i]->range, ordinal);
        return error;
}

int regions_fd(const struct regions *r, uint64_t region_id)
{
        const struct region *region = regions_find(r, region_id);

        return region ? region->fd : -1;
}

struct device_range *regions_range(const struct regions *r, uint64_t region_id)
{
        const struct region *region = regions_find(r, region_id);

        return region ? region->range : NULL;
}

uint64_t regions_size(const struct regions *r, uint64_t region_id)
{
        const struct region *region = regions_find(r, region_id);

        return region ? region->n_bytes : 0;
}

uint64_t regions_mapped(const struct regions *r, uint32_t partition)
{
        uint64_t sum = 0;

        for (size_t i = 0; i < r->n_items; i++)
                for (size_t k = 0; r->items[i]->partition == partition && k < r->items[i]->n_extents; k++)
                        sum += r->items[i]->extents[k].n_bytes;
        return sum;
}

uint64_t regions_pinned(const struct regions *r, uint32_t partition)
{
        uint64_t sum = 0;

        for (size_t i = 0; i < r->n_items; i++)
                if (r->items[i]->partition == partition && r->items[i]->range)
                        sum += device_range_pinned(r->items[i]->range);
        return sum;
}

uint32_t regions_partition(const struct regions *r, uint64_t region_id)
{
        const struct region *region = regions_find(r, region_id);

        return region ? region->partition : UINT32_MAX;
}

static const struct mapped *regions_find_mapped(const struct regions *r, uint64_t extent_id,
                                                struct region **ret)
{
        for (size_t i = 0; i < r->n_items; i++) {
                struct region *region = r->items[i];

                for (size_t k = 0; k < region->n_extents; k++) {
                        if (region->extents[k].extent_id != extent_id)
                                continue;
                        *ret = region;
                        return &region->extents[k];
                }
        }
        return NULL;
}

int regions_find_extent(const struct regions *r, uint64_t extent_id, struct region_place *ret)
{
        struct region *region;
        const struct mapped *m = regions_find_mapped(r, extent_id, &region);

        if (!m) {
                const struct unmapped *u = r->unmapped;

                while (u && u->extent.extent_id != extent_id)
                        u = u->next;
                if (!u)
                        return -ENOENT;
                *ret = (struct region_place){ u->extent.region_id, u->extent.offset, u->extent.n_bytes,
                                              NULL };
                return 0;
        }
        *ret = (struct region_place){ region->id, m->offset, m->n_bytes, region->range };
        return 0;
}

size_t regions_list(const struct regions *r, uint64_t *ret_extent_ids, size_t max)
{
        size_t n = 0;

        for (size_t i = 0; i < r->n_items; i++)
                for (size_t k = 0; k < r->items[i]->n_extents; k++, n++)
                        if (n < max)
                                ret_extent_ids[n] = r->items[i]->extents[k].extent_id;
        return n;
}

int regions_unmap(struct regions *r, uint64_t extent_id, bool keeps_region)
{
        struct region *region;
        const struct mapped *m = regions_find_mapped(r, extent_id, &region);
        size_t i;
        int error;

        if (!m) {
                struct unmapped **at = &r->unmapped;

                while (*at && (*at)->extent.extent_id != extent_id)
                        at = &(*at)->next;
                if (!*at)
                        return -ENOENT;
                unmapped_remove(at);
                return 0;
        }
        /* What was mapped on a device that is lost is gone with it. */
        error = device_range_unmap(region->range, m->offset, m->n_bytes);
        if (error < 0 && error != -ENODEV)
                return error;
        r->n_bytes_mapped -= m->n_bytes;
        i = (size_t)(m - region->extents);
        region->n_extents--;
        memmove(region->extents + i, region->extents + i + 1,
                (region->n_extents - i) * sizeof(*region->extents));
        if (region->by_handle || region_is_extent(region)) {
                region_drop_fd(region); /* it would keep the memory */
                if (!keeps_region)
                        regions_remove(r, region);
        }
        return 0;
}

void regions_unkeep(struct regions *r, uint64_t region_id)
{
        struct region *region = regions_find(r, region_id);

        if (region && region_is_extent(region) && region->n_extents == 0)
                regions_remove(r, region);
}

size_t regions_unmap_all_in(struct regions *r, uint64_t region_id, uint64_t offset, uint64_t n_bytes)
{
        struct region *region = regions_find(r, region_id);
        size_t i = region ? region_first_behind(region, offset) : 0, n = 0;

        while (region && i < region->n_extents && region->extents[i].offset < offset + n_bytes) {
                if (regions_unmap(r, region->extents[i].extent_id, true) < 0)
                        i++;
                else
                        n++;
        }
        return n;
}

int regions_unmap_all(struct regions *r, bool is_captured)
{
        int result = 0;

        regions_forget_unmapped(r);
        for (size_t i = 0; i < r->n_items; i++) {
                struct region *region = r->items[i];
                int error = is_captured ? -EBUSY : device_range_finish(region->range);
                bool is_idle = error == 0;
                size_t n_kept = 0;

                if (error < 0 && error != -ENODEV && error != -EIO) /* with these no work continues */
                        device_range_leave(region->range);

                for (size_t k = 0; k < region->n_extents; k++) {
                        struct mapped m = region->extents[k];

                        if (is_idle)
                                error = device_range_unmap(region->range, m.offset, m.n_bytes);
                        if (error == 0) {
                                r->n_bytes_mapped -= m.n_bytes;
                                continue;
                        }
                        region->extents[n_kept++] = m;
                        result = result < 0 ? result : error;
                }
                region->n_extents = n_kept;
        }
        return result;
}

int regions_resolve(const struct regions *r, uint64_t region_id, uint64_t offset, uint64_t n_bytes,
                    void **ret)
{
        const struct region *region = regions_find(r, region_id);
        uint64_t reached = offset;

        if (!region || n_bytes == 0 || n_bytes > region->n_bytes || offset > region->n_bytes - n_bytes)
                return -EPROTO;
        for (size_t i = region_first_behind(region, offset); i < region->n_extents; i++) {
                const struct mapped *m = &region->extents[i];

                if (m->offset > reached)
                        break; /* a gap */
                reached = m->offset + m->n_bytes;
                if (reached >= offset + n_bytes) {
                        *ret = (char *)device_range_base(region->range) + offset;
                        return 0;
                }
        }
        return -EPROTO;
}
