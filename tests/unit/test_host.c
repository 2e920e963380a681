/* The host-memory device: extents are whole, sealed and really given back; a
 * range maps them and leaves nothing to a child.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "device/device.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "device/host_helper.h"
#include "tests/suite.h"

static struct device *device;
static const struct device_view here = { .share = DEVICE_SHARE_FD };

static int map(struct device_range *range, uint64_t offset, uint64_t n_bytes, int fd)
{
        return device_range_map(range, offset, &(struct device_extent){ .fd = fd, .n_bytes = n_bytes });
}

static void setup(void)
{
        ck_assert_int_eq(device_host_new(&device), 0);
}

static void teardown(void)
{
        device = device_free(device);
        ck_assert_ptr_null(device_free(NULL));
        ck_assert_ptr_null(device_range_free(NULL));
}

FIXTURE(host, setup, teardown);

static struct device_extent make(uint64_t n_bytes)
{
        struct device_extent e = DEVICE_EXTENT_EMPTY;

        ck_assert_int_eq(device_make(device, DEVICE_SHARE_FD, n_bytes, &e), 0);
        ck_assert_int_ge(e.fd, 0);
        ck_assert_uint_eq(e.n_bytes, n_bytes);
        return e;
}

static uint64_t n_bytes_backed(int fd)
{
        struct stat st;

        ck_assert_int_eq(fstat(fd, &st), 0);
        return (uint64_t)st.st_blocks * 512;
}

TEST(made_whole_and_zeroed)
{
        struct device_extent e = make(6 * MIB);
        unsigned char *p = mmap(NULL, e.n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, e.fd, 0);

        ck_assert_uint_eq(device_granularity(device), 2 * MIB);
        ck_assert_ptr_ne(p, MAP_FAILED);
        ck_assert_uint_eq(n_bytes_backed(e.fd), e.n_bytes);
        for (uint64_t i = 0; i < e.n_bytes; i++)
                if (p[i] != 0)
                        ck_abort_msg("byte %lu is %u", (unsigned long)i, p[i]);
        ck_assert_int_eq(fcntl(e.fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
        munmap(p, e.n_bytes);
        ck_assert_int_eq(device_destroy(device, &e), 0);
        ck_assert_int_eq(e.fd, -1);
        ck_assert_int_eq(device_destroy(device, &e), 0); /* empty: nothing to do */
}

TEST(seals_hold)
{
        struct device_extent e = make(2 * MIB);

        ck_assert_int_eq(ftruncate(e.fd, 0), -1);
        ck_assert_int_eq(errno, EPERM);
        ck_assert_int_eq(ftruncate(e.fd, (off_t)(4 * MIB)), -1);
        ck_assert_int_eq(errno, EPERM);
        ck_assert_int_eq(fcntl(e.fd, F_ADD_SEALS, F_SEAL_WRITE), -1);
        ck_assert_int_eq(errno, EPERM);
        ck_assert_int_eq(device_destroy(device, &e), 0);
}

TEST(sizes_refused)
{
        static const uint64_t bad[] = { 0, 1, MIB, 3 * MIB, 2 * MIB + 1, UINT64_C(1) << 63, UINT64_MAX };
        struct device_extent e = DEVICE_EXTENT_EMPTY;

        for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
                ck_assert_int_eq(device_make(device, DEVICE_SHARE_FD, bad[i], &e), -EINVAL);
        ck_assert_int_eq(e.fd, -1);
}

