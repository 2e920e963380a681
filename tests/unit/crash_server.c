/* A stand-in for the daemon that dies; see crash_server.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/crash_server.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "proto/message.h"
#include "tests/unit/wire.h"

#define UNIT         4096u
#define N_UNITS      (unsigned)(REGION_BYTES / UNIT)
#define EXTENT_UNITS (unsigned)(EXTENT_BYTES / UNIT)
#define SESSION_ID   UINT64_C(0x1234)
#define MAX_PEERS    8
#define MAX_SHARED   16
#define RETIRING     UINT32_MAX

/* A connection. */
struct peer {
        struct wire wire;
        bool is_returning; /* its list is expected */
        bool is_live;
        uint64_t sequence;
        unsigned n_helds, n_extents, n_listed, n_shared;
        bool listed[N_UNITS];       /* by the block's number */
        uint32_t counts[N_UNITS];   /* of what is shared */
        bool has_extent[N_EXTENTS]; /* listed */
};

struct shared {
        uint32_t number; /* 0: none */
        uint32_t n_refs;
        char name[64];
};

struct crash_server {
        char folder[64];
        char path[96];
        int fd;
        int wake[2];
        pthread_t thread;
        pthread_mutex_t lock; /* everything below */
        pthread_cond_t changed;
        bool is_ending, is_killed;
        struct message_arena *arena;
        struct region region;
        uint64_t given[N_EXTENTS]; /* the id that the session was given; 0 */
        uint32_t units[N_UNITS];   /* the block's number, of N_UNITS; 0: free */
        uint32_t next_number;
        uint64_t stamps[N_UNITS]; /* of the block with this number: its id is both */
        unsigned first[N_UNITS];  /* its place, in units */
        unsigned n_units[N_UNITS];
        uint64_t split_id, split_off_id; /* of the last Split */
        struct shared shared[MAX_SHARED];
        struct peer peers[MAX_PEERS];
        bool is_known; /* a session was begun */
        enum crash_server_hello hello;
        unsigned n_hellos;
        bool no_pages, no_resumption;
        unsigned kill_at, kill_at_held;
        bool kill_when_done;
        uint32_t n_entries;
        uint64_t limit;
        struct pages_usage *usage_page;
        void *client_page;
        size_t usage_bytes;
        bool refs;
        unsigned n_on_hold;
        struct crash_server_counts counts;
};

static uint64_t id_of(const struct crash_server *m, uint32_t number)
{
        return m->stamps[number] << 32 | number;
}

static void violation(struct crash_server *m, const char *what)
{
        if (m->counts.n_violations++ == 0)
                snprintf(m->counts.violation, sizeof(m->counts.violation), "%s", what);
}

/* ---- its death -------------------------------------------------------------------- */

static void peer_close(struct peer *p)
{
        if (p->wire.fd < 0)
                return;
        wire_close(&p->wire);
        *p = (struct peer){ .wire = WIRE_NONE };
}

/* What it was doing is forgotten; what it had given is not. */
static void die(struct crash_server *m)
{
        for (unsigned i = 0; i < MAX_PEERS; i++)
                peer_close(&m->peers[i]);
        for (unsigned i = 0; i < N_UNITS; i++)
                if (m->units[i] == RETIRING)
                        m->units[i] = 0;
        m->n_on_hold = 0;
        pthread_cond_broadcast(&m->changed);
}

/* ---- blocks -------------------------------------------------------------------------- */

static bool is_used(const struct crash_server *m, uint32_t number)
{
        return number > 0 && number < N_UNITS && m->stamps[number] != 0;
}

static uint32_t number_of(const struct crash_server *m, uint64_t block_id)
{
        uint32_t number = (uint32_t)block_id;

        return is_used(m, number) && id_of(m, number) == block_id ? number : 0;
}

static void drop_block(struct crash_server *m, uint32_t number)
{
        for (unsigned i = 0; i < m->n_units[number]; i++)
                m->units[m->first[number] + i] = 0;
        m->stamps[number] = 0;
        m->counts.n_blocks--;
}

static struct shared *shared_of(struct crash_server *m, uint32_t number)
{
        for (unsigned i = 0; i < MAX_SHARED; i++)
                if (number != 0 && m->shared[i].number == number)
                        return &m->shared[i];
        return NULL;
}

static struct shared *shared_named(struct crash_server *m, const char *name)
{
        for (unsigned i = 0; i < MAX_SHARED; i++)
                if (m->shared[i].number != 0 && strcmp(m->shared[i].name, name) == 0)
                        return &m->shared[i];
        return NULL;
}

