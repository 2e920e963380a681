/* bfcctl driver-limits: the driver's own limits of leases that are for a control group.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The driver enforces them (from r615 on), also for what no program charges. Only root may set them, so bfcd does not: this
 * program asks the daemon and NVML. What bfcd lends is the keeper's at the driver and not the control group's, so the driver's
 * limit is for what processes take by themselves. A lease of a user is left out: another one of the same group could lift
 * the operator's limit. */
#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/command.h"
#include "ctl/process.h"
#include "ctl/show.h"
#include "ctl/table.h"
#include "ctl/text.h"
#include "device/nvml.h"

#define CGROUPS    "/sys/fs/cgroup"
#define PATH_BYTES 4096u

struct limit {
        char uuid[TABLE_TEXT_MAX], folder[PATH_BYTES];
        const char *device;      /* of the look */
        uint64_t n_bytes, n_set; /* the sum of the leases, and what the driver has, if is_set */
        bool is_set;
        int error; /* of the last call */
};

struct limits {
        struct limit *list;
        size_t n;
};

static struct limits before; /* of the last look, with --watch */
static struct nvml *nvml;
static bool is_silent; /* the daemon does not answer, which was said */

/* Users choose names of control groups. */
static void __attribute__((format(printf, 2, 3))) say(FILE *out, const char *format, ...)
{
        char *line, *clean = NULL;
        va_list arguments;

        va_start(arguments, format);
        if (vasprintf(&line, format, arguments) >= 0) {
                clean = text_escape(line);
                free(line);
        }
        va_end(arguments);
        if (clean)
                fprintf(out, "%s%s\n", out == stderr ? "bfcctl: " : "", clean);
        free(clean);
}

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

/* A scheduler's lease has no session where one of an operator or of the config is for the control group: it must not lift
 * the sum. */
static bool is_of_no_use(const struct list *l, const Bfcd__LeaseRow *row)
{
        for (size_t i = 0; strcmp(row->made_by, "scheduler") == 0 && i < l->n_leases; i++) {
                const Bfcd__LeaseRow *other = l->leases[i];

                if (has_one(other) && strcmp(other->made_by, "scheduler") != 0 &&
                    strcmp(other->match, row->match) == 0 && strcmp(other->tenant, row->tenant) == 0 &&
                    strcmp(other->partition, row->partition) == 0)
                        return true;
        }
        return false;
}

/* With room for those of `before`. */
static int collect(const struct list *l, struct limits *ret)
{
        ret->list = calloc(l->n_leases + before.n + 1, sizeof(*ret->list));
        for (size_t i = 0; ret->list && i < l->n_leases; i++) {
                struct limit *next = &ret->list[ret->n], *same;
                const Bfcd__LeaseRow *row = l->leases[i];
                const Bfcd__DeviceRow *device = device_of(l, row->partition, next->uuid);

                if (!device || !has_one(row) || is_of_no_use(l, row))
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
        if (error == -EBUSY)
                return "bfcd's own processes are in that control group";
        return error == -ENOENT ? "NVML finds no such GPU or control group" : strerror(-error);
}

/* The limit would count all that bfcd lends. */
static bool has_daemon(const struct limit *limit, const char *daemon)
{
        const char *path = limit->folder + strlen(CGROUPS);
        size_t n = strcmp(path, "/") == 0 ? 0 : strlen(path);

        return n == 0 || (strncmp(daemon, path, n) == 0 && (daemon[n] == '/' || daemon[n] == '\0'));
}

/* Also one that is the same: the driver forgets it with the control group, which may have been made again. 0 also where
 * one is not there: it may come. */
static int set(struct limit *limit, const struct limit *was, const char *daemon)
{
        char text[TEXT_MAX];
        int r = has_daemon(limit, daemon) ? -EBUSY
                                          : nvml_limit(nvml, limit->uuid, limit->folder, limit->n_bytes);
        bool was_set = was && was->is_set;

        limit->error = r;
        limit->is_set = r == 0 || (was_set && r != -ENOENT);
        limit->n_set = r == 0 ? limit->n_bytes : was_set ? was->n_set : 0;
        if (r == 0 && !(was_set && was->n_set == limit->n_bytes))
                say(stdout, "%s %s: %s", limit->device, limit->folder, text_size(limit->n_bytes, text));
        if (r < 0 && !(was && was->error == r))
                say(stderr, "The limit of %s on %s cannot be set: %s.", limit->folder, limit->device, why(r));
        return r == -ENOENT ? 0 : r;
}

/* Of leases that have ended. The driver has forgotten those whose control group is gone. The others are tried again with
 * the next look. */
static void lift(struct limits *now)
{
        for (size_t i = 0; i < before.n; i++) {
                struct limit *was = &before.list[i];
                int r;

                if (!was->is_set || find(now, was->uuid, was->folder))
                        continue;
                r = nvml_limit(nvml, was->uuid, was->folder, UINT64_MAX);
                if (r == 0)
                        say(stdout, "%s: no limit", was->folder);
                if (r == 0 || r == -ENOENT)
                        continue;
                if (was->error != r)
                        say(stderr, "The limit of %s on %s cannot be lifted: %s.", was->folder, was->uuid,
                            why(r));
                was->error = r;
                now->list[now->n++] = *was;
        }
}

int driver_limits_no_answer(const struct ask *a, const struct invocation *i, int error)
{
        if (!i->view.watch || error == -EACCES)
                return command_complain(a);
        if (!is_silent)
                (void)command_complain(a);
        is_silent = true;
        return EXIT_SUCCESS;
}

static int follow(const struct list *l)
{
        char daemon[PROCESS_CGROUP_MAX];
        struct limits now = { 0 };
        int first = 0;

        if (collect(l, &now) < 0)
                return -ENOMEM;
        process_cgroup(l->status->pid, daemon);
        for (size_t k = 0; k < now.n; k++) {
                int r = set(&now.list[k], find(&before, now.list[k].uuid, now.list[k].folder), daemon);

                first = first == 0 ? r : first;
        }
        lift(&now);
        free(before.list);
        before = now;
        return first;
}

int run_driver_limits(struct ask *a, const struct invocation *i, const struct command *c)
{
        static const Bfcd__List__Kind kinds[] = { BFCD__LIST__KIND__STATUS, BFCD__LIST__KIND__PARTITIONS,
                                                  BFCD__LIST__KIND__LEASES };
        struct list *l;
        int r;

        (void)c;
        if (!nvml && nvml_open(&nvml) < 0) {
                fprintf(stderr,
                        "bfcctl: NVML (libnvidia-ml.so.1) cannot be used: is there a driver of NVIDIA?\n");
                return EXIT_REFUSED;
        }
        r = ask_lists(a, kinds, sizeof(kinds) / sizeof(kinds[0]), &l);
        if (r < 0)
                return driver_limits_no_answer(a, i, r);
        is_silent = false;
        r = follow(l);
        list_free(l);
        if (r == -ENOMEM)
                return command_finish(r);
        fflush(stdout);
        return r < 0 && !i->view.watch ? EXIT_REFUSED : EXIT_SUCCESS;
}
