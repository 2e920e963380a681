/* Memory in motion: extents are made, given back, made again for another tenant
 * and mapped over one another in clients that stay, while every block is filled,
 * checked, and searched for what only another tenant could have written.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "tests/integration/tools.h"
#include "tests/integration/spies.h"

#define N_PROCESSES  6
#define MAX_BLOCKS   24
#define MAX_SIZE     (16 * MIB)
#define EXTENT_BYTES (2 * MIB) /* of these limits, with fds */
#define STAMP_STRIDE 512       /* a stamp stands at the start of each such piece */

/* Two tenants that overcommit one partition, so that memory moves between them. */
static const struct rig_config contested = {
        .partitions = "      - {name: train, limit: 64MiB, growth: on-demand}\n",
        .tenants = TENANT("red", "@UID@", "train, limit: 48MiB, reserve: 8MiB")
                TENANT("blue", "@UID@", "train, limit: 48MiB, reserve: 8MiB"),
};

/* And one of a third tenant. */
static const struct rig_config spied_on = {
        .top = "timeouts: {quarantine: 50ms}\n",
        .partitions = "      - {name: train, limit: 64MiB, growth: on-demand}\n",
        .tenants = TENANT("red", "@UID@", "train, limit: 48MiB, reserve: 8MiB")
                TENANT("blue", "@UID@", "train, limit: 48MiB, reserve: 8MiB")
                        TENANT("green", "@UID@", "train, limit: 24MiB, reserve: 4MiB"),
};

/* Extents of a preallocated partition stay, blocks in them are allocated and freed. */
static const struct rig_config preallocated = {
        .partitions = "      - {name: train, limit: 64MiB, growth: preallocate}\n",
        .tenants =
                TENANT("red", "@UID@", "train, limit: 32MiB") TENANT("blue", "@UID@", "train, limit: 32MiB"),
};

/* What a piece of a block begins with. */
struct stamp {
        uint64_t tenant; /* its stamp_word(): nothing else looks like it */
        uint64_t writer; /* process, block and place */
};
struct totals {
        char socket[96];
        atomic_bool is_over;
        atomic_uint next_number;
        _Atomic uint64_t n_allocs;
        _Atomic uint64_t n_refusals;
        _Atomic uint64_t n_reconnects;
};

struct member {
        struct totals *totals;
        bfc_client *client;
        unsigned short random[3];
        unsigned number;
        unsigned tenant; /* 0 red, 1 blue */
        uint64_t n_taken;
        size_t n_blocks;
        struct {
                char *ptr;
                size_t n_bytes;
                uint64_t serial;
        } blocks[MAX_BLOCKS];
};

static struct stamp stamp_of(const struct member *m, uint64_t serial, size_t at)
{
        return (struct stamp){ stamp_word(m->tenant), (uint64_t)m->number << 56 ^ serial << 24 ^ at };
}

static void stamp_all(const struct member *m, char *ptr, size_t n_bytes, uint64_t serial)
{
        for (size_t at = 0; at + sizeof(struct stamp) <= n_bytes; at += STAMP_STRIDE) {
                struct stamp stamp = stamp_of(m, serial, at);

                memcpy(ptr + at, &stamp, sizeof(stamp));
        }
}

/* A new block may hold what its own tenant wrote before, never another's. */
static void require_no_foreign_stamp(const struct member *m, const char *ptr, size_t n_bytes)
{
        uint64_t word;

        for (size_t at = 0; at + sizeof(word) <= n_bytes; at += GRANULE) { /* stamps stand on granules */
                memcpy(&word, ptr + at, sizeof(word));
                REQUIRE(!stamp_is_foreign(word, m->tenant), "process %u reads what another tenant wrote",
                        m->number);
        }
}

static void release_block(struct member *m, size_t i)
{
        for (size_t at = 0; at + sizeof(struct stamp) <= m->blocks[i].n_bytes; at += STAMP_STRIDE) {
                struct stamp stamp = stamp_of(m, m->blocks[i].serial, at);

                REQUIRE(memcmp(m->blocks[i].ptr + at, &stamp, sizeof(stamp)) == 0,
                        "process %u: byte %zu of a block of %zu was overwritten", m->number, at,
                        m->blocks[i].n_bytes);
        }
        REQUIRE(bfc_free(m->client, m->blocks[i].ptr) == 0, "%s", bfc_last_error());
        m->blocks[i] = m->blocks[--m->n_blocks];
}

