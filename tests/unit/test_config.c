/* SPDX-License-Identifier: Apache-2.0 */
/* Every way in which a config can be wrong, each with its line and column; and
 * what a right one means. Most tests change one line of GOOD and expect one
 * message: a mistake must not set off others. */
#include "daemon/config/config.h"
#include "tests/suite.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char GOOD[] = "max_sessions: 100\n"                                       /* 1 */
                           "devices:\n"                                                /* 2 */
                           "  - id: host\n"                                            /* 3 */
                           "    size: 1GiB\n"                                          /* 4 */
                           "    partitions:\n"                                         /* 5 */
                           "      - {name: train, limit: 512MiB}\n"                    /* 6 */
                           "      - {name: infer, limit: 50%}\n"                       /* 7 */
                           "tenants:\n"                                                /* 8 */
                           "  - name: vision\n"                                        /* 9 */
                           "    match: {uid: 1000}\n"                                  /* 10 */
                           "    quotas:\n"                                             /* 11 */
                           "      - {partition: train, limit: 50%, reserve: 128MiB}\n" /* 12 */
                           "      - {partition: infer}\n"                              /* 13 */
                           "  - name: language\n"                                      /* 14 */
                           "    match: {gid: [10, 20]}\n"                              /* 15 */
                           "    quotas: [{partition: train}]\n";                       /* 16 */

static char *errors;
static size_t n_errors;
static char folder[64];

/* What a test made; freed by its teardown. */
static char *texts[64];
static struct config *configs[64];
static size_t n_texts, n_configs;

/* ---- a machine with GPUs --------------------------------------------------- */

/* "cuda:0" and GPU_0 are one GPU of 8 GiB and a bit, "cuda:1" has 1 GiB; "cuda:2" is broken. */
#define GPU_0 "GPU-00112233-4455-6677-8899-aabbccddeeff"
#define GPU_9 "GPU-99112233-4455-6677-8899-aabbccddeeff"
#define MIG_0 "MIG-00aabb33-4455-6677-8899-aabbccddeeff"
#define MIG_1 "MIG-11aabb33-4455-6677-8899-aabbccddeeff"

static unsigned int n_looks;

static int look(void *userdata, const char *admin_socket, const char *id, struct config_gpu *ret,
                char *ret_sentence, size_t n_sentence)
{
        (void)admin_socket;
        (void)userdata;
        n_looks++;
        if (strcmp(id, "cuda:0") == 0 || strcmp(id, GPU_0) == 0)
                *ret = (struct config_gpu){ .uuid = { 1 },
                                            .bytes_total = 8 * GIB + 12345,
                                            .bytes_free = 7 * GIB };
        else if (strcmp(id, "cuda:1") == 0)
                *ret = (struct config_gpu){ .uuid = { 2 }, .bytes_total = 1 * GIB, .bytes_free = 512 * MIB };
        else if (strcmp(id, MIG_0) == 0)
                *ret = (struct config_gpu){ .uuid = { 3 }, .bytes_total = 4 * GIB, .bytes_free = 4 * GIB };
        else if (strcmp(id, MIG_1) == 0)
                *ret = (struct config_gpu){ .uuid = { 5 }, .bytes_total = 4 * GIB, .bytes_free = 4 * GIB };
        else if (id[5] >= '3' && id[5] <= '5' && id[6] == '\0') /* cannot share by fd, by cuda-ipc, at all */
                *ret = (struct config_gpu){ .uuid = { 4, (uint8_t)id[5] },
                                            .bytes_total = 4 * GIB,
                                            .bytes_free = 4 * GIB,
                                            .lacks_fd = id[5] != '4',
                                            .lacks_ipc = id[5] != '3' };
        else
                return snprintf(ret_sentence, n_sentence, "%s: no such device", id), -ENODEV;
        return 0;
}

static bool succeeds(const char *admin_socket)
{
        return admin_socket[0] == '/';
}

static struct config_machine machine = { .look = look };

/* ---- parsing ----------------------------------------------------------- */

static void setup(void)
{
        errors = NULL;
        folder[0] = '\0';
        n_texts = n_configs = 0;
        n_looks = 0;
        machine.serves = false;
}

static void remove_folder(void)
{
        char command[128];

        snprintf(command, sizeof(command), "rm -r '%s'", folder);
        ck_assert_int_eq(system(command), 0);
}

static void teardown(void)
{
        if (folder[0])
                remove_folder();
        while (n_texts > 0)
                free(texts[--n_texts]);
        while (n_configs > 0)
                config_free(configs[--n_configs]);
        free(errors);
}

FIXTURE(config, setup, teardown);

static FILE *open_errors(void)
{
        FILE *f;

        free(errors);
        errors = NULL;
        f = open_memstream(&errors, &n_errors);
        ck_assert_ptr_nonnull(f);
        return f;
}

/* What it returns is the caller's. */
static int parse_for(const struct config_machine *m, const char *text, size_t n_bytes, struct config **ret)
{
        FILE *f = open_errors();
        int r = config_parse("c.yaml", text, n_bytes, m, f, ret);

        fclose(f);
        return r;
}

/* The fixture frees what this returns, as with all that follows. */
static const char *keep(char *text)
{
        ck_assert(text && n_texts < sizeof(texts) / sizeof(texts[0]));
        return texts[n_texts++] = text;
}

static int keep_config(int r, struct config *const *c)
{
        ck_assert(n_configs < sizeof(configs) / sizeof(configs[0]));
        if (r == 0)
                configs[n_configs++] = *c;
        return r;
}

static int parse(const char *text, struct config **ret)
{
        int r = parse_for(&machine, text, strlen(text), ret);

        return keep_config(r, ret);
}

__attribute__((format(printf, 1, 2))) static const char *print(const char *format, ...)
{
        char *text = NULL;
        va_list args;

        va_start(args, format);
        ck_assert_int_gt(vasprintf(&text, format, args), 0);
        va_end(args);
        return keep(text);
}

static struct config *parse_good(const char *text)
{
        struct config *c = NULL;
        int r = parse(text, &c);

        ck_assert_msg(r == 0, "%d: %s", r, errors);
        ck_assert_ptr_nonnull(c);
        return c;
}

static void parse_good_quietly(const char *text)
{
        (void)parse_good(text);
        ck_assert_str_eq(errors, "");
}

/* The config that the text means, and the one that its printed form means, which is printed the same. */
static const char *format_twice(const char *text, struct config **ret, struct config **ret_again)
{
        const char *printed;

        *ret = parse_good(text);
        printed = keep(config_format(*ret));
        *ret_again = parse_good(printed);
        ck_assert_str_eq(printed, keep(config_format(*ret_again)));
        return printed;
}

/* The text with one piece replaced. */
static const char *edit_of(const char *text, const char *old, const char *new)
{
        const char *at = strstr(text, old);

        ck_assert_msg(at != NULL, "no '%s' in '%s'", old, text);
        return print("%.*s%s%s", (int)(at - text), text, new, at + strlen(old));
}

static const char *edit(const char *old, const char *new)
{
        return edit_of(GOOD, old, new);
}

static unsigned int count_lines(const char *text)
{
        unsigned int n = 0;

        for (; *text; text++)
                n += *text == '\n';
        return n;
}

/* One of the lines is at this place and says this. */
static void assert_line(const char *file, unsigned int line, unsigned int column, const char *part)
{
        char place[128];

        snprintf(place, sizeof(place), "%s:%u:%u: ", file, line, column);
        for (const char *p = errors; *p; p = strchr(p, '\n') + 1) {
                size_t n = strcspn(p, "\n");

                if (strncmp(p, place, strlen(place)) == 0 && memmem(p, n, part, strlen(part)))
                        return;
        }
        ck_abort_msg("no line '%s...%s' in:\n%s", place, part, errors);
}

static void expect_only(const char *text, unsigned int line, unsigned int column, const char *part)
{
        struct config *c = NULL;
        int r = parse(text, &c);

        ck_assert_msg(r == -EINVAL, "%d for '%s'", r, part);
        ck_assert_ptr_null(c);
        assert_line("c.yaml", line, column, part);
        ck_assert_msg(count_lines(errors) == 1, "more than one message:\n%s", errors);
}

/* ---- one mistake, one message --------------------------------------------- */

struct mistake {
        const char *old;
        const char *new;
        unsigned int line;
        unsigned int column;
        const char *part;
};

/* Where GOOD is changed: line 1 is replaced; the quota of line 13, the partition of line 6 or the device gets
 * more keys; or a match, the device's size, the limit of line 6, the name of line 9 or the quotas of line 16
 * get another value. */
#define TOP(new, column, part)        "max_sessions: 100", new, 1, column, part
#define QUOTA(keys, column, part)     "{partition: infer}", "{partition: infer, " keys "}", 13, column, part
#define PARTITION(keys, column, part) "limit: 512MiB}", "limit: 512MiB, " keys "}", 6, column, part
#define DEVICE(keys, column, part)    "size: 1GiB", "size: 1GiB\n    " keys, 5, column, part
#define MATCH(value, column, part)    "match: {uid: 1000}", "match: " value, 10, column, part
#define SIZE(value, part)             "size: 1GiB", "size: " value, 4, 11, part
#define LIMIT(value, part)            "limit: 512MiB", "limit: " value, 6, 30, part
#define NAME(value, part)             "name: vision", "name: " value, 9, 11, part
#define QUOTAS(value, column, part)   "quotas: [{partition: train}]", "quotas: " value, 16, column, part

