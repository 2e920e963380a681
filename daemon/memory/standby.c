/* Standby memory; see standby.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/standby.h"

#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>

#include "daemon/base/clock.h"
#include "daemon/base/fd_reserve.h"
#include "daemon/base/number.h"

#define N_SIZES  STANDBY_SIZES
#define PAUSE_MS 10000u

struct spare {
        SLIST_ENTRY(spare) link;
        struct device_extent memory;
};
SLIST_HEAD(spare_list, spare);

struct standby {
        struct device *device;
        struct worker *worker;
        struct device_supply supply;
        uint64_t small_extent_bytes;
        struct worker_lane lane;
        struct worker_job job;
        bool is_submitted;     /* the loop's */
        pthread_mutex_t mutex; /* guards what follows */
        pthread_cond_t moved;
        uint64_t goal[N_SIZES];
        uint64_t goal_bytes;
        struct spare_list spares[N_SIZES];
        uint64_t n_spares[N_SIZES];
        uint64_t n_bytes;                 /* of all spares */
        uint64_t moving_bytes;            /* of one that the job makes or destroys */
        bool is_dropping;                 /* all of them are destroyed by standby_drop() */
        uint64_t room_bytes;              /* of all consumers */
        _Atomic uint64_t paused_until_ms; /* 0: not since the start; read without the mutex, too */
        uint64_t n_drops;
};

/* ---- the goal ----------------------------------------------------------------- */

/* Adds extents to ret, by size, the smallest first: of each zone at most as many as it has, and for arenas that have
 * begun (is_next) as they lack. Returns the bytes that remain of n_bytes. smallest_bytes: the first of the sizes. */
static uint64_t fill_goal(const struct standby_goal *goal, bool is_next, uint64_t n_bytes,
                          uint64_t smallest_bytes, uint64_t ret[static N_SIZES])
{
        const struct extent_sizes *sizes = &goal->sizes;
        uint64_t size = smallest_bytes;

        for (unsigned i = 0; i < N_SIZES && size <= sizes->extent_bytes; i++, size *= 2) {
                uint64_t n = n_bytes / size;

                if (size < sizes->small_extent_bytes)
                        continue;
                if (size < sizes->extent_bytes)
                        n = min_u64(n, excess_u64(sizes->extents_per_zone, ret[i]));
                if (is_next)
                        n = min_u64(n, goal->n_next[i]);
                ret[i] += n;
                n_bytes -= n * size;
        }
        return n_bytes;
}

/* By size; returns the bytes. There are never more extents than for arenas that begin. */
static uint64_t count_goal(const struct standby_goal *goal, uint64_t smallest_bytes,
                           uint64_t ret[static N_SIZES])
{
        uint64_t n_large = goal->n_bytes / 2 / goal->sizes.extent_bytes, next_bytes, large = 0;
        uint64_t rest = goal->n_bytes - n_large * goal->sizes.extent_bytes;

        memset(ret, 0, N_SIZES * sizeof(ret[0]));
        next_bytes = !goal->has_begun ? 0 : goal->has_unbegun ? rest / 2 : rest;
        rest -= next_bytes;
        rest += fill_goal(goal, true, next_bytes, smallest_bytes, ret);
        rest = fill_goal(goal, false, rest, smallest_bytes, ret);
        while (large + 1 < N_SIZES && smallest_bytes << large < goal->sizes.extent_bytes)
                large++;
        ret[large] += n_large;
        return goal->n_bytes - rest;
}

uint64_t standby_n_extents(const struct standby_goal *goal)
{
        uint64_t counts[N_SIZES], n = 0;

        (void)count_goal(goal, goal->sizes.small_extent_bytes, counts);
        for (unsigned i = 0; i < N_SIZES; i++)
                n += counts[i];
        return n;
}

static uint64_t size_bytes(const struct standby *s, unsigned size)
{
        return s->small_extent_bytes << size;
}

