/* One tenant, one user or one process with many groups holds no other out: sessions, connections that have not
 * said hello, groups, and lines of the log.
 *
 * The daemon is one that counts how often it asks for a peer's groups. How long a victim waits is measured by
 * bench-attacks, not here.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <grp.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include "tests/attacks/attack.h"
#include "tests/integration/tools.h"

#define GENEROUS_MS SETTLE_MS
#define MEMBERS_GID 4343u
#define N_CHURNED   1200u /* connections of the attackers: more than all places */
#define N_PROVOKED  1500u
#define PLACES      40u
#define MANY_GROUPS 2000u

static const struct rig_config crowded = {
        .top = "max_sessions: 40\ntimeouts: {quarantine: 1s}\n",
        .partitions = "      - {name: a, limit: 32MiB}\n      - {name: b, limit: 32MiB}\n"
                      "      - {name: c, limit: 32MiB}\n      - {name: d, limit: 32MiB}\n",
        .tenants =
                "  - name: red\n"
                "    match: {uid: [@UID@], gid: [4343]}\n"
                "    quotas: [{partition: a, limit: 16MiB}]\n" TENANT(
                        "blue", "@UID@",
                        "a, limit: 16MiB") "  - name: " ATTACKER "\n"
                                           "    match: {uid: [@UID@, @OTHER@], gid: [4245]}\n"
                                           "    quotas: [{partition: a}, {partition: b}, {partition: c}, {partition: d}]\n",
};

static const struct attack *find_attack(const char *key)
{
        for (size_t i = 0; i < n_attacks; i++)
                if (strcmp(attacks[i]->key, key) == 0)
                        return attacks[i];
        ck_abort_msg("no attack '%s'", key);
}

struct scene {
        struct rig *rig;
        struct attack_stage *stage;
        struct attack_run run;
        _Atomic uint64_t *n_groups; /* how often groups were asked for */
        char count_path[64];
};

static void scene_count_groups(struct scene *s)
{
        int fd;

        strcpy(s->count_path, "/tmp/bfc-crowds-XXXXXX");
        fd = mkstemp(s->count_path);
        ck_assert_int_ge(fd, 0);
        ck_assert_int_eq(ftruncate(fd, 4096), 0);
        s->n_groups = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        ck_assert_ptr_ne((void *)s->n_groups, MAP_FAILED);
        close(fd);
        setenv("BFC_COUNT_GROUPS", s->count_path, 1);
}

static void scene_begin(struct scene *s, const struct rig_config *config)
{
        *s = (struct scene){ .rig = NULL };
        scene_count_groups(s);
        s->rig = rig_start(config);
        s->stage = attack_stage_new(s->rig->socket, s->rig->pid);
        ck_assert_ptr_nonnull(s->stage);
}

static void scene_attack(struct scene *s, const char *key, uint64_t n_acts)
{
        const struct attack *attack = find_attack(key);

        s->rig->forgiven = attack->log_line;
        ck_assert_int_eq(attack_start(attack, s->stage, &s->run), 0);
        ck_assert_msg(WAIT_FOR(atomic_load(&s->stage->n_up) >= attack_n_processes(attack) &&
                                       atomic_load(&s->stage->n_acts) >= n_acts,
                               GENEROUS_MS),
                      "%s: %llu acts", key, (unsigned long long)atomic_load(&s->stage->n_acts));
}

static void scene_end(struct scene *s)
{
        attack_stop(&s->run);
        ck_assert(WAIT_FOR(rig_count(s->rig).n_sessions == 0, GENEROUS_MS));
        rig_stop(s->rig);
        munmap((void *)(uintptr_t)s->n_groups, 4096);
        unlink(s->count_path);
        unsetenv("BFC_COUNT_GROUPS");
}

static bool lacks_root(void)
{
        if (!is_root())
                printf("# skipped: only root can become other users\n");
        return !is_root();
}

/* ---- sessions --------------------------------------------------------------- */

/* Three tenants: each is sure of 13 of 40 places, and one alone has 14, in however many partitions. */
TEST(one_tenant_cannot_use_all_sessions)
{
        enum { SHARE = PLACES / 3, N_TAKEN = PLACES - 2 * SHARE };
        struct raw *others[2 * SHARE];
        struct scene s;

        scene_begin(&s, &crowded);
        scene_attack(&s, "sessions", N_TAKEN);
        for (unsigned i = 0; i < 2 * SHARE; i++) {
                others[i] = raw_connect(s.rig->socket, i % 2 ? "red" : "blue");
                ck_assert_msg(others[i], "session %u: %s", i, raw_refusal());
        }
        ck_assert_uint_eq(atomic_load(&s.stage->n_acts), N_TAKEN);
        ck_assert_uint_eq(rig_count(s.rig).n_sessions, PLACES);
        for (unsigned i = 0; i < 2 * SHARE; i++)
                raw_close(others[i]);
        scene_end(&s);
}

