"""A decoder's sizes and parameters from the model that transformers builds on torch's meta device, without memory.

Used for families whose parameters hpcrl does not list itself. The first call imports transformers, which takes seconds.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from hpcrl.models.shape import (
    LAYER_COUNTS,
    ROUTER_BIAS,
    CannotPlanError,
    Decoder,
    Latent,
    LayerCache,
    ModelShape,
    ModelSource,
    Parameter,
    ParameterSplit,
    decoder_keys,
    wrong_size,
)

if TYPE_CHECKING:
    from torch import nn

CHECKED = (*LAYER_COUNTS, "hidden_size", "vocab_size", "num_attention_heads")
CHOSEN = re.compile(r"experts_per_tok(en)?$|^moe_(top_?)?k$|^top_k_experts$")
"""Names of config keys for the number of experts per token."""
LISTED_EXPERT = re.compile(r"\.experts\.\d+\.")
COLUMN = re.compile(
    r"(^|_)(q|k|v|qkv|gate|up|gate_up|q_b|kv_b|in|in_proj_\w+|query_key_value|c_attn|fc1|w1|w3)(_proj)?$"
)
ROW = re.compile(r"(^|_)(o|down|out|dense|fc2|w2)(_proj)?$")
"""Names of linear layers that engines split by rows and by columns where transformers' plan does not say it."""
SHARED = re.compile(r"\.shared_(experts?|mlp)\..*(down_proj|output_linear)\.weight$")
RECURRENT_SIZES = (
    ("num_v_heads", "head_k_dim", "head_v_dim"),
    ("num_heads", "head_dim", "ssm_state_size"),
    ("intermediate_size", "ssm_state_size"),
)
"""Attributes of a mixer (gated delta rule, Mamba-2, Mamba) whose product is the size of its recurrent state."""


def built_shape(config: Mapping[str, Any], sees: bool = False) -> ModelShape:
    """The model of a config.json. CannotPlanError if transformers is not installed, has no such model_type, or cannot
    build the model.

    Args:
        sees: Whether the model is trained with its vision tower.
    """
    keys = decoder_keys(config)
    for key in CHECKED:
        if keys.get(key) is not None and (wrong := wrong_size(key, keys[key])):
            raise CannotPlanError(f"{key} in config.json is {wrong}")
    return _built(source_of(config, sees))


def source_of(config: Mapping[str, Any], sees: bool = False) -> ModelSource:
    """What the model is built from; `sees` as above."""
    return ModelSource(
        json.dumps({k: v for k, v in config.items() if k != "quantization_config"}, sort_keys=True), sees
    )


@functools.lru_cache(maxsize=32)
def _built(source: ModelSource) -> ModelShape:
    return _read(empty_model(source), source)


def empty_model(source: ModelSource, dtype: str = "bfloat16") -> Any:
    """The model on the meta device. CannotPlanError as above."""
    content = json.loads(source.config)
    name = content.get("model_type")
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError as error:
        raise CannotPlanError(f"model_type {name!r} needs transformers to be planned: {error}") from None
    if not isinstance(name, str) or name not in CONFIG_MAPPING:
        raise CannotPlanError(f"its parameters are not known for model_type {name!r}, which transformers does not have")
    try:
        with quiet(), torch.device("meta"):
            parsed = CONFIG_MAPPING[name].from_dict(PreTrainedConfig._decode_special_floats(content))
            kind = AutoModelForImageTextToText if source.sees else AutoModelForCausalLM
            model = kind.from_config(parsed, dtype=getattr(torch, dtype))
    except Exception as error:  # from the config's or the model's own code
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise CannotPlanError(f"transformers cannot build a model of this config.json ({name}): {text}") from error
    return model


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' warnings, such as about kernels that are not installed."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def decoder_layers(model: Any) -> tuple[str, Any]:
    """The name and the list of the decoder's layers. CannotPlanError if there is none."""
    text = model.config.get_text_config(decoder=True)
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    inside, lists = {id(module) for module in decoder.modules()}, []
    for name, module in model.named_modules():
        if id(module) in inside and type(module).__name__ == "ModuleList":
            if len(module) == getattr(text, "num_hidden_layers", None):
                return name, module
            lists.append((name, module))
    if not lists:
        raise CannotPlanError(f"the layers of model_type {model.config.model_type!r} are not known")
    return max(lists, key=lambda each: len(each[1]))


