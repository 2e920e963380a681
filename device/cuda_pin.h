/* Host extents that the daemon has registered with CUDA, so that a GPU copies to and from them directly.
 *
 * Each GPU has its own mapping and registration of an extent, made by its first copy. So none depends on
 * another GPU's context. The processor never touches such a mapping: a client could have removed its pages.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_DEVICE_CUDA_PIN_H
#define BFC_DEVICE_CUDA_PIN_H

#include <pthread.h>
#include <stdbool.h>

#include "device/cuda_driver.h"
#include "device/device.h"
#include "device/pins.h"

/* A GPU, by which extents are registered. cuda_pins_drop() before it is freed. */
struct cuda_pinner {
        struct pinner pinner; /* first: it is cast */
        const struct cuda_context *context;
        pthread_mutex_t *one_call; /* held whenever the driver is called */
};

void cuda_pinner_init(struct cuda_pinner *p, const struct cuda_context *context, pthread_mutex_t *one_call);

/* The mapping of a host extent, registered at the first call. NULL: the extent could not be registered, which
 * is noted in *count and not tried again. -ENODEV: the device is lost. one_call is held, and the context
 * current. */
int cuda_pin(struct cuda_pinner *p, const struct device_extent *host, struct device_pins *count, void **ret);

/* Drops all registrations by this GPU. one_call is held. has_context: it is current; else it is lost, and the
 * registrations end with it. */
void cuda_pins_drop(struct cuda_pinner *p, bool has_context);

#endif
