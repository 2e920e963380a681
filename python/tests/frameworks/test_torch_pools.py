# Pools of PyTorch: what they give back, which threads are in them, nested ones, and what torch.multiprocessing sends. Real
# PyTorch on the fake CUDA runtime; scripts/test-frameworks runs it.
#
# SPDX-License-Identifier: Apache-2.0
import os
import subprocess
import sys

import bfcd
import pytest
from conftest import LIMIT_S, MIB, about_gpus
from test_torch import INSTALL, run

pytest.importorskip("torch")
pytestmark = about_gpus

BEGIN = """
import bfcd, bfcd.torch, gc, threading, time, torch
MIB = 1 << 20
def new(n):
    return torch.empty(n * MIB, dtype=torch.uint8, device="cuda")
def in_use():
    return bfcd.default().tenant_stats()["bytes_in_use"] // MIB
def until(n):
    end = time.monotonic() + 100
    while in_use() != n:
        assert time.monotonic() < end, (in_use(), n)
        time.sleep(0.01)
def in_thread(function):
    errors = []
    def call():
        try:
            function()
        except BaseException as e:
            errors.append(e)
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return errors[0] if errors else None
"""
KINDS = {"plain": "new_pool = bfcd.torch.pool\n", "parkable": "new_pool = lambda: bfcd.torch.pool(parkable=True)\n"}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


def test_a_living_pool_gives_back_what_is_free(daemon, kind):
    run(
        daemon,
        BEGIN
        + "bfcd.default()  # with its cache, as a program may have it before the first pool\n"
        + kind
        + """
pool = new_pool()
with pool:
    x = new(30)
del x
torch.cuda.empty_cache()
assert in_use() == 0
assert torch.cuda.memory_reserved() == 0
with pool:
    x, y = new(30), new(12)
    y.copy_(torch.ones(12 * MIB, dtype=torch.uint8))
    del x
    torch.cuda.empty_cache()
    assert in_use() == 12
    for _ in range(3):                  # more often than there are spares
        x, z = new(14), new(20)
        del x
        assert in_thread(torch.cuda.empty_cache) is None
        assert in_use() == 32
        del z
        until(12)                       # though PyTorch allocates elsewhere by now
    assert int(y.cpu().sum()) == 12 * MIB
    other = torch.cuda.Stream()
    y.record_stream(other)
    del y
    torch.cuda.empty_cache()
    assert in_use() == 0
with pool:
    x = new(30)
    assert in_use() == 30 and torch.cuda.memory_allocated() == 30 * MIB
    del pool
    gc.collect()
del x
other_pool = new_pool()
with other_pool:                        # the end of a pool inside of another one ended the process
    gc.collect()
    assert in_use() == 0
""",
    )


def test_segments_are_freed_with_one_wait(daemon, tmp_path):
    run(
        daemon,
        f"import os\nos.environ['FAKE_CUDA_COUNTS'] = path = '{tmp_path}/counts'\n"
        + BEGIN
        + """
def n_waits():
    with open(path) as f:
        return next(int(line.split()[1]) for line in f if line.startswith("cuCtxSynchronize "))
pool = bfcd.torch.pool()
with pool:
    xs = [new(1) for _ in range(40)]    # in 20 segments
del xs
n = n_waits()
torch.cuda.empty_cache()
assert in_use() == 0
assert n_waits() - n < 10, n_waits() - n
""",
    )


INSIDE = """
pool = new_pool()
bfcd.on_pressure(lambda partition, n_bytes: torch.cuda.empty_cache())
with pool:
    x = new(40)
    del x
    print("waits", flush=True)
    input()
"""


def test_pressure_while_the_program_is_inside_of_the_pool(daemon, kind):
    p = subprocess.Popen(
        [sys.executable, "-c", BEGIN + kind + INSIDE],
        env=daemon.environment(),
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert p.stdout.readline() == "waits\n"
    with bfcd.connect(daemon.socket) as other:
        other.malloc(50 * MIB, wait=LIMIT_S).free()
    p.communicate("\n", timeout=LIMIT_S)
    assert p.returncode == 0


def test_nested_pools_and_threads(daemon):
    run(
        daemon,
        BEGIN
        + """
outer, inner = bfcd.torch.pool(parkable=True), bfcd.torch.pool()
with outer:
    a = new(10)
    with inner, inner:
        b = new(10)
        b.copy_(torch.ones(10 * MIB, dtype=torch.uint8))
        try:
            outer.sleep()
        except bfcd.Busy as e:
            assert "with" in str(e), e
        else:
            raise SystemExit("it slept while a thread was inside of it")
    c = new(10)
outer.sleep()
until(10)
assert int(b.cpu().sum()) == 10 * MIB
with outer:
    assert in_use() == 30
    assert "this thread is not inside" in str(in_thread(outer.__exit__))
    def allocate():
        global d
        with outer, inner:
            with outer:
                d = new(10)
    assert in_thread(allocate) is None
    e = new(10)
outer.sleep()
until(10)
with outer:
    pass
outer.__enter__()
inner.__enter__()
outer.__exit__()                        # not in the order of a stack
f = new(10)
inner.__exit__()
try:
    inner.__exit__()
except RuntimeError as e:
    assert "not inside" in str(e)
else:
    raise SystemExit("no error")
outer.sleep()
until(20)
x = torch.empty(1 << 10, device="cuda")  # of no pool
assert in_use() == 20
registered = bfcd.torch.pool(one_extent=True)
mem_pool = registered.mem_pool
with registered, registered:
    g = torch.empty(1 << 10, device="cuda")
    assert isinstance(in_thread(registered.__enter__), bfcd.Busy)
assert [s["address"] for s in mem_pool.snapshot()] == [g.data_ptr()]
""",
    )


def test_the_backward_pass_is_in_the_pool(daemon):
    run(
        daemon,
        BEGIN
        + """
def is_on():
    return torch._C._is_multithreading_enabled()
pool, inner = bfcd.torch.pool(), bfcd.torch.pool()
threads = set()
class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, gradient):
        threads.add(threading.get_ident())
        return gradient * 2
with pool:
    with inner:
        pass
    assert not is_on()
    weights = torch.ones(3 * MIB, device="cuda", requires_grad=True)
    y = Double.apply(weights).tanh()
    before = in_use()
    y.backward(y.detach())
    assert in_use() > before
    assert torch.cuda.memory_reserved() // MIB == in_use()
assert is_on()
assert threads == {threading.get_ident()}
""",
    )


SEND = """
from multiprocessing.reduction import ForkingPickler
with scope:
    x = new(1)
try:
    ForkingPickler.dumps(x)
except RuntimeError as e:
    assert "bfcd" in str(e) and "tensor.cpu()" in str(e), e
else:
    raise SystemExit("no error")
ForkingPickler.dumps(x.cpu())
"""


@pytest.mark.parametrize("way", ["pool", "install"])
def test_a_tensor_that_is_sent_is_refused(daemon, way):
    if way == "pool":
        run(daemon, BEGIN + "scope = bfcd.torch.pool()\n" + SEND)
    else:
        run(daemon, BEGIN + INSTALL + "import contextlib\nscope = contextlib.nullcontext()\n" + SEND)
