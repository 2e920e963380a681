/* SPDX-License-Identifier: Apache-2.0 */
/* Values, typed by the schema. A value that is wrong is reported with what would be right. */
#include "daemon/config/reader.h"

#include <errno.h>
#include <grp.h>
#include <pwd.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/un.h>

#include "proto/paths.h"

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

bool config_read_number(struct config_reader *r, const struct config_field *field,
                        const struct yamltree_node *n, uint64_t *ret)
{
        size_t n_digits = 0;
        uint64_t value = 0;
        int result;

        if (!config_want(r, n, YAMLTREE_SCALAR, field->key))
                return false;
        result = parse_digits(n, &value, &n_digits);
        if (result == 0 && n_digits != n->n_text)
                return config_fail(r, n, "%s '%s' is not a whole number; write %llu to %llu", field->key,
                                   SHOW(n), (unsigned long long)field->min, (unsigned long long)field->max);
        if (result < 0 || value < field->min || value > field->max)
                return config_fail(r, n, "%s %s is out of range; write %llu to %llu", field->key, SHOW(n),
                                   (unsigned long long)field->min, (unsigned long long)field->max);
        *ret = value;
        return true;
}

/* The index of the unit that follows the digits, or n_units. */
static size_t find_unit(const struct yamltree_node *n, size_t n_digits, const char *const *units,
                        size_t n_units)
{
        size_t i = 0, n_rest = n->n_text - n_digits;

        while (i < n_units && (n_digits == 0 || strlen(units[i]) != n_rest ||
                               memcmp(n->text + n_digits, units[i], n_rest) != 0))
                i++;
        return i;
}

/* A number with or without a fraction, and blanks after it: what people write instead. *ret_unit: what follows. */
static bool read_loosely(const struct yamltree_node *n, double *ret, const char **ret_unit)
{
        size_t n_number = strspn(n->text, "0123456789.");
        char *end;

        if (n_number == 0 || n_number > 20 || n->text[0] == '.' || strlen(n->text) != n->n_text)
                return false;
        *ret = strtod(n->text, &end); /* a locale is never set */
        *ret_unit = n->text + n_number + strspn(n->text + n_number, " ");
        return end == n->text + n_number;
}

static const char *const DURATION_UNITS[] = { "ms", "s", "m", "h", "d" };
static const uint64_t MS_OF[] = { 1, 1000, 60000, 3600000, 86400000, 0 };
#define N_DURATION_UNITS 5u

static bool fail_duration(struct config_reader *r, const struct config_field *field,
                          const struct yamltree_node *n)
{
        static const char *const words[] = { "milliseconds", "seconds", "minutes", "hours", "days" };
        const char *unit = NULL;
        double value, ms;

        for (unsigned i = 0; i < N_DURATION_UNITS && read_loosely(n, &value, &unit); i++) {
                unsigned whole = i;

                if (!*unit || (strcasecmp(unit, DURATION_UNITS[i]) != 0 &&
                               (strlen(unit) < 3 || strncasecmp(words[i], unit, strlen(unit)) != 0)))
                        continue;
                ms = value * (double)MS_OF[i];
                if (ms < 1 || ms > MAX_TIMEOUT_MS || ms != (double)(uint64_t)ms)
                        break;
                while ((uint64_t)ms % MS_OF[whole] != 0)
                        whole--;
                return config_fail(r, n, "%s '%s' is not a duration; write %llu%s", field->key, SHOW(n),
                                   (unsigned long long)((uint64_t)ms / MS_OF[whole]), DURATION_UNITS[whole]);
        }
        return config_fail(
                r, n, "%s '%s' is not a duration; write a whole number and ms, s, m, h or d, as in 200ms",
                field->key, SHOW(n));
}

