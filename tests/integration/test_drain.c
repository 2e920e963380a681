/* Devices that are drained and resumed by bfcctl while jobs use them, or would like to.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
#include <errno.h>
#include <jansson.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "tests/integration/load.h"
#include "tests/integration/tools.h"

#define TIMED_OUT   3          /* exit status: what was asked for is under way */
#define EARLY_BYTES (16 * MIB) /* made in advance */

static const struct rig_config config = {
        .partitions = "      - {name: train, limit: 96MiB, growth: on-demand}\n"
                      "      - {name: early, limit: 32MiB, growth: preallocate}\n",
        .tenants = "  - name: red\n"
                   "    match: {uid: @UID@}\n"
                   "    quotas: [{partition: train, limit: 64MiB, reserve: 16MiB},\n"
                   "             {partition: early, limit: 16MiB}]\n" TENANT("blue", "@UID@",
                                                                             "train, limit: 64MiB"),
};

static void must_drain(const struct rig *rig)
{
        ctl_says(rig, WORDS("drain", rig_device_id(), "--wait", "120"), "is drained.");
}

static void must_resume(const struct rig *rig)
{
        ctl_says(rig, WORDS("resume", rig_device_id()), "is resumed.");
}

static void state_of(const struct rig *rig, char ret[32], uint64_t *ret_reserved)
{
        Bfcd__Reply *page;

        ck_assert_int_eq(raw_list(rig->admin, BFCD__LIST__KIND__STATUS, 0, &page), 0);
        snprintf(ret, 32, "%s", page->list->status->devices[0]->state);
        if (ret_reserved)
                *ret_reserved = page->list->status->devices[0]->bytes_reserved;
        bfcd__reply__free_unpacked(page, NULL);
}

static bool is_in_state(const struct rig *rig, const char *state)
{
        char now[32];

        state_of(rig, now, NULL);
        return strcmp(now, state) == 0;
}

/* Nothing is charged on the device but this tenant's share of "train". */
static bool only_has(struct rig *rig, const char *tenant)
{
        uint64_t n_bytes;
        char state[32];

        state_of(rig, state, &n_bytes);
        return n_bytes == rig_stats(rig, tenant, "train").bytes_reserved;
}

/* Primary contexts on the machine that the fake driver pretends. */
/* ---- what operators do ------------------------------------------------------ */

TEST(drain_and_resume_an_idle_device)
{
        struct rig *rig;
        uint64_t n_bytes;
        char state[32];
        bfc_client *client;
        void *p;

        setenv("FAKE_CUDA_CONTEXT_BYTES", "1MiB", 1);
        rig = rig_start(&config);
        unsetenv("FAKE_CUDA_CONTEXT_BYTES");
        ck_assert_uint_eq(rig_keeper(rig, "cuda:0") != 0, rig_device() != ON_HOST);
        state_of(rig, state, &n_bytes);
        ck_assert_uint_eq(n_bytes, EARLY_BYTES);
        must_drain(rig);
        state_of(rig, state, &n_bytes);
        ck_assert_str_eq(state, "drained");
        ck_assert_uint_eq(n_bytes, 0);
        ck_assert_int_eq(rig_keeper(rig, "cuda:0"), 0); /* so no process of ours has the device open */
        ck_assert_uint_eq(rig_count(rig).n_extents, 0);
        ctl_says(rig, WORDS("status"), "drained");
        ctl_says(rig, WORDS("drain", rig_device_id()), "is drained.");
        must_resume(rig);
        ck_assert_uint_eq(rig_keeper(rig, "cuda:0") != 0, rig_device() != ON_HOST);
        state_of(rig, state, &n_bytes);
        ck_assert_str_eq(state, "ok");
        ck_assert_uint_eq(n_bytes, EARLY_BYTES);
        client = client_open(rig, "red", NULL);
        ck_assert_ok(bfc_malloc(client, 3 * MIB, &p));
        pattern_write(p, 3 * MIB, 1);
        ck_assert(pattern_holds(p, 3 * MIB, 1));
        ck_assert_ok(bfc_malloc_in(client, "early", EARLY_BYTES, &p));
        bfc_disconnect(client);
        rig_stop(rig);
}

