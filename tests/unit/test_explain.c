/* Which sessions have the memory: the texts of refusals, the report and its pages,
 * tags, the times of peaks, and what it costs.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/explain.h"
#include "daemon/session/share.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "daemon/base/clock.h"
#include "proto/pages.h"
#include "tests/random.h"
#include "tests/suite.h"
#include "tests/unit/sessions.h"
#include "tests/unit/still_clock.h"

static const char config_text[] = "devices:\n"
                                  "  - id: host\n"
                                  "    size: 128MiB\n"
                                  "    partitions:\n"
                                  "      - {name: train, limit: 64MiB}\n"
                                  "      - {name: serve, limit: 8MiB}\n"
                                  "tenants:\n"
                                  "  - name: red\n"
                                  "    match: {uid: 1}\n"
                                  "    quotas:\n"
                                  "      - {partition: train, limit: 48MiB, max_blocks: 1000}\n"
                                  "      - {partition: serve, limit: 8MiB, max_blocks: 4}\n"
                                  "  - name: blue\n"
                                  "    match: {uid: 2}\n"
                                  "    quotas:\n"
                                  "      - {partition: train, limit: 48MiB}\n";

enum { TRAIN, SERVE }; /* red's */

static void setup(void)
{
        sessions_start(config_text);
}

FIXTURE(explain, setup, sessions_end);

static struct peer *open_named(uid_t uid, const char *name)
{
        struct peer *p = open_session(uid);

        snprintf(p->session->name, sizeof(p->session->name), "%.63s", name);
        return p;
}

static uint64_t must_malloc_tag(struct peer *p, uint32_t partition, uint64_t n_bytes, const char *tag)
{
        uint64_t id = peer_malloc_tag(p, partition, n_bytes, tag);
        const Bfcd__Reply *reply;

        peer_settle(b);
        reply = peer_reply(p, id);
        ck_assert_ptr_nonnull(reply);
        ck_assert_int_eq(reply->body_case, BFCD__REPLY__BODY_BLOCK);
        return reply->block->block_id;
}

static struct quota *quota_of(const struct peer *p, uint32_t partition)
{
        return p->session->shares[partition].quota;
}

static void must_say(const char *sentence, const char *words)
{
        ck_assert_msg(strstr(sentence, words), "no \"%s\" in \"%s\"", words, sentence);
}

static void must_not_say(const char *sentence, const char *words)
{
        ck_assert_msg(!strstr(sentence, words), "\"%s\" in \"%s\"", words, sentence);
}

/* ---- refusals --------------------------------------------------------------- */

TEST(over_quota_refusal_names_sessions)
{
        struct peer *peers[5];
        char words[128];
        const char *sentence;

        for (unsigned i = 0; i < 5; i++) {
                snprintf(words, sizeof(words), "job-%u", i);
                peers[i] = open_named(1, words);
                must_malloc(peers[i], TRAIN, (i + 1) * MIB);
        }
        must_malloc(peers[4], TRAIN, 1);
        sentence = refusal_of(peers[0], peer_malloc(peers[0], TRAIN, 40 * MIB), EDQUOT);
        snprintf(words, sizeof(words),
                 "largest sessions: session %" PRIu64 " (pid %d, job-4): 5.0 MiB in 2 blocks, session",
                 peers[4]->session->id, (int)peers[4]->session->who.pid);
        must_say(sentence, words);
        must_say(sentence, "job-3): 4.0 MiB in 1 block, ");
        must_say(sentence, "job-2): 3.0 MiB in 1 block, 2 others: 3.0 MiB");
        must_not_say(sentence, "job-1");
        must_not_say(sentence, "other tenants");
        check();
        for (unsigned i = 0; i < 5; i++)
                peer_free(peers[i]);
}

