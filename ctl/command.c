/* The commands of bfcctl; see command.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctl/command.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "ctl/amount.h"
#include "ctl/drain.h"
#include "ctl/explain.h"
#include "ctl/grants.h"
#include "ctl/leaks.h"
#include "ctl/metrics.h"
#include "ctl/pictures.h"
#include "ctl/process.h"
#include "ctl/progress.h"
#include "ctl/reload.h"
#include "ctl/show.h"
#include "ctl/table.h"
#include "ctl/text.h"
#include "ctl/tools.h"
#include "ctl/top.h"
#include "ctl/top_keys.h"
#include "ctl/trim.h"

int command_usage(const char *what, const char *which, const char *right)
{
        fprintf(stderr, "bfcctl: %s%s%s%s; %s\n", what, which ? " \"" : "", which ? which : "",
                which ? "\"" : "", right);
        return EXIT_USAGE;
}

int command_complain(const struct ask *a)
{
        fprintf(stderr, "bfcctl: %s\n", a->error);
        return EXIT_REFUSED;
}

/* The result of writing to standard output. */
int command_finish(int r)
{
        if (r == 0 && fflush(stdout) == 0)
                return EXIT_SUCCESS;
        fprintf(stderr, "bfcctl: %s.\n",
                r == -ENOMEM ? "Out of memory" : "Standard output cannot be written");
        return EXIT_REFUSED;
}

/* An exit status. */
static int unknown_column(const struct table_column *columns, const char *option, const char *name,
                          size_t n_name)
{
        char known[1024] = "";

        for (const struct table_column *c = columns; !table_is_end(c); c++)
                if (c->title)
                        snprintf(known + strlen(known), sizeof(known) - strlen(known), "%s%s",
                                 *known ? ", " : "", c->title);
        fprintf(stderr, "bfcctl: %s: there is no column \"%.*s\"; the columns are: %s\n", option, (int)n_name,
                name, known);
        return EXIT_USAGE;
}

static int take_columns(const struct invocation *i, const struct command *c,
                        const struct table_column **ret_by)
{
        const struct table_column *columns = show_columns(c->kind);

        *ret_by = i->view.sort ? table_find(columns, i->view.sort, strlen(i->view.sort)) : NULL;
        if (i->view.sort && !*ret_by)
                return unknown_column(columns, "--sort", i->view.sort, strlen(i->view.sort));
        for (const char *name = i->view.columns; name;
             name = name[strcspn(name, ",")] ? strchr(name, ',') + 1 : NULL)
                if (!table_find(columns, name, strcspn(name, ",")))
                        return unknown_column(columns, "--columns", name, strcspn(name, ","));
        if (i->view.columns && i->json)
                return command_usage("--columns and --json exclude each other", NULL,
                                     "jq selects keys of JSON");
        table_look.columns = i->view.columns;
        return EXIT_SUCCESS;
}

int run_list(struct ask *a, const struct invocation *i, const struct command *c)
{
        const struct table_column *by;
        struct list *l;
        int r = take_columns(i, c, &by);

        if (r != EXIT_SUCCESS)
                return r;
        if (ask_list(a, c->kind, &l) < 0)
                return command_complain(a);
        list_leave_out(l, a->session_id);
        if (by)
                show_sort(c->kind, l, by);
        r = i->json ? show_print(stdout, show_json(c->kind, l)) : show_table(stdout, c->kind, l);
        list_free(l);
        return command_finish(r);
}

int run_grants(struct ask *a, const struct invocation *i, const struct command *c)
{
        struct list *l;
        int r;

        if (ask_list(a, c->kind, &l) < 0)
                return command_complain(a);
        r = i->json ? show_print(stdout, grants_json(l)) : grants_print(stdout, l);
        list_free(l);
        return command_finish(r);
}

