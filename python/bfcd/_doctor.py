"""python -m bfcd doctor: what works here, what does not, and what to do, a line for each.

What can hang or crash, such as a stopped daemon or a driver, is tried in a forked child with a time limit.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import getpass
import grp
import importlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import pkgutil
import platform
import pwd
import resource
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import bfcd

from . import _native
from ._terminal import GREEN, HOW_TO_GET, RED, YELLOW, escape, fill, paint

_MIB = 1 << 20
_CLIENT_SOCKET = "/run/bfcd/client/bfcd.sock"  # as in proto/paths.h
_PROXY = "libcuda.so.1"
_ANSWER_S = 10.0  # of the daemon
_LOAD_S = 120.0  # of a driver, which makes a context, or of a framework's modules
_MIN_FILES = 32  # of a session, and of what it receives at a time
_PACKAGES = (
    "numpy", "torch", "cupy", "numba", "rmm", "jax", "tensorflow", "safetensors", "ray", "vllm", "sglang",
)  # fmt: skip
_ASK_SERVICE = "see `systemctl status bfcd` and `journalctl -u bfcd` on the host"


class Finding(NamedTuple):
    name: str
    status: str  #: "ok", "note" (jobs run without it) or "failed"
    text: str
    remedy: str = ""


def ok(name: str, text: str) -> Finding:
    return Finding(name, "ok", text)


def note(name: str, text: str, remedy: str) -> Finding:
    return Finding(name, "note", text, remedy)


def failed(name: str, text: str, remedy: str) -> Finding:
    return Finding(name, "failed", text, remedy)


# ---- children ----


class Failure(Exception):
    """A child's exception: its class and its message."""

    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


def _send(function: Callable[[], Any], connection: Connection) -> None:
    try:
        connection.send((True, function()))
    except Exception as e:
        connection.send((False, (type(e).__name__, str(e))))


