/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/config/reader.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Devices and partitions: their special keys, and checks of sums over a device or a partition. */

#define MAX_PARTITIONS      256
#define CONFIG_CLAUSE_BYTES 256

/* ---- partitions ----------------------------------------------------------- */

struct config_partition *config_find_partition(const struct config *c, const char *name, size_t *ret_index)
{
        for (size_t i = 0; i < c->n_partitions; i++) {
                if (strcmp(c->partitions[i].name, name) == 0) {
                        *ret_index = i;
                        return &c->partitions[i];
                }
        }
        return NULL;
}

static void count_limit(struct device_note *d, const struct config_place *place, uint64_t limit_bytes)
{
        if (__builtin_add_overflow(d->sum_of_limits, limit_bytes, &d->sum_of_limits))
                d->sum_of_limits = UINT64_MAX;
        if (d->sum_of_limits > d->room_bytes && !d->limit_too_much)
                d->limit_too_much = place->at[PARTITION_LIMIT];
}

bool config_read_partition(struct config_reader *r, const struct yamltree_node *n, struct config_place *in)
{
        struct device_note *d = (struct device_note *)in;
        struct config_partition p = { .device = (size_t)(d - r->devices) };
        struct partition_note note = { .place = config_place(&CONFIG_PARTITION, n, &p) };
        struct config_place *place = &note.place;
        size_t index, n_notes = r->c->n_partitions;
        bool has_name, is_kept = false;

        place->kind = in->kind;
        place->whole_bytes = d->room_bytes;
        place->whole_known = d->room_known;
        p.share = in->kind == DEVICE_KIND_GPU ? CONFIG_SHARE_CUDA_IPC : CONFIG_SHARE_FD;
        if (!config_read_section(r, place))
                return false;
        p.has_node = config_knows(place, PARTITION_NODE);
        has_name = config_knows(place, PARTITION_NAME);
        if (has_name && config_find_partition(r->c, p.name, &index))
                config_fail(
                        r, place->at[PARTITION_NAME],
                        "partition '%s' is defined twice, first %s; names must be unique across all devices",
                        p.name, FIRST(r->partitions[index].place.at[PARTITION_NAME], n));
        else if (has_name && n_notes == MAX_PARTITIONS)
                config_fail(r, place->at[PARTITION_NAME], "more than %d partitions", MAX_PARTITIONS);
        else if (has_name)
                is_kept = config_append(r, (void **)&r->partitions, &n_notes, &note, sizeof(note)) &&
                          config_append(r, (void **)&r->c->partitions, &r->c->n_partitions, &p, sizeof(p));
        if (config_knows(place, PARTITION_LIMIT))
                count_limit(d, place, p.limit_bytes);
        if (!is_kept)
                free(p.name);
        return has_name;
}

/* ---- devices -------------------------------------------------------------- */

static size_t index_of(const struct config_reader *r, const struct config_place *p)
{
        return (size_t)((const struct device_note *)p - r->devices);
}

bool config_read_device_id(struct config_reader *r, struct config_place *p, const struct config_field *field,
                           const struct yamltree_node *n)
{
        struct config_device *device = p->object;
        size_t index = index_of(r, p);

        if (!n || !config_want(r, n, YAMLTREE_SCALAR, field->key))
                return false;
        if (config_is_text(n, "host"))
                p->kind = DEVICE_KIND_HOST;
        else if (!config_read_gpu_id(r, n, &p->kind))
                return false;
        device->is_cuda = p->kind != DEVICE_KIND_HOST;
        for (size_t i = 0; i < index; i++) {
                if (r->c->devices[i].id && strcmp(r->c->devices[i].id, n->text) == 0)
                        return config_fail(
                                r, n,
                                "device '%s' is defined twice, first %s; list all its partitions in one entry",
                                SHOW(n), FIRST(r->devices[i].place.at[DEVICE_ID], n));
        }
        device->id = config_copy_text(r, n->text);
        return device->id != NULL;
}

