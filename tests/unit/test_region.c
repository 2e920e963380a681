/* Regions of a client: only what was seen mapped is believed.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "client/region.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "device/device.h"
#include "tests/suite.h"

static struct device *device;
static struct regions regions;
static uint64_t last_id;
static const struct device_view host = { .share = DEVICE_SHARE_FD };

static void setup(void)
{
        ck_assert_int_eq(device_host_new(&device), 0);
}

static void teardown(void)
{
        regions_clear(&regions);
        ck_assert_uint_eq(regions.n_items, 0);
        ck_assert_uint_eq(regions.n_bytes_mapped, 0);
        device = device_free(device);
}

FIXTURE(region, setup, teardown);

static int map_fd(const struct region_extent *extent, int fd)
{
        struct device_extent memory = { .fd = fd, .n_bytes = extent->n_bytes };

        return regions_map(&regions, extent, &host, &memory);
}

/* Maps a new extent into a region of 64 MiB. */
static int map(uint64_t region_id, uint64_t offset, uint64_t n_bytes)
{
        struct region_extent extent = { ++last_id, region_id, 64 * MIB, offset, n_bytes, 0 };
        struct device_extent e = DEVICE_EXTENT_EMPTY;
        int r;

        ck_assert_int_eq(device_make(device, DEVICE_SHARE_FD, n_bytes, &e), 0);
        r = map_fd(&extent, e.fd);
        close(e.fd); /* the mapping holds it */
        return r;
}

static int resolves(uint64_t region_id, uint64_t offset, uint64_t n_bytes)
{
        void *p = NULL;
        int r = regions_resolve(&regions, region_id, offset, n_bytes, &p);

        ck_assert((r == 0) == (p != NULL));
        if (r == 0) {
                *(volatile char *)p = 1;
                ((volatile char *)p)[n_bytes - 1] = 1;
        }
        return r;
}

TEST(blocks_lie_in_extents)
{
        ck_assert_int_eq(resolves(1, 0, 1), -EPROTO);
        ck_assert_int_eq(map(1, 4 * MIB, 4 * MIB), 0);
        ck_assert_int_eq(map(1, 0, 2 * MIB), 0);
        ck_assert_int_eq(map(2, 0, 2 * MIB), 0);
        ck_assert_uint_eq(regions.n_items, 2);
        ck_assert_uint_eq(regions.n_bytes_mapped, 8 * MIB);

        ck_assert_int_eq(resolves(1, 0, 2 * MIB), 0);
        ck_assert_int_eq(resolves(1, 256, 2 * MIB - 256), 0);
        ck_assert_int_eq(resolves(1, 4 * MIB, 4 * MIB), 0);
        ck_assert_int_eq(resolves(1, 8 * MIB - 1, 1), 0);
        ck_assert_int_eq(resolves(1, 0, 2 * MIB + 1), -EPROTO); /* into the gap */
        ck_assert_int_eq(resolves(1, MIB, 4 * MIB), -EPROTO);   /* over the gap */
        ck_assert_int_eq(resolves(1, 2 * MIB, 256), -EPROTO);   /* in the gap */
        ck_assert_int_eq(resolves(1, 4 * MIB - 1, 2), -EPROTO); /* from the gap */
        ck_assert_int_eq(resolves(1, 4 * MIB, 4 * MIB + 1), -EPROTO);
        ck_assert_int_eq(resolves(1, 60 * MIB, 1), -EPROTO);
        ck_assert_int_eq(resolves(1, 0, 0), -EPROTO);
        ck_assert_int_eq(resolves(1, UINT64_MAX, 2), -EPROTO);
        ck_assert_int_eq(resolves(1, 2, UINT64_MAX), -EPROTO);
        ck_assert_int_eq(resolves(3, 0, 1), -EPROTO);

        ck_assert_int_eq(map(1, 2 * MIB, 2 * MIB), 0);
        ck_assert_int_eq(resolves(1, 0, 8 * MIB), 0);
}

