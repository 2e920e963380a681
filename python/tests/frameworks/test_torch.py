# Real PyTorch on the fake CUDA runtime (tests/fake_cudart), whose kernels do nothing: memory, copies, streams, graphs
# and errors are real. scripts/test-frameworks runs it.
#
# SPDX-License-Identifier: Apache-2.0
import gc
import subprocess
import sys

import bfcd
import pytest
from conftest import LIMIT_S, MIB, about_gpus, wait_for

pytest.importorskip("torch")
pytestmark = about_gpus

INSTALL = "import torch, bfcd, bfcd.torch\nbfcd.torch.install()\n"
POOL = "import torch, bfcd, bfcd.torch\npool = bfcd.torch.pool()\n"
REFUSED = """
import bfcd.torch
try:
    bfcd.torch.install()
except bfcd.torch.CompilerError as e:
    print(e)
else:
    raise SystemExit("no error")
"""
MODES = {"pool": POOL + "scope = pool\n", "install": INSTALL + "import contextlib\nscope = contextlib.nullcontext()\n"}


def run(daemon, program, **environment):
    r = subprocess.run(
        [sys.executable, "-c", program],
        env=daemon.environment() | environment,
        text=True,
        capture_output=True,
        timeout=LIMIT_S,
    )
    assert r.returncode == 0, r.stdout + r.stderr
    return r


@pytest.fixture(params=MODES)
def mode(request):
    return MODES[request.param]


def test_tensors_are_in_bfcds_memory(daemon, mode):
    run(
        daemon,
        mode
        + """
y = torch.arange(5 << 20, dtype=torch.uint8)
with scope:
    x = torch.empty(5 << 20, dtype=torch.uint8, device="cuda")
    x.copy_(y)
    z = torch.empty_like(x)
    z.copy_(x)
assert torch.equal(z.cpu(), y)
assert bfcd.default().bytes_in_use() >= 10 << 20
assert bfcd.default().tenant_stats()["bytes_in_use"] >= 10 << 20
""",
    )


def test_statistics_are_pytorchs_in_a_pool(daemon):
    run(
        daemon,
        POOL
        + """
with pool:
    x = torch.empty(5 << 20, dtype=torch.uint8, device="cuda")
    y = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() == 8 << 20
    del y
    assert torch.cuda.memory_allocated() == 5 << 20
    assert torch.cuda.max_memory_allocated() == 8 << 20
    assert bfcd.default().bytes_in_use() >= torch.cuda.memory_reserved() > 0
""",
    )


def test_over_quota_is_an_error_and_the_next_allocation_works(daemon, mode):
    kind = "torch.OutOfMemoryError" if "pool" in mode else "RuntimeError"
    r = run(
        daemon,
        mode
        + f"""
with scope:
    try:
        torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
    except {kind} as e:
        print(e)
    else:
        raise SystemExit("no error")
    x = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    x.copy_(torch.ones(1 << 20, dtype=torch.uint8))
    assert int(x.cpu().sum()) == 1 << 20
""",
    )
    sentence = "tenant 'me' asked for more than its limit"
    assert sentence in (r.stderr if "pool" in mode else r.stdout)


def test_an_allocation_waits(daemon, mode):
    run(
        daemon,
        mode
        + """
import threading
other = bfcd.connect()
block = other.malloc(60 << 20, wait=0)
threading.Timer(0.3, block.free).start()
with scope:
    x = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
""",
        BFC_WAIT_MS="600000",
    )


ONE_EXTENT = {
    "pool": "import torch, bfcd, bfcd.torch\nscope = bfcd.torch.pool(one_extent=True)\n",
    "install": "import torch, bfcd, bfcd.torch, contextlib\nbfcd.torch.install(one_extent=True)\n"
    "scope = contextlib.nullcontext()\n",
}


@pytest.mark.parametrize("kind", ONE_EXTENT)
def test_tensors_in_one_extent(daemon, kind):
    # Free memory begins in the middle of an extent: without the flag a block begins there, and spans two.
    run(
        daemon,
        ONE_EXTENT[kind]
        + """
client = bfcd.connect(cache=False)
first, second, third = client.malloc(1 << 20), client.malloc(5 << 20), client.malloc(2 << 20)
second.free()
with scope:
    x = torch.empty(SIZE, dtype=torch.uint8, device="cuda")
own = bfcd.default()
info = bfcd._library.BlockInfo()
assert bfcd._library.lib.bfc_block_info(own._handle, x.data_ptr(), info) == 0
assert info.extent_offset + info.n_bytes <= info.extent_bytes, (info.extent_offset, info.n_bytes)
""".replace("SIZE", "1 << 20" if kind == "pool" else "2 << 20"),  # a pool takes a segment of 2 MiB
    )


