/* Charges of what the driver gives; see charge.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Invariant: of each GPU, what the process has charged is its room, what is in use, and what is being given back. */
#include "integrations/preload/charge.h"

#include <errno.h>

#include "integrations/preload/reserved.h"

#define MAX_STEP_BYTES ((uint64_t)32 << 20)
#define STEP_PART      32                  /* of the limit */
#define UNIT_BYTES     ((uint64_t)2 << 20) /* as extents have, so that none of the limit is lost */
#define MAX_BYTES      ((uint64_t)1 << 48) /* of a request */

/* How much room a charge makes, beyond what is asked for. */
static uint64_t step_bytes(struct gpu *gpu)
{
        uint64_t n = broker_total(gpu) / STEP_PART;

        return n < MAX_STEP_BYTES ? n : MAX_STEP_BYTES;
}

bool charge_take_room(struct gpu *gpu, size_t n_bytes)
{
        uint64_t room = __atomic_load_n(&gpu->room_bytes, __ATOMIC_RELAXED);

        while (room >= n_bytes)
                if (__atomic_compare_exchange_n(&gpu->room_bytes, &room, room - n_bytes, true,
                                                __ATOMIC_RELAXED, __ATOMIC_RELAXED))
                        return true;
        return false;
}

/* Others need what is charged and not in use. */
static void give_room(void *unused, const struct bfc_pressure *pressure)
{
        struct gpu *gpu = broker_gpu_of(pressure->partition);

        (void)unused;
        if (!gpu)
                return;
        reserved_settle(gpu);
        (void)charge_give_room(gpu);
}

static void uncharge(struct gpu *gpu, uint64_t n_bytes)
{
        bfc_client *client;

        if (n_bytes > 0 && broker_charger(give_room, &client) == 0)
                (void)bfc_uncharge(client, gpu->name, n_bytes);
}

static uint64_t whole_units(uint64_t n_bytes)
{
        return (n_bytes + UNIT_BYTES - 1) / UNIT_BYTES * UNIT_BYTES;
}

static bool is_full(int r)
{
        return r == -ENOMEM || r == -EDQUOT;
}

/* Charges as many units as it needs, and makes the rest of them room. */
static int charge_units(struct gpu *gpu, bfc_client *client, uint64_t n_bytes, uint64_t n_more)
{
        uint64_t n = whole_units(n_bytes + n_more);
        int r = bfc_charge(client, gpu->name, n, 0);

        if (r == 0)
                __atomic_add_fetch(&gpu->room_bytes, n - n_bytes, __ATOMIC_RELAXED);
        return r;
}

/* Without a step, and beside the room, which stays for other threads until the rest is charged. */
static int charge_rest(struct gpu *gpu, bfc_client *client, uint64_t n_bytes)
{
        uint64_t n_charged = 0, room, n; /* for this request, and no room */
        int r = 0;

        while (r == 0 && n_charged < n_bytes && !charge_take_room(gpu, n_bytes - n_charged)) {
                room = __atomic_load_n(&gpu->room_bytes, __ATOMIC_RELAXED);
                if (room >= n_bytes - n_charged)
                        continue;
                n = whole_units(n_bytes - n_charged - room);
                r = bfc_charge(client, gpu->name, n, 0);
                n_charged += r == 0 ? n : 0;
        }
        if (r < 0 || n_charged > n_bytes)
                __atomic_add_fetch(&gpu->room_bytes, r < 0 ? n_charged : n_charged - n_bytes,
                                   __ATOMIC_RELAXED);
        return r;
}

/* A refusal is counted, so a step is not asked for where it has no room. The first look costs no round trip. */
static bool step_fits(struct gpu *gpu, bfc_client *client, uint64_t n_bytes)
{
        struct bfc_tenant_usage usage = { .struct_size = sizeof(usage) };
        uint64_t n = whole_units(n_bytes + step_bytes(gpu));
        size_t n_free, n_total;

        return bfc_usage(client, gpu->name, &usage) == 0 && usage.bytes_limit >= usage.bytes_reserved &&
               usage.bytes_limit - usage.bytes_reserved >= n &&
               bfc_mem_get_info(client, gpu->name, &n_free, &n_total) == 0 && n_free >= n;
}

int charge_take(struct gpu *gpu, size_t n_bytes)
{
        bfc_client *client;
        int r;

        if (charge_take_room(gpu, n_bytes))
                return 0;
        if (n_bytes > MAX_BYTES)
                return -ENOMEM;
        r = broker_charger(give_room, &client);
        if (r < 0)
                return r;
        r = step_fits(gpu, client, n_bytes) ? charge_units(gpu, client, n_bytes, step_bytes(gpu)) : -ENOMEM;
        if (is_full(r))
                r = charge_rest(gpu, client, n_bytes);
        return is_full(r) && reserved_trim(gpu) ? charge_rest(gpu, client, n_bytes) : r;
}

/* Two steps of room may stay, so that not each call is one of the daemon, too. */
void charge_give(struct gpu *gpu, size_t n_bytes)
{
        uint64_t room, step, n;

        if (n_bytes == 0)
                return;
        room = __atomic_add_fetch(&gpu->room_bytes, n_bytes, __ATOMIC_RELAXED);
        step = step_bytes(gpu);
        while (room >= 2 * step + UNIT_BYTES) {
                n = (room - step) / UNIT_BYTES * UNIT_BYTES;
                if (!__atomic_compare_exchange_n(&gpu->room_bytes, &room, room - n, true, __ATOMIC_RELAXED,
                                                 __ATOMIC_RELAXED))
                        continue;
                uncharge(gpu, n);
                return;
        }
}

void charge_add_contexts(struct gpu *gpu, int64_t n_bytes)
{
        bfc_client *client;

        if (n_bytes != 0 && broker_charger(give_room, &client) == 0)
                (void)bfc_add_contexts(client, gpu->name, n_bytes);
}

/* Of a part of a unit no block could be made. */
bool charge_give_room(struct gpu *gpu)
{
        uint64_t room = __atomic_load_n(&gpu->room_bytes, __ATOMIC_RELAXED), n;

        do
                n = room / UNIT_BYTES * UNIT_BYTES;
        while (n > 0 && !__atomic_compare_exchange_n(&gpu->room_bytes, &room, room - n, true,
                                                     __ATOMIC_RELAXED, __ATOMIC_RELAXED));
        uncharge(gpu, n);
        return n > 0;
}

bool charge_makes_room(struct gpu *gpu, int r)
{
        bool is_less = is_full(r) && reserved_trim(gpu);

        return is_full(r) && (charge_give_room(gpu) || is_less);
}
