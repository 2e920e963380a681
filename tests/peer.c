/* Peers; see peer.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/peer.h"
#include "tests/checks.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/base/log.h"
#include "daemon/session/lease.h"
#include "daemon/session/report.h"
#include "daemon/session/resume.h"
#include "daemon/session/delivery.h"
#include "daemon/session/recall.h"
#include "daemon/session/request.h"
#include "daemon/session/session_states.h"
#include "daemon/session/shared.h"

/* Works in fuzzers too, so no Check in here. */
#define MUST(condition)                                                                                      \
        do {                                                                                                 \
                if (!(condition)) {                                                                          \
                        fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition);        \
                        abort();                                                                             \
                }                                                                                            \
        } while (0)

struct broker *peer_broker(const char *config_text, struct config **ret_config)
{
        return peer_broker_on(config_text, NULL, NULL, ret_config);
}

static const struct upcalls upcalls = {
        .retire = retire_extents,
        .unmaps_soon = retire_unmaps_soon,
        .press = pressure_ask,
        .trim = trim_ask,
        .is_trimming = trim_is_asked,
        .lease_gone = lease_gone,
        .trim_excess = trim_excess,
};

static int try_broker(const char *config_text, const struct config_machine *machine, struct devices *devices,
                      struct store *store, struct config **ret_config, struct broker **ret)
{
        struct broker_options options = {
                .inline_workers = true, .upcalls = &upcalls, .store = store, .devices = devices
        };
        char sentence[512];

        log_open(LOG_LEVEL_ERROR);
        MUST(config_parse("test.yaml", config_text, strlen(config_text), machine, stderr, ret_config) == 0);
        options.config = *ret_config;
        return broker_new(&options, ret, sentence, sizeof(sentence));
}

static struct broker *open_broker(const char *config_text, const struct config_machine *machine,
                                  struct devices *devices, struct store *store, struct config **ret_config)
{
        struct broker *b = NULL;

        MUST(try_broker(config_text, machine, devices, store, ret_config, &b) == 0);
        return b;
}

struct broker *peer_broker_on(const char *config_text, const struct config_machine *machine,
                              struct devices *devices, struct config **ret_config)
{
        return open_broker(config_text, machine, devices, NULL, ret_config);
}

struct broker *peer_broker_kept(const char *config_text, const struct config_machine *machine,
                                struct devices *devices, struct store *store, struct config **ret_config)
{
        struct broker *b = open_broker(config_text, machine, devices, store, ret_config);

        MUST(restore_sessions(b) == 0);
        return b;
}

void peer_broker_leave(struct broker *b, struct config *c)
{
        broker_prepare_leave(b);
        restore_forget(b);
        broker_leave(b);
        config_free(c);
}

/* ---- a device that does not empty mappings -------------------------------- */

#define STICKY_EXTENTS 4096

static const struct device_ops *real_ops; /* NULL: there is no such device now */
static struct device_ops sticky_ops;
static struct {
        uint64_t inode;
        unsigned n;
} holders[STICKY_EXTENTS]; /* n 0: not in use */

static uint64_t inode_of(int fd)
{
        struct stat st;

        MUST(fstat(fd, &st) == 0);
        return st.st_ino;
}

/* The place of an extent; NULL: peers do not have it. */
static unsigned *holders_of(uint64_t inode)
{
        for (size_t i = 0; i < STICKY_EXTENTS; i++)
                if (holders[i].n > 0 && holders[i].inode == inode)
                        return &holders[i].n;
        return NULL;
}

static void holders_add(uint64_t inode)
{
        unsigned *n = holders_of(inode);
        size_t i = 0;

        if (n) {
                ++*n;
                return;
        }
        while (i < STICKY_EXTENTS && holders[i].n > 0)
                i++;
        MUST(i < STICKY_EXTENTS);
        holders[i].inode = inode;
        holders[i].n = 1;
}