def _in_child(function: Callable[[], Any], limit_s: float) -> Any:
    """The result of the function. Failure: it raised an exception, hung or crashed."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(function, theirs))
    child.start()
    theirs.close()
    try:
        if not ours.poll(limit_s):
            raise Failure("hung", f"no answer within {limit_s:.0f} s")
        has_result, result = ours.recv()
    except EOFError:
        child.join()
        code = child.exitcode or 0
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"
        raise Failure("crashed", f"the process ended with {how}") from None
    finally:
        child.kill()
        child.join()
    if not has_result:
        raise Failure(*result)
    return result


def _size(n_bytes: int) -> str:
    n, unit = float(n_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if n < 1024 or unit == "TiB":
            break
        n /= 1024
    return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"


def _user() -> str:
    try:
        return f"user {getpass.getuser()} (uid {os.getuid()})"
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


# ---- the library and the socket ----


def _load_library() -> tuple[str, str, int]:
    """Its version and path, and how many of its functions this package calls."""
    import ctypes

    from . import _library

    importlib.import_module("bfcd._client")  # it reads variables of the environment
    address = ctypes.cast(_library.lib.bfc_version, ctypes.c_void_p).value or 0
    path = ""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            begin, end = (int(n, 16) for n in line.split(" ", 1)[0].split("-"))
            if begin <= address < end:
                path = line.split(None, 5)[5].rstrip("\n")
    return _library.lib.bfc_version().decode(), path, len(_library._FUNCTIONS)


def check_library() -> tuple[Finding, str, str]:
    """And its version and path."""
    try:
        version, path, n_functions = _in_child(_load_library, _LOAD_S)
    except Failure as e:
        text, _, remedy = str(e).partition(". ")
        if not remedy:
            is_variable = text.startswith("BFC_WAIT_MS")
            remedy = (
                "correct the variable" if is_variable else "install libbfcclient and this package of the same version"
            )
        return failed("library", text, remedy), "", ""
    native = _native.folder()
    if os.environ.get("BFC_LIBRARY"):
        origin = "which BFC_LIBRARY names"
    elif native is not None and path.startswith(f"{native}/"):
        origin = "which the package carries"
    else:
        origin = "which the system has"
    text = f"libbfcclient {version} is {path}, {origin}; it has all {n_functions} functions that this package calls"
    return ok("library", text), version, path


def _missing_part(path: str) -> str:
    """The first part of a path that does not exist."""
    while not os.path.lexists(os.path.dirname(path) or "."):
        path = os.path.dirname(path)
    return path


def _owner(s: os.stat_result) -> str:
    try:
        user = pwd.getpwuid(s.st_uid).pw_name
    except KeyError:
        user = str(s.st_uid)
    try:
        group = grp.getgrgid(s.st_gid).gr_name
    except KeyError:
        group = str(s.st_gid)
    return f"mode {stat.S_IMODE(s.st_mode):04o}, owner {user}, group {group}"


def check_socket() -> tuple[Finding, str]:
    """And the path."""
    path = os.environ.get("BFC_SOCKET") or _CLIENT_SOCKET
    origin = "which BFC_SOCKET names" if os.environ.get("BFC_SOCKET") else "the default, because BFC_SOCKET is not set"
    permission = (
        "become a member of the socket's group, or ask the operator for another mode (`socket: {mode: ...}` in bfcd.yaml); "
        "where SELinux guards the container, see docs/containers.md"
    )
    try:
        s = os.stat(path)
        if not stat.S_ISSOCK(s.st_mode):
            return failed("socket", f"{path}, {origin}, is no socket", "set BFC_SOCKET to bfcd's client socket"), path
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_ANSWER_S)
            probe.connect(path)
    except (FileNotFoundError, NotADirectoryError):
        missing = _missing_part(path)
        what = "does not exist" if missing == path else f"does not exist, because there is no {missing}"
        remedy = f"start bfcd ({_ASK_SERVICE}); in a container mount the folder /run/bfcd/client; or set BFC_SOCKET"
        return failed("socket", f"{path}, {origin}, {what}", remedy), path
    except PermissionError:
        try:
            whose = _owner(os.stat(path))
        except PermissionError:
            whose = "a folder above it is closed"
        return failed("socket", f"{path}, {origin}, is closed to {_user()}: {whose}", permission), path
    except ConnectionRefusedError:
        remedy = f"start bfcd ({_ASK_SERVICE}); in a container mount the socket's folder, because each start makes a new socket"
        return failed("socket", f"no process listens at {path}, {origin}: bfcd has ended", remedy), path
    except OSError as e:
        remedy = "set BFC_SOCKET to a path of at most 107 bytes" if "too long" in str(e) else _ASK_SERVICE
        return failed("socket", f"{path}, {origin}, takes no connection: {e.strerror or e}", remedy), path
    return ok("socket", f"{path}, {origin}, takes connections ({_owner(s)})"), path


# ---- the session ----


class Session(NamedTuple):
    tenant: str
    partition: str
    devices: list[tuple[str, str, str, str, int | None]]  #: partition, device, kind, UUID, ordinal


def _open_session() -> Session:
    client = bfcd.connect(name="bfcd doctor", trace="", cache=False)
    devices = [
        (d.name, d.physical.name, d.physical.kind, d.physical.uuid, d.physical.ordinal)
        for d in client.devices().logical
    ]
    return Session(client.tenant, client.partition, devices)


def _daemon_version(path: str) -> str:
    """Of a daemon that has answered already."""
    bfcctl = _native.program("bfcctl")
    if bfcctl is not None:
        done = subprocess.run(
            [bfcctl, "--socket", path, "--json", "status"],
            capture_output=True,
            text=True,
            timeout=_ANSWER_S,
            check=False,
        )
        if done.returncode == 0:
            return f"bfcd {json.loads(done.stdout)['status']['version']} answers"
    return "bfcd answers"


def check_session(path: str) -> tuple[Finding, Session | None]:
    try:
        session = _in_child(_open_session, _ANSWER_S)
        text = f"{_daemon_version(path)}; {_user()} is tenant '{session.tenant}'"
    except subprocess.TimeoutExpired:
        return failed("tenant", "bfcd does not answer any more", _ASK_SERVICE), None
    except Failure as e:
        return _explain_session(e), None
    source = " (BFC_PARTITION)" if os.environ.get("BFC_PARTITION") else ""
    return ok("tenant", f"{text}, and partition '{session.partition}' is its default{source}"), session


def _explain_session(e: Failure) -> Finding:
    named = [name for name in ("BFC_TENANT", "BFC_PARTITION") if os.environ.get(name)]
    if e.kind == "hung":
        return failed("tenant", f"bfcd does not answer: {e}", f"it is stopped or hangs: {_ASK_SERVICE}, and restart it")
    if e.kind == "NotPermitted" and os.environ.get("BFC_TENANT"):
        remedy = "unset BFC_TENANT, or ask the operator to add this user to that tenant (`match:` in bfcd.yaml)"
    elif e.kind == "NotPermitted":
        remedy = f"ask the operator to add {_user()} to a tenant (`match: {{user: [...]}}` in bfcd.yaml, then `bfcctl reload`)"
    elif e.kind == "NotFound" and named:
        remedy = f"correct or unset {' and '.join(named)}"
    elif e.kind == "NotFound":
        remedy = "ask the operator for a quota of the tenant in a partition (`quotas:` in bfcd.yaml)"
    elif e.kind == "QuotaExceeded":
        remedy = "end other processes of this tenant (`bfcctl sessions`), or ask the operator to raise max_sessions"
    elif e.kind == "Disconnected":
        remedy = _ASK_SERVICE
    else:
        remedy = f"install bfcd and libbfcclient of the same version; {_ASK_SERVICE}"
    return failed("tenant", f"no session: {e}", remedy)


def _use_block(partition: str) -> tuple[int, int]:
    """Bytes that are free there, and the limit, before it."""
    client = bfcd.connect(name="bfcd doctor", trace="", cache=False)
    free, limit = client.mem_get_info(partition)
    block = client.malloc(_MIB, partition=partition, wait=0)
    data = os.urandom(_MIB)
    block.write(data)
    if block.read() != data:
        raise RuntimeError("the block does not have the bytes that were written")
    block.free()
    return free, limit


def check_partition(session: Session, name: str, device: str, kind: str, ordinal: int | None) -> Finding:
    where = f"'{name}' on {device}"
    is_default = name == session.partition
    if kind == "cuda" and ordinal is None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "this process has no driver or does not see that GPU"
        remedy = "see the line gpu, or choose another BFC_PARTITION"
        if visible is not None:
            why += f"; CUDA_VISIBLE_DEVICES is '{visible}'"
            remedy = f"correct CUDA_VISIBLE_DEVICES, {remedy}"
        return (failed if is_default else note)("partition", f"{where} cannot be used: {why}", remedy)
    try:
        free, limit = _in_child(lambda: _use_block(name), _ANSWER_S if kind == "host" else _LOAD_S)
    except Failure as e:
        if e.kind in ("QuotaExceeded", "OutOfMemory"):
            remedy = f"end jobs that have the memory (`bfcctl explain {name}`), or ask the operator for a higher limit"
        elif e.kind in ("hung", "crashed"):
            remedy = f"{_ASK_SERVICE}; `bfcctl status` shows the device"
        elif e.kind == "DeviceLost":
            remedy = "`bfcctl status` shows the device; see the line gpu"
        else:
            remedy = "see ERRORS in `man libbfcclient`"
        return failed("partition", f"{where} gives no block of 1 MiB: {e}", remedy)
    return ok(
        "partition", f"{where} has {_size(free)} free of {_size(limit)}; a block was allocated, written, read and freed"
    )


# ---- GPUs ----


def _ask_driver() -> tuple[bool, int, int, str, int]:
    """Whether it is the proxy; CUDA's version; the result of cuInit() and its name; the number of devices."""
    import ctypes

    driver = ctypes.CDLL(_PROXY)
    is_proxy = hasattr(driver, "bfc_preload_driver")
    if is_proxy:
        driver.bfc_preload_driver.restype = ctypes.c_void_p
        if driver.bfc_preload_driver() is None:
            raise OSError("the proxy finds no driver")
    version, count, name = ctypes.c_int(), ctypes.c_int(), ctypes.c_char_p()
    driver.cuDriverGetVersion(ctypes.byref(version))
    result: int = driver.cuInit(0)
    if result == 0:
        result = driver.cuDeviceGetCount(ctypes.byref(count))
    driver.cuGetErrorName(result, ctypes.byref(name))
    return is_proxy, version.value, result, (name.value or b"?").decode(), count.value


