/* A fuzzer's input, from which a target takes its decisions.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_FUZZ_INPUT_H
#define TESTS_FUZZ_INPUT_H

#include <stddef.h>
#include <stdint.h>

#define MIB (UINT64_C(1) << 20)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_data);

struct input {
        const uint8_t *at;
        size_t n;
};

/* 0 at the end. */
static inline uint8_t take(struct input *in)
{
        if (in->n == 0)
                return 0;
        in->n--;
        return *in->at++;
}

#endif
