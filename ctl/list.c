/* What the daemon lists: see list.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctl/list.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

int list_new(struct list **ret)
{
        struct list *l = calloc(1, sizeof(*l));

        if (!l)
                return -ENOMEM;
        *ret = l;
        return 0;
}

struct list *list_free(struct list *l)
{
        if (!l)
                return NULL;
        for (size_t i = 0; i < l->n_replies; i++)
                bfcd__reply__free_unpacked(l->replies[i], NULL);
        free(l->replies);
        free(l->partitions);
        free(l->tenants);
        free(l->sessions);
        free(l->blocks);
        free(l->shared);
        free(l->explained);
        free(l);
        return NULL;
}

static int keep(struct list *l, Bfcd__Reply *reply)
{
        Bfcd__Reply **replies = reallocarray(l->replies, l->n_replies + 1, sizeof(*replies));

        if (!replies) {
                bfcd__reply__free_unpacked(reply, NULL);
                return -ENOMEM;
        }
        l->replies = replies;
        l->replies[l->n_replies++] = reply;
        return 0;
}

/* Appends n pointers to an array of pointers, whatever they point to. */
static int append(void *array, size_t *n_array, const void *more, size_t n_more)
{
        void **old;
        void **new;

        if (n_more == 0)
                return 0;
        memcpy(&old, array, sizeof(old));
        new = reallocarray(old, *n_array + n_more, sizeof(*new));
        if (!new)
                return -ENOMEM;
        memcpy(new + *n_array, more, n_more * sizeof(*new));
        memcpy(array, &new, sizeof(new));
        *n_array += n_more;
        return 0;
}

int list_add(struct list *l, Bfcd__List__Kind kind, Bfcd__Reply *reply, uint64_t *ret_cursor)
{
        const Bfcd__ListReply *page = reply->body_case == BFCD__REPLY__BODY_LIST ? reply->list : NULL;
        int r = keep(l, reply);

        if (r < 0)
                return r;
        if (!page)
                return -EPROTO;
        if ((r = append(&l->partitions, &l->n_partitions, page->partitions, page->n_partitions)) < 0 ||
            (r = append(&l->tenants, &l->n_tenants, page->tenants, page->n_tenants)) < 0 ||
            (r = append(&l->sessions, &l->n_sessions, page->sessions, page->n_sessions)) < 0 ||
            (r = append(&l->blocks, &l->n_blocks, page->blocks, page->n_blocks)) < 0 ||
            (r = append(&l->shared, &l->n_shared, page->shared, page->n_shared)) < 0)
                return r;
        if (page->status)
                l->status = page->status;
        if (page->whoami)
                l->whoami = page->whoami;
        if (page->next_cursor == 0 && ((kind == BFCD__LIST__KIND__STATUS && !l->status) ||
                                       (kind == BFCD__LIST__KIND__WHOAMI && !l->whoami)))
                return -EPROTO;
        *ret_cursor = page->next_cursor;
        return 0;
}

int list_add_explained(struct list *l, Bfcd__Reply *reply, uint64_t *ret_cursor)
{
        const Bfcd__ExplainReply *page =
                reply->body_case == BFCD__REPLY__BODY_EXPLAIN ? reply->explain : NULL;
        int r = keep(l, reply);

        if (r < 0)
                return r;
        if (!page)
                return -EPROTO;
        r = append(&l->explained, &l->n_explained, page->rows, page->n_rows);
        if (r < 0)
                return r;
        *ret_cursor = page->next_cursor;
        return 0;
}

void list_leave_out(struct list *l, uint64_t session_id)
{
        size_t n = 0;

        for (size_t i = 0; i < l->n_sessions; i++)
                if (l->sessions[i]->session_id != session_id)
                        l->sessions[n++] = l->sessions[i];
        l->n_sessions = n;
}

uint64_t list_idle(const struct list *l, const char *tenant)
{
        uint64_t sum = 0;

        for (size_t i = 0; i < l->n_sessions; i++) {
                const Bfcd__SessionRow *s = l->sessions[i];

                if ((!tenant || strcmp(s->tenant, tenant) == 0) &&
                    __builtin_add_overflow(sum, s->client_bytes_idle, &sum))
                        return UINT64_MAX;
        }
        return sum;
}
