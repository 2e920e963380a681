/* SPDX-License-Identifier: Apache-2.0 */
/* Records: their two encodings, and their destinations when these are slow, absent or moved. */
#include "daemon/record/records.h"
#include "tests/suite.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define TIMEOUT_MS 120000

static int saved_stderr, log_ends[2], journal;
static char folder[] = "/tmp/bfcd-records-XXXXXX", socket_path[64], file_path[64], moved_path[64];

static uint64_t dropped_before;

/* In this test: the count is the process's. */
static uint64_t n_dropped(void)
{
        return records_count_dropped() - dropped_before;
}

static void setup(void)
{
        dropped_before = records_count_dropped();
        strcpy(folder, "/tmp/bfcd-records-XXXXXX");
        ck_assert_ptr_nonnull(mkdtemp(folder));
        snprintf(socket_path, sizeof(socket_path), "%s/journal", folder);
        snprintf(file_path, sizeof(file_path), "%s/records.jsonl", folder);
        snprintf(moved_path, sizeof(moved_path), "%s/records.jsonl.1", folder);
        journal = -1;
        unsetenv("JOURNAL_STREAM");
        saved_stderr = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0);
        ck_assert_int_eq(pipe2(log_ends, O_CLOEXEC | O_DIRECT | O_NONBLOCK), 0);
        ck_assert_int_eq(dup2(log_ends[1], STDERR_FILENO), STDERR_FILENO);
        log_open(LOG_LEVEL_INFO);
}

static void teardown(void)
{
        records_close(TIMEOUT_MS);
        dup2(saved_stderr, STDERR_FILENO);
        close(saved_stderr);
        close(log_ends[0]);
        close(log_ends[1]);
        unsetenv("JOURNAL_STREAM");
        if (journal >= 0)
                close(journal);
        unlink(socket_path);
        unlink(file_path);
        unlink(moved_path);
        ck_assert_int_eq(rmdir(folder), 0);
}

FIXTURE(records, setup, teardown);

static char text[1 << 20];

/* What the journal has; "": nothing. */
static const char *next_record(void)
{
        ssize_t n = recv(journal, text, sizeof(text) - 1, MSG_DONTWAIT);

        text[n < 0 ? 0 : n] = '\0';
        return text;
}

static const char *next_line(void)
{
        ssize_t n = read(log_ends[0], text, sizeof(text) - 1);

        text[n < 0 ? 0 : n] = '\0';
        return text;
}

static void journal_begin(void)
{
        struct sockaddr_un address = { .sun_family = AF_UNIX };

        strcpy(address.sun_path, socket_path);
        journal = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
        ck_assert_int_eq(bind(journal, (struct sockaddr *)&address, sizeof(address)), 0);
}

static const char *file_read(const char *path)
{
        FILE *f = fopen(path, "re");
        size_t n = f ? fread(text, 1, sizeof(text) - 1, f) : 0;

        if (f)
                fclose(f);
        text[n] = '\0';
        return text;
}

static unsigned count_lines(const char *path)
{
        unsigned n = 0;

        for (const char *s = file_read(path); *s; s++)
                n += *s == '\n';
        return n;
}

static bool wait_for_lines(const char *path, unsigned n)
{
        for (unsigned ms = 0; count_lines(path) < n && ms < TIMEOUT_MS; ms++)
                usleep(1000);
        return count_lines(path) == n;
}

/* ---- encodings ----------------------------------------------------------- */

static char encoded[RECORD_ENCODED_BYTES];

static void one_record(struct record *r)
{
        record_init(r, RECORD_SESSION);
        record_add_text(r, "tenant", "vision", 63);
        record_add_number(r, "peak_bytes", UINT64_MAX);
        record_add_size(r, "peaks", "train", 1024);
        record_add_size(r, "peaks", "eval", 0);
        record_add_text(r, "cgroup", NULL, 10);
        record_add_text(r, "ended", "process exited", 7);
}

