/* Shared blocks that are parked when all who have them agree, and woken by any of them: contents, addresses and
 * charges; ends, kept blocks and hostile requests; clients and daemons that are killed at any moment.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/gpu/driver.h"
#include "tests/integration/kept.h"
#include "tests/integration/parking.h"
#include "tests/integration/tools.h"
#include "tests/random.h"

#define NAME "weights"

struct holder {
        bfc_client *client;
        void *ptr;
};

static void publish(struct rig *rig, struct holder *h, uint64_t keep_ms)
{
        const struct bfc_malloc_options options = { .struct_size = sizeof(options),
                                                    .flags = BFC_PARKABLE,
                                                    .tag = "model" };
        const struct bfc_publish_options how = { .struct_size = sizeof(how), .keep_ms = keep_ms };

        h->client = client_open(rig, "red", "train");
        ck_assert_ok(bfc_malloc_with(h->client, BLOCK, &options, &h->ptr));
        ck_assert_ok(bfc_publish_with(h->client, h->ptr, NAME, &how));
}

static void attach(struct rig *rig, struct holder *h)
{
        h->client = client_open(rig, "red", "train");
        ck_assert_ok(bfc_attach(h->client, NAME, SETTLE_MS, &h->ptr, NULL));
}

static void start(struct rig *rig, struct holder *holders, size_t n, uint64_t seed)
{
        publish(rig, &holders[0], 0);
        pattern_write(holders[0].ptr, BLOCK, seed);
        for (size_t i = 1; i < n; i++)
                attach(rig, &holders[i]);
}

static void end(struct holder *h)
{
        bfc_disconnect(h->client);
}

static void park(const struct holder *h)
{
        ck_assert_ok(bfc_park(h->client, h->ptr, BFC_BACKUP, "parking"));
        ck_assert(!page_is_mapped(h->ptr));
}

static void wake(const struct holder *h)
{
        ck_assert_ok(bfc_wake(h->client, h->ptr, SETTLE_MS));
}

static bool is_parked(struct rig *rig)
{
        return rig_stats(rig, "red", "train").bytes_parked == BLOCK && in_use(rig, "train") == 0 &&
               in_use(rig, "parking") == BLOCK;
}

static void assert_awake(struct rig *rig)
{
        ck_assert_uint_eq(reserved(rig, "train"), BLOCK);
        ck_assert_uint_eq(in_use(rig, "train"), BLOCK);
}

#define IF_ALL_CAN_PARK(rig)                                                                                 \
        if (!CAN_PARK) {                                                                                     \
                rig_stop(rig);                                                                               \
                return;                                                                                      \
        }

/* ---- agreeing ---------------------------------------------------------------------- */

TEST(the_last_of_the_holders_parks)
{
        struct rig *rig = rig_start(small_config());
        struct holder h[3];

        IF_ALL_CAN_PARK(rig);
        start(rig, h, 3, 1);
        for (unsigned round = 0; round < 3; round++) {
                for (unsigned i = 0; i < 3; i++) {
                        assert_awake(rig);
                        ck_assert_uint_eq(in_use(rig, "parking"), 0);
                        ck_assert(pattern_holds(h[i].ptr, BLOCK, 1 + round));
                        park(&h[i]);
                        ck_assert_int_eq(bfc_park(h[i].client, h[i].ptr, BFC_BACKUP, "parking"), -EALREADY);
                }
                ck_assert(is_parked(rig));
                ck_assert(WAIT_FOR(reserved(rig, "train") == 0, SETTLE_MS));
                wake(&h[round]);
                assert_awake(rig);
                ck_assert_uint_eq(in_use(rig, "parking"), 0);
                ck_assert_uint_eq(rig_stats(rig, "red", "train").bytes_parked, 0);
                ck_assert(pattern_holds(h[round].ptr, BLOCK, 1 + round));
                pattern_write(h[round].ptr, BLOCK, 2 + round);
                for (unsigned i = 0; i < 3; i++)
                        wake(&h[i]);
                for (unsigned i = 0; i < 3; i++)
                        ck_assert(pattern_holds(h[i].ptr, BLOCK, 2 + round));
        }
        for (unsigned i = 0; i < 3; i++)
                end(&h[i]);
        rig_stop(rig);
}

/* One of them goes on: the others lose nothing, also what is written meanwhile. */
TEST(a_holder_that_does_not_agree_keeps_it_awake)
{
        struct rig *rig = rig_start(small_config());
        struct holder h[2];
        void *p;

        IF_ALL_CAN_PARK(rig);
        start(rig, h, 2, 1);
        ck_assert_ok(bfc_use_begin(h[1].client, h[1].ptr, 0));
        ck_assert_int_eq(bfc_park(h[1].client, h[1].ptr, BFC_BACKUP, "parking"), -EBUSY);
        for (unsigned i = 0; i < 3; i++) {
                park(&h[0]);
                assert_awake(rig);
                pattern_write(h[1].ptr, BLOCK, 10 + i);
                wake(&h[0]);
                ck_assert(pattern_holds(h[0].ptr, BLOCK, 10 + i));
        }
        ck_assert_ok(bfc_use_end(h[1].client, h[1].ptr));
        park(&h[0]);
        ck_assert_int_eq(bfc_read(h[0].client, &(char){ 0 }, h[0].ptr, 1), -EBUSY);
        ck_assert_ok(bfc_attach(h[0].client, NAME, 0, &p, NULL)); /* it is woken */
        ck_assert_ptr_eq(p, h[0].ptr);
        ck_assert(pattern_holds(p, BLOCK, 12));
        park(&h[0]);
        ck_assert_ok(bfc_detach(h[0].client, p));
        ck_assert_ok(bfc_detach(h[0].client, p));
        /* Its place is mapped again where it needs that. */
        ck_assert_ok(bfc_attach(h[0].client, NAME, 0, &p, NULL));
        ck_assert(pattern_holds(p, BLOCK, 12));
        end(&h[0]);
        end(&h[1]);
        rig_stop(rig);
}

TEST(tags_of_attached_blocks)
{
        struct rig *rig = rig_start(small_config());
        struct holder h[2];

        IF_ALL_CAN_PARK(rig);
        start(rig, h, 2, 1);
        ck_assert_ok(bfc_park_tag(h[1].client, "other", BFC_BACKUP, "parking"));
        ck_assert(page_is_mapped(h[1].ptr));
        for (unsigned i = 0; i < 2; i++)
                ck_assert_ok(bfc_park_tag(h[i].client, "model", BFC_BACKUP, "parking"));
        ck_assert(WAIT_FOR(is_parked(rig), SETTLE_MS));
        ck_assert_ok(bfc_use_begin_tag(h[1].client, "model", SETTLE_MS));
        ck_assert(pattern_holds(h[1].ptr, BLOCK, 1));
        ck_assert_ok(bfc_use_end_tag(h[1].client, "model"));
        end(&h[0]);
        end(&h[1]);
        rig_stop(rig);
}

