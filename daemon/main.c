/* bfcd: options, the order of start and end, and the service manager.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <getopt.h>
#include <grp.h>
#include <inttypes.h>
#include <limits.h>
#include <pwd.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/memory/broker.h"
#include "daemon/config/config.h"
#include "daemon/memory/devices.h"
#include "daemon/base/fd_reserve.h"
#include "daemon/base/log.h"
#include "daemon/net/manager.h"
#include "daemon/record/records.h"
#include "daemon/session/resume.h"
#include "daemon/ledger/store.h"
#include "daemon/session/lease.h"
#include "daemon/session/recall.h"
#include "daemon/net/server.h"
#include "daemon/session/shared.h"
#include "daemon/session/trim.h"
#include "daemon/session/reload.h"
#include "device/host_free.h"
#include "keeper/remote.h"
#include "keeper/start.h"
#include "proto/paths.h"

#define DEFAULT_CONFIG "/etc/bfcd/bfcd.yaml"

#define SERVICE_USER  "bfcd"                          /* User= of the unit */
#define SERVICE_GROUP "0::/system.slice/bfcd.service" /* a check is run in another group than the daemon */

enum { EXIT_USAGE = 2, EXIT_CONFIG = 78 /* EX_CONFIG: the service manager need not try again */ };

struct options {
        const char *config;
        const char *left_by; /* --stop-keepers: the admin socket of the daemon that left them */
        const char *user;    /* NULL: the service's */
        bool check;
        bool has_file; /* --check had a file */
        bool stops_keepers;
        bool strict;
        bool no_memory;
        bool external_keepers;
        enum log_level log_level;
};

static void print_help(FILE *f)
{
        fputs("Usage: bfcd [--config FILE] [--log-level LEVEL] [--external-keepers | --no-memory]\n"
              "       bfcd --check [FILE] [--strict] [--user NAME]\n"
              "       bfcd --stop-keepers [ADMIN-SOCKET]\n"
              "\n"
              "Allocates the memory of this machine's devices to the processes of tenants.\n"
              "\n"
              "  -c, --config FILE    the configuration; default " DEFAULT_CONFIG "\n"
              "  --log-level LEVEL    error, warning, notice, info (default), debug\n"
              "  --external-keepers   another program starts the keepers, and starts them again;\n"
              "                       bfcd waits for them, and leaves them running\n"
              "  --no-memory          devices of sizes only, for plans: GPUs need not be there\n"
              "  --check [FILE]       report every error of the configuration and exit\n"
              "  --strict             with --check: fail on warnings, too\n"
              "  --user NAME          with --check, as root: the user that must be able to read the\n"
              "                       configuration; default " SERVICE_USER ", where that user exists\n"
              "  --stop-keepers [ADMIN-SOCKET]\n"
              "                       end the processes that keep memory for the next bfcd, with all\n"
              "                       of it; the socket is that of the bfcd which left them, by\n"
              "                       default " PATHS_ADMIN_SOCKET "\n"
              "  --version            print the version and exit\n"
              "  -h, --help           print this summary and exit\n",
              f);
}

#define LOG_CLOSE_MS 1000u /* to write the rest of the log */

static int parse_level(const char *word, enum log_level *ret)
{
        static const struct {
                const char *word;
                enum log_level level;
        } levels[] = { { "error", LOG_LEVEL_ERROR },
                       { "warning", LOG_LEVEL_WARNING },
                       { "notice", LOG_LEVEL_NOTICE },
                       { "info", LOG_LEVEL_INFO },
                       { "debug", LOG_LEVEL_DEBUG } };

        for (size_t i = 0; i < sizeof(levels) / sizeof(levels[0]); i++) {
                if (strcmp(word, levels[i].word) == 0) {
                        *ret = levels[i].level;
                        return 0;
                }
        }
        return -EINVAL;
}

