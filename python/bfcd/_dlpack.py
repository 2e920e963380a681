"""DLPack capsules of our own memory, by ctypes: DLManagedTensorVersioned (1.0), and the unversioned one for older
consumers. The structs are those of dlpack.h, version 1.0.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from typing import Any

CPU, CUDA = 1, 2
READ_ONLY = 1
_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}


class _Device(Structure):
    _fields_ = [("device_type", c_int32), ("device_id", c_int32)]


class _DataType(Structure):
    _fields_ = [("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16)]


class _Tensor(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device", _Device),
        ("ndim", c_int32),
        ("dtype", _DataType),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


_Deleter = CFUNCTYPE(None, c_void_p)


class _Managed(Structure):
    _fields_ = [("dl_tensor", _Tensor), ("manager_ctx", c_void_p), ("deleter", _Deleter)]


class _Version(Structure):
    _fields_ = [("major", c_uint32), ("minor", c_uint32)]


class _ManagedVersioned(Structure):
    _fields_ = [
        ("version", _Version),
        ("manager_ctx", c_void_p),
        ("deleter", _Deleter),
        ("flags", c_uint64),
        ("dl_tensor", _Tensor),
    ]


#: Structs that a consumer has, by address, with what they keep alive. A deleter removes its entry.
_exported: dict[int, tuple[object, ...]] = {}


@_Deleter
def _delete(address: int) -> None:
    _exported.pop(address, None)


_PyCapsule_Destructor = CFUNCTYPE(None, c_void_p)
_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, [c_void_p, c_char_p, _PyCapsule_Destructor]
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, [c_void_p, c_char_p]
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = c_void_p, [c_void_p, c_char_p]


@_PyCapsule_Destructor
def _destroy(capsule: int) -> None:
    # A consumer that took the tensor has renamed the capsule.
    for name in (b"dltensor", b"dltensor_versioned"):
        if _is_valid(capsule, name):
            _delete(_pointer(capsule, name))


def capsule(
    owner: object,
    ptr: int | None,
    shape: tuple[int, ...],
    dtype: Any,
    device_type: int,
    device_id: int,
    max_version: tuple[int, int] | None,
    read_only: bool = False,
) -> Any:
    """A capsule of a C-contiguous array that keeps `owner` alive until the consumer is done."""
    if dtype.kind not in _CODES or dtype.byteorder == ">":
        raise BufferError(f"DLPack cannot express the type {dtype}")
    is_versioned = max_version is not None and max_version[0] >= 1
    if read_only and not is_versioned:
        raise BufferError("the memory is read-only, which only DLPack 1.0 can express")
    dims = (c_int64 * max(len(shape), 1))(*shape)
    managed = _ManagedVersioned() if is_versioned else _Managed()
    if is_versioned:
        managed.version.major, managed.version.minor = 1, 0
        managed.flags = READ_ONLY if read_only else 0
    managed.deleter = _delete
    t = managed.dl_tensor
    t.data = ptr
    t.device.device_type, t.device.device_id = device_type, device_id
    t.ndim = len(shape)
    t.dtype.code, t.dtype.bits, t.dtype.lanes = _CODES[dtype.kind], dtype.itemsize * 8, 1
    t.shape = ctypes.cast(dims, POINTER(c_int64))
    address = ctypes.addressof(managed)
    _exported[address] = (managed, dims, owner)
    return _new(address, b"dltensor_versioned" if is_versioned else b"dltensor", _destroy)
