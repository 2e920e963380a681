/* bfcctl map and bfcctl snapshot beside a real daemon: their sums are those of its lists.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <glob.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/integration/json.h"
#include "tests/random.h"

enum { REFUSED = 1, USAGE = 2 };

static const struct rig_config two_tenants = {
        .partitions = "      - {name: train, limit: 96MiB, growth: on-demand}\n"
                      "      - {name: serve, limit: 32MiB, growth: on-demand}\n",
        .tenants = TENANT("red", "@UID@", "train, limit: 64MiB") TENANT_OF(
                "blue", "@UID@", "{partition: train, limit: 64MiB}, {partition: serve, limit: 8MiB}"),
};

/* Two sessions of red and one of blue with blocks, and gaps between. */
struct scene {
        struct rig *rig;
        struct raw *sessions[3];
};

static void scene_start(struct scene *s)
{
        Bfcd__Block block, gap;

        s->rig = rig_start(&two_tenants);
        for (unsigned i = 0; i < 3; i++) {
                s->sessions[i] = session_open(s->rig->socket, i < 2 ? "red" : "blue");
                for (unsigned k = 0; k < 40; k++) {
                        ck_assert_int_eq(raw_malloc(s->sessions[i], 0, 1000 + k * 7001, &block), 0);
                        ck_assert_int_eq(raw_malloc(s->sessions[i], 0, 30000, &gap), 0);
                        ck_assert_int_eq(raw_free(s->sessions[i], gap.block_id), 0);
                }
                ck_assert_int_eq(raw_malloc(s->sessions[i], 0, 5 * MIB, &block), 0);
        }
        ck_assert_int_eq(raw_malloc(s->sessions[2], 1, MIB, &block), 0);
        ck_assert_int_eq(raw_publish(s->sessions[2], block.block_id, "weights"), 0);
}

static void scene_stop(struct scene *s)
{
        for (unsigned i = 0; i < 3; i++)
                session_end(s->sessions[i]);
        rig_stop(s->rig);
}

/* A file of the rig's folder. */
static const char *path_of(const struct rig *rig, const char *name)
{
        static char path[128];

        snprintf(path, sizeof(path), "%s/%s", rig->folder, name);
        return path;
}

/* ---- map ----------------------------------------------------------------------------- */

/* The sums of a tenant's parts, which tile its row. */
static void check_row(json_t *row, const Bfcd__Statistics *stats)
{
        json_int_t at = 0, used = 0, unused = 0, n_blocks = 0;
        json_t *part;
        size_t i;

        json_array_foreach(json_object_get(row, "parts"), i, part)
        {
                ck_assert_int_eq(number_of(part, "begin"), at);
                at += number_of(part, "n_bytes");
                used += number_of(part, "bytes_in_use");
                unused += number_of(part, "bytes_free");
                n_blocks += strcmp(string_of(part, "kind"), "used") == 0 ? number_of(part, "num_blocks") : 0;
        }
        ck_assert_int_eq(at, number_of(row, "n_bytes"));
        ck_assert_int_eq(used, (json_int_t)stats->bytes_in_use);
        ck_assert_int_eq(number_of(row, "bytes_in_use"), used);
        ck_assert_int_eq(number_of(row, "num_blocks"), (json_int_t)stats->num_blocks);
        ck_assert_int_eq(n_blocks, (json_int_t)stats->num_blocks);
        ck_assert_int_eq(unused + used, (json_int_t)stats->bytes_reserved);
        ck_assert_int_eq(number_of(row, "bytes_free"), unused);
}

TEST(a_map_has_the_sums_of_the_lists)
{
        struct scene s;
        const char *sockets[2];

        scene_start(&s);
        sockets[0] = s.rig->monitor_socket;
        sockets[1] = s.rig->admin_socket;
        for (unsigned i = 0; i < 2; i++) {
                json_t *map = ctl_json(sockets[i], WORDS("--json", "map", "train")),
                       *rows = json_object_get(map, "tenants");
                Bfcd__Statistics blue = rig_stats(s.rig, "blue", "train"),
                                 red = rig_stats(s.rig, "red", "train");

                ck_assert_uint_eq(json_array_size(rows), 2);
                check_row(json_array_get(rows, 0), &blue);
                check_row(json_array_get(rows, 1), &red);
                ck_assert_uint_eq(json_array_size(json_object_get(map, "sessions")), 3);
                ck_assert_int_eq(number_of(map, "num_blocks_left_out"), 0);
                json_decref(map);
        }
        scene_stop(&s);
}

