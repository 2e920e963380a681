"""Workers of Python's multiprocessing, forked by a process that has blocks of bfcd.

SPDX-License-Identifier: Apache-2.0

    fork_pool.py default|inherit

default: a worker that touches an inherited block is ended by SIGSEGV, also beside mappings of its own,
and the library answers with an error. inherit: all workers of a Pool read and write the block.
"""
import concurrent.futures
import ctypes
import errno
import mmap
import multiprocessing
import signal
import sys

N_BYTES = 6 << 20
MARK = 0xB7

lib = ctypes.CDLL("libbfcclient.so.0")
lib.bfc_last_error.restype = ctypes.c_char_p
client, block = ctypes.c_void_p(), ctypes.c_void_p()


def ask(function, *args):
    r = function(*args)
    if r < 0:
        sys.exit(lib.bfc_last_error().decode())


def allocate():
    ask(lib.bfc_default, ctypes.byref(client))
    ask(lib.bfc_malloc, client, ctypes.c_size_t(N_BYTES), ctypes.byref(block))
    ctypes.memset(block, MARK, N_BYTES)


def byte_at(offset):
    return ctypes.cast(block, ctypes.POINTER(ctypes.c_ubyte))[offset]


def put(args):
    offset, value = args
    before = byte_at(offset)
    ctypes.cast(block, ctypes.POINTER(ctypes.c_ubyte))[offset] = value
    return before


def touch_beside_mappings(offset):
    """Maps memory of its own first, which must not be placed at the block's address. The kernel fills
    the highest gaps first, so there are enough mappings for all of them."""
    own = [mmap.mmap(-1, 1 << 20) for _ in range(400)]
    return byte_at(offset) + len(own)


def call_the_library(_):
    q = ctypes.c_void_p()
    r = [
        lib.bfc_malloc(client, ctypes.c_size_t(1), ctypes.byref(q)),
        lib.bfc_free(client, block),
    ]
    return r, lib.bfc_last_error().decode()


def allocate_in_worker(_):
    mine, q = ctypes.c_void_p(), ctypes.c_void_p()
    ask(lib.bfc_default, ctypes.byref(mine))
    ask(lib.bfc_malloc, mine, ctypes.c_size_t(4096), ctypes.byref(q))
    ctypes.memset(q, 1, 4096)
    ask(lib.bfc_free, mine, q)
    return mine.value != client.value


def check(condition, what):
    if not condition:
        sys.exit("failed: %s" % what)


def by_default():
    context = multiprocessing.get_context("fork")
    child = context.Process(target=touch_beside_mappings, args=(4096,))
    child.start()
    child.join()
    check(child.exitcode == -signal.SIGSEGV, "a touch ended with %s" % child.exitcode)
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        try:
            check(False, "a worker read %s" % pool.submit(touch_beside_mappings, 5000).result())
        except concurrent.futures.process.BrokenProcessPool:
            pass
    with context.Pool(3) as pool:
        for r, sentence in pool.map(call_the_library, range(6)):
            check(r == [-errno.ECHILD] * 2, "errors %s" % r)
            check("bfc_connect" in sentence and "BFC_INHERIT" in sentence, sentence)
        check(all(pool.map(allocate_in_worker, range(6))), "a client of the worker's own")


def with_inherit():
    places = [i * 4099 for i in range(600)]
    with multiprocessing.get_context("fork").Pool(4) as pool:
        before = pool.map(put, [(p, p % 251) for p in places], chunksize=7)
        check(all(b == MARK for b in before), "the parent's bytes in the workers")
        check(all(byte_at(p) == p % 251 for p in places), "the workers' bytes in the parent")
        check(pool.map(byte_at, places) == [p % 251 for p in places], "the bytes in other workers")
        ask(lib.bfc_free, client, block)
        check(not any(pool.map(byte_at, places)), "zeros after the free")


if __name__ == "__main__":
    allocate()
    by_default() if sys.argv[1] == "default" else with_inherit()