/* 0; 1: the version or the help was printed; -EINVAL: reported. */
static int take_option(int option, int argc, char **argv, struct options *ret)
{
        switch (option) {
        case 'c':
                ret->config = optarg;
                return 0;
        case 'k':
                if (!optarg && optind < argc && argv[optind][0] != '-')
                        optarg = argv[optind++];
                ret->config = optarg ? optarg : ret->config;
                ret->has_file |= optarg != NULL;
                ret->check = true;
                return 0;
        case 't':
                ret->strict = true;
                return 0;
        case 'u':
                ret->user = optarg;
                return 0;
        case 'n':
                ret->no_memory = true;
                return 0;
        case 'x':
                ret->external_keepers = true;
                return 0;
        case 'e':
                ret->stops_keepers = true;
                return 0;
        case 'l':
                if (parse_level(optarg, &ret->log_level) == 0)
                        return 0;
                fprintf(stderr, "bfcd: --log-level '%s': must be error, warning, notice, info or debug\n",
                        optarg);
                return -EINVAL;
        case 'v':
                printf("bfcd %s\n", BFCD_VERSION);
                return 1;
        case 'h':
                print_help(stdout);
                return 1;
        default:
                fprintf(stderr, "Try 'bfcd --help'.\n");
                return -EINVAL;
        }
}

static int refuse_twice(const struct option *longs, int option)
{
        while (longs->val != option)
                longs++;
        fprintf(stderr, "bfcd: an option is given twice: --%s; give it once\n", longs->name);
        return -EINVAL;
}

static int parse_options(int argc, char **argv, struct options *ret)
{
        static const struct option longs[] = {
                { "config", required_argument, NULL, 'c' },
                { "check", optional_argument, NULL, 'k' },
                { "strict", no_argument, NULL, 't' },
                { "user", required_argument, NULL, 'u' },
                { "log-level", required_argument, NULL, 'l' },
                { "no-memory", no_argument, NULL, 'n' },
                { "external-keepers", no_argument, NULL, 'x' },
                { "stop-keepers", no_argument, NULL, 'e' },
                { "version", no_argument, NULL, 'v' },
                { "help", no_argument, NULL, 'h' },
                { NULL, 0, NULL, 0 },
        };
        static char name[] = "bfcd"; /* getopt begins its messages with it */
        bool is_given[256] = { false };
        int option, r = 0;

        if (argc > 0)
                argv[0] = name;
        *ret = (struct options){ .config = DEFAULT_CONFIG,
                                 .left_by = PATHS_ADMIN_SOCKET,
                                 .log_level = LOG_LEVEL_INFO };
        while (r == 0 && (option = getopt_long(argc, argv, "c:h", longs, NULL)) != -1) {
                if (option != '?' && is_given[option])
                        return refuse_twice(longs, option);
                is_given[option] = true;
                r = take_option(option, argc, argv, ret);
        }
        if (r != 0)
                return r;
        if (ret->check && !ret->has_file && optind < argc) /* getopt puts what is no option last */
                ret->config = argv[optind++];
        else if (ret->stops_keepers && optind < argc)
                ret->left_by = argv[optind++];
        if (optind < argc) {
                fprintf(stderr, "bfcd: '%s' is not an option; try 'bfcd --help'\n", argv[optind]);
                return -EINVAL;
        }
        if (!ret->check && (ret->strict || ret->user)) {
                fprintf(stderr, "bfcd: --strict and --user are only for --check\n");
                return -EINVAL;
        }
        if (ret->stops_keepers && is_given['c']) {
                fprintf(stderr,
                        "bfcd: --stop-keepers reads no configuration: give it the path of the admin socket "
                        "instead of --config\n");
                return -EINVAL;
        }
        if (ret->external_keepers && (ret->no_memory || ret->stops_keepers)) {
                fprintf(stderr, "bfcd: --external-keepers is not for --no-memory and --stop-keepers\n");
                return -EINVAL;
        }
        if (ret->user && (geteuid() != 0 || !getpwnam(ret->user))) {
                fprintf(stderr, "bfcd: --user '%s': %s\n", ret->user,
                        geteuid() != 0 ? "only root can check as another user" : "there is no such user");
                return -EINVAL;
        }
        return 0;
}

