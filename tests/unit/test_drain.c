/* Devices that are drained and resumed, with sessions without sockets: refusals and events, what is
 * released, when the device is closed, and when it is opened again. On devices that fail on
 * command.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "daemon/memory/drain.h"
#include "daemon/session/command.h"
#include "daemon/session/reload.h"
#include "tests/suite.h"
#include "tests/unit/gpus.h"
#include "tests/unit/still_clock.h"

#define E    (2 * MIB)
#define SIZE (128 * MIB)

/* Partition one has `limit`; `more` are tenants. */
#define CONFIG(limit, more)                                                                                  \
        "devices:\n"                                                                                         \
        "  - id: cuda:0\n"                                                                                   \
        "    headroom: 8MiB\n"                                                                               \
        "    partitions:\n"                                                                                  \
        "      - {name: one, limit: " limit ", share: fd, growth: on-demand}\n"                              \
        "      - {name: early, limit: 32MiB, share: fd, growth: preallocate}\n"                              \
        "      - {name: whole, limit: 16MiB, share: cuda-ipc, growth: preallocate}\n"                        \
        "  - id: cuda:1\n"                                                                                   \
        "    headroom: 0\n"                                                                                  \
        "    partitions: [{name: other, limit: 100%, share: fd, growth: on-demand}]\n"                       \
        "tenants:\n"                                                                                         \
        "  - name: a\n"                                                                                      \
        "    match: {uid: 1}\n"                                                                              \
        "    quotas:\n"                                                                                      \
        "      - {partition: one, limit: 32MiB, reserve: 8MiB}\n"                                            \
        "      - {partition: early, limit: 16MiB}\n"                                                         \
        "      - {partition: whole, limit: 16MiB}\n"                                                         \
        "      - {partition: other}\n"                                                                       \
        "  - name: b\n"                                                                                      \
        "    match: {uid: 2}\n"                                                                              \
        "    quotas: [{partition: early, limit: 16MiB}, {partition: one}]\n" more

enum { ONE, EARLY, WHOLE, OTHER }; /* a's */

#define EARLY_BYTES (48 * MIB) /* made in advance on cuda:0 */

static void setup(void)
{
        gpus_start(CONFIG("64MiB", ""), true);
        log_open(LOG_LEVEL_INFO);
        ck_assert_uint_eq(gpus[0].live_bytes, EARLY_BYTES);
}

FIXTURE(devices, setup, gpus_end);

static const Bfcd__DeviceRow *row(size_t i)
{
        return list_page(admin, BFCD__LIST__KIND__STATUS, 0)->status->devices[i];
}

static uint64_t drain(struct peer *p, const char *device)
{
        Bfcd__Drain body = BFCD__DRAIN__INIT;
        Bfcd__Request r = REQUEST(DRAIN, drain, &body);

        body.device = (char *)(uintptr_t)device;
        return peer_post(p, &r);
}

static uint64_t resume(struct peer *p, const char *device)
{
        Bfcd__Resume body = BFCD__RESUME__INIT;
        Bfcd__Request r = REQUEST(RESUME, resume, &body);

        body.device = (char *)(uintptr_t)device;
        return peer_post(p, &r);
}

static void free_and_settle(struct peer *p, uint64_t block_id)
{
        must_free(p, block_id);
        settle();
}

/* Answers that nothing is idle. */
static void must_answer(struct peer *p)
{
        while (p->n_trims > 0)
                ck_assert_int_eq(peer_answer(p, p->trims[0].sequence), 0);
        settle();
}

