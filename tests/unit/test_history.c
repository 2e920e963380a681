/* SPDX-License-Identifier: Apache-2.0 */
/* bfcctl history: points in time, and sums over records of a file and of a journal. */
#include "ctl/history.h"
#include "ctl/table.h"
#include "ctl/when.h"
#include "tests/suite.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static char folder[64], path[96];

static void setup(void)
{
        setenv("TZ", "UTC", 1);
        tzset();
        strcpy(folder, "/tmp/bfcd-history-XXXXXX");
        ck_assert_ptr_nonnull(mkdtemp(folder));
        snprintf(path, sizeof(path), "%s/records.jsonl", folder);
}

static void teardown(void)
{
        char command[128];

        snprintf(command, sizeof(command), "rm -r %s", folder);
        ck_assert_int_eq(system(command), 0);
}

FIXTURE(history, setup, teardown);

/* ---- time ---------------------------------------------------------------- */

#define NOW 1795459887 /* 2026-11-23 18:51:27 */

TEST(points_in_time)
{
        static const struct {
                const char *text;
                uint64_t seconds; /* 0: wrong */
        } cases[] = {
                { "now", NOW },
                { "today", 1795392000 },
                { "yesterday", 1795305600 },
                { "-2h", NOW - 7200 },
                { "-1h30min", NOW - 5400 },
                { "-1 day 2 hours", NOW - 93600 },
                { "90s ago", NOW - 90 },
                { "2w ago", NOW - 1209600 },
                { "@1795459887", NOW },
                { "2026-11-22", 1795305600 },
                { "2026-11-22 03:00", 1795316400 },
                { "2026-11-22T03:00:12", 1795316412 },
                { "03:00", 1795402800 },
                { "2024-02-29", 1709164800 },
                { "2026-02-31", 0 },
                { "2026-02-29", 0 },
                { "2026-13-01", 0 },
                { "2026-11-22 25:00", 0 },
                { "2026-11-22 03:00 ", 0 },
                { "2026-11", 0 },
                { "", 0 },
                { "-", 0 },
                { "-2y", 0 },
                { "-h", 0 },
                { " ago", 0 },
                { "-99999999999999999999h", 0 },
                { "-18446744073709551615w", 0 },
                { "-100000w", 0 }, /* before 1970 */
                { "@", 0 },
                { "@12x", 0 },
                { "@99999999999999999999", 0 },
                { "tomorrow", 0 },
        };

        for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
                uint64_t us = 0;
                int r = when_parse(cases[i].text, NOW, &us);

                ck_assert_msg(r == (cases[i].seconds ? 0 : -EINVAL), "'%s': %d", cases[i].text, r);
                ck_assert_msg(us == cases[i].seconds * 1000000, "'%s': %llu", cases[i].text,
                              (unsigned long long)us);
        }
}

TEST(times_as_text)
{
        char buffer[WHEN_TEXT];

        ck_assert_str_eq(when_text(UINT64_C(1795459887776106), buffer), "2026-11-23 18:51:27");
        ck_assert_str_eq(when_text(0, buffer), "-");
}

/* ---- records ------------------------------------------------------------- */

static void write_text(const char *to, const char *text)
{
        FILE *f = fopen(to, "we");

        ck_assert_ptr_nonnull(f);
        fputs(text, f);
        fclose(f);
}

/* The value of "history"; released by the caller. */
static json_t *read_history(const struct history_texts *texts)
{
        char error[HISTORY_ERROR_BYTES] = "";
        struct history *h;
        json_t *document, *ret;

        ck_assert_msg(history_open(texts, &h, error) == 0, "%s", error);
        document = history_json(h);
        ck_assert_ptr_nonnull(document);
        ret = json_incref(json_object_get(document, "history"));
        json_decref(document);
        history_free(h);
        return ret;
}

static json_t *row(const json_t *history, const char *list, size_t i)
{
        json_t *ret = json_array_get(json_object_get(history, list), i);

        ck_assert_msg(ret != NULL, "no row %zu of %s", i, list);
        return ret;
}

static size_t n_rows(const json_t *history, const char *list)
{
        return json_array_size(json_object_get(history, list));
}

static json_int_t number(const json_t *object, const char *key)
{
        ck_assert_msg(json_is_integer(json_object_get(object, key)), "%s", key);
        return json_integer_value(json_object_get(object, key));
}

