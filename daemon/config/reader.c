/* SPDX-License-Identifier: Apache-2.0 */
/* Reading by the schema: messages, the shapes of nodes, mappings, lists and arrays. */
#include "daemon/config/reader.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

/* ---- messages --------------------------------------------------------------- */

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

const char *config_show_first(struct config_first *s, const struct yamltree_node *first,
                              const struct yamltree_node *second)
{
        if (strcmp(first->file, second->file) == 0)
                snprintf(s->text, sizeof(s->text), "on line %zu", first->line);
        else
                snprintf(s->text, sizeof(s->text), "in %s on line %zu",
                         config_show_bytes(&(struct config_shown){ { 0 } }, first->file, strlen(first->file)),
                         first->line);
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

bool config_say(struct config_reader *r, enum config_severity said, const struct yamltree_node *at,
                const char *format, ...)
{
        struct config_warning w = { at, r->n_warnings, NULL };
        va_list args;
        int n;

        if (said == CONFIG_ADVISES && (r->has_failed || r->lacks_gpu || (r->machine && r->machine->serves)))
                return false;
        if (at->type == YAMLTREE_BAD) {
                r->has_failed = true; /* its message was written */
                return false;
        }
        r->has_failed = r->has_failed || said == CONFIG_FAILS;
        r->lacks_gpu = r->lacks_gpu || said == CONFIG_FAILS_HERE;
        va_start(args, format);
        n = vasprintf(&w.sentence, format, args);
        va_end(args);
        if (n < 0) {
                r->is_out_of_memory = true;
                return false;
        }
        if (said >= CONFIG_WARNS && config_append(r, (void **)&r->warnings, &r->n_warnings, &w, sizeof(w)))
                return false;
        if (said < CONFIG_WARNS) {
                put_place(r, at->file, at->line, at->column);
                fprintf(r->errors, "%s\n", w.sentence);
        }
        free(w.sentence);
        return false;
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

const char *config_list_names(struct config_names *ret, const void *elements, size_t n_elements,
                              size_t element_bytes, size_t offset)
{
        size_t n = 0;

        ret->text[0] = '\0';
        for (size_t i = 0; i < n_elements && n < sizeof(ret->text); i++) {
                const char *element = (const char *)elements + i * element_bytes + offset;

                n += (size_t)snprintf(ret->text + n, sizeof(ret->text) - n, "%s%s", i ? ", " : "",
                                      *(const char *const *)element);
        }
        if (n >= sizeof(ret->text))
                memcpy(ret->text + sizeof(ret->text) - 4, "...", 4);
        return ret->text;
}

/* The field that begins `key`, as in "limit 25%" and "limit:25%", which YAML reads as keys without a value. */
static bool find_unseparated(const struct config_field *fields, const struct yamltree_node *key, size_t *ret)
{
        for (size_t i = 0; fields[i].key; i++) {
                size_t n = strlen(fields[i].key);

                if (!key->is_quoted && key->n_text > n && memcmp(key->text, fields[i].key, n) == 0 &&
                    (key->text[n] == ' ' || key->text[n] == ':')) {
                        *ret = i;
                        return true;
                }
        }
        return false;
}

/* What to write instead of a key that earlier versions knew. NULL: it is not one of them. */
static const char *find_removed(const struct config_section *s, const struct yamltree_node *key)
{
        static const struct {
                const struct config_section *in;
                const char *key, *instead;
        } removed[] = {
                { &CONFIG_QUOTA, "keep",
                  "a quota keeps no memory for its next job any more: write standby into the device, twice as "
                  "much, and remove keep" },
                { &CONFIG_TENANT, "max_sessions",
                  "a tenant has as many sessions as its quotas together: write max_sessions into the quotas" },
                { &CONFIG_PARTITION, "huge_pages",
                  "host memory has pages of 2MiB where the kernel can make them, and of 4KiB where "
                  "/sys/kernel/mm/transparent_hugepage/shmem_enabled is deny: remove huge_pages" },
                { &CONFIG_TIMEOUTS, "read",
                  "a client may leave replies unread for 30s, which cannot be configured any more: remove read" },
                { &CONFIG_TIMEOUTS, "release",
                  "a client has 5s to unmap memory, which cannot be configured any more: remove release" },
        };

        for (size_t i = 0; i < sizeof(removed) / sizeof(removed[0]); i++)
                if (removed[i].in == s && config_is_text(key, removed[i].key))
                        return removed[i].instead;
        return NULL;
}

static void fail_key(struct config_reader *r, const struct yamltree_node *key, struct config_place *p)
{
        static const struct yamltree_node unread = { .type = YAMLTREE_BAD, .file = "" };
        const struct config_field *fields = p->section->fields;
        struct config_names names;
        const char *instead;
        size_t n = 0;

        if (find_unseparated(fields, key, &n)) {
                config_fail(r, key, "': ' is missing after '%s'; write it as in '%s: VALUE'", fields[n].key,
                            fields[n].key);
                p->at[n] = p->at[n] ? p->at[n] : &unread; /* it is there, so no message says that it is not */
                return;
        }
        while (fields[n].key)
                n++;
        instead = find_removed(p->section, key);
        if (instead)
                config_fail(r, key, "%s", instead);
        else
                config_fail(r, key, "unknown key '%s' in %s; known here: %s", SHOW(key), p->what,
                            config_list_names(&names, fields, n, sizeof(fields[0]),
                                              offsetof(struct config_field, key)));
}

bool config_read_mapping(struct config_reader *r, struct config_place *p)
{
        const struct config_field *fields = p->section->fields;
        const struct yamltree_node *keys[CONFIG_MAX_KEYS] = { NULL };

        if (!config_want(r, p->node, YAMLTREE_MAPPING, p->what))
                return false;
        for (const struct yamltree_node *key = p->node->first_child; key; key = key->next->next) {
                size_t i = 0;

                if (key->type != YAMLTREE_SCALAR) {
                        config_want(r, key, YAMLTREE_SCALAR, "a key");
                        continue;
                }
                while (fields[i].key && !config_is_text(key, fields[i].key))
                        i++;
                if (!fields[i].key) {
                        fail_key(r, key, p);
                } else if (keys[i]) {
                        config_fail(r, key, "key '%s' is defined twice, first %s", fields[i].key,
                                    FIRST(keys[i], key));
                } else {
                        keys[i] = key;
                        p->at[i] = key->next;
                }
        }
        return true;
}

static bool read_elements(struct config_reader *r, struct config_place *p, const struct config_field *field,
                          const struct yamltree_node *n)
{
        bool all = true;

        if (!n || !config_want(r, n, YAMLTREE_SEQUENCE, field->key)) {
                if (!n && field->missing)
                        config_fail(r, p->node, "%s", field->missing);
                return !n && !field->missing;
        }
        if (!n->first_child && field->empty)
                return config_fail(r, n, "%s", field->empty);
        for (const struct yamltree_node *e = n->first_child; e; e = e->next)
                all = field->read_element(r, e, p) && all;
        return all;
}

bool config_read_list(struct config_reader *r, struct config_place *p, const struct config_field *field,
                      const struct yamltree_node *n)
{
        if (read_elements(r, p, field, n))
                return true;
        if (field->lacks)
                *(bool *)((char *)r + field->lacks) = true;
        return false;
}

static bool read_field(struct config_reader *r, struct config_place *p, const struct config_field *field,
                       const struct yamltree_node *n)
{
        struct config_place inner;

        if (n && field->not_for_gpu && p->kind == DEVICE_KIND_GPU)
                return config_fail(r, n, "%s", field->not_for_gpu);
        if (!n && field->missing && field->type != CONFIG_LIST)
                config_fail(r, p->node, "%s", field->missing);
        if (field->read)
                return field->read(r, p, field, n);
        if (field->type == CONFIG_LIST)
                return config_read_list(r, p, field, n);
        if (!n || field->type == CONFIG_TENANT_NAME) /* the latter once all tenants are read */
                return n != NULL;
        if (field->type == CONFIG_MAPPING) {
                inner = config_inner(p, field, n);
                return config_read_section(r, &inner);
        }
        if (!config_read_value(r, p, field, n))
                return false;
        if (field->not_for_host && p->kind == DEVICE_KIND_HOST && config_get(field, p->object) > 0) {
                config_fail(r, n, "%s", field->not_for_host);
                config_set(field, p->object, field->initial);
        }
        return true;
}

bool config_read_section(struct config_reader *r, struct config_place *p)
{
        if (!config_read_mapping(r, p))
                return false;
        for (unsigned int i = 0; p->section->fields[i].key; i++)
                if (read_field(r, p, &p->section->fields[i], p->at[i]))
                        p->known |= 1u << i;
        return true;
}

/* ---- arrays ----------------------------------------------------------------- */

char *config_copy_text(struct config_reader *r, const char *text)
{
        char *copy = strdup(text);

        if (!copy)
                r->is_out_of_memory = true;
        return copy;
}

bool config_append(struct config_reader *r, void **array, size_t *n, const void *element,
                   size_t element_bytes)
{
        unsigned char *bigger = reallocarray(*array, *n + 1, element_bytes);

        if (!bigger) {
                r->is_out_of_memory = true;
                return false;
        }
        *array = bigger;
        memcpy(bigger + (*n)++ * element_bytes, element, element_bytes);
        return true;
}
