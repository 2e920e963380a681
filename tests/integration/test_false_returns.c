/* Resumes with a wrong identity or a wrong list of blocks, and corrupted contents of the
 * store. Each attempt fails and is logged, and the attacked session goes on.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include "daemon/ledger/ledger.h"
#include "keeper/wire.h"
#include "tests/integration/kept.h"
#include "tests/keeper_caller.h"
#include "tests/integration/tools.h"

#define BACK_MS SETTLE_MS

static const struct rig_config open_to_two = {
        .top = "timeouts: {quarantine: 100ms}\n",
        .tenants = TENANT("red", "@UID@, @OTHER@", "train, limit: 64MiB")
                TENANT("blue", "@UID@, @OTHER@", "train, limit: 32MiB"),
};

/* ---- wrong identity ------------------------------------------------------------ */

/* Two sessions of this process with a block each, and a daemon that keeps both. */
struct pair {
        struct kept *k;
        struct raw *a, *b;
        Bfcd__Block block_a, block_b;
        struct raw_held held_a, held_b;
        bool has_refused;
};

static void pair_new(struct pair *p)
{
        memset(p, 0, sizeof(*p));
        p->k = kept_start(&open_to_two);
        p->a = kept_raw(p->k, "red");
        p->b = kept_raw(p->k, "red");
        ck_assert_int_eq(raw_malloc(p->a, 0, MIB, &p->block_a), 0);
        ck_assert_int_eq(raw_malloc(p->b, 0, 3 * MIB, &p->block_b), 0);
        p->held_a = kept_held(p->a, &p->block_a.block_id, 1);
        p->held_b = kept_held(p->b, &p->block_b.block_id, 1);
        kept_restart(p->k, SIGKILL);
}

/* After all attempts: the attacked sessions resume and have all of their blocks. */
static void pair_end(struct pair *p)
{
        struct raw **sessions[] = { &p->a, &p->b };
        struct raw_held *held[] = { &p->held_a, &p->held_b };

        for (unsigned i = 0; i < 2; i++) {
                if (!*sessions[i])
                        continue;
                *sessions[i] = kept_raw_back(p->k, *sessions[i]);
                ck_assert_msg(raw_held(*sessions[i], held[i]) == 0, "%s", raw_refusal());
                ck_assert_int_eq(raw_free(*sessions[i], held[i]->block_ids[0]), 0);
                session_end(*sessions[i]);
        }
        raw_held_free(&p->held_a);
        raw_held_free(&p->held_b);
        kept_stop(p->k);
}

/* It fails with this error, and a line of the log names the process. */
static void assert_refused(struct pair *p, const struct raw *as, int error)
{
        char pid[32];
        struct raw *raw;
        unsigned n;
        int r;

        snprintf(pid, sizeof(pid), "pid %d", (int)getpid());
        n = kept_count_logged(p->k, pid);
        r = kept_raw_try(p->k, as, &raw);
        ck_assert_msg(r == -error, "%d, not -%d: %s", r, error, raw_refusal());
        ck_assert_uint_gt(strlen(raw_refusal()), 0);
        if (!p->has_refused) /* there is at most one line a second */
                ck_assert_msg(WAIT_FOR(kept_count_logged(p->k, pid) > n, SETTLE_MS), "it is not logged");
        p->has_refused = true;
        raw_close(raw);
        ck_assert_uint_eq(rig_stats(p->k->rig, "red", "train").bytes_in_use, 4 * MIB);
}

TEST(another_sessions_secret_is_refused)
{
        struct pair p;
        struct raw liar = { 0 };

        pair_new(&p);
        liar.session_id = p.b->session_id;
        memcpy(liar.secret, p.a->secret, sizeof(liar.secret));
        assert_refused(&p, &liar, EACCES);
        pair_end(&p);
}

LOOP_TEST(a_wrong_secret_is_refused, 2)
{
        struct pair p;
        struct raw liar = { 0 };

        pair_new(&p);
        liar.session_id = p.a->session_id;
        memcpy(liar.secret, p.a->secret, sizeof(liar.secret));
        liar.secret[_i == 0 ? 0 : 15] ^= 1;
        assert_refused(&p, &liar, EACCES);
        memset(liar.secret, 0, sizeof(liar.secret));
        assert_refused(&p, &liar, EACCES);
        pair_end(&p);
}

