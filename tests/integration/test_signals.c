/* Waits that end early: by a signal, by Ctrl-C in Python, by cancel_fd. Nothing of them is left, neither
 * here nor at the daemon.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>

#include "tests/integration/tools.h"

#define LONG_MS 600000u

static const struct rig_config plain = { .size = NULL };
static atomic_uint n_handled;

static void on_signal(int number)
{
        (void)number;
        n_handled++;
}

/* With SA_RESTART, as most programs install them. */
static void handle_signals(void)
{
        struct sigaction action = { .sa_handler = on_signal, .sa_flags = SA_RESTART };

        sigemptyset(&action.sa_mask);
        ck_assert_int_eq(sigaction(SIGUSR1, &action, NULL), 0);
}

struct waiter {
        bfc_client *client;
        const char *name; /* NULL: it waits for room */
        bool charges;     /* by a direct charge */
        pthread_t thread;
        _Atomic bool is_over;
        int result;
        void *ptr;
};

static void *wait_in_thread(void *arg)
{
        struct bfc_malloc_options how = { .struct_size = sizeof(how), .wait_ms = LONG_MS };
        struct waiter *w = arg;

        if (w->charges)
                w->result = bfc_charge(w->client, NULL, 32 * MIB, LONG_MS);
        else if (w->name)
                w->result = bfc_attach(w->client, w->name, LONG_MS, &w->ptr, NULL);
        else
                w->result = bfc_malloc_with(w->client, 32 * MIB, &how, &w->ptr);
        w->is_over = true;
        return NULL;
}

static void waiter_start(struct waiter *w, bfc_client *client, const char *name)
{
        *w = (struct waiter){ .client = client, .name = name };
        ck_assert_int_eq(pthread_create(&w->thread, NULL, wait_in_thread, w), 0);
}

static int waiter_join(struct waiter *w)
{
        ck_assert_int_eq(pthread_join(w->thread, NULL), 0);
        return w->result;
}

/* Again and again: one that comes before the wait interrupts nothing. */
static int waiter_interrupt(struct waiter *w)
{
        ck_assert(WAIT_FOR(w->is_over || (pthread_kill(w->thread, SIGUSR1), false), 60000));
        return waiter_join(w);
}

RIG_TEST(a_signal_ends_a_wait_for_a_name, plain)
{
        bfc_client *client = client_open(rig, NULL, NULL);
        struct bfc_malloc_options whole = { .struct_size = sizeof(whole), .flags = BFC_WHOLE };
        struct waiter w;
        void *p, *q;

        handle_signals();
        waiter_start(&w, client, "weights");
        ck_assert_int_eq(waiter_interrupt(&w), -EINTR);
        ck_assert_ok(bfc_malloc_with(client, 1 * MIB, &whole, &p));
        ck_assert_ok(bfc_publish(client, p, "weights"));
        ck_assert_ok(bfc_attach(client, "weights", LONG_MS, &q, NULL));
        ck_assert_ok(bfc_detach(client, q));
        ck_assert_ok(bfc_detach(client, p));
        ck_assert_uint_eq(client_usage(client, NULL).bytes_in_use, 0);
        bfc_disconnect(client);
}

RIG_TEST(a_signal_ends_a_wait_for_room, plain)
{
        bfc_client *holder = client_open(rig, NULL, NULL), *client = client_open(rig, NULL, NULL);
        struct waiter w, behind;
        void *p;

        handle_signals();
        ck_assert_ok(bfc_malloc_flags(holder, NULL, 48 * MIB, BFC_WHOLE, &p));
        waiter_start(&w, client, NULL);
        ck_assert(WAIT_FOR(rig_n_waiting(rig, NULL) == 1, 60000));
        waiter_start(&behind, holder, NULL);
        ck_assert(WAIT_FOR(rig_n_waiting(rig, NULL) == 2, 60000));
        ck_assert_int_eq(waiter_interrupt(&w), -EINTR);
        ck_assert(WAIT_FOR(rig_n_waiting(rig, NULL) == 1, 60000));
        ck_assert_ok(bfc_free(holder, p)); /* the next one has its place */
        ck_assert_int_eq(waiter_join(&behind), 0);
        ck_assert_ok(bfc_free(holder, behind.ptr));
        bfc_disconnect(client);
        bfc_disconnect(holder);
}