static int sticky_destroy(struct device *d, struct device_extent *e)
{
        MUST(!holders_of(inode_of(e->fd)));
        return real_ops->destroy(d, e);
}

struct broker *peer_broker_sticky(const char *config_text, struct config **ret_config)
{
        struct broker *b = peer_broker(config_text, ret_config);
        struct device *d = b->devices[0].device;

        MUST(b->n_devices == 1 && !real_ops);
        real_ops = d->ops;
        sticky_ops = *real_ops;
        sticky_ops.destroy = sticky_destroy;
        d->ops = &sticky_ops;
        return b;
}

static void peer_hold(struct peer *p, uint64_t id, int fd)
{
        p->refs = realloc(p->refs, (p->n_refs + 1) * sizeof(*p->refs));
        MUST(p->refs);
        p->refs[p->n_refs++] = (struct peer_hold){ id, inode_of(fd) };
        holders_add(inode_of(fd));
}

static size_t peer_find_hold(const struct peer *p, uint64_t id)
{
        size_t i = 0;

        while (i < p->n_refs && p->refs[i].id != id)
                i++;
        return i;
}

static void peer_let_go(struct peer *p, size_t i)
{
        MUST(holders_of(p->refs[i].inode));
        --*holders_of(p->refs[i].inode);
        p->refs[i] = p->refs[--p->n_refs];
}

static void peer_let_go_all(struct peer *p)
{
        while (p->n_refs > 0)
                peer_let_go(p, 0);
}

/* ---- brokers -------------------------------------------------------------- */

struct broker *peer_broker_free(struct broker *b, struct config *c)
{
        struct ledger_counts counts;
        const char *why = "";

        peer_settle(b);
        shared_end_kept(b);
        peer_settle(b);
        if (broker_check(b, &why) < 0) {
                fprintf(stderr, "broker_check: %s\n", why);
                abort();
        }
        ledger_count(b->ledger, &counts);
        MUST(counts.n_sessions == 0 && counts.n_blocks == 0 && counts.n_exports == 0);
        MUST(counts.n_shared == 0 && counts.n_refs == 0 && shared_check(b, &why) == 0);
        MUST(b->sessions.n == 0 && b->sessions.n_clients == 0);
        for (size_t i = 0; i < b->n_tenants; i++)
                MUST(b->tenants[i].n_sessions == 0 && b->tenants[i].n_quarantined == 0);
        for (size_t i = 0; i < b->n_partitions; i++)
                MUST(b->partitions[i].preallocate || b->partitions[i].pool.charged_bytes == 0);
        MUST(retire_check(b, &why) == 0 && trim_check(b, &why) == 0 && pressure_check(b, &why) == 0);
        broker_free(b);
        real_ops = NULL;
        config_free(c);
        return NULL;
}

static LIST_HEAD(, peer) peers;

/* Where retirement is not the test's subject, all peers unmap at once. */
static bool answer_all(struct peer *p)
{
        bool answers = false;

        while (!real_ops && p->n_retires > 0 && session_is_live(p->session)) {
                MUST(peer_answer(p, p->retires[0].sequence) == 0);
                answers = true;
        }
        while (p->answers && p->n_trims > 0 && session_is_live(p->session)) {
                MUST(peer_answer(p, p->trims[0].sequence) == 0);
                answers = true;
        }
        return answers;
}

static bool peers_answer(const struct broker *b)
{
        struct peer *p;
        bool answers = false;

        LIST_FOREACH(p, &peers, link)
        if (p->session->broker == b && !p->aborted)
                answers = answer_all(p) || answers;
        return answers;
}

void peer_settle(struct broker *b)
{
        do {
                while (broker_is_due(b) || shared_is_due(b) || broker_n_pending(b) > 0) {
                        broker_turn(b);
                        shared_turn(b);
                        broker_poll(b);
                }
        } while (peers_answer(b));
}

