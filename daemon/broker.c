/* The broker; see broker.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/broker.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "daemon/clock.h"
#include "daemon/crash.h"
#include "daemon/drain.h"
#include "daemon/number.h"
#include "daemon/takeover.h"

#define BROKER_SETTLE_MS      1000u
#define BROKER_ADMIN_SESSIONS 64u                 /* admins come in also when max_sessions are there */
#define BROKER_MAX_RECORDS    (UINT64_C(1) << 30) /* of one table; only those used take memory */
#define BROKER_MAX_PLACES     (2 * CONFIG_MAX_TENANTS)
#define BROKER_SESSION_FDS    5u /* its socket, its process, its events' socket, its page, its page's pipe */
#define BROKER_TENANT_FDS     2u /* its usage page, and what pins it */
/* Destroyed extents that are watched: so many, and of the fds that the process may have one of so many. */
#define BROKER_MAX_WATCHED     4096u
#define BROKER_FDS_PER_WATCHED 16u
#define BROKER_LOOKS           128u /* at watched extents, each time */
#define BROKER_MORE_FDS        64u  /* the daemon's own, a few newcomers, what is on its way */
/* Records that a later config may need beyond twice what this one does. */
#define BROKER_MORE_QUOTAS  4096u
#define BROKER_MORE_EXTENTS 65536u
#define BROKER_MORE_BLOCKS  (UINT64_C(4) << 20)
#define BROKER_MORE_HOLDS   (UINT64_C(1) << 20)
/* Threads that make memory. The calls of a GPU's driver wait for each other. */
#define BROKER_HOST_THREADS 2u
#define BROKER_GPU_THREADS  1u

static enum device_share partition_share(const struct config_partition *p)
{
        return p->share == CONFIG_SHARE_FD ? DEVICE_SHARE_FD : DEVICE_SHARE_CUDA_IPC;
}

/* Room for a later config, which only address space pays. */
static uint32_t with_room(uint64_t n, uint64_t more)
{
        return (uint32_t)(2 * n + more < BROKER_MAX_RECORDS ? 2 * n + more : BROKER_MAX_RECORDS);
}

/* Admins have none. */
uint64_t broker_max_holds(const struct config *c)
{
        return (uint64_t)c->max_sessions * BROKER_HOLDS;
}

/* How many extents of this size the quotas of a partition can have, whatever the partition has. */
static uint64_t quotas_max_extents(const struct config *c, size_t partition, uint64_t size)
{
        uint64_t n = 0;

        for (size_t i = 0; i < c->n_tenants; i++) {
                for (size_t k = 0; k < c->tenants[i].n_quotas; k++) {
                        const struct config_quota *q = &c->tenants[i].quotas[k];
                        struct arena_grid g = arena_grid(DEVICE_SHARE_FD, q->limit_bytes, CONFIG_GRANULARITY);

                        if (q->partition == partition)
                                n += arena_max_extents_of_size(q->limit_bytes, &g, size);
                }
        }
        return n;
}

/* The extents of all tenants together are no more than the partition: the smallest come first. */
static uint64_t partition_max_extents(const struct config *c, size_t partition)
{
        uint64_t rest = c->partitions[partition].limit_bytes, n = 0;

        if (partition_share(&c->partitions[partition]) != DEVICE_SHARE_FD)
                return 0;                         /* they are no fds */
        for (size_t i = 0; i < c->n_tenants; i++) /* the first extent of each may have any size */
                for (size_t k = 0; k < c->tenants[i].n_quotas; k++)
                        n += c->tenants[i].quotas[k].partition == partition;
        for (uint64_t size = CONFIG_GRANULARITY; size <= rest; size *= 2) {
                uint64_t n_here = min_u64(rest / size, quotas_max_extents(c, partition, size));

                n += n_here;
                rest -= n_here * size;
        }
        return n;
}

/* For the quota with the highest limit, whose sizes are also those of lower ones. */
static struct standby_goal standby_goal_of(const struct config *c, size_t device)
{
        uint64_t limit_bytes = 0;
        struct arena_grid g;

