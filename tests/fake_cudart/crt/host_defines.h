/* What the headers of CUDA's runtime want of the compiler's own part, which their wheel lacks: for a C compiler on the
 * host it is little. SPDX-License-Identifier: Apache-2.0 */
#pragma once
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDART_CB
#define __align__(n)         __attribute__((aligned(n)))
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __cudart_builtin__
#define __device_builtin__
#define __device_builtin_surface_type__
#define __device_builtin_texture_type__
#define __host__
#define __device__
#define __no_return__   __attribute__((noreturn))
#define __forceinline__ __inline__ __attribute__((always_inline))
