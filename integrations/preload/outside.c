/* Memory that the driver gives; see outside.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Invariant: a GPU's outside_bytes is the sum over its entries that are not charged, and over calls in progress. */
#include "integrations/preload/outside.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>

#include "integrations/preload/charge.h"
#include "integrations/preload/lent.h"

#define N_FIRST 64 /* chains */

enum { HANDLE = OUTSIDE_GREEN + 1, MAPPING };

struct outside_entry {
        LIST_ENTRY(outside_entry) link;
        int kind;
        uint64_t key;
        struct gpu *gpu;
        size_t n_bytes;
        bool is_charged;
        struct lent *lent;            /* HANDLE: not NULL: it is a block */
        CUcontext context;            /* that has it; HANDLE, MAPPING: none */
        uint64_t number;              /* in the order in which the driver gave it */
        unsigned n_references;        /* HANDLE: to the handle, and mappings */
        unsigned n_handles;           /* HANDLE: of these to the handle */
        struct outside_entry *memory; /* MAPPING: its HANDLE */
        uint64_t readers, writers;    /* MAPPING: while the memory sleeps; by bit: GPUs that have access */
};

LIST_HEAD(chain, outside_entry);

/* As many chains as entries, or more, so that few entries need little of the processor's cache. */
static struct chain first_chains[N_FIRST], *chains = first_chains;
static size_t n_chains = N_FIRST, n_entries;                /* n_chains: a power of 2 */
static struct chain spares = LIST_HEAD_INITIALIZER(spares); /* for the next handles */
static uint64_t n_given;                                    /* the last number */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void in_child(void)
{
        lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
        memset(first_chains, 0, sizeof(first_chains));
        chains = first_chains;
        n_chains = N_FIRST;
        n_entries = 0;
        LIST_INIT(&spares);
}

static void __attribute__((constructor)) watch_forks(void)
{
        pthread_atfork(NULL, NULL, in_child);
}

/* ---- sums --------------------------------------------------------------------- */

/* A new client is told of the sum, so it is made before it changes. */
static void add(struct gpu *gpu, size_t n_bytes)
{
        bfc_client *client;
        CUresult result = broker_client_to_ask(gpu, &client);

        __atomic_add_fetch(&gpu->outside_bytes, n_bytes, __ATOMIC_RELAXED);
        if (result == CUDA_SUCCESS)
                bfc_add_outside(client, gpu->partition, (int64_t)n_bytes);
}

static void note_peak(struct gpu *gpu)
{
        uint64_t peak = __atomic_load_n(&gpu->peak_outside, __ATOMIC_RELAXED);
        uint64_t n = __atomic_load_n(&gpu->outside_bytes, __ATOMIC_RELAXED);

        while (n > peak && !__atomic_compare_exchange_n(&gpu->peak_outside, &peak, n, true, __ATOMIC_RELAXED,
                                                        __ATOMIC_RELAXED))
                ;
}

/* For the line at the end of the process. More functions than that are not named. */
static void note_function(struct gpu *gpu, const char *function)
{
        for (size_t i = 0; i < sizeof(gpu->outside_by) / sizeof(gpu->outside_by[0]); i++) {
                const char *other = NULL;

                if (__atomic_compare_exchange_n(&gpu->outside_by[i], &other, function, false,
                                                __ATOMIC_RELAXED, __ATOMIC_RELAXED) ||
                    strcmp(other, function) == 0)
                        return;
        }
}

static bool is_context(int kind)
{
        return kind == OUTSIDE_CONTEXT || kind == OUTSIDE_GREEN;
}

static void subtract(struct gpu *gpu, size_t n_bytes, bool is_charged)
{
        bfc_client *client = __atomic_load_n(&gpu->client, __ATOMIC_ACQUIRE);

        if (is_charged) {
                charge_give(gpu, n_bytes);
                return;
        }
        __atomic_sub_fetch(&gpu->outside_bytes, n_bytes, __ATOMIC_RELAXED);
        if (client)
                bfc_add_outside(client, gpu->partition, -(int64_t)n_bytes);
}

