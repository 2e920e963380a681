# vLLM's sleep mode with the back end bfcd: vLLM's own configuration, plug-in loader, worker and factory, on the fake driver and
# the fake runtime, which run no kernels. So the worker is initialized up to its device, and the test makes the tensors of a model
# and its KV cache in the worker's memory pools. scripts/test-frameworks --engines runs it.
#
# SPDX-License-Identifier: Apache-2.0
import json
import os
import pathlib
import subprocess
import tomllib

import pytest
from conftest import MIB
from test_engines import LIMIT_S, command, environment, kill_in_steps, machine, run

PYTHON = pathlib.Path(__file__).resolve().parents[3]
BEGIN = """
import json, os, sys, time, torch
MIB = 1 << 20

def tensor(n_mib):
    return torch.empty(n_mib * MIB, dtype=torch.uint8, device="cuda")

def charged():
    "What is reserved in train, and in use in parking, in MiB."
    stats = bfcd.default().tenant_stats
    return stats("train")["bytes_reserved"] // MIB, stats("parking")["bytes_in_use"] // MIB

def settle(*n_mib):
    end = time.monotonic() + 100
    while charged() != n_mib:
        assert time.monotonic() < end, (charged(), n_mib)
        time.sleep(0.01)

def fill(tensors):
    source = [torch.randint(0, 255, (w.numel(),), dtype=torch.uint8) for w in tensors]
    for w, s in zip(tensors, source):
        w.copy_(s)
    return source, [w.data_ptr() for w in tensors]

def check(tensors, before):
    assert before[1] == [w.data_ptr() for w in tensors]
    assert all(torch.equal(w.cpu(), s) for w, s in zip(tensors, before[0]))

def fails(function, *arguments):
    try:
        function(*arguments)
    except Exception as e:
        return e
    raise SystemExit("no error")
"""

# A worker as `vllm serve MODEL --enable-sleep-mode --sleep-mode-backend bfcd` makes it.
WORKER = (
    BEGIN
    + """
import pathlib, tempfile, types
from vllm.plugins import load_general_plugins
load_general_plugins()
import bfcd
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.worker.worker_base import WorkerWrapperBase

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1024,
         "max_position_embeddings": 256, "dtype": "bfloat16"}

class Model(torch.nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(tensor(n), requires_grad=False) for n in sizes)
        self.register_buffer("scale", tensor(1))

def make_worker(backend="bfcd"):
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "config.json").write_text(json.dumps(LLAMA))
        config = EngineArgs(model=folder, skip_tokenizer_init=True, load_format="dummy", enforce_eager=True, max_model_len=64,
                            enable_sleep_mode=True, sleep_mode_backend=backend).create_engine_config()
    wrapper = WorkerWrapperBase()
    wrapper.init_worker([{"vllm_config": config, "local_rank": 0, "rank": 0, "distributed_init_method": "tcp://127.0.0.1:1",
                          "is_driver_worker": True}])
    wrapper.worker.device = torch.device("cuda:0")
    return wrapper

def load(wrapper, sizes, kv_mib):
    "As load_model() and initialize_from_config() do. The model, a tensor of the runner, and the KV cache."
    pool = wrapper.worker._maybe_get_memory_pool_context
    with pool("weights"):
        model = Model(sizes)
    with pool("runtime"):
        state = tensor(2)
        with pool("kv_cache"):
            cache = tensor(kv_mib)
    wrapper.worker.model_runner = types.SimpleNamespace(model=model, get_draft_model=lambda: None)
    return model, state, cache
"""
)

# One of several, told by lines as "take 30".
ENGINE = (
    WORKER
    + """
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
worker = make_worker()

def begin(*sizes):
    global model, state, cache, before
    *sizes, kv_mib = sizes
    model, state, cache = load(worker, sizes, kv_mib)
    before = fill([*model.weights, state])

def attempt(method, *arguments):
    "The error's name and sentence; None."
    try:
        getattr(worker, method)(*arguments)
    except Exception as e:
        return [type(e).__name__, str(e)]

def sleep(level):
    return attempt("sleep", level)

def wake():
    return attempt("wake_up")

def begin_idle():
    return attempt("bfcd_begin_idle")

def end_idle(seconds):
    return attempt("bfcd_end_idle", str(seconds))

def right():
    check([*model.weights, state], before)
    return worker.sleep_mode_backend.state()

print("ready", file=answers, flush=True)
for line in sys.stdin:
    function, *arguments = line.split()
    print(json.dumps(globals()[function](*map(int, arguments))), file=answers, flush=True)
"""
)


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """Where Python finds the package with the entry points of its pyproject.toml."""
    folder = tmp_path_factory.mktemp("installed")
    project = tomllib.loads((PYTHON / "pyproject.toml").read_text())["project"]
    metadata = folder / "bfcd-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: bfcd\nVersion: 0.1.0\n")
    groups = project["entry-points"].items()
    lines = [line for group, points in groups for line in [f"[{group}]", *(f"{k} = {v}" for k, v in points.items())]]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return f"{folder}:{PYTHON}"


