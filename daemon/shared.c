/* Shared blocks; see shared.h.
 *
 * Names are in one tree (tsearch(3)), by tenant and name, so that no name a client
 * thinks of makes looking it up slow.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/shared.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <search.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/clock.h"
#include "daemon/session.h"

#define EXPIRE_LOOKS 4096u /* at sessions, in one turn */

struct shared_name {
        char tenant[LEDGER_NAME_BYTES];
        char name[LEDGER_NAME_BYTES];
        uint32_t shared; /* in the ledger; LEDGER_NONE: it is only waited for */
        struct shared_wait_list waits;
        bool is_due;  /* it is in the broker's list: some who wait can be served */
        bool is_busy; /* in name_serve(), which ends with name_settle() */
        TAILQ_ENTRY(shared_name) of_due;
};

struct shared_wait {
        struct session *session;
        struct shared_name *name;
        uint64_t request_id;
        uint64_t until_ms;
        TAILQ_ENTRY(shared_wait) of_session, of_name;
        bool sees[]; /* by index of the session's partitions: the client can map what is there */
};

void shared_init(struct shared_waits *w)
{
        TAILQ_INIT(&w->list);
        w->n = 0;
        w->until_ms = 0;
}

/* ---- names --------------------------------------------------------------- */

static int name_compare(const void *a, const void *b)
{
        const struct shared_name *x = a, *y = b;
        int r = strcmp(x->tenant, y->tenant);

        return r != 0 ? r : strcmp(x->name, y->name);
}

static void name_key(const char *tenant, const char *text, struct shared_name *ret)
{
        snprintf(ret->tenant, sizeof(ret->tenant), "%s", tenant);
        snprintf(ret->name, sizeof(ret->name), "%s", text);
}

static struct shared_name *name_find(const struct session *s, const char *text)
{
        struct shared_name key, *const *found;

        name_key(s->tenant->name, text, &key);
        found = tfind(&key, &s->broker->shared_names, name_compare);
        return found ? *found : NULL;
}

/* One that is not there. NULL: out of memory. */
static struct shared_name *name_new(struct broker *b, const char *tenant, const char *text)
{
        struct shared_name *name = calloc(1, sizeof(*name));

        if (!name)
                return NULL;
        name_key(tenant, text, name);
        name->shared = LEDGER_NONE;
        TAILQ_INIT(&name->waits);
        if (!tsearch(name, &b->shared_names, name_compare)) {
                free(name);
                return NULL;
        }
        return name;
}

/* The name, made where it is not there; NULL: out of memory. */
static struct shared_name *name_get(struct session *s, const char *text)
{
        struct shared_name *name = name_find(s, text);

        return name ? name : name_new(s->broker, s->tenant->name, text);
}

static void name_set_due(struct broker *b, struct shared_name *name, bool is_due)
{
        if (name->is_due == is_due)
                return;
        name->is_due = is_due;
        if (is_due)
                TAILQ_INSERT_TAIL(&b->shared_due, name, of_due);
        else
                TAILQ_REMOVE(&b->shared_due, name, of_due);
}

/* Forgets a name that is neither published nor waited for. */
static void name_settle(struct broker *b, struct shared_name *name)
{
        if (name->shared == LEDGER_NONE || TAILQ_EMPTY(&name->waits))
                name_set_due(b, name, false);
        if (name->shared != LEDGER_NONE || !TAILQ_EMPTY(&name->waits) || name->is_busy)
                return;
        tdelete(name, &b->shared_names, name_compare);
        free(name);
}

/* 1 to 63 bytes of printable ASCII. Refuses others. */
static bool name_is_refused(struct session *s, uint64_t id, const char *text)
{
        size_t n = strlen(text);

        for (size_t i = 0; i < n; i++)
                if (text[i] < ' ' || text[i] > '~')
                        n = 0;
        if (n > 0 && n < LEDGER_NAME_BYTES)
                return false;
        session_refuse(s, id, -EINVAL, "the name of a shared block must be 1 to 63 bytes of printable ASCII");
        return true;
}

