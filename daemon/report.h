/* Reports: the rows of lists, for the viewer that asks. A tenant sees itself,
 * an operator (admin socket) sees all. One page fits in a frame; a page may be
 * empty and still have a successor, because looking is bounded too.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_REPORT_H
#define BFCD_REPORT_H

#include "daemon/session.h"
#include "proto/ages.h"
#include "proto/bfcd.pb-c.h"

#define REPORT_ROWS  96u /* a page; about 500 bytes a row at most */
#define REPORT_LOOKS 24u /* at pages of clients for one page of AGES, each of several copies */

/* A page and the memory that its rows lie in; names are borrowed. */
struct report {
        Bfcd__ListReply list;
        Bfcd__Status status;
        Bfcd__Whoami whoami;
        size_t n_rows;
        union {
                Bfcd__PartitionRow partitions[REPORT_ROWS];
                Bfcd__TenantRow tenants[REPORT_ROWS];
                Bfcd__SessionRow sessions[REPORT_ROWS];
                Bfcd__BlockRow blocks[REPORT_ROWS];
                Bfcd__DeviceRow devices[REPORT_ROWS];
                Bfcd__SharedRow shared[REPORT_ROWS];
                struct {
                        Bfcd__AgesRow rows[REPORT_ROWS];
                        uint64_t least_ms[REPORT_ROWS][AGES_CLASSES], bytes[REPORT_ROWS][AGES_CLASSES];
                } ages;
        } rows;
        void *pointers[REPORT_ROWS];
        Bfcd__Figures figures[REPORT_ROWS];
};

/* Fills the page of a list. -EINVAL: no such kind. */
int report_list(const struct session *viewer, const Bfcd__List *request, struct report *ret);

/* Whether a viewer is told of this tenant. */
bool report_shows(const struct session *viewer, const char *tenant);

void report_quota_figures(const struct quota *q, Bfcd__Figures *ret);

/* Of the whole partition what everybody is told, and sums of what the viewer may see. */
void report_partition_figures(const struct session *viewer, const struct partition *p, Bfcd__Figures *ret);

#endif
