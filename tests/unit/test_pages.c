/* Pages: entries under a writer at full speed, what seals forbid, what is taken for a page, and
 * what a session makes of its client's.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "daemon/memory/pages.h"
#include "daemon/session/report.h"
#include "device/device.h"
#include "proto/ages.h"
#include "proto/memfd.h"
#include "tests/random.h"
#include "tests/suite.h"
#include "tests/unit/sessions.h"

#define SIZE_SEALS (F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL)
#define ALL_SEALS  (SIZE_SEALS | F_SEAL_FUTURE_WRITE)

/* ---- entries -------------------------------------------------------------- */

static void multiples(uint64_t n, uint64_t stats[PAGES_N_STATS])
{
        for (unsigned i = 0; i < PAGES_N_STATS; i++)
                stats[i] = n * (i + 1);
}

TEST(one_entry)
{
        struct pages_entry e = { 0 };
        uint64_t in[PAGES_N_STATS], out[PAGES_N_STATS];

        multiples(7, in);
        pages_write(&e, in);
        ck_assert_int_eq(pages_read(&e, out), 0);
        ck_assert_mem_eq(in, out, sizeof(in));
        pages_close(&e);
        pages_close(&e);
        ck_assert_int_eq(pages_read(&e, out), -EAGAIN);
}

struct race {
        struct pages_entry entry;
        _Atomic bool stop;
        uint64_t n_reads, n_wrong, n_changes;
};

static void *race_write(void *userdata)
{
        struct race *race = userdata;
        uint64_t stats[PAGES_N_STATS];

        for (uint64_t n = 1; !atomic_load_explicit(&race->stop, memory_order_relaxed); n++) {
                multiples(n, stats);
                pages_write(&race->entry, stats);
        }
        return NULL;
}

/* Both ends in one process, so that a race detector sees both. Where a loaded machine lets them take
 * turns it takes longer until enough was seen to change. */
TEST(entry_read_during_a_write)
{
        static struct race race;
        uint64_t stats[PAGES_N_STATS], want[PAGES_N_STATS], last = 0;
        time_t end = time(NULL) + 2;
        pthread_t thread;

        memset(&race, 0, sizeof(race));
        ck_assert_int_eq(pthread_create(&thread, NULL, race_write, &race), 0);
        while (race.n_changes <= 10 || (race.n_changes < 20000 && time(NULL) < end)) {
                for (unsigned i = 0; i < 1000; i++) {
                        if (pages_read(&race.entry, stats) < 0)
                                continue;
                        multiples(stats[0], want);
                        race.n_reads++;
                        race.n_wrong += memcmp(stats, want, sizeof(want)) != 0;
                        race.n_changes += stats[0] != last;
                        ck_assert_uint_ge(stats[0], last);
                        last = stats[0];
                }
        }
        atomic_store(&race.stop, true);
        pthread_join(thread, NULL);
        ck_assert_uint_eq(race.n_wrong, 0);
}

/* ---- seals ----------------------------------------------------------------- */

/* A page of four bytes more or less, or of another content, would be the others' end. */
static void expect_size_stays(int fd)
{
        ck_assert(ftruncate(fd, 0) < 0 && errno == EPERM);
        ck_assert(ftruncate(fd, 1 << 20) < 0 && errno == EPERM);
        ck_assert(fallocate(fd, 0, 0, 1 << 20) < 0 && errno == EPERM);
        ck_assert(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE) < 0 && errno == EPERM);
}

/* Also by a second fd, which each holder of the first can open. */
static int open_again(int fd)
{
        char path[64];
        int ret;

        snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
        ret = open(path, O_RDWR | O_CLOEXEC);
        ck_assert_int_ge(ret, 0);
        return ret;
}

TEST(usage_page_is_read_only_for_clients)
{
        struct usage_page *p;
        struct pages_view v;
        char byte = 1;
        int fds[2];

        ck_assert_int_eq(usage_page_new(3, &p), 0);
        fds[0] = p->fd;
        fds[1] = open_again(p->fd);
        ck_assert_int_eq(pages_map_usage(p->fd, &v), 0);
        ck_assert_uint_eq(v.n_entries, 3);
        ck_assert_ptr_nonnull(pages_view_entry(&v, 2));
        ck_assert_ptr_null(pages_view_entry(&v, 3));
        ck_assert(mprotect((void *)(uintptr_t)v.page, v.n_bytes, PROT_READ | PROT_WRITE) < 0);
        for (size_t i = 0; i < 2; i++) {
                expect_size_stays(fds[i]);
                ck_assert(pwrite(fds[i], &byte, 1, 0) < 0 && errno == EPERM);
                ck_assert(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fds[i], 0) == MAP_FAILED);
                ck_assert(fallocate(fds[i], FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096) < 0);
        }
        close(fds[1]);
        munmap((void *)(uintptr_t)v.page, v.n_bytes);
        usage_page_free(p);
}

