/* The requests of a keeper: makes, shares, copies and destroys extents of one device.
 *
 * The caller is trusted with the device and not with this process: a message is checked before anything changes, and
 * names that are unknown are refused. One thread.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KEEPER_SERVE_H
#define KEEPER_SERVE_H

#include "device/device.h"

/* Opens the device with this id at the caller's hello, and serves until the caller has gone. Returns 0 then; -errno: the
 * socket failed, or the caller sent no such message. What was made is destroyed then. */
int keeper_serve(int fd, const char *id);

#endif
