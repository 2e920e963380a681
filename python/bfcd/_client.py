"""Clients and blocks.

A session is ended by the last object that needs it: the client, or a block, or an array on a block. So a view never
outlives its memory.

Destructors run no bytecode. Python runs its signal handlers between bytecodes, also those of a __del__(), and an
exception from there is printed and lost: Ctrl-C, for instance. So __del__ is a property whose value, made with the object,
is a C function with its arguments. Callbacks of weak references are C functions, too.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import math
import operator
import os
import sys
import weakref
from _thread import allocate_lock
from functools import partial
from itertools import count

from . import _args, _errors, _library
from ._library import lib

TYPE_CHECKING = False  # typing and other modules that few programs need take longer to import than the package
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ._devices import Devices
    from ._pool import Pool
    from ._shared import SharedBlock

_MAX_WAIT_S = 600.0

_byref = ctypes.byref
_c_void_p = ctypes.c_void_p
_c_size_t = ctypes.c_size_t
# Without argument types, which cost time: they are called with objects of ctypes only.
_malloc = lib["bfc_malloc"]
_free = lib["bfc_free"]


def _interruptible(call: Callable[[], int], options: _library.MallocOptions | _library.AttachOptions) -> int:
    if not options.wait_ms:
        return call()
    from . import _interrupt

    return _interrupt.interruptible(call, options)


def _wait_ms(wait: float | None) -> int:
    return 0 if wait is None else round(min(_args.seconds(wait, "wait"), _MAX_WAIT_S) * 1000)


def _keep_ms(keep: float) -> int:
    ms = _args.seconds(keep, "keep") * 1000
    return min(math.ceil(ms), _library.KEEP_FOREVER - 1) if math.isfinite(ms) else _library.KEEP_FOREVER


#: Sessions with a function of on_pressure(), by the number that the library calls with.
_pressed: dict[int, weakref.ref[_Session]] = {}
_pressed_numbers = count(1)
_call = operator.methodcaller("__call__")
_empty: Any = None


class _Session(_args.Unique):
    """A connection. Ended when nothing refers to it any more, unless the interpreter is ending: the process's end
    returns the memory, and other threads may still use it.

    The garbage collector runs the __del__() of all objects of a cycle, in any order: a session can end before its
    blocks. It frees them, and its handle is NULL from then on, which the library refuses.
    """

    __slots__ = ("handle", "inherits", "pool_tags", "pressure_fn", "pressure_number", "_release", "__weakref__")
    __del__ = property(operator.attrgetter("_release"))

    def __init__(self, inherits: bool, is_default: bool = False) -> None:
        self.handle = _c_void_p()  # set by the caller
        self.inherits = inherits
        self.pool_tags: dict[str, Any] = {}  # of open pools
        self.pressure_fn: Callable[[str, int], object] | None = None
        self.pressure_number = 0
        if not is_default:
            calls = partial(lib.bfc_disconnect, self.handle), partial(setattr, self.handle, "value", None)
            self._release = partial(any, map(_call, calls))  # both return None


class Block(_args.Unique):
    """Memory from bfcd: an address and a size. It is freed when nothing refers to it any more, or by free().

    On host partitions a block is a buffer: block.buffer(), numpy.asarray(block). On a GPU it has
    `__cuda_array_interface__`. Both are arrays of bytes; Client.empty() gives others.
    """

    __slots__ = ("_session", "_ptr", "nbytes", "read_only", "_may_be_parked", "_release", "__weakref__")
    __del__ = property(operator.attrgetter("_release"))
    _release: Callable[[], object]
    _INSTEAD = "copy its bytes with read(), or publish() it and attach() it in the other process"

    def __init__(self, session: _Session, nbytes: int, read_only: bool = False, may_be_parked: bool = False) -> None:
        if type(session) is not _Session:
            raise TypeError("a block is made by Client.malloc() or Client.attach()")
        self._session = session
        self._may_be_parked = may_be_parked
        self._ptr = _c_void_p()  # the library sets it: from then on the destructor frees the block
        self.nbytes = nbytes
        self.read_only = read_only
        self._release = partial(_free, session.handle, self._ptr)

    @property
    def ptr(self) -> int | None:
        """The address; None: it has been freed."""
        return self._ptr.value

    def free(self) -> None:
        """Frees the block now. Every view of it is invalid from then on; the caller sees to it that none is used."""
        ptr = self._ptr
        address = ptr.value
        if address is None:
            return
        # Taken first: after an exception of a signal handler nothing frees the address again.
        ptr.value = None
        result = _free(self._session.handle, _c_void_p(address))
        if result < 0:
            ptr.value = address
            raise _errors.error(result)
        self._release = bool  # nothing is left to do

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
        from . import _pool

        info = self._info()
        place = _pool.place_for_copies(Client(self._session), info.partition.decode(), to)
        _errors.check(lib.bfc_park(self._session.handle, self.ptr, _library.BACKUP, place))

    def wake(self, wait: float | None = None) -> None:
        """Brings the block back as Pool.wake() does. Each process wakes a shared block for itself."""
        from . import _pool

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
        _errors.check(lib.bfc_shared_metadata(self._session.handle, self._address(), buffer, len(buffer), _byref(n)))
        return buffer.raw[: n.value]

    def array(self) -> Any:
        """The array that was published: of the same type and shape, on this block's memory."""
        from . import _arrays

        return _arrays.published(self)

    def read(self, n_bytes: int | None = None, offset: int = 0) -> bytes:
        """A copy of bytes of the block, from whatever device it is on."""
        offset = _args.integer(offset, "offset")
        n = self.nbytes - offset if n_bytes is None else _args.integer(n_bytes, "n_bytes")
        ptr = self._address(offset, n)
        out = ctypes.create_string_buffer(n)
        _errors.check(lib.bfc_read(self._session.handle, out, ptr, n))
        return out.raw

    def write(self, data: Any, offset: int = 0) -> None:
        """Copies bytes into the block, on whatever device it is."""
        view = _args.data(data, "data")
        if self.read_only:
            raise ValueError("the block is read-only")
        ptr = self._address(_args.integer(offset, "offset"), view.nbytes)
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


