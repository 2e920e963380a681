/* A process that runs functions for a test, one after another.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * CUDA does not survive fork(), so a test of it is played by several of these:
 * forked before any of them touches the driver, while the test itself never
 * does. They are forks of one program, so a function is sent as its address. */
#ifndef BFC_TESTS_UNIT_PROCESS_H
#define BFC_TESTS_UNIT_PROCESS_H

#include <sys/types.h>

#include "device/device.h"

/* What a function is told, and what it answers. */
struct message {
        int (*run)(struct message *m);
        int result; /* what run() returned; -EPIPE: the process has died */
        int fd;     /* travels along both ways; -1: none; the receiver's */
        uint64_t a, b, c;
        struct device_view view;
        struct device_extent extent;
        struct device_facts facts;
        char text[400];
};

struct process {
        pid_t pid;
        int fd;
};

struct process process_start(void);
/* Sends, waits for the answer; m->result. The fd that is sent stays the
 * caller's; m->fd is what came. */
int process_call(struct process *p, int (*run)(struct message *m), struct message *m);
void process_kill(struct process *p);
int process_end(struct process *p); /* its exit status; a signal is 128 more than its number */

#endif
