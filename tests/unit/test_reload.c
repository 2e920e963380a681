/* Reloads under sessions that live: tenants and quotas come and go, limits change
 * under what is charged, and whatever cannot be kept changes nothing. No sockets.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/reload.h"
#include "daemon/session/recall.h"
#include "daemon/session/request.h"

#include <errno.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "tests/suite.h"
#include "tests/unit/sessions.h"
#include "tests/unit/still_clock.h"

/* Two partitions whose limits can be moved against each other. */
#define HEAD(a, b)                                                                                           \
        "devices:\n"                                                                                         \
        "  - id: host\n"                                                                                     \
        "    size: 128MiB\n"                                                                                 \
        "    partitions: [{name: a, limit: " a "MiB}, {name: b, limit: " b "MiB},"                           \
        " {name: pre, limit: 8MiB, growth: preallocate}]\n"                                                  \
        "tenants:\n"
#define TENANT(name, uid, quotas) "  - {name: " name ", match: {uid: " uid "}, quotas: [" quotas "]}\n"
#define RED(quotas)               TENANT("red", "1", quotas)
#define BLUE(quotas)              TENANT("blue", "2", quotas)

static const char first[] =
        HEAD("64", "32") RED("{partition: a, limit: 32MiB}, {partition: pre, limit: 4MiB}")
                BLUE("{partition: a, limit: 64MiB}");

static char *changes, *errors;

static void forget_words(void)
{
        free(changes);
        free(errors);
        changes = errors = NULL;
}

static void assert_sound(void)
{
        check();
        for (size_t i = 0; i < b->n_partitions; i++)
                ck_assert_uint_le(b->partitions[i].pool.charged_bytes, b->partitions[i].pool.committed_bytes);
}

static void setup(void)
{
        sessions_start(first);
}

static void teardown(void)
{
        assert_sound();
        forget_words();
        sessions_end();
}

FIXTURE(reload, setup, teardown);

static int reload_as(const char *text, bool dry_run)
{
        const struct config_machine machine = { .serves = true, .running = b->config };
        struct config *next = NULL;
        size_t n_changes, n_errors;
        FILE *to, *wrong;
        int r;

        forget_words();
        to = open_memstream(&changes, &n_changes);
        wrong = open_memstream(&errors, &n_errors);
        r = config_parse("next.yaml", text, strlen(text), &machine, wrong, &next);
        if (r == 0)
                r = reload_config(b, next, dry_run, to, wrong);
        if (r < 0 || dry_run)
                config_free(next);
        fclose(to);
        fclose(wrong);
        assert_sound();
        return r;
}

static void must_reload(const char *text)
{
        int r = reload_as(text, false);

        ck_assert_msg(r == 0, "%s", errors);
        ck_assert_str_eq(errors, "");
}

/* It fails with this sentence, and nothing is another than before. */
static void must_refuse(const char *text, const char *sentence)
{
        char *before = strdup(b->own.text);
        const struct config *config_before = b->config;

        ck_assert_int_eq(reload_as(text, false), -EINVAL);
        ck_assert_str_eq(errors, sentence);
        ck_assert_str_eq(b->own.text, before);
        ck_assert_ptr_eq(b->config, config_before);
        free(before);
}

static struct peer *come_in(uid_t uid, const char *partition)
{
        struct peer *p = peer_new(b, uid, false);

        ck_assert_int_eq(peer_error(p, peer_hello(p, "", partition)), 0);
        return p;
}

/* 0 and a block; or the error. */
static int try_malloc(struct peer *p, uint32_t partition, uint64_t n_bytes, uint64_t *ret_block)
{
        uint64_t id = peer_malloc(p, partition, n_bytes);

        peer_settle(b);
        if (peer_error(p, id) == 0 && ret_block)
                *ret_block = peer_reply(p, id)->block->block_id;
        return peer_error(p, id);
}

static int must_be_refused(uid_t uid, const char *tenant)
{
        struct peer *p = peer_new(b, uid, false);
        int error = peer_error(p, peer_hello(p, tenant, ""));

        peer_free(p);
        return error;
}

static struct quota *quota_of(const char *tenant, const char *partition)
{
        for (size_t i = 0; i < b->n_tenants; i++)
                for (size_t k = 0; strcmp(b->tenants[i].name, tenant) == 0 && k < b->tenants[i].n_quotas; k++)
                        if (strcmp(b->tenants[i].quotas[k]->partition->name, partition) == 0)
                                return b->tenants[i].quotas[k];
        return NULL;
}

/* ---- tenants that come and go --------------------------------------------- */

TEST(tenant_is_added)
{
        struct peer *p;

        ck_assert_int_eq(must_be_refused(3, ""), EACCES);
        must_reload(HEAD("64", "32") TENANT("green", "3", "{partition: b, limit: 4MiB, reserve: 2MiB}")
                            RED("{partition: a, limit: 32MiB}, {partition: pre, limit: 4MiB}")
                                    BLUE("{partition: a, limit: 64MiB}"));
        ck_assert_str_eq(changes, "tenant 'green' is new\n"
                                  "tenant 'green': new quota in partition 'b': limit 4MiB, reserve "
                                  "2MiB\n");
        ck_assert_uint_eq(b->partitions[1].pool.committed_bytes, 2 * MIB);
        p = come_in(3, "");
        ck_assert_int_eq(try_malloc(p, 0, 4 * MIB, NULL), 0);
        ck_assert_int_eq(try_malloc(p, 0, 1, NULL), EDQUOT);
        peer_free(p);
}

