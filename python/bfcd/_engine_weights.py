"""A model's parameters as an engine has them after loading, in one shared block for all engines with the same ones.

Engines fuse, pad and quantize what is in the files, so the block has what the first engine made of them. Its tensors are read-only:
a write is an illegal access in the engine that does it. Buffers are small and may be written, so each engine has its own.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from typing import Any

import torch

from . import _client, _weights

_KEEP_S = 3600.0


def name_of(engine: str, key: str, files: Iterable[str]) -> str:
    """Of the block. key: what the parameters depend on beside the files."""
    partition = _client.default().partition_for_device(torch.cuda.current_device())
    digests = sorted(_weights.file_digest(file, partition) for file in files)
    return f"{engine}-{hashlib.sha256(repr((key, digests)).encode()).hexdigest()[:32]}"


def _of_model(model: Any, attributes: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Copies on the host, and how they were. The model is of no use afterwards: its memory is free before that of the block
    is allocated, so that loading needs room on the GPU for one copy only."""
    copies: dict[str, Any] = {}
    how: dict[str, Any] = {"aliases": {}, "attributes": attributes, "tensors": {}}
    first: dict[int, str] = {}
    named = [(name, t, True) for name, t in model.named_parameters(remove_duplicate=False)]
    named += [(name, t, False) for name, t in model.named_buffers(remove_duplicate=False)]
    for name, tensor, is_parameter in named:
        if name in copies or name in how["aliases"]:
            continue
        if first.setdefault(id(tensor), name) != name:
            how["aliases"][name] = first[id(tensor)]
            continue
        data = tensor.detach()
        order = sorted(range(data.ndim), key=lambda i: -data.stride(i))  # as it is in memory
        copies[name] = data.permute(order).contiguous().cpu()
        how["tensors"][name] = [is_parameter, order, data.device.type]
    for _, tensor, _ in named:
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    torch.cuda.empty_cache()
    return copies, {"bfcd": json.dumps(how)}


def shared(
    name: str, load: Callable[[], tuple[Any, dict[str, Any]]]
) -> tuple[dict[str, tuple[Any, bool]], dict[str, str], dict[str, Any], int]:
    """Tensors by name, with whether each is a parameter; names of the tied ones, each with the name that has the tensor; attributes of
    the model; the size of the block. load: returns the model with its attributes."""
    partition = _client.default().partition_for_device(torch.cuda.current_device())
    found, metadata, n_bytes = _weights.made_tensors(name, partition, _KEEP_S, lambda: _of_model(*load()))
    how = json.loads(metadata["bfcd"])
    tensors = {}
    for each, (is_parameter, order, device) in how["tensors"].items():
        tensor = found[each].permute([order.index(i) for i in range(len(order))])
        if device == "cpu":
            tensor = tensor.cpu()
        elif not is_parameter:
            tensor = tensor.clone()
        tensors[each] = (tensor, is_parameter)
    return tensors, how["aliases"], how["attributes"], n_bytes
