/* The folder of the sockets of leases: "leases" beside the admin socket, with NAME/bfcd.sock for each name. Only the daemon's
 * user and root can enter it, so a process reaches a socket by a mount of NAME/ only.
 *
 * Processes may write into a NAME/ that was mounted for them without "ro". So nothing in it is trusted or followed: paths
 * begin at file descriptors, and no symbolic link is followed.
 *
 * Invariant: fd is open, and locked against other daemons, exactly while there are sockets, and during calls.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_LEASE_FOLDER_H
#define BFCD_LEASE_FOLDER_H

#include <stdbool.h>
#include <stddef.h>

struct lease_folder {
        char *path;
        int fd; /* -1: there is no socket */
        size_t n_sockets;
};

/* -ENOMEM. */
int lease_folder_init(struct lease_folder *f, const char *admin_socket);
void lease_folder_deinit(struct lease_folder *f); /* leaves all files */

/* Makes the folder of this name, or takes it as it is, with a socket that listens. The name has been checked. -errno:
 * lease_folder_trouble(). */
int lease_folder_listen(struct lease_folder *f, const char *name, int *ret_fd);

const char *lease_folder_trouble(int r);

/* Removes what lease_folder_listen() made. */
void lease_folder_remove(struct lease_folder *f, const char *name);

/* Removes what earlier daemons left, except for names that are still used: sockets, and folders without anything else. A folder
 * with a socket stays until the next start: where the ledger was lost, its lease may be made again, and the folder may still be
 * mounted. */
void lease_folder_clean(struct lease_folder *f, bool (*is_used)(void *userdata, const char *name),
                        void *userdata);

#endif