static const struct mistake MISTAKES[] = {
        /* keys and shapes */
        { TOP("max_session: 100", 1,
              "unknown key 'max_session' in the config; known here: socket, admin_socket, monitor_socket, lease_socket, records, timeouts, max_sessions, devices, tenants, default_tenant") },
        { "max_sessions: 100", "max_sessions: 1\nmax_sessions: 1", 2, 1,
          "key 'max_sessions' is defined twice, first on line 1" },
        { TOP("[a]: 1", 1, "a key must be a single value, this is a list") },
        { TOP("<<: 1", 1, "unknown key '<<'") },
        { TOP("socket: {path: /a, colour: red}", 20,
              "unknown key 'colour' in socket; known here: path, mode, group") },
        { TOP("timeouts: {idle: 1s}", 12,
              "unknown key 'idle' in timeouts; known here: reclaim, quarantine") },
        { TOP("timeouts: {read: 1m}", 12,
              "a client may leave replies unread for 30s, which cannot be configured any more: remove read") },
        { TOP("timeouts: {release: 9s}", 12,
              "a client has 5s to unmap memory, which cannot be configured any more: remove release") },
        { DEVICE(
                "colour: red", 5,
                "unknown key 'colour' in a device; known here: id, mps, size, headroom, partitions, standby, contexts") },
        { PARTITION(
                "max: 3", 38,
                "unknown key 'max' in a partition; known here: name, limit, growth, share, clear_on_release, "
                "numa_node, pinned") },
        { PARTITION("huge_pages: auto", 38,
                    "host memory has pages of 2MiB where the kernel can make them, and of 4KiB where ") },
        { MATCH("{uid: 1, pid: 4}", 21, "unknown key 'pid' in match; known here: user, group, uid, gid") },
        { "  - name: vision\n", "  - name: vision\n    nice: 4\n", 10, 5,
          "unknown key 'nice' in a tenant; known here: name, match, quotas, leases" },
        { "  - name: vision\n", "  - name: vision\n    max_sessions: 4\n", 10, 5,
          "a tenant has as many sessions as its quotas together: write max_sessions into the quotas" },
        { QUOTA("max: 1", 28,
                "unknown key 'max' in a quota; known here: partition, limit, reserve, max_sessions, max_blocks, park") },
        { QUOTA("limit: 4MiB, limit: 4MiB", 41, "key 'limit' is defined twice, first on line 13") },
        { TOP("socket: /run/x", 9, "socket must be a mapping of keys to values, this is a single value") },
        { TOP("admin_socket: [a]", 15, "admin_socket must be a mapping of keys to values, this is a list") },
        { TOP("timeouts:", 10, "timeouts must be a mapping of keys to values, this is nothing") },
        { TOP("max_sessions: [1]", 15, "max_sessions must be a single value, this is a list") },
        { TOP("max_sessions: {a: 1}", 15, "max_sessions must be a single value, this is a mapping") },
        { TOP("max_sessions: ''", 15, "max_sessions is empty") },
        { MATCH("1000", 12, "match must be a mapping") },
        { MATCH("{uid: {a: b}}", 18, "uid must be a single value or a list, this is a mapping") },
        { MATCH("{uid: [[1]]}", 19, "uid must be a single value, this is a list") },
        { MATCH("{user: [[x]]}", 20, "a user must be a single value, this is a list") },
        { MATCH("{group: [[x]]}", 21, "a group must be a single value, this is a list") },
        { MATCH("{uid: 1000, unit: []}", 30, "unit is empty; leave it out") },
        { MATCH("{unit: a/b.service}", 19, "is not a unit name, because it contains '/'") },
        { MATCH("{unit: \"a\\tb\"}", 19, "contains a control character") },
        { MATCH("{cgroup: a/b}", 21, "does not begin with '/'") },
        { MATCH("{cgroup: [/a, /a//b]}", 26, "has an empty component") },
        { MATCH("{cgroup: /a/}", 21, "has an empty component") },
        { QUOTAS("train", 13, "quotas must be a list, this is a single value") },
        { QUOTAS("[]", 13, "quotas is empty") },
        { QUOTAS("[train]", 14, "a quota must be a mapping") },
        { "    quotas: [{partition: train}]\n", "", 14, 5, "a tenant lacks its quotas" },
        { "{name: infer, limit: 50%}", "infer", 7, 9, "a partition must be a mapping" },
        /* YAML features that are not allowed */
        { TOP("max_sessions: &n 100", 15, "anchors (&name) are not allowed") },
        { TOP("max_sessions: !!int 100", 15, "tags (!name) are not allowed") },
        { MATCH("!x {uid: 1000}", 12, "tags (!name) are not allowed") },
        { QUOTAS("!x [{partition: train}]", 13, "tags (!name) are not allowed") },
        { "quotas: [{partition: train}]", "quotas: [{partition: train}]\n---\na: 1", 17, 1,
          "a second document starts here; a file must have exactly one" },
        { TOP("max_sessions: [[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]", 30, "nested too deeply") },
        { TOP("max_sessions: 100: 3", 18, "not YAML: a second ': ' on this line; write a value that") },
        { TOP("max_sessions: \"\xc3\xa9\xc3\xa9\": 3", 19, "not YAML: a second ': ' on this line") },
        { "    size: 1GiB\n", "    size: 1GiB\n      \xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9: 3\n", 5, 11,
          "not YAML: no key can be here; ': ' is missing after the key above, or this line is indented differently" },
        { "  - id: host\n", "  - id host\n", 4, 9, "not YAML: no key can be here; ': ' is missing" },
        { "max_sessions: 100", "max_sessions: [", 3, 3, "not YAML: " },
        { "max_sessions: 100", "max_sessions: '100", 17, 1,
          "found unexpected end of stream while scanning a quoted scalar, which begins on line 1" },
        { "    size: 1GiB\n", "    size 1GiB\n", 4, 5,
          "not YAML: ': ' is missing after a key; write it as in 'KEY: VALUE'" },
        { "limit: 512MiB}", "limit 512MiB}", 6, 23,
          "': ' is missing after 'limit'; write it as in 'limit: VALUE'" },
        { "limit: 512MiB}", "limit:512MiB}", 6, 23, "': ' is missing after 'limit'" },
        { "match: {uid: 1000}", "match {uid: 1000}", 10, 5, "': ' is missing after 'match'" },
        { MATCH("{uid 1000}", 13, "': ' is missing after 'uid'") },
        { QUOTA("keep: {bytes: 4MiB, for: 1s}", 28,
                "a quota keeps no memory for its next job any more: write standby into the device") },
        { QUOTA("per user", 28, "': ' is missing after 'per'") },
        { PARTITION("share fd", 38, "': ' is missing after 'share'") },
        { PARTITION("numa_node 0", 38, "': ' is missing after 'numa_node'") },
        { "limit: 512MiB}", "limit: 512MiB", 7, 9,
          "did not find expected ',' or '}' while parsing a flow mapping, which begins on line 6" },
        { TOP("max_sessions: \"\xff\"", 16, "not UTF-8 text: ") },
        { TOP("max_sessions: \x01", 15, "not UTF-8 text: control characters are not allowed") },
        /* numbers */
        { TOP("max_sessions: 0", 15, "max_sessions 0 is out of range; write 1 to 65536") },
        { TOP("max_sessions: 65537", 15, "max_sessions 65537 is out of range") },
        { TOP("max_sessions: 99999999999999999999999", 15, "is out of range; write 1 to 65536") },
        { TOP("max_sessions: -1", 15, "max_sessions '-1' is not a whole number; write 1 to 65536") },
        { TOP("max_sessions: 1e3", 15, "max_sessions '1e3' is not a whole number") },
        { QUOTA("max_sessions: 0", 42, "max_sessions 0 is out of range; write 1 to 65536") },
        { QUOTA("max_blocks: 16777217", 40, "max_blocks 16777217 is out of range; write 1 to 16777216") },
        { QUOTA("park: train", 34, "park must be a mapping") },
        { QUOTA("park: {to: train}", 34, "park lacks idle; write it as in park: {to: ram, idle: 30s}") },
        { QUOTA("park: {idle: 30s}", 34, "park lacks to") },
        { QUOTA("park: {to: train, idle: 0s}", 52, "idle 0s is out of range; write 1ms to 1d") },
        { QUOTA("park: {to: nowhere, idle: 1s}", 39,
                "partition 'nowhere' does not exist; the partitions are: ") },
        { QUOTA("park: {to: infer, idle: 1s}", 39,
                "park is to partition 'infer' itself; copies there free no memory") },
        { "[{partition: train}]", "[{partition: train, park: {to: infer, idle: 1s}}]", 16, 44,
          "this tenant has no quota in partition 'infer', to which it parks" },
        { QUOTA("per: /x/*", 33, "per must be a mapping") },
        { QUOTA("per: {limit: 4MiB}", 33,
                "per lacks cgroup; write it as in per: {cgroup: /user.slice/*, limit: 2GiB}") },
        { QUOTA("per: {cgroup: /x/*}", 33, "per lacks limit") },
        { QUOTA("per: {cgroup: x/*, limit: 4MiB}", 42, "cgroup 'x/*' does not begin with '/'") },
        { QUOTA("per: {cgroup: /x//*, limit: 4MiB}", 42, "cgroup '/x//*' has an empty component") },
        { QUOTA("limit: 4MiB, per: {cgroup: /x, limit: 6MiB}", 66,
                "per has limit 6MiB, more than this quota's limit, 4MiB") },
        { QUOTA("per: {cgroup: /x, limit: 4MiB, reserve: 6MiB}", 68,
                "per has reserve 6MiB, more than its limit, 4MiB") },
        { QUOTA("per: {cgroup: /x, limit: 4MiB, max: 3}", 59,
                "unknown key 'max' in per; known here: cgroup, limit, reserve") },
        { "match: {uid: 1000}", "match: {uid: 1000}\n    leases: all", 11, 13,
          "leases 'all' is not known; write operator or self" },
        { MATCH("{uid: 4294967295}", 18, "uid 4294967295 is out of range; write 0 to 4294967294") },
        { "match: {gid: [10, 20]}", "match: {gid: [10, staff]}", 15, 23,
          "gid 'staff' is not a whole number" },
        /* durations */
        { TOP("timeouts: {reclaim: 200}", 21,
              "reclaim '200' is not a duration; write a whole number and ms, s, m, h or d, as in 200ms") },
        { TOP("timeouts: {reclaim: ms}", 21, "reclaim 'ms' is not a duration") },
        { TOP("timeouts: {quarantine: 1.5s}", 24, "quarantine '1.5s' is not a duration; write 1500ms") },
        { TOP("timeouts: {quarantine: 2 s}", 24, "quarantine '2 s' is not a duration; write 2s") },
        { TOP("timeouts: {quarantine: 90 min}", 24, "quarantine '90 min' is not a duration; write 90m") },
        { TOP("timeouts: {quarantine: 2hours}", 24, "quarantine '2hours' is not a duration; write 2h") },
        { TOP("timeouts: {quarantine: 25h}", 24, "quarantine 25h is out of range; write 1ms to 1d") },
        { TOP("timeouts: {quarantine: 0s}", 24, "quarantine 0s is out of range; write 1ms to 1d") },
        { TOP("timeouts: {quarantine: 1441m}", 24, "quarantine 1441m is out of range") },
        { TOP("timeouts: {quarantine: 18446744073709551615m}", 24, "is out of range") },
        { TOP("timeouts: {quarantine: 18446744073709551616ms}", 24, "is out of range") },
        { TOP("timeouts: {quarantine: [1s]}", 24, "quarantine must be a single value") },
        /* sizes */
        { SIZE("1G", "size '1G' is not a size; write 1GiB") },
        { SIZE("1024mb", "size '1024mb' is not a size; write 1GiB") },
        { SIZE("1073741824",
               "size '1073741824' is not a size; write a whole number and B, KiB, MiB, GiB or TiB, as in 512MiB") },
        { SIZE("1.5GiB", "size '1.5GiB' is not a size; write 1536MiB") },
        { SIZE("1 GiB", "size '1 GiB' is not a size; write 1GiB") },
        { SIZE("512mib", "size '512mib' is not a size; write 512MiB") },
        { SIZE("0.3GiB", "size '0.3GiB' is not a size; write a whole number and B") },
        { SIZE("1.2.3GiB", "size '1.2.3GiB' is not a size; write a whole number and B") },
        { SIZE("GiB", "size 'GiB' is not a size") },
        { SIZE("100%", "size '100%': a percentage has no meaning here") },
        { SIZE("0", "size '0' is not a size") },
        { SIZE("0MiB", "size must be more than 0") },
        { SIZE("1073741825B", "size 1073741825B is not a multiple of 2MiB; write 1GiB or 1026MiB") },
        { SIZE("1KiB", "size 1KiB is not a multiple of 2MiB; write 2MiB") },
        { SIZE("8388608TiB", "size 8388608TiB is too large") },
        { SIZE("18446744073709551616B", "size 18446744073709551616B is too large") },
        { SIZE("[1GiB]", "size must be a single value, this is a list") },
        { DEVICE("headroom: 50%", 15, "headroom '50%': a percentage has no meaning here") },
        { DEVICE("headroom: 1GiB", 15, "headroom 1GiB leaves no memory of the device's size, 1GiB") },
        { DEVICE("mps: refuse", 10, "mps is only for GPUs") },
        { DEVICE("contexts: off", 15, "contexts is only for GPUs") },
        { DEVICE("standby: 50%", 14, "standby '50%': a percentage has no meaning here") },
        { DEVICE("standby: 3MiB", 14, "standby 3MiB is not a multiple of 2MiB; write 2MiB or 4MiB") },
        { DEVICE("standby: {size: 1GiB}", 14, "standby must be a single value, this is a mapping") },
        { DEVICE("standby: 1026MiB", 14,
                 "standby 1026MiB is more than the device has for partitions, 1GiB") },
        { "size: 1GiB\n    partitions:\n      - {name: train, limit: 512MiB}\n      - {name: infer, limit: 50%}",
          "size: 1GiB\n    standby: 514MiB\n    partitions:\n      - {name: train, limit: 512MiB}\n"
          "      - {name: infer, limit: 50%, growth: preallocate}",
          5, 14, "standby 514MiB is more than the limits of the partitions that take it, 512MiB" },
        { "size: 1GiB\n    partitions:\n      - {name: train, limit: 512MiB}",
          "size: 1GiB\n    standby: 2MiB\n    partitions:\n      - {name: train, limit: 512MiB, numa_node: "
          "0}",
          5, 14,
          "standby needs partitions with the same numa_node; those of 'train' and 'infer' "
          "differ" },
        { LIMIT("101%", "limit 101% is more than 100% of the device's size minus its headroom") },
        { LIMIT("0%", "limit must be more than 0") },
        { LIMIT("12.5%",
                "limit '12.5%' is not a size; write a whole number and B, KiB, MiB, GiB or TiB, as in 512MiB, or a whole percentage, as in 50%") },
        { LIMIT("3MiB", "limit 3MiB is not a multiple of 2MiB; write 2MiB or 4MiB") },
        { LIMIT("''", "limit is empty") },
        { "limit: 50%, reserve", "limit: 101%, reserve", 12, 35,
          "limit 101% is more than 100% of the partition's limit" },
        { "reserve: 128MiB", "reserve: 101%", 12, 49,
          "reserve 101% is more than 100% of the partition's limit" },
        { "reserve: 128MiB", "reserve: 1", 12, 49, "reserve '1' is not a size" },
        /* names */
        { NAME("\"vi sion\"", "name 'vi sion' is not a name; use letters, digits") },
        { NAME("\"vi\\0sion\"", "name 'vi?sion' is not a name") },
        { NAME("\"a\\n\\e[31m\\x7f\\x9b\"", "name 'a\?\?[31m\?\?\?' is not a name") },
        { NAME("a123456789b123456789c123456789d123456789e123456789f123456789g123",
               "name 'a123456789b123456789c123456789d123456789e123456789f123456...' is longer than 63 bytes") },
        { NAME("[vision]", "name must be a single value") },
        { "name: language", "name: vision", 14, 11, "tenant 'vision' is defined twice, first on line 9" },
        { "name: infer, limit: 50%}", "name: infer, limit: 25%}\n      - {name: train, limit: 25%}", 8, 16,
          "partition 'train' is defined twice, first on line 6; names must be unique across all devices" },
        { "- name: vision\n    match", "- match", 9, 5, "a tenant lacks its name" },
        /* sockets */
        { TOP("socket: {path: run/x}", 16, "path 'run/x' is not the absolute path of a socket") },
        { TOP("socket: {path: /run/x/}", 16, "path '/run/x/' is not the absolute path of a socket") },
        { TOP("socket: {path: \"/run/\\0x\"}", 16, "path '/run/?x' contains a control character") },
        { TOP("socket: {path: [a]}", 16, "path must be a single value") },
        { TOP("socket: {path: /a123456789b123456789c123456789d123456789e123456789f123456789g123456789h123456789i123456789j123456789k123456}",
              16, "has 108 bytes; a socket's path has at most 107") },
        { TOP("socket: {path: /run/bfcd/admin.sock}", 16,
              "socket and admin_socket have the same path '/run/bfcd/admin.sock'; they must differ") },
        { TOP("records: {file: r.jsonl}", 17,
              "file 'r.jsonl' is not the absolute path of a file; write it as in /var/log/bfcd/records.jsonl") },
        { TOP("records: {file: /var/log/}", 17, "is not the absolute path of a file") },
        { TOP("records: {file: \"/a\\nb\"}", 17, "contains a control character") },
        { TOP("records: {file: /r, journal: /j}", 30,
              "records has the keys 'file' and 'journal'; write one of them") },
        { TOP("records: {to: /r}", 11, "unknown key 'to' in records; known here: file, journal") },
        { TOP("records: /r", 10, "records must be") },
        { TOP("monitor_socket: {path: /run/bfcd/admin.sock}", 24,
              "admin_socket and monitor_socket have the same path '/run/bfcd/admin.sock'; they must differ") },
        { TOP("socket: {path: /run/bfcd/monitor.sock}", 16,
              "socket and monitor_socket have the same path '/run/bfcd/monitor.sock'; they must differ") },
        { TOP("lease_socket: {path: /run/bfcd/admin.sock}", 22,
              "admin_socket and lease_socket have the same path '/run/bfcd/admin.sock'; they must differ") },
        { TOP("lease_socket: {mode: \"0600\"}", 15, "lease_socket has no key 'path'") },
        { "max_sessions: 100", "socket: {path: /a}\nadmin_socket: {path: /a}", 2, 22,
          "have the same path '/a'" },
        { TOP("socket: {mode: 666}", 16,
              "mode '666' is not a mode; write four octal digits, as in \"0660\"") },
        { TOP("socket: {mode: 0668}", 16, "mode '0668' is not a mode") },
        { TOP("socket: {mode: 4755}", 16, "mode '4755' is not a mode") },
        { TOP("socket: {mode: {a: b}}", 16, "mode must be a single value") },
        { TOP("socket: {group: 4294967295}", 17, "group 4294967295 is out of range") },
        { TOP("socket: {group: [a]}", 17, "a group must be a single value") },
        /* devices and partitions */
        { "id: host", "id: tpu", 3, 9,
          "device 'tpu' is not known; write host, cuda:N, GPU-UUID or MIG-UUID" },
        { "id: host", "id: Host", 3, 9, "device 'Host' is not known" },
        { "id: host", "id: [host]", 3, 9, "id must be a single value" },
        { "id: host\n    size", "size", 3, 5, "a device lacks its id; write host, cuda:N" },
        { "    size: 1GiB\n    partitions", "    partitions", 3, 5,
          "device 'host' lacks its size; write it as in size: 4GiB" },
        { "tenants:\n", "  - {id: host, size: 4MiB, partitions: [{name: c, limit: 100%}]}\ntenants:\n", 8, 10,
          "device 'host' is defined twice, first on line 3" },
        { "tenants:\n", "  - host\ntenants:\n", 8, 5, "a device must be a mapping" },
        { "name: train, limit: 512MiB", "name: train", 6, 9, "a partition lacks its limit" },
        { PARTITION("growth: fast", 46, "growth 'fast' is not known; write on-demand or preallocate") },
        { PARTITION("growth: []", 46, "growth must be a single value") },
        { PARTITION("share: nfs", 45, "share 'nfs' is not known; write fd or cuda-ipc") },
        { PARTITION("share: cuda-ipc", 45, "share cuda-ipc is not for the host device; write fd") },
        { PARTITION("clear_on_release: true", 56,
                    "clear_on_release is only for GPUs; the kernel always clears host memory") },
        { PARTITION("pinned: yes", 46, "pinned 'yes' is not known; write false or true") },
        { PARTITION("numa_node: 1024", 49, "numa_node") },
        { "limit: 512MiB", "limit: 514MiB", 7, 30,
          "the partitions' limits sum to 1026MiB; the device has 1GiB (its size minus its headroom)" },
        { "size: 1GiB", "size: 1GiB\n    headroom: 10MiB", 8, 30,
          "the partitions' limits sum to 1018MiB; the device has 1014MiB" },
        /* tenants and quotas */
        { "{partition: infer}", "{partition: debug}", 13, 21,
          "partition 'debug' does not exist; the partitions are: train, infer" },
        { "{partition: infer}", "{limit: 4MiB}", 13, 9, "a quota lacks its partition" },
        { "{partition: infer}", "{partition: [infer]}", 13, 21, "partition must be a single value" },
        { "{partition: infer}", "{partition: train}", 13, 21,
          "this tenant already has a quota in partition 'train', first on line 12" },
        { "limit: 50%, reserve", "limit: 514MiB, reserve", 12, 35,
          "limit 514MiB is more than the limit of partition 'train', 512MiB" },
        { "reserve: 128MiB", "reserve: 258MiB", 12, 49,
          "reserve 258MiB is more than this quota's limit, 256MiB" },
        { "reserve: 128MiB", "reserve: 51%", 12, 49,
          "reserve 260MiB is more than this quota's limit, 256MiB" },
        { QUOTAS("[{partition: train, reserve: 386MiB}]", 42,
                 "the guarantees (reserve) in partition 'train' sum to 514MiB; its limit is 512MiB") },
        { PARTITION(
                "growth: preallocate", 46,
                "partition 'train': preallocate allocates each tenant's limit at the start, but the quotas' "
                "limits sum to 768MiB and the partition's limit is 512MiB") },
        { "    match: {uid: 1000}\n", "", 9, 5, "tenant 'vision' lacks match and is not the default_tenant" },
        { TOP("default_tenant: speech", 17,
              "default_tenant 'speech' does not exist; the tenants are: vision, language") },
        { TOP("default_tenant: [vision]", 17, "default_tenant must be a single value") },
};

