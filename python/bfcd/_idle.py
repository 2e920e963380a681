"""The program's word that it is idle, for the proxy of the driver that `bfcctl run` puts in front of programs.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import os
import time

from . import _args, _errors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_MAX_WAIT_S = 600

#: One for each end that failed: the program is still idle for it.
_failed_ends: list[None] = []
os.register_at_fork(after_in_child=_failed_ends.clear)


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
    now = time.monotonic()
    until = now + wait
    while True:
        began, part = now, min(max(until - now, 0), _MAX_WAIT_S)
        result = proxy.bfc_idle_end(int(part * 1000))
        now = time.monotonic()
        if result == -errno.EINTR:
            continue
        # One that came back early did not wait: there can never be room.
        has_waited = part > 0 and now - began >= part / 2
        if result not in (-errno.EDQUOT, -errno.ENOMEM) or now >= until or not has_waited:
            _errors.check(result)
            return


def _end_all(proxy: ctypes.CDLL, wait: float) -> None:
    """This end, and after it those that failed before."""
    until = time.monotonic() + wait
    is_own = True
    while True:
        try:
            _end(proxy, max(until - time.monotonic(), 0))
        except BaseException as e:
            if is_own or not isinstance(e, _errors.InvalidValue):  # else it was interrupted when it had succeeded
                _failed_ends.append(None)
                raise
        is_own = False
        try:
            _failed_ends.pop()
        except IndexError:
            return


@contextlib.contextmanager
def idle(*, wait: float = math.inf) -> Iterator[int]:
    """While it lasts, bfcd may park this program's memory that is mapped by `cuMemCreate`: how many bytes. Nothing may use
    that memory meanwhile. At its end the memory has the same addresses and contents.

    For programs under `bfcctl run`; in others it does nothing, and the value is 0. wait: how many seconds the end waits for
    room. QuotaExceeded, OutOfMemory: there was none, and the program is still idle; the end of another idle() tries again.
    The same after KeyboardInterrupt, which ends the wait. Busy: work fails, or a stream is being captured.
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
        _end_all(proxy, wait)
