/* Memory that a device cannot take back from processes that have it mapped: real
 * clients unmap it by themselves, and others are made to.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/integration/tools.h"
#include "tests/integration/raw.h"

#define TWO_TENANTS                                                                                          \
        .partitions = "      - {name: train, limit: 20MiB, growth: on-demand}\n",                            \
        .tenants = "  - {name: red, match: {uid: @UID@}, quotas: [{partition: train, limit: 20MiB}]}\n"      \
                   "  - {name: blue, match: {uid: @UID@}, quotas: [{partition: train, limit: 20MiB}]}\n"

static const struct rig_config two_tenants = { TWO_TENANTS,
                                               .top = "timeouts: {reclaim: 60m, quarantine: 60m}\n" };

/* For clients that do not unmap what they are told to within 5 s. A request for memory waits longer than that. */
static const struct rig_config impatient = { TWO_TENANTS,
                                             .top = "timeouts: {reclaim: 60m, quarantine: 60m}\n",
                                             .moves_clock = true };

/* ---- children -------------------------------------------------------------- */

struct scene {
        const char *socket;
        struct gate up, go, answer;
};

static struct scene *scene_new(const struct rig *rig)
{
        struct scene *s = shared_memory(sizeof(*s));

        *s = (struct scene){ rig->socket, gate_new(), gate_new(), gate_new() };
        return s;
}

/* Has had 16 MiB, uses nothing of it, and sleeps. */
static void have_and_sleep(void *arg)
{
        struct scene *s = arg;
        bfc_client *client = child_client_open(s->socket, "red");
        void *p;

        REQUIRE(bfc_malloc(client, 16 * MIB, &p) == 0, "%s", bfc_last_error());
        pattern_write(p, 16 * MIB, 1);
        REQUIRE(bfc_free(client, p) == 0, "%s", bfc_last_error());
        gate_meet(&s->up, &s->go);
        REQUIRE(bfc_malloc(client, 16 * MIB, &p) == 0, "%s", bfc_last_error());
        pattern_write(p, 16 * MIB, 2);
        REQUIRE(pattern_holds(p, 16 * MIB, 2), "reused memory");
        bfc_disconnect(client);
}

static struct raw *have_16_mib(const struct scene *s, bool wants_events)
{
        struct raw *raw = NULL;
        Bfcd__Block block;

        REQUIRE(raw_open(s->socket, &raw) == 0, "no connection");
        raw->wants_events = wants_events;
        REQUIRE(raw_hello(raw, "red", NULL) == 0, "%s", raw_refusal());
        REQUIRE(raw_malloc(raw, 0, 16 * MIB, &block) == 0, "%s", raw_refusal());
        REQUIRE(raw_free(raw, block.block_id) == 0, "%s", raw_refusal());
        return raw;
}

static void take_no_events(void *arg)
{
        struct scene *s = arg;
        struct raw *raw = have_16_mib(s, false);

        gate_open(&s->up);
        REQUIRE(raw_wait_hang_up(raw, 20000) == 0, "the daemon did not mind");
        gate_open(&s->go);
        pause();
}

/* Busy for longer than it may be; when it is done it does what it was told. */
static void be_busy(void *arg)
{
        struct scene *s = arg;
        struct raw *raw = have_16_mib(s, true);
        Bfcd__Event *event;
        Bfcd__Block block;

        gate_meet(&s->up, &s->answer);
        while (raw->n_extents > 0) {
                REQUIRE(raw_event(raw, SETTLE_MS, &event) == 0, "no event");
                for (size_t i = 0; i < event->retire->n_extent_ids; i++)
                        REQUIRE(raw_let_go(raw, event->retire->extent_ids[i]) == 0, "an unknown extent");
                REQUIRE(raw_answer(raw, event->sequence) == 0, "no connection");
                bfcd__event__free_unpacked(event, NULL);
        }
        REQUIRE(gate_wait(&s->go, SETTLE_MS), "the test did not open the gate");
        REQUIRE(raw_malloc(raw, 0, 2 * MIB, &block) == 0, "%s", raw_refusal());
        REQUIRE(raw_goodbye(raw) == 0, "no goodbye");
        raw_close(raw);
}

static int blue_malloc(struct rig *rig, uint64_t n_bytes)
{
        struct raw *raw = session_open(rig->socket, "blue");
        Bfcd__Block block;
        int r;

        r = raw_malloc(raw, 0, n_bytes, &block);
        if (r == 0) /* what it was given is not mapped, so this is all */
                ck_assert_int_eq(raw_goodbye(raw), 0);
        raw_close(raw);
        return r;
}

/* ---- tests ------------------------------------------------------------------ */

TEST(a_sleeping_client_unmaps)
{
        if (!CHILDREN_HAVE_EVENTS)
                return;

        struct rig *rig = rig_start(&two_tenants);
        struct scene *s = scene_new(rig);
        pid_t pid = child_start_until(&s->up, have_and_sleep, s);

        ck_assert_uint_eq(rig_stats(rig, "red", "train").bytes_reserved, 16 * MIB);
        ck_assert_int_eq(blue_malloc(rig, 20 * MIB), 0);
        ck_assert_uint_eq(rig_stats(rig, "red", "train").bytes_reserved, 0);
        gate_open(&s->go);
        child_join(pid);
        rig_stop(rig);
}

