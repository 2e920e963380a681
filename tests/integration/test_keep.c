/* Memory that a quota keeps for its next job: jobs are processes of their own, and what each is given
 * is compared by the ids of its extents, which are never used again.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "tests/integration/kept.h"
#include "tests/integration/tools.h"

#define JOB_BYTES (24 * MIB) /* with cuda-ipc from 16 MiB on a block has an extent of its own */
#define MAX_IDS   64u
#define RED(keep)                                                                                            \
        "  - name: red\n    match: {uid: @UID@}\n    quotas: [{partition: train, limit: 64MiB" keep "}]\n"
#define BLUE       "  - name: blue\n    match: {uid: @UID@}\n    quotas: [{partition: train, limit: 64MiB}]\n"
#define PARTITIONS "      - {name: train, limit: 64MiB}\n"

static const struct rig_config keeps = { .partitions = PARTITIONS,
                                         .tenants = RED(", keep: {bytes: 64MiB, for: 60m}") BLUE };
static const struct rig_config keeps_little = { .partitions = PARTITIONS,
                                                .tenants = RED(", keep: {bytes: 8MiB, for: 60m}") BLUE };
static const struct rig_config keeps_shortly = { .partitions = PARTITIONS,
                                                 .tenants = RED(", keep: {bytes: 64MiB, for: 100ms}") BLUE };
static const struct rig_config keeps_nothing = { .partitions = PARTITIONS, .tenants = RED("") BLUE };
static const struct rig_config keeps_for_restart = {
        .top = "timeouts: {quarantine: 60m}\n",
        .partitions = PARTITIONS,
        .tenants = RED(", keep: {bytes: 64MiB, for: 60m}") BLUE,
};

/* ---- jobs ----------------------------------------------------------------- */

/* In memory that the job shares with the test. */
struct job {
        char socket[96];
        uint64_t n_bytes;
        bool hangs_up;
        struct gate up, done; /* of one that hangs up */
        size_t n_ids;
        uint64_t ids[MAX_IDS];
};

static int compare_ids(const void *x, const void *y)
{
        const uint64_t *p = x, *q = y;

        return *p < *q ? -1 : *p > *q;
}

static struct job *job_new(const struct rig *rig, uint64_t n_bytes)
{
        struct job *job = shared_memory(sizeof(*job));

        snprintf(job->socket, sizeof(job->socket), "%s", rig->socket);
        job->n_bytes = n_bytes;
        return job;
}

/* It ends without a goodbye, as a job that is killed. */
static void job_run(void *arg)
{
        struct job *job = arg;
        struct raw *raw = raw_connect(job->socket, "red");
        Bfcd__Block block;

        REQUIRE(raw, "no connection");
        REQUIRE(raw_malloc(raw, 0, job->n_bytes, &block) == 0, "%s", raw_refusal());
        REQUIRE(raw->n_extents <= MAX_IDS, "%zu extents", raw->n_extents);
        for (job->n_ids = 0; job->n_ids < raw->n_extents; job->n_ids++)
                job->ids[job->n_ids] = raw->extents[job->n_ids].id;
        qsort(job->ids, job->n_ids, sizeof(job->ids[0]), compare_ids);
        if (!job->hangs_up)
                return;
        close(raw->fd); /* this process keeps the extents */
        raw->fd = -1;
        gate_open(&job->up);
        gate_wait(&job->done, SETTLE_MS);
}

/* A job begins and ends; all of its memory has been released or kept. */
static void run(struct rig *rig, struct job *job)
{
        uint64_t n_before = rig_count(rig).n_sessions;

        child_join(child_start(job_run, job));
        ck_assert(WAIT_FOR(rig_count(rig).n_sessions == n_before && rig_count(rig).bytes_pending == 0,
                           SETTLE_MS));
}

static void assert_same_extents(const struct job *a, const struct job *b)
{
        ck_assert_uint_gt(a->n_ids, 0);
        ck_assert_uint_eq(a->n_ids, b->n_ids);
        ck_assert_int_eq(memcmp(a->ids, b->ids, a->n_ids * sizeof(a->ids[0])), 0);
}

