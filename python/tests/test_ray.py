# bfcd.ray without Ray: what it gives to Ray, and what a worker becomes. frameworks/test_ray_cluster.py has real Ray.
#
# SPDX-License-Identifier: Apache-2.0
import json
import os
import pathlib
import subprocess
import sys
import types

import pytest
from conftest import LIMIT_S, MIB, Daemon, gpu_only

import bfcd.ray


def sizes(*arguments, **others):
    return bfcd.ray.options(*arguments, **others)["resources"]


def test_sizes_are_rounded_up_to_what_a_lease_can_have():
    for size, n_mib in (
        (1, 2), ("2MiB", 2), ("2.5 MiB", 4), (3 * MIB, 4), ("0.5GiB", 512), ("20GiB", 20480), ("1TiB", 1 << 20), ("4096", 2),
    ):  # fmt: skip
        assert sizes(size, "train") == {"bfcd_train": n_mib}


@pytest.mark.parametrize("size", [0, -1, "20GB", "1e9", "", "MiB", "0MiB", None, True, "1 2MiB"])
def test_wrong_sizes_are_refused(size):
    with pytest.raises(ValueError, match="the size is"):
        sizes(size, "train")


def test_wrong_arguments_are_refused():
    for arguments in (("1GiB",), ({"train": "1GiB"}, "train"), ({}, None), ("1GiB", 7)):
        with pytest.raises(TypeError, match="a size and a partition"):
            bfcd.ray.options(*arguments)
    for lease in ("a b", "x" * 25, "a/b", "ü"):
        with pytest.raises(ValueError, match="lease is"):
            bfcd.ray.options("1GiB", "train", lease=lease)
    with pytest.raises(ValueError, match="'nsight' in runtime_env would replace"):
        bfcd.ray.options("1GiB", "train", runtime_env={"nsight": "default"})


def test_what_the_job_asks_for_stays():
    env = {"env_vars": {"A": "1"}, "py_executable": "/opt/bin/python"}
    result = bfcd.ray.options("2MiB", "it's", lease="x", resources={"disk": 1}, runtime_env=env)
    assert result["resources"] == {"disk": 1, "bfcd_it's": 2}
    assert result["runtime_env"]["env_vars"] == {"A": "1"}
    echo = result["runtime_env"]["py_executable"].replace("/opt/bin/python", "printf '%s\\n'")
    words = subprocess.run(["bash", "-c", f"{echo} worker.py"], check=True, text=True, capture_output=True).stdout
    assert words.splitlines() == ["-m", "bfcd.ray", "run", "x", "it's=2", "--", "worker.py"]
    assert env == {"env_vars": {"A": "1"}, "py_executable": "/opt/bin/python"}


def test_more_than_a_node_has_is_refused_when_ray_runs(monkeypatch):
    node = {"Alive": True, "Resources": {"bfcd_train": 100.0, "CPU": 2.0}}
    nodes = [node, {"Alive": False, "Resources": {"bfcd_train": 4096.0}}, {"Alive": True, "Resources": {"bfcd_x": 10}}]
    is_there = True
    ray = types.SimpleNamespace(is_initialized=lambda: is_there, nodes=lambda: nodes)
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert sizes("100MiB", "train") == {"bfcd_train": 100}
    for wanted, sentence in (
        ({"train": "102MiB"}, r"102 MiB in partition 'train' \(at most 100 MiB\)"),
        (
            {"train": "2MiB", "x": "2MiB"},
            r"2 MiB in partition 'train' .* and 2 MiB in partition 'x' \(at most 10 MiB\)",
        ),
    ):
        with pytest.raises(ValueError, match=f"no node of this Ray cluster has {sentence}"):
            sizes(wanted)
    nodes.clear()
    with pytest.raises(ValueError, match="at most 0 MiB"):
        sizes("2MiB", "train")
    is_there = False
    assert sizes("102MiB", "train") == {"bfcd_train": 102}


def module(daemon, *words, **variables):
    path = os.pathsep.join([str(pathlib.Path(os.environ["BFCCTL"]).parent), os.environ["PATH"]])
    sockets = {"BFC_ADMIN_SOCKET": str(daemon.folder / "admin.sock"), "PATH": path}
    return subprocess.Popen(
        [sys.executable, "-m", "bfcd.ray", *words],
        env=daemon.environment() | sockets | variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def end(process):
    """Its status, and what it printed."""
    out, err = process.communicate(timeout=LIMIT_S)
    return process.returncode, out, err


SHOW = """
import bfcd, json, os
limits = {d.name: d.bytes_limit >> 20 for d in bfcd.default().devices().logical}
print(json.dumps([limits, os.environ["BFC_PARTITION"], os.environ.get("CUDA_VISIBLE_DEVICES")]))
"""


def shown(process):
    status, out, err = end(process)
    assert status == 0, err
    return json.loads(out)


def test_a_node_tells_its_resources(daemon):
    status, out, err = end(module(daemon, "resources"))
    assert status == 0, err
    assert {name: n for name, n in json.loads(out).items() if name != "bfcd_parking"} == {
        "bfcd_train": 64,
        "bfcd_infer": 128,
    }


def test_a_worker_has_a_lease_in_each_partition(daemon):
    limits, partition, _ = shown(module(daemon, "run", "", "infer=32", "train=16", "--", "-c", SHOW))
    assert (limits["infer"], limits["train"], partition) == (32, 16, "infer")


def test_the_lease_has_the_names_of_the_job_and_the_actor(daemon):
    program = "import bfcd; bfcd.default().malloc(100 << 20)"
    worker = module(daemon, "run", "actor", "train=32", "--", "-c", program, RAY_JOB_ID="01000000")
    status, _, err = end(worker)
    assert (
        status == 1 and f"lease 'ray-01000000-actor-{worker.pid}' of tenant 'me' asked for more than its limit" in err
    )


def test_a_worker_waits_for_a_daemon_that_restarts():
    daemon = Daemon()
    daemon.process.kill()
    daemon.process.wait()
    worker = module(daemon, "run", "", "train=16", "--", "-c", SHOW)
    with pytest.raises(subprocess.TimeoutExpired):
        worker.wait(0.5)
    daemon.start()
    assert shown(worker)[0]["train"] == 16
    daemon.stop()


def test_errors_are_sentences(daemon):
    assert end(module(daemon, "run", "", "other=16", "--", "-c", ""))[::2] == (
        1, "bfcd.ray: this node has no partition 'other' of the tenant\n",
    )  # fmt: skip
    status, _, err = end(module(daemon, "run", "", "train=16", "--", "-c", "", PATH="/none"))
    assert status == 1 and err.startswith("bfcd.ray: bfcctl was not found: install ") and err.count("\n") == 1
    for words in ([], ["run"], ["run", "", "train=16"], ["resources", "x"]):
        assert end(module(daemon, *words))[::2] == (1, "usage: python -m bfcd.ray resources\n")
    status, _, err = end(module(daemon, "resources", BFC_SOCKET="/nowhere"))
    assert status == 1 and err.startswith("bfcd.ray: ") and "/nowhere" in err and err.count("\n") == 1


@gpu_only
def test_a_worker_sees_the_gpu_of_its_partition(daemon):
    seen = shown(module(daemon, "run", "", "train=16", "--", "-c", SHOW, CUDA_VISIBLE_DEVICES="7"))[2]
    assert seen.startswith("GPU-")
    assert shown(module(daemon, "run", "", "parking=16", "--", "-c", SHOW, CUDA_VISIBLE_DEVICES="7"))[2] == "7"
