/* See late.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/late.h"

#include <check.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

struct late {
        _Atomic uint64_t now_ms;
        _Atomic uint64_t call_at_ms; /* UINT64_MAX: no call is due */
};

static struct late *late; /* shared with processes that are forked later */

int __real_clock_gettime(clockid_t clock, struct timespec *ret);
int __real_nanosleep(const struct timespec *pause, struct timespec *ret_left);
int __wrap_clock_gettime(clockid_t clock, struct timespec *ret);
int __wrap_nanosleep(const struct timespec *pause, struct timespec *ret_left);

void late_begin(void)
{
        late = mmap(NULL, sizeof(*late), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        ck_assert(late != MAP_FAILED);
        late->now_ms = 1000000;
        late->call_at_ms = UINT64_MAX;
}

void late_end(void)
{
        ck_assert_uint_eq(late->call_at_ms, UINT64_MAX);
        munmap(late, sizeof(*late));
        late = NULL;
}

uint64_t late_now_ms(void)
{
        return late->now_ms;
}

void late_pass(uint64_t ms)
{
        uint64_t now = atomic_fetch_add(&late->now_ms, ms) + ms;

        while (late->call_at_ms <= now)
                usleep(200);
}

static void *wait_and_call(void *userdata)
{
        void (*function)(void) = *(void (**)(void))userdata;

        while (late->now_ms < late->call_at_ms)
                usleep(200);
        function();
        late->call_at_ms = UINT64_MAX;
        return NULL;
}

int late_call(uint64_t after_ms, void (*function)(void))
{
        static void (*called)(void);
        pthread_t thread;

        called = function;
        late->call_at_ms = late->now_ms + after_ms;
        if (pthread_create(&thread, NULL, wait_and_call, &called) != 0)
                return -EAGAIN;
        pthread_detach(thread);
        return 0;
}

int __wrap_clock_gettime(clockid_t clock, struct timespec *ret)
{
        uint64_t now;

        if (!late)
                return __real_clock_gettime(clock, ret);
        now = late->now_ms;
        ret->tv_sec = (time_t)(now / 1000);
        ret->tv_nsec = (long)(now % 1000) * 1000000;
        return 0;
}

int __wrap_nanosleep(const struct timespec *pause, struct timespec *ret_left)
{
        if (!late)
                return __real_nanosleep(pause, ret_left);
        late_pass((uint64_t)pause->tv_sec * 1000 + (uint64_t)pause->tv_nsec / 1000000);
        return 0;
}
