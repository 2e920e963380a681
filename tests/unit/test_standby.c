/* Standby memory: what is ready, what takes it, when it is dropped. On a GPU that fails on command; after each
 * extent that it makes it is compared with what its partitions may have.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/memory/change.h"
#include "daemon/memory/drain.h"
#include "tests/fake_device.h"
#include "tests/suite.h"
#include "tests/unit/sessions.h"
#include "tests/unit/still_clock.h"

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
static struct peer *big, *small, *admin;

static int look(void *userdata, const char *admin_socket, const char *id, struct config_gpu *ret,
                char *ret_sentence, size_t n_sentence)
{
        (void)admin_socket;
        (void)userdata;
        (void)id;
        (void)ret_sentence;
        (void)n_sentence;
        *ret = (struct config_gpu){ .uuid = { 1 },
                                    .bytes_total = LIMIT + OTHER,
                                    .bytes_free = LIMIT + OTHER };
        return 0;
}

static unsigned n_live_of[4]; /* extents of 2, 4 and 8 MiB, and others */

static size_t size_index(uint64_t n_bytes)
{
        return n_bytes == 2 * MIB ? 0 : n_bytes == 4 * MIB ? 1 : n_bytes == 8 * MIB ? 2 : 3;
}

static int make(struct device *d, const struct device_supply *supply, enum device_share share,
                struct device_extent *extents, size_t n)
{
        int r = fake->make(d, supply, share, extents, n);

        ck_assert_uint_le(gpu.live_bytes, most_bytes);
        for (size_t i = 0; r == 0 && i < n; i++)
                n_live_of[size_index(extents[i].n_bytes)]++;
        return r;
}

static int destroy(struct device *d, struct device_extent *e)
{
        n_live_of[size_index(e->n_bytes)]--;
        return fake->destroy(d, e);
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
        big = open_session(1);
        small = open_session(2);
        admin = open_admin_session();
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

static void setup_with(const char *text)
{
        ck_assert_int_eq(devices_new(DEVICES_OWN, &devices), 0);
        fake_device_init(&gpu, 2 * MIB);
        gpu.facts.bytes_total = LIMIT + OTHER;
        gpu.facts.uuid[0] = 1;
        fake = gpu.device.ops;
        ops = *fake;
        ops.make = make;
        ops.destroy = destroy;
        gpu.device.ops = &ops;
        most_bytes = LIMIT + OTHER;
        ck_assert_int_eq(devices_put(devices, "cuda:0", &gpu.device), 0);
        start(text);
}

static void setup(void)
{
        setup_with(config_text);
}

static void teardown(void)
{
        stop();
        devices = devices_free(devices);
}

FIXTURE(standby, setup, teardown);

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

static void malloc_only(struct peer *p, uint32_t partition, uint64_t n_bytes)
{
        ck_assert_int_eq(wait_for(p, peer_malloc(p, partition, n_bytes))->body_case, BFCD__REPLY__BODY_BLOCK);
}

static const Bfcd__DeviceRow *device_row(void)
{
        return list_page(admin, BFCD__LIST__KIND__STATUS, 0)->status->devices[0];
}

/* ---- the tests ------------------------------------------------------------ */

TEST(standby_is_filled_after_start)
{
        ck_assert_uint_eq(gpu.n_live, N_READY);
        ck_assert_uint_eq(gpu.live_bytes, READY);
        ck_assert_uint_eq(ready_bytes(), READY);
        ck_assert_uint_eq(device_row()->bytes_standby, READY);
        ck_assert_uint_eq(device_row()->bytes_reserved, 0);
        ck_assert_uint_eq(charged_bytes(), 0);
        ck_assert_uint_eq(broker_standby_due(b), 0);
}

/* Nothing is made for it. Multiples of 8 MiB are placed in the largest extents, others as low as possible. */
TEST(growth_takes_standby_extents)
{
        const uint64_t sizes[] = { 2 * MIB, 62 * MIB, 128 * MIB, 60 * MIB, 4 * MIB };
        uint64_t left = READY;

        for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
                /* What was taken is not made again meanwhile: that would be for want of room. */
                standby_pause(b->devices[0].standby);
                malloc_only(big, 0, sizes[i]);
                left -= sizes[i];
                ck_assert_uint_eq(gpu.n_makes, N_READY);
                ck_assert_uint_eq(ready_bytes(), left);
        }
        ck_assert_uint_eq(charged_bytes(), READY);
        ck_assert_uint_eq(gpu.live_bytes, READY);
        ck_assert_uint_gt(broker_standby_due(b), 0);
        still_clock_pass(60000);
        broker_stand_by(b);
        settle();
        ck_assert_uint_eq(ready_bytes(), READY);
        ck_assert_uint_eq(gpu.live_bytes, 2 * READY);
        ck_assert_uint_eq(gpu.n_makes, 2 * N_READY);
        ck_assert_uint_eq(broker_standby_due(b), 0);
}

