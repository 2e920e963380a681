/* A GPU's memory belongs to a process of its own: what happens when that one ends, or does not answer. The fake driver's
 * GPUs only.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/integration/tools.h"
#include "tests/keeper_caller.h"

#define SETTLE_MS 120000

/* The second device has 96 MiB, see harness.c. */
static const struct rig_config two_gpus = {
        .size = "128MiB",
        .partitions = "      - {name: train, limit: 64MiB, growth: on-demand}\n"
                      "  - id: cuda:1\n"
                      "    headroom: 0\n"
                      "    partitions:\n"
                      "      - {name: other, limit: 64MiB, growth: on-demand}\n",
        .tenants = TENANT_OF("red", "@UID@", "{partition: train}, {partition: other}"),
};

static bool maps_driver(pid_t pid)
{
        char path[64], *maps;
        bool maps_it;

        snprintf(path, sizeof(path), "/proc/%d/maps", (int)pid);
        maps = file_text(path);
        ck_assert_ptr_nonnull(maps);
        maps_it = strstr(maps, "libcuda") != NULL;
        free(maps);
        return maps_it;
}

RIG_TEST(bfcd_loads_no_driver, two_gpus)
{
        bfc_client *client = client_open(rig, NULL, "train");
        void *p;

        ck_assert_ok(bfc_malloc(client, MIB, &p));
        ck_assert(!maps_driver(rig->pid));
        ck_assert(maps_driver(rig_keeper(rig, "cuda:0")));
        ck_assert(maps_driver(rig_keeper(rig, "cuda:1")));
        bfc_disconnect(client);
}

/* What a keeper of another GPU does or suffers is not seen. */
static void use_other(bfc_client *client)
{
        void *p;

        for (unsigned i = 0; i < 20; i++) {
                ck_assert_ok(bfc_malloc_in(client, "other", 3 * MIB, &p));
                pattern_write(p, 3 * MIB, i);
                ck_assert(pattern_holds(p, 3 * MIB, i));
                ck_assert_ok(bfc_free(client, p));
                ck_assert_ok(bfc_trim(client, SIZE_MAX));
        }
}

static bool device_is(const struct rig *rig, const char *state)
{
        Bfcd__Reply *page;
        bool is;

        ck_assert_int_eq(raw_list(rig->admin, BFCD__LIST__KIND__STATUS, 0, &page), 0);
        is = strcmp(page->list->status->devices[0]->state, state) == 0;
        bfcd__reply__free_unpacked(page, NULL);
        return is;
}

TEST(a_killed_keeper_is_a_lost_device)
{
        struct rig *rig = rig_start(&two_gpus);
        bfc_client *client = client_open(rig, NULL, "train"), *other = client_open(rig, NULL, "other");
        pid_t keeper = rig_keeper(rig, "cuda:0");
        void *p, *q;

        ck_assert_ok(bfc_malloc(client, 3 * MIB, &p));
        ck_assert_int_eq(kill(keeper, SIGKILL), 0);
        ck_assert_int_eq(bfc_malloc(client, 40 * MIB, &q), -ENODEV);
        use_other(other);
        ck_assert(device_is(rig, "lost"));
        rig->forgiven = "error: ";
        bfc_disconnect(client); /* the last who has memory there */
        ck_assert(WAIT_FOR(device_is(rig, "ok"), SETTLE_MS));
        ck_assert_int_ne(rig_keeper(rig, "cuda:0"), keeper);
        use_other(other);
        client = client_open(rig, NULL, "train");
        ck_assert_ok(bfc_malloc(client, 60 * MIB, &p));
        pattern_write(p, 60 * MIB, 1);
        ck_assert(pattern_holds(p, 60 * MIB, 1));
        bfc_disconnect(client);
        bfc_disconnect(other);
        rig_stop(rig);
}

static bool is_replaced(const struct rig *rig, const char *id, pid_t was)
{
        pid_t pid = rig_keeper(rig, id);

        return pid > 0 && pid != was;
}