/* A client may compare each reply with the page. */
static void check_usage_pages(const struct broker *b)
{
        for (size_t i = 0; i < b->n_tenants; i++) {
                for (size_t k = 0; k < b->tenants[i].n_quotas; k++) {
                        const struct quota *q = b->tenants[i].quotas[k];
                        Bfcd__Statistics f = BFCD__STATISTICS__INIT;
                        uint64_t page[PAGES_N_STATS];

                        if (q->lease)
                                continue;
                        MUST(q->page ==
                             usage_page_entry(b->tenants[i].usage, (size_t)(q->partition - b->partitions)));
                        MUST(pages_read(q->page, page) == 0);
                        report_quota_stats(q, &f);
                        MUST(page[PAGES_BYTES_LIMIT] == f.bytes_limit);
                        MUST(page[PAGES_BYTES_RESERVED] == f.bytes_reserved);
                        MUST(page[PAGES_PEAK_BYTES_RESERVED] == f.peak_bytes_reserved);
                        MUST(page[PAGES_BYTES_IN_USE] == f.bytes_in_use);
                        MUST(page[PAGES_PEAK_BYTES_IN_USE] == f.peak_bytes_in_use);
                        MUST(page[PAGES_BYTES_REQUESTED] == f.bytes_requested);
                        MUST(page[PAGES_NUM_BLOCKS] == f.num_blocks);
                        MUST(page[PAGES_NUM_SESSIONS] == f.num_sessions);
                        MUST(page[PAGES_LARGEST_FREE_BLOCK_BYTES] == f.largest_free_block_bytes);
                        MUST(page[PAGES_LIFETIME_PEAK_BYTES_IN_USE] == f.lifetime_peak_bytes_in_use);
                        MUST(page[PAGES_LIFETIME_PEAK_BYTES_RESERVED] == f.lifetime_peak_bytes_reserved);
                }
        }
}

static void take_hello_fds(struct peer *p, const Bfcd__HelloReply *hello, const int *fds, size_t n_fds)
{
        MUST(!hello->has_events || p->wants_events);
        MUST(!hello->has_pages || p->wants_pages);
        MUST(n_fds == (size_t)hello->has_events + 2 * (size_t)hello->has_pages);
        for (size_t i = 0; hello->has_pages && i < 2; i++) {
                p->page_fds[i] = fcntl(fds[n_fds - 2 + i], F_DUPFD_CLOEXEC, 0);
                MUST(p->page_fds[i] >= 0);
        }
}

static void on_send(void *userdata, const Bfcd__Reply *reply, const int *fds, size_t n_fds)
{
        struct peer *p = userdata;
        size_t n = bfcd__reply__get_packed_size(reply);
        uint8_t bytes[65536];

        check_usage_pages(p->session->broker);
        MUST(n <= sizeof(bytes));
        bfcd__reply__pack(reply, bytes);
        MUST(p->n_replies < PEER_MAX_REPLIES);
        p->replies[p->n_replies] = bfcd__reply__unpack(NULL, n, bytes);
        MUST(p->replies[p->n_replies]);
        p->n_replies++;
        if (reply->body_case == BFCD__REPLY__BODY_EXTENTS) {
                size_t n_taken = 0;

                MUST(reply->extents->n_extents <= 64);
                for (size_t i = 0; i < reply->extents->n_extents; i++) {
                        const Bfcd__Extent *e = reply->extents->extents[i];

                        MUST(e->handle.len == 0 || e->handle.len == DEVICE_HANDLE_BYTES);
                        if (e->handle.len > 0)
                                continue;
                        MUST(n_taken < n_fds && fcntl(fds[n_taken], F_GETFD) >= 0);
                        if (real_ops)
                                peer_hold(p, e->extent_id, fds[n_taken]);
                        n_taken++;
                }
                MUST(n_taken == n_fds);
                p->n_extents += reply->extents->n_extents;
                p->to_ack = reply->extents->sequence;
        } else if (reply->body_case == BFCD__REPLY__BODY_HELLO) {
                MUST(reply->hello->secret.len == sizeof(p->secret));
                memcpy(p->secret, reply->hello->secret.data, sizeof(p->secret));
                take_hello_fds(p, reply->hello, fds, n_fds);
        } else {
                MUST(n_fds == 0);
        }
        for (size_t i = 0; i < n_fds; i++)
                close(fds[i]);
}

