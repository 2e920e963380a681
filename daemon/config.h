/* The configuration: one YAML file, plus conf.d/<name>.yaml beside it (tenants
 * only), read once into plain structs. Every error is reported, with file, line
 * and column; a config with an error is never used. No I/O but the files.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_CONFIG_H
#define BFCD_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

#define CONFIG_NAME_MAX     63                  /* bytes of a name: letters, digits, '_', '-', '.' */
#define CONFIG_GRANULARITY  (UINT64_C(2) << 20) /* limits and sizes are multiples: 2 MiB */
#define CONFIG_MAX_SESSIONS 65536
#define CONFIG_MAX_TENANTS  4096

enum config_growth { CONFIG_GROWTH_ON_DEMAND, CONFIG_GROWTH_PREALLOCATE };
enum config_share { CONFIG_SHARE_FD, CONFIG_SHARE_CUDA_IPC };

#define CONFIG_UUID_BYTES 16u

struct config_partition {
        char *name; /* unique over all devices */
        uint64_t limit_bytes;
        enum config_growth growth;
        enum config_share share;
        size_t device; /* index into config.devices */
};

struct config_device {
        char *id; /* "host", "cuda:0", "GPU-<uuid>", "MIG-<uuid>" */
        bool is_cuda;
        uint8_t uuid[CONFIG_UUID_BYTES]; /* of a GPU */
        uint64_t size_bytes;             /* a GPU's: as it says */
        uint64_t headroom_bytes;
};

struct config_quota {
        size_t partition; /* index into config.partitions */
        uint64_t limit_bytes;
        uint64_t reserve_bytes; /* guaranteed; 0: none */
        uint32_t max_sessions;
        uint32_t max_blocks;
};

struct config_tenant {
        char *name;
        uid_t *uids; /* user names resolved */
        size_t n_uids;
        gid_t *gids; /* group names resolved */
        size_t n_gids;
        bool names_ids; /* it says who; that nobody is known of those matches nobody */
        char **units;   /* patterns: narrow it to processes in one of these units */
        size_t n_units;
        char **cgroups; /* and in or below one of these control groups */
        size_t n_cgroups;
        struct config_quota *quotas;
        size_t n_quotas;
};

struct config_socket {
        char *path;
        mode_t mode;
        gid_t group; /* (gid_t)-1: unchanged */
};

struct config {
        struct config_socket socket;
        struct config_socket admin_socket;
        uint64_t reclaim_timeout_ms; /* part of the grammar, see bfcd.yaml(5) */
        uint64_t release_timeout_ms;
        uint64_t quarantine_timeout_ms;
        uint64_t read_timeout_ms;
        uint32_t max_sessions;
        bool has_patterns; /* some tenant has units or cgroups */
        struct config_device *devices;
        size_t n_devices;
        struct config_partition *partitions;
        size_t n_partitions;
        struct config_tenant *tenants;
        size_t n_tenants;
        ssize_t default_tenant; /* index of the tenant for users whom none matches; -1: refuse them */
};

/* What a config must know of a GPU that it names. */
struct config_gpu {
        uint8_t uuid[CONFIG_UUID_BYTES];
        uint64_t bytes_total;
        uint64_t bytes_free;      /* now */
        bool lacks_fd, lacks_ipc; /* ways of sharing that it cannot do */
};

/* Who knows the machine's GPUs. */
struct config_machine {
        /* A negative errno with a sentence, "ID: what is missing", for people. */
        int (*look)(void *userdata, const char *id, struct config_gpu *ret, char *ret_sentence,
                    size_t n_sentence);
        void *userdata;
        /* The config is about to be served: what it needs at the start must be free
         * now. If not, too little is a warning, and costs are warned of. */
        bool serves;
        /* A daemon before left memory, which is this one's again: how much of what is not free
         * that is nobody knows yet, so too little is a warning. */
        bool succeeds;
        /* The config that is being served, whose successor is read: what cannot change
         * under it is an error, and GPUs are what they were found to be. NULL at the
         * start. A socket whose path the command line gives may have any here. */
        const struct config *running;
        bool socket_is_given, admin_socket_is_given;
};

/* Reads path and, where the folder conf.d stands beside it, the files
 * conf.d/<name>.yaml in name order. Every error goes to `errors` as one line
 * "FILE:LINE:COLUMN: what is wrong; what would be right". -EINVAL: there were
 * errors. -ENOENT and the like: the file could not be read (said in `errors`
 * too); a file of conf.d that cannot be read is one of the errors. -ENODEV: all
 * that is wrong is that the machine lacks a GPU, or memory in it, now; said in
 * `errors` too. -ENOMEM: said nowhere. On success *ret is owned by the caller.
 * Warnings (as "FILE:LINE:COLUMN: warning: ...") go there too and do not fail.
 * machine may be NULL: then there are no GPUs. It is asked once for each GPU
 * that is named, and not kept. */
int config_load(const char *path, const struct config_machine *machine, FILE *errors, struct config **ret);

/* The same from memory, as a file of that name without conf.d; for tests and
 * fuzzers. */
int config_parse(const char *name, const char *text, size_t n_bytes, const struct config_machine *machine,
                 FILE *errors, struct config **ret);

/* What differs between two configs of the same devices and partitions, a sentence on a
 * line each; not tenants and their quotas, of which the broker knows more. */
void config_diff(const struct config *from, const struct config *to, FILE *f);

/* The same processes are this tenant. */
bool config_match_is_alike(const struct config_tenant *a, const struct config_tenant *b);

/* Bytes as a config would have them, into buf. */
const char *config_size(uint64_t n_bytes, char *buf, size_t n_buf);

/* The command line's word on where the sockets are; NULL: as it was. Each path
 * is held to the config's rules. -EINVAL: it is not, or the two are the same,
 * said in `errors` as a line "--socket: what is wrong; what would be right".
 * -ENOMEM. On failure nothing has changed. */
int config_set_sockets(struct config *c, const char *socket, const char *admin_socket, FILE *errors);

struct config *config_free(struct config *c); /* takes NULL */

/* The configuration in force as YAML with every default spelled out; malloc()ed,
 * NULL when out of memory. Parsing it again yields the same configuration. */
char *config_format(const struct config *c);

#endif
