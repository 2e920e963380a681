/* Which tenants have the memory: refusals, the log, bfcctl explain and bfcctl leaks, with real
 * processes.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "tests/integration/json.h"

enum { REFUSED = 1, USAGE = 2 }; /* exit statuses */

static const struct rig_config two_tenants = {
        .partitions = "      - {name: train, limit: 96MiB, growth: on-demand}\n",
        .tenants =
                TENANT("red", "@UID@", "train, limit: 80MiB") TENANT("blue", "@UID@", "train, limit: 80MiB"),
};

/* A process that holds 20 MiB with a tag until it is told to end. */
struct holder {
        const struct rig *rig;
        const char *tenant, *name, *tag;
        size_t n_blocks, n_bytes;
        struct gate has, may_end;
        pid_t pid;
};

static void hold(void *arg)
{
        const struct holder *h = arg;
        struct bfc_options options = { .struct_size = sizeof(options),
                                       .socket = h->rig->socket,
                                       .tenant = h->tenant,
                                       .name = h->name,
                                       .flags = CHILDREN_HAVE_EVENTS ? 0 : BFC_NO_THREAD };
        struct bfc_malloc_options how = { .struct_size = sizeof(how), .tag = h->tag };
        bfc_client *client;
        struct gate gate = h->has;
        void *p;

        REQUIRE(bfc_connect(&options, &client) == 0, "%s", bfc_last_error());
        for (size_t i = 0; i < h->n_blocks; i++)
                REQUIRE(bfc_malloc_with(client, h->n_bytes, &how, &p) == 0, "%s", bfc_last_error());
        gate_open(&gate);
        gate = h->may_end;
        REQUIRE(gate_wait(&gate, SETTLE_MS), "the test did not end this process");
        bfc_disconnect(client);
}

static void hold_begin(struct holder *h, const struct rig *rig)
{
        h->rig = rig;
        h->has = gate_new();
        h->may_end = gate_new();
        h->pid = child_start_until(&h->has, hold, h);
}

static void hold_end(struct holder *h)
{
        gate_open(&h->may_end);
        child_join(h->pid);
}

static void must_say(const char *sentence, const char *words)
{
        ck_assert_msg(strstr(sentence, words), "no \"%s\" in \"%s\"", words, sentence);
}

static void must_not_say(const char *sentence, const char *words)
{
        ck_assert_msg(!strstr(sentence, words), "\"%s\" in \"%s\"", words, sentence);
}

/* The tenant is told of its own and of others' sum; the log has all names. */
RIG_TEST(refusals_name_holders, two_tenants)
{
        struct holder mine = { .tenant = "red", .name = "mine", .n_blocks = 2, .n_bytes = 2 * MIB },
                      theirs = { .tenant = "blue", .name = "theirs", .n_blocks = 2, .n_bytes = 30 * MIB };
        bfc_client *client;
        char words[128], *log;
        void *no;

        hold_begin(&mine, rig);
        hold_begin(&theirs, rig);
        client = client_open(rig, "red", NULL);
        ck_assert_int_eq(bfc_malloc(client, 40 * MIB, &no), -ENOMEM);
        snprintf(words, sizeof(words), "(pid %d, mine): 4.0 MiB in 2 blocks", (int)mine.pid);
        must_say(bfc_last_error(), words);
        must_say(bfc_last_error(), "other tenants have 60.0 MiB reserved");
        must_not_say(bfc_last_error(), "theirs");
        must_not_say(bfc_last_error(), "blue");
        log = rig_log(rig);
        snprintf(words, sizeof(words), "(tenant 'blue', pid %d, theirs): 60.0 MiB in 2 blocks",
                 (int)theirs.pid);
        must_say(log, words);
        free(log);
        ck_assert_int_eq(bfc_malloc(client, 79 * MIB, &no), -EDQUOT);
        must_say(bfc_last_error(), "largest sessions: session");
        must_not_say(bfc_last_error(), "other tenants");
        bfc_disconnect(client);
        hold_end(&mine);
        hold_end(&theirs);
}

