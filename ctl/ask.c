/* bfcctl's conversation with the daemon: see ask.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctl/ask.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ctl/text.h"
#include "proto/message.h"
#include "proto/paths.h"

#define PROTOCOL_VERSION  1
#define PIECE_BYTES       32768u
#define TIMEOUT_MS        30000  /* a daemon that is silent for so long does not work */
#define PARK_TIMEOUT_MS   600000 /* of many sessions that copy, or do not answer */
#define RESUME_TIMEOUT_MS 600000 /* all of a device may have to be made */

const char *ask_socket(const char *option)
{
        static const char *const variables[] = { "BFC_ADMIN_SOCKET", "BFC_MONITOR_SOCKET", "BFC_SOCKET" };
        static const char *const paths[] = { PATHS_ADMIN_SOCKET, PATHS_MONITOR_SOCKET };

        if (option)
                return option;
        for (size_t i = 0; i < sizeof(variables) / sizeof(variables[0]); i++) {
                const char *value = getenv(variables[i]);

                if (value && *value && (access(value, R_OK | W_OK) == 0 || errno != EACCES))
                        return value;
        }
        for (size_t i = 0; i < sizeof(paths) / sizeof(paths[0]); i++)
                if (access(paths[i], R_OK | W_OK) == 0)
                        return paths[i];
        return PATHS_CLIENT_SOCKET;
}

static const char *variable_or(const char *variable, const char *path)
{
        const char *value = getenv(variable);

        return value && *value ? value : path;
}

const char *ask_manager_socket(const char *option)
{
        const char *admin = option ? option : variable_or("BFC_ADMIN_SOCKET", PATHS_ADMIN_SOCKET);
        const char *client = variable_or("BFC_SOCKET", PATHS_CLIENT_SOCKET);

        return option || access(admin, R_OK | W_OK) == 0 || access(client, R_OK | W_OK) < 0 ? admin : client;
}

static int __attribute__((format(printf, 3, 4))) fail(struct ask *a, int r, const char *format, ...)
{
        va_list arguments;

        va_start(arguments, format);
        vsnprintf(a->error, sizeof(a->error), format, arguments);
        va_end(arguments);
        return r;
}

/* Why the socket gave no conversation. */
static int fail_socket(struct ask *a, int r)
{
        switch (-r) {
        case ENOENT:
                return fail(a, r,
                            "Cannot reach bfcd at %s: the socket does not exist. Try: systemctl status bfcd",
                            a->socket);
        case ECONNREFUSED:
                return fail(a, r,
                            "Cannot reach bfcd at %s: no process listens there. Try: systemctl status bfcd",
                            a->socket);
        case EACCES:
                return fail(a, r, "Cannot reach bfcd at %s: permission denied for this user.", a->socket);
        case ENAMETOOLONG:
                return fail(a, r, "Cannot reach bfcd at %s: the path is too long for a socket.", a->socket);
        case ECONNRESET:
        case EPIPE:
                return fail(a, r,
                            "bfcd at %s ended the session or does not respond. Try: systemctl status bfcd",
                            a->socket);
        case EPROTO:
                return fail(a, r, "The process at %s does not use bfcd's protocol.", a->socket);
        default:
                return fail(a, r, "Cannot reach bfcd at %s: %s.", a->socket, strerror(-r));
        }
}

/* The daemon sends a refusal's errno: used only if it is a valid one. */
static int fail_refused(struct ask *a, const Bfcd__Refusal *refusal)
{
        char *message = text_escape(refusal->message);
        int r = refusal->error > 0 && refusal->error < 4096 ? -(int)refusal->error : -EPROTO;

        if (message && *message)
                fail(a, r, "%s", message);
        else
                fail(a, r, "The daemon refused: %s.", strerror(-r));
        free(message);
        return r;
}

