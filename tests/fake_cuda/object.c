/* Physical memory: files in the state folder.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * How much of a device is taken must be right whatever becomes of the
 * processes: killed, or gone while an fd of theirs waits in somebody's socket.
 * So nobody keeps a count. An object is a file whose name says its device and
 * size, and whoever uses it holds a shared flock() on it. The lock belongs to
 * the open file, and that lives as long as an fd of it, in whatever process or
 * message, or a mapping. An object whose file can be locked exclusively is used
 * by nobody: it is unlinked and counts no longer.
 *
 * The last page of a file, behind the memory, says again what it is: for those
 * who have only an fd. Invariant: whoever looks for locks, or takes the first
 * one on a file, holds the folder's lock. */
#include "tests/fake_cuda/fake.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#define LABEL_MAGIC UINT64_C(0x616475436b6166ff)

struct label {
        uint64_t magic;
        struct fake_object object;
};

static void object_path(const struct fake_object *o, char ret[static 400])
{
        snprintf(ret, 400, "%s/mem-%u-%c-%llu-%016llx", fake_folder, o->device, o->kind,
                 (unsigned long long)o->n_bytes, (unsigned long long)o->id);
}

/* Retried: a signal must not let two processes in. */
static int lock_fd(int fd, int how)
{
        int r;

        do {
                r = flock(fd, how);
        } while (r < 0 && errno == EINTR);
        return r;
}

/* A real driver's books need no fds of the process: where a process may have few,
 * some are kept for the time when it has none left. */
static int spares[3] = { -1, -1, -1 };

static void fill_spares(void)
{
        struct rlimit limit;

        if (getrlimit(RLIMIT_NOFILE, &limit) < 0 || limit.rlim_cur > 128)
                return;
        for (size_t i = 0; i < sizeof(spares) / sizeof(spares[0]); i++)
                if (__atomic_load_n(&spares[i], __ATOMIC_RELAXED) < 0) {
                        int fd = open("/dev/null", O_RDONLY | O_CLOEXEC), none = -1;

                        if (fd >= 0 && !__atomic_compare_exchange_n(&spares[i], &none, fd, false,
                                                                    __ATOMIC_RELAXED, __ATOMIC_RELAXED))
                                close(fd);
                }
}

static int open_anyway(const char *path, int flags)
{
        int fd = open(path, flags, 0666);

        for (size_t i = 0; fd < 0 && errno == EMFILE && i < sizeof(spares) / sizeof(spares[0]); i++) {
                int spare = __atomic_exchange_n(&spares[i], -1, __ATOMIC_RELAXED);

                if (spare >= 0)
                        close(spare);
                fd = open(path, flags, 0666);
        }
        return fd;
}

static void folder_unlock(int lock)
{
        close(lock);
        fill_spares();
}

static int folder_lock(void)
{
        char path[320];
        int fd;

        fill_spares();
        snprintf(path, sizeof(path), "%s/lock", fake_folder);
        fd = open_anyway(path, O_RDWR | O_CREAT | O_CLOEXEC);
        if (fd < 0)
                fake_die("cannot open %s: %m", path);
        fchmod(fd, 0666);
        if (lock_fd(fd, LOCK_EX) < 0)
                fake_die("cannot lock %s: %m", path);
        return fd;
}

/* With the folder locked: unlinks an object that nobody uses. */
static bool object_reap(const char *path)
{
        int fd = open_anyway(path, O_RDONLY | O_CLOEXEC);
        bool is_dead;

        if (fd < 0)
                return errno == ENOENT;
        is_dead = lock_fd(fd, LOCK_EX | LOCK_NB) == 0;
        if (is_dead)
                unlink(path);
        close(fd);
        return is_dead;
}