/* Each extent and each session needs fds: sets the limit as high as possible, and warns if it is too low. */
static void raise_fd_limit(const struct config *config)
{
        struct capacity *sums = capacity_new(config);
        uint64_t n_wanted = sums ? capacity_fds(sums, config->max_sessions, NULL, 0) : 0;
        uint64_t n_usable = fd_reserve_set();

        free(sums);
        if (n_usable < n_wanted)
                log_warning("the limit on file descriptors is too low: %" PRIu64 " are available beside "
                            "those reserved for the admin socket, and max_sessions: %" PRIu32
                            " can need %" PRIu64
                            ": raise LimitNOFILE= of the service (or ulimit -n), or lower max_sessions",
                            n_usable, config->max_sessions, n_wanted);
}

static void on_ready(const struct broker *b)
{
        struct record r;

        record_init(&r, RECORD_START);
        record_add_text(&r, "version", BFCD_VERSION, SIZE_MAX);
        record_add_number(&r, "sessions", b->sessions.n_clients);
        record_add_number(&r, "suspended", b->suspended.n);
        record_add_number(&r, "blocks", b->restored.n_blocks);
        record_add_number(&r, "bytes", b->restored.n_bytes);
        records_write(LOG_LEVEL_INFO, &r, "bfcd %s is ready", BFCD_VERSION);
}

static void on_unknown_fd(const char *name)
{
        log_warning("the service manager passed an unknown fd '%s'; the known names are 'client', 'admin', "
                    "'monitor' and 'lease'",
                    name);
}

static const struct upcalls upcalls = {
        .retire = retire_extents,
        .unmaps_soon = retire_unmaps_soon,
        .press = pressure_ask,
        .trim = trim_ask,
        .is_trimming = trim_is_asked,
        .lease_gone = lease_gone,
        .trim_excess = trim_excess,
};

/* All is restored. */
static int begin_serving(struct broker *broker, const struct devices *devices, struct manager *manager,
                         struct store *store)
{
        broker_drop_rest(broker);
        if (!broker->restored.has_unknown)
                devices_drop_rest(devices);
        manager_drop_rest(manager, on_unknown_fd);
        return store_tend(store);
}

/* manager: see server_listen(). *ret_is_left: what is in the store is for the next daemon. */
static int serve(const struct options *from, const struct config *config, struct devices *devices,
                 struct manager *manager, struct store *store, bool *ret_is_left)
{
        struct broker_options options = {
                .config = config,
                .store = store,
                .devices = devices,
                .notify = server_notify,
                .wake = server_wake,
                .open_socket = server_open_socket,
                .close_socket = server_close_socket,
                .upcalls = &upcalls,
        };
        struct server *server = NULL;
        struct broker *broker = NULL;
        char sentence[512] = "out of memory";
        int r;

        raise_fd_limit(config);
        signal(SIGPIPE, SIG_IGN);
        signal(SIGIO, SIG_IGN); /* a lease is broken: proto/memfd.h takes it for a moment only */
        r = server_new(&server);
        if (r < 0) {
                snprintf(sentence, sizeof(sentence), "the event loop could not be set up: %s", strerror(-r));
        } else {
                options.userdata = server;
                r = broker_new(&options, &broker, sentence, sizeof(sentence));
        }
        if (r == 0)
                r = server_listen(server, broker, config, manager, sentence, sizeof(sentence));
        if (r == 0 && server_set_config_path(server, from->config) < 0) {
                snprintf(sentence, sizeof(sentence), "out of memory");
                r = -ENOMEM;
        }
        if (r == 0) {
                r = begin_serving(broker, devices, manager, store);
                if (r == 0)
                        r = server_run(server, on_ready);
                if (r < 0)
                        snprintf(sentence, sizeof(sentence), "the event loop failed: %s", strerror(-r));
        }
        if (r < 0)
                log_error("%s", sentence);
        *ret_is_left = store_keeps(store) && (r == 0 ? broker->is_left : !store_is_new(store));
        /* The broker's workers wake the server's loop, so the server is freed last. */
        if (broker && *ret_is_left) {
                broker_prepare_leave(broker);
                restore_forget(broker);
                broker_leave(broker);
        } else {
                if (broker)
                        shared_end_kept(broker);
                broker_free(broker);
        }
        server_free(server);
        return r;
}

