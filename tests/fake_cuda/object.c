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
 * one on a file, holds the folder's lock.
 *
 * A flock() is shared with a fork()ed child, and lives as long as the child has the
 * fd. So no fork() happens while this process holds the folder's lock or makes a
 * mapping, and a child closes the fds of objects that its parent has open. */
#include "tests/fake_cuda/fake.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
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

/* Held across each fork(). */
static pthread_mutex_t fork_lock = PTHREAD_MUTEX_INITIALIZER;
static int open_objects[64]; /* fds plus one; guarded by fork_lock */
#define N_OPEN_OBJECTS (sizeof(open_objects) / sizeof(open_objects[0]))

static void before_fork(void)
{
        pthread_mutex_lock(&fork_lock);
}

static void after_fork(void)
{
        pthread_mutex_unlock(&fork_lock);
}

static void in_child(void)
{
        for (size_t i = 0; i < N_OPEN_OBJECTS; i++) {
                if (open_objects[i] > 0)
                        close(open_objects[i] - 1);
                open_objects[i] = 0;
        }
        pthread_mutex_unlock(&fork_lock);
}

void fake_guard_forks(void)
{
        if (pthread_atfork(before_fork, after_fork, in_child) != 0)
                fake_die("out of memory");
}

/* With fork_lock held. */
static void replace_open_object(int from, int to)
{
        for (size_t i = 0; i < N_OPEN_OBJECTS; i++)
                if (open_objects[i] == from) {
                        open_objects[i] = to;
                        return;
                }
        if (from == 0)
                fake_die("more than %zu objects are open", N_OPEN_OBJECTS);
}

int fake_object_take_fd(int fd)
{
        pthread_mutex_lock(&fork_lock);
        replace_open_object(fd + 1, 0);
        pthread_mutex_unlock(&fork_lock);
        return fd;
}

void fake_object_close(int fd)
{
        pthread_mutex_lock(&fork_lock);
        replace_open_object(fd + 1, 0);
        close(fd);
        pthread_mutex_unlock(&fork_lock);
}

static void folder_unlock(int lock)
{
        close(lock);
        pthread_mutex_unlock(&fork_lock);
        fill_spares();
}

static int folder_lock(void)
{
        char path[320];
        int fd;

        fill_spares();
        snprintf(path, sizeof(path), "%s/lock", fake_folder);
        pthread_mutex_lock(&fork_lock);
        fd = open_anyway(path, O_RDWR | O_CREAT | O_CLOEXEC);
        if (fd < 0)
                fake_die("cannot open %s: %m", path);
        fchmod(fd, 0666);
        if (lock_fd(fd, LOCK_EX) < 0)
                fake_die("cannot lock %s: %m", path);
        return fd;
}

/* With the folder locked: unlinks an object that no process uses. */
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

/* With the folder locked. Exact: only what is used, and the rest is unlinked. Else all that has a name, which
 * may be more, without a look at each file. */
static uint64_t in_use_locked(unsigned int device, bool exact)
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
                if (!exact || !object_reap(path))
                        n_bytes += n;
        }
        closedir(dir);
        return n_bytes;
}

/* A look at each of hundreds of files would keep all other processes waiting at the lock: so only where it matters. */
static bool has_room_locked(const struct fake_device *d, uint64_t n_bytes)
{
        uint64_t n_free = d->n_bytes - n_bytes;

        return n_bytes <= d->n_bytes &&
               (in_use_locked(d->index, false) <= n_free || in_use_locked(d->index, true) <= n_free);
}

/* ---- what shows of it ----------------------------------------------------- */

static struct late {
        unsigned int device;
        uint64_t n_bytes;
        int64_t until_ms;
} late[256];
static pthread_mutex_t late_lock = PTHREAD_MUTEX_INITIALIZER;

