/* SPDX-License-Identifier: Apache-2.0 */
/* The configuration in force as YAML, with the defaults. config_parse() reads it back as the same
 * configuration; strings are quoted so that none can be taken for syntax. */
#include "daemon/config/reader.h"

#include <stdlib.h>
#include <string.h>

#define INDENT 2

void config_put_string(FILE *f, const char *text)
{
        fputc('"', f);
        for (; *text; text++) {
                if (*text == '"' || *text == '\\')
                        fputc('\\', f);
                fputc(*text, f);
        }
        fputc('"', f);
}

static bool is_hidden(const struct config *c, const struct config_field *field, const void *object)
{
        char text[CONFIG_TEXT_BYTES];

        if (field->type == CONFIG_LIST || (field->type == CONFIG_MAPPING && !field->text))
                return false;
        if (field->hides_initial && config_get(field, object) == field->initial)
                return true;
        config_text(c, field, object, text);
        return text[0] == '\0';
}

static void put_fields(FILE *f, const struct config *c, const struct config_section *s, const void *object,
                       int indent);

static void put_list(FILE *f, const struct config *c, const struct config_field *field, const void *object,
                     int indent)
{
        const void *element;

        for (size_t i = 0; (element = config_element(c, field, object, i)); i++) {
                fprintf(f, "\n%*s- ", indent, "");
                put_fields(f, c, field->section, element, indent + INDENT);
        }
}

static void put_value(FILE *f, const struct config *c, const struct config_field *field, const void *object)
{
        bool is_string = field->type >= CONFIG_MODE && field->type <= CONFIG_TENANT_NAME;
        char text[CONFIG_TEXT_BYTES];

        fputc(' ', f);
        if (field->put) {
                field->put(f, object);
                return;
        }
        if (field->type == CONFIG_MAPPING) {
                put_fields(f, c, field->section, (const char *)object + field->base, 0);
                return;
        }
        config_text(c, field, object, text);
        if (is_string && (field->type != CONFIG_GROUP || text[strspn(text, "0123456789")] != '\0'))
                config_put_string(f, text);
        else
                fputs(text, f);
}

/* Lists come after the other keys, which people look for first. */
static void put_fields(FILE *f, const struct config *c, const struct config_section *s, const void *object,
                       int indent)
{
        bool is_first = true;

        fputs(s->is_block ? "" : "{", f);
        for (int lists = 0; lists < 2; lists++) {
                for (const struct config_field *field = s->fields; field->key; field++) {
                        if ((field->type == CONFIG_LIST) != lists || is_hidden(c, field, object))
                                continue;
                        if (!is_first && s->is_block)
                                fprintf(f, "\n%*s", indent, "");
                        else if (!is_first)
                                fputs(", ", f);
                        is_first = false;
                        fprintf(f, "%s:", field->key);
                        if (lists)
                                put_list(f, c, field, object, indent + INDENT);
                        else
                                put_value(f, c, field, object);
                }
        }
        fputs(s->is_block ? "" : "}", f);
}

char *config_format(const struct config *c)
{
        size_t n_bytes = 0;
        char *text = NULL;
        bool failed;
        FILE *f;

        f = open_memstream(&text, &n_bytes);
        if (!f)
                return NULL;
        put_fields(f, c, &CONFIG_TOP, c, 0);
        fputc('\n', f);
        failed = ferror(f) != 0;
        if (fclose(f) != 0 || failed) {
                free(text);
                return NULL;
        }
        return text;
}
