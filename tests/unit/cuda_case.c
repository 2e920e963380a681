/* See cuda_case.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/cuda_case.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "tests/suite.h"
#include "tests/unit/cuda_acts.h"

static char folder[64];
static int n_fds_before;

/* The fake's UUIDs. */
const uint8_t uuid_0[16] = { 0xfa, 0x4e, 0xc0, 0xda, 0, 0, 0x40, 0, 0x80, 0, 0, 0, 0, 0, 0, 1 };
const uint8_t uuid_1[16] = { 0xfa, 0x4e, 0xc0, 0xda, 0, 0, 0x40, 0, 0x80, 0, 0, 0, 0, 0, 0, 2 };

void case_setup(void)
{
        snprintf(folder, sizeof(folder), "/dev/shm/fake-cuda-unit-XXXXXX");
        ck_assert_ptr_nonnull(mkdtemp(folder));
        setenv("FAKE_CUDA_STATE", folder, 1);
        setenv("FAKE_CUDA_DEVICES", "64MiB,32MiB", 1);
        n_fds_before = suite_count_fds();
}

void in_folder(const char *name, char ret[static 128])
{
        snprintf(ret, 128, "%s/%s", folder, name);
}

int count_objects(void)
{
        DIR *d = opendir(folder);
        struct dirent *e;
        int n = 0;

        ck_assert_ptr_nonnull(d);
        while ((e = readdir(d)))
                n += strncmp(e->d_name, "mem-", 4) == 0;
        closedir(d);
        return n;
}

void case_teardown(void)
{
        DIR *d = opendir(folder);
        struct dirent *e;

        ck_assert_int_eq(suite_count_fds(), n_fds_before + 1); /* d */
        ck_assert_int_eq(count_objects(), 0);
        while ((e = readdir(d)))
                if (e->d_name[0] != '.')
                        unlinkat(dirfd(d), e->d_name, 0);
        closedir(d);
        ck_assert_int_eq(rmdir(folder), 0);
}

/* ---- telling ------------------------------------------------------------- */

int tell(struct process *p, int (*run)(struct message *m))
{
        struct message m = { .fd = -1 };

        return process_call(p, run, &m);
}

void set(struct process *p, const char *setting)
{
        struct message m = { .fd = -1 };

        snprintf(m.text, sizeof(m.text), "%s", setting);
        ck_assert_int_eq(process_call(p, act_setenv, &m), 0);
}

int open_device(struct process *p, const char *id)
{
        struct message m = { .fd = -1 };
        int r;

        snprintf(m.text, sizeof(m.text), "%s", id);
        r = process_call(p, act_open, &m);
        ck_assert_msg(r == 0 || (strncmp(m.text, id, strlen(id)) == 0 && !strchr(m.text, '\n')), "\"%s\"",
                      m.text);
        return r;
}

struct process owner_start(void)
{
        struct process p = process_start();

        ck_assert_int_eq(open_device(&p, "cuda:0"), 0);
        return p;
}

void owner_end(struct process *p)
{
        ck_assert_int_eq(tell(p, act_close), 0);
        ck_assert_int_eq(tell(p, act_has_no_context), 0);
        ck_assert_int_eq(process_end(p), 0);
}

int make(struct process *p, enum device_share share, uint64_t n_bytes, struct message *ret)
{
        *ret = (struct message){ .fd = -1, .extent = { .share = share, .n_bytes = n_bytes } };
        return process_call(p, act_make, ret);
}

int destroy(struct process *p, const struct message *made)
{
        struct message m = { .fd = -1, .a = made->a };

        return process_call(p, act_destroy, &m);
}

uint64_t owner_sees_other(struct process *p, const struct message *made, unsigned char value)
{
        struct message m = { .fd = -1, .a = made->a, .b = value };

        ck_assert_int_eq(process_call(p, act_look, &m), 0);
        return m.c;
}

int range(struct process *p, const uint8_t uuid[16], enum device_share share, uint64_t n_bytes)
{
        struct message m = { .fd = -1, .view = { .is_cuda = true, .share = share }, .a = n_bytes };

        memcpy(m.view.uuid, uuid, 16);
        return process_call(p, act_range, &m);
}

struct process job_start(enum device_share share, uint64_t n_bytes)
{
        struct process p = process_start();

        ck_assert_int_eq(range(&p, uuid_0, share, n_bytes), 0);
        return p;
}

void job_end(struct process *p)
{
        ck_assert_int_eq(tell(p, act_free), 0);
        ck_assert_int_eq(tell(p, act_has_no_context), 0);
        ck_assert_int_eq(process_end(p), 0);
}

int map(struct process *p, uint64_t offset, const struct message *made)
{
        struct message m = { .fd = made->fd, .a = offset, .extent = made->extent };

        return process_call(p, act_map, &m);
}

int unmap(struct process *p, uint64_t offset, uint64_t n_bytes)
{
        struct message m = { .fd = -1, .a = offset, .b = n_bytes };

        return process_call(p, act_unmap, &m);
}

void fill(struct process *p, uint64_t offset, unsigned char value, uint64_t n_bytes)
{
        struct message m = { .fd = -1, .a = offset, .b = value, .c = n_bytes };

        ck_assert_int_eq(process_call(p, act_fill, &m), 0);
}

uint64_t sees_other(struct process *p, uint64_t offset, unsigned char value, uint64_t n_bytes)
{
        struct message m = { .fd = -1, .a = offset, .b = value, .c = n_bytes };

        ck_assert_int_eq(process_call(p, act_count_other, &m), 0);
        return m.c;
}

int copy_in(struct process *p, uint64_t offset, unsigned char value, uint64_t n_bytes)
{
        struct message m = { .fd = -1, .a = offset, .b = value, .c = n_bytes };

        return process_call(p, act_write, &m);
}

int copy_out_other(struct process *p, uint64_t offset, unsigned char value, uint64_t n_bytes,
                   uint64_t *ret_n_other)
{
        struct message m = { .fd = -1, .a = offset, .b = value, .c = n_bytes };
        int r = process_call(p, act_read, &m);

        if (r == 0)
                *ret_n_other = m.c;
        return r;
}

uint64_t n_free(struct process *p)
{
        struct message m = { .fd = -1 };

        ck_assert_int_eq(process_call(p, act_n_free, &m), 0);
        return m.b;
}

int n_fds(struct process *p)
{
        struct message m = { .fd = -1 };

        ck_assert_int_eq(process_call(p, act_count_fds, &m), 0);
        return (int)m.a;
}

void forget(struct message *made)
{
        if (made->fd >= 0)
                close(made->fd);
        made->fd = -1;
}
