"""vLLM with one copy of the weights for all engines of a model on a GPU: `vllm serve MODEL --load-format bfcd`.

vLLM's own loader of weights that another process has (ipc_cache) builds the model around them. Here they are in a shared block of
bfcd instead of a server's memory.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
from typing import Any

from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.weight_cache.ipc_loader import IpcModelLoader
from vllm.model_executor.model_loader.weight_cache.protocol import WeightCacheState, check_ipc_quant_support
from vllm.model_executor.model_loader.weight_cache.utils import export_model_attrs

from . import _engine_weights

NAME = "bfcd"


@dataclasses.dataclass
class _Entry:
    tensor: Any
    kind: str

    def rebuild(self, device_index: int) -> Any:
        return self.tensor


class Loader(IpcModelLoader):
    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        self.fallback = False

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        speculative = vllm_config.speculative_config
        self.is_draft = speculative is not None and model_config is speculative.draft_model_config
        self._arguments = {"vllm_config": vllm_config, "model_config": model_config, "prefix": prefix}
        return super().load_model(**self._arguments)

    def load_weights(self, model: Any, model_config: Any) -> None:
        raise RuntimeError("load format 'bfcd': the weights are shared with other engines, and cannot be loaded into in place")

    def get_external_weight_memory(self, vllm_config: Any) -> int:
        return 0

    def _state_for_key(self, cache_key: Any, *, is_reload: bool = False) -> WeightCacheState:
        model_config = self._arguments["model_config"]
        default = DefaultModelLoader(self._fallback_load_config())
        _, files, _, _ = default._prepare_weights(model_config.model, None, model_config.revision, True, None)
        name = _engine_weights.name_of("vllm", repr(cache_key), files)
        tensors, aliases, attributes, _ = _engine_weights.shared(name, lambda: self._load(default))
        entries = {name: _Entry(tensor, "param" if is_parameter else "buffer") for name, (tensor, is_parameter) in tensors.items()}
        return WeightCacheState(entries=entries, aliases=aliases, attrs=attributes)

    def _load(self, default: Any) -> tuple[Any, dict[str, Any]]:
        compilation = self._arguments["vllm_config"].compilation_config
        layers, moe_layers = dict(compilation.static_forward_context), list(compilation.static_all_moe_layers)
        try:
            model = default.load_model(**self._arguments)
            check_ipc_quant_support(model)
            return model, export_model_attrs(model)
        finally:  # the model is built once more, and its layers are registered by their names
            compilation.static_forward_context.clear()
            compilation.static_forward_context.update(layers)
            compilation.static_all_moe_layers[:] = moe_layers

    def _watch_daemon(self) -> None:
        """There is no server."""


def register() -> None:
    register_model_loader(NAME)(Loader)
