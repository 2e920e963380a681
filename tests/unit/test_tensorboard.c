/* bfcctl tensorboard: CRCs, frames, event files and tags. The test of the same name beside the integration tests has a
 * daemon, and python/tests/frameworks has TensorBoard itself.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/suite.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ctl/event_file.h"
#include "ctl/tensorboard.h"
#include "ctl/tfrecord.h"

static char folder[64], error[EVENT_FILE_ERROR_MAX];

static void setup(void)
{
        strcpy(folder, "/tmp/test_tensorboard.XXXXXX");
        ck_assert_ptr_nonnull(mkdtemp(folder));
}

static void teardown(void)
{
        char command[128];

        snprintf(command, sizeof(command), "rm -r '%s'", folder);
        ck_assert_int_eq(system(command), 0);
}

FIXTURE(tensorboard, setup, teardown);

/* ---- CRC and frames ------------------------------------------------------------------ */

/* The examples of RFC 3720, B.4, and the one of the catalogues of CRCs. */
TEST(crc_of_known_bytes)
{
        uint8_t bytes[32];

        ck_assert_uint_eq(tfrecord_crc32c("123456789", 9), 0xe3069283);
        ck_assert_uint_eq(tfrecord_crc32c("", 0), 0);
        memset(bytes, 0, sizeof(bytes));
        ck_assert_uint_eq(tfrecord_crc32c(bytes, sizeof(bytes)), 0x8a9136aa);
        memset(bytes, 0xff, sizeof(bytes));
        ck_assert_uint_eq(tfrecord_crc32c(bytes, sizeof(bytes)), 0x62a8ab43);
        for (uint8_t i = 0; i < sizeof(bytes); i++)
                bytes[i] = i;
        ck_assert_uint_eq(tfrecord_crc32c(bytes, sizeof(bytes)), 0x46dd794e);
        for (uint8_t i = 0; i < sizeof(bytes); i++)
                bytes[i] = (uint8_t)(31 - i);
        ck_assert_uint_eq(tfrecord_crc32c(bytes, sizeof(bytes)), 0x113fdb5c);
}

/* A bit at a time. */
static uint32_t slow_crc(const uint8_t *data, size_t n_bytes)
{
        uint32_t crc = UINT32_MAX;

        for (size_t i = 0; i < n_bytes; i++) {
                crc ^= data[i];
                for (unsigned bit = 0; bit < 8; bit++)
                        crc = crc & 1 ? crc >> 1 ^ 0x82f63b78 : crc >> 1;
        }
        return ~crc;
}

TEST(crc_of_every_length)
{
        uint8_t bytes[2100];

        for (size_t i = 0; i < sizeof(bytes); i++)
                bytes[i] = (uint8_t)(i * 131 + (i >> 8));
        for (size_t n = 0; n < sizeof(bytes); n++)
                ck_assert_uint_eq(tfrecord_crc32c(bytes, n), slow_crc(bytes, n));
}

TEST(mask)
{
        ck_assert_uint_eq(tfrecord_mask(0), 0xa282ead8);
        ck_assert_uint_eq(tfrecord_mask(1), 0xa284ead8);
        ck_assert_uint_eq(tfrecord_mask(0x8000), 0xa282ead9);
        ck_assert_uint_eq(tfrecord_mask(0xffffffff), 0xa282ead7);
}

static uint64_t get_le(const uint8_t *at, unsigned n_bytes)
{
        uint64_t number = 0;

        while (n_bytes-- > 0)
                number = number << 8 | at[n_bytes];
        return number;
}

/* Checks the frame at `at` by the slow CRC; the length of its data. */
static size_t check_frame(const uint8_t *at, size_t n_left)
{
        size_t n;

        ck_assert_uint_ge(n_left, TFRECORD_HEAD_BYTES + TFRECORD_TAIL_BYTES);
        n = get_le(at, 8);
        ck_assert_uint_eq(get_le(at + 8, 4), tfrecord_mask(slow_crc(at, 8)));
        ck_assert_uint_ge(n_left - TFRECORD_HEAD_BYTES - TFRECORD_TAIL_BYTES, n);
        ck_assert_uint_eq(get_le(at + TFRECORD_HEAD_BYTES + n, 4),
                          tfrecord_mask(slow_crc(at + TFRECORD_HEAD_BYTES, n)));
        return n;
}

