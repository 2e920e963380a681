/* The programs that libbfcclient(3) shows: they run, and say what they should. And a program outside
 * of the build links the library by pkg-config.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/integration/tools.h"

static const struct rig_config one_tenant = {
        .partitions = "      - {name: train, limit: 64MiB, growth: on-demand}\n"
                      "      - {name: ram, limit: 32MiB, growth: on-demand}\n",
        .tenants = TENANT_OF("red", "@UID@", "{partition: train, limit: 32MiB}, {partition: ram}"),
};

/* Standard output, the caller's. */
static char *run_example(const char *name)
{
        char path[512];
        const char *argv[] = { "/bin/sh", "-c", "exec \"$0\" </dev/null", path, NULL };
        char *out, *err;
        int status;

        snprintf(path, sizeof(path), "%s/example-%s", getenv("BFC_EXAMPLES"), name);
        status = program_run(argv, &out, &err);
        ck_assert_msg(status == 0 && err[0] == '\0', "%s: %d, %s", name, status, err);
        free(err);
        return out;
}

TEST(examples_run)
{
        static const char *const quiet[] = { "default", "poll", "pool" };
        struct rig *rig = rig_start(&one_tenant);
        unsigned long long n;
        char *out;

        if (!getenv("BFC_EXAMPLES")) {
                rig_stop(rig);
                return;
        }
        setenv("BFC_SOCKET", rig->socket, 1);
        unsetenv("BFC_CACHE");
        for (size_t i = 0; i < sizeof(quiet) / sizeof(quiet[0]); i++) {
                out = run_example(quiet[i]);
                ck_assert_str_eq(out, "");
                free(out);
        }
        out = run_example("cache");
        ck_assert_int_eq(sscanf(out, "1000 allocations, %llu requests", &n), 1);
        ck_assert_uint_lt(n, 10);
        free(out);
        if (rig_device() == ON_HOST) {
                out = run_example("park");
                ck_assert_str_eq(out, "3 turns\n");
                free(out);
        }
        out = run_example("stats");
        ck_assert_msg(strncmp(out, "this process: 1024 bytes in use, ", 33) == 0, "%s", out);
        ck_assert_ptr_nonnull(strstr(out, "\nred in train: "));
        text_has(out, "\nthe block: 1024 bytes at ");
        unsetenv("BFC_SOCKET");
        rig_stop(rig);
}

/* $1: the source; $2: the build folder; $3: a folder for the program; then options of pkg-config. Their names may have
 * spaces and brackets, of which pkg-config prints the spaces as xargs reads them. */
#define LINK                                                                                                 \
        "set -e; export PKG_CONFIG_PATH=\"$2/meson-uninstalled\" source=\"$1\" out=\"$3/hello\"; shift 3; "  \
        "pkg-config --cflags --libs \"$@\" bfcclient | "                                                     \
        "xargs cc -Werror \"$source/examples/hello.c\" -o \"$out\" $static; "

/* Standard output of a shell script with these arguments; it must succeed. */
static char *run_script(const char *script, const char *folder, const char *option)
{
        const char *argv[] = {
                "/bin/sh", "-c",   script, "sh", getenv("BFC_LINK_SOURCE"), getenv("BFC_LINK_BUILD"),
                folder,    option, NULL
        };
        char *out, *err;
        int status = program_run(argv, &out, &err);

        ck_assert_msg(status == 0, "%d: %s", status, err);
        free(err);
        return out;
}

static bool can_link(void)
{
        if (getenv("BFC_LINK_BUILD"))
                return true;
        printf("# skipped: a sanitizer's library, or no pkg-config\n");
        return false;
}

/* A program is compiled against the build folder by pkg-config, with either library. */
TEST(a_program_links_by_pkg_config)
{
        struct rig *rig;
        char *out;

        if (!can_link())
                return;
        rig = rig_start(&one_tenant);
        setenv("BFC_SOCKET", rig->socket, 1);
        out = run_script(LINK "LD_LIBRARY_PATH=\"${PKG_CONFIG_PATH%/*}/client\" \"$out\"; rm \"$out\"",
                         rig->folder, NULL);
        ck_assert_str_eq(out, "red uses 10485760 of 33554432 bytes in train\n");
        free(out);
        /* The linker says of each static program that dlopen() needs the C library of this machine. */
        out = run_script("static=-static; " LINK "! readelf -d \"$out\" | grep NEEDED; \"$out\"; rm \"$out\"",
                         rig->folder, "--static");
        ck_assert_str_eq(out, "red uses 10485760 of 33554432 bytes in train\n");
        free(out);
        unsetenv("BFC_SOCKET");
        rig_stop(rig);
}

