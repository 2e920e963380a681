/* A libnvidia-ml.so.1 that tells what a file says.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * FAKE_NVML names the file: a line "UUID PID BYTES" for each process, "UUID" alone for a device without one, and
 * "UUID PID -" for one whose memory is not known. Without the variable the library does not initialise. */
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))

#define SUCCESS           0
#define INVALID_ARGUMENT  2
#define NOT_FOUND         6
#define INSUFFICIENT_SIZE 7
#define DRIVER_NOT_LOADED 9
#define MAX_DEVICES       8u
#define MAX_LINES         1024u

struct process_info {
        unsigned pid;
        unsigned long long n_bytes;
        unsigned gpu_instance, compute_instance;
};

static struct line {
        unsigned device;
        int has_process;
        struct process_info info;
} lines[MAX_LINES];
static unsigned n_lines, n_devices;
static char uuids[MAX_DEVICES][64];

int nvmlInit_v2(void);
int nvmlShutdown(void);
int nvmlDeviceGetCount_v2(unsigned *ret);
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **ret);
int nvmlDeviceGetUUID(void *device, char *ret, unsigned n_ret);
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

API int nvmlShutdown(void)
{
        return SUCCESS;
}

/* Reads the file again. */
API int nvmlDeviceGetCount_v2(unsigned *ret)
{
        FILE *f = fopen(getenv("FAKE_NVML"), "re");
        char text[256], uuid[64], bytes[32];

        if (!f)
                return NOT_FOUND;
        n_lines = n_devices = 0;
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
        if (index >= n_devices)
                return INVALID_ARGUMENT;
        *ret = uuids[index];
        return SUCCESS;
}

API int nvmlDeviceGetUUID(void *device, char *ret, unsigned n_ret)
{
        if (strlen(device) >= n_ret)
                return INSUFFICIENT_SIZE;
        strcpy(ret, device);
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
