/* What binds the shared libraries to glibc 2.28, whichever later one they are built with: so programs in containers of older
 * distributions can load them, too.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Since 2.29 glibc has given old functions new symbols: when libdl and libpthread became parts of libc, for C23, and for
 * fstat(). The linker takes the newest ones. Here each of them is defined, hidden, as a jump to the old symbol, which every later
 * glibc has as well. The functions are in libdl.so.2 and libpthread.so.0 of an old glibc, and in none of these of a
 * new one, so the libraries need both (old_glibc_args in meson.build). tests/style/check-glibc.py finds what is missing. */
        .macro begin name
        .hidden \name
        .globl \name
        .type \name, %function
        .p2align 4
\name:
        .cfi_startproc
        .endm

        .macro end name
        .cfi_endproc
        .size \name, . - \name
        .endm

#if defined(__x86_64__)

        .macro jump name, old, version
        .symver old_\name, \old\()@GLIBC_\version
        begin \name
        jmp old_\name@PLT
        end \name
        .endm

        /* __fxstat64(1, fd, stat) */
        .macro stat_by_fd
        .symver old_fxstat64, __fxstat64@GLIBC_2.2.5
        begin fstat64
        movq %rsi, %rdx
        movl %edi, %esi
        movl $1, %edi
        jmp old_fxstat64@PLT
        end fstat64
        .endm

#elif defined(__aarch64__)

        .macro jump name, old, version
        .symver old_\name, \old\()@GLIBC_2.17 /* the first one there */
        begin \name
        b old_\name
        end \name
        .endm

        /* __fxstat64(0, fd, stat) */
        .macro stat_by_fd
        .symver old_fxstat64, __fxstat64@GLIBC_2.17
        begin fstat64
        mov x2, x1
        mov w1, w0
        mov w0, wzr
        b old_fxstat64
        end fstat64
        .endm

#endif

        .macro old name, version=2.2.5
        jump \name, \name, \version
        .endm

        .text
        old dladdr
        old dlclose
        old dlerror
        old dlopen
        old dlsym
        old pthread_attr_getstacksize
        old pthread_attr_setstacksize
        old pthread_condattr_setclock, 2.3.3
        old pthread_create
        old pthread_detach
        old pthread_getspecific
        old pthread_join
        old pthread_key_create
        old pthread_key_delete
        old pthread_mutex_timedlock
        old pthread_mutex_trylock
        old pthread_mutexattr_destroy
        old pthread_mutexattr_init
        old pthread_mutexattr_settype
        old pthread_once
        old pthread_rwlock_rdlock
        old pthread_rwlock_unlock
        old pthread_rwlock_wrlock
        old pthread_setname_np, 2.12
        old pthread_setspecific
        old pthread_sigmask
        jump __isoc23_sscanf, __isoc99_sscanf, 2.7
        jump __isoc23_strtol, strtol, 2.2.5
        jump __isoc23_strtoll, strtoll, 2.2.5
        jump __isoc23_strtoul, strtoul, 2.2.5
        jump __isoc23_strtoull, strtoull, 2.2.5
        stat_by_fd

        .section .note.GNU-stack, "", %progbits
