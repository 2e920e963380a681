/* PyTorch's snapshots: the lifetimes that they tell of, and pickles that are refused.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/suite.h"

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "ctl/pickle.h"
#include "ctl/trace.h"

/* A pickle in the making, in protocol 4. */
struct maker {
        unsigned char bytes[1 << 19];
        size_t n;
};

static void put(struct maker *m, const void *bytes, size_t n)
{
        ck_assert_uint_le(m->n + n, sizeof(m->bytes));
        memcpy(m->bytes + m->n, bytes, n);
        m->n += n;
}

static void op(struct maker *m, unsigned char code)
{
        put(m, &code, 1);
}

static void string(struct maker *m, const char *text)
{
        unsigned char head[2] = { 0x8c, (unsigned char)strlen(text) };

        put(m, head, 2);
        put(m, text, strlen(text));
}

/* As Python does it: an address needs LONG1. */
static void integer(struct maker *m, uint64_t n)
{
        unsigned char bytes[10] = { 0x8a, 8 };

        memcpy(bytes + 2, &n, 8); /* the test runs on little-endian machines */
        put(m, bytes, sizeof(bytes));
}

static void begin(struct maker *m)
{
        *m = (struct maker){ .n = 0 };
        put(m, "\x80\x04", 2);
}

/* {"action": action, "addr": address, "size": n, "frames": [{"filename": "/x/model.py", "line": 12, "name": "f"}]} */
static void event(struct maker *m, const char *action, uint64_t address, uint64_t n_bytes)
{
        op(m, '}');
        op(m, '(');
        string(m, "action");
        string(m, action);
        string(m, "addr");
        integer(m, address);
        string(m, "size");
        integer(m, n_bytes);
        string(m, "frames");
        op(m, ']');
        op(m, '}');
        op(m, '(');
        string(m, "filename");
        string(m, "/x/model.py");
        string(m, "line");
        put(m, "K\x0c", 2);
        string(m, "name");
        string(m, "f");
        op(m, 'u');
        op(m, 'a');
        op(m, 'u');
}

static void block(struct maker *m, const char *state, uint64_t address, uint64_t n_bytes)
{
        op(m, '}');
        op(m, '(');
        string(m, "address");
        integer(m, address);
        string(m, "size");
        integer(m, n_bytes);
        string(m, "state");
        string(m, state);
        op(m, 'u');
}

static int read_made(const struct maker *m, struct trace **ret, char **ret_error)
{
        FILE *in = fmemopen((void *)(uintptr_t)m->bytes, m->n, "r");
        int r;

        ck_assert_ptr_nonnull(in);
        r = trace_read(in, "t.pickle", ret, ret_error);
        fclose(in);
        return r;
}

#define BASE UINT64_C(0x7f0000000000)

/* {"segments": [{"device": 0, "address": BASE, "blocks": [...]}], "device_traces": [[...]]} */
static void snapshot(struct maker *m)
{
        begin(m);
        op(m, '}');
        op(m, '(');
        string(m, "segments");
        op(m, ']');
        op(m, '}');
        op(m, '(');
        string(m, "device");
        put(m, "K\0", 2);
        string(m, "address");
        integer(m, BASE);
        string(m, "blocks");
        op(m, ']');
        op(m, '(');
        block(m, "active_allocated", BASE, 2048);
        block(m, "inactive", BASE + 2048, 512);
        block(m, "active_allocated", BASE + 4096, 777); /* from before the recording */
        op(m, 'e');
        op(m, 'u');
        op(m, 'a');
        string(m, "device_traces");
        op(m, ']');
        op(m, ']');
        op(m, '(');
        event(m, "segment_alloc", BASE, 1 << 20);
        event(m, "alloc", BASE, 512);
        event(m, "free_requested", BASE, 512);
        event(m, "alloc", BASE + 1024, 1024);
        event(m, "free_completed", BASE, 512);
        event(m, "alloc", BASE, 2048);
        event(m, "free_completed", BASE + 1024, 1024);
        event(m, "free_completed", BASE + 65536, 333); /* allocated before the recording */
        op(m, 'e');
        op(m, 'a');
        op(m, 'u');
        op(m, '.');
}