def buffer_at(owner: object, ptr: int, n_bytes: int) -> memoryview:
    """A writable view of n_bytes at ptr that keeps `owner` alive."""
    array = (ctypes.c_ubyte * n_bytes).from_address(ptr)
    array._owner = owner  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


class Client(_args.Unique):
    """A client of bfcd, made by connect() or default(). Any thread may use it."""

    _INSTEAD = "another process, or another part of this one, calls bfcd.default() or bfcd.connect()"

    def __init__(self, session: _Session, socket: str | None = None) -> None:
        if type(session) is not _Session:
            raise TypeError("a client is made by bfcd.connect() or bfcd.default()")
        self._session: _Session | None = session
        self._socket = socket
        self._reader: Client | None = None
        self._reader_lock = allocate_lock()
        self._ordinals: dict[str, int] = {}  # by partition; -1: the host

    # ---- connection ----

    @property
    def _open(self) -> _Session:
        session = self._session
        if session is None:
            raise ValueError("the client is closed")
        return session

    @property
    def _handle(self) -> ctypes.c_void_p:
        return self._open.handle

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
        n = _args.size(ordinal, "ordinal", most=(1 << 31) - 1)
        _errors.check(lib.bfc_partition_for_device(self._handle, n, _byref(name)))
        assert name.value is not None
        return name.value.decode()

    def devices(self) -> Devices:
        """(logical, physical): the tenant's partitions, with limits and bytes in use, and the devices they are on."""
        from . import _devices

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
        n_bytes = _args.size(n_bytes, "n_bytes")
        session = self._session or self._open
        block = Block(session, n_bytes, False, bool(parkable))
        try:
            if (
                partition is None
                and tag is None
                and wait is None
                and not (one_extent or whole or parkable or _default_wait)
            ):
                result = _malloc(session.handle, _c_size_t(n_bytes), _byref(block._ptr))
            else:
                flags = (
                    (_library.ONE_EXTENT if one_extent else 0)
                    | (_library.WHOLE if whole else 0)
                    | (_library.PARKABLE if parkable else 0)
                )
                result = self._malloc_with(block, partition, tag, wait, flags)
        except BaseException:
            block.free()  # now: the traceback refers to it
            raise
        if result < 0:
            raise _errors.error(result)
        return block

    def _malloc_with(self, block: Block, partition: str | None, tag: str | None, wait: float | None, flags: int) -> int:
        handle, n_bytes, ret_ptr = block._session.handle, block.nbytes, _byref(block._ptr)
        options = _library.MallocOptions(
            partition=_args.name_or_none(partition, "partition"),
            tag=_args.name_or_none(tag, "tag"),
            wait_ms=_wait_ms(_default_wait if wait is None else wait),
            flags=flags,
        )
        return _interruptible(lambda: lib.bfc_malloc_with(handle, n_bytes, _byref(options), ret_ptr), options)

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
        global _empty
        if _empty is None:  # each time, the import would take a fifth of the call
            from ._arrays import empty as _empty
        return _empty(self, shape, dtype, partition, tag, wait, whole)

    # ---- memory that steps aside ----

    def pool(self, tag: str | None = None, *, partition: str | None = None) -> Pool:
        """Blocks and arrays that are parked and woken together: see Pool. tag: the label of its blocks, which bfcctl
        shows; by default one of its own."""
        from . import _pool

        return _pool.Pool(self, tag, partition)

    def on_pressure(self, fn: Callable[[str, int], object] | None) -> None:
        """Calls fn(partition, n_bytes) when the daemon needs memory of a partition for others: it may free blocks,
        put a Pool to sleep, or empty a framework's cache. None: no function.

        It runs on a thread of the library, one call at a time; an exception goes to sys.unraisablehook. A forked child
        has no function until it sets one. At the interpreter's end the function is removed, after a call that runs.
        """
        session = self._open
        before, session.pressure_fn = session.pressure_fn, _args.function_or_none(fn, "fn")
        if session.pressure_number == 0:
            session.pressure_number = number = next(_pressed_numbers)
            _pressed[number] = weakref.ref(session, partial(_pressed.pop, number))
        call = _library.PressureFn() if fn is None else _call_pressure_fn
        result = lib.bfc_on_pressure(session.handle, call, session.pressure_number)
        if result < 0:
            session.pressure_fn = before
            raise _errors.error(result)

    # ---- sharing ----

    def publish(self, array: Any, name: str, *, keep: float = 0.0, metadata: bytes | None = None) -> None:
        """Gives a block (of malloc(whole=True)) or an array (of empty(whole=True)) a name by which other processes
        of the tenant attach it.

        keep: how many seconds the memory stays when no process has it any more; math.inf: until forget(). It is
        charged to the tenant all the time, and survives a restart of the daemon. metadata: at most 4,096 bytes;
        by default those from which Block.array() makes the array again. Exists: the name is taken.
        """
        from . import _arrays

        block = array if isinstance(array, Block) else _arrays.block_of(array)
        if metadata is not None:
            metadata = bytes(_args.data(metadata, "metadata"))
        else:
            metadata = b"" if array is block else _arrays.describe(array)
        options = _library.PublishOptions(
            keep_ms=_keep_ms(keep), metadata=metadata or None, n_metadata_bytes=len(metadata)
        )
        encoded = _args.name(name, "name")
        _errors.check(lib.bfc_publish_with(self._handle, block._address(), encoded, _byref(options)))

    def attach(self, name: str, *, read_only: bool = False, wait: float | None = None) -> Block:
        """The block of that name, which another process has published. It is woken if it is parked. NotFound, or
        Timeout after `wait` seconds.

        read_only: this client cannot write it: on the host a write is a SIGSEGV, on a GPU an illegal access. A client
        has each extent either read-only or not, so use one of its own for such blocks: otherwise EBUSY."""
        handle, encoded = self._handle, _args.name(name, "name")
        options = _library.AttachOptions(wait_ms=_wait_ms(wait), flags=_library.ATTACH_READ_ONLY if read_only else 0)
        block = Block(self._open, 0, bool(read_only), may_be_parked=True)
        ret_ptr, n_bytes = _byref(block._ptr), ctypes.c_size_t()
        try:
            result = _interruptible(
                lambda: lib.bfc_attach_with(handle, encoded, _byref(options), ret_ptr, _byref(n_bytes)), options
            )
            block.nbytes = n_bytes.value
        except BaseException:
            block.free()  # now: the traceback refers to it
            raise
        if result < 0:
            raise _errors.error(result)
        return block

    def shared(self) -> list[SharedBlock]:
        """The tenant's shared blocks, kept ones and others."""
        from ._shared import shared

        return shared(self)

    def forget(self, name: str) -> None:
        """The block is kept no longer: it is freed now, or when the last process that has it drops it. NotFound."""
        _errors.check(lib.bfc_forget(self._handle, _args.name(name, "name")))

    def _another(self, partition: str, cache: bool) -> Client:
        """A client of the same tenant at the same daemon."""
        inherit = self._open.inherits
        return connect(self._socket, partition=partition, tenant=self.tenant, trace="", cache=cache, inherit=inherit)

    def _for_reading(self) -> Client:
        """The client that has this one's read-only blocks, and no others."""
        with self._reader_lock:
            if self._reader is None:
                self._reader = self._another(self.partition, cache=False)
            return self._reader

    def empty_cache(self, n_bytes: int | None = None) -> None:
        """Returns idle memory to the daemon, all of it or at least n_bytes."""
        n = ctypes.c_size_t(-1).value if n_bytes is None else _args.size(n_bytes, "n_bytes")
        _errors.check(lib.bfc_trim(self._handle, n))

    # ---- statistics ----

    def _stats(self, partition: str | None) -> _library.ClientStats:
        stats = _library.ClientStats()
        _errors.check(lib.bfc_stats_in(self._handle, _args.name_or_none(partition, "partition"), _byref(stats)))
        return stats

    def _usage(self, partition: str | None) -> _library.TenantUsage:
        usage = _library.TenantUsage()
        _errors.check(lib.bfc_usage(self._handle, _args.name_or_none(partition, "partition"), _byref(usage)))
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
            "bytes_direct": s.bytes_direct,
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

    def charge(self, n_bytes: int, *, partition: str | None = None, wait: float | None = None) -> None:
        """Charges memory that this process takes by other means than bfcd, for example from the driver: it counts against
        the tenant's limit in the partition as blocks do. Call it before the memory is taken. Waits for room as malloc()
        does. What uncharge() does not end, ends with the process; close() does not end it.
        """
        from . import _pool

        handle, where = self._handle, _args.name_or_none(partition, "partition")
        n = _args.size(n_bytes, "n_bytes")
        wait = _default_wait if wait is None else wait
        _errors.check(_pool.interruptible(lambda ms: lib.bfc_charge(handle, where, n, ms), wait))

    def uncharge(self, n_bytes: int, *, partition: str | None = None) -> None:
        """So many of the bytes that charge() charged there have been returned."""
        where, n = _args.name_or_none(partition, "partition"), _args.size(n_bytes, "n_bytes")
        _errors.check(lib.bfc_uncharge(self._handle, where, n))

    def mem_get_info(self, partition: str | None = None) -> tuple[int, int]:
        """(free, total): what this client can still allocate, and the most that its tenant may have."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        where = _args.name_or_none(partition, "partition")
        _errors.check(lib.bfc_mem_get_info(self._handle, where, _byref(free), _byref(total)))
        return free.value, total.value


def _program_name() -> str | None:
    """Of the module or the script that runs. None: the interpreter, which the library names."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None and spec.name != "__main__":
        return spec.name.removesuffix(".__main__")
    script = os.path.basename((getattr(sys, "argv", None) or [""])[0])
    return None if script in ("", "-", "-c") or "\0" in script else script


