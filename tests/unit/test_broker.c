/* Sessions when a device fails: it is lost for all of its partitions and for no others. Unreclaimed
 * memory stays charged, is listed and logged. On devices that fail on command.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/suite.h"
#include "tests/unit/gpus.h"
#include "tests/unit/still_clock.h"
#include "daemon/session/session_states.h"

static const char config_text[] =
        "devices:\n"
        "  - id: cuda:0\n"
        "    headroom: 0\n"
        "    partitions:\n"
        "      - {name: one, limit: 50%, share: fd}\n"
        "      - {name: two, limit: 50%, share: cuda-ipc}\n"
        "  - id: cuda:1\n"
        "    headroom: 0\n"
        "    partitions: [{name: other, limit: 100%, share: fd}]\n"
        "  - id: host\n"
        "    size: 8MiB\n"
        "    partitions: [{name: main, limit: 100%}]\n"
        "tenants:\n"
        "  - name: a\n"
        "    match: {uid: 1}\n"
        "    quotas: [{partition: one}, {partition: two}, {partition: other}, {partition: main}]\n"
        "  - name: b\n"
        "    match: {uid: 2}\n"
        "    quotas: [{partition: other}, {partition: one}]\n";

static void setup(void)
{
        gpus_start(config_text, false);
}

static void teardown(void)
{
        gpus_end();
        for (size_t i = 0; i < 2; i++)
                ck_assert(gpus[i].device.is_ending); /* no extent was emptied for the next user */
}

FIXTURE(devices, setup, teardown);

static const Bfcd__DeviceRow *device_row(size_t i)
{
        const Bfcd__Status *s = list_page(admin, BFCD__LIST__KIND__STATUS, 0)->status;

        ck_assert_uint_eq(s->n_devices, 3);
        return s->devices[i];
}

static void assert_lost(const struct peer *p, uint64_t id, const char *sentence)
{
        ck_assert_int_eq(peer_error(p, id), ENODEV);
        ck_assert_str_eq(peer_reply(p, id)->refusal->message, sentence);
}

#define ONE_IS_LOST                                                                                          \
        "device 'cuda:0' of partition 'one' is lost, and so is its memory; free "                            \
        "the blocks that are there: the device is opened again when the last one is freed"
#define TWO_IS_LOST                                                                                          \
        "device 'cuda:0' of partition 'two' is lost, and so is its memory; free "                            \
        "the blocks that are there: the device is opened again when the last one is freed"

/* ---- what is told of devices ---------------------------------------------- */

TEST(each_device_is_opened_once)
{
        ck_assert_uint_eq(b->n_devices, 3);
        ck_assert_ptr_eq(b->partitions[0].device, &gpus[0].device);
        ck_assert_ptr_eq(b->partitions[1].device, &gpus[0].device);
        ck_assert_ptr_eq(b->partitions[0].worker, b->partitions[1].worker);
        ck_assert_ptr_eq(b->partitions[2].device, &gpus[1].device);
        ck_assert_ptr_ne(b->partitions[0].worker, b->partitions[2].worker);
        ck_assert_int_eq(b->partitions[0].share, DEVICE_SHARE_FD);
        ck_assert_int_eq(b->partitions[1].share, DEVICE_SHARE_CUDA_IPC);
        ck_assert_int_eq(devices_put(devices, "host", &gpus[0].device), -EEXIST);
}