/* Nothing is asked of it. */
TEST(the_end_of_an_idle_keeper_is_noticed)
{
        struct rig *rig = rig_start(&two_gpus);
        bfc_client *client = client_open(rig, NULL, "train"), *other = client_open(rig, NULL, "other");
        pid_t keeper = rig_keeper(rig, "cuda:0");
        void *p;

        rig->forgiven = "error: ";
        ck_assert_int_eq(kill(keeper, SIGKILL), 0); /* without memory there: it is opened again at once */
        ck_assert(WAIT_FOR(is_replaced(rig, "cuda:0", keeper), SETTLE_MS));
        ck_assert(WAIT_FOR(device_is(rig, "ok"), SETTLE_MS));
        ck_assert_ok(bfc_malloc(client, 3 * MIB, &p));
        keeper = rig_keeper(rig, "cuda:0");
        ck_assert_int_eq(kill(keeper, SIGKILL), 0);
        ck_assert(WAIT_FOR(device_is(rig, "lost"), SETTLE_MS));
        use_other(other);
        bfc_disconnect(client);
        ck_assert(WAIT_FOR(device_is(rig, "ok"), SETTLE_MS));
        bfc_disconnect(other);
        rig_stop(rig);
}

static void stop(pid_t pid)
{
        char path[64], state = '\0', *text;

        snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
        ck_assert_int_eq(kill(pid, SIGSTOP), 0);
        while (state != 'T') {
                text = file_text(path);
                ck_assert_int_eq(sscanf(text, "%*d (%*[^)]) %c", &state), 1);
                free(text);
        }
}

static void *grow(void *userdata)
{
        void *p;

        ck_assert_ok(bfc_malloc(userdata, 40 * MIB, &p));
        return p;
}

/* As one whose driver hangs. */
RIG_TEST(a_stopped_keeper_delays_its_own_device, two_gpus)
{
        bfc_client *client = client_open(rig, NULL, "train"), *other = client_open(rig, NULL, "other");
        pid_t keeper = rig_keeper(rig, "cuda:0");
        pthread_t thread;
        void *p;

        stop(keeper);
        ck_assert_int_eq(pthread_create(&thread, NULL, grow, client), 0);
        ck_assert(WAIT_FOR(rig_charge(rig, "red", "train") > 0, SETTLE_MS));
        use_other(other);
        ck_assert(WAIT_FOR(device_is(rig, "hung"), SETTLE_MS));
        ck_assert(rig_logged(rig, "device 'cuda:0' (Fake CUDA Device 0) is hung"));
        use_other(other);
        ck_assert_int_eq(kill(keeper, SIGCONT), 0);
        ck_assert_int_eq(pthread_join(thread, &p), 0);
        ck_assert(WAIT_FOR(device_is(rig, "ok"), SETTLE_MS));
        pattern_write(p, 40 * MIB, 1);
        ck_assert(pattern_holds(p, 40 * MIB, 1));
        bfc_disconnect(client);
        bfc_disconnect(other);
}

static void *try_to_grow(void *userdata)
{
        void *p;

        ck_assert_int_lt(bfc_malloc(userdata, 40 * MIB, &p), 0);
        return NULL;
}

/* The way out of a call that never returns. */
TEST(a_hung_keeper_can_be_ended)
{
        struct rig *rig = rig_start(&two_gpus);
        bfc_client *client = client_open(rig, NULL, "train");
        pid_t keeper = rig_keeper(rig, "cuda:0");
        pthread_t thread;
        void *p;

        stop(keeper);
        ck_assert_int_eq(pthread_create(&thread, NULL, try_to_grow, client), 0);
        ck_assert(WAIT_FOR(device_is(rig, "hung"), SETTLE_MS));
        ck_assert_int_eq(kill(keeper, SIGKILL), 0);
        ck_assert_int_eq(pthread_join(thread, NULL), 0);
        rig->forgiven = "error: ";
        ck_assert(WAIT_FOR(device_is(rig, "ok"), SETTLE_MS));
        ck_assert_ok(bfc_malloc(client, 40 * MIB, &p));
        bfc_disconnect(client);
        rig_stop(rig);
}

