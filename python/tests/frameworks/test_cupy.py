# bfcd's allocator with CuPy's own types. CuPy's CUDA runtime is linked statically and does not start on the fake driver,
# so its current device is given here, and its MemoryPool, which asks for that device itself, is not run. In
# test_unmodified.py it is.
#
# SPDX-License-Identifier: Apache-2.0
import pytest
from conftest import about_gpus

pytest.importorskip("cupy")
pytestmark = about_gpus

START = """
import gc, pickle, threading, cupy, bfcd, bfcd.cupy
from bfcd.cupy import Allocator
cupy.cuda.runtime.getDevice = lambda: 0
client = bfcd.default()
"""


def run(daemon, program, **environment):
    r = daemon.run(START + program, **environment)
    assert r.returncode == 0, r.stdout + r.stderr
    return r


def test_memory_is_bfcds_until_cupy_drops_it(daemon):
    run(
        daemon,
        """
p = bfcd.cupy.allocator()(1000)
assert isinstance(p, cupy.cuda.MemoryPointer) and p.device_id == 0 and p.mem.size == 1000
assert client.bytes_in_use() == 1024
q = p + 100
del p
gc.collect()
assert client.bytes_in_use() == 1024
del q
gc.collect()
assert client.bytes_in_use() == 0
assert bfcd.cupy.allocator()(0).ptr == 0
cupy.cuda.set_allocator(bfcd.cupy.allocator())
cupy.cuda.set_allocator(bfcd.cupy.pool().malloc)
""",
    )


def test_over_quota_is_cupys_error(daemon):
    r = run(
        daemon,
        """
allocate = bfcd.cupy.allocator()
try:
    allocate(100 << 20)
except cupy.cuda.memory.OutOfMemoryError as e:
    print(e)
    assert isinstance(e, MemoryError) and isinstance(e.__cause__, bfcd.QuotaExceeded)
    assert isinstance(e, cupy.cuda.runtime.CUDARuntimeError) and e.status == 2  # on which a pool frees its cache
    assert str(pickle.loads(pickle.dumps(e))) == str(e)
allocate(1000)
""",
    )
    assert "tenant 'me' asked for more than its limit" in r.stdout


def test_a_request_waits_and_below_a_pool_the_second_one(daemon):
    run(
        daemon,
        """
other = bfcd.connect()
block = other.malloc(60 << 20)
below_pool = Allocator(client, below_pool=True)
for size in (32 << 20, 33 << 20):
    try:
        below_pool(size)
    except bfcd.cupy.OutOfMemoryError:
        pass
    else:
        raise SystemExit("no error")
threading.Timer(0.2, block.free).start()
below_pool(33 << 20)
block = other.malloc(60 << 20, wait=0)
threading.Timer(0.2, block.free).start()
bfcd.cupy.allocator()(32 << 20)
""",
        BFC_WAIT_MS="600000",
    )