static void must_drain(const char *device)
{
        ck_assert_int_eq(peer_error(admin, drain(admin, device)), 0);
        settle();
        must_answer(a1);
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

/* ---- an unused device ------------------------------------------------------- */

TEST(idle_device_is_closed_at_once)
{
        must_drain("cuda:0");
        ck_assert_str_eq(row(0)->state, "drained");
        ck_assert_uint_eq(row(0)->bytes_reserved, 0);
        ck_assert_str_eq(row(1)->state, "ok");
        ck_assert_uint_eq(gpus[0].n_live, 0); /* also what was made in advance */
        ck_assert(gpus[0].is_closed && !gpus[1].is_closed);
        ck_assert(count_log("device 'cuda:0' is drained"));
        (void)must_malloc(a1, OTHER, MIB);
        must_resume("cuda:0");
        ck_assert(!gpus[0].is_closed);
        ck_assert_uint_eq(gpus[0].live_bytes, EARLY_BYTES); /* and it is there again */
        ck_assert_str_eq(row(0)->state, "ok");
        ck_assert_uint_eq(row(0)->bytes_reserved, EARLY_BYTES);
        ck_assert(count_log("is resumed"));
        for (uint32_t i = ONE; i <= WHOLE; i++)
                (void)must_malloc(a1, i, MIB);
        ck_assert_uint_eq(gpus[0].live_bytes, EARLY_BYTES + E);
}

/* Without operators' right, and what makes no sense. */
TEST(what_is_refused)
{
        assert_refused(a1, drain(a1, "cuda:0"), EACCES, "use the admin socket");
        assert_refused(a1, resume(a1, "cuda:0"), EACCES, "use the admin socket");
        assert_refused(admin, drain(admin, "cuda:7"), ENOENT,
                       "there is no device 'cuda:7'; the devices are: 'cuda:0' 'cuda:1'");
        assert_refused(admin, resume(admin, ""), ENOENT, "there is no device ''");
        assert_refused(admin, resume(admin, "cuda:0"), EINVAL, "device 'cuda:0' is not drained: it is ok");
        ck_assert_str_eq(row(0)->state, "ok");
        ck_assert_uint_eq(gpus[0].live_bytes, EARLY_BYTES);
}

/* ---- one that is in use ------------------------------------------------------ */

TEST(device_drains_as_blocks_are_freed)
{
        uint64_t of_one = must_malloc(a1, ONE, 3 * MIB), of_early = must_malloc(b1, 0, MIB), id;
        uint64_t of_other = must_malloc(a1, OTHER, MIB);

        id = drain(admin, "cuda:0");
        ck_assert_int_eq(peer_error(admin, id), 0); /* it is begun */
        ck_assert(a1->is_draining[ONE] && a1->is_draining[EARLY] && a1->is_draining[WHOLE]);
        ck_assert(!a1->is_draining[OTHER]);
        ck_assert_uint_eq(a1->n_trims, 1); /* trimmed at once */
        settle();
        ck_assert_str_eq(row(0)->state, "draining");
        ck_assert_uint_eq(gpus[0].live_bytes, 3 * E); /* nothing but what blocks lie in */
        ck_assert(broker_is_blocked(b));
        assert_refused(a1, peer_malloc(a1, ONE, MIB), EBUSY,
                       "device 'cuda:0' of partition 'one' is draining or drained");
        assert_refused(a1, peer_malloc_wait(a1, WHOLE, MIB, 60000), EBUSY, "until an operator resumes it");
        (void)must_malloc(a1, OTHER, MIB);
        free_and_settle(a1, of_one);
        ck_assert_uint_eq(gpus[0].live_bytes, E);
        ck_assert_str_eq(row(0)->state, "draining");
        free_and_settle(b1, of_early);
        ck_assert_str_eq(row(0)->state, "drained");
        ck_assert(gpus[0].is_closed);
        must_answer(a1);
        must_answer(b1);
        ck_assert(!broker_is_blocked(b));
        free_and_settle(a1, of_other);
}

/* Waiting requests, and the one whose extents are being made. */
TEST(waiting_requests_are_refused)
{
        uint64_t growing, waiting[300];

        (void)must_malloc(a1, ONE, 30 * MIB);
        for (size_t i = 0; i < 60; i++)
                waiting[i] = peer_malloc_wait(a1, ONE, 4 * MIB, 60000);
        settle();
        must_answer(a1);
        growing = peer_malloc(b1, 1, MIB);
        broker_turn(b); /* its memory is with the worker */
        ck_assert_int_eq(peer_error(b1, growing), -1);
        ck_assert_int_eq(peer_error(a1, waiting[59]), -1);
        must_drain("cuda:0");
        ck_assert_int_eq(peer_error(b1, growing), EBUSY);
        for (size_t i = 0; i < 60; i++)
                ck_assert_int_eq(peer_error(a1, waiting[i]), EBUSY);
        ck_assert_uint_eq(gpus[0].live_bytes, 15 * E);
        a1 = peer_free(a1); /* its process ends */
        settle();
        ck_assert_str_eq(row(0)->state, "drained");
        a1 = open_gpu_session(1, true);
}

/* Blocks that are shared stay, and may be attached. */
TEST(shared_blocks_stay)
{
        uint64_t block = must_malloc(a1, ONE, MIB), id;
        struct peer *other = open_gpu_session(1, true);

        ck_assert_int_eq(peer_error(a1, peer_publish(a1, block, "weights")), 0);
        must_drain("cuda:0");
        id = peer_attach(other, "weights", 0);
        settle();
        ck_assert_int_eq(peer_error(other, id), 0);
        free_and_settle(a1, block);
        ck_assert_str_eq(row(0)->state, "draining");
        free_and_settle(other, block);
        ck_assert_str_eq(row(0)->state, "drained");
        assert_refused(other, peer_attach(other, "weights", 0), ENOENT, "weights");
        peer_free(other);
        settle();
}

/* What becomes idle later is asked for, too, a few sessions at a time. */
TEST(trims_are_repeated_while_draining)
{
        uint64_t block = must_malloc(a1, ONE, MIB), now;
        struct peer *unauth[100];

        for (size_t i = 0; i < 100; i++)
                unauth[i] = open_gpu_session(1, true);
        must_drain("cuda:0");
        ck_assert_uint_eq(a1->n_trimmed, 1);
        command_tick(b, clock_ms()); /* the rest of the first round */
        command_tick(b, clock_ms());
        ck_assert_uint_eq(a1->n_trimmed, 1);
        now = clock_ms();
        command_tick(b, now + 2 * COMMAND_AGAIN_MS);
        ck_assert_uint_eq(a1->n_trimmed, 2);
        free_and_settle(a1, block);
        ck_assert_str_eq(row(0)->state, "drained");
        must_answer(a1);
        command_tick(b, now + 3 * COMMAND_AGAIN_MS);
        command_tick(b, now + 4 * COMMAND_AGAIN_MS);
        ck_assert_uint_eq(a1->n_trimmed, 2);
        ck_assert_ptr_null(b->devices[0].command);
        for (size_t i = 0; i < 100; i++)
                peer_free(unauth[i]);
        settle();
}

/* A session that starts while the device drains, and one without an events socket. */
TEST(draining_events_are_sent)
{
        struct peer *late, *old = peer_new(b, 1, false);

        old->has_no_events = true;
        ck_assert_int_eq(peer_error(old, peer_hello(old, "", "")), 0);
        must_drain("cuda:0");
        late = open_gpu_session(1, true);
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

/* ---- orders that meet ------------------------------------------------------- */

TEST(two_drains_and_two_resumes)
{
        struct peer *second = open_admin_session();
        uint64_t block = must_malloc(a1, ONE, MIB), ids[3];

        must_drain("cuda:0");
        ck_assert_int_eq(peer_error(second, drain(second, "cuda:0")), 0); /* it is what is wanted */
        must_answer(a1);
        ck_assert_uint_eq(a1->n_drains_told, 3);
        free_and_settle(a1, block);
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

/* The operator does not wait for the answer. */
TEST(operator_disconnects_while_draining)
{
        struct peer *second = open_admin_session();

        must_drain("cuda:0");
        (void)resume(second, "cuda:0");
        peer_free(second);
        settle();
        ck_assert_str_eq(row(0)->state, "ok");
        ck_assert_uint_eq(gpus[0].live_bytes, EARLY_BYTES);
}

/* Resumed before it was empty: the drain is taken back. */
TEST(resume_while_draining)
{
        uint64_t block = must_malloc(a1, EARLY, MIB);

        must_drain("cuda:0");
        ck_assert_uint_eq(gpus[0].live_bytes, E);
        must_resume("cuda:0");
        ck_assert_uint_eq(gpus[0].n_closes, 0);
        ck_assert_uint_eq(gpus[0].live_bytes, EARLY_BYTES);
        ck_assert_uint_eq(row(0)->bytes_reserved, EARLY_BYTES);
        (void)must_malloc(a1, EARLY, 14 * MIB);
        free_and_settle(a1, block);
        ck_assert_uint_eq(gpus[0].live_bytes, EARLY_BYTES);
}

/* Asked for while the worker closes it, and by another one when that is done. */
TEST(resume_right_after_drain)
{
        struct peer *second = open_admin_session();
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

/* ---- a device that is not what it was ---------------------------------------- */

static void assert_stays_drained(int error, const char *part)
{
        uint64_t id = resume(admin, "cuda:0");

        settle();
        assert_refused(admin, id, error, part);
        ck_assert(strstr(peer_reply(admin, id)->refusal->message, "device 'cuda:0' could not be resumed: "));
        ck_assert_str_eq(row(0)->state, "drained");
        ck_assert_uint_eq(gpus[0].n_live, 0);
        ck_assert_int_eq(peer_error(a1, peer_malloc(a1, ONE, MIB)), EBUSY);
        ck_assert(count_log(part));
}

TEST(resume_with_less_device_memory)
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
        (void)must_malloc(a1, ONE, MIB);
}

/* A GPU is lost, is reset, and works again. */
TEST(a_lost_device_comes_back)
{
        uint64_t block, id;

        gpus[0].foreign_bytes = 0;
        block = must_malloc(a1, ONE, MIB);
        (void)must_malloc(a1, OTHER, MIB);
        fake_device_fail_make(&gpus[0], 1, -ENODEV);
        id = peer_malloc(a1, ONE, 8 * MIB);
        settle();
        ck_assert_int_eq(peer_error(a1, id), ENODEV);
        ck_assert_str_eq(row(0)->state, "lost");
        assert_refused(admin, resume(admin, "cuda:0"), ENODEV, "is lost and still in use");
        must_drain("cuda:0");
        ck_assert_str_eq(row(0)->state, "draining");
        assert_refused(admin, resume(admin, "cuda:0"), ENODEV, "is lost and still in use");
        free_and_settle(a1, block);
        ck_assert_str_eq(row(0)->state, "drained");
        ck_assert_uint_eq(row(0)->bytes_unreclaimed, EARLY_BYTES + E);
        gpus[0].foreign_bytes = 0; /* as ever: it was reset */
        must_resume("cuda:0");
        ck_assert_str_eq(row(0)->state, "ok");
        ck_assert_uint_eq(row(0)->bytes_unreclaimed, 0);
        ck_assert_uint_eq(row(0)->bytes_reserved, EARLY_BYTES);
        (void)must_malloc(a1, ONE, 24 * MIB);
        (void)must_malloc(a1, EARLY, 16 * MIB);
}

TEST(a_lost_device_is_opened_when_it_is_empty)
{
        uint64_t block = must_malloc(a1, ONE, MIB), id;

        gpus[0].foreign_bytes = 0;
        fake_device_fail_make(&gpus[0], 1, -ENODEV);
        id = peer_malloc(a1, ONE, 8 * MIB);
        settle();
        ck_assert_int_eq(peer_error(a1, id), ENODEV);
        ck_assert_str_eq(row(0)->state, "lost");
        free_and_settle(a1, block);
        ck_assert_str_eq(row(0)->state, "ok");
        ck_assert(count_log("device 'cuda:0' (fake) is resumed"));
        ck_assert_uint_eq(row(0)->bytes_reserved, EARLY_BYTES);
        (void)must_malloc(a1, ONE, 24 * MIB);
}

static void end_keeper(void)
{
        gpus[0].has_ended = true;
        broker_note_ended(b);
        settle();
}

/* Nothing is asked of it: it is opened at once. One that ends again and again is opened later and later. */
TEST(a_device_whose_keeper_ends_is_lost_at_once)
{
        static const unsigned pauses_s[] = { 1, 2, 4, 8, 16, 32, 60, 60 };
        char line[64];

        gpus[0].foreign_bytes = 0;
        end_keeper();
        ck_assert_str_eq(row(0)->state, "ok");
        ck_assert_uint_eq(gpus[0].n_opens, 1);
        ck_assert_uint_eq(count_log("device 'cuda:0' (fake) is lost"), 1);
        for (unsigned i = 0; i < 8; i++) {
                end_keeper();
                ck_assert_str_eq(row(0)->state, "lost");
                snprintf(line, sizeof(line), "opened again in %u s", pauses_s[i]);
                ck_assert_uint_ge(count_log(line), 1);
                still_clock_pass(1000 * pauses_s[i] - 1);
                broker_tick(b);
                settle();
                ck_assert_uint_eq(gpus[0].n_opens, 1 + i);
                still_clock_pass(1);
                ck_assert(broker_is_blocked(b)); /* so there are ticks */
                broker_tick(b);
                settle();
                ck_assert_str_eq(row(0)->state, "ok");
                ck_assert_uint_eq(gpus[0].n_opens, 2 + i);
        }
        still_clock_pass(121000);
        end_keeper();
        ck_assert_str_eq(row(0)->state, "ok");
        (void)must_malloc(a1, ONE, 24 * MIB);
}

TEST(an_operator_does_not_wait_for_a_lost_device)
{
        gpus[0].foreign_bytes = 0;
        end_keeper();
        end_keeper();
        ck_assert_str_eq(row(0)->state, "lost");
        must_resume("cuda:0");
        ck_assert_str_eq(row(0)->state, "ok");
        end_keeper();
        ck_assert_str_eq(row(0)->state, "lost");
        must_drain("cuda:0");
        ck_assert_str_eq(row(0)->state, "drained");
        still_clock_pass(61000);
        broker_tick(b);
        settle();
        ck_assert_str_eq(row(0)->state, "drained");
}

/* A driver takes longer for its first call than for the others. */
TEST(a_slow_open_is_not_hung)
{
        must_drain("cuda:0");
        (void)resume(admin, "cuda:0");
        gpus[0].device.call_began_ns = clock_ns();
        still_clock_pass(30000);
        broker_note_hung(b);
        ck_assert_str_eq(row(0)->state, "drained");
        still_clock_pass(31000);
        broker_note_hung(b);
        ck_assert_str_eq(row(0)->state, "hung");
        gpus[0].device.call_began_ns = 0;
        settle();
        broker_note_hung(b);
        ck_assert_str_eq(row(0)->state, "ok");
        gpus[0].device.call_began_ns = clock_ns();
        still_clock_pass(5000);
        broker_note_hung(b);
        ck_assert_str_eq(row(0)->state, "hung");
        gpus[0].device.call_began_ns = 0;
        broker_note_hung(b);
}

static void turn(void)
{
        broker_turn(b);
        broker_poll(b);
}

/* An operator drains it while its preallocated memory is made, and resumes it while that is released. */
TEST(a_lost_device_is_drained_while_it_recovers)
{
        uint64_t id;

        gpus[0].foreign_bytes = 0;
        fake_device_fail_make(&gpus[0], 1, -ENODEV);
        id = peer_malloc(a1, ONE, 8 * MIB);
        while (gpus[0].n_opens == 0 || gpus[0].live_bytes == 0)
                turn();
        ck_assert_int_eq(peer_error(a1, id), ENODEV);
        for (int i = 0; i < 2; i++) {
                ck_assert_int_eq(peer_error(admin, drain(admin, "cuda:0")), 0);
                ck_assert_str_eq(row(0)->state, "draining");
        }
        while (gpus[0].live_bytes > 0 && !count_log("device 'cuda:0' is not resumed"))
                turn();
        ck_assert_uint_gt(gpus[0].live_bytes, 0);
        must_resume("cuda:0");
        ck_assert_str_eq(row(0)->state, "ok");
        ck_assert_uint_eq(row(0)->bytes_reserved, EARLY_BYTES);
}

/* If it cannot be opened it stays lost, and an operator can try again. */
TEST(a_lost_device_that_is_not_there)
{
        uint64_t id;

        gpus[0].foreign_bytes = 0;
        fake_device_fail_make(&gpus[0], 1, -ENODEV);
        gpus[0].open_error = -ENODEV;
        id = peer_malloc(a1, ONE, 8 * MIB);
        settle();
        ck_assert_int_eq(peer_error(a1, id), ENODEV);
        ck_assert_str_eq(row(0)->state, "lost");
        ck_assert(count_log("device 'cuda:0' could not be resumed"));
        id = peer_malloc(a1, ONE, MIB);
        ck_assert_int_eq(peer_error(a1, id), ENODEV);
        gpus[0].open_error = 0;
        must_resume("cuda:0");
        ck_assert_str_eq(row(0)->state, "ok");
        (void)must_malloc(a1, ONE, MIB);
}

/* Somebody still has memory of it: that stays charged, and what does not fit beside it is told. */
TEST(unreclaimed_memory_stays_charged)
{
        uint64_t block = must_malloc(a1, ONE, E), id;

        fake_device_fail_destroy(&gpus[0], 1, -EBUSY);
        free_and_settle(a1, block);
        a1 = peer_free(a1);
        settle();
        a1 = open_gpu_session(1, true);
        ck_assert_uint_eq(row(0)->bytes_unreclaimed, E);
        must_drain("cuda:0");
        ck_assert_str_eq(row(0)->state, "drained");
        ck_assert(count_log("are unreclaimed; processes may still have them mapped"));
        gpus[0].foreign_bytes = E;
        must_resume("cuda:0");
        ck_assert_uint_eq(row(0)->bytes_unreclaimed, E);
        ck_assert_uint_eq(row(0)->bytes_reserved, EARLY_BYTES + E);
        /* In a partition that is all made in advance: it cannot be whole. */
        fake_device_fail_destroy(&gpus[0], 1, -EBUSY);
        must_drain("cuda:0");
        gpus[0].foreign_bytes = 2 * E;
        id = resume(admin, "cuda:0");
        settle();
        assert_refused(admin, id, EDQUOT, "does not fit, because 2.0 MiB are");
        ck_assert_str_eq(row(0)->state, "drained");
        gpus[0].foreign_bytes = 0;
        must_resume("cuda:0");
        ck_assert_uint_eq(row(0)->bytes_unreclaimed, 0);
}

/* ---- beside other things ----------------------------------------------------- */

/* A config that is put in force meanwhile is what counts when it is resumed. */
TEST(a_reload_while_it_is_drained)
{
        static const char less[] = CONFIG("40MiB", "  - name: c\n"
                                                   "    match: {uid: 3}\n"
                                                   "    quotas: [{partition: one}]\n");
        const struct config_machine machine = { .look = gpus_find, .running = config, .serves = true };
        struct config *next;
        struct peer *c;

        must_drain("cuda:0");
        gpus[0].facts.bytes_total = 100 * MIB;
        ck_assert_int_eq(config_parse("test.yaml", less, strlen(less), &machine, stderr, &next), 0);
        ck_assert_int_eq(reload_config(b, next, false, stderr, stderr), 0);
        settle();
        ck_assert_str_eq(row(0)->state, "drained");
        c = open_gpu_session(3, true);
        ck_assert(c->is_draining[0]);
        ck_assert_int_eq(peer_error(c, peer_malloc(c, 0, MIB)), EBUSY);
        must_resume("cuda:0");
        (void)must_malloc(c, 0, MIB);
        ck_assert_uint_eq(gpus[0].live_bytes, EARLY_BYTES + E);
        peer_free(c);
        settle();
}

/* The daemon ends in each phase: teardown looks at what is left. */
LOOP_TEST(daemon_ends_while_draining, 8)
{
        (void)must_malloc(a1, ONE, MIB);
        drain(admin, "cuda:0");
        if (_i >= 1)
                broker_turn(b);
        if (_i >= 2)
                must_answer(a1);
        if (_i >= 3) {
                a1 = peer_free(a1);
                settle();
                (void)resume(admin, "cuda:0");
        }
        for (int i = 3; i < _i; i++)
                broker_poll(b);
}

/* Everything at random; the invariants are looked at after each step. */
LOOP_TEST(random_walk, 3)
{
        unsigned short random[3] = { 7, (unsigned short)_i, 30 };
        struct {
                struct peer *p;
                uint64_t id;
        } blocks[64] = { 0 };
        unsigned n_states[2] = { 0 };

        for (unsigned i = 0; i < 1500; i++) {
                size_t at = (size_t)nrand48(random) % 64;
                struct peer *p = nrand48(random) % 2 ? a1 : b1;
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
                        command_tick(b, clock_ms() + i * 500);
                        break;
                case 7:
                        for (size_t k = 0; k < 64; k++)
                                if (blocks[k].p)
                                        peer_free_block(blocks[k].p, blocks[k].id);
                        memset(blocks, 0, sizeof(blocks));
                        break;
                case 8:
                        while (p->n_trims > 0)
                                peer_answer(p, p->trims[0].sequence);
                        break;
                default:
                        if (blocks[at].p) {
                                peer_free_block(blocks[at].p, blocks[at].id);
                                blocks[at].p = NULL;
                                break;
                        }
                        id = peer_malloc(p, (uint32_t)(nrand48(random) % (p == a1 ? 4 : 2)), MIB);
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
                peer_forget_replies(a1);
                peer_forget_replies(b1);
                peer_forget_replies(admin);
        }
        ck_assert(n_states[0] > 20 && n_states[1] > 20);
}

/* ---- a device that does not empty mappings ------------------------------------- */

FIXTURE(sticky, NULL, NULL);

/* On a device that does not empty mappings: sessions let go first. */
TEST(sessions_release_extents_before_the_device_closes)
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
        a1 = open_gpu_session(1, true);
        admin = open_admin_session();
        blocks[0] = must_malloc(a1, 0, E);
        blocks[1] = must_malloc(a1, 1, E);
        for (int i = 0; i < 2; i++)
                free_and_settle(a1, blocks[i]);
        ck_assert_uint_eq(a1->n_retires, 0);
        id = drain(admin, "host");
        ck_assert_int_eq(peer_error(admin, id), 0);
        settle();
        ck_assert_str_eq(row(0)->state, "draining");
        ck_assert_uint_eq(row(0)->bytes_reserved, 2 * E);
        ck_assert_uint_eq(a1->n_retires, 2);
        /* Taken back meanwhile: what was asked for goes, and is made again when it is needed. */
        must_resume("host");
        ck_assert_uint_eq(row(0)->bytes_reserved, 5 * E);
        peer_retired_all(a1);
        settle();
        ck_assert_uint_eq(row(0)->bytes_reserved, 3 * E);
        (void)must_malloc(a1, 1, 8 * MIB);
        ck_assert_uint_eq(row(0)->bytes_reserved, 4 * E);
        id = drain(admin, "host");
        settle();
        ck_assert_str_eq(row(0)->state, "draining");
        a1 = peer_free(a1);
        settle();
        ck_assert_str_eq(row(0)->state, "drained");
        must_resume("host");
        ck_assert_uint_eq(row(0)->bytes_reserved, 4 * E);
        admin = peer_free(admin);
        b = peer_broker_free(b, config);
}
