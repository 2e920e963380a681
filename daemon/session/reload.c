/* Reloads; see reload.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/reload.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/memory/change.h"
#include "daemon/session/lease.h"
#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/record/records.h"
#include "daemon/session/session.h"
#include "daemon/session/shared.h"

/* Of a reply: it must fit in a frame. */
#define RELOAD_MAX_SENTENCES 256u
#define RELOAD_RECORD_PATH   1024u /* bytes of a record */
#define RELOAD_RECORD_TEXT   4096u
#define RELOAD_MAX_TEXT      (48u * 1024u)

struct reloads {
        struct broker *b;
        const char *path;
        void (*read)(void *userdata);
        void *userdata;
        struct reload_request_list asked; /* the first is being read */
        bool is_reading;
        struct reload_request cancelled; /* replaces a request that was cancelled while it was read */
        struct config_text *texts;       /* of the first, or NULL */
        /* While is_reading these belong to the reading thread. */
        struct config *next; /* NULL: it failed */
        int result;
        char *errors; /* with warnings; NULL: out of memory */
        size_t n_errors;
};

/* ---- reading -------------------------------------------------------------- */

static int reload_load(struct reloads *r, FILE *errors)
{
        const struct config_machine machine = { .serves = true, .running = r->b->config };
        int result = r->texts ? config_parse_texts(r->texts, &machine, errors, &r->next)
                              : config_load(r->path, &machine, errors, &r->next);

        if (result == -ENOMEM)
                fputs("out of memory\n", errors);
        return result;
}

/* No other reload changes the broker's config meanwhile. */
void reload_read(struct reloads *r)
{
        FILE *errors = open_memstream(&r->errors, &r->n_errors);

        r->next = NULL;
        r->result = errors ? reload_load(r, errors) : -ENOMEM;
        if (errors && fclose(errors) != 0)
                r->result = -ENOMEM;
        if (r->result < 0)
                r->next = config_free(r->next);
}

/* ---- applying ------------------------------------------------------------- */

int reload_config(struct broker *b, struct config *next, bool dry_run, FILE *changes, FILE *errors)
{
        int r = change_config(b, next, dry_run, changes, errors);

        /* The change is complete. Sessions learn their limits now; leases of removed quotas end, and kept blocks are
         * reviewed, in the next turn. */
        if (r == 0 && !dry_run) {
                b->leases.due_ms = 0;
                tell_limits(b);
                shared_review_kept(b);
        }
        return r;
}

/* ---- the queue ------------------------------------------------------------ */

static void reload_begin(struct reloads *r)
{
        struct reload_request *first = TAILQ_FIRST(&r->asked);

        /* The reading thread has the texts and the result until reload_finish(): the request can be cancelled
         * meanwhile. */
        r->is_reading = true;
        r->texts = first->texts;
        first->texts = NULL;
        if (r->read) { /* on a thread, which calls reload_read(); without one it is read here */
                r->read(r->userdata);
                return;
        }
        reload_read(r);
        reload_finish(r);
}

static void log_lines(enum log_level level, const char *what, const char *lines)
{
        while (*lines) {
                int n = (int)strcspn(lines, "\n");

                log_write(level, "%s%.*s", what, n, lines);
                lines += n + (lines[n] == '\n');
        }
}

static void reload_log(const struct reload_result *result, const struct reload_request *request,
                       const char *path)
{
        struct record r;

        if (result->dry_run)
                return;
        record_init(&r, RECORD_RELOAD);
        record_add_text(&r, "path", path, RELOAD_RECORD_PATH);
        record_add_text(&r, "result", result->failed ? "rejected" : "applied", SIZE_MAX);
        record_add_lines(&r, "changes", result->failed ? result->errors : result->changes,
                         RELOAD_RECORD_TEXT);
        if (request->has_client) {
                record_add_number(&r, "uid", request->uid);
                record_add_number(&r, "pid", (uint64_t)request->pid);
        }
        if (result->failed) {
                log_lines(LOG_LEVEL_WARNING, "reload: ", result->errors);
                records_write(LOG_LEVEL_WARNING, &r,
                              "reload: %s was rejected; the configuration is unchanged", path);
        } else {
                log_lines(LOG_LEVEL_NOTICE, "reload: ", result->changes);
                records_write(LOG_LEVEL_NOTICE, &r, "reload: %s was applied%s", path,
                              result->changes[0] ? "" : "; it contains no changes");
        }
}

