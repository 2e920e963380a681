# Unmodified PyTorch, CuPy, JAX and TensorFlow, which know nothing of bfcd, under `bfcctl run`: their own allocators get
# their memory from bfcd through the proxy of the driver (integrations/preload/). On the fake CUDA runtime; scripts/test-frameworks
# runs it. JAX and TensorFlow are in an environment of their own (BFC_MORE_FRAMEWORKS).
#
# SPDX-License-Identifier: Apache-2.0
import os
import pathlib
import re
import subprocess
import sys

import pytest
from conftest import LIMIT_S, about_gpus

pytestmark = about_gpus

PYTORCH = """
import torch
MIB = 1 << 20

def tensor(n_mib):
    return torch.empty(n_mib * MIB, dtype=torch.uint8, device="cuda")

def free_mib():
    return torch.cuda.mem_get_info()[0] // MIB

assert torch.cuda.mem_get_info() == (48 * MIB, 48 * MIB), torch.cuda.mem_get_info()
assert torch.cuda.get_device_properties(0).total_memory == 48 * MIB
x = tensor(20)
assert torch.cuda.memory_allocated() == 20 * MIB
assert free_mib() == 28, free_mib()
try:
    tensor(40)
except torch.OutOfMemoryError as e:
    print(e)
else:
    raise SystemExit("40 MiB beside 20 of 48")
x.fill_(7)
del x
torch.cuda.empty_cache()
assert free_mib() == 48, free_mib()
assert len([tensor(4) for _ in range(10)]) == 10
"""


# Prints the statistics of the default pool, which must not depend on bfcd.
CUPY = """
import cupy
MIB = 1 << 20
pool = cupy.get_default_memory_pool()
pool.set_limit(size=45 * MIB)

def array(n_mib):
    return cupy.empty(n_mib * MIB, dtype=cupy.uint8)

def statistics():
    print(pool.used_bytes() // MIB, pool.total_bytes() // MIB, pool.free_bytes() // MIB, pool.n_free_blocks())

x, y = array(20), array(3)
statistics()
x[...].data.memset(7, x.nbytes)
assert cupy.asnumpy(x[-2:]).tolist() == [7, 7]
try:
    array(23)
except cupy.cuda.memory.OutOfMemoryError as e:
    print(e)
else:
    raise SystemExit("23 MiB beside 23 of 45")
del x
statistics()
x = array(18)
statistics()
del x, y
pool.free_all_blocks()
statistics()
"""

# What bfcd says, under the limit of the lease.
CUPY_LEASE = """
import cupy
MIB = 1 << 20
pool = cupy.get_default_memory_pool()

def array(n_mib):
    return cupy.empty(n_mib * MIB, dtype=cupy.uint8)

def free_mib():
    return cupy.cuda.runtime.memGetInfo()[0] // MIB

assert cupy.cuda.runtime.memGetInfo() == (48 * MIB, 48 * MIB)
assert cupy.cuda.Device().mem_info == (48 * MIB, 48 * MIB)
x = array(20)
assert free_mib() == 28, free_mib()
try:
    array(40)
except cupy.cuda.memory.OutOfMemoryError as e:
    print(e)
else:
    raise SystemExit("40 MiB beside 20 of 48")
del x
assert free_mib() == 28, free_mib()
array(40)  # CuPy frees its idle blocks first
pool.free_all_blocks()
assert free_mib() == 48, free_mib()
pool.set_limit(fraction=0.5)
assert pool.get_limit() == 24 * MIB
"""

# JAX asks NVML, and takes three quarters of the GPU at its start. It looks for the device's file, which is not here.
JAX = """
import numpy
from jax._src import hardware_utils
hardware_utils.has_visible_nvidia_gpu = lambda: True
import jax
MIB = 1 << 20
gpu = jax.devices()[0]
assert gpu.platform == "gpu" and gpu.memory_stats()["bytes_limit"] == 36 * MIB, gpu.memory_stats()
x = jax.device_put(numpy.arange(5 * MIB, dtype=numpy.uint8), gpu)
assert (numpy.asarray(x) == numpy.arange(5 * MIB, dtype=numpy.uint8)).all()
try:
    jax.device_put(numpy.zeros(44 * MIB, numpy.uint8), gpu).block_until_ready()
except jax.errors.JaxRuntimeError as e:
    assert "RESOURCE_EXHAUSTED" in str(e), e
else:
    raise SystemExit("44 MiB beside 5 of 48")
"""