        for (size_t i = 0; i < c->n_tenants; i++) {
                for (size_t k = 0; k < c->tenants[i].n_quotas; k++) {
                        const struct config_quota *q = &c->tenants[i].quotas[k];
                        const struct config_partition *p = &c->partitions[q->partition];

                        if (p->device == device && config_takes_standby(p))
                                limit_bytes = max_u64(limit_bytes, q->limit_bytes);
                }
        }
        g = arena_grid(DEVICE_SHARE_FD, limit_bytes, CONFIG_GRANULARITY);
        return (struct standby_goal){ c->devices[device].standby_bytes, g.extent_bytes, g.small_extent_bytes,
                                      g.extents_per_zone };
}

static uint64_t device_max_spares(const struct config *c, size_t device)
{
        struct standby_goal goal = standby_goal_of(c, device);

        return standby_n_extents(&goal);
}

uint64_t broker_wants_fds(const struct config *c)
{
        uint64_t n = (uint64_t)c->max_sessions * BROKER_SESSION_FDS + BROKER_MORE_FDS +
                     (uint64_t)c->n_tenants * BROKER_TENANT_FDS;

        for (size_t i = 0; i < c->n_partitions; i++)
                n += partition_max_extents(c, i);
        for (size_t i = 0; i < c->n_devices; i++)
                n += device_max_spares(c, i);
        return n + n / (BROKER_FDS_PER_WATCHED - 1);
}

/* So that destroyed extents never take the fds of living sessions. */
static size_t broker_max_watched(void)
{
        struct rlimit limit;

        if (getrlimit(RLIMIT_NOFILE, &limit) < 0 || limit.rlim_cur == RLIM_INFINITY)
                return BROKER_MAX_WATCHED;
        return (size_t)min_u64(limit.rlim_cur / BROKER_FDS_PER_WATCHED, BROKER_MAX_WATCHED);
}

/* As many records as the limits allow to be in use: no table is ever full. */
static int broker_count_records(const struct broker *b, struct broker_records *ret, char *ret_sentence,
                                size_t n_sentence)
{
        const struct config *c = b->config;
        uint64_t n_sessions = (uint64_t)c->max_sessions + BROKER_ADMIN_SESSIONS;

        *ret = (struct broker_records){ .n_holds = broker_max_holds(c) };
        for (size_t i = 0; i < c->n_tenants; i++) {
                for (size_t k = 0; k < c->tenants[i].n_quotas; k++) {
                        const struct config_quota *q = &c->tenants[i].quotas[k];
                        enum device_share share = partition_share(&c->partitions[q->partition]);
                        struct arena_grid g = arena_grid(share, q->limit_bytes, CONFIG_GRANULARITY);
                        uint64_t extents = arena_max_extents(share, q->limit_bytes, &g);
                        uint64_t sessions = q->max_sessions < n_sessions ? q->max_sessions : n_sessions;

                        ret->n_quotas++;
                        ret->n_extents += extents;
                        ret->n_exports += extents * sessions;
                        ret->n_blocks += q->max_blocks;
                }
        }
        if (ret->n_extents <= BROKER_MAX_RECORDS && ret->n_exports <= BROKER_MAX_RECORDS &&
            ret->n_blocks <= BROKER_MAX_RECORDS)
                return 0;
        snprintf(ret_sentence, n_sentence,
                 "the quotas together allow %" PRIu64 " blocks and %" PRIu64 " extents shared with "
                 "sessions; the daemon supports at most %" PRIu64 " of each: lower max_blocks or "
                 "max_sessions of the quotas",
                 ret->n_blocks, ret->n_exports, BROKER_MAX_RECORDS);
        return -EINVAL;
}

