/* See wire.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/wire.h"

#include <assert.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

int wire_listen(const char *name, char ret_folder[static 64], char ret_path[static 96])
{
        struct sockaddr_un address = { .sun_family = AF_UNIX };
        int fd, r;

        snprintf(ret_folder, 64, "/tmp/%s-XXXXXX", name);
        assert(mkdtemp(ret_folder));
        snprintf(ret_path, 96, "%s/sock", ret_folder);
        strcpy(address.sun_path, ret_path);
        fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        r = bind(fd, (struct sockaddr *)&address, sizeof(address));
        r |= listen(fd, 64);
        assert(r == 0);
        return fd;
}

void wire_open(struct wire *w, int fd)
{
        int r;

        *w = WIRE_NONE;
        w->fd = fd;
        r = frame_reader_new(false, &w->reader);
        r |= frame_writer_new(16u << 20, &w->writer);
        assert(r == 0);
}

void wire_close(struct wire *w)
{
        if (w->fd >= 0)
                close(w->fd);
        if (w->events_fd >= 0)
                close(w->events_fd);
        frame_reader_free(w->reader);
        frame_reader_free(w->events_reader);
        frame_writer_free(w->writer);
        *w = WIRE_NONE;
}

void wire_flush(struct wire *w)
{
        while (w->fd >= 0 && frame_writer_flush(w->writer, w->fd) == FRAME_AGAIN) {
                struct pollfd p = { .fd = w->fd, .events = POLLOUT };

                poll(&p, 1, 1000);
        }
}

/* ---- replies ----------------------------------------------------------------- */

void wire_put(struct wire *w, const Bfcd__Reply *reply, const int *fds, size_t n_fds)
{
        int copies[FRAME_MAX_FDS], r;
        uint8_t *payload;

        for (size_t i = 0; i < n_fds; i++)
                copies[i] = fcntl(fds[i], F_DUPFD_CLOEXEC, 3);
        r = frame_writer_add(w->writer, bfcd__reply__get_packed_size(reply), copies, n_fds, &payload);
        assert(r == 0);
        bfcd__reply__pack(reply, payload);
}

void wire_put_garbage(struct wire *w)
{
        uint8_t *payload;
        int r = frame_writer_add(w->writer, 3, NULL, 0, &payload);

        assert(r == 0);
        memset(payload, 0xff, 3);
}

/* A reply that is one body, without fds. */
#define PUT(w, its_id, which, member, body)                                                                  \
        do {                                                                                                 \
                Bfcd__Reply reply = BFCD__REPLY__INIT;                                                       \
                                                                                                             \
                reply.id = (its_id);                                                                         \
                reply.body_case = BFCD__REPLY__BODY_##which;                                                 \
                reply.member = (body);                                                                       \
                wire_put(w, &reply, NULL, 0);                                                                \
        } while (0)

void wire_refuse(struct wire *w, uint64_t id, int error, const char *sentence)
{
        Bfcd__Refusal body = BFCD__REFUSAL__INIT;

        body.error = (uint32_t)error;
        body.message = (char *)(uintptr_t)sentence;
        PUT(w, id, REFUSAL, refusal, &body);
}

void wire_done(struct wire *w, uint64_t id)
{
        Bfcd__Done body = BFCD__DONE__INIT;

        PUT(w, id, DONE, done, &body);
}

void wire_block(struct wire *w, uint64_t id, Bfcd__Block *block)
{
        PUT(w, id, BLOCK, block, block);
}

void wire_split(struct wire *w, uint64_t id, uint64_t block_id)
{
        Bfcd__SplitReply body = BFCD__SPLIT_REPLY__INIT;

        body.block_id = block_id;
        PUT(w, id, SPLIT, split, &body);
}

void wire_attached(struct wire *w, uint64_t id, Bfcd__Attached *attached)
{
        PUT(w, id, ATTACHED, attached, attached);
}

void wire_released(struct wire *w, uint64_t id)
{
        Bfcd__Released body = BFCD__RELEASED__INIT;

        PUT(w, id, RELEASED, released, &body);
}

void wire_usage(struct wire *w, uint64_t id, Bfcd__Statistics *stats, Bfcd__Room *room)
{
        Bfcd__UsageReply body = BFCD__USAGE_REPLY__INIT;

        body.stats = stats;
        body.room = room;
        PUT(w, id, USAGE, usage, &body);
}

/* ---- events -------------------------------------------------------------------- */

int wire_open_events(struct wire *w)
{
        int fds[2], r = socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds);

        r |= frame_reader_new(false, &w->events_reader);
        assert(r == 0);
        w->events_fd = fds[0];
        return fds[1];
}

void wire_event(struct wire *w, const Bfcd__Event *event, int fd)
{
        struct frame_writer *writer = NULL;
        uint8_t *payload;
        int copy = fd >= 0 ? fcntl(fd, F_DUPFD_CLOEXEC, 3) : -1, r = frame_writer_new(65536, &writer);

        r |= frame_writer_add(writer, bfcd__event__get_packed_size(event), &copy, fd >= 0, &payload);
        assert(r == 0);
        bfcd__event__pack(event, payload);
        (void)frame_writer_flush(writer, w->events_fd);
        frame_writer_free(writer);
}

