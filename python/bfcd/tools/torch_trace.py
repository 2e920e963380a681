"""Traces from PyTorch's memory snapshots (torch.cuda.memory._dump_snapshot()), which are pickles of plain data. bfc-replay
writes one to standard input and reads the trace as CSV.

    {"segments": [{"device", "blocks": [{"address", "size", "state", "frames"}]}],
     "device_traces": [[{"action", "addr", "size", "frames"}]]}

The events of a device are in order, and an event's number is its time. A block is live from `alloc` to `free_completed`. The
recording has a bounded length, so it may begin late: a block that is freed without having been allocated, or is in the
segments at the end only, is live from time 0. Blocks that are in the segments at the end, or were never freed, have no end.

An `oom` event is a request that the GPU refused. If no allocation follows, it has ended the job: then it is a buffer that is
live for one moment. Else the job did without that memory, and it is left out.

One device is read: that with the most events, or without any, that with the most blocks. The tag of a buffer is the innermost
frame in a file of Python.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import io
import os
import pickle
import resource
import sys
from typing import Any, NamedTuple

from ._bfcctl import Bfcctl, Failure

PROGRAM = "bfc-replay"
NO_END = (1 << 63) - 1
MAX_BYTES = 1 << 30  # of a file
MEMORY = 1 << 30, 16  # of this process: so much, and so many times the file: a pickle can ask for more than it has


class Wrong(Exception):
    """Why it is no snapshot."""


class Live(NamedTuple):
    lower: int
    size: int
    tag: str
    line: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", default="snapshot", help="for errors")


class _Data(pickle.Unpickler):
    """A pickle is a program that can call any function of Python. This one finds none."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it is no plain data: it names {module}.{name}")


def unpickle(data: bytes) -> Any:
    """Wrong: whatever it has."""
    try:
        return _Data(io.BytesIO(data)).load()
    except MemoryError:
        raise
    except Exception as error:  # of a damaged one there are many
        raise Wrong(f"it is no pickle, or is damaged: {error}") from None


