"""The sum over a rank's roles, the GPUs that they fit, advice; and the generator's parts against the real engine."""

from __future__ import annotations

import dataclasses
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpcrl.cluster.layout import RoleLayout
from hpcrl.cluster.placement import Placement
from hpcrl.comm.weight_transfer import SendSchedule, UpdateGroup, WeightReceiver
from hpcrl.config import Config, TinyModel, load, parse
from hpcrl.engines.expert_routes import RouteShape
from hpcrl.engines.gen.generation_engine import Request, SamplingParams
from hpcrl.engines.gen.native import engine as native
from hpcrl.engines.train.fsdp2.spec import FSDP2Config
from hpcrl.launch.model_folder import inspect_model
from hpcrl.models.families import read_shape
from hpcrl.models.shape import CannotPlanError, ModelShape
from hpcrl.planner import generator
from hpcrl.planner.activations import Tokens
from hpcrl.planner.advice import advise
from hpcrl.planner.generator import rollout_transfer_parts
from hpcrl.planner.memory import CARDS, PROGRAM_BYTES, RankMemory, check_sizes, memory, usable
from hpcrl.planner.memory_parts import PHASES, Part, samples_of_an_update
from hpcrl.planner.traffic import StepWork, total_bytes
from hpcrl.planner.trainer import checkpoint_bytes, train_plan
from hpcrl.spec.tables import GEN_ENGINES
from hpcrl.spec.weight_layout import TensorShards, all_weights
from tests.engines.architectures import make_folder
from tests.engines.worlds import make_model_folder
from tests.planner.measuring import peak_bytes
from tests.planner.models import PUBLISHED
from tests.planner.test_parallel import LARGEST, run_of

GPU_NODES = {"components": {"all": {"roles": ["trainer"], "ranks_per_node": 8, "gpus_per_node": 8}}}


def shape_of(name: str) -> ModelShape:
    return read_shape(PUBLISHED[name][0])


def run(num_ranks: int = 8, **changes: Any) -> Config:
    layout = {"trainer": {"num_ranks": num_ranks}, "generator": {"colocate_with": "trainer"}}
    bf16 = {"trainer": {"param_dtype": "bfloat16"}, "generator": {"dtype": "bfloat16", "max_num_seqs": 32}}
    return parse({"layout": layout, "cluster": GPU_NODES, **bf16, **changes})


def kinds(config: Config, shape: ModelShape) -> dict[str, RankMemory]:
    return {"+".join(kind.roles): kind for kind in memory(config, RoleLayout.from_config(config), shape)}


def part(kind: RankMemory, role: str, name: str) -> Part:
    return next(part for part in kind.parts if (part.role, part.name) == (role, name))


def test_planned_constants_match_the_engine() -> None:
    assert native.PREFILL_TOKENS == generator.PREFILL_TOKENS


@pytest.mark.parametrize("cluster", [{"device": "cpu"}, {"device": "cuda"}], ids=str)
def test_a_float32_head_is_a_second_matrix_on_cpus(cluster: dict[str, str], tmp_path: Path) -> None:
    shape = read_shape(inspect_model(make_model_folder("qwen3", tmp_path / "qwen3")).config)
    settings = {"dtype": "bfloat16", "head_dtype": "float32", "max_num_seqs": 3}
    config = parse({"generator": settings, "cluster": cluster})
    engine = native.NativeEngine(
        tmp_path / "qwen3", max_num_seqs=3, max_length=9, dtype=torch.bfloat16, float32_head=True
    )
    assert engine._weights is not None
    held = engine._weights._converted_head
    planned = [
        p.num_bytes
        for kind in memory(config, RoleLayout.from_config(config), shape)
        for p in kind.parts
        if p.name == "float32 head"
    ]
    assert held is not None and planned == ([held.numel() * 4] if cluster["device"] == "cpu" else [])