/* Too short, too long, none: a refusal or a hang-up. */
TEST(a_secret_of_another_length_is_refused)
{
        static const size_t lengths[] = { 0, 15, 17, 60000 };
        static uint8_t secret[60000];
        struct pair p;

        pair_new(&p);
        memcpy(secret, p.a->secret, 16);
        for (unsigned i = 0; i < 4; i++) {
                Bfcd__Hello hello = BFCD__HELLO__INIT;
                Bfcd__Request request = REQUEST(HELLO, hello, &hello);
                struct raw *raw = NULL;
                Bfcd__Reply *reply = NULL;

                ck_assert_int_eq(raw_open(p.k->rig->socket, &raw), 0);
                hello.version = 1;
                hello.wants_events = hello.can_resume = true;
                hello.session_id = p.a->session_id;
                hello.secret = (ProtobufCBinaryData){ lengths[i], secret };
                if (raw_call(raw, &request, &reply) == 0) {
                        ck_assert_int_eq(reply->body_case, BFCD__REPLY__BODY_REFUSAL);
                        bfcd__reply__free_unpacked(reply, NULL);
                }
                raw_close(raw);
        }
        pair_end(&p);
}

LOOP_TEST(an_unknown_session_id_is_refused, 3)
{
        static const uint64_t ids[] = { 1000000, UINT64_MAX, 1 };
        struct pair p;
        struct raw liar = { .session_id = ids[_i] };

        pair_new(&p);
        memcpy(liar.secret, p.a->secret, sizeof(liar.secret));
        assert_refused(&p, &liar, ESTALE);
        pair_end(&p);
}

TEST(an_ended_sessions_id_is_refused)
{
        struct pair p;
        struct raw over = { 0 };

        pair_new(&p);
        over.session_id = p.a->session_id;
        memcpy(over.secret, p.a->secret, sizeof(over.secret));
        p.a = kept_raw_back(p.k, p.a);
        ck_assert_int_eq(raw_held(p.a, &p.held_a), 0);
        assert_refused(&p, &over, ESTALE); /* it is there already */
        ck_assert_int_eq(raw_free(p.a, p.block_a.block_id), 0);
        ck_assert_int_eq(raw_goodbye(p.a), 0);
        p.a = raw_close(p.a);
        ck_assert(WAIT_FOR(rig_count(p.k->rig).n_sessions == 1, SETTLE_MS));
        ck_assert_int_eq(kept_raw_try(p.k, &over, &p.a), -ESTALE);
        p.a = raw_close(p.a);
        pair_end(&p);
}

struct thief {
        char socket[96];
        uint64_t session_id;
        uint8_t secret[16];
};

static void steal(void *arg)
{
        struct thief *thief = arg;
        struct raw *raw = NULL;
        int r;

        REQUIRE(raw_open(thief->socket, &raw) == 0, "no connection");
        raw->wants_events = raw->wants_return = raw->comes_back = true;
        raw->session_id = thief->session_id;
        memcpy(raw->secret, thief->secret, sizeof(raw->secret));
        r = raw_hello(raw, NULL, NULL);
        REQUIRE(r == -EACCES, "%d: %s", r, raw_refusal());
        raw_close(raw);
}

/* Another process, of this user and of another one, that knows id and secret. */
LOOP_TEST(another_process_cannot_resume_a_session, 2)
{
        struct pair p;
        struct thief *thief = shared_memory(sizeof(*thief));
        char words[32];
        pid_t pid;

        pair_new(&p);
        strcpy(thief->socket, p.k->rig->socket);
        thief->session_id = p.a->session_id;
        memcpy(thief->secret, p.a->secret, sizeof(thief->secret));
        if (_i == 0 || is_root()) {
                pid = _i == 0 ? child_start(steal, thief)
                              : child_start_as(OTHER_UID, OTHER_UID, steal, thief);
                snprintf(words, sizeof(words), "pid %d", (int)pid);
                child_join(pid);
                ck_assert(kept_logged(p.k, words));
        } else {
                printf("# skipped: only root may be another user\n");
        }
        pair_end(&p);
}

/* A hello that was refused may be repeated, three in all. */
TEST(three_wrong_secrets_disconnect)
{
        struct pair p;
        struct raw *raw;
        struct raw liar = { 0 };

        pair_new(&p);
        liar.session_id = p.a->session_id;
        ck_assert_int_eq(kept_raw_try(p.k, &liar, &raw), -EACCES);
        raw->session_id = p.a->session_id;
        ck_assert_int_eq(raw_hello(raw, NULL, NULL), -EACCES);
        ck_assert_int_eq(raw_hello(raw, NULL, NULL), -EACCES);
        memcpy(raw->secret, p.a->secret, sizeof(raw->secret));
        ck_assert_int_lt(raw_hello(raw, NULL, NULL), 0);
        ck_assert_int_eq(raw_wait_hang_up(raw, SETTLE_MS), 0);
        raw_close(raw);
        pair_end(&p);
}

