/* Kept blocks with real processes: they outlive their publisher, kill -9 and restarts of the daemon, and end
 * by their time or by Forget.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "tests/integration/json.h"
#include "tests/integration/kept.h"
#include "tests/integration/tools.h"

#define N_BYTES (5 * MIB + 100)

static const struct rig_config two_tenants = {
        .top = "timeouts: {quarantine: 100ms}\n",
        .tenants = TENANT("red", "@UID@", "train, limit: 64MiB")
                TENANT("blue", "@UID@, @OTHER@", "train, limit: 48MiB"),
};

static const char metadata[] = "{\"w\":{\"dtype\":\"F32\",\"shape\":[8]}}";

struct job {
        char socket[96];
        uint64_t keep_ms;
        struct gate up, go;
};

static struct job job_new(const struct rig *rig, uint64_t keep_ms)
{
        struct job job = { .keep_ms = keep_ms, .up = gate_new(), .go = gate_new() };

        strcpy(job.socket, rig->socket);
        return job;
}

static void publish_weights(void *arg)
{
        struct job *job = arg;
        bfc_client *client = child_client_open(job->socket, "red");
        const struct bfc_publish_options options = { .struct_size = sizeof(options),
                                                     .keep_ms = job->keep_ms,
                                                     .metadata = metadata,
                                                     .n_metadata_bytes = sizeof(metadata) };
        void *p = NULL;

        REQUIRE(bfc_malloc_flags(client, NULL, N_BYTES, BFC_WHOLE, &p) == 0, "%s", bfc_last_error());
        block_fill(client, p, N_BYTES, 7);
        REQUIRE(bfc_publish_with(client, p, "weights", &options) == 0, "%s", bfc_last_error());
        gate_meet(&job->up, &job->go);
        bfc_disconnect(client);
}

/* Attaches a block without references, with its contents and metadata. */
static void assert_weights(const struct rig *rig)
{
        bfc_client *client = client_open(rig, "red", NULL);
        char text[2 * sizeof(metadata)];
        size_t n_bytes = 0, n = 0;
        void *p;

        ck_assert_ok(bfc_attach(client, "weights", 0, &p, &n_bytes));
        ck_assert_uint_eq(n_bytes, N_BYTES);
        ck_assert(block_has(client, p, N_BYTES, 7));
        ck_assert_ok(bfc_shared_metadata(client, p, text, sizeof(text), &n));
        ck_assert_uint_eq(n, sizeof(metadata));
        ck_assert_str_eq(text, metadata);
        ck_assert_ok(bfc_shared_metadata(client, p, NULL, 0, &n));
        ck_assert_uint_eq(n, sizeof(metadata));
        ck_assert_int_eq(bfc_shared_metadata(client, text, text, 1, &n), -EINVAL);
        bfc_disconnect(client);
}

static void assert_nobody(struct rig *rig)
{
        ck_assert(WAIT_FOR(rig_count(rig).n_sessions == 0, SETTLE_MS));
}

static void forget(struct rig *rig)
{
        ctl_says(rig, WORDS("forget", "red", "weights"), "no longer");
        ck_assert(WAIT_FOR(rig_charge(rig, "red", "train") == 0, SETTLE_MS));
}

/* It says goodbye, or is killed. */
LOOP_TEST(a_kept_block_outlives_its_publisher, 2)
{
        struct rig *rig = rig_start(&two_tenants);
        struct job job = job_new(rig, BFC_KEEP_FOREVER);
        pid_t pid = child_start_until(&job.up, publish_weights, &job);
        bfc_client *client;
        void *p;

        if (_i == 1) {
                child_kill(pid);
        } else {
                gate_open(&job.go);
                child_join(pid);
        }
        assert_nobody(rig);
        ck_assert_uint_eq(rig_stats(rig, "red", "train").num_blocks, 1);
        ck_assert_uint_eq(rig_stats(rig, "red", "train").bytes_in_use, rounded(N_BYTES));
        assert_weights(rig);
        assert_nobody(rig);
        client = client_open(rig, "blue", NULL); /* another tenant */
        ck_assert_int_eq(bfc_attach(client, "weights", 0, &p, NULL), -ENOENT);
        ck_assert_int_eq(bfc_forget(client, "weights"), -ENOENT);
        bfc_disconnect(client);
        client = client_open(rig, "red", NULL);
        ck_assert_ok(bfc_forget(client, "weights"));
        ck_assert_int_eq(bfc_forget(client, "weights"), -ENOENT);
        ck_assert_int_eq(bfc_attach(client, "weights", 0, &p, NULL), -ENOENT);
        bfc_disconnect(client);
        ck_assert_uint_eq(rig_stats(rig, "red", "train").num_blocks, 0);
        rig_stop(rig);
}

