/* A request's payload from a hostile client: unpacked in bounded memory, and
 * what was understood survives being packed and unpacked again.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "proto/message.h"

#include <stdlib.h>
#include <string.h>

#include "proto/frame.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_data);

static void require(int condition)
{
        if (!condition)
                abort();
}

static void round_trip(struct message_arena *second, const Bfcd__Request *request)
{
        size_t n = bfcd__request__get_packed_size(request);
        uint8_t *bytes = malloc(n + 1), *again = malloc(n + 1);
        const Bfcd__Request *got;

        require(bytes && again);
        require(bfcd__request__pack(request, bytes) == n);
        got = message_unpack_request(second, bytes, n);
        if (got) { /* else it was too large for the second arena */
                require(got->id == request->id && got->body_case == request->body_case);
                require(bfcd__request__get_packed_size(got) == n);
                require(bfcd__request__pack(got, again) == n && memcmp(bytes, again, n) == 0);
        }
        free(bytes);
        free(again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_data)
{
        /* As in the daemon, and one so tight that allocations fail in the middle. */
        static const size_t sizes[] = { MESSAGE_ARENA_BYTES, 256 };
        struct message_arena *second;

        if (n_data > FRAME_MAX_PAYLOAD || message_arena_new(MESSAGE_ARENA_BYTES, &second) < 0)
                return 0;
        for (size_t i = 0; i < 2; i++) {
                const Bfcd__Request *request;
                struct message_arena *a;

                require(message_arena_new(sizes[i], &a) == 0);
                request = message_unpack_request(a, data, n_data);
                if (request)
                        round_trip(second, request);
                message_unpack_reply(a, data, n_data);
                message_arena_free(a);
        }
        message_arena_free(second);
        return 0;
}
