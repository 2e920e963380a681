/* Connections that have not said hello, and which of them is closed when a place is needed.
 *
 * Places are few. A user has at most CROWD_OF_USER of them, all users that no tenant names have at most
 * CROWD_OUTSIDERS, so the rest is always free for users that a tenant names. Where a new connection finds no
 * place, the user with the most connections among those that may give way loses its oldest one. Of users with
 * equally many, the one with the oldest connection loses it. An outsider's connection never makes one of a named
 * user give way.
 *
 * Invariant: a user is in the list exactly if it has members, and these are in the order in which they came.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_CROWD_H
#define BFCD_CROWD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>
#include <sys/types.h>

#define CROWD_PLACES    1024u
#define CROWD_OUTSIDERS 512u
#define CROWD_OF_USER   128u /* a job of as many processes may begin at once */

struct crowd_user;
TAILQ_HEAD(crowd_users, crowd_user);
TAILQ_HEAD(crowd_members, crowd_member);

/* Inside a connection. */
struct crowd_member {
        struct crowd_user *user; /* NULL: it is not in the crowd */
        uint64_t number;         /* the lower, the older */
        TAILQ_ENTRY(crowd_member) link;
};

/* One uid; a uid has two where only some of its processes are named by a tenant. */
struct crowd_user {
        uid_t uid;
        bool is_named;
        size_t n_members;
        struct crowd_members members; /* the oldest first */
        TAILQ_ENTRY(crowd_user) link;
};

struct crowd {
        struct crowd_users users; /* at most as many as there are places */
        size_t n_members[2];      /* outsiders, named */
        uint64_t n_ever;
};

void crowd_init(struct crowd *crowd);

/* Before one more member of this user. 0: there is a place. 1: *ret_user is to lose one first. -EUSERS: there is
 * no place, and no user that would have to give way. */
int crowd_look(const struct crowd *crowd, uid_t uid, bool is_named, struct crowd_user **ret_user);

int crowd_join(struct crowd *crowd, struct crowd_member *m, uid_t uid, bool is_named); /* -ENOMEM */
void crowd_leave(struct crowd *crowd, struct crowd_member *m);                         /* also twice */

#endif