/* Existing sessions stay with all they have; no new ones are accepted. */
TEST(removed_tenant_ends_with_its_sessions)
{
        struct peer *p = come_in(1, "a"), *q = come_in(2, "");
        size_t n_before = b->n_tenants;
        uint64_t block = 0;

        ck_assert_int_eq(try_malloc(p, 0, 8 * MIB, &block), 0);
        must_reload(HEAD("64", "32") BLUE("{partition: a, limit: 64MiB}"));
        ck_assert_str_eq(changes,
                         "tenant 'red' is removed: it gets no new sessions; its existing sessions (1) "
                         "continue\n");
        ck_assert_int_eq(must_be_refused(1, ""), EACCES);
        ck_assert_int_eq(must_be_refused(2, "red"), EACCES);
        ck_assert_int_eq(try_malloc(p, 0, 20 * MIB, NULL), 0);
        ck_assert_int_eq(try_malloc(p, 0, 8 * MIB, NULL), EDQUOT); /* its limit as it was */
        ck_assert_int_eq(try_malloc(p, 1, 1, NULL), ENOENT);       /* it never came in there */
        ck_assert_int_eq(peer_error(p, peer_free_block(p, block)), 0);
        peer_settle(b);
        ck_assert_uint_eq(b->n_tenants, n_before);
        ck_assert_ptr_nonnull(quota_of("red", "pre")); /* somebody knows it; its memory went at once */
        ck_assert_uint_eq(b->partitions[2].pool.charged_bytes, 0);
        peer_free(p);
        peer_settle(b);
        ck_assert_ptr_null(quota_of("red", "a"));
        ck_assert_ptr_null(quota_of("red", "pre"));
        ck_assert_int_eq(try_malloc(q, 0, 64 * MIB, NULL), 0);
        peer_free(q);
}

TEST(removed_tenant_is_added_again)
{
        struct peer *p = come_in(2, "");
        uint64_t block;

        ck_assert_int_eq(try_malloc(p, 0, 8 * MIB, &block), 0);
        must_reload(HEAD("64", "32") RED("{partition: a, limit: 32MiB}"));
        must_reload(HEAD("64", "32") RED("{partition: a, limit: 32MiB}")
                            BLUE("{partition: a, limit: 10MiB, reserve: 4MiB}"));
        ck_assert_str_eq(changes, "tenant 'blue' is new\n"
                                  "tenant 'blue': its quota in partition 'a' is added again\n"
                                  "tenant 'blue' in partition 'a': limit is 10MiB, was 64MiB\n"
                                  "tenant 'blue' in partition 'a': reserve is 4MiB, was 0\n");
        ck_assert_int_eq(try_malloc(p, 0, 4 * MIB, NULL), EDQUOT);
        ck_assert_int_eq(must_be_refused(2, ""), 0);
        peer_settle(b);
        ck_assert_ptr_nonnull(quota_of("blue", "a"));
        peer_free(p);
}

/* A session keeps the list that its hello was answered with. */
TEST(quotas_are_added_and_removed)
{
        struct peer *before = come_in(1, "a"), *after;

        must_reload(HEAD("64", "32") RED("{partition: b, limit: 8MiB}") BLUE("{partition: a}"));
        ck_assert_str_eq(changes,
                         "tenant 'red': new quota in partition 'b': limit 8MiB, reserve 0\n"
                         "tenant 'red': its quota in partition 'a' is removed; its existing sessions "
                         "there (1) continue\n"
                         "tenant 'red': its quota in partition 'pre' is removed; its existing sessions "
                         "there (0) continue\n");
        after = come_in(1, "");
        ck_assert_uint_eq(peer_reply(after, 1)->hello->n_partitions, 1);
        ck_assert_str_eq(peer_reply(after, 1)->hello->partitions[0]->name, "b");
        ck_assert_int_eq(try_malloc(before, 0, 1 * MIB, NULL), 0);
        ck_assert_int_eq(try_malloc(before, 1, 1 * MIB, NULL), ENOENT);
        ck_assert_int_eq(try_malloc(before, 2, 1 * MIB, NULL), ENOENT);
        ck_assert_int_eq(try_malloc(after, 0, 1 * MIB, NULL), 0);
        ck_assert_int_eq(peer_error(after, peer_malloc(after, 1, 1)), ENOENT);
        must_reload(HEAD("64", "32") RED("{partition: a, limit: 8MiB}, {partition: b, limit: 8MiB}")
                            BLUE("{partition: a}"));
        ck_assert_int_eq(try_malloc(before, 0, 1 * MIB, NULL), 0);
        peer_free(before);
        peer_free(after);
        peer_settle(b);
        ck_assert_ptr_nonnull(quota_of("red", "a"));
        ck_assert_ptr_null(quota_of("red", "pre"));
}

TEST(matches_and_their_order)
{
        struct peer *p = come_in(1, "a"), *q;

        must_reload(HEAD("64", "32") TENANT("blue", "[1, 2]", "{partition: a}")
                            RED("{partition: a, limit: 32MiB}, {partition: pre, limit: 4MiB}"));
        ck_assert_str_eq(changes, "tenant 'blue': match is changed\n"
                                  "the order of the tenants is changed: a process becomes the first "
                                  "tenant that matches it\n");
        q = come_in(1, "a");
        ck_assert_str_eq(p->session->tenant->name, "red");
        ck_assert_str_eq(q->session->tenant->name, "blue");
        peer_free(p);
        peer_free(q);
}

