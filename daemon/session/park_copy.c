/* The copying of parked blocks; see park_internal.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/base/number.h"
#include "daemon/session/park_internal.h"
#include "daemon/session/session.h"

#define PIECE_BYTES (UINT64_C(8) << 20)
#define FIRST_TURN  3u /* pieces: about as much as a turn is to take where the processor copies */

struct park_piece {
        struct device_extent memory, copy; /* borrowed */
        uint64_t memory_offset, copy_offset;
        uint64_t n_bytes;
};

static struct park_copier *copier_of(struct worker_job *job)
{
        return (struct park_copier *)(void *)((char *)job - offsetof(struct park_copier, job));
}

/* On a worker thread. */
static int copy_pieces(const struct park_copying *c, const struct park_piece *pieces, size_t n)
{
        struct device *device = c->memory.quota->partition->device;
        struct partition *host = c->copy.quota->partition;
        struct device_copy copies[DEVICE_COPIES];

        if (__atomic_load_n(&device->is_ending, __ATOMIC_RELAXED))
                return -ECANCELED;
        for (size_t i = 0; i < n; i++)
                copies[i] =
                        (struct device_copy){ .extent = &pieces[i].memory,
                                              .offset = pieces[i].memory_offset,
                                              .host = &pieces[i].copy,
                                              .host_offset = pieces[i].copy_offset,
                                              .n_bytes = pieces[i].n_bytes,
                                              .to_host = c->to_copy,
                                              .pins = host->memory.is_pinned ? &host->memory.pins : NULL };
        return device_copy(device, copies, n);
}

static void copier_run(struct worker_job *job)
{
        struct park_copier *copier = copier_of(job);
        struct park_copying *c = copier->copying;
        size_t first = __atomic_fetch_add(&c->n_taken, copier->n_a_turn, __ATOMIC_RELAXED);
        size_t end = min_u64(first + copier->n_a_turn, c->n_pieces);
        uint64_t begun_ns = clock_ns();
        bool goes_on = first < end && __atomic_load_n(&c->result, __ATOMIC_RELAXED) == 0;
        int r = goes_on ? copy_pieces(c, &c->pieces[first], end - first) : 0;

        /* A failure ends the other copier, too. */
        if (r < 0)
                __atomic_store_n(&c->result, r, __ATOMIC_RELAXED);
        copier->n_a_turn = min_u64(worker_next_turn(copier->n_a_turn, clock_ns() - begun_ns), DEVICE_COPIES);
        job->goes_on = goes_on && end < c->n_pieces && __atomic_load_n(&c->result, __ATOMIC_RELAXED) == 0;
}

static void copier_done(struct worker_job *job)
{
        struct park_copying *c = copier_of(job)->copying;
        struct partition *host = c->copy.quota->partition;
        int pin_error = atomic_load(&host->memory.pins.error);

        /* The last one ends the copying. */
        if (--c->n_copiers > 0)
                return;
        if (pin_error != 0 && !host->memory.has_told_of_pins) {
                host->memory.has_told_of_pins = true;
                log_warning(
                        "partition '%s' is pinned, but CUDA could not register its memory: %s; blocks are parked there "
                        "through buffers, which is slower",
                        host->name, strerror(-pin_error));
        }
        c->done(c);
}

/* The extent at this place of a block; returns how many bytes it has from there on. */
static uint64_t extent_at(const struct park_memory *m, uint64_t at, struct device_extent *ret,
                          uint64_t *ret_offset)
{
        const struct arena *arena = m->quota->arena;
        size_t last, slot = arena_slots(arena, m->offset + at, 1, &last);
        const struct ledger_extent *e =
                ledger_extent_at(m->quota->partition->ledger, arena_slot_extent(arena, slot));

        *ret = *arena_slot_memory(arena, slot);
        *ret_offset = m->offset + at - e->offset;
        return e->n_bytes - *ret_offset;
}

static size_t cut_pieces(const struct park_copying *c, struct park_piece *ret)
{
        uint64_t at = 0;
        size_t n = 0;

        for (; at < c->memory.n_bytes; n++) {
                struct park_piece piece;
                uint64_t rest = extent_at(&c->memory, at, &piece.memory, &piece.memory_offset);

                rest = min_u64(rest, extent_at(&c->copy, at, &piece.copy, &piece.copy_offset));
                piece.n_bytes = min_u64(min_u64(rest, PIECE_BYTES), c->memory.n_bytes - at);
                at += piece.n_bytes;
                if (ret)
                        ret[n] = piece;
        }
        return n;
}

/* One for all leases of a tenant in the partition: a client can hold up one copy in each lane, and each takes a thread. */
static struct worker_lane *lane_of(const struct quota *q)
{
        return arena_copy_lane(quota_of_tenant(q)->arena);
}

/* Extents of the host that clients have are read under locks of their pages, which clients can hold. Copies are in extents
 * that no client has. */
static bool may_be_held(const struct park_copying *c)
{
        return c->to_copy && !c->memory.quota->partition->is_cuda;
}

static void copier_start(struct park_copying *c, struct worker_lane *lane)
{
        struct park_copier *copier = &c->copiers[c->n_copiers++];

        copier->copying = c;
        copier->n_a_turn = FIRST_TURN;
        copier->job = (struct worker_job){
                .run = copier_run, .done = copier_done, .lane = lane, .may_be_held = may_be_held(c)
        };
        worker_submit(c->memory.quota->partition->worker, &copier->job);
}

/* Between two partitions of the host two threads copy, each in turns of one of the partitions: one does not use all of
 * the memory's bandwidth. */
int park_copy_start(struct park_copying *c, void (*done)(struct park_copying *c))
{
        struct worker_lane *lane = lane_of(c->memory.quota), *other = lane_of(c->copy.quota);

        c->n_pieces = cut_pieces(c, NULL);
        c->pieces = calloc(c->n_pieces, sizeof(*c->pieces));
        if (!c->pieces)
                return -ENOMEM;
        (void)cut_pieces(c, c->pieces);
        c->done = done;
        copier_start(c, lane);
        if (other != lane && c->copy.quota->partition->worker == c->memory.quota->partition->worker)
                copier_start(c, other);
        return 0;
}

void park_copy_drop(struct park_copying *c)
{
        __atomic_store_n(&c->result, -ECANCELED, __ATOMIC_RELAXED);
}

void park_memory_free(struct park_memory *m)
{
        struct quota *q = m->quota;
        bool was_owned = m->is_owned;

        m->is_owned = false;
        if (!was_owned)
                return;

        /* The undo of a wake is not needed any more; without a wake this does nothing. */
        quota_wake_commit(q, m->handle);
        quota_dealloc(q, m->handle, m->n_bytes, m->n_bytes);

        /* A quota without sessions keeps nothing, and may be gone after that. */
        if (q->sessions.n > 0 || __atomic_load_n(&q->partition->device->is_ending, __ATOMIC_RELAXED))
                return;
        quota_release_unused(q);
        broker_note_leave(q->partition->up.broker, q);
}

void park_copy_deinit(struct park_copying *c)
{
        park_memory_free(&c->copy);
        park_memory_free(&c->memory);
        free(c->pieces);
}

const char *park_copy_sentence(int error)
{
        return error == -ECANCELED ? "the daemon is ending"
                                   : "the daemon could not copy the block's contents";
}
