/* The broker; see broker.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/broker.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "daemon/base/crash.h"
#include "daemon/memory/broker_lease.h"
#include "daemon/memory/capacity.h"
#include "daemon/memory/drain.h"
#include "daemon/base/number.h"
#include "daemon/memory/inherit.h"

#define BROKER_MAX_PLACES (2 * CONFIG_MAX_TENANTS)
/* Threads that make memory. The calls of a GPU's driver wait for each other. */
#define BROKER_HOST_THREADS 2u
#define BROKER_GPU_THREADS  1u

static int broker_open_ledger(struct broker *b, char *ret_sentence, size_t n_sentence)
{
        struct capacity_records n;
        int r = capacity_count(b->config, &n, ret_sentence, n_sentence);

        if (r < 0)
                return r;
        b->room = capacity_ledger(&n);
        r = inherit_ledger(b, &n, ret_sentence, n_sentence);
        if (r < 0)
                return r;
        b->sessions.table = calloc(b->room.n_sessions, sizeof(*b->sessions.table));
        b->quotas = calloc(b->room.n_quotas, sizeof(struct quota *));
        return b->sessions.table && b->quotas ? 0 : -ENOMEM;
}

static int broker_open_device(struct devices *opened, const struct broker_options *options,
                              struct broker_device *d, char *ret_sentence, size_t n_sentence)
{
        struct device_facts facts;
        char why[400];
        int r;

        snprintf(why, sizeof(why), "%s: the device does not respond", d->config->id);
        r = devices_open(opened, d->config->id, &d->device, why, sizeof(why));
        if (r == 0)
                r = device_facts(d->device, &facts);
        if (r < 0) {
                snprintf(ret_sentence, n_sentence, "device %s", why);
                return r;
        }
        snprintf(d->name, sizeof(d->name), "%s", facts.name);
        d->bytes_total = facts.bytes_total;
        if (device_foreign_bytes(d->device, &d->foreign_bytes) < 0)
                d->foreign_bytes = UINT64_MAX;
        return options->inline_workers
                       ? worker_new_inline(&d->worker)
                       : worker_new(d->config->is_cuda ? BROKER_GPU_THREADS : BROKER_HOST_THREADS,
                                    options->notify, options->userdata, &d->worker);
}

static int broker_open_devices(struct broker *b, const struct broker_options *options, char *ret_sentence,
                               size_t n_sentence)
{
        const struct config *c = b->config;
        int r = options->devices ? 0 : devices_new(false, &b->opened);

        if (r < 0)
                return r;
        b->devices = calloc(c->n_devices, sizeof(*b->devices));
        if (!b->devices)
                return -ENOMEM;
        for (; b->n_devices < c->n_devices; b->n_devices++) {
                struct broker_device *d = &b->devices[b->n_devices];

                d->config = &c->devices[b->n_devices];
                r = broker_open_device(b->opened ? b->opened : options->devices, options, d, ret_sentence,
                                       n_sentence);
                if (r < 0)
                        return r;
        }
        return 0;
}

/* The partitions that take it make memory in one way. */
static int broker_open_standby(struct broker *b)
{
        const struct config *c = b->config;
        int r = 0;

        for (size_t i = 0; r == 0 && i < b->n_devices; i++) {
                struct broker_device *d = &b->devices[i];
                struct device_supply supply = { .pages = DEVICE_PAGES_AUTO };

                for (size_t k = 0; k < c->n_partitions; k++)
                        if (c->partitions[k].device == i && config_takes_standby(&c->partitions[k]))
                                supply = devices_supply(&c->partitions[k]);
                r = standby_new(d->device, d->worker, &supply, CONFIG_GRANULARITY, &d->standby);
                if (r == 0 && b->inherited) /* sessions are resumed first */
                        standby_pause(d->standby);
        }
        return r;
}

