/* The recorded exchange of protocol version 1, and its messages; see v1.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/upgrade/v1.h"

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- the recording ------------------------------------------------------------ */

static void read_frame(struct v1_line *line, const char *hex)
{
        size_t n = strlen(hex) / 2, n_said;
        uint8_t *bytes = malloc(n + 1);

        ck_assert_ptr_nonnull(bytes);
        for (size_t i = 0; i < n; i++)
                ck_assert_int_eq(sscanf(hex + 2 * i, "%2hhx", &bytes[i]), 1);
        ck_assert_uint_gt(n, 4);
        n_said = bytes[0] | (size_t)bytes[1] << 8 | (size_t)bytes[2] << 16 | (size_t)bytes[3] << 24;
        ck_assert_uint_eq(n_said, n - 4);
        memmove(bytes, bytes + 4, n - 4);
        line->payload = bytes;
        line->n_bytes = n - 4;
}

static void read_line(char *text, struct v1_line *line)
{
        char *rest, *word = strtok_r(text, " \n", &rest);

        *line = (struct v1_line){ .connection = (unsigned)strtoul(word, NULL, 10) };
        ck_assert_uint_gt(line->connection, 0);
        ck_assert_uint_lt(line->connection, V1_MAX_CONNECTIONS);
        line->to_daemon = *strtok_r(NULL, " \n", &rest) == '>';
        word = strtok_r(NULL, " \n", &rest);
        if (strcmp(word, "hangs") == 0)
                return;
        read_frame(line, word);
        while ((word = strtok_r(NULL, " \n", &rest))) {
                ck_assert_uint_lt(line->n_fds, V1_MAX_FDS);
                if (strcmp(word, "fd:socket") != 0)
                        ck_assert_int_eq(sscanf(word, "fd:%zu:%x", &line->fds[line->n_fds].n_bytes,
                                                (unsigned *)&line->fds[line->n_fds].seals),
                                         2);
                line->n_fds++;
        }
}

struct v1 v1_read(const char *path)
{
        struct v1 f = { .n_lines = 0 };
        FILE *file = fopen(path, "re");
        char *text = NULL;
        size_t n = 0;

        ck_assert_msg(file != NULL, "no %s", path);
        while (getline(&text, &n, file) >= 0) {
                if (text[0] == '#' || text[0] == '\n')
                        continue;
                f.lines = realloc(f.lines, (f.n_lines + 1) * sizeof(*f.lines));
                ck_assert_ptr_nonnull(f.lines);
                read_line(text, &f.lines[f.n_lines++]);
        }
        free(text);
        fclose(file);
        ck_assert_uint_gt(f.n_lines, 0);
        return f;
}

void v1_free(struct v1 *f)
{
        for (size_t i = 0; i < f->n_lines; i++)
                free(f->lines[i].payload);
        free(f->lines);
        *f = (struct v1){ .n_lines = 0 };
}

/* ---- messages, field by field --------------------------------------------------- */

static const void *member(const ProtobufCMessage *m, unsigned offset)
{
        return (const char *)m + offset;
}

/* How many values of the field there are, and the first of them. */
static size_t values(const ProtobufCMessage *m, const ProtobufCFieldDescriptor *f, const void **ret)
{
        *ret = member(m, f->offset);
        if (f->label == PROTOBUF_C_LABEL_REPEATED) {
                *ret = *(const void *const *)*ret;
                return *(const size_t *)member(m, f->quantifier_offset);
        }
        if (f->flags & PROTOBUF_C_FIELD_FLAG_ONEOF)
                return *(const uint32_t *)member(m, f->quantifier_offset) == f->id;
        if (f->type == PROTOBUF_C_TYPE_MESSAGE)
                return *(const void *const *)*ret != NULL;
        return 1;
}

/* The i-th message of a field of messages. */
static ProtobufCMessage *message_at(const void *values, size_t i)
{
        return ((ProtobufCMessage *const *)values)[i];
}

/* By its own name or with its message's: "Hello.name". */
static bool is_spared(const ProtobufCMessageDescriptor *d, const char *name, const char *const *spared)
{
        char whole[128];

        snprintf(whole, sizeof(whole), "%s.%s", d->short_name, name);
        for (; *spared; spared++)
                if (strcmp(name, *spared) == 0 || strcmp(whole, *spared) == 0)
                        return true;
        return false;
}

static void assert_value(const ProtobufCMessage *m, const ProtobufCFieldDescriptor *f, const void *expected,
                         const void *actual, size_t i, const char *const *spared)
{
        const ProtobufCBinaryData *a = expected, *b = actual;
        uint64_t x = 0, y = 0;

        switch (f->type) {
        case PROTOBUF_C_TYPE_MESSAGE:
                v1_assert_equal(message_at(expected, i), message_at(actual, i), spared);
                return;
        case PROTOBUF_C_TYPE_STRING:
                ck_assert_str_eq(((char *const *)expected)[i], ((char *const *)actual)[i]);
                return;
        case PROTOBUF_C_TYPE_BYTES:
                ck_assert_uint_eq(a[i].len, b[i].len);
                if (a[i].len > 0) /* else data may be NULL */
                        ck_assert_int_eq(memcmp(a[i].data, b[i].data, a[i].len), 0);
                return;
        case PROTOBUF_C_TYPE_UINT64:
        case PROTOBUF_C_TYPE_FIXED64:
        case PROTOBUF_C_TYPE_DOUBLE:
                memcpy(&x, (const char *)expected + i * sizeof(x), sizeof(x));
                memcpy(&y, (const char *)actual + i * sizeof(y), sizeof(y));
                break;
        default:
                ck_assert(f->type == PROTOBUF_C_TYPE_UINT32 || f->type == PROTOBUF_C_TYPE_ENUM ||
                          f->type == PROTOBUF_C_TYPE_BOOL);
                x = ((const uint32_t *)expected)[i];
                y = ((const uint32_t *)actual)[i];
        }
        ck_assert_msg(x == y, "%s.%s is %llu, and was %llu", m->descriptor->short_name, f->name,
                      (unsigned long long)y, (unsigned long long)x);
}

