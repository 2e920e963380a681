/* The grammar of a config as tables: a section for each kind of mapping, a field for each key. Reading,
 * formatting, comparing and the check of what a reload may change walk these tables. Only keys that need more
 * than their type have functions of their own.
 *
 * Fields are read in the order of the table, so a key stands after those that it depends on.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_CONFIG_SCHEMA_H
#define BFCD_CONFIG_SCHEMA_H

#include "daemon/config/config.h"

#define CONFIG_MAX_KEYS   11  /* of one mapping, the one without a key at the end included */
#define CONFIG_TEXT_BYTES 192 /* enough for the text of any value */

struct yamltree_node;
struct config_reader;
struct config_place;
struct config_section;

/* From CONFIG_MODE to CONFIG_TENANT_NAME values are written in quotes. */
enum config_type {
        CONFIG_SIZE,     /* bytes, in multiples of CONFIG_GRANULARITY */
        CONFIG_NUMBER,   /* from min to max */
        CONFIG_NODE,     /* a number; has_node says whether there is one */
        CONFIG_DURATION, /* milliseconds */
        CONFIG_WORD,     /* the index of one of `words`; a bool where these are false and true */
        CONFIG_MODE,
        CONFIG_NAME,
        CONFIG_PATH,
        CONFIG_FILE, /* the path of a file */
        CONFIG_GROUP,
        CONFIG_PARTITION_NAME, /* kept as the index of the partition */
        CONFIG_TENANT_NAME,    /* kept as the index of the tenant */
        CONFIG_MATCH_NAME,     /* a value or a list: names of users or groups */
        CONFIG_MATCH_ID,       /* a value or a list of numbers */
        CONFIG_MATCH_PATTERN,  /* a value or a list of patterns, not empty */
        CONFIG_MAPPING,
        CONFIG_LIST,
};

struct config_field {
        const char *key;
        enum config_type type;
        size_t offset, n_bytes; /* of the value in its section's struct */
        uint64_t initial;       /* the default */
        uint64_t min, max;      /* a size may be 0 where min is 0 */
        const char *whole;      /* what a percentage is of; NULL: no percentage is allowed */
        const char *const *words;
        bool is_fixed;                        /* a reload cannot change it */
        bool hides_initial;                   /* the default is not written */
        const char *missing, *empty;          /* what to report; NULL: it may be */
        const char *not_for_gpu;              /* what to report of the key with a GPU; NULL: it may be */
        const char *not_for_host;             /* what to report of a value that is not 0 with the host */
        const struct config_section *section; /* of a mapping */
        size_t base;                          /* where the mapping's struct begins */
        /* Of a list: reads an element, and finds the nth to be written, or NULL. */
        bool (*read_element)(struct config_reader *r, const struct yamltree_node *n, struct config_place *in);
        const void *(*element)(const struct config *c, const void *object, size_t nth);
        size_t n_at,
                element_bytes; /* in place of `element`: where the number of elements is, and their size */
        size_t lacks;          /* the flag in the reader of elements that could not be read */
        /* In place of what the type does. Without a value n is NULL. true: the value is known. */
        bool (*read)(struct config_reader *r, struct config_place *p, const struct config_field *field,
                     const struct yamltree_node *n);
        void (*text)(const void *object, char ret[static CONFIG_TEXT_BYTES]);
        void (*put)(FILE *f, const void *object);
};

struct config_section {
        const char *what; /* for messages */
        bool is_block;    /* written with a line for each key */
        struct config_field fields[CONFIG_MAX_KEYS];
};

enum { SOCKET_PATH, SOCKET_MODE, SOCKET_GROUP };
enum {
        TOP_SOCKET,
        TOP_ADMIN_SOCKET,
        TOP_MONITOR_SOCKET,
        TOP_LEASE_SOCKET,
        TOP_RECORDS,
        TOP_TIMEOUTS,
        TOP_MAX_SESSIONS,
        TOP_DEVICES,
        TOP_TENANTS,
        TOP_DEFAULT
};
enum { RECORDS_FILE, RECORDS_JOURNAL_SOCKET };
enum {
        DEVICE_ID,
        DEVICE_MPS,
        DEVICE_SIZE,
        DEVICE_HEADROOM,
        DEVICE_PARTITIONS,
        DEVICE_STANDBY,
        DEVICE_CONTEXTS
};
enum {
        PARTITION_NAME,
        PARTITION_LIMIT,
        PARTITION_GROWTH,
        PARTITION_SHARE,
        PARTITION_CLEARS,
        PARTITION_NODE,
        PARTITION_PINNED
};
enum { TENANT_NAME, TENANT_MATCH, TENANT_QUOTAS, TENANT_LEASES };
enum {
        QUOTA_PARTITION,
        QUOTA_LIMIT,
        QUOTA_RESERVE,
        QUOTA_MAX_SESSIONS,
        QUOTA_MAX_BLOCKS,
        QUOTA_PARK,
        QUOTA_PER
};
enum { PARK_TO, PARK_IDLE };
enum { PER_CGROUP, PER_LIMIT, PER_RESERVE };
enum { MATCH_USER, MATCH_GROUP, MATCH_UID, MATCH_GID, MATCH_UNIT, MATCH_CGROUP };

extern const struct config_section CONFIG_TOP, CONFIG_MORE, CONFIG_SOCKET, CONFIG_RECORDS, CONFIG_TIMEOUTS,
        CONFIG_DEVICE, CONFIG_PARTITION, CONFIG_TENANT, CONFIG_MATCH, CONFIG_QUOTA, CONFIG_PARK, CONFIG_PER;

/* A value that is no string. */
uint64_t config_get(const struct config_field *field, const void *object);
void config_set(const struct config_field *field, void *object, uint64_t value);

/* Sets every value that is no string to its default, in nested mappings too. */
void config_init(const struct config_section *s, void *object);

/* The nth element of a list; NULL: there are fewer. */
const void *config_element(const struct config *c, const struct config_field *field, const void *object,
                           size_t nth);

/* The value as the config has it, without quotes; "": there is none. */
void config_text(const struct config *c, const struct config_field *field, const void *object,
                 char ret[static CONFIG_TEXT_BYTES]);

/* Whether a key has the same value in two structs of its section. */
bool config_is_alike(const struct config_field *field, const void *a, const void *b);

/* A line for each key that a reload may change and that differs, "KIND 'NAME': KEY is NEW, was OLD"; `more`
 * (or NULL) continues it. Not of lists and nested mappings. */
void config_diff_section(const struct config_section *s, const void *from, const void *to, const char *kind,
                         const char *name, FILE *f,
                         void (*more)(void *userdata, const struct config_field *field), void *userdata);

#endif
