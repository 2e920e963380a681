/* Devices that are drained and resumed, under sessions without sockets: who is refused and told, what
 * goes back, when the device is closed, and what it takes to have it again. On devices that
 * fail on command.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/clock.h"
#include "daemon/drain.h"
#include "daemon/order.h"
#include "tests/fake_device.h"
#include "tests/peer.h"
#include "tests/suite.h"
#include "tests/unit/still_clock.h"

#define MIB  (UINT64_C(1) << 20)
#define E    (2 * MIB)
#define SIZE (128 * MIB)

static const char config_text[] =
        "devices:\n"
        "  - id: cuda:0\n"
        "    headroom: 8MiB\n"
        "    partitions:\n"
        "      - {name: one, limit: 64MiB, share: fd, growth: on-demand}\n"
        "      - {name: early, limit: 32MiB, share: fd, growth: preallocate}\n"
        "      - {name: whole, limit: 16MiB, share: cuda-ipc, growth: preallocate}\n"
        "  - id: cuda:1\n"
        "    headroom: 0\n"
        "    partitions: [{name: other, limit: 100%, share: fd, growth: on-demand}]\n"
        "tenants:\n"
        "  - name: a\n"
        "    match: {uid: 1}\n"
        "    quotas:\n"
        "      - {partition: one, limit: 32MiB, reserve: 8MiB}\n"
        "      - {partition: early, limit: 16MiB}\n"
        "      - {partition: whole, limit: 16MiB}\n"
        "      - {partition: other}\n"
        "  - name: b\n"
        "    match: {uid: 2}\n"
        "    quotas: [{partition: early, limit: 16MiB}, {partition: one}]\n";

enum { ONE, EARLY, WHOLE, OTHER }; /* a's */

#define EARLY_BYTES (48 * MIB) /* made in advance on cuda:0 */

static struct fake_device gpus[2];
static struct devices *devices;
static struct config *config;
static struct broker *b;
static struct peer *a, *b1, *admin;
static int n_fds_before, saved_stderr, log_fd;

static int look(void *userdata, const char *id, struct config_gpu *ret, char *ret_sentence, size_t n_sentence)
{
        (void)userdata;
        (void)ret_sentence;
        (void)n_sentence;
        *ret = (struct config_gpu){ .uuid = { 0xaa, (uint8_t)id[5] },
                                    .bytes_total = SIZE,
                                    .bytes_free = SIZE };
        return 0;
}

static void open_log(void)
{
        log_fd = memfd_create("log", MFD_CLOEXEC);
        saved_stderr = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0);
        ck_assert(log_fd >= 0 && saved_stderr >= 0);
        ck_assert_int_eq(dup2(log_fd, STDERR_FILENO), STDERR_FILENO);
}

static bool log_says(const char *part)
{
        static char text[65536];
        ssize_t n = pread(log_fd, text, sizeof(text) - 1, 0);

        ck_assert_int_ge(n, 0);
        text[n] = '\0';
        return strstr(text, part) != NULL;
}

static struct peer *come_in(uid_t uid, bool is_admin)
{
        struct peer *p = peer_new(b, uid, is_admin);

        p->wants_events = p->wants_trims = p->wants_drains = !is_admin;
        ck_assert_int_eq(peer_error(p, peer_hello(p, "", "")), 0);
        return p;
}

static void check(void)
{
        const char *why = "";

        ck_assert_msg(broker_check(b, &why) == 0 && trim_check(b, &why) == 0, "%s", why);
}

static void settle(void)
{
        peer_settle(b);
        check();
}

static void setup(void)
{
        const struct config_machine machine = { .look = look };

        n_fds_before = suite_count_fds();
        open_log();
        ck_assert_int_eq(devices_new(&devices), 0);
        for (size_t i = 0; i < 2; i++) {
                fake_device_init(&gpus[i], E);
                gpus[i].stays_lost = true;
                gpus[i].facts.bytes_total = SIZE;
                gpus[i].facts.uuid[0] = 0xaa;
                gpus[i].facts.uuid[1] = (uint8_t)('0' + i);
                ck_assert_int_eq(devices_put(devices, i == 0 ? "cuda:0" : "cuda:1", &gpus[i].device), 0);
        }
        b = peer_broker_on(config_text, &machine, devices, &config);
        log_open(LOG_LEVEL_INFO);
        a = come_in(1, false);
        b1 = come_in(2, false);
        admin = come_in(0, true);
        ck_assert_uint_eq(gpus[0].live_bytes, EARLY_BYTES);
}