/* The row of a tenant; NULL tenant: the partition's. */
static json_t *row_of(json_t *rows, const char *tenant)
{
        for (size_t i = 0; i < json_array_size(rows); i++) {
                json_t *row = json_array_get(rows, i), *name = json_object_get(row, "tenant");

                if (tenant ? json_is_string(name) && strcmp(json_string_value(name), tenant) == 0
                           : json_is_null(name))
                        return row;
        }
        return NULL;
}

RIG_TEST(explain_on_both_sockets, two_tenants)
{
        struct holder mine = { .tenant = "red", .name = "mine", .n_blocks = 3, .n_bytes = 2 * MIB },
                      theirs = { .tenant = "blue", .name = "theirs", .n_blocks = 1, .n_bytes = 20 * MIB };
        json_int_t before = (json_int_t)time(NULL) * 1000;
        json_t *rows, *row, *holders;
        char *out, *err;

        hold_begin(&mine, rig);
        hold_begin(&theirs, rig);
        rows = ctl_json(rig->admin_socket, WORDS("--json", "explain"));
        ck_assert_uint_eq(json_array_size(rows), 3);
        row = row_of(rows, "red");
        ck_assert_int_eq(number_of(row, "bytes_in_use"), 6 << 20);
        ck_assert_int_eq(number_of(row, "num_allocs"), 3);
        ck_assert_int_eq(number_of(row, "largest_alloc_size"), 2 << 20);
        ck_assert_int_ge(number_of(row, "peak_bytes_in_use_time_ms"), before);
        ck_assert_int_ge(number_of(row, "peak_bytes_reserved_time_ms"), before);
        ck_assert_uint_eq(strlen(string_of(row, "occupancy")), 100);
        ck_assert_ptr_nonnull(strchr(string_of(row, "occupancy"), '#'));
        holders = json_object_get(row, "holders");
        ck_assert_uint_eq(json_array_size(holders), 1);
        ck_assert_int_eq(number_of(json_array_get(holders, 0), "pid"), mine.pid);
        ck_assert_str_eq(string_of(json_array_get(holders, 0), "name"), "mine");
        ck_assert_int_eq(number_of(json_array_get(holders, 0), "largest_block_bytes"), 2 << 20);
        ck_assert_ptr_nonnull(row_of(rows, "blue"));
        ck_assert_int_eq(number_of(row_of(rows, NULL), "bytes_in_use"), 26 << 20);
        json_decref(rows);
        ck_assert_int_eq(ctl(rig->admin_socket, WORDS("explain", "train", "--tenant", "blue"), &out, NULL),
                         0);
        must_say(out, "Tenant blue in partition train\n");
        must_say(out, "theirs");
        must_say(out, "# used  . free");
        must_not_say(out, "red");
        must_say(out, "MaxReserved");
        free(out);
        ck_assert_int_eq(ctl(rig->admin_socket, WORDS("explain", "train"), &out, NULL), 0);
        must_say(strstr(out, "Partition train\n"), "MaxInUse");
        free(out);

        setenv("BFC_TENANT", "red", 1);
        ck_assert_int_eq(ctl(rig->socket, WORDS("explain", "train"), &out, NULL), 0);
        must_say(strstr(out, "Tenant red"), "MaxInUse"); /* the tenant's, not the partition's */
        ck_assert_msg(strstr(out, "MaxInUse") > strstr(out, "Tenant red"), "%s", out);
        ck_assert_msg(strstr(out, "MaxReserved") > strstr(out, "Tenant red"), "%s", out);
        free(out);
        ck_assert_int_eq(
                ctl(rig->socket, WORDS("partitions", "--wide", "--columns", "PEAK,AGO,PEAK-RES"), &out, NULL),
                0);
        must_say(out, "        -        -           -\n");
        free(out);
        ck_assert_int_eq(ctl(rig->socket, WORDS("--json", "explain"), &out, NULL), 0);
        must_say(out, "mine");
        must_not_say(out, "blue");
        must_not_say(out, "theirs");
        free(out);
        rows = ctl_json(rig->socket, WORDS("--json", "explain"));
        ck_assert_int_eq(number_of(row_of(rows, NULL), "bytes_in_use"), 6 << 20);
        ck_assert_int_ge(number_of(row_of(rows, NULL), "bytes_reserved"), 26 << 20);
        json_decref(rows);
        ck_assert_int_eq(ctl(rig->socket, WORDS("explain", "--tenant", "blue"), NULL, &err), REFUSED);
        must_say(err, "there is no tenant 'blue'; you can see: red in train");
        free(err);
        ck_assert_int_eq(ctl(rig->socket, WORDS("explain", "nowhere"), NULL, NULL), REFUSED);
        ck_assert_int_eq(ctl(rig->socket, WORDS("explain", "a", "b"), NULL, NULL), USAGE);
        ck_assert_int_eq(ctl(rig->socket, WORDS("status", "--tenant", "red"), NULL, NULL), USAGE);
        hold_end(&mine);
        hold_end(&theirs);
}

