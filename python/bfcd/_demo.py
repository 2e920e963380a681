"""python -m bfcd demo: a daemon of its own in a temporary folder, jobs under limits, a refusal, a shared model, parking under
pressure, and the page. All that it starts it ends, also after Ctrl-C and when a step fails.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from . import _native
from ._terminal import BOLD, DIM, GREEN, HOW_TO_GET, RED, fill, is_terminal, paint

_LIMIT_S = 180.0  # for what takes milliseconds on an idle machine
_PAUSE_S = 15.0
_PAGE_S = 300.0
_MAX_FOLDER = 60  # bytes; a socket's path has at most 107
_INDENT = "   "

_CONFIG = """\
socket: {{path: "{folder}/bfcd.sock"}}
admin_socket: {{path: "{folder}/admin.sock"}}
max_sessions: 64
devices:
  - id: host              # memory of this machine; a GPU is cuda:0
    size: 256MiB
    partitions: [{{name: train, limit: 192MiB}}, {{name: ram, limit: 64MiB}}]
tenants:
  - name: you
    match: {{uid: {uid}}}
    leases: self          # you may give your jobs limits of their own
    quotas:
      - {{partition: train, park: {{to: ram, idle: 200ms}}}}
      - {{partition: ram}}
"""


class StepFailed(Exception):
    """Something is not as the tour says."""


def _need(condition: object, what: str) -> None:
    if not condition:
        raise StepFailed(what)


# ---- signals ----


class _Signals:
    """They end the tour by an exception, but not between the start of a process and the note that it has to be ended."""

    def __init__(self) -> None:
        self._is_delayed = False
        self._pending: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._handle)

    def _handle(self, number: int, _: FrameType | None = None) -> None:
        if self._is_delayed:
            self._pending = number
        else:
            raise SystemExit(128 + number)

    @contextlib.contextmanager
    def delayed(self) -> Iterator[None]:
        self._is_delayed = True
        try:
            yield
        finally:
            self._is_delayed = False
        if self._pending is not None:
            self._handle(self._pending)

    def ignore(self) -> None:
        self._is_delayed = True


# ---- what is started ----


class _Process:
    """A program in a session of its own, so that Ctrl-C of the terminal does not reach it before the tour ends it."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        self.name = name
        self.seen: list[str] = []  #: what line() has returned
        self.lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line.rstrip("\n"))
        self.lines.put(None)

    def tell(self, words: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{words}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise StepFailed(f"{self.name} has ended") from None

    def line(self) -> str:
        """The next one that it prints; those of bfcctl are only shown."""
        while True:
            try:
                line = self.lines.get(timeout=_LIMIT_S)
            except queue.Empty:
                raise StepFailed(f"{self.name} printed nothing for {_LIMIT_S:.0f} s") from None
            if line is None:
                raise StepFailed(f"{self.name} has ended{': ' if self.seen else ''}{' '.join(self.seen)}")
            self.seen.append(line)
            if not line.startswith("bfcctl: "):
                return line
            _show(line)

    def rest(self) -> list[str]:
        """What it printed and nobody has read, of a program that has ended."""
        with contextlib.suppress(queue.Empty):  # a descendant that lives on has its output, too
            return list(iter(lambda: self.lines.get(timeout=5), None))
        return []

    def finish(self) -> int:
        """Ends its input, on which a job ends."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            return self.process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise StepFailed(f"{self.name} does not end") from None

    def stop(self) -> int:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()


class _Tour:
    def __init__(self, signals: _Signals, is_fast: bool) -> None:
        self._signals = signals
        self._pauses = not is_fast and is_terminal() and sys.stdin.isatty()
        self._n_steps = 0
        self._processes: list[_Process] = []
        self.url = ""
        with signals.delayed():
            temporary = tempfile.gettempdir()
            self.folder = Path(
                tempfile.mkdtemp(prefix="bfcd-demo-", dir=temporary if len(temporary) <= _MAX_FOLDER else "/tmp")
            )
        # Of a job of another bfcd nothing but the library.
        self._environment = {k: v for k, v in os.environ.items() if not k.startswith("BFC_") or k == "BFC_LIBRARY"}
        self._environment |= {
            "BFC_SOCKET": str(self.folder / "bfcd.sock"),
            "BFC_ADMIN_SOCKET": str(self.folder / "admin.sock"),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])),
        }

    # ---- processes ----

    def start(self, name: str, *command: str, **environment: str) -> _Process:
        with self._signals.delayed():
            process = _Process(name, list(command), self._environment | environment)
            self._processes.append(process)
        return process

    def start_job(self, name: str, limit: str, *words: str, **environment: str) -> _Process:
        run = ["-m", "bfcd", "run", "--limit", limit, "--lease", name, "--partition", "train", "--"]
        job = ["-m", "bfcd._demo_jobs", *words]
        shown = " ".join([*(f"{k}={v}" for k, v in environment.items()), "python", *run, "python", *job])
        _show(paint(f"$ {shown}", BOLD))
        return self.start(name, sys.executable, *run, sys.executable, *job, **environment)

    def finish(self, job: _Process) -> list[str]:
        """Ends a job; the lines that bfcctl run printed."""
        status = job.finish()
        self._processes.remove(job)
        lines = job.rest()
        _need(status == 0, f"{job.name} ended with status {status}: {' '.join(lines)}")
        return lines

    def bfcctl(self, *words: str) -> str:
        done = subprocess.run(
            [_program("bfcctl"), *words],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
        _need(done.returncode == 0, f"bfcctl {' '.join(words)} failed: {done.stderr.strip()}")
        return done.stdout

    def show_bfcctl(self, *words: str) -> None:
        _show(paint(f"$ bfcctl {' '.join(words)}", BOLD))
        for line in self.bfcctl(*words).splitlines():
            _show(line)

    def lease(self, name: str) -> dict[str, int]:
        rows = json.loads(self.bfcctl("--json", "lease", "list"))["leases"]
        found = [row for row in rows if row["name"] == name]
        _need(found, f"there is no lease '{name}'")
        return found[0]

    def log(self) -> str:
        """The daemon's last lines, after end()."""
        daemon = next((process for process in self._processes if process.name == "bfcd"), None)
        if daemon is None:
            return ""
        return "".join(f"{_INDENT}bfcd: {line}\n" for line in [*daemon.seen, *daemon.rest()][-10:])

    def end(self) -> None:
        """All of it, the daemon last."""
        for process in reversed(self._processes):
            process.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- what one sees ----

    def step(self, title: str, *sentences: str) -> None:
        if self._n_steps > 0:
            self.pause("Enter: the next step", _PAUSE_S)
        self._n_steps += 1
        print(f"\n{paint(f'{self._n_steps}  {title}', BOLD)}")
        for sentence in sentences:
            _show(sentence)
        print(flush=True)

    def pause(self, words: str, limit_s: float) -> None:
        if self._pauses:
            print(f"\n{_INDENT}{paint(f'{words} (or wait {limit_s:.0f} s)', DIM)}", flush=True)
            if select.select([sys.stdin], [], [], limit_s)[0]:
                sys.stdin.readline()


def _show(text: str) -> None:
    print(fill(f"{_INDENT}{text}", len(_INDENT)) if not text.startswith(" ") else f"{_INDENT}{text}", flush=True)


def _program(name: str) -> str:
    path = _native.program(name)
    _need(path, f"{name} was not found: {HOW_TO_GET}")
    return str(path)


# ---- the steps ----

_LEASES = ("lease", "list", "--columns", "lease,sessions,in-use,limit,refused")


def _start_daemon(tour: _Tour) -> None:
    tour.step(
        "A daemon of your own",
        "bfcd owns memory and lends it to jobs. This one owns 256 MiB of this machine's memory, until the tour ends. On a "
        "server it has the memory of the GPUs. This is its configuration:",
    )
    folder = json.dumps(str(tour.folder))[1:-1]  # in quotes, as YAML has them, too
    config = _CONFIG.format(folder=folder, uid=os.getuid())
    (tour.folder / "bfcd.yaml").write_text(config)
    for line in config.splitlines():
        print(f"{_INDENT}  {line}")
    daemon = tour.start("bfcd", _program("bfcd"), "--config", str(tour.folder / "bfcd.yaml"))
    print()
    while not daemon.line().endswith("is ready"):
        pass
    tour.show_bfcctl("partitions", "--columns", "partition,device,in-use,limit")


def _start_page(tour: _Tour) -> None:
    exporter = _native.program("bfc-exporter")
    if exporter is None:
        return
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    server = tour.start(
        "bfc-exporter", exporter, "--listen", f"127.0.0.1:{port}", "--socket", str(tour.folder / "monitor.sock")
    )
    while "listening on" not in server.line():
        pass
    tour.url = f"http://127.0.0.1:{port}/"
    print()
    _show(f"Its page is {paint(tour.url, GREEN)} Open it in a browser, and watch it during the tour.")
    if "SSH_CONNECTION" in os.environ:
        _show(f"On your own computer that needs: ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}")


def _fetch(tour: _Tour, path: str) -> bytes | None:
    connection = http.client.HTTPConnection(tour.url.removeprefix("http://").rstrip("/"), timeout=_LIMIT_S)
    try:
        connection.request("GET", f"/{path}")
        answer = connection.getresponse()
        return answer.read() if answer.status == 200 else None
    except OSError:
        return None
    finally:
        connection.close()


def _three_jobs(tour: _Tour) -> list[_Process]:
    tour.step(
        "Three jobs, each with a limit",
        "`python -m bfcd run` starts a program with a limit of its own, which bfcd calls a lease.",
    )
    sizes = {"vision": ("48MiB", "32"), "language": ("32MiB", "24"), "batch": ("24MiB", "16")}
    jobs = [tour.start_job(name, limit, "work", n) for name, (limit, n) in sizes.items()]
    print()
    for job in jobs:
        _show(f"{job.name}: {job.line()}")
    print()
    tour.show_bfcctl(*_LEASES)
    for job in jobs:
        _need(
            tour.lease(job.name)["bytes_in_use"] == int(sizes[job.name][1]) << 20, f"{job.name} does not have its bytes"
        )
    return jobs


def _refusal(tour: _Tour, jobs: list[_Process]) -> None:
    tour.step(
        "A refusal", "batch asks for 16 MiB more than the 16 MiB that it has, and its limit is 24 MiB. It is told:"
    )
    batch = jobs[2]
    batch.tell("more 16")
    answer = batch.line()
    _show(paint(answer, RED))
    _need(answer.startswith("bfcd.QuotaExceeded: lease 'batch'"), "batch was not refused")
    print()
    _show("Only that request fails. No job was hurt:")
    _check(jobs)
    print()
    _show("batch ends. `run` says what it had:")
    for line in tour.finish(batch):
        _show(line)
    jobs.remove(batch)


def _check(jobs: list[_Process]) -> None:
    for job in jobs:
        job.tell("check")
    for job in jobs:
        answer = job.line()
        _show(f"{job.name}: {answer}")
        _need(answer == "its bytes are as it wrote them", f"{job.name} has other bytes")


def _shared_model(tour: _Tour) -> None:
    tour.step(
        "A shared model",
        "Two processes of one job need a model of 40 MiB, and the job's limit is 48 MiB: two copies would not fit. "
        "One process publishes its memory under a name, and the other one maps the same memory.",
    )
    server = tour.start_job("server", "48MiB", "serve", "40")
    print()
    answers = [server.line(), server.line()]
    for answer in answers:
        _show(answer)
    _need(len({answer.rpartition(" ")[2] for answer in answers}) == 1, "the two models differ")
    print()
    _show("It is charged once:")
    tour.show_bfcctl(*_LEASES)
    row = tour.lease("server")
    _need((row["num_sessions"], row["bytes_in_use"]) == (2, 40 << 20), "the model is not charged once")
    tour.finish(server)


def _parking(tour: _Tour) -> None:
    tour.step(
        "Parking under pressure",
        "A notebook has 64 MiB and does nothing. An urgent job needs 96 MiB, and the partition does not have them: "
        "192 MiB less those of vision, language and the notebook. So bfcd copies idle memory of the notebook to the "
        "partition ram, and lends what it had to the urgent job.",
    )
    notebook = tour.start_job("notebook", "64MiB", "notebook", "64")
    _show(f"notebook: {notebook.line()}")
    urgent = tour.start_job("urgent", "96MiB", "work", "96", BFC_WAIT_MS="120000")
    _show(f"urgent: {urgent.line()}")
    print()
    tour.show_bfcctl("tenants", "--columns", "partition,in-use,parked,limit")
    tenants = json.loads(tour.bfcctl("--json", "tenants"))["tenants"]
    _need(sum(row["bytes_parked"] for row in tenants) > 0, "nothing is parked")
    _check([urgent])
    tour.finish(urgent)
    print()
    _show("The urgent job has ended. The notebook works again:")
    notebook.tell("use")
    answer = notebook.line()
    _show(f"notebook: {answer}")
    _need(re.match(r"woke [1-9]\d* MiB: the same bytes at the same addresses", answer), "the notebook did not wake")


def _page(tour: _Tour, jobs: list[_Process]) -> None:
    if not tour.url:
        tour.step("What is there now", "bfc-exporter, which serves a page, was not found. bfcctl shows the same:")
        tour.show_bfcctl(*_LEASES)
    else:
        tour.step("The page", "bfc-exporter serves a page for browsers, metrics for Prometheus, and JSON:")
        page, leases = _fetch(tour, ""), _fetch(tour, "api/leases")
        _need(page and b"<html" in page.lower() and leases, "the page does not answer")
        rows = json.loads(leases or b"{}")["leases"]
        _need({row["name"] for row in rows} == {*(job.name for job in jobs), "notebook"}, "the page has other leases")
        _show(f"{paint(tour.url, GREEN)} answers with {len(page or b''):,} bytes")
        _show(f"{tour.url}api/leases has {', '.join(row['name'] for row in rows)}")
        tour.show_bfcctl("tenants", "--columns", "partition,in-use,peak,limit,refused")
    print()
    _check(jobs)
    if tour.url:
        tour.pause("The page stays until you press Enter", _PAGE_S)


def _show_all(tour: _Tour) -> None:
    print(
        fill("A tour of bfcd, in two minutes, without root and without a GPU. Ctrl-C ends it. Nothing of it stays.", 0)
    )
    _start_daemon(tour)
    _start_page(tour)
    jobs = _three_jobs(tour)
    _refusal(tour, jobs)
    _shared_model(tour)
    _parking(tour)
    _page(tour, jobs)


def main(is_fast: bool) -> int:
    """The exit status. 0: all was as the tour says."""
    try:
        for name in ("bfcd", "bfcctl"):
            _program(name)
    except StepFailed as e:
        print(f"bfcd: {e}", file=sys.stderr)
        return 1
    signals = _Signals()
    tour = _Tour(signals, is_fast)
    status, last = 1, ""
    try:
        _show_all(tour)
        status = 0
    except (StepFailed, OSError) as e:
        last = f"\n{paint('The tour failed', RED)}: {e}."
    except SystemExit as e:
        status = int(str(e.code))
        last = "\nInterrupted."
    finally:
        signals.ignore()
        tour.end()
    with contextlib.suppress(OSError):  # the terminal or the pipe is gone
        if last:
            print(last)
        if status == 1:
            print(tour.log())
        print("\nThe daemon and the jobs have been ended, and their folder has been removed.", flush=True)
    return status
