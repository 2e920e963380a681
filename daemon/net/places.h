/* Places of connections that are few: of clients before their hello, of monitors, and of schedulers. And which connection is closed
 * when one is needed.
 *
 * Connections whose processes match the same tenant are a class, and those that match none are another. So a user with
 * many uids has no more than its tenant. Within a class users are counted, so that a tenant of many users is shared.
 *
 * If there is no place for a new connection, the class with the most connections loses one: one of the user that
 * has the most there, which the caller chooses. Among users with equally many, the one that has had as many for the longest time loses it.
 *
 * Places before the hello are taken for a short time. A user with max_of_user of them loses one of its own. Users
 * that match no tenant have at most max_unmatched together, lose theirs first, and never displace others.
 *
 * Lasting places are kept for as long as the connection exists. A displaced client may connect again. So a new connection
 * is refused if its user has max_of_user, or where the two would displace each other in turn: another class loses a place
 * only if it has at least two more, and so does another user of the class, except for the first one of a user.
 *
 * What a new connection costs does not grow with the number of users.
 *
 * Invariant: a class is in the list exactly if it has members, and a user in its class and in the tree exactly if it has
 * some; these are in the order of their arrival.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_PLACES_H
#define BFCD_PLACES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>
#include <sys/types.h>

#define PLACES_OF_USER 128u /* at most */

struct tenant;
TAILQ_HEAD(places_classes, places_class);
TAILQ_HEAD(places_users, places_user);
TAILQ_HEAD(places_members, places_member);

struct places_rules {
        size_t max;
        size_t max_of_user;
        size_t max_unmatched; /* not of lasting ones */
        bool are_lasting;
};

extern const struct places_rules places_before_hello, places_of_monitors;

/* Embedded in a connection. */
struct places_member {
        struct places_user *user; /* NULL: it has no place */
        TAILQ_ENTRY(places_member) link;
};

/* A uid of a class. */
struct places_user {
        const struct tenant *tenant; /* of the class */
        uid_t uid;
        struct places_class *class;
        size_t n_members;
        struct places_members members; /* the oldest first */
        TAILQ_ENTRY(places_user) link;
};

struct places_class {
        struct places *places;
        const struct tenant *tenant;                   /* NULL: its users match none */
        size_t n_members, n_most;                      /* of all its users, and of one */
        struct places_users users[PLACES_OF_USER + 1]; /* by n_members */
        TAILQ_ENTRY(places_class) link;
};

struct places {
        const struct places_rules *rules;
        struct places_classes classes;
        void *users; /* a tree (tsearch(3)), by tenant and uid */
        size_t n_members;
};

void places_init(struct places *p, const struct places_rules *rules);

/* Called before a member of this user is added. 0: there is a place. 1: *ret_user must lose one first.
 * -EUSERS: there is no place, and no user that may be displaced. -EDQUOT: the user has as many as it may. */
int places_look(const struct places *p, const struct tenant *tenant, uid_t uid,
                struct places_user **ret_user);

int places_join(struct places *p, struct places_member *m, const struct tenant *tenant,
                uid_t uid);                 /* -ENOMEM */
void places_leave(struct places_member *m); /* idempotent */

#endif
