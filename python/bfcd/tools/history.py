"""Ended sessions, peaks and refusals, from the daemon's records in the journal or in a file.

Of sessions only the largest are kept, so that a long time needs little memory. A record of usage has the peaks since the
one before, so the peak of a time is the largest of its records: exact, but for the first and the last interval, which may
reach out of the time.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import collections
import heapq
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from . import _text as text
from ._bfcctl import Bfcctl, Failure, WrongUse
from ._text import Column, bytes_of, number, time_of

UNIT = "bfcd.service"  # journald(8) writes _SYSTEMD_UNIT itself: any process can send records, only these count
MAX_ROWS = 1000  # of sessions, leases and events
SHOWN_SESSIONS = 20  # in the table; with --wide all that are kept
AFTER_US = 60_000_000  # a record may be written so much later than its time
EVENTS = {"reload", "drain", "start", "stop", "eviction"}
DRAINS = {"begun": "drain", "drained": "drained", "resumed": "resume", "failed": "resume failed"}

Record = dict[str, Any]


class NoJournal(Failure):
    """There is none that this user may read."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--since", help="a time, such as yesterday or -2h")
    parser.add_argument("--until", help="a time")
    parser.add_argument("--tenant", help="only this one")
    parser.add_argument("--file", help="a file of records, a journal file, or a folder of these")


# ---- points in time ------------------------------------------------------------------

_UNITS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_UNITS |= {"msec": 1, "sec": 1000, "second": 1000, "seconds": 1000, "min": 60_000, "minute": 60_000, "minutes": 60_000}
_UNITS |= {"hr": 3_600_000, "hour": 3_600_000, "hours": 3_600_000, "day": 86_400_000, "days": 86_400_000}
_UNITS |= {"week": 604_800_000, "weeks": 604_800_000}
_FORMATS = ("%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M", "%Y-%m-%d")
_FORMATS_OF_TODAY = ("%H:%M:%S", "%H:%M")


def _span_ms(words: str) -> int:
    """Of "1h30min", "1 day 2 hours" or, in seconds, "90"."""
    items = re.findall(r"([0-9]+(?:\.[0-9]{1,6})?) *([a-z]*) *", words)
    if not items or not re.fullmatch(r"(?:[0-9]+(?:\.[0-9]{1,6})?(?: *[a-z]+)? *)+", words):
        raise ValueError(words)
    if len(items) == 1 and not items[0][1]:
        items = [(items[0][0], "s")]
    return sum(int(float(n) * _UNITS[unit]) if "." in n else int(n) * _UNITS[unit] for n, unit in items)


def _at_midnight(now: int, days: int) -> int:
    t = time.localtime(now)
    return int(time.mktime((t.tm_year, t.tm_mon, t.tm_mday + days, 0, 0, 0, 0, 0, -1)))


def _absolute(words: str, now: int) -> int:
    for form in _FORMATS + _FORMATS_OF_TODAY:
        try:
            t = time.strptime(words, form)
        except ValueError:
            continue
        day = time.localtime(now) if form in _FORMATS_OF_TODAY else t
        return int(time.mktime((day.tm_year, day.tm_mon, day.tm_mday, t.tm_hour, t.tm_min, t.tm_sec, 0, 0, -1)))
    raise ValueError(words)


def parse_time(words: str, now: int) -> int:
    """In µs since 1970. ValueError."""
    try:
        if words in ("now", "today", "yesterday"):
            seconds = {"now": now, "today": _at_midnight(now, 0), "yesterday": _at_midnight(now, -1)}[words]
        elif words.startswith("-"):
            seconds = now - _span_ms(words[1:]) // 1000
        elif words.endswith(" ago"):
            seconds = now - _span_ms(words[:-4]) // 1000
        elif re.fullmatch("@[0-9]{1,18}", words):
            seconds = int(words[1:])
        else:
            seconds = _absolute(words, now) if words[:1].isdigit() and not words.endswith(" ") else -1
    except (KeyError, OverflowError):
        seconds = -1
    if not 0 <= seconds < 1 << 63:
        raise ValueError(words)
    return seconds * 1_000_000


