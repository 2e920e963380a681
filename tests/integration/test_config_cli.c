/* bfcd as a command: --check, invalid configs, the owner of a socket's path, and the end.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <pwd.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "tests/integration/tools.h"

static const struct rig_config defaults;

static void write_file(const char *folder, const char *name, const char *text)
{
        char path[192];
        FILE *out;

        snprintf(path, sizeof(path), "%s/%s", folder, name);
        out = fopen(path, "we");
        ck_assert_ptr_nonnull(out);
        fputs(text, out);
        ck_assert_int_eq(fclose(out), 0);
}

/* Starts it in the foreground: only for what must not start. If it does, it
 * is ended after 10 s, with status 0. */
static int start_expecting_failure(const char *path, char **ret_errors)
{
        const char *argv[] = {
                "/usr/bin/timeout", "--preserve-status", "10", program_bfcd(), "--config", path, NULL
        };

        return program_run(argv, NULL, ret_errors);
}

static bool all_lines_have(const char *text, const char *part)
{
        for (size_t n; *text; text += n + (text[n] == '\n')) {
                n = strcspn(text, "\n");
                if (!memmem(text, n, part, strlen(part)))
                        return false;
        }
        return true;
}

/* ---- --check -------------------------------------------------------------- */

TEST(a_good_file_passes)
{
        struct rig *rig = rig_folder();
        char *errors;

        rig_rewrite_config(rig, &defaults);
        ck_assert_int_eq(program_check(rig->config_path, &errors), 0);
        if (rig_device() == ON_HOST)
                ck_assert_msg(all_lines_have(errors, "no pages of 2 MiB"), "%s", errors);
        else
                ck_assert_msg(all_lines_have(errors, ": warning: "), "%s", errors);
        ck_assert_msg(access(rig->socket, F_OK) < 0, "--check made a socket");
        free(errors);
        rig_discard(rig);
}

static const char bad_config[] = "socket: {path: /tmp/x/bfcd.sock, mode: \"0666\"}\n"        /* 1 */
                                 "admin_socket: {path: /tmp/x/admin.sock, mode: \"0600\"}\n" /* 2 */
                                 "colour: blue\n"                                            /* 3 */
                                 "timeouts: {quarantine: soon}\n"                            /* 4 */
                                 "devices:\n"                                                /* 5 */
                                 "  - id: host\n"                                            /* 6 */
                                 "    size: 1 elephant\n"                                    /* 7 */
                                 "    partitions:\n"                                         /* 8 */
                                 "      - {name: train, limit: 64MiB, growth: sometimes}\n"  /* 9 */
                                 "tenants:\n"                                                /* 10 */
                                 "  - name: red\n"                                           /* 11 */
                                 "    match: {uid: [minus]}\n"                               /* 12 */
                                 "    quotas: [{partition: nowhere, limit: 16MiB}]\n";       /* 13 */

/* One line "PATH:LINE:COLUMN: something" for this line of the file. */
static void assert_error_at(const char *errors, const char *path, unsigned line)
{
        char start[160];
        const char *at;
        unsigned column;

        snprintf(start, sizeof(start), "%s:%u:", path, line);
        at = strstr(errors, start);
        ck_assert_msg(at, "no error at line %u in:\n%s", line, errors);
        ck_assert_msg(at == errors || at[-1] == '\n', "the error at line %u begins inside a line", line);
        ck_assert_msg(sscanf(at + strlen(start), "%u:", &column) == 1 && column > 0,
                      "no column in the error at line %u:\n%s", line, errors);
}

TEST(all_errors_of_a_file_are_reported)
{
        static const unsigned lines[] = { 3, 4, 7, 9, 12, 13 };
        struct rig *rig = rig_folder();
        char *errors;
        int status;

        rig_write_config(rig, bad_config);
        status = program_check(rig->config_path, &errors);
        ck_assert_int_eq(status, 1);
        for (size_t i = 0; i < sizeof(lines) / sizeof(lines[0]); i++)
                assert_error_at(errors, rig->config_path, lines[i]);
        free(errors);
        /* And it does not start with it, for the same reasons. */
        status = start_expecting_failure(rig->config_path, &errors);
        ck_assert_int_eq(status, 78);
        assert_error_at(errors, rig->config_path, 3);
        assert_error_at(errors, rig->config_path, 13);
        free(errors);
        rig_discard(rig);
}

