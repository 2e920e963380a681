/* Registered mappings of a client; see host_pin.h.
 *
 * A registration ends with the context that it was made in, so it is made in one that the program has, and for
 * all others (PORTABLE). If the program resets that device the memory is pageable from then on.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "device/host_pin.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>

#include "device/cuda_driver.h"

struct host_pin {
        struct host_pin *next;
        void *at;
        uint64_t n_bytes;
        bool is_read_only;
        bool is_registered;
        bool has_failed; /* it is not tried again */
        CUdevice device; /* by whose context it is registered */
};

/* ---- contexts ------------------------------------------------------------ */

static bool is_active(const struct cuda_driver *cu, CUdevice device)
{
        unsigned int flags;
        int is = 0;

        return cu->cuDevicePrimaryCtxGetState(device, &flags, &is) == CUDA_SUCCESS && is;
}

/* Makes the context current that the program has on the device. -ENODEV: it has none. */
static int visit(const struct cuda_driver *cu, CUdevice device, struct cuda_context *ret,
                 struct cuda_mode *ret_mode)
{
        int r;

        if (!is_active(cu, device) || cuda_context_open(cu, device, ret) != CUDA_SUCCESS)
                return -ENODEV;
        r = cuda_context_visit(ret, ret_mode);
        if (r < 0)
                cuda_context_close(ret);
        return r;
}

static void depart(struct cuda_context *c, struct cuda_mode *mode)
{
        cuda_context_depart(c, mode);
        cuda_context_close(c);
}

/* The nth device of this process. */
static bool device_at(const struct cuda_driver *cu, int n, CUdevice *ret)
{
        int count = 0;

        return cu->cuDeviceGetCount(&count) == CUDA_SUCCESS && n < count &&
               cu->cuDeviceGet(ret, n) == CUDA_SUCCESS;
}

/* ---- one mapping --------------------------------------------------------- */

static void try_in_context(const struct cuda_driver *cu, struct host_pin *pin, CUdevice device)
{
        unsigned int flags =
                CU_MEMHOSTREGISTER_PORTABLE | (pin->is_read_only ? CU_MEMHOSTREGISTER_READ_ONLY : 0);

        pin->is_registered = cu->cuMemHostRegister_v2(pin->at, pin->n_bytes, flags) == CUDA_SUCCESS;
        pin->has_failed = !pin->is_registered;
        pin->device = device;
}

static int pin_end(const struct cuda_driver *cu, const struct host_pin *pin)
{
        struct cuda_context context;
        struct cuda_mode mode;
        int r;

        if (visit(cu, pin->device, &context, &mode) < 0)
                return 0; /* it ended with its context */
        r = cuda_driver_errno(cu->cuMemHostUnregister(pin->at));
        depart(&context, &mode);
        return r == -EBUSY ? r : 0;
}

/* ---- all of them --------------------------------------------------------- */

static bool needs_try(const struct host_pin *pin)
{
        return !pin->is_registered && !pin->has_failed;
}

static bool has_untried(const struct host_pins *p)
{
        const struct host_pin *pin = p->first;

        while (pin && !needs_try(pin))
                pin = pin->next;
        return pin;
}

void host_pins_try(struct host_pins *p)
{
        const struct cuda_driver *cu;
        struct cuda_context context;
        struct cuda_mode mode;
        CUdevice device;
        int n = 0;

        if (!has_untried(p) || cuda_driver_get_used(&cu) < 0)
                return;
        while (device_at(cu, n, &device) && !is_active(cu, device))
                n++;
        if (!device_at(cu, n, &device) || visit(cu, device, &context, &mode) < 0)
                return;
        for (struct host_pin *pin = p->first; pin; pin = pin->next) {
                if (!needs_try(pin))
                        continue;
                try_in_context(cu, pin, device);
                if (pin->is_registered)
                        __atomic_add_fetch(&p->n_bytes, pin->n_bytes, __ATOMIC_RELAXED);
        }
        depart(&context, &mode);
}

/* Without memory for the record the mapping stays pageable. */
void host_pins_add(struct host_pins *p, void *at, uint64_t n_bytes, bool is_read_only)
{
        struct host_pin *pin = malloc(sizeof(*pin));

        if (!pin)
                return;
        *pin = (struct host_pin){
                .next = p->first, .at = at, .n_bytes = n_bytes, .is_read_only = is_read_only
        };
        p->first = pin;
        host_pins_try(p);
}

static bool overlaps(const struct host_pin *pin, const char *at, uint64_t n_bytes)
{
        return (const char *)pin->at < at + n_bytes && at < (const char *)pin->at + pin->n_bytes;
}

int host_pins_remove(struct host_pins *p, const void *at, uint64_t n_bytes)
{
        const struct cuda_driver *cu = NULL;

        if (p->first && cuda_driver_get_used(&cu) < 0)
                cu = NULL; /* a forked child, to which nothing is registered */
        for (struct host_pin **each = &p->first; *each;) {
                struct host_pin *pin = *each;

                if (!overlaps(pin, at, n_bytes)) {
                        each = &pin->next;
                        continue;
                }
                if (pin->is_registered && cu && pin_end(cu, pin) < 0)
                        return -EBUSY;
                if (pin->is_registered)
                        __atomic_sub_fetch(&p->n_bytes, pin->n_bytes, __ATOMIC_RELAXED);
                *each = pin->next;
                free(pin);
        }
        return 0;
}

int host_pins_finish(const struct host_pins *p)
{
        const struct cuda_driver *cu;
        CUdevice device;
        int r = 0;

        if (host_pins_bytes(p) == 0 || cuda_driver_get_used(&cu) < 0)
                return 0;
        for (int n = 0; r == 0 && device_at(cu, n, &device); n++) {
                struct cuda_mode mode;
                struct cuda_context context;

                if (visit(cu, device, &context, &mode) < 0)
                        continue;
                r = cuda_driver_errno(cuda_context_wait(cu)) == -EBUSY ? -EBUSY
                                                                       : 0; /* else no work continues */
                depart(&context, &mode);
        }
        return r;
}
