/* Copies between extents of a GPU and of the host.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/suite.h"
#include "tests/unit/cuda_acts.h"
#include "tests/unit/cuda_case.h"

FIXTURE(copies, case_setup, case_teardown);

#define HOST_BYTES (24 * MIB)

struct host {
        int fd;
        unsigned char *bytes;
};

static struct host host_make(void)
{
        struct host h = { .fd = memfd_create("host", MFD_CLOEXEC) };

        ck_assert_int_eq(ftruncate(h.fd, (off_t)HOST_BYTES), 0);
        h.bytes = mmap(NULL, HOST_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, h.fd, 0);
        ck_assert_ptr_ne(h.bytes, MAP_FAILED);
        return h;
}

static void host_drop(struct host *h)
{
        munmap(h->bytes, HOST_BYTES);
        close(h->fd);
}

/* Every 4 KiB differ, and each from its neighbours by more than one byte. */
static void host_write(struct host *h, uint64_t seed)
{
        for (uint64_t i = 0; i < HOST_BYTES; i += sizeof(seed)) {
                uint64_t x = (i + seed) * UINT64_C(0x9e3779b97f4a7c15);

                memcpy(h->bytes + i, &x, sizeof(x));
        }
}

static int copy_host(struct process *p, int (*act)(struct message *m), const struct message *made,
                     uint64_t offset, const struct host *h, uint64_t host_offset, uint64_t n_bytes)
{
        struct message m = { .fd = h->fd, .a = made->a, .b = offset, .c = n_bytes };

        m.extent = (struct device_extent){ .n_bytes = HOST_BYTES, .native = host_offset };
        return process_call(p, act, &m);
}

static struct process owner_with_late_streams(void)
{
        struct process p = process_start();

        set(&p, "FAKE_CUDA_STREAM_DELAY_US=50000"); /* buffers that are used too early have other bytes */
        ck_assert_int_eq(open_device(&p, "cuda:0"), 0);
        return p;
}

/* Sizes around the pieces of 8 MiB, and no offset is a multiple of anything. */
TEST(bytes_come_back)
{
        static const uint64_t sizes[] = { 1,           4096,         8 * MIB - 1, 8 * MIB,
                                          8 * MIB + 1, 16 * MIB + 3, 19 * MIB + 5 };
        struct process owner = owner_with_late_streams();
        struct host from = host_make(), to = host_make();
        int n_fds_owner = n_fds(&owner);
        struct message e;

        ck_assert_int_eq(make(&owner, DEVICE_SHARE_FD, HOST_BYTES, &e), 0);
        forget(&e);
        for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
                host_write(&from, i);
                memset(to.bytes, 0x11, HOST_BYTES);
                ck_assert_int_eq(copy_host(&owner, act_copy_from_host, &e, 777, &from, 4099, sizes[i]), 0);
                ck_assert_int_eq(copy_host(&owner, act_copy_to_host, &e, 777, &to, 12345, sizes[i]), 0);
                ck_assert_mem_eq(to.bytes + 12345, from.bytes + 4099, sizes[i]);
                ck_assert_uint_eq(to.bytes[12344], 0x11);
                ck_assert_uint_eq(to.bytes[12345 + sizes[i]], 0x11);
        }
        ck_assert_int_eq(copy_host(&owner, act_copy_to_host, &e, HOST_BYTES, &to, HOST_BYTES, 0), 0);
        ck_assert_int_eq(tell(&owner, act_has_no_context), 0);
        ck_assert_int_eq(destroy(&owner, &e), 0);         /* nothing is mapped any more */
        ck_assert_int_eq(n_fds(&owner), n_fds_owner + 1); /* the buffers */
        owner_end(&owner);
        host_drop(&from);
        host_drop(&to);
}