static void teardown(void)
{
        a = peer_free(a);
        b1 = peer_free(b1);
        admin = peer_free(admin);
        settle();
        broker_free(b);
        config_free(config);
        devices = devices_free(devices);
        for (size_t i = 0; i < 2; i++)
                ck_assert_uint_eq(gpus[i].n_live, 0);
        dup2(saved_stderr, STDERR_FILENO);
        close(saved_stderr);
        close(log_fd);
        ck_assert_int_eq(suite_count_fds(), n_fds_before);
}

static uint64_t drain(struct peer *p, const char *device)
{
        Bfcd__Request r = BFCD__REQUEST__INIT;
        Bfcd__Drain body = BFCD__DRAIN__INIT;
        uint64_t id;

        body.device = (char *)(uintptr_t)device;
        r.body_case = BFCD__REQUEST__BODY_DRAIN;
        r.drain = &body;
        ck_assert_int_eq(peer_send(p, &r, &id), 0);
        return id;
}

static uint64_t resume(struct peer *p, const char *device)
{
        Bfcd__Request r = BFCD__REQUEST__INIT;
        Bfcd__Resume body = BFCD__RESUME__INIT;
        uint64_t id;

        body.device = (char *)(uintptr_t)device;
        r.body_case = BFCD__REQUEST__BODY_RESUME;
        r.resume = &body;
        ck_assert_int_eq(peer_send(p, &r, &id), 0);
        return id;
}

static const Bfcd__DeviceRow *row(size_t i)
{
        Bfcd__Request r = BFCD__REQUEST__INIT;
        Bfcd__List list = BFCD__LIST__INIT;
        uint64_t id;

        list.kind = BFCD__LIST__KIND__STATUS;
        r.body_case = BFCD__REQUEST__BODY_LIST;
        r.list = &list;
        ck_assert_int_eq(peer_send(admin, &r, &id), 0);
        return peer_reply(admin, id)->list->status->devices[i];
}

static uint64_t must_malloc(struct peer *p, uint32_t partition, uint64_t n_bytes)
{
        uint64_t id = peer_malloc(p, partition, n_bytes);

        settle();
        ck_assert_int_eq(peer_error(p, id), 0);
        return peer_reply(p, id)->block->block_id;
}

static void must_free(struct peer *p, uint64_t block_id)
{
        ck_assert_int_eq(peer_error(p, peer_free_block(p, block_id)), 0);
        settle();
}

/* Nothing lies idle. */
static void must_answer(struct peer *p)
{
        while (p->n_trims > 0)
                ck_assert_int_eq(peer_trimmed(p, p->trims[0].sequence, 0), 0);
        settle();
}

static void must_drain(const char *device)
{
        ck_assert_int_eq(peer_error(admin, drain(admin, device)), 0);
        settle();
        must_answer(a);
        must_answer(b1);
}

static void must_resume(const char *device)
{
        uint64_t id = resume(admin, device);

        settle();
        ck_assert_msg(peer_error(admin, id) == 0, "%s",
                      peer_error(admin, id) > 0 ? peer_reply(admin, id)->refusal->message : "no answer");
}

static void assert_refused(const struct peer *p, uint64_t id, int error, const char *part)
{
        ck_assert_int_eq(peer_error(p, id), error);
        ck_assert_msg(strstr(peer_reply(p, id)->refusal->message, part) != NULL, "%s",
                      peer_reply(p, id)->refusal->message);
}

/* ---- a device that nobody uses ---------------------------------------------- */

