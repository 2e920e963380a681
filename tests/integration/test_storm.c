/* A storm: hostile processes of two tenants, which are killed and replaced all the time, and an operator
 * that reloads, drains, resumes, evicts and trims. Beside them clients of a third tenant work and look at
 * every byte of theirs. In the end nothing is held, charged or open, and no byte was lost.
 *
 * BFC_TEST_SECONDS=60 is a long run. The seed is printed; BFC_TEST_SEED takes another one. How much
 * happens in a run depends on the machine; what must hold does not.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "tests/attacks/attack.h"
#include "tests/bench/hostile.h"
#include "tests/integration/tools.h"
#include "tests/random.h"

#define N_WORKERS     3u
#define N_SLOTS       4u /* hostile processes side by side */
#define MAX_BLOCKS    12u
#define TIMEOUT_MS    60000
#define HOSTILE_MS    300u /* of one hostile process, at most */
#define DRAIN_MS      40u
#define LEAST_ROUNDS  200u /* of each worker */
#define LEAST_ORDERS  12u  /* each kind comes at least twice */
#define LEAST_HOSTILE 8u
#define LEAST_ACTS    100u /* of these all together */

#define TENANTS(of_good, of_bad)                                                                             \
        "  - name: good\n"                                                                                   \
        "    match: {uid: @UID@}\n"                                                                          \
        "    quotas: [{partition: train, limit: " of_good                                                    \
        ", reserve: 24MiB, keep: {bytes: 16MiB, for: 500ms}}]\n"                                             \
        "  - name: " NEIGHBOUR "\n"                                                                          \
        "    match: {uid: [@UID@, @OTHER@]}\n"                                                               \
        "    quotas: [{partition: train, limit: " of_bad ", keep: {bytes: 8MiB, for: 200ms}}]\n"             \
        "  - name: " ATTACKER "\n"                                                                           \
        "    match: {uid: [@UID@, @OTHER@]}\n"                                                               \
        "    quotas: [{partition: train, limit: " of_bad "}]\n"
#define TIMEOUTS "timeouts: {quarantine: 1s, reclaim: 100ms}\n"

/* The operator goes from one to the other. The first one is that of the beginning and of the end. */
static const struct rig_config configs[] = {
        { .top = TIMEOUTS, .tenants = TENANTS("64MiB", "48MiB") },
        { .top = TIMEOUTS, .tenants = TENANTS("48MiB", "24MiB") },
        { .top = TIMEOUTS, .tenants = TENANTS("64MiB", "64MiB") },
};
#define N_CONFIGS (sizeof(configs) / sizeof(configs[0]))

static const char *const attack_keys[] = { "acks", "urgent", "waiters" };
#define N_ATTACKS (sizeof(attack_keys) / sizeof(attack_keys[0]))

/* Shared with all children. */
struct weather {
        char socket[96];
        atomic_bool is_over;
        _Atomic uint64_t n_rounds[N_WORKERS];
        _Atomic uint64_t n_refusals;
        struct stage stage;
        struct attack_stage attack_stage;
        uint64_t seed;
};

/* tests/bench/hostile.c ends by it, for instance when an operator evicted its session. */
_Noreturn void die(const char *what, const char *why);
_Noreturn void die(const char *what, const char *why)
{
        (void)what;
        (void)why;
        _exit(1);
}

/* ---- polite clients ---------------------------------------------------------- */

struct worker {
        struct weather *weather;
        unsigned number;
        bfc_client *client;
        uint64_t random;
        uint64_t n_taken;
        size_t n_blocks;
        struct {
                void *ptr;
                size_t n_bytes;
                uint64_t serial;
        } blocks[MAX_BLOCKS];
};

static uint64_t block_seed(const struct worker *w, uint64_t serial)
{
        return (uint64_t)w->number << 48 ^ serial;
}

static void require_unchanged(const struct worker *w, size_t i)
{
        REQUIRE(pattern_holds(w->blocks[i].ptr, w->blocks[i].n_bytes, block_seed(w, w->blocks[i].serial)),
                "worker %u lost what it wrote into a block of %zu bytes", w->number, w->blocks[i].n_bytes);
}

static void release_block(struct worker *w, size_t i)
{
        int r;

        require_unchanged(w, i);
        r = bfc_free(w->client, w->blocks[i].ptr);
        REQUIRE(r == 0, "worker %u: free: %d (%s)", w->number, r, bfc_last_error());
        w->blocks[i] = w->blocks[--w->n_blocks];
}