static void set_refs(struct crash_server *m, struct shared *s, uint32_t n)
{
        m->counts.n_refs += n - s->n_refs;
        s->n_refs = n;
        if (n == 0) {
                drop_block(m, s->number);
                s->number = 0;
        }
}

/* The extents of these units that the session does not have. */
static void announce(struct crash_server *m, struct peer *p, unsigned first, unsigned n_units)
{
        struct announcement a;

        region_announce(&m->region, (uint64_t)first * UNIT, (uint64_t)n_units * UNIT, m->given, &a);
        if (a.n == 0)
                return;
        wire_extents(&p->wire, ++p->sequence, &a, true);
        m->counts.n_extents_sent += (unsigned)a.n;
}

static void fill_block(const struct crash_server *m, uint32_t number, Bfcd__Block *ret)
{
        ret->block_id = id_of(m, number);
        ret->region_id = REGION_ID;
        ret->offset = (uint64_t)m->first[number] * UNIT;
        ret->n_bytes = (uint64_t)m->n_units[number] * UNIT;
}

/* A number that no block has, and its stamp. */
static uint32_t new_number(struct crash_server *m)
{
        static uint64_t stamp;

        do
                m->next_number = m->next_number % (N_UNITS - 1) + 1;
        while (m->stamps[m->next_number] != 0);
        m->stamps[m->next_number] = ++stamp;
        m->counts.n_blocks++;
        return m->next_number;
}

static void on_malloc(struct crash_server *m, struct peer *p, uint64_t id, uint64_t n_bytes)
{
        unsigned n =
                n_bytes > (uint64_t)N_UNITS * UNIT ? N_UNITS + 1 : (unsigned)((n_bytes + UNIT - 1) / UNIT);
        Bfcd__Block body = BFCD__BLOCK__INIT;
        unsigned at = find_units(m->units, N_UNITS, n);

        if (at == N_UNITS) {
                wire_refuse(&p->wire, id, ENOMEM, "the partition is full");
                return;
        }
        (void)new_number(m);
        m->first[m->next_number] = at;
        m->n_units[m->next_number] = n;
        for (unsigned i = 0; i < n; i++)
                m->units[at + i] = m->next_number;
        announce(m, p, at, n);
        fill_block(m, m->next_number, &body);
        wire_block(&p->wire, id, &body);
}

static void on_free(struct crash_server *m, struct peer *p, uint64_t id, uint64_t block_id)
{
        uint32_t number = number_of(m, block_id);
        struct shared *s = shared_of(m, number);

        if (number == 0) {
                violation(m, "a Free of no block");
                wire_refuse(&p->wire, id, EINVAL, "no such block");
                return;
        }
        if (s)
                set_refs(m, s, s->n_refs - 1);
        else
                drop_block(m, number);
        wire_done(&p->wire, id);
}

/* What the last Split of this block split off, if it was this one; 0. */
static uint32_t split_off(const struct crash_server *m, const Bfcd__Split *split)
{
        uint32_t low = number_of(m, split->block_id), high = number_of(m, m->split_off_id);

        return low != 0 && high != 0 && m->split_id == split->block_id &&
                               (uint64_t)m->n_units[low] * UNIT == split->n_bytes
                       ? high
                       : 0;
}

static void on_split(struct crash_server *m, struct peer *p, uint64_t id, const Bfcd__Split *split)
{
        uint32_t low = number_of(m, split->block_id), high = split_off(m, split);
        unsigned n = (unsigned)(split->n_bytes / UNIT);

        if (high == 0) {
                if (low == 0 || shared_of(m, low) || split->n_bytes % UNIT != 0 || n == 0 ||
                    n >= m->n_units[low]) {
                        violation(m, "a Split that cannot be");
                        wire_refuse(&p->wire, id, EINVAL, "no such block, or no such place in it");
                        return;
                }
                high = new_number(m);
                m->first[high] = m->first[low] + n;
                m->n_units[high] = m->n_units[low] - n;
                m->n_units[low] = n;
                for (unsigned i = 0; i < m->n_units[high]; i++)
                        m->units[m->first[high] + i] = high;
                m->split_id = split->block_id;
                m->split_off_id = id_of(m, high);
                m->counts.n_splits++;
        } else {
                m->counts.n_splits_repeated++;
        }
        wire_split(&p->wire, id, id_of(m, high));
}

