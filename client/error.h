/* The sentence for a thread's last failure.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_ERROR_H
#define BFC_CLIENT_ERROR_H

/* Keeps the sentence (cut where it is too long) and returns error, so that a
 * failure is one line: return error_set(-EINVAL, "..."). */
int error_set(int error, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* "" when nothing has failed in this thread. */
const char *error_last(void);

#endif
