/* Snapshots of the daemon; see snapshot_ask.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctl/snapshot_ask.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/snapshot.h"

#define BASE_ADDRESS (UINT64_C(1) << 44)
#define UNIT         (UINT64_C(2) << 20) /* between regions */
#define FRAME_TEXT   384u

struct region {
        uint64_t id, address, n_bytes; /* up to the end of the last extent */
};

struct item { /* a block */
        uint64_t region_id, offset;
        uint64_t address, n_bytes, n_requested, age_ms, session_id;
        unsigned device;
        char label[64]; /* its tag, or the name of a shared block */
};

struct piece {                         /* a segment */
        const Bfcd__ExtentRow *extent; /* its first */
        uint64_t address, n_bytes;
        unsigned device;
        size_t first, end; /* of its blocks */
};

struct snapshot_data {
        struct list *lists;
        struct region *regions; /* by id */
        size_t n_regions;
        struct piece *pieces; /* by address */
        size_t n_pieces;
        struct item *items; /* first as they come, then by address, without those that are left out */
        size_t n_items, n_items_max;
        uint64_t n_left_out;
};

static int fail(struct ask *a, int r)
{
        snprintf(a->error, sizeof(a->error),
                 r == -ERANGE ? "The tenants have more address space than the memory viewer can count."
                              : "Out of memory.");
        return r;
}

/* ---- reading --------------------------------------------------------------------- */

static int add_item(void *userdata, const Bfcd__BlockRow *row)
{
        struct snapshot_data *d = userdata;
        struct item *i;

        if (ask_block_is_parked(row))
                return 0;
        if (d->n_items == d->n_items_max) {
                size_t n = d->n_items_max * 2 + 1024;
                struct item *larger = reallocarray(d->items, n, sizeof(*larger));

                if (!larger)
                        return -ENOMEM;
                d->items = larger;
                d->n_items_max = n;
        }
        i = &d->items[d->n_items++];
        *i = (struct item){ .region_id = row->region_id,
                            .offset = row->offset,
                            .n_bytes = row->n_bytes,
                            .n_requested = row->n_requested,
                            .age_ms = row->age_ms,
                            .session_id = row->session_id };
        strncpy(i->label, *row->shared_name ? row->shared_name : row->tag, sizeof(i->label) - 1);
        return 0;
}

static int compare_extents(const void *left, const void *right)
{
        const Bfcd__ExtentRow *a = *(Bfcd__ExtentRow *const *)left, *b = *(Bfcd__ExtentRow *const *)right;

        if (a->region_id != b->region_id)
                return a->region_id < b->region_id ? -1 : 1;
        return (a->offset > b->offset) - (a->offset < b->offset);
}

static int compare_regions(const void *left, const void *right)
{
        const struct region *a = left, *b = right;

        return (a->id > b->id) - (a->id < b->id);
}

static unsigned device_of(const struct list *l, const char *partition)
{
        for (size_t i = 0; i < l->n_partitions; i++) {
                if (strcmp(l->partitions[i]->name, partition) != 0)
                        continue;
                for (unsigned k = 0; k < l->status->n_devices; k++)
                        if (strcmp(l->status->devices[k]->id, l->partitions[i]->device) == 0)
                                return k;
        }
        return 0;
}

static int add_region(struct snapshot_data *d, const Bfcd__ExtentRow *e)
{
        struct region *last = d->n_regions > 0 ? &d->regions[d->n_regions - 1] : NULL;
        uint64_t end;

        if (__builtin_add_overflow(e->offset, e->n_bytes, &end) || end > SNAPSHOT_MAX_ADDRESS)
                return -ERANGE;
        if (last && last->id == e->region_id) {
                last->n_bytes = end;
        } else {
                uint64_t after = last ? last->address + last->n_bytes : BASE_ADDRESS;

                d->regions[d->n_regions++] = (struct region){ .id = e->region_id,
                                                              .address = (after + UNIT - 1) / UNIT * UNIT,
                                                              .n_bytes = end };
        }
        last = &d->regions[d->n_regions - 1];
        return last->address + last->n_bytes > SNAPSHOT_MAX_ADDRESS ? -ERANGE : 0;
}