# As above, until it is refused; then it goes on.
JAX_GROWS = """
import numpy
from jax._src import hardware_utils
hardware_utils.has_visible_nvidia_gpu = lambda: True
import jax
MIB = 1 << 20
gpu = jax.devices()[0]

def array(value):
    return jax.device_put(numpy.full(4 * MIB, value, numpy.uint8), gpu).block_until_ready()

arrays = []
try:
    while len(arrays) < 20:
        arrays.append(array(len(arrays)))
except jax.errors.JaxRuntimeError as e:
    assert "RESOURCE_EXHAUSTED" in str(e), e
print(len(arrays) * 4)
assert all((numpy.asarray(a) == i).all() for i, a in enumerate(arrays))
del arrays[1::2]
arrays += [array(i) for i in range(3)]
"""

TENSORFLOW = """
import numpy, tensorflow
MIB = 1 << 20
assert len(tensorflow.config.list_physical_devices("GPU")) == 1
with tensorflow.device("/GPU:0"):
    x = tensorflow.constant(numpy.arange(5 * MIB, dtype=numpy.float32))
    assert "GPU:0" in x.device and (x.numpy() == numpy.arange(5 * MIB)).all()
    try:
        tensorflow.constant(numpy.zeros(12 * MIB, numpy.float32))
    except (tensorflow.errors.ResourceExhaustedError, tensorflow.errors.InternalError) as e:
        assert "Dst tensor is not initialized" in str(e), e
    else:
        raise SystemExit("48 MiB beside 20 of 44")
"""

RUNTIME = """
import sys
import static_runtime
assert "cudaMalloc" in static_runtime.redirect("cupy_backends.cuda.api.runtime", sys.argv[1])
"""


def run(daemon, program, *arguments, limit="48MiB", python=sys.executable, **environment):
    """Under bfcctl run, or without it: limit None."""
    bfcctl = os.environ["BFCCTL"]
    command = [bfcctl, "--socket", str(daemon.folder / "admin.sock"), "run", "--tenant", "me", "--partition", "train"]
    command += ["--limit", limit or "", "--"]
    paths = {
        "BFC_PRELOAD": str(pathlib.Path(bfcctl).resolve().parent.parent / "integrations/preload"),
        "PYTHONPATH": str(pathlib.Path(__file__).resolve().parent),
    }
    r = subprocess.run(
        (command if limit else []) + [python, "-c", program, *arguments],
        env=daemon.environment() | paths | environment,
        text=True,
        capture_output=True,
        timeout=LIMIT_S,
    )
    assert r.returncode == 0, r.stdout + r.stderr
    return r


@pytest.mark.parametrize("segments", ["", "expandable_segments:True"])
def test_own_allocator_of_pytorch(daemon, segments):
    pytest.importorskip("torch")
    r = run(daemon, PYTORCH, PYTORCH_CUDA_ALLOC_CONF=segments)
    assert "Tried to allocate 40.00 MiB. GPU 0 has a total capacity of 48.00 MiB of which 28.00 MiB is free" in r.stdout
    # Expandable segments have handles of 2 and 20 MiB, which are charged: a charge has a step more than they need.
    assert ("0 B in blocks" if segments else "40.0 MiB in blocks") in r.stderr, r.stderr
    assert "outside of bfcd" not in r.stderr, r.stderr
    assert re.search(r"peak 4[0-8]\.[0-9] MiB of 48.0 MiB", r.stderr), r.stderr


PYTORCH_NVML = """
import os, torch
MIB = 1 << 20
assert torch.cuda.is_available() and torch.cuda.device_count() == 1
assert not torch._C._cuda_isInBadFork()
pid = os.fork()  # which asking NVML leaves possible
if pid == 0:
    x = torch.empty(20 * MIB, dtype=torch.uint8, device="cuda")
    try:
        torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as e:
        print(e, flush=True)
    os._exit(torch.cuda.mem_get_info() != (28 * MIB, 48 * MIB))
assert os.waitpid(pid, 0)[1] == 0
"""


def nvml(daemon):
    """A fake NVML with a GPU; the environment for it."""
    path = daemon.folder / "nvml"
    path.write_text("GPU-00000000-1111-2222-3333-444444444444\n")
    build = pathlib.Path(os.environ["BFCCTL"]).resolve().parent.parent
    folders = [os.environ["LD_LIBRARY_PATH"], str(build / "tests" / "fake_nvml"), str(build / "fake_cudart")]
    return {"LD_LIBRARY_PATH": ":".join(folders), "FAKE_NVML": str(path)}


