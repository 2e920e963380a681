/* A storm: processes of hostile tenants, which are killed and replaced all the time, an operator that gives all kinds of
 * admin commands, and a daemon that is restarted and killed every few seconds under a service manager that keeps its
 * memory. Beside them victims of another tenant stay within their guarantee: each of their requests is granted, and each
 * byte is as it was written. In the end nothing is in use, charged or open.
 *
 * Ten hostile processes act at random (storm_tenant.c). Two more are those of bench-neighbours and of tests/attacks,
 * which do one thing as fast as they can.
 *
 * BFC_TEST_SECONDS=60 is a long run. The seed is printed; BFC_TEST_SEED takes another one. How much happens in a run
 * depends on the machine; what must hold does not.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "tests/attacks/attack.h"
#include "tests/bench/hostile.h"
#include "tests/integration/kept.h"
#include "tests/integration/storm.h"
#include "tests/integration/tools.h"
#include "tests/random.h"

#define N_HOSTILE      10u
#define N_FLOODING     2u
#define N_SLOTS        (N_HOSTILE + N_FLOODING)
#define SHORT_MS       300u  /* a hostile process lives so long at most, every other one */
#define LONG_MS        8000u /* longer, so that it sees restarts */
#define RESTART_MS     1500u /* between restarts, at least */
#define MORE_MS        2500u
#define EARLY_MS       150u /* a daemon that is killed early lives so long at most */
#define N_LEASES       4u   /* of the operator */
#define LEAST_CALLS    200u /* of each victim */
#define LEAST_COMMANDS 60u
#define LEAST_ACTS     2000u
#define LEAST_RESTARTS 2u /* one by SIGTERM, one by SIGKILL */

/* The reserve of the victims is one extent of 2 MiB for each of their blocks. */
#define TENANTS(of_victim, of_hostile)                                                                       \
        "  - name: " VICTIM "\n"                                                                             \
        "    match: {uid: @UID@}\n"                                                                          \
        "    quotas:\n"                                                                                      \
        "      - {partition: train, limit: " of_victim ", reserve: 64MiB}\n"                                 \
        "      - {partition: parking, limit: 16MiB, reserve: 16MiB}\n"                                       \
        "  - name: " HOSTILE "\n"                                                                            \
        "    match: {uid: [@UID@, @OTHER@, @ANOTHER@]}\n"                                                    \
        "    leases: self\n"                                                                                 \
        "    quotas:\n"                                                                                      \
        "      - {partition: train, limit: " of_hostile ", reserve: 8MiB"                                    \
        ", park: {to: parking, idle: 50ms}}\n"                                                               \
        "      - {partition: parking, limit: 32MiB}\n"                                                       \
        "      - {partition: spare, limit: 32MiB}\n"                                                         \
        "  - name: " NEIGHBOUR "\n"                                                                          \
        "    match: {uid: [@UID@, @OTHER@]}\n"                                                               \
        "    quotas: [{partition: train, limit: 48MiB}]\n"                                                   \
        "  - name: " ATTACKER "\n"                                                                           \
        "    match: {uid: [@UID@, @OTHER@]}\n"                                                               \
        "    quotas: [{partition: train, limit: 48MiB}]\n"
#define TIMEOUTS "timeouts: {quarantine: 1s, reclaim: 100ms}\n"

/* Copies of parked blocks are on the host. A second GPU is drained, which the victims do not use. */
#define ON_HOST_TOO "  - id: host\n    size: 256MiB\n    partitions:\n"
#define PARTITIONS(on_host, share)                                                                           \
        "      - {name: train, limit: 192MiB}\n" on_host "      - {limit: 64MiB, name: parking}\n"           \
        "  - id: cuda:1\n    headroom: 0\n    partitions:\n"                                                 \
        "      - {share: " share ", limit: 64MiB, name: spare}\n"
#define DRAINED "cuda:1"

