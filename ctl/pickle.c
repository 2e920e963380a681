/* Pickles; see pickle.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Protocols 2 to 5, as PyTorch writes them. Values are in chunks that are freed together. */
#include "ctl/pickle.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define CHUNK_VALUES 4096u
#define MAX_VALUES   (UINT64_C(1) << 26)
#define MAX_MARKS    64u  /* of nested tuples and lists whose items are on the stack */
#define MAX_KEYS     128u /* of a dictionary: they are looked up one after the other */

struct chunk {
        struct chunk *next;
        size_t n;
        struct pickle_value values[CHUNK_VALUES];
};

struct stack {
        struct pickle_value **items;
        size_t n, n_room;
};

struct pickle {
        struct chunk *chunks;
        uint64_t n_values;
        struct stack stack;
        struct stack memo; /* by number; NULL: none was put there */
        size_t marks[MAX_MARKS];
        size_t n_marks;
        const unsigned char *bytes;
        size_t n_bytes, at;
        const char *why;
        bool is_done;
};

/* ---- values --------------------------------------------------------------------- */

static int fail(struct pickle *p, const char *why)
{
        p->why = why;
        return -EINVAL;
}

static struct pickle_value *make(struct pickle *p, enum pickle_type type)
{
        struct chunk *c = p->chunks;
        struct pickle_value *v;

        if (!c || c->n == CHUNK_VALUES) {
                if (p->n_values >= MAX_VALUES)
                        return NULL;
                c = malloc(sizeof(*c));
                if (!c)
                        return NULL;
                c->next = p->chunks;
                c->n = 0;
                p->chunks = c;
        }
        p->n_values++;
        v = &c->values[c->n++];
        *v = (struct pickle_value){ .type = type };
        return v;
}

static int stack_reserve(struct stack *s, size_t n)
{
        size_t n_room = s->n_room ? s->n_room : 64;
        struct pickle_value **items;

        while (n_room < n)
                n_room *= 2;
        if (n_room == s->n_room)
                return 0;
        items = reallocarray(s->items, n_room, sizeof(*items));
        if (!items)
                return -ENOMEM;
        s->items = items;
        s->n_room = n_room;
        return 0;
}

static int push(struct pickle *p, struct pickle_value *v)
{
        if (!v || stack_reserve(&p->stack, p->stack.n + 1) < 0)
                return -ENOMEM;
        p->stack.items[p->stack.n++] = v;
        return 0;
}

/* Values that may be taken: those above the last mark. */
static size_t n_above(const struct pickle *p)
{
        return p->stack.n - (p->n_marks > 0 ? p->marks[p->n_marks - 1] : 0);
}

static int add_items(struct pickle_value *v, struct pickle_value *const *items, size_t n)
{
        if (n > v->list.n_room - v->list.n) {
                size_t n_room = v->list.n + n > 2 * v->list.n_room ? v->list.n + n : 2 * v->list.n_room;
                const struct pickle_value **all = reallocarray(v->list.items, n_room, sizeof(*all));

                if (!all)
                        return -ENOMEM;
                v->list.items = all;
                v->list.n_room = n_room;
        }
        for (size_t i = 0; i < n; i++)
                v->list.items[v->list.n++] = items[i];
        return 0;
}

/* ---- input ------------------------------------------------------------------------ */

static const unsigned char *take(struct pickle *p, uint64_t n)
{
        const unsigned char *bytes = p->bytes + p->at;

        if (n > p->n_bytes - p->at) {
                p->why = "the pickle ends early";
                return NULL;
        }
        p->at += n;
        return bytes;
}

/* Of 1 to 8 bytes, little-endian. */
static int take_number(struct pickle *p, size_t n, uint64_t *ret)
{
        const unsigned char *bytes = take(p, n);

        if (!bytes)
                return -EINVAL;
        *ret = 0;
        for (size_t i = 0; i < n; i++)
                *ret |= (uint64_t)bytes[i] << 8 * i;
        return 0;
}

static int push_string(struct pickle *p, size_t n_length)
{
        uint64_t n;
        const unsigned char *text;
        struct pickle_value *v;

        if (take_number(p, n_length, &n) < 0 || !(text = take(p, n)))
                return -EINVAL;
        v = make(p, PICKLE_STRING);
        if (v) {
                v->string.text = (const char *)text;
                v->string.n = n;
        }
        return push(p, v);
}

static int push_integer(struct pickle *p, enum pickle_type type, int64_t n)
{
        struct pickle_value *v = make(p, type);

        if (v)
                v->integer = n;
        return push(p, v);
}

/* An integer of n bytes; is_signed: as two's complement. */
static int push_number(struct pickle *p, uint64_t n, bool is_signed)
{
        uint64_t number;

        if (n > 8)
                return fail(p, "an integer of more than 64 bits");
        if (take_number(p, n, &number) < 0)
                return -EINVAL;
        if (is_signed && n > 0 && n < 8 && number >> (8 * n - 1))
                number |= UINT64_MAX << 8 * n;
        return push_integer(p, PICKLE_INTEGER, (int64_t)number);
}