/* The file lists the partitions in another order: each has the limit, and each quota is in the partition, of its name. */
TEST(partitions_in_another_order)
{
        struct peer *p;

        must_reload("devices:\n"
                    "  - id: host\n"
                    "    size: 128MiB\n"
                    "    partitions: [{name: pre, limit: 8MiB, growth: preallocate}, {name: b, limit: 40MiB},"
                    " {name: a, limit: 62MiB}]\n"
                    "tenants:\n" RED("{partition: pre, limit: 4MiB}, {partition: b, limit: 6MiB}, "
                                     "{partition: a, limit: 30MiB}") BLUE("{partition: a, limit: 60MiB}"));
        ck_assert_str_eq(changes, "partition 'a': limit is 62MiB, was 64MiB\n"
                                  "partition 'b': limit is 40MiB, was 32MiB\n"
                                  "tenant 'red': new quota in partition 'b': limit 6MiB, reserve 0\n"
                                  "tenant 'red' in partition 'a': limit is 30MiB, was 32MiB\n"
                                  "tenant 'blue' in partition 'a': limit is 60MiB, was 64MiB\n");
        ck_assert_str_eq(b->partitions[0].name, "a");
        ck_assert_uint_eq(b->partitions[0].pool.limit_bytes, 62 * MIB);
        ck_assert_uint_eq(b->partitions[1].pool.limit_bytes, 40 * MIB);
        ck_assert_uint_eq(b->partitions[2].pool.limit_bytes, 8 * MIB);
        p = come_in(1, "b");
        ck_assert_int_eq(try_malloc(p, 2, 8 * MIB, NULL), EDQUOT);
        ck_assert_int_eq(try_malloc(p, 2, 6 * MIB, NULL), 0);
        peer_free(p);
        must_reload(first);
        ck_assert_uint_eq(b->partitions[0].pool.limit_bytes, 64 * MIB);
}

TEST(the_default_tenant_changes)
{
        must_reload(HEAD("64", "32") RED("{partition: a}, {partition: pre, limit: 4MiB}") BLUE(
                "{partition: a, limit: 64MiB}") "default_tenant: blue\nmax_sessions: 7\ntimeouts: {reclaim: 5ms, quarantine: 6s}\n");
        ck_assert_str_eq(changes, "timeouts: reclaim is 5ms, was 200ms\n"
                                  "timeouts: quarantine is 6000ms, was 60000ms\n"
                                  "max_sessions is 7, was 4096\n"
                                  "default_tenant is blue, was none\n"
                                  "tenant 'red' in partition 'a': limit is 64MiB, was 32MiB\n");
        ck_assert_int_eq(must_be_refused(99, ""), 0);
        ck_assert_uint_eq(b->partitions[0].reclaim_timeout_ms, 5);
        must_reload(first);
        ck_assert_int_eq(must_be_refused(99, ""), EACCES);
}

/* ---- sessions -------------------------------------------------------------- */

#define WITH_SESSIONS(n, name, uid)                                                                          \
        "  - {name: " name ", match: {uid: " uid "}, quotas: [{partition: a, limit: 4MiB, max_sessions: " n  \
        "}]}\n"
#define RED_AS_BEFORE RED("{partition: a, limit: 32MiB}, {partition: pre, limit: 4MiB}")

/* A tenant that has more than its bound, or its share, keeps what it has. */
TEST(sessions_of_tenants_are_bounded_again)
{
        struct peer *red[3], *blue;

        must_reload(HEAD("64", "32") RED_AS_BEFORE WITH_SESSIONS("3", "blue", "2") "max_sessions: 4\n");
        ck_assert_ptr_nonnull(
                strstr(changes, "tenant 'blue' in partition 'a': max_sessions is 3, was 1024\n"));
        ck_assert_uint_eq(b->sessions.n_promised, 4);
        for (size_t i = 0; i < 2; i++)
                red[i] = come_in(1, "a");
        ck_assert_int_eq(must_be_refused(1, "red"), EDQUOT); /* two places are blue's */
        ck_assert_uint_eq(b->sessions.n_promised, 2);
        must_reload(HEAD("64", "32") RED_AS_BEFORE WITH_SESSIONS("1", "blue", "2") "max_sessions: 4\n");
        ck_assert_uint_eq(b->sessions.n_promised, 1);
        red[2] = come_in(1, "a");
        ck_assert_int_eq(must_be_refused(1, "red"), EDQUOT);
        blue = come_in(2, "");
        ck_assert_int_eq(must_be_refused(2, "blue"), EDQUOT);
        /* Red's share comes down to two, and its three sessions stay; green has a share at once. */
        must_reload(HEAD("64", "32") RED_AS_BEFORE WITH_SESSIONS("1", "blue", "2")
                            WITH_SESSIONS("9", "green", "3") "max_sessions: 6\n");
        ck_assert_int_eq(must_be_refused(1, "red"), EDQUOT);
        ck_assert_uint_eq(b->sessions.n_promised, 2);
        peer_free(blue);
        ck_assert_uint_eq(b->sessions.n_promised, 3);
        for (size_t i = 0; i < 3; i++)
                peer_free(red[i]);
        ck_assert_uint_eq(b->sessions.n_promised, 5);
}

static size_t count_matching(struct peer *p)
{
        return list_page(p, BFCD__LIST__KIND__WHOAMI, 0)->whoami->n_matching_tenants;
}

/* A hello after the reload is matched by the new config, and so is a list of the tenants that match. */
TEST(a_session_is_matched_again)
{
        struct peer *p = come_in(2, ""), *q = peer_new(b, 3, false);

        ck_assert_int_eq(peer_error(q, peer_hello(q, "", "")), EACCES);
        ck_assert_uint_eq(count_matching(p), 1);
        must_reload(HEAD("64", "32") TENANT("green", "[2, 3]", "{partition: b, limit: 4MiB}")
                            RED_AS_BEFORE BLUE("{partition: a, limit: 64MiB}"));
        ck_assert_int_eq(peer_error(q, peer_hello(q, "", "")), 0);
        ck_assert_str_eq(q->session->tenant->name, "green");
        ck_assert_uint_eq(count_matching(p), 2);
        peer_free(p);
        peer_free(q);
}

