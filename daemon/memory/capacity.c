/* What a config may need: records in the ledger, fds, and standby memory; see capacity.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/capacity.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>

#include "daemon/base/number.h"

#define MORE_SESSIONS 192u /* admins, monitors and schedulers, 64 of each, also when max_sessions are there */
#define MAX_RECORDS   (UINT64_C(1) << 30) /* of one table; only those used take memory */
#define SESSION_FDS   5u /* its socket, its process, its events' socket, its page, its page's pipe */
#define TENANT_FDS    2u /* its usage page, and what pins it */
/* The daemon's own, monitors, schedulers, pending connections, extents that are being made. */
#define MORE_FDS 320u
/* Records that a later config may need beyond twice what this one does. */
#define MORE_QUOTAS   4096u
#define MORE_EXTENTS  65536u
#define MORE_BLOCKS   (UINT64_C(4) << 20)
#define MORE_REFS     (UINT64_C(1) << 20)
#define MORE_METADATA 65536u

enum device_share capacity_share(const struct config_partition *p)
{
        return p->share == CONFIG_SHARE_FD ? DEVICE_SHARE_FD : DEVICE_SHARE_CUDA_IPC;
}

static struct extent_sizes partition_sizes(const struct config *c, const struct config_partition *p,
                                           uint64_t limit_bytes)
{
        return extent_sizes_for(capacity_share(p), c->devices[p->device].is_cuda, limit_bytes,
                                CONFIG_GRANULARITY);
}

/* ---- records ---------------------------------------------------------------- */

/* Admins have none. */
uint64_t capacity_refs(const struct config *c)
{
        return (uint64_t)c->max_sessions * CAPACITY_REFS;
}

/* As many records as the limits allow to be in use: no table is ever full. */
int capacity_count(const struct config *c, struct capacity_records *ret, char *ret_sentence,
                   size_t n_sentence)
{
        uint64_t n_sessions = (uint64_t)c->max_sessions + MORE_SESSIONS;

        *ret = (struct capacity_records){ .n_refs = capacity_refs(c),
                                          .n_metadata = (uint64_t)c->n_tenants * CAPACITY_KEPT };
        for (size_t i = 0; i < c->n_tenants; i++) {
                for (size_t k = 0; k < c->tenants[i].n_quotas; k++) {
                        const struct config_quota *q = &c->tenants[i].quotas[k];
                        const struct config_partition *p = &c->partitions[q->partition];
                        struct extent_sizes g = partition_sizes(c, p, q->limit_bytes);
                        uint64_t extents = extent_max_records(capacity_share(p), q->limit_bytes, &g);
                        uint64_t sessions = min_u64(q->max_sessions, n_sessions);

                        ret->n_quotas++;
                        ret->n_extents += extents;
                        ret->n_exports += extents * sessions;
                        ret->n_blocks += q->max_blocks;
                }
        }
        if (ret->n_extents <= MAX_RECORDS && ret->n_exports <= MAX_RECORDS && ret->n_blocks <= MAX_RECORDS)
                return 0;
        snprintf(ret_sentence, n_sentence,
                 "the quotas together allow %" PRIu64 " blocks and %" PRIu64 " extents shared with "
                 "sessions; the daemon supports at most %" PRIu64 " of each: lower max_blocks or "
                 "max_sessions of the quotas",
                 ret->n_blocks, ret->n_exports, MAX_RECORDS);
        return -EINVAL;
}

/* Room for a later config, which only address space pays. */
static uint32_t with_room(uint64_t n, uint64_t more)
{
        return (uint32_t)(2 * n + more < MAX_RECORDS ? 2 * n + more : MAX_RECORDS);
}

struct ledger_limits capacity_ledger(const struct capacity_records *n)
{
        return (struct ledger_limits){
                .n_quotas = with_room(n->n_quotas, MORE_QUOTAS),
                .n_sessions = CONFIG_MAX_SESSIONS + MORE_SESSIONS,
                .n_extents = with_room(n->n_extents, MORE_EXTENTS),
                .n_exports = with_room(n->n_exports, MORE_BLOCKS),
                .n_blocks = with_room(n->n_blocks, MORE_BLOCKS),
                .n_shared = with_room(n->n_blocks, MORE_BLOCKS),
                .n_refs = with_room(n->n_refs, MORE_REFS),
                .n_metadata = with_room(n->n_metadata, MORE_METADATA),
                .n_leases = CAPACITY_LEASES,
        };
}

/* ---- fds and standby memory --------------------------------------------------- */

