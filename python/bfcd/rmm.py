"""A memory resource for RMM, and so for cuDF, cuML and others of RAPIDS.

    import bfcd.rmm
    rmm.mr.set_current_device_resource(bfcd.rmm.resource())

Memory is allocated and freed in the order of the stream that RMM names. Where there is none, RMM raises a MemoryError
with the daemon's sentence.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import ctypes
import errno
from typing import Any

import rmm.mr

from . import _args, _client, _errors, _library
from ._library import lib


class _Functions:
    """What RMM calls. It keeps the client's session."""

    def __init__(self, client: _client.Client, device: int) -> None:
        self._client = _args.instance(client, _client.Client, "client")
        self._partition = client.partition_for_device(device).encode()

    def allocate(self, n_bytes: int, stream: Any) -> int:
        n_bytes = _args.size(n_bytes, "n_bytes")
        if n_bytes == 0:
            return 0
        ptr = ctypes.c_void_p()
        handle = self._client._handle
        result = lib.bfc_malloc_async_in(
            handle, self._partition, n_bytes, stream.__cuda_stream__()[1], ctypes.byref(ptr)
        )
        if result in (-errno.EDQUOT, -errno.ENOMEM) and _client._default_wait:
            options = _library.MallocOptions(
                partition=self._partition, wait_ms=_client._wait_ms(_client._default_wait)
            )
            result = lib.bfc_malloc_with(handle, n_bytes, ctypes.byref(options), ctypes.byref(ptr))
        _errors.check(result)
        assert ptr.value is not None
        return ptr.value

    def deallocate(self, ptr: int, n_bytes: int, stream: Any) -> None:
        ptr = _args.size(ptr, "ptr", most=(1 << 64) - 1)
        if ptr:
            _errors.check(lib.bfc_free_async(self._client._handle, ptr, stream.__cuda_stream__()[1]))


def resource(device: int = 0, client: _client.Client | None = None) -> rmm.mr.CallbackMemoryResource:
    """A resource for one CUDA device. client: by default bfcd.default(). An allocation waits for BFC_WAIT_MS
    milliseconds when memory is short."""
    functions = _Functions(_client.default() if client is None else client, device)
    return rmm.mr.CallbackMemoryResource(functions.allocate, functions.deallocate)
