/* Runs a fuzz target over files, so that a corpus is an ordinary test.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_data);

static int n_run;

static int run_file(const char *path)
{
        FILE *f = fopen(path, "rb");
        struct stat st;
        uint8_t *data;
        size_t n;

        if (!f || fstat(fileno(f), &st) < 0 || !(data = malloc((size_t)st.st_size + 1))) {
                printf("not ok %d - %s cannot be read\n", ++n_run, path);
                return 1;
        }
        n = fread(data, 1, (size_t)st.st_size, f);
        fclose(f);
        LLVMFuzzerTestOneInput(data, n);
        free(data);
        printf("ok %d - %s\n", ++n_run, path);
        return 0;
}

static int is_visible(const struct dirent *d)
{
        return d->d_name[0] != '.';
}

static int run_path(const char *path)
{
        struct dirent **names;
        int n = scandir(path, &names, is_visible, alphasort), failed = 0;

        if (n < 0)
                return run_file(path);
        for (int i = 0; i < n; i++) {
                char file[4096];

                snprintf(file, sizeof(file), "%s/%s", path, names[i]->d_name);
                failed |= run_file(file);
                free(names[i]);
        }
        free(names);
        return failed;
}

int main(int argc, char **argv)
{
        int failed = 0;

        for (int i = 1; i < argc; i++)
                failed |= run_path(argv[i]);
        printf("1..%d\n", n_run);
        return failed || n_run == 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}
