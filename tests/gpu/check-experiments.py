#!/usr/bin/env python3
# Runs all experiments on the fake, as a test of themselves: each listed case
# prints one line of JSON that names it and did not crash. What the answers are
# is for a real GPU to say; a few that the fake must give are checked, so that a
# case which asks nothing is noticed.
#
# SPDX-License-Identifier: Apache-2.0
#
# usage: check-experiments.py PROGRAM
import json
import os
import subprocess
import sys

EXPECTED = {
    "ipc-pid-namespace": {"open": "ERROR_INVALID_CONTEXT"},
    "ipc-after-free": {"mapping_then": "the same bytes", "open_again": "SUCCESS", "returned_by_close": 0},
    "ipc-after-kill": {"mapping_then": "the same bytes", "open_again": "SUCCESS", "returned_by_close": 0},
    "ipc-stale-overlap": {"open_new": "SUCCESS", "new_has_its_bytes": True, "old_has_its_bytes": True},
    "vmm-pid-namespace": {"import": "SUCCESS", "same_bytes": True},
    "vmm-fd-after-exit": {"import": "SUCCESS", "same_bytes": True},
    "vmm-two-extents": {"base_minus_range": 8 << 20, "bytes": 8 << 20, "fill_over_both": "SUCCESS"},
    "vmm-partial-maps": {"half": "ERROR_NOT_SUPPORTED", "second_half": "ERROR_NOT_SUPPORTED"},
    "destroyed-is-capturing": {"destroy": "SUCCESS", "answer": "crashed"},
    "destroyed-record": {"destroy": "SUCCESS", "answer": "crashed"},
    "destroyed-handle-again": {"event_waited_for": "SUCCESS"},
    "released-beside-jobs-small": {"bytes": 2 << 20},
    "context-memory": {"taken_by_each": [8 << 20] * 4, "all_returned": True},
    "capture-wait": {"context_waited_for": "ERROR_STREAM_CAPTURE_UNSUPPORTED", "capture_then": "spoilt"},
    "ipc-close-in-capture": {"open": "SUCCESS", "close": "SUCCESS", "end_of_capture": "SUCCESS"},
    "killed-returns": {"returned_at_pidfd": True},
}


def complaint(name, answer):
    if answer is None:
        return "printed nothing"
    if "crashed" in answer:
        return f"crashed: {answer['crashed']}"
    if answer.get("skipped") == "needs root" and os.geteuid() != 0:
        return None
    for key, value in EXPECTED.get(name, {}).items():
        if answer.get(key) != value:
            return f"{key} is {answer.get(key)!r}, not {value!r}"
    return None


def main():
    program = sys.argv[1]
    listed = [line.split()[0] for line in
              subprocess.run([program, "--list"], check=True, capture_output=True, text=True).stdout.splitlines()]
    run = subprocess.run([program, "--quick", "--max-bytes", str(16 << 20)], capture_output=True, text=True)
    answers = {a["case"]: a for a in map(json.loads, run.stdout.splitlines())}
    failed = False
    print(f"1..{len(listed)}")
    for i, name in enumerate(listed, 1):
        why = complaint(name, answers.get(name))
        failed |= why is not None
        print(f"{'not ok' if why else 'ok'} {i} - {name}{': ' + why if why else ''}")
    if run.stderr:
        print("# " + run.stderr.replace("\n", "\n# "))
    if run.returncode != 0:
        print(f"# {program} says that a case failed: exit status {run.returncode}")
    return 1 if failed or not listed or run.returncode != 0 else 0


sys.exit(main())