static struct {
        const char *tenants;
} const variants[] = {
        /* The operator goes from one to the other. The first one is that of the beginning and of the end. */
        { TENANTS("96MiB", "64MiB") },
        { TENANTS("64MiB", "24MiB") },
        { TENANTS("80MiB", "96MiB") },
};
#define N_CONFIGS (sizeof(variants) / sizeof(variants[0]))

static struct rig_config config_of(size_t i)
{
        static const char *const partitions[] = {
                [ON_HOST] = PARTITIONS("", "fd"),
                [ON_CUDA_FD] = PARTITIONS(ON_HOST_TOO, "fd"),
                [ON_CUDA_IPC] = PARTITIONS(ON_HOST_TOO, "cuda-ipc"),
        };

        return (struct rig_config){ .top = TIMEOUTS,
                                    .size = "512MiB",
                                    .partitions = partitions[rig_device()],
                                    .tenants = variants[i].tenants };
}

static const char *const attack_keys[] = { "acks", "urgent", "waiters" };
#define N_ATTACKS (sizeof(attack_keys) / sizeof(attack_keys[0]))

struct weather {
        struct kept *kept;
        struct rig *rig;
        struct storm *storm; /* shared with all children, as the next two */
        struct stage *stage;
        struct attack_stage *attack_stage;
        struct raw *parking; /* an admin session; NULL: none */
        uint64_t random;
        pid_t victims[N_VICTIMS];
        struct slot {
                pid_t pid;
                int64_t until_ms;
        } slots[N_SLOTS];
        uint64_t n_hostile, n_commands, n_restarts;
        uint64_t longest_restart_ms;
        int64_t next_restart_ms;
};

/* tests/bench/hostile.c ends by it, for instance when an operator evicted its session. */
_Noreturn void die(const char *what, const char *why);
_Noreturn void die(const char *what, const char *why)
{
        (void)what;
        (void)why;
        _exit(0);
}

static uint64_t pick(struct weather *w, uint64_t n)
{
        return random_next(&w->random) % n;
}

/* ---- processes ---------------------------------------------------------------- */

struct role {
        struct weather *weather;
        uint64_t seed;
};

static void be_victim(void *arg)
{
        const struct role *role = arg;

        storm_victim_run(role->weather->storm, (unsigned)role->seed);
}

static void be_tenant(void *arg)
{
        const struct role *role = arg;

        storm_tenant_run(role->weather->storm, role->seed);
}

static void be_flooding(void *arg)
{
        const struct role *role = arg;
        uint64_t kind = role->seed % (n_hostiles + N_ATTACKS);

        if (kind < n_hostiles) {
                hostiles[kind].act(role->weather->stage);
                return;
        }
        for (size_t i = 0; i < n_attacks; i++)
                if (strcmp(attacks[i]->key, attack_keys[kind - n_hostiles]) == 0)
                        attacks[i]->act(role->weather->attack_stage);
        REQUIRE(false, "there is no attack '%s'", attack_keys[kind - n_hostiles]);
}

/* Whatever a hostile process does to itself, it must not fail in the library, or see what must not be. */
static void look_at_end(const struct weather *w, pid_t pid, int status)
{
        for (unsigned i = 0; i < N_VICTIMS; i++)
                ck_assert_msg(pid != w->victims[i], "victim %u ended in the storm; see its message on stderr",
                              i);
        ck_assert_msg(!WIFEXITED(status) || WEXITSTATUS(status) == 0,
                      "hostile process %d ended with status %d; see its message on stderr", (int)pid,
                      WEXITSTATUS(status));
        for (unsigned i = 0; i < N_SLOTS; i++)
                ck_assert_msg(pid != w->slots[i].pid || !WIFSIGNALED(status) || WTERMSIG(status) == SIGKILL,
                              "hostile process %d crashed: signal %d", (int)pid, WTERMSIG(status));
}

