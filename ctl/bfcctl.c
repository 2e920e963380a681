/* bfcctl: lists tenants, partitions, sessions and blocks of the daemon, and sends admin commands.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The options, and the table of commands (command.h). */
#include <errno.h>
#include <getopt.h>
#include <grp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ctl/amount.h"
#include "ctl/ask.h"
#include "ctl/clock.h"
#include "ctl/command.h"
#include "ctl/help.h"
#include "ctl/table.h"
#include "ctl/text.h"
#include "proto/paths.h"

/* Options that some commands have. */
enum {
        DRY_RUN,
        TENANT,
        OLDER,
        BY,
        PARTITION,
        BYTES,
        TIMEOUT,
        REASON,
        WAIT,
        OPENMETRICS,
        EACH_LEASE,
        SVG,
        LOGDIR,
        INTERVAL,
        COUNT,
        ONCE,
        SINCE,
        UNTIL,
        FILE_OF,
        LIMIT,
        RESERVE,
        CGROUP,
        UNIT,
        PID,
        SOCKET_NAME,
        USER,
        TTL,
        EVICT,
        GRACE,
        LEASE,
        QUIET,
        STRICT,
        NO_PRELOAD,
        TAG,
        TO,
        WATCH,
        SORT,
        COLUMNS,
        N_OWN_OPTIONS
};

