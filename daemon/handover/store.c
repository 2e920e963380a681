/* The store; see store.h.
 *
 * Messages reach the manager in the order in which they are sent, also if this process is killed
 * afterwards. So a sent message counts as done, and only callers that need an fd to be closed wait for a
 * barrier.
 *
 * An extent counts as kept while the manager may have it: from before it is put until it was removed.
 * Removing an extent that is not there does nothing, so it is safe in doubt.
 *
 * Invariant: kept.n keys are in the table, which has room for more than twice as many; the key of every
 * fd that was passed is there, or was removed.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/handover/store.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "daemon/clock.h"

#define STORE_LEDGER "ledger" /* with a number after it for a replacement */
#define MAX_LEDGERS  64u
#define STORE_MAX    16384u /* FileDescriptorStoreMax= of bfcd.service */
#ifndef NAMES_BYTES
#define NAMES_BYTES 120000u /* of the 131,072 that a string of the environment may have */
#endif
#define NAME_BYTES 24u /* "x", 13 digits and NUL; or a ledger's */

#define TIMEOUT_MS   5000u /* for one message or barrier */
#define IMPATIENT_MS 100u  /* after one that took longer, until one is faster */
#define N_OWED       16u   /* failed removals that are repeated in one call */

/* The estimated work of the manager for a message. To keep an fd it compares it with all others, with a
 * system call for each; to remove one it compares names. */
#define MESSAGE_NS      30000u
#define COMPARE_FD_NS   2000u
#define COMPARE_NAME_NS 8u
#ifndef BURST_NS
#define BURST_NS INT64_C(2000000000)
#endif
#define SHARE 5 /* one fifth of the time */

struct store_given {
        uint64_t key;
        int fd; /* -1: taken */
        bool is_twin;
};

/* Keys at places derived from them; 0: free. */
struct key_set {
        uint64_t *places;
        size_t n, n_places; /* a power of two, or 0 */
};

struct store {
        struct manager *manager;
        bool keeps;
        bool lacks_memory;   /* for what was passed */
        int ledger_fd;       /* that was passed; -1: none */
        uint64_t ledgers;    /* numbers of those that the manager may have */
        unsigned ledger;     /* the valid one: the highest */
        bool ledger_is_ours; /* it was taken, or put */
        unsigned timeout_ms;
        struct store_given *given; /* extents that were passed, by key */
        size_t n_given, n_given_room;
        size_t max_kept;
        pthread_mutex_t mutex; /* guards what follows */
        uint64_t next_key;
        struct key_set kept; /* extents */
        size_t n_name_bytes; /* of their names with separators */
        uint64_t *owed;      /* keys that could not be removed */
        size_t n_owed, n_owed_room;
        bool is_impatient;
        int64_t spent_ns; /* of the manager's time, less what has passed since */
        int64_t spent_at_ns;
};

/* ---- names ------------------------------------------------------------------ */

static void name_of_key(uint64_t key, char ret[NAME_BYTES])
{
        static const char DIGITS[] = "0123456789abcdefghijklmnopqrstuv";
        char digits[NAME_BYTES];
        size_t n = 0;

        for (; key > 0; key >>= 5)
                digits[n++] = DIGITS[key & 31];
        *ret++ = 'x';
        while (n > 0)
                *ret++ = digits[--n];
        *ret = '\0';
}

/* The key of a name of name_of_key(); 0: it is no such name. */
static uint64_t key_of_name(const char *name)
{
        char same[NAME_BYTES];
        uint64_t key = 0;

        if (name[0] != 'x' || strlen(name) >= NAME_BYTES)
                return 0;
        for (const char *c = name + 1; *c; c++) {
                if ((*c < '0' || *c > '9') && (*c < 'a' || *c > 'v'))
                        return 0;
                key = key << 5 | (uint64_t)(*c <= '9' ? *c - '0' : *c - 'a' + 10);
        }
        name_of_key(key, same);
        return strcmp(name, same) == 0 ? key : 0;
}

static size_t name_bytes(uint64_t key)
{
        char name[NAME_BYTES];

        name_of_key(key, name);
        return strlen(name) + 1;
}

static void name_of_ledger(unsigned number, char ret[NAME_BYTES])
{
        if (number == 0)
                snprintf(ret, NAME_BYTES, STORE_LEDGER);
        else
                snprintf(ret, NAME_BYTES, STORE_LEDGER "%u", number);
}

