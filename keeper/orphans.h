/* Keepers of a bfcd that was killed: the kernel takes a while to release their memory, and until then a device looks as if
 * others used it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KEEPER_ORPHANS_H
#define KEEPER_ORPHANS_H

/* Waits until those of this process's user have ended, and not longer than timeout_ms in all. */
void keeper_await_orphans(int timeout_ms);

#endif
