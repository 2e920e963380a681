#!/usr/bin/env python3
"""Jobs of scripts/gpu-bench that use PyTorch. Each prints a line of JSON; exit status 77 where PyTorch is missing.

usage: headline.py steps BYTES own|run|pool|install    training steps, a captured step, and reads of much memory
       headline.py busy                                computes until it is killed
       headline.py fill BYTES                          takes memory until it is refused, and what it had
       headline.py several N BYTES                     that many processes that fill
       headline.py model PATH BYTES                    writes a model
       headline.py weights load|bfcd PATH              loads it, says ready, and at SIGUSR1 what the GPU has in use
       headline.py park BYTES                          parks and wakes a pool
       headline.py loop BYTES                          steps until SIGUSR1, and the longest

SPDX-License-Identifier: Apache-2.0
"""

import contextlib
import json
import resource
import signal
import subprocess
import sys
import time

try:
    import torch
except ImportError as error:
    print(error)
    sys.exit(77)

MIB, GIB = 1 << 20, 1 << 30
N_STEPS, N_ROUNDS = 20, 9


def answer(**values):
    print(json.dumps(values), flush=True)


def gpu_ms(function, n):
    """Of one call, by the GPU's own clock."""
    begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
    function()
    begin.record()
    for _ in range(n):
        function()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / n


def processor_s():
    u = resource.getrusage(resource.RUSAGE_SELF)
    return u.ru_utime + u.ru_stime


class Training:
    def __init__(self):
        layer = torch.nn.TransformerEncoderLayer(512, 8, batch_first=True, dropout=0)
        self.model = torch.nn.TransformerEncoder(layer, 6).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True, capturable=True)
        self.x = torch.randn(8, 128, 512, device="cuda")

    def step(self):
        self.optimizer.zero_grad(set_to_none=True)
        self.model(self.x).square().mean().backward()
        self.optimizer.step()

    def times_ms(self):
        """Wall and processor time of a step, in rounds."""
        walls, processors = [], []
        for _ in range(N_ROUNDS):
            wall, processor = time.monotonic(), processor_s()
            for _ in range(N_STEPS):
                self.step()
            torch.cuda.synchronize()
            walls.append((time.monotonic() - wall) / N_STEPS * 1e3)
            processors.append((processor_s() - processor) / N_STEPS * 1e3)
        return sorted(walls), sorted(processors)

    def captured_ms(self):
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            self.step()
        return gpu_ms(graph.replay, 100)


