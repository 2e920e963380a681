# Real RMM calls bfcd's resource. Its CUDA runtime is linked statically, so nothing else of it runs on the fake driver.
#
# SPDX-License-Identifier: Apache-2.0
import pytest
from conftest import about_gpus

pytest.importorskip("rmm")
pytestmark = about_gpus

START = """
import bfcd, bfcd.rmm, threading
from rmm.pylibrmm.stream import DEFAULT_STREAM as stream
client = bfcd.default()
resource = bfcd.rmm.resource()
"""


def run(daemon, program, **environment):
    r = daemon.run(START + program, **environment)
    assert r.returncode == 0, r.stdout + r.stderr
    return r


def test_memory_is_bfcds(daemon):
    run(
        daemon,
        """
p = resource.allocate(1000, stream)
assert client.bytes_in_use() == 1024
resource.deallocate(p, 1000, stream)
assert client.bytes_in_use() == 0
""",
    )


def test_over_quota_has_the_sentence_and_the_next_allocation_works(daemon):
    r = run(
        daemon,
        """
try:
    resource.allocate(100 << 20, stream)
except MemoryError as e:
    print(e)
resource.deallocate(resource.allocate(1000, stream), 1000, stream)
""",
    )
    assert "tenant 'me' asked for more than its limit" in r.stdout


def test_an_allocation_waits(daemon):
    run(
        daemon,
        """
other = bfcd.connect()
block = other.malloc(60 << 20)
threading.Timer(0.2, block.free).start()
p = resource.allocate(32 << 20, stream)
resource.deallocate(p, 32 << 20, stream)
""",
        BFC_WAIT_MS="600000",
    )
