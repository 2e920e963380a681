/* Draining; see drain.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/drain.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/base/number.h"

/* A device that is lost again soon is opened again later and later, so that one whose keeper ends at each start costs little. */
#define CALM_MS        60000u /* since it was opened the last time: then it is opened at once */
#define FIRST_PAUSE_MS 1000u
#define LAST_PAUSE_MS  60000u

enum drain_phase { DRAIN_SERVES, DRAIN_EMPTIES, DRAIN_CLOSES, DRAIN_CLOSED, DRAIN_OPENS, DRAIN_BACKS };

struct drain {
        struct broker *broker;
        struct broker_device *device;
        enum drain_phase phase;
        bool is_asked; /* by an operator */
        bool recovers; /* a lost device is emptied, closed and opened, and no operator has asked for anything */
        bool is_stopped;              /* OPENS, BACKS: it is to be drained again */
        bool is_due;                  /* EMPTIES: it may be empty */
        bool is_ending;               /* the daemon is ending */
        uint64_t opened_ms, pause_ms; /* when a lost device was opened, and before that */
        uint64_t open_ms;             /* CLOSED: when a lost device is opened; 0: only by an operator */
        struct worker_job close, open;
        drain_resumed_fn resumed;
        size_t n_backing; /* quotas, BACKS */
        int result;       /* of opening and backing */
        char sentence[400];
        struct device_facts facts; /* when it was opened */
        uint64_t foreign_bytes;    /* in use there at that time; UINT64_MAX: not known */
};

struct drain *drain_free(struct drain *drain)
{
        free(drain);
        return NULL;
}

/* ---- looking ------------------------------------------------------------- */

static enum drain_phase phase_of(const struct broker_device *d)
{
        return d->drain ? d->drain->phase : DRAIN_SERVES;
}

struct broker_device *drain_find(struct broker *b, const char *id)
{
        for (size_t i = 0; i < b->n_devices; i++)
                if (strcmp(b->devices[i].config->id, id) == 0)
                        return &b->devices[i];
        return NULL;
}

const char *drain_state(const struct broker_device *d)
{
        if (d->is_hung)
                return "hung";
        if (d->is_lost && !(d->drain && d->drain->is_asked))
                return "lost";
        switch (phase_of(d)) {
        case DRAIN_SERVES:
                return "ok";
        case DRAIN_EMPTIES:
        case DRAIN_CLOSES:
        case DRAIN_BACKS:
                return "draining";
        case DRAIN_CLOSED:
        case DRAIN_OPENS:
                break;
        }
        return "drained";
}

bool drain_has_begun(const struct broker_device *d)
{
        return phase_of(d) != DRAIN_SERVES && d->drain->is_asked;
}

bool drain_is_waiting(const struct broker_device *d)
{
        return phase_of(d) == DRAIN_EMPTIES;
}

bool drain_is_opening(const struct broker_device *d)
{
        return phase_of(d) == DRAIN_OPENS;
}

/* The device's first quota (q: NULL), or the one after q. NULL: there is none. */
static struct quota *next_quota(const struct broker *b, const struct broker_device *d, const struct quota *q)
{
        struct quota *next = q ? TAILQ_NEXT(q, lists.of_partition) : NULL;

        for (size_t i = q ? (size_t)(q->partition - b->partitions) + 1 : 0; !next && i < b->n_partitions; i++)
                if (b->partitions[i].device == d->device)
                        next = TAILQ_FIRST(&b->partitions[i].quotas);
        return next;
}

static void set_draining(struct drain *drain, bool is_draining)
{
        struct broker *b = drain->broker;

        for (size_t i = 0; i < b->n_partitions; i++)
                if (b->partitions[i].device == drain->device->device)
                        partition_set_draining(&b->partitions[i], is_draining);
        broker_check_unreclaimed(b);
        broker_stand_by(b);
}

/* ---- emptying ------------------------------------------------------------ */

void drain_record(const struct broker_device *d, const char *state, struct record *ret)
{
        record_init(ret, RECORD_DRAIN);
        record_add_text(ret, "device", d->config->id, CONFIG_NAME_MAX);
        record_add_text(ret, "state", state, SIZE_MAX);
}