TEST(new_extent_replaces_the_old_one)
{
        for (uint64_t i = 0; i < 20; i++)
                ck_assert_int_eq(map(1, i * 2 * MIB, 2 * MIB), 0);
        ck_assert_int_eq(map(1, 4 * MIB, 2 * MIB), 0);
        ck_assert_uint_eq(regions.n_bytes_mapped, 40 * MIB);
        /* One that is laid otherwise: what it covers in part is gone as a whole. */
        ck_assert_int_eq(map(1, 10 * MIB, 6 * MIB), 0);
        ck_assert_uint_eq(regions.n_bytes_mapped, 40 * MIB);
        ck_assert_int_eq(map(1, 12 * MIB, 2 * MIB), 0);
        ck_assert_uint_eq(regions.n_bytes_mapped, 36 * MIB);
        ck_assert_int_eq(resolves(1, 10 * MIB, 1), -EPROTO);
        ck_assert_int_eq(resolves(1, 12 * MIB, 2 * MIB), 0);
        ck_assert_int_eq(resolves(1, 14 * MIB, 1), -EPROTO);
        ck_assert_int_eq(resolves(1, 0, 10 * MIB), 0);
        ck_assert_int_eq(resolves(1, 16 * MIB, 24 * MIB), 0);
}

TEST(extents_are_taken_back)
{
        struct region_place place;

        for (uint64_t i = 0; i < 4; i++)
                ck_assert_int_eq(map(1 + i / 3, i % 3 * 2 * MIB, 2 * MIB), 0);
        ck_assert_int_eq(regions_find_extent(&regions, 5, &place), -ENOENT);
        ck_assert_int_eq(regions_unmap(&regions, 5, false), -ENOENT);
        ck_assert_int_eq(regions_find_extent(&regions, 2, &place), 0);
        ck_assert_uint_eq(place.region_id, 1);
        ck_assert_uint_eq(place.offset, 2 * MIB);
        ck_assert_uint_eq(place.n_bytes, 2 * MIB);
        ck_assert_int_eq(device_range_finish(place.range), 0);

        ck_assert_int_eq(regions_unmap(&regions, 2, false), 0);
        ck_assert_int_eq(regions_unmap(&regions, 2, false), -ENOENT);
        ck_assert_uint_eq(regions.n_bytes_mapped, 6 * MIB);
        ck_assert_int_eq(resolves(1, 0, 2 * MIB), 0);
        ck_assert_int_eq(resolves(1, 2 * MIB, 1), -EPROTO);
        ck_assert_int_eq(resolves(1, 0, 6 * MIB), -EPROTO);
        ck_assert_int_eq(resolves(1, 4 * MIB, 2 * MIB), 0);
        ck_assert_int_eq(regions_unmap(&regions, 4, false), 0); /* its region's only one */
        ck_assert_uint_eq(regions.n_items, 2);
        ck_assert_int_eq(resolves(2, 0, 1), -EPROTO);

        ck_assert_int_eq(map(1, 2 * MIB, 2 * MIB), 0);
        ck_assert_int_eq(map(2, 0, 2 * MIB), 0);
        ck_assert_int_eq(resolves(1, 0, 6 * MIB), 0);
        ck_assert_int_eq(resolves(2, 0, 2 * MIB), 0);
}

/* A region of one extent ends with it: its id is not used again. */
TEST(regions_of_one_extent_end)
{
        const uint64_t of_extent = UINT64_C(1) << 63;

        for (unsigned i = 0; i < 3; i++) {
                uint64_t id = ++last_id;
                struct region_extent extent = { id, of_extent | id, 4 * MIB, 0, 4 * MIB, 0 };
                struct device_extent e = DEVICE_EXTENT_EMPTY;

                ck_assert_int_eq(map(1, 0, 2 * MIB), 0);
                ck_assert_int_eq(device_make(device, DEVICE_SHARE_FD, 4 * MIB, &e), 0);
                ck_assert_int_eq(map_fd(&extent, e.fd), 0);
                close(e.fd);
                ck_assert_int_eq(resolves(extent.region_id, 0, 4 * MIB), 0);
                ck_assert_uint_eq(regions.n_items, 2);
                ck_assert_int_eq(regions_unmap(&regions, extent.extent_id, false), 0);
                ck_assert_int_eq(regions_unmap(&regions, extent.extent_id, false), -ENOENT);
                ck_assert_uint_eq(regions.n_items, 1);
                ck_assert_uint_eq(regions.n_bytes_mapped, 2 * MIB);
        }
}