static void allocate_block(struct worker *w)
{
        size_t most = (size_t)GRANULE << random_next(&w->random) % 14; /* up to 2 MiB */
        size_t n_bytes = 1 + random_next(&w->random) % most;
        void *ptr;
        int r = bfc_malloc(w->client, n_bytes, &ptr);

        if (r < 0) { /* limits come down, and a drain refuses everything */
                REQUIRE(r == -EDQUOT || r == -ENOMEM || r == -EBUSY, "worker %u: malloc: %d (%s)", w->number,
                        r, bfc_last_error());
                atomic_fetch_add(&w->weather->n_refusals, 1);
                return;
        }
        w->blocks[w->n_blocks].ptr = ptr;
        w->blocks[w->n_blocks].n_bytes = n_bytes;
        w->blocks[w->n_blocks].serial = ++w->n_taken;
        pattern_write(ptr, n_bytes, block_seed(w, w->n_taken));
        w->n_blocks++;
}

/* The same user's hostile processes may have taken all places of unauthenticated connections. */
static void connect_patiently(struct worker *w)
{
        struct bfc_options options = { .struct_size = sizeof(options),
                                       .socket = w->weather->socket,
                                       .tenant = "good",
                                       .flags = CHILDREN_HAVE_EVENTS ? 0 : BFC_NO_THREAD };
        int r;

        (void)WAIT_FOR((r = bfc_connect(&options, &w->client)) == 0, TIMEOUT_MS);
        REQUIRE(r == 0, "worker %u: connect: %d (%s)", w->number, r, bfc_last_error());
}

static void reconnect(struct worker *w)
{
        while (w->n_blocks > 0)
                release_block(w, 0);
        bfc_disconnect(w->client);
        connect_patiently(w);
}

static void work_one(struct weather *weather, unsigned number)
{
        struct worker w = { .weather = weather, .number = number };

        w.random = weather->seed * N_WORKERS + number;
        if (number == 0)
                unsetenv("BFC_CACHE"); /* which the harness turned off */
        connect_patiently(&w);
        while (!atomic_load(&weather->is_over)) {
                uint64_t what = random_next(&w.random) % 100;

                if (what == 0)
                        reconnect(&w);
                else if (w.n_blocks == MAX_BLOCKS || (w.n_blocks > 0 && what < 45))
                        release_block(&w, (size_t)(random_next(&w.random) % w.n_blocks));
                else if (w.n_blocks > 0 && what < 55)
                        require_unchanged(&w, (size_t)(random_next(&w.random) % w.n_blocks));
                else
                        allocate_block(&w);
                atomic_fetch_add(&weather->n_rounds[number], 1);
        }
        while (w.n_blocks > 0)
                release_block(&w, 0);
        bfc_disconnect(w.client);
}

struct place {
        struct weather *weather;
        unsigned number;
};

static void work(void *arg)
{
        const struct place *place = arg;

        work_one(place->weather, place->number);
}

/* ---- hostile clients --------------------------------------------------- */

struct slot {
        pid_t pid;
        int64_t until_ms;
};

struct role {
        struct weather *weather;
        uint64_t kind;
};

static void be_hostile(void *arg)
{
        const struct role *role = arg;
        struct weather *w = role->weather;

        if (role->kind < n_hostiles) {
                hostiles[role->kind].act(&w->stage);
                return;
        }
        for (size_t i = 0; i < n_attacks; i++)
                if (strcmp(attacks[i]->key, attack_keys[role->kind - n_hostiles]) == 0)
                        attacks[i]->act(&w->attack_stage);
        REQUIRE(false, "there is no attack '%s'", attack_keys[role->kind - n_hostiles]);
}

/* A hostile process may have ended by itself, for instance when it was evicted. */
static void end_hostile(struct slot *slot)
{
        if (slot->pid <= 0)
                return;
        kill(slot->pid, SIGKILL);
        ck_assert_int_eq(waitpid(slot->pid, NULL, 0), slot->pid);
        slot->pid = 0;
}

/* As another user where that can be, so that not the kernel but the daemon keeps them apart. */
static void start_hostile(struct slot *slot, struct weather *w, uint64_t *random)
{
        struct role role = { .weather = w, .kind = random_next(random) % (n_hostiles + N_ATTACKS) };

        end_hostile(slot);
        if (is_root())
                slot->pid = child_start_as(OTHER_UID, OTHER_UID, be_hostile, &role);
        else
                slot->pid = child_start(be_hostile, &role);
        slot->until_ms = clock_ms() + 20 + (int64_t)(random_next(random) % HOSTILE_MS);
}

