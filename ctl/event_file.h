/* An event file of TensorBoard, which another process may read while it grows.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CTL_EVENT_FILE_H
#define BFC_CTL_EVENT_FILE_H

#include "ctl/tensorboard.pb-c.h"

#define EVENT_FILE_ERROR_MAX 5120 /* bytes of a sentence; it may have a path */

struct event_file;

/* Makes the folder where it is missing, and in it a new file with the first event. On failure the sentence is in
 * `error`, here and below. */
int event_file_create(const char *folder, double wall_time, struct event_file **ret,
                      char error[static EVENT_FILE_ERROR_MAX]);

/* The largest step that ends an event file of the folder; -1: there is none. Files that cannot be read are left out. */
int64_t event_file_last_step(const char *folder);

const char *event_file_path(const struct event_file *f);

/* One more event, which is in the file after the next event_file_flush(). -ENOMEM, -EMSGSIZE. */
int event_file_add(struct event_file *f, const Tensorboard__Event *event);

/* Writes the added events. If it fails, the file ends after the last flush that succeeded, or the sentence says that
 * it ends with an incomplete record. */
int event_file_flush(struct event_file *f, char error[static EVENT_FILE_ERROR_MAX]);

/* Closes the file; what was not flushed is lost. Network file systems report some errors only here. */
int event_file_close(struct event_file *f, char error[static EVENT_FILE_ERROR_MAX]);

#endif
