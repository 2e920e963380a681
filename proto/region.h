/* Ids of regions, as people and readers of JSON see them.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_PROTO_REGION_H
#define BFC_PROTO_REGION_H

#include <stdint.h>

/* The highest bit of an id marks a region that is one extent; see docs/protocol.md. Many readers of JSON have no more than a
 * double's 53 bits, so the mark is bit 52 there. Other ids are below it. */
static inline uint64_t region_shown_id(uint64_t id)
{
        return id >> 63 != 0 ? (id & INT64_MAX) | UINT64_C(1) << 52 : id;
}

#endif