/* Also of GPUs that are read later. */
static bool some_gpu_allows_mps(const struct config_reader *r)
{
        for (const struct yamltree_node *d = r->top.at[TOP_DEVICES]->first_child; d; d = d->next)
                for (const struct yamltree_node *key = d->first_child; d->type == YAMLTREE_MAPPING && key;
                     key = key->next->next)
                        if (config_is_text(key, CONFIG_DEVICE.fields[DEVICE_MPS].key) &&
                            config_is_text(key->next,
                                           CONFIG_DEVICE.fields[DEVICE_MPS].words[CONFIG_MPS_ALLOW]))
                                return true;
        return false;
}

/* Looks at the GPU, because what is configured here decides whether it can be opened. */
bool config_read_device_mps(struct config_reader *r, struct config_place *p, const struct config_field *field,
                            const struct yamltree_node *n)
{
        const struct config_device *device = p->object;

        if (n && p->kind == DEVICE_KIND_HOST)
                return config_fail(r, n, "mps is only for GPUs");
        if (n && !config_read_value(r, p, field, n))
                return false;
        if (!device->id || !device->is_cuda)
                return n != NULL;
        if (r->machine && !r->machine->running && r->machine->allow_mps && some_gpu_allows_mps(r))
                r->machine->allow_mps();
        r->devices[index_of(r, p)].room_known = config_look_at_gpu(r, index_of(r, p));
        return n != NULL;
}

/* A size, or one of two words. */
bool config_read_device_contexts(struct config_reader *r, struct config_place *p,
                                 const struct config_field *field, const struct yamltree_node *n)
{
        struct config_device *device = p->object;

        if (!n)
                return false;
        if (p->kind == DEVICE_KIND_HOST)
                return config_fail(r, n, "contexts is only for GPUs");
        if (config_is_text(n, "measured") || config_is_text(n, "off")) {
                device->context_bytes = config_is_text(n, "off") ? CONFIG_NO_CONTEXTS : 0;
                return true;
        }
        if (n->type == YAMLTREE_SCALAR && (n->text[0] < '0' || n->text[0] > '9'))
                return config_fail(r, n,
                                   "contexts '%s' is not known; write measured, off or a size, as in 512MiB",
                                   SHOW(n));
        return config_read_value(r, p, field, n);
}

/* More than the machine has would later cause swapping or wake the OOM killer. */
static void check_memory(struct config_reader *r, const struct yamltree_node *n, uint64_t size_bytes)
{
        long n_pages = sysconf(_SC_PHYS_PAGES);
        long page_bytes = sysconf(_SC_PAGESIZE);
        uint64_t memory_bytes;

        if (n_pages <= 0 || page_bytes <= 0)
                return;
        memory_bytes = (uint64_t)n_pages * (uint64_t)page_bytes;
        if (size_bytes > memory_bytes)
                config_warn(r, n, "size %s is more than this machine's memory, %lluMiB", SHOW(n),
                            (unsigned long long)(memory_bytes >> 20));
}

/* Host memory is charged to the daemon, which the kernel kills above this limit. */
static void check_group_limit(struct config_reader *r, const struct yamltree_node *n, uint64_t size_bytes)
{
        uint64_t limit_bytes = r->machine ? r->machine->group_limit_bytes : 0;

        if (limit_bytes > 0 && size_bytes > limit_bytes)
                config_warn(r, n,
                            "size %s is more than the memory limit of the daemon's control group or a parent "
                            "of it, %lluMiB: growth beyond that is refused; raise MemoryMax= and MemoryHigh= "
                            "of the service",
                            SHOW(n), (unsigned long long)(limit_bytes >> 20));
}

