"""Blocks that step aside together, and return with their contents at the same addresses.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import errno
import itertools
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from . import _args, _arrays, _errors, _library
from ._library import lib

if TYPE_CHECKING:
    from ._client import Block, Client

#: A device may still be releasing what was parked.
_UNDO_WAIT_MS = 10_000
_numbers = itertools.count(1)


def place_for_copies(client: Client, partition: str, to: str | None, otherwise: str = "") -> bytes:
    """The partition of host memory to which memory of `partition` is parked."""
    place = _args.name_or_none(to, "to")
    for d in client.devices().logical:
        if d.name == to and d.physical.kind != "host":
            raise _errors.InvalidValue(
                errno.EINVAL, f"partition '{to}' is on a GPU: memory can be parked only in a partition of host memory"
            )
        if to is None and d.physical.kind == "host" and d.name != partition:
            return d.name.encode()
    if place is not None:
        return place
    raise _errors.NotFound(
        errno.ENOENT,
        f"tenant '{client.tenant}' has no quota in a partition of host memory other than '{partition}', where copies "
        f"could go: add one to its quotas{otherwise}",
    )


def new_tag(kind: str) -> str:
    return f"{kind}-{os.getpid()}-{next(_numbers)}"


class Sleeper(_args.Unique):
    """What parks and wakes all blocks of a client that have one tag."""

    _INSTEAD = "its memory has one owner"

    def __init__(self, client: Client, tag: str) -> None:
        self._client = client
        self.tag = _args.name(tag, "tag").decode(errors="surrogateescape")

    def _partition(self) -> str:
        """Where the blocks are."""
        raise NotImplementedError

    def _check_open(self) -> None:
        pass

    def sleep(self, to: str | None = None, *, discard: bool = False) -> None:
        """Parks the memory: its contents go to the partition `to` of host memory, by default the tenant's first other
        one, and the memory is returned for others. discard=True: the contents are lost instead.

        Nothing may use the memory until it wakes: views and pointers that exist fault. Busy: some of it is in use, or a
        stream is being captured. On an error the memory that was parked already is woken again, as far as there is
        room."""
        self._check_open()
        place = None
        if not discard:
            place = place_for_copies(self._client, self._partition(), to, ", or call sleep(discard=True)")
        how = _library.DISCARD if discard else _library.BACKUP
        handle, tag = self._client._handle, self.tag.encode()
        result = lib.bfc_park_tag(handle, tag, how, place)
        if result < 0:
            e = _errors.error(result)
            if not discard:
                lib.bfc_wake_tag(handle, tag, _UNDO_WAIT_MS)
            raise e

    def wake(self, wait: float | None = None) -> None:
        """Brings the memory back, with its contents and at its addresses. It needs room in the partition again, for
        which it waits at most `wait` seconds; QuotaExceeded or OutOfMemory otherwise. KeyboardInterrupt ends the
        wait. What woke before an error stays awake."""
        self._check_open()
        handle, tag = self._client._handle, self.tag.encode()
        _errors.check(interruptible(lambda ms: lib.bfc_wake_tag(handle, tag, ms), wait))

    @contextmanager
    def use(self, wait: float | None = None) -> Iterator[None]:
        """Around work: wakes the memory as wake() does, and keeps it awake until the end, also when the daemon asks for
        memory. Uses can be nested, and be those of several threads. Memory that is allocated inside is not in use."""
        self._check_open()
        handle, tag = self._client._handle, self.tag.encode()
        _errors.check(interruptible(lambda ms: lib.bfc_use_begin_tag(handle, tag, ms), wait))
        try:
            yield
        finally:
            lib.bfc_use_end_tag(handle, tag)


def wait_ms(wait: float | None) -> int:
    from . import _client

    return _client._wait_ms(_client._default_wait if wait is None else wait)


def interruptible(call: Callable[[int], int], wait: float | None) -> int:
    """The result of call(milliseconds). It is repeated with what is left after a signal, unless Python's handler of the
    signal raises an exception, KeyboardInterrupt for instance."""
    ms = wait_ms(wait)
    end = time.monotonic() + ms / 1000
    while (result := call(ms)) == -errno.EINTR:
        ms = max(1, round((end - time.monotonic()) * 1000))
    return result


class Pool(Sleeper):
    """A pool of blocks and arrays that are parked and woken together, made by Client.pool() or bfcd.pool().

        with bfcd.pool(tag="weights") as p:
            x = p.empty((1000, 1000))
            p.sleep()                       # the memory is others'
            with p.use(wait=60):            # it is back, at the same address
                x[:] = 1

    Each block has whole extents of its own (2 MiB and more), so put many small arrays into one block. Leaving `with`
    frees all that is left, also what is referred to; no view may be used then. Any thread may use a pool.
    """

    def __init__(self, client: Client, tag: str | None, partition: str | None) -> None:
        from ._client import Client

        _args.instance(client, Client, "client")
        _args.name_or_none(partition, "partition")
        super().__init__(client, new_tag("pool") if tag is None else tag)
        tags = client._open.pool_tags
        if self.tag in tags:
            raise ValueError(f"the client has a pool with the tag '{self.tag}' already")
        self._where = partition
        self._blocks: dict[object, weakref.ref[Block]] = {}
        self._is_open = True
        self._forget = partial(tags.pop, self.tag, None)
        tags[self.tag] = weakref.ref(self, partial(tags.pop, self.tag))

    def _partition(self) -> str:
        return self._client.partition if self._where is None else self._where

    def _check_open(self) -> None:
        if not self._is_open:
            raise ValueError("the pool is closed")

    def malloc(self, n_bytes: int, *, wait: float | None = None) -> Block:
        """A block of n_bytes, as Client.malloc() gives."""
        self._check_open()
        block = self._client.malloc(n_bytes, partition=self._where, tag=self.tag, wait=wait, parkable=True)
        key = object()
        self._blocks[key] = weakref.ref(block, partial(self._blocks.pop, key))
        return block

    def empty(self, shape: int | tuple[int, ...], dtype: Any = "float32", *, wait: float | None = None) -> Any:
        """An array, as Client.empty() gives."""
        self._check_open()
        return _arrays.empty(self._client, shape, dtype, self._where, self.tag, wait, False, self)

    def close(self) -> None:
        """Frees all blocks that are left."""
        self._is_open = False
        for reference in list(self._blocks.values()):
            if (block := reference()) is not None:
                block.free()
        self._forget()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<bfcd.Pool '{self.tag}' of {len(self._blocks)} blocks>" if self._is_open else "<bfcd.Pool, closed>"
