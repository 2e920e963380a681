/* Memory outside; see outside.h.
 *
 * A process can have several sessions. What it has outside is counted in one of them, preferably in one with direct
 * charges.
 *
 * Invariant: quota.all.bytes_outside is what the last answer said, of the processes that there were then; 0 once the device
 * is lost.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/outside.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "daemon/base/cgroup.h"
#include "daemon/base/number.h"
#include "daemon/memory/broker.h"
#include "daemon/memory/broker_lease.h"
#include "daemon/session/session.h"

/* ---- processes without a session ------------------------------------------------- */

/* A process that has memory of a GPU and no session: whose it would be. As a hello of it would find the tenant and the
 * lease, but by /proc, where a process can change its credentials: nothing is decided by it. */
struct other {
        pid_t pid;
        uint64_t n_bytes;
        struct credentials who; /* these are read */
        gid_t *gids;            /* supplementary, sorted; owned */
        size_t n_gids;
        struct lease_peer peer;
};

/* ---- /proc ---------------------------------------------------------------------- */

/* "Groups:\t4 24 1000 ". What has no room is left out. */
static gid_t *read_groups(const char *text, size_t *ret_n)
{
        gid_t *gids = calloc(strlen(text) / 2 + 1, sizeof(*gids));
        char *end;

        *ret_n = 0;
        while (gids) {
                unsigned long gid = strtoul(text, &end, 10);

                if (end == text)
                        break;
                gids[(*ret_n)++] = (gid_t)gid;
                text = end;
        }
        return gids;
}

static bool read_ids(struct other *o)
{
        char path[64], *line = NULL;
        unsigned uid, gid;
        bool has_uid = false, has_gid = false;
        size_t n_line = 0;
        FILE *f;

        snprintf(path, sizeof(path), "/proc/%d/status", (int)o->pid);
        f = fopen(path, "re");
        if (!f)
                return false;
        while (getline(&line, &n_line, f) > 0) {
                if (sscanf(line, "Uid: %*u %u", &uid) == 1)
                        has_uid = true;
                else if (sscanf(line, "Gid: %*u %u", &gid) == 1)
                        has_gid = true;
                else if (strncmp(line, "Groups:", 7) == 0 && !o->gids)
                        o->gids = read_groups(line + 7, &o->n_gids);
        }
        free(line);
        fclose(f);
        if (!has_uid || !has_gid || !o->gids)
                return false;
        match_sort_gids(o->gids, o->n_gids);
        o->who.pid = o->pid;
        o->who.uid = uid;
        o->who.gid = gid;
        return true;
}

static void read_cgroup(struct other *o, int pidfd)
{
        char path[CGROUP_PATH_BYTES];

        if (cgroup_of_process("/proc", o->pid, pidfd, path) == 0)
                o->who.cgroup = strdup(path);
}

/* What is needed to find its tenant and lease. Reads /proc: not for the loop. False: it is not there any more. */
static bool other_read(struct other *o)
{
        int pidfd = (int)syscall(SYS_pidfd_open, o->pid, 0);

        if (!read_ids(o)) {
                if (pidfd >= 0)
                        close(pidfd);
                return false;
        }
        read_cgroup(o, pidfd); /* unknown without a pidfd */
        o->peer.n_ancestors = process_ancestors("/proc", o->pid, 0, o->peer.ancestors, PROCESS_MAX_ANCESTORS);
        o->peer.has_ancestors = true;
        if (o->peer.n_ancestors > 0)
                o->who.start_time = o->peer.ancestors[0].start_time;
        if (pidfd >= 0)
                close(pidfd);
        return true;
}

static void other_clear(struct other *o)
{
        free(o->gids);
        o->gids = NULL;
        credentials_clear(&o->who);
}

/* ---- the match ------------------------------------------------------------------ */

/* The quota of its lease on the device, else of its tenant. NULL: it matches no tenant, or that has none there. Reads nothing. */
static struct quota *other_quota(const struct broker *b, const struct device *device, struct other *o,
                                 struct tenant **ret)
{
        char sentence[SESSION_SENTENCE_BYTES];
        struct quota *first = NULL;