@pytest.mark.parametrize("lengths", [(5, 40), (9, 55), (31, 33), (2, 62)])
def test_the_native_engine_uses_no_more_memory_than_planned(lengths: tuple[int, int], tmp_path: Path) -> None:
    """Weights exactly, the cache up to its bound, for any lengths of prompt and response."""
    prompt, response = lengths
    folder = make_model_folder("qwen3", tmp_path / "qwen3")
    shape = read_shape(inspect_model(folder).config)
    config = parse(
        {
            "data": {"max_prompt_tokens": prompt},
            "rollout": {"max_new_tokens": response},
            "generator": {"max_num_seqs": 3, "native": {"block_tokens": 4}},
        }
    )
    engine = native.NativeEngine(
        folder, max_num_seqs=3, max_length=prompt + response, dtype=torch.float32, block_tokens=4
    )
    engine.add([Request(i, list(range(prompt)), SamplingParams(response, ignore_eos=True), i) for i in range(3)])
    while engine.progress():
        engine.step(8)
    cache = sum(layer.numel() * layer.element_size() for layer in engine._cache.layers)
    assert engine._weights is not None
    own = [engine._weights.embedding, engine._weights.norm]
    for layer in engine._weights.layers:
        own += [getattr(layer, name) for name in ("attention_norm", "qkv", "qk_norm", "out", "mlp_norm")]
        own += [layer.mlp.gate_up, layer.mlp.down]
    planned = {p.name: p.num_bytes for p in generator.generator_parts(config, shape, (), ())}
    repeated = shape.num_layers * (shape.num_heads + shape.num_kv_heads - 2) * shape.head_dim * 4  # norms of each head
    assert planned["weights"] + repeated == sum(t.numel() * t.element_size() for t in own if t is not None)
    copied = 1 + 1 / shape.num_layers
    assert planned["KV cache"] / 2 < cache * copied <= planned["KV cache"]
    assert cache == engine._cache.capacity * 4 * generator.token_bytes(config, shape)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_products_with_all_experts_are_planned(family: str, tmp_path: Path) -> None:
    """A mixture that decodes with deterministic=true computes all experts of each slot; gpt_oss clamps."""
    folder = make_folder(family, tmp_path / family)
    shape = read_shape(inspect_model(folder).config)
    slots, settings = 40, {"generator": {"max_num_seqs": 40, "dtype": "float32"}, "data": {"max_prompt_tokens": 1}}
    alone, plan = parse(settings), parse(settings | {"deterministic": True})
    planned = {p.name: p.num_bytes for p in generator.generator_parts(plan, shape, (), ())}["all experts"]
    assert "all experts" not in {p.name for p in generator.generator_parts(alone, shape, (), ())}
    engine = native.NativeEngine(folder, max_num_seqs=slots, max_length=8, dtype=torch.float32, deterministic=True)
    model, layer = engine._model, engine._weights.layers[-1]  # type: ignore[union-attr]
    x, chosen = torch.randn(slots, shape.hidden_size), torch.zeros(slots, shape.experts_per_token, dtype=torch.int64)
    with torch.no_grad():
        peak = peak_bytes(lambda: model._of_all_experts(layer.mlp, x, chosen), tmp_path / "trace.json")
    assert planned / 1.1 <= peak <= planned + 1024  # indices


def test_a_cache_budget_of_the_native_engine_is_planned_or_refused() -> None:
    """Qwen2.5-7B: 56 KiB a token in bf16, sequences of 1,280 tokens, 40 blocks of 32 each, 70 MiB."""
    shape = shape_of("Qwen2.5-7B")
    planned = {}
    for gib in (None, 1.0, 0.0683593750, 0.06):
        config = run(generator={"dtype": "bfloat16", "max_num_seqs": 32, "native": {"kv_cache_gib": gib}})
        planned[gib] = next(p.num_bytes for p in generator.generator_parts(config, shape, (), ()) if "KV" in p.name)
        problems = [p.text for p in check_sizes(config, RoleLayout.from_config(config), shape)]
        assert bool(problems) == (gib == 0.06)
    assert problems == [
        "generator.native.kv_cache_gib: 0.06 GiB of KV cache, but 1280 tokens, the longest prompt and response, "
        "need 0.06836; raise it, or lower data.max_prompt_tokens or rollout.max_new_tokens"
    ]
    one_layer = 29 / 28
    assert planned[None] == pytest.approx(32 * 70 * 2**20 * one_layer)
    assert planned[1.0] == pytest.approx(2**30 * one_layer, rel=2e-3) and planned[1.0] <= 2**30 * one_layer
    assert planned[0.0683593750] == pytest.approx(70 * 2**20 * one_layer)


