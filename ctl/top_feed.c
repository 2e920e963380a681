/* Samples for bfcctl top; see top_feed.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctl/top_feed.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "ctl/clock.h"
#include "ctl/process.h"
#include "ctl/show.h"

#define RETRY_MS 500u /* between attempts to connect */

/* ---- one sample -------------------------------------------------------------------- */

int top_source_open(struct top_source *s, const char *socket)
{
        int r = ask_open(&s->ask, socket, NULL);

        if (r < 0)
                return r;
        s->is_open = true;
        if (!s->ask.monitor) {
                snprintf(s->ask.error, sizeof(s->ask.error),
                         "%s is not the monitor socket. Set --socket or BFC_MONITOR_SOCKET to it.", socket);
                return -EACCES;
        }
        r = ask_list(&s->ask, BFCD__LIST__KIND__STATUS, &s->about);
        if (r == 0 && !s->nvml)
                (void)nvml_open(&s->nvml);
        return r;
}

static void disconnect(struct top_source *s)
{
        if (s->is_open)
                ask_close(&s->ask);
        s->is_open = false;
        s->about = list_free(s->about);
}

void top_source_close(struct top_source *s)
{
        disconnect(s);
        s->nvml = nvml_close(s->nvml);
}

/* Of all devices of the daemon. */
static int read_uses(const struct top_source *s, struct nvml_use **ret, size_t *ret_n)
{
        const Bfcd__Status *status = s->about->status;
        char(*texts)[TABLE_TEXT_MAX] = calloc(status->n_devices + 1, sizeof(*texts));
        const char **uuids = calloc(status->n_devices + 1, sizeof(*uuids));
        int r = texts && uuids ? 0 : -ENOMEM;
        size_t n = 0;

        for (size_t i = 0; r == 0 && i < status->n_devices; i++) {
                show_device_uuid(status->devices[i], texts[n]);
                uuids[n] = texts[n];
                n += *texts[n] != '\0';
        }
        if (r == 0)
                r = nvml_read(s->nvml, uuids, n, ret, ret_n);
        free(uuids);
        free(texts);
        return r;
}

static int compare_ids(const void *left, const void *right)
{
        const uint64_t *a = left, *b = right;

        return (*a > *b) - (*a < *b);
}

/* Processes on the devices that are neither a session's nor the daemon's nor a keeper's. A keeper can outlive the daemon
 * that started it. */
static int count_others(const struct top_source *s, struct top_sample *sample)
{
        const struct list *l = sample->list;
        uint64_t daemon = s->about->status->pid, *pids = calloc(l->n_sessions + 1, sizeof(*pids));

        if (!pids)
                return -ENOMEM;
        for (size_t i = 0; i < l->n_sessions; i++)
                pids[i] = l->sessions[i]->pid;
        qsort(pids, l->n_sessions, sizeof(*pids), compare_ids);
        for (size_t i = 0; i < sample->n_outside; i++) {
                const struct nvml_use *use = &sample->outside[i];

                if (use->pid == daemon || process_is_keeper(use->pid, daemon) ||
                    bsearch(&use->pid, pids, l->n_sessions, sizeof(*pids), compare_ids))
                        continue;
                sample->n_others++;
                if (__builtin_add_overflow(sample->bytes_others, use->n_bytes, &sample->bytes_others))
                        sample->bytes_others = UINT64_MAX;
        }
        free(pids);
        return 0;
}

static int fail_memory(struct top_source *s, struct top_sample *sample)
{
        top_sample_end(sample);
        snprintf(s->ask.error, sizeof(s->ask.error), "Out of memory.");
        return -ENOMEM;
}

int top_source_read(struct top_source *s, bool with_sessions, struct top_sample *ret)
{
        static const Bfcd__List__Kind kinds[] = { BFCD__LIST__KIND__PARTITIONS, BFCD__LIST__KIND__TENANTS,
                                                  BFCD__LIST__KIND__SESSIONS };
        struct top_sample sample = { .has_sessions = with_sessions };
        int r = ask_lists(&s->ask, kinds, with_sessions ? 3 : 2, &sample.list);

        if (r < 0)
                return r;
        list_leave_out(sample.list, s->ask.session_id);
        snprintf(sample.version, sizeof(sample.version), "%s", s->about->status->version);
        if (s->nvml && with_sessions) {
                r = read_uses(s, &sample.outside, &sample.n_outside);
                sample.has_outside = r == 0;
        }
        if (r == -ENOMEM || (sample.has_outside && count_others(s, &sample) < 0))
                return fail_memory(s, &sample);
        *ret = sample;
        return 0;
}

/* ---- samples all the time ------------------------------------------------------------ */

struct top_feed {
        pthread_t thread;
        pthread_mutex_t lock; /* of what follows, without the source, which is the thread's */
        pthread_cond_t wake;
        struct top_source source;
        const char *socket;
        struct top_sample sample;
        char trouble[1024];
        bool has_sample, is_stopped, wants_now, with_sessions;
        unsigned interval_ms;
        uint64_t asked_ms; /* 0: no question is running */
        int fd;
};