CUresult outside_begin(struct outside *o)
{
        int r = -ENOTSUP;

        if (o->is_managed && broker_is_strict())
                o->n_bytes = outside_whole(o->n_bytes);
        if (o->gpu && (!o->is_managed || broker_is_strict()))
                r = charge_take(o->gpu, o->n_bytes);
        o->is_charged = r == 0;
        if (r == -EBUSY) /* the device is drained */
                return CUDA_ERROR_OUT_OF_MEMORY;
        if (r != -ENOTSUP)
                return broker_result(r);
        if (broker_is_strict()) {
                broker_say("BFC_STRICT is set, and memory that cannot be charged is refused (%s)",
                           o->function);
                return CUDA_ERROR_NOT_PERMITTED;
        }
        if (o->gpu)
                add(o->gpu, o->n_bytes);
        return CUDA_SUCCESS;
}

/* ---- entries -------------------------------------------------------------------- */

static struct chain *chain_of(int kind, uint64_t key)
{
        uint64_t hash = (key ^ (uint64_t)kind << 56) * UINT64_C(0x9E3779B97F4A7C15);

        return &chains[(hash >> 40) & (n_chains - 1)];
}

/* Without memory they stay as they are. */
static void double_chains_locked(void)
{
        struct chain *old = chains, *new = calloc(2 * n_chains, sizeof(*new));
        size_t n_old = n_chains;
        struct outside_entry *e;

        if (!new)
                return;
        chains = new;
        n_chains *= 2;
        for (size_t i = 0; i < n_old; i++)
                while ((e = LIST_FIRST(&old[i]))) {
                        LIST_REMOVE(e, link);
                        LIST_INSERT_HEAD(chain_of(e->kind, e->key), e, link);
                }
        if (old != first_chains)
                free(old);
}

static void insert_locked(struct outside_entry *e)
{
        if (n_entries >= n_chains)
                double_chains_locked();
        n_entries++;
        LIST_INSERT_HEAD(chain_of(e->kind, e->key), e, link);
}

static void remove_locked(struct outside_entry *e)
{
        n_entries--;
        LIST_REMOVE(e, link);
}

static struct outside_entry *find_locked(int kind, uint64_t key)
{
        struct outside_entry *e;

        LIST_FOREACH(e, chain_of(kind, key), link)
        {
                if (e->kind == kind && e->key == key && (kind != HANDLE || e->n_handles > 0))
                        return e;
        }
        return NULL;
}

static void insert(struct outside_entry *e)
{
        pthread_mutex_lock(&lock);
        if (e->number == 0)
                e->number = ++n_given;
        insert_locked(e);
        pthread_mutex_unlock(&lock);
}

/* NULL: there is no memory for it. */
static struct outside_entry *new_entry_locked(void)
{
        struct outside_entry *e = LIST_FIRST(&spares);

        if (!e)
                return malloc(sizeof(*e));
        LIST_REMOVE(e, link);
        return e;
}

static CUcontext context_of(const struct gpu *gpu, int kind, uint64_t key)
{
        CUcontext context = NULL;

        if (kind == OUTSIDE_CONTEXT)
                context = (CUcontext)(uintptr_t)key;
        else if (kind == OUTSIDE_GREEN)
                context = gpu->primary;
        else if (kind < HANDLE)
                (void)cuCtxGetCurrent(&context);
        return context;
}

/* Without memory for an entry, the bytes stay counted until the process ends. */
static CUresult end(const struct outside *o, CUresult result, int kind, uint64_t key)
{
        struct outside_entry *e;
        CUcontext context;

        if (!o->gpu)
                return result;
        if (result != CUDA_SUCCESS) {
                subtract(o->gpu, o->n_bytes, o->is_charged);
                return result;
        }
        if (!o->is_charged && !o->lent) {
                note_peak(o->gpu);
                note_function(o->gpu, o->function);
        }
        if (o->is_charged && is_context(kind))
                charge_add_contexts(o->gpu, (int64_t)o->n_bytes);
        context = context_of(o->gpu, kind, key);
        pthread_mutex_lock(&lock);
        e = new_entry_locked();
        if (e) {
                *e = (struct outside_entry){ .kind = kind,
                                             .key = key,
                                             .gpu = o->gpu,
                                             .n_bytes = o->n_bytes,
                                             .is_charged = o->is_charged,
                                             .lent = o->lent,
                                             .context = context,
                                             .number = ++n_given,
                                             .n_references = 1,
                                             .n_handles = 1 };
                insert_locked(e);
        }
        pthread_mutex_unlock(&lock);
        return result;
}

