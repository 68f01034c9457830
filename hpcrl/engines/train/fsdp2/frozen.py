"""Keep parameters of a model as they are (trainer.freeze)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from torch import nn
from transformers import PreTrainedModel

from hpcrl.models.tower import part_of
from hpcrl.spec.freeze import frozen

IN_LAYER = re.compile(r"\.\d+(\.|$)")
"""In the name of a module of a layer."""
NAMES = ("gate", "router", "router_gate")
"""Names of routers in modules that also have the experts."""


def freeze(hf: PreTrainedModel, entries: Sequence[str]) -> None:
    """Unset requires_grad for the parameters that the entries of trainer.freeze select. ValueError if an entry selects
    none, or all entries together select every parameter."""
    for name in frozen(entries, parts(hf), hf.config.model_type):
        hf.get_parameter(name).requires_grad_(False)


def parts(hf: PreTrainedModel) -> dict[str, str]:
    """Maps each parameter's name to its part (hpcrl.spec.freeze), `decoder` if it has none. A head that is tied to the
    embedding is a part of the embeddings."""
    decoder, head = hf.get_decoder(), hf.get_output_embeddings()
    others = {id(p): "decoder" for module in (decoder, head) if module for p in module.parameters()}
    others |= {id(p): "router" for module in routers(hf) for p in module.parameters()}
    outside = (module for name, module in decoder.named_modules() if not IN_LAYER.search(name))
    tables = (module for module in outside if isinstance(module, nn.Embedding))
    others |= {id(p): "embeddings" for module in (*tables, hf.get_input_embeddings()) for p in module.parameters()}
    return {name: others.get(id(p)) or part_of(name) for name, p in hf.named_parameters()}


def routers(hf: PreTrainedModel) -> Iterator[nn.Module]:
    """The modules that choose experts: those whose logits transformers records, or that are named so. Of a module that
    also has the experts, its part with a router's name."""
    models = [module for module in hf.modules() if isinstance(module, PreTrainedModel)]
    recorded = [(model._can_record_outputs or {}).get("router_logits") for model in models]
    kinds: list[tuple[type, str]] = []
    for each in (one for some in recorded for one in (some if isinstance(some, list | tuple) else [some])):
        if isinstance(kind := getattr(each, "target_class", each), type):
            kinds.append((kind, getattr(each, "layer_name", None) or ""))
    for name, module in hf.named_modules():
        if type(module).__name__.endswith("Router"):
            yield module
        elif any(isinstance(module, kind) and place in name for kind, place in kinds):
            has_experts = any(part == "experts" or isinstance(p, nn.Embedding) for part, p in module.named_children())
            yield from (p for part, p in module.named_children() if part in NAMES) if has_experts else (module,)
