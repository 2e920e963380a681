/* See kept.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/integration/kept.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/ledger/ledger.h"
#include "keeper/wire.h"
#include "tests/checks.h"
#include "tests/integration/processes.h"
#include "tests/keeper_caller.h"

#define READY_MS SETTLE_MS

struct stand_in_state kept_state(struct kept *k)
{
        struct stand_in_state state;

        ck_assert_int_eq(stand_in_look(k->manager, &state), 0);
        return state;
}

void kept_give_up(struct kept *k, const char *why)
{
        struct stand_in_state state = { 0 };
        char *log;

        (void)stand_in_look(k->manager, &state);
        processes_print(k->rig->folder, stand_in_pid(k->manager));
        log = rig_log(k->rig);
        ck_abort_msg("%s; of start %u is process %d, ready: %d, ending: %d; it wrote: %s", why,
                     state.n_starts, (int)state.pid, state.is_ready, state.is_stopping,
                     log ? log : "nothing");
}

void kept_await(struct kept *k, unsigned n_starts)
{
        if (stand_in_wait_ready(k->manager, n_starts, READY_MS) < 0)
                kept_give_up(k, "no next daemon is ready");
}

static void await_start(struct kept *k, unsigned n_starts)
{
        kept_await(k, n_starts);
        k->rig->pid = kept_state(k).pid;
        rig_meet(k->rig);
}

struct kept *kept_start(const struct rig_config *config)
{
        struct stand_in_options options = { .keeps = true, .max_fds = config->max_fds };
        struct kept *k = calloc(1, sizeof(*k));
        char *text;

        ck_assert_ptr_nonnull(k);
        k->rig = rig_folder();
        text = rig_config_text(k->rig, config);
        rig_write_config(k->rig, text);
        free(text);
        snprintf(k->notify, sizeof(k->notify), "%s/notify", k->rig->folder);
        k->argv[1] = "--config";
        k->argv[2] = k->rig->config_path;
        rig_choose_program(k->rig, config);
        k->argv[0] = k->rig->bfcd;
        options.argv = k->argv;
        options.socket = k->rig->socket;
        options.admin_socket = k->rig->admin_socket;
        options.notify = k->notify;
        options.log = k->rig->log_path;
        ck_assert_int_eq(stand_in_start(&options, &k->manager), 0);
        await_start(k, 1);
        rig_look_at_rest(k->rig);
        return k;
}

void kept_away(struct kept *k, int signal)
{
        k->rig->admin = raw_close(k->rig->admin);
        ck_assert_int_eq(stand_in_hold(k->manager, true), 0);
        ck_assert_int_eq(stand_in_signal(k->manager, signal), 0);
        if (stand_in_wait_end(k->manager, READY_MS) < 0)
                kept_give_up(k, "the daemon does not end");
        if (signal == SIGTERM)
                ck_assert_int_eq(kept_state(k).status, 0);
}

void kept_ready(struct kept *k)
{
        await_start(k, kept_state(k).n_starts);
}

void kept_back(struct kept *k)
{
        unsigned n_starts = kept_state(k).n_starts;

        ck_assert_int_eq(stand_in_hold(k->manager, false), 0);
        await_start(k, n_starts + 1);
}

void kept_restart(struct kept *k, int signal)
{
        unsigned n_starts = kept_state(k).n_starts;

        k->rig->admin = raw_close(k->rig->admin);
        ck_assert_int_eq(stand_in_signal(k->manager, signal), 0);
        await_start(k, n_starts + 1);
}

/* The daemon has ended, so its ledger may be opened: it is empty but for quotas, and what was
 * made in advance. */
static void assert_empty_ledger(struct kept *k)
{
        struct ledger_counts n;
        struct ledger *ledger = NULL;
        const char *why = "";
        int fd = keeper_ask_in(k->rig->folder, "host", KEEPER_LEDGER, 0, -1);

        ck_assert_msg(fd >= 0, "no ledger is kept");
        ck_assert_int_eq(ledger_open(fd, NULL, NULL, &ledger), 0);
        ck_assert_msg(ledger_check(ledger, &why) == 0, "%s", why);
        ledger_count(ledger, &n);
        ck_assert_uint_eq(n.n_sessions, 0);
        ck_assert_uint_eq(n.n_exports, 0);
        ck_assert_uint_eq(n.n_blocks, 0);
        ck_assert_uint_eq(n.n_shared, 0);
        ck_assert_uint_eq(n.n_refs, 0);
        ck_assert_uint_eq(n.n_leases, 0);
        ck_assert_uint_eq(n.n_extents, k->rig->n_extents);
        ledger_free(ledger);
}

