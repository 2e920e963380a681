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

enum config_mps { CONFIG_MPS_REFUSE, CONFIG_MPS_ALLOW };

#define CONFIG_UUID_BYTES 16u

struct config_partition {
        char *name; /* unique over all devices */
        uint64_t limit_bytes;
        enum config_growth growth;
        enum config_share share;
        bool clears;    /* clear_on_release */
        bool is_pinned; /* pinned; of the host */
        bool has_node;  /* numa_node is configured; of the host */
        uint32_t node;
        size_t device; /* index into config.devices */
};

/* True: the partition can use standby memory of its device, because its extents are made on demand and
 * have one size. */
static inline bool config_takes_standby(const struct config_partition *p)
{
        return p->growth == CONFIG_GROWTH_ON_DEMAND && p->share == CONFIG_SHARE_FD;
}

struct config_device {
        char *id; /* "host", "cuda:0", "GPU-<uuid>", "MIG-<uuid>" */
        bool is_cuda;
        uint8_t uuid[CONFIG_UUID_BYTES]; /* of a GPU */
        uint64_t size_bytes;             /* of a GPU: from its driver */
        uint64_t headroom_bytes;
        uint64_t standby_bytes; /* kept ready; 0: nothing */
        enum config_mps mps;    /* of a GPU */
        uint64_t context_bytes; /* of a GPU: what a CUDA context is charged that cannot be measured */
};

#define CONFIG_NO_CONTEXTS UINT64_MAX /* `contexts: off`: none is charged */

struct config_quota {
        size_t partition; /* index into config.partitions */
        uint64_t limit_bytes;
        uint64_t reserve_bytes; /* guaranteed; 0: none */
        uint32_t max_sessions;
        uint32_t max_blocks;
        /* Where blocks are parked that were idle for park_idle_ms, when memory is short. NULL: nowhere. */
        char *park_to;
        uint64_t park_idle_ms;
        /* `per`: each control group of the tenant's processes that matches has a lease. NULL: none has. */
        char *per_cgroup;
        uint64_t per_limit_bytes;
        uint64_t per_reserve_bytes;
};

struct config_tenant {
        char *name;
        uint32_t max_sessions; /* the sum of its quotas' */
        bool leases_self;      /* its users make leases without the admin socket */
        uid_t *uids;           /* user names resolved */
        size_t n_uids;
        gid_t *gids; /* group names resolved */
        size_t n_gids;
        char **users; /* the names of the first n_users uids, as the config has them; the others are numbers */
        size_t n_users;
        char **groups; /* the names of the first n_groups gids */
        size_t n_groups;
        bool names_ids; /* user, group, uid or gid is configured; without a known id no process matches */
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
        gid_t group;      /* (gid_t)-1: unchanged */
        char *group_name; /* as the config has it; NULL: it has a number */
};

struct config_records { /* both NULL: the daemon decides, see records_open() */
        char *file;     /* of JSON lines */
        char *journal;  /* the socket of the journal */
};

struct config {
        struct config_socket socket;
        struct config_socket admin_socket;
        struct config_socket monitor_socket;
        struct config_socket lease_socket; /* path: NULL: there is none */
        struct config_records records;
        uint64_t reclaim_timeout_ms; /* `timeouts.*` of the config, in ms */
        uint64_t quarantine_timeout_ms;
        uint32_t max_sessions;
        bool has_patterns; /* some tenant has units or cgroups, or a quota has leases per control group */
        struct config_device *devices;
        size_t n_devices;
        struct config_partition *partitions;
        size_t n_partitions;
        struct config_tenant *tenants;
        size_t n_tenants;
        ssize_t default_tenant; /* index of the tenant for users that match none; -1: they are refused */
};

/* Sessions of the daemon's table that no other tenant can take from this one. These of all tenants together
 * are at most the config's max_sessions. */
uint32_t config_session_share(const struct config *c, const struct config_tenant *t);

/* What a check needs to know of a GPU. */
struct config_gpu {
        uint8_t uuid[CONFIG_UUID_BYTES];
        uint64_t bytes_total;
        uint64_t bytes_free;      /* now */
        bool lacks_fd, lacks_ipc; /* ways of sharing that it cannot do */
};

