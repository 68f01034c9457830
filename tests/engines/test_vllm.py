"""vLLM as a generation engine (beside its contract, tests/contracts): groups, families, and weights after an update."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hpcrl.comm.weight_checksums import LoadedSums, shard_checksums
from hpcrl.config import TinyModel, load
from hpcrl.engines.expert_routes import RouteShape
from hpcrl.engines.gen.generation_engine import Output, ReplicaRanks, Request, SamplingParams
from hpcrl.engines.tiny import make_tiny_model
from hpcrl.models.shape import CannotPlanError
from hpcrl.node.devices import show_peers
from hpcrl.spec.weight_layout import RequiredSlices, TensorShards, full_slice
from tests.contracts.gen.vllm import leave_groups
from tests.engines.test_head_dtype import large_logits
from tests.engines.test_lora import EXPERTS, LORA, check_generator, check_merged
from tests.engines.test_lora import engine as make_trainer
from tests.engines.worlds import make_model_folder, process_group, run_ranks

# find_spec rather than importorskip: collecting must not pay for importing vLLM
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not find_spec("vllm"), reason="vllm is not installed (extra: vllm)"),
]

SIZES: dict[str, Any] = {"vocab_size": 320, "hidden_size": 128, "num_heads": 4, "num_kv_heads": 2}  # heads of 32
SHAPE = RouteShape(num_layers=2, experts_per_token=2, num_experts=4)


@pytest.fixture(autouse=True)
def no_groups_left() -> Iterator[None]:
    yield
    leave_groups()


def make_engine(folder: Path, ranks: ReplicaRanks | None = None, **settings: Any) -> Any:
    from hpcrl.engines.gen.vllm.engine import VLLMEngine

    more: dict[str, Any] = {"max_num_seqs": 4, "max_length": 64, "dtype": "float32", "cache_bytes": 1 << 24} | settings
    return VLLMEngine(folder, replica=ranks or ReplicaRanks((0,)), load=False, **more)


def requests(number: int, new: int = 12, **params: Any) -> list[Request]:
    sampling = SamplingParams(max_new_tokens=new, **{"ignore_eos": True, **params})
    return [Request(i, [(11 * i + k) % 300 for k in range(4 + i)], sampling, seed=i) for i in range(number)]


def answers(engine: Any, asked: Sequence[Request]) -> dict[int, Output]:
    engine.add(asked)
    found: dict[int, Output] = {}
    while engine.progress():
        found |= {output.id: output for output in engine.step(4)}
    return found


def weights_of(folder: Path, scale: float = 1.0) -> list[tuple[str, torch.Tensor]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    return [(name, scale * parameter.detach()) for name, parameter in model.named_parameters()]


def member(folder: Path) -> dict[int, Output]:
    """Ranks 0 and 1 are one replica, rank 2 is another, and rank 3 does not generate."""
    rank = dist.get_rank()
    if rank == 3:
        dist.all_reduce(torch.ones(1))
        return {}
    ranks = (0, 1) if rank < 2 else (2,)
    group = dist.new_group([0, 1], use_local_synchronization=True) if rank < 2 else None
    engine = make_engine(folder, ReplicaRanks(ranks, ranks.index(rank), group), routes=SHAPE)
    engine.load_weights(iter(weights_of(folder, 1.5)), 0)
    engine.load_weights(weights_of(folder), 1)
    found = answers(engine, requests(6))
    total = torch.ones(1)
    dist.all_reduce(total)  # the trainer's group works as before
    engine.close()
    return found if total.item() == 4 else {}


def test_tensor_parallelism_works_on_a_subset_of_the_default_group(tmp_path: Path) -> None:
    """With a mixture of experts, whose routes are the same on every rank."""
    experts = {"architecture": "qwen3_moe", "num_experts": SHAPE.num_experts}
    make_tiny_model(TinyModel(**SIZES, **experts), tmp_path)
    first, second, whole, none = run_ranks(4, member, tmp_path)
    assert none == {} and whole.keys() == set(range(6))
    for i, wanted in whole.items():
        for split in (first, second):
            np.testing.assert_array_equal(split[i].token_ids, wanted.token_ids)
            np.testing.assert_allclose(split[i].gen_logprobs, wanted.gen_logprobs, atol=2e-5)
            chosen, expected = (np.sort(o.columns["routes"].reshape(-1, 2, 2)) for o in (split[i], wanted))
            np.testing.assert_array_equal(chosen, expected)


@pytest.mark.parametrize(("num_ranks", "wanted", "left_out"), [(1, False, False), (2, False, True), (2, True, False)])
def test_replicas_of_several_ranks_disable_vllms_custom_all_reduce(
    num_ranks: int, wanted: bool, left_out: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds no GPUs of other ranks if each rank sees only its own."""
    from vllm.engine import arg_utils
    from vllm.platforms.interface import Platform

    class OneGPU(Platform):
        device_control_env_var = "CUDA_VISIBLE_DEVICES"

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    with pytest.raises(IndexError):
        OneGPU.logical_device_id_to_visible_device_id(1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", show_peers({1: "4", 2: "5"}, [(1, 2)])[2])
    assert [OneGPU.logical_device_id_to_visible_device_id(number) for number in range(2)] == [0, 1]
    assert OneGPU.visible_device_id_to_physical_device_id(0) == 5, "the first is the rank's own"

    def refuse(disable_custom_all_reduce: bool = False, **others: Any) -> None:
        raise ValueError(f"left out: {disable_custom_all_reduce}")

    monkeypatch.setattr(arg_utils, "EngineArgs", refuse)
    with pytest.raises(ValueError, match=f"left out: {left_out}"):
        make_engine(tmp_path, ReplicaRanks(tuple(range(num_ranks))), custom_all_reduce=wanted)


def test_vllm_does_not_warm_up_its_sampler() -> None:
    from vllm import envs

    import hpcrl.engines.gen.vllm.engine  # noqa: F401 - sets it

    assert not envs.VLLM_USE_FLASHINFER_SAMPLER, "its kernels would be compiled at the start, for nothing"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels of a CPU")
def test_unsupported_head_sizes_are_refused_with_the_supported_ones(tmp_path: Path) -> None:
    make_tiny_model(TinyModel(hidden_size=16, num_heads=2, num_kv_heads=1), tmp_path)
    with pytest.raises(ValueError, match=r"heads have size 8, .* this CPU support .*\b32, 64.*; generator.engine=n"):
        make_engine(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"head_dim": 32}))
    make_engine(tmp_path).close()


HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "hidden_size": 64}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2 untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("qwen3", {}),
    "llama": ("llama", {"tie_word_embeddings": False}),
    "qwen3_moe": ("qwen3_moe", {"moe_intermediate_size": 32}),
}
UNSLICED: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "mixtral": {"intermediate_size": 32},
    "glm4_moe": {"moe_intermediate_size": 32, "use_qk_norm": True},
    "olmo3": {"sliding_window": 16},
}
"""Families whose weights are not read back from vLLM."""


def family_folder(family: str, folder: Path) -> Path:
    kind, changes = FAMILIES[family]
    return make_model_folder(kind, folder, **HEADS, **changes)


def changed(folder: Path, version: int) -> Any:
    """The model of this folder with other weights."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(version)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
    return model


def model_logprobs(model: Any, request: Request, output: Output) -> np.ndarray:
    ids = torch.tensor([[*request.prompt_ids, *output.token_ids.tolist()]])
    with torch.no_grad():
        values = model(ids).logits[0, :-1].float().log_softmax(-1)
    chosen: np.ndarray = values.gather(1, ids[0, 1:, None])[len(request.prompt_ids) - 1 :, 0].numpy()
    return chosen


def not_loaded(engine: Any, model: Any) -> list[str]:
    """Weights that differ between engine and model by the checksums of check_weights=true; all weights that the engine
    does not expose."""
    named = dict(model.named_parameters())
    layout = [TensorShards.unsharded(name, "float32", tensor.shape, [0]) for name, tensor in named.items()]
    needs = [RequiredSlices("float32", (full_slice(tensor.shape),)) for tensor in named.values()]
    loaded = LoadedSums(layout, needs)
    for _ in loaded.noting(engine.loaded_weights(list(named))):
        pass
    return loaded.differing(shard_checksums(0, layout, [needs], named.values())[0])


@pytest.mark.numerics
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_after_an_update_belong_to_the_new_weights(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for requests that waited, with prompts cached under the old weights. The engine exposes the new weights, or
    stale ones if the packed copies on a CPU are not refreshed."""
    folder = family_folder(family, tmp_path / "model")
    engine = make_engine(folder, options={"block_size": 32})
    asked = [Request(i, [(11 * i + k) % 90 for k in range(40 + i)], SamplingParams(12), seed=i) for i in range(3)]
    for version in range(2):
        model = changed(folder, version)
        engine.load_weights(((name, tensor.detach()) for name, tensor in model.named_parameters()), version)
        for i, output in answers(engine, () if version else asked).items():
            np.testing.assert_allclose(output.gen_logprobs, model_logprobs(model, asked[i], output), atol=2e-5)
        assert not_loaded(engine, model) == []
        engine.add(asked)  # until the next weights
    monkeypatch.setattr("hpcrl.engines.gen.vllm.weights._repair", lambda model: None)
    model = changed(folder, 2)
    engine.load_weights(((name, tensor.detach()) for name, tensor in model.named_parameters()), 2)
    experts = [f"model.layers.{layer}.mlp.experts.{name}" for layer in (0, 1) for name in ("gate_up_proj", "down_proj")]
    head = ["model.embed_tokens.weight"] if model.config.tie_word_embeddings else []
    stale = [] if torch.cuda.is_available() else [*head, *(experts if "moe" in family else ())]
    assert not_loaded(engine, model) == stale
    engine.close()