/* ---- limits ---------------------------------------------------------------- */

TEST(limit_below_usage)
{
        struct peer *p = come_in(2, "");
        uint64_t blocks[4];

        for (size_t i = 0; i < 4; i++)
                ck_assert_int_eq(try_malloc(p, 0, 8 * MIB, &blocks[i]), 0);
        must_reload(HEAD("64", "32") RED("{partition: a, limit: 32MiB}, {partition: pre, limit: 4MiB}")
                            BLUE("{partition: a, limit: 16MiB, max_blocks: 2, max_sessions: 1}"));
        ck_assert_str_eq(changes, "tenant 'blue' in partition 'a': limit is 16MiB, was 64MiB; it has "
                                  "32MiB reserved, 16MiB above the limit, and gets no more until it is "
                                  "below\n"
                                  "tenant 'blue' in partition 'a': max_sessions is 1, was 1024\n"
                                  "tenant 'blue' in partition 'a': max_blocks is 2, was 100000; it has "
                                  "4, 2 above the limit, and gets no more until it is below\n");
        ck_assert_int_eq(try_malloc(p, 0, 1, NULL), EDQUOT);
        ck_assert_int_eq(must_be_refused(2, ""), EDQUOT);
        peer_free_block(p, blocks[0]);
        peer_free_block(p, blocks[1]);
        ck_assert_int_eq(try_malloc(p, 0, 1, NULL), EDQUOT);
        peer_free_block(p, blocks[2]);
        ck_assert_int_eq(try_malloc(p, 0, 8 * MIB, NULL), 0);
        ck_assert_int_eq(try_malloc(p, 0, 1, NULL), EDQUOT);
        peer_free(p);
}

/* Idle extents above the limit are released without a request. */
TEST(idle_extents_above_the_limit_are_released)
{
        struct peer *p = come_in(2, "");
        uint64_t block = 0;

        ck_assert_int_eq(try_malloc(p, 0, 32 * MIB, &block), 0);
        peer_free_block(p, block);
        ck_assert_uint_eq(b->partitions[0].pool.charged_bytes, 32 * MIB);
        must_reload(HEAD("64", "32") RED("{partition: a, limit: 32MiB}, {partition: pre, limit: 4MiB}")
                            BLUE("{partition: a, limit: 16MiB}"));
        peer_settle(b);
        ck_assert_uint_le(b->partitions[0].pool.charged_bytes, 16 * MIB);
        must_reload(HEAD("8", "32") RED("{partition: a, limit: 8MiB}, {partition: pre, limit: 4MiB}")
                            BLUE("{partition: a, limit: 8MiB}"));
        peer_settle(b);
        ck_assert_uint_le(b->partitions[0].pool.charged_bytes, 8 * MIB);
        peer_free(p);
}

TEST(a_limit_that_is_raised)
{
        struct peer *p = come_in(1, "a");
        uint64_t block;

        ck_assert_int_eq(try_malloc(p, 0, 32 * MIB, &block), 0);
        ck_assert_int_eq(try_malloc(p, 0, 1, NULL), EDQUOT);
        must_reload(HEAD("80", "32") RED("{partition: a, limit: 80MiB}, {partition: pre, limit: 4MiB}")
                            BLUE("{partition: a, limit: 64MiB}"));
        ck_assert_int_eq(try_malloc(p, 0, 48 * MIB, NULL), 0);
        ck_assert_int_eq(try_malloc(p, 0, 1, NULL), EDQUOT);
        peer_free(p);
        /* A block larger than all the address space that there was. */
        p = come_in(1, "a");
        ck_assert_int_eq(try_malloc(p, 0, 80 * MIB, NULL), 0);
        peer_free(p);
}

TEST(partition_limit_below_usage)
{
        struct peer *p = come_in(2, ""), *q;

        must_reload(HEAD("64", "32")
                            RED("{partition: a, limit: 32MiB, reserve: 8MiB}, {partition: pre, limit: 4MiB}")
                                    BLUE("{partition: a, limit: 64MiB}"));
        ck_assert_int_eq(try_malloc(p, 0, 40 * MIB, NULL), 0);
        must_reload(HEAD("16", "32")
                            RED("{partition: a, limit: 16MiB, reserve: 8MiB}, {partition: pre, limit: 4MiB}")
                                    BLUE("{partition: a, limit: 16MiB}"));
        q = come_in(1, "a");
        ck_assert_int_eq(try_malloc(q, 0, 8 * MIB, NULL), 0); /* guaranteed */
        ck_assert_int_eq(try_malloc(q, 0, 1, NULL), ENOMEM);
        peer_free(p);
        peer_settle(b);
        ck_assert_int_eq(try_malloc(q, 0, 8 * MIB, NULL), 0);
        ck_assert_int_eq(try_malloc(q, 0, 1, NULL), EDQUOT);
        peer_free(q);
}

TEST(a_limit_below_its_extents)
{
        struct peer *p;

        must_reload(HEAD("64", "32") RED("{partition: a, limit: 2MiB}, {partition: pre, limit: 4MiB}")
                            BLUE("{partition: a, limit: 64MiB}"));
        p = come_in(1, "a");
        ck_assert_int_eq(try_malloc(p, 0, 2 * MIB, NULL), 0);
        ck_assert_int_eq(try_malloc(p, 0, 1, NULL), EDQUOT);
        peer_free(p);
}