static int push_long(struct pickle *p, size_t n_length)
{
        uint64_t n;

        return take_number(p, n_length, &n) < 0 ? -EINVAL : push_number(p, n, true);
}

static int push_float(struct pickle *p)
{
        const unsigned char *bytes = take(p, 8);
        struct pickle_value *v;
        uint64_t bits = 0;

        if (!bytes)
                return -EINVAL;
        for (size_t i = 0; i < 8; i++)
                bits = bits << 8 | bytes[i];
        v = make(p, PICKLE_FLOAT);
        if (v)
                memcpy(&v->real, &bits, sizeof(bits));
        return push(p, v);
}

/* ---- lists and dictionaries ---------------------------------------------------------- */

/* Moves the items above the mark, or n without one, into the value below, which is of this type. */
static int gather(struct pickle *p, enum pickle_type type, size_t n, bool has_mark)
{
        struct pickle_value *v;
        size_t below;
        int r;

        if (has_mark) {
                if (p->n_marks == 0)
                        return fail(p, "items without a mark");
                n = n_above(p);
                p->n_marks--;
        }
        if (n_above(p) < n + 1)
                return fail(p, "items without a list");
        below = p->stack.n - n - 1;
        v = p->stack.items[below];
        if (v->type != type || (type == PICKLE_DICT && n % 2 != 0))
                return fail(p, "items of another type than what they are put into");
        if (type == PICKLE_DICT && n > 2 * MAX_KEYS - v->list.n)
                return fail(p, "a dictionary with more keys than a memory snapshot has");
        r = add_items(v, p->stack.items + below + 1, n);
        p->stack.n = below + 1;
        return r;
}

/* The last n become a list; -1: all above the mark. */
static int tuple(struct pickle *p, int n)
{
        struct pickle_value *v = make(p, PICKLE_LIST);
        size_t n_items = (size_t)n;

        if (!v)
                return -ENOMEM;
        if (n < 0 && p->n_marks == 0)
                return fail(p, "a tuple without a mark");
        if (n < 0) {
                n_items = n_above(p);
                p->n_marks--;
        }
        if (n_above(p) < n_items)
                return fail(p, "a tuple with too few items");
        if (n_items > 0 && add_items(v, p->stack.items + p->stack.n - n_items, n_items) < 0)
                return -ENOMEM;
        p->stack.n -= n_items;
        return push(p, v);
}

static int mark(struct pickle *p)
{
        if (p->n_marks == MAX_MARKS)
                return fail(p, "the data is nested too deeply");
        p->marks[p->n_marks++] = p->stack.n;
        return 0;
}

/* ---- the memo -------------------------------------------------------------------------- */

static int memo_put(struct pickle *p, uint64_t number)
{
        /* Python numbers them one after the other. */
        if (n_above(p) == 0 || number > p->memo.n)
                return fail(p, "a memo of nothing, or out of order");
        if (stack_reserve(&p->memo, p->memo.n + 1) < 0)
                return -ENOMEM;
        p->memo.items[number] = p->stack.items[p->stack.n - 1];
        p->memo.n += number == p->memo.n;
        return 0;
}

static int memo_get(struct pickle *p, uint64_t number)
{
        return number < p->memo.n ? push(p, p->memo.items[number]) : fail(p, "a memo that was not made");
}

static int with_number(struct pickle *p, size_t n, int (*then)(struct pickle *p, uint64_t number))
{
        uint64_t number;

        return take_number(p, n, &number) < 0 ? -EINVAL : then(p, number);
}

static int check_protocol(struct pickle *p, uint64_t version)
{
        return version >= 2 && version <= 5 ? 0 : fail(p, "protocols 2 to 5 of pickle are read");
}

static int ignore_number(struct pickle *p, uint64_t number)
{
        (void)p;
        (void)number;
        return 0;
}

static int stop(struct pickle *p)
{
        if (p->n_marks > 0 || p->stack.n != 1)
                return fail(p, "the pickle does not end with one value");
        p->is_done = true;
        return 0;
}

/* ---- instructions ------------------------------------------------------------------------ */

static int refuse(struct pickle *p, unsigned char code)
{
        switch (code) {
        case 'c':
        case 0x93:
                return fail(
                        p,
                        "it names a function or class (GLOBAL); only plain data is read, and nothing is run");
        case 'R':
        case 'b':
        case 'i':
        case 'o':
        case 0x81:
        case 0x92:
                return fail(
                        p,
                        "it makes an object by a call (REDUCE, BUILD, INST, OBJ or NEWOBJ); only plain data "
                        "is read, and nothing is run");
        case 'P':
        case 'Q':
                return fail(p, "it refers to another file (PERSID); only plain data is read");
        case 0x82:
        case 0x83:
        case 0x84:
                return fail(p, "it uses the registry of extensions (EXT); only plain data is read");
        default:
                return fail(p, "an instruction that plain data does not need");
        }
}