/* MAX_LEDGERS: it is no such name. */
static unsigned number_of_ledger(const char *name)
{
        char same[NAME_BYTES];
        unsigned number = 0;

        for (; number < MAX_LEDGERS; number++) {
                name_of_ledger(number, same);
                if (strcmp(name, same) == 0)
                        break;
        }
        return number;
}

bool store_has_ledger(void)
{
        char name[NAME_BYTES];

        for (unsigned number = 0; number < MAX_LEDGERS; number++) {
                name_of_ledger(number, name);
                if (manager_has_fd(name))
                        return true;
        }
        return false;
}

/* ---- keys -------------------------------------------------------------------- */

/* The place of a key, present or not. Keys count up, so they are spread evenly. */
static size_t key_set_place(const struct key_set *set, uint64_t key)
{
        size_t i = (size_t)key & (set->n_places - 1);

        while (set->places[i] != 0 && set->places[i] != key)
                i = (i + 1) & (set->n_places - 1);
        return i;
}

static bool key_set_has(const struct key_set *set, uint64_t key)
{
        return set->n_places > 0 && set->places[key_set_place(set, key)] == key;
}

static int key_set_reserve(struct key_set *set)
{
        struct key_set larger = { .n_places = set->n_places > 0 ? 2 * set->n_places : 64 };

        if (set->n < set->n_places / 2)
                return 0;
        larger.places = calloc(larger.n_places, sizeof(*larger.places));
        if (!larger.places)
                return -ENOMEM;
        for (size_t i = 0; i < set->n_places; i++)
                if (set->places[i] != 0)
                        larger.places[key_set_place(&larger, set->places[i])] = set->places[i];
        larger.n = set->n;
        free(set->places);
        *set = larger;
        return 0;
}

/* It is not present; key_set_reserve() was called before. */
static void key_set_add(struct key_set *set, uint64_t key)
{
        set->places[key_set_place(set, key)] = key;
        set->n++;
}

/* It is present. Displaced keys after it move up. */
static void key_set_remove(struct key_set *set, uint64_t key)
{
        size_t mask = set->n_places - 1, hole = key_set_place(set, key);

        set->n--;
        for (size_t i = (hole + 1) & mask; set->places[i] != 0; i = (i + 1) & mask) {
                size_t way = (i - (size_t)set->places[i]) & mask; /* from its own place */

                if (way < ((i - hole) & mask))
                        continue;
                set->places[hole] = set->places[i];
                hole = i;
        }
        set->places[hole] = 0;
}

/* ---- the manager's time ------------------------------------------------------- */

/* Waits for this message's turn. A waiting message has its time reserved: others come after it. */
static void store_pace(struct store *s, size_t compare_ns)
{
        struct timespec pause;
        int64_t now = (int64_t)clock_ns(), wait_ns;

        pthread_mutex_lock(&s->mutex);
        s->spent_ns -= (now - s->spent_at_ns) / SHARE;
        if (s->spent_ns < 0)
                s->spent_ns = 0;
        s->spent_at_ns = now;
        s->spent_ns += MESSAGE_NS + (int64_t)(compare_ns * s->kept.n);
        wait_ns = (s->spent_ns - BURST_NS) * SHARE;
        pthread_mutex_unlock(&s->mutex);
        if (wait_ns <= 0)
                return;
        pause = (struct timespec){ wait_ns / 1000000000, wait_ns % 1000000000 };
        clock_nanosleep(CLOCK_MONOTONIC, 0, &pause, NULL);
}

static unsigned store_timeout_ms(struct store *s)
{
        unsigned ms;

        pthread_mutex_lock(&s->mutex);
        ms = s->is_impatient && s->timeout_ms > IMPATIENT_MS ? IMPATIENT_MS : s->timeout_ms;
        pthread_mutex_unlock(&s->mutex);
        return ms;
}

static int store_note(struct store *s, int r)
{
        pthread_mutex_lock(&s->mutex);
        s->is_impatient = r == -ETIMEDOUT;
        pthread_mutex_unlock(&s->mutex);
        return r;
}

static int store_tell(struct store *s, const char *verb, const char *name, const char *more, int fd)
{
        char text[96];

        snprintf(text, sizeof(text), "%s=1\nFDNAME=%s%s", verb, name, more);
        return store_note(s, manager_tell(s->manager, text, fd, store_timeout_ms(s)));
}

/* FDPOLL=0: the manager does not watch the fd and drop it at a hang-up. */
static int store_tell_put(struct store *s, const char *name, int fd)
{
        store_pace(s, COMPARE_FD_NS);
        return store_tell(s, "FDSTORE", name, "\nFDPOLL=0", fd);
}