void kept_discard(struct kept *k)
{
        k->rig->admin = raw_close(k->rig->admin);
        stand_in_end(k->manager);
        rig_discard(k->rig);
        free(k);
}

void kept_stop(struct kept *k)
{
        struct stand_in_state state;

        rig_assert_empty(k->rig);
        ck_assert_uint_eq(keeper_count_in(k->rig->folder),
                          (rig_device() == ON_HOST ? k->rig->n_extents : 0) + 1);
        kept_away(k, SIGKILL);
        assert_empty_ledger(k);
        k->rig->stuck_bytes = 0;
        kept_back(k);
        kept_away(k, SIGTERM); /* nothing is left for another one */
        ck_assert_int_eq(keeper_pid_in(k->rig->folder, "host"), 0);
        state = kept_state(k);
        ck_assert_uint_eq(state.n_bad, k->n_bad);
        ck_assert_uint_eq(state.n_ignored, 0);
        rig_assert_clean_log(k->rig);
        kept_discard(k);
}

/* ---- the log ------------------------------------------------------------------ */

unsigned kept_count_logged(const struct kept *k, const char *part)
{
        char *log = rig_log(k->rig), *rest = log, *line;
        unsigned n = 0;

        while (rest && (line = strsep(&rest, "\n")))
                n += strstr(line, part) != NULL;
        free(log);
        return n;
}

bool kept_logged(const struct kept *k, const char *part)
{
        return kept_count_logged(k, part) > 0;
}

/* ---- sessions by hand ---------------------------------------------------------- */

static struct raw *raw_opened(struct kept *k)
{
        struct raw *raw = NULL;

        ck_assert_int_eq(raw_open(k->rig->socket, &raw), 0);
        raw->wants_events = raw->wants_return = true;
        return raw;
}

struct raw *kept_raw(struct kept *k, const char *tenant)
{
        struct raw *raw = raw_opened(k);

        ck_assert_msg(raw_hello(raw, tenant, NULL) == 0, "%s", raw_refusal());
        ck_assert_msg(raw->can_resume, "the session cannot be resumed");
        return raw;
}

int kept_raw_try(struct kept *k, const struct raw *from, struct raw **ret)
{
        struct raw *raw = raw_opened(k);

        raw->comes_back = true;
        raw->session_id = from->session_id;
        memcpy(raw->secret, from->secret, sizeof(raw->secret));
        *ret = raw;
        return raw_hello(raw, NULL, NULL);
}

struct raw *kept_raw_back(struct kept *k, struct raw *from)
{
        struct raw *raw;

        ck_assert_msg(kept_raw_try(k, from, &raw) == 0, "%s", raw_refusal());
        ck_assert_uint_eq(raw->session_id, from->session_id);
        ck_assert_mem_eq(raw->secret, from->secret, sizeof(raw->secret));
        raw_close(from);
        return raw;
}

struct raw_held kept_held(const struct raw *raw_extents, const uint64_t *block_ids, size_t n_blocks)
{
        uint64_t *ids = calloc(raw_extents->n_extents + 1, sizeof(*ids));

        ck_assert_ptr_nonnull(ids);
        for (size_t i = 0; i < raw_extents->n_extents; i++)
                ids[i] = raw_extents->extents[i].id;
        return (struct raw_held){ .extent_ids = ids,
                                  .n_extents = raw_extents->n_extents,
                                  .block_ids = block_ids,
                                  .n_blocks = n_blocks };
}

void raw_held_free(struct raw_held *held)
{
        free((void *)(uintptr_t)held->extent_ids);
}

/* ---- lists --------------------------------------------------------------------- */

