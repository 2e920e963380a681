/* Connecting to the daemon, and disconnecting.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_CONNECT_H
#define BFC_CLIENT_CONNECT_H

#include <bfcclient.h>

/* The process is about to exit, and its threads may still use the client: only notifies the daemon. Waits
 * at most a second; does nothing in a forked child. */
void client_say_exit(bfc_client *client);

#endif
