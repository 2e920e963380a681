/* Standby memory: what is ready, what takes it, when it is dropped. On a GPU that fails on command; after each
 * extent that it makes it is compared with what its partitions may have.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/change.h"
#include "daemon/drain.h"
#include "tests/fake_device.h"
#include "tests/peer.h"
#include "tests/suite.h"
#include "tests/unit/still_clock.h"

#define MIB     (UINT64_C(1) << 20)
#define READY   (256 * MIB) /* 32 extents of 2 MiB, 16 of 4 MiB, 16 of 8 MiB, the largest of big */
#define N_READY 64u
#define LIMIT   (1024 * MIB)
#define OTHER   (128 * MIB)

#define CONFIG(standby, limit)                                                                               \
        "devices:\n"                                                                                         \
        "  - id: cuda:0\n"                                                                                   \
        "    headroom: 0\n" standby "    partitions:\n"                                                      \
        "      - {name: main, limit: " limit ", share: fd}\n"                                                \
        "      - {name: ipc, limit: 128MiB, share: cuda-ipc}\n"                                              \
        "tenants:\n"                                                                                         \
        "  - name: big\n"                                                                                    \
        "    match: {uid: 1}\n"                                                                              \
        "    quotas: [{partition: main, limit: " limit "}, {partition: ipc}]\n"                              \
        "  - name: small\n" /* all of its extents have 2 MiB */                                              \
        "    match: {uid: 2}\n"                                                                              \
        "    quotas: [{partition: main, limit: 128MiB}]\n"

static const char config_text[] = CONFIG("    standby: 256MiB\n", "1GiB");

static struct fake_device gpu;
static struct device_ops ops;
static const struct device_ops *fake;
static uint64_t most_bytes; /* that the GPU may have at any time */
static struct devices *devices;
static struct config *config;
static struct broker *b;
static struct peer *big, *small, *admin;
static int n_fds_before;

static int look(void *userdata, const char *id, struct config_gpu *ret, char *ret_sentence, size_t n_sentence)
{
        (void)userdata;
        (void)id;
        (void)ret_sentence;
        (void)n_sentence;
        *ret = (struct config_gpu){ .uuid = { 1 },
                                    .bytes_total = LIMIT + OTHER,
                                    .bytes_free = LIMIT + OTHER };
        return 0;
}

static int make(struct device *d, const struct device_supply *supply, enum device_share share,
                uint64_t n_bytes, struct device_extent *ret)
{
        int r = fake->make(d, supply, share, n_bytes, ret);

        ck_assert_uint_le(gpu.live_bytes, most_bytes);
        return r;
}

static struct peer *come_in(uid_t uid, bool is_admin)
{
        struct peer *p = peer_new(b, uid, is_admin);

        ck_assert_int_eq(peer_error(p, peer_hello(p, "", "")), 0);
        return p;
}

static void settle(void)
{
        const char *why = "";

        peer_settle(b);
        ck_assert_msg(broker_check(b, &why) == 0, "%s", why);
}

static uint64_t ready_bytes(void)
{
        return standby_bytes(b->devices[0].standby);
}

static uint64_t charged_bytes(void)
{
        return b->partitions[0].pool.charged_bytes;
}

static void start(const char *text)
{
        const struct config_machine machine = { .look = look };

        b = peer_broker_on(text, &machine, devices, &config);
        big = come_in(1, false);
        small = come_in(2, false);
        admin = come_in(0, true);
        settle();
}

static void stop(void)
{
        big = peer_free(big);
        small = peer_free(small);
        admin = peer_free(admin);
        settle();
        b = broker_free(b);
        config_free(config);
        ck_assert_uint_eq(gpu.n_live, 0);
}

