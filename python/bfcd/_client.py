"""Clients and blocks.

A session is ended by the last object that needs it: the client, or a block, or an array on a block. So a view never
outlives its memory.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import fcntl
import math
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from . import _arrays, _devices, _errors, _library, _pool
from ._library import lib

_MAX_WAIT_S = 600.0

_malloc = lib.bfc_malloc
_free = lib.bfc_free
_byref = ctypes.byref
_c_void_p = ctypes.c_void_p


def _bytes(text: str | os.PathLike[str] | None) -> bytes | None:
    return None if text is None else os.fsencode(text)


class _WakeUp:
    """A pipe that becomes readable when a signal arrives while it is the wake-up fd of Python's handlers."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        if self.read_fd == 0:  # stands for none in the library
            self.read_fd = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 3)
            os.close(0)
        self._pid = os.getpid()

    @classmethod
    @contextmanager
    def armed(cls) -> Iterator[int]:
        """Yields the fd, or 0 where signals are not handled here (another thread) or are watched by another user
        of the wake-up fd, as asyncio is."""
        if threading.current_thread() is not threading.main_thread():
            yield 0
            return
        global _wake_up
        if _wake_up is None or _wake_up._pid != os.getpid():
            _wake_up = cls()
        others = signal.set_wakeup_fd(_wake_up._write_fd, warn_on_full_buffer=False)
        try:
            if others != -1:
                signal.set_wakeup_fd(others)
            yield 0 if others != -1 else _wake_up.read_fd
        finally:
            if others == -1:
                signal.set_wakeup_fd(-1)
            try:
                while os.read(_wake_up.read_fd, 512):
                    pass
            except BlockingIOError:
                pass


_wake_up: _WakeUp | None = None


def _wait_ms(wait: float | None) -> int:
    if wait is None:
        return 0
    if not 0 <= wait:
        raise ValueError(f"wait is {wait} seconds, and must not be negative")
    return round(min(wait, _MAX_WAIT_S) * 1000)


def _keep_ms(keep: float) -> int:
    if not 0 <= keep:
        raise ValueError(f"keep is {keep} seconds, and must not be negative")
    return min(math.ceil(keep * 1000), _library.KEEP_FOREVER - 1) if math.isfinite(keep) else _library.KEEP_FOREVER


def _seconds(ms: int) -> float:
    return math.inf if ms == _library.KEEP_FOREVER else ms / 1000


class SharedBlock(NamedTuple):
    """A row of Client.shared()."""

    name: str
    partition: str
    nbytes: int
    num_references: int  #: processes that have it
    keep: float  #: seconds, as published; 0 after forget()
    left: float  #: how many seconds it stays when no process has it
    n_metadata_bytes: int


def _interruptible(call: Callable[[], int], options: _library.MallocOptions | _library.AttachOptions) -> int:
    """Repeats the call with what is left of options.wait_ms until it is not interrupted. Python's own signal handlers
    run between two calls, and end it by an exception, KeyboardInterrupt for instance."""
    end = time.monotonic() + options.wait_ms / 1000
    while options.wait_ms:
        with _WakeUp.armed() as options.cancel_fd:
            result = call()
        if result != -errno.EINTR:
            return result
        options.wait_ms = max(1, round((end - time.monotonic()) * 1000))
    return call()


#: Of the thread that calls a function of on_pressure().
_calling = threading.local()
#: Sessions with such a function.
_pressed: weakref.WeakSet[_Session] = weakref.WeakSet()


