# bfcctl history: points in time, and sums over the records of a file and of a journal. BFCCTL names the program.
#
# SPDX-License-Identifier: Apache-2.0
import json
import os
import pathlib
import shutil
import subprocess
import time

import pytest
from bfcd.tools import history
from conftest import LIMIT_S, host_only

pytestmark = host_only

NOW = 1795459887  # 2026-11-23 18:51:27
TIMES = {
    "now": NOW,
    "today": 1795392000,
    "yesterday": 1795305600,
    "-2h": NOW - 7200,
    "-1h30min": NOW - 5400,
    "-1 day 2 hours": NOW - 93600,
    "-1.5h": NOW - 5400,
    "90s ago": NOW - 90,
    "90 ago": NOW - 90,
    "2w ago": NOW - 1209600,
    "@1795459887": NOW,
    "2026-11-22": 1795305600,
    "2026-11-22 03:00": 1795316400,
    "2026-11-22T03:00:12": 1795316412,
    "03:00": 1795402800,
    "2024-02-29": 1709164800,
}
WRONG_TIMES = """2026-02-31 2026-02-29 2026-13-01 2026-11 - -2y -h -99999999999999999999h -18446744073709551615w -100000w @ @12x
@99999999999999999999 tomorrow""".split() + ["", "2026-11-22 25:00", "2026-11-22 03:00 ", " ago", "-1h 30"]


