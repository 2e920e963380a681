/* bfcctl run: a program in a lease of its own.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The lease matches the process tree of bfcctl, which is the subreaper of the program's descendants (child.h). So it
 * needs neither systemd nor a control group, and the daemon ends it when bfcctl is killed. The lease exists before
 * the program begins. The connection to the daemon is closed while the program runs, so a restart of the daemon has
 * no effect on bfcctl.
 *
 * The program's libcuda.so.1 is our proxy (integrations/preload/), if that is installed: it is the first one in the library path. */
#include <dlfcn.h>
#include <errno.h>
#include <inttypes.h>
#include <libgen.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "ctl/amount.h"
#include "ctl/child.h"
#include "ctl/clock.h"
#include "ctl/command.h"
#include "ctl/process.h"
#include "ctl/progress.h"
#include "ctl/text.h"
#include "proto/paths.h"

#define NAME_BYTES       ASK_NAME_BYTES /* of a lease, a tenant or a partition, with the 0 */
#define MAX_NAME_TRIES   10
#define FIRST_PAUSE_MS   50
#define RELEASE_PAUSE_MS 5
#define LONGEST_PAUSE_MS 1000
#define END_MS           5000  /* for the daemon to be back, and for sessions of ended processes to end */
#define RELEASE_MS       60000 /* for the device to release the memory of an ending lease */
#define N_VARIABLES      5     /* at most, of the program */
#define MAX_NAMED        8     /* processes and sessions in a message */

struct run {
        const char *socket, *client_socket;
        char lease[NAME_BYTES], tenant[NAME_BYTES], partition[NAME_BYTES];
        bool has_own_name; /* the user's */
        uint64_t pid;      /* of this process, as the daemon sees it */
        uint64_t limit, reserve, grace_ms;
        bool evicts, is_quiet, is_strict, has_proxy;
        bool waits;
        int64_t wait_ms; /* -1: without a limit */
};

static void __attribute__((format(printf, 1, 2))) say(const char *format, ...)
{
        va_list arguments;

        fputs("bfcctl: ", stderr);
        va_start(arguments, format);
        vfprintf(stderr, format, arguments);
        va_end(arguments);
        fputc('\n', stderr);
}

static int complain(const struct ask *a)
{
        say("%s", a->error);
        return EXIT_RUN_FAILED;
}

/* ---- what is asked for ----------------------------------------------------- */

/* The option, else the environment; "": neither. False: too long. */
static bool choose(const char *option, const char *variable, char ret[static NAME_BYTES])
{
        const char *value = option ? option : getenv(variable);

        return snprintf(ret, NAME_BYTES, "%s", value ? value : "") < NAME_BYTES;
}

/* Not by ask_socket()'s rule: in a job of another bfcctl run, BFC_SOCKET is set. */
static const char *choose_socket(const char *variable, const char *path)
{
        const char *value = getenv(variable);

        return value && *value ? value : path;
}

static int read_run(const struct invocation *i, const struct command *c, struct run *ret)
{
        struct run run = { .socket = ask_manager_socket(i->socket),
                           .client_socket = choose_socket("BFC_SOCKET", PATHS_CLIENT_SOCKET) };

        if (i->json)
                return command_usage("--json is not valid for", c->name, i->use);
        if (i->run.strict && i->run.no_preload)
                return command_usage("--strict and --no-preload exclude each other", NULL, i->use);
        if (i->n_arguments == 0)
                return command_usage("no command to run", NULL, i->use);
        if (!i->lease.limit)
                return command_usage("no --limit", NULL, i->use);
        if (!amount_size(i->lease.limit, &run.limit) || run.limit == 0)
                return command_usage("wrong value for --limit", i->lease.limit,
                                     "a size, as in --limit 512MiB");
        if (i->lease.reserve && !amount_size(i->lease.reserve, &run.reserve))
                return command_usage("wrong value for --reserve", i->lease.reserve,
                                     "a size, as in --reserve 256MiB");
        if (i->lease.grace && !amount_time(i->lease.grace, &run.grace_ms))
                return command_usage("wrong value for --grace", i->lease.grace, AMOUNT_TIME);
        if (!choose(i->tenant, "BFC_TENANT", run.tenant))
                return command_usage("the tenant's name is too long", NULL, "it has at most 63 bytes");
        if (!choose(i->partition, "BFC_PARTITION", run.partition))
                return command_usage("the partition's name is too long", NULL, "it has at most 63 bytes");
        if (!choose(i->lease.name ? i->lease.name : "", "", run.lease))
                return command_usage("wrong value for --lease", i->lease.name, "it has at most 63 bytes");
        run.has_own_name = *run.lease;
        run.evicts = i->lease.evict || i->lease.grace;
        run.is_quiet = i->run.quiet != NULL;
        run.is_strict = i->run.strict != NULL;
        run.has_proxy = !i->run.no_preload;
        run.waits = i->wait != NULL;
        run.wait_ms = i->wait_ms;
        *ret = run;
        return EXIT_SUCCESS;
}