/* N_SIZES: there are none of that size. */
static unsigned size_of(const struct standby *s, uint64_t n_bytes)
{
        unsigned i = 0;

        while (i < N_SIZES && size_bytes(s, i) != n_bytes)
                i++;
        return i;
}

static uint64_t most_bytes(const struct standby *s)
{
        return min_u64(s->goal_bytes, s->room_bytes);
}

/* A size of which there is too much; N_SIZES: none. The largest first: the room may be enough for small
 * ones. */
static unsigned size_to_drop(const struct standby *s)
{
        bool is_too_much = s->n_bytes + s->moving_bytes > most_bytes(s);

        for (unsigned i = N_SIZES; i-- > 0;)
                if (s->n_spares[i] > s->goal[i] || (is_too_much && s->n_spares[i] > 0))
                        return i;
        return N_SIZES;
}

/* The smallest that is missing, if there is room for it; whether it is paused does not matter. */
static unsigned size_to_make(const struct standby *s)
{
        for (unsigned i = 0; i < N_SIZES; i++)
                if (s->n_spares[i] < s->goal[i])
                        return s->n_bytes + s->moving_bytes + size_bytes(s, i) <= most_bytes(s) ? i : N_SIZES;
        return N_SIZES;
}

static bool is_paused(const struct standby *s)
{
        return s->paused_until_ms > 0 && clock_ms() < s->paused_until_ms;
}

static bool has_work(const struct standby *s)
{
        return size_to_drop(s) < N_SIZES || (!is_paused(s) && size_to_make(s) < N_SIZES);
}

/* ---- spares ------------------------------------------------------------------ */

static void put_spare(struct standby *s, unsigned size, struct spare *spare)
{
        SLIST_INSERT_HEAD(&s->spares[size], spare, link);
        s->n_spares[size]++;
        s->n_bytes += spare->memory.n_bytes;
}

static struct spare *take_spare(struct standby *s, unsigned size)
{
        struct spare *spare = SLIST_FIRST(&s->spares[size]);

        SLIST_REMOVE_HEAD(&s->spares[size], link);
        s->n_spares[size]--;
        s->n_bytes -= spare->memory.n_bytes;
        return spare;
}

/* Smallest first: a growth makes its extents in this order. Returns the bytes. */
static uint64_t take_spares(struct standby *s, uint64_t n_bytes, struct spare_list *ret)
{
        uint64_t before = s->n_bytes;

        for (unsigned i = 0; i < N_SIZES; i++) {
                while (s->n_spares[i] > 0 && before - s->n_bytes < n_bytes) {
                        struct spare *spare = take_spare(s, i);

                        SLIST_INSERT_HEAD(ret, spare, link);
                }
        }
        return before - s->n_bytes;
}

/* This and the next without the mutex. */
static void destroy_spare(struct standby *s, struct spare *spare)
{
        uint64_t begun_ns = clock_ns();
        int r = device_destroy(s->device, &spare->memory);

        worker_note_call(s->worker, WORKER_DESTROYS, begun_ns, r < 0);
        free(spare);
}

static void destroy_spares(struct standby *s, struct spare_list *spares)
{
        struct spare *spare;

        while ((spare = SLIST_FIRST(spares))) {
                SLIST_REMOVE_HEAD(spares, link);
                destroy_spare(s, spare);
        }
}

bool standby_take(struct standby *s, const struct device_supply *supply, enum device_share share,
                  uint64_t n_bytes, struct device_extent *ret)
{
        struct spare_list dropped = SLIST_HEAD_INITIALIZER(dropped);
        struct spare *spare = NULL;
        uint64_t over;
        unsigned size;

        if (!s || share != DEVICE_SHARE_FD || supply->is_bound != s->supply.is_bound ||
            supply->node != s->supply.node)
                return false;
        pthread_mutex_lock(&s->mutex);
        size = size_of(s, n_bytes);
        over = s->n_bytes + s->moving_bytes;
        over -= min_u64(over, s->room_bytes);
        if (size < N_SIZES && s->n_spares[size] > 0)
                spare = take_spare(s, size);
        else if (over > 0)
                (void)take_spares(s, min_u64(over, n_bytes), &dropped);
        pthread_mutex_unlock(&s->mutex);
        destroy_spares(s, &dropped);
        if (!spare)
                return false;
        *ret = spare->memory;
        free(spare);
        return true;
}