static bool read_duration(struct config_reader *r, const struct config_field *field,
                          const struct yamltree_node *n, uint64_t *ret_ms)
{
        size_t n_digits = 0, unit;
        uint64_t value = 0, ms = 0;
        bool is_too_much;

        is_too_much = parse_digits(n, &value, &n_digits) < 0;
        unit = find_unit(n, n_digits, DURATION_UNITS, N_DURATION_UNITS);
        if (!is_too_much && unit == N_DURATION_UNITS)
                return fail_duration(r, field, n);
        if (is_too_much || __builtin_mul_overflow(value, MS_OF[unit], &ms) || ms > MAX_TIMEOUT_MS || ms == 0)
                return config_fail(r, n, "%s %s is out of range; write 1ms to 1d", field->key, SHOW(n));
        *ret_ms = ms;
        return true;
}

/* ---- sizes ---------------------------------------------------------------- */

/* The order of their powers of 1024. */
static const char *const SIZE_UNITS[] = { "B", "KiB", "MiB", "GiB", "TiB" };
#define N_SIZE_UNITS 5u

static void fail_size(struct config_reader *r, const struct yamltree_node *n,
                      const struct config_field *field)
{
        const char *percent = field->whole ? ", or a whole percentage, as in 50%" : "";
        const char *unit = NULL;
        double value, bytes;

        /* What people write: 1 GiB, 0.5GiB, 512mib, K, kb, ... */
        for (unsigned i = 1; i < N_SIZE_UNITS && read_loosely(n, &value, &unit); i++) {
                const char *known = SIZE_UNITS[i];

                if ((unit[0] & ~0x20) != known[0] ||
                    (unit[1] && strcasecmp(unit + 1, "B") != 0 && strcasecmp(unit + 1, known + 1) != 0))
                        continue;
                bytes = value * (double)(UINT64_C(1) << (10 * i));
                if (bytes < 1 || bytes > (double)(UINT64_C(1) << 52) || bytes != (double)(uint64_t)bytes)
                        break;
                config_fail(r, n, "%s '%s' is not a size; write %s", field->key, SHOW(n),
                            SIZE((uint64_t)bytes));
                return;
        }
        config_fail(r, n,
                    "%s '%s' is not a size; write a whole number and B, KiB, MiB, GiB or TiB, as in 512MiB%s",
                    field->key, SHOW(n), percent);
}

static bool fail_zero(struct config_reader *r, const struct yamltree_node *n,
                      const struct config_field *field)
{
        return config_fail(r, n, "%s must be more than 0", field->key);
}

static bool read_percentage(struct config_reader *r, const struct config_place *p,
                            const struct config_field *field, const struct yamltree_node *n, uint64_t percent,
                            uint64_t *ret)
{
        const char *key = field->key;
        uint64_t bytes;

        if (!field->whole)
                return config_fail(r, n,
                                   "%s '%s': a percentage has no meaning here; write a size, as in 512MiB",
                                   key, SHOW(n));
        if (percent > 100)
                return config_fail(r, n, "%s %s is more than 100%% of %s", key, SHOW(n), field->whole);
        if (percent == 0 && field->min > 0)
                return fail_zero(r, n, field);
        if (!p->whole_known)
                return false;
        bytes = p->whole_bytes / 100 * percent + p->whole_bytes % 100 * percent / 100;
        bytes -= bytes % CONFIG_GRANULARITY;
        if (bytes == 0 && percent != 0)
                return config_fail(r, n, "%s %s of %s (%s) is less than 2MiB, the smallest piece", key,
                                   SHOW(n), field->whole, SIZE(p->whole_bytes));
        *ret = bytes;
        return true;
}

static bool check_size(struct config_reader *r, const struct config_field *field,
                       const struct yamltree_node *n, uint64_t bytes)
{
        uint64_t below = bytes - bytes % CONFIG_GRANULARITY;

        if (bytes == 0 && field->min > 0)
                return fail_zero(r, n, field);
        if (bytes == below)
                return true;
        if (below == 0)
                config_fail(r, n, "%s %s is not a multiple of 2MiB; write 2MiB", field->key, SHOW(n));
        else
                config_fail(r, n, "%s %s is not a multiple of 2MiB; write %s or %s", field->key, SHOW(n),
                            SIZE(below), SIZE(below + CONFIG_GRANULARITY));
        return false;
}

