/* Jobs; see job.h. The first half runs in the job, the second in the test.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/job.h"

#include <check.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/gpu/driver.h"
#include "tests/gpu/peer.h"

#define N_THREADS 256u

static char socket_path[108];
static char sentence[400];

/* ---- in the job ---------------------------------------------------------- */

static bfc_client *client;
static CUdeviceptr slots[JOB_SLOTS];

static int told(struct message *m, int r)
{
        snprintf(m->text, sizeof(m->text), "%.399s", r < 0 ? bfc_last_error() : "");
        return r;
}

static int driver_told(struct message *m, CUresult result)
{
        snprintf(m->text, sizeof(m->text), "%s", result == CUDA_SUCCESS ? "" : gpu_error(result));
        return result == CUDA_SUCCESS ? 0 : -EIO;
}

static void *pointer(unsigned int slot)
{
        return (void *)(uintptr_t)slots[slot];
}

static int act_see(struct message *m)
{
        CUcontext context;

        return driver_told(m, gpu_start(0, &context));
}

/* A child that does nothing, and has the process's fds of the driver. a: its pid. */
static int act_fork(struct message *m)
{
        pid_t pid = fork();

        if (pid == 0) {
                for (;;)
                        pause();
        }
        m->a = (uint64_t)pid;
        return pid > 0 ? 0 : -errno;
}

static int act_set_visible(struct message *m)
{
        return setenv("CUDA_VISIBLE_DEVICES", m->text, 1);
}

static int act_connect(struct message *m)
{
        struct bfc_options options = { .struct_size = sizeof(options),
                                       .socket = socket_path,
                                       .tenant = m->text };

        return told(m, bfc_connect(&options, &client));
}

static int act_disconnect(struct message *m)
{
        (void)m;
        bfc_disconnect(client);
        client = NULL;
        return 0;
}

static int act_n_free(struct message *m)
{
        m->a = gpu_n_free();
        return 0;
}

static int act_malloc(struct message *m)
{
        void *p;
        int r = bfc_malloc_in(client, m->text, m->b, &p);

        if (r == 0)
                slots[m->a] = (CUdeviceptr)(uintptr_t)p;
        return told(m, r);
}

static int act_malloc_parkable(struct message *m)
{
        void *p;
        int r = bfc_malloc_flags(client, m->text, m->b, BFC_PARKABLE, &p);

        if (r == 0)
                slots[m->a] = (CUdeviceptr)(uintptr_t)p;
        return told(m, r);
}

static int act_park(struct message *m)
{
        return told(m, bfc_park(client, pointer((unsigned int)m->a), BFC_BACKUP, m->text));
}

static int act_wake(struct message *m)
{
        return told(m, bfc_wake(client, pointer((unsigned int)m->a), (uint32_t)m->b));
}

static int act_free(struct message *m)
{
        return told(m, bfc_free(client, pointer((unsigned int)m->a)));
}

static int act_info(struct message *m)
{
        struct bfc_block_info info = { .struct_size = sizeof(info) };
        int r = bfc_block_info(client, pointer((unsigned int)m->a), &info);

        if (r < 0)
                return told(m, r);
        memcpy(m->text, &info, sizeof(info));
        return 0;
}

static int act_partition(struct message *m)
{
        const char *name = "";
        int r = bfc_partition_for_device(client, (int)m->a, &name);

        if (r < 0)
                return told(m, r);
        snprintf(m->text, sizeof(m->text), "%s", name);
        return 0;
}

/* a: slot, b: value, c: bytes; extent.n_bytes: from where on, as in all that follow */
static int act_write(struct message *m)
{
        unsigned char *bytes = malloc(m->c);
        int r;

        if (!bytes)
                return -ENOMEM;
        memset(bytes, (int)m->b, m->c);
        r = bfc_write(client, (char *)pointer((unsigned int)m->a) + m->extent.n_bytes, bytes, m->c);
        free(bytes);
        return told(m, r);
}

static int act_read(struct message *m)
{
        unsigned char *bytes = malloc(m->c);
        uint64_t n_other = 0;
        int r;

        if (!bytes)
                return -ENOMEM;
        r = bfc_read(client, bytes, (char *)pointer((unsigned int)m->a) + m->extent.n_bytes, m->c);
        for (uint64_t i = 0; r == 0 && i < m->c; i++)
                n_other += bytes[i] != m->b;
        free(bytes);
        m->c = n_other;
        return told(m, r);
}

static int act_fill(struct message *m)
{
        CUresult result = cu.cuMemsetD8_v2(slots[m->a] + m->extent.n_bytes, (unsigned char)m->b, m->c);

        return driver_told(m, result == CUDA_SUCCESS ? cu.cuCtxSynchronize() : result);
}

static int act_count_other(struct message *m)
{
        m->c = gpu_count_other(slots[m->a] + m->extent.n_bytes, (unsigned char)m->b, m->c);
        return m->c == SIZE_MAX ? -EIO : 0;
}

