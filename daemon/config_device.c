/* SPDX-License-Identifier: Apache-2.0 */
/* Devices and partitions: the grammar below the key `devices`, and what is
 * summed over a device or a partition. See config_reader.h. */
#include "daemon/config_gpu.h"
#include "daemon/config_reader.h"
#include "daemon/config_value.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#define MAX_PARTITIONS      256
#define CONFIG_MAX_NODE     1023
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

static struct config_partition *add_partition(struct config_reader *r, const char *name, size_t device)
{
        size_t n = r->c->n_partitions;
        struct config_partition *p;

        if (!config_grow(r, (void **)&r->partitions, n, sizeof(r->partitions[0])))
                return NULL;
        p = config_grow(r, (void **)&r->c->partitions, n, sizeof(*p));
        if (!p)
                return NULL;
        p->name = config_copy_text(r, name);
        p->device = device;
        if (!p->name)
                return NULL;
        r->c->n_partitions++;
        return p;
}

/* What the partitions of a device share. */
struct device_state {
        size_t index;
        enum device_kind kind;
        uint64_t room; /* size - headroom */
        bool room_known;
        uint64_t sum_of_limits;
        const struct yamltree_node *limit_too_much; /* the first there is no room for */
};

static void read_growth_and_share(struct config_reader *r, const struct device_state *d,
                                  struct config_partition *p, const struct yamltree_node *growth,
                                  const struct yamltree_node *share)
{
        int word;

        if (growth) {
                word = config_read_word(r, growth, "growth", "on-demand", "preallocate");
                if (word == 1)
                        p->growth = CONFIG_GROWTH_PREALLOCATE;
        }
        p->share = d->kind >= DEVICE_KIND_GPU ? CONFIG_SHARE_CUDA_IPC : CONFIG_SHARE_FD;
        if (!share)
                return;
        word = config_read_word(r, share, "share", "fd", "cuda-ipc");
        if (word == 1 && d->kind == DEVICE_KIND_HOST)
                config_fail(r, share, "share cuda-ipc is not for the host device; write fd");
        else if (word >= 0)
                p->share = word == 1 ? CONFIG_SHARE_CUDA_IPC : CONFIG_SHARE_FD;
}

static void read_clears(struct config_reader *r, const struct device_state *d, struct config_partition *p,
                        const struct yamltree_node *n)
{
        p->clears = n && config_read_word(r, n, "clear_on_release", "false", "true") == 1;
        if (p->clears && d->kind == DEVICE_KIND_HOST)
                config_fail(r, n, "clear_on_release is only for GPUs; the kernel always clears host memory");
}

const char *config_pages_name(enum config_pages pages)
{
        return pages == CONFIG_PAGES_AUTO ? "auto" : pages == CONFIG_PAGES_2MIB ? "2MiB" : "off";
}

static void read_pages(struct config_reader *r, const struct device_state *d, struct config_partition *p,
                       const struct yamltree_node *pages, const struct yamltree_node *numa)
{
        uint64_t node = 0;

        if (pages && d->kind >= DEVICE_KIND_GPU)
                config_fail(r, pages, "huge_pages is only for the host device");
        else if (pages && config_want(r, pages, YAMLTREE_SCALAR, "huge_pages")) {
                while (p->pages <= CONFIG_PAGES_OFF && !config_is_text(pages, config_pages_name(p->pages)))
                        p->pages++;
                if (p->pages > CONFIG_PAGES_OFF) {
                        p->pages = CONFIG_PAGES_AUTO;
                        config_fail(r, pages, "huge_pages '%s' is not known; write auto, 2MiB or off",
                                    SHOW(pages));
                }
        }
        if (numa && d->kind >= DEVICE_KIND_GPU) {
                config_fail(r, numa, "numa_node is only for the host device");
        } else if (numa) {
                p->has_node = config_read_number(r, numa, "numa_node", 0, CONFIG_MAX_NODE, &node);
                p->node = (uint32_t)node;
        }
}

