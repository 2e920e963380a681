/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/config/config.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pwd.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/config/reader.h"
#include "proto/paths.h"

/* From files to a config: the texts are parsed, read by the schema and checked as a whole. Reading continues
 * after an error, so that all errors are reported. A config with an error is never returned. */

#define MAX_FILE_BYTES  ((size_t)1 << 20)
#define MAX_TEXTS       256u
#define MAX_TEXTS_BYTES (4 * MAX_FILE_BYTES)

/* ---- the top -------------------------------------------------------------- */

/* root: NULL where the file could not be read, which is reported. */
static void read_main(struct config_reader *r, const struct yamltree_node *root)
{
        r->top = config_place(&CONFIG_TOP, root, r->c);
        if (!root || !config_read_section(r, &r->top))
                r->lacks_partitions = r->lacks_tenants = true;
}

static void read_more(struct config_reader *r, const struct yamltree_node *root)
{
        struct config_place p = config_place(&CONFIG_MORE, root, r->c);

        if (!root || !config_read_section(r, &p))
                r->lacks_tenants = true;
}

static void check_all(struct config_reader *r)
{
        const struct yamltree_node *root = r->top.node, *tenants = r->top.at[TOP_TENANTS];

        if (root && r->c->n_tenants == 0 && !r->lacks_tenants)
                config_fail(r, tenants ? tenants : root,
                            tenants ? "tenants is empty; there must be at least one"
                                    : "the key 'tenants' is missing");
        config_read_default_tenant(r);
        config_check_matches(r, root && (!r->top.at[TOP_DEFAULT] || r->c->default_tenant >= 0));
        config_check_sessions(r);
        config_check_partition_sums(r);
        config_check_gpus(r);
        config_check_pages(r);
        config_check_pinned(r);
        if (root)
                config_check_live(r, root);
}

static struct config *config_new(void)
{
        struct config *c = calloc(1, sizeof(*c));

        if (!c)
                return NULL;
        config_init(&CONFIG_TOP, c);
        c->socket.path = strdup(PATHS_CLIENT_SOCKET);
        c->admin_socket.path = strdup(PATHS_ADMIN_SOCKET);
        c->monitor_socket.path = strdup(PATHS_MONITOR_SOCKET);
        if (!c->socket.path || !c->admin_socket.path || !c->monitor_socket.path)
                return config_free(c);
        c->socket.mode = 0666;
        c->admin_socket.mode = 0600;
        c->monitor_socket.mode = 0660; /* the group is the socket unit's: bfcd-monitor */
        c->lease_socket.mode = 0600;
        return c;
}

/* An equal part for each: a tenant with a lower bound is guaranteed that bound. */
uint32_t config_session_share(const struct config *c, const struct config_tenant *t)
{
        uint32_t part = c->n_tenants > 0 ? c->max_sessions / (uint32_t)c->n_tenants : 0;

        return part < t->max_sessions ? part : t->max_sessions;
}

struct config *config_free(struct config *c)
{
        if (!c)
                return NULL;
        for (size_t i = 0; i < c->n_tenants; i++)
                config_free_tenant(&c->tenants[i]);
        for (size_t i = 0; i < c->n_partitions; i++)
                free(c->partitions[i].name);
        for (size_t i = 0; i < c->n_devices; i++)
                free(c->devices[i].id);
        free(c->tenants);
        free(c->partitions);
        free(c->devices);
        free(c->socket.path);
        free(c->admin_socket.path);
        free(c->monitor_socket.path);
        free(c->lease_socket.path);
        free(c->socket.group_name);
        free(c->admin_socket.group_name);
        free(c->monitor_socket.group_name);
        free(c->lease_socket.group_name);
        free(c->records.file);
        free(c->records.journal);
        free(c);
        return NULL;
}

/* ---- texts ----------------------------------------------------------------- */

struct config_text *config_text_free(struct config_text *texts)
{
        while (texts) {
                struct config_text *next = texts->next;

                free(texts->name);
                free(texts->text);
                free(texts);
                texts = next;
        }
        return NULL;
}

int config_text_add(struct config_text **texts, const char *name, const void *piece, size_t n_bytes)
{
        struct config_text **at = texts, *t;
        size_t n_all = 0, n_texts = 0;
        char *text;

        for (; *at && ((*at)->next || strcmp((*at)->name, name) != 0); at = &(*at)->next) {
                n_all += (*at)->n_bytes;
                n_texts++;
        }
        if (n_bytes > MAX_FILE_BYTES || n_texts >= MAX_TEXTS ||
            n_all + (*at ? (*at)->n_bytes : 0) + n_bytes > MAX_TEXTS_BYTES)
                return -EFBIG;
        if (!*at) {
                t = calloc(1, sizeof(*t));
                if (!t || !(t->name = strdup(name))) {
                        free(t);
                        return -ENOMEM;
                }
                *at = t;
        }
        t = *at;
        text = realloc(t->text, t->n_bytes + n_bytes + 1);
        if (!text)
                return -ENOMEM;
        if (n_bytes > 0)
                memcpy(text + t->n_bytes, piece, n_bytes);
        t->text = text;
        t->n_bytes += n_bytes;
        return 0;
}

