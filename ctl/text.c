/* Text for people and for JSON: see text.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Everything goes through decode(), which takes exactly the UTF-8 that RFC 3629
 * allows: no overlong forms, no surrogates, nothing above U+10FFFF. Invariant:
 * decode() never reads past the terminating 0, because no continuation byte is
 * 0 and bytes are looked at in order. */
#include "ctl/text.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The character at s and how many bytes it takes; 0 where s is no UTF-8. */
static size_t decode(const unsigned char *s, uint32_t *ret_character)
{
        static const uint32_t smallest[] = { 0, 0, 0x80, 0x800, 0x10000 };
        size_t n = s[0] < 0x80             ? 1
                   : (s[0] & 0xe0) == 0xc0 ? 2
                   : (s[0] & 0xf0) == 0xe0 ? 3
                   : (s[0] & 0xf8) == 0xf0 ? 4
                                           : 0;
        uint32_t c;

        if (n == 0)
                return 0;
        c = n == 1 ? s[0] : s[0] & (0x7fu >> n);
        for (size_t i = 1; i < n; i++) {
                if ((s[i] & 0xc0) != 0x80)
                        return 0;
                c = c << 6 | (s[i] & 0x3fu);
        }
        if (c < smallest[n] || c > 0x10ffff || (c >= 0xd800 && c <= 0xdfff))
                return 0;
        *ret_character = c;
        return n;
}

/* Characters that act on the terminal or on their neighbours instead of being seen. */
static bool acts(uint32_t c)
{
        return c < 0x20 || (c >= 0x7f && c < 0xa0) ||         /* C0, DEL, C1 */
               c == 0x061c || (c >= 0x200b && c <= 0x200f) || /* marks of direction, no width */
               (c >= 0x2028 && c <= 0x202e) || (c >= 0x2060 && c <= 0x206f) || c == 0xfeff || c == 0xfffe ||
               c == 0xffff; /* no characters of XML */
}

/* Writes the escape for a character (or a byte that is none) and returns its length. */
static size_t escape(char *out, uint32_t c)
{
        static const char short_forms[] = "\nn\tt\rr\\\\";

        for (size_t i = 0; i + 1 < sizeof(short_forms); i += 2) {
                if (c == (unsigned char)short_forms[i]) {
                        out[0] = '\\';
                        out[1] = short_forms[i + 1];
                        return 2;
                }
        }
        return (size_t)sprintf(out, c < 0x80 ? "\\x%02" PRIx32 : "\\u%04" PRIx32, c);
}

/* A copy. With escapes, what cannot be seen or is no UTF-8 is written out; without, the latter is U+FFFD. */
static char *copy(const char *s, bool escapes)
{
        const unsigned char *in = (const unsigned char *)(s ? s : "");
        char *ret = malloc(strlen((const char *)in) * 4 + 1); /* a byte becomes at most \xNN */
        char *out = ret;

        if (!ret)
                return NULL;
        while (*in) {
                uint32_t c;
                size_t n = decode(in, &c);

                if (n == 0 && escapes)
                        out += sprintf(out, "\\x%02x", (unsigned int)*in);
                else if (n == 0)
                        out = mempcpy(out, "\xef\xbf\xbd", 3);
                else if (escapes && (acts(c) || c == '\\'))
                        out += escape(out, c);
                else
                        out = mempcpy(out, in, n);
                in += n > 0 ? n : 1;
        }
        *out = '\0';
        return ret;
}

char *text_escape(const char *s)
{
        return copy(s, true);
}

char *text_valid(const char *s)
{
        return copy(s, false);
}

const char *text_size(uint64_t n_bytes, char ret[static TEXT_MAX])
{
        static const char *const units[] = { "KiB", "MiB", "GiB", "TiB", "PiB", "EiB" };
        double value = (double)n_bytes / 1024;
        size_t unit = 0;

        if (n_bytes < 1024) {
                snprintf(ret, TEXT_MAX, "%" PRIu64 " B", n_bytes);
                return ret;
        }
        /* What would be printed as 1024.0 belongs to the next unit. */
        while (value >= 1023.95 && unit + 1 < sizeof(units) / sizeof(units[0])) {
                value /= 1024;
                unit++;
        }
        snprintf(ret, TEXT_MAX, "%.1f %s", value, units[unit]);
        return ret;
}

