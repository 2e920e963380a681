/* Points in time; see when.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctl/when.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define SECOND_US UINT64_C(1000000)

static bool starts_with_digit(const char *text)
{
        return *text >= '0' && *text <= '9';
}

static int to_us(time_t seconds, uint64_t *ret_us)
{
        if (seconds < 0 || (uint64_t)seconds > UINT64_MAX / SECOND_US)
                return -EINVAL;
        *ret_us = (uint64_t)seconds * SECOND_US;
        return 0;
}

/* The day of `now` and `days` more, at midnight. */
static int parse_day(time_t now, int days, uint64_t *ret_us)
{
        struct tm tm;

        if (!localtime_r(&now, &tm))
                return -EINVAL;
        tm.tm_hour = tm.tm_min = tm.tm_sec = 0;
        tm.tm_mday += days;
        tm.tm_isdst = -1;
        return to_us(mktime(&tm), ret_us);
}

/* "2h", "90min", "1h30m": until `end`. */
static int parse_span(const char *text, const char *end, uint64_t *ret_s)
{
        static const struct {
                const char *name;
                uint64_t seconds;
        } units[] = {
                { "seconds", 1 },   { "second", 1 },  { "sec", 1 },   { "s", 1 },
                { "minutes", 60 },  { "minute", 60 }, { "min", 60 },  { "m", 60 },
                { "hours", 3600 },  { "hour", 3600 }, { "hr", 3600 }, { "h", 3600 },
                { "days", 86400 },  { "day", 86400 }, { "d", 86400 }, { "weeks", 604800 },
                { "week", 604800 }, { "w", 604800 },
        };
        uint64_t sum = 0;

        while (text < end) {
                size_t n_unit, i = 0;
                char *after;
                uint64_t n;

                if (!starts_with_digit(text))
                        return -EINVAL;
                errno = 0;
                n = strtoull(text, &after, 10);
                after += strspn(after, " ");
                n_unit = strspn(after, "abcdefghijklmnopqrstuvwxyz");
                while (i < sizeof(units) / sizeof(units[0]) &&
                       (strlen(units[i].name) != n_unit || strncmp(units[i].name, after, n_unit) != 0))
                        i++;
                if (errno != 0 || i == sizeof(units) / sizeof(units[0]) ||
                    __builtin_mul_overflow(n, units[i].seconds, &n) || __builtin_add_overflow(sum, n, &sum))
                        return -EINVAL;
                text = after + n_unit;
                text += strspn(text, " ");
        }
        *ret_s = sum;
        return 0;
}

static int parse_relative(const char *text, const char *end, time_t now, uint64_t *ret_us)
{
        uint64_t seconds;

        if (text == end || parse_span(text, end, &seconds) < 0 || now < 0 || seconds > (uint64_t)now)
                return -EINVAL;
        return to_us(now - (time_t)seconds, ret_us);
}

/* mktime() accepts the 31st of February, as a day in March. */
static int parse_absolute(const char *text, time_t now, uint64_t *ret_us)
{
        static const char *const formats[] = {
                "%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M",
                "%Y-%m-%d",          "%H:%M:%S",          "%H:%M"
        };

        for (size_t i = 0; starts_with_digit(text) && i < sizeof(formats) / sizeof(formats[0]); i++) {
                const char *end;
                struct tm tm, asked;
                time_t t;

                if (!localtime_r(&now, &tm))
                        return -EINVAL;
                tm.tm_hour = tm.tm_min = tm.tm_sec = 0;
                end = strptime(text, formats[i], &tm);
                if (!end || *end)
                        continue;
                tm.tm_isdst = -1;
                asked = tm;
                t = mktime(&tm);
                if (tm.tm_mday != asked.tm_mday || tm.tm_mon != asked.tm_mon)
                        return -EINVAL;
                return to_us(t, ret_us);
        }
        return -EINVAL;
}

int when_parse(const char *text, time_t now, uint64_t *ret_us)
{
        size_t n = strlen(text);
        char *end;

        if (strcmp(text, "now") == 0)
                return to_us(now, ret_us);
        if (strcmp(text, "today") == 0)
                return parse_day(now, 0, ret_us);
        if (strcmp(text, "yesterday") == 0)
                return parse_day(now, -1, ret_us);
        if (text[0] == '-')
                return parse_relative(text + 1, text + n, now, ret_us);
        if (n > 4 && strcmp(text + n - 4, " ago") == 0)
                return parse_relative(text, text + n - 4, now, ret_us);
        if (text[0] == '@' && starts_with_digit(text + 1)) {
                unsigned long long seconds;

                errno = 0;
                seconds = strtoull(text + 1, &end, 10);
                return errno != 0 || *end || seconds > INT64_MAX ? -EINVAL : to_us((time_t)seconds, ret_us);
        }
        return parse_absolute(text, now, ret_us);
}

const char *when_text(uint64_t us, char ret[static WHEN_TEXT])
{
        time_t seconds = (time_t)(us / SECOND_US);
        struct tm tm;

        if (us == 0 || !localtime_r(&seconds, &tm) || strftime(ret, WHEN_TEXT, "%Y-%m-%d %H:%M:%S", &tm) == 0)
                strcpy(ret, "-");
        return ret;
}
