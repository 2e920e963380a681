/* The job of bfcctl run: see child.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Signals are blocked and read from a signalfd, because a handler could not tell which process sent them: those that
 * the kernel sends for the terminal have reached the job, too, and are not passed on. */
#include "ctl/child.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static const int passed_signals[] = { SIGINT,  SIGTERM, SIGHUP,   SIGQUIT, SIGUSR1,
                                      SIGUSR2, SIGCONT, SIGWINCH, SIGTSTP };

/* ---- processes ------------------------------------------------------------ */

static int read_process(pid_t pid, struct child_process *ret)
{
        struct child_process p = { .pid = pid };
        char path[64], text[1024], *name, *end;
        ssize_t n;
        int fd;

        snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
        fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
                return -errno;
        n = read(fd, text, sizeof(text) - 1);
        close(fd);
        text[n > 0 ? n : 0] = '\0';
        name = strchr(text, '(');
        end = strrchr(text, ')'); /* the name may have any characters */
        if (!name || !end ||
            sscanf(end, ") %c %d %d %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %" SCNu64,
                   &p.state, &p.parent, &p.group, &p.start_time) != 4)
                return -ESRCH;
        *end = '\0';
        snprintf(p.name, sizeof(p.name), "%s", name + 1);
        *ret = p;
        return 0;
}

/* All processes that are visible. The caller frees *ret. */
static int read_processes(struct child_process **ret, size_t *ret_n)
{
        DIR *folder = opendir("/proc");
        struct child_process *all = NULL, *more;
        size_t n = 0;

        if (!folder)
                return -errno;
        for (struct dirent *e; (e = readdir(folder));) {
                int pid = atoi(e->d_name);

                if (pid <= 0)
                        continue;
                if ((n & (n - 1)) == 0) {
                        more = reallocarray(all, n ? 2 * n : 1, sizeof(*all));
                        if (!more) {
                                free(all);
                                closedir(folder);
                                return -ENOMEM;
                        }
                        all = more;
                }
                n += read_process(pid, &all[n]) == 0;
        }
        closedir(folder);
        *ret = all;
        *ret_n = n;
        return 0;
}

static int by_pid(const void *left, const void *right)
{
        const struct child_process *a = left, *b = right;

        return (a->pid > b->pid) - (a->pid < b->pid);
}

/* Marks the descendants of this process. A parent's pid may be above its child's. */
static void mark_descendants(struct child_process *all, size_t n)
{
        const struct child_process *parent;
        bool is_changed;

        if (n > 0)
                qsort(all, n, sizeof(*all), by_pid);
        do {
                is_changed = false;
                for (size_t i = 0; i < n; i++) {
                        if (all[i].is_descendant)
                                continue;
                        parent = bsearch(&(struct child_process){ .pid = all[i].parent }, all, n,
                                         sizeof(*all), by_pid);
                        all[i].is_descendant = all[i].parent == getpid() || (parent && parent->is_descendant);
                        is_changed |= all[i].is_descendant;
                }
        } while (is_changed);
}

static bool runs(const struct child_process *p)
{
        return p->state != 'Z' && p->state != 'X';
}

bool child_has_ended(pid_t pid)
{
        struct child_process p;

        if (read_process(pid, &p) == 0)
                return !runs(&p);
        return kill(pid, 0) < 0 && errno == ESRCH; /* /proc may hide it */
}

static int read_descendants(struct child_process **ret, size_t *ret_n)
{
        struct child_process *all = NULL;
        size_t n_all = 0, n = 0;
        int r = read_processes(&all, &n_all);

        if (r < 0)
                return r;
        mark_descendants(all, n_all);
        for (size_t i = 0; i < n_all; i++)
                if (all[i].is_descendant && runs(&all[i]))
                        all[n++] = all[i];
        *ret = all;
        *ret_n = n;
        return 0;
}

int child_remaining(struct child_process *ret, size_t n_max, size_t *ret_n)
{
        struct child_process *all;
        size_t n;
        int r;

        while (waitpid(-1, NULL, WNOHANG) > 0)
                ;
        r = read_descendants(&all, &n);
        if (r < 0)
                return r;
        if (n > 0)
                memcpy(ret, all, (n < n_max ? n : n_max) * sizeof(*ret));
        free(all);
        *ret_n = n;
        return 0;
}

/* ---- signals -------------------------------------------------------------- */

/* The pid may have become another process's since it was read. */
static void signal_process(const struct child_process *p, int number)
{
        int fd = (int)syscall(SYS_pidfd_open, p->pid, 0);
        struct child_process now;

        if (fd < 0)
                return;
        if (read_process(p->pid, &now) == 0 && now.start_time == p->start_time)
                syscall(SYS_pidfd_send_signal, fd, number, NULL, 0);
        close(fd);
}

/* No group is signalled as a whole. Ours may have other programs, such as those of a pipe. The main process may have
 * entered that of any program in its session, and the number of one that it has left may be another's by now. */
static void pass_signal(const struct child *c, int number)
{
        pid_t group = getpgid(c->pid);
        struct child_process *all = NULL;
        size_t n = 0;

        if (read_descendants(&all, &n) < 0)
                n = 0;
        kill(c->pid, number);
        for (size_t i = 0; i < n; i++)
                if (all[i].pid != c->pid && all[i].group == group)
                        signal_process(&all[i], number);
        free(all);
}

