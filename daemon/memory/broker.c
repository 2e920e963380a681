/* The broker's places of tenants and quotas, and its standby memory; see broker.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/broker.h"

#include <errno.h>
#include <stdlib.h>

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
        options->page = options->parent ? NULL : usage_page_entry(t->usage, partition);
        r = quota_new(options, &t->quotas[t->n_quotas]);
        if (r == 0)
                b->quotas[t->quotas[t->n_quotas]->index] = t->quotas[t->n_quotas];
        t->n_quotas += r == 0;
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

void broker_look_for_gone(struct broker *b)
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