def _options(
    inherit: bool | None,
    *,
    socket: bytes | None = None,
    partition: str | None = None,
    tenant: str | None = None,
    name: str | None = None,
    trace: str | os.PathLike[str] | None = None,
    cache: bool = True,
) -> tuple[_library.Options, bool]:
    """Of the library, and whether forked children inherit the blocks."""
    inherits = os.environ.get("BFC_INHERIT") != "off" if inherit is None else bool(inherit)
    options = _library.Options(
        socket=socket,
        partition=_args.name_or_none(partition, "partition"),
        tenant=_args.name_or_none(tenant, "tenant"),
        name=_args.name_or_none(_program_name() if name is None else name, "name"),
        trace=_args.path_or_none(trace, "trace"),
        flags=(0 if cache else _library.NO_CACHE) | (_library.INHERIT if inherits else 0),
    )
    return options, inherits


def connect(
    socket: str | os.PathLike[str] | None = None,
    *,
    partition: str | None = None,
    tenant: str | None = None,
    name: str | None = None,
    trace: str | os.PathLike[str] | None = None,
    cache: bool = True,
    inherit: bool | None = None,
) -> Client:
    """A new client. Each argument that is None has the value of BFC_SOCKET, BFC_PARTITION, BFC_TENANT or BFC_TRACE,
    and then the default.

    cache=False: every malloc and free asks the daemon. name: of the session in bfcctl; by default the script's or the
    module's. inherit=False: forked children do not have the host blocks; None: they have, unless BFC_INHERIT is off.
    """
    path = _args.path_or_none(socket, "socket")
    options, inherits = _options(
        inherit, socket=path, partition=partition, tenant=tenant, name=name, trace=trace, cache=cache
    )
    session = _Session(inherits)
    _errors.check(lib.bfc_connect(_byref(options), _byref(session.handle)))
    return Client(session, None if path is None else os.fsdecode(path))