START_TEST(an_idle_device_is_closed_at_once)
{
        must_drain("cuda:0");
        ck_assert_str_eq(row(0)->state, "drained");
        ck_assert_uint_eq(row(0)->bytes_reserved, 0);
        ck_assert_str_eq(row(1)->state, "ok");
        ck_assert_uint_eq(gpus[0].n_live, 0); /* also what was made in advance */
        ck_assert(gpus[0].is_closed && !gpus[1].is_closed);
        ck_assert(log_says("device 'cuda:0' is drained"));
        (void)must_malloc(a, OTHER, MIB);
        must_resume("cuda:0");
        ck_assert(!gpus[0].is_closed);
        ck_assert_uint_eq(gpus[0].live_bytes, EARLY_BYTES); /* and it is there again */
        ck_assert_str_eq(row(0)->state, "ok");
        ck_assert_uint_eq(row(0)->bytes_reserved, EARLY_BYTES);
        ck_assert(log_says("is resumed"));
        for (uint32_t i = ONE; i <= WHOLE; i++)
                (void)must_malloc(a, i, MIB);
        ck_assert_uint_eq(gpus[0].live_bytes, EARLY_BYTES + E);
}
END_TEST

/* Without operators' right, and what makes no sense. */
START_TEST(what_is_refused)
{
        assert_refused(a, drain(a, "cuda:0"), EACCES, "use the admin socket");
        assert_refused(a, resume(a, "cuda:0"), EACCES, "use the admin socket");
        assert_refused(admin, drain(admin, "cuda:7"), ENOENT,
                       "there is no device 'cuda:7'; the devices are: 'cuda:0' 'cuda:1'");
        assert_refused(admin, resume(admin, ""), ENOENT, "there is no device ''");
        assert_refused(admin, resume(admin, "cuda:0"), EINVAL, "device 'cuda:0' is not drained: it is ok");
        ck_assert_str_eq(row(0)->state, "ok");
        ck_assert_uint_eq(gpus[0].live_bytes, EARLY_BYTES);
}
END_TEST

/* ---- one that is in use ------------------------------------------------------ */

START_TEST(it_empties_as_blocks_are_freed)
{
        uint64_t of_one = must_malloc(a, ONE, 3 * MIB), of_early = must_malloc(b1, 0, MIB), id;
        uint64_t of_other = must_malloc(a, OTHER, MIB);

        id = drain(admin, "cuda:0");
        ck_assert_int_eq(peer_error(admin, id), 0); /* it is begun */
        ck_assert(a->is_draining[ONE] && a->is_draining[EARLY] && a->is_draining[WHOLE]);
        ck_assert(!a->is_draining[OTHER]);
        ck_assert_uint_eq(a->n_trims, 1); /* asked for what lies idle, at once */
        settle();
        ck_assert_str_eq(row(0)->state, "draining");
        ck_assert_uint_eq(gpus[0].live_bytes, 3 * E); /* nothing but what blocks lie in */
        ck_assert(broker_is_blocked(b));
        assert_refused(a, peer_malloc(a, ONE, MIB), EBUSY,
                       "device 'cuda:0' of partition 'one' is draining or drained");
        assert_refused(a, peer_malloc_wait(a, WHOLE, MIB, 60000), EBUSY, "until an operator resumes it");
        (void)must_malloc(a, OTHER, MIB);
        must_free(a, of_one);
        ck_assert_uint_eq(gpus[0].live_bytes, E);
        ck_assert_str_eq(row(0)->state, "draining");
        must_free(b1, of_early);
        ck_assert_str_eq(row(0)->state, "drained");
        ck_assert(gpus[0].is_closed);
        must_answer(a);
        must_answer(b1);
        ck_assert(!broker_is_blocked(b));
        must_free(a, of_other);
}
END_TEST

/* Those who wait, and the one for whom memory is being made. */
START_TEST(who_waits_is_refused)
{
        uint64_t growing, waiting[300];

        (void)must_malloc(a, ONE, 30 * MIB);
        for (size_t i = 0; i < 60; i++)
                waiting[i] = peer_malloc_wait(a, ONE, 4 * MIB, 60000);
        settle();
        must_answer(a);
        growing = peer_malloc(b1, 1, MIB);
        broker_turn(b); /* its memory is with the worker */
        ck_assert_int_eq(peer_error(b1, growing), -1);
        ck_assert_int_eq(peer_error(a, waiting[59]), -1);
        must_drain("cuda:0");
        ck_assert_int_eq(peer_error(b1, growing), EBUSY);
        for (size_t i = 0; i < 60; i++)
                ck_assert_int_eq(peer_error(a, waiting[i]), EBUSY);
        ck_assert_uint_eq(gpus[0].live_bytes, 15 * E);
        a = peer_free(a); /* its process ends */
        settle();
        ck_assert_str_eq(row(0)->state, "drained");
        a = come_in(1, false);
}
END_TEST

