/* SPDX-License-Identifier: Apache-2.0 */
/* From YAML trees to plain structs, in one pass that never stops at an error.
 *
 * The files, and the grammar's top: sockets, times, and then in the order of
 * dependence, not of the file: devices, then tenants, then what is summed over
 * all of them. See config_reader.h for the parts. The config is handed out only
 * if nothing failed. */
#include "daemon/config.h"
#include "daemon/config_reader.h"
#include "daemon/config_value.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pwd.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_FILE_BYTES       ((size_t)1 << 20)
#define MAX_TEXTS            256u
#define MAX_TEXTS_BYTES      (4 * MAX_FILE_BYTES)
#define DEFAULT_ADMIN_SOCKET "/run/bfcd/admin.sock"
#define DEFAULT_MAX_SESSIONS 4096

/* ---- sockets and times ---------------------------------------------------- */

static void read_socket(struct config_reader *r, const struct yamltree_node *n, const char *what,
                        struct config_socket *ret, const struct yamltree_node **ret_path)
{
        static const char *const known[] = { "path", "mode", "group", NULL };
        const struct yamltree_node *v[CONFIG_MAX_KEYS];
        uint64_t gid;

        if (!n || !config_read_mapping(r, n, what, known, v))
                return;
        *ret_path = v[0];
        if (v[0])
                config_read_path(r, v[0], "path", &ret->path);
        if (v[1])
                config_read_mode(r, v[1], "mode", &ret->mode);
        if (v[2] && v[2]->type == YAMLTREE_SCALAR && v[2]->n_text > 0 && config_all_digits(v[2])) {
                if (config_read_number(r, v[2], "group", 0, (gid_t)-1 - 1, &gid))
                        ret->group = (gid_t)gid;
        } else if (v[2] && config_find_group(r, v[2], "the socket keeps its group", &ret->group)) {
                ret->group_name = config_copy_text(r, v[2]->text);
        }
}

static void check_paths_differ(struct config_reader *r)
{
        const struct yamltree_node *at = r->admin_socket_path ? r->admin_socket_path : r->socket_path;

        if (at && r->c->socket.path && r->c->admin_socket.path &&
            strcmp(r->c->socket.path, r->c->admin_socket.path) == 0)
                config_fail(r, at, "socket and admin_socket have the same path '%s'; they must differ",
                            SHOW(at));
}

static void read_timeouts(struct config_reader *r, const struct yamltree_node *n)
{
        static const char *const known[] = { "reclaim", "release", "quarantine", "read", NULL };
        const struct yamltree_node *v[CONFIG_MAX_KEYS];

        if (!n || !config_read_mapping(r, n, "timeouts", known, v))
                return;
        config_read_duration(r, v[0], "reclaim", &r->c->reclaim_timeout_ms);
        config_read_duration(r, v[1], "release", &r->c->release_timeout_ms);
        config_read_duration(r, v[2], "quarantine", &r->c->quarantine_timeout_ms);
        config_read_duration(r, v[3], "read", &r->c->read_timeout_ms);
}

/* ---- the top -------------------------------------------------------------- */

static void read_main(struct config_reader *r, const struct yamltree_node *root,
                      const struct yamltree_node **ret_tenants, const struct yamltree_node **ret_default)
{
        static const char *const known[] = { "socket",  "admin_socket", "timeouts",       "max_sessions",
                                             "devices", "tenants",      "default_tenant", NULL };
        const struct yamltree_node *v[CONFIG_MAX_KEYS];

        if (!config_read_mapping(r, root, "the config", known, v)) {
                r->lacks_partitions = r->lacks_tenants = true;
                return;
        }
        read_socket(r, v[0], "socket", &r->c->socket, &r->socket_path);
        read_socket(r, v[1], "admin_socket", &r->c->admin_socket, &r->admin_socket_path);
        check_paths_differ(r);
        read_timeouts(r, v[2]);
        config_read_count(r, v[3], "max_sessions", CONFIG_MAX_SESSIONS, &r->c->max_sessions);
        r->sessions_at = v[3] ? v[3] : root;
        config_read_devices(r, root, v[4]);
        r->devices_at = v[4];
        if (v[5])
                config_read_tenants(r, v[5]);
        *ret_tenants = v[5];
        *ret_default = v[6];
}

static void read_more(struct config_reader *r, const struct yamltree_node *root)
{
        static const char *const known[] = { "tenants", NULL };
        const struct yamltree_node *v[CONFIG_MAX_KEYS];

        if (!config_read_mapping(r, root, "a file of conf.d (tenants only)", known, v))
                r->lacks_tenants = true;
        else if (!v[0])
                config_fail(r, root, "the key 'tenants' is missing");
        else
                config_read_tenants(r, v[0]);
}