_default: tuple[int, Client] | None = None
_default_lock = allocate_lock()


def default() -> Client:
    """The client of this process, connected at the first call by the environment's BFC_ variables. A forked child
    gets one of its own."""
    global _default
    with _default_lock:
        if _default is None or _default[0] != os.getpid():
            options, inherits = _options(None)
            session = _Session(inherits, is_default=True)
            _errors.check(lib.bfc_default_with(_byref(options), _byref(session.handle)))
            _default = (os.getpid(), Client(session))
        return _default[1]


@_library.PressureFn
def _call_pressure_fn(number: int, pressure: Any) -> None:
    """Runs on a thread of the library, which may end the session here: it disconnects when this returns."""
    reference = _pressed.get(number)
    session = reference() if reference else None
    if session is not None and session.pressure_fn is not None:
        p = pressure.contents
        session.pressure_fn(p.partition.decode(), p.n_bytes)


@atexit.register
def _at_exit() -> None:
    """Before the interpreter ends: the library's threads must not call Python then, and no session ends."""
    for reference in list(_pressed.values()):
        if (session := reference()) is not None:
            lib.bfc_on_pressure(session.handle, _library.PressureFn(), None)
    del _Session.__del__


def on_pressure(fn: Callable[[str, int], object] | None) -> None:
    """Client.on_pressure() of the default client, for instance
    `bfcd.on_pressure(lambda partition, n_bytes: torch.cuda.empty_cache())`."""
    default().on_pressure(fn)


def pool(tag: str | None = None, *, partition: str | None = None) -> Pool:
    """Client.pool() of the default client."""
    return default().pool(tag, partition=partition)


def devices() -> Devices:
    """Client.devices() of the default client."""
    return default().devices()


def trace(path: str | os.PathLike[str]) -> None:
    """Records the allocations of default() into a file for bfc-replay. Call it before default() is used first."""
    if _default is not None and _default[0] == os.getpid():
        raise RuntimeError("the default client is connected already; call bfcd.trace() before it is used first")
    os.environ["BFC_TRACE"] = os.fsdecode(_args.path(path, "path"))


def _environment_wait() -> float:
    text = os.environ.get("BFC_WAIT_MS", "")
    if not text:
        return 0.0
    if not text.isdecimal():
        raise ImportError(f"BFC_WAIT_MS is '{text}', and must be a number of milliseconds")
    return min(int(text) / 1000, _MAX_WAIT_S)


#: BFC_WAIT_MS, in seconds: how long a request waits that names no `wait`.
_default_wait = _environment_wait()


def _after_fork() -> None:
    global _default_lock
    _default_lock = allocate_lock()


os.register_at_fork(after_in_child=_after_fork)