def _kernel_driver() -> str:
    try:
        with open("/sys/module/nvidia/version", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _gpus_of(session: Session | None) -> tuple[str, bool]:
    """bfcd's GPUs, as a sentence, and whether there is any."""
    gpus = (
        {(device, uuid, ordinal) for _, device, kind, uuid, ordinal in session.devices if kind == "cuda"}
        if session
        else set()
    )
    rows = [
        f"{device} ({uuid}) is " + ("not visible here" if ordinal is None else f"CUDA device {ordinal} here")
        for device, uuid, ordinal in sorted(gpus, key=str)
    ]
    return "; of bfcd's, " + ", ".join(rows) if rows else "", bool(rows)


def check_gpu(session: Session | None) -> tuple[Finding, bool]:
    """And whether there is a GPU, here or in a partition."""
    of_bfcd, is_needed = _gpus_of(session)
    bad = failed if is_needed else note
    kernel = _kernel_driver()
    try:
        is_proxy, version, result, name, count = _in_child(_ask_driver, _LOAD_S)
    except Failure as e:
        if e.kind != "OSError":
            return bad(
                "gpu", f"the driver's library {_PROXY} does not work: {e}", "see `nvidia-smi` and the kernel's log"
            ), True
        if kernel:
            remedy = "in a container add the GPU (`--device nvidia.com/gpu=all`); else install the driver's library, libcuda1"
            return bad("gpu", f"the kernel has driver {kernel}, but {_PROXY} cannot be loaded{of_bfcd}", remedy), True
        if is_needed:
            remedy = "in a container add the GPU (`--device nvidia.com/gpu=all`); else install NVIDIA's driver"
            return bad("gpu", f"there is no NVIDIA driver ({_PROXY}){of_bfcd}", remedy), True
        needless = "memory of the host needs none" if session is None else "no partition of this tenant needs one"
        return ok("gpu", f"there is no NVIDIA driver here, and {needless}"), False
    text = f"driver{f' {kernel}' if kernel else ''}, CUDA {version // 1000}.{version % 1000 // 10}"
    text += ", by bfcd's proxy" if is_proxy else ""
    if result != 0:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        remedy = "see `nvidia-smi`; in a container add the GPU (`--device nvidia.com/gpu=all`)"
        if visible is not None:
            remedy = f"correct CUDA_VISIBLE_DEVICES, which is '{visible}'; {remedy}"
        return bad("gpu", f"{text}: cuInit() gives {name} ({result}){of_bfcd}", remedy), True
    return ok("gpu", f"{text}: {count} {'device' if count == 1 else 'devices'} visible{of_bfcd}"), True


# ---- bfcctl run and the proxy ----


_RUN_LIMIT = 2 * _MIB
_RUN = """
import bfcd, json, os
print(json.dumps([os.environ.get("LD_LIBRARY_PATH", ""), bfcd.connect(name="bfcd doctor", trace="").bytes_limit()]))
"""


def check_run(session: Session) -> tuple[Finding, str | None]:
    """And LD_LIBRARY_PATH of a program under bfcctl run."""
    bfcctl = _native.program("bfcctl")
    if bfcctl is None:
        return note("run", "`python -m bfcd run` does not work: bfcctl was not found", HOW_TO_GET), None
    run = [bfcctl, "run", "--quiet", "--limit", f"{_RUN_LIMIT // _MIB}MiB"]
    command = [*run, "--tenant", session.tenant, "--partition", session.partition, "--", sys.executable, "-c", _RUN]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LOAD_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        return note("run", f"`python -m bfcd run` does not work: {e}", _ASK_SERVICE), None
    if done.returncode != 0:
        why = done.stderr.strip().splitlines()
        text = why[-1].removeprefix("bfcctl: ") if why else f"{bfcctl} ended with status {done.returncode}"
        remedy = "ask the operator for `leases: self` of the tenant in bfcd.yaml; until then the tenant's limit is each job's"
        if "leases: self" not in text:
            remedy = "see RUN in `man bfcctl`"
        return note("run", f"`python -m bfcd run` does not work: {text}", remedy), None
    path, limit = json.loads(done.stdout)
    if limit != _RUN_LIMIT:
        text = f"`python -m bfcd run --limit {_RUN_LIMIT // _MIB}MiB` gives a program a limit of {_size(limit)}"
        remedy = (
            "a lease of the operator for this user or container counts before it: ask for another limit of that lease"
        )
        return note("run", text, remedy), path
    return ok("run", f"`python -m bfcd run` gives a program a limit of its own, by {bfcctl}"), path


def _load_proxy(path: str) -> str:
    """Its version. Its library is the one of this package, as in a job that imports bfcd first."""
    import ctypes

    importlib.import_module("bfcd._library")
    proxy = ctypes.CDLL(path, mode=os.RTLD_NOW)
    if not hasattr(proxy, "bfc_preload_version"):
        return "before 0.1"
    proxy.bfc_preload_version.restype = ctypes.c_char_p
    return proxy.bfc_preload_version().decode()


def _is_proxy(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return b"bfc_preload_driver" in file.read()
    except OSError:
        return False


def _proxy_in(folders: str) -> str:
    """The first libcuda.so.1 in a list of folders, if it is the proxy."""
    for folder in filter(None, folders.split(":")):
        path = os.path.join(folder, _PROXY)
        if os.path.exists(path):
            return path if _is_proxy(path) else ""
    return ""


def check_proxy(library: str, version: str, run_path: str | None, has_gpu: bool) -> Finding:
    """run_path: LD_LIBRARY_PATH under bfcctl run, if that works."""
    if run_path is None:
        beside = [os.environ.get("BFC_PRELOAD", ""), os.path.join(os.path.dirname(library), "bfcd", "preload")]
        path = _proxy_in(":".join(beside))
    else:
        path = _proxy_in(run_path)
    what = f"the proxy of {_PROXY} (for CUDA programs that do not know bfcd)"
    if not path and not has_gpu:
        return ok("proxy", f"{what} is not here, and neither is a GPU")
    if not path:
        remedy = (
            "for such programs on a GPU install the package libbfcclient0, or set BFC_PRELOAD to the proxy's folder"
        )
        return note("proxy", f"{what} is not here", remedy)
    by_path, by_preload = _proxy_in(os.environ.get("LD_LIBRARY_PATH", "")), os.environ.get("LD_PRELOAD", "")
    if by_path or any(_is_proxy(name) for name in by_preload.replace(":", " ").split()):
        state = f"{'LD_LIBRARY_PATH' if by_path else 'LD_PRELOAD'} of this process has it"
    else:
        state = "not in LD_LIBRARY_PATH or LD_PRELOAD now; `python -m bfcd run` puts it there"
    try:
        own = _in_child(lambda: _load_proxy(path), _LOAD_S)
    except Failure as e:
        return note(
            "proxy", f"{what} is {path} and does not work: {e}", "install it and libbfcclient of the same version"
        )
    if own != version:
        remedy = "install both of the same version"
        return note("proxy", f"{what} is {path}, of version {own}, and the library is {version}", remedy)
    return ok("proxy", f"{what} is {path}, of version {own} as the library; {state}")


# ---- limits and packages ----


def _limit(what: int) -> int | None:
    soft, _ = resource.getrlimit(what)
    return None if soft == resource.RLIM_INFINITY else soft


def check_limits() -> Iterator[Finding]:
    files, n_open = _limit(resource.RLIMIT_NOFILE), len(os.listdir("/proc/self/fd"))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    text = f"this process may have {'any number of' if files is None else files} open files (RLIMIT_NOFILE)"
    if files is not None and files - n_open < _MIN_FILES:
        text += f", has {n_open}, and a session needs up to {_MIN_FILES} at a time"
        most = (
            ""
            if hard in (resource.RLIM_INFINITY, -1) or hard >= 1024
            else f", which the hard limit of {hard} forbids now"
        )
        yield failed("files", text, f"`ulimit -n 1024`{most}; in a container `--ulimit nofile=1024`")
    else:
        yield ok("files", f"{text}, and a session needs up to {_MIN_FILES} at a time")
    locked = _limit(resource.RLIMIT_MEMLOCK)
    text = f"this process may lock {'any amount' if locked is None else _size(locked)} (RLIMIT_MEMLOCK)"
    yield ok(
        "locked", f"{text}: it bounds mlock() of blocks and their registration for RDMA; bfcd itself locks nothing"
    )
    space = _limit(resource.RLIMIT_AS)
    if space is not None:
        text = f"this process may have {_size(space)} of addresses (RLIMIT_AS), and a partition needs up to twice its limit"
        yield note("addresses", text, "`ulimit -v unlimited` if a request fails for lack of room to map memory")


def _versions(names: list[str]) -> list[str]:
    distributions = importlib.metadata.packages_distributions()
    found = []
    for name in names:
        distribution = next(iter(distributions.get(name, [])), None)
        found.append(f"{name} {importlib.metadata.version(distribution) if distribution else 'of no known version'}")
    return found


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def check_packages(has_library: bool) -> Iterator[Finding]:
    installed = [name for name in _PACKAGES if _is_installed(name)]
    versions = ", ".join(_versions(installed)) or "none of those that bfcd works with"
    if "numpy" in installed:
        yield ok("packages", f"{versions}")
    else:
        yield note("packages", f"{versions}; arrays (`empty()`, `weights()`) need NumPy", "`pip install numpy`")
    if not has_library:
        return
    working, missing = [], []
    for module in pkgutil.iter_modules(bfcd.__path__):
        if module.name.startswith("_") or module.ispkg:
            continue
        if module.name != "ray" and module.name not in installed:  # bfcd.ray is also for nodes without Ray
            missing.append(f"bfcd.{module.name}")
            continue
        try:
            _in_child(lambda name=f"bfcd.{module.name}": importlib.import_module(name) and None, _LOAD_S)  # type: ignore[misc]
            working.append(f"bfcd.{module.name}")
        except Failure as e:
            remedy = f"install a version of {module.name} that docs/frameworks.md names"
            yield failed("modules", f"bfcd.{module.name} cannot be imported: {e.kind}: {e}", remedy)
    text = f"{', '.join(working)} can be imported" if working else ""
    rest = (
        f"{', '.join(missing)} {'needs its framework' if len(missing) == 1 else 'need their frameworks'}"
        if missing
        else ""
    )
    yield ok("modules", "; ".join(filter(None, (text, rest))))


# ---- all together ----


def findings() -> Iterator[Finding]:
    yield ok(
        "python",
        f"Python {platform.python_version()} at {sys.executable}, bfcd {bfcd.__version__}, {platform.platform()}",
    )
    library, version, library_path = check_library()
    yield library
    found, path = check_socket()
    yield found
    session = None
    has_both = library.status == found.status == "ok"
    if has_both:
        found, session = check_session(path)
        yield found
    run_path = None
    if session is not None:
        for name, device, kind, _, ordinal in session.devices:
            yield check_partition(session, name, device, kind, ordinal)
    found, has_gpu = check_gpu(session)
    yield found
    if session is not None:
        found, run_path = check_run(session)
        yield found
    if library.status == "ok":
        yield check_proxy(library_path, version, run_path, has_gpu)
    yield from check_limits()
    yield from check_packages(library.status == "ok")
    if session is None:
        needs = "a tenant" if has_both else "the library and the socket"
        yield Finding(
            "rest",
            "note",
            f"partitions and `python -m bfcd run` were not tried, because they need {needs}",
            "see above",
        )


_COLORS = {"ok": GREEN, "note": YELLOW, "failed": RED}


def _print(finding: Finding) -> None:
    status = f"{'FAILED' if finding.status == 'failed' else finding.status:<7}"
    line = f"{status} {finding.name:<10} {finding.text}{f'. To do: {finding.remedy}' if finding.remedy else ''}."
    print(paint(status, _COLORS[finding.status]) + fill(escape(line), 19).removeprefix(status), flush=True)


def main(as_json: bool) -> int:
    """The exit status. 0: all that a job needs works."""
    rows = []
    for finding in findings():
        rows.append(finding)
        if not as_json:
            _print(finding)
    bad = [row.name for row in rows if row.status == "failed"]
    if as_json:
        document = {"schema": 1, "ok": not bad, "checks": [row._asdict() for row in rows]}
        print(json.dumps(document, indent=2))
    elif bad:
        print(f"\nSomething that a job needs does not work here: {', '.join(dict.fromkeys(bad))}.")
    else:
        print("\nAll that a job needs works here.")
    return 1 if bad else 0