/* Sizes over the whole range alike on a logarithmic scale. */
static size_t some_size(struct member *m)
{
        size_t most = (size_t)256 << (nrand48(m->random) % 17);

        return 1 + (size_t)nrand48(m->random) % (most < MAX_SIZE ? most : MAX_SIZE);
}

/* Does the block lie in the extent in which it begins? */
static bool lies_in_one_extent(bfc_client *client, const void *ptr)
{
        struct bfc_block_info info = { .struct_size = sizeof(info) };

        return bfc_block_info(client, ptr, &info) == 0 && info.n_bytes > 0 &&
               info.extent_offset + info.n_bytes <= info.extent_bytes;
}

static void allocate_block(struct member *m)
{
        size_t n_bytes = some_size(m);
        uint64_t flags = n_bytes <= EXTENT_BYTES && nrand48(m->random) % 2 ? BFC_ONE_EXTENT : 0;
        void *ptr = NULL;
        int r = bfc_malloc_flags(m->client, NULL, n_bytes, flags, &ptr);

        if (r < 0) {
                REQUIRE(r == -EDQUOT || r == -ENOMEM, "malloc: %d (%s)", r, bfc_last_error());
                atomic_fetch_add(&m->totals->n_refusals, 1);
                for (unsigned i = 0; i < 3 && m->n_blocks > 0; i++)
                        release_block(m, (size_t)nrand48(m->random) % m->n_blocks);
                return;
        }
        REQUIRE(flags == 0 || lies_in_one_extent(m->client, ptr), "%zu bytes span extents", n_bytes);
        require_no_foreign_stamp(m, ptr, n_bytes);
        stamp_all(m, ptr, n_bytes, ++m->n_taken);
        m->blocks[m->n_blocks].ptr = ptr;
        m->blocks[m->n_blocks].n_bytes = n_bytes;
        m->blocks[m->n_blocks++].serial = m->n_taken;
        atomic_fetch_add(&m->totals->n_allocs, 1);
}

/* Now and then a session ends, with all that it holds. */
static void reconnect(struct member *m)
{
        bfc_disconnect(m->client);
        m->n_blocks = 0;
        m->client = child_client_open(m->totals->socket, m->tenant ? "blue" : "red");
        atomic_fetch_add(&m->totals->n_reconnects, 1);
}

static void churn(void *arg)
{
        static struct member m;

        m.totals = arg;
        m.number = atomic_fetch_add(&m.totals->next_number, 1);
        m.tenant = m.number % 2;
        m.random[0] = (unsigned short)(m.number + 17);
        m.client = child_client_open(m.totals->socket, m.tenant ? "blue" : "red");
        while (!atomic_load(&m.totals->is_over)) {
                long what = nrand48(m.random) % 100;

                if (what == 0)
                        reconnect(&m);
                else if (m.n_blocks == MAX_BLOCKS || (m.n_blocks > 0 && what < 48))
                        release_block(&m, (size_t)nrand48(m.random) % m.n_blocks);
                else
                        allocate_block(&m);
        }
        while (m.n_blocks > 0)
                release_block(&m, 0);
        bfc_disconnect(m.client);
}

/* ---- all together ------------------------------------------------------------- */

static void assert_churns(const struct rig_config *config, double seconds, bool with_spies)
{
        struct rig *rig = rig_start(config);
        struct totals *totals = shared_memory(sizeof(*totals));
        struct spies *spies = shared_memory(sizeof(*spies));
        int64_t end_ms = clock_ms() + (int64_t)(seconds * 1000);
        pid_t pids[N_PROCESSES], spy_pid = 0;

        strcpy(totals->socket, rig->socket);
        for (unsigned i = 0; i < N_PROCESSES; i++)
                pids[i] = child_start(churn, totals);
        if (with_spies)
                spy_pid = spies_start(spies, rig->socket);
        ck_assert(WAIT_FOR(clock_ms() >= end_ms && totals->n_allocs > 1000 && totals->n_refusals > 0 &&
                                   totals->n_reconnects > 0 && (!with_spies || spies_are_done(spies)),
                           4 * SETTLE_MS));
        atomic_store(&totals->is_over, true);
        for (unsigned i = 0; i < N_PROCESSES; i++)
                child_join(pids[i]);
        if (with_spies)
                spies_join(spies, spy_pid, rig);
        printf("# %llu mallocs, %llu refusals, %llu sessions\n", (unsigned long long)totals->n_allocs,
               (unsigned long long)totals->n_refusals, (unsigned long long)totals->n_reconnects);
        rig_stop(rig);
}