static unsigned count_lines(const struct rig *rig, const char *words)
{
        char *log = rig_log(rig);
        unsigned n = 0;

        for (const char *at = log; (at = strstr(at, words)); at++)
                n++;
        free(log);
        return n;
}

/* Its lines are limited, as all that a client causes at will; and Forget of a block that is not kept has none. */
RIG_TEST(a_client_does_not_fill_the_log, two_tenants)
{
        struct bfc_publish_options keep = { .struct_size = sizeof(keep), .keep_ms = BFC_KEEP_FOREVER };
        bfc_client *client = client_open(rig, "red", NULL);
        void *p;

        ck_assert_ok(bfc_malloc_flags(client, NULL, 4096, BFC_WHOLE, &p));
        ck_assert_ok(bfc_publish(client, p, "not-kept"));
        for (int i = 0; i < 300; i++)
                ck_assert_ok(bfc_forget(client, "not-kept"));
        ck_assert_uint_eq(count_lines(rig, "no longer kept"), 0);
        for (int i = 0; i < 300; i++) {
                ck_assert_ok(bfc_malloc_flags(client, NULL, 4096, BFC_WHOLE, &p));
                ck_assert_ok(bfc_publish_with(client, p, "kept", &keep));
                ck_assert_ok(bfc_detach(client, p));
                ck_assert_ok(bfc_forget(client, "kept"));
        }
        ck_assert_uint_ge(count_lines(rig, "no longer kept"), 1);
        ck_assert_uint_lt(count_lines(rig, "kept"), 100);
        ck_assert_uint_eq(count_lines(rig, "its time is up"), 0);
        bfc_disconnect(client);
}

RIG_TEST(its_time_ends, two_tenants)
{
        struct job job = job_new(rig, 50);
        pid_t pid = child_start_until(&job.up, publish_weights, &job);

        usleep(100000); /* it has a reference */
        ck_assert_uint_eq(rig_stats(rig, "red", "train").num_blocks, 1);
        gate_open(&job.go);
        child_join(pid);
        ck_assert(WAIT_FOR(rig_charge(rig, "red", "train") == 0, SETTLE_MS));
}

/* The daemon ends twice while no process has the block. */
TEST(kept_blocks_survive_restarts)
{
        struct kept *k = kept_start(&two_tenants);
        struct job job = job_new(k->rig, BFC_KEEP_FOREVER);
        pid_t pid = child_start_until(&job.up, publish_weights, &job);

        child_kill(pid);
        assert_nobody(k->rig);
        kept_restart(k, SIGKILL);
        assert_weights(k->rig);
        assert_nobody(k->rig);
        kept_restart(k, SIGTERM);
        assert_weights(k->rig);
        assert_nobody(k->rig);
        forget(k->rig);
        ck_assert_uint_eq(rig_charge(k->rig, "red", "train"), 0);

        kept_stop(k);
}

/* The publisher dies with the daemon. */
TEST(publisher_and_daemon_are_killed)
{
        struct kept *k = kept_start(&two_tenants);
        struct job job = job_new(k->rig, BFC_KEEP_FOREVER);
        pid_t pid = child_start_until(&job.up, publish_weights, &job);

        kept_away(k, SIGKILL);
        child_kill(pid);
        kept_back(k);
        assert_nobody(k->rig);
        assert_weights(k->rig);
        forget(k->rig);

        kept_stop(k);
}