/* Of a block that is parked already, too. The block keeps its place. */
static void on_park(struct crash_server *m, struct peer *p, uint64_t id, uint64_t block_id)
{
        if (number_of(m, block_id) == 0) {
                violation(m, "a Park of no block");
                wire_refuse(&p->wire, id, EINVAL, "no such block");
        } else {
                wire_done(&p->wire, id);
        }
}

/* The session gets all extents of the block again: its client has unmapped them. */
static void on_wake(struct crash_server *m, struct peer *p, uint64_t id, uint64_t block_id)
{
        uint32_t number = number_of(m, block_id);
        Bfcd__Block body = BFCD__BLOCK__INIT;

        if (number == 0) {
                violation(m, "a Wake of no block");
                wire_refuse(&p->wire, id, EINVAL, "no such block");
                return;
        }
        for (unsigned i = 0; i < m->n_units[number]; i++)
                m->given[(m->first[number] + i) / EXTENT_UNITS] = 0;
        announce(m, p, m->first[number], m->n_units[number]);
        fill_block(m, number, &body);
        wire_block(&p->wire, id, &body);
}

static void on_publish(struct crash_server *m, struct peer *p, uint64_t id, const Bfcd__Publish *publish)
{
        uint32_t number = number_of(m, publish->block_id);
        struct shared *s = shared_of(m, number), *named = shared_named(m, publish->name);

        if (number == 0) {
                violation(m, "a Publish of no block");
                wire_refuse(&p->wire, id, EINVAL, "no such block");
        } else if (s && s == named) {
                wire_done(&p->wire, id);
        } else if (s || named) {
                wire_refuse(&p->wire, id, EEXIST, "there is such a block");
        } else {
                for (s = m->shared; s->number != 0; s++)
                        assert(s < &m->shared[MAX_SHARED - 1]);
                s->number = number;
                s->n_refs = 1;
                m->counts.n_refs++;
                snprintf(s->name, sizeof(s->name), "%s", publish->name);
                wire_done(&p->wire, id);
        }
}

static void on_attach(struct crash_server *m, struct peer *p, uint64_t id, const char *name)
{
        Bfcd__Attached attached = BFCD__ATTACHED__INIT;
        Bfcd__Block block = BFCD__BLOCK__INIT;
        struct shared *s = shared_named(m, name);

        if (!s) {
                wire_refuse(&p->wire, id, ENOENT, "there is no such block");
                return;
        }
        set_refs(m, s, s->n_refs + 1);
        fill_block(m, s->number, &block);
        announce(m, p, (unsigned)(block.offset / UNIT), (unsigned)(block.n_bytes / UNIT));
        attached.block = &block;
        attached.n_requested = block.n_bytes;
        wire_attached(&p->wire, id, &attached);
}

static void on_usage(const struct crash_server *m, struct peer *p, uint64_t id)
{
        Bfcd__Statistics stats = BFCD__STATISTICS__INIT;

        stats.bytes_limit = 4711;
        stats.num_blocks = m->counts.n_blocks;
        wire_usage(&p->wire, id, &stats, NULL);
}

/* ---- hello ----------------------------------------------------------------------------- */

static void forget_pages(struct crash_server *m)
{
        if (m->usage_page)
                munmap(m->usage_page, m->usage_bytes);
        if (m->client_page)
                munmap(m->client_page, pages_client_bytes());
        m->usage_page = m->client_page = NULL;
}

static int odd_page(void)
{
        int fd = memfd_create("odd", MFD_CLOEXEC | MFD_ALLOW_SEALING);

        assert(fd >= 0 && ftruncate(fd, 8192) == 0);
        return fd;
}

static void make_pages(struct crash_server *m, int *ret_fds)
{
        uint64_t stats[PAGES_N_STATS] = { m->limit };

        forget_pages(m);
        m->usage_bytes = pages_usage_bytes(m->n_entries);
        wire_make_pages(m->n_entries, &m->usage_page, &m->client_page, ret_fds);
        pages_write(&m->usage_page->entries[m->n_entries - 1], stats);
}

/* The fds that go with the answer. */
static size_t make_fds(struct crash_server *m, struct peer *p, enum crash_server_hello how,
                       const Bfcd__HelloReply *hello, int *ret_fds)
{
        size_t n = 0;

        if (hello->has_events && how != CRASH_NO_EVENTS_FD)
                ret_fds[n++] = wire_open_events(&p->wire);
        if (!hello->has_pages)
                return n;
        if (how == CRASH_ODD_PAGES) {
                ret_fds[n++] = odd_page();
                ret_fds[n++] = odd_page();
                return n;
        }
        make_pages(m, ret_fds + n);
        return n + 2;
}