def test_pytorch_with_nvml(daemon):
    pytest.importorskip("torch")
    r = run(daemon, PYTORCH_NVML, PYTORCH_NVML_BASED_CUDA_CHECK="1", **nvml(daemon))
    assert "GPU 0 has a total capacity of 48.00 MiB of which 28.00 MiB is free" in r.stdout


def run_cupy(daemon, program, limit="48MiB"):
    pytest.importorskip("cupy")
    runtime = os.environ["LD_PRELOAD"].split()[0]
    return run(daemon, RUNTIME + program, runtime, limit=limit, LD_PRELOAD="")


def test_default_pool_of_cupy_is_as_without_bfcd(daemon):
    with_bfcd, without = run_cupy(daemon, CUPY), run_cupy(daemon, CUPY, limit=None)
    assert with_bfcd.stdout == without.stdout
    lines = with_bfcd.stdout.splitlines()
    assert lines[0] == "23 23 0 0" and lines[2:] == ["3 23 20 1", "21 23 2 1", "0 0 0 0"], lines
    assert "(allocated so far: 24,117,248 bytes, limit set to: 47,185,920 bytes)" in lines[1]
    assert "23.0 MiB in blocks" in with_bfcd.stderr and "0 B left" in with_bfcd.stderr, with_bfcd.stderr


def test_default_pool_of_cupy_at_the_limit(daemon):
    r = run_cupy(daemon, CUPY_LEASE)
    assert "Out of memory allocating 41,943,040 bytes (allocated so far: 20,971,520 bytes)" in r.stdout
    assert "40.0 MiB in blocks" in r.stderr and "outside of bfcd" not in r.stderr, r.stderr


def run_more(daemon, package, program, **environment):
    python = pathlib.Path(os.environ.get("BFC_MORE_FRAMEWORKS", "/nowhere")) / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{package} is not installed: scripts/test-frameworks --more")
    return run(daemon, program, python=str(python), LD_PRELOAD="", **nvml(daemon), **environment)


# 115: the GPU has memory pools. 128: it knows fabric handles, which no memory gets.
@pytest.mark.parametrize("allocator, blocks", [("default", "36.0 MiB"), ("cuda_async", "36.0 MiB")])
@pytest.mark.parametrize("attributes", ["115=1", "115=1,128=1"])
def test_start_of_jax(daemon, allocator, blocks, attributes):
    variables = {"JAX_PLATFORMS": "cuda", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "FAKE_CUDA_ATTRIBUTES": attributes}
    r = run_more(daemon, "JAX", JAX, XLA_PYTHON_CLIENT_ALLOCATOR=allocator, BFC_STRICT="1", **variables)
    assert f", {blocks} in blocks" in r.stderr and "outside of bfcd" not in r.stderr, r.stderr


# 122: a stream can write 64 bits, by which XLA sees what it may free. default is XLA's BFC in three quarters of the limit,
# and the others ask for each array. vmm gives itself three quarters, too.
@pytest.mark.parametrize("strict", ["0", "1"])
@pytest.mark.parametrize("allocator, least", [("default", 28), ("platform", 40), ("cuda_async", 40), ("vmm", 32)])
def test_jax_grows(daemon, allocator, least, strict):
    variables = {"JAX_PLATFORMS": "cuda", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    variables |= {"FAKE_CUDA_ATTRIBUTES": "115=1,122=1", "XLA_PYTHON_CLIENT_ALLOCATOR": allocator, "BFC_STRICT": strict}
    r = run_more(daemon, "JAX", JAX_GROWS, **variables)
    assert least <= int(r.stdout) <= 48, r.stdout
    # Without its figure in blocks: what XLA asks cuMemCreate for in small pieces is charged.
    assert re.search(r"peak [2-4][0-9]\.[0-9] MiB of 48.0 MiB", r.stderr) and "outside of bfcd" not in r.stderr, r.stderr
    print(f"JAX, {allocator}, strict {strict}: {int(r.stdout)} MiB; {r.stderr.splitlines()[-1]}")


def test_start_of_tensorflow(daemon):
    r = run_more(daemon, "TensorFlow", TENSORFLOW, TF_DEVICE_MIN_SYS_MEMORY_IN_MB="4", TF_CPP_MIN_LOG_LEVEL="0")
    assert "44.0 MiB in blocks" in r.stderr and "outside of bfcd" not in r.stderr, r.stderr