/* The job keeps its session, and what it frees or has idle is released by its client thread. */
RIG_TEST(drain_waits_for_a_job, config)
{
        void *held, *idle, *none = NULL;
        bfc_client *client;
        char *out, *err, pid[32];

        setenv("BFC_CACHE", "on", 1);
        client = client_open(rig, "red", "train");
        unsetenv("BFC_CACHE");
        ck_assert_ok(bfc_malloc(client, 3 * MIB, &held));
        pattern_write(held, 3 * MIB, 2);
        ck_assert_ok(bfc_malloc(client, 9 * MIB, &idle));
        ck_assert_ok(bfc_free(client, idle));
        ck_assert_int_eq(ctl(rig->admin_socket, WORDS("drain", rig_device_id(), "--wait=1"), &out, &err),
                         TIMED_OUT);
        snprintf(pid, sizeof(pid), " %d ", (int)getpid());
        ck_assert_msg(strstr(out, "is draining; still in use: ") && strstr(out, pid) && strstr(out, "red "),
                      "%s", out);
        ck_assert_msg(strstr(err, "is not drained yet"), "%s", err);
        free(out);
        free(err);
        ck_assert(WAIT_FOR(rig_stats(rig, "red", "train").bytes_in_use <= 4 * MIB, SETTLE_MS));
        ck_assert_int_eq(bfc_malloc(client, 20 * MIB, &none), -EBUSY);
        ck_assert_msg(strstr(bfc_last_error(), "is draining or drained"), "%s", bfc_last_error());
        ck_assert(pattern_holds(held, 3 * MIB, 2));
        ck_assert(is_in_state(rig, "draining"));
        ctl_says(rig, WORDS("explain", "train"), "Tenant red");
        ck_assert_ok(bfc_free(client, held));
        must_drain(rig);
        ck_assert_int_eq(bfc_malloc_in(client, "early", MIB, &none), -EBUSY);
        ck_assert_ptr_null(none);
        must_resume(rig);
        ck_assert_ok(bfc_malloc(client, 20 * MIB, &held));
        pattern_write(held, 20 * MIB, 3);
        ck_assert(pattern_holds(held, 20 * MIB, 3));
        ck_assert_ok(bfc_free(client, held));
        bfc_disconnect(client);
}

RIG_TEST(drain_and_resume_in_json, config)
{
        bfc_client *client = client_open(rig, "blue", NULL);
        json_t *document, *drain, *holder;
        char *out;
        void *p;

        ck_assert_ok(bfc_malloc(client, MIB, &p));
        ctl_says(rig, WORDS("drain", rig_device_id()), "drain");
        ck_assert(WAIT_FOR(only_has(rig, "blue"), SETTLE_MS)); /* what has no holder is gone */
        ck_assert_int_eq(ctl(rig->admin_socket, WORDS("--json", "drain", rig_device_id()), &out, NULL), 0);
        document = json_loads(out, JSON_REJECT_DUPLICATES, NULL);
        ck_assert_msg(document != NULL, "%s", out);
        drain = json_object_get(document, "drain");
        ck_assert_str_eq(json_string_value(json_object_get(drain, "device")), rig_device_id());
        ck_assert_str_eq(json_string_value(json_object_get(drain, "state")), "draining");
        ck_assert_uint_eq(json_array_size(json_object_get(drain, "holders")), 1);
        holder = json_array_get(json_object_get(drain, "holders"), 0);
        ck_assert_str_eq(json_string_value(json_object_get(holder, "tenant")), "blue");
        ck_assert_int_eq(json_integer_value(json_object_get(holder, "pid")), getpid());
        json_decref(document);
        free(out);
        ctl_says(rig, WORDS("--json", "resume", rig_device_id()), "\"resume\"");
        bfc_disconnect(client);
}

