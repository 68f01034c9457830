"""Multi-token prediction layers (MTP, arXiv 2412.19437, section 2.2): their tensors in files, and their number in
config.json. transformers' models do not have them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

MTP = Literal["keep", "drop"]
ModelMTP = Literal["keep", "drop", "train"]
CONTINUED, OWN = ("deepseek_v3", "glm4_moe", "glm4_moe_lite"), ("qwen3_next",)
"""Families whose MTP layer can be trained: as the layer after the last, and as mtp.*."""
KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers", "n_mtp_layers")
"""Keys of config.json, or of its text_config, with the number of MTP layers: of DeepSeek-V3, GLM-4.5, MiMo, ERNIE 4.5
and Nemotron-H; of Qwen3.5; of MiniMax-M2; of others. Qwen3-Next has no such key."""
OWN_NAME = re.compile(r"(?:^|\.)mtp[._]")
"""Names of MTP layers that do not continue the numbers of the others."""
_LAYER = re.compile(r"(?:model\.|language_model\.){0,2}layers\.(\d+)\.")


def mtp_keys(config: Mapping[str, Any]) -> dict[str, int]:
    """KEYS with numbers above 0 in a config.json."""
    text = config.get("text_config")
    sections = (config, text if isinstance(text, Mapping) else {})
    return {key: n for each in sections for key in KEYS if type(n := each.get(key)) is int and n > 0}


def num_mtp_layers(config: Mapping[str, Any]) -> int:
    """The number of MTP layers that a config.json names; 0 if it names none."""
    return max(mtp_keys(config).values(), default=0)


def mtp_names(config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """The tensors of MTP layers among names in files, in their order: names with a part `mtp` (Qwen3-Next, Qwen3.5,
    MiMo, ERNIE 4.5, Nemotron-H), and the layers after the last of num_hidden_layers (DeepSeek-V3, GLM-4.5)."""
    text = config.get("text_config")
    num_layers = (text if isinstance(text, Mapping) else config).get("num_hidden_layers")
    further = range(num_layers, num_layers + num_mtp_layers(config)) if isinstance(num_layers, int) else range(0)

    def is_mtp(name: str) -> bool:
        layer = _LAYER.match(name)
        return bool(OWN_NAME.search(name)) or (layer is not None and int(layer[1]) in further)

    return [name for name in names if is_mtp(name)]


def with_mtp_keys(config: Mapping[str, Any], source: Mapping[str, Any], kept: bool) -> dict[str, Any]:
    """A config.json with the KEYS of the source's, or 0 for each of them without MTP layers."""
    changed = dict(config)
    for key in KEYS:
        if type(source.get(key)) is int:
            changed[key] = source[key] if kept else 0
    if isinstance(inner := source.get("text_config"), Mapping) and isinstance(changed.get("text_config"), Mapping):
        changed["text_config"] = with_mtp_keys(changed["text_config"], inner, kept)
    return changed


def trained_names(config: Mapping[str, Any]) -> dict[str, str]:
    """Beginnings of the names of a trained MTP layer's parameters (hpcrl.engines.train.fsdp2.mtp_layer.MTPLayer), and
    of the same tensors in files, where experts are not stacked."""
    if config["model_type"] in OWN:
        return {
            "layer.": "mtp.layers.0.",
            "enorm.": "mtp.pre_fc_norm_embedding.",
            "hnorm.": "mtp.pre_fc_norm_hidden.",
            "eh_proj.": "mtp.fc.",
            "norm.": "mtp.norm.",
        }
    begin = f"model.layers.{config['num_hidden_layers']}."
    own = {name: f"{begin}{name}" for name in ("enorm.", "hnorm.", "eh_proj.")}
    return {"layer.": begin, **own, "norm.": f"{begin}shared_head.norm."}


def shared_with_model(name: str) -> str:
    """The model's tensor of which a tensor of an MTP layer is a copy in files; empty if it is not one."""
    if name.endswith(".embed_tokens.weight"):
        return "model.embed_tokens.weight"
    return "lm_head.weight" if name.endswith(".shared_head.head.weight") else ""


def untrainable(config: Mapping[str, Any], names: Iterable[str] | None) -> str:
    """Why model.mtp=train is impossible with this config.json; empty if it is possible. `names` are the tensors of its
    files, None if the files are missing."""
    family = config.get("model_type")
    if family not in CONTINUED + OWN:
        return f"MTP layers of {family} are not trained (those of {', '.join(CONTINUED + OWN)} are)"
    if family in CONTINUED and (number := num_mtp_layers(config)) != 1:
        return f"config.json has {number} MTP layers (num_nextn_predict_layers), and only a single one is trained"
    begin = trained_names(config)["eh_proj."]
    return "" if names is None or f"{begin}weight" in names else f"the weights lack {begin}weight of the MTP layer"


def mtp_line(config: Mapping[str, Any], names: Iterable[str] | None, mode: ModelMTP) -> str:
    """What a run does with the MTP layers of a model, as a line of the plan; empty if it has none. `names` are the
    tensors of its files, None if the files are missing."""
    keys = mtp_keys(config)
    held = [] if names is None else mtp_names(config, names)
    if not keys and not held:
        return ""
    named = " and ".join(f"{key}={number}" for key, number in keys.items())
    if names is not None and not held:
        return f"MTP layers: config.json has {named}, but the weights have none; exports have 0"
    what = ", ".join(filter(None, (named, f"{len(held)} tensors" if held else "")))
    if mode == "train":
        return (
            f"MTP layers: {what}; trained (model.mtp=train), not counted below: a layer's weights, states, activations"
        )
    done = "copied unchanged to exports" if mode == "keep" else "left out of exports"
    return f"MTP layers: {what}; not trained, {done} (model.mtp={mode})"
