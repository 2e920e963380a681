"""The MemPools of PyTorch that a pool consists of, and which of them a thread allocates from.

PyTorch gives back nothing that a MemPool has cached before the MemPool is released, and only a thread itself can direct
its allocations to one. So a thread that enters a pool begins several MemPools. PyTorch allocates from one of them, and
the others are spares. To give memory back, any thread ends and releases the one in use: PyTorch continues with the next
one, and frees what the released one has cached, now or when its tensors are gone.

Invariants: a MemPool is idle, a spare, or begun by one thread. None is destroyed, because its destructor ends the process
while any thread is inside of a pool, or while a graph uses it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import functools
import os
import threading
import weakref
from typing import Any

import torch

from . import _client, _errors
from ._library import lib

_N_SPARES = 2
_N_SWEEPS = 20  # in a minute
_lock = threading.RLock()
_here = threading.local()
#: Pools that exist, and the innermost one of each thread.
_living: weakref.WeakSet[Parts] = weakref.WeakSet()
_lanes: list[Lane] = []
#: Ids of MemPools that were released and may still have memory, and of all that may have memory.
_released: list[Any] = []
_ids: set[Any] = set()
_free_cached = torch._C._cuda_emptyCache


def _new(functions: Any, device: int) -> Any:
    with torch.cuda.device(device):
        mem_pool = torch.cuda.MemPool(functions)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(mem_pool))
    _ids.add(mem_pool.id)
    return mem_pool


def _release(device: int, mem_pool: Any) -> None:
    """PyTorch may free its memory from now on."""
    _released.append(mem_pool.id)
    torch._C._cuda_releasePool(device, mem_pool.id)


def _has_free_segments(mem_pool_id: Any) -> bool:
    return any(segment["active_size"] == 0 for segment in torch.cuda.memory_snapshot(mem_pool_id))


def has(ptr: int) -> bool:
    """Whether the address is in memory of a pool."""
    return any(
        segment["address"] <= ptr < segment["address"] + segment["total_size"]
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) in _ids
    )


@functools.cache
def _first_is_used() -> bool:
    """Which of several MemPools that a thread has begun PyTorch allocates from: the first one, or in newer versions the
    last one. Asked by an allocation of two pools on libc's malloc()."""
    libc = torch.cuda.memory.CUDAPluggableAllocator("libc.so.6", "malloc", "free")
    functions = libc.allocator()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(libc))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(functions))
    device = torch.cuda.current_device()
    first, last = _new(functions, device), _new(functions, device)
    with torch.cuda.use_mem_pool(first), torch.cuda.use_mem_pool(last):
        x = torch.empty(1, dtype=torch.uint8, device="cuda")
        is_first = bool(torch.cuda.memory_snapshot(first.id))
    del x
    for mem_pool in (first, last):
        _release(device, mem_pool)
    return is_first


class Parts:
    """The MemPools of one pool, by device where there are several. That of graphs is never released before the pool is
    gone, since PyTorch knows by its id only what a graph is captured into."""

    def __init__(self, functions: Any) -> None:
        _extend_empty_cache()
        self.functions = functions
        self.device = torch.cuda.current_device()
        self.ids: set[Any] = set()  #: of all MemPools that it has had
        self.of_graphs = self._new(self.device)
        self.graphs_lane: Lane | None = None  # that has begun it
        self.idle: dict[int, list[Any]] = {}  #: what a thread has allocated from, the latest at the end
        self.spares: dict[int, list[Any]] = {}
        self.is_fixed = False  #: all tensors are in of_graphs, by which NCCL knows them
        self.n_inside = 0
        _first_is_used()
        with _lock:
            _living.add(self)
        weakref.finalize(self, _release_all, self.device, self.of_graphs, self.idle, self.spares).atexit = False

    def _new(self, device: int) -> Any:
        mem_pool = _new(self.functions, device)
        self.ids.add(mem_pool.id)
        return mem_pool

    def n_bytes(self) -> int:
        """Of all segments, with what PyTorch has cached."""
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) in self.ids)

    def take(self, device: int, is_spare: bool) -> Any:
        lists = (self.spares,) if is_spare else (self.idle, self.spares)
        for mem_pools in (by_device.get(device) for by_device in lists):
            if mem_pools:
                return mem_pools.pop()
        return self._new(device)

    def check(self) -> None:
        if self.is_fixed and (self.graphs_lane is not None or torch.cuda.current_device() != self.device):
            raise _errors.Busy(
                errno.EBUSY,
                f"the pool has one mem_pool, which the program asked for: one thread at a time can be inside, on GPU {self.device}",
            )

    def release_free(self) -> None:
        """Releases the idle MemPools in which whole segments are free. A graph may have been captured into another one
        only."""
        for device, mem_pools in list(self.idle.items()):
            for mem_pool in list(mem_pools):
                if mem_pool.use_count() == 1 and _has_free_segments(mem_pool.id):
                    mem_pools.remove(mem_pool)
                    _release(device, mem_pool)