/* The machine on which a config is checked. */
struct config_machine {
        /* A negative errno with a sentence, "ID: what is missing". */
        int (*look)(void *userdata, const char *admin_socket, const char *id, struct config_gpu *ret,
                    char *ret_sentence, size_t n_sentence);
        /* Called before look() if any GPU of the config allows MPS, once or more. May be NULL. */
        void (*allow_mps)(void);
        /* What this machine lacks for the pages of a host partition, as a clause. 0; -ENODEV: it cannot be served;
         * -ENOTSUP: only with small pages. May be NULL: nothing is lacking. */
        int (*look_pages)(const struct config_partition *p, char *ret_clause, size_t n_clause);
        void *userdata;
        /* The lowest memory limit of the daemon's control group and its parents, to which host memory
         * is charged; 0: there is none. A larger device is a warning. */
        uint64_t group_limit_bytes;
        /* The config is going to be used: the memory that it needs at the start must be free now. In a
         * check too little is a warning, and costly choices cause warnings. */
        bool serves;
        /* Whether the daemon inherits memory from a previous one of this admin socket. The inherited part of the used
         * memory is not known yet, so too little free memory is a warning then. NULL: it never does. */
        bool (*succeeds)(const char *admin_socket);
        /* A reload: the current config. Changes that need a restart are errors, and GPUs have the facts
         * of the start. NULL: no reload. */
        const struct config *running;
        bool is_strict; /* warnings are errors */
};

/* Reads path and, if the folder conf.d exists beside it, the files conf.d/<name>.yaml in name order. Each
 * error is a line in `errors`: "FILE:LINE:COLUMN: what is wrong; what would be right". -EINVAL: there
 * were errors. -ENOENT and similar: the file could not be read (also reported); an unreadable file of
 * conf.d is one of the errors. -ENODEV: the only errors are that the machine lacks a GPU, or memory in
 * it, now (also reported). -ENOMEM: not reported. On success the caller owns *ret. Warnings (as
 * "FILE:LINE:COLUMN: warning: ...") are written there too and do not fail. machine may be NULL: no GPUs.
 * It is asked once for each GPU that is named, and not kept. */
int config_load(const char *path, const struct config_machine *machine, FILE *errors, struct config **ret);

/* Opens the files that config_load() would read, and reports each unreadable one in `errors`. -EACCES:
 * there is one. -ENOMEM. Nothing else is checked. */
int config_try_files(const char *path, FILE *errors);

/* Reads a config from memory, as a file of that name without conf.d; for tests and fuzzers. */
int config_parse(const char *name, const char *text, size_t n_bytes, const struct config_machine *machine,
                 FILE *errors, struct config **ret);

/* The text of a config: the main file, then those of conf.d, in order. */
struct config_text {
        char *name;
        char *text;
        size_t n_bytes;
        struct config_text *next;
};

/* Reads a config from these texts. */
int config_parse_texts(const struct config_text *texts, const struct config_machine *machine, FILE *errors,
                       struct config **ret);

/* Appends a piece to the last text if it has this name, else adds a text. -EFBIG: a file is larger
 * than a config may be, or there are too many. -ENOMEM. */
int config_text_add(struct config_text **texts, const char *name, const void *piece, size_t n_bytes);
struct config_text *config_text_free(struct config_text *texts); /* all; takes NULL */

/* The differences between two configs of the same devices and partitions, a line each. The broker
 * compares tenants and quotas, because it knows their usage. */
void config_diff(const struct config *from, const struct config *to, FILE *f);

/* Brings devices and partitions into the order of another config, which has the same ones. */
void config_order_as(struct config *c, const struct config *was);

/* The tenant's quota in the partition with this index. NULL: the tenant has none there, or is NULL. */
const struct config_quota *config_quota_in(const struct config_tenant *t, size_t partition);

/* True: both match the same processes. */
bool config_match_is_alike(const struct config_tenant *a, const struct config_tenant *b);

/* Formats bytes as in a config, into buf. */
const char *config_size(uint64_t n_bytes, char *buf, size_t n_buf);

struct config *config_free(struct config *c); /* takes NULL */

/* The current configuration as YAML with all defaults; malloc()ed, NULL when out of memory. Parsing it
 * again yields the same configuration. */
char *config_format(const struct config *c);

#endif