static void put_tenants(FILE *out, const Bfcd__ListReply *list)
{
        for (size_t i = 0; i < list->n_tenants; i++) {
                const Bfcd__TenantRow *t = list->tenants[i];
                const Bfcd__Statistics *f = t->stats;

                fprintf(out,
                        "%s in %s: limit %" PRIu64 " reserved %" PRIu64 " in use %" PRIu64
                        " requested %" PRIu64 " blocks %" PRIu64 " sessions %" PRIu64 " extents %" PRIu64
                        " guaranteed %" PRIu64 " free %" PRIu64 " largest %" PRIu64 " ever %" PRIu64
                        " %" PRIu64 " refused %" PRIu64 " %" PRIu64 " %" PRIu64 "\n",
                        t->tenant, t->partition, f->bytes_limit, f->bytes_reserved, f->bytes_in_use,
                        f->bytes_requested, f->num_blocks, f->num_sessions, f->num_extents,
                        f->bytes_guaranteed, f->bytes_free, f->largest_free_block_bytes,
                        f->lifetime_peak_bytes_in_use, f->lifetime_peak_bytes_reserved, f->num_over_quota,
                        f->num_out_of_memory, f->last_refusal_time_ms);
        }
}

static void put_partitions(FILE *out, const Bfcd__ListReply *list)
{
        for (size_t i = 0; i < list->n_partitions; i++) {
                const Bfcd__Statistics *f = list->partitions[i]->stats;

                fprintf(out, "%s: ever %" PRIu64 " %" PRIu64 " refused %" PRIu64 " %" PRIu64 "\n",
                        list->partitions[i]->name, f->lifetime_peak_bytes_in_use,
                        f->lifetime_peak_bytes_reserved, f->num_over_quota, f->num_out_of_memory);
        }
}

static void put_sessions(FILE *out, const Bfcd__ListReply *list)
{
        for (size_t i = 0; i < list->n_sessions; i++) {
                const Bfcd__SessionRow *s = list->sessions[i];

                if (s->tenant[0] != '\0')
                        fprintf(out,
                                "%" PRIu64 " of %s: pid %" PRIu64 " uid %" PRIu64 " %s %s, %" PRIu64
                                " blocks, %" PRIu64 " bytes, %" PRIu64 " direct\n",
                                s->session_id, s->tenant, s->pid, s->uid, s->name, s->state, s->num_blocks,
                                s->bytes_in_use, s->bytes_direct);
        }
}

static void put_blocks(FILE *out, const Bfcd__ListReply *list)
{
        for (size_t i = 0; i < list->n_blocks; i++) {
                const Bfcd__BlockRow *b = list->blocks[i];

                fprintf(out,
                        "%" PRIu64 " of %" PRIu64 " (%s in %s): %" PRIu64 "+%" PRIu64 ", %" PRIu64
                        " bytes for %" PRIu64 ", '%s' '%s'\n",
                        b->block_id, b->session_id, b->tenant, b->partition, b->region_id, b->offset,
                        b->n_bytes, b->n_requested, b->tag, b->shared_name);
        }
}

static void put_shared(FILE *out, const Bfcd__ListReply *list)
{
        for (size_t i = 0; i < list->n_shared; i++) {
                const Bfcd__SharedRow *s = list->shared[i];

                fprintf(out,
                        "%s of %s in %s: %" PRIu64 ", %" PRIu64 " bytes for %" PRIu64 ", had by %" PRIu64
                        "\n",
                        s->name, s->tenant, s->partition, s->block_id, s->n_bytes, s->n_requested,
                        s->num_references);
        }
}

static int compare_lines(const void *a, const void *b)
{
        return strcmp(*(char *const *)a, *(char *const *)b);
}

/* In no particular order is the daemon's right. The last line gets its end. */
static char *sorted(char *text)
{
        size_t n_lines = 0, n_bytes = strlen(text) + 1;
        char **lines = calloc(n_bytes, sizeof(*lines)), *ret = malloc(n_bytes + 1), *rest = text, *line;

        ck_assert(lines && ret);
        while ((line = strsep(&rest, "\n"))) {
                if (*line)
                        lines[n_lines++] = line;
        }
        qsort(lines, n_lines, sizeof(*lines), compare_lines);
        ret[0] = '\0';
        rest = ret;
        for (size_t i = 0; i < n_lines; i++)
                rest += sprintf(rest, "%s\n", lines[i]);
        free(lines);
        free(text);
        return ret;
}