/* ---- what is refused -------------------------------------------------------- */

TEST(reserve_that_other_tenants_use)
{
        struct peer *p = come_in(2, "");

        ck_assert_int_eq(try_malloc(p, 0, 60 * MIB, NULL), 0);
        must_refuse(HEAD("64", "32")
                            RED("{partition: a, limit: 32MiB, reserve: 6MiB}, {partition: pre, limit: 4MiB}")
                                    BLUE("{partition: a, limit: 64MiB}"),
                    "partition 'a': guaranteed memory and memory reserved beyond it would total 66MiB, "
                    "above the limit 64MiB: lower the guarantees, or release 2MiB first\n");
        must_refuse(HEAD("64", "32") RED("{partition: a, limit: 32MiB}, {partition: pre, limit: 4MiB}")
                            BLUE("{partition: a, limit: 64MiB}")
                                    TENANT("green", "3", "{partition: a, reserve: 8MiB}"),
                    "partition 'a': guaranteed memory and memory reserved beyond it would total 68MiB, "
                    "above the limit 64MiB: lower the guarantees, or release 4MiB first\n");
        ck_assert_uint_eq(b->n_tenants, 2);
        must_reload(HEAD("64", "32")
                            RED("{partition: a, limit: 32MiB, reserve: 4MiB}, {partition: pre, limit: 4MiB}")
                                    BLUE("{partition: a, limit: 64MiB}"));
        peer_free(p);
}

/* What one partition still holds is not another's yet. */
TEST(partitions_do_not_take_from_each_other)
{
        struct peer *p = come_in(2, "");

        ck_assert_int_eq(try_malloc(p, 0, 64 * MIB, NULL), 0);
        must_refuse(HEAD("16", "80") RED("{partition: a, limit: 16MiB}, {partition: pre, limit: 4MiB}")
                            BLUE("{partition: a, limit: 16MiB}"),
                    "device 'host': the limits of its partitions and memory reserved beyond them would "
                    "total 152MiB, and the device has 128MiB: release 24MiB first\n");
        must_reload(HEAD("16", "56") RED("{partition: a, limit: 16MiB}, {partition: pre, limit: 4MiB}")
                            BLUE("{partition: a, limit: 16MiB}"));
        must_refuse(HEAD("16", "80") RED("{partition: a, limit: 16MiB}, {partition: pre, limit: 4MiB}")
                            BLUE("{partition: a, limit: 16MiB}"),
                    "device 'host': the limits of its partitions and memory reserved beyond them would "
                    "total 152MiB, and the device has 128MiB: release 24MiB first\n");
        peer_free(p);
        peer_settle(b);
        must_reload(HEAD("16", "80") RED("{partition: a, limit: 16MiB}, {partition: pre, limit: 4MiB}")
                            BLUE("{partition: a, limit: 16MiB}"));
}

TEST(preallocated_quotas_cannot_change)
{
        must_refuse(HEAD("64", "32") RED("{partition: a, limit: 32MiB}, {partition: pre, limit: 6MiB}")
                            BLUE("{partition: pre, limit: 2MiB}"),
                    "tenant 'red': its limit in partition 'pre', 4MiB, cannot change while bfcd runs, "
                    "because the partition preallocates: restart bfcd\n"
                    "tenant 'blue' cannot be added to partition 'pre' while bfcd runs, because the "
                    "partition preallocates: restart bfcd\n");
}

#define RESTART "cannot change while bfcd runs: restart bfcd\n"

/* Each with its place, and all of them at once. */
TEST(settings_that_need_a_restart)
{
        must_refuse("socket: {path: /tmp/other, mode: \"0600\"}\n"
                    "devices:\n"
                    "  - id: host\n"
                    "    size: 64MiB\n"
                    "    partitions: [{name: a, limit: 16MiB, growth: preallocate}, {name: c, limit: 2MiB}]\n"
                    "  - {id: 'cuda:0', partitions: [{name: b, limit: 2MiB}]}\n"
                    "tenants:\n" RED("{partition: a, limit: 2MiB}"),
                    "next.yaml:1:16: the path of socket, '/run/bfcd/client/bfcd.sock', " RESTART
                    "next.yaml:1:34: the mode of socket, \"0666\", " RESTART
                    "next.yaml:4:11: the size of device 'host', 128MiB, " RESTART
                    "next.yaml:6:10: device 'cuda:0' is new: devices " RESTART
                    "next.yaml:5:50: the growth of partition 'a', on-demand, " RESTART
                    "next.yaml:5:64: partition 'c' is new: partitions " RESTART
                    "next.yaml:6:33: the device of partition 'b', 'host', " RESTART
                    "next.yaml:3:3: partition 'pre' is missing: partitions " RESTART);
}

TEST(records_need_a_restart)
{
        must_refuse("records: {file: /r}\n" HEAD("64", "32") RED("{partition: a, limit: 32MiB}"),
                    "next.yaml:1:17: the file of records, none, " RESTART);
}