CUresult outside_end(const struct outside *o, CUresult result, enum outside_kind kind, uint64_t key)
{
        return end(o, result, (int)kind, key);
}

struct outside_entry *outside_take(enum outside_kind kind, uint64_t key)
{
        struct outside_entry *e;

        pthread_mutex_lock(&lock);
        e = find_locked((int)kind, key);
        if (e)
                remove_locked(e);
        pthread_mutex_unlock(&lock);
        return e;
}

static void end_entry(const struct outside_entry *e)
{
        if (e->is_charged && is_context(e->kind))
                charge_add_contexts(e->gpu, -(int64_t)e->n_bytes);
        subtract(e->gpu, e->n_bytes, e->is_charged);
}

CUresult outside_took(struct outside_entry *e, CUresult result)
{
        if (!e)
                return result;
        if (result != CUDA_SUCCESS) {
                insert(e);
                return result;
        }
        end_entry(e);
        free(e);
        return result;
}

struct gpu *outside_gpu(const struct outside_entry *e)
{
        return e ? e->gpu : NULL;
}

/* Of an entry that is on no chain any more. Without the lock: the daemon may be asked. */
static void give_back_one(const struct outside_entry *e)
{
        if (e->lent)
                lent_end(e->lent);
        else
                end_entry(e);
}

static void give_back(struct chain *ended)
{
        struct outside_entry *e;

        while ((e = LIST_FIRST(ended))) {
                LIST_REMOVE(e, link);
                give_back_one(e);
                free(e);
        }
}

uint64_t outside_mark(void)
{
        uint64_t mark;

        pthread_mutex_lock(&lock);
        mark = n_given;
        pthread_mutex_unlock(&lock);
        return mark;
}

void outside_forget(CUcontext context, uint64_t mark)
{
        struct chain ended = LIST_HEAD_INITIALIZER(ended);
        struct outside_entry *e, *next;

        pthread_mutex_lock(&lock);
        for (size_t i = 0; i < n_chains; i++)
                for (e = LIST_FIRST(&chains[i]); e; e = next) {
                        next = LIST_NEXT(e, link);
                        if (e->context != context || e->number > mark)
                                continue;
                        remove_locked(e);
                        LIST_INSERT_HEAD(&ended, e, link);
                }
        pthread_mutex_unlock(&lock);
        give_back(&ended);
}

/* ---- cuMemCreate() ----------------------------------------------------------------- */

CUresult outside_end_create(const struct outside *o, CUresult result, CUmemGenericAllocationHandle handle)
{
        return end(o, result, HANDLE, handle);
}

/* True: it has ended. */
static bool unref_locked(struct outside_entry *memory, struct chain *ended)
{
        if (--memory->n_references > 0)
                return false;
        remove_locked(memory);
        LIST_INSERT_HEAD(ended, memory, link);
        return true;
}

/* Of memory that is mapped, and may have no handle. */
static struct outside_entry *find_mapped_locked(CUmemGenericAllocationHandle handle)
{
        struct outside_entry *e;

        LIST_FOREACH(e, chain_of(HANDLE, handle), link)
        {
                if (e->kind == HANDLE && e->key == handle)
                        return e;
        }
        return NULL;
}

void outside_retain(CUmemGenericAllocationHandle handle)
{
        struct outside_entry *e;

        pthread_mutex_lock(&lock);
        e = find_locked(HANDLE, handle);
        if (!e)
                e = find_mapped_locked(handle);
        if (e) {
                e->n_handles++;
                e->n_references++;
        }
        pthread_mutex_unlock(&lock);
}

