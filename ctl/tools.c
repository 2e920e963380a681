/* The commands that look back; see tools.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctl/tools.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ctl/table.h"

#define PROGRAM   "bfcd-tools"
#define MAX_WORDS 32

int tools_run(const struct invocation *i, const struct command *c, const char *const options[])
{
        const char *words[MAX_WORDS] = { PROGRAM, "--bfcctl" };
        char self[PATH_MAX], beside[PATH_MAX + sizeof("/" PROGRAM)];
        ssize_t n_self = readlink("/proc/self/exe", self, sizeof(self) - 1);
        size_t n = 2;

        if (n_self < 0) {
                fprintf(stderr, "bfcctl: /proc/self/exe cannot be read: %s\n", strerror(errno));
                return EXIT_REFUSED;
        }
        self[n_self] = '\0';
        words[n++] = self;
        if (i->socket) {
                words[n++] = "--socket";
                words[n++] = i->socket;
        }
        if (i->json)
                words[n++] = "--json";
        if (table_look.is_wide)
                words[n++] = "--wide";
        words[n++] = c->name;
        for (size_t k = 0; options[k] && n + 1 < MAX_WORDS; k += 2) {
                char *word; /* as "--since=-2h", where "-2h" alone would be an option */

                if (!options[k + 1])
                        continue;
                if (asprintf(&word, "%s=%s", options[k], options[k + 1]) < 0)
                        return command_finish(-ENOMEM);
                words[n++] = word;
        }
        snprintf(beside, sizeof(beside), "%.*s/" PROGRAM, (int)(strrchr(self, '/') - self), self);
        execv(beside, (char **)(uintptr_t)words); /* as in a build folder */
        execvp(PROGRAM, (char **)(uintptr_t)words);
        if (errno == ENOENT)
                fprintf(stderr,
                        "bfcctl: \"%s\" is a program of the Python package bfcd, which is not installed here "
                        "(Debian: python3-bfcd; or: pip install bfcd)\n",
                        c->name);
        else
                fprintf(stderr, "bfcctl: " PROGRAM " cannot be run: %s\n", strerror(errno));
        return EXIT_REFUSED;
}
