/* The machine that the fake pretends: what the environment says, its devices.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 *   FAKE_CUDA_DEVICES       "2GiB,512MiB:mig": a size each; "" is a machine
 *                           without a GPU; 1GiB if not set
 *   FAKE_CUDA_STATE         the folder that all processes of the machine share
 *                           (/dev/shm/fake-cuda-UID)
 *   FAKE_CUDA_CONTEXT_BYTES what a context takes of its device, a green one excepted (0)
 *   FAKE_CUDA_POOL_BYTES    what a memory pool takes of its device at once (32MiB)
 *   FAKE_CUDA_POISON_BYTES  up to where pages of fresh memory are filled with 0xab (its end)
 *   FAKE_CUDA_STREAM_DELAY_US  how late work in streams runs (0)
 *   FAKE_CUDA_ATTRIBUTES    see driver.c;  FAKE_CUDA_MISSING: functions, joined
 *                           by commas, that cuGetProcAddress does not know
 *   FAKE_CUDA_VERSION       the driver's (12040)
 *   FAKE_CUDA_IPC_SAME_UID  1: handles open for the exporter's user only (0)
 *   FAKE_CUDA_PEER_ACCESS   0: no device can access another (1)
 *   FAKE_CUDA_FORKED_DIES   1: a forked child that calls a driver which its parent
 *                           has initialised ends there, instead of being told (0)
 *   FAKE_CUDA_DESTROYED_STREAM  what a call with a destroyed stream answers: 400,
 *                           709, or "crash": it ends the process (crash)
 *   FAKE_CUDA_FORK_KEEPS    1: a forked child keeps the memory that its parent has
 *                           in use, as one that inherits a driver's fds does (0)
 *   FAKE_CUDA_FREE_LATE_MS  what this process gives back shows as free so much
 *                           later (0)
 *   FAKE_CUDA_MS_PER_GIB    how long cuMemCreate and the last cuMemRelease of it take; and
 *                           where it is set, a fill with zeros makes holes, so that a
 *                           device can be larger than the machine (0)
 *   FAKE_CUDA_FOREIGN       "8MiB,0": what programs outside of the machine's
 *                           folder have taken, at one cuMemGetInfo after the
 *                           other and again from the first (0)
 *   FAKE_CUDA_INSTANT_CREATE  1: cuMemCreate gives handles of no memory, for a bench
 *   FAKE_CUDA_PEAK          1: the files peak-INDEX in the folder have the most bytes that were taken of
 *                           each device, by this process and others with this setting (0)
 *   FAKE_CUDA_STACK_BYTES   what each call uses of its thread's stack (512KiB)
 *   FAKE_CUDA_MPS           the folder in which an MPS control daemon listens: a process whose
 *                           CUDA_MPS_PIPE_DIRECTORY (/tmp/nvidia-mps) is this becomes a client,
 *                           as attribute 133 of its devices says (none)
 *   FAKE_CUDA_FD            "socket": exported fds are no regular files ("file")
 *   FAKE_CUDA_FAULT, FAKE_CUDA_COUNTS  see fault.c
 *   CUDA_VISIBLE_DEVICES    as ever
 *
 * A setting that cannot be read ends the process: a test must not pass because
 * of a misspelt fault. */
#include "tests/fake_cuda/fake.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct fake_settings fake;
char fake_folder[256];

void fake_die(const char *format, ...)
{
        va_list ap;

        va_start(ap, format);
        fputs("fake libcuda: ", stderr);
        vfprintf(stderr, format, ap);
        fputc('\n', stderr);
        va_end(ap);
        abort();
}

/* ---- the environment ----------------------------------------------------- */

/* "5", "2GiB", "512MiB", "64KiB". A mistake must not pass for a setting. */
uint64_t fake_parse_number(const char *text, const char *what)
{
        char *end;
        uint64_t n;

        errno = 0;
        n = strtoull(text, &end, 0);
        if (end == text || errno != 0)
                fake_die("%s: \"%s\" is no number", what, text);
        if (strncmp(end, "KiB", 3) == 0)
                return n << 10;
        if (strncmp(end, "MiB", 3) == 0)
                return n << 20;
        if (strncmp(end, "GiB", 3) == 0)
                return n << 30;
        if (*end != '\0' && !strchr(",:!/=", *end))
                fake_die("%s: \"%s\" is no number", what, text);
        return n;
}

static uint64_t setting(const char *name, uint64_t otherwise)
{
        const char *text = getenv(name);

        return text && *text ? fake_parse_number(text, name) : otherwise;
}