static void run_close(struct worker_job *job)
{
        const struct drain *drain = (const struct drain *)((const char *)job - offsetof(struct drain, close));

        device_close(drain->device->device);
}

static void begin_opening(struct drain *drain);

static void recover_now(struct drain *drain)
{
        drain->open_ms = 0;
        drain->opened_ms = clock_ms();
        begin_opening(drain);
}

static void begin_recovering(struct drain *drain)
{
        uint64_t now_ms = clock_ms();
        bool is_calm = drain->opened_ms == 0 || now_ms - drain->opened_ms >= CALM_MS + drain->pause_ms;

        drain->pause_ms = is_calm ? 0 : min_u64(max_u64(FIRST_PAUSE_MS, 2 * drain->pause_ms), LAST_PAUSE_MS);
        if (drain->pause_ms == 0) {
                recover_now(drain);
                return;
        }
        drain->open_ms = now_ms + drain->pause_ms;
        log_notice("device '%s' was lost again: it is opened again in %" PRIu64 " s",
                   drain->device->config->id, drain->pause_ms / 1000);
        broker_wake(drain->broker);
}

bool drain_is_paused(const struct broker_device *d)
{
        return phase_of(d) == DRAIN_CLOSED && d->drain->recovers && d->drain->open_ms > 0;
}

void drain_tick(struct broker *b)
{
        for (size_t i = 0; i < b->n_devices; i++)
                if (drain_is_paused(&b->devices[i]) && clock_ms() >= b->devices[i].drain->open_ms)
                        recover_now(b->devices[i].drain);
}

static void finish_close(struct worker_job *job)
{
        struct drain *drain = (struct drain *)((char *)job - offsetof(struct drain, close));
        const char *id = drain->device->config->id;
        uint64_t n_unreclaimed = 0;
        struct record r;

        if (drain->phase == DRAIN_CLOSES) /* unless a resume has begun */
                drain->phase = DRAIN_CLOSED;
        if (drain->recovers) {
                begin_recovering(drain);
                return;
        }
        for (struct quota *q = NULL; (q = next_quota(drain->broker, drain->device, q));)
                n_unreclaimed += arena_unreclaimed_bytes(q->arena);
        drain_record(drain->device, "drained", &r);
        records_write(LOG_LEVEL_NOTICE, &r,
                      "device '%s' is drained: all its memory is released, and bfcd has closed it until an "
                      "operator resumes it",
                      id);
        if (n_unreclaimed > 0)
                log_warning("device '%s': %s are unreclaimed; processes may still have them mapped", id,
                            NUMBER_SIZE(n_unreclaimed));
}

static void begin_closing(struct drain *drain)
{
        drain->phase = DRAIN_CLOSES;
        drain->close.run = run_close;
        drain->close.done = finish_close;
        worker_submit(drain->device->worker, &drain->close);
}

static void begin_emptying(struct drain *drain)
{
        drain->phase = DRAIN_EMPTIES;
        drain->is_stopped = false;
        drain->is_due = true;
        set_draining(drain, true);
        broker_wake(drain->broker);
}

static int drain_make(struct broker *b, struct broker_device *d)
{
        if (d->drain)
                return 0;
        d->drain = calloc(1, sizeof(*d->drain));
        if (!d->drain)
                return -ENOMEM;
        *d->drain = (struct drain){ .broker = b, .device = d };
        return 0;
}

/* Without memory the device stays lost until an operator drains it. */
void drain_recover(struct broker *b, struct broker_device *d)
{
        if (drain_make(b, d) < 0 || d->drain->phase != DRAIN_SERVES)
                return;
        d->drain->is_asked = false;
        d->drain->recovers = true;
        begin_emptying(d->drain);
}

