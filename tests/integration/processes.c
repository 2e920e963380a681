/* See processes.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/integration/processes.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A file of /proc, without the last newline; zeros are blanks. "": it cannot be read. */
static const char *read_file(pid_t pid, pid_t tid, const char *name, char *ret, size_t n_ret)
{
        char path[96];
        ssize_t n = -1;
        int fd;

        snprintf(path, sizeof(path), "/proc/%d/task/%d/%s", (int)pid, (int)tid, name);
        fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd >= 0) {
                n = read(fd, ret, n_ret - 1);
                close(fd);
        }
        n = n < 0 ? 0 : n;
        for (ssize_t i = 0; i < n; i++)
                if (ret[i] == '\0')
                        ret[i] = ' ';
        while (n > 0 && (ret[n - 1] == '\n' || ret[n - 1] == ' '))
                n--;
        ret[n] = '\0';
        return ret;
}

/* The numbers behind the name in parentheses, which may hold anything. */
static char read_state(pid_t pid, pid_t tid, pid_t *ret_parent)
{
        char text[1024], state = '?';
        const char *end = strrchr(read_file(pid, tid, "stat", text, sizeof(text)), ')');

        *ret_parent = 0;
        if (end && sscanf(end, ") %c %d", &state, ret_parent) < 1)
                state = '?';
        return state;
}

static bool is_wanted(pid_t pid, const char *folder, pid_t manager)
{
        char command[4096];
        pid_t parent;

        (void)read_state(pid, pid, &parent);
        if (pid == manager || parent == manager)
                return true;
        read_file(pid, pid, "cmdline", command, sizeof(command));
        return strstr(command, folder) && strncmp(command, "bfcd", 4) == 0;
}

/* How long it ran, and how long it was ready to run and had no processor. */
static void print_time(pid_t pid, pid_t tid)
{
        unsigned long long ran_ns = 0, waited_ns = 0;
        char text[128];

        if (sscanf(read_file(pid, tid, "schedstat", text, sizeof(text)), "%llu %llu", &ran_ns, &waited_ns) ==
            2)
                fprintf(stderr, ", ran %llu ms, waited %llu ms for a processor", ran_ns / 1000000,
                        waited_ns / 1000000);
}

static void print_thread(pid_t pid, pid_t tid)
{
        char name[64], function[128], call[256], stack[4096];
        pid_t parent;

        fprintf(stderr, "  thread %d (%s) %c in %s, system call %s", (int)tid,
                read_file(pid, tid, "comm", name, sizeof(name)), read_state(pid, tid, &parent),
                read_file(pid, tid, "wchan", function, sizeof(function)),
                read_file(pid, tid, "syscall", call, sizeof(call)));
        print_time(pid, tid);
        fprintf(stderr, "\n%s\n", read_file(pid, tid, "stack", stack, sizeof(stack)));
}

static void print_process(pid_t pid)
{
        char path[160], command[1024];
        const struct dirent *entry;
        pid_t parent;
        DIR *threads;

        (void)read_state(pid, pid, &parent);
        fprintf(stderr, "---- process %d of %d: %s\n", (int)pid, (int)parent,
                read_file(pid, pid, "cmdline", command, sizeof(command)));
        snprintf(path, sizeof(path), "/proc/%d/task", (int)pid);
        threads = opendir(path);
        while (threads && (entry = readdir(threads)))
                if (atoi(entry->d_name) > 0)
                        print_thread(pid, atoi(entry->d_name));
        if (threads)
                closedir(threads);
        fflush(stderr);
        snprintf(
                path, sizeof(path),
                "timeout 60 gdb -nx -iex 'set auto-load no' --batch -p %d -ex 'thread apply all backtrace' >&2",
                (int)pid);
        (void)!system(path); /* where there is a gdb */
}

void processes_print(const char *folder, pid_t manager)
{
        DIR *all = opendir("/proc");
        const struct dirent *entry;
        double load = 0;

        if (getloadavg(&load, 1) == 1)
                fprintf(stderr, "load %.1f on %ld processors\n", load, sysconf(_SC_NPROCESSORS_ONLN));
        while (all && (entry = readdir(all)))
                if (atoi(entry->d_name) > 0 && is_wanted(atoi(entry->d_name), folder, manager))
                        print_process(atoi(entry->d_name));
        if (all)
                closedir(all);
}
