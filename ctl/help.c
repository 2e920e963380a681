/* bfcctl --help; see help.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctl/help.h"

#include <stdbool.h>
#include <string.h>

#include "proto/paths.h"

static const char for_all[] =
        "Usage: bfcctl [--socket PATH] [--json | --wide] COMMAND\n"
        "\n"
        "Shows and controls bfcd, which shares device memory between tenants.\n"
        "\n"
        "  status                           the daemon and its devices\n"
        "  partitions                       each partition's use, peaks and limit\n"
        "  tenants                          each tenant's use, peaks and limit\n"
        "  sessions                         client processes: held, used, idle\n"
        "  blocks                           every allocated block\n"
        "  extents                          the memory that the devices gave, by address\n"
        "  shared                           blocks that processes share, by name\n"
        "  keep                             of these, those that stay without references\n"
        "  whoami                           the tenant of this user\n"
        "  explain [PARTITION] [--tenant TENANT]\n"
        "                                   the use of memory by session and address\n"
        "  leaks [--older TIME] [--by tag|session|block] [--tenant TENANT]\n"
        "                                   blocks by age, as sums\n"
        "  events                           a line of JSON for each session that begins or\n"
        "                                   ends, refusal, eviction and drain\n"
        "  wait lease NAME [--timeout TIME]\n"
        "                                   until the lease has ended\n"
        "  wait room PARTITION SIZE [--tenant TENANT] [--timeout TIME]\n"
        "                                   until the tenant could get so much\n"
        "  waiting                          requests that wait for memory, in their order\n"
        "  refusals                         the last 16 refusals of each tenant\n"
        "  grants                           how long requests waited for their memory\n"
        "  map PARTITION [--svg FILE] [--tenant TENANT]\n"
        "                                   a picture of the address space\n"
        "  snapshot [FILE]                  all blocks, for PyTorch's memory viewer\n"
        "  metrics [--openmetrics] [--each-lease]\n"
        "                                   all of this as metrics for Prometheus\n"
        "  history [--since TIME] [--until TIME] [--tenant TENANT] [--file PATH]\n"
        "                                   ended sessions, peaks and refusals, from the\n"
        "                                   daemon's records in the journal or in a file\n"
        "  tensorboard --logdir DIR [--interval TIME] [--count N] [--tenant TENANT]\n"
        "                                   each tenant's use as curves for TensorBoard\n"
        "  lease list                       leases: quotas of jobs within a tenant's\n";

static const char for_operators[] =
        "On the monitor socket:\n"
        "  top [sessions|tenants|partitions] [--interval TIME] [--once]\n"
        "                                   a live view, with keys as in htop; --once\n"
        "                                   prints it as text\n"
        "On the admin and monitor sockets also:\n"
        "  config                           the current configuration\n"
        "On the admin socket also:\n"
        "  reload [--dry-run [FILE]]        read the configuration again; --dry-run only\n"
        "                                   shows what that, or FILE, would change\n"
        "  reset-peaks [TENANT [PARTITION]] reset peaks to the current usage\n"
        "  trim [TENANT] [--partition NAME] [--bytes N] [--timeout TIME]\n"
        "                                   reclaim idle client caches\n"
        "  park SESSION|TENANT [--partition NAME] [--tag TAG] [--to PARTITION]\n"
        "                                   copy idle parkable blocks to host memory and\n"
        "                                   return theirs\n"
        "  wake SESSION|TENANT [--partition NAME] [--tag TAG]\n"
        "                                   give parked blocks memory again\n"
        "  evict SESSION [--reason TEXT]    end a session; its client gets the reason\n"
        "  forget TENANT NAME               free a kept block with its last reference\n"
        "  drain DEVICE [--wait [TIME]]     refuse new blocks on it, and release it when\n"
        "                                   it is empty, for a reset or a change\n"
        "  resume DEVICE                    serve blocks on it again\n"
        "On the admin or monitor socket, as root:\n"
        "  driver-limits                    set the driver's limits for control groups of\n"
        "                                   leases (from r615 on)\n"
        "On the admin socket, or on the client socket where the tenant has\n"
        "`leases: self`:\n"
        "  lease create NAME [--tenant TENANT] --partition NAME --limit SIZE\n"
        "        [--reserve SIZE] (--cgroup PATH | --unit UNIT | --pid PID | --user USER |\n"
        "        --socket-name NAME) [--ttl TIME] [--evict] [--grace TIME]\n"
        "                                   make a lease for these processes, or for those\n"
        "                                   that connect to a socket of its own\n"
        "  lease set NAME [--limit SIZE] [--reserve SIZE] [--ttl TIME]\n"
        "                                   change it\n"
        "  lease end NAME [--evict] [--grace TIME]\n"
        "                                   no new sessions; it goes with the last one\n"
        "  run --limit SIZE [--reserve SIZE] [--lease NAME] [--tenant TENANT]\n"
        "        [--partition NAME] [--wait [TIME]] [--evict] [--grace TIME] [--quiet]\n"
        "        [--strict | --no-preload] [--] COMMAND [ARGUMENT...]\n"
        "                                   run a program in a lease of its own\n";

static const char views[] =
        "\n"
        "Commands that show something take --watch [TIME], and show it again, every 2\n"
        "seconds by default. Lists take --sort COLUMN and --columns COLUMN,...: titles of\n"
        "the table, or keys of the JSON.\n";

static const char options[] =
        "\n"
        "  -s, --socket PATH  the socket to talk to, for clients, admins, monitors or leases\n"
        "  -j, --json         print JSON\n"
        "  -w, --wide         print all columns, without a cut at 80 columns\n"
        "  -h, --help         print this; after a command that of the command\n"
        "      --version      print the version\n"
        "\n"
        "Without --socket: $BFC_ADMIN_SOCKET, else $BFC_MONITOR_SOCKET, else\n"
        "$BFC_SOCKET, else the first that this user may open of " PATHS_ADMIN_SOCKET
        ",\n" PATHS_MONITOR_SOCKET " and " PATHS_CLIENT_SOCKET ". A tenant sees its own,\n"
        "the others see all.\n";

void help_print(FILE *out)
{
        fputs(for_all, out);
        fputs(for_operators, out);
        fputs(views, out);
        fputs(options, out);
}

/* An entry is a line that begins with the command after two blanks, and the lines with more blanks below it. */
static void print_entries(FILE *out, const char *text, const char *name)
{
        size_t n_name = strlen(name), n;
        bool is_in = false;

        for (; *text; text += n) {
                size_t n_blanks = strspn(text, " ");

                n = strcspn(text, "\n") + 1;
                if (n_blanks <= 2)
                        is_in = n_blanks == 2 && strncmp(text + 2, name, n_name) == 0 &&
                                strchr(" \n", text[2 + n_name]);
                if (is_in)
                        fwrite(text, 1, n, out);
        }
}

void help_print_command(FILE *out, const char *name)
{
        fputs("Usage: bfcctl [--socket PATH] [--json | --wide]\n", out);
        print_entries(out, for_all, name);
        print_entries(out, for_operators, name);
        fputs(views, out);
        fputs("\nbfcctl(1) says more; \"bfcctl --help\" lists all commands.\n", out);
}