/* The sizes of small's extents are those of the first 64 MiB; it makes the rest beside them. */
TEST(growth_takes_extents_that_fit)
{
        standby_pause(b->devices[0].standby);
        malloc_only(small, 0, 128 * MIB);
        ck_assert_uint_eq(gpu.n_makes, N_READY + 32);
        ck_assert_uint_eq(ready_bytes(), READY - 64 * MIB);
}

static void expect_live(unsigned n_2mib, unsigned n_4mib, unsigned n_8mib)
{
        settle();
        ck_assert_uint_eq(n_live_of[0], n_2mib);
        ck_assert_uint_eq(n_live_of[1], n_4mib);
        ck_assert_uint_eq(n_live_of[2], n_8mib);
        ck_assert_uint_eq(ready_bytes(), READY);
}

/* A quota that has all of its smallest extents grows by the next size, and one that begins by the smallest. */
TEST(standby_has_the_sizes_that_come_next)
{
        expect_live(32, 16, 16);
        malloc_only(big, 0, 62 * MIB);
        malloc_only(big, 0, 2 * MIB);
        expect_live(32 + 32, 16, 16); /* half of it for small, which may begin */
        malloc_only(big, 0, 60 * MIB);
        malloc_only(big, 0, 60 * MIB);
        expect_live(32 + 32, 30 + 2, 16 + 7);

        teardown();
        setup_with("devices:\n"
                   "  - id: cuda:0\n"
                   "    headroom: 0\n"
                   "    standby: 256MiB\n"
                   "    partitions: [{name: main, limit: 1GiB, share: fd}, {name: ipc, limit: 128MiB}]\n"
                   "tenants:\n"
                   "  - {name: big, match: {uid: 1}, quotas: [{partition: main}]}\n"
                   "  - {name: small, match: {uid: 2}, quotas: [{partition: ipc}]}\n");
        expect_live(32, 16, 16);
        malloc_only(big, 0, 62 * MIB);
        malloc_only(big, 0, 2 * MIB);
        expect_live(32, 32, 16); /* all of it for big */
        malloc_only(big, 0, 124 * MIB);
        expect_live(32 + 2, 31 + 1, 16 + 15); /* what is too little for the next size is of the smallest */
        big = peer_free(big);
        expect_live(32, 16, 16);
        big = open_session(1);
}

/* Extents of cuda-ipc are not shared in that way. */
TEST(growth_by_cuda_ipc_takes_no_standby)
{
        malloc_only(big, 1, 32 * MIB);
        ck_assert_uint_eq(gpu.n_makes, N_READY + 1);
        settle();
        ck_assert_uint_eq(ready_bytes(), READY);
}

/* What is charged and what is ready is never more than the partition's limit: see make(). */
TEST(standby_is_released_for_other_requests)
{
        most_bytes = LIMIT;
        for (unsigned i = 0; i < 3; i++)
                malloc_only(big, 0, 256 * MIB);
        settle();
        ck_assert_uint_eq(ready_bytes(), 256 * MIB);
        malloc_only(small, 0, 128 * MIB);
        settle();
        ck_assert_uint_eq(charged_bytes(), LIMIT - 128 * MIB);
        ck_assert_uint_le(ready_bytes(), 128 * MIB);
        ck_assert_uint_ge(ready_bytes(), 120 * MIB);
        malloc_only(big, 0, 128 * MIB);
        settle();
        ck_assert_uint_eq(charged_bytes(), LIMIT);
        ck_assert_uint_eq(ready_bytes(), 0);
        ck_assert_uint_eq(gpu.live_bytes, LIMIT);
        small = peer_free(small);
        settle();
        ck_assert_uint_eq(charged_bytes(), LIMIT - 128 * MIB);
        ck_assert_uint_eq(ready_bytes(), 128 * MIB);
        small = open_session(2);
}