/* It authenticates and hangs up: the session is suspended again, with all of its blocks. */
TEST(an_incomplete_resume_suspends_the_session_again)
{
        struct pair p;
        struct raw *raw;

        pair_new(&p);
        for (unsigned i = 0; i < 3; i++) {
                struct raw_held part = { .block_ids = &p.block_a.block_id,
                                         .n_blocks = 1,
                                         .is_not_last = true };

                ck_assert_int_eq(kept_raw_try(p.k, p.a, &raw), 0);
                if (i > 0)
                        ck_assert_int_eq(raw_held(raw, &part), 0);
                if (i > 1)
                        kept_restart(p.k, SIGTERM);
                raw_close(raw);
                ck_assert(WAIT_FOR(rig_count(p.k->rig).n_sessions == 2, SETTLE_MS));
                ck_assert_uint_eq(rig_stats(p.k->rig, "red", "train").bytes_in_use, 4 * MIB);
                usleep(150000); /* longer than the quarantine of sessions that do not resume */
                ck_assert_uint_eq(rig_stats(p.k->rig, "red", "train").bytes_in_use, 4 * MIB);
        }
        pair_end(&p);
}

/* ---- what it says it has --------------------------------------------------------- */

enum lie {
        NEVER_GRANTED,
        FREED_BEFORE,
        TWICE,
        TWICE_IN_TWO,
        OF_ANOTHER,
        EXTENT_NEVER_GIVEN,
        EXTENT_TWICE,
        SHARED_NEVER_HAD,
        SHARED_TOO_OFTEN,
        SHARED_NOT_AT_ALL,
        OWN_AS_SHARED,
        WITHOUT_ITS_EXTENT,
        MALLOC_BEFORE_THE_END,
        GOODBYE_BEFORE_THE_END,
        MORE_AFTER_THE_END,
        N_LIES
};

/* What is true beside it: the first message has all extents. */
static struct raw_held truth;

static int tell(struct raw *raw, const uint64_t *ids, size_t n, bool is_last)
{
        struct raw_held held = truth;

        held.block_ids = ids;
        held.n_blocks = n;
        held.is_not_last = !is_last;
        return raw_held(raw, &held);
}

static int tell_more(struct raw *raw, const uint64_t *ids, size_t n)
{
        struct raw_held held = { .block_ids = ids, .n_blocks = n };

        return raw_held(raw, &held);
}

static int tell_shared(struct raw *raw, uint64_t id, uint32_t count)
{
        struct raw_held held = truth;

        held.shared_ids = &id;
        held.n_shared = 1;
        held.count = count;
        return raw_held(raw, &held);
}

/* With a count of zero, which the library never sends. */
static int tell_shared_none(struct raw *raw, uint64_t id)
{
        Bfcd__Held body = BFCD__HELD__INIT;
        Bfcd__Request request = REQUEST(HELD, held, &body);
        Bfcd__HeldShared shared = BFCD__HELD_SHARED__INIT, *list = &shared;

        shared.block_id = id;
        body.extent_ids = (uint64_t *)(uintptr_t)truth.extent_ids;
        body.n_extent_ids = truth.n_extents;
        body.shared = &list;
        body.n_shared = 1;
        body.is_last = true;
        return raw_do(raw, &request);
}

struct lies {
        uint64_t own, freed, shared, others;
        uint64_t extent, others_extent;
};

static int lie(struct raw *raw, enum lie kind, const struct lies *ids)
{
        uint64_t twice[] = { ids->own, ids->own }, never = ids->own + (UINT64_C(1) << 32);
        uint64_t extents[] = { ids->extent, ids->extent, ids->others_extent };
        struct raw_held held = { .extent_ids = extents, .n_extents = 2 };
        Bfcd__Block block;
        int r;

        switch (kind) {
        case NEVER_GRANTED:
                return tell(raw, &never, 1, true);
        case FREED_BEFORE:
                return tell(raw, &ids->freed, 1, true);
        case TWICE:
                return tell(raw, twice, 2, true);
        case TWICE_IN_TWO:
                r = tell(raw, &ids->own, 1, false);
                return r < 0 ? -ENOTSUP : tell_more(raw, &ids->own, 1);
        case OF_ANOTHER:
                return tell(raw, &ids->others, 1, true);
        case EXTENT_NEVER_GIVEN:
                held.extent_ids = extents + 1;
                return raw_held(raw, &held);
        case EXTENT_TWICE:
                return raw_held(raw, &held);
        case SHARED_NEVER_HAD:
                return tell_shared(raw, ids->others, 1);
        case SHARED_TOO_OFTEN:
                return tell_shared(raw, ids->shared, 2);
        case SHARED_NOT_AT_ALL:
                return tell_shared_none(raw, ids->shared);
        case OWN_AS_SHARED:
                return tell_shared(raw, ids->own, 1);
        case WITHOUT_ITS_EXTENT:
                return tell_more(raw, &ids->own, 1);
        case MALLOC_BEFORE_THE_END:
                r = tell(raw, &ids->own, 1, false);
                return r < 0 ? -ENOTSUP : raw_malloc(raw, 0, 100, &block);
        case GOODBYE_BEFORE_THE_END:
                r = tell(raw, &ids->own, 1, false);
                return r < 0 ? -ENOTSUP : raw_goodbye(raw);
        case MORE_AFTER_THE_END:
                r = tell(raw, &ids->own, 1, true);
                return r < 0 ? -ENOTSUP : tell_more(raw, &ids->own, 1);
        case N_LIES:
                break;
        }
        return 0;
}

