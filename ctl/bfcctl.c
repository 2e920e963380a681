/* bfcctl: what the daemon's tenants, partitions, sessions and blocks are doing,
 * and the few commands with which an administrator acts on them.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Options and dispatch. One command, one conversation, one document on standard
 * output or one sentence on standard error. Nothing is printed on standard
 * output until the whole answer is there, so that what a program reads is
 * never half of it. */
#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ctl/ask.h"
#include "ctl/drain.h"
#include "ctl/explain.h"
#include "ctl/leaks.h"
#include "ctl/reload.h"
#include "ctl/show.h"
#include "ctl/text.h"

enum {
        EXIT_REFUSED = 1,
        EXIT_USAGE = 2,
};

struct invocation {
        const char *socket; /* NULL: by ask_socket()'s rule */
        bool json;
        bool dry_run;
        const char *tenant; /* NULL: not given; so the next two */
        const char *older;
        const char *by;
        const char *partition; /* the same, and the next */
        const char *bytes;
        bool wait;
        int64_t wait_ms;  /* -1: as long as it takes */
        char **arguments; /* after the command */
        int n_arguments;
};

struct command {
        const char *name;
        int max_arguments;
        bool admin_only;
        Bfcd__List__Kind kind;
        int (*run)(struct ask *a, const struct invocation *i, const struct command *c);
};

static int usage(const char *what, const char *which, const char *right);
static const char *right_use(const struct command *c);

static int complain(const struct ask *a)
{
        fprintf(stderr, "bfcctl: %s\n", a->error);
        return EXIT_REFUSED;
}

/* What happened to our own output. */
static int finish(int r)
{
        if (r == 0 && fflush(stdout) == 0)
                return EXIT_SUCCESS;
        fprintf(stderr, "bfcctl: %s.\n",
                r == -ENOMEM ? "Out of memory" : "Standard output cannot be written");
        return EXIT_REFUSED;
}

static int run_list(struct ask *a, const struct invocation *i, const struct command *c)
{
        struct list *l;
        int r;

        if (ask_list(a, c->kind, &l) < 0)
                return complain(a);
        list_leave_out(l, a->session_id);
        r = i->json ? show_print(stdout, show_json(c->kind, l)) : show_table(stdout, c->kind, l);
        list_free(l);
        return finish(r);
}

static int run_config(struct ask *a, const struct invocation *i, const struct command *c)
{
        char *text;
        int r = 0;

        (void)c;
        if (ask_config(a, &text) < 0)
                return complain(a);
        if (i->json) {
                r = show_print(stdout, show_document("config", show_string(text)));
        } else {
                /* YAML itself has no other control characters. */
                for (const char *s = text; *s; s++)
                        putchar((unsigned char)*s >= ' ' || *s == '\n' || *s == '\t' ? *s : '?');
        }
        free(text);
        return finish(r);
}

static int run_reset_peaks(struct ask *a, const struct invocation *i, const struct command *c)
{
        const char *tenant = i->n_arguments > 0 ? i->arguments[0] : "";
        const char *partition = i->n_arguments > 1 ? i->arguments[1] : "";

        (void)c;
        if (ask_reset_peaks(a, tenant, partition) < 0)
                return complain(a);
        if (i->json)
                return finish(show_print(
                        stdout,
                        show_document("reset_peaks", json_pack("{s:o, s:o}", "tenant", show_string(tenant),
                                                               "partition", show_string(partition)))));
        printf("The peaks of %s%s in %s%s were set to what is in use now.\n",
               *tenant ? "tenant " : "all tenants", tenant, *partition ? "partition " : "all partitions",
               partition);
        return finish(0);
}

static int run_reload(struct ask *a, const struct invocation *i, const struct command *c)
{
        Bfcd__Reply *reply;
        bool failed;
        int r;

        (void)c;
        if (ask_reload(a, i->dry_run, &reply) < 0)
                return complain(a);
        failed = reply->reload->n_errors > 0;
        r = i->json ? reload_show_json(stdout, reply->reload, i->dry_run)
                    : reload_show(stdout, stderr, reply->reload, i->dry_run);
        bfcd__reply__free_unpacked(reply, NULL);
        r = finish(r);
        return failed ? EXIT_REFUSED : r;
}