/* What a job sees, and what it wrote. */
TEST(a_job_sees_what_was_copied)
{
        struct process owner = owner_with_late_streams(), job = job_start(DEVICE_SHARE_FD, HOST_BYTES);
        struct host h = host_make();
        struct message e;

        ck_assert_int_eq(make(&owner, DEVICE_SHARE_FD, HOST_BYTES, &e), 0);
        ck_assert_int_eq(map(&job, 0, &e), 0);
        forget(&e);
        memset(h.bytes, 0x5c, HOST_BYTES);
        ck_assert_int_eq(copy_host(&owner, act_copy_from_host, &e, 0, &h, 0, HOST_BYTES), 0);
        ck_assert_uint_eq(sees_other(&job, 0, 0x5c, HOST_BYTES), 0);
        fill(&job, 0, 0x6d, HOST_BYTES);
        ck_assert_int_eq(copy_host(&owner, act_copy_to_host, &e, 0, &h, 0, HOST_BYTES), 0);
        for (uint64_t i = 0; i < HOST_BYTES; i++)
                if (h.bytes[i] != 0x6d)
                        ck_abort_msg("byte %lu is %u", (unsigned long)i, h.bytes[i]);
        job_end(&job);
        ck_assert_int_eq(destroy(&owner, &e), 0);
        owner_end(&owner);
        host_drop(&h);
}

/* The daemon must not end when the file of a client has no page there. */
TEST(what_the_file_lacks_is_an_error)
{
        struct process owner = owner_start();
        struct host h = host_make();
        struct message e;
        struct stat st;

        ck_assert_int_eq(make(&owner, DEVICE_SHARE_FD, HOST_BYTES, &e), 0);
        forget(&e);
        memset(h.bytes, 0x5c, HOST_BYTES);
        ck_assert_int_eq(copy_host(&owner, act_copy_from_host, &e, 0, &h, 0, HOST_BYTES), 0);
        ck_assert_int_eq(ftruncate(h.fd, 0), 0);
        ck_assert_int_eq(ftruncate(h.fd, (off_t)HOST_BYTES), 0); /* one hole */
        ck_assert_int_eq(copy_host(&owner, act_copy_from_host, &e, 0, &h, 0, HOST_BYTES), 0);
        ck_assert_uint_eq(owner_sees_other(&owner, &e, 0), 0);
        ck_assert_int_eq(fstat(h.fd, &st), 0);
        ck_assert_int_eq(st.st_blocks, 0);       /* and it stays one */
        for (int end = 13; end >= 9; end -= 4) { /* in either half of a buffer */
                ck_assert_int_eq(ftruncate(h.fd, (off_t)end * (off_t)MIB), 0);
                ck_assert_int_eq(copy_host(&owner, act_copy_from_host, &e, 0, &h, 0, HOST_BYTES), -EIO);
                ck_assert_int_eq(copy_host(&owner, act_copy_to_host, &e, 0, &h, 0, HOST_BYTES), -EIO);
        }
        ck_assert_int_eq(ftruncate(h.fd, (off_t)HOST_BYTES), 0);
        ck_assert_int_eq(copy_host(&owner, act_copy_to_host, &e, 0, &h, 0, HOST_BYTES), 0);
        ck_assert_int_eq(destroy(&owner, &e), 0);
        owner_end(&owner);
        host_drop(&h);
}

TEST(impossible_copies_are_refused)
{
        struct process owner = owner_start();
        struct host h = host_make();
        struct message e, ipc;

        ck_assert_int_eq(make(&owner, DEVICE_SHARE_FD, 4 * MIB, &e), 0);
        ck_assert_int_eq(make(&owner, DEVICE_SHARE_CUDA_IPC, 4 * MIB, &ipc), 0);
        forget(&e);
        forget(&ipc);
        for (int i = 0; i < 2; i++) {
                int (*act)(struct message * m) = i ? act_copy_to_host : act_copy_from_host;

                ck_assert_int_eq(copy_host(&owner, act, &ipc, 0, &h, 0, MIB), -ENOTSUP);
                ck_assert_int_eq(copy_host(&owner, act, &e, 4 * MIB, &h, 0, 1), -EINVAL);
                ck_assert_int_eq(copy_host(&owner, act, &e, UINT64_MAX, &h, 0, 2), -EINVAL);
                ck_assert_int_eq(copy_host(&owner, act, &e, 0, &h, HOST_BYTES - 1, 2), -EINVAL);
                ck_assert_int_eq(copy_host(&owner, act, &e, 0, &h, UINT64_MAX, 2), -EINVAL);
                ck_assert_int_eq(copy_host(&owner, act, &e, 0, &h, 0, UINT64_MAX), -EINVAL);
        }
        ck_assert_int_eq(destroy(&owner, &e), 0);
        ck_assert_int_eq(destroy(&owner, &ipc), 0);
        owner_end(&owner);
        host_drop(&h);
}

