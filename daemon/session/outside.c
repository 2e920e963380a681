/* Memory outside; see outside.h.
 *
 * A process can have several sessions. What it has outside is counted in one of them, preferably in one with direct
 * charges.
 *
 * Invariant: quota.all.bytes_outside is what the last answer said, of the sessions that there were then.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/outside.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

#include "daemon/number.h"
#include "daemon/session/session.h"

#define MAX_USES (64 * DEVICE_USES) /* of a device */

/* First a job, by which the broker's device has it. */
struct outside {
        struct worker_job job;
        struct broker *broker;
        struct broker_device *device;
        bool is_under_way;
        struct device_use *uses; /* the answer */
        size_t n_uses;
        int result;
};

/* Beside each use: the process's sessions. */
struct process {
        uint64_t known_bytes;
        struct session *session; /* in which it counts; NULL: it has none */
        struct session_share *share;
        bool is_logged;
};

/* ---- the question, on the worker -------------------------------------------------- */

static void ask(struct worker_job *job)
{
        struct outside *o = (struct outside *)job;
        size_t n = DEVICE_USES;

        o->n_uses = 0;
        for (o->result = 0; o->result == 0 && n == DEVICE_USES && o->n_uses < MAX_USES; o->n_uses += n) {
                struct device_use *more = reallocarray(o->uses, o->n_uses + DEVICE_USES, sizeof(*o->uses));

                n = 0;
                if (!more) {
                        o->result = -ENOMEM;
                        break;
                }
                o->uses = more;
                o->result = device_uses(o->device->device, o->n_uses > 0 ? more[o->n_uses - 1].pid : 0,
                                        more + o->n_uses, &n);
        }
}

/* ---- the answer ------------------------------------------------------------------- */

static int compare_pids(const void *left, const void *right)
{
        const struct device_use *a = left, *b = right;

        return (a->pid > b->pid) - (a->pid < b->pid);
}

/* NULL: the process has nothing there. */
static struct process *find_process(const struct outside *o, struct process *processes,
                                    const struct session *s)
{
        const struct device_use key = { .pid = (uint64_t)s->who.pid };
        const struct device_use *use = s->who.pid > 0 && o->n_uses > 0
                                               ? bsearch(&key, o->uses, o->n_uses, sizeof(key), compare_pids)
                                               : NULL;

        return use ? &processes[use - o->uses] : NULL;
}

static bool is_there(const struct outside *o, const struct quota *q)
{
        return q->partition->device == o->device->device;
}

/* How well the process's memory outside is counted there. */
static int rank(const struct session_share *share)
{
        return share->usage.direct.n_bytes > 0 ? 2 : share->joined;
}

/* p: NULL: the process has nothing there. */
static void look_at_session(const struct outside *o, struct session *s, struct process *p)
{
        for (size_t i = 0; i < s->n_shares; i++) {
                struct session_share *share = &s->shares[i];

                if (!is_there(o, share->quota))
                        continue;
                share->outside_bytes = 0;
                share->is_measured = o->result == 0 && s->who.pid > 0;
                if (!p)
                        continue;
                p->known_bytes += share->usage.direct.n_bytes;
                p->is_logged |= share->is_outside_logged;
                if (p->share && rank(p->share) >= rank(share))
                        continue;
                p->session = s;
                p->share = share;
        }
}

static void log_process(const struct outside *o, const struct process *p)
{
        log_limited(
                &p->session->tenant->outside_logs, LOG_LEVEL_WARNING,
                "process %d (%.31s) of tenant '%s' has %s on device '%s' outside of bfcd, which no limit counts; "
                "bfcctl run has most of such memory charged",
                (int)p->session->who.pid, p->session->name[0] ? p->session->name : "no name",
                p->session->tenant->name, NUMBER_SIZE(p->share->outside_bytes), o->device->config->id);
}

static void count_process(const struct outside *o, const struct device_use *use, struct process *p)
{
        p->share->outside_bytes = excess_u64(use->n_bytes, p->known_bytes);
        for (struct quota *q = p->share->quota; q; q = q->lease.parent)
                q->all.bytes_outside += p->share->outside_bytes;
        if (p->share->outside_bytes >= OUTSIDE_LOG_BYTES && !p->is_logged) {
                log_process(o, p);
                p->share->is_outside_logged = true;
        }
}

static void count(struct outside *o, struct process *processes)
{
        const struct broker *b = o->broker;

        for (size_t i = 0; i < b->n_tenants; i++)
                for (size_t k = 0; k < b->tenants[i].n_quotas; k++)
                        if (is_there(o, b->tenants[i].quotas[k]))
                                b->tenants[i].quotas[k]->all.bytes_outside = 0;
        for (size_t i = 0; i < b->sessions.n_slots; i++) {
                struct session *s = b->sessions.table[i];

                if (s && s->tenant)
                        look_at_session(o, s, find_process(o, processes, s));
        }
        for (size_t i = 0; i < o->n_uses; i++)
                if (processes[i].share)
                        count_process(o, &o->uses[i], &processes[i]);
}

static void take_answer(struct worker_job *job)
{
        struct outside *o = (struct outside *)job;
        struct process *processes = calloc(o->n_uses + 1, sizeof(*processes));

        o->is_under_way = false;
        if (o->result < 0)
                o->n_uses = 0;
        if (processes)
                count(o, processes);
        free(processes);
        free(o->uses);
        o->uses = NULL;
}

/* ---- entry points ------------------------------------------------------------------- */

static void look_at_device(struct broker *b, struct broker_device *d)
{
        struct outside *o = (struct outside *)d->outside;

        if (!o)
                o = calloc(1, sizeof(*o));
        if (!o || o->is_under_way)
                return;
        d->outside = &o->job;
        *o = (struct outside){
                .job = { .run = ask, .done = take_answer }, .broker = b, .device = d, .is_under_way = true
        };
        worker_submit(d->worker, &o->job);
}

void outside_look(struct broker *b)
{
        for (size_t i = 0; i < b->n_devices; i++)
                if (b->devices[i].device->ops->uses && !b->devices[i].is_lost)
                        look_at_device(b, &b->devices[i]);
}

uint64_t outside_bytes(const struct session *s)
{
        uint64_t n_bytes = UINT64_MAX;

        for (size_t i = 0; i < s->n_shares; i++)
                if (s->shares[i].is_measured)
                        n_bytes = (n_bytes == UINT64_MAX ? 0 : n_bytes) + s->shares[i].outside_bytes;
        return n_bytes;
}