static const struct {
        const char *name;
        int has_argument;
        size_t member;             /* of struct invocation */
        const char *wrong, *right; /* the error for a command without this option */
} own_options[N_OWN_OPTIONS] = {
#define OWN(member) offsetof(struct invocation, member)
#define OLDER_OR_BY "--older and --by are not valid for", "they are valid for leaks"
#define MAP_USE     "usage: bfcctl map PARTITION [--svg FILE] [--tenant TENANT]"
#define METRICS_USE "usage: bfcctl metrics [--openmetrics] [--each-lease]"
#define SOME_TRIM                                                                                            \
        "--partition and --bytes are not valid for",                                                         \
                "they are valid for trim, --partition also for park, wake, lease and run"
#define OF_PARK        "--tag and --to are not valid for", "they are valid for park, and --tag for wake"
#define OF_TENSORBOARD "--logdir and --count are not valid for", "they are valid for tensorboard"
#define TOP_USE        "usage: bfcctl top [sessions|tenants|partitions] [--interval TIME] [--once]"
#define HISTORY_USE    "usage: bfcctl history [--since TIME] [--until TIME] [--tenant TENANT] [--file PATH]"
#define RUN_USE                                                                                                \
        "usage: bfcctl run --limit SIZE [--reserve SIZE] [--lease NAME] [--tenant TENANT] [--partition NAME] " \
        "[--wait [TIME]] [--evict] [--grace TIME] [--quiet] [--strict | --no-preload] [--] COMMAND [ARGUMENT...]"
#define OF_LISTS                                                                                             \
        "--sort and --columns are not valid for",                                                            \
                "they are valid for partitions, tenants, sessions, extents, shared, keep, waiting, refusals and lease list"
#define OF_LEASE     "options of lease are not valid for", "they are valid for lease"
#define OF_RUN       "--lease, --quiet, --strict and --no-preload are not valid for", "they are valid for run"
#define SOME_HISTORY "--since, --until and --file are not valid for", HISTORY_USE
        [DRY_RUN] = { "dry-run", no_argument, OWN(dry_run), "--dry-run is not valid for",
                      "usage: bfcctl reload --dry-run [FILE]" },
        [TENANT] = { "tenant", required_argument, OWN(tenant), "--tenant is not valid for",
                     "it is valid for explain, leaks, map, lease, run, wait, tensorboard and history" },
        [OLDER] = { "older", required_argument, OWN(older), OLDER_OR_BY },
        [BY] = { "by", required_argument, OWN(by), OLDER_OR_BY },
        [PARTITION] = { "partition", required_argument, OWN(partition), SOME_TRIM },
        [BYTES] = { "bytes", required_argument, OWN(bytes), SOME_TRIM },
        [TIMEOUT] = { "timeout", required_argument, OWN(timeout), "--timeout is not valid for",
                      "it is valid for trim and wait; for drain use --wait TIME" },
        [REASON] = { "reason", required_argument, OWN(reason), "--reason is not valid for",
                     "usage: bfcctl evict SESSION --reason TEXT" },
        [WAIT] = { "wait", optional_argument, OWN(wait), "--wait is not valid for",
                   "it is valid for drain and run" },
        [OPENMETRICS] = { "openmetrics", no_argument, OWN(metrics.openmetrics),
                          "--openmetrics is not valid for", METRICS_USE },
        [EACH_LEASE] = { "each-lease", no_argument, OWN(metrics.each_lease), "--each-lease is not valid for",
                         METRICS_USE },
        [SVG] = { "svg", required_argument, OWN(svg), "--svg is not valid for", MAP_USE },
        [LOGDIR] = { "logdir", required_argument, OWN(logdir), OF_TENSORBOARD },
        [INTERVAL] = { "interval", required_argument, OWN(interval), "--interval is not valid for",
                       "it is valid for tensorboard and top" },
        [COUNT] = { "count", required_argument, OWN(count), OF_TENSORBOARD },
        [ONCE] = { "once", no_argument, OWN(once), "--once is not valid for", TOP_USE },
        [SINCE] = { "since", required_argument, OWN(since), SOME_HISTORY },
        [UNTIL] = { "until", required_argument, OWN(until), SOME_HISTORY },
        [LIMIT] = { "limit", required_argument, OWN(lease.limit), OF_LEASE },
        [RESERVE] = { "reserve", required_argument, OWN(lease.reserve), OF_LEASE },
        [CGROUP] = { "cgroup", required_argument, OWN(lease.cgroup), OF_LEASE },
        [UNIT] = { "unit", required_argument, OWN(lease.unit), OF_LEASE },
        [PID] = { "pid", required_argument, OWN(lease.pid), OF_LEASE },
        [SOCKET_NAME] = { "socket-name", required_argument, OWN(lease.socket_name), OF_LEASE },
        [USER] = { "user", required_argument, OWN(lease.user), OF_LEASE },
        [TTL] = { "ttl", required_argument, OWN(lease.ttl), OF_LEASE },
        [EVICT] = { "evict", no_argument, OWN(lease.evict), OF_LEASE },
        [GRACE] = { "grace", required_argument, OWN(lease.grace), OF_LEASE },
        [LEASE] = { "lease", required_argument, OWN(lease.name), OF_RUN },
        [QUIET] = { "quiet", no_argument, OWN(run.quiet), OF_RUN },
        [STRICT] = { "strict", no_argument, OWN(run.strict), OF_RUN },
        [NO_PRELOAD] = { "no-preload", no_argument, OWN(run.no_preload), OF_RUN },
        [FILE_OF] = { "file", required_argument, OWN(file), SOME_HISTORY },
        [TAG] = { "tag", required_argument, OWN(tag), OF_PARK },
        [TO] = { "to", required_argument, OWN(to), OF_PARK },
        [WATCH] = { "watch", optional_argument, OWN(view.watch), "--watch is not valid for",
                    "it is valid for commands that show something" },
        [SORT] = { "sort", required_argument, OWN(view.sort), OF_LISTS },
        [COLUMNS] = { "columns", required_argument, OWN(view.columns), OF_LISTS },
#undef OWN
#undef OLDER_OR_BY
#undef SOME_TRIM
#undef OF_PARK
#undef OF_TENSORBOARD
#undef SOME_HISTORY
#undef OF_LEASE
#undef OF_RUN
#undef OF_LISTS
};

#define BIT(option) (UINT64_C(1) << (option))
#define OF_A_LIST   (BIT(WATCH) | BIT(SORT) | BIT(COLUMNS))

