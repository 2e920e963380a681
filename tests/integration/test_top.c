/* bfcctl top in a terminal beside a real daemon. tmux is the terminal: this test is its user, and types keys on a
 * pseudo-terminal.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <bfcclient.h>

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "tests/integration/json.h"

#define TAB        "\t"
#define DOWN       "\033[B"
#define ESCAPE     "\033"
#define F1         "\033OP"
#define F3         "\033OR"
#define F4         "\033OS"
#define F5         "\033[15~"
#define F6         "\033[17~"
#define F10        "\033[21~"
#define CONTROL(c) ((char[]){ (c)&0x1f, '\0' })

static const struct rig_config two_tenants = {
        .partitions = "      - {name: train, limit: 96MiB, growth: on-demand}\n"
                      "      - {name: serve, limit: 32MiB, growth: on-demand}\n",
        .tenants = TENANT("red", "@UID@", "train, limit: 64MiB") TENANT_OF(
                "blue", "@UID@", "{partition: train, limit: 64MiB}, {partition: serve, limit: 8MiB}"),
};

/* ---- a terminal ---------------------------------------------------------------------------- */

struct terminal {
        struct rig *rig;
        char socket[112]; /* tmux's */
        int master;
        pid_t pid;
};

static void set_size(int fd, unsigned short n_columns, unsigned short n_rows)
{
        const struct winsize size = { .ws_row = n_rows, .ws_col = n_columns };

        ck_assert_int_eq(ioctl(fd, TIOCSWINSZ, &size), 0);
}

static void run_tmux(const struct terminal *t, const char *slave, const char *config, const char *command)
{
        int fd;

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        setsid();
        fd = open(slave, O_RDWR); /* becomes the controlling terminal */
        if (fd < 0 || dup2(fd, 0) < 0 || dup2(fd, 1) < 0 || dup2(fd, 2) < 0)
                _exit(126);
        setenv("TERM", "xterm", 1);
        setenv("LC_ALL", "C.UTF-8", 1);
        setenv("BFC_MONITOR_SOCKET", t->rig->monitor_socket, 1);
        setenv("BFCCTL", program_bfcctl(), 1);
        unsetenv("TMUX");
        execl(TMUX, "tmux", "-u", "-S", t->socket, "-f", config, "new-session", "-s", "x", command, NULL);
        _exit(127);
}

/* command: for a shell, which stays after it. */
static struct terminal terminal_open(struct rig *rig, unsigned short n_columns, unsigned short n_rows,
                                     const char *command)
{
        static unsigned n_terminals;
        struct terminal t = { .rig = rig };
        char config[112], *all;
        FILE *f;

        snprintf(config, sizeof(config), "%s/tmux.conf", rig->folder);
        /* A path of its own: a server that ends removes its socket after its client has ended. */
        snprintf(t.socket, sizeof(t.socket), "%s/tmux%u", rig->folder, n_terminals++);
        f = fopen(config, "we");
        ck_assert_ptr_nonnull(f);
        fputs("set -g status off\nset -s escape-time 10\nset -g exit-unattached on\nset -g default-shell /bin/sh\n",
              f);
        fclose(f);
        t.master = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
        ck_assert_int_ge(t.master, 0);
        ck_assert_int_eq(grantpt(t.master), 0);
        ck_assert_int_eq(unlockpt(t.master), 0);
        set_size(t.master, n_columns, n_rows);
        ck_assert_int_gt(asprintf(&all, "%s; exec sleep 1000", command), 0);
        t.pid = fork();
        ck_assert_int_ge(t.pid, 0);
        if (t.pid == 0)
                run_tmux(&t, ptsname(t.master), config, all);
        free(all);
        return t;
}

/* What tmux draws for its user is not looked at. */
static void drain(const struct terminal *t)
{
        char bytes[4096];

        while (read(t->master, bytes, sizeof(bytes)) > 0)
                ;
}

/* The screen as text; the caller frees it. */
static char *screen(const struct terminal *t)
{
        const char *const words[] = { TMUX, "-u", "-S", t->socket, "capture-pane", "-p", "-t", "x", NULL };
        char *out = NULL;

        drain(t);
        (void)program_run(words, &out, NULL);
        ck_assert_ptr_nonnull(out);
        return out;
}

static bool shows(const struct terminal *t, const char *part)
{
        char *text = screen(t);
        bool ret = strstr(text, part) != NULL;

        free(text);
        return ret;
}

