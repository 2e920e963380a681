"""PyTorch's GPU memory from bfcd.

    import bfcd.torch
    with bfcd.torch.pool():             # tensors made here are in bfcd's memory
        x = torch.zeros(1 << 20, device="cuda")

    pool = bfcd.torch.pool(parkable=True)
    with pool:
        model = Model().cuda()
    pool.sleep()                        # its memory is others'
    with pool.use(wait=60):             # it is back, at the same addresses
        model(x)

    bfcd.torch.install()                # before the first GPU tensor: all of them

A pool keeps PyTorch's cache, statistics, OutOfMemoryError and graphs, and is for the thread that enters it. install() replaces the allocator of the process:
PyTorch then caches nothing, has no statistics, and out of memory is a RuntimeError with the daemon's sentence.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import os
import pathlib
import shlex
import shutil
import subprocess
import weakref
from typing import Any

import torch

from . import _args, _client, _errors, _library, _pool, _torch_pools
from ._library import lib

_MIN_TORCH = (2, 8)
_SHIM = pathlib.Path(__file__).with_name("_torch_shim.cpp")


class CompilerError(RuntimeError):
    """install() needs a C++ compiler, and there is none, or it fails."""


def _check_version() -> None:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < _MIN_TORCH:
        raise RuntimeError(f"bfcd.torch needs PyTorch 2.8 or newer, and this is {torch.__version__}")


class _DlInfo(ctypes.Structure):
    _fields_ = [
        ("dli_fname", ctypes.c_char_p),
        ("dli_fbase", ctypes.c_void_p),
        ("dli_sname", ctypes.c_char_p),
        ("dli_saddr", ctypes.c_void_p),
    ]


def _path_of_library() -> str:
    """The file of the libbfcclient that is loaded."""
    info = _DlInfo()
    if not ctypes.CDLL(None).dladdr(ctypes.cast(lib.bfc_version, ctypes.c_void_p), ctypes.byref(info)):
        raise RuntimeError("the loaded libbfcclient cannot be found")
    return os.path.realpath(os.fsdecode(info.dli_fname))


def _address(library: ctypes.CDLL, name: str) -> int:
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert address is not None
    return address


def _no_cache_below() -> None:
    """Before the default client connects: PyTorch caches, so a cache below it would hold the same memory idle."""
    if _client._default is None:
        os.environ.setdefault("BFC_CACHE", "off")


@functools.cache
def _allocator(one_extent: bool) -> Any:
    """The allocator of all pools that are not parkable."""
    allocator = torch.cuda.memory.CUDAPluggableAllocator(
        _path_of_library(),
        "bfc_torch_pool_malloc_one_extent" if one_extent else "bfc_torch_pool_malloc",
        "bfc_torch_pool_free",
    )
    return _keep(allocator)


def _keep(allocator: Any) -> Any:
    """A MemPool refers to its allocator until it is gone, at the interpreter's end too, without keeping it alive; so
    it lives as long as the process."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(allocator))
    functions = allocator.allocator()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(functions))
    return functions


@functools.cache
def _parkable_allocator(slot: int) -> Any:
    """The allocator of the parkable pool with this number. It is one of PyTorch's from addresses instead of names."""
    allocator = torch.cuda.memory.CUDAPluggableAllocator.__new__(torch.cuda.memory.CUDAPluggableAllocator)
    allocator._allocator = torch._C._cuda_customAllocator(
        lib.bfc_torch_pool_malloc_parkable(slot, b""), _address(lib, "bfc_torch_pool_free")
    )
    return _keep(allocator)


@functools.cache
def _refuse_to_share() -> None:
    """Where torch.multiprocessing cannot send a tensor, since its memory is bfcd's, the error says so."""
    share = torch.UntypedStorage._share_cuda_

    def _share_cuda_(storage: Any, *arguments: Any, **words: Any) -> Any:
        try:
            return share(storage, *arguments, **words)
        except RuntimeError as e:
            if not (_is_installed or _torch_pools.has(storage.data_ptr())):
                raise
            raise RuntimeError(
                "torch.multiprocessing cannot send a tensor on a GPU whose memory is bfcd's, because it has no handle of CUDA "
                "IPC: send tensor.cpu(), or share the memory by bfcd.Client.publish() and attach()"
            ) from e

    torch.UntypedStorage._share_cuda_ = _share_cuda_