/* No tenant can take all holds of shared blocks, also after max_sessions was raised. */
TEST(new_limits_apply_to_all_sessions)
{
        struct broker *small_broker = b;
        struct config *small_config = config, *own;

        b = peer_broker(HEAD("64", "32") RED("{partition: a, limit: 32MiB}") "max_sessions: 16\n", &config);
        own = config;
        must_reload(HEAD("64", "32") RED("{partition: a, limit: 32MiB}") "max_sessions: 1000\n");
        ck_assert_uint_ge(broker_room(b).n_refs, UINT64_C(1000) * CAPACITY_REFS);
        must_refuse(HEAD("64", "32") RED("{partition: a, limit: 32MiB}") "max_sessions: 65536\n",
                    "the daemon's tables are too small: 65536 sessions may have 67108864 shared blocks "
                    "(room for 1081344): lower max_sessions to 1056, or restart bfcd\n");
        b = peer_broker_free(b, own);
        b = small_broker;
        config = small_config;
}

TEST(invalid_file_changes_nothing)
{
        must_refuse(
                "devices: [\n",
                "next.yaml:2:1: not YAML: did not find expected node content while parsing a flow node\n");
        must_refuse(HEAD("64", "32") RED("{partition: a, limit: 65MiB}"),
                    "next.yaml:6:65: limit 65MiB is not a multiple of 2MiB; write 64MiB or 66MiB\n");
}

TEST(a_dry_run)
{
        char *before = strdup(b->own.text);

        ck_assert_int_eq(reload_as(HEAD("16", "32") TENANT("green", "3", "{partition: a}"), true), 0);
        ck_assert_str_eq(changes,
                         "partition 'a': limit is 16MiB, was 64MiB\n"
                         "tenant 'green' is new\n"
                         "tenant 'green': new quota in partition 'a': limit 16MiB, reserve 0\n"
                         "tenant 'blue' is removed: it gets no new sessions; its existing sessions (0) "
                         "continue\n"
                         "tenant 'red' is removed: it gets no new sessions; its existing sessions (0) "
                         "continue\n");
        ck_assert_str_eq(b->own.text, before);
        ck_assert_uint_eq(b->n_tenants, 2);
        ck_assert_int_eq(must_be_refused(1, "red"), 0);
        ck_assert_int_eq(must_be_refused(3, "green"), EACCES);
        free(before);
}

/* ---- what sessions are told -------------------------------------------------- */

TEST(quota_changed_events)
{
        struct peer *p = peer_new(b, 1, false), *old = peer_new(b, 1, false), *q = peer_new(b, 2, false);

        p->wants_events = q->wants_events = true;
        ck_assert_int_eq(peer_error(p, peer_hello(p, "", "a")), 0);
        ck_assert_int_eq(peer_error(old, peer_hello(old, "", "a")), 0); /* MUST()s that it hears nothing */
        ck_assert_int_eq(peer_error(q, peer_hello(q, "", "a")), 0);
        must_reload(HEAD("64", "32")
                            RED("{partition: a, limit: 20MiB, reserve: 2MiB}, {partition: pre, limit: 4MiB}")
                                    BLUE("{partition: a, limit: 64MiB}"));
        ck_assert_uint_eq(p->n_limits_told, 1);
        ck_assert_uint_eq(p->limits_told[0], 20 * MIB);
        ck_assert_uint_eq(q->n_limits_told, 0);
        must_reload(b->own.text);
        ck_assert_str_eq(changes, "");
        ck_assert_uint_eq(p->n_limits_told, 1);
        peer_free(p);
        peer_free(old);
        peer_free(q);
}

static unsigned n_wanted;
static uint64_t bytes_wanted;

static void on_excess(struct broker *from, struct quota *q, uint64_t n_bytes)
{
        ck_assert_ptr_eq(from, b);
        ck_assert_str_eq(q->tenant, "blue");
        n_wanted++;
        bytes_wanted = n_bytes;
}

TEST(usage_above_a_limit_is_trimmed)
{
        static struct upcalls upcalls;
        struct peer *p = come_in(2, "");

        n_wanted = 0;
        upcalls = *b->options.upcalls;
        upcalls.trim_excess = on_excess;
        b->options.upcalls = &upcalls;
        ck_assert_int_eq(try_malloc(p, 0, 40 * MIB, NULL), 0);
        must_reload(HEAD("64", "32") RED("{partition: a, limit: 16MiB}, {partition: pre, limit: 4MiB}")
                            BLUE("{partition: a, limit: 16MiB}"));
        ck_assert_uint_eq(n_wanted, 1);
        ck_assert_uint_eq(bytes_wanted, 24 * MIB);
        must_reload(HEAD("30", "32") RED("{partition: a, limit: 16MiB}, {partition: pre, limit: 4MiB}")
                            BLUE("{partition: a, limit: 30MiB}"));
        ck_assert_uint_eq(n_wanted, 2);
        ck_assert_uint_eq(bytes_wanted, 10 * MIB);
        peer_free(p);
}

/* ---- operators -------------------------------------------------------------- */

static char path[] = "/tmp/bfcd-reload-XXXXXX";

static void write_file(const char *text)
{
        FILE *f = fopen(path, "w");

        ck_assert_ptr_nonnull(f);
        fputs(text, f);
        fclose(f);
}

static uint64_t ask(struct peer *p, bool dry_run)
{
        Bfcd__Reload reload = BFCD__RELOAD__INIT;
        Bfcd__Request r = REQUEST(RELOAD, reload, &reload);

        reload.dry_run = dry_run;
        return peer_post(p, &r);
}

static const Bfcd__ReloadReply *asked(struct peer *p, bool dry_run)
{
        const Bfcd__Reply *reply = peer_reply(p, ask(p, dry_run));

        ck_assert(reply && reply->body_case == BFCD__REPLY__BODY_RELOAD);
        return reply->reload;
}

static int n_readings;

static void count_reading(void *userdata)
{
        ck_assert_ptr_eq(userdata, &n_readings);
        n_readings++;
}

