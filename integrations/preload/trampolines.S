/* One exported function for each name of names.h, and a hidden real_NAME for each of own.h; in the proxy of NVML of
 * nvml/names.h and nvml/own.h. Each jumps to the address in its slot, without changing a register that can have an
 * argument or a result. A slot first has an address that resolves it (preload_resolve()) and then continues the call.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifdef BFC_PROXY_OF_NVML
#define OWN_NAMES   "integrations/preload/nvml/own.h"
#define OTHER_NAMES "integrations/preload/nvml/names.h"
#else
#define OWN_NAMES   "integrations/preload/own.h"
#define OTHER_NAMES "integrations/preload/names.h"
#endif
#if defined(__x86_64__)

        .macro jump name, symbol
        .type \symbol, %function
        .p2align 4
\symbol:
        jmp *slot_\name(%rip)
        .size \symbol, . - \symbol
first_\name:
        leaq slot_\name(%rip), %r11
        jmp first
        .endm

        .text
        .type first, %function
first:
        .cfi_startproc
        .macro save register
        pushq \register
        .cfi_adjust_cfa_offset 8
        .endm
        .macro restore register
        popq \register
        .cfi_adjust_cfa_offset -8
        .endm
        save %rdi
        save %rsi
        save %rdx
        save %rcx
        save %r8
        save %r9
        save %rax
        subq $128, %rsp
        .cfi_adjust_cfa_offset 128
        movups %xmm0, (%rsp)
        movups %xmm1, 16(%rsp)
        movups %xmm2, 32(%rsp)
        movups %xmm3, 48(%rsp)
        movups %xmm4, 64(%rsp)
        movups %xmm5, 80(%rsp)
        movups %xmm6, 96(%rsp)
        movups %xmm7, 112(%rsp)
        movq %r11, %rdi
        call preload_resolve
        movq %rax, %r11
        movups (%rsp), %xmm0
        movups 16(%rsp), %xmm1
        movups 32(%rsp), %xmm2
        movups 48(%rsp), %xmm3
        movups 64(%rsp), %xmm4
        movups 80(%rsp), %xmm5
        movups 96(%rsp), %xmm6
        movups 112(%rsp), %xmm7
        addq $128, %rsp
        .cfi_adjust_cfa_offset -128
        restore %rax
        restore %r9
        restore %r8
        restore %rcx
        restore %rdx
        restore %rsi
        restore %rdi
        jmp *%r11
        .cfi_endproc
        .size first, . - first

#elif defined(__aarch64__)

        /* x16 and x17 are the registers that a linker's stubs use. */
        .macro jump name, symbol
        .type \symbol, %function
        .p2align 4
\symbol:
        adrp x16, slot_\name
        ldr x16, [x16, #:lo12:slot_\name]
        br x16
        .size \symbol, . - \symbol
first_\name:
        adrp x17, slot_\name
        add x17, x17, #:lo12:slot_\name
        b first
        .endm

        .text
        .type first, %function
first:
        .cfi_startproc
        stp x29, x30, [sp, #-224]!
        .cfi_def_cfa_offset 224
        .cfi_offset x29, -224
        .cfi_offset x30, -216
        mov x29, sp
        stp x0, x1, [sp, #16]
        stp x2, x3, [sp, #32]
        stp x4, x5, [sp, #48]
        stp x6, x7, [sp, #64]
        str x8, [sp, #80]
        stp q0, q1, [sp, #96]
        stp q2, q3, [sp, #128]
        stp q4, q5, [sp, #160]
        stp q6, q7, [sp, #192]
        mov x0, x17
        bl preload_resolve
        mov x16, x0
        ldp x0, x1, [sp, #16]
        ldp x2, x3, [sp, #32]
        ldp x4, x5, [sp, #48]
        ldp x6, x7, [sp, #64]
        ldr x8, [sp, #80]
        ldp q0, q1, [sp, #96]
        ldp q2, q3, [sp, #128]
        ldp q4, q5, [sp, #160]
        ldp q6, q7, [sp, #192]
        ldp x29, x30, [sp], #224
        .cfi_def_cfa_offset 0
        br x16
        .cfi_endproc
        .size first, . - first

#else
#error "The proxy has no trampolines for this processor."
#endif

        .macro slot name
        .pushsection .data
slot_\name:
        .quad first_\name
        .popsection
        .endm

        .macro own name
        .globl real_\name
        .hidden real_\name
        jump \name, real_\name
        slot \name
        .endm

        .macro forward name
        .globl \name
        jump \name, \name
        slot \name
        .endm

        .data
        .p2align 3
        .globl preload_slots
        .hidden preload_slots
preload_slots:
        .text

#define OWN(symbol, ...) own symbol;
#include OWN_NAMES
#undef OWN
#define FORWARD(symbol) forward symbol;
#include OTHER_NAMES
#undef FORWARD

        .section .note.GNU-stack, "", %progbits
