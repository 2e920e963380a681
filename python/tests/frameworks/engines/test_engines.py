# Allocators of real engines that map memory themselves, on the fake driver, the fake runtime and the fake NVML, alone and
# under `bfcctl run`: vLLM's CuMemAllocator, torch-memory-saver (SGLang's), PyTorch's own with expandable segments, and
# kvcached. scripts/test-frameworks --engines runs it.
#
# SPDX-License-Identifier: Apache-2.0
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile

import pytest
from conftest import MIB, Daemon

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

# One of two: when it is told, it allocates until it is refused, then frees one tensor and gets another.
ONE = """
import contextlib, sys
pool = contextlib.nullcontext
if sys.argv[1] == "vllm":
    from vllm.device_allocator.cumem import CuMemAllocator
    pool = lambda: CuMemAllocator.get_instance().use_memory_pool(tag="weights")
torch.cuda.init()
print("ready", flush=True)
input()
show("begin")
kept, error = [], None
with pool():
    try:
        while len(kept) < 1000:
            kept.append(tensor(TENSOR_MIB))
    except Exception as e:
        error = type(e).__name__
    if kept and sys.argv[1] != "vllm":  # whose allocator does not free a part of its pool
        kept.pop()
        kept.append(tensor(TENSOR_MIB))
print(json.dumps([error, len(kept) * TENSOR_MIB]), flush=True)
input()
"""

# Both under one lease, as a job with two engines. Prints what each got.
TWO = """
import json, os, subprocess, sys
one, allocators = sys.argv[1], sys.argv[2:]
def start(allocator):
    variables = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if allocator == "expandable" else {}
    return subprocess.Popen([sys.executable, "-c", one, allocator], env=os.environ | variables, text=True,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE)
def tell(process):
    process.stdin.write("\\n")
    process.stdin.flush()
engines = [start(a) for a in allocators]
for e in engines:
    assert e.stdout.readline() == "ready\\n"
for e in engines:
    tell(e)
    begin, got = json.loads(e.stdout.readline()), json.loads(e.stdout.readline())
    print(json.dumps({"free": begin[1], "error": got[0], "mib": got[1]}), flush=True)
sys.stdin.readline()  # both have what they got
for e in engines:
    tell(e)
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
    yield from machine(monkeypatch)


def command(daemon, program, *arguments, limit_mib):
    """Under bfcctl run, or alone: limit_mib None."""
    run = [os.environ["BFCCTL"], "--socket", str(daemon.folder / "admin.sock"), "run", "--tenant", "me"]
    run += ["--partition", "train", "--limit", f"{limit_mib}MiB", "--"]
    return (run if limit_mib else []) + ["env", f"LD_PRELOAD={daemon.preload}", sys.executable, "-c", program, *arguments]


def environment(daemon):
    preload = str(pathlib.Path(os.environ["BFCCTL"]).resolve().parent.parent / "preload")
    return daemon.environment() | {"BFC_PRELOAD": preload}


def run(daemon, program, *arguments, limit_mib, **variables):
    r = subprocess.run(
        command(daemon, program, *arguments, limit_mib=limit_mib),
        env=environment(daemon) | variables,
        text=True,
        capture_output=True,
        timeout=LIMIT_S,
    )
    assert r.returncode == 0, r.stdout + r.stderr
    return r


def preload_of_saver():
    folder = pathlib.Path(importlib.util.find_spec("torch_memory_saver").origin).parent.parent
    return str(next(folder.glob("torch_memory_saver_hook_mode_preload_cu13.*so")))


@pytest.mark.parametrize("limit_mib", [None, 2048])
@pytest.mark.parametrize("engine", ["vllm", "torch-memory-saver"])
def test_sleep_and_wake(daemon, engine, limit_mib):
    """What the process may have is right at each step, and bytes and addresses at the end."""
    if engine == "torch-memory-saver":
        daemon.preload = f"{preload_of_saver()}:{daemon.preload}"
    r = run(daemon, BEGIN + (VLLM if engine == "vllm" else SAVER), limit_mib=limit_mib)
    total = limit_mib or DEVICE_MIB
    # PyTorch's segments: 20 (for 4), 20, 34 (for 33), 64 and 256 MiB.
    used = {"begin": 394, "asleep": 0, "weights": 138, "awake": 394}
    shown = [json.loads(line) for line in r.stdout.splitlines() if line.startswith("[")]
    assert shown == [[what, total - n, total] for what, n in used.items()]


def device_mib(state):
    """What all processes have of the fake device: a file's name says its size."""
    return sum(int(p.name.split("-")[3]) for p in state.glob("mem-*")) // MIB


def run_two(daemon, *allocators):
    """What each got, when both had it, and what the device had given then."""
    one = BEGIN + f"TENSOR_MIB = {TENSOR_MIB}\n" + ONE
    process = subprocess.Popen(
        command(daemon, TWO, one, *allocators, limit_mib=LEASE_MIB),
        env=environment(daemon),
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    got = [json.loads(process.stdout.readline() or "null") for _ in allocators]
    n_device = device_mib(daemon.state)
    _, err = process.communicate("\n", timeout=LIMIT_S)
    assert process.returncode == 0 and None not in got, err
    return got, n_device


@pytest.mark.parametrize(
    "allocators",
    [
        ("plain", "plain"),
        ("expandable", "expandable"),
        ("plain", "expandable"),
        ("expandable", "plain"),
        ("vllm", "vllm"),
    ],
    ids="+".join,
)
def test_two_in_one_lease(daemon, allocators):
    got, n_device = run_two(daemon, *allocators)
    figures = f"{got[0]['mib']} and {got[1]['mib']} MiB in a lease of {LEASE_MIB} MiB, {n_device} MiB at the device"
    print(figures)
    assert all(g["error"] == "OutOfMemoryError" for g in got), got
    assert LEASE_MIB - 3 * TENSOR_MIB <= got[0]["mib"] <= LEASE_MIB, figures
    assert got[0]["mib"] + got[1]["mib"] <= LEASE_MIB and n_device <= LEASE_MIB, figures
    assert got[1]["free"] <= LEASE_MIB - got[0]["mib"], got


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


@pytest.mark.parametrize("limit_mib", [None, 2048])
def test_kvcached(daemon, kvcached, limit_mib):
    tests = [str(kvcached / "tests" / name) for name in KVCACHED_TESTS]
    arguments = ["-q", "-p", "no:cacheprovider", f"--rootdir={kvcached}", f"--deselect={RACES}", *tests]
    r = run(daemon, PYTEST, *arguments, limit_mib=limit_mib, PYTHONPATH=str(kvcached))
    print(r.stdout.splitlines()[-1], [line for line in r.stderr.splitlines() if "outside of bfcd" in line])
