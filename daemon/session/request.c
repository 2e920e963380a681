/* Requests; see request.h. One handler for each request, in a table; each checks the whole request
 * before it changes anything.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/request.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/base/number.h"
#include "daemon/session/accounting.h"
#include "daemon/session/command.h"
#include "daemon/session/delivery.h"
#include "daemon/session/explain.h"
#include "daemon/session/hello.h"
#include "daemon/session/lease.h"
#include "daemon/session/park.h"
#include "daemon/session/recall.h"
#include "daemon/session/reload.h"
#include "daemon/session/report.h"
#include "daemon/session/request_memory.h"
#include "daemon/session/resume.h"
#include "daemon/session/session.h"
#include "daemon/session/session_states.h"
#include "daemon/session/share.h"
#include "daemon/session/shared.h"
#include "daemon/session/trim.h"

/* ---- cancel, goodbye ----------------------------------------------------- */

/* The client frees what was answered already or is being delivered. */
static int handle_cancel(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        uint64_t id = r->cancel->request_id;

        (void)ret_why;
        if (!request_drop(s, id) && !shared_withdraw_attach(s, id) && !park_cancel(s, id))
                return 0;
        session_refuse(s, id, -ECANCELED, "the client cancelled this request");
        s->ops->ready(s->userdata);
        return 0;
}

/* ---- statistics and lists ------------------------------------------------ */

/* By the partition's number in the hello's reply. NULL: the request was refused. */
static struct session_share *find_share(struct session *s, uint64_t id, uint32_t partition)
{
        if (s->role == ROLE_CLIENT && partition < s->n_shares)
                return &s->shares[partition];
        session_refuse(s, id, -ENOENT, "no such partition: the reply to the hello lists all partitions");
        return NULL;
}

/* No memory is free for a session that may not join the quota. */
static void describe_room(const struct session_share *share, Bfcd__Room *ret)
{
        struct quota *q = share->quota;
        bool may_use = share->joined || (!q->is_removed && q->sessions.n < q->max_sessions);

        ret->bytes_total = min_u64(q->account.limit_bytes, q->partition->pool.limit_bytes);
        ret->bytes_free = may_use ? min_u64(quota_obtainable(q), ret->bytes_total) : 0;
}

static int handle_usage(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        struct session_share *share = find_share(s, r->id, r->usage->partition);
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        Bfcd__UsageReply usage = BFCD__USAGE_REPLY__INIT;
        Bfcd__Statistics stats = BFCD__STATISTICS__INIT;
        Bfcd__Room room = BFCD__ROOM__INIT;

        (void)ret_why;
        if (!share)
                return 0;
        report_quota_stats(share->quota, &stats);
        usage.stats = &stats;
        if (r->usage->with_room) {
                describe_room(share, &room);
                usage.room = &room;
        }
        reply.id = r->id;
        reply.body_case = BFCD__REPLY__BODY_USAGE;
        reply.usage = &usage;
        session_send(s, &reply);
        return 0;
}

static int handle_release(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        struct session_share *share = find_share(s, r->id, r->release->partition);
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        Bfcd__Released released = BFCD__RELEASED__INIT;

        (void)ret_why;
        if (!share)
                return 0;
        released.bytes_returning = quota_release_soon(share->quota, r->release->n_bytes);
        reply.id = r->id;
        reply.body_case = BFCD__REPLY__BODY_RELEASED;
        reply.released = &released;
        session_send(s, &reply);
        return 0;
}

static int handle_list(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        struct report report;

        (void)ret_why;
        if (r->list->kind == BFCD__LIST__KIND__WHOAMI && hello_match(s) < 0) {
                session_refuse(s, r->id, -ENOMEM, "the daemon is out of memory");
                return 0;
        }
        if (report_list(s, r->list, &report) < 0) {
                session_refuse(s, r->id, -EINVAL, "there is no such list");
                return 0;
        }
        reply.id = r->id;
        reply.body_case = BFCD__REPLY__BODY_LIST;
        reply.list = &report.list;
        session_send(s, &reply);
        return 0;
}

static int handle_explain(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        struct explanation explanation;
        char sentence[EXPLAIN_SENTENCE];

        (void)ret_why;
        if (explain_page(s, r->explain, &explanation) < 0) {
                explain_names(s, r->explain->tenant, r->explain->partition, sentence, sizeof(sentence));
                session_refuse(s, r->id, -ENOENT, sentence);
                return 0;
        }
        reply.id = r->id;
        reply.body_case = BFCD__REPLY__BODY_EXPLAIN;
        reply.explain = &explanation.reply;
        session_send(s, &reply);
        return 0;
}

/* Answered when all is freed, so that a client that waits for the answer leaves nothing behind. */
static int handle_goodbye(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        (void)ret_why;
        if (r->goodbye->exits) { /* its memory stays mapped until the process ends */
                s->goodbye.exits = true;
                session_done(s, r->id);
                return 0;
        }
        s->goodbye.id = r->id;
        session_close(s, "goodbye");
        return 0;
}