TEST(hello_names_the_devices_of_partitions)
{
        const Bfcd__HelloReply *hello = peer_reply(a1, 1)->hello;
        const Bfcd__DeviceRow *row = device_row(0);

        ck_assert_uint_eq(hello->n_partitions, 4);
        ck_assert_str_eq(hello->partitions[0]->share, "fd");
        ck_assert_str_eq(hello->partitions[1]->share, "cuda-ipc");
        ck_assert_uint_eq(hello->partitions[1]->device_uuid.len, 16);
        ck_assert_uint_eq(hello->partitions[1]->device_uuid.data[1], '0');
        ck_assert_uint_eq(hello->partitions[2]->device_uuid.data[1], '1');
        ck_assert_uint_eq(hello->partitions[3]->device_uuid.len, 0);
        ck_assert_str_eq(hello->partitions[3]->share, "fd");
        ck_assert_str_eq(row->name, "fake");
        ck_assert_uint_eq(row->uuid.len, 16);
        ck_assert_uint_eq(row->bytes_total, 128 * MIB);
        ck_assert_str_eq(row->state, "ok");
        ck_assert_uint_eq(device_row(2)->uuid.len, 0);
}

/* The index is the tenant's own: `one` is a's first and b's second. */
TEST(extent_message_has_its_partition)
{
        struct {
                struct peer *peer;
                uint32_t partition;
        } cases[] = { { a1, 0 }, { a1, 2 }, { a1, 3 }, { b1, 1 }, { b1, 0 } };

        for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
                struct peer *p = cases[i].peer;
                size_t n_before = p->n_replies, n_seen = 0;

                must_malloc(p, cases[i].partition, 5 * MIB);
                for (size_t k = n_before; k < p->n_replies; k++) {
                        const Bfcd__Reply *reply = p->replies[k];

                        for (size_t e = 0;
                             reply->body_case == BFCD__REPLY__BODY_EXTENTS && e < reply->extents->n_extents;
                             e++, n_seen++)
                                ck_assert_uint_eq(reply->extents->extents[e]->partition, cases[i].partition);
                }
                ck_assert_uint_gt(n_seen, 0);
        }
}

/* Where the driver chooses addresses, extents come by a handle and are regions. */
TEST(extents_come_by_handle)
{
        const Bfcd__Extent *e = NULL;
        size_t n_before = a1->n_replies;
        uint64_t region_id;

        must_malloc(a1, 1, 20 * MIB);
        must_malloc(a1, 1, MIB);
        must_malloc(a1, 1, MIB); /* in an extent that the client knows */
        for (size_t k = n_before, n_seen = 0; k < a1->n_replies; k++) {
                const Bfcd__Reply *reply = a1->replies[k];

                if (reply->body_case == BFCD__REPLY__BODY_EXTENTS) {
                        ck_assert_uint_eq(reply->extents->n_extents, 1);
                        ck_assert(!e || reply->extents->extents[0]->region_id > e->region_id);
                        e = reply->extents->extents[0];
                        ck_assert_uint_eq(e->handle.len, DEVICE_HANDLE_BYTES);
                        ck_assert_mem_eq(e->handle.data, "fake", 4);
                        ck_assert_uint_eq(e->handle.data[4], ++n_seen); /* the call that made it */
                        ck_assert_uint_eq(e->offset, 0);
                        ck_assert_uint_eq(e->n_bytes, n_seen == 1 ? 20 * MIB : 32 * MIB);
                        ck_assert_uint_eq(e->region_bytes, e->n_bytes);
                        ck_assert_uint_eq(e->region_id, ARENA_REGION_OF_EXTENT | e->extent_id);
                        ck_assert_uint_eq(e->partition, 1);
                } else if (reply->body_case == BFCD__REPLY__BODY_BLOCK) {
                        region_id = reply->block->region_id;
                        ck_assert(e && region_id == e->region_id);
                }
        }
        ck_assert_uint_eq(gpus[0].n_makes, 2);
}