int run_metrics(struct ask *a, const struct invocation *i, const struct command *c)
{
        struct list *l;
        int r;

        if (i->json)
                return command_usage("--json is not valid for", c->name, i->use);
        if (ask_lists(a, metrics_lists, METRICS_LISTS, &l) < 0)
                return command_complain(a);
        r = metrics_print(stdout, l,
                          &(struct metrics_options){ .openmetrics = i->metrics.openmetrics,
                                                     .each_lease = i->metrics.each_lease });
        list_free(l);
        return command_finish(r);
}

int run_top(struct ask *a, const struct invocation *i, const struct command *c)
{
        struct top_options o = { .socket = i->socket,
                                 .interval_ms = 1000,
                                 .is_once = i->once != NULL,
                                 .is_wide = table_look.is_wide };

        (void)a;
        if (i->json || (i->n_arguments > 0 && !top_find_view(i->arguments[0], &o.view)))
                return command_usage(i->json ? "--json is not valid for" : "there is no view",
                                     i->json ? c->name : i->arguments[0], i->use);
        if (i->interval && !top_read_interval(i->interval, &o.interval_ms))
                return command_usage("wrong value for --interval", i->interval,
                                     "0.1s to 1h, as in --interval 2s");
        return top_run(&o);
}

static int add_row(void *userdata, const Bfcd__BlockRow *row)
{
        return show_blocks_add(userdata, row);
}

int run_blocks(struct ask *a, const struct invocation *i, const struct command *c)
{
        struct show_blocks *s;
        int r;

        (void)c;
        if (show_blocks_new(stdout, i->json, &s) < 0)
                return command_finish(-ENOMEM);
        r = ask_blocks(a, add_row, s) < 0 ? command_complain(a) : command_finish(show_blocks_end(s));
        show_blocks_free(s);
        return r;
}

int run_config(struct ask *a, const struct invocation *i, const struct command *c)
{
        char *text;
        int r = 0;

        (void)c;
        if (ask_config(a, &text) < 0)
                return command_complain(a);
        if (i->json) {
                r = show_print(stdout, show_document("config", table_json_string(text)));
        } else {
                /* YAML itself has no other control characters. */
                for (const char *s = text; *s; s++)
                        putchar((unsigned char)*s >= ' ' || *s == '\n' || *s == '\t' ? *s : '?');
        }
        free(text);
        return command_finish(r);
}

int run_reset_peaks(struct ask *a, const struct invocation *i, const struct command *c)
{
        const char *tenant = i->n_arguments > 0 ? i->arguments[0] : "";
        const char *partition = i->n_arguments > 1 ? i->arguments[1] : "";

        (void)c;
        if (ask_reset_peaks(a, tenant, partition) < 0)
                return command_complain(a);
        if (i->json)
                return command_finish(show_print(
                        stdout, show_document("reset_peaks",
                                              json_pack("{s:o, s:o}", "tenant", table_json_string(tenant),
                                                        "partition", table_json_string(partition)))));
        printf("The peaks of %s%s in %s%s were reset to the current usage.\n",
               *tenant ? "tenant " : "all tenants", tenant, *partition ? "partition " : "all partitions",
               partition);
        return command_finish(0);
}

int run_reload(struct ask *a, const struct invocation *i, const struct command *c)
{
        Bfcd__Reply *reply;
        bool failed;
        int r;

        (void)c;
        if (i->n_arguments > 0 && !i->dry_run)
                return command_usage("reload applies the daemon's own file, not", i->arguments[0], i->use);
        if ((i->n_arguments > 0 && reload_send_files(a, i->arguments[0]) < 0) ||
            ask_reload(a, i->dry_run != NULL, &reply) < 0)
                return command_complain(a);
        failed = reply->reload->n_errors > 0;
        r = i->json ? reload_show_json(stdout, reply->reload, i->dry_run != NULL)
                    : reload_show(stdout, stderr, reply->reload, i->dry_run != NULL);
        bfcd__reply__free_unpacked(reply, NULL);
        r = command_finish(r);
        return failed ? EXIT_REFUSED : r;
}