/* The user's tenant on this socket; the admin, the monitor and the lease socket have none. */
static int ask_tenant(struct ask *a, const char *socket, struct run *run)
{
        struct list *l;
        int r = ask_open(a, socket, NULL);

        if (r == 0)
                r = ask_list(a, BFCD__LIST__KIND__WHOAMI, &l);
        if (r == 0) {
                if (snprintf(run->tenant, NAME_BYTES, "%s", l->whoami->tenant) >= NAME_BYTES)
                        *run->tenant = '\0';
                list_free(l);
        }
        ask_close(a);
        return r;
}

/* The tenant of this user: on --socket, if that is a client socket, else on the client socket. */
static int find_tenant(struct run *run)
{
        struct ask a;

        if (ask_tenant(&a, run->socket, run) == 0 && *run->tenant)
                return EXIT_SUCCESS;
        if (ask_tenant(&a, run->client_socket, run) < 0)
                say("No --tenant, and this user's tenant is not known: %s", a.error);
        else if (!*run->tenant)
                say("No --tenant, and %s is not the client socket. Set BFC_SOCKET to it.",
                    run->client_socket);
        return *run->tenant ? EXIT_SUCCESS : EXIT_RUN_FAILED;
}

/* The partition in which the tenant has a quota, if it is the only one. */
static int find_partition(struct ask *a, struct run *run)
{
        char names[512] = "";
        size_t n = 0, n_text = 0;
        struct list *l;

        if (ask_list(a, BFCD__LIST__KIND__TENANTS, &l) < 0)
                return complain(a);
        if (ask_check_name(a, l, BFCD__LIST__KIND__TENANTS, run->tenant) < 0) {
                list_free(l);
                return complain(a);
        }
        for (size_t i = 0; i < l->n_tenants; i++) {
                if (strcmp(l->tenants[i]->tenant, run->tenant) != 0)
                        continue;
                snprintf(run->partition, NAME_BYTES, "%s", l->tenants[i]->partition);
                if (n_text < sizeof(names))
                        n_text += (size_t)snprintf(names + n_text, sizeof(names) - n_text, "%s%s",
                                                   n ? ", " : "", run->partition);
                n++;
        }
        list_free(l);
        if (n == 1)
                return EXIT_SUCCESS;
        say("No --partition, and tenant '%s' has quotas in several: %s", run->tenant, names);
        return EXIT_RUN_FAILED;
}

/* ---- the GPU --------------------------------------------------------------- */

static bool is_number(const char *text, size_t n)
{
        return n > 0 && strspn(text, "0123456789") >= n;
}

/* Whether CUDA_VISIBLE_DEVICES leaves out a device: the list ends at the first entry that is none. False also if
 * one has a number and the other a UUID, since only the driver knows both. */
