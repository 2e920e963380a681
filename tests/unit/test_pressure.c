/* Pressure: which sessions are asked to park, in which order, and what their answers do; on sessions without
 * sockets. The clock is the test's.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <string.h>
#include <time.h>

#include "daemon/base/clock.h"
#include "tests/suite.h"
#include "tests/unit/sessions.h"
#include "tests/unit/still_clock.h"
#include "daemon/session/recall.h"

#define E          (2 * MIB) /* the grid of all quotas */
#define RECLAIM_MS 60u
#define IDLE_MS    100u

/* Of each tenant partition 0 is p, and 1 is where copies go. */
static const char config_text[] =
        "timeouts: {reclaim: 60ms}\n"
        "devices:\n"
        "  - id: host\n"
        "    size: 768MiB\n"
        "    partitions:\n"
        "      - {name: p, limit: 20MiB}\n"
        "      - {name: copies, limit: 64MiB}\n"
        "      - {name: wide, limit: 512MiB}\n"
        "tenants:\n"
        "  - name: a\n"
        "    match: {uid: 1}\n"
        "    quotas: [{partition: p, park: {to: copies, idle: 100ms}}, {partition: copies}]\n"
        "  - name: b\n"
        "    match: {uid: 2}\n"
        "    quotas: [{partition: p, reserve: 4MiB, park: {to: copies, idle: 100ms}}, "
        "{partition: copies}]\n"
        "  - name: c\n"
        "    match: {uid: 3}\n"
        "    quotas: [{partition: p}, {partition: copies}]\n"
        "  - name: d\n"
        "    match: {uid: 4}\n"
        "    quotas: [{partition: wide, park: {to: copies, idle: 100ms}}, {partition: copies}]\n"
        "  - name: e\n"
        "    match: {uid: 5}\n"
        "    quotas: [{partition: wide}]\n";

static void setup(void)
{
        sessions_start(config_text);
}

FIXTURE(pressure, setup, sessions_end);

static struct peer *open_pressed(uid_t uid)
{
        struct peer *p = peer_new(b, uid, false);

        p->wants_events = p->wants_pages = true;
        return say_hello(p);
}

/* A session with blocks that have been idle for so long; 0 bytes: it has a function. */
static struct peer *open_idle(uid_t uid, uint64_t n_held, uint64_t n_idle, uint64_t idle_ms)
{
        struct peer *p = open_pressed(uid);

        for (uint64_t i = 0; i < n_held / E; i++)
                must_malloc(p, 0, E);
        peer_show_idle(p, 0, n_idle, still_clock_ms - idle_ms, n_idle == 0);
        return p;
}

/* Which has a block, so that it holds something. */
static uint64_t first_block(struct peer *p)
{
        const struct ledger_session *record = ledger_session_at(b->ledger, p->session->index);

        ck_assert_uint_ne(record->links.first_block, LEDGER_NONE);
        return ledger_block_at(b->ledger, record->links.first_block)->id;
}

static void free_blocks(struct peer *p, size_t n)
{
        for (size_t i = 0; i < n; i++)
                must_free(p, first_block(p));
        settle();
}

/* Answers that so much was released. */
static void must_relieve(struct peer *p)
{
        ck_assert_uint_eq(p->n_pressures, 1);
        ck_assert_int_eq(peer_answer(p, p->pressures[0].sequence), 0);
        settle();
}

static void wait_a_little(unsigned ms)
{
        still_clock_pass(ms);
        broker_tick(b);
        recall_tick(b, clock_ms());
        settle();
}

static void close_all(struct peer *x, struct peer *y, struct peer *z)
{
        struct peer *all[] = { x, y, z };

        for (size_t i = 0; i < 3; i++)
                if (all[i]) {
                        peer_trimmed_all(all[i]);
                        must_close(all[i]);
                }
}

/* ---- which sessions are asked ------------------------------------------------ */

/* The one whose blocks have been idle for the longest time, for what is missing; it parks or frees, and that is
 * enough. */