static void wait_for(const struct terminal *t, const char *part)
{
        char *text;

        if (WAIT_FOR(shows(t, part), SETTLE_MS))
                return;
        text = screen(t);
        ck_abort_msg("no '%s' on the screen:\n%s", part, text);
}

static void wait_without(const struct terminal *t, const char *part)
{
        ck_assert_msg(WAIT_FOR(!shows(t, part), SETTLE_MS), "'%s' stays on the screen", part);
}

/* One write for each key, so that a sequence is a key. */
static void press(const struct terminal *t, const char *key)
{
        drain(t);
        ck_assert_int_eq(write(t->master, key, strlen(key)), (ssize_t)strlen(key));
}

static void terminal_close(struct terminal *t)
{
        const char *const words[] = { TMUX, "-S", t->socket, "kill-server", NULL };
        int status;

        (void)program_run(words, NULL, NULL);
        close(t->master);
        ck_assert_int_eq(waitpid(t->pid, &status, 0), t->pid);
}

/* Rows of the screen up to the last one with text. */
static unsigned count_rows(const struct terminal *t)
{
        char *text = screen(t);
        unsigned n = 0, last = 0;

        for (char *line = text; line && *line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL) {
                n++;
                if (*line != '\n')
                        last = n;
        }
        free(text);
        return last;
}

/* After the program: its status, and how the terminal is set. */
#define AFTER "; echo \"status $?\"; stty -a | grep -oE -- '-?(icanon|echo)\\>' | tr '\\n' ' '"

/* ---- tests ----------------------------------------------------------------------------------- */

static const unsigned short sizes[][2] = { { 80, 24 }, { 200, 50 } };

/* The views, tree, filter, search, menu, help, a new size, and the end. */
LOOP_TEST(keys, 2)
{
        struct rig *rig = rig_start(&two_tenants);
        struct raw *red = session_open(rig->socket, "red"), *blue = session_open(rig->socket, "blue");
        struct terminal t =
                terminal_open(rig, sizes[_i][0], sizes[_i][1], "\"$BFCCTL\" top --interval 0.2" AFTER);
        Bfcd__Block block, other;

        ck_assert_int_eq(raw_malloc(red, 0, 3 * MIB, &block), 0);
        ck_assert_int_eq(raw_malloc(blue, 0, 1 * MIB, &other), 0);
        wait_for(&t, "3.0 MiB");
        wait_for(&t, "by HELD, descending");
        ck_assert_uint_eq(count_rows(&t), sizes[_i][1]); /* keys are in the last row */
        press(&t, F5);
        wait_for(&t, "- red (1)");
        press(&t, " ");
        wait_for(&t, "+ red (1)");
        press(&t, "t");
        wait_without(&t, "red (1)");
        press(&t, F4);
        press(&t, "bl");
        wait_for(&t, "1 of ");
        wait_for(&t, "filter: bl");
        press(&t, ESCAPE);
        wait_without(&t, "filter: bl");
        press(&t, F3);
        press(&t, "blu");
        wait_for(&t, "Search: blu_");
        press(&t, "\r");
        press(&t, TAB);
        wait_for(&t, "by IN-USE, descending");
        wait_for(&t, "HISTORY");
        press(&t, F6);
        wait_for(&t, "Sort by:");
        press(&t, DOWN);
        press(&t, "\r");
        wait_without(&t, "by IN-USE");
        press(&t, TAB);
        wait_for(&t, "GUARANTEED");
        press(&t, F1);
        wait_for(&t, ": guaranteed, but not reserved"); /* the longest line */
        wait_for(&t, "Any key returns");
        press(&t, "x");
        wait_without(&t, "Any key returns");
        set_size(t.master, 60, 15);
        ck_assert(WAIT_FOR(count_rows(&t) == 15 && shows(&t, "F1"), SETTLE_MS));
        do /* a key that comes with a change of size can be lost */
                press(&t, F10);
        while (!WAIT_FOR(shows(&t, "status 0"), SETTLE_MS / 10));
        wait_for(&t, "status 0\nicanon echo");
        terminal_close(&t);
        session_end(red);
        session_end(blue);
        rig_stop(rig);
}

