/* The requests of a keeper: makes, shares, copies and destroys extents of one device, and keeps fds for the next caller.
 *
 * The caller is trusted with the device and not with this process: a message is checked before anything changes, and
 * names that are unknown are refused. One thread, and one for NVML.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KEEPER_SERVE_H
#define KEEPER_SERVE_H

#include <stdbool.h>

struct keeper;

/* For the device with this id, which is borrowed, and opened at the first hello. NULL: no memory. */
struct keeper *keeper_new(const char *id);
struct keeper *keeper_free(struct keeper *k); /* destroys all that it has; takes NULL */

/* Serves until the caller has gone, or asks for the end. Returns 0 then; -errno: the socket failed, or the caller sent no such
 * message. What a caller made or kept stays for the next one. */
int keeper_serve(struct keeper *k, int fd);

bool keeper_is_over(const struct keeper *k); /* the end was asked for */

#endif
