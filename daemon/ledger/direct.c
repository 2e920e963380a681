/* Direct charges in the records of sessions; see ledger.h. One store commits each change.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/ledger/ledger.h"

#include <errno.h>

int ledger_session_set_direct(struct ledger *l, uint32_t session, uint64_t quota_id, uint64_t n_bytes)
{
        struct ledger_direct *all = ledger_session_at(l, session)->direct, *found = NULL, *unused = NULL;

        for (size_t i = 0; i < LEDGER_SESSION_DIRECT; i++) {
                if (all[i].n_bytes == 0)
                        unused = &all[i];
                else if (all[i].quota_id == quota_id)
                        found = &all[i];
        }
        if (!found && n_bytes == 0)
                return 0;
        if (!found && !unused)
                return -ENOSPC;
        if (!found) {
                found = unused;
                atomic_store_explicit(&found->quota_id, quota_id, memory_order_relaxed);
        }
        atomic_store_explicit(&found->n_bytes, n_bytes, memory_order_release);
        return 0;
}
