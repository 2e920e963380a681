/* The last error's sentence, one for each thread, so that nobody reads another
 * thread's; without malloc, so that "out of memory" can be said.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "client/error.h"

#include <stdarg.h>
#include <stdio.h>

#define ERROR_BYTES 1024

static _Thread_local char sentence[ERROR_BYTES];

int error_set(int error, const char *format, ...)
{
        va_list args;

        va_start(args, format);
        vsnprintf(sentence, sizeof(sentence), format, args);
        va_end(args);
        return error;
}

const char *error_last(void)
{
        return sentence;
}