/* false: reported, or a percentage of what is not known. */
static bool read_size(struct config_reader *r, const struct config_place *p, const struct config_field *field,
                      const struct yamltree_node *n, uint64_t *ret)
{
        size_t n_digits = 0, unit;
        uint64_t value = 0;
        int result;

        result = parse_digits(n, &value, &n_digits);
        if (result == 0 && n_digits > 0 && n->n_text == n_digits + 1 && n->text[n_digits] == '%')
                return read_percentage(r, p, field, n, value, ret);
        unit = find_unit(n, n_digits, SIZE_UNITS, N_SIZE_UNITS);
        if (n_digits > 0 && n_digits == n->n_text && value == 0 && field->min == 0)
                unit = 0;
        if (result == 0 && unit == N_SIZE_UNITS) {
                fail_size(r, n, field);
                return false;
        }
        if (result < 0 || value > (uint64_t)INT64_MAX >> (10 * unit))
                return config_fail(r, n, "%s %s is too large", field->key, SHOW(n));
        if (!check_size(r, field, n, value << (10 * unit)))
                return false;
        *ret = value << (10 * unit);
        return true;
}

/* ---- words and names ------------------------------------------------------ */

bool config_want_name(struct config_reader *r, const struct yamltree_node *n, const char *what)
{
        static const char allowed[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-.";

        if (!config_want(r, n, YAMLTREE_SCALAR, what))
                return false;
        if (n->n_text > CONFIG_NAME_MAX)
                return config_fail(r, n, "%s '%s' is longer than %d bytes", what, SHOW(n), CONFIG_NAME_MAX);
        if (strspn(n->text, allowed) != n->n_text)
                return config_fail(r, n, "%s '%s' is not a name; use letters, digits, '_', '-' and '.'", what,
                                   SHOW(n));
        return true;
}

static bool read_word(struct config_reader *r, const struct config_field *field,
                      const struct yamltree_node *n, uint64_t *ret)
{
        char known[64];
        size_t used = 0;

        for (size_t i = 0; field->words[i]; i++) {
                if (config_is_text(n, field->words[i])) {
                        *ret = i;
                        return true;
                }
                used += (size_t)snprintf(known + used, sizeof(known) - used, "%s%s",
                                         i == 0                ? ""
                                         : field->words[i + 1] ? ", "
                                                               : " or ",
                                         field->words[i]);
        }
        return config_fail(r, n, "%s '%s' is not known; write %s", field->key, SHOW(n), known);
}

static bool read_mode(struct config_reader *r, const struct config_field *field,
                      const struct yamltree_node *n, uint64_t *ret)
{
        if (n->n_text != 4 || n->text[0] != '0' || strspn(n->text, "01234567") != 4)
                return config_fail(r, n, "%s '%s' is not a mode; write four octal digits, as in \"0660\"",
                                   field->key, SHOW(n));
        *ret = strtoul(n->text, NULL, 8);
        return true;
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
                         PATHS_CLIENT_SOCKET);
                return true;
        }
        if (n_path > max) {
                snprintf(ret, n_ret, "'%s' has %zu bytes; a socket's path has at most %zu", shown, n_path,
                         max);
                return true;
        }
        return false;
}

static bool is_path(struct config_reader *r, const struct config_field *field, const struct yamltree_node *n)
{
        char fault[CONFIG_FAULT_BYTES];

        return !config_path_fault(n->text, n->n_text, fault, sizeof(fault)) ||
               config_fail(r, n, "%s %s", field->key, fault);
}

#define MAX_FILE_PATH ((size_t)CONFIG_TEXT_BYTES - 1)

static bool is_file_path(struct config_reader *r, const struct config_field *field,
                         const struct yamltree_node *n)
{
        for (size_t i = 0; i < n->n_text; i++)
                if ((unsigned char)n->text[i] < 0x20 || n->text[i] == 0x7f)
                        return config_fail(r, n, "%s '%s' contains a control character", field->key, SHOW(n));
        if (n->n_text == 0 || n->text[0] != '/' || n->text[n->n_text - 1] == '/')
                return config_fail(
                        r, n, "%s '%s' is not the absolute path of a file; write it as in " PATHS_RECORDS,
                        field->key, SHOW(n));
        if (n->n_text > MAX_FILE_PATH)
                return config_fail(r, n, "%s '%s' has %zu bytes; it has at most %zu", field->key, SHOW(n),
                                   n->n_text, MAX_FILE_PATH);
        return true;
}