/* ---- holds --------------------------------------------------------------- */

/* The session has fewer than SHARED_MAX_HOLDS, and none of this one. -ENOSPC, -ENOMEM. */
static int hold_begin(struct session *s, uint32_t shared, uint32_t *ret_hold)
{
        int r = holds_make_room(&s->holds);

        if (r == 0)
                r = ledger_hold_add(s->broker->ledger, s->index, shared, ret_hold);
        if (r == 0)
                holds_add(&s->holds, shared, *ret_hold);
        return r;
}

/* The last one who has it lets go: the block is free, and then its name. */
static void shared_end(struct session *s, uint32_t hold)
{
        struct ledger *l = s->broker->ledger;
        uint32_t index = ledger_hold_at(l, hold)->shared;
        const struct ledger_shared *shared = ledger_shared_at(l, index);
        const struct ledger_block block = *ledger_block_at(l, shared->block);
        struct shared_name *name = name_find(s, shared->name);

        ledger_block_clear(l, shared->block);
        ledger_hold_clear(l, hold);
        ledger_shared_clear(l, index);
        name->shared = LEDGER_NONE;
        name_settle(s->broker, name);
        trim_remove_shared_block(session_share_of(s, block.quota)->quota, block.offset, block.n_bytes);
        quota_dealloc(session_share_of(s, block.quota)->quota, block.handle, block.n_bytes,
                      block.n_requested);
}

static void hold_end(struct session *s, uint32_t hold)
{
        struct ledger *l = s->broker->ledger;

        holds_remove(&s->holds, ledger_hold_at(l, hold)->shared);
        if (ledger_shared_at(l, ledger_hold_at(l, hold)->shared)->links.n_holds == 1)
                shared_end(s, hold);
        else
                ledger_hold_clear(l, hold);
}

static void hold_count_down(struct session *s, uint32_t hold)
{
        struct ledger_hold *h = ledger_hold_at(s->broker->ledger, hold);

        if (h->count > 1)
                h->count--;
        else
                hold_end(s, hold);
}

bool shared_let_go(struct session *s, uint32_t block)
{
        struct ledger *l = s->broker->ledger;
        uint32_t hold = holds_find(&s->holds, ledger_block_at(l, block)->shared);

        if (hold == LEDGER_NONE ||
            ledger_hold_at(l, hold)->count == ledger_hold_at(l, hold)->links.n_in_delivery)
                return false;
        hold_count_down(s, hold);
        return true;
}

void shared_delivered(struct session *s, uint32_t hold)
{
        ledger_hold_at(s->broker->ledger, hold)->links.n_in_delivery--;
}

void shared_undelivered(struct session *s, uint32_t hold)
{
        shared_delivered(s, hold);
        hold_count_down(s, hold);
}

bool shared_settle(struct session *s, uint32_t hold)
{
        struct ledger_hold *h = ledger_hold_at(s->broker->ledger, hold);
        uint32_t n = h->links.n_in_delivery;

        h->links.n_in_delivery = 0;
        if (n == h->count) {
                hold_end(s, hold);
                return true;
        }
        h->count -= n;
        return false;
}

/* The last of them, so that none of the others moves. */
void shared_reap(struct session *s)
{
        hold_end(s, s->holds.list[s->holds.n - 1].hold);
}

/* ---- publish ------------------------------------------------------------- */