static int broker_open_ledger(struct broker *b, char *ret_sentence, size_t n_sentence)
{
        struct broker_records n;
        int r = broker_count_records(b, &n, ret_sentence, n_sentence);

        if (r < 0)
                return r;
        b->room = (struct ledger_limits){
                .n_quotas = with_room(n.n_quotas, BROKER_MORE_QUOTAS),
                .n_sessions = CONFIG_MAX_SESSIONS + BROKER_ADMIN_SESSIONS,
                .n_extents = with_room(n.n_extents, BROKER_MORE_EXTENTS),
                .n_exports = with_room(n.n_exports, BROKER_MORE_BLOCKS),
                .n_blocks = with_room(n.n_blocks, BROKER_MORE_BLOCKS),
                .n_shared = with_room(n.n_blocks, BROKER_MORE_BLOCKS),
                .n_holds = with_room(n.n_holds, BROKER_MORE_HOLDS),
        };
        r = takeover_ledger(b, &n, ret_sentence, n_sentence);
        if (r < 0)
                return r;
        b->sessions = calloc(b->room.n_sessions, sizeof(*b->sessions));
        b->quotas = calloc(b->room.n_quotas, sizeof(struct quota *));
        return b->sessions && b->quotas ? 0 : -ENOMEM;
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
        if (device_others(d->device, &d->others_bytes) < 0)
                d->others_bytes = UINT64_MAX;
        return options->inline_workers
                       ? worker_new_inline(&d->worker)
                       : worker_new(d->config->is_cuda ? BROKER_GPU_THREADS : BROKER_HOST_THREADS,
                                    options->notify, options->userdata, &d->worker);
}

static int broker_open_devices(struct broker *b, const struct broker_options *options, char *ret_sentence,
                               size_t n_sentence)
{
        const struct config *c = b->config;
        int r = options->devices ? 0 : devices_new(&b->opened);

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
                r = standby_new(d->device, d->worker, d->device->empties_mappings ? b->punch : NULL, &supply,
                                CONFIG_GRANULARITY, &d->standby);
                if (r == 0 && b->remains) /* sessions come back first */
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
                p->growth = p->preallocate ? "preallocate" : "on-demand";
                p->share = partition_share(from);
                p->share_name = from->share == CONFIG_SHARE_FD ? "fd" : "cuda-ipc";
                p->clears = from->clears;
                p->supply = devices_supply(from);
                p->is_cuda = c->devices[from->device].is_cuda;
                memcpy(p->uuid, c->devices[from->device].uuid, sizeof(p->uuid));
                p->device = b->devices[from->device].device;
                p->worker = b->devices[from->device].worker;
                p->punch = p->device->empties_mappings ? b->punch : NULL;
                p->store = b->store;
                p->watch = b->watch;
                p->standby.standby = b->devices[from->device].standby;
                pool_init(&p->pool, from->limit_bytes);
                partition_init_lists(p);
                p->keepers = &b->keepers;
                p->reclaim_timeout_ms = c->reclaim_timeout_ms;
                p->wake = options->wake;
                p->userdata = options->userdata;
        }
        return 0;
}

static void on_retire(void *userdata, const uint32_t *extents, size_t n_extents)
{
        struct broker *b = userdata;

        b->retire(b, extents, n_extents);
}

static bool on_lets_go(void *userdata, uint32_t extent)
{
        struct broker *b = userdata;

        return b->lets_go(b, extent);
}

static bool on_trim(void *userdata, struct quota *q, struct quota_request *first, int refusal,
                    uint64_t missing)
{
        struct broker *b = userdata;

        return b->trim(b, q, first, refusal, missing);
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
        options->usage = usage_page_entry(t->usage, partition);
        options->retire = on_retire;
        options->lets_go = b->lets_go ? on_lets_go : NULL;
        options->trim = b->trim ? on_trim : NULL;
        options->userdata = b;
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
                .keep_bytes = from->keep_bytes,
                .keep_ms = from->keep_ms,
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
        b->order = calloc(c->n_tenants + 1, sizeof(*b->order));
        if (!b->tenants || !b->order)
                return -ENOMEM;
        for (size_t i = 0; r == 0 && i < c->n_tenants; i++) {
                struct tenant *t = &b->tenants[b->n_tenants++];

                tenant_init(t, &c->tenants[i]);
                b->order[b->n_order++] = t;
                if (!b->remains)
                        r = broker_open_quotas(b, t, ret_sentence, n_sentence);
        }
        if (r == 0 && b->remains)
                r = takeover_quotas(b, ret_sentence, n_sentence);
        if (r == 0 && c->default_tenant >= 0)
                b->default_tenant = b->order[c->default_tenant];
        broker_promise_sessions(b);
        return r == 0 ? matcher_new(c, &b->matcher) : r;
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
        b->store = options->store;
        b->punch = options->punch;
        b->retire = options->retire;
        b->lets_go = options->lets_go;
        b->wake = options->wake;
        b->userdata = options->userdata;
        b->trim = options->trim;
        b->want_back = options->want_back;
        TAILQ_INIT(&b->keepers.quotas);
        TAILQ_INIT(&b->trims);
        TAILQ_INIT(&b->retirements);
        TAILQ_INIT(&b->shared_due);
        b->started_ms = clock_ms();
        ret_sentence[0] = '\0';
        b->config_text = config_format(b->config);
        r = b->config_text ? broker_open_ledger(b, ret_sentence, n_sentence) : -ENOMEM;
        if (r == 0)
                r = watch_new(broker_max_watched(), &b->watch);
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
                if (store_keeps(b->store)) {
                        broker_prepare_leave(b);
                        broker_leave(b);
                } else {
                        broker_free(b);
                }
                return r;
        }
        broker_look_for_escapes(b);
        broker_set_standby(b);
        b->taken_ns = clock_ns() - began_ns;
        *ret = b;
        return 0;
}

