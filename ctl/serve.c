/* The HTTP side of bfc-exporter; see serve.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctl/serve.h"

#include <errno.h>
#include <microhttpd.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/ask.h"
#include "ctl/clock.h"
#include "ctl/explain.h"
#include "ctl/grants.h"
#include "ctl/hour.h"
#include "ctl/map_ask.h"
#include "ctl/metrics.h"
#include "ctl/page.h"
#include "ctl/show.h"
#include "ctl/statistics.h"
#include "ctl/table.h"

#define N_ELEMENTS(a)       (sizeof(a) / sizeof((a)[0]))
#define CONNECTION_BYTES    ((size_t)16 << 10) /* of a request's head */
#define TYPE_SVG            "image/svg+xml"
#define TYPE_JSON           "application/json; charset=utf-8"
#define TYPE_PROMETHEUS     "text/plain; version=0.0.4; charset=utf-8"
#define TYPE_OPENMETRICS    "application/openmetrics-text; version=1.0.0; charset=utf-8"
#define TYPE_HTML           "text/html; charset=utf-8"
#define ACCEPTS_OPENMETRICS "application/openmetrics-text"
/* Where a browser shows something else than the page as a document. */
#define DATA_POLICY "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; sandbox"

struct serve {
        struct MHD_Daemon *http;
        const char *socket;
        bool metrics_only;
        pthread_mutex_t turn; /* for asking the daemon, and of the hour */
        struct hour *hour;
        uint64_t due_ms; /* the next sample */
};

/* An answer while it is made. */
struct answer {
        FILE *out;
        const char *type;
        bool openmetrics;                       /* the client accepts it */
        const char *partition, *width, *leases; /* of the query; NULL: none */
        unsigned failed_with;                   /* the status, if there is an error */
};

/* ---- what there is ------------------------------------------------------------- */

static int answer_list(struct ask *a, Bfcd__List__Kind kind, struct answer *ret)
{
        struct list *l;
        int r = ask_list(a, kind, &l);

        if (r < 0)
                return r;
        list_leave_out(l, a->session_id);
        list_leave_out_names(l); /* whoever can connect sees it */
        r = show_print(ret->out, kind == BFCD__LIST__KIND__GRANTS ? grants_json(l) : show_json(kind, l));
        list_free(l);
        return r;
}

static int answer_explain(struct ask *a, Bfcd__List__Kind kind, struct answer *ret)
{
        struct list *l;
        int r = ask_explain(a, "", "", &l);

        (void)kind;
        if (r < 0)
                return r;
        r = show_print(ret->out, explain_json(l));
        list_free(l);
        return r;
}

static int __attribute__((format(printf, 3, 4)))
bad_request(struct ask *a, struct answer *ret, const char *format, ...)
{
        va_list arguments;

        va_start(arguments, format);
        vsnprintf(a->error, sizeof(a->error), format, arguments);
        va_end(arguments);
        ret->failed_with = MHD_HTTP_BAD_REQUEST;
        return -EINVAL;
}

static int answer_metrics(struct ask *a, Bfcd__List__Kind kind, struct answer *ret)
{
        struct metrics_options o = { ret->openmetrics, ret->leases != NULL };
        struct list *l;
        int r;

        (void)kind;
        if (ret->leases && strcmp(ret->leases, "each") != 0)
                return bad_request(a, ret, "leases can only be 'each', as in /metrics?leases=each.");
        r = ask_lists(a, metrics_lists, METRICS_LISTS, &l);
        if (r < 0)
                return r;
        ret->type = ret->openmetrics ? TYPE_OPENMETRICS : TYPE_PROMETHEUS;
        r = metrics_print(ret->out, l, &o);
        list_free(l);
        return r;
}