#define NO_FILE "No such file or directory; bfcd.yaml(5) has an example"

/* Said in one line, that begins with the file; a start may be tried again. */
static void assert_unreadable(const char *path, const char *why)
{
        char line[192], *errors;

        snprintf(line, sizeof(line), "%s:1:1: cannot be read: %s\n", path, why);
        ck_assert_int_eq(program_check(path, &errors), 1);
        ck_assert_str_eq(errors, line);
        free(errors);
        ck_assert_int_eq(start_expecting_failure(path, &errors), 1);
        ck_assert_str_eq(errors, line);
        free(errors);
}

static void assert_erroneous(struct rig *rig, const char *text, unsigned line)
{
        char *errors;

        rig_write_config(rig, text);
        ck_assert_int_eq(program_check(rig->config_path, &errors), 1);
        assert_error_at(errors, rig->config_path, line);
        free(errors);
        ck_assert_int_eq(start_expecting_failure(rig->config_path, &errors), 78);
        assert_error_at(errors, rig->config_path, line);
        free(errors);
}

TEST(unreadable_files_are_reported)
{
        struct rig *rig = rig_folder();
        char path[96];

        assert_unreadable("/nowhere/bfcd.yaml", NO_FILE);
        assert_unreadable(rig->folder, "Is a directory");
        snprintf(path, sizeof(path), "%s/fifo", rig->folder);
        ck_assert_int_eq(mkfifo(path, 0600), 0);
        assert_unreadable(path, "not a regular file");
        assert_erroneous(rig, "", 1);
        assert_erroneous(rig, "devices: [unclosed\n", 2);
        rig_discard(rig);
}

/* The daemon runs as another user than the root that checks. */
TEST(the_services_user_reads_the_files)
{
        struct rig *rig = rig_folder();
        char folder[128], line[256], *errors;
        const char *argv[] = { program_bfcd(), "--check", rig->config_path, "--user", "nobody", NULL, NULL };

        if (geteuid() != 0 || !getpwnam("nobody")) {
                printf("# skipped: this needs root and the user nobody\n");
                rig_discard(rig);
                return;
        }
        rig_rewrite_config(rig, &defaults);
        snprintf(line, sizeof(line), "%s:1:1: cannot be read by user 'nobody': Permission denied\n",
                 rig->config_path);
        ck_assert_int_eq(chmod(rig->config_path, 0600), 0);
        ck_assert_int_eq(chmod(rig->folder, 0711), 0);
        ck_assert_int_eq(program_run(argv, NULL, &errors), 1);
        text_has(errors, line);
        /* Now it is the socket's folder, which is only a warning. */
        ck_assert_int_eq(chmod(rig->config_path, 0644), 0);
        ck_assert_int_eq(program_run(argv, NULL, &errors), 0);
        snprintf(line, sizeof(line), "warning: user 'nobody' cannot create the socket %s: ", rig->socket);
        text_has(errors, line);
        argv[5] = "--strict";
        ck_assert_int_eq(program_run(argv, NULL, NULL), 1);
        argv[5] = NULL;
        /* And a file beside it. */
        snprintf(folder, sizeof(folder), "%s/conf.d", rig->folder);
        ck_assert_int_eq(mkdir(folder, 0700), 0);
        ck_assert_int_eq(program_run(argv, NULL, &errors), 1);
        snprintf(line, sizeof(line), "%s:1:1: cannot be read by user 'nobody'", folder);
        text_has(errors, line);
        rig_discard(rig);
}

