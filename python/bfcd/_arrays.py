"""Arrays on blocks: numpy.ndarray on the host, DeviceArray on a GPU.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import ctypes
import json
import math
import sys
from typing import TYPE_CHECKING, Any

from . import _args, _dlpack

if TYPE_CHECKING:
    from ._client import Block, Client
    from ._pool import Pool


def import_numpy() -> Any:
    """The module, which nothing but arrays needs."""
    try:
        import numpy
    except ModuleNotFoundError as e:
        if e.name != "numpy":
            raise
        raise ImportError("arrays need NumPy: pip install numpy; blocks of malloc() need nothing") from None
    return numpy


class _HostMemory(ctypes.c_ubyte * (1 << 47)):  # type: ignore[misc]
    """What numpy keeps as the base of an array: the address, and the block. The type has no size of its own, because
    ctypes keeps each type for ever: so it has that of the address space, and arrays have their bytes at its begin."""

    __slots__ = ("block",)


class DeviceArray:
    """A C-contiguous array on a GPU. It computes nothing: pass it to CuPy, PyTorch, Numba or JAX, which take it by
    `__cuda_array_interface__` or `__dlpack__` without a copy."""

    __slots__ = ("block", "shape", "dtype", "read_only", "_ordinal", "_offset", "__weakref__")

    def __init__(
        self,
        block: Block,
        shape: tuple[int, ...],
        dtype: Any,
        ordinal: int,
        offset: int = 0,
        read_only: bool | None = None,
    ) -> None:
        numpy = import_numpy()

        from ._client import Block

        self.block = _args.instance(block, Block, "block")
        self.shape = _args.shape(shape)
        self.dtype = numpy.dtype(dtype)
        self.read_only = block.read_only if read_only is None else bool(read_only)
        self._ordinal = _args.size(ordinal, "ordinal", most=(1 << 31) - 1)
        self._offset = _args.size(offset, "offset")
        if self._offset + self.nbytes > block.nbytes:
            raise ValueError(f"{self.nbytes} bytes at {self._offset} are not inside of the block's {block.nbytes}")

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.block._address(self._offset), self.read_only),
            "version": 3,
            "strides": None,
            "stream": None,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return _dlpack.CUDA, self._ordinal

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        max_version = _args.version_or_none(max_version, "max_version")
        # DeviceArray gives its memory no work, so there is no stream to wait for.
        if copy:
            raise BufferError("a DeviceArray is exported without a copy only")
        if dl_device is not None and dl_device != self.__dlpack_device__():
            raise BufferError(f"the array is on device {self.__dlpack_device__()}, not on {dl_device}")
        return _dlpack.capsule(
            self,
            self.block._address(self._offset),
            self.shape,
            self.dtype,
            _dlpack.CUDA,
            self._ordinal,
            max_version,
            self.read_only,
        )

    def __repr__(self) -> str:
        return f"<bfcd.DeviceArray {self.shape} {self.dtype} on cuda:{self._ordinal}>"


def on_block(block: Block, shape: tuple[int, ...], dtype: Any, ordinal: int | None) -> Any:
    """An array at the begin of a block, which has the bytes that it needs. ordinal: the GPU's; None: the host."""
    if ordinal is not None:
        return DeviceArray(block, shape, dtype, ordinal)
    return _on_host(import_numpy(), block, shape, dtype)


def _on_host(numpy: Any, block: Block, shape: tuple[int, ...], dtype: Any) -> Any:
    memory = _HostMemory.from_address(block._ptr.value)
    memory.block = block
    if block.read_only:
        # ndarray() keeps what is behind a view, so its flag "writeable" could be set. frombuffer() keeps the view.
        n_bytes = max(math.prod(shape) * dtype.itemsize, 1)
        memory = numpy.frombuffer(memoryview(memory).toreadonly(), numpy.uint8, n_bytes)
    return numpy.ndarray(shape, dtype, memory)


def empty(
    client: Client,
    shape: int | tuple[int, ...],
    dtype: Any,
    partition: str | None,
    tag: str | None,
    wait: float | None,
    whole: bool,
    pool: Pool | None = None,
) -> Any:
    numpy = sys.modules.get("numpy") or import_numpy()  # the import takes time also where it has nothing to do
    dtype = numpy.dtype(dtype)
    if dtype.hasobject:
        raise TypeError(f"memory of bfcd cannot hold Python objects, as {dtype} does")
    shape = _args.shape(shape)
    n_bytes = math.prod(shape) * dtype.itemsize or 1  # an array without bytes has an address all the same
    block = (
        client.malloc(n_bytes, partition=partition, tag=tag, wait=wait, whole=whole)
        if pool is None
        else pool.malloc(n_bytes, wait=wait)
    )
    name = partition or ""
    ordinal = client._ordinals.get(name, -2)
    if ordinal == -2:
        found = block.device_ordinal
        ordinal = client._ordinals[name] = -1 if found is None else found
    return _on_host(numpy, block, shape, dtype) if ordinal < 0 else DeviceArray(block, shape, dtype, ordinal)


# ---- sharing ----


def block_of(array: Any) -> Block:
    """The block that an array begins at and is alone on."""
    if isinstance(array, DeviceArray) and array._offset == 0:
        return array.block
    base = array
    while hasattr(base, "base") and base.base is not None:
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    if not isinstance(base, _HostMemory) or array.ctypes.data != base.block.ptr or not array.flags.c_contiguous:
        raise ValueError("only a whole array of Client.empty(whole=True), or a block, can be published")
    return base.block


def describe(array: Any) -> bytes:
    """What published() reads."""
    dtype: Any = array.dtype
    kind = dtype.str if dtype.names is None else [list(field) for field in dtype.descr]
    return json.dumps({"dtype": kind, "shape": list(array.shape)}).encode()


def published(block: Block) -> Any:
    numpy = import_numpy()

    try:
        d = json.loads(block.metadata)
        kind = d["dtype"] if isinstance(d["dtype"], str) else [tuple(field) for field in d["dtype"]]
        dtype, shape = numpy.dtype(kind), tuple(int(n) for n in d["shape"])
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f"the block's metadata does not describe an array: {e}") from None
    if dtype.hasobject or any(n < 0 for n in shape) or math.prod(shape) * dtype.itemsize > block.nbytes:
        raise ValueError("the block's metadata describes an array that is not inside of the block")
    return on_block(block, shape, dtype, block.device_ordinal)