TEST(the_longest_idle_is_asked_first)
{
        struct peer *x = open_idle(1, 2 * E, 2 * E, 200), *y = open_idle(1, 4 * E, 4 * E, 300);
        struct peer *z = open_pressed(3);
        uint64_t id;

        must_malloc(z, 0, 2 * E);
        id = peer_malloc(z, 0, E);
        settle();
        ck_assert_uint_eq(x->n_pressed, 0);
        ck_assert_uint_eq(z->n_pressed, 0);
        ck_assert_uint_eq(y->n_pressures, 1);
        ck_assert_uint_eq(y->pressures[0].n_bytes, E);
        ck_assert_uint_eq(y->pressures[0].partition, 0);
        ck_assert(y->pressures[0].parks && !y->pressures[0].is_command && !y->pressures[0].wakes);
        ck_assert_uint_eq(y->pressures[0].idle_ms, IDLE_MS);
        ck_assert_uint_eq(y->pressures[0].to, 1);
        ck_assert_str_eq(y->pressures[0].tag, "");
        ck_assert_int_eq(peer_error(z, id), -1);
        free_blocks(y, 1);
        ck_assert_int_eq(peer_error(z, id), 0); /* before it answers */
        must_relieve(y);
        ck_assert_uint_eq(x->n_pressed + x->n_trimmed, 0);
        close_all(x, y, z);
}

/* As many as are needed, by what they say that they have. */
TEST(as_many_as_are_needed)
{
        struct peer *x = open_idle(1, 3 * E, 3 * E, 200), *y = open_idle(1, 4 * E, E, 300);
        struct peer *z = open_pressed(3);
        uint64_t id;

        must_malloc(z, 0, E);
        id = peer_malloc(z, 0, 3 * E);
        settle();
        ck_assert_uint_eq(y->n_pressures, 1);
        ck_assert_uint_eq(y->pressures[0].n_bytes, E);
        ck_assert_uint_eq(x->n_pressures, 1);
        ck_assert_uint_eq(x->pressures[0].n_bytes, 2 * E);
        free_blocks(x, 2);
        free_blocks(y, 1);
        wait_a_little(1); /* many frees are looked at once */
        ck_assert_int_eq(peer_error(z, id), 0);
        must_relieve(x);
        must_relieve(y);
        close_all(x, y, z);
}

/* A request that waits has its chance when the blocks have been idle for long enough. */
TEST(blocks_become_idle)
{
        struct peer *x = open_idle(1, 8 * E, 8 * E, 0), *z = open_pressed(3);
        uint64_t id = peer_malloc_wait(z, 0, E, 100000), refused = peer_malloc(z, 0, E);

        settle();
        ck_assert_uint_eq(x->n_pressed, 0);
        for (unsigned i = 0; i < 20 && x->n_pressed == 0; i++) {
                ck_assert_uint_lt(i, 10);
                peer_trimmed_all(x);
                wait_a_little(IDLE_MS / 2);
        }
        ck_assert_uint_eq(x->n_pressed, 1);
        free_blocks(x, 1);
        ck_assert_int_eq(peer_error(z, id), 0);
        must_relieve(x);
        (void)refused;
        close_all(x, z, NULL);
}

TEST(what_is_guaranteed_is_not_asked_for)
{
        struct peer *x = open_idle(2, 2 * E, 2 * E, 500), *y = open_idle(1, 2 * E, 2 * E, 200);
        struct peer *z = open_pressed(3);
        uint64_t id;

        must_malloc(z, 0, 6 * E);
        id = peer_malloc_wait(z, 0, E, 1000);
        settle();
        ck_assert_uint_eq(x->n_pressed, 0);
        ck_assert_uint_eq(y->n_pressures, 1);
        must_relieve(y);
        wait_a_little(200);
        ck_assert_uint_eq(x->n_pressed, 0);
        ck_assert_int_eq(peer_error(z, id), -1);
        close_all(z, x, y);
}

/* No more than its surplus. */
TEST(only_the_surplus_is_asked_for)
{
        struct peer *x = open_idle(2, 3 * E, 3 * E, 200), *z = open_pressed(3);
        uint64_t id;

        must_malloc(z, 0, 7 * E);
        id = peer_malloc_wait(z, 0, E, 1000);
        settle();
        ck_assert_uint_eq(x->n_pressures, 1);
        ck_assert_uint_eq(x->pressures[0].n_bytes, E);
        free_blocks(x, 1);
        ck_assert_int_eq(peer_error(z, id), 0);
        must_relieve(x);
        close_all(x, z, NULL);
}

