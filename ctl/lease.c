/* bfcctl lease: makes, lists, changes and ends leases.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/amount.h"
#include "ctl/command.h"
#include "ctl/process.h"
#include "ctl/show.h"
#include "ctl/table.h"
#include "ctl/text.h"

static int wrong_value(const char *option, const char *value, const char *right)
{
        char what[64];

        snprintf(what, sizeof(what), "wrong value for %s", option);
        return command_usage(what, value, right);
}

/* Options that are not given keep *ret. EXIT_USAGE, or EXIT_SUCCESS. */
static int read_bytes(const char *option, const char *value, uint64_t *ret)
{
        if (value && !amount_size(value, ret))
                return wrong_value(option, value, "a size, as in 512MiB");
        return EXIT_SUCCESS;
}

static int read_time(const char *option, const char *value, uint64_t *ret_ms)
{
        if (value && !amount_time(value, ret_ms))
                return wrong_value(option, value, AMOUNT_TIME);
        return EXIT_SUCCESS;
}

static int read_pid(const char *value, uint64_t *ret)
{
        if (!command_read_id(value, ret))
                return wrong_value("--pid", value, "the number of a process");
        return EXIT_SUCCESS;
}

/* A name, or a number. */
static int read_user(const char *value, uint64_t *ret)
{
        const struct passwd *user = getpwnam(value);

        if (user)
                *ret = user->pw_uid;
        else if (strcmp(value, "0") == 0)
                *ret = 0;
        else if (!command_read_id(value, ret))
                return wrong_value("--user", value, "the name of a user, or a uid");
        return EXIT_SUCCESS;
}

static int read_match(const struct invocation *i, Bfcd__LeaseCreate *m)
{
        int n = (i->lease.cgroup != NULL) + (i->lease.unit != NULL) + (i->lease.pid != NULL) +
                (i->lease.user != NULL) + (i->lease.socket_name != NULL);

        if (n != 1)
                return command_usage("one of --cgroup, --unit, --pid, --user and --socket-name is needed",
                                     NULL, i->use);
        m->match_case = i->lease.cgroup        ? BFCD__LEASE_CREATE__MATCH_CGROUP
                        : i->lease.unit        ? BFCD__LEASE_CREATE__MATCH_UNIT
                        : i->lease.pid         ? BFCD__LEASE_CREATE__MATCH_PID
                        : i->lease.socket_name ? BFCD__LEASE_CREATE__MATCH_SOCKET
                                               : BFCD__LEASE_CREATE__MATCH_UID;
        if (i->lease.cgroup)
                m->cgroup = (char *)(uintptr_t)i->lease.cgroup;
        if (i->lease.unit)
                m->unit = (char *)(uintptr_t)i->lease.unit;
        if (i->lease.socket_name)
                m->socket = (char *)(uintptr_t)i->lease.socket_name;
        return i->lease.pid    ? read_pid(i->lease.pid, &m->pid)
               : i->lease.user ? read_user(i->lease.user, &m->uid)
                               : EXIT_SUCCESS;
}

/* What was done with the lease. */
static int print_done(const struct invocation *i, const char *name, const char *what)
{
        if (i->json)
                return command_finish(show_print(
                        stdout, show_document("lease", json_pack("{s:o}", "name", table_json_string(name)))));
        printf("Lease %s %s.\n", name, what);
        return command_finish(0);
}

static int create(struct ask *a, const struct invocation *i, const char *name)
{
        Bfcd__LeaseCreate m = BFCD__LEASE_CREATE__INIT;
        bool needs_tenant = a->admin || a->scheduler;
        int r;

        if ((!i->tenant && needs_tenant) || !i->partition || !i->lease.limit)
                return command_usage(needs_tenant ? "--tenant, --partition and --limit are needed"
                                                  : "--partition and --limit are needed",
                                     NULL, i->use);
        r = read_match(i, &m);
        if (r == EXIT_SUCCESS)
                r = read_bytes("--limit", i->lease.limit, &m.bytes_limit);
        if (r == EXIT_SUCCESS)
                r = read_bytes("--reserve", i->lease.reserve, &m.bytes_reserve);
        if (r == EXIT_SUCCESS)
                r = read_time("--ttl", i->lease.ttl, &m.ttl_ms);
        if (r == EXIT_SUCCESS)
                r = read_time("--grace", i->lease.grace, &m.grace_ms);
        if (r != EXIT_SUCCESS)
                return r;
        m.name = (char *)(uintptr_t)name;
        m.tenant = (char *)(uintptr_t)(i->tenant ? i->tenant : "");
        m.partition = (char *)(uintptr_t)i->partition;
        m.evicts = i->lease.evict || i->lease.grace;
        return ask_lease_create(a, &m) < 0 ? command_complain(a) : print_done(i, name, "is made");
}

