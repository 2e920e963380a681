/* Reloads; see reload.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/reload.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/change.h"
#include "daemon/log.h"
#include "daemon/session.h"

/* Of a reply: it must fit in a frame. */
#define RELOAD_MAX_SENTENCES 256u
#define RELOAD_MAX_TEXT      (48u * 1024u)

struct reloads {
        struct broker *b;
        const struct reload_source *source;
        void (*read)(void *userdata);
        void *userdata;
        struct reload_request_list asked; /* the first is being read */
        bool is_reading;
        struct reload_request nobody; /* in the place of one that was cancelled while it was read */
        struct config_text *texts;    /* of the first, or NULL */
        /* The reading thread's while is_reading. */
        struct config *next; /* NULL: it failed */
        int result;
        char *errors; /* with warnings; NULL: out of memory */
        size_t n_errors;
};

/* ---- reading -------------------------------------------------------------- */

static int reload_load(struct reloads *r, FILE *errors)
{
        const struct reload_source *source = r->source;
        const struct config_machine machine = {
                .serves = true,
                .running = r->b->config,
                .socket_is_given = source->socket != NULL,
                .admin_socket_is_given = source->admin_socket != NULL,
        };
        int result = r->texts ? config_parse_texts(r->texts, &machine, errors, &r->next)
                              : config_load(source->path, &machine, errors, &r->next);

        if (result == 0)
                result = config_set_sockets(r->next, source->socket, source->admin_socket, errors);
        if (result == -ENOMEM)
                fputs("out of memory\n", errors);
        return result;
}

/* The broker's config stays as it is while this reads it: no other reload comes between. */
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

/* ---- putting in force ----------------------------------------------------- */

static void tell_session(struct session *s)
{
        for (size_t i = 0; i < s->n_shares; i++) {
                Bfcd__Event event = BFCD__EVENT__INIT;
                Bfcd__QuotaChanged changed = BFCD__QUOTA_CHANGED__INIT;

                if (!s->shares[i].quota->limit_changed)
                        continue;
                changed.partition = (uint32_t)i;
                changed.bytes_limit = s->shares[i].quota->account.limit_bytes;
                event.body_case = BFCD__EVENT__BODY_QUOTA_CHANGED;
                event.quota_changed = &changed;
                s->ops->send_event(s->userdata, &event);
        }
}

/* One event for each limit; who does not read them has its queue's bound, and is not
 * waited for. */
static void tell_sessions(struct broker *b)
{
        for (size_t i = 0; i < b->n_session_slots; i++) {
                struct session *s = b->sessions[i];

                if (s && s->state == SESSION_LIVE && s->takes_trims)
                        tell_session(s);
        }
        for (size_t i = 0; i < b->n_tenants; i++)
                for (size_t k = 0; k < b->tenants[i].n_quotas; k++)
                        b->tenants[i].quotas[k]->limit_changed = false;
}

int reload_config(struct broker *b, struct config *next, bool dry_run, FILE *changes, FILE *errors)
{
        int r = change_config(b, next, dry_run, changes, errors);

        if (r == 0 && !dry_run)
                tell_sessions(b);
        return r;
}

/* ---- one after the other -------------------------------------------------- */