static bool is_hidden(const char *device, const char *visible)
{
        bool has_number = strncmp(device, "cuda:", 5) == 0;
        const char *name = has_number ? device + 5 : device;

        if (strcmp(device, "host") == 0)
                return false;
        for (size_t n; *visible; visible += n + (visible[n] == ',')) {
                visible += strspn(visible, " ");
                n = strcspn(visible, ",");
                if (!is_number(visible, n) && strncmp(visible, "GPU-", 4) != 0 &&
                    strncmp(visible, "MIG-", 4) != 0)
                        return true;
                if (is_number(visible, n) != has_number)
                        return false;
                if (has_number ? strlen(name) == n && strncmp(visible, name, n) == 0
                               : strncmp(visible, name, n) == 0)
                        return false;
        }
        return true;
}

/* What a CUDA context of the program is charged, as far as it is known before. */
static uint64_t context_bytes(const Bfcd__PartitionRow *row)
{
        const char *own = getenv("BFC_CONTEXT");
        uint64_t n_bytes = 0;

        if (!own || !*own)
                return row->context_bytes;
        return amount_size(own, &n_bytes) ? n_bytes : 0;
}

/* The job would be refused only at its first call. */
static void warn(const struct run *run, const Bfcd__PartitionRow *row)
{
        const char *visible = getenv("CUDA_VISIBLE_DEVICES");
        char size[TEXT_MAX], limit[TEXT_MAX];
        uint64_t n_context = context_bytes(row);

        if (visible && is_hidden(row->device, visible))
                say("partition '%s' is on %s, and the program cannot see that GPU: "
                    "CUDA_VISIBLE_DEVICES is \"%s\"",
                    run->partition, row->device, visible);
        if (run->has_proxy && n_context >= run->limit && strcmp(row->device, "host") != 0 &&
            strcmp(row->growth, "on-demand") == 0)
                say("a CUDA context counts for %s, and --limit is %s: the program cannot use %s. Allow more "
                    "than that, or set BFC_CONTEXT=off",
                    text_size(n_context, size), text_size(run->limit, limit), row->device);
}

static void warn_of_trouble(struct ask *a, const struct run *run)
{
        struct list *l;

        if (ask_list(a, BFCD__LIST__KIND__PARTITIONS, &l) < 0)
                return;
        for (size_t i = 0; i < l->n_partitions; i++)
                if (strcmp(l->partitions[i]->name, run->partition) == 0)
                        warn(run, l->partitions[i]);
        list_free(l);
}

/* ---- the lease ------------------------------------------------------------- */

static const Bfcd__LeaseRow *find_lease(const struct list *l, const char *name)
{
        for (size_t i = 0; i < l->n_leases; i++)
                if (strcmp(l->leases[i]->name, name) == 0)
                        return l->leases[i];
        return NULL;
}

/* The sessions of a lease; *ret_n_ended: those of processes that have ended, whose memory the daemon reclaims just now. */
static size_t count_sessions(const struct list *l, const char *lease, size_t *ret_n_ended)
{
        size_t n = 0, n_ended = 0;

        for (size_t i = 0; i < l->n_sessions; i++)
                for (size_t k = 0; k < l->sessions[i]->n_leases; k++)
                        if (strcmp(l->sessions[i]->leases[k], lease) == 0) {
                                n++;
                                n_ended += child_has_ended((pid_t)l->sessions[i]->pid);
                        }
        *ret_n_ended = n_ended;
        return n;
}

/* The caller frees *ret with list_free(). */
static int list_leases(struct ask *a, struct list **ret)
{
        static const Bfcd__List__Kind kinds[] = { BFCD__LIST__KIND__LEASES, BFCD__LIST__KIND__SESSIONS };

        return ask_lists(a, kinds, sizeof(kinds) / sizeof(kinds[0]), ret);
}

/* Whether no session joins it any more. Of other PID namespaces it is not known whether a process has ended. */
static bool is_over(const struct run *run, const Bfcd__LeaseRow *row)
{
        return strcmp(row->state, "ending") == 0 ||
               (strcmp(row->match_kind, "pid") == 0 && run->pid == (uint64_t)getpid() &&
                child_has_ended((pid_t)strtol(row->match, NULL, 10)));
}