/* It keeps the last data while the daemon is away, and connects to the next one. */
RIG_TEST(restart_of_the_daemon, two_tenants)
{
        struct raw *red = session_open(rig->socket, "red");
        struct terminal t = terminal_open(rig, 80, 24, "\"$BFCCTL\" top tenants --interval 0.2" AFTER);
        Bfcd__Block block;

        ck_assert_int_eq(raw_malloc(red, 0, 3 * MIB, &block), 0);
        wait_for(&t, "3.0 MiB");
        session_end(red);
        rig_terminate(rig);
        wait_for(&t, "Connecting again.");
        press(&t, TAB); /* keys work meanwhile */
        wait_for(&t, "GUARANTEED");
        press(&t, "\033[Z");
        wait_for(&t, "HISTORY");
        rig->pid = rig_spawn_daemon(rig);
        ck_assert(WAIT_FOR(rig_answers(rig), SETTLE_MS));
        rig_meet(rig);
        wait_without(&t, "Connecting again.");
        red = session_open(rig->socket, "red");
        ck_assert_int_eq(raw_malloc(red, 0, 5 * MIB, &block), 0);
        wait_for(&t, "5.0 MiB");
        press(&t, "q");
        wait_for(&t, "status 0\nicanon echo");
        terminal_close(&t);
        session_end(red);
}

/* A daemon that does not answer delays neither keys nor the end. */
RIG_TEST(silent_daemon, two_tenants)
{
        struct terminal t = terminal_open(rig, 80, 24, "\"$BFCCTL\" top tenants --interval 0.2" AFTER);

        wait_for(&t, "HISTORY");
        child_stop(rig->pid);
        wait_for(&t, "bfcd has not answered for ");
        press(&t, TAB);
        wait_for(&t, "GUARANTEED");
        ck_assert_int_eq(kill(rig->pid, SIGCONT), 0);
        wait_without(&t, "bfcd has not answered for ");
        child_stop(rig->pid);
        wait_for(&t, "bfcd has not answered for ");
        press(&t, "q");
        wait_for(&t, "status 0\nicanon echo");
        ck_assert_int_eq(kill(rig->pid, SIGCONT), 0);
        terminal_close(&t);
}

/* A session of a process that calls itself what it wants. */
static void be_hostile(void *socket)
{
        struct raw *red = raw_connect(socket, "red");

        REQUIRE(red && fcntl(red->fd, F_SETFD, 0) == 0, "no session");
        execl("/bin/sleep", "\033[2J\033]0;pwned\007\033[5;5H漢字漢字\xff%n", "1000", (char *)NULL);
        _exit(127);
}

/* Nothing of it moves the cursor. The daemon itself lets only printable ASCII into names. */
RIG_TEST(hostile_command, two_tenants)
{
        static const char escaped[] = "\\x1b[2J\\x1b]0;pwned\\x07\\x1b[5;5H漢字漢字\\xff%n 1000\n";
        struct terminal t = terminal_open(rig, 220, 50, "\"$BFCCTL\" top --interval 0.2" AFTER);
        pid_t pid = child_start(be_hostile, rig->socket);

        wait_for(&t, escaped);
        wait_for(&t, "by HELD, descending");
        press(&t, "\\");
        press(&t, "pwned");
        wait_for(&t, "1 of ");
        set_size(t.master, 80, 24); /* it is cut */
        wait_without(&t, escaped);
        wait_for(&t, " \\x1b[2J");
        ck_assert_uint_eq(count_rows(&t), 24);
        press(&t, "\r");
        press(&t, "q");
        wait_for(&t, "status 0\nicanon echo");
        terminal_close(&t);
        child_kill(pid);
}

static void send_term(const struct rig *rig)
{
        char path[112], *text;

        snprintf(path, sizeof(path), "%s.pid", rig->monitor_socket);
        text = file_text(path);
        ck_assert_ptr_nonnull(text);
        ck_assert_int_gt(atoi(text), 0);
        ck_assert_int_eq(kill(atoi(text), SIGTERM), 0);
        free(text);
}

/* The terminal is restored, and the shell sees the signal. */
RIG_TEST(signals_restore_the_terminal, two_tenants)
{
        struct terminal t = terminal_open(rig, 80, 24, "trap : INT; \"$BFCCTL\" top" AFTER);

        wait_for(&t, "F10");
        press(&t, CONTROL('c'));
        wait_for(&t, "status 130\nicanon echo");
        terminal_close(&t);
        /* It has the number of its shell. */
        t = terminal_open(rig, 80, 24,
                          "sh -c 'echo $$ > $BFC_MONITOR_SOCKET.pid; exec \"$BFCCTL\" top'" AFTER);
        wait_for(&t, "F10");
        send_term(rig);
        wait_for(&t, "status 143\nicanon echo");
        terminal_close(&t);
}

