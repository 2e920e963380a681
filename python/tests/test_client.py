# Clients, blocks, statistics and errors, with a real daemon.
#
# SPDX-License-Identifier: Apache-2.0
import copy
import ctypes
import errno
import gc
import importlib.machinery
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import threading

import bfcd
import pytest
from bfcd import _interrupt
from conftest import DEVICE, LIMIT_S, MIB, collect_garbage, host_only, on_gpus_too, wait_for


def test_a_block_is_charged_until_it_is_freed(client):
    block = client.malloc(5 * MIB)
    assert client.bytes_in_use() == 5 * MIB
    assert block.nbytes == 5 * MIB
    del block
    assert client.bytes_in_use() == 0
    assert client.max_bytes_in_use() == 5 * MIB
    client.reset_peak()
    assert client.max_bytes_in_use() == 0


def test_a_freed_block_is_refused(client):
    block = client.malloc(MIB)
    block.free()
    block.free()
    for use in (block.info, block.read, lambda: block.write(b"x"), lambda: client.publish(block, "name")):
        with pytest.raises(ValueError, match="freed"):
            use()


def test_an_exception_inside_of_free_frees_once(client, monkeypatch):
    block = client.malloc(MIB)

    def interrupted(handle, ptr):
        assert real(handle, ptr) == 0
        raise KeyboardInterrupt

    real = bfcd._client._free
    monkeypatch.setattr(bfcd._client, "_free", interrupted)
    with pytest.raises(KeyboardInterrupt):
        block.free()
    monkeypatch.undo()
    other = client.malloc(MIB)  # at the same address
    block.free()
    del block
    collect_garbage()
    assert other.info() and client.bytes_in_use() == MIB


