"""A rank of a vLLM replica gets exactly the part of each weight that vLLM reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hpcrl.engines.gen.generation_engine import Output, ReplicaRanks, Request, SamplingParams
from hpcrl.engines.gen.vllm.slices import slices
from hpcrl.models.families import known_shape, read_shape
from hpcrl.models.shape import ModelShape, Parameter
from hpcrl.spec.weight_layout import full_slice
from tests.contracts.gen.vllm import leave_groups
from tests.engines.test_vllm import HEADS, answers, make_engine, weights_of
from tests.engines.worlds import make_model_folder, run_ranks
from tests.planner.models import PUBLISHED

UNTIED: dict[str, Any] = {"tie_word_embeddings": False}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 64}  # vLLM on a CPU loads widths of multiples of 32 on each rank
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"num_key_value_heads": 2}),
    "qwen3_moe": ("qwen3_moe", UNTIED | EXPERTS),
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
}
ASKED = [Request(i, [63, 99, i], SamplingParams(max_new_tokens=2, ignore_eos=True), seed=i) for i in range(2)]
"""With the last words of either rank, of a vocabulary of 100 that vLLM pads to 128."""
Named = list[tuple[str, torch.Tensor]]


def parts(model: ModelShape, named: Named, index: int, less: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors with NaN outside a rank's slices; the slices of the tensor `less` lack their last row or column."""
    for name, tensor in named:
        there = torch.full_like(tensor, torch.nan)
        for tensor_slice in slices({}, model, name, tuple(tensor.shape), index, 2):
            cut = [*tensor_slice]
            if name == less:
                axis = next((i for i, (a, b) in enumerate(tensor_slice) if b - a < tensor.shape[i]), 0)
                cut[axis] = (tensor_slice[axis][0], tensor_slice[axis][1] - 1)
            inside = tuple(slice(*bounds) for bounds in cut)
            there[inside] = tensor[inside]
        yield name, there


def not_shown(model: ModelShape, engine: Any, named: Named, index: int) -> list[str]:
    """The tensors whose slices differ in the engine."""
    shown = dict(engine.loaded_weights([name for name, _ in named]))
    found = []
    for name, tensor in named:
        boxes = slices({}, model, name, tuple(tensor.shape), index, 2)
        cuts = [tuple(slice(*bounds) for bounds in tensor_slice) for tensor_slice in boxes]
        if name not in shown or not all(torch.equal(shown[name][cut], tensor[cut]) for cut in cuts):
            found.append(name)
    return found


def member(folders: dict[str, Path]) -> dict[str, tuple[dict[int, Output], dict[int, Output], list[str]]]:
    """Of each model the answers with whole tensors and with slices, and the tensors of whose slices the engine shows
    other numbers or which may lack a part unnoticed."""
    rank, found = dist.get_rank(), {}
    for which, folder in folders.items():
        leave_groups()
        dist.init_process_group("gloo", init_method=f"file://{folder}/world", rank=rank, world_size=2)
        model, named = known_shape(folder), weights_of(folder)
        engine = make_engine(folder, ReplicaRanks((0, 1), rank, dist.new_group([0, 1])))
        engine.load_weights(iter(named), 0)
        whole = answers(engine, ASKED)
        engine.load_weights(parts(model, named, rank), 1)
        sliced = answers(engine, ASKED)
        unnoticed = not_shown(model, engine, named, rank)
        for name in (name for name, _ in named if ".1." not in name):
            engine.load_weights(parts(model, named, rank, less=name), 2)
            try:
                answers(engine, ASKED[:1])
                unnoticed.append(name)
            except FloatingPointError:
                engine.abort(list(engine.progress()))
        found[which] = whole, sliced, unnoticed
        engine.close()
    return found


def pieces(which: str, name: str, size: int, **options: Any) -> list[tuple[tuple[int, int], ...]]:
    """The slice of a published model's weight for each of `size` ranks: the bounds along the divided axis."""
    model = shape_of(which)
    shape = next(p.shape for p in model.parameters if p.name == name)
    found = []
    for index in range(size):
        boxes = slices(options, model, name, shape, index, size)
        axes = [axis for axis in range(len(shape)) if boxes[0][axis] != (0, shape[axis])]
        found.append(tuple(tensor_slice[axes[0]] for tensor_slice in boxes) if axes else ())
    return found


def shape_of(which: str) -> ModelShape:
    return read_shape(PUBLISHED[which][0])


