/* SPDX-License-Identifier: Apache-2.0 */
/* The three sockets: their paths from the files and from the command line, which must differ. And where records
 * go. */
#include "daemon/config/reader.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "proto/paths.h"

enum { CLIENT, ADMIN, MONITOR, N_SOCKETS };

static const struct {
        const char *key, *option;
} sockets[N_SOCKETS] = {
        [CLIENT] = { "socket", "--socket" },
        [ADMIN] = { "admin_socket", "--admin-socket" },
        [MONITOR] = { "monitor_socket", "--monitor-socket" },
};

/* Without a path of its own the monitor socket is in the folder of the admin socket. So a second daemon, whose
 * sockets have another folder, need not configure it. NULL: out of memory. */
static char *path_beside(const char *admin_path)
{
        const char *slash = strrchr(admin_path, '/');
        char *path;

        return asprintf(&path, "%.*s/" PATHS_MONITOR_NAME, (int)(slash - admin_path), admin_path) < 0 ? NULL
                                                                                                      : path;
}

static void follow_admin_socket(struct config_reader *r)
{
        char *path = path_beside(r->c->admin_socket.path);

        if (!path) {
                r->is_out_of_memory = true;
                return;
        }
        free(r->c->monitor_socket.path);
        r->c->monitor_socket.path = path;
        r->c->monitor_follows = true;
}

/* Reported where the second of them has its path, else where the first one has. */
static void check_paths_differ(struct config_reader *r, size_t a, size_t b)
{
        const struct config_place *places[N_SOCKETS] = { &r->socket, &r->admin_socket, &r->monitor_socket };
        const char *paths[N_SOCKETS] = { r->c->socket.path, r->c->admin_socket.path,
                                         r->c->monitor_socket.path };
        const struct yamltree_node *at = places[b]->at[SOCKET_PATH];

        if (!at)
                at = places[a]->at[SOCKET_PATH];
        if (at && strcmp(paths[a], paths[b]) == 0)
                config_fail(r, at, "%s and %s have the same path '%s'; they must differ", sockets[a].key,
                            sockets[b].key, SHOW(at));
}

bool config_read_socket(struct config_reader *r, struct config_place *in, const struct config_field *field,
                        const struct yamltree_node *n)
{
        size_t which = field == &CONFIG_TOP.fields[TOP_ADMIN_SOCKET]     ? ADMIN
                       : field == &CONFIG_TOP.fields[TOP_MONITOR_SOCKET] ? MONITOR
                                                                         : CLIENT;
        struct config_place *places[N_SOCKETS] = { &r->socket, &r->admin_socket, &r->monitor_socket };

        *places[which] = config_inner(in, field, n);
        if (n)
                config_read_section(r, places[which]);
        if (which == MONITOR && !places[which]->at[SOCKET_PATH])
                follow_admin_socket(r);
        for (size_t i = 0; i < which; i++)
                check_paths_differ(r, i, which);
        return n != NULL;
}

bool config_read_records(struct config_reader *r, struct config_place *in, const struct config_field *field,
                         const struct yamltree_node *n)
{
        r->records = config_inner(in, field, n);
        if (!n || !config_read_section(r, &r->records))
                return false;
        if (r->records.at[RECORDS_FILE] && r->records.at[RECORDS_JOURNAL_SOCKET])
                config_fail(r, r->records.at[RECORDS_JOURNAL_SOCKET],
                            "records has the keys 'file' and 'journal'; write one of them");
        return true;
}

/* ---- the command line ----------------------------------------------------- */

static bool option_fails(const char *option, const char *path, FILE *errors)
{
        char fault[CONFIG_FAULT_BYTES];

        if (!path || !config_path_fault(path, strlen(path), fault, sizeof(fault)))
                return false;
        fprintf(errors, "%s: %s\n", option, fault);
        return true;
}

/* Whether two of the paths are the same, which is reported: at the second one's option if it is given. The path
 * of the monitor socket can follow that of --admin-socket. */
static bool options_collide(const char *const given[N_SOCKETS], const char *const paths[N_SOCKETS],
                            FILE *errors)
{
        for (size_t b = 1; b < N_SOCKETS; b++) {
                for (size_t a = 0; a < b; a++) {
                        size_t at = given[b] ? b : given[a] ? a : ADMIN, other = at == b ? a : b;

                        if (strcmp(paths[a], paths[b]) != 0)
                                continue;
                        other = at == a || at == b ? other : CLIENT;
                        fprintf(errors, "%s: '%s' is the path of %s%s; they must differ\n",
                                sockets[at].option, paths[a], given[other] ? "" : "the config's ",
                                given[other] ? sockets[other].option : sockets[other].key);
                        return true;
                }
        }
        return false;
}

int config_set_sockets(struct config *c, const struct config_paths *from, FILE *errors)
{
        const char *given[N_SOCKETS] = { from->socket, from->admin_socket, from->monitor_socket };
        struct config_socket *to[N_SOCKETS] = { &c->socket, &c->admin_socket, &c->monitor_socket };
        char *paths[N_SOCKETS] = { NULL };
        bool follows = !from->monitor_socket && from->admin_socket && c->monitor_follows;
        bool fails = false;
        int r = 0;

        for (size_t i = 0; i < N_SOCKETS; i++)
                fails |= option_fails(sockets[i].option, given[i], errors);
        if (fails)
                return -EINVAL;
        for (size_t i = 0; i < N_SOCKETS; i++) {
                paths[i] = i == MONITOR && follows ? path_beside(from->admin_socket)
                                                   : strdup(given[i] ? given[i] : to[i]->path);
                if (!paths[i])
                        r = -ENOMEM;
        }
        if (r == 0 && options_collide(given, (const char *const *)paths, errors))
                r = -EINVAL;
        for (size_t i = 0; i < N_SOCKETS; i++) {
                free(r == 0 ? to[i]->path : paths[i]);
                if (r == 0)
                        to[i]->path = paths[i];
        }
        return r;
}