/* Only file descriptors keep a session that has ended: nobody has to read a handle. */
TEST(handles_leave_nothing_in_flight)
{
        struct peer *p = peer_new(b, 1, false), *q = peer_new(b, 2, false);

        p->has_no_events = q->has_no_events = true; /* they have sockets */
        say_hello(p);
        must_malloc(p, 1, MIB);
        ck_assert(!session_has_fds_in_flight(p->session));
        must_malloc(p, 0, MIB);
        must_malloc(p, 1, 32 * MIB); /* one more by a handle, after one by an fd */
        ck_assert(session_has_fds_in_flight(p->session));
        peer_free(p);

        say_hello(q);
        must_malloc(q, 1, MIB);
        ck_assert_int_eq(session_hang_up(q->session, NULL), 1);
        session_close(q->session, "test");
        ck_assert_int_eq(session_reap(q->session, 100), SESSION_LINGERS);
        session_end_linger(q->session);
        ck_assert_int_eq(session_reap(q->session, 100), 0);
        peer_free(q);
}

TEST(missing_device)
{
        struct broker_options options = { .config = config, .devices = devices, .inline_workers = true };
        struct broker *none = NULL;
        char sentence[512] = "";

        gpus[1].is_lost = true;
        ck_assert_int_eq(broker_new(&options, &none, sentence, sizeof(sentence)), -ENODEV);
        gpus[1].is_lost = false;
        ck_assert_ptr_null(none);
        ck_assert_str_eq(sentence, "device cuda:1: the device does not respond");
}

/* ---- lost ------------------------------------------------------------------ */

/* The nth memory that the device is asked for, while others wait for theirs. */
LOOP_TEST(lost_while_growing, 3)
{
        uint64_t kept = must_malloc(a1, 0, MIB), first, second, third, fourth, fifth;

        fake_device_fail_make(&gpus[0], (unsigned)_i + 1, -ENODEV);
        first = peer_malloc(a1, 0, 12 * MIB); /* six extents of 2 MiB, or three of 4 */
        second = peer_malloc(a1, 0, 12 * MIB);
        third = peer_malloc(b1, 1, 12 * MIB);
        fourth = peer_malloc(a1, 1, 12 * MIB);
        fifth = peer_malloc(a1, 2, 12 * MIB);
        peer_settle(b);
        assert_lost(a1, first, ONE_IS_LOST);
        assert_lost(a1, second, ONE_IS_LOST);
        assert_lost(b1, third, ONE_IS_LOST);
        assert_lost(a1, fourth, TWO_IS_LOST);
        ck_assert_int_eq(peer_error(a1, fifth), 0);

        assert_lost(b1, peer_malloc(b1, 1, 1), ONE_IS_LOST); /* at once */
        must_malloc(b1, 0, MIB);
        must_malloc(a1, 3, MIB);
        ck_assert_str_eq(device_row(0)->state, "lost");
        ck_assert_str_eq(device_row(1)->state, "ok");
        ck_assert_str_eq(device_row(2)->state, "ok");
        ck_assert_uint_eq(count_log("is lost: its partitions refuse all requests"), 1);
        ck_assert_uint_eq(count_log("device 'cuda:0' (fake) is lost"), 1);
        ck_assert_uint_eq(count_log("are unreclaimed"), 0);             /* that goes without saying */
        ck_assert_int_eq(peer_error(a1, peer_free_block(a1, kept)), 0); /* the last one: it is opened again */
        peer_settle(b);
        ck_assert_str_eq(device_row(0)->state, "ok");
        must_malloc(b1, 1, 12 * MIB);
}

/* Blocks that are there stay, and can be given back. */
TEST(lost_while_giving_back)
{
        uint64_t kept = must_malloc(a1, 1, MIB);

        (void)must_malloc(b1, 1, 6 * MIB);
        fake_device_fail_destroy(&gpus[0], 2, -ENODEV);
        b1 = peer_free(b1); /* the last of its quota: its extents go back */
        peer_settle(b);
        ck_assert_str_eq(device_row(0)->state, "lost");
        assert_lost(a1, peer_malloc(a1, 0, 64 * MIB), ONE_IS_LOST);
        assert_lost(a1, peer_malloc(a1, 1, 256), TWO_IS_LOST);
        ck_assert_uint_gt(device_row(0)->bytes_unreclaimed, 0);
        ck_assert_int_eq(peer_error(a1, peer_free_block(a1, kept)), 0);
        peer_settle(b);
        ck_assert_uint_eq(count_log("is lost: its partitions"), 1);
        b1 = open_session(2);
        must_malloc(b1, 0, MIB);
}

