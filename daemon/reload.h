/* Reloads: the config's files are read again, and what they say is put in force.
 *
 * They are read off the loop, since a file system or a directory of users may take its
 * time, one reload at a time and in the order in which they were asked for; then
 * change_config() does the rest in one turn of the loop. Who asks is an operator's
 * session, or the server for a signal.
 *
 * Invariant: `asked` is empty exactly when no reading is under way; who asks has one
 * reload at a time.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_RELOAD_H
#define BFCD_RELOAD_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/queue.h>

#include "daemon/broker.h"
#include "proto/bfcd.pb-c.h"

struct session;

/* Where the config came from, by the command line; borrowed. */
struct reload_source {
        const char *path;
        const char *socket, *admin_socket; /* NULL: the config's */
};

/* Lines: what changed or would, warnings first; and if `failed`, what is wrong, and
 * nothing changed. */
struct reload_result {
        bool failed;
        bool dry_run;
        const char *changes;
        const char *errors;
};

/* Embedded by who asks. */
struct reload_request {
        bool dry_run;
        struct config_text *texts; /* instead of the files, on a dry run; taken over when they are read */
        bool is_asked;             /* the reload's: done() has not been called */
        void (*done)(struct reload_request *request, const struct reload_result *result);
        TAILQ_ENTRY(reload_request) link;
};
TAILQ_HEAD(reload_request_list, reload_request);

/* read(): to call reload_read() on a thread of its own, and then reload_finish() on the
 * loop's. NULL: both at once. */
struct reloads *reloads_new(struct broker *b, const struct reload_source *source,
                            void (*read)(void *userdata), void *userdata);
struct reloads *reloads_free(struct reloads *r); /* no reading may be under way; takes NULL */
void reload_read(struct reloads *r);
void reload_finish(struct reloads *r);

/* done() is called later, or inside this. The request must not be asked for already. */
void reload_ask(struct reloads *r, struct reload_request *request);
/* done() is not called any more; one that is not being read is not carried out. */
void reload_cancel(struct reloads *r, struct reload_request *request);

/* Puts a config in force as reload_finish() does, and tells the sessions. See
 * change_config(). */
int reload_config(struct broker *b, struct config *next, bool dry_run, FILE *changes, FILE *errors);

/* The handler of Reload; and what a session has of it, which ends with it. */
struct session_reload;
int reload_handle(struct session *s, const Bfcd__Request *r, const char **ret_why);
void reload_end_session(struct session *s);

#endif