TEST(bfcd_ends_beside_a_stopped_keeper)
{
        struct rig *rig = rig_start(&two_gpus);
        bfc_client *client = client_open(rig, NULL, "train");
        pid_t keeper = rig_keeper(rig, "cuda:0");
        pthread_t thread;

        stop(keeper);
        ck_assert_int_eq(pthread_create(&thread, NULL, try_to_grow, client), 0);
        ck_assert(WAIT_FOR(rig_charge(rig, "red", "train") > 0, SETTLE_MS));
        rig_terminate(rig);
        ck_assert(WAIT_FOR(kill(keeper, 0) < 0, SETTLE_MS));
        ck_assert_int_eq(pthread_join(thread, NULL), 0);
        bfc_disconnect(client);
        rig_discard(rig);
}

TEST(keepers_end_with_a_killed_bfcd)
{
        struct rig *rig = rig_start(&two_gpus);
        pid_t keepers[] = { rig_keeper(rig, "cuda:0"), rig_keeper(rig, "cuda:1") };

        ck_assert_int_gt(keepers[0], 0);
        ck_assert_int_gt(keepers[1], 0);
        child_kill(rig->pid);
        for (size_t i = 0; i < 2; i++)
                ck_assert(WAIT_FOR(kill(keepers[i], 0) < 0, SETTLE_MS));
        rig_discard(rig);
}

static void start_bfcd(struct rig *rig)
{
        rig->pid = rig_spawn_daemon(rig);
        ck_assert(WAIT_FOR(rig_answers(rig), SETTLE_MS));
        rig_meet(rig);
}

/* One device of each kind, and a GPU of each share mode. */
static const struct rig_config each_kind = {
        .size = "128MiB",
        .partitions = "      - {share: fd, name: train, limit: 64MiB, growth: on-demand}\n"
                      "  - id: cuda:1\n"
                      "    headroom: 0\n"
                      "    partitions:\n"
                      "      - {share: cuda-ipc, name: other, limit: 64MiB, growth: on-demand}\n"
                      "  - id: host\n"
                      "    size: 128MiB\n"
                      "    partitions:\n"
                      "      - {limit: 64MiB, name: memory, growth: on-demand}\n",
        .tenants = TENANT_OF("red", "@UID@", "{partition: train}, {partition: other}, {partition: memory}"),
};

/* Without a service manager: who starts another bfcd does not matter. */
TEST(keepers_outlive_bfcd)
{
        static const char *const names[] = { "train", "other", "memory" };
        unsigned n_kills = getenv("BFC_TEST_LONG") ? 200 : 5;
        struct rig *rig = rig_folder();
        char *text = rig_config_text(rig, &each_kind), *blocks[3];
        bfc_client *clients[3];

        rig_write_config(rig, text);
        free(text);
        setenv("BFCD_KEEP", "1", 1);
        setenv("BFC_RETURN_MS", "300000", 1);
        start_bfcd(rig);
        for (unsigned k = 0; k < 3; k++) {
                clients[k] = client_open(rig, NULL, names[k]);
                ck_assert_ok(bfc_malloc(clients[k], 30 * MIB, (void **)&blocks[k]));
        }
        for (unsigned i = 0; i < n_kills; i++) {
                void *more;

                for (unsigned k = 0; k < 3; k++)
                        pattern_write(blocks[k], 30 * MIB, i + k);
                child_kill(rig->pid);
                rig->admin = raw_close(rig->admin);
                start_bfcd(rig);
                for (unsigned k = 0; k < 3; k++) {
                        ck_assert_ok(bfc_malloc(clients[k], 5 * MIB, &more));
                        ck_assert_ok(bfc_free(clients[k], more));
                        ck_assert_uint_eq(client_usage(clients[k], names[k]).bytes_in_use, 30 * MIB);
                        ck_assert(pattern_holds(blocks[k], 30 * MIB, i + k));
                }
        }
        for (unsigned k = 0; k < 3; k++) {
                bfc_disconnect(clients[k]);
                ck_assert(WAIT_FOR(rig_charge(rig, "red", names[k]) == 0, SETTLE_MS));
        }
        rig_stop(rig);
}

