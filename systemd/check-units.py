#!/usr/bin/env python3
"""Asks systemd itself about the units: no key that it does not know, and how far bfcd.service is boxed in.

SPDX-License-Identifier: Apache-2.0

usage: check-units.py SYSTEMD-ANALYZE UNIT...    TAP on standard output
"""
import os
import re
import subprocess
import sys
import tempfile

MAX_EXPOSURE = 1.5
# These would hide what the driver, or the daemon, needs to see.
MUST_NOT = ["PrivateDevices", "PrivateUsers", "PrivateNetwork", "PrivateIPC", "DynamicUser"]

n_tests = n_failed = 0


def report(ok, name, *more):
    global n_tests, n_failed
    n_tests += 1
    n_failed += not ok
    print(f"{'ok' if ok else 'not ok'} {n_tests} - {name}")
    for line in more:
        print(f"# {line}")


def run(*argv):
    r = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                       env={**os.environ, "SYSTEMD_PAGER": "", "SYSTEMD_COLORS": "0"})
    return r.returncode, r.stdout


def settings(text):
    """(line number, key, value) of a unit; a comment line has no key."""
    for i, line in enumerate(text.splitlines(), 1):
        match = re.match(r"(\w+)=(.*)", line)
        if match:
            yield i, match[1], match[2]


def undocumented(text):
    """Keys of the service whose paragraph does not begin with a reason."""
    reason = section = None
    for line in text.splitlines():
        if line.startswith("["):
            section, reason = line, None
        elif line.startswith("#"):
            reason = line
        elif not line.strip():
            reason = None
        elif section == "[Service]" and not reason and not re.match(r"Type=|ExecStart=", line):
            yield line


def main():
    analyze, *units = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        for unit in units:
            text = open(unit).read()
            # Nothing is installed here; what is started is not what this asks.
            text = re.sub(r"^(Exec\w+=-?)\S+", r"\1/bin/true", text, flags=re.M)
            with open(os.path.join(folder, os.path.basename(unit)), "w") as f:
                f.write(text)
        paths = [os.path.join(folder, os.path.basename(u)) for u in units]
        status, said = run(analyze, "verify", "--man=no", "--recursive-errors=no", *paths)
        # Of other units of this machine it may have to say something, too.
        ours = [line for line in said.splitlines() if re.search(r"bfc[d-][\w-]*\.(service|socket)", line)]
        report(status == 0 and not ours, "systemd-analyze verify finds nothing", *ours)

        service = next(p for p in paths if p.endswith("/bfcd.service"))
        text = open(service).read()
        keys = [key for _, key, _ in settings(text)]
        status, said = run(analyze, "security", "--offline=yes", "--no-pager", service)
        match = re.search(r"Overall exposure level for bfcd\.service: ([\d.]+)", said)
        left = [line for line in said.splitlines() if line.startswith("✗")]
        report(status == 0 and match and float(match[1]) <= MAX_EXPOSURE,
               f"systemd-analyze security: {match[1] if match else 'no figure'}, at most {MAX_EXPOSURE}",
               *([] if match else said.splitlines()), *(re.sub(r"\s{2,}", "  ", line) for line in left))
        found = [key for key in MUST_NOT if key in keys]
        report(not found, "nothing is hidden that the driver needs", *found)
        report("char-nvidia* rw" in [v for _, k, v in settings(text) if k == "DeviceAllow"],
               "NVIDIA's devices can be opened")
        # What a restart rests on: keepers stay, and no limit ends it.
        values = {k: v for _, k, v in settings(text)}
        report(values.get("KillMode") == "process" and values.get("StartLimitIntervalSec") == "0" and
               values.get("Restart") == "always", "keepers stay for the next daemon, which is started")
        # systemctl stop asks for one transaction per unit, so what one asks for must be the stop of all.
        together = {name: {unit for _, key, value in settings(open(os.path.join(folder, name)).read())
                           if key == "PartOf" for unit in value.split()}
                    for name in ("bfcd.service", "bfcd.socket", "bfcd-admin.socket", "bfcd-monitor.socket")}
        sockets = {"bfcd.socket", "bfcd-admin.socket", "bfcd-monitor.socket"}
        report(all(sockets - {name} <= units for name, units in together.items()),
               "a stop of any socket stops all units", *(f"{n}: {u}" for n, u in together.items()))
        for exporter in (p for p in paths if p.endswith("/bfc-exporter.service")):
            status, said = run(analyze, "security", "--offline=yes", "--no-pager", exporter)
            match = re.search(r"Overall exposure level for bfc-exporter\.service: ([\d.]+)", said)
            report(status == 0 and match and float(match[1]) <= MAX_EXPOSURE,
                   f"systemd-analyze security: bfc-exporter {match[1] if match else 'no figure'}, at most {MAX_EXPOSURE}")
        missing = list(undocumented(text))
        report(not missing, "every line of the service has its reason", *missing)
    print(f"1..{n_tests}")
    return n_failed > 0


if __name__ == "__main__":
    sys.exit(main())
