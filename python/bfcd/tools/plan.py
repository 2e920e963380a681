"""The smallest limit with which the daemon serves a trace, which bfc-replay writes to standard input.

A limit serves a trace if the daemon refuses no request of one process that replays the trace, without other users of the
quota. The limit of a plan serves, and 2 MiB less does not. A still lower limit may serve by chance, because blocks are placed
differently. The search does not look for it.

A run is a whole replay, and each tells only whether a limit serves. What separates the limit from the peak is found by three
searches: in one region of memory without extents, with the daemon but without the client's cache, and with both. The daemon
is a bfcd on a device without memory, with sockets of its own.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from . import _text
from ._bfcctl import Bfcctl, Failure
from .trace import GRANULE, Space, Trace, read

PROGRAM = "bfc-replay"
MIB = 1 << 20
STEP = 2 * MIB  # limits are multiples of it
MAX_SPACE = 1 << 40  # of an arena
REGION_STEPS = 16384  # the region is searched in steps of peak / REGION_STEPS
MAX_FACTOR = 256  # times the peak: a refusal with that limit has another cause
CHECK_RUNS = 3  # that the limit of a plan must serve
MAX_PARENT = 60  # of a socket's path (107 bytes) the rest is for names below it
PR_SET_PDEATHSIG = 1
SERVICE = {"NOTIFY_SOCKET", "WATCHDOG_USEC", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"}  # what a service manager sets


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replay", default="bfc-replay", help="the program that replays")
    parser.add_argument("--name", default="trace", help="of the trace")
    parser.add_argument("--scale", type=float, default=1, help="by which its sizes were multiplied")
    parser.add_argument("--left-out", help="what the file has and the trace has not")
    parser.add_argument("--cache", choices=("on", "off"), default="on", help="the client's cache")
    parser.add_argument("--device", choices=("host", "cuda"), default="host")
    parser.add_argument("--share", choices=("fd", "cuda-ipc"), default="fd")
    parser.add_argument("--growth", choices=("on-demand", "preallocate"), default="on-demand")
    parser.add_argument("--max-blocks", type=int, default=100000)
    parser.add_argument("--partition", default="plan")
    parser.add_argument("--tenant", default="plan")
    parser.add_argument("--quota-bytes", type=int, default=0, help="the limit that the quota has now; 0: there is none")


# ---- runs ------------------------------------------------------------------------------


class Interrupted(Failure):
    """By a signal."""


class Progress:
    """On a terminal, after a second."""

    def __init__(self) -> None:
        self.begin, self.is_shown = time.monotonic(), False
        self.is_possible = sys.stderr.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb")

    def look(self) -> None:
        seconds = int(time.monotonic() - self.begin)
        if self.is_possible and seconds > 0:
            print(f"\rplan: {seconds} s\x1b[K", end="", file=sys.stderr, flush=True)
            self.is_shown = True

    def end(self) -> None:
        if self.is_shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _start(words: list[str], **more: Any) -> subprocess.Popen[bytes]:
    """It ends with this process. A terminal's SIGINT is for this process, which ends it: so it has a group of its own. In a
    session of its own the kernel would schedule it as if it had nothing to do with the others (sched(7), autogroup)."""
    parent, prctl = os.getpid(), ctypes.CDLL(None).prctl

    def die_with_parent() -> None:
        if prctl(PR_SET_PDEATHSIG, signal.SIGKILL) < 0 or os.getppid() != parent:
            os._exit(1)
        os.setpgid(0, 0)

    return subprocess.Popen(words, preexec_fn=die_with_parent, **more)


def _find_daemon(replay: str) -> str:
    """Beside bfc-replay, in the folder sbin beside its folder, or in the path."""
    folder = os.path.dirname(replay)
    for path in (os.path.join(folder, "bfcd"), os.path.join(folder, "../sbin/bfcd")):
        if folder and os.access(path, os.X_OK):
            return path
    return "bfcd"


def _accepts(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as s:
        return s.connect_ex(path) == 0


class Runs:
    """Replays of one trace, which is a file, in a folder for their daemons. run(): whether the limit serves."""

    def __init__(self, options: argparse.Namespace, trace: Trace, folder: str, file: int) -> None:
        self.options, self.trace, self.folder, self.file = options, trace, folder, file
        self.bfcd, self.has_cache, self.n, self.n_daemons = _find_daemon(options.replay), False, 0, 0
        self.sizes = [-(-b.size // GRANULE) * GRANULE for b in trace.buffers]
        self.served: dict[str, Any] = {}  # the job's report of the last run that was served
        self.refusal = os.strerror(errno.ERANGE)  # of the last run
        self.progress = Progress()
        self.job: subprocess.Popen[bytes] | None = None
        self.is_stopped = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)

    def _stop(self, *_: Any) -> None:
        self.is_stopped = True
        if self.job:
            self.job.kill()

    def check(self) -> None:
        self.progress.look()
        if self.is_stopped:
            raise Interrupted(f"no plan: {os.strerror(errno.EINTR)}")

    def region(self, n_bytes: int) -> bool:
        """In one region of memory, without extents."""
        places: dict[int, int] = {}
        space, sizes = Space(n_bytes), self.sizes
        self.n += 1
        self.check()
        for _, i, is_free in self.trace.events:
            if is_free:
                space.free(places.pop(i), sizes[i])
            else:
                places[i] = space.alloc(sizes[i])
                if space.end > n_bytes:
                    return False
        return True

    def daemon(self, limit: int) -> bool:
        self.n += 1
        self.n_daemons += 1
        folder = os.path.join(self.folder, str(self.n_daemons))
        os.mkdir(folder)
        paths = {name: os.path.join(folder, name) for name in ("bfcd.yaml", "client", "log")}
        self._write_config(folder, limit)
        words = ["bfcd", "--no-memory", "--log-level", "error", "--config", paths["bfcd.yaml"]]
        with open(paths["log"], "w+b") as log:
            try:
                bfcd = _start(words, executable=self.bfcd, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            except OSError as error:
                raise Failure(f"no plan: bfcd cannot be run: {error.strerror}") from None
            try:
                while bfcd.poll() is None and not _accepts(paths["client"]):
                    self.check()
                    time.sleep(0.001)
                report = self._replay(paths["client"]) if bfcd.returncode is None else {"error": "bfcd has ended"}
            finally:
                bfcd.kill()  # it keeps nothing
                bfcd.wait()
            self.check()
            if report["error"]:
                log.seek(0)
                raise Failure("no plan: " + (log.readline().decode(errors="replace").rstrip("\n") or report["error"]))
        if report["failures"] > 0:
            self.refusal = report["failure_message"]
            return False
        self.served = report["per_job"][0]
        return True

    def _write_config(self, folder: str, limit: int) -> None:
        o, mib = self.options, f"{limit // MIB}MiB"
        with open(os.path.join(folder, "bfcd.yaml"), "w", encoding="utf-8", errors="surrogateescape") as out:
            out.write(
                f"socket: {{path: '{folder}/client'}}\nadmin_socket: {{path: '{folder}/admin'}}\n"
                "devices:\n"
                + (f"  - id: host\n    size: {mib}\n" if o.device == "host" else "  - id: cuda:0\n")
                + f'    partitions:\n      - {{name: "{o.partition}", limit: {mib}, growth: {o.growth}'
                + (f", share: {o.share}}}\n" if o.device == "cuda" else "}\n")
                + f'tenants:\n  - name: "{o.tenant}"\n    match: {{uid: [{os.getuid()}]}}\n'
                + f'    quotas: [{{partition: "{o.partition}", limit: {mib}, max_blocks: {o.max_blocks}}}]\n'
            )

    def _replay(self, path: str) -> Any:
        os.lseek(self.file, 0, os.SEEK_SET)
        words = [self.options.replay, "--json", "--until-refused", "--socket", path]
        words += ["--cache", "on" if self.has_cache else "off", "-"]
        self.job = _start(words, stdin=self.file, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        if self.is_stopped:
            self.job.kill()
        while True:
            try:
                out, err = self.job.communicate(timeout=0.1)
                break
            except subprocess.TimeoutExpired:
                self.progress.look()
        self.job = None
        try:
            return json.loads(out)
        except ValueError:  # it has said why, or was killed
            return {"error": err.decode(errors="replace").removeprefix("bfc-replay: ").strip() or "bfc-replay was killed"}


# ---- the search ------------------------------------------------------------------------


def _round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def _search(runs: Runs, run: Callable[[int], bool], step: int, least: int) -> int:
    """Nothing below `least`, a multiple of step, serves. From there up in growing steps, then by bisection: what
    tests/bench/plan.py does with daemons."""
    low, high, most = least - step, least, least
    while most < min(least * MAX_FACTOR, MAX_SPACE // 2):
        most *= 2
    stride = low // 64 // step * step or step
    while not run(high):
        low, high, stride = high, high + stride, stride * 2
        if high > most:
            raise Failure(f"no limit serves the trace: {runs.refusal}")
    while high - low > step:
        middle = low + (high - low) // 2 // step * step
        if run(middle):
            high = middle
        else:
            low = middle
    return high


def _serve_again(runs: Runs, limit: int) -> int:
    """One run can be served by chance: a client returns idle memory while its request waits, and where the daemon places the
    block depends on how much has come by then. So the limit must serve several runs in a row, else the next one must."""
    most, n = 2 * limit, 0
    while n < CHECK_RUNS:
        if runs.daemon(limit):
            n += 1
            continue
        n, limit = 0, limit + STEP
        if limit > most:
            raise Failure(f"no limit serves the trace: {runs.refusal}")
    return limit


def _find_region(runs: Runs, peak: int) -> int:
    """The smallest region of memory. Without gaps it is exactly the peak, which need not be a multiple of the step."""
    if runs.region(peak):
        return peak
    step = _round_up(peak // REGION_STEPS + 1, GRANULE)
    return _search(runs, runs.region, step, _round_up(peak + 1, step))


def find(runs: Runs) -> dict[str, Any]:
    """The limit is the sum of the peak of live bytes and four differences, of which the last two may be negative."""
    peak = runs.trace.peak
    peak_blocks = live = 0
    for _, i, is_free in runs.trace.events:
        live += -runs.sizes[i] if is_free else runs.sizes[i]
        peak_blocks = max(peak_blocks, live)
    if peak_blocks > MAX_SPACE // 2:
        raise Failure("no limit serves the trace: the peak is above 512 GiB; an arena has at most 1 TiB of addresses")
    region = _find_region(runs, peak_blocks)
    least = _round_up(peak_blocks, STEP)
    limit = without = _search(runs, runs.daemon, STEP, least)
    if runs.options.cache == "on":
        runs.has_cache = True
        limit = _serve_again(runs, _search(runs, runs.daemon, STEP, least))
    return {
        "limit_bytes": limit,
        "peak_live_bytes": peak,
        "reasons": {
            "rounding_bytes": peak_blocks - peak,
            "placement_bytes": region - peak_blocks,
            "extent_bytes": without - region,
            "cache_bytes": limit - without,
        },
        "peak_charged_bytes": runs.served["peak_charged_bytes"],
        "peak_client_bytes": runs.served["peak_reserved_bytes"],
        "largest_extent_bytes": runs.served["largest_extent_bytes"],
        "replays": runs.n,
        "seconds": time.monotonic() - runs.progress.begin,
    }


# ---- the report ------------------------------------------------------------------------


def _difference(n_bytes: int, why: str) -> str:
    return f"{'-' if n_bytes < 0 else '+'} {_text.size(abs(n_bytes))}: {why}"


def print_report(options: argparse.Namespace, n_buffers: int, plan: dict[str, Any]) -> None:
    limit, peak, reasons = plan["limit_bytes"], plan["peak_live_bytes"], plan["reasons"]
    place = "GPU" if options.device == "cuda" else "host"
    lines = {
        "Trace": f"{options.name}: {n_buffers} buffers, sizes times {options.scale:g}",
        "Place": f"{place}, share {options.share}, {options.growth}"
        + ("" if options.cache == "on" else ", without the client's cache"),
        "Limit": f"{_text.size(limit)} ({limit // MIB}MiB); {limit / peak:.3f} times the peak",
        "Peak": f"{_text.size(peak)} requested",
        "Rounding": _difference(reasons["rounding_bytes"], "blocks are multiples of 256 bytes"),
        "Placement": _difference(reasons["placement_bytes"], "gaps between blocks, in one region of memory"),
        "Extents": _difference(reasons["extent_bytes"], "memory is charged in whole extents"),
    }
    if options.cache == "on":
        lines["Cache"] = _difference(reasons["cache_bytes"], "the client's cache")
    largest, charged = _text.size(plan["largest_extent_bytes"]), _text.size(plan["peak_charged_bytes"])
    lines["Extent"] = f"{largest} at most; {charged} charged at the peak"
    if options.quota_bytes > 0:
        fits = "the trace fits" if limit <= options.quota_bytes else "too little"
        size = _text.size(options.quota_bytes)
        lines["Quota"] = f"tenant '{options.tenant}' has {size} in '{options.partition}': {fits}"
    lines["Time"] = f"{plan['seconds']:.3f} s for {plan['replays']} replays"
    for title, text in lines.items():
        print(f"{title:9}  {_text.escape(text)}")


def _as_text(argument: str) -> str:
    return os.fsencode(argument).decode(errors="replace")


def print_json(options: argparse.Namespace, plan: dict[str, Any]) -> None:
    quota = {"partition": options.partition, "tenant": options.tenant, "limit_bytes": options.quota_bytes}
    document = {
        "schema": 1,
        "trace": _as_text(options.name),
        "scale": float(f"{options.scale:.6g}"),
        "device": options.device,
        "share": options.share,
        "preallocate": options.growth == "preallocate",
        "cache": options.cache == "on",
        **plan,
        "seconds": float(f"{plan['seconds']:.6g}"),
        "quota": {**quota, "fits": plan["limit_bytes"] <= options.quota_bytes} if options.quota_bytes else None,
        "left_out": options.left_out,
    }
    print(json.dumps(document, indent=2, ensure_ascii=False))


def _write_csv(trace: Trace, out: Any) -> None:
    """For bfc-replay. Only a recording has flags, and with them its tags matter."""
    has_flags = trace.buffers[0].flags >= 0
    out.write("id,lower,upper,size,tag,flags\n" if has_flags else "id,lower,upper,size\n")
    for i, b in enumerate(trace.buffers):
        out.write(f"{i},{b.lower},{b.upper},{b.size}" + (f",{trace.labels[b.tag]},{b.flags}\n" if has_flags else "\n"))
    out.flush()


def run(options: argparse.Namespace, _: Bfcctl) -> None:
    trace = read()
    for name in [name for name in os.environ if name.startswith("BFC_") or name in SERVICE]:
        del os.environ[name]  # a plan is the same in a job of bfcctl run, too
    os.environ["BFC_RETURN_MS"] = "1"  # a daemon that is gone does not come back
    parent = os.environ.get("TMPDIR", "")
    is_usable = parent.startswith("/") and len(os.fsencode(parent)) <= MAX_PARENT and parent.isprintable() and "'" not in parent
    folder = runs = None
    try:
        folder = tempfile.mkdtemp(prefix="bfc-plan-", dir=parent if is_usable else "/tmp")
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="surrogateescape", dir=folder) as file:
            _write_csv(trace, file)
            runs = Runs(options, trace, folder, file.fileno())
            plan = find(runs)
    except OSError as error:
        raise Failure(f"no plan: {error.strerror}") from None
    finally:
        if runs:
            runs.progress.end()
        if folder:  # where others can write its parent, a link may be in its place by now: rmtree() follows none
            shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        print_json(options, plan)
    else:
        print_report(options, len(trace.buffers), plan)
