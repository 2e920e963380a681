"""The extents and blocks of all partitions, for PyTorch's memory viewer. The daemon does not know the addresses of its clients:
regions get addresses one after the other. The lists are read while memory changes, so blocks of them may not fit together.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from . import _snapshot
from ._bfcctl import Bfcctl, Failure
from ._file import write


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--file", default="-")


@dataclass(slots=True)
class Block:
    region_id: int
    offset: int
    n_bytes: int
    n_requested: int
    age_ms: int
    session_id: int
    label: str
    address: int = 0


def read(rows: Iterable[dict[str, Any]]) -> list[Block]:
    """Of `bfcctl --json blocks`. A parked block has no memory."""
    keys = [f.name for f in fields(Block)[:6]]
    return [
        Block(*(b[key] for key in keys), sys.intern(b["shared_name"] or b["tag"])) for b in rows if b["state"] != "parked"
    ]


@dataclass
class Region:
    address: int
    n_bytes: int = 0  # up to the end of the last extent


@dataclass
class Segment:
    """An unbroken range of extents of a region."""

    region: Region
    address: int
    n_bytes: int
    device: int
    owner: str  # "tenant/partition"
    blocks: list[Block] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.address + self.n_bytes


def segments_of(extents: list[dict[str, Any]], devices: dict[str, int]) -> tuple[dict[int, Region], list[Segment]]:
    """Regions by their number, and segments by address. devices: by partition."""
    regions: dict[int, Region] = {}
    segments: list[Segment] = []
    end = _snapshot.BASE_ADDRESS
    for e in sorted(extents, key=lambda e: (e["region_id"], e["offset"])):
        region = regions.setdefault(e["region_id"], Region(-(-end // _snapshot.UNIT) * _snapshot.UNIT))
        if e["offset"] < region.n_bytes:  # it was listed twice, while it was made anew
            continue
        region.n_bytes = e["offset"] + e["n_bytes"]
        end = region.address + region.n_bytes
        if end > _snapshot.MAX_ADDRESS:
            raise Failure("The tenants have more address space than the memory viewer can count.")
        address = region.address + e["offset"]
        if segments and segments[-1].region is region and segments[-1].end == address:
            segments[-1].n_bytes += e["n_bytes"]
        else:
            owner = f"{e['tenant']}/{e['partition']}"
            segments.append(Segment(region, address, e["n_bytes"], devices.get(e["partition"], 0), owner))
    return regions, segments


def place(blocks: list[Block], regions: dict[int, Region], segments: list[Segment]) -> None:
    """Gives each segment the blocks that are inside of it and do not overlap the one before."""
    found = []
    for b in blocks:
        region = regions.get(b.region_id)
        if region and 0 < b.n_bytes <= region.n_bytes - b.offset:
            b.address = region.address + b.offset
            found.append(b)
    found.sort(key=lambda b: (b.address, b.age_ms))  # the younger one is the last state
    rest = iter(segments)
    segment, at = next(rest, None), 0
    for b in found:
        while segment and segment.end <= b.address:
            segment = next(rest, None)
        if segment and max(at, segment.address) <= b.address and b.address + b.n_bytes <= segment.end:
            segment.blocks.append(b)
            at = b.address + b.n_bytes


def pickle_of(segments: list[Segment], sessions: list[dict[str, Any]], n_devices: int) -> bytes:
    names = {s["session_id"]: s["name"] for s in sessions}

    @functools.cache
    def frames(owner: str, session: int, label: str) -> list[dict[str, Any]]:
        of = f"session {session} {names.get(session, '')}" if session else "shared"
        return _snapshot.frames(label, f"{owner} {of}")

    begins: list[list[dict[str, Any]]] = [[] for _ in range(max(n_devices, 1))]
    allocs: list[list[tuple[int, dict[str, Any]]]] = [[] for _ in begins]
    wholes = []
    for s in segments:
        tiles = []
        for b in s.blocks:
            where = frames(s.owner, b.session_id, b.label)
            tiles.append(_snapshot.block(b.address, b.n_bytes, b.n_requested, True, where))
            allocs[s.device].append((-b.age_ms, _snapshot.event("alloc", b.address, b.n_bytes, where)))
        begins[s.device].append(_snapshot.event("segment_alloc", s.address, s.n_bytes, []))
        wholes.append(_snapshot.segment(s.address, s.n_bytes, tiles, s.device, _snapshot.frames("segment", s.owner)))
    traces = []
    for begin, of in zip(begins, allocs):
        of.sort(key=lambda alloc: alloc[0])  # the oldest first
        traces.append(begin + [event for _, event in of])
    return _snapshot.dump(wholes, traces)


def run(options: argparse.Namespace, bfcctl: Bfcctl) -> None:
    blocks = read(bfcctl.blocks())
    devices = {d["device"]: i for i, d in enumerate(bfcctl.list("status")["devices"])}
    of_partitions = {p["partition"]: devices.get(p["device"], 0) for p in bfcctl.list("partitions")}
    sessions = bfcctl.list("sessions")
    regions, segments = segments_of(bfcctl.list("extents"), of_partitions)
    place(blocks, regions, segments)
    write(options.file, pickle_of(segments, sessions, len(devices)))
    if n_left_out := len(blocks) - sum(len(s.blocks) for s in segments):
        print(f"bfcctl: {n_left_out} blocks changed while they were listed and are left out.", file=sys.stderr)