/* Its own rows only. */
TEST(a_tenant_maps_itself)
{
        struct scene s;
        json_t *map;

        scene_start(&s);
        ck_assert_int_eq(setenv("BFC_TENANT", "red", 1), 0);
        map = ctl_json(s.rig->socket, WORDS("--json", "map", "train"));
        ck_assert_uint_eq(json_array_size(json_object_get(map, "tenants")), 1);
        ck_assert_str_eq(string_of(json_array_get(json_object_get(map, "tenants"), 0), "tenant"), "red");
        ck_assert_uint_eq(json_array_size(json_object_get(map, "sessions")), 2);
        json_decref(map);
        ck_assert_int_eq(unsetenv("BFC_TENANT"), 0);
        scene_stop(&s);
}

/* A cache's idle memory is the daemon's figure for the session. */
RIG_TEST(idle_memory_is_shown, two_tenants)
{
        json_t *sessions, *map, *row;
        bfc_client *client;
        void *p;

        ck_assert_int_eq(setenv("BFC_CACHE", "on", 1), 0);
        client = client_with(.socket = rig->socket, .tenant = "red");
        ck_assert_ok(bfc_malloc(client, 100000, &p)); /* of a slab, which is larger */
        sessions = ctl_json(rig->monitor_socket, WORDS("--json", "sessions"));
        map = ctl_json(rig->monitor_socket, WORDS("--json", "map", "train", "--tenant", "red"));
        row = json_array_get(json_object_get(map, "tenants"), 0);
        ck_assert_int_gt(number_of(row, "client_bytes_idle"), 0);
        ck_assert_int_eq(
                number_of(row, "client_bytes_idle"),
                number_of(json_array_get(sessions, json_array_size(sessions) - 1), "client_bytes_idle"));
        json_decref(map);
        json_decref(sessions);
        bfc_disconnect(client);
}

/* XML that refers to nothing, whatever clients are called. */
RIG_TEST(a_hostile_name_stays_text, two_tenants)
{
        static const char name[] = "</text><script>alert(1)</script>\x1b]0;&\"\xff";
        static const char check[] = "import sys, xml.etree.ElementTree as x\n"
                                    "root = x.parse(sys.argv[1]).getroot()\n"
                                    "kinds = {e.tag.split('}')[1] for e in root.iter()}\n"
                                    "assert kinds == {'svg', 'title', 'style', 'text', 'rect', 'g'}, kinds\n"
                                    "text = ' '.join(root.itertext())\n"
                                    "assert 'alert(1)' in text and 'prefers-color-scheme: dark' in text\n"
                                    "assert not any('\\x00' <= c < ' ' and c != '\\n' for c in text)\n";
        bfc_client *client = client_with(.socket = rig->socket, .tenant = "red", .name = name);
        char *text, *out, *err;
        void *p;

        ck_assert_ok(bfc_malloc(client, 3 * MIB, &p));
        ck_assert_int_eq(
                ctl(rig->monitor_socket, WORDS("map", "train", "--svg", path_of(rig, "map.svg")), &out, NULL),
                0);
        ck_assert_str_eq(out, "");
        free(out);
        text = file_text(path_of(rig, "map.svg"));
        ck_assert_ptr_nonnull(text);
        ck_assert_ptr_null(strstr(text, "<script"));
        ck_assert_ptr_null(strstr(text, "href"));
        ck_assert_ptr_null(strstr(text, "url("));
        free(text);
        ck_assert_msg(program_run(WORDS("/usr/bin/env", "python3", "-c", check, path_of(rig, "map.svg")),
                                  NULL, &err) == 0,
                      "%s", err);
        free(err);
        ck_assert_int_eq(ctl(rig->monitor_socket, WORDS("map", "train", "--svg", "-"), &out, NULL), 0);
        ck_assert_int_eq(strncmp(out, "<svg ", 5), 0);
        ck_assert_str_eq(out + strlen(out) - 7, "</svg>\n");
        free(out);
        out = NULL;
        ck_assert_int_eq(ctl(rig->monitor_socket, WORDS("map", "train"), &out, NULL), 0);
        ck_assert_ptr_null(strchr(out, '\x1b'));
        free(out);
        bfc_disconnect(client);
}