int kept_record_compare(const void *x, const void *y)
{
        const struct kept_record *p = x, *q = y;

        return p->id < q->id ? -1 : p->id > q->id;
}

void broker_is_well(struct broker *b)
{
        *ledger_crashes(b->ledger) = 0;
}

static struct broker *broker_end(struct broker *b, struct quota *(*end_quota)(struct quota *q))
{
        if (!b)
                return NULL;
        assert(b->n_sessions == 0 && TAILQ_EMPTY(&b->retirements) && TAILQ_EMPTY(&b->trims));
        assert(!b->shared_names && b->n_shared_waits == 0);
        for (size_t i = 0; i < b->n_devices; i++)
                device_end(b->devices[i].device);
        drain_end(b);
        punch_stop(b->punch); /* what it has not done yet is not waited for */
        /* What workers still have to deliver refers to arenas. */
        while (broker_n_pending(b) > 0)
                for (size_t i = 0; i < b->n_devices; i++)
                        worker_drain(b->devices[i].worker);
        for (size_t i = 0; i < b->n_tenants; i++) {
                for (size_t k = 0; k < b->tenants[i].n_quotas; k++)
                        end_quota(b->tenants[i].quotas[k]);
                tenant_deinit(&b->tenants[i]);
        }
        for (size_t i = 0; i < b->n_devices; i++) {
                worker_free(b->devices[i].worker);
                standby_free(b->devices[i].standby);
                drain_free(b->devices[i].drain);
                free(b->devices[i].order); /* that waited for a tick; nothing refers to it */
        }
        watch_free(b->watch);
        remains_free(b->remains);
        free(b->awaited);
        free(b->awaited_uids);
        free(b->kept);
        devices_free(b->opened);
        free(b->order);
        matcher_free(b->matcher);
        free(b->tenants);
        free(b->partitions);
        free(b->devices);
        free(b->sessions);
        free(b->quotas);
        crash_count_in(NULL);
        ledger_free(b->ledger);
        free(b->config_text);
        config_free(b->own_config);
        free(b);
        return NULL;
}

struct broker *broker_free(struct broker *b)
{
        return broker_end(b, quota_free);
}

void broker_prepare_leave(struct broker *b)
{
        for (size_t i = 0; i < b->n_tenants; i++)
                for (size_t k = 0; k < b->tenants[i].n_quotas; k++)
                        b->tenants[i].quotas[k]->is_left = true;
}

struct broker *broker_leave(struct broker *b)
{
        return broker_end(b, quota_abandon);
}

/* Whether its device may have back what escaped. */
static bool quota_may_settle(const struct quota *q)
{
        return arena_escaped_bytes(q->arena) > 0 && !q->partition->is_lost && !q->partition->is_draining &&
               q->partition->device->ops->others;
}

/* Memory that a process references for a moment is no news. */
static uint64_t quota_escaped_to_log(const struct quota *q)
{
        return quota_may_settle(q) ? arena_confirmed_escaped_bytes(q->arena) : arena_escaped_bytes(q->arena);
}

