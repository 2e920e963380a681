"""libbfcclient by ctypes: its functions and structs, as include/bfcclient.h declares them.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, c_char, c_char_p, c_int, c_int64, c_size_t, c_ubyte, c_uint, c_uint32, c_uint64, c_void_p

from . import _native

SONAME = "libbfcclient.so.0"
#: The first version of the library that has all functions below.
MIN_VERSION = (0, 1, 0)

NO_THREAD, NO_CACHE, POLL, INHERIT = 1, 2, 4, 8
ONE_EXTENT, WHOLE, PARKABLE = 1, 2, 4
BACKUP, DISCARD = 1, 2
TORCH_PARKABLE_POOLS = 32
SHARE_FD, SHARE_CUDA_IPC = 1, 2
ATTACH_READ_ONLY = 1
KEEP_FOREVER = (1 << 64) - 1
MAX_METADATA = 4096


class _Struct(ctypes.Structure):
    """A struct whose first field is its own size, so that a newer library can tell an older caller."""

    def __init__(self, **fields: object) -> None:
        super().__init__(ctypes.sizeof(type(self)), **fields)


class Options(_Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("socket", c_char_p),
        ("partition", c_char_p),
        ("tenant", c_char_p),
        ("name", c_char_p),
        ("flags", c_uint64),
        ("trace", c_char_p),
        ("cache_idle_bytes", c_uint64),
        ("cache_slab_bytes", c_uint64),
        ("return_ms", c_uint32),
        ("unused", c_uint32),
    ]


class MallocOptions(_Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("partition", c_char_p),
        ("flags", c_uint64),
        ("wait_ms", c_uint32),
        ("tag", c_char_p),
        ("cancel_fd", c_int),
    ]


class AttachOptions(_Struct):
    _fields_ = [("struct_size", c_size_t), ("wait_ms", c_uint32), ("cancel_fd", c_int), ("flags", c_uint64)]


class PublishOptions(_Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("keep_ms", c_uint64),
        ("metadata", c_char_p),
        ("n_metadata_bytes", c_size_t),
    ]


class SharedInfo(_Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("name", c_char_p),
        ("partition", c_char_p),
        ("n_bytes", c_uint64),
        ("num_references", c_uint64),
        ("keep_ms", c_uint64),
        ("left_ms", c_uint64),
        ("n_metadata_bytes", c_uint64),
    ]


SharedFn = ctypes.CFUNCTYPE(c_int, c_void_p, POINTER(SharedInfo))


def _u64(*names: str) -> list[tuple[str, type]]:
    return [("struct_size", c_size_t), *((name, c_uint64) for name in names)]


class ClientStats(_Struct):
    _fields_ = _u64(
        "num_allocs",
        "num_frees",
        "num_blocks",
        "num_failures",
        "bytes_in_use",
        "peak_bytes_in_use",
        "bytes_requested",
        "largest_alloc_size",
        "bytes_mapped",
        "bytes_reserved",
        "peak_bytes_reserved",
        "bytes_idle",
        "num_calls",
        "num_returns",
        "bytes_direct",
    )


class TenantUsage(_Struct):
    _fields_ = _u64(
        "bytes_limit",
        "bytes_reserved",
        "peak_bytes_reserved",
        "bytes_in_use",
        "peak_bytes_in_use",
        "bytes_requested",
        "num_blocks",
        "num_sessions",
        "largest_free_block_bytes",
        "lifetime_peak_bytes_in_use",
        "lifetime_peak_bytes_reserved",
        "bytes_direct",
    )


class BlockInfo(_Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("block_id", c_uint64),
        ("region_id", c_uint64),
        ("offset", c_uint64),
        ("n_bytes", c_uint64),
        ("n_requested", c_uint64),
        ("share", c_uint64),
        ("extent_bytes", c_uint64),
        ("extent_offset", c_uint64),
        ("handle", c_ubyte * 64),
        ("block_offset", c_uint64),
        ("base", c_void_p),
        ("partition", c_char_p),
        ("device", c_char_p),
        ("device_ordinal", c_int64),
        ("device_uuid", c_char * 48),
        ("is_parked", c_uint64),
        ("ptr_extent_bytes", c_uint64),
        ("ptr_extent_offset", c_uint64),
    ]


class PartitionInfo(_Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("partition", c_char_p),
        ("device", c_char_p),
        ("device_ordinal", c_int64),
        ("share", c_uint64),
        ("device_uuid", c_char * 48),
        ("is_pinned", c_uint64),
        ("bytes_pinned", c_uint64),
        ("context_bytes", c_uint64),
    ]


class Pressure(_Struct):
    _fields_ = [("struct_size", c_size_t), ("partition", c_char_p), ("n_bytes", c_uint64)]


PressureFn = ctypes.CFUNCTYPE(None, c_void_p, POINTER(Pressure))

_CLIENT = c_void_p
_PTR = POINTER(c_void_p)
_SIZE = POINTER(c_size_t)
# name: (result, arguments)
_FUNCTIONS: dict[str, tuple[type | None, list[object]]] = {
    "bfc_connect": (c_int, [POINTER(Options), POINTER(_CLIENT)]),
    "bfc_disconnect": (None, [_CLIENT]),
    "bfc_default_with": (c_int, [POINTER(Options), POINTER(_CLIENT)]),
    "bfc_poll": (c_int, [_CLIENT]),
    "bfc_poll_fd": (c_int, [_CLIENT]),
    "bfc_malloc": (c_int, [_CLIENT, c_size_t, _PTR]),
    "bfc_malloc_with": (c_int, [_CLIENT, c_size_t, POINTER(MallocOptions), _PTR]),
    "bfc_free": (c_int, [_CLIENT, c_void_p]),
    "bfc_park": (c_int, [_CLIENT, c_void_p, c_uint, c_char_p]),
    "bfc_wake": (c_int, [_CLIENT, c_void_p, c_uint32]),
    "bfc_park_tag": (c_int, [_CLIENT, c_char_p, c_uint, c_char_p]),
    "bfc_wake_tag": (c_int, [_CLIENT, c_char_p, c_uint32]),
    "bfc_use_begin_tag": (c_int, [_CLIENT, c_char_p, c_uint32]),
    "bfc_use_end_tag": (c_int, [_CLIENT, c_char_p]),
    "bfc_on_pressure": (c_int, [_CLIENT, PressureFn, c_void_p]),
    "bfc_malloc_async_in": (c_int, [_CLIENT, c_char_p, c_size_t, c_void_p, _PTR]),
    "bfc_free_async": (c_int, [_CLIENT, c_void_p, c_void_p]),
    "bfc_record_stream": (c_int, [_CLIENT, c_void_p, c_void_p]),
    "bfc_end_stream": (c_int, [_CLIENT, c_void_p]),
    "bfc_read": (c_int, [_CLIENT, c_void_p, c_void_p, c_size_t]),
    "bfc_write": (c_int, [_CLIENT, c_void_p, c_void_p, c_size_t]),
    "bfc_publish_with": (c_int, [_CLIENT, c_void_p, c_char_p, POINTER(PublishOptions)]),
    "bfc_shared_metadata": (c_int, [_CLIENT, c_void_p, c_void_p, c_size_t, _SIZE]),
    "bfc_list_shared": (c_int, [_CLIENT, SharedFn, c_void_p]),
    "bfc_forget": (c_int, [_CLIENT, c_char_p]),
    "bfc_attach_with": (c_int, [_CLIENT, c_char_p, POINTER(AttachOptions), _PTR, _SIZE]),
    "bfc_detach": (c_int, [_CLIENT, c_void_p]),
    "bfc_stats": (c_int, [_CLIENT, POINTER(ClientStats)]),
    "bfc_stats_in": (c_int, [_CLIENT, c_char_p, POINTER(ClientStats)]),
    "bfc_reset_peaks": (c_int, [_CLIENT]),
    "bfc_usage": (c_int, [_CLIENT, c_char_p, POINTER(TenantUsage)]),
    "bfc_mem_get_info": (c_int, [_CLIENT, c_char_p, _SIZE, _SIZE]),
    "bfc_charge": (c_int, [_CLIENT, c_char_p, c_size_t, c_uint32]),
    "bfc_uncharge": (c_int, [_CLIENT, c_char_p, c_size_t]),
    "bfc_trim": (c_int, [_CLIENT, c_size_t]),
    "bfc_block_info": (c_int, [_CLIENT, c_void_p, POINTER(BlockInfo)]),
    "bfc_tenant": (c_char_p, [_CLIENT]),
    "bfc_partition": (c_char_p, [_CLIENT]),
    "bfc_partition_info": (c_int, [_CLIENT, c_size_t, POINTER(PartitionInfo)]),
    "bfc_partition_for_device": (c_int, [_CLIENT, c_int, POINTER(c_char_p)]),
    "bfc_torch_pool_free_begin": (None, []),
    "bfc_torch_pool_free_end": (None, []),
    "bfc_torch_pool_malloc_parkable": (c_void_p, [c_uint, c_char_p]),
    "bfc_torch_record_stream": (None, [c_void_p, c_void_p]),
    "bfc_last_error": (c_char_p, []),
    "bfc_version": (c_char_p, []),
}


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:3])


def _find() -> str:
    """The library that the process has already, as that of the proxy, because two have a session each. Else the wheel's."""
    try:
        ctypes.CDLL(SONAME, mode=os.RTLD_NOLOAD)
    except OSError:
        native = _native.folder()
        return SONAME if native is None else str(native / "lib" / SONAME)
    return SONAME


def _load() -> ctypes.CDLL:
    path = os.environ.get("BFC_LIBRARY") or _find()
    try:
        library = ctypes.CDLL(path)
    except OSError as e:
        raise ImportError(
            f"bfcd needs {SONAME}, which cannot be loaded: {e}. Install the package libbfcclient0, run ldconfig, "
            "set BFC_LIBRARY to the path of the library, or install a wheel of bfcd for this platform, which has it."
        ) from None
    try:
        library.bfc_version.restype = c_char_p
        version = library.bfc_version().decode()
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except AttributeError as e:
        raise ImportError(f"{path} is too old for this package: {e}") from None
    if _version(version) < MIN_VERSION:
        needed = ".".join(map(str, MIN_VERSION))
        raise ImportError(f"{path} has version {version}, and this package needs {needed} or newer")
    return library


lib = _load()


def last_error() -> str:
    """The library's sentence for the last failure in this thread."""
    return lib.bfc_last_error().decode(errors="replace")
