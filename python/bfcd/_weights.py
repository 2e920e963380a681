"""weights(): a .safetensors file in one shared block, read once per machine; a model in several files, each in one.

The block has the file's tensor data at its begin, so that it is aligned as the block is, then the file's header, and in
its last 8 bytes the header's length. It is published when it is complete, so a loader that is killed leaves nothing.

One process of the tenant loads at a time: the one that could publish a small block, the lock, under the name and "~".
The lock is not kept. It ends with the loader's session, however the loader ends, and another process tries again.

A client cannot have an extent for reading and for writing, so the block is attached by a client that only reads.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from . import _args, _arrays, _client, _errors

_CHUNK = 16 << 20
_SAMPLE, _N_SAMPLES = 4096, 16
#: How long a process waits for the name before it looks whether the loader has died.
_LOOK_S = 0.25
_ALIGNMENT = 512  # of PyTorch's allocator
_MAX_HEADER = 100_000_000  # of the format
_LENGTH = struct.Struct("<Q")

_NUMPY = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U64": "<u8",
    "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?", "C64": "<c8",
}  # fmt: skip
_ML_DTYPES = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
_TORCH = _ML_DTYPES | {
    "F64": "float64", "F32": "float32", "F16": "float16", "I64": "int64", "I32": "int32", "I16": "int16",
    "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool", "C64": "complex64",
}  # fmt: skip


# ---- the file ----


def _open(path: str) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO would wait for a writer
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "it is no regular file", path)


def _name(path: str, fd: int, partition: str) -> str:
    """Of the file as it is now. It is printable and shorter than 63 bytes.

    chmod, chown and link change the inode's ctime, so that is no part of it. The mtime can have been set back, so some of
    the contents are a part."""
    now = os.fstat(fd)
    digest = hashlib.sha256(repr((partition, now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns)).encode())
    for i in range(_N_SAMPLES):
        digest.update(os.pread(fd, _SAMPLE, i * max(now.st_size - _SAMPLE, 0) // (_N_SAMPLES - 1)))
    stem = re.sub(r"[^A-Za-z0-9_.-]", "_", os.path.basename(path).removesuffix(".safetensors"))[:24]
    return f"{stem}-{digest.hexdigest()[:32]}"


class _File:
    def __init__(self, fd: int, path: str) -> None:
        import safetensors

        try:
            opened = safetensors.safe_open(f"/proc/self/fd/{fd}", framework="np")  # type: ignore[no-untyped-call]
        except safetensors.SafetensorError as e:
            raise ValueError(f"{path} is no .safetensors file: {e}") from None
        with opened:
            pass  # it has checked the header
        self._fd, self._path, self._stat = fd, path, os.fstat(fd)
        (n_header,) = _LENGTH.unpack(os.pread(fd, _LENGTH.size, 0))
        self.header = os.pread(fd, n_header, _LENGTH.size)
        self.data_offset = _LENGTH.size + n_header
        self.n_data = self._stat.st_size - self.data_offset

    def read(self, offset: int, into: memoryview) -> None:
        """Tensor data from an offset."""
        while into:
            n = os.preadv(self._fd, [into], self.data_offset + offset)
            if n == 0:
                raise self._changed()
            offset += n
            into = into[n:]

    def check(self) -> None:
        now = os.fstat(self._fd)
        if (now.st_size, now.st_mtime_ns) != (self._stat.st_size, self._stat.st_mtime_ns):
            raise self._changed()

    def _changed(self) -> OSError:
        return OSError(errno.ESTALE, "the file was changed while it was read", self._path)


# ---- loading ----


def _progress(wanted: bool | None, n_bytes: int, path: str) -> Any:
    if wanted is None:
        wanted = sys.stderr.isatty()
    if wanted:
        with contextlib.suppress(ImportError):
            from tqdm import tqdm

            return tqdm(total=n_bytes, unit="B", unit_scale=True, desc=os.path.basename(path))
    return contextlib.nullcontext()


def _fill(block: _client.Block, file: _File, bar: Any) -> None:
    host = block.buffer() if block.device_ordinal is None else None
    buffer = memoryview(b"" if host else bytearray(min(_CHUNK, file.n_data)))
    for offset in range(0, file.n_data, _CHUNK):
        n = min(_CHUNK, file.n_data - offset)
        if host:
            file.read(offset, host[offset : offset + n])
        else:
            file.read(offset, buffer[:n])
            block.write(buffer[:n], offset)
        if bar:
            bar.update(n)
    block.write(file.header + _LENGTH.pack(len(file.header)), file.n_data)
    file.check()


def _metadata(path: str) -> bytes:
    """For those who look at Client.shared()."""
    return json.dumps({"safetensors": path}).encode()[:4096]


def _load(
    loader: _client.Client, name: str, path: str, fd: int, keep: float, wait: float | None, progress: bool | None
) -> _client.Block:
    file = _File(fd, path)
    n_bytes = file.n_data + len(file.header) + _LENGTH.size
    block = loader.malloc(n_bytes, tag="weights", wait=wait, whole=True)
    try:
        with _progress(progress, file.n_data, path) as bar:
            _fill(block, file, bar)
        loader.publish(block, name, keep=keep, metadata=_metadata(path))
    except BaseException:
        block.free()  # now: the traceback refers to it
        raise
    return block


@contextlib.contextmanager
def _loading(client: _client.Client, name: str, partition: str) -> Iterator[_client.Client | None]:
    """A client of its own with the lock; None: another process has it. Its access for writing ends with it."""
    with client._another(partition=partition, cache=False) as loader:
        lock = loader.malloc(1, tag="weights lock", whole=True)
        try:
            loader.publish(lock, name + "~")
        except _errors.Exists:
            yield None
            return
        try:
            yield loader
        finally:
            lock.free()


def _attach(reader: _client.Client, name: str, wait: float) -> _client.Block | None:
    with contextlib.suppress(_errors.NotFound, _errors.Timeout):
        try:
            return reader.attach(name, read_only=True, wait=wait)
        except _errors.Error as e:
            if e.errno != errno.ENOTSUP:
                raise
        block = reader.attach(name, wait=wait)  # by CUDA IPC, which has no read-only access: only the arrays say so
        block.read_only = True
        return block
    return None


def _shared_block(
    client: _client.Client, name: str, partition: str, wait: float | None, load: Callable[[_client.Client], Any]
) -> _client.Block:
    reader = client._for_reading()
    end = None if wait is None else time.monotonic() + wait
    block = _attach(reader, name, 0)
    while block is None:
        with _loading(client, name, partition) as loader:
            # It may have been published before the lock was free.
            if loader is not None and (block := _attach(reader, name, 0)) is None:
                try:
                    loaded = load(loader)
                except _errors.Exists:  # published meanwhile, and not by weights(); NotFound: where this client has no quota
                    block = reader.attach(name, read_only=True)
                else:
                    block = _attach(reader, name, 0)
                    del loaded
        while block is None and any(each.name == name + "~" for each in reader.shared()):
            left = _LOOK_S if end is None else end - time.monotonic()
            if left <= 0:
                raise _errors.Timeout(errno.ETIMEDOUT, f"another process did not load '{name}' in {wait} seconds")
            block = _attach(reader, name, min(left, _LOOK_S))
    return block


# ---- tensors ----


def _header(block: _client.Block) -> tuple[int, dict[str, Any]]:
    """The size of the data, and what the header says of it."""
    if block.nbytes >= _LENGTH.size:
        (n_header,) = _LENGTH.unpack(block.read(_LENGTH.size, block.nbytes - _LENGTH.size))
        n_data = block.nbytes - _LENGTH.size - n_header
        if n_header <= _MAX_HEADER and n_data >= 0:
            return n_data, json.loads(block.read(n_header, n_data))
    raise ValueError("the shared block has no safetensors header")


def _entries(block: _client.Block) -> tuple[int, Iterator[tuple[str, str, tuple[int, ...], int, int]]]:
    """The size of the data, and for each tensor its name, type, shape, begin and end."""
    n_data, header = _header(block)

    def entries() -> Iterator[tuple[str, str, tuple[int, ...], int, int]]:
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            begin, end = tensor["data_offsets"]
            if not all(type(n) is int and n >= 0 for n in (begin, end, *tensor["shape"])) or not begin <= end <= n_data:
                raise ValueError("the shared block has no safetensors header")
            yield name, tensor["dtype"], tuple(tensor["shape"]), begin, end

    return n_data, entries()


def _check_size(name: str, shape: tuple[int, ...], itemsize: int, n_bytes: int) -> None:
    if math.prod(shape) * itemsize != n_bytes:
        raise ValueError(f"tensor '{name}' has {n_bytes} bytes, which its shape {shape} does not need")


def _numpy_type(name: str) -> Any:
    numpy = _arrays.import_numpy()

    if name in _NUMPY:
        return numpy.dtype(_NUMPY[name])
    if name in _ML_DTYPES:
        try:
            import ml_dtypes
        except ImportError:
            raise TypeError(f"NumPy has no type {name}: install ml_dtypes, or use framework='torch'") from None
        return numpy.dtype(getattr(ml_dtypes, _ML_DTYPES[name]))
    raise TypeError(f"NumPy has no type {name}")


def _numpy_tensors(block: _client.Block) -> dict[str, Any]:
    n_data, entries = _entries(block)
    ordinal = block.device_ordinal
    whole: Any = _arrays.on_block(block, (n_data,), _numpy_type("U8"), ordinal)
    tensors: dict[str, Any] = {}
    for name, kind, shape, begin, end in entries:
        dtype = _numpy_type(kind)
        _check_size(name, shape, dtype.itemsize, end - begin)
        if ordinal is not None:
            tensors[name] = _arrays.DeviceArray(block, shape, dtype, ordinal, begin)
        else:
            tensors[name] = whole[begin:end].view(dtype).reshape(shape)
    return tensors


def _torch_tensors(block: _client.Block) -> dict[str, Any]:
    import torch

    n_data, entries = _entries(block)
    ordinal = block.device_ordinal
    if ordinal is None:
        # PyTorch has no read-only tensors: it takes the memory as writable, and a write is a SIGSEGV.
        whole = torch.frombuffer(_client.buffer_at(block, block._address(), block.nbytes), dtype=torch.uint8)
    else:
        array = _arrays.DeviceArray(block, (block.nbytes,), _numpy_type("U8"), ordinal, read_only=False)
        whole = torch.from_dlpack(array)
    tensors: dict[str, Any] = {}
    for name, kind, shape, begin, end in entries:
        if kind not in _TORCH or not hasattr(torch, _TORCH[kind]):
            raise TypeError(f"this version of PyTorch has no type {kind}")
        dtype = getattr(torch, _TORCH[kind])
        _check_size(name, shape, dtype.itemsize, end - begin)
        part = whole[begin:end]
        if begin % dtype.itemsize != 0:
            part = part.clone()
        tensors[name] = part.view(dtype).reshape(shape)
    return tensors


_FRAMEWORKS = {"numpy": _numpy_tensors, "torch": _torch_tensors}


# ---- models of several files ----


def _indexed(index: str) -> dict[str, set[str]]:
    """The files that an index names, each with its tensors."""
    try:
        with open(index, "rb") as file:
            names = json.load(file)["weight_map"]
        files: dict[str, set[str]] = {}
        for tensor, name in names.items():
            files.setdefault(os.path.join(os.path.dirname(index), name), set()).add(tensor)
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"{index} is no index of .safetensors files: {e!r}") from None
    return files


def _files(path: str) -> dict[str, set[str] | None]:
    """The files of a model, each with the tensors that are wanted of it; None: all."""
    if os.path.isdir(path):
        names = sorted(os.listdir(path))
        indexes = [name for name in names if name.endswith(".safetensors.index.json")]
        if len(indexes) > 1:
            raise ValueError(f"folder {path} has several indexes, so name one of them: {', '.join(indexes)}")
        if not indexes:
            files = [os.path.join(path, name) for name in names if name.endswith(".safetensors")]
            if not files:
                raise FileNotFoundError(errno.ENOENT, "the folder has no .safetensors file", path)
            return dict.fromkeys(files)
        path = os.path.join(path, indexes[0])
    return dict(_indexed(path)) if path.endswith(".json") else {path: None}


def _tensors(
    path: str, client: _client.Client, framework: str, where: str, keep: float, end: float, progress: bool | None
) -> dict[str, Any]:
    """Of one file, or of the block that has it. end: of the wait, by time.monotonic(); math.inf: it has none."""
    real = os.path.realpath(path)
    wait = None if end == math.inf else max(end - time.monotonic(), 0)
    fd = _open(real)
    try:
        name = _name(real, fd, where)
        block = _shared_block(
            client, name, where, wait, lambda loader: _load(loader, name, real, fd, keep, wait, progress)
        )
        if block.nbytes != os.fstat(fd).st_size:
            raise ValueError(f"the shared block '{name}' does not have the size of {real}")
    finally:
        os.close(fd)
    return _FRAMEWORKS[framework](block)


def weights(
    path: str | os.PathLike[str],
    client: _client.Client | None = None,
    framework: str = "numpy",
    *,
    partition: str | None = None,
    keep: float = 3600.0,
    wait: float | None = None,
    progress: bool | None = None,
) -> dict[str, Any]:
    """The tensors of a .safetensors file, in memory that all processes of the tenant share. `path` can also be the index
    (.safetensors.index.json) of a model in several files, or a folder with such files: all of their tensors.

    The first process reads each file into a block, the others attach it: a copy for each partition. Tensors are
    read-only, and each keeps its file's block. A file that was changed since is another one.

    framework: "numpy" (arrays; bfcd.DeviceArray on a GPU) or "torch".
    keep: how many seconds the block stays when no process has it any more; math.inf: until Client.forget(). The
    first process decides.
    wait: how many seconds to wait for memory, and for another process that is loading the file. None: for memory
    BFC_WAIT_MS, for the other process without a limit. Timeout: it has not finished.
    progress: show a progress bar (tqdm) while loading; None: if stderr is a terminal.
    """
    if framework not in _FRAMEWORKS:
        raise ValueError(f"framework is '{framework}', and must be one of {', '.join(_FRAMEWORKS)}")
    given = os.fsdecode(_args.path(path, "path"))
    client = _client.default() if client is None else _args.instance(client, _client.Client, "client")
    where = client.partition if partition is None else _args.name(partition, "partition").decode() or client.partition
    end = math.inf if wait is None else time.monotonic() + _args.seconds(wait, "wait")
    _client._keep_ms(keep)
    tensors: dict[str, Any] = {}
    for file, wanted in _files(given).items():
        of_file = _tensors(file, client, framework, where, keep, end, progress)
        if wanted is None and (both := tensors.keys() & of_file):
            raise ValueError(f"{file} has a tensor that another file of the folder has, too: {min(both)}")
        if wanted is not None and not wanted <= of_file.keys():
            raise ValueError(f"the index names tensor '{min(wanted - of_file.keys())}', which {file} does not have")
        tensors |= of_file if wanted is None else {name: of_file[name] for name in of_file if name in wanted}
    return tensors


# ---- tensors that a program has made ----


def file_digest(path: str, partition: str) -> str:
    """Another one when the file has changed."""
    fd = _open(os.path.realpath(path))
    try:
        return _name(path, fd, partition)
    finally:
        os.close(fd)


def _store(loader: _client.Client, name: str, made: tuple[dict[str, Any], dict[str, str]], keep: float) -> _client.Block:
    """Publishes a block as that of a file. The tensors are PyTorch's, contiguous and on the host."""
    import torch

    types = {getattr(torch, theirs): ours for ours, theirs in _TORCH.items() if hasattr(torch, theirs)}
    tensors, metadata = made
    header: dict[str, Any] = {"__metadata__": metadata}
    n_data = 0
    for tensor_name, tensor in tensors.items():
        if tensor.dtype not in types:
            raise TypeError(f"tensor '{tensor_name}' has type {tensor.dtype}, which no .safetensors file can have")
        begin = -(-n_data // _ALIGNMENT) * _ALIGNMENT
        n_data = begin + tensor.nbytes
        header[tensor_name] = {"dtype": types[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, n_data]}
    text = json.dumps(header).encode()
    block = loader.malloc(n_data + len(text) + _LENGTH.size, tag="weights", whole=True)
    try:
        for tensor_name, tensor in tensors.items():
            if tensor.nbytes > 0:
                data = tensor.reshape(-1).view(torch.uint8).numpy()
                begin = header[tensor_name]["data_offsets"][0]
                for offset in range(0, len(data), _CHUNK):
                    block.write(data[offset : offset + _CHUNK], begin + offset)
        block.write(text + _LENGTH.pack(len(text)), n_data)
        loader.publish(block, name, keep=keep, metadata=_metadata(name))
    except BaseException:
        block.free()
        raise
    return block


def made_tensors(
    name: str, partition: str, keep: float, make: Callable[[], tuple[dict[str, Any], dict[str, str]]]
) -> tuple[dict[str, Any], dict[str, str], int]:
    """PyTorch's tensors of a shared block, read-only, as weights() gives those of a file; its metadata, and its size. The first
    process makes them, and the others wait for it."""
    client = _client.default()
    block = _shared_block(client, name, partition, None, lambda loader: _store(loader, name, make(), keep))
    return _torch_tensors(block), _header(block)[1]["__metadata__"], block.nbytes