static const struct command commands[] = {
        { "status", 0, ANYONE, BFCD__LIST__KIND__STATUS, run_list, BIT(WATCH), NULL },
        { "partitions", 0, ANYONE, BFCD__LIST__KIND__PARTITIONS, run_list, OF_A_LIST, NULL },
        { "tenants", 0, ANYONE, BFCD__LIST__KIND__TENANTS, run_list, OF_A_LIST, NULL },
        { "sessions", 0, ANYONE, BFCD__LIST__KIND__SESSIONS, run_list, OF_A_LIST, NULL },
        { "blocks", 0, ANYONE, 0, run_blocks, BIT(WATCH), NULL },
        { "extents", 0, ANYONE, BFCD__LIST__KIND__EXTENTS, run_list, OF_A_LIST, NULL },
        { "shared", 0, ANYONE, BFCD__LIST__KIND__SHARED, run_list, OF_A_LIST, NULL },
        { "keep", 0, ANYONE, BFCD__LIST__KIND__KEPT, run_list, OF_A_LIST, NULL },
        { "whoami", 0, ANYONE, BFCD__LIST__KIND__WHOAMI, run_list, BIT(WATCH), NULL },
        { "explain", 1, ANYONE, 0, run_explain, BIT(TENANT) | BIT(WATCH),
          "usage: bfcctl explain [PARTITION] [--tenant TENANT]" },
        { "leaks", 0, ANYONE, 0, run_leaks, BIT(TENANT) | BIT(OLDER) | BIT(BY) | BIT(WATCH), NULL },
        { "waiting", 0, ANYONE, BFCD__LIST__KIND__WAITING, run_list, OF_A_LIST, NULL },
        { "refusals", 0, ANYONE, BFCD__LIST__KIND__REFUSALS, run_list, OF_A_LIST, NULL },
        { "grants", 0, ANYONE, BFCD__LIST__KIND__GRANTS, run_grants, BIT(WATCH), NULL },
        { "map", 1, ANYONE, 0, run_map, BIT(TENANT) | BIT(SVG), MAP_USE },
        { "snapshot", 1, ITSELF, 0, run_snapshot, 0, "usage: bfcctl snapshot [FILE]" },
        { "metrics", 0, ANYONE, 0, run_metrics, BIT(OPENMETRICS) | BIT(EACH_LEASE), METRICS_USE },
        { "tensorboard", 0, ITSELF, 0, run_tensorboard,
          BIT(LOGDIR) | BIT(INTERVAL) | BIT(COUNT) | BIT(TENANT),
          "usage: bfcctl tensorboard --logdir DIR [--interval TIME] [--count N] [--tenant TENANT]" },
        { "top", 1, ITSELF, 0, run_top, BIT(INTERVAL) | BIT(ONCE), TOP_USE },
        { "history", 0, ITSELF, 0, run_history, BIT(SINCE) | BIT(UNTIL) | BIT(TENANT) | BIT(FILE_OF),
          HISTORY_USE },
        { "config", 0, SEES_ALL, 0, run_config, 0, NULL },
        { "reload", 1, ADMIN, 0, run_reload, BIT(DRY_RUN), "usage: bfcctl reload [--dry-run [FILE]]" },
        { "reset-peaks", 2, ADMIN, 0, run_reset_peaks, 0, "usage: bfcctl reset-peaks [TENANT [PARTITION]]" },
        { "trim", 1, ADMIN, 0, run_trim, BIT(PARTITION) | BIT(BYTES) | BIT(TIMEOUT),
          "usage: bfcctl trim [TENANT] [--partition NAME] [--bytes N] [--timeout TIME]" },
        { "park", 1, ADMIN, 0, run_park, BIT(PARTITION) | BIT(TAG) | BIT(TO),
          "usage: bfcctl park SESSION|TENANT [--partition NAME] [--tag TAG] [--to PARTITION]" },
        { "wake", 1, ADMIN, 0, run_wake, BIT(PARTITION) | BIT(TAG),
          "usage: bfcctl wake SESSION|TENANT [--partition NAME] [--tag TAG]" },
        { "evict", 1, ADMIN, 0, run_evict, BIT(REASON), "usage: bfcctl evict SESSION [--reason TEXT]" },
        { "forget", 2, ADMIN, 0, run_forget, 0, "usage: bfcctl forget TENANT NAME" },
        { "lease", 2, ITSELF, BFCD__LIST__KIND__LEASES, run_lease, 0,
          "usage: bfcctl lease create|list|set|end; \"bfcctl lease --help\" shows each" },
        { "drain", 1, ADMIN, 0, run_drain, BIT(WAIT), "usage: bfcctl drain DEVICE [--wait [TIME]]" },
        { "run", RUNS_PROGRAM, ITSELF, 0, run_run,
          BIT(TENANT) | BIT(PARTITION) | BIT(WAIT) | BIT(LEASE) | BIT(LIMIT) | BIT(RESERVE) | BIT(EVICT) |
                  BIT(GRACE) | BIT(QUIET) | BIT(STRICT) | BIT(NO_PRELOAD),
          RUN_USE },
        { "events", 0, ANYONE, 0, run_events, 0, NULL },
        { "wait", 3, ANYONE, 0, run_wait, 0,
          "usage: bfcctl wait lease|room; \"bfcctl wait --help\" shows each" },
        { "driver-limits", 0, SEES_ALL, 0, run_driver_limits, BIT(WATCH), NULL },
        { "resume", 1, ADMIN, 0, run_resume, 0, "usage: bfcctl resume DEVICE" },
};

