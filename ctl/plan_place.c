/* The place that a plan is for; see plan_place.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctl/plan_place.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/config/config.h"

#define GPU_BYTES (UINT64_C(1) << 46) /* no limit is above it */

void plan_place_init(struct plan_place *ret)
{
        *ret = (struct plan_place){ .max_blocks = 100000, .partition = "plan", .tenant = "plan" };
}

/* Each GPU that a config names is there, and large enough. Different ids are different GPUs. */
static int look(void *userdata, const char *admin_socket, const char *id, struct config_gpu *ret,
                char *ret_sentence, size_t n_sentence)
{
        (void)admin_socket;
        uint64_t hash = 14695981039346656037u;

        (void)userdata;
        (void)ret_sentence;
        (void)n_sentence;
        for (const char *c = id; *c; c++)
                hash = (hash ^ (unsigned char)*c) * 1099511628211u;
        *ret = (struct config_gpu){ .bytes_total = GPU_BYTES, .bytes_free = GPU_BYTES };
        memcpy(ret->uuid, &hash, sizeof(hash));
        return 0;
}

static const struct config_machine machine = { .look = look };

static const struct config_quota *find_quota(const struct config_tenant *t, const struct config *c,
                                             const char *partition)
{
        for (size_t i = 0; i < t->n_quotas; i++)
                if (!partition || strcmp(c->partitions[t->quotas[i].partition].name, partition) == 0)
                        return &t->quotas[i];
        return NULL;
}

static int find_place(const struct config *c, const char *partition, const char *tenant,
                      struct plan_place *ret, char **ret_error)
{
        const struct config_partition *p;
        const struct config_quota *q = NULL;
        size_t i;

        for (i = 0; i < c->n_tenants && !q; i++)
                if (!tenant || strcmp(c->tenants[i].name, tenant) == 0)
                        q = find_quota(&c->tenants[i], c, partition);
        if (!q) {
                if (asprintf(ret_error, "no such quota: tenant '%s', partition '%s'",
                             tenant ? tenant : "(any)", partition ? partition : "(any)") < 0)
                        *ret_error = NULL;
                return -ENOENT;
        }
        p = &c->partitions[q->partition];
        *ret = (struct plan_place){
                .is_cuda = c->devices[p->device].is_cuda,
                .is_ipc = p->share == CONFIG_SHARE_CUDA_IPC,
                .is_preallocated = p->growth == CONFIG_GROWTH_PREALLOCATE,
                .max_blocks = q->max_blocks,
                .limit_bytes = q->limit_bytes,
        };
        snprintf(ret->partition, sizeof(ret->partition), "%s", p->name);
        snprintf(ret->tenant, sizeof(ret->tenant), "%s", c->tenants[i - 1].name);
        return 0;
}

int plan_place_read(const char *path, const char *partition, const char *tenant, struct plan_place *ret,
                    char **ret_error)
{
        struct config *config = NULL;
        size_t n_errors = 0;
        char *errors = NULL;
        FILE *out = open_memstream(&errors, &n_errors);
        int r = out ? config_load(path, &machine, out, &config) : -ENOMEM;

        if (out)
                fclose(out);
        if (r == 0) {
                free(errors); /* warnings */
                r = find_place(config, partition, tenant, ret, ret_error);
                config_free(config);
                return r;
        }
        if (errors && n_errors > 0 && errors[n_errors - 1] == '\n')
                errors[n_errors - 1] = '\0';
        *ret_error = errors;
        return r == -ENOMEM ? r : -EINVAL;
}
