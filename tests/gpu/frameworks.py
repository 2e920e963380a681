#!/usr/bin/env python3
# PyTorch, CuPy and Numba with memory from bfcd, on a real GPU. scripts/gpu-test starts a daemon for each case.
#
# SPDX-License-Identifier: Apache-2.0
#
# usage: frameworks.py --list            names of the cases
#        frameworks.py --can-run CASE    exit status 77, and a sentence, where its framework is missing
#        frameworks.py CASE
#
# BFC_LIB and BFC_LIBRARY are the client library, BFCCTL the program; BFC_SOCKET and BFC_TENANT are for the client. An
# answer is a line of JSON, printed at once because a framework may crash. A case fails where bytes are wrong, where
# memory does not come from bfcd, or where the process ends badly. Other exceptions are answers: docs/frameworks.md
# says what cannot work.
import contextlib
import ctypes
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time

MIB = 1 << 20
TOO_MUCH = 1 << 40  # bytes; no GPU has them

cases = {}
lib = None
name = None
allocators = []  # they must outlive the pools


def case(function):
    cases[function.__name__.replace("_", "-")] = function
    return function


def framework_of(which):
    return which.split("-")[0]


def skip(why):
    print("skipped: " + why)
    sys.exit(77)


def answer(question, value):
    print(json.dumps({"case": name, question: value}), flush=True)


def attempt(question, function):
    """The value of the function is the answer, or its exception; then None is returned."""
    try:
        value = function()
    except Exception as error:  # whatever a framework raises
        answer(question, f"{type(error).__name__}: {str(error)[:200]}")
        return None
    answer(question, value)
    return value


def address(function):
    return ctypes.cast(function, ctypes.c_void_p).value


def used():
    """Bytes of blocks that the tenant has, by bfcctl."""
    run = subprocess.run([os.environ["BFCCTL"], "--json", "--socket", os.environ["BFC_SOCKET"], "tenants"],
                         check=True, capture_output=True, text=True)
    return sum(row["bytes_in_use"] for row in json.loads(run.stdout)["tenants"])


def device_calls():
    """What the daemon's calls took until now that made and destroyed extents: counts and seconds, by device."""
    run = subprocess.run([os.environ["BFCCTL"], "--json", "--socket", os.environ["BFC_ADMIN_SOCKET"], "status"],
                         check=True, capture_output=True, text=True)
    return {row["device"]: {kind: [row[kind]["num_calls"], round(row[kind]["total_ns"] / 1e9, 4)]
                            for kind in ("makes", "destroys")}
            for row in json.loads(run.stdout)["status"]["devices"]}


def check_used(n_bytes):
    n_used = used()
    answer("used", n_used)
    assert n_used >= n_bytes, f"bfcd has handed out {n_used} bytes, not {n_bytes}"


def torch_allocator():
    import torch
    if not torch.cuda.is_available():
        skip("torch finds no GPU")
    answer("version", torch.__version__)
    allocators.append(torch.cuda.memory.CUDAPluggableAllocator(os.environ["BFC_LIB"], "bfc_torch_malloc",
                                                               "bfc_torch_free"))
    return torch, allocators[-1]


def torch_with_bfcd():
    """All memory of the process comes from bfcd."""
    torch, allocator = torch_allocator()
    allocator.allocator().set_record_stream_fn(address(lib.bfc_torch_record_stream))
    torch.cuda.memory.change_current_allocator(allocator)
    return torch


def torch_with_pool():
    """Only tensors made under use_mem_pool() have memory from bfcd. The pool must outlive them."""
    torch, allocator = torch_allocator()
    torch.cuda.init()
    return torch, torch.cuda.MemPool(allocator.allocator())


def seconds(function):
    began = time.monotonic()
    function()
    return round(time.monotonic() - began, 4)


# ---- PyTorch, all memory from bfcd -------------------------------------------------------------------------------


@case
def torch_tensors():
    torch = torch_with_bfcd()
    x = torch.randn(2048, 2048, device="cuda")
    check_used(x.nbytes)
    product = (x @ x).cpu()
    assert torch.allclose(product, x.cpu() @ x.cpu(), rtol=1e-2, atol=1e-1), "wrong product"