TEST(the_journal_gets_fields)
{
        struct record r;
        size_t n;

        one_record(&r);
        n = record_encode_journal(&r, 6, "it ended", encoded);
        encoded[n] = '\0';
        ck_assert_str_eq(encoded, "MESSAGE=it ended\n"
                                  "MESSAGE_ID=ae9ec0408f7b4883b5e0d6da7889b24c\n"
                                  "PRIORITY=6\n"
                                  "SYSLOG_IDENTIFIER=bfcd\n"
                                  "BFCD_RECORD=session\n"
                                  "BFCD_TENANT=vision\n"
                                  "BFCD_PEAK_BYTES=9223372036854775807\n"
                                  "BFCD_PEAKS=train=1024 eval=0\n"
                                  "BFCD_ENDED=process\n");
}

/* A value with a newline has its length, so it cannot be taken for a field. */
TEST(no_value_is_a_field)
{
        static const char lie[] = "x\nBFCD_TENANT=other\n";
        static const char expected[] = "BFCD_PROGRAM\n\x14\0\0\0\0\0\0\0x\nBFCD_TENANT=other\n\n";
        struct record r;
        size_t n;

        record_init(&r, RECORD_REFUSAL);
        record_add_lines(&r, "program", lie, 64);
        n = record_encode_journal(&r, 5, "", encoded);
        ck_assert_uint_gt(n, sizeof(expected));
        ck_assert_mem_eq(encoded + n - (sizeof(expected) - 1), expected, sizeof(expected) - 1);
}

TEST(a_file_gets_a_line_of_json)
{
        struct record r;
        size_t n;

        one_record(&r);
        record_add_text(&r, "program", "a\"b\\c\nq\x01\xc3\xa4", 64);
        record_add_lines(&r, "changes", "\n\x01\xc3\xa4", 64);
        n = record_encode_json(&r, 1795459887776106, 6, "it ended", encoded);
        encoded[n] = '\0';
        ck_assert_str_eq(encoded,
                         "{\"time_us\":1795459887776106,\"record\":\"session\",\"priority\":6,"
                         "\"message\":\"it ended\",\"tenant\":\"vision\","
                         "\"peak_bytes\":9223372036854775807,\"peaks\":{\"train\":1024,\"eval\":0},"
                         "\"ended\":\"process\","
                         "\"program\":\"a\\\"b\\\\c?q???\",\"changes\":\"\\u000a\\u0001\\ufffd\\ufffd\"}\n");
}

/* Whatever is added, an encoded record has room. */
TEST(records_are_bounded)
{
        static char controls[3 * RECORD_TEXT_BYTES];
        struct record r;

        memset(controls, '\x01', sizeof(controls) - 1);
        record_init(&r, RECORD_SESSION);
        record_add_text(&r, "program", controls, SIZE_MAX);
        record_add_text(&r, "cgroup", controls, SIZE_MAX);
        record_add_number(&r, "pid", 1234); /* not a part of it */
        for (unsigned i = 0; i < 1000; i++)
                record_add_size(&r, "peaks", "a-partition", i);
        ck_assert_uint_eq(r.n_text, RECORD_TEXT_BYTES);
        ck_assert_uint_eq(r.n_fields, 2);
        ck_assert_uint_le(record_encode_json(&r, UINT64_MAX, 7, controls, encoded), sizeof(encoded));
        ck_assert_uint_le(record_encode_journal(&r, 7, controls, encoded), sizeof(encoded));

        record_init(&r, RECORD_SESSION);
        for (unsigned i = 0; i < 10000; i++)
                record_add_size(&r, "peaks", "a-partition", i);
        ck_assert_uint_le(r.n_text, RECORD_TEXT_BYTES);
        ck_assert_int_ne(r.text[r.n_text - 1], '='); /* the last one is whole */
        ck_assert_uint_le(record_encode_json(&r, UINT64_MAX, 7, "", encoded), sizeof(encoded));
}

