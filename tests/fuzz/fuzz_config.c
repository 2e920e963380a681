/* SPDX-License-Identifier: Apache-2.0 */
/* Any text as a config. What is refused must say why, each message on a line
 * with a place; what is accepted must keep its promises and survive being
 * written out and read again. */
#include "daemon/config/config.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

#define REQUIRE(condition)                                                                                   \
        do {                                                                                                 \
                if (!(condition))                                                                            \
                        abort();                                                                             \
        } while (0)

/* A machine with every GPU; ids of one length and last byte are the same one. */
static int look(void *userdata, const char *admin_socket, const char *id, struct config_gpu *ret,
                char *ret_sentence, size_t n_sentence)
{
        (void)admin_socket;
        (void)userdata;
        (void)ret_sentence;
        (void)n_sentence;
        *ret = (struct config_gpu){
                .uuid = { (uint8_t)strlen(id), (uint8_t)id[strlen(id) - 1] },
                .bytes_total = (UINT64_C(1) << 30) + 1,
                .bytes_free = UINT64_C(1) << 28,
        };
        return 0;
}

static const struct config_machine machine = { .look = look };

static int parse(const void *text, size_t n_bytes, struct config **ret)
{
        size_t n_errors = 0;
        char *errors = NULL;
        FILE *f = open_memstream(&errors, &n_errors);
        int r;

        REQUIRE(f);
        r = config_parse("fuzz.yaml", text, n_bytes, &machine, f, ret);
        REQUIRE(fclose(f) == 0);
        REQUIRE(r == 0 || n_errors > 0);
        REQUIRE(strlen(errors) == n_errors);
        for (const char *line = errors; *line; line = strchr(line, '\n') + 1)
                REQUIRE(strncmp(line, "fuzz.yaml:", 10) == 0 && strchr(line, '\n'));
        free(errors);
        return r;
}

/* What the daemon builds upon. */
static void check(const struct config *c)
{
        REQUIRE(c->n_devices > 0 && c->n_partitions > 0 && c->n_tenants > 0);
        REQUIRE(c->default_tenant < (ssize_t)c->n_tenants);
        for (size_t i = 0; i < c->n_partitions; i++) {
                const struct config_partition *p = &c->partitions[i];
                uint64_t reserves = 0;

                REQUIRE(p->device < c->n_devices);
                REQUIRE(p->limit_bytes > 0 && p->limit_bytes % CONFIG_GRANULARITY == 0);
                REQUIRE(p->limit_bytes <= c->devices[p->device].size_bytes);
                for (size_t t = 0; t < c->n_tenants; t++) {
                        for (size_t n = 0; n < c->tenants[t].n_quotas; n++) {
                                const struct config_quota *q = &c->tenants[t].quotas[n];

                                REQUIRE(q->partition < c->n_partitions);
                                if (q->partition != i)
                                        continue;
                                REQUIRE(q->limit_bytes > 0 && q->limit_bytes % CONFIG_GRANULARITY == 0);
                                REQUIRE(q->limit_bytes <= p->limit_bytes);
                                REQUIRE(q->reserve_bytes <= q->limit_bytes);
                                reserves += q->reserve_bytes;
                        }
                }
                REQUIRE(reserves <= p->limit_bytes);
        }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
        struct config *c = NULL;
        struct config *again = NULL;
        char *text;
        char *text_again;

        if (parse(data, n_bytes, &c) < 0) {
                REQUIRE(!c);
                return 0;
        }
        check(c);
        text = config_format(c);
        REQUIRE(text);
        REQUIRE(parse(text, strlen(text), &again) == 0);
        text_again = config_format(again);
        REQUIRE(text_again && strcmp(text, text_again) == 0);
        free(text);
        free(text_again);
        config_free(c);
        config_free(again);
        return 0;
}
