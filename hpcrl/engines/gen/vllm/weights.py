"""Load new weights into vLLM's model: raise errors where vLLM only warns, and repack copies that its CPU build does not
update."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hpcrl.engines.gen.vllm.direct_copies import DirectCopies
from hpcrl.models.families import family_of

HEADS = ("lm_head.weight", "language_model.lm_head.weight")
"""vLLM's names of the vocabulary projection, in text models and behind a vision tower."""

MERGED_EXPERTS = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")


SIGLIP = "model.vision_tower."
"""Begins the names of a SigLIP tower's weights in transformers' models."""


def as_published(model: Any, model_type: str, name: str, tensor: Tensor) -> tuple[str, Tensor]:
    """A weight of a vision-language model under the name and in the layout of published files. transformers 5
    transposes the experts of Qwen3-VL-MoE when it reads them, and leaves a level out of the names of a SigLIP tower."""
    if name.startswith(SIGLIP) and hasattr(model.vision_tower, "vision_model"):
        name = f"{SIGLIP}vision_model.{name.removeprefix(SIGLIP)}"
    if family_of(model_type).transposes_experts and name.endswith(MERGED_EXPERTS):
        tensor = tensor.transpose(1, 2)
    return name, tensor


def reload(engine: Any, model: Any, weights: Iterable[tuple[str, Tensor]], complete: bool = True) -> None:
    """Load weights into vLLM's model. ValueError if all weights are given, but a parameter gets none and would keep its
    old values, since vLLM's loaders skip unknown names. Otherwise, parameters keep their values if they get no weight;
    matrices that vLLM fuses must get all of their weights or none."""
    names: dict[int, set[str]] = {}  # names by parameter, which several modules may share
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    missing: list[str] = []

    def load(named: Iterable[tuple[str, Tensor]]) -> set[str] | None:
        # Now the model has the parameters for which there are weights, and no others that vLLM computes from them.
        loadable = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        with DirectCopies(model):
            loaded: set[str] | None = type(model).load_weights(model, named)
        if loaded is not None:
            wanted = (own & loadable for own in names.values())
            missing.extend(min(own) for own in wanted if own and not own & loaded)
        return loaded

    _name_loaders(model)
    model.load_weights = load  # the only place where vLLM reports the loaded names
    try:
        engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
    finally:
        del model.load_weights
    if _is_tied(_decoder(model)):  # the head is a separate parameter in the CPU build
        missing = [name for name in missing if name not in HEADS]
    if missing and complete:
        some = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
        raise ValueError(
            f"vLLM's {type(model).__name__} found no weights for {len(missing)} of its parameters among the trainer's: "
            f"{some}; use another generator.engine with this model"
        )
    _repair(model)


def _name_loaders(model: Any) -> None:
    """Give partial functions a name, for which vLLM's reload asks every weight loader (MiniMax-M2 has partial ones)."""
    for tensor in (*model.parameters(), *model.buffers()):
        loader = getattr(tensor, "weight_loader", None)
        if isinstance(loader, functools.partial) and not hasattr(loader, "__name__"):
            setattr(loader, "__name__", loader.func.__name__)  # noqa: B010 - its type has no such attribute


def _decoder(model: Any) -> Any:
    """The text model, with the head, of a model that may have a vision tower."""
    return getattr(model, "language_model", model)


def _is_tied(decoder: Any) -> bool:
    """Whether the head is the embedding. vLLM's class of Idefics3 has the head itself."""
    config = decoder.config.text_config if hasattr(getattr(decoder, "model", None), "text_model") else decoder.config
    return bool(config.tie_word_embeddings)


def _repair(model: Any) -> None:
    """Repack a tied head and experts. vLLM's CPU build multiplies with packed copies, and does not update these two."""
    if torch.cuda.is_available():
        return
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    decoder = _decoder(model)
    head, inner = getattr(decoder, "lm_head", None), getattr(decoder, "model", None)
    embedding = getattr(getattr(inner, "text_model", inner), "embed_tokens", None)
    if head is not None and embedding is not None and head is not embedding and _is_tied(decoder):
        head.weight.data = embedding.weight.data
        dispatch_cpu_unquantized_gemm(head, remove_weight=False)
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if isinstance(experts := getattr(kernel, "fused_experts", None), CPUUnquantizedExperts):
            experts.process_weights_after_loading(layer)