/* A tenant is told the sum of other tenants; the log names their sessions. */
TEST(out_of_memory_refusal_hides_other_tenants)
{
        struct peer *red = open_named(1, "mine"), *blue = open_named(2, "theirs"),
                    *other = open_named(2, "idle");
        char line[1024] = "refused";
        const char *sentence;

        must_malloc(blue, 0, 40 * MIB);
        must_malloc(red, TRAIN, 2 * MIB);
        sentence = refusal_of(red, peer_malloc(red, TRAIN, 30 * MIB), ENOMEM);
        must_say(sentence, "; largest sessions: session");
        must_say(sentence, "mine): 2.0 MiB in 1 block; other tenants have 40.0 MiB reserved");
        must_not_say(sentence, "theirs");
        must_not_say(sentence, "blue");
        explain_to_log(quota_of(red, TRAIN), -ENOMEM, line, sizeof(line));
        must_say(line, "refused; largest sessions: session");
        must_say(line, "(tenant 'blue', pid");
        must_say(line, "theirs): 40.0 MiB in 1 block, session");
        must_say(line, "mine): 2.0 MiB in 1 block");
        must_not_say(line, "idle");
        peer_free(red);
        peer_free(blue);
        peer_free(other);
}

TEST(refusal_where_the_tenant_has_no_block)
{
        struct peer *red = open_named(1, "mine"), *blue = open_named(2, "theirs");
        const char *sentence;

        must_malloc(blue, 0, 40 * MIB);
        sentence = refusal_of(red, peer_malloc(red, TRAIN, 30 * MIB), ENOMEM);
        must_say(sentence, "; none of its sessions has a block; other tenants have 40.0 MiB reserved");
        peer_free(red);
        peer_free(blue);
}

/* A refusal by max_blocks names the sessions with the most blocks. */
TEST(max_blocks_refusal_ranks_by_blocks)
{
        struct peer *large = open_named(1, "large"), *many = open_named(1, "many");
        const char *sentence;

        must_malloc(large, SERVE, 4 * MIB);
        for (unsigned i = 0; i < 3; i++)
                must_malloc(many, SERVE, 256);
        sentence = refusal_of(large, peer_malloc(large, SERVE, 256), EDQUOT);
        must_say(sentence, "max_blocks is 4; largest sessions: session");
        must_say(sentence, "many): 768 B in 3 blocks, session");
        peer_free(large);
        peer_free(many);
}

/* The ranking after frees is updated at intervals; the numbers are always current, and ended
 * sessions are not named. */
TEST(refusal_has_current_session_names)
{
        struct peer *first = open_named(1, "first"), *second = open_named(1, "second"),
                    *third = open_named(1, "third"), *fourth = open_named(1, "fourth");
        uint64_t id = must_malloc(first, TRAIN, 4 * MIB);
        char sentence[1024] = "";

        must_malloc(second, TRAIN, 2 * MIB);
        must_malloc(third, TRAIN, 1 * MIB);
        explain_to_tenant(quota_of(first, TRAIN), -EDQUOT, sentence, sizeof(sentence));
        must_say(sentence, "largest sessions: session");
        must_say(sentence, "first): 4.0 MiB in 1 block, session");
        must_free(first, id);
        must_malloc(first, TRAIN, 256);
        sentence[0] = '\0';
        explain_to_tenant(quota_of(first, TRAIN), -EDQUOT, sentence, sizeof(sentence));
        must_say(sentence, "second): 2.0 MiB in 1 block, session");
        must_say(sentence, "third): 1.0 MiB in 1 block, session");
        must_say(sentence, "first): 256 B in 1 block");
        must_malloc(fourth, TRAIN, 3 * MIB); /* growth is ranked at once */
        sentence[0] = '\0';
        explain_to_tenant(quota_of(first, TRAIN), -EDQUOT, sentence, sizeof(sentence));
        must_say(sentence, "largest sessions: session");
        must_say(sentence, "fourth): 3.0 MiB in 1 block, session");
        peer_free(second);
        peer_settle(b);
        check();
        sentence[0] = '\0';
        explain_to_tenant(quota_of(first, TRAIN), -EDQUOT, sentence, sizeof(sentence));
        must_not_say(sentence, "second");
        peer_free(fourth);
        peer_settle(b);
        still_clock_pass(30); /* until it may look again */
        sentence[0] = '\0';
        explain_to_tenant(quota_of(first, TRAIN), -EDQUOT, sentence, sizeof(sentence));
        must_not_say(sentence, "second");
        must_say(sentence, "largest sessions: session");
        peer_free(third);
        peer_free(first);
}

