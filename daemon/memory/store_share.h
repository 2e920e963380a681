/* Places in the store of fds (store.h), which all tenants share.
 *
 * An extent takes a place of its tenant, whether a quota of the config or a lease has it. A tenant is guaranteed a share;
 * beyond that it takes what is not guaranteed to others.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_STORE_SHARE_H
#define BFCD_STORE_SHARE_H

#include <stdbool.h>
#include <stddef.h>

struct store_places {
        size_t n_max; /* SIZE_MAX: nothing is stored */
        size_t n;
        size_t n_promised; /* of the shares, what is not taken */
};

struct store_share {
        struct store_places *places;
        size_t n;
        size_t n_guaranteed;
};

/* Sets how many places are guaranteed. The shares of all together are no more than there are places. */
void store_share_set(struct store_share *s, size_t n_guaranteed);

/* Takes n places; false: there are not as many that are not guaranteed to others, and nothing was taken. s: NULL: true. */
bool store_share_take(struct store_share *s, size_t n);

/* Takes n places for extents that exist, also beyond all bounds; and returns n places. s: NULL: does nothing. */
void store_share_add(struct store_share *s, size_t n);
void store_share_return(struct store_share *s, size_t n);

#endif
