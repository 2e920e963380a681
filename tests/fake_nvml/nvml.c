/* A libnvidia-ml.so.1 that tells what a file says.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * FAKE_NVML names the file: a line "UUID PID BYTES" for each process, "UUID" alone for a device without one, and
 * "UUID PID -" for one whose memory is not known. Without the variable the library does not initialise. With
 * FAKE_NVML=driver it tells what is in use of the fake driver's memory (FAKE_CUDA_STATE) and which process made it. With
 * FAKE_NVML_LIMITS names a file to which each limit of a control group is written. With
 * FAKE_NVML=hang a question for devices does not return. */
#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

#define SUCCESS           0
#define INVALID_ARGUMENT  2
#define NOT_SUPPORTED     3
#define NO_PERMISSION     4
#define NOT_FOUND         6
#define INSUFFICIENT_SIZE 7
#define DRIVER_NOT_LOADED 9
#define VERSION_MISMATCH  25
#define UNKNOWN           999
#define NO_FABRIC         0 /* NVML_GPU_FABRIC_STATE_NOT_SUPPORTED */
#define TOTAL_BYTES       (80ull << 30)
#define RESERVED_BYTES    (500ull << 20)
#define MAX_DEVICES       8u
#define MAX_LINES         1024u

struct process_info {
        unsigned pid;
        unsigned long long n_bytes;
        unsigned gpu_instance, compute_instance;
};

struct memory {
        unsigned long long n_total, n_free, n_used;
};

struct memory_v2 {
        unsigned version;
        unsigned long long n_total, n_reserved, n_free, n_used;
};

struct fabric { /* nvmlGpuFabricInfo_v2_t; that of version 3 has more at its end */
        unsigned version;
        unsigned char cluster[16];
        int status;
        unsigned clique;
        unsigned char state;
        unsigned health;
};

static struct line {
        unsigned device;
        int has_process;
        struct process_info info;
} lines[MAX_LINES];
static unsigned n_lines, n_devices;
static char uuids[MAX_DEVICES][64];

struct memory_limits { /* nvmlSetMemoryLimits_v1_t */
        const char *folder;
        unsigned long long n_soft, n_hard;
};

struct process_info_v1 {
        unsigned pid;
        unsigned long long n_bytes;
};

int nvmlInit(void);
int nvmlInit_v2(void);
int nvmlInitWithFlags(unsigned flags);
int nvmlDeviceGetHandleByPciBusId_v2(const char *text, void **ret);
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *n, struct process_info_v1 *ret);
int nvmlSystemGetCudaDriverVersion_v2(int *ret);
int nvmlDeviceGetHandleByUUID(const char *uuid, void **ret);
int nvmlDeviceSetMemoryLimits_v1(void *device, struct memory_limits *limits);
int nvmlDeviceGetGpuFabricInfoV(void *device, struct fabric *ret);
int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, int *ret);
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *ret);
int nvmlSystemGetDriverVersion(char *ret, unsigned n_ret);
int nvmlShutdown(void);
int nvmlDeviceGetCount_v2(unsigned *ret);
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **ret);
int nvmlDeviceGetUUID(void *device, char *ret, unsigned n_ret);
int nvmlDeviceGetName(void *device, char *ret, unsigned n_ret);
int nvmlDeviceGetCudaComputeCapability(void *device, int *ret_major, int *ret_minor);
int nvmlDeviceGetMemoryInfo(void *device, struct memory *ret);
int nvmlDeviceGetMemoryInfo_v2(void *device, struct memory_v2 *ret);
const char *nvmlErrorString(int result);
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *n, struct process_info *ret);

static unsigned device_of(const char *uuid)
{
        for (unsigned i = 0; i < n_devices; i++)
                if (strcmp(uuids[i], uuid) == 0)
                        return i;
        snprintf(uuids[n_devices], sizeof(uuids[0]), "%s", uuid);
        return n_devices++;
}

API int nvmlInit_v2(void)
{
        return getenv("FAKE_NVML") ? SUCCESS : DRIVER_NOT_LOADED;
}

API int nvmlInit(void)
{
        return nvmlInit_v2();
}

API int nvmlInitWithFlags(unsigned flags)
{
        (void)flags;
        return nvmlInit_v2();
}

API int nvmlSystemGetDriverVersion(char *ret, unsigned n_ret)
{
        return snprintf(ret, n_ret, "550.0") < (int)n_ret ? SUCCESS : INSUFFICIENT_SIZE;
}

