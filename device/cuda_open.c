/* Opening a GPU by its id; see cuda_open.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "device/cuda_open.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "device/device.h"

#define MPS_FOLDER  "/tmp/nvidia-mps"
#define MPS_PROCESS "nvidia-cuda-mps" /* -control and -server: the kernel keeps 15 bytes */
#define MPS_PIPES   "CUDA_MPS_PIPE_DIRECTORY"
#define NO_MPS      "/dev/null/no-mps" /* cannot exist: its parent is no folder */

struct cuda_id {
        const char *text;
        enum { BY_ORDINAL, BY_UUID, BY_MIG_UUID } kind;
        int ordinal;
        uint8_t uuid[16];
};

struct sentence {
        const char *id;
        char *text;
        size_t n_bytes;
};

__attribute__((format(printf, 3, 4))) static int refuse(const struct sentence *s, int error,
                                                        const char *format, ...)
{
        char why[320];
        va_list ap;

        va_start(ap, format);
        vsnprintf(why, sizeof(why), format, ap);
        va_end(ap);
        snprintf(s->text, s->n_bytes, "%s: %s", s->id, why);
        return error;
}

/* ---- the id -------------------------------------------------------------- */

static int hex_digit(char c)
{
        const char *digits = "0123456789abcdef", *at = c ? strchr(digits, tolower((unsigned char)c)) : NULL;

        return at ? (int)(at - digits) : -1;
}

/* 8-4-4-4-12 digits, and nothing after them. */
static bool read_uuid(const char *text, uint8_t ret[16])
{
        uint8_t uuid[16];

        for (size_t i = 0; i < sizeof(uuid); i++) {
                int high, low;

                if ((i == 4 || i == 6 || i == 8 || i == 10) && *text++ != '-')
                        return false;
                high = hex_digit(text[0]);
                low = high < 0 ? -1 : hex_digit(text[1]);
                if (low < 0)
                        return false;
                uuid[i] = (uint8_t)(high << 4 | low);
                text += 2;
        }
        if (*text != '\0')
                return false;
        memcpy(ret, uuid, sizeof(uuid));
        return true;
}

static bool read_ordinal(const char *text, int *ret)
{
        char *end;
        long n;

        if (!isdigit((unsigned char)*text))
                return false;
        errno = 0;
        n = strtol(text, &end, 10);
        if (*end != '\0' || errno != 0 || n > 9999)
                return false;
        *ret = (int)n;
        return true;
}

static bool read_id(const char *text, struct cuda_id *ret)
{
        *ret = (struct cuda_id){ .text = text };
        if (strncmp(text, "cuda:", 5) == 0)
                return read_ordinal(text + 5, &ret->ordinal);
        ret->kind = strncmp(text, "MIG-", 4) == 0 ? BY_MIG_UUID : BY_UUID;
        return (ret->kind == BY_MIG_UUID || strncmp(text, "GPU-", 4) == 0) && read_uuid(text + 4, ret->uuid);
}

/* ---- the environment ----------------------------------------------------- */

static bool allows_mps;

/* In nvidia-cuda-mps-control(1): "When CUDA is first initialized in a program, the CUDA driver attempts to connect to
 * the MPS control daemon. If the connection attempt fails, the program continues to run as it normally would without
 * MPS." The control daemon's pipes are in this folder (docs.nvidia.com/deploy/mps, CUDA_MPS_PIPE_DIRECTORY). */
void device_cuda_allow_mps(void)
{
        allows_mps = setenv(MPS_PIPES, NO_MPS, 1) == 0;
}

static int prepare(const struct cuda_id *id, const struct sentence *s)
{
        if (setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID", 1) < 0 ||
            (id->kind == BY_MIG_UUID ? setenv("CUDA_VISIBLE_DEVICES", id->text, 1)
                                     : unsetenv("CUDA_VISIBLE_DEVICES")) < 0)
                return refuse(s, -ENOMEM, "out of memory");
        return 0;
}

/* ---- MPS: its server does the work of many clients, and goes on after one has
 * died. A dead process would be no proof that its work has ended. So a GPU under MPS is refused, unless that was
 * allowed; see SECURITY.md.
 *
 * The folder may be hidden from this process (systemd's PrivateTmp), so processes are looked at, too.
 * Any user can make such a folder, and give a process such a name: only what belongs to root or to
 * this process's user counts. ------------------------------------------------------------------- */

static bool is_trusted(const struct stat *st)
{
        return st->st_uid == 0 || st->st_uid == geteuid();
}

static bool socket_answers(const char *path)
{
        struct sockaddr_un address = { .sun_family = AF_UNIX };
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), error = 0;

        if (fd < 0 || strlen(path) >= sizeof(address.sun_path)) {
                error = ENOENT;
        } else {
                memcpy(address.sun_path, path, strlen(path));
                if (connect(fd, (struct sockaddr *)&address, sizeof(address)) < 0)
                        error = errno;
        }
        if (fd >= 0)
                close(fd);
        /* Another type, a full queue, no permission: but there is a reader or listener. */
        return error != ENOENT && error != ECONNREFUSED;
}

static bool pipe_is_read(const char *path)
{
        int fd = open(path, O_WRONLY | O_NONBLOCK | O_CLOEXEC);

        if (fd >= 0)
                close(fd);
        return fd >= 0;
}

static bool mps_answers(void)
{
        static const char path[] = MPS_FOLDER "/control";
        struct stat st;

        if (lstat(MPS_FOLDER, &st) < 0 || !S_ISDIR(st.st_mode) || !is_trusted(&st))
                return false;
        if (lstat(path, &st) < 0 || !is_trusted(&st))
                return false;
        return S_ISSOCK(st.st_mode) ? socket_answers(path) : S_ISFIFO(st.st_mode) && pipe_is_read(path);
}

