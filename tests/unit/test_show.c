/* What bfcctl prints, from canned replies: the JSON's shape is a promise.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/suite.h"

#include <errno.h>
#include <malloc.h>
#include <signal.h>
#include <spawn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ctl/hour.h"
#include "ctl/list.h"
#include "ctl/process.h"
#include "ctl/show.h"
#include "ctl/statistics.h"
#include "ctl/table.h"
#include "tests/unit/lists.h"

static void add(struct list *l, Bfcd__List__Kind kind, Bfcd__ListReply *page, uint64_t expected_cursor)
{
        uint64_t cursor = 12345;

        ck_assert_int_eq(list_add(l, kind, canned(page), &cursor), 0);
        ck_assert_uint_eq(cursor, expected_cursor);
}

static struct list *list_of(Bfcd__List__Kind kind, Bfcd__ListReply *page)
{
        struct list *l;

        ck_assert_int_eq(list_new(&l), 0);
        add(l, kind, page, page->next_cursor);
        return l;
}

static void check_json(Bfcd__List__Kind kind, const struct list *l, const char *expected_text)
{
        check_document(show_json(kind, l), expected_text);
}

/* The width of a list's longest line, as it is printed by default. */
static size_t narrow_width(Bfcd__List__Kind kind, const struct list *l)
{
        size_t width = 0, n;
        char *text = NULL;
        FILE *out = open_memstream(&text, &n);

        ck_assert_ptr_nonnull(out);
        table_look.is_wide = false;
        table_look.is_cut = true;
        ck_assert_int_eq(show_table(out, kind, l), 0);
        fclose(out);
        for (const char *line = text; *line; line += strcspn(line, "\n") + 1) {
                n = strcspn(line, "\n");
                width = n > width ? n : width;
        }
        free(text);
        return width;
}

/* All columns; by default it must fit a terminal. */
static char *table_of(Bfcd__List__Kind kind, const struct list *l)
{
        char *text = NULL;
        size_t n;
        FILE *out = open_memstream(&text, &n);

        ck_assert_ptr_nonnull(out);
        ck_assert_uint_le(narrow_width(kind, l), TABLE_COLUMNS);
        table_look.is_wide = true;
        ck_assert_int_eq(show_table(out, kind, l), 0);
        fclose(out);
        squeeze(text);
        return text;
}

static void fill_stats(Bfcd__Statistics *f)
{
        bfcd__statistics__init(f);
        f->bytes_limit = 512u << 20;
        f->bytes_reserved = 256u << 20;
        f->peak_bytes_reserved = 300u << 20;
        f->bytes_in_use = 128u << 20;
        f->peak_bytes_in_use = 192u << 20;
        f->bytes_requested = (128u << 20) - 100;
        f->num_allocs = 1000;
        f->largest_alloc_size = 64u << 20;
        f->largest_free_block_bytes = 96u << 20;
        f->bytes_free = 128u << 20;
        f->bytes_fragmented = 32u << 20;
        f->num_blocks = 17;
        f->num_sessions = 3;
        f->num_extents = 12;
        f->num_refusals = 5;
        f->lifetime_peak_bytes_in_use = 200u << 20;
        f->lifetime_peak_bytes_reserved = 310u << 20;
        f->bytes_guaranteed = 64u << 20;
        f->bytes_parked = 12u << 20;
        f->bytes_direct = 8u << 20;
        f->bytes_contexts = 4u << 20;
        f->bytes_outside = 5u << 20;
        f->peak_bytes_requested = 190u << 20;
        f->bytes_unreclaimed = 4u << 20;
        f->peak_bytes_in_use_time_ms = 1700000000123;
        f->peak_bytes_reserved_time_ms = 1700000000456;
        f->num_over_quota = 3;
        f->num_out_of_memory = 2;
        f->last_refusal_time_ms = 1700000000789;
}

#define STATS_JSON                                                                                                                                                                          \
        "\"bytes_limit\":536870912,\"bytes_reserved\":268435456,\"peak_bytes_reserved\":314572800,"                                                                                         \
        "\"bytes_in_use\":134217728,\"bytes_requested\":134217628,\"num_allocs\":1000,"                                                                                                     \
        "\"largest_alloc_size\":67108864,\"largest_free_block_bytes\":100663296,\"bytes_free\":134217728,"                                                                                  \
        "\"num_blocks\":17,\"num_sessions\":3,\"num_extents\":12,\"num_refusals\":5,"                                                                                                       \
        "\"lifetime_peak_bytes_reserved\":325058560,\"bytes_guaranteed\":67108864,\"bytes_unreclaimed\":4194304,\"bytes_fragmented\":33554432,\"fragmentation\":0.25,"                      \
        "\"peak_bytes_in_use\":201326592,\"lifetime_peak_bytes_in_use\":209715200,\"bytes_parked\":12582912,\"bytes_direct\":8388608,\"bytes_contexts\":4194304,\"bytes_outside\":5242880," \
        "\"num_over_quota\":3,\"num_out_of_memory\":2,\"last_refusal_time_ms\":1700000000789,"                                                                                              \
        "\"peak_bytes_in_use_time_ms\":1700000000123,\"peak_bytes_reserved_time_ms\":1700000000456"

#define REQUESTED_JSON "\"peak_bytes_requested\":199229440"

