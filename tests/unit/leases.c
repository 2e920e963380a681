/* See leases.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/leases.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/session/reload.h"
#include "daemon/session/session_states.h"
#include "tests/suite.h"

static uint64_t ask(struct peer *p, Bfcd__Request *r)
{
        uint64_t id;

        ck_assert_int_eq(peer_send(p, r, &id), 0);
        return id;
}

uint64_t ask_create(struct peer *p, const struct wanted *w)
{
        Bfcd__LeaseCreate m = BFCD__LEASE_CREATE__INIT;
        Bfcd__Request r = REQUEST(LEASE_CREATE, lease_create, &m);

        m.name = (char *)(uintptr_t)w->name;
        m.tenant = (char *)(uintptr_t)(w->tenant ? w->tenant : "red");
        m.partition = (char *)(uintptr_t)(w->partition ? w->partition : "a");
        m.bytes_limit = w->limit;
        m.bytes_reserve = w->reserve;
        m.ttl_ms = w->ttl_ms;
        m.evicts = w->evicts;
        m.grace_ms = w->grace_ms;
        if (w->cgroup)
                m.match_case = BFCD__LEASE_CREATE__MATCH_CGROUP, m.cgroup = (char *)(uintptr_t)w->cgroup;
        else if (w->unit)
                m.match_case = BFCD__LEASE_CREATE__MATCH_UNIT, m.unit = (char *)(uintptr_t)w->unit;
        else if (w->pid)
                m.match_case = BFCD__LEASE_CREATE__MATCH_PID, m.pid = w->pid;
        else if (w->by_user)
                m.match_case = BFCD__LEASE_CREATE__MATCH_UID, m.uid = w->uid;
        return ask(p, &r);
}

uint64_t ask_set(struct peer *p, const char *name, Bfcd__LeaseSet *m)
{
        Bfcd__Request r = REQUEST(LEASE_SET, lease_set, m);

        m->name = (char *)(uintptr_t)name;
        return ask(p, &r);
}

uint64_t ask_end(struct peer *p, const char *name, bool evicts, uint64_t grace_ms)
{
        Bfcd__LeaseEnd m = BFCD__LEASE_END__INIT;
        Bfcd__Request r = REQUEST(LEASE_END, lease_end, &m);
        uint64_t id;

        m.name = (char *)(uintptr_t)name;
        m.evicts = evicts;
        m.grace_ms = grace_ms;
        id = ask(p, &r);
        settle();
        return id;
}

void end_sessions(void)
{
        for (size_t i = 0; i < b->sessions.n_slots; i++) {
                struct session *s = b->sessions.table[i];

                if (!s || s->role != ROLE_CLIENT)
                        continue;
                session_close(s, "test");
                while (session_reap(s, 64) != 0)
                        ;
                session_free(s);
        }
}

int reload_told(const char *text, bool dry_run, const char *told)
{
        char *changes = NULL, *errors = NULL;
        size_t n;
        FILE *c = open_memstream(&changes, &n), *e = open_memstream(&errors, &n);
        const struct config_machine machine = { .serves = true, .running = b->config };
        struct config *next = NULL;
        int r = config_parse("next.yaml", text, strlen(text), &machine, e, &next);

        if (r == 0)
                r = reload_config(b, next, dry_run, c, e);
        check(); /* also before the next turn */
        fclose(c);
        fclose(e);
        ck_assert_msg(!told || strstr(changes, told) || strstr(errors, told), "%s%s", changes, errors);
        free(changes);
        free(errors);
        if (r < 0 || dry_run)
                config_free(next);
        settle();
        return r;
}
