/* What processes have on a GPU, as NVML tells.
 *
 * NVML waits for the driver, which another GPU may keep busy for ever. So it runs on a thread of its own, and no request waits
 * for it. A thread, and no process: the end of a process that uses the GPU waits for the same locks of the driver.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KEEPER_USES_H
#define KEEPER_USES_H

#include "device/device.h"

struct uses;

/* UUID: as of nvml_read(), copied. NULL: no memory. */
struct uses *uses_new(const char *uuid);
struct uses *uses_free(struct uses *u); /* does not wait, also not for NVML; takes NULL */

/* As device_uses(), without this process. A pid of 0 takes what NVML told since the last such question, and asks it again. -EAGAIN: it told nothing
 * since then. -ENOENT: this machine has no NVML, or its pids are of another PID namespace; -ENOMEM. */
int uses_read(struct uses *u, uint64_t pid, struct device_use ret[static DEVICE_USES], uint32_t *ret_n);

/* What NVML told so far may be old. */
void uses_forget(struct uses *u);

#endif