/* ---- the operator ------------------------------------------------------------- */

/* The reply, which the caller frees. */
static Bfcd__Reply *ask(const struct rig *rig, Bfcd__Request *r)
{
        Bfcd__Reply *reply = NULL;

        ck_assert_int_eq(raw_send(rig->admin, r), 0);
        for (;;) {
                ck_assert_msg(raw_receive(rig->admin, TIMEOUT_MS, &reply) == 0,
                              "the daemon does not answer an operator");
                if (reply->id == r->id)
                        return reply;
                bfcd__reply__free_unpacked(reply, NULL);
        }
}

/* error: a refusal that is right, too; 0: none is. */
static void order(const struct rig *rig, Bfcd__Request *r, int error)
{
        Bfcd__Reply *reply = ask(rig, r);

        if (reply->body_case == BFCD__REPLY__BODY_REFUSAL)
                ck_assert_msg((int)reply->refusal->error == error, "request %d was refused: %s",
                              (int)r->body_case, reply->refusal->message);
        bfcd__reply__free_unpacked(reply, NULL);
}

static void reload(struct rig *rig, const struct rig_config *config)
{
        Bfcd__Reload body = BFCD__RELOAD__INIT;
        Bfcd__Request r = REQUEST(RELOAD, reload, &body);
        Bfcd__Reply *reply;

        rig_rewrite_config(rig, config);
        reply = ask(rig, &r);
        ck_assert_int_eq(reply->body_case, BFCD__REPLY__BODY_RELOAD);
        ck_assert_msg(reply->reload->n_errors == 0, "reload: %s", reply->reload->errors[0]);
        bfcd__reply__free_unpacked(reply, NULL);
}

static void drain(const struct rig *rig)
{
        Bfcd__Drain body = BFCD__DRAIN__INIT;
        Bfcd__Request r = REQUEST(DRAIN, drain, &body);

        body.device = (char *)(uintptr_t)rig_device_id();
        order(rig, &r, 0);
}

static void resume(const struct rig *rig)
{
        Bfcd__Resume body = BFCD__RESUME__INIT;
        Bfcd__Request r = REQUEST(RESUME, resume, &body);

        body.device = (char *)(uintptr_t)rig_device_id();
        order(rig, &r, 0);
}

static void trim(const struct rig *rig, uint64_t n_bytes)
{
        Bfcd__TrimNow body = BFCD__TRIM_NOW__INIT;
        Bfcd__Request r = REQUEST(TRIM_NOW, trim_now, &body);

        body.n_bytes = n_bytes;
        order(rig, &r, 0);
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

                if (strcmp(row->tenant, NEIGHBOUR) != 0 && strcmp(row->tenant, ATTACKER) != 0)
                        continue;
                if (random % ++n == 0)
                        id = row->session_id;
        }
        bfcd__reply__free_unpacked(reply, NULL);
        return id;
}

/* It may have ended since the list, or be about to. */
static void evict(const struct rig *rig, uint64_t random)
{
        Bfcd__Evict body = BFCD__EVICT__INIT;
        Bfcd__Request r = REQUEST(EVICT, evict, &body);

        body.session_id = find_hostile_session(rig, random);
        order(rig, &r, ENOENT);
}

/* The first orders are one of each kind; then they come by chance. */
static void give_order(struct rig *rig, uint64_t n_orders, uint64_t *random)
{
        uint64_t what = n_orders < LEAST_ORDERS ? n_orders % 4 : random_next(random) % 4;

        switch (what) {
        case 0:
                reload(rig, &configs[random_next(random) % N_CONFIGS]);
                break;
        case 1:
                drain(rig);
                usleep((useconds_t)(random_next(random) % DRAIN_MS) * 1000);
                resume(rig);
                break;
        case 2:
                evict(rig, random_next(random));
                break;
        default:
                trim(rig, random_next(random) % 2 ? 0 : 4 * MIB);
        }
}

/* ---- all together ------------------------------------------------------------- */

static bool is_calm(struct rig *rig)
{
        struct rig_counts n = rig_count(rig);

        return n.n_sessions == 0 && n.n_blocks == 0 && n.n_quarantined == 0 &&
               n.n_extents == rig->n_extents && n.bytes_pending == 0 &&
               rig_charge(rig, "good", "train") == 0 && rig_charge(rig, NEIGHBOUR, "train") == 0 &&
               rig_charge(rig, ATTACKER, "train") == 0;
}