/* One more quota, or lease, with this limit: extents of so many of each size, whatever the partition has. */
static void add_quota(struct capacity_partition *p, uint64_t limit_bytes)
{
        struct extent_sizes g =
                extent_sizes_for(DEVICE_SHARE_FD, p->is_cuda, limit_bytes, CONFIG_GRANULARITY);
        uint64_t size = CONFIG_GRANULARITY;

        p->n_quotas++;
        for (size_t i = 0; i < CAPACITY_SIZES && size <= g.extent_bytes; i++, size *= 2)
                p->n_of_size[i] +=
                        extent_max_count_of_size(limit_bytes, &g, size) +
                        (size == EXTENT_EXACT_BYTES ? extent_max_exact(DEVICE_SHARE_FD, limit_bytes, &g) : 0);
}

/* The extents of all tenants together are no more than the partition: the smallest come first. */
static uint64_t partition_max_extents(const struct capacity_partition *p)
{
        uint64_t rest = p->limit_bytes, size = CONFIG_GRANULARITY;
        uint64_t n = p->n_quotas; /* the first extent of each may have any size */

        for (size_t i = 0; i < CAPACITY_SIZES && size <= rest; i++, size *= 2) {
                uint64_t n_here = min_u64(rest / size, p->n_of_size[i]);

                n += n_here;
                rest -= n_here * size;
        }
        return n;
}

/* For the quota with the highest limit, whose sizes are also those of most others. */
struct standby_goal capacity_standby(const struct config *c, size_t device)
{
        uint64_t limit_bytes = 0;

        for (size_t i = 0; i < c->n_tenants; i++) {
                for (size_t k = 0; k < c->tenants[i].n_quotas; k++) {
                        const struct config_quota *q = &c->tenants[i].quotas[k];
                        const struct config_partition *p = &c->partitions[q->partition];

                        if (p->device == device && config_takes_standby(p))
                                limit_bytes = max_u64(limit_bytes, q->limit_bytes);
                }
        }
        return (struct standby_goal){ .n_bytes = c->devices[device].standby_bytes,
                                      .sizes = extent_sizes_for(DEVICE_SHARE_FD, c->devices[device].is_cuda,
                                                                limit_bytes, CONFIG_GRANULARITY) };
}

static uint64_t device_max_spares(const struct config *c, size_t device)
{
        struct standby_goal goal = capacity_standby(c, device);

        return standby_n_extents(&goal);
}

static bool may_cause_leases(const struct config_tenant *t)
{
        for (size_t i = 0; i < t->n_quotas; i++)
                if (t->quotas[i].per_cgroup)
                        return true;
        return t->leases_self;
}

struct capacity *capacity_new(const struct config *c)
{
        struct capacity *sums = calloc(1, sizeof(*sums) + c->n_partitions * sizeof(sums->partitions[0]));

        if (!sums)
                return NULL;
        sums->n_other_fds = MORE_FDS + (uint64_t)c->n_tenants * TENANT_FDS;
        sums->n_lease_shares = c->lease_socket.path != NULL;
        sums->n_partitions = c->n_partitions;
        for (size_t i = 0; i < c->n_partitions; i++)
                sums->partitions[i] = (struct capacity_partition){
                        .limit_bytes = c->partitions[i].limit_bytes,
                        .is_cuda = c->devices[c->partitions[i].device].is_cuda,
                };
        for (size_t i = 0; i < c->n_devices; i++)
                sums->n_other_fds += device_max_spares(c, i);
        for (size_t i = 0; i < c->n_tenants; i++) {
                for (size_t k = 0; k < c->tenants[i].n_quotas; k++) {
                        const struct config_quota *q = &c->tenants[i].quotas[k];

                        add_quota(&sums->partitions[q->partition], q->limit_bytes);
                }
                sums->n_lease_shares += may_cause_leases(&c->tenants[i]);
        }
        for (size_t i = 0; i < c->n_partitions; i++)
                if (capacity_share(&c->partitions[i]) != DEVICE_SHARE_FD)
                        sums->partitions[i] = (struct capacity_partition){ 0 }; /* they are no fds */
        return sums;
}

uint64_t capacity_fds(const struct capacity *sums, uint64_t n_sessions, const struct capacity_lease *leases,
                      size_t n_leases)
{
        uint64_t n =
                n_sessions * SESSION_FDS + sums->n_other_fds + n_leases; /* each lease may have a socket */

        for (size_t i = 0; i < sums->n_partitions; i++) {
                struct capacity_partition p = sums->partitions[i];

                for (size_t k = 0; p.limit_bytes > 0 && k < n_leases; k++)
                        if (leases[k].partition == i)
                                add_quota(&p, leases[k].limit_bytes);
                n += p.limit_bytes > 0 ? partition_max_extents(&p) : 0;
        }
        return n;
}
