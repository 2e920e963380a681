/* The screen of bfcctl top, by ncurses.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * One loop waits for keys, samples and signals. Signals are read as data (signalfd), so the terminal is restored
 * outside of any handler: before the process stops, and before a signal that ends it is sent again with its
 * default action. */
#include <errno.h>
#include <ncurses.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "ctl/table.h"
#include "ctl/top.h"
#include "ctl/top_frame.h"
#include "ctl/top_keys.h"

#define ESCAPE_MS    25   /* that a terminal takes for the sequence of a key */
#define SILENT_MS    2000 /* until a daemon that does not answer is mentioned */
#define WIDE_COLUMNS 160

enum { KEYS, SIGNALS, SAMPLES, N_FDS };

struct screen {
        struct top *top;
        struct top_feed *feed;
        bool wants_wide; /* the user asked for all columns */
        char error[1024], trouble[1200];
        int signal_fd;
        int ending; /* the signal that ends the process; 0: none */
        bool is_over;
        SCREEN *terminal;
};

/* ---- drawing --------------------------------------------------------------------------- */

static void init_colours(void)
{
        if (!table_may_colour(STDOUT_FILENO) || !has_colors() || start_color() == ERR)
                return;
        use_default_colors();
        init_pair(TOP_WARNING, COLOR_YELLOW, -1);
        init_pair(TOP_ALARM, COLOR_RED, -1);
        init_pair(TOP_USED, COLOR_GREEN, -1);
        init_pair(TOP_RESERVED, COLOR_BLUE, -1);
        init_pair(TOP_GUARANTEED, COLOR_CYAN, -1);
}

static attr_t attributes_of(enum top_style style)
{
        static const attr_t attributes[TOP_STYLES] = {
                [TOP_BOLD] = A_BOLD,        [TOP_TITLE] = A_REVERSE, [TOP_SORTED] = A_REVERSE | A_BOLD,
                [TOP_SELECTED] = A_REVERSE, [TOP_ALARM] = A_BOLD,    [TOP_KEY] = A_REVERSE,
        };

        return attributes[style];
}

/* Pair 0 is the terminal's own colours. */
static short pair_of(enum top_style style)
{
        return style == TOP_WARNING || style == TOP_ALARM || style == TOP_USED || style == TOP_RESERVED ||
                               style == TOP_GUARANTEED
                       ? (short)style
                       : 0;
}

static int draw(struct screen *s)
{
        struct top_frame frame;
        int r;

        r = top_draw(s->top, (unsigned)LINES, (unsigned)COLS, &frame);
        if (r < 0)
                return r;
        erase();
        for (size_t i = 0; i < frame.n_spans; i++) {
                const struct top_span *span = &frame.spans[i];

                (void)attr_set(attributes_of(span->style), pair_of(span->style), NULL);
                (void)mvaddstr((int)span->row, (int)span->column, span->text);
        }
        (void)attr_set(A_NORMAL, 0, NULL);
        refresh();
        top_frame_end(&frame);
        return 0;
}

/* All columns are shown where there is room. */
static int fit(struct screen *s)
{
        s->top->is_wide = s->wants_wide || COLS >= WIDE_COLUMNS;
        return top_arrange(s->top);
}

/* ---- what happens ------------------------------------------------------------------------ */

static int take_sample(struct screen *s)
{
        struct top_sample sample;
        uint64_t silent_ms;
        int r = 0;

        if (top_feed_take(s->feed, &sample, s->error, &silent_ms))
                r = top_take(s->top, &sample);
        s->top->trouble = NULL;
        if (*s->error) {
                snprintf(s->trouble, sizeof(s->trouble), "Connecting again. %s", s->error);
                s->top->trouble = s->trouble;
        } else if (silent_ms > SILENT_MS) {
                snprintf(s->trouble, sizeof(s->trouble), "bfcd has not answered for %llu s.",
                         (unsigned long long)silent_ms / 1000);
                s->top->trouble = s->trouble;
        }
        return r;
}

static uint32_t translate(wint_t key, bool is_special)
{
        static const struct {
                int from;
                enum top_key to;
        } specials[] = {
                { KEY_UP, TOP_KEY_UP },
                { KEY_DOWN, TOP_KEY_DOWN },
                { KEY_LEFT, TOP_KEY_LEFT },
                { KEY_RIGHT, TOP_KEY_RIGHT },
                { KEY_PPAGE, TOP_KEY_PAGE_UP },
                { KEY_NPAGE, TOP_KEY_PAGE_DOWN },
                { KEY_HOME, TOP_KEY_HOME },
                { KEY_END, TOP_KEY_END },
                { KEY_BTAB, TOP_KEY_BACK_TAB },
                { KEY_ENTER, TOP_KEY_ENTER },
                { KEY_BACKSPACE, TOP_KEY_BACKSPACE },
        };

        if (is_special && key >= KEY_F(1) && key <= KEY_F(10))
                return TOP_KEY_F1 + (key - KEY_F(1));
        for (size_t i = 0; is_special && i < sizeof(specials) / sizeof(specials[0]); i++)
                if ((wint_t)specials[i].from == key)
                        return specials[i].to;
        if (is_special)
                return 0;
        return key == '\t'                  ? (uint32_t)TOP_KEY_TAB
               : key == '\r' || key == '\n' ? (uint32_t)TOP_KEY_ENTER
               : key == 0x1b                ? (uint32_t)TOP_KEY_ESCAPE
               : key == 0x7f || key == 0x08 ? (uint32_t)TOP_KEY_BACKSPACE
                                            : (uint32_t)key;
}