static void put_hello(struct crash_server *m, struct peer *p, uint64_t id, const Bfcd__Hello *hello,
                      enum crash_server_hello how)
{
        static uint8_t secret[16] = "a good secret..", other[16] = "a wrong secret.", uuid[16] = "another";
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        Bfcd__HelloReply body = BFCD__HELLO_REPLY__INIT;
        Bfcd__PartitionInfo train = BFCD__PARTITION_INFO__INIT, infer = BFCD__PARTITION_INFO__INIT;
        Bfcd__PartitionInfo *list[] = { &train, &infer }, *turned[] = { &infer, &train };
        int fds[3] = { -1, -1, -1 };
        size_t n_fds;

        train.name = (char *)(uintptr_t) "train";
        train.usage_entry = m->n_entries - 1;
        infer.name = (char *)(uintptr_t) "infer";
        infer.usage_entry = m->n_entries;
        if (how == CRASH_OTHER_DEVICE)
                infer.device_uuid = (ProtobufCBinaryData){ sizeof(uuid), uuid };
        body.version = 1;
        body.has_events = hello->wants_events && how != CRASH_LESS;
        body.has_pages = hello->wants_pages && !m->no_pages && how != CRASH_NO_PAGES;
        body.can_resume = hello->can_resume && !m->no_resumption;
        body.session_id = how == CRASH_OTHER_ID ? SESSION_ID + 1 : SESSION_ID;
        body.secret = (ProtobufCBinaryData){ 16, how == CRASH_OTHER_SECRET ? other : secret };
        body.tenant = (char *)(uintptr_t)(how == CRASH_OTHER_TENANT ? "audio" : "vision");
        body.n_partitions = how == CRASH_FEWER ? 1 : 2;
        body.partitions = how == CRASH_OTHER_NAMES ? turned : list;
        reply.id = id;
        reply.body_case = BFCD__REPLY__BODY_HELLO;
        reply.hello = &body;
        n_fds = make_fds(m, p, how, &body, fds);
        wire_put(&p->wire, &reply, fds, n_fds);
        for (size_t i = 0; i < n_fds; i++)
                close(fds[i]);
}

/* False: it hangs up. */
static bool on_return(struct crash_server *m, struct peer *p, uint64_t id, const Bfcd__Hello *hello)
{
        enum crash_server_hello how = m->n_hellos > 0 ? m->hello : CRASH_TAKES;

        m->counts.n_hellos++;
        if (hello->session_id != SESSION_ID || hello->secret.len != 16 ||
            memcmp(hello->secret.data, "a good secret..", 16) != 0 || strcmp(hello->tenant, "vision") != 0)
                violation(m, "a hello of another session");
        /* What concerns the list is counted when that comes. */
        if (m->n_hellos > 0 && how < CRASH_HELD_REFUSED)
                m->n_hellos--;
        switch (how) {
        case CRASH_HANGS_UP:
                return false;
        case CRASH_SILENT:
                return true;
        case CRASH_STALE:
                wire_refuse(&p->wire, id, ESTALE, "no such session waits");
                return true;
        case CRASH_DENIES:
                wire_refuse(&p->wire, id, EACCES, "it belongs to another process");
                return true;
        case CRASH_BUSY:
                wire_refuse(&p->wire, id, EBUSY, "in a moment");
                return true;
        case CRASH_WRONG_BODY:
                wire_done(&p->wire, id);
                return true;
        case CRASH_GARBAGE:
                wire_put_garbage(&p->wire);
                return true;
        default:
                p->is_returning = true;
                put_hello(m, p, id, hello, how);
                return true;
        }
}

static bool on_hello(struct crash_server *m, struct peer *p, uint64_t id, const Bfcd__Hello *hello)
{
        if (p->is_live || p->is_returning) {
                violation(m, "a second hello");
                return false;
        }
        if (hello->session_id != 0)
                return on_return(m, p, id, hello);
        if (m->is_known)
                violation(m, "a second session");
        m->is_known = true;
        p->is_live = true;
        put_hello(m, p, id, hello, CRASH_TAKES);
        return true;
}

/* ---- the list ------------------------------------------------------------------------------ */

