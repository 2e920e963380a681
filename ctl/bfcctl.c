/* bfcctl: what the daemon's tenants, partitions, sessions and blocks are doing,
 * and the few commands with which an administrator acts on them.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Options and dispatch. One command, one conversation, one document on standard
 * output or one sentence on standard error. Nothing is printed on standard
 * output until the whole answer is there, so that what a program reads is
 * never half of it. Only the list of blocks, which may have millions, is printed as it comes: its JSON
 * is incomplete where the answer was. */
#include <dirent.h>
#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "ctl/ask.h"
#include "ctl/drain.h"
#include "ctl/explain.h"
#include "ctl/leaks.h"
#include "ctl/reload.h"
#include "ctl/show.h"
#include "ctl/table.h"
#include "ctl/text.h"

enum {
        EXIT_REFUSED = 1,
        EXIT_USAGE = 2,
        EXIT_TIMED_OUT = 3, /* what was asked for is under way */
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
        const char *reason; /* NULL: not given; so the next */
        const char *timeout;
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
static bool read_seconds(const char *text, int64_t *ret_ms);

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

static int add_row(void *userdata, const Bfcd__BlockRow *row)
{
        return show_blocks_add(userdata, row);
}

static int run_blocks(struct ask *a, const struct invocation *i, const struct command *c)
{
        struct show_blocks *s;
        int r;

        (void)c;
        if (show_blocks_new(stdout, i->json, &s) < 0)
                return finish(-ENOMEM);
        r = ask_blocks(a, add_row, s) < 0 ? complain(a) : finish(show_blocks_end(s));
        show_blocks_free(s);
        return r;
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
        printf("The peaks of %s%s in %s%s were reset to the current usage.\n",
               *tenant ? "tenant " : "all tenants", tenant, *partition ? "partition " : "all partitions",
               partition);
        return finish(0);
}

#define MAX_CONFIG_BYTES (((size_t)1 << 20) + 1) /* the daemon refuses one more than it takes */

static int fail_to_read(struct ask *a, const char *path, int error)
{
        snprintf(a->error, sizeof(a->error), "%s cannot be read: %s", path, strerror(error));
        return -error;
}

/* Reads the file as this user. The sandbox hides some folders from the daemon. */
static int send_file(struct ask *a, const char *path)
{
        char *text = malloc(MAX_CONFIG_BYTES);
        FILE *f = fopen(path, "re");
        size_t n;
        int r;

        if (!text || !f || ((n = fread(text, 1, MAX_CONFIG_BYTES, f)), ferror(f)))
                r = fail_to_read(a, path, errno);
        else
                r = ask_reload_text(a, path, text, n);
        if (f)
                fclose(f);
        free(text);
        return r;
}

static int is_yaml(const struct dirent *e)
{
        size_t n = strlen(e->d_name);

        return e->d_name[0] != '.' && n > 5 && strcmp(e->d_name + n - 5, ".yaml") == 0;
}

static int by_name(const struct dirent **a, const struct dirent **b)
{
        return strcmp((*a)->d_name, (*b)->d_name);
}

/* The file and those of conf.d beside it, as the daemon would read them. */
static int send_files(struct ask *a, const char *path)
{
        const char *slash = strrchr(path, '/');
        int n_folder = slash ? (int)(slash - path) + 1 : 0, n, r = send_file(a, path);
        char *folder = NULL, *file = NULL;
        struct dirent **entries = NULL;

        if (r < 0)
                return r;
        if (asprintf(&folder, "%.*sconf.d", n_folder, path) < 0)
                return fail_to_read(a, path, ENOMEM);
        n = scandir(folder, &entries, is_yaml, by_name);
        if (n < 0 && errno != ENOENT)
                r = fail_to_read(a, folder, errno);
        for (int i = 0; i < n; i++) {
                if (r == 0 && asprintf(&file, "%s/%s", folder, entries[i]->d_name) < 0)
                        r = fail_to_read(a, folder, ENOMEM);
                else if (r == 0) {
                        r = send_file(a, file);
                        free(file);
                }
                free(entries[i]);
        }
        free(entries);
        free(folder);
        return r;
}

static int run_reload(struct ask *a, const struct invocation *i, const struct command *c)
{
        Bfcd__Reply *reply;
        bool failed;
        int r;

        if (i->n_arguments > 0 && !i->dry_run)
                return usage("reload applies the daemon's own file, not", i->arguments[0], right_use(c));
        if ((i->n_arguments > 0 && send_files(a, i->arguments[0]) < 0) ||
            ask_reload(a, i->dry_run, &reply) < 0)
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
        const char *last = "";
        struct list *l;
        size_t n;
        bool found = false;

        if (ask_list(a, BFCD__LIST__KIND__TENANTS, &l) < 0)
                return complain(a);
        n = (size_t)snprintf(a->error, sizeof(a->error), "There is no tenant '%.63s'; you can see:", name);
        for (size_t i = 0; i < l->n_tenants && !found; i++) {
                found = strcmp(l->tenants[i]->tenant, name) == 0;
                if (strcmp(l->tenants[i]->tenant, last) == 0 || n >= sizeof(a->error))
                        continue;
                n += (size_t)snprintf(a->error + n, sizeof(a->error) - n, "%s %s", *last ? "," : "",
                                      l->tenants[i]->tenant);
                last = l->tenants[i]->tenant;
        }
        list_free(l);
        return found ? EXIT_SUCCESS : complain(a);
}

/* Sessions are read behind the blocks: whose block was seen is most likely still there. */
static int print_leaks(struct ask *a, const struct invocation *i, struct leaks *k)
{
        struct list *sessions, *ages;
        int r;

        if (i->tenant && (r = must_be_tenant(a, i->tenant)) != EXIT_SUCCESS)
                return r;
        if (ask_list(a, BFCD__LIST__KIND__AGES, &ages) < 0)
                return complain(a);
        r = leaks_add_ages(k, ages);
        list_free(ages);
        if (r < 0)
                return finish(r);
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
                return usage("wrong value for --older", i->older,
                             "a number and ms, s, m, h or d, as in --older 10m");
        if (i->by && leaks_parse_by(i->by, &options.by) < 0)
                return usage("wrong value for --by", i->by, "tag, session or block");
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

#define TRIM_LOOK_MS    50
#define TRIM_TIMEOUT_MS 10000

static int64_t monotonic_ms(void)
{
        struct timespec now;

        clock_gettime(CLOCK_MONOTONIC, &now);
        return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

struct trim_look {
        uint64_t n_reserved, n_pending;
};

static int look_at_trim(struct ask *a, const char *tenant, const char *partition, struct trim_look *ret)
{
        struct list *l;
        int r = ask_list(a, BFCD__LIST__KIND__TENANTS, &l);

        if (r < 0)
                return r;
        *ret = (struct trim_look){ 0 };
        for (size_t i = 0; i < l->n_tenants; i++) {
                const Bfcd__TenantRow *row = l->tenants[i];

                if ((*tenant && strcmp(tenant, row->tenant) != 0) ||
                    (*partition && strcmp(partition, row->partition) != 0))
                        continue;
                ret->n_reserved += row->figures ? row->figures->bytes_reserved : 0;
                ret->n_pending += row->bytes_pending;
        }
        list_free(l);
        return 0;
}

/* Until nothing is on its way back any more, or the time is up. */
static int wait_for_trim(struct ask *a, const char *tenant, const char *partition, int64_t timeout_ms,
                         struct trim_look *ret)
{
        const struct timespec pause = { .tv_nsec = TRIM_LOOK_MS * 1000000L };
        int64_t until_ms = monotonic_ms() + timeout_ms;
        int r;

        while ((r = look_at_trim(a, tenant, partition, ret)) == 0 && ret->n_pending > 0 &&
               monotonic_ms() < until_ms)
                nanosleep(&pause, NULL);
        return r;
}

static int print_trim(const struct invocation *i, const char *tenant, uint64_t n_asked, uint64_t n_bytes,
                      uint64_t n_pending, uint64_t n_idle)
{
        char size[TEXT_MAX], pending[TEXT_MAX], idle[TEXT_MAX];

        if (i->json)
                return finish(show_print(
                        stdout,
                        show_document("trim",
                                      json_pack("{s:I, s:o, s:o, s:o}", "num_asked", (json_int_t)n_asked,
                                                "bytes_given_back", show_number(n_bytes), "bytes_pending",
                                                show_number(n_pending), "bytes_idle", show_number(n_idle)))));
        printf("%llu sessions asked, %s reclaimed, %s pending; %s still idle in sessions%s%s, as reported "
               "by the clients.\n",
               (unsigned long long)n_asked, text_size(n_bytes, size), text_size(n_pending, pending),
               text_size(n_idle, idle), *tenant ? " of " : "", tenant);
        return finish(0);
}

static int run_trim(struct ask *a, const struct invocation *i, const struct command *c)
{
        const char *tenant = i->n_arguments > 0 ? i->arguments[0] : "";
        const char *partition = i->partition ? i->partition : "";
        uint64_t want = 0, n_asked, n_before, n_idle;
        int64_t timeout_ms = TRIM_TIMEOUT_MS;
        struct trim_look now;
        int r;

        (void)c;
        if (i->bytes && (!read_size(i->bytes, &want) || want == 0))
                return usage("wrong value for --bytes", i->bytes, "a size, as in --bytes 512MiB");
        if (i->timeout && !read_seconds(i->timeout, &timeout_ms))
                return usage("wrong value for --timeout", i->timeout,
                             "a number of seconds, as in --timeout 30");
        if (ask_trim(a, tenant, partition, want, &n_asked, &n_before) < 0 ||
            wait_for_trim(a, tenant, partition, timeout_ms, &now) < 0 || ask_idle(a, tenant, &n_idle) < 0)
                return complain(a);
        r = print_trim(i, tenant, n_asked, n_before > now.n_reserved ? n_before - now.n_reserved : 0,
                       now.n_pending, n_idle);
        if (r == EXIT_SUCCESS && now.n_pending > 0) {
                fprintf(stderr, "bfcctl: Timeout: memory is still pending; it is reclaimed later.\n");
                r = EXIT_TIMED_OUT;
        }
        return r;
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
                return usage(
                        i->n_arguments == 0 ? "no session" : "not a session number:",
                        i->n_arguments == 0 ? NULL : i->arguments[0],
                        "usage: bfcctl evict SESSION [--reason TEXT]; \"bfcctl sessions\" lists the numbers");
        if (ask_evict(a, id, i->reason ? i->reason : "") < 0)
                return complain(a);
        if (i->json)
                return finish(show_print(
                        stdout, show_document("evict", json_pack("{s:I}", "session_id", (json_int_t)id))));
        printf("Session %llu was evicted. Its memory is reclaimed when its process exits.\n",
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
                fprintf(stderr, "bfcctl: Timeout: the device is not drained yet; draining continues.\n");
                r = EXIT_TIMED_OUT;
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
        { "blocks", 0, false, 0, run_blocks },
        { "shared", 0, false, BFCD__LIST__KIND__SHARED, run_list },
        { "whoami", 0, false, BFCD__LIST__KIND__WHOAMI, run_list },
        { "explain", 1, false, 0, run_explain },
        { "leaks", 0, false, 0, run_leaks },
        { "config", 0, true, 0, run_config },
        { "reload", 1, true, 0, run_reload },
        { "reset-peaks", 2, true, 0, run_reset_peaks },
        { "trim", 1, true, 0, run_trim },
        { "evict", 1, true, 0, run_evict },
        { "drain", 1, true, 0, run_drain },
        { "resume", 1, true, 0, run_resume },
};

#define N_COMMANDS (sizeof(commands) / sizeof(commands[0]))

static void print_help(FILE *out)
{
        fputs("Usage: bfcctl [--socket PATH] [--json | --wide] COMMAND\n"
              "\n"
              "Shows and controls bfcd, which shares device memory between tenants.\n"
              "\n"
              "  status                           the daemon and its devices\n"
              "  partitions                       each partition's use, peaks and limit\n"
              "  tenants                          each tenant's use, peaks and limit\n"
              "  sessions                         client processes: held, used, idle\n"
              "  blocks                           every allocated block\n"
              "  shared                           blocks that processes share, by name\n"
              "  whoami                           the tenant of this user\n"
              "  explain [PARTITION] [--tenant TENANT]\n"
              "                                   the use of memory by session and address\n"
              "  leaks [--older AGE] [--by tag|session|block] [--tenant TENANT]\n"
              "                                   blocks by age, as sums\n"
              "On the admin socket also:\n"
              "  config                           the current configuration\n"
              "  reload [--dry-run [FILE]]        read the configuration again; --dry-run only\n"
              "                                   shows what that, or FILE, would change\n"
              "  reset-peaks [TENANT [PARTITION]] reset peaks to the current usage\n"
              "  trim [TENANT] [--partition NAME] [--bytes N] [--timeout SECONDS]\n"
              "                                   reclaim idle client caches\n"
              "  evict SESSION [--reason TEXT]    end a session; its client gets the reason\n"
              "  drain DEVICE [--wait [SECONDS]]  refuse new blocks on it, and release it when\n"
              "                                   it is empty, for a reset or a change\n"
              "  resume DEVICE                    serve blocks on it again\n"
              "\n"
              "  -s, --socket PATH  the socket to talk to, for clients or for admins\n"
              "  -j, --json         print JSON\n"
              "  -w, --wide         print all columns, without a cut at 80 columns\n"
              "  -h, --help         print this\n"
              "      --version      print the version\n"
              "\n"
              "Without --socket: $BFC_ADMIN_SOCKET, else $BFC_SOCKET, else\n"
              "/run/bfcd/admin.sock where this user may open it, else\n"
              "/run/bfcd/bfcd.sock. A tenant sees its own, an operator sees all.\n",
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
                return "usage: bfcctl explain [PARTITION] [--tenant TENANT]";
        if (c->run == run_reload)
                return "usage: bfcctl reload [--dry-run [FILE]]";
        if (c->run == run_reset_peaks)
                return "usage: bfcctl reset-peaks [TENANT [PARTITION]]";
        if (c->run == run_trim)
                return "usage: bfcctl trim [TENANT] [--partition NAME] [--bytes N] [--timeout SECONDS]";
        if (c->run == run_evict)
                return "usage: bfcctl evict SESSION [--reason TEXT]";
        if (c->run == run_drain)
                return "usage: bfcctl drain DEVICE [--wait [SECONDS]]";
        if (c->run == run_resume)
                return "usage: bfcctl resume DEVICE";
        return "this command takes no arguments";
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
                        "bfcctl: \"%s\" needs the admin socket, and %s is the client socket. Set --socket "
                        "or BFC_ADMIN_SOCKET to the admin socket\n",
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
                OPTION_WAIT,
                OPTION_REASON,
                OPTION_TIMEOUT
        };
        static const struct option options[] = {
                { "socket", required_argument, NULL, 's' },
                { "json", no_argument, NULL, 'j' },
                { "wide", no_argument, NULL, 'w' },
                { "help", no_argument, NULL, 'h' },
                { "version", no_argument, NULL, OPTION_VERSION },
                { "dry-run", no_argument, NULL, OPTION_DRY_RUN },
                { "tenant", required_argument, NULL, OPTION_TENANT },
                { "older", required_argument, NULL, OPTION_OLDER },
                { "by", required_argument, NULL, OPTION_BY },
                { "partition", required_argument, NULL, OPTION_PARTITION },
                { "bytes", required_argument, NULL, OPTION_BYTES },
                { "wait", optional_argument, NULL, OPTION_WAIT },
                { "reason", required_argument, NULL, OPTION_REASON },
                { "timeout", required_argument, NULL, OPTION_TIMEOUT },
                { NULL, 0, NULL, 0 },
        };
        struct invocation i = { 0 };
        const struct command *c;
        int option;

        table_look.has_colour = table_may_colour(STDOUT_FILENO);
        while ((option = getopt_long(argc, argv, ":s:jwh", options, NULL)) >= 0) {
                switch (option) {
                case 's':
                        i.socket = optarg;
                        break;
                case 'j':
                        i.json = true;
                        break;
                case 'w':
                        table_look.is_wide = true;
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
                case OPTION_REASON:
                        i.reason = optarg;
                        break;
                case OPTION_TIMEOUT:
                        i.timeout = optarg;
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
                        return usage("no value for", argv[optind - 1],
                                     "this option needs a value, as in --socket PATH");
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
                return usage("--dry-run is not valid for", c->name, "usage: bfcctl reload --dry-run [FILE]");
        if (i.tenant && c->run != run_explain && c->run != run_leaks)
                return usage("--tenant is not valid for", c->name, "it is valid for explain and leaks");
        if ((i.older || i.by) && c->run != run_leaks)
                return usage("--older and --by are not valid for", c->name, "they are valid for leaks");
        if (i.wait && c->run != run_drain)
                return usage("--wait is not valid for", c->name,
                             "usage: bfcctl drain DEVICE [--wait [SECONDS]]");
        if ((i.partition || i.bytes) && c->run != run_trim)
                return usage("--partition and --bytes are not valid for", c->name, "they are valid for trim");
        if (i.timeout && c->run != run_trim)
                return usage("--timeout is not valid for", c->name,
                             "it is valid for trim; for drain use --wait SECONDS");
        if (i.reason && c->run != run_evict)
                return usage("--reason is not valid for", c->name,
                             "usage: bfcctl evict SESSION --reason TEXT");
        i.arguments = argv + optind + 1;
        i.n_arguments = argc - optind - 1;
        if (i.n_arguments > c->max_arguments)
                return usage("too many arguments from", i.arguments[c->max_arguments], right_use(c));
        return run(c, &i);
}
