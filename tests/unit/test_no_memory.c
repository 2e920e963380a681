/* Devices without memory: extents are sizes, and addresses that a client gets cannot be used.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/suite.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "device/device.h"

#define TIB (UINT64_C(1) << 40)

static struct device *device_of(const char *id)
{
        struct device *d = NULL;

        ck_assert_int_eq(device_no_memory_new(id, &d), 0);
        ck_assert(d->has_no_memory);
        return d;
}

/* More than any machine has. */
TEST(extents_are_sizes)
{
        struct device *d = device_of("host");
        struct device_extent extents[] = { { .n_bytes = 64 * TIB }, { .n_bytes = 2 * MIB } };
        struct device_supply supply = { 0 };
        struct stat st;
        int fd;

        ck_assert_uint_eq(device_granularity(d), 2 * MIB);
        ck_assert_int_eq(device_make_all(d, &supply, DEVICE_SHARE_FD, extents, 2), 0);
        ck_assert_uint_eq(device_extents_bytes(extents, 2), 64 * TIB + 2 * MIB);
        ck_assert(device_extent_is_made(&extents[0]));
        fd = device_lend(d, &extents[0], false);
        ck_assert_int_ge(fd, 0);
        ck_assert_int_eq(fstat(fd, &st), 0);
        ck_assert_int_eq(st.st_size, 0);
        ck_assert_int_lt(ftruncate(fd, 1), 0); /* all clients have the file */
        close(fd);
        for (int i = 0; i < 2; i++) {
                ck_assert_int_eq(device_destroy(d, &extents[i]), 0);
                ck_assert(!device_extent_is_made(&extents[i]));
        }
        device_free(d);
}

/* GPUs need not be in the machine, and each has an identity and handles of its own. */
TEST(gpus)
{
        struct device *a = device_of("cuda:0"), *b = device_of("cuda:1");
        struct device_facts of_a, of_b;
        struct device_extent e, f;

        ck_assert(a->is_cuda);
        ck_assert_int_eq(device_facts(a, &of_a), 0);
        ck_assert_int_eq(device_facts(b, &of_b), 0);
        ck_assert_mem_ne(of_a.uuid, of_b.uuid, sizeof(of_a.uuid));
        ck_assert_uint_eq(of_a.bytes_total, 64 * TIB);
        ck_assert_int_eq(device_make(a, DEVICE_SHARE_CUDA_IPC, 2 * MIB, &e), 0);
        ck_assert_int_eq(device_make(a, DEVICE_SHARE_CUDA_IPC, 2 * MIB, &f), 0);
        ck_assert_mem_ne(e.handle, f.handle, sizeof(e.handle));
        device_destroy(a, &e);
        device_destroy(a, &f);
        device_free(a);
        device_free(b);
}

LOOP_TEST(nothing_is_mapped, 2)
{
        struct device_view view = { .is_cuda = _i == 1, .has_no_memory = true };
        struct device_extent e = { .fd = -1, .n_bytes = 2 * MIB };
        struct device_range *r = NULL;
        char byte = 0;

        ck_assert_int_eq(device_range_new(&view, MIB, &r), -EINVAL);
        ck_assert_int_eq(device_range_new(&view, 1 * TIB, &r), 0);
        ck_assert_ptr_nonnull(device_range_base(r));
        ck_assert_int_eq(device_range_map(r, 0, &e), 0);
        ck_assert_int_eq(device_range_write(r, 0, &byte, 1), -EIO);
        ck_assert_int_eq(device_range_read(r, 0, 1, &byte), -EIO);
        /* The kernel says that the address cannot be read. */
        ck_assert_int_eq(access(device_range_base(r), F_OK), -1);
        ck_assert_int_eq(errno, EFAULT);
        ck_assert_int_eq(device_range_finish(r), 0);
        ck_assert_int_eq(device_range_unmap(r, 0, 2 * MIB), 0);
        device_range_free(r);
}