/* How long it may take until the lease disappears. 0: sessions or kept blocks use it, or it is gone. */
static uint64_t release_limit_ms(const struct run *run, const struct list *l)
{
        const Bfcd__LeaseRow *row = find_lease(l, run->lease);
        size_t n, n_ended;

        if (!row || !row->stats || !is_over(run, row))
                return 0;
        n = count_sessions(l, run->lease, &n_ended);
        if (n > 0)
                return n == n_ended ? END_MS : 0;
        return row->stats->bytes_in_use == 0 ? RELEASE_MS : 0;
}

/* Until a lease that is over has disappeared. Then its name and its memory are free for the next job. */
static int await_release(struct ask *a, const struct run *run)
{
        uint64_t begin_ms = clock_ms();
        unsigned wait_ms = RELEASE_PAUSE_MS;
        struct progress progress;
        bool again = true;
        struct list *l;
        int r = 0;

        progress_begin(&progress, NULL, "waiting for the release of the lease's memory", 0);
        while (again && (r = list_leases(a, &l)) == 0) {
                again = clock_ms() - begin_ms < release_limit_ms(run, l);
                list_free(l);
                if (again)
                        clock_pause(wait_ms);
                wait_ms = wait_ms < FIRST_PAUSE_MS ? 2 * wait_ms : wait_ms;
                progress_set(&progress, 0, 0);
        }
        progress_end(&progress);
        return r;
}

/* This process as the daemon sees it: it may be in another PID namespace. */
static int ask_own_pid(struct ask *a, uint64_t *ret)
{
        struct list *l;
        int r = ask_list(a, BFCD__LIST__KIND__WHOAMI, &l);

        if (r < 0)
                return r;
        *ret = l->whoami->pid;
        list_free(l);
        if (*ret != 0)
                return 0;
        snprintf(a->error, sizeof(a->error),
                 "bfcd does not see this process, which is in a PID namespace outside of bfcd's.");
        return -ESRCH;
}

static int create_once(struct ask *a, struct run *run)
{
        Bfcd__LeaseCreate lease = BFCD__LEASE_CREATE__INIT;
        int r = -EEXIST;

        lease.tenant = run->tenant;
        lease.partition = run->partition;
        lease.bytes_limit = run->limit;
        lease.bytes_reserve = run->reserve;
        lease.match_case = BFCD__LEASE_CREATE__MATCH_PID;
        lease.pid = run->pid;
        lease.evicts = run->evicts;
        lease.grace_ms = run->grace_ms;
        if (run->has_own_name) {
                lease.name = run->lease;
                r = ask_lease_create(a, &lease);
                if (r == -EEXIST && (r = await_release(a, run)) == 0) /* of an earlier job */
                        r = ask_lease_create(a, &lease);
                return r;
        }
        /* A lease of an earlier process with this pid may be ending. The pid is the one that the daemon sees: those of
         * containers repeat. */
        for (int i = 1; i <= MAX_NAME_TRIES && r == -EEXIST; i++) {
                char name[NAME_BYTES];

                snprintf(name, sizeof(name), i == 1 ? "run-%" PRIu64 : "run-%" PRIu64 "-%d", run->pid, i);
                r = ask_lease_name(a, name, run->lease);
                if (r < 0)
                        return r;
                lease.name = run->lease;
                r = ask_lease_create(a, &lease);
        }
        return r;
}

/* -ENOMEM: the reserve is not free now. */
static int create(struct ask *a, struct run *run)
{
        int64_t until_ms = run->wait_ms < 0 ? INT64_MAX : (int64_t)clock_ms() + run->wait_ms, left_ms;
        unsigned wait_ms = FIRST_PAUSE_MS;
        struct progress progress;
        int r = ask_own_pid(a, &run->pid);

        if (r < 0)
                return r;
        progress_begin(&progress, NULL, "waiting for the reserve", 0);
        while ((r = create_once(a, run)) == -ENOMEM && run->waits) {
                left_ms = until_ms - (int64_t)clock_ms();
                if (left_ms <= 0)
                        break;
                clock_pause(left_ms < wait_ms ? (unsigned)left_ms : wait_ms);
                wait_ms = 2 * wait_ms < LONGEST_PAUSE_MS ? 2 * wait_ms : LONGEST_PAUSE_MS;
                progress_set(&progress, 0, 0);
        }
        progress_end(&progress);
        return r;
}