/* ---- files ---------------------------------------------------------------- */

struct file {
        char *name;
        char *text;
        struct yamltree_node *root; /* NULL: could not be read, reported */
        struct file *next;
};

static struct file *file_free(struct file *f)
{
        while (f) {
                struct file *next = f->next;

                yamltree_free(f->root);
                free(f->text);
                free(f->name);
                free(f);
                f = next;
        }
        return NULL;
}

static void parse_file(struct config_reader *r, struct file *f, const char *text, size_t n_bytes)
{
        int result;

        if (n_bytes > MAX_FILE_BYTES) {
                config_fail_tree(r, f->name, 1, 1, "the file is larger than 1MiB");
                return;
        }
        result = yamltree_parse(f->name, text, n_bytes, config_fail_tree, r, &f->root);
        if (result == -ENOMEM)
                r->is_out_of_memory = true;
        if (f->root && f->root->type == YAMLTREE_SCALAR && f->root->n_text == 0 && !f->root->is_quoted) {
                config_fail_tree(r, f->name, 1, 1, "the file is empty");
                f->root = yamltree_free(f->root);
        }
}

static void read_files(struct config_reader *r, const struct file *files)
{
        const struct yamltree_node *root = files->root;
        const struct yamltree_node *tenants = NULL;
        const struct yamltree_node *of_default = NULL;

        r->lacks_partitions = r->lacks_tenants = !root;
        if (root)
                read_main(r, root, &tenants, &of_default);
        for (const struct file *f = files->next; f; f = f->next) {
                if (f->root)
                        read_more(r, f->root);
                else
                        r->lacks_tenants = true;
        }
        if (root && r->c->n_tenants == 0 && !r->lacks_tenants)
                config_fail(r, tenants ? tenants : root,
                            tenants ? "tenants is empty; there must be at least one"
                                    : "the key 'tenants' is missing");
        config_read_default_tenant(r, of_default);
        config_check_matches(r, root && (!of_default || r->c->default_tenant >= 0));
        config_check_sessions(r);
        config_check_partition_sums(r);
        config_check_gpus(r);
        config_check_pages(r);
        if (root)
                config_check_live(r, root);
}

static struct config *config_new(void)
{
        struct config *c = calloc(1, sizeof(*c));

        if (!c)
                return NULL;
        *c = (struct config){
                .socket = { .path = strdup(CONFIG_DEFAULT_SOCKET), .mode = 0666, .group = (gid_t)-1 },
                .admin_socket = { .path = strdup(DEFAULT_ADMIN_SOCKET), .mode = 0600, .group = (gid_t)-1 },
                .reclaim_timeout_ms = 200,
                .release_timeout_ms = 5000,
                .quarantine_timeout_ms = 60000,
                .read_timeout_ms = 30000,
                .max_sessions = DEFAULT_MAX_SESSIONS,
                .default_tenant = -1,
        };
        if (!c->socket.path || !c->admin_socket.path)
                return config_free(c);
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
        free(c->socket.group_name);
        free(c->admin_socket.group_name);
        free(c);
        return NULL;
}

/* Reads the trees; takes r->c over. */
static int finish(struct config_reader *r, const struct file *files, struct config **ret)
{
        read_files(r, files);
        config_put_warnings(r);
        free(r->devices);
        free(r->partitions);
        free(r->tenants);
        if (r->is_out_of_memory || r->has_failed || r->lacks_gpu) {
                r->c = config_free(r->c);
                return r->is_out_of_memory ? -ENOMEM : r->has_failed ? -EINVAL : -ENODEV;
        }
        *ret = r->c;
        r->c = NULL;
        return 0;
}

int config_parse(const char *name, const char *text, size_t n_bytes, const struct config_machine *machine,
                 FILE *errors, struct config **ret)
{
        struct config_reader r = { .errors = errors, .machine = machine, .c = config_new() };
        struct file *f = calloc(1, sizeof(*f));
        int result = -ENOMEM;

        if (r.c && f)
                f->name = strdup(name);
        if (f && f->name) {
                parse_file(&r, f, text, n_bytes);
                result = finish(&r, f, ret);
        }
        config_free(r.c);
        file_free(f);
        return result;
}

/* ---- files that were read elsewhere --------------------------------------- */

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

