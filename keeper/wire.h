/* Messages between bfcd and its keepers: a request and its reply, each one datagram of a SOCK_SEQPACKET socket with the
 * file descriptors that it names. Both ends run on one machine, so a message is a struct; the version is checked first.
 *
 * Extents are named by keys, never 0 and never reused: of the keeper, or of bfcd where that keeps an fd of its own. In
 * copies host extents are named by the numbers of bfcd's fds.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KEEPER_WIRE_H
#define KEEPER_WIRE_H

#include <stddef.h>
#include <stdint.h>

#include "device/device.h"

/* Arguments of the program. */
#define KEEPER_ALLOW_MPS "--allow-mps"
#define KEEPER_SOCKET    "--socket"

#define KEEPER_BACKLOG        4
#define KEEPER_VERSION        2u
#define KEEPER_FDS            DEVICE_COPIES /* of one message */
#define KEEPER_SENTENCE_BYTES 400u

enum keeper_op {
        KEEPER_HELLO, /* -> sentence or facts, granularity, n_bytes: the highest key */
        KEEPER_MAKE, /* share, n, n_bytes[n], key: the first one -> extents[n]; an fd each, if it is shared by one */
        KEEPER_DESTROY, /* key, clears */
        KEEPER_COPY,    /* n, copies[n], an fd of the host's extent each -> pins[n] */
        KEEPER_UNPIN,   /* host */
        KEEPER_FACTS,   /* -> facts */
        KEEPER_OTHERS,  /* -> n_bytes */
        KEEPER_KEEP,    /* key, an fd */
        KEEPER_TAKE,    /* key -> extents[0], and its fd if it has one */
        KEEPER_DROP,    /* key; none is an error */
        KEEPER_REST, /* -> n_bytes: the number of keys that were neither made, kept nor taken since this connection began, and
                         * end */
        KEEPER_LEDGER,   /* an fd, instead of the one before; none -> that fd */
        KEEPER_END,      /* the process ends */
        KEEPER_COLLAPSE, /* n_bytes[0], a memfd of that size; also before the hello */
        KEEPER_USES, /* key: a pid -> uses[n_uses], as of device_uses(): what NVML told since the last question */
        KEEPER_N_OPS,
};

struct keeper_copy {
        uint64_t key, offset;
        uint64_t host_offset, host_bytes; /* the latter: of all of the host's extent */
        uint64_t n_bytes;
        int32_t host;
        uint8_t to_host, pins, unused[2]; /* 0, 1 */
};

struct keeper_request {
        uint32_t version;
        uint32_t op;
        uint32_t share; /* enum device_share */
        uint32_t n;
        uint64_t key;
        int32_t host;
        uint8_t clears, unused[3]; /* 0, 1 */
        uint64_t n_bytes[DEVICE_MAKES];
        struct keeper_copy copies[DEVICE_COPIES];
};

struct keeper_extent {
        uint64_t key;
        uint64_t n_bytes;
        uint32_t share, unused;
        uint8_t handle[DEVICE_HANDLE_BYTES];
};

struct keeper_reply {
        uint32_t version;
        int32_t result; /* 0, -errno as in device.h */
        uint32_t n_extents, n_uses;
        uint64_t granularity;
        uint64_t n_bytes;
        struct keeper_extent extents[DEVICE_MAKES];
        int32_t pins
                [DEVICE_COPIES]; /* of the host's extent: 1: registered; -errno: it could not be; 0: not tried */
        struct device_facts facts;
        struct device_use uses[DEVICE_USES];
        char sentence[KEEPER_SENTENCE_BYTES];
};

struct keeper_request keeper_request_of(enum keeper_op op);

/* Blocks until it is sent. -EPIPE: the other end is gone; -EMFILE: nothing is sent, because too many fds of this user are
 * in flight; -errno. */
int keeper_send(int fd, const void *message, size_t n_bytes, const int *fds, size_t n_fds);

/* Blocks until a message of exactly n_bytes and this version is there. *ret_n_fds of the fds are the caller's then.
 * -ECONNRESET: the other end is gone; -EPROTO: another message; -EMFILE: the message was right, and this process
 * cannot have its fds; -errno. No fd is open after an error. */
int keeper_receive(int fd, void *ret, size_t n_bytes, int ret_fds[static KEEPER_FDS], size_t *ret_n_fds);

#endif