/* Across the parts that are mapped at a time; offsets are multiples of nothing. */
TEST(copies_between_extents)
{
        const uint64_t n_bytes = 65 * MIB + 3;
        struct device_extent e = make(68 * MIB), host = make(68 * MIB);
        unsigned char *p = mmap(NULL, e.n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, e.fd, 0),
                      *q = mmap(NULL, e.n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, host.fd, 0);
        struct device_copy copy = { .extent = &e,
                                    .offset = 4099,
                                    .host = &host,
                                    .host_offset = 2 * MIB + 777,
                                    .n_bytes = n_bytes,
                                    .to_host = true };

        for (uint64_t i = 0; i < e.n_bytes; i++)
                p[i] = (unsigned char)(i * 2654435761u >> 13);
        ck_assert_int_eq(device_copy(device, &copy, 1), 0);
        ck_assert_mem_eq(q + copy.host_offset, p + copy.offset, n_bytes);
        ck_assert_uint_eq(q[copy.host_offset - 1], 0);
        ck_assert_uint_eq(q[copy.host_offset + n_bytes], 0);
        memset(p, 0, e.n_bytes);
        /* Two parts side by side, and one elsewhere. */
        copy.to_host = false;
        {
                struct device_copy parts[3] = { copy, copy, copy };

                parts[0].n_bytes = parts[2].n_bytes = n_bytes / 4;
                parts[1].n_bytes = n_bytes / 4;
                parts[1].offset += n_bytes / 4;
                parts[1].host_offset += n_bytes / 4;
                parts[2].offset += 3 * (n_bytes / 4);
                parts[2].host_offset += 3 * (n_bytes / 4);
                memset(p + copy.offset, 0, n_bytes);
                ck_assert_int_eq(device_copy(device, parts, 3), 0);
                ck_assert_mem_eq(q + copy.host_offset, p + copy.offset, 2 * (n_bytes / 4));
                ck_assert_uint_eq(p[copy.offset + 2 * (n_bytes / 4)], 0);
                ck_assert_mem_eq(q + parts[2].host_offset, p + parts[2].offset, n_bytes / 4);
        }
        ck_assert_int_eq(device_copy(device, &copy, 1), 0);
        ck_assert_mem_eq(q + copy.host_offset, p + copy.offset, n_bytes);
        ck_assert_uint_eq(p[copy.offset - 1], 0);
        ck_assert_uint_eq(p[copy.offset + n_bytes], 0);
        copy.n_bytes = e.n_bytes;
        ck_assert_int_eq(device_copy(device, &copy, 1), -EINVAL);
        munmap(p, e.n_bytes);
        munmap(q, e.n_bytes);
        ck_assert_int_eq(device_destroy(device, &e), 0);
        ck_assert_int_eq(device_destroy(device, &host), 0);
}

struct helped {
        _Atomic uint64_t n_bytes, n_parts;
        uint64_t bad; /* a byte: the part with it fails */
};

static int help(const void *arg, uint64_t begin, uint64_t end)
{
        struct helped *h = *(struct helped *const *)arg;

        h->n_bytes += end - begin;
        h->n_parts++;
        return h->bad >= begin && h->bad < end ? -EIO : 0;
}

static int run_helped(struct host_helper *helper, uint64_t n_bytes, uint64_t bad, uint64_t most)
{
        struct helped h = { .bad = bad }, *arg = &h;
        int r = host_helper_run(helper, help, &arg, n_bytes);

        ck_assert_uint_eq(h.n_bytes, n_bytes);
        ck_assert_uint_le(h.n_parts, most);
        return r;
}

TEST(a_helper_does_a_part)
{
        struct host_helper *helpers[] = { host_helper_new(), NULL };

        for (int i = 0; i < 2; i++) {
                uint64_t most = helpers[i] ? 2 : 1;

                for (int k = 0; k < 1000; k++)
                        ck_assert_int_eq(run_helped(helpers[i], 8 * MIB - (uint64_t)k, UINT64_MAX, most), 0);
                ck_assert_int_eq(run_helped(helpers[i], 2 * MIB, UINT64_MAX, 1), 0);
                ck_assert_int_eq(run_helped(helpers[i], 8 * MIB, 0, most), -EIO);
                ck_assert_int_eq(run_helped(helpers[i], 8 * MIB, 8 * MIB - 1, most), -EIO);
                ck_assert_ptr_null(host_helper_free(helpers[i]));
        }
}

