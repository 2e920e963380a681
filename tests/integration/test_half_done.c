/* The daemon dies after each store to its ledger that an act makes, for each kind of request, admin command and end of
 * a session, and is restarted twice. Then the restored tables are consistent (kill_points.c), the other sessions have
 * all they had with its contents, the act can be finished, and nothing of it is left.
 *
 * The nightly run takes every store of each act, the others one of each. BFC_TEST_POINTS=N takes N stores of each act,
 * and BFC_TEST_ACT=NAME one act.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include "tests/integration/kept.h"
#include "tests/integration/kill_points.h"
#include "tests/integration/parking.h"
#include "tests/integration/tools.h"

#define SMALL      3000u
#define LARGE      (12 * MIB)
#define PARKABLE   (2 * MIB)
#define DIRECT     (3 * MIB + 5)
#define QUIET_MS   6u /* without a store: the act and what it started are over */
#define MAX_STORES 2000u

#define TENANTS       QUOTAS("red", "64MiB", "32MiB") QUOTAS("blue", "32MiB", "32MiB")
#define LESS          QUOTAS("red", "40MiB", "32MiB") QUOTAS("blue", "32MiB", "32MiB")
#define TOP           "timeouts: {quarantine: 20ms}\n"
#define QUARANTINE_MS 20u

static const struct rig_config *config_with(const char *tenants)
{
        static struct rig_config config;

        config = (struct rig_config){
                .top = TOP,
                .partitions = rig_device() == ON_HOST ? PARTITIONS("160MiB", "96MiB", "")
                                                      : PARTITIONS("160MiB", "96MiB", HOST),
                .tenants = tenants,
        };
        return &config;
}

/* ---- the scene ------------------------------------------------------------------------ */

/* A client that does nothing, whose blocks must stay. */
struct victim {
        bfc_client *client;
        void *small, *large, *parked, *shared, *kept;
        uint64_t seed;
};

struct scene {
        struct kept *k;
        struct kill_points *points;
        char points_path[64];
        struct victim victims[2];
        bfc_client *a, *b; /* of red: they act */
        bfc_client *c;     /* that an act has opened */
        struct raw *raw;
        void *p, *q;
        uint64_t id;
        bool has_died;
};

static void *parkable(bfc_client *client, const char *tag, uint64_t seed)
{
        const struct bfc_malloc_options options = { .struct_size = sizeof(options),
                                                    .flags = BFC_PARKABLE,
                                                    .tag = tag };
        void *p;

        ck_assert_ok(bfc_malloc_with(client, PARKABLE, &options, &p));
        block_fill(client, p, PARKABLE, seed);
        return p;
}

static void *filled(bfc_client *client, size_t n_bytes, uint64_t seed)
{
        void *p;

        ck_assert_ok(bfc_malloc_flags(client, NULL, n_bytes, BFC_WHOLE, &p));
        block_fill(client, p, n_bytes, seed);
        return p;
}

static void publish_kept(bfc_client *client, void *p, const char *name)
{
        const struct bfc_publish_options options = { .struct_size = sizeof(options),
                                                     .keep_ms = BFC_KEEP_FOREVER,
                                                     .metadata = "shape",
                                                     .n_metadata_bytes = 5 };

        ck_assert_ok(bfc_publish_with(client, p, name, &options));
}

static void victim_start(struct victim *v, struct rig *rig, const char *tenant, uint64_t seed)
{
        v->seed = seed;
        v->client = client_open(rig, tenant, "train");
        v->small = filled(v->client, SMALL, seed);
        v->large = filled(v->client, 5 * MIB, seed + 1);
        v->shared = filled(v->client, SMALL, seed + 2);
        v->kept = filled(v->client, SMALL, seed + 3);
        ck_assert_ok(bfc_publish(v->client, v->shared, "shared"));
        publish_kept(v->client, v->kept, "kept");
        if (!CAN_PARK)
                return;
        v->parked = parkable(v->client, "victim", seed + 4);
        ck_assert_ok(bfc_park(v->client, v->parked, BFC_BACKUP, "parking"));
}

static void victim_check(const struct victim *v)
{
        char bytes[8];
        size_t n_bytes;

        ck_assert(block_has(v->client, v->small, SMALL, v->seed));
        ck_assert(block_has(v->client, v->large, 5 * MIB, v->seed + 1));
        ck_assert(block_has(v->client, v->shared, SMALL, v->seed + 2));
        ck_assert(block_has(v->client, v->kept, SMALL, v->seed + 3));
        ck_assert_ok(bfc_shared_metadata(v->client, v->kept, bytes, sizeof(bytes), &n_bytes));
        ck_assert(n_bytes == 5 && memcmp(bytes, "shape", 5) == 0);
        if (CAN_PARK)
                ck_assert_int_eq(bfc_read(v->client, bytes, v->parked, 1), -EBUSY);
}

