/* A hostile process of the storm: what a program of one tenant can do to the daemon, at random. It sends messages by
 * hand and calls the library, forks, kills itself, and keeps what it was given. Its own failures do not matter to it.
 * What must not be granted to it is checked here.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "tests/integration/parking.h"
#include "tests/integration/storm.h"
#include "tests/random.h"

#define N_TIES       5u  /* sessions by hand */
#define N_CLIENTS    2u  /* of the library */
#define N_BLOCKS     12u /* of these */
#define N_IDS        12u /* of blocks of a session by hand */
#define N_CONNECTED  48u
#define N_NAMES      6u
#define N_LEASES     6u
#define N_PARTITIONS 3u
#define MAX_WAIT_MS  60u
#define FLOOD        400u
#define REPLY_MS     500
#define CHILD_S      3u /* a forked child, at most */

/* What a hostile process sees and must not. */
#define MUST(h, condition, ...)                                                                              \
        do {                                                                                                 \
                if (!(condition)) {                                                                          \
                        atomic_store(&(h)->storm->has_failed, true);                                         \
                        REQUIRE(false, #condition ": " __VA_ARGS__);                                         \
                }                                                                                            \
        } while (0)

struct tie {
        struct raw *raw; /* NULL: none */
        bool is_dead;    /* the daemon ended the connection */
        struct {
                uint64_t id;
                bool is_shared, is_parkable;
        } blocks[N_IDS];
        unsigned n_blocks;
};

struct hostile {
        struct storm *storm;
        uint64_t random;
        struct tie ties[N_TIES];
        bfc_client *clients[N_CLIENTS];
        struct {
                void *ptr;
                bfc_client *client;
                size_t n_bytes;
        } blocks[N_BLOCKS];
        int sockets[N_CONNECTED]; /* without a hello; -1: none */
        bool has_few_fds;
};

static uint64_t pick(struct hostile *h, uint64_t n)
{
        return random_next(&h->random) % n;
}

static bool one_in(struct hostile *h, uint64_t n)
{
        return pick(h, n) == 0;
}

/* ---- sessions by hand ------------------------------------------------------------- */

static struct tie *pick_tie(struct hostile *h)
{
        return &h->ties[pick(h, N_TIES)];
}

static void tie_close(struct tie *t)
{
        raw_close(t->raw);
        memset(t, 0, sizeof(*t));
}

static int tie_open(struct hostile *h, struct tie *t)
{
        static const char *const partitions[] = { "train", "parking", "spare", "none", NULL };
        int r;

        tie_close(t);
        if (raw_open(h->storm->socket, &t->raw) < 0)
                return -EIO;
        t->raw->wants_events = !one_in(h, 3);
        t->raw->wants_return = !one_in(h, 4);
        t->raw->wants_pages = one_in(h, 2);
        t->raw->ack = !one_in(h, 6);
        r = raw_hello(t->raw, HOSTILE, one_in(h, 2) ? NULL : partitions[pick(h, 5)]);
        if (r < 0)
                tie_close(t);
        return r;
}

/* One that is open; NULL: none can be opened now. */
static struct tie *live_tie(struct hostile *h)
{
        struct tie *t = pick_tie(h);

        if (t->raw && !t->is_dead)
                return t;
        if (t->raw && !one_in(h, t->raw->can_resume ? 40 : 2)) /* it waits for its resumption */
                return NULL;
        return tie_open(h, t) == 0 ? t : NULL;
}

static void remember(struct tie *t, uint64_t id, bool is_shared, bool is_parkable)
{
        if (t->n_blocks == N_IDS)
                return;
        t->blocks[t->n_blocks].id = id;
        t->blocks[t->n_blocks].is_shared = is_shared;
        t->blocks[t->n_blocks++].is_parkable = is_parkable;
}

static void forget_id(struct tie *t, uint64_t id)
{
        for (unsigned i = 0; i < t->n_blocks; i++)
                if (t->blocks[i].id == id) {
                        t->blocks[i] = t->blocks[--t->n_blocks];
                        return;
                }
}

/* Of a block: an own one of the session, mostly. Others are violations, which end the session. */
static uint64_t pick_id(struct hostile *h, struct tie *t)
{
        const struct tie *of = one_in(h, 40) ? pick_tie(h) : t;

        if (one_in(h, 80))
                return random_next(&h->random) >> pick(h, 64);
        return of->n_blocks > 0 ? of->blocks[pick(h, of->n_blocks)].id : pick(h, 3000);
}

static uint64_t pick_parkable(struct hostile *h, struct tie *t)
{
        for (unsigned i = 0; i < t->n_blocks && !one_in(h, 10); i++)
                if (t->blocks[i].is_parkable && one_in(h, 2))
                        return t->blocks[i].id;
        return pick_id(h, t);
}

/* The session, if it has a block, or if one is to be guessed. */
static struct tie *tie_with_block(struct hostile *h)
{
        struct tie *t = live_tie(h);

        return t && (t->n_blocks > 0 || one_in(h, 50)) ? t : NULL;
}

static void take_reply(struct tie *t, const Bfcd__Request *r, const Bfcd__Reply *reply)
{
        bool is_parkable = r->body_case == BFCD__REQUEST__BODY_WAKE ||
                           (r->body_case == BFCD__REQUEST__BODY_MALLOC &&
                            r->malloc->flags & BFCD__MALLOC_FLAG__MALLOC_FLAG_PARKABLE);

        if (reply->body_case == BFCD__REPLY__BODY_BLOCK)
                remember(t, reply->block->block_id, false, is_parkable);
        if (reply->body_case == BFCD__REPLY__BODY_ATTACHED)
                remember(t, reply->attached->block->block_id, true, reply->attached->parkable);
        if (reply->body_case == BFCD__REPLY__BODY_SPLIT)
                remember(t, reply->split->block_id, false, false);
}

/* The reply, or NULL: the connection has ended, or no reply comes, for instance since half a frame came before. */
static Bfcd__Reply *call(struct tie *t, Bfcd__Request *r)
{
        int64_t end_ms = clock_ms() + REPLY_MS;
        Bfcd__Reply *reply = NULL;
        bool is_open = raw_send(t->raw, r) == 0;

        while (is_open && clock_ms() < end_ms) {
                is_open = raw_receive(t->raw, (int)(end_ms - clock_ms()), &reply) == 0;
                if (is_open && reply->id == r->id)
                        return reply;
                if (is_open)
                        bfcd__reply__free_unpacked(reply, NULL);
        }
        t->is_dead = true;
        return NULL;
}

/* 0, the refusal as -error, or -EIO: there is no reply. Some requests are only sent. */
static int request(struct hostile *h, struct tie *t, Bfcd__Request *r)
{
        Bfcd__Reply *reply;
        int error = 0;

        if (one_in(h, 10)) {
                if (raw_send(t->raw, r) != 0)
                        t->is_dead = true;
                return -EINPROGRESS;
        }
        reply = call(t, r);
        if (!reply)
                return -EIO;
        take_reply(t, r, reply);
        if (reply->body_case == BFCD__REPLY__BODY_REFUSAL)
                error = -(int)reply->refusal->error;
        bfcd__reply__free_unpacked(reply, NULL);
        return error;
}

static int act_open(struct hostile *h)
{
        return tie_open(h, pick_tie(h));
}

/* Of a tenant that is another user's. */
static int act_pretend(struct hostile *h)
{
        struct raw *raw;
        int r = raw_open(h->storm->socket, &raw);

        if (r < 0)
                return r;
        r = raw_hello(raw, VICTIM, NULL);
        MUST(h, r != 0 || !h->storm->has_users, "a hello as another user's tenant was granted");
        raw_close(raw);
        return r;
}

static int act_hang_up(struct hostile *h)
{
        tie_close(pick_tie(h));
        return 0;
}

static int act_connect_many(struct hostile *h)
{
        uint8_t half[16] = { 200, 0, 0, 0 };
        unsigned n = 0;

        for (unsigned i = 0; i < N_CONNECTED; i++) {
                struct raw *raw;

                if (h->sockets[i] >= 0)
                        close(h->sockets[i]);
                h->sockets[i] = -1;
                if (one_in(h, 3) || raw_open(h->storm->socket, &raw) < 0)
                        continue;
                if (one_in(h, 3) && raw_hello(raw, HOSTILE, NULL) == 0)
                        n++;
                else if (one_in(h, 2))
                        (void)raw_send_bytes(raw, half, 1 + pick(h, sizeof(half)));
                h->sockets[i] = dup(raw->fd);
                raw_close(raw);
        }
        return n > 0 ? 0 : -EIO;
}

/* ---- memory by hand ------------------------------------------------------------------ */

static int act_malloc(struct hostile *h)
{
        Bfcd__Malloc body = BFCD__MALLOC__INIT;
        Bfcd__Request r = REQUEST(MALLOC, malloc, &body);
        struct tie *t = live_tie(h);

        if (!t)
                return -ENOTCONN;
        body.partition = one_in(h, 2) ? 0 : (uint32_t)pick(h, N_PARTITIONS + one_in(h, 40));
        body.n_bytes = one_in(h, 50) ? random_next(&h->random) : 1 + pick(h, UINT64_C(1) << pick(h, 23));
        if (one_in(h, 3))
                body.flags = (uint64_t)BFCD__MALLOC_FLAG__MALLOC_FLAG_PARKABLE |
                             (one_in(h, 3) ? BFCD__MALLOC_FLAG__MALLOC_FLAG_ONE_EXTENT : 0);
        else if (one_in(h, 6))
                body.flags = BFCD__MALLOC_FLAG__MALLOC_FLAG_ONE_EXTENT;
        else if (one_in(h, 20))
                body.flags = pick(h, 16);
        body.wait_ms = !one_in(h, 4) ? 0 : (uint32_t)pick(h, MAX_WAIT_MS);
        body.tag = (char *)(uintptr_t)(one_in(h, 2) ? "tag" : "");
        body.n_needed = one_in(h, 8) ? 1 + pick(h, body.n_bytes) : 0;
        return request(h, t, &r);
}

static int act_free(struct hostile *h)
{
        struct tie *t = tie_with_block(h);
        Bfcd__Free body = BFCD__FREE__INIT;
        Bfcd__Request r = REQUEST(FREE, free, &body);
        int result;

        if (!t)
                return -ENOTCONN;
        body.block_id = pick_id(h, t);
        result = request(h, t, &r);
        if (result == 0 || result == -EINPROGRESS)
                forget_id(t, body.block_id);
        return result;
}

static int act_split(struct hostile *h)
{
        struct tie *t = tie_with_block(h);
        Bfcd__Split body = BFCD__SPLIT__INIT;
        Bfcd__Request r = REQUEST(SPLIT, split, &body);

        if (!t)
                return -ENOTCONN;
        body.block_id = pick_id(h, t);
        body.n_bytes = GRANULE * (1 + pick(h, 16));
        body.n_more = (uint32_t)pick(h, 3);
        return request(h, t, &r);
}

static int act_ack(struct hostile *h)
{
        struct tie *t = live_tie(h);
        Bfcd__Ack body = BFCD__ACK__INIT;
        Bfcd__Request r = REQUEST(ACK, ack, &body);
        uint64_t lost[3];

        if (!t)
                return -ENOTCONN;
        body.sequence = one_in(h, 20) ? pick(h, 100) : t->raw->last_sequence;
        for (size_t i = 0; i < 3 && t->raw->n_extents > 0; i++)
                lost[body.n_lost_extent_ids++] = t->raw->extents[pick(h, t->raw->n_extents)].id;
        body.lost_extent_ids = lost;
        if (!one_in(h, 3))
                body.n_lost_extent_ids = 0;
        if (raw_send(t->raw, &r) != 0)
                t->is_dead = true;
        return 0;
}

static int act_cancel(struct hostile *h)
{
        struct tie *t = live_tie(h);
        Bfcd__Cancel body = BFCD__CANCEL__INIT;
        Bfcd__Request r = REQUEST(CANCEL, cancel, &body);

        if (!t)
                return -ENOTCONN;
        body.request_id = t->raw->next_id - 1 - pick(h, 4);
        if (raw_send(t->raw, &r) != 0)
                t->is_dead = true;
        return 0;
}

static int act_release(struct hostile *h)
{
        struct tie *t = live_tie(h);
        Bfcd__Release body = BFCD__RELEASE__INIT;
        Bfcd__Request r = REQUEST(RELEASE, release, &body);

        if (!t)
                return -ENOTCONN;
        body.partition = (uint32_t)pick(h, N_PARTITIONS);
        body.n_bytes = pick(h, 2) * 64 * MIB;
        return request(h, t, &r);
}

static int act_charge(struct hostile *h)
{
        struct tie *t = live_tie(h);
        Bfcd__Charge body = BFCD__CHARGE__INIT;
        Bfcd__Request r = REQUEST(CHARGE, charge, &body);

        if (!t)
                return -ENOTCONN;
        body.partition = (uint32_t)pick(h, N_PARTITIONS + one_in(h, 40));
        body.n_bytes = one_in(h, 20) ? random_next(&h->random) : 1 + pick(h, UINT64_C(1) << pick(h, 22));
        body.wait_ms = !one_in(h, 4) ? 0 : (uint32_t)pick(h, MAX_WAIT_MS);
        body.again = one_in(h, 3);
        return request(h, t, &r);
}

static int act_uncharge(struct hostile *h)
{
        struct tie *t = live_tie(h);
        Bfcd__Uncharge body = BFCD__UNCHARGE__INIT;
        Bfcd__Request r = REQUEST(UNCHARGE, uncharge, &body);

        if (!t)
                return -ENOTCONN;
        body.partition = (uint32_t)pick(h, N_PARTITIONS + one_in(h, 40));
        body.n_bytes = one_in(h, 20) ? random_next(&h->random) : 1 + pick(h, UINT64_C(1) << pick(h, 22));
        return request(h, t, &r);
}

/* ---- names by hand --------------------------------------------------------------------- */

/* Also names of the victims, which are another tenant's. */
static char *pick_name(struct hostile *h, char ret[static 16])
{
        snprintf(ret, 16, "n%u", (unsigned)pick(h, N_NAMES));
        return ret;
}

static int act_publish(struct hostile *h)
{
        struct tie *t = tie_with_block(h);
        Bfcd__Publish body = BFCD__PUBLISH__INIT;
        Bfcd__Request r = REQUEST(PUBLISH, publish, &body);
        uint8_t metadata[64] = { 1 };
        char name[16];
        int result;

        if (!t)
                return -ENOTCONN;
        body.block_id = pick_id(h, t);
        body.name = pick_name(h, name);
        body.keep_ms = one_in(h, 8) ? UINT64_MAX : pick(h, 4) * 100;
        body.metadata = (ProtobufCBinaryData){ pick(h, sizeof(metadata)), metadata };
        result = request(h, t, &r);
        for (unsigned i = 0; result == 0 && i < t->n_blocks; i++)
                if (t->blocks[i].id == body.block_id)
                        t->blocks[i].is_shared = true;
        return result;
}

static int act_attach(struct hostile *h)
{
        struct tie *t = live_tie(h);
        Bfcd__Attach body = BFCD__ATTACH__INIT;
        Bfcd__Request r = REQUEST(ATTACH, attach, &body);
        char name[16];

        if (!t)
                return -ENOTCONN;
        body.name = pick_name(h, name);
        body.wait_ms = !one_in(h, 4) ? 0 : (uint32_t)pick(h, MAX_WAIT_MS);
        body.read_only = one_in(h, 2);
        return request(h, t, &r);
}

static int act_forget(struct hostile *h)
{
        struct tie *t = live_tie(h);
        Bfcd__Forget body = BFCD__FORGET__INIT;
        Bfcd__Request r = REQUEST(FORGET, forget, &body);
        char name[16];

        if (!t)
                return -ENOTCONN;
        body.name = pick_name(h, name);
        return request(h, t, &r);
}

static int act_metadata(struct hostile *h)
{
        struct tie *t = tie_with_block(h);
        Bfcd__Metadata body = BFCD__METADATA__INIT;
        Bfcd__Request r = REQUEST(METADATA, metadata, &body);

        if (!t)
                return -ENOTCONN;
        body.block_id = pick_id(h, t);
        return request(h, t, &r);
}

/* ---- parking by hand ---------------------------------------------------------------------- */

static int act_park(struct hostile *h)
{
        struct tie *t = tie_with_block(h);
        Bfcd__Park body = BFCD__PARK__INIT;
        Bfcd__Request r = REQUEST(PARK, park, &body);

        if (!t)
                return -ENOTCONN;
        body.block_id = pick_parkable(h, t);
        body.discard = one_in(h, 3);
        body.partition = one_in(h, 30) ? (uint32_t)pick(h, N_PARTITIONS + 1) : 1;
        body.wait_ms = !one_in(h, 4) ? 0 : (uint32_t)pick(h, MAX_WAIT_MS);
        return request(h, t, &r);
}

static int act_wake(struct hostile *h)
{
        struct tie *t = tie_with_block(h);
        Bfcd__Wake body = BFCD__WAKE__INIT;
        Bfcd__Request r = REQUEST(WAKE, wake, &body);
        uint64_t ids[4];
        int result;

        if (!t)
                return -ENOTCONN;
        body.n_block_ids = one_in(h, 4) ? 1 + pick(h, 4) : 1;
        for (size_t i = 0; i < body.n_block_ids; i++)
                ids[i] = pick_parkable(h, t);
        body.block_ids = ids;
        body.wait_ms = !one_in(h, 4) ? 0 : (uint32_t)pick(h, MAX_WAIT_MS);
        r.id = t->raw->next_id;
        t->raw->next_id += body.n_block_ids;
        result = request(h, t, &r);
        forget_id(t, ids[0]); /* its reply has added it again */
        return result;
}

/* ---- events ------------------------------------------------------------------------------- */

static int act_answer_events(struct hostile *h)
{
        struct tie *t = live_tie(h);
        Bfcd__Event *event;
        int n = 0;

        if (!t || t->raw->events_fd < 0)
                return -ENOTCONN;
        while (raw_event(t->raw, 0, &event) == 0) {
                if (event->body_case == BFCD__EVENT__BODY_RETIRE) {
                        for (size_t i = 0; i < event->retire->n_extent_ids && !one_in(h, 8); i++)
                                (void)raw_let_go(t->raw, event->retire->extent_ids[i]);
                        (void)raw_answer(t->raw, event->sequence);
                        n++;
                }
                bfcd__event__free_unpacked(event, NULL);
        }
        return n > 0 ? 0 : -EAGAIN;
}

static int act_lie_about_events(struct hostile *h)
{
        struct tie *t = live_tie(h);
        Bfcd__EventReply reply = BFCD__EVENT_REPLY__INIT;
        uint8_t frame[64] = { 0 };

        if (!t || t->raw->events_fd < 0)
                return -ENOTCONN;
        reply.sequence = pick(h, 20);
        frame[0] = (uint8_t)bfcd__event_reply__pack(&reply, frame + 4);
        (void)send(t->raw->events_fd, frame, frame[0] + 4u - one_in(h, 8), MSG_NOSIGNAL | MSG_DONTWAIT);
        return 0;
}

/* ---- leases -------------------------------------------------------------------------------- */

/* Also with the name of another user, of an operator, and of one that is too long. */
static char *pick_lease(struct hostile *h, char ret[static 80])
{
        unsigned uid = one_in(h, 10) ? 0 : (unsigned)getuid(), i = (unsigned)pick(h, N_LEASES);

        if (one_in(h, 20))
                snprintf(ret, 80, "u%u:%060u", uid, i);
        else
                snprintf(ret, 80, one_in(h, 10) ? "op-%u%u" : "u%u:x%u", uid, i);
        return ret;
}

static int act_lease_create(struct hostile *h)
{
        static const char *const partitions[] = { "train", "parking", "spare" };
        struct tie *t = live_tie(h);
        Bfcd__LeaseCreate body = BFCD__LEASE_CREATE__INIT;
        Bfcd__Request r = REQUEST(LEASE_CREATE, lease_create, &body);
        char name[80];

        if (!t)
                return -ENOTCONN;
        body.name = pick_lease(h, name);
        body.tenant = (char *)(uintptr_t)(one_in(h, 10) ? VICTIM : "");
        body.partition = (char *)(uintptr_t)partitions[pick(h, N_PARTITIONS)];
        body.bytes_limit = (1 + pick(h, 16)) * 2 * MIB;
        body.bytes_reserve = one_in(h, 2) ? 0 : pick(h, 4) * 2 * MIB;
        if (one_in(h, 10)) { /* few, since the end of one refuses the hellos of all processes of this user */
                body.match_case = BFCD__LEASE_CREATE__MATCH_UID;
                body.uid = one_in(h, 10) ? 0 : getuid();
        } else if (one_in(h, 10)) {
                body.match_case = BFCD__LEASE_CREATE__MATCH_CGROUP;
                body.cgroup = (char *)(uintptr_t) "/";
        } else if (one_in(h, 20)) { /* which users may not */
                body.match_case = BFCD__LEASE_CREATE__MATCH_SOCKET;
                body.socket = (char *)(uintptr_t)(one_in(h, 2) ? "../client" : "s");
        } else {
                body.match_case = BFCD__LEASE_CREATE__MATCH_PID;
                body.pid = (uint64_t)(one_in(h, 10) ? 1 : one_in(h, 4) ? getppid() : getpid());
        }
        body.ttl_ms = one_in(h, 2) ? 0 : 1 + pick(h, 1000);
        body.evicts = one_in(h, 6);
        body.grace_ms = body.evicts ? pick(h, 100) : 0;
        return request(h, t, &r);
}

static int act_lease_set(struct hostile *h)
{
        struct tie *t = live_tie(h);
        Bfcd__LeaseSet body = BFCD__LEASE_SET__INIT;
        Bfcd__Request r = REQUEST(LEASE_SET, lease_set, &body);
        char name[80];

        if (!t)
                return -ENOTCONN;
        body.name = pick_lease(h, name);
        body.bytes_limit = pick(h, 16) * 2 * MIB;
        body.sets_reserve = one_in(h, 2);
        body.bytes_reserve = body.sets_reserve ? pick(h, 4) * 2 * MIB : 0;
        body.sets_ttl = one_in(h, 2);
        body.ttl_ms = body.sets_ttl ? pick(h, 1000) : 0;
        return request(h, t, &r);
}

static int act_lease_end(struct hostile *h)
{
        struct tie *t = live_tie(h);
        Bfcd__LeaseEnd body = BFCD__LEASE_END__INIT;
        Bfcd__Request r = REQUEST(LEASE_END, lease_end, &body);
        char name[80];

        if (!t)
                return -ENOTCONN;
        body.name = pick_lease(h, name);
        body.evicts = one_in(h, 6);
        body.grace_ms = body.evicts ? pick(h, 100) : 0;
        return request(h, t, &r);
}

/* ---- questions and forbidden commands --------------------------------------------------------- */

static int act_list(struct hostile *h)
{
        static const Bfcd__List__Kind kinds[] = {
                BFCD__LIST__KIND__STATUS,   BFCD__LIST__KIND__PARTITIONS, BFCD__LIST__KIND__TENANTS,
                BFCD__LIST__KIND__SESSIONS, BFCD__LIST__KIND__BLOCKS,     BFCD__LIST__KIND__SHARED,
                BFCD__LIST__KIND__EXTENTS,  BFCD__LIST__KIND__WAITING,    BFCD__LIST__KIND__LEASES,
                BFCD__LIST__KIND__AGES,     BFCD__LIST__KIND__WHOAMI,     BFCD__LIST__KIND__REFUSALS,
                (Bfcd__List__Kind)99,
        };
        struct tie *t = live_tie(h);
        Bfcd__List body = BFCD__LIST__INIT;
        Bfcd__Request r = REQUEST(LIST, list, &body);
        Bfcd__Reply *reply;

        if (!t)
                return -ENOTCONN;
        body.kind = kinds[pick(h, sizeof(kinds) / sizeof(kinds[0]))];
        body.cursor = one_in(h, 4) ? random_next(&h->random) >> pick(h, 64) : 0;
        reply = call(t, &r);
        if (!reply)
                return -EIO;
        for (size_t i = 0; reply->body_case == BFCD__REPLY__BODY_LIST && i < reply->list->n_sessions; i++)
                MUST(h, strcmp(reply->list->sessions[i]->tenant, HOSTILE) == 0,
                     "a session of another tenant is listed");
        for (size_t i = 0; reply->body_case == BFCD__REPLY__BODY_LIST && i < reply->list->n_blocks; i++)
                MUST(h, strcmp(reply->list->blocks[i]->tenant, HOSTILE) == 0,
                     "a block of another tenant is listed");
        bfcd__reply__free_unpacked(reply, NULL);
        return 0;
}

static int act_usage(struct hostile *h)
{
        struct tie *t = live_tie(h);
        Bfcd__Usage body = BFCD__USAGE__INIT;
        Bfcd__Request r = REQUEST(USAGE, usage, &body);

        if (!t)
                return -ENOTCONN;
        body.partition = (uint32_t)pick(h, N_PARTITIONS);
        body.with_room = one_in(h, 2);
        return request(h, t, &r);
}

/* Commands of operators, on the client socket. */
static int act_command(struct hostile *h)
{
        struct tie *t = live_tie(h);
        Bfcd__Evict evict = BFCD__EVICT__INIT;
        Bfcd__Drain drain = BFCD__DRAIN__INIT;
        Bfcd__Reload reload = BFCD__RELOAD__INIT;
        Bfcd__ParkNow park = BFCD__PARK_NOW__INIT;
        Bfcd__TrimNow trim = BFCD__TRIM_NOW__INIT;
        Bfcd__Request requests[] = { REQUEST(EVICT, evict, &evict), REQUEST(DRAIN, drain, &drain),
                                     REQUEST(RELOAD, reload, &reload), REQUEST(PARK_NOW, park_now, &park),
                                     REQUEST(TRIM_NOW, trim_now, &trim) };
        Bfcd__Request *command;
        int r;

        if (!t)
                return -ENOTCONN;
        evict.session_id = one_in(h, 2) ? t->raw->session_id : pick(h, 200);
        drain.device = (char *)(uintptr_t)rig_device_id();
        park.session_id = evict.session_id;
        command = &requests[pick(h, 5)];
        r = request(h, t, command);
        MUST(h, r < 0, "session %llu: command %d of operators was obeyed, request %llu",
             (unsigned long long)t->raw->session_id, (int)command->body_case,
             (unsigned long long)command->id);
        return r;
}

/* ---- bytes ---------------------------------------------------------------------------------- */

static int act_garbage(struct hostile *h)
{
        struct tie *t = live_tie(h);
        uint64_t bytes[32];

        if (!t)
                return -ENOTCONN;
        for (size_t i = 0; i < 32; i++)
                bytes[i] = random_next(&h->random);
        if (one_in(h, 2)) /* a length that can be */
                ((uint8_t *)bytes)[2] = ((uint8_t *)bytes)[3] = 0;
        (void)send(one_in(h, 4) && t->raw->events_fd >= 0 ? t->raw->events_fd : t->raw->fd, bytes,
                   1 + pick(h, sizeof(bytes)), MSG_NOSIGNAL | MSG_DONTWAIT);
        return 0;
}

/* Half a request; the rest may never come. */
static int act_half_frame(struct hostile *h)
{
        struct tie *t = live_tie(h);
        Bfcd__Malloc body = BFCD__MALLOC__INIT;
        Bfcd__Request r = REQUEST(MALLOC, malloc, &body);
        uint8_t frame[128];
        size_t n, cut;

        if (!t)
                return -ENOTCONN;
        r.id = t->raw->next_id++;
        body.n_bytes = 1000;
        body.tag = (char *)(uintptr_t) "half";
        n = raw_pack(&r, frame);
        cut = 1 + pick(h, n - 1);
        if (raw_send_bytes(t->raw, frame, cut) != 0)
                t->is_dead = true;
        usleep((useconds_t)pick(h, 20000));
        if (one_in(h, 2) && raw_send_bytes(t->raw, frame + cut, n - cut) != 0)
                t->is_dead = true;
        else if (one_in(h, 2))
                t->is_dead = true; /* it is left so */
        return 0;
}

/* Requests whose replies nobody reads. */
static int act_flood(struct hostile *h)
{
        struct tie *t = live_tie(h);
        Bfcd__List list = BFCD__LIST__INIT;
        Bfcd__Malloc much = BFCD__MALLOC__INIT;
        Bfcd__Request requests[] = { REQUEST(LIST, list, &list), REQUEST(MALLOC, malloc, &much) };
        Bfcd__Reply *reply;
        uint8_t frame[128];
        size_t n;

        if (!t)
                return -ENOTCONN;
        list.kind = BFCD__LIST__KIND__BLOCKS;
        much.n_bytes = 1 + pick(h, 100000);
        much.wait_ms = (uint32_t)pick(h, MAX_WAIT_MS);
        for (unsigned i = 0; i < FLOOD; i++) {
                Bfcd__Request *r = &requests[pick(h, 2)];

                r->id = t->raw->next_id++;
                n = raw_pack(r, frame);
                if (send(t->raw->fd, frame, n, MSG_NOSIGNAL | MSG_DONTWAIT) != (ssize_t)n)
                        break;
        }
        if (one_in(h, 2))
                tie_close(t);
        else if (one_in(h, 2))
                t->is_dead = true;
        else /* they are read after all */
                while (raw_receive(t->raw, 50, &reply) == 0)
                        bfcd__reply__free_unpacked(reply, NULL);
        return 0;
}

static int act_goodbye(struct hostile *h)
{
        struct tie *t = live_tie(h);
        Bfcd__Goodbye body = BFCD__GOODBYE__INIT;
        Bfcd__Request r = REQUEST(GOODBYE, goodbye, &body);
        int result;

        if (!t)
                return -ENOTCONN;
        body.exits = one_in(h, 2);
        for (bool lies = one_in(h, 2); t->raw->n_extents > 0 && !lies;)
                (void)raw_let_go(t->raw, t->raw->extents[0].id);
        result = request(h, t, &r);
        if (!one_in(h, 4))
                tie_close(t);
        return result;
}

/* ---- resuming -------------------------------------------------------------------------------- */

static int act_held_out_of_place(struct hostile *h)
{
        struct tie *t = live_tie(h);
        uint64_t ids[2] = { pick(h, 100), pick(h, 1000) };
        struct raw_held held = { .extent_ids = ids, .block_ids = ids + 1, .n_extents = 1, .n_blocks = 1 };

        if (!t)
                return -ENOTCONN;
        t->is_dead = raw_held(t->raw, &held) < 0;
        MUST(h, t->is_dead, "a list of a session that is not resumed was accepted");
        return -EIO;
}

enum resumption { CORRECT, WRONG_SECRET, NO_LIST, TWICE, WRONG_LIST, FROM_FORK, N_RESUMPTIONS };

static struct raw *resume_hello(struct hostile *h, const struct raw *from, bool is_wrong, int *ret_result)
{
        struct raw *raw;

        *ret_result = raw_open(h->storm->socket, &raw);
        if (*ret_result < 0)
                return NULL;
        raw->wants_events = from->wants_events;
        raw->wants_return = raw->comes_back = true;
        raw->session_id = from->session_id;
        memcpy(raw->secret, from->secret, sizeof(raw->secret));
        if (is_wrong)
                raw->secret[pick(h, sizeof(raw->secret))] ^= (uint8_t)(1u << pick(h, 8));
        *ret_result = raw_hello(raw, NULL, NULL);
        return raw;
}

/* Its pid: a session may be resumed again after another restart. */
static pid_t daemon_of(const struct raw *raw)
{
        struct ucred daemon = { 0 };
        socklen_t n = sizeof(daemon);

        (void)getsockopt(raw->fd, SOL_SOCKET, SO_PEERCRED, &daemon, &n);
        return daemon.pid;
}

/* In the place of the connection that ended, with what it was given. */
static int resume_list(struct hostile *h, struct tie *t, struct raw *raw, bool is_wrong)
{
        uint64_t extents[256], blocks[N_IDS + 1], shared[N_IDS];
        struct raw_held held = { .extent_ids = extents, .block_ids = blocks, .shared_ids = shared };
        int r;

        for (size_t i = 0; i < t->raw->n_extents && held.n_extents < 256; i++)
                extents[held.n_extents++] = t->raw->extents[i].id;
        for (size_t i = 0; i < t->n_blocks; i++) {
                if (t->blocks[i].is_shared)
                        shared[held.n_shared++] = t->blocks[i].id;
                else
                        blocks[held.n_blocks++] = t->blocks[i].id;
        }
        if (is_wrong)
                blocks[held.n_blocks++] = pick(h, 3000);
        held.is_not_last = one_in(h, 10);
        r = raw_held(raw, &held);
        raw_close(t->raw);
        t->raw = raw;
        t->is_dead = r < 0;
        return r;
}

static void resume_in_child(struct hostile *h, const struct tie *t)
{
        pid_t pid = fork();
        int r;

        if (pid == 0) {
                alarm(CHILD_S);
                raw_close(resume_hello(h, t->raw, false, &r));
                MUST(h, r != 0, "a forked child resumed a session");
                _exit(0);
        }
}

static int act_resume(struct hostile *h)
{
        enum resumption how = (enum resumption)pick(h, N_RESUMPTIONS);
        struct tie *t = pick_tie(h);
        struct raw *raw, *other;
        int r;

        if (!t->raw || (!t->is_dead && !one_in(h, 40)))
                return -ENOTCONN;
        if (one_in(h, 2))
                how = CORRECT;
        if (how == FROM_FORK) {
                resume_in_child(h, t);
                return -EACCES;
        }
        raw = resume_hello(h, t->raw, how == WRONG_SECRET, &r);
        if (!raw)
                return r;
        MUST(h, r != 0 || how != WRONG_SECRET, "a session was resumed with a wrong secret");
        if (r == 0 && how == TWICE) {
                other = resume_hello(h, t->raw, false, &r);
                MUST(h, r != 0 || daemon_of(other) != daemon_of(raw),
                     "a session was resumed by two connections");
                raw_close(other);
                r = 0;
        }
        if (r == 0 && how == NO_LIST) {
                other = t->raw;
                t->raw = raw;
                raw_close(other);
                t->is_dead = one_in(h, 2); /* else another request comes in place of the list */
                return r;
        }
        if (r == 0)
                return resume_list(h, t, raw, how == WRONG_LIST);
        raw_close(raw);
        if (r != -EAGAIN && one_in(h, 2))
                tie_close(t);
        return r;
}

/* ---- the library ------------------------------------------------------------------------------- */

static bfc_client *pick_client(struct hostile *h)
{
        static const uint64_t flags[] = { 0, BFC_NO_CACHE, BFC_INHERIT, BFC_NO_THREAD,
                                          BFC_POLL | BFC_NO_CACHE };
        bfc_client **client = &h->clients[pick(h, N_CLIENTS)];
        struct bfc_options options = { .struct_size = sizeof(options),
                                       .socket = h->storm->socket,
                                       .tenant = HOSTILE };

        options.flags = CHILDREN_HAVE_EVENTS ? flags[pick(h, 5)] : BFC_NO_THREAD;
        if (!*client && !h->has_few_fds)
                (void)bfc_connect(&options, client);
        return *client;
}

static int act_lib_end(struct hostile *h)
{
        bfc_client **client = &h->clients[pick(h, N_CLIENTS)];

        for (unsigned i = 0; i < N_BLOCKS; i++)
                if (h->blocks[i].client == *client)
                        h->blocks[i].ptr = NULL;
        bfc_disconnect(*client);
        *client = NULL;
        return 0;
}

static int act_lib_malloc(struct hostile *h)
{
        struct bfc_malloc_options options = { .struct_size = sizeof(options) };
        size_t i = pick(h, N_BLOCKS), n_bytes = 1 + pick(h, UINT64_C(1) << pick(h, 23));
        int r, fd;

        if (h->blocks[i].ptr)
                return -ENOTCONN;
        h->blocks[i].client = pick_client(h);
        if (!h->blocks[i].client)
                return -ENOTCONN;
        options.flags = one_in(h, 4)   ? BFC_PARKABLE
                        : one_in(h, 4) ? BFC_PARKABLE | BFC_ONE_EXTENT | BFC_SHAREABLE
                        : one_in(h, 3) ? BFC_WHOLE
                        : one_in(h, 3) ? BFC_ONE_EXTENT | BFC_SHAREABLE
                                       : 0;
        options.wait_ms = one_in(h, 3) ? (uint32_t)pick(h, MAX_WAIT_MS) : 0;
        options.tag = one_in(h, 2) ? "t" : NULL;
        options.partition = one_in(h, 6) ? "spare" : NULL;
        h->blocks[i].n_bytes = n_bytes;
        r = bfc_malloc_with(h->blocks[i].client, n_bytes, &options, &h->blocks[i].ptr);
        if (r == 0) /* a tenant may overwrite all that it has */
                (void)bfc_write(h->blocks[i].client, h->blocks[i].ptr, "hostile", n_bytes < 8 ? n_bytes : 8);
        if (r == 0 && bfc_extent_fd(h->blocks[i].client, h->blocks[i].ptr, &fd) == 0)
                close(fd);
        return r;
}

/* Of one of its clients, which may be lost. */
static int act_lib_charge(struct hostile *h)
{
        bfc_client *client = pick_client(h);
        size_t n_bytes = 1 + pick(h, UINT64_C(1) << pick(h, 22));

        if (!client)
                return -ENOTCONN;
        return one_in(h, 2)
                       ? bfc_charge(client, NULL, n_bytes, one_in(h, 3) ? (uint32_t)pick(h, MAX_WAIT_MS) : 0)
                       : bfc_uncharge(client, NULL, n_bytes);
}

static int act_lib_free(struct hostile *h)
{
        size_t i = pick(h, N_BLOCKS);
        void *ptr = h->blocks[i].ptr;
        int r;

        if (!ptr)
                return -ENOTCONN;
        r = bfc_free(h->blocks[i].client, ptr);
        if (r == 0 || r == -EINVAL)
                h->blocks[i].ptr = NULL;
        if (r == 0 && one_in(h, 8))
                MUST(h, bfc_free(h->blocks[i].client, (char *)ptr + 1) != 0, "a free inside a block");
        return r;
}

static int act_lib_share(struct hostile *h)
{
        struct bfc_publish_options options = { .struct_size = sizeof(options) };
        size_t i = pick(h, N_BLOCKS);
        char name[16];

        if (!h->blocks[i].ptr)
                return -ENOTCONN;
        options.keep_ms = one_in(h, 6) ? BFC_KEEP_FOREVER : pick(h, 3) * 100;
        return bfc_publish_with(h->blocks[i].client, h->blocks[i].ptr, pick_name(h, name), &options);
}

static int act_lib_attach(struct hostile *h)
{
        struct bfc_attach_options options = { .struct_size = sizeof(options) };
        size_t i = pick(h, N_BLOCKS);
        char name[16];

        if (h->blocks[i].ptr)
                return -ENOTCONN;
        h->blocks[i].client = pick_client(h);
        if (!h->blocks[i].client)
                return -ENOTCONN;
        options.flags = one_in(h, 2) ? BFC_ATTACH_READ_ONLY : 0;
        options.wait_ms = one_in(h, 2) ? (uint32_t)pick(h, MAX_WAIT_MS) : 0;
        return bfc_attach_with(h->blocks[i].client, pick_name(h, name), &options, &h->blocks[i].ptr,
                               &h->blocks[i].n_bytes);
}

static int act_lib_forget(struct hostile *h)
{
        bfc_client *client = pick_client(h);
        char name[16];

        return client ? bfc_forget(client, pick_name(h, name)) : -ENOTCONN;
}

static int act_lib_park(struct hostile *h)
{
        size_t i = pick(h, N_BLOCKS);

        if (!h->blocks[i].ptr)
                return -ENOTCONN;
        if (one_in(h, 4))
                return bfc_park_tag(h->blocks[i].client, "t", BFC_BACKUP, "parking");
        return bfc_park(h->blocks[i].client, h->blocks[i].ptr, one_in(h, 3) ? BFC_DISCARD : BFC_BACKUP,
                        "parking");
}

static int act_lib_wake(struct hostile *h)
{
        size_t i = pick(h, N_BLOCKS);

        if (!h->blocks[i].ptr)
                return -ENOTCONN;
        if (one_in(h, 4))
                return bfc_wake_tag(h->blocks[i].client, "t", (uint32_t)pick(h, MAX_WAIT_MS));
        return bfc_wake(h->blocks[i].client, h->blocks[i].ptr, (uint32_t)pick(h, MAX_WAIT_MS));
}

static int act_lib_trim(struct hostile *h)
{
        bfc_client *client = pick_client(h);
        size_t n_free, n_total;

        if (!client)
                return -ENOTCONN;
        (void)bfc_poll(client);
        (void)bfc_mem_get_info(client, NULL, &n_free, &n_total);
        return one_in(h, 2) ? 0 : bfc_trim(client, SIZE_MAX);
}

/* ---- processes ------------------------------------------------------------------------------------ */

/* What a child may do with what it inherits. An access to memory that is only reserved ends it. */
static void be_child(struct hostile *h)
{
        size_t i = pick(h, N_BLOCKS);
        Bfcd__Malloc body = BFCD__MALLOC__INIT;
        Bfcd__Request r = REQUEST(MALLOC, malloc, &body);
        struct tie *t = pick_tie(h);
        void *p;

        alarm(CHILD_S);
        for (unsigned k = 0; k < N_TIES; k++) /* so that its parent's requests have other ids */
                if (h->ties[k].raw)
                        h->ties[k].raw->next_id += UINT64_C(1) << 32;
        signal(SIGSEGV, SIG_DFL);
        signal(SIGBUS, SIG_DFL);
        if (h->clients[0])
                MUST(h, bfc_malloc(h->clients[0], 100, &p) == -ECHILD, "a child used its parent's client");
        body.n_bytes = 4000;
        if (t->raw && one_in(h, 2)) /* it mixes its bytes with those of its parent */
                (void)raw_send(t->raw, &r);
        if (one_in(h, 3))
                act_malloc(h);
        usleep((useconds_t)pick(h, 1500) * 1000);
        if (h->blocks[i].ptr)
                *(volatile char *)h->blocks[i].ptr = 'c';
        usleep((useconds_t)pick(h, 500) * 1000);
        if (one_in(h, 2))
                raise(SIGKILL);
        _exit(0);
}

static int act_fork(struct hostile *h)
{
        pid_t pid;

        if (!CHILDREN_HAVE_EVENTS) /* ThreadSanitizer does not follow a fork beside threads */
                return -ENOTSUP;
        pid = fork();
        if (pid == 0)
                be_child(h);
        return pid > 0 ? 0 : -errno;
}

static int act_few_fds(struct hostile *h)
{
        struct rlimit limit = { 0, 0 };

        if (h->clients[0] || h->clients[1]) /* the fake driver needs some */
                return -ENOTCONN;
        if (getrlimit(RLIMIT_NOFILE, &limit) < 0)
                return -errno;
        h->has_few_fds = one_in(h, 2);
        limit.rlim_cur = h->has_few_fds ? 40 : limit.rlim_max;
        return setrlimit(RLIMIT_NOFILE, &limit) < 0 ? -errno : 0;
}

static int act_die(struct hostile *h)
{
        if (one_in(h, 2))
                raise(SIGKILL);
        if (!h->clients[0] &&
            !h->clients[1]) /* a stopped thread may have a lock of the fake driver's machine */
                raise(SIGSTOP);
        else if (one_in(h, 2))
                (void)execl("/bin/sleep", "sleep", "1", (char *)NULL);
        _exit(0);
}

/* ---- the choice ------------------------------------------------------------------------------------- */

static const struct act {
        const char *name;
        int (*function)(struct hostile *h);
        unsigned weight;
} acts[] = {
        { "open", act_open, 8 },
        { "open as the victim", act_pretend, 3 },
        { "hang up", act_hang_up, 3 },
        { "connect many", act_connect_many, 1 },
        { "malloc", act_malloc, 40 },
        { "free", act_free, 20 },
        { "split", act_split, 6 },
        { "ack", act_ack, 4 },
        { "cancel", act_cancel, 4 },
        { "release", act_release, 3 },
        { "charge", act_charge, 8 },
        { "uncharge", act_uncharge, 8 },
        { "publish", act_publish, 14 },
        { "attach", act_attach, 14 },
        { "forget", act_forget, 4 },
        { "metadata", act_metadata, 3 },
        { "park", act_park, 14 },
        { "wake", act_wake, 12 },
        { "answer events", act_answer_events, 12 },
        { "lie about events", act_lie_about_events, 2 },
        { "lease create", act_lease_create, 8 },
        { "lease set", act_lease_set, 5 },
        { "lease end", act_lease_end, 5 },
        { "list", act_list, 5 },
        { "usage", act_usage, 3 },
        { "command", act_command, 2 },
        { "garbage", act_garbage, 1 },
        { "half a frame", act_half_frame, 2 },
        { "flood", act_flood, 2 },
        { "goodbye", act_goodbye, 3 },
        { "held out of place", act_held_out_of_place, 1 },
        { "resume", act_resume, 40 },
        { "library: disconnect", act_lib_end, 2 },
        { "library: malloc", act_lib_malloc, 30 },
        { "library: free", act_lib_free, 15 },
        { "library: charge", act_lib_charge, 8 },
        { "library: publish", act_lib_share, 8 },
        { "library: attach", act_lib_attach, 8 },
        { "library: forget", act_lib_forget, 3 },
        { "library: park", act_lib_park, 10 },
        { "library: wake", act_lib_wake, 10 },
        { "library: trim", act_lib_trim, 5 },
        { "fork", act_fork, 3 },
        { "few fds", act_few_fds, 1 },
        { "die", act_die, 1 },
};
#define N_ACTS (sizeof(acts) / sizeof(acts[0]))
_Static_assert(N_ACTS <= STORM_MAX_ACTS, "an act has no count");

const char *storm_act_name(unsigned i)
{
        return i < N_ACTS ? acts[i].name : NULL;
}

static unsigned pick_act(struct hostile *h)
{
        unsigned sum = 0, at;

        for (unsigned i = 0; i < N_ACTS; i++)
                sum += acts[i].weight;
        at = (unsigned)pick(h, sum);
        for (unsigned i = 0;; i++) {
                if (at < acts[i].weight)
                        return i;
                at -= acts[i].weight;
        }
}

/* A child that failed has said so; one that a sanitizer ended has not. */
static void reap_children(struct hostile *h)
{
        int status;

        while (waitpid(-1, &status, WNOHANG) > 0)
                MUST(h, !WIFEXITED(status) || WEXITSTATUS(status) == 0, "a child ended with status %d",
                     WEXITSTATUS(status));
}

static void *run(void *arg)
{
        struct hostile *h = arg;

        for (;;) {
                unsigned i = pick_act(h);
                int r = acts[i].function(h);

                h->storm->n_acts[i] += r != -ENOTCONN; /* there was nothing to do it with */
                h->storm->n_granted[i] += r == 0;
                reap_children(h);
                if (one_in(h, 4))
                        usleep((useconds_t)pick(h, 5000));
        }
        return NULL;
}

void storm_tenant_run(struct storm *storm, uint64_t seed)
{
        static struct hostile h;
        pthread_t thread;

        h = (struct hostile){ .storm = storm, .random = seed };
        for (unsigned i = 0; i < N_CONNECTED; i++)
                h.sockets[i] = -1;
        if (one_in(&h, 2))
                unsetenv("BFC_CACHE"); /* the harness turned it off */
        if (one_in(&h, 8) && pthread_create(&thread, NULL, run, &h) == 0)
                pthread_exit(NULL); /* the process goes on without its main thread */
        (void)run(&h);
}