/* Regions, and in them segments. An extent that was listed twice, while it was made anew, counts once. */
static int find_pieces(struct snapshot_data *d)
{
        struct list *l = d->lists;

        d->regions = calloc(l->n_extents + 1, sizeof(*d->regions));
        d->pieces = calloc(l->n_extents + 1, sizeof(*d->pieces));
        if (!d->regions || !d->pieces)
                return -ENOMEM;
        if (l->n_extents > 0)
                qsort(l->extents, l->n_extents, sizeof(*l->extents), compare_extents);
        for (size_t i = 0; i < l->n_extents; i++) {
                const Bfcd__ExtentRow *e = l->extents[i];
                struct piece *last = d->n_pieces > 0 ? &d->pieces[d->n_pieces - 1] : NULL;
                uint64_t address;
                int r;

                if (last && i > 0 && l->extents[i - 1]->region_id == e->region_id &&
                    e->offset < d->regions[d->n_regions - 1].n_bytes)
                        continue;
                r = add_region(d, e);
                if (r < 0)
                        return r;
                address = d->regions[d->n_regions - 1].address + e->offset;
                if (last && last->extent->region_id == e->region_id &&
                    last->address + last->n_bytes == address)
                        last->n_bytes += e->n_bytes;
                else
                        d->pieces[d->n_pieces++] = (struct piece){ .extent = e,
                                                                   .address = address,
                                                                   .n_bytes = e->n_bytes,
                                                                   .device = device_of(l, e->partition) };
        }
        return 0;
}

static int compare_items(const void *left, const void *right)
{
        const struct item *a = left, *b = right;

        if (a->address != b->address)
                return a->address < b->address ? -1 : 1;
        return (a->age_ms > b->age_ms) - (a->age_ms < b->age_ms); /* the younger one is the last state */
}

static void place_items(struct snapshot_data *d)
{
        size_t n = 0;

        for (size_t i = 0; i < d->n_items; i++) {
                struct region key = { .id = d->items[i].region_id };
                const struct region *g = d->n_regions == 0 ? NULL
                                                           : bsearch(&key, d->regions, d->n_regions,
                                                                     sizeof(*d->regions), compare_regions);

                if (!g || d->items[i].n_bytes == 0 || d->items[i].n_bytes > g->n_bytes ||
                    d->items[i].offset > g->n_bytes - d->items[i].n_bytes)
                        continue;
                d->items[n] = d->items[i];
                d->items[n].address = g->address + d->items[n].offset;
                n++;
        }
        d->n_left_out += d->n_items - n;
        d->n_items = n;
        if (n > 0)
                qsort(d->items, n, sizeof(*d->items), compare_items);
}

/* Keeps the blocks that are inside of a segment and do not overlap the one before. */
static void fit_items(struct snapshot_data *d)
{
        size_t n = 0, next = 0;

        for (size_t k = 0; k < d->n_pieces; k++) {
                struct piece *p = &d->pieces[k];
                uint64_t at = p->address, end = p->address + p->n_bytes;

                p->first = n;
                for (; next < d->n_items && d->items[next].address < end; next++) {
                        const struct item *i = &d->items[next];

                        if (i->address < at || i->n_bytes > end - i->address)
                                continue;
                        at = i->address + i->n_bytes;
                        d->items[n] = *i;
                        d->items[n++].device = p->device;
                }
                p->end = n;
        }
        d->n_left_out += d->n_items - n;
        d->n_items = n;
}

int snapshot_ask(struct ask *a, struct snapshot_data **ret)
{
        static const Bfcd__List__Kind kinds[] = { BFCD__LIST__KIND__STATUS, BFCD__LIST__KIND__PARTITIONS,
                                                  BFCD__LIST__KIND__SESSIONS, BFCD__LIST__KIND__EXTENTS };
        struct snapshot_data *d = calloc(1, sizeof(*d));
        int r = d ? 0 : fail(a, -ENOMEM);

        if (r == 0)
                r = ask_blocks(a, add_item, d);
        if (r == 0)
                r = ask_lists(a, kinds, sizeof(kinds) / sizeof(kinds[0]), &d->lists);
        if (r == 0 && (r = find_pieces(d)) < 0)
                fail(a, r);
        if (r < 0) {
                snapshot_data_free(d);
                return r;
        }
        place_items(d);
        fit_items(d);
        *ret = d;
        return 0;
}

struct snapshot_data *snapshot_data_free(struct snapshot_data *d)
{
        if (!d)
                return NULL;
        list_free(d->lists);
        free(d->regions);
        free(d->pieces);
        free(d->items);
        free(d);
        return NULL;
}

uint64_t snapshot_n_left_out(const struct snapshot_data *d)
{
        return d->n_left_out;
}

/* ---- writing --------------------------------------------------------------------- */