TEST(a_correct_list_is_accepted)
{
        struct kept *k = kept_start(&open_to_two);
        struct raw *raw = kept_raw(k, "red");
        uint64_t shared, own[2];
        Bfcd__Block block;

        for (unsigned i = 0; i < 2; i++) {
                ck_assert_int_eq(raw_malloc(raw, 0, 100000, &block), 0);
                own[i] = block.block_id;
        }
        ck_assert_int_eq(raw_malloc(raw, 0, 100000, &block), 0);
        shared = block.block_id;
        ck_assert_int_eq(raw_publish(raw, shared, "weights"), 0);
        truth = kept_held(raw, NULL, 0);
        kept_restart(k, SIGTERM);
        raw = kept_raw_back(k, raw);
        ck_assert_int_eq(tell(raw, own, 1, false), 0);
        truth.n_extents = 0;
        ck_assert_int_eq(tell_shared(raw, shared, 1), 0);
        ck_assert_uint_eq(rig_stats(k->rig, "red", "train").num_blocks, 2); /* the other one is free */
        session_end(raw);
        raw_held_free(&truth);
        kept_stop(k);
}

/* A GPU does not take memory back from a session that ended while its process, which is this one,
 * lives. */
static void stop_beside_ended(struct kept *k)
{
        if (rig_device() == ON_HOST)
                kept_stop(k);
        else
                kept_discard(k);
}

/* Each is a violation: the daemon hangs up and logs it. No session loses or gains a block, and this
 * one is suspended again. */
LOOP_TEST(an_incorrect_list_disconnects, N_LIES)
{
        struct kept *k = kept_start(&open_to_two);
        struct raw *raw = kept_raw(k, "red"), *other = kept_raw(k, "blue"), *liar = NULL;
        struct lies ids = { 0 };
        struct raw_held held;
        uint64_t own[2];
        Bfcd__Block block;
        char state[16];
        int r;

        ck_assert_int_eq(raw_malloc(raw, 0, 100000, &block), 0);
        ids.freed = block.block_id;
        ck_assert_int_eq(raw_malloc(raw, 0, 100000, &block), 0);
        own[0] = ids.own = block.block_id;
        ck_assert_int_eq(raw_malloc(raw, 0, 100000, &block), 0);
        own[1] = ids.shared = block.block_id;
        ck_assert_int_eq(raw_publish(raw, ids.shared, "weights"), 0);
        ck_assert_int_eq(raw_malloc(other, 0, 100000, &block), 0);
        ids.others = block.block_id;
        ids.extent = raw->extents[0].id;
        ids.others_extent = other->extents[0].id;
        held = kept_held(other, &ids.others, 1);
        truth = kept_held(raw, NULL, 0);
        ck_assert_int_eq(raw_free(raw, ids.freed), 0);
        kept_restart(k, SIGTERM);
        ck_assert_msg(kept_raw_try(k, raw, &liar) == 0, "%s", raw_refusal());
        r = lie(liar, (enum lie)_i, &ids);
        ck_assert_msg(r < 0 && r != -ENOTSUP, "lie %d: %d", _i, r);
        ck_assert_int_eq(raw_wait_hang_up(liar, SETTLE_MS), 0);
        ck_assert_msg(WAIT_FOR(kept_logged(k, "disconnected: "), SETTLE_MS), "it is not logged");
        raw_close(liar);
        other = kept_raw_back(k, other);
        ck_assert_int_eq(raw_held(other, &held), 0);
        ck_assert_uint_eq(rig_stats(k->rig, "blue", "train").num_blocks, 1);
        session_end(other);
        if (_i != MORE_AFTER_THE_END) { /* which ended its own return, and then itself */
                ck_assert_str_eq(kept_session_state(k, raw->session_id, state), "suspended");
                raw = kept_raw_back(k, raw);
                ck_assert_int_eq(tell(raw, own, 2, true), 0); /* the shared one, too */
                ck_assert_uint_eq(rig_stats(k->rig, "red", "train").num_blocks, 2);
                ck_assert_int_eq(raw_goodbye(raw), 0);
        }
        raw_close(raw);
        raw_held_free(&held);
        raw_held_free(&truth);
        stop_beside_ended(k);
}