int drain_begin(struct broker *b, struct broker_device *d)
{
        if (drain_make(b, d) < 0)
                return -ENOMEM;
        switch (d->drain->phase) {
        case DRAIN_SERVES:
                begin_emptying(d->drain);
                d->drain->is_asked = true;
                return 0;
        case DRAIN_EMPTIES:
        case DRAIN_CLOSES:
        case DRAIN_CLOSED:
                d->drain->is_asked = true;
                d->drain->recovers = false;
                return 0;
        case DRAIN_OPENS:
        case DRAIN_BACKS:
                break;
        }
        if (d->drain->is_stopped)
                return 0;
        if (!d->drain->recovers)
                return -EBUSY;
        d->drain->recovers = false;
        d->drain->is_asked = d->drain->is_stopped = true;
        return 0;
}

static bool has_idle(const struct broker *b, const struct broker_device *d)
{
        for (size_t i = 0; i < b->n_partitions; i++)
                if (b->partitions[i].device == d->device && b->partitions[i].has_idle)
                        return true;
        return false;
}

static bool device_is_due(const struct broker *b, const struct broker_device *d)
{
        return phase_of(d) == DRAIN_EMPTIES && (d->drain->is_due || has_idle(b, d));
}

bool drain_is_due(const struct broker *b)
{
        for (size_t i = 0; i < b->n_devices; i++)
                if (device_is_due(b, &b->devices[i]))
                        return true;
        return false;
}

static void empty_device(struct broker *b, struct broker_device *d)
{
        d->drain->is_due = false;
        for (size_t i = 0; i < b->n_partitions; i++)
                if (b->partitions[i].device == d->device)
                        b->partitions[i].has_idle = false;
        for (struct quota *q = NULL; (q = next_quota(b, d, q));) {
                if (q->lists.has_freed)
                        quota_release_idle(q);
                q->lists.has_freed = false;
        }
        for (struct quota *q = NULL; (q = next_quota(b, d, q));)
                if (!quota_is_drained(q))
                        return;
        if (standby_check_empty(d->standby))
                begin_closing(d->drain);
}

void drain_turn(struct broker *b)
{
        for (size_t i = 0; i < b->n_devices; i++)
                if (device_is_due(b, &b->devices[i]))
                        empty_device(b, &b->devices[i]);
}

void drain_poll(struct broker *b)
{
        for (size_t i = 0; i < b->n_devices; i++) {
                if (phase_of(&b->devices[i]) != DRAIN_EMPTIES)
                        continue;
                b->devices[i].drain->is_due = true;
                broker_wake(b);
        }
}

/* ---- resuming ------------------------------------------------------------ */

static void report_resume(struct drain *drain, int result)
{
        drain_resumed_fn resumed = drain->resumed;
        const char *id = drain->device->config->id;
        struct record r;

        drain->resumed = NULL;
        drain_record(drain->device, result < 0 ? "failed" : "resumed", &r);
        if (result == -ECANCELED)
                records_write(LOG_LEVEL_NOTICE, &r, "device '%s' is not resumed: it is drained, or bfcd ends",
                              id);
        else if (result < 0)
                records_write(LOG_LEVEL_ERROR, &r, "device '%s' could not be resumed: %s", id,
                              drain->sentence);
        else
                records_write(LOG_LEVEL_NOTICE, &r, "device '%s' (%s) is resumed", id, drain->device->name);
        if (resumed && !drain->is_ending)
                resumed(drain->broker, drain->device, result, drain->sentence);
}

static void finish_resume(struct drain *drain)
{
        if (drain->is_stopped)
                drain->result = -ECANCELED;
        drain->recovers = false;
        if (drain->result < 0) { /* what was made is released, and the device is closed */
                begin_emptying(drain);
        } else {
                drain->phase = DRAIN_SERVES;
                set_draining(drain, false);
        }
        report_resume(drain, drain->result);
}

static void on_backed(struct quota *q, int result)
{
        const struct broker *b = q->partition->up.broker;
        struct drain *drain;
        size_t i = 0;

        while (b->devices[i].device != q->partition->device)
                i++;
        drain = b->devices[i].drain;
        if (result < 0 && drain->result == 0) {
                drain->result = result;
                snprintf(drain->sentence, sizeof(drain->sentence),
                         "the %" PRIu64 " bytes preallocated for tenant '%s' in partition '%s' cannot be "
                         "allocated: %s",
                         q->account.limit_bytes, q->tenant, q->partition->name, device_error(result));
        }
        if (--drain->n_backing == 0)
                finish_resume(drain);
}

