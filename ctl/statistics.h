/* The columns of the lists that have statistics: each statistic is described here once, for tables, JSON, metrics and the page.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The JSON has each number of Bfcd__Statistics by itself, under the name of its field. A column adds what people see: its
 * title in the table, its metric and its title on the page. A column without a title or key is for metrics and the page. */
#ifndef BFC_CTL_STATISTICS_H
#define BFC_CTL_STATISTICS_H

#include "ctl/table.h"

extern const struct table_column statistics_status[], statistics_devices[], statistics_partitions[],
        statistics_tenants[], statistics_leases[];

/* The JSON of a Bfcd__Statistics in a row of this type, which is a pointer in its member `stats`. `without` is a field that it
 * does not have there. */
#define STATISTICS_KEYS(row, without_field)                                                                  \
        { .type = TABLE_KEYS,                                                                                \
          .via = offsetof(row, stats),                                                                       \
          .keys = &bfcd__statistics__descriptor,                                                             \
          .without = without_field },                                                                        \
        {                                                                                                    \
                .key = "fragmentation", .via = offsetof(row, stats), .json = statistics_fragmentation        \
        }
json_t *statistics_fragmentation(const void *statistics);

/* {"columns": {"tenants": [{"title", "key", "type"}, ...], ...}}: the columns that have a title on the page. */
json_t *statistics_page(void);

#endif