        if (match_ids(b->selection.matcher, &o->who, o->gids, o->n_gids) < 0)
                return NULL;
        match_places(b->selection.matcher, &o->who);
        *ret = tenant_select(b->selection.order, b->selection.n, b->selection.fallback, "", &o->who, sentence,
                             sizeof(sentence));
        o->peer.who = &o->who;
        o->peer.tenant = *ret;
        for (size_t i = 0; *ret && i < (*ret)->n_quotas; i++) {
                struct quota *q = (*ret)->quotas[i];
                struct lease *lease;

                if (q->partition->device != device || q->is_removed || quota_parent(q))
                        continue;
                if (lease_match(b, q, &o->peer, &lease, sentence, sizeof(sentence)) == 0 && lease)
                        return lease->quota;
                first = first ? first : q;
        }
        return first;
}

#define MAX_USES   (64 * DEVICE_USES) /* of a device */
#define MAX_OTHERS 32u                /* processes without a session, the largest */
#define SLICE      256u               /* sessions of a turn of the loop */

/* Beside each use: what is known of its process. */
struct owner {
        uint64_t known_bytes;
        uint64_t session_id; /* of the share in which it counts, which may have ended; 0: there is none */
        size_t slot, share;
        bool has_session, is_logged;
};

/* First a job, by which the broker's device has it. */
struct outside {
        struct worker_job job;
        struct broker *broker;
        struct broker_device *device;
        bool is_under_way;
        struct logged { /* processes without a session */
                pid_t pid;
                uint64_t start_time;
        } logged[MAX_OTHERS];
        size_t n_logged;
        /* Of a question. */
        uint64_t *pids; /* those of sessions */
        size_t n_pids;
        bool is_told;
        int result;
        struct device_use *uses; /* the answer */
        size_t n_uses;
        struct other *others;
        size_t n_others, n_read; /* of which so many are read */
        struct owner *owners;
        size_t n_seen; /* sessions, by slot */
};

/* ---- the question, on the worker -------------------------------------------------- */

static int compare_pids(const void *left, const void *right)
{
        const uint64_t *a = left, *b = right;

        return (*a > *b) - (*a < *b);
}