/* What the machine lacks for the pages of host memory. */
TEST(pages_are_checked)
{
        static const struct {
                const char *key, *said;
                int status;
        } cases[] = {
                { "numa_node: 1023", "this machine has no NUMA node 1023", 1 },
                { "growth: on-demand", NULL, 0 },
        };
        struct rig *rig = rig_folder();
        char text[512], path[192], *errors;

        snprintf(path, sizeof(path), "%s/pages.yaml", rig->folder);
        for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
                const char *argv[] = { program_bfcd(), "--check", path, NULL };

                snprintf(text, sizeof(text),
                         "devices:\n"
                         "  - {id: host, size: 512GiB, partitions: [{name: train, limit: 512GiB, %s}]}\n"
                         "tenants:\n"
                         "  - {name: vision, match: {uid: 1000}, quotas: [{partition: train}]}\n",
                         cases[i].key);
                write_file(rig->folder, "pages.yaml", text);
                ck_assert_int_eq(program_run(argv, NULL, &errors), cases[i].status);
                if (cases[i].said)
                        ck_assert_msg(strstr(errors, cases[i].said), "%s", errors);
                else
                        ck_assert_msg(!strstr(errors, "2 MiB"), "%s", errors);
                free(errors);
        }
        rig_discard(rig);
}

TEST(the_default_file_is_checked)
{
        const char *argv[] = { program_bfcd(), "--check", NULL };
        char *errors;

        if (access("/etc/bfcd", F_OK) == 0)
                return; /* of a bfcd that is installed here */
        ck_assert_int_eq(program_run(argv, NULL, &errors), 1);
        ck_assert_str_eq(errors, "/etc/bfcd/bfcd.yaml:1:1: cannot be read: " NO_FILE "\n");
        free(errors);
}

/* Other options may stand between --check and its file. */
TEST(the_file_may_come_last)
{
        const char *last[] = { program_bfcd(), "--check", "--strict", "/nonexistent/x.yaml", NULL };
        const char *two[] = { program_bfcd(), "--check", "/nonexistent/x.yaml", "--strict", "y.yaml", NULL };
        char *errors;

        ck_assert_int_eq(program_run(last, NULL, &errors), 1);
        ck_assert_str_eq(errors, "/nonexistent/x.yaml:1:1: cannot be read: " NO_FILE "\n");
        free(errors);
        ck_assert_int_eq(program_run(two, NULL, &errors), 2);
        ck_assert_str_eq(errors, "bfcd: 'y.yaml' is not an option; try 'bfcd --help'\n");
        free(errors);
}

/* ---- GPUs ------------------------------------------------------------------ */

/* Two of the fake driver's, of different size. */
static const char gpu_config[] = "devices:\n"                                              /* 1 */
                                 "  - id: cuda:0\n"                                        /* 2 */
                                 "    headroom: 16MiB\n"                                   /* 3 */
                                 "    partitions:\n"                                       /* 4 */
                                 "      - {name: train, limit: 50%, share: fd}\n"          /* 5 */
                                 "      - {name: infer, limit: 56MiB, share: fd}\n"        /* 6 */
                                 "  - id: cuda:1\n"                                        /* 7 */
                                 "    partitions: [{name: small, limit: 100%}]\n"          /* 8 */
                                 "tenants:\n"                                              /* 9 */
                                 "  - name: red\n"                                         /* 10 */
                                 "    match: {uid: 0}\n"                                   /* 11 */
                                 "    quotas:\n"                                           /* 12 */
                                 "      - {partition: train, limit: 50%, reserve: 8MiB}\n" /* 13 */
                                 "      - {partition: small, max_sessions: 1}\n";          /* 14 */

static void set_gpus(const char *devices, const char *context_bytes)
{
        setenv("BFCD_KEEP", "0", 1); /* the configs have no socket of their own */
        setenv("FAKE_CUDA_DEVICES", devices, 1);
        setenv("FAKE_CUDA_CONTEXT_BYTES", context_bytes, 1);
}

static void assert_says(const char *errors, const char *path, const char *line)
{
        char text[768];

        snprintf(text, sizeof(text), "%s:%s", path, line);
        ck_assert_msg(strstr(errors, text) != NULL, "no '%s' in:\n%s", text, errors);
}

/* What is wrong with the config for these GPUs: --check fails, and so does the
 * start, with a status that says whether trying again is of use. */