RIG_TEST(leaks_by_each_key, two_tenants)
{
        struct holder weights = { .tenant = "red",
                                  .name = "one",
                                  .tag = "weights",
                                  .n_blocks = 150,
                                  .n_bytes = 1000 },
                      other = { .tenant = "red",
                                .name = "two",
                                .tag = "weights",
                                .n_blocks = 2,
                                .n_bytes = MIB },
                      theirs = { .tenant = "blue", .name = "three", .n_blocks = 1, .n_bytes = 512 };
        json_t *rows, *row;
        char *out;

        hold_begin(&weights, rig);
        hold_begin(&other, rig);
        hold_begin(&theirs, rig);
        rows = ctl_json(rig->admin_socket, WORDS("--json", "leaks"));
        ck_assert_uint_eq(json_array_size(rows), 2);
        row = json_array_get(rows, 0);
        ck_assert_str_eq(string_of(row, "tag"), "weights");
        ck_assert_int_eq(number_of(row, "num_blocks"), 152);
        ck_assert_int_eq(number_of(row, "bytes_in_use"), 150 * 1024 + (2 << 20));
        ck_assert_int_eq(number_of(row, "bytes_requested"), 150 * 1000 + (2 << 20));
        ck_assert_str_eq(string_of(json_array_get(rows, 1), "tag"), "");
        json_decref(rows);
        rows = ctl_json(rig->admin_socket, WORDS("--json", "leaks", "--by", "session", "--tenant", "red"));
        ck_assert_uint_eq(json_array_size(rows), 2);
        ck_assert_int_eq(number_of(json_array_get(rows, 0), "pid"), other.pid);
        ck_assert_str_eq(string_of(json_array_get(rows, 1), "name"), "one");
        json_decref(rows);
        rows = ctl_json(rig->admin_socket, WORDS("--json", "leaks", "--by", "block"));
        ck_assert_uint_eq(json_array_size(rows), 153);
        json_decref(rows);
        rows = ctl_json(rig->admin_socket, WORDS("--json", "leaks", "--older", "1d"));
        ck_assert_uint_eq(json_array_size(rows), 0);
        json_decref(rows);
        setenv("BFC_TENANT", "blue", 1);
        ck_assert_int_eq(ctl(rig->socket, WORDS("leaks", "--by", "session"), &out, NULL), 0);
        must_say(out, "three");
        must_not_say(out, "red");
        free(out);
        ck_assert_int_eq(ctl(rig->socket, WORDS("leaks", "--by", "colour"), NULL, NULL), USAGE);
        ck_assert_int_eq(ctl(rig->socket, WORDS("leaks", "--older", "soon"), NULL, NULL), USAGE);
        ck_assert_int_eq(ctl(rig->socket, WORDS("leaks", "red"), NULL, NULL), USAGE);
        ck_assert_int_eq(ctl(rig->socket, WORDS("leaks", "--tenant", "red"), NULL, NULL), REFUSED);
        ck_assert_int_eq(ctl(rig->admin_socket, WORDS("leaks", "--tenant", "nosuch"), NULL, &out), REFUSED);
        must_say(out, "There is no tenant '");
        must_say(out, "you can see: ");
        free(out);
        ck_assert_int_eq(ctl(rig->admin_socket, WORDS("evict", "1KiB"), NULL, NULL), USAGE);
        hold_end(&weights);
        hold_end(&other);
        hold_end(&theirs);
}