#define NO_STATS_JSON                                                                                                                              \
        "\"bytes_limit\":0,\"bytes_reserved\":0,\"peak_bytes_reserved\":0,\"bytes_in_use\":0,"                                                     \
        "\"bytes_requested\":0,\"num_allocs\":0,\"largest_alloc_size\":0,\"largest_free_block_bytes\":0,"                                          \
        "\"bytes_free\":0,\"num_blocks\":0,\"num_sessions\":0,\"num_extents\":0,\"num_refusals\":0,"                                               \
        "\"lifetime_peak_bytes_reserved\":0,\"bytes_guaranteed\":0,\"bytes_unreclaimed\":0,\"bytes_fragmented\":0,\"fragmentation\":0.0,"          \
        "\"peak_bytes_in_use\":0,\"lifetime_peak_bytes_in_use\":0,\"bytes_parked\":0,\"bytes_direct\":0,\"bytes_contexts\":0,\"bytes_outside\":0," \
        "\"num_over_quota\":0,\"num_out_of_memory\":0,\"last_refusal_time_ms\":0,"                                                                 \
        "\"peak_bytes_in_use_time_ms\":0,\"peak_bytes_reserved_time_ms\":0"

#define NO_REQUESTED_JSON "\"peak_bytes_requested\":0"

TEST(tenants)
{
        Bfcd__ListReply page = BFCD__LIST_REPLY__INIT;
        Bfcd__TenantRow row = BFCD__TENANT_ROW__INIT;
        Bfcd__TenantRow *rows[] = { &row };
        Bfcd__Statistics stats;
        struct list *l;

        fill_stats(&stats);
        row.tenant = (char[]){ "vision" };
        row.partition = (char[]){ "train" };
        row.stats = &stats;
        row.bytes_pending = 2u << 20;
        row.num_waiting = 2;
        row.bytes_waiting = 1u << 20;
        page.n_tenants = 1;
        page.tenants = rows;
        page.next_cursor = 77;
        l = list_of(BFCD__LIST__KIND__TENANTS, &page);
        /* The second page: a name that is not UTF-8, and no statistics. */
        row.tenant = (char[]){ "\x1b[31m\xff" };
        row.partition = (char[]){ "dev" };
        row.stats = NULL;
        row.is_removed = true;
        row.bytes_pending = 0;
        row.num_waiting = row.bytes_waiting = 0;
        page.next_cursor = 0;
        add(l, BFCD__LIST__KIND__TENANTS, &page, 0);
        ck_assert_uint_eq(l->n_tenants, 2);
        check_json(
                BFCD__LIST__KIND__TENANTS, l,
                "{\"schema\":1,\"tenants\":["
                "{\"tenant\":\"vision\",\"partition\":\"train\",\"removed\":false,"
                "\"bytes_pending\":2097152,\"num_leases\":0,\"num_waiting\":2,"
                "\"bytes_waiting\":1048576," STATS_JSON "," REQUESTED_JSON "},"
                "{\"tenant\":\"\\u001b[31m\\ufffd\",\"partition\":\"dev\",\"removed\":true,\"bytes_pending\":0,"
                "\"num_leases\":0,\"num_waiting\":0,\"bytes_waiting\":0," NO_STATS_JSON "," NO_REQUESTED_JSON
                "}]}");
        CHECK_PARTS(table_of(BFCD__LIST__KIND__TENANTS, l), "TENANT PARTITION IN-USE PEAK ",
                    " RESERVED PEAK-RES LIMIT EDQUOT ENOMEM ", "vision train 128.0 MiB 192.0 MiB ",
                    " 256.0 MiB 300.0 MiB 512.0 MiB 3 2 ",
                    "h 4.0 MiB 12.0 MiB 8.0 MiB 4.0 MiB 5.0 MiB 2 1.0 MiB\n" /* days and hours ago */,
                    "\\x1b[31m\\xff dev 0 B 0 B ", " - 0 B 0 B removed 0 0 ",
                    "- 0 B 0 B 0 B 0 B 0 B 0 0 B\n");
        list_free(l);
}

static bool has_column(const struct table_column *columns, const char *key)
{
        for (const struct table_column *c = columns; !table_is_end(c); c++)
                if (c->via && c->key && strcmp(c->key, key) == 0 && (c->title || c->metric.name || c->page))
                        return true;
        return false;
}

/* A statistic is in the JSON by its field alone. People see it only where a column of tenants says how: one that has none is
 * listed here. */
TEST(each_statistic_of_a_tenant_is_described)
{
        static const char *const json_only[] = { "largest_alloc_size", "peak_bytes_requested",
                                                 "peak_bytes_reserved_time_ms" };
        const ProtobufCMessageDescriptor *d = &bfcd__statistics__descriptor;

        for (unsigned i = 0; i < d->n_fields; i++) {
                bool is_json_only = false;

                ck_assert_msg(d->fields[i].type == PROTOBUF_C_TYPE_UINT64, "%s is no uint64",
                              d->fields[i].name);
                for (size_t k = 0; k < sizeof(json_only) / sizeof(json_only[0]); k++)
                        is_json_only = is_json_only || strcmp(json_only[k], d->fields[i].name) == 0;
                ck_assert_msg(has_column(statistics_tenants, d->fields[i].name) != is_json_only,
                              "%s: a column of statistics_tenants, or json_only", d->fields[i].name);
        }
}

TEST(a_statistic_is_chosen_by_title_or_key)
{
        const struct table_column *by =
                table_find(statistics_tenants, "bytes_reserved", strlen("bytes_reserved"));

        ck_assert_ptr_nonnull(by);
        ck_assert_str_eq(by->title, "RESERVED");
        ck_assert_ptr_eq(table_find(statistics_tenants, "reserved", strlen("reserved")), by);
        ck_assert_ptr_null(
                table_find(statistics_tenants, "bytes_free", strlen("bytes_free"))); /* not in the table */
}