static char *list_text(struct kept *k, Bfcd__List__Kind kind, void (*put)(FILE *, const Bfcd__ListReply *))
{
        char *text = NULL;
        size_t n_bytes;
        FILE *out = open_memstream(&text, &n_bytes);
        uint64_t cursor = 0;

        ck_assert_ptr_nonnull(out);
        do {
                Bfcd__Reply *page;

                ck_assert_int_eq(raw_list(k->rig->admin, kind, cursor, &page), 0);
                put(out, page->list);
                cursor = page->list->next_cursor;
                bfcd__reply__free_unpacked(page, NULL);
        } while (cursor != 0);
        fclose(out);
        return sorted(text);
}

char *kept_partitions(struct kept *k)
{
        return list_text(k, BFCD__LIST__KIND__PARTITIONS, put_partitions);
}

char *kept_tenants(struct kept *k)
{
        return list_text(k, BFCD__LIST__KIND__TENANTS, put_tenants);
}

char *kept_sessions(struct kept *k)
{
        return list_text(k, BFCD__LIST__KIND__SESSIONS, put_sessions);
}

char *kept_blocks(struct kept *k)
{
        return list_text(k, BFCD__LIST__KIND__BLOCKS, put_blocks);
}

char *kept_shared(struct kept *k)
{
        return list_text(k, BFCD__LIST__KIND__SHARED, put_shared);
}

struct picture picture_take(struct kept *k)
{
        return (struct picture){ kept_tenants(k), kept_sessions(k), kept_blocks(k), kept_shared(k) };
}

void picture_free(struct picture *p)
{
        free(p->tenants);
        free(p->sessions);
        free(p->blocks);
        free(p->shared);
}

static bool is_as(struct kept *k, const struct picture *before)
{
        struct picture now = picture_take(k);
        bool is_same = strcmp(now.tenants, before->tenants) == 0 &&
                       strcmp(now.sessions, before->sessions) == 0 &&
                       strcmp(now.blocks, before->blocks) == 0 && strcmp(now.shared, before->shared) == 0;

        picture_free(&now);
        return is_same;
}

void picture_assert_same(struct kept *k, const struct picture *before)
{
        struct picture now;

        if (WAIT_FOR(is_as(k, before), SETTLE_MS))
                return;
        now = picture_take(k);
        ck_assert_str_eq(now.sessions, before->sessions);
        ck_assert_str_eq(now.blocks, before->blocks);
        ck_assert_str_eq(now.shared, before->shared);
        ck_assert_str_eq(now.tenants, before->tenants);
}

struct look {
        uint64_t session_id;
        const char *state;
        unsigned n_sessions, n_as_asked;
};
static struct look looking;

static void look_at_sessions(FILE *out, const Bfcd__ListReply *list)
{
        for (size_t i = 0; i < list->n_sessions; i++) {
                const Bfcd__SessionRow *s = list->sessions[i];

                if (s->tenant[0] == '\0')
                        continue;
                looking.n_sessions++;
                looking.n_as_asked += looking.state && strcmp(s->state, looking.state) == 0;
                if (s->session_id == looking.session_id)
                        fputs(s->state, out);
        }
}

const char *kept_session_state(struct kept *k, uint64_t session_id, char ret[16])
{
        char *text;

        looking = (struct look){ .session_id = session_id };
        text = list_text(k, BFCD__LIST__KIND__SESSIONS, look_at_sessions);
        snprintf(ret, 16, "%.*s", (int)strcspn(text, "\n"), text);
        free(text);
        return ret;
}

bool kept_all_are(struct kept *k, const char *state, unsigned n_sessions)
{
        looking = (struct look){ .state = state };
        free(list_text(k, BFCD__LIST__KIND__SESSIONS, look_at_sessions));
        return looking.n_sessions == n_sessions && looking.n_as_asked == n_sessions;
}