static void read_partition(struct config_reader *r, const struct yamltree_node *n, struct device_state *d)
{
        static const char *const known[] = { "name",       "limit",     "growth", "share", "clear_on_release",
                                             "huge_pages", "numa_node", NULL };
        struct size_rule rule = { .what = "limit",
                                  .whole_name = "the device's size minus its headroom",
                                  .whole = d->room,
                                  .whole_known = d->room_known };
        struct config_partition unnamed = { 0 };
        struct config_partition *p = &unnamed;
        const struct yamltree_node *v[CONFIG_MAX_KEYS];
        struct partition_note note = { 0 };
        const char *name = NULL;
        size_t index;

        if (!config_read_mapping(r, n, "a partition", known, v)) {
                r->lacks_partitions = true;
                return;
        }
        if (v[0])
                name = config_read_name(r, v[0], "name");
        else
                config_fail(r, n, "a partition lacks its name");
        if (!name)
                r->lacks_partitions = true;
        else if (config_find_partition(r->c, name, &index))
                config_fail(r, v[0],
                            "partition '%s' is defined twice; names must be unique across all devices", name);
        else if (r->c->n_partitions == MAX_PARTITIONS)
                config_fail(r, v[0], "more than %d partitions", MAX_PARTITIONS);
        else
                p = add_partition(r, name, d->index);
        if (!p)
                return;
        if (!v[1])
                config_fail(r, n, "a partition lacks its limit; write a size or a percentage of the device");
        else
                note.limit_known = config_read_size(r, v[1], &rule, &p->limit_bytes);
        read_growth_and_share(r, d, p, v[2], v[3]);
        read_clears(r, d, p, v[4]);
        read_pages(r, d, p, v[5], v[6]);
        note.node = n;
        note.growth = v[2] ? v[2] : n;
        note.clears = v[4] ? v[4] : n;
        note.pages = v[5] ? v[5] : n;
        note.numa = v[6] ? v[6] : n;
        note.share_said = v[3] != NULL;
        note.share = v[3] ? v[3] : n;
        if (note.limit_known && __builtin_add_overflow(d->sum_of_limits, p->limit_bytes, &d->sum_of_limits))
                d->sum_of_limits = UINT64_MAX;
        if (note.limit_known && d->sum_of_limits > d->room && !d->limit_too_much)
                d->limit_too_much = v[1];
        if (p != &unnamed)
                r->partitions[p - r->c->partitions] = note;
}

static void read_partitions(struct config_reader *r, const struct yamltree_node *n, struct device_state *d)
{
        if (!config_want(r, n, YAMLTREE_SEQUENCE, "partitions")) {
                r->lacks_partitions = true;
                return;
        }
        if (!n->first_child) {
                config_fail(r, n, "partitions is empty; a device needs at least one");
                r->lacks_partitions = true;
        }
        for (const struct yamltree_node *p = n->first_child; p; p = p->next)
                read_partition(r, p, d);
        if (!d->room_known || !d->limit_too_much)
                return;
        if (d->kind == DEVICE_KIND_HOST)
                config_fail(
                        r, d->limit_too_much,
                        "the partitions' limits sum to %s; the device has %s (its size minus its headroom)",
                        SIZE(d->sum_of_limits), SIZE(d->room));
        else
                config_fail(r, d->limit_too_much,
                            "the partitions' limits sum to %lluMiB; device '%s' has %lluMiB for "
                            "partitions (%lluMiB minus a headroom of %s)",
                            MIB(d->sum_of_limits), r->c->devices[d->index].id, MIB(d->room),
                            MIB(r->c->devices[d->index].size_bytes),
                            SIZE(r->c->devices[d->index].headroom_bytes));
}

/* ---- devices -------------------------------------------------------------- */

static void read_device_id(struct config_reader *r, const struct yamltree_node *n, struct device_state *d)
{
        struct config_device *device = &r->c->devices[d->index];
        enum device_kind kind = DEVICE_KIND_HOST;

        if (!config_want(r, n, YAMLTREE_SCALAR, "id"))
                return;
        r->devices[d->index].node = r->devices[d->index].headroom = n;
        if (!config_is_text(n, "host"))
                kind = config_read_gpu_id(r, n);
        d->kind = r->devices[d->index].kind = kind;
        if (kind == DEVICE_KIND_UNKNOWN)
                return;
        device->is_cuda = kind != DEVICE_KIND_HOST;
        for (size_t i = 0; i < d->index; i++) {
                if (r->c->devices[i].id && strcmp(r->c->devices[i].id, n->text) == 0) {
                        config_fail(r, n,
                                    "device '%s' is defined twice; list all its partitions in one entry",
                                    SHOW(n));
                        return;
                }
        }
        device->id = config_copy_text(r, n->text);
}

