/* The process of a peer; see peer_process.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/net/peer_process.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "daemon/session/resume.h"
#include "daemon/base/cgroup.h"
#include "daemon/base/process.h"

#define FEW_GROUPS 1024u /* as many are matched when the process connects */
#define ALL_IDS    UINT64_C(4294967295)

/* In a user namespace that does not map all ids the kernel shows one id, usually 65534, for all users that have none:
 * it does not identify a user. MATCH_NO_ID: all ids are mapped. */
static uint32_t overflow_uid = MATCH_NO_ID, overflow_gid = MATCH_NO_ID;

static bool maps_all_ids(const char *path)
{
        unsigned long long first, outside, n;
        uint64_t n_ids = 0;
        FILE *f = fopen(path, "re");

        if (!f)
                return true; /* a kernel without user namespaces */
        while (fscanf(f, "%llu %llu %llu", &first, &outside, &n) == 3)
                n_ids += n;
        fclose(f);
        return n_ids >= ALL_IDS;
}

static uint32_t read_overflow_id(const char *map, const char *setting)
{
        unsigned id = 65534;
        FILE *f;

        if (maps_all_ids(map))
                return MATCH_NO_ID;
        f = fopen(setting, "re");
        if (f) {
                if (fscanf(f, "%u", &id) != 1)
                        id = 65534;
                fclose(f);
        }
        return id;
}

void peer_process_start(void)
{
        overflow_uid = read_overflow_id("/proc/self/uid_map", "/proc/sys/kernel/overflowuid");
        overflow_gid = read_overflow_id("/proc/self/gid_map", "/proc/sys/kernel/overflowgid");
}

static uint32_t known_id(uint32_t id, uint32_t overflow)
{
        return id == overflow ? MATCH_NO_ID : id;
}

/* Matches by ids; groups are the caller's. */
static int match_with(struct matcher *m, struct credentials *who, gid_t *gids, size_t n_bytes)
{
        size_t n_gids = n_bytes / sizeof(*gids);

        for (size_t i = 0; i < n_gids && overflow_gid != MATCH_NO_ID; i++)
                gids[i] = known_id(gids[i], overflow_gid);
        match_sort_gids(gids, n_gids);
        return match_ids(m, who, gids, n_gids);
}

/* Reads the control group only if it matters. */
static const struct tenant *first_match(const struct peer_process *p, const struct broker *b,
                                        const struct credentials *who)
{
        const struct match_list *matches = &who->matches;
        char path[CGROUP_PATH_BYTES];
        bool is_read = false, has_path = false;

        for (size_t i = 0; i < matches->n_tenants; i++) {
                const struct tenant *t = b->selection.order[matches->tenants[i]];

                if (!is_read && t->config->n_units + t->config->n_cgroups > 0) {
                        is_read = true;
                        has_path = cgroup_of_process("/proc", who->pid, p->pidfd, path) == 0;
                }
                if (match_place(t->config, has_path ? path : NULL))
                        return t;
        }
        return b->selection.fallback ? b->selection.fallback : restore_suspended_tenant(b, who->uid);
}

int peer_process_expect(struct peer_process *p, const struct broker *b, int fd, struct credentials *who,
                        const struct tenant **ret)
{
        struct matcher *m = b->selection.matcher;
        struct credentials without_groups = { .pid = who->pid, .uid = who->uid, .gid = who->gid };
        gid_t gids[FEW_GROUPS];
        socklen_t n_bytes = matcher_needs_groups(m) ? sizeof(gids) : 0;
        int r;

        p->n_group_bytes = 0;
        if (n_bytes == 0 || getsockopt(fd, SOL_SOCKET, SO_PEERGROUPS, gids, &n_bytes) == 0) {
                r = match_with(m, who, gids, n_bytes);
                if (r == 0)
                        *ret = first_match(p, b, who);
                return r;
        }
        if (errno == ERANGE)
                p->n_group_bytes = n_bytes;
        r = match_with(m, &without_groups, gids, 0);
        if (r == 0)
                *ret = first_match(p, b, &without_groups);
        credentials_clear(&without_groups);
        return r;
}

/* The kernel keeps the groups of the connect(), so their number does not change. The daemon keeps only the
 * tenants that they match. */
