/* Whether a device has returned memory that was released: by its free bytes, before and after.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_DEVICE_CUDA_RETURN_H
#define BFC_DEVICE_CUDA_RETURN_H

#include <stdbool.h>
#include <stdint.h>

/* For memory that returns late. Zero-initialised but for the period. */
struct cuda_wait_budget {
        bool gave_up;      /* until a check finds memory again */
        int64_t period_ms; /* when it began */
        int64_t waited_ms; /* in this period */
};
struct cuda_wait_budget cuda_wait_budget_new(void);

/* The device's free bytes; an error of the device. */
typedef int (*cuda_free_bytes_fn)(void *device, uint64_t *ret_free);

/* 0: n_bytes have returned since n_free_before. -EBUSY: they are unreclaimed. -ENODEV, -ENOTRECOVERABLE: as the
 * device says. */
int cuda_wait_for_return(struct cuda_wait_budget *p, cuda_free_bytes_fn look, void *device,
                         uint64_t n_free_before, uint64_t n_bytes);

#endif