/* Without `park` no block is parked; only a function is called. */
TEST(functions_are_called_without_a_key)
{
        struct peer *x = open_idle(3, 4 * E, 4 * E, 500), *y = open_idle(3, 4 * E, 0, 500);
        struct peer *z = open_pressed(1);
        uint64_t id = peer_malloc(z, 0, E);

        settle();
        ck_assert_uint_eq(x->n_pressed, 0);
        ck_assert_uint_eq(y->n_pressures, 1);
        ck_assert(!y->pressures[0].parks);
        ck_assert_uint_eq(y->pressures[0].n_bytes, E);
        free_blocks(y, 1);
        must_relieve(y);
        ck_assert_int_eq(peer_error(z, id), 0);
        close_all(x, y, z);
}

/* Clients that do not know the event, or have no page, are never asked. */
TEST(clients_without_events_or_a_page_are_not_asked)
{
        struct peer *x = peer_new(b, 1, false), *y = peer_new(b, 1, false), *z = open_pressed(3);

        x->has_no_events = x->wants_pages = true;
        y->wants_events = true;
        say_hello(x);
        say_hello(y);
        must_malloc(x, 0, 4 * E);
        must_malloc(y, 0, 4 * E);
        peer_show_idle(x, 0, 4 * E, 1, true);
        (void)peer_malloc(z, 0, E);
        settle();
        ck_assert_uint_eq(x->n_pressed + y->n_pressed, 0);
        ck_assert_int_eq(peer_answer(x, 1), -EPROTO);
        close_all(x, y, z);
}

/* The tenant's own limit: its sessions are asked, the requesting one too, and no others. */
TEST(within_a_tenant)
{
        struct peer *x = open_idle(1, 4 * E, 4 * E, 300), *y = open_idle(1, 4 * E, 4 * E, 200);
        uint64_t id = peer_malloc(x, 0, 2 * E);

        settle();
        ck_assert_uint_eq(x->n_pressures, 1);
        ck_assert_uint_eq(x->pressures[0].n_bytes, 2 * E);
        ck_assert_uint_eq(y->n_pressed, 0);
        must_relieve(x); /* it could park nothing: the next */
        ck_assert_uint_eq(y->n_pressures, 1);
        free_blocks(y, 2);
        ck_assert_int_eq(peer_error(x, id), 0);
        must_relieve(y);
        close_all(x, y, NULL);
}

/* Of two that wait, the older takes from the younger and not the other way round. */
TEST(the_older_request_gets_all)
{
        struct peer *x = open_idle(1, 5 * E, 5 * E, 300), *y = open_idle(2, 5 * E, 5 * E, 300);
        uint64_t of_x = peer_malloc_wait(x, 0, E, 100000), of_y;

        settle();
        ck_assert_uint_eq(x->n_pressures + y->n_pressures, 1);
        if (x->n_pressures > 0) /* its own, which is of no use here: it has none to spare */
                must_relieve(x);
        ck_assert_uint_eq(y->n_pressures, 1);
        of_y = peer_malloc_wait(y, 0, 2 * E, 100000);
        settle();
        ck_assert_uint_le(x->n_pressed, 1);
        wait_a_little(300);
        ck_assert_uint_eq(x->n_pressures, 0);
        free_blocks(y, 1);
        ck_assert_int_eq(peer_error(x, of_x), 0);
        must_relieve(y);
        (void)of_y;
        close_all(x, y, NULL);
}

/* ---- answers ----------------------------------------------------------------- */

TEST(invalid_answers)
{
        struct peer *x = open_idle(1, 8 * E, 8 * E, 200), *z = open_pressed(3);
        uint64_t id;

        ck_assert_int_eq(peer_answer(x, 0), -EPROTO);
        ck_assert_int_eq(peer_answer(x, 1), -EPROTO);
        id = peer_malloc(z, 0, E);
        settle();
        ck_assert_uint_eq(x->n_pressures, 1);
        ck_assert_int_eq(peer_answer(x, 2), -EPROTO);
        ck_assert_int_eq(peer_answer(x, 1), 0); /* a lie */
        ck_assert_int_eq(peer_answer(x, 1), -EPROTO);
        settle();
        ck_assert_uint_eq(x->n_pressed, 1); /* not again for this request */
        peer_trimmed_all(x);
        ck_assert_int_eq(peer_error(z, id), ENOMEM);
        close_all(x, z, NULL);
}

