# SGLang's memory saver with bfcd's memory, beside torch-memory-saver itself, on the fake driver and the fake runtime.
# scripts/test-frameworks --engines runs it.
#
# SPDX-License-Identifier: Apache-2.0
import json
import pathlib
import subprocess
import sys

import pytest

from test_engines import LEASE_MIB, LIMIT_S, Engines, device_mib, environment, kill_in_steps, machine, preload_of_saver, run

BEGIN = """
import json, os, random, signal, time, torch
from torch_memory_saver import configure_subprocess, torch_memory_saver as saver
MIB = 1 << 20

def pattern(n_bytes, first):
    return torch.arange(first, first + 256).to(torch.uint8).repeat(n_bytes // 256)

def filled(n_mib, first):
    x = torch.empty(n_mib * MIB, dtype=torch.uint8, device="cuda")
    return x.copy_(pattern(x.numel(), first))

def has(x, first):
    return torch.equal(x.cpu(), pattern(x.numel(), first))
"""

# What both of them print. KeyError of the program's own passes through a region.
SEQUENCE = (
    BEGIN
    + """
def show(*values):
    print(json.dumps(values), flush=True)

def misuse(what, *arguments, **words):
    try:
        result = what(*arguments, **words)
        with result if hasattr(result, "__enter__") else configure_subprocess():
            pass
    except Exception as e:
        show(type(e).__name__)
    else:
        show("no error")

with saver.region(tag="weights", enable_cpu_backup=True):
    weights = [filled(n, n) for n in (4, 20, 33)]
    with saver.disable():
        beside = filled(4, 9)
    weights.append(filled(5, 5))
    with saver.region("inner", True):
        inner = filled(3, 1)
    weights.append(filled(2, 2))
with saver.region(tag="kv_cache"):
    cache = filled(64, 0)
graph = torch.cuda.CUDAGraph()
with saver.cuda_graph(graph, tag="graph", pool=torch.cuda.graph_pool_handle()):
    made = torch.empty(MIB, dtype=torch.uint8, device="cuda")
tensors = [*weights, beside, inner, cache, made]
addresses = [x.data_ptr() for x in tensors]

def check():
    show(addresses == [x.data_ptr() for x in tensors], [has(w, n) for w, n in zip(weights, (4, 20, 33, 5, 2))], has(inner, 1))

check()
for tags in (["weights", "kv_cache"], ["weights"], ["graph"], ["inner", "weights"], [None]):
    for tag in tags:
        saver.pause(tag)
    show(has(beside, 9), "weights" in tags or None in tags or has(weights[2], 33))
    for tag in reversed(tags):
        saver.resume(tag)
    check()
    cache.copy_(pattern(cache.numel(), 0))
    show(has(cache, 0))
del weights[1], tensors[1], addresses[1]
saver.pause("weights")
saver.resume("weights")
show(has(weights[0], 4), has(weights[1], 33))

misuse(saver.pause, "unknown")
misuse(saver.resume, "unknown")
misuse(saver.pause, 5)
misuse(saver.region, None)
misuse(saver.region, enable_cpu_backup=True, enable_disk_backup=True)
misuse(saver.region, cpu_backup_backend="mmap")
misuse(saver.disable)
misuse(lambda: saver.hook_mode)
try:
    with saver.region("weights", True):
        raise KeyError
except KeyError:
    show("KeyError")
show(saver.enabled, saver.get_cpu_backup(weights[0]))
"""
)

# Where the original ends the process.
REFUSED = (
    BEGIN
    + """
with saver.region("weights", True):
    w = filled(4, 1)
for call, again in ((saver.resume, saver.pause), (saver.pause, saver.resume)):
    try:
        call("weights")
    except RuntimeError as e:
        assert "'weights'" in str(e), e
    else:
        raise SystemExit(f"no error: {call}")
    again("weights")
    if call is saver.resume:
        try:
            with saver.region("weights", True):
                raise SystemExit("a region of paused memory")
        except RuntimeError as e:
            assert "resume it" in str(e), e
assert has(w, 1)
for name in ("memory_margin_bytes", "retain_cpu_backup"):
    try:
        setattr(saver, name, 5)
    except NotImplementedError:
        pass
    else:
        raise SystemExit("no error: " + name)
"""
)

CHARGES = (
    BEGIN
    + """
import bfcd
def reserved(*wanted):
    "MiB in the partitions train and parking, when the daemon has released what is given back. Idle memory of the host is cached."
    end = time.monotonic() + 100
    while True:
        got = tuple(
            bfcd.default().tenant_stats(partition)[what] // MIB
            for partition, what in (("train", "bytes_reserved"), ("parking", "bytes_in_use"))
        )
        if got == wanted or time.monotonic() > end:
            assert got == wanted, (got, wanted)
            return
        time.sleep(0.01)

with saver.region("weights", True):
    weights = [filled(20, 1), filled(33, 2)]
with saver.region("kv_cache"):
    cache = filled(64, 3)
reserved(20 + 34 + 64, 0)
saver.pause("kv_cache")
reserved(54, 0)
saver.pause("weights")
reserved(0, 54)
saver.resume("weights")
reserved(54, 0)
assert has(weights[0], 1) and has(weights[1], 2)
saver.resume()
reserved(118, 0)

with saver.region("weights", True):
    more = filled(100, 4)                   # more than the host's partition has
with saver.region("kv_cache", True):
    kept = filled(20, 5)
addresses = [x.data_ptr() for x in (*weights, more, kept)]
cache.copy_(pattern(cache.numel(), 3))
for tag in ("weights", None):
    try:
        saver.pause(tag)
    except MemoryError as e:
        assert "parking" in str(e), e
    else:
        raise SystemExit("there was no room")
    assert addresses == [x.data_ptr() for x in (*weights, more, kept)]
    assert all(has(x, i) for x, i in zip((*weights, cache, more, kept), range(1, 6))), tag
saver.pause("kv_cache")
filler = bfcd.connect().malloc(2900 * MIB, wait=60)
try:
    saver.resume("kv_cache")
except MemoryError:
    pass
else:
    raise SystemExit("there was room")
filler.free()
saver.resume("kv_cache")
assert has(kept, 5)
"""
)

