/* Device memory of processes; see nvml.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The declarations follow NVML's documented interface. Its functions keep their signatures under one name: an
 * incompatible change gets a new suffix. */
#include "device/nvml.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LIBRARY            "libnvidia-ml.so.1"
#define SUCCESS            0
#define NOT_SUPPORTED      3
#define NO_PERMISSION      4
#define NOT_FOUND          6
#define FUNCTION_NOT_FOUND 13
#define INSUFFICIENT_SIZE  7
#define NOT_AVAILABLE      UINT64_MAX
#define UUID_BYTES         96u    /* NVML_DEVICE_UUID_V2_BUFFER_SIZE */
#define MAX_PROCESSES      65536u /* of a device */
#define FEW_PROCESSES      64u
#define TRIES              3 /* the number of processes may rise between two calls */

typedef void *device;

struct process_info { /* nvmlProcessInfo_t */
        unsigned pid;
        unsigned long long n_bytes;
        unsigned gpu_instance, compute_instance;
};

struct memory_limits { /* nvmlSetMemoryLimits_v1_t */
        const char *folder;
        unsigned long long n_soft, n_hard; /* 0 and NVML_DEVICE_MEMORY_LIMIT_MAX, UINT64_MAX: none */
};

struct nvml {
        void *library;
        int (*init)(void);
        int (*shutdown)(void);
        int (*by_uuid)(const char *uuid, device *ret);
        int (*processes)(device d, unsigned *n, struct process_info *ret);
        int (*set_limits)(device d, struct memory_limits *limits); /* NULL: an older driver */
};

static bool load(void *library, const char *name, void *ret)
{
        void *symbol = dlsym(library, name);

        memcpy(ret, &symbol, sizeof(symbol));
        return symbol != NULL;
}

int nvml_open(struct nvml **ret)
{
        struct nvml *n = calloc(1, sizeof(*n));

        if (!n)
                return -ENOMEM;
        n->library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
        if (n->library && load(n->library, "nvmlInit_v2", &n->init) &&
            load(n->library, "nvmlShutdown", &n->shutdown) &&
            load(n->library, "nvmlDeviceGetHandleByUUID", &n->by_uuid) &&
            load(n->library, "nvmlDeviceGetComputeRunningProcesses_v3", &n->processes) &&
            n->init() == SUCCESS) {
                (void)load(n->library, "nvmlDeviceSetMemoryLimits_v1", &n->set_limits);
                *ret = n;
                return 0;
        }
        if (n->library)
                dlclose(n->library);
        free(n);
        return -ENOENT;
}

struct nvml *nvml_close(struct nvml *n)
{
        if (!n)
                return NULL;
        (void)n->shutdown();
        dlclose(n->library);
        free(n);
        return NULL;
}

/* -ENOENT: the device does not tell. */
static int read_device(struct nvml *n, device d, struct process_info **ret, size_t *ret_n)
{
        unsigned n_room = FEW_PROCESSES, n_found;
        struct process_info *infos = NULL;

        for (int i = 0; i < TRIES; i++) {
                struct process_info *more = reallocarray(infos, n_room, sizeof(*infos));
                int status;

                if (!more) {
                        free(infos);
                        return -ENOMEM;
                }
                infos = more;
                n_found = n_room;
                status = n->processes(d, &n_found, infos);
                if (status == SUCCESS && n_found <= n_room) {
                        *ret = infos;
                        *ret_n = n_found;
                        return 0;
                }
                if (status != INSUFFICIENT_SIZE || n_found > MAX_PROCESSES)
                        break;
                n_room = n_found > n_room ? n_found + FEW_PROCESSES : 2 * n_room;
        }
        free(infos);
        return -ENOENT;
}

static int compare_pids(const void *left, const void *right)
{
        const struct nvml_use *a = left, *b = right;

        return (a->pid > b->pid) - (a->pid < b->pid);
}

