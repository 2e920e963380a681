/* What many integration tests do in the same way: bfcctl, the log, sessions and clients with options.
 * The functions assert.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_TOOLS_H
#define BFC_TESTS_TOOLS_H

#include "tests/integration/harness.h"

/* ---- configs --------------------------------------------------------------- */

/* A tenant of the users `uids` with these quotas, and with one. */
#define TENANT_OF(name, uids, quotas)                                                                        \
        "  - name: " name "\n    match: {uid: [" uids "]}\n    quotas: [" quotas "]\n"
#define TENANT(name, uids, quota) TENANT_OF(name, uids, "{partition: " quota "}")

/* Writes the config of a running daemon. */
void rig_rewrite_config(struct rig *rig, const struct rig_config *config);

/* ---- bfcctl ---------------------------------------------------------------- */

#define WORDS(...) ((const char *const[]){ __VA_ARGS__, NULL })

/* Runs bfcctl with these words; its exit status. Outputs may be NULL. */
int ctl(const char *socket, const char *const *words, char **ret_out, char **ret_err);

/* On the admin socket. It succeeds; its output, which the caller frees. */
char *ctl_text(const struct rig *rig, const char *const *words);

/* It succeeds, and its output has this part. */
void ctl_says(const struct rig *rig, const char *const *words, const char *part);

/* It ends with this status, and its error message has this part. */
void ctl_refuses(const struct rig *rig, const char *const *words, int status, const char *part);

/* The process that owns the memory of this GPU for the daemon; 0: there is none. */
pid_t rig_keeper(const struct rig *rig, const char *id);

/* Requests that wait for memory, of one tenant or (NULL) of all. */
uint64_t rig_n_waiting(struct rig *rig, const char *tenant);

/* Writes a trace that bfc-replay generates. scale: of its option; NULL: none. */
void make_trace(const char *path, const char *generator, const char *scale);

/* Asserts that a text that a program printed has this part, and frees the text. */
void text_has(char *text, const char *part);

/* ---- the log and the process ------------------------------------------------- */

bool rig_logged(const struct rig *rig, const char *words);
unsigned process_count_fds(pid_t pid);

/* ---- sessions by hand ---------------------------------------------------------- */

/* Connects and authenticates. */
struct raw *session_open(const char *socket, const char *tenant);

/* A goodbye, and closes it. */
void session_end(struct raw *raw);

/* These send and do not wait; the id of the request. */
uint64_t session_send_malloc(struct raw *raw, uint64_t n_bytes, uint32_t wait_ms);
uint64_t session_send_free(struct raw *raw, uint64_t block_id);
uint64_t session_send_ack(struct raw *raw, uint64_t sequence);

/* ---- clients ------------------------------------------------------------------- */

/* Connects with members of struct bfc_options: client_with(.socket = ..., .tenant = ...). */
bfc_client *client_connect(const struct bfc_options *options);
#define client_with(...)                                                                                     \
        client_connect(&(struct bfc_options){ .struct_size = sizeof(struct bfc_options), __VA_ARGS__ })

/* Connects in a child. */
bfc_client *child_connect(const struct bfc_options *options);
#define child_client_with(...)                                                                               \
        child_connect(&(struct bfc_options){ .struct_size = sizeof(struct bfc_options), __VA_ARGS__ })

struct bfc_client_stats client_stats(bfc_client *client);

/* The contents of a block by bfc_write() and bfc_read(); see pattern_write(). In children, too. */
void block_fill(bfc_client *client, void *p, size_t n_bytes, uint64_t seed);
bool block_has(bfc_client *client, const void *p, size_t n_bytes, uint64_t seed);

#endif
