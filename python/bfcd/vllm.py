"""vLLM's sleep mode with bfcd's memory: `vllm serve MODEL --enable-sleep-mode --sleep-mode-backend bfcd`.

vLLM allocates weights and KV cache through one allocator for each process, whatever back end sleeps. So a worker of an engine
with this back end has Allocator in its place, which allocates from bfcd.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.device_allocator import DEFERRABLE_TAGS
from vllm.device_allocator.alloc_conf import EXPANDABLE_SEGMENTS, conf_flag_enabled, current_alloc_conf, set_alloc_conf, with_conf_flag
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend, SleepModeBackendFactory
from vllm.logger import init_logger

from . import _client
from ._tagged import UNDO_S, TaggedPools

NAME = "bfcd"
#: What keeps its contents at level 2, too.
_KEPT = ("runtime", "cudagraph")
#: Unless BFC_WAIT_MS says otherwise. Other tenants may need some time to make room.
_WAKE_S = 60.0

logger = init_logger("vllm.bfcd")


class Allocator:
    """What vLLM's workers use of its CuMemAllocator, and the memory of this process by tags."""

    def __init__(self) -> None:
        self.pools = TaggedPools(prefix="vllm")

    @contextmanager
    def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
        conf = current_alloc_conf()
        expands = conf_flag_enabled(conf, EXPANDABLE_SEGMENTS)
        if expands:  # PyTorch would map memory by itself
            set_alloc_conf(with_conf_flag(conf, EXPANDABLE_SEGMENTS, False))
        try:
            with self.pools.region(tag or "default"):
                yield
            torch.cuda.empty_cache()  # for instance of weights before they were quantized
        finally:
            if expands:
                set_alloc_conf(conf)

    def get_current_usage(self) -> int:
        return sum(map(self.pools.bytes, self.pools.tags()))

    def release_pools(self) -> None:
        self.pools.clear()

    def begin_idle(self) -> None:
        """Of each worker, by collective_rpc("bfcd_begin_idle") while the scheduler is paused: from now on no step runs, and bfcd
        may park the memory when other tenants need it."""
        self.pools.begin_idle()

    def end_idle(self, wait: float | str | None = None) -> None:
        """By collective_rpc("bfcd_end_idle"), before the scheduler continues: brings back what was parked."""
        self.pools.end_idle(_wake_s() if wait is None else float(wait))


def _wake_s() -> float:
    return _client._default_wait or _WAKE_S


def _allocator_class() -> Any:
    from vllm.device_allocator.cumem import CuMemAllocator

    return CuMemAllocator


class Backend(SleepModeBackend):
    """Memory that is kept goes to the tenant's partition of host memory, and is charged there. All other memory of the tags is
    returned to bfcd. If there is no room for it, suspend() fails and all is awake."""

    def __init__(self) -> None:
        super().__init__()
        allocator = _allocator_class().instance
        if not isinstance(allocator, Allocator):
            raise RuntimeError(
                "sleep mode back end 'bfcd': the weights were not allocated from bfcd, because the worker is no vLLM worker with "
                "--enable-sleep-mode --sleep-mode-backend bfcd"
            )
        self._pools = allocator.pools

    def suspend(self, level: int = 1) -> None:
        keep = ("weights", *_KEPT) if level == 1 else _KEPT
        gc.collect()
        torch.cuda.empty_cache()  # what is free is not parked
        # What is kept comes first: only that can fail for lack of room, and nothing is lost until then.
        kept = [tag for tag in self._pools.tags() if tag in keep]
        done: list[str] = []
        try:
            for tag in kept:
                if self._pause(tag, True):
                    done.append(tag)
            for tag in self._pools.tags():
                if tag not in kept:
                    self._pause(tag, False)
        except BaseException:
            for tag in done:
                self._pools.resume(tag, UNDO_S)
            raise
        finally:
            self._note_state()

    def resume(self, tags: list[str] | None = None) -> None:
        self._state = "RESUMING"
        try:
            for tag in self._pools.tags():
                if tags is None or tag in tags or tag not in DEFERRABLE_TAGS:
                    self._pools.resume(tag, _wake_s())
        finally:
            self._note_state()

    def discard(self, tags: tuple[str, ...]) -> None:
        try:
            for tag in tags:
                self._pause(tag, False)
        finally:
            self._note_state()

    def _pause(self, tag: str, keep: bool) -> bool:
        """Memory that is asleep stays as it is."""
        n_bytes, before = self._pools.bytes(tag), self._pools.state(tag)
        if self._pools.pause(tag, keep):
            logger.info("bfcd: %s: %.2f GiB, %s", tag, n_bytes / (1 << 30), "kept in host memory" if keep else "discarded")
            return True
        if before != "awake" and (before == "kept") != keep:
            logger.warning("bfcd: %s is asleep already, and stays %s", tag, before)
        return False

    def _note_state(self) -> None:
        """RUNNING: all memory is awake."""
        is_awake = all(self._pools.state(tag) == "awake" for tag in self._pools.tags())
        self._state = "RUNNING" if is_awake else "SUSPENDED"

    @classmethod
    def is_supported(cls) -> bool:
        return torch.version.cuda is not None

    @classmethod
    def preserves_communicators(cls) -> bool:
        return True  # their memory has no tag

    @classmethod
    def preserves_compiled_artifacts(cls) -> bool:
        return True


def _follow(worker: Any) -> None:
    """A worker begins, and has allocated nothing yet. CuMemAllocator.instance is what vLLM's get_mem_allocator_instance() gives."""
    config = worker.vllm_config.model_config
    if config.enable_sleep_mode and config.sleep_mode_backend == NAME:
        allocator = Allocator()
        _allocator_class().instance = allocator
        worker.bfcd_begin_idle, worker.bfcd_end_idle = allocator.begin_idle, allocator.end_idle
    elif torch.version.cuda is not None and isinstance(_allocator_class().instance, Allocator):
        _allocator_class().instance = None  # of an engine before it in this process


def register() -> None:
    """The entry point of the group vllm.general_plugins. No interface of vLLM tells a back end that a worker begins."""
    from vllm.v1.worker.worker_base import WorkerBase

    if NAME in SleepModeBackendFactory._registry:
        return
    SleepModeBackendFactory.register_backend(NAME, __name__, Backend.__name__)
    before = WorkerBase.__init__

    @functools.wraps(before)
    def __init__(self: Any, *arguments: Any, **words: Any) -> None:
        before(self, *arguments, **words)
        _follow(self)

    WorkerBase.__init__ = __init__