TEST(invalid_extents_are_refused)
{
        struct region_extent extent = { 1, 1, 64 * MIB, 0, 2 * MIB, 0 };
        struct device_extent e = DEVICE_EXTENT_EMPTY;

        ck_assert_int_eq(device_make(device, DEVICE_SHARE_FD, 2 * MIB, &e), 0);
        extent.region_bytes = 0;
        ck_assert_int_eq(map_fd(&extent, e.fd), -EPROTO);
        extent.region_bytes = 3 * MIB;
        ck_assert_int_eq(map_fd(&extent, e.fd), -EPROTO);
        extent.region_bytes = 64 * MIB;
        ck_assert_int_eq(map_fd(&extent, 1 << 20), -EPROTO); /* no fd */
        extent.offset = 64 * MIB;
        ck_assert_int_eq(map_fd(&extent, e.fd), -EPROTO);
        extent.offset = 1;
        ck_assert_int_eq(map_fd(&extent, e.fd), -EPROTO);
        extent.offset = 0;
        ck_assert_int_eq(map_fd(&extent, e.fd), 0);
        extent.region_bytes = 32 * MIB; /* it was told otherwise before */
        ck_assert_int_eq(map_fd(&extent, e.fd), -EPROTO);
        extent.region_bytes = 64 * MIB;
        extent.partition = 1;
        ck_assert_int_eq(map_fd(&extent, e.fd), -EPROTO);
        ck_assert_int_eq(resolves(1, 0, 2 * MIB), 0);
        ck_assert_uint_eq(regions.n_bytes_mapped, 2 * MIB);
        ck_assert_int_eq(device_destroy(device, &e), 0);
}

/* The fd of an extent found no number in this process: the extent is known, and nothing is there. */
TEST(block_in_an_extent_that_was_not_received)
{
        struct region_extent extent = { 1, 1, 64 * MIB, 0, 2 * MIB, 0 };
        struct device_extent e = DEVICE_EXTENT_EMPTY;

        ck_assert_int_eq(map_fd(&extent, -1), REGIONS_UNMAPPED);
        ck_assert_int_eq(resolves(1, 0, MIB), -EPROTO);
        ck_assert_int_eq(regions_retry(&regions, 1, 0, MIB), -EMFILE);
        ck_assert_int_eq(regions_retry(&regions, 1, 0, MIB), -EMFILE);
        ck_assert_int_eq(device_make(device, DEVICE_SHARE_FD, 2 * MIB, &e), 0);
        ck_assert_int_eq(map_fd(&extent, e.fd), 0); /* it was sent once more */
        ck_assert_int_eq(resolves(1, 0, MIB), 0);
        ck_assert_int_eq(regions_retry(&regions, 1, 0, MIB), -ENOENT);
        ck_assert_uint_eq(regions.n_bytes_mapped, 2 * MIB);
        extent.extent_id = 2;
        extent.offset = 2 * MIB;
        ck_assert_int_eq(map_fd(&extent, -1), REGIONS_UNMAPPED);
        ck_assert_int_eq(regions_unmap(&regions, 2, false), 0);
        ck_assert_int_eq(device_destroy(device, &e), 0);
}

