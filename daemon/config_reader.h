/* The reading of a config: its state, and what the grammar's parts share. Only
 * the files config*.c include this; the rest of the daemon includes config.h.
 *
 * Each config_read_*() takes a node and reports whatever is wrong with it. What
 * an error leaves unknown (a limit, a name) is marked so, and checks that would
 * need it are silent: one mistake gives one message.
 *
 * Invariant: notes of devices, partitions and tenants are as many as those in
 * the config, index by index.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_CONFIG_READER_H
#define BFCD_CONFIG_READER_H

#include "daemon/config.h"
#include "daemon/yamltree.h"

#define CONFIG_MAX_KEYS 10 /* of one mapping, the NULL at the end included */

enum device_kind { DEVICE_KIND_UNKNOWN, DEVICE_KIND_HOST, DEVICE_KIND_GPU, DEVICE_KIND_MIG };

struct device_note {
        const struct yamltree_node *node; /* its id */
        enum device_kind kind;
        const struct yamltree_node *headroom; /* where it was said, or the id */
        bool is_seen;                         /* a GPU: the machine has it */
        bool lacks_fd, lacks_ipc;             /* ways of sharing that it cannot do */
        uint64_t bytes_free;
};

struct partition_note {
        const struct yamltree_node *node;
        bool share_said;
        const struct yamltree_node *share; /* where it was said, or the partition */
        uint64_t n_sessions;               /* that the quotas allow */
        bool limit_known;
        const struct yamltree_node *growth; /* where it was said, or the partition */
        const struct yamltree_node *clears; /* the same */
        const struct yamltree_node *pages;  /* the same */
        const struct yamltree_node *numa;   /* the same */
        uint64_t sum_of_reserves;
        const struct yamltree_node *reserve_too_much; /* the first that the limit has no room for */
        uint64_t sum_of_limits;
};

struct tenant_note {
        const struct yamltree_node *node;
        bool has_match;
        uint32_t
                n_sessions; /* max_sessions as it is written, of the tenant or the largest of its quotas; 0: nowhere */
};

struct config_warning {
        const struct yamltree_node *at;
        size_t number; /* in the order in which they were found */
        char *sentence;
};

struct config_reader {
        FILE *errors;
        const struct config_machine *machine; /* may be NULL */
        bool has_failed;
        bool lacks_gpu; /* the config may be right, the machine is not */
        bool is_out_of_memory;
        bool only_tries;       /* the files are opened and not read */
        bool lacks_partitions; /* some could not be read: names may be theirs */
        bool lacks_tenants;
        struct config *c;
        struct device_note *devices;
        struct partition_note *partitions;
        struct tenant_note *tenants;
        struct config_warning *warnings;
        size_t n_warnings;
        const struct yamltree_node *socket_path;
        const struct yamltree_node *admin_socket_path;
        const struct yamltree_node *devices_at;  /* the key's value; NULL: not there */
        const struct yamltree_node *sessions_at; /* max_sessions, or the root */
};

/* ---- saying what is wrong (config_reader.c) ------------------------------- */

/* Text from a file, made fit for a message: at most 60 bytes, control
 * characters replaced. */
struct config_shown {
        char text[64];
};

const char *config_show_bytes(struct config_shown *s, const char *text, size_t n_bytes);

/* Bytes as a config would have them: exact, in the largest unit that divides. */
const char *config_show_size(struct config_shown *s, uint64_t n_bytes);

/* Bytes for people: whole MiB, and from 10 GiB on whole GiB, rounded up. */
const char *config_show_about(struct config_shown *s, uint64_t n_bytes);

/* They last until the block around them ends. */
#define ABOUT(n_bytes) config_show_about(&(struct config_shown){ { 0 } }, n_bytes)
#define SHOW(node)     config_show_bytes(&(struct config_shown){ { 0 } }, (node)->text, (node)->n_text)
#define SIZE(n_bytes)  config_show_size(&(struct config_shown){ { 0 } }, n_bytes)

/* For sizes that nobody chose, such as a GPU's: whole MiB. */
#define MIB(n_bytes) ((unsigned long long)((n_bytes) >> 20))

void config_fail(struct config_reader *r, const struct yamltree_node *at, const char *format, ...)
        __attribute__((format(printf, 3, 4)));
/* What the machine lacks now, which another day may have. */
void config_fail_machine(struct config_reader *r, const struct yamltree_node *at, const char *format, ...)
        __attribute__((format(printf, 3, 4)));
void config_warn(struct config_reader *r, const struct yamltree_node *at, const char *format, ...)
        __attribute__((format(printf, 3, 4)));
/* A warning of what a choice costs: for who checks a config and has nothing
 * else to mend, and not at every start. */
void config_advise(struct config_reader *r, const struct yamltree_node *at, const char *format, ...)
        __attribute__((format(printf, 3, 4)));

/* Warnings are kept until all is read, and then put in the order of the lines. */
void config_put_warnings(struct config_reader *r);

/* A yamltree_report; userdata is the reader. */
void config_fail_tree(void *userdata, const char *file, size_t line, size_t column, const char *sentence);

/* ---- shapes (config_reader.c) --------------------------------------------- */

/* false: reported. */
bool config_want(struct config_reader *r, const struct yamltree_node *n, enum yamltree_type type,
                 const char *what);

bool config_is_text(const struct yamltree_node *n, const char *text);

/* Finds the values of the known keys (a list that ends in NULL); NULL where a
 * key is not there. false: not a mapping at all. */
bool config_read_mapping(struct config_reader *r, const struct yamltree_node *n, const char *what,
                         const char *const known[], const struct yamltree_node *values[CONFIG_MAX_KEYS]);

/* ---- what grows (config_reader.c) ----------------------------------------- */

char *config_copy_text(struct config_reader *r, const char *text); /* NULL: out of memory */

/* One more element at the end of an array; NULL: out of memory. */
void *config_grow(struct config_reader *r, void **array, size_t n, size_t element_bytes);

/* ---- devices and partitions (config_device.c) ----------------------------- */

/* n: the value of the key, NULL: it is not there. */
void config_read_devices(struct config_reader *r, const struct yamltree_node *root,
                         const struct yamltree_node *n);
struct config_partition *config_find_partition(const struct config *c, const char *name, size_t *ret_index);

/* Once all tenants are read. */
void config_check_partition_sums(struct config_reader *r);
void config_check_gpus(struct config_reader *r);
void config_check_pages(struct config_reader *r);

/* The value of huge_pages in a config. */
const char *config_pages_name(enum config_pages pages);

/* ---- what cannot change while it is served (config_live.c) ------------------ */

/* Once all is read; nothing where no config is running. */
void config_check_live(struct config_reader *r, const struct yamltree_node *root);

/* What the running config knows of a GPU; false: reported, it serves none such. */
bool config_recall_gpu(struct config_reader *r, size_t device);

/* ---- tenants (config_tenant.c) -------------------------------------------- */

void config_read_tenants(struct config_reader *r, const struct yamltree_node *n);
void config_free_tenant(struct config_tenant *t); /* what it holds */

/* Once all tenants are read; n may be NULL. */
void config_read_default_tenant(struct config_reader *r, const struct yamltree_node *n);
void config_check_matches(struct config_reader *r, bool default_known);
void config_check_sessions(struct config_reader *r);

#endif
