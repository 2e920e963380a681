/* What binds the shared libraries, and the programs with -Dprefer_static, to glibc 2.28, whichever later one they are built
 * with: so they can be used in containers of older distributions, too.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Since 2.29 glibc has given old functions new symbols: when libdl and libpthread became parts of libc, for C23, and for
 * fstat(). The linker takes the newest ones. Here each of them is defined, hidden, as a jump to the old symbol, which every later
 * glibc has as well. The functions are in libdl.so.2 and libpthread.so.0 of an old glibc, and in none of these of a
 * new one, so the libraries need both (old_glibc_args in meson.build). tests/style/check-glibc.py finds what is missing.
 *
 * Programs need more, also for the libraries that they contain: OLD_GLIBC_OF_PROGRAMS. */
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

        /* __fxstat64(1, fd, stat) of fstat64(fd, stat), and so all that have two arguments */
        .macro stat name, old
        .symver old_\name, \old@GLIBC_2.2.5
        begin \name
        movq %rsi, %rdx
        movq %rdi, %rsi
        movl $1, %edi
        jmp old_\name@PLT
        end \name
        .endm

        /* __fxstatat64(1, fd, path, stat, flags) */
        .macro stat_at name, old
        .symver old_\name, \old@GLIBC_2.4
        begin \name
        movl %ecx, %r8d
        movq %rdx, %rcx
        movq %rsi, %rdx
        movl %edi, %esi
        movl $1, %edi
        jmp old_\name@PLT
        end \name
        .endm

        .macro thread_id
        begin gettid
        movl $186, %eax
        syscall
        ret
        end gettid
        .endm

        /* Its fourth argument is the function that calls the program's constructors: a program of today leaves that to the
         * C library, which an old one does not do. */
        .macro start
        .symver old_libc_start_main, __libc_start_main@GLIBC_2.2.5
        begin __libc_start_main
        leaq old_glibc_construct(%rip), %rcx
        jmp old_libc_start_main@PLT
        end __libc_start_main
        .endm

#elif defined(__aarch64__)

        .macro jump name, old, version
        .symver old_\name, \old\()@GLIBC_2.17 /* the first one there */
        begin \name
        b old_\name
        end \name
        .endm

        .macro stat name, old
        .symver old_\name, \old@GLIBC_2.17
        begin \name
        mov x2, x1
        mov x1, x0
        mov w0, wzr
        b old_\name
        end \name
        .endm

        .macro stat_at name, old
        .symver old_\name, \old@GLIBC_2.17
        begin \name
        mov w4, w3
        mov x3, x2
        mov x2, x1
        mov w1, w0
        mov w0, wzr
        b old_\name
        end \name
        .endm

        .macro thread_id
        begin gettid
        mov x8, #178
        svc #0
        ret
        end gettid
        .endm

        .macro start
        .symver old_libc_start_main, __libc_start_main@GLIBC_2.17
        begin __libc_start_main
        adrp x3, old_glibc_construct
        add x3, x3, :lo12:old_glibc_construct
        b old_libc_start_main
        end __libc_start_main
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
        stat fstat64, __fxstat64

#ifdef OLD_GLIBC_OF_PROGRAMS
        start
        thread_id
        stat stat, __xstat
        stat stat64, __xstat64
        stat lstat64, __lxstat64
        stat_at fstatat64, __fxstatat64
        old pthread_barrier_destroy
        old pthread_barrier_init
        old pthread_barrier_wait
        old pthread_rwlock_destroy
        old pthread_rwlock_init
        old pthread_rwlock_tryrdlock
        old pthread_rwlock_trywrlock
        old sem_destroy
        old sem_init
        old sem_post
        old sem_trywait
        old sem_wait
        old timer_create, 2.3.3
        old timer_delete, 2.3.3
        old timer_settime, 2.3.3
#endif

        .section .note.GNU-stack, "", %progbits