/* Nothing is ever sent there. */
static int on_open_events(void *userdata, int *ret_fd)
{
        const struct peer *p = userdata;

        MUST(p->wants_events);
        *ret_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
        return *ret_fd < 0 ? -errno : 0;
}

static void on_quota_changed(struct peer *p, const Bfcd__QuotaChanged *changed)
{
        MUST(p->wants_events && changed->partition < PEER_MAX_PARTITIONS);
        p->n_limits_told++;
        p->limits_told[changed->partition] = changed->bytes_limit;
}

/* All blocks in a range of a Trim belong to sessions that answer, and at least one to the asked session. */
static void check_trim_range(const struct peer *p, const struct quota *q, const Bfcd__TrimRange *range)
{
        struct broker *b = p->session->broker;
        bool has_own = false;

        for (uint32_t i = 0; i < ledger_block_end(b->ledger); i++) {
                const struct ledger_block *block = ledger_block_get(b->ledger, i);
                const struct session_share *share;
                struct arena_place place;

                if (!block || block->quota != q->index)
                        continue;
                arena_locate(q->arena, block->offset, &place);
                if (place.region_id != range->region_id || place.offset >= range->offset + range->n_bytes ||
                    place.offset + block->n_bytes <= range->offset)
                        continue;
                MUST(block->shared == LEDGER_NONE && b->sessions.table[block->session]);
                share = session_share_of(b->sessions.table[block->session], q->index);
                MUST(share && share->trim.asked.session && !recall_is_overdue(&share->trim.asked.recall));
                has_own = has_own || block->session == p->session->index;
        }
        MUST(has_own);
}

/* One at a time for a partition, and not about nothing. */
static void on_trim(struct peer *p, uint64_t sequence, const Bfcd__Trim *trim)
{
        struct peer_trim *t = &p->trims[p->n_trims];

        MUST(p->wants_events && p->n_trims < 16);
        MUST(trim->n_bytes > 0);
        MUST(trim->partition < p->session->n_shares);
        MUST(trim->n_ranges > 0 && trim->n_ranges <= TRIM_MAX_RANGES);
        for (size_t i = 0; i < p->n_trims; i++)
                MUST(p->trims[i].partition != trim->partition);
        *t = (struct peer_trim){ sequence, trim->partition, trim->n_bytes, trim->n_ranges, { { 0 } } };
        for (size_t i = 0; i < t->n_ranges; i++) {
                t->ranges[i].region_id = trim->ranges[i]->region_id;
                t->ranges[i].offset = trim->ranges[i]->offset;
                t->ranges[i].n_bytes = trim->ranges[i]->n_bytes;
                MUST(t->ranges[i].n_bytes > 0);
                check_trim_range(p, p->session->shares[trim->partition].quota, trim->ranges[i]);
        }
        p->n_trims++;
        p->n_trimmed++;
}

static void on_pressure(struct peer *p, uint64_t sequence, const Bfcd__Pressure *m)
{
        MUST(p->wants_events && p->n_pressures < PEER_MAX_PARTITIONS);
        MUST(m->n_bytes > 0);
        MUST(m->partition < p->session->n_shares && m->to < p->session->n_shares && !(m->parks && m->wakes));
        for (size_t i = 0; i < p->n_pressures; i++)
                MUST(p->pressures[i].partition != m->partition);
        p->pressures[p->n_pressures] =
                (struct peer_pressure){ sequence, m->partition, m->n_bytes, m->parks, m->is_command,
                                        m->wakes, m->idle_ms,   m->to,      "" };
        snprintf(p->pressures[p->n_pressures].tag, sizeof(p->pressures[0].tag), "%s", m->tag);
        p->n_pressures++;
        p->n_pressed++;
}

