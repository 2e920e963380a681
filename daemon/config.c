/* SPDX-License-Identifier: Apache-2.0 */
/* From YAML trees to plain structs, in one pass that never stops at an error.
 *
 * Each read_*() takes a node and reports whatever is wrong with it. What an
 * error leaves unknown (a limit, a name) is marked so, and checks that would
 * need it are silent: one mistake gives one message. The order is that of
 * dependence, not of the file: devices, then tenants, then what is summed over
 * all of them.
 *
 * Invariant: notes of partitions and tenants are as many as those in the
 * config, index by index. The config is handed out only if nothing failed. */
#include "daemon/config.h"
#include "daemon/yamltree.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <pwd.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define MAX_FILE_BYTES  ((size_t)1 << 20)
#define MAX_KEYS        8
#define MAX_PARTITIONS  256
#define MAX_TENANTS     4096
#define MAX_MATCHES     4096                  /* uids or gids of one tenant */
#define MAX_QUOTA_LIMIT (UINT64_C(512) << 30) /* an arena's address space is twice this: 1 TiB */
#define MAX_TIMEOUT_MS  UINT64_C(86400000)    /* a day */

#define DEFAULT_SOCKET             "/run/bfcd/bfcd.sock"
#define DEFAULT_ADMIN_SOCKET       "/run/bfcd/admin.sock"
#define MAX_SESSIONS               65536
#define DEFAULT_MAX_SESSIONS       4096
#define DEFAULT_QUOTA_MAX_SESSIONS 1024
#define MAX_BLOCKS                 16777216
#define DEFAULT_MAX_BLOCKS         100000

struct partition_note {
        bool limit_known;
        const struct yamltree_node *growth; /* where it was said, NULL: not */
        uint64_t sum_of_reserves;
        const struct yamltree_node *reserve_too_much; /* the first that the limit has no room for */
        uint64_t sum_of_limits;
};

struct tenant_note {
        const struct yamltree_node *node;
        bool has_match;
};

struct reader {
        FILE *errors;
        bool has_failed;
        bool is_out_of_memory;
        bool lacks_partitions; /* some could not be read: names may be theirs */
        bool lacks_tenants;
        struct config *c;
        struct partition_note *partitions;
        struct tenant_note *tenants;
        const struct yamltree_node *socket_path;
        const struct yamltree_node *admin_socket_path;
};

/* ---- saying what is wrong ------------------------------------------------- */

/* Text from a file, made fit for a message: at most 60 bytes, control
 * characters replaced. */
struct shown {
        char text[64];
};

static const char *show_bytes(struct shown *s, const char *text, size_t n_bytes)
{
        size_t n = n_bytes <= 60 ? n_bytes : 57;

        /* not in the middle of a character */
        while (n < n_bytes && n > 0 && ((unsigned char)text[n] & 0xc0) == 0x80)
                n--;
        for (size_t i = 0; i < n; i++) {
                unsigned char c = (unsigned char)text[i];
                bool is_c1 = i > 0 && (unsigned char)text[i - 1] == 0xc2 && c >= 0x80 && c < 0xa0;

                s->text[i] = c < 0x20 || c == 0x7f ? '?' : text[i];
                if (is_c1)
                        s->text[i - 1] = s->text[i] = '?';
        }
        memcpy(s->text + n, n < n_bytes ? "..." : "", n < n_bytes ? 4 : 1);
        return s->text;
}

#define SHOW(node) show_bytes(&(struct shown){ { 0 } }, (node)->text, (node)->n_text)

/* Bytes as a config would have them: exact, in the largest unit that divides. */
static const char *show_size(struct shown *s, uint64_t n_bytes)
{
        static const char *const units[] = { "B", "KiB", "MiB", "GiB", "TiB" };
        size_t unit = 0;

        while (n_bytes != 0 && n_bytes % 1024 == 0 && unit + 1 < sizeof(units) / sizeof(units[0])) {
                n_bytes /= 1024;
                unit++;
        }
        snprintf(s->text, sizeof(s->text), "%llu%s", (unsigned long long)n_bytes, n_bytes ? units[unit] : "");
        return s->text;
}

#define SIZE(n_bytes) show_size(&(struct shown){ { 0 } }, n_bytes)

static void put_place(struct reader *r, const char *file, size_t line, size_t column)
{
        for (; *file; file++)
                fputc((unsigned char)*file < 0x20 || *file == 0x7f ? '?' : *file, r->errors);
        fprintf(r->errors, ":%zu:%zu: ", line, column);
}

static void __attribute__((format(printf, 3, 4)))
fail(struct reader *r, const struct yamltree_node *at, const char *format, ...)
{
        va_list args;

        r->has_failed = true;
        put_place(r, at->file, at->line, at->column);
        va_start(args, format);
        vfprintf(r->errors, format, args);
        va_end(args);
        fputc('\n', r->errors);
}

static void __attribute__((format(printf, 3, 4)))
warn(struct reader *r, const struct yamltree_node *at, const char *format, ...)
{
        va_list args;

        put_place(r, at->file, at->line, at->column);
        fputs("warning: ", r->errors);
        va_start(args, format);
        vfprintf(r->errors, format, args);
        va_end(args);
        fputc('\n', r->errors);
}

static void fail_tree(void *userdata, const char *file, size_t line, size_t column, const char *sentence)
{
        struct reader *r = userdata;

        r->has_failed = true;
        put_place(r, file, line, column);
        fprintf(r->errors, "%s\n", sentence);
}

/* ---- shapes --------------------------------------------------------------- */

static const char *shape(const struct yamltree_node *n)
{
        switch (n->type) {
        case YAMLTREE_SEQUENCE:
                return "a list";
        case YAMLTREE_MAPPING:
                return "a mapping";
        default:
                return n->n_text == 0 && !n->is_quoted ? "nothing" : "a single value";
        }
}

static bool want(struct reader *r, const struct yamltree_node *n, enum yamltree_type type, const char *what)
{
        static const char *const wanted[] = {
                [YAMLTREE_SCALAR] = "a single value",
                [YAMLTREE_SEQUENCE] = "a list",
                [YAMLTREE_MAPPING] = "a mapping of keys to values",
        };

        if (n->type == YAMLTREE_BAD) {
                r->has_failed = true;
                return false;
        }
        if (n->type == type && (type != YAMLTREE_SCALAR || n->n_text > 0))
                return true;
        if (n->type == type)
                fail(r, n, "%s is empty", what);
        else
                fail(r, n, "%s must be %s, this is %s", what, wanted[type], shape(n));
        return false;
}

