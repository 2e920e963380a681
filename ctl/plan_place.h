/* The place that a plan is for: a partition and a tenant's quota in it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CTL_PLAN_PLACE_H
#define BFC_CTL_PLAN_PLACE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What matters of a partition and of a tenant's quota in it. */
struct plan_place {
        bool is_cuda;
        bool is_ipc; /* share: cuda-ipc */
        bool is_preallocated;
        uint32_t max_blocks;
        uint64_t limit_bytes; /* that the config has now; 0: there is no config */
        char partition[64], tenant[64];
};

/* The place of a config: a partition and a tenant by name, or NULL for the first. -EINVAL and -ENOENT, with a
 * sentence of the caller's to free. GPUs need not be there. */
int plan_place_read(const char *path, const char *partition, const char *tenant, struct plan_place *ret,
                    char **ret_error);

/* Without a config: host memory, on demand. */
void plan_place_init(struct plan_place *ret);

#endif
