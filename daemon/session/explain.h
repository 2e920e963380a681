/* Explain: which sessions have the memory. Sentences for refusals and for the log, and the report of a
 * tenant in a partition, like the one that TensorFlow's allocator prints when it is out of memory.
 *
 * A tenant gets the names of its own sessions, and one sum for all other tenants. Operators and the log
 * get all names.
 *
 * All of it takes bounded time on the loop. A refusal looks only at the largest sessions of each quota
 * (see share.h). A page of a report has one row. It looks at the quota's sessions, at its extents and at
 * EXPLAIN_BLOCKS blocks, at most every 50 ms. Between two looks the sessions, the idle bytes and the map
 * are those of the last look; the other statistics are current.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_EXPLAIN_H
#define BFCD_EXPLAIN_H

#include <stddef.h>

#include "daemon/session/session.h"
#include "proto/bfcd.pb-c.h"

#define EXPLAIN_BLOCKS 2048u
#define EXPLAIN_MS     50u

/* Appends to a refusal's sentence the quota's largest sessions, and for -ENOMEM what other tenants have
 * reserved together. */
void explain_to_tenant(struct quota *q, int error, char *sentence, size_t n_sentence);

/* The sentence for the log, with other tenants' names: for -ENOMEM the sessions of all tenants of the partition. */
void explain_to_log(struct quota *q, int error, char *sentence, size_t n_sentence);

#define EXPLAIN_NAMES    400u /* bytes of a list of names */
#define EXPLAIN_SENTENCE 640u

/* Writes that no row matches these names ("": not given), and which names exist. */
void explain_names(const struct session *viewer, const char *tenant, const char *partition, char *sentence,
                   size_t n_sentence);

/* A page of the report and the memory of its row; names are borrowed. */
struct explanation {
        Bfcd__ExplainReply reply;
        Bfcd__ExplainRow row, *rows[1];
        Bfcd__Statistics stats;
        Bfcd__Holder holders[QUOTA_HOLDERS], *pointers[QUOTA_HOLDERS];
};

/* -ENOENT: the viewer sees no such tenant in such a partition. */
int explain_page(const struct session *viewer, const Bfcd__Explain *request, struct explanation *ret);

#endif
