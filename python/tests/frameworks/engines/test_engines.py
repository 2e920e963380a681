# Allocators of real engines that map memory themselves, on the fake driver, the fake runtime and the fake NVML, alone and
# under `bfcctl run`: vLLM's CuMemAllocator, torch-memory-saver (SGLang's), PyTorch's own with expandable segments, and
# kvcached. scripts/test-frameworks --engines runs it.
#
# SPDX-License-Identifier: Apache-2.0
import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time

import pytest
from conftest import MIB, Daemon, wait_for

LIMIT_S = 600  # the import of vLLM takes a while
DEVICE_MIB = 4096
LEASE_MIB = 1024
TENSOR_MIB = 21

# Some of these are smaller than what bfcd lends, some are larger.
BEGIN = """
import json, torch
MIB = 1 << 20
SIZES = (4, 20, 33, 64)

def tensor(n_mib):
    return torch.empty(n_mib * MIB, dtype=torch.uint8, device="cuda")

def show(what):
    free, total = torch.cuda.mem_get_info()
    print(json.dumps([what, free // MIB, total // MIB]), flush=True)

def fill():
    source = [torch.randint(0, 255, (w.numel(),), dtype=torch.uint8) for w in weights]
    for w, s in zip(weights, source):
        w.copy_(s)
    return source, [w.data_ptr() for w in weights]

def check(source, pointers):
    assert pointers == [w.data_ptr() for w in weights]
    assert all(torch.equal(w.cpu(), s) for w, s in zip(weights, source))
"""

VLLM = """
from vllm.device_allocator.cumem import CuMemAllocator
allocator = CuMemAllocator.get_instance()
with allocator.use_memory_pool(tag="weights"):
    weights = [tensor(n) for n in SIZES]
with allocator.use_memory_pool(tag="kv_cache"):
    cache = tensor(256)
before = fill()
show("begin")
allocator.sleep(offload_tags=("weights",))
show("asleep")
allocator.wake_up(["weights"])
show("weights")
allocator.wake_up()
show("awake")
check(*before)
"""

# What it has after a refusal in its pool, and after another tensor beside the pool.
VLLM_REFUSED = """
from vllm.device_allocator.cumem import CuMemAllocator
allocator, kept = CuMemAllocator.get_instance(), []

def attempt(n_mib):
    try:
        kept.append(tensor(n_mib))
    except torch.OutOfMemoryError:
        pass
    show(len(kept))

with allocator.use_memory_pool(tag="weights"):
    attempt(64)
    attempt(8192)
    attempt(64)
attempt(64)
"""

SAVER = """
from torch_memory_saver import torch_memory_saver as saver
with saver.region(tag="weights", enable_cpu_backup=True):
    weights = [tensor(n) for n in SIZES]
with saver.region(tag="kv_cache"):
    cache = tensor(256)
before = fill()
show("begin")
saver.pause("weights")
saver.pause("kv_cache")
show("asleep")
saver.resume("weights")
show("weights")
saver.resume("kv_cache")
show("awake")
check(*before)
"""

# One of two. It is told by lines, and answers each with a line of JSON, on what was its standard output.
ENGINE = """
import contextlib, os, random, select, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
kind, kept = sys.argv[1], []
pool = contextlib.nullcontext

def make():
    return tensor(TENSOR_MIB)

if kind == "vllm":
    from vllm.device_allocator.cumem import CuMemAllocator
    allocator = CuMemAllocator.get_instance()
    pool = lambda: allocator.use_memory_pool(tag="weights")
elif kind == "torch-memory-saver":
    from torch_memory_saver import torch_memory_saver as saver
    pool = lambda: saver.region(tag="weights", enable_cpu_backup=True)
torch.cuda.init()

def take(n_mib):
    "Until it has n_mib, or until it is refused. Which error it was, and what it has."
    with pool():
        try:
            while (len(kept) + 1) * TENSOR_MIB <= n_mib:
                kept.append(make())
        except Exception as e:
            return [type(e).__name__, len(kept) * TENSOR_MIB]
    return [None, len(kept) * TENSOR_MIB]

def again():
    "Frees one, and gets another one."
    kept.pop()
    with pool():
        kept.append(make())

def sleep():
    global before
    before = [w.cpu() for w in kept[::10]], [w.data_ptr() for w in kept]
    allocator.sleep(offload_tags=("weights",)) if kind == "vllm" else saver.pause("weights")

def wake():
    allocator.wake_up() if kind == "vllm" else saver.resume("weights")
    assert [w.data_ptr() for w in kept] == before[1]
    assert all(torch.equal(w.cpu(), b) for w, b in zip(kept[::10], before[0]))

def fill():
    for i, w in enumerate(kept[::10]):
        w.copy_(torch.full((w.numel(),), i + 1, dtype=torch.uint8))

def free():
    return torch.cuda.mem_get_info()[0] // MIB

if kind == "kvcached":
    exec(KVCACHED)
print("ready", file=answers, flush=True)
for line in sys.stdin:
    function, *arguments = line.split()
    print(json.dumps(globals()[function](*map(int, arguments))), file=answers, flush=True)
if kind == "kvcached":
    shutdown_kvcached()
"""