static bool is_in_state(const struct rig *rig, const char *state)
{
        Bfcd__Reply *page;
        bool is;

        ck_assert_int_eq(raw_list(rig->admin, BFCD__LIST__KIND__STATUS, 0, &page), 0);
        ck_assert_uint_eq(page->list->status->n_devices, 1);
        is = strcmp(page->list->status->devices[0]->state, state) == 0;
        bfcd__reply__free_unpacked(page, NULL);
        return is;
}

static bool has_worked_enough(struct weather *w)
{
        for (unsigned i = 0; i < N_WORKERS; i++)
                if (atomic_load(&w->n_rounds[i]) < LEAST_ROUNDS)
                        return false;
        return true;
}

/* Returns how many orders were given. */
static uint64_t rage(struct rig *rig, struct weather *w, const pid_t *workers, uint64_t *ret_n_hostile)
{
        int64_t begin_ms = clock_ms(),
                end_ms = begin_ms + (int64_t)(test_seconds(suite_is_long() ? 4 : 1) * 1000);
        uint64_t random = w->seed, n_orders = 0, n_hostile = 0;
        struct slot slots[N_SLOTS] = { { 0 } };

        while (clock_ms() < end_ms || n_orders < LEAST_ORDERS || n_hostile < LEAST_HOSTILE ||
               w->stage.n_acts + w->attack_stage.n_acts < LEAST_ACTS || !has_worked_enough(w)) {
                for (unsigned i = 0; i < N_SLOTS; i++) {
                        if (slots[i].pid > 0 && clock_ms() < slots[i].until_ms)
                                continue;
                        start_hostile(&slots[i], w, &random);
                        n_hostile++;
                }
                give_order(rig, n_orders++, &random);
                for (unsigned i = 0; i < N_WORKERS; i++)
                        ck_assert_msg(waitpid(workers[i], NULL, WNOHANG) == 0,
                                      "worker %u ended in the storm; see its message on stderr", i);
        }
        for (unsigned i = 0; i < N_SLOTS; i++)
                end_hostile(&slots[i]);
        *ret_n_hostile = n_hostile;
        return n_orders;
}

/* Everything is back, and the daemon is as it was at the start. */
static void assert_calm(struct rig *rig)
{
        reload(rig, &configs[0]);
        ck_assert_msg(WAIT_FOR(is_calm(rig), TIMEOUT_MS), "something is held or charged after the storm");
        ck_assert_msg(WAIT_FOR(process_count_fds(rig->pid) == rig->n_fds, TIMEOUT_MS),
                      "%u fds are open, %u were", process_count_fds(rig->pid), rig->n_fds);
        drain(rig);
        ck_assert_msg(WAIT_FOR(is_in_state(rig, "drained"), TIMEOUT_MS), "the device does not get empty");
        resume(rig);
        ck_assert(is_in_state(rig, "ok"));
}

static uint64_t seed_of_run(void)
{
        const char *text = getenv("BFC_TEST_SEED");

        return text && *text ? strtoull(text, NULL, 10) : 1;
}

TEST(a_storm)
{
        struct rig *rig = rig_start(&configs[0]);
        struct weather *w = shared_memory(sizeof(*w));
        pid_t workers[N_WORKERS];
        uint64_t n_orders, n_hostile, n_rounds = 0;

        w->seed = seed_of_run();
        printf("# storm: seed %llu\n", (unsigned long long)w->seed);
        strcpy(w->socket, rig->socket);
        strcpy(w->stage.socket, rig->socket);
        strcpy(w->attack_stage.socket, rig->socket);
        w->attack_stage.daemon = rig->pid;
        for (unsigned i = 0; i < N_WORKERS; i++)
                workers[i] = child_start(work, &(struct place){ w, i });
        n_orders = rage(rig, w, workers, &n_hostile);
        atomic_store(&w->is_over, true);
        for (unsigned i = 0; i < N_WORKERS; i++) {
                child_join(workers[i]);
                n_rounds += w->n_rounds[i];
        }
        assert_calm(rig);
        printf("# storm: %llu rounds of work, %llu refusals; %llu hostile processes, %llu acts; %llu orders\n",
               (unsigned long long)n_rounds, (unsigned long long)w->n_refusals, (unsigned long long)n_hostile,
               (unsigned long long)(w->stage.n_acts + w->attack_stage.n_acts), (unsigned long long)n_orders);
        rig_stop(rig);
}

int main(void)
{
        return harness_cases_with("storm", test_seconds(4) + 240, NULL);
}
