/* SPDX-License-Identifier: Apache-2.0 */
/* GPUs in a config: their ids, what the machine reports of them, and the cost of sharing one. On a machine
 * without the GPU only its id is reported: checks that need the GPU are left out. */
#include "daemon/config/reader.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define MAX_ORDINAL_DIGITS 3

/* The memory of one CUDA context, as reported: see docs/cuda.md. */
#define CONTEXT_BYTES_MIN (UINT64_C(100) << 20)
#define CONTEXT_BYTES_MAX (UINT64_C(550) << 20)
#define ADVICE_BYTES      96u

/* ---- ids ------------------------------------------------------------------ */

static bool is_ordinal(const char *text)
{
        size_t n = strspn(text, "0123456789");

        return n > 0 && n <= MAX_ORDINAL_DIGITS && text[n] == '\0' && (n == 1 || text[0] != '0');
}

static bool is_uuid(const char *text)
{
        static const char form[] = "xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx";

        if (strlen(text) != sizeof(form) - 1)
                return false;
        for (size_t i = 0; form[i]; i++)
                if (form[i] == 'x' ? !strchr("0123456789abcdefABCDEF", text[i]) : text[i] != form[i])
                        return false;
        return true;
}

bool config_read_gpu_id(struct config_reader *r, const struct yamltree_node *n, enum device_kind *ret)
{
        bool is_text = strlen(n->text) == n->n_text;

        if (is_text && strncmp(n->text, "cuda:", 5) == 0) {
                if (!is_ordinal(n->text + 5))
                        return config_fail(r, n, "device '%s' has no GPU number; write it as in cuda:0",
                                           SHOW(n));
        } else if (is_text && (strncmp(n->text, "GPU-", 4) == 0 || strncmp(n->text, "MIG-", 4) == 0)) {
                if (!is_uuid(n->text + 4))
                        return config_fail(r, n,
                                           "device '%s' has no UUID; write it as nvidia-smi -L prints it",
                                           SHOW(n));
        } else {
                return config_fail(r, n, "device '%s' is not known; write host, cuda:N, GPU-UUID or MIG-UUID",
                                   SHOW(n));
        }
        *ret = DEVICE_KIND_GPU;
        return true;
}

/* ---- what the machine says ------------------------------------------------ */

static bool check_is_new(struct config_reader *r, size_t device, const uint8_t *uuid)
{
        const struct device_note *note = &r->devices[device];

        for (size_t i = 0; i < device; i++) {
                const struct device_note *other = &r->devices[i];

                if (!other->is_seen || memcmp(r->c->devices[i].uuid, uuid, CONFIG_UUID_BYTES) != 0)
                        continue;
                return config_fail(
                        r, note->place.at[DEVICE_ID],
                        "device '%s' is the same GPU as '%s' on line %zu; list all its partitions in "
                        "one entry",
                        SHOW(note->place.at[DEVICE_ID]), SHOW(other->place.at[DEVICE_ID]),
                        other->place.at[DEVICE_ID]->line);
        }
        return true;
}

/* 2 GiB, for the contexts of bfcd and of a few clients; less on a small GPU or a MIG slice, where 2 GiB would
 * be most of the memory. */
uint64_t config_default_headroom(uint64_t bytes_total)
{
        uint64_t bytes = bytes_total / 8;

        if (bytes > UINT64_C(2) << 30)
                bytes = UINT64_C(2) << 30;
        return (bytes + CONFIG_GRANULARITY - 1) / CONFIG_GRANULARITY * CONFIG_GRANULARITY;
}

bool config_look_at_gpu(struct config_reader *r, size_t device)
{
        struct config_device *d = &r->c->devices[device];
        struct device_note *note = &r->devices[device];
        char sentence[512] = "";
        struct config_gpu gpu;

        if (r->machine && r->machine->running)
                return config_recall_gpu(r, device);
        if (!r->machine || r->machine->look(r->machine->userdata, r->c->admin_socket.path, d->id, &gpu,
                                            sentence, sizeof(sentence)) < 0)
                return config_fail_machine(r, note->place.at[DEVICE_ID], "device %s%s",
                                           sentence[0] ? sentence : d->id,
                                           sentence[0] ? "" : ": GPUs are not supported by this program");
        if (!check_is_new(r, device, gpu.uuid))
                return false;
        memcpy(d->uuid, gpu.uuid, sizeof(d->uuid));
        d->size_bytes = gpu.bytes_total;
        d->headroom_bytes = config_default_headroom(gpu.bytes_total);
        note->bytes_free = gpu.bytes_free;
        note->lacks_fd = gpu.lacks_fd;
        note->lacks_ipc = gpu.lacks_ipc;
        note->is_seen = true;
        return true;
}