static int act_copy(struct message *m)
{
        CUresult result = cu.cuMemcpyDtoD_v2(slots[m->a], slots[m->b], m->c);

        return driver_told(m, result == CUDA_SUCCESS ? cu.cuCtxSynchronize() : result);
}

static CUresult launch(CUdeviceptr at, uint32_t value, uint32_t n_words)
{
        void *parameters[] = { &at, &n_words, &value };
        CUfunction function;
        CUmodule module;
        CUresult r = cu.cuModuleLoadData(&module, gpu_kernels_ptx);

        if (r != CUDA_SUCCESS)
                return r;
        r = cu.cuModuleGetFunction(&function, module, "fill32");
        if (r == CUDA_SUCCESS)
                r = cu.cuLaunchKernel(function, (n_words + N_THREADS - 1) / N_THREADS, 1, 1, N_THREADS, 1, 1,
                                      0, NULL, parameters, NULL);
        if (r == CUDA_SUCCESS)
                r = cu.cuCtxSynchronize();
        cu.cuModuleUnload(module);
        return r;
}

/* a: slot, b: value, c: words */
static int act_launch(struct message *m)
{
        uint32_t *words;
        CUresult result;

        if (!gpu_is_fake())
                return driver_told(m, launch(slots[m->a], (uint32_t)m->b, (uint32_t)m->c));
        words = calloc(m->c, sizeof(*words));
        if (!words)
                return -ENOMEM;
        for (uint64_t i = 0; i < m->c; i++)
                words[i] = (uint32_t)m->b;
        result = cu.cuMemcpyHtoD_v2(slots[m->a], words, m->c * sizeof(*words));
        free(words);
        return driver_told(m, result);
}

static int act_count_other_words(struct message *m)
{
        uint32_t *words = calloc(m->c, sizeof(*words));
        uint64_t n_words = m->c;
        CUresult result;

        if (!words)
                return -ENOMEM;
        result = cu.cuMemcpyDtoH_v2(words, slots[m->a], n_words * sizeof(*words));
        m->c = 0;
        for (uint64_t i = 0; result == CUDA_SUCCESS && i < n_words; i++)
                m->c += words[i] != m->b;
        free(words);
        return driver_told(m, result);
}