TEST(reload_command)
{
        struct peer *admin = open_admin_session(), *p = come_in(1, "");
        const Bfcd__ReloadReply *reply;
        struct reloads *reloads;
        char expected[256];

        close(mkstemp(path));
        ck_assert_int_eq(peer_error(admin, ask(admin, false)), EINVAL); /* no file */
        reloads = reloads_new(b, path, NULL, NULL);
        ck_assert_int_eq(peer_error(p, ask(p, false)), EACCES);
        write_file(HEAD("64", "32") BLUE("{partition: a, limit: 16MiB}"));
        ck_assert_uint_eq(asked(admin, true)->n_changes, 2);
        reply = asked(admin, false);
        ck_assert_uint_eq(reply->n_changes, 2);
        ck_assert_uint_eq(reply->n_errors, 0);
        ck_assert_str_eq(reply->changes[0], "tenant 'blue' in partition 'a': limit is 16MiB, was 64MiB");
        write_file("devices: 1\n");
        reply = asked(admin, false);
        ck_assert_uint_eq(reply->n_changes, 0);
        ck_assert_uint_eq(reply->n_errors, 2);
        snprintf(expected, sizeof(expected), "%s:1:10: devices must be a list, this is a single value", path);
        ck_assert_str_eq(reply->errors[0], expected);
        unlink(path);
        reply = asked(admin, false);
        ck_assert_uint_eq(reply->n_errors, 1);
        reloads_free(reloads);
        peer_free(admin);
        peer_free(p);
}

/* With a thread of the server's: in order, one at a time; an operator that
 * disconnects is not answered, and its reload is carried out only if it was begun. */
TEST(reloads_take_turns)
{
        struct peer *admins[3];
        struct reloads *reloads = reloads_new(b, path, count_reading, &n_readings);
        uint64_t id, first_id;

        n_readings = 0;
        close(mkstemp(path));
        write_file(HEAD("64", "32") BLUE("{partition: a, limit: 16MiB}"));
        for (size_t i = 0; i < 3; i++) {
                admins[i] = open_admin_session();
        }
        first_id = ask(admins[0], false);
        ck_assert_int_eq(peer_error(admins[0], ask(admins[0], false)), EBUSY);
        ask(admins[1], false);
        id = ask(admins[2], false);
        ck_assert_int_eq(n_readings, 1);
        admins[0] = peer_free(admins[0]);
        admins[1] = peer_free(admins[1]);
        (void)first_id;
        reload_read(reloads);
        reload_finish(reloads);
        ck_assert_uint_eq(b->selection.n, 1);
        ck_assert_int_eq(n_readings, 2);
        ck_assert_int_eq(peer_error(admins[2], id), -1);
        reload_read(reloads);
        reload_finish(reloads);
        ck_assert_uint_eq(peer_reply(admins[2], id)->reload->n_changes, 0);
        ck_assert_int_eq(n_readings, 2);
        reloads_free(reloads);
        peer_free(admins[2]);
        unlink(path);
}

/* ---- a random walk ----------------------------------------------------------- */

#define WALK_TENANTS 6u
#define WALK_PEERS   24u
#define WALK_BLOCKS  512u

struct walker {
        struct peer *peer;
        size_t n_read; /* of its replies */
        uint64_t blocks[WALK_BLOCKS];
        size_t n_blocks;
};

static unsigned seed;

static unsigned pick(unsigned n)
{
        return (unsigned)rand_r(&seed) % n;
}

/* Mostly sound, and now and then too much for its partition. */
static void walk_config(char *buf, size_t n_buf)
{
        unsigned limits[2] = { 2 * (8 + pick(25)), 2 * (8 + pick(25)) };
        int n = snprintf(buf, n_buf,
                         "devices: [{id: host, size: 128MiB, partitions: [{name: a, limit: %uMiB},"
                         "{name: b, limit: %uMiB}]}]\ntimeouts: {reclaim: %ums}\nmax_sessions: %u\ntenants:\n"
                         "  - {name: always, match: {uid: 99}, quotas: [{partition: a}]}\n",
                         limits[0], limits[1], 1 + pick(3), 15 + pick(30));

        for (unsigned t = 0; t < WALK_TENANTS; t++) {
                unsigned which = pick(5); /* none, a, b, both */

                if (which == 0)
                        continue;
                n += snprintf(buf + n, n_buf - (size_t)n, "  - {name: t%u, match: {uid: %u}, quotas: [", t,
                              t);
                for (unsigned p = 0; p < 2; p++) {
                        unsigned limit = 2 * (1 + pick(limits[p] / 2)), reserve = 2 * pick(4);

                        if (which < 3 && which != p + 1)
                                continue;
                        n += snprintf(
                                buf + n, n_buf - (size_t)n,
                                "{partition: %c, limit: %uMiB, reserve: %uMiB, max_sessions: %u, max_blocks: "
                                "%u},",
                                'a' + (char)p, limit, reserve < limit ? reserve : limit, 1 + pick(6),
                                1 + pick(40));
                }
                n += snprintf(buf + n, n_buf - (size_t)n, "]}\n");
        }
}

static void walker_read(struct walker *w)
{
        for (; w->n_read < w->peer->n_replies; w->n_read++) {
                const Bfcd__Reply *reply = w->peer->replies[w->n_read];

                if (reply->body_case == BFCD__REPLY__BODY_BLOCK && w->n_blocks < WALK_BLOCKS)
                        w->blocks[w->n_blocks++] = reply->block->block_id;
        }
        if (w->n_read > PEER_MAX_REPLIES / 2) {
                peer_forget_replies(w->peer);
                w->n_read = 0;
        }
}