RIG_TEST(invalid_drains_are_refused, config)
{
        struct raw *raw = session_open(rig->socket, NULL);
        Bfcd__Drain drain = BFCD__DRAIN__INIT;
        Bfcd__Request request = REQUEST(DRAIN, drain, &drain);
        Bfcd__Resume resume = BFCD__RESUME__INIT;
        char sentence[96];

        drain.device = resume.device = (char *)(uintptr_t)rig_device_id();
        ck_assert_int_eq(raw_do(raw, &request), -EACCES);
        request.id = 0;
        request.body_case = BFCD__REQUEST__BODY_RESUME;
        request.resume = &resume;
        ck_assert_int_eq(raw_do(raw, &request), -EACCES);
        ck_assert(is_in_state(rig, "ok"));
        raw_close(raw);
        snprintf(sentence, sizeof(sentence), "there is no device 'gpu0'; the devices are: '%s'",
                 rig_device_id());
        ctl_refuses(rig, WORDS("drain", "gpu0"), 1, sentence);
        ctl_refuses(rig, WORDS("resume", "gpu0"), 1, sentence);
        ctl_refuses(rig, WORDS("resume", rig_device_id()), 1, "is not drained: it is ok");
        ctl_refuses(rig, WORDS("drain"), 2, "bfcctl drain DEVICE");
        ctl_refuses(rig, WORDS("resume"), 2, "bfcctl resume DEVICE");
        ctl_refuses(rig, WORDS("drain", "--wait", "3x", "host"), 2, "a time, as in 30s");
        ctl_refuses(rig, WORDS("drain", "--wait=-1", "host"), 2, "a time, as in 30s");
        ctl_refuses(rig, WORDS("status", "--wait"), 2, "--wait is not valid for");
        ck_assert(is_in_state(rig, "ok"));
}

/* ---- events ---------------------------------------------------------------- */

static void assert_told(struct raw *raw, uint32_t n_partitions, bool is_over)
{
        for (uint32_t i = 0; i < n_partitions; i++) {
                Bfcd__Event *event;

                ck_assert_int_eq(raw_event(raw, RAW_TIMEOUT_MS, &event), 0);
                ck_assert_int_eq(event->body_case, BFCD__EVENT__BODY_DRAINING);
                ck_assert_uint_eq(event->draining->partition, i);
                ck_assert_int_eq(event->draining->is_over, is_over);
                bfcd__event__free_unpacked(event, NULL);
        }
}

static struct raw *open_raw(const struct rig *rig, bool wants_events)
{
        struct raw *raw;

        ck_assert_int_eq(raw_open(rig->socket, &raw), 0);
        raw->wants_events = wants_events;
        ck_assert_int_eq(raw_hello(raw, "red", NULL), 0);
        return raw;
}

/* Sessions that started before the drain and during it. One without an events socket is told nothing. */
RIG_TEST(sessions_are_told, config)
{
        struct raw *raw = open_raw(rig, true), *old = open_raw(rig, false), *late;
        bfc_client *client;
        void *p;

        must_drain(rig);
        assert_told(raw, 2, false);
        late = open_raw(rig, true);
        assert_told(late, 2, false);
        client = client_open(rig, "blue", NULL);
        ck_assert_int_eq(bfc_malloc(client, MIB, &p), -EBUSY);
        must_resume(rig);
        assert_told(raw, 2, true);
        assert_told(late, 2, true);
        ck_assert_ok(bfc_malloc(client, MIB, &p));
        bfc_disconnect(client);
        raw_close(raw);
        raw_close(old);
        raw_close(late);
}

/* ---- beside other things ----------------------------------------------------- */

static void reload(struct rig *rig, const struct rig_config *next)
{
        rig_rewrite_config(rig, next);
        ctl_says(rig, WORDS("reload"), "");
}