static void assert_gpus_fail(struct rig *rig, const char *text, int start_status, const char *line)
{
        char *errors;

        rig_write_config(rig, text);
        ck_assert_int_eq(program_check(rig->config_path, &errors), 1);
        assert_says(errors, rig->config_path, line);
        ck_assert_msg(all_lines_have(errors, rig->config_path), "%s", errors);
        free(errors);
        ck_assert_int_eq(start_expecting_failure(rig->config_path, &errors), start_status);
        assert_says(errors, rig->config_path, line);
        free(errors);
}

/* The text with one piece replaced; the caller frees. */
static char *edit(const char *text, const char *old, const char *new)
{
        const char *at = strstr(text, old);
        char *edited;

        ck_assert_ptr_nonnull(at);
        ck_assert_int_gt(asprintf(&edited, "%.*s%s%s", (int)(at - text), text, new, at + strlen(old)), 0);
        return edited;
}

TEST(gpus_are_checked)
{
        struct rig *rig = rig_folder();
        char *errors, *text;

        set_gpus("128MiB,48MiB", "0");
        rig_write_config(rig, gpu_config);
        ck_assert_int_eq(program_check(rig->config_path, &errors), 0);
        assert_says(errors, rig->config_path,
                    "3:15: warning: device 'cuda:0': max_sessions allows 1024 processes");
        assert_says(errors, rig->config_path,
                    "7:9: warning: device 'cuda:1': max_sessions allows 1 processes");
        assert_says(errors, rig->config_path,
                    "8:18: warning: partition 'small' has the default, share: cuda-ipc");
        assert_says(errors, rig->config_path,
                    "14:9: warning: limit 42MiB in partition 'small' is allocated in extents");
        ck_assert_msg(all_lines_have(errors, ": warning: "), "%s", errors);
        free(errors);

        text = edit(gpu_config, "limit: 56MiB", "limit: 58MiB");
        assert_gpus_fail(
                rig, text, 78,
                "6:30: the partitions' limits sum to 114MiB; device 'cuda:0' has 112MiB for partitions "
                "(128MiB minus a headroom of 16MiB)\n");
        free(text);
        text = edit(gpu_config, "cuda:1", "GPU-fa4ec0da-0000-4000-8000-000000000001");
        assert_gpus_fail(
                rig, text, 78,
                "7:9: device 'GPU-fa4ec0da-0000-4000-8000-000000000001' is the same GPU as 'cuda:0' on "
                "line 2; ");
        free(text);
        rig_discard(rig);
}

/* Each GPU for itself: one that allows MPS is served beside one that says nothing. */
TEST(mps_is_refused_where_it_is_not_allowed)
{
        struct rig *rig = rig_folder();
        char *text, *errors;

        set_gpus("128MiB,48MiB", "0");
        setenv("FAKE_CUDA_MPS", "/tmp/nvidia-mps", 1);
        assert_gpus_fail(
                rig, gpu_config, 1,
                "2:9: device cuda:0: it is under MPS; with mps: allow the GPU is served nevertheless");
        assert_gpus_fail(rig, gpu_config, 1, "7:9: device cuda:1: it is under MPS");
        text = edit(gpu_config, "  - id: cuda:1\n", "  - id: cuda:1\n    mps: maybe\n");
        assert_gpus_fail(rig, text, 78, "8:10: mps 'maybe' is not known; write refuse or allow\n");
        free(text);
        text = edit(gpu_config, "  - id: cuda:1\n", "  - id: cuda:1\n    mps: allow\n");
        rig_write_config(rig, text);
        free(text);
        ck_assert_int_eq(program_check(rig->config_path, &errors), 0);
        assert_says(errors, rig->config_path,
                    "2:5: warning: device 'cuda:0' refuses MPS and device 'cuda:1' allows");
        ck_assert_msg(all_lines_have(errors, ": warning: "), "%s", errors);
        free(errors);
        unsetenv("FAKE_CUDA_MPS");
        rig_discard(rig);
}

