/* Memory of processes from NVML, with tests/fake_nvml in its place.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/suite.h"

#include <errno.h>
#include <sched.h>
#include <sys/wait.h>

#include "device/nvml.h"

static char path[] = "/tmp/test-nvml-XXXXXX"; /* of the running test */

static void say(const char *text)
{
        FILE *f = fopen(path, "we");

        ck_assert_ptr_nonnull(f);
        fputs(text, f);
        fclose(f);
}

static void setup(void)
{
        int fd;

        strcpy(path, "/tmp/test-nvml-XXXXXX"); /* the test before has replaced the Xs */
        fd = mkstemp(path);
        ck_assert_int_ge(fd, 0);
        close(fd);
        ck_assert_int_eq(setenv("FAKE_NVML", path, 1), 0);
}

static void teardown(void)
{
        unlink(path);
}

FIXTURE(nvml, setup, teardown);

TEST(sums_of_processes)
{
        static const char *const uuids[] = { "GPU-a", "GPU-b", "GPU-c", "GPU-none" };
        struct nvml *n;
        struct nvml_use *uses;
        size_t n_uses;

        say("GPU-a 30 1048576\nGPU-b 30 2097152\nGPU-c 30 4194304\nGPU-a 20 3145728\nGPU-a 25 -\n");
        ck_assert_int_eq(nvml_open(&n), 0);
        ck_assert_int_eq(nvml_read(n, uuids, 4, &uses, &n_uses), 0);
        ck_assert_uint_eq(n_uses, 2);
        ck_assert_uint_eq(nvml_find(uses, n_uses, 20)->n_bytes, 3 * MIB);
        ck_assert_uint_eq(nvml_find(uses, n_uses, 30)->n_bytes, 7 * MIB);
        ck_assert_ptr_null(nvml_find(uses, n_uses, 25)); /* not known */
        ck_assert_ptr_null(nvml_find(uses, n_uses, 31));
        free(uses);
        /* Other devices than ours do not count. */
        ck_assert_int_eq(nvml_read(n, uuids + 1, 1, &uses, &n_uses), 0);
        ck_assert_uint_eq(n_uses, 1);
        ck_assert_uint_eq(uses[0].n_bytes, 2 * MIB);
        free(uses);
        ck_assert_int_eq(nvml_read(n, uuids + 3, 1, &uses, &n_uses), -ENOENT);
        nvml_close(n);
}

TEST(device_without_processes)
{
        const char *first = "GPU-a";
        struct nvml *n;
        struct nvml_use *uses;
        size_t n_uses;

        say("GPU-a\n");
        ck_assert_int_eq(nvml_open(&n), 0);
        ck_assert_int_eq(nvml_read(n, &first, 1, &uses, &n_uses), 0);
        ck_assert_uint_eq(n_uses, 0);
        ck_assert_ptr_null(nvml_find(uses, n_uses, 1));
        free(uses);
        nvml_close(n);
}

/* CUDA tells no prefix. */
TEST(mig_device)
{
        static const char *const uuids[] = { "MIG-a", "GPU-a" };
        struct nvml *n;
        struct nvml_use *uses;
        size_t n_uses;

        say("GPU-b 30 1048576\nMIG-a 30 2097152\n");
        ck_assert_int_eq(nvml_open(&n), 0);
        for (size_t i = 0; i < 2; i++) {
                ck_assert_int_eq(nvml_read(n, uuids + i, 1, &uses, &n_uses), 0);
                ck_assert_uint_eq(n_uses, 1);
                ck_assert_uint_eq(uses[0].n_bytes, 2 * MIB);
                free(uses);
        }
        nvml_close(n);
}

enum { NO_NAMESPACE = 77 };

/* An exit status. In a process of its own: after the end of its namespace it can have no child. */
static int finds_none_in_namespace(const struct nvml_use uses[2])
{
        int status;
        pid_t pid;

        if (unshare(CLONE_NEWPID) < 0)
                return NO_NAMESPACE;
        pid = fork();
        if (pid == 0)
                _exit(getpid() == 1 && !nvml_find_own(uses, 2) ? 0 : 1);
        return waitpid(pid, &status, 0) == pid && status == 0 ? 0 : 1;
}

/* In a PID namespace of its own the pid of a process may be another one's at NVML. */
TEST(own_pid)
{
        const struct nvml_use uses[] = { { 1, MIB }, { (uint64_t)getpid(), 2 * MIB } };
        pid_t pid;
        int status;

        ck_assert_ptr_eq(nvml_find_own(uses, 2), suite_has_initial_pids() ? &uses[1] : NULL);
        pid = fork();
        if (pid == 0)
                _exit(finds_none_in_namespace(uses));
        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        if (WEXITSTATUS(status) == NO_NAMESPACE)
                printf("# skipped: this process may not make a PID namespace\n");
        else
                ck_assert_int_eq(status, 0);
}

/* More than the first call has room for. */
TEST(many_processes)
{
        const char *first = "GPU-a";
        char text[16384], *to = text;
        struct nvml *n;
        struct nvml_use *uses;
        size_t n_uses;

        for (unsigned i = 0; i < 500; i++)
                to += sprintf(to, "GPU-a %u %u\n", 1000 - i, i);
        say(text);
        ck_assert_int_eq(nvml_open(&n), 0);
        ck_assert_int_eq(nvml_read(n, &first, 1, &uses, &n_uses), 0);
        ck_assert_uint_eq(n_uses, 500);
        for (unsigned i = 0; i < 500; i++)
                ck_assert_uint_eq(nvml_find(uses, n_uses, 1000 - i)->n_bytes, i);
        free(uses);
        nvml_close(n);
}

/* The library is there, but no driver. */
TEST(no_driver)
{
        struct nvml *n = NULL;

        unsetenv("FAKE_NVML");
        ck_assert_int_eq(nvml_open(&n), -ENOENT);
        ck_assert_ptr_null(n);
}
