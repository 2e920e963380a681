/* Parkable blocks; see parkable.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "client/parkable.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/blocks.h"
#include "client/process.h"
#include "proto/pages.h"

void parkables_init(struct parkables *s)
{
        TAILQ_INIT(&s->idle);
        TAILQ_INIT(&s->others);
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
        list_free(&s->idle);
        list_free(&s->others);
}

struct parkable *parkable_new(const char *tag)
{
        struct parkable *p = calloc(1, sizeof(*p));

        if (p && tag)
                snprintf(p->tag, sizeof(p->tag), "%s", tag);
        return p;
}

static void show(const struct parkables *s)
{
        const struct parkable *first = TAILQ_FIRST(&s->idle);

        if (!s->page)
                return;
        atomic_store_explicit(&s->page->since_ms, first ? (uint64_t)first->used_ms : 0, memory_order_relaxed);
        atomic_store_explicit(&s->page->bytes, s->idle_bytes, memory_order_relaxed);
}

void parkables_show(struct parkables *s, struct pages_idle *page)
{
        s->page = page;
        show(s);
}

/* In the order of the last uses; most are the latest. */
static void insert_idle(struct parkables *s, struct parkable *p)
{
        struct parkable *at = TAILQ_LAST(&s->idle, parkable_list);

        while (at && at->used_ms > p->used_ms)
                at = TAILQ_PREV(at, parkable_list, link);
        if (at)
                TAILQ_INSERT_AFTER(&s->idle, at, p, link);
        else
                TAILQ_INSERT_HEAD(&s->idle, p, link);
        s->idle_bytes += p->block->n_bytes;
        p->is_idle = true;
        show(s);
}

static void take_out(struct parkables *s, const struct block *block, struct parkable *p)
{
        TAILQ_REMOVE(p->is_idle ? &s->idle : &s->others, p, link);
        if (p->is_idle)
                s->idle_bytes -= block->n_bytes;
        p->is_idle = false;
        show(s);
}

void parkable_enter(struct parkables *s, struct parkable *p, const struct block *block)
{
        p->block = block;
        p->in = s;
        p->used_ms = clock_now_ms();
        if (p->is_shared)
                TAILQ_INSERT_TAIL(&s->others, p, link);
        else
                insert_idle(s, p);
}

void parkable_drop(const struct block *block, struct parkable *p)
{
        take_out(p->in, block, p);
        free(p);
}

void parkable_sort(struct parkable *p)
{
        take_out(p->in, p->block, p);
        if (!p->block->is_parked && !parkable_is_used(p) && !p->is_busy && !p->is_shared)
                insert_idle(p->in, p);
        else
                TAILQ_INSERT_TAIL(&p->in->others, p, link);
}

void parkable_touch(struct parkable *p)
{
        p->used_ms = clock_now_ms();
        parkable_sort(p);
}

bool parkable_has_tag(const struct parkable *p, const char *tag)
{
        return !tag || strcmp(p->tag, tag) == 0;
}

struct parkable *parkables_find_busy(const struct parkables *s, const void *ptr)
{
        struct parkable *p;

        TAILQ_FOREACH(p, &s->others, link)
        {
                if (p->is_busy && (uintptr_t)ptr - (uintptr_t)p->block->ptr < p->block->n_bytes)
                        return p;
        }
        return NULL;
}

bool parkables_cover(const struct parkables *s, uint64_t region_id, uint64_t offset)
{
        const struct parkable *p;

        TAILQ_FOREACH(p, &s->others, link)
        {
                if ((p->is_busy || p->block->is_parked) && p->block->region_id == region_id &&
                    offset - p->block->offset < p->block->n_bytes)
                        return true;
        }
        return false;
}