/* A process that still has it mapped must not take old statistics for new ones. */
TEST(usage_page_ends)
{
        uint64_t in[PAGES_N_STATS], out[PAGES_N_STATS];
        struct usage_page *p;
        struct pages_view v;

        ck_assert_int_eq(usage_page_new(1, &p), 0);
        ck_assert_int_eq(pages_map_usage(p->fd, &v), 0);
        multiples(3, in);
        pages_write(usage_page_entry(p, 0), in);
        ck_assert_int_eq(pages_read(pages_view_entry(&v, 0), out), 0);
        ck_assert_mem_eq(in, out, sizeof(in));
        usage_page_free(p);
        ck_assert_int_eq(pages_read(pages_view_entry(&v, 0), out), -EAGAIN);
        munmap((void *)(uintptr_t)v.page, v.n_bytes);
}

/* ---- what is taken for a page ---------------------------------------------- */

static int memfd(size_t n_bytes, const struct pages_usage *header, int seals)
{
        int fd = memfd_create("page", MFD_CLOEXEC | MFD_ALLOW_SEALING);

        ck_assert_int_eq(ftruncate(fd, (off_t)n_bytes), 0);
        if (header)
                ck_assert_int_eq(pwrite(fd, header, sizeof(*header), 0), sizeof(*header));
        ck_assert_int_eq(fcntl(fd, F_ADD_SEALS, seals), 0);
        return fd;
}

static void expect_usage(int want, size_t n_bytes, const struct pages_usage *header, int seals)
{
        struct pages_view v = { 0 };
        int fd = memfd(n_bytes, header, seals);

        ck_assert_int_eq(pages_map_usage(fd, &v), want);
        if (want == 0)
                munmap((void *)(uintptr_t)v.page, v.n_bytes);
        else
                ck_assert_ptr_null(v.page);
        close(fd);
}

static const struct pages_usage right = { PAGES_USAGE_MAGIC, PAGES_VERSION, 31, 128, {} };

TEST(odd_usage_pages)
{
        struct pages_usage h = right;
        struct pages_view v;
        int fds[2];

        expect_usage(0, 4096, &h, ALL_SEALS);
        expect_usage(0, 4096, &h, ALL_SEALS | F_SEAL_WRITE);
        expect_usage(-EPROTO, 4096, &h, SIZE_SEALS); /* anybody could write it */
        expect_usage(-EPROTO, 4096, &h, ALL_SEALS & ~F_SEAL_SHRINK);
        expect_usage(-EPROTO, 4096, &h, ALL_SEALS & ~F_SEAL_GROW);
        expect_usage(-EPROTO, 4096, &h, ALL_SEALS & ~F_SEAL_SEAL);
        expect_usage(-EPROTO, 4096, &h, 0);
        expect_usage(-EPROTO, 4096, NULL, ALL_SEALS);
        expect_usage(-EPROTO, 0, NULL, ALL_SEALS);
        expect_usage(-EPROTO, 4095, &h, ALL_SEALS); /* the last entry is cut off */
        expect_usage(-EPROTO, PAGES_MAX_BYTES + 4096, &h, ALL_SEALS);
        h.n_entries = 32;
        expect_usage(-EPROTO, 4096, &h, ALL_SEALS);
        h.n_entries = UINT64_MAX;
        expect_usage(-EPROTO, 4096, &h, ALL_SEALS);
        h = right;
        h.entry_bytes = 0;
        expect_usage(-EPROTO, 4096, &h, ALL_SEALS);
        h.entry_bytes = 64;
        expect_usage(-EPROTO, 4096, &h, ALL_SEALS);
        h.entry_bytes = 136;
        expect_usage(-EPROTO, 8192, &h, ALL_SEALS);
        h.entry_bytes = 256; /* of a later version of ours */
        expect_usage(0, 8192, &h, ALL_SEALS);
        h.entry_bytes = UINT64_MAX - 127;
        expect_usage(-EPROTO, 4096, &h, ALL_SEALS);
        h = right;
        h.version = 2;
        expect_usage(-EPROTO, 4096, &h, ALL_SEALS);
        h = right;
        h.magic++;
        expect_usage(-EPROTO, 4096, &h, ALL_SEALS);

        ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
        ck_assert_int_eq(pages_map_usage(fds[0], &v), -EPROTO);
        close(fds[0]);
        close(fds[1]);
        ck_assert_int_eq(pages_map_usage(-1, &v), -EPROTO);
}