/* The page finds each of its values in the rows of its list. */
TEST(columns_of_the_page)
{
        json_t *document = statistics_page(), *columns = json_object_get(document, "columns"), *column;
        Bfcd__PartitionRow partition = BFCD__PARTITION_ROW__INIT;
        Bfcd__TenantRow tenant = BFCD__TENANT_ROW__INIT;
        Bfcd__LeaseRow lease = BFCD__LEASE_ROW__INIT;
        const struct {
                const char *list;
                const struct table_column *columns;
                const void *row;
        } lists[] = { { "partitions", statistics_partitions, &partition },
                      { "tenants", statistics_tenants, &tenant },
                      { "leases", statistics_leases, &lease } };
        size_t k;

        for (size_t i = 0; i < sizeof(lists) / sizeof(lists[0]); i++) {
                json_t *list = json_object_get(columns, lists[i].list);
                json_t *row = table_json(lists[i].columns, lists[i].row);

                ck_assert_uint_gt(json_array_size(list), 5);
                json_array_foreach(list, k, column)
                {
                        const char *key = json_string_value(json_object_get(column, "key"));
                        const char *type = json_string_value(json_object_get(column, "type"));

                        ck_assert(key && type && json_object_get(column, "title"));
                        ck_assert_msg(json_is_string(json_object_get(row, key)) ==
                                                      (strcmp(type, "text") == 0) &&
                                              json_object_get(row, key),
                                      "%s of %s", key, lists[i].list);
                }
                json_decref(row);
        }
        json_decref(document);
}

static void check_pages(Bfcd__ListReply *page, const char *pages)
{
        struct list *l = list_of(BFCD__LIST__KIND__PARTITIONS, page);
        char expected[64];

        snprintf(expected, sizeof(expected), " %s 2 4.0 MiB 8.0 MiB 4.0 MiB\n", pages);
        CHECK_PARTS(table_of(BFCD__LIST__KIND__PARTITIONS, l), expected);
        list_free(l);
}

TEST(partitions)
{
        Bfcd__ListReply page = BFCD__LIST_REPLY__INIT;
        Bfcd__PartitionRow row = BFCD__PARTITION_ROW__INIT;
        Bfcd__PartitionRow *rows[] = { &row };
        Bfcd__Statistics stats;
        struct list *l;

        fill_stats(&stats);
        row.name = (char[]){ "train" };
        row.device = (char[]){ "host" };
        row.growth = (char[]){ "on-demand" };
        row.share = (char[]){ "fd" };
        row.num_tenants = 2;
        row.clears_on_release = true;
        row.bytes_in_2mib_pages = 4 << 20;
        row.stats = &stats;
        page.n_partitions = 1;
        page.partitions = rows;
        l = list_of(BFCD__LIST__KIND__PARTITIONS, &page);
        check_json(
                BFCD__LIST__KIND__PARTITIONS, l,
                "{\"schema\":1,\"partitions\":[{\"partition\":\"train\",\"device\":\"host\","
                "\"growth\":\"on-demand\",\"share\":\"fd\",\"clear_on_release\":true,\"pinned\":false,\"bytes_pinned\":0,"
                "\"pages\":\"2 MiB\",\"bytes_in_2mib_pages\":4194304,\"bytes_in_4kib_pages\":0,"
                "\"num_tenants\":2," STATS_JSON "}]}");
        CHECK_PARTS(table_of(BFCD__LIST__KIND__PARTITIONS, l), "train host on-demand 128.0 MiB 192.0 MiB ",
                    "PAGES ENOMEM UNRECLAIMED DIRECT CONTEXTS\n", " 2 MiB 2 4.0 MiB 8.0 MiB 4.0 MiB\n");
        row.bytes_in_4kib_pages = 2 << 20;
        check_pages(&page, "mixed");
        row.bytes_in_2mib_pages = 0;
        check_pages(&page, "4 KiB");
        row.bytes_in_4kib_pages = 0;
        check_pages(&page, "-");
        list_free(l);
}

TEST(sessions)
{
        Bfcd__ListReply page = BFCD__LIST_REPLY__INIT;
        Bfcd__SessionRow row = BFCD__SESSION_ROW__INIT, silent = BFCD__SESSION_ROW__INIT;
        Bfcd__SessionRow *rows[] = { &row, &silent };
        struct list *l;

        row.session_id = 9;
        row.tenant = (char[]){ "vision" };
        row.pid = 4294967295;
        row.uid = 4294967294;
        row.name = (char[]){ "python3" };
        row.state = (char[]){ "live" };
        row.age_ms = 61000;
        row.num_blocks = 3;
        row.bytes_in_use = 768;
        row.peak_bytes_in_use = 1024;
        row.client_bytes_reserved = 768;
        row.client_bytes_in_use = 256;
        row.client_bytes_idle = 512;
        row.bytes_outside = 2048;
        row.bytes_direct = 4096;
        row.bytes_contexts = 1024;
        silent.tenant = silent.name = silent.state = (char[]){ "x" };
        silent.bytes_in_use = 100;
        silent.is_unresponsive = true;
        page.n_sessions = 2;
        page.sessions = rows;
        l = list_of(BFCD__LIST__KIND__SESSIONS, &page);
        check_json(
                BFCD__LIST__KIND__SESSIONS, l,
                "{\"schema\":1,\"sessions\":[{\"session_id\":9,\"tenant\":\"vision\",\"pid\":4294967295,"
                "\"uid\":4294967294,\"user\":\"4294967294\",\"unit\":\"\",\"command\":\"\",\"name\":\"python3\",\"state\":\"live\",\"unresponsive\":false,\"age_ms\":61000,"
                "\"num_blocks\":3,\"bytes_in_use\":768,\"peak_bytes_in_use\":1024,"
                "\"leases\":[],\"client_bytes_reserved\":768,\"client_bytes_in_use\":256,\"client_bytes_idle\":512,"
                "\"bytes_direct\":4096,\"bytes_contexts\":1024,\"bytes_outside\":2048},"
                "{\"session_id\":0,\"tenant\":\"x\",\"pid\":0,"
                "\"uid\":0,\"user\":\"root\",\"unit\":\"\",\"command\":\"\",\"name\":\"x\",\"state\":\"x\",\"unresponsive\":true,\"age_ms\":0,"
                "\"num_blocks\":0,\"bytes_in_use\":100,\"peak_bytes_in_use\":0,"
                "\"leases\":[],\"client_bytes_reserved\":0,\"client_bytes_in_use\":0,\"client_bytes_idle\":0,"
                "\"bytes_direct\":0,\"bytes_contexts\":0,\"bytes_outside\":0}]}");
        check_text(
                table_of(BFCD__LIST__KIND__SESSIONS, l),
                "SESSION TENANT USER UID PID NAME STATE UNRESPONSIVE AGE BLOCKS HELD PEAK-HELD USED IDLE DIRECT CONTEXTS OUTSIDE LEASES UNIT COMMAND\n"
                "9 vision 4294967294 4294967294 4294967295 python3 live no 1m 01s 3 768 B 1.0 KiB 256 B 512 B 4.0 KiB 1.0 KiB 2.0 KiB - - -\n"
                "0 x root 0 0 x x yes 0.0 s 0 100 B 0 B - - 0 B 0 B - - - -\n");
        list_free(l);
}

