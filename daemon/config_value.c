/* SPDX-License-Identifier: Apache-2.0 */
/* Scalars, typed by the schema: see config_value.h. A value that is wrong is
 * reported with what would be right, and what it was for stays as it was. */
#include "daemon/config_value.h"

#include <errno.h>
#include <grp.h>
#include <pwd.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>

#define MAX_TIMEOUT_MS UINT64_C(86400000) /* a day */

/* ---- numbers and times ---------------------------------------------------- */

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

bool config_read_number(struct config_reader *r, const struct yamltree_node *n, const char *what,
                        uint64_t min, uint64_t max, uint64_t *ret)
{
        size_t n_digits = 0;
        uint64_t value = 0;
        int result;

        if (!config_want(r, n, YAMLTREE_SCALAR, what))
                return false;
        result = parse_digits(n, &value, &n_digits);
        if (result == 0 && n_digits != n->n_text) {
                config_fail(r, n, "%s '%s' is not a whole number; write %llu to %llu", what, SHOW(n),
                            (unsigned long long)min, (unsigned long long)max);
                return false;
        }
        if (result < 0 || value < min || value > max) {
                config_fail(r, n, "%s %s is out of range; write %llu to %llu", what, SHOW(n),
                            (unsigned long long)min, (unsigned long long)max);
                return false;
        }
        *ret = value;
        return true;
}

void config_read_count(struct config_reader *r, const struct yamltree_node *n, const char *what, uint32_t max,
                       uint32_t *ret)
{
        uint64_t value;

        if (n && config_read_number(r, n, what, 1, max, &value))
                *ret = (uint32_t)value;
}

void config_read_duration(struct config_reader *r, const struct yamltree_node *n, const char *what,
                          uint64_t *ret_ms)
{
        static const struct {
                const char *unit;
                uint64_t ms;
        } units[] = { { "ms", 1 }, { "s", 1000 }, { "m", 60000 } };
        size_t n_digits = 0;
        uint64_t value = 0;
        uint64_t ms = 0;
        bool too_much;

        if (!n || !config_want(r, n, YAMLTREE_SCALAR, what))
                return;
        too_much = parse_digits(n, &value, &n_digits) < 0;
        if (!too_much) {
                size_t i = 0;

                while (i < 3 && (n_digits == 0 || strlen(units[i].unit) != n->n_text - n_digits ||
                                 memcmp(n->text + n_digits, units[i].unit, n->n_text - n_digits) != 0))
                        i++;
                if (i == 3) {
                        config_fail(
                                r, n,
                                "%s '%s' is not a duration; write a whole number and ms, s or m, as in 200ms",
                                what, SHOW(n));
                        return;
                }
                too_much = __builtin_mul_overflow(value, units[i].ms, &ms) || ms > MAX_TIMEOUT_MS;
        }
        if (too_much || ms == 0)
                config_fail(r, n, "%s %s is out of range; write 1ms to 1440m", what, SHOW(n));
        else
                *ret_ms = ms;
}

/* ---- sizes ---------------------------------------------------------------- */

static const struct {
        const char *unit;
        const char *sloppy; /* what people write */
        unsigned int shift;
} SIZE_UNITS[] = {
        { "KiB", "K", 10 }, { "MiB", "M", 20 }, { "GiB", "G", 30 }, { "TiB", "T", 40 }, { "B", "B", 0 },
};

static void fail_size(struct config_reader *r, const struct yamltree_node *n, const struct size_rule *rule,
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
                config_fail(r, n, "%s '%s' is not a size; write %.*s%s", rule->what, SHOW(n), (int)n_digits,
                            n->text, SIZE_UNITS[i].unit);
                return;
        }
        config_fail(r, n,
                    "%s '%s' is not a size; write a whole number and B, KiB, MiB, GiB or TiB, as in 512MiB%s",
                    rule->what, SHOW(n), percent);
}

static bool read_percentage(struct config_reader *r, const struct yamltree_node *n,
                            const struct size_rule *rule, uint64_t percent, uint64_t *ret)
{
        uint64_t bytes;

        if (!rule->whole_name) {
                config_fail(r, n, "%s '%s': a percentage has no meaning here; write a size, as in 512MiB",
                            rule->what, SHOW(n));
                return false;
        }
        if (percent > 100) {
                config_fail(r, n, "%s %s is more than 100%% of %s", rule->what, SHOW(n), rule->whole_name);
                return false;
        }
        if (percent == 0 && !rule->zero_allowed) {
                config_fail(r, n, "%s must be more than 0", rule->what);
                return false;
        }
        if (!rule->whole_known)
                return false;
        bytes = rule->whole / 100 * percent + rule->whole % 100 * percent / 100;
        bytes -= bytes % CONFIG_GRANULARITY;
        if (bytes == 0 && percent != 0) {
                config_fail(r, n, "%s %s of %s (%s) is less than 2MiB, the smallest piece", rule->what,
                            SHOW(n), rule->whole_name, SIZE(rule->whole));
                return false;
        }
        *ret = bytes;
        return true;
}

static bool check_size(struct config_reader *r, const struct yamltree_node *n, const struct size_rule *rule,
                       uint64_t bytes)
{
        uint64_t below = bytes - bytes % CONFIG_GRANULARITY;

        if (bytes == 0 && !rule->zero_allowed) {
                config_fail(r, n, "%s must be more than 0", rule->what);
                return false;
        }
        if (bytes == below)
                return true;
        if (below == 0)
                config_fail(r, n, "%s %s is not a multiple of 2MiB; write 2MiB", rule->what, SHOW(n));
        else
                config_fail(r, n, "%s %s is not a multiple of 2MiB; write %s or %s", rule->what, SHOW(n),
                            SIZE(below), SIZE(below + CONFIG_GRANULARITY));
        return false;
}

