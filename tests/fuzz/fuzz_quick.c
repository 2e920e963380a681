/* The codec by hand beside the generated one: what it accepts, both read alike, and what it writes, both write alike. The
 * input is read as the payload of a request, and as the numbers of messages that both write.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "proto/quick.h"

#include <stdlib.h>
#include <string.h>

#include "proto/frame.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_data);

static void require(int condition)
{
        if (!condition)
                abort();
}

static void require_same_malloc(const Bfcd__Malloc *a, const Bfcd__Malloc *b)
{
        require(a->base.n_unknown_fields == 0 && b->base.n_unknown_fields == 0);
        require(a->base.descriptor == b->base.descriptor);
        require(a->partition == b->partition && a->n_bytes == b->n_bytes && a->flags == b->flags);
        require(a->wait_ms == b->wait_ms && a->n_needed == b->n_needed && strcmp(a->tag, b->tag) == 0);
}

static void require_same_request(const Bfcd__Request *a, const Bfcd__Request *b)
{
        require(a->base.n_unknown_fields == 0 && b->base.n_unknown_fields == 0);
        require(a->base.descriptor == b->base.descriptor);
        require(a->id == b->id && a->body_case == b->body_case);
        if (a->body_case == BFCD__REQUEST__BODY_MALLOC) {
                require_same_malloc(a->malloc, b->malloc);
                return;
        }
        require(a->body_case == BFCD__REQUEST__BODY_FREE);
        require(a->free->base.n_unknown_fields == 0 && b->free->base.n_unknown_fields == 0);
        require(a->free->base.descriptor == b->free->base.descriptor);
        require(a->free->block_id == b->free->block_id);
}

/* Whether it was accepted. The payload is copied, so that a sanitizer sees a read behind its end. */
static bool compare_request(const uint8_t *payload, size_t n_bytes)
{
        uint8_t *copy = malloc(n_bytes + (n_bytes == 0));
        Bfcd__Request *generated;
        struct quick_request quick;
        bool is_quick;

        require(copy != NULL);
        if (n_bytes > 0)
                memcpy(copy, payload, n_bytes);
        is_quick = quick_unpack_request(copy, n_bytes, &quick);
        generated = bfcd__request__unpack(NULL, n_bytes, copy);
        if (is_quick) {
                require(generated != NULL);
                require_same_request(&quick.request, generated);
        }
        if (generated)
                bfcd__request__free_unpacked(generated, NULL);
        free(copy);
        return is_quick;
}

static void compare_reply(const Bfcd__Reply *reply)
{
        uint8_t quick[QUICK_REPLY_BYTES], generated[QUICK_REPLY_BYTES];
        size_t n_bytes = quick_pack_reply(reply, quick);

        require(n_bytes > 0 && n_bytes == bfcd__reply__get_packed_size(reply));
        require(bfcd__reply__pack(reply, generated) == n_bytes && memcmp(quick, generated, n_bytes) == 0);
}

/* The next number of the input: as many bits of it as its first byte says. 0: it has ended. */
static uint64_t next_number(const uint8_t **data, size_t *n_data)
{
        uint8_t bytes[9] = { 0 };
        size_t n = *n_data < sizeof(bytes) ? *n_data : sizeof(bytes);
        uint64_t value;

        memcpy(bytes, *data, n);
        *data += n;
        *n_data -= n;
        memcpy(&value, bytes + 1, sizeof(value));
        return bytes[0] % 65 == 0 ? 0 : value >> (64 - bytes[0] % 65);
}

static void compare_numbers(const uint8_t *data, size_t n_data)
{
        Bfcd__Malloc malloc_body = BFCD__MALLOC__INIT;
        Bfcd__Free free_body = BFCD__FREE__INIT;
        Bfcd__Block block = BFCD__BLOCK__INIT;
        Bfcd__Done done = BFCD__DONE__INIT;
        Bfcd__Request request = BFCD__REQUEST__INIT;
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        char tag[QUICK_TAG_BYTES] = { 0 };
        uint8_t payload[256];
        uint64_t numbers[6];

        for (size_t i = 0; i < 6; i++)
                numbers[i] = next_number(&data, &n_data);
        memcpy(tag, data, n_data < sizeof(tag) ? n_data : sizeof(tag) - 1);
        request.id = reply.id = numbers[0];
        block.block_id = free_body.block_id = malloc_body.n_bytes = numbers[1];
        block.region_id = malloc_body.flags = numbers[2];
        block.offset = malloc_body.n_needed = numbers[3];
        block.n_bytes = numbers[4];
        malloc_body.partition = (uint32_t)numbers[4];
        malloc_body.wait_ms = (uint32_t)numbers[5];
        malloc_body.tag = tag;

        reply.body_case = BFCD__REPLY__BODY_BLOCK;
        reply.block = &block;
        compare_reply(&reply);
        reply.body_case = BFCD__REPLY__BODY_DONE;
        reply.done = &done;
        compare_reply(&reply);
        request.body_case = BFCD__REQUEST__BODY_MALLOC;
        request.malloc = &malloc_body;
        require(bfcd__request__get_packed_size(&request) <= sizeof(payload));
        require(compare_request(payload, bfcd__request__pack(&request, payload)));
        request.body_case = BFCD__REQUEST__BODY_FREE;
        request.free = &free_body;
        require(compare_request(payload, bfcd__request__pack(&request, payload)));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_data)
{
        if (n_data > FRAME_MAX_PAYLOAD)
                return 0;
        (void)compare_request(data, n_data);
        compare_numbers(data, n_data);
        return 0;
}