/* A number of pixels in digits only. 0: it is another text. */
static unsigned read_width(const char *text)
{
        unsigned n = 0;

        if (!text)
                return MAP_COLUMNS;
        for (; *text >= '0' && *text <= '9' && n <= MAP_COLUMNS; text++)
                n = n * 10 + (unsigned)(*text - '0');
        return *text == '\0' && n >= MAP_NARROW && n <= MAP_COLUMNS ? n : 0;
}

static int answer_map(struct ask *a, Bfcd__List__Kind kind, struct answer *ret)
{
        unsigned width = read_width(ret->width);
        struct map *m;
        int r;

        (void)kind;
        if (!ret->partition || !*ret->partition)
                return bad_request(a, ret, "A partition is needed, as in /api/map.svg?partition=train.");
        if (width == 0)
                return bad_request(a, ret, "The width must be a number of pixels from %u to %u.", MAP_NARROW,
                                   MAP_COLUMNS);
        r = map_ask(a, ret->partition, NULL, width, true, &m);
        if (r == -ENOENT)
                ret->failed_with = MHD_HTTP_NOT_FOUND;
        if (r < 0)
                return r;
        ret->type = TYPE_SVG;
        r = map_svg(ret->out, m, width,
                    false); /* whoever can connect sees it, and names are their tenant's */
        map_free(m);
        return r;
}

/* Lists of blocks and shared blocks are left out: there may be millions. A tenant keeps at most 256. */
static const struct path {
        const char *path;
        int (*answer)(struct ask *a, Bfcd__List__Kind kind, struct answer *ret);
        Bfcd__List__Kind kind;
} paths[] = {
        { "/metrics", answer_metrics, 0 },
        { "/api/status", answer_list, BFCD__LIST__KIND__STATUS },
        { "/api/partitions", answer_list, BFCD__LIST__KIND__PARTITIONS },
        { "/api/tenants", answer_list, BFCD__LIST__KIND__TENANTS },
        { "/api/sessions", answer_list, BFCD__LIST__KIND__SESSIONS },
        { "/api/keep", answer_list, BFCD__LIST__KIND__KEPT },
        { "/api/grants", answer_list, BFCD__LIST__KIND__GRANTS },
        { "/api/waiting", answer_list, BFCD__LIST__KIND__WAITING },
        { "/api/leases", answer_list, BFCD__LIST__KIND__LEASES },
        { "/api/explain", answer_explain, 0 },
        { "/api/map.svg", answer_map, 0 },
};

static const struct path *find_path(const char *url)
{
        for (size_t i = 0; i < N_ELEMENTS(paths); i++)
                if (strcmp(paths[i].path, url) == 0)
                        return &paths[i];
        return NULL;
}

/* ---- answers --------------------------------------------------------------------- */

/* Takes the response over. */
static enum MHD_Result send_response(struct MHD_Connection *c, unsigned status, const char *type,
                                     const char *policy, struct MHD_Response *response)
{
        enum MHD_Result r;

        (void)MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, type);
        (void)MHD_add_response_header(response, MHD_HTTP_HEADER_CACHE_CONTROL, "no-store");
        (void)MHD_add_response_header(response, "Content-Security-Policy", policy);
        (void)MHD_add_response_header(response, "Referrer-Policy", "no-referrer");
        (void)MHD_add_response_header(response, "X-Content-Type-Options", "nosniff");
        if (status == MHD_HTTP_METHOD_NOT_ALLOWED)
                (void)MHD_add_response_header(response, MHD_HTTP_HEADER_ALLOW, "GET, HEAD");
        r = MHD_queue_response(c, status, response);
        MHD_destroy_response(response);
        return r;
}

/* Takes the text over. */
static enum MHD_Result send_text(struct MHD_Connection *c, unsigned status, const char *type, char *text,
                                 size_t n_text)
{
        struct MHD_Response *response = MHD_create_response_from_buffer(n_text, text, MHD_RESPMEM_MUST_FREE);

        if (!response) {
                free(text);
                return MHD_NO;
        }
        return send_response(c, status, type, DATA_POLICY, response);
}