/* ---- what the daemon says ------------------------------------------------- */

static uint64_t red_kept(struct rig *rig)
{
        Bfcd__Reply *reply = NULL;
        uint64_t n_bytes = 0;

        ck_assert_int_eq(raw_list(rig->admin, BFCD__LIST__KIND__TENANTS, 0, &reply), 0);
        for (size_t i = 0; i < reply->list->n_tenants; i++)
                if (strcmp(reply->list->tenants[i]->tenant, "red") == 0)
                        n_bytes = reply->list->tenants[i]->bytes_kept;
        bfcd__reply__free_unpacked(reply, NULL);
        return n_bytes;
}

static uint64_t red_reserved(struct rig *rig)
{
        return rig_stats(rig, "red", "train").bytes_reserved;
}

static void trim(struct rig *rig)
{
        ctl_says(rig, WORDS("trim", "red"), "");
        ck_assert(WAIT_FOR(red_reserved(rig) == 0, SETTLE_MS));
        ck_assert_uint_eq(red_kept(rig), 0);
}

/* ---- the tests ------------------------------------------------------------ */

RIG_TEST(kept_extents_are_reused, keeps)
{
        struct job *first = job_new(rig, JOB_BYTES), *second = job_new(rig, JOB_BYTES);

        run(rig, first);
        ck_assert_uint_eq(red_reserved(rig), JOB_BYTES);
        ck_assert_uint_eq(red_kept(rig), JOB_BYTES);
        run(rig, second);
        assert_same_extents(first, second);
        ck_assert_uint_eq(red_kept(rig), JOB_BYTES);
        trim(rig);
        run(rig, second);
        ck_assert_uint_gt(second->ids[0], first->ids[first->n_ids - 1]); /* these are new */
        trim(rig);
}

RIG_TEST(kept_memory_is_limited_by_the_config, keeps_little)
{
        struct job *first = job_new(rig, JOB_BYTES), *second = job_new(rig, 8 * MIB);
        bool in_pieces = rig_device() != ON_CUDA_IPC; /* there it is one extent */

        run(rig, first);
        ck_assert_uint_eq(red_reserved(rig), in_pieces ? 8 * MIB : JOB_BYTES);
        ck_assert_uint_eq(red_kept(rig), red_reserved(rig));
        run(rig, second);
        ck_assert_int_eq(memcmp(first->ids, second->ids, second->n_ids * sizeof(first->ids[0])), 0);
        trim(rig);
}

RIG_TEST(another_tenant_reclaims_kept_memory, keeps)
{
        struct job *job = job_new(rig, 48 * MIB);
        struct raw *blue;
        Bfcd__Block block;

        run(rig, job);
        ck_assert_uint_eq(red_kept(rig), 48 * MIB);
        blue = session_open(rig->socket, "blue");
        ck_assert_msg(raw_malloc(blue, 0, 48 * MIB, &block) == 0, "%s", raw_refusal());
        ck_assert_uint_le(red_reserved(rig), 16 * MIB);
        ck_assert_uint_eq(red_kept(rig), red_reserved(rig));
        for (size_t i = 0; i < blue->n_extents; i++)
                ck_assert_uint_gt(blue->extents[i].id, job->ids[job->n_ids - 1]); /* never handed on */
        session_end(blue);
        trim(rig);
}

RIG_TEST(kept_memory_expires, keeps_shortly)
{
        struct job *job = job_new(rig, JOB_BYTES);

        for (unsigned i = 0; i < 3; i++) {
                child_join(child_start(job_run, job));
                ck_assert(WAIT_FOR(rig_count(rig).n_sessions == 0 && red_reserved(rig) == 0, SETTLE_MS));
        }
}

