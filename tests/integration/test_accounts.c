/* The daemon's records at work: in a file and in a stand-in for the journal, which reads or does not; and what
 * bfcctl history says of them.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <pwd.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "tests/integration/json.h"

static char folder[64], file_path[96], moved_path[96], journal_path[96], top[160];
static int journal = -1;
static struct rig_config config = { .top = top };

static void setup(void)
{
        strcpy(folder, "/tmp/bfcd-accounts-XXXXXX");
        ck_assert_ptr_nonnull(mkdtemp(folder));
        ck_assert_int_eq(chmod(folder, 0755), 0);
        snprintf(file_path, sizeof(file_path), "%s/records.jsonl", folder);
        snprintf(moved_path, sizeof(moved_path), "%s/records.jsonl.1", folder);
        snprintf(journal_path, sizeof(journal_path), "%s/journal", folder);
        snprintf(top, sizeof(top), "records: {file: %s}\n", file_path);
}

static void teardown(void)
{
        if (journal >= 0)
                close(journal);
        journal = -1;
        unlink(file_path);
        unlink(moved_path);
        unlink(journal_path);
        ck_assert_int_eq(rmdir(folder), 0);
}

FIXTURE(accounts, setup, teardown);

/* ---- tools ---------------------------------------------------------------- */

static json_t *history(void)
{
        return ctl_json("/nowhere", WORDS("--json", "history", "--file", file_path));
}

static json_t *row(const json_t *h, const char *list, size_t i)
{
        json_t *ret = json_array_get(json_object_get(h, list), i);

        ck_assert_msg(ret != NULL, "no row %zu of %s", i, list);
        return ret;
}

static size_t n_rows(const json_t *h, const char *list)
{
        return json_array_size(json_object_get(h, list));
}

/* How often the records in a file have this text. */
static unsigned count(const char *path, const char *words)
{
        char *text = file_text(path);
        unsigned n = 0;

        for (const char *at = text; at && (at = strstr(at, words)); at++)
                n++;
        free(text);
        return n;
}

static json_int_t number_of_drops(const struct rig *rig)
{
        json_t *status = ctl_json(rig->admin_socket, WORDS("--json", "status"));
        json_int_t n = number_of(status, "num_records_lost");

        json_decref(status);
        return n;
}

struct life {
        char socket[96];
        struct gate up;
};

static void take_and_wait(void *arg)
{
        struct life *life = arg;
        bfc_client *client = child_client_open(life->socket, NULL);
        void *p;

        REQUIRE(bfc_malloc(client, 10 * MIB, &p) == 0, "%s", bfc_last_error());
        REQUIRE(bfc_malloc(client, MIB, &p) == 0, "%s", bfc_last_error());
        gate_open(&life->up);
        pause();
}

/* ---- a file --------------------------------------------------------------- */

RIG_TEST(a_killed_client_leaves_a_record, config)
{
        struct life life = { .up = gate_new() };
        char pid_words[32];
        pid_t pid;
        json_t *h;

        strcpy(life.socket, rig->socket);
        pid = child_start_until(&life.up, take_and_wait, &life);
        snprintf(pid_words, sizeof(pid_words), "\"pid\":%d,", (int)pid);
        child_kill(pid);
        ck_assert(WAIT_FOR(count(file_path, pid_words) == 1, SETTLE_MS));
        h = history();
        ck_assert_int_eq(number_of(h, "num_sessions"), 1);
        ck_assert_str_eq(string_of(row(h, "sessions", 0), "tenant"), "red");
        ck_assert_int_eq(number_of(row(h, "sessions", 0), "pid"), pid);
        ck_assert_int_eq(number_of(row(h, "sessions", 0), "peak_bytes_in_use"), 11 * MIB);
        ck_assert_int_eq(number_of(json_object_get(row(h, "sessions", 0), "partitions"), "train"), 11 * MIB);
        ck_assert_int_eq(number_of(row(h, "sessions", 0), "bytes_left"), 11 * MIB);
        json_decref(h);
}

static const char *own_name(void)
{
        const struct passwd *user = getpwuid(getuid());

        ck_assert_ptr_nonnull(user);
        return user->pw_name;
}