/* The lock is held across the call, in which the driver frees the number. */
CUresult outside_release(CUmemGenericAllocationHandle handle)
{
        struct outside_entry *e, ended;
        bool has_ended = false;
        CUresult result;

        pthread_mutex_lock(&lock);
        e = find_locked(HANDLE, handle);
        if (e && e->lent && lent_is_counted(e->lent))
                result = CUDA_SUCCESS;
        else if (!e && lent_has_name(handle))
                result = CUDA_ERROR_INVALID_VALUE;
        else
                result = real_cuMemRelease(handle);
        if (e && result == CUDA_SUCCESS) {
                e->n_handles--;
                has_ended = unref_locked(e, &spares);
                ended = *e;
        }
        pthread_mutex_unlock(&lock);
        if (has_ended)
                give_back_one(&ended);
        return result;
}

void outside_mapped(CUmemGenericAllocationHandle handle, CUdeviceptr pointer)
{
        struct outside_entry *memory, *e = calloc(1, sizeof(*e));

        pthread_mutex_lock(&lock);
        memory = e ? find_locked(HANDLE, handle) : NULL;
        if (memory) {
                memory->n_references++;
                *e = (struct outside_entry){ .kind = MAPPING, .key = pointer, .memory = memory };
                e->n_bytes = memory->n_bytes;
                insert_locked(e);
                e = NULL;
        }
        pthread_mutex_unlock(&lock);
        free(e);
}

/* Mappings are whole handles, so they follow each other. */
static void unmapped(CUdeviceptr pointer, size_t n_bytes)
{
        struct chain ended = LIST_HEAD_INITIALIZER(ended);
        struct outside_entry *e;

        pthread_mutex_lock(&lock);
        for (CUdeviceptr at = pointer; at - pointer < n_bytes && (e = find_locked(MAPPING, at));) {
                at += e->n_bytes;
                remove_locked(e);
                unref_locked(e->memory, &ended);
                free(e);
        }
        pthread_mutex_unlock(&lock);
        give_back(&ended);
}

/* Memory that sleeps is not mapped. Returns the bytes of the first mapping, or of all where none sleeps. */
static size_t first_part(CUdeviceptr pointer, size_t n_bytes, bool *ret_sleeps)
{
        const struct outside_entry *e;
        size_t n = n_bytes;

        *ret_sleeps = false;
        if (!lent_sleeps())
                return n_bytes;
        pthread_mutex_lock(&lock);
        e = find_locked(MAPPING, pointer);
        if (e && e->n_bytes <= n_bytes) {
                n = e->n_bytes;
                *ret_sleeps = e->memory->lent && lent_is_asleep(e->memory->lent);
        }
        pthread_mutex_unlock(&lock);
        return n;
}

CUresult outside_unmap(CUdeviceptr pointer, size_t n_bytes)
{
        CUresult result = CUDA_SUCCESS;
        bool sleeps;

        do {
                size_t n = first_part(pointer, n_bytes, &sleeps);

                if (!sleeps)
                        result = real_cuMemUnmap(pointer, n);
                if (result == CUDA_SUCCESS)
                        unmapped(pointer, n);
                pointer += n;
                n_bytes -= n;
        } while (result == CUDA_SUCCESS && n_bytes > 0);
        return result;
}

/* ---- sleep ------------------------------------------------------------------------------ */

unsigned outside_n_handles(const struct lent *lent)
{
        const struct outside_entry *e;
        unsigned n = 0;

        pthread_mutex_lock(&lock);
        for (size_t i = 0; i < n_chains; i++)
                LIST_FOREACH(e, &chains[i], link)
        if (e->kind == HANDLE && e->lent == lent)
                n = e->n_handles;
        pthread_mutex_unlock(&lock);
        return n;
}

/* Calls it for each mapping of the memory until there is an error, which it returns. The lock is held: small memory is created
 * meanwhile, see cuMemCreate(). */