/* The config is right, the machine is not, for now: not status 78. */
TEST(missing_gpus_are_reported)
{
        struct rig *rig = rig_folder();

        set_gpus("128MiB", "0");
        assert_gpus_fail(rig, gpu_config, 1, "7:9: device cuda:1: no such device: the CUDA driver shows 1\n");
        set_gpus("", "0");
        assert_gpus_fail(rig, gpu_config, 1, "2:9: device cuda:0: the CUDA driver finds no GPU\n");
        rig_discard(rig);
}

/* One device, one line, and nothing that follows from it. */
TEST(a_missing_driver_is_reported)
{
        struct rig *rig = rig_folder();
        char *errors, *text;
        int status;

        text = edit(gpu_config, "  - id: cuda:1\n    partitions: [{name: small, limit: 100%}]\n", "");
        *strstr(text, "      - {partition: small") = '\0';
        rig_write_config(rig, text);
        free(text);
        unsetenv("LD_LIBRARY_PATH");
        status = program_check(rig->config_path, &errors);
        if (status != 0) { /* else this machine has a GPU */
                ck_assert_int_eq(status, 1);
                assert_says(errors, rig->config_path, "2:9: device cuda:0: ");
                ck_assert_ptr_eq(strchr(errors, '\n'), errors + strlen(errors) - 1);
        }
        free(errors);
        rig_discard(rig);
}

/* bfcd's own context takes its share before anything is promised. */
TEST(full_gpus_are_reported)
{
        char *text = edit(gpu_config, "name: small,", "name: small, growth: preallocate,");
        struct rig *rig = rig_folder();
        char *errors;

        set_gpus("128MiB,48MiB", "8MiB");
        rig_write_config(rig, text);
        ck_assert_int_eq(program_check(rig->config_path, &errors), 0);
        assert_says(
                errors, rig->config_path,
                "7:9: warning: device 'cuda:1' has 40MiB free now; its guarantees and preallocating partitions "
                "need 42MiB when bfcd starts\n");
        free(errors);
        ck_assert_int_eq(start_expecting_failure(rig->config_path, &errors), 1);
        assert_says(
                errors, rig->config_path,
                "7:9: device 'cuda:1' has 40MiB free now; its guarantees and preallocating partitions need 42MiB: "
                "nvidia-smi lists the processes that use it\n");
        free(errors);
        free(text);
        rig_discard(rig);
}

/* ---- options -------------------------------------------------------------- */

/* A command line that makes no sense: status 2, and the first line says why. */
static void assert_usage(const char *const *argv, const char *first_line)
{
        char *errors;
        int status = program_run(argv, NULL, &errors);

        ck_assert_msg(status == 2, "bfcd %s: status %d: %s", argv[1], status, errors);
        ck_assert_msg(strstr(errors, first_line) != NULL, "expected '%s', got '%s'", first_line, errors);
        free(errors);
}

TEST(unknown_options_are_refused)
{
        static const char *const wrong[][3] = {
                { "--frobnicate", NULL, "bfcd: unrecognized option '--frobnicate'\n" },
                { "-x", NULL, "bfcd: invalid option -- 'x'\n" },
                { "--strict", NULL, "bfcd: --strict and --user are only for --check\n" },
                { "--check", "--user=no such", "bfcd: --user 'no such': " },
                { "--stop-keepers", "--config=/x",
                  "bfcd: --stop-keepers reads no configuration: give it the path " },
                { "--external-keepers", "--no-memory",
                  "bfcd: --external-keepers is not for --no-memory and " },
                { "--external-keepers", "--stop-keepers",
                  "bfcd: --external-keepers is not for --no-memory and " },
                { "--version=1", NULL, "bfcd: option '--version' doesn't allow an argument\n" },
                { "stray", NULL, "bfcd: 'stray' is not an option; try 'bfcd --help'\n" },
                { "--log-level", "loud", "bfcd: --log-level 'loud': must be error, " },
                { "--strict", "--strict", "bfcd: an option is given twice: --strict; give it once\n" },
        };
        const char *version[] = { program_bfcd(), "--version", NULL };
        const char *help[] = { program_bfcd(), "-h", NULL };
        char *out;

        for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
                const char *argv[] = { program_bfcd(), wrong[i][0], wrong[i][1], NULL };

                assert_usage(argv, wrong[i][2]);
        }
        ck_assert_int_eq(program_run(version, &out, NULL), 0);
        ck_assert_ptr_nonnull(strstr(out, bfc_version())); /* daemon and library are built together */
        free(out);
        ck_assert_int_eq(program_run(help, &out, NULL), 0);
        ck_assert_ptr_nonnull(strstr(out, "--config"));
        text_has(out, "--check");
}

