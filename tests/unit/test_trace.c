/* Traces: what the parser takes and refuses, the order of events, peaks.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/suite.h"

#include <errno.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "ctl/trace.h"

static int read_bytes(const char *bytes, size_t n, struct trace **ret, char **ret_error)
{
        FILE *in = fmemopen((void *)bytes, n, "r");
        int r;

        ck_assert_ptr_nonnull(in);
        r = trace_read(in, "t.csv", ret, ret_error);
        fclose(in);
        return r;
}

static struct trace *read_good(const char *text)
{
        struct trace *t = NULL;
        char *error = NULL;
        int r = read_bytes(text, strlen(text), &t, &error);

        ck_assert_msg(r == 0, "%d: %s", r, error);
        ck_assert_ptr_null(error);
        return t;
}

static const char *label(const struct trace *t, uint32_t number)
{
        ck_assert_uint_lt(number, t->n_labels);
        return t->labels[number];
}

TEST(labels)
{
        struct trace *t = read_good("id,lower,upper,size,tag,partition,tenant\n"
                                    "0,1,2,3,weights,train,red\n"
                                    "1,1,2,3,,train,\n"
                                    "2,1,2,3,weights,,blue\n"
                                    "3,1,2,3,a\x01"
                                    "b,,\n");

        ck_assert_str_eq(label(t, t->buffers[0].tag), "weights");
        ck_assert_str_eq(label(t, t->buffers[0].track), "red/train");
        ck_assert_uint_eq(t->buffers[1].tag, 0);
        ck_assert_str_eq(label(t, t->buffers[1].track), "train");
        ck_assert_uint_eq(t->buffers[2].tag, t->buffers[0].tag);
        ck_assert_str_eq(label(t, t->buffers[2].track), "blue");
        ck_assert_str_eq(label(t, t->buffers[3].tag), "a?b");
        ck_assert_uint_eq(t->buffers[3].track, 0);
        trace_free(t);
        t = read_good("id,lower,upper,size,tenant\n0,1,2,3,red\n"); /* any of them, in any order */
        ck_assert_str_eq(label(t, t->buffers[0].track), "red");
        trace_free(t);
}

TEST(one_partition_of_several)
{
        struct trace *t = read_good("id,lower,upper,size,partition,tenant\n"
                                    "0,1,9,100,train,\n"
                                    "1,2,4,10,serve,red\n"
                                    "2,3,5,20,serve,\n"
                                    "3,6,7,7,,\n");

        ck_assert(t->has_partitions);
        ck_assert_str_eq(trace_partition(t, 0), "train");
        ck_assert_str_eq(trace_partition(t, 1), "serve");
        ck_assert_str_eq(trace_partition(t, 3), "");
        ck_assert_int_eq(trace_keep_partition(t, "red"), -ENOENT);
        ck_assert_uint_eq(t->n_buffers, 4);
        ck_assert_int_eq(trace_keep_partition(t, "serve"), 0);
        ck_assert_uint_eq(t->n_buffers, 2);
        ck_assert_uint_eq(t->n_events, 4);
        ck_assert_uint_eq(trace_peak(t, 1), 30);
        ck_assert_uint_eq(t->buffers[1].line, 4); /* still that of the file */
        trace_free(t);
        t = read_good("id,lower,upper,size,tenant\n0,1,2,3,red\n");
        ck_assert(!t->has_partitions);
        trace_free(t);
}

/* There is a bound, and what is beyond has one label. */
TEST(many_labels)
{
        uint32_t n = 2 * TRACE_MAX_LABELS;
        struct trace *t;
        char *text = NULL;
        size_t n_text;
        FILE *out = open_memstream(&text, &n_text);

        ck_assert_ptr_nonnull(out);
        fputs("id,lower,upper,size,tag\n", out);
        for (uint32_t i = 0; i < n; i++)
                fprintf(out, "0,0,1,1,tag %u\n", i);
        fputs("0,0,1,1,tag 7\n", out);
        fclose(out);
        t = read_good(text);
        ck_assert_uint_eq(t->n_labels, TRACE_MAX_LABELS);
        ck_assert_str_eq(label(t, t->buffers[n - 1].tag), "(other)");
        ck_assert_str_eq(label(t, t->buffers[n].tag), "tag 7");
        trace_free(t);
        free(text);
}

#define WRONG_HEADER                                                                                         \
        "the first line must be id,lower,upper,size, in any order, and other columns that are known"

