/* bfcctl's reports that are more than a list: leaks summed up, and the report of
 * which sessions have the memory, from prepared rows.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/suite.h"

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "ctl/explain.h"
#include "ctl/leaks.h"
#include "ctl/table.h"
#include "ctl/show.h"
#include "tests/unit/lists.h"

static struct list none; /* no sessions */

/* ---- leaks ------------------------------------------------------------------- */

TEST(grouping_option)
{
        enum leaks_by by = LEAKS_BY_BLOCK;

        ck_assert_int_eq(leaks_parse_by("tag", &by), 0);
        ck_assert_int_eq(by, LEAKS_BY_TAG);
        ck_assert_int_eq(leaks_parse_by("session", &by), 0);
        ck_assert_int_eq(by, LEAKS_BY_SESSION);
        ck_assert_int_eq(leaks_parse_by("block", &by), 0);
        ck_assert_int_eq(by, LEAKS_BY_BLOCK);
        ck_assert_int_eq(leaks_parse_by("age", &by), -EINVAL);
}

static void add(struct leaks *k, uint64_t id, uint64_t session, const char *tenant, const char *tag,
                uint64_t n_bytes, uint64_t age_ms)
{
        Bfcd__BlockRow row = BFCD__BLOCK_ROW__INIT;

        row.block_id = id;
        row.session_id = session;
        row.tenant = (char *)(uintptr_t)tenant;
        row.partition = (char[]){ "train" };
        row.tag = (char *)(uintptr_t)tag;
        row.n_bytes = n_bytes;
        row.n_requested = n_bytes - 1;
        row.age_ms = age_ms;
        ck_assert_int_eq(leaks_add(k, &row), 0);
}

static struct leaks *open_leaks(const struct leaks_options *options)
{
        struct leaks *k;

        ck_assert_int_eq(leaks_new(options, &k), 0);
        add(k, 1, 7, "red", "weights", 1024, 5000);
        add(k, 2, 7, "red", "", 4096, 9000);
        add(k, 3, 8, "red", "weights", 2048, 7000);
        add(k, 4, 9, "blue", "weights", 512, 60000);
        add(k, 5, 8, "red", "weights", 8192, 10); /* young */
        return k;
}

static char *table_of(struct leaks *k, const struct list *sessions)
{
        char *text = NULL;
        size_t n;
        FILE *out = open_memstream(&text, &n);

        table_look.is_wide = true;
        ck_assert_int_eq(leaks_print(out, k, sessions), 0);
        fclose(out);
        squeeze(text);
        return text;
}

TEST(by_tag)
{
        struct leaks_options options = { .by = LEAKS_BY_TAG, .older_ms = 1000 };
        struct leaks *k = open_leaks(&options);

        check_text(table_of(k, &none), "TAG TENANT PARTITION BLOCKS IN-USE LARGEST PER-MIN OLDEST NEWEST\n"
                                       "- red train 1 4.0 KiB 4.0 KiB - 9.0 s 9.0 s\n"
                                       "weights red train 2 3.0 KiB 2.0 KiB - 7.0 s 5.0 s\n"
                                       "weights blue train 1 512 B 512 B 512 B 1m 00s 1m 00s\n");
        check_document(
                leaks_json(k, &none),
                "{\"schema\":1,\"leaks\":["
                "{\"tenant\":\"red\",\"partition\":\"train\",\"tag\":\"\",\"num_blocks\":1,\"bytes_in_use\":4096,"
                "\"bytes_requested\":4095,\"client_bytes_in_use\":0,\"largest_block_bytes\":4096,\"bytes_per_minute\":null,\"oldest_age_ms\":9000,\"newest_age_ms\":9000},"
                "{\"tenant\":\"red\",\"partition\":\"train\",\"tag\":\"weights\",\"num_blocks\":2,\"bytes_in_use\":3072,"
                "\"bytes_requested\":3070,\"client_bytes_in_use\":0,\"largest_block_bytes\":2048,\"bytes_per_minute\":null,\"oldest_age_ms\":7000,\"newest_age_ms\":5000},"
                "{\"tenant\":\"blue\",\"partition\":\"train\",\"tag\":\"weights\",\"num_blocks\":1,\"bytes_in_use\":512,"
                "\"bytes_requested\":511,\"client_bytes_in_use\":0,\"largest_block_bytes\":512,\"bytes_per_minute\":512,\"oldest_age_ms\":60000,\"newest_age_ms\":60000}"
                "]}");
        leaks_free(k);
        ck_assert_ptr_null(leaks_free(NULL));
}