static void note_held(struct crash_server *m, struct peer *p, const Bfcd__Held *held)
{
        for (size_t i = 0; i < held->n_extent_ids; i++) {
                bool known = false;

                for (unsigned k = 0; k < N_EXTENTS; k++)
                        if (held->extent_ids[i] != 0 && m->given[k] == held->extent_ids[i])
                                known = p->has_extent[k] = true;
                if (!known)
                        violation(m, "an extent that the session was not given");
        }
        for (size_t i = 0; i < held->n_block_ids; i++) {
                uint32_t number = number_of(m, held->block_ids[i]);

                if (number == 0 || p->listed[number])
                        violation(m, "a block that the session has not, or twice");
                p->listed[number] = true;
                p->counts[number] = 1;
        }
        for (size_t i = 0; i < held->n_shared; i++) {
                uint32_t number = number_of(m, held->shared[i]->block_id);
                struct shared *s = shared_of(m, number);

                if (!s || p->listed[number] || held->shared[i]->count == 0 ||
                    held->shared[i]->count > s->n_refs)
                        violation(m, "a hold that the session has not");
                p->listed[number] = true;
                p->counts[number] = held->shared[i]->count;
        }
        if (held->splitting) {
                uint32_t high = split_off(m, held->splitting);

                if (!held->is_last || (high != 0 && p->listed[high]))
                        violation(m, "a Split under way before the end of the list, or answered");
                if (high != 0 && p->listed[number_of(m, held->splitting->block_id)])
                        p->listed[high] = true;
        }
        p->n_extents += (unsigned)held->n_extent_ids;
        p->n_listed += (unsigned)held->n_block_ids;
        p->n_shared += (unsigned)held->n_shared;
        p->n_helds++;
}

static void take_list(struct crash_server *m, struct peer *p)
{
        m->counts.n_dropped = 0;
        for (uint32_t i = 1; i < N_UNITS; i++) {
                struct shared *s = shared_of(m, i);

                if (!is_used(m, i))
                        continue;
                if (s) {
                        set_refs(m, s, p->listed[i] ? p->counts[i] : 0);
                } else if (!p->listed[i]) {
                        drop_block(m, i);
                        m->counts.n_dropped++;
                }
        }
        for (unsigned i = 0; i < N_EXTENTS; i++)
                if (!p->has_extent[i])
                        m->given[i] = 0;
        m->counts.n_returns++;
        m->counts.n_helds = p->n_helds;
        m->counts.n_extents = p->n_extents;
        m->counts.n_listed = p->n_listed;
        m->counts.n_shared = p->n_shared;
        p->is_returning = false;
        p->is_live = true;
}

static bool on_held(struct crash_server *m, struct peer *p, uint64_t id, const Bfcd__Held *held)
{
        enum crash_server_hello how = m->n_hellos > 0 ? m->hello : CRASH_TAKES;
        Bfcd__Block block = BFCD__BLOCK__INIT;

        if (!p->is_returning) {
                violation(m, "a list of who does not come back");
                return false;
        }
        note_held(m, p, held);
        if (m->kill_at_held > 0 && --m->kill_at_held == 0)
                return m->is_killed = true;
        if (how < CRASH_HELD_REFUSED || !held->is_last) {
                if (held->is_last)
                        take_list(m, p);
                wire_done(&p->wire, id);
                return true;
        }
        m->n_hellos--;
        switch (how) {
        case CRASH_HELD_REFUSED:
                wire_refuse(&p->wire, id, EACCES, "the list is another's");
                return true;
        case CRASH_HELD_DONE:
                take_list(m, p);
                return false;
        case CRASH_HELD_SILENT:
                return true;
        case CRASH_HELD_BODY:
                wire_block(&p->wire, id, &block);
                return true;
        case CRASH_HELD_EVICTED:
                wire_refuse(&p->wire, 0, EIDRM, "session 1 was evicted");
                return false;
        default:
                return false;
        }
}

static void on_goodbye(struct crash_server *m)
{
        for (uint32_t i = 1; i < N_UNITS; i++) {
                struct shared *s = shared_of(m, i);

                if (s)
                        set_refs(m, s, 0);
                else if (is_used(m, i))
                        drop_block(m, i);
        }
}

/* ---- requests -------------------------------------------------------------------------------- */