static bool is_text(const struct yamltree_node *n, const char *text)
{
        return n->n_text == strlen(text) && memcmp(n->text, text, n->n_text) == 0;
}

static void fail_key(struct reader *r, const struct yamltree_node *key, const char *what,
                     const char *const known[])
{
        char list[256];
        size_t n = 0;

        for (size_t i = 0; known[i] && n < sizeof(list); i++)
                n += (size_t)snprintf(list + n, sizeof(list) - n, "%s%s", i ? ", " : "", known[i]);
        fail(r, key, "unknown key '%s' in %s; known here: %s", SHOW(key), what, list);
}

/* Finds the values of the known keys (a list that ends in NULL); NULL where a
 * key is not there. false: not a mapping at all. */
static bool read_mapping(struct reader *r, const struct yamltree_node *n, const char *what,
                         const char *const known[], const struct yamltree_node *values[MAX_KEYS])
{
        const struct yamltree_node *keys[MAX_KEYS] = { NULL };

        memset(values, 0, MAX_KEYS * sizeof(values[0]));
        if (!want(r, n, YAMLTREE_MAPPING, what))
                return false;
        for (const struct yamltree_node *key = n->first_child; key; key = key->next->next) {
                size_t i = 0;

                if (key->type != YAMLTREE_SCALAR) {
                        want(r, key, YAMLTREE_SCALAR, "a key");
                        continue;
                }
                while (known[i] && !is_text(key, known[i]))
                        i++;
                if (!known[i]) {
                        fail_key(r, key, what, known);
                } else if (keys[i]) {
                        fail(r, key, "key '%s' is given twice, first on line %zu", known[i], keys[i]->line);
                } else {
                        keys[i] = key;
                        values[i] = key->next;
                }
        }
        return true;
}

/* ---- single values -------------------------------------------------------- */

/* The digits that text starts with. -ERANGE: more than 64 bits hold. */
static int parse_digits(const struct yamltree_node *n, uint64_t *ret, size_t *ret_n_digits)
{
        uint64_t value = 0;
        size_t i;

        for (i = 0; i < n->n_text && n->text[i] >= '0' && n->text[i] <= '9'; i++)
                if (__builtin_mul_overflow(value, 10, &value) ||
                    __builtin_add_overflow(value, (uint64_t)(n->text[i] - '0'), &value))
                        return -ERANGE;
        *ret = value;
        *ret_n_digits = i;
        return 0;
}

static bool read_number(struct reader *r, const struct yamltree_node *n, const char *what, uint64_t min,
                        uint64_t max, uint64_t *ret)
{
        size_t n_digits = 0;
        uint64_t value = 0;
        int result;

        if (!want(r, n, YAMLTREE_SCALAR, what))
                return false;
        result = parse_digits(n, &value, &n_digits);
        if (result == 0 && n_digits != n->n_text) {
                fail(r, n, "%s '%s' is not a whole number; write %llu to %llu", what, SHOW(n),
                     (unsigned long long)min, (unsigned long long)max);
                return false;
        }
        if (result < 0 || value < min || value > max) {
                fail(r, n, "%s %s is out of range; write %llu to %llu", what, SHOW(n),
                     (unsigned long long)min, (unsigned long long)max);
                return false;
        }
        *ret = value;
        return true;
}

static void read_count(struct reader *r, const struct yamltree_node *n, const char *what, uint32_t max,
                       uint32_t *ret)
{
        uint64_t value;

        if (n && read_number(r, n, what, 1, max, &value))
                *ret = (uint32_t)value;
}

static void read_duration(struct reader *r, const struct yamltree_node *n, const char *what, uint64_t *ret_ms)
{
        static const struct {
                const char *unit;
                uint64_t ms;
        } units[] = { { "ms", 1 }, { "s", 1000 }, { "m", 60000 } };
        size_t n_digits = 0;
        uint64_t value = 0;
        uint64_t ms = 0;
        bool too_much;

        if (!n || !want(r, n, YAMLTREE_SCALAR, what))
                return;
        too_much = parse_digits(n, &value, &n_digits) < 0;
        if (!too_much) {
                size_t i = 0;

                while (i < 3 && (n_digits == 0 || strlen(units[i].unit) != n->n_text - n_digits ||
                                 memcmp(n->text + n_digits, units[i].unit, n->n_text - n_digits) != 0))
                        i++;
                if (i == 3) {
                        fail(r, n,
                             "%s '%s' is not a duration; write a whole number and ms, s or m, as in 200ms",
                             what, SHOW(n));
                        return;
                }
                too_much = __builtin_mul_overflow(value, units[i].ms, &ms) || ms > MAX_TIMEOUT_MS;
        }
        if (too_much || ms == 0)
                fail(r, n, "%s %s is out of range; write 1ms to 1440m", what, SHOW(n));
        else
                *ret_ms = ms;
}

/* What a size may be where it stands. */
struct size_rule {
        const char *what;
        bool zero_allowed;
        const char *whole_name; /* what a percentage is of; NULL: none allowed */
        uint64_t whole;
        bool whole_known;
};

static const struct {
        const char *unit;
        const char *sloppy; /* what people write */
        unsigned int shift;
} SIZE_UNITS[] = {
        { "KiB", "K", 10 }, { "MiB", "M", 20 }, { "GiB", "G", 30 }, { "TiB", "T", 40 }, { "B", "B", 0 },
};

static void fail_size(struct reader *r, const struct yamltree_node *n, const struct size_rule *rule,
                      size_t n_digits)
{
        const char *percent = rule->whole_name ? ", or a whole percentage, as in 50%" : "";
        size_t n_rest = n->n_text - n_digits;

        for (size_t i = 0; i < 4 && n_digits > 0 && n_digits < 20; i++) {
                char unit = n->text[n_digits];
                char b = n_rest == 2 ? n->text[n_digits + 1] : 'B';

                if (n_rest < 1 || n_rest > 2 || (unit & ~0x20) != SIZE_UNITS[i].sloppy[0] ||
                    (b & ~0x20) != 'B')
                        continue;
                fail(r, n, "%s '%s' is not a size; write %.*s%s", rule->what, SHOW(n), (int)n_digits, n->text,
                     SIZE_UNITS[i].unit);
                return;
        }
        fail(r, n, "%s '%s' is not a size; write a whole number and B, KiB, MiB, GiB or TiB, as in 512MiB%s",
             rule->what, SHOW(n), percent);
}

