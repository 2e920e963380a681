/* Malloc, Free, Block and Done; see quick.h.
 *
 * Fields are in the order of their numbers here, and each at most once, as every packer of protobuf writes them.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "proto/quick.h"

#include <string.h>

#define VARINT_BYTES 10u

/* The keys of fields below 16: number and wire type. */
#define VARINT(number) ((number) << 3)
#define BYTES(number)  ((number) << 3 | 2)

/* What is left of a message. */
struct rest {
        const uint8_t *at, *end;
};

/* ---- unpacking ----------------------------------------------------------- */

static bool take_varint(struct rest *rest, uint64_t *ret)
{
        uint64_t value = 0;

        for (unsigned shift = 0; shift < 7 * VARINT_BYTES && rest->at < rest->end; shift += 7) {
                uint8_t byte = *rest->at++;

                value |= (uint64_t)(byte & 0x7f) << shift;
                if (byte < 0x80) {
                        *ret = value;
                        return true;
                }
        }
        return false;
}

static bool is_next(struct rest *rest, uint8_t key)
{
        if (rest->at == rest->end || *rest->at != key)
                return false;
        rest->at++;
        return true;
}

/* A field that may be absent: then its value stays. False: it is wrong. */
static bool take_u64(struct rest *rest, uint8_t key, uint64_t *ret)
{
        return !is_next(rest, key) || take_varint(rest, ret);
}

static bool take_u32(struct rest *rest, uint8_t key, uint32_t *ret)
{
        uint64_t value = 0;

        if (!is_next(rest, key))
                return true;
        if (!take_varint(rest, &value) || value > UINT32_MAX)
                return false;
        *ret = (uint32_t)value;
        return true;
}

/* A field with a length of one byte. */
static bool take_bytes(struct rest *rest, const uint8_t **ret, size_t *ret_n_bytes)
{
        size_t n_bytes = rest->at < rest->end ? *rest->at++ : SIZE_MAX;

        if (n_bytes >= 0x80 || n_bytes > (size_t)(rest->end - rest->at))
                return false;
        *ret = rest->at;
        *ret_n_bytes = n_bytes;
        rest->at += n_bytes;
        return true;
}

static bool take_tag(struct rest *rest, uint8_t key, struct quick_request *q)
{
        const uint8_t *bytes;
        size_t n_bytes;

        if (!is_next(rest, key))
                return true;
        if (!take_bytes(rest, &bytes, &n_bytes) || n_bytes >= sizeof(q->tag))
                return false;
        memcpy(q->tag, bytes, n_bytes);
        q->tag[n_bytes] = '\0';
        q->body.malloc.tag = q->tag;
        return true;
}

static bool unpack_malloc(struct rest rest, struct quick_request *q)
{
        Bfcd__Malloc *body = &q->body.malloc;

        *body = (Bfcd__Malloc)BFCD__MALLOC__INIT;
        q->request.malloc = body;
        return take_u32(&rest, VARINT(1), &body->partition) && take_u64(&rest, VARINT(2), &body->n_bytes) &&
               take_u64(&rest, VARINT(3), &body->flags) && take_u32(&rest, VARINT(4), &body->wait_ms) &&
               take_tag(&rest, BYTES(5), q) && take_u64(&rest, VARINT(6), &body->n_needed) &&
               rest.at == rest.end;
}

static bool unpack_free(struct rest rest, struct quick_request *q)
{
        Bfcd__Free *body = &q->body.free;

        *body = (Bfcd__Free)BFCD__FREE__INIT;
        q->request.free = body;
        return take_u64(&rest, VARINT(1), &body->block_id) && rest.at == rest.end;
}

bool quick_unpack_request(const uint8_t *payload, size_t n_bytes, struct quick_request *ret)
{
        struct rest rest = { payload, payload + n_bytes }, body;

        ret->request = (Bfcd__Request)BFCD__REQUEST__INIT;
        if (!take_u64(&rest, VARINT(1), &ret->request.id))
                return false;
        if (is_next(&rest, BYTES(BFCD__REQUEST__BODY_MALLOC)))
                ret->request.body_case = BFCD__REQUEST__BODY_MALLOC;
        else if (is_next(&rest, BYTES(BFCD__REQUEST__BODY_FREE)))
                ret->request.body_case = BFCD__REQUEST__BODY_FREE;
        else
                return false;
        if (!take_bytes(&rest, &body.at, &n_bytes) || rest.at != rest.end)
                return false;
        body.end = body.at + n_bytes;
        return ret->request.body_case == BFCD__REQUEST__BODY_MALLOC ? unpack_malloc(body, ret)
                                                                    : unpack_free(body, ret);
}

/* ---- packing ------------------------------------------------------------- */

/* proto3: a field that is 0 is absent. */
static uint8_t *put_u64(uint8_t *at, uint8_t key, uint64_t value)
{
        if (value == 0)
                return at;
        *at++ = key;
        for (; value >= 0x80; value >>= 7)
                *at++ = (uint8_t)(value | 0x80);
        *at++ = (uint8_t)value;
        return at;
}

size_t quick_pack_reply(const Bfcd__Reply *reply, uint8_t ret_payload[QUICK_REPLY_BYTES])
{
        uint8_t *at = put_u64(ret_payload, VARINT(1), reply->id), *body;

        _Static_assert(1 + VARINT_BYTES + 2 + 4 * (1 + VARINT_BYTES) <= QUICK_REPLY_BYTES, "a Block fits");
        if (reply->base.n_unknown_fields > 0)
                return 0;
        if (reply->body_case == BFCD__REPLY__BODY_DONE && reply->done->base.n_unknown_fields == 0) {
                *at++ = BYTES(BFCD__REPLY__BODY_DONE);
                *at++ = 0;
        } else if (reply->body_case == BFCD__REPLY__BODY_BLOCK && reply->block->base.n_unknown_fields == 0) {
                *at++ = BYTES(BFCD__REPLY__BODY_BLOCK);
                body = ++at;
                at = put_u64(at, VARINT(1), reply->block->block_id);
                at = put_u64(at, VARINT(2), reply->block->region_id);
                at = put_u64(at, VARINT(3), reply->block->offset);
                at = put_u64(at, VARINT(4), reply->block->n_bytes);
                body[-1] = (uint8_t)(at - body);
        } else {
                return 0;
        }
        return (size_t)(at - ret_payload);
}