@case
def torch_streams():
    """Another stream reads a tensor that is freed at once: its bytes must stay until then."""
    torch = torch_with_bfcd()
    side = torch.cuda.Stream()
    total = torch.zeros(1, device="cuda")
    n_rounds = 1000

    def rounds():
        for _ in range(n_rounds):
            z = torch.ones(MIB, device="cuda")
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                total.add_(z.mean())
            z.record_stream(side)
            del z
            torch.full((MIB,), 7.0, device="cuda")
        torch.cuda.synchronize()

    answer("seconds", seconds(rounds))
    assert total.item() == n_rounds, f"the sum is {total.item()}, not {n_rounds}"


@case
def torch_statistics():
    torch = torch_with_bfcd()
    x = torch.zeros(4, device="cuda")
    for function in ("memory_allocated", "max_memory_allocated", "memory_stats", "reset_peak_memory_stats",
                     "empty_cache", "memory_summary", "ipc_collect"):
        attempt(function, lambda function=function: str(getattr(torch.cuda, function)())[:60])
    attempt("share", lambda: str(x.untyped_storage()._share_cuda_())[:60])


@case
def torch_cudnn():
    torch = torch_with_bfcd()

    def train():
        layer = torch.nn.Conv2d(3, 64, 7).cuda()
        for _ in range(3):
            layer(torch.randn(8, 3, 224, 224, device="cuda")).sum().backward()
        torch.cuda.synchronize()
        return "trained"

    attempt("cudnn", train)
    torch.backends.cudnn.benchmark = True
    attempt("cudnn_benchmark", train)


@case
def torch_out_of_memory():
    torch = torch_with_bfcd()
    x = torch.ones(4, device="cuda")
    attempt("too_much", lambda: torch.empty(TOO_MUCH, dtype=torch.uint8, device="cuda").data_ptr())
    attempt("old_tensor_then", lambda: x.sum().item())
    attempt("new_tensor_then", lambda: torch.ones(4, device="cuda").sum().item())


def try_graph(torch, **options):
    """A model in a graph: its result must be that of the model without one."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).cuda()
    x = torch.randn(256, 1024, device="cuda")
    side = torch.cuda.Stream()

    def run():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                model(x)
        torch.cuda.current_stream().wait_stream(side)
        expected = model(x).clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, **options):
            y = model(x)
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
        return bool(torch.allclose(y, expected, rtol=1e-3, atol=1e-4))

    with torch.no_grad():
        assert attempt("graph_has_the_right_result", run) is not False, "a graph has a wrong result"


@case
def torch_graph():
    try_graph(torch_with_bfcd())


class Rows:
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return i


@case
def torch_data_loader():
    """Its workers are forked after the process has begun to use CUDA."""
    torch = torch_with_bfcd()
    total = torch.zeros(1, device="cuda")
    for batch in torch.utils.data.DataLoader(Rows(), batch_size=4, num_workers=2):
        total += batch.cuda().sum()
    assert total.item() == sum(range(64)), f"the sum is {total.item()}"


@case
def torch_exit_while_busy():
    """A process that ends while a thread allocates. It may end as badly as without bfcd; its memory returns."""
    statuses = {}
    for way in ("own", "bfcd"):
        run = subprocess.run([sys.executable, "-u", __file__, "torch-busy-job"], check=False,
                             env={**os.environ, "WAY": way})
        statuses[way] = run.returncode
    answer("statuses", statuses)
    assert statuses["bfcd"] in (0, statuses["own"]), "it ends worse than without bfcd"
    time.sleep(2)
    assert used() == 0, "its memory did not return"


@case
def torch_busy_job():
    way = os.environ.get("WAY") or skip("it is a part of torch-exit-while-busy")
    if way == "own":
        import torch
    else:
        torch = torch_with_bfcd()
    torch.zeros(1, device="cuda")

    def allocate():
        while True:
            torch.empty(4 * MIB, device="cuda").fill_(1)

    threading.Thread(target=allocate, daemon=True).start()
    time.sleep(2)
    sys.exit(0)


# ---- PyTorch, a pool of memory from bfcd -------------------------------------------------------------------------


@case
def torch_pool():
    torch, pool = torch_with_pool()
    with torch.cuda.use_mem_pool(pool):
        x = torch.randn(2048, 2048, device="cuda")
        y = x @ x
    check_used(x.nbytes + y.nbytes)
    assert torch.allclose(y.cpu(), x.cpu() @ x.cpu(), rtol=1e-2, atol=1e-1), "wrong product"
    attempt("memory_allocated", torch.cuda.memory_allocated)
    del x, y, pool
    torch.cuda.empty_cache()
    answer("used_after_the_pool", used())
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    answer("used_without_cublas_workspaces", used())


@case
def torch_pool_out_of_memory():
    torch, pool = torch_with_pool()
    with torch.cuda.use_mem_pool(pool):
        attempt("too_much", lambda: torch.empty(TOO_MUCH, dtype=torch.uint8, device="cuda").data_ptr())
        attempt("new_tensor_then", lambda: torch.ones(4, device="cuda").sum().item())


@case
def torch_pool_graph():
    torch, pool = torch_with_pool()
    try_graph(torch, pool=pool.id)
    answer("used", used())


@case
def torch_pool_backward():
    """A pool is for one thread; backward() runs in others unless that is switched off."""
    torch, pool = torch_with_pool()
    for threads in (True, False):
        with torch.cuda.use_mem_pool(pool), torch.autograd.set_multithreading_enabled(threads):
            w = torch.randn(4096, 4096, device="cuda", requires_grad=True)
            (w @ w).sum().backward()
        torch.cuda.synchronize()
        answer(f"used_with_threads_{threads}".lower(), used())
        answer(f"reserved_with_threads_{threads}".lower(), torch.cuda.memory_reserved())
        del w


# ---- PyTorch, by the Python package ------------------------------------------------------------------------------


def torch_with_package():
    import torch
    if not torch.cuda.is_available():
        skip("torch finds no GPU")
    import bfcd.torch
    answer("version", torch.__version__)
    return torch, bfcd


@case
def torch_package_install():
    """All memory of the process is bfcd's; it needs a C++ compiler."""
    torch, bfcd = torch_with_package()
    bfcd.torch.install()
    x = torch.randn(2048, 2048, device="cuda")
    check_used(x.nbytes)
    assert torch.allclose((x @ x).cpu(), x.cpu() @ x.cpu(), rtol=1e-2, atol=1e-1), "wrong product"
    try_graph(torch)