LOOP_TEST(each_mistake_has_one_message, sizeof(MISTAKES) / sizeof(MISTAKES[0]))
{
        const struct mistake *m = &MISTAKES[_i];

        expect_only(edit(m->old, m->new), m->line, m->column, m->part);
}

/* Mistakes of the whole rather than of a piece. */
TEST(mistakes_of_the_whole_file)
{
        const char *tenants = strstr(GOOD, "tenants:");
        int n_devices = (int)(tenants - GOOD);
        struct config *c = NULL;
        const struct mistake cases[] = {
                { NULL, "", 1, 1, "the file is empty" },
                { NULL, "# nothing\n", 1, 1, "the file is empty" },
                { NULL, "---\n", 1, 1, "the file is empty" },
                { NULL, "- a\n", 1, 1, "the config must be a mapping of keys to values, this is a list" },
                { NULL, "hello\n", 1, 1,
                  "the config must be a mapping of keys to values, this is a single value" },
                { NULL, tenants, 1, 1, "the key 'devices' is missing" },
                { NULL, print("devices: []\n%s", tenants), 1, 10, "devices is empty" },
                { NULL, print("devices: host\n%s", tenants), 1, 10, "devices must be a list" },
                { NULL, print("devices: [{id: host, size: 4MiB}]\n%s", tenants), 1, 11,
                  "a device lacks its partitions" },
                { NULL, print("devices: [{id: host, size: 4MiB, partitions: []}]\n%s", tenants), 1, 46,
                  "partitions is empty" },
                { NULL, print("devices: [{id: host, size: 4MiB, partitions: a}]\n%s", tenants), 1, 46,
                  "partitions must be a list" },
                { NULL, print("%.*s", n_devices, GOOD), 1, 1, "the key 'tenants' is missing" },
                { NULL, print("%.*stenants: []\n", n_devices, GOOD), 8, 10,
                  "tenants is empty; there must be at least one" },
                { NULL, print("%.*stenants: vision\n", n_devices, GOOD), 8, 10, "tenants must be a list" },
                { NULL, print("%.*stenants: [vision]\n", n_devices, GOOD), 8, 11,
                  "a tenant must be a mapping" },
        };
        char *text = malloc((1 << 20) + 1);

        for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
                expect_only(cases[i].new, cases[i].line, cases[i].column, cases[i].part);
        keep(text);
        memset(text, '#', (1 << 20) + 1);
        ck_assert_int_eq(parse_for(&machine, text, (1 << 20) + 1, &c), -EINVAL);
        assert_line("c.yaml", 1, 1, "the file is larger than 1MiB");
}

TEST(test_alias)
{
        struct config *c = NULL;

        ck_assert_int_eq(parse("max_sessions: &n 5\ndevices: *n\ntenants: *n\n", &c), -EINVAL);
        assert_line("c.yaml", 1, 15, "anchors (&name) are not allowed");
        assert_line("c.yaml", 2, 10, "aliases (*name) are not allowed");
        assert_line("c.yaml", 3, 10, "aliases (*name) are not allowed");
        ck_assert_uint_eq(count_lines(errors), 3);
}