static void quota_log_escape(struct tenant *t, struct quota *q)
{
        uint64_t n_bytes = quota_escaped_to_log(q);

        if (n_bytes < q->logged_escaped_bytes)
                log_limited(
                        &t->escape_logs[false], LOG_LEVEL_INFO,
                        "device '%s' returned unreclaimed memory of tenant '%s' in partition '%s': %" PRIu64
                        " bytes are no longer charged, %" PRIu64 " bytes are still unreclaimed",
                        q->partition->device_id, q->tenant, q->partition->name,
                        q->logged_escaped_bytes - n_bytes, n_bytes);
        else if (!q->partition->is_lost) /* then that says it all */
                log_limited(&t->escape_logs[true], LOG_LEVEL_ERROR,
                            "device '%s' did not return memory of tenant '%s' in partition '%s': %" PRIu64
                            " bytes are unreclaimed and stay charged",
                            q->partition->device_id, q->tenant, q->partition->name, n_bytes);
        q->logged_escaped_bytes = n_bytes;
}

/* Whoever waits is served ENODEV at the next turn. */
static void broker_lose_device(struct broker *b, const struct device *device)
{
        for (size_t i = 0; i < b->n_devices; i++) {
                struct broker_device *d = &b->devices[i];

                if (d->device != device)
                        continue;
                d->is_lost = true;
                log_error("device '%s' (%s) is lost: its partitions refuse all requests until an operator "
                          "drains and resumes the device or restarts bfcd; see the kernel log for the "
                          "cause",
                          d->config->id, d->name);
        }
        for (size_t i = 0; i < b->n_partitions; i++)
                if (b->partitions[i].device == device)
                        partition_lose(&b->partitions[i]);
}

static void quota_log_refills(struct tenant *t, struct quota *q)
{
        q->logged_refills = arena_n_refills(q->arena);
        log_limited(&t->refill_log, LOG_LEVEL_WARNING,
                    "tenant '%s' writes into released extents of partition '%s' through fds or mappings "
                    "that its processes kept: %" PRIu64 " bytes found; the daemon returns them to the "
                    "kernel again and charges them to the tenant until then",
                    q->tenant, q->partition->name, arena_refilled_bytes(q->arena));
}

static void broker_look_for_gone(struct broker *b)
{
        if (!b->may_have_gone)
                broker_wake(b);
        b->may_have_gone = true;
}

static struct tenant *broker_tenant_of(const struct broker *b, const struct quota *q)
{
        size_t i = 0;

        while (b->tenants[i].name != q->tenant)
                i++;
        return &b->tenants[i];
}

/* Notes what is new of the quotas that changed since the last time. */
static void broker_note_changes(struct broker *b)
{
        for (size_t i = 0; i < b->n_partitions; i++) {
                struct quota *q;

                while ((q = partition_next_changed(&b->partitions[i]))) {
                        b->n_visits++;
                        if (arena_is_lost(q->arena) && !q->partition->is_lost)
                                broker_lose_device(b, q->partition->device);
                        if (quota_escaped_to_log(q) != q->logged_escaped_bytes)
                                quota_log_escape(broker_tenant_of(b, q), q);
                        if (arena_n_refills(q->arena) != q->logged_refills)
                                quota_log_refills(broker_tenant_of(b, q), q);
                        if (!b->may_settle && quota_may_settle(q)) {
                                b->may_settle = true;
                                b->settled_ms = clock_ms(); /* the device is asked in BROKER_SETTLE_MS */
                        }
                }
        }
        if (b->has_removed)
                broker_look_for_gone(b);
}

void broker_poll(struct broker *b)
{
        size_t n = 0;

        for (size_t i = 0; i < b->n_devices; i++)
                n += worker_poll(b->devices[i].worker);
        if (n == 0)
                return;
        broker_note_changes(b);
        if (b->may_settle)
                broker_look_for_escapes(b); /* the last may be back */
        drain_poll(b);
        broker_stand_by(b);
}

/* ---- places of sessions ---------------------------------------------------- */