TEST(frame)
{
        uint8_t frame[TFRECORD_HEAD_BYTES + 300 + TFRECORD_TAIL_BYTES];

        memset(frame, 'x', sizeof(frame));
        tfrecord_seal(frame, 300);
        ck_assert_uint_eq(check_frame(frame, sizeof(frame)), 300);
        ck_assert_uint_eq(frame[TFRECORD_HEAD_BYTES], 'x');
        ck_assert_uint_eq(frame[TFRECORD_HEAD_BYTES + 299], 'x');
}

/* ---- files ---------------------------------------------------------------------------- */

#define TIME 1700000000.25

static struct event_file *create(const char *in)
{
        struct event_file *f = NULL;

        ck_assert_msg(event_file_create(in, TIME, &f, error) == 0, "%s", error);
        return f;
}

static void add(struct event_file *f, int64_t step, const char *tag, float number)
{
        Tensorboard__Event event = TENSORBOARD__EVENT__INIT;
        Tensorboard__Summary summary = TENSORBOARD__SUMMARY__INIT;
        Tensorboard__Summary__Value value = TENSORBOARD__SUMMARY__VALUE__INIT, *values[] = { &value };

        value.tag = (char *)(uintptr_t)tag;
        value.value_case = TENSORBOARD__SUMMARY__VALUE__VALUE_SIMPLE_VALUE;
        value.simple_value = number;
        summary.n_value = 1;
        summary.value = values;
        event.wall_time = TIME;
        event.step = step;
        event.what_case = TENSORBOARD__EVENT__WHAT_SUMMARY;
        event.summary = &summary;
        ck_assert_int_eq(event_file_add(f, &event), 0);
}

static size_t read_file(const struct event_file *f, uint8_t *bytes, size_t n_room)
{
        FILE *in = fopen(event_file_path(f), "re");
        size_t n;

        ck_assert_ptr_nonnull(in);
        n = fread(bytes, 1, n_room, in);
        ck_assert_uint_lt(n, n_room);
        fclose(in);
        return n;
}

/* The bytes by the numbers of the fields, as TensorFlow documents them. */
TEST(bytes_of_events)
{
        static const uint8_t first[] = "\x09\x00\x00\x10\x40\xfc\x54\xd9\x41\x1a\x0d"
                                       "brain.Event:2";
        static const uint8_t second[] = "\x09\x00\x00\x10\x40\xfc\x54\xd9\x41\x10\x07\x2a\x0c\x0a\x0a\x0a\x03"
                                        "a/b\x15\x00\x00\x00\x00";
        struct event_file *f = create(folder);
        uint8_t bytes[4096];
        size_t n = read_file(f, bytes, sizeof(bytes)), n_first = sizeof(first) - 1;
        const char *name = strrchr(event_file_path(f), '/') + 1;
        char expected[400], host[256];

        ck_assert_uint_eq(check_frame(bytes, n), n_first);
        ck_assert_mem_eq(bytes + TFRECORD_HEAD_BYTES, first, n_first);
        ck_assert_uint_eq(n, n_first + 16);
        add(f, 7, "a/b", 0);
        ck_assert_uint_eq(read_file(f, bytes, sizeof(bytes)), n); /* not before the flush */
        ck_assert_int_eq(event_file_flush(f, error), 0);
        ck_assert_uint_eq(read_file(f, bytes, sizeof(bytes)), n + 16 + sizeof(second) - 1);
        ck_assert_uint_eq(check_frame(bytes + n, 16 + sizeof(second) - 1), sizeof(second) - 1);
        ck_assert_mem_eq(bytes + n + TFRECORD_HEAD_BYTES, second, sizeof(second) - 1);

        ck_assert_int_eq(gethostname(host, sizeof(host)), 0);
        snprintf(expected, sizeof(expected), "events.out.tfevents.1700000000.%s.%d.0", host, (int)getpid());
        ck_assert_str_eq(name, expected);
        ck_assert_int_eq(event_file_close(f, error), 0);
}

TEST(folders_are_made_and_files_are_not_overwritten)
{
        char inner[128], file[160];
        struct event_file *f, *g;
        struct stat st;

        snprintf(inner, sizeof(inner), "%s/a/b//c/", folder);
        f = create(inner);
        g = create(inner);
        ck_assert_str_ne(event_file_path(f), event_file_path(g));
        ck_assert_str_eq(event_file_path(g) + strlen(event_file_path(g)) - 2, ".1");
        ck_assert_int_eq(stat(event_file_path(f), &st), 0);
        snprintf(file, sizeof(file), "%s", event_file_path(f));
        ck_assert_int_eq(event_file_close(f, error), 0);
        ck_assert_int_eq(event_file_close(g, error), 0);
        ck_assert_int_eq(event_file_create(file, TIME, &f, error), -ENOTDIR);
        ck_assert_msg(strstr(error, file) && strstr(error, "Not a directory"), "%s", error);
        strcat(file, "/x");
        ck_assert_int_eq(event_file_create(file, TIME, &f, error), -ENOTDIR);
}

