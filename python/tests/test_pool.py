# Pools that sleep and wake, and functions for the daemon's requests for memory.
#
# SPDX-License-Identifier: Apache-2.0
import contextlib
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import threading

import bfcd
import numpy
import pytest
from conftest import DEVICE, LIMIT_S, MIB, collect_garbage, gpu_only, host_only, on_gpus_too, wait_for

needs_parking = pytest.mark.skipif(DEVICE == "cuda-ipc", reason="handles cannot be parked")
pytestmark = needs_parking


def reserved(client, partition="train"):
    return client.tenant_stats(partition)["bytes_reserved"]


def settled(client, n_bytes, partition="train"):
    wait_for(lambda: reserved(client, partition) == n_bytes, f"{n_bytes} reserved bytes in {partition}")


@pytest.fixture
def pool(client):
    with client.pool(tag="weights") as p:
        yield p


@pytest.fixture
def place(client):
    """Where copies go."""
    return "infer" if DEVICE == "host" else "parking"


@on_gpus_too
def test_a_pool_sleeps_and_wakes_with_its_contents(client, pool, place):
    blocks = [pool.malloc(5 * MIB) for _ in range(3)]
    for i, block in enumerate(blocks):
        block.write(bytes([i + 1]) * 5 * MIB)
    addresses = [block.ptr for block in blocks]
    before = reserved(client)
    assert before >= 15 * MIB and not any(block.is_parked for block in blocks)
    pool.sleep()
    assert all(block.is_parked for block in blocks)
    settled(client, 0)
    assert reserved(client, place) >= 15 * MIB
    pool.sleep()
    pool.wake(wait=LIMIT_S)
    assert reserved(client) == before
    assert [block.ptr for block in blocks] == addresses
    assert [block.read() for block in blocks] == [bytes([i + 1]) * 5 * MIB for i in range(3)]


@on_gpus_too
def test_discarded_contents_are_lost_and_need_no_partition(client, pool, place):
    block = pool.malloc(4 * MIB)
    block.write(b"x" * MIB)
    pool.sleep(discard=True)
    settled(client, 0)
    assert reserved(client, place) == 0
    pool.wake(wait=LIMIT_S)
    assert block.read() == bytes(4 * MIB)


SHARER = """
import bfcd, sys
client = bfcd.connect()
block = client.attach("x", read_only=True)
print(block.read(4).decode(), flush=True)
for line in sys.stdin:
    if line == "park\\n":
        block.park()
    else:
        block.wake(wait=600)
    print(block.is_parked, flush=True)
"""


@on_gpus_too
def test_a_shared_block_is_parked_when_all_its_processes_agree(client, daemon, place):
    block = client.malloc(4 * MIB, parkable=True)
    block.write(b"text")
    client.publish(block, "x")
    command = [sys.executable, "-c", SHARER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=daemon.environment(), text=True, **pipes) as other:

        def ask(word):
            print(word, file=other.stdin, flush=True)
            return other.stdout.readline()

        assert other.stdout.readline() == "text\n"
        block.park(to=place)
        assert block.is_parked and reserved(client) == 4 * MIB and reserved(client, place) == 0
        with pytest.raises(bfcd.Parked):
            block.read(4)
        with pytest.raises(bfcd.Error):
            block.park()
        assert ask("park") == "True\n"
        settled(client, 0)
        assert reserved(client, place) >= 4 * MIB
        block.wake(wait=LIMIT_S)
        assert block.read(4) == b"text" and reserved(client) == 4 * MIB
        assert ask("wake") == "False\n"
        other.stdin.close()
        assert other.wait(LIMIT_S) == 0
    with pytest.raises(bfcd.NotFound, match="no-such"):
        block.park(to="no-such")
    block.free()
    for call in (block.park, block.wake):
        with pytest.raises(ValueError, match="freed"):
            call()