/* ---- ends ------------------------------------------------------------------------------ */

/* The last one that does not agree ends, or detaches: the daemon copies by itself. */
LOOP_TEST(the_daemon_parks_what_only_agreeing_holders_have, 2)
{
        struct rig *rig = rig_start(small_config());
        struct holder h[3];

        IF_ALL_CAN_PARK(rig);
        start(rig, h, 3, 1);
        park(&h[0]);
        park(&h[1]);
        if (_i == 0)
                end(&h[2]);
        else
                ck_assert_ok(bfc_detach(h[2].client, h[2].ptr));
        ck_assert(WAIT_FOR(is_parked(rig), SETTLE_MS));
        wake(&h[1]);
        ck_assert(pattern_holds(h[1].ptr, BLOCK, 1));
        for (unsigned i = 0; i < (_i == 0 ? 2u : 3u); i++)
                end(&h[i]);
        rig_stop(rig);
}

TEST(without_room_it_stays)
{
        struct rig *rig = rig_start(small_config());
        struct holder h[2], other;
        void *p;

        IF_ALL_CAN_PARK(rig);
        start(rig, h, 2, 1);
        other.client = client_open(rig, "red", "parking");
        ck_assert_ok(bfc_malloc_flags(other.client, NULL, 28 * MIB, BFC_WHOLE, &p));
        park(&h[0]);
        ck_assert_int_eq(bfc_park(h[1].client, h[1].ptr, BFC_BACKUP, "parking"), -EDQUOT);
        ck_assert(pattern_holds(h[1].ptr, BLOCK, 1));
        end(&h[1]); /* the daemon finds no room either */
        ck_assert(WAIT_FOR(rig_stats(rig, "red", "train").num_sessions == 1, SETTLE_MS));
        assert_awake(rig);
        wake(&h[0]);
        ck_assert(pattern_holds(h[0].ptr, BLOCK, 1));
        ck_assert_ok(bfc_free(other.client, p));
        park(&h[0]);
        ck_assert(WAIT_FOR(is_parked(rig), SETTLE_MS));
        end(&h[0]); /* with its copy */
        ck_assert(WAIT_FOR(in_use(rig, "parking") == 0, SETTLE_MS));
        end(&other);
        rig_stop(rig);
}

TEST(kept_blocks_stay_parked)
{
        struct rig *rig = rig_start(small_config());
        struct holder h, other;

        IF_ALL_CAN_PARK(rig);
        other.client = client_open(rig, "red", "train");
        for (unsigned i = 0; i < 2; i++) {
                publish(rig, &h, BFC_KEEP_FOREVER);
                pattern_write(h.ptr, BLOCK, 1);
                park(&h);
                ck_assert(WAIT_FOR(is_parked(rig), SETTLE_MS));
                end(&h);
                ck_assert(WAIT_FOR(rig_stats(rig, "red", "parking").num_sessions == 0, SETTLE_MS));
                ck_assert(is_parked(rig));
                if (i == 0) {
                        attach(rig, &h);
                        assert_awake(rig);
                        ck_assert(pattern_holds(h.ptr, BLOCK, 1));
                        park(&h);
                        ck_assert(WAIT_FOR(is_parked(rig), SETTLE_MS));
                        ck_assert_ok(bfc_detach(h.client, h.ptr));
                        end(&h);
                }
                ck_assert_ok(bfc_forget(other.client, NAME));
                ck_assert(WAIT_FOR(in_use(rig, "parking") == 0 && reserved(rig, "parking") == 0, SETTLE_MS));
                ck_assert_uint_eq(rig_stats(rig, "red", "train").num_blocks, 0);
        }
        end(&other);
        rig_stop(rig);
}

/* ---- threads ----------------------------------------------------------------------------- */

struct other_thread {
        struct holder holder;
        pthread_t thread;
        int result;
};

static void *publish_taken(void *arg)
{
        struct other_thread *t = arg;

        t->result = bfc_publish(t->holder.client, t->holder.ptr, NAME);
        return NULL;
}

static void *park_it(void *arg)
{
        struct other_thread *t = arg;

        t->result = bfc_park(t->holder.client, t->holder.ptr, BFC_BACKUP, "parking");
        return NULL;
}

static void *attach_it(void *arg)
{
        struct other_thread *t = arg;

        t->result = bfc_attach(t->holder.client, NAME, SETTLE_MS, &t->holder.ptr, NULL);
        return NULL;
}

static void *detach_it(void *arg)
{
        struct other_thread *t = arg;

        t->result = bfc_detach(t->holder.client, t->holder.ptr);
        return NULL;
}

/* The daemon receives the requests of both threads at once; usually that of the first thread comes first. */
static void call_beside(struct rig *rig, struct other_thread t[2], void *(*first)(void *),
                        void *(*second)(void *))
{
        child_stop(rig->pid);
        ck_assert_int_eq(pthread_create(&t[0].thread, NULL, first, &t[0]), 0);
        usleep(50000);
        ck_assert_int_eq(pthread_create(&t[1].thread, NULL, second, &t[1]), 0);
        usleep(50000);
        ck_assert_int_eq(kill(rig->pid, SIGCONT), 0);
        for (unsigned i = 0; i < 2; i++)
                pthread_join(t[i].thread, NULL);
}

/* It is the process's own again, parked or not. */
TEST(a_publish_is_refused_beside_a_park)
{
        struct rig *rig = rig_start(small_config());
        struct other_thread t[2];
        struct holder h;
        char name[16];

        IF_ALL_CAN_PARK(rig);
        publish(rig, &h, 0);
        for (unsigned i = 0; i < 5; i++) {
                t[0].holder.client = h.client;
                ck_assert_ok(bfc_malloc_flags(h.client, NULL, 20 * MIB, BFC_PARKABLE, &t[0].holder.ptr));
                t[1].holder = t[0].holder;
                call_beside(rig, t, publish_taken, park_it);
                ck_assert_int_ne(t[0].result, 0);
                ck_assert_int_eq(t[1].result, 0);
                wake(&t[0].holder);
                snprintf(name, sizeof(name), "free%u", i);
                ck_assert_ok(bfc_publish(h.client, t[0].holder.ptr, name));
                ck_assert_ok(bfc_free(h.client, t[0].holder.ptr));
        }
        end(&h);
        rig_stop(rig);
}