def steps(n_bytes, way):
    context = contextlib.nullcontext()
    if way in ("pool", "install"):
        import bfcd.torch

        if way == "install":
            bfcd.torch.install()
        else:
            context = bfcd.torch.pool()
    begin = time.monotonic()
    torch.zeros(1, device="cuda")
    seen = {"first_tensor_ms": round((time.monotonic() - begin) * 1e3, 1)}
    with context:
        training = Training()
        for _ in range(N_STEPS):
            training.step()
        walls, processors = training.times_ms()
        seen |= {"step_ms": round(walls[N_ROUNDS // 2], 2), "step_min_ms": round(walls[0], 2)}
        seen |= {"step_max_ms": round(walls[-1], 2), "step_cpu_ms": round(processors[N_ROUNDS // 2], 2)}
        if way in ("own", "run"):
            seen["captured_step_ms"] = round(training.captured_ms(), 4)
        n = n_bytes // 4
        big = torch.empty(n, dtype=torch.float32, device="cuda").fill_(1)
        index = torch.randint(0, n, (min(n, 1 << 25),), device="cuda")
        seen["linear_read_TBps"] = round(n_bytes / gpu_ms(big.sum, 5) / 1e9, 3)
        seen["random_reads_Gps"] = round(len(index) / gpu_ms(lambda: big[index], 10) / 1e6, 3)
    answer(**seen)


def busy():
    a = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    print("busy", flush=True)
    while True:
        a @ a
        torch.cuda.synchronize()


def fill(n_bytes):
    step = max(2 * MIB, n_bytes // 64)
    tensors = []
    try:
        while True:
            tensor = torch.empty(step, dtype=torch.uint8, device="cuda")
            tensors.append(tensor.copy_(torch.full((step,), len(tensors) % 251, dtype=torch.uint8)))
    except torch.OutOfMemoryError:
        pass
    time.sleep(2)  # so that all have theirs at once
    for i, tensor in enumerate(tensors):
        if not bool((tensor.cpu() == i % 251).all()):
            sys.exit(f"tensor {i} has other bytes")
    answer(bytes=step * len(tensors))


def several(n, n_bytes):
    command = [sys.executable, __file__, "fill", str(n_bytes)]
    for process in [subprocess.Popen(command) for _ in range(n)]:
        if process.wait() != 0:
            sys.exit("a process failed")


def model(path, n_bytes):
    from safetensors.torch import save_file

    n = 64
    save_file({f"layer.{i}": torch.full((n_bytes // n,), i % 251, dtype=torch.uint8) for i in range(n)}, path)
    answer(bytes=n_bytes)


def until_told():
    told = []
    signal.signal(signal.SIGUSR1, lambda *_: told.append(1))
    return told


def weights(how, path):
    told = until_told()
    begin = time.monotonic()
    if how == "load":
        from safetensors.torch import load_file

        tensors = load_file(path, device="cuda")
    else:
        import bfcd

        tensors = bfcd.weights(path, framework="torch")
    torch.cuda.synchronize()
    seconds = time.monotonic() - begin
    print("ready", flush=True)
    while not told:
        time.sleep(0.05)
    free, total = torch.cuda.mem_get_info()
    answer(seconds=round(seconds, 3), bytes_in_use=total - free, sum=sum(int(t[:1].cpu()) for t in tensors.values()))


def park(n_bytes):
    import bfcd.torch

    pool = bfcd.torch.pool(parkable=True)
    host = torch.randint(0, 255, (n_bytes // 4,), dtype=torch.uint8).pin_memory()
    with pool:
        x = torch.empty(n_bytes, dtype=torch.uint8, device="cuda")
    for part in x.chunk(4):
        part.copy_(host)
    best = {}
    for _ in range(3):
        for name, size, act in (
            ("park", n_bytes, pool.sleep),
            ("wake", n_bytes, lambda: pool.wake(60)),
            ("copy", len(host), lambda: host.copy_(x[: len(host)])),
        ):
            torch.cuda.synchronize()
            begin = time.monotonic()
            act()
            torch.cuda.synchronize()
            rate = size / GIB / (time.monotonic() - begin)
            best[f"{name}_GiBps"] = round(max(rate, best.get(f"{name}_GiBps", 0)), 2)
        if not all(torch.equal(part.cpu(), host) for part in x.chunk(4)):
            sys.exit("the bytes are other ones after a wake")
    answer(**best)


def loop(n_bytes):
    import bfcd.torch

    told, n, longest = until_told(), 0, 0.0
    side = int((n_bytes // 64) ** 0.5)
    host = torch.randn(side, side)
    with bfcd.torch.pool():
        x, y = host.cuda(), torch.zeros(side, side, device="cuda")
    torch.cuda.synchronize()
    print("ready", flush=True)
    while not told:
        begin = time.monotonic()
        y.add_(x)
        torch.cuda.synchronize()
        n, longest = n + 1, max(longest, time.monotonic() - begin)
    if not torch.equal(x.cpu(), host):
        sys.exit("the bytes are other ones after the restarts")
    answer(steps=n, longest_step_ms=round(longest * 1e3, 2))


def main():
    how, *words = sys.argv[1:]
    if not torch.cuda.is_available():
        print("PyTorch sees no GPU")
        sys.exit(77)
    globals()[how](*(int(word) if word.isdecimal() else word for word in words))


main()