/* ---- what only the whole config shows ------------------------------------- */

static bool succeeds(const struct config_reader *r)
{
        const struct config_machine *m = r->machine;

        return m->succeeds && m->succeeds(r->c->admin_socket.path);
}

/* The memory that bfcd allocates before the first client connects must be free. */
static void check_free(struct config_reader *r, size_t device)
{
        const struct device_note *note = &r->devices[device];
        const char *id = r->c->devices[device].id;
        uint64_t need = 0;

        for (size_t i = 0; i < r->c->n_partitions; i++) {
                const struct config_partition *p = &r->c->partitions[i];
                const struct partition_note *sums = &r->partitions[i];

                if (p->device == device)
                        need += p->growth == CONFIG_GROWTH_PREALLOCATE ? sums->sum_of_limits
                                                                       : sums->sum_of_reserves;
        }
        if (need <= note->bytes_free)
                return;
        if (r->machine->serves && !succeeds(r))
                config_fail_machine(
                        r, note->place.at[DEVICE_ID],
                        "device '%s' has %lluMiB free now; its guarantees and preallocating partitions need %s: nvidia-smi lists the processes that use it",
                        id, MIB(note->bytes_free), SIZE(need));
        else
                config_warn(
                        r, note->place.at[DEVICE_ID],
                        "device '%s' has %lluMiB free now; its guarantees and preallocating partitions need %s %s",
                        id, MIB(note->bytes_free), SIZE(need),
                        r->machine->serves ? "including memory kept from the previous daemon"
                                           : "when bfcd starts");
}

/* Of clients, beside bfcd's. */
static unsigned long long contexts_in(uint64_t n_bytes, uint64_t context_bytes)
{
        uint64_t n = n_bytes / context_bytes;

        return n > 0 ? n - 1 : 0;
}

/* A headroom that is larger than the device is of no use. */
static const char *advise_on_contexts(const struct config_device *d, uint64_t n,
                                      char ret[static ADVICE_BYTES])
{
        uint64_t n_bytes = (n + 1) * CONTEXT_BYTES_MAX;

        if (n_bytes >= d->size_bytes)
                return "lower max_sessions to the processes that use the GPU at the same time";
        snprintf(ret, ADVICE_BYTES, "write headroom: %s, or lower max_sessions", SIZE(n_bytes));
        return ret;
}

/* Contexts are outside of all limits: too many of them take the memory that the limits promise. */
static void check_contexts(struct config_reader *r, size_t device)
{
        const struct config_device *d = &r->c->devices[device];
        const struct config_place *p = &r->devices[device].place;
        const struct yamltree_node *headroom = p->at[DEVICE_HEADROOM];
        char advice[ADVICE_BYTES];
        uint64_t n = 0;

        for (size_t i = 0; i < r->c->n_partitions; i++)
                if (r->c->partitions[i].device == device)
                        n += r->partitions[i].n_sessions;
        if (n > r->c->max_sessions)
                n = r->c->max_sessions;
        if (n == 0 || d->headroom_bytes >= (n + 1) * CONTEXT_BYTES_MAX)
                return;
        config_advise(
                r, headroom ? headroom : p->at[DEVICE_ID],
                "device '%s': max_sessions allows %llu processes; each of them, and bfcd itself, needs "
                "100MiB to 550MiB of GPU memory for its CUDA context, %s to %s in total; the headroom is "
                "%s, enough for %llu to %llu processes: %s",
                d->id, (unsigned long long)n, ABOUT((n + 1) * CONTEXT_BYTES_MIN),
                ABOUT((n + 1) * CONTEXT_BYTES_MAX), SIZE(d->headroom_bytes),
                contexts_in(d->headroom_bytes, CONTEXT_BYTES_MAX),
                contexts_in(d->headroom_bytes, CONTEXT_BYTES_MIN), advise_on_contexts(d, n, advice));
}