/* ---- lists ------------------------------------------------------------------ */

static int count_rows(void *userdata, const struct bfc_shared_info *info)
{
        unsigned *n = userdata;

        ck_assert_uint_eq(info->struct_size, sizeof(*info));
        ck_assert_str_eq(info->partition, "train");
        ++*n;
        return 0;
}

static int find_weights(void *userdata, const struct bfc_shared_info *info)
{
        struct bfc_shared_info *ret = userdata;

        if (strcmp(info->name, "weights") != 0)
                return 0;
        *ret = *info;
        return 42;
}

RIG_TEST(lists_of_shared_blocks, two_tenants)
{
        struct job job = job_new(rig, 3600000);
        pid_t pid = child_start(publish_weights, &job); /* before this process uses the driver */
        bfc_client *client = client_open(rig, "red", NULL), *blue = client_open(rig, "blue", NULL);
        const struct bfc_publish_options options = { .struct_size = sizeof(options), .keep_ms = 1 };
        struct bfc_shared_info info;
        unsigned n = 0;
        json_t *rows;
        char name[16];
        void *p;

        for (int i = 0; i < 150; i++) { /* more than a page */
                ck_assert_ok(bfc_malloc_flags(client, NULL, 1, BFC_WHOLE, &p));
                snprintf(name, sizeof(name), "n%d", i);
                ck_assert_ok(bfc_publish_with(client, p, name, &options));
        }
        gate_open(&job.go);
        child_join(pid);
        ck_assert(WAIT_FOR(rig_count(rig).n_sessions == 2, SETTLE_MS));
        ck_assert_ok(bfc_list_shared(client, count_rows, &n));
        ck_assert_uint_eq(n, 151);
        n = 0;
        ck_assert_ok(bfc_list_shared(blue, count_rows, &n));
        ck_assert_uint_eq(n, 0);
        ck_assert_int_eq(bfc_list_shared(client, find_weights, &info), 42);
        ck_assert_uint_eq(info.n_bytes, N_BYTES);
        ck_assert_uint_eq(info.num_references, 0);
        ck_assert_uint_eq(info.keep_ms, 3600000);
        ck_assert(info.left_ms > 0 && info.left_ms <= 3600000);
        ck_assert_uint_eq(info.n_metadata_bytes, sizeof(metadata));

        rows = ctl_json(rig->admin_socket, WORDS("--json", "keep"));
        ck_assert_uint_eq(json_array_size(rows), 151);
        json_decref(rows);
        ctl_says(rig, WORDS("--wide", "keep"), "weights");
        ctl_says(rig, WORDS("shared"), "KEEP");
        bfc_disconnect(client);
        bfc_disconnect(blue);
        forget(rig);
}

/* ---- read-only ----------------------------------------------------------------- */

static const struct bfc_attach_options read_only = { .struct_size = sizeof(read_only),
                                                     .flags = BFC_ATTACH_READ_ONLY };

/* A write ends it by SIGSEGV. */
static void write_to_weights(void *arg)
{
        const struct job *job = arg;
        bfc_client *client = child_client_open(job->socket, "red");
        void *p = NULL;

        REQUIRE(bfc_attach_with(client, "weights", &read_only, &p, NULL) == 0, "%s", bfc_last_error());
        signal(SIGSEGV, SIG_DFL); /* a sanitizer would report it */
        *(volatile char *)p = 1;
        _exit(98);
}

/* As it was before there were flags. */
struct first_attach_options {
        size_t struct_size;
        uint32_t wait_ms;
        int cancel_fd;
};

