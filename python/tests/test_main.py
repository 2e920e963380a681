# python -m bfcd: run, doctor and demo, as a user starts them. Each failure that doctor names is a real one here.
#
# SPDX-License-Identifier: Apache-2.0
import contextlib
import json
import os
import pathlib
import pty
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

import pytest
from conftest import DEVICE, LIMIT_S, MIB, gpu_only, host_only, on_gpus_too, wait_for

import bfcd
from bfcd import _doctor

BFCD, BFCCTL = pathlib.Path(os.environ["BFCD"]), pathlib.Path(os.environ["BFCCTL"])
ROOT = pathlib.Path(__file__).resolve().parents[2]
PATH = os.pathsep.join([str(BFCD.parent), str(BFCCTL.parent), os.environ["PATH"]])
MAIN = [sys.executable, "-m", "bfcd"]
#: root is bound by the modes of files, too.
AS_OTHERS = ["setpriv", "--inh-caps=-all", "--bounding-set=-dac_override,-dac_read_search"] if os.getuid() == 0 else []


def main(daemon, *words, prefix=(), **variables):
    """Its status, and what it printed."""
    environment = daemon.environment() | {"PATH": PATH, "BFC_ADMIN_SOCKET": "/none/admin.sock"} | variables
    done = subprocess.run([*prefix, *MAIN, *words], env=environment, text=True, capture_output=True, timeout=LIMIT_S)
    return done.returncode, done.stdout, done.stderr


def reconfigure(daemon, old, new):
    text = daemon.config.read_text()
    assert old in text
    daemon.config.write_text(text.replace(old, new))
    admin = ["--socket", str(daemon.folder / "admin.sock")]
    subprocess.run([BFCCTL, *admin, "reload"], check=True, stdout=subprocess.DEVNULL)


def allow_leases(daemon):
    reconfigure(daemon, "    quotas:", "    leases: self\n    quotas:")


# ---- run ----

SHOW = """
import bfcd
print(bfcd.default().bytes_limit() >> 20, bfcd.default().partition)
try:
    bfcd.default().malloc(100 << 20)
except bfcd.QuotaExceeded as e:
    print(e)
raise SystemExit(7)
"""


def test_run_needs_the_client_socket_only(daemon):
    allow_leases(daemon)
    words = ["run", "--limit", "32MiB", "--partition", "train", "--lease", "mine", "--", sys.executable, "-c", SHOW]
    status, out, err = main(daemon, *words)
    assert status == 7 and out.startswith("32 train\n"), err
    assert f"lease 'u{os.getuid()}:mine' of tenant 'me' asked for more than its limit" in out
    assert "1 refused" in err


def test_run_is_bfcctl_run(daemon):
    assert main(daemon, "run", "--help")[1].startswith("Usage: bfcctl ")
    status, _, err = main(daemon, "run", "true")
    assert status == 125 and err.startswith("bfcctl: no --limit")
    status, _, err = main(daemon, "run", "--limit", "2MiB", "--partition", "train", "--", "true")
    assert status == 125 and "'leases: self' for tenant 'me'" in err
    status, _, err = main(daemon, "run", "--limit", "2MiB", "--", "true", PATH="/none")
    assert status == 125 and err.startswith("bfcd: bfcctl was not found: install ")


def test_wrong_words_print_the_usage(daemon):
    for words in ([], ["walk"], ["--json"]):
        status, out, err = main(daemon, *words)
        assert status == 2 and out == "" and err.startswith("usage: python -m bfcd run --limit SIZE")
    assert main(daemon, "--help")[:2] == (0, err)
    assert main(daemon, "doctor", "x")[0] == 2


def test_run_finds_the_proxies_that_were_installed_with_it(daemon, tmp_path):
    """Not those beside a program that is elsewhere: another user may have made them."""
    allow_leases(daemon)
    from_bin = re.search(rb"(?:\.\./)+[-\w/.]+/bfcd/preload\b", BFCCTL.read_bytes())[0].decode()
    environment = daemon.environment() | {"BFC_ADMIN_SOCKET": "/none/admin.sock", "BFC_PRELOAD": "", "LD_LIBRARY_PATH": ""}
    for folder, finds in (("a/bin", True), ("a/build", False), ("a:b/bin", False), ("a;b/bin", False)):
        bfcctl = tmp_path / folder / "bfcctl"
        bfcctl.parent.mkdir(parents=True)
        shutil.copy(BFCCTL, bfcctl)
        preload = pathlib.Path(os.path.normpath(bfcctl.parent / from_bin))
        preload.mkdir(parents=True, exist_ok=True)
        (preload / "libcuda.so.1").touch()
        words = ["run", "--quiet", "--limit", "2MiB", "--partition", "train", "--", "printenv", "LD_LIBRARY_PATH"]
        done = subprocess.run([bfcctl, *words], env=environment, text=True, capture_output=True, timeout=LIMIT_S)
        assert done.stdout.strip().split(":")[0] == (str(preload.resolve()) if finds else ""), (folder, done)