/* Of its share, those that it does not use. A tenant that was removed has no share. */
static size_t tenant_n_promised(const struct broker *b, const struct tenant *t)
{
        size_t share = t->config ? config_session_share(b->config, t->config) : 0;

        return share > t->n_sessions ? share - t->n_sessions : 0;
}

void broker_session_begins(struct broker *b, struct tenant *t)
{
        b->n_promised_sessions -= tenant_n_promised(b, t);
        t->n_sessions++;
        b->n_client_sessions++;
        b->n_promised_sessions += tenant_n_promised(b, t);
}

void broker_session_ends(struct broker *b, struct tenant *t)
{
        b->n_promised_sessions -= tenant_n_promised(b, t);
        t->n_sessions--;
        b->n_client_sessions--;
        b->n_promised_sessions += tenant_n_promised(b, t);
}

void broker_promise_sessions(struct broker *b)
{
        b->n_promised_sessions = 0;
        for (size_t i = 0; i < b->n_order; i++)
                b->n_promised_sessions += tenant_n_promised(b, b->order[i]);
}

int broker_admits(const struct broker *b, const struct tenant *t, char *ret_sentence, size_t n_sentence)
{
        uint32_t n_max = b->config->max_sessions;

        if (t->n_sessions >= t->config->max_sessions)
                snprintf(ret_sentence, n_sentence,
                         "tenant '%s' has %zu sessions: its limit max_sessions is %" PRIu32, t->name,
                         t->n_sessions, t->config->max_sessions);
        else if (b->n_client_sessions >= n_max)
                snprintf(ret_sentence, n_sentence,
                         "the daemon has %zu sessions: its limit max_sessions is %" PRIu32,
                         b->n_client_sessions, n_max);
        else if (tenant_n_promised(b, t) == 0 && b->n_client_sessions + b->n_promised_sessions >= n_max)
                snprintf(ret_sentence, n_sentence,
                         "the daemon has %zu of at most %" PRIu32 " sessions (max_sessions), and the free "
                         "ones are guaranteed to other tenants; tenant '%s' has %zu",
                         b->n_client_sessions, n_max, t->name, t->n_sessions);
        else
                return 0;
        return -EDQUOT;
}

/* ---- what was removed from the config ------------------------------------ */

void broker_note_leave(struct broker *b, const struct quota *q)
{
        if (q->is_removed)
                broker_look_for_gone(b);
}

static bool tenant_free_gone_quotas(struct broker *b, struct tenant *t)
{
        size_t kept = 0;

        for (size_t i = 0; i < t->n_quotas; i++) {
                if (quota_is_gone(t->quotas[i])) {
                        quota_free(t->quotas[i]);
                        continue;
                }
                b->has_removed = b->has_removed || t->quotas[i]->is_removed;
                t->quotas[kept++] = t->quotas[i];
        }
        t->n_quotas = kept;
        return kept == 0 && !t->config && t->n_sessions == 0;
}

static void broker_free_gone(struct broker *b)
{
        b->may_have_gone = false;
        b->has_removed = false;
        for (size_t i = b->n_tenants; i-- > 0;)
                if (b->tenants[i].name[0] != '\0' && tenant_free_gone_quotas(b, &b->tenants[i]))
                        broker_leave_place(b, &b->tenants[i]);
}

/* ---- turns --------------------------------------------------------------- */

/* Each quota that is due has one turn. */
void broker_turn(struct broker *b)
{
        if (b->may_have_gone)
                broker_free_gone(b);
        for (size_t i = 0; i < b->n_partitions; i++) {
                struct quota *q, *next;

                for (q = TAILQ_FIRST(&b->partitions[i].due); q; q = next) {
                        next = TAILQ_NEXT(q, of_due);
                        quota_turn(q);
                }
        }
        drain_turn(b);
}

bool broker_is_due(const struct broker *b)
{
        if (b->may_have_gone || drain_is_due(b))
                return true;
        for (size_t i = 0; i < b->n_partitions; i++)
                if (!TAILQ_EMPTY(&b->partitions[i].due))
                        return true;
        return false;
}

void broker_wake(const struct broker *b)
{
        if (b->wake)
                b->wake(b->userdata);
}

