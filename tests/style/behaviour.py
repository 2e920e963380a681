#!/usr/bin/env python3
"""What a user can see of a build, as sorted lines: record it before a change of the structure, and compare after it with diff.

SPDX-License-Identifier: Apache-2.0

usage: behaviour.py BUILD_FOLDER [--seeds N] [--traces FOLDER] >FILE
       behaviour.py BUILD_FOLDER --interfaces >FILE
       behaviour.py BUILD_FOLDER --holds FILE

The lines: keys of the JSON of each command, exported functions, families of metrics, keys of the configuration, options, the limits
that bfc-replay plans and the peaks that it tells for each trace, what N walks did (tests/unit/test_walk.c), and sentences in the
programs. Only a sentence may differ without a reason: its text.

With --interfaces: only what programs of others and configurations rely on. --holds fails if a line of the file is no more.
"""

import argparse
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
CONFIG = """
socket: {path: FOLDER/socket}
admin_socket: {path: FOLDER/admin}
monitor_socket: {path: FOLDER/monitor}
devices:
  - id: host
    size: 256MiB
    partitions: [{name: main, limit: 192MiB}, {name: ram, limit: 64MiB}]
tenants:
  - name: jobs
    match: {uid: UID}
    leases: self
    quotas: [{partition: main, limit: 128MiB, reserve: 16MiB, park: {to: ram, idle: 1m}}, {partition: ram, limit: 32MiB}]
  - {name: others, match: {uid: UID}, quotas: [{partition: main}]}
"""
COMMANDS = """status partitions tenants sessions blocks shared keep whoami explain|main leaks waiting refusals grants lease|list config
    reload|--dry-run trim reset-peaks"""
JOB = """
import os, sys, bfcd
client = bfcd.connect()
blocks = [client.malloc(n << 20, tag="weights") for n in (1, 4)]
shared = client.malloc(1 << 20, whole=True)
client.publish(shared, "weights", keep=60)
client.charge(2 << 20)
try:
    client.malloc(1 << 30)
except MemoryError:
    pass
print("ready", flush=True)
os.read(0, 1)
"""


def run(*command, **options):
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, **options).stdout