static bool read_percentage(struct reader *r, const struct yamltree_node *n, const struct size_rule *rule,
                            uint64_t percent, uint64_t *ret)
{
        uint64_t bytes;

        if (!rule->whole_name) {
                fail(r, n, "%s '%s': a percentage has no meaning here; write a size, as in 512MiB",
                     rule->what, SHOW(n));
                return false;
        }
        if (percent > 100) {
                fail(r, n, "%s %s is more than 100%% of %s", rule->what, SHOW(n), rule->whole_name);
                return false;
        }
        if (percent == 0 && !rule->zero_allowed) {
                fail(r, n, "%s must be more than 0", rule->what);
                return false;
        }
        if (!rule->whole_known)
                return false;
        bytes = rule->whole / 100 * percent + rule->whole % 100 * percent / 100;
        bytes -= bytes % CONFIG_GRANULARITY;
        if (bytes == 0 && percent != 0) {
                fail(r, n, "%s %s of %s (%s) is less than 2MiB, the smallest piece", rule->what, SHOW(n),
                     rule->whole_name, SIZE(rule->whole));
                return false;
        }
        *ret = bytes;
        return true;
}

static bool check_size(struct reader *r, const struct yamltree_node *n, const struct size_rule *rule,
                       uint64_t bytes)
{
        uint64_t below = bytes - bytes % CONFIG_GRANULARITY;

        if (bytes == 0 && !rule->zero_allowed) {
                fail(r, n, "%s must be more than 0", rule->what);
                return false;
        }
        if (bytes == below)
                return true;
        if (below == 0)
                fail(r, n, "%s %s is not a multiple of 2MiB; write 2MiB", rule->what, SHOW(n));
        else
                fail(r, n, "%s %s is not a multiple of 2MiB; write %s or %s", rule->what, SHOW(n),
                     SIZE(below), SIZE(below + CONFIG_GRANULARITY));
        return false;
}

/* false: reported, or a percentage of what is not known. */
static bool read_size(struct reader *r, const struct yamltree_node *n, const struct size_rule *rule,
                      uint64_t *ret)
{
        size_t n_digits = 0;
        uint64_t value = 0;
        size_t i = 0;

        if (!want(r, n, YAMLTREE_SCALAR, rule->what))
                return false;
        if (parse_digits(n, &value, &n_digits) < 0)
                goto too_large;
        if (n_digits > 0 && n->n_text == n_digits + 1 && n->text[n_digits] == '%')
                return read_percentage(r, n, rule, value, ret);
        if (n_digits > 0 && n_digits == n->n_text && value == 0 && rule->zero_allowed) {
                *ret = 0;
                return true;
        }
        while (i < 5 && (n_digits == 0 || strlen(SIZE_UNITS[i].unit) != n->n_text - n_digits ||
                         memcmp(n->text + n_digits, SIZE_UNITS[i].unit, n->n_text - n_digits) != 0))
                i++;
        if (i == 5) {
                fail_size(r, n, rule, n_digits);
                return false;
        }
        if (value > (uint64_t)INT64_MAX >> SIZE_UNITS[i].shift)
                goto too_large;
        if (!check_size(r, n, rule, value << SIZE_UNITS[i].shift))
                return false;
        *ret = value << SIZE_UNITS[i].shift;
        return true;
too_large:
        fail(r, n, "%s %s is too large", rule->what, SHOW(n));
        return false;
}

static char *copy_text(struct reader *r, const char *text)
{
        char *copy = strdup(text);

        if (!copy)
                r->is_out_of_memory = true;
        return copy;
}