/* The row of red in train of `bfcctl tenants`. */
static json_t *tenant_row(const struct rig *rig)
{
        json_t *rows = ctl_json(rig->admin_socket, WORDS("--json", "tenants")),
               *ret = json_incref(json_array_get(rows, 0));

        ck_assert_str_eq(string_of(ret, "tenant"), "red");
        json_decref(rows);
        return ret;
}

/* Also while a hostile client has many requests refused: few records, and no refusal is missing in their sum. */
TEST(history_has_the_same_figures_as_bfcctl)
{
        struct rig *rig = rig_start(&config);
        struct raw *raw = session_open(rig->socket, NULL);
        json_t *before, *h, *refused;
        Bfcd__Block block;

        ck_assert_int_eq(raw_malloc(raw, 0, 20 * MIB, &block), 0);
        ck_assert_int_eq(raw_free(raw, block.block_id), 0);
        for (unsigned i = 0; i < 500; i++)
                ck_assert_int_eq(raw_malloc(raw, 0, 100 * MIB, &block), -EDQUOT);
        session_end(raw);
        before = tenant_row(rig);
        ck_assert_int_eq(number_of(before, "num_refusals"), 500);
        rig_stop(rig);
        h = history();
        ck_assert_uint_eq(n_rows(h, "tenants"), 1);
        ck_assert_int_eq(number_of(row(h, "tenants", 0), "peak_bytes_in_use"),
                         number_of(before, "peak_bytes_in_use"));
        ck_assert_int_eq(number_of(row(h, "tenants", 0), "peak_bytes_reserved"),
                         number_of(before, "peak_bytes_reserved"));
        ck_assert_int_eq(number_of(row(h, "tenants", 0), "bytes_limit"), number_of(before, "bytes_limit"));
        ck_assert_int_eq(number_of(row(h, "tenants", 0), "num_refusals"), 500);
        ck_assert_uint_eq(n_rows(h, "refusals"), 1);
        refused = row(h, "refusals", 0);
        ck_assert_str_eq(string_of(refused, "limit"), "quota");
        ck_assert_str_eq(string_of(refused, "partition"), "train");
        ck_assert_int_eq(number_of(refused, "largest_bytes"), 100 * MIB);
        ck_assert_ptr_nonnull(strstr(string_of(refused, "sentence"), "asked for more than its limit"));
        ck_assert_int_eq(number_of(refused, "num_records") + number_of(refused, "num_suppressed"), 500);
        ck_assert_uint_lt(count(file_path, "\"record\":\"refusal\""), 100);
        ck_assert_int_eq(number_of(row(h, "sessions", 0), "num_refusals"), 500);
        json_decref(before);
        json_decref(h);
}

TEST(a_refusal_in_a_lease_names_it)
{
        struct rig *rig = rig_start(&config);
        Bfcd__Block block;
        char uid[16];
        struct raw *raw;

        snprintf(uid, sizeof(uid), "%u", (unsigned)getuid());
        free(ctl_text(rig, WORDS("lease", "create", "job", "--tenant", "red", "--partition", "train",
                                 "--limit", "2MiB", "--user", uid)));
        raw = session_open(rig->socket, NULL);
        ck_assert_int_eq(raw_malloc(raw, 0, 4 * MIB, &block), -EDQUOT);
        session_end(raw);
        free(ctl_text(rig, WORDS("lease", "end", "job")));
        rig_stop(rig);
        ck_assert_uint_eq(count(file_path, "\"partition\":\"train\",\"lease\":\"job\",\"bytes\":4194304"), 1);
}

TEST(a_process_without_a_tenant_is_recorded)
{
        struct rig *rig = rig_start(&config);
        json_t *h;

        ck_assert_int_eq(client_refused(rig, "blue", NULL), -EACCES);
        rig_stop(rig);
        h = history();
        ck_assert_uint_eq(n_rows(h, "refusals"), 1);
        ck_assert_str_eq(string_of(row(h, "refusals", 0), "limit"), "tenant");
        json_decref(h);
}

