"""The statistics of tenants as curves for TensorBoard.

A step is one list of tenants. Its events have the same wall time and are written together. A step in which the daemon
cannot be reached is left out: a curve has a gap there, and no zeros. Steps continue behind those of the folder's other
files, because TensorBoard makes one curve of all files of a folder.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import io
import os
import pathlib
import re
import signal
import socket
import sys
import threading
import time
from typing import Any

from ._bfcctl import Bfcctl, Failure
from ._text import escape

#: By the names that TensorFlow gives its allocator's statistics.
VALUES = {
    "BytesInUse": "bytes_in_use",
    "MaxBytesInUse": "peak_bytes_in_use",
    "BytesReserved": "bytes_reserved",
    "BytesLimit": "bytes_limit",
    "NumAllocs": "num_allocs",
}
RETRY_S = 1.0  # at most, between two attempts to reach the daemon


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--logdir", required=True, help="the folder of the curves")
    parser.add_argument("--interval-ms", type=int, default=10000, help="from step to step")
    parser.add_argument("--count", type=int, help="how many steps; until a signal otherwise")
    parser.add_argument("--tenant", help="only this one")


def tag(*parts: str) -> str:
    """PARTITION/TENANT/NAME. What no name in a configuration has is written as %XX."""
    return "/".join(re.sub(rb"[^A-Za-z0-9_.-]", lambda m: b"%%%02X" % m[0][0], p.encode()).decode() for p in parts)


class EventFile:
    """Whole records only: what a write leaves behind that fails is cut off again."""

    def __init__(self, folder: str) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise Failure(f"TensorBoard is needed to write its files: pip install tensorboard ({error}).") from None
        self._event, self._value, self._writer = event_pb2.Event, summary_pb2.Summary.Value, RecordWriter
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise Failure(f"{folder} cannot be made: {error.strerror}.") from None
        self.next_step = _last_step(folder, self._event) + 1
        self._open(folder)
        self._add([self._event(wall_time=time.time(), file_version="brain.Event:2")])

    def _open(self, folder: str) -> None:
        begin = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname() or 'localhost'}.{os.getpid()}"
        for n in range(1000):
            self.path = os.path.join(folder, f"{begin}.{n}")
            try:
                self._file = open(self.path, "xb", buffering=0)
                return
            except FileExistsError:
                continue
            except OSError as error:
                raise Failure(f"{folder} can have no new file: {error.strerror}.") from None
        raise Failure(f"{folder} can have no new file: 1000 were begun in this second.")

    def _add(self, events: list[Any]) -> None:
        whole, end = io.BytesIO(), self._file.tell()
        writer = self._writer(whole)
        for event in events:
            writer.write(event.SerializeToString())
        left = whole.getbuffer()
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            self._file.truncate(end)
            raise Failure(f"{self.path} cannot be written: {error.strerror}. What was written before is complete.") from None

    def add_step(self, rows: list[dict[str, Any]]) -> None:
        now = time.time()
        events = []
        for row in rows:
            event = self._event(wall_time=now, step=self.next_step)
            event.summary.value.extend(
                self._value(tag=tag(row["partition"], row["tenant"], name), simple_value=row[key])
                for name, key in VALUES.items()
            )
            events.append(event)
        self._add(events)
        self.next_step += 1

    def close(self) -> None:
        try:
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            raise Failure(f"{self.path} may be incomplete: {error.strerror}.") from None


def _last_step(folder: str, event: Any) -> int:
    """Of all files. -1: there is none."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader

    last = -1
    for path in pathlib.Path(folder).glob("*tfevents*"):
        if not path.is_file():
            continue
        try:
            events = map(event.FromString, RawEventFileLoader(str(path)).Load())
            last = max([last, *(e.step for e in events if e.WhichOneof("what") != "file_version")])
        except Exception:  # it is another program's, with whatever it has
            continue
    return last


def _rows(bfcctl: Bfcctl, tenant: str | None, is_first: bool) -> list[dict[str, Any]]:
    rows = [row for row in bfcctl.list("tenants") if tenant in (None, row["tenant"])]
    if tenant is not None and not rows and is_first:  # later a reload may remove it for a while
        raise LookupError
    return rows


def run(options: argparse.Namespace, bfcctl: Bfcctl) -> None:
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    file = EventFile(options.logdir)
    n_steps, is_away, due = 0, False, time.monotonic()
    interval = options.interval_ms / 1000
    while not stop.is_set():
        try:
            rows = _rows(bfcctl, options.tenant, n_steps == 0)
        except LookupError:
            raise Failure(f"There is no tenant '{escape(options.tenant)}', or the daemon does not show it.") from None
        except Failure as failure:
            if not is_away and not stop.is_set():
                print(f"bfcctl: {failure} Waiting for it.", file=sys.stderr, flush=True)
            is_away, due = True, time.monotonic() + min(interval, RETRY_S)
        else:
            if is_away:
                print("bfcctl: bfcd answers again.", file=sys.stderr, flush=True)
            is_away = False
            file.add_step(rows)
            n_steps += 1
            if n_steps == options.count:
                break
            due = max(due + interval, time.monotonic())
        stop.wait(due - time.monotonic())
    file.close()
    print(f"{n_steps} step{'' if n_steps == 1 else 's'} in {escape(file.path)}")