static int add_references(void *userdata, const struct bfc_shared_info *info)
{
        *(uint64_t *)userdata += info->num_references;
        return 0;
}

/* The daemon answers that this session has it, parked, which is not true any more. */
TEST(a_parked_block_is_attached_beside_its_last_detach)
{
        struct rig *rig = rig_start(small_config());
        struct other_thread t[2];
        uint64_t n_references = 0;
        struct holder h;

        IF_ALL_CAN_PARK(rig);
        publish(rig, &h, BFC_KEEP_FOREVER);
        pattern_write(h.ptr, BLOCK, 1);
        for (unsigned i = 0; i < 5; i++) {
                park(&h);
                t[0].holder = t[1].holder = h;
                call_beside(rig, t, attach_it, detach_it);
                ck_assert_int_eq(t[0].result, 0);
                ck_assert_int_eq(t[1].result, 0);
                h.ptr = t[0].holder.ptr;
                ck_assert(pattern_holds(h.ptr, BLOCK, 1));
        }
        ck_assert_ok(bfc_list_shared(h.client, add_references, &n_references));
        ck_assert_uint_eq(n_references, 1);
        ck_assert_ok(bfc_detach(h.client, h.ptr));
        ck_assert_ok(bfc_forget(h.client, NAME));
        end(&h);
        rig_stop(rig);
}

/* ---- waking ------------------------------------------------------------------------------ */

#define N_WAKERS 6u

struct waker {
        struct holder holder;
        pthread_t thread;
        uint32_t wait_ms;
        int result;
};

static void *wake_one(void *arg)
{
        struct waker *w = arg;

        w->result = bfc_use_begin(w->holder.client, w->holder.ptr, w->wait_ms);
        return NULL;
}

/* There is no room: the first one gives up, and leaves the others, whose room comes. */
TEST(holders_wake_it_together)
{
        struct rig *rig = rig_start(small_config());
        struct waker w[N_WAKERS];
        struct holder h[N_WAKERS], late;
        void *p;

        IF_ALL_CAN_PARK(rig);
        start(rig, h, N_WAKERS, 1);
        for (unsigned i = 0; i < N_WAKERS; i++)
                park(&h[i]);
        ck_assert(WAIT_FOR(is_parked(rig), SETTLE_MS));
        late.client = client_open(rig, "red", "train");
        ck_assert_ok(bfc_malloc_flags(late.client, NULL, 28 * MIB, BFC_WHOLE, &p));
        for (unsigned i = 0; i < N_WAKERS; i++) {
                w[i] = (struct waker){ .holder = h[i], .wait_ms = i == 0 ? 500 : SETTLE_MS };
                ck_assert_int_eq(pthread_create(&w[i].thread, NULL, wake_one, &w[i]), 0);
                ck_assert(i > 0 || WAIT_FOR(rig_n_waiting(rig, "red") == 1, SETTLE_MS));
        }
        ck_assert(WAIT_FOR(rig_n_waiting(rig, "red") >= N_WAKERS - 1, SETTLE_MS));
        pthread_join(w[0].thread, NULL);
        ck_assert_int_eq(w[0].result, -EDQUOT);
        ck_assert(!page_is_mapped(h[0].ptr));
        ck_assert_ok(bfc_free(late.client, p));
        for (unsigned i = 1; i < N_WAKERS; i++) {
                pthread_join(w[i].thread, NULL);
                ck_assert_int_eq(w[i].result, 0);
                ck_assert(pattern_holds(h[i].ptr, BLOCK, 1));
                ck_assert_int_eq(bfc_park(h[i].client, h[i].ptr, BFC_BACKUP, "parking"), -EBUSY);
        }
        ck_assert_uint_eq(in_use(rig, "train"), BLOCK);
        ck_assert_uint_eq(in_use(rig, "parking"), 0);
        wake(&h[0]);
        ck_assert(pattern_holds(h[0].ptr, BLOCK, 1));
        for (unsigned i = 0; i < N_WAKERS; i++)
                end(&h[i]);
        end(&late);
        rig_stop(rig);
}

static void *wake_tagged(void *arg)
{
        struct waker *w = arg;

        w->result = bfc_wake_tag(w->holder.client, "model", w->wait_ms);
        return NULL;
}

/* As one of a group: what another holder has woken needs no room any more. */
TEST(a_group_does_not_wait_for_what_another_holder_woke)
{
        struct rig *rig = rig_start(small_config());
        const struct bfc_malloc_options options = { .struct_size = sizeof(options),
                                                    .flags = BFC_PARKABLE,
                                                    .tag = "model" };
        struct waker group, alone;
        struct holder h[2];
        void *own, *fillers[2];

        IF_ALL_CAN_PARK(rig);
        h[0].client = client_open(rig, "red", "train");
        ck_assert_ok(bfc_malloc_with(h[0].client, BLOCK, &options, &own));
        publish(rig, &h[1], 0);
        pattern_write(h[1].ptr, BLOCK, 1);
        ck_assert_ok(bfc_attach(h[0].client, NAME, 0, &h[0].ptr, NULL));
        ck_assert_ok(bfc_park(h[0].client, own, BFC_BACKUP, "parking")); /* the first in the group */
        park(&h[0]);
        park(&h[1]);
        ck_assert(WAIT_FOR(reserved(rig, "train") == 0, SETTLE_MS));
        ck_assert_ok(bfc_malloc_flags(h[1].client, NULL, 16 * MIB, BFC_WHOLE, &fillers[0]));
        ck_assert_ok(bfc_malloc_flags(h[1].client, NULL, 12 * MIB, BFC_WHOLE, &fillers[1]));
        alone = (struct waker){ .holder = h[1], .wait_ms = SETTLE_MS };
        ck_assert_int_eq(pthread_create(&alone.thread, NULL, wake_one, &alone), 0);
        ck_assert(WAIT_FOR(rig_n_waiting(rig, "red") == 1, SETTLE_MS));
        group = (struct waker){ .holder = h[0], .wait_ms = SETTLE_MS };
        ck_assert_int_eq(pthread_create(&group.thread, NULL, wake_tagged, &group), 0);
        ck_assert(WAIT_FOR(rig_n_waiting(rig, "red") == 3, SETTLE_MS));
        ck_assert_ok(bfc_free(h[1].client, fillers[0])); /* room for the two blocks, and not for three */
        pthread_join(alone.thread, NULL);
        pthread_join(group.thread, NULL);
        ck_assert_int_eq(alone.result, 0);
        ck_assert_int_eq(group.result, 0);
        ck_assert(pattern_holds(h[0].ptr, BLOCK, 1));
        ck_assert(pattern_holds(h[1].ptr, BLOCK, 1));
        end(&h[0]);
        end(&h[1]);
        rig_stop(rig);
}

