"""Multi-token prediction layers (MTP, arXiv 2412.19437, section 2.2): their tensors in files, and their number in
config.json. transformers' models do not have them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from hpcrl.models.shape import MAX_LAYERS

MTP = Literal["keep", "drop"]
ModelMTP = Literal["keep", "drop", "train"]
CONTINUED = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
"""Families whose MTP layers can be trained, and are the layers after the last in files."""
OWN = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Families whose MTP layers can be trained, and are mtp.* in files. All layers share norms and projection."""
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


def num_trained(config: Mapping[str, Any]) -> int:
    """The number of MTP layers that model.mtp=train trains. Qwen3-Next has one if config.json names none."""
    return num_mtp_layers(config) or int(config["model_type"] in OWN)


def num_joins(config: Mapping[str, Any]) -> int:
    """How often trained MTP layers have norms and a projection: once for all, or once for each."""
    return 1 if config["model_type"] in OWN else num_trained(config)


def trained_names(config: Mapping[str, Any]) -> dict[str, str]:
    """Beginnings of the names of trained MTP layers' parameters (hpcrl.engines.train.fsdp2.mtp_layer.MTPLayers), and of
    the same tensors in files, where experts may be separate."""
    numbers = range(num_trained(config))
    if config["model_type"] in OWN:
        return {f"layers.{number}.": f"mtp.layers.{number}." for number in numbers} | {
            "joins.0.enorm.": "mtp.pre_fc_norm_embedding.",
            "joins.0.hnorm.": "mtp.pre_fc_norm_hidden.",
            "joins.0.eh_proj.": "mtp.fc.",
            "joins.0.norm.": "mtp.norm.",
        }
    found: dict[str, str] = {}
    for number in numbers:
        begin = f"model.layers.{config['num_hidden_layers'] + number}."
        found |= {f"joins.{number}.{name}": f"{begin}{name}" for name in ("enorm.", "hnorm.", "eh_proj.")}
        found |= {f"joins.{number}.norm.": f"{begin}shared_head.norm.", f"layers.{number}.": begin}
    return found


def name_in_files(begins: Mapping[str, str], name: str) -> str:
    """The name in files of a trained MTP layer's parameter, by trained_names(). ValueError if it has none."""
    for begin, in_files in begins.items():
        if name.startswith(begin):
            return in_files + name.removeprefix(begin)
    raise ValueError(f"{name} of the trained MTP layers is not among those that config.json names")


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
    if config.get("mtp_use_dedicated_embeddings"):
        return "its MTP layers have embeddings of their own (mtp_use_dedicated_embeddings), which are not trained"
    if not 1 <= (number := num_trained(config)) <= MAX_LAYERS:
        return f"config.json has {number} MTP layers, and 1 to {MAX_LAYERS} are supported"
    if names is None:
        return ""
    held = set(names)
    begins = trained_names(config)
    needed = [f"{begin}weight" for name, begin in begins.items() if name.endswith(".eh_proj.")]
    needed += [f"{begin}input_layernorm.weight" for name, begin in begins.items() if name.startswith("layers.")]
    if lacking := [name for name in needed if name not in held]:
        return f"the weights lack {lacking[0]} of the MTP layers"
    if family in OWN and f"mtp.layers.{number}.input_layernorm.weight" in held:
        return f"the weights have more MTP layers than config.json, {number}"
    return ""


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
        return f"MTP layers: {what}; trained (model.mtp=train), counted below"
    done = "copied unchanged to exports" if mode == "keep" else "left out of exports"
    return f"MTP layers: {what}; not trained, {done} (model.mtp={mode})"