static const char *session_name(const struct list *l, uint64_t id)
{
        size_t low = 0, high = l->n_sessions;

        while (low < high) {
                size_t middle = low + (high - low) / 2;

                if (l->sessions[middle]->session_id < id)
                        low = middle + 1;
                else
                        high = middle;
        }
        return low < l->n_sessions && l->sessions[low]->session_id == id ? l->sessions[low]->name : "";
}

/* The file is where the viewer shows the program's: "tenant/partition session 12 trainer". */
static void describe(const struct snapshot_data *d, const struct piece *p, const struct item *i,
                     char ret[static FRAME_TEXT])
{
        if (i->session_id == 0)
                snprintf(ret, FRAME_TEXT, "%s/%s shared", p->extent->tenant, p->extent->partition);
        else
                snprintf(ret, FRAME_TEXT, "%s/%s session %" PRIu64 " %s", p->extent->tenant,
                         p->extent->partition, i->session_id, session_name(d->lists, i->session_id));
}

static void put_gap(struct snapshot_writer *w, uint64_t begin, uint64_t end)
{
        if (begin < end)
                snapshot_block(w, &(struct snapshot_block){ .address = begin, .n_bytes = end - begin });
}

static void put_piece(struct snapshot_writer *w, const struct snapshot_data *d, const struct piece *p)
{
        char file[FRAME_TEXT];
        struct snapshot_frame frame = { .name = "segment", .file = file };
        uint64_t at = p->address;

        snprintf(file, sizeof(file), "%s/%s", p->extent->tenant, p->extent->partition);
        snapshot_segment(w, &(struct snapshot_segment){ .device = p->device,
                                                        .address = p->address,
                                                        .n_bytes = p->n_bytes,
                                                        .frame = &frame });
        for (size_t k = p->first; k < p->end; k++) {
                const struct item *i = &d->items[k];

                describe(d, p, i, file);
                frame.name = i->label;
                put_gap(w, at, i->address);
                at = i->address + i->n_bytes;
                snapshot_block(w, &(struct snapshot_block){ .address = i->address,
                                                            .n_bytes = i->n_bytes,
                                                            .n_requested = i->n_requested,
                                                            .is_active = true,
                                                            .frame = &frame });
        }
        put_gap(w, at, p->address + p->n_bytes);
}

/* What an event is of: an index of a block, with its segment. */
struct moment {
        size_t item, piece;
        uint64_t age_ms;
};

static int compare_moments(const void *left, const void *right)
{
        const struct moment *a = left, *b = right;

        if (a->age_ms != b->age_ms)
                return a->age_ms < b->age_ms ? 1 : -1;
        return (a->item > b->item) - (a->item < b->item);
}

static void put_trace(struct snapshot_writer *w, const struct snapshot_data *d, unsigned device,
                      const struct moment *moments)
{
        char file[FRAME_TEXT];
        struct snapshot_frame frame = { .file = file };

        snapshot_trace(w);
        for (size_t k = 0; k < d->n_pieces; k++)
                if (d->pieces[k].device == device)
                        snapshot_event(w, &(struct snapshot_event){ .action = "segment_alloc",
                                                                    .address = d->pieces[k].address,
                                                                    .n_bytes = d->pieces[k].n_bytes });
        for (size_t k = 0; k < d->n_items; k++) {
                const struct item *i = &d->items[moments[k].item];

                if (i->device != device)
                        continue;
                describe(d, &d->pieces[moments[k].piece], i, file);
                frame.name = i->label;
                snapshot_event(w, &(struct snapshot_event){ .action = "alloc",
                                                            .address = i->address,
                                                            .n_bytes = i->n_bytes,
                                                            .frame = &frame });
        }
}

int snapshot_write(FILE *out, const struct snapshot_data *d)
{
        struct moment *moments = calloc(d->n_items + 1, sizeof(*moments));
        size_t n_devices = d->lists->status->n_devices;
        struct snapshot_writer *w;
        int r = moments ? snapshot_new(out, &w) : -ENOMEM;

        if (r < 0) {
                free(moments);
                return r;
        }
        for (size_t k = 0; k < d->n_pieces; k++)
                for (size_t i = d->pieces[k].first; i < d->pieces[k].end; i++)
                        moments[i] = (struct moment){ i, k, d->items[i].age_ms };
        if (d->n_items > 0)
                qsort(moments, d->n_items, sizeof(*moments), compare_moments);
        for (size_t k = 0; k < d->n_pieces; k++)
                put_piece(w, d, &d->pieces[k]);
        for (unsigned k = 0; k == 0 || k < n_devices; k++)
                put_trace(w, d, k, moments);
        free(moments);
        return snapshot_end(w);
}
