/* bfcctl tensorboard; see tensorboard.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A step is one list of tenants. Its events have the same wall time and are written together. A step in which the
 * daemon cannot be reached is left out: a curve has a gap there, and no zeros. Steps continue behind those of the
 * folder's other files, because TensorBoard makes one curve of all files of a folder. */
#include "ctl/tensorboard.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ctl/ask.h"
#include "ctl/clock.h"
#include "ctl/event_file.h"
#include "ctl/progress.h"
#include "ctl/text.h"

#define RETRY_MS   1000u /* at most, between two attempts to reach the daemon */
#define SHOW_MS    200u  /* between two updates of the progress */
#define WORDS      "tensorboard"
#define WORDS_WAIT "tensorboard, waiting for bfcd"
#define N_VALUES   (sizeof(values) / sizeof(values[0]))
#define NAME_CHARS "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-."

/* By the names that TensorFlow gives its allocator's statistics. */
static const struct {
        const char *name;
        size_t offset;
} values[] = {
        { "BytesInUse", offsetof(Bfcd__Statistics, bytes_in_use) },
        { "MaxBytesInUse", offsetof(Bfcd__Statistics, peak_bytes_in_use) },
        { "BytesReserved", offsetof(Bfcd__Statistics, bytes_reserved) },
        { "BytesLimit", offsetof(Bfcd__Statistics, bytes_limit) },
        { "NumAllocs", offsetof(Bfcd__Statistics, num_allocs) },
};

struct writer {
        const struct tensorboard_options *options;
        struct event_file *file;
        struct ask ask;
        bool is_away; /* and that was said */
        uint64_t n_steps;
        int64_t first_step;
        struct progress progress;
        char error[EVENT_FILE_ERROR_MAX];
};

static volatile sig_atomic_t is_stopped;

/* ---- time and signals --------------------------------------------------------------- */

static void on_signal(int signal)
{
        (void)signal;
        is_stopped = 1;
}

/* A second signal ends the process at once, as by default: it may wait for a daemon that does not answer. */
static void watch_signals(void)
{
        struct sigaction action = { .sa_handler = on_signal, .sa_flags = (int)SA_RESETHAND };

        sigemptyset(&action.sa_mask);
        sigaction(SIGINT, &action, NULL);
        sigaction(SIGTERM, &action, NULL);
        signal(SIGXFSZ, SIG_IGN); /* write() fails instead */
}

static void block_signals(sigset_t *ret_before)
{
        sigset_t set;

        sigemptyset(&set);
        sigaddset(&set, SIGINT);
        sigaddset(&set, SIGTERM);
        sigprocmask(SIG_BLOCK, &set, ret_before);
}