static void reload_begin(struct reloads *r)
{
        struct reload_request *first = TAILQ_FIRST(&r->asked);

        r->is_reading = true;
        r->texts = first->texts;
        first->texts = NULL;
        if (r->read) {
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

static void reload_log(const struct reload_result *result, const char *path)
{
        if (result->dry_run)
                return;
        if (result->failed) {
                log_lines(LOG_LEVEL_WARNING, "reload: ", result->errors);
                log_warning("reload: %s was rejected; the configuration is unchanged", path);
        } else {
                log_lines(LOG_LEVEL_NOTICE, "reload: ", result->changes);
                log_notice("reload: %s was applied%s", path,
                           result->changes[0] ? "" : "; it contains no changes");
        }
}

/* Warnings of what is put in force are part of what is said of it. */
static void reload_put(struct reloads *r, struct reload_request *request)
{
        char *changes = NULL, *errors = NULL;
        size_t n_changes, n_errors;
        FILE *to = open_memstream(&changes, &n_changes), *wrong = open_memstream(&errors, &n_errors);
        struct reload_result result = { .failed = true, .dry_run = request->dry_run };
        const char *read = r->errors ? r->errors : "out of memory\n";

        if (to && wrong && r->result == 0) {
                fputs(read, to);
                r->result = reload_config(r->b, r->next, request->dry_run, to, wrong);
                if (r->result == 0 && !request->dry_run)
                        r->next = NULL;
                result.failed = r->result < 0;
        } else if (wrong) {
                fputs(read, wrong);
        }
        if (to)
                fclose(to);
        if (wrong)
                fclose(wrong);
        result.changes = changes ? changes : "";
        result.errors = errors ? errors : "out of memory\n";
        reload_log(&result, r->source->path);
        if (request->done)
                request->done(request, &result);
        free(changes);
        free(errors);
}

void reload_finish(struct reloads *r)
{
        struct reload_request *request = TAILQ_FIRST(&r->asked);

        TAILQ_REMOVE(&r->asked, request, link);
        request->is_asked = false;
        reload_put(r, request);
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
        if (r->is_reading && TAILQ_FIRST(&r->asked) == request) {
                r->nobody = (struct reload_request){ .dry_run = request->dry_run, .is_asked = true };
                TAILQ_INSERT_HEAD(&r->asked, &r->nobody, link);
        }
        TAILQ_REMOVE(&r->asked, request, link);
}

struct reloads *reloads_new(struct broker *b, const struct reload_source *source,
                            void (*read)(void *userdata), void *userdata)
{
        struct reloads *r = calloc(1, sizeof(*r));

        if (!r)
                return NULL;
        *r = (struct reloads){ .b = b, .source = source, .read = read, .userdata = userdata };
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

/* ---- an operator's session ------------------------------------------------ */

struct session_reload {
        struct reload_request request;
        struct session *session;
        uint64_t id; /* of the request, to be answered */
};

/* Cuts lines into sentences, in place, and adds one that says how many more there were. */
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

/* A piece of a file that the operator has. True: it was the last one, or there is none. */
static bool reload_take(struct session *s, const Bfcd__Request *r, struct session_reload *own)
{
        const Bfcd__Reload *m = r->reload;
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        Bfcd__ReloadReply body = BFCD__RELOAD_REPLY__INIT;
        int result;

        if (!m->dry_run) /* what was sent before it is never put in force */
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
        reply.id = r->id;
        reply.body_case = BFCD__REPLY__BODY_RELOAD;
        reply.reload = &body;
        session_send(s, &reply);
        return false;
}

int reload_handle(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        struct reloads *reloads = s->broker->reloads;
        struct session_reload *own = s->reload;

        (void)ret_why;
        if (!s->admin) {
                session_refuse(s, r->id, -EACCES, "reload is only for operators: use the admin socket");
                return 0;
        }
        if (!reloads) {
                session_refuse(s, r->id, -EINVAL, "this daemon has no configuration file to reload");
                return 0;
        }
        if (!own)
                own = s->reload = calloc(1, sizeof(*own));
        if (!own) {
                session_refuse(s, r->id, -ENOMEM, "the daemon is out of memory");
                return 0;
        }
        if (own->request.is_asked) {
                session_refuse(s, r->id, -EBUSY,
                               "a reload of this session is still running: wait until it is done");
                return 0;
        }
        if (!reload_take(s, r, own))
                return 0;
        *own = (struct session_reload){ .request = { .dry_run = r->reload->dry_run,
                                                     .texts = own->request.texts,
                                                     .done = session_reloaded },
                                        .session = s,
                                        .id = r->id };
        log_notice("session %" PRIu64 " (uid %u): reload requested%s", s->id, (unsigned)s->who.uid,
                   r->reload->dry_run ? " (dry run)" : "");
        reload_ask(reloads, &own->request);
        return 0;
}

void reload_end_session(struct session *s)
{
        if (!s->reload)
                return;
        reload_cancel(s->broker->reloads, &s->reload->request);
        config_text_free(s->reload->request.texts);
        free(s->reload);
        s->reload = NULL;
}
