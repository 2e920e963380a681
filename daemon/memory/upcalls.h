/* Upcalls: what the memory layers ask of the session layer. One constant table, set when the broker is
 * made, is the only way up.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_UPCALLS_H
#define BFCD_UPCALLS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct account;
struct broker;
struct lease_end;
struct quota;
struct quota_request;
struct session;

struct upcalls {
        /* All sessions must unmap these extents (indexes in the ledger), each of which has an export:
         * arena_note_export_gone() tells when. Called inside arena_release(); may call no more than
         * arena_note_late_export(). */
        void (*retire)(struct broker *b, const uint32_t *extents, size_t n_extents);

        /* All sessions that have this extent can be expected to unmap it soon. */
        bool (*unmaps_soon)(const struct broker *b, uint32_t extent);

        /* The first request in line is about to be refused: it lacks missing_bytes of `scope`, an account
         * above; NULL: of its quota, whose own memory alone helps. Asks sessions for idle memory, more with
         * each call. False: no session is left to ask, and all have answered. May call no function of a
         * quota. */
        bool (*trim)(struct broker *b, struct quota *q, struct quota_request *first,
                     const struct account *scope, uint64_t missing);

        /* Whether the session was asked by trim() for memory of the quota and may still answer in time. It frees one
         * block after the other. */
        bool (*is_trimming)(const struct quota *q, const struct session *s);

        /* Called before trim(), as often and with the same answer: sessions park blocks and give back
         * what their programs can spare. */
        bool (*press)(struct broker *b, struct quota *q, struct quota_request *first,
                      const struct account *scope, uint64_t missing);

        /* A limit was lowered below what is charged. Asks each of the quota's sessions with the most idle
         * memory for n_bytes; the answers are not waited for. */
        void (*trim_excess)(struct broker *b, struct quota *q, uint64_t n_bytes);

        /* An ended lease has no session and no memory any more: it is about to be forgotten. */
        void (*lease_gone)(const struct lease_end *end);
};

#endif