/* The name that the user chose. */
static int name_lease(struct ask *a, struct run *run)
{
        char name[NAME_BYTES];

        memcpy(name, run->lease, sizeof(name));
        return ask_lease_name(a, name, run->lease);
}

static int make_lease(struct run *run)
{
        struct ask a;
        int status = EXIT_SUCCESS;

        if (!*run->tenant && (status = find_tenant(run)) != EXIT_SUCCESS)
                return status;
        if (ask_open(&a, run->socket, run->tenant) < 0) {
                status = complain(&a);
        } else if (a.monitor || a.scheduler) {
                say("\"run\" needs the admin socket or the client socket, and %s is the %s socket. Set "
                    "--socket or BFC_ADMIN_SOCKET to one of these",
                    a.socket, a.monitor ? "monitor" : "lease");
                status = EXIT_RUN_FAILED;
        } else if (run->has_own_name && name_lease(&a, run) < 0) {
                status = complain(&a);
        } else if (*run->partition || (status = find_partition(&a, run)) == EXIT_SUCCESS) {
                if (create(&a, run) < 0)
                        status = complain(&a);
                else
                        warn_of_trouble(&a, run);
        }
        if (!a.admin)
                run->client_socket = run->socket;
        ask_close(&a);
        return status;
}

/* ---- its end --------------------------------------------------------------- */

/* The lease as its program leaves it. The caller frees *ret with list_free(). */
static int look(struct ask *a, const struct run *run, struct list **ret)
{
        uint64_t until_ms = clock_ms() + END_MS;
        struct list *l;
        size_t n_ended;
        int r;

        while ((r = list_leases(a, &l)) == 0 && (count_sessions(l, run->lease, &n_ended), n_ended > 0) &&
               clock_ms() < until_ms) {
                list_free(l);
                clock_pause(FIRST_PAUSE_MS);
        }
        if (r == 0)
                *ret = l;
        return r;
}

static void print_summary(const struct run *run, const Bfcd__LeaseRow *row)
{
        char peak[TEXT_MAX], limit[TEXT_MAX], blocks[TEXT_MAX], left[TEXT_MAX], waited[TEXT_MAX];
        const Bfcd__Statistics *s = row->stats;

        if (!s)
                return;
        say("lease '%s': peak %s of %s, %s in blocks; requests waited %s in total; %" PRIu64
            " refused; %s left",
            run->lease, text_size(s->lifetime_peak_bytes_reserved, peak), text_size(s->bytes_limit, limit),
            text_size(s->lifetime_peak_bytes_in_use, blocks), text_time(row->waited_ns, waited),
            s->num_refusals, text_size(s->bytes_in_use, left));
}

static void print_processes(void)
{
        struct child_process named[MAX_NAMED];
        char *name;
        size_t n;

        if (child_remaining(named, MAX_NAMED, &n) < 0 || n == 0)
                return;
        fprintf(stderr, "bfcctl: %zu %s of the job still %s:", n, n == 1 ? "process" : "processes",
                n == 1 ? "runs" : "run");
        for (size_t i = 0; i < n && i < MAX_NAMED; i++) {
                name = text_escape(named[i].name);
                fprintf(stderr, "%s %d (%s)", i ? "," : "", (int)named[i].pid, name ? name : "");
                free(name);
        }
        fputs(n > MAX_NAMED ? ", ...\n" : "\n", stderr);
}

