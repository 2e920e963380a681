"""Waits of the library that Python's signal handlers interrupt.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from . import _library


class _WakeUp:
    """A pipe that becomes readable when a signal arrives while it is the wake-up fd of Python's handlers."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        if self.read_fd == 0:  # stands for none in the library
            self.read_fd = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 3)
            os.close(0)
        self._pid = os.getpid()

    @classmethod
    @contextmanager
    def armed(cls) -> Iterator[int]:
        """Yields the fd, or 0 where signals are not handled here (another thread) or are watched by another user
        of the wake-up fd, as asyncio is."""
        if threading.current_thread() is not threading.main_thread():
            yield 0
            return
        global _wake_up
        if _wake_up is None or _wake_up._pid != os.getpid():
            _wake_up = cls()
        others = signal.set_wakeup_fd(_wake_up._write_fd, warn_on_full_buffer=False)
        try:
            if others != -1:
                signal.set_wakeup_fd(others)
            yield 0 if others != -1 else _wake_up.read_fd
        finally:
            if others == -1:
                signal.set_wakeup_fd(-1)
            try:
                while os.read(_wake_up.read_fd, 512):
                    pass
            except BlockingIOError:
                pass


_wake_up: _WakeUp | None = None


def interruptible(call: Callable[[], int], options: _library.MallocOptions | _library.AttachOptions) -> int:
    """Repeats the call with what is left of options.wait_ms until it is not interrupted. Python's own signal handlers
    run between two calls, and end it by an exception, KeyboardInterrupt for instance."""
    end = time.monotonic() + options.wait_ms / 1000
    while options.wait_ms:
        with _WakeUp.armed() as options.cancel_fd:
            result = call()
        if result != -errno.EINTR:
            return result
        options.wait_ms = max(1, round((end - time.monotonic()) * 1000))
    return call()
