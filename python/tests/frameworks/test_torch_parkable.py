# Pools of PyTorch that sleep and wake, on the fake CUDA runtime: contents, addresses and charges are real, kernels do
# nothing. scripts/test-frameworks runs it.
#
# SPDX-License-Identifier: Apache-2.0
import pytest
from conftest import about_gpus
from test_torch import run

pytest.importorskip("torch")
pytestmark = about_gpus

BEGIN = """
import bfcd, bfcd.torch, time, torch
MIB = 1 << 20
def reserved(partition="train"):
    return bfcd.default().tenant_stats(partition)["bytes_reserved"]
def settled(n_bytes):
    end = time.monotonic() + 100
    while reserved() != n_bytes:
        assert time.monotonic() < end, (reserved(), n_bytes)
        time.sleep(0.01)
def filled(n, first):
    x = torch.empty(n, dtype=torch.uint8, device="cuda")
    x.copy_(torch.arange(first, first + n).to(torch.uint8))
    return x
def has(x, first):
    return torch.equal(x.cpu(), torch.arange(first, first + x.numel()).to(torch.uint8))
"""
POOL = BEGIN + "pool = bfcd.torch.pool(parkable=True, tag='weights')\n"


def test_tensors_return_with_contents_and_addresses(daemon):
    run(
        daemon,
        POOL
        + """
with pool:
    tensors = [filled(5 * MIB, i) for i in range(3)] + [filled(1000, 7)]
addresses = [x.data_ptr() for x in tensors]
before = reserved()
assert before >= 15 * MIB
for _ in range(2):
    pool.sleep()
    settled(0)
    assert reserved("parking") >= 15 * MIB
    with pool.use(wait=60):
        assert reserved() == before
        assert [x.data_ptr() for x in tensors] == addresses
        assert all(has(x, first) for x, first in zip(tensors, (0, 1, 2, 7)))
        tensors[0].copy_(tensors[0].clone())
        try:
            pool.sleep()
        except bfcd.Busy as e:
            assert "in use" in str(e), e
        else:
            raise SystemExit("it slept while it was in use")
        assert has(tensors[0], 0)
pool.sleep(to="parking")
pool.wake(wait=60)
assert has(tensors[3], 7)
""",
    )


def test_other_tensors_stay(daemon):
    run(
        daemon,
        POOL
        + """
other = bfcd.torch.pool(parkable=True)
plain = bfcd.torch.pool()
with pool:
    a = filled(3 * MIB, 1)
with other:
    b = filled(3 * MIB, 2)
with plain:
    c = filled(3 * MIB, 3)
assert pool.tag == "weights" and other.tag != pool.tag
before = reserved()
pool.sleep()
assert has(b, 2) and has(c, 3)
with pool:                          # it wakes, since PyTorch places the tensor beside the first one
    d = filled(3 * MIB, 4)
    assert has(a, 1) and has(d, 4)
    try:
        pool.sleep()
    except bfcd.Busy:
        pass
    else:
        raise SystemExit("it slept inside of with")
pool.sleep()
pool.wake(wait=60)
assert has(a, 1) and has(d, 4)
other.sleep(discard=True)
assert has(a, 1) and has(c, 3)
other.wake(wait=60)
assert int(b.cpu().sum()) == 0
""",
    )


def test_a_sleeping_pool_gives_room_to_others_and_waits_for_it(daemon):
    run(
        daemon,
        POOL
        + """
import threading
with pool:
    a = filled(30 * MIB, 1)
pool.sleep()
other = bfcd.connect()
block = other.malloc(40 * MIB, wait=60)
try:
    pool.wake()
except MemoryError:
    pass
else:
    raise SystemExit("there was no room")
threading.Timer(0.3, block.free).start()
with pool.use(wait=100):
    assert has(a, 1)
""",
    )


def test_a_pool_that_cannot_be_parked_as_a_whole_stays(daemon):
    run(
        daemon,
        POOL
        + """
with pool:
    tensors = [filled(5 * MIB, i) for i in range(2)] + [filled(22 * MIB, 9)]
filler = bfcd.connect().malloc(100 * MIB, partition="parking")
try:
    pool.sleep()
except MemoryError:
    pass
else:
    raise SystemExit("there was no room")
assert all(has(x, first) for x, first in zip(tensors, (0, 1, 9)))
""",
    )


def test_a_graph_is_busy_while_it_is_captured_and_valid_afterwards(daemon):
    run(
        daemon,
        POOL
        + """
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, pool=pool.mem_pool.id):
    x = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    try:
        pool.sleep()
    except bfcd.Busy as e:
        assert "captured" in str(e), e
    else:
        raise SystemExit("it slept during a capture")
address = x.data_ptr()
pool.sleep()
settled(0)
with pool.use(wait=60):
    graph.replay()
    torch.cuda.synchronize()
    assert x.data_ptr() == address
del x, graph
""",
    )


def test_pools_are_checked_and_their_number_is_bounded(daemon):
    run(
        daemon,
        BEGIN
        + """
for words, kind in (({"one_extent": True, "parkable": True}, ValueError), ({"tag": "x"}, ValueError),
                    ({"parkable": True, "tag": "x" * 32}, bfcd.InvalidValue)):
    try:
        bfcd.torch.pool(**words)
    except kind:
        pass
    else:
        raise SystemExit(f"no error: {words}")
pools = [bfcd.torch.pool(parkable=True) for _ in range(32)]
try:
    bfcd.torch.pool(parkable=True)
except RuntimeError as e:
    assert "32" in str(e)
else:
    raise SystemExit("no error")
pools.pop()
again = bfcd.torch.pool(parkable=True)
with again:
    x = filled(MIB, 5)
again.sleep()
again.wake(wait=60)
assert has(x, 5)
""",
    )


def test_pressure_empties_pytorchs_cache(daemon):
    run(
        daemon,
        BEGIN
        + """
pool = bfcd.torch.pool()
with pool:
    x = filled(40 * MIB, 1)
del x, pool                             # its segments stay in PyTorch's cache
bfcd.on_pressure(lambda partition, n_bytes: torch.cuda.empty_cache())
assert reserved() >= 40 * MIB
block = bfcd.connect().malloc(50 * MIB, wait=100)
""",
    )
