/* memfds that a process shares with others that it does not trust.
 *
 * A process with a file description of a memfd can do more than read and write: set extended
 * attributes and file locks, which stay in the kernel as long as the inode or the description.
 * So a shared memfd has three guards:
 *
 *   mode 0600      Only the owner's processes may set extended attributes, add inotify watches or
 *                  open the file again with other rights. Processes of other users may not.
 *   two locks      An OFD lock over all offsets and a flock() lock belong to the maker's
 *                  description, so every lock request on another description conflicts.
 *   memfd_lend()   Others get a file description of their own. They can neither release the two
 *                  locks nor change flags of the maker's description.
 *
 * Processes of the same user pass the first guard: nothing protects one user's processes from
 * each other.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_PROTO_MEMFD_H
#define BFC_PROTO_MEMFD_H

#include <errno.h>
#include <fcntl.h>
#include <linux/memfd.h>
#include <stdbool.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U /* Linux 6.3 */
#endif

/* Sets mode and locks. Also for a memfd of a previous process; errors are ignored. */
static inline void memfd_guard(int fd)
{
        struct flock whole = { .l_type = F_WRLCK, .l_whence = SEEK_SET };

        (void)fchmod(fd, S_IRUSR | S_IWUSR);
        (void)fcntl(fd, F_OFD_SETLK, &whole);
        (void)flock(fd, LOCK_EX | LOCK_NB);
}

static inline int memfd_make_bare(const char *name)
{
        int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);

        if (fd < 0 && errno == EINVAL)
                fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
        return fd < 0 ? -errno : fd;
}

/* An empty, guarded memfd that can be sealed; -errno. */
static inline int memfd_make(const char *name)
{
        int fd = memfd_make_bare(name);

        if (fd >= 0)
                memfd_guard(fd);
        return fd;
}

/* A memfd that is given away: its maker keeps no description, so it needs no locks. */
static inline int memfd_make_to_give(const char *name)
{
        int fd = memfd_make_bare(name);

        if (fd >= 0)
                (void)fchmod(fd, S_IRUSR | S_IWUSR);
        return fd;
}

/* Another file description, for another process; flags: O_RDWR or O_RDONLY. The caller closes it. If it
 * cannot be opened (no /proc; a memfd of a previous process with another uid) the result is a duplicate
 * of fd. -EMFILE, -ENFILE, -ENOMEM. */
static inline int memfd_lend(int fd, int flags)
{
        char path[sizeof("/proc/self/fd/") + 3 * sizeof(int)];
        int lent;

        snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
        lent = open(path, flags | O_CLOEXEC);
        if (lent < 0 && errno != EMFILE && errno != ENFILE && errno != ENOMEM)
                lent = fcntl(fd, F_DUPFD_CLOEXEC, 3);
        return lent < 0 ? -errno : lent;
}

/* A file description with a write lease, which the caller closes soon: while it has it, no other process has the memory
 * open or mapped, and an open() of it waits. So nothing can delay the caller there. The kernel grants the lease only if no
 * other description is counted; a mapping keeps its description open, and so does an unread message. The maker's own is not
 * counted, and no descriptor with O_PATH. -EBUSY: another process may have the memory; also where that is unknown. */
static inline int memfd_seize(int fd)
{
        char path[sizeof("/proc/self/fd/") + 3 * sizeof(int)];
        int own;

        snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
        own = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
        if (own >= 0 && fcntl(own, F_SETLEASE, F_WRLCK) == 0)
                return own;
        if (own >= 0)
                close(own);
        return -EBUSY;
}

static inline bool memfd_is_alone(int fd)
{
        int own = memfd_seize(fd);

        if (own >= 0)
                close(own); /* and with it the lease */
        return own >= 0;
}

#endif
