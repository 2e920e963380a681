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

enum config_pages { CONFIG_PAGES_AUTO, CONFIG_PAGES_2MIB, CONFIG_PAGES_OFF };

#define CONFIG_UUID_BYTES 16u

struct config_partition {
        char *name; /* unique over all devices */
        uint64_t limit_bytes;
        enum config_growth growth;
        enum config_share share;
        bool clears;             /* clear_on_release */
        enum config_pages pages; /* huge_pages; of the host */
        bool has_node;           /* numa_node was said; of the host */
        uint32_t node;
        size_t device; /* index into config.devices */
};

/* Whether standby memory of its device is of use there: else extents are not made when a request needs them,
 * or have the sizes of requests. */
static inline bool config_takes_standby(const struct config_partition *p)
{
        return p->growth == CONFIG_GROWTH_ON_DEMAND && p->share == CONFIG_SHARE_FD;
}

struct config_device {
        char *id; /* "host", "cuda:0", "GPU-<uuid>", "MIG-<uuid>" */
        bool is_cuda;
        uint8_t uuid[CONFIG_UUID_BYTES]; /* of a GPU */
        uint64_t size_bytes;             /* a GPU's: as it says */
        uint64_t headroom_bytes;
        uint64_t standby_bytes; /* kept ready; 0: nothing */
};

struct config_quota {
        size_t partition; /* index into config.partitions */
        uint64_t limit_bytes;
        uint64_t reserve_bytes; /* guaranteed; 0: none */
        uint32_t max_sessions;
        uint32_t max_blocks;
        uint64_t keep_bytes; /* kept for so long after a session has ended; 0: nothing */
        uint64_t keep_ms;
};

struct config_tenant {
        char *name;
        uint32_t max_sessions; /* in all partitions together */
        uid_t *uids;           /* user names resolved */
        size_t n_uids;
        gid_t *gids; /* group names resolved */
        size_t n_gids;
        char **users; /* the names of the first n_users uids, as the config has them; the others are numbers */
        size_t n_users;
        char **groups; /* the same of the gids */
        size_t n_groups;
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
        gid_t group;      /* (gid_t)-1: unchanged */
        char *group_name; /* as the config has it; NULL: it has a number */
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

/* Sessions of the daemon's table that no other tenant can take from this one. These of all tenants together
 * are at most the config's max_sessions. */
uint32_t config_session_share(const struct config *c, const struct config_tenant *t);

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
        /* What this machine lacks for the pages of a partition of the host, of which n_bytes are wanted by all
         * partitions with the same pages, as a clause. 0; -ENODEV: it cannot be served; -ENOTSUP: it can, but
         * not so. May be NULL: nothing is lacking. */
        int (*look_pages)(const struct config_partition *p, uint64_t n_bytes, char *ret_clause,
                          size_t n_clause);
        void *userdata;
        /* The lowest memory limit of the daemon's control group and its parents, to which host memory
         * is charged; 0: there is none. A larger device is a warning. */
        uint64_t group_limit_bytes;
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
        bool is_strict; /* warnings are errors */
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

/* Opens the files that config_load() would read, and reports in `errors` each that the process's
 * user may not read. -EACCES: there is one. -ENOMEM. Nothing else is looked at. */
int config_try_files(const char *path, FILE *errors);

/* The same from memory, as a file of that name without conf.d; for tests and
 * fuzzers. */
int config_parse(const char *name, const char *text, size_t n_bytes, const struct config_machine *machine,
                 FILE *errors, struct config **ret);

/* The text of a config that was read before: the main file, then those of conf.d, in order. */
struct config_text {
        char *name;
        char *text;
        size_t n_bytes;
        struct config_text *next;
};

/* The same from these. */
int config_parse_texts(const struct config_text *texts, const struct config_machine *machine, FILE *errors,
                       struct config **ret);

/* Appends a piece to the last text where that has the name, else begins another. -EFBIG: a file is larger
 * than a config may be, or there are too many. -ENOMEM. */
int config_text_add(struct config_text **texts, const char *name, const void *piece, size_t n_bytes);
struct config_text *config_text_free(struct config_text *texts); /* all; takes NULL */

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
