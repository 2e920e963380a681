/* The broker's places of tenants, quotas and sessions, its standby memory, its turns, and what devices say; see broker.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/broker.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

#include "daemon/base/clock.h"
#include "daemon/base/number.h"
#include "daemon/memory/broker_lease.h"
#include "daemon/memory/change.h"
#include "daemon/memory/drain.h"

int broker_prepare_quota(struct broker *b, struct tenant *t, size_t partition, struct quota_options *options)
{
        struct quota **quotas = reallocarray(t->quotas, t->n_quotas + 1, sizeof(*quotas));
        int r = t->usage ? 0 : usage_page_new(b->n_partitions, &t->usage);

        if (quotas)
                t->quotas = quotas;
        if (!quotas || (r < 0 && r != -EINVAL))
                return quotas ? r : -ENOMEM;
        options->tenant = t->name;
        options->partition = &b->partitions[partition];
        options->page = options->parent ? NULL : usage_page_entry(t->usage, partition);
        return 0;
}

void broker_list_quota(struct broker *b, struct tenant *t, struct quota *q)
{
        t->quotas[t->n_quotas++] = q;
        b->quotas[q->index] = q;
}

int broker_make_quota(struct broker *b, struct tenant *t, size_t partition, struct quota_options *options)
{
        struct quota *q;
        int r = broker_prepare_quota(b, t, partition, options);

        if (r == 0)
                r = quota_new(options, &q);
        if (r == 0)
                broker_list_quota(b, t, q);
        return r;
}

const struct config_quota *broker_config_quota(const struct broker *b, const struct tenant *t,
                                               const struct partition *p)
{
        return config_quota_in(t->config, (size_t)(p - b->partitions));
}

struct quota_limits broker_limits(const struct config_quota *from)
{
        return (struct quota_limits){ from->limit_bytes, from->reserve_bytes, from->max_sessions,
                                      from->max_blocks };
}

int broker_add_quota(struct broker *b, struct tenant *t, size_t partition, const struct config_quota *from,
                     uint64_t reserve_bytes)
{
        struct quota_options options = {
                .limit_bytes = from->limit_bytes,
                .reserve_bytes = reserve_bytes,
                .max_sessions = from->max_sessions,
                .max_blocks = from->max_blocks,
        };

        return broker_make_quota(b, t, partition, &options);
}

struct tenant *broker_tenant_place(struct broker *b)
{
        size_t i = 0;

        while (i < b->n_tenants && b->tenants[i].name[0] != '\0')
                i++;
        if (i == BROKER_MAX_PLACES)
                return NULL;
        if (i == b->n_tenants)
                b->n_tenants++;
        return &b->tenants[i];
}

bool broker_has_places(const struct broker *b, size_t n)
{
        size_t n_free = BROKER_MAX_PLACES - b->n_tenants;

        for (size_t i = 0; i < b->n_tenants; i++)
                n_free += b->tenants[i].name[0] == '\0';
        return n <= n_free;
}

void broker_leave_place(struct broker *b, struct tenant *t)
{
        tenant_deinit(t);
        while (b->n_tenants > 0 && b->tenants[b->n_tenants - 1].name[0] == '\0')
                b->n_tenants--;
}

struct ledger_limits broker_room(const struct broker *b)
{
        struct ledger_limits room;

        ledger_read_limits(b->ledger, &room);
        return room;
}

void broker_note_well(struct broker *b)
{
        *ledger_crashes(b->ledger) = 0;
        *ledger_n_aside(b->ledger) = 0;
}

void broker_prepare_leave(struct broker *b)
{
        b->is_left = true;
        for (size_t i = 0; i < b->n_partitions; i++)
                b->partitions[i].up.is_inherited = true;
}

/* Looks for removed quotas that are empty at the next turn. */
static void broker_look_for_gone(struct broker *b)
{
        if (!b->changes.may_have_gone)
                broker_wake(b);
        b->changes.may_have_gone = true;
}

void broker_note_leave(struct broker *b, const struct quota *q)
{
        if (q->is_removed)
                broker_look_for_gone(b);
}

void broker_wake(const struct broker *b)
{
        if (b->options.wake)
                b->options.wake(b->options.userdata);
}

