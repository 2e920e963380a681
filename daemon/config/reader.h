/* Reading a config by the schema. Only the files in this folder include this; the rest of the daemon includes
 * config.h.
 *
 * Each config_read_*() takes a node and reports whatever is wrong with it. A value that an error leaves
 * unknown is not marked in `known`, and checks that need it are left out: one mistake gives one message.
 *
 * Invariant: there is a note for each device, partition and tenant of the config, with the same index.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_CONFIG_READER_H
#define BFCD_CONFIG_READER_H

#include "daemon/config/schema.h"
#include "daemon/config/yamltree.h"

enum device_kind { DEVICE_KIND_UNKNOWN, DEVICE_KIND_HOST, DEVICE_KIND_GPU };

/* A mapping that is read into a struct of its section. */
struct config_place {
        const struct config_section *section;
        const char *what; /* for messages */
        const struct yamltree_node *node;
        void *object;
        struct config_place *in;                         /* the mapping around it, where it matters */
        const struct yamltree_node *at[CONFIG_MAX_KEYS]; /* values, as the fields; NULL: not there */
        unsigned int known;    /* a bit for each field that was read without an error */
        enum device_kind kind; /* of the device that it is about */
        uint64_t whole_bytes;  /* what percentages are of */
        bool whole_known;
};

static inline struct config_place config_place(const struct config_section *s, const struct yamltree_node *n,
                                               void *object)
{
        return (struct config_place){ .section = s, .what = s->what, .node = n, .object = object };
}

/* Of a mapping that is a key's value. */
static inline struct config_place config_inner(const struct config_place *p, const struct config_field *field,
                                               const struct yamltree_node *n)
{
        return (struct config_place){ .section = field->section,
                                      .what = field->key,
                                      .node = n,
                                      .object = (char *)p->object + field->base };
}

static inline bool config_knows(const struct config_place *p, unsigned int field)
{
        return p->known & 1u << field;
}

/* Where a key was configured, or the mapping that lacks it. */
static inline const struct yamltree_node *config_at(const struct config_place *p, unsigned int field)
{
        return p->at[field] ? p->at[field] : p->node;
}

struct device_note {
        struct config_place place;
        bool is_seen;             /* a GPU: the machine has it */
        bool lacks_fd, lacks_ipc; /* ways of sharing that it cannot do */
        uint64_t bytes_free;
        bool room_known;
        uint64_t room_bytes; /* size - headroom */
        uint64_t sum_of_limits;
        const struct yamltree_node *limit_too_much; /* the first for which there is no room */
};

struct partition_note {
        struct config_place place;
        uint64_t n_sessions; /* that the quotas allow */
        uint64_t sum_of_reserves;
        const struct yamltree_node *reserve_too_much; /* the first for which the limit has no room */
        uint64_t sum_of_limits;
};

struct tenant_note {
        struct config_place place;
        uint64_t n_sessions; /* the sum of the configured max_sessions of its quotas */
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
        bool lacks_gpu; /* the machine lacks what the config needs */
        bool is_out_of_memory;
        bool only_tries;       /* the files are opened and not read */
        bool lacks_partitions; /* some could not be read, so an unknown name may be one of theirs */
        bool lacks_tenants;
        struct config *c;
        struct device_note *devices;
        struct partition_note *partitions;
        struct tenant_note *tenants;
        struct config_warning *warnings;
        size_t n_warnings;
        struct config_place top, socket, admin_socket, monitor_socket, lease_socket,
                records; /* node: NULL where not read */
};

/* ---- messages (reader.c) ----------------------------------------------------- */

/* Text from a file, prepared for a message: at most 60 bytes, control
 * characters replaced. */
struct config_shown {
        char text[64];
};

const char *config_show_bytes(struct config_shown *s, const char *text, size_t n_bytes);

/* Formats bytes as in a config: exact, in the largest unit that divides. */
const char *config_show_size(struct config_shown *s, uint64_t n_bytes);

/* Where something is defined first: "on line 3", or "in FILE on line 3" if the second place is in another file. */
struct config_first {
        char text[128];
};
const char *config_show_first(struct config_first *s, const struct yamltree_node *first,
                              const struct yamltree_node *second);
#define FIRST(first, second) config_show_first(&(struct config_first){ { 0 } }, first, second)

/* Formats bytes for messages: whole MiB, and from 10 GiB on whole GiB, rounded up. */
const char *config_show_about(struct config_shown *s, uint64_t n_bytes);

/* Valid until the end of the enclosing block. */
#define ABOUT(n_bytes) config_show_about(&(struct config_shown){ { 0 } }, n_bytes)
#define SHOW(node)     config_show_bytes(&(struct config_shown){ { 0 } }, (node)->text, (node)->n_text)
#define SIZE(n_bytes)  config_show_size(&(struct config_shown){ { 0 } }, n_bytes)

/* For sizes that are not configured, such as a GPU's: whole MiB. */
#define MIB(n_bytes) ((unsigned long long)((n_bytes) >> 20))

enum config_severity {
        CONFIG_FAILS,
        CONFIG_FAILS_HERE, /* the machine lacks it now, but may have it later */
        CONFIG_WARNS,
        CONFIG_ADVISES, /* a warning of the cost of a choice: for a check without errors, not at a start */
};
/* Always returns false. */
bool config_say(struct config_reader *r, enum config_severity said, const struct yamltree_node *at,
                const char *format, ...) __attribute__((format(printf, 4, 5)));