/* ---- parsing -------------------------------------------------------------- */

static struct yamltree_node *parse_text(struct config_reader *r, const struct config_text *t)
{
        struct yamltree_node *root = NULL;

        if (t->n_bytes > MAX_FILE_BYTES) {
                config_fail_tree(r, t->name, 1, 1, "the file is larger than 1MiB");
                return NULL;
        }
        if (yamltree_parse(t->name, t->text, t->n_bytes, config_fail_tree, r, &root) == -ENOMEM)
                r->is_out_of_memory = true;
        if (root && root->type == YAMLTREE_SCALAR && root->n_text == 0 && !root->is_quoted) {
                config_fail_tree(r, t->name, 1, 1, "the file is empty");
                root = yamltree_free(root);
        }
        return root;
}

/* A text that is NULL could not be read, which is reported. */
static int read_texts(struct config_reader *r, const struct config_text *texts, struct config **ret)
{
        struct yamltree_node **roots;
        size_t n = 0, i = 0;

        for (const struct config_text *t = texts; t; t = t->next)
                n++;
        roots = calloc(n, sizeof(*roots));
        r->c = roots ? config_new() : NULL;
        if (!r->c) {
                free(roots);
                return -ENOMEM;
        }
        for (const struct config_text *t = texts; t; t = t->next, i++) {
                roots[i] = t->text ? parse_text(r, t) : NULL;
                r->has_failed = r->has_failed || !roots[i];
        }
        read_main(r, roots[0]);
        for (i = 1; i < n; i++)
                read_more(r, roots[i]);
        check_all(r);
        config_put_warnings(r);
        while (n > 0)
                yamltree_free(roots[--n]);
        free(roots);
        free(r->devices);
        free(r->partitions);
        free(r->tenants);
        if (r->is_out_of_memory || r->has_failed || r->lacks_gpu) {
                config_free(r->c);
                return r->is_out_of_memory ? -ENOMEM : r->has_failed ? -EINVAL : -ENODEV;
        }
        *ret = r->c;
        return 0;
}

int config_parse_texts(const struct config_text *texts, const struct config_machine *machine, FILE *errors,
                       struct config **ret)
{
        struct config_reader r = { .errors = errors, .machine = machine };

        return read_texts(&r, texts, ret);
}

int config_parse(const char *name, const char *text, size_t n_bytes, const struct config_machine *machine,
                 FILE *errors, struct config **ret)
{
        const struct config_text only = { .name = (char *)name, .text = (char *)text, .n_bytes = n_bytes };

        return config_parse_texts(&only, machine, errors, ret);
}

/* ---- files ---------------------------------------------------------------- */

/* Reads at most one byte more than is allowed, which parse_text() refuses. */
static int read_text(const char *path, char **ret, size_t *ret_n_bytes)
{
        size_t n = 0;
        struct stat st;
        char *text;
        int result;
        int fd;

        fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO must not block */
        if (fd < 0)
                return -errno;
        text = malloc(MAX_FILE_BYTES + 1);
        result = text ? 0 : -ENOMEM;
        if (result == 0 && fstat(fd, &st) < 0)
                result = -errno;
        if (result == 0 && !S_ISREG(st.st_mode))
                result = S_ISDIR(st.st_mode) ? -EISDIR : -ENOTSUP;
        while (result == 0 && n <= MAX_FILE_BYTES) {
                ssize_t got = read(fd, text + n, MAX_FILE_BYTES + 1 - n);

                if (got == 0)
                        break;
                if (got > 0)
                        n += (size_t)got;
                else if (errno != EINTR)
                        result = -errno;
        }
        close(fd);
        if (result < 0) {
                free(text);
                return result;
        }
        *ret = text;
        *ret_n_bytes = n;
        return 0;
}

static void fail_file(struct config_reader *r, const char *path, int error)
{
        const struct passwd *user = error == EACCES ? getpwuid(geteuid()) : NULL;
        char sentence[256];

        if (error == ENOMEM) {
                r->is_out_of_memory = true;
                return;
        }
        if (r->only_tries && error != EACCES)
                return;
        if (user)
                snprintf(sentence, sizeof(sentence), "cannot be read by user '%s': %s", user->pw_name,
                         strerror(error));
        else
                snprintf(sentence, sizeof(sentence), "cannot be read: %s%s",
                         error == ENOTSUP ? "not a regular file" : strerror(error),
                         error == ENOENT ? "; bfcd.yaml(5) has an example" : "");
        config_fail_tree(r, path, 1, 1, sentence);
}