TEST(wrong_uses)
{
        struct scene s;

        scene_start(&s);
        ctl_refuses(s.rig, WORDS("map"), USAGE, "no partition");
        ctl_refuses(s.rig, WORDS("map", "train", "serve"), USAGE, "too many arguments");
        ctl_refuses(s.rig, WORDS("map", "train", "--json", "--svg", "-"), USAGE, "exclude each other");
        ctl_refuses(s.rig, WORDS("tenants", "--svg", "-"), USAGE, "--svg is not valid");
        ctl_refuses(s.rig, WORDS("map", "tra\x1bin"), REFUSED,
                    "There is no partition 'tra\\x1bin'; you can see: train, serve");
        ctl_refuses(s.rig, WORDS("map", "train", "--tenant", "green"), REFUSED,
                    "There is no tenant 'green'; you can see: blue, red");
        ctl_refuses(s.rig, WORDS("leaks", "--tenant", "g\x1bgreen"), REFUSED,
                    "There is no tenant 'g\\x1bgreen'; you can see: blue, red");
        ctl_refuses(s.rig, WORDS("map", "train", "--svg", "/nowhere/x"), REFUSED,
                    "/nowhere/x cannot be written: No such file");
        ctl_refuses(s.rig, WORDS("snapshot", "/nowhere/x"), REFUSED,
                    "/nowhere/x cannot be written: No such file");
        ctl_refuses(s.rig, WORDS("--json", "snapshot"), USAGE, "--json is not valid");
        scene_stop(&s);
}

/* ---- files ----------------------------------------------------------------------------- */

/* bfcctl where a file can have at most 512 bytes. */
static int ctl_with_little_room(const struct rig *rig, const char *const *words, char **ret_err)
{
        const char *argv[16] = { "/bin/sh",
                                 "-c",
                                 "trap '' XFSZ; ulimit -f 1; exec \"$@\"",
                                 "sh",
                                 program_bfcctl(),
                                 "--socket",
                                 rig->monitor_socket };

        for (size_t i = 0; words[i]; i++)
                argv[7 + i] = words[i];
        return program_run(argv, NULL, ret_err);
}

static unsigned count_files(const struct rig *rig, const char *name)
{
        char pattern[160];
        unsigned n;
        glob_t found;

        snprintf(pattern, sizeof(pattern), "%s/%s*", rig->folder, name);
        if (glob(pattern, 0, NULL, &found) != 0)
                return 0;
        n = (unsigned)found.gl_pathc;
        globfree(&found);
        return n;
}

/* The file has what it had before, and no temporary file is left. */
TEST(a_failed_write_keeps_the_file)
{
        struct scene s;
        struct stat st;
        char *before, *after, *err;

        scene_start(&s);
        ck_assert_int_eq(ctl_with_little_room(s.rig, WORDS("snapshot", path_of(s.rig, "new.json")), &err),
                         REFUSED);
        text_has(err, "new.json cannot be written: File too large");
        ck_assert_uint_eq(count_files(s.rig, "new.json"), 0);
        free(ctl_text(s.rig, WORDS("map", "train", "--svg", path_of(s.rig, "map.svg"))));
        ck_assert_int_eq(chmod(path_of(s.rig, "map.svg"), 0640), 0);
        before = file_text(path_of(s.rig, "map.svg"));
        ck_assert_int_eq(
                ctl_with_little_room(s.rig, WORDS("map", "train", "--svg", path_of(s.rig, "map.svg")), &err),
                REFUSED);
        text_has(err, "map.svg cannot be written: File too large");
        after = file_text(path_of(s.rig, "map.svg"));
        ck_assert_msg(before && after && strcmp(after, before) == 0, "map.svg is not as it was");
        free(before);
        free(after);
        /* It is replaced with its mode. */
        free(ctl_text(s.rig, WORDS("snapshot", path_of(s.rig, "map.svg"))));
        text_has(file_text(path_of(s.rig, "map.svg")), "\x80\x04\x95");
        ck_assert_int_eq(stat(path_of(s.rig, "map.svg"), &st), 0);
        ck_assert_uint_eq(st.st_mode & 07777, 0640);
        ck_assert_uint_eq(count_files(s.rig, "map.svg"), 1);
        scene_stop(&s);
}