# ---- doctor ----


def doctor(daemon, **others):
    """The findings by their names, of those with one name the last that is worst."""
    status, out, err = main(daemon, "doctor", "--json", **others)
    assert "Traceback" not in err, err
    document = json.loads(out)
    assert document["schema"] == 1 and document["ok"] == (status == 0) and status in (0, 1)
    rows = document["checks"]
    assert document["ok"] == all(row["status"] != "failed" for row in rows)
    for row in rows:
        assert row["status"] in ("ok", "note", "failed") and row["text"] and "\n" not in row["text"], row
        assert (row["remedy"] == "") == (row["status"] == "ok"), row
    return {row["name"]: row for row in sorted(rows, key=lambda row: ("ok", "note", "failed").index(row["status"]))}


def fails(rows, name, *words):
    """Only this one fails, with these words in its sentence or its remedy."""
    assert [row["name"] for row in rows.values() if row["status"] == "failed"] == [name], rows
    for word in words:
        assert word in f"{rows[name]['text']}. {rows[name]['remedy']}", rows[name]


@on_gpus_too
def test_doctor_where_all_works(daemon):
    allow_leases(daemon)
    status, out, err = main(daemon, "doctor")
    assert status == 0 and err == "", out + err
    assert out.endswith("\n\nAll that a job needs works here.\n") and "FAILED" not in out
    lines = out.splitlines()
    assert [line.split()[1] for line in lines[:4]] == ["python", "library", "socket", "tenant"]
    for words in (
        f"libbfcclient {bfcd.__version__} is {os.path.realpath(os.environ['BFC_LIBRARY'])}, which BFC_LIBRARY names",
        f"{daemon.socket}, which BFC_SOCKET names, takes connections",
        f"bfcd {bfcd.__version__} answers",
        "is tenant 'me', and partition 'train' is its default",
        "'train' on " + ("host" if DEVICE == "host" else "cuda:0") + " has 64.0 MiB free of 64.0 MiB; a block was",
        "'infer' on ",
        "gives a program a limit of its own",
        "open files (RLIMIT_NOFILE)",
        "(RLIMIT_MEMLOCK)",
        "bfcd.ray",
    ):
        assert words in out, words
    if DEVICE != "host":
        assert re.search(
            r"gpu +driver, CUDA 1\d\.\d: 1 device visible; of bfcd's, cuda:0 \(GPU-.*\) is CUDA device 0 here", out
        )


def test_doctor_without_a_socket(daemon, tmp_path, monkeypatch):
    rows = doctor(daemon, BFC_SOCKET=f"{tmp_path}/client/bfcd.sock")
    fails(rows, "socket", f"does not exist, because there is no {tmp_path}/client", "start bfcd", "mount the folder")
    assert "partition" not in rows and "library and the socket" in rows["rest"]["text"]
    rows = doctor(daemon, BFC_SOCKET=f"{tmp_path}/bfcd.sock")
    fails(rows, "socket", f"{tmp_path}/bfcd.sock, which BFC_SOCKET names, does not exist")
    fails(doctor(daemon, BFC_SOCKET=str(tmp_path)), "socket", "is no socket", "set BFC_SOCKET")
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.chdir(deep)
    with socket.socket(socket.AF_UNIX) as s:
        s.bind("sock")
        fails(doctor(daemon, BFC_SOCKET=str(deep / "sock")), "socket", "takes no connection", "at most 107 bytes")
    paths = (ROOT / "proto/paths.h").read_text()
    assert _doctor._CLIENT_SOCKET == "/run/bfcd" + re.search(r'PATHS_CLIENT_SOCKET +PATHS_FOLDER "(.*)"', paths)[1]


def test_doctor_prints_what_acts_on_a_terminal_as_escapes(daemon, tmp_path):
    path = f"{tmp_path}/\x1b[31m\n\udcff\u202e\u00e9"
    for words in (["doctor"], ["doctor", "--json"]):
        status, out, err = main(daemon, *words, BFC_SOCKET=path, PYTHONIOENCODING="utf-8:strict")
        assert status == 1 and err == "", err
        assert not {"\x1b", "\u202e"} & set(out), out
    assert path == next(row["text"] for row in json.loads(out)["checks"] if row["name"] == "socket").split(", which")[0]
    out = main(daemon, "doctor", BFC_SOCKET=path)[1]
    assert f"{tmp_path}/\\x1b[31m\\n\\udcff\\u202e\u00e9, which BFC_SOCKET names" in out, out


