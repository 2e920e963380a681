/* A party: those who share one turn. A tenant's sessions are one, an
 * administrator's another, and before the hello each user's
 * connections, those of users that no tenant names together; pending connections of a socket are one too. Parties that have
 * something to do take turns, one member's turn each; so a crowd waits among
 * itself, and nobody else for it.
 *
 * Strangers, who knock at the clients' socket or have not said hello there, are as
 * one party among the others, and take its turns one party after the other: who
 * comes in is taken in, asked and answered at the price of one neighbour.
 *
 * Invariant: a party is in the list of those that are due (of strangers, in theirs)
 * exactly if one of its members is ready; in the former are the strangers, as one,
 * exactly if one of them is due. A party lives as long as it has members.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_PARTY_H
#define BFCD_PARTY_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/queue.h>
#include <sys/types.h>

struct tenant;
TAILQ_HEAD(party_list, party);
TAILQ_HEAD(party_ready, party_member);

enum party_kind {
        PARTY_CONNECTIONS,
        PARTY_KNOCKING, /* at one of the sockets, not accepted yet */
};

struct party_key {
        const struct tenant *tenant; /* NULL: a user who has not said hello, or operators */
        uid_t uid;                   /* of the former */
        bool admin;
        enum party_kind kind;
};

struct party {
        struct party_key key;
        size_t n_members;
        struct party_ready ready;
        TAILQ_ENTRY(party) of_all, of_due;
};

struct parties {
        struct party_list all;
        struct party_list due;
        struct party_list strangers_due;
        struct party strangers; /* stands for them in the list of the due */
};

/* Inside a connection, or what else takes turns. */
struct party_member {
        struct party *party;
        void (*turn)(struct party_member *m);
        bool is_ready;
        TAILQ_ENTRY(party_member) link;
};

void parties_init(struct parties *all);

/* Out of the party where it was, if it was in one, into that of the key. -ENOMEM: it
 * stays where it was. */
int party_join(struct parties *all, struct party_member *m, const struct party_key *key);
void party_leave(struct parties *all, struct party_member *m);

/* It has something to do, or nothing any more. Twice is as good as once. */
void party_ready(struct parties *all, struct party_member *m);
void party_rest(struct parties *all, struct party_member *m);

/* Whose turn it is: no longer ready, and its party has its next turn after the
 * others. NULL: nobody's. */
struct party_member *party_next(struct parties *all);

#endif
