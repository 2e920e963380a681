# bfcd.weights(): one shared, kept, read-only copy of a .safetensors file.
#
# SPDX-License-Identifier: Apache-2.0
import json
import math
import os
import random
import signal
import struct
import subprocess
import sys
import time

import bfcd
import pytest
from bfcd import _weights
from conftest import DEVICE, LIMIT_S, MIB, collect_garbage, gpu_only, host_only, on_gpus_too, wait_for

numpy = pytest.importorskip("numpy")
save = pytest.importorskip("safetensors.numpy").save_file


def tensors():
    rng = numpy.random.default_rng(1)
    return {
        "a": rng.random((300, 70), dtype="float32"),
        "b": rng.integers(-5, 5, (3, 4, 5), dtype="int8"),
        "half": rng.random(7).astype("float16"),
        "scalar": numpy.array(2.5),
        "none": numpy.empty((0, 3), "int32"),
        "flags": numpy.array([True, False, True]),
    }


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "model.safetensors"
    save(tensors(), path, metadata={"by": "a test"})
    return path


def copied(t):
    """On the host, of an array or a DeviceArray."""
    if isinstance(t, numpy.ndarray):
        return t
    data = t.block.read(t.nbytes, t._offset)
    return numpy.frombuffer(data, t.dtype).reshape(t.shape)


def assert_same(got):
    wanted = tensors()
    assert got.keys() == wanted.keys()
    for name, t in got.items():
        assert t.dtype == wanted[name].dtype and t.shape == wanted[name].shape, name
        assert (copied(t) == wanted[name]).all(), name


def rows(client):
    return {row.name: row for row in client.shared()}


@on_gpus_too
def test_tensors_are_those_of_the_file(client, path):
    got = bfcd.weights(path, client)
    assert_same(got)
    (row,) = client.shared()
    assert row.name.startswith("model-") and row.nbytes == path.stat().st_size and row.keep == 3600
    again = bfcd.weights(path, client)
    assert_same(again)
    assert [row.name] == list(rows(client))


def test_the_memory_is_kept_until_it_is_forgotten(client, path):
    bfcd.weights(path, client, keep=math.inf)
    collect_garbage()
    (row,) = client.shared()
    assert (row.num_references, row.keep, row.left) == (0, math.inf, math.inf)
    client.forget(row.name)
    assert client.shared() == []
    wait_for(lambda: client.tenant_stats()["bytes_in_use"] == 0, "free of the memory")


def test_without_keep_the_last_tensor_keeps_the_memory(client, path):
    got = bfcd.weights(path, client, keep=0)
    (row,) = client.shared()
    assert (row.num_references, row.keep) == (1, 0)
    last = got["b"]
    del got
    collect_garbage()
    assert len(client.shared()) == 1
    assert (copied(last) == tensors()["b"]).all()
    del last
    collect_garbage()
    assert client.shared() == []


def test_a_changed_file_is_another_one(client, path):
    bfcd.weights(path, client)
    save({"a": numpy.ones(3, "int32")}, path)
    assert (copied(bfcd.weights(path, client)["a"]) == 1).all()
    assert len(client.shared()) == 2


def test_a_file_that_has_not_changed_is_the_same(client, path, tmp_path):
    bfcd.weights(path, client)
    path.chmod(0o600)
    os.link(path, tmp_path / "other")
    bfcd.weights(path, client)
    (tmp_path / "moved").mkdir()
    bfcd.weights(path.rename(tmp_path / "moved" / path.name), client)
    assert len(client.shared()) == 1


def test_a_file_whose_time_was_set_back_is_another_one(client, path, tmp_path):
    bfcd.weights(path, client)
    times = path.stat()
    changed = tensors()
    changed["a"] += 1
    save(changed, tmp_path / "changed", metadata={"by": "a test"})
    path.write_bytes((tmp_path / "changed").read_bytes())
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert path.stat()[:7] == times[:7]
    assert (copied(bfcd.weights(path, client)["a"]) == changed["a"]).all()


