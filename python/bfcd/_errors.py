"""Exceptions: one for each errno that the library documents, with the daemon's sentence as the message.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import errno

from . import _library


class Error(OSError):
    """A call to libbfcclient failed. `errno` has the number, `strerror` the sentence."""

    def __str__(self) -> str:
        return self.strerror or super().__str__()


class QuotaExceeded(Error, MemoryError):
    """The tenant is at its limit (EDQUOT)."""


class OutOfMemory(Error, MemoryError):
    """The partition, the device or the machine has no memory left (ENOMEM)."""


class NotPermitted(Error, PermissionError):
    """The user matches no tenant, or may not use the socket or the partition (EACCES, EPERM)."""


class NotFound(Error, LookupError):
    """There is no such partition, tenant, name or socket (ENOENT)."""


class Exists(Error, FileExistsError):
    """The name is taken (EEXIST)."""


class Timeout(Error, TimeoutError):
    """Nothing came in the time that was given (ETIMEDOUT)."""


class Disconnected(Error, ConnectionError):
    """There is no daemon, or it has ended the session (ECONNREFUSED, ECONNRESET, EPIPE)."""


class DeviceLost(Error):
    """The device is lost, drained, or not visible in this process (ENODEV)."""


class InvalidValue(Error, ValueError):
    """An argument is wrong (EINVAL)."""


class Busy(Error):
    """Another call or use has the memory, or a stream is being captured (EBUSY)."""


class Parked(Busy):
    """The memory is parked, and its address has none: wake it, or use it inside of `with pool.use()` (EBUSY)."""


class Forked(Error):
    """The client belongs to the parent process; connect again in the child (ECHILD)."""


_BY_ERRNO: dict[int, type[Error]] = {
    errno.EDQUOT: QuotaExceeded,
    errno.ENOMEM: OutOfMemory,
    errno.EACCES: NotPermitted,
    errno.EPERM: NotPermitted,
    errno.ENOENT: NotFound,
    errno.EEXIST: Exists,
    errno.ETIMEDOUT: Timeout,
    errno.ECONNREFUSED: Disconnected,
    errno.ECONNRESET: Disconnected,
    errno.EPIPE: Disconnected,
    errno.ENODEV: DeviceLost,
    errno.EINVAL: InvalidValue,
    errno.EBUSY: Busy,
    errno.ECHILD: Forked,
}


def error(result: int) -> Error:
    """The exception for a negative result of the call that this thread made last."""
    sentence = _library.last_error() or "the library gave no reason"
    kind = _BY_ERRNO.get(-result, Error)
    return kind(-result, sentence)


def check(result: int) -> None:
    if result < 0:
        raise error(result)