/* Or answered, where that is all there is to do. */
static bool publish_is_refused(struct session *s, uint64_t id, const Bfcd__Publish *p, uint32_t index)
{
        struct ledger *l = s->broker->ledger;
        const struct ledger_block *block = index == LEDGER_NONE ? NULL : ledger_block_at(l, index);
        uint32_t shared = block ? block->shared : LEDGER_NONE;
        const struct shared_name *taken;
        char sentence[256];

        if (shared != LEDGER_NONE && holds_find(&s->holds, shared) != LEDGER_NONE) {
                if (s->has_returned && strcmp(ledger_shared_at(l, shared)->name, p->name) == 0) {
                        session_done(s, id); /* another process did, and its answer was lost */
                        return true;
                }
                snprintf(sentence, sizeof(sentence), "block %" PRIu64 " is already shared as '%s'",
                         p->block_id, ledger_shared_at(l, shared)->name);
                session_refuse(s, id, -EINVAL, sentence);
                return true;
        }
        if (!block || block->session != s->index || block->links.in_delivery) {
                snprintf(sentence, sizeof(sentence),
                         "block %" PRIu64 " does not belong to this session: already freed, or never "
                         "allocated by it",
                         p->block_id);
                session_refuse(s, id, -EINVAL, sentence);
                return true;
        }
        taken = name_find(s, p->name);
        if (taken && taken->shared != LEDGER_NONE) {
                snprintf(sentence, sizeof(sentence),
                         "tenant '%s' already has a block shared as '%s'; the name is free when the last "
                         "of %" PRIu32 " sessions has detached or freed it",
                         s->tenant->name, p->name, ledger_shared_at(l, taken->shared)->links.n_holds);
                session_refuse(s, id, -EEXIST, sentence);
                return true;
        }
        return false;
}

/* A session has at most so many. Refuses one more. */
static bool hold_is_refused(struct session *s, uint64_t id)
{
        char sentence[128];

        if (ledger_session_at(s->broker->ledger, s->index)->links.n_holds < SHARED_MAX_HOLDS)
                return false;
        snprintf(sentence, sizeof(sentence), "this session has %u shared blocks, the maximum",
                 SHARED_MAX_HOLDS);
        session_refuse(s, id, -EDQUOT, sentence);
        return true;
}

/* Makes the records, the block's last. -ENOSPC: a table is full; -ENOMEM. */
static int publish_write_down(struct session *s, const char *text, uint32_t block, uint32_t *ret_shared)
{
        struct ledger *l = s->broker->ledger;
        struct ledger_shared facts = { .block = block, .born_ms = clock_ms() };
        uint32_t shared, hold;
        int r;

        snprintf(facts.name, sizeof(facts.name), "%s", text);
        r = ledger_shared_add(l, &facts, &shared);
        if (r < 0)
                return r;
        r = hold_begin(s, shared, &hold);
        if (r < 0) {
                ledger_shared_clear(l, shared);
                return r;
        }
        ledger_block_share(l, block, shared);
        *ret_shared = shared;
        return 0;
}

int shared_publish(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        const Bfcd__Publish *p = r->publish;
        struct broker *b = s->broker;
        uint32_t index = ledger_block_find(b->ledger, p->block_id);
        struct shared_name *name;
        int error;

        (void)ret_why;
        if (s->admin) {
                session_refuse(s, r->id, -EACCES, "the admin socket serves no blocks: use the client socket");
                return 0;
        }
        if (name_is_refused(s, r->id, p->name) || publish_is_refused(s, r->id, p, index) ||
            hold_is_refused(s, r->id))
                return 0;
        name = name_get(s, p->name);
        error = name ? publish_write_down(s, p->name, index, &name->shared) : -ENOMEM;
        if (error < 0) {
                if (name)
                        name_settle(b, name);
                session_refuse(s, r->id, -ENOMEM,
                               error == -ENOSPC
                                       ? "the daemon's table of shared blocks or of their references is "
                                         "full"
                                       : "the daemon is out of memory");
                return 0;
        }
        s->bytes_in_use -= ledger_block_at(b->ledger, index)->n_bytes;
        holding_remove(&session_share_of(s, ledger_block_at(b->ledger, index)->quota)->holding,
                       ledger_block_at(b->ledger, index)->n_bytes);
        trim_publish_block(session_share_of(s, ledger_block_at(b->ledger, index)->quota),
                           ledger_block_at(b->ledger, index)->offset,
                           ledger_block_at(b->ledger, index)->n_bytes);
        session_done(s, r->id);
        if (!TAILQ_EMPTY(&name->waits)) {
                name_set_due(b, name, true);
                broker_wake(b);
        }
        return 0;
}