/* A link to /dev/full, so that a wrong bfcctl that runs as root does not remove the device. */
TEST(only_regular_files_are_replaced)
{
        struct scene s;
        struct stat st;

        scene_start(&s);
        ck_assert_int_eq(symlink("/dev/full", path_of(s.rig, "full")), 0);
        ctl_refuses(s.rig, WORDS("map", "train", "--svg", path_of(s.rig, "full")), REFUSED,
                    "full cannot be written: No space left on device");
        ctl_refuses(s.rig, WORDS("snapshot", path_of(s.rig, "full")), REFUSED,
                    "full cannot be written: No space left on device");
        ck_assert_int_eq(lstat(path_of(s.rig, "full"), &st), 0);
        ck_assert(S_ISLNK(st.st_mode));
        ck_assert_int_eq(stat("/dev/full", &st), 0);
        ck_assert(S_ISCHR(st.st_mode));
        scene_stop(&s);
}

/* ---- snapshot -------------------------------------------------------------------------- */

/* What bfcctl snapshot writes; the caller releases it. */
static json_t *take_snapshot(const struct rig *rig)
{
        static const char program[] = "import json, pickle, sys\n"
                                      "json.dump(pickle.load(open(sys.argv[1], 'rb')), sys.stdout)\n";
        const char *path = path_of(rig, "snapshot.pickle");
        json_error_t error;
        json_t *ret;
        char *out;

        ck_assert_int_eq(ctl(rig->monitor_socket, WORDS("snapshot", path), NULL, NULL), 0);
        ck_assert_int_eq(program_run(WORDS("/usr/bin/env", "python3", "-c", program, path), &out, NULL), 0);
        ret = json_loads(out, 0, &error);
        ck_assert_msg(ret != NULL, "%s", error.text);
        free(out);
        return ret;
}

RIG_TEST(a_hostile_name_in_a_snapshot, two_tenants)
{
        bfc_client *client = client_with(.socket = rig->socket, .tenant = "red", .name = "ring\x1b]0;\xff");
        json_t *snapshot;
        char *text;
        void *p;

        ck_assert_ok(bfc_malloc(client, 3 * MIB, &p));
        snapshot = take_snapshot(rig);
        text = json_dumps(snapshot, JSON_ENSURE_ASCII);
        ck_assert_ptr_nonnull(strstr(text, "ring"));
        ck_assert_ptr_null(strstr(text, "\\u001b"));
        free(text);
        json_decref(snapshot);
        bfc_disconnect(client);
}

struct sums {
        json_int_t reserved, in_use, requested;
};

/* The daemon's, over all rows of all tenants. */
static struct sums sums_of_tenants(const struct rig *rig)
{
        json_t *rows = ctl_json(rig->monitor_socket, WORDS("--json", "tenants")), *row;
        struct sums ret = { 0 };
        size_t i;

        json_array_foreach(rows, i, row)
        {
                ret.reserved += number_of(row, "bytes_reserved");
                ret.in_use += number_of(row, "bytes_in_use");
                ret.requested += number_of(row, "bytes_requested");
        }
        json_decref(rows);
        return ret;
}