/* ---- conf.d --------------------------------------------------------------- */

TEST(tenants_are_read_from_a_folder)
{
        struct rig *rig = rig_folder();
        char folder[128], tenant[256], *errors;
        bfc_client *client;

        rig_rewrite_config(rig, &defaults);
        snprintf(folder, sizeof(folder), "%s/conf.d", rig->folder);
        ck_assert_int_eq(mkdir(folder, 0755), 0);
        snprintf(tenant, sizeof(tenant), "tenants:\n" TENANT("late", "%u", "train, limit: 4MiB"),
                 (unsigned)getuid());
        write_file(folder, "20-late.yaml", tenant);
        write_file(folder, "notes.txt", "this is no YAML: [\n"); /* not its business */
        ck_assert_int_eq(program_check(rig->config_path, NULL), 0);
        rig->pid = rig_spawn_daemon(rig);
        ck_assert(WAIT_FOR(rig_answers(rig), SETTLE_MS));
        client = client_open(rig, "late", NULL);
        ck_assert_str_eq(bfc_tenant(client), "late");
        bfc_disconnect(client);
        rig_terminate(rig);

        write_file(folder, "30-wrong.yaml", "tenants:\n  - name: late\n    quotas: 7\n");
        ck_assert_int_gt(program_check(rig->config_path, &errors), 0);
        text_has(errors, "30-wrong.yaml:");
        rig_discard(rig);
}

/* ---- sockets -------------------------------------------------------------- */

RIG_TEST(a_second_daemon_does_not_start, defaults)
{
        bfc_client *client = client_open(rig, NULL, NULL);
        char *errors;
        int status;
        void *p;

        ck_assert_ok(bfc_malloc(client, 1 * MIB, &p));
        status = start_expecting_failure(rig->config_path, &errors);
        ck_assert_int_eq(status, 1);
        ck_assert_msg(strstr(errors, rig->socket), "it does not say which socket: %s", errors);
        free(errors);
        ck_assert_ok(bfc_free(client, p)); /* the first is as it was */
        bfc_disconnect(client);
        client = client_open(rig, NULL, NULL);
        bfc_disconnect(client);
}

static void leave_a_stale_socket(const char *path)
{
        struct sockaddr_un address = { .sun_family = AF_UNIX };
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

        ck_assert_uint_lt(strlen(path), sizeof(address.sun_path));
        memcpy(address.sun_path, path, strlen(path) + 1);
        ck_assert_int_eq(bind(fd, (struct sockaddr *)&address, sizeof(address)), 0);
        close(fd);
        ck_assert_int_eq(access(path, F_OK), 0);
}

TEST(a_stale_socket_is_replaced)
{
        struct rig *rig = rig_folder();
        struct stat st;

        rig_rewrite_config(rig, &defaults);
        leave_a_stale_socket(rig->socket);
        leave_a_stale_socket(rig->admin_socket);
        rig->pid = rig_spawn_daemon(rig);
        ck_assert(WAIT_FOR(rig_answers(rig), SETTLE_MS));
        bfc_disconnect(client_open(rig, NULL, NULL));
        ck_assert_int_eq(stat(rig->socket, &st), 0);
        ck_assert_int_eq(st.st_mode & 07777, 0666);
        ck_assert_int_eq(stat(rig->admin_socket, &st), 0);
        ck_assert_int_eq(st.st_mode & 07777, 0600);
        rig_terminate(rig);
        rig_discard(rig);
}

/* A wrong path in the config must not delete a file. */
TEST(a_file_that_is_no_socket_is_kept)
{
        struct rig *rig = rig_folder();
        char *errors, *kept;
        int status;

        rig_rewrite_config(rig, &defaults);
        write_file(rig->folder, "bfcd.sock", "precious\n");
        status = start_expecting_failure(rig->config_path, &errors);
        ck_assert(status > 0 && status < 128);
        text_has(errors, rig->socket);
        kept = file_text(rig->socket);
        ck_assert_ptr_nonnull(kept);
        ck_assert_str_eq(kept, "precious\n");
        free(kept);
        rig_discard(rig);
}

