/* What the tests of parked blocks have in common; see parking.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/integration/parking.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

const struct rig_config *small_config(void)
{
        static const struct rig_config on_host = { .partitions = PARTITIONS("64MiB", "32MiB", ""),
                                                   .tenants = QUOTAS("red", "32MiB", "32MiB") },
                                       on_gpu = { .partitions = PARTITIONS("64MiB", "32MiB", HOST),
                                                  .tenants = QUOTAS("red", "32MiB", "32MiB") };

        return rig_device() == ON_HOST ? &on_host : &on_gpu;
}

const struct rig_config *roomy_config(void)
{
        static const struct rig_config on_host = { .top = "timeouts: {quarantine: 100ms}\n",
                                                   .partitions = PARTITIONS("64MiB", "192MiB", ""),
                                                   .tenants = QUOTAS("red", "64MiB", "192MiB")
                                                           QUOTAS("blue", "64MiB", "192MiB") },
                                       on_gpu = { .top = "timeouts: {quarantine: 100ms}\n",
                                                  .partitions = PARTITIONS("64MiB", "192MiB", HOST),
                                                  .tenants = QUOTAS("red", "64MiB", "192MiB")
                                                          QUOTAS("blue", "64MiB", "192MiB") };

        return rig_device() == ON_HOST ? &on_host : &on_gpu;
}

uint64_t reserved(struct rig *rig, const char *partition)
{
        return rig_stats(rig, "red", partition).bytes_reserved;
}

uint64_t in_use(struct rig *rig, const char *partition)
{
        return rig_stats(rig, "red", partition).bytes_in_use;
}

bool page_is_mapped(const void *ptr)
{
        int fds[2];
        bool is;

        ck_assert_int_eq(pipe(fds), 0);
        is = write(fds[1], ptr, 1) == 1;
        close(fds[0]);
        close(fds[1]);
        return is;
}

struct raw *raw_with_events(struct rig *rig)
{
        struct raw *raw = NULL;

        ck_assert_int_eq(raw_open(rig->socket, &raw), 0);
        raw->wants_events = true;
        ck_assert_int_eq(raw_hello(raw, "red", NULL), 0);
        return raw;
}

void raw_unmap(struct raw *raw)
{
        Bfcd__Event *event = NULL;

        ck_assert_int_eq(raw_event(raw, SETTLE_MS, &event), 0);
        ck_assert_int_eq((int)event->body_case, (int)BFCD__EVENT__BODY_RETIRE);
        for (size_t i = 0; i < event->retire->n_extent_ids; i++)
                (void)raw_let_go(raw, event->retire->extent_ids[i]);
        ck_assert_int_eq(raw_answer(raw, event->sequence), 0);
        bfcd__event__free_unpacked(event, NULL);
}

int raw_park(struct raw *raw, uint64_t block_id, bool discard, uint32_t partition)
{
        Bfcd__Request request = BFCD__REQUEST__INIT;
        Bfcd__Park body = BFCD__PARK__INIT;

        body.block_id = block_id;
        body.discard = discard;
        body.partition = partition;
        request.body_case = BFCD__REQUEST__BODY_PARK;
        request.park = &body;
        return raw_do(raw, &request);
}

uint64_t raw_send_park(struct raw *raw, uint64_t block_id, uint32_t wait_ms)
{
        Bfcd__Park body = BFCD__PARK__INIT;
        Bfcd__Request request = REQUEST(PARK, park, &body);

        body.block_id = block_id;
        body.partition = 1;
        body.wait_ms = wait_ms;
        ck_assert_int_eq(raw_send(raw, &request), 0);
        return request.id;
}

uint64_t raw_send_wake(struct raw *raw, const uint64_t *block_ids, size_t n, uint32_t wait_ms)
{
        Bfcd__Request request = BFCD__REQUEST__INIT;
        Bfcd__Wake body = BFCD__WAKE__INIT;

        body.n_block_ids = n;
        body.block_ids = (uint64_t *)(uintptr_t)block_ids;
        body.wait_ms = wait_ms;
        request.body_case = BFCD__REQUEST__BODY_WAKE;
        request.wake = &body;
        ck_assert_int_eq(raw_send(raw, &request), 0);
        return request.id;
}

int raw_wake_answer(struct raw *raw, uint64_t id, uint64_t block_id)
{
        Bfcd__Reply *reply = NULL;
        int r;

        ck_assert_int_eq(raw_receive(raw, SETTLE_MS, &reply), 0);
        ck_assert_uint_eq(reply->id, id);
        r = reply->body_case == BFCD__REPLY__BODY_BLOCK ? 0 : -(int)reply->refusal->error;
        ck_assert(r != 0 || reply->block->block_id == block_id);
        bfcd__reply__free_unpacked(reply, NULL);
        return r;
}

int raw_wake(struct raw *raw, uint64_t block_id)
{
        return raw_wake_answer(raw, raw_send_wake(raw, &block_id, 1, 0), block_id);
}

uint64_t raw_parkable(struct raw *raw, uint64_t n_bytes)
{
        Bfcd__Request request = BFCD__REQUEST__INIT;
        Bfcd__Malloc body = BFCD__MALLOC__INIT;
        Bfcd__Reply *reply = NULL;
        uint64_t id;

        body.n_bytes = n_bytes;
        body.flags = BFCD__MALLOC_FLAG__MALLOC_FLAG_PARKABLE;
        request.body_case = BFCD__REQUEST__BODY_MALLOC;
        request.malloc = &body;
        ck_assert_int_eq(raw_call(raw, &request, &reply), 0);
        ck_assert_int_eq((int)reply->body_case, (int)BFCD__REPLY__BODY_BLOCK);
        id = reply->block->block_id;
        bfcd__reply__free_unpacked(reply, NULL);
        return id;
}

unsigned count_blocks(struct rig *rig, const char *state, uint64_t *ret_id)
{
        Bfcd__Reply *reply = NULL;
        unsigned n = 0;

        ck_assert_int_eq(raw_list(rig->admin, BFCD__LIST__KIND__BLOCKS, 0, &reply), 0);
        for (size_t i = 0; i < reply->list->n_blocks; i++) {
                if (strcmp(reply->list->blocks[i]->state, state) != 0)
                        continue;
                *ret_id = reply->list->blocks[i]->block_id;
                n++;
        }
        bfcd__reply__free_unpacked(reply, NULL);
        return n;
}
