/* A program that says that it is idle, so that its memory of cuMemCreate() can be parked.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <string.h>

#include "tests/preload/job.h"

#define LIMIT (256 * MIB)

static const CUmemAllocationProp plain = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                           .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };
static const CUmemAllocationProp tile_pool = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                               .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 },
                                               .allocFlags.usage = IS_TILE_POOL };

/* As another library of the program finds it. */
static void *find(const char *name)
{
        void *library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
        void *found = library ? dlsym(library, name) : NULL;

        CHECK(found);
        return found;
}

static int64_t idle_begin(void)
{
        return ((int64_t(*)(void))find("bfc_idle_begin"))();
}

static int idle_end(uint32_t wait_ms)
{
        return ((int (*)(uint32_t))find("bfc_idle_end"))(wait_ms);
}

/* How much an operator gets parked. */
static unsigned long long park(const char *bfcctl)
{
        static const char key[] = "\"bytes_parked\": ";
        char text[4096] = "", *at;
        FILE *out;

        CHECK(setenv("BFCCTL", bfcctl, 1) == 0);
        out = popen("exec \"$BFCCTL\" park red --to parking --json", "re");
        CHECK(out && fread(text, 1, sizeof(text) - 1, out) > 0 && pclose(out) == 0);
        at = strstr(text, key);
        CHECK(at);
        return strtoull(at + strlen(key), NULL, 10);
}

static CUmemGenericAllocationHandle create(size_t n_bytes, const CUmemAllocationProp *prop)
{
        CUmemGenericAllocationHandle handle;

        OK(cu.cuMemCreate(&handle, n_bytes, prop, 0));
        return handle;
}

static CUdeviceptr map(CUmemGenericAllocationHandle handle, size_t n_bytes, CUmemAccess_flags flags)
{
        const CUmemAccessDesc access = { { CU_MEM_LOCATION_TYPE_DEVICE, 0 }, flags };
        CUdeviceptr at;

        OK(cu.cuMemAddressReserve(&at, n_bytes, 0, 0, 0));
        OK(cu.cuMemMap(at, n_bytes, 0, handle, 0));
        OK(cu.cuMemSetAccess(at, n_bytes, &access, 1));
        return at;
}

static void unmap(CUdeviceptr at, size_t n_bytes)
{
        OK(cu.cuMemUnmap(at, n_bytes));
        OK(cu.cuMemAddressFree(at, n_bytes));
}

static void has_bytes(CUdeviceptr at, size_t n_bytes, unsigned char value)
{
        for (size_t i = 0; i < n_bytes; i += MIB / 2) {
                unsigned char byte = (unsigned char)~value;

                OK(cu.cuMemcpyDtoH_v2(&byte, at + i, 1));
                CHECK(byte == value);
        }
}

static void has_access(CUdeviceptr at, unsigned long long flags)
{
        const CUmemLocation location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 };
        unsigned long long found = ~flags;

        OK(cu.cuMemGetAccess(&found, &location, at));
        CHECK(found == flags);
}

/* What the program has: with a handle and two mappings, with mappings only, and one that another process may have. */
struct model {
        CUmemGenericAllocationHandle handle, shared;
        CUdeviceptr at, read_only, without_handle, of_shared;
        int fd;
};

#define HANDLE_BYTES (40 * MIB)
#define MAPPED_BYTES (34 * MIB)
#define SHARED_BYTES (32 * MIB)
#define IDLE_BYTES   (HANDLE_BYTES + MAPPED_BYTES)
#define LARGE_BYTES  (160 * MIB)
#define LATE_BYTES   (32 * MIB)

static struct model make(void)
{
        CUmemAllocationProp prop = plain;
        CUmemGenericAllocationHandle other;
        struct model m;

        prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        m.handle = create(HANDLE_BYTES, &prop);
        m.at = map(m.handle, HANDLE_BYTES, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
        m.read_only = map(m.handle, HANDLE_BYTES, CU_MEM_ACCESS_FLAGS_PROT_READ);
        other = create(MAPPED_BYTES, &plain);
        m.without_handle = map(other, MAPPED_BYTES, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
        OK(cu.cuMemRelease(other));
        m.shared = create(SHARED_BYTES, &prop);
        m.of_shared = map(m.shared, SHARED_BYTES, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
        OK(cu.cuMemExportToShareableHandle(&m.fd, m.shared, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
        OK(cu.cuMemsetD8_v2(m.at, 1, HANDLE_BYTES));
        OK(cu.cuMemsetD8_v2(m.without_handle, 2, MAPPED_BYTES));
        OK(cu.cuMemsetD8_v2(m.of_shared, 3, SHARED_BYTES));
        return m;
}

static void check(const struct model *m)
{
        has_bytes(m->at, HANDLE_BYTES, 1);
        has_bytes(m->read_only, HANDLE_BYTES, 1);
        has_bytes(m->without_handle, MAPPED_BYTES, 2);
        has_bytes(m->of_shared, SHARED_BYTES, 3);
        has_access(m->at, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
        has_access(m->read_only, CU_MEM_ACCESS_FLAGS_PROT_READ);
}

/* Its handle is the same for the program, which maps and retains it. */
static void check_handle(const struct model *m)
{
        CUmemGenericAllocationHandle again;
        CUmemAllocationProp prop;
        CUdeviceptr at;

        OK(cu.cuMemGetAllocationPropertiesFromHandle(&prop, m->handle));
        CHECK(prop.allocFlags.usage == 0);
        at = map(m->handle, HANDLE_BYTES, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
        has_bytes(at, HANDLE_BYTES, 1);
        OK(cu.cuMemRetainAllocationHandle(&again, (void *)(uintptr_t)m->read_only));
        CHECK(again == m->handle);
        OK(cu.cuMemRelease(again));
        unmap(at, HANDLE_BYTES);
}

/* Gives room for one that waits. */
struct giver {
        CUmemGenericAllocationHandle large, made; /* the second is made during the wait */
        pthread_t waiting, thread;
        bool interrupts; /* the wait */
};

static void *make_late(void *userdata)
{
        struct giver *g = userdata;

        g->made = create(LATE_BYTES, &plain);
        return NULL;
}

static void *give(void *userdata)
{
        struct giver *g = userdata;
        pthread_t maker;

        usleep(100000);
        if (g->interrupts)
                CHECK(pthread_kill(g->waiting, SIGUSR1) == 0);
        else
                CHECK(pthread_create(&maker, NULL, make_late, g) == 0);
        usleep(50000);
        OK(cu.cuMemRelease(g->large));
        CHECK(g->interrupts || pthread_join(maker, NULL) == 0);
        return NULL;
}

static void give_later(struct giver *g)
{
        g->waiting = pthread_self();
        CHECK(pthread_create(&g->thread, NULL, give, g) == 0);
}

/* What was made while others woke can sleep, too. */
static void park_late(const char *bfcctl, CUmemGenericAllocationHandle late)
{
        CHECK(idle_begin() == (int64_t)(IDLE_BYTES + LATE_BYTES));
        CHECK(park(bfcctl) == IDLE_BYTES + LATE_BYTES);
        CHECK(idle_end(60000) == 0);
        OK(cu.cuMemRelease(late));
}

/* Another one uses the room, and the end waits for it. */
static void wake_with_others(const char *bfcctl, const struct model *m)
{
        CUmemGenericAllocationHandle others[3];
        struct giver g = { .interrupts = false };

        for (size_t i = 0; i < 3; i++) {
                others[i] = create(2 * MIB, &tile_pool); /* the driver uses numbers again */
                CHECK(others[i] != m->handle);
        }
        g.large = create(LARGE_BYTES, &plain);
        CHECK(g.large != m->handle);
        CHECK(idle_end(1) == -EDQUOT && idle_end(0) == -EDQUOT);
        CHECK(idle_begin() == (int64_t)(IDLE_BYTES + LARGE_BYTES)); /* it counts, and those ends do not */
        CHECK(idle_end(0) == 0);
        GIVES(CUDA_ERROR_NOT_READY, cu.cuMemMap(m->at, HANDLE_BYTES, 0, m->handle, 0));
        give_later(&g);
        CHECK(idle_end(600000) == 0);
        CHECK(pthread_join(g.thread, NULL) == 0);
        park_late(bfcctl, g.made);
        for (size_t i = 0; i < 3; i++) {
                CUmemAllocationProp prop;

                OK(cu.cuMemGetAllocationPropertiesFromHandle(&prop, others[i]));
                CHECK(prop.allocFlags.usage == IS_TILE_POOL);
                OK(cu.cuMemRelease(others[i]));
        }
}

void be_idle(const char *bfcctl)
{
        CUmemGenericAllocationHandle other;
        CUmemAllocationProp prop;
        struct model m;
        CUdeviceptr at;
        int fd;

        CHECK(idle_end(0) == -EINVAL);
        context_make();
        m = make();
        CHECK(park(bfcctl) == 0); /* without its word never */
        check(&m);
        for (int i = 0; i < 3; i++) {
                CHECK(idle_begin() == (int64_t)IDLE_BYTES);
                CHECK(idle_begin() == (int64_t)IDLE_BYTES);
                GIVES(CUDA_ERROR_NOT_READY, cu.cuMemGetAllocationPropertiesFromHandle(&prop, m.handle));
                CHECK(cu.cuMemRetainAllocationHandle(&other, (void *)(uintptr_t)m.at) != CUDA_SUCCESS);
                CHECK(i == 0 || park(bfcctl) == IDLE_BYTES);
                CHECK(idle_end(0) == 0);
                if (i > 0) {
                        wait_free(LIMIT - SHARED_BYTES);
                        wake_with_others(bfcctl, &m);
                } else {
                        CHECK(idle_end(0) == 0);
                }
                check(&m);
                check_handle(&m);
        }
        CHECK(park(bfcctl) == 0);
        check(&m);
        CHECK(idle_begin() == (int64_t)IDLE_BYTES);
        CHECK(park(bfcctl) == IDLE_BYTES);
        unmap(m.without_handle, MAPPED_BYTES); /* all of it: it has no handle */
        unmap(m.read_only, HANDLE_BYTES);
        CHECK(idle_end(60000) == 0);
        has_bytes(m.at, HANDLE_BYTES, 1);
        OK(cu.cuMemExportToShareableHandle(&fd, m.handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
        OK(cu.cuMemImportFromShareableHandle(&other, (void *)(intptr_t)fd,
                                             CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
        at = map(other, HANDLE_BYTES, CU_MEM_ACCESS_FLAGS_PROT_READ);
        has_bytes(at, HANDLE_BYTES, 1);
        unmap(at, HANDLE_BYTES);
        OK(cu.cuMemRelease(other));
        close(fd);
        CHECK(idle_begin() == 0 && idle_end(0) == 0); /* it may be elsewhere, too */
        unmap(m.at, HANDLE_BYTES);
        OK(cu.cuMemRelease(m.handle));
        GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemRelease(m.handle));
        close(m.fd);
        unmap(m.of_shared, SHARED_BYTES);
        OK(cu.cuMemRelease(m.shared));
        wait_free(LIMIT);
}

/* What the program may have bound elsewhere stays. */
void be_bound(const char *bfcctl)
{
        CUresult (*bind)(void *, CUdeviceptr, size_t, int, unsigned long long) = (CUresult(*)(
                void *, CUdeviceptr, size_t, int, unsigned long long))find("cuMemGetHandleForAddressRange");
        CUresult (*make_multicast)(void *, const void *) =
                (CUresult(*)(void *, const void *))find("cuMulticastCreate");
        struct model m;

        context_make();
        CHECK(idle_begin() == 0 && idle_end(0) == 0); /* without memory nothing is stopped */
        m = make();
        GIVES(CUDA_ERROR_INVALID_VALUE, make_multicast(NULL, NULL));
        CHECK(idle_begin() == 0 && park(bfcctl) == 0 && idle_end(0) == 0);
        GIVES(CUDA_ERROR_INVALID_VALUE, bind(NULL, m.at, HANDLE_BYTES, 1, 0)); /* the driver's answer */
        check(&m);
        check_handle(&m);
}

static sem_t wanted;

static void want(void *unused)
{
        (void)unused;
        while (sem_wait(&wanted) != 0)
                ;
}

/* Another thread's work waits for its end. */
static void *allocate(void *context)
{
        CUdeviceptr all[64];

        OK(cu.cuCtxSetCurrent(context));
        for (size_t i = 0; i < 64; i++) {
                OK(cu.cuMemAlloc_v2(&all[i], 4096));
                usleep(1000);
        }
        CHECK(sem_post(&wanted) == 0);
        for (size_t i = 0; i < 64; i++)
                OK(cu.cuMemFree_v2(all[i]));
        return NULL;
}

static void on_signal(int unused)
{
        (void)unused;
}

/* The begin waits for work that waits for another thread, which allocates; a signal does not end a reset's wait for room. */
void be_interrupted(const char *bfcctl)
{
        const struct sigaction action = { .sa_handler = on_signal };
        struct giver g = { .interrupts = true };
        CUcontext context;
        pthread_t thread;
        struct model m;

        CHECK(sem_init(&wanted, 0, 0) == 0 && sigaction(SIGUSR1, &action, NULL) == 0);
        context_make();
        m = make();
        OK(cu.cuCtxGetCurrent(&context));
        OK(cu.cuLaunchHostFunc(NULL, want, NULL));
        CHECK(pthread_create(&thread, NULL, allocate, context) == 0);
        CHECK(idle_begin() == (int64_t)IDLE_BYTES);
        CHECK(pthread_join(thread, NULL) == 0);
        CHECK(park(bfcctl) == IDLE_BYTES);
        wait_free(LIMIT - SHARED_BYTES);
        g.large = create(LARGE_BYTES + MAPPED_BYTES, &plain);
        give_later(&g);
        OK(cu.cuDevicePrimaryCtxReset_v2(0));
        CHECK(pthread_join(g.thread, NULL) == 0);
        CHECK(idle_end(0) == 0);
        context_make();
        check(&m);
}

/* The test does something to the daemon between the two files; or the program is killed. */
void be_idle_meanwhile(const char *bfcctl, const char *folder, bool is_killed)
{
        char path[256];
        struct model m;
        int fd;

        context_make();
        m = make();
        CHECK(idle_begin() == (int64_t)IDLE_BYTES && park(bfcctl) == IDLE_BYTES);
        if (is_killed)
                raise(SIGKILL);
        snprintf(path, sizeof(path), "%s/is-parked", folder);
        fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
        CHECK(fd >= 0 && close(fd) == 0);
        while (access(path, F_OK) == 0)
                usleep(1000);
        CHECK(idle_end(600000) == 0);
        check(&m);
        check_handle(&m);
}
