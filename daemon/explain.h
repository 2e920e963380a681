/* Explain: who has the memory. Words for the refusal and for the log, and the
 * report of a tenant in a partition, as TensorFlow's allocator prints one when it
 * is out of memory.
 *
 * A tenant is told of its own sessions by name, and of all others together what
 * a refusal must say anyway; an operator, and the log, are told all names.
 *
 * All of it takes bounded time on the loop: words of a refusal look at no more
 * than the first of each quota (see holding.h). A report has one row a page; it
 * looks at the quota's sessions, at its extents, and at no more than EXPLAIN_BLOCKS
 * blocks, and that at most every 50 ms: who asks more often is told the present figures of
 * those who were the first then, and what their clients said then, and shown the same picture.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_EXPLAIN_H
#define BFCD_EXPLAIN_H

#include <stddef.h>

#include "daemon/session.h"
#include "proto/bfcd.pb-c.h"

#define EXPLAIN_BLOCKS 2048u
#define EXPLAIN_MS     50u

/* Appends to a refusal's sentence who has what the request lacks: the quota's
 * sessions with the most, and for -ENOMEM what other tenants have in all. */
void explain_to_tenant(struct quota *q, int error, char *sentence, size_t n_sentence);

/* The same for the log: for -ENOMEM the sessions of all tenants of the partition. */
void explain_to_log(struct quota *q, int error, char *sentence, size_t n_sentence);

#define EXPLAIN_NAMES    400u /* bytes of a list of names */
#define EXPLAIN_SENTENCE 640u

/* What is wrong with these names ("": not given), of which nothing was found, and which there are. */
void explain_names(const struct session *viewer, const char *tenant, const char *partition, char *sentence,
                   size_t n_sentence);

/* A page of the report, and the memory that its row lies in; names are borrowed. */
struct explanation {
        Bfcd__ExplainReply reply;
        Bfcd__ExplainRow row, *rows[1];
        Bfcd__Figures figures;
        Bfcd__Holder holders[QUOTA_HOLDERS], *pointers[QUOTA_HOLDERS];
};

/* -ENOENT: the viewer sees no such tenant in such a partition. */
int explain_page(const struct session *viewer, const Bfcd__Explain *request, struct explanation *ret);

#endif