def _list(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else ()


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _integer(value: Any) -> int | None:
    return int(value) if isinstance(value, int) and -(1 << 63) <= value < 1 << 63 else None


def _size(value: Any) -> int:
    size = _integer(_get(value, "size"))
    if size is None or size <= 0:
        raise Wrong("it is no memory snapshot of PyTorch, or an older kind of one")
    return size


class Reader:
    def __init__(self, top: Any) -> None:
        self.segments, traces = _get(top, "segments"), list(map(_list, _list(_get(top, "device_traces"))))
        if self.segments is None:
            raise Wrong("it is no memory snapshot of PyTorch, or an older kind of one")
        self.segments = _list(self.segments)
        self.buffers: list[tuple[int, int, int, str, int]] = []  # lower, upper, size, tag, line
        self.live: dict[int, Live] = {}  # by address
        self.now = 0
        self.refused: Live | None = None  # the last `oom`; None: none, or an allocation followed
        self.n_survived = 0  # those that an allocation followed
        self._tags: dict[int, str] = {}  # by the identity of a list of frames, which is there many times
        self._seen: set[int] = set()
        self.device = max(range(len(traces)), key=lambda i: (len(traces[i]), -i), default=0)
        if not traces or not traces[self.device]:
            self.device = _integer(_get(next(iter(self.segments), None), "device")) or 0
        events = traces[self.device] if 0 <= self.device < len(traces) else []
        for number, event in enumerate(events, 1):
            self._read_event(event, number)
        for segment in self.segments:
            self._read_segment(segment)
        if self.refused:
            self._add(self.refused, self.refused.lower + 1)
        for live in self.live.values():
            self._add(live, NO_END)
        self.buffers.sort(key=lambda b: (b[0], b[4]))
        if not self.buffers:
            raise Wrong("it has no allocations")
        others = {i for i, trace in enumerate(traces) if trace and i != self.device}
        self.n_other_events = sum(len(traces[i]) for i in others)
        self.n_others = len(others | {d for s in self.segments if (d := _integer(_get(s, "device")) or 0) != self.device})

    def _count(self, what: Any) -> None:
        """A pickle can refer to one list many times in two bytes each; PyTorch does so with frames only."""
        if id(what) in self._seen:
            raise Wrong("it has the same events or blocks several times")
        self._seen.add(id(what))

    def _tag(self, frames: Any) -> str:
        """ "file.py:12 name", with the file's last part only."""
        if id(frames) not in self._tags:
            tag = ""
            for frame in _list(frames):
                file, name = _get(frame, "filename"), _get(frame, "name")
                if isinstance(file, str) and file.endswith(".py"):
                    line = _integer(_get(frame, "line")) or 0
                    tag = f"{os.path.basename(file[-4096:])[:100]}:{line} {name[:100] if isinstance(name, str) else ''}"
                    break
            self._tags[id(frames)] = "".join(c if " " <= c <= "~" else "?" for c in tag).replace(",", ";")[:63]
        return self._tags[id(frames)]

    def _add(self, live: Live, upper: int) -> None:
        self.buffers.append((live.lower, max(upper, live.lower + 1), live.size, live.tag, live.line))

    def _begin(self, address: int, live: Live) -> None:
        """Live from now on. One that was there and was not seen to go has gone."""
        if before := self.live.pop(address, None):
            self._add(before, self.now)
        self.live[address] = live

    def _read_event(self, event: Any, number: int) -> None:
        self._count(event)
        action = _get(event, "action")
        if action not in ("alloc", "free_completed", "oom"):
            return
        size, tag, address = _size(event), self._tag(_get(event, "frames")), _integer(_get(event, "addr"))
        if action in ("alloc", "oom"):
            self.n_survived += self.refused is not None
            self.refused = None
        self.now += 1  # 0 is before the first one
        if action == "oom":  # it has no address
            self.refused = Live(self.now, size, tag, number)
        elif address is None:
            raise Wrong("it is no memory snapshot of PyTorch, or an older kind of one")
        elif action == "alloc":
            self._begin(address, Live(self.now, size, tag, number))
        else:
            self._add(self.live.pop(address, Live(0, size, tag, number)), self.now)

    def _read_segment(self, segment: Any) -> None:
        """What the segments have in use and no event told of."""
        self._count(segment)
        if (_integer(_get(segment, "device")) or 0) != self.device:
            return
        at = _integer(_get(segment, "address")) or 0
        for block in _list(_get(segment, "blocks")):
            self._count(block)
            address = _integer(_get(block, "address"))
            if _get(block, "state") != "inactive":
                live = Live(0, _size(block), self._tag(_get(block, "frames")), 0)
                # Older snapshots have no addresses of blocks.
                self.live.setdefault(at if address is None else address, live)
            at += _integer(_get(block, "size")) or 0


def run(options: argparse.Namespace, _: Bfcctl) -> None:
    data = sys.stdin.buffer.read(MAX_BYTES + 1)
    limit, hard = MEMORY[0] + MEMORY[1] * len(data), resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        if len(data) > MAX_BYTES:
            raise Wrong("it has more than 1 GiB")
        r = Reader(unpickle(data))
    except Wrong as why:
        raise Failure(f"{options.name}: {why}") from None
    except MemoryError:
        raise Failure(f"{options.name}: it needs more than {limit >> 20} MiB of memory") from None
    except RecursionError:
        raise Failure(f"{options.name}: it is nested too deeply") from None
    left_out = [f"other GPUs: {r.n_others}, with {r.n_other_events} events"] if r.n_others else []
    if r.n_survived:
        left_out.append(f"refused requests after which the job went on: {r.n_survived}")
    if left_out:
        print(f"bfc-replay: {options.name}: left out: {'; '.join(left_out)}", file=sys.stderr)
    print("id,lower,upper,size,tag,tenant")
    for i, (lower, upper, size, tag, _line) in enumerate(r.buffers, 1):
        print(f"{i},{lower},{upper},{size},{tag},cuda:{r.device}")