TEST(a_tenants_session_limit_is_separate)
{
        static const struct rig_config config = {
                .partitions = "      - {name: a, limit: 32MiB}\n      - {name: b, limit: 32MiB}\n",
                .tenants = "  - name: " ATTACKER "\n"
                           "    match: {uid: [@UID@, @OTHER@]}\n"
                           "    quotas: [{partition: a, max_sessions: 3}, {partition: b, max_sessions: 2}]\n",
        };
        struct scene s;

        scene_begin(&s, &config);
        scene_attack(&s, "sessions", 5);
        ck_assert_int_eq(client_refused(s.rig, is_root() ? NULL : ATTACKER, "b"), -EDQUOT);
        ck_assert_ptr_nonnull(
                strstr(bfc_last_error(), "has 2 sessions in partition 'b': its limit max_sessions is 2"));
        ck_assert_uint_eq(atomic_load(&s.stage->n_acts), 5);
        scene_end(&s);
}

/* ---- connections without a hello -------------------------------------------- */

/* As a user that a tenant matches by a supplementary group only. */
struct member {
        const char *socket;
        struct gate is_there, may_speak;
};

static void be_silent_and_speak(void *arg)
{
        struct member *m = arg;
        enum { N_TRIES = 5 };
        gid_t gid = MEMBERS_GID;
        struct raw *raw = NULL;
        int64_t start_ms;

        REQUIRE(setgroups(1, &gid) == 0 && setgid(OTHER_UID + 7) == 0 && setuid(OTHER_UID + 7) == 0,
                "setuid");
        for (unsigned i = 0; i < N_TRIES; i++) {
                start_ms = clock_ms();
                REQUIRE(raw_open(m->socket, &raw) == 0, "connect");
                if (i == 0) {
                        gate_meet(&m->is_there, &m->may_speak);
                }
                if (raw_hello(raw, "red", NULL) == 0)
                        break;
                /* The daemon waits 10 s for a hello. On a slow machine this one came later than that. */
                REQUIRE(i + 1 < N_TRIES && clock_ms() - start_ms >= 5000, "the hello: %s", raw_refusal());
                raw = raw_close(raw);
        }
        REQUIRE(raw_goodbye(raw) == 0, "goodbye");
        raw_close(raw);
}

/* Attackers hold all places that they can get, and open each connection again that is closed. A member of another tenant
 * works meanwhile, and even a silent connection of a member stays. */
static void attackers_hold_no_member_out(const char *key)
{
        struct member member = { .is_there = gate_new(), .may_speak = gate_new() };
        struct scene s;
        uint64_t n_acts;
        pid_t pid;

        scene_begin(&s, &crowded);
        member.socket = s.rig->socket;
        scene_attack(&s, key, 1);
        pid = child_start(be_silent_and_speak, &member);
        ck_assert(gate_wait(&member.is_there, GENEROUS_MS));
        n_acts = atomic_load(&s.stage->n_acts);
        for (unsigned i = 0; i < (suite_is_long() ? 20 : 3); i++) {
                bfc_client *client = client_open(s.rig, "blue", NULL);
                void *p;

                ck_assert_ok(bfc_malloc(client, 4096, &p));
                ck_assert_ok(bfc_free(client, p));
                bfc_disconnect(client);
        }
        ck_assert(WAIT_FOR(atomic_load(&s.stage->n_acts) >= n_acts + (suite_is_long() ? 4 : 1) * N_CHURNED,
                           GENEROUS_MS));
        gate_open(&member.may_speak);
        child_join(pid);
        scene_end(&s);
}

TEST(eight_users_cannot_block_a_tenant)
{
        if (!lacks_root())
                attackers_hold_no_member_out("silent");
}

TEST(seventy_users_cannot_block_a_tenant)
{
        if (!lacks_root())
                attackers_hold_no_member_out("many-silent");
}

/* Tenants match them by a group that they keep. */
TEST(many_uids_of_a_tenant_cannot_block_another)
{
        if (!lacks_root())
                attackers_hold_no_member_out("uids");
}

