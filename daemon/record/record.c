/* Records; see record.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/record/record.h"

#include <assert.h>
#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/number.h"

void record_init(struct record *r, enum record_kind kind)
{
        r->kind = kind;
        r->n_fields = r->n_text = 0;
}

static void add_field(struct record *r, const char *key, enum record_type type, const char *value,
                      size_t n_bytes)
{
        size_t n_room = sizeof(r->text) - r->n_text;

        assert(r->n_fields < RECORD_FIELDS);
        if (r->n_fields == RECORD_FIELDS)
                return;
        n_bytes = n_bytes < n_room ? n_bytes : n_room;
        memcpy(r->text + r->n_text, value, n_bytes);
        r->fields[r->n_fields++] = (struct record_field){ key, type, r->n_text, n_bytes };
        r->n_text += n_bytes;
}

void record_add_text(struct record *r, const char *key, const char *value, size_t n_max)
{
        size_t at = r->n_text;

        record_add_lines(r, key, value, n_max);
        for (; at < r->n_text; at++) /* journalctl -x prints fields as they are, and users choose some */
                if ((unsigned char)r->text[at] < ' ' || (unsigned char)r->text[at] > '~')
                        r->text[at] = '?';
}

void record_add_lines(struct record *r, const char *key, const char *value, size_t n_max)
{
        if (value)
                add_field(r, key, RECORD_TEXT, value, strnlen(value, n_max));
}

void record_add_number(struct record *r, const char *key, uint64_t value)
{
        char text[24];
        int n = snprintf(text, sizeof(text), "%" PRIu64, min_u64(value, INT64_MAX));

        if ((size_t)n <= sizeof(r->text) - r->n_text) /* half a number would be another one */
                add_field(r, key, RECORD_NUMBER, text, (size_t)n);
}

void record_add_size(struct record *r, const char *key, const char *name, uint64_t n_bytes)
{
        struct record_field *last = r->n_fields > 0 ? &r->fields[r->n_fields - 1] : NULL;
        bool continues = last && strcmp(last->key, key) == 0;
        char text[128];
        int n = snprintf(text, sizeof(text), "%s%s=%" PRIu64, continues ? " " : "", name, n_bytes);

        if (n < 0 || (size_t)n >= sizeof(text) || (size_t)n > sizeof(r->text) - r->n_text)
                return;
        if (!continues) {
                add_field(r, key, RECORD_SIZES, text, (size_t)n);
                return;
        }
        memcpy(r->text + r->n_text, text, (size_t)n);
        r->n_text += (size_t)n;
        last->n_bytes += (size_t)n;
}

/* ---- writing ------------------------------------------------------------- */

struct writer {
        char *to;
        size_t n;
};

static void put(struct writer *w, const void *bytes, size_t n_bytes)
{
        assert(n_bytes <= RECORD_ENCODED_BYTES - w->n);
        memcpy(w->to + w->n, bytes, n_bytes);
        w->n += n_bytes;
}

static void put_text(struct writer *w, const char *text)
{
        put(w, text, strlen(text));
}

/* ---- the journal --------------------------------------------------------- */

static void put_journal_value(struct writer *w, const char *value, size_t n_bytes)
{
        uint8_t length[8];

        if (memchr(value, '\n', n_bytes)) {
                for (unsigned i = 0; i < sizeof(length); i++)
                        length[i] = (uint8_t)((uint64_t)n_bytes >> 8 * i);
                put(w, "\n", 1);
                put(w, length, sizeof(length));
        } else {
                put(w, "=", 1);
        }
        put(w, value, n_bytes);
        put(w, "\n", 1);
}

static void put_journal_field(struct writer *w, const char *key, const char *value, size_t n_bytes)
{
        put_text(w, RECORDS_PREFIX);
        for (; *key; key++) {
                char c = (char)toupper((unsigned char)*key);

                put(w, &c, 1);
        }
        put_journal_value(w, value, n_bytes);
}

size_t record_encode_journal(const struct record *r, int priority, const char *message,
                             char ret[static RECORD_ENCODED_BYTES])
{
        struct writer w = { .to = ret };
        char number[16];

        put_text(&w, "MESSAGE");
        put_journal_value(&w, message, strnlen(message, RECORD_MESSAGE_BYTES));
        put_text(&w, "MESSAGE_ID=");
        put_text(&w, record_kinds[r->kind].message_id);
        snprintf(number, sizeof(number), "%d", priority);
        put_text(&w, "\nPRIORITY=");
        put_text(&w, number);
        put_text(&w, "\nSYSLOG_IDENTIFIER=bfcd\n");
        put_journal_field(&w, "record", record_kinds[r->kind].name, strlen(record_kinds[r->kind].name));
        for (size_t i = 0; i < r->n_fields; i++)
                put_journal_field(&w, r->fields[i].key, r->text + r->fields[i].at, r->fields[i].n_bytes);
        return w.n;
}

/* ---- JSON ---------------------------------------------------------------- */

static void put_json_string(struct writer *w, const char *text, size_t n_bytes)
{
        put(w, "\"", 1);
        for (size_t i = 0; i < n_bytes; i++) {
                unsigned char c = (unsigned char)text[i];
                char escape[8];

                if (c == '"' || c == '\\')
                        put(w, "\\", 1);
                if (c >= ' ' && c <= '~') {
                        put(w, &text[i], 1);
                        continue;
                }
                snprintf(escape, sizeof(escape), "\\u%04x", c < 0x80 ? (unsigned)c : 0xfffdu);
                put_text(w, escape);
        }
        put(w, "\"", 1);
}

/* "train=1024 eval=0" */
static void put_json_sizes(struct writer *w, const char *text, size_t n_bytes)
{
        const char *end = text + n_bytes;

        put(w, "{", 1);
        while (text < end) {
                const char *equals = memchr(text, '=', (size_t)(end - text)), *blank;

                blank = memchr(equals, ' ', (size_t)(end - equals));
                blank = blank ? blank : end;
                put_json_string(w, text, (size_t)(equals - text));
                put(w, ":", 1);
                put(w, equals + 1, (size_t)(blank - equals) - 1);
                text = blank < end ? blank + 1 : end;
                if (text < end)
                        put(w, ",", 1);
        }
        put(w, "}", 1);
}

static void put_json_key(struct writer *w, const char *key)
{
        put(w, ",", 1);
        put_json_string(w, key, strlen(key));
        put(w, ":", 1);
}

size_t record_encode_json(const struct record *r, uint64_t time_us, int priority, const char *message,
                          char ret[static RECORD_ENCODED_BYTES])
{
        struct writer w = { .to = ret };
        char head[96];

        snprintf(head, sizeof(head), "{\"time_us\":%" PRIu64 ",\"record\":\"%s\",\"priority\":%d", time_us,
                 record_kinds[r->kind].name, priority);
        put_text(&w, head);
        put_json_key(&w, "message");
        put_json_string(&w, message, strnlen(message, RECORD_MESSAGE_BYTES));
        for (size_t i = 0; i < r->n_fields; i++) {
                const struct record_field *f = &r->fields[i];

                put_json_key(&w, f->key);
                if (f->type == RECORD_NUMBER)
                        put(&w, r->text + f->at, f->n_bytes);
                else if (f->type == RECORD_SIZES)
                        put_json_sizes(&w, r->text + f->at, f->n_bytes);
                else
                        put_json_string(&w, r->text + f->at, f->n_bytes);
        }
        put_text(&w, "}\n");
        return w.n;
}
