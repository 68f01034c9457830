"""A model of the same architecture with small matrices, which every rank can try before weights are read.

The number and kinds of layers stay. Heads, widths, experts and the vocabulary shrink. Limits on which tokens attend to
each other (windows, chunks, an indexer's top k) shrink below the length of the trial's rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hpcrl.engines.train.fsdp2.model_kind import Kind
from hpcrl.models.families import family_of

REACH = 8
"""Number of tokens in an attention window, chunk or block, and of tokens that an indexer selects."""
HEAD_DIM, ROTARY_DIM, RANK, VOCABULARY, EXPERTS, CHOSEN, STATE, INNER_SIZE = 16, 8, 16, 128, 16, 4, 8, 64
MAX_PARAMETERS = 200_000_000
"""Maximum number of the small model's parameters, which a config with unknown names for sizes may exceed."""

HEADS = re.compile(r"(num_|n_|^)((decoder_|encoder_)?attention_heads?|heads?|head)$|swa_num_attention_heads$")
KEY_HEADS = re.compile(r"num_(key_value|kv|global_key_value)_heads$|num_query_groups$")
HIDDEN = ("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim", "word_embed_proj_dim", "lru_width")
WIDTHS = {  # pattern of a key -> maximum of its value; the first matching pattern counts
    r"qk_rope_head_dim$|rotary_dim$": ROTARY_DIM,
    r"qk_head_dim$": HEAD_DIM + ROTARY_DIM,
    r"(^|_)(head_dim|d_head|head_size|dim_head|kv_channels|key_dim)$": HEAD_DIM,
    r"(^|_)rank$|lowrank$": RANK,
    r"vocab_size|_vocab$": VOCABULARY,
    r"num_(local_)?experts$|n_routed_experts$|zero_expert_num$": EXPERTS,
    r"experts_per_tok(en)?$|^moe_(top_?)?k$|^top_k_experts$": CHOSEN,
    r"d_state$|state_size$": STATE,
    r"window|local_attention$|chunk_(size|length)$|block_size$|index_topk$|rel_extent$|floor_scale$": REACH,
    r"topk_blocks$": 2,
    r"index_n_heads$": 16,  # scores are sums of values clipped at zero; with few heads, many scores would be zero
    r"hidden_size_per_layer_input$|ple_embed_dim$": HEAD_DIM,
}
INNER = re.compile(r"intermediate_size|ffn|^d_?ff$|^dim_ff$|feed_forward_size$")
RECURRENT = re.compile(r"^d_inner$|mamba_d_ssm$")  # twice the hidden size, as the code demands
TOKEN = re.compile(r"(_token_id|_index|_token_ids)$")
KEPT = ("max_window_layers", "layer_types", "max_position_embeddings", "topk_group")


def small_config(config: PreTrainedConfig, ranks: tuple[int, int] = (1, 1)) -> PreTrainedConfig:
    """A small config of the same architecture. `ranks` are the numbers of tensor- and context-parallel ranks, which can
    split its heads, if it has any, as they split the full config's."""
    if getattr(config.get_text_config(), "num_attention_heads", None) is None:
        ranks = (1, 1)
    return type(config).from_dict(_small(config.to_dict(), *ranks))