static void expect_client(int want, size_t n_bytes, int seals)
{
        struct pages_client *p = NULL;
        int fd = memfd(n_bytes, NULL, seals);

        ck_assert_int_eq(pages_map_client(fd, &p), want);
        if (want == 0)
                munmap(p, pages_client_bytes());
        else
                ck_assert_ptr_null(p);
        close(fd);
}

TEST(odd_client_pages)
{
        size_t n = pages_client_bytes();

        expect_client(0, n, SIZE_SEALS);
        expect_client(0, n + 4096, SIZE_SEALS);
        expect_client(-EPROTO, n - 1, SIZE_SEALS);
        expect_client(-EPROTO, n, SIZE_SEALS & ~F_SEAL_SHRINK);
        expect_client(-EPROTO, n, 0);
        expect_client(-EPROTO, n, SIZE_SEALS | F_SEAL_WRITE);
        expect_client(-EPROTO, n, ALL_SEALS);
}

/* ---- what clients do to theirs ---------------------------------------------- */

static void say(struct pages_client *own, size_t i, uint64_t slabs, uint64_t cut, uint64_t whole)
{
        own->held[i].bytes_slabs = slabs;
        own->held[i].bytes_cut = cut;
        own->held[i].bytes_whole = whole;
        own->version = PAGES_VERSION;
        own->magic = PAGES_CLIENT_MAGIC;
}

static void expect_word(const struct client_usage *f, uint64_t held, uint64_t in_use, uint64_t idle)
{
        ck_assert_uint_eq(f->bytes_held, held);
        ck_assert_uint_eq(f->bytes_in_use, in_use);
        ck_assert_uint_eq(f->bytes_idle, idle);
}

TEST(invalid_client_pages)
{
        struct client_page *page;
        struct pages_client *own;
        struct client_word word;
        uint8_t garbage[4096];
        uint32_t x = 1;
        int fd;

        ck_assert_int_eq(client_page_new(&page, &fd), 0);
        ck_assert_int_eq(pages_map_client(fd, &own), 0);
        ck_assert_int_eq(client_page_read(page, &word), -ENODATA);
        say(own, 2, 100, 60, 7);
        ck_assert_int_eq(client_page_read(page, &word), 0);
        expect_word(&word.partitions[2], 107, 67, 40);
        own->held[2].bytes_streams = 50;
        ck_assert_int_eq(client_page_read(page, &word), 0);
        expect_word(&word.partitions[2], 107, 17, 90);
        own->held[2].bytes_streams = UINT64_MAX;
        ck_assert_int_eq(client_page_read(page, &word), 0);
        expect_word(&word.partitions[2], 107, 0, 107);
        own->held[2].bytes_streams = 0;
        own->stashed[0].n_bytes = 10;
        own->stashed[63].n_bytes = 20;
        own->stashed_partition = 2;
        own->n_stashed = 1;
        ck_assert_int_eq(client_page_read(page, &word), 0);
        expect_word(&word.partitions[2], 107, 57, 50);
        own->n_stashed = UINT64_MAX;
        ck_assert_int_eq(client_page_read(page, &word), 0);
        expect_word(&word.partitions[2], 107, 37, 70);
        expect_word(&word.partitions[16], 0, 0, 0);
        /* What makes no sense ends where numbers do. */
        own->stashed[5].n_bytes = UINT64_MAX;
        say(own, 2, UINT64_MAX, 5, 6);
        ck_assert_int_eq(client_page_read(page, &word), 0);
        expect_word(&word.partitions[2], UINT64_MAX, 6, UINT64_MAX);
        own->stashed_partition = UINT64_MAX;
        say(own, 2, 5, UINT64_MAX, UINT64_MAX);
        ck_assert_int_eq(client_page_read(page, &word), 0);
        expect_word(&word.partitions[2], UINT64_MAX, UINT64_MAX, 0);
        own->version = 2;
        ck_assert_int_eq(client_page_read(page, &word), -ENODATA);
        own->version = PAGES_VERSION;

        expect_size_stays(fd);
        ck_assert_int_eq(client_page_read(page, &word), 0);
        for (unsigned i = 0; i < 200; i++) {
                for (size_t k = 0; k < sizeof(garbage); k++)
                        garbage[k] = (uint8_t)((x = x * 1664525u + 1013904223u) >> 24);
                if (i % 2)
                        memcpy(garbage, &(uint64_t[]){ PAGES_CLIENT_MAGIC, PAGES_VERSION }, 16);
                ck_assert_int_eq(pwrite(fd, garbage, sizeof(garbage), 0), sizeof(garbage));
                ck_assert_int_eq(client_page_read(page, &word), i % 2 ? 0 : -ENODATA);
        }

        /* It reads the pages of the beginning: nothing that is done to the file concerns it. */
        ck_assert_int_eq(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 12288), 0);
        ck_assert_int_eq(client_page_read(page, &word), 0);
        own->magic = 0;
        munmap(own, pages_client_bytes());
        ck_assert_int_eq(client_page_read(page, &word), 0);
        close(fd);
        client_page_free(page);
}