/* It stops, the shell has its terminal, and it continues. */
RIG_TEST(stop_and_continue, two_tenants)
{
        struct raw *red = session_open(rig->socket, "red");
        struct terminal t =
                terminal_open(rig, 80, 24, "set -m; \"$BFCCTL\" top" AFTER "; read line; fg" AFTER);

        wait_for(&t, "F10");
        press(&t, CONTROL('z'));
        wait_for(&t, "icanon echo");
        ck_assert(shows(&t, "status 1")); /* 128 + SIGTSTP */
        press(&t, "\r");
        wait_for(&t, "F10");
        wait_for(&t, "by HELD");
        press(&t, TAB);
        wait_for(&t, "HISTORY");
        press(&t, "q");
        wait_for(&t, "status 0\nicanon echo");
        terminal_close(&t);
        session_end(red);
}

/* Without a terminal. */
RIG_TEST(text_and_errors, two_tenants)
{
        struct raw *red = session_open(rig->socket, "red");
        Bfcd__Block block;
        char *out, *err;

        ck_assert_int_eq(raw_malloc(red, 0, 3 * MIB, &block), 0);
        ck_assert_int_eq(ctl(rig->monitor_socket, WORDS("top", "--once"), &out, &err), 0);
        ck_assert_str_eq(err, "");
        ck_assert_ptr_nonnull(strstr(out, "train        [|"));
        ck_assert_ptr_nonnull(strstr(out, "3.0 MiB"));
        ck_assert_ptr_null(strchr(out, '\033'));
        free(out);
        free(err);
        ck_assert_int_eq(ctl(rig->monitor_socket, WORDS("top", "tenants", "--once"), &out, NULL), 0);
        text_has(out, "blue   serve");
        ck_assert_int_eq(ctl(rig->admin_socket, WORDS("top", "--once"), NULL, &err), 1);
        text_has(err, "is not the monitor socket");
        ck_assert_int_eq(ctl(rig->monitor_socket, WORDS("top"), NULL, &err), 1);
        text_has(err, "needs a terminal");
        ck_assert_int_eq(ctl("/nowhere", WORDS("top", "--once"), NULL, &err), 1);
        text_has(err, "does not exist");
        ck_assert_int_eq(ctl(rig->monitor_socket, WORDS("top", "--interval", "x"), NULL, &err), 2);
        text_has(err, "0.1s to 1h");
        ck_assert_int_eq(ctl(rig->monitor_socket, WORDS("top", "blocks"), NULL, &err), 2);
        text_has(err, "usage: bfcctl top");
        session_end(red);
}

/* Of another bfcd before, with the same user. */
static void job_keeper(void *is_named)
{
        (void)prctl(PR_SET_NAME, "bfcd-kept");
        gate_open(is_named);
        pause();
}

/* Of the daemon's GPUs only, and not for host memory. */
RIG_TEST(memory_outside, two_tenants)
{
        struct raw *red = session_open(rig->socket, "red");
        json_t *status = ctl_json(rig->monitor_socket, WORDS("--json", "status"));
        const json_t *uuid = json_object_get(json_array_get(json_object_get(status, "devices"), 0), "uuid");
        struct gate is_named = gate_new();
        pid_t keeper = child_start_until(&is_named, job_keeper, &is_named);
        char path[112], *out;
        FILE *f;

        snprintf(path, sizeof(path), "%s/nvml", rig->folder);
        f = fopen(path, "we");
        ck_assert_ptr_nonnull(f);
        fprintf(f, "%s %d 1\n", json_is_string(uuid) ? json_string_value(uuid) : "GPU-0", (int)keeper);
        fprintf(f, "%s %d %llu\n", json_is_string(uuid) ? json_string_value(uuid) : "GPU-0", (int)getpid(),
                100 * (unsigned long long)MIB);
        fprintf(f, "%s 4194303 %llu\nGPU-other %d 1\n",
                json_is_string(uuid) ? json_string_value(uuid) : "GPU-0", 200 * (unsigned long long)MIB,
                (int)getpid());
        fclose(f);
        setenv("FAKE_NVML", path, 1);
        ck_assert_int_eq(ctl(rig->monitor_socket, WORDS("top", "--once"), &out, NULL), 0);
        if (json_is_string(uuid))
                ck_assert_msg(strstr(out, "outside: 1 process, 200.0 MiB"), "%s", out);
        else
                ck_assert_ptr_null(strstr(out, "outside:"));
        child_kill(keeper);
        free(out);
        json_decref(status);
        session_end(red);
}