static double seconds(void)
{
        return test_seconds(suite_is_long() ? 5 : 2);
}

TEST(extents_move_between_tenants)
{
        assert_churns(&contested, seconds() * 0.4, false);
}

TEST(blocks_are_reused_within_reserved_extents)
{
        assert_churns(&preallocated, seconds() * 0.3, false);
}

/* Under load, no byte of a tenant's is readable by another, before or after, with accomplices that
 * keep fds, mappings and children. */
TEST(kept_mappings_reveal_no_other_tenants_bytes)
{
        assert_churns(&spied_on, seconds() * 0.4, true);
}

/* ---- holes ----------------------------------------------------------------- */

/* Blocks that stay, scattered over extents of their own, leave an eighth of the
 * limit. That eighth is served in one piece all the same, wherever its extents
 * have to be taken from, and the blocks that stay are not touched by the moves. */
TEST(scattered_blocks_map_only_their_extents)
{
        enum { N_PINS = 28, N_ROUNDS = 40 };
        static const struct rig_config config; /* 64 MiB: 32 extents */
        struct rig *rig = rig_start(&config);
        bfc_client *client = client_open(rig, NULL, NULL);
        void *pins[N_PINS], *big, *pieces[64];

        for (size_t i = 0; i < N_PINS; i++) { /* fill up, keep one in the middle, free the rest */
                size_t n = 0;

                while (n < 64 && bfc_malloc(client, 1 * MIB, pieces + n) == 0)
                        n++;
                ck_assert_uint_gt(n, 1);
                pins[i] = pieces[n / 2];
                pattern_write(pins[i], 1 * MIB, i);
                while (n > 0) {
                        if (pieces[--n] != pins[i])
                                ck_assert_ok(bfc_free(client, pieces[n]));
                }
        }
        for (unsigned i = 0; i < N_ROUNDS; i++) {
                size_t n_bytes = (3 + i % 6) * MIB; /* up to 8 MiB */

                ck_assert_ok(bfc_malloc(client, n_bytes, &big));
                pattern_write(big, n_bytes, 1000 + i);
                for (size_t k = i % 4; k < N_PINS; k += 4)
                        ck_assert_msg(pattern_holds(pins[k], 1 * MIB, k), "block %zu was overwritten", k);
                ck_assert(pattern_holds(big, n_bytes, 1000 + i));
                ck_assert_ok(bfc_free(client, big));
        }
        bfc_disconnect(client);
        rig_stop(rig);
}

/* ---- one extent ------------------------------------------------------------ */

/* Blocks with BFC_ONE_EXTENT are in one extent, others anywhere, and up to the
 * last byte of the limit. */