static int store_tell_remove(struct store *s, const char *name)
{
        store_pace(s, COMPARE_NAME_NS);
        return store_tell(s, "FDSTOREREMOVE", name, "", -1);
}

/* ---- received fds ------------------------------------------------------------------- */

/* The key is not used again. */
static void store_pass_key(struct store *s, uint64_t key)
{
        pthread_mutex_lock(&s->mutex);
        if (key >= s->next_key && key < UINT64_MAX)
                s->next_key = key + 1;
        pthread_mutex_unlock(&s->mutex);
}

static bool store_add_given(struct store *s, uint64_t key, int fd)
{
        size_t room = s->n_given_room > 0 ? 2 * s->n_given_room : 64;
        struct store_given *given;

        if (key_set_reserve(&s->kept) < 0)
                return false;
        if (s->n_given == s->n_given_room) {
                given = reallocarray(s->given, room, sizeof(*given));
                if (!given)
                        return false;
                s->given = given;
                s->n_given_room = room;
        }
        s->given[s->n_given++] = (struct store_given){ key, fd, false };
        if (!key_set_has(&s->kept, key)) {
                key_set_add(&s->kept, key);
                s->n_name_bytes += name_bytes(key);
        }
        store_pass_key(s, key);
        return true;
}

/* A higher one was complete when it was put, and a lower one was not written since. */
static void store_inherit_ledger(struct store *s, unsigned number, int fd)
{
        bool is_twin = s->ledgers >> number & 1, is_lower = s->ledgers != 0 && number < s->ledger;

        s->ledgers |= UINT64_C(1) << number;
        if (is_lower || (is_twin && number == s->ledger))
                close(fd);
        if (is_lower)
                return;
        if (s->ledger_fd >= 0) /* a lower one, or ambiguous */
                close(s->ledger_fd);
        s->ledger_fd = is_twin ? -1 : fd;
        s->ledger = number;
}

/* false: not a store's name, or no memory for it. */
static bool store_inherit(void *userdata, const char *name, int fd)
{
        struct store *s = userdata;
        uint64_t key = key_of_name(name);
        unsigned number;

        if (key > 0) {
                s->lacks_memory = s->lacks_memory || !store_add_given(s, key, fd);
                return !s->lacks_memory;
        }
        number = number_of_ledger(name);
        if (number == MAX_LEDGERS)
                return false;
        store_inherit_ledger(s, number, fd);
        return true;
}

static int compare_given(const void *x, const void *y)
{
        const struct store_given *p = x, *q = y;

        return p->key < q->key ? -1 : p->key > q->key;
}

static void store_sort_given(struct store *s)
{
        if (s->n_given == 0)
                return;
        qsort(s->given, s->n_given, sizeof(*s->given), compare_given);
        for (size_t i = 1; i < s->n_given; i++)
                if (s->given[i - 1].key == s->given[i].key)
                        s->given[i - 1].is_twin = s->given[i].is_twin = true;
}

int store_take_ledger(struct store *s)
{
        int fd = store_keeps(s) ? s->ledger_fd : -1;

        if (fd < 0)
                return -1;
        s->ledger_fd = -1;
        s->ledger_is_ours = true;
        return fd;
}

int store_take_extent(struct store *s, uint64_t key)
{
        struct store_given *g;
        int fd;

        if (!s || key == 0)
                return -1;
        store_pass_key(s, key);
        g = s->n_given > 0 ? bsearch(&(struct store_given){ .key = key }, s->given, s->n_given,
                                     sizeof(*s->given), compare_given)
                           : NULL;
        if (!s->keeps || !g || g->is_twin)
                return -1;
        fd = g->fd;
        g->fd = -1;
        return fd;
}

/* After a failure it is removed at the next start. */
static int store_remove_ledger_at(struct store *s, unsigned number)
{
        char name[NAME_BYTES];
        int r;

        name_of_ledger(number, name);
        r = store_tell_remove(s, name);
        if (r == 0)
                s->ledgers &= ~(UINT64_C(1) << number);
        return r;
}

static int store_put_ledger_at(struct store *s, unsigned number, int fd)
{
        char name[NAME_BYTES];
        int r;

        name_of_ledger(number, name);
        r = store_tell_put(s, name, fd);
        if (r < 0)
                return r;
        s->ledgers |= UINT64_C(1) << number;
        s->ledger = number;
        s->ledger_is_ours = true;
        return 0;
}