/* More addresses than a process has: the extent is known, and nothing is there. */
TEST(extent_that_cannot_be_mapped)
{
        struct region_extent extent = { 1, 1, UINT64_C(1) << 60, 0, 2 * MIB, 0 };
        struct device_extent e[2] = { DEVICE_EXTENT_EMPTY, DEVICE_EXTENT_EMPTY };
        struct region_place place;

        for (int i = 0; i < 2; i++)
                ck_assert_int_eq(device_make(device, DEVICE_SHARE_FD, 2 * MIB, &e[i]), 0);
        ck_assert_int_eq(regions_retry(&regions, 1, 0, 2 * MIB), -ENOENT);
        ck_assert_int_eq(map_fd(&extent, dup(e[0].fd)), REGIONS_UNMAPPED);
        ck_assert_int_eq(resolves(1, 0, 2 * MIB), -EPROTO);
        ck_assert_int_eq(regions_retry(&regions, 1, 0, MIB), -ENOMEM);
        ck_assert_int_eq(regions_retry(&regions, 1, 2 * MIB, MIB), -ENOENT);
        ck_assert_int_eq(regions_retry(&regions, 2, 0, MIB), -ENOENT);
        ck_assert_int_eq(regions_find_extent(&regions, 1, &place), 0);
        ck_assert(place.region_id == 1 && place.offset == 0 && place.n_bytes == 2 * MIB && !place.range);
        ck_assert_uint_eq(regions_list(&regions, NULL, 0), 0);
        ck_assert_int_eq(regions_unmap(&regions, 1, false), 0); /* let go of */
        ck_assert_int_eq(regions_unmap(&regions, 1, false), -ENOENT);
        ck_assert_int_eq(regions_find_extent(&regions, 1, &place), -ENOENT);

        ck_assert_int_eq(map_fd(&extent, dup(e[0].fd)), REGIONS_UNMAPPED);
        extent = (struct region_extent){ 2, 1, 64 * MIB, 0, 2 * MIB, 0 };
        ck_assert_int_eq(map_fd(&extent, e[1].fd), 0); /* in its place */
        ck_assert_int_eq(regions_find_extent(&regions, 1, &place), -ENOENT);
        ck_assert_int_eq(resolves(1, 0, 2 * MIB), 0);
        extent = (struct region_extent){ 3, 2, UINT64_C(1) << 60, 0, 2 * MIB, 0 };
        ck_assert_int_eq(map_fd(&extent, dup(e[0].fd)), REGIONS_UNMAPPED);
        regions_forget_unmapped(&regions);
        ck_assert_int_eq(regions_find_extent(&regions, 3, &place), -ENOENT);
        ck_assert_uint_eq(regions.n_bytes_mapped, 2 * MIB);
        for (int i = 0; i < 2; i++)
                ck_assert_int_eq(device_destroy(device, &e[i]), 0);
}

/* As a GPU's, on the host's memory: a region comes and goes with its one extent. */
TEST(extents_by_handle)
{
        const struct device_view view = { .share = DEVICE_SHARE_CUDA_IPC };
        struct region_extent extent = { 1, 7, 4 * MIB, 0, 4 * MIB, 0 };
        struct region_origin origin;
        struct device_extent e = DEVICE_EXTENT_EMPTY;

        ck_assert_int_eq(device_make(device, DEVICE_SHARE_FD, 4 * MIB, &e), 0);
        memset(e.handle, 42, sizeof(e.handle));
        extent.n_bytes = 2 * MIB;
        ck_assert_int_eq(regions_map(&regions, &extent, &view, &e), -EPROTO);
        extent.offset = 2 * MIB;
        ck_assert_int_eq(regions_map(&regions, &extent, &view, &e), -EPROTO);
        extent.offset = 0;
        extent.n_bytes = extent.region_bytes = 8 * MIB; /* it is not so large */
        e.n_bytes = 8 * MIB;
        ck_assert_int_eq(regions_map(&regions, &extent, &view, &e), -EPROTO);
        ck_assert_uint_eq(regions.n_items, 0); /* nothing is left of it */
        extent.n_bytes = extent.region_bytes = e.n_bytes = 4 * MIB;
        ck_assert_int_eq(regions_map(&regions, &extent, &view, &e), 0);
        ck_assert_int_eq(resolves(7, 0, 4 * MIB), 0);
        ck_assert_int_eq(resolves(7, 4 * MIB, 256), -EPROTO);
        ck_assert_int_eq(regions_origin(&regions, 7, 3 * MIB, &origin), 0);
        ck_assert_int_eq(origin.share, DEVICE_SHARE_CUDA_IPC);
        ck_assert_mem_eq(origin.handle, e.handle, sizeof(e.handle));
        ck_assert_uint_eq(origin.offset, 0);
        ck_assert_uint_eq(origin.n_bytes, 4 * MIB);
        ck_assert_int_eq(regions_origin(&regions, 7, 4 * MIB, &origin), -ENOENT);
        ck_assert_int_eq(regions_origin(&regions, 8, 0, &origin), -ENOENT);
        extent.extent_id = 2;
        ck_assert_int_eq(regions_map(&regions, &extent, &view, &e), -EPROTO); /* there is one */
        ck_assert_int_eq(map(8, 2 * MIB, 2 * MIB), 0);
        ck_assert_int_eq(regions_origin(&regions, 8, 0, &origin), -ENOENT); /* nothing is there */
        ck_assert_int_eq(regions_origin(&regions, 8, 3 * MIB, &origin), 0);
        ck_assert_int_eq(origin.share, DEVICE_SHARE_FD);
        ck_assert_uint_eq(origin.offset, 2 * MIB);
        ck_assert_int_eq(regions_unmap(&regions, 1, false), 0);
        ck_assert_int_eq(resolves(7, 0, 4 * MIB), -EPROTO);
        ck_assert_uint_eq(regions.n_items, 1);
        ck_assert_uint_eq(regions.n_bytes_mapped, 2 * MIB);
        ck_assert_int_eq(resolves(8, 2 * MIB, 2 * MIB), 0);
        ck_assert_int_eq(device_destroy(device, &e), 0);
}