/* Of a program in a folder with a blank. */
TEST(the_job_of_a_process)
{
        char folder[] = "/tmp/bfc-show-XXXXXX", path[64], job[PROCESS_TEXT_MAX];
        char *words[] = { path, (char[]){ "60" }, NULL };
        pid_t pid;
        int status;

        ck_assert_ptr_nonnull(mkdtemp(folder));
        snprintf(path, sizeof(path), "%s/a b", folder);
        ck_assert_int_eq(mkdir(path, 0700), 0);
        snprintf(path, sizeof(path), "%s/a b/my job", folder);
        ck_assert_int_eq(symlink("/bin/sleep", path), 0);
        ck_assert_int_eq(posix_spawn(&pid, path, NULL, NULL, words, environ), 0);
        for (int i = 0; i < 120000 && !*process_command((uint64_t)pid, 0, job); i++)
                usleep(1000); /* the kernel sets its arguments after it let this process go on */
        /* In a service of systemd it is the service's name. */
        if (!*process_unit((uint64_t)pid, job) || !strstr(job, ".service"))
                ck_assert_str_eq(process_job((uint64_t)pid, 0, "", job), "my job 60");
        ck_assert_int_eq(kill(pid, SIGKILL), 0);
        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        ck_assert_int_eq(unlink(path), 0);
        *strrchr(path, '/') = '\0';
        ck_assert_int_eq(rmdir(path), 0);
        ck_assert_int_eq(rmdir(folder), 0);
}

/* On a terminal the job is cut before the tenant. */
TEST(a_long_job_hides_no_tenant)
{
        Bfcd__SessionRow row = BFCD__SESSION_ROW__INIT;
        Bfcd__SessionRow *rows[] = { &row };
        struct list l = { .sessions = rows, .n_sessions = 1 };
        char *text = NULL;
        size_t n;
        FILE *out = open_memstream(&text, &n);

        row.tenant = (char[]){ "a-tenant-with-a-long-name" };
        row.name = (char[]){ "train.py --with --very --many --options --and --more" };
        row.state = (char[]){ "live" };
        row.pid = UINT32_MAX; /* no such process */
        table_look.is_wide = false;
        table_look.is_cut = true;
        ck_assert_ptr_nonnull(out);
        ck_assert_int_eq(show_table(out, BFCD__LIST__KIND__SESSIONS, &l), 0);
        fclose(out);
        table_look.is_cut = false;
        ck_assert_msg(strstr(text, "a-tenant-with-a-long-name"), "%s", text);
        free(text);
}

/* What is printed of so many blocks. */
static char *print_blocks(bool json, const Bfcd__BlockRow *row, size_t n_blocks)
{
        struct show_blocks *s;
        char *text = NULL;
        size_t n;
        FILE *out = open_memstream(&text, &n);

        ck_assert_ptr_nonnull(out);
        table_look.is_wide = true;
        ck_assert_int_eq(show_blocks_new(out, json, &s), 0);
        for (size_t i = 0; i < n_blocks; i++)
                ck_assert_int_eq(show_blocks_add(s, row), 0);
        ck_assert_int_eq(show_blocks_end(s), 0);
        ck_assert_ptr_null(show_blocks_free(s));
        fclose(out);
        return text;
}

static void check_blocks(const Bfcd__BlockRow *row, size_t n_blocks, const char *expected_text)
{
        char *text = print_blocks(true, row, n_blocks);
        json_error_t error;

        check_document(json_loads(text, 0, &error), expected_text);
        free(text);
}

