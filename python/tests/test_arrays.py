# Arrays: numpy on the host, DeviceArray on a GPU, DLPack.
#
# SPDX-License-Identifier: Apache-2.0
import ctypes
import itertools
import sys

import bfcd
import pytest
from bfcd import _dlpack
from conftest import MIB, collect_garbage, gpu_only, host_only

numpy = pytest.importorskip("numpy")


@host_only
def test_an_array_is_memory_of_bfcd(client):
    x = client.empty((1000, 500), "float32")
    assert x.shape == (1000, 500) and x.dtype == numpy.float32 and x.flags.c_contiguous and x.flags.writeable
    assert client.bytes_in_use() == -(-x.nbytes // 256) * 256
    x[:] = 2
    assert x.sum() == 1_000_000


@host_only
def test_a_view_keeps_the_memory(client):
    x = client.empty(MIB, "u1")
    view = x[10:20].reshape(2, 5)
    del x
    collect_garbage()
    assert client.bytes_in_use() == MIB
    view[:] = 3
    del view
    collect_garbage()
    assert client.bytes_in_use() == 0


@host_only
def test_a_view_keeps_the_session(client, daemon):
    x = bfcd.connect(daemon.socket).empty(MIB, "u1")
    collect_garbage()
    x[:] = 1
    assert client.tenant_stats()["num_sessions"] == 2


@host_only
def test_types_and_shapes(client):
    types = ["?", "i1", "u2", "f2", "f4", "f8", "c16", "S7", "U3", "i4,f8", ">f4"]
    for dtype, shape in itertools.product(types, [(), 5, (0,), (3, 4), (2, 0, 3), numpy.int64(2), numpy.array([2, 2])]):
        x = client.empty(shape, dtype)
        like = numpy.zeros(shape, dtype)
        x[...] = like
        assert x.shape == like.shape and x.dtype == like.dtype
        assert (x == like).all()


def test_what_cannot_be_an_array_is_refused(client):
    with pytest.raises(TypeError, match="objects"):
        client.empty(3, object)
    with pytest.raises(ValueError, match="negative"):
        client.empty((2, -1))


def test_without_numpy_an_array_says_what_to_install(client, monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(ImportError, match="arrays need NumPy: pip install numpy"):
        client.empty(10, "u1")
    assert client.bytes_in_use() == 0
    client.malloc(4096).free()


@host_only
def test_buffer_and_dlpack_share_the_memory(client):
    block = client.malloc(1000)
    view = block.buffer()
    view[0] = 42
    x = numpy.asarray(block)
    assert x[0] == 42 and x.nbytes == 1000
    y = numpy.from_dlpack(x)
    assert y[0] == 42
    del block, view, x
    collect_garbage()
    assert y[0] == 42 and client.bytes_in_use() > 0
    del y
    collect_garbage()
    assert client.bytes_in_use() == 0


@host_only
def test_a_capsule_that_nobody_takes_frees_its_owner(client):
    for version in (None, (1, 0)):
        x = client.empty(100)
        capsule = _dlpack.capsule(x, x.ctypes.data, x.shape, x.dtype, _dlpack.CPU, 0, version)
        n = len(_dlpack._exported)
        del x, capsule
        collect_garbage()
        assert len(_dlpack._exported) == n - 1 and client.bytes_in_use() == 0


@host_only
def test_our_capsule_is_numpys(client):
    class Exporter:
        def __init__(self, x):
            self.x = x

        def __dlpack_device__(self):
            return _dlpack.CPU, 0

        def __dlpack__(self, *, max_version=None, **_):
            x = self.x
            return _dlpack.capsule(x, x.ctypes.data, x.shape, x.dtype, _dlpack.CPU, 0, max_version)

    x = client.empty((3, 4), "i4")
    x[:] = numpy.arange(12).reshape(3, 4)
    y = numpy.from_dlpack(Exporter(x))
    assert (y == numpy.arange(12).reshape(3, 4)).all()
    del x
    collect_garbage()
    assert y[2, 3] == 11
    del y
    collect_garbage()
    assert client.bytes_in_use() == 0


@gpu_only
def test_a_device_array_has_the_interfaces(client):
    x = client.empty((3, 4), "f4")
    assert isinstance(x, bfcd.DeviceArray)
    i = x.__cuda_array_interface__
    assert i["shape"] == (3, 4) and i["typestr"] == "<f4" and i["version"] == 3 and i["data"][0] == x.block.ptr
    assert x.__dlpack_device__() == (2, 0)
    assert x.nbytes == 48
    for version in (None, (1, 0)):
        capsule = x.__dlpack__(max_version=version)
        name = b"dltensor" if version is None else b"dltensor_versioned"
        struct = _dlpack._Managed if version is None else _dlpack._ManagedVersioned
        managed = struct.from_address(_dlpack._pointer(id(capsule), name))
        t = managed.dl_tensor
        assert (t.data, t.ndim, t.shape[0], t.shape[1]) == (x.block.ptr, 2, 3, 4)
        assert (t.dtype.code, t.dtype.bits, t.device.device_type) == (2, 32, 2)
        del capsule
    for wrong in ({"copy": True}, {"dl_device": (2, 1)}):
        with pytest.raises(BufferError):
            x.__dlpack__(**wrong)
    block = x.block
    block.free()
    for use in (x.__dlpack__, lambda: x.__cuda_array_interface__):
        with pytest.raises(ValueError, match="freed"):
            use()
    assert client.bytes_in_use() == 0


@gpu_only
def test_a_gpus_block_is_no_buffer(client):
    block = client.malloc(1000)
    with pytest.raises(BufferError, match="GPU"):
        block.buffer()
    assert not hasattr(block, "__array_interface__")
    assert block.__cuda_array_interface__["data"] == (block.ptr, False)
    block.write(b"there")
    assert block.read(5) == b"there"