/* Also of children of hostile processes, which are ours when their parents have ended. */
static void reap(struct weather *w)
{
        int status;
        pid_t pid;

        while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
                look_at_end(w, pid, status);
                for (unsigned i = 0; i < N_SLOTS; i++)
                        if (w->slots[i].pid == pid)
                                w->slots[i].pid = 0;
        }
        ck_assert_msg(!atomic_load(&w->storm->has_failed), "see the message of a hostile process on stderr");
}

static void end_hostile(struct weather *w, struct slot *slot)
{
        int status;

        if (slot->pid <= 0)
                return;
        kill(slot->pid, SIGKILL);
        ck_assert_int_eq(waitpid(slot->pid, &status, 0), slot->pid);
        look_at_end(w, slot->pid, status);
        slot->pid = 0;
}

/* As other users where that can be, so that not the kernel but the daemon keeps them apart. */
static void start_hostile(struct weather *w, struct slot *slot)
{
        bool is_flooding = slot >= w->slots + N_HOSTILE;
        struct role role = { .weather = w, .seed = random_next(&w->random) };
        uid_t uid = !is_root() ? getuid() : is_flooding || pick(w, 3) > 0 ? OTHER_UID : ANOTHER_UID;

        end_hostile(w, slot);
        slot->pid =
                child_start_as(uid, is_root() ? uid : getgid(), is_flooding ? be_flooding : be_tenant, &role);
        slot->until_ms =
                clock_ms() + 20 + (int64_t)pick(w, is_flooding || pick(w, 2) == 0 ? SHORT_MS : LONG_MS);
        w->n_hostile++;
}

/* ---- the operator ------------------------------------------------------------- */

/* The reply, which the caller frees. */
static Bfcd__Reply *ask(const struct rig *rig, Bfcd__Request *r)
{
        Bfcd__Reply *reply = NULL;

        ck_assert_int_eq(raw_send(rig->admin, r), 0);
        for (;;) {
                ck_assert_msg(raw_receive(rig->admin, STORM_WAIT_MS, &reply) == 0,
                              "the daemon does not answer request %d of an operator", (int)r->body_case);
                if (reply->id == r->id)
                        return reply;
                bfcd__reply__free_unpacked(reply, NULL);
        }
}

/* A refusal with an error that is not in the list, which ends with 0, fails. The error, or 0. */
static int command(const struct rig *rig, Bfcd__Request *r, const int *errors)
{
        Bfcd__Reply *reply = ask(rig, r);
        int error = 0;

        if (reply->body_case == BFCD__REPLY__BODY_REFUSAL) {
                error = (int)reply->refusal->error;
                while (*errors != 0 && *errors != error)
                        errors++;
                ck_assert_msg(*errors != 0, "request %d was refused: %s", (int)r->body_case,
                              reply->refusal->message);
        }
        bfcd__reply__free_unpacked(reply, NULL);
        return error;
}
#define ERRORS(...) ((const int[]){ __VA_ARGS__ __VA_OPT__(, ) 0 })

static void reload(struct rig *rig, size_t i)
{
        struct rig_config config = config_of(i);
        Bfcd__Reload body = BFCD__RELOAD__INIT;
        Bfcd__Request r = REQUEST(RELOAD, reload, &body);
        Bfcd__Reply *reply;

        rig_rewrite_config(rig, &config);
        reply = ask(rig, &r);
        ck_assert_int_eq(reply->body_case, BFCD__REPLY__BODY_RELOAD);
        ck_assert_msg(reply->reload->n_errors == 0, "reload: %s", reply->reload->errors[0]);
        bfcd__reply__free_unpacked(reply, NULL);
}

static int drain(const struct rig *rig, const char *device)
{
        Bfcd__Drain body = BFCD__DRAIN__INIT;
        Bfcd__Request r = REQUEST(DRAIN, drain, &body);

        body.device = (char *)(uintptr_t)device;
        return command(rig, &r, ERRORS(EBUSY));
}

static int resume(const struct rig *rig, const char *device)
{
        Bfcd__Resume body = BFCD__RESUME__INIT;
        Bfcd__Request r = REQUEST(RESUME, resume, &body);

        body.device = (char *)(uintptr_t)device;
        return command(rig, &r, ERRORS(EBUSY, EINVAL)); /* EINVAL: a restart has resumed it */
}

