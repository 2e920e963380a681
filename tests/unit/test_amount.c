/* Times and sizes in options.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctl/amount.h"

#include "tests/suite.h"

#define N_OF(list) (sizeof(list) / sizeof((list)[0]))

TEST(times)
{
        static const struct {
                const char *text;
                uint64_t ms;
        } good[] = { { "0", 0 },
                     { "500ms", 500 },
                     { "90s", 90000 },
                     { "10m", 600000 },
                     { "2h", 7200000 },
                     { "1d", 86400000 },
                     { "0007s", 7000 },
                     { "10", 10000 },
                     { "0.5", 500 },
                     { "1.5h", 5400000 },
                     { "1h30m", 5400000 },
                     { "90 min", 5400000 },
                     { "2 days", 172800000 },
                     { "1w", 604800000 },
                     { "0.000001s", 0 } };
        static const char *const bad[] = { "",           "m",
                                           "-1s",        "10mm",
                                           ".5",         "1.",
                                           "1.2.3",      "1h30",
                                           "1e3",        "nan",
                                           "1 h x",      "99999999999999999999s",
                                           "0.0000001s", "18446744073709551615d" };
        uint64_t ms;

        for (size_t i = 0; i < N_OF(good); i++) {
                ck_assert_msg(amount_time(good[i].text, &ms), "%s", good[i].text);
                ck_assert_msg(ms == good[i].ms, "%s: %llu", good[i].text, (unsigned long long)ms);
        }
        ms = 1;
        for (size_t i = 0; i < N_OF(bad); i++)
                ck_assert_msg(!amount_time(bad[i], &ms), "%s", bad[i]);
        ck_assert_uint_eq(ms, 1);
}

TEST(sizes)
{
        static const struct {
                const char *text;
                uint64_t n_bytes;
        } good[] = { { "0", 0 },
                     { "123", 123 },
                     { "123B", 123 },
                     { "512KiB", 524288 },
                     { "3MiB", 3145728 },
                     { "2GiB", UINT64_C(2) << 30 },
                     { "1TiB", UINT64_C(1) << 40 } };
        static const char *const bad[] = { "", "MiB", "-1MiB", "1.5GiB", "1 GiB", "1MB", "16777216TiB" };
        uint64_t n_bytes;

        for (size_t i = 0; i < N_OF(good); i++) {
                ck_assert_msg(amount_size(good[i].text, &n_bytes), "%s", good[i].text);
                ck_assert_uint_eq(n_bytes, good[i].n_bytes);
        }
        for (size_t i = 0; i < N_OF(bad); i++)
                ck_assert_msg(!amount_size(bad[i], &n_bytes), "%s", bad[i]);
}