TEST(by_session)
{
        struct leaks_options options = { .by = LEAKS_BY_SESSION, .tenant = "red" };
        struct leaks *k = open_leaks(&options);
        Bfcd__SessionRow row = BFCD__SESSION_ROW__INIT, *rows[] = { &row };
        struct list sessions = { .sessions = rows, .n_sessions = 1 };
        char *text;

        row.session_id = 8;
        row.pid = 4242;
        row.name = (char[]){ "train\n.py" };
        row.state = (char[]){ "live" };
        check_text(table_of(k, &sessions),
                   "SESSION PID NAME STATE TENANT PARTITION BLOCKS IN-USE LARGEST PER-MIN OLDEST NEWEST\n"
                   "8 4242 train\\n.py live red train 2 10.0 KiB 8.0 KiB - 7.0 s 0.0 s\n"
                   "7 - - - red train 2 5.0 KiB 4.0 KiB - 9.0 s 5.0 s\n");
        add(k, 6, 0, "red", "weights", 65536, 100); /* shared */
        row.client_bytes_idle = 2048;
        row.tenant = (char[]){ "red" };
        text = table_of(k, &sessions);
        ck_assert_ptr_nonnull(strstr(text, "\nshared - - - red "));
        ck_assert_ptr_nonnull(strstr(text,
                                     "\n"
                                     "2.0 KiB of the sessions' memory are idle in the clients' caches"));
        free(text);
        row.tenant = (char[]){ "blue" }; /* not asked about */
        text = table_of(k, &sessions);
        ck_assert_ptr_null(strstr(text, "idle"));
        free(text);
        leaks_free(k);
}

/* A client with a cache says how old its blocks are: then its slabs do not count. */
TEST(ages_by_clients)
{
        static uint64_t least_ms[] = { 0, 3000, 60000 }, bytes[] = { 4 * MIB, 512, 1024 };
        static char red[] = "red", train[] = "train";
        struct leaks_options options = { .by = LEAKS_BY_SESSION, .older_ms = 3000 };
        Bfcd__AgesRow row = BFCD__AGES_ROW__INIT, *rows[] = { &row };
        struct list told = { .ages = rows, .n_ages = 1 };
        struct leaks *k;

        row.session_id = 7;
        row.tenant = red;
        row.partition = train;
        row.n_least_age_ms = row.n_bytes = 3;
        row.least_age_ms = least_ms;
        row.bytes = bytes;
        for (int i = 0; i < 2; i++) {
                options.by = i == 0 ? LEAKS_BY_SESSION : LEAKS_BY_BLOCK;
                ck_assert_int_eq(leaks_new(&options, &k), 0);
                ck_assert_int_eq(leaks_add_ages(k, &told), 0);
                add(k, 1, 7, "red", "", 64 * MIB, 90000); /* its slab */
                add(k, 2, 8, "red", "", 2048, 5000);
                add(k, 3, 7, "red", "x", 256, 5000);
                check_text(
                        table_of(k, &none),
                        i == 0 ? "SESSION PID NAME STATE TENANT PARTITION BLOCKS IN-USE LARGEST PER-MIN OLDEST NEWEST\n"
                                 "8 - - - red train 1 2.0 KiB 2.0 KiB - 5.0 s 5.0 s\n"
                                 "7 - - - red train 1 1.8 KiB 256 B 1.8 KiB 1m 00s 3.0 s\n"
                               : "BLOCK SESSION TENANT PARTITION TAG SIZE REQUESTED AGE\n"
                                 "2 8 red train - 2.0 KiB 2.0 KiB 5.0 s\n"
                                 "cached 7 red train - 1.5 KiB - 1m 00s\n"
                                 "3 7 red train x 256 B 255 B 5.0 s\n");
                leaks_free(k);
        }
}