static bool state_is(const struct rig *rig, const char *id, const char *state)
{
        Bfcd__Reply *page;
        bool is = false;

        ck_assert_int_eq(raw_list(rig->admin, BFCD__LIST__KIND__STATUS, 0, &page), 0);
        for (size_t i = 0; i < page->list->status->n_devices; i++)
                if (strcmp(page->list->status->devices[i]->id, id) == 0)
                        is = strcmp(page->list->status->devices[i]->state, state) == 0;
        bfcd__reply__free_unpacked(page, NULL);
        return is;
}

static struct rig *start_kept(const struct rig_config *config)
{
        struct rig *rig = rig_folder();
        char *text = rig_config_text(rig, config);

        rig_write_config(rig, text);
        free(text);
        setenv("BFCD_KEEP", "1", 1);
        setenv("BFC_RETURN_MS", "300000", 1);
        start_bfcd(rig);
        return rig;
}

static bool host_keeper_is_next(const struct rig *rig, pid_t was)
{
        pid_t pid = keeper_pid_in(rig->folder, "host");

        return pid > 0 && pid != was;
}

/* No session notices it, and the next bfcd finds all. */
TEST(a_killed_host_keeper_is_replaced)
{
        struct rig *rig = start_kept(&each_kind);
        bfc_client *client = client_open(rig, NULL, "memory");
        pid_t keeper = keeper_pid_in(rig->folder, "host");
        void *more;
        char *p;

        ck_assert_ok(bfc_malloc(client, 30 * MIB, (void **)&p));
        pattern_write(p, 30 * MIB, 1);
        for (int i = 0; i < 2; i++) {
                ck_assert_int_eq(kill(keeper, SIGKILL), 0);
                if (i == 0)
                        ck_assert_ok(bfc_malloc(client, 5 * MIB, &more));
                ck_assert(WAIT_FOR(host_keeper_is_next(rig, keeper), SETTLE_MS));
                keeper = keeper_pid_in(rig->folder, "host");
        }
        ck_assert(WAIT_FOR(rig_logged(rig, "another keeper of host memory has the ledger"), SETTLE_MS));
        ck_assert_ok(bfc_free(client, more));
        ck_assert_ok(bfc_trim(client, SIZE_MAX));
        ck_assert_ok(bfc_malloc(client, 10 * MIB, &more));
        child_kill(rig->pid);
        rig->admin = raw_close(rig->admin);
        start_bfcd(rig);
        ck_assert_uint_eq(client_usage(client, "memory").bytes_in_use, 40 * MIB);
        ck_assert(pattern_holds(p, 30 * MIB, 1));
        ck_assert_int_eq(keeper_pid_in(rig->folder, "host"), keeper);
        bfc_disconnect(client);
        ck_assert(WAIT_FOR(rig_charge(rig, "red", "memory") == 0, SETTLE_MS));
        rig_stop(rig);
}

/* It is shown as a GPU's, and replaced: a request waits for that, and other devices see nothing. */
TEST(a_stopped_host_keeper_is_replaced)
{
        struct rig *rig = start_kept(&each_kind);
        bfc_client *client = client_open(rig, NULL, "memory"), *other = client_open(rig, NULL, "other");
        pid_t keeper = keeper_pid_in(rig->folder, "host");
        pthread_t thread;
        void *p;

        stop(keeper);
        ck_assert_int_eq(pthread_create(&thread, NULL, grow, client), 0);
        ck_assert(WAIT_FOR(rig_charge(rig, "red", "memory") > 0, SETTLE_MS));
        use_other(other);
        ck_assert(WAIT_FOR(state_is(rig, "host", "hung"), SETTLE_MS));
        use_other(other);
        ck_assert_int_eq(pthread_join(thread, &p), 0);
        pattern_write(p, 40 * MIB, 1);
        ck_assert(pattern_holds(p, 40 * MIB, 1));
        ck_assert(WAIT_FOR(state_is(rig, "host", "ok"), SETTLE_MS));
        ck_assert(host_keeper_is_next(rig, keeper));
        ck_assert(kill(keeper, 0) < 0);
        bfc_disconnect(client);
        bfc_disconnect(other);
        ck_assert(WAIT_FOR(rig_charge(rig, "red", "memory") == 0, SETTLE_MS));
        rig_stop(rig);
}

