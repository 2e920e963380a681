# Unmodified PyTorch, which knows nothing of bfcd, under `bfcctl run`: its own allocator gets its memory from bfcd through
# the proxy of the driver (preload/). On the fake CUDA runtime; scripts/test-frameworks runs it.
#
# SPDX-License-Identifier: Apache-2.0
import os
import pathlib
import subprocess
import sys

import pytest
from conftest import LIMIT_S, gpu_only

pytest.importorskip("torch")
pytestmark = gpu_only

JOB = """
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


@pytest.mark.parametrize("segments, has_blocks", [("", True), ("expandable_segments:True", False)])
def test_own_allocator_of_pytorch(daemon, segments, has_blocks):
    bfcctl = os.environ["BFCCTL"]
    r = subprocess.run(
        [bfcctl, "--socket", str(daemon.folder / "admin.sock"), "run", "--tenant", "me", "--partition", "train"]
        + ["--limit", "48MiB", "--", sys.executable, "-c", JOB],
        env=daemon.environment()
        | {
            "BFC_PRELOAD": str(pathlib.Path(bfcctl).resolve().parent.parent / "preload"),
            "PYTORCH_CUDA_ALLOC_CONF": segments,
        },
        text=True,
        capture_output=True,
        timeout=LIMIT_S,
    )
    assert r.returncode == 0, r.stdout + r.stderr
    assert "Tried to allocate 40.00 MiB. GPU 0 has a total capacity of 48.00 MiB of which 28.00 MiB is free" in r.stdout
    # Expandable segments are the driver's memory, which only the process counts.
    assert ("40.0 MiB in blocks" in r.stderr) == has_blocks, r.stderr
    assert ("of GPU 0 outside of bfcd" in r.stderr) != has_blocks, r.stderr
