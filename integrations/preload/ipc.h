/* Blocks that this process has opened by handles of others; see ipc.c.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_PRELOAD_IPC_H
#define BFC_PRELOAD_IPC_H

#include "integrations/preload/broker.h"

/* Forgets those of the GPU, whose client is about to end. */
void ipc_forget(const struct gpu *gpu);

#endif