@pytest.fixture
def model(tmp_path):
    """A folder with an index and two files."""
    folder = tmp_path / "model"
    folder.mkdir()
    all_tensors = list(tensors().items())
    files = {f"model-{i}.safetensors": dict(all_tensors[i::2]) for i in range(2)}
    for name, content in files.items():
        save(content, folder / name)
    index = {tensor: name for name, content in files.items() for tensor in content}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def test_a_model_of_several_files(client, model):
    index = model / "model.safetensors.index.json"
    assert_same(bfcd.weights(model, client))
    assert_same(bfcd.weights(index, client))
    assert len(client.shared()) == 2
    save({"a": numpy.ones(3)}, model / "extra.safetensors")  # which the index does not name
    assert_same(bfcd.weights(model, client))
    index.unlink()
    with pytest.raises(ValueError, match="another file of the folder has, too: a"):
        bfcd.weights(model, client)
    (model / "extra.safetensors").unlink()
    assert_same(bfcd.weights(model, client))


def test_what_is_no_model_is_refused(client, model, tmp_path):
    index = model / "model.safetensors.index.json"
    for text in ("", "[]", '{"weight_map": 5}', '{"weight_map": {"a": 5}}'):
        index.write_text(text)
        with pytest.raises(ValueError, match="no index"):
            bfcd.weights(index, client)
    index.write_text('{"weight_map": {"nothing": "model-0.safetensors"}}')
    with pytest.raises(ValueError, match="'nothing'"):
        bfcd.weights(model, client)
    (model / "second.safetensors.index.json").touch()
    with pytest.raises(ValueError, match="several indexes"):
        bfcd.weights(model, client)
    with pytest.raises(FileNotFoundError, match="no .safetensors file"):
        bfcd.weights(tmp_path, client)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="no regular file"):
        bfcd.weights(tmp_path / "fifo", client)


def test_a_partition_has_a_copy_of_its_own(client, path):
    bfcd.weights(path, client)
    assert_same(bfcd.weights(path, client, partition="infer"))
    assert sorted(row.partition for row in client.shared()) == ["infer", "train"]


def test_a_long_header_is_no_problem(client, tmp_path):
    many = {f"{'tensor' * 20}{i}": numpy.full(3, i, "int16") for i in range(500)}
    path = tmp_path / "many.safetensors"
    save(many, path)
    got = bfcd.weights(path, client)
    assert len(got) == 500 and all((copied(got[name]) == t).all() for name, t in many.items())


def name_of(client, path):
    with open(path) as file:
        return _weights._name(str(path), file.fileno(), client.partition)


def publish_forged(client, path, data):
    block = client.malloc(len(data), whole=True)
    block.write(data)
    client.publish(block, name_of(client, path))
    return block


def test_a_block_of_another_size_is_refused(client, path):
    block = publish_forged(client, path, b"x" * 100)
    with pytest.raises(ValueError, match="size"):
        bfcd.weights(path, client)
    block.free()


@pytest.mark.parametrize("shape, offsets", [([-1, -4], [0, 4]), ([1.0], [0, 1]), ([4], [4, 0]), ([4], [0, 1 << 40])])
def test_a_forged_header_is_refused(client, path, shape, offsets):
    header = json.dumps({"a": {"dtype": "U8", "shape": shape, "data_offsets": offsets}}).encode()
    n_data = os.stat(path).st_size - len(header) - 8
    data = bytes(n_data) + header + struct.pack("<Q", len(header))
    block = publish_forged(client, path, data)
    with pytest.raises(ValueError, match="header"):
        bfcd.weights(path, client)
    block.free()


def test_a_file_that_is_none_is_refused_and_nothing_stays(client, tmp_path, path):
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="is no .safetensors file"):
        bfcd.weights(broken, client)
    with pytest.raises(FileNotFoundError):
        bfcd.weights(tmp_path / "none", client)
    with pytest.raises(ValueError, match="framework"):
        bfcd.weights(path, client, framework="abacus")
    assert client.shared() == []
    wait_for(lambda: client.tenant_stats()["bytes_in_use"] == 0, "free of the memory")