/* Of a command whose first argument is a verb: the arguments with it, all needed, and the options. */
static const struct verb {
        const char *command, *name;
        int n_arguments;
        uint64_t options;
        const char *use;
} verbs[] = {
        { "lease", "create", 2,
          BIT(TENANT) | BIT(PARTITION) | BIT(LIMIT) | BIT(RESERVE) | BIT(CGROUP) | BIT(UNIT) | BIT(PID) |
                  BIT(USER) | BIT(SOCKET_NAME) | BIT(TTL) | BIT(EVICT) | BIT(GRACE),
          "usage: bfcctl lease create NAME [--tenant TENANT] --partition NAME --limit SIZE [--reserve SIZE] "
          "(--cgroup PATH | --unit UNIT | --pid PID | --user USER | --socket-name NAME) [--ttl TIME] [--evict] "
          "[--grace TIME]" },
        { "lease", "list", 1, OF_A_LIST,
          "usage: bfcctl lease list [--watch [TIME]] [--sort COLUMN] [--columns COLUMN,...]" },
        { "lease", "set", 2, BIT(LIMIT) | BIT(RESERVE) | BIT(TTL),
          "usage: bfcctl lease set NAME [--limit SIZE] [--reserve SIZE] [--ttl TIME]" },
        { "lease", "end", 2, BIT(EVICT) | BIT(GRACE),
          "usage: bfcctl lease end NAME [--evict] [--grace TIME]" },
        { "wait", "lease", 2, BIT(TIMEOUT), "usage: bfcctl wait lease NAME [--timeout TIME]" },
        { "wait", "room", 3, BIT(TENANT) | BIT(TIMEOUT),
          "usage: bfcctl wait room PARTITION SIZE [--tenant TENANT] [--timeout TIME]" },
};

#define N_VERBS (sizeof(verbs) / sizeof(verbs[0]))

#define N_COMMANDS (sizeof(commands) / sizeof(commands[0]))

static const struct command *find(const char *name)
{
        for (size_t i = 0; i < N_COMMANDS; i++)
                if (strcmp(commands[i].name, name) == 0)
                        return &commands[i];
        return NULL;
}

/* The socket is one of fewer rights. Says which one is needed, and what this user lacks to open it. */
static int lacks_rights(const struct command *c, const struct ask *a)
{
        const char *variable = c->needs == ADMIN ? "BFC_ADMIN_SOCKET" : "BFC_MONITOR_SOCKET";
        const char *path = getenv(variable), *kind = c->needs == ADMIN ? "admin" : "monitor or admin";
        const struct group *group;
        struct stat st;

        if (!path || !*path)
                path = c->needs == ADMIN ? PATHS_ADMIN_SOCKET : PATHS_MONITOR_SOCKET;
        fprintf(stderr, "bfcctl: \"%s\" needs the %s socket, and %s is the %s socket. ", c->name, kind,
                a->socket,
                a->monitor     ? "monitor"
                : a->scheduler ? "lease"
                               : "client");
        if (access(path, R_OK | W_OK) == 0 || errno != EACCES)
                fprintf(stderr, "Set --socket or %s to it\n", variable);
        else if (stat(path, &st) == 0 && (st.st_mode & S_IWGRP) && st.st_gid != 0 &&
                 (group = getgrgid(st.st_gid)))
                fprintf(stderr,
                        "This user may not open %s: use sudo, or become a member of the group \"%s\"\n", path,
                        group->gr_name);
        else
                fprintf(stderr, "This user may not open %s: use sudo\n", path);
        return EXIT_REFUSED;
}

/* It prints changes, and with --watch it continues when the daemon does not answer. */
static bool is_follower(const struct command *c)
{
        return c->run == run_driver_limits;
}

static int run_once(const struct command *c, const struct invocation *i)
{
        struct ask a;
        int r, status;

        if (c->needs == ITSELF)
                return c->run(NULL, i, c);
        r = ask_open(&a, ask_socket(i->socket), getenv("BFC_TENANT"));
        if (r < 0) {
                status = is_follower(c) ? driver_limits_no_answer(&a, i, r) : command_complain(&a);
        } else if ((c->needs == ADMIN && !a.admin) || (c->needs == SEES_ALL && !a.admin && !a.monitor)) {
                status = lacks_rights(c, &a);
        } else {
                status = c->run(&a, i, c);
        }
        ask_close(&a);
        return status;
}