size_t store_drop_rest(struct store *s)
{
        size_t n = 0;

        for (size_t i = 0; s && i < s->n_given; i++) {
                struct store_given *g = &s->given[i];

                if (g->fd < 0)
                        continue;
                close(g->fd);
                g->fd = -1;
                n++;
                (void)store_remove_extent(s, g->key, false); /* what cannot be removed now is removed later */
        }
        for (unsigned i = 0; s && i < MAX_LEDGERS; i++) {
                if (!(s->ledgers >> i & 1) || (s->ledger_is_ours && i == s->ledger))
                        continue;
                (void)store_remove_ledger_at(s, i);
                n++;
        }
        return n;
}

/* ---- putting and removing --------------------------------------------------------- */

bool store_keeps(const struct store *s)
{
        return s && s->keeps;
}

void store_set_timeout(struct store *s, unsigned ms)
{
        s->timeout_ms = ms;
}

size_t store_max(const struct store *s)
{
        return store_keeps(s) ? s->max_kept : SIZE_MAX;
}

size_t store_room(struct store *s)
{
        size_t n_kept;

        if (!store_keeps(s))
                return SIZE_MAX;
        pthread_mutex_lock(&s->mutex);
        n_kept = s->kept.n;
        pthread_mutex_unlock(&s->mutex);
        return n_kept < s->max_kept ? s->max_kept - n_kept : 0;
}

uint64_t store_next_key(struct store *s)
{
        uint64_t key = 0;

        if (!store_keeps(s))
                return 0;
        pthread_mutex_lock(&s->mutex);
        if (s->next_key < UINT64_MAX)
                key = s->next_key++;
        pthread_mutex_unlock(&s->mutex);
        return key;
}

static int store_replace_ledger(struct store *s, int fd)
{
        int r = store_remove_ledger(s);

        if (r == 0)
                r = store_put_ledger_at(s, 0, fd);
        s->ledger_is_ours = true;
        s->keeps = r == 0;
        return r;
}

int store_swap_ledger(struct store *s, int fd)
{
        unsigned before;
        bool has_room;
        int r = 0;

        if (!store_keeps(s))
                return 0;
        before = s->ledger;
        if (before + 1 >= MAX_LEDGERS)
                return -ENOSPC;
        has_room = store_room(s) > 0; /* else the manager would not take it */
        if (!has_room)
                r = store_remove_ledger_at(s, before);
        if (r == 0)
                r = store_put_ledger_at(s, before + 1, fd);
        if (r == 0 && has_room)
                (void)store_remove_ledger_at(s, before);
        return r;
}

int store_put_ledger(struct store *s, int fd)
{
        int r = store_keeps(s) ? store_replace_ledger(s, fd) : 0;

        (void)store_drop_rest(s);
        return r;
}

int store_remove_ledger(struct store *s)
{
        int r = 0;

        for (unsigned i = 0; s && r == 0 && i < MAX_LEDGERS; i++)
                if (s->ledgers >> i & 1)
                        r = store_remove_ledger_at(s, i);
        return r;
}

static void store_uncount(struct store *s, uint64_t key)
{
        pthread_mutex_lock(&s->mutex);
        if (key_set_has(&s->kept, key)) { /* two may have removed it at the same time */
                key_set_remove(&s->kept, key);
                s->n_name_bytes -= name_bytes(key);
        }
        pthread_mutex_unlock(&s->mutex);
}

/* -EXFULL, -ENOMEM. */
static int store_count(struct store *s, uint64_t key)
{
        int r;

        pthread_mutex_lock(&s->mutex);
        assert(!key_set_has(&s->kept, key));
        r = s->kept.n < s->max_kept && s->n_name_bytes + name_bytes(key) <= NAMES_BYTES
                    ? key_set_reserve(&s->kept)
                    : -EXFULL;
        if (r == 0) {
                key_set_add(&s->kept, key);
                s->n_name_bytes += name_bytes(key);
        }
        pthread_mutex_unlock(&s->mutex);
        return r;
}

/* Without memory to record it, the next daemon removes it, because it finds no record. */
static void store_owe(struct store *s, uint64_t key)
{
        pthread_mutex_lock(&s->mutex);
        if (s->n_owed == s->n_owed_room) {
                size_t room = s->n_owed_room > 0 ? 2 * s->n_owed_room : 64;
                uint64_t *owed = reallocarray(s->owed, room, sizeof(*owed));

                if (owed) {
                        s->owed = owed;
                        s->n_owed_room = room;
                }
        }
        if (s->n_owed < s->n_owed_room)
                s->owed[s->n_owed++] = key;
        pthread_mutex_unlock(&s->mutex);
}

