/* See gpus.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/gpus.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/suite.h"

uint64_t gpu_bytes = UINT64_C(128) << 20;
struct fake_device gpus[2];
struct devices *devices;
struct peer *a1, *b1, *admin;
static int saved_stderr, log_fd;

int gpus_find(void *userdata, const char *admin_socket, const char *id, struct config_gpu *ret,
              char *ret_sentence, size_t n_sentence)
{
        (void)admin_socket;
        (void)userdata;
        (void)ret_sentence;
        (void)n_sentence;
        *ret = (struct config_gpu){ .uuid = { 0xaa, (uint8_t)id[5] },
                                    .bytes_total = gpu_bytes,
                                    .bytes_free = gpu_bytes };
        return 0;
}

static void open_log(void)
{
        log_fd = memfd_create("log", MFD_CLOEXEC);
        saved_stderr = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0);
        ck_assert(log_fd >= 0 && saved_stderr >= 0);
        ck_assert_int_eq(dup2(log_fd, STDERR_FILENO), STDERR_FILENO);
}

unsigned count_log(const char *part)
{
        static char text[65536];
        ssize_t n = pread(log_fd, text, sizeof(text) - 1, 0);
        unsigned count = 0;

        ck_assert_int_ge(n, 0);
        text[n] = '\0';
        for (const char *at = text; (at = strstr(at, part)); at++)
                count++;
        return count;
}

struct peer *open_gpu_session(uid_t uid, bool has_events)
{
        struct peer *p = peer_new(b, uid, false);

        p->wants_events = has_events;
        return say_hello(p);
}

void gpus_start(const char *config_text, bool has_events)
{
        const struct config_machine machine = { .look = gpus_find };

        open_log();
        ck_assert_int_eq(devices_new(DEVICES_OWN, &devices), 0);
        for (size_t i = 0; i < 2; i++) {
                fake_device_init(&gpus[i], UINT64_C(2) << 20);
                gpus[i].stays_lost = true;
                gpus[i].facts.bytes_total = gpu_bytes;
                gpus[i].facts.uuid[0] = 0xaa;
                gpus[i].facts.uuid[1] = (uint8_t)('0' + i);
                ck_assert_int_eq(devices_put(devices, i == 0 ? "cuda:0" : "cuda:1", &gpus[i].device), 0);
        }
        b = peer_broker_on(config_text, &machine, devices, &config);
        a1 = open_gpu_session(1, has_events);
        b1 = open_gpu_session(2, has_events);
        admin = open_admin_session();
}

void gpus_end(void)
{
        a1 = peer_free(a1);
        b1 = peer_free(b1);
        admin = peer_free(admin);
        settle();
        broker_free(b);
        config_free(config);
        devices = devices_free(devices);
        for (size_t i = 0; i < 2; i++)
                ck_assert_uint_eq(gpus[i].n_live, 0);
        dup2(saved_stderr, STDERR_FILENO);
        close(saved_stderr);
        close(log_fd);
}
