/* Device memory of processes, from NVIDIA's management library.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The driver brings the library, so it is loaded at run time. It counts the memory that a process allocated
 * from the driver itself; memory of the broker is counted for its keeper. */
#ifndef BFC_DEVICE_NVML_H
#define BFC_DEVICE_NVML_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct nvml;

struct nvml_use {
        uint64_t pid;
        uint64_t n_bytes; /* on all devices that were asked */
};

/* -ENOENT: this machine has no such library, or it does not work. -ENOMEM. */
int nvml_open(struct nvml **ret);
struct nvml *nvml_close(struct nvml *n); /* takes NULL */

/* Processes by pid, on the devices with these UUIDs; of a MIG device the prefix is "MIG-" or "GPU-". Asks for no other device.
 * May take as long as the driver does. The caller frees *ret_uses. -ENOENT: there is no such device, or none tells. -ENOMEM. */
int nvml_read(struct nvml *n, const char *const *uuids, size_t n_uuids, struct nvml_use **ret_uses,
              size_t *ret_n_uses);

/* Limits what processes in a control group (its folder, of version 2) allocate from the driver; UINT64_MAX: no limit. From driver
 * r615 on. -EOPNOTSUPP: this driver or device has no such limits; -EPERM: only root may; -ENOENT: there is no such device or
 * control group; -EIO. */
int nvml_limit(struct nvml *n, const char *uuid, const char *folder, uint64_t n_bytes);

/* Of the result; NULL: the process is not there. */
const struct nvml_use *nvml_find(const struct nvml_use *uses, size_t n_uses, uint64_t pid);

/* Of this process. NULL also in a PID namespace of its own, where the pids may be those of other processes. */
const struct nvml_use *nvml_find_own(const struct nvml_use *uses, size_t n_uses);

#endif