static void victim_end(const struct victim *v)
{
        if (CAN_PARK) {
                ck_assert_ok(bfc_wake(v->client, v->parked, SETTLE_MS));
                ck_assert(block_has(v->client, v->parked, PARKABLE, v->seed + 4));
        }
        ck_assert_ok(bfc_forget(v->client, "kept"));
        bfc_disconnect(v->client);
}

static void points_make(struct scene *s)
{
        int fd;

        strcpy(s->points_path, "/tmp/bfc-half-done-XXXXXX");
        fd = mkostemp(s->points_path, O_CLOEXEC);
        ck_assert_int_ge(fd, 0);
        ck_assert_int_eq(ftruncate(fd, sizeof(*s->points)), 0);
        s->points = mmap(NULL, sizeof(*s->points), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        ck_assert(s->points != MAP_FAILED);
        close(fd);
        setenv(KILL_POINTS_FILE, s->points_path, 1);
}

static struct scene *scene_start(void)
{
        struct scene *s = calloc(1, sizeof(*s));

        ck_assert_ptr_nonnull(s);
        setenv("BFC_CACHE", "off", 1); /* each call is a request */
        points_make(s);
        s->k = kept_start(config_with(TENANTS));
        s->a = client_open(s->k->rig, "red", "train");
        s->b = client_open(s->k->rig, "red", "train");
        victim_start(&s->victims[0], s->k->rig, "red", 10);
        victim_start(&s->victims[1], s->k->rig, "blue", 20);
        return s;
}

static void scene_stop(struct scene *s)
{
        for (size_t i = 0; i < 2; i++)
                victim_end(&s->victims[i]);
        bfc_disconnect(s->a);
        bfc_disconnect(s->b);
        kept_stop(s->k);
        unlink(s->points_path);
        munmap(s->points, sizeof(*s->points));
        free(s);
}

/* ---- helpers of acts ------------------------------------------------------------------- */

/* bfcctl on the admin socket, again while the daemon dies in it. is_done: part of the error of one that was done
 * already, before the daemon died; may be NULL. */
static void command(struct scene *s, const char *const *words, const char *is_done)
{
        char *err = NULL;
        bool again;

        do {
                int status = ctl(s->k->rig->admin_socket, words, NULL, &err);

                again = status != 0 &&
                        (strstr(err, "reset") || strstr(err, "closed") || strstr(err, "ended") ||
                         strstr(err, "has no session")); /* all are suspended */
                ck_assert_msg(status == 0 || again || (is_done && strstr(err, is_done)), "%d: %s", status,
                              err);
                free(err);
        } while (again);
}
#define COMMAND(s, is_done, ...) command(s, WORDS(__VA_ARGS__), is_done)

static bfc_client *connect_red(struct scene *s)
{
        const struct bfc_options options = { .struct_size = sizeof(options),
                                             .socket = s->k->rig->socket,
                                             .tenant = "red",
                                             .partition = "train" };
        bfc_client *client = NULL;
        int r;

        ck_assert_msg(WAIT_FOR((r = bfc_connect(&options, &client)) == 0, SETTLE_MS), "%d: %s", r,
                      bfc_last_error());
        return client;
}

static const char *own_pid(void)
{
        static char text[32];

        snprintf(text, sizeof(text), "%d", (int)getpid());
        return text;
}

static bool has_no_lease(struct scene *s)
{
        char *out = ctl_text(s->k->rig, WORDS("--json", "lease", "list"));
        bool has_none = !strstr(out, "\"job\"");

        free(out);
        return has_none;
}

static void lease_create(struct scene *s)
{
        COMMAND(s, "exists already", "lease", "create", "job", "--tenant", "red", "--partition", "train",
                "--limit", "16MiB", "--reserve", "2MiB", "--pid", own_pid());
}

static void lease_end(struct scene *s)
{
        COMMAND(s, "no lease", "lease", "end", "job", "--evict");
        ck_assert(WAIT_FOR(has_no_lease(s), SETTLE_MS));
}

static void check_and_free(bfc_client *client, void *p, size_t n_bytes, uint64_t seed)
{
        ck_assert(block_has(client, p, n_bytes, seed));
        ck_assert_ok(bfc_free(client, p));
}

static void trim_all(struct scene *s)
{
        ck_assert_ok(bfc_trim(s->a, SIZE_MAX));
}

/* A request, so that the client has resumed. The device may be draining. */
static void call(bfc_client *client)
{
        void *p = NULL;
        int r = bfc_malloc(client, SMALL, &p);

        ck_assert_msg(r == 0 || r == -EBUSY, "%d: %s", r, bfc_last_error());
        ck_assert_ok(bfc_free(client, p));
}

static void nothing(struct scene *s)
{
        (void)s;
}

/* ---- blocks ------------------------------------------------------------------------------ */

static void malloc_small(struct scene *s)
{
        s->p = filled(s->a, SMALL, 1);
}

static void free_small_checked(struct scene *s)
{
        check_and_free(s->a, s->p, SMALL, 1);
}

static void charge_run(struct scene *s)
{
        ck_assert_ok(bfc_charge(s->a, NULL, DIRECT, 0));
}

static void uncharge_run(struct scene *s)
{
        ck_assert_ok(bfc_uncharge(s->a, NULL, DIRECT));
}

static uint64_t bytes_direct(const struct scene *s)
{
        return rig_stats(s->k->rig, "red", "train").bytes_direct;
}

static void charge_finish(struct scene *s)
{
        ck_assert_uint_eq(bytes_direct(s), DIRECT);
        uncharge_run(s);
}

static void charge_twice_finish(struct scene *s)
{
        ck_assert_uint_eq(bytes_direct(s), 2 * DIRECT);
        ck_assert_ok(bfc_uncharge(s->a, NULL, 2 * DIRECT));
}

static void uncharge_finish(struct scene *s)
{
        ck_assert_uint_eq(bytes_direct(s), 0);
}

static void free_p(struct scene *s)
{
        ck_assert_ok(bfc_free(s->a, s->p));
}

static void malloc_large(struct scene *s)
{
        s->p = filled(s->a, LARGE, 1);
}

static void free_large_checked(struct scene *s)
{
        check_and_free(s->a, s->p, LARGE, 1);
        trim_all(s);
}

static void free_and_trim(struct scene *s)
{
        free_p(s);
        trim_all(s);
}

static void malloc_parkable(struct scene *s)
{
        s->p = parkable(s->a, "act", 1);
}

static void free_parkable_checked(struct scene *s)
{
        ck_assert_ok(bfc_wake(s->a, s->p, SETTLE_MS));
        check_and_free(s->a, s->p, PARKABLE, 1);
        trim_all(s);
}

static void malloc_and_free_large(struct scene *s)
{
        malloc_large(s);
        free_p(s);
}

/* ---- a split, by hand -------------------------------------------------------------------- */

static void split_prepare(struct scene *s)
{
        Bfcd__Block block;

        s->raw = kept_raw(s->k, "red");
        ck_assert_int_eq(raw_malloc(s->raw, 0, SMALL, &block), 0);
        s->id = block.block_id;
}

static int split_once(struct scene *s, uint64_t *ret_id)
{
        Bfcd__Split body = BFCD__SPLIT__INIT;
        Bfcd__Request request = REQUEST(SPLIT, split, &body);
        Bfcd__Reply *reply = NULL;
        int r;

        body.block_id = s->id;
        body.n_bytes = 1024;
        r = raw_call(s->raw, &request, &reply);
        if (r == 0)
                *ret_id = reply->body_case == BFCD__REPLY__BODY_SPLIT ? reply->split->block_id : 0;
        if (r == 0)
                bfcd__reply__free_unpacked(reply, NULL);
        return r;
}

static void split_run(struct scene *s)
{
        uint64_t id = 0;

        (void)split_once(s, &id); /* the daemon may die in it */
}

/* Resumes, says that a Split was not answered, and repeats it. */
static void split_finish(struct scene *s)
{
        Bfcd__Held held = BFCD__HELD__INIT;
        Bfcd__Request request = REQUEST(HELD, held, &held);
        Bfcd__Split split = BFCD__SPLIT__INIT;
        uint64_t high = 0;

        if (s->has_died) {
                struct raw_held had = kept_held(s->raw, &s->id, 1);

                s->raw = kept_raw_back(s->k, s->raw);
                held.n_extent_ids = had.n_extents;
                held.extent_ids = (uint64_t *)(uintptr_t)had.extent_ids;
                held.n_block_ids = had.n_blocks;
                held.block_ids = &s->id;
                held.is_last = true;
                split.block_id = s->id;
                split.n_bytes = 1024;
                held.splitting = &split;
                ck_assert_msg(raw_do(s->raw, &request) == 0, "%s", raw_refusal());
                raw_held_free(&had);
        }
        ck_assert_int_eq(split_once(s, &high), 0);
        ck_assert_uint_ne(high, 0);
        ck_assert_int_eq(raw_free(s->raw, s->id), 0);
        ck_assert_int_eq(raw_free(s->raw, high), 0);
        session_end(s->raw);
        s->raw = NULL;
}

/* ---- shared blocks ------------------------------------------------------------------------- */

static void publish_run(struct scene *s)
{
        ck_assert_ok(bfc_publish(s->a, s->p, "act"));
}

static void publish_prepare(struct scene *s)
{
        malloc_small(s);
        publish_run(s);
}

static void detach_checked(struct scene *s)
{
        ck_assert(block_has(s->a, s->p, SMALL, 1));
        ck_assert_ok(bfc_detach(s->a, s->p));
}

static void publish_kept_run(struct scene *s)
{
        publish_kept(s->a, s->p, "act");
}

static void publish_kept_prepare(struct scene *s)
{
        malloc_small(s);
        publish_kept_run(s);
}

static void forget_run(struct scene *s)
{
        int r = bfc_forget(s->b, "act");

        ck_assert_msg(r == 0 || r == -ENOENT, "%d: %s", r, bfc_last_error());
}

static void kept_finish(struct scene *s)
{
        char bytes[8];
        size_t n_bytes;

        ck_assert_ok(bfc_shared_metadata(s->a, s->p, bytes, sizeof(bytes), &n_bytes));
        ck_assert_uint_eq(n_bytes, 5);
        detach_checked(s);
        forget_run(s);
}

static void detach_run(struct scene *s)
{
        ck_assert_ok(bfc_detach(s->a, s->p));
}

static void detached_kept_prepare(struct scene *s)
{
        publish_kept_prepare(s);
        detach_run(s);
}

static void detached_kept_finish(struct scene *s)
{
        ck_assert_ok(bfc_attach(s->a, "act", 0, &s->p, NULL));
        kept_finish(s);
}

static void forget_command(struct scene *s)
{
        COMMAND(s, "no ", "forget", "red", "act");
}

static void attach_run(struct scene *s)
{
        ck_assert_ok(bfc_attach(s->a, "shared", 0, &s->p, NULL));
}

static void attach_finish(struct scene *s)
{
        check_and_free(s->a, s->p, SMALL, 12);
}

static void attach_twice_finish(struct scene *s)
{
        ck_assert_ok(bfc_detach(s->a, s->p));
        attach_finish(s);
}

static void open_c(struct scene *s)
{
        s->c = connect_red(s);
}

static void close_c(struct scene *s)
{
        bfc_disconnect(s->c);
}

static void attach_read_only(struct scene *s)
{
        const struct bfc_attach_options options = { .struct_size = sizeof(options),
                                                    .flags = BFC_ATTACH_READ_ONLY };

        ck_assert_ok(bfc_attach_with(s->c, "shared", &options, &s->p, NULL));
}

static void attach_read_only_finish(struct scene *s)
{
        check_and_free(s->c, s->p, SMALL, 12);
        close_c(s);
}

/* ---- parking ------------------------------------------------------------------------------- */

static void park_run(struct scene *s)
{
        ck_assert_ok(bfc_park(s->a, s->p, BFC_BACKUP, "parking"));
}

static void park_prepare(struct scene *s)
{
        malloc_parkable(s);
        park_run(s);
}

static void discard_run(struct scene *s)
{
        ck_assert_ok(bfc_park(s->a, s->p, BFC_DISCARD, NULL));
}

static void discard_finish(struct scene *s)
{
        static const char zeros[PARKABLE];
        static char bytes[PARKABLE];

        ck_assert_ok(bfc_wake(s->a, s->p, SETTLE_MS));
        ck_assert_ok(bfc_read(s->a, bytes, s->p, PARKABLE));
        ck_assert_mem_eq(bytes, zeros, PARKABLE);
        free_and_trim(s);
}

static void wake_run(struct scene *s)
{
        ck_assert_ok(bfc_wake(s->a, s->p, SETTLE_MS));
}

static void share_parkable(struct scene *s)
{
        malloc_parkable(s);
        publish_run(s);
        ck_assert_ok(bfc_attach(s->b, "act", 0, &s->q, NULL));
        ck_assert_ok(bfc_park(s->b, s->q, BFC_BACKUP, "parking"));
}

static void share_and_park(struct scene *s)
{
        share_parkable(s);
        park_run(s);
}

static void agree_run(struct scene *s)
{
        ck_assert_ok(bfc_wake(s->b, s->q, SETTLE_MS));
        ck_assert_ok(bfc_park(s->b, s->q, BFC_BACKUP, "parking"));
}

static void shared_finish(struct scene *s)
{
        ck_assert_ok(bfc_wake(s->b, s->q, SETTLE_MS));
        ck_assert(block_has(s->b, s->q, PARKABLE, 1));
        ck_assert_ok(bfc_wake(s->a, s->p, SETTLE_MS));
        ck_assert_ok(bfc_detach(s->b, s->q));
        check_and_free(s->a, s->p, PARKABLE, 1);
        trim_all(s);
}

/* The daemon parks it by itself. */
static void shared_left_finish(struct scene *s)
{
        ck_assert_ok(bfc_wake(s->b, s->q, SETTLE_MS));
        check_and_free(s->b, s->q, PARKABLE, 1);
        trim_all(s);
}

static void share_park_and_leave(struct scene *s)
{
        share_and_park(s);
        ck_assert_ok(bfc_detach(s->b, s->q));
}

/* ---- sessions -------------------------------------------------------------------------------- */

static void open_raw(struct scene *s)
{
        Bfcd__Block block;

        s->raw = kept_raw(s->k, "red");
        ck_assert_int_eq(raw_malloc(s->raw, 0, SMALL, &block), 0);
        ck_assert_int_eq(raw_malloc(s->raw, 0, LARGE, &block), 0);
}

/* Without a goodbye: what it has is quarantined and then released. */
static void hang_up(struct scene *s)
{
        shutdown(s->raw->fd, SHUT_RDWR);
        shutdown(s->raw->events_fd, SHUT_RDWR);
        usleep(2 * QUARANTINE_MS * 1000);
}

/* A daemon that died before it noticed has left a session that can be resumed. */
static void hang_up_finish(struct scene *s)
{
        struct raw *again;
        char state[16];

        if (strcmp(kept_session_state(s->k, s->raw->session_id, state), "suspended") == 0) {
                ck_assert_int_eq(kept_raw_try(s->k, s->raw, &again), 0);
                ck_assert_int_eq(raw_held(again, &(struct raw_held){ .count = 0 }), 0);
                session_end(again);
        }
        s->raw = raw_close(s->raw);
}

static void goodbye_with_blocks(struct scene *s)
{
        s->c = connect_red(s);
        filled(s->c, SMALL, 1);
        filled(s->c, LARGE, 1);
        ck_assert_ok(bfc_attach(s->c, "shared", 0, &s->p, NULL));
}

/* ---- leases ----------------------------------------------------------------------------------- */

static void lease_set(struct scene *s)
{
        COMMAND(s, NULL, "lease", "set", "job", "--limit", "20MiB", "--reserve", "4MiB", "--ttl", "1h");
}

static void lease_set_finish(struct scene *s)
{
        char *out = ctl_text(s->k->rig, WORDS("--json", "lease", "list"));

        text_has(out, "20971520");
        lease_end(s);
}

static void lease_with_session(struct scene *s)
{
        lease_create(s);
        open_c(s);
}

static void lease_with_block(struct scene *s)
{
        lease_with_session(s);
        s->p = filled(s->c, SMALL, 1);
}

static void lease_malloc(struct scene *s)
{
        s->p = filled(s->c, SMALL, 1);
}

static void lease_charge(struct scene *s)
{
        ck_assert_ok(bfc_charge(s->c, NULL, DIRECT, 0));
}

static void leave_lease(struct scene *s)
{
        close_c(s);
        lease_end(s);
}

static void leave_lease_uncharged(struct scene *s)
{
        call(s->c);
        ck_assert_uint_eq(bytes_direct(s), DIRECT);
        ck_assert_ok(bfc_uncharge(s->c, NULL, DIRECT));
        leave_lease(s);
}

static void leave_lease_checked(struct scene *s)
{
        ck_assert(block_has(s->c, s->p, SMALL, 1));
        leave_lease(s);
}

static void lease_end_waits(struct scene *s)
{
        COMMAND(s, NULL, "lease", "end", "job");
}

static void lease_ended_with_block(struct scene *s)
{
        lease_with_block(s);
        lease_end_waits(s);
}

static void lease_end_evicts(struct scene *s)
{
        COMMAND(s, "no lease", "lease", "end", "job", "--evict");
}

/* ---- other commands ---------------------------------------------------------------------------- */

static void evict(struct scene *s)
{
        char id[32];

        snprintf(id, sizeof(id), "%llu", (unsigned long long)s->raw->session_id);
        COMMAND(s, "cannot be evicted", "evict", id, "--reason", "a test");
}

static void close_raw(struct scene *s)
{
        s->raw = raw_close(s->raw);
}

static void trim_command(struct scene *s)
{
        COMMAND(s, NULL, "trim", "red");
}

static void park_command(struct scene *s)
{
        COMMAND(s, NULL, "park", "red", "--tag", "act", "--to", "parking");
}

static void wake_command(struct scene *s)
{
        COMMAND(s, NULL, "wake", "red", "--tag", "act");
}

static void drain(struct scene *s)
{
        COMMAND(s, NULL, "drain", rig_device_id());
}

/* A restart ends a drain. */
static void resume(struct scene *s)
{
        COMMAND(s, "not drain", "resume", rig_device_id());
}

static void drain_finish(struct scene *s)
{
        resume(s);
        malloc_small(s);
        free_small_checked(s);
}

static void drain_prepare(struct scene *s)
{
        malloc_and_free_large(s);
        drain(s);
}

static void reload_with(struct scene *s, const char *tenants)
{
        rig_rewrite_config(s->k->rig, config_with(tenants));
        COMMAND(s, NULL, "reload");
}

static void reload_more(struct scene *s)
{
        reload_with(s, TENANTS QUOTAS("green", "16MiB", "16MiB"));
}

static void reload_less(struct scene *s)
{
        reload_with(s, LESS);
}

static void reload_back(struct scene *s)
{
        reload_with(s, TENANTS);
}

static void reset_peaks(struct scene *s)
{
        COMMAND(s, NULL, "reset-peaks");
}

/* A daemon that died after it made the session, and before the client got the reply, leaves a session that no client
 * resumes: it has no memory, and stays until its process exits. */
static void hello_finish(struct scene *s)
{
        char *text, *rest, *line;

        call(s->a);
        call(s->b);
        call(s->c);
        text = rest = kept_sessions(s->k);
        while ((line = strsep(&rest, "\n")))
                if (strstr(line, "suspended, 0 blocks")) {
                        line[strcspn(line, " ")] = '\0';
                        COMMAND(s, NULL, "evict", line);
                }
        free(text);
        close_c(s);
}

/* ---- restarts ------------------------------------------------------------------------------------ */

static bool is_dead(const struct scene *s)
{
        return __atomic_load_n(&s->points->at, __ATOMIC_ACQUIRE) == KILL_POINTS_DIED;
}

/* The daemon may have died already, in what an earlier act left it to do. */
static void end_by(struct scene *s, int signal)
{
        unsigned n_starts = kept_state(s->k).n_starts;
        struct stand_in_state now;
        int r = stand_in_signal(s->k->manager, signal);

        ck_assert_msg(r == 0 || (r == -ESRCH && is_dead(s)), "%s", strerror(-r));
        ck_assert(WAIT_FOR((now = kept_state(s->k), now.n_starts > n_starts && now.is_ready), SETTLE_MS));
}

static void restart(struct scene *s)
{
        end_by(s, SIGTERM);
}

static void die_and_restart(struct scene *s)
{
        end_by(s, SIGKILL);
}

/* ---- all acts ------------------------------------------------------------------------------------ */

static const struct act {
        const char *name;
        void (*prepare)(struct scene *s);
        void (*run)(struct scene *s);    /* the daemon dies in it, and it goes on with the next one */
        void (*finish)(struct scene *s); /* after the restarts: is it done? and nothing of it is left */
} acts[] = {
        { "malloc", nothing, malloc_small, free_small_checked },
        { "malloc that grows", trim_all, malloc_large, free_large_checked },
        { "malloc, parkable", nothing, malloc_parkable, free_parkable_checked },
        { "free", malloc_small, free_p, nothing },
        { "free and trim", malloc_large, free_and_trim, nothing },
        { "trim by a client", malloc_and_free_large, trim_all, nothing },
        { "split", split_prepare, split_run, split_finish },
        { "charge", nothing, charge_run, charge_finish },
        { "charge of more", charge_run, charge_run, charge_twice_finish },
        { "uncharge", charge_run, uncharge_run, uncharge_finish },
        { "charge in a lease", lease_with_session, lease_charge, leave_lease_uncharged },
        { "SIGKILL beside a charge", charge_run, die_and_restart, charge_finish },
        { "publish", malloc_small, publish_run, detach_checked },
        { "publish, kept", malloc_small, publish_kept_run, kept_finish },
        { "attach", nothing, attach_run, attach_finish },
        { "attach again", attach_run, attach_run, attach_twice_finish },
        { "attach, read-only", open_c, attach_read_only, attach_read_only_finish },
        { "detach", attach_run, detach_run, nothing },
        { "detach, the last", publish_prepare, detach_run, nothing },
        { "detach of a kept block", publish_kept_prepare, detach_run, detached_kept_finish },
        { "forget", detached_kept_prepare, forget_run, nothing },
        { "forget by an operator", detached_kept_prepare, forget_command, nothing },
        { "park", malloc_parkable, park_run, free_parkable_checked },
        { "park, discard", malloc_parkable, discard_run, discard_finish },
        { "wake", park_prepare, wake_run, free_parkable_checked },
        { "free of a parked block", park_prepare, free_p, trim_all },
        { "agree to park a shared block", share_parkable, agree_run, shared_finish },
        { "park of a shared block", share_parkable, park_run, shared_finish },
        { "park of a shared block by a detach", share_parkable, detach_run, shared_left_finish },
        { "wake of a shared block", share_and_park, wake_run, shared_finish },
        { "detach of a parked block, the last", share_park_and_leave, detach_run, trim_all },
        { "park by an operator", malloc_parkable, park_command, free_parkable_checked },
        { "wake by an operator", park_prepare, wake_command, free_parkable_checked },
        { "hello", nothing, open_c, hello_finish },
        { "goodbye", goodbye_with_blocks, close_c, nothing },
        { "hang-up", open_raw, hang_up, hang_up_finish },
        { "evict", open_raw, evict, close_raw },
        { "lease create", nothing, lease_create, lease_end },
        { "lease set", lease_create, lease_set, lease_set_finish },
        { "lease end", lease_create, lease_end_evicts, lease_end },
        { "lease end, with a session", lease_with_block, lease_end_waits, leave_lease_checked },
        { "lease end, evicting", lease_with_block, lease_end_evicts, leave_lease },
        { "hello into a lease", lease_create, open_c, leave_lease },
        { "malloc in a lease", lease_with_session, lease_malloc, leave_lease_checked },
        { "goodbye from an ended lease", lease_ended_with_block, close_c, lease_end },
        { "trim by an operator", malloc_and_free_large, trim_command, nothing },
        { "drain", malloc_and_free_large, drain, drain_finish },
        { "resume of a device", drain_prepare, resume, drain_finish },
        { "reload with one more tenant", nothing, reload_more, reload_back },
        { "reload with one tenant less", reload_more, reload_back, nothing },
        { "reload with lower limits", nothing, reload_less, reload_back },
        { "reset-peaks", nothing, reset_peaks, nothing },
        { "SIGTERM and restart", malloc_small, restart, free_small_checked },
        { "SIGKILL and restart", malloc_small, die_and_restart, free_small_checked },
};

static bool parks(const struct act *act)
{
        return act->run == malloc_parkable || act->prepare == malloc_parkable ||
               act->prepare == park_prepare || act->prepare == share_parkable ||
               act->prepare == share_and_park || act->prepare == share_park_and_leave;
}

/* Memory of a session that did not say goodbye is quarantined until the process exits: this one. On the host it is enough
 * that no process has it any more, but outside of leases the scene's other sessions share its extents. */
static bool leaves_memory(const struct act *act)
{
        bool is_in_lease = act->prepare == lease_create || act->prepare == lease_with_block ||
                           act->prepare == lease_ended_with_block;

        return (act->run == close_c || act->run == hang_up || act->run == evict ||
                act->run == lease_end_evicts) &&
               (rig_device() != ON_HOST || !is_in_lease);
}

static bool is_possible(const struct act *act)
{
        if (rig_device() == ON_CUDA_IPC && (parks(act) || act->run == attach_read_only))
                return false;
        return !leaves_memory(act);
}

#define N_ACTS (sizeof(acts) / sizeof(acts[0]))

/* ---- killing --------------------------------------------------------------------------------------- */

struct lists {
        char *sessions, *blocks, *shared;
};

static struct lists lists_take(struct kept *k)
{
        return (struct lists){ kept_sessions(k), kept_blocks(k), kept_shared(k) };
}

static void lists_free(struct lists *l)
{
        free(l->sessions);
        free(l->blocks);
        free(l->shared);
}

static bool lists_are(struct kept *k, const struct lists *want)
{
        struct lists now = lists_take(k);
        bool same = strcmp(now.sessions, want->sessions) == 0 && strcmp(now.blocks, want->blocks) == 0 &&
                    strcmp(now.shared, want->shared) == 0;

        lists_free(&now);
        return same;
}

static void assert_lists(struct kept *k, const struct lists *want)
{
        struct lists now;

        if (WAIT_FOR(lists_are(k, want), 20000))
                return;
        now = lists_take(k);
        ck_abort_msg("something is left, or lost: now\n%s%s%sbefore\n%s%s%s", now.sessions, now.blocks,
                     now.shared, want->sessions, want->blocks, want->shared);
}

/* Into the daemon's log, which a failure prints. */
static void mark(struct scene *s, const struct act *act, uint32_t at, bool is_before)
{
        FILE *log = fopen(s->k->rig->log_path, "a");

        ck_assert_ptr_nonnull(log);
        fprintf(log, "# act '%s': dies %s store %u\n", act->name, is_before ? "before" : "after", at);
        fclose(log);
}

static uint32_t stores(const struct scene *s)
{
        return __atomic_load_n(&s->points->n, __ATOMIC_ACQUIRE);
}

/* What the act has started goes on after its answer. */
static void wait_until_quiet(const struct scene *s)
{
        uint32_t before;

        do {
                before = stores(s);
                usleep(QUIET_MS * 1000);
        } while (!is_dead(s) && stores(s) != before);
}

/* Two daemons after the one that died. It may have died of a signal to it. */
static void restart_twice(struct scene *s, unsigned n_starts)
{
        unsigned n_bad = s->k->n_bad;

        ck_assert(WAIT_FOR(kept_state(s->k).n_starts > n_starts, SETTLE_MS));
        kept_ready(s->k);
        s->k->n_bad = kept_state(s->k).n_bad;
        ck_assert_uint_le(s->k->n_bad, n_bad + 1);
        kept_restart(s->k, SIGKILL);
}

/* at: 0: it does not die. Returns whether it died. */
static bool run_act(struct scene *s, const struct act *act, uint32_t at, bool is_before,
                    const struct lists *want, uint32_t *ret_n)
{
        unsigned n_starts;
        uint32_t armed = at;

        mark(s, act, at, is_before);
        s->has_died = false;
        act->prepare(s);
        wait_until_quiet(s);
        n_starts = kept_state(s->k).n_starts;
        s->k->rig->admin = raw_close(s->k->rig->admin);
        s->points->is_before = is_before;
        __atomic_store_n(&s->points->n, 0, __ATOMIC_RELEASE);
        __atomic_store_n(&s->points->at, at, __ATOMIC_RELEASE);
        act->run(s);
        wait_until_quiet(s);
        *ret_n = stores(s);
        s->has_died = !__atomic_compare_exchange_n(&s->points->at, &armed, 0, false, __ATOMIC_ACQ_REL,
                                                   __ATOMIC_ACQUIRE);
        __atomic_store_n(&s->points->at, 0, __ATOMIC_RELEASE);
        if (s->has_died)
                restart_twice(s, n_starts);
        else
                kept_ready(s->k);
        for (size_t i = 0; i < 2; i++)
                victim_check(&s->victims[i]);
        call(s->a); /* a client without a call resumes later */
        call(s->b);
        act->finish(s);
        assert_lists(s->k, want);
        rig_assert_clean_log(s->k->rig);
        return s->has_died;
}

/* At every store, until the act ends before it. */
static unsigned kill_at_each(struct scene *s, const struct act *act, bool is_before, const struct lists *want)
{
        uint32_t at = 1, n;

        while (run_act(s, act, at, is_before, want, &n)) {
                at++;
                ck_assert_uint_le(at, MAX_STORES);
        }
        return at - 1;
}

/* At n_points of n stores. */
static unsigned kill_at_some(struct scene *s, const struct act *act, uint32_t n, uint32_t n_points,
                             const struct lists *want)
{
        unsigned n_died = 0;
        uint32_t n_stores;

        for (uint32_t i = 0; i < n_points && i < n; i++) {
                uint32_t at = n <= n_points ? i + 1 : 1 + i * n / n_points;

                n_died += run_act(s, act, at, i % 2, want, &n_stores);
        }
        return n_died;
}

static const char *n_points(void)
{
        return getenv("BFC_TEST_POINTS");
}

/* Some acts have fewer stores. */
TEST(each_act_half_done_once)
{
        struct scene *s = scene_start();
        struct lists want = lists_take(s->k);
        unsigned n_died = 0, n_possible = 0;
        uint32_t n;

        for (uint32_t i = 0; i < N_ACTS; i++) {
                n_possible += is_possible(&acts[i]);
                n_died += is_possible(&acts[i]) && run_act(s, &acts[i], 1 + i % 9, i % 2, &want, &n);
        }
        printf("# died in %u of %u acts\n", n_died, n_possible);
        fflush(stdout);
        ck_assert_uint_gt(n_died, n_possible / 2);
        lists_free(&want);
        scene_stop(s);
}

LOOP_TEST(half_done_acts, suite_is_long() || n_points() ? N_ACTS : 0)
{
        const struct act *act = &acts[_i];
        const char *only = getenv("BFC_TEST_ACT");
        struct scene *s;
        struct lists want;
        unsigned n_died;
        uint32_t n;

        if (!is_possible(act) || (only && strcmp(only, act->name) != 0))
                return;
        s = scene_start();
        want = lists_take(s->k);
        ck_assert(!run_act(s, act, 0, false, &want, &n));
        if (n_points())
                n_died = kill_at_some(s, act, n, (uint32_t)atoi(n_points()), &want);
        else
                n_died = kill_at_each(s, act, false, &want) + kill_at_each(s, act, true, &want);
        printf("# %s: %u stores, died at %u points\n", act->name, n, n_died);
        fflush(stdout);
        ck_assert_uint_gt(n_died, 0);
        lists_free(&want);
        scene_stop(s);
}

int main(void)
{
        return harness_cases_with("half_done", 3600, NULL);
}