TEST(the_file_is_rotated)
{
        struct rig *rig = rig_start(&config);
        json_t *h;

        session_end(session_open(rig->socket, NULL));
        ck_assert(WAIT_FOR(count(file_path, "\"record\":\"session\"") == 1, SETTLE_MS));
        ck_assert_int_eq(rename(file_path, moved_path), 0);
        session_end(session_open(rig->socket, NULL));
        ck_assert(WAIT_FOR(count(file_path, "\"record\":\"session\"") == 1, SETTLE_MS));
        ck_assert_uint_eq(count(moved_path, "\"record\":\"session\""), 1);
        ck_assert_uint_eq(count(moved_path, "\"record\":\"start\""), 1);
        rig_stop(rig);
        ck_assert_uint_eq(count(file_path, "\"record\":\"stop\""), 1);
        h = history();
        ck_assert_int_eq(number_of(h, "num_sessions"), 2);
        ck_assert_str_eq(string_of(row(h, "events", 0), "event"), "start");
        ck_assert_str_eq(string_of(row(h, "events", n_rows(h, "events") - 1), "event"), "stop");
        json_decref(h);
}

TEST(records_of_a_reload)
{
        static const struct rig_config lower = { .top = top,
                                                 .tenants = TENANT("red", "@UID@", "train, limit: 32MiB") };
        struct rig *rig = rig_start(&config);
        json_t *h, *reload;

        rig_rewrite_config(rig, &lower);
        ctl_says(rig, WORDS("reload"), "32MiB");
        rig_write_config(rig, "nonsense: 1\n");
        ctl_refuses(rig, WORDS("reload"), 1, "unknown key");
        rig_stop(rig);
        h = history();
        ck_assert_uint_eq(n_rows(h, "events"), 4); /* start, two reloads, stop */
        reload = row(h, "events", 1);
        ck_assert_str_eq(string_of(reload, "event"), "reload");
        ck_assert_ptr_nonnull(strstr(string_of(reload, "changes"), "32MiB"));
        ck_assert_str_eq(string_of(row(h, "events", 2), "event"), "reload rejected");
        ck_assert_ptr_nonnull(strstr(string_of(row(h, "events", 2), "changes"), "unknown key"));
        ck_assert_str_eq(string_of(reload, "user"), own_name());
        ck_assert_str_eq(string_of(row(h, "events", 2), "user"), own_name());
        json_decref(h);
}

/* With memory, which is freed later, and without. That of a GPU stays charged until this process has exited. */
static void violate_twice(void *socket)
{
        for (unsigned i = 0; i < 2; i++) {
                struct raw *raw = NULL;
                Bfcd__Block block;

                REQUIRE(raw_open(socket, &raw) == 0, "no connection");
                REQUIRE(raw_hello(raw, "red", NULL) == 0, "%s", raw_refusal());
                if (i == 0)
                        REQUIRE(raw_malloc(raw, 0, MIB, &block) == 0, "%s", raw_refusal());
                REQUIRE(raw_hello(raw, "red", NULL) < 0, "a second hello");
                REQUIRE(raw_wait_hang_up(raw, SETTLE_MS) == 0, "it is still connected");
                raw_close(raw);
        }
}

TEST(a_violation_is_the_end_of_the_session_in_its_record)
{
        struct rig *rig = rig_start(&config);
        json_t *h;

        child_join(child_start(violate_twice, rig->socket));
        rig_stop(rig);
        h = history();
        ck_assert_uint_eq(n_rows(h, "sessions"), 2);
        ck_assert_uint_eq(count(file_path, "\"ended\":\"the client sent a second hello\""), 2);
        json_decref(h);
}