static int broker_open_partitions(struct broker *b, const struct broker_options *options)
{
        const struct config *c = b->config;

        b->partitions = calloc(c->n_partitions, sizeof(*b->partitions));
        if (!b->partitions)
                return -ENOMEM;
        for (; b->n_partitions < c->n_partitions; b->n_partitions++) {
                const struct config_partition *from = &c->partitions[b->n_partitions];
                struct partition *p = &b->partitions[b->n_partitions];

                p->name = from->name;
                p->device_id = c->devices[from->device].id;
                p->preallocate = from->growth == CONFIG_GROWTH_PREALLOCATE;
                p->share = capacity_share(from);
                p->clears = from->clears;
                p->memory.supply = devices_supply(from);
                p->memory.is_pinned = from->is_pinned;
                p->is_cuda = c->devices[from->device].is_cuda;
                p->context_bytes = c->devices[from->device].context_bytes;
                memcpy(p->uuid, c->devices[from->device].uuid, sizeof(p->uuid));
                p->device = b->devices[from->device].device;
                p->worker = b->devices[from->device].worker;
                p->store = b->options.store;
                p->standby.standby = b->devices[from->device].standby;
                account_init_root(&p->pool, from->limit_bytes);
                partition_init_lists(p);
                p->reclaim_timeout_ms = c->reclaim_timeout_ms;
                p->turn.wake = options->wake;
                p->turn.userdata = options->userdata;
                p->up.calls = options->upcalls;
                p->up.broker = b;
                p->up.is_inheriting = b->inherited != NULL;
        }
        return 0;
}

