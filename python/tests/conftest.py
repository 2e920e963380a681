# A real daemon for each test that asks for one. BFCD and BFC_LIBRARY name the programs under test; BFC_TEST_DEVICE is
# host, cuda-fd or cuda-ipc, the latter two on the fake driver (LD_LIBRARY_PATH).
#
# SPDX-License-Identifier: Apache-2.0
import gc
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import pytest

DEVICE = os.environ.get("BFC_TEST_DEVICE", "host")
LIMIT_S = 120  # for what takes milliseconds on an idle machine
MIB = 1 << 20

# A shell ignores it in jobs of the background, and programs inherit that. One that is handled here is not ignored there.
signal.signal(signal.SIGINT, signal.default_int_handler)

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))


def pytest_collection_finish():
    """The garbage collector leaves out what there is already, mostly of pytest: each test collects its own garbage."""
    gc.collect()
    gc.freeze()


def wait_for(condition, what):
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, f"no {what} within {LIMIT_S} s"
        time.sleep(0.01)


def collect_garbage():
    """gc.collect() does nothing while another thread collects garbage, so this repeats it until it does."""
    own_collections = []

    def note(phase, info):
        if (phase, info["generation"], threading.get_ident()) == ("stop", 2, own_id):
            own_collections.append(info)

    def has_collected():
        gc.collect()
        return own_collections

    own_id = threading.get_ident()
    gc.callbacks.append(note)
    try:
        wait_for(has_collected, "collection of garbage")
    finally:
        gc.callbacks.remove(note)


class Daemon:
    def __init__(self, train="256MiB", quota="64MiB"):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="bfcd-py-"))
        self.socket = self.folder / "bfcd.sock"
        device = "host, size: 512MiB" if DEVICE == "host" else '"cuda:0", headroom: 0'
        share = "" if DEVICE == "host" else f", share: {DEVICE.removeprefix('cuda-').replace('ipc', 'cuda-ipc')}"
        # Where blocks of a GPU are parked; the other partition of the host otherwise.
        parking = "{name: parking, limit: 128MiB}"
        parking_device = "" if DEVICE == "host" else f"  - {{id: host, size: 128MiB, partitions: [{parking}]}}\n"
        parking_quota = "" if DEVICE == "host" else "      - {partition: parking}\n"
        self.config = self.folder / "bfcd.yaml"
        self.config.write_text(
            f"""
socket: {{path: {self.socket}}}
admin_socket: {{path: {self.folder}/admin.sock}}
devices:
  - {{id: {device}, partitions: [{{name: train, limit: {train}{share}}}, {{name: infer, limit: 128MiB{share}}}]}}
{parking_device}tenants:
  - name: me
    match: {{uid: [{os.getuid()}]}}
    quotas:
      - {{partition: train, limit: {quota}}}
      - {{partition: infer}}
{parking_quota}"""
        )
        self.log = open(self.folder / "log", "w")
        self.process = None
        self.start()

    def start(self):
        self.process = subprocess.Popen([os.environ["BFCD"], "--config", self.config], stderr=self.log)
        wait_for(lambda: self.listens() or self.process.poll() is not None, "socket")
        assert self.process.poll() is None, (self.folder / "log").read_text()

    def listens(self):
        """On the admin socket, too, which is bound after the client's: bfcctl needs it."""
        for path in (self.socket, self.folder / "admin.sock"):
            with socket.socket(socket.AF_UNIX) as s:
                if s.connect_ex(str(path)) != 0:
                    return False
        return True

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(LIMIT_S) == 0, (self.folder / "log").read_text()
        self.log.close()
        shutil.rmtree(self.folder)

    def restart(self):
        """Kills the daemon and starts another one, which inherits its memory."""
        self.process.kill()
        self.process.wait()
        self.start()

    def run(self, program, **environment):
        """Runs a Python program with this daemon's client library."""
        return subprocess.run(
            [sys.executable, "-c", program],
            env=self.environment() | environment,
            text=True,
            capture_output=True,
            timeout=LIMIT_S,
        )

    def environment(self):
        return os.environ | {
            "BFC_SOCKET": str(self.socket),
            "PYTHONPATH": str(pathlib.Path(__file__).resolve().parent.parent),
        }


@pytest.fixture
def daemon():
    d = Daemon()
    yield d
    # Clients in reference cycles say goodbye now. After the daemon's end each would wait 5 s for it.
    collect_garbage()
    d.stop()


@pytest.fixture
def client(daemon):
    import bfcd

    c = bfcd.connect(daemon.socket)
    yield c
    c.close()


host_only = pytest.mark.skipif(DEVICE != "host", reason="about host memory")
#: Of a test whose subject differs on GPUs: it runs there each time, others only in the nightly run.
on_gpus_too = pytest.mark.on_gpus_too
about_gpus = pytest.mark.skipif(DEVICE == "host", reason="about GPUs")


def gpu_only(test):
    return on_gpus_too(about_gpus(test))


def pytest_configure(config):
    config.addinivalue_line("markers", "on_gpus_too: its subject differs on GPUs")