/* The thread that reads is interrupted, and one that only waits. The others are not. */
RIG_TEST(threads_are_interrupted_one_by_one, plain)
{
        bfc_client *client = client_open(rig, NULL, NULL);
        struct waiter w[4];
        void *p;

        handle_signals();
        for (unsigned i = 0; i < 4; i++) { /* the first one reads */
                waiter_start(&w[i], client, i == 3 ? "weights" : "nothing");
                usleep(50000);
        }
        ck_assert_int_eq(waiter_interrupt(&w[1]), -EINTR);
        ck_assert_int_eq(waiter_interrupt(&w[0]), -EINTR);
        ck_assert(!w[2].is_over && !w[3].is_over);
        ck_assert_ok(bfc_malloc_flags(client, NULL, 1 * MIB, BFC_WHOLE, &p));
        ck_assert_ok(bfc_publish(client, p, "weights"));
        ck_assert_int_eq(waiter_join(&w[3]), 0);
        ck_assert_int_eq(waiter_interrupt(&w[2]), -EINTR);
        ck_assert_ok(bfc_detach(client, w[3].ptr));
        ck_assert_ok(bfc_detach(client, p));
        bfc_disconnect(client);
}

static void *storm(void *arg)
{
        struct waiter *w = arg;

        while (!w->is_over) {
                pthread_kill(w->thread, SIGUSR1);
                usleep(300);
        }
        return NULL;
}

/* A block, or a direct charge, that is taken and returned; it may wait. */
static int take_once(bfc_client *client, bool charges, size_t n_bytes)
{
        struct bfc_malloc_options how = { .struct_size = sizeof(how), .wait_ms = LONG_MS };
        void *p;
        int r = charges ? bfc_charge(client, NULL, n_bytes, LONG_MS)
                        : bfc_malloc_with(client, n_bytes, &how, &p);

        if (r < 0)
                return r;
        return charges ? bfc_uncharge(client, NULL, n_bytes) : bfc_free(client, p);
}

static void *wait_again_and_again(void *arg)
{
        struct waiter *w = arg;

        for (unsigned i = 0; i < 400 && w->result == 0; i++) {
                int r = take_once(w->client, w->charges, 32 * MIB + i);

                w->result = r == -EINTR ? 0 : r;
        }
        w->is_over = true;
        return NULL;
}

static void cross_signals(bfc_client *holder, bfc_client *client, bool charges)
{
        struct waiter w = { .client = client, .charges = charges };
        pthread_t stormer;

        handle_signals();
        ck_assert_int_eq(pthread_create(&w.thread, NULL, wait_again_and_again, &w), 0);
        ck_assert_int_eq(pthread_create(&stormer, NULL, storm, &w), 0);
        while (!w.is_over)
                ck_assert_ok(take_once(holder, charges, 40 * MIB));
        ck_assert_int_eq(pthread_join(stormer, NULL), 0);
        ck_assert_int_eq(waiter_join(&w), 0);
        ck_assert_uint_gt(n_handled, 0);
}

/* What is granted at the moment of a signal is freed. */
RIG_TEST(a_grant_that_crosses_a_signal_is_freed, plain)
{
        bfc_client *holder = client_open(rig, NULL, NULL), *client = client_open(rig, NULL, NULL);

        cross_signals(holder, client, false);
        ck_assert_ok(bfc_trim(holder, SIZE_MAX));
        ck_assert_ok(bfc_trim(client, SIZE_MAX));
        ck_assert_uint_eq(client_usage(client, NULL).bytes_in_use, 0);
        ck_assert_uint_eq(rig_n_waiting(rig, NULL), 0);
        bfc_disconnect(client);
        bfc_disconnect(holder);
}

/* It may be readable before the wait begins. */
static uint64_t bytes_direct(bfc_client *client)
{
        struct bfc_tenant_usage usage = { .struct_size = sizeof(usage) };

        ck_assert_ok(bfc_usage(client, NULL, &usage));
        return usage.bytes_direct;
}

/* What is charged at the moment of a signal is uncharged. */
RIG_TEST(a_charge_that_crosses_a_signal_is_dropped, plain)
{
        bfc_client *holder = client_open(rig, NULL, NULL), *client = client_open(rig, NULL, NULL);
        struct waiter w = { .client = client, .charges = true };

        handle_signals();
        ck_assert_ok(bfc_charge(holder, NULL, 40 * MIB, 0));
        ck_assert_int_eq(pthread_create(&w.thread, NULL, wait_in_thread, &w), 0);
        ck_assert(WAIT_FOR(rig_n_waiting(rig, NULL) == 1, 60000));
        ck_assert_int_eq(waiter_interrupt(&w), -EINTR);
        ck_assert_uint_eq(bytes_direct(client), 40 * MIB);
        ck_assert_ok(bfc_uncharge(holder, NULL, 40 * MIB));
        cross_signals(holder, client, true);
        ck_assert_uint_eq(bytes_direct(client), 0);
        ck_assert_int_eq(bfc_uncharge(client, NULL, 1), -EINVAL);
        ck_assert_uint_eq(rig_n_waiting(rig, NULL), 0);
        bfc_disconnect(client);
        bfc_disconnect(holder);
}