/* The copy that first finds the device lost, also in its middle, and all that is called afterwards. */
TEST(a_lost_device_copies_nothing)
{
        static const char *const faults[] = {
                "FAKE_CUDA_FAULT=cuMemcpyDtoHAsync:2+:214",
                "FAKE_CUDA_FAULT=cuStreamSynchronize:4+:214" /* three fills before */,
                "FAKE_CUDA_FAULT=cuMemHostRegister:1+:214"
        };

        for (size_t i = 0; i < sizeof(faults) / sizeof(faults[0]); i++) {
                struct process owner = process_start();
                struct host h = host_make();
                struct message e, more;

                set(&owner, faults[i]);
                ck_assert_int_eq(open_device(&owner, "cuda:0"), 0);
                ck_assert_int_eq(make(&owner, DEVICE_SHARE_FD, HOST_BYTES, &e), 0);
                forget(&e);
                ck_assert_int_eq(copy_host(&owner, act_copy_to_host, &e, 0, &h, 0, HOST_BYTES), -ENODEV);
                ck_assert_int_eq(make(&owner, DEVICE_SHARE_FD, 4 * MIB, &more), -ENODEV);
                ck_assert_int_eq(copy_host(&owner, act_copy_from_host, &e, 0, &h, 0, MIB), -ENODEV);
                ck_assert_int_eq(destroy(&owner, &e), -ENODEV);
                owner_end(&owner);
                host_drop(&h);
                owner = process_start(); /* the memory of the process that ended is free now */
                ck_assert_uint_eq(n_free(&owner), 64 * MIB);
                ck_assert_int_eq(process_end(&owner), 0);
        }
}

/* ---- registered memory ------------------------------------------------------ */

#define PINNED_BYTES (16 * MIB) /* two pieces, where it goes through the buffers */
#define PART_BYTES   (4 * MIB)
#define PARTS        (PINNED_BYTES / PART_BYTES)

/* In a process of its own; the line of what is wrong, or 0. */
#define NEEDS(condition)                                                                                     \
        do {                                                                                                 \
                if (!(condition))                                                                            \
                        return __LINE__;                                                                     \
        } while (0)

struct pinned_case {
        struct device *gpu, *host;
        struct device_extent memory, copies[2];
        struct device_pins pins;
};

static int pinned_open(struct pinned_case *c)
{
        char sentence[256];

        *c = (struct pinned_case){ .gpu = NULL };
        NEEDS(device_cuda_new("cuda:0", &c->gpu, sentence, sizeof(sentence)) == 0);
        NEEDS(device_host_new(&c->host) == 0);
        NEEDS(device_make(c->gpu, DEVICE_SHARE_FD, PINNED_BYTES, &c->memory) == 0);
        for (int i = 0; i < 2; i++)
                NEEDS(device_make(c->host, DEVICE_SHARE_FD, PINNED_BYTES, &c->copies[i]) == 0);
        return 0;
}

static int pinned_copy(struct pinned_case *c, int i, uint64_t offset, uint64_t n_bytes, bool to_host)
{
        return device_copy(c->gpu,
                           &(struct device_copy){ .extent = &c->memory,
                                                  .offset = offset,
                                                  .host = &c->copies[i],
                                                  .host_offset = offset,
                                                  .n_bytes = n_bytes,
                                                  .to_host = to_host,
                                                  .pins = &c->pins },
                           1);
}