def test_an_exception_inside_of_malloc_frees(client, monkeypatch):
    def interrupted(handle, n_bytes, ptr):
        assert real(handle, n_bytes, ptr) == 0
        raise KeyboardInterrupt

    real = bfcd._client._malloc
    monkeypatch.setattr(bfcd._client, "_malloc", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.malloc(MIB)
    assert client.bytes_in_use() == 0


@on_gpus_too
def test_bytes_are_read_and_written_inside_of_the_block_only(client):
    block = client.malloc(1000)
    block.write(b"hello", offset=995)
    assert block.read(5, 995) == b"hello"
    for offset, n in ((996, 5), (-1, 2), (0, 1001), (0, -1)):
        with pytest.raises(ValueError, match="not inside"):
            block.read(n, offset)
    with pytest.raises(ValueError, match="not inside"):
        block.write(b"hello", offset=996)


def test_over_quota_names_the_limit_and_the_sessions(client):
    block = client.malloc(60 * MIB)
    with pytest.raises(bfcd.QuotaExceeded) as e:
        client.malloc(32 * MIB)
    assert isinstance(e.value, MemoryError) and isinstance(e.value, OSError)
    text = str(e.value)
    assert "tenant 'me'" in text and "asked 32.0 MiB" in text and f"pid {os.getpid()}" in text
    block.free()
    client.malloc(32 * MIB)


def test_a_full_partition_is_out_of_memory(daemon, client):
    with pytest.raises(MemoryError):
        client.malloc(200 * MIB, partition="infer")


@pytest.mark.parametrize(
    "call, kind, words",
    [
        (lambda c: c.malloc(0), bfcd.InvalidValue, ""),
        (lambda c: c.malloc(1, partition="nowhere"), bfcd.NotFound, "nowhere"),
        (lambda c: c.malloc(1, tag="x" * 32), bfcd.InvalidValue, "tag"),
        (lambda c: c.attach("nothing"), bfcd.NotFound, "nothing"),
        (lambda c: c.attach("nothing", wait=0.01), bfcd.Timeout, "nothing"),
        (lambda c: c.malloc(1, wait=-1), ValueError, "negative"),
        (lambda c: c.mem_get_info("nowhere"), bfcd.NotFound, "nowhere"),
        (lambda c: c.charge(1, partition="nowhere"), bfcd.NotFound, "nowhere"),
        (lambda c: c.charge(0), bfcd.InvalidValue, "0 bytes"),
        (lambda c: c.charge(-1), ValueError, "n_bytes"),
        (lambda c: c.charge(1 << 40), bfcd.QuotaExceeded, "limit"),
        (lambda c: c.uncharge(1), bfcd.InvalidValue, "charged"),
    ],
)
def test_errors_have_a_kind_and_a_sentence(client, call, kind, words):
    with pytest.raises(kind) as e:
        call(client)
    assert str(e.value) and words in str(e.value)


def test_no_daemon_is_an_error_that_names_the_socket(tmp_path):
    with pytest.raises(bfcd.Error) as e:
        bfcd.connect(tmp_path / "none.sock")
    assert "none.sock" in str(e.value)
    assert isinstance(e.value, (bfcd.NotFound, bfcd.Disconnected))


def test_statistics_agree(client):
    block = client.malloc(3 * MIB)
    s = client.memory_stats()
    assert s["bytes_in_use"] == s["allocated_bytes.all.current"] == 3 * MIB
    assert s["peak_bytes_in_use"] == s["allocated_bytes.all.peak"] == client.max_bytes_in_use()
    assert s["bytes_limit"] == client.bytes_limit() == 64 * MIB
    assert s["bytes_reserved"] == s["bytes_in_use"] + s["bytes_idle"]
    assert s["allocation.all.current"] == 1
    assert client.tenant_stats()["bytes_in_use"] >= 3 * MIB
    free, total = client.mem_get_info()
    assert total == 64 * MIB and free == 61 * MIB
    assert client.memory_stats("infer")["bytes_in_use"] == 0
    block.free()


def test_charges_count_as_reserved_memory(client):
    client.charge(3 * MIB + 1, wait=1)
    assert client.memory_stats()["bytes_direct"] == client.tenant_stats()["bytes_direct"] == 3 * MIB + 1
    assert client.tenant_stats()["bytes_reserved"] == 3 * MIB + 1
    assert client.mem_get_info()[0] <= 61 * MIB
    client.uncharge(3 * MIB + 1)
    assert client.tenant_stats()["bytes_reserved"] == 0


def test_a_trace_has_partitions_and_tags(daemon, tmp_path):
    trace = tmp_path / "job.csv"
    r = daemon.run(
        """
import bfcd
client = bfcd.default()
blocks = [client.malloc(3000, tag="weights"), client.malloc(5000, partition="infer", tag="kv"), client.malloc(7)]
""",
        BFC_TRACE=str(trace),
    )
    assert r.returncode == 0, r.stderr
    lines = [line.split(",") for line in trace.read_text().splitlines()]
    assert lines[0][:6] == ["id", "lower", "upper", "size", "partition", "tag"]
    assert [line[3:6] for line in lines[1:]] == [["3000", "train", "weights"], ["5000", "infer", "kv"], ["7", "train", ""]]


def test_idle_memory_goes_back(client):
    client.malloc(8 * MIB).free()
    assert client.memory_stats()["bytes_idle"] > 0
    client.empty_cache()
    assert client.memory_stats()["bytes_idle"] == 0
    wait_for(lambda: client.tenant_stats()["bytes_reserved"] == 0, "release of the memory")


class Finalized:
    """Uses a client and a block when it is finalized, which in a cycle is before or after the session's end."""

    def __init__(self, client, block, n_calls):
        self.client, self.block, self.n_calls = client, block, n_calls

    def __del__(self):
        for call in (
            lambda: self.client.malloc(1),
            lambda: self.client.malloc(1, tag="a"),
            lambda: self.client.attach("none"),
            lambda: self.client.publish(self.block, "name"),
            lambda: self.client.tenant,
            lambda: self.client.partition,
            lambda: self.client.forget("none"),
            self.client.devices,
            self.client.empty_cache,
            self.client.memory_stats,
            self.client.mem_get_info,
            self.client.reset_peak,
            self.client.shared,
            self.block.info,
            self.block.free,
        ):
            try:
                call()
            except (bfcd.Error, OSError, ValueError):
                pass
            self.n_calls[0] += 1  # a reference to the call would keep the cycle


def test_a_session_can_end_before_its_blocks(client, daemon):
    n_calls = [0]
    for order in (1, -1):
        c = bfcd.connect(daemon.socket)
        block = c.malloc(MIB)
        cycle = [c, block, Finalized(c, block, n_calls)][::order]
        cycle.append(cycle)
        assert client.tenant_stats()["num_sessions"] == 2
        del c, block, cycle
        collect_garbage()
        wait_for(lambda: client.tenant_stats()["num_sessions"] == 1, "end of the session")
    assert n_calls == [30]


def test_a_closed_client_refuses_and_its_blocks_live(client, daemon):
    c = bfcd.connect(daemon.socket)
    block = c.malloc(MIB)
    block.write(b"still")
    c.close()
    for call in (lambda: c.malloc(1), c.memory_stats, c.empty_cache, lambda: c.tenant):
        with pytest.raises(ValueError, match="closed"):
            call()
    assert "closed" in repr(c)
    assert block.read(5) == b"still"
    assert client.tenant_stats()["num_sessions"] == 2
    del block
    collect_garbage()
    wait_for(lambda: client.tenant_stats()["num_sessions"] == 1, "end of the session")


def test_a_request_waits_for_memory(client, daemon):
    other = bfcd.connect(daemon.socket)
    block = other.malloc(60 * MIB)
    got = []
    thread = threading.Thread(target=lambda: got.append(client.malloc(32 * MIB, wait=LIMIT_S)))
    thread.start()
    assert not got
    block.free()
    thread.join()
    assert got and got[0].nbytes == 32 * MIB


def test_ctrl_c_ends_a_wait(daemon):
    program = f"""
import bfcd, sys
c = bfcd.connect()
block = c.malloc(60 << 20)
try:
    print("waiting", flush=True)
    c.malloc(32 << 20, wait={LIMIT_S})
except KeyboardInterrupt:
    print("interrupted", c.bytes_in_use() == 60 << 20, flush=True)
"""
    p = subprocess.Popen([sys.executable, "-c", program], env=daemon.environment(), stdout=subprocess.PIPE, text=True)
    assert p.stdout.readline() == "waiting\n"
    p.send_signal(signal.SIGINT)
    assert p.stdout.readline() == "interrupted True\n"
    assert p.wait(LIMIT_S) == 0


def test_signals_do_not_extend_a_wait(monkeypatch):
    now, waits = [100.0], []
    options = bfcd._library.MallocOptions(wait_ms=1000)

    def call():
        waits.append(options.wait_ms)
        now[0] += 0.4
        return -errno.EINTR if len(waits) < 4 else 7

    monkeypatch.setattr(_interrupt.time, "monotonic", lambda: now[0])
    assert _interrupt.interruptible(call, options) == 7
    assert waits == [1000, 600, 200, 1]


def test_other_signals_do_not_end_a_wait(client, daemon):
    other = bfcd.connect(daemon.socket)
    block = other.malloc(60 * MIB)
    heard = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.set())

    def disturb():
        os.kill(os.getpid(), signal.SIGUSR1)
        heard.wait()
        block.free()

    thread = threading.Thread(target=disturb)
    thread.start()
    assert client.malloc(32 * MIB, wait=LIMIT_S).nbytes == 32 * MIB
    thread.join()
    signal.signal(signal.SIGUSR1, before)
    assert signal.set_wakeup_fd(-1) == -1