/* Stops bfcctl, so that the shell sees a stopped job. SIGTSTP has no effect where no shell could continue it. */
static void stop_self(void)
{
        sigset_t stop, old;

        sigemptyset(&stop);
        sigaddset(&stop, SIGTSTP);
        raise(SIGTSTP);
        sigprocmask(SIG_UNBLOCK, &stop, &old);
        sigprocmask(SIG_SETMASK, &old, NULL);
}

/* -ECHILD: the main process has been reaped by others. */
static int reap(const struct child *c, int *ret_status, bool *ret_has_ended)
{
        int status;
        pid_t pid;

        while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
                if (pid != c->pid)
                        continue;
                *ret_status = status;
                *ret_has_ended = true;
        }
        return pid < 0 && !*ret_has_ended ? -errno : 0;
}

int child_wait(struct child *c, int *ret_status)
{
        struct signalfd_siginfo info;
        bool has_ended = false;
        int r = 0;

        while (r == 0 && !has_ended) {
                if (read(c->signal_fd, &info, sizeof(info)) != (ssize_t)sizeof(info)) {
                        if (errno != EINTR)
                                r = -errno;
                        continue;
                }
                if (info.ssi_signo == SIGCHLD) {
                        r = reap(c, ret_status, &has_ended);
                        continue;
                }
                if (info.ssi_code <= 0) /* a process sent it */
                        pass_signal(c, (int)info.ssi_signo);
                if (info.ssi_signo == SIGTSTP)
                        stop_self();
        }
        return r;
}

void child_end(struct child *c)
{
        struct signalfd_siginfo info;

        if (c->signal_fd < 0)
                return;
        /* What arrived together with the end of the main process was for the job. */
        fcntl(c->signal_fd, F_SETFL, O_NONBLOCK);
        while (read(c->signal_fd, &info, sizeof(info)) == (ssize_t)sizeof(info))
                ;
        close(c->signal_fd);
        c->signal_fd = -1;
        sigprocmask(SIG_SETMASK, &c->mask, NULL);
}

/* ---- start and end -------------------------------------------------------- */

int child_adopt(void)
{
        if (signal(SIGCHLD, SIG_DFL) == SIG_ERR) /* ignored: the kernel would discard exit statuses */
                return -errno;
        return prctl(PR_SET_CHILD_SUBREAPER, 1) < 0 ? -errno : 0;
}

static void __attribute__((noreturn)) become(char *const *argv, const struct child_variable *variables,
                                             size_t n, const sigset_t *mask, int error_fd)
{
        int error = 0;

        for (size_t i = 0; i < n && error == 0; i++)
                if (setenv(variables[i].name, variables[i].value, 1) < 0)
                        error = errno;
        if (error == 0) {
                sigprocmask(SIG_SETMASK, mask, NULL);
                execvp(argv[0], argv);
                error = errno;
        }
        _exit(write(error_fd, &error, sizeof(error)) == (ssize_t)sizeof(error) ? 127 : 126);
}

/* Forks; the errno with which the program could not be executed, or 0. */
static int fork_program(struct child *c, char *const *argv, const struct child_variable *variables,
                        size_t n_variables, int *ret_exec_error)
{
        int fds[2], error = 0;

        if (pipe2(fds, O_CLOEXEC) < 0)
                return -errno;
        c->pid = fork();
        if (c->pid == 0)
                become(argv, variables, n_variables, &c->mask, fds[1]);
        close(fds[1]);
        if (c->pid < 0) {
                error = -errno;
                close(fds[0]);
                return error;
        }
        if (read(fds[0], &error, sizeof(error)) == (ssize_t)sizeof(error))
                waitpid(c->pid, NULL, 0);
        close(fds[0]);
        *ret_exec_error = error;
        return 0;
}

int child_start(char *const *argv, const struct child_variable *variables, size_t n_variables,
                struct child *ret, int *ret_exec_error)
{
        struct child c = { 0 };
        sigset_t signals;
        int error = 0, r;

        sigemptyset(&signals);
        sigaddset(&signals, SIGCHLD);
        for (size_t i = 0; i < sizeof(passed_signals) / sizeof(passed_signals[0]); i++)
                sigaddset(&signals, passed_signals[i]);
        c.signal_fd = signalfd(-1, &signals, SFD_CLOEXEC);
        if (c.signal_fd < 0)
                return -errno;
        sigprocmask(SIG_BLOCK, &signals, &c.mask);
        r = fork_program(&c, argv, variables, n_variables, &error);
        if (r < 0 || error != 0)
                child_end(&c);
        if (r < 0)
                return r;
        *ret_exec_error = error;
        *ret = c;
        return 0;
}

int child_exit_as(int status)
{
        sigset_t one;
        int number;

        if (WIFEXITED(status))
                return WEXITSTATUS(status);
        number = WTERMSIG(status);
        setrlimit(RLIMIT_CORE, &(struct rlimit){ 0, 0 }); /* the job has made its core dump */
        signal(number, SIG_DFL);
        sigemptyset(&one);
        sigaddset(&one, number);
        sigprocmask(SIG_UNBLOCK, &one, NULL);
        raise(number);
        return 128 + number;
}
