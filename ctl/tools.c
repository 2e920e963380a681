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

#include "ctl/process.h"

#define PROGRAM   "bfcd-tools"
#define MAX_WORDS 32

static void become(char *const words[])
{
        char self[PATH_MAX], path[PATH_MAX + sizeof(PROGRAM)];

        if (*process_own_path(self)) {
                snprintf(path, sizeof(path), "%.*s/" PROGRAM, (int)(strrchr(self, '/') - self), self);
                execv(path, words);
        }
        execvp(PROGRAM, words);
}

int tools_exec(const char *who, const char *what, const struct tools_words *words, FILE *in)
{
        char *all[MAX_WORDS] = { (char[]){ PROGRAM } };
        size_t n = 1, n_fixed;

        for (const char *const *word = words->words; *word && n + 1 < MAX_WORDS; word++)
                all[n++] = (char *)(uintptr_t)*word;
        n_fixed = n;
        errno = 0;
        for (const char *const *o = words->options; o[0] && n + 1 < MAX_WORDS; o += 2)
                if (o[1] &&
                    asprintf(&all[n], "%s=%s", o[0], o[1]) >= 0) /* also of a value that begins with "-" */
                        n++;
        all[n] = NULL;
        if (errno != ENOMEM &&
            (!in || (fflush(in) == 0 && fseek(in, 0, SEEK_SET) == 0 && dup2(fileno(in), STDIN_FILENO) >= 0)))
                become(all);
        if (errno == ENOENT)
                fprintf(stderr,
                        "%s: \"%s\" is in the Python package bfcd, which is not installed here (Debian: python3-bfcd; "
                        "or in the sources: pip install ./python)\n",
                        who, what);
        else
                fprintf(stderr, "%s: " PROGRAM " cannot be run: %s\n", who, strerror(errno));
        while (n > n_fixed)
                free(all[--n]);
        return EXIT_FAILURE;
}

int tools_call(const char *who, const char *what, const struct tools_words *words, FILE *in, FILE *out)
{
        int status;
        pid_t pid;

        if (fflush(in) != 0 || fflush(stdout) != 0)
                return -errno;
        pid = fork();
        if (pid < 0)
                return -errno;
        if (pid == 0) {
                if (out && dup2(fileno(out), STDOUT_FILENO) < 0)
                        _exit(EXIT_FAILURE);
                _exit(tools_exec(who, what, words, in));
        }
        while (waitpid(pid, &status, 0) < 0)
                if (errno != EINTR)
                        return -errno;
        if (out)
                rewind(out);
        return WIFEXITED(status) ? WEXITSTATUS(status) : EXIT_FAILURE;
}
