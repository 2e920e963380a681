/* The answer to a granted hello; see welcome.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/welcome.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/session/pressure.h"
#include "daemon/session/session.h"
#include "daemon/session/tell.h"
#include "proto/memfd.h"

/* A successor would recognize its process. */
static bool can_be_resumed(const struct session *s)
{
        return s->role == ROLE_CLIENT && store_keeps(s->broker->options.store) && s->who.pid > 0 &&
               s->who.start_time != 0;
}

/* protobuf-c's strings and bytes are not const, but it does not write them. */
static void describe_partition(const struct broker *b, const struct quota *q, Bfcd__PartitionInfo *ret)
{
        const struct partition *p = q->partition;

        bfcd__partition_info__init(ret);
        ret->name = (char *)(uintptr_t)p->name;
        ret->device = (char *)(uintptr_t)p->device_id;
        ret->bytes_limit = q->account.limit_bytes;
        ret->share = (char *)(uintptr_t)partition_share_name(p);
        ret->usage_entry = q->lease ? UINT32_MAX : (uint32_t)(p - b->partitions); /* a lease has no entry */
        ret->lease = (char *)(uintptr_t)(q->lease ? q->lease : "");
        ret->pinned = p->memory.is_pinned;
        ret->no_memory = p->device->has_no_memory;
        if (p->is_cuda) {
                ret->charges_contexts = p->context_bytes != CONFIG_NO_CONTEXTS;
                ret->context_bytes = ret->charges_contexts ? p->context_bytes : 0;
                ret->device_uuid.data = (uint8_t *)(uintptr_t)p->uuid;
                ret->device_uuid.len = sizeof(p->uuid);
        }
}

int welcome_open_events(struct session *s, const Bfcd__Request *r, int *ret_fd)
{
        *ret_fd = -1;
        if (s->role != ROLE_CLIENT || !s->ops->open_events || !r->hello->wants_events)
                return 0;
        return s->ops->open_events(s->userdata, ret_fd);
}

/* Owned until they are sent. */
struct welcome_fds {
        int events; /* the client's end of the events socket, or -1 */
        int usage;  /* the pages; both or none of them are -1 */
        int page;
};

/* No pages if the client did not ask for them, or there is no room: then it asks for statistics. */
static void open_pages(struct session *s, const Bfcd__Request *r, struct welcome_fds *fds)
{
        int usage, page;

        if (s->role != ROLE_CLIENT || !s->tenant->usage || !r->hello->wants_pages)
                return;
        usage = memfd_lend(s->tenant->usage->fd, O_RDONLY);
        if (usage < 0)
                return;
        if (client_page_new(&s->page, &page) < 0) {
                close(usage);
                return;
        }
        fds->usage = usage;
        fds->page = page;
}

static void close_fds(const struct welcome_fds *fds)
{
        if (fds->events >= 0)
                close(fds->events);
        if (fds->page < 0)
                return;
        close(fds->usage);
        close(fds->page);
}

static void send_welcome(struct session *s, Bfcd__Reply *reply, const struct welcome_fds *from)
{
        size_t n_fds = 0;
        int fds[3];

        if (from->events >= 0)
                fds[n_fds++] = from->events;
        if (from->page >= 0) {
                fds[n_fds++] = from->usage;
                fds[n_fds++] = from->page;
        }
        s->delivery.in_flight = n_fds > 0;
        reply->hello->has_events = session_has_events(s);
        reply->hello->has_pages = from->page >= 0;
        s->ops->send(s->userdata, reply, fds, n_fds);
}

/* Fills the reply but for has_events and has_pages. infos, pointers: one for each share. */
static void describe(const struct session *s, size_t share, Bfcd__PartitionInfo *infos,
                     Bfcd__PartitionInfo **pointers, Bfcd__HelloReply *ret)
{
        struct ledger_session *record = ledger_session_at(s->broker->ledger, s->index);

        for (size_t i = 0; i < s->n_shares; i++) {
                describe_partition(s->broker, s->shares[i].quota, &infos[i]);
                pointers[i] = &infos[i];
        }
        bfcd__hello_reply__init(ret);
        ret->version = SESSION_PROTOCOL_VERSION;
        ret->session_id = s->id;
        ret->secret.data = record->secret;
        ret->secret.len = sizeof(record->secret);
        if (s->tenant)
                ret->tenant = (char *)(uintptr_t)s->tenant->name;
        ret->n_partitions = s->n_shares;
        ret->partitions = pointers;
        ret->default_partition = (uint32_t)share;
        ret->can_resume = record->can_resume != 0;
        ret->takes_charges = s->tenant != NULL;
        ret->is_monitor = s->role == ROLE_MONITOR;
}

static void welcome(struct session *s, uint64_t id, size_t share, const struct welcome_fds *fds)
{
        Bfcd__PartitionInfo *infos = calloc(s->n_shares + 1, sizeof(*infos)),
                            **pointers = calloc(s->n_shares + 1, sizeof(*pointers));
        Bfcd__HelloReply hello;
        Bfcd__Reply reply = BFCD__REPLY__INIT;

        if (!infos || !pointers) {
                close_fds(fds);
                s->ops->abort(s->userdata, "out of memory");
                goto out;
        }
        describe(s, share, infos, pointers, &hello);
        reply.id = id;
        reply.body_case = BFCD__REPLY__BODY_HELLO;
        reply.hello = &hello;
        send_welcome(s, &reply, fds);
        tell_drains_of(s);
out:
        free(infos);
        free(pointers);
}

void welcome_send(struct session *s, const Bfcd__Request *r, size_t share, int events_fd)
{
        struct ledger_session *record = ledger_session_at(s->broker->ledger, s->index);
        struct welcome_fds fds = { .events = events_fd, .usage = -1, .page = -1 };

        record->has_events = events_fd >= 0;
        pressure_begin(s);
        record->can_resume = r->hello->can_resume && can_be_resumed(s);
        open_pages(s, r, &fds);
        welcome(s, r->id, share, &fds);
}