static double wall_time(void)
{
        struct timespec now;

        clock_gettime(CLOCK_REALTIME, &now);
        return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* Until this time, or a signal. */
static void sleep_until(struct writer *w, uint64_t until_ms)
{
        uint64_t now_ms;
        sigset_t before;

        block_signals(&before);
        while (!is_stopped && (now_ms = clock_ms()) < until_ms) {
                uint64_t ms = until_ms - now_ms;
                struct timespec pause;

                if (progress_is_shown(&w->progress))
                        ms = ms < SHOW_MS ? ms : SHOW_MS;
                pause = (struct timespec){ .tv_sec = (time_t)(ms / 1000),
                                           .tv_nsec = (long)(ms % 1000) * 1000000 };
                (void)ppoll(NULL, 0, &pause, &before);
                progress_set(&w->progress, w->n_steps, w->options->n_steps);
        }
        sigprocmask(SIG_SETMASK, &before, NULL);
}

/* ---- the daemon ------------------------------------------------------------------------ */

static void begin_progress(struct writer *w)
{
        progress_begin(&w->progress, NULL, w->is_away ? WORDS_WAIT : WORDS,
                       w->is_away ? 0 : w->options->n_steps);
}

static void say_away(struct writer *w)
{
        if (w->is_away)
                return;
        w->is_away = true;
        progress_end(&w->progress);
        fprintf(stderr, "bfcctl: %s Waiting for it.\n", w->ask.error);
        begin_progress(w);
}

static void say_back(struct writer *w)
{
        if (!w->is_away)
                return;
        w->is_away = false;
        progress_end(&w->progress);
        fputs("bfcctl: bfcd answers again.\n", stderr);
        begin_progress(w);
}

/* The daemon is being restarted, or has too many connections: an operator has nothing to correct here. */
static bool may_pass(int r)
{
        return r == -ENOENT || r == -ECONNREFUSED || r == -ECONNRESET || r == -EPIPE || r == -EAGAIN ||
               r == -ETIMEDOUT;
}

/* A connection for each step: the daemon has few places for monitors, and may be restarted in between. */
static int ask_tenants(struct writer *w, struct list **ret)
{
        int r = ask_open(&w->ask, w->options->socket, w->options->own_tenant);

        if (r == 0)
                r = ask_list(&w->ask, BFCD__LIST__KIND__TENANTS, ret);
        ask_close(&w->ask);
        return r;
}

/* ---- events ------------------------------------------------------------------------------ */

static int put_name(char *tag, size_t *n, const char *name)
{
        for (; *name; name++) {
                if (*n + 4 >= TENSORBOARD_TAG_MAX)
                        return -EMSGSIZE;
                if (strchr(NAME_CHARS, *name))
                        tag[(*n)++] = *name;
                else
                        *n += (size_t)sprintf(tag + *n, "%%%02X", (unsigned char)*name);
        }
        tag[*n] = '\0';
        return 0;
}

int tensorboard_tag(const char *partition, const char *tenant, const char *name,
                    char ret[static TENSORBOARD_TAG_MAX])
{
        const char *const parts[] = { partition, tenant, name };
        char tag[TENSORBOARD_TAG_MAX];
        size_t n = 0;

        for (size_t i = 0; i < 3; i++) {
                if (i > 0)
                        tag[n++] = '/';
                if (put_name(tag, &n, parts[i]) < 0)
                        return -EMSGSIZE;
        }
        strcpy(ret, tag);
        return 0;
}

static int add_row(struct writer *w, const Bfcd__TenantRow *row, double time)
{
        Tensorboard__Event event = TENSORBOARD__EVENT__INIT;
        Tensorboard__Summary summary = TENSORBOARD__SUMMARY__INIT;
        Tensorboard__Summary__Value value[N_VALUES], *pointers[N_VALUES];
        char tags[N_VALUES][TENSORBOARD_TAG_MAX];

        if (!row->stats)
                return 0;
        for (size_t i = 0; i < N_VALUES; i++) {
                const char *at = (const char *)row->stats + values[i].offset;
                int r = tensorboard_tag(row->partition, row->tenant, values[i].name, tags[i]);

                if (r < 0)
                        return r;
                tensorboard__summary__value__init(&value[i]);
                value[i].tag = tags[i];
                value[i].value_case = TENSORBOARD__SUMMARY__VALUE__VALUE_SIMPLE_VALUE;
                value[i].simple_value = (float)*(const uint64_t *)(const void *)at;
                pointers[i] = &value[i];
        }
        summary.n_value = N_VALUES;
        summary.value = pointers;
        event.wall_time = time;
        event.step = w->first_step + (int64_t)w->n_steps;
        event.what_case = TENSORBOARD__EVENT__WHAT_SUMMARY;
        event.summary = &summary;
        return event_file_add(w->file, &event);
}

static int fail_tenant(struct writer *w)
{
        char *name = text_escape(w->options->tenant);

        snprintf(w->error, sizeof(w->error), "There is no tenant '%s', or %s does not show it.",
                 name ? name : "", w->options->socket);
        free(name);
        return -EINVAL;
}

/* Signals wait, so that none ends the process in the middle of a record. */
static int write_step(struct writer *w, const struct list *l, double time)
{
        bool is_found = !w->options->tenant;
        sigset_t before;
        int r = 0;

        for (size_t i = 0; r == 0 && i < l->n_tenants; i++) {
                if (w->options->tenant && strcmp(l->tenants[i]->tenant, w->options->tenant) != 0)
                        continue;
                is_found = true;
                r = add_row(w, l->tenants[i], time);
        }
        if (r < 0)
                snprintf(w->error, sizeof(w->error), "A step cannot be written: %s.", strerror(-r));
        else if (!is_found && w->n_steps == 0) /* later a reload may remove it for a while */
                r = fail_tenant(w);
        if (r < 0)
                return r;
        block_signals(&before);
        r = event_file_flush(w->file, w->error);
        sigprocmask(SIG_SETMASK, &before, NULL);
        if (r == 0)
                w->n_steps++;
        return r;
}

/* 0: a step was written. > 0: the daemon is away. */
static int take_step(struct writer *w)
{
        struct list *l;
        int r = ask_tenants(w, &l);

        if (r < 0 && may_pass(r)) {
                say_away(w);
                return 1;
        }
        if (r < 0) {
                snprintf(w->error, sizeof(w->error), "%s", w->ask.error);
                return r;
        }
        say_back(w);
        r = write_step(w, l, wall_time());
        list_free(l);
        return r;
}

/* ---- the command --------------------------------------------------------------------------- */

static int take_steps(struct writer *w)
{
        uint64_t interval_ms = w->options->interval_ms, next_ms = clock_ms(), now_ms;
        int r = 0;

        while (r >= 0 && !is_stopped && (w->options->n_steps == 0 || w->n_steps < w->options->n_steps)) {
                r = take_step(w);
                if (r < 0 || (r == 0 && w->n_steps == w->options->n_steps))
                        break;
                now_ms = clock_ms();
                if (r > 0)
                        next_ms = now_ms + (interval_ms < RETRY_MS ? interval_ms : RETRY_MS);
                else
                        next_ms = next_ms + interval_ms > now_ms ? next_ms + interval_ms : now_ms;
                sleep_until(w, next_ms);
        }
        return r < 0 ? r : 0;
}

/* Empties the terminal's line and prints what happened. */
static int print_result(struct writer *w, const char *path, int r)
{
        progress_end(&w->progress);
        if (r < 0) {
                fprintf(stderr, "bfcctl: %s\n", w->error);
                return EXIT_FAILURE;
        }
        printf("%" PRIu64 " step%s in %s\n", w->n_steps, w->n_steps == 1 ? "" : "s", path);
        if (fflush(stdout) == 0)
                return EXIT_SUCCESS;
        fputs("bfcctl: Standard output cannot be written.\n", stderr);
        return EXIT_FAILURE;
}

int tensorboard_run(const struct tensorboard_options *options)
{
        struct writer w = { .options = options };
        char close_error[EVENT_FILE_ERROR_MAX], *path = NULL;
        int r, closed;

        watch_signals();
        w.first_step = event_file_last_step(options->logdir) + 1;
        r = event_file_create(options->logdir, wall_time(), &w.file, w.error);
        if (r < 0)
                return print_result(&w, "", r);
        path = text_escape(event_file_path(w.file));
        begin_progress(&w);
        r = take_steps(&w);
        closed = event_file_close(w.file, close_error);
        if (r == 0 && closed < 0) {
                memcpy(w.error, close_error, sizeof(w.error));
                r = closed;
        }
        r = print_result(&w, path ? path : options->logdir, r);
        free(path);
        return r;
}
