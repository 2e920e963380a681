/* bfcctl driver-limits: the driver's own limits of leases that are for a control group.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The driver enforces them (from r615 on), also for what no program charges. Only root may set them, so bfcd does not: this
 * program asks the daemon and NVML. What bfcd lends is the keeper's at the driver and not the control group's, so the driver's
 * limit is for what processes take by themselves. A lease of a user is left out: another one of the same group could lift
 * the operator's limit. */
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/command.h"
#include "ctl/show.h"
#include "ctl/table.h"
#include "ctl/text.h"
#include "device/nvml.h"

#define CGROUPS    "/sys/fs/cgroup"
#define PATH_BYTES 4096u

struct limit {
        char uuid[TABLE_TEXT_MAX], folder[PATH_BYTES];
        const char *device; /* of the look */
        uint64_t n_bytes;   /* the sum of the leases */
        bool is_set;
};

struct limits {
        struct limit *list;
        size_t n;
};

static struct limits before; /* of the last look, with --watch */
static struct nvml *nvml;

static struct limit *find(const struct limits *all, const char *uuid, const char *folder)
{
        for (size_t i = 0; i < all->n; i++)
                if (strcmp(all->list[i].uuid, uuid) == 0 && strcmp(all->list[i].folder, folder) == 0)
                        return &all->list[i];
        return NULL;
}

/* NULL: the partition is not on a GPU. */
static const Bfcd__DeviceRow *device_of(const struct list *l, const char *partition,
                                        char ret_uuid[static TABLE_TEXT_MAX])
{
        *ret_uuid = '\0';
        for (size_t i = 0; i < l->n_partitions; i++)
                for (size_t k = 0; strcmp(l->partitions[i]->name, partition) == 0 && k < l->status->n_devices;
                     k++)
                        if (strcmp(l->status->devices[k]->id, l->partitions[i]->device) == 0) {
                                show_device_uuid(l->status->devices[k], ret_uuid);
                                return *ret_uuid ? l->status->devices[k] : NULL;
                        }
        return NULL;
}

static bool has_one(const Bfcd__LeaseRow *row)
{
        return row->stats && strcmp(row->match_kind, "cgroup") == 0 && strcmp(row->made_by, "user") != 0 &&
               row->match[0] == '/' && !strstr(row->match, "/..") &&
               strlen(row->match) < PATH_BYTES - sizeof(CGROUPS);
}

static int collect(const struct list *l, struct limits *ret)
{
        ret->list = calloc(l->n_leases + 1, sizeof(*ret->list));
        for (size_t i = 0; ret->list && i < l->n_leases; i++) {
                struct limit *next = &ret->list[ret->n], *same;
                const Bfcd__LeaseRow *row = l->leases[i];
                const Bfcd__DeviceRow *device = device_of(l, row->partition, next->uuid);

                if (!device || !has_one(row))
                        continue;
                snprintf(next->folder, sizeof(next->folder), CGROUPS "%s", row->match);
                same = find(ret, next->uuid, next->folder);
                if (!same) {
                        same = next;
                        same->device = device->id;
                        same->n_bytes = 0;
                        ret->n++;
                }
                if (__builtin_add_overflow(same->n_bytes, row->stats->bytes_limit, &same->n_bytes))
                        same->n_bytes = UINT64_MAX;
        }
        return ret->list ? 0 : -ENOMEM;
}

static const char *why(int error)
{
        if (error == -EPERM)
                return "only root may set the driver's limits: use sudo";
        if (error == -EOPNOTSUPP)
                return "this driver has no such limits (they need r615, control groups of version 2, and no MIG)";
        return error == -ENOENT ? "NVML finds no such GPU or control group" : strerror(-error);
}

/* 0, also where one control group is not there: it may come. */
static int set(struct limit *limit, const struct limit *was)
{
        int r = was && was->is_set && was->n_bytes == limit->n_bytes
                        ? 0
                        : nvml_limit(nvml, limit->uuid, limit->folder, limit->n_bytes);
        char text[TEXT_MAX];

        limit->is_set = r == 0;
        if (r == 0 && !(was && was->is_set && was->n_bytes == limit->n_bytes))
                printf("%s %s: %s\n", limit->device, limit->folder, text_size(limit->n_bytes, text));
        if (r < 0 && (r != -ENOENT || !was || was->is_set))
                fprintf(stderr, "bfcctl: The limit of %s on %s cannot be set: %s.\n", limit->folder,
                        limit->device, why(r));
        return r == -ENOENT ? 0 : r;
}

/* Leases that have ended. The driver has forgotten those whose control group is gone. */
static void lift(const struct limits *now)
{
        for (size_t i = 0; i < before.n; i++) {
                const struct limit *was = &before.list[i];

                if (was->is_set && !find(now, was->uuid, was->folder) &&
                    nvml_limit(nvml, was->uuid, was->folder, UINT64_MAX) == 0)
                        printf("%s: no limit\n", was->folder);
        }
}

int run_driver_limits(struct ask *a, const struct invocation *i, const struct command *c)
{
        static const Bfcd__List__Kind kinds[] = { BFCD__LIST__KIND__STATUS, BFCD__LIST__KIND__PARTITIONS,
                                                  BFCD__LIST__KIND__LEASES };
        struct limits now = { 0 };
        struct list *l;
        int r = 0;

        (void)i, (void)c;
        if (!nvml && nvml_open(&nvml) < 0) {
                fprintf(stderr,
                        "bfcctl: NVML (libnvidia-ml.so.1) cannot be used: is there a driver of NVIDIA?\n");
                return EXIT_REFUSED;
        }
        if (ask_lists(a, kinds, sizeof(kinds) / sizeof(kinds[0]), &l) < 0)
                return command_complain(a);
        if (collect(l, &now) < 0)
                return command_finish(-ENOMEM);
        for (size_t k = 0; r == 0 && k < now.n; k++)
                r = set(&now.list[k], find(&before, now.list[k].uuid, now.list[k].folder));
        lift(&now);
        list_free(l);
        free(before.list);
        before = now;
        fflush(stdout);
        return r < 0 ? EXIT_REFUSED : EXIT_SUCCESS;
}