/* --watch: until it fails. On a terminal each picture replaces the one before. */
static int run(const struct command *c, const struct invocation *i)
{
        int status;

        for (;;) {
                if (i->view.watch && !is_follower(c) && isatty(STDOUT_FILENO))
                        fputs("\033[H\033[J", stdout);
                status = run_once(c, i);
                if (status != EXIT_SUCCESS || !i->view.watch)
                        return status;
                clock_pause((unsigned)i->view.watch_ms);
        }
}

enum { OPTION_VERSION = 256, OPTION_OWN };

static void list_options(struct option longs[])
{
        static const struct option all[] = {
                { "socket", required_argument, NULL, 's' },
                { "json", no_argument, NULL, 'j' },
                { "wide", no_argument, NULL, 'w' },
                { "help", no_argument, NULL, 'h' },
                { "version", no_argument, NULL, OPTION_VERSION },
        };

        memcpy(longs, all, sizeof(all));
        longs += sizeof(all) / sizeof(all[0]);
        for (int i = 0; i < N_OWN_OPTIONS; i++)
                longs[i] = (struct option){ own_options[i].name, own_options[i].has_argument, NULL,
                                            OPTION_OWN + i };
        longs[N_OWN_OPTIONS] = (struct option){ NULL, 0, NULL, 0 };
}

static const char **value_of(struct invocation *i, int own)
{
        return (const char **)((char *)i + own_options[own].member);
}

/* An exit status; -1: continue. */
static int take_own_option(struct invocation *i, int own, int argc, char **argv)
{
        uint64_t ms;
        int64_t *time_ms = own == WAIT ? &i->wait_ms : &i->view.watch_ms;

        /* Neither a device's id nor a partition's name is a number, so the next word may be the time. */
        if ((own == WAIT || own == WATCH) && !optarg && optind < argc && argv[optind][0] >= '0' &&
            argv[optind][0] <= '9')
                optarg = argv[optind++];
        *value_of(i, own) = optarg ? optarg : "";
        if (own != WAIT && own != WATCH)
                return -1;
        if (optarg && (!amount_time(optarg, &ms) || (own == WATCH && ms == 0)))
                return command_usage(own == WAIT ? "wrong value for --wait" : "wrong value for --watch",
                                     optarg, AMOUNT_TIME);
        if (!optarg)
                *time_ms = own == WAIT ? -1 : 2000;
        else
                *time_ms = (int64_t)ms;
        return -1;
}

/* Before the command or behind it. */
static bool has_option(struct invocation *i, int option)
{
        switch (option) {
        case 's':
                return i->socket;
        case 'j':
                return i->json;
        case 'w':
                return table_look.is_wide;
        default:
                return option >= OPTION_OWN && *value_of(i, option - OPTION_OWN);
        }
}

static const char *name_of(const struct option longs[], int option)
{
        while (longs->val != option)
                longs++;
        return longs->name;
}

#define LISTS_THEM "\"bfcctl --help\" lists them"

static int unknown(const char *what, const char *word, const char *before, const char *near, const char *use)
{
        char right[128];

        snprintf(right, sizeof(right), "did you mean \"%s%s\"?", before, near ? near : "");
        return command_usage(what, word, near ? right : use);
}

static int unknown_option(const char *word, const struct option *longs)
{
        char name[64] = "";
        size_t n = 0;

        if (word[0] == '-' && word[1] == '-')
                snprintf(name, sizeof(name), "%.*s", (int)strcspn(word + 2, "="), word + 2);
        while (longs[n].name)
                n++;
        return unknown("unknown option", word, "--", text_nearest(name, &longs->name, n, sizeof(*longs)),
                       LISTS_THEM);
}

/* Options before a command (c is NULL) or after it. run has none after its first argument. *ret: the index of the
 * first argument. */