TEST(an_eviction_is_recorded_with_its_operator)
{
        struct rig *rig = rig_start(&config);
        struct raw *raw = session_open(rig->socket, NULL);
        char session[24];
        json_t *h;

        snprintf(session, sizeof(session), "%llu", (unsigned long long)raw->session_id);
        free(ctl_text(rig, WORDS("evict", session, "--reason", "too large")));
        raw_close(raw);
        rig_stop(rig);
        h = history();
        ck_assert_uint_eq(n_rows(h, "events"), 3); /* start, eviction, stop */
        ck_assert_str_eq(string_of(row(h, "events", 1), "event"), "eviction");
        ck_assert_str_eq(string_of(row(h, "events", 1), "user"), own_name());
        ck_assert_ptr_nonnull(strstr(string_of(row(h, "events", 1), "message"), ": too large"));
        json_decref(h);
        h = ctl_json("/nowhere", WORDS("--json", "history", "--file", file_path, "--tenant", "blue"));
        ck_assert_uint_eq(n_rows(h, "events"), 2);
        json_decref(h);
}

/* ---- the journal ---------------------------------------------------------- */

static void journal_begin(void)
{
        struct sockaddr_un address = { .sun_family = AF_UNIX };

        strcpy(address.sun_path, journal_path);
        journal = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        ck_assert_int_eq(bind(journal, (struct sockaddr *)&address, sizeof(address)), 0);
        ck_assert_int_eq(chmod(journal_path, 0666), 0);
        snprintf(top, sizeof(top), "records: {journal: %s}\n", journal_path);
}

/* Reads until a record has these words. */
static bool journal_has(const char *words)
{
        static char datagram[1 << 17];
        int64_t until_ms = clock_ms() + SETTLE_MS;

        while (clock_ms() < until_ms) {
                ssize_t n = recv(journal, datagram, sizeof(datagram), 0);

                if (n < 0)
                        usleep(2000);
                else if (memmem(datagram, (size_t)n, words, strlen(words)))
                        return true;
        }
        return false;
}

TEST(the_journal_gets_records)
{
        struct rig *rig;

        journal_begin();
        rig = rig_start(&config);
        ck_assert(journal_has("MESSAGE_ID=9b181a0d28a749ed97a33c4a8baa4194\n"));
        session_end(session_open(rig->socket, NULL));
        ck_assert(journal_has("\nBFCD_TENANT=red\n"));
        ctl_says(rig, WORDS("drain", rig_device_id(), "--wait"), "drained");
        ck_assert(journal_has("\nBFCD_STATE=begun\n"));
        ck_assert(journal_has("\nBFCD_STATE=drained\n"));
        ctl_says(rig, WORDS("resume", rig_device_id()), "resumed");
        ck_assert(journal_has("\nBFCD_STATE=resumed\n"));
        ck_assert_int_eq(number_of_drops(rig), 0);
        rig_stop(rig);
        ck_assert(journal_has("\nBFCD_REASON=SIGTERM\n"));
}

/* Each has had memory, so each end is a record. */
static void come_and_go(struct rig *rig)
{
        struct raw *raw = session_open(rig->socket, NULL);
        Bfcd__Block block;

        ck_assert_int_eq(raw_malloc(raw, 0, 4096, &block), 0);
        session_end(raw);
}

/* The daemon serves on; what finds no room is counted. */
TEST(a_journal_that_does_not_read_stops_nothing)
{
        unsigned n = 0;
        struct rig *rig;

        journal_begin();
        rig = rig_start(&config);
        do /* bfcctl, which says whether a record was lost, takes longer than a session */
                for (unsigned i = 0; i < 10; i++, n++)
                        come_and_go(rig);
        while (number_of_drops(rig) == 0 && n < 590);
        ck_assert_int_gt(number_of_drops(rig), 0);
        ck_assert_uint_gt(n, 20); /* the queue took some */
        come_and_go(rig);
        ctl_says(rig, WORDS("metrics"), "bfcd_records_lost_total ");
        ck_assert(journal_has("\nBFCD_RECORD=start\n"));
        ck_assert(journal_has("\nBFCD_TENANT=red\n"));
        rig_stop(rig);
}

TEST(an_absent_journal_is_counted)
{
        struct rig *rig;

        snprintf(top, sizeof(top), "records: {journal: %s}\n", journal_path);
        rig = rig_start(&config);
        come_and_go(rig);
        ck_assert(WAIT_FOR(number_of_drops(rig) >= 2, SETTLE_MS)); /* the start, and the session */
        rig_stop(rig);
}