TEST(a_new_daemon_starts_after_a_kill)
{
        struct rig *rig = rig_start(&defaults);
        bfc_client *client = client_open(rig, NULL, NULL);
        void *p;

        ck_assert_ok(bfc_malloc(client, 1 * MIB, &p));
        memset(p, 1, 1 * MIB);
        child_kill(rig->pid);
        rig->admin = raw_close(rig->admin);
        ck_assert_int_eq(bfc_malloc(client, 256, &p), -ECONNRESET);
        ck_assert_int_eq(client_refused(rig, NULL, NULL) < 0, 1);
        bfc_disconnect(client);
        rig->pid = rig_spawn_daemon(rig);
        ck_assert(WAIT_FOR(rig_answers(rig), SETTLE_MS));
        client = client_open(rig, NULL, NULL);
        ck_assert_ok(bfc_malloc(client, 1 * MIB, &p));
        bfc_disconnect(client);
        rig_terminate(rig);
        rig_discard(rig);
}

/* ---- the end -------------------------------------------------------------- */

static void *call_until_the_end(void *arg)
{
        bfc_client *client = arg;
        void *p;
        int r;

        do {
                r = bfc_malloc(client, 4096, &p);
                if (r == 0)
                        r = bfc_free(client, p);
        } while (r == 0);
        return (void *)(intptr_t)r;
}

TEST(sigterm_with_live_clients)
{
        struct rig *rig = rig_start(&defaults);
        bfc_client *busy = client_open(rig, NULL, NULL), *idle = client_open(rig, NULL, NULL);
        struct bfc_tenant_usage usage = { .struct_size = sizeof(usage) };
        pthread_t thread;
        void *p, *q, *result;

        ck_assert_ok(bfc_malloc(idle, 4 * MIB, &p));
        pattern_write(p, 4 * MIB, 1);
        ck_assert_int_eq(pthread_create(&thread, NULL, call_until_the_end, busy), 0);
        usleep(50000);
        rig_terminate(rig); /* status 0, sockets gone, a clean log */
        pthread_join(thread, &result);
        ck_assert_int_eq((intptr_t)result, -ECONNRESET);
        ck_assert_int_eq(bfc_malloc(idle, 4096, &q), -ECONNRESET);
        ck_assert_int_eq(bfc_usage(idle, NULL, &usage), -ECONNRESET);
        ck_assert_str_ne(bfc_last_error(), "");
        ((volatile char *)p)[0] = 1; /* still mapped: no crash */
        bfc_disconnect(busy);
        bfc_disconnect(idle);
        rig_discard(rig);
}

TEST(sigterm_with_pending_requests)
{
        struct rig *rig = rig_start(&defaults);
        struct raw *pending = raw_connect(rig->socket, NULL), *half = raw_connect(rig->socket, NULL);
        struct raw *silent = NULL;
        Bfcd__Malloc body = BFCD__MALLOC__INIT;
        Bfcd__Request request = REQUEST(MALLOC, malloc, &body);

        ck_assert(pending && half);
        ck_assert_int_eq(raw_open(rig->socket, &silent), 0);
        body.n_bytes = 60 * MIB; /* backing it takes a while */
        ck_assert_int_eq(raw_send(pending, &request), 0);
        ck_assert_int_eq(raw_send_bytes(half, "\x20\x00\x00\x00half", 8), 0);
        usleep(2000);
        rig_terminate(rig);
        ck_assert_int_eq(raw_wait_hang_up(pending, SETTLE_MS), 0);
        ck_assert_int_eq(raw_wait_hang_up(half, SETTLE_MS), 0);
        ck_assert_int_eq(raw_wait_hang_up(silent, SETTLE_MS), 0);
        raw_close(pending);
        raw_close(half);
        raw_close(silent);
        rig_discard(rig);
}