LOOP_TEST(good_forms, 12)
{
        static const char *const texts[] = {
                "id,lower,upper,size\n0,1,2,3\n",
                "id,lower,upper,size\r\n0,1,2,3\r\n",
                "id,lower,upper,size\n0,1,2,3", /* no newline at the end */
                "\xef\xbb\xbfid,lower,upper,size\n0,1,2,3\n",
                "id,lower,upper,size\n\n0,1,2,3\n\r\n\n",
                "id,lower,upper,size\nany name of it,1,2,3\n",
                "id,lower,upper,size\n,1,2,3\n",
                "id,lower,upper,size\n0,0001,2,03\n",
                "size,upper,lower,id\n3,2,1,0\n",
                "buffer_id,start,end,size\n0,1,1,3\n",
                "buffer,begin,upper,size,offset\n0,1,2,3,1024\n",
                "id,lower,upper,size,alignment,gaps,offset\nb1,1,2,3,32,,0\n",
        };
        struct trace *t = read_good(texts[_i]);

        ck_assert_uint_eq(t->n_buffers, 1);
        ck_assert_uint_eq(t->n_events, 2);
        ck_assert_uint_eq(t->buffers[0].lower, 1);
        ck_assert_uint_eq(t->buffers[0].upper, 2);
        ck_assert_uint_eq(t->buffers[0].n_bytes, 3);
        ck_assert_ptr_null(t->left_out);
        trace_free(t);
}

/* What minimalloc can say and bfcd cannot do. */
TEST(left_out)
{
        struct trace *t = read_good("id,lower,upper,size,alignment,gaps\n"
                                    "0,1,9,3,512,\n"
                                    "1,1,9,3,1,2-3 4-5@0:8\n"
                                    "2,1,9,3,64,2-3\n");

        ck_assert_str_eq(t->left_out, "buffers with an alignment that does not divide 256 bytes: 1; "
                                      "buffers with gaps, in which they keep their memory: 2");
        trace_free(t);
}

static const struct {
        const char *text;
        const char *error;
} bad_forms[] = {
        { "\n", "t.csv: the file is empty; a trace starts with id,lower,upper,size" },
        { "id,lower,upper,size\n\n", "t.csv: no buffers after the header" },
        { "0,1,2,3\n", "t.csv:1: " WRONG_HEADER },
        { "id,size,lower\n0,1,2\n", "t.csv:1: " WRONG_HEADER },
        { "id,lower,start,size\n0,1,2,3\n", "t.csv:1: " WRONG_HEADER },
        { "id,lower,upper,size,flags\n0,1,2,3,x\n", "t.csv:2: flags is not a whole number" },
        { "id,lower,upper,size,offset\n0,1,2,3,-1\n", "t.csv:2: offset is not a whole number" },
        { "id,lower,upper,size,alignment\n0,1,2,3,\n", "t.csv:2: alignment is not a whole number" },
        { "\n\nid,lower,upper,size,x\n", "t.csv:3: " WRONG_HEADER },
        { "id,lower,upper,size,tag,tag\n", "t.csv:1: " WRONG_HEADER },
        { "id,lower,upper,size,tag\n0,1,2,3\n", "t.csv:2: not as many fields as the first line" },
        { "id,lower,upper,size\n0,1,2\n", "t.csv:2: not four fields; a line is id,lower,upper,size" },
        { "id,lower,upper,size\n0,1,2,3,4\n", "t.csv:2: not four fields; a line is id,lower,upper,size" },
        { "id,lower,upper,size\n0,1,2,3\n0,x,2,3\n", "t.csv:3: lower is not a whole number" },
        { "id,lower,upper,size\n0,1,,3\n", "t.csv:2: upper is not a whole number" },
        { "id,lower,upper,size\n0,1,2,3.5\n", "t.csv:2: size is not a whole number" },
        { "id,lower,upper,size\n0,1,2,-3\n", "t.csv:2: size is not a whole number" },
        { "id,lower,upper,size\n0,1,2, 3\n", "t.csv:2: size is not a whole number" },
        { "id,lower,upper,size\n0,1,2,0x3\n", "t.csv:2: size is not a whole number" },
        { "id,lower,upper,size\n0,1,2,\n", "t.csv:2: size is not a whole number" },
        { "id,lower,upper,size\n0,2,2,3\n", "t.csv:2: upper is not above lower; a buffer needs a lifetime" },
        { "id,lower,upper,size\n0,3,2,3\n", "t.csv:2: upper is not above lower; a buffer needs a lifetime" },
        { "id,lower,upper,size\r\n\r\n0,1,2,0\r\n", "t.csv:3: size is 0; a buffer has at least one byte" },
        { "id,lower,upper,size\n0,1,2,9223372036854775808\n", "t.csv:2: size is 2^63 or more" },
        { "id,lower,upper,size\n0,1,18446744073709551616,3\n", "t.csv:2: a number of more than 64 bits" },
};

LOOP_TEST(bad, sizeof(bad_forms) / sizeof(bad_forms[0]))
{
        struct trace *t = (struct trace *)1;
        char *error = NULL;

        ck_assert_int_eq(read_bytes(bad_forms[_i].text, strlen(bad_forms[_i].text), &t, &error), -EINVAL);
        ck_assert_ptr_eq(t, (struct trace *)1); /* untouched */
        ck_assert_str_eq(error, bad_forms[_i].error);
        free(error);
}

TEST(zero_byte)
{
        static const char bytes[] = "id,lower,upper,size\n0,1,2,3\0\n";
        struct trace *t = NULL;
        char *error = NULL;

        ck_assert_int_eq(read_bytes(bytes, sizeof(bytes) - 1, &t, &error), -EINVAL);
        ck_assert_str_eq(error, "t.csv:2: a zero byte; the file is not text");
        free(error);
}