TEST(one_extent_blocks_do_not_cross_extents)
{
        enum { N_BLOCKS = 80, N_ROUNDS = 4000 };
        static const struct rig_config config; /* 64 MiB */
        struct rig *rig = rig_start(&config);
        bfc_client *client = client_open(rig, NULL, NULL);
        unsigned n_asked = 0, n_crossing = 0;
        unsigned short random[3] = { 3, 1, 4 };
        struct {
                void *ptr;
                size_t n_bytes;
        } blocks[N_BLOCKS] = { 0 };
        void *whole[32], *no = NULL;

        for (unsigned round = 0; round < N_ROUNDS; round++) {
                size_t i = (size_t)nrand48(random) % N_BLOCKS;
                uint64_t flags = nrand48(random) % 2 ? BFC_ONE_EXTENT : 0;

                if (blocks[i].ptr) {
                        ck_assert(pattern_holds(blocks[i].ptr, GRANULE, i));
                        ck_assert_ok(bfc_free(client, blocks[i].ptr));
                        blocks[i].ptr = NULL;
                        continue;
                }
                blocks[i].n_bytes = GRANULE + (size_t)nrand48(random) % (EXTENT_BYTES - GRANULE + 1);
                if (bfc_malloc_flags(client, NULL, blocks[i].n_bytes, flags, &blocks[i].ptr) < 0) {
                        blocks[i].ptr = NULL;
                        continue;
                }
                pattern_write(blocks[i].ptr, GRANULE, i);
                n_crossing += !lies_in_one_extent(client, blocks[i].ptr);
                if (flags == 0)
                        continue;
                ck_assert_msg(lies_in_one_extent(client, blocks[i].ptr), "%zu bytes span extents",
                              blocks[i].n_bytes);
                n_asked++;
        }
        ck_assert_uint_gt(n_asked, N_ROUNDS / 8);
        ck_assert(rig_device() == ON_CUDA_IPC ? n_crossing == 0 : n_crossing > N_ROUNDS / 20);
        for (size_t i = 0; i < N_BLOCKS; i++)
                ck_assert_ok(bfc_free(client, blocks[i].ptr));

        for (size_t i = 0; i < 32; i++) {
                ck_assert_ok(bfc_malloc_flags(client, "train", EXTENT_BYTES, BFC_ONE_EXTENT, whole + i));
                ck_assert(lies_in_one_extent(client, whole[i]));
        }
        ck_assert_int_eq(bfc_malloc_flags(client, NULL, 1, BFC_ONE_EXTENT, &no), -EDQUOT);
        ck_assert_ptr_nonnull(strstr(bfc_last_error(), "in one extent"));
        for (size_t i = 0; i < 32; i++)
                ck_assert_ok(bfc_free(client, whole[i]));
        bfc_disconnect(client);
        rig_stop(rig);
}

/* It gets an extent of its own, which goes with it. */
TEST(a_block_in_one_extent_has_any_size)
{
        static const struct rig_config config; /* 64 MiB */
        struct rig *rig = rig_start(&config);
        bfc_client *client = client_open(rig, NULL, NULL);
        struct bfc_tenant_usage usage = { .struct_size = sizeof(usage) };
        void *p, *other;

        for (int i = 0; i < 3; i++) {
                ck_assert_ok(bfc_malloc_flags(client, NULL, 40 * MIB + 1, BFC_ONE_EXTENT, &p));
                ck_assert(lies_in_one_extent(client, p));
                block_fill(client, p, 40 * MIB + 1, (unsigned)i);
                ck_assert_int_eq(bfc_malloc_flags(client, NULL, 40 * MIB, BFC_ONE_EXTENT, &other), -EDQUOT);
                ck_assert(block_has(client, p, 40 * MIB + 1, (unsigned)i));
                ck_assert_ok(bfc_free(client, p));
        }
        ck_assert(WAIT_FOR(rig_device() == ON_CUDA_IPC ||
                                   (bfc_usage(client, NULL, &usage) == 0 && usage.bytes_reserved == 0),
                           SETTLE_MS));
        bfc_disconnect(client);
        rig_stop(rig);
}

/* ---- whose memory it is ---------------------------------------------------- */

#define MAX_EXTENTS 256

struct inodes {
        uint64_t all[MAX_EXTENTS];
        size_t n;
};

static bool contains(const struct inodes *inodes, uint64_t inode)
{
        for (size_t i = 0; i < inodes->n; i++) {
                if (inodes->all[i] == inode)
                        return true;
        }
        return false;
}

static void add(struct inodes *inodes, uint64_t inode)
{
        ck_assert_uint_lt(inodes->n, MAX_EXTENTS);
        if (!contains(inodes, inode))
                inodes->all[inodes->n++] = inode;
}

/* The extents that the daemon has now: what its fds of extents refer to. An fd on
 * its way to a client may be there twice. What is shared by handles has no fds;
 * the fake driver has it mapped instead. */
static struct inodes daemons_extents(const struct rig *rig)
{
        struct inodes inodes = { .n = 0 };
        char path[64], target[128], *maps, *rest, *line;
        unsigned long long inode;
        struct dirent *entry;
        struct stat st;
        DIR *folder;
        ssize_t n;

