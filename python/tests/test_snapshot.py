# bfcctl snapshot: blocks and extents that were listed while memory changed. tests/integration/test_pictures.c has a daemon.
#
# SPDX-License-Identifier: Apache-2.0
import pickle

import pytest
from bfcd.tools import _snapshot, snapshot
from bfcd.tools._bfcctl import Failure
from conftest import MIB, host_only

pytestmark = host_only


def extent(region, offset, n_bytes=2 * MIB, partition="train"):
    return {"region_id": region, "offset": offset, "n_bytes": n_bytes, "tenant": "red", "partition": partition}


def block(region, offset, n_bytes, age=0, session=3, tag="t"):
    sizes = {"region_id": region, "offset": offset, "n_bytes": n_bytes, "n_requested": n_bytes - 1}
    return {**sizes, "age_ms": age, "session_id": session, "tag": tag, "shared_name": None, "state": "live"}


def take(extents, blocks, devices=None):
    devices = devices or {"train": 0}
    regions, segments = snapshot.segments_of(extents, devices)
    snapshot.place(snapshot.read(blocks), regions, segments)
    sessions = [{"session_id": 3, "name": "job"}]
    return pickle.loads(snapshot.pickle_of(segments, sessions, max(devices.values()) + 1))


def test_an_unbroken_range_is_a_segment():
    s = take([extent(7, 4 * MIB), extent(7, 2 * MIB), extent(7, 2 * MIB), extent(7, 8 * MIB), extent(9, 0)], [])
    base = _snapshot.BASE_ADDRESS
    assert [(g["address"] - base, g["total_size"]) for g in s["segments"]] == [
        (2 * MIB, 4 * MIB),
        (8 * MIB, 2 * MIB),
        (10 * MIB, 2 * MIB),
    ]


def test_blocks_that_do_not_fit_are_left_out():
    odd = [
        block(7, 0, 0),
        block(7, 2 * MIB - 256, 512),  # beyond its region, where the next one begins
        block(7, 2 * MIB, 256),
        block(7, 1 << 63, 256),
        block(8, 0, 256),
        block(7, 512, 512, age=90),  # older than that at its place
        block(7, 768, 512),  # overlaps it
        {**block(7, 4096, 256), "state": "parked"},
    ]
    s = take([extent(7, 0), extent(9, 0)], [*odd, block(7, 512, 512, age=10), block(9, 0, 2 * MIB, age=50, session=0)])
    active = [b for g in s["segments"] for b in g["blocks"] if b["state"] == "active_allocated"]
    assert [(b["size"], b["frames"][0]["filename"]) for b in active] == [
        (512, "red/train session 3 job"),
        (2 * MIB, "red/train shared"),
    ]
    for g in s["segments"]:
        assert sum(b["size"] for b in g["blocks"]) == g["total_size"]
    assert [e["size"] for e in s["device_traces"][0] if e["action"] == "alloc"] == [2 * MIB, 512]  # the oldest first


def test_each_device_has_a_trace():
    s = take([extent(7, 0), extent(8, 0, partition="infer")], [block(8, 0, 256)], {"train": 0, "infer": 1})
    assert [g["device"] for g in s["segments"]] == [0, 1]
    assert [[e["action"] for e in trace] for trace in s["device_traces"]] == [["segment_alloc"], ["segment_alloc", "alloc"]]


def test_more_addresses_than_the_viewer_counts():
    with pytest.raises(Failure, match="more address space"):
        take([extent(7, 1 << 53)], [])
