"""PyTorch's GPU memory by tags, for engines that sleep: each tag is a parkable pool of bfcd.torch.

A tag's memory is awake, "kept" (its contents are in a partition of host memory) or "discarded". Awake memory is in use, so
that bfcd does not park it, except between begin_idle() and end_idle(). One thread at a time may call these.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from . import torch as _torch

State = Literal["awake", "kept", "discarded"]

#: How long a failed sleep waits for the memory that it had parked already: another tenant may have it.
UNDO_S = 600


class _Tagged:
    """The memory of one tag."""

    def __init__(self, pool: _torch.ParkablePool) -> None:
        self.pool = pool
        self.state: State = "awake"
        self._use: Any = None

    def begin_use(self, wait: float | None) -> None:
        use = self.pool.use(wait)
        use.__enter__()
        self._use = use

    def end_use(self) -> None:
        use, self._use = self._use, None
        if use is not None:
            use.__exit__(None, None, None)


class TaggedPools:
    """device: a number or a torch.device, by default the current GPU. prefix: of the tags that bfcctl shows."""

    def __init__(self, device: Any = None, prefix: str = "torch") -> None:
        self._device = device
        self._prefix = prefix
        self._by_tag: dict[str, _Tagged] = {}
        self._is_idle = False

    def tags(self) -> list[str]:
        """Those that have had a region()."""
        return list(self._by_tag)

    @contextmanager
    def _growing(self, tag: str) -> Iterator[_torch.ParkablePool]:
        """The tag's memory wakes if it is asleep, because PyTorch may place new tensors beside others."""
        tagged = self._by_tag.get(tag)
        if tagged is None:
            with torch.cuda.device(self._device):
                tagged = _Tagged(_torch.ParkablePool(f"{self._prefix}-{tag}"))
            self._by_tag[tag] = tagged
        self.resume(tag)
        try:
            yield tagged.pool
        finally:
            if not self._is_idle:  # what was allocated meanwhile is in use from now on, too
                tagged.end_use()
                tagged.begin_use(None)

    @contextmanager
    def region(self, tag: str) -> Iterator[None]:
        """Tensors that the thread makes inside are in the tag's memory. It wakes if it is asleep."""
        with self._growing(tag) as pool, pool:
            yield

    @contextmanager
    def graph_region(self, tag: str) -> Iterator[Any]:
        """What is captured inside by torch.cuda.graph(pool=...) of the value has memory of the tag."""
        with self._growing(tag) as pool:
            yield pool.mem_pool.id

    def pause(self, tag: str, keep: bool) -> bool:
        """Returns the tag's memory to bfcd. keep: its contents go to the tenant's partition of host memory; otherwise they are
        lost. False: it had no memory that was awake, and nothing has changed. After an error it is awake."""
        tagged = self._by_tag.get(tag)
        if tagged is None or tagged.state != "awake":
            return False
        tagged.end_use()
        try:
            tagged.pool.sleep(discard=not keep)
        except BaseException:
            tagged.state = "kept"
            self.resume(tag, UNDO_S)
            raise
        tagged.state = "kept" if keep else "discarded"
        return True

    def resume(self, tag: str, wait: float | None = None) -> None:
        """Brings the tag's memory back, at the same addresses. wait: for so many seconds if there is no room, by default
        BFC_WAIT_MS. After QuotaExceeded or OutOfMemory it is still asleep."""
        tagged = self._by_tag.get(tag)
        if tagged is not None and tagged.state != "awake":
            tagged.begin_use(wait)
            tagged.state = "awake"
            if self._is_idle:
                tagged.end_use()

    def bytes(self, tag: str) -> int:
        """Awake or asleep."""
        tagged = self._by_tag.get(tag)
        return 0 if tagged is None else tagged.pool.n_bytes()

    def state(self, tag: str) -> State:
        tagged = self._by_tag.get(tag)
        return "awake" if tagged is None else tagged.state

    def begin_idle(self) -> None:
        """From now on nothing uses the memory, and bfcd may park it when other tenants need it."""
        torch.cuda.synchronize(self._device)
        self._is_idle = True
        for tagged in self._by_tag.values():
            tagged.end_use()

    def end_idle(self, wait: float | None = None) -> None:
        """Brings back what bfcd has parked meanwhile. wait: as in resume(), for each tag. After an error the memory is still idle."""
        try:
            for tagged in self._by_tag.values():
                if tagged.state == "awake":
                    tagged.begin_use(wait)
        except BaseException:
            for tagged in self._by_tag.values():
                tagged.end_use()
            raise
        self._is_idle = False

    def clear(self) -> None:
        """Forgets all tags. Their memory is returned with their tensors."""
        for tagged in self._by_tag.values():
            tagged.end_use()
        self._by_tag.clear()
        torch.cuda.empty_cache()
