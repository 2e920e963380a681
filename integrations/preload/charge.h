/* Charges of what the driver gives to this process directly; see bfc_charge().
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A charge is made in steps: what is charged and not in use is the GPU's room, from which small requests are taken without
 * a call of the daemon. */
#ifndef BFC_PRELOAD_CHARGE_H
#define BFC_PRELOAD_CHARGE_H

#include "integrations/preload/broker.h"

/* Before the driver is asked. 0, or an error of bfc_charge(); -ENOTSUP: there is nothing that charges. */
int charge_take(struct gpu *gpu, size_t n_bytes);

/* charge_take() without a call of the daemon, and without IN_CALL. False: there is less room. */
bool charge_take_room(struct gpu *gpu, size_t n_bytes);

/* The driver has it back. */
void charge_give(struct gpu *gpu, size_t n_bytes);

/* So much more, or less, of what is charged are contexts: after charge_take(), and before charge_give(). */
void charge_add_contexts(struct gpu *gpu, int64_t n_bytes);

/* False: there was none. */
bool charge_give_room(struct gpu *gpu);

/* A block was refused with r. True: room was given back, and it can be tried again. */
bool charge_makes_room(struct gpu *gpu, int r);

#endif
