# Every public function of the package with wrong arguments, at the edges of numbers, in a thread, in a forked child, after
# close() and after the daemon's end: the right value or a clear error, no crash, and no line from a __del__().
#
# A row is a function and arguments that it takes. Each argument is replaced by each of VALUES in turn. A public function
# without a row fails the test. All of it is one program, which this file is, too.
#
# SPDX-License-Identifier: Apache-2.0
import ctypes
import faulthandler
import inspect
import itertools
import math
import os
import subprocess
import sys
import threading

import bfcd
import pytest

numbers = itertools.count()
SIZES = {"n_bytes", "offset", "ordinal"}
NAMES = {"name", "tag", "partition", "tenant", "to", "path", "socket", "trace"}
SECONDS = {"wait", "keep"}
PROTOCOLS = {
    "__array_interface__",
    "__cuda_array_interface__",
    "__dlpack__",
    "__dlpack_device__",
    "__enter__",
    "__exit__",
}


def public_functions():
    for name in bfcd.__all__:
        value = getattr(bfcd, name)
        if not inspect.isclass(value):
            yield name
        elif not issubclass(value, (BaseException, tuple)):  # rows of lists and errors are only data
            yield name
            for member in dir(value):
                is_method = callable(getattr(value, member)) or isinstance(getattr(value, member), property)
                if is_method and (not member.startswith("_") or member in PROTOCOLS):
                    yield f"{name}.{member}"