/* ---- the journal --------------------------------------------------------- */

static void write_number(unsigned i)
{
        struct record r;

        record_init(&r, RECORD_SESSION);
        record_add_number(&r, "session", i);
        records_write(LOG_LEVEL_INFO, &r, "session %u ended", i);
}

TEST(records_go_to_the_journal)
{
        journal_begin();
        ck_assert_int_eq(records_open(socket_path, NULL), 0);
        ck_assert(records_are_open());
        write_number(1);
        ck_assert_ptr_nonnull(strstr(next_record(), "MESSAGE=session 1 ended\n"));
        ck_assert_ptr_nonnull(strstr(text, "\nBFCD_SESSION=1\n"));
        ck_assert_str_eq(next_line(), "info: session 1 ended\n");
        ck_assert_uint_eq(n_dropped(), 0);
}

/* Nothing waits for the reader. What fits into the queue comes later, in order; the rest is counted. */
TEST(a_slow_journal_loses_records)
{
        unsigned n = 0, n_sent = 0, n_seen = 0, i, last = 0;

        journal_begin();
        ck_assert_int_eq(records_open(socket_path, NULL), 0);
        while (n_dropped() < 10 && n < 1000000) {
                write_number(++n);
                (void)next_line();
        }
        ck_assert_uint_eq(n_dropped(), 10);
        ck_assert(records_are_queued());
        n_sent = n - 10;
        while (n_seen < n_sent) {
                const char *at = strstr(next_record(), "\nBFCD_SESSION=");

                if (!at) {
                        records_flush();
                        continue;
                }
                ck_assert_int_eq(sscanf(at, "\nBFCD_SESSION=%u\n", &i), 1);
                ck_assert_uint_eq(i, last + 1);
                last = i;
                n_seen++;
        }
        ck_assert(!records_are_queued());
        ck_assert_str_eq(next_record(), "");
        write_number(++n);
        ck_assert_ptr_nonnull(strstr(next_record(), "MESSAGE=session "));
}

TEST(without_a_journal_records_are_counted)
{
        ck_assert_int_eq(records_open(socket_path, NULL), 0);
        write_number(1);
        write_number(2);
        ck_assert_uint_eq(n_dropped(), 2);
        ck_assert(!records_are_queued());
        journal_begin(); /* it starts later */
        write_number(3);
        ck_assert_ptr_nonnull(strstr(next_record(), "MESSAGE=session 3 ended\n"));
        ck_assert_uint_eq(n_dropped(), 2);
}

static void log_to_the_journal(void)
{
        struct stat st;
        char stream[64];

        ck_assert_int_eq(fstat(STDERR_FILENO, &st), 0);
        snprintf(stream, sizeof(stream), "%llu:%llu", (unsigned long long)st.st_dev,
                 (unsigned long long)st.st_ino);
        setenv("JOURNAL_STREAM", stream, 1);
        log_open(LOG_LEVEL_INFO);
}

/* One event, one entry of the journal; a line where the record was lost. */
TEST(a_record_replaces_the_line)
{
        log_to_the_journal();
        journal_begin();
        ck_assert_int_eq(records_open(socket_path, NULL), 0);
        write_number(1);
        ck_assert_ptr_nonnull(strstr(next_record(), "MESSAGE=session 1 ended\n"));
        ck_assert_str_eq(next_line(), "");
        ck_assert_int_eq(unlink(socket_path), 0);
        close(journal);
        journal = -1;
        write_number(2);
        ck_assert_str_eq(next_line(), "<6>session 2 ended\n");
        ck_assert_uint_eq(n_dropped(), 1);
}

TEST(records_go_nowhere_by_default)
{
        ck_assert_int_eq(records_open(NULL, NULL), 0);
        ck_assert(!records_are_open());
        write_number(1);
        ck_assert_str_eq(next_line(), "info: session 1 ended\n");
        ck_assert_uint_eq(n_dropped(), 0);
}

