/* The fake device; see fake_device.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/fake_device.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static pthread_mutex_t one_call = PTHREAD_MUTEX_INITIALIZER;

static int fake_fail(struct fake_device *f, int error)
{
        f->is_lost = f->is_lost || (f->stays_lost && error == -ENODEV);
        return error;
}

/* It is embedded in its test, so there is nothing to free. */
static struct device *fake_free(struct device *d)
{
        (void)d;
        return NULL;
}

static uint64_t fake_granularity(const struct device *d)
{
        return ((const struct fake_device *)d)->granularity;
}

static int fake_make_locked(struct fake_device *f, const struct device_supply *supply,
                            enum device_share share, uint64_t n_bytes, struct device_extent *ret)
{
        int fd;

        f->supply = *supply;
        if (++f->n_makes == f->fail_make)
                return fake_fail(f, f->make_error);
        if (f->is_lost || f->is_closed)
                return -ENODEV;
        if (n_bytes == 0 || n_bytes % f->granularity != 0)
                return -EINVAL;
        fd = memfd_create("fake", MFD_CLOEXEC);
        if (fd < 0)
                return -errno;
        f->n_live++;
        f->live_bytes += n_bytes;
        *ret = (struct device_extent){ .fd = fd,
                                       .share = share,
                                       .n_bytes = n_bytes,
                                       .native = (uint64_t)fd,
                                       .huge_bytes = f->is_huge ? n_bytes : 0 };
        if (share == DEVICE_SHARE_CUDA_IPC) {
                ret->fd = -1;
                memcpy(ret->handle, "fake", 4);
                memcpy(ret->handle + 4, &f->n_makes, sizeof(f->n_makes));
                if (pwrite(fd, ret->handle, sizeof(ret->handle), 0) < 0 || ftruncate(fd, (off_t)n_bytes) < 0)
                        abort();
        }
        return 0;
}

static int fake_make(struct device *d, const struct device_supply *supply, enum device_share share,
                     struct device_extent *extents, size_t n)
{
        struct fake_device *f = (struct fake_device *)d;
        struct device_extent made[DEVICE_MAKES];
        size_t n_made = 0;
        int r = 0;

        if (f->on_make)
                f->on_make();
        pthread_mutex_lock(&one_call);
        while (r == 0 && n_made < n) {
                r = fake_make_locked(f, supply, share, extents[n_made].n_bytes, &made[n_made]);
                n_made += r == 0;
        }
        while (r < 0 && n_made > 0) {
                close((int)made[--n_made].native);
                f->n_live--;
                f->live_bytes -= made[n_made].n_bytes;
        }
        memcpy(extents, made, n_made * sizeof(made[0]));
        pthread_mutex_unlock(&one_call);
        return r;
}

/* Like a real one it empties *e and closes, also when it fails. */
static int fake_destroy_locked(struct fake_device *f, struct device_extent *e)
{
        if (f->is_open_elsewhere && e->was_lent) {
                f->n_looks++;
                return -EBUSY;
        }
        close((int)e->native);
        f->n_live--;
        f->live_bytes -= e->n_bytes;
        *e = DEVICE_EXTENT_EMPTY;
        if (++f->n_destroys == f->fail_destroy)
                return fake_fail(f, f->destroy_error);
        return f->is_lost ? -ENODEV : 0;
}

static int fake_destroy(struct device *d, struct device_extent *e)
{
        struct fake_device *f = (struct fake_device *)d;
        int r;

        if (f->on_destroy)
                f->on_destroy();
        pthread_mutex_lock(&one_call);
        r = fake_destroy_locked(f, e);
        pthread_mutex_unlock(&one_call);
        return r;
}

static int fake_adopt(struct device *d, int fd, uint64_t n_bytes, struct device_extent *ret)
{
        struct fake_device *f = (struct fake_device *)d;

        if (n_bytes % f->granularity != 0 || fcntl(fd, F_GET_SEALS) < 0)
                return -EPROTO;
        f->n_live++;
        f->live_bytes += n_bytes;
        *ret = (struct device_extent){ .fd = fd, .n_bytes = n_bytes, .native = (uint64_t)fd };
        return 0;
}