class Objects:
    """What the rows use."""

    def __init__(self):
        self.socket = os.environ["BFC_SOCKET"]
        self.client = bfcd.connect()
        self.pool = self.client.pool()
        self.block = self.client.malloc(4096)
        self.shared = self.client.malloc(4096, whole=True)
        self.client.publish(self.shared, "edges")

    def get(self, owner, member):
        return lambda: lambda: getattr(owner(), member)

    def rows(self):
        """By name: what gives the function, and its arguments."""

        def array():
            return bfcd.DeviceArray(self.block, (3,), "f4", 0)

        sharer = {"array": self.shared, "name": f"edges-{next(numbers)}", "keep": 0, "metadata": None}
        rows = {
            "connect": (lambda: bfcd.connect, {
                "socket": self.socket, "partition": None, "tenant": None, "name": None, "trace": None, "cache": True,
                "inherit": None}),
            "default": (lambda: bfcd.default, {}),
            "devices": (lambda: bfcd.devices, {}),
            "idle": (lambda: lambda wait: bfcd.idle(wait=wait).__enter__(), {"wait": 0}),
            "on_pressure": (lambda: bfcd.on_pressure, {"fn": None}),
            "pool": (lambda: bfcd.pool, {"tag": None, "partition": None}),
            "trace": (lambda: bfcd.trace, {"path": "/nowhere/trace"}),
            "weights": (lambda: bfcd.weights, {
                "path": "/nowhere/model", "client": self.client, "framework": "numpy", "partition": None, "keep": 0,
                "wait": 0, "progress": False}),
            "Block": (lambda: bfcd.Block, {"session": None, "nbytes": 1, "read_only": False, "may_be_parked": False}),
            "Client": (lambda: bfcd.Client, {"session": None, "socket": None}),
            "Pool": (lambda: bfcd.Pool, {"client": self.client, "tag": None, "partition": None}),
            "DeviceArray": (lambda: bfcd.DeviceArray, {
                "block": self.block, "shape": (3,), "dtype": "f4", "ordinal": 0, "offset": 0, "read_only": None}),
            "Client.close": (lambda: bfcd.connect().close, {}),
            "Client.__enter__": (lambda: self.client.__enter__, {}),
            "Client.__exit__": (lambda: bfcd.connect().__exit__, {}),
            "Client.partition_for_device": (lambda: self.client.partition_for_device, {"ordinal": 0}),
            "Client.malloc": (lambda: self.client.malloc, {
                "n_bytes": 1, "partition": None, "tag": None, "wait": None, "one_extent": False, "whole": False,
                "parkable": False}),
            "Client.empty": (lambda: self.client.empty, {
                "shape": 3, "dtype": "f4", "partition": None, "tag": None, "wait": None, "whole": False}),
            "Client.pool": (lambda: self.client.pool, {"tag": None, "partition": None}),
            "Client.on_pressure": (lambda: self.client.on_pressure, {"fn": None}),
            "Client.publish": (lambda: self.client.publish, sharer),
            "Client.attach": (lambda: self.client.attach, {"name": "edges", "read_only": False, "wait": None}),
            "Client.forget": (lambda: self.client.forget, {"name": "none"}),
            "Client.empty_cache": (lambda: self.client.empty_cache, {"n_bytes": None}),
            "Client.charge": (lambda: self.client.charge, {"n_bytes": 1, "partition": None, "wait": None}),
            "Client.uncharge": (lambda: self.client.uncharge, {"n_bytes": 1, "partition": None}),
            "Block.free": (lambda: self.client.malloc(1).free, {}),
            "Block.park": (lambda: self.block.park, {"to": None}),
            "Block.wake": (lambda: self.block.wake, {"wait": None}),
            "Block.read": (lambda: self.block.read, {"n_bytes": 1, "offset": 0}),
            "Block.write": (lambda: self.block.write, {"data": b"x", "offset": 0}),
            "Pool.__enter__": (lambda: self.pool.__enter__, {}),
            "Pool.__exit__": (lambda: self.client.pool().__exit__, {}),
            "Pool.close": (lambda: self.client.pool().close, {}),
            "Pool.sleep": (lambda: self.pool.sleep, {"to": None, "discard": False}),
            "Pool.wake": (lambda: self.pool.wake, {"wait": None}),
            "Pool.use": (lambda: lambda wait: self.pool.use(wait).__enter__(), {"wait": None}),
            "Pool.malloc": (lambda: self.pool.malloc, {"n_bytes": 1, "wait": None}),
            "Pool.empty": (lambda: self.pool.empty, {"shape": 3, "dtype": "f4", "wait": None}),
            "DeviceArray.__dlpack_device__": (lambda: array().__dlpack_device__, {}),
            "DeviceArray.__dlpack__": (lambda: array().__dlpack__, {
                "stream": None, "max_version": (1, 0), "dl_device": None, "copy": None}),
        }  # fmt: skip
        for name in ("memory_stats", "tenant_stats", "bytes_in_use", "max_bytes_in_use", "bytes_limit", "mem_get_info"):
            rows[f"Client.{name}"] = (lambda name=name: getattr(self.client, name)), {"partition": None}
        for name in ("devices", "shared", "reset_peak"):
            rows[f"Client.{name}"] = (lambda name=name: getattr(self.client, name)), {}
        for name in ("info", "buffer", "array"):
            rows[f"Block.{name}"] = (lambda name=name: getattr(self.block, name)), {}
        for owner, kind, names in (
            (lambda: self.client, "Client", ("tenant", "partition")),
            (lambda: self.block, "Block", ("ptr", "device_ordinal", "is_parked", "metadata", *sorted(PROTOCOLS)[:2])),
            (array, "DeviceArray", ("nbytes", "__cuda_array_interface__")),
        ):
            for name in names:
                rows[f"{kind}.{name}"] = self.get(owner, name), {}
        return rows


def values():
    wrong = [object(), b"bytes", 1.5, [], {}, (), True, None, print, bytearray(2), 1j]
    texts = ["", "text", "a\0b", "\ud800", "x" * 100]
    ends = [-1, 0, 3, 1 << 63, 1 << 64, (1 << 64) + 4096, -(1 << 63) - 1, 10**400, math.nan, math.inf, -math.inf]
    scalars = [NUMPY_3, numpy.uint8(3), numpy.int64(-1), numpy.float32(2.5), numpy.float64("nan"), numpy.bool_(True)]
    return [*wrong, *texts, *ends, *scalars, numpy.array([2, 2]), numpy.array(3), numpy.zeros((2, 2)).T[1:]]


