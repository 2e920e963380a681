# vLLM's own loader with the load format bfcd, for a small model of random numbers that is made here, on the fake driver and the fake
# runtime. Its kernels do nothing, so what is compared are the parameters, not what they compute. scripts/test-frameworks --engines runs it.
#
# SPDX-License-Identifier: Apache-2.0
import json
import subprocess
import sys

import bfcd
import pytest
from conftest import wait_for
from test_engines import LIMIT_S, command, environment, machine


MODEL = """
import sys, torch, transformers
torch.manual_seed(1)
config = transformers.LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
                                  num_key_value_heads=2, head_dim=64, vocab_size=1024, max_position_embeddings=256)
transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(sys.argv[1])
"""

# It answers on what was its standard output.
ENGINE = """
import hashlib, json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
import torch
import bfcd.vllm_weights
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
bfcd.vllm_weights.register()
torch.cuda.set_device(0)

def config(load_format):
    return EngineArgs(model=sys.argv[1], load_format=load_format, skip_tokenizer_init=True, enforce_eager=True,
                      max_model_len=128).create_engine_config()

with set_current_vllm_config(config("auto")):
    init_distributed_environment(1, 0, f"file://{sys.argv[2]}-{os.getpid()}", 0, "gloo")
    ensure_model_parallel_initialized(1, 1)

def load(load_format):
    global model
    c = config(load_format)
    with set_current_vllm_config(c):
        model = get_model(vllm_config=c)
    return digests()

def digests():
    return {name: [hashlib.sha256(p.detach().contiguous().cpu().view(torch.uint8).numpy()).hexdigest(), p.stride()]
            for name, p in model.named_parameters()}

def write():
    try:
        with torch.no_grad():
            next(model.parameters()).copy_(torch.ones(1024, 256))
    except RuntimeError as e:
        return type(e).__name__

def reload():
    from bfcd.vllm_weights import Loader
    try:
        Loader(config("bfcd").load_config).load_weights(model, None)
    except RuntimeError as e:
        return str(e)

print("ready", file=answers, flush=True)
for line in sys.stdin:
    function, *arguments = line.split()
    print(json.dumps(globals()[function](*arguments)), file=answers, flush=True)
os._exit(0)
"""


@pytest.fixture
def daemon(monkeypatch):
    yield from machine(monkeypatch)


class Engine:
    def __init__(self, daemon, model):
        self.log = daemon.folder / f"engine-{id(self)}"
        self.process = subprocess.Popen(
            command(daemon, ENGINE, str(model), str(daemon.folder / "rendezvous"), limit_mib=None),
            env=environment(daemon),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=open(self.log, "w"),
        )

    def ready(self):
        assert self.process.stdout.readline() == "ready\n", self.log.read_text()

    def tell(self, *words):
        print(*words, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        assert answer, self.log.read_text()
        return json.loads(answer)

    def kill(self):
        self.process.kill()
        self.process.communicate(timeout=LIMIT_S)


def test_two_engines_have_one_copy(daemon, tmp_path):
    model = tmp_path / "model"
    subprocess.run(
        ["env", f"LD_PRELOAD={daemon.preload}", sys.executable, "-c", MODEL, model], check=True, timeout=LIMIT_S
    )
    client = bfcd.connect(daemon.socket)
    engines = [Engine(daemon, model) for _ in range(2)]
    for e in engines:
        e.ready()
    wanted = engines[0].tell("load", "auto")
    assert len(wanted) > 10
    assert engines[0].tell("load", "bfcd") == wanted
    (row,) = client.shared()
    charged = client.tenant_stats()["bytes_in_use"]
    assert row.name.startswith("vllm-") and row.nbytes <= charged < row.nbytes + 4096
    assert engines[1].tell("load", "bfcd") == wanted
    (row,) = client.shared()
    assert row.num_references == 2 and client.tenant_stats()["bytes_in_use"] == charged
    assert "shared" in engines[1].tell("reload")
    assert engines[1].tell("write") == "AcceleratorError"
    assert engines[0].tell("digests") == wanted
    engines[1].kill()
    assert engines[0].tell("digests") == wanted
    engines[0].kill()
    wait_for(lambda: client.shared()[0].num_references == 0, "end of the references")
    client.forget(row.name)
    wait_for(lambda: client.tenant_stats()["bytes_in_use"] == 0, "release of the memory")
    client.close()
