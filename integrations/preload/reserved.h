/* Memory that the driver keeps for more than it has given: of pools whose memory can be shared, and of graphs.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * What the driver takes for a call is known only afterwards. So the most that it can take is charged before, and what is
 * more than the driver says that it has is given back after it. */
#ifndef BFC_PRELOAD_RESERVED_H
#define BFC_PRELOAD_RESERVED_H

#include <sys/queue.h>

#include "integrations/preload/broker.h"

#define RESERVED_AT_ONCE ((size_t)32 << 20) /* what the driver may take for less */

static inline uint64_t reserved_most(uint64_t n_bytes)
{
        const uint64_t unit = RESERVED_AT_ONCE;

        return n_bytes > UINT64_MAX - unit ? n_bytes : (n_bytes + unit - 1) / unit * unit;
}

/* Its owner sets the first three; all else is 0 before its first use. */
struct reserved {
        struct gpu *gpu;
        CUdevice device;
        CUmemoryPool pool; /* NULL: it is that of graphs */
        LIST_ENTRY(reserved) link;
        uint64_t n_charged, n_coming; /* n_coming: the most that calls in progress take */
        bool is_listed;
};

/* Before a call in a stream that takes n_most at most, for which it may wait. 0, or an error of charge_take(). */
int reserved_begin(struct reserved *r, uint64_t n_most, CUstream stream);
/* After it. */
void reserved_end(struct reserved *r, uint64_t n_most);

/* Before the driver ends it: other threads do not ask for it any more. And after it. */
void reserved_hide(struct reserved *r);
void reserved_hidden(struct reserved *r, bool has_ended);

/* Gives back what the driver does not have any more. */
void reserved_settle(struct gpu *gpu);

/* Has the driver give back what it does not use. True: some of it was charged. */
bool reserved_trim(struct gpu *gpu);

/* Of graphs, which must be mapped anew then. Their number is that of such calls, and of others' trims. */
CUresult reserved_trim_graphs(CUdevice device);
unsigned reserved_trims(void);

#endif
