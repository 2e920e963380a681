/* Reports: the rows of lists for a viewer. A tenant's session sees its tenant, an admin session sees
 * all. A page fits in a frame. A page may be empty and still have a next one, because the number of
 * records that it looks at is bounded, too. For monitors and schedulers, who may ask for pages as fast as they can, a page is also
 * bounded by time.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_REPORT_H
#define BFCD_REPORT_H

#include "daemon/session/session.h"
#include "daemon/memory/waits.h"
#include "proto/ages.h"
#include "proto/bfcd.pb-c.h"

#define REPORT_ROWS 96u /* a page; about 500 bytes a row at most */
#define REPORT_LEASE_NAMES                                                                                   \
        224u /* in a page of sessions: a frame has room for so many, and 16 of the last session */
#define REPORT_LEASES   40u /* a page; a control group makes a row longer */
#define REPORT_REFUSALS 40u /* a page; the sentences are long */
#define REPORT_LOOKS    24u /* at clients' pages for one page of AGES: each takes several copies */

/* A page and the memory of its rows; names are borrowed. */
struct report {
        Bfcd__ListReply list;
        Bfcd__Status status;
        Bfcd__Whoami whoami;
        char *whoami_leases[LEDGER_SESSION_LEASES];
        size_t n_rows;
        uint64_t end_ns; /* the page ends after the row that is made then; 0: when it is full */
        union {
                Bfcd__PartitionRow partitions[REPORT_ROWS];
                Bfcd__TenantRow tenants[REPORT_ROWS];
                struct {
                        Bfcd__SessionRow rows[REPORT_ROWS];
                        char *leases[REPORT_ROWS][LEDGER_SESSION_LEASES];
                } sessions;
                struct report_lease {
                        Bfcd__LeaseRow row;
                        char match[24]; /* of an id */
                } leases[REPORT_LEASES];
                Bfcd__BlockRow blocks[REPORT_ROWS];
                Bfcd__SharedRow shared[REPORT_ROWS];
                Bfcd__ExtentRow extents[REPORT_ROWS];
                Bfcd__GrantsRow grants[REPORT_ROWS];
                Bfcd__WaitingRow waiting[REPORT_ROWS];
                Bfcd__RefusalRow refusals[REPORT_REFUSALS];
                struct {
                        Bfcd__DeviceRow rows[REPORT_ROWS];
                        Bfcd__DeviceCalls calls[REPORT_ROWS][WORKER_CALLS];
                } devices;
                struct {
                        Bfcd__AgesRow rows[REPORT_ROWS];
                        uint64_t least_ms[REPORT_ROWS][AGES_CLASSES], bytes[REPORT_ROWS][AGES_CLASSES];
                } ages;
        } rows;
        void *pointers[REPORT_ROWS];
        Bfcd__Statistics stats[REPORT_ROWS];
};

/* Fills the page of a list. -EINVAL: no such kind. */
int report_list(const struct session *viewer, const Bfcd__List *request, struct report *ret);

/* protobuf-c's strings are not const, but replies are only read. */
static inline char *report_borrow(const char *s)
{
        return (char *)(uintptr_t)s;
}

/* The quotas of a partition that the viewer may see, one after the other; NULL: no more. A client's cost what its tenant
 * has, and not what all tenants have. Begins with { NULL }. */
struct report_walk {
        struct quota *q;
        size_t n; /* places of the tenant's quotas that were looked at */
};
struct quota *report_next(const struct session *viewer, const struct partition *p, struct report_walk *w);

/* With the bytes, guarantees, blocks, sessions and refusals of its leases. */
void report_quota_stats(const struct quota *q, Bfcd__Statistics *ret);

/* What a row has beside the statistics. */
struct report_more {
        uint64_t num_waiting, bytes_waiting, bytes_retiring;
};

/* Of a tenant's quota, with all that its leases have. */
void report_tenant_stats(const struct tenant *t, const struct quota *q, Bfcd__Statistics *ret,
                         struct report_more *ret_more);

/* The names of the session's leases are in `leases`. */
void report_session(const struct session *s, Bfcd__SessionRow *row,
                    char *leases[static LEDGER_SESSION_LEASES]);

/* What all viewers see of the partition, and sums of what this viewer may see. */
void report_partition_stats(const struct session *viewer, const struct partition *p, Bfcd__Statistics *ret);

#endif