#define config_fail(r, at, ...)         config_say(r, CONFIG_FAILS, at, __VA_ARGS__)
#define config_fail_machine(r, at, ...) config_say(r, CONFIG_FAILS_HERE, at, __VA_ARGS__)
#define config_warn(r, at, ...)         config_say(r, CONFIG_WARNS, at, __VA_ARGS__)
#define config_advise(r, at, ...)       config_say(r, CONFIG_ADVISES, at, __VA_ARGS__)

/* Warnings are collected until everything is read, and then written in line order. */
void config_put_warnings(struct config_reader *r);

/* A yamltree_report; userdata is the reader. */
void config_fail_tree(void *userdata, const char *file, size_t line, size_t column, const char *sentence);

/* ---- shapes (reader.c) ----------------------------------------------------- */

/* false: reported. what: for the sentence. */
bool config_want(struct config_reader *r, const struct yamltree_node *n, enum yamltree_type type,
                 const char *what);

bool config_is_text(const struct yamltree_node *n, const char *text);

/* Finds the values of a section's keys. false: not a mapping at all. */
bool config_read_mapping(struct config_reader *r, struct config_place *p);

/* Finds the values of a section's keys and reads each into p->object. */
bool config_read_section(struct config_reader *r, struct config_place *p);

/* n may be NULL. false: an element, or all of them, could not be read. */
bool config_read_list(struct config_reader *r, struct config_place *p, const struct config_field *field,
                      const struct yamltree_node *n);

/* Names for a message, separated by commas; "..." stands for those that do not fit. The elements begin with
 * the pointer to their name at `offset`. */
struct config_names {
        char text[512];
};
const char *config_list_names(struct config_names *ret, const void *elements, size_t n_elements,
                              size_t element_bytes, size_t offset);

char *config_copy_text(struct config_reader *r, const char *text); /* NULL: out of memory */

/* Copies an element to the end of an array. false: out of memory. */
bool config_append(struct config_reader *r, void **array, size_t *n, const void *element,
                   size_t element_bytes);

/* ---- values (value.c) ------------------------------------------------------- */

/* A wrong value is reported, and the object keeps its value: false. The schema decides the type: "0660"
 * is a mode at a key for modes. */
bool config_read_value(struct config_reader *r, const struct config_place *p,
                       const struct config_field *field, const struct yamltree_node *n);
bool config_read_number(struct config_reader *r, const struct config_field *field,
                        const struct yamltree_node *n, uint64_t *ret);

/* false: it is not a name, reported. */
bool config_want_name(struct config_reader *r, const struct yamltree_node *n, const char *what);

#define CONFIG_FAULT_BYTES 192

/* What is wrong with a socket's path, as the end of a sentence; false: nothing. */
bool config_path_fault(const char *path, size_t n_path, char *ret, size_t n_ret);

/* An unknown name is only a warning: a config may be written before its users exist. false: not found. */
bool config_find_user(struct config_reader *r, const struct yamltree_node *n, uid_t *ret);
bool config_find_group(struct config_reader *r, const struct yamltree_node *n, const char *consequence,
                       gid_t *ret);

/* ---- fields with functions of their own (config.c, device.c, tenant.c) ---- */

typedef bool config_read_field(struct config_reader *r, struct config_place *p,
                               const struct config_field *field, const struct yamltree_node *n);
typedef bool config_read_element(struct config_reader *r, const struct yamltree_node *n,
                                 struct config_place *in);

config_read_field config_read_records, config_read_socket, config_read_device_id, config_read_device_mps,
        config_read_device_contexts, config_read_partitions, config_read_match, config_read_quota_partition,
        config_read_park, config_read_per, config_read_per_cgroup;
config_read_element config_read_device, config_read_partition, config_read_tenant, config_read_quota;
void config_put_match(FILE *f, const void *object);
void config_free_match(struct config_tenant *t);
void config_put_string(FILE *f, const char *text);

/* ---- devices and partitions (device.c) ------------------------------- */

struct config_partition *config_find_partition(const struct config *c, const char *name, size_t *ret_index);

/* For an id that is not "host". false: reported. */
bool config_read_gpu_id(struct config_reader *r, const struct yamltree_node *n, enum device_kind *ret);

/* Asks the machine; fills in uuid, size and the default headroom of a device whose id and note are there.
 * false: reported. */
bool config_look_at_gpu(struct config_reader *r, size_t device);

/* Of a GPU with so much memory. */
uint64_t config_default_headroom(uint64_t bytes_total);

/* Once all tenants are read. */
void config_check_partition_sums(struct config_reader *r);
void config_check_gpus(struct config_reader *r);
void config_check_pages(struct config_reader *r);
void config_check_pinned(struct config_reader *r);

/* ---- what a reload cannot change (live.c) ------------------------------------ */

/* Once all is read; nothing where no config is running. */
void config_check_live(struct config_reader *r, const struct yamltree_node *root);

/* Uses what the running config knows of a GPU; false: it has no such GPU, reported. */
bool config_recall_gpu(struct config_reader *r, size_t device);

/* ---- tenants (tenant.c) ------------------------------------------------------ */

void config_free_tenant(struct config_tenant *t); /* what it contains */

/* Once all tenants are read. */
void config_read_default_tenant(struct config_reader *r);
void config_check_matches(struct config_reader *r, bool default_known);
void config_check_sessions(struct config_reader *r);

#endif
