/* Keys of bfcctl top, as in htop.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CTL_TOP_KEYS_H
#define BFC_CTL_TOP_KEYS_H

#include <stdint.h>

#include "ctl/top_model.h"

/* A key is a character of Unicode, or one of these. */
enum top_key {
        TOP_KEY_UP = 0x110000,
        TOP_KEY_DOWN,
        TOP_KEY_LEFT,
        TOP_KEY_RIGHT,
        TOP_KEY_PAGE_UP,
        TOP_KEY_PAGE_DOWN,
        TOP_KEY_HOME,
        TOP_KEY_END,
        TOP_KEY_TAB,
        TOP_KEY_BACK_TAB,
        TOP_KEY_ENTER,
        TOP_KEY_ESCAPE,
        TOP_KEY_BACKSPACE,
        TOP_KEY_F1,
        TOP_KEY_F2,
        TOP_KEY_F3,
        TOP_KEY_F4,
        TOP_KEY_F5,
        TOP_KEY_F6,
        TOP_KEY_F7,
        TOP_KEY_F8,
        TOP_KEY_F9,
        TOP_KEY_F10,
};

/* Applies a key. TOP_QUIT: the user wants to end. TOP_READ: another view or interval, so that a sample is
 * wanted now. -ENOMEM. */
enum { TOP_DONE, TOP_QUIT, TOP_READ };
int top_key(struct top *t, uint32_t key);

/* amount_time() between TOP_MIN_MS and TOP_MAX_MS. False: it is none. */
bool top_read_interval(const char *text, unsigned *ret_ms);

#endif
