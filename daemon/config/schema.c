/* SPDX-License-Identifier: Apache-2.0 */
/* The tables of the grammar; see schema.h. */
#include "daemon/config/schema.h"

#include <assert.h>
#include <string.h>

#include "daemon/config/reader.h"

#define MEMBER(type, member) .offset = offsetof(type, member), .n_bytes = sizeof(((type *)NULL)->member)
#define ARRAY(type, array)                                                                                   \
        .offset = offsetof(type, array), .n_at = offsetof(type, n_##array),                                  \
        .element_bytes = sizeof(*((type *)NULL)->array)
#define WORDS(...)                                                                                           \
        .words = (const char *const[])                                                                       \
        {                                                                                                    \
                __VA_ARGS__, NULL                                                                            \
        }

static void put_text(char ret[static CONFIG_TEXT_BYTES], const char *text)
{
        snprintf(ret, CONFIG_TEXT_BYTES, "%s", text);
}

/* ---- sockets and times ---------------------------------------------------- */

const struct config_section CONFIG_SOCKET = {
        .fields = {
                [SOCKET_PATH] = { "path", CONFIG_PATH, MEMBER(struct config_socket, path), .is_fixed = true },
                [SOCKET_MODE] = { "mode", CONFIG_MODE, MEMBER(struct config_socket, mode), .is_fixed = true },
                [SOCKET_GROUP] = { "group", CONFIG_GROUP, MEMBER(struct config_socket, group),
                                   .initial = (gid_t)-1, .is_fixed = true },
        },
};

static void records_text(const void *object, char ret[static CONFIG_TEXT_BYTES])
{
        const struct config_records *r = &((const struct config *)object)->records;

        put_text(ret, r->file ? r->file : r->journal ? r->journal : "");
}

const struct config_section CONFIG_RECORDS = {
        .what = "records",
        .fields = {
                [RECORDS_FILE] = { "file", CONFIG_FILE, MEMBER(struct config_records, file), .is_fixed = true },
                [RECORDS_JOURNAL_SOCKET] = { "journal", CONFIG_PATH, MEMBER(struct config_records, journal),
                                             .is_fixed = true },
        },
};

const struct config_section CONFIG_TIMEOUTS = {
        .fields = {
                { "reclaim", CONFIG_DURATION, MEMBER(struct config, reclaim_timeout_ms), .initial = 200 },
                { "quarantine", CONFIG_DURATION, MEMBER(struct config, quarantine_timeout_ms),
                  .initial = 60000 },
        },
};

/* Nothing where there is none: then it is not shown. */
static void lease_socket_text(const void *object, char ret[static CONFIG_TEXT_BYTES])
{
        const char *path = ((const struct config *)object)->lease_socket.path;

        put_text(ret, path ? path : "");
}

/* ---- the top -------------------------------------------------------------- */

#define TENANTS                                                                                              \
        "tenants", CONFIG_LIST, .section = &CONFIG_TENANT, .read_element = config_read_tenant,               \
                                ARRAY(struct config, tenants),                                               \
                                .lacks = offsetof(struct config_reader, lacks_tenants)

const struct config_section CONFIG_TOP = {
        .what = "the config",
        .is_block = true,
        .fields = {
                [TOP_SOCKET] = { "socket", CONFIG_MAPPING, .section = &CONFIG_SOCKET,
                                 .base = offsetof(struct config, socket), .read = config_read_socket },
                [TOP_ADMIN_SOCKET] = { "admin_socket", CONFIG_MAPPING, .section = &CONFIG_SOCKET,
                                       .base = offsetof(struct config, admin_socket),
                                       .read = config_read_socket },
                [TOP_MONITOR_SOCKET] = { "monitor_socket", CONFIG_MAPPING, .section = &CONFIG_SOCKET,
                                         .base = offsetof(struct config, monitor_socket),
                                         .read = config_read_socket },
                [TOP_LEASE_SOCKET] = { "lease_socket", CONFIG_MAPPING, .section = &CONFIG_SOCKET,
                                       .base = offsetof(struct config, lease_socket), .is_fixed = true,
                                       .read = config_read_socket, .text = lease_socket_text },
                [TOP_RECORDS] = { "records", CONFIG_MAPPING, .section = &CONFIG_RECORDS,
                                  .base = offsetof(struct config, records), .is_fixed = true,
                                  .read = config_read_records, .text = records_text },
                [TOP_TIMEOUTS] = { "timeouts", CONFIG_MAPPING, .section = &CONFIG_TIMEOUTS },
                [TOP_MAX_SESSIONS] = { "max_sessions", CONFIG_NUMBER, MEMBER(struct config, max_sessions),
                                       .initial = 4096, .min = 1, .max = CONFIG_MAX_SESSIONS },
                [TOP_DEVICES] = { "devices", CONFIG_LIST, .section = &CONFIG_DEVICE,
                                  .missing = "the key 'devices' is missing",
                                  .empty = "devices is empty; there must be at least one",
                                  .read_element = config_read_device, ARRAY(struct config, devices),
                                  .lacks = offsetof(struct config_reader, lacks_partitions) },
                [TOP_TENANTS] = { TENANTS },
                [TOP_DEFAULT] = { "default_tenant", CONFIG_TENANT_NAME, MEMBER(struct config, default_tenant),
                                  .initial = UINT64_MAX },
        },
};

const struct config_section CONFIG_MORE = {
        .what = "a file of conf.d (tenants only)",
        .fields = { { TENANTS, .missing = "the key 'tenants' is missing" } },
};

/* ---- devices and partitions ----------------------------------------------- */

static void size_text(const void *object, char ret[static CONFIG_TEXT_BYTES])
{
        const struct config_device *d = object;

        if (!d->is_cuda)
                put_text(ret, SIZE(d->size_bytes));
}

static void contexts_text(const void *object, char ret[static CONFIG_TEXT_BYTES])
{
        uint64_t n_bytes = ((const struct config_device *)object)->context_bytes;

        put_text(ret, n_bytes == 0 ? "measured" : n_bytes == CONFIG_NO_CONTEXTS ? "off" : SIZE(n_bytes));
}

static const void *nth_partition(const struct config *c, const void *object, size_t nth)
{
        const struct config_device *d = object;

        for (size_t i = 0; i < c->n_partitions; i++)
                if (&c->devices[c->partitions[i].device] == d && nth-- == 0)
                        return &c->partitions[i];
        return NULL;
}

const struct config_section CONFIG_DEVICE = {
        .what = "a device",
        .is_block = true,
        .fields = {
                [DEVICE_ID] = { "id", CONFIG_NAME, MEMBER(struct config_device, id),
                                .missing = "a device lacks its id; write host, cuda:N, GPU-UUID or MIG-UUID",
                                .is_fixed = true, .read = config_read_device_id },
                [DEVICE_MPS] = { "mps", CONFIG_WORD, MEMBER(struct config_device, mps),
                                 WORDS("refuse", "allow"), .is_fixed = true, .hides_initial = true,
                                 .read = config_read_device_mps },
                [DEVICE_SIZE] = { "size", CONFIG_SIZE, MEMBER(struct config_device, size_bytes), .min = 1,
                                  .not_for_gpu = "size is only for the host device; the size of a GPU comes "
                                                 "from its driver",
                                  .is_fixed = true, .text = size_text },
                [DEVICE_HEADROOM] = { "headroom", CONFIG_SIZE, MEMBER(struct config_device, headroom_bytes) },
                [DEVICE_PARTITIONS] = { "partitions", CONFIG_LIST, .section = &CONFIG_PARTITION,
                                        .missing = "a device lacks its partitions; it needs at least one",
                                        .empty = "partitions is empty; a device needs at least one",
                                        .read_element = config_read_partition, .element = nth_partition,
                                        .lacks = offsetof(struct config_reader, lacks_partitions),
                                        .read = config_read_partitions },
                [DEVICE_STANDBY] = { "standby", CONFIG_SIZE, MEMBER(struct config_device, standby_bytes),
                                     .hides_initial = true },
                [DEVICE_CONTEXTS] = { "contexts", CONFIG_SIZE, MEMBER(struct config_device, context_bytes),
                                      .min = 1, .hides_initial = true, .read = config_read_device_contexts,
                                      .text = contexts_text },
        },
};

const struct config_section CONFIG_PARTITION = {
        .what = "a partition",
        .fields = {
                [PARTITION_NAME] = { "name", CONFIG_NAME, MEMBER(struct config_partition, name),
                                     .missing = "a partition lacks its name", .is_fixed = true },
                [PARTITION_LIMIT] = { "limit", CONFIG_SIZE, MEMBER(struct config_partition, limit_bytes),
                                      .min = 1, .whole = "the device's size minus its headroom",
                                      .missing = "a partition lacks its limit; write a size or a percentage "
                                                 "of the device" },
                [PARTITION_GROWTH] = { "growth", CONFIG_WORD, MEMBER(struct config_partition, growth),
                                       WORDS("on-demand", "preallocate"), .is_fixed = true },
                [PARTITION_SHARE] = { "share", CONFIG_WORD, MEMBER(struct config_partition, share),
                                      WORDS("fd", "cuda-ipc"), .is_fixed = true,
                                      .not_for_host = "share cuda-ipc is not for the host device; write fd" },
                [PARTITION_CLEARS] = { "clear_on_release", CONFIG_WORD,
                                       MEMBER(struct config_partition, clears), WORDS("false", "true"),
                                       .is_fixed = true, .hides_initial = true,
                                       .not_for_host = "clear_on_release is only for GPUs; the kernel always "
                                                       "clears host memory" },
                [PARTITION_NODE] = { "numa_node", CONFIG_NODE, MEMBER(struct config_partition, node),
                                     .max = 1023, .is_fixed = true,
                                     .not_for_gpu = "numa_node is only for the host device" },
                [PARTITION_PINNED] = { "pinned", CONFIG_WORD, MEMBER(struct config_partition, is_pinned),
                                       WORDS("false", "true"), .is_fixed = true, .hides_initial = true,
                                       .not_for_gpu = "pinned is only for the host device; GPU memory is "
                                                      "always pinned" },
        },
};

/* ---- tenants and quotas --------------------------------------------------- */

const struct config_section CONFIG_TENANT = {
        .what = "a tenant",
        .is_block = true,
        .fields = {
                [TENANT_NAME] = { "name", CONFIG_NAME, MEMBER(struct config_tenant, name),
                                  .missing = "a tenant lacks its name", .is_fixed = true },
                [TENANT_MATCH] = { "match", CONFIG_MAPPING, .section = &CONFIG_MATCH,
                                   .read = config_read_match, .put = config_put_match },
                [TENANT_QUOTAS] = { "quotas", CONFIG_LIST, .section = &CONFIG_QUOTA,
                                    .missing = "a tenant lacks its quotas; without one it can allocate "
                                               "nothing",
                                    .empty = "quotas is empty; without one a tenant can allocate nothing",
                                    .read_element = config_read_quota, ARRAY(struct config_tenant, quotas) },
                [TENANT_LEASES] = { "leases", CONFIG_WORD, MEMBER(struct config_tenant, leases_self),
                                    WORDS("operator", "self"), .hides_initial = true },
        },
};

/* UINT32_MAX is no id: it means "unchanged" to chown(). */
const struct config_section CONFIG_MATCH = {
        .what = "match",
        .fields = {
                [MATCH_USER] = { "user", CONFIG_MATCH_NAME, ARRAY(struct config_tenant, users) },
                [MATCH_GROUP] = { "group", CONFIG_MATCH_NAME, ARRAY(struct config_tenant, groups) },
                [MATCH_UID] = { "uid", CONFIG_MATCH_ID, ARRAY(struct config_tenant, uids), .max = UINT32_MAX - 1 },
                [MATCH_GID] = { "gid", CONFIG_MATCH_ID, ARRAY(struct config_tenant, gids), .max = UINT32_MAX - 1 },
                [MATCH_UNIT] = { "unit", CONFIG_MATCH_PATTERN, ARRAY(struct config_tenant, units), .max = 255 },
                [MATCH_CGROUP] = { "cgroup", CONFIG_MATCH_PATTERN, ARRAY(struct config_tenant, cgroups),
                                   .max = 4095 },
        },
};

static void park_text(const void *object, char ret[static CONFIG_TEXT_BYTES])
{
        const struct config_quota *q = object;

        if (q->park_to)
                snprintf(ret, CONFIG_TEXT_BYTES, "to '%s' after %llums", q->park_to,
                         (unsigned long long)q->park_idle_ms);
}

static void per_text(const void *object, char ret[static CONFIG_TEXT_BYTES])
{
        const struct config_quota *q = object;

        if (q->per_cgroup)
                snprintf(ret, CONFIG_TEXT_BYTES, "%s with limit %s, reserve %s", q->per_cgroup,
                         SIZE(q->per_limit_bytes), SIZE(q->per_reserve_bytes));
}

const struct config_section CONFIG_QUOTA = {
        .what = "a quota",
        .fields = {
                [QUOTA_PARTITION] = { "partition", CONFIG_PARTITION_NAME, MEMBER(struct config_quota, partition),
                                      .missing = "a quota lacks its partition", .is_fixed = true,
                                      .read = config_read_quota_partition },
                [QUOTA_LIMIT] = { "limit", CONFIG_SIZE, MEMBER(struct config_quota, limit_bytes), .min = 1,
                                  .whole = "the partition's limit" },
                [QUOTA_RESERVE] = { "reserve", CONFIG_SIZE, MEMBER(struct config_quota, reserve_bytes),
                                    .whole = "the partition's limit" },
                [QUOTA_MAX_SESSIONS] = { "max_sessions", CONFIG_NUMBER,
                                         MEMBER(struct config_quota, max_sessions), .initial = 1024, .min = 1,
                                         .max = CONFIG_MAX_SESSIONS },
                [QUOTA_MAX_BLOCKS] = { "max_blocks", CONFIG_NUMBER, MEMBER(struct config_quota, max_blocks),
                                       .initial = 100000, .min = 1, .max = 16777216 },
                [QUOTA_PARK] = { "park", CONFIG_MAPPING, .section = &CONFIG_PARK, .read = config_read_park,
                                 .text = park_text },
                [QUOTA_PER] = { "per", CONFIG_MAPPING, .section = &CONFIG_PER, .read = config_read_per,
                                .text = per_text },
        },
};

#define PARK_LACKS(key) "park lacks " key "; write it as in park: {to: ram, idle: 30s}"

const struct config_section CONFIG_PARK = {
        .what = "park",
        .fields = {
                [PARK_TO] = { "to", CONFIG_NAME, MEMBER(struct config_quota, park_to),
                              .missing = PARK_LACKS("to") },
                [PARK_IDLE] = { "idle", CONFIG_DURATION, MEMBER(struct config_quota, park_idle_ms),
                                .missing = PARK_LACKS("idle") },
        },
};

#define PER_LACKS(key) "per lacks " key "; write it as in per: {cgroup: /user.slice/*, limit: 2GiB}"

const struct config_section CONFIG_PER = {
        .what = "per",
        .fields = {
                [PER_CGROUP] = { "cgroup", CONFIG_NAME, MEMBER(struct config_quota, per_cgroup), .max = 120,
                                 .missing = PER_LACKS("cgroup"), .read = config_read_per_cgroup },
                [PER_LIMIT] = { "limit", CONFIG_SIZE, MEMBER(struct config_quota, per_limit_bytes), .min = 1,
                                .whole = "this quota's limit", .missing = PER_LACKS("limit") },
                [PER_RESERVE] = { "reserve", CONFIG_SIZE, MEMBER(struct config_quota, per_reserve_bytes),
                                  .whole = "this quota's limit" },
        },
};

/* ---- values --------------------------------------------------------------- */

uint64_t config_get(const struct config_field *field, const void *object)
{
        const char *at = (const char *)object + field->offset;
        uint32_t value;
        uint64_t wide;

        if (field->n_bytes == sizeof(bool))
                return *(const bool *)at;
        if (field->n_bytes == sizeof(value))
                return memcpy(&value, at, sizeof(value)), value;
        assert(field->n_bytes == sizeof(wide));
        return memcpy(&wide, at, sizeof(wide)), wide;
}

void config_set(const struct config_field *field, void *object, uint64_t value)
{
        char *at = (char *)object + field->offset;
        uint32_t narrow = (uint32_t)value;

        if (field->n_bytes == sizeof(bool))
                *(bool *)at = value;
        else if (field->n_bytes == sizeof(narrow))
                memcpy(at, &narrow, sizeof(narrow));
        else
                memcpy(at, &value, sizeof(value));
}

_Static_assert(TOP_DEFAULT + 1 < CONFIG_MAX_KEYS, "the last field of a section has no key");

void config_init(const struct config_section *s, void *object)
{
        for (const struct config_field *f = s->fields; f->key; f++) {
                if (f->type == CONFIG_MAPPING)
                        config_init(f->section, (char *)object + f->base);
                else if (f->n_bytes > 0)
                        config_set(f, object, f->initial);
        }
}

const void *config_element(const struct config *c, const struct config_field *field, const void *object,
                           size_t nth)
{
        const char *at = object;

        if (field->element)
                return field->element(c, object, nth);
        if (nth >= *(const size_t *)(at + field->n_at))
                return NULL;
        return *(char *const *)(at + field->offset) + nth * field->element_bytes;
}

/* Paths of records may be missing. */
static void string_text(const char *string, char ret[static CONFIG_TEXT_BYTES])
{
        if (string)
                put_text(ret, string);
}

static void group_text(const struct config_socket *s, char ret[static CONFIG_TEXT_BYTES])
{
        if (s->group_name)
                put_text(ret, s->group_name);
        else if (s->group != (gid_t)-1)
                snprintf(ret, CONFIG_TEXT_BYTES, "%u", (unsigned int)s->group);
}

void config_text(const struct config *c, const struct config_field *field, const void *object,
                 char ret[static CONFIG_TEXT_BYTES])
{
        bool is_string =
                field->type == CONFIG_NAME || field->type == CONFIG_PATH || field->type == CONFIG_FILE;
        uint64_t value = is_string || field->n_bytes == 0 ? 0 : config_get(field, object);

        ret[0] = '\0';
        if (field->text)
                field->text(object, ret);
        else if (is_string)
                string_text(*(char *const *)((const char *)object + field->offset), ret);
        else if (field->type == CONFIG_GROUP)
                group_text(object, ret);
        else if (field->type == CONFIG_TENANT_NAME)
                put_text(ret, value < c->n_tenants ? c->tenants[value].name : "");
        else if (field->type == CONFIG_PARTITION_NAME)
                put_text(ret, c->partitions[value].name);
        else if (field->type == CONFIG_SIZE)
                put_text(ret, SIZE(value));
        else if (field->type == CONFIG_WORD)
                put_text(ret, field->words[value]);
        else if (field->type == CONFIG_MODE)
                snprintf(ret, CONFIG_TEXT_BYTES, "%04o", (unsigned int)value);
        else if (field->type != CONFIG_NODE || ((const struct config_partition *)object)->has_node)
                snprintf(ret, CONFIG_TEXT_BYTES, "%llu%s", (unsigned long long)value,
                         field->type == CONFIG_DURATION ? "ms" : "");
}

bool config_is_alike(const struct config_field *field, const void *a, const void *b)
{
        char text_a[CONFIG_TEXT_BYTES], text_b[CONFIG_TEXT_BYTES];

        if (field->type == CONFIG_GROUP)
                return config_get(field, a) == config_get(field, b);
        config_text(NULL, field, a, text_a);
        config_text(NULL, field, b, text_b);
        return strcmp(text_a, text_b) == 0;
}