def _option_time(option: str, words: str | None, default: float) -> float:
    try:
        return default if words is None else parse_time(words, int(time.time()))
    except ValueError:
        forms = '"2026-11-22 03:00", "03:00", "-2h", "3 days ago", "@1795459887", yesterday, today or now'
        raise WrongUse(f'wrong value for --{option} "{text.escape(words or "")}"; it is a time, such as {forms}') from None


# ---- records --------------------------------------------------------------------------


def _lines_of(path: str) -> Iterator[bytes]:
    try:
        with open(path, "rb") as lines:
            yield from lines
    except OSError as error:
        raise Failure(f"{path} cannot be read: {error.strerror}.") from error


def _of_file(path: str) -> Iterator[Record]:
    """Of the file that logrotate(8) moved last, too. A line that is no record is left out: the daemon may write the last
    one now, and a disk may have been full."""
    paths = [path + ".1", path] if os.path.lexists(path + ".1") else [path]
    for line in itertools.chain.from_iterable(map(_lines_of, paths)):
        try:
            fields = json.loads(line.decode(errors="replace"))
        except (ValueError, RecursionError):
            continue
        if isinstance(fields, dict) and isinstance(fields.get("time_us"), int) and fields["time_us"] > 0:
            yield fields


def _field(value: Any) -> str:
    """journalctl writes what is no text as a list of bytes."""
    return bytes(value).decode(errors="replace") if isinstance(value, list) and all(isinstance(b, int) for b in value) else str(value)


def _of_journal(path: str | None, since_us: float, until_us: float) -> Iterator[Record]:
    where = [] if path is None else ["--directory" if os.path.isdir(path) else "--file", path]
    times = [f"--since=@{int(since_us) // 1_000_000}"] if since_us > 0 else []
    if until_us < float("inf"):
        times.append(f"--until=@{int(until_us + AFTER_US) // 1_000_000 + 1}")
    if path is not None and not os.access(path, os.R_OK):
        raise Failure(f"{path} cannot be read: {'Permission denied' if os.path.exists(path) else 'No such file or directory'}.")
    said = tempfile.TemporaryFile()
    try:
        command = ["journalctl", "--quiet", "--all", "--output=json", *(["--system"] if path is None else []), *where, *times]
        journal = subprocess.Popen([*command, f"_SYSTEMD_UNIT={UNIT}"], stdout=subprocess.PIPE, stderr=said)
    except OSError as error:
        raise Failure(f"journalctl, which reads the journal, cannot be run: {error.strerror}. --file names the daemon's file of records.") from None
    assert journal.stdout
    for line in journal.stdout:
        fields = json.loads(line)
        record = {k[5:].lower(): _field(v) for k, v in fields.items() if k.startswith("BFCD_")}
        yield record | {"message": _field(fields.get("MESSAGE", "")), "time_us": int(fields["__REALTIME_TIMESTAMP"])}
    status = journal.wait()
    said.seek(0)
    why = text.escape(said.read(1 << 16).decode(errors="replace").strip())
    if status != 0:
        raise Failure(f"{path or 'The journal'} cannot be read: {why}")
    if why:  # of a damaged file, which it leaves out
        print(f"bfcctl: journalctl: {why}", file=sys.stderr)


def _may_read_the_journal() -> bool:
    folders = [f for f in ("/var/log/journal", "/run/log/journal") if os.path.isdir(f)]
    files = itertools.chain.from_iterable(os.scandir(f) for f in _machine_folders(folders))
    return any(file.name.startswith("system") and os.access(file.path, os.R_OK) for file in files)


def _machine_folders(folders: list[str]) -> Iterator[str]:
    for folder in folders:
        try:
            yield from (entry.path for entry in os.scandir(folder) if entry.is_dir())
        except OSError:
            continue


# ---- sums -----------------------------------------------------------------------------


def _number(fields: Record, key: str) -> int:
    value = fields.get(key)
    if isinstance(value, str):
        digits = re.match("[0-9]{1,20}", value)
        return int(digits[0]) if digits else 0
    return max(value, 0) if isinstance(value, int) else 0


def _string(fields: Record, key: str) -> str:
    value = fields.get(key)
    return value if isinstance(value, str) else ""


def _sizes(value: Any) -> dict[str, int]:
    """ "train=1024 eval=0", as the journal has it, or an object, as a file has it."""
    if isinstance(value, str):
        value = dict(item.split("=", 1) for item in value.split() if "=" in item)
    return {k: _number(value, k) for k in value} if isinstance(value, dict) else {}


