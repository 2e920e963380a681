/* stand-in: runs a daemon as the service manager would, by hand or from a script.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * usage: stand-in [--socket PATH] [--admin-socket PATH] [--max N] [--restart-ms N] FOLDER PROGRAM ARGUMENT...
 *
 * FOLDER is where NOTIFY_SOCKET goes. A line of standard input is an order; its end, or
 * "quit", ends all. Each order is answered by a line: "ok", what was asked for, or "error: ...".
 *   restart, kill      SIGTERM or SIGKILL, and wait for READY=1 of the next one
 *   stop, start        as systemctl does: stopped, nothing is kept
 *   hold, go           starts no other when one ends; starts one again
 *   signal N           only the signal
 *   count              of what is kept
 *   names              of what is kept, the newest first
 *   status             what is known of the daemon
 *   drop NAME          what is kept under it
 *   replace NAME PATH  by the file at this path */
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/manager/stand_in.h"

#define READY_MS 60000

static void answer(int r)
{
        if (r < 0)
                printf("error: %s\n", strerror(-r));
        else
                puts("ok");
}

static void tell_names(struct stand_in *s)
{
        char name[STAND_IN_NAME_BYTES];

        for (unsigned i = 0; stand_in_name(s, i, name) == 0; i++)
                printf("%s%s", i > 0 ? " " : "", name);
        putchar('\n');
}

static void tell_state(const struct stand_in_state *state)
{
        printf("pid %d, %u starts, %s, %u bad ends, %u kept, %u ignored, %u without a place: %s\n",
               (int)state->pid, state->n_starts, state->is_ready ? "ready" : "not ready", state->n_bad,
               state->n_stored, state->n_ignored, state->n_full, state->said);
}

static int start(struct stand_in *s)
{
        struct stand_in_state state;
        int r = stand_in_look(s, &state);

        if (r == 0)
                r = stand_in_hold(s, false);
        return r < 0 ? r : stand_in_wait_ready(s, state.n_starts + (state.pid == 0), READY_MS);
}

static int replace(struct stand_in *s, const char *name, const char *path)
{
        int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1, r;

        if (fd < 0)
                return path ? -errno : -EINVAL;
        r = stand_in_replace(s, name, fd);
        close(fd);
        return r;
}

/* False: the end. */
static bool obey(struct stand_in *s, char *line)
{
        char *verb = strtok(line, " \n"), *word = strtok(NULL, " \n"), *more = strtok(NULL, " \n");
        struct stand_in_state state;

        if (!verb)
                return true;
        if (stand_in_look(s, &state) < 0 || strcmp(verb, "quit") == 0)
                return false;
        if (strcmp(verb, "restart") == 0)
                answer(stand_in_restart(s, SIGTERM, READY_MS));
        else if (strcmp(verb, "kill") == 0)
                answer(stand_in_restart(s, SIGKILL, READY_MS));
        else if (strcmp(verb, "stop") == 0)
                answer(stand_in_stop(s) < 0 ? -EIO : stand_in_wait_end(s, READY_MS));
        else if (strcmp(verb, "start") == 0)
                answer(start(s));
        else if (strcmp(verb, "hold") == 0 || strcmp(verb, "go") == 0)
                answer(stand_in_hold(s, verb[0] == 'h'));
        else if (strcmp(verb, "signal") == 0 && word)
                answer(stand_in_signal(s, atoi(word)));
        else if (strcmp(verb, "count") == 0)
                printf("%u\n", state.n_stored);
        else if (strcmp(verb, "names") == 0)
                tell_names(s);
        else if (strcmp(verb, "status") == 0)
                tell_state(&state);
        else if (strcmp(verb, "drop") == 0 && word)
                answer(stand_in_drop(s, word));
        else if (strcmp(verb, "replace") == 0 && word)
                answer(replace(s, word, more));
        else
                puts("error: no such order");
        return true;
}

static _Noreturn void usage(void)
{
        fputs("usage: stand-in [--socket PATH] [--admin-socket PATH] [--max N] [--restart-ms N]\n"
              "                FOLDER PROGRAM ARGUMENT...\n",
              stderr);
        exit(2);
}

int main(int argc, char **argv)
{
        static const struct option longs[] = {
                { "socket", required_argument, NULL, 's' },
                { "admin-socket", required_argument, NULL, 'a' },
                { "max", required_argument, NULL, 'm' },
                { "restart-ms", required_argument, NULL, 'r' },
                { 0 },
        };
        struct stand_in_options o = { .max_stored = 8192 };
        char notify[108], line[512];
        struct stand_in *s = NULL;
        int c, r;

        while ((c = getopt_long(argc, argv, "+", longs, NULL)) != -1) {
                if (c == 's')
                        o.socket = optarg;
                else if (c == 'a')
                        o.admin_socket = optarg;
                else if (c == 'm')
                        o.max_stored = (unsigned)atoi(optarg);
                else if (c == 'r')
                        o.restart_ms = (unsigned)atoi(optarg);
                else
                        usage();
        }
        if (argc - optind < 2 ||
            snprintf(notify, sizeof(notify), "%s/notify", argv[optind]) >= (int)sizeof(notify))
                usage();
        o.notify = notify;
        o.argv = (const char *const *)(argv + optind + 1);
        r = stand_in_start(&o, &s);
        if (r < 0) {
                fprintf(stderr, "stand-in: %s\n", strerror(-r));
                return EXIT_FAILURE;
        }
        setvbuf(stdout, NULL, _IOLBF, 0);
        while (fgets(line, sizeof(line), stdin) && obey(s, line))
                ;
        stand_in_end(s);
        return EXIT_SUCCESS;
}