/* A recording was cut, at any byte of its last line. */
TEST(an_incomplete_last_line)
{
        static const char whole[] = "id,lower,upper,size\n1,1,0000000000000000004,10\n";
        static const char last[] = "3,3,9223372036854775807,1000\n";
        char text[sizeof(whole) + sizeof(last)];

        for (size_t n = 0; n < sizeof(last); n++) {
                struct trace *t;

                snprintf(text, sizeof(text), "%s%.*s", whole, (int)n, last);
                t = read_good(text);
                ck_assert_uint_eq(t->n_buffers, n == sizeof(last) - 1 ? 2 : 1);
                ck_assert_uint_eq(t->cut_line, n > 0 && n < sizeof(last) - 1 ? 3 : 0);
                trace_free(t);
        }
}

/* Damage is another thing than an incomplete line. */
LOOP_TEST(damage_at_the_end, 5)
{
        static const struct {
                const char *text;
                const char *error;
        } bad_ends[] = {
                { "id,lower,upper,size\n0,1,2,3\n0,1,2,x", "t.csv:3: size is not a whole number" },
                { "id,lower,upper,size\n0,1,2,3\n0,1,2,3,",
                  "t.csv:3: not four fields; a line is id,lower,upper,size" },
                { "id,lower,upper,size\n0,1,2,3\n0,1\n",
                  "t.csv:3: not four fields; a line is id,lower,upper,size" },
                { "id,lower,upper,size\n0,1,2", "t.csv: no complete buffers after the header" },
                { "id,lower,up", "t.csv:1: " WRONG_HEADER },
        };
        struct trace *t = NULL;
        char *error = NULL;

        ck_assert_int_eq(read_bytes(bad_ends[_i].text, strlen(bad_ends[_i].text), &t, &error), -EINVAL);
        ck_assert_str_eq(error, bad_ends[_i].error);
        free(error);
}

TEST(unreadable)
{
        FILE *in = fopen("/", "re"); /* opens, and every read fails */
        struct trace *t = NULL;
        char *error = NULL;

        ck_assert_ptr_nonnull(in);
        ck_assert_int_eq(trace_read(in, "/", &t, &error), -EIO);
        ck_assert_str_eq(error, "/: the file cannot be read");
        fclose(in);
        free(error);
}

TEST(order)
{
        /* At 5: two frees in the file's order, then two allocations likewise;
         * two lines with one id are two buffers. */
        struct trace *t = read_good("id,lower,upper,size\n"
                                    "a,5,9,1\n"
                                    "a,1,5,2\n"
                                    "b,5,6,4\n"
                                    "c,0,5,8\n");
        static const struct trace_event expected[] = {
                { 3, false }, { 1, false }, { 1, true }, { 3, true },
                { 0, false }, { 2, false }, { 2, true }, { 0, true },
        };

        ck_assert_uint_eq(t->n_events, 8);
        for (size_t i = 0; i < 8; i++) {
                ck_assert_uint_eq(t->events[i].buffer, expected[i].buffer);
                ck_assert_int_eq(t->events[i].is_free, expected[i].is_free);
        }
        ck_assert_uint_eq(t->buffers[3].line, 5);
        ck_assert_uint_eq(trace_peak(t, 1), 10);
        ck_assert_uint_eq(trace_peak(t, 256), 512);
        trace_free(t);
}

TEST(peak_saturates)
{
        struct trace *t = read_good("id,lower,upper,size\n"
                                    "0,0,1,9223372036854775807\n"
                                    "1,0,1,9223372036854775807\n"
                                    "2,0,1,9223372036854775807\n");

        ck_assert_uint_eq(trace_peak(t, 256), UINT64_MAX);
        trace_free(t);
}

TEST(scale)
{
        struct trace *t = read_good("id,lower,upper,size\n0,0,1,1\n1,0,1,1000\n2,0,1,4611686018427387904\n");

        ck_assert_int_eq(trace_scale(t, 2), -ERANGE);
        ck_assert_int_eq(trace_scale(t, 0), -ERANGE);
        ck_assert_int_eq(trace_scale(t, -1), -ERANGE);
        ck_assert_int_eq(trace_scale(t, (double)INFINITY), -ERANGE);
        ck_assert_int_eq(trace_scale(t, (double)NAN), -ERANGE);
        ck_assert_uint_eq(t->buffers[1].n_bytes, 1000); /* as it was */
        ck_assert_int_eq(trace_scale(t, 1), 0);
        ck_assert_uint_eq(t->buffers[2].n_bytes, 4611686018427387904u);
        ck_assert_int_eq(trace_scale(t, 0.0625), 0);
        ck_assert_uint_eq(t->buffers[0].n_bytes, 1); /* rounded up, never to 0 */
        ck_assert_uint_eq(t->buffers[1].n_bytes, 63);
        trace_free(t);
}