@pytest.mark.parametrize(("trainers", "generators"), [(1, 1), (4, 2), (3, 2)])
def test_the_plan_of_an_update_matches_its_transfer(trainers: int, generators: int) -> None:
    """Qwen2.5-0.5B in two steps and more: the buffers of both sides, and the bytes sent and received."""
    shape, layout = shape_of("Qwen2.5-0.5B"), {"trainer": {"num_ranks": trainers}}
    apart = layout | {"generator": {"num_ranks": generators, "colocate_with": None}}
    config = run(layout=apart, cluster={})
    ranks = RoleLayout.from_config(config)
    senders, receivers = ranks.ranks["trainer"], ranks.ranks["generator"]
    held = [TensorShards.rows(p.name, "float32", p.shape, trainers).of(senders) for p in shape.parameters]
    needs = [all_weights(config, shape, item.name, item.shape, 0, 1) for item in held]
    channels = {i: UpdateGroup(None, (*senders, rank), held, {rank: needs}) for i, rank in enumerate(receivers)}
    found = [SendSchedule(rank, channels) for rank in senders]
    arriving = WeightReceiver(receivers[0], channels[0])
    received, sent = generator.update_traffic(config, ranks, shape)
    assert received == 2 * shape.num_parameters <= arriving.num_bytes <= 1.05 * received
    assert sent == received * generators // trainers
    planned = {
        part.name: part.num_bytes for part in rollout_transfer_parts(config, ranks, shape, ("trainer", "generator"))
    }
    assert max(s.most_bytes for s in found) * 2 == pytest.approx(planned["weights to send"], rel=0.02)
    widest, largest = max(sum(sizes.values()) for sizes in arriving.sizes), 2 * shape.vocab_size * shape.hidden_size
    assert 2 * widest + largest == pytest.approx(planned["weights received"], rel=0.02)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_plan_of_an_update_to_a_replica_of_two_matches_its_transfer(engine: str) -> None:
    """A small model in one step, and Qwen2.5-0.5B in several. SGLang's first rank gets everything, vLLM's ranks a half
    each, except for norms, a half of the padded vocabulary, and biases."""
    for shape in (read_shape(TinyModel().hf_config()), shape_of("Qwen2.5-0.5B")):
        replica = {"num_ranks": 2, "tensor_parallel": 2, "colocate_with": None}
        of_engine = {"engine": engine, "dtype": "bfloat16"}
        config = run(layout={"trainer": {"num_ranks": 1}, "generator": replica}, generator=of_engine, cluster={})
        layout, need = RoleLayout.from_config(config), GEN_ENGINES[engine].required_slices
        held = [TensorShards.unsharded(p.name, "float32", p.shape, [1]) for p in shape.parameters]
        needs = {
            2 + index: [need(config, shape, item.name, item.shape, index, 2) for item in held] for index in range(2)
        }
        channel = UpdateGroup(None, (1, 2, 3), held, needs)
        first, second = (WeightReceiver(rank, channel) for rank in (2, 3))
        received, sent = generator.update_traffic(config, layout, shape)
        assert received <= first.num_bytes <= 1.05 * received and sent <= first.num_bytes + second.num_bytes
        half = 1.0 if engine == "sglang" else 0.5
        assert received == pytest.approx(half * 2 * shape.num_parameters, rel=0.05)
        to_send, to_get = rollout_transfer_parts(config, layout, shape, ("trainer", "generator"))
        widest = max(sum(sizes.values()) for sizes in first.sizes)
        largest = 2 * shape.vocab_size * shape.hidden_size
        assert to_get.num_bytes == pytest.approx(2 * widest + largest, rel=0.02)
        assert to_send.num_bytes == pytest.approx(2 * SendSchedule(1, {0: channel}).most_bytes, rel=0.02)