API int nvmlSystemGetCudaDriverVersion_v2(int *ret)
{
        const char *version = getenv("FAKE_CUDA_VERSION");

        *ret = version ? atoi(version) : 12040;
        return SUCCESS;
}

API int nvmlShutdown(void)
{
        return SUCCESS;
}

static void add_object(int folder, const char *name)
{
        unsigned long long n_bytes, id;
        unsigned device;
        char kind, uuid[64];
        int fd;

        if (sscanf(name, "mem-%u-%c-%llu-%llx", &device, &kind, &n_bytes, &id) != 4 || n_lines == MAX_LINES)
                return;
        fd = openat(folder, name, O_RDONLY | O_CLOEXEC);
        if (fd < 0 || flock(fd, LOCK_EX | LOCK_NB) == 0) { /* not in use */
                close(fd);
                return;
        }
        close(fd);
        snprintf(uuid, sizeof(uuid), "GPU-fa4ec0da-0000-4000-8000-%012x", device + 1);
        lines[n_lines++] = (struct line){ .device = device_of(uuid),
                                          .has_process = 1,
                                          .info = { .pid = (unsigned)(id >> 32), .n_bytes = n_bytes } };
}

/* The fake driver's lock is held meanwhile. */
static void read_folder(const char *path)
{
        DIR *dir = path ? opendir(path) : NULL;
        const struct dirent *e;
        int lock;

        if (!dir)
                return;
        lock = openat(dirfd(dir), "lock", O_RDWR | O_CREAT | O_CLOEXEC, 0666);
        if (lock >= 0)
                (void)flock(lock, LOCK_EX);
        while ((e = readdir(dir)) && n_devices < MAX_DEVICES)
                add_object(dirfd(dir), e->d_name);
        close(lock);
        closedir(dir);
}

/* Reads the file again. */
API int nvmlDeviceGetCount_v2(unsigned *ret)
{
        char text[256], uuid[64], bytes[32];
        FILE *f;

        n_lines = n_devices = 0;
        while (strcmp(getenv("FAKE_NVML"), "hang") == 0)
                pause();
        if (strcmp(getenv("FAKE_NVML"), "driver") == 0) {
                read_folder(getenv("FAKE_CUDA_STATE"));
                *ret = n_devices;
                return SUCCESS;
        }
        f = fopen(getenv("FAKE_NVML"), "re");
        if (!f)
                return NOT_FOUND;
        while (fgets(text, sizeof(text), f) && n_lines < MAX_LINES && n_devices < MAX_DEVICES) {
                struct line *l = &lines[n_lines++];
                int n;

                *l = (struct line){ 0 };
                n = sscanf(text, "%63s %u %31s", uuid, &l->info.pid, bytes);
                if (n < 1) {
                        n_lines--;
                        continue;
                }
                l->device = device_of(uuid);
                l->has_process = n == 3;
                l->info.n_bytes = n == 3 && strcmp(bytes, "-") != 0 ? strtoull(bytes, NULL, 10) : UINT64_MAX;
        }
        fclose(f);
        *ret = n_devices;
        return SUCCESS;
}

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **ret)
{
        unsigned n;

        if (n_devices == 0) /* nothing has read the file so far */
                (void)nvmlDeviceGetCount_v2(&n);
        if (index >= n_devices)
                return INVALID_ARGUMENT;
        *ret = uuids[index];
        return SUCCESS;
}

/* The fake driver's first GPU is on bus 1. */
API int nvmlDeviceGetHandleByPciBusId_v2(const char *text, void **ret)
{
        unsigned domain, bus, n;

        if (nvmlDeviceGetCount_v2(&n) != SUCCESS || sscanf(text, "%x:%x:", &domain, &bus) != 2 || bus == 0)
                return INVALID_ARGUMENT;
        return nvmlDeviceGetHandleByIndex_v2(bus - 1, ret);
}

API int nvmlDeviceGetHandleByUUID(const char *uuid, void **ret)
{
        unsigned n;

        if (nvmlDeviceGetCount_v2(&n) != SUCCESS)
                return NOT_FOUND;
        for (unsigned i = 0; i < n; i++)
                if (strcmp(uuids[i], uuid) == 0)
                        return nvmlDeviceGetHandleByIndex_v2(i, ret);
        return NOT_FOUND;
}

API int nvmlDeviceGetUUID(void *device, char *ret, unsigned n_ret)
{
        if (strlen(device) >= n_ret)
                return INSUFFICIENT_SIZE;
        strcpy(ret, device);
        return SUCCESS;
}