def test_doctor_without_permission(daemon):
    daemon.socket.chmod(0o600 if AS_OTHERS else 0)
    if AS_OTHERS:
        os.chown(daemon.socket, 1, 1)
    rows = doctor(daemon, prefix=AS_OTHERS)
    fails(rows, "socket", "is closed to user ", f"(uid {os.getuid()})", "mode 0", "socket: {mode: ...}")
    daemon.folder.chmod(0)
    if AS_OTHERS:
        os.chown(daemon.folder, 1, 1)
    fails(doctor(daemon, prefix=AS_OTHERS), "socket", "is closed to user ", "a folder above it is closed")
    if AS_OTHERS:
        os.chown(daemon.folder, 0, 0)
    daemon.folder.chmod(0o700)


def test_doctor_without_a_daemon(daemon):
    daemon.process.kill()
    daemon.process.wait()
    fails(doctor(daemon), "socket", "no process listens at", "start bfcd")
    daemon.start()
    assert doctor(daemon)["socket"]["status"] == "ok"


def test_doctor_and_a_daemon_that_does_not_answer(daemon):
    daemon.process.send_signal(signal.SIGSTOP)
    fails(doctor(daemon), "tenant", "bfcd does not answer: no answer within 10 s", "it is stopped or hangs", "restart")
    daemon.process.send_signal(signal.SIGCONT)


def test_doctor_without_a_tenant(daemon):
    reconfigure(daemon, f"uid: [{os.getuid()}]", "uid: [4242]")
    rows = doctor(daemon)
    fails(rows, "tenant", f"uid {os.getuid()}", "matches no tenant", "ask the operator", "match: {user:")
    assert "need a tenant" in rows["rest"]["text"]


def test_doctor_with_wrong_variables(daemon):
    fails(doctor(daemon, BFC_TENANT="other"), "tenant", "other", "unset BFC_TENANT")
    fails(doctor(daemon, BFC_PARTITION="other"), "tenant", "'other'", "correct or unset BFC_PARTITION")
    fails(doctor(daemon, BFC_WAIT_MS="soon"), "library", "BFC_WAIT_MS is 'soon'", "correct the variable")


def test_doctor_without_a_library(daemon):
    rows = doctor(daemon, BFC_LIBRARY="/none/libbfcclient.so.0")
    fails(rows, "library", "/none/libbfcclient.so.0", "Install the package libbfcclient0")
    assert rows["socket"]["status"] == "ok" and "partition" not in rows and "modules" not in rows
    fails(doctor(daemon, BFC_LIBRARY="libc.so.6"), "library", "libc.so.6 is too old for this package")


def test_doctor_without_room(daemon):
    job = bfcd.connect(daemon.socket)
    block = job.malloc(64 * MIB)
    rows = doctor(daemon)
    fails(rows, "partition", "'train' on", "gives no block of 1 MiB", "at its limit", "`bfcctl explain train`")
    block.free()
    job.close()


def test_doctor_with_few_files(daemon):
    few = ["sh", "-c", 'ulimit -n 30 && exec "$@"', "sh"]
    fails(doctor(daemon, prefix=few), "files", "may have 30 open files", "ulimit -n 1024")
    space = ["sh", "-c", f'ulimit -v {4 << 20} && exec "$@"', "sh"]
    assert "4.0 GiB of addresses" in doctor(daemon, prefix=space)["addresses"]["text"]


def test_doctor_about_run(daemon):
    row = doctor(daemon)["run"]
    assert (
        row["status"] == "note"
        and "'leases: self' for tenant 'me'" in row["text"]
        and "ask the operator" in row["remedy"]
    )
    allow_leases(daemon)
    words = ["--tenant", "me", "--partition", "train", "--limit", "16MiB", "--user", str(os.getuid())]
    operator = [BFCCTL, "--socket", str(daemon.folder / "admin.sock")]
    subprocess.run([*operator, "lease", "create", "all", *words], check=True, stdout=subprocess.DEVNULL)
    row = doctor(daemon)["run"]
    assert row["status"] == "note" and "--limit 2MiB` gives a program a limit of 16.0 MiB" in row["text"], row
    subprocess.run([*operator, "lease", "end", "all"], check=True, stdout=subprocess.DEVNULL)
    row = doctor(daemon, PATH="/usr/bin:/bin")["run"]
    assert row["status"] == "note" and "bfcctl was not found" in row["text"]