/* The bytes that all partitions of a device have together. */
static void find_room(struct config_reader *r, struct device_note *d)
{
        const struct config_place *p = &d->place;
        const struct config_device *device = p->object;
        const struct yamltree_node *size = p->at[DEVICE_SIZE], *headroom = p->at[DEVICE_HEADROOM];
        uint64_t all = device->size_bytes, kept = device->headroom_bytes;

        if (!size && p->kind == DEVICE_KIND_HOST)
                config_fail(r, p->node, "device 'host' lacks its size; write it as in size: 4GiB");
        if (config_knows(p, DEVICE_SIZE)) {
                check_memory(r, size, all);
                check_group_limit(r, size, all);
                d->room_known = true;
        }
        if (headroom && !config_knows(p, DEVICE_HEADROOM))
                d->room_known = false;
        if (!d->room_known)
                return;
        d->room_known = kept < all;
        if (d->room_known)
                d->room_bytes = (all - kept) / CONFIG_GRANULARITY * CONFIG_GRANULARITY;
        else if (p->kind == DEVICE_KIND_GPU)
                config_fail(r, headroom ? headroom : p->at[DEVICE_ID],
                            "headroom %s leaves no memory of device '%s', which has %lluMiB", SIZE(kept),
                            device->id, MIB(all));
        else
                config_fail(r, headroom, "headroom %s leaves no memory of the device's size, %s", SIZE(kept),
                            SIZE(all));
}

bool config_read_partitions(struct config_reader *r, struct config_place *p, const struct config_field *field,
                            const struct yamltree_node *n)
{
        struct device_note *d = (struct device_note *)p;
        const struct config_device *device = p->object;
        bool all;

        find_room(r, d);
        all = config_read_list(r, p, field, n);
        if (d->room_known && d->limit_too_much && p->kind == DEVICE_KIND_HOST)
                config_fail(
                        r, d->limit_too_much,
                        "the partitions' limits sum to %s; the device has %s (its size minus its headroom)",
                        SIZE(d->sum_of_limits), SIZE(d->room_bytes));
        else if (d->room_known && d->limit_too_much)
                config_fail(r, d->limit_too_much,
                            "the partitions' limits sum to %lluMiB; device '%s' has %lluMiB for "
                            "partitions (%lluMiB minus a headroom of %s)",
                            MIB(d->sum_of_limits), device->id, MIB(d->room_bytes), MIB(device->size_bytes),
                            SIZE(device->headroom_bytes));
        return all;
}

/* The partitions that standby memory is for. */
static void check_takers(struct config_reader *r, const struct yamltree_node *at, size_t index)
{
        uint64_t standby_bytes = r->c->devices[index].standby_bytes, sum = 0;
        const struct config_partition *first = NULL;

        for (size_t i = 0; i < r->c->n_partitions; i++) {
                const struct config_partition *p = &r->c->partitions[i];

                if (p->device != index || !config_takes_standby(p))
                        continue;
                if (first && (p->has_node != first->has_node || p->node != first->node))
                        config_fail(r, at,
                                    "standby needs partitions with the same numa_node; those of "
                                    "'%s' and '%s' differ",
                                    first->name, p->name);
                first = first ? first : p;
                if (!config_knows(&r->partitions[i].place, PARTITION_LIMIT) ||
                    __builtin_add_overflow(sum, p->limit_bytes, &sum))
                        sum = UINT64_MAX;
        }
        if (!first)
                config_fail(r, at,
                            "standby has no effect on this device: it is for partitions with share: fd and "
                            "growth: on-demand");
        else if (standby_bytes > sum)
                config_fail(r, at, "standby %s is more than the limits of the partitions that take it, %s",
                            SIZE(standby_bytes), SIZE(sum));
}