#define SESSION(time, tenant, session, peak)                                                                 \
        "{\"time_us\":" time "000000,\"record\":\"session\",\"message\":\"m\",\"tenant\":\"" tenant          \
        "\",\"session\":" session ",\"uid\":1000,\"pid\":7,\"program\":\"train.py\",\"begin_us\":1000000,"   \
        "\"end_us\":" time "000000,\"peak_bytes\":" peak ",\"peaks\":{\"train\":" peak                       \
        "},\"allocations\":5,\"refusals\":1,\"waited_us\":2500,\"ended\":\"process exited\"}\n"
#define USAGE(begin, end, tenant, peak, reserved, limit)                                                     \
        "{\"time_us\":" end "000000,\"record\":\"usage\",\"message\":\"m\",\"tenant\":\"" tenant             \
        "\",\"partition\":\"train\",\"begin_us\":" begin "000000,\"end_us\":" end                            \
        "000000,\"peak_bytes\":" peak ",\"peak_reserved_bytes\":" reserved ",\"limit_bytes\":" limit         \
        ",\"refusals\":2}\n"
#define REFUSAL(time, tenant, bytes, limit, more)                                                            \
        "{\"time_us\":" time "000000,\"record\":\"refusal\",\"message\":\"m\",\"tenant\":\"" tenant          \
        "\",\"partition\":\"train\",\"bytes\":" bytes ",\"limit\":\"" limit "\",\"sentence\":\"why at " time \
        "\",\"suppressed\":" more ",\"suppressed_partition\":\"train\",\"suppressed_limit\":\"quota\"}\n"

#define LEASE(time, name, tenant)                                                                            \
        "{\"time_us\":" time "000000,\"record\":\"lease\",\"message\":\"m\",\"tenant\":\"" tenant            \
        "\",\"partition\":\"train\",\"lease\":\"" name "\",\"begin_us\":10000000,\"end_us\":" time           \
        "000000,\"limit_bytes\":4194304,\"peak_bytes\":4096,\"peak_reserved_bytes\":2097152,"                \
        "\"refusals\":3,\"waited_us\":7000}\n"

static const char records[] = LEASE("140", "one", "red") LEASE("190", "two", "red") LEASE(
        "190", "three", "blue") SESSION("100", "red", "1", "4096") SESSION("200", "red", "2", "8192")
        SESSION("200", "blue", "3", "512") USAGE("50", "150", "red", "4096", "2097152", "67108864") USAGE(
                "150", "250", "red", "8192", "4194304",
                "33554432") USAGE("50", "150", "blue", "512", "2097152",
                                  "67108864") REFUSAL("110", "red", "1000", "quota",
                                                      "0") REFUSAL("120", "red", "9000", "quota", "3")
                REFUSAL("130", "red", "10", "partition",
                        "4") "{\"time_us\":140000000,\"record\":\"refusal\",\"message\":\"m\",\"tenant\":\"red\",\"suppressed\":7}\n"
                             "{\"time_us\":150000000,\"record\":\"sessions\",\"message\":\"m\",\"tenant\":\"red\",\"sessions\":40}\n"
                             "{\"time_us\":160000000,\"record\":\"reload\",\"message\":\"reloaded\",\"result\":\"rejected\","
                             "\"changes\":\"a\\nb\\n\"}\n"
                             "{\"time_us\":170000000,\"record\":\"drain\",\"message\":\"m\",\"device\":\"host\",\"state\":\"begun\",\"uid\":0}\n"
                             "no record\n"
                             "{\"time_us\":170000000,\"record\":\"unknown\"}\n"
                             "{\"time_us\":180000000,\"record\":\"start\",\"version\":\"0.1.0\",\"sessi";

