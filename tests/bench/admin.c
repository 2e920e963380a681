/* See admin.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/bench/admin.h"

#include <poll.h>

#define QUIET_MS 120000

struct raw *session_open(const char *path, const char *tenant)
{
        struct raw *raw = raw_connect(path, tenant);

        if (!raw)
                die(path, "no session");
        return raw;
}

struct admin_status admin_status(struct raw *admin)
{
        struct admin_status ret;
        const Bfcd__Status *status;
        Bfcd__Reply *reply;

        if (raw_list(admin, BFCD__LIST__KIND__STATUS, 0, &reply) < 0)
                die("status", raw_refusal());
        status = reply->list->status;
        ret = (struct admin_status){ .n_sessions = status->num_sessions,
                                     .n_blocks = status->num_blocks,
                                     .n_quarantined = status->num_quarantined,
                                     .bytes_allocated = status->bytes_allocated,
                                     .bytes_resident = status->bytes_resident };
        for (size_t i = 0; i < status->n_devices; i++)
                ret.bytes_pending += status->devices[i]->bytes_pending;
        bfcd__reply__free_unpacked(reply, NULL);
        return ret;
}

void admin_wait_quiet(struct raw *admin, uint64_t n_sessions)
{
        for (int i = 0; i < QUIET_MS; i++) {
                struct admin_status s = admin_status(admin);

                if (s.n_sessions == n_sessions && s.bytes_pending == 0)
                        return;
                (void)poll(NULL, 0, 1);
        }
        die("the daemon", "it is not done with the sessions of the last phase");
}