void wire_retire(struct wire *w, uint64_t sequence, uint64_t *ids, size_t n_ids, int fd)
{
        Bfcd__Event event = BFCD__EVENT__INIT;
        Bfcd__Retire retire = BFCD__RETIRE__INIT;

        event.sequence = sequence;
        retire.n_extent_ids = n_ids;
        retire.extent_ids = ids;
        event.body_case = BFCD__EVENT__BODY_RETIRE;
        event.retire = &retire;
        wire_event(w, &event, fd);
}

void wire_trim(struct wire *w)
{
        Bfcd__Event event = BFCD__EVENT__INIT;
        Bfcd__Trim trim = BFCD__TRIM__INIT;
        Bfcd__TrimRange range = BFCD__TRIM_RANGE__INIT, *ranges[] = { &range };

        range.region_id = REGION_ID;
        range.n_bytes = REGION_BYTES;
        event.sequence = WIRE_TRIM;
        trim.n_bytes = UINT64_MAX;
        trim.n_ranges = 1;
        trim.ranges = ranges;
        event.body_case = BFCD__EVENT__BODY_TRIM;
        event.trim = &trim;
        wire_event(w, &event, -1);
}

void wire_pressure(struct wire *w, uint32_t partition, uint64_t n_bytes)
{
        Bfcd__Event event = BFCD__EVENT__INIT;
        Bfcd__Pressure pressure = BFCD__PRESSURE__INIT;

        event.sequence = WIRE_PRESSURE;
        pressure.partition = partition;
        pressure.n_bytes = n_bytes;
        event.body_case = BFCD__EVENT__BODY_PRESSURE;
        event.pressure = &pressure;
        wire_event(w, &event, -1);
}

void wire_draining(struct wire *w, uint32_t partition, bool is_over)
{
        Bfcd__Event event = BFCD__EVENT__INIT;
        Bfcd__Draining draining = BFCD__DRAINING__INIT;

        draining.partition = partition;
        draining.is_over = is_over;
        event.body_case = BFCD__EVENT__BODY_DRAINING;
        event.draining = &draining;
        wire_event(w, &event, -1);
}

void wire_make_pages(uint64_t n_entries, struct pages_usage **ret_usage, void **ret_client,
                     int ret_fds[static 2])
{
        void *usage;
        int r = pages_make("usage", pages_usage_bytes(n_entries), true, &usage, &ret_fds[0]);

        r |= pages_make("client", pages_client_bytes(), false, ret_client, &ret_fds[1]);
        assert(r == 0);
        *ret_usage = usage;
        (*ret_usage)->magic = PAGES_USAGE_MAGIC;
        (*ret_usage)->version = PAGES_VERSION;
        (*ret_usage)->n_entries = n_entries;
        (*ret_usage)->entry_bytes = sizeof(struct pages_entry);
}

/* ---- the region ------------------------------------------------------------------ */

void region_open(struct region *r)
{
        int error = device_host_new(&r->device);

        assert(error == 0);
        for (size_t i = 0; i < N_EXTENTS; i++)
                r->extents[i] = DEVICE_EXTENT_EMPTY;
}

void region_close(struct region *r)
{
        for (size_t i = 0; i < N_EXTENTS; i++)
                device_destroy(r->device, &r->extents[i]);
        device_free(r->device);
}

void region_announce(struct region *r, uint64_t offset, uint64_t n_bytes, uint64_t given[static N_EXTENTS],
                     struct announcement *ret)
{
        ret->n = 0;
        for (size_t i = offset / EXTENT_BYTES; i <= (offset + n_bytes - 1) / EXTENT_BYTES; i++) {
                Bfcd__Extent *row = &ret->rows[ret->n];

                if (r->extents[i].fd < 0) {
                        int error = device_make(r->device, DEVICE_SHARE_FD, EXTENT_BYTES, &r->extents[i]);

                        assert(error == 0);
                        r->ids[i] = ++r->last_id;
                }
                if (given[i] == r->ids[i])
                        continue;
                given[i] = r->ids[i];
                bfcd__extent__init(row);
                row->extent_id = r->ids[i];
                row->region_id = REGION_ID;
                row->region_bytes = REGION_BYTES;
                row->offset = i * EXTENT_BYTES;
                row->n_bytes = EXTENT_BYTES;
                ret->list[ret->n] = row;
                ret->fds[ret->n++] = r->extents[i].fd;
        }
}

void wire_extents(struct wire *w, uint64_t sequence, struct announcement *a, bool with_fds)
{
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        Bfcd__Extents body = BFCD__EXTENTS__INIT;

        body.sequence = sequence;
        body.n_extents = a->n;
        body.extents = a->list;
        reply.body_case = BFCD__REPLY__BODY_EXTENTS;
        reply.extents = &body;
        wire_put(w, &reply, a->fds, with_fds ? a->n : 0);
}

unsigned find_units(const uint32_t *units, unsigned n_units, unsigned n)
{
        unsigned n_free = 0;

        for (unsigned i = 0; i < n_units; i++) {
                n_free = units[i] == 0 ? n_free + 1 : 0;
                if (n_free == n)
                        return i + 1 - n;
        }
        return n_units;
}