def _read(model: Any, source: ModelSource) -> ModelShape:
    text = model.config.get_text_config(decoder=True)
    prefix, layers = decoder_layers(model)
    heads = _int(text, "num_attention_heads", default=1)
    kv_heads = _int(text, "num_key_value_heads", default=heads)
    hidden = int(model.get_input_embeddings().weight.shape[1])
    latent = _latent(text)
    head_dim = latent.nope + latent.rope if latent else _int(text, "head_dim", default=hidden // heads)
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is model.get_input_embeddings().weight
    parameters = tuple(_parameters(model, f"{prefix}."))
    names = {parameter.name for parameter in parameters}
    stacked = [p for p in parameters if p.split == "expert"]
    experts = max((p.shape[0] for p in stacked), default=0)
    return ModelShape(
        family=str(model.config.model_type),
        decoder=Decoder(soft_capped=bool(getattr(text, "attn_logit_softcapping", None)), experts=bool(stacked)),
        hidden_size=hidden,
        num_layers=len(layers),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=_int(text, "intermediate_size", "ffn_dim", default=4 * hidden),
        vocab_size=_int(text, "vocab_size"),
        tied=tied,
        qkv_bias=any(name.endswith(("q_proj.bias", "qkv_proj.bias")) for name in names),
        out_bias=any(name.endswith("o_proj.bias") for name in names),
        mlp_bias=any(name.endswith("mlp.down_proj.bias") for name in names),
        num_experts=experts,
        experts_per_token=min(experts, _chosen(text)),
        expert_size=min((p.size // p.shape[0] // hidden for p in stacked if len(p.shape) > 2), default=0),
        expert_layers=frozenset(p.layer for p in stacked if p.layer is not None),
        parameters=parameters,
        latent=latent,
        shared_size=max((p.shape[-1] for p in parameters if SHARED.search(p.name)), default=0),
        caches=tuple(_cache(layer, kv_heads) for layer in layers),
        linear=frozenset(f"{name}.weight" for name, module in model.named_modules() if _is_linear(module)),
        attends=_value(text, "num_attention_heads") is not None,
        source=source,
    )


def _int(config: Any, *names: str, default: int | None = None) -> int:
    for name in names:
        value = _value(config, name)
        value = max(value) if isinstance(value, list | tuple) and value else value  # one for each layer
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    if default is None:
        raise CannotPlanError(f"{names[0]} in config.json is not known")
    return default


def _value(config: Any, name: str) -> Any:
    """A key's value, in a list if it depends on the layer."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers refuses a value that depends on the layer
        return [getattr(config.per_layer_config[layer], name) for layer in range(config.num_hidden_layers)]


def _chosen(text: Any) -> int:
    names = [name for name in text.to_dict() if CHOSEN.search(name)]
    return _int(text, *names, default=1)


def _latent(text: Any) -> Latent | None:
    if not getattr(text, "kv_lora_rank", None):
        return None
    sizes = {key: _int(text, key) for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
    return Latent(getattr(text, "q_lora_rank", None), *sizes.values())


def _is_linear(module: Any) -> bool:
    from torch import nn

    return isinstance(module, nn.Linear)


def _parameters(model: Any, prefix: str) -> Iterator[Parameter]:
    """All parameters, tied ones once, and routers' biases."""
    splits = {id(parameter): split for parameter, split in _splits(model)}
    biases = ((name, buffer) for name, buffer in model.named_buffers() if name.endswith(ROUTER_BIAS))
    for name, tensor in (*model.named_parameters(), *biases):
        layer = int(name.removeprefix(prefix).partition(".")[0]) if name.startswith(prefix) else None
        split = "expert" if LISTED_EXPERT.search(name) else splits.get(id(tensor), "whole")
        yield Parameter(name, tuple(tensor.shape) or (1,), split, layer)


def _splits(model: Any) -> Iterator[tuple[nn.Parameter, ParameterSplit]]:
    """How the split parameters are split: by transformers' plan, else by the names of linear layers."""
    plan = getattr(model, "tp_plan", None) or {}
    ends = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if id(module) in ends:
            yield from ((parameter, "vocabulary") for parameter in own.values())
        elif type(module).__name__.endswith("Experts"):
            yield from ((parameter, "expert") for parameter in own.values() if parameter.ndim > 1)
        elif _is_linear(module) and module.out_features > 1 and (way := _way(name, plan)) is not None:
            yield own["weight"], way
            if "bias" in own and way != "row":
                yield own["bias"], way


def _way(name: str, plan: Mapping[str, str]) -> ParameterSplit | None:
    style, last = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name), ""), name.rpartition(".")[2]
    if "replicated" in style or "mla" in style:
        return None
    if "colwise" in style or COLUMN.search(last):
        return "key" if last in ("k_proj", "v_proj") else "column"
    return "row" if "rowwise" in style or ROW.search(last) else None


def _cache(layer: Any, kv_heads: int) -> LayerCache:
    """What a generator keeps of a layer, from its modules."""
    keys = latents = state = convolved = 0
    for name, module in layer.named_modules():
        last = name.rpartition(".")[2]
        if last == "k_proj" and _is_linear(module):
            parent = layer.get_submodule(name.rpartition(".")[0])
            values = getattr(parent, "v_proj", None)
            keys += module.out_features + (values if values is not None else module).out_features
            if "indexer" in name:
                keys, latents = keys - 2 * module.out_features, latents + module.out_features
        elif last in ("kv_a_proj_with_mqa", "wk") and _is_linear(module):  # the second: an indexer's keys
            latents += module.out_features
        elif last in ("qkv_proj", "query_key_value", "Wqkv", "c_attn", "qkv"):
            width = module.out_features if _is_linear(module) else module.nf  # GPT-2's linear layers are transposed
            keys += _keys_of(width, layer, kv_heads)
        elif type(module).__name__ == "Conv1d":
            convolved += module.weight.shape[0] * (module.weight.shape[-1] - 1)
        state = max(state, _state(module))
    return LayerCache(keys, latents, state, convolved)


def _keys_of(width: int, layer: Any, kv_heads: int) -> int:
    """Numbers of keys and values in a joint projection of this width."""
    heads = next((m.num_heads for m in layer.modules() if isinstance(getattr(m, "num_heads", None), int)), kv_heads)
    return 2 * kv_heads * width // (heads + 2 * kv_heads)


def _state(module: Any) -> int:
    for names in RECURRENT_SIZES:
        sizes = [size for name in names if isinstance(size := getattr(module, name, None), int)]
        if len(sizes) == len(names):
            return prod(sizes)
    return 0