/* Swapping or the OOM killer would be the price, some time later. */
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

/* Host memory is charged to the daemon, which is killed for more than that. */
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

static void read_host_size(struct config_reader *r, const struct yamltree_node *n,
                           const struct yamltree_node *size_node, struct device_state *d)
{
        struct config_device *device = &r->c->devices[d->index];

        if (!size_node) {
                if (d->kind == DEVICE_KIND_HOST)
                        config_fail(r, n, "device 'host' lacks its size; write it as in size: 4GiB");
                return;
        }
        d->room_known =
                config_read_size(r, size_node, &(struct size_rule){ .what = "size" }, &device->size_bytes);
        if (d->room_known) {
                check_memory(r, size_node, device->size_bytes);
                check_group_limit(r, size_node, device->size_bytes);
        }
}

/* How much there is to share out. */
static void read_device_size(struct config_reader *r, const struct yamltree_node *n,
                             const struct yamltree_node *size_node, const struct yamltree_node *headroom_node,
                             struct device_state *d)
{
        struct config_device *device = &r->c->devices[d->index];

        if (d->kind < DEVICE_KIND_GPU) {
                read_host_size(r, n, size_node, d);
        } else {
                if (size_node)
                        config_fail(r, size_node,
                                    "size is only for the host device; the size of a GPU comes from its "
                                    "driver");
                d->room_known = device->id && config_look_at_gpu(r, d->index);
        }
        if (headroom_node) {
                r->devices[d->index].headroom = headroom_node;
                if (!config_read_size(r, headroom_node,
                                      &(struct size_rule){ .what = "headroom", .zero_allowed = true },
                                      &device->headroom_bytes))
                        d->room_known = false;
        }
        if (!d->room_known)
                return;
        d->room_known = device->headroom_bytes < device->size_bytes;
        if (d->room_known)
                d->room = (device->size_bytes - device->headroom_bytes) / CONFIG_GRANULARITY *
                          CONFIG_GRANULARITY;
        else if (d->kind >= DEVICE_KIND_GPU)
                config_fail(r, r->devices[d->index].headroom,
                            "headroom %s leaves no memory of device '%s', which has %lluMiB",
                            SIZE(device->headroom_bytes), device->id, MIB(device->size_bytes));
        else
                config_fail(r, headroom_node, "headroom %s leaves no memory of the device's size, %s",
                            SIZE(device->headroom_bytes), SIZE(device->size_bytes));
}

/* What takes it; at: of the key. */
static void check_standby(struct config_reader *r, const struct yamltree_node *at,
                          const struct device_state *d)
{
        const struct config_device *device = &r->c->devices[d->index];
        const struct config_partition *first = NULL;
        uint64_t sum = 0;

        for (size_t i = 0; i < r->c->n_partitions; i++) {
                const struct config_partition *p = &r->c->partitions[i];

                if (p->device != d->index || !config_takes_standby(p))
                        continue;
                if (first &&
                    (p->pages != first->pages || p->has_node != first->has_node || p->node != first->node))
                        config_fail(
                                r, at,
                                "standby needs partitions with the same huge_pages and numa_node; those of "
                                "'%s' and '%s' differ",
                                first->name, p->name);
                first = first ? first : p;
                if (!r->partitions[i].limit_known || __builtin_add_overflow(sum, p->limit_bytes, &sum))
                        sum = UINT64_MAX;
        }
        if (!first)
                config_fail(r, at,
                            "standby has no effect on this device: it is for partitions with share: fd and "
                            "growth: on-demand");
        else if (device->standby_bytes > sum)
                config_fail(r, at, "standby %s is more than the limits of the partitions that take it, %s",
                            SIZE(device->standby_bytes), SIZE(sum));
}