/* Takes `path` over. */
static int load_file(struct config_reader *r, char *path, struct config_text **ret)
{
        struct config_text *t = path ? calloc(1, sizeof(*t)) : NULL;
        int result;

        if (!t) {
                r->is_out_of_memory = true;
                free(path);
                return -ENOMEM;
        }
        t->name = path;
        result = read_text(path, &t->text, &t->n_bytes);
        if (result < 0)
                fail_file(r, path, -result);
        *ret = t;
        return result;
}

static int is_yaml(const struct dirent *e)
{
        size_t n = strlen(e->d_name);

        return e->d_name[0] != '.' && n > 5 && strcmp(e->d_name + n - 5, ".yaml") == 0;
}

/* By bytes: the order must not depend on a locale. */
static int by_name(const struct dirent **a, const struct dirent **b)
{
        return strcmp((*a)->d_name, (*b)->d_name);
}

static void load_folder(struct config_reader *r, const char *main_path, struct config_text *last)
{
        const char *slash = strrchr(main_path, '/');
        struct dirent **entries = NULL;
        char *folder = NULL;
        int n;

        if (asprintf(&folder, "%.*sconf.d", slash ? (int)(slash - main_path) + 1 : 0, main_path) < 0) {
                r->is_out_of_memory = true;
                return;
        }
        n = scandir(folder, &entries, is_yaml, by_name);
        if (n < 0 && errno != ENOENT)
                fail_file(r, folder, errno);
        for (int i = 0; i < n; i++) {
                char *path = NULL;

                if (asprintf(&path, "%s/%s", folder, entries[i]->d_name) < 0)
                        path = NULL;
                load_file(r, path, &last->next);
                if (last->next)
                        last = last->next;
                free(entries[i]);
        }
        free(entries);
        free(folder);
}

int config_load(const char *path, const struct config_machine *machine, FILE *errors, struct config **ret)
{
        struct config_reader r = { .errors = errors, .machine = machine };
        struct config_text *texts = NULL;
        int result = load_file(&r, strdup(path), &texts);

        if (result == 0) {
                load_folder(&r, path, texts);
                result = read_texts(&r, texts, ret);
        }
        config_text_free(texts);
        return result;
}

int config_try_files(const char *path, FILE *errors)
{
        struct config_reader r = { .errors = errors, .only_tries = true };
        struct config_text *texts = NULL;

        if (load_file(&r, strdup(path), &texts) == 0)
                load_folder(&r, path, texts);
        config_text_free(texts);
        return r.is_out_of_memory ? -ENOMEM : r.has_failed ? -EACCES : 0;
}

/* ---- sockets ------------------------------------------------------------- */

/* The sockets, whose paths must differ, and where records go. */

enum { CLIENT, ADMIN, MONITOR, LEASE, N_SOCKETS };

static const char *const keys[N_SOCKETS] = { "socket", "admin_socket", "monitor_socket", "lease_socket" };

/* Without a path of its own the monitor socket is in the folder of the admin socket. So a second daemon, whose
 * sockets have another folder, need not configure it. */
static void follow_admin_socket(struct config_reader *r)
{
        const char *admin = r->c->admin_socket.path;
        char *path;

        if (asprintf(&path, "%.*s/" PATHS_MONITOR_NAME, (int)(strrchr(admin, '/') - admin), admin) < 0) {
                r->is_out_of_memory = true;
                return;
        }
        free(r->c->monitor_socket.path);
        r->c->monitor_socket.path = path;
}

/* Reported where the second of them has its path, else where the first one has. */
static void check_paths_differ(struct config_reader *r, size_t a, size_t b)
{
        const struct config_place *places[N_SOCKETS] = { &r->socket, &r->admin_socket, &r->monitor_socket,
                                                         &r->lease_socket };
        const char *paths[N_SOCKETS] = { r->c->socket.path, r->c->admin_socket.path,
                                         r->c->monitor_socket.path, r->c->lease_socket.path };
        const struct yamltree_node *at = places[b]->at[SOCKET_PATH];

        if (!at)
                at = places[a]->at[SOCKET_PATH];
        if (at && paths[b] && strcmp(paths[a], paths[b]) == 0)
                config_fail(r, at, "%s and %s have the same path '%s'; they must differ", keys[a], keys[b],
                            SHOW(at));
}

