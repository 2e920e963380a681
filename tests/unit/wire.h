/* What the daemon's stand-ins share: a connection with the replies and events that are sent on it, and
 * a region of host memory whose extents are made when they are first announced.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_WIRE_H
#define BFC_TESTS_WIRE_H

#include "device/device.h"
#include "proto/bfcd.pb-c.h"
#include "proto/frame.h"
#include "proto/pages.h"

struct wire {
        int fd; /* -1: none */
        int events_fd;
        struct frame_reader *reader, *events_reader;
        struct frame_writer *writer;
};

#define WIRE_NONE ((struct wire){ .fd = -1, .events_fd = -1 })

/* A socket that listens at folder/sock; both paths are written. */
int wire_listen(const char *name, char ret_folder[static 64], char ret_path[static 96]);

void wire_open(struct wire *w, int fd); /* takes the fd */
void wire_close(struct wire *w);
void wire_flush(struct wire *w);

void wire_put(struct wire *w, const Bfcd__Reply *reply, const int *fds, size_t n_fds);
void wire_put_garbage(struct wire *w); /* a frame that is no message */
void wire_refuse(struct wire *w, uint64_t id, int error, const char *sentence);
void wire_done(struct wire *w, uint64_t id);
void wire_block(struct wire *w, uint64_t id, Bfcd__Block *block);
void wire_split(struct wire *w, uint64_t id, uint64_t block_id);
void wire_attached(struct wire *w, uint64_t id, Bfcd__Attached *attached);
void wire_released(struct wire *w, uint64_t id); /* of no bytes */
void wire_usage(struct wire *w, uint64_t id, Bfcd__Statistics *stats, Bfcd__Room *room);

int wire_open_events(struct wire *w);                              /* the client's end */
void wire_event(struct wire *w, const Bfcd__Event *event, int fd); /* fd -1: none goes with it */
void wire_retire(struct wire *w, uint64_t sequence, uint64_t *ids, size_t n_ids, int fd);
enum {
        WIRE_TRIM = 1000, /* sequence numbers of these events */
        WIRE_PRESSURE,
};
void wire_trim(struct wire *w); /* of the whole region */
void wire_pressure(struct wire *w, uint32_t partition, uint64_t n_bytes);
void wire_draining(struct wire *w, uint32_t partition, bool is_over);

/* Both pages, the usage page with its header. */
void wire_make_pages(uint64_t n_entries, struct pages_usage **ret_usage, void **ret_client,
                     int ret_fds[static 2]);

/* ---- the region ---- */

#define REGION_ID    7
#define REGION_BYTES (UINT64_C(64) << 20)
#define EXTENT_BYTES (UINT64_C(2) << 20)
#define N_EXTENTS    32u

struct region {
        struct device *device;
        struct device_extent extents[N_EXTENTS];
        uint64_t ids[N_EXTENTS];
        uint64_t last_id;
};

void region_open(struct region *r);
void region_close(struct region *r);

struct announcement {
        size_t n;
        Bfcd__Extent rows[N_EXTENTS], *list[N_EXTENTS];
        int fds[N_EXTENTS]; /* borrowed */
};

/* The extents of this range that are not among those given, which they are then. */
void region_announce(struct region *r, uint64_t offset, uint64_t n_bytes, uint64_t given[static N_EXTENTS],
                     struct announcement *ret);
void wire_extents(struct wire *w, uint64_t sequence, struct announcement *a, bool with_fds);

/* The first n units in a row that are 0; n_units: there are none. */
unsigned find_units(const uint32_t *units, unsigned n_units, unsigned n);

#endif