TEST(a_reload_of_a_drained_device)
{
        static const struct rig_config next = {
                .partitions = "      - {name: train, limit: 64MiB, growth: on-demand}\n"
                              "      - {name: early, limit: 32MiB, growth: preallocate}\n",
                .tenants = "  - name: red\n"
                           "    match: {uid: @UID@}\n"
                           "    quotas: [{partition: train, limit: 32MiB},\n"
                           "             {partition: early, limit: 16MiB}]\n" TENANT("green", "@UID@",
                                                                                     "train, limit: 32MiB"),
        };
        struct rig *rig = rig_start(&config);
        bfc_client *client, *blue = client_open(rig, "blue", NULL);
        void *p;

        must_drain(rig);
        reload(rig, &next);
        ck_assert(is_in_state(rig, "drained"));
        client = client_open(rig, "green", NULL);
        ck_assert_int_eq(bfc_malloc(client, MIB, &p), -EBUSY);
        must_resume(rig);
        ck_assert_ok(bfc_malloc(client, 30 * MIB, &p));
        ck_assert_int_eq(bfc_malloc(client, 30 * MIB, &p), -EDQUOT);
        bfc_disconnect(client);
        bfc_disconnect(blue);
        rig_stop(rig);
}

/* 0: while a client has a block. 1: drained. */
LOOP_TEST(sigterm_while_it_drains, 2)
{
        struct rig *rig = rig_start(&config);
        bfc_client *client = client_open(rig, "red", NULL);
        void *p = NULL;

        if (_i == 0)
                ck_assert_ok(bfc_malloc(client, MIB, &p));
        ctl_says(rig, WORDS("drain", rig_device_id()), _i == 0 ? "is draining" : "Device ");
        ck_assert(WAIT_FOR(is_in_state(rig, _i == 0 ? "draining" : "drained"), SETTLE_MS));
        rig_terminate(rig);
        bfc_disconnect(client);
        rig_discard(rig);
}

struct scene {
        char socket[96];
        struct gate up;
};

static void hold(void *arg)
{
        struct scene *s = arg;
        bfc_client *client = child_client_open(s->socket, "blue");
        void *p;

        REQUIRE(bfc_malloc(client, 8 * MIB, &p) == 0, "%s", bfc_last_error());
        gate_open(&s->up);
        pause();
}

/* Its process dies, and so it is drained; two operators wait for that. */
RIG_TEST(a_job_that_is_killed, config)
{
        struct scene *s = shared_memory(sizeof(*s));
        char *out;
        pid_t job;

        strcpy(s->socket, rig->socket);
        s->up = gate_new();
        job = child_start_until(&s->up, hold, s);
        ck_assert_int_eq(ctl(rig->admin_socket, WORDS("drain", "--wait", "0", rig_device_id()), &out, NULL),
                         TIMED_OUT);
        text_has(out, "blue");
        child_kill(job);
        must_drain(rig);
        must_drain(rig);
        must_resume(rig);
}

/* ---- under load --------------------------------------------------------------- */

RIG_TEST(repeated_drains_under_load, config)
{
        double until = (double)clock_ms() + 1000 * test_seconds(suite_is_long() ? 2 : 1);
        struct load *l = load_start(rig, 4, -EBUSY, 0);
        unsigned n_rounds = 0;

        while ((double)clock_ms() < until) {
                uint64_t n_allocs = l->n_allocs;

                ck_assert(WAIT_FOR(l->n_allocs > n_allocs + 50, SETTLE_MS));
                must_drain(rig);
                ck_assert_uint_eq(rig_count(rig).n_blocks, 0);
                must_resume(rig);
                n_rounds++;
        }
        load_end(l);
        printf("# %u drains; %llu blocks, %llu refusals\n", n_rounds, (unsigned long long)l->n_allocs,
               (unsigned long long)l->n_others);
        ck_assert_uint_gt(n_rounds, 0);
}
