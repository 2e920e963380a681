/* A rig: one real bfcd in a folder of its own, and functions that observe it from outside.
 *
 * A test starts a rig with the interesting part of a config, drives it with
 * clients, and stops it. Stopping asserts the same in every test: no
 * session is left, nothing is charged, no fd more is open than at the start,
 * SIGTERM ends the daemon with status 0, and no error was logged.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_HARNESS_H
#define BFC_TESTS_HARNESS_H

#include <bfcclient.h>
#include <check.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>
#include <unistd.h>

#include "proto/bfcd.pb-c.h"
#include "tests/suite.h"
#include "tests/integration/raw.h"

#define GRANULE      256u   /* blocks are rounded up to it */
#define SETTLE_MS    120000 /* the limit of a wait for a condition, for a slow machine */
#define OTHER_UID    4242u  /* users without a passwd entry, for runs as root */
#define ANOTHER_UID  4243u
#define TEST_TIMEOUT 600.0

/* True as soon as the condition is, looked at every 2 ms; false after the time. */
#define WAIT_FOR(condition, timeout_ms)                                                                      \
        ({                                                                                                   \
                int64_t wait_deadline_ = clock_ms() + (timeout_ms);                                          \
                bool wait_met_;                                                                              \
                while (!(wait_met_ = (condition)) && clock_ms() < wait_deadline_)                            \
                        usleep(2000);                                                                        \
                wait_met_;                                                                                   \
        })
int64_t clock_ms(void);