@pytest.fixture
def daemon(monkeypatch, installed, request):
    quota = getattr(request, "param", "3GiB")
    for d in machine(monkeypatch, quota=quota, PYTHONPATH=installed, BFC_PARTITION="train", HF_HUB_OFFLINE="1"):
        d.python_path = installed
        yield d


def drive(daemon, program, **variables):
    return run(daemon, program, limit_mib=None, PYTHONPATH=daemon.python_path, **variables)


# PyTorch's segments: 20 (for 4), 20, 34 (for 33) and 2 (for the buffer of 1) MiB; 20 (for 2); 256 MiB.
LEVELS = (
    WORKER
    + """
from vllm.device_allocator import get_mem_allocator_instance
from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory
worker = make_worker()
assert type(get_mem_allocator_instance()).__module__ == "bfcd.vllm"
model, state, cache = load(worker, (4, 20, 33), 256)
assert get_mem_allocator_instance().get_current_usage() == 352 * MIB
backend = worker.sleep_mode_backend
assert type(backend) is SleepModeBackendFactory.get_backend_class("bfcd")
assert type(backend).preserves_communicators() and type(backend).preserves_compiled_artifacts()
assert not type(backend).preserves_graphs_with_communicators() and not type(backend).supports_durable_storage()
weights, others = list(model.weights), [state]
before, before_others = fill(weights + [model.scale]), fill(others)
address = cache.data_ptr()
settle(352, 0)
assert backend.state() == "RUNNING"

worker.sleep(1)
settle(0, 96)
assert backend.state() == "SUSPENDED"
worker.wake_up(["weights"])                 # and "runtime", which no wake leaves out
settle(96, 0)
check(weights + [model.scale], before)
check(others, before_others)
assert backend.state() == "SUSPENDED"
worker.wake_up(["kv_cache"])
settle(352, 0)
assert backend.state() == "RUNNING" and cache.data_ptr() == address
cache.copy_(torch.full((cache.numel(),), 7, dtype=torch.uint8))
assert int(cache[-1].cpu()) == 7

worker.sleep(1)
worker.wake_up(["kv_cache"])                # the other way round
settle(276, 76)
worker.wake_up(["weights"])
check(weights + [model.scale], before)

worker.discard(("kv_cache",))
settle(96, 0)
assert backend.state() == "SUSPENDED"
check(weights, (before[0][:3], before[1][:3]))
worker.sleep(1)                             # the cache stays discarded
settle(0, 96)
worker.wake_up()
settle(352, 0)
check(weights, (before[0][:3], before[1][:3]))
assert backend.state() == "RUNNING"

worker.sleep(2)                             # only what has no source is kept; vLLM itself keeps the model's buffers
settle(0, 20)
backend.suspend(1)                          # which changes nothing
settle(0, 20)
worker.wake_up()
settle(352, 0)
check(others, before_others)
check([model.scale], (before[0][3:], before[1][3:]))
assert [w.data_ptr() for w in weights] == before[1][:3] and not any(int(w.cpu().sum()) for w in weights)
before = fill(weights)                      # they are loaded again
worker.sleep(1)
worker.wake_up(None)
check(weights, before)
print("right")
"""
)


@pytest.mark.parametrize("conf", ["", "expandable_segments:True,max_split_size_mb:64"])
def test_levels_and_tags(daemon, conf):
    r = drive(daemon, LEVELS, PYTORCH_ALLOC_CONF=conf)
    assert r.stdout.splitlines()[-1] == "right", r.stdout + r.stderr


def test_another_back_end_is_left_alone(daemon):
    """The plug-in is there, and the engine uses vLLM's own back end."""
    r = drive(
        daemon,
        WORKER
        + """
from vllm.device_allocator import get_mem_allocator_instance
worker = make_worker("cumem")
model, state, cache = load(worker, (4,), 20)
assert type(get_mem_allocator_instance()).__name__ == "CuMemAllocator" and not hasattr(worker, "bfcd_begin_idle")
before = fill([state])
worker.sleep(1)
worker.wake_up()
check([state], before)
assert charged() == (0, 0)
print("right")
""",
    )
    assert r.stdout.splitlines()[-1] == "right", r.stdout + r.stderr