/* A session that was not suspended has no list to send. */
TEST(a_list_of_a_live_session_disconnects)
{
        struct kept *k = kept_start(&open_to_two);
        struct raw *raw = kept_raw(k, "red");
        Bfcd__Block block;

        ck_assert_int_eq(raw_malloc(raw, 0, 100000, &block), 0);
        ck_assert_int_lt(tell(raw, &block.block_id, 1, true), 0);
        ck_assert_int_eq(raw_wait_hang_up(raw, SETTLE_MS), 0);
        raw_close(raw);
        ck_assert_int_lt(tell(k->rig->admin, &block.block_id, 1, true), 0);
        raw_close(k->rig->admin);
        rig_meet(k->rig);
        stop_beside_ended(k);
}

/* ---- what is found in the store ----------------------------------------------------- */

/* Two tenants with contents, by the library, and no daemon. */
struct find {
        struct kept *k;
        bfc_client *red, *blue;
        void *red_block, *blue_block;
};

static struct find find_new(void)
{
        struct find f = { .k = kept_start(&open_to_two) };

        f.red = client_open(f.k->rig, "red", NULL);
        f.blue = client_open(f.k->rig, "blue", NULL);
        ck_assert_ok(bfc_malloc_flags(f.red, NULL, 5 * MIB, BFC_WHOLE, &f.red_block));
        ck_assert_ok(bfc_malloc_flags(f.blue, NULL, 3 * MIB, BFC_WHOLE, &f.blue_block));
        block_fill(f.red, f.red_block, 5 * MIB, 1);
        block_fill(f.blue, f.blue_block, 3 * MIB, 2);
        kept_away(f.k, SIGKILL);
        return f;
}

static void find_free(struct find *f)
{
        bfc_disconnect(f->red);
        bfc_disconnect(f->blue);
        kept_discard(f->k);
}

static void blue_goes_on(struct find *f)
{
        void *more;

        ck_assert(block_has(f->blue, f->blue_block, 3 * MIB, 2));
        ck_assert_ok(bfc_malloc_flags(f->blue, NULL, 10 * MIB, BFC_WHOLE, &more));
        ck_assert_ok(bfc_free(f->blue, more));
        ck_assert(block_has(f->blue, f->blue_block, 3 * MIB, 2));
        ck_assert_ok(bfc_free(f->blue, f->blue_block));
        ck_assert_ok(bfc_malloc_flags(f->blue, NULL, 3 * MIB, BFC_WHOLE, &f->blue_block));
}

/* One clear error, the same with every call. */
static void red_is_told(struct find *f)
{
        void *more;
        int r = bfc_malloc_flags(f->red, NULL, MIB, BFC_WHOLE, &more);

        ck_assert_int_lt(r, 0);
        printf("# told (%d): %s\n", r, bfc_last_error());
        ck_assert_int_lt(bfc_malloc_flags(f->red, NULL, MIB, BFC_WHOLE, &more), 0);
}

/* The index of red's only block, or extent. */
static uint32_t reds_block(struct ledger *l)
{
        for (uint32_t i = 0; i < ledger_block_end(l); i++) {
                const struct ledger_block *block = ledger_block_get(l, i);

                if (block && strcmp(ledger_quota_at(l, block->quota)->tenant, "red") == 0)
                        return i;
        }
        ck_abort_msg("red has no block");
}

static uint32_t reds_extent(struct ledger *l)
{
        for (uint32_t i = 0; i < ledger_extent_end(l); i++) {
                const struct ledger_extent *extent = ledger_extent_get(l, i);

                if (extent && strcmp(ledger_quota_at(l, extent->quota)->tenant, "red") == 0)
                        return i;
        }
        ck_abort_msg("red has no extent");
}

/* The keeper, while no daemon runs. */
static int ask(const struct find *f, unsigned op, uint64_t key, int fd)
{
        return keeper_ask_in(f->k->rig->folder, "host", op, key, fd);
}

static struct ledger *open_stored(struct kept *k)
{
        struct ledger *l = NULL;

        ck_assert_int_eq(
                ledger_open(keeper_ask_in(k->rig->folder, "host", KEEPER_LEDGER, 0, -1), NULL, NULL, &l), 0);
        return l;
}

/* A record that cannot be closes its arena, which is its tenant's in one partition; all others
 * go on. */