void broker_set_standby(struct broker *b)
{
        for (size_t i = 0; i < b->n_devices; i++) {
                struct broker_device *d = &b->devices[i];

                d->standby_goal = capacity_standby(b->config, (size_t)(d->config - b->config->devices));
        }
        broker_stand_by(b);
}

static void device_stand_by(const struct broker *b, struct broker_device *d)
{
        struct standby_goal goal = d->standby_goal;

        for (size_t i = 0; goal.n_bytes > 0 && d->config->is_cuda && i < b->n_partitions; i++)
                if (b->partitions[i].device == d->device)
                        partition_count_next(&b->partitions[i], &goal);
        standby_set_goal(d->standby, &goal);
        standby_work(d->standby);
}

void broker_stand_by(struct broker *b)
{
        for (size_t i = 0; i < b->n_partitions; i++)
                partition_tell_standby(&b->partitions[i]);
        for (size_t i = 0; i < b->n_devices; i++)
                device_stand_by(b, &b->devices[i]);
}

uint64_t broker_standby_due(const struct broker *b)
{
        uint64_t until_ms = 0;

        for (size_t i = 0; i < b->n_devices; i++) {
                uint64_t paused_ms = standby_paused_until(b->devices[i].standby);

                if (paused_ms > 0 && (until_ms == 0 || paused_ms < until_ms))
                        until_ms = paused_ms;
        }
        return until_ms;
}

size_t broker_n_pending(const struct broker *b)
{
        size_t n = 0;

        for (size_t i = 0; i < b->n_devices; i++)
                n += worker_n_pending(b->devices[i].worker);
        return n;
}

/* ---- places of sessions, and what is promised to tenants ----------------- */

/* Of its share, those that it does not use. A tenant that was removed has no share. */
static size_t tenant_n_promised(const struct broker *b, const struct tenant *t)
{
        size_t share = t->config ? config_session_share(b->config, t->config) : 0;

        return excess_u64(share, t->n_sessions);
}

void broker_session_begins(struct broker *b, struct tenant *t)
{
        b->sessions.n_promised -= tenant_n_promised(b, t);
        t->n_sessions++;
        b->sessions.n_clients++;
        b->sessions.n_promised += tenant_n_promised(b, t);
}

void broker_session_ends(struct broker *b, struct tenant *t)
{
        b->sessions.n_promised -= tenant_n_promised(b, t);
        t->n_sessions--;
        b->sessions.n_clients--;
        b->sessions.n_promised += tenant_n_promised(b, t);
}

void broker_drop_rest(struct broker *b)
{
        (void)store_drop_rest(b->options.store);
        for (size_t i = 0; !b->restored.has_unknown && i < b->n_devices; i++)
                device_drop_rest(b->devices[i].device);
}

/* Memory is released, or may be some process's. */
static bool owes_memory(const struct broker *b)
{
        for (size_t i = 0; i < b->n_tenants; i++)
                for (size_t k = 0; k < b->tenants[i].n_quotas; k++) {
                        const struct arena *a = b->tenants[i].quotas[k]->arena;

                        if (arena_pending_bytes(a) > 0 || arena_unreclaimed_bytes(a) > 0)
                                return true;
                }
        return false;
}

bool broker_has_heirs(const struct broker *b)
{
        return store_keeps(b->options.store) &&
               (store_is_external(b->options.store) || b->sessions.n_clients > 0 || b->shared.n_kept > 0 ||
                b->leases.n > 0 || b->restored.closed_bytes > 0 || owes_memory(b));
}

void broker_promise(struct broker *b)
{
        b->changes.has_freed = false;
        tree_count_tenants(b);
        b->sessions.n_promised = 0;
        for (size_t i = 0; i < b->selection.n; i++)
                b->sessions.n_promised += tenant_n_promised(b, b->selection.order[i]);
}

int broker_admits(const struct broker *b, const struct tenant *t, char *ret_sentence, size_t n_sentence)
{
        uint32_t n_max = b->config->max_sessions;

        if (b->sessions.n_clients >= n_max)
                snprintf(ret_sentence, n_sentence,
                         "the daemon has %zu sessions: its limit max_sessions is %" PRIu32,
                         b->sessions.n_clients, n_max);
        else if (tenant_n_promised(b, t) == 0 && b->sessions.n_clients + b->sessions.n_promised >= n_max)
                snprintf(ret_sentence, n_sentence,
                         "the daemon has %zu of at most %" PRIu32 " sessions (max_sessions), and the free "
                         "ones are guaranteed to other tenants; tenant '%s' has %zu",
                         b->sessions.n_clients, n_max, t->name, t->n_sessions);
        else
                return 0;
        return -EDQUOT;
}

