/* Does a driver behave as the product takes it to? The same cases on the fake
 * and on a real GPU: where they differ, the fake is wrong.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * usage: conformance            TAP; device 0
 *
 * A case asserts what is documented or what the product rests on; what is left
 * open is asked by `experiments`. CUDA does not survive fork(), and Check forks
 * for each case: so the runner itself never touches the driver, and looks at the
 * machine through a child. */
#include "tests/gpu/conformance.h"

#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

CUdevice device;
CUcontext context;
bool is_fake;
struct conformance_machine machine;
static size_t n_free_before;
static int n_fds_before;

void conformance_setup(void)
{
        n_fds_before = suite_count_fds();
        OK(gpu_start(0, &context));
        OK(cu.cuDeviceGet(&device, 0));
        is_fake = gpu_is_fake();
        n_free_before = gpu_n_free();
}

/* A real driver keeps memory and fds for reasons of its own. */
void conformance_teardown(void)
{
        if (is_fake)
                ck_assert_uint_eq(gpu_n_free(), n_free_before);
        OK(cu.cuCtxSetCurrent(NULL));
        OK(cu.cuDevicePrimaryCtxRelease_v2(device));
        if (is_fake)
                ck_assert_int_eq(suite_count_fds(), n_fds_before);
}

struct peer conformance_peer(void)
{
        struct peer_message m = { .op = PEER_START };
        struct peer p;

        ck_assert_int_eq(peer_start((uid_t)-1, 0, &p), 0);
        tell(&p, &m, -1, NULL);
        return p;
}

void tell(struct peer *p, struct peer_message *m, int fd, int *ret_fd)
{
        OK(peer_call(p, m, fd, ret_fd));
}

/* ---- the machine --------------------------------------------------------- */

static void look(struct conformance_machine *ret, char *why, size_t n_why)
{
        CUcontext c;
        CUmodule module;
        const char *reason = "";
        CUresult r;
        int n = 0;

        if (gpu_load(&reason) < 0) {
                snprintf(why, n_why, "%s", reason);
                return;
        }
        r = gpu_start(0, &c);
        if (r != CUDA_SUCCESS) {
                snprintf(why, n_why, "the driver answers %s", gpu_error(r));
                return;
        }
        ret->has_device = true;
        ret->is_fake = gpu_is_fake();
        ret->has_vmm = gpu_attribute(0, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) &&
                       gpu_attribute(0, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
        ret->has_kernels = cu.cuModuleLoadData && cu.cuLaunchKernel &&
                           cu.cuModuleLoadData(&module, gpu_kernels_ptx) == CUDA_SUCCESS;
        ret->has_two_devices = cu.cuDeviceGetCount(&n) == CUDA_SUCCESS && n > 1;
}

static void look_by_child(struct conformance_machine *ret, char *why, size_t n_why)
{
        int fds[2], status;
        pid_t pid;

        memset(ret, 0, sizeof(*ret));
        memset(why, 0, n_why);
        snprintf(why, n_why, "looking at it crashed");
        if (pipe(fds) < 0)
                return;
        pid = fork();
        if (pid == 0) {
                look(ret, why, n_why);
                if (write(fds[1], ret, sizeof(*ret)) < 0 || write(fds[1], why, n_why) < 0)
                        _exit(1);
                _exit(0);
        }
        close(fds[1]);
        if (read(fds[0], ret, sizeof(*ret)) != (ssize_t)sizeof(*ret) || read(fds[0], why, n_why) < 0)
                memset(ret, 0, sizeof(*ret));
        close(fds[0]);
        waitpid(pid, &status, 0);
}

int main(int argc, char **argv)
{
        char why[256];
        int status;

        if (argc > 1 && strcmp(argv[1], "--peer") == 0)
                return peer_main(argc, argv);
        gpu_machine_new();
        look_by_child(&machine, why, sizeof(why));
        if (!machine.has_device) {
                gpu_machine_remove();
                printf("1..0 # SKIP no GPU here: %s\n", why);
                return 0;
        }
        if (!machine.has_vmm)
                puts("# skipped: virtual memory management (the device has none)");
        if (!machine.has_kernels)
                puts("# skipped: kernels (the driver takes none)");
        if (!machine.is_fake)
                puts("# skipped: what only the fake promises");
        fflush(stdout);
        status = suite_run(suite_of_tests("conformance", 0, NULL, NULL));
        gpu_machine_remove();
        return status;
}
