/* bfcctl's conversation, with a daemon that is made here: one that answers in
 * pages, refuses rudely, talks nonsense or hangs up.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/suite.h"

#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "ctl/ask.h"

/* ---- the daemon ---------------------------------------------------------- */

/* Fills the answer to a request; false: hang up instead. */
typedef bool (*answer_fn)(const Bfcd__Request *request, Bfcd__Reply *reply);

static struct {
        char folder[64];
        char path[96];
        int listener;
        pthread_t thread;
        answer_fn answer;
        unsigned n_requests; /* between hello and goodbye */
        unsigned n_goodbyes;
        char tenant[32]; /* as the hello named it */
        int n_fds;
} fake;

static bool read_whole(int fd, uint8_t *bytes, size_t n)
{
        for (size_t got = 0; got < n;) {
                ssize_t r = read(fd, bytes + got, n - got);

                if (r <= 0)
                        return false;
                got += (size_t)r;
        }
        return true;
}

static void send_reply(int fd, const Bfcd__Reply *reply)
{
        size_t n = bfcd__reply__get_packed_size(reply);
        uint8_t *bytes = malloc(n + 4);

        for (int i = 0; i < 4; i++)
                bytes[i] = (uint8_t)(n >> 8 * i);
        bfcd__reply__pack(reply, bytes + 4);
        if (send(fd, bytes, n + 4, MSG_NOSIGNAL) < 0)
                perror("send");
        free(bytes);
}

static bool serve_one(int fd)
{
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        Bfcd__HelloReply hello = BFCD__HELLO_REPLY__INIT;
        Bfcd__Done done = BFCD__DONE__INIT;
        Bfcd__Request *request;
        uint8_t head[4], *bytes;
        size_t n;
        bool go_on = true;

        if (!read_whole(fd, head, 4))
                return false;
        n = (size_t)(head[0] | head[1] << 8 | head[2] << 16);
        bytes = malloc(n);
        if (!read_whole(fd, bytes, n)) {
                free(bytes);
                return false;
        }
        request = bfcd__request__unpack(NULL, n, bytes);
        free(bytes);
        reply.id = request->id;
        if (request->body_case == BFCD__REQUEST__BODY_HELLO) {
                snprintf(fake.tenant, sizeof(fake.tenant), "%s", request->hello->tenant);
                hello.version = 1;
                reply.body_case = BFCD__REPLY__BODY_HELLO;
                reply.hello = &hello;
        } else if (request->body_case == BFCD__REQUEST__BODY_GOODBYE) {
                reply.body_case = BFCD__REPLY__BODY_DONE;
                reply.done = &done;
                fake.n_goodbyes++;
        } else {
                go_on = fake.answer(request, &reply);
                fake.n_requests++;
        }
        if (go_on)
                send_reply(fd, &reply);
        bfcd__request__free_unpacked(request, NULL);
        return go_on;
}

static void *serve(void *unused)
{
        int fd = accept4(fake.listener, NULL, NULL, SOCK_CLOEXEC);

        while (serve_one(fd))
                ;
        close(fd);
        return unused;
}

static struct ask a;

static void start(answer_fn answer)
{
        fake.answer = answer;
        ck_assert_int_eq(pthread_create(&fake.thread, NULL, serve, NULL), 0);
        ck_assert_msg(ask_open(&a, fake.path, "vision") == 0, "%s", a.error);
        ck_assert(a.admin); /* the hello's reply names no tenant */
}

static void setup(void)
{
        struct sockaddr_un address = { .sun_family = AF_UNIX };

        memset(&fake, 0, sizeof(fake));
        fake.n_fds = suite_count_fds();
        snprintf(fake.folder, sizeof(fake.folder), "/tmp/bfcd-test-XXXXXX");
        ck_assert_ptr_nonnull(mkdtemp(fake.folder));
        snprintf(fake.path, sizeof(fake.path), "%s/sock", fake.folder);
        strcpy(address.sun_path, fake.path);
        fake.listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        ck_assert_int_eq(bind(fake.listener, (struct sockaddr *)&address, sizeof(address)), 0);
        ck_assert_int_eq(listen(fake.listener, 1), 0);
        unsetenv("BFC_SOCKET");
        unsetenv("BFC_ADMIN_SOCKET");
        unsetenv("BFC_MONITOR_SOCKET");
}

static void teardown(void)
{
        ask_close(&a);
        if (fake.answer)
                pthread_join(fake.thread, NULL);
        close(fake.listener);
        unlink(fake.path);
        rmdir(fake.folder);
        ck_assert_int_eq(suite_count_fds(), fake.n_fds);
}

