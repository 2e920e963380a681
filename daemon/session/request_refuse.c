/* Refusals; see request_refuse.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/request_refuse.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>

#include "daemon/base/log.h"
#include "daemon/base/number.h"
#include "daemon/session/accounting.h"
#include "daemon/session/explain.h"
#include "daemon/session/session.h"

/* Which limit refused, for records. */
static const char *limit_name(const struct quota_request *refused, int error)
{
        const struct quota *q = refused->quota;

        if (refused->device_failed || error == -ENODEV)
                return "device";
        if (error == -EBUSY)
                return "drain";
        if (error == -EINVAL)
                return "extent";
        if (error == -EDQUOT)
                return !refused->is_direct && quota_without_block(q) ? "max_blocks" : "quota";
        return "partition";
}

/* names_holders: the line names the sessions with the most memory. They are searched only if the line is written. */
static void note_refusal(struct session *s, const struct quota_request *refused, int error,
                         bool names_holders, const char *sentence)
{
        char line[SESSION_SENTENCE_BYTES];

        s->stats.n_refusals++;
        snprintf(line, sizeof(line), "%s", sentence);
        if (names_holders && log_limit_is_open(&s->tenant->refusal_log))
                explain_to_log(refused->quota, error, line, sizeof(line));
        accounting_refuse(s, &(struct accounting_refusal){ .quota = refused->quota,
                                                           .n_bytes = refused->n_bytes,
                                                           .limit = limit_name(refused, error),
                                                           .sentence = line,
                                                           .told = sentence });
}

void request_refuse(struct session *s, uint64_t id, const struct quota_request *refused, int error,
                    bool is_final)
{
        char sentence[SESSION_SENTENCE_BYTES];
        bool device_failed = refused->device_failed && error != -ENODEV;
        bool names_holders = !device_failed && (error == -EDQUOT || error == -ENOMEM);

        if (device_failed && error == -ECOMM)
                snprintf(sentence, sizeof(sentence),
                         "a block of %s was refused, because its memory would not survive a restart of the "
                         "daemon: the keeper of host memory does not answer, and is being replaced",
                         NUMBER_SIZE(refused->n_bytes));
        else if (device_failed && error == -ECANCELED)
                snprintf(
                        sentence, sizeof(sentence),
                        "no new memory is allocated for a block of %s: the kernel killed a process for lack of memory while the previous daemon "
                        "allocated memory for tenant '%s' in partition '%s'; try again in %" PRIu64 " s",
                        NUMBER_SIZE(refused->n_bytes), refused->quota->tenant,
                        refused->quota->partition->name, quota_growth_pause_ms(refused->quota) / 1000 + 1);
        else if (device_failed)
                snprintf(sentence, sizeof(sentence),
                         "device '%s' could not allocate memory for a block of %s: %s",
                         refused->quota->partition->device_id, NUMBER_SIZE(refused->n_bytes),
                         device_error(error));
        else
                quota_explain(refused, error, sentence, sizeof(sentence));
        names_holders = names_holders && !refused->is_no_refusal;
        if (!refused->is_no_refusal)
                note_refusal(s, refused, error, names_holders, sentence);
        if (names_holders)
                explain_to_tenant(refused->quota, error, sentence, sizeof(sentence));
        /* Whatever the device lacked. */
        session_refuse_final(s, id, device_failed ? -ENOMEM : error, sentence, is_final);
}