RIG_TEST(a_drain_releases_the_memory, keeps)
{
        struct job *job = job_new(rig, JOB_BYTES);

        run(rig, job);
        ck_assert_uint_eq(red_kept(rig), JOB_BYTES);
        ctl_says(rig, WORDS("drain", rig_device_id(), "--wait"), "");
        ck_assert_uint_eq(red_reserved(rig), 0);
        ctl_says(rig, WORDS("resume", rig_device_id()), "");
        run(rig, job);
        ck_assert_uint_eq(red_kept(rig), JOB_BYTES);
        trim(rig);
}

RIG_TEST(a_reload_changes_the_size, keeps)
{
        struct job *job = job_new(rig, JOB_BYTES);
        char *said;

        run(rig, job);
        rig_rewrite_config(rig, &keeps_little);
        said = ctl_text(rig, WORDS("reload", "--dry-run"));
        ck_assert_ptr_nonnull(strstr(
                said,
                "tenant 'red' in partition 'train': keep is 8MiB for 3600000ms, was 64MiB for 3600000ms\n"));
        ck_assert_uint_eq(red_kept(rig), JOB_BYTES);
        free(said);
        ctl_says(rig, WORDS("reload"), "");
        ck_assert(WAIT_FOR(red_reserved(rig) == (rig_device() == ON_CUDA_IPC ? JOB_BYTES : 8 * MIB),
                           SETTLE_MS));
        rig_rewrite_config(rig, &keeps_nothing);
        ctl_says(rig, WORDS("reload"),
                 "tenant 'red' in partition 'train': keep is none, was 8MiB for 3600000ms\n");
        ck_assert(WAIT_FOR(red_reserved(rig) == 0, SETTLE_MS));
        rig_rewrite_config(rig, &keeps);
        ctl_says(rig, WORDS("reload"), "");
        run(rig, job);
        ck_assert_uint_eq(red_kept(rig), JOB_BYTES);
        trim(rig);
}

/* A session that hung up may still write into its extents: they are kept when its process has ended. */
RIG_TEST(a_quarantined_sessions_extents_are_not_kept, keeps_for_restart)
{
        struct job *late = job_new(rig, 16 * MIB), *job = job_new(rig, 16 * MIB);
        pid_t pid;

        late->hangs_up = true;
        late->up = gate_new();
        late->done = gate_new();
        pid = child_start_until(&late->up, job_run, late);
        ck_assert(WAIT_FOR(rig_count(rig).n_quarantined == 1, SETTLE_MS));
        ck_assert_uint_eq(red_kept(rig), 0);
        run(rig, job);
        for (size_t i = 0; i < job->n_ids; i++)
                ck_assert_ptr_null(
                        bsearch(&job->ids[i], late->ids, late->n_ids, sizeof(late->ids[0]), compare_ids));
        ck_assert_uint_eq(rig_count(rig).n_quarantined, 1);
        ck_assert_uint_eq(red_kept(rig), 16 * MIB);
        ck_assert_uint_eq(red_reserved(rig), 32 * MIB);
        gate_open(&late->done);
        child_join(pid);
        ck_assert(WAIT_FOR(rig_count(rig).n_sessions == 0, SETTLE_MS));
        ck_assert_uint_eq(red_kept(rig), 32 * MIB);
        trim(rig);
}

/* The time begins again with the daemon. */
TEST(the_memory_after_a_restart)
{
        struct kept *k;
        struct job *first, *next;

        if (rig_device() == ON_CUDA_IPC)
                return; /* its memory goes with the daemon */
        k = kept_start(&keeps_for_restart);
        first = job_new(k->rig, JOB_BYTES);
        next = job_new(k->rig, JOB_BYTES);
        run(k->rig, first);
        kept_restart(k, SIGKILL);
        ck_assert_uint_eq(red_kept(k->rig), JOB_BYTES);
        run(k->rig, next);
        assert_same_extents(first, next);
        rig_rewrite_config(k->rig, &keeps_nothing);
        kept_restart(k, SIGKILL);
        ck_assert(WAIT_FOR(red_reserved(k->rig) == 0, SETTLE_MS));
        kept_stop(k);
}