def test_slices_of_published_models_by_hand() -> None:
    """Qwen3-235B-A22B on 8 ranks: 64 heads of 128, of which 4 have keys and values; experts of width 1536."""
    large, layer = "Qwen3-235B-A22B", "model.layers.3."
    assert pieces(large, layer + "self_attn.q_proj.weight", 8)[1] == ((1024, 2048),)
    heads = [((0, 128),), ((128, 256),), ((256, 384),), ((384, 512),)]
    assert pieces(large, layer + "self_attn.v_proj.weight", 8) == [head for head in heads for _ in range(2)]
    assert pieces(large, layer + "self_attn.k_proj.weight", 2) == [((0, 256),), ((256, 512),)]
    assert pieces(large, layer + "self_attn.o_proj.weight", 8)[7] == ((7168, 8192),)
    assert pieces(large, layer + "mlp.experts.gate_up_proj", 8)[1] == ((192, 384), (1728, 1920))
    assert pieces(large, layer + "mlp.experts.down_proj", 8)[1] == ((192, 384),)
    assert pieces(large, layer + "mlp.experts.down_proj", 8, enable_expert_parallel=True)[1] == ((16, 32),)
    assert pieces(large, layer + "mlp.gate.weight", 8)[1] == pieces(large, layer + "input_layernorm.weight", 8)[1] == ()
    assert pieces("Qwen2.5-7B", "model.layers.0.self_attn.k_proj.bias", 2)[1] == ((256, 512),)
    assert pieces("Qwen2.5-7B", "model.layers.0.mlp.up_proj.weight", 2)[1] == ((9472, 18944),)


def test_indivisible_experts_are_assigned_whole() -> None:
    """As vLLM's determine_expert_map: 10 experts of 3 ranks."""
    model = replace(shape_of("Qwen3-30B-A3B"), parameters=(Parameter("experts.down_proj", (10, 4, 6), "expert"),))
    options = {"enable_expert_parallel": True}
    found = [slices(options, model, "experts.down_proj", (10, 4, 6), index, 3) for index in range(3)]
    assert found == [(((first, end), (0, 4), (0, 6)),) for first, end in ((0, 4), (4, 7), (7, 10))]


@pytest.mark.parametrize(("words", "expected"), [(100, [(0, 32), (32, 64), (64, 96), (96, 100)]), (60, None)])
def test_the_vocabulary_is_padded_like_vllms(words: int, expected: list[tuple[int, int]] | None) -> None:
    """A rank that has only padding gets the last row, so vLLM gets every tensor."""
    model = replace(shape_of("Qwen2.5-7B"), parameters=(Parameter("lm_head.weight", (words, 8), "vocabulary"),))
    found = [slices({}, model, "lm_head.weight", (words, 8), index, 4) for index in range(4)]
    assert found == [((rows, (0, 8)),) for rows in expected or [(0, 16), (16, 32), (32, 48), (48, 60)]]
    found = [slices({}, model, "lm_head.weight", (20, 8), index, 4) for index in range(4)]
    assert [tensor_slice[0][0] for tensor_slice in found] == [(0, 16), (16, 20), (19, 20), (19, 20)]


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (None, {}),
        (shape_of("gemma-2-2b"), {}),
        (shape_of("Qwen3-30B-A3B"), {"enable_eplb": True}),
        (shape_of("Qwen3-30B-A3B"), {"quantization": "fp8"}),
    ],
    ids=["unknown", "untested", "balanced experts", "quantised"],
)
def test_ranks_get_whole_tensors_that_vllm_may_divide_differently(model: ModelShape | None, options: Any) -> None:
    name, shape = "model.layers.0.self_attn.q_proj.weight", (64, 32)
    assert slices(options, model, name, shape, 1, 2) == (full_slice(shape),)
    assert slices({}, shape_of("Qwen3-30B-A3B"), name, shape, 1, 2) == (((32, 64), (0, 32)),)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not find_spec("vllm"), reason="vllm is not installed (extra: vllm)")
def test_vllm_reads_only_the_slices(tmp_path: Path) -> None:
    """With NaN outside a rank's slices it answers as with the whole tensors; with NaN also in their last rows it
    reports non-finite logits, for every tensor."""
    folders = {name: make_model_folder(k, tmp_path / name, **(HEADS | c)) for name, (k, c) in MODELS.items()}
    for found in run_ranks(2, member, folders):
        for which, (whole, sliced, unnoticed) in found.items():
            assert unnoticed == [], which
            assert whole.keys() == sliced.keys() == {0, 1}
            for i, wanted in whole.items():
                np.testing.assert_array_equal(sliced[i].token_ids, wanted.token_ids)
                np.testing.assert_array_equal(sliced[i].gen_logprobs, wanted.gen_logprobs)