/* Blocks that are shared stay, and may be attached. */
START_TEST(shared_blocks_stay)
{
        uint64_t block = must_malloc(a, ONE, MIB), id;
        struct peer *other = come_in(1, false);

        ck_assert_int_eq(peer_error(a, peer_publish(a, block, "weights")), 0);
        must_drain("cuda:0");
        id = peer_attach(other, "weights", 0);
        settle();
        ck_assert_int_eq(peer_error(other, id), 0);
        must_free(a, block);
        ck_assert_str_eq(row(0)->state, "draining");
        must_free(other, block);
        ck_assert_str_eq(row(0)->state, "drained");
        assert_refused(other, peer_attach(other, "weights", 0), ENOENT, "weights");
        peer_free(other);
        settle();
}
END_TEST

/* What becomes idle later is asked for, too, a few sessions at a time. */
START_TEST(it_asks_again)
{
        uint64_t block = must_malloc(a, ONE, MIB), now;
        struct peer *crowd[100];

        for (size_t i = 0; i < 100; i++)
                crowd[i] = come_in(1, false);
        must_drain("cuda:0");
        ck_assert_uint_eq(a->n_trimmed, 1);
        order_tick(b, clock_ms()); /* the rest of the first round */
        order_tick(b, clock_ms());
        ck_assert_uint_eq(a->n_trimmed, 1);
        now = clock_ms();
        order_tick(b, now + 2 * ORDER_AGAIN_MS);
        ck_assert_uint_eq(a->n_trimmed, 2);
        must_free(a, block);
        ck_assert_str_eq(row(0)->state, "drained");
        must_answer(a);
        order_tick(b, now + 3 * ORDER_AGAIN_MS);
        order_tick(b, now + 4 * ORDER_AGAIN_MS);
        ck_assert_uint_eq(a->n_trimmed, 2);
        ck_assert_ptr_null(b->devices[0].order);
        for (size_t i = 0; i < 100; i++)
                peer_free(crowd[i]);
        settle();
}
END_TEST

/* A session that comes in while it drains, and one that does not know the event. */
START_TEST(who_is_told)
{
        struct peer *late, *old = peer_new(b, 1, false);

        old->wants_events = old->wants_trims = true;
        ck_assert_int_eq(peer_error(old, peer_hello(old, "", "")), 0);
        must_drain("cuda:0");
        late = come_in(1, false);
        ck_assert_uint_eq(late->n_drains_told, 3);
        ck_assert(late->is_draining[ONE] && late->is_draining[WHOLE] && !late->is_draining[OTHER]);
        ck_assert_int_eq(peer_error(late, peer_malloc(late, ONE, MIB)), EBUSY);
        must_resume("cuda:0");
        ck_assert_uint_eq(late->n_drains_told, 6);
        ck_assert(!late->is_draining[ONE]);
        ck_assert_uint_eq(old->n_drains_told, 0);
        ck_assert_uint_eq(b1->n_drains_told, 4);
        (void)must_malloc(late, ONE, MIB);
        peer_free(late);
        peer_free(old);
        settle();
}
END_TEST

/* ---- orders that meet ------------------------------------------------------- */

START_TEST(two_drains_and_two_resumes)
{
        struct peer *second = come_in(0, true);
        uint64_t block = must_malloc(a, ONE, MIB), ids[3];

        must_drain("cuda:0");
        ck_assert_int_eq(peer_error(second, drain(second, "cuda:0")), 0); /* it is what is wanted */
        must_answer(a);
        ck_assert_uint_eq(a->n_drains_told, 3);
        must_free(a, block);
        ck_assert_int_eq(peer_error(second, drain(second, "cuda:0")), 0);
        settle();
        ck_assert_uint_eq(gpus[0].n_closes, 1);
        ids[0] = resume(admin, "cuda:0");
        ids[1] = resume(second, "cuda:0");
        ids[2] = drain(second, "cuda:0");
        ck_assert_int_eq(peer_error(admin, ids[0]), -1);
        assert_refused(second, ids[1], EBUSY, "is already being resumed");
        assert_refused(second, ids[2], EBUSY, "is being resumed");
        settle();
        ck_assert_int_eq(peer_error(admin, ids[0]), 0);
        ck_assert_uint_eq(gpus[0].n_opens, 1);
        peer_free(second);
        settle();
}
END_TEST

