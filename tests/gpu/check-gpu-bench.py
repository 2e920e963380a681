#!/usr/bin/env python3
# scripts/gpu-bench on the fake driver: the cases without PyTorch give figures, and a call that was stopped is continued.
#
# SPDX-License-Identifier: Apache-2.0
#
# usage: check-gpu-bench.py SOURCE BUILD     prints TAP
import json
import pathlib
import subprocess
import sys
import tempfile
import xml.dom.minidom

SOURCE, BUILD = sys.argv[1:]
GROWTHS = ("cudaMalloc", "cudaMallocAsync", "cuMem", "bfcd", "bfcd-large", "bfcd-ipc")


class Bench:
    def __init__(self, folder):
        self.folder = pathlib.Path(folder)

    def call(self, *options):
        command = [sys.executable, f"{SOURCE}/scripts/gpu-bench", "--build", BUILD, "--results", self.folder, *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=500)

    def cases(self):
        return json.loads((self.folder / "results.json").read_text())["cases"]


def check_growths(bench):
    done = bench.call("--fake", "--only", "growth")
    assert done.returncode == 0, done.stdout + done.stderr
    cases = bench.cases()
    assert sorted(cases) == sorted(f"growth-{name}" for name in GROWTHS)
    for name, seen in cases.items():
        assert seen["round1"]["grow_ms"] >= seen["round1"]["max_us"] / 1e3 - 0.01 > 0, f"{name}: {seen}"
        assert seen["round2"]["p50_us"] <= seen["round2"]["p99_us"] <= seen["round2"]["max_us"] + 0.5, f"{name}: {seen}"
    table = (bench.folder / "table.md").read_text()
    assert all(f"| growth-{name} |" in table for name in GROWTHS) and "| park | " in table
    text = xml.dom.minidom.parse(str(bench.folder / "picture.svg")).getElementsByTagName("text")
    assert {f"growth-{name}" for name in GROWTHS} < {t.firstChild.data for t in text}


def check_continued(bench):
    done = bench.call("--fake", "--only", "growth-cu", "--limit", "0")
    assert done.returncode == 3 and "3 cases are left" in done.stdout and not (bench.folder / "results.json").exists()
    assert bench.call("--fake", "--only", "growth-cuMem").returncode == 0
    first = bench.cases()["growth-cuMem"]
    assert bench.call("--fake", "--only", "growth-cu").returncode == 0
    assert len(bench.cases()) == 3 and bench.cases()["growth-cuMem"] == first


def check_other_driver(bench):
    assert bench.call("--fake", "--only", "growth-cuMem").returncode == 0
    done = bench.call("--only", "growth-cuMem")
    assert done.returncode == 1 and "results of another driver: use another --results" in done.stderr


def check_failure(bench):
    """A case that fails says why, and the others go on."""
    pack = bench.folder / "pack"
    pack.mkdir()
    for name in ("bfcd", "bfcctl", "headline.py"):
        (pack / name).touch()
    (pack / "growth").write_text("""#!/bin/sh
case $1 in malloc) echo '{"n": 1}' ;; async) echo 'no pools' >&2; exit 3 ;; vmm) exit 77 ;; esac\n""")
    (pack / "growth").chmod(0o755)
    done = bench.call("--fake", "--only", "growth-cu", "--build", pack)
    assert done.returncode == 1, done.stdout + done.stderr
    seen = [bench.cases()[f"growth-{name}"] for name in GROWTHS[:3]]
    assert (seen[0]["n"], seen[2]["missing"]) == (1, "it is not installed"), seen
    assert seen[1]["failed"] == "RuntimeError: exit status 3: no pools" in (bench.folder / "table.md").read_text(), seen


def check_mistakes(bench):
    growth = pathlib.Path(BUILD) / "tests/gpu/growth"
    done = subprocess.run([growth, "malloc", "4096", "4096"], capture_output=True, text=True)
    assert done.returncode == 2 and "a multiple of 2 MiB" in done.stderr
    done = subprocess.run(
        [sys.executable, f"{SOURCE}/scripts/gpu-bench", "--fake", "--build", bench.folder],
        capture_output=True, text=True, cwd=bench.folder,
    )  # fmt: skip
    assert done.returncode == 1 and "there is no" in done.stderr and "name a build with --build" in done.stderr


CHECKS = (check_growths, check_continued, check_other_driver, check_failure, check_mistakes)

print(f"1..{len(CHECKS)}", flush=True)
failed = 0
for i, check in enumerate(CHECKS, 1):
    try:
        with tempfile.TemporaryDirectory(prefix="check-gpu-bench-") as scratch:
            check(Bench(scratch))
        print(f"ok {i} - {check.__name__}", flush=True)
    except (AssertionError, OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
        failed += 1
        print(f"not ok {i} - {check.__name__}", *(f"# {line}" for line in repr(error).split("\\n")), sep="\n", flush=True)
sys.exit(failed > 0)
