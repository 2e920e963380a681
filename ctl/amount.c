/* Times and sizes in options; see amount.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctl/amount.h"

#include <stddef.h>
#include <string.h>

#define MAX_MS              ((uint64_t)INT64_MAX / 2)
#define MAX_FRACTION_DIGITS 6u

struct unit {
        const char *name;
        uint64_t factor;
};

static const struct unit times[] = {
        { "ms", 1 },          { "msec", 1 },        { "s", 1000 },         { "sec", 1000 },
        { "second", 1000 },   { "seconds", 1000 },  { "m", 60000 },        { "min", 60000 },
        { "minute", 60000 },  { "minutes", 60000 }, { "h", 3600000 },      { "hr", 3600000 },
        { "hour", 3600000 },  { "hours", 3600000 }, { "d", 86400000 },     { "day", 86400000 },
        { "days", 86400000 }, { "w", 604800000 },   { "week", 604800000 }, { "weeks", 604800000 },
};

static const struct unit sizes[] = {
        { "", 1 },
        { "B", 1 },
        { "KiB", UINT64_C(1) << 10 },
        { "MiB", UINT64_C(1) << 20 },
        { "GiB", UINT64_C(1) << 30 },
        { "TiB", UINT64_C(1) << 40 },
};

#define N_OF(list) (sizeof(list) / sizeof((list)[0]))

/* The digits at the begin of *text, which is moved behind them. False: there are none, or too many. */
static bool read_digits(const char **text, uint64_t *ret)
{
        const char *c = *text;
        uint64_t n = 0;

        for (; *c >= '0' && *c <= '9'; c++)
                if (__builtin_mul_overflow(n, 10, &n) || __builtin_add_overflow(n, (uint64_t)(*c - '0'), &n))
                        return false;
        if (c == *text)
                return false;
        *text = c;
        *ret = n;
        return true;
}

static const struct unit *find_unit(const struct unit *units, size_t n_units, const char *name, size_t n_name)
{
        for (size_t i = 0; i < n_units; i++)
                if (strlen(units[i].name) == n_name && strncmp(units[i].name, name, n_name) == 0)
                        return &units[i];
        return NULL;
}

/* A fraction's part of a unit: ".5". */
static bool read_fraction(const char **text, uint64_t unit, uint64_t *ret)
{
        const char *begin = *text;
        uint64_t n = 0;

        *ret = 0;
        if (!read_digits(text, &n) || *text - begin > (ptrdiff_t)MAX_FRACTION_DIGITS)
                return false;
        *ret = n * unit;
        for (ptrdiff_t i = *text - begin; i > 0; i--)
                *ret /= 10;
        return true;
}

/* One number with its unit, and blanks behind each. is_only: it may have none. */
static bool read_item(const char **text, bool is_only, uint64_t *ret_ms)
{
        static const struct unit seconds = { "s", 1000 };
        const char *fraction = NULL, *name;
        uint64_t n, part = 0;
        const struct unit *unit;

        if (!read_digits(text, &n))
                return false;
        if (**text == '.') {
                fraction = ++*text;
                *text += strspn(*text, "0123456789");
        }
        name = *text + strspn(*text, " ");
        *text = name + strspn(name, "abcdefghijklmnopqrstuvwxyz");
        unit = *text == name && is_only && !**text
                       ? &seconds
                       : find_unit(times, N_OF(times), name, (size_t)(*text - name));
        if (!unit || (fraction && !read_fraction(&fraction, unit->factor, &part)) ||
            __builtin_mul_overflow(n, unit->factor, &n) || __builtin_add_overflow(n, part, &n))
                return false;
        *text += strspn(*text, " ");
        *ret_ms = n;
        return true;
}

bool amount_time(const char *text, uint64_t *ret_ms)
{
        const char *begin = text;
        uint64_t sum = 0, n;

        do
                if (!read_item(&text, text == begin, &n) || __builtin_add_overflow(sum, n, &sum) ||
                    sum > MAX_MS)
                        return false;
        while (*text);
        *ret_ms = sum;
        return true;
}

bool amount_size(const char *text, uint64_t *ret_bytes)
{
        const struct unit *unit;
        uint64_t n;

        if (!read_digits(&text, &n))
                return false;
        unit = find_unit(sizes, N_OF(sizes), text, strlen(text));
        if (!unit || __builtin_mul_overflow(n, unit->factor, &n))
                return false;
        *ret_bytes = n;
        return true;
}