@on_gpus_too
def test_a_parked_block_gives_no_address(pool):
    block = pool.malloc(MIB)
    pool.sleep()
    uses = [block.read, lambda: block.write(b"x"), block._address]
    if DEVICE == "host":
        uses += [block.buffer, lambda: block.__array_interface__, lambda: numpy.asarray(block)]
    else:
        uses += [lambda: block.__cuda_array_interface__]
    for use in uses:
        with pytest.raises(bfcd.Parked, match="parked") as e:
            use()
        assert isinstance(e.value, bfcd.Busy)
    assert block.info()["partition"] == "train"
    pool.wake(wait=LIMIT_S)
    block.write(b"x")


def test_a_parked_device_array_gives_no_address(client, pool):
    # It is the same object on a GPU; here it is made by hand.
    array = bfcd.DeviceArray(pool.malloc(4 * MIB), (1024, 1024), numpy.dtype("float32"), 0)
    assert array.__cuda_array_interface__["data"][0] == array.block.ptr
    pool.sleep()
    for use in (lambda: array.__cuda_array_interface__, array.__dlpack__):
        with pytest.raises(bfcd.Parked, match="with pool.use"):
            use()
    pool.wake(wait=LIMIT_S)
    assert array.__cuda_array_interface__["data"][0] == array.block.ptr


@host_only
def test_arrays_of_a_pool(client, pool):
    x = pool.empty((1000, 1000))
    assert type(x) is type(client.empty(1)) and x.shape == (1000, 1000) and x.dtype == "float32"
    x[:] = 7
    view = x[5]
    pool.sleep()
    pool.wake(wait=LIMIT_S)
    assert float(view.sum()) == 7000 and float(x.sum()) == 7e6


@on_gpus_too
def test_memory_in_use_does_not_sleep(client, pool):
    first, second = pool.malloc(2 * MIB), pool.malloc(2 * MIB)
    first.write(b"first")
    second.write(b"second")
    pool.sleep()
    with pool.use(wait=LIMIT_S), pool.use(wait=1):
        assert not first.is_parked and first.read(5) == b"first"
        with pytest.raises(bfcd.Busy, match="in use") as e:
            pool.sleep()
        assert not isinstance(e.value, bfcd.Parked)
        assert second.read(6) == b"second"
    pool.sleep()
    assert first.is_parked and second.is_parked
    with pytest.raises(RuntimeError, match="inside"), pool.use(wait=LIMIT_S):
        raise RuntimeError("inside")
    pool.sleep()


@on_gpus_too
def test_a_failed_sleep_leaves_the_memory_awake(client, pool, place):
    blocks = [pool.malloc(20 * MIB) for _ in range(3)]
    other = client.malloc(100 * MIB, partition=place)
    with pytest.raises(MemoryError):
        pool.sleep(to=place)  # the first one has room
    assert not any(block.is_parked for block in blocks)
    other.free()


def test_a_wake_waits_for_room(daemon, client, pool):
    block = pool.malloc(40 * MIB)
    block.write(b"x" * 100)
    pool.sleep()
    with bfcd.connect(daemon.socket) as other:
        taken = other.malloc(40 * MIB)
        with pytest.raises(MemoryError):
            pool.wake()
        with pytest.raises(MemoryError), pool.use(wait=0.01):
            pass
        assert block.is_parked
        timer = threading.Timer(0.2, taken.free)
        timer.start()
        with pool.use(wait=LIMIT_S):
            assert block.read(100) == b"x" * 100
        timer.join()
        del taken


def test_leaving_a_pool_frees_what_is_left(client):
    with client.pool() as p:
        awake, gone = p.malloc(MIB), p.malloc(MIB)
        del gone
        assert client.memory_stats()["num_blocks"] == 1
    with pytest.raises(ValueError, match="freed"):
        awake.read()
    for use in (p.sleep, p.wake, lambda: p.malloc(1), lambda: p.empty(1)):
        with pytest.raises(ValueError, match="closed"):
            use()
    with client.pool() as p:
        parked = p.malloc(MIB)
        p.sleep()
    assert parked.ptr is None
    assert client.memory_stats()["num_blocks"] == 0


