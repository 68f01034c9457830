"""Adapters in vLLM, passed in memory instead of files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import torch

from hpcrl.config import LoRAConfig
from hpcrl.models.families import known_shape
from hpcrl.models.shape import ModelShape
from hpcrl.models.tower import PREFIX
from hpcrl.planner.adapters import adapters
from hpcrl.spec.lora import B, adapted, layer_of

NUMBER = 1
"""Number of the only adapter; vLLM identifies adapters by numbers above 0."""


def arguments(lora: LoRAConfig, model_path: Path) -> dict[str, Any]:
    """Arguments of EngineArgs for one adapter of this model. ValueError if vLLM's names of its layers are not known, or
    if it has experts and there is no GPU: with adapters, vLLM uses Triton kernels for experts."""
    from vllm.config.lora import MaxLoRARanks

    sizes, shape = sorted(get_args(MaxLoRARanks)), known_shape(model_path)
    if shape is None:
        text = f"vLLM's names of the layers of {model_path} are not known, which trainer.lora needs"
        raise ValueError(f"generator.engine: {text}; set trainer.lora.rank=0")
    if shape.expert_layers and not torch.cuda.is_available():
        text = f"vLLM on a CPU runs no mixture of experts ({shape.family}) with trainer.lora"
        instead = "generator.engine=native, adapters of experts too (trainer.lora.parts), or trainer.lora.rank=0"
        raise ValueError(f"generator.engine: {text}; use {instead}")
    return {
        "enable_lora": True,
        "enable_tower_connector_lora": _in_tower(lora),
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": next(size for size in sizes if size >= lora.max_rank),
        # Without this list, vLLM would also wrap the vocabulary's matrices and experts.
        "lora_target_modules": _targets(lora, shape),
    }


def _in_tower(lora: LoRAConfig) -> bool:
    return bool({"vision", "merger"}.intersection(lora.parts))


def _targets(lora: LoRAConfig, shape: ModelShape) -> list[str]:
    """The last parts of the layers' names. If the tower's convolution or a block has the same, vLLM's full names
    instead, since vLLM refuses layers that are not linear."""
    others = {p.name.split(".")[-2] for p in shape.parameters if p.name.startswith(PREFIX) and len(p.shape) > 2}
    modules = {adapted(p.name).removesuffix(".weight") for p in adapters(lora, shape)}
    found = set()
    for module in modules:
        last = module.rpartition(".")[2]
        found.add(module.removeprefix("model.") if last in others or last.isdigit() else last)
    return sorted(found)


class Adapter:
    """The adapter for a model runner's model; requests refer to it by `request`. ValueError if adapters belong to a
    vision tower and vLLM has none there, which it would only warn about."""

    def __init__(self, runner: Any, lora: LoRAConfig):
        from vllm.lora.request import LoRARequest

        if _in_tower(lora) and not runner.lora_manager.supports_tower_connector_lora():
            raise ValueError(
                f"trainer.lora.parts: vLLM has no adapters in the tower of {type(runner.get_model()).__name__}; "
                "use [decoder], or generator.engine=native"
            )
        self._runner, self._lora = runner, lora
        self.request = LoRARequest("policy", NUMBER, "in memory")

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Replace its weights by these tensors, under their names in hpcrl.spec.lora."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        manager = self._runner.lora_manager._adapter_manager
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        scales = {name: self._lora.scale_of(layer_of(name)) for name in tensors}
        loaded = LoRAModel.from_lora_tensors(
            NUMBER,
            {name: tensor * scales[name] if name.endswith(B) else tensor for name, tensor in tensors.items()},
            PEFTHelper(r=1, lora_alpha=1, target_modules=[]),  # each layer's scale is in its second matrix
            device=str(self._runner.device),
            dtype=manager.lora_config.lora_dtype,
            weights_mapper=mapper.get_rename_mapper() if mapper is not None else None,
        )
        manager.remove_adapter(NUMBER)
        manager.add_adapter(loaded)
        manager.activate_adapter(NUMBER)