/* What a correct client relies on: it is told in order, never of too much at
 * once, and only of what it has acknowledged. */
static void on_send_event(void *userdata, const Bfcd__Event *event)
{
        struct peer *p = userdata;
        const Bfcd__Retire *retire = event->retire;
        struct peer_retire *r = &p->retires[p->n_retires];

        if (event->body_case == BFCD__EVENT__BODY_QUOTA_CHANGED) {
                on_quota_changed(p, event->quota_changed);
                return;
        }
        if (event->body_case == BFCD__EVENT__BODY_DRAINING) {
                MUST(p->wants_events && event->draining->partition < p->session->n_shares);
                p->n_drains_told++;
                p->is_draining[event->draining->partition] = !event->draining->is_over;
                return;
        }
        MUST(event->sequence == ++p->event_sequence);
        if (event->body_case == BFCD__EVENT__BODY_TRIM) {
                on_trim(p, event->sequence, event->trim);
                return;
        }
        if (event->body_case == BFCD__EVENT__BODY_PRESSURE) {
                on_pressure(p, event->sequence, event->pressure);
                return;
        }
        MUST(event->body_case == BFCD__EVENT__BODY_RETIRE && p->wants_events);
        MUST(p->n_retires < RETIRE_MAX_OPEN);
        MUST(retire->n_extent_ids > 0 && retire->n_extent_ids <= RETIRE_MAX_EXTENTS);
        r->sequence = event->sequence;
        r->n_ids = retire->n_extent_ids;
        for (size_t i = 0; i < r->n_ids; i++) {
                r->ids[i] = retire->extent_ids[i];
                MUST(!real_ops || peer_find_hold(p, r->ids[i]) < p->n_refs);
        }
        p->n_retires++;
        p->n_retired += r->n_ids;
}

static void on_abort(void *userdata, const char *why)
{
        struct peer *p = userdata;

        p->why = why;
        p->aborted = true;
}

static void on_ready(void *userdata)
{
        (void)userdata; /* its turns are peer_deliver() */
}

static void peer_deliver(struct peer *p)
{
        while (!p->by_slices && p->session->delivery.is_due)
                session_deliver(p->session);
}

static void on_inherit(void *userdata, struct session *kept);

static const struct session_ops ops = {
        .resume_kept = on_inherit,
        .send = on_send,
        .ready = on_ready,
        .abort = on_abort,
        .open_events = on_open_events,
        .send_event = on_send_event,
};

static void on_inherit(void *userdata, struct session *kept)
{
        struct peer *p = userdata;

        session_free(p->session);
        p->session = kept;
        kept->ops = &ops;
        kept->userdata = p;
}

struct peer *peer_new(struct broker *b, uid_t uid, bool admin)
{
        struct credentials who = { .pid = getpid(), .uid = uid, .gid = uid, .start_time = 1 };
        struct peer *p = calloc(1, sizeof(*p));

        MUST(p && session_new(b, admin, &who, &ops, p, &p->session) == 0);
        p->auto_ack = true;
        p->page_fds[0] = p->page_fds[1] = -1;
        LIST_INSERT_HEAD(&peers, p, link);
        return p;
}

struct peer *peer_drop(struct peer *p)
{
        LIST_REMOVE(p, link);
        free(p->refs);
        for (size_t i = 0; i < 2; i++)
                if (p->page_fds[i] >= 0)
                        close(p->page_fds[i]);
        peer_forget_replies(p);
        free(p);
        return NULL;
}

void peer_forget_replies(struct peer *p)
{
        for (size_t i = 0; i < p->n_replies; i++)
                bfcd__reply__free_unpacked(p->replies[i], NULL);
        p->n_replies = 0;
}

void peer_exit(struct peer *p)
{
        if (p->session->state == SESSION_NEW || p->session->state == SESSION_LIVE)
                (void)session_hang_up(p->session, NULL);
        peer_let_go_all(p);
        session_exit(p->session);
}