/* Warnings of a config that is applied come before its changes. */
static void reload_apply(struct reloads *r, struct reload_request *request)
{
        char *changes = NULL, *errors = NULL;
        size_t n_changes, n_errors;
        FILE *to = open_memstream(&changes, &n_changes), *wrong = open_memstream(&errors, &n_errors);
        struct reload_result result = { .failed = true, .dry_run = request->dry_run };
        const char *read = r->errors ? r->errors : "out of memory\n";

        /* The file is valid: what was read are its warnings. Else these are the errors, and nothing is changed. */
        if (to && wrong && r->result == 0) {
                fputs(read, to);
                r->result = reload_config(r->b, r->next, request->dry_run, to, wrong);
                if (r->result == 0 && !request->dry_run)
                        r->next = NULL; /* it is the broker's */
                result.failed = r->result < 0;
        } else if (wrong) {
                fputs(read, wrong);
        }
        if (to)
                fclose(to);
        if (wrong)
                fclose(wrong);

        /* The log and the operator get the same lines. */
        result.changes = changes ? changes : "";
        result.errors = errors ? errors : "out of memory\n";
        reload_log(&result, request, r->path);
        if (request->done)
                request->done(request, &result);
        free(changes);
        free(errors);
}

void reload_finish(struct reloads *r)
{
        struct reload_request *request = TAILQ_FIRST(&r->asked);

        /* The request leaves the queue first, because its callback may ask for another reload. */
        TAILQ_REMOVE(&r->asked, request, link);
        request->is_asked = false;
        reload_apply(r, request);

        /* Nothing of it is left before the next one is read. */
        r->next = config_free(r->next);
        r->texts = config_text_free(r->texts);
        free(r->errors);
        r->errors = NULL;
        r->is_reading = false;
        if (!TAILQ_EMPTY(&r->asked))
                reload_begin(r);
}

void reload_ask(struct reloads *r, struct reload_request *request)
{
        assert(!request->is_asked);
        request->is_asked = true;
        TAILQ_INSERT_TAIL(&r->asked, request, link);
        if (!r->is_reading)
                reload_begin(r);
}

void reload_cancel(struct reloads *r, struct reload_request *request)
{
        if (!request->is_asked)
                return;
        request->is_asked = false;

        /* The thread cannot be stopped: a request without a callback waits in its place for the end. */
        if (r->is_reading && TAILQ_FIRST(&r->asked) == request) {
                r->cancelled = *request;
                r->cancelled.done = NULL;
                r->cancelled.is_asked = true;
                TAILQ_INSERT_HEAD(&r->asked, &r->cancelled, link);
        }
        TAILQ_REMOVE(&r->asked, request, link);
}

struct reloads *reloads_new(struct broker *b, const char *path, void (*read)(void *userdata), void *userdata)
{
        struct reloads *r = calloc(1, sizeof(*r));

        if (!r)
                return NULL;
        *r = (struct reloads){ .b = b, .path = path, .read = read, .userdata = userdata };
        TAILQ_INIT(&r->asked);
        b->reloads = r;
        return r;
}

struct reloads *reloads_free(struct reloads *r)
{
        if (!r)
                return NULL;
        assert(!r->is_reading);
        r->b->reloads = NULL;
        free(r);
        return NULL;
}

/* ---- admin sessions ------------------------------------------------------- */

struct session_reload {
        struct reload_request request;
        struct session *session;
        uint64_t id; /* of the request, to be answered */
};

/* Cuts lines into sentences, in place. The last one tells how many more lines there are. */
static size_t split_lines(char *lines, char **ret_sentences, char *more, size_t n_more)
{
        size_t n = 0, n_left = 0, n_text = 0;

        while (*lines) {
                size_t n_line = strcspn(lines, "\n");
                bool is_last = lines[n_line] == '\0';

                n_text += n_line + 8;
                if (n < RELOAD_MAX_SENTENCES && n_text <= RELOAD_MAX_TEXT)
                        ret_sentences[n++] = lines;
                else
                        n_left++;
                lines[n_line] = '\0';
                lines += n_line + !is_last;
        }
        if (n_left > 0) {
                snprintf(more, n_more,
                         "and %zu more lines; except for a dry run, the daemon's log has all of them",
                         n_left);
                ret_sentences[n++] = more;
        }
        return n;
}

