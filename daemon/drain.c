/* Draining; see drain.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/drain.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/log.h"

enum drain_phase { DRAIN_SERVES, DRAIN_EMPTIES, DRAIN_CLOSES, DRAIN_CLOSED, DRAIN_OPENS, DRAIN_BACKS };

struct drain {
        struct broker *broker;
        struct broker_device *device;
        enum drain_phase phase;
        bool is_due;    /* EMPTIES: something may have gone */
        bool is_ending; /* the daemon is */
        struct worker_job close, open;
        drain_resumed_fn resumed;
        size_t n_backing; /* quotas, BACKS */
        int result;       /* of opening and backing */
        char sentence[400];
        struct device_facts facts; /* of what was opened */
        uint64_t others_bytes;     /* in use there when it was; UINT64_MAX: not known */
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
        switch (phase_of(d)) {
        case DRAIN_SERVES:
                return d->is_lost ? "lost" : "ok";
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

bool drain_is_waiting(const struct broker_device *d)
{
        return phase_of(d) == DRAIN_EMPTIES;
}

typedef bool (*quota_fn)(struct quota *q, void *userdata);

/* Each quota of the device, until one says false; whether none did. */
static bool each_quota(const struct broker *b, const struct broker_device *d, quota_fn each, void *userdata)
{
        for (size_t i = 0; i < b->n_partitions; i++) {
                struct quota *q;

                if (b->partitions[i].device != d->device)
                        continue;
                TAILQ_FOREACH(q, &b->partitions[i].quotas, of_partition)
                if (!each(q, userdata))
                        return false;
        }
        return true;
}

static bool is_drained(struct quota *q, void *userdata)
{
        (void)userdata;
        return quota_is_drained(q);
}

static bool add_escaped(struct quota *q, void *userdata)
{
        *(uint64_t *)userdata += arena_unreclaimed_bytes(q->arena);
        return true;
}

static void set_draining(struct drain *drain, bool is_draining)
{
        struct broker *b = drain->broker;

        for (size_t i = 0; i < b->n_partitions; i++)
                if (b->partitions[i].device == drain->device->device)
                        partition_set_draining(&b->partitions[i], is_draining);
        broker_look_for_escapes(b);
        broker_stand_by(b);
}

/* ---- emptying ------------------------------------------------------------ */

static bool give_back(struct quota *q, void *userdata)
{
        (void)userdata;
        if (q->has_freed)
                quota_release_idle(q);
        q->has_freed = false;
        return true;
}

static void close_run(struct worker_job *job)
{
        const struct drain *drain = (const struct drain *)((const char *)job - offsetof(struct drain, close));

        device_close(drain->device->device);
}

static void close_done(struct worker_job *job)
{
        struct drain *drain = (struct drain *)((char *)job - offsetof(struct drain, close));
        const char *id = drain->device->config->id;
        uint64_t n_escaped = 0;

        if (drain->phase == DRAIN_CLOSES) /* it may be to be opened again by now */
                drain->phase = DRAIN_CLOSED;
        each_quota(drain->broker, drain->device, add_escaped, &n_escaped);
        log_notice("device '%s' is drained: all its memory is released, and bfcd has closed it until an "
                   "operator resumes it",
                   id);
        if (n_escaped > 0)
                log_warning("device '%s': %" PRIu64 " bytes are unreclaimed; processes may still have "
                            "them mapped",
                            id, n_escaped);
}

static void begin_closing(struct drain *drain)
{
        drain->phase = DRAIN_CLOSES;
        drain->close.run = close_run;
        drain->close.done = close_done;
        worker_submit(drain->device->worker, &drain->close);
}

static void begin_emptying(struct drain *drain)
{
        drain->phase = DRAIN_EMPTIES;
        drain->is_due = true;
        set_draining(drain, true);
        broker_wake(drain->broker);
}

int drain_begin(struct broker *b, struct broker_device *d)
{
        if (!d->drain) {
                d->drain = calloc(1, sizeof(*d->drain));
                if (!d->drain)
                        return -ENOMEM;
                *d->drain = (struct drain){ .broker = b, .device = d };
                b->n_drains++;
        }
        switch (d->drain->phase) {
        case DRAIN_SERVES:
                begin_emptying(d->drain);
                return 0;
        case DRAIN_EMPTIES:
        case DRAIN_CLOSES:
        case DRAIN_CLOSED:
                return 0;
        case DRAIN_OPENS:
        case DRAIN_BACKS:
                break;
        }
        return -EBUSY;
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
        for (size_t i = 0; b->n_drains > 0 && i < b->n_devices; i++)
                if (device_is_due(b, &b->devices[i]))
                        return true;
        return false;
}

static void device_turn(struct broker *b, struct broker_device *d)
{
        d->drain->is_due = false;
        for (size_t i = 0; i < b->n_partitions; i++)
                if (b->partitions[i].device == d->device)
                        b->partitions[i].has_idle = false;
        each_quota(b, d, give_back, NULL);
        if (each_quota(b, d, is_drained, NULL) && standby_is_empty(d->standby))
                begin_closing(d->drain);
}

void drain_turn(struct broker *b)
{
        for (size_t i = 0; b->n_drains > 0 && i < b->n_devices; i++)
                if (device_is_due(b, &b->devices[i]))
                        device_turn(b, &b->devices[i]);
}

void drain_poll(struct broker *b)
{
        for (size_t i = 0; b->n_drains > 0 && i < b->n_devices; i++) {
                if (phase_of(&b->devices[i]) != DRAIN_EMPTIES)
                        continue;
                b->devices[i].drain->is_due = true;
                broker_wake(b);
        }
}

/* ---- resuming ------------------------------------------------------------ */

static void tell(struct drain *drain, int result)
{
        drain_resumed_fn resumed = drain->resumed;

        drain->resumed = NULL;
        if (result < 0)
                log_error("device '%s' could not be resumed: %s", drain->device->config->id, drain->sentence);
        else
                log_notice("device '%s' (%s) is resumed", drain->device->config->id, drain->device->name);
        if (resumed && !drain->is_ending)
                resumed(drain->broker, drain->device, result, drain->sentence);
}

static void resume_is_done(struct drain *drain)
{
        if (drain->result < 0) { /* what was made goes back, and it is closed */
                begin_emptying(drain);
        } else {
                drain->phase = DRAIN_SERVES;
                set_draining(drain, false);
        }
        tell(drain, drain->result);
}

static void backed(void *userdata, struct quota *q, int result)
{
        struct drain *drain = userdata;

        if (result < 0 && drain->result == 0) {
                drain->result = result;
                snprintf(drain->sentence, sizeof(drain->sentence),
                         "the %" PRIu64 " bytes preallocated for tenant '%s' in partition '%s' cannot be "
                         "allocated: %s",
                         q->account.limit_bytes, q->tenant, q->partition->name, device_error(result));
        }
        if (--drain->n_backing == 0)
                resume_is_done(drain);
}

static bool begin_backing_quota(struct quota *q, void *userdata)
{
        struct drain *drain = userdata;
        int r;

        drain->n_backing++;
        r = quota_back(q, backed, drain);
        if (r != 0)
                drain->n_backing--;
        if (r >= 0)
                return true;
        drain->result = r;
        if (r == -ENOMEM && arena_escaped_bytes(q->arena) == 0)
                snprintf(drain->sentence, sizeof(drain->sentence), "the daemon is out of memory");
        else
                snprintf(drain->sentence, sizeof(drain->sentence),
                         "the preallocated memory of partition '%s' does not fit, because %" PRIu64
                         " bytes are unreclaimed",
                         q->partition->name, arena_escaped_bytes(q->arena));
        return false;
}

static void begin_backing(struct drain *drain)
{
        drain->phase = DRAIN_BACKS;
        drain->result = 0;
        drain->n_backing = 1; /* this call, so that none of them is the last */
        each_quota(drain->broker, drain->device, begin_backing_quota, drain);
        if (--drain->n_backing == 0)
                resume_is_done(drain);
}

static void open_run(struct worker_job *job)
{
        struct drain *drain = (struct drain *)((char *)job - offsetof(struct drain, open));
        struct device *device = drain->device->device;

        snprintf(drain->sentence, sizeof(drain->sentence), "%s", "the device does not respond");
        drain->others_bytes = UINT64_MAX;
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
        else if (device_others(device, &drain->others_bytes) < 0)
                drain->others_bytes = UINT64_MAX;
}

/* Clients were told the UUID, by which they find the GPU. */
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
                         p->share_name, p->name);
                return -ENOTSUP;
        }
        return 0;
}