/* The name and the capability of the fake driver's devices. */
API int nvmlDeviceGetName(void *device, char *ret, unsigned n_ret)
{
        (void)device;
        return snprintf(ret, n_ret, "Fake GPU") < (int)n_ret ? SUCCESS : INSUFFICIENT_SIZE;
}

API int nvmlDeviceGetCudaComputeCapability(void *device, int *ret_major, int *ret_minor)
{
        (void)device;
        *ret_major = 9;
        *ret_minor = 0;
        return SUCCESS;
}

/* As an older driver without the variable. "/sys/fs/cgroup/none" is not there, and "/sys/fs/cgroup/broken" fails. */
API int nvmlDeviceSetMemoryLimits_v1(void *device, struct memory_limits *limits)
{
        const char *path = getenv("FAKE_NVML_LIMITS");
        FILE *f;

        if (!path || strncmp(device, "MIG-", 4) == 0)
                return NOT_SUPPORTED;
        if (strncmp(limits->folder, "/sys/fs/cgroup/", 15) != 0 || limits->n_soft > limits->n_hard)
                return INVALID_ARGUMENT;
        if (strcmp(limits->folder, "/sys/fs/cgroup/none") == 0)
                return NOT_FOUND;
        if (strcmp(limits->folder, "/sys/fs/cgroup/broken") == 0)
                return UNKNOWN;
        f = fopen(path, "ae");
        if (!f)
                return NO_PERMISSION;
        fprintf(f, "%s %s %llu %llu\n", (char *)device, limits->folder, limits->n_soft, limits->n_hard);
        return fclose(f) == 0 ? SUCCESS : NO_PERMISSION;
}

/* ---- links between GPUs, of which there are none ------------------------------------------ */

API int nvmlDeviceGetGpuFabricInfoV(void *device, struct fabric *ret)
{
        unsigned version = ret->version >> 24, n_bytes = ret->version & 0xffffff;

        (void)device;
        if ((version != 2 && version != 3) || n_bytes < sizeof(*ret))
                return VERSION_MISMATCH;
        memset((char *)ret + sizeof(ret->version), 0, n_bytes - sizeof(ret->version));
        ret->state = NO_FABRIC;
        return SUCCESS;
}

API int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, int *ret)
{
        (void)device, (void)link, (void)ret;
        return NOT_SUPPORTED;
}

API int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *ret)
{
        (void)device, (void)link, (void)ret;
        return NOT_SUPPORTED;
}

API const char *nvmlErrorString(int result)
{
        return result == SUCCESS ? "Success" : "Failure";
}

/* Of each device; what the processes have is used. */
static struct memory_v2 memory_of(const void *device)
{
        struct memory_v2 m = { .n_total = TOTAL_BYTES, .n_reserved = RESERVED_BYTES };

        for (unsigned i = 0; i < n_lines; i++)
                if (lines[i].has_process && uuids[lines[i].device] == device &&
                    lines[i].info.n_bytes != UINT64_MAX)
                        m.n_used += lines[i].info.n_bytes;
        m.n_free = m.n_total - m.n_reserved - m.n_used;
        return m;
}

API int nvmlDeviceGetMemoryInfo(void *device, struct memory *ret)
{
        struct memory_v2 m = memory_of(device);

        *ret = (struct memory){ m.n_total, m.n_free, m.n_used + m.n_reserved };
        return SUCCESS;
}

API int nvmlDeviceGetMemoryInfo_v2(void *device, struct memory_v2 *ret)
{
        unsigned version = ret->version;

        if (version != (2u << 24 | sizeof(*ret)))
                return VERSION_MISMATCH;
        *ret = memory_of(device);
        ret->version = version;
        return SUCCESS;
}

API int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *n, struct process_info *ret)
{
        unsigned n_room = *n, n_found = 0;

        for (unsigned i = 0; i < n_lines; i++) {
                if (!lines[i].has_process || uuids[lines[i].device] != (char *)device)
                        continue;
                if (n_found < n_room)
                        ret[n_found] = lines[i].info;
                n_found++;
        }
        *n = n_found;
        return n_found > n_room ? INSUFFICIENT_SIZE : SUCCESS;
}

API int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *n, struct process_info_v1 *ret)
{
        struct process_info infos[MAX_LINES];
        unsigned n_room = *n, n_found = MAX_LINES;
        int result = nvmlDeviceGetComputeRunningProcesses_v3(device, &n_found, infos);

        for (unsigned i = 0; result == SUCCESS && i < n_found && i < n_room; i++)
                ret[i] = (struct process_info_v1){ infos[i].pid, infos[i].n_bytes };
        *n = n_found;
        return n_found > n_room ? INSUFFICIENT_SIZE : result;
}