static CUresult for_mappings(const struct lent *lent,
                             CUresult (*call)(struct outside_entry *e, CUmemGenericAllocationHandle handle),
                             CUmemGenericAllocationHandle handle)
{
        CUresult result = CUDA_SUCCESS;
        struct outside_entry *e;

        pthread_mutex_lock(&lock);
        for (size_t i = 0; i < n_chains; i++)
                LIST_FOREACH(e, &chains[i], link)
        if (result == CUDA_SUCCESS && e->kind == MAPPING && e->memory->lent == lent)
                result = call(e, handle);
        pthread_mutex_unlock(&lock);
        return result;
}

static int n_devices(void)
{
        int n = 0;

        (void)cuDeviceGetCount(&n);
        return n < 64 ? n : 64;
}

/* Access of the host is not known how to give again: CUDA_ERROR_NOT_SUPPORTED. */
static CUresult read_access(struct outside_entry *e, CUmemGenericAllocationHandle unused)
{
        const CUmemLocation host = { (CUmemLocationType)CU_MEM_LOCATION_TYPE_HOST, 0 };
        unsigned long long flags = 0;

        (void)unused;
        e->readers = e->writers = 0;
        if (cuMemGetAccess(&flags, &host, e->key) == CUDA_SUCCESS && flags != 0)
                return CUDA_ERROR_NOT_SUPPORTED;
        for (int i = 0; i < n_devices(); i++) {
                const CUmemLocation location = { CU_MEM_LOCATION_TYPE_DEVICE, i };
                CUresult result = cuMemGetAccess(&flags, &location, e->key);

                if (result != CUDA_SUCCESS)
                        return result;
                if (flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
                        e->writers |= UINT64_C(1) << i;
                else if (flags == CU_MEM_ACCESS_FLAGS_PROT_READ)
                        e->readers |= UINT64_C(1) << i;
        }
        return CUDA_SUCCESS;
}

static CUresult unmap_one(struct outside_entry *e, CUmemGenericAllocationHandle unused)
{
        (void)unused;
        return real_cuMemUnmap(e->key, e->n_bytes);
}

static CUresult set_access(const struct outside_entry *e)
{
        CUresult result = CUDA_SUCCESS;

        for (int i = 0; i < 64 && result == CUDA_SUCCESS; i++) {
                CUmemAccessDesc access = { { CU_MEM_LOCATION_TYPE_DEVICE, i },
                                           CU_MEM_ACCESS_FLAGS_PROT_READWRITE };

                if (e->readers >> i & 1)
                        access.flags = CU_MEM_ACCESS_FLAGS_PROT_READ;
                else if (!(e->writers >> i & 1))
                        continue;
                result = cuMemSetAccess(e->key, e->n_bytes, &access, 1);
        }
        return result;
}

static CUresult map_one(struct outside_entry *e, CUmemGenericAllocationHandle handle)
{
        CUresult result = real_cuMemMap(e->key, e->n_bytes, 0, handle, 0);

        if (result != CUDA_SUCCESS)
                return result;
        result = set_access(e);
        if (result != CUDA_SUCCESS)
                real_cuMemUnmap(e->key, e->n_bytes);
        return result;
}

/* Where that can be done. */
static CUresult map_if_unmapped(struct outside_entry *e, CUmemGenericAllocationHandle handle)
{
        (void)map_one(e, handle);
        return CUDA_SUCCESS;
}

static CUresult unmap_if_mapped(struct outside_entry *e, CUmemGenericAllocationHandle unused)
{
        (void)unmap_one(e, unused);
        return CUDA_SUCCESS;
}

bool outside_unmap_lent(const struct lent *lent, CUmemGenericAllocationHandle handle)
{
        if (for_mappings(lent, read_access, 0) != CUDA_SUCCESS)
                return false;
        if (for_mappings(lent, unmap_one, 0) == CUDA_SUCCESS)
                return true;
        (void)for_mappings(lent, map_if_unmapped, handle);
        return false;
}

CUresult outside_map_lent(const struct lent *lent, CUmemGenericAllocationHandle handle)
{
        CUresult result = for_mappings(lent, map_one, handle);

        if (result != CUDA_SUCCESS)
                (void)for_mappings(lent, unmap_if_mapped, 0);
        return result;
}
