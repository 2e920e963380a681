# Published, kept, listed and read-only blocks.
#
# SPDX-License-Identifier: Apache-2.0
import errno
import json
import math
import signal

import bfcd
import pytest
from conftest import DEVICE, MIB, host_only, on_gpus_too, wait_for

numpy = pytest.importorskip("numpy")


@on_gpus_too
def test_arrays_are_published_and_attached(client, daemon):
    x = client.empty((3, 4), "int16", whole=True)
    if DEVICE == "host":
        x[:] = numpy.arange(12).reshape(3, 4)
    client.publish(x, "table", keep=1.5)
    other = bfcd.connect(daemon.socket)
    block = other.attach("table")
    assert json.loads(block.metadata) == {"dtype": "<i2", "shape": [3, 4]}
    y = block.array()
    assert (y.shape, y.dtype) == ((3, 4), numpy.dtype("int16"))
    if DEVICE == "host":
        y[1, 1] = 50
        assert x[1, 1] == 50
        with pytest.raises(ValueError, match="whole array"):
            client.publish(client.empty((3, 4), whole=True)[1:], "part")
    (row,) = client.shared()
    assert (row.name, row.nbytes, row.num_references, row.keep) == ("table", 24, 2, 1.5)
    assert row.n_metadata_bytes == len(block.metadata)


def test_metadata_is_the_publishers(client):
    block = client.malloc(1000, whole=True)
    client.publish(block, "x", metadata=b"\0any")
    assert client.attach("x").metadata == b"\0any"
    with pytest.raises(ValueError, match="does not describe"):
        client.attach("x").array()
    with pytest.raises(bfcd.InvalidValue):
        client.publish(client.malloc(1000, whole=True), "y", metadata=b"x" * 4097)
    with pytest.raises(ValueError, match="negative"):
        client.publish(block, "y", keep=-1)
    with pytest.raises(bfcd.NotFound):
        client.forget("y")


@on_gpus_too
def test_a_kept_block_stays_until_it_is_forgotten(client, daemon):
    block = client.malloc(MIB, whole=True)
    block.write(b"kept")
    client.publish(block, "x", keep=math.inf)
    block.free()
    (row,) = client.shared()
    assert (row.num_references, row.keep, row.left) == (0, math.inf, math.inf)
    if DEVICE != "cuda-ipc":
        daemon.restart()
    other = bfcd.connect(daemon.socket)
    assert other.attach("x").read(4) == b"kept"
    other.forget("x")
    assert other.shared() == []
    wait_for(lambda: other.tenant_stats()["bytes_in_use"] == 0, "free of the memory")


def test_a_kept_block_leaves_when_its_time_is_over(client):
    block = client.malloc(MIB, whole=True)
    client.publish(block, "x", keep=0.2)
    block.free()
    wait_for(lambda: client.shared() == [], "end of the block")
    wait_for(lambda: client.tenant_stats()["bytes_in_use"] == 0, "free of the memory")


@host_only
def test_a_read_only_block_cannot_be_written(client, daemon):
    block = client.malloc(MIB, whole=True)
    block.write(b"first")
    client.publish(block, "x")
    same = bfcd.connect(daemon.socket).attach("x", read_only=True)
    assert same.read(5) == b"first" and same.buffer().readonly
    assert not numpy.asarray(same).flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        same.write(b"second")
    r = daemon.run(
        "import bfcd, ctypes\nb = bfcd.connect().attach('x', read_only=True)\nprint(b.read(5), flush=True)\n"
        "ctypes.memset(b.ptr, 1, 1)"
    )
    assert r.returncode == -signal.SIGSEGV and "first" in r.stdout, r.stderr
    with pytest.raises(bfcd.Error) as e:  # this client has the extent for writing
        client.attach("x", read_only=True)
    assert e.value.errno == errno.EBUSY
    block.write(b"third")
    assert same.read(5) == b"third"


@host_only
def test_an_array_of_a_read_only_block_cannot_be_made_writable(client, daemon):
    array = client.empty((4,), [("a", "<i4"), ("b", "<f8")], whole=True)
    array["a"] = 7
    client.publish(array, "x")
    same = bfcd.connect(daemon.socket).attach("x", read_only=True).array()
    assert list(same["a"]) == [7, 7, 7, 7] and same.dtype == array.dtype
    for each in same, same[1:], same["b"], same[:0]:
        assert not each.flags.writeable
        with pytest.raises(ValueError):
            each.flags.writeable = True
    array["a"] = 8
    assert same["a"][3] == 8