LOOP_TEST(an_attach_wakes_it, 2)
{
        struct rig *rig = rig_start(small_config());
        const struct bfc_attach_options how = { .struct_size = sizeof(how),
                                                .wait_ms = SETTLE_MS,
                                                .flags = _i == 1 ? BFC_ATTACH_READ_ONLY : 0 };
        struct holder h[3];
        void *filler, *none;

        IF_ALL_CAN_PARK(rig);
        start(rig, h, 2, 1);
        park(&h[0]);
        park(&h[1]);
        ck_assert(WAIT_FOR(is_parked(rig), SETTLE_MS));
        h[2].client = client_open(rig, "red", "train");
        ck_assert_ok(bfc_malloc_flags(h[1].client, NULL, 28 * MIB, BFC_WHOLE, &filler));
        ck_assert_int_eq(bfc_attach(h[2].client, NAME, 0, &none, NULL), -EDQUOT);
        ck_assert_uint_eq(in_use(rig, "parking"), BLOCK);
        ck_assert_ok(bfc_free(h[1].client, filler));
        ck_assert_ok(bfc_attach_with(h[2].client, NAME, &how, &h[2].ptr, NULL));
        ck_assert(pattern_holds(h[2].ptr, BLOCK, 1));
        wake(&h[0]);
        ck_assert(pattern_holds(h[0].ptr, BLOCK, 1));
        for (unsigned i = 0; i < 3; i++) {
                wake(&h[i]);
                park(&h[i]);
        }
        ck_assert(WAIT_FOR(is_parked(rig), SETTLE_MS));
        wake(&h[2]); /* as it was attached */
        ck_assert(pattern_holds(h[2].ptr, BLOCK, 1));
        for (unsigned i = 0; i < 3; i++)
                end(&h[i]);
        rig_stop(rig);
}

/* ---- hostile requests ---------------------------------------------------------------------- */

static uint64_t raw_send_attach(struct raw *raw, const char *name, uint32_t wait_ms)
{
        Bfcd__Request request = BFCD__REQUEST__INIT;
        Bfcd__Attach body = BFCD__ATTACH__INIT;

        body.name = (char *)(uintptr_t)name;
        body.wait_ms = wait_ms;
        request.body_case = BFCD__REQUEST__BODY_ATTACH;
        request.attach = &body;
        ck_assert_int_eq(raw_send(raw, &request), 0);
        return request.id;
}

static int raw_attach_answer(struct raw *raw, uint64_t id)
{
        Bfcd__Reply *reply = NULL;
        int r;

        ck_assert_int_eq(raw_receive(raw, SETTLE_MS, &reply), 0);
        ck_assert_uint_eq(reply->id, id);
        r = reply->body_case == BFCD__REPLY__BODY_ATTACHED ? 0 : -(int)reply->refusal->error;
        bfcd__reply__free_unpacked(reply, NULL);
        return r;
}

static int raw_attach(struct raw *raw, const char *name)
{
        return raw_attach_answer(raw, raw_send_attach(raw, name, 0));
}

TEST(hostile_requests_are_refused)
{
        struct rig *rig = rig_start(small_config());
        struct raw *a, *b;
        uint64_t id, copy = 0, ids[2];

        IF_ALL_CAN_PARK(rig);
        a = raw_with_events(rig);
        b = raw_with_events(rig);
        id = raw_parkable(a, BLOCK);
        ck_assert_int_eq(raw_publish(a, id, NAME), 0);
        ck_assert_int_eq(raw_attach(b, NAME), 0);
        ck_assert_int_eq(raw_park(a, id, true, 0), -EINVAL);
        ck_assert_int_eq(raw_park(a, id, false, 0), -EINVAL); /* to its own partition */
        ck_assert_int_eq(raw_park(a, id, false, 2), -ENOENT);
        ck_assert_int_eq(raw_park(rig->admin, id, false, 1), -EINVAL);
        ck_assert_int_eq(raw_park(a, id, false, 1), 0);
        ck_assert_int_eq(raw_park(a, id, false, 1), 0); /* twice */
        assert_awake(rig);
        ck_assert_int_eq(raw_attach(a, NAME), 0); /* without extents: it is parked for this session */
        ck_assert_int_eq(raw_wake(a, id), 0);
        ck_assert_int_eq(raw_wake(a, id), 0);
        ck_assert_int_eq(raw_park(a, id, false, 1), 0);
        ck_assert_int_eq(raw_park(b, id, false, 1), 0);
        raw_unmap(a);
        raw_unmap(b);
        ck_assert(WAIT_FOR(is_parked(rig), SETTLE_MS));
        ck_assert_int_eq(raw_park(b, id, false, 1), 0); /* it stays as it is */
        ck_assert_uint_eq(count_blocks(rig, "copy", &copy), 1);
        ck_assert_int_eq(raw_free(a, copy), -EINVAL);
        ck_assert_int_eq(raw_park(a, copy, false, 1), -EINVAL);
        ck_assert_int_eq(raw_wake(a, copy), -EINVAL);
        ck_assert_int_eq(raw_publish(a, copy, "copy"), -EINVAL);
        /* A Wake, and what must not come beside it. */
        ids[0] = raw_send_wake(a, &id, 1, SETTLE_MS);
        ids[1] = raw_send_wake(b, &id, 1, SETTLE_MS);
        ck_assert_int_eq(raw_wake_answer(a, ids[0], id), 0);
        ck_assert_int_eq(raw_wake_answer(b, ids[1], id), 0);
        ck_assert_int_eq(raw_free(a, id), 0);
        ck_assert_int_eq(raw_free(a, id), 0);
        ck_assert_int_eq(raw_free(a, id), -EINVAL);
        ck_assert_int_eq(raw_wake(a, id), -EINVAL);
        session_end(a);
        session_end(b);
        rig_stop(rig);
}