/* A name, or NULL: reported. */
static const char *read_name(struct reader *r, const struct yamltree_node *n, const char *what)
{
        if (!want(r, n, YAMLTREE_SCALAR, what))
                return NULL;
        if (n->n_text > CONFIG_NAME_MAX) {
                fail(r, n, "%s '%s' is longer than %d bytes", what, SHOW(n), CONFIG_NAME_MAX);
                return NULL;
        }
        for (size_t i = 0; i < n->n_text; i++) {
                char c = n->text[i];

                if ((c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' ||
                    c == '-' || c == '.')
                        continue;
                fail(r, n, "%s '%s' is not a name; use letters, digits, '_', '-' and '.'", what, SHOW(n));
                return NULL;
        }
        return n->text;
}

/* One more element at the end of an array; NULL: out of memory. */
static void *grow(struct reader *r, void **array, size_t n, size_t element_bytes)
{
        unsigned char *bigger = reallocarray(*array, n + 1, element_bytes);

        if (!bigger) {
                r->is_out_of_memory = true;
                return NULL;
        }
        *array = bigger;
        memset(bigger + n * element_bytes, 0, element_bytes);
        return bigger + n * element_bytes;
}

/* ---- sockets and times ---------------------------------------------------- */

static void read_path(struct reader *r, const struct yamltree_node *n, const char *what, char **ret)
{
        size_t max = sizeof(((struct sockaddr_un *)NULL)->sun_path) - 1;
        char *copy;

        if (!want(r, n, YAMLTREE_SCALAR, what))
                return;
        for (size_t i = 0; i < n->n_text; i++) {
                if ((unsigned char)n->text[i] < 0x20 || n->text[i] == 0x7f) {
                        fail(r, n, "%s '%s' holds a control character", what, SHOW(n));
                        return;
                }
        }
        if (n->text[0] != '/' || n->text[n->n_text - 1] == '/') {
                fail(r, n, "%s '%s' is not the absolute path of a socket; write it as in %s", what, SHOW(n),
                     DEFAULT_SOCKET);
        } else if (n->n_text > max) {
                fail(r, n, "%s '%s' has %zu bytes; a socket's path has at most %zu", what, SHOW(n), n->n_text,
                     max);
        } else {
                copy = copy_text(r, n->text);
                if (!copy)
                        return;
                free(*ret);
                *ret = copy;
        }
}

static void read_mode(struct reader *r, const struct yamltree_node *n, const char *what, mode_t *ret)
{
        mode_t mode = 0;
        bool is_mode;

        if (!want(r, n, YAMLTREE_SCALAR, what))
                return;
        is_mode = n->n_text == 4 && n->text[0] == '0';
        for (size_t i = 1; is_mode && i < 4; i++) {
                is_mode = n->text[i] >= '0' && n->text[i] <= '7';
                mode = mode << 3 | (mode_t)(n->text[i] - '0');
        }
        if (is_mode)
                *ret = mode;
        else
                fail(r, n, "%s '%s' is not a mode; write four octal digits, as in \"0660\"", what, SHOW(n));
}

static bool all_digits(const struct yamltree_node *n)
{
        return strspn(n->text, "0123456789") == n->n_text;
}

/* A name that is not known yet is a warning only: a config may be written
 * before its users are. */
static bool find_user(struct reader *r, const struct yamltree_node *n, uid_t *ret)
{
        struct passwd *pw;

        if (!want(r, n, YAMLTREE_SCALAR, "a user"))
                return false;
        errno = 0;
        pw = strlen(n->text) == n->n_text ? getpwnam(n->text) : NULL;
        if (pw) {
                *ret = pw->pw_uid;
                return true;
        }
        if (all_digits(n))
                warn(r, n,
                     "user '%s' is not known on this machine (getpwnam) and matches nobody; for a number write uid: %s",
                     SHOW(n), SHOW(n));
        else
                warn(r, n,
                     "user '%s' is not known on this machine (getpwnam) and matches nobody until a restart",
                     SHOW(n));
        return false;
}

static bool find_group(struct reader *r, const struct yamltree_node *n, const char *consequence, gid_t *ret)
{
        struct group *gr;

        if (!want(r, n, YAMLTREE_SCALAR, "a group"))
                return false;
        errno = 0;
        gr = strlen(n->text) == n->n_text ? getgrnam(n->text) : NULL;
        if (gr) {
                *ret = gr->gr_gid;
                return true;
        }
        warn(r, n, "group '%s' is not known on this machine (getgrnam) and %s", SHOW(n), consequence);
        return false;
}

static void read_socket(struct reader *r, const struct yamltree_node *n, const char *what,
                        struct config_socket *ret, const struct yamltree_node **ret_path)
{
        static const char *const known[] = { "path", "mode", "group", NULL };
        const struct yamltree_node *v[MAX_KEYS];
        uint64_t gid;

        if (!n || !read_mapping(r, n, what, known, v))
                return;
        *ret_path = v[0];
        if (v[0])
                read_path(r, v[0], "path", &ret->path);
        if (v[1])
                read_mode(r, v[1], "mode", &ret->mode);
        if (v[2] && v[2]->type == YAMLTREE_SCALAR && v[2]->n_text > 0 && all_digits(v[2])) {
                if (read_number(r, v[2], "group", 0, (gid_t)-1 - 1, &gid))
                        ret->group = (gid_t)gid;
        } else if (v[2]) {
                find_group(r, v[2], "does not get the socket; its group stays", &ret->group);
        }
}

static void check_paths_differ(struct reader *r)
{
        const struct yamltree_node *at = r->admin_socket_path ? r->admin_socket_path : r->socket_path;

        if (at && r->c->socket.path && r->c->admin_socket.path &&
            strcmp(r->c->socket.path, r->c->admin_socket.path) == 0)
                fail(r, at, "socket and admin_socket have the same path '%s'; they must differ", SHOW(at));
}

static void read_timeouts(struct reader *r, const struct yamltree_node *n)
{
        static const char *const known[] = { "reclaim", "release", "quarantine", NULL };
        const struct yamltree_node *v[MAX_KEYS];

        if (!n || !read_mapping(r, n, "timeouts", known, v))
                return;
        read_duration(r, v[0], "reclaim", &r->c->reclaim_timeout_ms);
        read_duration(r, v[1], "release", &r->c->release_timeout_ms);
        read_duration(r, v[2], "quarantine", &r->c->quarantine_timeout_ms);
}

/* ---- devices and partitions ----------------------------------------------- */

static struct config_partition *find_partition(const struct config *c, const char *name, size_t *ret_index)
{
        for (size_t i = 0; i < c->n_partitions; i++) {
                if (strcmp(c->partitions[i].name, name) == 0) {
                        *ret_index = i;
                        return &c->partitions[i];
                }
        }
        return NULL;
}

static struct config_partition *add_partition(struct reader *r, const char *name, size_t device)
{
        size_t n = r->c->n_partitions;
        struct config_partition *p;

        if (!grow(r, (void **)&r->partitions, n, sizeof(r->partitions[0])))
                return NULL;
        p = grow(r, (void **)&r->c->partitions, n, sizeof(*p));
        if (!p)
                return NULL;
        p->name = copy_text(r, name);
        p->device = device;
        if (!p->name)
                return NULL;
        r->c->n_partitions++;
        return p;
}

/* 0 or 1, the index of the word; -1: reported. */
static int read_word(struct reader *r, const struct yamltree_node *n, const char *what, const char *first,
                     const char *second)
{
        if (!want(r, n, YAMLTREE_SCALAR, what))
                return -1;
        if (is_text(n, first))
                return 0;
        if (is_text(n, second))
                return 1;
        fail(r, n, "%s '%s' is not known; write %s or %s", what, SHOW(n), first, second);
        return -1;
}

/* What the partitions of a device share. */
struct device_state {
        size_t index;
        bool is_host;
        uint64_t room; /* size - headroom */
        bool room_known;
        uint64_t sum_of_limits;
        const struct yamltree_node *limit_too_much; /* the first there is no room for */
};

static void read_growth_and_share(struct reader *r, const struct device_state *d, struct config_partition *p,
                                  const struct yamltree_node *growth, const struct yamltree_node *share)
{
        int word;

        if (growth) {
                word = read_word(r, growth, "growth", "on-demand", "preallocate");
                if (word == 1)
                        p->growth = CONFIG_GROWTH_PREALLOCATE;
        }
        if (!share)
                return;
        word = read_word(r, share, "share", "fd", "cuda-ipc");
        if (word == 1 && d->is_host)
                fail(r, share, "share cuda-ipc is not for the host device; write fd");
        else if (word == 1)
                p->share = CONFIG_SHARE_CUDA_IPC;
}

static void read_partition(struct reader *r, const struct yamltree_node *n, struct device_state *d)
{
        static const char *const known[] = { "name", "limit", "growth", "share", NULL };
        struct size_rule rule = { .what = "limit",
                                  .whole_name = "the device's size minus its headroom",
                                  .whole = d->room,
                                  .whole_known = d->room_known };
        struct config_partition unnamed = { 0 };
        struct config_partition *p = &unnamed;
        const struct yamltree_node *v[MAX_KEYS];
        struct partition_note note = { 0 };
        const char *name = NULL;
        size_t index;

        if (!read_mapping(r, n, "a partition", known, v)) {
                r->lacks_partitions = true;
                return;
        }
        if (v[0])
                name = read_name(r, v[0], "name");
        else
                fail(r, n, "a partition lacks its name");
        if (!name)
                r->lacks_partitions = true;
        else if (find_partition(r->c, name, &index))
                fail(r, v[0], "partition '%s' is there already; names are unique over all devices", name);
        else if (r->c->n_partitions == MAX_PARTITIONS)
                fail(r, v[0], "more than %d partitions", MAX_PARTITIONS);
        else
                p = add_partition(r, name, d->index);
        if (!p)
                return;
        if (!v[1])
                fail(r, n, "a partition lacks its limit; write a size or a percentage of the device");
        else
                note.limit_known = read_size(r, v[1], &rule, &p->limit_bytes);
        read_growth_and_share(r, d, p, v[2], v[3]);
        note.growth = v[2] ? v[2] : n;
        if (note.limit_known && __builtin_add_overflow(d->sum_of_limits, p->limit_bytes, &d->sum_of_limits))
                d->sum_of_limits = UINT64_MAX;
        if (note.limit_known && d->sum_of_limits > d->room && !d->limit_too_much)
                d->limit_too_much = v[1];
        if (p != &unnamed)
                r->partitions[p - r->c->partitions] = note;
}

static void read_partitions(struct reader *r, const struct yamltree_node *n, struct device_state *d)
{
        if (!want(r, n, YAMLTREE_SEQUENCE, "partitions")) {
                r->lacks_partitions = true;
                return;
        }
        if (!n->first_child) {
                fail(r, n, "partitions is empty; a device needs at least one");
                r->lacks_partitions = true;
        }
        for (const struct yamltree_node *p = n->first_child; p; p = p->next)
                read_partition(r, p, d);
        if (d->room_known && d->limit_too_much)
                fail(r, d->limit_too_much,
                     "the partitions' limits sum to %s; the device has %s (its size minus its headroom)",
                     SIZE(d->sum_of_limits), SIZE(d->room));
}

static void read_device_id(struct reader *r, const struct yamltree_node *n, struct device_state *d)
{
        struct config_device *device = &r->c->devices[d->index];

        if (!want(r, n, YAMLTREE_SCALAR, "id"))
                return;
        if (strncmp(n->text, "cuda:", 5) == 0 || strncmp(n->text, "GPU-", 4) == 0 ||
            strncmp(n->text, "MIG-", 4) == 0) {
                fail(r, n, "device '%s': this version serves only the host device; write id: host", SHOW(n));
                return;
        }
        d->is_host = is_text(n, "host");
        if (!d->is_host) {
                fail(r, n, "device '%s' is not known; write id: host", SHOW(n));
                return;
        }
        for (size_t i = 0; i < d->index; i++)
                if (r->c->devices[i].id && strcmp(r->c->devices[i].id, "host") == 0) {
                        fail(r, n, "device 'host' is there already; put all its partitions in one place");
                        return;
                }
        device->id = copy_text(r, "host");
}

/* Swapping or the OOM killer would be the price, some time later. */
static void check_memory(struct reader *r, const struct yamltree_node *n, uint64_t size_bytes)
{
        long n_pages = sysconf(_SC_PHYS_PAGES);
        long page_bytes = sysconf(_SC_PAGESIZE);
        uint64_t memory_bytes;

        if (n_pages <= 0 || page_bytes <= 0)
                return;
        memory_bytes = (uint64_t)n_pages * (uint64_t)page_bytes;
        if (size_bytes > memory_bytes)
                warn(r, n, "size %s is more than this machine's memory, %lluMiB", SHOW(n),
                     (unsigned long long)(memory_bytes >> 20));
}

static void read_device_size(struct reader *r, const struct yamltree_node *n,
                             const struct yamltree_node *size_node, const struct yamltree_node *headroom_node,
                             struct device_state *d)
{
        struct config_device *device = &r->c->devices[d->index];
        bool size_known = false;
        bool headroom_known = true;

        if (size_node) {
                size_known =
                        read_size(r, size_node, &(struct size_rule){ .what = "size" }, &device->size_bytes);
                if (size_known)
                        check_memory(r, size_node, device->size_bytes);
        } else if (d->is_host) {
                fail(r, n, "device 'host' lacks its size; write it as in size: 4GiB");
        }
        if (headroom_node)
                headroom_known = read_size(r, headroom_node,
                                           &(struct size_rule){ .what = "headroom", .zero_allowed = true },
                                           &device->headroom_bytes);
        if (!size_known || !headroom_known)
                return;
        if (device->headroom_bytes >= device->size_bytes) {
                fail(r, headroom_node, "headroom %s leaves nothing of the device's size, %s",
                     SIZE(device->headroom_bytes), SIZE(device->size_bytes));
                return;
        }
        d->room = device->size_bytes - device->headroom_bytes;
        d->room_known = true;
}

static void read_device(struct reader *r, const struct yamltree_node *n)
{
        static const char *const known[] = { "id", "size", "headroom", "partitions", NULL };
        const struct yamltree_node *v[MAX_KEYS];
        struct device_state d = { .index = r->c->n_devices };

        if (!read_mapping(r, n, "a device", known, v)) {
                r->lacks_partitions = true;
                return;
        }
        if (!grow(r, (void **)&r->c->devices, d.index, sizeof(r->c->devices[0])))
                return;
        r->c->n_devices++;
        if (v[0])
                read_device_id(r, v[0], &d);
        else
                fail(r, n, "a device lacks its id; write id: host");
        read_device_size(r, n, v[1], v[2], &d);
        if (v[3]) {
                read_partitions(r, v[3], &d);
        } else {
                fail(r, n, "a device lacks its partitions; it needs at least one");
                r->lacks_partitions = true;
        }
}

static void read_devices(struct reader *r, const struct yamltree_node *root, const struct yamltree_node *n)
{
        if (!n) {
                fail(r, root, "the key 'devices' is missing");
                r->lacks_partitions = true;
                return;
        }
        if (!want(r, n, YAMLTREE_SEQUENCE, "devices")) {
                r->lacks_partitions = true;
                return;
        }
        if (!n->first_child) {
                fail(r, n, "devices is empty; write at least id: host");
                r->lacks_partitions = true;
        }
        for (const struct yamltree_node *d = n->first_child; d; d = d->next)
                read_device(r, d);
}

/* ---- tenants -------------------------------------------------------------- */

/* uid_t and gid_t are alike, so one function keeps both sets. */
_Static_assert(sizeof(uid_t) == sizeof(uint32_t) && sizeof(gid_t) == sizeof(uint32_t), "ids of 32 bits");

static void add_match(struct reader *r, const struct yamltree_node *n, uint32_t id, uint32_t **ids,
                      size_t *n_ids)
{
        uint32_t *slot;

        for (size_t i = 0; i < *n_ids; i++)
                if ((*ids)[i] == id)
                        return;
        if (*n_ids == MAX_MATCHES) {
                fail(r, n, "more than %d users or groups; use a group", MAX_MATCHES);
                return;
        }
        slot = grow(r, (void **)ids, *n_ids, sizeof(*slot));
        if (!slot)
                return;
        *slot = id;
        (*n_ids)++;
}

enum match_key { MATCH_USER, MATCH_GROUP, MATCH_UID, MATCH_GID };

static void read_match_one(struct reader *r, const struct yamltree_node *n, enum match_key key,
                           struct config_tenant *t)
{
        bool is_user = key == MATCH_USER || key == MATCH_UID;
        uint64_t number;
        uint32_t id;
        bool found;

        if (key == MATCH_USER) {
                found = find_user(r, n, &id);
        } else if (key == MATCH_GROUP) {
                found = find_group(r, n, "matches nobody until a restart", &id);
        } else {
                /* the last number is no id: it means "unchanged" to chown() */
                found = read_number(r, n, key == MATCH_UID ? "uid" : "gid", 0, UINT32_MAX - 1, &number);
                id = found ? (uint32_t)number : 0;
        }
        if (found)
                add_match(r, n, id, is_user ? &t->uids : &t->gids, is_user ? &t->n_uids : &t->n_gids);
}

static void read_match(struct reader *r, const struct yamltree_node *n, struct config_tenant *t)
{
        static const char *const known[] = { "user", "group", "uid", "gid", NULL };
        const struct yamltree_node *v[MAX_KEYS];
        bool has_any = false;

        if (!read_mapping(r, n, "match", known, v))
                return;
        for (size_t i = 0; known[i]; i++) {
                if (!v[i])
                        continue;
                has_any = true;
                if (v[i]->type == YAMLTREE_MAPPING)
                        fail(r, v[i], "%s must be a single value or a list, this is a mapping", known[i]);
                else if (v[i]->type != YAMLTREE_SEQUENCE)
                        read_match_one(r, v[i], (enum match_key)i, t);
                for (const struct yamltree_node *c = v[i]->first_child; c && v[i]->type == YAMLTREE_SEQUENCE;
                     c = c->next)
                        read_match_one(r, c, (enum match_key)i, t);
        }
        if (!has_any)
                fail(r, n, "match is empty; write user, group, uid or gid");
}

static void fail_unknown_partition(struct reader *r, const struct yamltree_node *n)
{
        char list[512] = "";
        size_t used = 0;

        if (r->lacks_partitions)
                return; /* it may be one of those that could not be read */
        for (size_t i = 0; i < r->c->n_partitions && used < sizeof(list); i++)
                used += (size_t)snprintf(list + used, sizeof(list) - used, "%s%s", i ? ", " : "",
                                         r->c->partitions[i].name);
        if (used >= sizeof(list))
                memcpy(list + sizeof(list) - 4, "...", 4);
        fail(r, n, "partition '%s' does not exist; there are: %s", SHOW(n), list);
}

static void check_quota(struct reader *r, const struct yamltree_node *n,
                        const struct yamltree_node *limit_node, const struct yamltree_node *reserve_node,
                        bool reserve_known, const struct config_quota *q)
{
        const struct config_partition *p = &r->c->partitions[q->partition];
        struct partition_note *note = &r->partitions[q->partition];

        if (q->limit_bytes > p->limit_bytes)
                fail(r, limit_node, "limit %s is more than the limit of partition '%s', %s",
                     SIZE(q->limit_bytes), p->name, SIZE(p->limit_bytes));
        else if (q->limit_bytes > MAX_QUOTA_LIMIT)
                fail(r, limit_node ? limit_node : n,
                     "limit %s is more than 512GiB, the most that one tenant can have in one partition",
                     SIZE(q->limit_bytes));
        else if (__builtin_add_overflow(note->sum_of_limits, q->limit_bytes, &note->sum_of_limits))
                note->sum_of_limits = UINT64_MAX;
        if (!reserve_known)
                return;
        if (q->reserve_bytes > q->limit_bytes) {
                fail(r, reserve_node, "reserve %s is more than this quota's limit, %s",
                     SIZE(q->reserve_bytes), SIZE(q->limit_bytes));
                return;
        }
        if (__builtin_add_overflow(note->sum_of_reserves, q->reserve_bytes, &note->sum_of_reserves))
                note->sum_of_reserves = UINT64_MAX;
        if (note->sum_of_reserves > p->limit_bytes && !note->reserve_too_much)
                note->reserve_too_much = reserve_node;
}

static void read_quota_sizes(struct reader *r, const struct yamltree_node *n,
                             const struct yamltree_node *limit_node, const struct yamltree_node *reserve_node,
                             bool partition_known, struct config_quota *q)
{
        struct size_rule limit = { .what = "limit", .whole_name = "the partition's limit" };
        struct size_rule reserve = { .what = "reserve",
                                     .zero_allowed = true,
                                     .whole_name = "the partition's limit" };
        bool reserve_known = true;
        bool limit_known;

        if (partition_known && r->partitions[q->partition].limit_known) {
                limit.whole = reserve.whole = r->c->partitions[q->partition].limit_bytes;
                limit.whole_known = reserve.whole_known = true;
        }
        q->limit_bytes = limit.whole;
        limit_known = limit.whole_known;
        if (limit_node)
                limit_known = read_size(r, limit_node, &limit, &q->limit_bytes) && limit.whole_known;
        if (reserve_node)
                reserve_known = read_size(r, reserve_node, &reserve, &q->reserve_bytes);
        if (limit_known)
                check_quota(r, n, limit_node, reserve_node, reserve_known, q);
}

/* false: the quota cannot be kept. */
static bool find_quota_partition(struct reader *r, const struct yamltree_node *n,
                                 const struct yamltree_node *name_node, const struct config_tenant *t,
                                 size_t *ret_index)
{
        const char *name;
        size_t index;

        if (!name_node) {
                fail(r, n, "a quota lacks its partition");
                return false;
        }
        name = read_name(r, name_node, "partition");
        if (!name)
                return false;
        if (!find_partition(r->c, name, &index)) {
                fail_unknown_partition(r, name_node);
                return false;
        }
        for (size_t i = 0; i < t->n_quotas; i++) {
                if (t->quotas[i].partition == index) {
                        fail(r, name_node, "this tenant has a quota in partition '%s' already", name);
                        return false;
                }
        }
        *ret_index = index;
        return true;
}

static void read_quota(struct reader *r, const struct yamltree_node *n, struct config_tenant *t)
{
        static const char *const known[] = { "partition",    "limit",      "reserve",
                                             "max_sessions", "max_blocks", NULL };
        struct config_quota q = { .max_sessions = DEFAULT_QUOTA_MAX_SESSIONS,
                                  .max_blocks = DEFAULT_MAX_BLOCKS };
        const struct yamltree_node *v[MAX_KEYS];
        struct config_quota *slot;
        bool is_known;

        if (!read_mapping(r, n, "a quota", known, v))
                return;
        is_known = find_quota_partition(r, n, v[0], t, &q.partition);
        read_quota_sizes(r, n, v[1], v[2], is_known, &q);
        read_count(r, v[3], "max_sessions", MAX_SESSIONS, &q.max_sessions);
        read_count(r, v[4], "max_blocks", MAX_BLOCKS, &q.max_blocks);
        if (!is_known)
                return;
        slot = grow(r, (void **)&t->quotas, t->n_quotas, sizeof(*slot));
        if (!slot)
                return;
        *slot = q;
        t->n_quotas++;
}

static void read_quotas(struct reader *r, const struct yamltree_node *tenant, const struct yamltree_node *n,
                        struct config_tenant *t)
{
        if (!n) {
                fail(r, tenant, "a tenant lacks its quotas; without one it can allocate nothing");
                return;
        }
        if (!want(r, n, YAMLTREE_SEQUENCE, "quotas"))
                return;
        if (!n->first_child)
                fail(r, n, "quotas is empty; without one a tenant can allocate nothing");
        for (const struct yamltree_node *q = n->first_child; q; q = q->next)
                read_quota(r, q, t);
}

static struct config_tenant *add_tenant(struct reader *r, const char *name, const struct yamltree_node *node,
                                        bool has_match)
{
        size_t n = r->c->n_tenants;
        struct tenant_note *note = grow(r, (void **)&r->tenants, n, sizeof(*note));
        struct config_tenant *t = note ? grow(r, (void **)&r->c->tenants, n, sizeof(*t)) : NULL;

        if (!t)
                return NULL;
        note->node = node;
        note->has_match = has_match;
        t->name = copy_text(r, name);
        if (!t->name)
                return NULL;
        r->c->n_tenants++;
        return t;
}

static ssize_t find_tenant(const struct config *c, const char *name)
{
        for (size_t i = 0; i < c->n_tenants; i++)
                if (strcmp(c->tenants[i].name, name) == 0)
                        return (ssize_t)i;
        return -1;
}

static void free_tenant(struct config_tenant *t)
{
        free(t->name);
        free(t->uids);
        free(t->gids);
        free(t->quotas);
}

static void read_tenant(struct reader *r, const struct yamltree_node *n)
{
        static const char *const known[] = { "name", "match", "quotas", NULL };
        const struct yamltree_node *v[MAX_KEYS];
        struct config_tenant unnamed = { 0 };
        struct config_tenant *t = &unnamed;
        const char *name = NULL;

        if (!read_mapping(r, n, "a tenant", known, v)) {
                r->lacks_tenants = true;
                return;
        }
        if (v[0])
                name = read_name(r, v[0], "name");
        else
                fail(r, n, "a tenant lacks its name");
        if (!name)
                r->lacks_tenants = true;
        else if (find_tenant(r->c, name) >= 0)
                fail(r, v[0], "tenant '%s' is there already", name);
        else if (r->c->n_tenants == MAX_TENANTS)
                fail(r, v[0], "more than %d tenants", MAX_TENANTS);
        else
                t = add_tenant(r, name, n, v[1] != NULL);
        if (!t)
                return;
        if (v[1])
                read_match(r, v[1], t);
        read_quotas(r, n, v[2], t);
        if (t == &unnamed)
                free_tenant(t);
}

static void read_tenants(struct reader *r, const struct yamltree_node *n)
{
        if (!want(r, n, YAMLTREE_SEQUENCE, "tenants")) {
                r->lacks_tenants = true;
                return;
        }
        for (const struct yamltree_node *t = n->first_child; t; t = t->next)
                read_tenant(r, t);
}

static void read_default_tenant(struct reader *r, const struct yamltree_node *n)
{
        char list[512] = "";
        size_t used = 0;
        const char *name;

        if (!n)
                return;
        name = read_name(r, n, "default_tenant");
        if (!name)
                return;
        r->c->default_tenant = find_tenant(r->c, name);
        if (r->c->default_tenant >= 0 || r->lacks_tenants)
                return;
        for (size_t i = 0; i < r->c->n_tenants && used < sizeof(list); i++)
                used += (size_t)snprintf(list + used, sizeof(list) - used, "%s%s", i ? ", " : "",
                                         r->c->tenants[i].name);
        if (used >= sizeof(list))
                memcpy(list + sizeof(list) - 4, "...", 4);
        fail(r, n, "default_tenant '%s' does not exist; there are: %s", SHOW(n), list);
}

/* ---- what is summed over all ---------------------------------------------- */

static void check_matches(struct reader *r, bool default_known)
{
        for (size_t i = 0; i < r->c->n_tenants; i++) {
                const struct config_tenant *t = &r->c->tenants[i];
                const struct tenant_note *note = &r->tenants[i];
                bool is_default = (ssize_t)i == r->c->default_tenant;

                if (is_default || !default_known)
                        continue;
                if (!note->has_match)
                        fail(r, note->node,
                             "tenant '%s' lacks match and is not the default_tenant; nobody could be it",
                             t->name);
                else if (t->n_uids == 0 && t->n_gids == 0 && !r->has_failed)
                        warn(r, note->node, "tenant '%s' matches nobody", t->name);
        }
}

static void check_partition_sums(struct reader *r)
{
        for (size_t i = 0; i < r->c->n_partitions; i++) {
                const struct config_partition *p = &r->c->partitions[i];
                const struct partition_note *note = &r->partitions[i];

                if (note->reserve_too_much)
                        fail(r, note->reserve_too_much,
                             "the reserves in partition '%s' sum to %s; its limit is %s", p->name,
                             SIZE(note->sum_of_reserves), SIZE(p->limit_bytes));
                if (p->growth == CONFIG_GROWTH_PREALLOCATE && note->limit_known &&
                    note->sum_of_limits > p->limit_bytes)
                        fail(r, note->growth,
                             "partition '%s': preallocate backs each tenant's limit at the start, but the quotas' limits sum to %s and the partition's limit is %s",
                             p->name, SIZE(note->sum_of_limits), SIZE(p->limit_bytes));
        }
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

static void parse_file(struct reader *r, struct file *f, const char *text, size_t n_bytes)
{
        int result;

        if (n_bytes > MAX_FILE_BYTES) {
                fail_tree(r, f->name, 1, 1, "the file is larger than 1MiB");
                return;
        }
        result = yamltree_parse(f->name, text, n_bytes, fail_tree, r, &f->root);
        if (result == -ENOMEM)
                r->is_out_of_memory = true;
        if (f->root && f->root->type == YAMLTREE_SCALAR && f->root->n_text == 0 && !f->root->is_quoted) {
                fail_tree(r, f->name, 1, 1, "the file is empty");
                f->root = yamltree_free(f->root);
        }
}

static void read_main(struct reader *r, const struct yamltree_node *root,
                      const struct yamltree_node **ret_tenants, const struct yamltree_node **ret_default)
{
        static const char *const known[] = { "socket",  "admin_socket", "timeouts",       "max_sessions",
                                             "devices", "tenants",      "default_tenant", NULL };
        const struct yamltree_node *v[MAX_KEYS];

        if (!read_mapping(r, root, "the config", known, v)) {
                r->lacks_partitions = r->lacks_tenants = true;
                return;
        }
        read_socket(r, v[0], "socket", &r->c->socket, &r->socket_path);
        read_socket(r, v[1], "admin_socket", &r->c->admin_socket, &r->admin_socket_path);
        check_paths_differ(r);
        read_timeouts(r, v[2]);
        read_count(r, v[3], "max_sessions", MAX_SESSIONS, &r->c->max_sessions);
        read_devices(r, root, v[4]);
        if (v[5])
                read_tenants(r, v[5]);
        *ret_tenants = v[5];
        *ret_default = v[6];
}

static void read_more(struct reader *r, const struct yamltree_node *root)
{
        static const char *const known[] = { "tenants", NULL };
        const struct yamltree_node *v[MAX_KEYS];

        if (!read_mapping(r, root, "a file of conf.d (tenants only)", known, v))
                r->lacks_tenants = true;
        else if (!v[0])
                fail(r, root, "the key 'tenants' is missing");
        else
                read_tenants(r, v[0]);
}

static void read_files(struct reader *r, const struct file *files)
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
                fail(r, tenants ? tenants : root,
                     tenants ? "tenants is empty; there must be at least one"
                             : "the key 'tenants' is missing");
        read_default_tenant(r, of_default);
        check_matches(r, root && (!of_default || r->c->default_tenant >= 0));
        check_partition_sums(r);
}

static struct config *config_new(void)
{
        struct config *c = calloc(1, sizeof(*c));

        if (!c)
                return NULL;
        *c = (struct config){
                .socket = { .path = strdup(DEFAULT_SOCKET), .mode = 0666, .group = (gid_t)-1 },
                .admin_socket = { .path = strdup(DEFAULT_ADMIN_SOCKET), .mode = 0600, .group = (gid_t)-1 },
                .reclaim_timeout_ms = 200,
                .release_timeout_ms = 5000,
                .quarantine_timeout_ms = 60000,
                .max_sessions = DEFAULT_MAX_SESSIONS,
                .default_tenant = -1,
        };
        if (!c->socket.path || !c->admin_socket.path)
                return config_free(c);
        return c;
}

struct config *config_free(struct config *c)
{
        if (!c)
                return NULL;
        for (size_t i = 0; i < c->n_tenants; i++)
                free_tenant(&c->tenants[i]);
        for (size_t i = 0; i < c->n_partitions; i++)
                free(c->partitions[i].name);
        for (size_t i = 0; i < c->n_devices; i++)
                free(c->devices[i].id);
        free(c->tenants);
        free(c->partitions);
        free(c->devices);
        free(c->socket.path);
        free(c->admin_socket.path);
        free(c);
        return NULL;
}

/* Reads the trees; takes r->c over. */
static int finish(struct reader *r, const struct file *files, struct config **ret)
{
        read_files(r, files);
        free(r->partitions);
        free(r->tenants);
        if (r->is_out_of_memory || r->has_failed) {
                r->c = config_free(r->c);
                return r->is_out_of_memory ? -ENOMEM : -EINVAL;
        }
        *ret = r->c;
        r->c = NULL;
        return 0;
}

int config_parse(const char *name, const char *text, size_t n_bytes, FILE *errors, struct config **ret)
{
        struct reader r = { .errors = errors, .c = config_new() };
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
                result = S_ISDIR(st.st_mode) ? -EISDIR : -EINVAL;
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

static void fail_file(struct reader *r, const char *path, int error)
{
        char sentence[256];

        if (error == ENOMEM)
                r->is_out_of_memory = true;
        snprintf(sentence, sizeof(sentence), "cannot be read: %s",
                 error == EINVAL ? "not a regular file" : strerror(error));
        fail_tree(r, path, 1, 1, sentence);
}

/* Takes `path` over. */
static int load_file(struct reader *r, char *path, struct file **ret)
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
        else
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

static void load_folder(struct reader *r, const char *main_path, struct file *last)
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

int config_load(const char *path, FILE *errors, struct config **ret)
{
        struct reader r = { .errors = errors, .c = config_new() };
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