TEST(by_block)
{
        struct leaks_options options = { .by = LEAKS_BY_BLOCK, .older_ms = 6000, .tenant = "red" };
        struct leaks *k = open_leaks(&options);

        add(k, UINT64_MAX, 7, "red", "x", 4096, 9001);
        check_text(table_of(k, &none), "BLOCK SESSION TENANT PARTITION TAG SIZE REQUESTED AGE\n"
                                       "18446744073709551615 7 red train x 4.0 KiB 4.0 KiB 9.0 s\n"
                                       "2 7 red train - 4.0 KiB 4.0 KiB 9.0 s\n"
                                       "3 8 red train weights 2.0 KiB 2.0 KiB 7.0 s\n");
        leaks_free(k);
        ck_assert_int_eq(leaks_new(&options, &k), 0);
        check_document(leaks_json(k, &none), "{\"schema\":1,\"leaks\":[]}");
        add(k, UINT64_MAX, 7, "red", "x", 4096, 9001);
        check_document(
                leaks_json(k, &none),
                "{\"schema\":1,\"leaks\":[{\"tenant\":\"red\",\"partition\":\"train\",\"tag\":\"x\","
                "\"session_id\":7,\"block_id\":\"18446744073709551615\",\"n_bytes\":4096,\"n_requested\":4095,"
                "\"age_ms\":9001}]}");
        leaks_free(k);
}

/* ---- explain --------------------------------------------------------------------- */

/* A partition and a tenant in it, with a holder that others named. */
static struct list *explained(void)
{
        static Bfcd__Statistics stats;
        static Bfcd__Holder holder;
        static Bfcd__Holder *holders[] = { &holder };
        static Bfcd__ExplainRow rows[4], *pointers[] = { &rows[0], &rows[1], &rows[2], &rows[3] };
        static struct list l;
        static char train[] = "train", red[] = "red", name[] = "x\x1b[2J", live[] = "live",
                    picture[] = "##+.~-", blue[] = "blue", green[] = "green";
        static Bfcd__Statistics blank;

        bfcd__statistics__init(&stats);
        stats.bytes_limit = 64 * MIB;
        stats.bytes_in_use = 3 * MIB;
        stats.peak_bytes_in_use = 5 * MIB;
        stats.peak_bytes_in_use_time_ms = 1000000;
        stats.num_allocs = 12;
        stats.largest_alloc_size = MIB;
        stats.bytes_free = 4 * MIB;
        stats.largest_free_block_bytes = 3 * MIB;
        stats.bytes_fragmented = MIB;
        stats.num_refusals = 3;
        stats.num_over_quota = 1;
        stats.num_out_of_memory = 2;
        stats.last_refusal_time_ms = 1030000;
        stats.num_sessions = 2;
        bfcd__holder__init(&holder);
        holder.session_id = 9;
        holder.pid = 77;
        holder.name = name;
        holder.state = live;
        holder.num_blocks = 4;
        holder.bytes_in_use = 3 * MIB;
        holder.client_bytes_idle = 512;
        holder.largest_block_bytes = MIB;
        bfcd__explain_row__init(&rows[0]);
        bfcd__explain_row__init(&rows[1]);
        rows[0].partition = rows[1].partition = train;
        rows[1].tenant = red;
        rows[1].stats = &stats;
        rows[1].fragmentation = 0.25;
        rows[1].occupancy = picture;
        rows[1].n_holders = 1;
        rows[1].holders = holders;
        rows[1].num_waiting = 6;
        rows[1].bytes_retiring = 2 * MIB;
        bfcd__statistics__init(&blank);
        blank.bytes_limit = 8 * MIB;
        for (size_t i = 2; i < 4; i++) {
                bfcd__explain_row__init(&rows[i]);
                rows[i].partition = train;
        }
        rows[2].tenant = blue; /* as red, without holders */
        rows[2].stats = &stats;
        rows[2].occupancy = picture;
        rows[3].tenant = green;
        rows[3].stats = &blank;
        l = (struct list){ .explained = pointers, .n_explained = 4 };
        return &l;
}

