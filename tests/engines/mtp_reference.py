"""The loss of trained MTP layers by hand: one row at a time, with transformers' decoder layer of the family, read and
called without hpcrl's code."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from hpcrl.rollout.batch import Batch
from tests.engines.worlds import make_model_folder

DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {},
    "glm4_moe": {},
    "glm4_moe_lite": {"mlp_layer_types": ["dense", "sparse"]},
    "qwen3_next": EXPERTS | DELTA,
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": EXPERTS | DELTA,
}
SEVERAL = {"deepseek_v3": 3, "qwen3_5_text": 2}
"""Numbers of MTP layers of further models of these families."""
COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""What files of DeepSeek-V3 and GLM-4.5 have twice."""


def has_own_names(family: str) -> bool:
    return family.startswith("qwen3_")


def beginning(family: str, number: int = 0) -> str:
    """Of the names in files of a layer, counted from 0."""
    return f"mtp.layers.{number}." if has_own_names(family) else f"model.layers.{2 + number}."


def names_outside_layer(family: str, number: int = 0) -> dict[str, str]:
    """Part -> the name in files, of the tensors beside a decoder layer."""
    if has_own_names(family):
        return {
            "enorm": "mtp.pre_fc_norm_embedding.weight",
            "hnorm": "mtp.pre_fc_norm_hidden.weight",
            "eh_proj": "mtp.fc.weight",
            "norm": "mtp.norm.weight",
        }
    begin = beginning(family, number)
    names = {name: f"{begin}{name}.weight" for name in ("enorm", "hnorm", "eh_proj")}
    return names | {"norm": f"{begin}shared_head.norm.weight"}


def folder_with_mtp(family: str, folder: Path, count: int = 1, stacked: bool = False, **changes: Any) -> Path:
    """A model of two layers with MTP layers in its files, which have the tensors of further layers. stacked: the
    experts of MTP layers are one tensor for each matrix, as in Qwen3.6."""
    own_sizes = SIZES[family] | changes
    longer = dict(own_sizes)
    for key in ("layer_types", "mlp_layer_types"):
        if key in longer:
            longer[key] = [*longer[key], *[longer[key][-1]] * count]
    donor = make_model_folder(family, folder.parent / f"{folder.name}-donor", num_hidden_layers=2 + count, **longer)
    make_model_folder(family, folder, **own_sizes)
    tensors, file = load_file(donor / "model.safetensors"), folder / "model.safetensors"
    own, random = load_file(file), torch.Generator().manual_seed(7)
    size = own["model.embed_tokens.weight"].shape[1]
    moved: dict[str, Tensor] = {}
    for number in range(count):
        begin, in_donor = beginning(family, number), f"model.layers.{2 + number}."
        moved |= {begin + n.removeprefix(in_donor): t for n, t in tensors.items() if n.startswith(in_donor)}
        for name, in_file in names_outside_layer(family, number).items():
            drawn = torch.randn((size, 2 * size) if name == "eh_proj" else (size,), generator=random)
            moved[in_file] = 0.2 * drawn if name == "eh_proj" or has_own_names(family) else 1 + 0.3 * drawn
        if not has_own_names(family):
            moved |= {f"{begin}{name}": own["model.embed_tokens.weight"].clone() for name in COPIES}
    path = folder / "config.json"
    if family != "qwen3_next":
        key = "mtp_num_hidden_layers" if has_own_names(family) else "num_nextn_predict_layers"
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: count}))
    if stacked:
        at = "mtp.layers.0.mlp.experts."
        gate, up, down = (
            torch.stack([moved.pop(f"{at}{expert}.{name}_proj.weight") for expert in range(EXPERTS["num_experts"])])
            for name in ("gate", "up", "down")
        )
        moved |= {f"{at}gate_up_proj": torch.cat([gate, up], 1), f"{at}down_proj": down}
    save_file(own | moved, file, metadata={"format": "pt"})
    return folder