/* A request that waits for a closing session is refused at once. */
TEST(lost_while_others_wait)
{
        struct peer *closing = open_session(1);
        uint64_t waiting, growing;

        (void)must_malloc(closing, 1, 50 * MIB);
        ck_assert_int_eq(session_hang_up(closing->session, NULL), 1);
        session_close(closing->session, "test");
        waiting = peer_malloc(a1, 1, 50 * MIB);
        peer_settle(b);
        ck_assert_int_eq(peer_error(a1, waiting), -1);
        fake_device_fail_make(&gpus[0], 1, -ENODEV);
        growing = peer_malloc(a1, 0, MIB);
        peer_settle(b);
        assert_lost(a1, growing, ONE_IS_LOST);
        assert_lost(a1, waiting, TWO_IS_LOST);
        closing = peer_free(closing);
}

/* ---- unreclaimed memory ---------------------------------------------------- */

TEST(unreclaimed_memory_stays_charged_and_is_listed)
{
        const Bfcd__ListReply *rows;
        uint64_t extent_bytes;

        (void)must_malloc(b1, 1, 6 * MIB);
        extent_bytes = gpus[0].live_bytes / gpus[0].n_live;
        fake_device_fail_destroy(&gpus[0], 1, -EBUSY);
        b1 = peer_free(b1);
        peer_settle(b);
        ck_assert_uint_eq(gpus[0].n_live, 0);
        ck_assert_uint_eq(device_row(0)->bytes_unreclaimed, extent_bytes);
        ck_assert_uint_eq(device_row(0)->bytes_reserved, extent_bytes);
        ck_assert_uint_eq(device_row(1)->bytes_unreclaimed, 0);
        ck_assert_str_eq(device_row(0)->state, "ok");
        rows = list_page(admin, BFCD__LIST__KIND__PARTITIONS, 0);
        ck_assert_uint_eq(rows->partitions[0]->stats->bytes_unreclaimed, extent_bytes);
        ck_assert_uint_eq(rows->partitions[1]->stats->bytes_unreclaimed, 0);
        rows = list_page(admin, BFCD__LIST__KIND__TENANTS, 0);
        ck_assert_uint_eq(rows->n_tenants, 6);
        for (size_t i = 0; i < rows->n_tenants; i++) {
                bool is_its = strcmp(rows->tenants[i]->tenant, "b") == 0 &&
                              strcmp(rows->tenants[i]->partition, "one") == 0;

                ck_assert_uint_eq(rows->tenants[i]->stats->bytes_unreclaimed, is_its ? extent_bytes : 0);
                ck_assert_uint_eq(rows->tenants[i]->stats->bytes_reserved, is_its ? extent_bytes : 0);
        }
        (void)must_malloc(a1, 0, MIB);
        ck_assert_uint_eq(count_log("did not return memory"),
                          0); /* a process may reference it for a moment */
        b1 = open_session(2);

        /* It is asked for, and what others hold is the most that is still away. */
        ck_assert(broker_is_blocked(b));
        for (int i = 0; i < 3; i++) {
                const uint64_t left = i == 0 ? extent_bytes : i == 1 ? 2 * MIB : 0;

                gpus[0].foreign_bytes = left;
                b->unreclaimed.check_ms = 0;
                broker_tick(b);
                broker_tick(b); /* once a second: this one asks nothing */
                ck_assert_uint_eq(broker_n_pending(b), 1);
                peer_settle(b);
                ck_assert_uint_eq(device_row(0)->bytes_unreclaimed, left);
                ck_assert_uint_eq(
                        count_log("device 'cuda:0' did not return memory of tenant 'b' in partition 'one'"),
                        1);
        }
        ck_assert(!broker_is_blocked(b));
        b->unreclaimed.check_ms = 0;
        broker_tick(b);
        ck_assert_uint_eq(broker_n_pending(b), 0);
}