/* ---- groups ------------------------------------------------------------------ */

static const struct rig_config no_groups = {
        .tenants = TENANT("red", "@UID@", "train, limit: 16MiB"),
};

static void be_refused_three_times(void *arg)
{
        struct raw *raw;

        REQUIRE(raw_open(arg, &raw) == 0, "connect");
        for (unsigned i = 0; i < 3; i++)
                REQUIRE(raw_hello(raw, "no-such", NULL) == -EACCES, "a hello was granted");
        raw_close(raw);
}

static void work_and_ask(void *arg)
{
        struct raw *raw = raw_connect(arg, "red");

        REQUIRE(raw, "no session: %s", raw_refusal());
        for (unsigned i = 0; i < 5; i++) {
                Bfcd__Reply *reply;

                REQUIRE(raw_list(raw, BFCD__LIST__KIND__WHOAMI, 0, &reply) == 0, "whoami");
                bfcd__reply__free_unpacked(reply, NULL);
        }
        REQUIRE(raw_goodbye(raw) == 0, "goodbye");
        raw_close(raw);
}

static uint64_t groups_asked_for(struct scene *s, void (*act)(void *))
{
        uint64_t before = atomic_load(s->n_groups);

        child_join(child_start(act, s->rig->socket));
        return atomic_load(s->n_groups) - before;
}

/* Once for each connection; not at all if no tenant has groups. */
TEST(supplementary_groups_are_read_once)
{
        struct scene s;

        scene_begin(&s, &no_groups);
        ck_assert_uint_eq(groups_asked_for(&s, be_refused_three_times), 0);
        ck_assert_uint_eq(groups_asked_for(&s, work_and_ask), 0);
        scene_end(&s);
        scene_begin(&s, &crowded);
        ck_assert_uint_eq(groups_asked_for(&s, be_refused_three_times), 1);
        ck_assert_uint_eq(groups_asked_for(&s, work_and_ask), 1);
        scene_end(&s);
}

static void with_many_groups(void (*act)(void *), void *arg)
{
        gid_t gids[MANY_GROUPS];

        for (unsigned i = 0; i < MANY_GROUPS; i++)
                gids[i] = MEMBERS_GID + i;
        REQUIRE(setgroups(MANY_GROUPS, gids) == 0 && setgid(OTHER_UID + 7) == 0 && setuid(OTHER_UID + 7) == 0,
                "setuid");
        act(arg);
}

static void work_in_many_groups(void *arg)
{
        with_many_groups(work_and_ask, arg);
}

static void be_refused_in_many_groups(void *arg)
{
        with_many_groups(be_refused_three_times, arg);
}

/* So many are counted when it connects, and read when its hello comes: one by which it matches is found. */
TEST(many_groups_are_read_once)
{
        struct scene s;

        if (lacks_root())
                return;
        scene_begin(&s, &crowded);
        ck_assert_uint_eq(groups_asked_for(&s, be_refused_in_many_groups), 2);
        ck_assert_uint_eq(groups_asked_for(&s, work_in_many_groups), 2);
        scene_end(&s);
}

/* ---- the log ----------------------------------------------------------------- */

static size_t count_lines(const char *text, const char *words)
{
        size_t n = 0;

        for (const char *at = strstr(text, words); at; at = strstr(at + 1, words))
                n++;
        return n;
}

/* However many a tenant provokes, there is a line a second of each kind; and it hides no other tenant's. */
TEST(log_lines_of_a_tenant_are_limited)
{
        static const char *const kinds[] = { "disconnected:", "refused: ", ": refused (",
                                             "end of the quarantine" };
        int64_t start = clock_ms();
        struct raw *victim;
        struct scene s;
        char *log, words[64];
        size_t n_max;

        scene_begin(&s, &crowded);
        scene_attack(&s, "logs", N_PROVOKED);
        victim = session_open(s.rig->socket, "blue");
        ck_assert_int_eq(raw_send_bytes(victim, "\xff\xff\xff\xff", 4), 0);
        ck_assert_int_eq(raw_wait_hang_up(victim, GENEROUS_MS), 0);
        snprintf(words, sizeof(words), "session %llu (tenant 'blue', uid ",
                 (unsigned long long)victim->session_id);
        raw_close(victim);
        ck_assert(WAIT_FOR(rig_logged(s.rig, words), GENEROUS_MS));
        ck_assert(WAIT_FOR(rig_logged(s.rig, "similar messages suppressed)"), GENEROUS_MS));
        attack_stop(&s.run);
        ck_assert(WAIT_FOR(rig_count(s.rig).n_sessions == 0, GENEROUS_MS));
        log = rig_log(s.rig);
        /* Of each kind: a line a second of the attacker, one of its user before the hello, and the victim's. */
        n_max = 2 * ((size_t)(clock_ms() - start) / 1000 + 2) + 1;
        /* Ends are all recorded, up to a bound of the tenant's for each minute: see accounting.h. */
        ck_assert_uint_le(count_lines(log, " ended ("), 601 * ((size_t)(clock_ms() - start) / 60000 + 1) + 1);
        for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++)
                ck_assert_msg(count_lines(log, kinds[i]) <= n_max, "%zu lines with '%s'",
                              count_lines(log, kinds[i]), kinds[i]);
        free(log);
        scene_end(&s);
}