static void *try_to_grow_later(void *userdata)
{
        void *p;

        (void)bfc_malloc(userdata, 40 * MIB, &p);
        return NULL;
}

TEST(bfcd_ends_beside_a_stopped_host_keeper)
{
        struct rig *rig = start_kept(&each_kind);
        bfc_client *client = client_open(rig, NULL, "memory");
        pid_t keeper = keeper_pid_in(rig->folder, "host");
        pthread_t thread;

        stop(keeper);
        ck_assert_int_eq(pthread_create(&thread, NULL, try_to_grow_later, client), 0);
        ck_assert(WAIT_FOR(rig_charge(rig, "red", "memory") > 0, SETTLE_MS));
        rig_terminate(rig);
        (void)kill(keeper, SIGKILL);
        ck_assert(WAIT_FOR(keeper_pid_in(rig->folder, "host") != keeper, SETTLE_MS));
        start_bfcd(rig);
        ck_assert_int_eq(pthread_join(thread, NULL), 0);
        bfc_disconnect(client);
        rig_stop(rig);
}

/* One that is stopped meanwhile is ended by the next bfcd, after a minute: what it had is lost, and nothing else. */
LOOP_TEST(a_keeper_that_does_not_answer_is_replaced, getenv("BFC_TEST_LONG") ? 1 : 0)
{
        struct rig_config config = two_gpus;
        struct rig *rig = rig_folder();
        char *text;
        bfc_client *client, *other;
        char *p, *q;
        void *more;

        config.tenants = TENANT("red", "@UID@", "train") TENANT("blue", "@UID@", "other");
        text = rig_config_text(rig, &config);
        rig_write_config(rig, text);
        free(text);
        setenv("BFCD_KEEP", "1", 1);
        setenv("BFC_RETURN_MS", "300000", 1);
        start_bfcd(rig);
        client = client_open(rig, "red", "train");
        other = client_open(rig, "blue", "other");
        ck_assert_ok(bfc_malloc(client, 30 * MIB, (void **)&p));
        ck_assert_ok(bfc_malloc(other, 20 * MIB, (void **)&q));
        pattern_write(q, 20 * MIB, 1);
        stop(keeper_pid_in(rig->folder, "cuda:0"));
        child_kill(rig->pid);
        rig->admin = raw_close(rig->admin);
        rig->forgiven = "error:";
        start_bfcd(rig);
        ck_assert_int_eq(bfc_malloc(client, 5 * MIB, &more), -ECONNRESET);
        ck_assert_ok(bfc_malloc(other, 5 * MIB, &more));
        ck_assert(pattern_holds(q, 20 * MIB, 1));
        bfc_disconnect(client);
        bfc_disconnect(other);
        client = client_open(rig, "red", "train");
        ck_assert_ok(bfc_malloc(client, 30 * MIB, (void **)&p));
        bfc_disconnect(client);
        rig_terminate(rig); /* what red had stays charged */
        rig_discard(rig);
}

/* ---- keepers that another program starts ----------------------------------------- */

static pid_t start_external(const struct rig *rig, const char *id)
{
        char program[256], socket[128];
        pid_t pid = fork();

        ck_assert_int_ge(pid, 0);
        if (pid > 0)
                return pid;
        snprintf(program, sizeof(program), "%s", rig->bfcd);
        snprintf(strrchr(program, '/'), sizeof("/bfcd-keeper"), "/bfcd-keeper");
        snprintf(socket, sizeof(socket), "%s/keepers/%s", rig->folder, id);
        execl(program, "bfcd-keeper", id, "--socket", socket, (char *)NULL);
        _exit(127);
}