struct peer *peer_free(struct peer *p)
{
        if (!p)
                return NULL;
        if (session_hang_up(p->session, NULL) > 0) {
                peer_let_go_all(p);
                session_exit(p->session);
        }
        while (session_reap(p->session, 3) == SESSION_MORE)
                ;
        session_end_linger(p->session);
        MUST(session_reap(p->session, 1) == 0);
        session_free(p->session);
        MUST(p->n_refs == 0);
        return peer_drop(p);
}

int peer_send(struct peer *p, Bfcd__Request *r, uint64_t *ret_id)
{
        const char *why = NULL;
        int result;

        if (r->id == 0)
                r->id = ++p->next_id;
        if (ret_id)
                *ret_id = r->id;
        result = session_handle(p->session, r, &why);
        MUST((result < 0) == (why != NULL));
        peer_deliver(p);
        while (p->auto_ack && p->to_ack > p->session->delivery.acked_sequence &&
               p->session->state == SESSION_LIVE)
                peer_ack(p, p->to_ack);
        return result;
}

const Bfcd__Extent *peer_extent(const struct peer *p, uint64_t sequence, size_t i)
{
        for (size_t k = 0; k < p->n_replies; k++) {
                const Bfcd__Reply *reply = p->replies[k];

                if (reply->body_case == BFCD__REPLY__BODY_EXTENTS && reply->extents->sequence == sequence) {
                        MUST(i < reply->extents->n_extents);
                        return reply->extents->extents[i];
                }
        }
        MUST(false); /* no such message */
        return NULL;
}

const Bfcd__Reply *peer_reply(const struct peer *p, uint64_t id)
{
        for (size_t i = 0; i < p->n_replies; i++)
                if (p->replies[i]->id == id)
                        return p->replies[i];
        return NULL;
}

int peer_error(const struct peer *p, uint64_t id)
{
        const Bfcd__Reply *reply = peer_reply(p, id);

        if (!reply)
                return -1;
        return reply->body_case == BFCD__REPLY__BODY_REFUSAL ? (int)reply->refusal->error : 0;
}

uint64_t peer_post(struct peer *p, Bfcd__Request *request)
{
        uint64_t id;

        MUST(peer_send(p, request, &id) == 0);
        return id;
}

uint64_t peer_hello(struct peer *p, const char *tenant, const char *partition)
{
        Bfcd__Hello hello = BFCD__HELLO__INIT;
        Bfcd__Request r = REQUEST(HELLO, hello, &hello);

        hello.version = 1;
        if (!p->wants_events && !p->has_no_events && !real_ops && p->session->role == ROLE_CLIENT)
                p->wants_events = p->answers = true;
        hello.wants_events = p->wants_events;
        hello.wants_pages = p->wants_pages;
        hello.can_resume = p->wants_return;
        hello.session_id = p->return_id;
        if (p->return_id != 0)
                hello.secret = (ProtobufCBinaryData){ sizeof(p->secret), p->secret };
        hello.name = (char *)(uintptr_t) "peer";
        hello.tenant = (char *)(uintptr_t)tenant;
        hello.partition = (char *)(uintptr_t)partition;
        return peer_post(p, &r);
}

uint64_t peer_malloc_wait(struct peer *p, uint32_t partition, uint64_t n_bytes, uint32_t wait_ms)
{
        Bfcd__Malloc m = BFCD__MALLOC__INIT;
        Bfcd__Request r = REQUEST(MALLOC, malloc, &m);

        m.partition = partition;
        m.n_bytes = n_bytes;
        m.wait_ms = wait_ms;
        return peer_post(p, &r);
}

uint64_t peer_charge(struct peer *p, uint32_t partition, uint64_t n_bytes, uint32_t wait_ms)
{
        Bfcd__Charge m = BFCD__CHARGE__INIT;
        Bfcd__Request r = REQUEST(CHARGE, charge, &m);

        m.partition = partition;
        m.n_bytes = n_bytes;
        m.wait_ms = wait_ms;
        return peer_post(p, &r);
}