static enum MHD_Result send_page(struct MHD_Connection *c)
{
        struct MHD_Response *response = MHD_create_response_from_buffer(
                page_n_bytes, (void *)(uintptr_t)page_html, MHD_RESPMEM_PERSISTENT);

        return response ? send_response(c, MHD_HTTP_OK, TYPE_HTML, page_policy, response) : MHD_NO;
}

/* Out of memory where there is no text. */
static enum MHD_Result send_hour(struct serve *s, struct MHD_Connection *c)
{
        char *text = NULL;
        size_t n_text = 0;
        FILE *out = open_memstream(&text, &n_text);
        int r;

        if (!out)
                return MHD_NO;
        pthread_mutex_lock(&s->turn);
        r = hour_print(out, s->hour, clock_ms());
        pthread_mutex_unlock(&s->turn);
        if (fclose(out) == 0 && r == 0)
                return send_text(c, MHD_HTTP_OK, TYPE_JSON, text, n_text);
        free(text);
        return MHD_NO;
}

/* Takes the document over; NULL: out of memory. */
static enum MHD_Result send_document(struct MHD_Connection *c, unsigned status, json_t *document)
{
        char *text = document ? json_dumps(document, JSON_INDENT(2)) : NULL;

        json_decref(document);
        return text ? send_text(c, status, TYPE_JSON, text, strlen(text)) : MHD_NO;
}

static enum MHD_Result send_error(struct MHD_Connection *c, unsigned status, const char *sentence)
{
        return send_document(c, status, show_document("error", table_json_string(sentence)));
}

static int open_monitor(const struct serve *s, struct ask *a)
{
        int r = ask_open(a, s->socket, NULL);

        if (r == 0 && !a->monitor) {
                snprintf(a->error, sizeof(a->error), "%s is not the monitor socket.", s->socket);
                r = -EACCES;
        }
        return r;
}

/* Asks the daemon. What is sent is complete, or it is an error. */
static int make_answer(struct serve *s, struct ask *a, const struct path *path, struct answer *answer)
{
        int r;

        pthread_mutex_lock(&s->turn);
        r = open_monitor(s, a);
        if (r == 0)
                r = path->answer(a, path->kind, answer);
        ask_close(a);
        pthread_mutex_unlock(&s->turn);
        if (r == -ENOMEM && a->error[0] == '\0')
                snprintf(a->error, sizeof(a->error), "Out of memory.");
        return r;
}

/* libmicrohttpd has decoded the query. No name has a zero byte. */
static const char *query_value(struct MHD_Connection *c, const char *key)
{
        const char *value;
        size_t n;

        if (MHD_lookup_connection_value_n(c, MHD_GET_ARGUMENT_KIND, key, strlen(key), &value, &n) !=
                    MHD_YES ||
            !value || strlen(value) != n)
                return NULL;
        return value;
}

static enum MHD_Result send_answer(struct serve *s, struct MHD_Connection *c, const struct path *path)
{
        const char *accepts = MHD_lookup_connection_value(c, MHD_HEADER_KIND, MHD_HTTP_HEADER_ACCEPT);
        struct answer answer = { .type = TYPE_JSON,
                                 .openmetrics = accepts && strstr(accepts, ACCEPTS_OPENMETRICS),
                                 .partition = query_value(c, "partition"),
                                 .width = query_value(c, "width"),
                                 .leases = query_value(c, "leases"),
                                 .failed_with = MHD_HTTP_SERVICE_UNAVAILABLE };
        char *text = NULL;
        size_t n_text = 0;
        struct ask a;
        int r;

        answer.out = open_memstream(&text, &n_text);
        if (!answer.out)
                return MHD_NO;
        r = make_answer(s, &a, path, &answer);
        if (fclose(answer.out) != 0 && r == 0)
                r = -ENOMEM;
        if (r == 0)
                return send_text(c, MHD_HTTP_OK, answer.type, text, n_text);
        free(text);
        return send_error(c, answer.failed_with, a.error);
}