def must_fail(argument, value):
    """Where no meaning can be right. All of it counts for the types of Python only: NumPy has the same."""
    if argument in SIZES:
        return type(value) in (str, float, object) or (type(value) is int and not 0 <= value < 1 << 63)
    if argument in NAMES:
        return type(value) in (int, float, object) or value == "a\0b"
    if argument in SECONDS:
        return type(value) in (str, object) or (type(value) in (int, float) and not value >= 0)
    return False


class Edges:
    def __init__(self):
        self.objects = Objects()
        self.failures = []

    def outcome(self, name, function, arguments):
        """The kind of the error; None: a value."""
        try:
            function()(**arguments)
        except Exception as e:
            kinds = (TypeError, ValueError, OSError, MemoryError, BufferError, RuntimeError, ImportError)
            if "array_interface__" in name:
                kinds += (AttributeError,)
            if not isinstance(e, kinds) or isinstance(e, (ctypes.ArgumentError, RecursionError)) or not str(e):
                self.failures.append(f"{name}({arguments}): {e!r}")
            return type(e)
        return None

    def with_values(self):
        for name, (function, good) in self.objects.rows().items():
            self.outcome(name, function, good)
            for argument, value in itertools.product(good, VALUES):
                if argument == "array" or (name == "Client.publish" and argument == "name"):
                    good = good | {"name": f"edges-{next(numbers)}"}
                error = self.outcome(name, function, good | {argument: value})
                if error is None and must_fail(argument, value):
                    self.failures.append(f"{name}({argument}={value!r}) is accepted")
            for argument in SIZES & good.keys():
                kinds = {self.outcome(name, function, good | {argument: n}) for n in (3, NUMPY_3)}
                if len(kinds) > 1:
                    self.failures.append(f"{name}({argument}=numpy.int64(3)) and 3 differ: {kinds}")

    def plain(self, error=None):
        """error: what requests to the daemon end with."""
        for name, (function, good) in self.objects.rows().items():
            got = self.outcome(name, function, good)
            if error and name in ("Client.shared", "Client.attach", "Client.forget") and got is not error:
                self.failures.append(f"{name}: {got} and not {error}")

    def in_a_child(self):
        pid = os.fork()
        if pid == 0:
            self.failures.clear()
            self.plain(bfcd.Forked)
            print("".join(f"in a child: {failure}\n" for failure in self.failures), end="", flush=True)
            os._exit(len(self.failures) > 0)
        if os.waitpid(pid, 0)[1] != 0:
            self.failures.append("the forked child failed")


def main():
    faulthandler.enable()
    faulthandler.dump_traceback_later(int(sys.argv[1]), exit=True)
    edges = Edges()
    missing = set(public_functions()) ^ edges.objects.rows().keys()
    if missing:
        edges.failures.append(f"without a row, or no public function any more: {sorted(missing)}")
    edges.with_values()
    thread = threading.Thread(target=edges.plain)
    thread.start()
    thread.join()
    edges.in_a_child()
    print(*edges.failures, "that was all", sep="\n", flush=True)
    edges.failures.clear()
    sys.stdin.readline()  # the daemon has ended
    edges.plain(bfcd.Disconnected)
    edges.objects.client.close()
    edges.plain(ValueError)
    print(*edges.failures, sep="\n", end="")


@pytest.mark.on_gpus_too
def test_every_function_at_its_edges(daemon, tmp_path):
    from conftest import LIMIT_S

    environment = daemon.environment() | {"BFC_RETURN_MS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    p = subprocess.Popen([sys.executable, __file__, str(LIMIT_S)], env=environment, cwd=tmp_path, text=True, **pipes)
    said = list(itertools.takewhile("that was all\n".__ne__, p.stdout))
    daemon.process.kill()
    daemon.process.wait()
    out, errors = p.communicate("\n", timeout=LIMIT_S)
    daemon.start()
    assert (p.returncode, "".join(said), out, errors) == (0, "", "", "")


if __name__ == "__main__":
    import numpy

    NUMPY_3 = numpy.int64(3)
    VALUES = values()
    main()
