/* bfc-exporter: the daemon's state over HTTP, for Prometheus and for programs.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The daemon speaks no HTTP. This program runs as a user of its own that may open the monitor socket and nothing else of
 * the daemon. It has neither encryption nor authentication, so it listens on loopback addresses and Unix sockets
 * only, unless it serves nothing but metrics. */
#include <arpa/inet.h>
#include <errno.h>
#include <getopt.h>
#include <netdb.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "ctl/serve.h"
#include "proto/paths.h"

enum { EXIT_USAGE = 2 };

#define DEFAULT_LISTEN "127.0.0.1:9477"
#define BACKLOG        64

static void print_help(FILE *out)
{
        fputs("Usage: bfc-exporter [--listen ADDRESS:PORT | --listen PATH] [--metrics-only] [--socket PATH]\n"
              "\n"
              "Serves the state of bfcd over HTTP: /metrics for Prometheus, and /api/status, partitions,\n"
              "tenants, sessions, keep, grants, waiting, leases, explain and hour (the last hour, sampled) as\n"
              "JSON, and /api/map.svg?partition=NAME. / is a page that shows them.\n"
              "\n"
              "  -l, --listen WHERE  a loopback address and a port, or the path of a Unix socket;\n"
              "                      default " DEFAULT_LISTEN "\n"
              "  -m, --metrics-only  serve /metrics only; the address may be any\n"
              "  -s, --socket PATH   bfcd's monitor socket; default $BFC_MONITOR_SOCKET, else\n"
              "                      " PATHS_MONITOR_SOCKET "\n"
              "  -h, --help          print this\n"
              "      --version       print the version\n",
              out);
}

/* ---- listening ------------------------------------------------------------------- */

static int fail(const char *where, const char *why)
{
        fprintf(stderr, "bfc-exporter: cannot listen on %s: %s\n", where, why);
        return -EINVAL;
}

static bool is_loopback(const struct sockaddr *address)
{
        if (address->sa_family == AF_INET)
                return ntohl(((const struct sockaddr_in *)(const void *)address)->sin_addr.s_addr) >> 24 ==
                       127;
        return address->sa_family == AF_INET6 &&
               IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)(const void *)address)->sin6_addr);
}

static int open_socket(const char *where, const struct sockaddr *address, socklen_t n_address)
{
        int fd = socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), on = 1;

        if (fd < 0)
                return fail(where, strerror(errno));
        (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
        if (bind(fd, address, n_address) < 0 || listen(fd, BACKLOG) < 0) {
                (void)fail(where, strerror(errno));
                close(fd);
                return -EINVAL;
        }
        return fd;
}

/* Removes the socket of a process that has ended. */
static void remove_stale_socket(const struct sockaddr_un *address)
{
        struct stat st;
        int fd;

        if (lstat(address->sun_path, &st) < 0 || !S_ISSOCK(st.st_mode))
                return;
        fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (fd < 0)
                return;
        if (connect(fd, (const struct sockaddr *)address, sizeof(*address)) < 0 && errno == ECONNREFUSED)
                (void)unlink(address->sun_path);
        close(fd);
}

static int listen_on_path(const char *path)
{
        struct sockaddr_un address = { .sun_family = AF_UNIX };
        mode_t before;
        int fd;

        if (strlen(path) >= sizeof(address.sun_path))
                return fail(path, "the path is too long for a socket");
        strcpy(address.sun_path, path);
        remove_stale_socket(&address);
        before = umask(0117); /* for its group */
        fd = open_socket(path, (const struct sockaddr *)&address, sizeof(address));
        umask(before);
        return fd;
}