_is_installed = False
#: Numbers of parkable pools that are not in use.
_slots = list(range(_library.TORCH_PARKABLE_POOLS))


class Pool(_args.Unique):
    """A memory pool of PyTorch over bfcd, and a context manager: tensors that the thread makes inside of `with`, on its
    current GPU, are in it. So is what backward() allocates there: inside of `with` the backward pass runs in the calling
    thread (torch.autograd.set_multithreading_enabled(False)). Threads that are started inside of `with` are not in it.

    Any number of threads may be inside of a pool, and pools can be nested: the innermost one gets the tensors.

    `mem_pool` is a torch.cuda.MemPool of this pool for graphs, for torch.cuda.graph(pool=p.mem_pool.id) for instance. Its
    memory stays until its graphs and the pool are gone. Do not capture inside of `with`: PyTorch refuses it. With one_extent
    it is also what NCCL registers (register_mem_pool()): after it was asked for, all tensors of the pool are in it, and one
    thread at a time may be inside of `with`.

    Inside of `with` PyTorch takes back no tensor that another stream uses (record_stream): it does so at an allocation
    outside of it, and in torch.cuda.empty_cache().
    """

    _INSTEAD = "its memory has one owner"

    def __init__(self, one_extent: bool = False, _functions: Any = None) -> None:
        _check_version()
        _no_cache_below()
        _refuse_to_share()
        self._parts = _torch_pools.Parts(_functions or _allocator(one_extent))
        self._one_extent = one_extent

    @property
    def mem_pool(self) -> Any:
        self._parts.is_fixed |= self._one_extent
        return self._parts.of_graphs

    def __enter__(self) -> Pool:
        _torch_pools.enter(self._parts)
        return self

    def __exit__(self, *exception: Any) -> None:
        _torch_pools.leave(self._parts)


class ParkablePool(Pool, _pool.Sleeper):
    """A Pool whose memory steps aside as a whole: sleep(), wake() and use() of bfcd.Pool. Tensors keep their addresses
    and contents, and graphs stay valid. Nothing may use them while they are parked: a kernel that does so is an
    illegal access. `with pool:` is also a use(): PyTorch places new tensors in free parts of memory that was parked. Capture a
    graph into it inside of use() and not of `with pool:`.
    """

    def __init__(self, tag: str | None) -> None:
        if not _slots:
            raise RuntimeError(f"there can be {_library.TORCH_PARKABLE_POOLS} parkable pools at a time")
        _no_cache_below()
        _pool.Sleeper.__init__(self, _client.default(), _pool.new_tag("torch") if tag is None else tag)
        slot = _slots[0]
        if not lib.bfc_torch_pool_malloc_parkable(slot, self.tag.encode()):
            raise _errors.error(-errno.EINVAL)
        Pool.__init__(self, _functions=_parkable_allocator(slot))
        # The allocator's address is the pool's; the tag was lost if it was made just now.
        lib.bfc_torch_pool_malloc_parkable(slot, self.tag.encode())
        _slots.pop(0)
        weakref.finalize(self, _slots.append, slot)

    def __enter__(self) -> ParkablePool:
        use = self.use()
        use.__enter__()
        try:
            _torch_pools.enter(self._parts).use = use
        except BaseException:
            use.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *exception: Any) -> None:
        _torch_pools.leave(self._parts).use.__exit__(None, None, None)

    def n_bytes(self) -> int:
        """The size of its blocks, parked or not: PyTorch's segments."""
        return self._parts.n_bytes()

    def _partition(self) -> str:
        return self._client.partition_for_device(torch.cuda.current_device())

    def sleep(self, to: str | None = None, *, discard: bool = False) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise _errors.Busy(errno.EBUSY, "a stream is being captured into a graph: let the pool sleep after it")
        if self._parts.n_inside > 0:
            raise _errors.Busy(errno.EBUSY, "the pool is in use: a thread is inside of its `with`")
        torch.cuda.synchronize()
        super().sleep(to, discard=discard)

    sleep.__doc__ = _pool.Sleeper.sleep.__doc__