def by_hand(
    family: str, folder: Path, batch: Batch, coefficient: float, num_tokens: float, count: int = 1
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """(mean loss, accuracy of each layer, gradients by hpcrl's names) of coefficient x the sum of losses / num_tokens,
    averaged over layers."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    # Another, longer model whose last layers are the MTP layers, read by transformers from renamed files.
    config = copy.deepcopy(AutoConfig.from_pretrained(folder))
    config.num_hidden_layers = 2 + count
    for key in ("layer_types", "mlp_layer_types"):
        if getattr(config, key, None) is not None:
            setattr(config, key, [*getattr(config, key)[:2], *[getattr(config, key)[1]] * count])
    renamed = folder.parent / f"{folder.name}-longer"
    renamed.mkdir(exist_ok=True)
    files = load_file(folder / "model.safetensors")
    outside = [name for number in range(count) for name in names_outside_layer(family, number).values()]
    further: dict[str, Tensor] = {}
    for number in range(count):
        begin = beginning(family, number)
        inside = [n for n in files if n.startswith(begin) and n not in outside and not n.endswith(COPIES)]
        further |= {f"model.layers.{2 + number}.{n.removeprefix(begin)}": files[n] for n in inside}
    rest = {
        n: t for n, t in files.items() if n.startswith(("model.layers.0.", "model.layers.1.")) or ".layers." not in n
    }
    rest = {n: t for n, t in rest.items() if not n.startswith("mtp.")}
    save_file(rest | further, renamed / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(renamed)
    longer: Any = AutoModelForCausalLM.from_pretrained(renamed, attn_implementation="eager", dtype=torch.float32)
    layers, rotary = longer.model.layers[2:], longer.model.rotary_emb
    kind = type(layers[0].input_layernorm)
    made: dict[str, Any] = {}
    for in_file in outside:
        tensor = files[in_file]
        if in_file not in made:
            made[in_file] = (
                kind(len(tensor), eps=config.rms_norm_eps) if tensor.ndim == 1 else nn.Linear(*tensor.T.shape, False)
            )
            made[in_file].weight.data.copy_(tensor)
    parts = [{n: made[at] for n, at in names_outside_layer(family, number).items()} for number in range(count)]
    total = torch.zeros(())
    losses: list[list[float]] = [[] for _ in range(count)]
    hits: list[list[bool]] = [[] for _ in range(count)]
    lengths = batch.segment_lengths.tolist()
    rows = (batch.token_ids.long(), batch.loss_mask, batch.weights[batch.row_ids])
    for tokens, mask, weight in zip(*(each.split(lengths) for each in rows), strict=True):
        with torch.no_grad():
            states = model.model(tokens[None]).last_hidden_state
            all_embedded = model.get_input_embeddings()(tokens[None])
        for number in range(count):
            first = 2 + number  # the first token that this layer predicts
            if len(tokens) <= first:
                break
            # States of tokens 0, 1, ...; embeddings of those that many places later. The last state predicts nothing.
            states, embedded = states[:, : len(tokens) - first], all_embedded[:, 1 + number : -1]
            part = parts[number]
            mixed = part["eh_proj"](torch.cat([part["enorm"](embedded), part["hnorm"](states)], -1))
            length = mixed.shape[1]
            causal = torch.full((length, length), -1e30).triu(1)[None, None]
            places = torch.arange(length)[None]
            rotation = rotary(mixed, places)
            out = layers[number](mixed, position_embeddings=rotation, attention_mask=causal, position_ids=places)
            states = part["norm"](out)
            logits = nn.functional.linear(states[0], model.get_output_embeddings().weight.detach())
            each = nn.functional.cross_entropy(logits, tokens[first:], reduction="none")
            total = total + (each * mask[first:] * weight[first:]).sum() * coefficient / num_tokens / count
            counted = mask[first:] & (weight[first:] > 0)
            losses[number] += each[counted].tolist()
            hits[number] += (logits.argmax(-1) == tokens[first:])[counted].tolist()
    total.backward()
    gradients = {f"layers.{n}.{name}": p.grad for n, layer in enumerate(layers) for name, p in layer.named_parameters()}
    for number in range(1 if has_own_names(family) else count):
        gradients |= {f"joins.{number}.{name}.weight": part.weight.grad for name, part in parts[number].items()}
    return [sum(x) / len(x) for x in losses], [sum(x) / len(x) for x in hits], gradients