/* ---- leaks beside caches ----------------------------------------------------------- */

enum { N_LIVE = 64, N_LEAKED = 300 };

struct cached_job {
        const struct rig *rig;
        const char *name;
        bool leaks;
        _Atomic uint64_t n_rounds;
};

/* Small ones, which magazines keep, and large ones. */
static size_t churned_size(uint64_t round)
{
        return round % 2 ? 4096 : 400000 + round % 7 * 20000;
}

static void run_cached_job(void *arg)
{
        struct cached_job *job = arg;
        struct bfc_options options = { .struct_size = sizeof(options),
                                       .socket = job->rig->socket,
                                       .tenant = "red",
                                       .name = job->name,
                                       .flags = CHILDREN_HAVE_EVENTS ? 0 : BFC_NO_THREAD };
        void *live[N_LIVE] = { 0 }, *leaked;
        bfc_client *client;

        setenv("BFC_CACHE", "on", 1);
        REQUIRE(bfc_connect(&options, &client) == 0, "%s", bfc_last_error());
        for (unsigned i = 0; job->leaks && i < N_LEAKED; i++)
                REQUIRE(bfc_malloc(client, 10000, &leaked) == 0, "%s", bfc_last_error());
        for (;;) {
                uint64_t round = atomic_fetch_add(&job->n_rounds, 1);
                void **at = &live[round % N_LIVE];

                REQUIRE(bfc_free(client, *at) == 0, "%s", bfc_last_error());
                REQUIRE(bfc_malloc(client, job->leaks ? 1000 : churned_size(round), at) == 0, "%s",
                        bfc_last_error());
                if (round % N_LIVE == 0)
                        usleep(1000);
        }
}

/* Only the leak is old, and none of what the other job holds, although its slabs are. */
static bool only_the_leak_is_old(const struct rig *rig, pid_t leaking)
{
        json_t *rows =
                ctl_json(rig->admin_socket, WORDS("--json", "leaks", "--by", "session", "--older", "1s"));
        json_t *row = json_array_get(rows, 0);
        bool is = json_array_size(rows) == 1 && number_of(row, "pid") == leaking &&
                  number_of(row, "bytes_in_use") >= N_LEAKED * 10000 &&
                  number_of(row, "bytes_in_use") < N_LEAKED * 10240 + N_LIVE * 1024;

        json_decref(rows);
        return is;
}

static bool slabs_are_old(const struct rig *rig, pid_t churning)
{
        json_t *sessions = ctl_json(rig->admin_socket, WORDS("--json", "sessions")),
               *blocks = ctl_json(rig->admin_socket, WORDS("--json", "blocks"));
        json_int_t id = 0, sum = 0;

        for (size_t i = 0; i < json_array_size(sessions); i++)
                if (number_of(json_array_get(sessions, i), "pid") == churning)
                        id = number_of(json_array_get(sessions, i), "session_id");
        for (size_t i = 0; i < json_array_size(blocks); i++) {
                json_t *block = json_array_get(blocks, i);

                if (number_of(block, "session_id") == id && number_of(block, "age_ms") >= 1000)
                        sum += number_of(block, "n_bytes");
        }
        json_decref(sessions);
        json_decref(blocks);
        return sum > N_LEAKED * 10240 + N_LIVE * 1024;
}

RIG_TEST(leaks_are_listed_before_caches, two_tenants)
{
        struct cached_job *healthy = shared_memory(sizeof(*healthy)), *leak = shared_memory(sizeof(*leak));
        pid_t churning, leaking;

        *healthy = (struct cached_job){ .rig = rig, .name = "healthy" };
        *leak = (struct cached_job){ .rig = rig, .name = "leak", .leaks = true };
        churning = child_start(run_cached_job, healthy);
        leaking = child_start(run_cached_job, leak);
        /* Without a cache there are no slabs, and the daemon knows all ages. */
        ck_assert(!CHILDREN_HAVE_EVENTS || WAIT_FOR(slabs_are_old(rig, churning), 60000));
        ck_assert(WAIT_FOR(only_the_leak_is_old(rig, leaking), 60000));
        child_kill(churning);
        child_kill(leaking);
}