def test_a_file_that_changes_while_it_is_read_is_refused(client, path, monkeypatch):
    def change(self, offset, into):
        real(self, offset, into)
        os.utime(path, ns=(1, 1))

    real = _weights._File.read
    monkeypatch.setattr(_weights._File, "read", change)
    with pytest.raises(OSError, match="changed while it was read"):
        bfcd.weights(path, client)
    assert client.shared() == []
    wait_for(lambda: client.tenant_stats()["bytes_in_use"] == 0, "free of the memory")


def test_over_quota_is_said_and_nothing_stays(client, tmp_path):
    path = tmp_path / "large.safetensors"
    save({"a": numpy.zeros(80 * MIB, "u1")}, path)
    with pytest.raises(bfcd.QuotaExceeded, match="tenant 'me'"):
        bfcd.weights(path, client)
    assert client.shared() == []


def test_who_waits_is_told_when_the_time_is_over(client, daemon, path):
    name = name_of(client, path)
    other = bfcd.connect(daemon.socket)
    lock = other.malloc(1, whole=True)
    other.publish(lock, name + "~")
    with pytest.raises(bfcd.Timeout, match="did not load"):
        bfcd.weights(path, client, wait=0.3)
    lock.free()
    assert_same(bfcd.weights(path, client, wait=0.3))


@host_only
def test_writes_through_any_view_fail(daemon, client, path):
    got = bfcd.weights(path, client)
    a = got["a"]
    assert not a.flags.writeable and not a[1:].T.flags.writeable
    for write in (lambda: a.__setitem__(0, 1), lambda: a.setflags(write=True), lambda: numpy.asarray(a).fill(0)):
        with pytest.raises(ValueError):
            write()
    with pytest.raises((TypeError, BufferError, ValueError)):
        memoryview(a)[0, 0] = 1
    with pytest.raises(ValueError):
        numpy.from_dlpack(a)[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        client._for_reading().attach(client.shared()[0].name, read_only=True).write(b"x")
    r = daemon.run(f"import bfcd, ctypes\nx = bfcd.weights({str(path)!r})['a']\nctypes.memset(x.ctypes.data, 1, 1)")
    assert r.returncode == -signal.SIGSEGV
    assert_same(bfcd.weights(path, client))


@host_only
def test_the_loader_cannot_write_either(daemon, client, path):
    # Its own mapping for writing is gone when weights() returns.
    r = daemon.run(
        f"""
import bfcd
x = bfcd.weights({str(path)!r})['a']
address = x.ctypes.data
ranges = [line.split()[:2] for line in open("/proc/self/maps") if "bfcd" in line]
inside = [p for r, p in ranges if int(r.split("-")[0], 16) <= address < int(r.split("-")[1], 16)]
print(inside, [p for _, p in ranges])
"""
    )
    assert r.returncode == 0, r.stderr
    assert r.stdout.startswith("['r--s'] "), r.stdout


PROGRAM = """
import os, sys, time
import numpy, bfcd
client = bfcd.connect()
got = bfcd.weights({path!r}, client)
print(sum(float(t.sum()) for t in got.values()) if {on_host} else len(got), flush=True)
sys.stdin.read()
"""


def start(daemon, path, **kwargs):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(path=str(path), on_host=DEVICE == "host")],
        env=daemon.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **kwargs,
    )


