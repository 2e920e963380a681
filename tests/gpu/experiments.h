/* What the files of the experiments share.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_GPU_EXPERIMENTS_H
#define BFC_TESTS_GPU_EXPERIMENTS_H

#include "tests/gpu/driver.h"
#include "tests/gpu/peer.h"

#define MIB ((size_t)1 << 20)

/* What a case found, in the order of the reports. */
void say_error(const char *name, CUresult r); /* "SUCCESS" or the error's name */
void say_number(const char *name, double value);
void say_flag(const char *name, bool value);
void say_text(const char *name, const char *value);
void say_open(const char *name, char bracket); /* an object or an array; name NULL inside an array */
void say_close(char bracket);
/* The case cannot be done here; it ends. */
void skip(const char *why) __attribute__((noreturn));
/* From here on a crash is the answer, and no failure. */
void crash_is_an_answer(void);

extern size_t max_n_bytes; /* what a case may allocate at once */
extern bool is_quick;

/* A peer with the primary context of device 0; skips the case where that fails. */
struct peer start_peer(uid_t uid, unsigned int flags);
/* The primary context of device 0 in this process. */
void start_here(void);
double now_us(void);
/* Sends, and returns what the peer's call returned. */
CUresult ask(struct peer *p, struct peer_message *m);

struct experiment {
        const char *name, *question;
        void (*run)(void);
};
extern const struct experiment ipc_experiments[], vmm_experiments[], memory_experiments[],
        death_experiments[], capture_experiments[], stream_experiments[];

#endif
