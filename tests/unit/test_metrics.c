/* bfcctl grants and bfcctl metrics, from made-up rows. promtool judges a real daemon's in the test `monitor`.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "ctl/grants.h"
#include "ctl/metrics.h"
#include "ctl/table.h"
#include "tests/suite.h"

static uint64_t bounds[] = { 100000, 1500000, 2000000000, 600000000000 };
static uint64_t backed_counts[] = { 90, 8, 1, 0, 1 }, grown_counts[] = { 0, 0, 3, 0, 0 };

/* One tenant in one partition of one device. The rows live as long as the program. */
static struct list *rows(void)
{
        static Bfcd__Status status;
        static Bfcd__DeviceRow device, *devices[] = { &device };
        static Bfcd__DeviceCalls makes;
        static Bfcd__PartitionRow partition, *partitions[] = { &partition };
        static Bfcd__TenantRow tenant, *tenants[] = { &tenant };
        static Bfcd__GrantsRow backed, grown, *grants[] = { &backed, &grown };
        static Bfcd__Statistics stats;
        static char version[] = "1.2\"3\\\n", gpu[] = "cuda:0", draining[] = "draining", train[] = "train",
                    red[] = "red", is_backed[] = "backed", is_grown[] = "grown";
        static struct list l;

        bfcd__status__init(&status);
        bfcd__device_row__init(&device);
        bfcd__device_calls__init(&makes);
        bfcd__partition_row__init(&partition);
        bfcd__tenant_row__init(&tenant);
        bfcd__grants_row__init(&backed);
        bfcd__grants_row__init(&grown);
        bfcd__statistics__init(&stats);
        status.version = version;
        status.uptime_ms = 12345;
        status.longest_turn_ns = 1000000001;
        status.num_log_lines_lost = 7;
        status.num_unresponsive = 3;
        status.n_devices = 1;
        status.devices = devices;
        device.id = gpu;
        device.state = draining;
        device.bytes_total = UINT64_C(1) << 40;
        makes.num_calls = 11;
        makes.total_ns = 5;
        device.makes = &makes;
        partition.name = train;
        partition.device = device.id;
        partition.stats = &stats;
        tenant.tenant = red;
        tenant.partition = partition.name;
        tenant.stats = &stats;
        tenant.bytes_waiting = 99;
        stats.bytes_in_use = 4096;
        stats.num_allocs = 12;
        stats.last_refusal_time_ms = 1700000000789;
        backed.tenant = grown.tenant = tenant.tenant;
        backed.partition = grown.partition = partition.name;
        backed.way = is_backed;
        backed.counts = backed_counts;
        backed.n_counts = 5;
        backed.total_ns = 50000000;
        grown.way = is_grown;
        grown.counts = grown_counts;
        grown.n_counts = 5;
        grown.total_ns = 3000000000;
        l = (struct list){
                .status = &status,
                .partitions = partitions,
                .n_partitions = 1,
                .tenants = tenants,
                .n_tenants = 1,
                .grants = grants,
                .n_grants = 2,
                .grant_bounds_ns = bounds,
                .n_grant_bounds_ns = 4,
        };
        return &l;
}

static char *metrics_with(const struct list *l, const struct metrics_options *o)
{
        char *text = NULL;
        size_t n;
        FILE *out = open_memstream(&text, &n);

        ck_assert_ptr_nonnull(out);
        ck_assert_int_eq(metrics_print(out, l, o), 0);
        fclose(out);
        return text;
}

static char *metrics_of(const struct list *l, bool openmetrics)
{
        return metrics_with(l, &(struct metrics_options){ .openmetrics = openmetrics });
}

static void has(const char *text, const char *part)
{
        ck_assert_msg(strstr(text, part), "no '%s'", part);
}