static int handle_reset_peaks(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        const Bfcd__ResetPeaks *reset = r->reset_peaks;
        struct broker *b = s->broker;
        size_t n = 0;

        (void)ret_why;
        if (s->role == ROLE_CLIENT) {
                session_refuse(s, r->id, -EACCES, "reset-peaks is only for operators: use the admin socket");
                return 0;
        }
        for (size_t i = 0; i < b->n_tenants; i++) {
                struct tenant *t = &b->tenants[i];

                for (size_t k = 0; k < t->n_quotas; k++) {
                        struct quota *q = t->quotas[k];

                        if ((reset->tenant[0] && strcmp(reset->tenant, t->name) != 0) ||
                            (reset->partition[0] && strcmp(reset->partition, q->partition->name) != 0))
                                continue;
                        quota_clear_peaks(q);
                        n++;
                }
        }
        if (n == 0) {
                char sentence[EXPLAIN_SENTENCE];

                explain_names(s, reset->tenant, reset->partition, sentence, sizeof(sentence));
                session_refuse(s, r->id, -ENOENT, sentence);
                return 0;
        }
        for (size_t i = 0; i < b->n_partitions && !reset->tenant[0]; i++)
                if (!reset->partition[0] || strcmp(reset->partition, b->partitions[i].name) == 0)
                        partition_clear_peaks(&b->partitions[i]);
        log_info("%s: peaks of %zu quota%s reset", SESSION_LABEL(s), n, n == 1 ? "" : "s");
        session_done(s, r->id);
        return 0;
}

static int handle_show_config(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        Bfcd__ConfigReply config = BFCD__CONFIG_REPLY__INIT;
        const char *text = s->broker->own.text;
        size_t n_text = strlen(text);
        char piece[16384];
        size_t n;

        (void)ret_why;
        if (s->role == ROLE_CLIENT) {
                session_refuse(s, r->id, -EACCES,
                               "the configuration is only for operators: use the admin socket");
                return 0;
        }
        if (r->show_config->cursor > n_text) {
                session_refuse(s, r->id, -EINVAL, "the cursor is past the end of the configuration");
                return 0;
        }
        n = n_text - (size_t)r->show_config->cursor;
        if (n > sizeof(piece) - 1)
                n = sizeof(piece) - 1;
        memcpy(piece, text + r->show_config->cursor, n);
        piece[n] = '\0';
        config.text = piece;
        config.next_cursor = r->show_config->cursor + n < n_text ? r->show_config->cursor + n : 0;
        reply.id = r->id;
        reply.body_case = BFCD__REPLY__BODY_CONFIG;
        reply.config = &config;
        session_send(s, &reply);
        return 0;
}

/* ---- dispatch ------------------------------------------------------------ */

typedef int (*session_handler)(struct session *s, const Bfcd__Request *r, const char **ret_why);

static const session_handler handlers[] = {
        [BFCD__REQUEST__BODY_HELLO] = hello_handle,
        [BFCD__REQUEST__BODY_MALLOC] = handle_malloc,
        [BFCD__REQUEST__BODY_FREE] = handle_free,
        [BFCD__REQUEST__BODY_ACK] = delivery_ack,
        [BFCD__REQUEST__BODY_USAGE] = handle_usage,
        [BFCD__REQUEST__BODY_LIST] = handle_list,
        [BFCD__REQUEST__BODY_GOODBYE] = handle_goodbye,
        [BFCD__REQUEST__BODY_RESET_PEAKS] = handle_reset_peaks,
        [BFCD__REQUEST__BODY_SHOW_CONFIG] = handle_show_config,
        [BFCD__REQUEST__BODY_PUBLISH] = shared_publish,
        [BFCD__REQUEST__BODY_ATTACH] = shared_attach,
        [BFCD__REQUEST__BODY_EXPLAIN] = handle_explain,
        [BFCD__REQUEST__BODY_RELOAD] = reload_handle,
        [BFCD__REQUEST__BODY_TRIM_NOW] = handle_trim_now,
        [BFCD__REQUEST__BODY_EVICT] = handle_evict,
        [BFCD__REQUEST__BODY_HELD] = resume_list,
        [BFCD__REQUEST__BODY_DRAIN] = handle_drain,
        [BFCD__REQUEST__BODY_RESUME] = handle_resume,
        [BFCD__REQUEST__BODY_CANCEL] = handle_cancel,
        [BFCD__REQUEST__BODY_RELEASE] = handle_release,
        [BFCD__REQUEST__BODY_SPLIT] = handle_split,
        [BFCD__REQUEST__BODY_METADATA] = shared_handle_metadata,
        [BFCD__REQUEST__BODY_PARK] = park_handle,
        [BFCD__REQUEST__BODY_WAKE] = park_handle_wake,
        [BFCD__REQUEST__BODY_PARK_NOW] = handle_park_now,
        [BFCD__REQUEST__BODY_FORGET] = shared_handle_forget,
        [BFCD__REQUEST__BODY_CHARGE] = direct_handle_charge,
        [BFCD__REQUEST__BODY_UNCHARGE] = direct_handle_uncharge,
        [BFCD__REQUEST__BODY_LEASE_CREATE] = handle_lease_create,
        [BFCD__REQUEST__BODY_LEASE_SET] = handle_lease_set,
        [BFCD__REQUEST__BODY_LEASE_END] = handle_lease_end,
};

