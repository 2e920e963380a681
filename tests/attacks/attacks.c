/* The list of attacks, and what they share; see attack.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/attacks/attack.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

extern const struct attack attack_none;
extern const struct attack attack_acks;
extern const struct attack attack_asks;
extern const struct attack attack_collapse;
extern const struct attack attack_groups;
extern const struct attack attack_inode;
extern const struct attack attack_linger;
extern const struct attack attack_logs;
extern const struct attack attack_many_silent;
extern const struct attack attack_memfd;
extern const struct attack attack_page;
extern const struct attack attack_park;
extern const struct attack attack_punch;
extern const struct attack attack_refill;
extern const struct attack attack_refusals;
extern const struct attack attack_sessions;
extern const struct attack attack_silent;
extern const struct attack attack_slow_write;
extern const struct attack attack_uids;
extern const struct attack attack_unread;
extern const struct attack attack_urgent;
extern const struct attack attack_waiters;

const struct attack *const attacks[] = {
        &attack_none,     &attack_acks,    &attack_asks,       &attack_collapse,    &attack_groups,
        &attack_inode,    &attack_linger,  &attack_logs,       &attack_many_silent, &attack_memfd,
        &attack_page,     &attack_park,    &attack_punch,      &attack_refill,      &attack_refusals,
        &attack_sessions, &attack_silent,  &attack_slow_write, &attack_uids,        &attack_unread,
        &attack_urgent,   &attack_waiters,
};
const size_t n_attacks = sizeof(attacks) / sizeof(attacks[0]);

/* ---- for runners ------------------------------------------------------------ */

char *attack_config(const struct attack *attack)
{
        unsigned uid = (unsigned)geteuid();
        char *text = NULL;
        size_t n_text;
        FILE *out = open_memstream(&text, &n_text);

        if (!out)
                return NULL;
        fprintf(out,
                "timeouts: {quarantine: 1s}\n"
                "devices:\n"
                "  - id: host\n"
                "    size: 1GiB\n"
                "    partitions:\n"
                "      - {name: a, limit: 256MiB, growth: on-demand}\n"
                "      - {name: b, limit: 256MiB, growth: on-demand}\n"
                "      - {name: c, limit: 256MiB, growth: on-demand}\n"
                "      - {name: d, limit: 256MiB, growth: on-demand}\n"
                "tenants:\n"
                "  - {name: victim, match: {uid: %u}, quotas: [{partition: a, limit: 32MiB, reserve: 32MiB}]}\n"
                "  - {name: grower, match: {uid: %u}, quotas: [{partition: a, limit: 32MiB, reserve: 32MiB}]}\n"
                "  - name: " ATTACKER "\n"
                "    match: {uid: %u, gid: %u}\n"
                "    leases: self\n"
                "    quotas: [{partition: a, limit: 192MiB}, {partition: b, limit: 192MiB},\n"
                "             {partition: c, limit: 192MiB}, {partition: d, limit: 192MiB}]\n",
                uid, uid, uid == 0 ? ATTACKER_UID : uid, ATTACKER_GID);
        for (unsigned i = 0; i < attack->n_more_tenants; i++)
                fprintf(out, "  - {name: more%u, match: {uid: %u}, quotas: [%s, %s, %s, %s]}\n", i,
                        ATTACK_OTHER_UID + i, "{partition: a, max_blocks: 100}",
                        "{partition: b, max_blocks: 100}", "{partition: c, max_blocks: 100}",
                        "{partition: d, max_blocks: 100}");
        return fclose(out) == 0 ? text : NULL;
}

struct attack_stage *attack_stage_new(const char *socket, pid_t daemon)
{
        struct attack_stage *stage =
                mmap(NULL, sizeof(*stage), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

        if (stage == MAP_FAILED)
                return NULL;
        snprintf(stage->socket, sizeof(stage->socket), "%s", socket);
        stage->daemon = daemon;
        return stage;
}

static _Noreturn void run_process(const struct attack *attack, struct attack_stage *stage, size_t i,
                                  pid_t parent)
{
        uid_t uid = attack->n_uids > 0 ? ATTACK_OTHER_UID + (uid_t)(i % attack->n_uids) : ATTACKER_UID;
        int null = open("/dev/null", O_RDWR | O_CLOEXEC);

        (void)setpgid(0, 0);
        for (int fd = 0; fd <= 2; fd++)
                (void)dup2(null, fd);
        signal(SIGCHLD, SIG_DFL);
        if (attack->before_drop)
                attack->before_drop();
        if (attack->is_many && geteuid() == 0) {
                if (setgroups(1, &(gid_t){ ATTACKER_GID }) < 0)
                        _exit(1);
        } else if (geteuid() == 0 &&
                   ((!attack->before_drop && setgroups(0, NULL) < 0) || setgid(uid) < 0 || setuid(uid) < 0))
                _exit(1);
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* after setuid(), which clears it */
        if (getppid() == parent)
                attack->act(stage);
        _exit(0);
}

size_t attack_n_processes(const struct attack *attack)
{
        size_t n = attack->n_processes * (attack->n_uids > 0 ? attack->n_uids : 1);

        return n < ATTACK_MAX_PROCESSES ? n : ATTACK_MAX_PROCESSES;
}

bool attack_may_run(const struct attack *attack)
{
        if (!attack->fills_places || geteuid() == 0)
                return true;
        printf("# skipped: only root can run the attack '%s' as another user than the victim\n", attack->key);
        return false;
}

int attack_start(const struct attack *attack, struct attack_stage *stage, struct attack_run *ret)
{
        pid_t parent = getpid();

        *ret = (struct attack_run){ .attack = attack };
        for (size_t i = 0; i < attack_n_processes(attack); i++) {
                pid_t pid = fork();

                if (pid < 0) {
                        int r = -errno;

                        attack_stop(ret);
                        return r;
                }
                if (pid == 0)
                        run_process(attack, stage, i, parent);
                (void)setpgid(pid, pid);
                ret->pids[ret->n_pids++] = pid;
        }
        return 0;
}

void attack_stop(struct attack_run *run)
{
        for (size_t i = 0; i < run->n_pids; i++)
                kill(-run->pids[i], SIGKILL);
        for (size_t i = 0; i < run->n_pids; i++)
                (void)waitpid(run->pids[i], NULL, 0);
        run->n_pids = 0;
}

/* ---- for attacks ------------------------------------------------------------ */

void attack_is_up(struct attack_stage *stage)
{
        atomic_fetch_add(&stage->n_up, 1);
}

void attack_count(struct attack_stage *stage, uint64_t n)
{
        atomic_fetch_add_explicit(&stage->n_acts, n, memory_order_relaxed);
}

struct raw *attack_session(const struct attack_stage *stage)
{
        struct raw *raw;

        while (!(raw = raw_connect(stage->socket, ATTACKER)))
                usleep(1000);
        return raw;
}

int attack_socket(const struct attack_stage *stage)
{
        struct sockaddr_un address = { .sun_family = AF_UNIX };

        memcpy(address.sun_path, stage->socket, sizeof(address.sun_path));
        for (;;) {
                int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

                if (fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof(address)) == 0)
                        return fd;
                if (fd >= 0)
                        close(fd);
                usleep(1000);
        }
}
