"""The table of Megatron's names: hand-computed rows, shards and their HF tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from hpcrl.engines.train.megatron.names import NameTable, parts, shard, shard_shape, shard_slices, table
from hpcrl.models.families import read_shape

CONF = Path(__file__).parents[2] / "conf" / "model" / "Qwen"
SMALL: dict[str, Any] = {
    "vocab_size": 6,
    "hidden_size": 4,
    "intermediate_size": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 1,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 2, "mlp_only_layers": [0]}
LATENT = {
    "model_type": "deepseek_v3",
    "q_lora_rank": 4,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 2,
    "qk_rope_head_dim": 2,
    "v_head_dim": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "moe_intermediate_size": 2,
}


DELTA = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 2, "shared_expert_intermediate_size": 2},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 1, "linear_value_head_dim": 2},
    "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention"],
}
"""A key head has a query and a key of one number, and two value heads of two numbers."""


def small(family: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": family, **SMALL, **(EXPERTS if family == "qwen3_moe" else {}), **changes}


def numbered(names: NameTable) -> dict[str, Tensor]:
    """A tensor for each HF name; no number is in two of them."""
    found, first = {}, 0
    for name, shape in names.shapes.items():
        size = torch.Size(shape).numel()
        found[name] = torch.arange(first, first + size, dtype=torch.float64).view(shape)
        first += size
    return found


def column(entry: Any, tensors: dict[str, Tensor], *ranks: int) -> list[str]:
    """HF tensor and row of each row of a shard, identified by its first number."""
    where = {
        float(tensor[row].flatten()[0]): f"{name.split('.')[-2][0]}{row}"
        for name, tensor in tensors.items()
        for row in range(len(tensor))
        if name in {rows.hf for rows in entry.rows}
    }
    return [where.get(float(row.flatten()[0]), "-") for row in shard(entry, tensors, *ranks)]


def test_query_key_and_value_rows_are_interleaved_by_group() -> None:
    names = table(small("qwen2"))
    tensors = numbered(names)
    for which in ("weight", "bias"):
        entry = names.find(f"decoder.layers.1.self_attention.linear_qkv.{which}")
        assert column(entry, tensors) == ["q0", "q1", "k0", "v0", "q2", "q3", "k1", "v1"]
        assert column(entry, tensors, 1, 2) == ["q2", "q3", "k1", "v1"]
    # More ranks than key heads: the rows are still divided, and Megatron gathers them.
    assert column(entry, tensors, 1, 4) == ["k0", "v0"]


def test_a_ranks_gate_rows_precede_its_up_rows() -> None:
    names = table(small("llama"))
    tensors = numbered(names)
    entry = names.find("decoder.layers.0.mlp.linear_fc1.weight")
    assert column(entry, tensors) == ["g0", "g1", "g2", "g3", "u0", "u1", "u2", "u3"]
    assert column(entry, tensors, 1, 2) == ["g2", "g3", "u2", "u3"]
    down = names.find("decoder.layers.0.mlp.linear_fc2.weight")
    assert torch.equal(shard(down, tensors, 1, 2), tensors["model.layers.0.mlp.down_proj.weight"][:, 2:])


def test_alternating_gate_and_up_rows_of_transposed_experts() -> None:
    """gpt-oss: column 2 i of the HF matrix is gate row i, column 2 i + 1 is up row i; a rank has a slice of columns."""
    names = table(small("gpt_oss", num_local_experts=2, intermediate_size=2, hidden_size=3))
    tensors = numbered(names)
    stacked = tensors["model.layers.1.mlp.experts.gate_up_proj"]
    assert stacked.shape == (2, 3, 4)
    entry = names.find("decoder.layers.1.mlp.experts.local_experts.1.linear_fc1.weight")
    assert torch.equal(shard(entry, tensors), stacked[1].t()[[0, 2, 1, 3]])
    assert torch.equal(shard(entry, tensors, 1, 2), stacked[1].t()[[2, 3]])
    assert [part.tensor_slice for part in shard_slices(entry, 1, 2)] == [((1, 2), (0, 3), (2, 4))]
    bias = names.find("decoder.layers.1.mlp.experts.local_experts.1.linear_fc1.bias")
    assert torch.equal(shard(bias, tensors), tensors["model.layers.1.mlp.experts.gate_up_proj_bias"][1][[0, 2, 1, 3]])
    down = names.find("decoder.layers.1.mlp.experts.local_experts.1.linear_fc2.weight")
    assert torch.equal(shard(down, tensors, 1, 2), tensors["model.layers.1.mlp.experts.down_proj"][1].t()[:, 1:])


def test_a_mixers_rows_are_ordered_by_key_head() -> None:
    """in_proj_qkvz and in_proj_ba are ordered by key head already; the convolution's queries, keys and values are not.
    A rank has a key head with its two value heads."""
    names = table(small("qwen3_next", **DELTA))
    tensors = numbered(names)
    at, hf = "decoder.layers.0.self_attention.", "model.layers.0.linear_attn."
    joint, factors = tensors[hf + "in_proj_qkvz.weight"], tensors[hf + "in_proj_ba.weight"]
    assert joint.shape == (20, 4) and factors.shape == (8, 4)
    entry = names.find(at + "in_proj.weight")
    assert torch.equal(shard(entry, tensors), torch.cat([joint[:10], factors[:4], joint[10:], factors[4:]]))
    assert torch.equal(shard(entry, tensors, 1, 2), torch.cat([joint[10:], factors[4:]]))
    convolution = tensors[hf + "conv1d.weight"]
    assert convolution.shape == (12, 1, 3)
    order = [0, 2, 4, 5, 6, 7, 1, 3, 8, 9, 10, 11]
    assert torch.equal(shard(names.find(at + "conv1d.weight"), tensors), convolution[order])
    assert torch.equal(shard(names.find(at + "A_log"), tensors, 1, 2), tensors[hf + "A_log"][2:])
    out = tensors[hf + "out_proj.weight"]
    assert torch.equal(shard(names.find(at + "out_proj.weight"), tensors, 1, 2), out[:, 4:])


def test_separate_projections_of_a_mixer_are_joined_by_key_head() -> None:
    names = table(small("qwen3_5_text", **DELTA))
    tensors = numbered(names)
    qkv, z, b, a = (tensors[f"model.layers.0.linear_attn.in_proj_{part}.weight"] for part in ("qkv", "z", "b", "a"))
    entry = names.find("decoder.layers.0.self_attention.in_proj.weight")
    second = torch.cat([qkv[[1, 3, 8, 9, 10, 11]], z[4:], b[2:], a[2:]])
    assert torch.equal(shard(entry, tensors, 1, 2), second)
    assert torch.equal(shard(entry, tensors), torch.cat([qkv[[0, 2, 4, 5, 6, 7]], z[:4], b[:2], a[:2], second]))


def test_gates_of_attention_follow_the_queries_of_their_group() -> None:
    """Two key heads, of which each has two query heads of one number; each query row is before its gate row."""
    names = table(small("qwen3_next", **DELTA))
    tensors = numbered(names)
    q, k, v = (tensors[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv")
    entry = names.find("decoder.layers.1.self_attention.linear_qkv.weight")
    first = torch.cat([q[[0, 2, 1, 3]], k[:1], v[:1]])
    assert torch.equal(shard(entry, tensors), torch.cat([first, q[[4, 6, 5, 7]], k[1:], v[1:]]))
    assert torch.equal(shard(entry, tensors, 0, 2), first)


def test_padding_of_the_vocabulary_is_zero_and_belongs_to_no_hf_tensor() -> None:
    names = table(small("qwen3"), padded_vocabulary=12)
    tensors = numbered(names)
    entry = names.find("embedding.word_embeddings.weight")
    assert entry.shape == (12, 4) and entry.padding == 6
    assert torch.equal(shard(entry, tensors, 0, 2), tensors["model.embed_tokens.weight"])
    last = shard(entry, tensors, 2, 3)  # rows 8 to 11
    assert last.dtype == torch.float64 and not last.any()
    assert list(parts(entry, last, 2, 3)) == []
    assert [(part.tensor_slice, part.at) for part in shard_slices(entry, 1, 3)] == [(((4, 6), (0, 4)), ((0, 2),))]


@pytest.mark.parametrize("layers", ["local", "fused"])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        small("qwen2"),
        small("qwen2", tie_word_embeddings=True),
        small("qwen3"),
        small("qwen3_moe"),
        small("llama", attention_bias=True, mlp_bias=True),
        small("mistral"),
        small("", **LATENT),
        small("", **LATENT | {"q_lora_rank": None}),
        small("", **LATENT | {"model_type": "deepseek_v2"}),
        small("qwen2_moe", **EXPERTS, shared_expert_intermediate_size=2),
        small("mixtral", num_local_experts=4),
        small("glm4_moe", n_routed_experts=4, moe_intermediate_size=2, attention_bias=True, use_qk_norm=True),
        small("gpt_oss", num_local_experts=4),
        small("qwen3_next", **DELTA),
        small("qwen3_5_text", **DELTA),
    ],
    ids=lambda config: config["model_type"],
)
def test_the_slices_of_all_ranks_cover_each_tensor_once(config: dict[str, Any], stacked: bool, layers: Any) -> None:
    names = table(config, layers, padded_vocabulary=8, stacked=stacked)
    tensors = numbered(names)
    for num_ranks in (1, 2):
        back = {name: torch.full_like(tensor, -1) for name, tensor in tensors.items()}
        for entry in names.entries:
            for rank in range(num_ranks if entry.split is not None else 1):
                part = shard(entry, tensors, rank, num_ranks)
                assert part.shape == shard_shape(entry, num_ranks)
                for name, tensor_slice, values in parts(entry, part, rank, num_ranks):
                    place = back[name][tuple(slice(*span) for span in tensor_slice)]
                    assert bool((place == -1).all()), "two ranks have it"
                    place.copy_(values)
        assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


def test_shapes_match_the_planner() -> None:
    for name in ("Qwen2.5-0.5B-Instruct", "Qwen2.5-7B", "Qwen3-30B-A3B", "Qwen3-235B-A22B"):
        config = json.loads((CONF / name / "config.json").read_text())
        expected = {parameter.name: parameter.shape for parameter in read_shape(config).parameters}
        assert table(config, stacked=True).shapes == expected


def test_local_and_transformer_engine_layers_have_the_same_hf_names() -> None:
    local, fused = (table(small("qwen3_moe"), layers).entries for layers in ("local", "fused"))  # type: ignore[arg-type]
    differing = {a.name: b.name for a, b in zip(local, fused, strict=True) if a.name != b.name}
    assert all([rows.hf for rows in a.rows] == [rows.hf for rows in b.rows] for a, b in zip(local, fused, strict=True))
    assert {name: other for name, other in differing.items() if ".experts." not in name} == {
        "decoder.layers.0.input_layernorm.weight": "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.0.pre_mlp_layernorm.weight": "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.1.input_layernorm.weight": "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight",
    }
    first = "decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight"
    assert differing[first] == "decoder.layers.1.mlp.experts.linear_fc2.weight3"


def test_a_pipeline_stage_and_an_expert_parallel_rank_find_their_weights() -> None:
    names, fused = table(small("qwen3_moe")), table(small("qwen3_moe"), "fused")
    entry = names.find("module.decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight", 1, 2)
    assert (entry.place, entry.layer, entry.expert) == ("layer", 1, 3)
    assert [rows.hf for rows in entry.rows] == [
        "model.layers.1.mlp.experts.3.gate_proj.weight",
        "model.layers.1.mlp.experts.3.up_proj.weight",
    ]
    grouped = fused.find("decoder.layers.0.mlp.experts.linear_fc1.weight1", 1, 2)
    assert grouped.rows == entry.rows
    stacked = table(small("qwen3_moe"), stacked=True).find(entry.name)
    both = ("model.layers.1.mlp.experts.gate_up_proj", ((3, 4), (0, 4), (0, 4)))
    assert [(part.hf, part.tensor_slice) for part in shard_slices(stacked)] == [both]
    tied = table(small("qwen2", tie_word_embeddings=True))
    assert tied.find("output_layer.weight") is tied.find("embedding.word_embeddings.weight")
    assert names.find("output_layer.weight").place == "head"
    with pytest.raises(ValueError, match=r"decoder\.layers\.1\.mlp\.gate \(decoder\.layers\.2\.mlp\.gate in"):
        names.find("decoder.layers.1.mlp.gate", 1)


def test_only_tensors_held_by_the_rank_are_read(tmp_path: Path) -> None:
    names = table(small("qwen3"))
    tensors = numbered(names)
    save_file(tensors, tmp_path / "model.safetensors")
    read: list[tuple[str, Any]] = []

    class Noting:
        def __init__(self, name: str):
            self.name = name

        def __getitem__(self, index: Any) -> Tensor:
            read.append((self.name, index))
            return file.get_slice(self.name)[index]

    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        lazy = {name: Noting(name) for name in file.keys()}  # noqa: SIM118
        for entry in names.entries:
            assert torch.equal(shard(entry, lazy, 1, 2), shard(entry, tensors, 1, 2))
            assert shard(entry, lazy, 1, 2, torch.bfloat16).dtype == torch.bfloat16
    assert ("model.layers.0.self_attn.k_proj.weight", (slice(1, 2), slice(0, 4))) in read
    assert ("model.layers.0.mlp.down_proj.weight", (slice(0, 4), slice(2, 4))) in read


@pytest.mark.parametrize(
    ("work", "text"),
    [
        (lambda: table(small("gemma2")), r"model_type 'gemma2' has no table .*qwen2, .*gpt_oss have"),
        (lambda: table({"model_type": "qwen3"}), "num_attention_heads in config.json is None"),
        (lambda: table(small("", **LATENT | {"v_head_dim": 0})), "v_head_dim in config.json is 0"),
        (lambda: table(small("qwen2", num_key_value_heads=3)), "num_attention_heads=4 is not a multiple of"),
        (lambda: table(small("qwen2"), padded_vocabulary=5), "5 rows is smaller than vocab_size=6"),
        (
            lambda: shard_shape(table(small("qwen2")).find("decoder.layers.0.mlp.linear_fc1.weight"), 3),
            r"linear_fc1.weight \[8, 4\]: 8 cannot be divided by 2 x 3 tensor parallel ranks",
        ),
        (lambda: shard(table(small("qwen2")).entries[0], {}), "HF tensor model.embed_tokens.weight of .* is missing"),
        (
            lambda: list(parts(table(small("qwen2")).entries[0], torch.zeros(4, 4), 0, 2)),
            r"shard of shape \[4, 4\], config.json requires \[3, 4\]",
        ),
    ],
)
def test_names_and_sizes_that_do_not_fit_are_refused_in_one_line(work: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        work()