static int begin_backing_quota(struct drain *drain, struct quota *q)
{
        int r;

        drain->n_backing++;
        r = quota_back(q, on_backed);
        if (r != 0)
                drain->n_backing--;
        if (r >= 0)
                return 0;
        drain->result = r;
        if (r == -ENOMEM && arena_unreclaimed_bytes(q->arena) == 0)
                snprintf(drain->sentence, sizeof(drain->sentence), "the daemon is out of memory");
        else
                snprintf(drain->sentence, sizeof(drain->sentence),
                         "the preallocated memory of partition '%s' does not fit, because %s are unreclaimed",
                         q->partition->name, NUMBER_SIZE(arena_unreclaimed_bytes(q->arena)));
        return r;
}

static void begin_backing(struct drain *drain)
{
        drain->phase = DRAIN_BACKS;
        drain->result = 0;
        drain->n_backing = 1; /* this call, so that no quota is the last one before it ends */
        for (struct quota *q = NULL; (q = next_quota(drain->broker, drain->device, q));)
                if (begin_backing_quota(drain, q) < 0)
                        break;
        if (--drain->n_backing == 0)
                finish_resume(drain);
}

static void run_open(struct worker_job *job)
{
        struct drain *drain = (struct drain *)((char *)job - offsetof(struct drain, open));
        struct device *device = drain->device->device;

        snprintf(drain->sentence, sizeof(drain->sentence), "%s", "the device does not respond");
        drain->foreign_bytes = UINT64_MAX;
        if (__atomic_load_n(&device->is_ending, __ATOMIC_RELAXED)) {
                drain->result = -ECANCELED;
                return;
        }
        drain->result = device_open(device, drain->sentence, sizeof(drain->sentence));
        if (drain->result < 0)
                return;
        drain->result = device_facts(device, &drain->facts);
        if (drain->result < 0)
                device_close(device);
        else if (device_foreign_bytes(device, &drain->foreign_bytes) < 0)
                drain->foreign_bytes = UINT64_MAX;
}

/* Clients find the GPU by the UUID that they were told. */
static int check_same(struct drain *drain)
{
        const struct broker_device *d = drain->device;
        const struct device_facts *facts = &drain->facts;

        if (!d->config->is_cuda || memcmp(facts->uuid, d->config->uuid, sizeof(facts->uuid)) == 0)
                return 0;
        snprintf(drain->sentence, sizeof(drain->sentence),
                 "it is a different GPU than before (%s), which existing sessions cannot use: restart bfcd",
                 facts->name);
        return -ENODEV;
}

static int check_shares(struct drain *drain)
{
        const struct broker *b = drain->broker;

        for (size_t i = 0; drain->device->config->is_cuda && i < b->n_partitions; i++) {
                const struct partition *p = &b->partitions[i];

                if (p->device != drain->device->device || drain->facts.shares[p->share])
                        continue;
                snprintf(drain->sentence, sizeof(drain->sentence),
                         "it no longer supports share: %s of partition '%s': change the configuration and "
                         "restart bfcd",
                         partition_share_name(p), p->name);
                return -ENOTSUP;
        }
        return 0;
}

/* The limits of the config in force: it may have been reloaded meanwhile. */
static int check_size(struct drain *drain)
{
        const struct broker *b = drain->broker;
        const struct broker_device *d = drain->device;
        uint64_t n_total = drain->facts.bytes_total, n_needed = d->config->headroom_bytes;

        for (size_t i = 0; i < b->n_partitions; i++)
                if (b->partitions[i].device == d->device)
                        n_needed += b->partitions[i].pool.limit_bytes;
        if (n_total == 0 || n_needed <= n_total)
                return 0;
        snprintf(drain->sentence, sizeof(drain->sentence),
                 "it now has %" PRIu64 " bytes, and its partitions' limits and headroom sum to %" PRIu64
                 " bytes: lower these and reload, then resume it",
                 n_total, n_needed);
        return -ENOMEM;
}