/* A client's hole is read as zeroes and stays one; a file that ends is an error, and no signal. */
TEST(copies_of_what_is_not_there)
{
        struct device_extent e = make(4 * MIB), host = make(4 * MIB), short_one = { .n_bytes = 4 * MIB };
        struct device_copy copy = { .extent = &e, .host = &host, .n_bytes = 4 * MIB };
        unsigned char byte = 1;

        ck_assert_int_eq(pwrite(e.fd, &byte, 1, 3), 1);
        ck_assert_int_eq(
                fallocate(host.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, (off_t)host.n_bytes), 0);
        ck_assert_int_eq(device_copy(device, &copy, 1), 0);
        ck_assert_uint_eq(n_bytes_backed(host.fd), 0);
        ck_assert_int_eq(pread(e.fd, &byte, 1, 3), 1);
        ck_assert_uint_eq(byte, 0);
        short_one.fd = memfd_create("short", MFD_CLOEXEC);
        ck_assert_int_eq(ftruncate(short_one.fd, (off_t)(2 * MIB)), 0);
        copy.host = &short_one;
        for (int i = 0; i < 2; i++) {
                copy.to_host = i;
                ck_assert_int_eq(device_copy(device, &copy, 1), -EIO);
        }
        close(short_one.fd);
        ck_assert_int_eq(device_destroy(device, &e), 0);
        ck_assert_int_eq(device_destroy(device, &host), 0);
}

static volatile sig_atomic_t n_signals;

static void count(int signal_number)
{
        (void)signal_number;
        n_signals++;
}

/* A limit of the process stands between this test and a machine out of memory. */
TEST(memory_refused_by_the_kernel)
{
        struct sigaction action = { .sa_handler = count };
        struct device_extent e = DEVICE_EXTENT_EMPTY;
        struct rlimit tight;

        ck_assert_int_eq(sigaction(SIGXFSZ, &action, NULL), 0);
        ck_assert_int_eq(getrlimit(RLIMIT_FSIZE, &tight), 0);
        tight.rlim_cur = 2 * MIB;
        ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &tight), 0);
        ck_assert_int_eq(device_make(device, DEVICE_SHARE_FD, 4 * MIB, &e), -ENOMEM);
        ck_assert_int_eq(n_signals, 1);
        /* More than the machine has is refused before the kernel is asked. */
        ck_assert_int_eq(device_make(device, DEVICE_SHARE_FD, UINT64_C(1) << 62, &e), -ENOMEM);
        ck_assert_int_eq(n_signals, 1);
        ck_assert_int_eq(e.fd, -1);
        e = make(2 * MIB);
        ck_assert_int_eq(device_destroy(device, &e), 0);
}

TEST(made_under_signals)
{
        struct itimerval every = { { 0, 500 }, { 0, 500 } }, never = { 0 };
        struct sigaction action = { .sa_handler = count };
        struct device_extent e;

        ck_assert_int_eq(sigaction(SIGALRM, &action, NULL), 0);
        setitimer(ITIMER_REAL, &every, NULL);
        e = make(64 * MIB);
        setitimer(ITIMER_REAL, &never, NULL);
        ck_assert_int_gt(n_signals, 0);
        ck_assert_uint_eq(n_bytes_backed(e.fd), e.n_bytes);
        ck_assert_int_eq(device_destroy(device, &e), 0);
}

/* By an fd, and then by a mapping. */
TEST(destroy_waits_for_other_processes)
{
        struct device_extent e = make(4 * MIB);
        int fugitive = device_lend(device, &e, false);
        char *p = mmap(NULL, e.n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fugitive, 0);

        ck_assert_ptr_ne(p, MAP_FAILED);
        memset(p, 'x', e.n_bytes);
        e.was_lent = true;
        ck_assert_int_eq(device_destroy(device, &e), -EBUSY);
        ck_assert_int_ge(e.fd, 0);
        munmap(p, 2 * MIB);
        close(fugitive);
        ck_assert_int_eq(device_destroy(device, &e), -EBUSY);
        ck_assert_int_eq(p[4 * MIB - 1], 'x');
        munmap(p + 2 * MIB, 2 * MIB);
        ck_assert_int_eq(device_destroy(device, &e), 0);
        ck_assert_int_eq(e.fd, -1);
}

/* Whether the end of the daemon is near or not: a successor is to have it. */
TEST(destroy_at_the_end)
{
        struct device_extent e = make(2 * MIB);
        int fugitive = device_lend(device, &e, false);

        e.was_lent = true;
        device_end(device);
        ck_assert_int_eq(device_destroy(device, &e), -EBUSY);
        close(fugitive);
        ck_assert_int_eq(device_destroy(device, &e), 0);
}