static bool has_predecessor(const char *admin_socket)
{
        return keepers_have(admin_socket, KEEPER_HOST);
}

/* An exit status; errors are printed. A missing GPU is no error in the config: a later start may succeed. */
static int read_config(const struct options *options, struct devices *devices, struct config **ret)
{
        const char *path = options->config;
        uint64_t limit_bytes = host_free_limit(options->check ? SERVICE_GROUP : NULL);
        struct config_machine machine = {
                .look = devices_look,
                .look_pages = options->no_memory ? NULL : devices_look_pages,
                .allow_mps = keeper_device_allow_mps,
                .group_limit_bytes = limit_bytes < UINT64_MAX ? limit_bytes : 0,
                .userdata = devices,
                .serves = !options->check,
                .succeeds = has_predecessor,
                .is_strict = options->strict,
        };
        int r = config_load(path, &machine, stderr, ret);

        if (r == -ENOMEM)
                log_error("%s could not be read: out of memory", path);
        if (r == -EINVAL && !options->check)
                return EXIT_CONFIG;
        return r < 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}

/* The socket may also be the service manager's, so this is a warning. A folder that is not there is made by
 * the unit. */
static bool can_create(const char *user, const char *what, const char *path)
{
        const char *slash = strrchr(path, '/');
        char folder[PATH_MAX];

        snprintf(folder, sizeof(folder), "%.*s", slash > path ? (int)(slash - path) : 1, path);
        if (access(folder, W_OK | X_OK) == 0 || errno != EACCES)
                return true;
        fprintf(stderr, "warning: user '%s' cannot create the %s %s: no write permission for %s\n", user,
                what, path, folder);
        return false;
}

/* In a child that is no longer root. config: NULL where it has errors. */
static int check_here(const struct options *options, const struct config *config, const struct passwd *user)
{
        bool can;
        int r;

        if (initgroups(user->pw_name, user->pw_gid) < 0 || setgid(user->pw_gid) < 0 ||
            setuid(user->pw_uid) < 0) {
                fprintf(stderr, "bfcd: cannot check as user '%s': %s\n", user->pw_name, strerror(errno));
                return EXIT_FAILURE;
        }
        r = config_try_files(options->config, stderr);
        if (r < 0 || !config)
                return r < 0 ? EXIT_FAILURE : EXIT_SUCCESS;
        can = can_create(user->pw_name, "socket", config->socket.path);
        can = can_create(user->pw_name, "socket", config->admin_socket.path) && can;
        can = can_create(user->pw_name, "socket", config->monitor_socket.path) && can;
        if (config->lease_socket.path)
                can = can_create(user->pw_name, "socket", config->lease_socket.path) && can;
        if (config->records.file)
                can = can_create(user->pw_name, "file", config->records.file) && can;
        return can || !options->strict ? EXIT_SUCCESS : EXIT_FAILURE;
}

/* What root can read may be closed to the user that the service runs as. */
static int check_as_user(const struct options *options, const struct config *config)
{
        const struct passwd *user = getpwnam(options->user ? options->user : SERVICE_USER);
        int status = 0;
        pid_t child;

        if (geteuid() != 0 || !user || user->pw_uid == 0)
                return EXIT_SUCCESS;
        child = fork();
        if (child == 0)
                _exit(check_here(options, config, user));
        if (child < 0 || waitpid(child, &status, 0) < 0) {
                fprintf(stderr, "bfcd: cannot check as user '%s': %s\n", user->pw_name, strerror(errno));
                return EXIT_FAILURE;
        }
        return WIFEXITED(status) ? WEXITSTATUS(status) : EXIT_FAILURE;
}

/* The errors of the config were printed; status: what they came to. */
static int check(const struct options *options, struct config *config, int status)
{
        return check_as_user(options, config) == EXIT_SUCCESS ? status : EXIT_FAILURE;
}