TEST(metrics_of_rows)
{
        char *text = metrics_of(rows(), false);

        has(text, "# HELP bfcd_build_info ");
        has(text, "\nbfcd_build_info{version=\"1.2\\\"3\\\\?\"} 1\n");
        has(text, "\n# TYPE bfcd_uptime_seconds gauge\nbfcd_uptime_seconds 12.345\n");
        has(text, "\n# TYPE bfcd_unresponsive_sessions gauge\nbfcd_unresponsive_sessions 3\n");
        has(text, "\nbfcd_loop_longest_turn_seconds 1.000000001\n");
        has(text, "\n# TYPE bfcd_log_lines_lost_total counter\nbfcd_log_lines_lost_total 7\n");
        has(text, "\nbfcd_device_size_bytes{device=\"cuda:0\"} 1099511627776\n");
        has(text, "\nbfcd_device_make_calls_total{device=\"cuda:0\"} 11\n");
        has(text, "\nbfcd_device_make_seconds_total{device=\"cuda:0\"} 0.000000005\n");
        has(text, "\nbfcd_device_destroy_calls_total{device=\"cuda:0\"} 0\n"); /* the row has none */
        has(text, "\nbfcd_device_draining{device=\"cuda:0\"} 1\n");
        has(text, "\nbfcd_device_lost{device=\"cuda:0\"} 0\n");
        has(text, "\nbfcd_partition_in_use_bytes{device=\"cuda:0\",partition=\"train\"} 4096\n");
        has(text, "\nbfcd_tenant_in_use_bytes{device=\"cuda:0\",partition=\"train\",tenant=\"red\"} 4096\n");
        has(text,
            "\nbfcd_tenant_allocations_total{device=\"cuda:0\",partition=\"train\",tenant=\"red\"} 12\n");
        has(text, "\nbfcd_tenant_waiting_bytes{device=\"cuda:0\",partition=\"train\",tenant=\"red\"} 99\n");
        has(text,
            "\nbfcd_tenant_last_refusal_timestamp_seconds{device=\"cuda:0\",partition=\"train\",tenant=\"red\"} "
            "1700000000.789\n");
        ck_assert_ptr_null(strstr(text, "# EOF"));
        ck_assert_int_eq(text[strlen(text) - 1], '\n');
        free(text);
}

#define LABELS "device=\"cuda:0\",partition=\"train\",tenant=\"red\""

TEST(histograms_are_cumulative)
{
        char *text = metrics_of(rows(), false);

        has(text, "\n# TYPE bfcd_grant_backed_seconds histogram\n"
                  "bfcd_grant_backed_seconds_bucket{" LABELS ",le=\"0.0001\"} 90\n"
                  "bfcd_grant_backed_seconds_bucket{" LABELS ",le=\"0.0015\"} 98\n"
                  "bfcd_grant_backed_seconds_bucket{" LABELS ",le=\"2\"} 99\n"
                  "bfcd_grant_backed_seconds_bucket{" LABELS ",le=\"600\"} 99\n"
                  "bfcd_grant_backed_seconds_bucket{" LABELS ",le=\"+Inf\"} 100\n"
                  "bfcd_grant_backed_seconds_sum{" LABELS "} 0.050000000\n"
                  "bfcd_grant_backed_seconds_count{" LABELS "} 100\n");
        /* No request was served so. */
        has(text, "\nbfcd_grant_waited_seconds_bucket{" LABELS ",le=\"+Inf\"} 0\n");
        has(text, "\nbfcd_grant_waited_seconds_count{" LABELS "} 0\n");
        free(text);
}

#define LEASE_OF(tenant, name)                                                                               \
        "device=\"cuda:0\",partition=\"train\",tenant=\"" tenant "\",lease=\"" name "\"} "

