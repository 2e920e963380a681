# Two processes in one lease that take and free memory at random, of PyTorch's own allocator with and without expandable
# segments and beside blocks, with contexts that take memory: what both have is looked at 1,000 times, in the processes and
# at the device. scripts/test-frameworks --engines runs it.
#
# SPDX-License-Identifier: Apache-2.0
import fcntl
import mmap
import struct
import time

import pytest
from conftest import MIB
from test_engines import LEASE_MIB, LIMIT_S, Engines, machine

CONTEXT_MIB = 48
N_SAMPLES = 1000
N_AFTER = 20  # what each gets after it was refused, at least
SLOT = struct.Struct("4Q")  # its version, odd while it changes; bytes; refusals; allocations after the first one

# It shows at most what it has: a tensor is shown after it was made, and no longer before it is freed.
PROGRAM = """
import json, mmap, os, random, select, struct, sys
MIB = 1 << 20
memory = mmap.mmap(os.open(os.environ["SAMPLES"], os.O_RDWR), 4096)
kept, slot, state = [], 0, [0, 0, 0]

import torch
torch.cuda.init()
if sys.argv[1] == "blocks":
    import bfcd
    torch.cuda.mem_get_info()  # makes a context, as programs have one; of one that bfcd's library makes nothing is charged
    client, Refusal = bfcd.connect(), MemoryError
    make = lambda n_mib: client.malloc(n_mib * MIB)
    drop = lambda block: block.free()
    empty = lambda: None
    free = lambda: client.mem_get_info()[0] // MIB
else:
    Refusal, empty = torch.OutOfMemoryError, torch.cuda.empty_cache
    make = lambda n_mib: torch.empty(n_mib * MIB, dtype=torch.uint8, device="cuda")
    drop = lambda tensor: None
    free = lambda: torch.cuda.mem_get_info()[0] // MIB

def show(n_bytes):
    state[0] += n_bytes
    version, = struct.unpack_from("Q", memory, 32 * slot)
    struct.pack_into("Q", memory, 32 * slot, version + 1)
    struct.pack_into("3Q", memory, 32 * slot + 8, *state)
    struct.pack_into("Q", memory, 32 * slot, version + 2)

def take(n_mib):
    try:
        kept.append((n_mib, make(n_mib)))
    except Refusal:
        state[1] += 1
        show(0)
        return False
    state[2] += state[1] > 0
    show(n_mib * MIB)
    return True

def give(index):
    show(-kept[index][0] * MIB)
    drop(kept.pop(index)[1])

def churn(index):
    global slot
    slot, dice = index, random.Random(index)
    while not select.select([0], [], [], 0)[0]:
        if kept and dice.random() < 0.4:
            give(dice.randrange(len(kept)))
        elif not take(dice.choice((1, 3, 9, 21, 40, 70))):
            for _ in range(len(kept) // 2):
                give(dice.randrange(len(kept)))
        if dice.random() < 0.1:
            empty()

def only(n_mib):
    while kept:
        give(0)
    empty()
    return n_mib == 0 or take(n_mib)

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
print("ready", file=answers, flush=True)
for line in sys.stdin:
    function, *arguments = line.split()
    arguments = list(map(int, arguments))
    if function == "churn":  # until there is another line
        print("null", file=answers, flush=True)
        churn(*arguments)
    else:
        print(json.dumps(globals()[function](*arguments)), file=answers, flush=True)
"""


@pytest.fixture
def daemon(monkeypatch):
    settings = {"FAKE_CUDA_CONTEXT_BYTES": f"{CONTEXT_MIB}MiB", "FAKE_CUDA_PEAK": "1", "FAKE_NVML": "driver"}
    yield from machine(monkeypatch, **settings)


def device_bytes(state):
    """No memory is made or freed meanwhile."""
    with open(state / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return sum(int(p.name.split("-")[3]) for p in state.glob("mem-*"))


def slots_of(memory):
    """Of one moment."""
    while True:
        first, second = memory[: 2 * SLOT.size], memory[: 2 * SLOT.size]
        slots = list(SLOT.iter_unpack(first))
        if first == second and all(version % 2 == 0 for version, *_ in slots):
            return [rest for _, *rest in slots]


@pytest.mark.parametrize("is_strict", [False, True], ids=["normal", "strict"])
@pytest.mark.parametrize(
    "kinds",
    [
        ("plain", "plain"),
        ("expandable", "expandable"),
        ("plain", "expandable"),
        ("plain", "blocks"),
        ("expandable", "blocks"),
    ],
    ids="+".join,
)
def test_sum_in_samples(daemon, kinds, is_strict):
    path = daemon.folder / "samples"
    path.write_bytes(bytes(4096))
    before = device_bytes(daemon.state)
    (daemon.state / "peak-0").write_text("")
    e = Engines(daemon, kinds, is_strict, PROGRAM, SAMPLES=str(path))
    with open(path, "r+b") as f:
        memory = mmap.mmap(f.fileno(), 4096)
    for i in (0, 1):
        e.tell(i, "churn", i)
    samples, end = [], time.monotonic() + LIMIT_S
    while len(samples) < N_SAMPLES or min(after for _, _, after in slots_of(memory)) < N_AFTER:
        assert time.monotonic() < end, slots_of(memory)
        samples.append((sum(n for n, *_ in slots_of(memory)), device_bytes(daemon.state) - before))
    most, most_of_device = (max(each) / MIB for each in zip(*samples))
    has = e.tell(1, "only", 0), e.tell(0, "only", 300)
    n_free, slots = e.tell(1, "free"), slots_of(memory)
    n_peak = (int((daemon.state / "peak-0").read_text()) - before) / MIB
    figures = f"in {len(samples)} samples at most {most:.0f} MiB, {most_of_device:.0f} at the device with contexts, whose "
    figures += f"peak was {n_peak:.0f}; {slots[0][1]} and {slots[1][1]} refusals, {slots[0][2]} and {slots[1][2]} "
    figures += f"allocations after the first; {n_free} free beside 300"
    print(figures)
    assert max(most, most_of_device, n_peak) <= LEASE_MIB, figures
    assert has == (True, True) and LEASE_MIB - 300 - 3 * CONTEXT_MIB - 66 <= n_free <= LEASE_MIB - 300, figures
    assert "outside of bfcd" not in e.end()