static void on_live(struct crash_server *m, struct peer *p, const Bfcd__Request *request)
{
        switch (request->body_case) {
        case BFCD__REQUEST__BODY_MALLOC:
                on_malloc(m, p, request->id, request->malloc->n_bytes);
                break;
        case BFCD__REQUEST__BODY_FREE:
                on_free(m, p, request->id, request->free->block_id);
                break;
        case BFCD__REQUEST__BODY_SPLIT:
                on_split(m, p, request->id, request->split);
                break;
        case BFCD__REQUEST__BODY_PARK:
                on_park(m, p, request->id, request->park->block_id);
                break;
        case BFCD__REQUEST__BODY_WAKE:
                for (size_t i = 0; i < request->wake->n_block_ids; i++)
                        on_wake(m, p, request->id + i, request->wake->block_ids[i]);
                break;
        case BFCD__REQUEST__BODY_PUBLISH:
                on_publish(m, p, request->id, request->publish);
                break;
        case BFCD__REQUEST__BODY_ATTACH:
                on_attach(m, p, request->id, request->attach->name);
                break;
        case BFCD__REQUEST__BODY_USAGE:
                on_usage(m, p, request->id);
                break;
        case BFCD__REQUEST__BODY_RELEASE:
                wire_released(&p->wire, request->id);
                break;
        case BFCD__REQUEST__BODY_GOODBYE:
                m->counts.n_goodbyes++;
                on_goodbye(m);
                wire_done(&p->wire, request->id);
                break;
        default:
                violation(m, "a request that is none");
        }
}

/* False: it hangs up. */
static bool on_request(struct crash_server *m, struct peer *p, const Bfcd__Request *request)
{
        bool kills;

        if (request->body_case == BFCD__REQUEST__BODY_HELLO)
                return on_hello(m, p, request->id, request->hello);
        if (request->body_case == BFCD__REQUEST__BODY_HELD)
                return on_held(m, p, request->id, request->held);
        if (request->body_case == BFCD__REQUEST__BODY_ACK)
                return p->is_live;
        if (!p->is_live) {
                violation(m, "a request before the end of the list");
                return false;
        }
        m->counts.n_requests++;
        if (m->refs) {
                m->n_on_hold++;
                if (request->body_case == BFCD__REQUEST__BODY_MALLOC)
                        m->counts.wait_ms = request->malloc->wait_ms;
                else if (request->body_case == BFCD__REQUEST__BODY_ATTACH)
                        m->counts.wait_ms = request->attach->wait_ms;
                pthread_cond_broadcast(&m->changed);
                return true;
        }
        kills = m->kill_at > 0 && --m->kill_at == 0;
        if (!kills || m->kill_when_done)
                on_live(m, p, request);
        if (kills)
                m->is_killed = true;
        return true;
}

static void read_peer(struct crash_server *m, struct peer *p)
{
        const uint8_t *payload;
        size_t n_bytes;
        int r = frame_reader_receive(p->wire.reader, p->wire.fd, MSG_DONTWAIT);

        if (r == FRAME_AGAIN)
                return;
        while (r == 0 && !m->is_killed && frame_reader_next(p->wire.reader, &payload, &n_bytes) == 0) {
                Bfcd__Request *request = message_unpack_request(m->arena, payload, n_bytes);

                if (!request)
                        violation(m, "no request");
                if (!request || !on_request(m, p, request))
                        r = -1;
        }
        if (m->is_killed)
                return;
        wire_flush(&p->wire);
        if (r != 0)
                peer_close(p);
}

/* ---- events -------------------------------------------------------------------------------------- */

static void retired(struct crash_server *m)
{
        for (unsigned i = 0; i < N_EXTENTS; i++) {
                if (m->units[(size_t)i * EXTENT_UNITS] != RETIRING)
                        continue;
                device_destroy(m->region.device, &m->region.extents[i]);
                m->given[i] = 0;
                for (unsigned u = i * EXTENT_UNITS; u < (i + 1) * EXTENT_UNITS; u++)
                        m->units[u] = 0;
        }
        m->counts.n_retired++;
}

static void read_events(struct crash_server *m, struct peer *p)
{
        const uint8_t *payload;
        size_t n_bytes;

        if (frame_reader_receive(p->wire.events_reader, p->wire.events_fd, MSG_DONTWAIT) != 0)
                return;
        while (frame_reader_next(p->wire.events_reader, &payload, &n_bytes) == 0) {
                Bfcd__EventReply *reply = bfcd__event_reply__unpack(NULL, n_bytes, payload);

                if (reply && reply->sequence == 1)
                        retired(m);
                else if (reply && reply->sequence == WIRE_TRIM)
                        m->counts.n_trimmed++;
                else
                        violation(m, "no answer to an event");
                bfcd__event_reply__free_unpacked(reply, NULL);
        }
        pthread_cond_broadcast(&m->changed);
}

static struct peer *live_peer(struct crash_server *m)
{
        for (unsigned i = 0; i < MAX_PEERS; i++)
                if (m->peers[i].wire.fd >= 0 && m->peers[i].is_live && m->peers[i].wire.events_fd >= 0)
                        return &m->peers[i];
        return NULL;
}