/* The operator does not wait for the answer. */
START_TEST(an_operator_that_leaves)
{
        struct peer *second = come_in(0, true);

        must_drain("cuda:0");
        (void)resume(second, "cuda:0");
        peer_free(second);
        settle();
        ck_assert_str_eq(row(0)->state, "ok");
        ck_assert_uint_eq(gpus[0].live_bytes, EARLY_BYTES);
}
END_TEST

/* Resumed before it was empty: the drain is taken back. */
START_TEST(a_drain_that_is_taken_back)
{
        uint64_t block = must_malloc(a, EARLY, MIB);

        must_drain("cuda:0");
        ck_assert_uint_eq(gpus[0].live_bytes, E);
        must_resume("cuda:0");
        ck_assert_uint_eq(gpus[0].n_closes, 0);
        ck_assert_uint_eq(gpus[0].live_bytes, EARLY_BYTES);
        ck_assert_uint_eq(row(0)->bytes_reserved, EARLY_BYTES);
        (void)must_malloc(a, EARLY, 14 * MIB);
        must_free(a, block);
        ck_assert_uint_eq(gpus[0].live_bytes, EARLY_BYTES);
}
END_TEST

/* Asked for while the worker closes it, and by another one when that is done. */
START_TEST(a_resume_on_the_heels_of_a_drain)
{
        struct peer *second = come_in(0, true);
        uint64_t id;

        drain(admin, "cuda:0");
        for (;;) {
                broker_turn(b);
                if (broker_n_pending(b) == 1 && gpus[0].n_live == 0)
                        break;
                broker_poll(b);
        }
        ck_assert_str_eq(row(0)->state, "draining");
        ck_assert(!gpus[0].is_closed);
        id = resume(admin, "cuda:0");
        broker_poll(b);
        ck_assert(gpus[0].is_closed);
        assert_refused(second, resume(second, "cuda:0"), EBUSY, "is already being resumed");
        assert_refused(second, drain(second, "cuda:0"), EBUSY, "is being resumed");
        peer_free(second);
        settle();
        ck_assert_int_eq(peer_error(admin, id), 0);
        ck_assert_uint_eq(gpus[0].n_closes, 1);
        ck_assert_uint_eq(gpus[0].n_opens, 1);
        ck_assert_str_eq(row(0)->state, "ok");
        ck_assert_uint_eq(gpus[0].live_bytes, EARLY_BYTES);
}
END_TEST

/* ---- a device that is not what it was ---------------------------------------- */

static void assert_stays_drained(int error, const char *part)
{
        uint64_t id = resume(admin, "cuda:0");

        settle();
        assert_refused(admin, id, error, part);
        ck_assert(strstr(peer_reply(admin, id)->refusal->message, "device 'cuda:0' could not be resumed: "));
        ck_assert_str_eq(row(0)->state, "drained");
        ck_assert_uint_eq(gpus[0].n_live, 0);
        ck_assert_int_eq(peer_error(a, peer_malloc(a, ONE, MIB)), EBUSY);
        ck_assert(log_says(part));
}

