/* A peer: a session without a socket, for tests and fuzzers. It keeps every
 * reply, in order, and counts what came with it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_PEER_H
#define BFC_TESTS_PEER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>

#include "daemon/memory/broker.h"
#include "daemon/session/recall.h"
#include "daemon/session/session.h"
#include "daemon/session/trim.h"
#include "proto/message.h"

#define PEER_MAX_REPLIES    4096
#define PEER_MAX_PARTITIONS 16

/* What it was told to let go of and has not confirmed. */
struct peer_retire {
        uint64_t sequence;
        size_t n_ids;
        uint64_t ids[RETIRE_MAX_EXTENTS];
};

/* What it was asked to give back and has not answered. */
struct peer_trim {
        uint64_t sequence;
        uint32_t partition;
        uint64_t n_bytes;
        size_t n_ranges;
        struct {
                uint64_t region_id, offset, n_bytes;
        } ranges[TRIM_MAX_RANGES];
};

/* What a Pressure asked for. */
struct peer_pressure {
        uint64_t sequence;
        uint32_t partition;
        uint64_t n_bytes;
        bool parks, is_command, wakes;
        uint32_t idle_ms, to;
        char tag[LEDGER_TAG_BYTES];
};

/* An extent that it has mapped, as far as anybody else can know. */
struct peer_hold {
        uint64_t id;
        uint64_t inode; /* of its fd */
};

struct peer {
        LIST_ENTRY(peer) link;
        struct session *session;
        Bfcd__Reply *replies[PEER_MAX_REPLIES]; /* unpacked copies, owned */
        size_t n_replies;
        uint64_t next_id;
        size_t n_extents; /* received */
        const char *why;  /* of the abort */
        bool aborted;
        bool auto_ack;  /* acknowledge extents as they come */
        bool by_slices; /* the test calls session_deliver() itself */
        uint64_t to_ack;
        bool wants_events;                         /* set before the hello; else it answers by itself */
        bool has_no_events;                        /* the same: it takes none */
        bool answers;                              /* peer_settle() answers its Trims by nothing */
        bool wants_pages;                          /* the same */
        int page_fds[2];                           /* usage, client; owned; -1: none came */
        bool wants_return;                         /* the same */
        uint64_t return_id;                        /* not 0: it resumes this session */
        uint8_t secret[16];                        /* of its hello's reply; to resume with */
        unsigned n_drains_told;                    /* Draining, of either kind */
        bool is_draining[PEER_MAX_PARTITIONS];     /* by the last of each partition */
        unsigned n_limits_told;                    /* QuotaChanged */
        uint64_t limits_told[PEER_MAX_PARTITIONS]; /* the last of each partition */
        struct peer_trim trims[16];
        size_t n_trims;
        size_t n_trimmed; /* Trims, in all */
        struct peer_pressure pressures[PEER_MAX_PARTITIONS];
        size_t n_pressures;
        size_t n_pressed; /* Pressures, in all */
        struct peer_retire retires[RETIRE_MAX_OPEN];
        size_t n_retires;
        size_t n_retired;        /* extents, in all Retires so far */
        uint64_t event_sequence; /* of the last event that is to be answered */
        struct peer_hold *refs;  /* on a device that does not empty mappings */
        size_t n_refs;
};

/* A broker with inline workers from a config text; asserts that it works. */
struct broker *peer_broker(const char *config_text, struct config **ret_config);
/* A broker on devices of the caller's. */
struct broker *peer_broker_on(const char *config_text, const struct config_machine *machine,
                              struct devices *devices, struct config **ret_config);
/* A broker whose extents outlive it. */
struct broker *peer_broker_kept(const char *config_text, const struct config_machine *machine,
                                struct devices *devices, struct store *store, struct config **ret_config);
/* Its process ends as it is; so do its peers, which are to be dropped before. */
void peer_broker_leave(struct broker *b, struct config *c);

/* On a device that does not empty mappings, and asserts that no peer has an extent
 * mapped when it is destroyed. One such broker at a time. */
struct broker *peer_broker_sticky(const char *config_text, struct config **ret_config);
struct broker *peer_broker_free(struct broker *b, struct config *c); /* asserts that nothing is left */

/* Runs what the workers have to do until nothing is left. */
void peer_settle(struct broker *b);

/* A session of this uid that has not said hello. */
struct peer *peer_new(struct broker *b, uid_t uid, bool admin);
/* Its process exits: what it had mapped is let go of, and the session closes. */
void peer_exit(struct peer *p);
/* Hangs up, lets the process exit, reaps all. */
struct peer *peer_free(struct peer *p);

/* Forgets its session. */
struct peer *peer_drop(struct peer *p);

/* Sends a request as it is (id set here unless it is set): session_handle()'s result. */
int peer_send(struct peer *p, Bfcd__Request *r, uint64_t *ret_id);
uint64_t peer_post(struct peer *p, Bfcd__Request *request); /* where it must be sent; its id */
/* The reply with this id, or NULL. */
const Bfcd__Reply *peer_reply(const struct peer *p, uint64_t id);
void peer_forget_replies(struct peer *p);

/* Requests in one line each; they send only. */
uint64_t peer_hello(struct peer *p, const char *tenant, const char *partition);
uint64_t peer_malloc(struct peer *p, uint32_t partition, uint64_t n_bytes);
uint64_t peer_malloc_flags(struct peer *p, uint32_t partition, uint64_t n_bytes, uint64_t flags);
uint64_t peer_malloc_tag(struct peer *p, uint32_t partition, uint64_t n_bytes, const char *tag);
uint64_t peer_free_block(struct peer *p, uint64_t block_id);
uint64_t peer_split(struct peer *p, uint64_t block_id, uint64_t n_bytes);
uint64_t peer_publish(struct peer *p, uint64_t block_id, const char *name);
uint64_t peer_attach(struct peer *p, const char *name, uint32_t wait_ms);
uint64_t peer_publish_kept(struct peer *p, uint64_t block_id, const char *name, uint64_t keep_ms,
                           const void *metadata, size_t n_metadata_bytes);
uint64_t peer_metadata(struct peer *p, uint64_t block_id);
uint64_t peer_forget(struct peer *p, const char *tenant, const char *name);
uint64_t peer_goodbye(struct peer *p);
int peer_ack(struct peer *p, uint64_t sequence);
/* The acknowledgement of a client that did not receive these extents. */
int peer_ack_without(struct peer *p, uint64_t sequence, const uint64_t *lost, size_t n_lost);
/* The i-th extent of the Extents message of this number. */
const Bfcd__Extent *peer_extent(const struct peer *p, uint64_t sequence, size_t i);
/* Answers an event. What a Retire named is let go of before. */
int peer_answer(struct peer *p, uint64_t sequence);
void peer_retired_all(struct peer *p);
void peer_trimmed_all(struct peer *p); /* has nothing idle */

/* Writes into its client page what it could park in a partition, and whether it has a function. */
void peer_show_idle(struct peer *p, uint32_t partition, uint64_t n_bytes, uint64_t since_ms, bool has_fn);

/* A Malloc that may wait. */
uint64_t peer_malloc_wait(struct peer *p, uint32_t partition, uint64_t n_bytes, uint32_t wait_ms);

/* Direct charges. */
uint64_t peer_charge(struct peer *p, uint32_t partition, uint64_t n_bytes, uint32_t wait_ms);
uint64_t peer_uncharge(struct peer *p, uint32_t partition, uint64_t n_bytes);

/* The errno of a refusal, 0 for another reply, -1 for none yet. */
int peer_error(const struct peer *p, uint64_t id);

#endif