class _Session:
    """A connection. Ended when nothing refers to it any more, unless the interpreter is ending: the process's end
    returns the memory, and other threads may still use it.

    The garbage collector runs the __del__() of all objects of a cycle, in any order: a session can end before its
    blocks. It frees them, and its handle is None from then on, also for other __del__() in that cycle.
    """

    __slots__ = ("handle", "is_default", "pressure_fns", "__weakref__")

    def __init__(self, handle: ctypes.c_void_p, is_default: bool) -> None:
        self.handle: ctypes.c_void_p | None = handle
        self.is_default = is_default
        self.pressure_fns: list[Any] = []  # the last one is the library's; one that runs may be before it

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self.is_default or _is_finalizing():
            return
        handle, self.handle = self.handle, None
        if getattr(_calling, "is", False):  # the library's thread would wait for itself
            threading.Thread(target=_disconnect, args=(handle, self.pressure_fns), daemon=True).start()
        else:
            lib.bfc_disconnect(handle)


def _disconnect(handle: ctypes.c_void_p | None, _running: list[Any]) -> None:
    lib.bfc_disconnect(handle)


class Block:
    """Memory from bfcd: an address and a size. It is freed when nothing refers to it any more, or by free().

    On host partitions a block is a buffer: block.buffer(), numpy.asarray(block). On a GPU it has
    `__cuda_array_interface__`. Both are arrays of bytes; Client.empty() gives others.
    """

    __slots__ = ("_session", "ptr", "nbytes", "read_only", "_may_be_parked", "_free", "__weakref__")

    def __init__(self, session: _Session, nbytes: int, read_only: bool = False, may_be_parked: bool = False) -> None:
        self._session = session
        self._may_be_parked = may_be_parked
        self.ptr: int | None = None
        self.nbytes = nbytes
        self.read_only = read_only
        self._free = _free

    def __del__(self) -> None:
        # An attribute is missing where __init__() did not finish.
        ptr = getattr(self, "ptr", None)
        if ptr is not None and (handle := self._session.handle) is not None:
            self._free(handle, ptr)

    def free(self) -> None:
        """Frees the block now. Every view of it is invalid from then on; the caller sees to it that none is used."""
        # Taken first: after an exception of a signal handler nothing frees the address again.
        ptr, self.ptr = self.ptr, None
        if ptr is None:
            return
        result = self._free(self._session.handle, ptr)
        if result < 0:
            self.ptr = ptr
            raise _errors.error(result)

    def info(self) -> dict[str, Any]:
        """Where the block lies: partition, device, its UUID, and the extent."""
        i = self._info()
        return {
            "partition": i.partition.decode(),
            "device": i.device.decode(),
            "device_ordinal": None if i.device_ordinal < 0 else i.device_ordinal,
            "device_uuid": i.device_uuid.decode(),
            "block_id": i.block_id,
            "region_id": i.region_id,
            "offset": i.offset,
            "n_bytes": i.n_bytes,
            "n_requested": i.n_requested,
            "share": {_library.SHARE_FD: "fd", _library.SHARE_CUDA_IPC: "cuda-ipc"}.get(i.share, "unknown"),
            "extent_bytes": i.extent_bytes,
            "extent_offset": i.extent_offset,
        }

    def _info(self) -> _library.BlockInfo:
        if self.ptr is None:
            raise ValueError("the block has been freed")
        i = _library.BlockInfo()
        _errors.check(lib.bfc_block_info(self._session.handle, self.ptr, _byref(i)))
        return i

    @property
    def device_ordinal(self) -> int | None:
        """The GPU's number in this process; None on a host partition."""
        return self.info()["device_ordinal"]

    @property
    def is_parked(self) -> bool:
        """The block is parked now: by park() or Pool.sleep(), or because the daemon asked for it."""
        return self._may_be_parked and self._info().is_parked != 0

    def park(self, to: str | None = None) -> None:
        """Parks a block of malloc(parkable=True), or one that was published as such. Its contents go to a partition of host
        memory as with Pool.sleep(), which has the rules for its use. A shared block is parked when each process that has
        it has called this; until then its memory stays for the others. Busy: it is in use. An error if it is parked."""
        info = self._info()
        place = _pool.place_for_copies(Client(self._session), info.partition.decode(), to)
        _errors.check(lib.bfc_park(self._session.handle, self.ptr, _library.BACKUP, os.fsencode(place)))

    def wake(self, wait: float | None = None) -> None:
        """Brings the block back as Pool.wake() does. Each process wakes a shared block for itself."""
        handle, ptr = self._session.handle, self.ptr
        if ptr is None:
            raise ValueError("the block has been freed")
        _errors.check(_pool.interruptible(lambda ms: lib.bfc_wake(handle, ptr, ms), wait))

    def buffer(self) -> memoryview:
        """The bytes of a host block. The view keeps the block alive."""
        if self.device_ordinal is not None:
            raise BufferError("the block is on a GPU, whose memory the processor cannot address; copy it with read()")
        view = buffer_at(self, self._address(), self.nbytes)
        return view.toreadonly() if self.read_only else view

    @property
    def metadata(self) -> bytes:
        """Of a shared block, as its publisher gave it."""
        buffer, n = ctypes.create_string_buffer(_library.MAX_METADATA), ctypes.c_size_t()
        _errors.check(
            lib.bfc_shared_metadata(self._session.handle, self._address(), buffer, len(buffer), _byref(n))
        )
        return buffer.raw[: n.value]

    def array(self) -> Any:
        """The array that was published: of the same type and shape, on this block's memory."""
        return _arrays.published(self)

    def read(self, n_bytes: int | None = None, offset: int = 0) -> bytes:
        """A copy of bytes of the block, from whatever device it is on."""
        n = self.nbytes - offset if n_bytes is None else n_bytes
        ptr = self._address(offset, n)
        out = ctypes.create_string_buffer(n)
        _errors.check(lib.bfc_read(self._session.handle, out, ptr, n))
        return out.raw

    def write(self, data: Any, offset: int = 0) -> None:
        """Copies bytes into the block, on whatever device it is."""
        if self.read_only:
            raise ValueError("the block is read-only")
        view = memoryview(data).cast("B")
        ptr = self._address(offset, view.nbytes)
        array = ctypes.c_char * view.nbytes
        source = array.from_buffer_copy(view) if view.readonly else array.from_buffer(view)
        _errors.check(lib.bfc_write(self._session.handle, ptr, source, view.nbytes))

    def _address(self, offset: int = 0, n: int = 0) -> int:
        """The address of n bytes at an offset, which must be inside of the block."""
        if self.ptr is None:
            raise ValueError("the block has been freed")
        if offset < 0 or n < 0 or offset + n > self.nbytes:
            raise ValueError(f"bytes {offset} to {offset + n} are not inside of the block's {self.nbytes}")
        if self.is_parked:
            raise _errors.Parked(
                errno.EBUSY,
                "the block is parked, and its address has no memory: wake it or its pool, or work in `with pool.use()`",
            )
        return self.ptr + offset

    @property
    def __array_interface__(self) -> dict[str, Any]:
        if self.device_ordinal is not None:
            raise AttributeError("a block on a GPU has no __array_interface__")
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self._address(), self.read_only), "version": 3}

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.device_ordinal is None:
            raise AttributeError("a block on the host has no __cuda_array_interface__")
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self._address(), self.read_only),
            "version": 3,
            "strides": None,
        }

    def __repr__(self) -> str:
        return f"<bfcd.Block of {self.nbytes} bytes>" if self.ptr is not None else "<bfcd.Block, freed>"