@case
def torch_package_pool():
    torch, bfcd = torch_with_package()
    with bfcd.torch.pool() as pool:
        x = torch.randn(2048, 2048, device="cuda")
        check_used(x.nbytes)
        w = torch.randn(4096, 4096, device="cuda", requires_grad=True)
        (w @ w).sum().backward()
        assert used() >= torch.cuda.memory_reserved(), "the backward pass allocated outside of the pool"
    assert torch.allclose((x @ x).cpu(), x.cpu() @ x.cpu(), rtol=1e-2, atol=1e-1), "wrong product"
    try_graph(torch, pool=pool.mem_pool.id)
    del x, w
    torch.cuda.empty_cache()
    answer("used_by_an_empty_pool", used())
    del pool
    torch.cuda.empty_cache()
    answer("used_after_the_pool", used())


def gib_per_s(n_bytes, function):
    return round(n_bytes / (1 << 30) / seconds(function), 2)


def park_one_block(bfcd, n_bytes):
    """Without a framework, and one at a time: parking it, the release of its memory, and waking. Where the contents are
    discarded there is no copy: what remains is new memory, its delivery and its mapping."""
    with bfcd.pool() as pool:
        block = pool.malloc(n_bytes)
        mark = os.urandom(MIB)
        for to in ("pinned", "ram", "discard"):
            for _ in range(3):
                block.write(mark, n_bytes - MIB)
                answer(f"block_to_{to}_park_seconds",
                       seconds(lambda to=to: pool.sleep(discard=True) if to == "discard" else pool.sleep(to)))
                parked = device_calls()
                time.sleep(1)
                answer(f"block_to_{to}_calls_until_released", [parked, device_calls()])
                answer(f"block_to_{to}_wake_seconds", seconds(lambda: pool.wake(60)))
                answer(f"block_to_{to}_calls_until_awake", device_calls())
                assert to == "discard" or block.read(MIB, n_bytes - MIB) == mark, "other contents"


