/* What devices and their workers say: lost devices, unreclaimed memory.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/broker.h"

#include <inttypes.h>

#include "daemon/memory/drain.h"
#include "daemon/base/clock.h"
#include "daemon/base/number.h"

#define BROKER_UNRECLAIMED_MS 1000u
#define BROKER_LOOKS          256u /* in that time, at extents of one tenant that processes keep */
#define BROKER_HUNG_NS        UINT64_C(4000000000) /* so that it is known within 5 s */
#define BROKER_OPEN_NS                                                                                       \
        UINT64_C(60000000000) /* a driver initializes many GPUs, and waits for a keeper that ends */

static bool quota_can_ask_device(const struct quota *q)
{
        return arena_unreclaimed_bytes(q->arena) > 0 && !q->partition->is_lost &&
               !q->partition->is_draining && q->partition->device->ops->others;
}

/* Whether unreclaimed memory may have been returned. */
static bool quota_may_be_unreclaimed(const struct quota *q)
{
        return arena_has_kept(q->arena) || quota_can_ask_device(q);
}

/* Whether its device is to be asked what others use there. */
static bool quota_is_to_ask(const struct quota *q)
{
        return quota_can_ask_device(q) || (q->partition->device->direct.n_due > 0 && !q->partition->is_lost &&
                                           !q->partition->is_draining && quota_own(q).bytes_direct > 0);
}

/* Memory that a process references for a moment is not logged. */
static uint64_t quota_unreclaimed_to_log(const struct quota *q)
{
        return quota_may_be_unreclaimed(q) ? arena_confirmed_unreclaimed_bytes(q->arena)
                                           : arena_unreclaimed_bytes(q->arena);
}

static void quota_log_unreclaimed(struct tenant *t, struct quota *q)
{
        uint64_t n_bytes = quota_unreclaimed_to_log(q);

        if (n_bytes < q->logged.unreclaimed_bytes)
                log_limited(
                        &t->unreclaimed_logs[false], LOG_LEVEL_INFO,
                        "device '%s' returned unreclaimed memory of tenant '%s' in partition '%s': %s are no longer "
                        "charged, %s are still unreclaimed",
                        q->partition->device_id, q->tenant, q->partition->name,
                        NUMBER_SIZE(q->logged.unreclaimed_bytes - n_bytes), NUMBER_SIZE(n_bytes));
        else if (!q->partition->is_lost) /* then that says it all */
                log_limited(
                        &t->unreclaimed_logs[true], LOG_LEVEL_ERROR,
                        "device '%s' did not return memory of tenant '%s' in partition '%s': %s are unreclaimed and "
                        "stay charged",
                        q->partition->device_id, q->tenant, q->partition->name, NUMBER_SIZE(n_bytes));
        q->logged.unreclaimed_bytes = n_bytes;
}

/* Waiting requests are refused with ENODEV at the next turn. */
static void broker_lose_device(struct broker *b, const struct device *device)
{
        for (size_t i = 0; i < b->n_devices; i++) {
                struct broker_device *d = &b->devices[i];

                if (d->device != device)
                        continue;
                d->is_lost = true;
                log_error(
                        "device '%s' (%s) is lost: its partitions refuse all requests until all blocks there are "
                        "freed and the device can be opened again; see the kernel log for the cause",
                        d->config->id, d->name);
                for (size_t k = 0; k < b->n_partitions; k++)
                        if (b->partitions[k].device == device)
                                partition_lose(&b->partitions[k]);
                drain_recover(b, d);
        }
}

static struct tenant *broker_tenant_of(const struct broker *b, const struct quota *q)
{
        size_t i = 0;

        while (b->tenants[i].name != q->tenant)
                i++;
        return &b->tenants[i];
}

static void quota_count_unreclaimed(struct broker *b, struct quota *q)
{
        bool may_be = quota_may_be_unreclaimed(q) || quota_is_to_ask(q);

        b->unreclaimed.n += may_be;
        b->unreclaimed.n -= q->logged.may_be_unreclaimed;
        q->logged.may_be_unreclaimed = may_be;
}

/* Notes what is new of the quotas that changed since the last time. */
static void broker_note_changes(struct broker *b)
{
        for (size_t i = 0; i < b->n_partitions; i++) {
                struct quota *q;

                while ((q = partition_next_changed(&b->partitions[i]))) {
                        b->changes.n_visits++;
                        if (arena_is_lost(q->arena) && !q->partition->is_lost)
                                broker_lose_device(b, q->partition->device);
                        if (quota_unreclaimed_to_log(q) != q->logged.unreclaimed_bytes)
                                quota_log_unreclaimed(broker_tenant_of(b, q), q);
                        if (b->unreclaimed.n == 0) /* the device is asked in BROKER_UNRECLAIMED_MS */
                                b->unreclaimed.check_ms = clock_ms();
                        quota_count_unreclaimed(b, q);
                }
        }
        if (b->changes.has_removed)
                broker_look_for_gone(b);
}