/* One question. 0: *ret is the answer of the kind that was expected. */
static int ask(struct ask *a, Bfcd__Request *request, Bfcd__Reply__BodyCase expected, Bfcd__Reply **ret)
{
        Bfcd__Reply *reply = NULL;
        int r = call_send(a->connection, request, &reply);

        if (r < 0)
                return fail_socket(a, r);
        if (reply->body_case == expected) {
                *ret = reply;
                return 0;
        }
        if (reply->body_case == BFCD__REPLY__BODY_REFUSAL)
                r = fail_refused(a, reply->refusal);
        else
                r = fail_socket(a, -EPROTO);
        bfcd__reply__free_unpacked(reply, NULL);
        return r;
}

/* One that is just done, or refused. */
static int ask_done(struct ask *a, Bfcd__Request *request)
{
        Bfcd__Reply *reply = NULL;
        int r = ask(a, request, BFCD__REPLY__BODY_DONE, &reply);

        if (r == 0)
                bfcd__reply__free_unpacked(reply, NULL);
        return r;
}

int ask_open(struct ask *a, const char *socket, const char *tenant)
{
        Bfcd__Hello hello = BFCD__HELLO__INIT;
        Bfcd__Request request = REQUEST(HELLO, hello, &hello);
        Bfcd__Reply *reply = NULL;
        int r;

        *a = (struct ask){ .socket = socket };
        r = call_connect(socket, NULL, NULL, &a->connection);
        if (r < 0)
                return fail_socket(a, r);
        call_set_timeout(a->connection, TIMEOUT_MS);
        hello.version = PROTOCOL_VERSION;
        hello.no_memory = true;
        hello.name = (char[]){ "bfcctl" };
        hello.tenant = (char *)(tenant ? tenant : "");
        r = ask(a, &request, BFCD__REPLY__BODY_HELLO, &reply);
        if (r < 0) {
                a->connection = call_free(a->connection); /* refused: there is no session to end */
                return r;
        }
        a->monitor = reply->hello->is_monitor;
        a->scheduler = reply->hello->is_scheduler;
        a->admin = !*reply->hello->tenant && !a->monitor && !a->scheduler;
        a->session_id = reply->hello->session_id;
        bfcd__reply__free_unpacked(reply, NULL);
        return 0;
}

void ask_close(struct ask *a)
{
        Bfcd__Goodbye goodbye = BFCD__GOODBYE__INIT;
        Bfcd__Request request = REQUEST(GOODBYE, goodbye, &goodbye);
        Bfcd__Reply *reply = NULL;

        /* A session that just hangs up waits for the end of its process. */
        if (a->connection && call_send(a->connection, &request, &reply) == 0)
                bfcd__reply__free_unpacked(reply, NULL);
        a->connection = call_free(a->connection);
}

/* All pages of a kind. */
static int ask_pages(struct ask *a, Bfcd__List__Kind kind, struct list *l)
{
        uint64_t cursor = 0;
        int r;

        do {
                Bfcd__List question = BFCD__LIST__INIT;
                Bfcd__Request request = REQUEST(LIST, list, &question);
                Bfcd__Reply *reply = NULL;

                question.kind = kind;
                question.cursor = cursor;
                r = ask(a, &request, BFCD__REPLY__BODY_LIST, &reply);
                if (r == 0 && (r = list_add(l, kind, reply, &cursor)) < 0)
                        fail_socket(a, r);
                /* A daemon that repeats a page must not keep us here for ever. */
                if (r == 0 && cursor != 0 && cursor == question.cursor)
                        r = fail_socket(a, -EPROTO);
        } while (r == 0 && cursor != 0);
        return r;
}

int ask_lists(struct ask *a, const Bfcd__List__Kind *kinds, size_t n_kinds, struct list **ret)
{
        struct list *l;
        int r = list_new(&l);

        if (r < 0)
                return fail(a, r, "Out of memory.");
        for (size_t i = 0; i < n_kinds && r == 0; i++)
                r = ask_pages(a, kinds[i], l);
        if (r < 0) {
                list_free(l);
                return r;
        }
        list_sort(l);
        *ret = l;
        return 0;
}