/* A lease does not show a descriptor with O_PATH, which keeps the file: its pages are freed all the same. */
TEST(destroy_empties_what_a_path_keeps)
{
        struct device_extent e = make(4 * MIB);
        int fugitive = device_lend(device, &e, false), keeps;
        char path[64];

        snprintf(path, sizeof(path), "/proc/self/fd/%d", fugitive);
        keeps = open(path, O_PATH | O_CLOEXEC);
        ck_assert_int_ge(keeps, 0);
        close(fugitive);
        ck_assert_uint_eq(n_bytes_backed(keeps), 4 * MIB);
        e.was_lent = true;
        ck_assert_int_eq(device_destroy(device, &e), 0);
        ck_assert_uint_eq(n_bytes_backed(keeps), 0);
        close(keeps);
}

TEST(range_maps_extents)
{
        struct device_extent a = make(2 * MIB), b = make(4 * MIB), c = make(2 * MIB);
        struct device_range *range = NULL;
        char *base;

        ck_assert_int_eq(device_range_new(&here, 64 * MIB, &range), 0);
        base = device_range_base(range);
        ck_assert_int_eq(map(range, 8 * MIB, a.n_bytes, a.fd), 0);
        ck_assert_int_eq(map(range, 10 * MIB, b.n_bytes, b.fd), 0);
        memset(base + 8 * MIB, 'x', 6 * MIB); /* across both */

        /* The successor at the same place is another extent. */
        ck_assert_int_eq(map(range, 8 * MIB, c.n_bytes, c.fd), 0);
        ck_assert_int_eq(base[8 * MIB], 0);
        ck_assert_int_eq(base[10 * MIB], 'x');
        base[8 * MIB] = 'y';
        char byte;
        ck_assert_int_eq(pread(c.fd, &byte, 1, 0), 1);
        ck_assert_int_eq(byte, 'y');
        ck_assert_int_eq(pread(a.fd, &byte, 1, 0), 1);
        ck_assert_int_eq(byte, 'x');

        ck_assert_int_eq(device_range_unmap(range, 8 * MIB, c.n_bytes), 0);
        ck_assert_int_eq(device_range_unmap(range, 63 * MIB, c.n_bytes), -EINVAL);
        ck_assert_int_eq(base[10 * MIB], 'x'); /* its neighbour stays, and so does what it held */
        ck_assert_int_eq(pread(c.fd, &byte, 1, 0), 1);
        ck_assert_int_eq(byte, 'y');
        ck_assert_int_eq(map(range, 8 * MIB, a.n_bytes, a.fd), 0);
        ck_assert_int_eq(base[8 * MIB], 'x');
        ck_assert_int_eq(device_range_finish(range), 0);

        ck_assert_ptr_null(device_range_free(range));
        ck_assert_int_eq(msync(base, 4096, MS_ASYNC), -1); /* nothing is mapped there */
        device_destroy(device, &a);
        device_destroy(device, &b);
        device_destroy(device, &c);
}

TEST(copies_in_and_out)
{
        struct device_extent a = make(2 * MIB), b = make(2 * MIB);
        static char in[3 * MIB], out[3 * MIB];
        struct device_range *range = NULL;

        memset(in, 'i', sizeof(in));
        ck_assert_int_eq(device_range_new(&here, 8 * MIB, &range), 0);
        ck_assert_int_eq(map(range, 4 * MIB, a.n_bytes, a.fd), 0);
        ck_assert_int_eq(map(range, 6 * MIB, b.n_bytes, b.fd), 0);
        ck_assert_int_eq(device_range_write(range, 5 * MIB, in, sizeof(in)), 0); /* up to the end */
        ck_assert_int_eq(pread(b.fd, out, 1, (off_t)(2 * MIB - 1)), 1);
        ck_assert_int_eq(out[0], 'i');
        ck_assert_int_eq(device_range_read(range, 5 * MIB - 1, sizeof(out), out), 0);
        ck_assert_int_eq(out[0], 0);
        ck_assert_mem_eq(out + 1, in, sizeof(out) - 1);
        ck_assert_int_eq(device_range_write(range, 5 * MIB + 1, in, sizeof(in)), -EINVAL);
        ck_assert_int_eq(device_range_read(range, 9 * MIB, 1, out), -EINVAL);
        ck_assert_int_eq(device_range_read(range, UINT64_MAX, 2, out), -EINVAL);
        device_range_free(range);
        device_destroy(device, &a);
        device_destroy(device, &b);
}