FIXTURE(ask, setup, teardown);

/* ---- tests --------------------------------------------------------------- */

/* Three pages: cursors 0, 10 and 20; the second has no rows. */
static bool answer_pages(const Bfcd__Request *request, Bfcd__Reply *reply)
{
        static Bfcd__ListReply page;
        static Bfcd__TenantRow row;
        static Bfcd__TenantRow *rows[] = { &row };
        static char first[] = "first", last[] = "last";

        bfcd__list_reply__init(&page);
        bfcd__tenant_row__init(&row);
        row.stats = NULL;
        row.tenant = request->list->cursor == 0 ? first : last;
        page.n_tenants = request->list->cursor != 10;
        page.tenants = rows;
        page.next_cursor = request->list->cursor < 20 ? request->list->cursor + 10 : 0;
        reply->body_case = BFCD__REPLY__BODY_LIST;
        reply->list = &page;
        return request->list->kind == BFCD__LIST__KIND__TENANTS;
}

TEST(paged_lists_are_joined)
{
        struct list *l;

        start(answer_pages);
        ck_assert_str_eq(fake.tenant, "vision");
        ck_assert_msg(ask_list(&a, BFCD__LIST__KIND__TENANTS, &l) == 0, "%s", a.error);
        ck_assert_uint_eq(fake.n_requests, 3);
        ck_assert_uint_eq(l->n_tenants, 2);
        ck_assert_str_eq(l->tenants[0]->tenant, "first");
        ck_assert_str_eq(l->tenants[1]->tenant, "last");
        list_free(l);
        ask_close(&a);
        ck_assert_uint_eq(fake.n_goodbyes, 1);
}

/* Explains by two pages of one row each, for what was asked; and gives two pages of blocks. */
static bool answer_report(const Bfcd__Request *request, Bfcd__Reply *reply)
{
        static Bfcd__ExplainReply explained;
        static Bfcd__ExplainRow row, *rows[] = { &row };
        static Bfcd__ListReply page;
        static Bfcd__BlockRow block, *blocks[] = { &block, &block };

        if (request->body_case == BFCD__REQUEST__BODY_EXPLAIN) {
                bfcd__explain_reply__init(&explained);
                bfcd__explain_row__init(&row);
                row.partition = request->explain->partition;
                row.tenant = request->explain->tenant;
                row.num_waiting = request->explain->cursor;
                explained.n_rows = 1;
                explained.rows = rows;
                explained.next_cursor = request->explain->cursor == 0 ? 7 : 0;
                reply->body_case = BFCD__REPLY__BODY_EXPLAIN;
                reply->explain = &explained;
                return true;
        }
        bfcd__list_reply__init(&page);
        bfcd__block_row__init(&block);
        block.block_id = request->list->cursor + 1;
        page.n_blocks = 2;
        page.blocks = blocks;
        page.next_cursor = request->list->cursor == 0 ? 10 : 0;
        reply->body_case = BFCD__REPLY__BODY_LIST;
        reply->list = &page;
        return request->list->kind == BFCD__LIST__KIND__BLOCKS;
}

static int add_block(void *userdata, const Bfcd__BlockRow *row)
{
        uint64_t *sum = userdata;

        *sum += row->block_id;
        return *sum < 1000 ? 0 : -ENOMEM;
}

TEST(explain_and_blocks)
{
        struct list *l;
        uint64_t sum = 0;

        start(answer_report);
        ck_assert_msg(ask_explain(&a, "train", "red", &l) == 0, "%s", a.error);
        ck_assert_uint_eq(l->n_explained, 2);
        ck_assert_str_eq(l->explained[0]->partition, "train");
        ck_assert_str_eq(l->explained[1]->tenant, "red");
        ck_assert_uint_eq(l->explained[1]->num_waiting, 7);
        list_free(l);
        ck_assert_msg(ask_blocks(&a, add_block, &sum) == 0, "%s", a.error);
        ck_assert_uint_eq(sum, 1 + 1 + 11 + 11);
        sum = 1000;
        ck_assert_int_eq(ask_blocks(&a, add_block, &sum), -ENOMEM);
        ck_assert_str_eq(a.error, "Out of memory.");
}

static bool answer_for_ever(const Bfcd__Request *request, Bfcd__Reply *reply)
{
        static Bfcd__ListReply page;

        bfcd__list_reply__init(&page);
        page.next_cursor = 10;
        reply->body_case = BFCD__REPLY__BODY_LIST;
        reply->list = &page;
        return request->id != 0;
}