def _free_unclaimed(block: Block, ptr: ctypes.c_void_p) -> None:
    """A signal handler's exception came after the library had allocated and before the block had the address."""
    if ptr.value is not None and block.ptr is None:
        _free(block._session.handle, ptr)


def buffer_at(owner: object, ptr: int, n_bytes: int) -> memoryview:
    """A writable view of n_bytes at ptr that keeps `owner` alive."""
    array = (ctypes.c_ubyte * n_bytes).from_address(ptr)
    array._owner = owner  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


class Client:
    """A client of bfcd, made by connect() or default(). Any thread may use it."""

    def __init__(self, session: _Session, socket: str | os.PathLike[str] | None = None) -> None:
        self._session: _Session | None = session
        self._socket = socket
        self._reader: Client | None = None
        self._reader_lock = threading.Lock()
        self._ordinals: dict[str, int] = {}  # by partition; -1: the host

    # ---- connection ----

    @property
    def _handle(self) -> ctypes.c_void_p | None:
        session = self._session
        if session is None:
            raise ValueError("the client is closed")
        return session.handle

    def close(self) -> None:
        """Frees idle memory and forgets the session; it ends with the last block that is still referred to."""
        self._session = self._reader = None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tenant(self) -> str:
        return lib.bfc_tenant(self._handle).decode()

    @property
    def partition(self) -> str:
        """The partition in which this client allocates unless told otherwise."""
        return lib.bfc_partition(self._handle).decode()

    def partition_for_device(self, ordinal: int) -> str:
        """The partition on the GPU that this process knows as CUDA device `ordinal`. NotFound: there is none."""
        name = ctypes.c_char_p()
        _errors.check(lib.bfc_partition_for_device(self._handle, ordinal, _byref(name)))
        assert name.value is not None
        return name.value.decode()

    def devices(self) -> _devices.Devices:
        """(logical, physical): the tenant's partitions, with limits and bytes in use, and the devices they are on."""
        return _devices.devices(self)

    def __repr__(self) -> str:
        if self._session is None:
            return "<bfcd.Client, closed>"
        return f"<bfcd.Client of tenant '{self.tenant}' in partition '{self.partition}'>"

    # ---- memory ----

    def malloc(
        self,
        n_bytes: int,
        *,
        partition: str | None = None,
        tag: str | None = None,
        wait: float | None = None,
        one_extent: bool = False,
        whole: bool = False,
        parkable: bool = False,
    ) -> Block:
        """A block of n_bytes. wait: how many seconds the request may wait for memory, 600 at most. parkable: it has
        whole extents and can be parked; pool() does that for many.

        QuotaExceeded, OutOfMemory: there is no memory; the message says why and which sessions have it.
        KeyboardInterrupt ends a wait.
        """
        session = self._session
        if session is None:
            raise ValueError("the client is closed")
        ptr = _c_void_p()
        block = Block(session, n_bytes, may_be_parked=parkable)
        flags = (
            (_library.ONE_EXTENT if one_extent else 0)
            | (_library.WHOLE if whole else 0)
            | (_library.PARKABLE if parkable else 0)
        )
        try:
            result = self._malloc(session, n_bytes, ptr, partition, tag, wait, flags)
            block.ptr = ptr.value
        except BaseException:
            _free_unclaimed(block, ptr)
            raise
        if result < 0:
            raise _errors.error(result)
        return block

    def _malloc(
        self,
        session: _Session,
        n_bytes: int,
        ptr: ctypes.c_void_p,
        partition: str | None,
        tag: str | None,
        wait: float | None,
        flags: int,
    ) -> int:
        if partition is None and tag is None and not wait and not flags and not _default_wait:
            return _malloc(session.handle, n_bytes, _byref(ptr))
        options = _library.MallocOptions(
            partition=_bytes(partition),
            tag=_bytes(tag),
            wait_ms=_wait_ms(_default_wait if wait is None else wait),
            flags=flags,
        )

        return _interruptible(
            lambda: lib.bfc_malloc_with(session.handle, n_bytes, _byref(options), _byref(ptr)), options
        )

    def empty(
        self,
        shape: int | tuple[int, ...],
        dtype: Any = "float32",
        *,
        partition: str | None = None,
        tag: str | None = None,
        wait: float | None = None,
        whole: bool = False,
    ) -> Any:
        """An array whose contents are not defined: a numpy.ndarray on a host partition, a bfcd.DeviceArray on a
        GPU. It keeps its memory until nothing refers to it. whole: it can be given to publish()."""
        return _arrays.empty(self, shape, dtype, partition, tag, wait, whole)

    # ---- memory that steps aside ----

    def pool(self, tag: str | None = None, *, partition: str | None = None) -> _pool.Pool:
        """Blocks and arrays that are parked and woken together: see Pool. tag: the label of its blocks, which bfcctl
        shows; by default one of its own."""
        return _pool.Pool(self, tag, partition)

    def on_pressure(self, fn: Callable[[str, int], object] | None) -> None:
        """Calls fn(partition, n_bytes) when the daemon needs memory of a partition for others: it may free blocks,
        put a Pool to sleep, or empty a framework's cache. None: no function.

        It runs on a thread of the library, one call at a time; an exception goes to sys.unraisablehook. A forked child
        has no function until it sets one. At the interpreter's end the function is removed, after a call that runs.
        """
        session = self._session
        if session is None:
            raise ValueError("the client is closed")
        call = _library.PressureFn() if fn is None else _pressure_fn(fn)
        session.pressure_fns.append(call)
        result = lib.bfc_on_pressure(session.handle, call, None)
        if result < 0:
            session.pressure_fns.pop()
            raise _errors.error(result)
        if not getattr(_calling, "is", False):
            del session.pressure_fns[:-1]  # none of them is running any more
        _pressed.add(session)

    # ---- sharing ----

    def publish(self, array: Any, name: str, *, keep: float = 0.0, metadata: bytes | None = None) -> None:
        """Gives a block (of malloc(whole=True)) or an array (of empty(whole=True)) a name by which other processes
        of the tenant attach it.

        keep: how many seconds the memory stays when no process has it any more; math.inf: until forget(). It is
        charged to the tenant all the time, and survives a restart of the daemon. metadata: at most 4,096 bytes;
        by default those from which Block.array() makes the array again. Exists: the name is taken.
        """
        block = array if isinstance(array, Block) else _arrays.block_of(array)
        if metadata is None:
            metadata = b"" if array is block else _arrays.describe(array)
        options = _library.PublishOptions(
            keep_ms=_keep_ms(keep), metadata=metadata or None, n_metadata_bytes=len(metadata)
        )
        _errors.check(lib.bfc_publish_with(self._handle, block._address(), _bytes(name), _byref(options)))

    def attach(self, name: str, *, read_only: bool = False, wait: float | None = None) -> Block:
        """The block of that name, which another process has published. It is woken if it is parked. NotFound, or
        Timeout after `wait` seconds.

        read_only: this client cannot write it: on the host a write is a SIGSEGV, on a GPU an illegal access. A client
        has each extent either read-only or not, so use one of its own for such blocks: otherwise EBUSY."""
        session = self._session
        if session is None:
            raise ValueError("the client is closed")
        ptr, n_bytes = _c_void_p(), ctypes.c_size_t()
        options = _library.AttachOptions(
            wait_ms=_wait_ms(wait), flags=_library.ATTACH_READ_ONLY if read_only else 0
        )

        def call() -> int:
            return lib.bfc_attach_with(
                session.handle, _bytes(name), _byref(options), _byref(ptr), _byref(n_bytes)
            )

        block = Block(session, 0, read_only, may_be_parked=True)
        try:
            result = _interruptible(call, options)
            block.nbytes = n_bytes.value
            block.ptr = ptr.value
        except BaseException:
            _free_unclaimed(block, ptr)
            raise
        if result < 0:
            raise _errors.error(result)
        return block

    def shared(self) -> list[SharedBlock]:
        """The tenant's shared blocks, kept ones and others."""
        rows: list[SharedBlock] = []

        @_library.SharedFn
        def add(_: Any, info: Any) -> int:
            i = info.contents
            rows.append(
                SharedBlock(
                    i.name.decode(),
                    i.partition.decode(),
                    i.n_bytes,
                    i.num_references,
                    _seconds(i.keep_ms),
                    _seconds(i.left_ms),
                    i.n_metadata_bytes,
                )
            )
            return 0

        _errors.check(lib.bfc_list_shared(self._handle, add, None))
        return rows

    def forget(self, name: str) -> None:
        """The block is kept no longer: it is freed now, or when the last process that has it drops it. NotFound."""
        _errors.check(lib.bfc_forget(self._handle, _bytes(name)))

    def _another(self, partition: str, cache: bool) -> Client:
        """A client of the same tenant at the same daemon."""
        return connect(self._socket, partition=partition, tenant=self.tenant, trace="", cache=cache)

    def _for_reading(self) -> Client:
        """The client that has this one's read-only blocks, and no others."""
        with self._reader_lock:
            if self._reader is None:
                self._reader = self._another(self.partition, cache=False)
            return self._reader

    def empty_cache(self, n_bytes: int | None = None) -> None:
        """Returns idle memory to the daemon, all of it or at least n_bytes."""
        _errors.check(lib.bfc_trim(self._handle, ctypes.c_size_t(-1).value if n_bytes is None else n_bytes))

    # ---- statistics ----

    def _stats(self, partition: str | None) -> _library.ClientStats:
        stats = _library.ClientStats()
        _errors.check(lib.bfc_stats_in(self._handle, _bytes(partition), _byref(stats)))
        return stats

    def _usage(self, partition: str | None) -> _library.TenantUsage:
        usage = _library.TenantUsage()
        _errors.check(lib.bfc_usage(self._handle, _bytes(partition), _byref(usage)))
        return usage

    def memory_stats(self, partition: str | None = None) -> dict[str, int]:
        """This client's statistics of a partition, by TensorFlow's names and by those of torch.cuda.memory_stats().
        `bytes_limit` and `largest_free_block_bytes` are the tenant's."""
        s, u = self._stats(partition), self._usage(partition)
        in_use, peak, reserved, peak_reserved = (
            s.bytes_in_use,
            s.peak_bytes_in_use,
            s.bytes_reserved,
            s.peak_bytes_reserved,
        )
        n_allocs, n_frees, requested = s.num_allocs, s.num_frees, s.bytes_requested
        return {
            "num_allocs": n_allocs,
            "num_frees": n_frees,
            "num_blocks": s.num_blocks,
            "num_failures": s.num_failures,
            "bytes_in_use": in_use,
            "peak_bytes_in_use": peak,
            "bytes_requested": requested,
            "largest_alloc_size": s.largest_alloc_size,
            "bytes_reserved": reserved,
            "peak_bytes_reserved": peak_reserved,
            "bytes_idle": s.bytes_idle,
            "bytes_limit": u.bytes_limit,
            "largest_free_block_bytes": u.largest_free_block_bytes,
            "allocation.all.allocated": n_allocs,
            "allocation.all.freed": n_frees,
            "allocation.all.current": n_allocs - n_frees,
            "allocated_bytes.all.current": in_use,
            "allocated_bytes.all.peak": peak,
            "requested_bytes.all.current": requested,
            "reserved_bytes.all.current": reserved,
            "reserved_bytes.all.peak": peak_reserved,
            "num_ooms": s.num_failures,
        }

    def tenant_stats(self, partition: str | None = None) -> dict[str, int]:
        """The tenant's statistics of a partition: all of its sessions together."""
        u = self._usage(partition)
        return {name: getattr(u, name) for name, _ in u._fields_[1:]}

    def bytes_in_use(self, partition: str | None = None) -> int:
        """Bytes of this client's blocks."""
        return self._stats(partition).bytes_in_use

    def max_bytes_in_use(self, partition: str | None = None) -> int:
        """The most that bytes_in_use() has been, since the start or since reset_peak()."""
        return self._stats(partition).peak_bytes_in_use

    def bytes_limit(self, partition: str | None = None) -> int:
        """The tenant's limit, which applies to whole extents of all its processes."""
        return self._usage(partition).bytes_limit

    def reset_peak(self) -> None:
        """The peaks of this client become the present values."""
        _errors.check(lib.bfc_reset_peaks(self._handle))

    def mem_get_info(self, partition: str | None = None) -> tuple[int, int]:
        """(free, total): what this client can still allocate, and the most that its tenant may have."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        _errors.check(lib.bfc_mem_get_info(self._handle, _bytes(partition), _byref(free), _byref(total)))
        return free.value, total.value


def connect(
    socket: str | os.PathLike[str] | None = None,
    *,
    partition: str | None = None,
    tenant: str | None = None,
    name: str | None = None,
    trace: str | os.PathLike[str] | None = None,
    cache: bool = True,
    inherit: bool = False,
) -> Client:
    """A new client. Each argument that is None has the value of BFC_SOCKET, BFC_PARTITION, BFC_TENANT or BFC_TRACE,
    and then the default.

    cache=False: every malloc and free asks the daemon. inherit=True: forked children may use the host blocks.
    """
    options = _library.Options(
        socket=_bytes(socket),
        partition=_bytes(partition),
        tenant=_bytes(tenant),
        name=_bytes(name),
        trace=_bytes(trace),
        flags=(0 if cache else _library.NO_CACHE) | (_library.INHERIT if inherit else 0),
    )
    handle = _c_void_p()
    _errors.check(lib.bfc_connect(_byref(options), _byref(handle)))
    return Client(_Session(handle, is_default=False), socket)


_default: tuple[int, Client] | None = None
_default_lock = threading.Lock()


def default() -> Client:
    """The client of this process, connected at the first call by the environment's BFC_ variables. A forked child
    gets one of its own."""
    global _default
    with _default_lock:
        if _default is None or _default[0] != os.getpid():
            handle = _c_void_p()
            _errors.check(lib.bfc_default(_byref(handle)))
            _default = (os.getpid(), Client(_Session(handle, is_default=True)))
        return _default[1]


def _pressure_fn(fn: Callable[[str, int], object]) -> Any:
    @_library.PressureFn
    def call(_: Any, pressure: Any) -> None:
        p = pressure.contents
        _calling.__dict__["is"] = True
        try:
            fn(p.partition.decode(), p.n_bytes)
        finally:
            _calling.__dict__["is"] = False

    return call


@atexit.register
def _release_pressure() -> None:
    """Before the interpreter ends: the library's thread must not call Python then."""
    for session in list(_pressed):
        if session.handle is not None:
            lib.bfc_on_pressure(session.handle, _library.PressureFn(), None)