TEST(blocks)
{
        Bfcd__BlockRow row = BFCD__BLOCK_ROW__INIT;
        char *text;

        row.block_id = UINT64_MAX; /* an old daemon's: no number in JSON holds it */
        row.session_id = 9;
        row.tenant = (char[]){ "vision" };
        row.partition = (char[]){ "train" };
        row.region_id = 2;
        row.offset = 4096;
        row.n_bytes = 512;
        row.n_requested = 300;
        row.age_ms = 5;
        row.tag = (char[]){ "weights" };
        check_blocks(
                &row, 1,
                "{\"schema\":1,\"blocks\":[{\"block_id\":\"18446744073709551615\",\"lease\":\"\",\"session_id\":9,"
                "\"tenant\":\"vision\",\"partition\":\"train\",\"region_id\":2,\"offset\":4096,"
                "\"n_bytes\":512,\"n_requested\":300,\"age_ms\":5,\"state\":\"\",\"tag\":\"weights\",\"shared_name\":null}]}");
        check_blocks(&row, 0, "{\"schema\":1,\"blocks\":[]}");
        text = print_blocks(false, &row, 1);
        squeeze(text);
        ck_assert_ptr_nonnull(strstr(text, "18446744073709551615 9 vision train 2 0x1000 512 B"));
        free(text);
}

#ifdef HAVE_MALLINFO2
/* However many rows there are, the same memory is in use. */
static void check_memory(bool json)
{
        Bfcd__BlockRow row = BFCD__BLOCK_ROW__INIT;
        FILE *out = fopen("/dev/null", "we");
        struct show_blocks *s;
        size_t n_bytes = 0;

        row.tenant = row.partition = row.tag = (char[]){ "x" };
        ck_assert_ptr_nonnull(out);
        ck_assert_int_eq(show_blocks_new(out, json, &s), 0);
        for (size_t i = 0; i < 64 * 1024; i++) {
                ck_assert_int_eq(show_blocks_add(s, &row), 0);
                if (i == 1023)
                        n_bytes = mallinfo2().uordblks;
        }
        ck_assert_uint_le(mallinfo2().uordblks, n_bytes);
        ck_assert_int_eq(show_blocks_end(s), 0);
        show_blocks_free(s);
        fclose(out);
}

TEST(blocks_take_no_memory)
{
        check_memory(true);
        check_memory(false);
}
#endif

/* The rows of a table that are kept for their widths are few, and the titles come once. */
TEST(many_blocks)
{
        enum { N = 10000 };
        Bfcd__BlockRow row = BFCD__BLOCK_ROW__INIT;
        size_t n_lines = 0;
        json_error_t error;
        json_t *document;
        char *text;

        row.tenant = row.partition = row.tag = (char[]){ "x" };
        text = print_blocks(false, &row, N);
        for (const char *c = text; *c; c++)
                n_lines += *c == '\n';
        ck_assert_uint_eq(n_lines, N + 1);
        ck_assert_ptr_null(strstr(text + 1, "BLOCK  "));
        free(text);
        text = print_blocks(true, &row, N);
        document = json_loads(text, 0, &error);
        ck_assert_uint_eq(json_array_size(json_object_get(document, "blocks")), N);
        json_decref(document);
        free(text);
}

TEST(shared)
{
        Bfcd__ListReply page = BFCD__LIST_REPLY__INIT;
        Bfcd__SharedRow row = BFCD__SHARED_ROW__INIT;
        Bfcd__SharedRow *rows[] = { &row };
        struct list *l;

        row.name = (char[]){ "my weights" };
        row.tenant = (char[]){ "vision" };
        row.partition = (char[]){ "train" };
        row.block_id = UINT64_C(1) << 32;
        row.n_bytes = 512;
        row.n_requested = 300;
        row.num_references = 3;
        row.age_ms = 5;
        page.n_shared = 1;
        page.shared = rows;
        ck_assert_int_eq(list_new(&l), 0);
        page.next_cursor = 1;
        add(l, BFCD__LIST__KIND__SHARED, &page, 1);
        page.next_cursor = 0;
        add(l, BFCD__LIST__KIND__SHARED, &page, 0);
        ck_assert_uint_eq(l->n_shared, 2);
        l->n_shared = 1;
        check_json(BFCD__LIST__KIND__SHARED, l,
                   "{\"schema\":1,\"shared\":[{\"name\":\"my weights\",\"tenant\":\"vision\","
                   "\"partition\":\"train\",\"block_id\":\"4294967296\",\"n_bytes\":512,"
                   "\"n_requested\":300,\"num_references\":3,\"age_ms\":5,\"keep_ms\":0}]}");
        CHECK_PARTS(table_of(BFCD__LIST__KIND__SHARED, l), "my weights vision train 4294967296 512 B");
        /* Kept: in use, without references, and for ever. */
        l->shared[0]->keep_ms = 60000;
        check_json(BFCD__LIST__KIND__KEPT, l,
                   "{\"schema\":1,\"keep\":[{\"tenant\":\"vision\",\"partition\":\"train\","
                   "\"name\":\"my weights\",\"block_id\":\"4294967296\",\"n_bytes\":512,"
                   "\"n_metadata_bytes\":0,\"num_references\":3,\"keep_ms\":60000,\"left_ms\":null}]}");
        l->shared[0]->num_references = 0;
        l->shared[0]->kept_ms = 1000;
        check_json(BFCD__LIST__KIND__KEPT, l,
                   "{\"schema\":1,\"keep\":[{\"tenant\":\"vision\",\"partition\":\"train\","
                   "\"name\":\"my weights\",\"block_id\":\"4294967296\",\"n_bytes\":512,"
                   "\"n_metadata_bytes\":0,\"num_references\":0,\"keep_ms\":60000,\"left_ms\":1000}]}");
        l->shared[0]->keep_ms = l->shared[0]->kept_ms = UINT64_MAX;
        CHECK_PARTS(table_of(BFCD__LIST__KIND__KEPT, l), "forever forever");
        list_free(l);
}

