"""Experts of mixtures distributed over data-parallel ranks of FSDP2: other settings and families, an expert without
tokens, clipping, checkpoints, exports and refusals. tests/contracts/test_train_splits.py compares the splits with
transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, AutoModelForCausalLM

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import TrainerConfig, parse
from hpcrl.config.reading import ConfigError
from hpcrl.engines.expert_routes import RouteShape
from hpcrl.engines.train.fsdp2 import engine as fsdp2
from hpcrl.engines.train.fsdp2.critic import FSDP2Critic
from hpcrl.engines.train.fsdp2.engine import FSDP2Engine
from hpcrl.engines.train.fsdp2.exchange import Axis
from hpcrl.engines.train.fsdp2.expert_parallel import ExpertParallel
from hpcrl.engines.train.fsdp2.spec import FSDP2Config
from hpcrl.engines.train.fsdp2.weights import local
from hpcrl.models.families import read_shape
from hpcrl.planner.memory import check_sizes
from hpcrl.rollout.batch import Batch
from hpcrl.spec.trajectory import FIELDS, declare
from tests.checkpoint.writing import write_files
from tests.contracts.train.fsdp2 import gradients
from tests.engines.architectures import tiny_config
from tests.engines.test_resharding import full_tensors, same
from tests.engines.worlds import (
    EXPERTS,
    Weighted,
    make_batch,
    make_model_folder,
    norms_of,
    process_group,
    run_ranks,
    worst_difference,
)

pytestmark = pytest.mark.numerics

LENGTHS = (9, 21, 4, 14, 5)
ROUTES = RouteShape(num_layers=2, experts_per_token=2, num_experts=4)
SETTINGS: dict[str, dict[str, Any]] = {
    "alone": {},
    "recomputed": {"activation_checkpointing": True},
    "unpacked": {"packing": "off"},
    "offloaded": {"cpu_offload": True},
    "losses": {"aux_loss": 0.3, "z_loss": 0.02},
}
FAMILIES = ("qwen2_moe", "mixtral", "gpt_oss")
OPTIMIZERS = ("muon", "adamw8bit")
EXPERT = ("experts.gate_up_proj", "experts.down_proj")


def engine(folder: Path, replay: bool = False, trainer: dict[str, Any] | None = None, **own: Any) -> FSDP2Engine:
    config = TrainerConfig(lr=1e-2, logits_chunk_tokens=8, **(trainer or {}))
    return FSDP2Engine(config, folder, own=FSDP2Config(**own), dtype=torch.float32, total_steps=10, replay=replay)


def rows_of(trainer: FSDP2Engine, batch: Batch) -> Batch:
    """A rank's rows; with two ranks, only the first has some of the last micro-batch."""
    return batch.select(list(range(trainer.data_parallel_rank, batch.num_sequences, trainer.data_parallel_size)))


def plan_of(batch: Batch) -> list[list[int]]:
    rows = list(range(batch.num_sequences))
    return [rows[:1], rows[1:2], rows[2:]]


def gradients_of(trainer: FSDP2Engine, batch: Batch) -> dict[str, Tensor]:
    mine = rows_of(trainer, batch)
    return gradients(trainer, mine, plan_of(mine), Weighted(0.7, entropy=True), norms_of(batch))


def replayed_gradients(folder: Path, num_experts: int, **own: Any) -> dict[str, Tensor]:
    """The gradients of a batch whose tokens were routed at random to the first experts."""
    batch = make_batch(LENGTHS)
    draws = torch.rand(batch.num_tokens, ROUTES.num_layers, num_experts, generator=torch.manual_seed(3))
    declare(ROUTES.field)
    try:
        batch.routes = draws.argsort(-1)[..., : ROUTES.experts_per_token].flatten(1).to(torch.uint8)
        return gradients_of(engine(folder, replay=True, **own), batch)
    finally:
        del FIELDS["routes"]


def step(trainer: FSDP2Engine) -> float:
    """A step; returns the norm of the gradients on rank 0."""
    batch = make_batch(LENGTHS)
    mine = rows_of(trainer, batch)
    stats = trainer.train_step(mine, plan_of(mine), Weighted(0.7, entropy=True), norms_of(batch))
    return stats["actor/grad_norm"].total if "actor/grad_norm" in stats else 0.0


def clipped_step(folder: Path, **own: Any) -> tuple[float, dict[str, Tensor]]:
    """The norm and the weights after a step with much smaller gradients, and decay. Adam's steps would hide the
    clipping, if its epsilon were small."""
    trainer = engine(folder, trainer={"max_grad_norm": 0.01, "weight_decay": 0.5, "eps": 1.0}, **own)
    return step(trainer), {name: tensor.clone() for name, tensor in trainer.named_weights()}