# Pages of 2 MiB, eight at a time: a key and a value in each of four layers, with addresses for 1 GiB, as the GPU seems to have.
KVCACHED_ENGINE = """
from kvcached.integration.vllm.interfaces import alloc_kv_cache, init_kvcached, shutdown_kvcached
from kvcached.kv_cache_manager import KVCacheManager
TENSOR_MIB, n_layers = 16, 4
torch.cuda.set_device(0)
init_kvcached(tp_rank=0, world_size=1, is_worker=True, async_sched=False)
alloc_kv_cache(kvcache_shape=(2, 8192, 16, 8, 64), block_size=16, dtype=torch.float16, device="cuda:0", num_layers=n_layers)
manager = KVCacheManager(num_blocks=8192, block_size=16, cell_size=1024, num_layers=n_layers, world_size=1)
manager._wait_post_init()

def make():
    blocks = manager.alloc(128)
    if blocks is None:
        raise torch.OutOfMemoryError
    return blocks

def again():
    manager.free(kept.pop())
    kept.append(make())

def sleep():
    "Its own sleep is that of its engine: all blocks are free, and their pages returned."
    global n_kept
    n_kept = len(kept)
    while kept:
        manager.free(kept.pop())
    manager.trim()

def wake():
    while len(kept) < n_kept:
        kept.append(make())

def fill():
    pass
"""

# Engines under one lease, as a job has them. Passes lines on, "0 take 400" to the first engine, and their answers back.
RELAY = """
import json, os, subprocess, sys
program, kinds = sys.argv[1], json.loads(sys.argv[2])
# kvcached's socket has the name of the process group, and two that begin at once take it from each other.
engines = [subprocess.Popen([sys.executable, "-c", program, kind], env=os.environ | variables, text=True, process_group=0,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE) for kind, variables in kinds]
for e in engines:
    assert e.stdout.readline() == "ready\\n"
print("ready", flush=True)
for line in sys.stdin:
    i, _, text = line.partition(" ")
    engines[int(i)].stdin.write(text)
    engines[int(i)].stdin.flush()
    answer = engines[int(i)].stdout.readline()
    assert answer, "an engine ended"
    print(answer, end="", flush=True)
for e in engines:
    e.stdin.close()
    assert e.wait() == 0
"""


def machine(monkeypatch, quota="3GiB", **settings):
    """A daemon on a machine of its own, with a GPU and NVML: a fixture yields from it."""
    state = pathlib.Path(tempfile.mkdtemp(prefix="fake-cuda-engines-", dir="/dev/shm"))
    (state / "nvml").write_text("GPU-fa4ec0da-0000-4000-8000-000000000001\n")
    nvml = {"FAKE_NVML": str(state / "nvml")}
    settings = nvml | {"FAKE_CUDA_STATE": str(state), "FAKE_CUDA_DEVICES": f"{DEVICE_MIB}MiB"} | settings
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    d = Daemon(train="3GiB, growth: on-demand", quota=quota)
    d.state = state
    d.preload = os.environ["BFC_FAKE_RUNTIME"]  # what the engines have preloaded in place of CUDA's libraries
    yield d
    d.stop()
    shutil.rmtree(state)


@pytest.fixture
def daemon(monkeypatch):
    yield from machine(monkeypatch, FAKE_CUDA_PEAK="1")


def command(daemon, program, *arguments, limit_mib, is_strict=False):
    """Under bfcctl run, or alone: limit_mib None."""
    run = [os.environ["BFCCTL"], "--socket", str(daemon.folder / "admin.sock"), "run", "--tenant", "me"]
    run += ["--partition", "train", "--limit", f"{limit_mib}MiB", *(["--strict"] if is_strict else []), "--"]
    return (run if limit_mib else []) + ["env", f"LD_PRELOAD={daemon.preload}", sys.executable, "-c", program, *arguments]