TEST(repeated_cursor_is_an_error)
{
        struct list *l;

        start(answer_for_ever);
        ck_assert_int_eq(ask_list(&a, BFCD__LIST__KIND__BLOCKS, &l), -EPROTO);
        ck_assert_ptr_nonnull(strstr(a.error, "does not use bfcd's protocol"));
}

static bool answer_refused(const Bfcd__Request *request, Bfcd__Reply *reply)
{
        static Bfcd__Refusal refusal;
        static char rude[] = "no \x1b[2Jsuch tenant", empty[] = "";

        bfcd__refusal__init(&refusal);
        refusal.error = ENOENT;
        refusal.message = request->reset_peaks->tenant[0] ? rude : empty;
        reply->body_case = BFCD__REPLY__BODY_REFUSAL;
        reply->refusal = &refusal;
        return true;
}

TEST(refused)
{
        start(answer_refused);
        ck_assert_int_eq(ask_reset_peaks(&a, "x", ""), -ENOENT);
        ck_assert_str_eq(a.error, "no \\x1b[2Jsuch tenant");
        ck_assert_int_eq(ask_reset_peaks(&a, "", ""), -ENOENT);
        ck_assert_str_eq(a.error, "The daemon refused: No such file or directory.");
}

static bool answer_config(const Bfcd__Request *request, Bfcd__Reply *reply)
{
        static Bfcd__ConfigReply page;
        static char begin[] = "max_ses", end[] = "sions: 1\n";

        bfcd__config_reply__init(&page);
        page.text = request->show_config->cursor == 0 ? begin : end;
        page.next_cursor = request->show_config->cursor == 0 ? 7 : 0;
        reply->body_case = BFCD__REPLY__BODY_CONFIG;
        reply->config = &page;
        return true;
}

TEST(config)
{
        char *text;

        start(answer_config);
        ck_assert_int_eq(ask_config(&a, &text), 0);
        ck_assert_str_eq(text, "max_sessions: 1\n");
        free(text);
}

static bool answer_nonsense(const Bfcd__Request *request, Bfcd__Reply *reply)
{
        static Bfcd__Done done;

        bfcd__done__init(&done);
        reply->body_case = BFCD__REPLY__BODY_DONE;
        reply->done = &done;
        return request->id != 0;
}

TEST(malformed_replies)
{
        char *text = (char *)1;

        start(answer_nonsense);
        ck_assert_int_eq(ask_config(&a, &text), -EPROTO);
        ck_assert_ptr_eq(text, (char *)1);
}

static bool answer_nothing(const Bfcd__Request *request, Bfcd__Reply *reply)
{
        (void)request;
        (void)reply;
        return false;
}

TEST(server_hangs_up)
{
        struct list *l;

        start(answer_nothing);
        ck_assert_int_eq(ask_list(&a, BFCD__LIST__KIND__STATUS, &l), -ECONNRESET);
        ck_assert_ptr_nonnull(strstr(a.error, "ended the session"));
        ck_assert_ptr_nonnull(strstr(a.error, fake.path));
}

/* The daemon of before an upgrade goes on until it is restarted. */
TEST(no_server)
{
        char longer[200];

        ck_assert_int_eq(ask_open(&a, "/nowhere/bfcd.sock", NULL), -ENOENT);
        ck_assert_ptr_nonnull(strstr(a.error, "annot reach bfcd at /nowhere/bfcd.sock"));
        ask_close(&a);
        memset(longer, 'x', sizeof(longer) - 1);
        longer[sizeof(longer) - 1] = '\0';
        ck_assert_int_eq(ask_open(&a, longer, NULL), -ENAMETOOLONG);
        ask_close(&a);
        /* A socket that its daemon left behind. */
        close(fake.listener);
        fake.listener = -1;
        ck_assert_int_eq(ask_open(&a, fake.path, NULL), -ECONNREFUSED);
        ck_assert_ptr_nonnull(strstr(a.error, "no process listens"));
}

TEST(socket_is_chosen_by_options_and_environment)
{
        ck_assert_ptr_nonnull(strstr(ask_socket(NULL), "/run/bfcd/"));
        setenv("BFC_SOCKET", "", 1); /* as if it were not there */
        ck_assert_ptr_nonnull(strstr(ask_socket(NULL), "/run/bfcd/"));
        setenv("BFC_SOCKET", "/a", 1);
        ck_assert_str_eq(ask_socket(NULL), "/a");
        setenv("BFC_MONITOR_SOCKET", "/m", 1);
        ck_assert_str_eq(ask_socket(NULL), "/m");
        setenv("BFC_ADMIN_SOCKET", "/b", 1);
        ck_assert_str_eq(ask_socket(NULL), "/b");
        ck_assert_str_eq(ask_socket("/c"), "/c");
}
