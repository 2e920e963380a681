/* The machine that the fake pretends: its devices, and the memory in them.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Physical memory is files in a folder that all processes of one "machine"
 * share (FAKE_CUDA_STATE). How much of a device is taken must be right whatever
 * becomes of the processes: killed, or gone while an fd of theirs waits in
 * somebody's socket. So nobody keeps a count. An object is a file whose name
 * says its device and size, and whoever uses it holds a shared flock() on it.
 * The lock belongs to the open file, and that lives as long as an fd of it, in
 * whatever process or message, or a mapping. An object whose file can be locked
 * exclusively is used by nobody: it is unlinked and counts no longer.
 *
 * The last page of a file, behind the memory, says again what it is: for those
 * who have only an fd. Invariant: whoever looks for locks, or takes the first
 * one on a file, holds the folder's lock. */
#include "tests/fake_cuda/fake.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#define LABEL_MAGIC UINT64_C(0x616475436b6166ff)

struct label {
        uint64_t magic;
        struct fake_object object;
};

struct fake_settings fake;
static char folder[256];

void fake_die(const char *format, ...)
{
        va_list ap;

        va_start(ap, format);
        fputs("fake libcuda: ", stderr);
        vfprintf(stderr, format, ap);
        fputc('\n', stderr);
        va_end(ap);
        abort();
}

/* ---- the environment ----------------------------------------------------- */

/* "5", "2GiB", "512MiB", "64KiB". A mistake must not pass for a setting. */
uint64_t fake_parse_number(const char *text, const char *what)
{
        char *end;
        uint64_t n;

        errno = 0;
        n = strtoull(text, &end, 0);
        if (end == text || errno != 0)
                fake_die("%s: \"%s\" is no number", what, text);
        if (strncmp(end, "KiB", 3) == 0)
                return n << 10;
        if (strncmp(end, "MiB", 3) == 0)
                return n << 20;
        if (strncmp(end, "GiB", 3) == 0)
                return n << 30;
        if (*end != '\0' && !strchr(",:!/=", *end))
                fake_die("%s: \"%s\" is no number", what, text);
        return n;
}

static uint64_t setting(const char *name, uint64_t otherwise)
{
        const char *text = getenv(name);

        return text && *text ? fake_parse_number(text, name) : otherwise;
}

static void add_device(const char *text)
{
        struct fake_device *d = &fake.devices[fake.n_devices];

        if (fake.n_devices == FAKE_MAX_DEVICES)
                fake_die("FAKE_CUDA_DEVICES: more than %d", FAKE_MAX_DEVICES);
        d->index = fake.n_devices++;
        d->n_bytes = fake_parse_number(text, "FAKE_CUDA_DEVICES");
        d->is_mig = strstr(text, ":mig") != NULL;
        memcpy(d->uuid.bytes, "\xfa\x4e\xc0\xda\x00\x00\x40\x00\x80\x00\x00\x00\x00\x00\x00", 15);
        d->uuid.bytes[15] = (char)(d->index + 1);
}

static void setup_devices(void)
{
        const char *text = getenv("FAKE_CUDA_DEVICES");
        char *copy = strdup(text ? text : "1GiB"), *rest = copy, *one;

        if (!copy)
                fake_die("out of memory");
        while ((one = strsep(&rest, ",")))
                if (*one)
                        add_device(one);
        free(copy);
}

/* As the driver reads it: an ordinal or the beginning of "GPU-…", "MIG-…"; what
 * it does not know ends the list. */
static struct fake_device *visible_by_name(const char *name)
{
        char *end;
        unsigned long n;

        if (strncmp(name, "GPU-", 4) == 0 || strncmp(name, "MIG-", 4) == 0) {
                for (unsigned int i = 0; i < fake.n_devices; i++) {
                        char text[64];

                        snprintf(text, sizeof(text), "%s-fa4ec0da-0000-4000-8000-%012x",
                                 fake.devices[i].is_mig ? "MIG" : "GPU", i + 1);
                        if (strncmp(text, name, strlen(name)) == 0)
                                return &fake.devices[i];
                }
                return NULL;
        }
        n = strtoul(name, &end, 10);
        return end != name && *end == '\0' && n < fake.n_devices ? &fake.devices[n] : NULL;
}

static void setup_visible(void)
{
        const char *text = getenv("CUDA_VISIBLE_DEVICES");
        char *copy, *rest, *one;

        for (unsigned int i = 0; !text && i < fake.n_devices; i++)
                fake.visible[fake.n_visible++] = &fake.devices[i];
        if (!text)
                return;
        copy = rest = strdup(text);
        if (!copy)
                fake_die("out of memory");
        while ((one = strsep(&rest, ",")) && fake.n_visible < FAKE_MAX_DEVICES) {
                struct fake_device *d = visible_by_name(one);

                if (!d)
                        break;
                fake.visible[fake.n_visible++] = d;
        }
        free(copy);
}