/* The longest names fit, and where a buffer is short it ends well. */
TEST(long_names_fit)
{
        char name[64], sentence[1024], shorter[20];
        struct peer *peers[3];

        memset(name, 'n', sizeof(name) - 1);
        name[sizeof(name) - 1] = '\0';
        for (unsigned i = 0; i < 3; i++) {
                peers[i] = open_named(1, name);
                must_malloc(peers[i], TRAIN, MIB);
        }
        memset(sentence, 's', 500);
        sentence[500] = '\0';
        explain_to_log(quota_of(peers[0], TRAIN), -ENOMEM, sentence, sizeof(sentence));
        ck_assert_uint_lt(strlen(sentence), sizeof(sentence) - 1);
        snprintf(shorter, sizeof(shorter), "refused");
        explain_to_tenant(quota_of(peers[0], TRAIN), -ENOMEM, shorter, sizeof(shorter));
        ck_assert_uint_eq(strlen(shorter), sizeof(shorter) - 1);
        for (unsigned i = 0; i < 3; i++)
                peer_free(peers[i]);
}

/* ---- the report --------------------------------------------------------------- */

static const Bfcd__Reply *ask(struct peer *p, const char *partition, const char *tenant, uint64_t cursor)
{
        Bfcd__Explain explain = BFCD__EXPLAIN__INIT;
        Bfcd__Request r = REQUEST(EXPLAIN, explain, &explain);
        uint64_t id;

        explain.partition = (char *)(uintptr_t)partition;
        explain.tenant = (char *)(uintptr_t)tenant;
        explain.cursor = cursor;
        ck_assert_int_eq(peer_send(p, &r, &id), 0);
        ck_assert_ptr_nonnull(peer_reply(p, id));
        return peer_reply(p, id);
}

static int ask_in_vain(struct peer *p, const char *partition, const char *tenant)
{
        const Bfcd__Reply *reply = ask(p, partition, tenant, 0);

        return reply->body_case == BFCD__REPLY__BODY_REFUSAL ? (int)reply->refusal->error : 0;
}

/* All rows, as "partition/tenant " each. */
static void rows_of(struct peer *p, const char *partition, const char *tenant, char *ret, size_t n_ret)
{
        uint64_t cursor = 0;
        size_t n = 0;

        ret[0] = '\0';
        do {
                const Bfcd__Reply *reply = ask(p, partition, tenant, cursor);

                ck_assert_int_eq(reply->body_case, BFCD__REPLY__BODY_EXPLAIN);
                for (size_t i = 0; i < reply->explain->n_rows; i++)
                        n += (size_t)snprintf(ret + n, n_ret - n, "%s/%s ",
                                              reply->explain->rows[i]->partition,
                                              reply->explain->rows[i]->tenant);
                cursor = reply->explain->next_cursor;
        } while (cursor != 0);
}

TEST(pages)
{
        struct peer *red = open_named(1, "r"), *blue = open_named(2, "b"), *admin = open_admin_session();
        char rows[256];

        rows_of(admin, "", "", rows, sizeof(rows));
        ck_assert_str_eq(rows, "train/ train/red train/blue serve/ serve/red ");
        rows_of(admin, "serve", "", rows, sizeof(rows));
        ck_assert_str_eq(rows, "serve/ serve/red ");
        rows_of(admin, "", "blue", rows, sizeof(rows));
        ck_assert_str_eq(rows, "train/ train/blue ");
        rows_of(red, "", "", rows, sizeof(rows));
        ck_assert_str_eq(rows, "train/ train/red serve/ serve/red ");
        rows_of(red, "", "red", rows, sizeof(rows));
        ck_assert_str_eq(rows, "train/ train/red serve/ serve/red ");
        rows_of(blue, "", "", rows, sizeof(rows));
        ck_assert_str_eq(rows, "train/ train/blue ");
        ck_assert_int_eq(ask_in_vain(admin, "nowhere", ""), ENOENT);
        ck_assert_int_eq(ask_in_vain(admin, "serve", "blue"), ENOENT);
        ck_assert_int_eq(ask_in_vain(blue, "serve", ""), ENOENT); /* as if it were not there */
        ck_assert_int_eq(ask_in_vain(blue, "", "red"), ENOENT);
        ck_assert_int_eq(ask_in_vain(blue, "", "nobody"), ENOENT);
        peer_free(red);
        peer_free(blue);
        peer_free(admin);
}