/* Processes choose the names of the leases that they cause, so each name would be a time series. */
TEST(leases_that_processes_cause_are_summed)
{
        static const struct {
                const char *name, *tenant, *made_by;
        } made[] = { { "u7:b", "red", "user" },
                     { "job", "red", "operator" },
                     { "u7:a", "blue", "user" },
                     { "pod::1", "red", "config" },
                     { "u7:c", "red", "user" } };
        enum { N = sizeof(made) / sizeof(made[0]) };
        Bfcd__LeaseRow leases[N], *pointers[N];
        Bfcd__Statistics stats[N];
        struct list l = *rows();
        char *text;

        for (size_t i = 0; i < N; i++) {
                bfcd__lease_row__init(&leases[i]);
                bfcd__statistics__init(&stats[i]);
                leases[i].name = (char *)(uintptr_t)made[i].name;
                leases[i].tenant = (char *)(uintptr_t)made[i].tenant;
                leases[i].made_by = (char *)(uintptr_t)made[i].made_by;
                leases[i].partition = l.partitions[0]->name;
                leases[i].stats = &stats[i];
                leases[i].num_waiting = 1 + i;
                stats[i].bytes_in_use = UINT64_C(100) << i;
                stats[i].num_over_quota = 7;
                pointers[i] = &leases[i];
        }
        l.leases = pointers;
        l.n_leases = N;
        text = metrics_of(&l, false);
        has(text, "\nbfcd_lease_in_use_bytes{" LEASE_OF("red", "job") "200\n");
        has(text, "\nbfcd_lease_in_use_bytes{" LEASE_OF("red", "(user)") "1700\n");
        has(text, "\nbfcd_lease_in_use_bytes{" LEASE_OF("red", "(config)") "800\n");
        has(text, "\nbfcd_lease_in_use_bytes{" LEASE_OF("blue", "(user)") "400\n");
        has(text, "\nbfcd_lease_waiting_requests{" LEASE_OF("red", "(user)") "6\n");
        has(text, "\nbfcd_lease_refusals_over_quota_total{" LEASE_OF("red", "job") "7\n");
        ck_assert_ptr_null(strstr(text, "u7:"));
        ck_assert_ptr_null(strstr(text, "pod::"));
        ck_assert_ptr_null(
                strstr(text, "refusals_over_quota_total{" LEASE_OF("red", "(user)"))); /* it would fall */
        free(text);
        text = metrics_with(&l, &(struct metrics_options){ .each_lease = true });
        has(text, "\nbfcd_lease_in_use_bytes{" LEASE_OF("red", "u7:b") "100\n");
        has(text, "\nbfcd_lease_refusals_over_quota_total{" LEASE_OF("red", "pod::1") "7\n");
        ck_assert_ptr_null(strstr(text, "(user)"));
        free(text);
}

/* A counter's family is named without the suffix of its samples. */
TEST(openmetrics_names_and_end)
{
        char *text = metrics_of(rows(), true);
        const char *end = "\n# EOF\n";

        has(text, "\n# TYPE bfcd_log_lines_lost counter\nbfcd_log_lines_lost_total 7\n");
        ck_assert_str_eq(text + strlen(text) - strlen(end), end);
        free(text);
}

/* Of each family there is one HELP and one TYPE, and its samples follow them. */
TEST(families_are_not_interleaved)
{
        char *text = metrics_of(rows(), false), *rest = text, *line, *seen[256];
        char family[128] = "";
        size_t n_seen = 0;

        while ((line = strsep(&rest, "\n")) && *line) {
                char *name = strncmp(line, "# HELP ", 7) == 0 ? line + 7 : NULL;

                if (name) {
                        name[strcspn(name, " ")] = '\0';
                        for (size_t i = 0; i < n_seen; i++)
                                ck_assert_str_ne(seen[i], name);
                        ck_assert_uint_lt(n_seen, 256);
                        seen[n_seen++] = name;
                        snprintf(family, sizeof(family), "%s", name);
                } else if (strncmp(line, "# TYPE ", 7) == 0) {
                        ck_assert(strncmp(line + 7, family, strlen(family)) == 0);
                } else {
                        ck_assert_msg(strncmp(line, family, strlen(family)) == 0, "%s in %s", line, family);
                        ck_assert_ptr_null(strstr(line, "session="));
                        ck_assert_ptr_null(strstr(line, "pid="));
                }
        }
        ck_assert_uint_gt(n_seen, 50);
        free(text);
}

TEST(grants_as_a_table_and_as_json)
{
        char *text = NULL;
        size_t n;
        FILE *out = open_memstream(&text, &n);
        json_t *document = grants_json(rows()), *row = json_array_get(json_object_get(document, "grants"), 0);

        ck_assert_int_eq(grants_print(out, rows()), 0);
        fclose(out);
        has(text, "TENANT  PARTITION  SERVED  GRANTS");
        has(text, "red     train      backed     100  500 us  <=100 us  <=2.0 s     more\n");
        has(text, "red     train      grown        3   1.0 s   <=2.0 s  <=2.0 s  <=2.0 s\n");
        ck_assert_int_eq(json_integer_value(json_object_get(row, "num_grants")), 100);
        ck_assert_int_eq(json_integer_value(json_object_get(row, "total_ns")), 50000000);
        ck_assert_uint_eq(json_array_size(json_object_get(row, "counts")), 5);
        ck_assert_uint_eq(json_array_size(json_object_get(row, "bounds_ns")), 4);
        ck_assert_str_eq(json_string_value(json_object_get(row, "served")), "backed");
        json_decref(document);
        free(text);
}
