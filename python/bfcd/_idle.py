"""The program's word that it is idle, for the proxy of the driver that `bfcctl run` puts in front of programs.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os

from . import _args, _errors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_MAX_WAIT_S = 600


def _proxy() -> ctypes.CDLL | None:
    """The process's libcuda.so.1, if it has one that is the proxy."""
    try:
        library = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
        library.bfc_idle_begin.restype = ctypes.c_int64
        library.bfc_idle_end.argtypes = [ctypes.c_uint32]
    except (OSError, AttributeError):
        return None
    return library


def _end(proxy: ctypes.CDLL, wait: float) -> None:
    while True:
        part = min(wait, _MAX_WAIT_S)
        result = proxy.bfc_idle_end(int(part * 1000))
        wait -= part
        if wait <= 0 or not isinstance(_errors.error(result) if result else None, MemoryError):
            _errors.check(result)
            return


@contextlib.contextmanager
def idle(*, wait: float = math.inf) -> Iterator[int]:
    """While it lasts, bfcd may park this program's memory that is mapped by `cuMemCreate`: how many bytes. Nothing may use
    that memory meanwhile. At its end the memory has the same addresses and contents.

    For programs under `bfcctl run`; in others it does nothing, and the value is 0. wait: how many seconds the end waits for
    room. QuotaExceeded, OutOfMemory: there was none, and the program is still idle; the end of another idle() tries again.
    Busy: work fails, or a stream is being captured.
    """
    wait = _args.seconds(wait, "wait")
    proxy = _proxy()
    if proxy is None:
        yield 0
        return
    n_bytes: int = proxy.bfc_idle_begin()
    if n_bytes < 0:
        raise _errors.error(n_bytes)
    try:
        yield n_bytes
    finally:
        _end(proxy, wait)
