/* Keepers without a bfcd; see orphans.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "keeper/orphans.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static int64_t now_ms(void)
{
        struct timespec now = { 0 };

        clock_gettime(CLOCK_MONOTONIC, &now);
        return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* *ret_name: 15 bytes at most. false: there is no such process. */
static bool read_stat(int pid, char ret_name[static 16], int *ret_parent)
{
        char path[32];
        FILE *f;
        bool is;

        snprintf(path, sizeof(path), "/proc/%d/stat", pid);
        f = fopen(path, "re");
        if (!f)
                return false;
        is = fscanf(f, "%*d (%15[^)]) %*c %d", ret_name, ret_parent) == 2;
        fclose(f);
        return is;
}

/* Its parent is now what takes over processes whose parent has ended. */
static bool is_orphan(int pid)
{
        char name[16];
        int parent, unused;

        if (!read_stat(pid, name, &parent) || strcmp(name, "bfcd-keeper") != 0 || parent == getppid())
                return false;
        return !read_stat(parent, name, &unused) || strncmp(name, "bfcd", strlen("bfcd")) != 0;
}

static void await(int pid, int64_t end_ms)
{
        struct pollfd process = { .fd = (int)syscall(SYS_pidfd_open, pid, 0), .events = POLLIN };
        int64_t left_ms = end_ms - now_ms();

        if (process.fd < 0)
                return;
        if (is_orphan(pid) && left_ms > 0 && poll(&process, 1, (int)left_ms) == 0)
                fprintf(stderr,
                        "bfcd-keeper: process %d, of a bfcd that has ended, still runs: its memory looks like that of others\n",
                        pid);
        close(process.fd);
}

void keeper_await_orphans(int timeout_ms)
{
        int64_t end_ms = now_ms() + timeout_ms;
        DIR *proc = opendir("/proc");
        const struct dirent *e;
        struct stat st;

        while (proc && (e = readdir(proc)))
                if (isdigit((unsigned char)e->d_name[0]) && fstatat(dirfd(proc), e->d_name, &st, 0) == 0 &&
                    st.st_uid == geteuid() && is_orphan(atoi(e->d_name)))
                        await(atoi(e->d_name), end_ms);
        if (proc)
                closedir(proc);
}