def _small(full: Mapping[str, Any], tensor: int, context: int) -> dict[str, Any]:
    heads = next((v for k, v in full.items() if HEADS.search(k) and isinstance(v, int)), 1)
    keys = next((v for k, v in full.items() if KEY_HEADS.search(k) and isinstance(v, int)), heads)
    few, least = min(keys, 2 * tensor), 4 * tensor * context
    if keys == heads:
        few = many = min(heads, least)
    else:
        many = few * 2 * context * (2 if few == 1 else 1)
    given = full.get("head_dim")
    is_narrow = isinstance(given, int) and given < HEAD_DIM and "qk_rope_head_dim" not in full
    hidden = many * (int(given or 0) if is_narrow else HEAD_DIM)
    found: dict[str, Any] = {}
    for name, value in full.items():
        if isinstance(value, Mapping):
            is_config = "model_type" in value
            found[name] = _small(value, tensor, context) if is_config else _small_rope(value, full)
        elif name in KEPT or isinstance(value, bool) or not isinstance(value, int | list | tuple):
            found[name] = value
        elif isinstance(value, int):
            found[name] = _size(name, value, many, few, hidden)
        elif value and all(isinstance(v, int) and not isinstance(v, bool) for v in value):
            found[name] = [_size(name, v, many, few, hidden) for v in value]
        else:
            found[name] = value
    if full.get("head_dim") and full.get("head_dim") == full.get("qk_rope_head_dim"):
        found["head_dim"] = found["qk_rope_head_dim"]  # in latent attention, the width of the rotated part
    for name in ("mamba_d_head", "mamba_head_dim"):
        if name in found and isinstance(full[name], int):
            found["mamba_n_heads" if name == "mamba_d_head" else "mamba_num_heads"] = 2 * hidden // found[name]
    return found | dict(family_of(full.get("model_type")).small_sizes)


def _size(name: str, value: int, heads: int, keys: int, hidden: int) -> int:
    if TOKEN.search(name):
        return value if value < VOCABULARY else 0
    for pattern, size in WIDTHS.items():
        if re.search(pattern, name):
            return min(value, size)
    if HEADS.search(name):
        return heads
    if KEY_HEADS.search(name):
        return keys
    if name in HIDDEN:
        return hidden
    if value <= 0:
        return value
    return 2 * hidden if RECURRENT.search(name) else min(2 * hidden, INNER_SIZE) if INNER.search(name) else value


def _small_rope(rope: Mapping[str, Any], full: Mapping[str, Any]) -> dict[str, Any]:
    """Shorten lists that have a number for each rotated pair of a head to the small head's number of pairs."""
    share = rope.get("partial_rotary_factor") or full.get("partial_rotary_factor") or 1.0
    head = full.get("qk_rope_head_dim") or full.get("head_dim") or HEAD_DIM
    pairs = int(min(HEAD_DIM, head) * share) // 2
    found: dict[str, Any] = {}
    for name, value in rope.items():
        if isinstance(value, Mapping):
            found[name] = _small_rope(value, full)
        elif name == "mrope_section" and value:
            found[name] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
        else:
            found[name] = (value * pairs)[:pairs] if name in ("long_factor", "short_factor") else value
    return found


def small_model(
    full: PreTrainedConfig, kind: Kind, device: torch.device, ranks: tuple[int, int] = (1, 1)
) -> PreTrainedModel:
    """A model of the config `full`'s architecture, in float32 and evaluation mode. Its weights are large enough for
    every part to matter, and equal on all ranks. `ranks` are as in small_config(). ValueError above MAX_PARAMETERS;
    other errors come from the model's code."""
    config = small_config(full, ranks)
    with torch.device("meta"):
        size = sum(p.numel() for p in kind.auto.from_config(config, dtype=torch.float32).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"it would have {size:,} parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        hf: PreTrainedModel = kind.auto.from_config(config, dtype=torch.float32)
        for tensor in _weights(hf):
            _fill(tensor)
    return hf.eval().requires_grad_(False).to(device)


def _weights(hf: nn.Module) -> Iterator[Tensor]:
    yield from hf.parameters()
    yield from (buffer for name, buffer in hf.named_buffers() if name.endswith("e_score_correction_bias"))


@torch.no_grad()
def _fill(tensor: Tensor) -> None:
    if not tensor.is_floating_point():
        return
    if tensor.ndim >= 2:
        tensor.normal_(std=1.5 / math.sqrt(tensor.shape[-1]))
    else:  # norms and a recurrence's decay stay near their initial values
        tensor.add_(torch.randn(tensor.shape) * 0.1)