static uint64_t copies_mapped(void)
{
        FILE *f = fopen("/proc/self/maps", "re");
        char line[512];
        uint64_t n = 0;

        while (f && fgets(line, sizeof(line), f))
                n += !!strstr(line, "bfcd-extent");
        if (f)
                fclose(f);
        return n;
}

static int host_set(const struct device_extent *e, unsigned char value)
{
        unsigned char piece[4096];

        memset(piece, value, sizeof(piece));
        for (uint64_t at = 0; at < e->n_bytes; at += sizeof(piece))
                NEEDS(pwrite(e->fd, piece, sizeof(piece), (off_t)at) == (ssize_t)sizeof(piece));
        return 0;
}

static bool host_is(const struct device_extent *e, unsigned char value)
{
        unsigned char piece[4096];

        for (uint64_t at = 0; at < e->n_bytes; at += sizeof(piece)) {
                if (pread(e->fd, piece, sizeof(piece), (off_t)at) != (ssize_t)sizeof(piece))
                        return false;
                for (size_t i = 0; i < sizeof(piece); i++)
                        if (piece[i] != value)
                                return false;
        }
        return true;
}

static int pinned_close(struct pinned_case *c)
{
        for (int i = 0; i < 2; i++)
                NEEDS(device_destroy(c->host, &c->copies[i]) == 0);
        NEEDS(atomic_load(&c->pins.n_bytes) == 0 && copies_mapped() == 0);
        NEEDS(device_destroy(c->gpu, &c->memory) == 0);
        device_free(c->gpu);
        device_free(c->host);
        return 0;
}

/* A second call of a copy in one direction would fail, and so would the registration of one extent more. */
static int act_copy_pinned(struct message *m)
{
        struct pinned_case c;

        (void)m;
        setenv("FAKE_CUDA_FAULT", "cuMemcpyHtoDAsync:2+,cuMemcpyDtoHAsync:2+,cuMemHostRegister:4+", 1);
        NEEDS(pinned_open(&c) == 0);
        NEEDS(!device_is_pinned(&c.copies[0]));
        NEEDS(host_set(&c.copies[0], 0x5c) == 0);
        NEEDS(pinned_copy(&c, 0, 0, PINNED_BYTES, false) == 0);
        NEEDS(atomic_load(&c.pins.n_bytes) == PINNED_BYTES && copies_mapped() == 1);
        NEEDS(pinned_copy(&c, 1, 0, PINNED_BYTES, true) == 0);
        NEEDS(host_is(&c.copies[1], 0x5c));
        NEEDS(atomic_load(&c.pins.n_bytes) == 2 * PINNED_BYTES && atomic_load(&c.pins.error) == 0);
        NEEDS(pinned_copy(&c, 0, 0, PINNED_BYTES, false) ==
              -ENOMEM); /* the fault, and no second registration */
        NEEDS(device_is_pinned(&c.copies[0]) && device_is_pinned(&c.copies[1]));
        NEEDS(device_unpin(&c.copies[0]) == 0 && device_unpin(&c.copies[0]) == 0);
        NEEDS(!device_is_pinned(&c.copies[0]) && copies_mapped() == 1);
        return pinned_close(&c);
}

TEST(registered_memory_is_copied_directly)
{
        struct process p = process_start();

        ck_assert_int_eq(tell(&p, act_copy_pinned), 0);
        ck_assert_int_eq(process_end(&p), 0);
}

/* ---- several parts ------------------------------------------------------------ */

static uint64_t n_calls(const char *function)
{
        FILE *f = fopen(getenv("FAKE_CUDA_COUNTS"), "re");
        unsigned long long n = 0;
        char name[64];

        while (f && fscanf(f, "%63s %llu", name, &n) == 2)
                if (strcmp(name, function) == 0)
                        break;
        if (f)
                fclose(f);
        return n;
}