/* ---- attach -------------------------------------------------------------- */

/* One hold more of the session: *ret_hold. Refuses where that cannot be. */
static int attach_count_up(struct session *s, uint64_t id, uint32_t shared, uint32_t *ret_hold)
{
        struct ledger *l = s->broker->ledger;
        int r;
        uint32_t hold = holds_find(&s->holds, shared);

        if (hold == LEDGER_NONE) {
                if (hold_is_refused(s, id))
                        return -EDQUOT;
                r = hold_begin(s, shared, &hold);
                if (r < 0) {
                        session_refuse(s, id, -ENOMEM,
                                       r == -ENOMEM ? "the daemon is out of memory"
                                                    : "the daemon's table of references to shared "
                                                      "blocks is full");
                        return -ENOMEM;
                }
        } else if (ledger_hold_at(l, hold)->count == UINT32_MAX) {
                session_refuse(s, id, -EDQUOT, "this session has attached that block 2^32 - 1 times");
                return -EDQUOT;
        } else {
                ledger_hold_at(l, hold)->count++;
        }
        ledger_hold_at(l, hold)->links.n_in_delivery++;
        *ret_hold = hold;
        return 0;
}

/* Answers an attach of what is there. */
static void attach_give(struct session *s, uint64_t id, uint32_t shared, const bool *sees)
{
        struct ledger *l = s->broker->ledger;
        uint32_t index = ledger_shared_at(l, shared)->block, hold;
        struct session_share *share = session_share_of(s, ledger_block_at(l, index)->quota);
        const struct partition *p;
        char sentence[256];

        if (!share) {
                session_refuse(s, id, -ENOENT,
                               "the shared block is in a partition in which the tenant had no quota "
                               "when this session started: connect again");
                return;
        }
        p = share->quota->partition;
        if (p->is_lost || !sees[share - s->shares]) {
                snprintf(sentence, sizeof(sentence), "'%s' is in partition '%s', on device '%s', which %s",
                         ledger_shared_at(l, shared)->name, p->name, p->device_id,
                         p->is_lost ? "is lost" : "this process does not see");
                session_refuse(s, id, -ENODEV, sentence);
                return;
        }
        if (session_join(s, share, id) < 0 || attach_count_up(s, id, shared, &hold) < 0)
                return;
        if (session_deliver_hold(s, id, share, index, hold) < 0) {
                shared_undelivered(s, hold);
                session_refuse(s, id, -ENOMEM, "the daemon is out of memory");
        }
}

/* What the client can map, by its own word. None named: all of it. */
static void attach_read_sees(const struct session *s, const Bfcd__Attach *a, bool *ret)
{
        for (size_t i = 0; i < s->n_shares; i++)
                ret[i] = a->n_partitions == 0;
        for (size_t i = 0; i < a->n_partitions; i++)
                if (a->partitions[i] < s->n_shares)
                        ret[a->partitions[i]] = true;
}

static void wait_remove(struct shared_wait *w)
{
        struct session *s = w->session;

        TAILQ_REMOVE(&w->name->waits, w, of_name);
        TAILQ_REMOVE(&s->waits.list, w, of_session);
        s->n_requests--;
        s->broker->n_shared_waits--;
        if (--s->waits.n == 0)
                s->waits.until_ms = 0;
}