static void print_rest(const struct run *run, const Bfcd__LeaseEndReply *rest)
{
        char size[TEXT_MAX], *name;

        if (rest->num_sessions == 0)
                return;
        fprintf(stderr, "bfcctl: lease '%s' is still used by %" PRIu64 " %s", run->lease, rest->num_sessions,
                rest->num_sessions == 1 ? "session" : "sessions");
        for (size_t i = 0; i < rest->n_sessions && i < MAX_NAMED; i++) {
                name = text_escape(rest->sessions[i]->name);
                fprintf(stderr, "%s session %" PRIu64 " (pid %" PRIu64 ", %s): %s", i ? ";" : ":",
                        rest->sessions[i]->session_id, rest->sessions[i]->pid, name ? name : "",
                        text_size(rest->sessions[i]->bytes_in_use, size));
                free(name);
        }
        fputs(rest->num_sessions > MAX_NAMED ? "; ...\n" : "\n", stderr);
        if (run->evicts && run->grace_ms == 0)
                say("these sessions are evicted now");
        else if (run->evicts)
                say("these sessions are evicted in %s", text_duration(run->grace_ms, size));
        else
                say("these sessions keep their memory until they end, and get no more");
}

/* The daemon may be restarting. */
static int reopen(struct ask *a, const struct run *run)
{
        uint64_t until_ms = clock_ms() + END_MS;
        int r;

        while ((r = ask_open(a, run->socket, run->tenant)) < 0 && clock_ms() < until_ms) {
                ask_close(a);
                clock_pause(FIRST_PAUSE_MS);
        }
        return r;
}

/* prints: false if the program did not begin. */
static void end_lease(const struct run *run, bool prints)
{
        Bfcd__LeaseEnd question = BFCD__LEASE_END__INIT;
        const Bfcd__LeaseRow *row;
        Bfcd__Reply *reply = NULL;
        struct list *l = NULL;
        struct ask a;
        int r = reopen(&a, run);

        if (r == 0)
                r = look(&a, run, &l);
        question.name = (char *)(uintptr_t)run->lease;
        question.evicts = run->evicts;
        question.grace_ms = run->grace_ms;
        row = r == 0 ? find_lease(l, run->lease) : NULL;
        if (r == 0 && !row)
                say("lease '%s' has been ended before the job", run->lease);
        if (row)
                r = ask_lease_end(&a, &question, &reply);
        if (r < 0)
                say("lease '%s' was not ended: %s bfcd ends it when it finds that process %d has ended.",
                    run->lease, a.error, (int)getpid());
        if (reply)
                print_rest(run, reply->lease_end);
        if (row && prints && !run->is_quiet)
                print_summary(run, row);
        if (reply) {
                (void)await_release(&a, run);
                bfcd__reply__free_unpacked(reply, NULL);
        }
        list_free(l);
        ask_close(&a);
}

/* ---- the program ----------------------------------------------------------- */

/* The program is in the folder of its installation. Seen from another one, PRELOAD_FROM_BIN may be where anyone makes
 * folders, as it is for /tmp/build/bfcctl. */
static bool is_installed(const char *folder)
{
        size_t n = strlen(folder), n_bin = strlen("/" BIN_FOLDER);

        return n >= n_bin && strcmp(folder + n - n_bin, "/" BIN_FOLDER) == 0;
}

/* The folder of the proxy: BFC_PRELOAD, or the one that was installed with this program. The caller frees it. NULL: there
 * is no proxy, or LD_LIBRARY_PATH cannot have its folder. */
static char *find_proxy(void)
{
        char self[PATH_MAX], folder[PATH_MAX], path[PATH_MAX], *ret;
        const char *given = getenv("BFC_PRELOAD");
        int n;

        if (given && *given)
                n = snprintf(folder, sizeof(folder), "%s", given);
        else if (*process_own_path(self) && is_installed(dirname(self)))
                n = snprintf(folder, sizeof(folder), "%s/" PRELOAD_FROM_BIN, self);
        else
                return NULL;
        if ((size_t)n >= sizeof(folder) ||
            (size_t)snprintf(path, sizeof(path), "%s/libcuda.so.1", folder) >= sizeof(path) ||
            access(path, R_OK) < 0)
                return NULL;
        ret = realpath(folder, NULL);
        if (ret && strpbrk(ret, ":;")) { /* they separate folders there */
                free(ret);
                return NULL;
        }
        return ret;
}

