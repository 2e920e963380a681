# TensorBoard itself reads what `bfcctl tensorboard` writes. BFCCTL names the program.
#
# SPDX-License-Identifier: Apache-2.0
import json
import os
import signal
import subprocess

import pytest
from conftest import LIMIT_S, MIB, wait_for

event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
numpy = pytest.importorskip("numpy")
pytestmark = pytest.mark.skipif("BFCCTL" not in os.environ, reason="BFCCTL is not set")

NAMES = {
    "BytesInUse": "bytes_in_use",
    "MaxBytesInUse": "peak_bytes_in_use",
    "BytesReserved": "bytes_reserved",
    "BytesLimit": "bytes_limit",
    "NumAllocs": "num_allocs",
}


def command(daemon, *words):
    return [os.environ["BFCCTL"], "--socket", str(daemon.folder / "admin.sock"), *words]


def tenants(daemon):
    out = subprocess.run(command(daemon, "--json", "tenants"), capture_output=True, check=True, timeout=LIMIT_S)
    return json.loads(out.stdout)["tenants"]


def read(folder):
    accumulator = event_accumulator.EventAccumulator(str(folder), size_guidance={event_accumulator.SCALARS: 0})
    accumulator.Reload()
    return accumulator


def tags_of(accumulator):
    return accumulator.Tags()["scalars"]


def test_values_are_those_of_bfcctl_within_float32(daemon, client, tmp_path):
    blocks = [client.malloc(5 * MIB + 12345), client.malloc(3 * MIB, partition="infer"), client.malloc(7 * MIB)]
    del blocks[2]
    folder = tmp_path / "made" / "here"
    subprocess.run(
        command(daemon, "tensorboard", "--logdir", str(folder), "--interval", "1", "--count", "3"),
        check=True,
        timeout=LIMIT_S,
    )
    rows, accumulator = tenants(daemon), read(folder)
    assert accumulator.file_version == 2.0
    assert sorted(tags_of(accumulator)) == sorted(
        f"{row['partition']}/{row['tenant']}/{name}" for row in rows for name in NAMES
    )
    n_values = 0
    for row in rows:
        for name, key in NAMES.items():
            events = accumulator.Scalars(f"{row['partition']}/{row['tenant']}/{name}")
            assert [e.step for e in events] == [0, 1, 2]
            assert all(0.5 < b.wall_time - a.wall_time < LIMIT_S for a, b in zip(events, events[1:]))
            assert all(numpy.float32(e.value) == numpy.float32(row[key]) for e in events)
            n_values += len(events)
    assert any(row["bytes_in_use"] > 5 * MIB for row in rows)
    print(f"{n_values} values of {len(rows)} tenants in partitions are equal")


def test_a_tensorboard_that_runs_beside_sees_each_step(daemon, client, tmp_path):
    process = subprocess.Popen(
        command(daemon, "tensorboard", "--logdir", str(tmp_path), "--interval", "1"), stdout=subprocess.PIPE
    )
    try:
        accumulator = event_accumulator.EventAccumulator(str(tmp_path))

        def last():
            accumulator.Reload()
            tag = "train/me/BytesInUse"
            return accumulator.Scalars(tag)[-1] if tag in tags_of(accumulator) else None

        wait_for(lambda: last() is not None, "step")
        before = last()
        block = client.malloc(9 * MIB, whole=True)
        wait_for(lambda: last().value >= before.value + 9 * MIB, "growth")
        assert last().step > before.step
        del block
    finally:
        process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT_S) == 0
