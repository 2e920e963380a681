/* Starts keepers: the program is searched beside this one.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KEEPER_START_H
#define KEEPER_START_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>

#define KEEPER_HOST   "host" /* the id of the keeper of host memory, which has the ledger */
#define KEEPER_END_MS 2000   /* in which a keeper ends, before it is killed, and after */

/* Of the device with this id, with `input` as its standard input; more: further arguments, NULL at the end. is_apart: it is in
 * a process group of its own, and writes nothing; not in a session of its own, because the kernel may share processors out by
 * sessions (sched_autogroup), and this process's priority would not count for it. -errno: it cannot be started. */
int keeper_spawn(const char *id, const char *const *more, int input, bool is_apart, pid_t *ret);

/* A keeper, as its caller has it. */
struct keeper_link {
        int fd;      /* -1: none */
        int process; /* a pidfd; -1: unknown */
        pid_t pid;
        bool is_new; /* there was none */
};
#define KEEPER_LINK_NONE ((struct keeper_link){ .fd = -1, .process = -1 })

/* One that ends with this process. As keeper_spawn(). */
int keeper_start_own(const char *id, const char *const *more, struct keeper_link *ret);

/* Keys of extents that no keeper has, never 0: the first of n. Any thread. */
uint64_t keeper_next_keys(size_t n);
void keeper_pass_key(uint64_t key); /* the next ones are above it */

/* ---- keepers that outlive this process ---------------------------------------- */

/* Their sockets are in a folder of this user alone, beside bfcd's admin socket. */
struct keepers;

/* Makes the folder, and locks it: one bfcd at a time has it. On failure a sentence: -EBUSY (another process has it), -EPERM
 * (others could change it), -errno. */
int keepers_open(const char *admin_socket, struct keepers **ret, char *ret_sentence, size_t n_sentence);

/* Opens the folder of keepers that an earlier bfcd has left. Root becomes the folder's owner. -ENOENT: there is no
 * folder. */
int keepers_open_left(const char *admin_socket, struct keepers **ret, char *ret_sentence, size_t n_sentence);

struct keepers *keepers_close(struct keepers *k); /* they stay; takes NULL */

/* From now on they are external: another program starts them, and again when they have ended. */
void keepers_set_external(struct keepers *k);
bool keepers_are_external(const struct keepers *k);

/* True: one listens there, which an earlier bfcd has left, or another one uses. */
bool keepers_have(const char *admin_socket, const char *id);

bool keepers_listen(const struct keepers *k, const char *id); /* the same */

/* Connects to that of the device, which is started with these arguments (NULL at the end) if none listens; an external one is
 * waited for. That is until the fd `cancel` is readable (-1: never). -ECONNRESET: the new one has ended; -ETIMEDOUT: no external
 * one has come; -ECANCELED; -errno. */
int keepers_connect(struct keepers *k, const char *id, const char *const *more, int cancel,
                    struct keeper_link *ret);

/* How long a keeper that an earlier bfcd has left may take to answer: it may still make what that one asked for. */
#define KEEPER_LEFT_S 60
void keeper_limit_wait(const struct keeper_link *link,
                       int seconds); /* of replies, which are -EAGAIN then; 0: no limit */

/* Closes the connection. The keeper stays. */
void keeper_leave(struct keeper_link *link);

/* Ends the process with what it has, and closes the connection. One that does not end in timeout_ms is killed; a driver may
 * hold it where no signal reaches it, so that is waited for as long again at most. */
void keeper_end(struct keeper_link *link, int timeout_ms);

/* As keeper_end(), but waits, and kills, only until the fd `cancel` is readable. */
void keeper_end_unless(struct keeper_link *link, int timeout_ms, int cancel);

/* No connection reaches the one that listens there any more, and it ends by itself when it can. The socket of an external one
 * may already be its successor's, and stays. */
void keepers_forget(const struct keepers *k, const char *id);

/* Ends all that there are and that are not used, and removes their sockets. is_used: NULL: none is. Returns their number;
 * -errno. */
int keepers_end(struct keepers *k, int timeout_ms, bool (*is_used)(const void *userdata, const char *id),
                const void *userdata);

/* Milliseconds of CLOCK_MONOTONIC. */
static inline int64_t keeper_now_ms(void)
{
        struct timespec now = { 0 };

        clock_gettime(CLOCK_MONOTONIC, &now);
        return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

#endif
