/* Parsing by a table; see options.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/bench/options.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static _Noreturn void fail(const char *word, const char *why)
{
        fprintf(stderr, "%s: %s; --help lists the options\n", word, why);
        exit(2);
}

static void print_default(const struct bench_option *o)
{
        if (o->text && *o->text)
                printf(" (%s)", *o->text);
        else if (o->count)
                printf(" (%ld)", *o->count);
        else if (o->number && *o->number > 0)
                printf(" (%g)", *o->number);
        putchar('\n');
}

static _Noreturn void print_help(const char *program, const char *summary, const struct bench_option *table)
{
        const char *name = strrchr(program, '/');

        printf("Usage: %s [OPTION]...\n\n%s\n\n", name ? name + 1 : program, summary);
        for (; table->name; table++) {
                int n = printf("  --%s %s", table->name, table->unit ? table->unit : "");

                printf("%*s  %s", n < 30 ? 30 - n : 0, "", table->help);
                print_default(table);
        }
        exit(EXIT_SUCCESS);
}

static bool set_count(const struct bench_option *o, const char *word)
{
        char *end;
        long n = strtol(word, &end, 10);

        if (*end || end == word || n < o->min || n > o->max)
                return false;
        *o->count = n;
        return true;
}

static bool set_number(const struct bench_option *o, const char *word)
{
        char *end;
        double n = strtod(word, &end);

        if (*end || end == word || !(n >= 0))
                return false;
        *o->number = n;
        return true;
}

static bool set(const struct bench_option *o, const char *word)
{
        if (o->count)
                return set_count(o, word);
        if (o->number)
                return set_number(o, word);
        if (o->parse)
                return o->parse(word);
        *o->text = word;
        return true;
}

void options_parse(int argc, char **argv, const char *summary, const struct bench_option *table)
{
        for (int i = 1; i < argc; i++) {
                const char *word = argv[i];
                const struct bench_option *o = table;

                if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0)
                        print_help(argv[0], summary, table);
                while (o->name && (strncmp(word, "--", 2) != 0 || strcmp(word + 2, o->name) != 0))
                        o++;
                if (!o->name)
                        fail(word, "no such option");
                if (o->flag)
                        *o->flag = true;
                else if (++i == argc)
                        fail(word, "a value is missing");
                else if (!set(o, argv[i]))
                        fail(argv[i], "not a value that this option takes");
        }
}

bool options_parse_cores(const char *word, int *ret_first, int *ret_second)
{
        *ret_first = *ret_second = -1;
        if (strcmp(word, "none") == 0)
                return true;
        return sscanf(word, "%d,%d", ret_first, ret_second) == 2 && *ret_first >= 0 && *ret_second >= 0 &&
               *ret_first < CPU_SETSIZE && *ret_second < CPU_SETSIZE;
}

void options_require(bool condition, const char *message)
{
        if (!condition)
                fail("bench", message);
}
