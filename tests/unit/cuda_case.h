/* A case of the CUDA device's test: a machine of its own with two GPUs, of 64 MiB
 * and 32 MiB, and what its processes are told in one line each. When it ends, no
 * memory may be left on the machine.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_UNIT_CUDA_CASE_H
#define BFC_TESTS_UNIT_CUDA_CASE_H

#include <check.h>

#include "tests/unit/process.h"

#define MIB      (UINT64_C(1) << 20)
#define N_SHARES 2 /* DEVICE_SHARE_FD, DEVICE_SHARE_CUDA_IPC: the index of loop tests */

/* The fake's UUIDs. */
extern const uint8_t uuid_0[16], uuid_1[16];
#define UUID_0 "fa4ec0da-0000-4000-8000-000000000001"
#define UUID_1 "fa4ec0da-0000-4000-8000-000000000002"

/* The fixture. */
void case_setup(void);
void case_teardown(void);
int count_objects(void);                                /* pieces of memory on the machine */
void in_folder(const char *name, char ret[static 128]); /* of the machine's state */

int tell(struct process *p, int (*run)(struct message *m));
void set(struct process *p, const char *setting); /* "NAME=value", before it loads the driver */
uint64_t n_free(struct process *p);
int n_fds(struct process *p);

/* The daemon's part. What make() leaves in *ret names the extent from then on;
 * its fd is the test's, until forget(). */
int open_device(struct process *p, const char *id);
struct process owner_start(void);
void owner_end(struct process *p);
int make(struct process *p, enum device_share share, uint64_t n_bytes, struct message *ret);
void forget(struct message *made);
int destroy(struct process *p, const struct message *made);
uint64_t owner_sees_other(struct process *p, const struct message *made, unsigned char value);

/* A client's part. */
struct process job_start(enum device_share share, uint64_t n_bytes);
void job_end(struct process *p);
int range(struct process *p, const uint8_t uuid[16], enum device_share share, uint64_t n_bytes);
int map(struct process *p, uint64_t offset, const struct message *made);
int unmap(struct process *p, uint64_t offset, uint64_t n_bytes);
void fill(struct process *p, uint64_t offset, unsigned char value, uint64_t n_bytes);
uint64_t sees_other(struct process *p, uint64_t offset, unsigned char value, uint64_t n_bytes);
/* By the range's own copies. */
int copy_in(struct process *p, uint64_t offset, unsigned char value, uint64_t n_bytes);
int copy_out_other(struct process *p, uint64_t offset, unsigned char value, uint64_t n_bytes,
                   uint64_t *ret_n_other);

#endif