RIG_TEST(read_only_views, two_tenants)
{
        struct job job = job_new(rig, BFC_KEEP_FOREVER);
        pid_t pid = child_start_until(&job.up, publish_weights, &job);
        struct first_attach_options first = { .struct_size = sizeof(first) };
        struct bfc_attach_options bad = read_only;
        bfc_client *client, *writer;
        void *p, *q;
        int status;

        if (rig_device() == ON_HOST) {
                pid_t writes = child_start(write_to_weights, &job);

                ck_assert_int_eq(waitpid(writes, &status, 0), writes);
                ck_assert(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
        }
        client = client_open(rig, "red", NULL);
        if (rig_device() == ON_CUDA_IPC) {
                ck_assert_int_eq(bfc_attach_with(client, "weights", &read_only, &p, NULL), -ENOTSUP);
                ck_assert_ptr_nonnull(strstr(bfc_last_error(), "cuda-ipc"));
        } else {
                ck_assert_ok(bfc_attach_with(client, "weights", &read_only, &p, NULL));
                ck_assert(block_has(client, p, N_BYTES, 7));
                ck_assert_int_eq(bfc_write(client, p, "x", 1), -EACCES);
                ck_assert_int_eq(bfc_attach(client, "weights", 0, &q, NULL), -EBUSY);
                if (rig_device() == ON_HOST) {
                        ck_assert_int_eq(mprotect(p, 4096, PROT_READ | PROT_WRITE), -1);
                        ck_assert_int_eq(errno, EACCES);
                }
                ck_assert_ok(bfc_detach(client, p));
                writer = client_open(rig, "red", NULL);
                ck_assert_ok(bfc_attach_with(writer, "weights", (void *)&first, &q, NULL));
                ck_assert_ok(bfc_write(writer, q, "", 1));
                ck_assert_int_eq(bfc_attach_with(writer, "weights", &read_only, &p, NULL), -EBUSY);
                bfc_disconnect(writer);
                /* After the read-only reference its client gets write access like any other. */
                ck_assert_ok(bfc_attach(client, "weights", 0, &p, NULL));
                ck_assert_ok(bfc_write(client, p, "", 1));
        }
        bad.flags = 2;
        ck_assert_int_eq(bfc_attach_with(client, "weights", &bad, &p, NULL), -EINVAL);
        gate_open(&job.go);
        child_join(pid);
        bfc_disconnect(client);
        forget(rig);
}

/* A process of the tenant under another user: what it was sent cannot be opened for writing. */
static void reopen_extents(void *arg)
{
        const struct job *job = arg;
        struct raw *raw = raw_connect(job->socket, "blue");
        Bfcd__Attach attach = BFCD__ATTACH__INIT;
        Bfcd__Request request = REQUEST(ATTACH, attach, &attach);
        Bfcd__Reply *reply = NULL;
        char path[64];

        REQUIRE(raw, "no connection");
        attach.name = (char *)(uintptr_t) "weights";
        attach.read_only = true;
        REQUIRE(raw_call(raw, &request, &reply) == 0, "no reply");
        REQUIRE(reply->body_case == BFCD__REPLY__BODY_ATTACHED, "refused");
        REQUIRE(raw->n_extents > 0, "no extents");
        for (size_t i = 0; i < raw->n_extents; i++) {
                int fd = raw->extents[i].fd;

                REQUIRE((fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDONLY, "it can be written to");
                REQUIRE(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED, "mapped");
                snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
                REQUIRE(open(path, O_RDWR | O_CLOEXEC) < 0 && errno == EACCES, "%s", strerror(errno));
        }
        bfcd__reply__free_unpacked(reply, NULL);
        raw_close(raw);
}

TEST(another_user_cannot_reopen)
{
        struct rig *rig;
        const struct bfc_publish_options options = { .struct_size = sizeof(options), .keep_ms = 1 };
        struct job job;
        bfc_client *client;
        void *p;

        if (!is_root() || rig_device() != ON_HOST) {
                printf("# skipped: it needs root and host memory\n");
                return;
        }
        rig = rig_start(&two_tenants);
        job = job_new(rig, 0);
        client = client_open(rig, "blue", NULL);
        ck_assert_ok(bfc_malloc_flags(client, NULL, N_BYTES, BFC_WHOLE, &p));
        ck_assert_ok(bfc_publish_with(client, p, "weights", &options));
        child_join(child_start_as(OTHER_UID, OTHER_UID, reopen_extents, &job));
        bfc_disconnect(client);
        ck_assert(WAIT_FOR(rig_charge(rig, "blue", "train") == 0, SETTLE_MS));
        rig_stop(rig);
}