static void check_all(const json_t *h)
{
        ck_assert_int_eq(number(h, "num_sessions"), 43);
        ck_assert_uint_eq(n_rows(h, "sessions"), 3);
        ck_assert_int_eq(number(row(h, "sessions", 0), "peak_bytes_in_use"), 8192); /* the largest first */
        ck_assert_int_eq(number(row(h, "sessions", 0), "session_id"), 2);
        ck_assert_int_eq(number(json_object_get(row(h, "sessions", 0), "partitions"), "train"), 8192);
        ck_assert_int_eq(number(row(h, "sessions", 0), "duration_ms"), 199000);
        ck_assert_int_eq(number(row(h, "sessions", 0), "waited_ms"), 2);
        ck_assert_int_eq(number(row(h, "sessions", 2), "peak_bytes_in_use"), 512);
        ck_assert_uint_eq(n_rows(h, "tenants"), 2);
        ck_assert_int_eq(number(row(h, "tenants", 1), "peak_bytes_in_use"), 8192); /* blue is the first */
        ck_assert_int_eq(number(row(h, "tenants", 1), "peak_bytes_reserved"), 4194304);
        ck_assert_int_eq(number(row(h, "tenants", 1), "bytes_limit"), 33554432);
        ck_assert_int_eq(number(row(h, "tenants", 1), "num_refusals"), 4);
        ck_assert_uint_eq(n_rows(h, "refusals"), 3);
        ck_assert_int_eq(number(row(h, "refusals", 0), "num_suppressed"), 7); /* without a limit */
        ck_assert_int_eq(number(row(h, "refusals", 0), "num_records"), 0);
        ck_assert_int_eq(number(row(h, "refusals", 1), "num_records"), 1); /* partition */
        ck_assert_int_eq(number(row(h, "refusals", 2), "num_records"), 2);
        ck_assert_int_eq(number(row(h, "refusals", 2), "num_suppressed"), 7);
        ck_assert_int_eq(number(row(h, "refusals", 2), "largest_bytes"), 9000);
        ck_assert_str_eq(json_string_value(json_object_get(row(h, "refusals", 2), "sentence")), "why at 120");
        ck_assert_uint_eq(n_rows(h, "leases"), 3);
        ck_assert_str_eq(json_string_value(json_object_get(row(h, "leases", 0), "lease")), "one");
        ck_assert_str_eq(json_string_value(json_object_get(row(h, "leases", 2), "tenant")), "blue");
        ck_assert_str_eq(json_string_value(json_object_get(row(h, "leases", 0), "partition")), "train");
        ck_assert_int_eq(number(row(h, "leases", 0), "bytes_limit"), 4194304);
        ck_assert_int_eq(number(row(h, "leases", 0), "peak_bytes_in_use"), 4096);
        ck_assert_int_eq(number(row(h, "leases", 0), "peak_bytes_reserved"), 2097152);
        ck_assert_int_eq(number(row(h, "leases", 0), "num_refusals"), 3);
        ck_assert_int_eq(number(row(h, "leases", 0), "waited_ms"), 7);
        ck_assert_int_eq(number(row(h, "leases", 0), "duration_ms"), 130000);
        ck_assert_uint_eq(n_rows(h, "events"), 2);
        ck_assert_str_eq(json_string_value(json_object_get(row(h, "events", 0), "event")), "reload rejected");
        ck_assert_str_eq(json_string_value(json_object_get(row(h, "events", 0), "changes")), "a\nb\n");
        ck_assert(json_is_null(json_object_get(row(h, "events", 0), "user")));
        ck_assert_str_eq(json_string_value(json_object_get(row(h, "events", 1), "user")), "root");
        ck_assert(json_is_false(json_object_get(row(h, "sessions", 0), "running")));
        ck_assert_str_ne(json_string_value(json_object_get(row(h, "sessions", 0), "user")), "");
}

TEST(a_file_is_summed_up)
{
        json_t *h;

        write_text(path, records);
        h = read_history(&(struct history_texts){ .file = path });
        check_all(h);
        json_decref(h);
}

TEST(a_time_and_a_tenant_are_chosen)
{
        json_t *h;

        write_text(path, records);
        h = read_history(&(struct history_texts){ .file = path, .since = "@160", .tenant = "red" });
        ck_assert_uint_eq(n_rows(h, "sessions"), 1);
        ck_assert_uint_eq(n_rows(h, "tenants"), 1);
        ck_assert_int_eq(number(row(h, "tenants", 0), "peak_bytes_in_use"), 8192);
        ck_assert_uint_eq(n_rows(h, "refusals"), 0);
        ck_assert_uint_eq(n_rows(h, "leases"), 1);
        ck_assert_str_eq(json_string_value(json_object_get(row(h, "leases", 0), "lease")), "two");
        ck_assert_uint_eq(n_rows(h, "events"), 2);
        json_decref(h);
        /* The second interval begins in this time. */
        h = read_history(&(struct history_texts){ .file = path, .until = "@160", .tenant = "red" });
        ck_assert_uint_eq(n_rows(h, "sessions"), 1);
        ck_assert_int_eq(number(row(h, "sessions", 0), "peak_bytes_in_use"), 4096);
        ck_assert_int_eq(number(row(h, "tenants", 0), "peak_bytes_in_use"), 8192);
        json_decref(h);
        h = read_history(&(struct history_texts){ .file = path, .until = "@149", .tenant = "red" });
        ck_assert_int_eq(number(row(h, "tenants", 0), "peak_bytes_in_use"), 4096);
        json_decref(h);
}