/* ---- ages ------------------------------------------------------------------------- */

enum { N_COUNTERS = 3, N_AGED = 400 };

/* Blocks that come and go in whichever counter; the sum is what there is, and no class has a block that
 * is younger or older than it says. */
TEST(ages_against_a_model)
{
        struct ages counters[N_COUNTERS] = { 0 };
        uint64_t now = 1000000, state = 5, born[N_AGED] = { 0 };
        bool moved;

        for (unsigned i = 0; i < N_COUNTERS; i++)
                counters[i].tick = now;
        for (unsigned step = 0; step < 20000; step++) {
                struct ages *a = &counters[random_next(&state) % N_COUNTERS];
                size_t k = random_next(&state) % N_AGED;

                if (random_next(&state) % 16 == 0)
                        now += UINT64_C(1) << random_next(&state) % (step % 1000 == 0 ? 20 : 4);
                if (born[k] != 0)
                        ages_count(a, born[k], (uint64_t)-256, &moved);
                else
                        ages_count(a, now, 256, &moved);
                born[k] = born[k] != 0 ? 0 : now;
                if (step % 100 != 0)
                        continue;
                uint64_t have[AGES_CLASSES] = { 0 }, wanted[AGES_CLASSES] = { 0 };

                for (unsigned i = 0; i < N_COUNTERS; i++) {
                        struct ages copy = counters[i];

                        ages_advance(&copy, now);
                        for (unsigned c = 0; c < AGES_CLASSES; c++)
                                have[c] += copy.bytes[c];
                }
                for (size_t i = 0; i < N_AGED; i++) {
                        unsigned c = ages_move(0, born[i], now);

                        if (born[i] == 0)
                                continue;
                        wanted[c] += 256;
                        if ((c > 0 && now - born[i] < UINT64_C(1) << (c - 1)) ||
                            (c + 1 < AGES_CLASSES && now - born[i] > (UINT64_C(2) << c) - 2))
                                ck_abort_msg("born at %llu, in class %u at %llu", (unsigned long long)born[i],
                                             c, (unsigned long long)now);
                }
                for (unsigned c = 0; c < AGES_CLASSES; c++)
                        ck_assert_uint_eq(have[c], wanted[c]);
        }
}