def test_blocks_are_published_and_attached(client, daemon):
    block = client.malloc(MIB, whole=True)
    block.write(b"weights")
    client.publish(block, "model")
    with pytest.raises(bfcd.Exists, match="model"):
        client.publish(client.malloc(MIB, whole=True), "model")
    other = bfcd.connect(daemon.socket)
    attached = other.attach("model")
    assert attached.nbytes == MIB and attached.read(7) == b"weights"
    block.free()
    assert other.attach("model").read(7) == b"weights"


def test_the_default_client_is_one_for_a_process(daemon):
    r = daemon.run(
        """
import bfcd
assert bfcd.default() is bfcd.default()
x = bfcd.default().malloc(1 << 20)
try:
    bfcd.trace("/tmp/never")
except RuntimeError as e:
    print(e)
"""
    )
    assert r.returncode == 0, r.stderr
    assert "connected already" in r.stdout


def test_a_trace_is_written(daemon, tmp_path):
    path = tmp_path / "job.csv"
    r = daemon.run(f"import bfcd\nbfcd.trace({str(path)!r})\nb = bfcd.default().malloc(1000)\nb.free()")
    assert r.returncode == 0, r.stderr
    assert len(path.read_text().splitlines()) == 2


def test_blocks_may_be_left_at_the_end(daemon):
    r = daemon.run(
        """
import bfcd, threading
c = bfcd.connect()
blocks = [c.malloc(1 << 20) for _ in range(10)]
def allocate():
    while True:
        c.malloc(4096)
threading.Thread(target=allocate, daemon=True).start()
"""
    )
    assert (r.returncode, r.stderr) == (0, "")


@host_only
def test_a_forked_child_connects_by_itself(daemon):
    r = daemon.run(
        """
import bfcd, os, gc
c = bfcd.default()
block = c.malloc(1 << 20)
block.write(b"parent")
pid = os.fork()
if pid == 0:
    try:
        c.malloc(1)
    except bfcd.Forked:
        own = bfcd.default().malloc(1 << 20)
        own.write(b"child")
        del block, c
        gc.collect()
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
assert block.read(6) == b"parent"
"""
    )
    assert r.returncode == 0, r.stderr