static void setup(void)
{
        n_fds_before = suite_count_fds();
        ck_assert_int_eq(devices_new(&devices), 0);
        fake_device_init(&gpu, 2 * MIB);
        gpu.facts.bytes_total = LIMIT + OTHER;
        gpu.facts.uuid[0] = 1;
        fake = gpu.device.ops;
        ops = *fake;
        ops.make = make;
        gpu.device.ops = &ops;
        most_bytes = LIMIT + OTHER;
        ck_assert_int_eq(devices_put(devices, "cuda:0", &gpu.device), 0);
        start(config_text);
}

static void teardown(void)
{
        stop();
        devices = devices_free(devices);
        ck_assert_int_eq(suite_count_fds(), n_fds_before);
}

/* Until the reply is there, and no longer: nothing is made again after it. */
static const Bfcd__Reply *wait_for(struct peer *p, uint64_t id)
{
        const Bfcd__Reply *reply;

        while (!(reply = peer_reply(p, id)) && (broker_n_pending(b) > 0 || broker_is_due(b))) {
                broker_turn(b);
                if (!(reply = peer_reply(p, id)))
                        broker_poll(b);
        }
        ck_assert_ptr_nonnull(reply);
        return reply;
}

static void must_malloc(struct peer *p, uint32_t partition, uint64_t n_bytes)
{
        ck_assert_int_eq(wait_for(p, peer_malloc(p, partition, n_bytes))->body_case, BFCD__REPLY__BODY_BLOCK);
}

static const Bfcd__DeviceRow *device_row(void)
{
        Bfcd__Request r = BFCD__REQUEST__INIT;
        Bfcd__List body = BFCD__LIST__INIT;
        uint64_t id;

        body.kind = BFCD__LIST__KIND__STATUS;
        r.body_case = BFCD__REQUEST__BODY_LIST;
        r.list = &body;
        ck_assert_int_eq(peer_send(admin, &r, &id), 0);
        return peer_reply(admin, id)->list->status->devices[0];
}

/* ---- the tests ------------------------------------------------------------ */

START_TEST(it_is_ready_after_the_start)
{
        ck_assert_uint_eq(gpu.n_live, N_READY);
        ck_assert_uint_eq(gpu.live_bytes, READY);
        ck_assert_uint_eq(ready_bytes(), READY);
        ck_assert_uint_eq(device_row()->bytes_standby, READY);
        ck_assert_uint_eq(device_row()->bytes_reserved, 0);
        ck_assert_uint_eq(charged_bytes(), 0);
        ck_assert_uint_eq(broker_keeps_until(b), 0);
}
END_TEST

/* Nothing is made for it. Multiples of 8 MiB are placed in the largest extents, others as low as possible. */
START_TEST(a_growth_takes_it)
{
        const uint64_t sizes[] = { 2 * MIB, 62 * MIB, 128 * MIB, 60 * MIB, 4 * MIB };
        uint64_t left = READY;

        for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
                /* What was taken is not made again meanwhile: that would be for want of room. */
                standby_pause(b->devices[0].standby);
                must_malloc(big, 0, sizes[i]);
                left -= sizes[i];
                ck_assert_uint_eq(gpu.n_makes, N_READY);
                ck_assert_uint_eq(ready_bytes(), left);
        }
        ck_assert_uint_eq(charged_bytes(), READY);
        ck_assert_uint_eq(gpu.live_bytes, READY);
        ck_assert_uint_gt(broker_keeps_until(b), 0);
        still_clock_pass(60000);
        broker_expire_kept(b);
        settle();
        ck_assert_uint_eq(ready_bytes(), READY);
        ck_assert_uint_eq(gpu.live_bytes, 2 * READY);
        ck_assert_uint_eq(gpu.n_makes, 2 * N_READY);
        ck_assert_uint_eq(broker_keeps_until(b), 0);
}
END_TEST

/* The sizes of small's extents are those of the first 64 MiB; it makes the rest beside them. */
START_TEST(a_growth_takes_what_fits)
{
        standby_pause(b->devices[0].standby);
        must_malloc(small, 0, 128 * MIB);
        ck_assert_uint_eq(gpu.n_makes, N_READY + 32);
        ck_assert_uint_eq(ready_bytes(), READY - 64 * MIB);
}
END_TEST