TEST(test_limit_of_one_quota)
{
        static const char text[] = "devices:\n"
                                   "  - {id: host, size: 2TiB, partitions: [{name: p, limit: 1TiB}]}\n"
                                   "tenants:\n"
                                   "  - {name: a, match: {uid: 1}, quotas: [{partition: p, limit: 50%}]}\n"
                                   "  - {name: b, match: {uid: 2}, quotas: [{partition: p, limit: 51%}]}\n"
                                   "  - {name: c, match: {uid: 3}, quotas: [{partition: p}]}\n";
        struct config *c = NULL;

        ck_assert_int_eq(parse(text, &c), -EINVAL);
        assert_line(
                "c.yaml", 5, 63,
                "limit 534772MiB is more than 512GiB, the most that one tenant can have in one partition");
        assert_line("c.yaml", 6, 41, "limit 1TiB is more than 512GiB");
        ck_assert_ptr_null(strstr(errors, "c.yaml:4:"));
}

TEST(test_percentage_too_small)
{
        static const char text[] =
                "devices: [{id: host, size: 1GiB, partitions: [{name: p, limit: 100MiB}]}]\n"
                "tenants: [{name: a, match: {uid: 1}, quotas: [{partition: p, limit: 1%}]}]\n";

        expect_only(text, 2, 69, "limit 1% of the partition's limit (100MiB) is less than 2MiB");
}

/* A figure that is not known is not compared with, and what would follow from
 * an error is not told. */
TEST(many_mistakes_in_one_file)
{
        static const char text[] = "socket: {path: relative, mode: 666}\n"                     /* 1 */
                                   "timeouts: {reclaim: 200}\n"                                /* 2 */
                                   "max_sessions: 0\n"                                         /* 3 */
                                   "devices:\n"                                                /* 4 */
                                   "  - id: cuda:7\n"                                          /* 5 */
                                   "    size: 4G\n"                                            /* 6 */
                                   "    partitions:\n"                                         /* 7 */
                                   "      - {name: train, limit: 50%, growth: preallocate}\n"  /* 8 */
                                   "      - {name: tr ain, limit: 3MiB}\n"                     /* 9 */
                                   "tenants:\n"                                                /* 10 */
                                   "  - name: vision\n"                                        /* 11 */
                                   "    quotas:\n"                                             /* 12 */
                                   "      - {partition: train, limit: 50%, reserve: 60%}\n"    /* 13 */
                                   "      - {partition: unknown, limit: 50%, max_blocks: x}\n" /* 14 */
                                   "unknown: 1\n";                                             /* 15 */
        struct config *c = NULL;

        ck_assert_int_eq(parse(text, &c), -EINVAL);
        assert_line("c.yaml", 1, 16, "path 'relative'");
        assert_line("c.yaml", 1, 32, "mode '666'");
        assert_line("c.yaml", 2, 21, "reclaim '200'");
        assert_line("c.yaml", 3, 15, "max_sessions 0");
        assert_line("c.yaml", 5, 9, "device cuda:7: no such device");
        assert_line("c.yaml", 6, 11, "size is only for the host device");
        assert_line("c.yaml", 9, 16, "name 'tr ain'");
        assert_line("c.yaml", 9, 31, "limit 3MiB");
        assert_line("c.yaml", 11, 5, "tenant 'vision' lacks match");
        assert_line("c.yaml", 14, 54, "max_blocks 'x'");
        assert_line("c.yaml", 15, 1, "unknown key 'unknown'");
        ck_assert_msg(count_lines(errors) == 11, "%s", errors);
}

/* ---- GPUs ----------------------------------------------------------------- */

static const char GPUS[] = "max_sessions: 100\n"                                          /* 1 */
                           "devices:\n"                                                   /* 2 */
                           "  - id: cuda:0\n"                                             /* 3 */
                           "    headroom: 2GiB\n"                                         /* 4 */
                           "    partitions:\n"                                            /* 5 */
                           "      - {name: train, limit: 50%, share: cuda-ipc}\n"         /* 6 */
                           "      - {name: infer, limit: 3GiB, share: fd}\n"              /* 7 */
                           "  - id: cuda:1\n"                                             /* 8 */
                           "    headroom: 24MiB\n"                                        /* 9 */
                           "    partitions: [{name: small, limit: 100%, share: fd}]\n"    /* 10 */
                           "tenants:\n"                                                   /* 11 */
                           "  - name: vision\n"                                           /* 12 */
                           "    match: {uid: 4242}\n"                                     /* 13 */
                           "    quotas:\n"                                                /* 14 */
                           "      - {partition: train, reserve: 1GiB, max_sessions: 1}\n" /* 15 */
                           "      - {partition: infer, max_sessions: 1}\n"                /* 16 */
                           "      - {partition: small, limit: 300MiB}\n";                 /* 17 */

/* What the warnings are about that GPUS always has: 9:15, contexts of cuda:1; 6:42, users of train. */
#define GPUS_WARNINGS 2

static const char *edit_gpus(const char *old, const char *new)
{
        return edit_of(GPUS, old, new);
}

TEST(test_gpus)
{
        struct config *c = parse_good(GPUS);

        ck_assert_uint_eq(n_looks, 2); /* each once */
        ck_assert_uint_eq(c->n_devices, 2);
        ck_assert(c->devices[0].is_cuda && c->devices[0].uuid[0] == 1);
        ck_assert_uint_eq(c->devices[0].size_bytes, 8 * GIB + 12345);
        ck_assert_uint_eq(c->devices[0].headroom_bytes, 2 * GIB);
        ck_assert_uint_eq(c->partitions[0].limit_bytes, 3 * GIB); /* of whole pieces */
        ck_assert_int_eq(c->partitions[0].share, CONFIG_SHARE_CUDA_IPC);
        ck_assert_int_eq(c->partitions[1].share, CONFIG_SHARE_FD);
        ck_assert_uint_eq(c->partitions[2].limit_bytes, 1000 * MIB);
        ck_assert_uint_eq(c->tenants[0].quotas[0].limit_bytes, 3 * GIB);
        assert_line("c.yaml", 9, 15,
                    "warning: device 'cuda:1': max_sessions allows 100 processes; each of them, and "
                    "bfcd itself, needs 100MiB to 550MiB of GPU memory for its CUDA context, 10100MiB "
                    "to 55GiB in total;");
        assert_line("c.yaml", 6, 42,
                    "warning: partition 'train' has share: cuda-ipc, and tenant 'vision' has users "
                    "other than");
        ck_assert_msg(count_lines(errors) == GPUS_WARNINGS, "%s", errors);
}

TEST(unsupported_share_modes)
{
        static const char text[] =
                "devices:\n"
                "  - {id: cuda:3, partitions: [{name: p, limit: 10%, share: fd}, {name: q, limit: 10%}]}\n"
                "  - {id: cuda:4, partitions: [{name: r, limit: 10%}, {name: s, limit: 10%, share: fd}]}\n"
                "  - {id: cuda:5, partitions: [{name: t, limit: 10%}]}\n"
                "tenants: [{name: a, match: {uid: 1}, quotas: [{partition: p}]}]\n";
        struct config *c = NULL;

        ck_assert_int_eq(parse(text, &c), -EINVAL);
        assert_line("c.yaml", 2, 60,
                    "device 'cuda:3' does not support share: fd (no virtual memory management); write "
                    "share: cuda-ipc");
        assert_line("c.yaml", 3, 31, "device 'cuda:4' does not support share: cuda-ipc; write share: fd");
        assert_line("c.yaml", 4, 31, "device 'cuda:5' supports neither share: fd nor share: cuda-ipc");
}

static unsigned int n_looks_before; /* MPS was allowed */

static void allow_mps(void)
{
        n_looks_before = n_looks < n_looks_before ? n_looks : n_looks_before;
}

/* Where one GPU allows it, that is known before the first one is opened. What refuses it is as without the key. */
TEST(mps_is_of_a_gpu)
{
        static const char allows[] = "    mps: allow\n    headroom: 24MiB\n";
        struct config_machine m = { .look = look, .allow_mps = allow_mps };
        const char *text = edit_gpus("    headroom: 24MiB\n", allows);
        struct config *c = NULL, *again, *running;

        n_looks_before = UINT32_MAX;
        ck_assert_int_eq(keep_config(parse_for(&m, GPUS, strlen(GPUS), &running), &running), 0);
        ck_assert_uint_eq(n_looks_before, UINT32_MAX);
        ck_assert_ptr_null(strstr(keep(config_format(running)), "mps"));
        n_looks = 0;
        ck_assert_int_eq(keep_config(parse_for(&m, text, strlen(text), &c), &c), 0);
        ck_assert(n_looks_before == 0 && n_looks == 2);
        ck_assert(c->devices[0].mps == CONFIG_MPS_REFUSE && c->devices[1].mps == CONFIG_MPS_ALLOW);
        assert_line(
                "c.yaml", 3, 5,
                "warning: device 'cuda:0' refuses MPS and device 'cuda:1' allows it, but bfcd cannot see for "
                "which GPUs MPS runs");
        ck_assert_ptr_nonnull(strstr(format_twice(text, &c, &again), "mps: allow\n"));
        text = edit_of(text, "    headroom: 2GiB\n", "    mps: allow\n    headroom: 2GiB\n");
        parse_good(text);
        ck_assert_ptr_null(strstr(errors, "refuses MPS"));

        m.running = running;
        ck_assert_int_eq(parse_for(&m, text, strlen(text), &c), -EINVAL);
        assert_line("c.yaml", 4, 10,
                    "the mps of device 'cuda:0', refuse, cannot change while bfcd runs: restart bfcd");
        assert_line("c.yaml", 10, 10, "the mps of device 'cuda:1', refuse, cannot change");
}

/* It can change while bfcd runs. */
TEST(contexts_of_gpus)
{
        struct config_machine m = { .look = look };
        const char *text = edit_of(edit_gpus("headroom: 2GiB", "headroom: 2GiB\n    contexts: 512MiB"),
                                   "headroom: 24MiB", "headroom: 24MiB\n    contexts: off");
        struct config *c, *again, *plain;
        char *diff = NULL;
        size_t n_diff = 0;
        FILE *f;

        ck_assert_ptr_nonnull(strstr(format_twice(text, &c, &again), "contexts: 512MiB\n"));
        ck_assert_ptr_nonnull(strstr(keep(config_format(c)), "contexts: off\n"));
        ck_assert_uint_eq(c->devices[0].context_bytes, 512 * MIB);
        ck_assert_uint_eq(c->devices[1].context_bytes, CONFIG_NO_CONTEXTS);
        plain = parse_good(edit_gpus("headroom: 2GiB", "contexts: measured\n    headroom: 2GiB"));
        ck_assert_ptr_null(strstr(keep(config_format(plain)), "contexts"));
        ck_assert_uint_eq(plain->devices[0].context_bytes, 0);
        m.running = plain;
        ck_assert_int_eq(keep_config(parse_for(&m, text, strlen(text), &c), &c), 0);
        f = open_memstream(&diff, &n_diff);
        config_diff(plain, c, f);
        fclose(f);
        ck_assert_str_eq(keep(diff), "device 'cuda:0': contexts is 512MiB, was measured\n"
                                     "device 'cuda:1': contexts is off, was measured\n");
}

TEST(test_clear_on_release)
{
        const char *text = edit_gpus("share: cuda-ipc", "share: cuda-ipc, clear_on_release: true");
        struct config *c, *again;

        ck_assert_ptr_nonnull(
                strstr(format_twice(text, &c, &again), "share: cuda-ipc, clear_on_release: true}\n"));
        ck_assert(c->partitions[0].clears && !c->partitions[1].clears && !c->partitions[2].clears);
        c = parse_good(edit_gpus("share: cuda-ipc", "share: cuda-ipc, clear_on_release: false"));
        ck_assert(!c->partitions[0].clears);
}

/* Blocks are parked from a GPU to the host, and not the other way round. */
TEST(parks_of_gpus)
{
        struct config *c = NULL;

        ck_assert_int_eq(
                parse(edit_gpus("{partition: infer, max", "{partition: infer, park: {to: small, idle: "
                                                          "1s}, max"),
                      &c),
                -EINVAL);
        assert_line("c.yaml", 16, 39, "park is to partition 'small' of a GPU; copies need host memory");
}