static void setup_foreign(void)
{
        const char *text = getenv("FAKE_CUDA_FOREIGN");
        char *copy = strdup(text ? text : ""), *rest = copy, *one;

        if (!copy)
                fake_die("out of memory");
        while ((one = strsep(&rest, ","))) {
                if (!*one)
                        continue;
                if (fake.n_foreign == FAKE_MAX_FOREIGN)
                        fake_die("FAKE_CUDA_FOREIGN: more than %d", FAKE_MAX_FOREIGN);
                fake.foreign[fake.n_foreign++] = fake_parse_number(one, "FAKE_CUDA_FOREIGN");
        }
        free(copy);
}

static void setup_fd(void)
{
        const char *text = getenv("FAKE_CUDA_FD");

        fake.fd_is_socket = text && strcmp(text, "socket") == 0;
        if (text && *text && !fake.fd_is_socket && strcmp(text, "file") != 0)
                fake_die("FAKE_CUDA_FD: \"%s\" is neither file nor socket", text);
}

static void setup_mps(void)
{
        const char *control = getenv("FAKE_CUDA_MPS"), *pipes = getenv("CUDA_MPS_PIPE_DIRECTORY");

        fake.is_mps_client = control && strcmp(control, pipes ? pipes : "/tmp/nvidia-mps") == 0;
}

static void add_device(const char *text)
{
        struct fake_device *d = &fake.devices[fake.n_devices];

        if (fake.n_devices == FAKE_MAX_DEVICES)
                fake_die("FAKE_CUDA_DEVICES: more than %d", FAKE_MAX_DEVICES);
        d->index = fake.n_devices++;
        d->n_bytes = fake_parse_number(text, "FAKE_CUDA_DEVICES");
        d->is_mig = strstr(text, ":mig") != NULL;
        memcpy(d->uuid.bytes, "\xfa\x4e\xc0\xda\x00\x00\x40\x00\x80\x00\x00\x00\x00\x00\x00", 15);
        d->uuid.bytes[15] = (char)(d->index + 1);
}

static void setup_devices(void)
{
        const char *text = getenv("FAKE_CUDA_DEVICES");
        char *copy = strdup(text ? text : "1GiB"), *rest = copy, *one;

        if (!copy)
                fake_die("out of memory");
        while ((one = strsep(&rest, ",")))
                if (*one)
                        add_device(one);
        free(copy);
}

/* As the driver reads it: an ordinal or the beginning of "GPU-…", "MIG-…"; what
 * it does not know ends the list. */
static struct fake_device *visible_by_name(const char *name)
{
        char *end;
        unsigned long n;

        if (strncmp(name, "GPU-", 4) == 0 || strncmp(name, "MIG-", 4) == 0) {
                for (unsigned int i = 0; i < fake.n_devices; i++) {
                        char text[64];

                        snprintf(text, sizeof(text), "%s-fa4ec0da-0000-4000-8000-%012x",
                                 fake.devices[i].is_mig ? "MIG" : "GPU", i + 1);
                        if (strncmp(text, name, strlen(name)) == 0)
                                return &fake.devices[i];
                }
                return NULL;
        }
        n = strtoul(name, &end, 10);
        return end != name && *end == '\0' && n < fake.n_devices ? &fake.devices[n] : NULL;
}

static void setup_visible(void)
{
        const char *text = getenv("CUDA_VISIBLE_DEVICES");
        char *copy, *rest, *one;

        for (unsigned int i = 0; !text && i < fake.n_devices; i++)
                fake.visible[fake.n_visible++] = &fake.devices[i];
        if (!text)
                return;
        copy = rest = strdup(text);
        if (!copy)
                fake_die("out of memory");
        while ((one = strsep(&rest, ",")) && fake.n_visible < FAKE_MAX_DEVICES) {
                struct fake_device *d = visible_by_name(one);

                if (!d)
                        break;
                fake.visible[fake.n_visible++] = d;
        }
        free(copy);
}

/* A process sees one MIG device, the first it may, and beside it no whole GPU. */
static void setup_mig(void)
{
        for (unsigned int i = 0; i < fake.n_visible; i++) {
                if (!fake.visible[i]->is_mig)
                        continue;
                fake.visible[0] = fake.visible[i];
                fake.n_visible = 1;
        }
}