def pool(*, one_extent: bool = False, parkable: bool = False, tag: str | None = None) -> Pool:
    """A pool of its own. Freed tensors stay in PyTorch's cache for the pool until torch.cuda.empty_cache(), which
    returns what is free at any time, inside and outside of `with`.

    parkable: a ParkablePool, whose memory steps aside by sleep(). tag: of its blocks, for bfcctl; by default one of its
    own. Each of PyTorch's segments (2 MiB, 20 MiB or more) is a block. Not together with one_extent.

    one_extent: each of PyTorch's segments lies in one extent, as buffers must that are registered with NCCL. In a partition with "share: fd" a
    large one is made for the segment and returned to the GPU with it.

    An allocation waits for BFC_WAIT_MS milliseconds when memory is short.
    """
    if not parkable:
        if tag is not None:
            raise ValueError("only a parkable pool has a tag")
        return Pool(one_extent)
    if one_extent:
        raise ValueError("a pool is either parkable or of one extent for each segment")
    return ParkablePool(tag)


def _shim() -> pathlib.Path:
    """The compiled shim for this library, from the user's cache folder or made now."""
    library, source = _path_of_library(), _SHIM.read_bytes()
    key = hashlib.sha256(source + library.encode()).hexdigest()[:16]
    folder = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "bfcd"
    path = folder / f"torch-{key}.so"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for each in (folder, path):
        if each.exists() and (each.stat().st_uid != os.geteuid() or each.stat().st_mode & 0o022):
            raise CompilerError(
                f"{each} belongs to another user, or others can write to it, so its code is not loaded: remove it, set "
                "XDG_CACHE_HOME to a folder of yours, or use bfcd.torch.pool()"
            )
    if path.exists():
        return path
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if shutil.which(compiler[0]) is None:
        raise CompilerError(
            f"bfcd.torch.install() needs a C++ compiler, and '{compiler[0]}' is not there: install g++ or set CXX, or "
            "use bfcd.torch.pool(), which needs none"
        )
    made = folder / f"{path.name}.{os.getpid()}"
    command = [*compiler, "-std=c++17", "-O2", "-fPIC", "-shared", "-o", str(made), str(_SHIM), library]
    command.append(f"-Wl,-rpath,{os.path.dirname(library)}")
    r = subprocess.run(command, capture_output=True, text=True)
    if r.returncode != 0:
        raise CompilerError(
            f"bfcd.torch.install(): '{shlex.join(command)}' failed; bfcd.torch.pool() needs no compiler:\n{r.stderr}"
        )
    os.replace(made, path)
    return path


def install(*, one_extent: bool = False) -> None:
    """Makes bfcd the allocator of the whole process. Call it before the first tensor on a GPU: PyTorch refuses it
    later with a RuntimeError.

    An allocation waits for BFC_WAIT_MS milliseconds when memory is short. one_extent: each tensor lies in one
    extent, as buffers must that are registered with NCCL.

    Memory is allocated and freed in the order of streams; Tensor.record_stream() works as ever. torch.cuda.empty_cache()
    returns idle memory to the daemon. CompilerError: there is no C++ compiler, which a small shim needs.
    """
    global _is_installed
    _check_version()
    path = _shim()
    shim = ctypes.CDLL(str(path))
    allocator = torch.cuda.memory.CUDAPluggableAllocator(
        str(path), "bfcd_torch_malloc_one_extent" if one_extent else "bfcd_torch_malloc", "bfc_torch_free"
    )
    functions = allocator.allocator()
    functions.set_record_stream_fn(_address(lib, "bfc_torch_record_stream"))
    functions.set_reset_fn(_address(shim, "bfcd_torch_reset"))
    torch.cuda.memory.change_current_allocator(allocator)
    _is_installed = True
    _refuse_to_share()