# One of two in a lease: it has some weights that are kept, and the more cache.
ENGINE = (
    BEGIN
    + """
import sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

def take(n_mib):
    global weights, cache, addresses
    try:
        with saver.region("weights", True):
            weights = filled(20, n_mib)
        with saver.region("kv_cache"):
            cache = torch.empty((n_mib - 20) * MIB, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        return None
    addresses = weights.data_ptr(), cache.data_ptr()
    return n_mib

def sleep():
    saver.pause()

def wake(n_mib):
    saver.resume()
    assert has(weights, n_mib) and addresses == (weights.data_ptr(), cache.data_ptr())

print("ready", file=answers, flush=True)
for line in sys.stdin:
    function, *arguments = line.split()
    print(json.dumps(globals()[function](*map(int, arguments))), file=answers, flush=True)
"""
)

FOLDER = str(pathlib.Path(__file__).resolve().parents[3] / "bfcd" / "_sglang")


def path(daemon):
    return FOLDER + ":" + daemon.environment()["PYTHONPATH"]


# It is forked before it uses CUDA.
KILLED = """
def engine(which):
    import torch
    from torch_memory_saver import torch_memory_saver as saver

    def tensor(n_mib):
        return torch.empty(n_mib << 20, dtype=torch.uint8, device="cuda")

    with saver.region("weights", True):
        weights = tensor(40).copy_(torch.arange(40 << 20).to(torch.uint8))
    with saver.region("kv_cache"):
        cache = tensor(64)
    took = {"pause": timed(saver.pause), "resume": timed(saver.resume)}
    assert torch.equal(weights.cpu(), torch.arange(40 << 20).to(torch.uint8))
    if which == "resume":
        saver.pause()
    print(json.dumps([os.getpid(), took[which]]), flush=True)
    saver.pause() if which == "pause" else saver.resume()
    time.sleep(1000)
"""


@pytest.fixture
def daemon(monkeypatch):
    yield from machine(monkeypatch)


def shown(r):
    return [json.loads(line) for line in r.stdout.splitlines() if line.startswith("[")]


def test_calls_have_the_same_effect_as_those_of_torch_memory_saver(daemon):
    of_bfcd = run(daemon, SEQUENCE, limit_mib=None, PYTHONPATH=path(daemon))
    daemon.preload = f"{preload_of_saver()}:{daemon.preload}"
    original = run(daemon, SEQUENCE, limit_mib=None)
    assert shown(of_bfcd) == shown(original)
    assert len(shown(original)) > 20


def test_misuse_is_an_error_and_changes_nothing(daemon):
    run(daemon, REFUSED, limit_mib=None, PYTHONPATH=path(daemon))


def test_bytes_are_charged_where_they_are(daemon):
    run(daemon, CHARGES, limit_mib=None, PYTHONPATH=path(daemon), BFC_WAIT_MS="100")


def test_two_in_one_lease_take_turns(daemon):
    e = Engines(daemon, ("bfcd", "bfcd"), program=ENGINE, PYTHONPATH=path(daemon))
    for i in (0, 1):
        assert e.tell(i, "take", 630) == 630
        assert device_mib(daemon.state) <= LEASE_MIB
        e.tell(i, "sleep")
    for i in (0, 1, 0):
        e.tell(i, "wake", 630)
        e.tell(i, "sleep")
    assert "outside of bfcd" not in e.end()


def test_kill_in_the_middle(daemon):
    kill_in_steps(daemon, KILLED, path(daemon), ("pause", "resume"))


def test_subprocesses_have_it_too(daemon, tmp_path):
    """Those that multiprocessing spawns, as SGLang does, of a module with `-m`."""
    (tmp_path / "server.py").write_text(
        "import multiprocessing, torch_memory_saver as t\n"
        "def scheduler(queue):\n"
        "    import torch_memory_saver as t\n"
        "    queue.put(t.TorchMemorySaver.__module__)\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    queue = context.Queue()\n"
        "    with t.configure_subprocess():\n"
        "        context.Process(target=scheduler, args=(queue,)).start()\n"
        "    print(t.TorchMemorySaver.__module__, queue.get())\n"
    )
    r = subprocess.run(
        [sys.executable, "-m", "bfcd.sglang", "-m", "server"],
        env=environment(daemon),
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=LIMIT_S,
    )
    assert r.stdout == "bfcd.sglang bfcd.sglang\n", r.stderr