/* The file that logrotate moved last is read, too. */
TEST(the_file_before_is_read)
{
        char before[128];
        json_t *h;

        snprintf(before, sizeof(before), "%s.1", path);
        write_text(before, SESSION("100", "red", "1", "4096"));
        write_text(path, SESSION("200", "red", "2", "8192"));
        h = read_history(&(struct history_texts){ .file = path });
        ck_assert_int_eq(number(h, "num_sessions"), 2);
        json_decref(h);
}

TEST(what_cannot_be_read_is_said)
{
        char error[HISTORY_ERROR_BYTES] = "";
        struct history *h;

        ck_assert_int_eq(history_open(&(struct history_texts){ .file = path }, &h, error), -ENOENT);
        ck_assert_ptr_nonnull(strstr(error, "No such file"));
        ck_assert_int_eq(history_open(&(struct history_texts){ .file = path, .since = "soon" }, &h, error),
                         -EINVAL);
        ck_assert_ptr_nonnull(strstr(error, "--since \"soon\""));
}

TEST(an_inverted_range_is_refused)
{
        char error[HISTORY_ERROR_BYTES] = "";
        struct history *h;

        write_text(path, records);
        ck_assert_int_eq(history_open(&(struct history_texts){ .file = path, .since = "now", .until = "-1d" },
                                      &h, error),
                         -EINVAL);
        ck_assert_str_eq(error, "--until is before --since");
        json_decref(read_history(&(struct history_texts){ .file = path, .since = "@160", .until = "@160" }));
}

/* Of the two files the one that failed is named. */
TEST(the_file_that_failed_is_named)
{
        char error[HISTORY_ERROR_BYTES] = "", before[128], sentence[256];
        struct history *h;

        write_text(path, records);
        snprintf(before, sizeof(before), "%s.1", path);
        ck_assert_int_eq(mkdir(before, 0700), 0);
        ck_assert_int_lt(history_open(&(struct history_texts){ .file = path }, &h, error), 0);
        snprintf(sentence, sizeof(sentence), "%s cannot be read: ", before);
        ck_assert_msg(strncmp(error, sentence, strlen(sentence)) == 0, "%s", error);
}

/* Of many sessions the largest are kept. */
TEST(sessions_are_bounded)
{
        FILE *f = fopen(path, "we");
        json_t *h;

        for (unsigned i = 0; i < 5000; i++)
                fprintf(f, "{\"time_us\":1000,\"record\":\"session\",\"tenant\":\"red\",\"peak_bytes\":%u}\n",
                        i * 7919 % 5000);
        fclose(f);
        h = read_history(&(struct history_texts){ .file = path });
        ck_assert_int_eq(number(h, "num_sessions"), 5000);
        ck_assert_uint_eq(n_rows(h, "sessions"), 1000);
        for (unsigned i = 0; i < 1000; i++)
                ck_assert_int_eq(number(row(h, "sessions", i), "peak_bytes_in_use"), 4999 - (json_int_t)i);
        json_decref(h);
}

/* A client chooses its program's name, and could move the cursor of a terminal. */
TEST(text_of_clients_is_escaped)
{
        char error[HISTORY_ERROR_BYTES], *text = NULL;
        struct history *h;
        size_t n;
        FILE *out;

        write_text(path,
                   "{\"time_us\":1000,\"record\":\"session\",\"tenant\":\"red\",\"program\":\"\\u001b[2J\","
                   "\"peak_bytes\":1}\n"
                   "{\"time_us\":1000,\"record\":\"refusal\",\"tenant\":\"red\",\"limit\":\"quota\","
                   "\"sentence\":\"\\u001b[2J\"}\n"
                   "{\"time_us\":1000,\"record\":\"drain\",\"message\":\"\\u001b[2J\"}\n");
        ck_assert_int_eq(history_open(&(struct history_texts){ .file = path }, &h, error), 0);
        out = open_memstream(&text, &n);
        ck_assert_int_eq(history_print(out, h), 0);
        fclose(out);
        ck_assert_ptr_null(strchr(text, '\x1b'));
        ck_assert_ptr_nonnull(strstr(text, "\\x1b[2J"));
        free(text);
        history_free(h);
}