/* ---- users and groups ----------------------------------------------------- */

static bool is_all_digits(const struct yamltree_node *n)
{
        return strspn(n->text, "0123456789") == n->n_text;
}

bool config_find_user(struct config_reader *r, const struct yamltree_node *n, uid_t *ret)
{
        struct passwd *pw;

        if (!config_want(r, n, YAMLTREE_SCALAR, "a user"))
                return false;
        pw = strlen(n->text) == n->n_text ? getpwnam(n->text) : NULL;
        if (!pw)
                return config_warn(
                        r, n, "user '%s' is not known on this machine (getpwnam) and matches no process%s%s",
                        SHOW(n), is_all_digits(n) ? "; for a number write uid: " : " until a reload",
                        is_all_digits(n) ? SHOW(n) : "");
        *ret = pw->pw_uid;
        return true;
}

bool config_find_group(struct config_reader *r, const struct yamltree_node *n, const char *consequence,
                       gid_t *ret)
{
        struct group *gr;

        if (!config_want(r, n, YAMLTREE_SCALAR, "a group"))
                return false;
        gr = strlen(n->text) == n->n_text ? getgrnam(n->text) : NULL;
        if (!gr)
                return config_warn(r, n, "group '%s' is not known on this machine (getgrnam) and %s", SHOW(n),
                                   consequence);
        *ret = gr->gr_gid;
        return true;
}

/* ---- by type -------------------------------------------------------------- */

static bool read_group(struct config_reader *r, const struct yamltree_node *n, struct config_socket *s)
{
        static const struct config_field number = { .key = "group", .max = (gid_t)-1 - 1 };
        uint64_t gid;

        if (n->type == YAMLTREE_SCALAR && n->n_text > 0 && is_all_digits(n)) {
                if (!config_read_number(r, &number, n, &gid))
                        return false;
                s->group = (gid_t)gid;
                return true;
        }
        if (!config_find_group(r, n, "the socket keeps its group", &s->group))
                return false;
        s->group_name = config_copy_text(r, n->text);
        return true;
}

static bool set_string(struct config_reader *r, char **at, const char *text)
{
        char *copy = config_copy_text(r, text);

        if (!copy)
                return false;
        free(*at);
        *at = copy;
        return true;
}

bool config_read_value(struct config_reader *r, const struct config_place *p,
                       const struct config_field *field, const struct yamltree_node *n)
{
        char **string = (char **)((char *)p->object + field->offset);
        uint64_t value = 0;
        bool is_good = false;

        if (field->type == CONFIG_GROUP)
                return read_group(r, n, p->object);
        if (!config_want(r, n, YAMLTREE_SCALAR, field->key))
                return false;
        switch (field->type) {
        case CONFIG_NAME:
                return config_want_name(r, n, field->key) && set_string(r, string, n->text);
        case CONFIG_PATH:
                return is_path(r, field, n) && set_string(r, string, n->text);
        case CONFIG_FILE:
                return is_file_path(r, field, n) && set_string(r, string, n->text);
        case CONFIG_SIZE:
                is_good = read_size(r, p, field, n, &value);
                break;
        case CONFIG_NUMBER:
        case CONFIG_NODE:
                is_good = config_read_number(r, field, n, &value);
                break;
        case CONFIG_DURATION:
                is_good = read_duration(r, field, n, &value);
                break;
        case CONFIG_WORD:
                is_good = read_word(r, field, n, &value);
                break;
        case CONFIG_MODE:
                is_good = read_mode(r, field, n, &value);
                break;
        default:
                break;
        }
        if (is_good)
                config_set(field, p->object, value);
        return is_good;
}
