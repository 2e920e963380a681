# bfcd.idle(), in programs with the proxy of the driver and without.
#
# SPDX-License-Identifier: Apache-2.0
import errno
import math
import os

import pytest
from conftest import DEVICE, gpu_only

import bfcd
from bfcd import _idle

#: Memory of cuMemCreate(), mapped and filled.
PROGRAM = """
import ctypes, subprocess, bfcd

class Prop(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("handles", ctypes.c_int), ("location", ctypes.c_int), ("id", ctypes.c_int),
                ("meta", ctypes.c_void_p), ("flags", ctypes.c_ubyte * 8)]

class Access(ctypes.Structure):
    _fields_ = [("location", ctypes.c_int), ("id", ctypes.c_int), ("flags", ctypes.c_int)]

def ok(result):
    assert result == 0, result

N = ctypes.c_size_t(32 << 20)
cu = ctypes.CDLL("libcuda.so.1")
context, handle, at = ctypes.c_void_p(), ctypes.c_ulonglong(), ctypes.c_ulonglong()
ok(cu.cuInit(0))
ok(cu.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
ok(cu.cuCtxSetCurrent(context))
ok(cu.cuMemCreate(ctypes.byref(handle), N, ctypes.byref(Prop(1, 0, 1, 0)), ctypes.c_ulonglong(0)))
ok(cu.cuMemAddressReserve(ctypes.byref(at), N, ctypes.c_size_t(0), ctypes.c_ulonglong(0), ctypes.c_ulonglong(0)))
ok(cu.cuMemMap(at, N, ctypes.c_size_t(0), handle, ctypes.c_ulonglong(0)))
ok(cu.cuMemSetAccess(at, N, ctypes.byref(Access(1, 0, 3)), ctypes.c_size_t(1)))
ok(cu.cuMemsetD8_v2(at, ctypes.c_ubyte(7), N))
client = bfcd.connect()
with bfcd.idle() as n_bytes:
    assert n_bytes == N.value, n_bytes
    subprocess.run([BFCCTL, "park", "me", "--to", "parking"], check=True)
    full = client.malloc(64 << 20, partition="train", wait=60)
    try:
        with bfcd.idle():
            pass
        bfcd._idle._end(bfcd._idle._proxy(), 0)
        raise AssertionError("there is room")
    except bfcd.QuotaExceeded as e:
        assert "at its limit" in str(e), e
    full.free()
byte = ctypes.c_ubyte()
ok(cu.cuMemcpyDtoH_v2(ctypes.byref(byte), ctypes.c_ulonglong(at.value + N.value - 1), ctypes.c_size_t(1)))
assert byte.value == 7
print("woken")
"""


def test_without_the_proxy():
    with bfcd.idle() as n_bytes:
        assert n_bytes == 0
    with pytest.raises(ValueError, match="wait is -1"), bfcd.idle(wait=-1):
        pass
    with pytest.raises(KeyError), bfcd.idle(wait=0):
        raise KeyError


class Proxy:
    """Counts begins and ends as the proxy does. The last end takes so many seconds of a clock, and gives a result: `results` has
    those of the next ones. It is the clock, too."""

    def __init__(self, monkeypatch):
        self.begun, self.now, self.results, self.asked = 0, 0, [], []
        monkeypatch.setattr(_idle, "_proxy", lambda: self)
        monkeypatch.setattr(_idle, "time", self)

    def monotonic(self):
        return self.now

    def bfc_idle_begin(self):
        self.begun += 1
        return 1

    def bfc_idle_end(self, ms):
        if self.begun == 0:
            return -errno.EINVAL
        result = 0
        if self.begun == 1:
            self.asked.append(ms)
            seconds, result = self.results.pop(0) if self.results else (0, 0)
            self.now += seconds
        self.begun -= result == 0
        if isinstance(result, BaseException):
            raise result
        return result


@pytest.fixture
def proxy(monkeypatch):
    yield Proxy(monkeypatch)
    _idle._failed_ends.clear()


def test_the_end_waits(proxy):
    proxy.results = [(600, -errno.EDQUOT), (5, -errno.EINTR), (600, -errno.ENOMEM), (1, 0)]
    with bfcd.idle():
        pass
    assert proxy.asked == [600_000] * 4
    proxy.asked.clear()
    proxy.results = [(300, -errno.EINTR), (600, -errno.EDQUOT), (100, -errno.EINTR), (9, -errno.EDQUOT)]
    with pytest.raises(bfcd.QuotaExceeded), bfcd.idle(wait=1009):
        pass
    assert proxy.asked == [600_000, 600_000, 109_000, 9_000]


@pytest.mark.parametrize("wait", [math.inf, 700, 0.5, 0])
def test_the_end_cannot_wait(proxy, wait):
    proxy.results = [(0.01, -errno.EDQUOT)]
    with pytest.raises(bfcd.QuotaExceeded), bfcd.idle(wait=wait):
        pass
    assert len(proxy.asked) == 1 and proxy.begun == 1


def test_a_failed_end_is_tried_again(proxy):
    proxy.results = [(0, -errno.EDQUOT)]
    with pytest.raises(bfcd.QuotaExceeded), bfcd.idle():
        pass
    with bfcd.idle():  # another thread
        with bfcd.idle():
            assert proxy.begun == 3
        assert proxy.begun == 1
    assert proxy.begun == 0
    proxy.results = [(0, KeyboardInterrupt())]
    with pytest.raises(KeyboardInterrupt), bfcd.idle():
        pass
    assert proxy.begun == 1
    proxy.bfc_idle_end(0)  # it had succeeded before Python's handler ran
    with bfcd.idle():
        pass
    assert proxy.begun == 0 and not _idle._failed_ends


@gpu_only
@pytest.mark.skipif(DEVICE == "cuda-ipc", reason="handles cannot be parked")
def test_with_the_proxy(daemon):
    path = os.environ["BFC_PRELOAD"]
    assert os.path.exists(f"{path}/libcuda.so.1")
    result = daemon.run(
        f"BFCCTL = {os.environ['BFCCTL']!r}\n{PROGRAM}",
        LD_LIBRARY_PATH=f"{path}:{os.environ['LD_LIBRARY_PATH']}",
        BFC_ADMIN_SOCKET=f"{daemon.folder}/admin.sock",
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("woken\n") and "32.0 MiB parked" in result.stdout, result.stdout
