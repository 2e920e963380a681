/* Which GPUs are served, and what is said where one is not.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "tests/suite.h"
#include "tests/unit/cuda_acts.h"
#include "tests/unit/cuda_case.h"

FIXTURE(open, case_setup, case_teardown);

static void expect_refused(struct process *p, const char *id, int error, const char *sentence)
{
        struct message m = { .fd = -1 };

        snprintf(m.text, sizeof(m.text), "%s", id);
        ck_assert_msg(process_call(p, act_open, &m) == error, "%s: %d: %s", id, m.result, m.text);
        ck_assert_msg(strncmp(m.text, id, strlen(id)) == 0 && strstr(m.text, sentence),
                      "\"%s\" does not say \"%s\"", m.text, sentence);
        ck_assert_ptr_null(strchr(m.text, '\n'));
}

/* ---- no driver ----------------------------------------------------------- */

static void expect_without_driver(const char *command, const char *sentence)
{
        char line[500] = "", whole[600], self[PATH_MAX] = "";
        FILE *f;

        ck_assert_int_gt(readlink("/proc/self/exe", self, sizeof(self) - 1), 0);
        ck_assert_int_eq(setenv("SELF", self, 1), 0);
        snprintf(whole, sizeof(whole), "%s \"$SELF\" --open cuda:0", command);
        f = popen(whole, "r");
        ck_assert_ptr_nonnull(f);
        ck_assert_ptr_nonnull(fgets(line, sizeof(line), f));
        ck_assert_int_eq(atoi(line), -ENODEV);
        ck_assert_msg(strstr(line, sentence), "\"%s\" does not say \"%s\"", line, sentence);
        ck_assert_ptr_null(fgets(line, sizeof(line), f)); /* one line */
        pclose(f);
}

/* A broken library stands for none, so that a real one is not found behind it. */
TEST(without_a_driver)
{
        char path[128], command[300];
        int fd;

        in_folder("libcuda.so.1", path);
        fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0644);
        ck_assert_int_ge(fd, 0);
        close(fd);
        in_folder("", path);
        snprintf(command, sizeof(command), "LD_LIBRARY_PATH=%s", path);
        expect_without_driver(command, "cuda:0: no CUDA driver: ");
        expect_without_driver("FAKE_CUDA_FAULT=cuInit:*:34",
                              "cuda:0: no CUDA driver: the libcuda.so.1 found is");
        expect_without_driver("FAKE_CUDA_DEVICES=", "cuda:0: the CUDA driver finds no GPU");
        expect_without_driver("FAKE_CUDA_FAULT=cuInit:*:803",
                              "cuda:0: the CUDA driver cannot be initialized: CUDA error 803");
        expect_without_driver("FAKE_CUDA_FAULT=cuInit:*:999",
                              "cuda:0: the CUDA driver cannot be initialized: unknown error "
                              "(CUDA_ERROR_UNKNOWN)");
}

/* What cuGetProcAddress does not know is still found by its symbol. */
TEST(functions_by_symbol)
{
        struct process p = process_start();

        set(&p, "FAKE_CUDA_MISSING=cuMemCreate,cuMemAlloc,cuInit");
        ck_assert_int_eq(open_device(&p, "cuda:0"), 0);
        owner_end(&p);
}

TEST(without_a_driver_a_job_has_no_device)
{
        struct process p = process_start();
        struct message m = { .fd = -1 };

        set(&p, "FAKE_CUDA_DEVICES=");
        ck_assert_int_eq(range(&p, uuid_0, DEVICE_SHARE_FD, 2 * MIB), -ENODEV);
        ck_assert_int_eq(process_call(&p, act_ordinal, &m), -ENODEV);
        ck_assert_int_eq(process_end(&p), 0);
}

/* ---- ids ----------------------------------------------------------------- */

TEST(ids)
{
        static const char *const wrong[] = { "",
                                             "cuda",
                                             "cuda:",
                                             "cuda:-1",
                                             "cuda:x",
                                             "cuda:1x",
                                             "cuda: 1",
                                             "cuda:99999999999",
                                             "GPU-",
                                             "gpu-" UUID_0,
                                             UUID_0,
                                             "GPU-" UUID_0 "0",
                                             "GPU-fa4ec0da00004000800000000000000001",
                                             "GPU-fa4ec0da-0000-4000-8000-00000000000g",
                                             "MIG-0" };
        struct process p = process_start();

        for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++)
                expect_refused(&p, wrong[i], -EINVAL, "not a GPU id");
        expect_refused(&p, "cuda:2", -ENODEV, "no such device: the CUDA driver shows 2");
        expect_refused(&p, "GPU-ffffffff-ffff-ffff-ffff-ffffffffffff", -ENODEV, "no such device among the 2");
        ck_assert_int_eq(open_device(&p, "GPU-FA4EC0DA-0000-4000-8000-000000000001"), 0);
        owner_end(&p);
}

