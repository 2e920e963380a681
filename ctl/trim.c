/* bfcctl trim: see trim.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The daemon sends no event when memory is returned, so the list of tenants is polled. */
#include "ctl/trim.h"

#include <string.h>
#include <time.h>

#include "ctl/clock.h"
#include "ctl/progress.h"

#define LOOK_MS 50

static int look(struct ask *a, const char *tenant, const char *partition, struct trim_look *ret)
{
        struct list *l;
        int r = ask_list(a, BFCD__LIST__KIND__TENANTS, &l);

        if (r < 0)
                return r;
        *ret = (struct trim_look){ 0 };
        for (size_t i = 0; i < l->n_tenants; i++) {
                const Bfcd__TenantRow *row = l->tenants[i];

                if ((*tenant && strcmp(tenant, row->tenant) != 0) ||
                    (*partition && strcmp(partition, row->partition) != 0))
                        continue;
                ret->n_reserved += row->stats ? row->stats->bytes_reserved : 0;
                ret->n_pending += row->bytes_pending;
        }
        list_free(l);
        return 0;
}

int trim_wait(struct ask *a, const char *tenant, const char *partition, int64_t timeout_ms,
              struct trim_look *ret)
{
        int64_t until_ms = (int64_t)clock_ms() + timeout_ms;
        struct progress progress;
        int r;

        progress_begin(&progress, NULL, "trim", 0);
        while ((r = look(a, tenant, partition, ret)) == 0 && ret->n_pending > 0 &&
               (int64_t)clock_ms() < until_ms) {
                progress_set(&progress, 0, 0);
                clock_pause(LOOK_MS);
        }
        progress_end(&progress);
        return r;
}