/* ---- the file ------------------------------------------------------------ */

TEST(records_go_to_a_file)
{
        ck_assert_int_eq(records_open(NULL, file_path), 0);
        write_number(1);
        ck_assert(wait_for_lines(file_path, 1));
        ck_assert_int_eq(rename(file_path, moved_path), 0);
        write_number(2); /* into another file */
        ck_assert(wait_for_lines(file_path, 1));
        write_number(3);
        records_close(TIMEOUT_MS);
        ck_assert(!records_are_open());
        ck_assert_uint_eq(count_lines(moved_path), 1);
        ck_assert_uint_eq(count_lines(file_path), 2);
        ck_assert_ptr_nonnull(strstr(file_read(file_path), ",\"session\":3}\n"));
        ck_assert_uint_eq(n_dropped(), 0);
}

/* One without a reader would stop the thread. */
TEST(a_fifo_is_refused)
{
        uint64_t n = n_dropped();

        ck_assert_int_eq(mkfifo(file_path, 0600), 0);
        ck_assert_int_eq(records_open(NULL, file_path), 0);
        write_number(1);
        for (unsigned ms = 0; n_dropped() == n && ms < TIMEOUT_MS; ms++)
                usleep(1000);
        ck_assert_uint_eq(n_dropped(), n + 1);
}

/* Half a line is taken back, so that the next record is one. */
TEST(a_full_disk_costs_whole_records)
{
        struct rlimit old, small;
        struct stat st;
        unsigned n_begun = 0;

        signal(SIGXFSZ, SIG_IGN);
        ck_assert_int_eq(records_open(NULL, file_path), 0);
        write_number(1);
        ck_assert(wait_for_lines(file_path, 1));
        ck_assert_int_eq(stat(file_path, &st), 0);
        ck_assert_int_eq(getrlimit(RLIMIT_FSIZE, &old), 0);
        small = (struct rlimit){ (rlim_t)st.st_size + 20, old.rlim_max };
        ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &small), 0);
        write_number(2);
        for (unsigned ms = 0; n_dropped() == 0 && ms < TIMEOUT_MS; ms++)
                usleep(1000);
        ck_assert_uint_eq(n_dropped(), 1);
        ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &old), 0);
        for (unsigned ms = 0; count_lines(file_path) < 2 && ms < TIMEOUT_MS; ms += 100) {
                write_number(3); /* those of the next second are dropped, too */
                usleep(100000);
        }
        records_close(TIMEOUT_MS);
        ck_assert_uint_ge(count_lines(file_path), 2);
        for (const char *at = file_read(file_path); (at = strstr(at, "{\"time_us\"")); at++)
                n_begun++;
        ck_assert_uint_eq(n_begun, count_lines(file_path));
        ck_assert_ptr_null(strstr(file_read(file_path), "\"session\":2}"));
}

TEST(a_file_that_appears_later_is_used)
{
        char path[96];

        snprintf(path, sizeof(path), "%s/sub/records.jsonl", folder);
        ck_assert_int_eq(records_open(NULL, path), 0);
        write_number(1);
        for (unsigned ms = 0; n_dropped() == 0 && ms < TIMEOUT_MS; ms++)
                usleep(1000);
        ck_assert_uint_eq(n_dropped(), 1);
        *strrchr(path, '/') = '\0';
        ck_assert_int_eq(mkdir(path, 0700), 0);
        path[strlen(path)] = '/';
        for (unsigned ms = 0; count_lines(path) == 0 && ms < TIMEOUT_MS; ms += 100) {
                write_number(2); /* those of the next second are dropped, too */
                (void)next_line();
                usleep(100000);
        }
        ck_assert_uint_ge(count_lines(path), 1);
        records_close(TIMEOUT_MS);
        unlink(path);
        *strrchr(path, '/') = '\0';
        ck_assert_int_eq(rmdir(path), 0);
}