def _release_all(device: int, of_graphs: Any, *lists: dict[int, list[Any]]) -> None:
    """The pool is gone. Without the lock: the garbage collector calls it anywhere."""
    _release(device, of_graphs)
    for by_device in lists:
        for where, mem_pools in by_device.items():
            for mem_pool in mem_pools:
                _release(where, mem_pool)


class Lane:
    """A thread inside of a pool, on one device."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.device = torch.cuda.current_device()
        self.thread = threading.current_thread()
        self.use: Any = None  # of a parkable pool
        self.is_begun = False
        self._begun: list[tuple[Any, Any]] = []  #: with their contexts, in the order in which they are used

    def begin(self) -> None:
        parts, device = self.parts, self.device
        n = 0 if parts.is_fixed else 1 + _N_SPARES
        mem_pools = [parts.take(device, is_spare=i > 0) for i in range(n)]
        if device == parts.device and parts.graphs_lane is None:
            parts.graphs_lane = self
            mem_pools.append(parts.of_graphs)
        for mem_pool in mem_pools if _first_is_used() else reversed(mem_pools):
            context = torch.cuda.use_mem_pool(mem_pool, device)
            context.__enter__()
            at = len(self._begun) if _first_is_used() else 0
            self._begun.insert(at, (mem_pool, context))
        _lanes.append(self)
        self.is_begun = True

    def end(self) -> None:
        self.is_begun = False
        _lanes.remove(self)
        begun, self._begun = self._begun, []
        if self.parts.graphs_lane is self:
            self.parts.graphs_lane = None
        for i, (mem_pool, context) in enumerate(begun):
            context.__exit__(None, None, None)
            if mem_pool is not self.parts.of_graphs:
                by_device = self.parts.idle if i == 0 else self.parts.spares
                by_device.setdefault(self.device, []).append(mem_pool)

    def n_spares(self) -> int:
        return max(0, sum(mem_pool is not self.parts.of_graphs for mem_pool, _ in self._begun) - 1)

    def give_back(self) -> bool:
        """Of another thread: releases the MemPool in use if whole segments are free there."""
        if not self.is_begun or self.n_spares() == 0:
            return False
        mem_pool, context = self._begun[0]
        if mem_pool.use_count() != 2 or not _has_free_segments(mem_pool.id):
            return False
        context.__exit__(None, None, None)
        del self._begun[0]
        _release(self.device, mem_pool)
        return True


# ---- a thread enters and leaves ----


def _stack() -> list[Lane]:
    if not hasattr(_here, "lanes"):
        _here.lanes = []
    return _here.lanes


def enter(parts: Parts) -> Lane:
    """The calling thread allocates from these, until it enters another pool or leaves this one. The backward pass runs in
    the calling thread, since PyTorch's threads for it allocate elsewhere."""
    lanes = _stack()
    lane = Lane(parts)
    with _lock:
        sweep()
        if not (lanes and parts.graphs_lane is lanes[-1]):
            parts.check()
        if lanes:
            lanes[-1].end()
        else:
            _here.multithreading = torch._C._is_multithreading_enabled()
            torch._C._set_multithreading_enabled(False)
        lane.begin()
        lanes.append(lane)
        parts.n_inside += 1
    return lane