uint64_t peer_uncharge(struct peer *p, uint32_t partition, uint64_t n_bytes)
{
        Bfcd__Uncharge m = BFCD__UNCHARGE__INIT;
        Bfcd__Request r = REQUEST(UNCHARGE, uncharge, &m);

        m.partition = partition;
        m.n_bytes = n_bytes;
        return peer_post(p, &r);
}

static uint64_t send_malloc(struct peer *p, uint32_t partition, uint64_t n_bytes, uint64_t flags,
                            const char *tag)
{
        Bfcd__Malloc m = BFCD__MALLOC__INIT;
        Bfcd__Request r = REQUEST(MALLOC, malloc, &m);

        m.partition = partition;
        m.n_bytes = n_bytes;
        m.flags = flags;
        m.tag = (char *)(uintptr_t)tag;
        return peer_post(p, &r);
}

uint64_t peer_malloc_flags(struct peer *p, uint32_t partition, uint64_t n_bytes, uint64_t flags)
{
        return send_malloc(p, partition, n_bytes, flags, "");
}

uint64_t peer_malloc_tag(struct peer *p, uint32_t partition, uint64_t n_bytes, const char *tag)
{
        return send_malloc(p, partition, n_bytes, 0, tag);
}

uint64_t peer_malloc(struct peer *p, uint32_t partition, uint64_t n_bytes)
{
        return peer_malloc_flags(p, partition, n_bytes, 0);
}

uint64_t peer_split(struct peer *p, uint64_t block_id, uint64_t n_bytes)
{
        Bfcd__Split split = BFCD__SPLIT__INIT;
        Bfcd__Request r = REQUEST(SPLIT, split, &split);

        split.block_id = block_id;
        split.n_bytes = n_bytes;
        return peer_post(p, &r);
}

uint64_t peer_free_block(struct peer *p, uint64_t block_id)
{
        Bfcd__Free f = BFCD__FREE__INIT;
        Bfcd__Request r = REQUEST(FREE, free, &f);

        f.block_id = block_id;
        return peer_post(p, &r);
}

uint64_t peer_publish(struct peer *p, uint64_t block_id, const char *name)
{
        return peer_publish_kept(p, block_id, name, 0, NULL, 0);
}

uint64_t peer_publish_kept(struct peer *p, uint64_t block_id, const char *name, uint64_t keep_ms,
                           const void *metadata, size_t n_metadata_bytes)
{
        Bfcd__Publish publish = BFCD__PUBLISH__INIT;
        Bfcd__Request r = REQUEST(PUBLISH, publish, &publish);

        publish.block_id = block_id;
        publish.name = (char *)(uintptr_t)name;
        publish.keep_ms = keep_ms;
        publish.metadata = (ProtobufCBinaryData){ n_metadata_bytes, (uint8_t *)(uintptr_t)metadata };
        return peer_post(p, &r);
}

uint64_t peer_metadata(struct peer *p, uint64_t block_id)
{
        Bfcd__Metadata metadata = BFCD__METADATA__INIT;
        Bfcd__Request r = REQUEST(METADATA, metadata, &metadata);

        metadata.block_id = block_id;
        return peer_post(p, &r);
}

uint64_t peer_forget(struct peer *p, const char *tenant, const char *name)
{
        Bfcd__Forget forget = BFCD__FORGET__INIT;
        Bfcd__Request r = REQUEST(FORGET, forget, &forget);

        forget.tenant = (char *)(uintptr_t)tenant;
        forget.name = (char *)(uintptr_t)name;
        return peer_post(p, &r);
}

