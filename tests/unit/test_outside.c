/* Memory outside of bfcd, as the devices tell it of processes: in which session it counts, and when it is logged. Without
 * sockets.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>
#include <unistd.h>

#include "daemon/log.h"
#include "daemon/session/outside.h"
#include "tests/suite.h"
#include "tests/unit/gpus.h"
#include "tests/unit/still_clock.h"

static const char config_text[] =
        "devices:\n"
        "  - id: cuda:0\n"
        "    headroom: 0\n"
        "    partitions: [{name: one, limit: 64MiB}, {name: two, limit: 64MiB}]\n"
        "  - id: cuda:1\n"
        "    headroom: 0\n"
        "    partitions: [{name: other, limit: 100%}]\n"
        "tenants:\n"
        "  - {name: a, match: {uid: 1}, quotas: [{partition: one, limit: 32MiB}, {partition: two}, {partition: other}]}\n"
        "  - {name: b, match: {uid: 2}, quotas: [{partition: one}]}\n";

enum { ONE, TWO, OTHER }; /* a's */

static void setup(void)
{
        gpus_start(config_text, false);
        log_open(LOG_LEVEL_INFO);
        a1->session->who.pid = 100; /* all peers are this process */
        b1->session->who.pid = 200;
}

FIXTURE(outside, setup, gpus_end);

/* Each device has the same. */
static void look(const struct device_use *uses, size_t n_uses)
{
        for (size_t i = 0; i < 2; i++) {
                gpus[i].uses = uses;
                gpus[i].n_uses = n_uses;
        }
        outside_look(b);
        settle();
}

#define LOOK(...)                                                                                            \
        look((struct device_use[]){ __VA_ARGS__ },                                                           \
             sizeof((struct device_use[]){ __VA_ARGS__ }) / sizeof(struct device_use))

static uint64_t row_bytes(const struct peer *p)
{
        const Bfcd__ListReply *page = list_page(admin, BFCD__LIST__KIND__SESSIONS, 0);

        for (size_t i = 0; i < page->n_sessions; i++)
                if (page->sessions[i]->session_id == p->session->id)
                        return page->sessions[i]->bytes_outside;
        ck_abort_msg("no such session");
}

static uint64_t tenant_bytes(const char *tenant, const char *partition)
{
        const Bfcd__ListReply *page = list_page(admin, BFCD__LIST__KIND__TENANTS, 0);

        for (size_t i = 0; i < page->n_tenants; i++)
                if (strcmp(page->tenants[i]->tenant, tenant) == 0 &&
                    strcmp(page->tenants[i]->partition, partition) == 0)
                        return page->tenants[i]->stats->bytes_outside;
        ck_abort_msg("no such quota");
}

static void charge(struct peer *p, uint32_t partition, uint64_t n_bytes)
{
        uint64_t id = peer_charge(p, partition, n_bytes, 0);

        settle();
        ck_assert_int_eq(peer_error(p, id), 0);
}

TEST_OF(outside, direct_charges_are_known)
{
        charge(a1, TWO, 6 * MIB);
        LOOK({ 50, MIB }, { 100, 10 * MIB }, { 200, 3 * MIB });
        /* 10 MiB on each GPU, of which 6 are charged on the first. */
        ck_assert_uint_eq(row_bytes(a1), 14 * MIB);
        ck_assert_uint_eq(tenant_bytes("a", "one"), 0);
        ck_assert_uint_eq(tenant_bytes("a", "two"), 4 * MIB);
        ck_assert_uint_eq(tenant_bytes("a", "other"), 10 * MIB);
        ck_assert_uint_eq(row_bytes(b1), 3 * MIB);
        ck_assert_uint_eq(
                list_page(admin, BFCD__LIST__KIND__PARTITIONS, 0)->partitions[0]->stats->bytes_outside,
                3 * MIB);
        /* What is charged and not taken is not negative. */
        LOOK({ 100, 5 * MIB });
        ck_assert_uint_eq(row_bytes(a1), 5 * MIB);
        ck_assert_uint_eq(tenant_bytes("a", "two"), 0);
        ck_assert_uint_eq(row_bytes(b1), 0);
        /* Devices that do not tell. */
        look(NULL, 0);
        ck_assert_uint_eq(outside_bytes(a1->session), UINT64_MAX);
        ck_assert_uint_eq(tenant_bytes("a", "other"), 0);
}

/* The process counts once. */
TEST_OF(outside, several_sessions_of_a_process)
{
        struct peer *second = open_gpu_session(1, false);

        second->session->who.pid = 100;
        charge(second, ONE, 2 * MIB);
        LOOK({ 100, 10 * MIB });
        ck_assert_uint_eq(row_bytes(second), 8 * MIB);
        ck_assert_uint_eq(row_bytes(a1), 10 * MIB); /* on the other GPU */
        ck_assert_uint_eq(tenant_bytes("a", "one"), 8 * MIB);
        second = peer_free(second);
        settle();
        LOOK({ 100, 10 * MIB });
        ck_assert_uint_eq(row_bytes(a1), 20 * MIB);
}

/* More than one answer has. */
TEST_OF(outside, many_processes)
{
        static struct device_use uses[3 * DEVICE_USES];

        for (size_t i = 0; i < 3 * DEVICE_USES; i++)
                uses[i] = (struct device_use){ 60 + i, (i + 1) * MIB };
        look(uses, 3 * DEVICE_USES);
        ck_assert_uint_eq(row_bytes(a1), 2 * 41 * MIB);
        ck_assert_uint_eq(row_bytes(b1), 141 * MIB);
}

TEST_OF(outside, much_is_logged_once)
{
        LOOK({ 200, OUTSIDE_LOG_BYTES - 1 });
        ck_assert_uint_eq(count_log("outside of bfcd"), 0);
        for (int i = 0; i < 3; i++)
                LOOK({ 200, OUTSIDE_LOG_BYTES + (uint64_t)i });
        ck_assert_uint_eq(
                count_log("process 200 (peer) of tenant 'b' has 1.0 GiB on device 'cuda:0' outside of bfcd"),
                1);
        ck_assert_uint_eq(count_log("outside of bfcd"), 1);
}

int main(void)
{
        return suite_main("outside");
}