def test_four_processes_share_one_copy(daemon, client, path):
    processes = [start(daemon, path) for _ in range(4)]
    first = {p.stdout.readline() for p in processes}
    assert len(first) == 1 and "" not in first
    (row,) = client.shared()
    assert row.num_references == 4
    assert client.tenant_stats()["bytes_in_use"] == -(-row.nbytes // 256) * 256
    assert client.tenant_stats()["peak_bytes_in_use"] < 2 * row.nbytes  # one of them has loaded
    for p in processes:
        p.communicate(timeout=LIMIT_S)
        assert p.returncode == 0
    wait_for(lambda: client.shared()[0].num_references == 0, "end of the references")


@pytest.mark.skipif(DEVICE == "cuda-ipc", reason="such memory does not survive a restart")
@on_gpus_too
def test_the_memory_survives_a_restart_of_the_daemon(daemon, path):
    old = bfcd.connect(daemon.socket)
    held = bfcd.weights(path, old)
    (before,) = old.shared()
    daemon.restart()
    client = bfcd.connect(daemon.socket)
    (row,) = client.shared()
    assert row.name == before.name and row.keep == 3600
    assert_same(bfcd.weights(path, client))
    assert_same(held)
    (row,) = old.shared()
    assert row.num_references == 1


def test_a_killed_loader_leaves_nothing_half_published(daemon, client, tmp_path):
    path = tmp_path / "large.safetensors"
    save({"a": numpy.full(24 * MIB, 7, "u1")}, path)
    rng = random.Random(os.getpid())
    n_complete = 0
    for _ in range(10):
        p = start(daemon, path)
        wait_for(lambda: client.shared() or p.poll() is not None, "lock of the loader")
        time.sleep(rng.uniform(0, 0.2))
        p.kill()
        p.communicate()
        wait_for(lambda: client.tenant_stats()["num_sessions"] == 1, "end of the loader's sessions")
        for row in client.shared():  # the lock is gone, and what is there is complete
            assert row.nbytes == path.stat().st_size and not row.name.endswith("~")
            block = bfcd.connect(daemon.socket).attach(row.name)
            assert block.read(24 * MIB) == b"\7" * (24 * MIB)
            n_complete += 1
            del block
            client.forget(row.name)
        wait_for(lambda: client.tenant_stats()["bytes_in_use"] == 0, "free of the loader's memory")
    assert len(bfcd.weights(path, client)) == 1
    print(n_complete, "of 10 were complete")


def test_a_waiting_process_goes_on_when_the_loader_is_killed(daemon, client, tmp_path):
    path = tmp_path / "slow.safetensors"
    save({"a": numpy.full(4 * MIB, 7, "u1")}, path)
    slow = f"""
import bfcd, time
from bfcd import _weights
real = _weights._fill
def fill(*args):
    print("loading", flush=True)
    time.sleep({LIMIT_S})
_weights._fill = fill
bfcd.weights({str(path)!r})
"""
    loader = subprocess.Popen([sys.executable, "-c", slow], env=daemon.environment(), stdout=subprocess.PIPE, text=True)
    assert loader.stdout.readline() == "loading\n"
    waiting = [start(daemon, path) for _ in range(2)]
    wait_for(lambda: client.tenant_stats()["num_sessions"] >= 8, "sessions of the waiting processes")
    loader.kill()
    loader.communicate()
    for p in waiting:
        assert p.stdout.readline()
    (row,) = client.shared()
    assert row.num_references == 2
    for p in waiting:
        p.communicate(timeout=LIMIT_S)


@host_only
def test_a_progress_bar_is_drawn(daemon, path):
    pytest.importorskip("tqdm")
    r = daemon.run(f"import bfcd\nbfcd.weights({str(path)!r}, progress=True)")
    assert r.returncode == 0 and "model.safetensors: 100%" in r.stderr


@gpu_only
def test_tensors_on_a_gpu_are_read_only(client, path):
    a = bfcd.weights(path, client)["a"]
    assert a.__cuda_array_interface__["data"] == (a.block.ptr + a._offset, True)
    with pytest.raises(BufferError, match="read-only"):
        a.__dlpack__()


@host_only
def test_torch_tensors_share_the_memory(daemon, path):
    pytest.importorskip("torch")
    r = daemon.run(
        f"""
import bfcd, torch, numpy
client = bfcd.connect()
got = bfcd.weights({str(path)!r}, client, framework="torch")
wanted = bfcd.weights({str(path)!r}, client)
for name, t in got.items():
    assert (t.numpy() == wanted[name]).all() and tuple(t.shape) == wanted[name].shape, name
    assert t.numel() == 0 or t.data_ptr() == wanted[name].ctypes.data, name
"""
    )
    assert r.returncode == 0, r.stderr