@pytest.mark.numerics
@pytest.mark.parametrize(
    "family", [name if name == "mixtral" else pytest.param(name, marks=pytest.mark.soak) for name in UNSLICED]
)
def test_further_families_have_the_log_probs_of_transformers_after_an_update(family: str, tmp_path: Path) -> None:
    folder = make_model_folder(family, tmp_path / "model", **HEADS, **UNSLICED[family])
    engine = make_engine(folder, options={"block_size": 32})
    asked = [Request(i, [(11 * i + k) % 90 for k in range(40 + i)], SamplingParams(12), seed=i) for i in range(3)]
    for version in range(2):
        model = changed(folder, version)
        named = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}  # it is tied
        engine.load_weights(iter(named.items()), version)
        for i, output in answers(engine, asked).items():
            # vLLM's experts round otherwise: by 2.2e-5 in qwen2_moe on a processor with AVX2.
            np.testing.assert_allclose(output.gen_logprobs, model_logprobs(model, asked[i], output), atol=4e-5)
    engine.close()


def test_models_run_with_transformers_code_do_not_change_the_trainers_class(tmp_path: Path) -> None:
    """vLLM would compile the decoder's class in place and then treat the trainer's model as its own. A missing weight
    is an error for these families too, whose names only vLLM knows."""
    folder = make_model_folder("olmo", tmp_path / "model", **HEADS)
    before = changed(folder, 0)
    engine = make_engine(folder, options={"block_size": 32})
    after = changed(folder, 1)
    asked = [Request(i, [(11 * i + k) % 90 for k in range(40 + i)], SamplingParams(12), seed=i) for i in range(3)]
    for version, model in enumerate((before, after)):
        engine.load_weights(((name, tensor.detach()) for name, tensor in model.named_parameters()), version)
        for i, output in answers(engine, asked).items():
            np.testing.assert_allclose(output.gen_logprobs, model_logprobs(model, asked[i], output), atol=2e-5)
    some = [(name, tensor.detach()) for name, tensor in after.named_parameters() if "layers.1.mlp.down" not in name]
    with pytest.raises(ValueError, match=r"no weights for 1 of .* trainer's: model.layers.1.mlp.down_proj.weight; use"):
        engine.load_weights(some, 2)
    assert engine.version == -1
    engine.close()