/* "127.0.0.1:80", "[::1]:80". any: also one that is no loopback address. */
static int listen_on_address(const char *where, bool any)
{
        const struct addrinfo hints = { .ai_flags = AI_NUMERICHOST | AI_NUMERICSERV,
                                        .ai_socktype = SOCK_STREAM };
        const char *colon = strrchr(where, ':');
        struct addrinfo *found = NULL;
        char host[64];
        int fd;

        if (!colon || colon == where || (size_t)(colon - where) >= sizeof(host))
                return fail(where, "it must be ADDRESS:PORT, or the absolute path of a socket");
        snprintf(host, sizeof(host), "%.*s", (int)(colon - where), where);
        if (host[0] == '[' && host[strlen(host) - 1] == ']') {
                host[strlen(host) - 1] = '\0';
                memmove(host, host + 1, strlen(host));
        }
        if (getaddrinfo(host, colon + 1, &hints, &found) != 0)
                return fail(where, "it is not a numeric address with a port");
        if (any || is_loopback(found->ai_addr))
                fd = open_socket(where, found->ai_addr, found->ai_addrlen);
        else
                fd = fail(where, "it is not a loopback address, and there is neither encryption nor "
                                 "authentication; use a reverse proxy, or --metrics-only");
        freeaddrinfo(found);
        return fd;
}

/* ---- the program ------------------------------------------------------------------- */

struct options {
        const char *listen, *socket;
        bool metrics_only;
};

/* An exit status; -1: go on. */
static int read_options(int argc, char **argv, struct options *o)
{
        static const struct option longs[] = {
                { "listen", required_argument, NULL, 'l' }, { "metrics-only", no_argument, NULL, 'm' },
                { "socket", required_argument, NULL, 's' }, { "help", no_argument, NULL, 'h' },
                { "version", no_argument, NULL, 'v' },      { NULL, 0, NULL, 0 },
        };
        bool is_given[256] = { false };
        int option;

        while ((option = getopt_long(argc, argv, "l:ms:h", longs, NULL)) >= 0) {
                if (option != '?' && is_given[option]) {
                        fprintf(stderr, "bfc-exporter: an option is given twice: --%s; give it once\n",
                                option == 'l'   ? "listen"
                                : option == 'm' ? "metrics-only"
                                                : "socket");
                        return EXIT_USAGE;
                }
                is_given[option] = true;
                switch (option) {
                case 'l':
                        o->listen = optarg;
                        break;
                case 'm':
                        o->metrics_only = true;
                        break;
                case 's':
                        o->socket = optarg;
                        break;
                case 'h':
                        print_help(stdout);
                        return EXIT_SUCCESS;
                case 'v':
                        puts("bfc-exporter " BFCD_VERSION);
                        return EXIT_SUCCESS;
                default:
                        fputs("Try 'bfc-exporter --help'.\n", stderr);
                        return EXIT_USAGE;
                }
        }
        if (optind < argc) {
                fprintf(stderr, "bfc-exporter: '%s' is not an option; try 'bfc-exporter --help'\n",
                        argv[optind]);
                return EXIT_USAGE;
        }
        return -1;
}

/* Serves until a signal. */
static int run(const struct options *o, int fd)
{
        struct serve *s;
        const struct timespec tick = { .tv_sec = 1 };
        sigset_t endings;

        sigemptyset(&endings);
        sigaddset(&endings, SIGTERM);
        sigaddset(&endings, SIGINT);
        sigprocmask(SIG_BLOCK, &endings, NULL); /* before the thread is made */
        signal(SIGPIPE, SIG_IGN);
        if (serve_start(fd, o->socket, o->metrics_only, &s) < 0) {
                (void)fail(o->listen, "the HTTP server could not be started");
                close(fd);
                return EXIT_FAILURE;
        }
        fprintf(stderr, "bfc-exporter: listening on %s\n", o->listen);
        do
                serve_sample(s);
        while (sigtimedwait(&endings, NULL, &tick) < 0);
        serve_stop(s);
        return EXIT_SUCCESS;
}

int main(int argc, char **argv)
{
        struct options o = { .listen = DEFAULT_LISTEN, .socket = getenv("BFC_MONITOR_SOCKET") };
        int status = read_options(argc, argv, &o), fd;

        if (status >= 0)
                return status;
        if (!o.socket || !*o.socket)
                o.socket = PATHS_MONITOR_SOCKET;
        fd = o.listen[0] == '/' ? listen_on_path(o.listen) : listen_on_address(o.listen, o.metrics_only);
        if (fd < 0)
                return EXIT_FAILURE;
        status = run(&o, fd);
        if (o.listen[0] == '/')
                (void)unlink(o.listen);
        return status;
}