/* ---- polls ------------------------------------------------------------------ */

static void ask_often(struct raw *raw, unsigned n_requests)
{
        Bfcd__List list = BFCD__LIST__INIT;
        Bfcd__Request request = REQUEST(LIST, list, &list);

        list.kind = BFCD__LIST__KIND__WHOAMI;
        for (unsigned i = 0; i < n_requests; i++) {
                request.id = 0;
                ck_assert_int_eq(raw_send(raw, &request), 0);
        }
}

static void expect_lists(struct raw *session, unsigned n)
{
        Bfcd__Reply *reply;

        for (; n > 0; n--) {
                ck_assert_int_eq(raw_receive(session, SETTLE_MS, &reply), 0);
                ck_assert_int_eq(reply->body_case, BFCD__REPLY__BODY_LIST);
                bfcd__reply__free_unpacked(reply, NULL);
        }
}

/* As after a restart. A user has 128 places before the hello, and who has come first is served first. */
RIG_TEST(the_first_of_a_crowd_are_served, (struct rig_config){ .top = NULL })
{
        enum { N = 400, N_SERVED = 100 };
        Bfcd__Hello hello = BFCD__HELLO__INIT;
        Bfcd__Request request = REQUEST(HELLO, hello, &hello);
        struct raw *crowd[N];

        hello.version = 1;
        hello.name = (char *)(uintptr_t) "a program whose hello takes two turns";
        child_stop(rig->pid);
        for (unsigned i = 0; i < N; i++) {
                ck_assert_int_eq(raw_open(rig->socket, &crowd[i]), 0);
                ck_assert_int_eq(raw_send(crowd[i], &request), 0);
        }
        ck_assert_int_eq(kill(rig->pid, SIGCONT), 0);
        for (unsigned i = 0; i < N_SERVED; i++) {
                Bfcd__Reply *reply;

                ck_assert_msg(raw_receive(crowd[i], SETTLE_MS, &reply) == 0, "number %u: no reply", i);
                ck_assert_int_eq(reply->body_case, BFCD__REPLY__BODY_HELLO);
                bfcd__reply__free_unpacked(reply, NULL);
        }
        for (unsigned i = 0; i < N; i++)
                raw_close(crowd[i]);
}

/* The kernel says of all of them that something came, again and again until each has had its turns. */
TEST(busy_connections_stay_in_the_poll)
{
        enum { N = 8, N_REQUESTS = 64 };
        struct raw *sessions[N];
        struct scene s;
        uint64_t before;

        scene_begin(&s, &crowded);
        for (unsigned i = 0; i < N; i++) {
                sessions[i] = raw_connect(s.rig->socket, "blue");
                ck_assert_msg(sessions[i], "session %u: %s", i, raw_refusal());
                ask_often(sessions[i], 1); /* from its first request on the process is watched */
                expect_lists(sessions[i], 1);
        }
        before = atomic_load(&s.n_groups[1]);
        ck_assert_uint_gt(before, 0);
        child_stop(s.rig->pid);
        for (unsigned i = 0; i < N; i++)
                ask_often(sessions[i], N_REQUESTS);
        ck_assert_int_eq(kill(s.rig->pid, SIGCONT), 0);
        for (unsigned i = 0; i < N; i++)
                expect_lists(sessions[i], N_REQUESTS);
        ck_assert_uint_eq(atomic_load(&s.n_groups[1]), before);
        for (unsigned i = 0; i < N; i++)
                raw_close(sessions[i]);
        scene_end(&s);
}