def steps_of(folder: Path, optimizer: str, **own: Any) -> dict[str, Tensor]:
    """The weights after two steps."""
    trainer = engine(folder, trainer={"optimizer": optimizer}, **own)
    for _ in range(2):
        step(trainer)
    return {name: tensor.clone() for name, tensor in trainer.named_weights()}


def scores_of(folder: Path, **own: Any) -> dict[str, Tensor]:
    """Log-probs in bfloat16 and of a reference, and a critic's values."""
    batch = make_batch(LENGTHS)
    given: dict[str, Any] = {"own": FSDP2Config(**own), "dtype": torch.float32, "total_steps": 1}
    policy = FSDP2Engine(TrainerConfig(param_dtype="bfloat16"), folder, **given)
    reference = FSDP2Engine(TrainerConfig(), folder, trainable=False, **given)
    critic = FSDP2Critic(TrainerConfig(), folder, **given)
    local(critic.model.get_parameter("hf.score.weight")).data.fill_(0.3)
    mine = rows_of(policy, batch)
    plan = plan_of(mine)
    found = {"bfloat16": policy.logprobs(mine, plan, 0.7), "reference": reference.logprobs(mine, plan, 0.7)}
    return found | {"values": critic.values(mine, plan)}


def continued(folder: Path, source: Path, target: Path, **own: Any) -> tuple[dict[str, Tensor], list[str]]:
    """Load a checkpoint and save it; return the weights, and warnings."""
    trainer = engine(folder, **own)
    warnings = trainer.load(source)
    write_files(target, trainer.snapshot())
    dist.barrier()
    weights = dict(trainer.named_weights())
    step(trainer)  # the state is complete
    return weights, warnings


def bytes_of_experts(trainer: FSDP2Engine) -> tuple[int, int]:
    """Bytes of the experts that a rank keeps, and that it has during a command."""

    def now() -> int:
        return sum(local(tensor).nbytes for name, tensor in trainer.weights.items() if name.endswith(EXPERT))

    kept = now()
    for module in (module for module in trainer.model.modules() if isinstance(module, FSDPModule)):
        module.unshard()
    gathered = now()
    trainer._reshard()
    assert now() == kept
    return kept, gathered