static void wait_add(struct session *s, struct shared_wait *w, struct shared_name *name, uint32_t wait_ms)
{
        w->session = s;
        w->name = name;
        w->until_ms = clock_ms() + (wait_ms < SHARED_MAX_WAIT_MS ? wait_ms : SHARED_MAX_WAIT_MS);
        TAILQ_INSERT_TAIL(&name->waits, w, of_name);
        TAILQ_INSERT_TAIL(&s->waits.list, w, of_session);
        s->n_requests++;
        s->broker->n_shared_waits++;
        if (s->waits.n++ == 0 || w->until_ms < s->waits.until_ms)
                s->waits.until_ms = w->until_ms;
        broker_wake(s->broker); /* its time passes from now on */
}

static bool wait_is_refused(struct session *s, uint64_t id, const Bfcd__Attach *a)
{
        char sentence[256];

        if (a->wait_ms > 0 && s->waits.n < SHARED_MAX_WAITS)
                return false;
        if (a->wait_ms > 0)
                snprintf(sentence, sizeof(sentence), "this session has %u waiting attaches, the maximum",
                         SHARED_MAX_WAITS);
        else
                snprintf(sentence, sizeof(sentence), "tenant '%s' has no block shared as '%s'",
                         s->tenant->name, a->name);
        session_refuse(s, id, a->wait_ms > 0 ? -EDQUOT : -ENOENT, sentence);
        return true;
}

int shared_attach(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        const Bfcd__Attach *a = r->attach;
        struct shared_name *name;
        struct shared_wait *w;

        (void)ret_why;
        if (s->admin) {
                session_refuse(s, r->id, -EACCES, "the admin socket serves no blocks: use the client socket");
                return 0;
        }
        if (name_is_refused(s, r->id, a->name) || session_refuses_delivery(s, r->id))
                return 0;
        name = name_find(s, a->name);
        if (!(name && name->shared != LEDGER_NONE) && wait_is_refused(s, r->id, a))
                return 0;
        w = calloc(1, sizeof(*w) + s->n_shares * sizeof(w->sees[0]));
        name = w ? name_get(s, a->name) : NULL;
        if (!name) {
                free(w);
                session_refuse(s, r->id, -ENOMEM, "the daemon is out of memory");
                return 0;
        }
        w->request_id = r->id;
        attach_read_sees(s, a, w->sees);
        if (name->shared == LEDGER_NONE) {
                wait_add(s, w, name, a->wait_ms);
                return 0;
        }
        attach_give(s, r->id, name->shared, w->sees);
        free(w);
        return 0;
}

/* ---- those who wait ------------------------------------------------------ */

void shared_drop_waits(struct session *s)
{
        struct shared_wait *w;

        while ((w = TAILQ_FIRST(&s->waits.list))) {
                wait_remove(w);
                name_settle(s->broker, w->name);
                free(w);
        }
}

bool shared_withdraw_attach(struct session *s, uint64_t request_id)
{
        struct shared_wait *w;

        TAILQ_FOREACH(w, &s->waits.list, of_session)
        {
                if (w->request_id != request_id)
                        continue;
                wait_remove(w);
                name_settle(s->broker, w->name);
                free(w);
                return true;
        }
        return false;
}

/* Serves those who wait for a name, as far as the budget goes. */
static void name_serve(struct broker *b, struct shared_name *name, unsigned *budget)
{
        struct shared_wait *w;

        name->is_busy = true; /* a delivery that fails may take the last hold */
        while (name->shared != LEDGER_NONE && *budget > 0 && (w = TAILQ_FIRST(&name->waits))) {
                struct session *s = w->session;

                (*budget)--;
                wait_remove(w);
                attach_give(s, w->request_id, name->shared, w->sees);
                free(w);
                s->ops->resume(s->userdata);
        }
        name->is_busy = false;
        name_settle(b, name);
}