TEST(range_bounds)
{
        struct device_extent e = make(4 * MIB);
        struct device_range *range = NULL;

        ck_assert_int_eq(device_range_new(&here, 0, &range), -EINVAL);
        ck_assert_int_eq(device_range_new(&here, MIB, &range), -EINVAL);
        ck_assert_int_eq(device_range_new(&here, UINT64_MAX - 2 * MIB + 1, &range), -EINVAL);
        ck_assert_int_eq(device_range_new(&here, UINT64_C(1) << 60, &range), -ENOMEM);
        ck_assert_ptr_null(range);
        ck_assert_int_eq(device_range_new(&here, 8 * MIB, &range), 0);
        ck_assert_int_eq(map(range, 0, 0, e.fd), -EINVAL);
        ck_assert_int_eq(map(range, 6 * MIB, 4 * MIB, e.fd), -EINVAL);
        ck_assert_int_eq(map(range, 10 * MIB, 4 * MIB, e.fd), -EINVAL);
        ck_assert_int_eq(map(range, UINT64_MAX - 2 * MIB + 1, 4 * MIB, e.fd), -EINVAL);
        ck_assert_int_eq(map(range, 1, 4 * MIB, e.fd), -EINVAL);
        ck_assert_int_eq(map(range, 0, 2 * MIB + 4096, e.fd), -EINVAL);
        ck_assert_int_eq(map(range, 4 * MIB, 4 * MIB, e.fd), 0);
        device_range_free(range);
        device_destroy(device, &e);
}

TEST(range_refuses_what_is_no_extent)
{
        struct device_extent e = make(2 * MIB);
        struct device_range *range = NULL;
        int unsealed = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        int readonly = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        int pipes[2];

        ck_assert_int_eq(pipe(pipes), 0);
        ck_assert_int_eq(ftruncate(unsealed, (off_t)(2 * MIB)), 0);
        ck_assert_int_eq(ftruncate(readonly, (off_t)(2 * MIB)), 0);
        ck_assert_int_eq(
                fcntl(readonly, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_WRITE | F_SEAL_SEAL), 0);
        ck_assert_int_eq(device_range_new(&here, 8 * MIB, &range), 0);
        ck_assert_int_eq(map(range, 0, 2 * MIB, unsealed), -EPROTO);
        ck_assert_int_eq(map(range, 0, 2 * MIB, readonly), -EPROTO);
        ck_assert_int_eq(map(range, 0, 2 * MIB, pipes[0]), -EPROTO);
        ck_assert_int_eq(map(range, 0, 2 * MIB, -1), -EPROTO);
        ck_assert_int_eq(map(range, 0, 4 * MIB, e.fd), -EPROTO); /* larger than it is */
        ck_assert_int_eq(map(range, 0, 2 * MIB, e.fd), 0);
        device_range_free(range);
        close(unsealed);
        close(readonly);
        close(pipes[0]);
        close(pipes[1]);
        device_destroy(device, &e);
}