def test_classes_of_remote_code_stay_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a module is in no package of transformers."""
    from vllm.model_executor.models.transformers.base import Base

    from hpcrl.engines.gen.vllm.transformers_classes import transformers_classes_kept

    class Decoder(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return input_ids

    Decoder.__module__ = "code_beside"
    module: Any = ModuleType("code_beside")
    module.Decoder = Decoder
    monkeypatch.setitem(sys.modules, "code_beside", module)
    base: Any = object.__new__(Base)
    with transformers_classes_kept():
        base._decorate_cls_for_torch_compile(
            cls=Decoder, dynamic_arg_dims={"input_ids": 0}, enable_if=lambda config: True, is_encoder=False
        )
        assert issubclass(module.Decoder, Decoder) and len(module.Decoder.__bases__) == 2
    assert module.Decoder is Decoder and Decoder.__bases__ == (torch.nn.Module,)
    assert Decoder()(torch.ones(2)).sum() == 2


def test_the_cache_of_an_unplanned_family_has_the_configured_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hpcrl.engines.gen.vllm.engine import make

    def unknown(folder: str, key: str) -> None:
        raise CannotPlanError(f"{key}: {folder}")

    folder = make_model_folder("olmo", tmp_path / "model", **HEADS, eos_token_id=1)
    words = ["generator.engine=vllm", "data.max_prompt_tokens=32", "rollout.max_new_tokens=32"]
    make(load([*words, "generator.vllm.kv_cache_gib=0.1"]), folder, None, ReplicaRanks((0,))).close()
    monkeypatch.setattr("hpcrl.engines.gen.vllm.engine.shape_of", unknown)
    with pytest.raises(ValueError, match=r"on a CPU set generator\.vllm\.kv_cache_gib"):
        make(load(words), folder, None, ReplicaRanks((0,)))


@pytest.mark.numerics
@pytest.mark.parametrize(("tied", "head"), [(True, "float32"), (False, "float32"), (False, None)])
@torch.no_grad()
def test_a_float32_head_does_not_round_logits(tied: bool, head: str | None, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = large_logits(tmp_path / "model", tied, **HEADS)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    engine = make_engine(folder, dtype="bfloat16", head_dtype=head)
    engine.load_weights(iter(model.named_parameters()), 0)
    asked = [Request(i, [(11 * i + k) % 90 for k in range(4 + i)], SamplingParams(12), seed=i) for i in range(3)]
    errors = []
    for i, output in answers(engine, asked).items():
        tokens = output.token_ids.tolist()
        ids = torch.tensor([[*asked[i].prompt_ids, *tokens]])
        hidden = model.model(ids).last_hidden_state[0, len(asked[i].prompt_ids) - 1 : -1]
        wanted = torch.log_softmax(hidden.float() @ model.lm_head.weight.float().T, -1)
        errors.append(np.abs(output.gen_logprobs - wanted[torch.arange(len(tokens)), tokens].numpy()))
    engine.close()
    assert (np.concatenate(errors).mean() < 0.02) == (head == "float32")


@pytest.mark.numerics
@pytest.mark.parametrize("family", ["qwen2", pytest.param("llama", marks=pytest.mark.soak)])
def test_bf16_log_probs_after_an_update_differ_only_by_rounding(family: str, tmp_path: Path) -> None:
    """On average as much from float32, and from another computation in bfloat16, as that one from float32: errors of
    equal size add up to at most 1.4 times as much if they are independent."""
    folder = family_folder(family, tmp_path / "model")
    engine = make_engine(folder, dtype="bfloat16")
    asked = requests(8)
    for version in range(2):
        exact, rounded = changed(folder, version), changed(folder, version).to(torch.bfloat16)
        engine.load_weights(((name, tensor.detach()) for name, tensor in exact.named_parameters()), version)
        found = answers(engine, asked)
        own = np.concatenate([found[request.id].gen_logprobs for request in asked])
        full, half = (
            np.concatenate([model_logprobs(model, request, found[request.id]) for request in asked])
            for model in (exact, rounded)
        )
        floor = abs(half - full).mean()
        assert 0 < abs(own - full).mean() < 1.5 * floor and abs(own - half).mean() < 1.5 * floor
    engine.close()


@pytest.mark.parametrize(
    ("limit", "hidden"), [("AVX2", True), ("avx512_core_bf16", True), ("AVX512_CORE_AMX", False), ("all", False)]
)
def test_amx_is_hidden_where_onednn_must_not_use_it(limit: str, hidden: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from hpcrl.engines.gen.vllm.amx import follow_onednn_limit

    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    follow_onednn_limit({"ONEDNN_MAX_CPU_ISA": limit})
    assert torch.cpu._is_amx_tile_supported() != hidden


def test_a_refusal_by_vllm_is_reported_with_its_key(tmp_path: Path) -> None:
    make_tiny_model(TinyModel(**SIZES), tmp_path)
    with pytest.raises(ValueError, match=r"vLLM refuses .* with generator\.vllm\.options=.*nonsense.*: .*nonsense"):
        make_engine(tmp_path, options={"nonsense": 1})
    with pytest.raises(ValueError, match=r"vLLM refuses .*max_model_len"):
        make_engine(tmp_path, max_length=1 << 20)


def test_an_inconsistent_answer_is_refused(tmp_path: Path) -> None:
    make_tiny_model(TinyModel(**SIZES), tmp_path)
    engine, (request,) = make_engine(tmp_path), requests(1)
    engine.load_weights(weights_of(tmp_path, float("nan")), 0)
    engine.add([request])
    with pytest.raises(FloatingPointError, match=r"request 0: the logits are not finite under weights version 0"):
        engine.step(1)
    engine.abort([0])
    engine.load_weights(weights_of(tmp_path), 1)
    engine.add([request])
    assert not engine.step(1) and engine.progress() == {0: 1}
    step = engine._engine.step

    def garbled() -> Any:
        results = step()
        results[0].outputs[0].token_ids = [1 << 30]
        return results

    engine._engine.step = garbled
    with pytest.raises(RuntimeError, match=r"request 0: vLLM gave the token 1073741824, outside the vocabulary of 320"):
        engine.step(1)
    engine.close()


def test_adapters_are_added_to_the_weights_of_the_model_folder(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 128}
    folder = make_model_folder("qwen2", tmp_path / "model", **sizes)
    with process_group(0, 1, str(tmp_path / "world")):
        trainer, generator = make_trainer(folder), make_engine(folder, lora=LORA)
        check_generator(trainer, generator, lambda version: generator.load_weights(trainer.named_weights(), version))
        named = dict(trainer.named_weights())
        (name, _) = named.popitem()
        with pytest.raises(ValueError, match=rf"1 weights are missing: {name}"):
            generator.load_weights(named.items(), 4)
        generator.close()
    experts = make_model_folder("qwen3_moe", tmp_path / "experts", **sizes)
    with pytest.raises(
        ValueError, match=r"vLLM on a CPU runs no mixture of experts \(qwen3_moe\) with trainer.lora; use"
    ):
        make_engine(experts, lora=LORA)


def test_matrices_merged_with_adapters_of_experts_replace_those_of_the_model_folder(tmp_path: Path) -> None:
    """Without vLLM's adapters, also on a CPU; updates leave out frozen blocks."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 128}
    folder = make_model_folder("qwen3_moe", tmp_path / "model", moe_intermediate_size=32, **sizes)
    with process_group(0, 1, str(tmp_path / "world")):
        trainer, generator = make_trainer(folder, lora=EXPERTS), make_engine(folder)
        check_merged(trainer, generator, tmp_path / "out")
        generator.close()
