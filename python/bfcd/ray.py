"""Ray places tasks and actors by their memory, and bfcd enforces it.

    ray.init(resources=bfcd.ray.resources())

    @ray.remote(**bfcd.ray.options("20GiB", partition="train"))
    class Trainer: ...

A partition is a resource of Ray's, in MiB. Each worker process runs in a lease of its own (`bfcctl run`), with the limit
that Ray counts. On a node `python -m bfcd.ray resources` prints what `ray start --resources` takes.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import time
from collections.abc import Mapping
from typing import Any

from . import _client, _errors, _native, _terminal

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_MIB = 1 << 20
_STEP_MIB = 2  # of the limit of a lease
_PROFILERS = {"nsight", "_nsight", "rocprof_sys", "_rocprof_sys"}
_DAEMON_S = 30  # how long a worker waits for a daemon that restarts; Ray starts another worker after 60 s


def _mib(size: int | str) -> int:
    """Rounded up to what a lease can have."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(|B|KiB|MiB|GiB|TiB)", str(size))
    n_bytes = float(match[1]) * _UNITS[match[2]] if match else 0
    if n_bytes <= 0:
        raise ValueError(f"the size is {size!r}: it must be a number of bytes, or a text as '20GiB'")
    return -int(-n_bytes // (_STEP_MIB * _MIB)) * _STEP_MIB


def _resource(partition: str) -> str:
    return f"bfcd_{partition}"


def resources() -> dict[str, int]:
    """The resources of this node for `ray.init(resources=...)`: the limit of each partition that the tenant can use, in MiB."""
    client = _client.connect(cache=False)
    try:
        return {_resource(device.name): device.bytes_limit // _MIB for device in client.devices().logical}
    finally:
        client.close()


def options(
    size: int | str | Mapping[str, int | str],
    partition: str | None = None,
    *,
    lease: str = "",
    resources: Mapping[str, float] | None = None,
    runtime_env: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What `@ray.remote(**...)` and `.options(**...)` take so that each process of the task or actor has `size` in the
    partition, and no more. A mapping of partitions to sizes: in several; the first one is the default of its requests.

    lease: a part of the lease's name, which is ray-JOB-LEASE-PID. resources, runtime_env: others to add these to.
    "py_executable" of runtime_env is the Python of the workers, by default "python".

    ValueError: no node has so much there. Before ray.init() that is not known, and Ray warns that the request is infeasible.
    """
    if isinstance(size, Mapping) == isinstance(partition, str) or size == {}:
        raise TypeError("options() takes a size and a partition, or a mapping of partitions to sizes")
    sizes = {str(name): _mib(n) for name, n in (size if isinstance(size, Mapping) else {partition: size}).items()}
    if not re.fullmatch(r"[\w.-]{0,24}", lease, re.ASCII):
        raise ValueError(f"lease is {lease!r}: it must have at most 24 letters, digits, '_', '.' and '-'")
    _check(sizes)
    env = dict(runtime_env or {})
    if profilers := _PROFILERS & env.keys():
        raise ValueError(f"{min(profilers)!r} in runtime_env would replace the program that makes the lease")
    run = shlex.join(["-m", "bfcd.ray", "run", lease, *(f"{name}={n}" for name, n in sizes.items()), "--"])
    env["py_executable"] = f"{env.get('py_executable', 'python')} {run}"
    return {"resources": {**(resources or {}), **{_resource(name): n for name, n in sizes.items()}}, "runtime_env": env}


def _check(sizes: Mapping[str, int]) -> None:
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if any(all(node.get(_resource(name), 0) >= n for name, n in sizes.items()) for node in nodes):
        return
    most = {name: int(max([node.get(_resource(name), 0) for node in nodes], default=0)) for name in sizes}
    wanted = " and ".join(f"{n} MiB in partition '{name}' (at most {most[name]} MiB)" for name, n in sizes.items())
    raise ValueError(
        f"no node of this Ray cluster has {wanted}; "
        "what a node has is printed there by `python -m bfcd.ray resources`, and is given to `ray start --resources`"
    )


def _gpus(partitions: list[str]) -> list[str]:
    """The UUIDs of the GPUs of these partitions. It waits for a daemon that restarts."""
    end = time.monotonic() + _DAEMON_S
    while True:
        try:
            client = _client.connect(cache=False)
            break
        except (_errors.Disconnected, _errors.NotFound):
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
    devices = {device.name: device.physical for device in client.devices().logical}
    client.close()
    missing = [name for name in partitions if name not in devices]
    if missing:
        raise _errors.NotFound(f"this node has no partition '{missing[0]}' of the tenant")
    return list(dict.fromkeys(devices[name].uuid for name in partitions if devices[name].kind == "cuda"))


def _run(lease: str, *words: str) -> None:
    """Of a worker, which Ray starts: `run LEASE PARTITION=MIB... -- ARGUMENT OF PYTHON...`. It becomes bfcctl run."""
    bfcctl = _native.program("bfcctl")
    if bfcctl is None:
        raise OSError(f"bfcctl was not found: {_terminal.HOW_TO_GET}")
    n_sizes = words.index("--")
    sizes = dict(word.rsplit("=", 1) for word in words[:n_sizes])
    gpus = _gpus(list(sizes))
    if gpus:  # not those that Ray would choose, because the partitions' are these
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        os.environ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
    name = "-".join(filter(None, ["ray", os.environ.get("RAY_JOB_ID"), lease, str(os.getpid())]))
    command = [sys.executable, *words[n_sizes + 1 :]]
    for i, (partition, n) in enumerate(sizes.items()):  # the innermost one's variables are the program's
        own = ["--lease", f"{name}-{i}" if i else name, "--partition", partition, "--limit", f"{n}MiB"]
        command = [bfcctl, "run", "--quiet", *own, "--", *command]
    os.execv(command[0], command)


def _main(*words: str) -> None:
    if words == ("resources",):
        print(json.dumps(resources()))
    elif words[:1] == ("run",) and "--" in words[2:]:
        _run(*words[1:])
    else:
        sys.exit("usage: python -m bfcd.ray resources")


if __name__ == "__main__":
    try:
        _main(*sys.argv[1:])
    except OSError as error:
        sys.exit(f"bfcd.ray: {error}")