TEST(lifetimes)
{
        static const struct {
                uint64_t lower, upper, n_bytes;
        } expected[] = {
                { 0, TRACE_NO_END, 777 },  { 0, 6, 333 }, { 1, 3, 512 }, { 2, 5, 1024 },
                { 4, TRACE_NO_END, 2048 },
        };
        struct trace *t = NULL;
        char *error = NULL;
        struct maker m;

        snapshot(&m);
        ck_assert_msg(read_made(&m, &t, &error) == 0, "%s", error);
        ck_assert_uint_eq(t->n_buffers, 5);
        for (size_t i = 0; i < 5; i++) {
                ck_assert_uint_eq(t->buffers[i].lower, expected[i].lower);
                ck_assert_uint_eq(t->buffers[i].upper, expected[i].upper);
                ck_assert_uint_eq(t->buffers[i].n_bytes, expected[i].n_bytes);
                ck_assert_str_eq(t->labels[t->buffers[i].track], "cuda:0");
        }
        ck_assert_str_eq(t->labels[t->buffers[2].tag], "model.py:12 f");
        ck_assert_uint_eq(t->buffers[0].tag, 0);
        ck_assert_uint_eq(trace_peak(t, 1), 777 + 333 + 1024 + 2048);
        trace_free(t);
}

/* {"action": "oom", "device_free": 1, "size": n, "frames": []} */
static void refusal(struct maker *m, uint64_t n_bytes)
{
        op(m, '}');
        op(m, '(');
        string(m, "action");
        string(m, "oom");
        string(m, "device_free");
        put(m, "K\1", 2);
        string(m, "size");
        integer(m, n_bytes);
        string(m, "frames");
        op(m, ']');
        op(m, 'u');
}

/* The first is followed by an allocation, so the job went on. The second has ended it: its frees are those of an
 * exception. The second GPU is left out. */
TEST(refused_requests)
{
        struct trace *t = NULL;
        char *error = NULL;
        struct maker m;

        begin(&m);
        op(&m, '}');
        op(&m, '(');
        string(&m, "segments");
        op(&m, ']');
        string(&m, "device_traces");
        op(&m, ']');
        op(&m, '(');
        op(&m, ']');
        op(&m, '(');
        event(&m, "alloc", BASE, 1000);
        refusal(&m, 70000);
        event(&m, "alloc", BASE + 4096, 2000);
        refusal(&m, 5000);
        event(&m, "free_completed", BASE, 1000);
        op(&m, 'e');
        op(&m, ']');
        op(&m, '(');
        event(&m, "alloc", BASE, 1000);
        op(&m, 'e');
        op(&m, 'e');
        op(&m, 'u');
        op(&m, '.');
        ck_assert_msg(read_made(&m, &t, &error) == 0, "%s", error);
        ck_assert_uint_eq(t->n_buffers, 3);
        ck_assert_uint_eq(t->buffers[2].n_bytes, 5000);
        ck_assert_uint_eq(t->buffers[2].upper, t->buffers[2].lower + 1);
        ck_assert_uint_eq(trace_peak(t, 1), 1000 + 2000 + 5000);
        ck_assert_str_eq(t->left_out,
                         "other GPUs: 1, with 1 events; refused requests after which the job went on: 1");
        trace_free(t);
}

static void repeat(struct maker *m, unsigned char memo, size_t n)
{
        for (size_t i = 0; i < n; i++)
                put(m, (const unsigned char[]){ 'h', memo }, 2);
}

/* 60,000 times the same segment, which has 60,000 times the same block: no file has more items than bytes. */
TEST(the_same_blocks_many_times)
{
        struct trace *t = NULL;
        char *error = NULL;
        struct maker m;

        begin(&m);
        put(&m, "}(", 2);
        string(&m, "one");
        block(&m, "active_allocated", BASE, 2048);
        op(&m, 0x94);
        string(&m, "other");
        put(&m, "}(", 2);
        string(&m, "blocks");
        put(&m, "](", 2);
        repeat(&m, 0, 60000);
        put(&m, "eu\x94", 3);
        string(&m, "segments");
        put(&m, "](", 2);
        repeat(&m, 1, 60000);
        put(&m, "eu.", 3);
        ck_assert_int_eq(read_made(&m, &t, &error), -EINVAL);
        ck_assert_msg(strstr(error, "the same events or blocks several times"), "%s", error);
        free(error);
}