def _event_name(kind: str, f: Record) -> str:
    if kind == "reload":
        return "reload rejected" if _string(f, "result") == "rejected" else "reload"
    return DRAINS.get(_string(f, "state"), kind) if kind == "drain" else kind


class History:
    def __init__(self, since_us: float = 0, until_us: float = float("inf"), tenant: str | None = None) -> None:
        self.since_us, self.until_us, self.tenant = since_us, until_us, tenant
        self.n_sessions = 0  # that ended, also those without records of their own
        self._largest: list[tuple[int, int, Record]] = []  # a heap, with the smallest first
        self._peaks: dict[tuple[str, str], Record] = {}
        self._refusals: dict[tuple[str, str, str], Record] = {}
        self._leases: collections.deque[Record] = collections.deque(maxlen=MAX_ROWS)
        self._events: collections.deque[Record] = collections.deque(maxlen=MAX_ROWS)
        self._add = {
            "session": self._add_session,
            "sessions": self._add_sessions,
            "usage": self._add_usage,
            "refusal": self._add_refusal,
            "lease": self._add_lease,
        }

    def add(self, f: Record) -> None:
        """A record. One of an interval counts if the interval is partly in the time."""
        kind, at = _string(f, "record"), f["time_us"]
        first = _number(f, "begin_us") if kind == "usage" else at
        is_others = self.tenant is not None and self.tenant != _string(f, "tenant")
        if at < self.since_us or first > self.until_us or (is_others and kind not in EVENTS - {"eviction"}):
            return
        if kind in EVENTS:
            self._add_event(kind, f)
        elif kind in self._add:
            self._add[kind](f)

    def _add_session(self, f: Record) -> None:
        begin, end = _number(f, "begin_us"), _number(f, "end_us")
        row = {
            "tenant": _string(f, "tenant"),
            "name": _string(f, "program"),
            "pid": _number(f, "pid"),
            "session_id": _number(f, "session"),
            "user": text.user(_number(f, "uid")),
            "uid": _number(f, "uid"),
            "running": f.get("running") is True,
            "begin_time_us": begin,
            "duration_ms": max(end - begin, 0) // 1000,
            "peak_bytes_in_use": _number(f, "peak_bytes"),
            "partitions": _sizes(f.get("peaks")),
            "num_allocs": _number(f, "allocations"),
            "num_refusals": _number(f, "refusals"),
            "waited_ms": _number(f, "waited_us") // 1000,
            "bytes_left": _number(f, "bytes_left"),
            "ended": _string(f, "ended"),
            "cgroup": _string(f, "cgroup"),
        }
        self.n_sessions += 1
        item = (row["peak_bytes_in_use"], -self.n_sessions, row)
        heapq.heappush(self._largest, item) if len(self._largest) < MAX_ROWS else heapq.heappushpop(self._largest, item)

    def _add_sessions(self, f: Record) -> None:
        self.n_sessions += _number(f, "sessions")

    def _add_usage(self, f: Record) -> None:
        key = _string(f, "tenant"), _string(f, "partition")
        names = "peak_bytes_in_use", "peak_bytes_reserved", "peak_bytes_in_use_time_us", "peak_bytes_reserved_time_us"
        new = dict(zip(("tenant", "partition"), key)) | dict.fromkeys((*names, "bytes_limit", "num_refusals", "last"), 0)
        peak = self._peaks.setdefault(key, new)
        for name, field in ("peak_bytes_in_use", "peak_bytes"), ("peak_bytes_reserved", "peak_reserved_bytes"):
            if _number(f, field) >= peak[name]:
                peak[name], peak[name + "_time_us"] = _number(f, field), f["time_us"]
        peak["num_refusals"] += _number(f, "refusals")
        if f["time_us"] >= peak["last"]:
            peak["last"], peak["bytes_limit"] = f["time_us"], _number(f, "limit_bytes")

    def _refused(self, *key: str) -> Record:
        names = "num_records", "num_suppressed", "largest_bytes", "last_time_us"
        new = dict(zip(("tenant", "partition", "limit"), key)) | dict.fromkeys(names, 0) | {"sentence": ""}
        return self._refusals.setdefault((key[0], key[1], key[2]), new)

    def _add_refusal(self, f: Record) -> None:
        # Those that had no records of their own: at the limit that all of them have in common, if there is one.
        if n := _number(f, "suppressed"):
            partition, limit = _string(f, "suppressed_partition"), _string(f, "suppressed_limit")
            self._refused(_string(f, "tenant"), partition, limit)["num_suppressed"] += n
        if not _string(f, "limit"):
            return
        row = self._refused(_string(f, "tenant"), _string(f, "partition"), _string(f, "limit"))
        row["num_records"] += 1
        row["largest_bytes"] = max(row["largest_bytes"], _number(f, "bytes"))
        if f["time_us"] >= row["last_time_us"]:
            row["last_time_us"], row["sentence"] = f["time_us"], _string(f, "sentence")

    def _add_lease(self, f: Record) -> None:
        begin, end = _number(f, "begin_us"), _number(f, "end_us")
        self._leases.append(
            {
                "lease": _string(f, "lease"),
                "tenant": _string(f, "tenant"),
                "partition": _string(f, "partition"),
                "begin_time_us": begin,
                "bytes_limit": _number(f, "limit_bytes"),
                "peak_bytes_in_use": _number(f, "peak_bytes"),
                "peak_bytes_reserved": _number(f, "peak_reserved_bytes"),
                "num_refusals": _number(f, "refusals"),
                "waited_ms": _number(f, "waited_us") // 1000,
                "duration_ms": max(end - begin, 0) // 1000,
            }
        )

    def _add_event(self, kind: str, f: Record) -> None:
        message, n = _string(f, "message"), _number(f, "sessions")
        if kind == "start":
            message = f"bfcd {_string(f, 'version')} with {n} session{'' if n == 1 else 's'}, {text.size(_number(f, 'bytes'))}"
        user = text.user(_number(f, "uid")) if "uid" in f else None
        what = {"time_us": f["time_us"], "event": _event_name(kind, f), "user": user, "message": message}
        self._events.append(what | {"changes": _string(f, "changes")})

    def rows(self) -> dict[str, list[Record]]:
        return {
            "sessions": [row for _, _, row in sorted(self._largest, key=lambda item: item[:2], reverse=True)],
            "leases": list(self._leases),
            "tenants": [
                {k: v for k, v in self._peaks[key].items() if k != "last"} for key in sorted(self._peaks)
            ],
            "refusals": [self._refusals[key] for key in sorted(self._refusals)],
            "events": list(self._events),
        }


