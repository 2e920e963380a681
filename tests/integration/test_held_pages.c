/* A client has locks of pages of a block that is parked, so the daemon's copy waits: other tenants grow and release in the
 * same partition meanwhile. BFCD is a daemon whose reads of memfds wait as long as a file exists (held_reads.c).
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>

#include "tests/integration/parking.h"
#include "tests/integration/tools.h"

#define N_ROUNDS    5u /* one of them is within the limit: the machine may have other work */
#define N_GROWTHS   10u
#define LIMIT_MS    300
#define GROWN_BYTES (4 * MIB)

static char held[64], waits[80];

static void hold(void)
{
        int fd = open(held, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);

        ck_assert_int_ge(fd, 0);
        close(fd);
}

static int64_t longest(int64_t max_ms, int64_t begun_ms)
{
        int64_t ms = clock_ms() - begun_ms;

        return ms > max_ms ? ms : max_ms;
}

/* The longest call of a session that grows and gives all back. */
static int64_t grow(struct rig *rig)
{
        int64_t begun_ms, max_ms = 0;

        for (unsigned i = 0; i < N_GROWTHS; i++) {
                struct raw *raw;
                Bfcd__Block block;

                begun_ms = clock_ms();
                raw = session_open(rig->socket, "blue");
                max_ms = longest(max_ms, begun_ms);
                begun_ms = clock_ms();
                ck_assert_msg(raw_malloc(raw, 0, GROWN_BYTES, &block) == 0, "%s", raw_refusal());
                max_ms = longest(max_ms, begun_ms);
                begun_ms = clock_ms();
                ck_assert_int_eq(raw_free(raw, block.block_id), 0);
                max_ms = longest(max_ms, begun_ms);
                session_end(raw);
                ck_assert(WAIT_FOR(rig_charge(rig, "blue", "train") == 0, SETTLE_MS));
        }
        return max_ms;
}

TEST(held_pages_delay_their_tenant_only)
{
        int64_t max_ms = 0, least_ms = INT64_MAX;
        Bfcd__Reply *reply = NULL;
        struct rig *rig;
        struct raw *red;
        uint64_t block, id;

        snprintf(held, sizeof(held), "/tmp/bfcd-held-reads-%d", (int)getpid());
        snprintf(waits, sizeof(waits), "%s.waits", held);
        setenv("BFC_TEST_HELD_READS", held, 1);
        rig = rig_start(roomy_config());
        red = raw_with_events(rig);
        block = raw_parkable(red, BLOCK);
        hold();
        id = raw_send_park(red, block, 0);
        ck_assert(WAIT_FOR(access(waits, F_OK) == 0, SETTLE_MS));
        for (unsigned i = 0; i < N_ROUNDS && least_ms > LIMIT_MS; i++) {
                max_ms = grow(rig);
                least_ms = max_ms < least_ms ? max_ms : least_ms;
        }
        printf("# the victim's longest call took %" PRId64 " ms\n", least_ms);
        ck_assert_int_le(least_ms, LIMIT_MS);
        ck_assert_int_eq(unlink(held), 0);
        ck_assert_int_eq(raw_receive(red, SETTLE_MS, &reply), 0);
        ck_assert_uint_eq(reply->id, id);
        ck_assert_int_eq((int)reply->body_case, (int)BFCD__REPLY__BODY_DONE);
        bfcd__reply__free_unpacked(reply, NULL);
        raw_unmap(red);
        id = raw_send_wake(red, &block, 1, SETTLE_MS);
        ck_assert_int_eq(raw_wake_answer(red, id, block), 0);
        ck_assert_int_eq(raw_free(red, block), 0);
        session_end(red);
        (void)unlink(waits);
        rig_stop(rig);
}