/* Refuses those whose time is up, and finds out when the next one's is. */
static void session_expire(struct session *s, uint64_t now_ms, unsigned *budget)
{
        struct shared_wait *w, *next;
        uint64_t until_ms = UINT64_MAX;
        char sentence[256];

        for (w = TAILQ_FIRST(&s->waits.list); w; w = next) {
                struct shared_name *name = w->name;

                next = TAILQ_NEXT(w, of_session);
                if (w->until_ms > now_ms || name->is_due || *budget == 0) {
                        until_ms = w->until_ms < until_ms ? w->until_ms : until_ms;
                        continue;
                }
                (*budget)--;
                wait_remove(w);
                snprintf(sentence, sizeof(sentence),
                         "timeout: no process of tenant '%s' shared a block as '%s'", s->tenant->name,
                         name->name);
                session_refuse(s, w->request_id, -ETIMEDOUT, sentence);
                free(w);
                name_settle(s->broker, name);
                s->ops->resume(s->userdata);
        }
        if (s->waits.n > 0)
                s->waits.until_ms = until_ms;
}

/* A turn's worth of what a tick began. */
static void expire_some(struct broker *b, unsigned *budget)
{
        for (unsigned i = 0; *budget > 0 && i < EXPIRE_LOOKS && b->n_shared_slots > 0; i++) {
                size_t slot = --b->n_shared_slots;
                struct session *s = slot < b->n_session_slots ? b->sessions[slot] : NULL;

                if (!s || s->waits.n == 0 || s->waits.until_ms > b->shared_now_ms)
                        continue;
                session_expire(s, b->shared_now_ms, budget);
                if (*budget == 0)
                        b->n_shared_slots++; /* it may have more */
        }
        if (b->n_shared_waits == 0)
                b->n_shared_slots = 0;
}

void shared_tick(struct broker *b, uint64_t now_ms)
{
        unsigned budget = SHARED_SLICE;

        if (b->n_shared_waits == 0)
                return;
        if (b->n_shared_slots == 0) { /* the last one's are done with */
                b->n_shared_slots = b->n_session_slots;
                b->shared_now_ms = now_ms;
        }
        expire_some(b, &budget);
}

void shared_turn(struct broker *b)
{
        struct shared_name *name;
        unsigned budget = SHARED_SLICE;

        while (budget > 0 && (name = TAILQ_FIRST(&b->shared_due)))
                name_serve(b, name, &budget);
        expire_some(b, &budget);
}

bool shared_is_due(const struct broker *b)
{
        return !TAILQ_EMPTY(&b->shared_due) || b->n_shared_slots > 0;
}

/* ---- what another process had ---------------------------------------------- */

int shared_restore(struct broker *b)
{
        struct ledger *l = b->ledger;

        for (uint32_t i = 0; i < ledger_shared_end(l); i++) {
                const struct ledger_shared *shared = ledger_shared_get(l, i);
                struct shared_name *name;
                uint32_t quota;

                if (!shared)
                        continue;
                quota = ledger_block_at(l, shared->block)->quota;
                name = name_new(b, ledger_quota_at(l, quota)->tenant, shared->name);
                if (!name)
                        return -ENOMEM;
                name->shared = i;
        }
        return 0;
}

void shared_forget(struct broker *b)
{
        assert(b->n_shared_waits == 0 && TAILQ_EMPTY(&b->shared_due));
        tdestroy(b->shared_names, free);
        b->shared_names = NULL;
}

/* ---- the check ----------------------------------------------------------- */

struct check {
        const struct broker *broker;
        const char *why;
        size_t n_shared, n_waits, n_due;
};

