/* The daemon's part of a plan; see plan_daemon.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The device is a table of functions like any other. Its extents are numbers: what it lends is an fd of an
 * empty memfd, because each end counts fds. */
#include "ctl/plan_daemon.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/session/recall.h"
#include "daemon/session/retire.h"
#include "daemon/session/trim.h"
#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/memory/arena.h"
#include "daemon/memory/broker.h"
#include "daemon/session/session.h"
#include "daemon/session/delivery.h"
#include "daemon/session/request.h"
#include "daemon/session/session_states.h"

#define GPU_BYTES (UINT64_C(1) << 46) /* of a GPU that a plan makes up: no limit is above it */

struct plan_device {
        struct device device; /* first: it is one */
        uint64_t n_made;
        uint64_t largest_bytes; /* of the extents that were made */
        int fd;
};

struct plan_daemon {
        struct plan_device device;
        struct devices *devices;
        struct config *config;
        struct broker *broker;
        struct session *session; /* NULL: the client has not connected */
        const struct plan_daemon_ops *ops;
        void *userdata;
};

/* ---- the device ----------------------------------------------------------- */

static struct device *plan_device_free(struct device *d)
{
        (void)d; /* it is embedded */
        return NULL;
}

static uint64_t plan_device_granularity(const struct device *d)
{
        (void)d;
        return PLAN_STEP_BYTES;
}

static int plan_device_make(struct device *device, const struct device_supply *supply,
                            enum device_share share, struct device_extent *extents, size_t n)
{
        struct plan_device *d = (struct plan_device *)device;

        (void)supply;
        for (struct device_extent *e = extents; e < extents + n; e++) {
                *e = (struct device_extent){
                        .fd = -1, .share = share, .n_bytes = e->n_bytes, .native = ++d->n_made
                };
                if (e->n_bytes > d->largest_bytes)
                        d->largest_bytes = e->n_bytes;
                if (share == DEVICE_SHARE_CUDA_IPC)
                        memcpy(e->handle, &d->n_made, sizeof(d->n_made));
        }
        return 0;
}

static int plan_device_destroy(struct device *d, struct device_extent *e)
{
        (void)d;
        *e = DEVICE_EXTENT_EMPTY;
        return 0;
}

static int plan_device_lend(struct device *device, const struct device_extent *e, bool is_read_only)
{
        int fd = fcntl(((struct plan_device *)device)->fd, F_DUPFD_CLOEXEC, 3);

        (void)e;
        (void)is_read_only;
        return fd < 0 ? -errno : fd;
}

static int plan_device_facts(struct device *d, struct device_facts *ret)
{
        (void)d;
        *ret = (struct device_facts){ .name = "plan", .shares = { true, true } };
        return 0;
}

static const struct device_ops device_ops = {
        .name = "plan",
        .free = plan_device_free,
        .granularity = plan_device_granularity,
        .make = plan_device_make,
        .destroy = plan_device_destroy,
        .lend = plan_device_lend,
        .facts = plan_device_facts,
};

/* ---- places ------------------------------------------------------------------ */

void plan_place_init(struct plan_place *ret)
{
        *ret = (struct plan_place){ .max_blocks = 100000, .partition = "plan", .tenant = "plan" };
}

/* Each GPU that a config names is there, and large enough. Different ids are different GPUs. */
static int look(void *userdata, const char *admin_socket, const char *id, struct config_gpu *ret,
                char *ret_sentence, size_t n_sentence)
{
        (void)admin_socket;
        uint64_t hash = 14695981039346656037u;

        (void)userdata;
        (void)ret_sentence;
        (void)n_sentence;
        for (const char *c = id; *c; c++)
                hash = (hash ^ (unsigned char)*c) * 1099511628211u;
        *ret = (struct config_gpu){ .bytes_total = GPU_BYTES, .bytes_free = GPU_BYTES };
        memcpy(ret->uuid, &hash, sizeof(hash));
        return 0;
}

static const struct config_machine machine = { .look = look };

/* The GPU of a plan. */
static int look_plan(void *userdata, const char *admin_socket, const char *id, struct config_gpu *ret,
                     char *ret_sentence, size_t n_sentence)
{
        (void)admin_socket;
        (void)userdata;
        (void)id;
        (void)ret_sentence;
        (void)n_sentence;
        *ret = (struct config_gpu){ .uuid = PLAN_GPU_UUID,
                                    .bytes_total = GPU_BYTES,
                                    .bytes_free = GPU_BYTES };
        return 0;
}

static const struct config_machine plan_machine = { .look = look_plan };

static const struct config_quota *find_quota(const struct config_tenant *t, const struct config *c,
                                             const char *partition)
{
        for (size_t i = 0; i < t->n_quotas; i++)
                if (!partition || strcmp(c->partitions[t->quotas[i].partition].name, partition) == 0)
                        return &t->quotas[i];
        return NULL;
}