static void trim(const struct rig *rig, uint64_t n_bytes)
{
        Bfcd__TrimNow body = BFCD__TRIM_NOW__INIT;
        Bfcd__Request r = REQUEST(TRIM_NOW, trim_now, &body);

        body.n_bytes = n_bytes;
        (void)command(rig, &r, ERRORS());
}

/* A session of the hostile tenants, if the first page of the list has one; 0: none. */
static uint64_t find_hostile_session(const struct rig *rig, uint64_t random)
{
        Bfcd__List body = BFCD__LIST__INIT;
        Bfcd__Request r = REQUEST(LIST, list, &body);
        uint64_t id = 0, n = 0;
        Bfcd__Reply *reply;

        body.kind = BFCD__LIST__KIND__SESSIONS;
        reply = ask(rig, &r);
        ck_assert_int_eq(reply->body_case, BFCD__REPLY__BODY_LIST);
        for (size_t i = 0; i < reply->list->n_sessions; i++) {
                const Bfcd__SessionRow *row = reply->list->sessions[i];

                if (row->tenant[0] != '\0' && strcmp(row->tenant, VICTIM) != 0 && random % ++n == 0)
                        id = row->session_id;
        }
        bfcd__reply__free_unpacked(reply, NULL);
        return id;
}

/* It may have ended since the list, or be about to. */
static void evict(struct weather *w)
{
        Bfcd__Evict body = BFCD__EVICT__INIT;
        Bfcd__Request r = REQUEST(EVICT, evict, &body);

        body.session_id = find_hostile_session(w->rig, random_next(&w->random));
        (void)command(w->rig, &r, ERRORS(ENOENT));
}

/* Of victims and of hostile processes. The latter answer late or never, so it has a session of its own, and its reply
 * is not awaited. */
static void park_or_wake(struct weather *w)
{
        Bfcd__ParkNow body = BFCD__PARK_NOW__INIT;
        Bfcd__Request r = REQUEST(PARK_NOW, park_now, &body);

        body.tenant = (char *)(uintptr_t)(pick(w, 2) ? HOSTILE : VICTIM);
        body.partition = (char *)(uintptr_t) "train";
        body.to = (char *)(uintptr_t) "parking";
        body.wakes = pick(w, 2) != 0;
        if (body.wakes)
                body.to = (char *)(uintptr_t) "";
        raw_close(w->parking);
        w->parking = raw_connect(w->rig->admin_socket, NULL);
        ck_assert_msg(w->parking && raw_send(w->parking, &r) == 0, "no admin session: %s", raw_refusal());
}

/* For the users or one process of the hostile tenant. The limits may not allow it, and the process may have ended. */
static void create_lease(struct weather *w, char *name)
{
        Bfcd__LeaseCreate body = BFCD__LEASE_CREATE__INIT;
        Bfcd__Request r = REQUEST(LEASE_CREATE, lease_create, &body);
        pid_t pid = w->slots[pick(w, N_HOSTILE)].pid;

        body.name = name;
        body.tenant = (char *)(uintptr_t)HOSTILE;
        body.partition = (char *)(uintptr_t)(pick(w, 3) ? "train" : "parking");
        body.bytes_limit = (1 + pick(w, 12)) * 2 * MIB;
        body.bytes_reserve = pick(w, 2) ? 0 : 2 * MIB;
        body.match_case = BFCD__LEASE_CREATE__MATCH_UID;
        body.uid = OTHER_UID;
        if (pick(w, 6) && pid > 0) { /* the end of the other refuses most hellos */
                body.match_case = BFCD__LEASE_CREATE__MATCH_PID;
                body.pid = (uint64_t)pid;
        }
        body.ttl_ms = pick(w, 2) ? 0 : 1 + pick(w, 2000);
        body.evicts = pick(w, 2) != 0;
        body.grace_ms = body.evicts ? pick(w, 300) : 0;
        (void)command(w->rig, &r, ERRORS(EEXIST, EDQUOT, ENOMEM, EINVAL, ESRCH, ENOENT, EBUSY));
}

