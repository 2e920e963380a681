# TensorBoard itself reads what `bfcctl tensorboard` writes. BFCCTL names the program.
#
# SPDX-License-Identifier: Apache-2.0
import json
import os
import shlex
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


def test_one_tenant(daemon, tmp_path):
    run = command(daemon, "tensorboard", "--logdir", str(tmp_path), "--count", "1")
    subprocess.run([*run, "--tenant", "me"], check=True, timeout=LIMIT_S)
    assert {tag.split("/")[1] for tag in tags_of(read(tmp_path))} == {"me"}
    done = subprocess.run([*run, "--tenant", "green"], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 1 and "There is no tenant 'green'" in done.stderr


def test_steps_continue_in_the_same_folder(daemon, tmp_path):
    """TensorBoard makes one curve of both files."""
    for i in range(2):
        out = subprocess.run(
            command(daemon, "tensorboard", "--logdir", str(tmp_path), "--count", "1"),
            check=True,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        ).stdout
        assert out.startswith("1 step in ")
        assert [e.step for e in read(tmp_path).Scalars("train/me/BytesInUse")] == list(range(i + 1))


@pytest.mark.parametrize("words", [[], ["--interval", "0"], ["--count", "0"], ["--json"]])
def test_a_wrong_use_is_refused(daemon, words):
    folder = ["--logdir", "x"] if words else []
    done = subprocess.run(command(daemon, "tensorboard", *folder, *words), capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2 and (words or ["no --logdir"])[0] in done.stderr


def test_a_folder_that_cannot_be_made_is_an_error(daemon, tmp_path):
    (tmp_path / "file").touch()
    done = subprocess.run(
        command(daemon, "tensorboard", "--logdir", str(tmp_path / "file" / "x")), capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 1 and "Not a directory" in done.stderr


def test_a_full_disk_is_an_error_and_leaves_whole_records(daemon, tmp_path):
    """A limit of files stands for a full disk."""
    line = " ".join(map(shlex.quote, command(daemon, "tensorboard", "--logdir", str(tmp_path), "--interval", "10ms")))
    done = subprocess.run(["sh", "-c", f"ulimit -f 2; exec {line}"], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 1
    assert "cannot be written: File too large. What was written before is complete." in done.stderr
    steps = [e.step for e in read(tmp_path).Scalars("train/me/BytesInUse")]
    assert steps and steps == list(range(len(steps)))


def test_the_daemon_may_be_away(daemon, tmp_path):
    daemon.process.kill()
    daemon.process.wait()
    words = command(daemon, "tensorboard", "--logdir", str(tmp_path / "runs"), "--interval", "10ms")
    with open(tmp_path / "err", "w") as err:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=err)
    said = (tmp_path / "err").read_text

    def n_steps():
        accumulator = read(tmp_path / "runs")
        tag = "train/me/BytesInUse"
        return len(accumulator.Scalars(tag)) if tag in tags_of(accumulator) else 0

    wait_for(lambda: "Waiting for it." in said(), "sentence")
    assert "Cannot reach bfcd at " in said()
    daemon.start()
    wait_for(lambda: n_steps() > 0, "step")
    assert "bfcd answers again." in said()
    daemon.restart()
    before = n_steps()
    wait_for(lambda: n_steps() > before, "step after the restart")
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0 and b" steps in " in out
