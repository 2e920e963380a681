# Wrong arguments to what the package has for frameworks: each call has one of the outcomes that it may have, and nothing
# else comes to stderr. scripts/test-frameworks runs it.
#
# SPDX-License-Identifier: Apache-2.0
import importlib.util

import pytest
from conftest import about_gpus

pytestmark = about_gpus

BEGIN = """
import bfcd, gc, math, os, threading
import numpy as np
NUMBERS = (-1, 0, 2**31, 2**32, 2**63, 2**64, 2**64 + 4096, math.nan, math.inf, 1.5, np.int64(0), np.uint64(2**63), np.float64(0), None)
OTHERS = ("x", "", b"x", "a\\0b", object(), [], {}, (1,), type)
CLEAR = (TypeError, ValueError, OverflowError, MemoryError, bfcd.Error)
def outcomes(call, values=NUMBERS + OTHERS, also=()):
    for value in values:
        try:
            call(value)
        except CLEAR + also as e:
            assert str(e), (value, e)
        except Exception as e:
            raise SystemExit(f"{value!r}: {type(e).__name__}: {e}")
def refused(call, values, kind=CLEAR):
    for value in values:
        try:
            call(value)
        except kind as e:
            assert str(e), value
        else:
            raise SystemExit(f"{value!r} was taken")
def in_child(call):
    pid = os.fork()
    if pid == 0:
        try:
            call()
        except Exception as e:
            os._exit(0 if str(e) else 1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
def in_thread(call):
    errors = []
    def run():
        try:
            call()
        except BaseException as e:
            errors.append(e)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not errors, errors
"""
TORCH = """
import torch, bfcd.torch
new = lambda: torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
refused(lambda v: bfcd.torch.pool(parkable=True, tag=v), ("a\\0b", "x" * 32, b"x", 1, math.nan, [], object()))
outcomes(lambda v: bfcd.torch.pool(parkable=True, tag=v))
outcomes(lambda v: bfcd.torch.pool(tag=v))
gc.collect()
pool = bfcd.torch.pool(parkable=True, tag="")
with pool:
    x = new()
outcomes(lambda v: pool.wake(v))
outcomes(lambda v: pool.use(v).__enter__() and None)
for _ in range(40):
    bfcd._library.lib.bfc_use_end_tag(bfcd.default()._handle, b"")
refused(lambda v: pool.sleep(v), ("x", "a\\0b", b"x", -1, math.nan, "train"))
pool.sleep(discard=2**64)
pool.wake(wait=60)
refused(lambda v: pool.__exit__(), (0,), RuntimeError)
in_thread(lambda: pool.__enter__().__exit__())
in_child(lambda: pool.sleep())
in_child(lambda: pool.wake(1))
in_child(lambda: bfcd.torch.pool())
in_child(lambda: pool.__enter__())
in_child(lambda: pool.__exit__())
in_child(lambda: bfcd.torch.install())
in_child(lambda: torch.cuda.empty_cache())
refused(lambda v: bfcd.torch.install(), (0,), RuntimeError)     # there is a tensor
"""
RMM = """
import bfcd.rmm
refused(lambda v: bfcd.rmm.resource(v), (-1, 2**31, 2**32, 2**63, 2**64, math.nan, 1.5, "x", b"x", [], None))
refused(lambda v: bfcd.rmm.resource(client=v), ("x", 1, object()))
functions = bfcd.rmm._Functions(bfcd.default(), np.int64(0))
class Stream:
    def __cuda_stream__(self):
        return 0, 0
refused(lambda v: functions.allocate(v, Stream()), (-1, 2**63, 2**64, 2**64 + 4096, math.nan, "x", None))
assert functions.allocate(0, Stream()) == 0
refused(lambda v: functions.deallocate(v, 4096, Stream()), (-1, 1, 2**63, 2**64 + 1, "x", 1.5))
in_child(lambda: functions.allocate(4096, Stream()))
in_child(lambda: bfcd.rmm.resource())
client = bfcd.connect()
resource = bfcd.rmm.resource(0, client)
client.close()
refused(lambda v: resource.allocate(4096), (0,), RuntimeError)  # it comes through C++
"""
NUMBA = """
import bfcd.numba
from numba import cuda
cuda.set_memory_manager(bfcd.numba.MemoryManager)
context = cuda.current_context()
manager = context.memory_manager
refused(manager.memalloc, (-1, 2**63, 2**64, 2**64 + 4096, math.nan, "x", None, []))
manager.memalloc(0)
manager.memalloc(np.int64(4096))
in_thread(lambda: manager.memalloc(4096))
in_child(lambda: manager.memalloc(4096))
in_child(lambda: manager.get_memory_info())
"""
CUPY = """
import cupy, bfcd.cupy
cupy.cuda.runtime.getDevice = lambda: 0  # CuPy's own runtime does not start on the fake driver
for make in (bfcd.cupy.allocator, bfcd.cupy.pool):
    refused(make, ("x", 1, object()))
allocate = bfcd.cupy.allocator()
refused(allocate, (-1, 2**63, 2**64, 2**64 + 4096, math.nan, "x", None, []))
assert allocate(0).ptr == 0
allocate(np.int64(4096))
in_thread(lambda: allocate(4096))
in_child(lambda: allocate(4096))
client = bfcd.connect()
allocate = bfcd.cupy.allocator(client)
client.close()
refused(allocate, (4096,))
"""
EDGES = {"torch": TORCH, "rmm": RMM, "numba": NUMBA, "cupy": CUPY}


@pytest.mark.parametrize("framework", EDGES)
def test_wrong_arguments(daemon, framework):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    r = daemon.run(BEGIN + EDGES[framework] + "gc.collect()\n")
    assert (r.returncode, r.stdout, r.stderr) == (0, "", "")
