/* bfcctl top; see top.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctl/top.h"

#include <locale.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ctl/top_frame.h"
#include "proto/paths.h"

bool top_find_view(const char *name, enum top_view *ret)
{
        for (enum top_view v = 0; v < TOP_VIEWS; v++) {
                if (strcmp(top_view_name(v), name) == 0) {
                        *ret = v;
                        return true;
                }
        }
        return false;
}

static const char *monitor_socket(const char *option)
{
        const char *value = getenv("BFC_MONITOR_SOCKET");

        return option ? option : value && *value ? value : PATHS_MONITOR_SOCKET;
}

static int complain(const char *sentence)
{
        fprintf(stderr, "bfcctl: %s\n", sentence);
        return EXIT_FAILURE;
}

static int print_once(struct top *t, struct top_source *source)
{
        struct top_sample sample;
        struct top_frame frame;
        int r = top_source_read(source, t->view == TOP_SESSIONS, &sample);

        if (r < 0)
                return complain(source->ask.error);
        r = top_take(t, &sample);
        if (r == 0)
                r = top_draw(t, 0, TABLE_COLUMNS, &frame);
        if (r < 0)
                return complain("Out of memory.");
        r = top_frame_print(stdout, &frame);
        top_frame_end(&frame);
        if (r < 0 || fflush(stdout) != 0)
                return complain("Standard output cannot be written.");
        return EXIT_SUCCESS;
}

static int show(struct top *t, struct top_source *source, const char *socket)
{
        const char *error = "";
        int r;

        if (!isatty(STDOUT_FILENO) || !isatty(STDIN_FILENO)) {
                top_source_close(source);
                return complain("top needs a terminal. For text use: bfcctl top --once");
        }
        r = top_screen_run(t, source, socket, &error);
        return r < 0 ? complain(error) : EXIT_SUCCESS;
}

int top_run(const struct top_options *o)
{
        const char *socket = monitor_socket(o->socket);
        struct top_source source = { 0 };
        struct top t;
        int status;

        /* The only encoding of this program, as for its tables. */
        (void)setlocale(LC_CTYPE, "C.UTF-8");
        top_init(&t, o->view, o->interval_ms, o->is_wide);
        if (top_source_open(&source, socket) < 0)
                status = complain(source.ask.error);
        else if (o->is_once)
                status = print_once(&t, &source);
        else
                status = show(&t, &source, socket);
        top_source_close(&source);
        top_end(&t);
        return status;
}