TEST(test_numa_node)
{
        const char *text, *printed;
        struct config *c[2];

        text = edit("{name: train, limit: 512MiB}", "{name: train, limit: 512MiB, numa_node: 2}");
        printed = format_twice(text, &c[0], &c[1]);
        for (int i = 0; i < 2; i++) {
                ck_assert(c[i]->partitions[0].has_node && c[i]->partitions[0].node == 2);
                ck_assert(!c[i]->partitions[1].has_node);
        }
        ck_assert_ptr_nonnull(strstr(printed, "numa_node: "));
}

/* A machine without pages of 2 MiB, and with one node. */
static int look_pages(const struct config_partition *p, char *ret_clause, size_t n_clause)
{
        snprintf(ret_clause, n_clause, "kernel lacks it");
        return p->has_node && p->node > 0 ? -ENODEV : -ENOTSUP;
}

static int parse_on_small_pages(const char *partition, bool serves)
{
        struct config_machine m = { .look_pages = look_pages, .serves = serves };
        const char *text = edit("{name: train, limit: 512MiB}", partition);
        struct config *c = NULL;

        return keep_config(parse_for(&m, text, strlen(text), &c), &c);
}

TEST(unavailable_page_sizes)
{
        ck_assert_int_eq(parse_on_small_pages("{name: train, limit: 510MiB}", false), 0);
        assert_line("c.yaml", 6, 9, "warning: partition 'train': kernel lacks it");
        ck_assert_int_eq(parse_on_small_pages("{name: train, limit: 512MiB}", true), 0);
        ck_assert_str_eq(errors, ""); /* not at every start */
        ck_assert_int_eq(parse_on_small_pages("{name: train, limit: 510MiB, numa_node: 1}", true), -ENODEV);
        assert_line("c.yaml", 6, 49, "partition 'train': kernel lacks it");
}

/* Without a GPU it is for clients only, which is said; also at the start. */
TEST(pinned_memory)
{
        static const char host[] =
                "  - id: host\n    size: 64MiB\n    partitions: [{name: parking, limit: 64MiB, "
                "pinned: true}]\ntenants:\n";
        const char *printed;
        struct config *c[2];

        printed = format_twice(
                edit("{name: train, limit: 512MiB}", "{name: train, limit: 512MiB, pinned: true}"), &c[0],
                &c[1]);
        ck_assert_ptr_nonnull(strstr(printed, "pinned: true}\n"));
        for (int i = 0; i < 2; i++)
                ck_assert(c[i]->partitions[0].is_pinned && !c[i]->partitions[1].is_pinned);
        ck_assert_int_eq(parse_on_small_pages("{name: train, limit: 512MiB, pinned: true}", true), 0);
        assert_line(
                "c.yaml", 6, 46,
                "warning: partition 'train' is pinned, but no GPU is configured: only clients that use CUDA "
                "register its memory; add a GPU to 'devices', or remove pinned");
        c[0] = parse_good(edit_gpus("tenants:\n", host));
        ck_assert(c[0]->partitions[c[0]->n_partitions - 1].is_pinned);
        ck_assert_ptr_null(strstr(errors, "pinned"));
}

/* As said in bfcd.yaml(5). */
TEST(test_gpu_defaults)
{
        static const char text[] = "devices:\n"
                                   "  - {id: cuda:0, partitions: [{name: p, limit: 100%}]}\n"
                                   "  - {id: cuda:1, partitions: [{name: q, limit: 100%}]}\n"
                                   "tenants: [{name: a, match: {uid: 1}, quotas: [{partition: p}]}]\n";
        struct config *c = parse_good(text);

        ck_assert_uint_eq(c->devices[0].headroom_bytes, 1 * GIB + 2 * MIB); /* an eighth, in whole pieces */
        ck_assert_uint_eq(c->devices[1].headroom_bytes, 128 * MIB);
        ck_assert_uint_eq(c->partitions[0].limit_bytes, 7 * GIB - 2 * MIB);
        ck_assert_int_eq(c->partitions[0].share, CONFIG_SHARE_CUDA_IPC);
        assert_line("c.yaml", 2, 31, "warning: partition 'p' has the default, share: cuda-ipc");
        assert_line("c.yaml", 3, 31, "warning: partition 'q' has the default");
        assert_line(
                "c.yaml", 2, 10,
                "1024 processes; each of them, and bfcd itself, needs 100MiB to 550MiB of GPU "
                "memory for its CUDA context, 101GiB to 551GiB in total; the headroom is 1026MiB, enough "
                "for 0 to 9 processes: lower max_sessions to the processes that use the GPU at the same time");
        assert_line("c.yaml", 2, 31, "use share: fd for other users");
        ck_assert_msg(count_lines(errors) == 4, "%s", errors); /* no tenant has a quota on cuda:1 */
}

#define GPU(id, part) "cuda:0", id, 3, 9, part

static const struct mistake gpu_mistakes[] = {
        { GPU("\"cuda:\"", "device 'cuda:' has no GPU number; write it as in cuda:0") },
        { GPU("cuda:01", "device 'cuda:01' has no GPU number") },
        { GPU("cuda:-1", "device 'cuda:-1' has no GPU number") },
        { GPU("cuda:1000", "device 'cuda:1000' has no GPU number") },
        { GPU("\"cuda:0\\0\"", "is not known") },
        { GPU("GPU-12ab", "device 'GPU-12ab' has no UUID; write it as nvidia-smi -L prints it") },
        { GPU(GPU_0 "0", "has no UUID") },
        { GPU("GPU-0011223344-5566-7788-99aa-bbccddeeff", "has no UUID") },
        { GPU("MIG-x0112233-4455-6677-8899-aabbccddeeff", "has no UUID") },
        { "cuda:1", "cuda:0", 8, 9,
          "device 'cuda:0' is defined twice, first on line 3; list all its partitions in one entry" },
        { "cuda:1", GPU_0, 8, 9,
          "device '" GPU_0 "' is the same GPU as 'cuda:0' on line 3; list all its partitions in one entry" },
        { "share: fd}\n  - id: cuda:1", "share: cuda-ipc}\n    standby: 64MiB\n  - id: cuda:1", 8, 14,
          "standby has no effect on this device: it is for partitions with share: fd and growth: on-demand" },
        { "headroom: 2GiB", "headroom: 2GiB\n    standby: 3074MiB", 5, 14,
          "standby 3074MiB is more than the limits of the partitions that take it, 3GiB" },
        { "share: cuda-ipc", "numa_node: 0", 6, 46, "numa_node is only for the host device" },
        { "share: cuda-ipc", "pinned: false", 6, 43,
          "pinned is only for the host device; GPU memory is always pinned" },
        { "share: cuda-ipc", "clear_on_release: yes", 6, 53,
          "clear_on_release 'yes' is not known; write false or true" },
        { "headroom: 2GiB", "size: 4GiB", 4, 11,
          "size is only for the host device; the size of a GPU comes from its driver" },
        { "headroom: 2GiB", "mps: maybe", 4, 10, "mps 'maybe' is not known; write refuse or allow" },
        { "headroom: 2GiB", "mps: [allow]", 4, 10, "mps must be a single value, this is a list" },
        { "headroom: 2GiB", "contexts: maybe", 4, 15,
          "contexts 'maybe' is not known; write measured, off or a size, as in 512MiB" },
        { "headroom: 2GiB", "contexts: [off]", 4, 15, "contexts must be a single value, this is a list" },
        { "headroom: 2GiB", "contexts: 0MiB", 4, 15, "contexts must be more than 0" },
        { "headroom: 2GiB", "contexts: 512", 4, 15, "contexts '512' is not a size" },
        { "headroom: 2GiB", "headroom: 10%", 4, 15, "headroom '10%': a percentage has no meaning here" },
        { "headroom: 2GiB", "headroom: 9GiB", 4, 15,
          "headroom 9GiB leaves no memory of device 'cuda:0', which has 8192MiB" },
        { "limit: 3GiB", "limit: 3074MiB", 7, 30,
          "the partitions' limits sum to 6146MiB; device 'cuda:0' has 6144MiB for partitions (8192MiB "
          "minus a headroom of 2GiB)" },
        { "limit: 300MiB", "limit: 1002MiB", 17, 35,
          "limit 1002MiB is more than the limit of partition 'small'" },
        { "share: cuda-ipc", "share: nfs", 6, 42, "share 'nfs' is not known; write fd or cuda-ipc" },
};

LOOP_TEST(test_gpu_mistake, sizeof(gpu_mistakes) / sizeof(gpu_mistakes[0]))
{
        const struct mistake *m = &gpu_mistakes[_i];

        expect_only(edit_gpus(m->old, m->new), m->line, m->column, m->part);
}

/* MIG devices are served beside each other and beside other GPUs. */
TEST(test_mig)
{
        static const char format[] =
                "devices:\n"
                "  - {id: %s, headroom: 2GiB, partitions: [{name: p, limit: 2GiB, share: fd}]}\n"
                "  - {id: %s, size: 4MiB, partitions: [{name: q, limit: 4MiB}]}\n"
                "tenants: [{name: a, match: {uid: 1}, quotas: [{partition: p, max_sessions: 2}]}]\n";

        parse_good_quietly(print(format, MIG_0, "host"));
        parse_good_quietly(
                "devices:\n"
                "  - {id: " MIG_0 ", headroom: 2GiB, partitions: [{name: p, limit: 2GiB, share: fd}]}\n"
                "  - {id: " MIG_1 ", headroom: 2GiB, partitions: [{name: q, limit: 2GiB, share: fd}]}\n"
                "  - {id: cuda:0, headroom: 2GiB, partitions: [{name: r, limit: 2GiB, share: fd}]}\n"
                "tenants: [{name: a, match: {uid: 1}, quotas: [{partition: p, max_sessions: 2}]}]\n");
}

/* A correct config on a machine that lacks the GPU: another error, and one message. */
TEST(missing_gpu)
{
        const char *text = edit_gpus("cuda:1", GPU_9);
        struct config *c = NULL;

        ck_assert_int_eq(parse(text, &c), -ENODEV);
        assert_line("c.yaml", 8, 9, "device " GPU_9 ": no such device");
        ck_assert_msg(count_lines(errors) == 1, "%s", errors);

        text = edit_gpus("limit: 3GiB", "limit: 3");
        ck_assert_int_eq(parse_for(NULL, text, strlen(text), &c), -EINVAL);
        assert_line("c.yaml", 3, 9, "device cuda:0: GPUs are not supported by this program");
        assert_line("c.yaml", 7, 30, "limit '3'");
        ck_assert_msg(count_lines(errors) == 3, "%s", errors);
        ck_assert_ptr_null(c);
}

/* Memory that is needed at the start: a warning, and an error where it is the start. */
TEST(test_gpu_is_full)
{
        const char *text = edit_gpus("share: fd}]", "share: fd, growth: preallocate}]");
        const char *more = edit_of(text, "300MiB}\n", "600MiB}\n");
        struct config *c = NULL;

        (void)parse_good(text);
        ck_assert_msg(count_lines(errors) == GPUS_WARNINGS, "%s", errors);
        (void)parse_good(more);
        assert_line(
                "c.yaml", 8, 9,
                "warning: device 'cuda:1' has 512MiB free now; its guarantees and preallocating partitions need "
                "600MiB when bfcd starts");
        machine.serves = true;
        ck_assert_int_eq(parse(more, &c), -ENODEV);
        assert_line("c.yaml", 8, 9,
                    "device 'cuda:1' has 512MiB free now; its guarantees and preallocating "
                    "partitions need 600MiB: nvidia-smi lists the processes that use it");
        ck_assert_ptr_null(c);
        machine.succeeds = succeeds; /* it may be its own */
        (void)parse_good(more);
        machine.succeeds = NULL;
        assert_line("c.yaml", 8, 9,
                    "warning: device 'cuda:1' has 512MiB free now; its guarantees and preallocating "
                    "partitions need 600MiB including memory kept from the previous daemon");
}