TEST(waiting)
{
        Bfcd__ListReply page = BFCD__LIST_REPLY__INIT;
        Bfcd__WaitingRow first = BFCD__WAITING_ROW__INIT, second;
        Bfcd__WaitingRow *rows[] = { &second, &first };
        struct list *l;

        first.tenant = (char[]){ "vision" };
        first.partition = (char[]){ "train" };
        first.session_id = 7;
        first.pid = 99;
        first.n_bytes = 40u << 20;
        second = first;
        first.position = 1;
        first.partition_position = 3;
        first.bytes_lacking = 30u << 20;
        first.wait_ms = 60000;
        first.waited_ms = 1500;
        first.left_ms = 58500;
        first.estimate_ms = 125000;
        second.position = 2;
        second.lease = (char[]){ "job" };
        second.bytes_lacking = second.estimate_ms = UINT64_MAX;
        page.n_waiting = 2;
        page.waiting = rows;
        l = list_of(BFCD__LIST__KIND__WAITING, &page);
        list_sort(l);
        check_json(BFCD__LIST__KIND__WAITING, l,
                   "{\"schema\":1,\"waiting\":[{\"partition\":\"train\",\"partition_position\":3,"
                   "\"tenant\":\"vision\",\"lease\":\"\",\"position\":1,\"session_id\":7,\"pid\":99,"
                   "\"n_bytes\":41943040,\"bytes_lacking\":31457280,\"wait_ms\":60000,\"waited_ms\":1500,"
                   "\"left_ms\":58500,\"estimate_ms\":125000},"
                   "{\"partition\":\"train\",\"partition_position\":null,"
                   "\"tenant\":\"vision\",\"lease\":\"job\",\"position\":2,\"session_id\":7,\"pid\":99,"
                   "\"n_bytes\":41943040,\"bytes_lacking\":null,\"wait_ms\":0,\"waited_ms\":0,"
                   "\"left_ms\":0,\"estimate_ms\":null}]}");
        CHECK_PARTS(table_of(BFCD__LIST__KIND__WAITING, l),
                    "train 3 vision - 1 7 99 40.0 MiB 30.0 MiB 1.5 s 58.5 s 2m 05s\n",
                    "train - vision job 2 7 99 40.0 MiB - 0.0 s 0.0 s -\n");
        list_free(l);
}

TEST(no_rows)
{
        Bfcd__ListReply page = BFCD__LIST_REPLY__INIT;
        struct list *l;

        l = list_of(BFCD__LIST__KIND__SHARED, &page);
        check_json(BFCD__LIST__KIND__SHARED, l, "{\"schema\":1,\"shared\":[]}");
        CHECK_PARTS(table_of(BFCD__LIST__KIND__SHARED, l), "No shared blocks.\n");
        CHECK_PARTS(table_of(BFCD__LIST__KIND__SESSIONS, l), "No sessions.\n");
        list_free(l);
}

TEST(whoami_output)
{
        Bfcd__ListReply page = BFCD__LIST_REPLY__INIT;
        Bfcd__Whoami whoami_message = BFCD__WHOAMI__INIT;
        char *names[] = { (char[]){ "vision" }, (char[]){ "speech" } };
        struct list *l;

        whoami_message.tenant = names[0];
        whoami_message.session_id = 4;
        whoami_message.uid = 1000;
        whoami_message.gid = 100;
        whoami_message.pid = 77;
        whoami_message.n_matching_tenants = 2;
        whoami_message.matching_tenants = names;
        page.whoami = &whoami_message;
        l = list_of(BFCD__LIST__KIND__WHOAMI, &page);
        check_json(
                BFCD__LIST__KIND__WHOAMI, l,
                "{\"schema\":1,\"whoami\":{\"tenant\":\"vision\",\"session_id\":4,\"uid\":1000,\"gid\":100,"
                "\"pid\":77,\"admin\":false,\"monitor\":false,\"scheduler\":false,"
                "\"matching_tenants\":[\"vision\",\"speech\"]}}");
        CHECK_PARTS(table_of(BFCD__LIST__KIND__WHOAMI, l), "Matching tenants vision, speech\n");
        list_free(l);
}