static void ask_device(struct outside *o)
{
        size_t n = DEVICE_USES;

        for (; o->result == 0 && n == DEVICE_USES && o->n_uses < MAX_USES; o->n_uses += n) {
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

/* A new one, or the smallest. */
static struct other *find_place(struct outside *o)
{
        struct other *smallest = o->others;

        if (o->n_others < MAX_OTHERS)
                return &o->others[o->n_others++];
        for (size_t i = 1; i < MAX_OTHERS; i++)
                if (o->others[i].n_bytes < smallest->n_bytes)
                        smallest = &o->others[i];
        return smallest;
}

/* The largest of those that no session is of. */
static void find_others(struct outside *o)
{
        o->others = calloc(MAX_OTHERS, sizeof(*o->others));
        if (!o->others)
                o->result = -ENOMEM;
        qsort(o->pids, o->n_pids, sizeof(*o->pids), compare_pids);
        for (size_t i = 0; o->others && i < o->n_uses; i++) {
                const struct device_use *use = &o->uses[i];
                struct other *place;

                if (use->pid > INT32_MAX ||
                    bsearch(&use->pid, o->pids, o->n_pids, sizeof(*o->pids), compare_pids))
                        continue;
                place = find_place(o);
                if (place->n_bytes <= use->n_bytes)
                        *place = (struct other){ .pid = (pid_t)use->pid, .n_bytes = use->n_bytes };
        }
}

/* In pieces: the device's other work waits for each. */
static void ask(struct worker_job *job)
{
        struct outside *o = (struct outside *)job;

        if (!o->is_told) {
                o->is_told = true;
                ask_device(o);
                if (o->result == 0)
                        find_others(o);
        } else if (o->n_read < o->n_others && other_read(&o->others[o->n_read])) {
                o->n_read++;
        } else if (o->n_read < o->n_others) {
                other_clear(&o->others[o->n_read]);
                o->others[o->n_read] = o->others[--o->n_others];
        }
        job->goes_on = o->n_read < o->n_others;
}

/* ---- sessions, in slices ------------------------------------------------------------ */

/* NULL: the process has nothing there. */
static struct owner *find_owner(const struct outside *o, pid_t pid)
{
        const struct device_use key = { .pid = (uint64_t)pid };
        const struct device_use *use = pid > 0 && o->n_uses > 0
                                               ? bsearch(&key, o->uses, o->n_uses, sizeof(key), compare_pids)
                                               : NULL;

        return use ? &o->owners[use - o->uses] : NULL;
}

static bool is_there(const struct outside *o, const struct quota *q)
{
        return q->partition->device == o->device->device;
}

/* NULL: none, or it has ended. */
static struct session *session_of(const struct outside *o, const struct owner *w)
{
        const struct broker_sessions *all = &o->broker->sessions;
        struct session *s = w->session_id != 0 && w->slot < all->n_slots ? all->table[w->slot] : NULL;

        return s && s->id == w->session_id && w->share < s->n_shares ? s : NULL;
}

/* How well the process's memory outside is counted there. */
static int rank(const struct session_share *share)
{
        return share->usage.direct.n_bytes > 0 ? 2 : share->joined;
}

static void look_at_share(const struct outside *o, size_t slot, size_t i, struct owner *w)
{
        struct session *s = o->broker->sessions.table[slot], *before = session_of(o, w);
        struct session_share *share = &s->shares[i];

        w->known_bytes += share->usage.direct.n_bytes;
        w->is_logged |= share->is_outside_logged;
        if (before && rank(&before->shares[w->share]) >= rank(share)) {
                share->outside_bytes = 0;
                return;
        }
        if (before)
                before->shares[w->share].outside_bytes = 0;
        w->session_id = s->id;
        w->slot = slot;
        w->share = i;
}

static void look_at_session(const struct outside *o, size_t slot)
{
        struct session *s = o->broker->sessions.table[slot];
        struct owner *w = find_owner(o, s->who.pid);

        if (w)
                w->has_session = true;
        for (size_t i = 0; i < s->n_shares; i++) {
                if (!is_there(o, s->shares[i].quota))
                        continue;
                s->shares[i].is_measured = o->result == 0 && s->who.pid > 0;
                if (w)
                        look_at_share(o, slot, i, w);
                else
                        s->shares[i].outside_bytes = 0;
        }
}

/* ---- the sums --------------------------------------------------------------------- */

static void log_process(const struct outside *o, struct tenant *t, pid_t pid, const char *name,
                        uint64_t n_bytes)
{
        log_limited(
                &t->outside_logs, LOG_LEVEL_WARNING,
                "process %d (%.31s) of tenant '%s' has %s on device '%s' outside of bfcd, which no limit counts; "
                "bfcctl run has most of such memory charged",
                (int)pid, name, t->name, NUMBER_SIZE(n_bytes), o->device->config->id);
}

static void add(struct quota *q, uint64_t n_bytes)
{
        for (; q; q = quota_parent(q))
                q->all.bytes_outside += n_bytes;
}

static void count_session(const struct outside *o, const struct device_use *use, const struct owner *w)
{
        struct session *s = session_of(o, w);
        struct session_share *share = s ? &s->shares[w->share] : NULL;

        if (!share)
                return;
        share->outside_bytes = excess_u64(use->n_bytes, w->known_bytes);
        add(share->quota, share->outside_bytes);
        if (share->outside_bytes >= OUTSIDE_LOG_BYTES && !w->is_logged) {
                log_process(o, s->tenant, s->who.pid, s->name[0] ? s->name : "no name", share->outside_bytes);
                share->is_outside_logged = true;
        }
}

/* A process may have ended, and another may have its pid. */
static bool is_logged(const struct logged *logged, size_t n, const struct other *other)
{
        while (n > 0)
                if (logged[--n].pid == other->pid && logged[n].start_time == other->who.start_time)
                        return true;
        return false;
}

static void count_others(struct outside *o)
{
        struct logged before[MAX_OTHERS];
        size_t n_before = o->n_logged;

        memcpy(before, o->logged, sizeof(before));
        o->n_logged = 0;
        for (size_t i = 0; i < o->n_read; i++) {
                struct other *other = &o->others[i];
                const struct owner *w = find_owner(o, other->pid);
                struct tenant *t;
                struct quota *q = !w || w->has_session /* since then */
                                          ? NULL
                                          : other_quota(o->broker, o->device->device, other, &t);

                add(q, other->n_bytes);
                if (!q || other->n_bytes < OUTSIDE_LOG_BYTES)
                        continue;
                if (!is_logged(before, n_before, other))
                        log_process(o, t, other->pid, "no session", other->n_bytes);
                o->logged[o->n_logged++] = (struct logged){ other->pid, other->who.start_time };
        }
}

static void count(struct outside *o)
{
        const struct broker *b = o->broker;

        for (size_t i = 0; i < b->n_tenants; i++)
                for (size_t k = 0; k < b->tenants[i].n_quotas; k++)
                        if (is_there(o, b->tenants[i].quotas[k]))
                                b->tenants[i].quotas[k]->all.bytes_outside = 0;
        for (size_t i = 0; i < o->n_uses; i++)
                count_session(o, &o->uses[i], &o->owners[i]);
        count_others(o);
}

/* ---- one question ------------------------------------------------------------------- */

static void end_question(struct outside *o)
{
        for (size_t i = 0; i < o->n_others; i++)
                other_clear(&o->others[i]);
        free(o->others);
        free(o->owners);
        free(o->uses);
        free(o->pids);
        o->others = NULL;
        o->owners = NULL;
        o->uses = NULL;
        o->pids = NULL;
        o->n_others = o->n_read = o->n_uses = o->n_pids = o->n_seen = 0;
        o->is_under_way = false;
}

/* As -EAGAIN: what was known stays. The others say that nothing is known. */
static bool has_no_answer(const struct outside *o)
{
        return o->result < 0 && o->result != -ENOENT && o->result != -ENODEV;
}

/* Once for each slice: between them the loop does other things. */
static void take_answer(struct worker_job *job)
{
        struct outside *o = (struct outside *)job;
        const struct broker_sessions *all = &o->broker->sessions;

        if (o->device->is_lost)
                o->result = -ENODEV;
        if (!o->owners)
                o->owners = calloc(o->n_uses + 1, sizeof(*o->owners));
        if (!o->owners)
                o->result = -ENOMEM;
        if (has_no_answer(o)) {
                end_question(o);
                return;
        }
        if (o->result < 0)
                o->n_uses = o->n_read = 0;
        for (size_t n = 0; n < SLICE && o->n_seen < all->n_slots; n++, o->n_seen++)
                if (all->table[o->n_seen] && all->table[o->n_seen]->tenant)
                        look_at_session(o, o->n_seen);
        if (o->n_seen < all->n_slots) {
                worker_submit(o->device->worker, job);
                return;
        }
        count(o);
        end_question(o);
}

static bool list_pids(const struct broker *b, struct outside *o)
{
        o->pids = calloc(b->sessions.n_slots + 1, sizeof(*o->pids));
        for (size_t i = 0; o->pids && i < b->sessions.n_slots; i++)
                if (b->sessions.table[i] && b->sessions.table[i]->who.pid > 0)
                        o->pids[o->n_pids++] = (uint64_t)b->sessions.table[i]->who.pid;
        return o->pids != NULL;
}

static void look_at_device(struct broker *b, struct broker_device *d)
{
        struct outside *o = (struct outside *)d->outside;

        if (!o) {
                o = calloc(1, sizeof(*o));
                if (!o)
                        return;
                o->job = (struct worker_job){ .run = ask, .done = take_answer };
                o->broker = b;
                o->device = d;
                d->outside = &o->job;
        }
        if (o->is_under_way || !list_pids(b, o))
                return;
        o->is_under_way = true;
        o->is_told = d->is_lost; /* then nothing is known any more */
        o->result = 0;
        worker_submit(d->worker, &o->job);
}

/* ---- entry points ------------------------------------------------------------------- */

void outside_look(struct broker *b)
{
        for (size_t i = 0; i < b->n_devices; i++)
                if (b->devices[i].device->ops->uses)
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
