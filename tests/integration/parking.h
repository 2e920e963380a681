/* What the tests of parked blocks have in common.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_PARKING_H
#define BFC_TESTS_PARKING_H

#include <stdbool.h>
#include <stdint.h>

#include "tests/integration/tools.h"

#define BLOCK (10 * MIB)

/* On a GPU the partition for copies is on the host. */
#define PARTITIONS(train, parking, on_host)                                                                  \
        "      - {name: train, limit: " train "}\n" on_host "      - {limit: " parking ", name: parking}\n"
#define QUOTAS(name, train, parking)                                                                         \
        TENANT_OF(name, "@UID@",                                                                             \
                  "{partition: train, limit: " train "}, {partition: parking, limit: " parking "}")
#define HOST "  - id: host\n    size: 256MiB\n    partitions:\n"

/* A tenant 'red' that parks blocks of 'train' in 'parking'; the second with a tenant 'blue', and with more room. */
const struct rig_config *small_config(void);
const struct rig_config *roomy_config(void);

#define CAN_PARK          (rig_device() != ON_CUDA_IPC)
#define CHILDREN_CAN_PARK (CAN_PARK && CHILDREN_HAVE_EVENTS)

/* Of red in a partition. */
uint64_t reserved(struct rig *rig, const char *partition);
uint64_t in_use(struct rig *rig, const char *partition);

bool page_is_mapped(const void *ptr);

/* The blocks in this state; *ret_id: one of them. */
unsigned count_blocks(struct rig *rig, const char *state, uint64_t *ret_id);

/* ---- sessions by hand ---- */

struct raw *raw_with_events(struct rig *rig);

/* On a GPU: unmaps what a Park has left. */
void raw_unmap(struct raw *raw);

uint64_t raw_parkable(struct raw *raw, uint64_t n_bytes);

/* 0, or the error. */
int raw_park(struct raw *raw, uint64_t block_id, bool discard, uint32_t partition);
int raw_wake(struct raw *raw, uint64_t block_id);

/* A request to park the block in partition 1. Returns its id. */
uint64_t raw_send_park(struct raw *raw, uint64_t block_id, uint32_t wait_ms);

/* A request for these blocks; the answers to be taken with raw_wake_answer(): 0, or the error. */
uint64_t raw_send_wake(struct raw *raw, const uint64_t *block_ids, size_t n, uint32_t wait_ms);
int raw_wake_answer(struct raw *raw, uint64_t id, uint64_t block_id);

#endif
