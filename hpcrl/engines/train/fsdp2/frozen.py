"""Keep parameters of a model as they are (trainer.freeze)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn
from transformers import PreTrainedModel

from hpcrl.models.tower import part_of
from hpcrl.spec.freeze import frozen


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
    tables = (module for module in decoder.modules() if isinstance(module, nn.Embedding))
    others |= {id(p): "embeddings" for module in (*tables, hf.get_input_embeddings()) for p in module.parameters()}
    return {name: others.get(id(p)) or part_of(name) for name, p in hf.named_parameters()}


def routers(hf: PreTrainedModel) -> Iterator[nn.Module]:
    """The modules that choose experts: those whose logits transformers records, or that are named so."""
    models = [module for module in hf.modules() if isinstance(module, PreTrainedModel)]
    recorded = [(model._can_record_outputs or {}).get("router_logits") for model in models]
    kinds = tuple(kind for each in recorded if isinstance(kind := getattr(each, "target_class", each), type))
    for module in hf.modules():
        if isinstance(module, kinds) or type(module).__name__.endswith("Router"):
            yield module