int ask_list(struct ask *a, Bfcd__List__Kind kind, struct list **ret)
{
        return ask_lists(a, &kind, 1, ret);
}

int ask_explain(struct ask *a, const char *partition, const char *tenant, struct list **ret)
{
        struct list *l;
        uint64_t cursor = 0;
        int r = list_new(&l);

        if (r < 0)
                return fail(a, r, "Out of memory.");
        do {
                Bfcd__Explain question = BFCD__EXPLAIN__INIT;
                Bfcd__Request request = REQUEST(EXPLAIN, explain, &question);
                Bfcd__Reply *reply = NULL;

                question.partition = (char *)partition;
                question.tenant = (char *)tenant;
                question.cursor = cursor;
                r = ask(a, &request, BFCD__REPLY__BODY_EXPLAIN, &reply);
                if (r == 0 && (r = list_add_explained(l, reply, &cursor)) < 0)
                        fail_socket(a, r);
                if (r == 0 && cursor != 0 && cursor == question.cursor)
                        r = fail_socket(a, -EPROTO);
        } while (r == 0 && cursor != 0);
        if (r < 0) {
                list_free(l);
                return r;
        }
        *ret = l;
        return 0;
}

static const char *row_name(const struct list *l, Bfcd__List__Kind kind, size_t i)
{
        return kind == BFCD__LIST__KIND__TENANTS ? l->tenants[i]->tenant : l->partitions[i]->name;
}

int ask_check_name(struct ask *a, const struct list *l, Bfcd__List__Kind kind, const char *name)
{
        bool is_tenant = kind == BFCD__LIST__KIND__TENANTS;
        size_t n_rows = is_tenant ? l->n_tenants : l->n_partitions, n;
        const char *last = "";
        char *clean;

        for (size_t i = 0; i < n_rows; i++)
                if (strcmp(row_name(l, kind, i), name) == 0)
                        return 0;
        clean = text_escape(name);
        n = (size_t)snprintf(a->error, sizeof(a->error),
                             "There is no %s '%.63s'; you can see:", is_tenant ? "tenant" : "partition",
                             clean ? clean : "");
        free(clean);
        for (size_t i = 0; i < n_rows && n < sizeof(a->error); i++) {
                if (strcmp(row_name(l, kind, i), last) == 0)
                        continue;
                n += (size_t)snprintf(a->error + n, sizeof(a->error) - n, "%s %s", *last ? "," : "",
                                      row_name(l, kind, i));
                last = row_name(l, kind, i);
        }
        return -ENOENT;
}

bool ask_block_is_parked(const Bfcd__BlockRow *row)
{
        return strcmp(row->state, "parked") == 0;
}

int ask_blocks(struct ask *a, int (*each)(void *userdata, const Bfcd__BlockRow *row), void *userdata)
{
        uint64_t cursor = 0;
        int r = 0;

        do {
                Bfcd__List question = BFCD__LIST__INIT;
                Bfcd__Request request = REQUEST(LIST, list, &question);
                Bfcd__Reply *reply = NULL;

                question.kind = BFCD__LIST__KIND__BLOCKS;
                question.cursor = cursor;
                r = ask(a, &request, BFCD__REPLY__BODY_LIST, &reply);
                if (r < 0)
                        return r;
                for (size_t i = 0; i < reply->list->n_blocks && r >= 0; i++)
                        r = each(userdata, reply->list->blocks[i]);
                cursor = reply->list->next_cursor;
                bfcd__reply__free_unpacked(reply, NULL);
                if (r < 0)
                        return fail(a, r,
                                    r == -EIO ? "Standard output cannot be written." : "Out of memory.");
                if (cursor != 0 && cursor == question.cursor)
                        return fail_socket(a, -EPROTO);
        } while (cursor != 0);
        return 0;
}

