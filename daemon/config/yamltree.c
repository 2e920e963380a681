/* SPDX-License-Identifier: Apache-2.0 */
/* libyaml's events become a tree. The stack of open collections is bounded, so
 * no text makes this recurse or the parser nest deeply.
 *
 * Invariant: every node made is in the builder's chain of made nodes, also when
 * it never found its place in the tree; freeing walks that chain. */
#include "daemon/config/yamltree.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <yaml.h>

#define MAX_DEPTH 16 /* the schema needs eight */

struct builder {
        const char *file;
        const char *text;
        size_t n_bytes;
        yamltree_report report;
        void *userdata;
        struct yamltree_node *made;
        struct yamltree_node *root;
        struct yamltree_node *open[MAX_DEPTH];
        size_t n_open;
        size_t n_documents;
};

static void report_at(const struct builder *b, const yaml_mark_t *mark, const char *sentence)
{
        b->report(b->userdata, b->file, mark->line + 1, mark->column + 1, sentence);
}

/* libyaml counts an encoding error in bytes from the start only. */
static void report_offset(const struct builder *b, size_t offset, const char *sentence)
{
        size_t line = 1;
        size_t column = 1;

        for (size_t i = 0; i < offset && i < b->n_bytes; i++) {
                if (b->text[i] == '\n') {
                        line++;
                        column = 1;
                } else if (((unsigned char)b->text[i] & 0xc0) != 0x80) {
                        column++;
                }
        }
        b->report(b->userdata, b->file, line, column, sentence);
}

/* Whether ": " precedes the place on its line. A mark counts characters. */
static bool has_colon_before(const struct builder *b, const yaml_mark_t *mark)
{
        const char *c = b->text, *end = b->text + b->n_bytes;
        size_t column = 0;

        for (size_t line = 0; line < mark->line && c < end; c++)
                line += *c == '\n';
        for (; end - c > 1 && column < mark->column; c++) {
                if (c[0] == ':' && c[1] == ' ')
                        return true;
                column += ((unsigned char)c[1] & 0xc0) != 0x80;
        }
        return false;
}

/* libyaml's words for a missing or a second ':' name what its scanner was doing. */
static const char *explain_colon(const struct builder *b, const yaml_parser_t *parser,
                                 const yaml_mark_t **ret_at)
{
        const char *problem = parser->problem ? parser->problem : "";

        *ret_at = &parser->problem_mark;
        if (strcmp(problem, "could not find expected ':'") == 0) {
                *ret_at = &parser->context_mark;
                return "': ' is missing after a key; write it as in 'KEY: VALUE'";
        }
        if (strcmp(problem, "mapping values are not allowed in this context") != 0)
                return NULL;
        return has_colon_before(b, &parser->problem_mark)
                       ? "a second ': ' on this line; write a value that contains ': ' in quotes, and "
                         "several keys on one line as in {KEY: VALUE, KEY: VALUE}"
                       : "no key can be here; ': ' is missing after the key above, or this line is indented "
                         "differently";
}

static int report_parser(const struct builder *b, const yaml_parser_t *parser)
{
        const char *problem = parser->problem ? parser->problem : "unknown error", *colon;
        char sentence[256], began[48] = "";
        const yaml_mark_t *at;

        switch (parser->error) {
        case YAML_MEMORY_ERROR:
                return -ENOMEM;
        case YAML_READER_ERROR:
                snprintf(sentence, sizeof(sentence), "not UTF-8 text: %s", problem);
                report_offset(b, parser->problem_offset, sentence);
                return -EINVAL;
        default:
                colon = explain_colon(b, parser, &at);
                if (colon) {
                        snprintf(sentence, sizeof(sentence), "not YAML: %s", colon);
                        report_at(b, at, sentence);
                        return -EINVAL;
                }
                /* A missing '}' is noticed later, at times many lines. */
                if (parser->context && parser->context_mark.line != parser->problem_mark.line)
                        snprintf(began, sizeof(began), ", which begins on line %zu",
                                 parser->context_mark.line + 1);
                snprintf(sentence, sizeof(sentence), "not YAML: %s%s%s%s", problem,
                         parser->context ? " " : "", parser->context ? parser->context : "", began);
                report_at(b, &parser->problem_mark, sentence);
                return -EINVAL;
        }
}

static int node_new(struct builder *b, enum yamltree_type type, const yaml_mark_t *mark,
                    struct yamltree_node **ret)
{
        struct yamltree_node *n = calloc(1, sizeof(*n));

        if (!n)
                return -ENOMEM;
        n->type = type;
        n->file = b->file;
        n->line = mark->line + 1;
        n->column = mark->column + 1;
        n->next_made = b->made;
        b->made = n;
        *ret = n;
        return 0;
}

static void place(struct builder *b, struct yamltree_node *n)
{
        struct yamltree_node *parent;

        if (b->n_open == 0) {
                b->root = n;
                return;
        }
        parent = b->open[b->n_open - 1];
        if (parent->last_child)
                parent->last_child->next = n;
        else
                parent->first_child = n;
        parent->last_child = n;
        parent->n_children++;
}