static int64_t now_ms(void)
{
        struct timespec now;

        clock_gettime(CLOCK_MONOTONIC, &now);
        return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void note_freed(const struct fake_object *o)
{
        int64_t now = now_ms();

        if (fake.free_late_ms == 0)
                return;
        pthread_mutex_lock(&late_lock);
        for (size_t i = 0; i < sizeof(late) / sizeof(late[0]); i++)
                if (late[i].until_ms <= now) {
                        late[i] = (struct late){ o->device, o->n_bytes, now + (int64_t)fake.free_late_ms };
                        break;
                }
        pthread_mutex_unlock(&late_lock);
}

uint64_t fake_not_shown(unsigned int device)
{
        int64_t now = now_ms();
        uint64_t n_bytes = 0;

        pthread_mutex_lock(&late_lock);
        for (size_t i = 0; i < sizeof(late) / sizeof(late[0]); i++)
                if (late[i].device == device && late[i].until_ms > now)
                        n_bytes += late[i].n_bytes;
        pthread_mutex_unlock(&late_lock);
        return n_bytes;
}

uint64_t fake_foreign(void)
{
        static unsigned int n_asked;
        unsigned int n;

        if (fake.n_foreign == 0)
                return 0;
        n = __atomic_fetch_add(&n_asked, 1, __ATOMIC_RELAXED);
        return fake.foreign[n % fake.n_foreign];
}

void *fake_object_map(void *at, size_t n_bytes, int protection, int fd)
{
        void *p;

        pthread_mutex_lock(&fork_lock);
        p = mmap(at, n_bytes, protection, MAP_SHARED | (at ? MAP_FIXED : 0), fd, 0);
        if (p != MAP_FAILED && !fake.fork_keeps)
                madvise(p, n_bytes, MADV_DONTFORK);
        pthread_mutex_unlock(&fork_lock);
        return p == MAP_FAILED ? NULL : p;
}

/* ---- fds that are no regular files ---------------------------------------- */

/* The file waits in the queue of a socket, as alive as in a table of fds. A datagram socket
 * does not hang up when its other end is closed. */
int fake_fd_wrap(int file)
{
        union {
                struct cmsghdr header;
                char bytes[CMSG_SPACE(sizeof(int))];
        } control = { .bytes = { 0 } };
        struct iovec byte = { .iov_base = (char[]){ 0 }, .iov_len = 1 };
        struct msghdr message = {
                .msg_iov = &byte, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)
        };
        int ends[2];
        ssize_t n;

        if (!fake.fd_is_socket)
                return file;
        if (socketpair(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0, ends) < 0) {
                close(file);
                return -1;
        }
        control.header = (struct cmsghdr){ .cmsg_len = CMSG_LEN(sizeof(int)),
                                           .cmsg_level = SOL_SOCKET,
                                           .cmsg_type = SCM_RIGHTS };
        memcpy(CMSG_DATA(&control.header), &file, sizeof(file));
        n = sendmsg(ends[1], &message, 0);
        close(file);
        close(ends[1]);
        if (n < 0) {
                close(ends[0]);
                return -1;
        }
        return ends[0];
}

int fake_fd_unwrap(int fd)
{
        union {
                struct cmsghdr header;
                char bytes[CMSG_SPACE(sizeof(int))];
        } control;
        struct iovec byte = { .iov_base = (char[]){ 0 }, .iov_len = 1 };
        struct msghdr message = {
                .msg_iov = &byte, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)
        };
        struct stat st;
        int file;

        if (fstat(fd, &st) == 0 && !S_ISSOCK(st.st_mode))
                return fcntl(fd, F_DUPFD_CLOEXEC, 3);
        if (recvmsg(fd, &message, MSG_PEEK | MSG_DONTWAIT | MSG_CMSG_CLOEXEC) < 0 ||
            message.msg_controllen < CMSG_LEN(sizeof(int)))
                return -1;
        memcpy(&file, CMSG_DATA(&control.header), sizeof(file));
        return file;
}

uint64_t fake_in_use(unsigned int device)
{
        int lock = folder_lock();
        uint64_t n = in_use_locked(device, true);

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
        replace_open_object(0, fd + 1);
        *ret_fd = fd;
        return CUDA_SUCCESS;
}

#define POISON_BYTES 4096u
#define POISON_STEP  (UINT64_C(1) << 15)

static bool write_poison(int fd, uint64_t begin, uint64_t end)
{
        char bytes[POISON_BYTES];

        memset(bytes, 0xab, sizeof(bytes));
        while (begin < end) {
                ssize_t r = pwrite(fd, bytes, end - begin < sizeof(bytes) ? end - begin : sizeof(bytes),
                                   (off_t)begin);

                if (r < 0 && errno != EINTR)
                        return false;
                if (r > 0)
                        begin += (uint64_t)r;
        }
        return true;
}

/* Fresh memory is whatever was there before. Here a page in every POISON_STEP and the last one are never zero; all
 * of it would take most of the tests' time, and is poisoned in the nightly run. */