/* The signs of MPS are the machine's: they do not show for which GPUs it runs. */
static void check_mps(struct config_reader *r, size_t device)
{
        const struct config_device *d = &r->c->devices[device];

        for (size_t i = 0; d->mps == CONFIG_MPS_REFUSE && i < r->c->n_devices; i++) {
                const struct config_device *other = &r->c->devices[i];

                if (other->mps == CONFIG_MPS_REFUSE)
                        continue;
                config_advise(
                        r, config_at(&r->devices[device].place, DEVICE_MPS),
                        "device '%s' refuses MPS and device '%s' allows it, but bfcd cannot see for which "
                        "GPUs MPS runs: start its control daemon with CUDA_VISIBLE_DEVICES set to the GPUs "
                        "that allow it",
                        d->id, other->id);
                return;
        }
}

/* false: reported. */
static bool check_can_share(struct config_reader *r, size_t partition)
{
        const struct config_partition *p = &r->c->partitions[partition];
        const struct device_note *note = &r->devices[p->device];
        const struct yamltree_node *at = config_at(&r->partitions[partition].place, PARTITION_SHARE);
        const char *id = r->c->devices[p->device].id;

        if (note->lacks_fd && note->lacks_ipc)
                return config_fail(r, at, "device '%s' supports neither share: fd nor share: cuda-ipc", id);
        if (p->share == CONFIG_SHARE_FD && note->lacks_fd)
                return config_fail(r, at,
                                   "device '%s' does not support share: fd (no virtual memory management); "
                                   "write share: cuda-ipc",
                                   id);
        if (p->share == CONFIG_SHARE_CUDA_IPC && note->lacks_ipc)
                return config_fail(r, at, "device '%s' does not support share: cuda-ipc; write share: fd",
                                   id);
        return true;
}

/* All of the tenant's processes are of the user that this process runs as. */
static bool runs_as_us(const struct config *c, size_t tenant)
{
        const struct config_tenant *t = &c->tenants[tenant];

        if ((size_t)c->default_tenant == tenant || t->n_gids > 0 || t->n_uids == 0)
                return false;
        for (size_t i = 0; i < t->n_uids; i++)
                if (t->uids[i] != geteuid())
                        return false;
        return true;
}

static bool has_quota_in(const struct config_tenant *t, size_t partition)
{
        for (size_t i = 0; i < t->n_quotas; i++)
                if (t->quotas[i].partition == partition)
                        return true;
        return false;
}

/* The driver does not document whether other users can open an IPC handle. */
static void check_users(struct config_reader *r, size_t partition)
{
        const struct config_partition *p = &r->c->partitions[partition];

        for (size_t i = 0; p->share == CONFIG_SHARE_CUDA_IPC && i < r->c->n_tenants; i++) {
                if (!has_quota_in(&r->c->tenants[i], partition) || runs_as_us(r->c, i))
                        continue;
                config_advise(
                        r, config_at(&r->partitions[partition].place, PARTITION_SHARE),
                        "partition '%s' has share: cuda-ipc, and tenant '%s' has users other than uid %u, "
                        "which runs this check: the driver may refuse the CUDA IPC handles of bfcd's user "
                        "to other users; use share: fd for other users and for containers",
                        p->name, r->c->tenants[i].name, (unsigned)geteuid());
                return; /* one warning is enough */
        }
}

/* The default works with most libraries. A config that does not choose it gets a warning of its cost. */
static void check_share(struct config_reader *r, size_t partition)
{
        const struct config_partition *p = &r->c->partitions[partition];

        if (p->share == CONFIG_SHARE_CUDA_IPC && !r->partitions[partition].place.at[PARTITION_SHARE])
                config_advise(
                        r, r->partitions[partition].place.node,
                        "partition '%s' has the default, share: cuda-ipc: a block cannot span two "
                        "extents, so a large request can fail although several extents have free memory, "
                        "and clients in a container need the host's PID namespace; share: fd has neither "
                        "restriction, but provides no cudaIpcMemHandle_t; write the intended share "
                        "explicitly",
                        p->name);
}

void config_check_gpus(struct config_reader *r)
{
        if (r->has_failed || r->lacks_gpu)
                return;
        for (size_t i = 0; i < r->c->n_devices; i++) {
                if (!r->devices[i].is_seen)
                        continue;
                check_free(r, i);
                check_contexts(r, i);
                check_mps(r, i);
        }
        for (size_t i = 0; i < r->c->n_partitions; i++)
                if (check_can_share(r, i)) {
                        check_share(r, i);
                        check_users(r, i);
                }
}