def keys(value, path):
    """Each path to a value: a list's elements have one."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from keys(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for inner in value:
            yield from keys(inner, f"{path}[]")
    else:
        yield path


def of_daemon(build):
    """JSON and metrics of a daemon with a session, a lease and a refusal."""
    with tempfile.TemporaryDirectory(prefix="bfcd-behaviour-") as folder:
        config = pathlib.Path(folder, "bfcd.yaml")
        config.write_text(CONFIG.replace("FOLDER", folder).replace("UID", str(os.getuid())))
        env = dict(os.environ, BFC_SOCKET=f"{folder}/socket", BFC_ADMIN_SOCKET=f"{folder}/admin",
                   BFC_MONITOR_SOCKET=f"{folder}/monitor", PYTHONPATH=str(ROOT / "python"), BFC_TENANT="jobs",
                   BFC_LIBRARY=str(build / "client/libbfcclient.so.0"))
        bfcctl = build / "ctl/bfcctl"
        with subprocess.Popen([build / "daemon/bfcd", "--config", config], stderr=subprocess.DEVNULL) as daemon:
            try:
                while subprocess.run([bfcctl, "status"], env=env, capture_output=True, check=False).returncode:
                    time.sleep(0.05)
                job = subprocess.Popen(["python3", "-c", JOB], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                assert job.stdout.readline() == b"ready\n"
                run(bfcctl, "lease", "create", "l", "--tenant", "others", "--partition", "main", "--limit", "32MiB", "--pid",
                    str(os.getpid()), env=env)
                for command in COMMANDS.split():
                    text = run(bfcctl, "--json", *command.split("|"), env=env)
                    yield from (f"json {path}" for path in keys(json.loads(text), command.replace("|", " ")))
                for line in run(bfcctl, "metrics", env=env).splitlines():
                    if line.startswith("# "):
                        yield f"metric {line[2:]}"
                job.communicate(b"x")
            finally:
                daemon.send_signal(signal.SIGTERM)


def of_sources():
    """Keys of the configuration, by the tables of its grammar."""
    text = (ROOT / "daemon/config/schema.c").read_text()
    for section, fields in re.findall(r"^const struct config_section CONFIG_(\w+) = \{(.*?)^\};", text, re.M | re.S):
        for key in re.findall(r'\{ "(\w+)",', fields):
            yield f"config {section.lower()}.{key}"


def of_commands(build):
    for program in ("daemon/bfcd", "ctl/bfcctl", "ctl/bfc-replay", "ctl/bfc-exporter"):
        for option in set(re.findall(r"--[a-z][a-z-]+", run(build / program, "--help"))):
            yield f"option {os.path.basename(program)} {option}"
    for command in re.findall(r"^  ([a-z][a-z-]+) ", run(build / "ctl/bfcctl", "--help"), re.M):
        yield f"command bfcctl {command}"


def of_programs(build):
    for library in ("client/libbfcclient.so.0", "integrations/preload/libcuda.so.1"):
        for line in run("nm", "-D", "--defined-only", "--format=posix", build / library).splitlines():
            yield f"symbol {os.path.basename(library)} {line.split()[0]}"
    for program in ("daemon/bfcd", "daemon/bfcd-keeper", "ctl/bfcctl", "ctl/bfc-replay", "ctl/bfc-exporter",
                    "client/libbfcclient.so.0"):
        for line in run("strings", "-n", "16", build / program).splitlines():
            if re.match(r"[\w%\"'-].* .* .*[a-z]", line):
                yield f"sentence {os.path.basename(program)}: {line}"


def of_traces(build, traces, folder):
    replay = build / "ctl/bfc-replay"
    for name in ("transformer", "random"):
        path = pathlib.Path(folder, f"{name}.csv")
        path.write_text(run(replay, "--generate", name))
        traces = [*traces, path]
    for trace in traces:
        for share in ("fd", "cuda-ipc"):
            for line in run(replay, "--plan", "--json", "--share", share, trace).splitlines():
                if '"seconds"' not in line:
                    yield f"plan {trace.name} {share} {line.strip()}"


def of_walks(build, n_seeds):
    for seed in range(1, n_seeds + 1):
        env = dict(os.environ, BFC_TEST_SEED=str(seed), BFC_TEST_STEPS="100000")
        for line in run(build / "tests/unit/test_walk", env=env).splitlines():
            if line.startswith("#"):
                yield f"walk {seed} {line[2:]}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("build", type=lambda text: pathlib.Path(text).resolve())
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--traces", type=pathlib.Path)
    parser.add_argument("--interfaces", action="store_true")
    parser.add_argument("--holds", type=pathlib.Path)
    arguments = parser.parse_args()
    found = {*of_daemon(arguments.build), *of_sources(), *of_commands(arguments.build)}
    if arguments.holds or arguments.interfaces:  # texts may change
        found = {line for line in found if not line.startswith("metric HELP")}
    if arguments.holds:
        gone = [line for line in arguments.holds.read_text().splitlines() if not line.startswith("#") and line not in found]
        print("1..1", *(f"# gone, or changed: {line}" for line in gone), f"{'not ' if gone else ''}ok 1 - interfaces", sep="\n")
        sys.exit(1 if gone else 0)
    if not arguments.interfaces:
        traces = sorted(arguments.traces.glob("*.csv")) if arguments.traces else []
        with tempfile.TemporaryDirectory() as folder:
            found.update(of_programs(arguments.build), of_traces(arguments.build, traces, folder))
        found.update(of_walks(arguments.build, arguments.seeds))
    print("\n".join(sorted(found)))


if __name__ == "__main__":
    main()