static void read_standby(struct config_reader *r, const struct yamltree_node *n, const struct device_state *d)
{
        struct size_rule rule = { .what = "standby", .zero_allowed = true };
        struct config_device *device = &r->c->devices[d->index];

        if (!n || !config_read_size(r, n, &rule, &device->standby_bytes) || device->standby_bytes == 0)
                return;
        if (d->room_known && device->standby_bytes > d->room)
                config_fail(r, n, "standby %s is more than the device has for partitions, %s",
                            SIZE(device->standby_bytes), SIZE(d->room));
        else if (!r->lacks_partitions)
                check_standby(r, n, d);
}

static void read_device(struct config_reader *r, const struct yamltree_node *n)
{
        static const char *const known[] = { "id", "size", "headroom", "partitions", "standby", NULL };
        const struct yamltree_node *v[CONFIG_MAX_KEYS];
        struct device_state d = { .index = r->c->n_devices };

        if (!config_read_mapping(r, n, "a device", known, v)) {
                r->lacks_partitions = true;
                return;
        }
        if (!config_grow(r, (void **)&r->c->devices, d.index, sizeof(r->c->devices[0])) ||
            !config_grow(r, (void **)&r->devices, d.index, sizeof(r->devices[0])))
                return;
        r->c->n_devices++;
        if (v[0])
                read_device_id(r, v[0], &d);
        else
                config_fail(r, n, "a device lacks its id; write host, cuda:N, GPU-UUID or MIG-UUID");
        read_device_size(r, n, v[1], v[2], &d);
        if (v[3]) {
                read_partitions(r, v[3], &d);
        } else {
                config_fail(r, n, "a device lacks its partitions; it needs at least one");
                r->lacks_partitions = true;
        }
        read_standby(r, v[4], &d);
}

void config_read_devices(struct config_reader *r, const struct yamltree_node *root,
                         const struct yamltree_node *n)
{
        if (!n) {
                config_fail(r, root, "the key 'devices' is missing");
                r->lacks_partitions = true;
                return;
        }
        if (!config_want(r, n, YAMLTREE_SEQUENCE, "devices")) {
                r->lacks_partitions = true;
                return;
        }
        if (!n->first_child) {
                config_fail(r, n, "devices is empty; there must be at least one");
                r->lacks_partitions = true;
        }
        for (const struct yamltree_node *d = n->first_child; d; d = d->next)
                read_device(r, d);
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
                if (p->growth == CONFIG_GROWTH_PREALLOCATE && note->limit_known &&
                    note->sum_of_limits > p->limit_bytes)
                        config_fail(r, note->growth,
                                    "partition '%s': preallocate allocates each tenant's limit at the "
                                    "start, but the quotas' limits sum to %s and the partition's limit is "
                                    "%s",
                                    p->name, SIZE(note->sum_of_limits), SIZE(p->limit_bytes));
        }
}

/* All that is to be made of the same pages, on the same node. */
static uint64_t bytes_alike(const struct config *c, const struct config_partition *p)
{
        uint64_t sum = 0;

        for (size_t i = 0; i < c->n_partitions; i++) {
                const struct config_partition *q = &c->partitions[i];

                if (q->device == p->device && q->pages == p->pages && q->has_node == p->has_node &&
                    q->node == p->node && __builtin_add_overflow(sum, q->limit_bytes, &sum))
                        return UINT64_MAX;
        }
        return sum;
}

/* A daemon that runs has looked. */
void config_check_pages(struct config_reader *r)
{
        for (size_t i = 0; i < r->c->n_partitions; i++) {
                const struct config_partition *p = &r->c->partitions[i];
                const struct partition_note *note = &r->partitions[i];
                const char *name = p->name;
                char clause[CONFIG_CLAUSE_BYTES];
                int lack;

                if (!r->machine || !r->machine->look_pages || r->machine->running ||
                    r->devices[p->device].kind != DEVICE_KIND_HOST || !note->limit_known)
                        continue;
                lack = r->machine->look_pages(p, bytes_alike(r->c, p), clause, sizeof(clause));
                if (lack == -ENODEV)
                        config_fail_machine(r, note->numa, "partition '%s': %s", name, clause);
                else if (lack < 0 && p->pages == CONFIG_PAGES_2MIB)
                        config_warn(r, note->pages, "partition '%s': %s", name, clause);
                else if (lack < 0)
                        config_advise(r, note->pages, "partition '%s': %s", name, clause);
        }
}
