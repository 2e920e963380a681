/* The kinds of records that the daemon writes into the journal or into a file, and their message ids. bfcd(8)
 * documents the fields. An id never changes its meaning.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_PROTO_RECORDS_H
#define BFCD_PROTO_RECORDS_H

#define RECORDS_JOURNAL "/run/systemd/journal/socket"
#define RECORDS_PREFIX                                                                                       \
        "BFCD_" /* of field names in the journal; in a file they are in lower case and without it */

enum record_kind {
        RECORD_SESSION,  /* a session ended */
        RECORD_SESSIONS, /* the sum over sessions that ended without records of their own */
        RECORD_REFUSAL,  /* a request was refused */
        RECORD_USAGE,    /* the peaks of a quota in an interval */
        RECORD_RELOAD,
        RECORD_DRAIN,
        RECORD_START,
        RECORD_STOP,
        RECORD_LEASE,    /* a lease ended, and its last session */
        RECORD_EVICTION, /* an operator evicted a session */
        RECORD_KINDS,
};

static const struct {
        const char *name, *message_id;
} record_kinds[RECORD_KINDS] = {
        [RECORD_SESSION] = { "session", "ae9ec0408f7b4883b5e0d6da7889b24c" },
        [RECORD_SESSIONS] = { "sessions", "c4d0ef1dd4ef4a4183b1665e5ddc84f1" },
        [RECORD_REFUSAL] = { "refusal", "fa73c14f0b35466cb45cf678943aa94e" },
        [RECORD_USAGE] = { "usage", "43e06bb13b564330b6286a7e16e52a9d" },
        [RECORD_RELOAD] = { "reload", "ada570805c074a7e8082bbc1785e2091" },
        [RECORD_DRAIN] = { "drain", "eb4a19e8631948dd98257476a0051823" },
        [RECORD_START] = { "start", "9b181a0d28a749ed97a33c4a8baa4194" },
        [RECORD_STOP] = { "stop", "fff65da7d5df40899f21907e46871947" },
        [RECORD_LEASE] = { "lease", "605b816774e1400d89c2ec8e74503692" },
        [RECORD_EVICTION] = { "eviction", "c700cedf07e74f70bf41e77c05bb5f0a" },
};

#endif
