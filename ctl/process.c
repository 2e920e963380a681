/* Users, commands and units of processes: see process.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctl/process.h"

#include <fcntl.h>
#include <inttypes.h>
#include <pwd.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ctl/cmdline.h"

const char *process_user(uint64_t uid, char ret[PROCESS_TEXT_MAX])
{
        const struct passwd *user = uid < UINT32_MAX ? getpwuid((uid_t)uid) : NULL;

        if (user)
                snprintf(ret, PROCESS_TEXT_MAX, "%s", user->pw_name);
        else
                snprintf(ret, PROCESS_TEXT_MAX, "%" PRIu64, uid);
        return ret;
}

/* The first bytes of a file of the process; how many. */
static size_t read_file(uint64_t pid, const char *name, char *ret, size_t n_max)
{
        char path[64];
        ssize_t n;
        int fd;

        ret[0] = '\0';
        snprintf(path, sizeof(path), "/proc/%" PRIu64 "/%s", pid, name);
        fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
                return 0;
        n = read(fd, ret, n_max - 1);
        close(fd);
        ret[n > 0 ? n : 0] = '\0';
        return n > 0 ? (size_t)n : 0;
}

/* The arguments, each with its 0; how many bytes. */
static size_t read_arguments(uint64_t pid, uint64_t uid, char ret[PROCESS_TEXT_MAX])
{
        size_t n = cmdline_read(pid, uid, ret, PROCESS_TEXT_MAX);

        while (n > 0 && ret[n - 1] == '\0')
                n--;
        return n;
}

static const char *join(char *arguments, size_t n)
{
        for (size_t i = 0; i < n; i++)
                arguments[i] = arguments[i] ? arguments[i] : ' ';
        return arguments;
}

const char *process_command(uint64_t pid, uint64_t uid, char ret[PROCESS_TEXT_MAX])
{
        return join(ret, read_arguments(pid, uid, ret));
}

static bool ends_with(const char *text, size_t n, const char *end)
{
        return n > strlen(end) && strncmp(text + n - strlen(end), end, strlen(end)) == 0;
}

void process_cgroup(uint64_t pid, char ret[PROCESS_CGROUP_MAX])
{
        const char *path;
        size_t n;

        read_file(pid, "cgroup", ret, PROCESS_CGROUP_MAX);
        path = strncmp(ret, "0::/", 4) == 0 ? ret : strstr(ret, "\n0::/");
        path = path ? strchr(path, '/') : "";
        n = strcspn(path, "\n");
        memmove(ret, path, n);
        ret[n] = '\0';
}

const char *process_unit(uint64_t pid, char ret[PROCESS_TEXT_MAX])
{
        char group[PROCESS_CGROUP_MAX];
        const char *path = group;

        ret[0] = '\0';
        process_cgroup(pid, group);
        for (size_t n; *path; path += n) {
                path += *path == '/';
                n = strcspn(path, "/");
                if (ends_with(path, n, ".service") || ends_with(path, n, ".scope"))
                        snprintf(ret, PROCESS_TEXT_MAX, "%.*s", (int)n, path);
        }
        return ret;
}

const char *process_job(uint64_t pid, uint64_t uid, const char *name, char ret[PROCESS_TEXT_MAX])
{
        const char *folder;
        size_t n;

        process_unit(pid, ret);
        /* A login's scope and a user's manager do not tell one job from another. */
        if (ends_with(ret, strlen(ret), ".service") && strncmp(ret, "user@", 5) != 0)
                return ret;
        n = read_arguments(pid, uid, ret);
        if (n == 0) {
                snprintf(ret, PROCESS_TEXT_MAX, "%s", name);
                return ret;
        }
        folder = strrchr(ret, '/'); /* of the first argument, which may have blanks */
        join(ret, n);
        return folder ? folder + 1 : ret;
}

static bool has_user(uint64_t pid, uid_t *ret)
{
        char path[64];
        struct stat st;

        snprintf(path, sizeof(path), "/proc/%" PRIu64, pid);
        if (stat(path, &st) < 0)
                return false;
        *ret = st.st_uid;
        return true;
}

bool process_is_keeper(uint64_t pid, uint64_t daemon)
{
        char name[PROCESS_TEXT_MAX];
        uid_t user, of_daemon;

        read_file(pid, "comm", name, sizeof(name));
        return (strcmp(name, "bfcd-keeper\n") == 0 || strcmp(name, "bfcd-kept\n") == 0) &&
               has_user(pid, &user) && has_user(daemon, &of_daemon) && user == of_daemon;
}

const char *process_own_path(char ret[PATH_MAX])
{
        ssize_t n = readlink("/proc/self/exe", ret, PATH_MAX - 1);

        ret[n < 0 ? 0 : n] = '\0';
        return ret;
}