        snprintf(path, sizeof(path), "/proc/%d/fd", (int)rig->pid);
        folder = opendir(path);
        ck_assert_ptr_nonnull(folder);
        while ((entry = readdir(folder))) {
                n = readlinkat(dirfd(folder), entry->d_name, target, sizeof(target) - 1);
                if (n <= 0)
                        continue;
                target[n] = '\0';
                /* One without memory was destroyed, and is watched. */
                if (strstr(target, rig_extent_mark()) && fstatat(dirfd(folder), entry->d_name, &st, 0) == 0 &&
                    (rig_device() != ON_HOST || st.st_blocks > 0))
                        add(&inodes, st.st_ino);
        }
        closedir(folder);
        snprintf(path, sizeof(path), "/proc/%d/maps",
                 (int)(rig_device() == ON_HOST ? rig->pid : rig_keeper(rig, "cuda:0")));
        maps = rest = file_text(path);
        while (rest && (line = strsep(&rest, "\n"))) {
                if (strstr(line, rig_extent_mark()) && sscanf(line, "%*s %*s %*s %*s %llu", &inode) == 1)
                        add(&inodes, inode);
        }
        free(maps);
        return inodes;
}

/* Asserts that all of a block is mapped, to extents that the daemon has. */
static void assert_lies_in(const struct inodes *extents, const void *ptr, size_t n_bytes)
{
        uint64_t begin = (uintptr_t)ptr, end = begin + n_bytes, n_covered = 0;
        FILE *maps = fopen("/proc/self/maps", "re");
        unsigned long long from, to, inode;
        char line[512];

        ck_assert_ptr_nonnull(maps);
        while (fgets(line, sizeof(line), maps)) {
                if (sscanf(line, "%llx-%llx %*s %*s %*s %llu", &from, &to, &inode) != 3)
                        continue;
                if (to <= begin || from >= end)
                        continue;
                ck_assert_msg(contains(extents, inode), "a block of %zu bytes lies in memory that is gone",
                              n_bytes);
                n_covered += (to < end ? to : end) - (from > begin ? from : begin);
        }
        fclose(maps);
        ck_assert_uint_eq(n_covered, n_bytes);
}

/* Two clients of a tenant outlive the extents that they were given: what comes
 * later at the same addresses must be mapped over them, or each would go on
 * writing to memory that no tenant is charged for and no other tenant sees. */
TEST(new_extents_are_mapped_over_released_ones)
{
        enum { N_BLOCKS = 6, N_ROUNDS = 400 };
        static const struct rig_config config; /* 64 MiB */
        struct rig *rig = rig_start(&config);
        bfc_client *clients[2] = { client_open(rig, NULL, NULL), client_open(rig, NULL, NULL) };
        unsigned short random[3] = { 7, 8, 9 };
        struct {
                bfc_client *client;
                void *ptr;
                size_t n_bytes;
        } blocks[N_BLOCKS] = { 0 };

        for (unsigned round = 0; round < N_ROUNDS; round++) {
                size_t i = (size_t)nrand48(random) % N_BLOCKS;
                struct inodes extents;

                if (blocks[i].ptr) {
                        ck_assert(pattern_holds(blocks[i].ptr, GRANULE, i));
                        ck_assert_ok(bfc_free(blocks[i].client, blocks[i].ptr));
                        blocks[i].ptr = NULL;
                        continue;
                }
                blocks[i].client = clients[nrand48(random) % 2];
                blocks[i].n_bytes = ((size_t)nrand48(random) % (30 * MIB)) & ~(size_t)4095;
                blocks[i].n_bytes += 4096;
                if (bfc_malloc(blocks[i].client, blocks[i].n_bytes, &blocks[i].ptr) < 0) {
                        blocks[i].ptr = NULL;
                        continue;
                }
                pattern_write(blocks[i].ptr, GRANULE, i);
                extents = daemons_extents(rig);
                ck_assert_uint_eq(extents.n, rig_count(rig).n_extents);
                for (size_t k = 0; k < N_BLOCKS; k++) {
                        if (blocks[k].ptr)
                                assert_lies_in(&extents, blocks[k].ptr, blocks[k].n_bytes);
                }
        }
        bfc_disconnect(clients[0]);
        bfc_disconnect(clients[1]);
        rig_stop(rig);
}