RIG_TEST(cancel_fd_ends_a_wait, plain)
{
        bfc_client *holder = client_open(rig, NULL, NULL), *client = client_open(rig, NULL, NULL);
        int fd = eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK);
        struct bfc_malloc_options how = { .struct_size = sizeof(how), .wait_ms = LONG_MS, .cancel_fd = fd };
        struct bfc_attach_options attach = { .struct_size = sizeof(attach), .wait_ms = LONG_MS };
        void *p, *q;

        ck_assert_int_gt(fd, 0);
        ck_assert_ok(bfc_malloc_flags(holder, NULL, 48 * MIB, BFC_WHOLE, &p));
        ck_assert_int_eq(bfc_malloc_with(client, 32 * MIB, &how, &q), -EINTR);
        attach.cancel_fd = fd;
        ck_assert_int_eq(bfc_attach_with(client, "weights", &attach, &q, NULL), -EINTR);
        ck_assert_uint_eq(rig_n_waiting(rig, NULL), 0);
        ck_assert_ok(bfc_free(holder, p));
        close(fd);
        how.cancel_fd = attach.cancel_fd = -1;
        ck_assert_int_eq(bfc_malloc_with(client, 32 * MIB, &how, &q), -EINVAL);
        ck_assert_int_eq(bfc_attach_with(client, "weights", &attach, &q, NULL), -EINVAL);
        attach = (struct bfc_attach_options){ .struct_size = offsetof(struct bfc_attach_options, flags) - 1 };
        ck_assert_int_eq(bfc_attach_with(client, "weights", &attach, &q, NULL), -EINVAL);
        ck_assert_int_eq(bfc_attach_with(client, "weights", NULL, &q, NULL), -ENOENT);
        bfc_disconnect(client);
        bfc_disconnect(holder);
}

static void send_cancel(struct raw *raw, uint64_t id)
{
        Bfcd__Cancel body = BFCD__CANCEL__INIT;
        Bfcd__Request request = REQUEST(CANCEL, cancel, &body);

        body.request_id = id;
        ck_assert_int_eq(raw_send(raw, &request), 0);
}

/* Though as many wait as may, and nothing else is read. A Cancel of what there is not does nothing. */
RIG_TEST(a_wait_among_many_is_withdrawn, plain)
{
        bfc_client *holder = client_open(rig, NULL, NULL);
        struct raw *raw = session_open(rig->socket, NULL);
        uint64_t ids[64];
        Bfcd__Reply *reply;
        void *p;

        ck_assert_ok(bfc_malloc_flags(holder, NULL, 48 * MIB, BFC_WHOLE, &p));
        for (unsigned i = 0; i < 64; i++)
                ids[i] = session_send_malloc(raw, 32 * MIB, LONG_MS);
        ck_assert(WAIT_FOR(rig_n_waiting(rig, NULL) == 64, 60000));
        send_cancel(raw, 0);
        send_cancel(raw, 12345);
        for (unsigned i = 64; i-- > 0;) {
                send_cancel(raw, ids[i]);
                ck_assert_int_eq(raw_receive(raw, 60000, &reply), 0);
                ck_assert_uint_eq(reply->id, ids[i]);
                ck_assert_int_eq(reply->body_case, BFCD__REPLY__BODY_REFUSAL);
                ck_assert_uint_eq(reply->refusal->error, ECANCELED);
                bfcd__reply__free_unpacked(reply, NULL);
        }
        ck_assert_uint_eq(rig_n_waiting(rig, NULL), 0);
        session_end(raw);
        bfc_disconnect(holder);
}

/* A real SIGINT, and Python's own handler. */
static const char python_program[] =
        "import ctypes, os, signal, sys, threading, time\n"
        "lib = ctypes.CDLL(os.environ['BFC_LIBRARY'])\n"
        "client, ptr = ctypes.c_void_p(), ctypes.c_void_p()\n"
        "assert lib.bfc_connect(None, ctypes.byref(client)) == 0\n"
        "started, caught = threading.Event(), threading.Event()\n"
        "def press():\n"
        "    started.wait()\n"
        "    while not caught.wait(0.5):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "threading.Thread(target=press, daemon=True).start()\n"
        "try:\n"
        "    started.set()\n"
        "    lib.bfc_attach(client, b'weights', 600000, ctypes.byref(ptr), None)\n"
        "    time.sleep(600)\n"
        "except KeyboardInterrupt:\n"
        "    signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "    caught.set()\n"
        "lib.bfc_disconnect(client)\n"
        "print('interrupted')\n";

RIG_TEST(ctrl_c_in_python, plain)
{
        static const char *const program[] = { "/usr/bin/python3", "-c", python_program, NULL };
        char *out = NULL, *err = NULL;
        bool can_run = access(program[0], X_OK) == 0;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
        can_run = false;
#endif
        if (can_run) {
                setenv("BFC_SOCKET", rig->socket, 1);
                ck_assert_msg(program_run(program, &out, &err) == 0, "%s", err);
                ck_assert_str_eq(out, "interrupted\n");
        } else {
                puts("# skipped: there is no python3, or it cannot load a library with sanitizers");
        }
        free(out);
        free(err);
}
