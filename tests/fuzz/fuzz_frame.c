/* Frames from a hostile stream, in pieces of every size.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The first byte chooses how the rest is cut. What comes out must be exactly
 * what a plain reading of the whole input says, however it was cut. */
#include "proto/frame.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_data);

static void require(int condition)
{
        if (!condition)
                abort();
}

/* The next frame of the whole input, read plainly: 0, FRAME_AGAIN, -EPROTO. */
static int plain_next(const uint8_t *data, size_t n_data, size_t *at, const uint8_t **ret, size_t *ret_n)
{
        size_t n;

        if (n_data - *at < 4)
                return FRAME_AGAIN;
        n = data[*at] | (size_t)data[*at + 1] << 8 | (size_t)data[*at + 2] << 16 |
            (size_t)data[*at + 3] << 24;
        if (n == 0 || n > FRAME_MAX_PAYLOAD)
                return -EPROTO;
        if (n_data - *at - 4 < n)
                return FRAME_AGAIN;
        *ret = data + *at + 4;
        *ret_n = n;
        *at += 4 + n;
        return 0;
}

/* All frames that are whole now, each compared. The last result. */
static int compare(struct frame_reader *r, const uint8_t *data, size_t n_fed, size_t *plain_at)
{
        const uint8_t *payload, *expected;
        size_t n_bytes, n_expected;
        int got, plain;

        do {
                got = frame_reader_next(r, &payload, &n_bytes);
                plain = plain_next(data, n_fed, plain_at, &expected, &n_expected);
                require(got == plain);
                if (got == 0)
                        require(n_bytes == n_expected && memcmp(payload, expected, n_bytes) == 0);
        } while (got == 0);
        return got;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_data)
{
        struct frame_reader *r;
        size_t n_fed = 0, plain_at = 0, piece;
        int result = FRAME_AGAIN;

        if (n_data == 0 || frame_reader_new(data[0] & 1, &r) < 0)
                return 0;
        piece = (size_t)1 << (data[0] % 18);
        data++;
        n_data--;
        while (n_fed < n_data && result == FRAME_AGAIN) {
                size_t n = n_data - n_fed < piece ? n_data - n_fed : piece, n_taken;

                n_taken = frame_reader_feed(r, data + n_fed, n);
                require(n_taken > 0 && n_taken <= n);
                n_fed += n_taken;
                result = compare(r, data, n_fed, &plain_at);
        }
        frame_reader_free(r);
        return 0;
}
