/* Parkable blocks; see parkable.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "client/parkable.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "client/blocks.h"
#include "client/process.h"
#include "proto/pages.h"

int parkables_init(struct parkables *s, uint32_t n_partitions)
{
        pthread_condattr_t attributes;

        s->places = calloc(n_partitions + 1u, sizeof(*s->places));
        if (!s->places)
                return -ENOMEM;
        for (uint32_t i = 0; i < n_partitions; i++) {
                TAILQ_INIT(&s->places[i].idle);
                TAILQ_INIT(&s->places[i].others);
        }
        s->n_places = n_partitions;
        pthread_condattr_init(&attributes);
        pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
        pthread_cond_init(&s->changed, &attributes);
        pthread_condattr_destroy(&attributes);
        return 0;
}

static void list_free(struct parkable_list *list)
{
        struct parkable *p;

        while ((p = TAILQ_FIRST(list))) {
                TAILQ_REMOVE(list, p, link);
                free(p);
        }
}

void parkables_clear(struct parkables *s)
{
        if (!s->places)
                return;
        for (uint32_t i = 0; i < s->n_places; i++) {
                list_free(&s->places[i].idle);
                list_free(&s->places[i].others);
        }
        free(s->places);
        pthread_cond_destroy(&s->changed);
        *s = (struct parkables){ .places = NULL };
}

struct parkable *parkable_new(const char *tag)
{
        struct parkable *p = calloc(1, sizeof(*p));

        if (p && tag)
                snprintf(p->tag, sizeof(p->tag), "%s", tag);
        return p;
}

static struct parkable_place *place_of(struct parkables *s, const struct block *block)
{
        return &s->places[block->partition];
}

static void show(const struct parkable_place *place)
{
        const struct parkable *first = TAILQ_FIRST(&place->idle);

        if (!place->page)
                return;
        atomic_store_explicit(&place->page->since_ms, first ? (uint64_t)first->used_ms : 0,
                              memory_order_relaxed);
        atomic_store_explicit(&place->page->bytes, place->idle_bytes, memory_order_relaxed);
}

void parkables_show(struct parkables *s, uint32_t partition, struct pages_idle *page)
{
        s->places[partition].page = page;
        show(&s->places[partition]);
}

/* In the order of the last uses; most are the latest. */
static void insert_idle(struct parkable_place *place, struct parkable *p)
{
        struct parkable *at = TAILQ_LAST(&place->idle, parkable_list);

        while (at && at->used_ms > p->used_ms)
                at = TAILQ_PREV(at, parkable_list, link);
        if (at)
                TAILQ_INSERT_AFTER(&place->idle, at, p, link);
        else
                TAILQ_INSERT_HEAD(&place->idle, p, link);
        place->idle_bytes += p->block->n_bytes;
        p->is_idle = true;
        show(place);
}

static void take_out(struct parkable_place *place, const struct block *block, struct parkable *p)
{
        TAILQ_REMOVE(p->is_idle ? &place->idle : &place->others, p, link);
        if (p->is_idle)
                place->idle_bytes -= block->n_bytes;
        p->is_idle = false;
        show(place);
}

void parkable_enter(struct parkables *s, struct parkable *p, const struct block *block)
{
        p->block = block;
        p->used_ms = clock_now_ms();
        if (p->is_shared)
                TAILQ_INSERT_TAIL(&place_of(s, block)->others, p, link);
        else
                insert_idle(place_of(s, block), p);
}

void parkable_drop(struct parkables *s, const struct block *block, struct parkable *p)
{
        take_out(place_of(s, block), block, p);
        free(p);
}

void parkable_sort(struct parkables *s, struct parkable *p)
{
        struct parkable_place *place = place_of(s, p->block);

        take_out(place, p->block, p);
        if (!p->block->is_parked && !parkable_is_used(p) && !p->is_busy && !p->is_shared)
                insert_idle(place, p);
        else
                TAILQ_INSERT_TAIL(&place->others, p, link);
}

void parkable_touch(struct parkables *s, struct parkable *p)
{
        p->used_ms = clock_now_ms();
        parkable_sort(s, p);
}

bool parkable_has_tag(const struct parkable *p, const char *tag)
{
        return !tag || strcmp(p->tag, tag) == 0;
}

struct parkable *parkables_find_busy(const struct parkables *s, const void *ptr)
{
        struct parkable *p;

        for (uint32_t i = 0; i < s->n_places; i++) {
                TAILQ_FOREACH(p, &s->places[i].others, link)
                if (p->is_busy && (uintptr_t)ptr - (uintptr_t)p->block->ptr < p->block->n_bytes)
                        return p;
        }
        return NULL;
}

bool parkables_cover(const struct parkables *s, uint64_t region_id, uint64_t offset)
{
        const struct parkable *p;

        for (uint32_t i = 0; i < s->n_places; i++) {
                TAILQ_FOREACH(p, &s->places[i].others, link)
                if ((p->is_busy || p->block->is_parked) && p->block->region_id == region_id &&
                    offset - p->block->offset < p->block->n_bytes)
                        return true;
        }
        return false;
}