LOOP_TEST(a_corrupted_record_closes_its_arena, 5)
{
        struct find f = find_new();
        struct ledger *l = open_stored(f.k);

        switch (_i) {
        case 0:
                ledger_block_at(l, reds_block(l))->n_bytes = UINT64_C(1) << 40;
                break;
        case 1:
                ledger_block_at(l, reds_block(l))->offset = 3;
                break;
        case 2:
                ledger_extent_at(l, reds_extent(l))->n_bytes ^= 0xff;
                break;
        case 3:
                ledger_extent_at(l, reds_extent(l))->offset = UINT64_MAX - 7;
                break;
        default:
                ledger_block_at(l, reds_block(l))->n_requested = UINT64_MAX;
        }
        ledger_free(l);
        kept_back(f.k);
        ck_assert_msg(kept_logged(f.k, "error:"), "it is not logged");
        ck_assert_msg(kept_logged(f.k, "'red'"), "it is not said whose it is");
        blue_goes_on(&f);
        red_is_told(&f);
        kept_restart(f.k, SIGKILL); /* it is not opened again */
        blue_goes_on(&f);
        red_is_told(&f);
        find_free(&f);
}

/* Random bytes in the ledger: the daemon starts, and does not crash. */
LOOP_TEST(bytes_flipped_at_random, 8)
{
        struct find f = find_new();
        int fd = ask(&f, KEEPER_LEDGER, 0, -1);
        uint64_t random = (uint64_t)_i + 1;
        off_t end = lseek(fd, 0, SEEK_END), at = 0;
        char *log;

        printf("# seed %d\n", _i + 1);
        for (unsigned i = 0; i < 32; i++) { /* where there is something */
                uint8_t byte;

                random = random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
                at = lseek(fd, (off_t)((random >> 16) % (uint64_t)end), SEEK_DATA);
                if (at < 0)
                        at = lseek(fd, 0, SEEK_DATA);
                at += (off_t)(random >> 40 & 1023);
                if (pread(fd, &byte, 1, at) != 1)
                        continue;
                byte = (uint8_t)(byte ^ (1u << (random >> 37 & 7)));
                ck_assert_int_eq(pwrite(fd, &byte, 1, at), 1);
        }
        close(fd);
        kept_back(f.k);
        (void)bfc_free(f.red, f.red_block);
        (void)bfc_free(f.blue, f.blue_block);
        kept_restart(f.k, SIGTERM);
        ck_assert_uint_eq(kept_state(f.k).n_bad, 0);
        log = rig_log(f.k->rig);
        ck_assert(!strstr(log, "Sanitizer") && !strstr(log, "ssertion"));
        free(log);
        find_free(&f);
}

/* Of red's extent. */
static uint64_t extent_key(struct find *f)
{
        struct ledger *l = open_stored(f->k);
        uint64_t key = ledger_extent_at(l, reds_extent(l))->store_key;

        ledger_free(l);
        return key;
}

/* A GPU's own keeper has its extents. */
LOOP_TEST(missing_or_replaced_extents_close_their_arena, rig_device() == ON_HOST ? 4 : 1)
{
        struct find f = find_new();
        uint64_t key = extent_key(&f);
        int fd = -1;

        if (rig_device() == ON_HOST)
                ck_assert_int_eq(ask(&f, KEEPER_DROP, key, -1), 0);
        else
                ck_assert_int_eq(keeper_ask_in(f.k->rig->folder, rig_device_id(), KEEPER_DESTROY, key, -1),
                                 -EBUSY); /* red has it mapped */
        switch (_i) {
        case 0:
                break;
        case 1: /* of another size */
                fd = memfd_create("other", MFD_CLOEXEC);
                ck_assert_int_eq(ftruncate(fd, 4096), 0);
                break;
        case 2: /* nothing that holds memory */
                fd = open("/dev/null", O_RDWR | O_CLOEXEC);
                break;
        default: /* the right size, and may shrink under all mappings */
                fd = memfd_create("other", MFD_CLOEXEC);
                ck_assert_int_eq(ftruncate(fd, 2 * MIB), 0);
        }
        if (fd >= 0) {
                ck_assert_int_eq(ask(&f, KEEPER_KEEP, key, fd), 0);
                close(fd);
        }
        kept_back(f.k);
        ck_assert_msg(kept_logged(f.k, "error:"), "it is not logged");
        blue_goes_on(&f);
        red_is_told(&f);
        find_free(&f);
}