static int store_remove_one(struct store *s, uint64_t key)
{
        char name[NAME_BYTES];
        int r;

        name_of_key(key, name);
        r = store_tell_remove(s, name);
        if (r == 0)
                store_uncount(s, key);
        else
                store_owe(s, key);
        return r;
}

/* Repeats some failed removals. */
static void store_make_up(struct store *s)
{
        for (unsigned i = 0; i < N_OWED; i++) {
                uint64_t key = 0;

                pthread_mutex_lock(&s->mutex);
                if (s->n_owed > 0)
                        key = s->owed[--s->n_owed];
                pthread_mutex_unlock(&s->mutex);
                if (key == 0 || store_remove_one(s, key) < 0)
                        return;
        }
}

int store_put_extent(struct store *s, uint64_t key, int fd)
{
        char name[NAME_BYTES];
        int r;

        if (!store_keeps(s) || key == 0)
                return 0;
        r = store_count(s, key);
        if (r < 0)
                return r;
        name_of_key(key, name);
        r = store_tell_put(s, name, fd);
        if (r < 0)
                store_uncount(s, key);
        else
                store_make_up(s);
        return r;
}

static bool store_has(struct store *s, uint64_t key)
{
        bool has;

        pthread_mutex_lock(&s->mutex);
        has = key_set_has(&s->kept, key);
        pthread_mutex_unlock(&s->mutex);
        return has;
}

int store_remove_extent(struct store *s, uint64_t key, bool wait)
{
        int r;

        if (!s || key == 0)
                return 0;
        store_pass_key(s, key);
        if (!store_has(s, key))
                return 0;
        r = store_remove_one(s, key);
        if (r == 0 && wait)
                r = store_note(s, manager_barrier(s->manager, store_timeout_ms(s)));
        if (r == 0)
                store_make_up(s);
        return r;
}

/* ---- life --------------------------------------------------------------------------- */

/* false: there is no such variable, or it is not a number. */
static bool take_number(const char *name, uint64_t *ret)
{
        const char *text = getenv(name);
        char *end = NULL;
        unsigned long long n = 0;

        if (text && *text >= '0' && *text <= '9')
                n = strtoull(text, &end, 10);
        unsetenv(name);
        if (!end || *end != '\0')
                return false;
        *ret = n;
        return true;
}

/* Whether the manager keeps fds, and how many. */
static void store_read_environment(struct store *s)
{
        uint64_t n_kept = 0, n_ours = 0;
        bool is_said = take_number("FDSTORE", &n_kept), is_ours = take_number("BFCD_FDSTORE", &n_ours);

        if (!is_said)
                n_kept = STORE_MAX;
        if (is_ours && n_ours > 1)
                n_kept = n_ours;
        s->keeps = manager_listens(s->manager) && (!is_ours || n_ours > 0) && n_kept > 1 &&
                   (is_said || is_ours || s->ledgers != 0 || s->n_given > 0);
        s->max_kept = n_kept > 1 && n_kept <= SIZE_MAX ? (size_t)n_kept - 1 : 0; /* one is the ledger's */
}

int store_new(struct manager *m, struct store **ret)
{
        struct store *s = calloc(1, sizeof(*s));

        if (!s)
                return -ENOMEM;
        s->manager = m;
        s->ledger_fd = -1;
        s->next_key = 1;
        s->timeout_ms = TIMEOUT_MS;
        s->spent_at_ns = (int64_t)clock_ns();
        pthread_mutex_init(&s->mutex, NULL);
        manager_take_all(m, store_inherit, s);
        if (s->lacks_memory) { /* otherwise a key could be used that the manager has */
                store_free(s);
                return -ENOMEM;
        }
        store_sort_given(s);
        store_read_environment(s);
        *ret = s;
        return 0;
}

struct store *store_free(struct store *s)
{
        if (!s)
                return NULL;
        if (s->ledger_fd >= 0)
                close(s->ledger_fd);
        for (size_t i = 0; i < s->n_given; i++)
                if (s->given[i].fd >= 0)
                        close(s->given[i].fd);
        pthread_mutex_destroy(&s->mutex);
        free(s->given);
        free(s->kept.places);
        free(s->owed);
        free(s);
        return NULL;
}