/* One entry per process. */
static size_t join(struct nvml_use *uses, size_t n_uses)
{
        size_t n = 0;

        if (n_uses == 0)
                return 0;
        qsort(uses, n_uses, sizeof(*uses), compare_pids);
        for (size_t i = 1; i < n_uses; i++) {
                if (uses[i].pid != uses[n].pid)
                        uses[++n] = uses[i];
                else if (__builtin_add_overflow(uses[n].n_bytes, uses[i].n_bytes, &uses[n].n_bytes))
                        uses[n].n_bytes = UINT64_MAX;
        }
        return n + 1;
}

static int add_device(struct nvml *n, device d, struct nvml_use **uses, size_t *n_uses)
{
        struct process_info *infos;
        struct nvml_use *more;
        size_t n_infos;
        int r = read_device(n, d, &infos, &n_infos);

        if (r < 0)
                return r;
        more = reallocarray(*uses, *n_uses + n_infos + 1, sizeof(**uses));
        if (!more) {
                free(infos);
                return -ENOMEM;
        }
        *uses = more;
        for (size_t i = 0; i < n_infos; i++)
                if (infos[i].n_bytes != NOT_AVAILABLE)
                        more[(*n_uses)++] = (struct nvml_use){ infos[i].pid, infos[i].n_bytes };
        free(infos);
        return 0;
}

/* CUDA's UUID of a MIG device has no prefix, so that the caller may not know that it is one. */
static bool find_device(struct nvml *n, const char *uuid, device *ret)
{
        char mig[UUID_BYTES];

        if (n->by_uuid(uuid, ret) == SUCCESS)
                return true;
        if (strncmp(uuid, "GPU-", 4) != 0 || strlen(uuid) >= sizeof(mig))
                return false;
        snprintf(mig, sizeof(mig), "MIG-%s", uuid + 4);
        return n->by_uuid(mig, ret) == SUCCESS;
}

int nvml_read(struct nvml *n, const char *const *uuids, size_t n_uuids, struct nvml_use **ret_uses,
              size_t *ret_n_uses)
{
        struct nvml_use *uses = NULL;
        bool is_told = false;
        size_t n_uses = 0;

        for (size_t i = 0; i < n_uuids; i++) {
                device d;
                int r = find_device(n, uuids[i], &d) ? add_device(n, d, &uses, &n_uses) : -ENOENT;

                if (r == -ENOMEM) {
                        free(uses);
                        return r;
                }
                is_told = is_told || r == 0;
        }
        if (!is_told) {
                free(uses);
                return -ENOENT;
        }
        *ret_uses = uses;
        *ret_n_uses = join(uses, n_uses);
        return 0;
}

int nvml_limit(struct nvml *n, const char *uuid, const char *folder, uint64_t n_bytes)
{
        struct memory_limits limits = { .folder = folder, .n_hard = n_bytes };
        device d;

        if (!n->set_limits)
                return -EOPNOTSUPP;
        if (!find_device(n, uuid, &d))
                return -ENOENT;
        switch (n->set_limits(d, &limits)) {
        case SUCCESS:
                return 0;
        case NOT_SUPPORTED:
        case FUNCTION_NOT_FOUND:
                return -EOPNOTSUPP;
        case NO_PERMISSION:
                return -EPERM;
        case NOT_FOUND:
                return -ENOENT;
        default:
                return -EIO;
        }
}

const struct nvml_use *nvml_find(const struct nvml_use *uses, size_t n_uses, uint64_t pid)
{
        const struct nvml_use key = { .pid = pid };

        return n_uses > 0 ? bsearch(&key, uses, n_uses, sizeof(*uses), compare_pids) : NULL;
}

/* Some drivers tell the pids of the initial PID namespace to callers in all of them. */
static bool has_own_pids(void)
{
        static const char initial[] = "pid:[4026531836]"; /* PROC_PID_INIT_INO of the kernel */
        char name[sizeof(initial)];

        return readlink("/proc/self/ns/pid", name, sizeof(name)) == (ssize_t)strlen(initial) &&
               memcmp(name, initial, strlen(initial)) == 0;
}

const struct nvml_use *nvml_find_own(const struct nvml_use *uses, size_t n_uses)
{
        return has_own_pids() ? nvml_find(uses, n_uses, (uint64_t)getpid()) : NULL;
}