bool standby_may_help(int error)
{
        return error == -ENOMEM || error == -ENOBUFS || error == -EMFILE;
}

uint64_t standby_n_drops(struct standby *s)
{
        uint64_t n;

        if (!s)
                return 0;
        pthread_mutex_lock(&s->mutex);
        n = s->n_drops;
        pthread_mutex_unlock(&s->mutex);
        return n;
}

static void pause_now(struct standby *s)
{
        s->paused_until_ms = clock_ms() + PAUSE_MS;
}

bool standby_drop(struct standby *s, uint64_t n_drops)
{
        struct spare_list dropped = SLIST_HEAD_INITIALIZER(dropped);
        bool has_dropped;

        if (!s)
                return false;
        pthread_mutex_lock(&s->mutex);
        pause_now(s);
        while (s->moving_bytes > 0 || s->is_dropping) /* one that is being made is destroyed then */
                pthread_cond_wait(&s->moved, &s->mutex);
        if (take_spares(s, UINT64_MAX, &dropped) > 0) {
                s->is_dropping = true;
                pthread_mutex_unlock(&s->mutex);
                destroy_spares(s, &dropped);
                pthread_mutex_lock(&s->mutex);
                s->is_dropping = false;
                s->n_drops++;
                pthread_cond_broadcast(&s->moved);
        }
        has_dropped = s->n_drops != n_drops;
        pthread_mutex_unlock(&s->mutex);
        return has_dropped;
}

/* ---- the job ------------------------------------------------------------------ */

/* Of this size; it counts in moving_bytes. Without the mutex. */
static struct spare *make_spare(struct standby *s, unsigned size)
{
        struct spare *spare = malloc(sizeof(*spare));
        uint64_t begun_ns;
        int r;

        if (!spare)
                return NULL;
        spare->memory = DEVICE_EXTENT_EMPTY;
        begun_ns = clock_ns();
        r = device_make_of(s->device, &s->supply, DEVICE_SHARE_FD, size_bytes(s, size), &spare->memory);
        worker_note_call(s->worker, WORKER_MAKES, begun_ns, r < 0);
        if (r < 0) {
                free(spare);
                return NULL;
        }
        if (!fd_reserve_has(spare->memory.fd))
                return spare;
        destroy_spare(s, spare);
        return NULL;
}

/* This and the next with the mutex, which is released meanwhile. */
static void make_one(struct standby *s, unsigned size)
{
        struct spare *spare;

        s->moving_bytes = size_bytes(s, size);
        pthread_mutex_unlock(&s->mutex);
        spare = make_spare(s, size);
        pthread_mutex_lock(&s->mutex);
        if (spare && is_paused(s)) {
                pthread_mutex_unlock(&s->mutex);
                destroy_spare(s, spare);
                pthread_mutex_lock(&s->mutex);
                s->n_drops++;
        } else if (spare) {
                put_spare(s, size, spare);
        } else {
                pause_now(s);
        }
        s->moving_bytes = 0;
        pthread_cond_broadcast(&s->moved);
}

static void drop_one(struct standby *s, unsigned size)
{
        struct spare *spare = take_spare(s, size);

        s->moving_bytes = spare->memory.n_bytes;
        pthread_mutex_unlock(&s->mutex);
        destroy_spare(s, spare);
        pthread_mutex_lock(&s->mutex);
        s->moving_bytes = 0;
        pthread_cond_broadcast(&s->moved);
}