static void check_segment(json_t *segment, struct sums *sums)
{
        json_int_t at = number_of(segment, "address");
        json_t *block;
        size_t i;

        json_array_foreach(json_object_get(segment, "blocks"), i, block)
        {
                ck_assert_int_eq(number_of(block, "address"), at);
                at += number_of(block, "size");
                if (strcmp(string_of(block, "state"), "active_allocated") != 0)
                        continue;
                sums->in_use += number_of(block, "size");
                sums->requested += number_of(block, "requested_size");
        }
        ck_assert_int_eq(at, number_of(segment, "address") + number_of(segment, "total_size"));
        ck_assert_int_lt(at, INT64_C(1) << 53);
        sums->reserved += number_of(segment, "total_size");
}

TEST(a_snapshot_has_the_sums_of_the_lists)
{
        struct scene s;
        struct sums sums = { 0 }, daemon;
        json_t *snapshot, *segments, *segment, *event, *extents, *extent;
        json_int_t n_allocs = 0, n_reserved = 0;
        size_t i;

        scene_start(&s);
        snapshot = take_snapshot(s.rig);
        segments = json_object_get(snapshot, "segments");
        json_array_foreach(segments, i, segment) check_segment(segment, &sums);
        daemon = sums_of_tenants(s.rig);
        ck_assert_int_eq(sums.reserved, daemon.reserved);
        extents = ctl_json(s.rig->monitor_socket, WORDS("--json", "extents"));
        json_array_foreach(extents, i, extent) n_reserved += number_of(extent, "n_bytes");
        ck_assert_int_eq(n_reserved, daemon.reserved);
        json_decref(extents);
        ck_assert_int_eq(sums.in_use, daemon.in_use);
        ck_assert_int_eq(sums.requested, daemon.requested);
        ck_assert_uint_eq(json_array_size(json_object_get(snapshot, "device_traces")), 1);
        json_array_foreach(json_array_get(json_object_get(snapshot, "device_traces"), 0), i,
                           event) if (strcmp(string_of(event, "action"), "alloc") == 0) n_allocs +=
                number_of(event, "size");
        ck_assert_int_eq(n_allocs, daemon.in_use);
        json_decref(snapshot);
        scene_stop(&s);
}

/* ---- while memory changes hands ---------------------------------------------------------- */

#define N_SLOTS 200u

struct churn {
        const struct rig *rig;
        struct gate begun;
};

/* Allocates and frees until it is killed. */
static void churn(void *arg)
{
        struct churn *c = arg;
        bfc_client *client = child_client_open(c->rig->socket, "red");
        void *slots[N_SLOTS] = { NULL };
        uint64_t random = 18;

        for (uint64_t i = 0;; i++) {
                void **p = &slots[i < N_SLOTS ? i : random_next(&random) % N_SLOTS];

                if (i == N_SLOTS)
                        gate_open(&c->begun);
                if (*p)
                        REQUIRE(bfc_free(client, *p) == 0, "%s", bfc_last_error());
                REQUIRE(bfc_malloc(client, 256 + random_next(&random) % 100000, p) == 0, "%s",
                        bfc_last_error());
        }
}

static void check_changing(const struct rig *rig)
{
        json_t *map = ctl_json(rig->monitor_socket, WORDS("--json", "map", "train")), *row, *part, *snapshot,
               *segment;
        struct sums sums = { 0 };
        json_int_t at = 0;
        size_t i;

        row = json_array_get(json_object_get(map, "tenants"), 0);
        json_array_foreach(json_object_get(row, "parts"), i, part)
        {
                ck_assert_int_eq(number_of(part, "begin"), at);
                at += number_of(part, "n_bytes");
                ck_assert_int_eq(number_of(part, "n_bytes"), number_of(part, "bytes_in_use") +
                                                                     number_of(part, "bytes_free") +
                                                                     number_of(part, "bytes_retiring") +
                                                                     number_of(part, "bytes_unbacked"));
        }
        ck_assert_int_eq(at, number_of(row, "n_bytes"));
        json_decref(map);
        snapshot = take_snapshot(rig);
        json_array_foreach(json_object_get(snapshot, "segments"), i, segment) check_segment(segment, &sums);
        ck_assert_int_gt(sums.in_use, 0);
        json_decref(snapshot);
}