/* Its page may say anything. */
TEST(pages_lie)
{
        struct peer *x = open_idle(1, 4 * E, 4 * E, 200), *y = open_idle(1, 4 * E, 4 * E, 200);
        struct peer *z = open_pressed(3);

        peer_show_idle(x, 0, UINT64_MAX, 0, false);
        peer_show_idle(y, 0, UINT64_MAX, UINT64_MAX, false);
        (void)peer_malloc(z, 0, 6 * E);
        settle();
        ck_assert_uint_eq(x->n_pressures, 1);
        ck_assert_uint_eq(x->pressures[0].n_bytes, 4 * E); /* no more than it has */
        ck_assert_uint_eq(y->n_pressed, 0);                /* used in the future */
        must_relieve(x);
        close_all(x, y, z);
}

/* A client that does not answer: a request without time waits for the time-out of the step, another session is asked
 * meanwhile, and after a minute the client is unresponsive. */
TEST(a_client_does_not_answer)
{
        struct peer *x = open_idle(1, 4 * E, 4 * E, 300), *y = open_idle(1, 4 * E, 4 * E, 200);
        struct peer *z = open_pressed(3);
        uint64_t id = peer_malloc_wait(z, 0, E, 100000), sequence;

        settle();
        ck_assert_uint_eq(x->n_pressures, 1);
        sequence = x->pressures[0].sequence;
        for (unsigned i = 0; i < 100 && y->n_pressed == 0; i++) {
                ck_assert_uint_lt(i, 50);
                peer_trimmed_all(x);
                peer_trimmed_all(y);
                wait_a_little(50);
        }
        free_blocks(y, 1);
        must_relieve(y);
        ck_assert_int_eq(peer_error(z, id), 0);
        ck_assert_uint_eq(x->session->tenant->n_unresponsive, 0);
        wait_a_little(PRESSURE_TIMEOUT_MS);
        ck_assert_uint_eq(x->session->tenant->n_unresponsive, 1);
        ck_assert_uint_eq(x->session->recall.queues[RECALL_PRESSURE].n_missed, 1);
        id = peer_malloc(z, 0, E);
        settle();
        ck_assert_uint_eq(x->n_pressed, 1); /* it is skipped */
        ck_assert_int_eq(peer_answer(x, sequence), 0);
        ck_assert_uint_eq(x->session->tenant->n_unresponsive, 0);
        close_all(x, y, z);
}

TEST(without_time_nobody_is_waited_for)
{
        struct peer *x = open_idle(1, 8 * E, 8 * E, 300), *z = open_pressed(3);
        uint64_t id = peer_malloc(z, 0, E);

        settle();
        ck_assert_uint_eq(x->n_pressures, 1);
        wait_a_little(RECLAIM_MS / 2);
        ck_assert_int_eq(peer_error(z, id), -1);
        wait_a_little(RECLAIM_MS);
        peer_trimmed_all(x);
        ck_assert_int_eq(peer_error(z, id), ENOMEM);
        close_all(x, z, NULL);
}

TEST(sessions_end_meanwhile)
{
        struct peer *x = open_idle(1, 8 * E, 8 * E, 300), *z = open_pressed(3);
        uint64_t id = peer_malloc(z, 0, E);

        settle();
        ck_assert_uint_eq(x->n_pressures, 1);
        must_close(x); /* the one that was asked */
        ck_assert_int_eq(peer_error(z, id), 0);
        must_close(z);
        x = open_idle(1, 8 * E, 8 * E, 300);
        z = open_pressed(3);
        (void)peer_malloc(z, 0, E);
        settle();
        must_close(z); /* the one that requests */
        must_relieve(x);
        must_close(x);
}

/* ---- bounds -------------------------------------------------------------------- */

#define MANY 100u

/* Each session has little: all that are needed are asked, and hardly more. */
TEST(many_sessions)
{
        struct peer *many[MANY], *z = peer_new(b, 5, false);
        size_t n_asked = 0;

        say_hello(z);
        for (size_t i = 0; i < MANY; i++)
                many[i] = open_idle(4, E, E, 200 + i);
        must_malloc(z, 0, 156 * E);
        (void)peer_malloc_wait(z, 0, 60 * E, 100000);
        settle();
        for (size_t i = 0; i < MANY; i++)
                n_asked += many[i]->n_pressures;
        ck_assert_uint_ge(n_asked, 60);
        ck_assert_uint_le(n_asked, 60 + RECALL_MAX_ROUND);
        must_close(z);
        for (size_t i = 0; i < MANY; i++) {
                ck_assert_uint_le(many[i]->n_pressed, 1);
                must_close(many[i]);
        }
}

/* ---- operators ------------------------------------------------------------------ */