/* ---- the journal --------------------------------------------------------- */

#if defined(HAVE_JOURNAL) && defined(JOURNAL_REMOTE)

/* In the journal's export format; the trusted field is as journald(8) would have written it. */
static void export_record(FILE *f, unsigned time_s, const char *unit, enum record_kind kind,
                          const char *fields)
{
        fprintf(f,
                "__REALTIME_TIMESTAMP=%u000000\n__MONOTONIC_TIMESTAMP=%u000000\n"
                "_BOOT_ID=0123456789abcdef0123456789abcdef\n_SYSTEMD_UNIT=%s\nMESSAGE_ID=%s\nMESSAGE=m\n%s\n",
                time_s, time_s, unit, record_kinds[kind].message_id, fields);
}

static void make_journal(const char *to)
{
        char from[128], command[512];
        FILE *f;

        snprintf(from, sizeof(from), "%s/export", folder);
        f = fopen(from, "we");
        ck_assert_ptr_nonnull(f);
        export_record(f, 100, "bfcd.service", RECORD_SESSION,
                      "BFCD_TENANT=red\nBFCD_SESSION=2\nBFCD_PEAK_BYTES=8192\nBFCD_PEAKS=train=8192 eval=0\n"
                      "BFCD_PROGRAM=train.py\n");
        export_record(f, 110, "evil.service", RECORD_SESSION,
                      "BFCD_TENANT=red\nBFCD_SESSION=3\nBFCD_PEAK_BYTES=9999999\n");
        export_record(f, 120, "bfcd.service", RECORD_USAGE,
                      "BFCD_TENANT=red\nBFCD_PARTITION=train\nBFCD_BEGIN_US=50000000\nBFCD_PEAK_BYTES=8192\n"
                      "BFCD_PEAK_RESERVED_BYTES=2097152\nBFCD_LIMIT_BYTES=4194304\n");
        export_record(f, 130, "evil.service", RECORD_RELOAD, "BFCD_RESULT=applied\n");
        export_record(f, 140, "bfcd.service", RECORD_START, "BFCD_VERSION=0.1.0\n");
        fclose(f);
        snprintf(command, sizeof(command), JOURNAL_REMOTE " --split-mode=none -o %s %s >/dev/null 2>&1", to,
                 from);
        ck_assert_int_eq(system(command), 0);
}

/* Anyone can send records to the journal; only those of the daemon's unit count. */
TEST(a_journal_is_read_and_forged_records_are_not)
{
        json_t *h;

        snprintf(path, sizeof(path), "%s/test.journal", folder);
        make_journal(path);
        h = read_history(&(struct history_texts){ .file = path });
        ck_assert_int_eq(number(h, "num_sessions"), 1);
        ck_assert_int_eq(number(row(h, "sessions", 0), "peak_bytes_in_use"), 8192);
        ck_assert_int_eq(number(json_object_get(row(h, "sessions", 0), "partitions"), "train"), 8192);
        ck_assert_int_eq(number(row(h, "tenants", 0), "peak_bytes_reserved"), 2097152);
        ck_assert_uint_eq(n_rows(h, "events"), 1);
        ck_assert_str_eq(json_string_value(json_object_get(row(h, "events", 0), "event")), "start");
        json_decref(h);
        h = read_history(&(struct history_texts){ .file = path, .since = "@130" });
        ck_assert_int_eq(number(h, "num_sessions"), 0);
        ck_assert_uint_eq(n_rows(h, "events"), 1);
        json_decref(h);
        h = read_history(&(struct history_texts){ .file = folder, .until = "@110" }); /* all of a folder */
        ck_assert_int_eq(number(h, "num_sessions"), 1);
        ck_assert_uint_eq(n_rows(h, "tenants"), 1);
        ck_assert_uint_eq(n_rows(h, "events"), 0);
        json_decref(h);
}

#else

TEST(a_journal_is_read_and_forged_records_are_not)
{
        printf("# skipped: there is no libsystemd or no systemd-journal-remote\n");
}

#endif
