/* Programs that fork, exit and unload the library: what a child finds at its parent's addresses, with and
 * without BFC_INHERIT; Python's multiprocessing; a pre-forking server; dlclose(); exit().
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "tests/integration/tools.h"
#include "tests/suite.h"

#define N_BLOCKS 3u
#define LIMIT_MS 60000
#define SERVERS  3u
#define STAMP    UINT64_C(0xb10cb10cb10c0001)
#define PAGE     4096u

static const size_t sizes[N_BLOCKS] = { 3000, 600 * KIB, 5 * MIB }; /* parked, cut, the daemon's own */

static const struct rig_config one_tenant;

/* What one of them has must be taken from the other. */
static const struct rig_config two_tenants = {
        .partitions = "      - {name: train, limit: 32MiB, growth: on-demand}\n",
        .tenants =
                TENANT("red", "@UID@", "train, limit: 32MiB") TENANT("blue", "@UID@", "train, limit: 32MiB"),
};

/* A child of the caller that dies with it, and has a minute for all that it does: 0 in the child. */
static pid_t fork_child(void)
{
        pid_t parent = getpid(), pid;

        fflush(NULL);
        pid = fork();
        REQUIRE(pid >= 0, "fork");
        if (pid > 0)
                return pid;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent)
                _exit(98);
        alarm(LIMIT_MS / 1000);
        signal(SIGSEGV, SIG_DFL); /* a sanitizer would report it */
        signal(SIGBUS, SIG_DFL);
        return 0;
}

static int wait_for(pid_t pid)
{
        int status;

        REQUIRE(waitpid(pid, &status, 0) == pid, "waitpid");
        return status;
}

/* Whether a read there ends a child of the caller. */
static bool kills_a_child(const volatile char *p)
{
        pid_t pid = fork_child();
        int status;

        if (pid == 0) {
                (void)*p;
                _exit(0);
        }
        status = wait_for(pid);
        return WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV;
}

/* ---- the default ------------------------------------------------------------- */