static void set_lease(struct weather *w, char *name)
{
        Bfcd__LeaseSet body = BFCD__LEASE_SET__INIT;
        Bfcd__Request r = REQUEST(LEASE_SET, lease_set, &body);

        body.name = name;
        body.bytes_limit = (1 + pick(w, 12)) * 2 * MIB;
        body.sets_reserve = pick(w, 2) != 0;
        body.sets_ttl = pick(w, 2) != 0;
        body.ttl_ms = body.sets_ttl ? pick(w, 2000) : 0;
        (void)command(w->rig, &r, ERRORS(ENOENT, EDQUOT, ENOMEM, EINVAL, EBUSY));
}

static void end_lease(const struct rig *rig, char *name, bool evicts)
{
        Bfcd__LeaseEnd body = BFCD__LEASE_END__INIT;
        Bfcd__Request r = REQUEST(LEASE_END, lease_end, &body);

        body.name = name;
        body.evicts = evicts;
        (void)command(rig, &r, ERRORS(ENOENT, EBUSY, EALREADY));
}

static void forget_kept_blocks(const struct rig *rig)
{
        Bfcd__List body = BFCD__LIST__INIT;
        Bfcd__Request r = REQUEST(LIST, list, &body);
        Bfcd__Reply *reply;

        body.kind = BFCD__LIST__KIND__KEPT;
        reply = ask(rig, &r);
        ck_assert_int_eq(reply->body_case, BFCD__REPLY__BODY_LIST);
        for (size_t i = 0; i < reply->list->n_shared; i++) {
                Bfcd__Forget forget = BFCD__FORGET__INIT;
                Bfcd__Request s = REQUEST(FORGET, forget, &forget);

                forget.name = reply->list->shared[i]->name;
                forget.tenant = reply->list->shared[i]->tenant;
                (void)command(rig, &s, ERRORS(ENOENT));
        }
        bfcd__reply__free_unpacked(reply, NULL);
}

static void show_all(const struct rig *rig)
{
        static const Bfcd__List__Kind kinds[] = {
                BFCD__LIST__KIND__STATUS, BFCD__LIST__KIND__BLOCKS, BFCD__LIST__KIND__EXTENTS,
                BFCD__LIST__KIND__LEASES, BFCD__LIST__KIND__AGES,   BFCD__LIST__KIND__WAITING,
                BFCD__LIST__KIND__GRANTS,
        };
        Bfcd__Reply *reply;

        for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
                ck_assert_int_eq(raw_list(rig->admin, kinds[i], 0, &reply), 0);
                bfcd__reply__free_unpacked(reply, NULL);
        }
}

/* Every kind comes in the beginning, one after the other; then they come by chance. */
static void give_command(struct weather *w)
{
        uint64_t what = w->n_commands < LEAST_COMMANDS ? w->n_commands % 12 : pick(w, 12);
        char name[16];

        snprintf(name, sizeof(name), "op-%u", (unsigned)pick(w, N_LEASES));
        w->n_commands++;
        switch (what) {
        case 0:
                reload(w->rig, pick(w, N_CONFIGS));
                break;
        case 1:
                (void)drain(w->rig, DRAINED);
                break;
        case 2:
                (void)resume(w->rig, DRAINED);
                break;
        case 3:
        case 4:
                evict(w);
                break;
        case 5:
                trim(w->rig, pick(w, 2) ? 0 : 4 * MIB);
                break;
        case 6:
                park_or_wake(w);
                break;
        case 7:
        case 8:
                create_lease(w, name);
                break;
        case 9:
                set_lease(w, name);
                break;
        case 10:
                end_lease(w->rig, name, pick(w, 2));
                break;
        default:
                forget_kept_blocks(w->rig);
                show_all(w->rig);
        }
}