static int match_late(const struct peer_process *p, struct matcher *m, int fd, struct credentials *who)
{
        socklen_t n_bytes = p->n_group_bytes;
        gid_t *gids = NULL;
        int r;

        if (!matcher_needs_groups(m))
                return match_with(m, who, gids, 0);
        if (n_bytes == 0 && getsockopt(fd, SOL_SOCKET, SO_PEERGROUPS, NULL, &n_bytes) < 0 && errno != ERANGE)
                n_bytes = 0;
        if (n_bytes > 0)
                gids = malloc(n_bytes);
        if (n_bytes > 0 && !gids)
                return -ENOMEM;
        if (n_bytes > 0 && getsockopt(fd, SOL_SOCKET, SO_PEERGROUPS, gids, &n_bytes) < 0)
                r = -errno;
        else
                r = match_with(m, who, gids, n_bytes);
        free(gids);
        return r;
}

/* 0: unknown. */
static uint64_t process_start_time(pid_t pid)
{
        struct process p;

        return process_read("/proc", pid, &p) == 0 ? p.start_time : 0;
}

int peer_process_new(struct peer_process *p, int fd, struct credentials *ret_who)
{
        struct ucred ucred;
        socklen_t n = sizeof(ucred);

        if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &ucred, &n) < 0)
                return -errno;
        *ret_who = (struct credentials){ .pid = ucred.pid,
                                         .uid = known_id(ucred.uid, overflow_uid),
                                         .gid = known_id(ucred.gid, overflow_gid) };
        return peer_identity_new(&p->identity, fd, ucred.pid, &p->pidfd);
}

int peer_process_find(struct peer_process *p, const struct credentials *who)
{
        uint64_t start_time;

        p->is_known = true;
        p->pidfd = -1;
        if (who->pid <= 0)
                return -EINVAL;
        p->pidfd = (int)syscall(SYS_pidfd_open, who->pid, 0);
        if (p->pidfd < 0)
                return -errno;
        if (who->start_time == 0)
                return 0;
        start_time = process_start_time(who->pid); /* 0: it may not be read */
        if (start_time == 0 || start_time == who->start_time)
                return 0;
        peer_process_close(p);
        return -ESRCH;
}

/* A cgroup that cannot be read matches no pattern, and lease_match() fails where a lease needs it. */
static void read_cgroup(const struct peer_process *p, struct credentials *who)
{
        char path[CGROUP_PATH_BYTES];

        if (cgroup_of_process("/proc", who->pid, p->pidfd, path) == 0)
                who->cgroup = strdup(path);
}

int peer_process_match(struct peer_process *p, const struct broker *b, int fd, bool is_hello,
                       struct credentials *who)
{
        int r = 0;

        if (is_hello) {
                free(who->cgroup);
                who->cgroup = NULL;
        }
        if (!p->is_known && store_keeps(b->options.store)) /* only a resumed session needs it */
                who->start_time = process_start_time(who->pid);
        p->is_known = true;
        if ((b->config->has_patterns || b->leases.n > 0) && !who->cgroup)
                read_cgroup(p, who);
        if (match_is_known(b->selection.matcher, who))
                return 0;
        if (!match_ids_are_known(b->selection.matcher, who))
                r = match_late(p, b->selection.matcher, fd, who);
        if (r == 0)
                match_places(b->selection.matcher, who);
        return r;
}

bool peer_process_has_exited(const struct peer_process *p)
{
        struct pollfd fd = { .fd = p->pidfd, .events = POLLIN };

        return p->pidfd >= 0 && poll(&fd, 1, 0) == 1;
}

int peer_process_watch(struct peer_process *p, struct poller *poller,
                       void (*report)(struct poller_item *item, uint32_t events))
{
        int r;

        if (p->pidfd < 0)
                return -ESRCH;
        if (peer_process_is_watched(p))
                return 0;
        p->poller = poller;
        p->item.fd = p->pidfd;
        p->item.report = report;
        r = poller_set(poller, &p->item, EPOLLIN);
        if (r < 0)
                peer_process_close(p);
        return r;
}

bool peer_process_is_watched(const struct peer_process *p)
{
        return p->item.events != 0;
}

void peer_process_ignore(struct peer_process *p)
{
        if (peer_process_is_watched(p))
                (void)poller_set(p->poller, &p->item, 0);
}

void peer_process_close(struct peer_process *p)
{
        peer_process_ignore(p);
        if (p->pidfd >= 0)
                close(p->pidfd);
        p->pidfd = -1;
}
