/* Connections before their hello, and which of them is closed when a place is needed.
 *
 * Places are few. A user has at most UNAUTH_MAX_OF_USER of them. All users that no tenant names have at
 * most UNAUTH_MAX_UNNAMED, so the rest is always available to named users. If there is no place for a new
 * connection, the user with the most connections among those that may be displaced loses its oldest one.
 * Among users with equally many, the one with the oldest connection loses it. An unnamed user never
 * displaces a named one.
 *
 * Invariant: a user is in the list exactly if it has members, and these are in the order of their
 * arrival.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_UNAUTH_H
#define BFCD_UNAUTH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>
#include <sys/types.h>

#define UNAUTH_MAX         1024u
#define UNAUTH_MAX_UNNAMED 512u
#define UNAUTH_MAX_OF_USER 128u /* a job may start this many processes at once */

struct unauth_user;
TAILQ_HEAD(unauth_users, unauth_user);
TAILQ_HEAD(unauth_members, unauth_member);

/* Embedded in a connection. */
struct unauth_member {
        struct unauth_user *user; /* NULL: not counted here */
        uint64_t number;          /* a lower one is older */
        TAILQ_ENTRY(unauth_member) link;
};

/* One uid; a uid has two entries if a tenant names only some of its processes. */
struct unauth_user {
        uid_t uid;
        bool is_named;
        size_t n_members;
        struct unauth_members members; /* the oldest first */
        TAILQ_ENTRY(unauth_user) link;
};

struct unauth {
        struct unauth_users users; /* at most as many as places */
        size_t n_members[2];       /* of unnamed users, of named ones */
        uint64_t n_ever;
};

void unauth_init(struct unauth *unauth);

/* Called before a member of this user is added. 0: there is a place. 1: *ret_user must lose one first.
 * -EUSERS: there is no place, and no user that may be displaced. */
int unauth_look(const struct unauth *unauth, uid_t uid, bool is_named, struct unauth_user **ret_user);

int unauth_join(struct unauth *unauth, struct unauth_member *m, uid_t uid, bool is_named); /* -ENOMEM */
void unauth_leave(struct unauth *unauth, struct unauth_member *m);                         /* idempotent */

#endif