static void refuse_anchor_and_tag(const struct builder *b, const yaml_mark_t *mark, const yaml_char_t *anchor,
                                  const yaml_char_t *tag)
{
        if (anchor)
                report_at(b, mark, "anchors (&name) are not allowed; write the value out where it is needed");
        if (tag)
                report_at(b, mark, "tags (!name) are not allowed; write the bare value");
}

static int add_scalar(struct builder *b, const yaml_event_t *event)
{
        struct yamltree_node *n;
        int r;

        r = node_new(b, YAMLTREE_SCALAR, &event->start_mark, &n);
        if (r < 0)
                return r;
        refuse_anchor_and_tag(b, &event->start_mark, event->data.scalar.anchor, event->data.scalar.tag);
        n->text = malloc(event->data.scalar.length + 1);
        if (!n->text)
                return -ENOMEM;
        memcpy(n->text, event->data.scalar.value, event->data.scalar.length);
        n->text[event->data.scalar.length] = '\0';
        n->n_text = event->data.scalar.length;
        n->is_quoted = event->data.scalar.style != YAML_PLAIN_SCALAR_STYLE;
        place(b, n);
        return 0;
}

static int add_alias(struct builder *b, const yaml_event_t *event)
{
        struct yamltree_node *n;
        int r;

        r = node_new(b, YAMLTREE_BAD, &event->start_mark, &n);
        if (r < 0)
                return r;
        report_at(b, &event->start_mark, "aliases (*name) are not allowed; write the value out");
        place(b, n);
        return 0;
}

static int open_collection(struct builder *b, const yaml_event_t *event, enum yamltree_type type,
                           const yaml_char_t *anchor, const yaml_char_t *tag)
{
        struct yamltree_node *n;
        int r;

        if (b->n_open == MAX_DEPTH) {
                report_at(b, &event->start_mark,
                          "nested too deeply; nothing here needs more than a few levels");
                return -EINVAL;
        }
        r = node_new(b, type, &event->start_mark, &n);
        if (r < 0)
                return r;
        refuse_anchor_and_tag(b, &event->start_mark, anchor, tag);
        place(b, n);
        b->open[b->n_open++] = n;
        return 0;
}

/* >0: the end. */
static int take_event(struct builder *b, const yaml_event_t *event)
{
        switch (event->type) {
        case YAML_DOCUMENT_START_EVENT:
                if (b->n_documents++ == 0)
                        return 0;
                report_at(b, &event->start_mark,
                          "a second document starts here; a file must have exactly one");
                return 1;
        case YAML_SCALAR_EVENT:
                return add_scalar(b, event);
        case YAML_ALIAS_EVENT:
                return add_alias(b, event);
        case YAML_SEQUENCE_START_EVENT:
                return open_collection(b, event, YAMLTREE_SEQUENCE, event->data.sequence_start.anchor,
                                       event->data.sequence_start.tag);
        case YAML_MAPPING_START_EVENT:
                return open_collection(b, event, YAMLTREE_MAPPING, event->data.mapping_start.anchor,
                                       event->data.mapping_start.tag);
        case YAML_SEQUENCE_END_EVENT:
        case YAML_MAPPING_END_EVENT:
                b->n_open--;
                return 0;
        case YAML_STREAM_END_EVENT:
                return 1;
        default:
                return 0;
        }
}

static void free_made(struct yamltree_node *n)
{
        while (n) {
                struct yamltree_node *next = n->next_made;

                free(n->text);
                free(n);
                n = next;
        }
}

static int run(struct builder *b, yaml_parser_t *parser)
{
        int r = 0;

        while (r == 0) {
                yaml_event_t event;

                if (!yaml_parser_parse(parser, &event))
                        return report_parser(b, parser);
                r = take_event(b, &event);
                yaml_event_delete(&event);
        }
        if (r < 0)
                return r;
        if (!b->root) {
                b->report(b->userdata, b->file, 1, 1, "the file is empty");
                return -EINVAL;
        }
        return 0;
}

/* The root is made first, so it is the last of the chain of made nodes; it
 * becomes the head, which is what yamltree_free() is given. */
static struct yamltree_node *root_to_head(struct builder *b)
{
        struct yamltree_node **p = &b->made;

        while (*p != b->root)
                p = &(*p)->next_made;
        *p = b->root->next_made;
        b->root->next_made = b->made;
        b->made = b->root;
        return b->root;
}

int yamltree_parse(const char *file, const char *text, size_t n_bytes, yamltree_report report, void *userdata,
                   struct yamltree_node **ret)
{
        size_t n_mark = n_bytes >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0 ? 3 : 0;
        struct builder b = { .file = file,
                             .text = text + n_mark, /* some editors write a byte order mark */
                             .n_bytes = n_bytes - n_mark,
                             .report = report,
                             .userdata = userdata };
        yaml_parser_t parser;
        int r;

        if (!yaml_parser_initialize(&parser))
                return -ENOMEM;
        yaml_parser_set_encoding(&parser, YAML_UTF8_ENCODING);
        yaml_parser_set_input_string(&parser, (const unsigned char *)b.text, b.n_bytes);
        r = run(&b, &parser);
        yaml_parser_delete(&parser);
        if (r < 0) {
                free_made(b.made);
                return r;
        }
        *ret = root_to_head(&b);
        return 0;
}

struct yamltree_node *yamltree_free(struct yamltree_node *root)
{
        free_made(root);
        return NULL;
}