static bool poison(int fd, uint64_t n_bytes)
{
        if (getenv("BFC_TEST_LONG"))
                return write_poison(fd, 0, n_bytes);
        for (uint64_t at = 0; at < n_bytes; at += POISON_STEP)
                if (!write_poison(fd, at, n_bytes - at < POISON_BYTES ? n_bytes : at + POISON_BYTES))
                        return false;
        return n_bytes < POISON_BYTES || write_poison(fd, n_bytes - POISON_BYTES, n_bytes);
}

/* With the folder locked. A number of one width, so that a reader finds all of it. */
static void note_peak_locked(unsigned int device)
{
        char path[320], text[32] = "";
        uint64_t n_bytes;
        ssize_t n_text;
        int fd;

        if (!fake.notes_peak)
                return;
        snprintf(path, sizeof(path), "%s/peak-%u", fake_folder, device);
        n_bytes = in_use_locked(device, true);
        fd = open_anyway(path, O_RDWR | O_CREAT | O_CLOEXEC);
        if (fd < 0 || read(fd, text, sizeof(text) - 1) < 0)
                fake_die("cannot read %s: %m", path);
        if (n_bytes > strtoull(text, NULL, 10)) {
                n_text = snprintf(text, sizeof(text), "%20llu\n", (unsigned long long)n_bytes);
                if (pwrite(fd, text, (size_t)n_text, 0) != n_text)
                        fake_die("cannot write %s: %m", path);
        }
        fchmod(fd, 0666);
        close(fd);
}

CUresult fake_object_new(const struct fake_device *d, char kind, uint64_t n_bytes, struct fake_object *ret,
                         int *ret_fd)
{
        struct fake_object o = { .device = d->index, .kind = kind, .n_bytes = n_bytes };
        uint64_t n_backed = kind == 'b' ? 0 : n_bytes;
        uint32_t number;
        CUresult r;
        int lock, fd;

        if (getrandom(&number, sizeof(number), 0) != (ssize_t)sizeof(number))
                return CUDA_ERROR_OPERATING_SYSTEM;
        o.id = (uint64_t)getpid() << 32 | number; /* the fake NVML says whose it is */
        lock = folder_lock();
        if (has_room_locked(d, n_bytes))
                r = object_create_locked(&o, n_backed, &fd);
        else
                r = CUDA_ERROR_OUT_OF_MEMORY;
        if (r == CUDA_SUCCESS)
                note_peak_locked(d->index);
        folder_unlock(lock);
        if (r != CUDA_SUCCESS)
                return r;
        if (!poison(fd, n_backed < fake.poison_n_bytes ? n_backed : fake.poison_n_bytes)) {
                fake_object_close(fd); /* the machine's memory is full, so the device's is */
                fake_object_drop(&o);
                return CUDA_ERROR_OUT_OF_MEMORY;
        }
        *ret = o;
        *ret_fd = fd;
        return CUDA_SUCCESS;
}

CUresult fake_bytes_take(const struct fake_device *d, uint64_t n_bytes, struct fake_bytes *ret)
{
        struct fake_bytes b;
        CUresult r;
        int fd;

        r = fake_object_new(d, 'b', n_bytes, &b.object, &fd);
        if (r != CUDA_SUCCESS)
                return r;
        b.held = fake_object_map(NULL, 4096, PROT_NONE, fd);
        fake_object_close(fd);
        if (!b.held) {
                fake_object_drop(&b.object);
                return CUDA_ERROR_OUT_OF_MEMORY;
        }
        *ret = b;
        return CUDA_SUCCESS;
}

void fake_bytes_give_back(struct fake_bytes *b)
{
        if (!b->held)
                return;
        munmap(b->held, 4096);
        b->held = NULL;
        fake_object_drop(&b->object);
}

CUresult fake_object_open(const struct fake_object *o, int *ret_fd)
{
        char path[400];
        int lock, fd, error;

        object_path(o, path);
        lock = folder_lock();
        fd = open(path, O_RDWR | O_CLOEXEC);
        error = errno;
        if (fd >= 0) {
                lock_fd(fd, LOCK_SH);
                replace_open_object(0, fd + 1);
        }
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
        if (fake.free_late_ms > 0 && access(path, F_OK) == 0) {
                if (object_reap(path))
                        note_freed(o);
        } else {
                object_reap(path);
        }
        folder_unlock(lock);
}