TEST(invalid_ages)
{
        struct client_page *page;
        struct pages_client *own;
        struct client_ages ages;
        struct ages a = { .tick = 1000, .bytes = { [0] = 512, [3] = 1024 } };
        uint32_t x = 1;
        int fd;

        ck_assert_int_eq(client_page_new(&page, &fd), 0);
        ck_assert_int_eq(pages_map_client(fd, &own), 0);
        ck_assert_int_eq(client_page_ages(page, 1000, &ages), -ENODATA);
        ck_assert_int_eq(client_page_ages(NULL, 1000, &ages), -ENODATA);
        say(own, 0, 0, 0, 0);
        ck_assert_int_eq(client_page_ages(page, 1000, &ages), 0);
        ck_assert(!ages.are_told[1]);
        pages_show_ages(&own->ages[1], &a);
        own->stashed_partition = 1;
        own->n_stashed = 2;
        ck_assert_int_eq(client_page_ages(page, 1000, &ages), 0);
        ck_assert(ages.are_told[1] && !ages.are_told[0]);
        ck_assert_uint_eq(ages.bytes[1][0], 512);
        ck_assert_uint_eq(ages.bytes[1][3], 1024);
        /* Blocks that came in one magazine and went in another, one of which is behind. */
        a = (struct ages){ .tick = 900, .bytes = { [0] = 256 * 100 } };
        pages_show_stashed_ages(&own->stashed[0], &a);
        ages_advance(&a, 1000);
        for (unsigned c = 0; c < AGES_CLASSES; c++)
                a.bytes[c] = -(a.bytes[c] / 100 * 90);
        pages_show_stashed_ages(&own->stashed[1], &a);
        ck_assert_int_eq(client_page_ages(page, 1000, &ages), 0);
        ck_assert_uint_eq(ages.bytes[1][0], 512);
        ck_assert_uint_eq(ages.bytes[1][ages_move(0, 900, 1000)], 2560);
        /* Less than nothing, the future, and a copy in the middle of a change. */
        own->ages[1].bytes[3] = (uint64_t)-1;
        own->ages[1].done = UINT64_MAX;
        ck_assert_int_eq(client_page_ages(page, 1000, &ages), 0);
        ck_assert_uint_eq(ages.bytes[1][3], 0);
        for (unsigned i = 0; i < 100; i++) {
                for (size_t k = offsetof(struct pages_client, stashed); k < sizeof(*own); k++)
                        ((volatile uint8_t *)own)[k] = (uint8_t)((x = x * 1664525u + 1013904223u) >> 24);
                ck_assert_int_eq(client_page_ages(page, 1000, &ages), 0);
        }
        munmap(own, pages_client_bytes());
        close(fd);
        client_page_free(page);
}

/* Whether /proc/self/maps names a file so. */
static bool maps_name(const char *name)
{
        FILE *maps = fopen("/proc/self/maps", "re");
        char line[512];
        bool found = false;

        ck_assert_ptr_nonnull(maps);
        while (fgets(line, sizeof(line), maps))
                found = found || strstr(line, name);
        fclose(maps);
        return found;
}

/* A client can make every access of a mapping wait, or a SIGBUS. */
TEST(client_page_is_not_mapped)
{
        struct client_page *page;
        struct pages_client *own;
        struct client_word word;
        int fd;

        ck_assert_int_eq(client_page_new(&page, &fd), 0);
        ck_assert(!maps_name("bfcd-client"));
        ck_assert_int_eq(pages_map_client(fd, &own), 0);
        ck_assert(maps_name("bfcd-client")); /* that the look can find it */
        say(own, 0, 100, 60, 7);
        munmap(own, pages_client_bytes());
        ck_assert_int_eq(client_page_read(page, &word), 0);
        expect_word(&word.partitions[0], 107, 67, 40);
        ck_assert(!maps_name("bfcd-client"));
        close(fd);
        client_page_free(page);
}

/* ---- what clients cannot attach to a memfd ------------------------------------ */

static int lock_of(int fd, int command, short type, off_t start)
{
        struct flock lock = { .l_type = type, .l_whence = SEEK_SET, .l_start = start, .l_len = 1 };

        return fcntl(fd, command, &lock) < 0 ? -errno : 0;
}

static void expect_no_locks(int fd)
{
        ck_assert_int_eq(lock_of(fd, F_SETLK, F_RDLCK, 0), -EAGAIN);
        ck_assert_int_eq(lock_of(fd, F_SETLK, F_RDLCK, (off_t)1 << 40), -EAGAIN);
        ck_assert_int_eq(lock_of(fd, F_OFD_SETLK, F_RDLCK, 5), -EAGAIN);
        ck_assert_int_eq(lock_of(fd, F_OFD_SETLK, F_UNLCK, 0), 0); /* its own, of which it has none */
        ck_assert_int_eq(lock_of(fd, F_SETLK, F_RDLCK, 0), -EAGAIN);
        ck_assert(flock(fd, LOCK_SH | LOCK_NB) < 0 && errno == EWOULDBLOCK);
        ck_assert_int_eq(flock(fd, LOCK_UN), 0);
        ck_assert(flock(fd, LOCK_SH | LOCK_NB) < 0 && errno == EWOULDBLOCK);
}