static uint64_t now_ms(void)
{
        struct timespec now;

        clock_gettime(CLOCK_REALTIME, &now);
        return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

int run_explain(struct ask *a, const struct invocation *i, const struct command *c)
{
        struct list *l;
        int r;

        (void)c;
        if (ask_explain(a, i->n_arguments > 0 ? i->arguments[0] : "", i->tenant ? i->tenant : "", &l) < 0)
                return command_complain(a);
        r = i->json ? show_print(stdout, explain_json(l)) : explain_print(stdout, l, now_ms());
        list_free(l);
        return command_finish(r);
}

static int add_leak(void *userdata, const Bfcd__BlockRow *row)
{
        return ask_block_is_parked(row) ? 0 : leaks_add(userdata, row);
}

/* An unknown name would give an empty list, which looks like no leaks. */
static int must_be_tenant(struct ask *a, const char *name)
{
        struct list *l;
        int r;

        if (ask_list(a, BFCD__LIST__KIND__TENANTS, &l) < 0)
                return command_complain(a);
        r = ask_check_name(a, l, BFCD__LIST__KIND__TENANTS, name);
        list_free(l);
        return r < 0 ? command_complain(a) : EXIT_SUCCESS;
}

/* Sessions are read after the blocks: the session of a block that was seen most likely still exists. */
static int print_leaks(struct ask *a, const struct invocation *i, struct leaks *k)
{
        struct list *sessions, *ages;
        int r;

        if (i->tenant && (r = must_be_tenant(a, i->tenant)) != EXIT_SUCCESS)
                return r;
        if (ask_list(a, BFCD__LIST__KIND__AGES, &ages) < 0)
                return command_complain(a);
        r = leaks_add_ages(k, ages);
        list_free(ages);
        if (r < 0)
                return command_finish(r);
        if (ask_blocks(a, add_leak, k) < 0 || ask_list(a, BFCD__LIST__KIND__SESSIONS, &sessions) < 0)
                return command_complain(a);
        r = i->json ? show_print(stdout, leaks_json(k, sessions)) : leaks_print(stdout, k, sessions);
        list_free(sessions);
        return command_finish(r);
}

int run_leaks(struct ask *a, const struct invocation *i, const struct command *c)
{
        struct leaks_options options = { .by = LEAKS_BY_TAG, .tenant = i->tenant };
        struct leaks *k;
        int status;

        (void)c;
        if (i->older && !amount_time(i->older, &options.older_ms))
                return command_usage("wrong value for --older", i->older, AMOUNT_TIME);
        if (i->by && leaks_parse_by(i->by, &options.by) < 0)
                return command_usage("wrong value for --by", i->by, "tag, session or block");
        if (leaks_new(&options, &k) < 0)
                return command_finish(-ENOMEM);
        status = print_leaks(a, i, k);
        leaks_free(k);
        return status;
}

int run_map(struct ask *a, const struct invocation *i, const struct command *c)
{
        (void)c;
        if (i->n_arguments == 0)
                return command_usage("no partition", NULL, i->use);
        if (i->svg && i->json)
                return command_usage("--svg and --json exclude each other", NULL, i->use);
        if (pictures_map(a, &(struct pictures_map){ i->arguments[0], i->tenant, i->svg, i->json }) < 0)
                return command_complain(a);
        return command_finish(0);
}

/* Bytes that sessions of a tenant ("": all) report as idle. */
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

#define TRIM_TIMEOUT_MS 10000

static int print_trim(const struct invocation *i, const char *tenant, uint64_t n_asked, uint64_t n_bytes,
                      uint64_t n_pending, uint64_t n_idle)
{
        char size[TEXT_MAX], pending[TEXT_MAX], idle[TEXT_MAX];

        if (i->json)
                return command_finish(show_print(
                        stdout, show_document("trim", json_pack("{s:I, s:o, s:o, s:o}", "num_asked",
                                                                (json_int_t)n_asked, "bytes_given_back",
                                                                table_json_number(n_bytes), "bytes_pending",
                                                                table_json_number(n_pending), "bytes_idle",
                                                                table_json_number(n_idle)))));
        printf("%llu session%s asked, %s reclaimed, %s pending; %s still idle in sessions%s%s, as reported "
               "by the clients.\n",
               (unsigned long long)n_asked, n_asked == 1 ? "" : "s", text_size(n_bytes, size),
               text_size(n_pending, pending), text_size(n_idle, idle), *tenant ? " of " : "", tenant);
        return command_finish(0);
}

int run_trim(struct ask *a, const struct invocation *i, const struct command *c)
{
        const char *tenant = i->n_arguments > 0 ? i->arguments[0] : "";
        const char *partition = i->partition ? i->partition : "";
        uint64_t want = 0, n_asked, n_before, n_idle;
        uint64_t timeout_ms = TRIM_TIMEOUT_MS;
        struct trim_look now;
        int r;

        (void)c;
        if (i->bytes && (!amount_size(i->bytes, &want) || want == 0))
                return command_usage("wrong value for --bytes", i->bytes, "a size, as in --bytes 512MiB");
        if (i->timeout && !amount_time(i->timeout, &timeout_ms))
                return command_usage("wrong value for --timeout", i->timeout, AMOUNT_TIME);
        if (ask_trim(a, tenant, partition, want, &n_asked, &n_before) < 0 ||
            trim_wait(a, tenant, partition, (int64_t)timeout_ms, &now) < 0 ||
            ask_idle(a, tenant, &n_idle) < 0)
                return command_complain(a);
        r = print_trim(i, tenant, n_asked, n_before > now.n_reserved ? n_before - now.n_reserved : 0,
                       now.n_pending, n_idle);
        if (r == EXIT_SUCCESS && now.n_pending > 0) {
                fprintf(stderr, "bfcctl: Timeout: memory is still pending; it is reclaimed later.\n");
                r = EXIT_TIMED_OUT;
        }
        return r;
}

/* "123", not 0 and nothing else. */
bool command_read_id(const char *text, uint64_t *ret)
{
        uint64_t n = 0;

        for (const char *c = text; *c; c++)
                if (*c < '0' || *c > '9' || __builtin_mul_overflow(n, 10, &n) ||
                    __builtin_add_overflow(n, (uint64_t)(*c - '0'), &n))
                        return false;
        *ret = n;
        return n != 0;
}

int run_evict(struct ask *a, const struct invocation *i, const struct command *c)
{
        uint64_t id = 0;

        (void)c;
        if (i->n_arguments == 0 || !command_read_id(i->arguments[0], &id))
                return command_usage(
                        i->n_arguments == 0 ? "no session" : "not a session number:",
                        i->n_arguments == 0 ? NULL : i->arguments[0],
                        "usage: bfcctl evict SESSION [--reason TEXT]; \"bfcctl sessions\" lists the numbers");
        if (ask_evict(a, id, i->reason ? i->reason : "") < 0)
                return command_complain(a);
        if (i->json)
                return command_finish(show_print(
                        stdout, show_document("evict", json_pack("{s:I}", "session_id", (json_int_t)id))));
        printf("Session %llu was evicted. Its memory is reclaimed when its process exits.\n",
               (unsigned long long)id);
        return command_finish(0);
}

static json_t *forget_json(const char *tenant, const char *name)
{
        return show_document("forget", json_pack("{s:o, s:o}", "tenant", table_json_string(tenant), "name",
                                                 table_json_string(name)));
}

int run_forget(struct ask *a, const struct invocation *i, const struct command *c)
{
        (void)c;
        if (i->n_arguments < 2)
                return command_usage("no tenant or no name", NULL, i->use);
        if (ask_forget(a, i->arguments[0], i->arguments[1]) < 0)
                return command_complain(a);
        if (i->json)
                return command_finish(show_print(stdout, forget_json(i->arguments[0], i->arguments[1])));
        puts("The block is kept no longer: it is freed with its last reference.");
        return command_finish(0);
}

#define GLANCE_MS 200 /* a device without blocks is drained by then */

int run_drain(struct ask *a, const struct invocation *i, const struct command *c)
{
        struct drain_look l;
        bool is_late;
        int r;

        (void)c;
        if (i->n_arguments == 0)
                return command_usage("no device", NULL, i->use);
        if (ask_drain(a, i->arguments[0]) < 0 ||
            drain_wait(a, i->arguments[0], i->wait ? i->wait_ms : GLANCE_MS, &l) < 0)
                return command_complain(a);
        is_late = i->wait && !l.is_drained;
        r = command_finish(i->json ? show_print(stdout, drain_json(&l)) : drain_print(stdout, &l));
        drain_look_end(&l);
        if (r == EXIT_SUCCESS && is_late) {
                fprintf(stderr, "bfcctl: Timeout: the device is not drained yet; draining continues.\n");
                r = EXIT_TIMED_OUT;
        }
        return r;
}

int run_resume(struct ask *a, const struct invocation *i, const struct command *c)
{
        char *device;

        (void)c;
        if (i->n_arguments == 0)
                return command_usage("no device", NULL, i->use);
        if (ask_resume(a, i->arguments[0]) < 0)
                return command_complain(a);
        if (i->json)
                return command_finish(show_print(
                        stdout, show_document("resume", json_pack("{s:o}", "device",
                                                                  table_json_string(i->arguments[0])))));
        device = text_escape(i->arguments[0]);
        if (!device)
                return command_finish(-ENOMEM);
        printf("Device %s is resumed.\n", device);
        free(device);
        return command_finish(0);
}

/* A command that looks back. options: as those of struct tools_words. */
static int run_tool(const struct invocation *i, const struct command *c, const char *const options[])
{
        const char *words[8] = { "--bfcctl", "bfcctl" };
        char self[PATH_MAX];
        size_t n = 2;

        if (*process_own_path(self))
                words[1] = self;
        if (i->socket) {
                words[n++] = "--socket";
                words[n++] = i->socket;
        }
        if (i->json)
                words[n++] = "--json";
        if (table_look.is_wide)
                words[n++] = "--wide";
        words[n] = c->name;
        return tools_exec("bfcctl", c->name, &(struct tools_words){ words, options }, NULL);
}

int run_tensorboard(struct ask *a, const struct invocation *i, const struct command *c)
{
        uint64_t interval_ms = 0, n_steps;
        char text[32];

        (void)a;
        if (i->json)
                return command_usage("--json is not valid for", c->name, i->use);
        if (!i->logdir || !*i->logdir)
                return command_usage("no --logdir", NULL, i->use);
        if (i->interval && (!amount_time(i->interval, &interval_ms) || interval_ms == 0))
                return command_usage("wrong value for --interval", i->interval, AMOUNT_TIME);
        if (i->count && !command_read_id(i->count, &n_steps))
                return command_usage("wrong value for --count", i->count, "a number, as in --count 100");
        snprintf(text, sizeof(text), "%" PRIu64, interval_ms);
        return run_tool(i, c,
                        (const char *const[]){ "--logdir", i->logdir, "--interval-ms",
                                               i->interval ? text : NULL, "--count", i->count, "--tenant",
                                               i->tenant, NULL });
}

int run_snapshot(struct ask *a, const struct invocation *i, const struct command *c)
{
        (void)a;
        if (i->json)
                return command_usage("--json is not valid for", c->name, i->use);
        return run_tool(i, c,
                        (const char *const[]){ "--file", i->n_arguments > 0 ? i->arguments[0] : NULL, NULL });
}

/* The daemon need not run. */
int run_history(struct ask *a, const struct invocation *i, const struct command *c)
{
        (void)a;
        return run_tool(i, c,
                        (const char *const[]){ "--since", i->since, "--until", i->until, "--tenant",
                                               i->tenant, "--file", i->file, NULL });
}
