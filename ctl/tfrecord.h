/* TFRecord: the frames of TensorBoard's event files.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A frame is the length of the data (64 bits, little-endian), the masked CRC32C of these 8 bytes, the data, and the
 * masked CRC32C of the data. */
#ifndef BFC_CTL_TFRECORD_H
#define BFC_CTL_TFRECORD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TFRECORD_HEAD_BYTES 12u
#define TFRECORD_TAIL_BYTES 4u
#define TFRECORD_MAX_BYTES  ((size_t)1 << 30) /* of data */

/* CRC-32 with Castagnoli's polynomial. n_bytes: at most TFRECORD_MAX_BYTES. */
uint32_t tfrecord_crc32c(const void *data, size_t n_bytes);

/* A CRC as it is stored: a CRC of data that has CRCs in it would be weak. */
uint32_t tfrecord_mask(uint32_t crc);

/* The length of the data behind a head. False: it is none, or longer than TFRECORD_MAX_BYTES. */
bool tfrecord_read_head(const uint8_t head[static TFRECORD_HEAD_BYTES], size_t *ret_bytes);

/* Fills in the head and the tail around n_bytes of data, which are at frame + TFRECORD_HEAD_BYTES. */
void tfrecord_seal(uint8_t *frame, size_t n_bytes);

#endif