/* Programs that ask NVML need it only if they can load it. */
static bool has_nvml(void)
{
        const char *path = getenv("BFC_NVML_LIBRARY");
        void *library;

        if (path && *path)
                return access(path, R_OK) == 0;
        library = dlopen("libnvidia-ml.so.1", RTLD_LAZY | RTLD_LOCAL);
        if (library)
                dlclose(library);
        return library;
}

/* With the proxies first: of NVML only where there is one. The caller frees it. NULL: there is no memory. */
static char *make_library_path(const char *folder)
{
        const char *path = getenv("LD_LIBRARY_PATH"), *rest = path ? path : "", *colon = *rest ? ":" : "";
        char *text;
        int n = has_nvml() ? asprintf(&text, "%s:%s/nvml%s%s", folder, folder, colon, rest)
                           : asprintf(&text, "%s%s%s", folder, colon, rest);

        return n < 0 ? NULL : text;
}

/* The variables of the program; how many. *ret_path: to be freed. -ENOENT: there is no proxy, and the
 * run is strict. */
static int choose_variables(const struct run *run, struct child_variable ret[static N_VARIABLES],
                            char **ret_path)
{
        char *folder = run->has_proxy ? find_proxy() : NULL,
             *path = folder ? make_library_path(folder) : NULL;
        int n = folder && !path ? -ENOMEM : 0;

        free(folder);
        if (n < 0)
                return n;
        if (run->is_strict && !path)
                return -ENOENT;
        ret[n++] = (struct child_variable){ "BFC_SOCKET", run->client_socket };
        ret[n++] = (struct child_variable){ "BFC_PARTITION", run->partition };
        ret[n++] = (struct child_variable){ "BFC_TENANT", run->tenant };
        if (path)
                ret[n++] = (struct child_variable){ "LD_LIBRARY_PATH", path };
        if (run->is_strict)
                ret[n++] = (struct child_variable){ "BFC_STRICT", "1" };
        *ret_path = path;
        return n;
}

static int start_program(const struct run *run, char *const *argv, struct child *ret, int *ret_exec_error)
{
        struct child_variable variables[N_VARIABLES];
        char *path = NULL;
        int r = choose_variables(run, variables, &path);

        if (r >= 0)
                r = child_start(argv, variables, (size_t)r, ret, ret_exec_error);
        free(path);
        return r;
}

static int run_in_lease(const struct run *run, char *const *argv)
{
        struct child child;
        int error, status, r;

        r = start_program(run, argv, &child, &error);
        if (r < 0 || error != 0) {
                if (r == -ENOENT)
                        say("--strict needs the proxy of libcuda.so.1, which is not installed");
                else if (r < 0)
                        say("The command cannot be started: %s", strerror(-r));
                else
                        say("%s: %s", argv[0], strerror(error));
                end_lease(run, false);
                if (r < 0)
                        return EXIT_RUN_FAILED;
                return error == ENOENT ? EXIT_NOT_FOUND : EXIT_NOT_EXECUTABLE;
        }
        r = child_wait(&child, &status);
        child_end(&child);
        if (r < 0)
                say("The end of the command was not seen: %s", strerror(-r));
        print_processes();
        end_lease(run, true);
        return r < 0 ? EXIT_RUN_FAILED : child_exit_as(status);
}

int run_run(struct ask *a, const struct invocation *i, const struct command *c)
{
        struct run run;
        int r;

        (void)a;
        if (read_run(i, c, &run) != EXIT_SUCCESS)
                return EXIT_RUN_FAILED;
        r = child_adopt();
        if (r < 0) {
                say("This process cannot become a subreaper: %s", strerror(-r));
                return EXIT_RUN_FAILED;
        }
        r = make_lease(&run);
        return r == EXIT_SUCCESS ? run_in_lease(&run, i->arguments) : r;
}