/* As another user, in a child. */
static void other_user(int fd)
{
        char path[64];
        int inotify = inotify_init1(IN_CLOEXEC);

        snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
        if (setgroups(0, NULL) < 0 || setgid(4711) < 0 || setuid(4711) < 0)
                _exit(2);
        if (fsetxattr(fd, "user.x", "y", 1, 0) == 0 || fsetxattr(fd, "security.x", "y", 1, 0) == 0 ||
            fchmod(fd, 0666) == 0 || open(path, O_RDWR | O_CLOEXEC) >= 0 ||
            open(path, O_RDONLY | O_CLOEXEC) >= 0 || fcntl(fd, F_SETLEASE, F_RDLCK) == 0 ||
            inotify_add_watch(inotify, path, IN_ALL_EVENTS) >= 0)
                _exit(1);
        _exit(0);
}

static void expect_guarded_mode(int fd)
{
        struct stat st;
        int status;
        pid_t pid;

        ck_assert_int_eq(fstat(fd, &st), 0);
        ck_assert_uint_eq(st.st_mode & 07777u, 0600);
        if (geteuid() != 0) {
                printf("# skipped: only root can become other users\n");
                return;
        }
        pid = fork();
        if (pid == 0)
                other_user(fd);
        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        ck_assert_msg(WIFEXITED(status) && WEXITSTATUS(status) == 0, "another user's child: %x",
                      (unsigned)status);
}

static void expect_guarded(int fd)
{
        expect_no_locks(fd);
        expect_guarded_mode(fd);
}

TEST(memfds_are_guarded)
{
        struct device_extent e = DEVICE_EXTENT_EMPTY;
        struct usage_page *usage;
        struct client_page *page;
        struct device *device;
        int fd;

        ck_assert_int_eq(usage_page_new(1, &usage), 0);
        fd = memfd_lend(usage->fd, O_RDONLY);
        ck_assert_int_eq(fcntl(fd, F_GETFL) & O_ACCMODE, O_RDONLY);
        expect_guarded(fd);
        close(fd);
        ck_assert_int_eq(client_page_new(&page, &fd), 0);
        expect_guarded_mode(fd);
        close(fd); /* the last one: the daemon has none */
        client_page_free(page);
        usage_page_free(usage);

        ck_assert_int_eq(device_host_new(&device), 0);
        ck_assert_int_eq(device_make(device, DEVICE_SHARE_FD, 2 * MIB, &e), 0);
        fd = device_lend(device, &e, false);
        expect_guarded(fd);
        close(fd);
        ck_assert_int_eq(device_destroy(device, &e), 0);
        device_free(device);
}

/* ---- a usage page that stays where it is ----------------------------------------- */

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

static uint64_t bytes_backed(int fd)
{
        struct stat st;

        ck_assert_int_eq(fstat(fd, &st), 0);
        return (uint64_t)st.st_blocks * 512;
}