/* An unreadable ledger is discarded with a message, and all blocks with it. */
LOOP_TEST(an_unreadable_ledger_is_discarded, 6)
{
        struct find f = find_new();
        int fd = ask(&f, KEEPER_LEDGER, 0, -1), other = -1;
        char zero[4096] = "";
        void *p;

        switch (_i) {
        case 0: /* its header */
                ck_assert_int_eq(pwrite(fd, zero, 64, 0), 64);
                break;
        case 5: /* its layout, behind the magic */
                ck_assert_int_eq(pwrite(fd, "\7", 1, 8), 1);
                break;
        case 1:
                other = memfd_create("other", MFD_CLOEXEC);
                ck_assert_int_eq(write(other, zero, sizeof(zero)), (ssize_t)sizeof(zero));
                break;
        case 2:
                other = memfd_create("empty", MFD_CLOEXEC);
                break;
        case 3:
                other = open("/dev/null", O_RDWR | O_CLOEXEC);
                break;
        default: /* the keeper has ended */
                ck_assert_int_eq(ask(&f, KEEPER_END, 0, -1), 0);
        }
        if (other >= 0) {
                ck_assert_int_eq(ask(&f, KEEPER_LEDGER, 0, other), 0);
                close(other);
        }
        close(fd);
        kept_back(f.k);
        if (_i == 5)
                ck_assert(kept_logged(f.k, "with layout 7, and this release reads layout 1"));
        if (_i != 4) /* of one that is not there nothing is known */
                ck_assert(kept_logged(f.k, "the daemon starts without it"));
        ck_assert_int_eq(bfc_malloc(f.red, MIB, &p), -ECONNRESET);
        ck_assert_msg(strstr(bfc_last_error(), "restarted without it"), "%s", bfc_last_error());
        ck_assert_int_eq(bfc_malloc(f.blue, MIB, &p), -ECONNRESET);
        ck_assert_uint_eq(rig_charge(f.k->rig, "red", "train"), 0);
        ck_assert_uint_eq(rig_count(f.k->rig).n_extents, 0);
        ck_assert(WAIT_FOR(keeper_count_in(f.k->rig->folder) == 1, SETTLE_MS)); /* its own ledger */
        bfc_disconnect(f.red);
        f.red = client_open(f.k->rig, "red", NULL);
        ck_assert_ok(bfc_malloc(f.red, MIB, &p));
        find_free(&f);
}

/* Extents without a record are dropped. */
TEST(unknown_extents_are_dropped)
{
        static const uint64_t keys[] = { 1000, 1001, UINT64_C(1) << 40 };
        struct find f = find_new();
        unsigned n = keeper_count_in(f.k->rig->folder);

        for (unsigned i = 0; i < 3; i++) {
                int fd = memfd_create("unknown", MFD_CLOEXEC);

                ck_assert_int_eq(ask(&f, KEEPER_KEEP, keys[i], fd), 0);
                close(fd);
        }
        ck_assert_uint_eq(keeper_count_in(f.k->rig->folder), n + 3);
        kept_back(f.k);
        ck_assert_uint_eq(keeper_count_in(f.k->rig->folder), n);
        blue_goes_on(&f);
        ck_assert(block_has(f.red, f.red_block, 5 * MIB, 1));
        bfc_disconnect(f.red);
        bfc_disconnect(f.blue);
        kept_stop(f.k); /* where nothing but the ledger is kept */
}

/* An operator can end the session of a process that lives on and does not resume. */
TEST(a_suspended_session_is_evicted)
{
        static const struct rig_config config = {
                .top = "timeouts: {quarantine: 5s}\n", /* long enough to be seen */
                .tenants = TENANT("red", "@UID@, @OTHER@", "train, limit: 64MiB"),
        };
        struct kept *k = kept_start(&config);
        struct raw *raw = kept_raw(k, "red"), *again;
        char number[24], name[40];
        Bfcd__Block block;

        snprintf(number, sizeof(number), "%llu", (unsigned long long)raw->session_id);
        snprintf(name, sizeof(name), "session %s", number);
        ck_assert_int_eq(raw_malloc(raw, 0, MIB, &block), 0);
        kept_restart(k, SIGKILL);
        ck_assert(kept_all_are(k, "suspended", 1));
        ck_assert_int_eq(
                ctl(k->rig->admin_socket, WORDS("evict", number, "--reason", "too long"), NULL, NULL), 0);
        ck_assert(kept_all_are(k, "quarantined", 1));
        ck_assert_int_eq(kept_raw_try(k, raw, &again), -EIDRM);
        ck_assert_msg(strstr(raw_refusal(), "was evicted by an operator: too long"), "%s", raw_refusal());
        raw_close(again);
        kept_restart(k, SIGKILL); /* the next one does not wait for it either */
        ck_assert(!kept_all_are(k, "suspended", 1));
        k->rig->forgiven = name;
        raw_close(raw);
        if (rig_device() == ON_HOST) /* a GPU's memory is back with the process only */
                ck_assert(WAIT_FOR(rig_count(k->rig).n_sessions == 0, SETTLE_MS));
        kept_discard(k);
}

/* And of a process that resumes it and never lists its blocks, by either command: else it would only have to do that
 * again and again. */