/* ---- restarts ------------------------------------------------------------------- */

/* Another daemon has started, and inherits what there is: it may be killed before it is ready. */
static void kill_early(struct weather *w)
{
        unsigned n_starts = kept_state(w->kept).n_starts;

        w->storm->n_restarts_begun++;
        ck_assert_int_eq(stand_in_signal(w->kept->manager, SIGKILL), 0);
        ck_assert(WAIT_FOR(kept_state(w->kept).n_starts > n_starts && kept_state(w->kept).pid != 0,
                           STORM_WAIT_MS));
        usleep((useconds_t)pick(w, EARLY_MS) * 1000);
        w->n_restarts++;
}

/* By SIGTERM and SIGKILL in turn. */
static void restart(struct weather *w)
{
        unsigned n_starts;
        int64_t begin_ms = clock_ms();
        uint64_t ms;

        w->rig->admin = raw_close(w->rig->admin);
        w->parking = raw_close(w->parking);
        w->storm->n_restarts_begun++;
        for (unsigned i = pick(w, 4) ? 0 : 1 + (unsigned)pick(w, 3); i > 0; i--)
                kill_early(w);
        n_starts = kept_state(w->kept).n_starts;
        ck_assert_int_eq(stand_in_signal(w->kept->manager, w->n_restarts % 2 ? SIGKILL : SIGTERM), 0);
        kept_await(w->kept, n_starts + 1);
        ms = (uint64_t)(clock_ms() - begin_ms);
        w->storm->n_restarts_done = w->storm->n_restarts_begun;
        if (ms > w->longest_restart_ms)
                w->longest_restart_ms = ms;
        w->rig->pid = kept_state(w->kept).pid;
        w->attack_stage->daemon = w->rig->pid;
        w->rig->admin = raw_connect(w->rig->admin_socket, NULL);
        ck_assert_msg(w->rig->admin, "no admin session: %s", raw_refusal());
        w->n_restarts++;
        w->next_restart_ms = clock_ms() + RESTART_MS + (int64_t)pick(w, MORE_MS);
}

/* ---- all together ------------------------------------------------------------- */

static uint64_t count_acts(const struct weather *w)
{
        uint64_t n = 0;

        for (unsigned i = 0; i < STORM_MAX_ACTS; i++)
                n += w->storm->n_acts[i];
        return n;
}

static bool is_enough(const struct weather *w)
{
        for (unsigned i = 0; i < N_VICTIMS; i++)
                if (w->storm->victims[i].n_calls < LEAST_CALLS)
                        return false;
        return w->n_commands >= LEAST_COMMANDS && w->n_restarts >= LEAST_RESTARTS &&
               count_acts(w) >= LEAST_ACTS;
}

static void rage(struct weather *w)
{
        int64_t end_ms = clock_ms() + (int64_t)(test_seconds(suite_is_long() ? 20 : 6) * 1000);

        w->next_restart_ms = clock_ms() + RESTART_MS;
        while (clock_ms() < end_ms || !is_enough(w)) {
                for (unsigned i = 0; i < N_SLOTS; i++)
                        if (w->slots[i].pid <= 0 || clock_ms() >= w->slots[i].until_ms)
                                start_hostile(w, &w->slots[i]);
                give_command(w);
                reap(w);
                if (clock_ms() >= w->next_restart_ms)
                        restart(w);
                usleep((useconds_t)pick(w, 20000));
        }
        for (unsigned i = 0; i < N_SLOTS; i++)
                end_hostile(w, &w->slots[i]);
        w->parking = raw_close(w->parking);
}

static bool is_keeper(const char *pid)
{
        char path[64], *name;
        bool is;

        snprintf(path, sizeof(path), "/proc/%s/comm", pid);
        name = file_text(path);
        is = !name || strcmp(name, "bfcd-kept\n") == 0;
        free(name);
        return is;
}