int config_parse_texts(const struct config_text *texts, const struct config_machine *machine, FILE *errors,
                       struct config **ret)
{
        struct config_reader r = { .errors = errors, .machine = machine, .c = config_new() };
        struct file *files = NULL, **at = &files;
        int result = r.c ? 0 : -ENOMEM;

        for (const struct config_text *t = texts; t && result == 0; t = t->next) {
                *at = calloc(1, sizeof(**at));
                if (!*at || !((*at)->name = strdup(t->name))) {
                        result = -ENOMEM;
                        break;
                }
                parse_file(&r, *at, t->text, t->n_bytes);
                at = &(*at)->next;
        }
        if (result == 0)
                result = finish(&r, files, ret);
        config_free(r.c);
        file_free(files);
        return result;
}

/* Reads at most one byte more than is allowed, which parse_file() refuses. */
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
                snprintf(sentence, sizeof(sentence), "cannot be read: %s",
                         error == ENOTSUP ? "not a regular file" : strerror(error));
        config_fail_tree(r, path, 1, 1, sentence);
}

/* Takes `path` over. */
static int load_file(struct config_reader *r, char *path, struct file **ret)
{
        struct file *f = calloc(1, sizeof(*f));
        size_t n_bytes = 0;
        int result;

        if (!f || !path) {
                r->is_out_of_memory = true;
                free(f);
                free(path);
                return -ENOMEM;
        }
        f->name = path;
        result = read_text(path, &f->text, &n_bytes);
        if (result < 0)
                fail_file(r, path, -result);
        else if (!r->only_tries)
                parse_file(r, f, f->text, n_bytes);
        *ret = f;
        return result;
}

static int is_yaml(const struct dirent *e)
{
        size_t n = strlen(e->d_name);

        return e->d_name[0] != '.' && n > 5 && strcmp(e->d_name + n - 5, ".yaml") == 0;
}

/* By bytes: the order must not hang on a locale. */
static int by_name(const struct dirent **a, const struct dirent **b)
{
        return strcmp((*a)->d_name, (*b)->d_name);
}

static void load_folder(struct config_reader *r, const char *main_path, struct file *last)
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
        struct config_reader r = { .errors = errors, .machine = machine, .c = config_new() };
        struct file *files = NULL;
        int result;

        if (!r.c)
                return -ENOMEM;
        result = load_file(&r, strdup(path), &files);
        if (result == 0) {
                load_folder(&r, path, files);
                result = finish(&r, files, ret);
        }
        config_free(r.c);
        file_free(files);
        return result;
}

int config_try_files(const char *path, FILE *errors)
{
        struct config_reader r = { .errors = errors, .only_tries = true };
        struct file *files = NULL;

        if (load_file(&r, strdup(path), &files) == 0)
                load_folder(&r, path, files);
        file_free(files);
        return r.is_out_of_memory ? -ENOMEM : r.has_failed ? -EACCES : 0;
}

/* ---- the command line ----------------------------------------------------- */

static bool option_fails(const char *option, const char *path, FILE *errors)
{
        char fault[CONFIG_FAULT_BYTES];

        if (!path || !config_path_fault(path, strlen(path), fault, sizeof(fault)))
                return false;
        fprintf(errors, "%s: %s\n", option, fault);
        return true;
}

/* Which of the two is to blame: that of the command line, or its second. */
static bool options_collide(const struct config *c, const char *socket, const char *admin_socket,
                            FILE *errors)
{
        const char *path = socket ? socket : c->socket.path;
        const char *option = admin_socket ? "--admin-socket" : "--socket";
        const char *other = !admin_socket ? "the config's admin_socket"
                            : socket      ? "--socket"
                                          : "the config's socket";

        if (strcmp(path, admin_socket ? admin_socket : c->admin_socket.path) != 0)
                return false;
        fprintf(errors, "%s: '%s' is the path of %s; they must differ\n", option, path, other);
        return true;
}

int config_set_sockets(struct config *c, const char *socket, const char *admin_socket, FILE *errors)
{
        bool socket_fails = option_fails("--socket", socket, errors);
        bool admin_socket_fails = option_fails("--admin-socket", admin_socket, errors);
        char *path;
        char *admin_path;

        if (socket_fails || admin_socket_fails || options_collide(c, socket, admin_socket, errors))
                return -EINVAL;
        path = strdup(socket ? socket : c->socket.path);
        admin_path = strdup(admin_socket ? admin_socket : c->admin_socket.path);
        if (!path || !admin_path) {
                free(path);
                free(admin_path);
                return -ENOMEM;
        }
        free(c->socket.path);
        free(c->admin_socket.path);
        c->socket.path = path;
        c->admin_socket.path = admin_path;
        return 0;
}
