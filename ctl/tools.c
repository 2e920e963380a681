/* The program that looks back; see tools.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctl/tools.h"

#include <errno.h>
#include <limits.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define PROGRAM   "bfcd-tools"
#define MAX_WORDS 32

char *tools_option(const char *name, const char *value)
{
        char *ret;

        return asprintf(&ret, "%s=%s", name, value) < 0 ? NULL : ret;
}

void tools_become(const char *program, char *const words[])
{
        static const char *const folders[] = { "", "/../sbin" };
        char self[PATH_MAX], path[PATH_MAX + 64];
        ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);

        for (size_t i = 0; n > 0 && i < sizeof(folders) / sizeof(folders[0]); i++) {
                self[n] = '\0';
                snprintf(path, sizeof(path), "%.*s%s/%s", (int)(strrchr(self, '/') - self), self, folders[i],
                         program);
                execv(path, words);
        }
        execvp(program, words);
}

int tools_exec(const char *who, const char *what, const char *const words[])
{
        char *all[MAX_WORDS] = { (char[]){ PROGRAM } };

        for (size_t i = 0; words[i] && i + 2 < MAX_WORDS; i++)
                all[i + 1] = (char *)(uintptr_t)words[i];
        tools_become(PROGRAM, all);
        if (errno == ENOENT)
                fprintf(stderr,
                        "%s: \"%s\" is in the Python package bfcd, which is not installed here (Debian: python3-bfcd; "
                        "or in the sources: pip install ./python)\n",
                        who, what);
        else
                fprintf(stderr, "%s: " PROGRAM " cannot be run: %s\n", who, strerror(errno));
        return EXIT_FAILURE;
}

int tools_call(const char *who, const char *what, const char *const words[], FILE *in, FILE *out)
{
        int status;
        pid_t pid;

        if (fflush(in) != 0 || fseek(in, 0, SEEK_SET) != 0 || fflush(stdout) != 0)
                return -errno;
        pid = fork();
        if (pid < 0)
                return -errno;
        if (pid == 0) {
                if (dup2(fileno(in), STDIN_FILENO) < 0 || (out && dup2(fileno(out), STDOUT_FILENO) < 0))
                        _exit(EXIT_FAILURE);
                _exit(tools_exec(who, what, words));
        }
        while (waitpid(pid, &status, 0) < 0)
                if (errno != EINTR)
                        return -errno;
        if (out)
                rewind(out);
        return WIFEXITED(status) ? WEXITSTATUS(status) : EXIT_FAILURE;
}
