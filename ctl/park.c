/* bfcctl park and wake: sessions park blocks, or wake parked ones.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>

#include "ctl/command.h"
#include "ctl/show.h"
#include "ctl/text.h"

static int print_park(const struct invocation *i, const struct ask_park *park, uint64_t n_asked,
                      uint64_t n_bytes)
{
        const char *done = park->wakes ? "bytes_woken" : "bytes_parked";
        char size[TEXT_MAX];

        if (i->json)
                return command_finish(show_print(
                        stdout, show_document(park->wakes ? "wake" : "park",
                                              json_pack("{s:I, s:o}", "num_asked", (json_int_t)n_asked, done,
                                                        table_json_number(n_bytes)))));
        printf("%llu session%s asked, %s %s.\n", (unsigned long long)n_asked, n_asked == 1 ? "" : "s",
               text_size(n_bytes, size), park->wakes ? "woken" : "parked");
        return command_finish(0);
}

static int run(struct ask *a, const struct invocation *i, const struct command *c, bool wakes)
{
        struct ask_park park = { .tenant = "",
                                 .partition = i->partition ? i->partition : "",
                                 .tag = i->tag ? i->tag : "",
                                 .to = i->to ? i->to : "",
                                 .wakes = wakes };
        uint64_t n_asked, n_bytes;

        (void)c;
        if (i->n_arguments == 0 || !*i->arguments[0])
                return command_usage("no session or tenant", NULL, i->use);
        if (!command_read_id(i->arguments[0], &park.session_id)) {
                park.session_id = 0;
                park.tenant = i->arguments[0];
        }
        if (ask_park(a, &park, &n_asked, &n_bytes) < 0)
                return command_complain(a);
        return print_park(i, &park, n_asked, n_bytes);
}

int run_park(struct ask *a, const struct invocation *i, const struct command *c)
{
        return run(a, i, c, false);
}

int run_wake(struct ask *a, const struct invocation *i, const struct command *c)
{
        return run(a, i, c, true);
}