@case
def torch_parked_pool():
    """A model, its captured graph and 4 GiB beside it are parked and return: what the copies take, beside a copy to
    pinned memory of PyTorch's."""
    torch, bfcd = torch_with_package()
    pool = bfcd.torch.pool(parkable=True)
    n_bytes = 4 << 30
    torch.manual_seed(1)
    with pool:
        model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).cuda()
        large = torch.arange(n_bytes // 8, device="cuda")
        x = torch.randn(256, 1024, device="cuda")
    with pool.use(), torch.no_grad():
        model(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool.mem_pool.id):
            y = model(x)
        graph.replay()
        expected, address_before = y.cpu(), large.data_ptr()
    for to in ("pinned", "ram"):
        for _ in range(3):
            before = used()
            answer(f"park_to_{to}_gib_per_s", gib_per_s(n_bytes, lambda to=to: pool.sleep(to)))
            answer("used_before_and_parked", [before, used()])
            answer(f"wake_from_{to}_gib_per_s", gib_per_s(n_bytes, lambda: pool.wake(60)))
            with pool.use():
                y.zero_()
                graph.replay()
                assert torch.equal(y.cpu(), expected), "the graph has another result"
                assert large.data_ptr() == address_before, "another address"
                assert bool((large == torch.arange(n_bytes // 8, device="cuda")).all()), "other contents"
            torch.cuda.empty_cache()
    park_one_block(bfcd, n_bytes)
    pinned = torch.empty(n_bytes // 8, dtype=torch.int64, pin_memory=True)
    for _ in range(2):
        answer("copy_to_pinned_gib_per_s", gib_per_s(n_bytes, lambda: (pinned.copy_(large), torch.cuda.synchronize())))
        answer("copy_from_pinned_gib_per_s", gib_per_s(n_bytes, lambda: (large.copy_(pinned), torch.cuda.synchronize())))


@case
def torch_turns():
    """Two processes, each with 80 % of a partition, whose idle memory is parked by the daemon."""
    jobs = [subprocess.Popen([sys.executable, "-u", __file__, "torch-turns-job"], env={
        **os.environ, "BFC_TENANT": "turns", "BFC_WAIT_MS": "60000"})
            for _ in range(2)]
    assert [job.wait() for job in jobs] == [0, 0], "a job failed"


@case
def torch_turns_job():
    if os.environ["BFC_TENANT"] != "turns":
        skip("it is a part of torch-turns")
    torch, bfcd = torch_with_package()
    client = bfcd.default()
    n_words = client.bytes_limit() * 8 // 10 // 8
    pool = bfcd.torch.pool(parkable=True)
    with pool:
        x = torch.full((n_words,), os.getpid(), dtype=torch.int64, device="cuda")
    waits = []
    for _ in range(5):
        began = time.monotonic()
        with pool.use(60):
            waits.append(round(time.monotonic() - began, 3))
            for _ in range(20):
                x += 1
            torch.cuda.synchronize()
        time.sleep(1.5)
    with pool.use(60):
        assert bool((x == os.getpid() + 100).all()), "other contents"
    answer("bytes", n_words * 8)
    answer("seconds_until_awake", waits)


@case
def torch_step_times():
    """A step of training with PyTorch's own allocator, the same under `bfcctl run`, and with bfcd's."""
    run = [os.environ["BFCCTL"], "--socket", os.environ["BFC_ADMIN_SOCKET"], "run", "--tenant", "this", "--partition",
           "fd", "--limit", "16GiB", "--"]
    for way, prefix in (("own", []), ("own_pool", []), ("under_run", run), ("pool", []), ("install", [])):
        subprocess.run([*prefix, sys.executable, "-u", __file__, "torch-steps"], check=True,
                       env={**os.environ, "WAY": way})


@case
def torch_steps():
    way = os.environ.get("WAY") or skip("it is a part of torch-step-times")
    torch, bfcd = torch_with_package()
    if way == "install":
        bfcd.torch.install()
    inside = {"pool": bfcd.torch.pool, "own_pool": lambda: torch.cuda.use_mem_pool(torch.cuda.MemPool())}
    with inside.get(way, contextlib.nullcontext)():
        answer(f"{way}_has_threads_of_autograd", torch._C._is_multithreading_enabled())
        model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(512, 8, batch_first=True), 6).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(8, 128, 512, device="cuda")

        def steps(n):
            for _ in range(n):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            torch.cuda.synchronize()

        steps(20)
        answer(f"{way}_ms", sorted(round(seconds(lambda: steps(20)) * 50, 2) for _ in range(9))[4])
        answer(f"{way}_bytes_of_bfcd", used())


@case
def torch_client_calls():
    """What a block costs that needs new memory, and one that does not."""
    torch, bfcd = torch_with_package()
    torch.cuda.init()
    client = bfcd.default()
    for n_bytes in (4096, MIB, 64 * MIB, 1 << 30, 4 << 30):
        def pair():
            client.malloc(n_bytes).free()
        answer(f"first_{n_bytes}", seconds(pair))
        answer(f"next_{n_bytes}", seconds(lambda: [pair() for _ in range(100)]) / 100)
        client.empty_cache()


# ---- CuPy --------------------------------------------------------------------------------------------------------


def cupy_with_bfcd(is_pooled):
    import cupy
    if not cupy.cuda.is_available():
        skip("cupy finds no GPU")
    allocator = cupy.cuda.memory.CFunctionAllocator(0, address(lib.bfc_cupy_malloc), address(lib.bfc_cupy_free), lib)
    cupy.cuda.set_allocator(cupy.cuda.MemoryPool(allocator.malloc).malloc if is_pooled else allocator.malloc)
    answer("version", cupy.__version__)
    return cupy


def try_cupy_arrays(cupy):
    x = cupy.ones(MIB)
    check_used(x.nbytes)

    def rounds():
        nonlocal x
        for _ in range(1000):
            x = x + 1
        cupy.cuda.Device().synchronize()

    answer("seconds", seconds(rounds))
    assert float(x.min()) == float(x.max()) == 1001, f"{float(x.min())} to {float(x.max())}, not 1001"


@case
def cupy_arrays():
    try_cupy_arrays(cupy_with_bfcd(False))


@case
def cupy_pool_arrays():
    try_cupy_arrays(cupy_with_bfcd(True))


def try_cupy_out_of_memory(cupy):
    attempt("too_much", lambda: int(cupy.empty(TOO_MUCH, dtype=cupy.uint8).data.ptr))
    attempt("new_array_then", lambda: float(cupy.ones(4).sum()))


@case
def cupy_out_of_memory():
    try_cupy_out_of_memory(cupy_with_bfcd(False))


@case
def cupy_pool_out_of_memory():
    try_cupy_out_of_memory(cupy_with_bfcd(True))


def try_cupy_graph(cupy):
    x = cupy.ones(MIB)
    side = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()

    def run():
        with side:
            y = (x + 1) * 2
            side.synchronize()
            side.begin_capture()
            y = (x + 1) * 2
            graph = side.end_capture()
            graph.launch(side)
            side.synchronize()
        return float(y.min()) == float(y.max()) == 4

    assert attempt("graph_has_the_right_result", run) is not False, "a graph has a wrong result"


@case
def cupy_graph():
    try_cupy_graph(cupy_with_bfcd(False))


@case
def cupy_pool_graph():
    try_cupy_graph(cupy_with_bfcd(True))


@case
def cupy_package():
    import cupy
    if not cupy.cuda.is_available():
        skip("cupy finds no GPU")
    import bfcd.cupy
    for allocator in (bfcd.cupy.allocator(), bfcd.cupy.pool().malloc):
        cupy.cuda.set_allocator(allocator)
        try_cupy_arrays(cupy)
        try:
            cupy.empty(TOO_MUCH, dtype=cupy.uint8)
            raise AssertionError("there is too much")
        except cupy.cuda.memory.OutOfMemoryError as error:
            answer("too_much", str(error)[:200])
        assert float(cupy.ones(4).sum()) == 4


# ---- Numba -------------------------------------------------------------------------------------------------------


@case
def numba_package():
    import numpy
    from numba import cuda

    import bfcd.numba
    cuda.set_memory_manager(bfcd.numba.MemoryManager)

    @cuda.jit
    def add_one(x):
        i = cuda.grid(1)
        if i < x.size:
            x[i] += 1

    x = cuda.to_device(numpy.arange(MIB))
    check_used(x.nbytes)
    expected = numpy.arange(MIB)
    if attempt("kernel", lambda: add_one[MIB // 256, 256](x) or "launched"):  # numba-cuda may be too old for numpy
        expected += 1
    assert (x.copy_to_host() == expected).all(), "wrong contents"


def main():
    global lib, name
    if sys.argv[1:] == ["--list"]:
        print("\n".join(cases))
        return
    name = sys.argv[-1]
    if name not in cases:
        sys.exit(f"frameworks.py: no case {name}")
    if importlib.util.find_spec(framework_of(name)) is None:
        skip(f"python3 has no {framework_of(name)}")
    if sys.argv[1] != "--can-run":
        lib = ctypes.CDLL(os.environ["BFC_LIB"])
        cases[name]()


if __name__ == "__main__":
    main()
