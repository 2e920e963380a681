/* The daemon of a plan; see plan_bfcd.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The client socket is passed as service managers pass it, so a client can connect before the daemon serves. */
#include "ctl/plan_bfcd.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ctl/tools.h"

#define BACKLOG   8
#define PASSED_FD 3 /* the first, see sd_listen_fds(3) */
/* Of a socket's path (107 bytes) the rest is for names below it. */
#define MAX_PARENT 60

static void path_of(const struct plan_bfcd *d, const char *name, char ret[static PATH_MAX])
{
        snprintf(ret, PATH_MAX, "%s/%s", d->folder, name);
}

static int make_folder(struct plan_bfcd *d)
{
        const char *parent = getenv("TMPDIR");
        bool is_usable = parent && *parent == '/' && strlen(parent) <= MAX_PARENT && !strchr(parent, '\'');

        snprintf(d->folder, sizeof(d->folder), "%s/bfc-plan-XXXXXX", is_usable ? parent : P_tmpdir);
        return mkdtemp(d->folder) ? 0 : -errno;
}

/* With what the daemon has made there. In a parent that others can write, a link may be in its place by now. */
static void remove_folder(const struct plan_bfcd *d)
{
        int fd = open(d->folder, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        DIR *folder = fd < 0 ? NULL : fdopendir(fd);
        const struct dirent *e;

        if (fd >= 0 && !folder)
                close(fd);
        while (folder && (e = readdir(folder)))
                (void)unlinkat(dirfd(folder), e->d_name, 0);
        if (folder)
                closedir(folder);
        (void)rmdir(d->folder);
}

static int listen_at(const char *path)
{
        struct sockaddr_un address = { .sun_family = AF_UNIX };
        int fd, r;

        if (strlen(path) >= sizeof(address.sun_path))
                return -ENAMETOOLONG;
        strcpy(address.sun_path, path);
        fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (fd < 0)
                return -errno;
        if (bind(fd, (struct sockaddr *)&address, sizeof(address)) == 0 && listen(fd, BACKLOG) == 0)
                return fd;
        r = -errno;
        close(fd);
        return r;
}

static void set_variables(void)
{
        char pid[32];

        snprintf(pid, sizeof(pid), "%ld", (long)getpid());
        setenv("LISTEN_PID", pid, 1);
        setenv("LISTEN_FDS", "1", 1);
        setenv("LISTEN_FDNAMES", "client", 1);
        unsetenv("NOTIFY_SOCKET");
        unsetenv("WATCHDOG_USEC");
}

/* The child's part of the fork. */
static void __attribute__((noreturn)) become_bfcd(const struct plan_bfcd *d, int listener, pid_t parent)
{
        char config[PATH_MAX];
        char *words[] = { "bfcd", "--no-memory", "--log-level", "error", "--config", config, NULL };

        path_of(d, "bfcd.yaml", config);
        if (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0 || getppid() != parent)
                _exit(EXIT_FAILURE);
        /* Not PASSED_FD itself, from which dup2() would not take close-on-exec. */
        listener = fcntl(listener, F_DUPFD_CLOEXEC, PASSED_FD + 1);
        if (listener < 0 || dup2(fileno(d->log), STDERR_FILENO) < 0 ||
            dup2(STDERR_FILENO, STDOUT_FILENO) < 0 || dup2(listener, PASSED_FD) < 0)
                _exit(EXIT_FAILURE);
        (void)setpgid(0, 0); /* a terminal's SIGINT is for this program, which ends it */
        set_variables();
        tools_become("bfcd", words);
        dprintf(STDERR_FILENO, "bfcd cannot be run: %s\n", strerror(errno));
        _exit(EXIT_FAILURE);
}

int plan_bfcd_start(const struct plan_place *place, uint64_t limit_bytes, struct plan_bfcd *ret)
{
        char config[PATH_MAX];
        pid_t parent = getpid();
        int listener = -1, r = make_folder(ret);

        if (r < 0)
                return r;
        path_of(ret, "bfcd.yaml", config);
        path_of(ret, "client", ret->socket);
        ret->log = tmpfile();
        r = ret->log ? plan_place_write(place, limit_bytes, ret->folder, config) : -errno;
        if (r == 0)
                r = listener = listen_at(ret->socket);
        if (r >= 0) {
                ret->pid = fork();
                if (ret->pid == 0)
                        become_bfcd(ret, listener, parent);
                r = ret->pid < 0 ? -errno : 0;
                close(listener);
        }
        if (r < 0) {
                remove_folder(ret);
                if (ret->log)
                        fclose(ret->log);
        }
        return r;
}

static char *read_line(FILE *log)
{
        char *line = NULL;
        size_t n = 0;

        rewind(log);
        if (getline(&line, &n, log) > 0) {
                line[strcspn(line, "\n")] = '\0';
                return line;
        }
        free(line);
        return NULL;
}

void plan_bfcd_end(struct plan_bfcd *d, char **ret_words)
{
        kill(d->pid, SIGKILL); /* it keeps nothing */
        while (waitpid(d->pid, NULL, 0) < 0 && errno == EINTR)
                ;
        if (ret_words)
                *ret_words = read_line(d->log);
        fclose(d->log);
        remove_folder(d);
}