/* The device has it when it is asked for the first time, a second later. */
TEST(briefly_referenced_memory_is_not_logged)
{
        (void)must_malloc(b1, 1, 6 * MIB);
        fake_device_fail_destroy(&gpus[0], 1, -EBUSY);
        b1 = peer_free(b1);
        peer_settle(b);
        ck_assert_uint_gt(device_row(0)->bytes_unreclaimed, 0);
        gpus[0].foreign_bytes = 0;
        broker_tick(b);
        ck_assert_uint_eq(broker_n_pending(b), 0);
        b->unreclaimed.check_ms = 0;
        broker_tick(b);
        peer_settle(b);
        ck_assert_uint_eq(device_row(0)->bytes_unreclaimed, 0);
        ck_assert_uint_eq(count_log("return"), 0);
        b1 = open_session(2);
}

/* Processes have the extents themselves, which are looked at once a second, so many of a tenant. */
TEST(kept_extents_are_unreclaimed_after_a_second)
{
        uint64_t n_bytes;

        (void)must_malloc(b1, 1, 6 * MIB);
        n_bytes = gpus[0].live_bytes;
        gpus[0].is_open_elsewhere = true;
        b1 = peer_free(b1);
        peer_settle(b);
        for (unsigned i = 0; i < 3; i++) {
                unsigned n_looks = gpus[0].n_looks;

                ck_assert_uint_eq(gpus[0].live_bytes, n_bytes);
                ck_assert_uint_eq(device_row(0)->bytes_reserved, n_bytes);
                ck_assert_uint_eq(device_row(0)->bytes_unreclaimed, i == 0 ? 0 : n_bytes);
                ck_assert_uint_eq(device_row(0)->bytes_pending, i == 0 ? n_bytes : 0);
                ck_assert_uint_eq(count_log("did not return memory of tenant 'b' in partition 'one'"), i > 0);
                ck_assert(broker_is_blocked(b));
                still_clock_pass(1000);
                gpus[0].is_open_elsewhere = i < 2;
                broker_tick(b);
                broker_check_unreclaimed(b); /* while the worker looks */
                ck_assert_uint_eq(b->unreclaimed.n, 1);
                peer_settle(b);
                broker_tick(b); /* once a second: this one looks at nothing */
                ck_assert_uint_eq(broker_n_pending(b), 0);
                ck_assert_uint_eq(gpus[0].n_looks > n_looks, i < 2);
        }
        ck_assert_uint_eq(gpus[0].live_bytes, 0);
        ck_assert_uint_eq(device_row(0)->bytes_reserved, 0);
        ck_assert_uint_eq(device_row(0)->bytes_unreclaimed, 0);
        ck_assert(!broker_is_blocked(b));
        b1 = open_session(2);
}

/* A fall of others' bytes counts for one of the tenants, whose memory may have come back, and only once. */
TEST(a_fall_of_others_bytes_is_credited_once)
{
        uint64_t both;

        (void)must_malloc(b1, 1, 6 * MIB);
        (void)must_malloc(a1, 0, 6 * MIB);
        gpus[0].foreign_bytes = GIB;
        fake_device_fail_destroy(&gpus[0], 1, -EBUSY);
        b1 = peer_free(b1);
        peer_settle(b);
        fake_device_fail_destroy(&gpus[0], 1, -EBUSY);
        a1 = peer_free(a1);
        peer_settle(b);
        both = device_row(0)->bytes_unreclaimed;
        for (int i = 0; i < 3; i++) { /* the first fall is as large as one of them */
                gpus[0].foreign_bytes -= i == 0 ? both / 2 : i == 1 ? 0 : GIB / 2;
                b->unreclaimed.check_ms = 0;
                broker_tick(b);
                peer_settle(b);
                ck_assert_uint_eq(device_row(0)->bytes_unreclaimed, i < 2 ? both / 2 : 0);
        }
        a1 = open_session(1);
        b1 = open_session(2);
}