def test_too_small_a_host_partition(daemon):
    """The error says so, nothing is lost, and all is awake, also what had been parked already."""
    r = drive(
        daemon,
        WORKER
        + """
from vllm.device_allocator import get_mem_allocator_instance
worker = make_worker()
model, state, cache = load(worker, (60, 60, 20), 64)
cache.copy_(torch.full((cache.numel(),), 9, dtype=torch.uint8))
before = fill([*model.weights, state])
full = charged()
e = fails(worker.sleep, 1)
assert isinstance(e, (bfcd.QuotaExceeded, bfcd.OutOfMemory)) and "'parking'" in str(e), repr(e)
assert worker.sleep_mode_backend.state() == "RUNNING"
settle(*full)
check([*model.weights, state], before)
assert int(cache[0].cpu()) == 9 == int(cache[-1].cpu())
worker.sleep(2)
assert worker.sleep_mode_backend.state() == "SUSPENDED"
worker.wake_up()
check([state], (before[0][-1:], before[1][-1:]))

# The weights fit now, and what comes after them does not.
del model.weights, cache
worker.model_runner.model = model
with get_mem_allocator_instance().use_memory_pool("weights"):
    model.weights = torch.nn.ParameterList([torch.nn.Parameter(tensor(100), requires_grad=False)])
before = fill([*model.weights, state])
filler = bfcd.default().malloc(20 * MIB, partition="parking")
fails(worker.sleep, 1)
assert worker.sleep_mode_backend.state() == "RUNNING"
check([*model.weights, state], before)
filler.free()
worker.sleep(1)
worker.wake_up()
check([*model.weights, state], before)
print("right")
""",
    )
    assert r.stdout.splitlines()[-1] == "right", r.stdout + r.stderr


class Engine:
    def __init__(self, daemon):
        self.log = open(daemon.folder / f"engine-{id(self)}", "w+")
        self.process = subprocess.Popen(
            command(daemon, ENGINE, limit_mib=None),
            env=environment(daemon) | {"PYTHONPATH": daemon.python_path, "BFC_WAIT_MS": "500"},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
        )

    def ready(self):
        assert self.process.stdout.readline() == "ready\n", self.said()
        return self

    def said(self):
        self.log.seek(0)
        return self.log.read()

    def begin_to_tell(self, *words):
        print(*words, file=self.process.stdin, flush=True)

    def answer(self):
        line = self.process.stdout.readline()
        assert line, self.said()
        return json.loads(line)

    def tell(self, *words):
        self.begin_to_tell(*words)
        return self.answer()

    def end(self):
        self.process.stdin.close()
        assert self.process.wait(LIMIT_S) == 0, self.said()
        self.process.stdout.close()
        self.log.close()


def two_engines(daemon):
    engines = [Engine(daemon), Engine(daemon)]
    return [e.ready() for e in engines]


@pytest.mark.parametrize("daemon", ["500MiB"], indirect=True)
def test_a_second_engine_gets_the_memory(daemon):
    one, two = two_engines(daemon)
    one.tell("begin", 40, 256)
    assert one.tell("sleep", 1) is None
    two.tell("begin", 60, 300)
    error, why = one.tell("wake")
    assert error in ("QuotaExceeded", "OutOfMemory") and "'train'" in why
    assert two.tell("right") == "RUNNING"
    assert two.tell("sleep", 2) is None
    assert one.tell("wake") is None
    assert one.tell("right") == "RUNNING"
    one.end()
    two.end()


@pytest.mark.parametrize("daemon", ["500MiB, park: {to: parking, idle: 1ms}"], indirect=True)
def test_pressure_parks_an_idle_engine(daemon):
    """And never one that is not idle."""
    import bfcd

    one = Engine(daemon).ready()
    one.tell("begin", 40, 60)
    two = bfcd.connect(daemon.socket)
    for _ in range(2):
        with pytest.raises(bfcd.QuotaExceeded):
            two.malloc(400 * MIB, partition="train", wait=0.5)
        assert one.tell("right") == "RUNNING"
        assert one.tell("begin_idle") is None
        block = two.malloc(400 * MIB, partition="train", wait=LIMIT_S)
        assert two.tenant_stats("parking")["bytes_in_use"] > 0
        assert one.tell("end_idle", 0)[0] == "QuotaExceeded"
        one.begin_to_tell("end_idle", LIMIT_S)
        block.free()
        assert one.answer() is None
        assert one.tell("right") == "RUNNING"
    assert one.tell("begin_idle") is None
    assert one.tell("sleep", 1) is None
    assert one.tell("end_idle", 0) is None
    assert one.tell("wake") is None
    assert one.tell("right") == "RUNNING"
    one.end()
    two.close()


# vLLM is imported once.
KILLED = (
    BEGIN
    + """
import bfcd.vllm
from vllm.device_allocator.cumem import CuMemAllocator

def engine(which):
    CuMemAllocator.instance = allocator = bfcd.vllm.Allocator()
    with allocator.use_memory_pool("weights"):
        weights = [tensor(n) for n in (4, 20, 33, 20)]
    with allocator.use_memory_pool("kv_cache"):
        cache = tensor(256)
    before = fill(weights)
    backend = bfcd.vllm.Backend()
    took = {"sleep": timed(backend.suspend), "wake": timed(backend.resume)}
    check(weights, before)
    if which == "wake":
        backend.suspend()
    print(json.dumps([os.getpid(), took[which]]), flush=True)
    backend.suspend() if which == "sleep" else backend.resume()
    time.sleep(1000)
"""
)


def test_kill_in_the_middle(daemon):
    kill_in_steps(daemon, KILLED, daemon.python_path, ("sleep", "wake"))