static bool extent_is_idle(const struct crash_server *m, unsigned i)
{
        if (m->region.extents[i].fd < 0 || m->given[i] != m->region.ids[i])
                return false;
        for (unsigned u = i * EXTENT_UNITS; u < (i + 1) * EXTENT_UNITS; u++)
                if (m->units[u] != 0)
                        return false;
        return true;
}

static void await(struct crash_server *m, const unsigned *count, unsigned before, int timeout_ms)
{
        struct timespec until;

        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec += timeout_ms / 1000;
        until.tv_nsec += timeout_ms % 1000 * 1000000L;
        if (until.tv_nsec >= 1000000000L) {
                until.tv_nsec -= 1000000000L;
                until.tv_sec++;
        }
        while (*count == before && pthread_cond_timedwait(&m->changed, &m->lock, &until) == 0)
                ;
}

unsigned crash_server_retire(struct crash_server *m, int timeout_ms)
{
        uint64_t ids[N_EXTENTS];
        unsigned n = 0, before;
        struct peer *p;

        pthread_mutex_lock(&m->lock);
        p = live_peer(m);
        for (unsigned i = 0; p && i < N_EXTENTS; i++) {
                if (!extent_is_idle(m, i))
                        continue;
                ids[n++] = m->region.ids[i];
                for (unsigned u = i * EXTENT_UNITS; u < (i + 1) * EXTENT_UNITS; u++)
                        m->units[u] = RETIRING;
        }
        if (n > 0) {
                before = m->counts.n_retired;
                wire_retire(&p->wire, 1, ids, n, -1);
                await(m, &m->counts.n_retired, before, timeout_ms);
        }
        pthread_mutex_unlock(&m->lock);
        return n;
}

bool crash_server_trim(struct crash_server *m, int timeout_ms)
{
        struct peer *p;
        unsigned before;
        bool ret = false;

        pthread_mutex_lock(&m->lock);
        p = live_peer(m);
        if (p) {
                before = m->counts.n_trimmed;
                wire_trim(&p->wire);
                await(m, &m->counts.n_trimmed, before, timeout_ms);
                ret = m->counts.n_trimmed != before;
        }
        pthread_mutex_unlock(&m->lock);
        return ret;
}

void crash_server_trim_and_drain(struct crash_server *m)
{
        struct peer *p;

        pthread_mutex_lock(&m->lock);
        p = live_peer(m);
        assert(p);
        wire_trim(&p->wire);
        wire_draining(&p->wire, 0, false);
        pthread_mutex_unlock(&m->lock);
}

/* ---- its life -------------------------------------------------------------------------------------- */

static void accept_peer(struct crash_server *m)
{
        int fd = accept4(m->fd, NULL, NULL, SOCK_CLOEXEC);
        struct peer *p = m->peers;

        if (fd < 0)
                return;
        while (p < &m->peers[MAX_PEERS] && p->wire.fd >= 0)
                p++;
        assert(p < &m->peers[MAX_PEERS]);
        *p = (struct peer){ .wire = WIRE_NONE };
        wire_open(&p->wire, fd);
}

static void *run(void *userdata)
{
        struct crash_server *m = userdata;
        struct pollfd fds[2 + 2 * MAX_PEERS];
        char byte[16];

        pthread_mutex_lock(&m->lock);
        while (!m->is_ending) {
                fds[0] = (struct pollfd){ .fd = m->fd, .events = POLLIN };
                fds[1] = (struct pollfd){ .fd = m->wake[0], .events = POLLIN };
                for (size_t i = 0; i < MAX_PEERS; i++) {
                        fds[2 + 2 * i] = (struct pollfd){ .fd = m->peers[i].wire.fd, .events = POLLIN };
                        fds[3 + 2 * i] =
                                (struct pollfd){ .fd = m->peers[i].wire.events_fd, .events = POLLIN };
                }
                pthread_mutex_unlock(&m->lock);
                poll(fds, 2 + 2 * MAX_PEERS, -1);
                pthread_mutex_lock(&m->lock);
                if (fds[1].revents)
                        (void)!read(m->wake[0], byte, sizeof(byte));
                for (size_t i = 0; i < MAX_PEERS && !m->is_killed; i++) {
                        struct peer *p = &m->peers[i];

                        if (fds[3 + 2 * i].revents && p->wire.events_fd == fds[3 + 2 * i].fd)
                                read_events(m, p);
                        if (fds[2 + 2 * i].revents && p->wire.fd == fds[2 + 2 * i].fd)
                                read_peer(m, p);
                }
                if (m->is_killed)
                        die(m);
                else if (fds[0].revents)
                        accept_peer(m);
                m->is_killed = false;
        }
        pthread_mutex_unlock(&m->lock);
        return NULL;
}