int ask_config(struct ask *a, char **ret)
{
        char *text = NULL;
        size_t n_text;
        FILE *joined = open_memstream(&text, &n_text);
        uint64_t cursor = 0;
        int r = 0;

        if (!joined)
                return fail(a, -ENOMEM, "Out of memory.");
        do {
                Bfcd__ShowConfig question = BFCD__SHOW_CONFIG__INIT;
                Bfcd__Request request = REQUEST(SHOW_CONFIG, show_config, &question);
                Bfcd__Reply *reply = NULL;

                question.cursor = cursor;
                r = ask(a, &request, BFCD__REPLY__BODY_CONFIG, &reply);
                if (r < 0)
                        break;
                fputs(reply->config->text, joined);
                cursor = reply->config->next_cursor;
                bfcd__reply__free_unpacked(reply, NULL);
                if (cursor != 0 && cursor == question.cursor)
                        r = fail_socket(a, -EPROTO);
        } while (r == 0 && cursor != 0);
        if (fclose(joined) != 0 && r == 0)
                r = fail(a, -ENOMEM, "Out of memory.");
        if (r < 0) {
                free(text);
                return r;
        }
        *ret = text;
        return 0;
}

int ask_trim(struct ask *a, const char *tenant, const char *partition, uint64_t n_bytes,
             uint64_t *ret_n_asked, uint64_t *ret_reserved_before)
{
        Bfcd__TrimNow question = BFCD__TRIM_NOW__INIT;
        Bfcd__Request request = REQUEST(TRIM_NOW, trim_now, &question);
        Bfcd__Reply *reply = NULL;
        int r;

        question.tenant = (char *)tenant;
        question.partition = (char *)partition;
        question.n_bytes = n_bytes;
        r = ask(a, &request, BFCD__REPLY__BODY_TRIM, &reply);
        if (r < 0)
                return r;
        *ret_n_asked = reply->trim->n_asked;
        *ret_reserved_before = reply->trim->bytes_reserved_before;
        bfcd__reply__free_unpacked(reply, NULL);
        return 0;
}

int ask_park(struct ask *a, const struct ask_park *park, uint64_t *ret_n_asked, uint64_t *ret_bytes)
{
        Bfcd__ParkNow question = BFCD__PARK_NOW__INIT;
        Bfcd__Request request = REQUEST(PARK_NOW, park_now, &question);
        Bfcd__Reply *reply = NULL;
        int r;

        question.session_id = park->session_id;
        question.tenant = (char *)park->tenant;
        question.partition = (char *)park->partition;
        question.tag = (char *)park->tag;
        question.to = (char *)park->to;
        question.wakes = park->wakes;
        call_set_timeout(a->connection, PARK_TIMEOUT_MS);
        r = ask(a, &request, BFCD__REPLY__BODY_TRIM, &reply);
        call_set_timeout(a->connection, TIMEOUT_MS);
        if (r < 0)
                return r;
        *ret_n_asked = reply->trim->n_asked;
        *ret_bytes = reply->trim->n_bytes;
        bfcd__reply__free_unpacked(reply, NULL);
        return 0;
}

int ask_evict(struct ask *a, uint64_t session_id, const char *reason)
{
        Bfcd__Evict question = BFCD__EVICT__INIT;
        Bfcd__Request request = REQUEST(EVICT, evict, &question);

        question.session_id = session_id;
        question.reason = (char *)reason;
        return ask_done(a, &request);
}

int ask_forget(struct ask *a, const char *tenant, const char *name)
{
        Bfcd__Forget question = BFCD__FORGET__INIT;
        Bfcd__Request request = REQUEST(FORGET, forget, &question);

        question.tenant = (char *)tenant;
        question.name = (char *)name;
        return ask_done(a, &request);
}