TEST(status)
{
        Bfcd__ListReply page = BFCD__LIST_REPLY__INIT;
        Bfcd__Status s = BFCD__STATUS__INIT;
        Bfcd__DeviceRow device = BFCD__DEVICE_ROW__INIT;
        Bfcd__DeviceRow gpu = BFCD__DEVICE_ROW__INIT;
        Bfcd__DeviceCalls makes = BFCD__DEVICE_CALLS__INIT, destroys = BFCD__DEVICE_CALLS__INIT;
        Bfcd__DeviceRow *devices[] = { &device, &gpu };
        uint8_t uuid[] = { 0x00, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77,
                           0x88, 0x99, 0xaa, 0xbb, 0xcc, 0xdd, 0xee, 0xff };
        struct list *l;

        s.version = (char[]){ "0.1.0" };
        s.protocol_version = 1;
        s.uptime_ms = 1500;
        s.pid = 10;
        s.num_sessions = 1;
        s.max_sessions = 4096;
        s.num_blocks = 2;
        s.num_extents = 3;
        s.num_tenants = 5;
        s.num_quarantined = 6;
        s.num_unresponsive = 7;
        s.bytes_allocated = 4096;
        s.bytes_resident = 8192;
        s.longest_turn_ns = 1500000;
        s.recent_longest_turn_ns = 20000;
        s.num_log_lines_lost = 3;
        s.num_records_lost = 4;
        makes.num_calls = 4;
        makes.num_failed = 1;
        makes.total_ns = 8000000;
        makes.longest_ns = 3000000;
        device.makes = &makes;
        device.destroys = &destroys;
        device.id = (char[]){ "host" };
        device.state = (char[]){ "ok" };
        device.bytes_total = 1u << 30;
        device.bytes_reserved = 1u << 28;
        device.bytes_pending = 2u << 20;
        device.bytes_standby = 6u << 20;
        device.name = (char[]){ "host memory" };
        gpu.id = (char[]){ "MIG-00112233-4455-6677-8899-aabbccddeeff" };
        gpu.state = (char[]){ "lost" };
        gpu.mps = (char[]){ "allow" };
        gpu.name = (char[]){ "NVIDIA H200" };
        gpu.bytes_total = 1u << 30;
        gpu.bytes_unreclaimed = 2u << 20;
        gpu.uuid.data = uuid;
        gpu.uuid.len = sizeof(uuid);
        s.n_devices = 2;
        s.devices = devices;
        page.status = &s;
        l = list_of(BFCD__LIST__KIND__STATUS, &page);
        check_json(
                BFCD__LIST__KIND__STATUS, l,
                "{\"schema\":1,\"status\":{\"version\":\"0.1.0\",\"protocol_version\":1,\"uptime_ms\":1500,"
                "\"pid\":10,\"num_sessions\":1,\"max_sessions\":4096,\"num_blocks\":2,\"num_extents\":3,"
                "\"num_tenants\":5,\"num_quarantined\":6,\"num_unresponsive\":7,\"bytes_allocated\":4096,"
                "\"bytes_resident\":8192,\"longest_turn_ns\":1500000,\"recent_longest_turn_ns\":20000,"
                "\"num_log_lines_lost\":3,\"num_records_lost\":4,\"devices\":[{\"device\":\"host\",\"state\":\"ok\","
                "\"name\":\"host memory\",\"mps\":null,\"uuid\":null,\"bytes_total\":1073741824,"
                "\"bytes_reserved\":268435456,\"bytes_pending\":2097152,"
                "\"bytes_standby\":6291456,\"bytes_unreclaimed\":0,"
                "\"makes\":{\"num_calls\":4,\"num_failed\":1,\"total_ns\":8000000,\"longest_ns\":3000000},"
                "\"destroys\":{\"num_calls\":0,\"num_failed\":0,\"total_ns\":0,\"longest_ns\":0}},"
                "{\"device\":\"MIG-00112233-4455-6677-8899-aabbccddeeff\",\"state\":\"lost\","
                "\"name\":\"NVIDIA H200\",\"mps\":\"allow\",\"uuid\":\"MIG-00112233-4455-6677-8899-aabbccddeeff\","
                "\"bytes_total\":1073741824,\"bytes_reserved\":0,\"bytes_pending\":0,\"bytes_standby\":0,"
                "\"bytes_unreclaimed\":2097152,\"makes\":null,\"destroys\":null}"
                "]}}");
        CHECK_PARTS(table_of(BFCD__LIST__KIND__STATUS, l), "Uptime 1.5 s\n",
                    "Longest turn 1.5 ms; recently 20 us\n",
                    " RESERVED PENDING STANDBY UNRECLAIMED TOTAL RESERVED% MAKE-TIME FAILED NAME MPS UUID\n",
                    " ok 256.0 MiB 2.0 MiB 6.0 MiB 0 B 1.0 GiB 25.0 2.0 ms 1 host memory - ",
                    "\nMIG-00112233-4455-6677-8899-aabbccddeeff lost 0 B 0 B 0 B 2.0 MiB 1.0 GiB"
                    " 0.0 - - NVIDIA H200 allow MIG-00112233-4455-6677-8899-aabbccddeeff\n");
        list_free(l);
}

TEST(reply_of_another_kind)
{
        Bfcd__ListReply page = BFCD__LIST_REPLY__INIT;
        Bfcd__Reply *done = malloc(sizeof(*done));
        uint64_t cursor = 12345;
        struct list *l;

        ck_assert_int_eq(list_new(&l), 0);
        ck_assert_int_eq(list_add(l, BFCD__LIST__KIND__STATUS, canned(&page), &cursor), -EPROTO);
        ck_assert_int_eq(list_add(l, BFCD__LIST__KIND__WHOAMI, canned(&page), &cursor), -EPROTO);
        ck_assert_ptr_nonnull(done);
        bfcd__reply__init(done);
        ck_assert_int_eq(list_add(l, BFCD__LIST__KIND__TENANTS, done, &cursor), -EPROTO);
        ck_assert_uint_eq(cursor, 12345);
        list_free(l);
        ck_assert_ptr_null(list_free(NULL));
}

/* ---- the last hour ---------------------------------------------------------- */

/* A partition with n_bytes and tenants in it, the first of which has twice as much, the next three times. */
static void sample(struct hour *h, uint64_t now_ms, size_t n_tenants, uint64_t n_bytes)
{
        Bfcd__Statistics *stats = calloc(n_tenants + 1, sizeof(*stats));
        Bfcd__PartitionRow partition = BFCD__PARTITION_ROW__INIT, *partitions[] = { &partition };
        Bfcd__TenantRow *tenants = calloc(n_tenants, sizeof(*tenants));
        Bfcd__TenantRow **rows = calloc(n_tenants, sizeof(*rows));
        char(*names)[16] = calloc(n_tenants, sizeof(*names));
        struct list l = {
                .partitions = partitions, .n_partitions = 1, .tenants = rows, .n_tenants = n_tenants
        };

        ck_assert(stats && tenants && rows && names);
        for (size_t i = 0; i <= n_tenants; i++) {
                bfcd__statistics__init(&stats[i]);
                stats[i].bytes_in_use = (i + 1) * n_bytes;
                stats[i].bytes_reserved = 2 * stats[i].bytes_in_use;
        }
        partition.name = (char[]){ "train" };
        partition.stats = stats;
        for (size_t i = 0; i < n_tenants; i++) {
                snprintf(names[i], sizeof(names[i]), "t\"%u", (unsigned)i);
                bfcd__tenant_row__init(&tenants[i]);
                tenants[i].tenant = names[i];
                tenants[i].partition = partition.name;
                tenants[i].stats = &stats[i + 1];
                rows[i] = &tenants[i];
        }
        ck_assert_int_eq(hour_add(h, now_ms, &l), 0);
        free(stats);
        free(tenants);
        free(rows);
        free(names);
}