bool config_read_socket(struct config_reader *r, struct config_place *in, const struct config_field *field,
                        const struct yamltree_node *n)
{
        size_t which = field == &CONFIG_TOP.fields[TOP_ADMIN_SOCKET]     ? ADMIN
                       : field == &CONFIG_TOP.fields[TOP_MONITOR_SOCKET] ? MONITOR
                       : field == &CONFIG_TOP.fields[TOP_LEASE_SOCKET]   ? LEASE
                                                                         : CLIENT;
        struct config_place *places[N_SOCKETS] = { &r->socket, &r->admin_socket, &r->monitor_socket,
                                                   &r->lease_socket };

        *places[which] = config_inner(in, field, n);
        if (n)
                config_read_section(r, places[which]);
        if (which == MONITOR && !places[which]->at[SOCKET_PATH])
                follow_admin_socket(r);
        if (which == LEASE && n && !places[which]->at[SOCKET_PATH])
                config_fail(r, n, "lease_socket has no key 'path'; this socket has no default path");
        for (size_t i = 0; i < which; i++)
                check_paths_differ(r, i, which);
        return n != NULL;
}

bool config_read_records(struct config_reader *r, struct config_place *in, const struct config_field *field,
                         const struct yamltree_node *n)
{
        r->records = config_inner(in, field, n);
        if (!n || !config_read_section(r, &r->records))
                return false;
        if (r->records.at[RECORDS_FILE] && r->records.at[RECORDS_JOURNAL_SOCKET])
                config_fail(r, r->records.at[RECORDS_JOURNAL_SOCKET],
                            "records has the keys 'file' and 'journal'; write one of them");
        return true;
}

/* ---- the configuration as YAML ------------------------------------------- */

/* The configuration in force as YAML, with the defaults. config_parse() reads it back as the same
 * configuration; strings are quoted so that none can be taken for syntax. */

#define INDENT 2

void config_put_string(FILE *f, const char *text)
{
        fputc('"', f);
        for (; *text; text++) {
                if (*text == '"' || *text == '\\')
                        fputc('\\', f);
                fputc(*text, f);
        }
        fputc('"', f);
}

static bool is_hidden(const struct config *c, const struct config_field *field, const void *object)
{
        char text[CONFIG_TEXT_BYTES];

        if (field->type == CONFIG_LIST || (field->type == CONFIG_MAPPING && !field->text))
                return false;
        if (field->hides_initial && config_get(field, object) == field->initial)
                return true;
        config_text(c, field, object, text);
        return text[0] == '\0';
}

static void put_fields(FILE *f, const struct config *c, const struct config_section *s, const void *object,
                       int indent);

static void put_list(FILE *f, const struct config *c, const struct config_field *field, const void *object,
                     int indent)
{
        const void *element;

        for (size_t i = 0; (element = config_element(c, field, object, i)); i++) {
                fprintf(f, "\n%*s- ", indent, "");
                put_fields(f, c, field->section, element, indent + INDENT);
        }
}

static void put_value(FILE *f, const struct config *c, const struct config_field *field, const void *object)
{
        bool is_string = field->type >= CONFIG_MODE && field->type <= CONFIG_TENANT_NAME;
        char text[CONFIG_TEXT_BYTES];

        fputc(' ', f);
        if (field->put) {
                field->put(f, object);
                return;
        }
        if (field->type == CONFIG_MAPPING) {
                put_fields(f, c, field->section, (const char *)object + field->base, 0);
                return;
        }
        config_text(c, field, object, text);
        if (is_string && (field->type != CONFIG_GROUP || text[strspn(text, "0123456789")] != '\0'))
                config_put_string(f, text);
        else
                fputs(text, f);
}

/* Lists come after the other keys, which people look for first. */
static void put_fields(FILE *f, const struct config *c, const struct config_section *s, const void *object,
                       int indent)
{
        bool is_first = true;

        fputs(s->is_block ? "" : "{", f);
        for (int lists = 0; lists < 2; lists++) {
                for (const struct config_field *field = s->fields; field->key; field++) {
                        if ((field->type == CONFIG_LIST) != lists || is_hidden(c, field, object))
                                continue;
                        if (!is_first && s->is_block)
                                fprintf(f, "\n%*s", indent, "");
                        else if (!is_first)
                                fputs(", ", f);
                        is_first = false;
                        fprintf(f, "%s:", field->key);
                        if (lists)
                                put_list(f, c, field, object, indent + INDENT);
                        else
                                put_value(f, c, field, object);
                }
        }
        fputs(s->is_block ? "" : "}", f);
}

char *config_format(const struct config *c)
{
        size_t n_bytes = 0;
        char *text = NULL;
        bool failed;
        FILE *f;

        f = open_memstream(&text, &n_bytes);
        if (!f)
                return NULL;
        put_fields(f, c, &CONFIG_TOP, c, 0);
        fputc('\n', f);
        failed = ferror(f) != 0;
        if (fclose(f) != 0 || failed) {
                free(text);
                return NULL;
        }
        return text;
}