/* Since when the device's keeper has not answered; 0: it has. */
static uint64_t silent_since_ns(const struct broker *b, const struct broker_device *d)
{
        return d->config->is_cuda ? device_call_began_ns(d->device) : store_silent_since_ns(b->options.store);
}

/* The log names the process that an operator can end. */
static const char *hung_advice(const struct broker_device *d)
{
        return d->config->is_cuda
                       ? "requests that need it wait, and other devices are not affected; if this lasts, "
                         "end that process: the device is lost then until it can be opened again"
                       : "requests for new memory wait until bfcd has replaced it, and are refused if "
                         "that takes long; jobs keep what they have";
}

void broker_note_hung(struct broker *b)
{
        uint64_t now_ns = clock_ns();

        for (size_t i = 0; i < b->n_devices; i++) {
                struct broker_device *d = &b->devices[i];
                uint64_t began_ns = silent_since_ns(b, d);
                uint64_t limit_ns = drain_is_opening(d) ? BROKER_OPEN_NS : BROKER_HUNG_NS;
                bool is_hung = began_ns != 0 && now_ns > began_ns && now_ns - began_ns > limit_ns;

                if (is_hung && !d->is_hung)
                        log_warning("device '%s' (%s) is hung: its bfcd-keeper has not answered for %" PRIu64
                                    " s; %s",
                                    d->config->id, d->name, limit_ns / 1000000000, hung_advice(d));
                else if (!is_hung && d->is_hung)
                        log_notice("device '%s' (%s) answers again", d->config->id, d->name);
                d->is_hung = is_hung;
        }
}

void broker_note_ended(struct broker *b)
{
        for (size_t i = 0; i < b->n_devices; i++)
                if (device_has_ended(b->devices[i].device) && !b->devices[i].is_lost)
                        broker_lose_device(b, b->devices[i].device);
        broker_wake(b);
}

/* What is counted next is compared with nothing before it. */
static void broker_forget_foreign(struct broker *b)
{
        for (size_t i = 0; i < b->n_devices; i++)
                b->devices[i].device->foreign_bytes = b->devices[i].device->foreign_fallen = 0;
}

void broker_poll(struct broker *b)
{
        bool had_unreclaimed = b->unreclaimed.n > 0;
        size_t n = 0;

        for (size_t i = 0; i < b->n_devices; i++)
                n += worker_poll(b->devices[i].worker);
        if (n == 0)
                return;
        broker_note_hung(b);
        broker_note_changes(b);
        if (had_unreclaimed && b->unreclaimed.n == 0)
                broker_forget_foreign(b);
        drain_poll(b);
        broker_stand_by(b);
}

void broker_note_direct(struct broker *b, struct quota *q)
{
        if (b->unreclaimed.n == 0)
                b->unreclaimed.check_ms = clock_ms();
        quota_count_unreclaimed(b, q);
}

void broker_check_unreclaimed(struct broker *b)
{
        b->unreclaimed.n = 0; /* quotas that were counted may be gone */
        for (size_t i = 0; i < b->n_tenants; i++) {
                for (size_t k = 0; k < b->tenants[i].n_quotas; k++) {
                        b->tenants[i].quotas[k]->logged.may_be_unreclaimed = false;
                        quota_count_unreclaimed(b, b->tenants[i].quotas[k]);
                }
        }
        if (b->unreclaimed.n == 0)
                broker_forget_foreign(b);
}

/* Its quotas take turns, so that none with many extents hides the others. */
static void tenant_look_at_kept(struct tenant *t)
{
        size_t first = t->next_look, n = 0;

        for (size_t i = 0; i < t->n_quotas; i++) {
                size_t k = (first + i) % t->n_quotas;
                struct arena *a = t->quotas[k]->arena;

                if (!arena_has_kept(a))
                        continue;
                if (n < BROKER_LOOKS)
                        t->next_look = k + 1;
                n += arena_look_at_kept(a, excess_u64(BROKER_LOOKS, n));
        }
}

void broker_ask_unreclaimed(struct broker *b)
{
        uint64_t now_ms = clock_ms();

        if (b->unreclaimed.n == 0 || now_ms - b->unreclaimed.check_ms < BROKER_UNRECLAIMED_MS)
                return;
        b->unreclaimed.check_ms = now_ms;
        broker_check_unreclaimed(b);
        for (size_t i = 0; i < b->n_devices; i++) /* of the last round: it was not unreclaimed memory */
                b->devices[i].device->foreign_fallen = 0;
        for (size_t i = 0; b->unreclaimed.n > 0 && i < b->n_tenants; i++) {
                for (size_t k = 0; k < b->tenants[i].n_quotas; k++)
                        if (quota_is_to_ask(b->tenants[i].quotas[k]))
                                arena_check_unreclaimed(b->tenants[i].quotas[k]->arena);
                tenant_look_at_kept(&b->tenants[i]);
        }
}