@pytest.fixture(autouse=True)
def universal_time(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize("words", TIMES)
def test_points_in_time(words):
    assert history.parse_time(words, NOW) == TIMES[words] * 1_000_000


@pytest.mark.parametrize("words", WRONG_TIMES)
def test_wrong_points_in_time(words):
    with pytest.raises(ValueError):
        history.parse_time(words, NOW)


def bfcctl(*words, status=0, socket="/nowhere"):
    command = [os.environ["BFCCTL"], *(["--socket", str(socket)] if socket else []), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == status, done.stderr
    return done.stdout if status == 0 else done.stderr


def sums(path, *words):
    return json.loads(bfcctl("--json", "history", "--file", path, *words))["history"]


def record(kind, at, **fields):
    return {"time_us": at * 1_000_000, "record": kind, "message": "m", **fields}


def session(at, tenant, number, peak):
    more = {"allocations": 5, "refusals": 1, "waited_us": 2500, "ended": "process exited", "uid": 1000, "pid": 7}
    times = {"begin_us": 1_000_000, "end_us": at * 1_000_000, "peaks": {"train": peak}, "program": "train.py"}
    return record("session", at, tenant=tenant, session=number, peak_bytes=peak, **more, **times)


def usage(begin, end, tenant, peak, reserved, limit):
    of = {"tenant": tenant, "partition": "train", "begin_us": begin * 1_000_000, "peak_reserved_bytes": reserved}
    return record("usage", end, peak_bytes=peak, limit_bytes=limit, refusals=2, **of)


def refusal(at, tenant, n_bytes, limit, more):
    of = {"tenant": tenant, "partition": "train", "bytes": n_bytes, "limit": limit, "sentence": f"why at {at}"}
    return record("refusal", at, suppressed=more, suppressed_partition="train", suppressed_limit="quota", **of)


def lease(at, name, tenant):
    sizes = {"limit_bytes": 4194304, "peak_bytes": 4096, "peak_reserved_bytes": 2097152, "refusals": 3, "waited_us": 7000}
    times = {"begin_us": 10_000_000, "end_us": at * 1_000_000}
    return record("lease", at, tenant=tenant, partition="train", lease=name, **sizes, **times)


RECORDS = [
    lease(140, "one", "red"),
    lease(190, "two", "red"),
    lease(190, "three", "blue"),
    session(100, "red", 1, 4096),
    session(200, "red", 2, 8192),
    session(200, "blue", 3, 512),
    usage(50, 150, "red", 4096, 2097152, 67108864),
    usage(150, 250, "red", 8192, 4194304, 33554432),
    usage(50, 150, "blue", 512, 2097152, 67108864),
    refusal(110, "red", 1000, "quota", 0),
    refusal(120, "red", 9000, "quota", 3),
    refusal(130, "red", 10, "partition", 4),
    record("refusal", 140, tenant="red", suppressed=7),
    record("sessions", 150, tenant="red", sessions=40),
    record("reload", 160, result="rejected", changes="a\nb\n"),
    record("drain", 170, device="host", state="begun", uid=0),
]
# What is no record, and one that is written now.
REST = 'no record\n{"time_us":170000000,"record":"unknown"}\n[]\n{"time_us":180000000,"record":"start","version":"0.1.0","sessi'


def write(path, records, rest=""):
    path.write_text("".join(json.dumps(r) + "\n" for r in records) + rest)
    return path


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "records.jsonl", RECORDS, REST)


def test_a_file_is_summed_up(path):
    h = sums(path)
    assert h["num_sessions"] == 43
    sessions = h["sessions"]
    assert [(s["peak_bytes_in_use"], s["session_id"]) for s in sessions] == [(8192, 2), (4096, 1), (512, 3)]
    assert sessions[0]["partitions"] == {"train": 8192} and not sessions[0]["running"] and sessions[0]["user"]
    assert (sessions[0]["duration_ms"], sessions[0]["waited_ms"]) == (199000, 2)
    assert [t["tenant"] for t in h["tenants"]] == ["blue", "red"]
    red = h["tenants"][1]
    assert (red["peak_bytes_in_use"], red["peak_bytes_reserved"], red["bytes_limit"], red["num_refusals"]) == (8192, 4194304, 33554432, 4)
    # Those without a limit of their own, those of the partition and of the quota.
    assert [(r["num_records"], r["num_suppressed"]) for r in h["refusals"]] == [(0, 7), (1, 0), (2, 7)]
    assert (h["refusals"][2]["largest_bytes"], h["refusals"][2]["sentence"]) == (9000, "why at 120")
    assert [(of["lease"], of["tenant"]) for of in h["leases"]] == [("one", "red"), ("two", "red"), ("three", "blue")]
    assert h["leases"][0] == {
        "lease": "one",
        "tenant": "red",
        "partition": "train",
        "begin_time_us": 10_000_000,
        "bytes_limit": 4194304,
        "peak_bytes_in_use": 4096,
        "peak_bytes_reserved": 2097152,
        "num_refusals": 3,
        "waited_ms": 7,
        "duration_ms": 130000,
    }
    assert [(e["event"], e["user"], e["changes"]) for e in h["events"]] == [("reload rejected", None, "a\nb\n"), ("drain", "root", "")]


def test_a_time_and_a_tenant_are_chosen(path):
    h = sums(path, "--since", "@160", "--tenant", "red")
    assert [len(h[key]) for key in ("sessions", "tenants", "refusals", "leases", "events")] == [1, 1, 0, 1, 2]
    assert h["tenants"][0]["peak_bytes_in_use"] == 8192 and h["leases"][0]["lease"] == "two"
    # The second interval begins in this time.
    h = sums(path, "--until", "@160", "--tenant", "red")
    assert [s["peak_bytes_in_use"] for s in h["sessions"]] == [4096] and h["tenants"][0]["peak_bytes_in_use"] == 8192
    assert sums(path, "--until", "@149", "--tenant", "red")["tenants"][0]["peak_bytes_in_use"] == 4096
    sums(path, "--since", "@160", "--until", "@160")


def test_the_file_that_logrotate_moved_last_is_read_too(tmp_path):
    write(tmp_path / "records.1", [session(100, "red", 1, 4096)])
    path = write(tmp_path / "records", [session(200, "red", 2, 8192)])
    assert sums(path)["num_sessions"] == 2


def test_what_cannot_be_read_is_said(path, tmp_path):
    assert "No such file" in bfcctl("history", "--file", tmp_path / "none", status=1)
    assert '--since "soon"' in bfcctl("history", "--file", path, "--since", "soon", status=2)
    assert "--until is before --since" in bfcctl("history", "--file", path, "--since", "now", "--until", "-1d", status=2)
    before = pathlib.Path(f"{path}.1")
    before.mkdir()
    assert f"{before} cannot be read: " in bfcctl("history", "--file", path, status=1)


def test_of_many_sessions_the_largest_are_kept(tmp_path):
    path = write(tmp_path / "records", [record("session", 1, tenant="red", peak_bytes=i * 7919 % 5000) for i in range(5000)])
    h = sums(path)
    assert h["num_sessions"] == 5000
    assert [s["peak_bytes_in_use"] for s in h["sessions"]] == list(range(4999, 3999, -1))
    assert "and 4980 more" in bfcctl("history", "--file", path) and "and 4000 more" in bfcctl("--wide", "history", "--file", path)


def test_text_of_clients_is_escaped(tmp_path):
    """A client chooses its program's name, and could move the cursor of a terminal."""
    bad = "\x1b[2J"
    records = [
        record("session", 1, tenant="red", program=bad, peak_bytes=1),
        record("refusal", 1, tenant="red", limit="quota", sentence=bad),
        record("drain", 1) | {"message": bad},
    ]
    path = write(tmp_path / "records", records)
    out = bfcctl("history", "--file", path)
    assert "\x1b" not in out and out.count("\\x1b[2J") == 3
    assert sums(path)["sessions"][0]["name"] == bad


def test_wrong_types_are_as_nothing(tmp_path):
    """Whatever a file has, there is no traceback."""
    wrong = [record("session", 1, tenant=7, peak_bytes="x", peaks=[1], uid=-5, begin_us=None)]
    wrong += [record(kind, 1, tenant=None, changes=5, sessions={}) for kind in ("usage", "refusal", "lease", "drain", "start", "sessions")]
    wrong += [{"time_us": "1", "record": "session"}, {"time_us": 1, "record": ["x"]}, {"record": "start"}]
    h = sums(write(tmp_path / "records", wrong))
    assert h["num_sessions"] == 1 and h["sessions"][0]["tenant"] == "" and len(h["events"]) == 2


def test_the_daemon_tells_what_runs_now(daemon, client, tmp_path):
    """A tenant sees its own running sessions and refusals, an operator all running ones; bfcctl's own calls are no jobs."""
    import bfcd

    block = client.malloc(1 << 20)
    with pytest.raises(bfcd.QuotaExceeded):
        client.malloc(100 << 20)
    empty = write(tmp_path / "records", [])
    h = json.loads(bfcctl("--json", "history", "--file", empty, socket=daemon.socket))["history"]
    assert [(s["tenant"], s["running"]) for s in h["sessions"]] == [("me", True)]
    assert h["sessions"][0]["peak_bytes_in_use"] >= 1 << 20
    assert [(r["limit"], r["largest_bytes"]) for r in h["refusals"]] == [("quota", 100 << 20)]
    h = json.loads(bfcctl("--json", "history", "--file", empty, socket=daemon.folder / "admin.sock"))["history"]
    assert len(h["sessions"]) == 1 and h["refusals"] == []  # those are in the records
    assert bfcctl("history", "--file", empty, "--until", "@1000", socket=daemon.socket).startswith("Sessions, the largest peak first: none\n")
    assert sums(empty)["sessions"] == []
    del block


# ---- the journal -------------------------------------------------------------------------

REMOTE = shutil.which("systemd-journal-remote", path="/lib/systemd:/usr/lib/systemd:/usr/bin")


def entry(at, unit, kind, **fields):
    """In the journal's export format; the trusted field is as journald(8) would have written it."""
    known = {"__REALTIME_TIMESTAMP": f"{at}000000", "__MONOTONIC_TIMESTAMP": f"{at}000000", "_BOOT_ID": "0123456789abcdef" * 2}
    own = {f"BFCD_{key.upper()}": value for key, value in {"record": kind, **fields}.items()}
    return "".join(f"{k}={v}\n" for k, v in {**known, "_SYSTEMD_UNIT": unit, "MESSAGE": "m", **own}.items()) + "\n"


@pytest.mark.skipif(not REMOTE or not shutil.which("journalctl"), reason="there is no systemd-journal-remote")
def test_a_journal_is_read_and_forged_records_are_not(tmp_path):
    """Anyone can send records to the journal; only those of the daemon's unit count."""
    entries = [
        entry(100, "bfcd.service", "session", tenant="red", session=2, peak_bytes=8192, peaks="train=8192 eval=0", program="train.py"),
        entry(110, "evil.service", "session", tenant="red", session=3, peak_bytes=9999999),
        entry(120, "bfcd.service", "usage", tenant="red", partition="train", begin_us=50000000, peak_bytes=8192, peak_reserved_bytes=2097152, limit_bytes=4194304),
        entry(130, "evil.service", "reload", result="applied"),
        entry(140, "bfcd.service", "start", version="0.1.0"),
    ]
    (tmp_path / "export").write_text("".join(entries))
    folder = tmp_path / "journal"
    folder.mkdir()
    made = [REMOTE, "--split-mode=none", "-o", folder / "test.journal", tmp_path / "export"]
    subprocess.run(made, check=True, capture_output=True, timeout=LIMIT_S)
    h = sums(folder / "test.journal")
    assert [(s["peak_bytes_in_use"], s["partitions"]) for s in h["sessions"]] == [(8192, {"train": 8192, "eval": 0})]
    assert h["tenants"][0]["peak_bytes_reserved"] == 2097152 and [e["event"] for e in h["events"]] == ["start"]
    h = sums(folder / "test.journal", "--since", "@130")
    assert h["num_sessions"] == 0 and len(h["events"]) == 1
    h = sums(folder, "--until", "@110")  # all of a folder
    assert h["num_sessions"] == 1 and h["events"] == []
    assert "No such file" in bfcctl("history", "--file", tmp_path / "x.journal", status=1)


@pytest.mark.skipif(not REMOTE or not shutil.which("journalctl"), reason="there is no systemd-journal-remote")
def test_a_damaged_journal_is_left_out(tmp_path):
    """As after a loss of power."""
    (tmp_path / "export").write_text(entry(100, "bfcd.service", "session", tenant="red", session=2, peak_bytes=8192))
    folder = tmp_path / "journal"
    folder.mkdir()
    made = [REMOTE, "--split-mode=none", "-o", folder / "test.journal", tmp_path / "export"]
    subprocess.run(made, check=True, capture_output=True, timeout=LIMIT_S)
    (folder / "other.journal").write_bytes((folder / "test.journal").read_bytes()[:4096])
    (folder / "empty.journal").touch()
    assert sums(folder)["num_sessions"] == 1


def test_numbers_and_lists_without_end(tmp_path):
    bad = '{"time_us":1000,"record":"session","peak_bytes":' + "9" * 5000 + "}\n" + "[" * 100000 + "\n"
    bad += json.dumps(record("session", 1, tenant="red", peak_bytes="9" * 5000, program="\ud800\u009b2J")) + "\n"
    path = write(tmp_path / "records", [], bad)
    assert sums(path)["num_sessions"] == 1
    out = bfcctl("--json", "history", "--file", path)
    assert "\x9b" not in out