def environment(daemon):
    preload = str(pathlib.Path(os.environ["BFCCTL"]).resolve().parent.parent / "integrations/preload")
    return daemon.environment() | {"BFC_PRELOAD": preload}


# Behind a program with engine(step): an engine for each line, until it is killed.
FORKS = """
import json, os, sys, time

def timed(step):
    began = time.monotonic()
    step()
    return time.monotonic() - began

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        engine(line.strip())
    os.waitpid(pid, 0)
"""


def kill_in_steps(daemon, program, python_path, steps):
    """engine(step) of the program prints its pid and the seconds that the step took, and takes it once more. It is killed in it: 20
    times in each step, each a little later. Nothing stays charged."""
    import bfcd

    log = open(daemon.folder / "killed", "w+")
    process = subprocess.Popen(
        command(daemon, program + FORKS, limit_mib=None),
        env=environment(daemon) | {"PYTHONPATH": python_path},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
    )
    looker = bfcd.connect(daemon.socket)
    n_parked = []

    def charged(key):
        return [looker.tenant_stats(p)[key] for p in ("train", "parking")]

    def trimmed():
        trim = [os.environ["BFCCTL"], "--socket", str(daemon.folder / "admin.sock"), "trim", "me"]
        subprocess.run(trim, check=True, capture_output=True, timeout=LIMIT_S)
        return charged("bytes_reserved") == [0, 0]

    for i in range(40):
        print(steps[i % 2], file=process.stdin, flush=True)
        line = process.stdout.readline()
        assert line, (daemon.folder / "killed").read_text()
        pid, took = json.loads(line)
        time.sleep(took * (i // 2) / 20)  # only where in the step it dies depends on it
        os.kill(pid, signal.SIGKILL)
        n_parked.append(looker.tenant_stats("parking")["bytes_in_use"] // MIB)
        # Free memory stays with a tenant that has sessions until somebody needs it.
        wait_for(lambda: charged("bytes_in_use") == [0, 0], "return of the blocks")
        wait_for(trimmed, "return of the memory")
    process.stdin.close()
    assert process.wait(LIMIT_S) == 0
    process.stdout.close()
    log.close()
    looker.close()
    print(f"MiB in host memory at the kills: {n_parked}")


def run(daemon, program, *arguments, limit_mib, is_strict=False, **variables):
    r = subprocess.run(
        command(daemon, program, *arguments, limit_mib=limit_mib, is_strict=is_strict),
        env=environment(daemon) | variables,
        text=True,
        capture_output=True,
        timeout=LIMIT_S,
    )
    assert r.returncode == 0, r.stdout + r.stderr
    return r


def peak_mib(daemon):
    path = daemon.state / "peak-0"
    return int(path.read_text()) / MIB if path.exists() else 0


def mib_after(what, text):
    """Never less than it is: the text is rounded."""
    found = re.search(what + r" ([0-9]+)\.?([0-9]?) (B|KiB|MiB|GiB)", text)
    if not found or float(f"{found[1]}.{found[2]}0") == 0:
        return 0.0
    return (float(f"{found[1]}.{found[2]}0") + 0.05) * {"B": 1 / MIB, "KiB": 1 / 1024, "MiB": 1, "GiB": 1024}[found[3]]


def preload_of_saver():
    folder = pathlib.Path(importlib.util.find_spec("torch_memory_saver").origin).parent.parent
    return str(next(folder.glob("torch_memory_saver_hook_mode_preload_cu13.*so")))


@pytest.mark.parametrize("limit_mib, is_strict", [(None, False), (2048, False), (2048, True)])
@pytest.mark.parametrize("engine", ["vllm", "torch-memory-saver"])
def test_sleep_and_wake(daemon, engine, limit_mib, is_strict):
    """What the process may have is right at each step, and bytes and addresses at the end."""
    if engine == "torch-memory-saver":
        daemon.preload = f"{preload_of_saver()}:{daemon.preload}"
    r = run(daemon, BEGIN + (VLLM if engine == "vllm" else SAVER), limit_mib=limit_mib, is_strict=is_strict)
    total = limit_mib or DEVICE_MIB
    # PyTorch's segments: 20 (for 4), 20, 34 (for 33), 64 and 256 MiB.
    used = {"begin": 394, "asleep": 0, "weights": 138, "awake": 394}
    shown = [json.loads(line) for line in r.stdout.splitlines() if line.startswith("[")]
    assert shown == [[what, total - n, total] for what, n in used.items()]


@pytest.mark.parametrize("limit_mib, is_strict", [(None, False), (2048, False), (2048, True)])
def test_vllm_after_a_refusal(daemon, limit_mib, is_strict):
    """vLLM's allocator keeps the driver's error and gives nothing more, without bfcd, too."""
    r = run(daemon, BEGIN + VLLM_REFUSED, limit_mib=limit_mib, is_strict=is_strict)
    total = limit_mib or DEVICE_MIB
    shown = [json.loads(line) for line in r.stdout.splitlines() if line.startswith("[")]
    assert shown == [[n, total - 64 * n, total] for n in (1, 1, 1, 2)]


# ---- two in one lease ----


def device_mib(state):
    """What all processes have of the fake device: a file's name says its size."""
    return sum(int(p.name.split("-")[3]) for p in state.glob("mem-*")) // MIB


class Engines:
    """Engines of these kinds in one lease of LEASE_MIB."""

    def __init__(self, daemon, kinds, is_strict=False, program=None, **variables):
        own = {
            "expandable": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
            "torch-memory-saver": {"LD_PRELOAD": f"{preload_of_saver()}:{daemon.preload}"},
            "kvcached": {"KVCACHED_CONTIGUOUS_LAYOUT": "false", "KVCACHED_PAGE_PREALLOC_ENABLED": "false"}
            | {"KVCACHED_GPU_UTILIZATION": "1.0"},
        }
        program = program or BEGIN + f"TENSOR_MIB, KVCACHED = {TENSOR_MIB}, {KVCACHED_ENGINE!r}\n" + ENGINE
        list_of_kinds = json.dumps([(kind, own.get(kind, {})) for kind in kinds])
        arguments = [RELAY, program, list_of_kinds]
        self.process = subprocess.Popen(
            command(daemon, *arguments, limit_mib=LEASE_MIB, is_strict=is_strict),
            env=environment(daemon) | variables,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=open(daemon.folder / "engines", "w"),
        )
        self.log = daemon.folder / "engines"
        assert self.process.stdout.readline() == "ready\n", self.log.read_text()

    def tell(self, index, *words):
        print(index, *words, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        assert answer, self.log.read_text()
        return json.loads(answer)

    def end(self):
        """What bfcctl run says at the end."""
        self.process.stdin.close()
        assert self.process.wait(LIMIT_S) == 0, self.log.read_text()
        self.process.stdout.close()
        return self.log.read_text()


def variables_of(kinds, request):
    return {"PYTHONPATH": str(request.getfixturevalue("kvcached"))} if "kvcached" in kinds else {}


PAIRS = [
    ("plain", "plain"),
    ("expandable", "expandable"),
    ("plain", "expandable"),
    ("expandable", "plain"),
    ("vllm", "vllm"),
    ("torch-memory-saver", "torch-memory-saver"),
    ("torch-memory-saver", "vllm"),
    ("torch-memory-saver", "kvcached"),
    ("kvcached", "vllm"),
    ("kvcached", "kvcached"),
]


@pytest.mark.parametrize("is_strict", [False, True], ids=["normal", "strict"])
@pytest.mark.parametrize("kinds", PAIRS, ids="+".join)
def test_two_in_one_lease(daemon, request, kinds, is_strict):
    """One has some, the other takes what is left, and both are refused more."""
    e = Engines(daemon, kinds, is_strict, **variables_of(kinds, request))
    has = [e.tell(0, "take", 450)]
    assert has[0][0] is None and e.tell(1, "free") <= LEASE_MIB - has[0][1]
    has.append(e.tell(1, "take", 9999))
    has[0] = e.tell(0, "take", 9999)
    n_device, n_free = device_mib(daemon.state), [e.tell(i, "free") for i in (0, 1)]
    figures = f"{has[0][1]} and {has[1][1]} MiB in a lease of {LEASE_MIB} MiB, {n_device} MiB at the device, {n_free} free"
    print(figures)
    assert [error for error, _ in has] == ["OutOfMemoryError"] * 2, has
    assert LEASE_MIB - 3 * TENSOR_MIB <= has[0][1] + has[1][1] <= LEASE_MIB and n_device <= LEASE_MIB, figures
    assert max(n_free) <= LEASE_MIB - has[0][1] - has[1][1], figures
    for i, kind in enumerate(kinds):
        if kind != "vllm":  # whose allocator does not free a part of its pool
            e.tell(i, "again")
    assert "outside of bfcd" not in e.end()


@pytest.mark.parametrize("is_strict", [False, True], ids=["normal", "strict"])
@pytest.mark.parametrize("kind", ["vllm", "torch-memory-saver", "kvcached"])
def test_sleep_returns_memory_to_the_lease(daemon, request, kind, is_strict):
    """Each has more than half of it while the other one sleeps. At the end all its bytes are right."""
    e = Engines(daemon, (kind, kind), is_strict, **variables_of([kind], request))
    error, has = e.tell(0, "take", 630)
    assert error is None and has >= 610
    e.tell(0, "fill")
    assert e.tell(1, "free") <= LEASE_MIB - has
    e.tell(0, "sleep")
    assert device_mib(daemon.state) <= LEASE_MIB - has
    assert e.tell(1, "take", 630) == [None, has]
    e.tell(1, "fill")
    e.tell(1, "sleep")
    e.tell(0, "wake")
    e.tell(0, "sleep")
    e.tell(1, "wake")
    assert has <= device_mib(daemon.state) <= LEASE_MIB
    assert "outside of bfcd" not in e.end()


# ---- kvcached ----

PYTEST = "import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))"
# Those that use the GPU. One races with its own preallocation.
KVCACHED_TESTS = ["test_alloc_rollback.py", "test_kvcache_manager.py", "test_prealloc_gil_deadlock.py"]
RACES = "tests/test_kvcache_manager.py::test_basic_alloc_free"


@pytest.fixture(scope="session")
def kvcached(tmp_path_factory):
    """A copy of its sources with its library, compiled against the fake driver and the fake runtime."""
    if not os.environ.get("BFC_KVCACHED"):
        pytest.skip("BFC_KVCACHED names no folder with kvcached's sources")
    source, folder = pathlib.Path(os.environ["BFC_KVCACHED"]), tmp_path_factory.mktemp("kvcached")
    for name in ("csrc", "kvcached", "tests"):
        shutil.copytree(source / name, folder / name)
    torch = pathlib.Path(importlib.util.find_spec("torch").origin).parent
    driver, stubs = os.environ["LD_LIBRARY_PATH"].split(":")[:2]
    includes = [folder / "csrc/inc", torch / "include", torch / "include/torch/csrc/api/include"]
    includes += [sysconfig.get_paths()["include"], os.environ["BFC_CUDA_INCLUDE"]]
    libraries = [f"{driver}/libcuda.so.1", os.environ["BFC_FAKE_RUNTIME"].split(":")[0]]
    subprocess.run(
        ["g++", "-O1", "-w", "-shared", "-fPIC", "-std=c++20", "-DKVCACHED_USE_CUDA", "-DTORCH_EXTENSION_NAME=vmm_ops"]
        + ["-DTORCH_API_INCLUDE_EXTENSION_H", *map(str, sorted((folder / "csrc").glob("*.cpp")))]
        + [f"-I{i}" for i in includes]
        + [f"-L{torch}/lib", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10", "-lc10_cuda", *libraries]
        + [f"-Wl,-rpath-link,{stubs}", "-Wl,--allow-shlib-undefined", "-o", str(folder / "kvcached/vmm_ops.so")],
        check=True,
        timeout=LIMIT_S,
    )
    return folder


@pytest.mark.parametrize("limit_mib, is_strict", [(None, False), (2048, False), (2048, True)])
def test_kvcached(daemon, kvcached, limit_mib, is_strict):
    tests = [str(kvcached / "tests" / name) for name in KVCACHED_TESTS]
    arguments = ["-q", "-p", "no:cacheprovider", f"--rootdir={kvcached}", f"--deselect={RACES}", *tests]
    r = run(daemon, PYTEST, *arguments, limit_mib=limit_mib, is_strict=is_strict, PYTHONPATH=str(kvcached))
    used, counted = peak_mib(daemon), mib_after("peak", r.stderr)
    print(f"{r.stdout.splitlines()[-1]}; {used:.0f} MiB at the device, {counted:.0f} charged at most")
    assert used > 0 and "outside of bfcd" not in r.stderr, r.stderr
    if limit_mib:
        assert used <= counted, r.stderr
