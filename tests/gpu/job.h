/* A job of the broker's test: a process with a client's session, or with the driver
 * alone, which does one thing after another as told.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The test itself never touches CUDA, which does not survive fork(): it starts
 * jobs, and these use it. Device memory is touched by the driver's copies and
 * fills and by kernels, never by the processor. A job has slots for pointers,
 * which the test numbers. */
#ifndef BFC_TESTS_GPU_JOB_H
#define BFC_TESTS_GPU_JOB_H

#include <bfcclient.h>
#include <stdint.h>

#include "tests/unit/process.h"

#define JOB_SLOTS 8u

/* For the jobs that are started from then on. */
void job_use_socket(const char *path);

/* Starts a process that has device 0's primary context current. tenant: it connects
 * as that one; NULL: it has no session. */
struct process job_start(const char *tenant);
/* One with that CUDA_VISIBLE_DEVICES, and no context of its own. */
struct process job_start_seeing(const char *visible, const char *tenant);
void job_end(struct process *p); /* disconnects, and ends well */

/* A child of the job, which does nothing until it is killed. */
pid_t job_fork(struct process *p);

/* What the job was told when something failed. */
const char *job_sentence(void);

uint64_t job_n_free(struct process *p);

/* 0 or -errno, by the client library. */
int job_malloc(struct process *p, unsigned int slot, const char *partition, uint64_t n_bytes);
int job_malloc_parkable(struct process *p, unsigned int slot, const char *partition, uint64_t n_bytes);
int job_park(struct process *p, unsigned int slot, const char *to); /* its contents go there */
int job_wake(struct process *p, unsigned int slot, uint32_t wait_ms);
int job_free(struct process *p, unsigned int slot);
struct bfc_block_info job_info(struct process *p, unsigned int slot);
int job_partition_for_device(struct process *p, int ordinal, char ret_name[static 64]);
/* bfc_write() or bfc_read() of so many bytes of a value; a read finds *ret_n_other others. */
int job_write(struct process *p, unsigned int slot, uint64_t at, unsigned char value, uint64_t n_bytes);
int job_read(struct process *p, unsigned int slot, uint64_t at, unsigned char value, uint64_t n_bytes,
             uint64_t *ret_n_other);

/* By the driver, on device pointers; asserted. */
void job_fill(struct process *p, unsigned int slot, uint64_t at, unsigned char value, uint64_t n_bytes);
uint64_t job_count_other(struct process *p, unsigned int slot, uint64_t at, unsigned char value,
                         uint64_t n_bytes);
void job_copy(struct process *p, unsigned int to, unsigned int from, uint64_t n_bytes); /* DtoD */
/* Words, each the same: by a kernel, on the fake by a copy; and how many are not that. */
void job_launch(struct process *p, unsigned int slot, uint32_t value, uint32_t n_words);
uint32_t job_count_other_words(struct process *p, unsigned int slot, uint32_t value, uint32_t n_words);

/* Makes a slot of what another session told of its block: by its handle, or, where
 * `beside` is a block of this job in the same extent, by where that lies. */
int job_open(struct process *p, unsigned int slot, const struct bfc_block_info *info);
void job_close(struct process *p, unsigned int slot, const struct bfc_block_info *info);
void job_reach(struct process *p, unsigned int slot, unsigned int beside, const struct bfc_block_info *info);

#endif