/* ---- what devices and their workers say ---------------------------------------- */

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

/* Sends the queries to the devices periodically. */
static void broker_ask_unreclaimed(struct broker *b)
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

/* ---- turns and ticks: requests that wait, and what was removed from the config ---- */

static void broker_free_gone_quota(struct broker *b, struct quota *q)
{
        if (!quota_parent(q)) {
                quota_free(q);
                b->changes.has_freed = true;
                return;
        }
        broker_look_for_gone(b); /* the quota above may be gone now */
        lease_free(b, lease_of(q));
}

static bool tenant_free_gone_quotas(struct broker *b, struct tenant *t)
{
        size_t kept = 0;

        for (size_t i = 0; i < t->n_quotas; i++) {
                if (quota_is_gone(t->quotas[i])) {
                        broker_free_gone_quota(b, t->quotas[i]);
                        continue;
                }
                b->changes.has_removed = b->changes.has_removed || t->quotas[i]->is_removed;
                t->quotas[kept++] = t->quotas[i];
        }
        t->n_quotas = kept;
        return kept == 0 && !t->config && t->n_sessions == 0;
}

static void broker_free_gone(struct broker *b)
{
        b->changes.may_have_gone = false;
        b->changes.has_removed = false;
        for (size_t i = b->n_tenants; i-- > 0;)
                if (b->tenants[i].name[0] != '\0' && tenant_free_gone_quotas(b, &b->tenants[i]))
                        broker_leave_place(b, &b->tenants[i]);
        if (b->changes.has_freed)
                broker_promise(b);
}

/* Each quota that is due has one turn. */
void broker_turn(struct broker *b)
{
        if (b->changes.may_have_gone)
                broker_free_gone(b);
        for (size_t i = 0; i < b->n_partitions; i++) {
                struct quota *q, *next;

                for (q = TAILQ_FIRST(&b->partitions[i].queue.due); q; q = next) {
                        next = TAILQ_NEXT(q, queue.of_due);
                        quota_turn(q);
                }
        }
        drain_turn(b);
}

bool broker_is_due(const struct broker *b)
{
        if (b->changes.may_have_gone || drain_is_due(b))
                return true;
        for (size_t i = 0; i < b->n_partitions; i++)
                if (!TAILQ_EMPTY(&b->partitions[i].queue.due))
                        return true;
        return false;
}

bool broker_has_recalls(const struct broker *b)
{
        for (size_t i = 0; i < RECALL_KINDS; i++)
                if (!TAILQ_EMPTY(&b->recalls.lists[i]))
                        return true;
        return false;
}

bool broker_is_blocked(const struct broker *b)
{
        if (broker_has_recalls(b) || b->shared.n_waits > 0)
                return true;
        for (size_t i = 0; i < b->n_devices; i++)
                if (drain_is_waiting(&b->devices[i]) || drain_is_paused(&b->devices[i]) ||
                    worker_n_pending(b->devices[i].worker) > 0)
                        return true; /* a job that has not begun may hang */
        for (size_t i = 0; i < b->n_partitions; i++)
                if (partition_is_blocked(&b->partitions[i]))
                        return true;
        return b->unreclaimed.n > 0 || store_silent_since_ns(b->options.store) != 0;
}

bool broker_is_deferred(const struct broker *b)
{
        for (size_t i = 0; i < b->n_partitions; i++)
                if (partition_is_deferred(&b->partitions[i]))
                        return true;
        return false;
}

void broker_look_again(struct broker *b)
{
        for (size_t i = 0; i < b->n_partitions; i++)
                partition_look_again(&b->partitions[i]);
}

void broker_tick(struct broker *b)
{
        for (size_t i = 0; i < b->n_partitions; i++)
                partition_tick(&b->partitions[i]);
        broker_ask_unreclaimed(b);
        broker_note_hung(b);
        drain_tick(b);
}
