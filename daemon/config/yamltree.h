/* SPDX-License-Identifier: Apache-2.0 */
/* One YAML document as a tree of nodes with line and column.
 *
 * libyaml's own document API drops anchors and resolves aliases and tags; here they are refused with
 * their position. Scalars stay text: the schema decides their type. */
#ifndef BFCD_YAMLTREE_H
#define BFCD_YAMLTREE_H

#include <stdbool.h>
#include <stddef.h>

enum yamltree_type {
        YAMLTREE_SCALAR,
        YAMLTREE_SEQUENCE,
        YAMLTREE_MAPPING,
        YAMLTREE_BAD, /* already reported; cause no further message */
};

struct yamltree_node {
        enum yamltree_type type;
        const char *file; /* the name given to yamltree_parse(), borrowed */
        size_t line;      /* from 1 */
        size_t column;    /* from 1, in characters */
        char *text;       /* of a scalar; NUL-terminated, may hold NULs too */
        size_t n_text;
        bool is_quoted;
        struct yamltree_node *first_child; /* of a mapping: key, value, key, value, ... */
        struct yamltree_node *last_child;
        struct yamltree_node *next;
        size_t n_children;
        struct yamltree_node *next_made; /* all nodes of a tree, for freeing */
};

/* Called for each error, with a sentence. */
typedef void (*yamltree_report)(void *userdata, const char *file, size_t line, size_t column,
                                const char *sentence);

/* 0: *ret is the root. -EINVAL: no tree could be made, reported. -ENOMEM.
 * Errors that leave a tree (anchors, tags, a second document) are reported and
 * it is returned. `file` must outlive the tree. */
int yamltree_parse(const char *file, const char *text, size_t n_bytes, yamltree_report report, void *userdata,
                   struct yamltree_node **ret);

struct yamltree_node *yamltree_free(struct yamltree_node *root); /* takes NULL */

#endif