static int set(struct ask *a, const struct invocation *i, const char *name)
{
        Bfcd__LeaseSet m = BFCD__LEASE_SET__INIT;
        int r;

        if (!i->lease.limit && !i->lease.reserve && !i->lease.ttl)
                return command_usage("nothing to set", NULL, i->use);
        r = read_bytes("--limit", i->lease.limit, &m.bytes_limit);
        if (r == EXIT_SUCCESS && i->lease.limit && m.bytes_limit == 0)
                r = wrong_value("--limit", i->lease.limit, "a size, as in 512MiB");
        if (r == EXIT_SUCCESS)
                r = read_bytes("--reserve", i->lease.reserve, &m.bytes_reserve);
        if (r == EXIT_SUCCESS)
                r = read_time("--ttl", i->lease.ttl, &m.ttl_ms);
        if (r != EXIT_SUCCESS)
                return r;
        m.name = (char *)(uintptr_t)name;
        m.sets_reserve = i->lease.reserve != NULL;
        m.sets_ttl = i->lease.ttl != NULL;
        return ask_lease_set(a, &m) < 0 ? command_complain(a) : print_done(i, name, "is changed");
}

static json_t *end_json(const char *name, const Bfcd__LeaseEndReply *end)
{
        return show_document("lease",
                             json_pack("{s:o, s:o, s:o, s:o}", "name", table_json_string(name),
                                       "num_sessions", table_json_number(end->num_sessions), "bytes_in_use",
                                       table_json_number(end->bytes_in_use), "sessions",
                                       table_json_rows(show_columns(BFCD__LIST__KIND__SESSIONS),
                                                       (const void *const *)end->sessions, end->n_sessions)));
}

static void print_end(const char *name, const Bfcd__LeaseEnd *m, const Bfcd__LeaseEndReply *end)
{
        char size[TEXT_MAX], grace[TEXT_MAX];

        if (end->num_sessions == 0) {
                printf("Lease %s has ended. No session was in it.\n", name);
                return;
        }
        printf("Lease %s has ended. %llu %s %s", name, (unsigned long long)end->num_sessions,
               end->num_sessions == 1 ? "session still has" : "sessions still have",
               text_size(end->bytes_in_use, size));
        if (m->evicts && m->grace_ms > 0)
                printf(" and %s evicted in %s:\n", end->num_sessions == 1 ? "is" : "are",
                       text_duration(m->grace_ms, grace));
        else
                puts(!m->evicts               ? ":"
                     : end->num_sessions == 1 ? " and is evicted now:"
                                              : " and are evicted now:");
        for (size_t k = 0; k < end->n_sessions; k++) {
                char *program = text_escape(end->sessions[k]->name), user[PROCESS_TEXT_MAX];

                printf("  session %llu (pid %llu, user %s, %s): %s\n",
                       (unsigned long long)end->sessions[k]->session_id,
                       (unsigned long long)end->sessions[k]->pid, process_user(end->sessions[k]->uid, user),
                       program ? program : "?", text_size(end->sessions[k]->bytes_in_use, size));
                free(program);
        }
        if (end->num_sessions > end->n_sessions)
                printf("  and %llu more\n", (unsigned long long)(end->num_sessions - end->n_sessions));
}

static int end(struct ask *a, const struct invocation *i, const char *name)
{
        Bfcd__LeaseEnd m = BFCD__LEASE_END__INIT;
        Bfcd__Reply *reply;
        int r = read_time("--grace", i->lease.grace, &m.grace_ms);

        if (r != EXIT_SUCCESS)
                return r;
        m.name = (char *)(uintptr_t)name;
        m.evicts = i->lease.evict || i->lease.grace;
        if (ask_lease_end(a, &m, &reply) < 0)
                return command_complain(a);
        r = 0;
        if (i->json)
                r = show_print(stdout, end_json(name, reply->lease_end));
        else
                print_end(name, &m, reply->lease_end);
        bfcd__reply__free_unpacked(reply, NULL);
        return command_finish(r);
}

static int list(struct ask *a, const struct invocation *i, const struct command *c)
{
        if (ask_open(a, ask_socket(i->socket), getenv("BFC_TENANT")) < 0)
                return command_complain(a);
        return run_list(a, i, c);
}

typedef int (*verb_run)(struct ask *a, const struct invocation *i, const char *name);

static int run_verb(verb_run run, struct ask *a, const struct invocation *i)
{
        const char *tenant = i->tenant ? i->tenant : getenv("BFC_TENANT");
        char name[ASK_NAME_BYTES];

        if (ask_open(a, ask_manager_socket(i->socket), tenant) < 0 ||
            ask_lease_name(a, i->arguments[1], name) < 0)
                return command_complain(a);
        return run(a, i, name);
}

/* bfcctl.c has checked the verb. */
static int run_words(struct ask *a, const struct invocation *i, const struct command *c)
{
        static const struct {
                const char *verb;
                verb_run run;
        } verbs[] = { { "create", create }, { "set", set }, { "end", end } };

        for (size_t k = 0; k < sizeof(verbs) / sizeof(verbs[0]); k++)
                if (strcmp(verbs[k].verb, i->arguments[0]) == 0)
                        return run_verb(verbs[k].run, a, i);
        return list(a, i, c);
}

int run_lease(struct ask *none, const struct invocation *i, const struct command *c)
{
        struct ask a = { .connection = NULL };
        int status = run_words(&a, i, c);

        (void)none;
        ask_close(&a);
        return status;
}
