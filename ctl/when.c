/* Points in time; see when.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctl/when.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/amount.h"

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

static int parse_relative(const char *text, const char *end, time_t now, uint64_t *ret_us)
{
        char span[64];
        uint64_t ms;

        if ((size_t)(end - text) >= sizeof(span))
                return -EINVAL;
        snprintf(span, sizeof(span), "%.*s", (int)(end - text), text);
        if (!amount_time(span, &ms) || now < 0 || ms / 1000 > (uint64_t)now)
                return -EINVAL;
        return to_us(now - (time_t)(ms / 1000), ret_us);
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