def test_tensors_that_other_streams_use(daemon, mode):
    run(
        daemon,
        mode
        + """
other = torch.cuda.Stream()
for i in range(2000):
    with scope, torch.cuda.stream(other):
        x = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    x.record_stream(torch.cuda.default_stream())
    del x
    if i % 20 == 19:
        torch.cuda.empty_cache()
torch.cuda.synchronize()
assert bfcd.default().tenant_stats()["peak_bytes_reserved"] <= 64 << 20
""",
    )


def test_a_graph_in_a_pool(daemon):
    run(
        daemon,
        POOL
        + """
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, pool=pool.mem_pool.id):
    x = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
graph.replay()
torch.cuda.synchronize()
assert bfcd.default().bytes_in_use() >= 1 << 20
del x, graph
""",
    )


def test_empty_cache_gives_memory_back(daemon, mode):
    run(
        daemon,
        mode
        + """
with scope:
    x = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
assert bfcd.default().tenant_stats()["bytes_reserved"] >= 8 << 20
del x
scope = pool = None
torch.cuda.synchronize()
torch.cuda.empty_cache()
assert bfcd.default().tenant_stats()["bytes_in_use"] == 0
""",
    )


def test_a_data_loader_with_workers(daemon, mode):
    run(
        daemon,
        mode
        + """
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.arange(64.0))
seen = 0
with scope:
    for (batch,) in DataLoader(data, batch_size=8, num_workers=2, pin_memory=True):
        x = torch.empty(8, device="cuda")
        x.copy_(batch, non_blocking=True)
        seen += float(x.cpu().sum())
assert seen == 2016
""",
    )


def test_exit_while_a_thread_allocates(daemon):
    """The thread calls what PyTorch calls. PyTorch itself crashes with any allocator when a thread uses it at exit."""
    run(
        daemon,
        INSTALL
        + """
import ctypes, threading
from bfcd._library import lib
torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
lib.bfc_torch_malloc.restype = ctypes.c_void_p
lib.bfc_torch_malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
lib.bfc_torch_free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
lib.bfc_torch_free.restype = None
started = threading.Event()
def allocate():
    while True:
        p = lib.bfc_torch_malloc(1 << 20, 0, None)
        if p:
            lib.bfc_torch_free(p, 1 << 20, 0, None)
        started.set()
threading.Thread(target=allocate, daemon=True).start()
started.wait()
ctypes.CDLL(None).exit(0)  # the handlers of all libraries run while the thread continues
""",
    )


def test_a_killed_process_leaves_nothing(daemon, mode):
    run(
        daemon,
        mode
        + """
import os, threading
started = threading.Event()
def allocate():
    with scope:
        while True:
            torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
            started.set()
threading.Thread(target=allocate, daemon=True).start()
started.wait()
os._exit(0)
""",
    )
    with bfcd.connect(daemon.socket) as client:
        wait_for(lambda: client.tenant_stats()["bytes_reserved"] == 0, "return of the memory")


def test_install_after_a_tensor_is_refused(daemon):
    run(
        daemon,
        """
import torch, bfcd.torch
x = torch.empty(1, device="cuda")
try:
    bfcd.torch.install()
except RuntimeError as e:
    assert "allocator" in str(e), e
else:
    raise SystemExit("no error")
""",
    )


@pytest.mark.parametrize("compiler, words", [("no-such-compiler", "is not there"), ("false", "failed")])
def test_install_without_a_compiler_offers_the_pool(daemon, tmp_path, compiler, words):
    r = run(daemon, REFUSED, CXX=compiler, XDG_CACHE_HOME=str(tmp_path))
    assert compiler in r.stdout and words in r.stdout and "bfcd.torch.pool()" in r.stdout


def test_install_loads_no_code_that_others_can_write(daemon, tmp_path):
    (tmp_path / "bfcd").mkdir()
    (tmp_path / "bfcd").chmod(0o777)
    r = run(daemon, REFUSED, XDG_CACHE_HOME=str(tmp_path))
    assert "others can write" in r.stdout and str(tmp_path) in r.stdout


def test_a_device_array_is_a_tensor_without_a_copy(daemon):
    run(
        daemon,
        """
import gc, torch, bfcd
c = bfcd.default()
x = c.empty((3, 4), "float32")
for t in (torch.from_dlpack(x), torch.as_tensor(x, device="cuda")):
    assert t.shape == (3, 4) and t.data_ptr() == x.block.ptr and t.device.type == "cuda"
t.copy_(torch.arange(12.0).reshape(3, 4))
assert torch.equal(t.cpu(), torch.arange(12.0).reshape(3, 4))
del x
gc.collect()
assert c.bytes_in_use() == 256
del t
gc.collect()
assert c.bytes_in_use() == 0
""",
    )
