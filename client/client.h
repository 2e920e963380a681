/* Clients, for what is built on them inside the library.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_CLIENT_H
#define BFC_CLIENT_CLIENT_H

#include <bfcclient.h>

/* 0 where the client may be used at all; -EINVAL (NULL), -ECHILD. One load. */
int client_check(const bfc_client *client);

#endif