/* Sessions that end at each point. */
LOOP_TEST(sessions_end_meanwhile, 4)
{
        struct rig *rig = rig_start(roomy_config());
        struct raw *a, *b, *c;
        uint64_t id;

        IF_ALL_CAN_PARK(rig);
        if (_i == 0) { /* the session would stay until this process ends */
                rig_stop(rig);
                return;
        }
        a = raw_with_events(rig);
        b = raw_with_events(rig);
        c = raw_with_events(rig);
        id = raw_parkable(a, BLOCK);
        ck_assert_int_eq(raw_publish(a, id, NAME), 0);
        ck_assert_int_eq(raw_attach(b, NAME), 0);
        ck_assert_int_eq(raw_park(a, id, false, 1), 0);
        if (_i == 0) { /* all, while the last one's Park is carried out */
                (void)raw_send_park(b, id, 0);
                raw_close(b);
                session_end(a);
                session_end(c);
                ck_assert(WAIT_FOR(rig_stats(rig, "red", "train").num_sessions == 0, SETTLE_MS));
                rig_stop(rig);
                return;
        }
        ck_assert_int_eq(raw_park(b, id, false, 1), 0);
        raw_unmap(a);
        raw_unmap(b);
        ck_assert(WAIT_FOR(is_parked(rig), SETTLE_MS));
        if (_i == 1)
                (void)raw_send_wake(b, &id, 1, 0); /* it ends, the other one has it still */
        else if (_i == 2)
                (void)raw_send_attach(c, NAME, 0);
        raw_close(b);
        raw_close(c);
        ck_assert(WAIT_FOR(rig_stats(rig, "red", "train").num_sessions <= 1, 4 * SETTLE_MS));
        if (_i < 3)
                ck_assert_int_eq(raw_wake(a, id), 0);
        session_end(a);
        ck_assert(WAIT_FOR(in_use(rig, "parking") == 0, SETTLE_MS));
        rig_stop(rig);
}

/* Two threads of a program that has not got it yet: both wait for the memory. */
TEST(attaches_of_one_session_wait_for_the_same_wake)
{
        struct rig *rig = rig_start(small_config());
        struct holder h[2];
        struct raw *b;
        uint64_t ids[2];
        void *filler;

        IF_ALL_CAN_PARK(rig);
        start(rig, h, 1, 1);
        park(&h[0]);
        ck_assert(WAIT_FOR(reserved(rig, "train") == 0, SETTLE_MS));
        ck_assert_ok(bfc_malloc_flags(h[0].client, NULL, 28 * MIB, BFC_WHOLE, &filler));
        b = raw_with_events(rig);
        for (unsigned i = 0; i < 2; i++)
                ids[i] = raw_send_attach(b, NAME, SETTLE_MS);
        ck_assert(WAIT_FOR(rig_n_waiting(rig, "red") == 2, SETTLE_MS));
        ck_assert_ok(bfc_free(h[0].client, filler));
        for (unsigned i = 0; i < 2; i++)
                ck_assert_int_eq(raw_attach_answer(b, ids[i]), 0);
        session_end(b);
        end(&h[0]);
        rig_stop(rig);
}

/* All are answered in one turn of the daemon. */
TEST(at_most_256_requests_wait_for_a_block)
{
        struct rig *rig = rig_start(small_config());
        struct raw *raw[5];
        struct holder h;
        void *filler;

        IF_ALL_CAN_PARK(rig);
        start(rig, &h, 1, 1);
        park(&h);
        ck_assert(WAIT_FOR(reserved(rig, "train") == 0, SETTLE_MS));
        ck_assert_ok(bfc_malloc_flags(h.client, NULL, 28 * MIB, BFC_WHOLE, &filler));
        for (unsigned i = 0; i < 5; i++)
                raw[i] = raw_with_events(rig);
        for (unsigned i = 0; i < 256; i++)
                (void)raw_send_attach(raw[i / 64], NAME, SETTLE_MS);
        ck_assert(WAIT_FOR(rig_n_waiting(rig, "red") == 256, SETTLE_MS));
        ck_assert_int_eq(raw_attach(raw[4], NAME), -EBUSY);
        ck_assert_ok(bfc_free(h.client, filler));
        for (unsigned i = 0; i < 256; i++)
                ck_assert_int_eq(raw_attach_answer(raw[i / 64], i % 64 + 2), 0);
        for (unsigned i = 0; i < 5; i++)
                session_end(raw[i]);
        end(&h);
        rig_stop(rig);
}

/* Its client goes on to use the block. */
TEST(a_park_that_is_refused_is_no_agreement)
{
        struct rig *rig = rig_start(small_config());
        struct raw *a, *b;
        uint64_t id;

        IF_ALL_CAN_PARK(rig);
        a = raw_with_events(rig);
        b = raw_with_events(rig);
        id = raw_parkable(a, BLOCK);
        ck_assert_int_eq(raw_publish(a, id, NAME), 0);
        ck_assert_int_eq(raw_attach(b, NAME), 0);
        ck_assert_int_eq(raw_park(a, id, false, 1), 0);
        ck_assert_int_eq(raw_park(a, id, false, 2), -ENOENT); /* again, as after a restart */
        ck_assert_int_eq(raw_park(b, id, false, 1), 0);
        assert_awake(rig);
        ck_assert_int_eq(raw_park(a, id, false, 1), 0);
        raw_unmap(a);
        raw_unmap(b);
        ck_assert(WAIT_FOR(is_parked(rig), SETTLE_MS));
        session_end(a);
        session_end(b);
        rig_stop(rig);
}

/* No session can wake it there, and the quota could never go. */
TEST(a_kept_block_ends_with_the_quota_of_its_copy)
{
        static const struct rig_config
                less_on_host = { .partitions = PARTITIONS("64MiB", "32MiB", ""),
                                 .tenants = TENANT_OF("red", "@UID@", "{partition: train, limit: 32MiB}") },
                less_on_gpu = { .partitions = PARTITIONS("64MiB", "32MiB", HOST),
                                .tenants = TENANT_OF("red", "@UID@", "{partition: train, limit: 32MiB}") };
        struct rig *rig = rig_start(small_config());
        struct holder h, other;
        uint64_t id;
        void *p;

        IF_ALL_CAN_PARK(rig);
        publish(rig, &h, BFC_KEEP_FOREVER);
        park(&h);
        ck_assert(WAIT_FOR(is_parked(rig), SETTLE_MS));
        end(&h);
        ck_assert(WAIT_FOR(rig_stats(rig, "red", "train").num_sessions == 0, SETTLE_MS));
        ck_assert_uint_eq(count_blocks(rig, "copy", &id), 1);
        rig_rewrite_config(rig, rig_device() == ON_HOST ? &less_on_host : &less_on_gpu);
        free(ctl_text(rig, WORDS("reload")));
        ck_assert(WAIT_FOR(count_blocks(rig, "copy", &id) == 0, SETTLE_MS));
        other.client = client_open(rig, "red", "train");
        ck_assert_int_eq(bfc_attach(other.client, NAME, 0, &p, NULL), -ENOENT);
        end(&other);
        rig_stop(rig);
}