/* Called when the head is there, and again for the body, which is not read. */
static enum MHD_Result on_request(void *userdata, struct MHD_Connection *c, const char *url,
                                  const char *method, const char *version, const char *body, size_t *n_body,
                                  void **state)
{
        static const char begun;
        const struct path *path = find_path(url);

        (void)version;
        (void)body;
        if (strcmp(method, MHD_HTTP_METHOD_GET) != 0 && strcmp(method, MHD_HTTP_METHOD_HEAD) != 0)
                return send_error(c, MHD_HTTP_METHOD_NOT_ALLOWED, "Only GET and HEAD are served.");
        if (!*state) {
                *state = (void *)(uintptr_t)&begun;
                return MHD_YES;
        }
        if (*n_body > 0) {
                *n_body = 0;
                return MHD_YES;
        }
        if (((const struct serve *)userdata)->metrics_only && strcmp(url, "/metrics") != 0)
                return send_error(c, MHD_HTTP_NOT_FOUND, "There is only /metrics.");
        if (strcmp(url, "/") == 0)
                return send_page(c);
        if (strcmp(url, "/api/hour") == 0)
                return send_hour(userdata, c);
        if (strcmp(url, "/api/columns") == 0)
                return send_document(c, MHD_HTTP_OK, statistics_page());
        return path ? send_answer(userdata, c, path)
                    : send_error(
                              c, MHD_HTTP_NOT_FOUND,
                              "There are /, /metrics and /api/ with status, partitions, "
                              "tenants, sessions, keep, grants, waiting, leases, explain, hour, columns or map.svg.");
}

/* ---- start and end ----------------------------------------------------------------- */

int serve_start(int fd, const char *socket, bool metrics_only, struct serve **ret)
{
        struct serve *s = calloc(1, sizeof(*s));

        if (!s)
                return -ENOMEM;
        s->socket = socket;
        s->metrics_only = metrics_only;
        pthread_mutex_init(&s->turn, NULL);
        if (hour_new(&s->hour) < 0) {
                free(s);
                return -ENOMEM;
        }
        s->http = MHD_start_daemon(
                MHD_USE_AUTO_INTERNAL_THREAD, 0, NULL, NULL, on_request, s, MHD_OPTION_LISTEN_SOCKET, fd,
                MHD_OPTION_CONNECTION_LIMIT, SERVE_CONNECTIONS, MHD_OPTION_PER_IP_CONNECTION_LIMIT,
                metrics_only ? SERVE_CONNECTIONS_OF_ADDRESS : 0, MHD_OPTION_CONNECTION_TIMEOUT,
                SERVE_TIMEOUT_S, MHD_OPTION_CONNECTION_MEMORY_LIMIT, CONNECTION_BYTES, MHD_OPTION_END);
        if (!s->http) {
                hour_free(s->hour);
                free(s);
                return -ENOMEM;
        }
        *ret = s;
        return 0;
}

/* A sample that fails leaves a gap. */
void serve_sample(struct serve *s)
{
        struct list *l;
        struct ask a;

        if (s->metrics_only || clock_ms() < s->due_ms)
                return;
        s->due_ms = clock_ms() + HOUR_SAMPLE_MS;
        pthread_mutex_lock(&s->turn);
        if (open_monitor(s, &a) == 0 && ask_lists(&a, hour_lists, HOUR_LISTS, &l) == 0) {
                (void)hour_add(s->hour, clock_ms(), l);
                list_free(l);
        }
        ask_close(&a);
        pthread_mutex_unlock(&s->turn);
}

struct serve *serve_stop(struct serve *s)
{
        if (!s)
                return NULL;
        MHD_stop_daemon(s->http);
        pthread_mutex_destroy(&s->turn);
        hour_free(s->hour);
        free(s);
        return NULL;
}
