"""The loss of a trained MTP layer by hand: one row at a time, with transformers' decoder layer of the family, read and
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

SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {},
    "glm4_moe": {},
    "glm4_moe_lite": {"mlp_layer_types": ["dense", "sparse"]},
    "qwen3_next": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 20,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
}
COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""What files of DeepSeek-V3 and GLM-4.5 have twice."""


def beginning(family: str) -> str:
    return "mtp.layers.0." if family == "qwen3_next" else "model.layers.2."


def names_outside_layer(family: str) -> dict[str, str]:
    """Our name -> the name in files, of the tensors beside the decoder layer."""
    if family == "qwen3_next":
        return {
            "enorm": "mtp.pre_fc_norm_embedding.weight",
            "hnorm": "mtp.pre_fc_norm_hidden.weight",
            "eh_proj": "mtp.fc.weight",
            "norm": "mtp.norm.weight",
        }
    return {
        "enorm": "model.layers.2.enorm.weight",
        "hnorm": "model.layers.2.hnorm.weight",
        "eh_proj": "model.layers.2.eh_proj.weight",
        "norm": "model.layers.2.shared_head.norm.weight",
    }


def folder_with_mtp(family: str, folder: Path) -> Path:
    """A model of two layers with an MTP layer in its files, which has the tensors of a further layer."""
    three = dict(SIZES[family])
    for key in ("layer_types", "mlp_layer_types"):
        if key in three:
            three[key] = [*three[key], three[key][-1]]
    donor = make_model_folder(family, folder.parent / f"{folder.name}-donor", num_hidden_layers=3, **three)
    make_model_folder(family, folder, **SIZES[family])
    tensors, file = load_file(donor / "model.safetensors"), folder / "model.safetensors"
    own, random = load_file(file), torch.Generator().manual_seed(7)
    moved = {beginning(family) + n.removeprefix("model.layers.2."): t for n, t in tensors.items() if ".layers.2." in n}
    size = own["model.embed_tokens.weight"].shape[1]
    for name, in_file in names_outside_layer(family).items():
        drawn = torch.randn((size, 2 * size) if name == "eh_proj" else (size,), generator=random)
        moved[in_file] = 0.2 * drawn if name == "eh_proj" or family == "qwen3_next" else 1 + 0.3 * drawn
    if family != "qwen3_next":
        moved |= {f"model.layers.2.{name}": own["model.embed_tokens.weight"].clone() for name in COPIES}
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": 1}))
    save_file(own | moved, file, metadata={"format": "pt"})
    return folder


def by_hand(
    family: str, folder: Path, batch: Batch, coefficient: float, num_tokens: float
) -> tuple[float, float, dict[str, Tensor]]:
    """(mean loss, accuracy, gradients by hpcrl's names) of coefficient x the sum of losses / num_tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    # Another model of three layers, whose third is the MTP layer, read by transformers from renamed files.
    config = copy.deepcopy(AutoConfig.from_pretrained(folder))
    config.num_hidden_layers = 3
    for key in ("layer_types", "mlp_layer_types"):
        if getattr(config, key, None) is not None:
            setattr(config, key, [*getattr(config, key)[:2], getattr(config, key)[1]])
    renamed = folder.parent / f"{folder.name}-three"
    renamed.mkdir(exist_ok=True)
    files = load_file(folder / "model.safetensors")
    third = {
        f"model.layers.2.{n.removeprefix(beginning(family))}": t
        for n, t in files.items()
        if n.startswith(beginning(family)) and n not in names_outside_layer(family).values() and not n.endswith(COPIES)
    }
    rest = {n: t for n, t in files.items() if ".layers.2." not in n and not n.startswith("mtp.")}
    save_file(rest | third, renamed / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(renamed)
    longer: Any = AutoModelForCausalLM.from_pretrained(renamed, attn_implementation="eager", dtype=torch.float32)
    layer, rotary = longer.model.layers[2], longer.model.rotary_emb
    kind = type(layer.input_layernorm)
    parts: dict[str, Any] = {}
    for name, in_file in names_outside_layer(family).items():
        tensor = files[in_file]
        parts[name] = (
            kind(len(tensor), eps=config.rms_norm_eps) if tensor.ndim == 1 else nn.Linear(*tensor.T.shape, False)
        )
        parts[name].weight.data.copy_(tensor)
    total, losses, hits = torch.zeros(()), [], []
    masks = batch.loss_mask.split(batch.segment_lengths.tolist())
    weights = batch.weights[batch.row_ids].split(batch.segment_lengths.tolist())
    for tokens, mask, weight in zip(
        batch.token_ids.long().split(batch.segment_lengths.tolist()), masks, weights, strict=True
    ):
        if len(tokens) < 3:
            continue
        with torch.no_grad():
            states = model.model(tokens[None]).last_hidden_state[:, :-2]
            embedded = model.get_input_embeddings()(tokens[None, 1:-1])
        mixed = parts["eh_proj"](torch.cat([parts["enorm"](embedded), parts["hnorm"](states)], -1))
        length = mixed.shape[1]
        causal = torch.full((length, length), -1e30).triu(1)[None, None]
        places = torch.arange(length)[None]
        out = layer(mixed, position_embeddings=rotary(mixed, places), attention_mask=causal, position_ids=places)
        logits = nn.functional.linear(parts["norm"](out)[0], model.get_output_embeddings().weight.detach())
        each = nn.functional.cross_entropy(logits, tokens[2:], reduction="none")
        total = total + (each * mask[2:] * weight[2:]).sum() * coefficient / num_tokens
        counted = mask[2:] & (weight[2:] > 0)
        losses += each[counted].tolist()
        hits += (logits.argmax(-1) == tokens[2:])[counted].tolist()
    total.backward()
    gradients = {f"layer.{name}": p.grad for name, p in layer.named_parameters()}
    gradients |= {f"{name}.weight": part.weight.grad for name, part in parts.items()}
    return sum(losses) / len(losses), sum(hits) / len(hits), gradients