static unsigned n_leases(struct rig *rig)
{
        Bfcd__Reply *reply = NULL;
        unsigned n;

        ck_assert_int_eq(raw_list(rig->admin, BFCD__LIST__KIND__LEASES, 0, &reply), 0);
        n = (unsigned)reply->list->n_leases;
        bfcd__reply__free_unpacked(reply, NULL);
        return n;
}

/* Of a lease whose sessions have ended: another lease may have its place in the ledger. */
TEST(a_copy_is_charged_to_a_session_that_agreed)
{
        struct rig *rig = rig_start(small_config());
        struct holder h[3];
        char pid[32], *said;

        IF_ALL_CAN_PARK(rig);
        snprintf(pid, sizeof(pid), "%d", (int)getpid());
        start(rig, h, 2, 1);
        park(&h[1]);
        free(ctl_text(rig, WORDS("lease", "create", "one", "--tenant", "red", "--partition", "parking",
                                 "--limit", "16MiB", "--pid", pid)));
        attach(rig, &h[2]);
        park(&h[2]);
        end(&h[2]);
        free(ctl_text(rig, WORDS("lease", "end", "one")));
        ck_assert(WAIT_FOR(rig_stats(rig, "red", "train").num_sessions == 2, SETTLE_MS));
        ck_assert(WAIT_FOR(n_leases(rig) == 0, SETTLE_MS));
        free(ctl_text(rig, WORDS("lease", "create", "two", "--tenant", "red", "--partition", "parking",
                                 "--limit", "16MiB", "--pid", pid)));
        end(&h[0]);
        ck_assert(WAIT_FOR(rig_stats(rig, "red", "train").bytes_parked == BLOCK, SETTLE_MS));
        said = ctl_text(rig, WORDS("--json", "lease", "list"));
        ck_assert_msg(strstr(said, "\"bytes_in_use\": 0,"), "%s", said);
        free(said);
        wake(&h[1]);
        end(&h[1]);
        rig_stop(rig);
}

/* At different moments: also while a worker copies the session's own block. No session is left to release it. */
TEST(memory_is_released_after_the_copy_of_a_session_that_ended)
{
        struct rig *rig = rig_start(small_config());

        IF_ALL_CAN_PARK(rig);
        for (unsigned i = 0; i < 40; i += suite_is_long() ? 1 : 4) {
                struct raw *raw = raw_with_events(rig);

                (void)raw_send_park(raw, raw_parkable(raw, 24 * MIB), 0);
                usleep(i * 500);
                (void)raw_goodbye(raw);
                raw_close(raw);
                ck_assert(WAIT_FOR(reserved(rig, "parking") == 0 && reserved(rig, "train") == 0, SETTLE_MS));
        }
        rig_stop(rig);
}

/* A message with this many extents, or the rest of one; no reply. */
static void receive_extents(struct raw *raw, size_t n)
{
        Bfcd__Reply *reply;

        ck_assert(WAIT_FOR(raw_receive(raw, 10, &reply) == RAW_TIMEOUT && raw->n_extents == n, SETTLE_MS));
}

/* Acknowledges these extents, of which it has lost some. */
static void ack_without(struct raw *raw, uint64_t sequence, uint64_t *lost, size_t n_lost)
{
        Bfcd__Ack body = BFCD__ACK__INIT;
        Bfcd__Request request = REQUEST(ACK, ack, &body);

        body.sequence = sequence;
        body.lost_extent_ids = lost;
        body.n_lost_extent_ids = n_lost;
        ck_assert_int_eq(raw_send(raw, &request), 0);
}

/* Two of its three Wakes of a block are refused, because it loses extents, while the third waits. So it uses the block,
 * and the other one's Park copies nothing. A message has at most 64 extents. */
TEST(refused_wakes_do_not_agree)
{
        enum { W, X, Y, Z, N_BLOCKS };
        static const uint64_t n_extents[N_BLOCKS] = { 10, 66, 20, 66 };
        const struct rig_config config = {
                .size = "1GiB",
                .partitions = rig_device() == ON_HOST ? PARTITIONS("512MiB", "192MiB", "")
                                                      : PARTITIONS("512MiB", "192MiB", HOST),
                .tenants = QUOTAS("red", "512MiB", "192MiB"),
        };
        struct rig *rig = rig_start(&config);
        struct raw *other = raw_with_events(rig), *raw = raw_with_events(rig);
        uint64_t id[N_BLOCKS], wakes[N_BLOCKS + 2], lost[2], sequences[2];
        static const unsigned order[N_BLOCKS + 2] = { W, X, Y, X, Z, X };
        Bfcd__Reply *reply;

        IF_ALL_CAN_PARK(rig);
        for (unsigned i = 0; i < N_BLOCKS; i++) {
                char name[] = { (char)('w' + i), '\0' };

                id[i] = raw_parkable(other, n_extents[i] * 2 * MIB);
                ck_assert_int_eq(raw_publish(other, id[i], name), 0);
                ck_assert_int_eq(raw_attach(raw, name), 0);
        }
        ck_assert_int_eq(raw_attach(raw, "x"), 0); /* each Wake that waits is one of its references */
        ck_assert_int_eq(raw_attach(raw, "x"), 0);
        for (unsigned i = 0; i < N_BLOCKS; i++)
                ck_assert_int_eq(raw_park(raw, id[i], false, 1), 0);
        while (raw->n_extents > 0)
                ck_assert_int_eq(raw_let_go(raw, raw->extents[raw->n_extents - 1].id), 0);
        raw->ack = false;
        for (unsigned i = 0; i < N_BLOCKS + 2; i++) {
                wakes[i] = raw_send_wake(raw, &id[order[i]], 1, 0);
                if (i == 0)
                        ck_assert_int_eq(raw_wake_answer(raw, wakes[0], id[W]), 0);
                if (i < 2)
                        receive_extents(raw, i == 0 ? 10 : 64);
                if (i < 2)
                        sequences[i] = raw->last_sequence;
        }
        lost[0] = raw->extents[63].id;
        ack_without(raw, sequences[0], lost, 1);
        ck_assert_int_eq(raw_wake_answer(raw, wakes[1], id[X]), -EMFILE);
        receive_extents(raw, 74);
        (void)raw_send_park(other, id[X], SETTLE_MS);
        lost[0] = raw->extents[73].id; /* of Y */
        lost[1] = raw->extents[62].id;
        ack_without(raw, sequences[1], lost, 2);
        ck_assert_int_eq(raw_wake_answer(raw, wakes[2], id[Y]), -EMFILE);
        ck_assert_int_eq(raw_wake_answer(raw, wakes[3], id[X]), -EMFILE);
        ck_assert_int_eq(raw_receive(other, SETTLE_MS, &reply), 0);
        bfcd__reply__free_unpacked(reply, NULL);
        ck_assert_uint_eq(in_use(rig, "parking"), 0);
        raw->ack = true;
        (void)session_send_ack(raw, raw->last_sequence);
        ck_assert_int_eq(raw_wake_answer(raw, wakes[4], id[Z]), 0);
        ck_assert_int_eq(raw_wake_answer(raw, wakes[5], id[X]), 0);
        session_end(raw);
        session_end(other);
        rig_stop(rig);
}