/* A process sees one MIG device and no other GPU. */
TEST(mig_devices_are_alone)
{
        struct process p = process_start(), q = process_start(), none = process_start();

        expect_refused(&none, "MIG-" UUID_0, -ENODEV, "no such MIG device: nvidia-smi -L");
        ck_assert_int_eq(process_end(&none), 0);
        setenv("FAKE_CUDA_DEVICES", "64MiB:mig,32MiB:mig,32MiB", 1);
        set(&p, "FAKE_CUDA_DEVICES=64MiB:mig,32MiB:mig,32MiB");
        set(&q, "FAKE_CUDA_DEVICES=64MiB:mig,32MiB:mig,32MiB");
        ck_assert_int_eq(open_device(&p, "MIG-" UUID_1), 0);
        owner_end(&p);
        expect_refused(&q, "GPU-fa4ec0da-0000-4000-8000-000000000003", -ENODEV, "no such device");
        ck_assert_int_eq(process_end(&q), 0);
}

/* ---- modes --------------------------------------------------------------- */

static void expect_mode(const char *setting, int error, const char *sentence)
{
        struct process p = process_start();

        set(&p, setting);
        expect_refused(&p, "cuda:0", error, sentence);
        ck_assert_int_eq(process_end(&p), 0);
}

TEST(compute_modes_that_forbid_sharing)
{
        struct process p = process_start();

        expect_mode("FAKE_CUDA_ATTRIBUTES=20=3", -EBUSY, "compute mode is EXCLUSIVE_PROCESS");
        expect_mode("FAKE_CUDA_ATTRIBUTES=20=2", -EBUSY, "compute mode is PROHIBITED");
        expect_mode("FAKE_CUDA_ATTRIBUTES=0/133=1", -EBUSY, "MPS");
        expect_mode("CUDA_MPS_PIPE_DIRECTORY=/run/mps", -EBUSY, "CUDA_MPS_PIPE_DIRECTORY");
        expect_mode("FAKE_CUDA_CONTEXT_BYTES=65MiB", -ENOMEM,
                    "no CUDA context can be created: out of memory");
        set(&p, "FAKE_CUDA_ATTRIBUTES=0/20=3"); /* another's mode is another's */
        ck_assert_int_eq(open_device(&p, "cuda:1"), 0);
        owner_end(&p);
}

static struct process start_under_mps(const char *setting, const char *pipes)
{
        struct process p = process_start();

        set(&p, setting);
        if (pipes)
                set(&p, pipes);
        return p;
}

/* Wherever MPS listens: a process that allows it is no client, and opens GPUs. One that was a client before stays one. */
TEST(mps_can_be_allowed)
{
        static const char *const cases[][3] = {
                { "FAKE_CUDA_MPS=/tmp/nvidia-mps", NULL, "it is under MPS" },
                { "FAKE_CUDA_MPS=/run/mps", "CUDA_MPS_PIPE_DIRECTORY=/run/mps", "CUDA_MPS_PIPE_DIRECTORY" },
        };

        for (size_t i = 0; i < 2; i++) {
                struct process p = start_under_mps(cases[i][0], cases[i][1]);

                expect_refused(&p, "cuda:0", -EBUSY, cases[i][2]);
                expect_refused(&p, "cuda:1", -EBUSY, "mps: allow");
                if (i == 0) { /* the driver is loaded */
                        ck_assert_int_eq(tell(&p, act_allow_mps), 0);
                        expect_refused(&p, "cuda:0", -EBUSY, "bfcd itself is a client of MPS");
                }
                ck_assert_int_eq(process_end(&p), 0);
                p = start_under_mps(cases[i][0], cases[i][1]);
                ck_assert_int_eq(tell(&p, act_allow_mps), 0);
                ck_assert_int_eq(open_device(&p, "cuda:1"), 0);
                owner_end(&p);
        }
}

/* In the process's own mounts, so that no other process sees this MPS. -EPERM: it may
 * not do that here. */
static int act_with_mps(struct message *m)
{
        struct sockaddr_un address = { .sun_family = AF_UNIX, .sun_path = "/tmp/nvidia-mps/control" };
        const char *path = address.sun_path;
        char sentence[200];
        struct device *d;
        int fd = -1, r;

        (void)m;
        if (device_cuda_new("cuda:0", &d, sentence, sizeof(sentence)) < 0) /* loads what may lie in /tmp */
                return -1;
        device_free(d);
        if (unshare(CLONE_NEWNS) < 0 || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0 ||
            mount("none", "/tmp", "tmpfs", 0, NULL) < 0)
                return -EPERM;
        mkdir("/tmp/nvidia-mps", 0755);
        for (int kind = 0; kind < 2; kind++) {
                if (kind == 0) {
                        mkfifo(path, 0666);
                } else {
                        fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
                        if (bind(fd, (struct sockaddr *)&address, sizeof(address)) < 0)
                                return -errno;
                        close(fd);
                }
                r = device_cuda_new("cuda:0", &d, sentence, sizeof(sentence)); /* no control daemon runs */
                if (r < 0)
                        return -100 - kind;
                device_free(d);
                if (kind == 0) {
                        fd = open(path, O_RDWR | O_CLOEXEC);
                } else {
                        unlink(path);
                        fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
                        if (bind(fd, (struct sockaddr *)&address, sizeof(address)) < 0 || listen(fd, 1) < 0)
                                return -errno;
                }
                if (device_cuda_new("cuda:0", &d, sentence, sizeof(sentence)) != -EBUSY ||
                    !strstr(sentence, "MPS is running"))
                        return -200 - kind;
                /* Any user can have a folder of that name. */
                if (chown("/tmp/nvidia-mps", 4242, 4242) == 0) {
                        r = device_cuda_new("cuda:0", &d, sentence, sizeof(sentence));
                        if (r < 0)
                                return -300 - kind;
                        device_free(d);
                        if (chown("/tmp/nvidia-mps", 0, 0) < 0 || chown(path, 4242, 4242) < 0)
                                return -errno;
                        r = device_cuda_new("cuda:0", &d, sentence, sizeof(sentence));
                        if (r < 0)
                                return -400 - kind;
                        device_free(d);
                }
                close(fd);
                unlink(path);
        }
        return 0;
}

