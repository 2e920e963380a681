/* The default paths of the daemon's sockets and files, for the daemon, the library and the tools. The client socket has a
 * folder of its own, which can be mounted into a container without the other two.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_PATHS_H
#define BFC_PATHS_H

#define PATHS_FOLDER         "/run/bfcd"
#define PATHS_CLIENT_SOCKET  PATHS_FOLDER "/client/bfcd.sock"
#define PATHS_ADMIN_SOCKET   PATHS_FOLDER "/admin.sock"
#define PATHS_MONITOR_NAME   "monitor.sock" /* in the folder of the admin socket, unless configured */
#define PATHS_MONITOR_SOCKET PATHS_FOLDER "/" PATHS_MONITOR_NAME
#define PATHS_RECORDS        "/var/log/bfcd/records.jsonl" /* suggested, not a default */

#endif