/* The limits are those of the config in force, which may have been reloaded meanwhile. */
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

static bool recover(struct quota *q, void *userdata)
{
        arena_recover(q->arena, *(const uint64_t *)userdata);
        return true;
}

/* What it is now; and what had escaped cannot be more than what is in use there now beyond what was when
 * the daemon began. */
static void put_facts(struct drain *drain)
{
        struct broker *b = drain->broker;
        struct broker_device *d = drain->device;
        uint64_t n_escaped = UINT64_MAX;

        snprintf(d->name, sizeof(d->name), "%s", drain->facts.name);
        d->bytes_total = drain->facts.bytes_total;
        if (drain->others_bytes != UINT64_MAX && d->others_bytes != UINT64_MAX)
                n_escaped = drain->others_bytes > d->others_bytes ? drain->others_bytes - d->others_bytes : 0;
        d->is_lost = false;
        for (size_t i = 0; i < b->n_partitions; i++)
                if (b->partitions[i].device == d->device)
                        b->partitions[i].is_lost = false;
        each_quota(b, d, recover, &n_escaped);
}

static void open_done(struct worker_job *job)
{
        struct drain *drain = (struct drain *)((char *)job - offsetof(struct drain, open));
        int r = drain->result;

        if (r < 0) {
                drain->phase = DRAIN_CLOSED;
                tell(drain, r);
                return;
        }
        r = check_same(drain);
        if (r == 0)
                r = check_shares(drain);
        if (r == 0)
                r = check_size(drain);
        if (r < 0 || drain->is_ending) {
                begin_closing(drain);
                tell(drain, r < 0 ? r : -ECANCELED);
                return;
        }
        put_facts(drain);
        begin_backing(drain);
}

int drain_resume(struct broker *b, struct broker_device *d, drain_resumed_fn done)
{
        struct drain *drain = d->drain;

        (void)b;
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
        case DRAIN_CLOSES: /* its worker opens it when it is closed */
        case DRAIN_CLOSED:
                break;
        }
        drain->resumed = done;
        drain->phase = DRAIN_OPENS;
        drain->open.run = open_run;
        drain->open.done = open_done;
        worker_submit(d->worker, &drain->open);
        return 0;
}

void drain_end(struct broker *b)
{
        for (size_t i = 0; i < b->n_devices; i++)
                if (b->devices[i].drain)
                        b->devices[i].drain->is_ending = true;
}

/* ---- the check ----------------------------------------------------------- */

static bool is_empty(struct quota *q, void *userdata)
{
        (void)userdata;
        return arena_n_extents(q->arena) == 0 && arena_pending_bytes(q->arena) == 0;
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
                    !(each_quota(b, d, is_empty, NULL) && standby_is_empty(d->standby))) {
                        *ret_why = "a closed device has extents";
                        return -EBADMSG;
                }
        }
        return 0;
}
