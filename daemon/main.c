/* bfcd: options, the order of start and end, and the service manager's word.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "daemon/broker.h"
#include "daemon/config.h"
#include "daemon/devices.h"
#include "daemon/log.h"
#include "daemon/manager.h"
#include "daemon/restore.h"
#include "daemon/retire.h"
#include "daemon/server.h"
#include "daemon/trim.h"

#define DEFAULT_CONFIG "/etc/bfcd/bfcd.yaml"

#define RETRY_S 1u

enum { EXIT_USAGE = 2, EXIT_CONFIG = 78 /* EX_CONFIG: the service manager need not try again */ };

struct options {
        const char *config;
        const char *socket;
        const char *admin_socket;
        const char *check;
        enum log_level log_level;
};

static void print_help(FILE *f)
{
        fprintf(f, "Usage: bfcd [--config FILE] [--socket PATH] [--admin-socket PATH] [--log-level LEVEL]\n"
                   "       bfcd --check FILE\n"
                   "\n"
                   "Owns the memory of this machine's devices and hands out blocks of it.\n"
                   "\n"
                   "  --config FILE        the configuration; default " DEFAULT_CONFIG "\n"
                   "  --socket PATH        where clients come in, instead of the configuration's\n"
                   "  --admin-socket PATH  where operators come in\n"
                   "  --log-level LEVEL    error, warning, notice, info (default), debug\n"
                   "  --check FILE         report every error of a configuration and end\n"
                   "  --version, --help\n");
}

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