bool broker_is_blocked(const struct broker *b)
{
        if (!TAILQ_EMPTY(&b->retirements) || !TAILQ_EMPTY(&b->trims) || b->n_shared_waits > 0)
                return true;
        for (size_t i = 0; b->n_drains > 0 && i < b->n_devices; i++)
                if (drain_is_waiting(&b->devices[i]))
                        return true;
        for (size_t i = 0; i < b->n_partitions; i++)
                if (partition_is_blocked(&b->partitions[i]))
                        return true;
        return b->may_settle;
}

bool broker_is_put_off(const struct broker *b)
{
        for (size_t i = 0; i < b->n_partitions; i++)
                if (partition_is_put_off(&b->partitions[i]))
                        return true;
        return false;
}

void broker_look_again(struct broker *b)
{
        for (size_t i = 0; i < b->n_partitions; i++)
                partition_look_again(&b->partitions[i]);
}

void broker_look_for_escapes(struct broker *b)
{
        b->may_settle = false;
        for (size_t i = 0; i < b->n_tenants; i++)
                for (size_t k = 0; k < b->tenants[i].n_quotas; k++)
                        b->may_settle = b->may_settle || quota_may_settle(b->tenants[i].quotas[k]);
}

void broker_tick(struct broker *b)
{
        uint64_t now_ms = clock_ms();
        bool settles = now_ms - b->settled_ms >= BROKER_SETTLE_MS;

        for (size_t i = 0; i < b->n_partitions; i++)
                partition_tick(&b->partitions[i]);
        if (!b->may_settle || !settles)
                return;
        b->settled_ms = now_ms;
        broker_look_for_escapes(b);
        for (size_t i = 0; b->may_settle && i < b->n_tenants; i++)
                for (size_t k = 0; k < b->tenants[i].n_quotas; k++)
                        if (quota_may_settle(b->tenants[i].quotas[k]))
                                arena_settle_escapes(b->tenants[i].quotas[k]->arena);
}

void broker_set_standby(struct broker *b)
{
        for (size_t i = 0; i < b->n_devices; i++) {
                struct broker_device *d = &b->devices[i];
                struct standby_goal goal =
                        standby_goal_of(b->config, (size_t)(d->config - b->config->devices));

                standby_set_goal(d->standby, &goal);
        }
        broker_stand_by(b);
}

void broker_stand_by(struct broker *b)
{
        for (size_t i = 0; i < b->n_partitions; i++)
                partition_tell_standby(&b->partitions[i]);
        for (size_t i = 0; i < b->n_devices; i++)
                standby_work(b->devices[i].standby);
}

uint64_t broker_keeps_until(const struct broker *b)
{
        const struct quota *first = TAILQ_FIRST(&b->keepers.quotas);
        uint64_t until_ms = first ? first->kept_until_ms : 0;

        for (size_t i = 0; i < b->n_devices; i++) {
                uint64_t paused_ms = standby_paused_until(b->devices[i].standby);

                if (paused_ms > 0 && (until_ms == 0 || paused_ms < until_ms))
                        until_ms = paused_ms;
        }
        return until_ms;
}

void broker_expire_kept(struct broker *b)
{
        quota_expire_kept(&b->keepers);
        broker_stand_by(b);
}

bool broker_watches(const struct broker *b)
{
        return watch_n_entries(b->watch) > 0;
}

void broker_look(struct broker *b)
{
        watch_look(b->watch, BROKER_LOOKS);
        broker_note_changes(b);
}

size_t broker_n_pending(const struct broker *b)
{
        size_t n = 0;

        for (size_t i = 0; i < b->n_devices; i++)
                n += worker_n_pending(b->devices[i].worker);
        return n;
}

int broker_check(const struct broker *b, const char **ret_why)
{
        int r = ledger_check(b->ledger, ret_why);

        for (size_t i = 0; r == 0 && i < b->n_tenants; i++)
                for (size_t k = 0; r == 0 && k < b->tenants[i].n_quotas; k++)
                        r = quota_check(b->tenants[i].quotas[k], ret_why);
        if (r == 0)
                r = drain_check(b, ret_why);
        return r;
}