/* Rows of different moments do not fit together. What is printed does. */
RIG_TEST(pictures_of_changing_memory_tile, two_tenants)
{
        struct churn c = { rig, gate_new() };
        pid_t pid = child_start_until(&c.begun, churn, &c);

        for (unsigned i = 0; i < (suite_is_long() ? 20 : 6); i++)
                check_changing(rig);
        child_kill(pid);
        ck_assert(WAIT_FOR(rig_count(rig).n_sessions == 0, SETTLE_MS));
}

/* ---- PyTorch ------------------------------------------------------------------------------ */

/* PyTorch's own module, which needs nothing else of PyTorch. False: it is not on this machine. */
static bool find_memory_viz(char ret[static 512])
{
        const char *module = getenv("BFC_MEMORY_VIZ"), *folder = getenv("BFC_FRAMEWORKS"),
                   *home = getenv("HOME");
        char pattern[512];
        glob_t found;

        if (module && *module) {
                snprintf(ret, 512, "%s", module);
                return true;
        }
        snprintf(pattern, sizeof(pattern), "%s%s/lib/python3*/site-packages/torch/cuda/_memory_viz.py",
                 folder ? folder
                 : home ? home
                        : "/nowhere",
                 folder ? "" : "/.cache/bfcd/frameworks");
        if (glob(pattern, 0, NULL, &found) != 0)
                return false;
        snprintf(ret, 512, "%s", found.gl_pathv[0]);
        globfree(&found);
        return true;
}

TEST(pytorch_reads_a_snapshot)
{
        static const char check[] =
                "import importlib.util, pickle, sys\n"
                "spec = importlib.util.spec_from_file_location('viz', sys.argv[1])\n"
                "viz = importlib.util.module_from_spec(spec)\n"
                "spec.loader.exec_module(viz)\n"
                "s = pickle.load(open(sys.argv[2], 'rb'))\n"
                "text = viz.segsum(s)\n" /* asserts that blocks tile their segments */
                "lines = dict(l.split(': ', 1) for l in text.splitlines() if l.startswith('total_'))\n"
                "for key, value in (('total_reserved', 3), ('total_allocated', 4)):\n"
                "    assert lines[key] == repr(viz.Bytes(int(sys.argv[value]))), (lines, sys.argv)\n"
                "flames = viz.memory(s, format_flamegraph=lambda lines: lines).splitlines()\n"
                "sums = {}\n"
                "for line in flames:\n"
                "    name, size = line.rsplit(' ', 1)\n"
                "    state = name.split(';')[1]\n"
                "    sums[state] = sums.get(state, 0) + int(size)\n"
                "assert sums['active_allocated'] == int(sys.argv[5]), sums\n"
                "assert sums['active_allocated'] + sums['inactive'] == int(sys.argv[3]), sums\n"
                "assert any('red/train' in f['filename'] for g in s['segments'] for f in g['frames'])\n"
                "viz.trace(s)\n"
                "viz.trace_plot(s)\n";
        char module[512], reserved[32], requested[32], in_use[32], *err;
        struct scene s;
        struct sums daemon;

        if (!find_memory_viz(module)) {
                printf("# skipped: there is no torch/cuda/_memory_viz.py; set BFC_MEMORY_VIZ\n");
                return;
        }
        scene_start(&s);
        daemon = sums_of_tenants(s.rig);
        snprintf(reserved, sizeof(reserved), "%lld", (long long)daemon.reserved);
        snprintf(requested, sizeof(requested), "%lld", (long long)daemon.requested);
        snprintf(in_use, sizeof(in_use), "%lld", (long long)daemon.in_use);
        ck_assert_int_eq(
                ctl(s.rig->monitor_socket, WORDS("snapshot", path_of(s.rig, "snapshot.pickle")), NULL, NULL),
                0);
        ck_assert_msg(program_run(WORDS("/usr/bin/env", "python3", "-c", check, module,
                                        path_of(s.rig, "snapshot.pickle"), reserved, requested, in_use),
                                  NULL, &err) == 0,
                      "%s", err);
        free(err);
        scene_stop(&s);
}