/* a: slot; text: the info */
static int act_open(struct message *m)
{
        struct bfc_block_info info;
        CUipcMemHandle handle;
        CUdeviceptr base;
        CUresult result;

        memcpy(&info, m->text, sizeof(info));
        memcpy(&handle, info.handle, sizeof(handle));
        result = cu.cuIpcOpenMemHandle_v2(&base, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
        if (result == CUDA_SUCCESS)
                slots[m->a] = base + info.extent_offset;
        return driver_told(m, result);
}

static int act_close(struct message *m)
{
        struct bfc_block_info info;

        memcpy(&info, m->text, sizeof(info));
        return driver_told(m, cu.cuIpcCloseMemHandle(slots[m->a] - info.extent_offset));
}

/* a: slot, b: of an own block in the same extent; text: the info */
static int act_reach(struct message *m)
{
        struct bfc_block_info theirs, ours = { .struct_size = sizeof(ours) };
        int r = bfc_block_info(client, pointer((unsigned int)m->b), &ours);

        if (r < 0)
                return told(m, r);
        memcpy(&theirs, m->text, sizeof(theirs));
        if (theirs.region_id != ours.region_id ||
            theirs.offset - theirs.extent_offset != ours.offset - ours.extent_offset)
                return -EXDEV;
        slots[m->a] = slots[m->b] - ours.offset + theirs.offset;
        return 0;
}

/* ---- in the test --------------------------------------------------------- */

void job_use_socket(const char *path)
{
        snprintf(socket_path, sizeof(socket_path), "%s", path);
}

const char *job_sentence(void)
{
        return sentence;
}

static int ask(struct process *p, int (*act)(struct message *m), struct message *m)
{
        int r;

        m->fd = -1;
        r = process_call(p, act, m);
        sentence[0] = '\0';
        if (r < 0)
                snprintf(sentence, sizeof(sentence), "%.399s", m->text);
        return r;
}

static void must(struct process *p, int (*act)(struct message *m), struct message *m)
{
        int r = ask(p, act, m);

        ck_assert_msg(r == 0, "a job's step failed: %d (%s)", r, sentence);
}

struct process job_start_seeing(const char *visible, const char *tenant)
{
        struct process p = process_start();
        struct message m = { .a = 0 };

        if (visible) {
                snprintf(m.text, sizeof(m.text), "%s", visible);
                must(&p, act_set_visible, &m);
        } else {
                must(&p, act_see, &m);
        }
        m = (struct message){ .a = 0 };
        snprintf(m.text, sizeof(m.text), "%s", tenant ? tenant : "");
        if (tenant)
                must(&p, act_connect, &m);
        return p;
}

struct process job_start(const char *tenant)
{
        return job_start_seeing(NULL, tenant);
}

void job_end(struct process *p)
{
        struct message m = { .a = 0 };

        must(p, act_disconnect, &m);
        ck_assert_int_eq(process_end(p), 0);
}

pid_t job_fork(struct process *p)
{
        struct message m = { .a = 0 };

        must(p, act_fork, &m);
        return (pid_t)m.a;
}

uint64_t job_n_free(struct process *p)
{
        struct message m = { .a = 0 };

        must(p, act_n_free, &m);
        return m.a;
}

int job_malloc(struct process *p, unsigned int slot, const char *partition, uint64_t n_bytes)
{
        struct message m = { .a = slot, .b = n_bytes };

        snprintf(m.text, sizeof(m.text), "%s", partition);
        return ask(p, act_malloc, &m);
}

int job_malloc_parkable(struct process *p, unsigned int slot, const char *partition, uint64_t n_bytes)
{
        struct message m = { .a = slot, .b = n_bytes };

        snprintf(m.text, sizeof(m.text), "%s", partition);
        return ask(p, act_malloc_parkable, &m);
}

int job_park(struct process *p, unsigned int slot, const char *to)
{
        struct message m = { .a = slot };

        snprintf(m.text, sizeof(m.text), "%s", to);
        return ask(p, act_park, &m);
}

int job_wake(struct process *p, unsigned int slot, uint32_t wait_ms)
{
        struct message m = { .a = slot, .b = wait_ms };

        return ask(p, act_wake, &m);
}

int job_free(struct process *p, unsigned int slot)
{
        struct message m = { .a = slot };

        return ask(p, act_free, &m);
}

struct bfc_block_info job_info(struct process *p, unsigned int slot)
{
        struct message m = { .a = slot };
        struct bfc_block_info info;

        _Static_assert(sizeof(info) <= sizeof(m.text), "it travels as the text");
        must(p, act_info, &m);
        memcpy(&info, m.text, sizeof(info));
        return info;
}

int job_partition_for_device(struct process *p, int ordinal, char ret_name[static 64])
{
        struct message m = { .a = (uint64_t)ordinal };
        int r = ask(p, act_partition, &m);

        if (r == 0)
                snprintf(ret_name, 64, "%.63s", m.text);
        return r;
}

static struct message about(unsigned int slot, uint64_t at, unsigned char value, uint64_t n_bytes)
{
        return (struct message){ .a = slot, .b = value, .c = n_bytes, .extent.n_bytes = at };
}

int job_write(struct process *p, unsigned int slot, uint64_t at, unsigned char value, uint64_t n_bytes)
{
        struct message m = about(slot, at, value, n_bytes);

        return ask(p, act_write, &m);
}

int job_read(struct process *p, unsigned int slot, uint64_t at, unsigned char value, uint64_t n_bytes,
             uint64_t *ret_n_other)
{
        struct message m = about(slot, at, value, n_bytes);
        int r = ask(p, act_read, &m);

        if (r == 0)
                *ret_n_other = m.c;
        return r;
}

void job_fill(struct process *p, unsigned int slot, uint64_t at, unsigned char value, uint64_t n_bytes)
{
        struct message m = about(slot, at, value, n_bytes);

        must(p, act_fill, &m);
}

uint64_t job_count_other(struct process *p, unsigned int slot, uint64_t at, unsigned char value,
                         uint64_t n_bytes)
{
        struct message m = about(slot, at, value, n_bytes);

        must(p, act_count_other, &m);
        return m.c;
}

void job_copy(struct process *p, unsigned int to, unsigned int from, uint64_t n_bytes)
{
        struct message m = { .a = to, .b = from, .c = n_bytes };

        must(p, act_copy, &m);
}

void job_launch(struct process *p, unsigned int slot, uint32_t value, uint32_t n_words)
{
        struct message m = { .a = slot, .b = value, .c = n_words };

        must(p, act_launch, &m);
}

uint32_t job_count_other_words(struct process *p, unsigned int slot, uint32_t value, uint32_t n_words)
{
        struct message m = { .a = slot, .b = value, .c = n_words };

        must(p, act_count_other_words, &m);
        return (uint32_t)m.c;
}

int job_open(struct process *p, unsigned int slot, const struct bfc_block_info *info)
{
        struct message m = { .a = slot };

        memcpy(m.text, info, sizeof(*info));
        return ask(p, act_open, &m);
}

void job_close(struct process *p, unsigned int slot, const struct bfc_block_info *info)
{
        struct message m = { .a = slot };

        memcpy(m.text, info, sizeof(*info));
        must(p, act_close, &m);
}

void job_reach(struct process *p, unsigned int slot, unsigned int beside, const struct bfc_block_info *info)
{
        struct message m = { .a = slot, .b = beside };

        memcpy(m.text, info, sizeof(*info));
        must(p, act_reach, &m);
}
