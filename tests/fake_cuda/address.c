/* Device addresses: one window of the process's addresses, cut into 2 MiB slots, and what programs prefer outside of it.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The lowest free slots are given out, so an address that was freed comes back
 * soon, as a driver's do: who mistakes a new allocation for an old one at the
 * same address is found out. Nothing of the window reaches a fork()ed child.
 *
 * Invariant: a slot that is not taken is PROT_NONE and without memory. */
#include "tests/fake_cuda/fake.h"

#include <string.h>
#include <sys/mman.h>

#define MAX_SLOTS ((size_t)1 << 17) /* 256 GiB of addresses */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char is_taken[MAX_SLOTS];
static size_t n_slots;
static uintptr_t window;

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

static bool blank(uintptr_t at, size_t n_bytes, int flags, uintptr_t *ret)
{
        void *p = mmap((void *)at, n_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags,
                       -1, 0);

        if (p == MAP_FAILED)
                return false;
        madvise(p, n_bytes, MADV_DONTFORK);
        *ret = (uintptr_t)p;
        return true;
}

/* As large as the system allows: under valgrind, or a limit, it is less. */
static bool window_open(void)
{
        uintptr_t p;

        for (size_t n = MAX_SLOTS; n_slots == 0 && n >= 1024; n /= 2) {
                if (!blank(0, (n + 1) * FAKE_GRANULARITY, 0, &p))
                        continue;
                window = fake_round_up(p);
                n_slots = n;
        }
        return n_slots > 0;
}

uintptr_t fake_address_take(size_t n_bytes, size_t alignment)
{
        size_t n = n_bytes / FAKE_GRANULARITY;
        uintptr_t at = 0;

        pthread_mutex_lock(&lock);
        for (size_t i = 0; window_open() && n <= n_slots && i <= n_slots - n; i++) {
                const char *in_the_way = memchr(is_taken + i, 1, n);

                if (in_the_way) {
                        i = (size_t)(in_the_way - is_taken);
                } else if ((window + i * FAKE_GRANULARITY) % alignment == 0) {
                        memset(is_taken + i, 1, n);
                        at = window + i * FAKE_GRANULARITY;
                        break;
                }
        }
        pthread_mutex_unlock(&lock);
        return at;
}

static bool is_in_window(uintptr_t at, size_t n_bytes)
{
        return at >= window && at - window < n_slots * FAKE_GRANULARITY &&
               n_bytes <= n_slots * FAKE_GRANULARITY - (at - window);
}

/* Also where the process has nothing else: a driver's addresses are the process's, too. */
bool fake_address_take_at(uintptr_t at, size_t n_bytes)
{
        bool is_free = false;
        uintptr_t got;

        pthread_mutex_lock(&lock);
        if (at % FAKE_GRANULARITY == 0 && window_open() && is_in_window(at, n_bytes)) {
                char *slots = is_taken + (at - window) / FAKE_GRANULARITY;

                is_free = !memchr(slots, 1, n_bytes / FAKE_GRANULARITY);
                if (is_free)
                        memset(slots, 1, n_bytes / FAKE_GRANULARITY);
        } else if (at % FAKE_GRANULARITY == 0 && blank(at, n_bytes, MAP_FIXED_NOREPLACE, &got)) {
                is_free = got == at;
                if (!is_free) /* a kernel that does not know the flag */
                        munmap((void *)got, n_bytes);
        }
        pthread_mutex_unlock(&lock);
        return is_free;
}

bool fake_address_blank(uintptr_t at, size_t n_bytes)
{
        return blank(at, n_bytes, MAP_FIXED, &at);
}

void fake_address_give_back(uintptr_t at, size_t n_bytes)
{
        if (!is_in_window(at, n_bytes)) {
                munmap((void *)at, n_bytes);
                return;
        }
        if (!fake_address_blank(at, n_bytes))
                fake_die("cannot unmap: %m");
        pthread_mutex_lock(&lock);
        memset(is_taken + (at - window) / FAKE_GRANULARITY, 0, n_bytes / FAKE_GRANULARITY);
        pthread_mutex_unlock(&lock);
}

bool fake_address_map(uintptr_t at, size_t n_bytes, int fd, int protection)
{
        return fake_object_map((void *)at, n_bytes, protection, fd) != NULL;
}