/* The caller frees it. */
static json_t *hour_of(struct hour *h, uint64_t now_ms)
{
        char *text = NULL;
        size_t n;
        FILE *out = open_memstream(&text, &n);
        json_t *document, *ret;

        ck_assert_ptr_nonnull(out);
        ck_assert_int_eq(hour_print(out, h, now_ms), 0);
        fclose(out);
        document = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
        ck_assert_msg(document != NULL, "no JSON: %s", text);
        free(text);
        ret = json_incref(json_object_get(document, "hour"));
        ck_assert_int_eq(json_integer_value(json_object_get(ret, "slot_ms")), HOUR_SLOT_MS);
        json_decref(document);
        return ret;
}

/* -1: unknown. slot: from the newest, which is 0, backwards. */
static json_int_t value_of(json_t *hour, size_t series, const char *key, size_t slot)
{
        json_t *values = json_object_get(json_array_get(json_object_get(hour, "series"), series), key);
        json_t *value = json_array_get(values, HOUR_SLOTS - 1 - slot);

        ck_assert_uint_eq(json_array_size(values), HOUR_SLOTS);
        return json_is_null(value) ? -1 : json_integer_value(value);
}

static size_t n_series(json_t *hour)
{
        return json_array_size(json_object_get(hour, "series"));
}

/* The highest sample of a slot counts; what was not sampled is unknown; the oldest slots leave. */
TEST(an_hour_of_samples)
{
        const uint64_t begin = UINT64_C(1000000) * HOUR_SLOT_MS;
        struct hour *h;
        json_t *hour;

        ck_assert_int_eq(hour_new(&h), 0);
        hour = hour_of(h, begin);
        ck_assert_uint_eq(n_series(hour), 0);
        json_decref(hour);
        sample(h, begin, 1, 5);
        sample(h, begin + 10000, 1, 9);
        sample(h, begin + HOUR_SLOT_MS - 1, 1, 7);
        sample(h, begin + 3 * HOUR_SLOT_MS, 2, 0);
        hour = hour_of(h, begin + 4 * HOUR_SLOT_MS);
        ck_assert_uint_eq(n_series(hour), 3);
        ck_assert(
                json_is_null(json_object_get(json_array_get(json_object_get(hour, "series"), 0), "tenant")));
        for (size_t i = 0; i < 2; i++) {
                static const json_int_t expected[] = { -1, 0, -1, -1, 9, -1 };

                for (size_t k = 0; k < sizeof(expected) / sizeof(expected[0]); k++) {
                        json_int_t n = expected[k] > 0 ? expected[k] * (json_int_t)(i + 1) : expected[k];

                        ck_assert_int_eq(value_of(hour, i, "bytes_in_use", k), n);
                        ck_assert_int_eq(value_of(hour, i, "bytes_reserved", k), n > 0 ? 2 * n : n);
                }
        }
        ck_assert_int_eq(value_of(hour, 2, "bytes_in_use", 4), -1);
        json_decref(hour);
        hour = hour_of(h, begin + (HOUR_SLOTS - 1) * HOUR_SLOT_MS);
        ck_assert_int_eq(value_of(hour, 0, "bytes_in_use", HOUR_SLOTS - 1), 9);
        json_decref(hour);
        hour = hour_of(h, begin + HOUR_SLOTS * HOUR_SLOT_MS);
        ck_assert_int_eq(value_of(hour, 0, "bytes_in_use", 0), -1); /* not what was there an hour ago */
        ck_assert_int_eq(value_of(hour, 0, "bytes_in_use", HOUR_SLOTS - 1), -1);
        ck_assert_int_eq(value_of(hour, 0, "bytes_in_use", HOUR_SLOTS - 3), 0);
        json_decref(hour);
        hour = hour_of(h, begin + 10 * HOUR_SLOTS * HOUR_SLOT_MS);
        ck_assert_uint_eq(n_series(hour), 0);
        json_decref(hour);
        ck_assert_ptr_null(hour_free(h));
        ck_assert_ptr_null(hour_free(NULL));
}

TEST(an_hour_has_a_bound)
{
        struct hour *h;
        json_t *hour;

        ck_assert_int_eq(hour_new(&h), 0);
        for (uint64_t i = 0; i < 3; i++)
                sample(h, i * HOUR_SLOT_MS, HOUR_SERIES + 9, i);
        hour = hour_of(h, 2 * HOUR_SLOT_MS);
        ck_assert_uint_eq(n_series(hour), HOUR_SERIES);
        ck_assert_int_eq(json_integer_value(json_object_get(hour, "num_left_out")), 10);
        ck_assert_int_eq(value_of(hour, HOUR_SERIES - 1, "bytes_in_use", 0), 2 * HOUR_SERIES);
        ck_assert_int_eq(value_of(hour, HOUR_SERIES - 1, "bytes_in_use", 2), 0);
        json_decref(hour);
        hour_free(h);
}