/* 0; 1: printed what was asked for, end well; -EINVAL: said why. */
static int parse_options(int argc, char **argv, struct options *ret)
{
        static const struct option longs[] = {
                { "config", required_argument, NULL, 'c' },
                { "socket", required_argument, NULL, 's' },
                { "admin-socket", required_argument, NULL, 'a' },
                { "check", required_argument, NULL, 'k' },
                { "log-level", required_argument, NULL, 'l' },
                { "version", no_argument, NULL, 'v' },
                { "help", no_argument, NULL, 'h' },
                { NULL, 0, NULL, 0 },
        };
        static char name[] = "bfcd"; /* getopt begins its messages with it */
        int o;

        if (argc > 0)
                argv[0] = name;
        *ret = (struct options){ .config = DEFAULT_CONFIG, .log_level = LOG_LEVEL_INFO };
        while ((o = getopt_long(argc, argv, "", longs, NULL)) != -1) {
                switch (o) {
                case 'c':
                        ret->config = optarg;
                        break;
                case 's':
                        ret->socket = optarg;
                        break;
                case 'a':
                        ret->admin_socket = optarg;
                        break;
                case 'k':
                        ret->check = optarg;
                        break;
                case 'l':
                        if (parse_level(optarg, &ret->log_level) < 0) {
                                fprintf(stderr,
                                        "bfcd: --log-level '%s': must be error, warning, notice, info or debug\n",
                                        optarg);
                                return -EINVAL;
                        }
                        break;
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
        if (optind < argc) {
                fprintf(stderr, "bfcd: '%s' is not an option; try 'bfcd --help'\n", argv[optind]);
                return -EINVAL;
        }
        return 0;
}

/* Each extent and each session takes fds: as many as we may have, and a word if those are few. */
static void raise_fd_limit(const struct config *config)
{
        uint64_t n_wanted = broker_wants_fds(config);
        struct rlimit limit;

        if (getrlimit(RLIMIT_NOFILE, &limit) < 0)
                return;
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
        if (limit.rlim_max < n_wanted)
                log_warning("the process may have %" PRIu64 " fds, and max_sessions: %" PRIu32
                            " with its extents may take %" PRIu64
                            ": raise LimitNOFILE= of the service (or ulimit -n), or lower max_sessions",
                            (uint64_t)limit.rlim_max, config->max_sessions, n_wanted);
}

static void on_ready(void)
{
        log_info("bfcd %s serves", BFCD_VERSION);
}

static void on_unknown_fd(const char *name)
{
        log_warning("the service manager hands over an fd '%s', which is none of 'client' and 'admin'", name);
}

/* manager: see server_listen(). */
static int serve(const struct options *from, const struct config *config, struct devices *devices,
                 struct manager *manager, struct store *store)
{
        const struct reload_source source = { from->config, from->socket, from->admin_socket };
        struct broker_options options = {
                .config = config,
                .store = store,
                .devices = devices,
                .notify = server_notify,
                .wake = server_wake,
                .retire = retire_extents,
                .lets_go = retire_lets_go,
                .trim = trim_ask,
                .want_back = trim_want_back,
        };
        struct server *server = NULL;
        struct broker *broker = NULL;
        char sentence[512] = "out of memory";
        int r;

        raise_fd_limit(config);
        signal(SIGPIPE, SIG_IGN);
        r = server_new(&server);
        if (r < 0) {
                snprintf(sentence, sizeof(sentence), "the event loop could not be set up: %s", strerror(-r));
        } else {
                options.userdata = server;
                r = broker_new(&options, &broker, sentence, sizeof(sentence));
        }
        if (r == 0)
                r = server_listen(server, broker, config, manager, sentence, sizeof(sentence));
        if (r == 0 && server_set_source(server, &source) < 0) {
                snprintf(sentence, sizeof(sentence), "out of memory");
                r = -ENOMEM;
        }
        if (r == 0) {
                (void)store_drop_rest(store);
                manager_drop_rest(manager, on_unknown_fd);
                r = server_run(server, on_ready);
                if (r < 0)
                        snprintf(sentence, sizeof(sentence), "the event loop could not go on: %s",
                                 strerror(-r));
        }
        if (r < 0)
                log_error("%s", sentence);
        /* The broker's workers wake the server's loop: it goes last. */
        if (broker && store_keeps(store)) {
                broker_prepare_leave(broker);
                session_forget_all(broker);
                broker_leave(broker);
        } else {
                broker_free(broker);
        }
        server_free(server);
        return r;
}

/* An exit status; whatever failed has been said. A GPU that is not there is no
 * error in the config: trying again may help. */
static int read_config(const struct options *options, struct devices *devices, struct config **ret)
{
        const char *path = options->check ? options->check : options->config;
        struct config_machine machine = {
                .look = devices_look,
                .userdata = devices,
                .serves = !options->check,
                .succeeds = store_brings_ledger(),
        };
        int r = config_load(path, &machine, stderr, ret);

        if (r == -ENOMEM)
                log_error("%s could not be read: out of memory", path);
        if (r == -EINVAL && !options->check)
                return EXIT_CONFIG;
        return r < 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}

static int run(const struct options *options, struct config *config, struct devices *devices)
{
        int r = config_set_sockets(config, options->socket, options->admin_socket, stderr);
        struct manager *manager;
        struct store *store = NULL;

        if (r == -EINVAL)
                return EXIT_USAGE;
        if (r < 0) {
                log_error("the sockets' paths could not be kept: %s", strerror(-r));
                return EXIT_FAILURE;
        }
        r = manager_new(&manager);
        if (r < 0) {
                log_error("the service manager could not be listened to: %s", strerror(-r));
                return EXIT_FAILURE;
        }
        r = store_new(manager, &store);
        if (r == 0)
                r = serve(options, config, devices, manager, store);
        else
                log_error("what the service manager keeps could not be looked at: %s", strerror(-r));
        store_free(store);
        manager_free(manager);
        return r < 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}

/* What jobs have is kept by the service manager as long as it tries again, so it is to do that
 * whatever the error is; not all the time. */
static int fail_to_succeed(void)
{
        log_error("the memory of the daemon before is kept for as long as the service manager tries again");
        sleep(RETRY_S);
        return EXIT_FAILURE;
}

int main(int argc, char **argv)
{
        struct config *config = NULL;
        struct devices *devices = NULL;
        struct options options;
        bool succeeds;
        int status;
        int r;

        r = parse_options(argc, argv, &options);
        if (r != 0)
                return r < 0 ? EXIT_USAGE : EXIT_SUCCESS;
        log_open(options.log_level);
        succeeds = store_brings_ledger();

        if (devices_new(&devices) < 0) {
                log_error("out of memory");
                return EXIT_FAILURE;
        }
        status = read_config(&options, devices, &config);
        if (status == EXIT_SUCCESS && !options.check)
                status = run(&options, config, devices);
        config_free(config);
        devices_free(devices);
        return status != EXIT_SUCCESS && succeeds ? fail_to_succeed() : status;
}
