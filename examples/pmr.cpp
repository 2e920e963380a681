/* Blocks, and containers of std::pmr, in host memory of bfcd.
 * SPDX-License-Identifier: Apache-2.0
 * c++ -std=c++17 pmr.cpp $(pkg-config --cflags --libs bfcclient) -o pmr */
#include <bfcclient.hpp>
#include <iostream>
#include <map>
#include <string>
#include <vector>

int main()
try {
        bfc::client client;
        bfc::block block = client.allocate(1 << 20); /* freed at the end of its scope */
        const char text[] = "hello";
        block.write(text, sizeof(text)); /* memcpy, on whatever device it is */

        bfc::host_memory_resource memory(client);
        std::pmr::vector<double> samples(1 << 18, 0.5, &memory);
        std::pmr::map<int, std::pmr::string> names(&memory);
        names[7] = "a string that is too long for the string object itself, so it has memory of bfcd, too";

        bfc_tenant_usage usage = client.usage();
        std::cout << client.tenant() << " uses " << usage.bytes_requested << " of " << usage.bytes_limit
                  << " bytes in " << client.partition() << "\n";
        try {
                samples.resize(usage.bytes_limit);
        } catch (const bfc::quota_exceeded &e) { /* a std::bad_alloc */
                std::cout << e.what() << "\n";
        }
        return 0;
} catch (const std::exception &e) {
        std::cerr << e.what() << "\n";
        return 1;
}