/* Our only child is the service manager, beside keepers whose daemon was killed. */
static bool is_alone(struct weather *w)
{
        char path[64], *text;
        unsigned n = 0;

        reap(w);
        snprintf(path, sizeof(path), "/proc/self/task/%d/children", (int)getpid());
        text = file_text(path);
        ck_assert_ptr_nonnull(text);
        for (char *rest = text, *word; (word = strsep(&rest, " "));)
                n += *word != '\0' && !is_keeper(word);
        free(text);
        return n == 1;
}

static uint64_t count_leases(const struct rig *rig)
{
        Bfcd__Reply *page;
        uint64_t n;

        ck_assert_int_eq(raw_list(rig->admin, BFCD__LIST__KIND__LEASES, 0, &page), 0);
        n = page->list->n_leases;
        for (size_t i = 0; i < page->list->n_leases; i++)
                end_lease(rig, page->list->leases[i]->name, true);
        bfcd__reply__free_unpacked(page, NULL);
        return n;
}

static bool is_calm(struct rig *rig)
{
        static const char *const tenants[] = { VICTIM, HOSTILE, NEIGHBOUR, ATTACKER };
        struct rig_counts n = rig_count(rig);
        uint64_t charge = 0;

        forget_kept_blocks(rig);
        for (size_t i = 0; i < sizeof(tenants) / sizeof(tenants[0]); i++)
                charge += rig_charge(rig, tenants[i], "train");
        charge += rig_charge(rig, VICTIM, "parking") + rig_charge(rig, HOSTILE, "parking") +
                  rig_charge(rig, HOSTILE, "spare");
        return count_leases(rig) == 0 && n.n_sessions == 0 && n.n_blocks == 0 && n.n_quarantined == 0 &&
               n.n_extents == rig->n_extents && n.bytes_pending == 0 && charge == 0;
}

static bool is_in_state(const struct rig *rig, const char *device, const char *state)
{
        Bfcd__Reply *page;
        bool is = false;

        ck_assert_int_eq(raw_list(rig->admin, BFCD__LIST__KIND__STATUS, 0, &page), 0);
        for (size_t i = 0; i < page->list->status->n_devices; i++)
                is = is || (strcmp(page->list->status->devices[i]->id, device) == 0 &&
                            strcmp(page->list->status->devices[i]->state, state) == 0);
        bfcd__reply__free_unpacked(page, NULL);
        return is;
}

/* What is left, for the message. */
static const char *picture(struct weather *w)
{
        struct picture p = picture_take(w->kept);
        struct rig_counts n = rig_count(w->rig);
        static char text[8192];

        snprintf(text, sizeof(text),
                 "%llu extents (%llu), %llu quarantined, %llu pending, %llu leases\n%s%s%s%s",
                 (unsigned long long)n.n_extents, (unsigned long long)w->rig->n_extents,
                 (unsigned long long)n.n_quarantined, (unsigned long long)n.bytes_pending,
                 (unsigned long long)count_leases(w->rig), p.tenants, p.sessions, p.blocks, p.shared);
        picture_free(&p);
        return text;
}

/* Everything is back, and the daemon is as it was at the start. */
static void assert_calm(struct weather *w)
{
        const char *const devices[] = { DRAINED, rig_device_id() };
        int64_t begin_ms = clock_ms();

        ck_assert_msg(WAIT_FOR(is_alone(w), STORM_WAIT_MS), "a hostile process is left");
        reload(w->rig, 0);
        ck_assert(WAIT_FOR(resume(w->rig, DRAINED) != EBUSY, STORM_WAIT_MS));
        ck_assert_msg(WAIT_FOR(is_calm(w->rig), STORM_WAIT_MS), "something is left after the storm: %s",
                      picture(w));
        printf("# storm: nothing is left after %lld ms\n", (long long)(clock_ms() - begin_ms));
        for (size_t i = 0; i < 2; i++) {
                (void)drain(w->rig, devices[i]);
                ck_assert_msg(WAIT_FOR(is_in_state(w->rig, devices[i], "drained"), STORM_WAIT_MS),
                              "%s does not get empty", devices[i]);
                ck_assert(WAIT_FOR(resume(w->rig, devices[i]) != EBUSY, STORM_WAIT_MS));
                ck_assert(WAIT_FOR(is_in_state(w->rig, devices[i], "ok"), STORM_WAIT_MS));
        }
}