/* Asserts; a failure prints the client's error message. */
#define ck_assert_ok(call)                                                                                   \
        do {                                                                                                 \
                int ck_r_ = (call);                                                                          \
                ck_assert_msg(ck_r_ == 0, "%s: %d (%s)", #call, ck_r_, bfc_last_error());                    \
        } while (0)

/* ---- rigs ----------------------------------------------------------------- */

/* Where all memory comes from, by BFC_TEST_DEVICE. Tests hold on any
 * device; where devices differ they use this. */
enum rig_device { ON_HOST, ON_CUDA_IPC, ON_CUDA_FD };
enum rig_device rig_device(void);
const char *rig_device_id(void); /* in the config and in lists */

/* In the names of what extents are, in /proc/PID/maps and /proc/PID/fd. */
const char *rig_extent_mark(void);

/* YAML with @UID@, @GID@ (this process's), @OTHER@ and @ANOTHER@ (OTHER_UID and
 * ANOTHER_UID) filled in. A NULL member takes its default. */
struct rig_config {
        const char *size;       /* of the device; 256MiB */
        const char *partitions; /* items; {name: train, limit: 128MiB, growth: on-demand} */
        const char *tenants;    /* items; {name: red, match: {uid: @UID@}, quota of 64MiB in train} */
        const char *top;        /* more keys of the top level, whole lines */
        const char *device;     /* more keys of the device, whole lines */
        const char *lease_keys; /* more keys of lease_socket, as ", mode: ..." */
        bool has_no_lease_socket;
        unsigned max_fds; /* RLIMIT_NOFILE of the daemon; as it is */
        bool moves_clock; /* the test calls rig_pass() */
};

struct rig {
        char folder[64];
        char socket[96];
        char admin_socket[96];
        char monitor_socket[96]; /* where the config does not say */
        char lease_socket[96];
        char config_path[96];
        char log_path[96];
        char memory[96]; /* folder of the machine that the fake driver pretends */
        pid_t pid;
        const char *bfcd;           /* the program */
        const char *option;         /* one more of its command line; NULL: none */
        struct moved_clock *clock;  /* of the daemon; NULL: the machine's */
        unsigned max_fds;           /* as configured; 0: as it is */
        struct raw *admin;          /* our one session on the admin socket */
        unsigned n_fds;             /* the daemon's, with that session; 0: not looked at */
        uint64_t n_extents;         /* at the start: standby and preallocated ones */
        uint64_t stuck_bytes;       /* that the test keeps from being destroyed: they stay pending */
        uint64_t unreclaimed_bytes; /* that the test made a device not take back: they stay charged */
        const char *forgiven;       /* log lines with this in them are no failure */
};

/* Starts a daemon and waits until it answers and has made what it makes in advance. */
struct rig *rig_start(const struct rig_config *config);

/* Asserts that no session and no charge is left, stops the daemon, asserts
 * that it ended with status 0, removes the folder. */
void rig_stop(struct rig *rig);

/* For a config with moves_clock. Time passes for the daemon, and its timers that are due have run. With a daemon that
 * was not built for that (BFCD in the environment) the time passes for the test, too. */
void rig_pass(struct rig *rig, unsigned ms);

/* Before a daemon of the config is started; of rig_start() and kept_start(). */
void rig_choose_program(struct rig *rig, const struct rig_config *config);

/* A test with a rig of this config, which is started before it and stopped behind it. */
#define RIG_TEST(id, config)                                                                                 \
        static void id##_with(struct rig *rig);                                                              \
        TEST(id)                                                                                             \
        {                                                                                                    \
                struct rig *rig = rig_start(&config);                                                        \
                                                                                                             \
                id##_with(rig);                                                                              \
                rig_stop(rig);                                                                               \
        }                                                                                                    \
        static void id##_with(struct rig *rig)

/* The assertions of rig_stop() on the running daemon. */
void rig_assert_empty(struct rig *rig);

/* No error was logged. */
void rig_assert_clean_log(const struct rig *rig);

/* SIGTERM, status 0, sockets gone, a clean log; for tests with live clients. */
void rig_terminate(struct rig *rig);

/* Frees the rig and its folder; for tests that ended the daemon themselves. */
void rig_discard(struct rig *rig);

/* An empty folder of this test's own, reachable by every user, in which no
 * daemon runs: for tests that start one by hand. */
struct rig *rig_folder(void);

/* The whole config as YAML; the caller frees it. */
char *rig_config_text(const struct rig *rig, const struct rig_config *config);
void rig_write_config(struct rig *rig, const char *text);

/* Forks and starts BFCD with the config, stderr to log_path; no waiting. */
pid_t rig_spawn_daemon(const struct rig *rig);
/* rig_spawn_daemon(); prepare(arg) is called in the new process before it becomes the daemon. */
pid_t rig_spawn_daemon_with(const struct rig *rig, void (*prepare)(void *), void *arg);
bool rig_answers(const struct rig *rig);

/* Our session on the admin socket of a daemon that has just been started, once it has made
 * what it makes in advance; and what it has open then. */
void rig_meet(struct rig *rig);
void rig_look_at_rest(struct rig *rig);

/* What the daemon wrote to stderr; the caller frees it. */
char *rig_log(const struct rig *rig);

/* A whole file as a string; NULL when it cannot be read. */
char *file_text(const char *path);

/* ---- lists of the daemon -------------------------------------------------- */

/* A tenant's row in a partition, over the admin socket; asserts that it exists. */
Bfcd__Statistics rig_stats(struct rig *rig, const char *tenant, const char *partition);

/* The statistics as any session that may list them sees them; false: no such row. */
bool raw_stats(struct raw *raw, const char *tenant, const char *partition, Bfcd__Statistics *ret);

/* What a tenant holds: bytes of extents and of blocks together, so 0 is nothing. */
uint64_t rig_charge(struct rig *rig, const char *tenant, const char *partition);

struct rig_counts {
        uint64_t n_sessions; /* of tenants: ours on the admin socket is not one */
        uint64_t n_blocks;
        uint64_t n_extents;
        uint64_t n_quarantined;
        uint64_t bytes_pending;
        uint64_t bytes_allocated; /* by the daemon for itself; 0: not known */
        uint64_t bytes_resident;
};
struct rig_counts rig_count(struct rig *rig);

/* ---- clients -------------------------------------------------------------- */

/* Connects through the library; asserts. tenant and partition may be NULL. */
bfc_client *client_open(const struct rig *rig, const char *tenant, const char *partition);

/* TSan's book of threads does not survive a fork beside threads, which is how children
 * are made: there their clients have no thread, and answer no event. */
#ifdef __SANITIZE_THREAD__
#define CHILDREN_HAVE_EVENTS 0
#else
#define CHILDREN_HAVE_EVENTS 1
#endif

/* For children: the same without Check; REQUIREs. */
bfc_client *child_client_open(const char *socket, const char *tenant);

/* -errno of a connect that must fail, -1 when it did not; the sentence is in
 * bfc_last_error(). */
int client_refused(const struct rig *rig, const char *tenant, const char *partition);

struct bfc_tenant_usage client_usage(bfc_client *client, const char *partition);

/* A block's size as it is counted. */
uint64_t rounded(uint64_t n_bytes);

/* A sentence with numbers: not empty, with a digit in it. */
bool has_stats(const char *sentence);

/* Fills a block so that each byte depends on its place and the seed; says
 * whether it still is as filled. */
void pattern_write(void *ptr, size_t n_bytes, uint64_t seed);
bool pattern_holds(const void *ptr, size_t n_bytes, uint64_t seed);
bool all_bytes_are(const void *ptr, size_t n_bytes, uint8_t value);

/* ---- processes ------------------------------------------------------------ */

/* In children: what a test asserts. Says where and exits with 99. */
#define REQUIRE(condition, ...)                                                                              \
        do {                                                                                                 \
                if (!(condition)) {                                                                          \
                        fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition);                      \
                        fprintf(stderr, "" __VA_ARGS__);                                                     \
                        fputc('\n', stderr);                                                                 \
                        _exit(99);                                                                           \
                }                                                                                            \
        } while (0)

