"""The jobs of `python -m bfcd demo`: programs that use bfcd as any other would. Each obeys words on its standard input, and
ends with it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import bfcd

_MIB = 1 << 20
_N_PARTS = 4


def _say(text: str) -> None:
    print(text, flush=True)


def work(n_mib: int) -> None:
    """Has a block. `more N`: asks for another one. `check`: compares its bytes."""
    client = bfcd.default()
    block, data = client.malloc(n_mib * _MIB, tag="data"), os.urandom(n_mib * _MIB)
    block.write(data)
    _say(f"has {n_mib} MiB, full of random bytes")
    for line in sys.stdin:
        if line.startswith("more"):
            try:
                client.malloc(int(line.split()[1]) * _MIB)
                _say("got it")
            except bfcd.QuotaExceeded as e:
                _say(f"bfcd.QuotaExceeded: {e}")
        else:
            _say("its bytes are as it wrote them" if block.read() == data else "ITS BYTES HAVE CHANGED")


def serve(n_mib: int) -> None:
    """Two processes with one copy of a model: the first one loads it, and the other one attaches it."""
    block, model = bfcd.default().malloc(n_mib * _MIB, tag="model", whole=True), os.urandom(n_mib * _MIB)
    block.write(model)
    bfcd.default().publish(block, "model")
    _say(f"process {os.getpid()} has loaded 'model': {n_mib} MiB, SHA-256 {_digest(model)}")
    with subprocess.Popen([sys.executable, "-m", __spec__.name, "attach"], stdin=subprocess.PIPE) as other:
        sys.stdin.read(1)
        assert other.stdin is not None
        other.stdin.close()
    sys.exit(other.returncode)


def attach(_: int) -> None:
    block = bfcd.default().attach("model", read_only=True)
    _say(f"process {os.getpid()} has attached it: {block.nbytes // _MIB} MiB, SHA-256 {_digest(block.read())}")
    sys.stdin.read()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def notebook(n_mib: int) -> None:
    """Has memory that it does not use all the time, so the daemon may park it. `use`: compares its bytes."""
    pool = bfcd.default().pool(tag="notebook")
    blocks = [pool.malloc(n_mib // _N_PARTS * _MIB) for _ in range(_N_PARTS)]
    parts = [os.urandom(block.nbytes) for block in blocks]
    with pool.use():
        for block, part in zip(blocks, parts):
            block.write(part)
    _say(f"has {n_mib} MiB in a pool, and is idle now")
    for _ in sys.stdin:
        addresses = [block.ptr for block in blocks]
        n_parked = sum(block.nbytes for block in blocks if block.is_parked) // _MIB
        with pool.use(wait=600):
            is_equal = [block.read() for block in blocks] == parts and [block.ptr for block in blocks] == addresses
        _say(
            f"woke {n_parked} MiB: "
            + ("the same bytes at the same addresses" if is_equal else "ITS BYTES HAVE CHANGED")
        )


_JOBS = {"work": work, "serve": serve, "attach": attach, "notebook": notebook}

if __name__ == "__main__":
    _JOBS[sys.argv[1]](int(sys.argv[2]) if len(sys.argv) > 2 else 0)
