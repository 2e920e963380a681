"""SGLang's memory saver with bfcd's memory:

    python -m bfcd.sglang -m sglang.launch_server --enable-memory-saver --enable-weights-cpu-backup --model-path MODEL

It runs Python with the given arguments, and puts this module in the place of the package torch_memory_saver, there and in all
subprocesses, by PYTHONPATH: SGLang starts its schedulers as new processes, which inherit the environment and nothing else.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

from . import _client

#: Unless BFC_WAIT_MS says otherwise. Other tenants may need some time to make room.
_RESUME_S = 60.0
_FOLDER = str(pathlib.Path(__file__).with_name("_sglang"))


def _refused(sentence: str) -> Any:
    def refuse(self: Any, value: Any = None) -> Any:
        raise NotImplementedError(sentence)

    return property(refuse, refuse)


@contextlib.contextmanager
def configure_subprocess() -> Iterator[None]:
    """Subprocesses inherit PYTHONPATH."""
    yield


class TorchMemorySaver:
    """The interface of torch_memory_saver 0.0.10. Memory of a region with enable_cpu_backup is paused to the tenant's partition of
    host memory. The contents of other memory are lost. Where the original ends the process, this one raises a RuntimeError.
    """

    enabled = True

    def __init__(self) -> None:
        self._regions: list[str | None] = []  # inside of which the program is; None: of disable()
        self._keys: dict[tuple[str, bool, Any], str] = {}  # by tag, whether contents are kept, and the pool of graphs
        self._numbers = itertools.count()

    @functools.cached_property
    def _pools(self) -> Any:
        conf = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
        if "expandable_segments:True" in conf:
            raise RuntimeError("bfcd.sglang: PyTorch maps memory by itself with expandable_segments:True: unset it")
        from ._tagged import TaggedPools

        return TaggedPools(prefix="sglang")

    def _key(self, tag: str, is_kept: bool, graphs: Any = None) -> str:
        """Of a pool, in which one may allocate now."""
        tag.encode()
        key = self._keys.setdefault((tag, is_kept, graphs), f"{tag}-{next(self._numbers)}")
        if self._pools.state(key) != "awake":
            raise RuntimeError(f"memory of tag '{tag}' is paused: resume it before it gets new tensors")
        return key

    @contextlib.contextmanager
    def region(
        self,
        tag: str = "default",
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: str | None = None,
    ) -> Iterator[None]:
        """Tensors that are made inside can be paused. cpu_backup_backend: the partition of host memory says whether it is pinned."""
        if cpu_backup_backend is not None and not enable_cpu_backup:
            raise ValueError("cpu_backup_backend requires enable_cpu_backup=True")
        assert not (enable_cpu_backup and enable_disk_backup), "enable_cpu_backup and enable_disk_backup exclude each other"
        if enable_disk_backup:
            raise NotImplementedError("bfcd keeps contents in host memory only: use enable_cpu_backup=True")
        with self._pools.region(self._key(tag, enable_cpu_backup)), self._inside(tag):
            yield

    @contextlib.contextmanager
    def _inside(self, tag: str | None) -> Iterator[None]:
        self._regions.append(tag)
        try:
            yield
        finally:
            self._regions.pop()

    @contextlib.contextmanager
    def disable(self) -> Iterator[None]:
        """Of a region: tensors that are made inside are not paused."""
        assert self._regions and self._regions[-1] is not None, "disable() is for use inside of a region"
        from . import torch as _torch

        with _torch.pool(), self._inside(None):
            yield

    @contextlib.contextmanager
    def cuda_graph(
        self,
        cuda_graph: Any,
        pool: Any = None,
        stream: Any = None,
        capture_error_mode: str = "global",
        tag: str = "default",
        enable_cpu_backup: bool = False,
        cpu_backup_backend: str | None = None,
    ) -> Iterator[None]:
        """torch.cuda.graph() with memory that can be paused. Graphs share memory if they have the same tag and pool."""
        import torch

        if cpu_backup_backend is not None and not enable_cpu_backup:
            raise ValueError("cpu_backup_backend requires enable_cpu_backup=True")
        key = self._key(tag, enable_cpu_backup, next(self._numbers) if pool is None else pool)
        with self._pools.graph_region(key) as own_pool, self._inside(tag):
            with torch.cuda.graph(cuda_graph, pool=own_pool, stream=stream, capture_error_mode=capture_error_mode):
                yield

    def _of(self, tag: str | None, is_awake: bool) -> list[tuple[str, bool]]:
        """The pools of a tag, or all, that are awake or not, those that keep their contents first."""
        if tag:
            tag.encode()
        pools = [(key, is_kept) for (of, is_kept, _), key in self._keys.items() if not tag or of == tag]
        found = [(key, is_kept) for key, is_kept in pools if (self._pools.state(key) == "awake") == is_awake]
        if tag and pools and not found:
            raise RuntimeError(f"memory of tag '{tag}' is {'paused already' if is_awake else 'not paused'}")
        return sorted(found, key=lambda pool: not pool[1])

    def pause(self, tag: str | None = None) -> None:
        """Returns memory to bfcd: of one tag, or all. If there is no room for what is to be kept, nothing is paused and
        bfcd.QuotaExceeded or bfcd.OutOfMemory is raised. bfcd.Busy: a thread is inside of its region."""
        done = []
        try:
            for key, is_kept in self._of(tag, is_awake=True):
                self._pools.pause(key, is_kept)
                done.append((key, is_kept))
        except BaseException:
            for key, is_kept in done:
                if is_kept:
                    self._pools.resume(key, _RESUME_S)
            raise

    def resume(self, tag: str | None = None) -> None:
        """Brings memory back, at its addresses. Without room after BFC_WAIT_MS, a minute by default, bfcd.QuotaExceeded or
        bfcd.OutOfMemory is raised; what is still paused can be resumed later."""
        for key, _ in self._of(tag, is_awake=False):
            self._pools.resume(key, _client._default_wait or _RESUME_S)

    @property
    def hook_mode(self) -> str:
        raise AttributeError("hook_mode can only be set")

    @hook_mode.setter
    def hook_mode(self, hook_mode: str) -> None:
        """bfcd's pools need no hook. It is for the original only."""
        if hook_mode not in ("preload", "torch"):
            raise KeyError(hook_mode)

    def get_cpu_backup(self, x: Any, zero_copy: bool = False) -> Any:
        """None: x is not paused. Contents that are paused cannot be read."""
        if any(self._pools.state(key) != "awake" for key in self._keys.values()):
            raise NotImplementedError("bfcd: contents of paused memory cannot be read: resume it")
        return None

    memory_margin_bytes = _refused("bfcd: there is no margin: limits of tenants and leases say what others may have")
    retain_cpu_backup = _refused("bfcd: contents of memory that is resumed are not kept elsewhere, too")


torch_memory_saver = TorchMemorySaver()


def _main(*words: str) -> None:
    if not words:
        sys.exit("usage: python -m bfcd.sglang -m sglang.launch_server ARGUMENT...")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_FOLDER, os.environ.get("PYTHONPATH")]))
    os.execv(sys.executable, [sys.executable, *words])


if __name__ == "__main__":
    _main(*sys.argv[1:])