/* 10,000 events with the same list of 100,000 frames, as PyTorch writes it for events of one place. */
TEST(the_same_frames_many_times)
{
        static const char *const words[] = { "action", "alloc", "addr", "size", "frames" };
        struct trace *t = NULL;
        char *error = NULL;
        struct maker m;

        begin(&m);
        put(&m, "}(", 2);
        string(&m, "words");
        put(&m, "](", 2);
        for (size_t i = 0; i < 5; i++) {
                string(&m, words[i]);
                op(&m, 0x94);
        }
        put(&m, "}\x94](", 4);
        repeat(&m, 5, 100000);
        put(&m, "e\x94", 2);
        op(&m, 'e');
        string(&m, "segments");
        op(&m, ']');
        string(&m, "device_traces");
        put(&m, "]](", 3);
        for (uint32_t i = 0; i < 10000; i++) {
                put(&m, "}(h\0h\1h\2J", 9);
                put(&m, &i, 4); /* the test runs on little-endian machines */
                put(&m, "h\3K\1h\4h\6u", 9);
        }
        put(&m, "eau.", 4);
        ck_assert_msg(read_made(&m, &t, &error) == 0, "%s", error);
        ck_assert_uint_eq(t->n_buffers, 10000);
        trace_free(t);
}

/* Whatever is left out at the end, there is an error and nothing else. */
TEST(cut)
{
        struct maker m;
        size_t n;

        snapshot(&m);
        n = m.n;
        for (m.n = 1; m.n < n; m.n++) {
                struct trace *t = NULL;
                char *error = NULL;

                ck_assert_int_eq(read_made(&m, &t, &error), -EINVAL);
                ck_assert_ptr_null(t);
                ck_assert_ptr_nonnull(strstr(error, "ends early"));
                free(error);
        }
}

static const struct {
        const char *bytes;
        size_t n;
        const char *why;
} bad[] = {
#define BAD(bytes, why)                                                                                      \
        {                                                                                                    \
                bytes, sizeof(bytes) - 1, why                                                                \
        }
        BAD("\x80\x04"
            "cos\nsystem\n.",
            "GLOBAL"),
        BAD("\x80\x04\x8c\x02os\x8c\x06system\x93.", "GLOBAL"),
        BAD("\x80\x04N)R.", "REDUCE"),
        BAD("\x80\x04N}b.", "BUILD"),
        BAD("\x80\x04N)\x81.", "NEWOBJ"),
        BAD("\x80\x02Q.", "PERSID"),
        BAD("\x80\x04\x82\x01.", "EXT"),
        BAD("\x80\x04\x8f.", "an instruction that plain data does not need"),
        BAD("\x80\x01N.", "protocols 2 to 5"),
        BAD("\x80\x06N.", "protocols 2 to 5"),
        BAD("\x80\x04N", "ends early"),
        BAD("\x80\x04X\xff\xff\xff\xff", "ends early"),
        BAD("\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xff", "ends early"),
        BAD("\x80\x04\x8a\x09\1\1\1\1\1\1\1\1\1.", "64 bits"),
        BAD("\x80\x04.", "one value"),
        BAD("\x80\x04NN.", "one value"),
        BAD("\x80\x04(N.", "one value"),
        BAD("\x80\x04h\0.", "memo"),
        BAD("\x80\x04\x94.", "memo"),
        BAD("\x80\x04Nq\5.", "memo"),
        BAD("\x80\x04Ne.", "without a mark"),
        BAD("\x80\x04(Ne.", "without a list"),
        BAD("\x80\x04N(Ne.", "another type"),
        BAD("\x80\x04}(Nu.", "another type"),
        BAD("\x80\x04]](a.", "without a list"),
        BAD("\x80\x04t.", "without a mark"),
        BAD("\x80\x04\x86.", "too few"),
        BAD("\x80\x04N.", "no memory snapshot"),
        BAD("\x80\x04}\x8c\x08segmentsNs.", "no allocations"),
};