static int read_options(int argc, char **argv, const struct command *c, struct invocation *i, int *ret)
{
        bool is_all = c && c->max_arguments != RUNS_PROGRAM;
        struct option longs[N_OWN_OPTIONS + 6];
        int option, status;

        list_options(longs);
        optind = 0; /* glibc scans from the first one again */
        while ((option = getopt_long(argc, argv, is_all ? ":s:jwh" : "+:s:jwh", longs, NULL)) >= 0) {
                if (has_option(i, option))
                        return command_usage("an option is given twice:", name_of(longs, option),
                                             "give it once");
                switch (option) {
                case 's':
                        i->socket = optarg;
                        break;
                case 'j':
                        i->json = true;
                        break;
                case 'w':
                        table_look.is_wide = true;
                        break;
                case 'h':
                        c ? help_print_command(stdout, c->name) : help_print(stdout);
                        return command_finish(0);
                case OPTION_VERSION:
                        puts("bfcctl " BFCD_VERSION);
                        return command_finish(0);
                case ':':
                        return command_usage("no value for", argv[optind - 1],
                                             "this option needs a value, as in --socket PATH");
                case '?':
                        return unknown_option(argv[optind - 1], longs);
                default:
                        status = take_own_option(i, option - OPTION_OWN, argc, argv);
                        if (status >= 0)
                                return status;
                }
        }
        if (i->socket && !*i->socket)
                return command_usage("--socket is empty", NULL,
                                     "it takes a path, as in --socket " PATHS_CLIENT_SOCKET);
        *ret = optind;
        return -1;
}

/* The verbs of a command are neighbours in the table. */
static size_t find_verbs(const struct command *c, const struct verb **ret)
{
        size_t first = 0, n = 0;

        while (first < N_VERBS && strcmp(verbs[first].command, c->name) != 0)
                first++;
        while (first + n < N_VERBS && strcmp(verbs[first + n].command, c->name) == 0)
                n++;
        *ret = verbs + first;
        return n;
}

/* An exit status; -1: the verb is right, or the command has none. *ret: the verb, or NULL. */
static int read_verb(const struct command *c, const struct invocation *i, const struct verb **ret)
{
        const struct verb *all;
        size_t n = find_verbs(c, &all);
        char before[32];

        *ret = NULL;
        if (n == 0)
                return -1;
        if (i->n_arguments == 0)
                return command_usage("an argument is missing after", c->name, c->use);
        for (size_t k = 0; k < n && !*ret; k++)
                if (strcmp(all[k].name, i->arguments[0]) == 0)
                        *ret = &all[k];
        if (*ret)
                return -1;
        snprintf(before, sizeof(before), "bfcctl %s ", c->name);
        return unknown("unknown argument", i->arguments[0], before,
                       text_nearest(i->arguments[0], &all->name, n, sizeof(*all)), c->use);
}

/* The options and arguments after the command. An exit status; -1: continue. */
static int read_arguments(const struct command *c, int argc, char **argv, struct invocation *i)
{
        int first, max, status = read_options(argc, argv, c, i, &first);
        const struct verb *verb;
        char what[64];

        if (status >= 0)
                return status;
        i->arguments = argv + first;
        i->n_arguments = argc - first;
        status = read_verb(c, i, &verb);
        if (status >= 0)
                return status;
        i->use = verb ? verb->use : c->use ? c->use : "this command takes no arguments";
        for (int own = 0; own < N_OWN_OPTIONS; own++) {
                if (!*value_of(i, own) || (verb ? verb->options : c->options) & BIT(own))
                        continue;
                if (!verb)
                        return command_usage(own_options[own].wrong, c->name, own_options[own].right);
                snprintf(what, sizeof(what), "--%s is not valid for %s", own_options[own].name, c->name);
                return command_usage(what, verb->name, verb->use);
        }
        max = verb ? verb->n_arguments : c->max_arguments;
        if (i->n_arguments > max)
                return command_usage("too many arguments from", i->arguments[max], i->use);
        if (verb && i->n_arguments < max)
                return command_usage("an argument is missing after", i->arguments[i->n_arguments - 1],
                                     i->use);
        return -1;
}

int main(int argc, char **argv)
{
        struct invocation i = { 0 };
        const struct command *c;
        int status, first;

        table_look.is_cut = isatty(STDOUT_FILENO);
        table_look.has_colour = table_may_colour(STDOUT_FILENO);
        status = read_options(argc, argv, NULL, &i, &first);
        if (status >= 0)
                return status;
        if (first == argc)
                return command_usage("no command", NULL,
                                     "\"bfcctl --help\" lists them; try \"bfcctl status\"");
        c = find(argv[first]);
        if (!c)
                return unknown("unknown command", argv[first], "bfcctl ",
                               text_nearest(argv[first], &commands->name, N_COMMANDS, sizeof(*commands)),
                               LISTS_THEM);
        status = read_arguments(c, argc - first, argv + first, &i);
        if (status > 0 && c->max_arguments == RUNS_PROGRAM)
                status = EXIT_RUN_FAILED;
        return status >= 0 ? status : run(c, &i);
}
