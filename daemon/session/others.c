/* Processes without a session; see others.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/others.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "daemon/memory/broker.h"
#include "daemon/base/cgroup.h"
#include "daemon/session/session.h"

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

bool other_read(struct other *o)
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

void other_clear(struct other *o)
{
        free(o->gids);
        o->gids = NULL;
        credentials_clear(&o->who);
}

/* ---- the match ------------------------------------------------------------------ */

struct quota *other_quota(const struct broker *b, const struct device *device, struct other *o,
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