bool config_read_size(struct config_reader *r, const struct yamltree_node *n, const struct size_rule *rule,
                      uint64_t *ret)
{
        size_t n_digits = 0;
        uint64_t value = 0;
        size_t i = 0;

        if (!config_want(r, n, YAMLTREE_SCALAR, rule->what))
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
        config_fail(r, n, "%s %s is too large", rule->what, SHOW(n));
        return false;
}

/* ---- words and names ------------------------------------------------------ */

const char *config_read_name(struct config_reader *r, const struct yamltree_node *n, const char *what)
{
        if (!config_want(r, n, YAMLTREE_SCALAR, what))
                return NULL;
        if (n->n_text > CONFIG_NAME_MAX) {
                config_fail(r, n, "%s '%s' is longer than %d bytes", what, SHOW(n), CONFIG_NAME_MAX);
                return NULL;
        }
        for (size_t i = 0; i < n->n_text; i++) {
                char c = n->text[i];

                if ((c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' ||
                    c == '-' || c == '.')
                        continue;
                config_fail(r, n, "%s '%s' is not a name; use letters, digits, '_', '-' and '.'", what,
                            SHOW(n));
                return NULL;
        }
        return n->text;
}

int config_read_word(struct config_reader *r, const struct yamltree_node *n, const char *what,
                     const char *first, const char *second)
{
        if (!config_want(r, n, YAMLTREE_SCALAR, what))
                return -1;
        if (config_is_text(n, first))
                return 0;
        if (config_is_text(n, second))
                return 1;
        config_fail(r, n, "%s '%s' is not known; write %s or %s", what, SHOW(n), first, second);
        return -1;
}

/* ---- sockets -------------------------------------------------------------- */

bool config_path_fault(const char *path, size_t n_path, char *ret, size_t n_ret)
{
        size_t max = sizeof(((struct sockaddr_un *)NULL)->sun_path) - 1;
        const char *shown = config_show_bytes(&(struct config_shown){ { 0 } }, path, n_path);

        for (size_t i = 0; i < n_path; i++) {
                if ((unsigned char)path[i] < 0x20 || path[i] == 0x7f) {
                        snprintf(ret, n_ret, "'%s' contains a control character", shown);
                        return true;
                }
        }
        if (n_path == 0 || path[0] != '/' || path[n_path - 1] == '/') {
                snprintf(ret, n_ret, "'%s' is not the absolute path of a socket; write it as in %s", shown,
                         CONFIG_DEFAULT_SOCKET);
                return true;
        }
        if (n_path > max) {
                snprintf(ret, n_ret, "'%s' has %zu bytes; a socket's path has at most %zu", shown, n_path,
                         max);
                return true;
        }
        return false;
}

void config_read_path(struct config_reader *r, const struct yamltree_node *n, const char *what, char **ret)
{
        char fault[CONFIG_FAULT_BYTES];
        char *copy;

        if (!config_want(r, n, YAMLTREE_SCALAR, what))
                return;
        if (config_path_fault(n->text, n->n_text, fault, sizeof(fault))) {
                config_fail(r, n, "%s %s", what, fault);
                return;
        }
        copy = config_copy_text(r, n->text);
        if (!copy)
                return;
        free(*ret);
        *ret = copy;
}

void config_read_mode(struct config_reader *r, const struct yamltree_node *n, const char *what, mode_t *ret)
{
        mode_t mode = 0;
        bool is_mode;

        if (!config_want(r, n, YAMLTREE_SCALAR, what))
                return;
        is_mode = n->n_text == 4 && n->text[0] == '0';
        for (size_t i = 1; is_mode && i < 4; i++) {
                is_mode = n->text[i] >= '0' && n->text[i] <= '7';
                mode = mode << 3 | (mode_t)(n->text[i] - '0');
        }
        if (is_mode)
                *ret = mode;
        else
                config_fail(r, n, "%s '%s' is not a mode; write four octal digits, as in \"0660\"", what,
                            SHOW(n));
}

/* ---- users and groups ----------------------------------------------------- */

bool config_all_digits(const struct yamltree_node *n)
{
        return strspn(n->text, "0123456789") == n->n_text;
}

bool config_find_user(struct config_reader *r, const struct yamltree_node *n, uid_t *ret)
{
        struct passwd *pw;

        if (!config_want(r, n, YAMLTREE_SCALAR, "a user"))
                return false;
        errno = 0;
        pw = strlen(n->text) == n->n_text ? getpwnam(n->text) : NULL;
        if (pw) {
                *ret = pw->pw_uid;
                return true;
        }
        if (config_all_digits(n))
                config_warn(r, n,
                            "user '%s' is not known on this machine (getpwnam) and matches no process; "
                            "for a number write uid: %s",
                            SHOW(n), SHOW(n));
        else
                config_warn(
                        r, n,
                        "user '%s' is not known on this machine (getpwnam) and matches no process until a "
                        "reload",
                        SHOW(n));
        return false;
}

bool config_find_group(struct config_reader *r, const struct yamltree_node *n, const char *consequence,
                       gid_t *ret)
{
        struct group *gr;

        if (!config_want(r, n, YAMLTREE_SCALAR, "a group"))
                return false;
        errno = 0;
        gr = strlen(n->text) == n->n_text ? getgrnam(n->text) : NULL;
        if (gr) {
                *ret = gr->gr_gid;
                return true;
        }
        config_warn(r, n, "group '%s' is not known on this machine (getgrnam) and %s", SHOW(n), consequence);
        return false;
}