static int see_mps_process(void)
{
        char sentence[200];
        struct device *d;
        FILE *f;
        int r;

        if (mkdir("/proc/4711", 0755) < 0 || !(f = fopen("/proc/4711/comm", "w")))
                return -errno;
        fputs("nvidia-cuda-mps\n", f);
        fclose(f);
        if (device_cuda_new("cuda:0", &d, sentence, sizeof(sentence)) != -EBUSY ||
            !strstr(sentence, "MPS is running (process 4711)"))
                return -100;
        if (chown("/proc/4711", 4242, 4242) < 0) /* any user's processes have any name */
                return -errno;
        r = device_cuda_new("cuda:0", &d, sentence, sizeof(sentence));
        if (r < 0)
                return -200;
        device_free(d);
        return 0;
}

/* Where /tmp is hidden: a process tells of it. In mounts of its own, for it would be every test's MPS.
 * LeakSanitizer needs the true /proc again. */
static int act_with_mps_process(struct message *m)
{
        int r;

        (void)m;
        if (unshare(CLONE_NEWNS) < 0 || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0 ||
            mount("none", "/proc", "tmpfs", 0, NULL) < 0)
                return -EPERM;
        r = see_mps_process();
        return umount2("/proc", MNT_DETACH) < 0 ? -errno : r;
}

TEST(a_process_of_mps_is_noticed)
{
        struct process p = process_start();
        int r = tell(&p, act_with_mps_process);

        ck_assert_msg(r == 0 || r == -EPERM, "%d", r);
        ck_assert_int_eq(process_end(&p), 0);
}

TEST(mps_is_noticed)
{
        struct process p = process_start();
        int r = tell(&p, act_with_mps);

        ck_assert_msg(r == 0 || r == -EPERM, "%d", r);
        ck_assert_int_eq(process_end(&p), 0);
}

/* What a device cannot do is refused when it is asked for, and the rest works. */
TEST(device_without_optional_features)
{
        struct process p = process_start();
        struct message e = { .fd = -1 };

        set(&p, "FAKE_CUDA_FAULT=cuIpcGetMemHandle:1:801");
        ck_assert_int_eq(open_device(&p, "cuda:0"), 0);
        ck_assert_int_eq(process_call(&p, act_facts, &e), 0);
        ck_assert(e.facts.shares[DEVICE_SHARE_FD] && !e.facts.shares[DEVICE_SHARE_CUDA_IPC]);
        owner_end(&p);
        p = process_start();
        set(&p, "FAKE_CUDA_ATTRIBUTES=103=0");
        ck_assert_int_eq(open_device(&p, "cuda:0"), 0);
        e = (struct message){ .fd = -1 };
        ck_assert_int_eq(process_call(&p, act_facts, &e), 0);
        ck_assert(!e.facts.shares[DEVICE_SHARE_FD] && e.facts.shares[DEVICE_SHARE_CUDA_IPC]);
        ck_assert_int_eq(make(&p, DEVICE_SHARE_FD, 2 * MIB, &e), -ENOTSUP);
        ck_assert_int_eq(make(&p, DEVICE_SHARE_CUDA_IPC, 2 * MIB, &e), 0);
        ck_assert_int_eq(destroy(&p, &e), 0);
        owner_end(&p);
        p = process_start();
        set(&p, "FAKE_CUDA_ATTRIBUTES=110=0"); /* no RDMA: nothing else changes */
        ck_assert_int_eq(open_device(&p, "cuda:0"), 0);
        ck_assert_int_eq(make(&p, DEVICE_SHARE_FD, 2 * MIB, &e), 0);
        forget(&e);
        ck_assert_int_eq(destroy(&p, &e), 0);
        owner_end(&p);
        p = process_start();
        set(&p, "FAKE_CUDA_FAULT=cuMemCreate:1:1"); /* the driver promised RDMA, and refuses */
        ck_assert_int_eq(open_device(&p, "cuda:0"), 0);
        ck_assert_int_eq(make(&p, DEVICE_SHARE_FD, 2 * MIB, &e), 0);
        forget(&e);
        ck_assert_int_eq(destroy(&p, &e), 0);
        owner_end(&p);
}