/* All keys that are there. ncurses keeps some of what it has read, so poll() does not tell of them. */
static int take_keys(struct screen *s)
{
        int kind, r = TOP_DONE;
        wint_t key;

        while (!s->is_over && (kind = get_wch(&key)) != ERR) {
                uint32_t known = translate(key, kind == KEY_CODE_YES);

                if (known == 0)
                        continue;
                r = top_key(s->top, known);
                if (r < 0)
                        return r;
                s->is_over = r == TOP_QUIT;
                if (r == TOP_READ)
                        top_feed_want(s->feed, s->top->interval_ms, s->top->view == TOP_SESSIONS);
        }
        return 0;
}

static int resize(struct screen *s)
{
        struct winsize size;

        if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_row > 0 && size.ws_col > 0)
                (void)resizeterm(size.ws_row, size.ws_col);
        (void)clearok(curscr, TRUE);
        for (enum top_view v = 0; v < TOP_VIEWS; v++)
                s->top->choices[v].n_widths = 0;
        return fit(s);
}

/* With the default action, which is to stop or to end. */
static void send_again(int number)
{
        sigset_t one;

        sigemptyset(&one);
        sigaddset(&one, number);
        (void)signal(number, SIG_DFL);
        (void)kill(getpid(), number);
        (void)pthread_sigmask(SIG_UNBLOCK, &one, NULL);
        (void)pthread_sigmask(SIG_BLOCK, &one, NULL);
}

static int take_signal(struct screen *s)
{
        struct signalfd_siginfo info;

        if (read(s->signal_fd, &info, sizeof(info)) != (ssize_t)sizeof(info))
                return 0;
        switch (info.ssi_signo) {
        case SIGWINCH:
                return resize(s);
        case SIGTSTP:
                endwin();
                send_again(SIGTSTP);
                return resize(s);
        case SIGCONT: /* a shell may have changed the terminal while the process was stopped */
                reset_prog_mode();
                return resize(s);
        default:
                s->ending = (int)info.ssi_signo;
                s->is_over = true;
                return 0;
        }
}

static int turn(struct screen *s)
{
        struct pollfd fds[N_FDS] = { [KEYS] = { STDIN_FILENO, POLLIN, 0 },
                                     [SIGNALS] = { s->signal_fd, POLLIN, 0 },
                                     [SAMPLES] = { top_feed_fd(s->feed), POLLIN, 0 } };
        int r, n = poll(fds, N_FDS, 1000);

        if (n < 0)
                return errno == EINTR ? 0 : -errno;
        r = take_sample(s);
        if (r == 0 && fds[SIGNALS].revents)
                r = take_signal(s);
        if (r == 0)
                r = take_keys(s);
        /* The terminal is gone. */
        if (fds[KEYS].revents & (POLLHUP | POLLERR | POLLNVAL))
                s->is_over = true;
        return r == 0 && !s->is_over ? draw(s) : r;
}

/* ---- begin and end ------------------------------------------------------------------------- */

static bool open_terminal(struct screen *s)
{
        s->terminal = newterm(NULL, stdout, stdin);
        if (!s->terminal)
                return false;
        (void)set_term(s->terminal);
        (void)cbreak();
        (void)noecho();
        (void)nonl();
        (void)keypad(stdscr, TRUE);
        (void)nodelay(stdscr, TRUE);
        (void)set_escdelay(ESCAPE_MS);
        (void)curs_set(0);
        init_colours();
        return true;
}

static void close_terminal(struct screen *s)
{
        if (!s->terminal)
                return;
        (void)curs_set(1);
        endwin();
        delscreen(s->terminal);
        s->terminal = NULL;
}

static void read_signals(sigset_t *ret)
{
        static const int numbers[] = { SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGTSTP, SIGCONT, SIGWINCH };

        sigemptyset(ret);
        for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++)
                sigaddset(ret, numbers[i]);
}

static int run(struct screen *s, struct top_source *source, const char *socket, const char **ret_error)
{
        static char error[128];
        int r = top_feed_start(source, socket, s->top->interval_ms, s->top->view == TOP_SESSIONS, &s->feed);

        *ret_error = "Out of memory.";
        if (r < 0 && r != -ENOMEM) {
                snprintf(error, sizeof(error), "The thread that reads from the daemon cannot be started: %s.",
                         strerror(-r));
                *ret_error = error;
        }
        if (r < 0)
                return r;
        if (!open_terminal(s)) {
                *ret_error = "the type of this terminal (TERM) is not known. For text use: bfcctl top --once";
                top_feed_stop(s->feed);
                return -ENOTTY;
        }
        r = fit(s);
        while (r == 0 && !s->is_over)
                r = turn(s);
        close_terminal(s);
        s->feed = top_feed_stop(s->feed);
        return r;
}

int top_screen_run(struct top *t, struct top_source *source, const char *socket, const char **ret_error)
{
        struct screen s = { .top = t, .wants_wide = t->is_wide };
        sigset_t signals, before;
        int r;

        read_signals(&signals);
        (void)pthread_sigmask(SIG_BLOCK, &signals, &before); /* also in the thread of the feed */
        s.signal_fd = signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK);
        if (s.signal_fd < 0) {
                r = -errno;
                *ret_error = "Signals cannot be read.";
                top_source_close(source);
        } else {
                r = run(&s, source, socket, ret_error);
                close(s.signal_fd);
        }
        t->trouble = NULL;
        if (s.ending)
                send_again(s.ending);
        (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
        return r;
}