static int open_records(const struct config *config)
{
        int r = records_open(config->records.journal, config->records.file);

        if (r < 0)
                log_error("records could not be set up: %s", strerror(-r));
        return r;
}

/* BFCD_KEEP=0: nothing is kept for the next daemon. */
static enum devices_kind find_kind(const struct options *options)
{
        const char *word = getenv("BFCD_KEEP");

        if (options->no_memory)
                return DEVICES_NO_MEMORY;
        if (options->external_keepers && !options->check)
                return DEVICES_EXTERNAL;
        return options->check || (word && strcmp(word, "0") == 0) ? DEVICES_OWN : DEVICES_KEPT;
}

/* NULL: nothing is kept. */
static int open_store(const struct config *config, struct devices *devices, struct store **ret)
{
        char sentence[PATH_MAX + 256] = "";
        struct keepers *keepers;
        int r = devices_keepers(devices, config->admin_socket.path, &keepers, sentence, sizeof(sentence));

        if (r == 0 && keepers)
                r = store_new(keepers, ret, sentence, sizeof(sentence));
        if (r < 0)
                log_error("%s", sentence);
        return r;
}

/* *ret_is_left: see serve(). */
static int run(const struct options *options, struct config *config, struct devices *devices,
               bool *ret_is_left)
{
        struct manager *manager;
        struct store *store = NULL;
        int r = manager_new(&manager);

        if (r < 0) {
                log_error("the connection to the service manager could not be set up: %s", strerror(-r));
                return EXIT_FAILURE;
        }
        r = open_records(config);
        if (r == 0)
                r = open_store(config, devices, &store);
        *ret_is_left = store ? !store_is_new(store) : devices_have_left(devices);
        if (r == 0)
                r = serve(options, config, devices, manager, store, ret_is_left);
        store_free(store);
        manager_free(manager);
        return r < 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}

/* An exit status. */
static int stop_keepers(const struct options *options)
{
        const char *path = options->left_by;
        char sentence[PATH_MAX + 256];
        struct keepers *keepers;
        int n = keepers_open_left(path, &keepers, sentence, sizeof(sentence));

        if (n == -ENOENT) {
                printf("no keepers run beside %s\n", path);
                return EXIT_SUCCESS;
        }
        if (n < 0) {
                fprintf(stderr, "bfcd: %s\n", sentence);
                return EXIT_FAILURE;
        }
        n = keepers_end(keepers, KEEPER_END_MS, NULL, NULL);
        keepers_close(keepers);
        if (n < 0)
                fprintf(stderr, "bfcd: the keepers could not be ended: %s\n", strerror(-n));
        else if (n == 0)
                printf("no keepers run beside %s\n", path);
        else
                printf("%d keeper%s ended\n", n, n == 1 ? "" : "s");
        return n < 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}

int main(int argc, char **argv)
{
        struct config *config = NULL;
        struct devices *devices = NULL;
        struct options options;
        struct keepers *keepers;
        bool is_left = false;
        int status;
        int r;

        r = parse_options(argc, argv, &options);
        if (r != 0)
                return r < 0 ? EXIT_USAGE : EXIT_SUCCESS;
        if (options.stops_keepers)
                return stop_keepers(&options);
        log_open(options.log_level);
        if (options.no_memory)
                log_warning("--no-memory: blocks have sizes only, and a program that uses one is killed by "
                            "SIGSEGV: without this option bfcd serves memory");
        if (devices_new(find_kind(&options), &devices) < 0) {
                log_error("out of memory");
                return EXIT_FAILURE;
        }
        status = read_config(&options, devices, &config);
        is_left = devices_have_left(devices);
        if (options.check)
                status = check(&options, config, status);
        else if (status == EXIT_SUCCESS)
                status = run(&options, config, devices, &is_left);
        config_free(config);
        keepers = devices_take_keepers(devices);
        devices_free(devices);
        if (keepers && !is_left)
                (void)keepers_end(keepers, KEEPER_END_MS, NULL, NULL);
        keepers_close(keepers);
        records_close(LOG_CLOSE_MS);
        log_close(LOG_CLOSE_MS);
        return status;
}