def _two_ranks(folders: dict[str, Path], states: dict[str, Path]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    folder, batch = folders["qwen3_moe"], make_batch(LENGTHS)
    for name, own in SETTINGS.items():
        found[name] = gradients_of(engine(folder, expert_parallel=2, **own), batch)
    for family in FAMILIES:
        found[family] = gradients_of(engine(folders[family], expert_parallel=2), batch)
    fsdp2.SMALL_MODEL_BYTES = 0
    found["layer by layer"] = gradients_of(engine(folder, expert_parallel=2, activation_checkpointing=True), batch)
    fsdp2.SMALL_MODEL_BYTES = 4 << 30
    found["replayed"] = replayed_gradients(folder, 4, expert_parallel=2)
    found["one rank's experts"] = replayed_gradients(folder, 2, expert_parallel=2)
    frozen = engine(folder, trainer={"freeze": ["router", "embeddings"]}, expert_parallel=2)
    found["frozen"] = gradients_of(frozen, batch)
    found["clipped"] = clipped_step(folder, expert_parallel=2)
    found["scores"] = scores_of(folder, expert_parallel=2)
    found |= {name: steps_of(folders["wide"], name, expert_parallel=2) for name in OPTIMIZERS}
    trainer = engine(folder, expert_parallel=2)
    found["bytes"] = [bytes_of_experts(each) for each in (trainer, engine(folder))]
    step(trainer)
    write_files(states["apart"], trainer.snapshot())
    trainer.export_hf(states["exported"])
    found["weights"] = {name: tensor.clone() for name, tensor in trainer.named_weights()}
    dist.barrier()
    found["back"] = continued(folder, states["one"], states["apart again"], expert_parallel=2)
    found["summary"] = trainer.config_summary()["expert_parallel"], trainer.num_parameters
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    wide = make_model_folder("qwen3_moe", root / "wide", moe_intermediate_size=64)  # with 8-bit moments of half of it
    return {name: make_model_folder(name, root / name) for name in ("qwen3_moe", *FAMILIES)} | {"wide": wide}


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("states")
    found = {name: root / name for name in ("one", "apart", "apart again", "one again", "exported")}
    for name, folder in found.items():
        if name != "exported":
            folder.mkdir()
    return found


@pytest.fixture(scope="module")
def one_rank(
    folders: dict[str, Path], states: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What one rank computes; and a checkpoint."""
    folder, batch = folders["qwen3_moe"], make_batch(LENGTHS)
    with process_group(0, 1, str(tmp_path_factory.mktemp("group") / "world")):
        found: dict[str, Any] = {family: gradients_of(engine(folders[family]), batch) for family in FAMILIES}
        found["plain"] = gradients_of(engine(folder), batch)
        found["losses"] = gradients_of(engine(folder, **SETTINGS["losses"]), batch)
        found["replayed"] = replayed_gradients(folder, 4)
        found["one rank's experts"] = replayed_gradients(folder, 2)
        found["frozen"] = gradients_of(engine(folder, trainer={"freeze": ["router", "embeddings"]}), batch)
        found["clipped"] = clipped_step(folder)
        found["scores"] = scores_of(folder)
        found |= {name: steps_of(folders["wide"], name) for name in OPTIMIZERS}
        trainer = engine(folder)
        step(trainer)
        write_files(states["one"], trainer.snapshot())
        found["num_parameters"] = trainer.num_parameters
    return found


@pytest.fixture(scope="module")
def two_ranks(folders: dict[str, Path], states: dict[str, Path], one_rank: dict[str, Any]) -> list[dict[str, Any]]:
    return run_ranks(2, _two_ranks, folders, states)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_gradients_equal_one_ranks(one_rank: dict[str, Any], two_ranks: list[dict[str, Any]]) -> None:
    """With all settings, in other families, with replayed routes, and if no token needs a rank's experts."""
    assert worst_difference(one_rank["replayed"], one_rank["plain"]) > 1e-2  # the routes matter
    assert worst_difference(one_rank["losses"], one_rank["plain"]) > 1e-2
    for result in two_ranks:
        for name in ("alone", "recomputed", "unpacked", "offloaded", "layer by layer"):
            assert worst_difference(result[name], one_rank["plain"]) < 1e-5, name
        for name in (*FAMILIES, "losses", "replayed", "frozen"):
            assert worst_difference(result[name], one_rank[name]) < 1e-5, name
        used = {name: g for name, g in one_rank["one rank's experts"].items() if g.any()}
        assert worst_difference({n: result["one rank's experts"][n] for n in used}, used) < 1e-5
        for name, gradient in result["one rank's experts"].items():
            if name.endswith(EXPERT):
                assert gradient[:2].any() and not gradient[2:].any(), name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bfloat16", "reference", "values"])
def test_outputs_equal_one_ranks(name: str, one_rank: dict[str, Any], two_ranks: list[dict[str, Any]]) -> None:
    rows = one_rank["scores"][name].split(list(LENGTHS))
    for rank, result in enumerate(two_ranks):
        tolerance = 0.05 if name == "bfloat16" else 2e-5
        torch.testing.assert_close(result["scores"][name], torch.cat(rows[rank::2]), rtol=0, atol=tolerance)
        assert result["scores"][name].any()


@pytest.mark.slow
def test_a_clipped_step_equals_one_ranks(one_rank: dict[str, Any], two_ranks: list[dict[str, Any]]) -> None:
    norm, wanted = one_rank["clipped"]
    assert norm > 0.02 and two_ranks[0]["clipped"][0] == pytest.approx(norm, rel=1e-5)
    for result in two_ranks:
        weights = result["clipped"][1]
        assert weights.keys() == wanted.keys()
        assert all(float((weights[name] - wanted[name]).abs().max()) < 1e-7 for name in wanted)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_of_matrices_take_the_same_steps(
    optimizer: str, one_rank: dict[str, Any], two_ranks: list[dict[str, Any]]
) -> None:
    wanted = one_rank[optimizer]
    for result in two_ranks:
        far = {name: float((result[optimizer][name] - wanted[name]).abs().max()) for name in wanted}
        assert max(far.values()) < (1e-4 if optimizer == "muon" else 1e-3), far  # a code of 8 bits may be the next


@pytest.mark.slow
def test_a_rank_gathers_no_other_ranks_experts(one_rank: dict[str, Any], two_ranks: list[dict[str, Any]]) -> None:
    """It keeps as many bytes as with a shard of all experts, and has half as many during a command."""
    for result in two_ranks:
        apart, sharded = result["bytes"]
        assert apart == (sharded[0], sharded[1] // 2) and apart[0] == apart[1] > 0
        assert result["summary"] == (2, one_rank["num_parameters"])


@pytest.mark.slow
def test_checkpoints_move_to_other_splits_and_back(
    folders: dict[str, Path],
    states: dict[str, Path],
    two_ranks: list[dict[str, Any]],
    tmp_path: Path,
) -> None:
    """Two ranks' checkpoint on one rank, one rank's on two: weights and moments, bit for bit."""
    with process_group(0, 1, str(tmp_path / "world")):
        weights, _ = continued(folders["qwen3_moe"], states["apart"], states["one again"])
    apart, one = full_tensors(states["apart"]), full_tensors(states["one"])
    assert same(full_tensors(states["one again"]), apart) and same(full_tensors(states["apart again"]), one)
    assert all(value.any() for name, value in apart.items() if name.endswith("exp_avg"))
    assert not same(apart, one), "the comparison sees nothing"
    for result in two_ranks:
        assert same(weights, result["weights"])
        assert all(torch.equal(value, one[f"model.hf.{name}"]) for name, value in result["back"][0].items())


@pytest.mark.slow
def test_an_export_has_all_experts(states: dict[str, Path], two_ranks: list[dict[str, Any]]) -> None:
    model = AutoModelForCausalLM.from_pretrained(states["exported"], dtype=torch.float32)
    assert same({name: p.detach() for name, p in model.named_parameters()}, two_ranks[0]["weights"])


def _empty(family: str) -> Any:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0}
    sizes |= {"num_attention_heads": 4, "head_dim": 8} | EXPERTS.get(family, {})
    if "kv_lora_rank" in sizes:
        del sizes["head_dim"]
    config = AutoConfig.for_model(family, **sizes)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


MIXTURES = [name for name, sizes in EXPERTS.items() if any("expert" in key for key in sizes)]


@pytest.mark.parametrize("family", MIXTURES)
def test_only_experts_are_distributed(family: str) -> None:
    """Half of every stack of matrices and biases; shared experts, routers and dense layers are whole."""
    hf = _empty(family)
    whole = {name: tuple(p.shape) for name, p in hf.named_parameters()}
    plan = ExpertParallel(hf, Axis(size=2))
    for name, parameter in hf.named_parameters():
        is_expert = ".experts." in name
        assert (name in plan.dims) == is_expert
        first, *rest = whole[name]
        assert tuple(parameter.shape) == ((first // 2, *rest) if is_expert else whole[name]), name
    assert plan.dims and set(plan.dims.values()) == {0}


@pytest.mark.parametrize(
    ("family", "size", "message"),
    [
        ("llama", 2, "trainer.fsdp2.expert_parallel=2, but llama: it has no experts .*; use 1"),
        ("qwen3_moe", 3, "3 does not divide the 4 experts of model.layers.0.mlp.experts"),
        ("llama4_text", 2, "model.layers.0.feed_forward.experts does not take tokens with chosen experts"),
    ],
)
def test_models_whose_experts_cannot_be_distributed_are_refused(family: str, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExpertParallel(_empty(family), Axis(size=size))


@pytest.mark.parametrize(
    ("ranks", "trainer", "own", "message"),
    [
        (3, {}, {}, "expert_parallel: 2 does not divide the 3 ranks"),
        (4, {}, {"tensor_parallel": 2}, "expert_parallel: 2 distributes .* without tensor_parallel; use 1 for one"),
        (4, {}, {"context_parallel": 2}, "expert_parallel: 2 distributes .* without context_parallel; use 1 for one"),
        (4, {}, {"replicas": 2}, "expert_parallel: 2 distributes .* without replicas; use 1 for one"),
        (
            2,
            {"lora": {"rank": 4}},
            {},
            "expert_parallel: 2, but experts of models with adapters are not distributed; use 1",
        ),
        (2, {"optimizer": "adafactor"}, {}, "optimizer: adafactor needs .* without trainer.fsdp2.expert_parallel"),
    ],
)
def test_what_is_not_combined_is_refused_in_one_line(
    ranks: int, trainer: dict[str, Any], own: dict[str, int], message: str
) -> None:
    section = {"fsdp2": {"expert_parallel": 2, **own}, **trainer}
    with pytest.raises(ConfigError) as error:
        RoleLayout.from_config(parse({"trainer": section, "layout": {"trainer": {"num_ranks": ranks}}}))
    (line,) = (line for line in error.value.problems if "fsdp2.expert_parallel" in line)
    assert re.search(message, line), line


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"model_type": "qwen2"}, "expert_parallel: 4, but qwen2 has no experts; use 1"),
        ({"model_type": "qwen3_moe"} | EXPERTS["qwen3_moe"], None),
        (
            {"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
            "expert_parallel: 4 does not divide the 6 experts of a layer",
        ),
        (
            tiny_config("llama4_text", num_local_experts=4).to_dict(),
            "expert_parallel: 4, but llama4_text: .* does not take",
        ),
    ],
    ids=["dense", "divisible", "indivisible", "others"],
)
def test_the_plan_refuses_models_whose_experts_cannot_be_distributed(
    model: dict[str, Any], message: str | None
) -> None:
    sizes = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    config = parse({"trainer": {"fsdp2": {"expert_parallel": 4}}, "layout": {"trainer": {"num_ranks": 4}}})
    problems = check_sizes(config, RoleLayout.from_config(config), read_shape(sizes | model))
    found = [problem.text for problem in problems if "expert_parallel" in problem.text]
    assert len(found) == (message is not None) and (message is None or re.search(message, found[0])), found
