/* Extended attributes and file locks on every memfd that a client is given: its extents, the usage
 * page and its own page. Counts those that succeed; each would be kernel memory that nothing
 * limits.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "tests/attacks/attack.h"

#define MAX_KEPT    20000u /* of each kind, by each process: where nothing forbids it */
#define VALUE_BYTES 1024u

static uint64_t set_attribute(int fd, unsigned i)
{
        static const char value[VALUE_BYTES];
        char name[32];

        snprintf(name, sizeof(name), "user.%u", i);
        return fsetxattr(fd, name, value, sizeof(value), 0) == 0;
}

/* Every other byte, so that no two locks are joined. */
static uint64_t set_locks(int fd, unsigned i)
{
        struct flock lock = { .l_type = F_RDLCK, .l_whence = SEEK_SET, .l_start = 2 * (off_t)i, .l_len = 1 };
        uint64_t n = fcntl(fd, F_SETLK, &lock) == 0;

        lock.l_pid = 0;
        lock.l_start += (off_t)1 << 40;
        n += fcntl(fd, F_OFD_SETLK, &lock) == 0;
        return n + (flock(fd, LOCK_SH | LOCK_NB) == 0);
}

static struct raw *session_with_all(const struct attack_stage *stage)
{
        for (;;) {
                struct raw *raw;
                Bfcd__Block block;

                if (raw_open(stage->socket, &raw) == 0) {
                        raw->wants_pages = true;
                        if (raw_hello(raw, ATTACKER, NULL) == 0 &&
                            raw_malloc(raw, 0, UINT64_C(4) << 20, &block) == 0)
                                return raw;
                        raw_close(raw);
                }
                usleep(1000);
        }
}

static void act(struct attack_stage *stage)
{
        struct raw *raw = session_with_all(stage);

        attack_is_up(stage);
        for (unsigned i = 0;; i++) {
                unsigned k = i % MAX_KEPT;
                uint64_t n = 0;

                for (size_t at = 0; at < raw->n_extents; at++)
                        n += set_attribute(raw->extents[at].fd, k) + set_locks(raw->extents[at].fd, k);
                for (size_t at = 0; at < 2; at++)
                        n += set_attribute(raw->page_fds[at], k) + set_locks(raw->page_fds[at], k);
                attack_count(stage, n);
        }
}

const struct attack attack_inode = {
        .key = "inode",
        .what = "extended attributes and locks on all memfds",
        .n_processes = 2,
        .act = act,
};