static int run_scalar(struct pickle *p, unsigned char code)
{
        switch (code) {
        case 'N':
                return push(p, make(p, PICKLE_NONE));
        case 0x88:
        case 0x89:
                return push_integer(p, PICKLE_BOOL, code == 0x88);
        case 'J':
                return push_number(p, 4, true);
        case 'K':
                return push_number(p, 1, false);
        case 'M':
                return push_number(p, 2, false);
        case 0x8a:
                return push_long(p, 1);
        case 0x8b:
                return push_long(p, 4);
        case 'G':
                return push_float(p);
        case 0x8c:
        case 'C':
                return push_string(p, 1);
        case 'X':
        case 'B':
                return push_string(p, 4);
        case 0x8d:
        case 0x8e:
                return push_string(p, 8);
        default:
                return refuse(p, code);
        }
}

static int run_one(struct pickle *p, unsigned char code)
{
        switch (code) {
        case 0x80:
                return with_number(p, 1, check_protocol);
        case 0x95: /* the length of a frame */
                return with_number(p, 8, ignore_number);
        case '(':
                return mark(p);
        case '}':
                return push(p, make(p, PICKLE_DICT));
        case ']':
        case ')':
                return push(p, make(p, PICKLE_LIST));
        case 'a':
                return gather(p, PICKLE_LIST, 1, false);
        case 'e':
                return gather(p, PICKLE_LIST, 0, true);
        case 's':
                return gather(p, PICKLE_DICT, 2, false);
        case 'u':
                return gather(p, PICKLE_DICT, 0, true);
        case 't':
                return tuple(p, -1);
        case 0x85:
        case 0x86:
        case 0x87:
                return tuple(p, code - 0x84);
        case 0x94:
                return memo_put(p, p->memo.n);
        case 'q':
                return with_number(p, 1, memo_put);
        case 'r':
                return with_number(p, 4, memo_put);
        case 'h':
                return with_number(p, 1, memo_get);
        case 'j':
                return with_number(p, 4, memo_get);
        case '.':
                return stop(p);
        default:
                return run_scalar(p, code);
        }
}

int pickle_read(const void *bytes, size_t n_bytes, struct pickle **ret, const char **ret_why, size_t *ret_at)
{
        struct pickle *p = calloc(1, sizeof(*p));
        int r = p ? 0 : -ENOMEM;

        if (!p)
                return r;
        p->bytes = bytes;
        p->n_bytes = n_bytes;
        while (r == 0 && !p->is_done) {
                const unsigned char *code;

                *ret_at = p->at;
                code = take(p, 1);
                r = code ? run_one(p, *code) : -EINVAL;
        }
        if (r == -ENOMEM && p->n_values >= MAX_VALUES) {
                r = -E2BIG;
                p->why = "it has too many values";
        }
        if (r < 0) {
                *ret_why = p->why;
                pickle_free(p);
                return r;
        }
        *ret = p;
        return 0;
}

struct pickle *pickle_free(struct pickle *p)
{
        struct chunk *next;

        if (!p)
                return NULL;
        for (struct chunk *c = p->chunks; c; c = next) {
                next = c->next;
                for (size_t i = 0; i < c->n; i++)
                        if (c->values[i].type == PICKLE_LIST || c->values[i].type == PICKLE_DICT)
                                free(c->values[i].list.items);
                free(c);
        }
        free(p->stack.items);
        free(p->memo.items);
        free(p);
        return NULL;
}

/* ---- looking ----------------------------------------------------------------------------- */

const struct pickle_value *pickle_top(const struct pickle *p)
{
        return p->stack.items[0];
}

uint64_t pickle_n_values(const struct pickle *p)
{
        return p->n_values;
}

bool pickle_is_string(const struct pickle_value *v, const char *text)
{
        return v && v->type == PICKLE_STRING && v->string.n == strlen(text) &&
               memcmp(v->string.text, text, v->string.n) == 0;
}

const struct pickle_value *pickle_get(const struct pickle_value *v, const char *key)
{
        for (size_t i = 0; v && v->type == PICKLE_DICT && i + 1 < v->list.n; i += 2)
                if (pickle_is_string(v->list.items[i], key))
                        return v->list.items[i + 1];
        return NULL;
}

size_t pickle_n_items(const struct pickle_value *v)
{
        return v && v->type == PICKLE_LIST ? v->list.n : 0;
}

const struct pickle_value *pickle_item(const struct pickle_value *v, size_t i)
{
        return v->list.items[i];
}

bool pickle_integer(const struct pickle_value *v, int64_t *ret)
{
        if (!v || v->type != PICKLE_INTEGER)
                return false;
        *ret = v->integer;
        return true;
}