LOOP_TEST(refused, sizeof(bad) / sizeof(bad[0]))
{
        struct trace *t = NULL;
        char *error = NULL;
        struct maker m = { .n = 0 };

        put(&m, bad[_i].bytes, bad[_i].n);
        ck_assert_int_eq(read_made(&m, &t, &error), -EINVAL);
        ck_assert_ptr_null(t);
        ck_assert_msg(strstr(error, bad[_i].why), "\"%s\" lacks \"%s\"", error, bad[_i].why);
        free(error);
}

/* Keys are looked up one after the other, so their number is limited. i: at the limit, and above. */
LOOP_TEST(many_keys, 2)
{
        char bytes[8 + 4 * 129] = "\x80\x04}(";
        struct pickle *p = NULL;
        const char *why = "";
        size_t n = 4, at = 0;

        for (int i = 0; i < 128 + _i; i++, n += 3)
                memcpy(bytes + n, (const char[]){ 'K', (char)i, 'N' }, 3);
        memcpy(bytes + n, "u.", 2);
        ck_assert_int_eq(pickle_read(bytes, n + 2, &p, &why, &at), _i == 0 ? 0 : -EINVAL);
        ck_assert(_i == 0 || strstr(why, "more keys"));
        pickle_free(p);
}

static struct pickle *unpickle(const char *bytes, size_t n)
{
        struct pickle *p = NULL;
        const char *why = "";
        size_t at = 0;

        ck_assert_msg(pickle_read(bytes, n, &p, &why, &at) == 0, "byte %zu: %s", at, why);
        return p;
}

/* What Python's pickle makes of (None, True, -2, 2**40, 1.5, "x", b"y", {"k": [1, 300, 70000]}). */
TEST(values)
{
        static const char bytes[] =
                "\x80\x04\x95\x3f\0\0\0\0\0\0\0(N\x88J\xfe\xff\xff\xff\x8a\6\0\0\0\0\0\1G?\xf8\0\0\0\0\0\0"
                "\x8c\1x\x94"
                "C\1y\x94}\x94\x8c\1k\x94]\x94(K\1M\x2c\1J\x70\x11\1\0est\x94.";
        struct pickle *p = unpickle(bytes, sizeof(bytes) - 1);
        const struct pickle_value *top = pickle_top(p), *list;
        int64_t n = 0;

        ck_assert_uint_eq(pickle_n_items(top), 8);
        ck_assert_int_eq(pickle_item(top, 0)->type, PICKLE_NONE);
        ck_assert_int_eq(pickle_item(top, 1)->type, PICKLE_BOOL);
        ck_assert(pickle_integer(pickle_item(top, 2), &n) && n == -2);
        ck_assert(pickle_integer(pickle_item(top, 3), &n) && n == INT64_C(1) << 40);
        ck_assert(pickle_item(top, 4)->type == PICKLE_FLOAT && pickle_item(top, 4)->real == 1.5);
        ck_assert(pickle_is_string(pickle_item(top, 5), "x") && pickle_is_string(pickle_item(top, 6), "y"));
        list = pickle_get(pickle_item(top, 7), "k");
        ck_assert_uint_eq(pickle_n_items(list), 3);
        ck_assert(pickle_integer(pickle_item(list, 1), &n) && n == 300);
        ck_assert(pickle_integer(pickle_item(list, 2), &n) && n == 70000);
        ck_assert_ptr_null(pickle_get(pickle_item(top, 7), "other"));
        ck_assert_ptr_null(pickle_get(list, "k"));
        pickle_free(p);
}

/* A list that is in itself is no trouble, because nobody walks it to its end. */
TEST(circle)
{
        struct pickle *p = unpickle("\x80\x04]\x94h\0a.", 8);

        ck_assert_ptr_eq(pickle_item(pickle_top(p), 0), pickle_top(p));
        pickle_free(p);
}
