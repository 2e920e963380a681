#!/usr/bin/env python3
"""Four processes share a .safetensors file by bfcd.weights(): what is charged, each process's private memory, and the
time until the tensors are ready, without imports. Starts a daemon of its own.

usage: BFCD=... BFC_LIBRARY=... python/tests/bench/bench_weights.py [GIB]

SPDX-License-Identifier: Apache-2.0
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

PYTHON = pathlib.Path(__file__).resolve().parents[2]
N_TENSORS = 300

JOB = """
import json, sys, time
import numpy, bfcd
def rss_anon():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) << 10
start, start_cpu = time.perf_counter(), time.process_time()
tensors = bfcd.weights(sys.argv[1])
ready, ready_cpu = time.perf_counter() - start, time.process_time() - start_cpu
total = sum(int(t[::4096].sum()) for t in tensors.values())
print(json.dumps({"ready_ms": round(ready * 1000, 2), "cpu_ms": round(ready_cpu * 1000, 2),
                  "rss_anon_mib": round(rss_anon() / 2**20, 1), "tensors": len(tensors), "sum": total}), flush=True)
sys.stdin.read()
"""


def main():
    gib = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    import numpy
    from safetensors.numpy import save_file

    with tempfile.TemporaryDirectory() as folder:
        size = int(gib * 2**30) // N_TENSORS
        path = f"{folder}/model.safetensors"
        save_file({f"layer.{i}": numpy.full(size, i % 251, "uint8") for i in range(N_TENSORS)}, path)
        socket, config = f"{folder}/bfcd.sock", f"{folder}/bfcd.yaml"
        pathlib.Path(config).write_text(
            f"""
socket: {{path: {socket}}}
admin_socket: {{path: {folder}/admin.sock}}
devices: [{{id: host, size: 8GiB, partitions: [{{name: train, limit: 8GiB}}]}}]
tenants: [{{name: me, match: {{uid: [{os.getuid()}]}}, quotas: [{{partition: train, limit: 4GiB}}]}}]
"""
        )
        environment = os.environ | {"BFC_SOCKET": socket, "PYTHONPATH": str(PYTHON)}
        daemon = subprocess.Popen([os.environ["BFCD"], "--config", config], stderr=subprocess.DEVNULL)
        try:
            while not os.path.exists(socket):
                time.sleep(0.01)
            jobs = []
            for _ in range(4):  # one after another: the first loads
                job = subprocess.Popen(
                    [sys.executable, "-c", JOB, path],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                print(json.loads(job.stdout.readline()))
                jobs.append(job)
            again = [subprocess.run([sys.executable, "-c", JOB, path], env=environment, stdin=subprocess.DEVNULL,
                                    stdout=subprocess.PIPE, text=True) for _ in range(20)]  # fmt: skip
            ready = sorted(json.loads(r.stdout)["ready_ms"] for r in again)
            print(f"20 more, one after another: ready in {ready[0]} ms at least, {ready[10]} ms in the median")
            look = "import bfcd; c = bfcd.connect(); s = c.tenant_stats(); print(s['bytes_in_use'], s['bytes_reserved'])"
            r = subprocess.run([sys.executable, "-c", look], env=environment, stdout=subprocess.PIPE, text=True)
            in_use, reserved = map(int, r.stdout.split())
            print(f"file {os.path.getsize(path)} bytes, in use {in_use}, reserved {reserved}")
            for job in jobs:
                job.communicate()
        finally:
            daemon.terminate()
            daemon.wait()


if __name__ == "__main__":
    main()
