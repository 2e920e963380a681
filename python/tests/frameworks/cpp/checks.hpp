/* What the programs of this folder share.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <bfcclient.hpp>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#define CHECK(what)                                                                                          \
        do {                                                                                                 \
                if (!(what)) {                                                                               \
                        std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what);                      \
                        std::exit(1);                                                                        \
                }                                                                                            \
        } while (0)

constexpr std::size_t mib = 1 << 20;

/* Whether the call throws E, and its sentence has this part. */
template <class E, class F> bool throws(const F &call, const char *part)
{
        try {
                call();
        } catch (const E &e) {
                std::fprintf(stderr, "%s\n", e.what());
                return std::string(e.what()).find(part) != std::string::npos;
        }
        return false;
}

/* Blocks of this client. */
inline std::uint64_t n_blocks(const bfc::client &client)
{
        struct bfc_client_stats stats = {};

        stats.struct_size = sizeof(stats);
        bfc::check(bfc_stats(client.get(), &stats));
        return stats.num_blocks;
}