TEST(more_than_64_holders_do_not_park)
{
        struct rig *rig = rig_start(small_config());
        struct raw *raw[66];
        uint64_t id;

        IF_ALL_CAN_PARK(rig);
        for (unsigned i = 0; i < 65; i++)
                raw[i] = raw_with_events(rig);
        id = raw_parkable(raw[0], BLOCK);
        ck_assert_int_eq(raw_publish(raw[0], id, NAME), 0);
        for (unsigned i = 1; i < 65; i++)
                ck_assert_int_eq(raw_attach(raw[i], NAME), 0);
        ck_assert_int_eq(raw_park(raw[0], id, false, 1), -EBUSY);
        session_end(raw[64]);
        ck_assert(WAIT_FOR(raw_park(raw[0], id, false, 1) == 0, SETTLE_MS));
        for (unsigned i = 0; i < 64; i++)
                session_end(raw[i]);
        rig_stop(rig);
}

/* ---- restarts -------------------------------------------------------------------------------- */

/* Agreements, the copy and the charges stay. */
LOOP_TEST(a_restart_changes_nothing, 2)
{
        struct kept *k;
        struct holder h[3];
        char *before, *after;

        if (!CAN_PARK)
                return;
        k = kept_start(roomy_config());
        start(k->rig, h, 3, 1);
        park(&h[0]);
        park(&h[1]);
        kept_restart(k, _i == 0 ? SIGKILL : SIGTERM);
        assert_awake(k->rig);
        park(&h[2]); /* the others agreed before */
        ck_assert(WAIT_FOR(is_parked(k->rig), SETTLE_MS));
        ck_assert(WAIT_FOR(reserved(k->rig, "train") == 0, SETTLE_MS));
        before = kept_blocks(k);
        kept_restart(k, _i == 0 ? SIGKILL : SIGTERM);
        after = kept_blocks(k);
        ck_assert_str_eq(after, before);
        free(before);
        free(after);
        ck_assert(is_parked(k->rig));
        wake(&h[1]);
        ck_assert(pattern_holds(h[1].ptr, BLOCK, 1));
        pattern_write(h[1].ptr, BLOCK, 2);
        kept_restart(k, _i == 0 ? SIGKILL : SIGTERM);
        wake(&h[0]);
        ck_assert(pattern_holds(h[0].ptr, BLOCK, 2));
        ck_assert(pattern_holds(h[1].ptr, BLOCK, 2));
        park(&h[0]);
        kept_restart(k, _i == 0 ? SIGKILL : SIGTERM);
        ck_assert_ok(bfc_detach(h[1].client, h[1].ptr));
        end(&h[1]); /* now all agree */
        ck_assert(WAIT_FOR(is_parked(k->rig), SETTLE_MS));
        wake(&h[2]);
        ck_assert(pattern_holds(h[2].ptr, BLOCK, 2));
        end(&h[0]);
        end(&h[2]);
        kept_stop(k);
}

/* What the daemon before did not copy, and no client asks for. */
LOOP_TEST(a_restart_parks_what_all_agreed_to, 2)
{
        struct kept *k;
        struct holder h[3], other;
        void *p;

        if (!CAN_PARK)
                return;
        k = kept_start(small_config());
        start(k->rig, h, 3, 1);
        other.client = client_open(k->rig, "red", "parking");
        ck_assert_ok(bfc_malloc_flags(other.client, NULL, 28 * MIB, BFC_WHOLE, &p));
        park(&h[0]);
        park(&h[1]);
        end(&h[2]); /* now all agree, and there is no room */
        ck_assert(WAIT_FOR(rig_stats(k->rig, "red", "train").num_sessions == 2 &&
                                   rig_n_waiting(k->rig, "red") == 0,
                           SETTLE_MS));
        ck_assert_ok(bfc_free(other.client, p));
        end(&other);
        ck_assert(WAIT_FOR(rig_count(k->rig).n_sessions == 2, SETTLE_MS)); /* no restart finds it */
        assert_awake(k->rig);
        kept_restart(k, _i == 0 ? SIGKILL : SIGTERM);
        ck_assert(WAIT_FOR(is_parked(k->rig), SETTLE_MS));
        wake(&h[1]);
        ck_assert(pattern_holds(h[1].ptr, BLOCK, 1));
        wake(&h[0]);
        ck_assert(pattern_holds(h[0].ptr, BLOCK, 1));
        end(&h[0]);
        end(&h[1]);
        kept_stop(k);
}

/* ---- a storm ------------------------------------------------------------------------------------ */

#define STORM_JOBS   8u
#define STORM_CYCLES 60u
#define STORM_EVENTS 12u
#define STORM_BYTES  (4 * MIB)
#define SLOT_BYTES   4096u

/* In memory that jobs share with the test. Each job has a slot in the block that it alone writes. */
static struct storm {
        char socket[96];
        _Atomic uint64_t n_parked, n_woken, n_attached;
        _Atomic uint64_t slots[STORM_JOBS];
        _Atomic bool is_over;
} * the_storm;

struct storm_job {
        bfc_client *client;
        unsigned number;
        void *ptr; /* NULL: it is detached */
        bool is_parked;
        uint64_t random;
};

static uint64_t *slot_of(const struct storm_job *job)
{
        return (uint64_t *)(void *)((char *)job->ptr + (size_t)job->number * SLOT_BYTES);
}

/* What all have, and what this job has written last; a job that is killed may have written the next. */
static void storm_check(const struct storm_job *job)
{
        uint64_t was = the_storm->slots[job->number], is = *slot_of(job);

        REQUIRE(is == was || is == was + 1, "the slot of job %u has %" PRIu64 ", not %" PRIu64, job->number,
                is, was);
        the_storm->slots[job->number] = is;
        REQUIRE(pattern_holds((char *)job->ptr + STORM_JOBS * SLOT_BYTES,
                              STORM_BYTES - STORM_JOBS * SLOT_BYTES, 7),
                "the block has other contents");
}

