/* Command lines: of a process that lets reads of them wait, and of others beside it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctl/cmdline.h"

#include <fcntl.h>
#include <linux/fuse.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/wait.h>

#include "tests/suite.h"

#define LONG_MS 300000

/* ---- a process that keeps others from its memory ----------------------------------- */

struct waiter {
        pid_t pid;
        int says; /* 'w': its memory is locked; 'x': it may not mount */
        char path[32];
};

static void tell(int fd, char what)
{
        if (write(fd, &what, 1) != 1)
                _exit(1);
}

static void reply(int fuse, const struct fuse_in_header *to, int error, const void *body, size_t n_body)
{
        struct fuse_out_header head = { .unique = to->unique, .error = -error };
        struct iovec parts[] = { { &head, sizeof(head) }, { (void *)(uintptr_t)body, n_body } };

        head.len = (uint32_t)(sizeof(head) + n_body);
        (void)!writev(fuse, parts, 2);
}

/* One regular file of a page. No write is answered. */
static void serve(int fuse, int says)
{
        static char request[1 << 17], page[4096];
        const struct fuse_in_header *in = (const void *)request;
        struct fuse_init_out init = { .major = FUSE_KERNEL_VERSION, .minor = 31, .max_write = 4096 };
        struct fuse_attr_out attr = { .attr_valid = 3600 };
        struct fuse_open_out opened = { .fh = 1 };

        attr.attr.ino = FUSE_ROOT_ID;
        attr.attr.mode = S_IFREG | 0600;
        attr.attr.size = sizeof(page);
        while (read(fuse, request, sizeof(request)) > 0) {
                if (in->opcode == FUSE_INIT)
                        reply(fuse, in, 0, &init, sizeof(init));
                else if (in->opcode == FUSE_GETATTR)
                        reply(fuse, in, 0, &attr, sizeof(attr));
                else if (in->opcode == FUSE_OPEN)
                        reply(fuse, in, 0, &opened, sizeof(opened));
                else if (in->opcode == FUSE_READ)
                        reply(fuse, in, 0, page, sizeof(page));
                else if (in->opcode == FUSE_WRITE)
                        tell(says, 'w');
                else if (in->opcode != FUSE_INTERRUPT && in->opcode != FUSE_FORGET)
                        reply(fuse, in, ENOSYS, NULL, 0);
        }
        _exit(0);
}

/* While this waits for the write, the lock of the process's memory is held for reading. */
static void *unmap(void *path)
{
        int file = open(path, O_RDWR | O_CLOEXEC),
            r = fstat(file, &(struct stat){ 0 }); /* asks for its size */
        char *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);

        if (r < 0 || page == MAP_FAILED)
                _exit(1);
        *page = 1;
        munmap(page, 4096);
        return NULL;
}

/* Whoever wants that lock for writing keeps further readers away. */
static void wait_with(const char *path, int says)
{
        int fuse = open("/dev/fuse", O_RDWR | O_CLOEXEC);
        char options[96];
        pthread_t thread;

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        snprintf(options, sizeof(options), "fd=%d,rootmode=100000,user_id=0,group_id=0", fuse);
        if (fuse < 0 || unshare(CLONE_NEWNS) < 0 || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0 ||
            mount("test", path, "fuse", 0, options) < 0) {
                tell(says, 'x');
                _exit(0);
        }
        if (fork() == 0) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                serve(fuse, says);
        }
        close(fuse);
        if (pthread_create(&thread, NULL, unmap, (void *)(uintptr_t)path) != 0)
                _exit(1);
        for (;;) {
                void *page = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

                munmap(page, 4096);
                usleep(1000);
        }
}

static char hear(const struct waiter *w)
{
        char what = '?';

        ck_assert_int_eq(poll(&(struct pollfd){ .fd = w->says, .events = POLLIN }, 1, LONG_MS), 1);
        ck_assert_int_eq(read(w->says, &what, 1), 1);
        return what;
}

/* False: it cannot be had here. */
static bool waiter_start(struct waiter *w)
{
        int says[2];

        prctl(PR_SET_CHILD_SUBREAPER, 1);
        strcpy(w->path, "/tmp/bfcd-cmdline-XXXXXX");
        close(mkstemp(w->path));
        ck_assert_int_eq(pipe(says), 0);
        w->pid = fork();
        if (w->pid == 0)
                wait_with(w->path, says[1]);
        close(says[1]);
        w->says = says[0];
        return hear(w) == 'w';
}

static void waiter_end(struct waiter *w)
{
        (void)kill(w->pid, SIGKILL);
        cmdline_stop();
        while (waitpid(-1, NULL, 0) > 0) {
                /* its server, and the children that were left */
        }
        close(w->says);
        unlink(w->path);
}

/* ---- cases -------------------------------------------------------------------------- */

static size_t read_own(uint64_t uid)
{
        char text[64];

        return cmdline_read((uint64_t)getpid(), uid, text, sizeof(text));
}

TEST(command_lines)
{
        char text[64], whole[4096];
        int file = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
        ssize_t n = read(file, whole, sizeof(whole));
        pid_t gone = fork();

        close(file);
        if (gone == 0)
                _exit(0);
        ck_assert_int_gt(n, 8);
        ck_assert_uint_eq(cmdline_read((uint64_t)getpid(), 0, whole + 2048, 2048), (size_t)n);
        ck_assert_mem_eq(whole, whole + 2048, (size_t)n);
        ck_assert_uint_eq(cmdline_read((uint64_t)getpid(), 0, text, 8), 7); /* cut */
        ck_assert_mem_eq(text, whole, 7);
        ck_assert_int_eq(text[7], '\0');
        ck_assert_int_eq(waitpid(gone, NULL, 0), gone);
        ck_assert_uint_eq(cmdline_read((uint64_t)gone, 0, text, sizeof(text)), 0);
        ck_assert_uint_gt(read_own(0), 0);
}

/* Its user's command lines are left out from then on, and all of them when as many users do so. */
TEST(processes_that_let_reads_wait)
{
        struct waiter w;
        char text[64];
        bool is_up = waiter_start(&w);

        if (!is_up)
                puts("# skipped: this process may not mount a FUSE file system");
        for (uint64_t uid = 1; is_up && uid <= CMDLINE_STUCK; uid++) {
                ck_assert_uint_gt(read_own(uid), 0);
                ck_assert_uint_gt(read_own(0), 0);
                while (cmdline_read((uint64_t)w.pid, uid, text, sizeof(text)) > 0)
                        usleep(1000); /* its other thread does not wait yet */
                ck_assert_str_eq(text, "");
                ck_assert_uint_eq(read_own(uid), 0);
        }
        ck_assert_int_eq(read_own(0) == 0, is_up);
        waiter_end(&w);
}