/* What a monitor may send; every other request changes something, or is for memory. */
static const bool monitor_requests[] = {
        [BFCD__REQUEST__BODY_HELLO] = true,   [BFCD__REQUEST__BODY_ACK] = true,
        [BFCD__REQUEST__BODY_LIST] = true,    [BFCD__REQUEST__BODY_GOODBYE] = true,
        [BFCD__REQUEST__BODY_EXPLAIN] = true, [BFCD__REQUEST__BODY_SHOW_CONFIG] = true,
        [BFCD__REQUEST__BODY_CANCEL] = true,
};

static bool monitor_may_send(size_t body)
{
        return body < sizeof(monitor_requests) / sizeof(monitor_requests[0]) && monitor_requests[body];
}

/* What a scheduler needs to know where leases have room, and which ones there are. */
static bool scheduler_may_list(Bfcd__List__Kind kind)
{
        return kind == BFCD__LIST__KIND__STATUS || kind == BFCD__LIST__KIND__PARTITIONS ||
               kind == BFCD__LIST__KIND__TENANTS || kind == BFCD__LIST__KIND__LEASES ||
               kind == BFCD__LIST__KIND__WHOAMI;
}

static bool scheduler_may_send(const Bfcd__Request *request)
{
        switch ((int)request->body_case) {
        case BFCD__REQUEST__BODY_HELLO:
        case BFCD__REQUEST__BODY_ACK:
        case BFCD__REQUEST__BODY_GOODBYE:
        case BFCD__REQUEST__BODY_CANCEL:
        case BFCD__REQUEST__BODY_LEASE_CREATE:
        case BFCD__REQUEST__BODY_LEASE_SET:
        case BFCD__REQUEST__BODY_LEASE_END:
                return true;
        case BFCD__REQUEST__BODY_LIST:
                return scheduler_may_list(request->list->kind);
        default:
                return false;
        }
}

bool session_is_full(const struct session *s)
{
        return s->requests.n >= SESSION_MAX_PENDING;
}

bool session_may_handle(const struct session *s, const Bfcd__Request *request)
{
        return !session_is_full(s) || request->body_case == BFCD__REQUEST__BODY_CANCEL;
}

bool session_looks_at_many(const struct session *s, const Bfcd__Request *request)
{
        switch ((int)request->body_case) {
        case BFCD__REQUEST__BODY_LIST:
        case BFCD__REQUEST__BODY_EXPLAIN:
                return s->tenant != NULL;
        case BFCD__REQUEST__BODY_LEASE_CREATE:
        case BFCD__REQUEST__BODY_LEASE_SET:
        case BFCD__REQUEST__BODY_LEASE_END:
                return s->role != ROLE_ADMIN;
        default:
                return false;
        }
}

int session_handle(struct session *s, const Bfcd__Request *request, const char **ret_why)
{
        size_t body = (size_t)request->body_case;
        session_handler handler = body < sizeof(handlers) / sizeof(handlers[0]) ? handlers[body] : NULL;
        const char *fault;

        if (!handler) {
                *ret_why = "the client sent a request type that this version does not support";
                return -EPROTO;
        }
        if (request->id == 0 && handler != delivery_ack && handler != handle_cancel) {
                *ret_why = "the client sent a request with id 0";
                return -EPROTO;
        }
        fault = session_request_fault(s, request);
        if (fault) {
                *ret_why = fault;
                return -EPROTO;
        }
        if (s->role == ROLE_MONITOR && !monitor_may_send(body)) {
                session_refuse(
                        s, request->id, -EACCES,
                        "the monitor socket only shows the daemon's state and changes nothing: use the "
                        "admin socket to administer, and the client socket for memory");
                return 0;
        }
        if (s->role == ROLE_SCHEDULER && !scheduler_may_send(request)) {
                session_refuse(
                        s, request->id, -EACCES,
                        "the lease socket is only for leases, and lists of devices, partitions, tenants "
                        "and leases: use the admin socket to administer, and the client socket for memory");
                return 0;
        }
        return handler(s, request, ret_why);
}

int session_handle_event(struct session *s, const Bfcd__EventReply *reply, const char **ret_why)
{
        return session_is_live(s) ? recall_answer(s, reply->sequence, ret_why) : 0;
}

int session_work(struct session *s, size_t n_blocks, const char **ret_why)
{
        int r;

        if (s->state == SESSION_RESUMING)
                return resume_step(s, n_blocks, ret_why);
        if (!session_is_closing(s))
                return 0;
        r = session_reap(s, n_blocks);
        return r == 0 ? SESSION_DONE : r;
}
