# Real Numba with bfcd's memory manager, on the fake driver.
#
# SPDX-License-Identifier: Apache-2.0
import pytest
from conftest import DEVICE, about_gpus

pytest.importorskip("numba.cuda")
pytestmark = about_gpus

START = """
import gc, numpy, bfcd, bfcd.numba
from numba import cuda
cuda.set_memory_manager(bfcd.numba.MemoryManager)
"""


def run(daemon, program, **environment):
    r = daemon.run(program, **environment)
    assert r.returncode == 0, r.stdout + r.stderr
    return r


def test_arrays_are_in_bfcds_memory(daemon):
    run(
        daemon,
        START
        + """
x = numpy.arange(1000, dtype="float32")
d = cuda.to_device(x)
client = bfcd.default()
assert client.bytes_in_use() == 4096
assert (d.copy_to_host() == x).all()
info = cuda.current_context().get_memory_info()
assert (info.free, info.total) == client.mem_get_info()
view = d[10:20]
del d
gc.collect()
assert client.bytes_in_use() == 4096
del view
gc.collect()
assert client.bytes_in_use() == 0
""",
    )


def test_the_manager_is_found_by_the_environment(daemon):
    run(
        daemon,
        """
import bfcd, numba.cuda
d = numba.cuda.device_array(1000, "uint8")
assert bfcd.default().bytes_in_use() == 1024
""",
        NUMBA_CUDA_MEMORY_MANAGER="bfcd.numba",
    )


def test_over_quota_has_the_sentence_and_the_next_array_works(daemon):
    r = run(
        daemon,
        START
        + """
try:
    cuda.device_array(100 << 20, "uint8")
except MemoryError as e:
    print(type(e).__name__, e)
cuda.device_array(1 << 20, "uint8")
""",
    )
    assert "QuotaExceeded tenant 'me'" in r.stdout


def test_a_device_array_of_bfcd_is_taken_without_a_copy(daemon):
    run(
        daemon,
        START
        + """
x = bfcd.default().empty((3, 4), "float32")
d = cuda.as_cuda_array(x)
assert d.shape == (3, 4) and int(d.gpu_data.handle) == x.block.ptr
""",
    )


@pytest.mark.skipif(DEVICE == "cuda-ipc", reason="about memory that is shared by fds")
def test_an_ipc_handle_needs_cuda_ipc(daemon):
    r = run(
        daemon,
        START
        + """
try:
    cuda.device_array(1000, "uint8").get_ipc_handle()
except NotImplementedError as e:
    print(e)
""",
    )
    assert "'train' shares memory by fds" in r.stdout and "share: cuda-ipc" in r.stdout


@pytest.mark.skipif(DEVICE != "cuda-ipc", reason="about CUDA IPC")
def test_another_process_opens_an_ipc_handle(daemon):
    # By the handle's bytes: Numba pickles it by an attribute that some versions of cuda-bindings lack.
    run(
        daemon,
        START
        + """
import ctypes, subprocess, sys
first = cuda.device_array(1000, "uint8")
d = cuda.to_device(numpy.arange(1000, dtype="int32"))
handle = d.get_ipc_handle()._ipc_handle
assert handle.offset > 0 and handle.size == 4000
program = '''
import ctypes, numpy, sys
from cuda.bindings import driver
from numba import cuda
handle = driver.CUipcMemHandle()
ctypes.memmove(handle.getPtr(), sys.stdin.buffer.read(), 64)
pointer = cuda.cudadrv.driver.IpcHandle(None, handle, 4000, offset=int(sys.argv[1])).open(cuda.current_context())
d = cuda.cudadrv.devicearray.DeviceNDArray((1000,), (4,), numpy.dtype("int32"), gpu_data=pointer)
assert (d.copy_to_host() == range(1000)).all()
'''
data = ctypes.string_at(handle.handle.getPtr(), 64)
r = subprocess.run([sys.executable, "-c", program, str(handle.offset)], input=data)
assert r.returncode == 0
""",
    )