def test_two_pools_do_not_touch_each_other(client, pool):
    with pytest.raises(ValueError, match="'weights' already"):
        client.pool(tag="weights")
    with client.pool() as other:
        a, b = pool.malloc(MIB), other.malloc(MIB)
        pool.sleep()
        assert a.is_parked and not b.is_parked
        other.sleep()
        pool.wake(wait=LIMIT_S)
        assert b.is_parked and not a.is_parked
    client.pool(tag=other.tag).close()


@pytest.mark.parametrize(
    "call, kind, words",
    [
        (lambda p: p.sleep(to="nowhere"), bfcd.NotFound, "nowhere"),
        (lambda p: p.wake(wait=-1), ValueError, "negative"),
        (lambda p: p._client.pool(tag="x" * 32).malloc(1), bfcd.InvalidValue, "tag"),
    ],
)
def test_errors(pool, call, kind, words):
    block = pool.malloc(MIB)
    with pytest.raises(kind) as e:
        call(pool)
    assert words in str(e.value)
    assert not block.is_parked


@gpu_only
def test_copies_are_on_the_host(pool):
    block = pool.malloc(MIB)
    with pytest.raises(bfcd.InvalidValue, match="'infer' is on a GPU"):
        pool.sleep(to="infer")
    assert not block.is_parked


def test_without_another_partition_the_error_says_so(client, pool, monkeypatch):
    pool.malloc(MIB)
    monkeypatch.setattr(
        bfcd.Client, "devices", lambda c: bfcd.Devices([d for d in bfcd._devices.devices(c).logical if d.name == "train"], [])
    )
    with pytest.raises(bfcd.NotFound, match="no quota in a partition of host memory other than 'train'"):
        pool.sleep()


def test_blocks_have_the_tag_for_operators(daemon, client, pool):
    block = pool.malloc(2 * MIB)

    def ctl(*words):
        return subprocess.run(
            [os.environ["BFCCTL"], "--socket", daemon.folder / "admin.sock", *words],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )

    place = "infer" if DEVICE == "host" else "parking"
    r = ctl("park", "me", "--tag", "others", "--to", place)
    assert r.returncode == 0, r.stderr
    assert not block.is_parked
    r = ctl("park", "me", "--tag", "weights", "--to", place)
    assert r.returncode == 0, r.stderr
    wait_for(lambda: block.is_parked, "parked block")
    with pool.use(wait=LIMIT_S):
        assert not block.is_parked


# ---- pressure ----


def test_a_function_is_called_when_others_need_memory(daemon, client):
    calls, held = [], [client.malloc(40 * MIB)]

    def give(partition, n_bytes):
        calls.append((partition, n_bytes, threading.get_ident()))
        held.clear()

    client.on_pressure(give)
    with bfcd.connect(daemon.socket) as other:
        block = other.malloc(50 * MIB, wait=LIMIT_S)
        assert calls[0][0] == "train" and calls[0][1] > 0 and calls[0][2] != threading.get_ident()
        block.free()
    client.on_pressure(None)
    held.append(client.malloc(40 * MIB))
    n = len(calls)
    with bfcd.connect(daemon.socket) as other, pytest.raises(MemoryError):
        other.malloc(50 * MIB, wait=0.2)
    assert len(calls) == n


INTERRUPTED = """
import bfcd
def use():
    with pool.use(wait=600): pass
with bfcd.pool() as pool, bfcd.connect() as other:
    block = pool.malloc(40 << 20)
    block.write(b"kept")
    pool.sleep()
    full = other.malloc(40 << 20)
    for wait in (lambda: pool.wake(wait=600), use, lambda: block.wake(wait=600)):
        print("waits", flush=True)
        try:
            wait()
        except KeyboardInterrupt:
            print("ended", flush=True)
    full.free()
    with pool.use(wait=100):
        assert block.read(4) == b"kept"
"""