/* Extents of cuda-ipc are not shared in that way. */
START_TEST(another_kind_of_extent_is_made)
{
        must_malloc(big, 1, 32 * MIB);
        ck_assert_uint_eq(gpu.n_makes, N_READY + 1);
        settle();
        ck_assert_uint_eq(ready_bytes(), READY);
}
END_TEST

/* What is charged and what is ready is never more than the partition's limit: see make(). */
START_TEST(it_gives_way)
{
        most_bytes = LIMIT;
        for (unsigned i = 0; i < 3; i++)
                must_malloc(big, 0, 256 * MIB);
        settle();
        ck_assert_uint_eq(ready_bytes(), 256 * MIB);
        must_malloc(small, 0, 128 * MIB);
        settle();
        ck_assert_uint_eq(charged_bytes(), LIMIT - 128 * MIB);
        ck_assert_uint_le(ready_bytes(), 128 * MIB);
        ck_assert_uint_ge(ready_bytes(), 120 * MIB);
        must_malloc(big, 0, 128 * MIB);
        settle();
        ck_assert_uint_eq(charged_bytes(), LIMIT);
        ck_assert_uint_eq(ready_bytes(), 0);
        ck_assert_uint_eq(gpu.live_bytes, LIMIT);
        small = peer_free(small);
        settle();
        ck_assert_uint_eq(charged_bytes(), LIMIT - 128 * MIB);
        ck_assert_uint_eq(ready_bytes(), 128 * MIB);
        small = come_in(2, false);
}
END_TEST

/* Growths of all sizes, one after the other and side by side. */
START_TEST(never_above_the_limit)
{
        uint64_t state = 1;

        most_bytes = LIMIT;
        for (unsigned i = 0; i < 300; i++) {
                struct peer **p;

                state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
                p = state >> 63 ? &big : &small;
                if ((state >> 40) % 8 == 0) {
                        *p = peer_free(*p);
                        *p = come_in(p == &big ? 1 : 2, false);
                } else {
                        (void)peer_malloc(*p, 0, (1 + (state >> 33) % 90) * MIB);
                }
                if ((state >> 50) % 2)
                        settle();
                else
                        broker_poll(b);
                ck_assert_uint_le(gpu.live_bytes, LIMIT);
        }
        settle();
        ck_assert_uint_eq(gpu.live_bytes, charged_bytes() + ready_bytes());
}
END_TEST

/* The device has less than it is thought to have: a growth has what is ready, and is not refused. */
START_TEST(a_device_that_runs_short)
{
        static const int errors[] = { -ENOMEM, -ENOBUFS, -ENOSPC, -EMFILE };

        for (size_t i = 0; i < sizeof(errors) / sizeof(errors[0]); i++) {
                unsigned n_makes = gpu.n_makes;

                fake_device_fail_make(&gpu, 1, errors[i]);
                must_malloc(small, 0, 126 * MIB);
                settle();
                ck_assert_uint_eq(gpu.n_makes, n_makes + 32);
                ck_assert_uint_eq(ready_bytes(), 0);
                ck_assert_uint_eq(gpu.live_bytes, 126 * MIB);
                ck_assert_uint_gt(broker_keeps_until(b), 0);
                small = peer_free(small);
                settle();
                ck_assert_uint_eq(gpu.live_bytes, 0);
                still_clock_pass(60000);
                broker_expire_kept(b);
                settle();
                ck_assert_uint_eq(ready_bytes(), READY);
                small = come_in(2, false);
        }
        fake_device_fail_make(&gpu, 1, -EIO); /* which it does not help against */
        ck_assert_int_eq(wait_for(small, peer_malloc(small, 0, 128 * MIB))->body_case,
                         BFCD__REPLY__BODY_REFUSAL);
        settle();
        ck_assert_uint_eq(ready_bytes(), READY);
}
END_TEST