def test_a_rank_of_a_replica_of_eight_gets_an_eighth_of_the_experts() -> None:
    """Qwen3-235B-A22B on eight ranks in bf16, in 54.9 GiB each instead of 437.9: an eighth of all, but each of 4 key
    and value heads on two ranks, and routers and norms on all."""
    shape = shape_of("Qwen3-235B-A22B")
    replica = {"num_ranks": 200, "tensor_parallel": 8, "colocate_with": None}
    of_engine = {"engine": "vllm", "dtype": "bfloat16"}
    config = run(layout={"trainer": {"num_ranks": 256}, "generator": replica}, generator=of_engine, cluster={})
    keys, whole = 94 * 2 * 4 * 128 * 4096, 94 * (128 * 4096 + 2 * 4096 + 2 * 128) + 4096
    each = 2 * ((shape.num_parameters - keys - whole) // 8 + keys // 4 + whole)
    layout = RoleLayout.from_config(config)
    assert generator.update_traffic(config, layout, shape) == (each, 8 * each * 25 // 256)
    assert each / 2**30 == pytest.approx(54.9, abs=0.05)


def test_roles_of_one_rank_add_up() -> None:
    """Without offload, FSDP2 and the native generator keep their memory while the other works."""
    shape = shape_of("Qwen2.5-7B")
    layout = {"trainer": {"num_ranks": 8}, "generator": {"colocate_with": "trainer"}, "offload": "never"}
    kind = kinds(run(layout=layout), shape)["trainer+generator"]
    assert part(kind, "trainer", "weights").num_bytes == pytest.approx(4 * shape.num_parameters / 8, rel=1e-3)
    assert part(kind, "generator", "weights").num_bytes == 2 * shape.num_parameters
    resident = sum(part(kind, *names).num_bytes for names in (("trainer", "weights"), ("generator", "KV cache")))
    assert kind.total("train") > kind.total("generate") > resident
    alone, apart = 0, {"trainer": {"num_ranks": 8}, "generator": {"num_ranks": 8, "colocate_with": None}}
    for one in kinds(run(layout=apart, cluster={"device": "cuda"}), shape).values():
        assert one.on_gpu
        alone += sum(p.num_bytes for p in one.parts if "train" in p.during and p.name != "NCCL buffers")
    assert kind.total("train") + kind.total("train", on_host=True) == alone - PROGRAM_BYTES  # one process


def of_7b(*words: str) -> RankMemory:
    """The ranks of slurm/rlvr_7b.sbatch."""
    return kinds(load(["+cluster=slurm", "+experiment=rlvr_7b", *words]), shape_of("Qwen2.5-7B"))["trainer+generator"]


@pytest.mark.parametrize("recipe", ["rlvr_7b", "rlvr_7b_async"])
def test_the_7b_recipes_fit_80_gb_and_keep_parameters_within_a_node(recipe: str) -> None:
    config, shape = load(["+cluster=slurm", f"+experiment={recipe}"]), shape_of("Qwen2.5-7B")
    layout = RoleLayout.from_config(config)
    assert all(kind.fits(CARDS["80 GB"]) for kind in memory(config, layout, shape))
    ranks = layout.ranks["trainer"]
    shards = config.trainer.section(FSDP2Config).num_shards(len(ranks))
    copies = [ranks[first : first + shards] for first in range(0, len(ranks), shards)]
    nodes = Placement.from_config(config, layout).nodes
    assert len(copies) == 2 and all(any({*copy} <= {*node} for node in nodes) for copy in copies)
    work = StepWork.of(config, len(layout.division("trainer").groups))
    sent = total_bytes(train_plan(config).step_traffic(config, shape, len(ranks), work))
    assert sent / (config.cluster.link_gb_per_s * 1e9) < 10.0


def test_offload_makes_7b_fit_on_80_gb_gpus() -> None:
    """With the native generator 4 GPUs need offload, 8 do not."""
    peaks = {}
    for num_ranks, mode in product((4, 8), ("never", "auto", "always")):
        words = ["generator.engine=native", f"layout.trainer.num_ranks={num_ranks}", f"layout.offload={mode}"]
        words += ["trainer.fsdp2.replicas=1", "trainer.max_tokens_per_micro_batch=8192"]
        peaks[num_ranks, mode] = of_7b(*words).peak()[1]
    assert peaks[8, "always"] < peaks[8, "auto"] == peaks[8, "never"] < usable(CARDS["80 GB"])
    assert peaks[4, "auto"] == peaks[4, "always"] < usable(CARDS["64 GB"])
    assert peaks[4, "never"] > usable(CARDS["80 GB"])


def test_a_vllm_generator_stays_within_its_share_of_gpu_memory() -> None:
    """Qwen2.5-7B by hand: 14.2 GiB of weights, .34 a response, and 1.3 to decode and prefill."""
    card, response = CARDS["80 GB"], 56 * 2**10 * 6144
    turns, beside = of_7b(), of_7b("layout.offload=never")
    assert turns.offloads and not beside.offloads
    assert (turns.fits(card), turns.responses(card)) == (True, 64)
    assert turns.peak(least=True)[1] < usable(CARDS["48 GB"]) < beside.peak(least=True)[1]
    room = {share: of_7b(f"generator.vllm.gpu_memory_utilization={share}").responses(card) for share in (0.25, 0.3)}
    assert room[0.25] > 0 and (room[0.3] - room[0.25]) == pytest.approx(0.05 * card / response, abs=1)
    assert not of_7b("generator.vllm.gpu_memory_utilization=0.15").fits(card)
    given = of_7b("generator.vllm.gpu_memory_utilization=0.15", "generator.vllm.kv_cache_gib=10")
    assert given.fits(card) and given.responses(card) == 10 * 2**30 // response
    (problem,) = check_sizes(
        config := load(["+cluster=slurm", "+experiment=rlvr_7b", "generator.vllm.kv_cache_gib=0.3"]),
        RoleLayout.from_config(config),
        shape_of("Qwen2.5-7B"),
    )
    assert problem.text == (
        "generator.vllm.kv_cache_gib: 0.3 GiB of KV cache, but 6144 tokens, the longest prompt and response, need "
        "0.335; raise it, or lower data.max_prompt_tokens or rollout.max_new_tokens"
    )


@pytest.mark.parametrize(("trainers", "wrong"), [(4, ""), (3, "there are 3, and replicas begin at number 0")])
def test_a_vllm_replica_on_trainer_ranks_begins_at_a_multiple_of_its_ranks(trainers: int, wrong: str) -> None:
    replica = {"colocate_with": "trainer", "num_ranks": 2, "tensor_parallel": 2}
    config = run(layout={"trainer": {"num_ranks": trainers}, "generator": replica}, generator={"engine": "vllm"})
    found = check_sizes(config, RoleLayout.from_config(config), shape_of("Qwen2.5-7B"))
    assert [problem.text.endswith(wrong) for problem in found] == [True] * bool(wrong)


@pytest.mark.parametrize("lent", [False, True])
def test_only_the_trainers_weights_are_on_the_gpu_to_be_published(lent: bool) -> None:
    """Other engines' are in host memory, also if the generator reads the trainer's."""
    shape = shape_of("Qwen2.5-7B")
    layout = {"trainer": {"num_ranks": 2 - lent}, "generator": {"colocate_with": "trainer"}, "offload": "always"}
    own = {"trainer": {"param_dtype": "float32"}, "generator": {"dtype": "float32"}}
    config = run(layout=layout, algorithm={"kl_loss_coef": 0.1}, **own)
    kind = kinds(config, shape)["trainer+generator+reference"]
    assert kind.on_gpu and generator.shares_weights(config, RoleLayout.from_config(config)) == lent

    def on_gpu(phase: Any) -> set[str]:
        return {part.role for part in kind.parts_of(phase) if part.name == "weights"}

    assert on_gpu("reference") >= {"trainer", "reference"}
    assert on_gpu("publish") == ({"trainer"} if lent else {"trainer", "generator"})
    assert on_gpu("generate") == ({"trainer"} if lent else {"generator"})


def test_engines_that_take_turns_do_not_add_up() -> None:
    """Qwen3-235B-A22B by hand: a rank's eighth of the weights in bf16 is 55 GiB, its training state 32."""
    config = run_of(256, generator=8, **LARGEST | {"recompute": "full"})
    cluster = config.cluster.model_copy(update={"device": "cuda"})
    kind = kinds(config.model_copy(update={"cluster": cluster}), shape_of("Qwen3-235B-A22B"))["trainer+generator"]
    training, generating = kind.total("train"), kind.total("generate", least=True)
    assert part(kind, "trainer", "optimizer").during == tuple(
        phase for phase in PHASES if phase not in ("generate", "publish")
    )
    assert generating < part(kind, "generator", "weights").num_bytes * 2
    assert kind.peak(least=True)[1] < training + generating
    assert kind.total("generate", on_host=True) >= part(kind, "trainer", "gradients").num_bytes
    assert kind.total("train", on_host=True) == kind.total("generate", on_host=True), "its host memory is kept"


def test_a_paged_cache_takes_the_remaining_memory() -> None:
    parts = (
        Part("generator", "weights", 10),
        Part("generator", "KV cache", 100, ("generate",), least=5),
        Part("trainer", "activations", 30, ("train",)),
    )
    kind = RankMemory((1,), ("trainer", "generator"), parts, True, cache_bytes=5)
    assert kind.peak(least=True) == ("train", 40)
    assert usable(100) == 90
    assert kind.responses(100) == 16  # (90 - 10) / 5
    assert kind.responses(1000) == 20  # all slots
    assert not kind.fits(40)
    assert kind.responses(40) == 0


def test_a_generator_starts_with_its_full_share_of_memory() -> None:
    parts = (Part("trainer", "weights", 30), Part("generator", "KV cache", 100, ("generate",), least=5))
    beside = RankMemory((1,), ("trainer", "generator"), parts, True, cache_bytes=5, generator_share=0.6)
    assert beside.start(80) == 78 and beside.fits(80)
    assert beside.start(70) == 72 and not beside.fits(70) and beside.peak(least=True)[1] < usable(70)
    away = dataclasses.replace(parts[0], during=("train",))
    assert RankMemory((1,), beside.roles, (away, parts[1]), True, 5, True, 0.6).fits(70)
    assert dataclasses.replace(beside, generator_share=1.0).fits(70)


def test_offload_moves_the_state_to_the_host() -> None:
    shape = shape_of("Qwen2.5-7B")
    layout = {"trainer": {"num_ranks": 8}, "generator": {"colocate_with": "trainer"}, "offload": "never"}
    offloaded = run(layout=layout, trainer={"param_dtype": "bfloat16", "fsdp2": {"cpu_offload": True}})
    here, there = (kinds(config, shape)["trainer+generator"] for config in (run(layout=layout), offloaded))
    state = 4 * (shape.num_parameters // 8) * 3
    assert here.total("train") - there.total("train") > state
    assert there.total("train", on_host=True) - here.total("train", on_host=True) > state


def test_advised_changes_suffice_and_all_are_needed() -> None:
    """The overrides from advise() make the run fit, and without the last of them it does not."""
    config, shape = run(), shape_of("Qwen2.5-7B")
    card = CARDS["80 GB"]
    assert not all(kind.fits(card) for kind in memory(config, RoleLayout.from_config(config), shape))
    advice = advise(config, shape, card)
    assert advice is not None
    words, changed = advice
    assert all(kind.fits(card) for kind in memory(changed, RoleLayout.from_config(changed), shape))
    assert any(word.startswith("trainer.max_tokens_per_micro_batch=") for word in words)
    assert "trainer.param_dtype=bfloat16" not in words  # it already is bfloat16
    again = advise(changed, shape, card)
    assert again is not None
    assert again[0] == []


@pytest.mark.slow
def test_no_advice_is_given_if_no_change_suffices() -> None:
    """The native generator has a whole copy of 235 billion numbers on every rank."""
    assert advise(run(), shape_of("Qwen3-235B-A22B"), CARDS["141 GB"]) is None


def test_an_engine_with_unknown_memory_is_named() -> None:
    config = run(trainer={"engine": "tests.planner.models:UNPLANNED"})
    with pytest.raises(CannotPlanError, match="UNPLANNED"):
        memory(config, RoleLayout.from_config(config), shape_of("Qwen2.5-7B"))


def test_key_value_heads_are_replicated_if_ranks_outnumber_them() -> None:
    """Qwen3-235B-A22B has 4 key and value heads: on 8 ranks each holds one of them."""
    shape = shape_of("Qwen3-235B-A22B")
    four, eight = (run_of(8, generator=size) for size in (4, 8))
    assert generator.token_bytes(four, shape) == generator.token_bytes(eight, shape) == 2 * 94 * 128 * 4


def test_replayed_experts_are_counted() -> None:
    """48 layers of 8 experts, a byte each; one with more than 255 experts takes two."""
    shape = shape_of("Qwen3-30B-A3B")
    assert shape.route_bytes == 384 == RouteShape.of(shape).field.width
    wide = dataclasses.replace(shape, num_experts=512)
    assert wide.route_bytes == RouteShape.of(wide).field.width * np.dtype(RouteShape.of(wide).field.dtype).itemsize
    sizes = {"num_prompts": 8, "group_size": 4, "max_new_tokens": 1000}
    settings = {"rollout": sizes, "data": {"max_prompt_tokens": 24}, "trainer": {"router_replay": True}}
    (kind,) = kinds(run(**settings), shape).values()
    assert part(kind, "trainer", "routes").num_bytes == 2 * 4 * 1024 * 384
    assert part(kind, "generator", "routes").num_bytes == (4 * 1024 + 2 * 32 * 1000) * 384
    assert all(part.on_host for part in kind.parts if part.name == "routes")
    assert "routes" not in {part.name for part in next(iter(kinds(run(), shape).values())).parts}


def test_a_dense_model_has_no_routes_to_count() -> None:
    config = run(trainer={"router_replay": True})
    problems = check_sizes(config, RoleLayout.from_config(config), shape_of("Qwen2.5-7B"))
    assert [problem.text for problem in problems] == ["trainer.router_replay: qwen2 has no experts; set it to false"]


@pytest.mark.parametrize("engine", ["fsdp2", "deepspeed", "megatron"])
def test_keys_of_routers_are_refused_for_models_without_them(engine: str) -> None:
    """With the policy's model: a critic's and another reference's have no such keys."""
    config = run(trainer={"engine": engine, engine: {"aux_loss": 0.01}})
    problems = check_sizes(config, RoleLayout.from_config(config), shape_of("Qwen2.5-7B"))
    assert f"trainer.{engine}.aux_loss: 0.01, but qwen2 has no experts; use 0" in [some.text for some in problems]
    mixture = check_sizes(config, RoleLayout.from_config(config), shape_of("Qwen3-30B-A3B"))
    assert not any("aux_loss" in problem.text for problem in mixture)
    for other in (config.of_critic(), config.of_reference()):
        assert getattr(other.trainer, engine).aux_loss == 0.0
    if engine != "deepspeed":
        config = run(trainer={"engine": engine, engine: {"expert_bias_rate": 0.001}})
        problems = check_sizes(config, RoleLayout.from_config(config), shape_of("Qwen3-30B-A3B"))
        assert any("expert_bias_rate: 0.001, but the routers of qwen3_moe have no bias" in p.text for p in problems)


@pytest.mark.parametrize("parts", [["experts"], ["decoder", "experts"]], ids="+".join)
def test_matrices_with_adapters_of_experts_are_sent_merged(parts: list[str]) -> None:
    """Qwen3-30B-A3B: 48 layers of 128 experts of 3 * 768 * 2048 numbers, which are sent with the layer's router of
    128 * 2048. Its attention has q of 4096, k and v of 512 and the output's 4096 rows or columns of 2048, and two norms
    of 128 in the same block."""
    shape, layers = shape_of("Qwen3-30B-A3B"), 48
    mixture = 128 * 3 * 768 * 2048 + 128 * 2048
    attention = (4096 + 2 * 512 + 4096) * 2048 + 2 * 128
    numbers = layers * (mixture + attention * ("decoder" in parts))
    apart = {"trainer": {"num_ranks": 4}, "generator": {"colocate_with": None, "num_ranks": 2}}
    trainer = {"param_dtype": "bfloat16", "lora": {"rank": 16, "parts": parts}}
    config = run(layout=apart, trainer=trainer, cluster={}, generator={"dtype": "bfloat16"})
    layout = RoleLayout.from_config(config)
    assert generator.update_traffic(config, layout, shape) == (2 * numbers, 2 * numbers * 2 // 4)
    assert "adapters" not in {p.name for p in kinds(config, shape)["generator"].parts}
    assert part(kinds(config, shape)["generator"], "generator", "weights").num_bytes == 2 * shape.num_parameters
    # The largest matrix, gate and up of 32 experts on a rank: twice in float32, and in float32 as it is sent.
    adapter = 4 * 128 * 16 * (2048 + 2 * 768)
    merged = part(kinds(config, shape)["trainer"], "trainer", "merged matrix").num_bytes
    assert merged == 3 * 4 * 32 * 2 * 768 * 2048 + adapter
    # The received matrix that a generator rank assembles.
    received = part(kinds(config, shape)["generator"], "generator", "weights received").num_bytes
    assert received >= 2 * 128 * 2 * 768 * 2048
    plain = run(layout=apart, trainer=trainer | {"lora": {"rank": 16}}, cluster={})
    assert "merged matrix" not in {p.name for p in kinds(plain, shape)["trainer"].parts}


def test_adapters_need_no_second_model_and_only_they_are_sent() -> None:
    """Rank 16 at q and v of Qwen2.5-7B: 28 layers of 16 * (3584 + 3584) and 16 * (3584 + 512) numbers."""
    shape, numbers = shape_of("Qwen2.5-7B"), 28 * 16 * (2 * 3584 + 3584 + 512)
    apart = {"trainer": {"num_ranks": 4}, "generator": {"colocate_with": None, "num_ranks": 2}}
    lora = {"rank": 16, "target_modules": ["q_proj", "v_proj"]}
    kl = {"advantage_estimator": "grpo", "kl_loss_coef": 0.1}
    with_kl = run(algorithm=kl, layout=apart, cluster={})
    config = run(algorithm=kl, layout=apart, trainer={"param_dtype": "bfloat16", "lora": lora}, cluster={})
    assert "trainer+reference" in kinds(with_kl, shape) and {*kinds(config, shape)} == {"trainer", "generator"}
    layout = RoleLayout.from_config(config)
    assert generator.update_traffic(config, layout, shape) == (2 * numbers, 2 * numbers * 2 // 4)
    assert checkpoint_bytes(config, shape) == 3 * 4 * numbers + 4 * 2 * 2 * 28
    weights = part(kinds(config, shape)["trainer"], "trainer", "weights").num_bytes
    assert 0 <= weights - (2 * shape.num_parameters + 4 * numbers) / 4 < 1 << 20
    assert part(kinds(config, shape)["generator"], "generator", "adapters").num_bytes == 2 * numbers
    config = run(trainer={"lora": {"rank": 2, "target_modules": ["q_proj", "query"]}})
    (problem,) = check_sizes(config, RoleLayout.from_config(config), shape)
    assert problem.text == (
        "trainer.lora.target_modules: query: the model has none, whose linear layers are q_proj, k_proj, v_proj, "
        "o_proj, gate_proj, up_proj, down_proj"
    )
    config = run(trainer={"lora": {"rank": 2, "parts": ["decoder", "vision"]}})
    (problem,) = check_sizes(config, RoleLayout.from_config(config), shape)
    assert problem.text == "trainer.lora.parts: qwen2 has no linear layers in vision; leave it out"


@pytest.mark.parametrize(
    ("pipeline", "tokens", "longest"),
    [("sft", 4096, 4096), ("dpo", 2 * 4096, 4096), ("distill", 4096, 4096)],
    ids=["answers", "both answers of a pair", "answers beside rollouts"],
)
def test_rows_of_files_are_planned_at_their_own_limit(pipeline: str, tokens: int, longest: int) -> None:
    """data.max_sequence_tokens, not a prompt of data.max_prompt_tokens and a generated response."""
    extra: dict[str, Any] = {"imitation": {"data": "rows.jsonl"}} if pipeline == "distill" else {}
    data = {"train": "rows.jsonl", "max_prompt_tokens": 64, "max_sequence_tokens": 4096}
    given = {"pipeline": pipeline, "model": {"path": "model"}, "teacher": {"path": "teacher"}} | extra
    config = parse(given | {"data": data, "trainer": {"max_tokens_per_micro_batch": 1024}})
    assert Tokens.of(config, 8) == Tokens(tokens, tokens, longest)
    assert StepWork.of(config, 1).num_tokens == config.max_row_tokens * samples_of_an_update(config)
    assert config.max_row_tokens == 4096
    free = parse(given | {"data": data | {"max_sequence_tokens": None}})
    assert free.max_row_tokens == free.max_turn_tokens < 4096
    own = parse({"pipeline": "online_dpo", "data": data, "trainer": {"max_tokens_per_micro_batch": 16}})
    assert Tokens.of(own, 8) == Tokens(2 * own.max_row_tokens, 2 * own.max_row_tokens, own.max_row_tokens)
