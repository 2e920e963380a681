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
        free(l->leases);
        free(l->shared);
        free(l->extents);
        free(l->ages);
        free(l->grants);
        free(l->waiting);
        free(l->refusals);
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
            (r = append(&l->leases, &l->n_leases, page->leases, page->n_leases)) < 0 ||
            (r = append(&l->shared, &l->n_shared, page->shared, page->n_shared)) < 0 ||
            (r = append(&l->extents, &l->n_extents, page->extents, page->n_extents)) < 0 ||
            (r = append(&l->ages, &l->n_ages, page->ages, page->n_ages)) < 0 ||
            (r = append(&l->grants, &l->n_grants, page->grants, page->n_grants)) < 0 ||
            (r = append(&l->waiting, &l->n_waiting, page->waiting, page->n_waiting)) < 0 ||
            (r = append(&l->refusals, &l->n_refusals, page->refusals, page->n_refusals)) < 0)
                return r;
        if (kind == BFCD__LIST__KIND__GRANTS) {
                l->grant_bounds_ns = page->grant_bounds_ns;
                l->n_grant_bounds_ns = page->n_grant_bounds_ns;
        }
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

static int by_id(uint64_t a, uint64_t b)
{
        return (a > b) - (a < b);
}

static int by_text(const char *a, const char *b, const char *c, const char *d)
{
        int r = strcmp(a, b);

        return r ? r : strcmp(c, d);
}

static int by_tenant(const void *left, const void *right)
{
        const Bfcd__TenantRow *const *a = left, *const *b = right;

        return by_text((*a)->tenant, (*b)->tenant, (*a)->partition, (*b)->partition);
}

static int by_way(const void *left, const void *right)
{
        const Bfcd__GrantsRow *const *a = left, *const *b = right;
        int r = by_text((*a)->tenant, (*b)->tenant, (*a)->partition, (*b)->partition);

        return r ? r : strcmp((*a)->way, (*b)->way);
}

static int by_session(const void *left, const void *right)
{
        const Bfcd__SessionRow *const *a = left, *const *b = right;

        return by_id((*a)->session_id, (*b)->session_id);
}

static int by_shared(const void *left, const void *right)
{
        const Bfcd__SharedRow *const *a = left, *const *b = right;

        return by_text((*a)->tenant, (*b)->tenant, (*a)->name, (*b)->name);
}

static int by_queue(const void *left, const void *right)
{
        const Bfcd__WaitingRow *const *a = left, *const *b = right;
        int r = by_text((*a)->partition, (*b)->partition, (*a)->tenant, (*b)->tenant);

        if (r == 0)
                r = strcmp((*a)->lease, (*b)->lease);
        return r ? r : by_id((*a)->position, (*b)->position);
}

static int by_lease(const void *left, const void *right)
{
        const Bfcd__LeaseRow *const *a = left, *const *b = right;

        return by_text((*a)->tenant, (*b)->tenant, (*a)->name, (*b)->name);
}

static int by_refusal(const void *left, const void *right)
{
        const Bfcd__RefusalRow *const *a = left, *const *b = right;
        int r = strcmp((*a)->tenant, (*b)->tenant);

        return r ? r : by_id((*a)->number, (*b)->number);
}

static int by_place(const void *left, const void *right)
{
        const Bfcd__ExtentRow *const *a = left, *const *b = right;
        int r = by_id((*a)->region_id, (*b)->region_id);

        return r ? r : by_id((*a)->offset, (*b)->offset);
}

static void sort(void *rows, size_t n_rows, int (*compare)(const void *left, const void *right))
{
        if (n_rows > 0)
                qsort(rows, n_rows, sizeof(void *), compare);
}

void list_sort(struct list *l)
{
        sort(l->tenants, l->n_tenants, by_tenant);
        sort(l->sessions, l->n_sessions, by_session);
        sort(l->shared, l->n_shared, by_shared);
        sort(l->grants, l->n_grants, by_way);
        sort(l->waiting, l->n_waiting, by_queue);
        sort(l->leases, l->n_leases, by_lease);
        sort(l->refusals, l->n_refusals, by_refusal);
        sort(l->extents, l->n_extents, by_place);
}

void list_leave_out(struct list *l, uint64_t session_id)
{
        size_t n = 0;

        for (size_t i = 0; i < l->n_sessions; i++)
                if (l->sessions[i]->session_id != session_id)
                        l->sessions[n++] = l->sessions[i];
        l->n_sessions = n;
}

void list_leave_out_names(struct list *l)
{
        for (size_t i = 0; i < l->n_shared; i++)
                if (l->shared[i]->name[0] != '\0')
                        l->shared[i]->name[0] = '\0';
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