int ask_lease_name(struct ask *a, const char *name, char ret[static ASK_NAME_BYTES])
{
        char prefix[24] = "";
        struct list *l;
        bool is_whole = a->admin || a->scheduler;
        int r = is_whole ? 0 : ask_list(a, BFCD__LIST__KIND__WHOAMI, &l);

        if (r < 0)
                return r;
        if (!is_whole) {
                snprintf(prefix, sizeof(prefix), "u%llu:", (unsigned long long)l->whoami->uid);
                list_free(l);
        }
        if (strchr(name, ':')) /* a whole name */
                prefix[0] = '\0';
        if (snprintf(ret, ASK_NAME_BYTES, "%s%s", prefix, name) < ASK_NAME_BYTES)
                return 0;
        return fail(a, -ENAMETOOLONG, "The name \"%s%s\" of the lease has more than %d bytes.", prefix, name,
                    ASK_NAME_BYTES - 1);
}

int ask_lease_create(struct ask *a, Bfcd__LeaseCreate *question)
{
        Bfcd__Request request = REQUEST(LEASE_CREATE, lease_create, question);

        return ask_done(a, &request);
}

int ask_lease_set(struct ask *a, Bfcd__LeaseSet *question)
{
        Bfcd__Request request = REQUEST(LEASE_SET, lease_set, question);

        return ask_done(a, &request);
}

int ask_lease_end(struct ask *a, Bfcd__LeaseEnd *question, Bfcd__Reply **ret)
{
        Bfcd__Request request = REQUEST(LEASE_END, lease_end, question);

        return ask(a, &request, BFCD__REPLY__BODY_LEASE_END, ret);
}

int ask_drain(struct ask *a, const char *device)
{
        Bfcd__Drain question = BFCD__DRAIN__INIT;
        Bfcd__Request request = REQUEST(DRAIN, drain, &question);

        question.device = (char *)device;
        return ask_done(a, &request);
}

int ask_resume(struct ask *a, const char *device)
{
        Bfcd__Resume question = BFCD__RESUME__INIT;
        Bfcd__Request request = REQUEST(RESUME, resume, &question);
        int r;

        question.device = (char *)device;
        call_set_timeout(a->connection, RESUME_TIMEOUT_MS);
        r = ask_done(a, &request);
        call_set_timeout(a->connection, TIMEOUT_MS);
        return r;
}

int ask_reset_peaks(struct ask *a, const char *tenant, const char *partition)
{
        Bfcd__ResetPeaks question = BFCD__RESET_PEAKS__INIT;
        Bfcd__Request request = REQUEST(RESET_PEAKS, reset_peaks, &question);

        question.tenant = (char *)tenant;
        question.partition = (char *)partition;
        return ask_done(a, &request);
}

int ask_reload_text(struct ask *a, const char *name, const void *text, size_t n_bytes)
{
        size_t n_done = 0;

        do {
                Bfcd__Reload question = BFCD__RELOAD__INIT;
                Bfcd__Request request = REQUEST(RELOAD, reload, &question);
                Bfcd__Reply *reply = NULL;
                size_t n = n_bytes - n_done < PIECE_BYTES ? n_bytes - n_done : PIECE_BYTES;
                int r;

                question.dry_run = question.is_partial = true;
                question.name = (char *)name;
                question.piece.data = (uint8_t *)(uintptr_t)text + n_done;
                question.piece.len = n;
                r = ask(a, &request, BFCD__REPLY__BODY_RELOAD, &reply);
                if (r < 0)
                        return r;
                bfcd__reply__free_unpacked(reply, NULL);
                n_done += n;
        } while (n_done < n_bytes);
        return 0;
}

int ask_reload(struct ask *a, bool dry_run, Bfcd__Reply **ret)
{
        Bfcd__Reload question = BFCD__RELOAD__INIT;
        Bfcd__Request request = REQUEST(RELOAD, reload, &question);

        question.dry_run = dry_run;
        return ask(a, &request, BFCD__REPLY__BODY_RELOAD, ret);
}
