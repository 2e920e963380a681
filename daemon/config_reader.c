/* SPDX-License-Identifier: Apache-2.0 */
/* What every part of the grammar needs: saying what is wrong and where, the
 * shapes of nodes, and arrays that grow. See config_reader.h. */
#include "daemon/config_reader.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

/* ---- saying what is wrong ------------------------------------------------- */

const char *config_show_bytes(struct config_shown *s, const char *text, size_t n_bytes)
{
        size_t n = n_bytes <= 60 ? n_bytes : 57;

        /* not in the middle of a character */
        while (n < n_bytes && n > 0 && ((unsigned char)text[n] & 0xc0) == 0x80)
                n--;
        for (size_t i = 0; i < n; i++) {
                unsigned char c = (unsigned char)text[i];
                bool is_c1 = i > 0 && (unsigned char)text[i - 1] == 0xc2 && c >= 0x80 && c < 0xa0;

                s->text[i] = c < 0x20 || c == 0x7f ? '?' : text[i];
                if (is_c1)
                        s->text[i - 1] = s->text[i] = '?';
        }
        memcpy(s->text + n, n < n_bytes ? "..." : "", n < n_bytes ? 4 : 1);
        return s->text;
}

const char *config_show_size(struct config_shown *s, uint64_t n_bytes)
{
        static const char *const units[] = { "B", "KiB", "MiB", "GiB", "TiB" };
        size_t unit = 0;

        while (n_bytes != 0 && n_bytes % 1024 == 0 && unit + 1 < sizeof(units) / sizeof(units[0])) {
                n_bytes /= 1024;
                unit++;
        }
        snprintf(s->text, sizeof(s->text), "%llu%s", (unsigned long long)n_bytes, n_bytes ? units[unit] : "");
        return s->text;
}

const char *config_show_about(struct config_shown *s, uint64_t n_bytes)
{
        uint64_t mib = n_bytes >> 20, gib = mib >> 10;

        if (gib < 10)
                snprintf(s->text, sizeof(s->text), "%lluMiB", (unsigned long long)mib);
        else
                snprintf(s->text, sizeof(s->text), "%lluGiB", (unsigned long long)(gib + (mib % 1024 != 0)));
        return s->text;
}

static void put_place(struct config_reader *r, const char *file, size_t line, size_t column)
{
        for (; *file; file++)
                fputc((unsigned char)*file < 0x20 || *file == 0x7f ? '?' : *file, r->errors);
        fprintf(r->errors, ":%zu:%zu: ", line, column);
}

static void put_sentence(struct config_reader *r, const struct yamltree_node *at, const char *format,
                         va_list args) __attribute__((format(printf, 3, 0)));
static void put_sentence(struct config_reader *r, const struct yamltree_node *at, const char *format,
                         va_list args)
{
        put_place(r, at->file, at->line, at->column);
        vfprintf(r->errors, format, args);
        fputc('\n', r->errors);
}

void config_fail(struct config_reader *r, const struct yamltree_node *at, const char *format, ...)
{
        va_list args;

        r->has_failed = true;
        va_start(args, format);
        put_sentence(r, at, format, args);
        va_end(args);
}

void config_fail_machine(struct config_reader *r, const struct yamltree_node *at, const char *format, ...)
{
        va_list args;

        r->lacks_gpu = true;
        va_start(args, format);
        put_sentence(r, at, format, args);
        va_end(args);
}

static void keep_warning(struct config_reader *r, const struct yamltree_node *at, const char *format,
                         va_list args) __attribute__((format(printf, 3, 0)));
static void keep_warning(struct config_reader *r, const struct yamltree_node *at, const char *format,
                         va_list args)
{
        struct config_warning *w;

        w = config_grow(r, (void **)&r->warnings, r->n_warnings, sizeof(*w));
        if (!w)
                return;
        *w = (struct config_warning){ at, r->n_warnings, NULL };
        if (vasprintf(&w->sentence, format, args) < 0) {
                r->is_out_of_memory = true;
                return;
        }
        r->n_warnings++;
}

void config_warn(struct config_reader *r, const struct yamltree_node *at, const char *format, ...)
{
        va_list args;

        va_start(args, format);
        keep_warning(r, at, format, args);
        va_end(args);
}

void config_advise(struct config_reader *r, const struct yamltree_node *at, const char *format, ...)
{
        va_list args;

        if (r->has_failed || r->lacks_gpu || (r->machine && r->machine->serves))
                return;
        va_start(args, format);
        keep_warning(r, at, format, args);
        va_end(args);
}

static int compare_numbers(size_t a, size_t b)
{
        return (a > b) - (a < b);
}

