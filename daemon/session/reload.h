/* Reloads: the daemon reads the files of the config again and applies the changes.
 *
 * A separate thread reads them, because a file system or a user database may be slow. There is one reload
 * at a time, in the order of the requests. change_config() applies a config in one turn of the loop. A
 * request comes from an admin session, or from the server after a signal.
 *
 * Invariants: `asked` is empty exactly when no files are being read; each requester has one reload at a
 * time.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_RELOAD_H
#define BFCD_RELOAD_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/queue.h>

#include "daemon/memory/broker.h"
#include "proto/bfcd.pb-c.h"

struct session;

/* Lines. changes: warnings, then what changed or, in a dry run, would change. errors: why it `failed`;
 * then nothing has changed. */
struct reload_result {
        bool failed;
        bool dry_run;
        const char *changes;
        const char *errors;
};

/* Embedded by the requester. */
struct reload_request {
        bool dry_run;
        bool has_client; /* these asked, for the record; false: a signal did */
        uid_t uid;
        pid_t pid;
        struct config_text *texts; /* instead of the files, on a dry run; freed by the reload */
        bool is_asked;             /* done() was not called yet */
        void (*done)(struct reload_request *request, const struct reload_result *result);
        TAILQ_ENTRY(reload_request) link;
};
TAILQ_HEAD(reload_request_list, reload_request);

/* path: the config's, borrowed. read() has reload_read() called on a thread of its own, and then reload_finish() on the loop's thread.
 * NULL: both are called at once. */
struct reloads *reloads_new(struct broker *b, const char *path, void (*read)(void *userdata), void *userdata);
struct reloads *reloads_free(struct reloads *r); /* no reading may be under way; takes NULL */
void reload_read(struct reloads *r);
void reload_finish(struct reloads *r);

/* done() is called later, or inside this call. The request must not have is_asked set. */
void reload_ask(struct reloads *r, struct reload_request *request);
/* Prevents the call of done(). A reload that has not begun is dropped. */
void reload_cancel(struct reloads *r, struct reload_request *request);

/* Applies a config by change_config(), and tells the sessions. */
int reload_config(struct broker *b, struct config *next, bool dry_run, FILE *changes, FILE *errors);

/* The handler of Reload; and the end of a session, which drops its reload. */
struct session_reload;
int reload_handle(struct session *s, const Bfcd__Request *r, const char **ret_why);
void reload_end_session(struct session *s);

#endif