/* Any cursor is answered, by a row that the requester may see or by none. */
TEST(cursors_from_outside)
{
        uint64_t seed = 6,
                 cursors[] = { 1, 2, 3, UINT32_MAX, UINT64_C(1) << 32, UINT64_MAX, UINT64_C(2) << 32 };
        struct peer *blue = open_named(2, "b");

        for (unsigned i = 0; i < 2000; i++) {
                uint64_t cursor = i < 7 ? cursors[i] : random_next(&seed) >> (random_next(&seed) % 64);
                const Bfcd__Reply *reply = ask(blue, "", "", cursor);

                ck_assert_int_eq(reply->body_case, BFCD__REPLY__BODY_EXPLAIN);
                ck_assert_uint_le(reply->explain->n_rows, 1);
                if (reply->explain->n_rows == 1) {
                        ck_assert_str_eq(reply->explain->rows[0]->partition, "train");
                        ck_assert(reply->explain->rows[0]->tenant[0] == '\0' ||
                                  strcmp(reply->explain->rows[0]->tenant, "blue") == 0);
                }
                peer_forget_replies(blue);
        }
        peer_free(blue);
}

static const Bfcd__ExplainRow *row_of(struct peer *p, const char *partition, const char *tenant)
{
        uint64_t cursor = 0;

        do {
                const Bfcd__ExplainReply *page = ask(p, partition, "", cursor)->explain;

                if (page->n_rows == 1 && strcmp(page->rows[0]->tenant, tenant) == 0)
                        return page->rows[0];
                cursor = page->next_cursor;
        } while (cursor != 0);
        ck_abort_msg("no row of '%s'", tenant);
}

/* Each tenant has one free piece: nothing is fragmented, though no piece is all that is free. */
TEST(fragmented_bytes_are_summed_by_tenant)
{
        struct peer *red = open_named(1, "red"), *blue = open_named(2, "blue"), *admin = open_admin_session();
        const Bfcd__ExplainRow *row;
        uint64_t n_free;

        must_malloc(red, TRAIN, 1000);
        must_malloc(blue, TRAIN, 1000);
        row = row_of(admin, "train", "");
        n_free = row->stats->bytes_free;
        ck_assert_uint_gt(n_free, row->stats->largest_free_block_bytes);
        ck_assert_uint_eq(row->stats->bytes_fragmented, 0);
        ck_assert(row->fragmentation == 0);
        peer_free(red);
        peer_free(blue);
        peer_free(admin);
}

TEST(report_row)
{
        struct peer *red = open_named(1, "train.py"), *more = open_named(1, "eval.py"),
                    *admin = open_admin_session();
        const Bfcd__ExplainRow *row;
        uint64_t ids[3];

        for (unsigned i = 0; i < 3; i++)
                ids[i] = must_malloc(red, TRAIN, 2 * MIB);
        must_malloc(more, TRAIN, 1000);
        must_free(red, ids[1]);
        row = row_of(admin, "train", "red");
        ck_assert_uint_eq(row->stats->bytes_limit, 48 * MIB);
        ck_assert_uint_eq(row->stats->bytes_in_use, 4 * MIB + 1024);
        ck_assert_uint_eq(row->stats->bytes_requested, 4 * MIB + 1000);
        ck_assert_uint_eq(row->stats->peak_bytes_in_use, 6 * MIB + 1024);
        ck_assert_uint_eq(row->stats->largest_free_block_bytes, 2 * MIB);
        ck_assert_uint_eq(row->stats->bytes_free, 4 * MIB - 1024);
        ck_assert_uint_eq(row->stats->bytes_fragmented, 2 * MIB - 1024);
        ck_assert(row->fragmentation > 0.49 && row->fragmentation < 0.5);
        ck_assert_uint_eq(row->n_holders, 2);
        ck_assert_uint_eq(row->holders[0]->session_id, red->session->id);
        ck_assert_str_eq(row->holders[0]->name, "train.py");
        ck_assert_str_eq(row->holders[0]->state, "live");
        ck_assert_uint_eq(row->holders[0]->num_blocks, 2);
        ck_assert_uint_eq(row->holders[0]->bytes_in_use, 4 * MIB);
        ck_assert_uint_eq(row->holders[0]->largest_block_bytes, 2 * MIB);
        ck_assert_str_eq(row->holders[1]->name, "eval.py");
        /* Four extents of 2 MiB: a block, a free one, a block, the small one. */
        ck_assert_str_eq(row->occupancy, "#########################"
                                         "........................."
                                         "#########################"
                                         "+........................");
        ck_assert_uint_eq(row->num_waiting, 0);
        row = row_of(admin, "train", "");
        ck_assert_uint_eq(row->stats->bytes_limit, 64 * MIB);
        ck_assert_uint_eq(row->stats->bytes_in_use, 4 * MIB + 1024);
        ck_assert_uint_eq(row->n_holders, 0);
        peer_free(red);
        peer_free(more);
        peer_free(admin);
}