/* A parked block's region of one extent keeps its address, also where the next extent could not be mapped at first. */
TEST(regions_of_parked_blocks_are_kept)
{
        const uint64_t id = UINT64_C(1) << 63 | 1;
        struct region_extent extent = { 1, id, 2 * MIB, 0, 2 * MIB, 0 };
        struct device_extent e[2] = { DEVICE_EXTENT_EMPTY, DEVICE_EXTENT_EMPTY };
        void *before, *after;

        for (int i = 0; i < 2; i++)
                ck_assert_int_eq(device_make(device, DEVICE_SHARE_FD, 2 * MIB, &e[i]), 0);
        ck_assert_int_eq(map_fd(&extent, e[0].fd), 0);
        ck_assert_int_eq(regions_resolve(&regions, id, 0, 2 * MIB, &before), 0);
        ck_assert_uint_eq(regions_unmap_all_in(&regions, id, 0, 2 * MIB), 1);
        ck_assert_uint_eq(regions.n_items, 1);
        ck_assert_int_eq(resolves(id, 0, 1), -EPROTO);
        extent.extent_id = 2;
        ck_assert_int_eq(map_fd(&extent, -1), REGIONS_UNMAPPED);
        ck_assert_int_eq(map_fd(&extent, e[1].fd), 0);
        ck_assert_int_eq(regions_resolve(&regions, id, 0, 2 * MIB, &after), 0);
        ck_assert_ptr_eq(before, after);
        regions_unkeep(&regions, id); /* it is in use */
        ck_assert_uint_eq(regions.n_items, 1);
        ck_assert_int_eq(regions_unmap(&regions, 2, true), 0);
        ck_assert_uint_eq(regions.n_items, 1);
        regions_unkeep(&regions, id);
        ck_assert_uint_eq(regions.n_items, 0);
        regions_unkeep(&regions, id);
        for (int i = 0; i < 2; i++)
                ck_assert_int_eq(device_destroy(device, &e[i]), 0);
}

TEST(ranges_are_found)
{
        ck_assert_ptr_null(regions_range(&regions, 1));
        ck_assert_int_eq(map(1, 0, 2 * MIB), 0);
        ck_assert_int_eq(map(2, 0, 2 * MIB), 0);
        ck_assert_ptr_nonnull(regions_range(&regions, 1));
        ck_assert_ptr_ne(regions_range(&regions, 1), regions_range(&regions, 2));
}