static int find_place(const struct config *c, const char *partition, const char *tenant,
                      struct plan_place *ret, char **ret_error)
{
        const struct config_partition *p;
        const struct config_quota *q = NULL;
        size_t i;

        for (i = 0; i < c->n_tenants && !q; i++)
                if (!tenant || strcmp(c->tenants[i].name, tenant) == 0)
                        q = find_quota(&c->tenants[i], c, partition);
        if (!q) {
                if (asprintf(ret_error, "no such quota: tenant '%s', partition '%s'",
                             tenant ? tenant : "(any)", partition ? partition : "(any)") < 0)
                        *ret_error = NULL;
                return -ENOENT;
        }
        p = &c->partitions[q->partition];
        *ret = (struct plan_place){
                .is_cuda = c->devices[p->device].is_cuda,
                .is_ipc = p->share == CONFIG_SHARE_CUDA_IPC,
                .is_preallocated = p->growth == CONFIG_GROWTH_PREALLOCATE,
                .max_blocks = q->max_blocks,
                .limit_bytes = q->limit_bytes,
        };
        snprintf(ret->partition, sizeof(ret->partition), "%s", p->name);
        snprintf(ret->tenant, sizeof(ret->tenant), "%s", c->tenants[i - 1].name);
        return 0;
}

int plan_place_read(const char *path, const char *partition, const char *tenant, struct plan_place *ret,
                    char **ret_error)
{
        struct config *config = NULL;
        size_t n_errors = 0;
        char *errors = NULL;
        FILE *out = open_memstream(&errors, &n_errors);
        int r = out ? config_load(path, &machine, out, &config) : -ENOMEM;

        if (out)
                fclose(out);
        if (r == 0) {
                free(errors); /* warnings */
                r = find_place(config, partition, tenant, ret, ret_error);
                config_free(config);
                return r;
        }
        if (errors && n_errors > 0 && errors[n_errors - 1] == '\n')
                errors[n_errors - 1] = '\0';
        *ret_error = errors;
        return r == -ENOMEM ? r : -EINVAL;
}

/* ---- the broker ---------------------------------------------------------------- */

static const struct upcalls upcalls = {
        .retire = retire_extents,
        .unmaps_soon = retire_unmaps_soon,
        .trim = trim_ask,
        .is_trimming = trim_is_asked,
        .trim_excess = trim_excess,
};

static int make_config(const struct plan_place *place, uint64_t limit_bytes, struct config **ret,
                       char *ret_sentence, size_t n_sentence)
{
        uint64_t mib = limit_bytes >> 20;
        char text[1024], size[64] = "";
        FILE *errors = fmemopen(ret_sentence, n_sentence, "w");
        int n, r;

        if (!errors)
                return -ENOMEM;
        if (!place->is_cuda)
                snprintf(size, sizeof(size), "    size: %" PRIu64 "MiB\n", mib);
        n = snprintf(text, sizeof(text),
                     "devices:\n  - id: %s\n%s    partitions:\n"
                     "      - {name: \"%s\", limit: %" PRIu64 "MiB, growth: %s%s}\n"
                     "tenants:\n  - name: \"%s\"\n    match: {uid: [%u]}\n"
                     "    quotas: [{partition: \"%s\", limit: %" PRIu64 "MiB, max_blocks: %" PRIu32 "}]\n",
                     place->is_cuda ? "cuda:0" : "host", size, place->partition, mib,
                     place->is_preallocated ? "preallocate" : "on-demand",
                     !place->is_cuda ? ""
                     : place->is_ipc ? ", share: cuda-ipc"
                                     : ", share: fd",
                     place->tenant, (unsigned)getuid(), place->partition, mib, place->max_blocks);
        r = config_parse("plan", text, (size_t)n, &plan_machine, errors, ret);
        fclose(errors);
        return r;
}

static int make_broker(struct plan_daemon *d, const struct plan_place *place, uint64_t limit_bytes,
                       char *ret_sentence, size_t n_sentence)
{
        struct broker_options options = { .inline_workers = true, .upcalls = &upcalls };
        int r = make_config(place, limit_bytes, &d->config, ret_sentence, n_sentence);

        if (r == 0)
                r = devices_new(false, &d->devices);
        if (r == 0)
                r = devices_put(d->devices, d->config->devices[0].id, &d->device.device);
        if (r < 0)
                return r;
        options.config = d->config;
        options.devices = d->devices;
        return broker_new(&options, &d->broker, ret_sentence, n_sentence);
}

int plan_daemon_new(const struct plan_place *place, uint64_t limit_bytes, struct plan_daemon **ret,
                    char *ret_sentence, size_t n_sentence)
{
        struct plan_daemon *d = calloc(1, sizeof(*d));
        int r;

        snprintf(ret_sentence, n_sentence, "out of memory");
        if (!d)
                return -ENOMEM;
        log_open(LOG_LEVEL_ERROR);
        d->device.device.ops = &device_ops;
        d->device.device.is_cuda = place->is_cuda;
        d->device.fd = memfd_create("plan", MFD_CLOEXEC);
        r = d->device.fd < 0 ? -errno : make_broker(d, place, limit_bytes, ret_sentence, n_sentence);
        if (r < 0) {
                plan_daemon_free(d);
                return r;
        }
        *ret = d;
        return 0;
}

