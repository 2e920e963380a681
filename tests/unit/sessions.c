/* See sessions.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/sessions.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/base/log.h"
#include "tests/checks.h"
#include "tests/suite.h"
#include "daemon/session/recall.h"
#include "daemon/session/shared.h"

struct broker *b;
struct config *config;

void sessions_start(const char *config_text)
{
        b = peer_broker(config_text, &config);
}

void sessions_start_sticky(const char *config_text)
{
        b = peer_broker_sticky(config_text, &config);
}

void sessions_end(void)
{
        check();
        b = peer_broker_free(b, config);
}

void check(void)
{
        const char *why = "";

        ck_assert_msg(broker_check(b, &why) == 0, "broker: %s", why);
        ck_assert_msg(shared_check(b, &why) == 0, "shared blocks: %s", why);
        ck_assert_msg(retire_check(b, &why) == 0, "retirement: %s", why);
        ck_assert_msg(trim_check(b, &why) == 0, "trim: %s", why);
        ck_assert_msg(pressure_check(b, &why) == 0, "pressure: %s", why);
        for (size_t i = 0; i < b->n_tenants; i++)
                for (size_t k = 0; k < b->tenants[i].n_quotas; k++)
                        ck_assert_msg(usage_check(b->tenants[i].quotas[k], &why) == 0, "usage: %s", why);
}

void settle(void)
{
        peer_settle(b);
        check();
}

struct peer *say_hello(struct peer *p)
{
        ck_assert_int_eq(peer_error(p, peer_hello(p, "", "")), 0);
        return p;
}

struct peer *open_session(uid_t uid)
{
        return say_hello(peer_new(b, uid, false));
}

struct peer *open_admin_session(void)
{
        return say_hello(peer_new(b, 0, true));
}

const Bfcd__Block *must_malloc_block(struct peer *p, uint32_t partition, uint64_t n_bytes)
{
        uint64_t id = peer_malloc(p, partition, n_bytes);
        const Bfcd__Reply *reply;

        settle();
        while ((p->auto_ack || !peer_reply(p, id)) && p->to_ack > p->session->delivery.acked_sequence)
                ck_assert_int_eq(peer_ack(p, p->to_ack), 0);
        reply = peer_reply(p, id);
        ck_assert_ptr_nonnull(reply);
        if (reply->body_case == BFCD__REPLY__BODY_REFUSAL)
                ck_abort_msg("refused: %s", reply->refusal->message);
        ck_assert_int_eq(reply->body_case, BFCD__REPLY__BODY_BLOCK);
        return reply->block;
}

uint64_t must_malloc(struct peer *p, uint32_t partition, uint64_t n_bytes)
{
        return must_malloc_block(p, partition, n_bytes)->block_id;
}

void must_free(struct peer *p, uint64_t block_id)
{
        ck_assert_int_eq(peer_error(p, peer_free_block(p, block_id)), 0);
        check();
}

void must_close(struct peer *p)
{
        peer_free(p);
        settle();
}

const char *refusal_of(struct peer *p, uint64_t id, int error)
{
        peer_settle(b);
        ck_assert_int_eq(peer_error(p, id), error);
        return peer_reply(p, id)->refusal->message;
}

const Bfcd__ListReply *list_page(struct peer *p, Bfcd__List__Kind kind, uint64_t cursor)
{
        Bfcd__List body = BFCD__LIST__INIT;
        Bfcd__Request request = REQUEST(LIST, list, &body);
        uint64_t id;

        body.kind = kind;
        body.cursor = cursor;
        ck_assert_int_eq(peer_send(p, &request, &id), 0);
        ck_assert_int_eq(peer_error(p, id), 0);
        return peer_reply(p, id)->list;
}

struct broker *open_large(struct config **ret_config)
{
        return peer_broker("devices: [{id: host, size: 400MiB, partitions: [{name: p, limit: 400MiB}]}]\n"
                           "tenants: [{name: t, match: {uid: 1}, quotas: [{partition: p}]}]\n",
                           ret_config);
}

static int log_fds[2], saved_stderr;

void log_catch(void)
{
        log_fds[0] = memfd_create("log", MFD_CLOEXEC);
        saved_stderr = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0);
        ck_assert_int_ge(log_fds[0], 0);
        ck_assert_int_eq(dup2(log_fds[0], STDERR_FILENO), STDERR_FILENO);
        log_open(LOG_LEVEL_INFO);
}

const char *log_caught(void)
{
        static char text[1 << 20];
        ssize_t n;

        dup2(saved_stderr, STDERR_FILENO);
        n = pread(log_fds[0], text, sizeof(text) - 1, 0);
        ck_assert_int_gt(n, 0);
        text[n] = '\0';
        close(log_fds[0]);
        close(saved_stderr);
        return text;
}