static const char *check_shared(struct ledger *l, const struct shared_name *name)
{
        const struct ledger_shared *shared = ledger_shared_get(l, name->shared);
        const struct ledger_block *block;

        if (!shared || strcmp(shared->name, name->name) != 0)
                return "a name does not match its shared block";
        block = ledger_block_at(l, shared->block);
        if (strcmp(ledger_quota_at(l, block->quota)->tenant, name->tenant) != 0)
                return "a shared block and its name belong to different tenants";
        for (uint32_t i = shared->links.first_hold; i != LEDGER_NONE;) {
                const struct ledger_hold *h = ledger_hold_at(l, i);

                if (strcmp(ledger_session_at(l, h->session)->tenant, name->tenant) != 0)
                        return "a session has a shared block of another tenant";
                for (uint32_t k = h->links.next_of_shared; k != LEDGER_NONE;
                     k = ledger_hold_at(l, k)->links.next_of_shared)
                        if (ledger_hold_at(l, k)->session == h->session)
                                return "a session has two references to one shared block";
                i = h->links.next_of_shared;
        }
        return NULL;
}

static void check_name(const void *node, VISIT visit, void *userdata)
{
        const struct shared_name *name = *(struct shared_name *const *)node;
        struct check *c = userdata;
        const struct shared_wait *w;

        if ((visit != postorder && visit != leaf) || c->why)
                return;
        if (name->shared == LEDGER_NONE && TAILQ_EMPTY(&name->waits))
                c->why = "a name has neither a shared block nor a waiting attach";
        if (name->is_due != (name->shared != LEDGER_NONE && !TAILQ_EMPTY(&name->waits)))
                c->why = "a name's due state does not match its requests";
        TAILQ_FOREACH(w, &name->waits, of_name)
        {
                if (w->name != name || w->session->state != SESSION_LIVE)
                        c->why = "a session waits that cannot wait";
                c->n_waits++;
        }
        c->n_due += name->is_due;
        c->n_shared += name->shared != LEDGER_NONE;
        if (!c->why && name->shared != LEDGER_NONE)
                c->why = check_shared(c->broker->ledger, name);
}

/* The ledger's list of a session's holds, and the session's own, are one. */
static const char *check_holds(const struct session *s)
{
        struct ledger *l = s->broker->ledger;
        uint32_t i = s->index == LEDGER_NONE ? LEDGER_NONE : ledger_session_at(l, s->index)->links.first_hold;
        size_t n = 0;

        for (; i != LEDGER_NONE; i = ledger_hold_at(l, i)->links.next_of_session, n++)
                if (holds_find(&s->holds, ledger_hold_at(l, i)->shared) != i)
                        return "a session's reference is not in its index";
        return n == s->holds.n ? NULL : "a session's index has a reference that the session does not have";
}

static const char *check_session(const struct session *s)
{
        const struct shared_wait *w;
        const char *why = check_holds(s);
        size_t n = 0;

        if (why)
                return why;
        TAILQ_FOREACH(w, &s->waits.list, of_session)
        {
                if (w->until_ms < s->waits.until_ms)
                        return "a wait has an earlier deadline than the first of its session";
                n++;
        }
        if (n != s->waits.n || n > SHARED_MAX_WAITS || n > s->n_requests)
                return "a session's count of waits is wrong";
        return NULL;
}

int shared_check(const struct broker *b, const char **ret_why)
{
        struct check c = { .broker = b };
        const struct shared_name *name;
        struct ledger_counts counts;
        size_t n_of_sessions = 0;

        twalk_r(b->shared_names, check_name, &c);
        TAILQ_FOREACH(name, &b->shared_due, of_due)
        c.n_due--;
        ledger_count(b->ledger, &counts);
        if (!c.why && c.n_shared != counts.n_shared)
                c.why = "the number of names does not match the number of shared blocks";
        if (!c.why && c.n_due != 0)
                c.why = "not all names that are due are in the list";
        for (size_t i = 0; !c.why && i < b->n_session_slots; i++) {
                if (!b->sessions[i])
                        continue;
                n_of_sessions += b->sessions[i]->waits.n;
                c.why = check_session(b->sessions[i]);
        }
        if (!c.why && (c.n_waits != b->n_shared_waits || n_of_sessions != c.n_waits))
                c.why = "the total count of waits is wrong";
        if (!c.why)
                return 0;
        *ret_why = c.why;
        return -EBADMSG;
}