/* As the kubelet: starts each, and again when it has ended. It ends with what it started, or with this process. */
static pid_t start_manager(const struct rig *rig)
{
        static const char *const ids[] = { "host", "cuda:0", "cuda:1" };
        pid_t parent = getpid(), pids[3], manager = fork(), ended;
        int null;

        ck_assert_int_ge(manager, 0);
        if (manager > 0)
                return manager;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent)
                _exit(1);
        null = open("/dev/null", O_RDWR);
        for (int fd = 0; fd <= 2; fd++)
                dup2(null, fd);
        for (size_t i = 0; i < 3; i++)
                pids[i] = start_external(rig, ids[i]);
        while ((ended = waitpid(-1, NULL, 0)) > 0)
                for (size_t i = 0; i < 3; i++)
                        if (pids[i] == ended) {
                                usleep(200000);
                                pids[i] = start_external(rig, ids[i]);
                        }
        _exit(1);
}

static bool has_keepers(const struct rig *rig)
{
        return keeper_pid_in(rig->folder, "host") > 0 && keeper_pid_in(rig->folder, "cuda:0") > 0 &&
               keeper_pid_in(rig->folder, "cuda:1") > 0;
}

/* bfcd starts before them and after them, is killed and ended, and they are: jobs lose what a lost GPU had, and no more. */
TEST(external_keepers_outlive_bfcd)
{
        static const char *const names[] = { "train", "other", "memory" };
        struct rig *rig = rig_folder();
        char *text = rig_config_text(rig, &each_kind), *blocks[3];
        bfc_client *clients[3];
        pid_t manager, host, gpu;
        void *more;

        rig_write_config(rig, text);
        free(text);
        rig->option = "--external-keepers";
        setenv("BFC_RETURN_MS", "300000", 1);
        rig->pid = rig_spawn_daemon(rig);
        manager = start_manager(rig);
        ck_assert(WAIT_FOR(rig_answers(rig), SETTLE_MS));
        rig_meet(rig);
        host = keeper_pid_in(rig->folder, "host");
        ck_assert_int_ne(host, 0);
        for (unsigned k = 0; k < 3; k++) {
                clients[k] = client_open(rig, NULL, names[k]);
                ck_assert_ok(bfc_malloc(clients[k], 30 * MIB, (void **)&blocks[k]));
        }
        for (unsigned i = 0; i < 4; i++) {
                for (unsigned k = 0; k < 3; k++)
                        pattern_write(blocks[k], 30 * MIB, i + k);
                if (i % 2 == 0) {
                        child_kill(rig->pid);
                        rig->admin = raw_close(rig->admin);
                } else {
                        rig_terminate(rig);
                }
                start_bfcd(rig);
                for (unsigned k = 0; k < 3; k++) {
                        ck_assert_ok(bfc_malloc(clients[k], 5 * MIB, &more));
                        ck_assert_ok(bfc_free(clients[k], more));
                        ck_assert(pattern_holds(blocks[k], 30 * MIB, i + k));
                }
                ck_assert_int_eq(keeper_pid_in(rig->folder, "host"), host);
        }

        /* A new host keeper gets all that the first one had, which the next bfcd finds there. */
        ck_assert_int_eq(kill(host, SIGKILL), 0);
        ck_assert_ok(bfc_malloc(clients[2], 5 * MIB, &more));
        ck_assert(WAIT_FOR(rig_logged(rig, "another keeper of host memory has the ledger"), SETTLE_MS));
        ck_assert(host_keeper_is_next(rig, host));
        child_kill(rig->pid);
        rig->admin = raw_close(rig->admin);
        start_bfcd(rig);
        ck_assert_ok(bfc_free(clients[2], more));
        ck_assert(pattern_holds(blocks[2], 30 * MIB, 5));

        /* A GPU is opened again by the keeper that comes next. */
        gpu = keeper_pid_in(rig->folder, "cuda:1");
        rig->forgiven = "error: ";
        ck_assert_int_eq(kill(gpu, SIGKILL), 0);
        ck_assert(WAIT_FOR(!state_is(rig, "cuda:1", "ok"), SETTLE_MS));
        bfc_disconnect(clients[1]);
        ck_assert(WAIT_FOR(state_is(rig, "cuda:1", "ok"), SETTLE_MS));
        clients[1] = client_open(rig, NULL, "other");
        ck_assert_ok(bfc_malloc(clients[1], 30 * MIB, (void **)&blocks[1]));
        ck_assert(pattern_holds(blocks[0], 30 * MIB, 3));

        /* Without jobs they stay as well. */
        for (unsigned k = 0; k < 3; k++) {
                bfc_disconnect(clients[k]);
                ck_assert(WAIT_FOR(rig_charge(rig, "red", names[k]) == 0, SETTLE_MS));
        }
        host = keeper_pid_in(rig->folder, "host");
        gpu = keeper_pid_in(rig->folder, "cuda:0");
        rig_terminate(rig);
        ck_assert(has_keepers(rig));
        ck_assert_int_eq(keeper_pid_in(rig->folder, "host"), host);
        ck_assert_int_eq(keeper_pid_in(rig->folder, "cuda:0"), gpu);
        child_kill(manager);
        rig_discard(rig); /* they end without their sockets */
}