def test_doctor_about_the_proxy(daemon, tmp_path):
    proxy = pathlib.Path(os.environ["BFC_PRELOAD"], "libcuda.so.1")
    if not proxy.exists():
        pytest.skip("the proxy is not built, or not for this architecture")
    for may_run in (False, True):
        if may_run:
            allow_leases(daemon)
        row = doctor(daemon)["proxy"]
        assert row["status"] == "ok" and f"{proxy}, of version {bfcd.__version__}" in row["text"], row
        assert "not in LD_LIBRARY_PATH or LD_PRELOAD now" in row["text"]
    path = f"{proxy.parent}:{os.environ['LD_LIBRARY_PATH']}"
    assert "LD_LIBRARY_PATH of this process has it" in doctor(daemon, LD_LIBRARY_PATH=path)["proxy"]["text"]
    row = doctor(daemon, BFC_PRELOAD=str(tmp_path))["proxy"]  # the fake driver is here
    assert row["status"] == "note" and "is not here" in row["text"]
    if DEVICE == "host":
        row = doctor(daemon, BFC_PRELOAD=str(tmp_path), LD_LIBRARY_PATH="/none")["proxy"]
        assert row["status"] == "ok" and "is not here, and neither is a GPU" in row["text"]
        rows = doctor(daemon, LD_LIBRARY_PATH=str(proxy.parent))
        assert rows["gpu"]["text"].startswith("there is no NVIDIA driver here") and rows["proxy"]["status"] == "ok"
    version = bfcd.__version__.encode() + b"\0"
    (tmp_path / "libcuda.so.1").write_bytes(proxy.read_bytes().replace(version, b"9.9.9\0"))
    row = doctor(daemon, BFC_PRELOAD=str(tmp_path))["proxy"]
    assert row["status"] == "note" and f"of version 9.9.9, and the library is {bfcd.__version__}" in row["text"], row
    (tmp_path / "libcuda.so.1").write_text("bfc_preload_driver")
    row = doctor(daemon, BFC_PRELOAD=str(tmp_path))["proxy"]
    assert row["status"] == "note" and "and does not work: " in row["text"], row