/* Each part has bytes of its own. */
static int host_write_parts(const struct device_extent *e, unsigned char first)
{
        static unsigned char part[PART_BYTES];

        for (uint64_t i = 0; i < PARTS; i++) {
                memset(part, first + (int)i, sizeof(part));
                NEEDS(pwrite(e->fd, part, sizeof(part), (off_t)(i * sizeof(part))) == (ssize_t)sizeof(part));
        }
        return 0;
}

static int host_has_parts(const struct device_extent *e, unsigned char first)
{
        unsigned char bytes[2];

        for (uint64_t i = 0; i < PARTS; i++) {
                NEEDS(pread(e->fd, bytes, 1, (off_t)(i * PART_BYTES)) == 1);
                NEEDS(pread(e->fd, bytes + 1, 1, (off_t)((i + 1) * PART_BYTES - 1)) == 1);
                NEEDS(bytes[0] == first + i && bytes[1] == first + i);
        }
        return 0;
}

/* Of two extents to one: the parts of the first, then those of the second, in a list of both. */
static int copy_parts(struct pinned_case *c, const struct device_extent *more, size_t n, bool to_host)
{
        struct device_copy copies[DEVICE_COPIES + 1];

        for (size_t i = 0; i < n; i++)
                copies[i] = (struct device_copy){ .extent = i < PARTS ? &c->memory : more,
                                                  .offset = i % PARTS * PART_BYTES,
                                                  .host = &c->copies[i / PARTS % 2],
                                                  .host_offset = i % PARTS * PART_BYTES,
                                                  .n_bytes = PART_BYTES,
                                                  .to_host = to_host,
                                                  .pins = &c->pins };
        return device_copy(c->gpu, copies, n);
}

/* The device has work while parts are begun: buffers that are used too early have other bytes. m->a: directly. */
static int act_copy_parts(struct message *m)
{
        struct device_extent more;
        uint64_t n_maps, n_waits;
        struct pinned_case c;

        setenv("FAKE_CUDA_STREAM_DELAY_US", "20000", 1);
        if (!m->a)
                setenv("FAKE_CUDA_FAULT", "cuMemHostRegister:2+", 1);
        NEEDS(pinned_open(&c) == 0);
        NEEDS(device_make(c.gpu, DEVICE_SHARE_FD, PINNED_BYTES, &more) == 0);
        NEEDS(host_write_parts(&c.copies[0], 1) == 0 && host_write_parts(&c.copies[1], 101) == 0);
        NEEDS(copy_parts(&c, &more, 2 * PARTS, false) == 0);
        for (int i = 0; i < 2; i++)
                NEEDS(host_set(&c.copies[i], 0) == 0);
        n_maps = n_calls("cuMemMap");
        n_waits = n_calls("cuStreamSynchronize");
        NEEDS(copy_parts(&c, &more, 2 * PARTS, true) == 0);
        NEEDS(n_calls("cuMemMap") - n_maps == 2);
        NEEDS(n_calls("cuStreamSynchronize") - n_waits == (m->a ? 2u : 2 * PARTS + 2));
        NEEDS(host_has_parts(&c.copies[0], 1) == 0 && host_has_parts(&c.copies[1], 101) == 0);
        NEEDS(copy_parts(&c, &more, DEVICE_COPIES + 1, true) == -EINVAL);
        NEEDS(copy_parts(&c, &more, 0, true) == 0);
        NEEDS(n_calls("cuMemMap") == n_calls("cuMemUnmap"));
        NEEDS(device_destroy(c.gpu, &more) == 0);
        return pinned_close(&c);
}

LOOP_TEST(parts_are_copied_together, 2)
{
        struct message m = { .fd = -1, .a = (uint64_t)_i };
        char path[128], setting[160];
        struct process p;

        in_folder("counts", path);
        snprintf(setting, sizeof(setting), "FAKE_CUDA_COUNTS=%s", path);
        p = process_start();
        set(&p, setting);
        ck_assert_int_eq(process_call(&p, act_copy_parts, &m), 0);
        ck_assert_int_eq(process_end(&p), 0);
}

