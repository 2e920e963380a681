/* The broker's begin and end; see broker.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/broker.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "daemon/base/crash.h"
#include "daemon/memory/broker_lease.h"
#include "daemon/memory/drain.h"
#include "daemon/memory/inherit.h"

/* Threads that make memory. The calls of a GPU's driver wait for each other. */
#define BROKER_HOST_THREADS 2u
#define BROKER_GPU_THREADS  1u

static int broker_open_ledger(struct broker *b, char *ret_sentence, size_t n_sentence)
{
        struct capacity_records n;
        struct ledger_limits room;
        int r = capacity_count(b->config, &n, ret_sentence, n_sentence);

        if (r == 0)
                r = inherit_ledger(b, &n, ret_sentence, n_sentence);
        if (r < 0)
                return r;
        room = broker_room(b);
        b->sessions.table = calloc(room.n_sessions, sizeof(*b->sessions.table));
        b->quotas = calloc(room.n_quotas, sizeof(struct quota *));
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
        int r = options->devices ? 0 : devices_new(DEVICES_OWN, &b->opened);

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
                struct device_supply supply = { 0 };

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
                p->ledger = b->ledger;
                p->store = p->share == DEVICE_SHARE_FD ? b->options.store : NULL;
                p->standby.standby = b->devices[from->device].standby;
                account_init_root(&p->pool, from->limit_bytes);
                partition_init_lists(p);
                p->reclaim_timeout_ms = c->reclaim_timeout_ms;
                p->turn.wake = options->wake;
                p->turn.userdata = options->userdata;
                p->up.calls = options->upcalls;
                p->up.broker = b;
                p->up.is_inherited = b->inherited != NULL;
        }
        return 0;
}

static int broker_open_quotas(struct broker *b, struct tenant *t, char *ret_sentence, size_t n_sentence)
{
        for (size_t i = 0; i < t->config->n_quotas; i++) {
                const struct config_quota *from = &t->config->quotas[i];
                const struct partition *p = &b->partitions[from->partition];
                int r = broker_add_quota(b, t, from->partition, from, from->reserve_bytes);

                /* A preallocated quota that is not whole cannot keep its promise. */
                if (r == 0)
                        r = quota_back_early(tenant_quota(t, p));
                if (r == 0 && p->preallocate && tenant_quota(t, p)->account.charged_bytes < from->limit_bytes)
                        r = -ENOMEM;
                if (r < 0) {
                        snprintf(ret_sentence, n_sentence,
                                 "the quota of tenant '%s' in partition '%s' could not be set up: %s",
                                 t->name, p->name, device_error(r));
                        return r;
                }
        }
        return 0;
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
        TAILQ_INIT(&b->leases.sockets);
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

struct broker *broker_leave(struct broker *b)
{
        return broker_end(b, quota_abandon);
}