uint64_t peer_attach(struct peer *p, const char *name, uint32_t wait_ms)
{
        Bfcd__Attach attach = BFCD__ATTACH__INIT;
        Bfcd__Request r = REQUEST(ATTACH, attach, &attach);

        attach.name = (char *)(uintptr_t)name;
        attach.wait_ms = wait_ms;
        return peer_post(p, &r);
}

uint64_t peer_goodbye(struct peer *p)
{
        Bfcd__Goodbye goodbye = BFCD__GOODBYE__INIT;
        Bfcd__Request r = REQUEST(GOODBYE, goodbye, &goodbye);

        peer_let_go_all(p);
        p->n_retires = 0;
        return peer_post(p, &r);
}

/* Forgets the event, if it is open. */
static void answer_event(struct peer *p, uint64_t sequence)
{
        for (size_t i = 0; i < p->n_retires; i++) {
                if (p->retires[i].sequence != sequence)
                        continue;
                for (size_t k = 0; real_ops && k < p->retires[i].n_ids; k++)
                        peer_let_go(p, peer_find_hold(p, p->retires[i].ids[k]));
                p->retires[i] = p->retires[--p->n_retires];
                return;
        }
        for (size_t i = 0; i < p->n_trims; i++)
                if (p->trims[i].sequence == sequence)
                        p->trims[i] = p->trims[--p->n_trims];
        for (size_t i = 0; i < p->n_pressures; i++)
                if (p->pressures[i].sequence == sequence)
                        p->pressures[i] = p->pressures[--p->n_pressures];
}

int peer_answer(struct peer *p, uint64_t sequence)
{
        Bfcd__EventReply reply = BFCD__EVENT_REPLY__INIT;
        const char *why = NULL;
        int r;

        answer_event(p, sequence);
        reply.sequence = sequence;
        r = session_handle_event(p->session, &reply, &why);
        MUST((r < 0) == (why != NULL));
        return r;
}

void peer_show_idle(struct peer *p, uint32_t partition, uint64_t n_bytes, uint64_t since_ms, bool has_fn)
{
        struct pages_client *page;

        MUST(p->page_fds[1] >= 0 && pages_map_client(p->page_fds[1], &page) == 0);
        page->version = PAGES_VERSION;
        page->magic = PAGES_CLIENT_MAGIC;
        page->idle[partition].bytes = n_bytes;
        page->idle[partition].since_ms = since_ms;
        page->has_pressure_fn = has_fn;
        munmap(page, pages_client_bytes());
}

void peer_trimmed_all(struct peer *p)
{
        while (p->n_trims > 0)
                MUST(peer_answer(p, p->trims[0].sequence) == 0);
        peer_settle(p->session->broker);
}

void peer_retired_all(struct peer *p)
{
        while (p->n_retires > 0)
                MUST(peer_answer(p, p->retires[0].sequence) == 0);
}

int peer_ack(struct peer *p, uint64_t sequence)
{
        return peer_ack_without(p, sequence, NULL, 0);
}

static bool peer_is_to_retire(const struct peer *p, uint64_t id)
{
        for (size_t i = 0; i < p->n_retires; i++)
                for (size_t k = 0; k < p->retires[i].n_ids; k++)
                        if (p->retires[i].ids[k] == id)
                                return true;
        return false;
}

int peer_ack_without(struct peer *p, uint64_t sequence, const uint64_t *lost, size_t n_lost)
{
        Bfcd__Ack ack = BFCD__ACK__INIT;
        Bfcd__Request r = REQUEST(ACK, ack, &ack);
        const char *why;
        int result;

        ack.sequence = sequence;
        ack.lost_extent_ids = (uint64_t *)(uintptr_t)lost;
        ack.n_lost_extent_ids = n_lost;
        result = session_handle(p->session, &r, &why);
        for (size_t i = 0; result == 0 && i < n_lost; i++)
                if (!peer_is_to_retire(p, lost[i]) && peer_find_hold(p, lost[i]) < p->n_refs)
                        peer_let_go(p, peer_find_hold(p, lost[i]));
        peer_deliver(p);
        return result;
}