/* As a client can: it maps the page where a huge page could be. */
static void collapse(int fd)
{
        const size_t huge = 2 * MIB;
        char *room = mmap(NULL, 2 * huge, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        char *at = (char *)(((uintptr_t)room + huge - 1) / huge * huge);

        ck_assert_ptr_ne(room, MAP_FAILED);
        ck_assert_ptr_eq(mmap(at, huge, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0), at);
        for (unsigned i = 0; i < 20; i++)
                (void)madvise(at, huge, MADV_COLLAPSE);
        munmap(room, 2 * huge);
}

TEST(usage_page_is_not_moved)
{
        struct usage_page *p;
        void *map;
        int fd, control;

        /* Without the pin the kernel moves it, or this kernel does not at all. */
        ck_assert_int_eq(pages_make("control", 4096, true, &map, &control), 0);
        *(volatile char *)map = 1;
        collapse(control);
        ck_assert_int_eq(usage_page_new(1, &p), 0);
        fd = memfd_lend(p->fd, O_RDONLY);
        if (bytes_backed(control) > 4096) {
                ck_assert_int_ge(p->pin, 0);
                collapse(fd);
                ck_assert_uint_eq(bytes_backed(fd), 4096);
        } else {
                fprintf(stderr, "# this kernel collapses no page of shared memory: not tested\n");
        }
        munmap(map, 4096);
        close(control);
        close(fd);
        usage_page_free(p);
}

/* ---- sessions --------------------------------------------------------------- */

static const char config_text[] = "devices:\n"
                                  "  - id: host\n"
                                  "    size: 64MiB\n"
                                  "    partitions:\n"
                                  "      - {name: train, limit: 32MiB}\n"
                                  "      - {name: infer, limit: 32MiB}\n"
                                  "tenants:\n"
                                  "  - name: a\n"
                                  "    match: {uid: 1}\n"
                                  "    quotas:\n"
                                  "      - {partition: train, limit: 32MiB}\n"
                                  "      - {partition: infer, limit: 16MiB}\n"
                                  "  - name: b\n"
                                  "    match: {uid: 2}\n"
                                  "    quotas:\n"
                                  "      - {partition: infer, limit: 16MiB}\n";

static struct peer *open_mapped(uid_t uid, bool wants_pages)
{
        struct peer *p = peer_new(b, uid, false);

        p->wants_pages = wants_pages;
        p->has_no_events = !wants_pages; /* no fd is in flight either */
        return say_hello(p);
}

static void setup_broker(void)
{
        sessions_start(config_text);
}

FIXTURE(sessions, setup_broker, sessions_end);

/* Every peer checks at every reply that the statistics agree. */
TEST(session_has_pages)
{
        struct peer *p = open_mapped(1, true), *old = open_mapped(1, false), *other = open_mapped(2, true);
        uint64_t f[PAGES_N_STATS];
        struct pages_view v, w;

        ck_assert_int_eq(old->page_fds[0], -1);
        ck_assert_ptr_null(old->session->page);
        ck_assert(p->session->delivery.in_flight && !old->session->delivery.in_flight);
        ck_assert_int_eq(pages_map_usage(p->page_fds[0], &v), 0);
        ck_assert_int_eq(pages_map_usage(other->page_fds[0], &w), 0);
        ck_assert_uint_eq(v.n_entries, 2);
        ck_assert_uint_eq(w.n_entries, 2); /* an unused one among them */
        must_malloc(old, 1, 5 * MIB);      /* which p, who never asked there, sees */
        must_malloc(other, 0, MIB);
        ck_assert_int_eq(pages_read(pages_view_entry(&v, 1), f), 0);
        ck_assert_uint_eq(f[PAGES_BYTES_IN_USE], 5 * MIB);
        ck_assert_uint_eq(f[PAGES_BYTES_RESERVED], 6 * MIB);
        ck_assert_uint_eq(f[PAGES_NUM_SESSIONS], 1);
        ck_assert_int_eq(pages_read(pages_view_entry(&v, 0), f), 0);
        ck_assert_uint_eq(f[PAGES_NUM_SESSIONS], 2);
        ck_assert_uint_eq(f[PAGES_BYTES_IN_USE], 0);
        ck_assert_int_eq(pages_read(pages_view_entry(&w, 1), f), 0);
        ck_assert_uint_eq(f[PAGES_BYTES_IN_USE], MIB);
        peer_free(old);
        peer_settle(b);
        /* No reply told of it. */
        ck_assert_int_eq(pages_read(pages_view_entry(&v, 1), f), 0);
        ck_assert_uint_eq(f[PAGES_BYTES_IN_USE], 0);
        ck_assert_uint_eq(f[PAGES_BYTES_RESERVED], 0);
        ck_assert_uint_eq(f[PAGES_NUM_SESSIONS], 0);
        ck_assert_uint_eq(f[PAGES_LARGEST_FREE_BLOCK_BYTES], 0);
        ck_assert_uint_eq(f[PAGES_LIFETIME_PEAK_BYTES_IN_USE], 5 * MIB);
        munmap((void *)(uintptr_t)v.page, v.n_bytes);
        munmap((void *)(uintptr_t)w.page, w.n_bytes);
        peer_free(p);
        peer_free(other);
}

TEST(limits_that_change)
{
        struct quota_limits limits = { 8 * MIB, MIB * 2, 10, 10 };
        struct quota *q = b->tenants[0].quotas[0];
        uint64_t f[PAGES_N_STATS];

        ck_assert_int_eq(quota_prepare_limit(q, limits.limit_bytes), 0);
        quota_set(q, &limits);
        ck_assert_int_eq(pages_read(q->page, f), 0);
        ck_assert_uint_eq(f[PAGES_BYTES_LIMIT], 8 * MIB);
}

TEST(operator_sessions_have_no_pages)
{
        struct peer *admin = peer_new(b, 0, true);

        admin->wants_pages = true;
        ck_assert_int_eq(peer_error(admin, peer_hello(admin, "", "")), 0);
        ck_assert_int_eq(admin->page_fds[0], -1);
        peer_free(admin);
}

TEST(client_pages_are_read)
{
        struct peer *p = open_mapped(1, true), *silent = open_mapped(1, false);
        struct client_usage stats;
        struct pages_client *own;
        uint64_t n_outside;

        ck_assert_int_eq(pages_map_client(p->page_fds[1], &own), 0);
        must_malloc(p, 0, 8 * MIB);
        must_malloc(p, 1, 2 * MIB);
        must_malloc(silent, 0, 3 * MIB);
        /* Without a client page all usage may be idle. */
        ck_assert_uint_eq(session_read_hint(p->session, 0).idle_bytes, 8 * MIB);
        ck_assert_uint_eq(session_read_hint(p->session, 1).idle_bytes, 2 * MIB);
        ck_assert_uint_eq(session_read_hint(silent->session, 0).idle_bytes, 3 * MIB);
        ck_assert_uint_eq(session_read_hint(silent->session, 1).idle_bytes, 0);
        session_client_usage(p->session, &stats, &n_outside);
        ck_assert_uint_eq(stats.bytes_held + stats.bytes_in_use + stats.bytes_idle + n_outside, 0);

        say(own, 0, 7 * MIB, 4 * MIB, MIB);
        say(own, 1, 2 * MIB, 2 * MIB, 0);
        atomic_store(&own->bytes_outside[0], 5 * MIB);
        atomic_store(&own->bytes_outside[16], MIB);
        ck_assert_uint_eq(session_read_hint(p->session, 0).idle_bytes, 3 * MIB);
        ck_assert_uint_eq(session_read_hint(p->session, 1).idle_bytes, 0);
        session_client_usage(p->session, &stats, &n_outside);
        ck_assert_uint_eq(stats.bytes_held, 10 * MIB);
        ck_assert_uint_eq(stats.bytes_in_use, 7 * MIB);
        ck_assert_uint_eq(stats.bytes_idle, 3 * MIB);
        ck_assert_uint_eq(n_outside, 6 * MIB);

        /* Claims that would wrap around. */
        say(own, 0, UINT64_MAX, UINT64_MAX - 8 * MIB, UINT64_MAX);
        say(own, 1, UINT64_MAX, UINT64_MAX - 2 * MIB - 1, 2 * MIB + 1);
        say(own, 16, UINT64_MAX, 1, UINT64_MAX);
        atomic_store(&own->bytes_outside[1], UINT64_MAX - MIB);
        ck_assert_uint_eq(session_read_hint(p->session, 0).idle_bytes, 8 * MIB);
        ck_assert_uint_eq(session_read_hint(p->session, 1).idle_bytes, 2 * MIB);
        session_client_usage(p->session, &stats, &n_outside);
        ck_assert_uint_eq(stats.bytes_held, 10 * MIB);
        ck_assert_uint_eq(stats.bytes_in_use, 10 * MIB);
        ck_assert_uint_eq(stats.bytes_idle, 10 * MIB);
        ck_assert_uint_eq(n_outside, INT64_MAX);
        munmap(own, pages_client_bytes());
        peer_free(p);
        peer_free(silent);
}

/* What is told of ages: as much as the session holds, and no older than it is. */
TEST(invalid_ages_are_bounded)
{
        static struct report report;
        struct peer *p = open_mapped(1, true);
        Bfcd__List list = BFCD__LIST__INIT;
        const Bfcd__AgesRow *row;
        struct pages_client *own;
        uint64_t sum = 0, born_ms = ledger_session_at(b->ledger, p->session->index)->born_ms;

        ck_assert_int_eq(pages_map_client(p->page_fds[1], &own), 0);
        must_malloc(p, 0, 8 * MIB);
        list.kind = BFCD__LIST__KIND__AGES;
        ck_assert_int_eq(report_list(p->session, &list, &report), 0);
        ck_assert_uint_eq(report.list.n_ages, 0);
        say(own, 0, 8 * MIB, 8 * MIB, 0);
        for (unsigned c = 0; c < AGES_CLASSES; c++)
                own->ages[0].bytes[c] = 3 * MIB;
        own->ages[0].done = own->ages[0].begun = 1;
        ck_assert_int_eq(report_list(p->session, &list, &report), 0);
        ck_assert_uint_eq(report.list.n_ages, 1);
        row = report.list.ages[0];
        ck_assert_uint_eq(row->session_id, p->session->id);
        ck_assert_uint_eq(row->n_bytes, row->n_least_age_ms);
        for (size_t i = 0; i < row->n_bytes; i++) {
                sum += row->bytes[i];
                ck_assert_uint_le(row->least_age_ms[i], clock_ms() - born_ms);
        }
        ck_assert_uint_eq(sum, 8 * MIB);
        munmap(own, pages_client_bytes());
        peer_free(p);
}