const char *text_duration(uint64_t ms, char ret[static TEXT_MAX])
{
        uint64_t s = ms / 1000;

        if (s < 60)
                snprintf(ret, TEXT_MAX, "%" PRIu64 ".%" PRIu64 " s", s, ms % 1000 / 100);
        else if (s < 3600)
                snprintf(ret, TEXT_MAX, "%" PRIu64 "m %02" PRIu64 "s", s / 60, s % 60);
        else if (s < 86400)
                snprintf(ret, TEXT_MAX, "%" PRIu64 "h %02" PRIu64 "m", s / 3600, s / 60 % 60);
        else
                snprintf(ret, TEXT_MAX, "%" PRIu64 "d %02" PRIu64 "h", s / 86400, s / 3600 % 24);
        return ret;
}

const char *text_time(uint64_t ns, char ret[static TEXT_MAX])
{
        uint64_t us = ns / 1000;

        if (us >= 1000000)
                return text_duration(us / 1000, ret);
        if (us < 1000)
                snprintf(ret, TEXT_MAX, "%" PRIu64 " us", us);
        else
                snprintf(ret, TEXT_MAX, "%" PRIu64 ".%" PRIu64 " ms", us / 1000, us % 1000 / 100);
        return ret;
}

const char *text_percent(uint64_t part, uint64_t whole, char ret[static TEXT_MAX])
{
        if (whole == 0)
                snprintf(ret, TEXT_MAX, "-");
        else
                snprintf(ret, TEXT_MAX, "%.1f", 100 * (double)part / (double)whole);
        return ret;
}

void text_xml(FILE *out, const char *text)
{
        for (; *text; text++) {
                if (*text == '&' || *text == '<' || *text == '>' || *text == '"')
                        fprintf(out, "&#%d;", *text);
                else
                        putc(*text, out);
        }
}

/* ---- mistyped words ---------------------------------------------------------- */

#define WORD_MAX 31u

/* Insertions, removals, exchanges of a character, and swaps of neighbours, that make one of the other. Longer words are
 * far from all. */
static unsigned distance(const char *a, const char *b)
{
        unsigned rows[3][WORD_MAX + 1], *before = rows[0], *last = rows[1], *row = rows[2], *next;
        size_t n_a = strlen(a), n_b = strlen(b);

        if (n_a > WORD_MAX || n_b > WORD_MAX)
                return WORD_MAX;
        for (unsigned k = 0; k <= n_b; k++)
                last[k] = before[k] = k;
        for (unsigned i = 1; i <= n_a; i++) {
                row[0] = i;
                for (unsigned k = 1; k <= n_b; k++) {
                        unsigned least = last[k - 1] + (a[i - 1] != b[k - 1]);

                        least = last[k] + 1 < least ? last[k] + 1 : least;
                        least = row[k - 1] + 1 < least ? row[k - 1] + 1 : least;
                        if (i > 1 && k > 1 && a[i - 1] == b[k - 2] && a[i - 2] == b[k - 1])
                                least = before[k - 2] + 1 < least ? before[k - 2] + 1 : least;
                        row[k] = least;
                }
                next = before;
                before = last;
                last = row;
                row = next;
        }
        return last[n_b];
}

const char *text_nearest(const char *word, const char *const *names, size_t n, size_t stride)
{
        unsigned most = strlen(word) < 4 ? 1 : 2;
        const char *ret = NULL;

        for (size_t i = 0; i < n; i++) {
                const char *name = *(const char *const *)(const void *)((const char *)names + i * stride);
                unsigned d = distance(word, name);

                if (d <= most && (!ret || d < most)) {
                        ret = name;
                        most = d;
                }
        }
        return ret;
}

/* ---- columns --------------------------------------------------------------- */

size_t text_character(const char *text, mbstate_t *state, unsigned *ret_columns)
{
        wchar_t c;
        size_t n = mbrtowc(&c, text, strlen(text), state);
        int width;

        if (n == 0 || n > strlen(text)) {
                *state = (mbstate_t){ 0 };
                *ret_columns = 1;
                return 1;
        }
        width = wcwidth(c);
        *ret_columns = width < 0 ? 1 : (unsigned)width;
        return n;
}

size_t text_clip(const char *text, unsigned n_columns, unsigned *ret_columns)
{
        mbstate_t state = { 0 };
        size_t ret = 0;
        unsigned n = 0;

        while (text[ret]) {
                unsigned width;
                size_t n_bytes = text_character(text + ret, &state, &width);

                if (width > n_columns - n)
                        break;
                ret += n_bytes;
                n += width;
        }
        *ret_columns = n;
        return ret;
}

unsigned text_columns(const char *text)
{
        unsigned ret;

        (void)text_clip(text, UINT_MAX, &ret);
        return ret;
}

/* ---- streams --------------------------------------------------------------- */

int text_flush(FILE *out)
{
        errno = 0;
        if (fflush(out) != 0)
                return errno > 0 ? -errno : -EIO;
        return ferror(out) ? -EIO : 0;
}