int broker_make_quota(struct broker *b, struct tenant *t, size_t partition, struct quota_options *options)
{
        struct quota **quotas = reallocarray(t->quotas, t->n_quotas + 1, sizeof(*quotas));
        int r = t->usage ? 0 : usage_page_new(b->n_partitions, &t->usage);

        if (quotas)
                t->quotas = quotas;
        if (!quotas || (r < 0 && r != -EINVAL))
                return quotas ? r : -ENOMEM;
        options->tenant = t->name;
        options->partition = &b->partitions[partition];
        options->ledger = b->ledger;
        options->page = options->parent ? NULL : usage_page_entry(t->usage, partition);
        r = quota_new(options, &t->quotas[t->n_quotas]);
        if (r == 0)
                b->quotas[t->quotas[t->n_quotas]->index] = t->quotas[t->n_quotas];
        t->n_quotas += r == 0;
        return r;
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

static int broker_open_quotas(struct broker *b, struct tenant *t, char *ret_sentence, size_t n_sentence)
{
        for (size_t i = 0; i < t->config->n_quotas; i++) {
                const struct config_quota *from = &t->config->quotas[i];
                int r = broker_add_quota(b, t, from->partition, from, from->reserve_bytes);
                if (r < 0) {
                        snprintf(ret_sentence, n_sentence,
                                 "the quota of tenant '%s' in partition '%s' could not be set up: %s",
                                 t->name, b->partitions[from->partition].name, device_error(r));
                        return r;
                }
        }
        return 0;
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

static int broker_open_tenants(struct broker *b, char *ret_sentence, size_t n_sentence)
{
        const struct config *c = b->config;
        int r = 0;

        b->tenants = calloc(BROKER_MAX_PLACES, sizeof(*b->tenants));
        b->selection.order = calloc(c->n_tenants + 1, sizeof(*b->selection.order));
        if (!b->tenants || !b->selection.order)
                return -ENOMEM;
        for (size_t i = 0; r == 0 && i < c->n_tenants; i++) {
                struct tenant *t = &b->tenants[b->n_tenants++];

                tenant_init(t, &c->tenants[i]);
                b->selection.order[b->selection.n++] = t;
                if (!b->inherited)
                        r = broker_open_quotas(b, t, ret_sentence, n_sentence);
        }
        if (r == 0 && b->inherited)
                r = inherit_quotas(b, ret_sentence, n_sentence);
        if (r == 0 && c->default_tenant >= 0)
                b->selection.fallback = b->selection.order[c->default_tenant];
        broker_promise(b);
        return r == 0 ? matcher_new(c, &b->selection.matcher) : r;
}

int broker_new(const struct broker_options *options, struct broker **ret, char *ret_sentence,
               size_t n_sentence)
{
        struct broker *b = calloc(1, sizeof(*b));
        uint64_t began_ns = clock_ns();
        int r;

        if (!b)
                return -ENOMEM;
        b->config = options->config;
        b->options = *options;
        TAILQ_INIT(&b->sessions.mapped);
        for (size_t i = 0; i < RECALL_KINDS; i++)
                TAILQ_INIT(&b->recalls.lists[i]);
        TAILQ_INIT(&b->shared.due);
        b->started_ms = clock_ms();
        ret_sentence[0] = '\0';
        b->own.text = config_format(b->config);
        b->own.capacity = capacity_new(b->config);
        r = b->own.text && b->own.capacity ? broker_open_ledger(b, ret_sentence, n_sentence) : -ENOMEM;
        if (r == 0)
                r = broker_open_devices(b, options, ret_sentence, n_sentence);
        if (r == 0)
                r = broker_open_standby(b);
        if (r == 0)
                r = broker_open_partitions(b, options);
        if (r == 0)
                r = broker_open_tenants(b, ret_sentence, n_sentence);
        if (r < 0) {
                if (ret_sentence[0] == '\0')
                        snprintf(ret_sentence, n_sentence, "the broker could not be set up: %s",
                                 strerror(-r));
                if (store_keeps(b->options.store)) {
                        broker_prepare_leave(b);
                        broker_leave(b);
                } else {
                        broker_free(b);
                }
                return r;
        }
        broker_check_unreclaimed(b);
        broker_set_standby(b);
        b->restored.ns = clock_ns() - began_ns;
        *ret = b;
        return 0;
}

void broker_note_well(struct broker *b)
{
        *ledger_crashes(b->ledger) = 0;
        *ledger_n_aside(b->ledger) = 0;
}

static bool broker_has_recalls(const struct broker *b)
{
        for (size_t i = 0; i < RECALL_KINDS; i++)
                if (!TAILQ_EMPTY(&b->recalls.lists[i]))
                        return true;
        return false;
}

static struct broker *broker_end(struct broker *b, struct quota *(*end_quota)(struct quota *q))
{
        if (!b)
                return NULL;
        assert(b->sessions.n == 0 && !broker_has_recalls(b));
        assert(!b->shared.tree && b->shared.n_waits == 0);
        for (size_t i = 0; i < b->n_devices; i++)
                device_end(b->devices[i].device);
        store_end(b->options.store);
        drain_end(b);
        /* What workers still have to deliver refers to arenas. */
        while (broker_n_pending(b) > 0)
                for (size_t i = 0; i < b->n_devices; i++)
                        worker_drain(b->devices[i].worker);
        leases_forget(b, end_quota == quota_abandon);
        for (size_t i = 0; i < b->n_tenants; i++) {
                for (size_t k = b->tenants[i].n_quotas;
                     k-- > 0;) /* leases before the quotas that they are in */
                        end_quota(b->tenants[i].quotas[k]);
                tenant_deinit(&b->tenants[i]);
        }
        for (size_t i = 0; i < b->n_devices; i++) {
                worker_free(b->devices[i].worker);
                standby_free(b->devices[i].standby);
                drain_free(b->devices[i].drain);
                free(b->devices[i].command); /* that waited for a tick; nothing refers to it */
                free(b->devices[i].outside);
        }
        inherited_free(b->inherited);
        free(b->suspended.records);
        free(b->suspended.users);
        free(b->restored.extents);
        devices_free(b->opened);
        free(b->selection.order);
        matcher_free(b->selection.matcher);
        free(b->tenants);
        free(b->partitions);
        free(b->devices);
        free(b->sessions.table);
        free(b->quotas);
        free(b->reports.partitions);
        crash_count_in(NULL, NULL);
        ledger_free(b->ledger);
        free(b->own.capacity);
        free(b->own.text);
        config_free(b->own.config);
        free(b);
        return NULL;
}

struct broker *broker_free(struct broker *b)
{
        return broker_end(b, quota_free);
}

void broker_prepare_leave(struct broker *b)
{
        b->is_left = true;
        for (size_t i = 0; i < b->n_tenants; i++)
                for (size_t k = 0; k < b->tenants[i].n_quotas; k++)
                        b->tenants[i].quotas[k]->is_left = true;
}

struct broker *broker_leave(struct broker *b)
{
        return broker_end(b, quota_abandon);
}

void broker_look_for_gone(struct broker *b)
{
        if (!b->changes.may_have_gone)
                broker_wake(b);
        b->changes.may_have_gone = true;
}

/* ---- places of sessions ---------------------------------------------------- */

/* ---- what was removed from the config ------------------------------------ */

void broker_note_leave(struct broker *b, const struct quota *q)
{
        if (q->is_removed)
                broker_look_for_gone(b);
}

static void broker_free_gone_quota(struct broker *b, struct quota *q)
{
        struct lease *lease = q->lease.parent ? lease_of(b, q) : NULL;

        if (q->lease.parent) /* which may be gone now */
                broker_look_for_gone(b);
        if (lease) {
                lease_free(b, lease);
                return;
        }
        quota_free(q);
        b->changes.has_freed = true;
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

/* ---- turns --------------------------------------------------------------- */

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

void broker_wake(const struct broker *b)
{
        if (b->options.wake)
                b->options.wake(b->options.userdata);
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