TEST(explain_for_people)
{
        char *text = NULL;
        size_t n;
        FILE *out = open_memstream(&text, &n);

        ck_assert_int_eq(explain_print(out, explained(), 1060000), 0);
        fclose(out);
        squeeze(text);
        ck_assert_int_eq(strncmp(text, "Partition train\nLimit ", 22), 0);
        ck_assert_ptr_nonnull(strstr(text, "\n\nTenant red in partition train\n"
                                           "Limit 67108864 64.0 MiB\n"
                                           "InUse 3145728 3.0 MiB\n"
                                           "MaxInUse 5242880 5.0 MiB, 1m 00s ago\n"
                                           "NumAllocs 12\n"
                                           "MaxAllocSize 1048576 1.0 MiB\n"));
        ck_assert_ptr_nonnull(strstr(text, "Fragmented 1048576 1.0 MiB, 25.0 % of Free\n"
                                           "Retiring 2097152 2.0 MiB\n"));
        ck_assert_ptr_nonnull(strstr(text, "Waiting 6\n"
                                           "Refused 3 EDQUOT 1, ENOMEM 2, last 30.0 s ago\n"
                                           "##+.~-\n"
                                           "# used . free + mixed ~ being released - no memory\n"));
        ck_assert_ptr_nonnull(strstr(text, "SESSION PID NAME STATE BLOCKS HELD IDLE LARGEST DIRECT\n"
                                           "9 77 x\\x1b[2J live 4 3.0 MiB 512 B 1.0 MiB 0 B\n"
                                           "(1 of 2 sessions)\n"));
        ck_assert_ptr_nonnull(strstr(text, "ENOMEM 2, last 30.0 s ago\n"
                                           "##+.~-\n"
                                           "\n"
                                           "Tenant green in partition train\n"
                                           "No allocations yet. Limit 8.0 MiB, guaranteed 0 B.\n"));
        free(text);
}

TEST(explain_for_programs)
{
        json_t *document = explain_json(explained()), *rows, *row, *holder;

        ck_assert_int_eq(json_integer_value(json_object_get(document, "schema")), SHOW_SCHEMA);
        rows = json_object_get(document, "explain");
        ck_assert_uint_eq(json_array_size(rows), 4);
        ck_assert(json_is_null(json_object_get(json_array_get(rows, 0), "tenant")));
        row = json_array_get(rows, 1);
        ck_assert_str_eq(json_string_value(json_object_get(row, "tenant")), "red");
        ck_assert_str_eq(json_string_value(json_object_get(row, "occupancy")), "##+.~-");
        ck_assert_int_eq(json_integer_value(json_object_get(row, "num_waiting")), 6);
        ck_assert_int_eq(json_integer_value(json_object_get(row, "bytes_retiring")), 2 * MIB);
        ck_assert_int_eq(json_integer_value(json_object_get(row, "peak_bytes_in_use_time_ms")), 1000000);
        ck_assert(json_real_value(json_object_get(row, "fragmentation")) == 0.25);
        ck_assert_int_eq(json_integer_value(json_object_get(row, "bytes_fragmented")), MIB);
        holder = json_array_get(json_object_get(row, "holders"), 0);
        check_document(
                json_incref(holder),
                "{\"session_id\":9,\"pid\":77,\"name\":\"x\\u001b[2J\",\"state\":\"live\",\"num_blocks\":4,"
                "\"bytes_in_use\":3145728,\"client_bytes_idle\":512,\"largest_block_bytes\":1048576,\"bytes_direct\":0,\"bytes_contexts\":0,\"bytes_outside\":0}");
        json_decref(document);
}