/* Costs are warnings of --check, not of each start. */
TEST(no_cost_warnings_at_start)
{
        machine.serves = true;
        parse_good_quietly(GPUS);
}

/* A small limit in a cuda-ipc partition is a warning. */
TEST(test_small_limits_by_cuda_ipc)
{
        (void)parse_good(edit_gpus("{partition: train, reserve: 1GiB", "{partition: train, limit: 254MiB"));
        assert_line("c.yaml", 15, 35,
                    "warning: limit 254MiB in partition 'train' is allocated in extents of 32MiB");
        ck_assert_msg(count_lines(errors) == GPUS_WARNINGS + 1, "%s", errors);
        (void)parse_good(edit_gpus("{partition: train, reserve: 1GiB", "{partition: train, limit: 256MiB"));
        ck_assert_msg(count_lines(errors) == GPUS_WARNINGS, "%s", errors);
        /* What preallocates is one extent; and this process's own user may open it. */
        parse_good_quietly(
                print("devices:\n"
                      "  - {id: cuda:0, headroom: 1100MiB, partitions: [{name: p, limit: 128MiB, share: "
                      "cuda-ipc, growth: preallocate}]}\n"
                      "tenants: [{name: a, match: {uid: %u}, quotas: [{partition: p, max_sessions: 1}]}]\n",
                      (unsigned)geteuid()));
}

/* Devices are read before tenants; what is said keeps the order of the lines. */
TEST(test_warnings_by_line)
{
        const char *first, *second, *third;

        (void)parse_good(
                "tenants: [{name: a, match: {group: [no-such-group, nor-this]}, quotas: [{partition: p}]}]\n"
                "default_tenant: a\n"
                "devices: [{id: host, size: 8000TiB, partitions: [{name: p, limit: 1GiB}]}]\n");
        first = strstr(errors, "no-such-group");
        second = strstr(errors, "nor-this");
        third = strstr(errors, "machine's memory");
        ck_assert_msg(first && first < second && second < third, "%s", errors);
}

TEST(test_contexts_fit)
{
        const char *text = edit_gpus("limit: 300MiB", "limit: 2MiB, max_sessions: 1");

        /* bfcd's and one other, 1100MiB */
        (void)parse_good(edit_of(text, "headroom: 24MiB", "headroom: 1000MiB"));
        assert_line("c.yaml", 9, 15, "allows 1 processes; each of them, and bfcd itself, needs");
        (void)parse_good(
                "devices: [{id: cuda:0, headroom: 2GiB, partitions: [{name: p, limit: 1GiB, share: fd}]}]\n"
                "tenants: [{name: a, match: {uid: 1}, quotas: [{partition: p, max_sessions: 9}]}]\n");
        assert_line("c.yaml", 1, 34,
                    "1000MiB to 5500MiB in total; the headroom is 2GiB, enough for 2 to 19 processes: write "
                    "headroom: 5500MiB, or lower max_sessions");
        parse_good_quietly(
                "devices:\n"
                "  - {id: cuda:0, headroom: 1100MiB, partitions: [{name: p, limit: 1GiB, share: fd}]}\n"
                "tenants: [{name: a, match: {uid: 1}, quotas: [{partition: p, max_sessions: 1}]}]\n");
}

/* ---- right ones ----------------------------------------------------------- */

/* Octal, with and without quotes, as in chmod(1). */
TEST(modes_need_no_quotes)
{
        ck_assert_uint_eq(parse_good(edit("max_sessions: 100", "socket: {mode: 0640}"))->socket.mode, 0640);
        ck_assert_uint_eq(parse_good(edit("max_sessions: 100", "socket: {mode: \"0640\"}"))->socket.mode,
                          0640);
}

TEST(test_defaults)
{
        struct config *c = parse_good(strstr(GOOD, "devices:"));

        ck_assert_str_eq(errors, "");
        ck_assert_str_eq(c->socket.path, "/run/bfcd/client/bfcd.sock");
        ck_assert_uint_eq(c->socket.mode, 0666);
        ck_assert_uint_eq(c->socket.group, (gid_t)-1);
        ck_assert_str_eq(c->admin_socket.path, "/run/bfcd/admin.sock");
        ck_assert_uint_eq(c->admin_socket.mode, 0600);
        ck_assert_uint_eq(c->admin_socket.group, (gid_t)-1);
        ck_assert_uint_eq(c->reclaim_timeout_ms, 200);
        ck_assert_uint_eq(c->quarantine_timeout_ms, 60000);
        ck_assert_uint_eq(c->max_sessions, 4096);
        ck_assert_int_eq(c->default_tenant, -1);
        ck_assert_uint_eq(c->n_devices, 1);
        ck_assert_str_eq(c->devices[0].id, "host");
        ck_assert_uint_eq(c->devices[0].size_bytes, GIB);
        ck_assert_uint_eq(c->devices[0].headroom_bytes, 0);
        ck_assert_uint_eq(c->n_partitions, 2);
        ck_assert_str_eq(c->partitions[1].name, "infer");
        ck_assert_uint_eq(c->partitions[1].limit_bytes, 512 * MIB);
        ck_assert_int_eq(c->partitions[1].growth, CONFIG_GROWTH_ON_DEMAND);
        ck_assert_int_eq(c->partitions[1].share, CONFIG_SHARE_FD);
        ck_assert_uint_eq(c->n_tenants, 2);
        ck_assert_uint_eq(c->tenants[0].n_uids, 1);
        ck_assert_uint_eq(c->tenants[0].uids[0], 1000);
        ck_assert_uint_eq(c->tenants[1].n_gids, 2);
        ck_assert_uint_eq(c->tenants[1].gids[1], 20);
        ck_assert_uint_eq(c->tenants[0].n_quotas, 2);
        ck_assert_uint_eq(c->tenants[0].quotas[0].limit_bytes, 256 * MIB);
        ck_assert_uint_eq(c->tenants[0].quotas[0].reserve_bytes, 128 * MIB);
        ck_assert_uint_eq(c->tenants[0].quotas[1].partition, 1);
        ck_assert_uint_eq(c->tenants[0].quotas[1].limit_bytes, 512 * MIB);
        ck_assert_uint_eq(c->tenants[0].quotas[1].reserve_bytes, 0);
        ck_assert_uint_eq(c->tenants[0].quotas[1].max_sessions, 1024);
        ck_assert_uint_eq(c->tenants[0].quotas[1].max_blocks, 100000);
        ck_assert_uint_eq(c->tenants[0].max_sessions, 2 * 1024);
        ck_assert_uint_eq(config_session_share(c, &c->tenants[0]), 2 * 1024);
        ck_assert_ptr_null(config_free(NULL));
}

static const char FULL[] =
        "socket: {path: '/tmp/a \"b\\c', mode: 0660, group: 7}\n"
        "admin_socket: {path: /tmp/admin, mode: \"0640\", group: root}\n"
        "timeouts: {reclaim: 3ms, quarantine: 1440m}\n"
        "max_sessions: 65536\n"
        "devices:\n"
        "  - id: \"host\"\n"
        "    size: 1GiB\n"
        "    headroom: 24MiB\n"
        "    standby: 2MiB\n"
        "    partitions:\n"
        "      - {name: train, limit: 33%, growth: preallocate, share: fd}\n"
        "      - {name: 'true', limit: 2048KiB, growth: on-demand}\n"
        "      - {name: \"1.5\", limit: 2097152B}\n"
        "default_tenant: '-'\n"
        "tenants:\n"
        "  - name: vision\n"
        "    match: {user: [root, root], uid: [0, 5], group: root, gid: 3}\n"
        "    quotas:\n"
        "      - {partition: train, limit: 33%, reserve: 10%, max_sessions: 65535, max_blocks: 16777216}\n"
        "      - {partition: 'true', reserve: 0%, "
        "park: {idle: 7s, to: train}}\n"
        "  - name: \"-\"\n"
        "    quotas: [{partition: \"1.5\", reserve: 0, max_sessions: 1, max_blocks: 1}]\n"
        "  - name: nobody\n"
        "    match: {uid: []}\n"
        "    quotas: [{partition: \"1.5\"}]\n";

TEST(all_keys)
{
        struct config *c = parse_good(FULL);

        assert_line("c.yaml", 23, 5, "warning: tenant 'nobody' matches no process");
        ck_assert_uint_eq(count_lines(errors), 1);
        ck_assert_str_eq(c->socket.path, "/tmp/a \"b\\c");
        ck_assert_uint_eq(c->socket.mode, 0660);
        ck_assert_uint_eq(c->socket.group, 7);
        ck_assert_uint_eq(c->admin_socket.mode, 0640);
        ck_assert_uint_eq(c->admin_socket.group, 0);
        ck_assert_uint_eq(c->reclaim_timeout_ms, 3);
        ck_assert_uint_eq(c->quarantine_timeout_ms, 86400000);
        ck_assert_uint_eq(c->max_sessions, 65536);
        ck_assert_uint_eq(c->devices[0].headroom_bytes, 24 * MIB);
        ck_assert_uint_eq(c->devices[0].standby_bytes, 2 * MIB);
        /* 33 % of 1000 MiB are 330; 33 % of that are 108.9; 10 % are 33 */
        ck_assert_uint_eq(c->partitions[0].limit_bytes, 330 * MIB);
        ck_assert_int_eq(c->partitions[0].growth, CONFIG_GROWTH_PREALLOCATE);
        ck_assert_uint_eq(c->partitions[1].limit_bytes, 2 * MIB);
        ck_assert_uint_eq(c->tenants[0].n_uids, 2);
        ck_assert_uint_eq(c->tenants[0].uids[0], 0);
        ck_assert_uint_eq(c->tenants[0].uids[1], 5);
        ck_assert_uint_eq(c->tenants[0].n_gids, 2);
        ck_assert_uint_eq(c->tenants[0].quotas[0].limit_bytes, 108 * MIB);
        ck_assert_uint_eq(c->tenants[0].quotas[0].reserve_bytes, 32 * MIB);
        ck_assert_uint_eq(c->tenants[0].quotas[0].max_blocks, 16777216);
        ck_assert_ptr_null(c->tenants[0].quotas[0].park_to);
        ck_assert_str_eq(c->tenants[0].quotas[1].park_to, "train");
        ck_assert_uint_eq(c->tenants[0].quotas[1].park_idle_ms, 7000);
        ck_assert_int_eq(c->default_tenant, 1);
        ck_assert_str_eq(c->tenants[1].name, "-");
        ck_assert_uint_eq(c->tenants[1].n_uids + c->tenants[1].n_gids, 0);
}