void v1_assert_equal(const ProtobufCMessage *expected, const ProtobufCMessage *actual,
                     const char *const *spared)
{
        const ProtobufCMessageDescriptor *d = expected->descriptor;

        ck_assert_ptr_eq(d, actual->descriptor);
        for (unsigned i = 0; i < d->n_fields; i++) {
                const ProtobufCFieldDescriptor *f = &d->fields[i];
                const void *a, *b;
                size_t n_expected = values(expected, f, &a), n_actual = values(actual, f, &b);

                if (is_spared(d, f->name, spared))
                        continue;
                ck_assert_msg(n_expected == n_actual, "%s.%s is there %zu times, and was %zu", d->short_name,
                              f->name, n_actual, n_expected);
                for (size_t k = 0; k < n_expected; k++)
                        assert_value(expected, f, a, b, k, spared);
        }
}

/* Calls visit() with the message and every one in it. */
static void walk(ProtobufCMessage *m, void (*visit)(ProtobufCMessage *))
{
        for (unsigned i = 0; i < m->descriptor->n_fields; i++) {
                const ProtobufCFieldDescriptor *f = &m->descriptor->fields[i];
                const void *at;
                size_t n = f->type == PROTOBUF_C_TYPE_MESSAGE ? values(m, f, &at) : 0;

                for (size_t k = 0; k < n; k++)
                        walk(message_at(at, k), visit);
        }
        visit(m);
}

static void add_unknown(ProtobufCMessage *m)
{
        /* Field 5000 is a number, field 5001 bytes. */
        static const struct {
                uint32_t tag;
                ProtobufCWireType type;
                const char *data;
                size_t n;
        } later[] = { { 5000, PROTOBUF_C_WIRE_TYPE_VARINT, "\x2a", 1 },
                      { 5001, PROTOBUF_C_WIRE_TYPE_LENGTH_PREFIXED, "\x05later", 6 } };

        ck_assert_uint_eq(m->n_unknown_fields, 0);
        m->unknown_fields = calloc(2, sizeof(*m->unknown_fields));
        ck_assert_ptr_nonnull(m->unknown_fields);
        for (size_t i = 0; i < 2; i++) {
                ProtobufCMessageUnknownField *u = &m->unknown_fields[m->n_unknown_fields++];

                u->tag = later[i].tag;
                u->wire_type = later[i].type;
                u->len = later[i].n;
                u->data = malloc(u->len);
                ck_assert_ptr_nonnull(u->data);
                memcpy(u->data, later[i].data, u->len);
        }
}

void v1_add_unknown(ProtobufCMessage *message)
{
        walk(message, add_unknown);
}

static void assert_known(ProtobufCMessage *m)
{
        ck_assert_msg(m->n_unknown_fields == 0, "field %u is not one of %s", m->unknown_fields[0].tag,
                      m->descriptor->name);
}

void v1_assert_known(const ProtobufCMessage *message)
{
        walk((ProtobufCMessage *)(uintptr_t)message, assert_known);
}

/* ---- the schema ------------------------------------------------------------------ */

static void assert_enum(const ProtobufCEnumDescriptor *v1, const ProtobufCEnumDescriptor *today)
{
        for (unsigned i = 0; i < v1->n_values; i++) {
                const ProtobufCEnumValue *was = &v1->values[i];
                const ProtobufCEnumValue *is = protobuf_c_enum_descriptor_get_value(today, was->value);

                ck_assert_msg(is && strcmp(is->name, was->name) == 0, "%s: %d was %s", today->name,
                              was->value, was->name);
        }
}

void v1_assert_schema(const ProtobufCMessageDescriptor *v1, const ProtobufCMessageDescriptor *today)
{
        for (unsigned i = 0; i < v1->n_fields; i++) {
                const ProtobufCFieldDescriptor *was = &v1->fields[i];
                const ProtobufCFieldDescriptor *is = protobuf_c_message_descriptor_get_field(today, was->id);
                unsigned oneof = PROTOBUF_C_FIELD_FLAG_ONEOF;

                ck_assert_msg(is && strcmp(is->name, was->name) == 0, "%s: field %u was %s", today->name,
                              was->id, was->name);
                ck_assert_msg(is->type == was->type && is->label == was->label &&
                                      (is->flags & oneof) == (was->flags & oneof),
                              "%s.%s was of another type", today->name, was->name);
                if (was->type == PROTOBUF_C_TYPE_MESSAGE)
                        v1_assert_schema(was->descriptor, is->descriptor);
                if (was->type == PROTOBUF_C_TYPE_ENUM)
                        assert_enum(was->descriptor, is->descriptor);
        }
}