static uint64_t now_ms(void)
{
        struct timespec now;

        clock_gettime(CLOCK_REALTIME, &now);
        return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

static int run_explain(struct ask *a, const struct invocation *i, const struct command *c)
{
        struct list *l;
        int r;

        (void)c;
        if (ask_explain(a, i->n_arguments > 0 ? i->arguments[0] : "", i->tenant ? i->tenant : "", &l) < 0)
                return complain(a);
        r = i->json ? show_print(stdout, explain_json(l)) : explain_print(stdout, l, now_ms());
        list_free(l);
        return finish(r);
}

static int add_leak(void *userdata, const Bfcd__BlockRow *row)
{
        return leaks_add(userdata, row);
}

/* A name that nobody has would give an empty list, which looks like good news. */
static int must_be_tenant(struct ask *a, const char *name)
{
        struct list *l;
        bool found = false;

        if (ask_list(a, BFCD__LIST__KIND__TENANTS, &l) < 0)
                return complain(a);
        for (size_t i = 0; i < l->n_tenants && !found; i++)
                found = strcmp(l->tenants[i]->tenant, name) == 0;
        list_free(l);
        if (found)
                return EXIT_SUCCESS;
        snprintf(a->error, sizeof(a->error), "No such tenant, or it is not this user's.");
        return complain(a);
}

/* Sessions are read behind the blocks: whose block was seen is most likely still there. */
static int print_leaks(struct ask *a, const struct invocation *i, struct leaks *k)
{
        struct list *sessions;
        int r;

        if (i->tenant && (r = must_be_tenant(a, i->tenant)) != EXIT_SUCCESS)
                return r;
        if (ask_blocks(a, add_leak, k) < 0 || ask_list(a, BFCD__LIST__KIND__SESSIONS, &sessions) < 0)
                return complain(a);
        r = i->json ? show_print(stdout, leaks_json(k, sessions)) : leaks_print(stdout, k, sessions);
        list_free(sessions);
        return finish(r);
}

static int run_leaks(struct ask *a, const struct invocation *i, const struct command *c)
{
        struct leaks_options options = { .by = LEAKS_BY_TAG, .tenant = i->tenant };
        struct leaks *k;
        int status;

        (void)c;
        if (i->older && leaks_parse_age(i->older, &options.older_ms) < 0)
                return usage("no age", i->older, "it is a number and ms, s, m, h or d, as in --older 10m");
        if (i->by && leaks_parse_by(i->by, &options.by) < 0)
                return usage("blocks cannot be summed up by", i->by, "--by takes tag, session or block");
        if (leaks_new(&options, &k) < 0)
                return finish(-ENOMEM);
        status = print_leaks(a, i, k);
        leaks_free(k);
        return status;
}

/* "123", "512KiB", "3MiB", "2GiB". False: none of these, or too much. */
static bool read_size(const char *text, uint64_t *ret)
{
        static const char *const units[] = { "", "KiB", "MiB", "GiB", "TiB" };
        char *end;
        uint64_t n;

        errno = 0;
        n = strtoull(text, &end, 10);
        if (end == text || errno != 0 || text[0] < '0' || text[0] > '9')
                return false;
        for (unsigned i = 0; i < sizeof(units) / sizeof(units[0]); i++) {
                if (strcmp(end, units[i]) != 0)
                        continue;
                *ret = n << 10 * i;
                return *ret >> 10 * i == n;
        }
        return false;
}

/* What sessions of a tenant ("": all) say that still lies idle in them. */
static int ask_idle(struct ask *a, const char *tenant, uint64_t *ret)
{
        struct list *l;
        int r = ask_list(a, BFCD__LIST__KIND__SESSIONS, &l);

        if (r < 0)
                return r;
        *ret = list_idle(l, *tenant ? tenant : NULL);
        list_free(l);
        return 0;
}

static int run_trim(struct ask *a, const struct invocation *i, const struct command *c)
{
        const char *tenant = i->n_arguments > 0 ? i->arguments[0] : "";
        uint64_t want = 0, n_asked, n_bytes, n_idle;
        char size[TEXT_MAX], idle[TEXT_MAX];

        (void)c;
        if (i->bytes && (!read_size(i->bytes, &want) || want == 0))
                return usage("wrong value for --bytes", i->bytes, "a size, as in --bytes 512MiB");
        if (ask_trim(a, tenant, i->partition ? i->partition : "", want, &n_asked, &n_bytes) < 0 ||
            ask_idle(a, tenant, &n_idle) < 0)
                return complain(a);
        if (i->json)
                return finish(show_print(
                        stdout,
                        show_document("trim", json_pack("{s:I, s:o, s:o}", "num_asked", (json_int_t)n_asked,
                                                        "bytes_given_back", show_number(n_bytes),
                                                        "bytes_idle", show_number(n_idle)))));
        printf("%llu asked, %s came back; %s still lies idle in sessions%s%s, by their own word.\n",
               (unsigned long long)n_asked, text_size(n_bytes, size), text_size(n_idle, idle),
               *tenant ? " of " : "", tenant);
        return finish(0);
}

/* "123", not 0 and nothing else. */
static bool read_id(const char *text, uint64_t *ret)
{
        uint64_t n = 0;

        for (const char *c = text; *c; c++)
                if (*c < '0' || *c > '9' || __builtin_mul_overflow(n, 10, &n) ||
                    __builtin_add_overflow(n, (uint64_t)(*c - '0'), &n))
                        return false;
        *ret = n;
        return n != 0;
}

static int run_evict(struct ask *a, const struct invocation *i, const struct command *c)
{
        uint64_t id = 0;

        (void)c;
        if (i->n_arguments == 0 || !read_id(i->arguments[0], &id))
                return usage(i->n_arguments == 0 ? "no session" : "no session's number",
                             i->n_arguments == 0 ? NULL : i->arguments[0],
                             "it is \"bfcctl evict SESSION\", by its number in \"bfcctl sessions\"");
        if (ask_evict(a, id) < 0)
                return complain(a);
        if (i->json)
                return finish(show_print(
                        stdout, show_document("evict", json_pack("{s:I}", "session_id", (json_int_t)id))));
        printf("Session %llu was ended. Its memory comes back when its process ends.\n",
               (unsigned long long)id);
        return finish(0);
}

#define GLANCE_MS 200 /* what nobody holds is drained by then */

static int run_drain(struct ask *a, const struct invocation *i, const struct command *c)
{
        struct drain_look l;
        bool is_late;
        int r;

        if (i->n_arguments == 0)
                return usage("no device", NULL, right_use(c));
        if (ask_drain(a, i->arguments[0]) < 0 ||
            drain_wait(a, i->arguments[0], i->wait ? i->wait_ms : GLANCE_MS, &l) < 0)
                return complain(a);
        is_late = i->wait && !l.is_drained;
        r = finish(i->json ? show_print(stdout, drain_json(&l)) : drain_print(stdout, &l));
        drain_look_end(&l);
        if (r == EXIT_SUCCESS && is_late) {
                fprintf(stderr, "bfcctl: The device is not drained yet; it goes on being drained.\n");
                r = EXIT_REFUSED;
        }
        return r;
}

static int run_resume(struct ask *a, const struct invocation *i, const struct command *c)
{
        char *device;

        if (i->n_arguments == 0)
                return usage("no device", NULL, right_use(c));
        if (ask_resume(a, i->arguments[0]) < 0)
                return complain(a);
        if (i->json)
                return finish(show_print(
                        stdout,
                        show_document("resume", json_pack("{s:o}", "device", show_string(i->arguments[0])))));
        device = text_escape(i->arguments[0]);
        if (!device)
                return finish(-ENOMEM);
        printf("Device %s is resumed.\n", device);
        free(device);
        return finish(0);
}

static const struct command commands[] = {
        { "status", 0, false, BFCD__LIST__KIND__STATUS, run_list },
        { "partitions", 0, false, BFCD__LIST__KIND__PARTITIONS, run_list },
        { "tenants", 0, false, BFCD__LIST__KIND__TENANTS, run_list },
        { "sessions", 0, false, BFCD__LIST__KIND__SESSIONS, run_list },
        { "blocks", 0, false, BFCD__LIST__KIND__BLOCKS, run_list },
        { "shared", 0, false, BFCD__LIST__KIND__SHARED, run_list },
        { "whoami", 0, false, BFCD__LIST__KIND__WHOAMI, run_list },
        { "explain", 1, false, 0, run_explain },
        { "leaks", 0, false, 0, run_leaks },
        { "config", 0, true, 0, run_config },
        { "reload", 0, true, 0, run_reload },
        { "reset-peaks", 2, true, 0, run_reset_peaks },
        { "trim", 1, true, 0, run_trim },
        { "evict", 1, true, 0, run_evict },
        { "drain", 1, true, 0, run_drain },
        { "resume", 1, true, 0, run_resume },
};

#define N_COMMANDS (sizeof(commands) / sizeof(commands[0]))

static void print_help(FILE *out)
{
        fputs("Usage: bfcctl [--socket PATH] [--json] COMMAND\n"
              "\n"
              "Shows what bfcd, the broker of device memory, is doing.\n"
              "\n"
              "  status                           the daemon and its devices\n"
              "  partitions                       each partition's use, peaks and limit\n"
              "  tenants                          each tenant's use, peaks and limit\n"
              "  sessions                         client processes: held, used, idle\n"
              "  blocks                           every block handed out\n"
              "  shared                           blocks that processes share, by name\n"
              "  whoami                           which tenant this user is\n"
              "  explain [PARTITION] [--tenant TENANT]\n"
              "                                   who has the memory, and where it lies\n"
              "  leaks [--older AGE] [--by tag|session|block] [--tenant TENANT]\n"
              "                                   what has been there for long\n"
              "On the admin socket also:\n"
              "  config                           the configuration in force\n"
              "  reload [--dry-run]               read the configuration again, or only say\n"
              "                                   what that would change\n"
              "  reset-peaks [TENANT [PARTITION]] start peaks anew\n"
              "  trim [TENANT] [--partition NAME] [--bytes N]\n"
              "                                   have back what lies idle in sessions\n"
              "  evict SESSION                    end a session\n"
              "  drain DEVICE [--wait [SECONDS]]  no new blocks on it; when all are gone give\n"
              "                                   it up, for a reset or a change of it\n"
              "  resume DEVICE                    have it again\n"
              "\n"
              "  -s, --socket PATH  the socket to talk to, for clients or for admins\n"
              "  -j, --json         print JSON\n"
              "  -h, --help         print this\n"
              "      --version      print the version\n"
              "\n"
              "Without --socket: $BFC_ADMIN_SOCKET, else $BFC_SOCKET, else\n"
              "/run/bfcd/admin.sock where this user may open it, else\n"
              "/run/bfcd/bfcd.sock. A tenant sees itself, an admin sees all.\n",
              out);
}

static int usage(const char *what, const char *which, const char *right)
{
        fprintf(stderr, "bfcctl: %s%s%s%s; %s\n", what, which ? " \"" : "", which ? which : "",
                which ? "\"" : "", right);
        return EXIT_USAGE;
}

static const struct command *find(const char *name)
{
        for (size_t i = 0; i < N_COMMANDS; i++)
                if (strcmp(commands[i].name, name) == 0)
                        return &commands[i];
        return NULL;
}

static const char *right_use(const struct command *c)
{
        if (c->run == run_explain)
                return "it is \"bfcctl explain [PARTITION] [--tenant TENANT]\"";
        if (c->run == run_reset_peaks)
                return "it is \"bfcctl reset-peaks [TENANT [PARTITION]]\"";
        if (c->run == run_trim)
                return "it is \"bfcctl trim [TENANT] [--partition NAME] [--bytes N]\"";
        if (c->run == run_evict)
                return "it is \"bfcctl evict SESSION\"";
        if (c->run == run_drain)
                return "it is \"bfcctl drain DEVICE [--wait [SECONDS]]\"";
        if (c->run == run_resume)
                return "it is \"bfcctl resume DEVICE\"";
        return "this command takes none";
}

/* "30"; at most a year. */
static bool read_seconds(const char *text, int64_t *ret_ms)
{
        uint64_t n = 0;

        if (strcmp(text, "0") != 0 && (!read_id(text, &n) || n > UINT64_C(366) * 24 * 3600))
                return false;
        *ret_ms = (int64_t)n * 1000;
        return true;
}

static int run(const struct command *c, const struct invocation *i)
{
        struct ask a;
        int status;

        if (ask_open(&a, ask_socket(i->socket), getenv("BFC_TENANT")) < 0) {
                status = complain(&a);
        } else if (c->admin_only && !a.admin) {
                fprintf(stderr,
                        "bfcctl: \"%s\" is for the admin socket, and %s is for clients; "
                        "give the other with --socket or BFC_ADMIN_SOCKET\n",
                        c->name, a.socket);
                status = EXIT_REFUSED;
        } else {
                status = c->run(&a, i, c);
        }
        ask_close(&a);
        return status;
}

int main(int argc, char **argv)
{
        enum {
                OPTION_VERSION = 256,
                OPTION_DRY_RUN,
                OPTION_TENANT,
                OPTION_OLDER,
                OPTION_BY,
                OPTION_PARTITION,
                OPTION_BYTES,
                OPTION_WAIT
        };
        static const struct option options[] = {
                { "socket", required_argument, NULL, 's' },
                { "json", no_argument, NULL, 'j' },
                { "help", no_argument, NULL, 'h' },
                { "version", no_argument, NULL, OPTION_VERSION },
                { "dry-run", no_argument, NULL, OPTION_DRY_RUN },
                { "tenant", required_argument, NULL, OPTION_TENANT },
                { "older", required_argument, NULL, OPTION_OLDER },
                { "by", required_argument, NULL, OPTION_BY },
                { "partition", required_argument, NULL, OPTION_PARTITION },
                { "bytes", required_argument, NULL, OPTION_BYTES },
                { "wait", optional_argument, NULL, OPTION_WAIT },
                { NULL, 0, NULL, 0 },
        };
        struct invocation i = { 0 };
        const struct command *c;
        int option;

        while ((option = getopt_long(argc, argv, ":s:jh", options, NULL)) >= 0) {
                switch (option) {
                case 's':
                        i.socket = optarg;
                        break;
                case 'j':
                        i.json = true;
                        break;
                case 'h':
                        print_help(stdout);
                        return finish(0);
                case OPTION_VERSION:
                        puts("bfcctl " BFCD_VERSION);
                        return finish(0);
                case OPTION_DRY_RUN:
                        i.dry_run = true;
                        break;
                case OPTION_TENANT:
                        i.tenant = optarg;
                        break;
                case OPTION_OLDER:
                        i.older = optarg;
                        break;
                case OPTION_BY:
                        i.by = optarg;
                        break;
                case OPTION_PARTITION:
                        i.partition = optarg;
                        break;
                case OPTION_BYTES:
                        i.bytes = optarg;
                        break;
                case OPTION_WAIT:
                        /* No device's id begins with a digit, so the next word may be the time. */
                        if (!optarg && optind < argc && argv[optind][0] >= '0' && argv[optind][0] <= '9')
                                optarg = argv[optind++];
                        if (optarg && !read_seconds(optarg, &i.wait_ms))
                                return usage("wrong value for --wait", optarg,
                                             "a number of seconds, as in --wait 30");
                        i.wait_ms = optarg ? i.wait_ms : -1;
                        i.wait = true;
                        break;
                case ':':
                        return usage("no value for", argv[optind - 1], "it takes one, as in --socket PATH");
                default:
                        return usage("unknown option", argv[optind - 1], "\"bfcctl --help\" lists them");
                }
        }
        if (i.socket && !*i.socket)
                return usage("--socket is empty", NULL,
                             "it takes a path, as in --socket /run/bfcd/bfcd.sock");
        if (optind == argc)
                return usage("no command", NULL, "\"bfcctl --help\" lists them; try \"bfcctl status\"");
        c = find(argv[optind]);
        if (!c)
                return usage("unknown command", argv[optind], "\"bfcctl --help\" lists them");
        if (i.dry_run && c->run != run_reload)
                return usage("--dry-run is not for", c->name, "it is \"bfcctl reload --dry-run\"");
        if (i.tenant && c->run != run_explain && c->run != run_leaks)
                return usage("--tenant is not for", c->name, "it is for explain and leaks");
        if ((i.older || i.by) && c->run != run_leaks)
                return usage("--older and --by are not for", c->name, "they are for leaks");
        if (i.wait && c->run != run_drain)
                return usage("--wait is not for", c->name,
                             "it is \"bfcctl drain DEVICE [--wait [SECONDS]]\"");
        if ((i.partition || i.bytes) && c->run != run_trim)
                return usage("--partition and --bytes are not for", c->name, "they are for trim");
        i.arguments = argv + optind + 1;
        i.n_arguments = argc - optind - 1;
        if (i.n_arguments > c->max_arguments)
                return usage("too many arguments from", i.arguments[c->max_arguments], right_use(c));
        return run(c, &i);
}