START_TEST(what_no_longer_fits)
{
        must_drain("cuda:0");
        gpus[0].open_error = -ENODEV;
        assert_stays_drained(ENODEV, "fake: it is told to fail");
        gpus[0].open_error = 0;
        gpus[0].facts.bytes_total = 100 * MIB; /* 112 MiB in partitions, and headroom */
        assert_stays_drained(ENOMEM,
                             "it now has 104857600 bytes, and its partitions' limits and headroom sum to");
        ck_assert(gpus[0].is_closed);
        gpus[0].facts.bytes_total = SIZE;
        gpus[0].facts.uuid[5] = 1;
        assert_stays_drained(ENODEV, "it is a different GPU than before");
        gpus[0].facts.uuid[5] = 0;
        gpus[0].facts.shares[DEVICE_SHARE_CUDA_IPC] = false;
        assert_stays_drained(ENOTSUP, "it no longer supports share: cuda-ipc of partition 'whole'");
        gpus[0].facts.shares[DEVICE_SHARE_CUDA_IPC] = true;
        for (unsigned nth = 1; nth < 18; nth += 8) { /* in each of the three */
                fake_device_fail_make(&gpus[0], nth, -ENOMEM);
                assert_stays_drained(ENOMEM, "cannot be allocated: ");
        }
        ck_assert(gpus[0].is_closed);
        gpus[0].facts.bytes_total = 120 * MIB; /* still enough */
        snprintf(gpus[0].facts.name, sizeof(gpus[0].facts.name), "smaller");
        must_resume("cuda:0");
        ck_assert_uint_eq(row(0)->bytes_total, 120 * MIB);
        ck_assert_str_eq(row(0)->name, "smaller");
        ck_assert_uint_eq(gpus[0].live_bytes, EARLY_BYTES);
        (void)must_malloc(a, ONE, MIB);
}
END_TEST

/* A GPU that falls off the bus, is reset, and comes back. */
START_TEST(a_lost_device_comes_back)
{
        uint64_t block, id;

        gpus[0].others_bytes = 0;
        block = must_malloc(a, ONE, MIB);
        (void)must_malloc(a, OTHER, MIB);
        fake_device_fail_make(&gpus[0], 1, -ENODEV);
        id = peer_malloc(a, ONE, 8 * MIB);
        settle();
        ck_assert_int_eq(peer_error(a, id), ENODEV);
        ck_assert_str_eq(row(0)->state, "lost");
        assert_refused(admin, resume(admin, "cuda:0"), EINVAL, "is not drained: it is lost; drain it first");
        must_drain("cuda:0");
        ck_assert_str_eq(row(0)->state, "draining");
        assert_refused(admin, resume(admin, "cuda:0"), ENODEV, "is lost and still in use");
        must_free(a, block);
        ck_assert_str_eq(row(0)->state, "drained");
        ck_assert_uint_eq(row(0)->bytes_escaped, EARLY_BYTES + E);
        gpus[0].others_bytes = 0; /* as ever: it was reset */
        must_resume("cuda:0");
        ck_assert_str_eq(row(0)->state, "ok");
        ck_assert_uint_eq(row(0)->bytes_escaped, 0);
        ck_assert_uint_eq(row(0)->bytes_reserved, EARLY_BYTES);
        (void)must_malloc(a, ONE, 24 * MIB);
        (void)must_malloc(a, EARLY, 16 * MIB);
}
END_TEST

/* Somebody still has memory of it: that stays charged, and what does not fit beside it is told. */
START_TEST(what_escaped_stays_charged)
{
        uint64_t block = must_malloc(a, ONE, E), id;

        fake_device_fail_destroy(&gpus[0], 1, -EBUSY);
        must_free(a, block);
        a = peer_free(a);
        settle();
        a = come_in(1, false);
        ck_assert_uint_eq(row(0)->bytes_escaped, E);
        must_drain("cuda:0");
        ck_assert_str_eq(row(0)->state, "drained");
        ck_assert(log_says("are unreclaimed; processes may still have them mapped"));
        gpus[0].others_bytes = E;
        must_resume("cuda:0");
        ck_assert_uint_eq(row(0)->bytes_escaped, E);
        ck_assert_uint_eq(row(0)->bytes_reserved, EARLY_BYTES + E);
        /* The same in a partition that is all made in advance: it cannot be whole. */
        fake_device_fail_destroy(&gpus[0], 1, -EBUSY);
        must_drain("cuda:0");
        gpus[0].others_bytes = 2 * E;
        id = resume(admin, "cuda:0");
        settle();
        assert_refused(admin, id, EDQUOT, "does not fit, because 2097152 bytes");
        ck_assert_str_eq(row(0)->state, "drained");
        gpus[0].others_bytes = 0;
        must_resume("cuda:0");
        ck_assert_uint_eq(row(0)->bytes_escaped, 0);
}
END_TEST

/* ---- beside other things ----------------------------------------------------- */