/* As a connection that ends: all that the session has is freed. */
static void end_session(struct session *s)
{
        const char *why = NULL;

        if (!session_is_closing(s) && session_hang_up(s) > 0)
                session_close(s, "the plan has ended");
        while (session_work(s, SESSION_REAP_SLICE, &why) == SESSION_MORE)
                ;
        session_end_linger(s);
        (void)session_work(s, SESSION_REAP_SLICE, &why);
        session_free(s);
}

struct plan_daemon *plan_daemon_free(struct plan_daemon *d)
{
        static const struct plan_daemon_ops none = { NULL, NULL };

        if (!d)
                return NULL;
        d->ops = &none; /* the client is gone */
        if (d->session)
                end_session(d->session);
        d->session = NULL;
        while (d->broker && plan_daemon_turn(d))
                ;
        broker_free(d->broker);
        devices_free(d->devices);
        config_free(d->config);
        if (d->device.fd >= 0)
                close(d->device.fd);
        free(d);
        return NULL;
}

/* ---- the session --------------------------------------------------------------- */

static void on_send(void *userdata, const Bfcd__Reply *reply, const int *fds, size_t n_fds)
{
        struct plan_daemon *d = userdata;

        if (d->ops->reply)
                d->ops->reply(d->userdata, reply, fds, n_fds);
        for (size_t i = 0; i < n_fds; i++)
                close(fds[i]);
}

static void on_event(void *userdata, const Bfcd__Event *event)
{
        struct plan_daemon *d = userdata;

        if (d->ops->event)
                d->ops->event(d->userdata, event);
}

/* Events are passed as they are: the fd is what says that there are any. */
static int on_open_events(void *userdata, int *ret_fd)
{
        int fd = fcntl(((struct plan_daemon *)userdata)->device.fd, F_DUPFD_CLOEXEC, 3);

        *ret_fd = fd;
        return fd < 0 ? -errno : 0;
}

static void on_ready(void *userdata)
{
        (void)userdata; /* plan_daemon_turn() looks itself */
}

static void on_abort(void *userdata, const char *why)
{
        (void)userdata;
        (void)why; /* the request that has no answer fails */
}

static void on_resume(void *userdata, struct session *kept)
{
        (void)userdata;
        (void)kept; /* there is no session of a daemon before */
}

static const struct session_ops session_ops = {
        .send = on_send,
        .ready = on_ready,
        .abort = on_abort,
        .open_events = on_open_events,
        .send_event = on_event,
        .resume_kept = on_resume,
};

int plan_daemon_connect(struct plan_daemon *d, const struct plan_daemon_ops *ops, void *userdata)
{
        struct credentials who = { .pid = getpid(), .uid = getuid(), .gid = getgid(), .start_time = 1 };

        d->ops = ops;
        d->userdata = userdata;
        return session_new(d->broker, ROLE_CLIENT, &who, &session_ops, d, &d->session);
}

static void deliver(struct plan_daemon *d)
{
        while (d->session && session_is_live(d->session) && session_may_deliver(d->session))
                session_deliver(d->session);
}

int plan_daemon_handle(struct plan_daemon *d, const Bfcd__Request *request)
{
        const char *why = NULL;
        int r = session_handle(d->session, request, &why);

        deliver(d);
        return r;
}

int plan_daemon_answer(struct plan_daemon *d, const Bfcd__EventReply *reply)
{
        const char *why = NULL;

        return session_handle_event(d->session, reply, &why);
}

static bool turn_session(struct plan_daemon *d)
{
        const char *why = NULL;

        if (d->session && session_has_work(d->session))
                return session_work(d->session, SESSION_REAP_SLICE, &why) >= 0;
        if (!d->session || !session_is_live(d->session) || !session_may_deliver(d->session))
                return false;
        deliver(d);
        return true;
}

bool plan_daemon_turn(struct plan_daemon *d)
{
        struct broker *b = d->broker;

        if (broker_is_due(b) || broker_n_pending(b) > 0) {
                broker_turn(b);
                broker_poll(b);
                return true;
        }
        if (turn_session(d))
                return true;
        if (broker_is_deferred(b)) {
                broker_look_again(b);
                return true;
        }
        broker_tick(b);
        recall_tick(b, clock_ms());
        return broker_is_due(b);
}

void plan_daemon_read(const struct plan_daemon *d, struct plan_daemon_stats *ret)
{
        ret->peak_charged_bytes = d->broker->tenants[0].quotas[0]->account.peak_charged_bytes;
        ret->largest_extent_bytes = d->device.largest_bytes;
}
