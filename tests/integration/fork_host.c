/* A program that knows nothing of bfcd: it loads a plugin that does, calls it, unloads it, says so on
 * standard output, and exits when its standard input ends.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <dlfcn.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <signal.h>

int main(int argc, char **argv)
{
        int (*use)(void);
        void *plugin;

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (argc != 2 || !(plugin = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL)))
                return 2;
        *(void **)&use = dlsym(plugin, "plugin_use");
        if (!use || use() < 0 || dlclose(plugin) != 0)
                return 3;
        puts(dlopen(argv[1], RTLD_NOW | RTLD_NOLOAD) ? "loaded" : "unloaded");
        fflush(stdout);
        while (getchar() != EOF)
                ;
        return 0;
}