static uint64_t park_now(struct peer *admin, uint64_t session_id, const char *tenant, const char *tag,
                         const char *to, bool wakes)
{
        Bfcd__ParkNow m = BFCD__PARK_NOW__INIT;
        Bfcd__Request r = REQUEST(PARK_NOW, park_now, &m);

        m.session_id = session_id;
        m.tenant = (char *)(uintptr_t)tenant;
        m.partition = (char *)(uintptr_t) "p";
        m.tag = (char *)(uintptr_t)tag;
        m.to = (char *)(uintptr_t)to;
        m.wakes = wakes;
        return peer_post(admin, &r);
}

TEST(operators_have_sessions_park)
{
        struct peer *x = open_idle(3, 4 * E, 4 * E, 0), *y = open_idle(3, 2 * E, 2 * E, 0);
        struct peer *admin = open_admin_session();
        const Bfcd__TrimReply *reply;
        uint64_t id;

        refusal_of(admin, park_now(admin, 0, "c", "", "", false), EINVAL); /* where to? */
        refusal_of(admin, park_now(admin, 0, "c", "", "p", false), EINVAL);
        refusal_of(admin, park_now(admin, 0, "nobody", "", "copies", false), ENOENT);
        refusal_of(admin, park_now(admin, 0, "c", "12345678901234567890123456789012", "copies", false),
                   EINVAL);
        refusal_of(admin, park_now(admin, 123456, "", "", "copies", false), ENOENT);
        refusal_of(admin, park_now(admin, 0, "", "", "copies", false), ENOENT); /* not of all tenants */
        refusal_of(x, park_now(x, 0, "c", "", "copies", false), EACCES);
        id = park_now(admin, 0, "c", "model", "copies", false);
        settle();
        ck_assert_uint_eq(x->n_pressures + y->n_pressures, 2);
        ck_assert(x->pressures[0].parks && x->pressures[0].is_command && x->pressures[0].idle_ms == 0);
        ck_assert_str_eq(x->pressures[0].tag, "model");
        ck_assert_uint_eq(x->pressures[0].to, 1);
        refusal_of(admin, park_now(admin, 0, "c", "", "copies", false), EBUSY);
        free_blocks(x, 2);
        must_relieve(x);
        ck_assert_ptr_null(peer_reply(admin, id));
        wait_a_little(PRESSURE_TIMEOUT_MS); /* y does not answer */
        ck_assert_int_eq(peer_error(admin, id), 0);
        reply = peer_reply(admin, id)->trim;
        ck_assert_uint_eq(reply->n_asked, 2);
        ck_assert_uint_eq(reply->n_bytes, 2 * E);
        /* One session, to wake. */
        id = park_now(admin, x->session->id, "", "", "", true);
        settle();
        ck_assert_uint_eq(x->n_pressures, 1);
        ck_assert(x->pressures[0].wakes && !x->pressures[0].parks);
        must_malloc(x, 0, E);
        must_relieve(x);
        ck_assert_uint_eq(peer_reply(admin, id)->trim->n_bytes, E);
        /* The operator ends, and then the session answers. */
        (void)park_now(admin, x->session->id, "", "", "copies", false);
        settle();
        must_close(admin);
        must_relieve(x);
        close_all(x, y, NULL);
}

/* A session that is asked in two partitions is one session. An operator's session has one command at a time. */
TEST(a_trim_counts_sessions)
{
        struct peer *x = open_idle(3, 4 * E, 4 * E, 0), *admin = open_admin_session();
        Bfcd__TrimNow trim = BFCD__TRIM_NOW__INIT;
        Bfcd__Request r = REQUEST(TRIM_NOW, trim_now, &trim), again = REQUEST(TRIM_NOW, trim_now, &trim);
        uint64_t id;

        must_malloc(x, 1, E);
        trim.tenant = (char *)(uintptr_t) "c";
        id = peer_post(admin, &r);
        settle();
        ck_assert_uint_eq(x->n_trims, 2);
        refusal_of(admin, park_now(admin, 0, "c", "", "copies", false), EBUSY);
        refusal_of(admin, peer_post(admin, &again), EBUSY);
        peer_trimmed_all(x);
        ck_assert_int_eq(peer_error(admin, id), 0);
        ck_assert_uint_eq(peer_reply(admin, id)->trim->n_asked, 1);
        must_close(admin);
        close_all(x, NULL, NULL);
}