/* Growths of all sizes, one after the other and side by side. */
TEST(standby_stays_within_the_limit)
{
        uint64_t state = 1;

        most_bytes = LIMIT;
        for (unsigned i = 0; i < 300; i++) {
                struct peer **p;

                state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
                p = state >> 63 ? &big : &small;
                if ((state >> 40) % 8 == 0) {
                        *p = peer_free(*p);
                        *p = open_session(p == &big ? 1 : 2);
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

/* The device has less than it is thought to have: a growth has what is ready, and is not refused. */
TEST(a_device_that_runs_short)
{
        static const int errors[] = { -ENOMEM, -ENOBUFS, -EMFILE };

        for (size_t i = 0; i < sizeof(errors) / sizeof(errors[0]); i++) {
                unsigned n_makes = gpu.n_makes;

                fake_device_fail_make(&gpu, 1, errors[i]);
                malloc_only(small, 0, 126 * MIB);
                settle();
                ck_assert_uint_eq(gpu.n_makes, n_makes + 32);
                ck_assert_uint_eq(ready_bytes(), 0);
                ck_assert_uint_eq(gpu.live_bytes, 126 * MIB);
                ck_assert_uint_gt(broker_standby_due(b), 0);
                small = peer_free(small);
                settle();
                ck_assert_uint_eq(gpu.live_bytes, 0);
                still_clock_pass(60000);
                broker_stand_by(b);
                settle();
                ck_assert_uint_eq(ready_bytes(), READY);
                small = open_session(2);
        }
        fake_device_fail_make(&gpu, 1, -EIO); /* which it does not help against */
        ck_assert_int_eq(wait_for(small, peer_malloc(small, 0, 128 * MIB))->body_case,
                         BFCD__REPLY__BODY_REFUSAL);
        settle();
        ck_assert_uint_eq(ready_bytes(), READY);
}

/* A failure in the background fails no request; it is tried again later. */
TEST(standby_extents_fail)
{
        malloc_only(big, 0, 14 * MIB);
        fake_device_fail_make(&gpu, 2, -ENOMEM);
        settle();
        ck_assert_uint_eq(ready_bytes(), READY - 12 * MIB);
        malloc_only(big, 0, 2 * MIB);
        still_clock_pass(60000);
        broker_stand_by(b);
        settle();
        ck_assert_uint_eq(ready_bytes(), READY);
}

TEST(a_lost_device)
{
        gpu.stays_lost = true;
        gpu.open_error = -ENODEV;
        fake_device_fail_make(&gpu, 1, -ENODEV);
        ck_assert_int_eq(wait_for(small, peer_malloc(small, 0, 128 * MIB))->body_case,
                         BFCD__REPLY__BODY_REFUSAL);
        settle();
        ck_assert_uint_eq(ready_bytes(), 0);
        ck_assert_str_eq(device_row()->state, "lost");
}

TEST(standby_during_a_drain)
{
        ck_assert_int_eq(drain_begin(b, &b->devices[0]), 0);
        for (unsigned i = 0; i < 4; i++) {
                broker_turn(b);
                settle();
        }
        ck_assert_str_eq(device_row()->state, "drained");
        ck_assert_uint_eq(gpu.n_live, 0);
        ck_assert(gpu.is_closed);
        ck_assert_int_eq(drain_resume(&b->devices[0], NULL), 0);
        settle();
        ck_assert_str_eq(device_row()->state, "ok");
        ck_assert_uint_eq(ready_bytes(), READY);
}

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

TEST(reload_changes_standby)
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

/* The room of a device is that of its partitions together: none of these two has room for all standby memory. */
TEST(partitions_have_room_together)
{
        teardown();
        setup_with(
                "devices:\n"
                "  - {id: 'cuda:0', headroom: 0, standby: 256MiB, partitions: [{name: x, limit: 128MiB, share: fd}, "
                "{name: y, limit: 192MiB, share: fd}]}\n"
                "tenants:\n"
                "  - {name: big, match: {uid: 1}, quotas: [{partition: x}, {partition: y}]}\n"
                "  - {name: small, match: {uid: 2}, quotas: [{partition: y}]}\n");
        most_bytes = 320 * MIB;
        ck_assert_uint_eq(ready_bytes(), 256 * MIB);
        malloc_only(big, 1, 128 * MIB);
        settle();
        ck_assert_uint_eq(ready_bytes(), 192 * MIB);
        malloc_only(big, 0, 64 * MIB);
        settle();
        ck_assert_uint_eq(ready_bytes(), 128 * MIB);
        ck_assert_uint_eq(gpu.live_bytes, 320 * MIB);
}

TEST(daemon_ends_while_standby_is_filled)
{
        malloc_only(big, 0, 64 * MIB);
        ck_assert_uint_gt(broker_n_pending(b), 0);
}