# ---- the daemon ------------------------------------------------------------------------


def _live(history: History, bfcctl: Bfcctl) -> bool:
    """Sessions that run now. A user who may not see all gets the refusals of its own tenant, too. False: the daemon does
    not answer."""
    try:
        who = bfcctl.list("whoami")
        sessions = bfcctl.list("sessions")
        refusals = [] if who["admin"] or who["monitor"] else bfcctl.list("refusals")
    except Failure:
        return False
    now = int(time.time() * 1_000_000)
    at = int(min(now, history.until_us))
    for s in sessions:
        begin = now - s["age_ms"] * 1000
        if s["tenant"] and s["pid"] not in bfcctl.pids and begin <= at:
            ends = {"record": "session", "time_us": at, "begin_us": begin, "end_us": now, "running": True}
            names = {"session": s["session_id"], "program": s["name"], "peak_bytes": s["peak_bytes_in_use"]}
            history.add(ends | names | {key: s[key] for key in ("tenant", "uid", "pid")})
    for r in refusals:
        of = {"record": "refusal", "time_us": r["time_ms"] * 1000, "bytes": r["n_bytes"]}
        history.add(of | {key: r[key] for key in ("tenant", "partition", "limit", "sentence")})
    return True


# ---- showing --------------------------------------------------------------------------

