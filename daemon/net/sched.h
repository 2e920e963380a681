/* Scheduling classes: members of one class share its turns.
 *
 * The sessions of a lease are one class, those of a tenant without a lease another, those of admins a third, those
 * of monitors a fourth, those of schedulers a fifth. Before the hello each user's connections to the client socket are a class.
 * The pending connections of a listening socket are a class, too; those of the client socket and of all sockets of leases are
 * one. Classes with work take turns, one member's turn each. So a class with many members
 * delays itself, and no other class.
 *
 * Classes are in groups. A group counts as one class among the others of its own group, and its classes use its turns one
 * after the other. All classes of a tenant are a group, and so are all unauthenticated classes (before the hello, or not
 * accepted; not those of admins). Of the latter those before the hello are a group, in which the users that match
 * the same tenant first are a group, and those that match none are one. So a user with many uids delays the hello of another
 * tenant by a turn for each of its own; and half of these turns accept connections. While more sockets have pending ones, each has as many of the turns as the hellos.
 *
 * After expensive work a class, or its group, owes for some time (sched_owe()): it gives way to those that do not, and has
 * turns only when the kernel has just been asked for events. So a class with cheap turns waits for the end of one
 * expensive turn, and not for one of each other class. Work is charged by what it was and not by the time that it
 * took: this would include the time in which the processor worked for others.
 *
 * All sessions of a tenant share one debt, whatever their leases. So do all unauthenticated connections, of whichever
 * user; the sessions of admins; those of monitors; and those of schedulers. A tenant that comes begins with the longest debt of those that
 * have left, as it may be one of them. A debt ends SCHED_DEBT_MAX_NS after the last charge at the latest. But who shares
 * one has to wait for as long after each charge of another, while others without debt have turns.
 *
 * Invariant: a class is in its group's list of due classes exactly if one of its members is ready, and a group exactly if
 * one of its classes is due. A class exists as long as it has members, and the group of a tenant as long as it has
 * classes.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_SCHED_H
#define BFCD_SCHED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>
#include <sys/types.h>

#include "daemon/base/role.h"

/* Charges: several times what the work takes. With less, the debts of several classes end together, and a cheap turn waits
 * for an expensive one of each of them. */
#define SCHED_ACCEPT_NS   50000u
#define SCHED_HELLO_NS    100000u
#define SCHED_END_NS      200000u /* of a connection */
#define SCHED_DROP_NS     200000u /* of some of what it had not read */
#define SCHED_LOOK_NS     100000u /* of a request that looks at many objects */
#define SCHED_DEBT_MAX_NS 800000u /* the charges of a few ends */

#define SCHED_LOOKS 16u /* at most as many classes are asked whether they owe */

struct tenant;
TAILQ_HEAD(sched_class_list, class);
TAILQ_HEAD(sched_ready, sched_member);

enum sched_kind {
        SCHED_CONNECTIONS,
        SCHED_PENDING, /* on a listening socket, not accepted yet */
        SCHED_HELLO,   /* of clients, before it */
};

struct sched_key {
        const struct tenant *tenant; /* before the hello: which the process would get; NULL: none */
        uint64_t lease;              /* of the tenant: a number of the session's lease; 0: it has none */
        uid_t uid;                   /* before the hello */
        enum role role;
        enum sched_kind kind;
};

/* A class: the members with one key, which share its turns. Or a group of classes (is_group), which has turns as one class. */
struct class
{
        struct sched_key key;
        struct class *group; /* NULL: it is the root */
        bool is_group;
        bool is_fixed;               /* a group that stays without classes */
        size_t n_members;            /* of a class */
        uint64_t owes_until_ns;      /* directly below the root */
        size_t n_classes;            /* of a group; without fixed ones */
        struct sched_ready ready;    /* of a class */
        struct sched_class_list due; /* of a group: its classes with work */
        TAILQ_ENTRY(class) of_due;
};

struct sched {
        struct class root, unauthenticated, hellos; /* the groups that are fixed */
        void *classes;                              /* the others: a tree (tsearch(3)), by group and key */
        uint64_t now_ns;                            /* of the last sched_next() */
        uint64_t left_owing_until_ns;               /* the longest debt of the tenants that have left */
};

/* Embedded in a connection, or a listener. */
struct sched_member {
        struct class *class;
        void (*turn)(struct sched_member *m);
        bool is_ready;
        TAILQ_ENTRY(sched_member) link;
};

void sched_init(struct sched *all);

/* Moves the member from its class, if it has one, to the class of the key. -ENOMEM: nothing changes. */
int sched_join(struct sched *all, struct sched_member *m, const struct sched_key *key);
void sched_leave(struct sched *all, struct sched_member *m);

/* The member has work, or none any more. Idempotent. */
void sched_ready(struct sched_member *m);
void sched_idle(struct sched_member *m);

/* The member whose turn it is, at now_ns of a monotonic clock. It is no longer ready, and its class has its next turn
 * after the others. `owing`: also one whose class owes, if there is no other; for directly after the kernel was asked.
 * NULL: no turn is due, or those that are have to wait for that. */
struct sched_member *sched_next(struct sched *all, uint64_t now_ns, bool owing);

/* The member's class, or its group, owes for n_ns more, though for SCHED_DEBT_MAX_NS at most. To be called after the work,
 * with the time then: a debt that began with it would be over at its end. */
void sched_owe(struct sched_member *m, uint64_t now_ns, uint64_t n_ns);

/* Turns for as long as a slice from now_ns on: new events wait that long at most, and for one turn. To be called directly
 * after the kernel was asked for events. */
void sched_run(struct sched *all, uint64_t now_ns, uint64_t slice_ns);

#endif