static void assert_same(const struct config *a, const struct config *b)
{
        ck_assert_str_eq(a->socket.path, b->socket.path);
        ck_assert_str_eq(a->admin_socket.path, b->admin_socket.path);
        ck_assert(a->socket.mode == b->socket.mode && a->socket.group == b->socket.group);
        ck_assert(a->admin_socket.mode == b->admin_socket.mode &&
                  a->admin_socket.group == b->admin_socket.group);
        ck_assert(a->reclaim_timeout_ms == b->reclaim_timeout_ms &&
                  a->quarantine_timeout_ms == b->quarantine_timeout_ms);
        ck_assert(a->max_sessions == b->max_sessions && a->default_tenant == b->default_tenant);
        ck_assert(a->n_devices == b->n_devices && a->n_partitions == b->n_partitions &&
                  a->n_tenants == b->n_tenants);
        for (size_t i = 0; i < a->n_devices; i++)
                ck_assert(strcmp(a->devices[i].id, b->devices[i].id) == 0 &&
                          a->devices[i].size_bytes == b->devices[i].size_bytes &&
                          a->devices[i].headroom_bytes == b->devices[i].headroom_bytes &&
                          a->devices[i].standby_bytes == b->devices[i].standby_bytes &&
                          a->devices[i].context_bytes == b->devices[i].context_bytes &&
                          a->devices[i].mps == b->devices[i].mps);
        for (size_t i = 0; i < a->n_partitions; i++)
                ck_assert(strcmp(a->partitions[i].name, b->partitions[i].name) == 0 &&
                          a->partitions[i].limit_bytes == b->partitions[i].limit_bytes &&
                          a->partitions[i].growth == b->partitions[i].growth &&
                          a->partitions[i].share == b->partitions[i].share &&
                          a->partitions[i].clears == b->partitions[i].clears &&
                          a->partitions[i].has_node == b->partitions[i].has_node &&
                          a->partitions[i].node == b->partitions[i].node &&
                          a->partitions[i].is_pinned == b->partitions[i].is_pinned &&
                          a->partitions[i].device == b->partitions[i].device);
        for (size_t i = 0; i < a->n_tenants; i++) {
                const struct config_tenant *s = &a->tenants[i];
                const struct config_tenant *t = &b->tenants[i];

                ck_assert_str_eq(s->name, t->name);
                ck_assert_uint_eq(s->max_sessions, t->max_sessions);
                ck_assert(s->n_uids == t->n_uids && s->n_gids == t->n_gids && s->n_quotas == t->n_quotas);
                for (size_t n = 0; n < s->n_uids; n++)
                        ck_assert_uint_eq(s->uids[n], t->uids[n]);
                for (size_t n = 0; n < s->n_gids; n++)
                        ck_assert_uint_eq(s->gids[n], t->gids[n]);
                for (size_t n = 0; n < s->n_quotas; n++)
                        ck_assert(s->quotas[n].partition == t->quotas[n].partition &&
                                  s->quotas[n].limit_bytes == t->quotas[n].limit_bytes &&
                                  s->quotas[n].reserve_bytes == t->quotas[n].reserve_bytes &&
                                  s->quotas[n].max_sessions == t->quotas[n].max_sessions &&
                                  s->quotas[n].max_blocks == t->quotas[n].max_blocks &&
                                  !s->quotas[n].park_to == !t->quotas[n].park_to &&
                                  s->quotas[n].park_idle_ms == t->quotas[n].park_idle_ms);
        }
}

static struct config *parse_sessions(const char *top, const char *red, const char *blue)
{
        return parse_good(
                print("devices: [{id: host, size: 64MiB, partitions: [{name: p, limit: 32MiB}, "
                      "{name: q, limit: 32MiB}]}]\n%stenants:\n"
                      "  - {name: red, match: {uid: 1}, quotas: [{partition: p%s}, {partition: q}]}\n"
                      "  - {name: blue, match: {uid: 2}, quotas: [{partition: p%s}]}\n",
                      top, red, blue));
}

/* What a tenant is sure of others cannot take. */
TEST(test_sessions_of_tenants)
{
        struct config *c = parse_sessions("", ", max_sessions: 2000", "");

        ck_assert_str_eq(errors, "");
        ck_assert_uint_eq(c->tenants[0].max_sessions, 2000 + 1024);
        ck_assert_uint_eq(c->tenants[1].max_sessions, 1024);
        ck_assert_uint_eq(config_session_share(c, &c->tenants[0]), 2048);
        c = parse_sessions("max_sessions: 101\n", "", ", max_sessions: 7");
        ck_assert_str_eq(errors, "");
        ck_assert_uint_eq(config_session_share(c, &c->tenants[0]), 50);
        ck_assert_uint_eq(config_session_share(c, &c->tenants[1]), 7);
        /* Numbers that are not written promise nothing. */
        c = parse_sessions("max_sessions: 101\n", ", max_sessions: 101", "");
        ck_assert_str_eq(errors, "");
        c = parse_sessions("max_sessions: 101\n", ", max_sessions: 100", ", max_sessions: 2");
        assert_line("c.yaml", 2, 15,
                    "warning: the max_sessions of the quotas sum to 102, and the daemon's max_sessions "
                    "is 101: each tenant is guaranteed at most 50 sessions; lower the former, or raise "
                    "the latter");
        c = parse_sessions("", ", max_sessions: 4000", ", max_sessions: 97");
        assert_line("c.yaml", 1, 1, "warning: the max_sessions of the quotas sum to 4097,");
        c = parse_sessions("max_sessions: 1\n", "", "");
        assert_line("c.yaml", 2, 15,
                    "warning: max_sessions is 1 for 2 tenants: no tenant is guaranteed a session");
        ck_assert_uint_eq(config_session_share(c, &c->tenants[0]), 0);
}

TEST(printed_config_parses_to_the_same)
{
        const char *all[] = { GOOD, FULL, GPUS };
        struct config *a, *b;

        for (size_t i = 0; i < 3; i++) {
                const char *printed = format_twice(all[i], &a, &b);

                assert_same(a, b);
                ck_assert(!strstr(printed, "size:") == (i == 2)); /* that of GPUs is their driver's */
        }
}

TEST(printed_config_has_names)
{
        static const char text[] =
                "admin_socket: {path: /tmp/x.sock, group: root}\n"
                "devices: [{id: host, size: 8MiB, partitions: [{name: p, limit: 100%}]}]\n"
                "tenants:\n"
                "  - {name: a, match: {uid: [7, 0], user: root, gid: 8, group: [root]}, quotas: [{partition: p}]}\n";
        struct config *c, *again;
        const char *out = format_twice(text, &c, &again);

        ck_assert_ptr_nonnull(strstr(out, ", group: \"root\"}\n"));
        ck_assert_ptr_nonnull(
                strstr(out, "match: {user: [\"root\"], group: [\"root\"], uid: [7], gid: [8]}\n"));
        assert_same(c, again);
}

TEST(test_byte_order_mark)
{
        struct config *plain = parse_good(GOOD), *marked;

        marked = parse_good(print("\xef\xbb\xbf%s", GOOD));
        assert_same(plain, marked);
}

TEST(test_strict)
{
        const struct config_machine strict = { .look = look, .is_strict = true };
        const char *text = edit("uid: 1000", "user: nosuchuser1");
        struct config *c = NULL;

        (void)parse_good(text);
        ck_assert_int_eq(parse_for(&strict, text, strlen(text), &c), -EINVAL);
        ck_assert_int_eq(keep_config(parse_for(&strict, GOOD, strlen(GOOD), &c), &c), 0);
}

/* Patterns are printed as written; ids only where the config names some. */
TEST(test_patterns)
{
        static const char text[] =
                "devices: [{id: host, size: 8MiB, partitions: [{name: p, limit: 100%}]}]\n"
                "tenants:\n"
                "  - {name: a, match: {unit: ['sl*.service', \"x\\\\x2d.scope\"], uid: 7, cgroup: /a/*}, quotas: "
                "[{partition: p}]}\n"
                "  - {name: b, match: {cgroup: [/b, '/c/\"d']}, quotas: [{partition: p}]}\n"
                "  - {name: c, match: {uid: [], unit: x.service}, quotas: [{partition: p}]}\n";
        struct config *c, *again;

        (void)format_twice(text, &c, &again);
        ck_assert(c->has_patterns);
        ck_assert(c->tenants[0].names_ids && !c->tenants[1].names_ids && c->tenants[2].names_ids);
        ck_assert_uint_eq(c->tenants[0].n_units, 2);
        ck_assert_str_eq(c->tenants[0].units[1], "x\\x2d.scope");
        ck_assert_str_eq(c->tenants[0].cgroups[0], "/a/*");
        ck_assert_str_eq(c->tenants[1].cgroups[1], "/c/\"d");
        for (size_t i = 0; i < 3; i++) {
                ck_assert(config_match_is_alike(&c->tenants[i], &again->tenants[i]));
                ck_assert(!config_match_is_alike(&c->tenants[i], &c->tenants[(i + 1) % 3]));
        }
}

/* A config may be written before its users are: a warning, not an error. */
TEST(test_unknown_users)
{
        const char *text = edit("match: {uid: 1000}",
                                "match: {user: [alice-not-here, 4711], group: [nogroup-here], uid: 3}");
        struct config *c = parse_good(text);

        assert_line("c.yaml", 10, 20,
                    "warning: user 'alice-not-here' is not known on this machine (getpwnam)");
        assert_line("c.yaml", 10, 36,
                    "warning: user '4711' is not known on this machine (getpwnam) and matches no "
                    "process; for a number write uid: 4711");
        assert_line("c.yaml", 10, 51,
                    "warning: group 'nogroup-here' is not known on this machine (getgrnam)");
        ck_assert_uint_eq(count_lines(errors), 3);
        ck_assert_uint_eq(c->tenants[0].n_uids, 1);
        ck_assert_uint_eq(c->tenants[0].n_gids, 0);
        text = edit("max_sessions: 100", "admin_socket: {group: nogroup-here}");
        c = parse_good(text);
        assert_line("c.yaml", 1, 23,
                    "warning: group 'nogroup-here' is not known on this machine (getgrnam) and the "
                    "socket keeps its group");
        ck_assert_uint_eq(c->admin_socket.group, (gid_t)-1);
}

TEST(size_above_machine_memory)
{
        static const char text[] =
                "devices: [{id: host, size: 4096TiB, partitions: [{name: p, limit: 4MiB}]}]\n"
                "tenants: [{name: a, match: {uid: 1}, quotas: [{partition: p}]}]\n";

        (void)parse_good(text);
        assert_line("c.yaml", 1, 28, "warning: size 4096TiB is more than this machine's memory, ");
}

TEST(size_above_control_group_limit)
{
        static const char text[] =
                "devices: [{id: host, size: 16MiB, partitions: [{name: p, limit: 4MiB}]}]\n"
                "tenants: [{name: a, match: {uid: 1}, quotas: [{partition: p}]}]\n";

        machine.group_limit_bytes = UINT64_C(16) << 20; /* not more */
        (void)parse_good(text);
        ck_assert_ptr_null(strstr(errors, "control group"));
        machine.group_limit_bytes--;
        (void)parse_good(text);
        assert_line(
                "c.yaml", 1, 28,
                "warning: size 16MiB is more than the memory limit of the daemon's control group or a parent "
                "of it, 15MiB");
        machine.group_limit_bytes = 0;
}

TEST(test_default_tenant)
{
        const char *text = edit("    match: {uid: 1000}\n", "");
        struct config *c = parse_good(print("%sdefault_tenant: vision\n", text));

        ck_assert_int_eq(c->default_tenant, 0);
        ck_assert_str_eq(errors, "");
}

/* Only sockets of leases lead to such a tenant. */
TEST(a_tenant_may_match_no_process)
{
        struct config *c, *again;
        const char *text = format_twice(edit("match: {uid: 1000}", "match: {}"), &c, &again);

        ck_assert_ptr_null(strstr(errors, "match"));
        ck_assert_ptr_nonnull(strstr(text, "match: {}\n"));
        ck_assert_uint_eq(c->tenants[0].n_uids + c->tenants[0].n_gids + c->tenants[0].n_units +
                                  c->tenants[0].n_cgroups,
                          0);
        ck_assert(!c->tenants[0].names_ids && config_match_is_alike(&c->tenants[0], &again->tenants[0]));
}

TEST(records_have_one_destination)
{
        struct config *c = parse_good(edit("max_sessions: 100", "records: {file: /var/log/bfcd/r.jsonl}"));
        char path[256] = "records: {file: /", *text;

        ck_assert_str_eq(c->records.file, "/var/log/bfcd/r.jsonl");
        ck_assert_ptr_null(c->records.journal);
        text = config_format(c);
        ck_assert_ptr_nonnull(strstr(text, "\nrecords: {file: \"/var/log/bfcd/r.jsonl\"}\n"));
        free(text);
        c = parse_good(edit("max_sessions: 100", "records: {journal: /j}"));
        ck_assert_str_eq(c->records.journal, "/j");
        ck_assert_ptr_null(c->records.file);
        c = parse_good(edit("max_sessions: 100", "max_sessions: 100"));
        text = config_format(c);
        ck_assert_ptr_null(strstr(text, "records"));
        free(text);
        memset(path + strlen(path), 'a', 191); /* with the slash one too many */
        strcat(path, "}");
        expect_only(edit("max_sessions: 100", path), 1, 17, "has 192 bytes; it has at most 191");
}