/* A kill may cut the last record. Other files have no steps. */
TEST(last_step_of_a_folder)
{
        char other[160];
        struct event_file *f, *g;
        struct stat st;

        snprintf(other, sizeof(other), "%s/none", folder);
        ck_assert_int_eq(event_file_last_step(other), -1);
        snprintf(other, sizeof(other), "%s/tfevents-of-none", folder);
        ck_assert_int_eq(mkdir(other, 0700), 0);
        f = create(folder);
        ck_assert_int_eq(event_file_last_step(folder), -1);
        g = create(folder);
        add(f, 0, "a", 1);
        ck_assert_int_eq(event_file_flush(f, error), 0);
        ck_assert_int_eq(event_file_last_step(folder), 0);
        add(g, 7, "a", 1);
        add(g, 8, "a", 1);
        ck_assert_int_eq(event_file_flush(g, error), 0);
        ck_assert_int_eq(event_file_last_step(folder), 8);
        ck_assert_int_eq(stat(event_file_path(g), &st), 0);
        ck_assert_int_eq(truncate(event_file_path(g), st.st_size - 1), 0);
        ck_assert_int_eq(event_file_last_step(folder), 7);
        ck_assert_int_eq(event_file_close(f, error), 0);
        ck_assert_int_eq(event_file_close(g, error), 0);
}

static void limit_files(rlim_t n_bytes)
{
        struct rlimit limit;

        signal(SIGXFSZ, SIG_IGN);
        ck_assert_int_eq(getrlimit(RLIMIT_FSIZE, &limit), 0);
        limit.rlim_cur = n_bytes;
        ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
}

/* A file that may grow no more stands for a full disk: write() writes a part, then fails. */
TEST(a_write_that_fails_leaves_whole_records)
{
        struct event_file *f = create(folder);
        uint8_t bytes[4096];
        size_t n, n_after;

        add(f, 0, "a", 1);
        ck_assert_int_eq(event_file_flush(f, error), 0);
        n = read_file(f, bytes, sizeof(bytes));
        limit_files(n + 20);
        add(f, 1, "a", 2);
        add(f, 1, "b", 2);
        ck_assert_int_eq(event_file_flush(f, error), -EFBIG);
        ck_assert_msg(strstr(error, event_file_path(f)) && strstr(error, "File too large") &&
                              strstr(error, "What was written before is complete."),
                      "%s", error);
        n_after = read_file(f, bytes, sizeof(bytes));
        ck_assert_uint_eq(n_after, n);
        limit_files(RLIM_INFINITY);
        add(f, 2, "a", 3);
        ck_assert_int_eq(event_file_flush(f, error), 0);
        n_after = read_file(f, bytes, sizeof(bytes));
        check_frame(bytes + n, n_after - n); /* it follows at once */
        ck_assert_int_eq(event_file_close(f, error), 0);
}

TEST(no_file_where_not_even_the_first_event_fits)
{
        struct event_file *f = NULL;

        limit_files(10);
        ck_assert_int_eq(event_file_create(folder, TIME, &f, error), -EFBIG);
        limit_files(RLIM_INFINITY);
        ck_assert_int_eq(rmdir(folder), 0); /* it is empty */
        ck_assert_int_eq(mkdir(folder, 0700), 0);
}

/* ---- tags ------------------------------------------------------------------------------ */

TEST(tags)
{
        char tag[TENSORBOARD_TAG_MAX], longest[TENSORBOARD_TAG_MAX];

        ck_assert_int_eq(tensorboard_tag("train", "team-1.a_b", "BytesInUse", tag), 0);
        ck_assert_str_eq(tag, "train/team-1.a_b/BytesInUse");
        ck_assert_int_eq(tensorboard_tag("a/b", "c\n%\xff", "N", tag), 0);
        ck_assert_str_eq(tag, "a%2Fb/c%0A%25%FF/N");
        memset(longest, 'x', sizeof(longest));
        longest[sizeof(longest) - 1] = '\0';
        ck_assert_int_eq(tensorboard_tag(longest, "c", "N", tag), -EMSGSIZE);
        ck_assert_str_eq(tag, "a%2Fb/c%0A%25%FF/N");
}