/* Nothing of another tenant is in any row, but what an ENOMEM tells. */
TEST(other_tenants_are_not_listed)
{
        struct peer *red = open_named(1, "r"), *blue = open_named(2, "b");
        const Bfcd__ExplainRow *row;

        must_malloc(red, TRAIN, 10 * MIB);
        row = row_of(blue, "train", "");
        ck_assert_uint_eq(row->stats->bytes_limit, 64 * MIB);
        ck_assert_uint_eq(row->stats->bytes_reserved, 10 * MIB);
        ck_assert_uint_eq(row->stats->bytes_in_use, 0);
        ck_assert_uint_eq(row->stats->peak_bytes_in_use, 0);
        ck_assert_uint_eq(row->stats->peak_bytes_in_use_time_ms, 0);
        ck_assert_uint_eq(row->stats->num_blocks, 0);
        ck_assert_uint_eq(row->stats->num_allocs, 0);
        ck_assert_uint_eq(row->n_holders, 0);
        ck_assert_str_eq(row->occupancy, "");
        row = row_of(blue, "train", "blue");
        ck_assert_uint_eq(row->n_holders, 0);
        ck_assert_str_eq(row->occupancy, "");
        peer_free(red);
        peer_free(blue);
}

TEST(sixteen_sessions_are_listed)
{
        struct peer *peers[20], *admin = open_admin_session();
        const Bfcd__ExplainRow *row;

        for (unsigned i = 0; i < 20; i++) {
                peers[i] = open_named(1, "job");
                must_malloc(peers[i], TRAIN, 256 * ((i * 7) % 20 + 1));
        }
        row = row_of(admin, "train", "red");
        ck_assert_uint_eq(row->n_holders, QUOTA_HOLDERS);
        for (unsigned i = 0; i < QUOTA_HOLDERS; i++)
                ck_assert_uint_eq(row->holders[i]->bytes_in_use, 256 * (20 - i));
        for (unsigned i = 0; i < 20; i++)
                peer_free(peers[i]);
        peer_free(admin);
}

static void forget_report(struct quota *q)
{
        if (q->usages.report)
                q->usages.report->since_ms = 0;
}

/* What clients say is idle is read once for each look, however often somebody asks; and it is never
 * more than they have. */
TEST(idle_bytes_are_read_once_per_look)
{
        struct peer *red = peer_new(b, 1, false);
        struct pages_client *own;
        struct quota *q;
        uint64_t id, words[2];

        red->wants_pages = true;
        ck_assert_int_eq(peer_error(red, peer_hello(red, "", "")), 0);
        ck_assert_int_eq(pages_map_client(red->page_fds[1], &own), 0);
        q = quota_of(red, TRAIN);
        id = must_malloc(red, TRAIN, 4 * MIB);
        own->version = PAGES_VERSION;
        own->magic = PAGES_CLIENT_MAGIC;
        forget_report(q);
        own->held[TRAIN].bytes_slabs = 3 * MIB;
        words[0] = row_of(red, "train", "red")->holders[0]->client_bytes_idle;
        own->held[TRAIN].bytes_slabs = 2 * MIB;
        words[1] = row_of(red, "train", "red")->holders[0]->client_bytes_idle;
        ck_assert_uint_eq(words[0], 3 * MIB);
        ck_assert_uint_eq(words[1], 3 * MIB);
        forget_report(q);
        ck_assert_uint_eq(row_of(red, "train", "red")->holders[0]->client_bytes_idle, 2 * MIB);
        must_malloc(red, TRAIN, 256);
        must_free(red, id);
        ck_assert_uint_le(row_of(red, "train", "red")->holders[0]->client_bytes_idle, 256);
        munmap(own, pages_client_bytes());
        peer_free(red);
}