static int compare_warnings(const void *left, const void *right)
{
        const struct config_warning *a = left, *b = right;
        int r = strcmp(a->at->file, b->at->file);

        if (r == 0)
                r = compare_numbers(a->at->line, b->at->line);
        if (r == 0)
                r = compare_numbers(a->at->column, b->at->column);
        return r ? r : compare_numbers(a->number, b->number);
}

void config_put_warnings(struct config_reader *r)
{
        if (r->n_warnings > 0 && r->machine && r->machine->is_strict)
                r->has_failed = true;
        if (r->n_warnings > 0)
                qsort(r->warnings, r->n_warnings, sizeof(*r->warnings), compare_warnings);
        for (size_t i = 0; i < r->n_warnings; i++) {
                const struct config_warning *w = &r->warnings[i];

                put_place(r, w->at->file, w->at->line, w->at->column);
                fprintf(r->errors, "warning: %s\n", w->sentence);
                free(w->sentence);
        }
        free(r->warnings);
        r->warnings = NULL;
        r->n_warnings = 0;
}

void config_fail_tree(void *userdata, const char *file, size_t line, size_t column, const char *sentence)
{
        struct config_reader *r = userdata;

        r->has_failed = true;
        put_place(r, file, line, column);
        fprintf(r->errors, "%s\n", sentence);
}

/* ---- shapes --------------------------------------------------------------- */

static const char *shape(const struct yamltree_node *n)
{
        switch (n->type) {
        case YAMLTREE_SEQUENCE:
                return "a list";
        case YAMLTREE_MAPPING:
                return "a mapping";
        default:
                return n->n_text == 0 && !n->is_quoted ? "nothing" : "a single value";
        }
}

bool config_want(struct config_reader *r, const struct yamltree_node *n, enum yamltree_type type,
                 const char *what)
{
        static const char *const wanted[] = {
                [YAMLTREE_SCALAR] = "a single value",
                [YAMLTREE_SEQUENCE] = "a list",
                [YAMLTREE_MAPPING] = "a mapping of keys to values",
        };

        if (n->type == YAMLTREE_BAD) {
                r->has_failed = true;
                return false;
        }
        if (n->type == type && (type != YAMLTREE_SCALAR || n->n_text > 0))
                return true;
        if (n->type == type)
                config_fail(r, n, "%s is empty", what);
        else
                config_fail(r, n, "%s must be %s, this is %s", what, wanted[type], shape(n));
        return false;
}

bool config_is_text(const struct yamltree_node *n, const char *text)
{
        return n->n_text == strlen(text) && memcmp(n->text, text, n->n_text) == 0;
}

static void fail_key(struct config_reader *r, const struct yamltree_node *key, const char *what,
                     const char *const known[])
{
        char list[256];
        size_t n = 0;

        for (size_t i = 0; known[i] && n < sizeof(list); i++)
                n += (size_t)snprintf(list + n, sizeof(list) - n, "%s%s", i ? ", " : "", known[i]);
        config_fail(r, key, "unknown key '%s' in %s; known here: %s", SHOW(key), what, list);
}

bool config_read_mapping(struct config_reader *r, const struct yamltree_node *n, const char *what,
                         const char *const known[], const struct yamltree_node *values[CONFIG_MAX_KEYS])
{
        const struct yamltree_node *keys[CONFIG_MAX_KEYS] = { NULL };

        memset(values, 0, CONFIG_MAX_KEYS * sizeof(values[0]));
        if (!config_want(r, n, YAMLTREE_MAPPING, what))
                return false;
        for (const struct yamltree_node *key = n->first_child; key; key = key->next->next) {
                size_t i = 0;

                if (key->type != YAMLTREE_SCALAR) {
                        config_want(r, key, YAMLTREE_SCALAR, "a key");
                        continue;
                }
                while (known[i] && !config_is_text(key, known[i]))
                        i++;
                if (!known[i]) {
                        fail_key(r, key, what, known);
                } else if (keys[i]) {
                        config_fail(r, key, "key '%s' is defined twice, first on line %zu", known[i],
                                    keys[i]->line);
                } else {
                        keys[i] = key;
                        values[i] = key->next;
                }
        }
        return true;
}

/* ---- what grows ----------------------------------------------------------- */

char *config_copy_text(struct config_reader *r, const char *text)
{
        char *copy = strdup(text);

        if (!copy)
                r->is_out_of_memory = true;
        return copy;
}

void *config_grow(struct config_reader *r, void **array, size_t n, size_t element_bytes)
{
        unsigned char *bigger = reallocarray(*array, n + 1, element_bytes);

        if (!bigger) {
                r->is_out_of_memory = true;
                return NULL;
        }
        *array = bigger;
        memset(bigger + n * element_bytes, 0, element_bytes);
        return bigger + n * element_bytes;
}