static uint64_t in_use_locked(unsigned int device)
{
        int fd = open_anyway(fake_folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        DIR *dir = fd < 0 ? NULL : fdopendir(fd);
        uint64_t n_bytes = 0;
        struct dirent *e;

        if (!dir)
                fake_die("cannot read %s: %m", fake_folder);
        while ((e = readdir(dir))) {
                unsigned long long n, id;
                unsigned int index;
                char kind, path[600];

                if (sscanf(e->d_name, "mem-%u-%c-%llu-%llx", &index, &kind, &n, &id) != 4 || index != device)
                        continue;
                snprintf(path, sizeof(path), "%s/%s", fake_folder, e->d_name);
                if (!object_reap(path))
                        n_bytes += n;
        }
        closedir(dir);
        return n_bytes;
}

uint64_t fake_in_use(unsigned int device)
{
        int lock = folder_lock();
        uint64_t n = in_use_locked(device);

        folder_unlock(lock);
        return n;
}

static CUresult object_create_locked(const struct fake_object *o, uint64_t n_backed, int *ret_fd)
{
        struct label label = { .magic = LABEL_MAGIC, .object = *o };
        char path[400];
        int fd;

        object_path(o, path);
        fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (fd < 0)
                return CUDA_ERROR_OPERATING_SYSTEM;
        fchmod(fd, 0666); /* whatever the umask: who may open a handle is not for file modes to say */
        if (lock_fd(fd, LOCK_SH) < 0 || ftruncate(fd, (off_t)(n_backed + 4096)) < 0 ||
            pwrite(fd, &label, sizeof(label), (off_t)n_backed) != (ssize_t)sizeof(label)) {
                unlink(path);
                close(fd);
                return CUDA_ERROR_OUT_OF_MEMORY;
        }
        *ret_fd = fd;
        return CUDA_SUCCESS;
}

/* Fresh memory is whatever was there before; here that is never zero. */
static bool poison(int fd, uint64_t n_bytes)
{
        char bytes[1 << 14];

        memset(bytes, 0xab, sizeof(bytes));
        for (uint64_t at = 0; at < n_bytes;) {
                uint64_t n = n_bytes - at < sizeof(bytes) ? n_bytes - at : sizeof(bytes);
                ssize_t r = pwrite(fd, bytes, n, (off_t)at);

                if (r < 0 && errno != EINTR)
                        return false;
                if (r > 0)
                        at += (uint64_t)r;
        }
        return true;
}

CUresult fake_object_new(const struct fake_device *d, char kind, uint64_t n_bytes, struct fake_object *ret,
                         int *ret_fd)
{
        struct fake_object o = { .device = d->index, .kind = kind, .n_bytes = n_bytes };
        uint64_t n_backed = kind == 'c' ? 0 : n_bytes, in_use;
        CUresult r;
        int lock, fd;

        if (getrandom(&o.id, sizeof(o.id), 0) != (ssize_t)sizeof(o.id))
                return CUDA_ERROR_OPERATING_SYSTEM;
        lock = folder_lock();
        in_use = in_use_locked(d->index);
        if (in_use > d->n_bytes || n_bytes > d->n_bytes - in_use)
                r = CUDA_ERROR_OUT_OF_MEMORY;
        else
                r = object_create_locked(&o, n_backed, &fd);
        folder_unlock(lock);
        if (r != CUDA_SUCCESS)
                return r;
        if (!poison(fd, n_backed < fake.poison_n_bytes ? n_backed : fake.poison_n_bytes)) {
                close(fd); /* the machine's memory is full, so the device's is */
                fake_object_drop(&o);
                return CUDA_ERROR_OUT_OF_MEMORY;
        }
        *ret = o;
        *ret_fd = fd;
        return CUDA_SUCCESS;
}

CUresult fake_object_open(const struct fake_object *o, int *ret_fd)
{
        char path[400];
        int lock, fd, error;

        object_path(o, path);
        lock = folder_lock();
        fd = open(path, O_RDWR | O_CLOEXEC);
        error = errno;
        if (fd >= 0)
                lock_fd(fd, LOCK_SH);
        folder_unlock(lock);
        if (fd < 0)
                return error == ENOENT ? CUDA_ERROR_INVALID_CONTEXT : CUDA_ERROR_OPERATING_SYSTEM;
        *ret_fd = fd;
        return CUDA_SUCCESS;
}

CUresult fake_object_of_fd(int fd, struct fake_object *ret)
{
        struct label label;
        struct stat st;

        if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode) || st.st_size <= 4096)
                return CUDA_ERROR_INVALID_VALUE;
        if (pread(fd, &label, sizeof(label), st.st_size - 4096) != (ssize_t)sizeof(label))
                return CUDA_ERROR_INVALID_VALUE;
        if (label.magic != LABEL_MAGIC || label.object.n_bytes != (uint64_t)st.st_size - 4096)
                return CUDA_ERROR_INVALID_VALUE;
        *ret = label.object;
        return CUDA_SUCCESS;
}

/* Freed by the one that made it: no handle opens it any more, but its bytes are
 * taken for as long as somebody has it mapped. */
void fake_object_disown(struct fake_object *o)
{
        char from[400], to[400];
        int lock = folder_lock();

        object_path(o, from);
        o->kind = 'x';
        object_path(o, to);
        if (rename(from, to) < 0)
                fake_die("cannot rename %s: %m", from);
        folder_unlock(lock);
}

/* After a reference was given up: was it the last? */
void fake_object_drop(const struct fake_object *o)
{
        char path[400];
        int lock = folder_lock();

        object_path(o, path);
        object_reap(path);
        folder_unlock(lock);
}
