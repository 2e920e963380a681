"""Checks of arguments: each function returns what the library takes, or raises a TypeError or a ValueError that names the
argument. Every public function of the package passes its arguments through here, because ctypes cuts numbers to their
width and names at a zero byte.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import math
import operator
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar

    T = TypeVar("T")


def _type(value: object) -> str:
    return type(value).__name__


def integer(value: Any, argument: str) -> int:
    """An int, or an integer of NumPy for instance."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{argument} must be an integer, not {_type(value)}") from None


def size(value: Any, argument: str, most: int = sys.maxsize) -> int:
    """From 0 to `most`."""
    n = value if type(value) is int else integer(value, argument)
    if not 0 <= n <= most:
        raise ValueError(f"{argument} is {n}: it must not be negative or above {most}")
    return n


def seconds(value: Any, argument: str) -> float:
    """math.inf is one of them."""
    try:
        s = math.ldexp(value, 0)
    except TypeError:
        raise TypeError(f"{argument} must be a number of seconds, not {_type(value)}") from None
    except OverflowError:
        s = math.inf if value > 0 else -1
    if not s >= 0:
        raise ValueError(f"{argument} is {value} seconds: it must be a number, and not negative")
    return s


def _whole(encoded: bytes, argument: str) -> bytes:
    if b"\0" in encoded:
        raise ValueError(f"{argument} has an embedded null byte: {encoded!r}")
    return encoded


def name(value: Any, argument: str) -> bytes:
    if not isinstance(value, str):
        raise TypeError(f"{argument} must be a str, not {_type(value)}")
    return _whole(os.fsencode(value), argument)


def name_or_none(value: Any, argument: str) -> bytes | None:
    return None if value is None else name(value, argument)


def path(value: Any, argument: str) -> bytes:
    try:
        return _whole(os.fsencode(value), argument)
    except TypeError:
        raise TypeError(f"{argument} must be a path, not {_type(value)}") from None


def path_or_none(value: Any, argument: str) -> bytes | None:
    return None if value is None else path(value, argument)


def data(value: Any, argument: str) -> memoryview:
    """Bytes that are one after the other."""
    try:
        view = memoryview(value)
    except TypeError:
        raise TypeError(f"{argument} must be bytes or another buffer, not {_type(value)}") from None
    if not view.c_contiguous:
        raise ValueError(f"{argument} is not C-contiguous")
    return view


def shape(value: Any) -> tuple[int, ...]:
    if type(value) is int and value >= 0:
        return (value,)
    if isinstance(value, tuple):
        dims = list(value)
    elif hasattr(type(value), "__index__") and not getattr(value, "shape", ()):
        dims = [value]
    elif isinstance(value, (str, bytes)):
        raise TypeError(f"shape must be integers, not {_type(value)}")
    else:
        try:
            dims = list(value)
        except TypeError:
            raise TypeError(f"shape must be an integer or several, not {_type(value)}") from None
    ints = tuple([integer(n, "each number of shape") for n in dims])
    if min(ints, default=0) < 0:
        raise ValueError(f"negative dimensions are not allowed: {ints}")
    return ints


def version_or_none(value: Any, argument: str) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, tuple) or len(value) != 2:
        raise TypeError(f"{argument} must be a tuple of two integers, not {value!r}")
    return integer(value[0], argument), integer(value[1], argument)


def instance(value: Any, kind: type[T], argument: str) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"{argument} must be a {kind.__module__.partition('.')[0]}.{kind.__name__}, not {_type(value)}")
    return value


def function_or_none(value: Any, argument: str) -> Any:
    if value is not None and not callable(value):
        raise TypeError(f"{argument} must be callable or None, not {_type(value)}")
    return value


class Unique:
    """Memory or a session, of which a copy would be a second owner."""

    __slots__ = ()
    _INSTEAD = ""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"a bfcd {_type(self)} cannot be copied or pickled: {self._INSTEAD}")
