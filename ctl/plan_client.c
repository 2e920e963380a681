/* The client's part of a plan; see plan_client.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctl/plan_client.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <bfcclient.h>

#include "ctl/plan_call.h"
#include "ctl/plan_daemon.h"
#include "ctl/progress.h"

/* As the job did. */
static int request(bfc_client *client, const struct trace *t, uint32_t buffer, void **ret_block)
{
        struct bfc_malloc_options how = { .struct_size = sizeof(how) };
        char tag[TRACE_TAG_MAX + 1];

        if (!trace_is_own(t, buffer, &how.flags, tag))
                return bfc_malloc(client, t->buffers[buffer].n_bytes, ret_block);
        how.tag = tag;
        return bfc_malloc_with(client, t->buffers[buffer].n_bytes, &how, ret_block);
}

/* -EDQUOT and -ENOMEM are refusals; the rest ends the plan. */
static int allocate(bfc_client *client, const struct plan_run *run, uint32_t buffer, void **blocks,
                    struct plan_result *ret)
{
        int r = request(client, run->trace, buffer, &blocks[buffer]);

        if (r != -EDQUOT && r != -ENOMEM)
                return r;
        ret->is_served = false;
        ret->refused = buffer;
        snprintf(ret->refusal, sizeof(ret->refusal), "%s", bfc_last_error());
        return 0;
}

static int live(bfc_client *client, const struct plan_run *run, void **blocks, struct plan_result *ret)
{
        const struct trace *t = run->trace;
        int r = 0;

        for (size_t i = 0; r == 0 && ret->is_served && i < t->n_events; i++) {
                const struct trace_event *e = &t->events[i];

                if (run->stop && *run->stop)
                        return -EINTR;
                if (run->progress)
                        progress_step(run->progress, 1);
                if (!e->is_free)
                        r = allocate(client, run, e->buffer, blocks, ret);
                else
                        r = bfc_free(client, blocks[e->buffer]);
        }
        return r;
}

/* A plan is the same in every environment: in a job of bfcctl run, too. */
static void clear_variables(void)
{
        char name[128];
        size_t n;

        for (char **v = environ; *v;) {
                n = strcspn(*v, "=");
                if (strncmp(*v, "BFC_", 4) != 0 || n >= sizeof(name)) {
                        v++;
                        continue;
                }
                memcpy(name, *v, n);
                name[n] = '\0';
                unsetenv(name); /* the next one takes its place */
        }
}

int plan_client_run(struct plan_daemon *daemon, const struct plan_run *run, struct plan_result *ret)
{
        struct bfc_options options = {
                .struct_size = sizeof(options),
                .socket = "plan",
                .name = "bfc-replay",
                .flags = run->has_cache ? 0 : BFC_NO_CACHE,
        };
        struct bfc_client_stats stats = { .struct_size = sizeof(stats) };
        struct plan_result result = { .is_served = true };
        void **blocks = calloc(run->trace->n_buffers, sizeof(*blocks));
        bfc_client *client = NULL;
        int r;

        if (!blocks)
                return -ENOMEM;
        clear_variables();
        plan_call_serve(daemon);
        r = bfc_connect(&options, &client);
        if (r == 0)
                r = live(client, run, blocks, &result);
        if (r == 0)
                r = bfc_stats(client, &stats);
        bfc_disconnect(client);
        free(blocks);
        if (r < 0)
                return r;
        result.peak_client_bytes = stats.peak_bytes_reserved;
        *ret = result;
        return 0;
}