/* What was shared by a handle, and not destroyed. */
static int fake_take(struct device *d, uint64_t native, uint64_t n_bytes, struct device_extent *ret)
{
        struct fake_device *f = (struct fake_device *)d;
        struct device_extent e = {
                .fd = -1, .share = DEVICE_SHARE_CUDA_IPC, .n_bytes = n_bytes, .native = native
        };
        struct stat st;

        if (fstat((int)native, &st) < 0 || fcntl((int)native, F_GET_SEALS) < 0)
                return -ENOENT;
        if ((uint64_t)st.st_size != n_bytes ||
            pread((int)native, e.handle, sizeof(e.handle), 0) != (ssize_t)sizeof(e.handle))
                return -EPROTO;
        f->n_live++;
        f->live_bytes += n_bytes;
        *ret = e;
        return 0;
}

static int fake_facts(struct device *d, struct device_facts *ret)
{
        const struct fake_device *f = (const struct fake_device *)d;

        if (f->is_lost || f->is_closed)
                return -ENODEV;
        *ret = f->facts;
        return 0;
}

static int fake_others(struct device *d, uint64_t *ret_bytes)
{
        const struct fake_device *f = (const struct fake_device *)d;

        if (f->is_lost || f->is_closed)
                return -ENODEV;
        *ret_bytes = f->foreign_bytes;
        return 0;
}

static int fake_uses(struct device *d, uint64_t pid, struct device_use ret[static DEVICE_USES], size_t *ret_n)
{
        const struct fake_device *f = (const struct fake_device *)d;

        if (f->uses_error || !f->uses)
                return f->uses_error ? f->uses_error : -ENOENT;
        *ret_n = 0;
        for (size_t i = 0; i < f->n_uses && *ret_n < DEVICE_USES; i++)
                if (f->uses[i].pid > pid)
                        ret[(*ret_n)++] = f->uses[i];
        return 0;
}

/* With an extent left it would be a mistake of the caller's. */
static void fake_close(struct device *d)
{
        struct fake_device *f = (struct fake_device *)d;

        if (f->n_live > 0)
                abort();
        f->n_closes++;
        f->is_closed = true;
}

static int fake_open(struct device *d, char *ret_sentence, size_t n_sentence)
{
        struct fake_device *f = (struct fake_device *)d;

        f->n_opens++;
        if (f->open_error < 0) {
                snprintf(ret_sentence, n_sentence, "fake: it is told to fail");
                return f->open_error;
        }
        f->is_closed = f->is_lost = false;
        return 0;
}

static bool fake_has_ended(struct device *d)
{
        struct fake_device *f = (struct fake_device *)d;
        bool has_ended = f->has_ended;

        f->has_ended = false;
        return has_ended;
}

static const struct device_ops fake_ops = {
        .name = "fake",
        .free = fake_free,
        .granularity = fake_granularity,
        .make = fake_make,
        .destroy = fake_destroy,
        .adopt = fake_adopt,
        .facts = fake_facts,
        .others = fake_others,
        .uses = fake_uses,
        .close = fake_close,
        .open = fake_open,
        .has_ended = fake_has_ended,
};

static struct device_ops keeper_ops;

void fake_device_keep(struct fake_device *f)
{
        keeper_ops = fake_ops;
        keeper_ops.take = fake_take;
        f->device.ops = &keeper_ops;
}

void fake_device_init(struct fake_device *f, uint64_t granularity)
{
        *f = (struct fake_device){ .device = { .ops = &fake_ops },
                                   .granularity = granularity,
                                   .facts = { .name = "fake", .shares = { true, true } } };
}

void fake_device_fail_make(struct fake_device *f, unsigned nth, int error)
{
        f->fail_make = f->n_makes + nth;
        f->make_error = error;
}

void fake_device_fail_destroy(struct fake_device *f, unsigned nth, int error)
{
        f->fail_destroy = f->n_destroys + nth;
        f->destroy_error = error;
}