static void session_reloaded(struct reload_request *request, const struct reload_result *result)
{
        struct session_reload *own = (struct session_reload *)request;
        struct session *s = own->session;
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        Bfcd__ReloadReply body = BFCD__RELOAD_REPLY__INIT;
        char *sentences[RELOAD_MAX_SENTENCES + 1], more[96];
        char *lines = strdup(result->failed ? result->errors : result->changes);

        if (!lines) {
                session_refuse(s, own->id, -ENOMEM, "the daemon is out of memory; its log has the result");
                return;
        }
        if (result->failed) {
                body.n_errors = split_lines(lines, sentences, more, sizeof(more));
                body.errors = sentences;
        } else {
                body.n_changes = split_lines(lines, sentences, more, sizeof(more));
                body.changes = sentences;
        }
        reply.id = own->id;
        reply.body_case = BFCD__REPLY__BODY_RELOAD;
        reply.reload = &body;
        session_send(s, &reply);
        free(lines);
}

/* Takes a piece of a file that the operator sends. True: it was the last one, or there is none. */
static bool reload_take(struct session *s, const Bfcd__Request *r, struct session_reload *own)
{
        const Bfcd__Reload *m = r->reload;
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        Bfcd__ReloadReply body = BFCD__RELOAD_REPLY__INIT;
        int result;

        /* Pieces of files are collected until one arrives that is not partial, or has no name. */
        if (!m->dry_run) /* files that were sent before are never applied */
                own->request.texts = config_text_free(own->request.texts);
        if (!m->name[0])
                return true;
        result = m->dry_run ? config_text_add(&own->request.texts, m->name, m->piece.data, m->piece.len)
                            : -EINVAL;
        if (result < 0) {
                own->request.texts = config_text_free(own->request.texts);
                session_refuse(s, r->id, result,
                               result == -EINVAL ? "only a dry run accepts a file: a reload reads the "
                                                   "daemon's own file"
                               : result == -EFBIG
                                       ? "the configuration is too large: a file has at most 1 MiB, all "
                                         "files together 4 MiB"
                                       : "the daemon is out of memory");
                return false;
        }
        if (!m->is_partial)
                return true;

        /* The operator sends the next piece after this reply. */
        reply.id = r->id;
        reply.body_case = BFCD__REPLY__BODY_RELOAD;
        reply.reload = &body;
        session_send(s, &reply);
        return false;
}

int reload_handle(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        struct reloads *reloads = s->broker->reloads;
        struct session_reload *own;

        (void)ret_why;

        /* Only operators reload, the daemon must have a file, and a session has one reload at a time. */
        if (session_refuse_client(s, r->id, "reload is"))
                return 0;
        if (!reloads) {
                session_refuse(s, r->id, -EINVAL, "this daemon has no configuration file to reload");
                return 0;
        }
        own = s->admin->reload;
        if (!own)
                own = s->admin->reload = calloc(1, sizeof(*own));
        if (!own) {
                session_refuse(s, r->id, -ENOMEM, "the daemon is out of memory");
                return 0;
        }
        if (own->request.is_asked) {
                session_refuse(s, r->id, -EBUSY,
                               "a reload of this session is still running: wait until it is done");
                return 0;
        }

        /* The request is complete: the file is read off the loop, and session_reloaded() answers. */
        if (!reload_take(s, r, own))
                return 0;
        *own = (struct session_reload){ .request = { .dry_run = r->reload->dry_run,
                                                     .has_client = true,
                                                     .uid = s->who.uid,
                                                     .pid = s->who.pid,
                                                     .texts = own->request.texts,
                                                     .done = session_reloaded },
                                        .session = s,
                                        .id = r->id };
        log_notice("%s: reload requested%s", SESSION_LABEL(s), r->reload->dry_run ? " (dry run)" : "");
        reload_ask(reloads, &own->request);
        return 0;
}

void reload_end_session(struct session *s)
{
        if (!s->admin || !s->admin->reload)
                return;
        reload_cancel(s->broker->reloads, &s->admin->reload->request);
        config_text_free(s->admin->reload->request.texts);
        free(s->admin->reload);
        s->admin->reload = NULL;
}