/* A config that is put in force meanwhile is what counts when it is resumed. */
START_TEST(a_reload_while_it_is_drained)
{
        static const char less[] =
                "devices:\n"
                "  - id: cuda:0\n"
                "    headroom: 8MiB\n"
                "    partitions:\n"
                "      - {name: one, limit: 40MiB, share: fd, growth: on-demand}\n"
                "      - {name: early, limit: 32MiB, share: fd, growth: preallocate}\n"
                "      - {name: whole, limit: 16MiB, share: cuda-ipc, growth: preallocate}\n"
                "  - id: cuda:1\n"
                "    headroom: 0\n"
                "    partitions: [{name: other, limit: 100%, share: fd, growth: on-demand}]\n"
                "tenants:\n"
                "  - name: a\n"
                "    match: {uid: 1}\n"
                "    quotas:\n"
                "      - {partition: one, limit: 32MiB, reserve: 8MiB}\n"
                "      - {partition: early, limit: 16MiB}\n"
                "      - {partition: whole, limit: 16MiB}\n"
                "      - {partition: other}\n"
                "  - name: b\n"
                "    match: {uid: 2}\n"
                "    quotas: [{partition: early, limit: 16MiB}, {partition: one}]\n"
                "  - name: c\n"
                "    match: {uid: 3}\n"
                "    quotas: [{partition: one}]\n";
        const struct config_machine machine = { .look = look, .running = config, .serves = true };
        struct config *next;
        struct peer *c;

        must_drain("cuda:0");
        gpus[0].facts.bytes_total = 100 * MIB;
        ck_assert_int_eq(config_parse("test.yaml", less, strlen(less), &machine, stderr, &next), 0);
        ck_assert_int_eq(reload_config(b, next, false, stderr, stderr), 0);
        settle();
        ck_assert_str_eq(row(0)->state, "drained");
        c = come_in(3, false);
        ck_assert(c->is_draining[0]);
        ck_assert_int_eq(peer_error(c, peer_malloc(c, 0, MIB)), EBUSY);
        must_resume("cuda:0");
        (void)must_malloc(c, 0, MIB);
        ck_assert_uint_eq(gpus[0].live_bytes, EARLY_BYTES + E);
        peer_free(c);
        settle();
}
END_TEST

/* The daemon ends in each phase: teardown looks at what is left. */
START_TEST(the_end_while_it_drains)
{
        (void)must_malloc(a, ONE, MIB);
        drain(admin, "cuda:0");
        if (_i >= 1)
                broker_turn(b);
        if (_i >= 2)
                must_answer(a);
        if (_i >= 3) {
                a = peer_free(a);
                settle();
                (void)resume(admin, "cuda:0");
        }
        for (int i = 3; i < _i; i++)
                broker_poll(b);
}
END_TEST

/* Everything at random; the invariants are looked at after each step. */
START_TEST(a_walk)
{
        unsigned short random[3] = { 7, (unsigned short)_i, 30 };
        struct {
                struct peer *p;
                uint64_t id;
        } blocks[64] = { 0 };
        unsigned n_states[2] = { 0 };

        for (unsigned i = 0; i < 1500; i++) {
                size_t at = (size_t)nrand48(random) % 64;
                struct peer *p = nrand48(random) % 2 ? a : b1;
                uint64_t id;

                switch (nrand48(random) % 16) {
                case 0:
                        drain(admin, "cuda:0");
                        break;
                case 1:
                case 2:
                        resume(admin, "cuda:0");
                        break;
                case 3:
                        settle();
                        break;
                case 4:
                        broker_turn(b);
                        break;
                case 5:
                        broker_poll(b);
                        break;
                case 6:
                        order_tick(b, clock_ms() + i * 500);
                        break;
                case 7:
                        for (size_t k = 0; k < 64; k++)
                                if (blocks[k].p)
                                        peer_free_block(blocks[k].p, blocks[k].id);
                        memset(blocks, 0, sizeof(blocks));
                        break;
                case 8:
                        while (p->n_trims > 0)
                                peer_trimmed(p, p->trims[0].sequence, 0);
                        break;
                default:
                        if (blocks[at].p) {
                                peer_free_block(blocks[at].p, blocks[at].id);
                                blocks[at].p = NULL;
                                break;
                        }
                        id = peer_malloc(p, (uint32_t)(nrand48(random) % (p == a ? 4 : 2)), MIB);
                        settle();
                        ck_assert_int_ge(peer_error(p, id), 0);
                        if (peer_error(p, id) == 0) {
                                blocks[at].p = p;
                                blocks[at].id = peer_reply(p, id)->block->block_id;
                        }
                }
                check();
                n_states[0] += gpus[0].is_closed;
                n_states[1] += !gpus[0].is_closed;
                peer_forget_replies(a);
                peer_forget_replies(b1);
                peer_forget_replies(admin);
        }
        ck_assert(n_states[0] > 20 && n_states[1] > 20);
}
END_TEST