SECTIONS = {
    "sessions": "Sessions, the largest peak first",
    "leases": "Leases that ended",
    "tenants": "Peaks of tenants: a limit could have been as low as RESERVED",
    "refusals": "Refusals",
    "events": "Starts, stops, reloads, drains and evictions",
}
COLUMNS = {
    "sessions": [
        Column("TENANT", "tenant"),
        Column("PROGRAM", "name", is_cut=True),
        number("PID", "pid"),
        number("SESSION", "session_id", is_wide=True),
        Column("USER", "user"),
        number("UID", "uid", is_wide=True),
        Column("RUNNING", "running", lambda is_running: "yes" if is_running else "no"),
        Column("BEGAN", "begin_time_us", text.moment),
        time_of("DURATION", "duration_ms"),
        bytes_of("PEAK", "peak_bytes_in_use"),
        number("ALLOCS", "num_allocs", is_wide=True),
        number("REFUSED", "num_refusals", is_wide=True),
        time_of("WAITED", "waited_ms", is_wide=True),
        Column("ENDED", "ended", is_wide=True),
        Column("CGROUP", "cgroup", is_wide=True),
    ],
    "leases": [
        Column("LEASE", "lease"),
        Column("TENANT", "tenant"),
        Column("PARTITION", "partition"),
        Column("BEGAN", "begin_time_us", text.moment, is_wide=True),
        bytes_of("LIMIT", "bytes_limit"),
        bytes_of("PEAK", "peak_bytes_in_use"),
        bytes_of("RESERVED", "peak_bytes_reserved", is_wide=True),
        number("REFUSED", "num_refusals"),
        time_of("WAITED", "waited_ms"),
        time_of("DURATION", "duration_ms"),
    ],
    "tenants": [
        Column("TENANT", "tenant"),
        Column("PARTITION", "partition"),
        bytes_of("PEAK", "peak_bytes_in_use"),
        bytes_of("RESERVED", "peak_bytes_reserved"),
        Column("UNTIL", "peak_bytes_reserved_time_us", text.moment),
        bytes_of("LIMIT", "bytes_limit"),
        number("REFUSED", "num_refusals"),
    ],
    "refusals": [
        Column("TENANT", "tenant"),
        Column("PARTITION", "partition"),
        Column("LIMIT", "limit"),
        number("RECORDS", "num_records"),
        number("MORE", "num_suppressed"),
        bytes_of("LARGEST", "largest_bytes"),
        Column("LAST", "last_time_us", text.moment),
        Column("SENTENCE", "sentence", is_wide=True),
    ],
    "events": [
        Column("TIME", "time_us", text.moment),
        Column("EVENT", "event"),
        Column("USER", "user"),
        Column("MESSAGE", "message", is_cut=True),
    ],
}


def _print(history: History, is_wide: bool) -> None:
    for i, (key, rows) in enumerate(history.rows().items()):
        n_shown = min(len(rows), SHOWN_SESSIONS) if key == "sessions" and not is_wide else len(rows)
        print(("\n" if i > 0 else "") + SECTIONS[key] + (":" if rows else ": none"))
        if rows:
            text.print_table(COLUMNS[key], rows[:n_shown], is_wide)
        if key == "sessions" and history.n_sessions > n_shown:
            print(f"and {history.n_sessions - n_shown} more")
        if key == "refusals" and not is_wide:  # sentences do not fit into a table
            for row in rows:
                if row["sentence"]:
                    print("  " + text.escape(row["sentence"]))


def _records(options: argparse.Namespace, since: float, until: float) -> Iterator[Record]:
    if options.file is not None and not options.file.endswith(".journal") and not os.path.isdir(options.file):
        return _of_file(options.file)
    if options.file is None and not _may_read_the_journal():
        raise NoJournal(
            "There is no journal, or this user may not read it (root and the group systemd-journal may). --file names the daemon's file of records."
        )
    return _of_journal(options.file, since, until)


def run(options: argparse.Namespace, bfcctl: Bfcctl) -> None:
    since, until = _option_time("since", options.since, 0), _option_time("until", options.until, float("inf"))
    if until < since:
        raise WrongUse("--until is before --since")
    history = History(since, until, options.tenant)
    no_journal = None
    try:
        for record in _records(options, since, until):
            history.add(record)
    except NoJournal as failure:
        no_journal = failure
    # A file may be of another machine or another time.
    is_live = (options.file is None or bfcctl.socket is not None) and _live(history, bfcctl)
    if no_journal and not is_live:
        raise no_journal
    if no_journal:
        print(f"bfcctl: Only what the daemon knows now is shown. {no_journal}", file=sys.stderr)
    if options.json:
        document = {"schema": 1, "history": {"num_sessions": history.n_sessions} | history.rows()}
        print(json.dumps(document, indent=2))
    else:
        _print(history, options.wide)