bool config_read_device(struct config_reader *r, const struct yamltree_node *n, struct config_place *in)
{
        size_t index = r->c->n_devices, n_notes = index;
        const struct device_note empty = { .place = config_place(&CONFIG_DEVICE, n, NULL) };
        const struct yamltree_node *standby;
        struct config_device *device;
        struct device_note *d;

        (void)in;
        if (!config_append(r, (void **)&r->devices, &n_notes, &empty, sizeof(empty)) ||
            !config_append(r, (void **)&r->c->devices, &r->c->n_devices, &(struct config_device){ 0 },
                           sizeof(*device)))
                return false;
        d = &r->devices[index];
        d->place.object = device = &r->c->devices[index];
        if (!config_read_section(r, &d->place)) {
                r->c->n_devices--;
                return false;
        }
        standby = d->place.at[DEVICE_STANDBY];
        if (device->standby_bytes > 0 && d->room_known && device->standby_bytes > d->room_bytes)
                config_fail(r, standby, "standby %s is more than the device has for partitions, %s",
                            SIZE(device->standby_bytes), SIZE(d->room_bytes));
        else if (device->standby_bytes > 0 && !r->lacks_partitions)
                check_takers(r, standby, index);
        return true;
}

/* ---- what is summed over all ---------------------------------------------- */

void config_check_partition_sums(struct config_reader *r)
{
        for (size_t i = 0; i < r->c->n_partitions; i++) {
                const struct config_partition *p = &r->c->partitions[i];
                const struct partition_note *note = &r->partitions[i];

                if (note->reserve_too_much)
                        config_fail(r, note->reserve_too_much,
                                    "the guarantees (reserve) in partition '%s' sum to %s; its limit is %s",
                                    p->name, SIZE(note->sum_of_reserves), SIZE(p->limit_bytes));
                if (p->growth == CONFIG_GROWTH_PREALLOCATE && config_knows(&note->place, PARTITION_LIMIT) &&
                    note->sum_of_limits > p->limit_bytes)
                        config_fail(r, config_at(&note->place, PARTITION_GROWTH),
                                    "partition '%s': preallocate allocates each tenant's limit at the "
                                    "start, but the quotas' limits sum to %s and the partition's limit is "
                                    "%s",
                                    p->name, SIZE(note->sum_of_limits), SIZE(p->limit_bytes));
        }
}

/* Not at a reload, which cannot change it. */
void config_check_pinned(struct config_reader *r)
{
        if (r->machine && r->machine->running)
                return;
        for (size_t i = 0; i < r->c->n_devices; i++)
                if (r->devices[i].place.kind != DEVICE_KIND_HOST)
                        return;
        for (size_t i = 0; i < r->c->n_partitions; i++)
                if (r->c->partitions[i].is_pinned)
                        config_warn(
                                r, config_at(&r->partitions[i].place, PARTITION_PINNED),
                                "partition '%s' is pinned, but no GPU is configured: only clients that use "
                                "CUDA register its memory; add a GPU to 'devices', or remove pinned",
                                r->c->partitions[i].name);
}

/* Not at a reload: the daemon looked when it started. */
void config_check_pages(struct config_reader *r)
{
        for (size_t i = 0; i < r->c->n_partitions; i++) {
                const struct config_partition *p = &r->c->partitions[i];
                const struct partition_note *note = &r->partitions[i];
                const char *name = p->name;
                char clause[CONFIG_CLAUSE_BYTES];
                int lack;

                if (!r->machine || !r->machine->look_pages || r->machine->running ||
                    r->devices[p->device].place.kind != DEVICE_KIND_HOST ||
                    !config_knows(&note->place, PARTITION_LIMIT))
                        continue;
                lack = r->machine->look_pages(p, clause, sizeof(clause));
                if (lack == -ENODEV)
                        config_fail_machine(r, config_at(&note->place, PARTITION_NODE), "partition '%s': %s",
                                            name, clause);
                else if (lack < 0)
                        config_advise(r, note->place.node, "partition '%s': %s", name, clause);
        }
}

/* ---- GPUs ---------------------------------------------------------------- */

/* GPUs in a config: their ids, what the machine reports of them, and the cost of sharing one. On a machine
 * without the GPU only its id is reported: checks that need the GPU are left out. */

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
