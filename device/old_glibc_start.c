/* The start of a program that is bound to an old C library, see old_glibc.S.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stddef.h>

typedef void (*constructor)(int argc, char **argv, char **environment);

/* The linker defines them. */
extern const constructor __init_array_start[] __attribute__((visibility("hidden")));
extern const constructor __init_array_end[] __attribute__((visibility("hidden")));

void __attribute__((visibility("hidden"))) old_glibc_construct(int argc, char **argv, char **environment);

void old_glibc_construct(int argc, char **argv, char **environment)
{
        for (const constructor *c = __init_array_start; c != __init_array_end; c++)
                (*c)(argc, argv, environment);
}