/* What the buffers still have does not go to the file that is not to be written to any more. */
static int act_fail_in_parts(struct message *m)
{
        struct device_extent more;
        struct pinned_case c;

        (void)m;
        setenv("FAKE_CUDA_FAULT", "cuMemHostRegister:2+,cuMemcpyDtoHAsync:3", 1);
        NEEDS(pinned_open(&c) == 0);
        NEEDS(device_make(c.gpu, DEVICE_SHARE_FD, PINNED_BYTES, &more) == 0);
        NEEDS(host_write_parts(&c.copies[0], 1) == 0);
        NEEDS(copy_parts(&c, &more, PARTS, false) == 0);
        NEEDS(host_set(&c.copies[0], 0x77) == 0);
        NEEDS(copy_parts(&c, &more, 2 * PARTS, true) == -ENOMEM);
        NEEDS(host_set(&c.copies[0], 0x77) == 0);
        NEEDS(copy_parts(&c, &more, 0, true) == 0);
        NEEDS(host_is(&c.copies[0], 0x77));
        NEEDS(copy_parts(&c, &more, PARTS, true) == 0);
        NEEDS(host_has_parts(&c.copies[0], 1) == 0);
        NEEDS(device_destroy(c.gpu, &more) == 0);
        return pinned_close(&c);
}

TEST(a_failed_part_leaves_nothing_behind)
{
        struct process p = process_start();

        ck_assert_int_eq(tell(&p, act_fail_in_parts), 0);
        ck_assert_int_eq(process_end(&p), 0);
}

/* Small pieces, and an extent that the driver refuses: through the buffers, which are the first registration. */
static int act_copy_unpinned(struct message *m)
{
        struct pinned_case c;

        (void)m;
        setenv("FAKE_CUDA_FAULT", "cuMemHostRegister:2+", 1);
        NEEDS(pinned_open(&c) == 0);
        NEEDS(host_set(&c.copies[0], 0x6d) == 0);
        NEEDS(pinned_copy(&c, 0, 0, 4096, false) == 0);
        NEEDS(atomic_load(&c.pins.error) == 0);
        for (int i = 0; i < 2; i++)
                NEEDS(pinned_copy(&c, 0, 0, PINNED_BYTES, false) == 0);
        NEEDS(atomic_load(&c.pins.error) == -ENOMEM && atomic_load(&c.pins.n_bytes) == 0 &&
              copies_mapped() == 0);
        NEEDS(pinned_copy(&c, 1, 0, PINNED_BYTES, true) == 0);
        NEEDS(host_is(&c.copies[1], 0x6d));
        return pinned_close(&c);
}

TEST(what_cannot_be_registered_is_copied_through_buffers)
{
        struct process p = process_start();

        ck_assert_int_eq(tell(&p, act_copy_unpinned), 0);
        ck_assert_int_eq(process_end(&p), 0);
}

/* The pages stay the device's, so the memory does not count as returned. */
static int act_keep_pinned(struct message *m)
{
        struct pinned_case c;

        (void)m;
        setenv("FAKE_CUDA_FAULT", "cuMemHostUnregister:1:999", 1);
        NEEDS(pinned_open(&c) == 0);
        NEEDS(pinned_copy(&c, 0, 0, PINNED_BYTES, false) == 0);
        NEEDS(pinned_copy(&c, 1, 0, PINNED_BYTES, false) == 0);
        NEEDS(device_destroy(c.host, &c.copies[0]) == -EBUSY);
        NEEDS(copies_mapped() == 2 && atomic_load(&c.pins.n_bytes) == PINNED_BYTES);
        NEEDS(device_destroy(c.host, &c.copies[1]) == 0);
        NEEDS(device_destroy(c.gpu, &c.memory) == 0);
        device_free(c.gpu);
        device_free(c.host);
        return 0;
}

TEST(what_cannot_be_unregistered_is_not_returned)
{
        struct process p = process_start();

        ck_assert_int_eq(tell(&p, act_keep_pinned), 0);
        ck_assert_int_eq(process_end(&p), 0);
}