LOOP_TEST(a_session_that_is_being_resumed_is_evicted, 2)
{
        struct kept *k = kept_start(&open_to_two);
        const char *words = _i == 0 ? " was evicted by an operator: too long" : "its lease 'one' has ended";
        char number[24], pid[24];
        Bfcd__Reply *reply;
        Bfcd__Block block;
        struct raw *raw;

        snprintf(pid, sizeof(pid), "%d", (int)getpid());
        ck_assert_int_eq(ctl(k->rig->admin_socket,
                             WORDS("lease", "create", "one", "--tenant", "red", "--partition", "train",
                                   "--limit", "32MiB", "--pid", pid),
                             NULL, NULL),
                         0);
        raw = kept_raw(k, "red");
        snprintf(number, sizeof(number), "%llu", (unsigned long long)raw->session_id);
        ck_assert_int_eq(raw_malloc(raw, 0, MIB, &block), 0);
        kept_restart(k, SIGKILL);
        raw = kept_raw_back(k, raw);
        ck_assert(kept_all_are(k, "resuming", 1));
        k->rig->forgiven = "evict";
        ck_assert_int_eq(ctl(k->rig->admin_socket,
                             _i == 0 ? WORDS("evict", number, "--reason", "too long")
                                     : WORDS("lease", "end", "one", "--evict"),
                             NULL, NULL),
                         0);
        ck_assert_int_eq(raw_receive(raw, SETTLE_MS, &reply), 0);
        ck_assert_int_eq(reply->body_case, BFCD__REPLY__BODY_REFUSAL);
        ck_assert_uint_eq(reply->id, 0);
        ck_assert_uint_eq(reply->refusal->error, EIDRM);
        ck_assert_msg(strstr(reply->refusal->message, words), "%s", reply->refusal->message);
        bfcd__reply__free_unpacked(reply, NULL);
        ck_assert_int_eq(raw_wait_hang_up(raw, SETTLE_MS), 0);
        ck_assert(!kept_all_are(k, "suspended", 1));
        if (rig_device() == ON_HOST) /* a GPU's memory is back with the process only */
                ck_assert(WAIT_FOR(rig_count(k->rig).n_sessions == 0, SETTLE_MS));
        raw_close(raw);
        kept_discard(k);
}

/* Kills from outside do not discard the ledger, however many, also where a session is still
 * suspended. */
TEST(kills_do_not_count_as_crashes)
{
        static const int signals[] = { SIGKILL, SIGABRT }; /* the latter is the watchdog's */
        struct kept *k = kept_start(&open_to_two);
        struct raw *raw = kept_raw(k, "red");
        Bfcd__Block block;

        ck_assert_int_eq(raw_malloc(raw, 0, MIB, &block), 0);
        truth = kept_held(raw, NULL, 0);
        for (unsigned i = 0; i < 12; i++) {
                kept_away(k, signals[i % 2]);
                kept_back(k);
        }
        k->n_bad = kept_state(k).n_bad; /* how the stand-in counts these ends is not asked here */
        raw = kept_raw_back(k, raw);
        ck_assert_int_eq(tell(raw, &block.block_id, 1, true), 0);
        session_end(raw);
        raw_held_free(&truth);
        kept_stop(k);
}

/* Ends the daemon by a signal that looks as if it had sent it itself, as abort() does. */
static void crash(struct kept *k)
{
        siginfo_t info = { .si_signo = SIGABRT, .si_code = SI_QUEUE };

        k->rig->admin = raw_close(k->rig->admin);
        ck_assert_int_eq(stand_in_hold(k->manager, true), 0);
        info.si_pid = k->rig->pid;
        ck_assert_int_eq(syscall(SYS_rt_sigqueueinfo, k->rig->pid, SIGABRT, &info), 0);
        ck_assert_int_eq(stand_in_wait_end(k->manager, SETTLE_MS), 0);
}

/* It dies soon after each start, and it may be the ledger's fault: after some it starts without.
 * Until then clients can resume. */
TEST(a_crash_loop_is_bounded)
{
        struct kept *k = kept_start(&open_to_two);
        struct raw *raw = kept_raw(k, "red"), *again;
        Bfcd__Block block;
        unsigned n = 0;

        ck_assert_int_eq(raw_malloc(raw, 0, MIB, &block), 0);
        do {
                crash(k);
                kept_back(k);
                ck_assert_uint_lt(++n, 20);
        } while (rig_count(k->rig).n_sessions > 0);
        ck_assert_uint_eq(n, 5);
        k->n_bad = n;
        printf("# after %u starts the ledger is discarded\n", n);
        ck_assert(kept_logged(k, "error:"));
        ck_assert_uint_eq(rig_charge(k->rig, "red", "train"), 0);
        ck_assert_int_eq(kept_raw_try(k, raw, &again), -ESTALE);
        raw_close(again);
        raw_close(raw);
        k->rig->forgiven = "in a row crashed";
        kept_stop(k);
}