static void wake(struct crash_server *m)
{
        (void)!write(m->wake[1], "", 1);
}

struct crash_server *crash_server_new(void)
{
        struct crash_server *m = calloc(1, sizeof(*m));
        int r;

        assert(m);
        pthread_mutex_init(&m->lock, NULL);
        pthread_cond_init(&m->changed, NULL);
        m->fd = wire_listen("bfc-crash", m->folder, m->path);
        region_open(&m->region);
        for (size_t i = 0; i < MAX_PEERS; i++)
                m->peers[i] = (struct peer){ .wire = WIRE_NONE };
        m->n_entries = 1;
        m->limit = 1000;
        r = pipe2(m->wake, O_CLOEXEC | O_NONBLOCK);
        r |= message_arena_new(MESSAGE_ARENA_BYTES, &m->arena);
        r |= pthread_create(&m->thread, NULL, run, m);
        assert(r == 0);
        return m;
}

struct crash_server *crash_server_free(struct crash_server *m)
{
        pthread_mutex_lock(&m->lock);
        m->is_ending = true;
        pthread_mutex_unlock(&m->lock);
        wake(m);
        pthread_join(m->thread, NULL);
        die(m);
        region_close(&m->region);
        forget_pages(m);
        message_arena_free(m->arena);
        close(m->fd);
        close(m->wake[0]);
        close(m->wake[1]);
        unlink(m->path);
        rmdir(m->folder);
        pthread_cond_destroy(&m->changed);
        pthread_mutex_destroy(&m->lock);
        free(m);
        return NULL;
}

const char *crash_server_path(const struct crash_server *m)
{
        return m->path;
}

/* ---- from outside --------------------------------------------------------------------------------- */

void crash_server_kill(struct crash_server *m)
{
        pthread_mutex_lock(&m->lock);
        die(m);
        pthread_mutex_unlock(&m->lock);
        wake(m);
}

void crash_server_kill_at(struct crash_server *m, unsigned n, bool is_done)
{
        pthread_mutex_lock(&m->lock);
        m->kill_at = n;
        m->kill_when_done = is_done;
        pthread_mutex_unlock(&m->lock);
}

void crash_server_kill_at_held(struct crash_server *m, unsigned n)
{
        pthread_mutex_lock(&m->lock);
        m->kill_at_held = n;
        pthread_mutex_unlock(&m->lock);
}

void crash_server_set_hello(struct crash_server *m, enum crash_server_hello hello, unsigned n)
{
        pthread_mutex_lock(&m->lock);
        m->hello = hello;
        m->n_hellos = n;
        pthread_mutex_unlock(&m->lock);
}

void crash_server_refuse(struct crash_server *m, bool pages, bool resumption)
{
        pthread_mutex_lock(&m->lock);
        m->no_pages = pages;
        m->no_resumption = resumption;
        pthread_mutex_unlock(&m->lock);
}

void crash_server_set_usage(struct crash_server *m, uint32_t n_entries, uint64_t limit)
{
        pthread_mutex_lock(&m->lock);
        m->n_entries = n_entries;
        m->limit = limit;
        pthread_mutex_unlock(&m->lock);
}

void crash_server_hold(struct crash_server *m, bool refs)
{
        pthread_mutex_lock(&m->lock);
        m->refs = refs;
        pthread_mutex_unlock(&m->lock);
}

unsigned crash_server_n_on_hold(struct crash_server *m)
{
        unsigned n;

        pthread_mutex_lock(&m->lock);
        n = m->n_on_hold;
        pthread_mutex_unlock(&m->lock);
        return n;
}

struct crash_server_counts crash_server_count(struct crash_server *m)
{
        struct crash_server_counts counts;
        struct pages_client *page;

        pthread_mutex_lock(&m->lock);
        page = m->client_page;
        if (page && page->magic == PAGES_CLIENT_MAGIC) {
                m->counts.client_slabs = page->held[0].bytes_slabs;
                m->counts.client_whole = page->held[0].bytes_whole;
                m->counts.client_streams = page->held[0].bytes_streams;
        }
        counts = m->counts;
        pthread_mutex_unlock(&m->lock);
        return counts;
}