def on_pressure(fn: Callable[[str, int], object] | None) -> None:
    """Client.on_pressure() of the default client, for instance
    `bfcd.on_pressure(lambda partition, n_bytes: torch.cuda.empty_cache())`."""
    default().on_pressure(fn)


def pool(tag: str | None = None, *, partition: str | None = None) -> _pool.Pool:
    """Client.pool() of the default client."""
    return default().pool(tag, partition=partition)


def devices() -> _devices.Devices:
    """Client.devices() of the default client."""
    return default().devices()


def trace(path: str | os.PathLike[str]) -> None:
    """Records the allocations of default() into a file for bfc-replay. Call it before default() is used first."""
    if _default is not None and _default[0] == os.getpid():
        raise RuntimeError("the default client is connected already; call bfcd.trace() before it is used first")
    os.environ["BFC_TRACE"] = os.fspath(path)


def _environment_wait() -> float:
    text = os.environ.get("BFC_WAIT_MS", "")
    if not text:
        return 0.0
    if not text.isdecimal():
        raise ImportError(f"BFC_WAIT_MS is '{text}', and must be a number of milliseconds")
    return int(text) / 1000


#: BFC_WAIT_MS, in seconds: how long a request waits that names no `wait`.
_default_wait = _environment_wait()


def _after_fork() -> None:
    global _default_lock
    _default_lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
