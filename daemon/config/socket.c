/* SPDX-License-Identifier: Apache-2.0 */
/* The three sockets, whose paths must differ, and where records go. */
#include "daemon/config/reader.h"

#include <stdlib.h>
#include <string.h>

#include "proto/paths.h"

enum { CLIENT, ADMIN, MONITOR, N_SOCKETS };

static const char *const keys[N_SOCKETS] = { "socket", "admin_socket", "monitor_socket" };

/* Without a path of its own the monitor socket is in the folder of the admin socket. So a second daemon, whose
 * sockets have another folder, need not configure it. */
static void follow_admin_socket(struct config_reader *r)
{
        const char *admin = r->c->admin_socket.path;
        char *path;

        if (asprintf(&path, "%.*s/" PATHS_MONITOR_NAME, (int)(strrchr(admin, '/') - admin), admin) < 0) {
                r->is_out_of_memory = true;
                return;
        }
        free(r->c->monitor_socket.path);
        r->c->monitor_socket.path = path;
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
                config_fail(r, at, "%s and %s have the same path '%s'; they must differ", keys[a], keys[b],
                            SHOW(at));
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