static void setup_large(void)
{
        gpu_bytes = 16 * GIB;
        setup();
}

FIXTURE(large_devices, setup_large, teardown);

/* A process that keeps much makes the worker look no more often, and all are looked at in turns. */
TEST(so_many_kept_extents_of_a_tenant_are_looked_at)
{
        enum { N_LOOKS = 256 };
        unsigned n, n_looks;

        for (unsigned i = 0; i < 340; i++)
                (void)must_malloc(b1, 0, 48 * MIB);
        n = gpus[1].n_live;
        ck_assert_uint_gt(n, N_LOOKS);
        gpus[1].is_open_elsewhere = true;
        b1 = peer_free(b1);
        peer_settle(b);
        ck_assert_uint_eq(gpus[1].n_looks, n);
        for (unsigned i = 0; i < 2; i++) {
                n_looks = gpus[1].n_looks;
                still_clock_pass(1000);
                broker_tick(b);
                peer_settle(b);
                ck_assert_uint_ge(gpus[1].n_looks - n_looks, N_LOOKS);
                ck_assert_uint_le(gpus[1].n_looks - n_looks, N_LOOKS + 32);
                ck_assert_uint_eq(device_row(1)->bytes_unreclaimed, gpus[1].live_bytes); /* also the others */
        }
        gpus[1].is_open_elsewhere = false;
        for (unsigned i = 0; i * N_LOOKS < n; i++) {
                still_clock_pass(1000);
                broker_tick(b);
                peer_settle(b);
        }
        ck_assert_uint_eq(gpus[1].n_live, 0);
        b1 = open_session(2);
}

/* ---- what a turn of the loop costs ------------------------------------------ */

#define N_TENANTS 100u

static char *many_tenants(void)
{
        char *text = NULL;
        size_t n_text;
        FILE *f = open_memstream(&text, &n_text);

        ck_assert_ptr_nonnull(f);
        fputs("devices:\n"
              "  - id: host\n"
              "    size: 64MiB\n"
              "    partitions: [{name: one, limit: 32MiB}, {name: two, limit: 32MiB}]\n"
              "tenants:\n",
              f);
        for (unsigned i = 1; i <= N_TENANTS; i++)
                fprintf(f,
                        "  - {name: t%u, match: {uid: %u}, quotas: [{partition: one}, {partition: two}]}\n",
                        i, i);
        fclose(f);
        return text;
}

FIXTURE(turns, NULL, NULL);

/* What workers have done, and looks at destroyed extents, cost nothing for tenants that they are not about. */
TEST(a_turn_visits_quotas_that_changed)
{
        char *text = many_tenants();
        struct config *c;
        struct broker *unauth = peer_broker(text, &c);
        struct peer *p = peer_new(unauth, 1, false);
        uint64_t n_visits;

        ck_assert_int_eq(peer_error(p, peer_hello(p, "", "")), 0);
        peer_settle(unauth);
        (void)peer_malloc(p, 0, MIB); /* at all of them, once */
        peer_settle(unauth);
        n_visits = unauth->changes.n_visits;
        for (unsigned i = 0; i < 5; i++) {
                uint64_t id = peer_malloc(p, i % 2, MIB);

                peer_settle(unauth);
                ck_assert_int_eq(peer_error(p, id), 0);
        }
        p = peer_free(p);
        peer_settle(unauth);
        ck_assert_uint_gt(unauth->changes.n_visits, n_visits);
        ck_assert_uint_le(unauth->changes.n_visits - n_visits, 40);
        peer_broker_free(unauth, c);
        free(text);
}
