/* SPDX-License-Identifier: Apache-2.0 */
/* Devices and partitions: their special keys, and checks of sums over a device or a partition. */
#include "daemon/config/reader.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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