static void walker_step(struct walker *w)
{
        if (!w->peer) {
                w->peer = peer_new(b, pick(WALK_TENANTS), false);
                w->peer->wants_events = pick(2);
                w->n_blocks = w->n_read = 0;
                if (peer_error(w->peer, peer_hello(w->peer, "", "")) != 0)
                        w->peer = peer_free(w->peer);
                return;
        }
        walker_read(w);
        if (pick(3) == 0)
                peer_retired_all(w->peer);
        if (w->peer->aborted || pick(25) == 0) {
                w->peer = peer_free(w->peer);
        } else if (w->n_blocks > 0 && pick(2) == 0) {
                size_t i = pick((unsigned)w->n_blocks);

                ck_assert_int_eq(peer_error(w->peer, peer_free_block(w->peer, w->blocks[i])), 0);
                w->blocks[i] = w->blocks[--w->n_blocks];
        } else if (w->peer->session->requests.n < SESSION_MAX_PENDING) {
                peer_malloc(w->peer, pick(3), 1 + pick(pick(4) == 0 ? 16u << 20 : 1u << 20));
        }
}

/* What is charged is what the accounts say; a removed quota has no new sessions. */
static void walk_check(void)
{
        ck_assert_uint_eq(b->selection.n, b->config->n_tenants);
        for (size_t i = 0; i < b->selection.n; i++) {
                ck_assert_str_eq(b->selection.order[i]->name, b->config->tenants[i].name);
                ck_assert_ptr_eq(b->selection.order[i]->config, &b->config->tenants[i]);
        }
        for (size_t i = 0; i < b->n_tenants; i++)
                for (size_t k = 0; k < b->tenants[i].n_quotas; k++) {
                        const struct quota *q = b->tenants[i].quotas[k];

                        ck_assert_uint_le(q->sessions.n, q->sessions.n_told);
                        ck_assert_uint_le(q->account.charged_bytes, q->account.committed_bytes);
                        ck_assert(!q->is_removed || q->account.reserve_bytes == 0);
                }
        assert_sound();
}

static const char walk_end[] = "devices: [{id: host, size: 128MiB, partitions: [{name: a, limit: 64MiB},"
                               "{name: b, limit: 64MiB}]}]\n"
                               "tenants: [{name: always, match: {uid: 99}, quotas: [{partition: a}]}]\n";

/* On every second device extents are retired before they go. */
LOOP_TEST(a_random_walk, 4)
{
        struct walker walkers[WALK_PEERS] = { 0 };
        unsigned n_done = 0, n_refused = 0;
        static char text[8192];

        b = peer_broker_free(b, config);
        seed = 20260101u + (unsigned)_i;
        printf("# seed %u\n", seed);
        walk_config(text, sizeof(text));
        b = (_i % 2 ? peer_broker_sticky : peer_broker)(walk_end, &config);
        for (unsigned step = 0, n = suite_steps(15000); step < n; step++) {
                if (pick(12) == 0) {
                        bool dry = pick(8) == 0;

                        walk_config(text, sizeof(text));
                        *(reload_as(text, dry) == 0 ? &n_done : &n_refused) += 1;
                        walk_check();
                }
                walker_step(&walkers[pick(WALK_PEERS)]);
                if (pick(2))
                        broker_turn(b);
                if (pick(2))
                        broker_poll(b);
                if (pick(40) == 0) {
                        broker_tick(b);
                        recall_tick(b, clock_ms());
                }
        }
        printf("# %u reloads, %u refused\n", n_done, n_refused);
        ck_assert_uint_gt(n_done, suite_steps(300));
        ck_assert_uint_gt(n_refused, 20);
        for (size_t i = 0; i < WALK_PEERS; i++)
                peer_free(walkers[i].peer);
        peer_settle(b);
        must_reload(walk_end);
        peer_settle(b);
        ck_assert_uint_eq(b->n_tenants, 1 + (b->tenants[0].name[0] == '\0'));
}

/* ---- memory ------------------------------------------------------------------ */

/* `first` cannot be loaded again: its preallocated quota was removed. */
TEST(many_reloads_leak_nothing)
{
        size_t growth = SIZE_MAX;

        must_reload(HEAD("64", "32") RED("{partition: a, limit: 32MiB}")
                            BLUE("{partition: a, limit: 64MiB}"));
        peer_settle(b);
        /* A list may grow once for the longest queue so far, which depends on the machine's load. A leak
         * grows in each round: one object of each reload is 16,000 bytes and more. */
        for (unsigned i = 0; i < 6 && growth > 4096; i++) {
                size_t before = mallinfo2().uordblks, after;

                for (unsigned k = 0; k < 500; k++) {
                        must_reload(k % 2 ? HEAD("64", "32") RED("{partition: a, limit: 32MiB}")
                                                    BLUE("{partition: a, limit: 64MiB}")
                                          : HEAD("48", "48")
                                                    TENANT("green", "3", "{partition: b, reserve: 2MiB}")
                                                            BLUE("{partition: a, limit: 8MiB}"));
                        peer_settle(b);
                }
                forget_words();
                after = mallinfo2().uordblks;
                growth = after > before ? after - before : 0;
        }
        ck_assert_uint_le(growth, 4096);
}

/* The malloc caches of threads would count as in use, and it depends on objects' sizes. */
static void begin_without_caches(char **argv)
{
        if (getenv("GLIBC_TUNABLES"))
                return;
        setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0", 1);
        execv("/proc/self/exe", argv);
}

int main(int argc, char **argv)
{
        (void)argc;
        begin_without_caches(argv);
        return suite_main("reload");
}
