# The programs of python/examples, each run as a user runs it.
#
# SPDX-License-Identifier: Apache-2.0
import os
import pathlib
import subprocess
import sys

import pytest
from conftest import DEVICE, LIMIT_S, MIB, Daemon, host_only, on_gpus_too

EXAMPLES = pathlib.Path(__file__).resolve().parent.parent / "examples"


class VirtualDevices(Daemon):
    """A daemon with the example's configuration, and sockets in a folder of its own."""

    def start(self):
        sockets = self.config.read_text().partition("devices:")[0]
        self.config.write_text(sockets + (EXAMPLES / "bfcd.yaml").read_text())
        super().start()


def run(daemon, name, *args, expected=0, **environment):
    r = subprocess.run(
        [sys.executable, EXAMPLES / name, *map(str, args)],
        env=daemon.environment() | environment,
        text=True,
        capture_output=True,
        timeout=LIMIT_S,
    )
    assert r.returncode == expected, f"status {r.returncode}\n{r.stdout}{r.stderr}"
    return r


def columns(text, title):
    """The figures (BytesInUse, MaxBytesInUse) of a pattern, by step."""
    lines = text.partition(title + "\n")[2].partition("peak:")[0].splitlines()[1:]
    return [tuple(map(int, line.split()[-2:])) for line in lines]


def test_the_peak_of_three_patterns(daemon):
    out = run(daemon, "max_in_use.py").stdout
    assert columns(out, "sequential, with overlap") == [
        (100, 100), (300, 300), (350, 350), (250, 350), (50, 350), (200, 350), (150, 350), (0, 350),
    ]  # fmt: skip
    assert columns(out, "branching") == [
        (100, 100), (350, 350), (400, 400), (150, 400), (300, 400), (425, 425), (275, 425), (175, 425), (225, 425),
    ]  # fmt: skip
    assert columns(out, "free after alloc") == [(200, 200), (400, 400), (200, 400)]
    assert columns(out, "free before alloc") == [(200, 200), (0, 200), (200, 200)]
    assert [line for line in out.splitlines() if line.startswith("peak")] == [
        "peak: 350 KiB", "peak: 425 KiB", "peak: 400 KiB", "peak: 200 KiB",
    ]  # fmt: skip


def has(*modules):
    program = "import " + ", ".join(modules)
    return subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 0


# What the example's job uses after steps 2, 4, 6 and 8, and the most since the entry before.
RESULT = 64 * 1024
IN_USE = [8 * MIB + n * RESULT for n in (2, 4, 6, 8)]
PEAK = [8 * MIB + 3 * MIB + 2 * RESULT, 8 * MIB + 4 * MIB + 3 * RESULT, 8 * MIB + 3 * MIB + 6 * RESULT, 8 * MIB + 4 * MIB + 7 * RESULT]


def test_bytes_in_use_are_logged(daemon, tmp_path):
    r = run(daemon, "tensorboard_curve.py", "--folder", tmp_path / "runs", "--steps", 9, "--every", 2)
    expected = [
        f"step {step}: BytesInUse {now}, MaxBytesInUse {peak}, limit {64 * MIB}"
        for step, now, peak in zip((2, 4, 6, 8), IN_USE, PEAK)
    ]
    assert r.stdout.splitlines() == expected
    has_curve = (tmp_path / "runs").exists()
    assert has_curve == (has("tensorboardX") or has("torch.utils.tensorboard"))
    assert ("pip install tensorboardX" in r.stderr) == (not has_curve)


@pytest.mark.skipif(
    not has("tensorboard") or not (has("tensorboardX") or has("torch.utils.tensorboard")),
    reason="needs tensorboard and a writer of its files",
)
def test_tensorboard_reads_the_curve(daemon, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(daemon, "tensorboard_curve.py", "--folder", tmp_path, "--steps", 9, "--every", 2)
    curves = EventAccumulator(str(tmp_path)).Reload()
    assert sorted(curves.Tags()["scalars"]) == ["bfcd/BytesInUse", "bfcd/MaxBytesInUse"]
    for tag, values in (("bfcd/BytesInUse", IN_USE), ("bfcd/MaxBytesInUse", PEAK)):
        assert [(e.step, e.value) for e in curves.Scalars(tag)] == list(zip((2, 4, 6, 8), values))


@host_only
def test_a_virtual_device_grows_up_to_its_limit():
    daemon = VirtualDevices()
    try:
        out = run(daemon, "virtual_device.py").stdout
    finally:
        daemon.stop()
    connected, small, large, refused, first, second, freed = out.splitlines()
    assert "in use    0 MiB" in connected and "limit  1024 MiB" in connected
    assert "in use   10 MiB" in small and "in use  110 MiB" in large
    assert "asked 1.0 GiB" in refused and "'virtual-0'" in refused
    assert "100 MiB on virtual device 'virtual-0' of device 'host'" in first
    assert "20 MiB on virtual device 'virtual-1' of device 'host'" in second
    assert "in use    0 MiB" in freed


@host_only
def test_the_configuration_of_the_example_has_no_errors_and_is_in_its_text():
    config = EXAMPLES / "bfcd.yaml"
    r = subprocess.run([os.environ["BFCD"], "--check", "--config", config], text=True, capture_output=True)
    assert r.returncode == 0, r.stderr
    shown = [line.strip() for line in (EXAMPLES / "virtual_device.py").read_text().splitlines() if "- {name" in line]
    assert len(shown) == 2 and all(line in config.read_text() for line in shown)


@host_only
def test_without_the_configuration_the_example_names_it(daemon):
    r = run(daemon, "virtual_device.py", expected=1)
    assert "virtual-0" in r.stderr and "bfcd.yaml" in r.stderr


@on_gpus_too
def test_arrays_are_copied(daemon):
    if DEVICE != "host" and not has("cupy"):
        r = run(daemon, "cupy_arrays.py", expected=77)
        assert "needs cupy" in r.stderr
        return
    pytest.importorskip("numpy")
    out = run(daemon, "cupy_arrays.py").stdout
    assert f"{8 * MIB} bytes in use" in out and "back: equal" in out
    assert f"0 bytes in use, {8 * MIB} at the peak" in out


def test_without_numpy_or_cupy_the_status_is_77(daemon, tmp_path):
    name = "numpy" if DEVICE == "host" else "cupy"
    (tmp_path / f"{name}.py").write_text("raise ImportError('not here')")
    path = os.pathsep.join([str(tmp_path), daemon.environment()["PYTHONPATH"]])
    r = run(daemon, "cupy_arrays.py", expected=77, PYTHONPATH=path)
    assert f"needs {name}" in r.stderr