def leave(parts: Parts) -> Lane:
    """In any order."""
    lanes = _stack()
    at = next((i for i in reversed(range(len(lanes))) if lanes[i].parts is parts), None)
    if at is None:
        raise RuntimeError("this thread is not inside of the pool: the thread that has entered `with pool:` must leave it")
    with _lock:
        lane = lanes.pop(at)
        parts.n_inside -= 1
        if at == len(lanes):
            lane.end()
            if lanes:
                lanes[-1].begin()
        if not lanes:
            torch._C._set_multithreading_enabled(_here.multithreading)
        sweep()
    return lane


# ---- giving memory back ----


def _torch_empty_cache(*arguments: Any) -> None:
    """The segments of our pools are freed together, with one wait for the device."""
    lib.bfc_torch_pool_free_begin()
    try:
        _free_cached(*arguments)
    finally:
        lib.bfc_torch_pool_free_end()


def sweep() -> None:
    """Frees segments of released MemPools whose tensors are gone meanwhile."""
    for mem_pool_id in list(_released):
        segments = torch.cuda.memory_snapshot(mem_pool_id)
        if not segments:
            _released.remove(mem_pool_id)
            _ids.discard(mem_pool_id)
        elif any(segment["active_size"] == 0 for segment in segments):
            _empty()
            return


def _empty() -> None:
    """The client's cache is on if the client was connected before the first pool."""
    _torch_empty_cache()
    lib.bfc_trim(_client.default()._handle, ctypes.c_size_t(-1))


def empty_cache(*arguments: Any) -> None:
    """What torch.cuda.empty_cache() calls when there has been a pool."""
    if arguments:
        _torch_empty_cache(*arguments)
        return
    own = _stack()[-1:]
    with _lock:
        for lane in own:
            lane.end()
        try:
            _torch_empty_cache()  # which waits for other streams that use freed tensors
            for parts in list(_living):
                parts.release_free()
            gave = [lane for lane in _lanes if lane.give_back()]
            _empty()
        finally:
            for lane in own:
                lane.begin()
        is_low = any(lane.thread is threading.main_thread() and lane.n_spares() < _N_SPARES for lane in _lanes)
    if is_low:
        ctypes.pythonapi.Py_AddPendingCall(_renew_main, None)
    if gave:
        _sweeper.start()


@ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
def _renew_main(_: Any) -> int:
    """In the main thread: gives its lane new spares. It may be called in the middle of any function here."""
    lane = next(iter(_stack()[-1:]), None)
    if lane is not None and lane.is_begun and _lock.acquire(blocking=False):
        try:
            lane.end()
            lane.begin()
        finally:
            _lock.release()
    return 0


class _Sweeper:
    """A thread that calls sweep() for some time after memory was taken from under a thread that is inside of a pool: what
    that thread was using then is cached where it does not allocate, as soon as it is free."""

    def __init__(self) -> None:
        self._changed = threading.Condition(_lock)
        self._thread: threading.Thread | None = None
        self._n_left = 0

    def _run(self) -> None:
        with self._changed:
            while self._n_left > 0:
                self._n_left -= 1
                self._changed.wait(0.05 * 1.3 ** (_N_SWEEPS - self._n_left))
                sweep()
            self._thread = None

    def start(self) -> None:
        with self._changed:
            self._n_left = _N_SWEEPS
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="bfcd-sweep", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        if not _lock.acquire(timeout=5):  # a thread waits for memory; this one does nothing without the lock
            return
        self._n_left = 0
        self._changed.notify()
        thread = self._thread
        _lock.release()
        if thread is not None:
            thread.join()


_sweeper = _Sweeper()
atexit.register(lambda: _sweeper.stop())


@functools.cache
def _extend_empty_cache() -> None:
    for name in ("_cuda_emptyCache", "_accelerator_emptyCache"):
        if hasattr(torch._C, name):
            setattr(torch._C, name, empty_cache)


def _after_fork() -> None:
    global _lock, _sweeper
    _lock = threading.RLock()
    _sweeper = _Sweeper()


os.register_at_fork(after_in_child=_after_fork)