static bool is_mps_process(int proc, const char *pid)
{
        char path[300], name[sizeof(MPS_PROCESS) + 1] = "";
        struct stat st;
        ssize_t n;
        int fd;

        snprintf(path, sizeof(path), "%s/comm", pid);
        fd = openat(proc, path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
        if (fd < 0)
                return false;
        n = read(fd, name, sizeof(name) - 1);
        close(fd);
        return n == (ssize_t)sizeof(MPS_PROCESS) && strcmp(name, MPS_PROCESS "\n") == 0 &&
               fstatat(proc, pid, &st, 0) == 0 && is_trusted(&st);
}

/* 0: none is visible. A /proc that hides other users' processes shows none of root's. */
static int find_mps_process(void)
{
        DIR *proc = opendir("/proc");
        const struct dirent *e;
        int pid = 0;

        while (proc && pid == 0 && (e = readdir(proc)))
                if (isdigit((unsigned char)e->d_name[0]) && is_mps_process(dirfd(proc), e->d_name))
                        pid = atoi(e->d_name);
        if (proc)
                closedir(proc);
        return pid;
}

#define MPS_IS_REFUSED "; with mps: allow the GPU is served nevertheless, see bfcd.yaml(5)"

static int refuse_mps(const struct sentence *s)
{
        const char *folder = getenv(MPS_PIPES);
        int pid;

        if (folder && *folder)
                return refuse(s, -EBUSY, MPS_PIPES " is set" MPS_IS_REFUSED);
        if (mps_answers())
                return refuse(s, -EBUSY, "MPS is running (" MPS_FOLDER ")" MPS_IS_REFUSED);
        pid = find_mps_process();
        if (pid != 0)
                return refuse(s, -EBUSY, "MPS is running (process %d)" MPS_IS_REFUSED, pid);
        return 0;
}

/* ---- the device ---------------------------------------------------------- */

static int refuse_result(const struct sentence *s, const struct cuda_driver *cu, const char *what,
                         CUresult result)
{
        char text[160];

        cuda_driver_describe(cu, result, text, sizeof(text));
        return refuse(s, cuda_driver_errno(result), "%s: %s", what, text);
}

static int find(const struct cuda_driver *cu, const struct cuda_id *id, const struct sentence *s,
                CUdevice *ret)
{
        CUresult result;
        int n, r;

        result = cu->cuDeviceGetCount(&n);
        if (result != CUDA_SUCCESS)
                return refuse_result(s, cu, "the devices cannot be listed", result);
        if (id->kind == BY_ORDINAL) {
                if (id->ordinal >= n)
                        return refuse(s, -ENODEV, "no such device: the CUDA driver shows %d", n);
                result = cu->cuDeviceGet(ret, id->ordinal);
                return result == CUDA_SUCCESS ? 0
                                              : refuse_result(s, cu, "the device cannot be opened", result);
        }
        r = cuda_driver_find(cu, id->uuid, ret);
        if (r == -ENODEV)
                return refuse(s, r, "no such device among the %d that the CUDA driver shows", n);
        return r == 0 ? 0 : refuse(s, r, "the UUIDs of the devices cannot be read: %s", strerror(-r));
}

static int refuse_modes(const struct cuda_driver *cu, CUdevice device, const struct sentence *s)
{
        CUresult result;
        int mode, mps;

        result = cu->cuDeviceGetAttribute(&mode, CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, device);
        if (result != CUDA_SUCCESS)
                return refuse_result(s, cu, "the compute mode cannot be read", result);
        if (mode == CU_COMPUTEMODE_PROHIBITED)
                return refuse(s, -EBUSY,
                              "its compute mode is PROHIBITED: set it to DEFAULT (nvidia-smi -c 0)");
        if (mode != CU_COMPUTEMODE_DEFAULT)
                return refuse(
                        s, -EBUSY,
                        "its compute mode is EXCLUSIVE_PROCESS, so no job could use it beside bfcd: set "
                        "it to DEFAULT (nvidia-smi -c 0)");
        /* "Contexts created on this device will be shared via MPS" (cuda.h): this process is a client, and its memory
         * would be the server's. A driver that does not know the attribute has other signs. */
        if (cu->cuDeviceGetAttribute(&mps, CU_DEVICE_ATTRIBUTE_MPS_ENABLED, device) != CUDA_SUCCESS || !mps)
                return 0;
        return allows_mps ? refuse(s, -EBUSY, "bfcd itself is a client of MPS: restart it")
                          : refuse(s, -EBUSY, "it is under MPS" MPS_IS_REFUSED);
}

int cuda_open(const char *id_text, struct cuda_context *ret, char *ret_sentence, size_t n_sentence)
{
        const struct sentence s = { id_text, ret_sentence, n_sentence };
        const struct cuda_driver *cu;
        struct cuda_id id;
        const char *why;
        CUresult result;
        CUdevice device;
        int r;

        if (!read_id(id_text, &id))
                return refuse(&s, -EINVAL, "not a GPU id; write cuda:N, GPU-UUID or MIG-UUID");
        r = prepare(&id, &s);
        if (r == 0 && !allows_mps)
                r = refuse_mps(&s);
        if (r < 0)
                return r;
        r = cuda_driver_get(&cu, &why);
        if (r < 0)
                return refuse(&s, r, "%s", why);
        r = find(cu, &id, &s, &device);
        if (r == 0)
                r = refuse_modes(cu, device, &s);
        if (r < 0)
                return r;
        result = cuda_context_open(cu, device, ret);
        return result == CUDA_SUCCESS ? 0 : refuse_result(&s, cu, "no CUDA context can be created", result);
}