/* Unlocked, since the daemon may take its time. */
static int read_once(struct top_feed *f, bool with_sessions, struct top_sample *ret)
{
        int r = 0;

        if (!f->source.is_open)
                r = top_source_open(&f->source, f->socket);
        if (r == 0)
                r = top_source_read(&f->source, with_sessions, ret);
        if (r < 0)
                disconnect(&f->source);
        return r;
}

static void publish(struct top_feed *f, int r, struct top_sample *sample)
{
        f->asked_ms = 0;
        if (r < 0) {
                snprintf(f->trouble, sizeof(f->trouble), "%s", f->source.ask.error);
        } else {
                f->trouble[0] = '\0';
                if (f->has_sample)
                        top_sample_end(&f->sample);
                f->sample = *sample;
                f->has_sample = true;
        }
        (void)eventfd_write(f->fd, 1);
}

static void wait_until(struct top_feed *f, uint64_t until_ms)
{
        struct timespec until = { .tv_sec = (time_t)(until_ms / 1000),
                                  .tv_nsec = (long)(until_ms % 1000 * 1000000) };

        while (!f->is_stopped && !f->wants_now && clock_ms() < until_ms)
                (void)pthread_cond_timedwait(&f->wake, &f->lock, &until);
}

static void *run(void *userdata)
{
        struct top_feed *f = userdata;

        pthread_mutex_lock(&f->lock);
        while (!f->is_stopped) {
                struct top_sample sample = { 0 };
                bool with_sessions = f->with_sessions;
                uint64_t begin = clock_ms();
                int r;

                f->wants_now = false;
                f->asked_ms = begin;
                pthread_mutex_unlock(&f->lock);
                r = read_once(f, with_sessions, &sample);
                pthread_mutex_lock(&f->lock);
                publish(f, r, &sample);
                wait_until(f, begin + (r < 0 ? RETRY_MS : f->interval_ms));
        }
        pthread_mutex_unlock(&f->lock);
        return NULL;
}

static struct top_feed *feed_free(struct top_feed *f)
{
        top_source_close(&f->source);
        if (f->has_sample)
                top_sample_end(&f->sample);
        pthread_cond_destroy(&f->wake);
        pthread_mutex_destroy(&f->lock);
        if (f->fd >= 0)
                close(f->fd);
        free(f);
        return NULL;
}

int top_feed_start(struct top_source *source, const char *socket, unsigned interval_ms, bool with_sessions,
                   struct top_feed **ret)
{
        struct top_feed *f = calloc(1, sizeof(*f));
        pthread_condattr_t monotonic;
        int r;

        if (!f) {
                top_source_close(source);
                return -ENOMEM;
        }
        f->source = *source;
        *source = (struct top_source){ 0 };
        f->socket = socket;
        f->interval_ms = interval_ms;
        f->with_sessions = with_sessions;
        f->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        r = f->fd < 0 ? -errno : 0;
        pthread_mutex_init(&f->lock, NULL);
        pthread_condattr_init(&monotonic);
        pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
        pthread_cond_init(&f->wake, &monotonic);
        pthread_condattr_destroy(&monotonic);
        if (r == 0)
                r = -pthread_create(&f->thread, NULL, run, f);
        if (r < 0) {
                feed_free(f);
                return r;
        }
        *ret = f;
        return 0;
}

int top_feed_fd(const struct top_feed *f)
{
        return f->fd;
}

bool top_feed_take(struct top_feed *f, struct top_sample *ret, char ret_trouble[static 1024],
                   uint64_t *ret_silent_ms)
{
        eventfd_t n;
        bool has_sample;

        (void)eventfd_read(f->fd, &n);
        pthread_mutex_lock(&f->lock);
        has_sample = f->has_sample;
        if (has_sample)
                *ret = f->sample;
        f->has_sample = false;
        snprintf(ret_trouble, 1024, "%s", f->trouble);
        *ret_silent_ms = f->asked_ms ? clock_ms() - f->asked_ms : 0;
        pthread_mutex_unlock(&f->lock);
        return has_sample;
}

void top_feed_want(struct top_feed *f, unsigned interval_ms, bool with_sessions)
{
        pthread_mutex_lock(&f->lock);
        f->interval_ms = interval_ms;
        f->with_sessions = with_sessions;
        f->wants_now = true;
        pthread_cond_signal(&f->wake);
        pthread_mutex_unlock(&f->lock);
}

struct top_feed *top_feed_stop(struct top_feed *f)
{
        bool is_waiting;

        if (!f)
                return NULL;
        pthread_mutex_lock(&f->lock);
        f->is_stopped = true;
        is_waiting = f->asked_ms != 0;
        pthread_cond_signal(&f->wake);
        pthread_mutex_unlock(&f->lock);
        if (is_waiting) {
                pthread_detach(f->thread);
                return NULL;
        }
        pthread_join(f->thread, NULL);
        return feed_free(f);
}