def test_doctor_about_packages(daemon, tmp_path):
    assert "ray" not in doctor(daemon)["modules"]["text"].partition("can be imported")[2]
    (tmp_path / "cupy.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    paths = os.pathsep.join([str(ROOT / "python"), str(tmp_path)])
    row = doctor(daemon, PYTHONPATH=paths)["modules"]
    assert row["status"] == "failed" and "bfcd.cupy cannot be imported: ImportError: libcudart.so.13" in row["text"]


@gpu_only
def test_doctor_without_a_driver(daemon):
    rows = doctor(daemon, LD_LIBRARY_PATH="/none")
    assert rows["gpu"]["status"] == rows["partition"]["status"] == "failed"
    assert "there is no NVIDIA driver (libcuda.so.1); of bfcd's, cuda:0" in rows["gpu"]["text"]
    assert "has no driver or does not see that GPU" in rows["partition"]["text"]
    rows = doctor(daemon, CUDA_VISIBLE_DEVICES="")
    assert "CUDA_VISIBLE_DEVICES is ''" in rows["partition"]["text"] and rows["gpu"]["status"] == "failed"
    rows = doctor(daemon, CUDA_VISIBLE_DEVICES="", BFC_PARTITION="parking")
    assert rows["partition"]["status"] == "note"


def test_a_child_of_doctor_that_crashes_or_hangs():
    def crash():
        os.kill(os.getpid(), signal.SIGKILL)

    for function, limit_s, kind, sentence in (
        (crash, LIMIT_S, "crashed", "the process ended with signal SIGKILL"),
        (lambda: os._exit(3), LIMIT_S, "crashed", "the process ended with status 3"),
        (lambda: time.sleep(LIMIT_S), 0.1, "hung", "no answer within 0 s"),
        (lambda: {}["x"], LIMIT_S, "KeyError", "'x'"),
    ):
        with pytest.raises(_doctor.Failure) as caught:
            _doctor._in_child(function, limit_s)
        assert (caught.value.kind, str(caught.value)) == (kind, sentence)
    assert _doctor._in_child(lambda: [1], LIMIT_S) == [1]


# ---- demo ----


def left(folder):
    """What the tour has left: its folder, and processes that were told of it."""
    found = [str(path) for path in folder.glob("bfcd-demo-*")]
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{folder}/bfcd-demo-".encode() in path.read_bytes():
                found.append(str(path))
    return found


@pytest.fixture
def tour():
    """Starts it; its temporary folder has a short name, which is hard on YAML."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="b#, : "))
    environment = os.environ | {"PATH": PATH, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT / "python")}
    # Of a job of another bfcd: the tour has its own.
    environment |= {
        "BFC_SOCKET": "/none/bfcd.sock",
        "BFC_TENANT": "other",
        "BFC_PARTITION": "other",
        "BFC_CACHE": "off",
    }

    def start(*words, **options):
        variables = options.pop("variables", {})
        return subprocess.Popen([*MAIN, "demo", *words], env=environment | variables, text=True, **options)

    start.folder = folder
    yield start
    wait_for(lambda: not left(folder), f"end of {left(folder)}")
    shutil.rmtree(folder)


def piped(start, *words, **variables):
    return start(
        *words, variables=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


@host_only
def test_the_tour_without_a_terminal_and_without_a_page(tour, tmp_path):
    for program in (BFCD, BFCCTL):
        (tmp_path / program.name).symlink_to(program)
    process = piped(tour, PATH=f"{tmp_path}:/usr/bin:/bin")
    out, _ = process.communicate(timeout=4 * LIMIT_S)
    assert process.returncode == 0, out
    assert "\033" not in out and "Enter" not in out
    for words in (
        "$ python -m bfcd run --limit 48MiB --lease vision --partition train -- python -m bfcd._demo_jobs work 32",
        "bfcd.QuotaExceeded: lease 'batch' of tenant 'you' is at its limit in 'train': asked 16.0 MiB",
        "1 refused; 0 B left",
        "has attached it: 40 MiB, SHA-256 ",
        "MiB: the same bytes at the same addresses",
        "language: its bytes are as it wrote them",
        "bfc-exporter, which serves a page, was not found",
    ):
        assert words in out, out
    assert re.search(r"server +40\.0 MiB +48\.0 MiB +2 +0", out), out
    assert out.endswith("The daemon and the jobs have been ended, and their folder has been removed.\n")


@host_only
def test_the_tour_on_a_terminal(tour):
    ours, theirs = pty.openpty()
    process = tour(stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, variables={"TERM": "xterm"})
    os.close(theirs)
    out, n_asked = "", 0
    with contextlib.suppress(OSError):  # the tour has ended
        while select.select([ours], [], [], 4 * LIMIT_S)[0]:
            out += os.read(ours, 65536).decode()
            if out.count("Enter") > n_asked:
                n_asked += 1
                os.write(ours, b"\n")
    os.close(ours)
    assert process.wait(LIMIT_S) == 0, out
    has_page = (BFCCTL.parent / "bfc-exporter").exists()
    assert n_asked == out.count("Enter: the next step") + out.count("until you press Enter") == 5 + has_page, out
    assert "\033[1m1  A daemon of your own\033[0m" in out
    assert not has_page or "api/leases has language, notebook, vision" in out
    assert max(len(re.sub(r"\033\[\d+m", "", line)) for line in out.splitlines()) <= 79, out


@host_only
@pytest.mark.parametrize(
    "number, until", [(signal.SIGINT, "2  Three jobs"), (signal.SIGTERM, "5  Parking"), (signal.SIGHUP, "1  A")]
)
def test_the_tour_is_interrupted(tour, number, until):
    process = piped(tour)
    out = ""
    while until not in out:
        line = process.stdout.readline()
        assert line, out
        out += line
    process.send_signal(number)
    process.send_signal(number)
    rest, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + number, rest
    assert "\nInterrupted.\n" in rest and rest.endswith("their folder has been removed.\n") and "Traceback" not in rest


@host_only
def test_a_step_of_the_tour_fails(tour, tmp_path):
    (tmp_path / "bfcd").symlink_to(BFCD)
    bfcctl = tmp_path / "bfcctl"
    bfcctl.write_text(f'#!/bin/sh\ncase "$*" in *refused) echo broken >&2; exit 3 ;; esac\nexec {shlex.quote(str(BFCCTL))} "$@"\n')
    bfcctl.chmod(0o755)
    process = piped(tour, PATH=f"{tmp_path}:/usr/bin:/bin")
    out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert "The tour failed: bfcctl lease list --columns lease,sessions,in-use,limit,refused failed: broken.\n" in out
    assert "bfcd: notice: SIGTERM" in out and "Traceback" not in out
    process = piped(tour, PATH="/none")
    out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1 and out.startswith("bfcd: bfcd was not found: install ") and out.count("\n") == 1


@host_only
def test_the_reader_of_the_tour_goes_away(tour):
    process = piped(tour, "--fast")
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(LIMIT_S) == 1
