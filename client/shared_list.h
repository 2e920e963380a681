/* The list of a client's shared blocks. The client's lock is held.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_SHARED_LIST_H
#define BFC_CLIENT_SHARED_LIST_H

#include <bfcclient.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Invariant: n_leaving <= n_refs, n_refs > 0; the table of blocks has ptr with this id. */
struct shared_block {
        struct shared_block *next;
        const void *ptr;
        uint64_t block_id;
        uint32_t n_refs;
        uint32_t n_leaving; /* of these */
        bool is_asked;      /* to be published, and not answered */
        bool is_read_only;  /* attached so */
};

/* As the daemon knows it. */
struct shared_count {
        uint64_t block_id;
        uint32_t count;
};

bool shared_has(const bfc_client *client, const void *ptr);
bool shared_is_read_only(const bfc_client *client, const void *ptr);

/* NULL: it is not shared. */
struct shared_block *shared_find(const bfc_client *client, const void *ptr);
struct shared_block *shared_find_id(const bfc_client *client, uint64_t block_id);

/* With one reference. -ENOMEM. */
int shared_add(bfc_client *client, const void *ptr, uint64_t block_id);
void shared_remove(bfc_client *client, struct shared_block *s);

/* Forgets all. The lock is not needed. */
void shared_clear(bfc_client *client);

/* How many the daemon knows as shared; lists the first so many. */
size_t shared_list(const bfc_client *client, struct shared_count *ret, size_t max);

#endif
