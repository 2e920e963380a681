/* TFRecord; see tfrecord.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctl/tfrecord.h"

#include <isa-l/crc.h>

static void put_le(uint8_t *to, unsigned n_bytes, uint64_t number)
{
        for (unsigned i = 0; i < n_bytes; i++)
                to[i] = (uint8_t)(number >> 8 * i);
}

uint32_t tfrecord_crc32c(const void *data, size_t n_bytes)
{
        /* The library leaves out the inversions, and does not write. */
        return ~crc32_iscsi((unsigned char *)(uintptr_t)data, (int)n_bytes, UINT32_MAX);
}

uint32_t tfrecord_mask(uint32_t crc)
{
        return (crc >> 15 | crc << 17) + UINT32_C(0xa282ead8);
}

static uint64_t get_le(const uint8_t *at, unsigned n_bytes)
{
        uint64_t number = 0;

        while (n_bytes-- > 0)
                number = number << 8 | at[n_bytes];
        return number;
}

bool tfrecord_read_head(const uint8_t head[static TFRECORD_HEAD_BYTES], size_t *ret_bytes)
{
        uint64_t n_bytes = get_le(head, 8);

        if (n_bytes > TFRECORD_MAX_BYTES || get_le(head + 8, 4) != tfrecord_mask(tfrecord_crc32c(head, 8)))
                return false;
        *ret_bytes = n_bytes;
        return true;
}

void tfrecord_seal(uint8_t *frame, size_t n_bytes)
{
        uint8_t *data = frame + TFRECORD_HEAD_BYTES;

        put_le(frame, 8, n_bytes);
        put_le(frame + 8, 4, tfrecord_mask(tfrecord_crc32c(frame, 8)));
        put_le(data + n_bytes, 4, tfrecord_mask(tfrecord_crc32c(data, n_bytes)));
}
