/* Devices that may be lost while nothing is asked of them: the loop notices the end of a GPU's keeper.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_WATCHED_H
#define BFCD_WATCHED_H

#include "daemon/memory/broker.h"
#include "daemon/net/poller.h"

struct watched;

/* Both are borrowed. NULL: no memory; then calls show what is lost. */
struct watched *watched_new(struct broker *b, struct poller *p);
struct watched *watched_free(struct watched *w); /* before the broker; takes NULL */

#endif