/* $4: a compiler, $5: a standard, after the arguments of LINK. The program has sanitizers, the library has none. */
#define CPP_PROGRAM(name)                                                                                    \
        "set -e; export PKG_CONFIG_PATH=\"$2/meson-uninstalled\" LD_LIBRARY_PATH=\"$2/client\"; "            \
        "pkg-config --cflags --libs bfcclient | xargs \"$4\" \"-std=$5\" -Wall -Wextra -Wpedantic "          \
        "-Wconversion -Werror -g -pthread -fsanitize=address,undefined -fno-sanitize-recover=all "           \
        "-DBFC_NO_CUDA \"$1/" name "\" -o \"$3/program\"; \"$3/program\"; rm \"$3/program\""

/* True: this compiler is there, and can link a program with sanitizers. */
static bool has_cpp(const char *compiler)
{
        const char *argv[] = { "/bin/sh", "-c",
                               "command -v \"$0\" >/dev/null && echo 'int main() {}' | "
                               "\"$0\" -fsanitize=address,undefined -x c++ - -o /dev/null",
                               compiler, NULL };

        if (program_run(argv, NULL, NULL) == 0)
                return true;
        printf("# skipped: no %s, or it lacks sanitizers\n", compiler);
        return false;
}

static char *run_cpp(const struct rig *rig, const char *script, const char *compiler, const char *standard)
{
        const char *argv[] = {
                "/bin/sh",   "-c",     script,   "sh", getenv("BFC_LINK_SOURCE"), getenv("BFC_LINK_BUILD"),
                rig->folder, compiler, standard, NULL
        };
        char *out, *err;
        int status = program_run(argv, &out, &err);

        ck_assert_msg(status == 0, "%s, %s: %d: %s", compiler, standard, status, err);
        free(err);
        return out;
}

/* bfcclient.hpp. python/tests/frameworks/test_cpp.py has its part for GPUs. */
TEST(the_header_for_cpp_in_each_standard)
{
        static const char *const compilers[] = { "g++", "clang++" }, *const standards[] = { "c++17",
                                                                                            "c++20" };
        struct rig *rig;
        char *out;

        if (!can_link())
                return;
        rig = rig_start(&one_tenant);
        setenv("BFC_SOCKET", rig->socket, 1);
        for (size_t i = 0; i < 2; i++) {
                for (size_t j = 0; j < 2 && has_cpp(compilers[i]); j++) {
                        out = run_cpp(rig, CPP_PROGRAM("tests/integration/cpp_client.cpp"), compilers[i],
                                      standards[j]);
                        ck_assert_str_eq(out, "done\n");
                        free(out);
                }
        }
        if (has_cpp("g++")) {
                out = run_cpp(rig, CPP_PROGRAM("examples/pmr.cpp"), "g++", "c++17");
                ck_assert_ptr_nonnull(strstr(out, "red uses "));
                ck_assert_ptr_nonnull(strstr(out, " of 33554432 bytes in train\n"));
                text_has(out, "\ntenant 'red' asked for more than its limit in 'train'");
        }
        unsetenv("BFC_SOCKET");
        rig_stop(rig);
}

/* Only the names that the shared library exports can clash with those of a program. */
TEST(the_static_library_has_public_names_only)
{
        char *names, *listed;

        if (!can_link())
                return;
        names = run_script(
                "nm -g --defined-only -f posix \"$2/client/libbfcclient.a\" | "
                "sed -n 's/^\\([^ ]*\\) T.*/\\1/p; s/^\\([^ ]*\\) [A-SU-Z].*/not a function: \\1/p' | sort",
                "", NULL);
        listed = run_script("sed -n 's/^[ \t]*\\(bfc_[^;]*\\);.*/\\1/p' \"$1/client/bfcclient.map\" | sort",
                            "", NULL);
        ck_assert_str_ne(listed, "");
        ck_assert_msg(strcmp(names, listed) == 0, "not those of the map: %.200s...", names);
        free(names);
        free(listed);
}