/* Unreclaimed memory is at most what other processes use now beyond what they used when the daemon began. */
static void apply_facts(struct drain *drain)
{
        struct broker *b = drain->broker;
        struct broker_device *d = drain->device;
        uint64_t n_unreclaimed = UINT64_MAX;

        snprintf(d->name, sizeof(d->name), "%s", drain->facts.name);
        d->bytes_total = drain->facts.bytes_total;
        if (drain->foreign_bytes != UINT64_MAX && d->foreign_bytes != UINT64_MAX)
                n_unreclaimed =
                        drain->foreign_bytes > d->foreign_bytes ? drain->foreign_bytes - d->foreign_bytes : 0;
        d->is_lost = false;
        for (size_t i = 0; i < b->n_partitions; i++)
                if (b->partitions[i].device == d->device)
                        b->partitions[i].is_lost = false;
        for (struct quota *q = NULL; (q = next_quota(b, d, q));)
                arena_recover(q->arena, n_unreclaimed);
}

static void finish_open(struct worker_job *job)
{
        struct drain *drain = (struct drain *)((char *)job - offsetof(struct drain, open));
        int r = drain->result;

        if (r < 0) {
                drain->phase = DRAIN_CLOSED;
                drain->recovers = false;
                report_resume(drain, r);
                return;
        }
        r = check_same(drain);
        if (r == 0)
                r = check_shares(drain);
        if (r == 0)
                r = check_size(drain);
        if (r == 0 && (drain->is_ending || drain->is_stopped))
                r = -ECANCELED;
        if (r < 0) {
                drain->recovers = false;
                begin_closing(drain);
                report_resume(drain, r);
                return;
        }
        apply_facts(drain);
        begin_backing(drain);
}

static void begin_opening(struct drain *drain)
{
        drain->is_stopped = false;
        drain->phase = DRAIN_OPENS;
        drain->open.run = run_open;
        drain->open.done = finish_open;
        worker_submit(drain->device->worker, &drain->open);
}

int drain_resume(struct broker_device *d, drain_resumed_fn done)
{
        struct drain *drain = d->drain;

        switch (phase_of(d)) {
        case DRAIN_SERVES:
                return -EINVAL;
        case DRAIN_OPENS:
        case DRAIN_BACKS:
                return -EBUSY;
        case DRAIN_EMPTIES:
                if (d->is_lost)
                        return -ENODEV;
                drain->resumed = done;
                begin_backing(drain);
                return 0;
        case DRAIN_CLOSES: /* its worker opens it after it has closed it */
        case DRAIN_CLOSED:
                break;
        }
        drain->recovers = false;
        drain->resumed = done;
        begin_opening(drain);
        return 0;
}

void drain_end(struct broker *b)
{
        for (size_t i = 0; i < b->n_devices; i++)
                if (b->devices[i].drain)
                        b->devices[i].drain->is_ending = true;
}

/* ---- the check ----------------------------------------------------------- */

static bool device_is_empty(const struct broker *b, const struct broker_device *d)
{
        for (struct quota *q = NULL; (q = next_quota(b, d, q));)
                if (arena_n_extents(q->arena) > 0 || arena_pending_bytes(q->arena) > 0)
                        return false;
        return standby_check_empty(d->standby);
}

int drain_check(const struct broker *b, const char **ret_why)
{
        for (size_t i = 0; i < b->n_devices; i++) {
                const struct broker_device *d = &b->devices[i];
                enum drain_phase phase = phase_of(d);

                for (size_t k = 0; k < b->n_partitions; k++) {
                        if (b->partitions[k].device != d->device ||
                            b->partitions[k].is_draining == (phase != DRAIN_SERVES))
                                continue;
                        *ret_why = "a partition and its device differ in the draining state";
                        return -EBADMSG;
                }
                if ((phase == DRAIN_CLOSES || phase == DRAIN_CLOSED || phase == DRAIN_OPENS) &&
                    !device_is_empty(b, d)) {
                        *ret_why = "a closed device has extents";
                        return -EBADMSG;
                }
        }
        return 0;
}