static void report(const struct weather *w)
{
        const struct storm *s = w->storm;
        uint64_t n_calls = 0, n_bytes = 0, longest = 0, beside = 0;
        const char *call = "none";

        for (unsigned i = 0; i < N_VICTIMS; i++) {
                const struct storm_calls *c = &s->victims[i];

                n_calls += c->n_calls;
                n_bytes += c->n_bytes;
                beside = c->longest_restart_us > beside ? c->longest_restart_us : beside;
                if (c->longest_us > longest) {
                        longest = c->longest_us;
                        call = c->longest;
                }
        }
        printf("# storm: victims: %llu calls, %llu MiB verified, longest call %.1f ms (%.60s), %.1f ms beside a "
               "restart\n",
               (unsigned long long)n_calls, (unsigned long long)(n_bytes / MIB), (double)longest / 1000, call,
               (double)beside / 1000);
        printf("# storm: %llu restarts, at most %llu ms; %llu commands; %llu hostile processes, %llu acts\n",
               (unsigned long long)w->n_restarts, (unsigned long long)w->longest_restart_ms,
               (unsigned long long)w->n_commands, (unsigned long long)w->n_hostile,
               (unsigned long long)(count_acts(w) + w->stage->n_acts + w->attack_stage->n_acts));
        printf("# acts (granted):");
        for (unsigned i = 0; storm_act_name(i); i++)
                printf("%s %s %llu (%llu)", i ? "," : "", storm_act_name(i), (unsigned long long)s->n_acts[i],
                       (unsigned long long)s->n_granted[i]);
        printf("\n");
}

static uint64_t seed_of_run(void)
{
        const char *text = getenv("BFC_TEST_SEED");

        return text && *text ? strtoull(text, NULL, 10) : 1;
}

static struct weather weather_start(void)
{
        struct rig_config config = config_of(0);
        struct weather w = { .storm = shared_memory(sizeof(*w.storm)),
                             .stage = shared_memory(sizeof(*w.stage)),
                             .attack_stage = shared_memory(sizeof(*w.attack_stage)) };

        w.random = w.storm->seed = seed_of_run();
        printf("# storm: seed %llu\n", (unsigned long long)w.storm->seed);
        fflush(stdout);
        prctl(PR_SET_CHILD_SUBREAPER, 1);
        setenv("BFC_RETURN_MS", "300000", 1); /* with slow builds no daemon lives long enough for all */
        setenv("FAKE_CUDA_DEVICES", "64MiB,96MiB", 1);
        w.kept = kept_start(&config);
        w.rig = w.kept->rig;
        strcpy(w.storm->socket, w.rig->socket);
        strcpy(w.stage->socket, w.rig->socket);
        strcpy(w.attack_stage->socket, w.rig->socket);
        w.attack_stage->daemon = w.rig->pid;
        w.storm->has_users = is_root();
        return w;
}

TEST(a_storm)
{
        struct weather w = weather_start();

        for (unsigned i = 0; i < N_VICTIMS; i++)
                w.victims[i] = child_start(be_victim, &(struct role){ &w, i });
        rage(&w);
        atomic_store(&w.storm->is_over, true);
        for (unsigned i = 0; i < N_VICTIMS; i++) {
                child_join(w.victims[i]);
                w.victims[i] = 0;
        }
        assert_calm(&w);
        report(&w);
        w.rig->forgiven = "did not return memory of tenant '" HOSTILE "'"; /* its goodbyes are lies */
        kept_stop(w.kept);
}

int main(void)
{
        return harness_cases_with("storm", test_seconds(4) + 240, NULL);
}