/* The kernel takes a hint where the place is free. */
static void require_reserved(const char *begin, size_t n_bytes)
{
        for (size_t at = 0; at < n_bytes; at += 256 * KIB) {
                void *hint = (void *)(((uintptr_t)begin + at) & ~(uintptr_t)(PAGE - 1));
                void *p = mmap(hint, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

                REQUIRE(p != MAP_FAILED && p != hint, "a mapping of the child is placed in a block at %p",
                        hint);
                munmap(p, PAGE);
        }
}

/* A thread that has ended counts as asleep. */
static bool is_asleep(const char *thread)
{
        char path[300], state = 'S';
        FILE *f;

        snprintf(path, sizeof(path), "/proc/self/task/%s/stat", thread);
        if ((f = fopen(path, "re"))) {
                (void)!fscanf(f, "%*d (%*[^)]) %c", &state);
                fclose(f);
        }
        return state == 'S';
}

/* A thread that starts takes locks of the sanitizer's allocator, which a child of that moment finds locked. */
static void wait_for_threads_to_sleep(void)
{
        DIR *tasks = opendir("/proc/self/task");
        struct dirent *task;

        REQUIRE(tasks, "/proc/self/task");
        while ((task = readdir(tasks)))
                while (task->d_name[0] != '.' && atoi(task->d_name) != getpid() && !is_asleep(task->d_name))
                        usleep(1000);
        closedir(tasks);
}

static void in_child_and_grandchild(void (*function)(void *), void *arg)
{
        for (int generation = 0; generation < 2; generation++) {
                wait_for_threads_to_sleep();
                pid_t pid = fork_child();

                if (pid > 0) {
                        int status = wait_for(pid);

                        REQUIRE(status == 0, "generation %d ended with status %d", generation, status);
                        if (generation > 0)
                                _exit(0);
                        return;
                }
                function(arg);
        }
        _exit(0);
}

struct blocks {
        bfc_client *client;
        char *ptr[N_BLOCKS];
};

static void look_at_addresses(void *arg)
{
        const struct blocks *b = arg;
        char *maps = file_text("/proc/self/maps");

        REQUIRE(maps && !strstr(maps, "memfd:bfcd-"), "an extent or a page is mapped: %s", maps);
        free(maps);
        for (unsigned i = 0; i < N_BLOCKS; i++) {
                require_reserved(b->ptr[i], sizes[i]);
                REQUIRE(rig_device() != ON_HOST || kills_a_child(b->ptr[i]), "block %u can be read", i);
        }
}

static struct blocks blocks_new(const char *socket, const char *tenant, uint64_t flags)
{
        struct blocks b = { .client = child_client_with(.socket = socket, .tenant = tenant, .flags = flags) };
        void *p;

        for (unsigned i = 0; i < N_BLOCKS; i++) {
                REQUIRE(bfc_malloc(b.client, sizes[i], &p) == 0, "%s", bfc_last_error());
                b.ptr[i] = p;
                if (rig_device() == ON_HOST)
                        pattern_write(p, sizes[i], i);
        }
        return b;
}

static void nothing_lands_there(void *arg)
{
        struct blocks b = blocks_new(arg, NULL, 0);

        in_child_and_grandchild(look_at_addresses, &b);
        for (unsigned i = 0; i < N_BLOCKS && rig_device() == ON_HOST; i++)
                REQUIRE(pattern_holds(b.ptr[i], sizes[i], i), "block %u of the parent", i);
        bfc_disconnect(b.client);
}

RIG_TEST(children_inherit_no_mapping, one_tenant)
{
        child_join(child_start(nothing_lands_there, rig->socket));
}

static void call_everything(void *arg)
{
        const struct blocks *b = arg;
        struct bfc_client_stats stats = { .struct_size = sizeof(stats) };
        struct bfc_tenant_usage usage = { .struct_size = sizeof(usage) };
        struct bfc_block_info info = { .struct_size = sizeof(info) };
        bfc_client *c = b->client;
        void *p = b->ptr[2], *q;
        const char *name;
        bfc_pool *pool;
        char byte;
        const int errors[] = {
                bfc_malloc(c, 1, &q),
                bfc_malloc_in(c, NULL, 1, &q),
                bfc_malloc_with(c, 1, NULL, &q),
                bfc_malloc_flags(c, NULL, 1, BFC_WHOLE, &q),
                bfc_malloc_async(c, 1, 16, &q),
                bfc_pool_new(c, 1, &pool),
                bfc_free(c, p),
                bfc_free(c, NULL),
                bfc_free_async(c, p, 16),
                bfc_record_stream(c, p, 16),
                bfc_end_stream(c, 16),
                bfc_trim(c, SIZE_MAX),
                bfc_write(c, p, "x", 1),
                bfc_read(c, &byte, p, 1),
                bfc_publish(c, p, "name"),
                bfc_attach(c, "name", 1000, &q, NULL),
                bfc_detach(c, p),
                bfc_poll(c),
                bfc_poll_fd(c),
                bfc_stats(c, &stats),
                bfc_reset_peaks(c),
                bfc_usage(c, NULL, &usage),
                bfc_block_info(c, p, &info),
                bfc_partition_for_device(c, 0, &name),
        };

        for (size_t i = 0; i < sizeof(errors) / sizeof(errors[0]); i++)
                REQUIRE(errors[i] == -ECHILD, "call %zu: %d", i, errors[i]);
        REQUIRE(strstr(bfc_last_error(), "bfc_connect") && strstr(bfc_last_error(), "BFC_INHERIT"), "%s",
                bfc_last_error());
        bfc_disconnect(c);
        bfc_disconnect(child_client_with(.socket = getenv("BFC_SOCKET")));
        REQUIRE(bfc_default(&c) == 0 && bfc_usage(c, NULL, &usage) == 0, "%s", bfc_last_error());
}

static void calls_in_children(void *arg)
{
        uint64_t flags = *(uint64_t *)arg;
        struct blocks b = blocks_new(getenv("BFC_SOCKET"), NULL, flags);
        void *p;

        in_child_and_grandchild(call_everything, &b);
        for (unsigned i = 0; i < N_BLOCKS; i++)
                REQUIRE(bfc_free(b.client, b.ptr[i]) == 0, "%s", bfc_last_error());
        REQUIRE(bfc_malloc(b.client, 9 * MIB, &p) == 0, "%s", bfc_last_error());
        bfc_disconnect(b.client);
}

LOOP_TEST(every_call_in_a_child_fails_with_advice, 4)
{
        static uint64_t flags[] = { 0, BFC_INHERIT, BFC_NO_CACHE, BFC_POLL };
        struct rig *rig = rig_start(&one_tenant);

        setenv("BFC_SOCKET", rig->socket, 1);
        child_join(child_start(calls_in_children, &flags[_i]));
        rig_stop(rig);
}

/* The parent's sockets are closed in the child: a copy would keep them open beyond the parent's end. */
static void count_sockets(void *arg)
{
        int n_before = 0, n_child;
        struct blocks b;
        pid_t pid;

        for (int fd = 3; fd < 1024; fd++)
                n_before += fcntl(fd, F_GETFD) >= 0;
        b = blocks_new(arg, NULL, 0);
        pid = fork_child();
        if (pid == 0) {
                n_child = 0;
                for (int fd = 3; fd < 1024; fd++)
                        n_child += fcntl(fd, F_GETFD) >= 0;
                REQUIRE(rig_device() != ON_HOST || n_child == n_before, "%d fds, %d before", n_child,
                        n_before);
                _exit(0);
        }
        REQUIRE(wait_for(pid) == 0, "the child");
        bfc_disconnect(b.client);
}

RIG_TEST(a_child_keeps_no_socket, one_tenant)
{
        child_join(child_start(count_sockets, rig->socket));
}

/* ---- beside threads ------------------------------------------------------------ */

struct busy {
        bfc_client *client;
        atomic_bool is_over;
};

static void *be_busy(void *arg)
{
        struct busy *b = arg;
        void *p, *q;

        while (!atomic_load(&b->is_over)) {
                REQUIRE(bfc_malloc(b->client, 3 * MIB, &p) == 0, "%s", bfc_last_error());
                REQUIRE(bfc_malloc(b->client, 500, &q) == 0, "%s", bfc_last_error());
                REQUIRE(bfc_free(b->client, p) == 0 && bfc_free(b->client, q) == 0, "%s", bfc_last_error());
                REQUIRE(bfc_trim(b->client, SIZE_MAX) == 0, "%s", bfc_last_error());
        }
        return NULL;
}

static void child_beside_threads(void *arg)
{
        struct busy *b = arg;
        void *p;

        REQUIRE(bfc_malloc(b->client, 1, &p) == -ECHILD, "the parent's client");
        REQUIRE(bfc_free(b->client, b) == -ECHILD, "the parent's client");
        bfc_disconnect(b->client);
        if (!CHILDREN_HAVE_EVENTS)
                return;
        b->client = child_client_with(.socket = getenv("BFC_SOCKET"), .flags = BFC_NO_THREAD);
        REQUIRE(rig_device() != ON_HOST || bfc_malloc(b->client, 300, &p) == 0, "%s", bfc_last_error());
}

static void fork_beside_threads(void *arg)
{
        struct busy b = { .client = child_client_with(.socket = arg) };
        pthread_t threads[3];

        for (int i = 0; i < 3; i++)
                REQUIRE(pthread_create(&threads[i], NULL, be_busy, &b) == 0, "a thread");
        for (int i = 0; i < 12; i++)
                in_child_and_grandchild(child_beside_threads, &b);
        atomic_store(&b.is_over, true);
        for (int i = 0; i < 3; i++)
                pthread_join(threads[i], NULL);
        bfc_disconnect(b.client);
}

RIG_TEST(children_beside_busy_threads, one_tenant)
{
        setenv("BFC_SOCKET", rig->socket, 1);
        child_join(child_start(fork_beside_threads, rig->socket));
}

/* ---- BFC_INHERIT ----------------------------------------------------------------- */

enum { BY_FREE, BY_FREE_ASYNC, BY_DISCONNECT, N_WAYS };

struct family {
        const char *socket;
        int way;
        uint64_t flags;
        struct gate looked, freed;
};

static void child_of_family(const struct family *f, const struct blocks *b, const char *later)
{
        for (unsigned i = 0; i < N_BLOCKS; i++) {
                REQUIRE(pattern_holds(b->ptr[i], sizes[i], i), "block %u in the child", i);
                pattern_write(b->ptr[i], sizes[i], 100 + i);
        }
        gate_open((struct gate *)&f->looked);
        REQUIRE(gate_wait((struct gate *)&f->freed, LIMIT_MS), "not freed");
        for (unsigned i = 0; i < N_BLOCKS; i++)
                REQUIRE(all_bytes_are(b->ptr[i], sizes[i], 0), "block %u after the free", i);
        REQUIRE(kills_a_child(later), "a block that was mapped after the fork");
        require_reserved(later, 8 * MIB);
}

static void parent_of_family(void *arg)
{
        struct family *f = arg;
        struct blocks b = blocks_new(f->socket, NULL, BFC_INHERIT | f->flags);
        char *later = NULL;
        int to_child[2];
        pid_t pid;
        void *p;

        REQUIRE(pipe(to_child) == 0, "pipe");
        pid = fork_child();
        if (pid == 0) {
                REQUIRE(read(to_child[0], &later, sizeof(later)) == (ssize_t)sizeof(later), "pipe");
                child_of_family(f, &b, later);
                _exit(0);
        }
        REQUIRE(bfc_malloc(b.client, 20 * MIB, &p) == 0, "%s", bfc_last_error());
        later = (char *)p + 12 * MIB; /* its start may be in an extent that was there before */
        REQUIRE(write(to_child[1], &later, sizeof(later)) == (ssize_t)sizeof(later), "pipe");
        REQUIRE(gate_wait(&f->looked, LIMIT_MS), "the child");
        for (unsigned i = 0; i < N_BLOCKS; i++)
                REQUIRE(pattern_holds(b.ptr[i], sizes[i], 100 + i), "what the child wrote into block %u", i);
        for (unsigned i = 0; i < N_BLOCKS && f->way != BY_DISCONNECT; i++)
                REQUIRE((f->way == BY_FREE ? bfc_free(b.client, b.ptr[i])
                                           : bfc_free_async(b.client, b.ptr[i], 16)) == 0,
                        "%s", bfc_last_error());
        if (f->way == BY_DISCONNECT)
                bfc_disconnect(b.client);
        gate_open(&f->freed);
        REQUIRE(wait_for(pid) == 0, "the child");
        if (f->way != BY_DISCONNECT)
                bfc_disconnect(b.client);
}

LOOP_TEST(children_share_blocks_until_they_are_freed, 2 * N_WAYS)
{
        struct rig *rig;
        struct family f = { .way = _i % N_WAYS, .flags = _i < N_WAYS ? 0 : BFC_NO_CACHE };

        if (rig_device() != ON_HOST) /* CUDA does not survive fork() */
                return;
        rig = rig_start(&one_tenant);
        f.socket = rig->socket;
        f.looked = gate_new();
        f.freed = gate_new();
        child_join(child_start(parent_of_family, &f));
        rig_stop(rig);
}

/* ---- two tenants ------------------------------------------------------------------ */

#define BIG (28 * MIB)

struct watch {
        const char *socket;
        bool is_killed;
        struct gate up, freed;
        struct gate go, checked; /* blue has it; the child has looked */
        atomic_int child;
};

static void fill(uint64_t *words, uint64_t value)
{
        for (size_t i = 0; i < BIG / sizeof(*words); i++)
                words[i] = value;
}

static size_t count_others(const uint64_t *words, uint64_t value)
{
        size_t n = 0;

        for (size_t i = 0; i < BIG / sizeof(*words); i++)
                n += words[i] != value;
        return n;
}

/* Blue does not get the extents while this mapping is there. */
static void spy(struct watch *w, uint64_t *words)
{
        prctl(PR_SET_PDEATHSIG, 0); /* it outlives its parent; the test ends it */
        prctl(PR_SET_NAME, "fork-spy");
        gate_meet(&w->up, &w->go);
        /* The parent's free fills it with zeros. */
        REQUIRE(count_others(words, w->is_killed ? STAMP + 1 : 0) == 0, "bytes of another tenant");
        gate_open(&w->checked);
}

static void red_with_a_child(void *arg)
{
        struct watch *w = arg;
        bfc_client *client = child_client_with(.socket = w->socket, .tenant = "red", .flags = BFC_INHERIT);
        void *p;
        pid_t pid;

        REQUIRE(bfc_malloc(client, BIG, &p) == 0, "%s", bfc_last_error());
        fill(p, STAMP + 1);
        pid = fork_child();
        if (pid == 0) {
                spy(w, p);
                _exit(0);
        }
        atomic_store(&w->child, pid);
        REQUIRE(gate_wait(&w->up, LIMIT_MS), "the child");
        if (w->is_killed)
                kill(getpid(), SIGKILL);
        REQUIRE(bfc_free(client, p) == 0, "%s", bfc_last_error());
        gate_open(&w->freed);
        REQUIRE(wait_for(pid) == 0, "the child");
        bfc_disconnect(client);
}

/* Blue needs red's memory. The session of a killed parent ends, also if its child has blocks mapped. */
LOOP_TEST(a_child_sees_no_other_tenants_bytes, 2)
{
        struct watch *w;
        struct rig *rig;
        bfc_client *blue;
        pid_t pid;
        void *p;

        if (rig_device() != ON_HOST)
                return;
        w = shared_memory(sizeof(*w));
        rig = rig_start(&two_tenants);
        rig->forgiven = "unreclaimed";
        *w = (struct watch){ .socket = rig->socket, .is_killed = _i };
        w->up = gate_new();
        w->freed = gate_new();
        w->go = gate_new();
        w->checked = gate_new();
        pid = child_start(red_with_a_child, w);
        if (w->is_killed) {
                int status;

                ck_assert_int_eq(waitpid(pid, &status, 0), pid);
                ck_assert(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
                ck_assert(WAIT_FOR(rig_count(rig).n_sessions == 0, LIMIT_MS));
                ck_assert_uint_eq(rig_count(rig).n_quarantined, 0);
        } else {
                ck_assert(gate_wait(&w->freed, LIMIT_MS));
        }
        blue = client_open(rig, "blue", NULL);
        ck_assert_int_eq(bfc_malloc(blue, BIG, &p), -ENOMEM);
        gate_open(&w->go);
        ck_assert_msg(gate_wait(&w->checked, LIMIT_MS), "the child's memory has changed");
        ck_assert_ok(bfc_malloc_with(
                blue, BIG,
                &(struct bfc_malloc_options){ .struct_size = sizeof(struct bfc_malloc_options),
                                              .wait_ms = LIMIT_MS },
                &p));
        ck_assert_uint_eq(count_others(p, 0), 0);
        if (!w->is_killed)
                child_join(pid);
        bfc_disconnect(blue);
        rig_stop(rig);
}

/* ---- a pre-forking server ---------------------------------------------------------- */

struct server {
        const char *socket; /* the daemon's */
        int listener;
        struct gate up, stop_one, replaced, free_it, freed, end;
        atomic_int workers[SERVERS];
};

#define MODEL_BYTES (4 * MIB)

/* Answers with the byte at the offset that is asked for. */
static void serve(int listener, const unsigned char *model)
{
        uint32_t offset;
        int fd;

        alarm(0);
        while ((fd = accept(listener, NULL, NULL)) >= 0) {
                while (read(fd, &offset, sizeof(offset)) == (ssize_t)sizeof(offset))
                        if (write(fd, &model[offset], 1) != 1)
                                break;
                close(fd);
        }
        _exit(0);
}

static void worker_new(struct server *s, unsigned i, const unsigned char *model)
{
        pid_t pid = fork_child();

        if (pid == 0)
                serve(s->listener, model);
        atomic_store(&s->workers[i], pid);
}

static void be_server(void *arg)
{
        struct server *s = arg;
        bfc_client *client = child_client_with(.socket = s->socket, .flags = BFC_INHERIT);
        void *model;

        REQUIRE(bfc_malloc(client, MODEL_BYTES, &model) == 0, "%s", bfc_last_error());
        pattern_write(model, MODEL_BYTES, 7);
        for (unsigned i = 0; i < SERVERS; i++)
                worker_new(s, i, model);
        gate_open(&s->up);
        for (unsigned i = 0; i < 2 * SERVERS; i++) {
                REQUIRE(gate_wait(&s->stop_one, LIMIT_MS), "stop_one");
                kill(atomic_load(&s->workers[i % SERVERS]), SIGKILL);
                wait_for(atomic_load(&s->workers[i % SERVERS]));
                worker_new(s, i % SERVERS, model);
                gate_open(&s->replaced);
        }
        REQUIRE(gate_wait(&s->free_it, LIMIT_MS), "free_it");
        REQUIRE(bfc_free(client, model) == 0, "%s", bfc_last_error());
        gate_meet(&s->freed, &s->end);
        for (unsigned i = 0; i < SERVERS; i++) {
                kill(atomic_load(&s->workers[i]), SIGKILL);
                wait_for(atomic_load(&s->workers[i]));
        }
        bfc_disconnect(client);
}

static int server_listen(const struct rig *rig, struct sockaddr_un *ret)
{
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

        *ret = (struct sockaddr_un){ .sun_family = AF_UNIX };
        snprintf(ret->sun_path, sizeof(ret->sun_path), "%s/served", rig->folder);
        ck_assert_int_ge(fd, 0);
        ck_assert_int_eq(bind(fd, (struct sockaddr *)ret, sizeof(*ret)), 0);
        ck_assert_int_eq(listen(fd, 16), 0);
        return fd;
}

/* What the workers say of places of the model; pattern: as it was written, else zeros. */
static void ask_workers(const struct sockaddr_un *address, const unsigned char *want)
{
        for (unsigned round = 0; round < 3 * SERVERS; round++) {
                int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

                ck_assert_int_eq(connect(fd, (const struct sockaddr *)address, sizeof(*address)), 0);
                for (unsigned i = 0; i < 200; i++) {
                        uint32_t offset = (round * 200 + i) * 2003u % MODEL_BYTES;
                        unsigned char byte;

                        ck_assert_int_eq(write(fd, &offset, sizeof(offset)), (ssize_t)sizeof(offset));
                        ck_assert_int_eq(read(fd, &byte, 1), 1);
                        ck_assert_uint_eq(byte, want ? want[offset] : 0);
                }
                close(fd);
        }
}

TEST(a_pre_forking_server)
{
        unsigned char *want;
        struct sockaddr_un address;
        struct server *s;
        struct rig *rig;
        pid_t pid;

        if (rig_device() != ON_HOST)
                return;
        s = shared_memory(sizeof(*s));
        want = malloc(MODEL_BYTES);
        ck_assert_ptr_nonnull(want);
        pattern_write(want, MODEL_BYTES, 7);
        rig = rig_start(&one_tenant);
        s->socket = rig->socket;
        s->listener = server_listen(rig, &address);
        for (struct gate *g = &s->up; g <= &s->end; g++)
                *g = gate_new();
        pid = child_start(be_server, s);
        ck_assert(gate_wait(&s->up, LIMIT_MS));
        ask_workers(&address, want);
        for (unsigned i = 0; i < 2 * SERVERS; i++) {
                gate_open(&s->stop_one);
                ck_assert(gate_wait(&s->replaced, LIMIT_MS));
                ask_workers(&address, want);
        }
        gate_open(&s->free_it);
        ck_assert(gate_wait(&s->freed, LIMIT_MS));
        ask_workers(&address, NULL);
        gate_open(&s->end);
        child_join(pid);
        close(s->listener);
        unlink(address.sun_path);
        free(want);
        rig_stop(rig);
}

/* ---- Python -------------------------------------------------------------------------- */

LOOP_TEST(pythons_multiprocessing, 2)
{
        static const char *const modes[] = { "default", "inherit" };
        const char *const argv[] = { "/usr/bin/env", "python3", getenv("BFC_POOL_PY"), modes[_i], NULL };
        struct rig *rig;
        char *err = NULL;
        int status;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
        puts("# skipped: the interpreter is built without the sanitizer of the library");
        return;
#endif
        if (rig_device() != ON_HOST || !argv[2])
                return;
        rig = rig_start(&one_tenant);
        setenv("BFC_SOCKET", rig->socket, 1);
        setenv("BFC_INHERIT", _i == 1 ? "on" : "off", 1);
        status = program_run(argv, NULL, &err);
        ck_assert_msg(status == 0, "status %d: %s", status, err);
        free(err);
        ck_assert(WAIT_FOR(rig_count(rig).n_sessions == 0, LIMIT_MS));
        rig_stop(rig);
}

/* ---- unloading and exit ---------------------------------------------------------------- */

struct host {
        pid_t pid;
        int to, from;
};

static struct host host_start(const char *program, const char *plugin)
{
        int to[2], from[2];
        struct host h;

        ck_assert_int_eq(pipe2(to, O_CLOEXEC), 0);
        ck_assert_int_eq(pipe2(from, O_CLOEXEC), 0);
        fflush(NULL);
        h = (struct host){ .pid = fork(), .to = to[1], .from = from[0] };
        if (h.pid == 0) {
                dup2(to[0], STDIN_FILENO);
                dup2(from[1], STDOUT_FILENO);
                execl(program, program, plugin, NULL);
                _exit(127);
        }
        ck_assert_int_gt(h.pid, 0);
        close(to[0]);
        close(from[1]);
        return h;
}

/* The client's thread outlives the plugin: it answers a trim, and the session ends with a goodbye. */
TEST(a_plugin_is_unloaded)
{
        const char *program = getenv("BFC_FORK_HOST"), *plugin = getenv("BFC_FORK_PLUGIN");
        struct rig *rig;
        struct host h;
        char text[32] = "", *out = NULL, *err = NULL;
        int status;

        if (!program || !plugin)
                return;
        rig = rig_start(&one_tenant);
        setenv("BFC_SOCKET", rig->socket, 1);
        h = host_start(program, plugin);
        ck_assert_int_gt(read(h.from, text, sizeof(text) - 1), 0);
        ck_assert_str_eq(text, "unloaded\n");
        ck_assert_uint_eq(rig_count(rig).n_sessions, 1);
        if (rig_charge(rig, "red", "train") > 0) { /* the trim is answered by that process */

                status = ctl(rig->admin_socket, WORDS("trim", "red"), &out, &err);
                ck_assert_msg(status == 0 && strncmp(out, "1 session asked", 15) == 0, "%d: %s%s", status,
                              out, err);
                free(out);
                free(err);
                ck_assert(WAIT_FOR(rig_stats(rig, "red", "train").bytes_in_use == 0, LIMIT_MS));
        }
        ck_assert_int_eq(waitpid(h.pid, &status, WNOHANG), 0);
        close(h.to);
        ck_assert_int_eq(waitpid(h.pid, &status, 0), h.pid);
        ck_assert_int_eq(status, 0);
        close(h.from);
        ck_assert(WAIT_FOR(rig_logged(rig, "ended (goodbye at exit)"), LIMIT_MS));
        rig_stop(rig);
}

static void *wait_in_a_call(void *client)
{
        void *p;

        bfc_malloc_with(client, 60 * MIB,
                        &(struct bfc_malloc_options){ .struct_size = sizeof(struct bfc_malloc_options),
                                                      .wait_ms = 10 * LIMIT_MS },
                        &p);
        return NULL;
}

static void *write_on(void *block)
{
        for (volatile unsigned char *p = block;; p[4242]++)
                ;
        return NULL;
}

/* _i: threads use the client and its memory while the process exits; 2: it forks before, and the child
 * exits as well. */
static void use_and_exit(void *arg)
{
        int how = *(int *)arg;
        bfc_client *client;
        pthread_t thread;
        void *p;

        REQUIRE(bfc_default(&client) == 0, "%s", bfc_last_error());
        REQUIRE(bfc_malloc(client, 12 * MIB, &p) == 0, "%s", bfc_last_error());
        if (how == 1) {
                REQUIRE(pthread_create(&thread, NULL, wait_in_a_call, client) == 0, "a thread");
                if (rig_device() == ON_HOST)
                        REQUIRE(pthread_create(&thread, NULL, write_on, p) == 0, "a thread");
        }
        if (how == 2) {
                pid_t pid = fork_child();

                if (pid == 0)
                        exit(0);
                REQUIRE(wait_for(pid) == 0, "the child");
                REQUIRE(bfc_free(client, p) == 0 && bfc_malloc(client, 13 * MIB, &p) == 0, "%s",
                        bfc_last_error());
        }
        exit(0);
}

LOOP_TEST(an_exit_is_a_goodbye, 3)
{
        struct rig *rig = rig_start(&one_tenant);
        int how = _i;

        setenv("BFC_SOCKET", rig->socket, 1);
        child_join(child_start(use_and_exit, &how));
        ck_assert(WAIT_FOR(rig_logged(rig, "ended (goodbye at exit)"), LIMIT_MS));
        ck_assert(!rig_logged(rig, "quarantine"));
        ck_assert(WAIT_FOR(rig_count(rig).n_sessions == 0, LIMIT_MS));
        rig_stop(rig);
}

static void setup(void)
{
        setenv("BFC_CACHE", "on", 1);
        unsetenv("BFC_INHERIT");
}

int main(void)
{
        return harness_cases_with("fork", TEST_TIMEOUT, setup);
}
