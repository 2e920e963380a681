/* Attacks on a running daemon, one source file each (attack_NAME.c).
 *
 * An attack runs as one or more processes of another user than the daemon's,
 * which use only what such a user may use. bench-attacks measures what a victim
 * feels beside each; test_attacks shows that the daemon serves others meanwhile
 * and that nothing is lost.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_ATTACK_H
#define BFC_TESTS_ATTACK_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "tests/integration/raw.h"

#define ATTACKER "attacker" /* the tenant of the attacking processes */

/* Shared by the runner and all processes of an attack. */
struct attack_stage {
        char socket[108];        /* of clients */
        pid_t daemon;            /* may change: the runner restarts the daemon */
        _Atomic uint64_t n_acts; /* the attack counts what it does */
        _Atomic uint64_t n_up;   /* processes that have begun */
};

struct attack {
        const char *key;      /* for --only */
        const char *what;     /* one line */
        unsigned n_processes; /* of each user; each runs act() */
        unsigned n_uids;      /* users that no tenant matches; 0: the attacking tenant's user */
        bool is_many; /* the processes are in the attacking tenant's group, and as root act() becomes many users itself */
        void (*act)(struct attack_stage *stage); /* runs until it is killed */
        void (*before_drop)(void); /* as root, before the user changes; sets the groups; NULL: none */
        unsigned n_more_tenants;   /* bench-attacks has so many tenants more in all partitions */
        bool fills_places;         /* its users may have all places of connections that have sent no hello */
        const char *log_line; /* what the daemon logs as a warning or an error because of it; NULL: none */
};

extern const struct attack *const attacks[];
extern const size_t n_attacks;

/* ---- for runners ------------------------------------------------------------ */

#define ATTACKER_UID         4242u /* for runs as root; without root all processes are of this user */
#define ATTACKER_GID         4245u
#define ATTACK_OTHER_UID     50000u /* the first of the users that no tenant matches */
#define ATTACK_MAX_PROCESSES 128u

/* The text of a config, after its sockets, in which a victim, a grower and the attacking tenant
 * share a host device of four partitions, a to d; the caller frees it. NULL: no memory. */
char *attack_config(const struct attack *attack);

/* Shared memory for a stage; NULL on failure. Ends with the process. */
struct attack_stage *attack_stage_new(const char *socket, pid_t daemon);

struct attack_run {
        const struct attack *attack;
        pid_t pids[ATTACK_MAX_PROCESSES]; /* each leads a process group */
        size_t n_pids;
};

/* False: it needs root, because as the victim's user it would displace the victim's own connections before their
 * hello. Prints a line about that. */
bool attack_may_run(const struct attack *attack);

/* Starts the processes; 0 or -errno. Does not wait for n_up. */
int attack_start(const struct attack *attack, struct attack_stage *stage, struct attack_run *ret);
/* Processes of this run that attack_is_up() has to be called by. */
size_t attack_n_processes(const struct attack *attack);
/* Kills the process groups and reaps their leaders. */
void attack_stop(struct attack_run *run);

/* ---- for attacks ------------------------------------------------------------ */

/* For act(): says that the attack has begun; call it once per process. */
void attack_is_up(struct attack_stage *stage);
void attack_count(struct attack_stage *stage, uint64_t n);

/* Connects and says hello as the attacking tenant; tries again until it is accepted. */
struct raw *attack_session(const struct attack_stage *stage);

/* Connects without a hello; tries again until it works. The caller owns the fd. */
int attack_socket(const struct attack_stage *stage);

#endif