static void setup_folder(void)
{
        const char *text = getenv("FAKE_CUDA_STATE");

        if (text && *text)
                snprintf(fake_folder, sizeof(fake_folder), "%s", text);
        else
                snprintf(fake_folder, sizeof(fake_folder), "/dev/shm/fake-cuda-%u", (unsigned int)geteuid());
        if (mkdir(fake_folder, 0777) == 0)
                chmod(fake_folder, 01777); /* tests with several uids share it */
        else if (errno != EEXIST)
                fake_die("cannot make %s: %m", fake_folder);
}

static CUresult destroyed_stream(void)
{
        const char *text = getenv("FAKE_CUDA_DESTROYED_STREAM");

        if (text && strcmp(text, "400") == 0)
                return CUDA_ERROR_INVALID_HANDLE;
        if (text && strcmp(text, "709") == 0)
                return CUDA_ERROR_CONTEXT_IS_DESTROYED;
        if (text && strcmp(text, "crash") != 0)
                fake_die("FAKE_CUDA_DESTROYED_STREAM: \"%s\" is neither 400 nor 709 nor crash", text);
        return CUDA_SUCCESS;
}

static void setup(void)
{
        setup_devices();
        setup_visible();
        setup_mig();
        setup_folder();
        fake.context_n_bytes = setting("FAKE_CUDA_CONTEXT_BYTES", 0);
        fake.pool_n_bytes = setting("FAKE_CUDA_POOL_BYTES", UINT64_C(32) << 20);
        fake.poison_n_bytes = setting("FAKE_CUDA_POISON_BYTES", UINT64_MAX);
        fake.stream_delay_us = (unsigned int)setting("FAKE_CUDA_STREAM_DELAY_US", 0);
        fake.version = (int)setting("FAKE_CUDA_VERSION", 12040);
        fake.ipc_same_uid = setting("FAKE_CUDA_IPC_SAME_UID", 0) != 0;
        fake.peer_access = setting("FAKE_CUDA_PEER_ACCESS", 1) != 0;
        fake.forked_dies = setting("FAKE_CUDA_FORKED_DIES", 0) != 0;
        fake.destroyed_stream = destroyed_stream();
        fake.notes_peak = setting("FAKE_CUDA_PEAK", 0) != 0;
        fake.create_is_instant = setting("FAKE_CUDA_INSTANT_CREATE", 0) != 0;
        fake.fork_keeps = setting("FAKE_CUDA_FORK_KEEPS", 0) != 0;
        fake.free_late_ms = setting("FAKE_CUDA_FREE_LATE_MS", 0);
        fake.ms_per_gib = setting("FAKE_CUDA_MS_PER_GIB", 0);
        fake.stack_n_bytes = setting("FAKE_CUDA_STACK_BYTES", UINT64_C(512) << 10);
        setup_foreign();
        setup_fd();
        setup_mps();
        fake.attributes = getenv("FAKE_CUDA_ATTRIBUTES");
        fake.missing = getenv("FAKE_CUDA_MISSING");
        fault_setup();
        fake_guard_forks();
}

void fake_setup(void)
{
        static pthread_once_t once = PTHREAD_ONCE_INIT;

        pthread_once(&once, setup);
}

/* ---- devices ------------------------------------------------------------- */

struct fake_device *fake_device_get(CUdevice ordinal)
{
        return ordinal >= 0 && (unsigned int)ordinal < fake.n_visible ? fake.visible[ordinal] : NULL;
}

CUdevice fake_device_ordinal(const struct fake_device *d)
{
        for (unsigned int i = 0; i < fake.n_visible; i++)
                if (fake.visible[i] == d)
                        return (CUdevice)i;
        return -1;
}

/* NULL: this process may not see it. */
struct fake_device *fake_device_by_index(unsigned int index)
{
        for (unsigned int i = 0; i < fake.n_visible; i++)
                if (fake.visible[i]->index == index)
                        return fake.visible[i];
        return NULL;
}

/* An uncorrectable error takes the device from all processes at once: a file
 * "lost-INDEX" in the folder, with the error's number in it. */
CUresult fake_device_health(const struct fake_device *d)
{
        char path[320], text[16] = "";
        CUresult r;
        ssize_t n;
        int fd;

        r = __atomic_load_n(&d->lost_here, __ATOMIC_RELAXED);
        if (r != CUDA_SUCCESS)
                return r;
        snprintf(path, sizeof(path), "%s/lost-%u", fake_folder, d->index);
        fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
                return CUDA_SUCCESS;
        n = read(fd, text, sizeof(text) - 1);
        close(fd);
        return n > 0 && atoi(text) > 0 ? (CUresult)atoi(text) : CUDA_ERROR_ECC_UNCORRECTABLE;
}
