"""CuPy's GPU memory from bfcd.

    import bfcd.cupy
    cupy.cuda.set_allocator(bfcd.cupy.pool().malloc)      # with CuPy's cache
    cupy.cuda.set_allocator(bfcd.cupy.allocator())        # without: bfcd has one

Where there is no memory, both raise cupy.cuda.memory.OutOfMemoryError, which is a MemoryError.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import threading
from typing import Any

import cupy
from cupy.cuda import memory

from . import _args, _client
from ._errors import OutOfMemory, QuotaExceeded


class OutOfMemoryError(memory.OutOfMemoryError, cupy.cuda.runtime.CUDARuntimeError):  # type: ignore[misc]
    """The allocator's refusal, with the daemon's sentence.

    CuPy's pool frees what it has cached and tries again after a CUDARuntimeError with this status only.
    """

    status = 2  # cudaErrorMemoryAllocation

    def __init__(self, sentence: str) -> None:
        MemoryError.__init__(self, sentence)
        self.infos: list[str] = []

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> Any:
        return type(self), self.args


class Allocator:
    """For cupy.cuda.set_allocator(): allocates on the current device."""

    def __init__(self, client: _client.Client | None = None, below_pool: bool = False) -> None:
        self._client = client if client is None else _args.instance(client, _client.Client, "client")
        self._below_pool = below_pool
        self._partitions: dict[int, str] = {}
        self._refused = threading.local()

    def _wait(self, n_bytes: int) -> float | None:
        """A pool tries again when it has freed its cache, and only then the request waits for BFC_WAIT_MS."""
        if not self._below_pool or getattr(self._refused, "n_bytes", None) == n_bytes:
            return None
        return 0.0

    def __call__(self, n_bytes: int) -> memory.MemoryPointer:
        device = cupy.cuda.runtime.getDevice()
        n_bytes = _args.size(n_bytes, "n_bytes")
        if n_bytes == 0:
            return memory.MemoryPointer(memory.UnownedMemory(0, 0, None, device), 0)
        client = self._client or _client.default()
        if device not in self._partitions:
            self._partitions[device] = client.partition_for_device(device)
        wait = self._wait(n_bytes)
        try:
            block = client.malloc(n_bytes, partition=self._partitions[device], wait=wait)
        except (QuotaExceeded, OutOfMemory) as e:
            self._refused.n_bytes = n_bytes if wait == 0.0 else None
            raise OutOfMemoryError(str(e)) from e
        self._refused.n_bytes = None
        # The block is freed when CuPy drops the memory, which waits for the device's work as cudaFree does.
        return memory.MemoryPointer(memory.UnownedMemory(block.ptr, n_bytes, block, device), 0)


def allocator(client: _client.Client | None = None) -> Allocator:
    """Allocates each array by itself. client: by default bfcd.default()."""
    return Allocator(client)


def pool(client: _client.Client | None = None) -> cupy.cuda.MemoryPool:
    """A cupy.cuda.MemoryPool over bfcd. By default it has a client of its own without a cache, since CuPy caches.

    When memory is short CuPy first frees what it has cached. Then the request waits for BFC_WAIT_MS milliseconds.
    """
    own = _client.connect(cache=False) if client is None else client
    return cupy.cuda.MemoryPool(Allocator(own, below_pool=True))
