"""Numba's GPU memory from bfcd: an external memory manager (EMM plugin).

    NUMBA_CUDA_MEMORY_MANAGER=bfcd.numba python job.py

or, before the first use of a GPU, numba.cuda.set_memory_manager(bfcd.numba.MemoryManager).

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import ctypes
import weakref
from contextlib import suppress
from typing import Any

from numba import cuda

from . import _args, _client, _errors, _library
from ._library import lib


def _free(block: _client.Block) -> None:
    # Numba calls it in finalizers, also at the interpreter's end.
    with suppress(_errors.Error):
        block.free()


class MemoryManager(cuda.HostOnlyCUDAMemoryManager):  # type: ignore[misc]
    """Memory on the device is bfcd's; pinned host memory is Numba's own. Where there is no memory, it raises
    bfcd.QuotaExceeded or bfcd.OutOfMemory, which are MemoryErrors."""

    @property
    def interface_version(self) -> int:
        return 1

    def initialize(self) -> None:
        _client.default()

    def _partition(self) -> str:
        return _client.default().partition_for_device(self.context.device.id)

    def memalloc(self, size: int) -> Any:
        size = _args.size(size, "size")
        block = _client.default().malloc(max(size, 1), partition=self._partition())
        return cuda.MemoryPointer(
            weakref.proxy(self.context), ctypes.c_void_p(block.ptr), size, finalizer=lambda: _free(block)
        )

    def get_memory_info(self) -> Any:
        free, total = _client.default().mem_get_info(self._partition())
        return cuda.MemoryInfo(free=free, total=total)

    def get_ipc_handle(self, memory: Any) -> Any:
        """Needs a partition with "share: cuda-ipc"."""
        info = _library.BlockInfo()
        address = int(memory.handle)
        _errors.check(lib.bfc_block_info(_client.default()._handle, address, ctypes.byref(info)))
        if info.share != _library.SHARE_CUDA_IPC:
            raise NotImplementedError(
                f"partition '{info.partition.decode()}' shares memory by fds, which are no CUDA IPC handles: use a "
                'partition with "share: cuda-ipc", or Client.publish() and attach()'
            )
        handle = cuda.cudadrv.driver.binding.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), info.handle, len(info.handle))
        return cuda.IpcHandle(
            memory,
            handle,
            memory.size,
            self.context.device.get_device_identity(),
            offset=info.extent_offset + address - info.base,
        )


_numba_memory_manager = MemoryManager