/* A failure in the background fails no request; it is tried again later. */
START_TEST(it_cannot_be_made)
{
        must_malloc(big, 0, 14 * MIB);
        fake_device_fail_make(&gpu, 2, -ENOMEM);
        settle();
        ck_assert_uint_eq(ready_bytes(), READY - 12 * MIB);
        must_malloc(big, 0, 2 * MIB);
        still_clock_pass(60000);
        broker_expire_kept(b);
        settle();
        ck_assert_uint_eq(ready_bytes(), READY);
}
END_TEST

START_TEST(a_lost_device)
{
        gpu.stays_lost = true;
        fake_device_fail_make(&gpu, 1, -ENODEV);
        ck_assert_int_eq(wait_for(small, peer_malloc(small, 0, 128 * MIB))->body_case,
                         BFCD__REPLY__BODY_REFUSAL);
        settle();
        ck_assert_uint_eq(ready_bytes(), 0);
        ck_assert_str_eq(device_row()->state, "lost");
}
END_TEST

START_TEST(a_drain)
{
        ck_assert_int_eq(drain_begin(b, &b->devices[0]), 0);
        for (unsigned i = 0; i < 4; i++) {
                broker_turn(b);
                settle();
        }
        ck_assert_str_eq(device_row()->state, "drained");
        ck_assert_uint_eq(gpu.n_live, 0);
        ck_assert(gpu.is_closed);
        ck_assert_int_eq(drain_resume(b, &b->devices[0], NULL), 0);
        settle();
        ck_assert_str_eq(device_row()->state, "ok");
        ck_assert_uint_eq(ready_bytes(), READY);
}
END_TEST

static void reload(const char *text)
{
        struct config_machine machine = { .look = look, .running = b->config };
        struct config *next = NULL;
        char *said = NULL;
        size_t n_said;
        FILE *f = open_memstream(&said, &n_said);

        ck_assert_int_eq(config_parse("test", text, strlen(text), &machine, f, &next), 0);
        ck_assert_int_eq(change_config(b, next, false, f, f), 0);
        fclose(f);
        free(said);
        settle();
}

START_TEST(a_reload_changes_it)
{
        reload(CONFIG("    standby: 64MiB\n", "1GiB"));
        ck_assert_uint_eq(ready_bytes(), 64 * MIB);
        ck_assert_uint_eq(gpu.n_live, 20);
        reload(CONFIG("", "1GiB"));
        ck_assert_uint_eq(gpu.n_live, 0);
        reload(CONFIG("    standby: 256MiB\n", "256MiB")); /* with another limit other sizes */
        ck_assert_uint_eq(gpu.n_live, 128);
        ck_assert_uint_eq(ready_bytes(), 256 * MIB);
        reload(config_text);
        ck_assert_uint_eq(gpu.n_live, N_READY);
        ck_assert_uint_eq(ready_bytes(), READY);
}
END_TEST

START_TEST(an_end_while_it_is_made)
{
        must_malloc(big, 0, 64 * MIB);
        ck_assert_uint_gt(broker_n_pending(b), 0);
}
END_TEST

int main(void)
{
        Suite *suite = suite_create("standby");
        TCase *t = tcase_create("standby");

        tcase_set_timeout(t, 60);
        tcase_add_checked_fixture(t, setup, teardown);
        tcase_add_test(t, it_is_ready_after_the_start);
        tcase_add_test(t, a_growth_takes_it);
        tcase_add_test(t, a_growth_takes_what_fits);
        tcase_add_test(t, another_kind_of_extent_is_made);
        tcase_add_test(t, it_gives_way);
        tcase_add_test(t, never_above_the_limit);
        tcase_add_test(t, a_device_that_runs_short);
        tcase_add_test(t, it_cannot_be_made);
        tcase_add_test(t, a_lost_device);
        tcase_add_test(t, a_drain);
        tcase_add_test(t, a_reload_changes_it);
        tcase_add_test(t, an_end_while_it_is_made);
        suite_add_tcase(suite, t);
        return suite_run(suite);
}