@host_only
def test_multiprocessing_workers_allocate(daemon):
    r = daemon.run(
        """
import bfcd, multiprocessing
def work(n):
    return bfcd.default().malloc(n).nbytes
if __name__ == "__main__":
    bfcd.default().malloc(1000)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(pool.map(work, [1000, 2000, 3000]))
"""
    )
    assert r.returncode == 0, r.stderr
    assert r.stdout == "[1000, 2000, 3000]\n"


def test_many_threads_allocate(client):
    def work():
        for i in range(1, 2000):
            client.malloc(i)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert client.bytes_in_use() == 0


def test_the_import_is_quick(daemon):
    """By what is imported: typing and re take 10 to 20 ms each, and NumPy 100."""
    r = daemon.run("import sys\nbefore = set(sys.modules)\nimport bfcd\nprint(*set(sys.modules) - before)")
    assert r.returncode == 0, r.stderr
    slow = {"contextlib", "enum", "hashlib", "json", "numpy", "re", "signal", "socket", "subprocess", "threading", "typing"}
    assert not slow & set(r.stdout.split())


def test_all_names_are_there():
    for name in bfcd.__all__:
        assert getattr(bfcd, name) and name in dir(bfcd)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        bfcd.nothing


def test_a_library_that_is_not_there_is_named(daemon):
    r = daemon.run("import os\nos.environ['BFC_LIBRARY'] = '/nowhere.so'\nimport bfcd\nbfcd.Client")
    assert r.returncode == 1 and "/nowhere.so" in r.stderr and "ldconfig" in r.stderr


def test_a_wrong_default_wait_is_named(daemon):
    r = daemon.run("import os\nos.environ['BFC_WAIT_MS'] = 'long'\nimport bfcd\nbfcd.Client")
    assert r.returncode == 1 and "BFC_WAIT_MS is 'long'" in r.stderr


def test_destructors_run_no_python(client, daemon):
    """Python runs its signal handlers between bytecodes: an exception from one, as of Ctrl-C, would be lost there."""
    other = bfcd.connect(daemon.socket)
    with client.pool() as pool, other:
        other.on_pressure(print)
        dropped = [client.malloc(1), client.malloc(1, parkable=DEVICE != "cuda-ipc"), pool.malloc(1), client.pool()]
        dropped += [other._open, other.malloc(1)]
        other.close()
        calls = []
        sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
        dropped.clear()
        sys.setprofile(None)
        assert calls == []
        assert client.bytes_in_use() == 0 and not pool._blocks and not bfcd._client._pressed
        wait_for(lambda: client.tenant_stats()["num_sessions"] == 1, "end of the session")


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_has_one_owner_is_not_copied(client, how):
    block = client.malloc(4096)
    with client.pool() as pool:
        for owner, instead in ((block, "publish"), (client, "bfcd.connect"), (pool, "owner")):
            with pytest.raises(TypeError, match=instead):
                how(owner)
    assert client.bytes_in_use() == 4096


@pytest.mark.parametrize(
    "argv, module, name",
    [
        (["/a/train.py", "x"], None, "train.py"),
        (["/a/b.py"], "job.train.__main__", "job.train"),
        (["-c"], None, "python"),
        ([""], None, ""),
    ],
)
def test_sessions_have_the_names_of_programs(client, daemon, monkeypatch, argv, module, name):
    monkeypatch.setattr(sys, "argv", argv)
    spec = None if module is None else importlib.machinery.ModuleSpec(module, None)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    if argv == [""]:  # and the program has replaced its title
        title = ctypes.c_void_p.in_dll(ctypes.CDLL(None), "program_invocation_short_name")
        monkeypatch.setattr(title, "value", ctypes.cast(b"", ctypes.c_void_p).value)
        name = pathlib.Path("/proc/self/comm").read_text().strip()
    other = bfcd.connect(daemon.socket)
    block = other.malloc(60 * MIB)
    with pytest.raises(bfcd.QuotaExceeded, match=f"pid {os.getpid()}, {name}"):
        client.malloc(32 * MIB)
    block.free()


@host_only
def test_forked_children_have_the_arrays(daemon):
    r = daemon.run(
        """
import bfcd, os
clients = [bfcd.default(), bfcd.connect(), bfcd.connect(inherit=False)]
clients.insert(2, clients[1]._for_reading())
blocks = [c.malloc(4096) for c in clients]
views = [b.buffer() for b in blocks]
for i, view in enumerate(views):
    view[0] = i + 1
    pid = os.fork()
    if pid == 0:
        os._exit(view[0])
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    )
    assert (r.returncode, r.stdout.split()) == (0, ["1", "2", "3", str(-signal.SIGSEGV)]), r.stderr