/* Without a path of its own it is in the folder of the admin socket. */
TEST(test_monitor_socket)
{
        struct config *c = parse_good(GOOD);

        ck_assert_str_eq(c->monitor_socket.path, "/run/bfcd/monitor.sock");
        ck_assert_uint_eq(c->monitor_socket.mode, 0660);
        ck_assert_uint_eq(c->monitor_socket.group, (gid_t)-1);

        c = parse_good(edit("max_sessions: 100", "admin_socket: {path: /x/y/a}"));
        ck_assert_str_eq(c->monitor_socket.path, "/x/y/monitor.sock");
        c = parse_good(edit("max_sessions: 100", "admin_socket: {path: /a}"));
        ck_assert_str_eq(c->monitor_socket.path, "/monitor.sock");
        c = parse_good(edit("max_sessions: 100", "monitor_socket: {path: /m, mode: \"0600\"}"));
        ck_assert_str_eq(c->monitor_socket.path, "/m");
        ck_assert_uint_eq(c->monitor_socket.mode, 0600);
}

TEST(test_lease_socket)
{
        struct config *c = parse_good(GOOD);

        ck_assert_ptr_null(c->lease_socket.path);
        c = parse_good(edit("max_sessions: 100", "lease_socket: {path: /l}"));
        ck_assert_str_eq(c->lease_socket.path, "/l");
        ck_assert_uint_eq(c->lease_socket.mode, 0600);
}

/* ---- files ---------------------------------------------------------------- */

static void make_folder(void)
{
        strcpy(folder, "/tmp/test-config-XXXXXX");
        ck_assert_ptr_nonnull(mkdtemp(folder));
}

static const char *in_folder(const char *name)
{
        static char path[256];

        snprintf(path, sizeof(path), "%s/%s", folder, name);
        return path;
}

static void put_file(const char *name, const char *text)
{
        FILE *f = fopen(in_folder(name), "w");

        ck_assert_ptr_nonnull(f);
        ck_assert_int_ge(fputs(text, f), 0);
        ck_assert_int_eq(fclose(f), 0);
}

static int load(const char *name, struct config **ret)
{
        FILE *f = open_errors();
        int r = config_load(in_folder(name), &machine, f, ret);

        fclose(f);
        return keep_config(r, ret);
}

static void assert_line_of(const char *name, unsigned int line, unsigned int column, const char *part)
{
        assert_line(in_folder(name), line, column, part);
}

TEST(test_load)
{
        struct config *c = NULL;

        make_folder();
        put_file("bfcd.yaml", GOOD);
        ck_assert_int_eq(load("bfcd.yaml", &c), 0);
        ck_assert_uint_eq(c->n_tenants, 2);
        c = NULL;
        ck_assert_int_eq(load("none.yaml", &c), -ENOENT);
        assert_line_of("none.yaml", 1, 1,
                       "cannot be read: No such file or directory; bfcd.yaml(5) has an example");
        ck_assert_int_eq(load("", &c), -EISDIR);
        ck_assert_int_eq(mkfifo(in_folder("fifo"), 0600), 0);
        ck_assert_int_eq(load("fifo", &c), -ENOTSUP);
        assert_line_of("fifo", 1, 1, "cannot be read: not a regular file");
        ck_assert_ptr_null(c);
}

TEST(load_with_conf_d)
{
        struct config *c = NULL;
        FILE *f;
        int here;

        make_folder();
        ck_assert_int_eq(mkdir(in_folder("conf.d"), 0700), 0);
        put_file("bfcd.yaml", GOOD);
        put_file("conf.d/20-b.yaml",
                 "tenants:\n  - {name: b, match: {uid: 2}, quotas: [{partition: train}]}\n");
        put_file("conf.d/10-c.yaml",
                 "tenants:\n  - {name: c, match: {uid: 3}, quotas: [{partition: infer}]}\n");
        put_file("conf.d/.hidden.yaml", "nonsense");
        put_file("conf.d/README", "nonsense");
        put_file("conf.d/x.yaml~", "nonsense");
        ck_assert_msg(load("bfcd.yaml", &c) == 0, "%s", errors);
        ck_assert_uint_eq(c->n_tenants, 4);
        ck_assert_str_eq(c->tenants[0].name, "vision");
        ck_assert_str_eq(c->tenants[2].name, "c");
        ck_assert_str_eq(c->tenants[3].name, "b");
        /* a path without a folder: conf.d of where we are */
        here = open(".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        ck_assert_int_eq(chdir(folder), 0);
        f = open_errors();
        ck_assert_int_eq(keep_config(config_load("bfcd.yaml", &machine, f, &c), &c), 0);
        fclose(f);
        ck_assert_int_eq(fchdir(here), 0);
        close(here);
        ck_assert_uint_eq(c->n_tenants, 4);
}

TEST(errors_in_conf_d)
{
        struct config *c = NULL;
        const char *text = edit("max_sessions: 100", "max_sessions: x");

        make_folder();
        ck_assert_int_eq(mkdir(in_folder("conf.d"), 0700), 0);
        ck_assert_int_eq(mkdir(in_folder("conf.d/d.yaml"), 0700), 0);
        put_file("bfcd.yaml", text);
        put_file("conf.d/a.yaml", "max_sessions: 1\n");
        put_file("conf.d/b.yaml",
                 "tenants:\n  - {name: vision, match: {uid: 2}, quotas: [{partition: train}]}\n");
        put_file("conf.d/c.yaml", "tenants: [\n");
        put_file("conf.d/e.yaml",
                 "tenants: [{name: e, match: {uid: 2}, quotas: [{partition: train, reserve: 400MiB}]}]\n");
        put_file("conf.d/f.yaml", "");
        put_file("conf.d/g.yaml", "tenants: x\n");
        put_file("conf.d/h.yaml", "- x\n");
        ck_assert_int_eq(load("bfcd.yaml", &c), -EINVAL);
        assert_line_of("bfcd.yaml", 1, 15, "max_sessions 'x'");
        assert_line_of("conf.d/a.yaml", 1, 1,
                       "unknown key 'max_sessions' in a file of conf.d (tenants only); known here: tenants");
        assert_line_of("conf.d/a.yaml", 1, 1, "the key 'tenants' is missing");
        assert_line_of("conf.d/b.yaml", 2, 12, "tenant 'vision' is defined twice, first in ");
        assert_line_of("conf.d/c.yaml", 2, 1, "not YAML: ");
        assert_line_of("conf.d/d.yaml", 1, 1, "cannot be read: Is a directory");
        assert_line_of("conf.d/e.yaml", 1, 75,
                       "the guarantees (reserve) in partition 'train' sum to 528MiB; its limit is 512MiB");
        assert_line_of("conf.d/f.yaml", 1, 1, "the file is empty");
        assert_line_of("conf.d/g.yaml", 1, 10, "tenants must be a list");
        assert_line_of("conf.d/h.yaml", 1, 1, "must be a mapping");
        ck_assert_msg(count_lines(errors) == 10, "%s", errors);
        /* nor are they lost where the main file is no YAML */
        put_file("bfcd.yaml", "a: [\n");
        ck_assert_int_eq(load("bfcd.yaml", &c), -EINVAL);
        assert_line_of("bfcd.yaml", 2, 1, "not YAML: ");
        assert_line_of("conf.d/c.yaml", 2, 1, "not YAML: ");
        assert_line_of("conf.d/g.yaml", 1, 10, "tenants must be a list");
        ck_assert_ptr_null(strstr(errors, "does not exist"));
        ck_assert_ptr_null(c);
}

TEST(conf_d_is_a_file)
{
        struct config *c = NULL;

        make_folder();
        put_file("bfcd.yaml", GOOD);
        put_file("conf.d", "");
        ck_assert_int_eq(load("bfcd.yaml", &c), -EINVAL);
        assert_line_of("conf.d", 1, 1, "cannot be read: Not a directory");
        ck_assert_uint_eq(count_lines(errors), 1);
}

/* No prefix of a config crashes, loops or leaks; nor does any with a byte
 * changed. */
TEST(test_damaged)
{
        struct config *c = NULL;
        char *text = strdup(FULL);

        for (size_t i = 0; i < sizeof(FULL); i++)
                if (parse_for(&machine, FULL, i, &c) == 0)
                        c = config_free(c);
        for (size_t i = 0; i < sizeof(FULL) - 1; i++) {
                static const char bytes[] = "\n\t {}[]:,-&*!%\"'#|>?\x80";

                text[i] = bytes[i % (sizeof(bytes) - 1)];
                if (parse_for(&machine, text, sizeof(FULL) - 1, &c) == 0)
                        c = config_free(c);
                text[i] = FULL[i];
        }
        free(text);
}

/* Leases per control group and of users: in the struct, and back in the text. */
TEST(leases_without_an_operator)
{
        static const char text[] =
                "devices: [{id: host, size: 1GiB, partitions: [{name: a, limit: 1GiB}]}]\n"
                "tenants:\n"
                "  - name: t\n    match: {uid: 1}\n    leases: self\n"
                "    quotas: [{partition: a, limit: 512MiB, per: {cgroup: '/x \"y\"/*', limit: 50%, reserve: 2MiB}}]\n"
                "  - name: u\n    match: {uid: 2}\n    quotas: [{partition: a}]\n";
        struct config *c, *again;
        const char *out = format_twice(text, &c, &again);

        ck_assert_msg(strstr(out, "leases: self\n"), "%s", out);
        ck_assert_msg(strstr(out, "per: {cgroup: \"/x \\\"y\\\"/*\", limit: 256MiB, reserve: 2MiB}"), "%s",
                      out);
        ck_assert_str_eq(again->tenants[0].quotas[0].per_cgroup, "/x \"y\"/*");
        ck_assert_uint_eq(again->tenants[0].quotas[0].per_limit_bytes, UINT64_C(256) << 20);
        ck_assert(again->has_patterns && again->tenants[0].leases_self && !again->tenants[1].leases_self);
        ck_assert_ptr_null(again->tenants[1].quotas[0].per_cgroup);
}

/* Devices and partitions of a next config that lists them in another order. */
TEST(the_order_of_another_config)
{
        static char x[] = "x", y[] = "y", z[] = "z";
        struct config_device was_devices[] = { { .id = x }, { .id = y }, { .id = z } };
        struct config_device devices[] = { { .id = z }, { .id = x }, { .id = y } };
        struct config_partition was_partitions[] = { { .name = x, .device = 0 },
                                                     { .name = y, .device = 1 },
                                                     { .name = z, .device = 2 } };
        struct config_partition partitions[] = { { .name = y, .device = 2 },
                                                 { .name = z, .device = 0 },
                                                 { .name = x, .device = 1 } };
        struct config_quota quotas[] = { { .partition = 0 }, { .partition = 1 }, { .partition = 2 } };
        struct config_tenant tenant = { .quotas = quotas, .n_quotas = 3 };
        const struct config was = {
                .devices = was_devices, .n_devices = 3, .partitions = was_partitions, .n_partitions = 3
        };
        struct config c = { .devices = devices,
                            .n_devices = 3,
                            .partitions = partitions,
                            .n_partitions = 3,
                            .tenants = &tenant,
                            .n_tenants = 1 };

        config_order_as(&c, &was);
        for (size_t i = 0; i < 3; i++) {
                ck_assert_str_eq(devices[i].id, was_devices[i].id);
                ck_assert_str_eq(partitions[i].name, was_partitions[i].name);
                ck_assert_uint_eq(partitions[i].device, i);
        }
        ck_assert_uint_eq(quotas[0].partition, 1);
        ck_assert_ptr_eq(config_quota_in(&tenant, 2), &quotas[1]);
        ck_assert_ptr_null(config_quota_in(&tenant, 3));
}