/* Between two updates the ranking is old, the numbers are current, and ended sessions are not named. */
TEST(reports_in_a_row)
{
        struct peer *first = open_named(1, "first"), *second = open_named(1, "second"),
                    *admin = open_admin_session();
        const Bfcd__ExplainRow *row;
        uint64_t id;

        id = must_malloc(first, TRAIN, 4 * MIB);
        must_malloc(second, TRAIN, 2 * MIB);
        row = row_of(admin, "train", "red");
        ck_assert_str_eq(row->holders[0]->name, "first");
        must_free(first, id);
        must_malloc(first, TRAIN, 256);
        row = row_of(admin, "train", "red");
        ck_assert_uint_eq(row->n_holders, 2);
        for (size_t i = 0; i < 2; i++)
                ck_assert_uint_eq(row->holders[i]->bytes_in_use,
                                  strcmp(row->holders[i]->name, "first") == 0 ? 256 : 2 * MIB);
        peer_free(second);
        check();
        row = row_of(admin, "train", "red");
        ck_assert_uint_eq(row->n_holders, 1);
        ck_assert_str_eq(row->holders[0]->name, "first");
        still_clock_pass(EXPLAIN_MS + 10);
        row = row_of(admin, "train", "red");
        ck_assert_uint_eq(row->holders[0]->largest_block_bytes, 256);
        peer_free(first);
        peer_free(admin);
}

/* The largest block, also when a larger one was freed; never looked for among more
 * blocks than the budget has. */
TEST(largest_block)
{
        struct peer *red = open_named(1, "r");
        struct usage *h = &red->session->shares[TRAIN].usage;
        uint64_t large = must_malloc(red, TRAIN, 4096), middle;
        size_t budget = 2;

        must_malloc(red, TRAIN, 512);
        middle = must_malloc(red, TRAIN, 1024);
        must_malloc(red, SERVE, 8192); /* of another partition */
        ck_assert_uint_eq(usage_largest(h, &budget), 4096);
        must_free(red, large);
        ck_assert_uint_eq(usage_largest(h, &budget),
                          512 + 1024); /* three are too many to look at: it has no more */
        ck_assert_uint_eq(budget, 2);
        budget = 3;
        ck_assert_uint_eq(usage_largest(h, &budget), 1024);
        ck_assert_uint_eq(budget, 0);
        ck_assert_uint_eq(usage_largest(h, &budget), 1024); /* it is known by now */
        must_free(red, middle);
        must_malloc(red, TRAIN, 2048);
        ck_assert_uint_eq(usage_largest(h, &budget), 2048);
        check();
        peer_free(red);
}

/* ---- tags ----------------------------------------------------------------------- */

static const Bfcd__BlockRow *block_row(struct peer *p, uint64_t id)
{
        Bfcd__List list = BFCD__LIST__INIT;
        Bfcd__Request r = REQUEST(LIST, list, &list);
        const Bfcd__ListReply *page;
        uint64_t request;

        list.kind = BFCD__LIST__KIND__BLOCKS;
        ck_assert_int_eq(peer_send(p, &r, &request), 0);
        page = peer_reply(p, request)->list;
        for (size_t i = 0; i < page->n_blocks; i++)
                if (page->blocks[i]->block_id == id)
                        return page->blocks[i];
        ck_abort_msg("no such block");
}

TEST(tags)
{
        static const char longest[] = "0123456789 abcdefghijklmnopqrs~";
        struct peer *red = open_named(1, "r");
        uint64_t waited = must_malloc_tag(red, TRAIN, MIB, longest); /* it waits for the device */
        uint64_t at_once = must_malloc_tag(red, TRAIN, 256, "weights");

        ck_assert_uint_eq(strlen(longest), LEDGER_TAG_BYTES - 1);
        ck_assert_str_eq(block_row(red, waited)->tag, longest);
        ck_assert_str_eq(block_row(red, at_once)->tag, "weights");
        must_free(red, at_once);
        ck_assert_str_eq(block_row(red, must_malloc(red, TRAIN, 256))->tag, ""); /* in the same record */
        must_say(refusal_of(red, peer_malloc_tag(red, TRAIN, 1, "0123456789abcdefghijklmnopqrstuv"), EINVAL),
                 "at most 31 bytes");
        refusal_of(red, peer_malloc_tag(red, TRAIN, 1, "a\nb"), EINVAL);
        refusal_of(red, peer_malloc_tag(red, TRAIN, 1, "a\x7f"), EINVAL);
        refusal_of(red, peer_malloc_tag(red, TRAIN, 1, "\xc3\xa4"), EINVAL);
        peer_free(red);
}

/* ---- peaks and refusals ------------------------------------------------------------ */