/* On the worker, an extent a turn. */
static void standby_run(struct worker_job *job)
{
        struct standby *s = (struct standby *)((char *)job - offsetof(struct standby, job));

        if (__atomic_load_n(&s->device->is_ending, __ATOMIC_RELAXED))
                return;
        pthread_mutex_lock(&s->mutex);
        if (size_to_drop(s) < N_SIZES)
                drop_one(s, size_to_drop(s));
        else if (has_work(s))
                make_one(s, size_to_make(s));
        job->goes_on = has_work(s);
        pthread_mutex_unlock(&s->mutex);
}

static void standby_done(struct worker_job *job)
{
        struct standby *s = (struct standby *)((char *)job - offsetof(struct standby, job));

        s->is_submitted = false;
}

void standby_work(struct standby *s)
{
        bool is_due;

        pthread_mutex_lock(&s->mutex);
        is_due = has_work(s);
        pthread_mutex_unlock(&s->mutex);
        if (!is_due || s->is_submitted)
                return;
        s->is_submitted = true;
        worker_submit(s->worker, &s->job);
}

/* ---- the loop's side ------------------------------------------------------------ */

int standby_new(struct device *device, struct worker *worker, const struct device_supply *supply,
                uint64_t small_extent_bytes, struct standby **ret)
{
        struct standby *s = calloc(1, sizeof(*s));

        if (!s)
                return -ENOMEM;
        s->device = device;
        s->worker = worker;
        s->supply = *supply;
        s->small_extent_bytes = small_extent_bytes;
        s->lane.is_background = true;
        s->job.lane = &s->lane;
        s->job.run = standby_run;
        s->job.done = standby_done;
        pthread_mutex_init(&s->mutex, NULL);
        pthread_cond_init(&s->moved, NULL);
        for (unsigned i = 0; i < N_SIZES; i++)
                SLIST_INIT(&s->spares[i]);
        *ret = s;
        return 0;
}

struct standby *standby_free(struct standby *s)
{
        struct spare_list rest = SLIST_HEAD_INITIALIZER(rest);

        if (!s)
                return NULL;
        s->worker = NULL; /* freed before, because its threads use the standby memory */
        (void)take_spares(s, UINT64_MAX, &rest);
        destroy_spares(s, &rest);
        pthread_cond_destroy(&s->moved);
        pthread_mutex_destroy(&s->mutex);
        free(s);
        return NULL;
}

void standby_set_goal(struct standby *s, const struct standby_goal *goal)
{
        pthread_mutex_lock(&s->mutex);
        s->goal_bytes = count_goal(goal, s->small_extent_bytes, s->goal);
        pthread_mutex_unlock(&s->mutex);
}

void standby_set_room(struct standby_consumer *consumer, uint64_t n_bytes)
{
        struct standby *s = consumer->standby;

        if (!s || n_bytes == consumer->room_bytes)
                return;
        pthread_mutex_lock(&s->mutex);
        s->room_bytes += n_bytes - consumer->room_bytes;
        pthread_mutex_unlock(&s->mutex);
        consumer->room_bytes = n_bytes;
}

void standby_pause(struct standby *s)
{
        pthread_mutex_lock(&s->mutex);
        pause_now(s);
        pthread_mutex_unlock(&s->mutex);
}

uint64_t standby_paused_until(struct standby *s)
{
        uint64_t until_ms;

        if (s->paused_until_ms == 0) /* the loop asks in each turn */
                return 0;
        pthread_mutex_lock(&s->mutex);
        until_ms = !s->is_submitted && size_to_make(s) < N_SIZES ? s->paused_until_ms : 0;
        pthread_mutex_unlock(&s->mutex);
        return until_ms;
}

uint64_t standby_bytes(struct standby *s)
{
        uint64_t n_bytes;

        pthread_mutex_lock(&s->mutex);
        n_bytes = s->n_bytes;
        pthread_mutex_unlock(&s->mutex);
        return n_bytes;
}

bool standby_check_empty(struct standby *s)
{
        bool is_empty;

        pthread_mutex_lock(&s->mutex);
        is_empty = s->n_bytes == 0 && s->moving_bytes == 0;
        pthread_mutex_unlock(&s->mutex);
        return is_empty;
}