static void setup_folder(void)
{
        const char *text = getenv("FAKE_CUDA_STATE");

        if (text && *text)
                snprintf(folder, sizeof(folder), "%s", text);
        else
                snprintf(folder, sizeof(folder), "/dev/shm/fake-cuda-%u", (unsigned int)geteuid());
        if (mkdir(folder, 0777) == 0)
                chmod(folder, 01777); /* tests with several uids share it */
        else if (errno != EEXIST)
                fake_die("cannot make %s: %m", folder);
}

static void setup(void)
{
        setup_devices();
        setup_visible();
        setup_folder();
        fake.context_n_bytes = setting("FAKE_CUDA_CONTEXT_BYTES", 0);
        fake.poison_n_bytes = setting("FAKE_CUDA_POISON_BYTES", UINT64_MAX);
        fake.stream_delay_us = (unsigned int)setting("FAKE_CUDA_STREAM_DELAY_US", 0);
        fake.version = (int)setting("FAKE_CUDA_VERSION", 12040);
        fake.ipc_same_uid = setting("FAKE_CUDA_IPC_SAME_UID", 0) != 0;
        fake.peer_access = setting("FAKE_CUDA_PEER_ACCESS", 1) != 0;
        fake.attributes = getenv("FAKE_CUDA_ATTRIBUTES");
        fake.missing = getenv("FAKE_CUDA_MISSING");
        fault_setup();
}

void fake_setup(void)
{
        static pthread_once_t once = PTHREAD_ONCE_INIT;

        pthread_once(&once, setup);
}

/* ---- devices ------------------------------------------------------------- */

struct fake_device *fake_device_get(CUdevice ordinal)
{
        return ordinal >= 0 && (unsigned int)ordinal < fake.n_visible ? fake.visible[ordinal] : NULL;
}

CUdevice fake_device_ordinal(const struct fake_device *d)
{
        for (unsigned int i = 0; i < fake.n_visible; i++)
                if (fake.visible[i] == d)
                        return (CUdevice)i;
        return -1;
}

/* NULL: this process may not see it. */
struct fake_device *fake_device_by_index(unsigned int index)
{
        for (unsigned int i = 0; i < fake.n_visible; i++)
                if (fake.visible[i]->index == index)
                        return fake.visible[i];
        return NULL;
}

/* An uncorrectable error takes the device from all processes at once: a file
 * "lost-INDEX" in the folder, with the error's number in it. */
CUresult fake_device_health(const struct fake_device *d)
{
        char path[320], text[16] = "";
        CUresult r;
        ssize_t n;
        int fd;

        r = __atomic_load_n(&d->lost_here, __ATOMIC_RELAXED);
        if (r != CUDA_SUCCESS)
                return r;
        snprintf(path, sizeof(path), "%s/lost-%u", folder, d->index);
        fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
                return CUDA_SUCCESS;
        n = read(fd, text, sizeof(text) - 1);
        close(fd);
        return n > 0 && atoi(text) > 0 ? (CUresult)atoi(text) : CUDA_ERROR_ECC_UNCORRECTABLE;
}

/* ---- objects ------------------------------------------------------------- */

static void object_path(const struct fake_object *o, char ret[static 400])
{
        snprintf(ret, 400, "%s/mem-%u-%c-%llu-%016llx", folder, o->device, o->kind,
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

static int folder_lock(void)
{
        char path[320];
        int fd;

        snprintf(path, sizeof(path), "%s/lock", folder);
        fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
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
        int fd = open(path, O_RDONLY | O_CLOEXEC);
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
        DIR *dir = opendir(folder);
        uint64_t n_bytes = 0;
        struct dirent *e;

        if (!dir)
                fake_die("cannot read %s: %m", folder);
        while ((e = readdir(dir))) {
                unsigned long long n, id;
                unsigned int index;
                char kind, path[600];

                if (sscanf(e->d_name, "mem-%u-%c-%llu-%llx", &index, &kind, &n, &id) != 4 || index != device)
                        continue;
                snprintf(path, sizeof(path), "%s/%s", folder, e->d_name);
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

        close(lock);
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
        static char bytes[1 << 16];

        memset(bytes, 0xab, sizeof(bytes)); /* by several threads at once at worst, the same to all */
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
        close(lock);
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
        int lock, fd;

        object_path(o, path);
        lock = folder_lock();
        fd = open(path, O_RDWR | O_CLOEXEC);
        if (fd >= 0)
                lock_fd(fd, LOCK_SH);
        close(lock);
        if (fd < 0)
                return errno == ENOENT ? CUDA_ERROR_INVALID_CONTEXT : CUDA_ERROR_OPERATING_SYSTEM;
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
        close(lock);
}

/* After a reference was given up: was it the last? */
void fake_object_drop(const struct fake_object *o)
{
        char path[400];
        int lock = folder_lock();

        object_path(o, path);
        object_reap(path);
        close(lock);
}