/* ---- where nobody can be made to let go ---------------------------------------- */

/* On a device that does not empty mappings: sessions let go first. */
START_TEST(sessions_let_go_first)
{
        static const char text[] = "devices:\n"
                                   "  - id: host\n"
                                   "    size: 64MiB\n"
                                   "    partitions: [{name: p, limit: 32MiB, growth: on-demand},\n"
                                   "                 {name: e, limit: 8MiB, growth: preallocate}]\n"
                                   "tenants:\n"
                                   "  - name: a\n"
                                   "    match: {uid: 1}\n"
                                   "    quotas: [{partition: p}, {partition: e, limit: 8MiB}]\n";
        uint64_t blocks[2], id;

        b = peer_broker_sticky(text, &config);
        a = come_in(1, false);
        admin = come_in(0, true);
        blocks[0] = must_malloc(a, 0, E);
        blocks[1] = must_malloc(a, 1, E);
        for (int i = 0; i < 2; i++)
                must_free(a, blocks[i]);
        ck_assert_uint_eq(a->n_retires, 0);
        id = drain(admin, "host");
        ck_assert_int_eq(peer_error(admin, id), 0);
        settle();
        ck_assert_str_eq(row(0)->state, "draining");
        ck_assert_uint_eq(row(0)->bytes_reserved, 2 * E);
        ck_assert_uint_eq(a->n_retires, 2);
        /* Taken back meanwhile: what was asked for goes, and is made again when it is needed. */
        must_resume("host");
        ck_assert_uint_eq(row(0)->bytes_reserved, 5 * E);
        peer_retired_all(a);
        settle();
        ck_assert_uint_eq(row(0)->bytes_reserved, 3 * E);
        (void)must_malloc(a, 1, 8 * MIB);
        ck_assert_uint_eq(row(0)->bytes_reserved, 4 * E);
        id = drain(admin, "host");
        settle();
        ck_assert_str_eq(row(0)->state, "draining");
        a = peer_free(a);
        settle();
        ck_assert_str_eq(row(0)->state, "drained");
        must_resume("host");
        ck_assert_uint_eq(row(0)->bytes_reserved, 4 * E);
        admin = peer_free(admin);
        b = peer_broker_free(b, config);
}
END_TEST

int main(void)
{
        Suite *suite = suite_create("drain");
        TCase *t = tcase_create("devices"), *sticky = tcase_create("sticky");

        tcase_set_timeout(t, 60); /* the walk, on a machine with much else to do */
        tcase_add_checked_fixture(t, setup, teardown);
        tcase_add_test(t, an_idle_device_is_closed_at_once);
        tcase_add_test(t, what_is_refused);
        tcase_add_test(t, it_empties_as_blocks_are_freed);
        tcase_add_test(t, who_waits_is_refused);
        tcase_add_test(t, shared_blocks_stay);
        tcase_add_test(t, it_asks_again);
        tcase_add_test(t, who_is_told);
        tcase_add_test(t, two_drains_and_two_resumes);
        tcase_add_test(t, an_operator_that_leaves);
        tcase_add_test(t, a_drain_that_is_taken_back);
        tcase_add_test(t, a_resume_on_the_heels_of_a_drain);
        tcase_add_test(t, what_no_longer_fits);
        tcase_add_test(t, a_lost_device_comes_back);
        tcase_add_test(t, what_escaped_stays_charged);
        tcase_add_test(t, a_reload_while_it_is_drained);
        tcase_add_loop_test(t, the_end_while_it_drains, 0, 8);
        tcase_add_loop_test(t, a_walk, 0, 3);
        suite_add_tcase(suite, t);
        tcase_add_test(sticky, sessions_let_go_first);
        suite_add_tcase(suite, sticky);
        return suite_run(suite);
}
