/* Copies between memfds that other processes may have open.
 *
 * Such a process can punch holes at any time, and where the kernel then has no page a load or store of this
 * process would end it (SIGBUS). So bytes are moved only by system calls, which fail instead.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_DEVICE_HOST_COPY_H
#define BFC_DEVICE_HOST_COPY_H

#include <stdbool.h>
#include <stdint.h>

/* Reads n_bytes at the offset. A hole is read as zeroes, and stays one. -EIO: the file ends before; -errno. */
int host_copy_read(int fd, uint64_t offset, void *ret, uint64_t n_bytes);

/* From one memfd, or any file, to a memfd. The files differ. -EIO: one of them ends before;
 * -ENOMEM; -ECANCELED: *stop (atomic; NULL: none) was set; -errno. Then a part may have been copied. A process that
 * locks pages of `from` delays this: *stop is looked at between short reads. */
int host_copy(int from, uint64_t from_offset, int to, uint64_t to_offset, uint64_t n_bytes, const bool *stop);

#endif