def test_ctrl_c_ends_a_wait_to_wake(daemon):
    admin = [os.environ["BFCCTL"], "--socket", str(daemon.folder / "admin.sock"), "--json", "waiting"]
    p = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED],
        env=daemon.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    )
    for _ in range(3):
        assert p.stdout.readline() == b"waits\n"
        wait_for(lambda: json.loads(subprocess.check_output(admin))["waiting"], "request that waits")
        p.send_signal(signal.SIGINT)
        while not select.select([p.stdout], [], [], 20)[0]:  # it came in the moment before the wait
            p.send_signal(signal.SIGINT)
        assert p.stdout.readline() == b"ended\n"
    assert p.communicate(timeout=LIMIT_S) == (b"", b"") and p.returncode == 0


def test_an_exception_is_reported_and_goes_no_further(daemon, client, monkeypatch):
    held, reports = [client.malloc(40 * MIB)], []
    monkeypatch.setattr(sys, "unraisablehook", reports.append)

    def give(partition, n_bytes):
        held.clear()
        raise KeyError("a bug")

    client.on_pressure(give)
    with bfcd.connect(daemon.socket) as other:
        other.malloc(50 * MIB, wait=LIMIT_S).free()
    wait_for(lambda: reports, "report")
    assert reports[0].exc_type is KeyError
    client.on_pressure(None)


def test_a_function_may_replace_itself_and_sleep(daemon, client, pool):
    block = pool.malloc(40 * MIB)
    block.write(b"kept")
    calls = []

    def first(partition, n_bytes):
        calls.append("first")
        client.on_pressure(second)

    def second(partition, n_bytes):
        calls.append("second")
        pool.sleep()

    client.on_pressure(first)
    with bfcd.connect(daemon.socket) as other:
        other.malloc(50 * MIB, wait=LIMIT_S).free()
    assert calls[:2] == ["first", "second"]
    client.on_pressure(None)
    with pool.use(wait=60):
        assert block.read(4) == b"kept"


def names_of_threads():
    for comm in pathlib.Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has ended
            yield comm.read_text().strip()


def test_the_last_reference_may_go_inside_of_the_function(daemon):
    client = bfcd.connect(daemon.socket)
    held = [client.malloc(40 * MIB)]
    state = [client, held]

    def give(partition, n_bytes):
        held.clear()
        state.clear()
        collect_garbage()

    client.on_pressure(give)
    del client
    with bfcd.connect(daemon.socket) as other:
        other.malloc(50 * MIB, wait=LIMIT_S).free()
        wait_for(lambda: other.tenant_stats()["num_sessions"] == 1, "end of the session")
        wait_for(lambda: "bfc-park" not in names_of_threads(), "end of its thread")


PRESSED = """
import bfcd, os, sys, threading, time
client = bfcd.default()
held = client.malloc(40 << 20)
started = threading.Event()
def give(partition, n_bytes):
    started.set()
    time.sleep(0.2)
    held.free()
    print("gave", flush=True)
bfcd.on_pressure(give)
"""


def test_the_interpreter_ends_while_the_function_runs(daemon):
    with bfcd.connect(daemon.socket) as other:
        p = subprocess.Popen(
            [sys.executable, "-c", PRESSED + 'print("ready", flush=True)\nstarted.wait()\n'],
            env=daemon.environment(),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert p.stdout.readline() == "ready\n"
        other.malloc(50 * MIB, wait=LIMIT_S).free()
        out, errors = p.communicate(timeout=LIMIT_S)
        assert (p.returncode, errors) == (0, "") and "gave" in out


def test_a_forked_child_has_no_function(daemon):
    r = daemon.run(
        PRESSED
        + """
pid = os.fork()
if pid == 0:
    own = bfcd.default()
    assert own is not client and own._session.pressure_fn is None
    try:
        client.on_pressure(None)
    except bfcd.Forked:
        own.on_pressure(None)
        sys.exit(7)  # with all of the interpreter's end
    sys.exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
"""
    )
    assert r.returncode == 0, r.stderr