static void must_refuse_blue(void *arg)
{
        REQUIRE(blue_malloc(arg, 20 * MIB) == -ENOMEM, "it was not refused");
}

/* The request waits for the memory until the client is late. */
static void assert_refused_late(struct rig *rig)
{
        pid_t pid = child_start(must_refuse_blue, rig);
        int status;

        ck_assert(WAIT_FOR((rig_pass(rig, 500), waitpid(pid, &status, WNOHANG) == pid), SETTLE_MS));
        ck_assert_msg(WIFEXITED(status) && WEXITSTATUS(status) == 0, "it ended with status %d", status);
}

static void assert_logged(struct rig *rig, const char *line)
{
        char *log, *first;

        (void)WAIT_FOR(rig_logged(rig, line), SETTLE_MS);
        log = rig_log(rig);
        first = strstr(log, line);
        ck_assert_msg(first != NULL, "no \"%s\" in the log:\n%s", line, log);
        ck_assert_msg(!strstr(first + 1, line), "\"%s\" is logged twice:\n%s", line, log);
        free(log);
}

/* Its session stays, also while other sessions request memory. */
static void is_late(bool answers)
{
        struct rig *rig = rig_start(&impatient);
        struct scene *s = scene_new(rig);
        pid_t pid = child_start_until(&s->up, be_busy, s);

        assert_refused_late(rig);
        ck_assert_uint_eq(rig_count(rig).n_quarantined, 0);
        ck_assert_uint_eq(rig_count(rig).n_sessions, 1);
        ck_assert_uint_eq(rig_stats(rig, "red", "train").bytes_reserved, 16 * MIB);
        ck_assert_uint_eq(rig_count(rig).bytes_pending, 16 * MIB);
        ck_assert_int_eq(blue_malloc(rig, 20 * MIB), -ENOMEM);
        ck_assert_int_eq(blue_malloc(rig, 4 * MIB), 0); /* other sessions are served */
        assert_logged(rig, "did not unmap memory within 5 s");
        if (answers)
                gate_open(&s->answer);
        else
                child_kill(pid);
        ck_assert(WAIT_FOR(rig_charge(rig, "red", "train") == 0, SETTLE_MS));
        ck_assert_int_eq(blue_malloc(rig, 20 * MIB), 0);
        gate_open(&s->go);
        if (answers)
                child_join(pid);
        rig_stop(rig);
}

TEST(a_busy_client_is_late)
{
        is_late(true);
}

TEST(an_unresponsive_client_is_late)
{
        is_late(false);
}

/* A client without events cannot unmap. It is disconnected, and its memory is released with its process. */
TEST(a_client_without_events_is_disconnected)
{
        struct rig *rig = rig_start(&impatient);
        struct scene *s = scene_new(rig);
        pid_t pid = child_start_until(&s->up, take_no_events, s);

        assert_refused_late(rig);
        ck_assert(gate_wait(&s->go, SETTLE_MS));
        ck_assert(WAIT_FOR(rig_count(rig).n_quarantined == 1, SETTLE_MS));
        ck_assert_uint_eq(rig_stats(rig, "red", "train").bytes_reserved, 16 * MIB);
        ck_assert_uint_eq(rig_count(rig).bytes_pending, 16 * MIB);
        assert_logged(rig, "the client cannot unmap memory");
        ck_assert_int_eq(blue_malloc(rig, 4 * MIB), 0); /* other sessions are served */
        child_kill(pid);
        ck_assert(WAIT_FOR(rig_charge(rig, "red", "train") == 0, SETTLE_MS));
        ck_assert_int_eq(blue_malloc(rig, 20 * MIB), 0);
        rig_stop(rig);
}

/* Connects and leaves, all the time. */
static void come_and_go(void *arg)
{
        const char *socket = arg;

        for (;;) {
                struct raw *raw = NULL;

                REQUIRE(raw_open(socket, &raw) == 0, "no connection");
                raw_close(raw);
                usleep(3000);
        }
}

/* Connections that wake the daemon all the time do not delay its time-outs. */
TEST(unauthenticated_connections_do_not_delay_a_retire)
{
        static const struct rig_config config = {
                .top = "timeouts: {reclaim: 200ms}\n",
                .partitions = "      - {name: train, limit: 20MiB, growth: on-demand}\n",
                .tenants =
                        "  - {name: red, match: {uid: @UID@}, quotas: [{partition: train, limit: 20MiB}]}\n"
                        "  - {name: blue, match: {uid: @UID@}, quotas: [{partition: train, limit: 20MiB}]}\n",
        };
        struct rig *rig = rig_start(&config);
        pid_t unauthenticated = child_start(come_and_go, rig->socket);
        struct raw *raw = NULL;
        Bfcd__Block block;

        ck_assert_int_eq(raw_open(rig->socket, &raw), 0);
        raw->wants_events = true;
        ck_assert_int_eq(raw_hello(raw, "red", NULL), 0);
        ck_assert_int_eq(raw_malloc(raw, 0, 16 * MIB, &block), 0);
        ck_assert_int_eq(raw_free(raw, block.block_id), 0);
        ck_assert_int_eq(blue_malloc(rig, 20 * MIB), -ENOMEM); /* else no answer comes */
        child_kill(unauthenticated);
        session_end(raw);
        rig_stop(rig);
}