/* How a child that touches the address ends: 0, or the signal. */
static int child_touches(const volatile char *p)
{
        int status;
        pid_t pid = fork();

        ck_assert_int_ge(pid, 0);
        if (pid == 0) {
                signal(SIGSEGV, SIG_DFL);
                (void)*p;
                _exit(0);
        }
        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

/* No place of the range is a hole, where a mapping of the child could be placed. */
TEST(child_inherits_the_whole_range)
{
        struct device_extent e = make(2 * MIB);
        struct device_range *range = NULL;
        unsigned char present[8 * MIB / 4096];
        char *base;

        ck_assert_int_eq(device_range_new(&here, 8 * MIB, &range), 0);
        base = device_range_base(range);
        ck_assert_int_eq(map(range, 2 * MIB, 2 * MIB, e.fd), 0);
        base[2 * MIB] = 1;
        pid_t pid = fork();
        if (pid == 0) /* mincore() tells of holes without a fault to survive */
                _exit(mincore(base, 8 * MIB, present) == 0 && base[2 * MIB] == 1 ? 0 : 1);
        int status;
        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        ck_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        ck_assert_int_ne(child_touches(base), 0);
        ck_assert_int_eq(device_range_unmap(range, 2 * MIB, 2 * MIB), 0);
        ck_assert_int_ne(child_touches(base + 2 * MIB), 0);
        device_range_free(range);
        device_destroy(device, &e);
}

static void send_fd(int socket, int fd)
{
        union {
                struct cmsghdr align;
                char bytes[CMSG_SPACE(sizeof(int))];
        } control = { .bytes = { 0 } };
        struct iovec iov = { .iov_base = "x", .iov_len = 1 };
        struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1 };
        struct cmsghdr *c;

        msg.msg_control = &control;
        msg.msg_controllen = sizeof(control);
        c = CMSG_FIRSTHDR(&msg);
        *c = (struct cmsghdr){ .cmsg_len = CMSG_LEN(sizeof(int)),
                               .cmsg_level = SOL_SOCKET,
                               .cmsg_type = SCM_RIGHTS };
        memcpy(CMSG_DATA(c), &fd, sizeof(fd));
        ck_assert_int_eq(sendmsg(socket, &msg, 0), 1);
}

/* Whatever another process can keep of an extent shows. */
TEST(unreferenced_extent_is_alone)
{
        struct device_extent e = make(4 * MIB);
        int sockets[2], fd, copy;
        void *at;

        if (!device_is_alone(device, &e)) {
                puts("# skipped: this kernel grants no write lease on a memfd");
                device_destroy(device, &e);
                return;
        }
        fd = device_lend(device, &e, false);
        ck_assert_int_ge(fd, 0);
        ck_assert(!device_is_alone(device, &e));
        copy = dup(fd);
        close(fd);
        ck_assert(!device_is_alone(device, &e));
        at = mmap(NULL, 4 * MIB, PROT_READ, MAP_SHARED, copy, 0);
        ck_assert_ptr_ne(at, MAP_FAILED);
        ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets), 0);
        send_fd(sockets[0], copy); /* it is never read */
        close(copy);
        ck_assert(!device_is_alone(device, &e));
        munmap((char *)at + 1 * MIB, 3 * MIB);
        close(sockets[0]);
        close(sockets[1]);
        ck_assert(!device_is_alone(device, &e));
        munmap(at, 1 * MIB);
        ck_assert(device_is_alone(device, &e));
        ck_assert(device_is_alone(device, &e)); /* a look leaves nothing behind */
        fd = device_lend(device, &e, false);
        ck_assert_int_ge(fd, 0);
        close(fd);
        device_destroy(device, &e);
        ck_assert(!device_is_alone(device, &e));
}

TEST(streams_are_always_idle)
{
        struct device_range *range = NULL;
        struct device_streams *streams = NULL;
        struct device_event *event = NULL;
        uint64_t id = 1;

        ck_assert_int_eq(device_range_new(&here, 2 * MIB, &range), 0);
        ck_assert_int_eq(device_streams_new(&here, &streams), 0);
        ck_assert_int_eq(device_stream_check_captured(streams, 7, &id), 0);
        ck_assert_uint_eq(id, 0);
        ck_assert(streams->are_permanent);
        for (int i = 0; i < 2; i++) { /* the second event takes the place of the first */
                ck_assert_int_eq(device_event_record(streams, 7, &event), 0);
                ck_assert_int_eq(device_event_query(streams, event), 0);
        }
        ck_assert_int_eq(device_range_finish(range), 0);
        ck_assert_ptr_null(device_event_forget(streams, event));
        ck_assert_ptr_null(device_event_forget(streams, NULL));
        device_streams_free(streams);
        device_range_free(range);
}