static void storm_write(const struct storm_job *job)
{
        *slot_of(job) = the_storm->slots[job->number] + 1;
        the_storm->slots[job->number]++;
}

static bool was_done(int r)
{
        REQUIRE(r == 0 || r == -EDQUOT || r == -ENOMEM || r == -EBUSY, "%d (%s)", r, bfc_last_error());
        return r == 0;
}

static void storm_step(struct storm_job *job)
{
        uint64_t choice = random_next(&job->random) % 16;

        if (!job->ptr) {
                void *p;

                if (!was_done(bfc_attach(job->client, NAME, 1000, &p, NULL)))
                        return;
                job->ptr = p;
                the_storm->n_attached++;
        } else if (job->is_parked && choice > 0) {
                void *was = job->ptr;

                usleep((useconds_t)(random_next(&job->random) % 20000));
                if (!was_done(bfc_wake(job->client, job->ptr, 1000)))
                        return;
                REQUIRE(job->ptr == was, "another address");
                job->is_parked = false;
                the_storm->n_woken++;
        } else if (choice == 1 || job->is_parked) {
                REQUIRE(bfc_detach(job->client, job->ptr) == 0, "%s", bfc_last_error());
                job->ptr = NULL;
                job->is_parked = false;
                return;
        } else {
                storm_write(job);
                job->is_parked = was_done(bfc_park(job->client, job->ptr, BFC_BACKUP, "parking"));
                the_storm->n_parked += job->is_parked;
        }
        if (!job->is_parked)
                storm_check(job);
}

static void storm_run(void *arg)
{
        struct storm_job job = { .number = (unsigned)(uintptr_t)arg % STORM_JOBS,
                                 .random = (uint64_t)(uintptr_t)arg };
        const struct bfc_options options = { .struct_size = sizeof(options),
                                             .socket = the_storm->socket,
                                             .tenant = "red",
                                             .flags = CHILDREN_HAVE_EVENTS ? 0 : BFC_NO_THREAD };
        int r = 0;

        (void)WAIT_FOR((r = bfc_connect(&options, &job.client)) != -ECONNRESET, SETTLE_MS);
        REQUIRE(r == 0, "%s", bfc_last_error());
        while (!the_storm->is_over)
                storm_step(&job);
        bfc_disconnect(job.client);
}

static pid_t storm_job(unsigned number, uint64_t *random)
{
        return child_start(storm_run,
                           (void *)(uintptr_t)(random_next(random) / STORM_JOBS * STORM_JOBS + number));
}

/* One block and its name, with or without a copy. */
static bool storm_adds_up(struct rig *rig)
{
        uint64_t id, n_copies = count_blocks(rig, "copy", &id), n_parked = count_blocks(rig, "parked", &id);

        return n_copies == n_parked && in_use(rig, "parking") == n_copies * STORM_BYTES &&
               in_use(rig, "train") == (1 - n_parked) * STORM_BYTES &&
               rig_stats(rig, "red", "train").num_blocks == 1;
}

static void storm_look(struct kept *k, const pid_t *jobs)
{
        for (unsigned i = 0; i < STORM_JOBS; i++)
                child_stop(jobs[i]);
        ck_assert_msg(WAIT_FOR(storm_adds_up(k->rig), SETTLE_MS), "blocks and charges differ");
        for (unsigned i = 0; i < STORM_JOBS; i++)
                ck_assert_int_eq(kill(jobs[i], SIGCONT), 0);
}

/* In a process of its own: children of one that has used a GPU cannot. */
static void storm_publish(void *arg)
{
        const struct bfc_publish_options how = { .struct_size = sizeof(how), .keep_ms = BFC_KEEP_FOREVER };
        bfc_client *client = child_client_open(the_storm->socket, "red");
        void *p;

        (void)arg;
        REQUIRE(bfc_malloc_flags(client, NULL, STORM_BYTES, BFC_PARKABLE, &p) == 0, "%s", bfc_last_error());
        memset(p, 0, STORM_BYTES);
        pattern_write((char *)p + STORM_JOBS * SLOT_BYTES, STORM_BYTES - STORM_JOBS * SLOT_BYTES, 7);
        REQUIRE(bfc_publish_with(client, p, NAME, &how) == 0, "%s", bfc_last_error());
        REQUIRE(bfc_detach(client, p) == 0, "%s", bfc_last_error());
        bfc_disconnect(client);
}

static void storm_forget(struct kept *k)
{
        bfc_client *client = client_open(k->rig, "red", "train");

        ck_assert_ok(bfc_forget(client, NAME));
        bfc_disconnect(client);
}

/* Eight processes park, wake, write, attach and detach one block; they and the daemon are killed again and again. */
TEST(a_storm_of_kills_damages_nothing)
{
        uint64_t random = 20, n_events = 0;
        unsigned n_restarts = 0;
        pid_t jobs[STORM_JOBS];
        struct kept *k;

        if (!CHILDREN_CAN_PARK)
                return;
        k = kept_start(roomy_config());
        the_storm = shared_memory(sizeof(*the_storm));
        snprintf(the_storm->socket, sizeof(the_storm->socket), "%s", k->rig->socket);
        child_join(child_start(storm_publish, NULL));
        for (unsigned i = 0; i < STORM_JOBS; i++)
                jobs[i] = storm_job(i, &random);
        for (; the_storm->n_woken < STORM_CYCLES || n_events < STORM_EVENTS; n_events++) {
                unsigned victim = (unsigned)(random_next(&random) % STORM_JOBS);

                usleep((useconds_t)(random_next(&random) % 200000));
                ck_assert_msg(n_events < 100 * (STORM_EVENTS + STORM_CYCLES), "no job gets on");
                if (n_events % 4 < 2) {
                        kill(jobs[victim], SIGKILL);
                        ck_assert_int_eq(waitpid(jobs[victim], NULL, 0), jobs[victim]);
                        jobs[victim] = storm_job(victim, &random);
                } else if (n_events % 4 == 2) {
                        kept_restart(k, n_events % 8 < 4 ? SIGKILL : SIGTERM);
                        n_restarts++;
                } else {
                        storm_look(k, jobs);
                }
        }
        the_storm->is_over = true;
        for (unsigned i = 0; i < STORM_JOBS; i++)
                child_join(jobs[i]);
        fprintf(stderr, "%" PRIu64 " parks, %" PRIu64 " wakes, %" PRIu64 " attaches; %u restarts\n",
                the_storm->n_parked, the_storm->n_woken, the_storm->n_attached, n_restarts);
        storm_forget(k);
        kept_stop(k);
}