TEST(an_external_keeper_replaces_no_other_file)
{
        struct rig *rig = rig_folder();
        char path[160];
        struct stat st;
        int status, fd;

        snprintf(path, sizeof(path), "%s/keepers", rig->folder);
        ck_assert_int_eq(mkdir(path, 0700), 0);
        strcat(path, "/host");
        fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
        ck_assert_int_ge(fd, 0);
        close(fd);
        ck_assert_int_ge(waitpid(start_external(rig, "host"), &status, 0), 0);
        ck_assert(WIFEXITED(status) && WEXITSTATUS(status) == 1);
        ck_assert_int_eq(lstat(path, &st), 0);
        ck_assert(S_ISREG(st.st_mode));
        rig_discard(rig);
}

#define MIG(n) "MIG-fa4ec0da-0000-4000-8000-00000000000" n

TEST(two_mig_devices)
{
        struct rig *rig = rig_folder();
        char *text = rig_config_text(rig, &two_gpus), *one = strstr(text, "cuda:0"),
             *two = strstr(text, "cuda:1");
        char *changed;
        bfc_client *client;
        void *p, *q;

        ck_assert_ptr_nonnull(one);
        ck_assert_ptr_nonnull(two);
        ck_assert_int_gt(asprintf(&changed, "%.*s" MIG("1") "%.*s" MIG("2") "%s", (int)(one - text), text,
                                  (int)(two - one - 6), one + 6, two + 6),
                         0);
        setenv("FAKE_CUDA_DEVICES", "128MiB:mig,96MiB:mig", 1);
        rig_write_config(rig, changed);
        free(changed);
        free(text);
        rig->pid = rig_spawn_daemon(rig);
        ck_assert(WAIT_FOR(rig_answers(rig), SETTLE_MS));
        rig_meet(rig);
        setenv("CUDA_VISIBLE_DEVICES", MIG("2"), 1);
        client = client_open(rig, NULL, "other");
        ck_assert_ok(bfc_malloc(client, 3 * MIB, &p));
        pattern_write(p, 3 * MIB, 1);
        ck_assert(pattern_holds(p, 3 * MIB, 1));
        ck_assert_int_eq(bfc_malloc_in(client, "train", MIB, &q), -ENODEV);
        ck_assert_ptr_nonnull(strstr(bfc_last_error(), "CUDA_VISIBLE_DEVICES"));
        bfc_disconnect(client);
        rig_stop(rig);
}