static void reset_peaks(struct peer *admin)
{
        Bfcd__ResetPeaks reset = BFCD__RESET_PEAKS__INIT;
        Bfcd__Request r = REQUEST(RESET_PEAKS, reset_peaks, &reset);
        uint64_t id;

        ck_assert_int_eq(peer_send(admin, &r, &id), 0);
        ck_assert_int_eq(peer_error(admin, id), 0);
}

static void check_times(const Bfcd__ExplainRow *row, uint64_t from_ms, uint64_t to_ms)
{
        ck_assert_uint_ge(row->stats->peak_bytes_in_use_time_ms, from_ms);
        ck_assert_uint_le(row->stats->peak_bytes_in_use_time_ms, to_ms);
        ck_assert_uint_ge(row->stats->peak_bytes_reserved_time_ms, from_ms);
        ck_assert_uint_le(row->stats->peak_bytes_reserved_time_ms, to_ms);
}

TEST(peak_times)
{
        struct peer *red = open_named(1, "r"), *admin = open_admin_session();
        uint64_t before = clock_wall_ms(), after, id;

        ck_assert_uint_eq(row_of(admin, "train", "red")->stats->peak_bytes_in_use_time_ms, 0);
        id = must_malloc(red, TRAIN, 4 * MIB);
        after = clock_wall_ms();
        still_clock_pass(2);
        must_free(red, id);
        must_malloc(red, TRAIN, 2 * MIB); /* below the peak */
        check_times(row_of(admin, "train", "red"), before, after);
        check_times(row_of(admin, "train", ""), before, after);
        still_clock_pass(2);
        before = clock_wall_ms();
        reset_peaks(admin);
        check_times(row_of(admin, "train", "red"), before, clock_wall_ms());
        check_times(row_of(admin, "train", ""), before, clock_wall_ms());
        still_clock_pass(2);
        before = clock_wall_ms();
        must_malloc(red, TRAIN, 8 * MIB);
        check_times(row_of(admin, "train", "red"), before, clock_wall_ms());
        peer_free(red);
        peer_free(admin);
}

TEST(refusals_by_kind)
{
        struct peer *red = open_named(1, "r"), *blue = open_named(2, "b"), *admin = open_admin_session();
        const Bfcd__Statistics *f;
        uint64_t before = clock_wall_ms();

        must_malloc(blue, 0, 40 * MIB);
        refusal_of(red, peer_malloc(red, TRAIN, 49 * MIB), EDQUOT);
        refusal_of(red, peer_malloc(red, TRAIN, 30 * MIB), ENOMEM);
        refusal_of(red, peer_malloc(red, TRAIN, 30 * MIB), ENOMEM);
        refusal_of(red, peer_malloc(red, TRAIN, 0), EINVAL);
        f = row_of(admin, "train", "red")->stats;
        ck_assert_uint_eq(f->num_refusals, 3);
        ck_assert_uint_eq(f->num_over_quota, 1);
        ck_assert_uint_eq(f->num_out_of_memory, 2);
        ck_assert_uint_ge(f->last_refusal_time_ms, before);
        ck_assert_uint_le(f->last_refusal_time_ms, clock_wall_ms());
        f = row_of(admin, "train", "")->stats;
        ck_assert_uint_eq(f->num_out_of_memory, 2);
        ck_assert_uint_ge(f->last_refusal_time_ms, before);
        ck_assert_uint_eq(row_of(admin, "train", "blue")->stats->last_refusal_time_ms, 0);
        peer_free(red);
        peer_free(blue);
        peer_free(admin);
}

TEST(waiting_requests_are_counted)
{
        struct peer *red = open_named(1, "r"), *gone = open_named(1, "gone"), *admin = open_admin_session();

        (void)peer_malloc(red, TRAIN, 2 * MIB);
        (void)peer_malloc(red, TRAIN, 3 * MIB);
        (void)peer_malloc(gone, TRAIN, 4 * MIB);
        ck_assert_uint_eq(row_of(admin, "train", "red")->num_waiting, 3);
        broker_turn(b); /* the first grows */
        ck_assert_uint_eq(row_of(admin, "train", "red")->num_waiting, 3);
        peer_free(gone);
        peer_settle(b);
        ck_assert_uint_eq(row_of(admin, "train", "red")->num_waiting, 0);
        peer_free(red);
        peer_free(admin);
}
