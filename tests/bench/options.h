/* The command line of a bench: a table with one row for each option. The table parses the words,
 * checks the ranges and prints --help with the defaults.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_BENCH_OPTIONS_H
#define BFC_BENCH_OPTIONS_H

#include <stdbool.h>

/* Exactly one of the five pointers is set. It says what kind of value the option takes. */
struct bench_option {
        const char *name; /* without "--" */
        bool *flag;       /* takes no value */
        const char **text;
        long *count;    /* from min to max */
        double *number; /* not negative */
        bool (*parse)(const char *word);
        long min, max;
        const char *unit, *help;
};

#define OPTION_BFCD(variable)                                                                                \
        {                                                                                                    \
                "bfcd", .text = (variable), .unit = "PROGRAM", .help = "the daemon to start"                 \
        }
#define OPTION_JSON(variable)                                                                                \
        {                                                                                                    \
                "json", .flag = (variable), .help = "print JSON"                                             \
        }

/* Parses all words by a table that ends with a row without a name. --help ends the program with 0, an
 * error with 2. summary: what the bench measures and when it fails. */
void options_parse(int argc, char **argv, const char *summary, const struct bench_option *table);

/* "0,1": two cores; "none": both are -1. False: it is neither; *ret_… have any values. */
bool options_parse_cores(const char *word, int *ret_first, int *ret_second);

/* Ends the program with 2 unless the condition holds. */
void options_require(bool condition, const char *message);

#endif
