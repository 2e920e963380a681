/* Two kernels as PTX text, which the driver compiles: no nvcc is needed.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 *   fill32(at, n, value)  writes n 32-bit words, one a thread
 *   spin(at)              counts up the 64-bit word at `at` for ever, from what
 *                         it finds there, until the word behind it is not 0 */
#include "tests/gpu/peer.h"

const char gpu_kernels_ptx[] = ".version 6.4\n"
                               ".target sm_70\n"
                               ".address_size 64\n"
                               ".visible .entry fill32(.param .u64 at, .param .u32 n, .param .u32 value)\n"
                               "{\n"
                               "        .reg .pred %none;\n"
                               "        .reg .b32 %i, %block, %size, %count, %what;\n"
                               "        .reg .b64 %to, %offset;\n"
                               "        ld.param.u64 %to, [at];\n"
                               "        ld.param.u32 %count, [n];\n"
                               "        ld.param.u32 %what, [value];\n"
                               "        mov.u32 %i, %tid.x;\n"
                               "        mov.u32 %block, %ctaid.x;\n"
                               "        mov.u32 %size, %ntid.x;\n"
                               "        mad.lo.u32 %i, %block, %size, %i;\n"
                               "        setp.ge.u32 %none, %i, %count;\n"
                               "        @%none bra END;\n"
                               "        cvta.to.global.u64 %to, %to;\n"
                               "        mul.wide.u32 %offset, %i, 4;\n"
                               "        add.u64 %to, %to, %offset;\n"
                               "        st.global.u32 [%to], %what;\n"
                               "END:\n"
                               "        ret;\n"
                               "}\n"
                               ".visible .entry spin(.param .u64 at)\n"
                               "{\n"
                               "        .reg .pred %stop;\n"
                               "        .reg .b64 %to, %count, %flag;\n"
                               "        ld.param.u64 %to, [at];\n"
                               "        cvta.to.global.u64 %to, %to;\n"
                               "        ld.volatile.global.u64 %count, [%to];\n"
                               "AGAIN:\n"
                               "        add.u64 %count, %count, 1;\n"
                               "        st.volatile.global.u64 [%to], %count;\n"
                               "        ld.volatile.global.u64 %flag, [%to+8];\n"
                               "        setp.eq.u64 %stop, %flag, 0;\n"
                               "        @%stop bra AGAIN;\n"
                               "        ret;\n"
                               "}\n";