static void want(void *arg)
{
        struct scene *s = arg;
        bfc_client *client;
        void *p;

        REQUIRE(gate_wait(&s->go, SETTLE_MS), "the test did not open the gate");
        client = child_client_open(s->socket, "blue");
        REQUIRE(bfc_malloc(client, 20 * MIB, &p) == 0, "%s", bfc_last_error());
        pattern_write(p, 20 * MIB, 3);
        bfc_disconnect(client);
}

/* By the book, without the library. */
TEST(a_retire_by_hand)
{
        struct rig *rig = rig_start(&two_tenants);
        struct scene *s = scene_new(rig);
        struct raw *raw = NULL;
        Bfcd__Block block;
        Bfcd__Event *event;
        pid_t pid = child_start(want, s); /* before there are fds that it would inherit */

        ck_assert_int_eq(raw_open(rig->socket, &raw), 0);
        raw->wants_events = true;
        ck_assert_int_eq(raw_hello(raw, "red", NULL), 0);
        ck_assert_int_ge(raw->events_fd, 0);
        ck_assert_int_eq(raw_malloc(raw, 0, 16 * MIB, &block), 0);
        ck_assert_int_eq(raw_free(raw, block.block_id), 0);
        ck_assert_int_eq(raw_event(raw, 100, &event), RAW_TIMEOUT); /* no event is due */
        gate_open(&s->go);
        while (raw->n_extents > 0) {
                ck_assert_int_eq(raw_event(raw, SETTLE_MS, &event), 0);
                ck_assert_int_eq(event->body_case, BFCD__EVENT__BODY_RETIRE);
                for (size_t i = 0; i < event->retire->n_extent_ids; i++)
                        ck_assert_int_eq(raw_let_go(raw, event->retire->extent_ids[i]), 0);
                ck_assert_int_eq(raw_answer(raw, event->sequence), 0);
                bfcd__event__free_unpacked(event, NULL);
        }
        child_join(pid);
        ck_assert_int_eq(raw_malloc(raw, 0, 2 * MIB, &block), 0);
        session_end(raw);
        rig_stop(rig);
}

static const struct {
        const char *bytes;
        size_t n_bytes;
} lies[] = {
        { "\2\0\0\0\010\1", 6 },   /* 1, which was never sent */
        { "\2\0\0\0\010\0", 6 },   /* 0 */
        { "\2\0\0\0\170\1", 6 },   /* an unknown field */
        { "\2\0\0\0\377\377", 6 }, /* no message */
        { "\0\0\0\0", 4 },         /* an empty frame */
        { "\377\377\377\377", 4 }, /* an endless one */
};

TEST(invalid_answers_to_events_disconnect)
{
        struct rig *rig = rig_start(&two_tenants);

        for (size_t i = 0; i <= sizeof(lies) / sizeof(lies[0]) + 1; i++) {
                struct raw *raw = NULL;
                Bfcd__Block block;

                ck_assert_int_eq(raw_open(rig->socket, &raw), 0);
                raw->wants_events = true;
                ck_assert_int_eq(raw_hello(raw, "red", NULL), 0);
                ck_assert_int_eq(raw_malloc(raw, 0, 1, &block), 0);
                ck_assert_int_eq(raw_free(raw, block.block_id), 0);
                if (i < sizeof(lies) / sizeof(lies[0])) {
                        ck_assert_int_eq(send(raw->events_fd, lies[i].bytes, lies[i].n_bytes, MSG_NOSIGNAL),
                                         (ssize_t)lies[i].n_bytes);
                } else if (i == sizeof(lies) / sizeof(lies[0])) {
                        int fd = raw->fd; /* the same frame with an fd beside it */

                        int r;

                        raw->fd = raw->events_fd;
                        r = raw_send_fds(raw, lies[0].bytes, lies[0].n_bytes, &fd, 1);
                        raw->fd = fd;
                        if (r == -EPERM) { /* Linux 6.16: it does not come to that */
                                raw_close(raw);
                                continue;
                        }
                        ck_assert_int_eq(r, 0);
                } else {
                        close(raw->events_fd);
                        raw->events_fd = -1;
                }
                ck_assert_msg(raw_wait_hang_up(raw, SETTLE_MS) == 0, "number %zu was believed", i);
                raw_close(raw);
        }
        /* This process lives on: no other session receives its extents. */
        rig_terminate(rig);
        rig_discard(rig);
}
