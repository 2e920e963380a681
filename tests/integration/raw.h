/* A client of the protocol written by hand: frames are bytes over a socket.
 *
 * The tests need an end that the library would not be: one that lies, stops in
 * the middle, or keeps what it was given. So nothing of proto/ and client/ is
 * used here but the generated messages. Functions return 0, -errno or a named
 * outcome and assert nothing, so that forked children can use them too.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_RAW_H
#define BFC_TESTS_RAW_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/message.h"

#define RAW_MAX_PAYLOAD 65536u
#define RAW_TIMEOUT_MS  120000

enum {
        RAW_TIMEOUT = 1, /* nothing came in time */
        RAW_HUNG_UP,     /* the daemon ended the connection */
};

/* An extent as it was handed over; its fd is closed by raw_close(). */
struct raw_extent {
        uint64_t id;
        uint64_t region_id;
        uint64_t offset;
        uint64_t n_bytes;
        int fd; /* -1: by the handle */
        uint8_t handle[64];
};

struct raw {
        int fd;
        bool ack; /* acknowledge extents as they come (the default) */
        uint64_t next_id;
        uint64_t last_sequence; /* of the Extents messages */
        bool wants_events;      /* set before the hello */
        int events_fd;          /* -1: none */
        bool wants_pages;       /* set before the hello */
        int page_fds[2];        /* usage, client; -1: none */
        bool wants_return;      /* set before the hello; with wants_events */
        bool can_resume;        /* by the reply to the hello */
        uint64_t session_id;    /* from the reply to the hello, or, if comes_back is set, for the hello */
        uint8_t secret[16];     /* the same */
        bool comes_back;
        struct raw_extent *extents;
        size_t n_extents;
        size_t n_used; /* bytes in the buffer */
        int fds[256];  /* received, not yet claimed by an Extents message */
        size_t n_fds;
        uint8_t buffer[2 * (RAW_MAX_PAYLOAD + 4)];
};

/* Connects, and sends nothing. */
int raw_open(const char *path, struct raw **ret);
struct raw *raw_close(struct raw *raw);

/* ---- bytes out ------------------------------------------------------------ */

/* All bytes, or -errno; RAW_TIMEOUT when the daemon does not take them in time. */
int raw_send_bytes(struct raw *raw, const void *bytes, size_t n_bytes);
/* The length, then the payload. */
int raw_send_frame(struct raw *raw, const void *payload, size_t n_bytes);
/* Fills in the id when it is 0. */
int raw_send(struct raw *raw, Bfcd__Request *request);
/* A frame with its length, as bytes: the number of them. */
size_t raw_pack(const Bfcd__Request *request, uint8_t *ret_frame);
/* The bytes with fds beside them. */
int raw_send_fds(struct raw *raw, const void *bytes, size_t n_bytes, const int *fds, size_t n_fds);

/* ---- replies in ----------------------------------------------------------- */

/* The next message other than Extents; those are kept in raw->extents and
 * acknowledged on the way. 0, RAW_TIMEOUT, RAW_HUNG_UP, -EPROTO. */
int raw_receive(struct raw *raw, int timeout_ms, Bfcd__Reply **ret);

/* 0 when the daemon ends the connection within the time (what it sends before
 * is dropped), else RAW_TIMEOUT. */
int raw_wait_hang_up(struct raw *raw, int timeout_ms);

/* ---- whole calls ---------------------------------------------------------- */

/* A request and the reply with its id. 0: *ret is it, maybe a refusal. */
int raw_call(struct raw *raw, Bfcd__Request *request, Bfcd__Reply **ret);

/* These return 0, the refusal as -error, or -EIO when the call itself failed.
 * The refusal's sentence is kept in raw_refusal(). */
int raw_hello(struct raw *raw, const char *tenant, const char *partition);
/* What a resumed session still has; a violation is RAW_HUNG_UP. */
struct raw_held {
        const uint64_t *extent_ids, *block_ids, *shared_ids;
        size_t n_extents, n_blocks, n_shared;
        uint32_t count; /* of each shared one; 0: once */
        bool is_not_last;
};
int raw_held(struct raw *raw, const struct raw_held *held);
int raw_malloc(struct raw *raw, uint32_t partition, uint64_t n_bytes, Bfcd__Block *ret);
int raw_free(struct raw *raw, uint64_t block_id);
int raw_publish(struct raw *raw, uint64_t block_id, const char *name);
int raw_usage(struct raw *raw, uint32_t partition, Bfcd__Statistics *ret);
int raw_goodbye(struct raw *raw);
/* One page of a list; free *ret with bfcd__reply__free_unpacked(). */
int raw_list(struct raw *raw, Bfcd__List__Kind kind, uint64_t cursor, Bfcd__Reply **ret);
/* Any request of which an empty reply or a refusal is expected. */
int raw_do(struct raw *raw, Bfcd__Request *request);
const char *raw_refusal(void);

/* Opens and says hello; NULL when anything went wrong. */
struct raw *raw_connect(const char *path, const char *tenant);

/* ---- events --------------------------------------------------------------- */

/* The next event; free it with bfcd__event__free_unpacked(). 0, RAW_TIMEOUT,
 * RAW_HUNG_UP, -EPROTO. */
int raw_event(struct raw *raw, int timeout_ms, Bfcd__Event **ret);
/* Answers a Retire, Trim or Pressure. */
int raw_answer(struct raw *raw, uint64_t sequence);
/* Closes what it has of an extent; -ENOENT. */
int raw_let_go(struct raw *raw, uint64_t extent_id);

/* The extent that backs an offset of a region; NULL when there is none. */
const struct raw_extent *raw_find(const struct raw *raw, uint64_t region_id, uint64_t offset);

#endif