/* One process signals another. Made before the fork; ends with the process of the test. */
struct gate {
        int fds[2];
};
struct gate gate_new(void);
void gate_open(struct gate *gate);
bool gate_wait(struct gate *gate, int timeout_ms); /* false: not in time */
/* In children: opens the one and waits for the other. */
void gate_meet(struct gate *open, struct gate *wait);

/* Runs function(arg) in a child that ends with status 0 after it, and dies with
 * the test. */
pid_t child_start(void (*function)(void *), void *arg);
/* child_start(), and waits until the child has opened the gate. */
pid_t child_start_until(struct gate *gate, void (*function)(void *), void *arg);
/* child_start() as another user; only for root. */
pid_t child_start_as(uid_t uid, gid_t gid, void (*function)(void *), void *arg);
/* Waits for it; asserts that it ended with status 0. */
void child_join(pid_t pid);
/* SIGSTOP, and waits until all of its threads have stopped, none of them with the fake driver's lock; SIGCONT continues it.
 * Also for the daemon. */
void child_stop(pid_t pid);
/* SIGKILL and wait; asserts that it had not ended by itself. */
void child_kill(pid_t pid);

/* Memory that children share with the test, zeroed; munmap()ed by process end. */
void *shared_memory(size_t n_bytes);

/* Runs a program to its end. Outputs may be NULL; the caller frees them. The
 * exit status, or 128 + signal. */
int program_run(const char *const *argv, char **ret_stdout, char **ret_stderr);

/* Runs bfcd --check on a file, as root for root: a machine's user bfcd cannot read a rig's folder. The
 * exit status. */
int program_check(const char *path, char **ret_errors);

/* The programs under test: from the environment, else where they were built. */
const char *program_bfcd(void);
const char *program_bfcctl(void);
const char *program_replay(void);

/* ---- main ----------------------------------------------------------------- */

bool is_root(void);
/* Whether children can be other users and run what was built: a checkout may be in a folder that only root may enter. If
 * not, says why on a line of a skipped test. */
bool others_may_run(void);
/* Seconds that the long tests take: BFC_TEST_SECONDS, else the default. */
double test_seconds(double fallback);

/* main() of every program here: a folder for all rigs, the suite, the logs of
 * the daemons whose tests failed. */
int harness_main(Suite *suite);

/* Runs the tests of the file. timeout: seconds, each. setup: before each; may be NULL. */
#define harness_cases_with(name, timeout, setup) harness_main(suite_of_tests(name, timeout, setup, NULL))
#define harness_cases(name)                      harness_cases_with(name, TEST_TIMEOUT, NULL)

#endif
