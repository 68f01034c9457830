"""Training of MTP layers with FSDP2 (model.mtp=train)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from hpcrl.config import ConfigError, TrainerConfig, parse
from hpcrl.config.unused_keys import check_unused_keys
from hpcrl.convert.__main__ import main as convert
from hpcrl.engines.train.fsdp2 import engine as fsdp2
from hpcrl.engines.train.fsdp2.engine import FSDP2Engine
from hpcrl.engines.train.fsdp2.mtp_layer import MTPTraining
from hpcrl.engines.train.fsdp2.spec import FSDP2Config
from hpcrl.metrics.stats import flatten, merge
from hpcrl.models.mtp import ModelMTP, mtp_line, untrainable
from hpcrl.rollout.batch import Batch
from tests.checkpoint.writing import write_files
from tests.engines.mtp_reference import SEVERAL, SIZES, by_hand, folder_with_mtp
from tests.engines.worlds import Weighted, by_steps, make_batch, norms_of, run_ranks, worst_difference

LENGTHS = (9, 12, 5, 2, 14, 7)
"""A row of two tokens has no token to predict."""
FAMILIES = list(SIZES)
COUNTS = dict.fromkeys(FAMILIES, 1) | {f"{family} x {count}": count for family, count in SEVERAL.items()}
"""Model -> its MTP layers; the model's name begins with its family."""


def family_of(model: str) -> str:
    return model.partition(" ")[0]


def engine(folder: Path, mtp: ModelMTP = "train", own: dict[str, Any] | None = None, **config: Any) -> FSDP2Engine:
    trainer = TrainerConfig(**({"lr": 1e-3, "logits_chunk_tokens": 8} | config))
    section = FSDP2Config(**({"mtp_loss": 0.3} | (own or {})))
    return FSDP2Engine(trainer, folder, own=section, dtype=torch.float32, total_steps=9, mtp=mtp)


def rows() -> Batch:
    """Rows with common beginnings, one of weight 0 and one without tokens to be learned."""
    batch = make_batch(LENGTHS)
    lengths, starts = batch.lengths.tolist(), batch.cu_seqlens.tolist()
    same = min(lengths[0], lengths[4]) - 2
    batch.token_ids[starts[4] : starts[4] + same] = batch.token_ids[starts[0] : starts[0] + same]
    batch.weights = torch.tensor([1.0, 0.5, 2.0, 1.0, 1.0, 0.0])
    return batch.check()


def gradients(
    trainer: FSDP2Engine, batch: Batch, plan: list[list[int]], whole: Batch
) -> tuple[Any, Any, dict[str, float]]:
    """(the policy's, the MTP layer's gradients, metrics)."""
    stats = trainer.accumulate(batch, plan, Weighted(), norms_of(whole))
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, stats)
    found: dict[str, Tensor] = {}
    for name, p in trainer.model.named_parameters():
        grad = p.grad
        found[name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()
    trainer.discard_gradients()
    of_mtp = {name.removeprefix("mtp."): grad for name, grad in found.items() if name.startswith("mtp.")}
    return {n: g for n, g in found.items() if n.startswith("hf.")}, of_mtp, flatten(merge(shares))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    scratch = tmp_path_factory.mktemp("models")
    return {model: folder_with_mtp(family_of(model), scratch / model, count) for model, count in COUNTS.items()}


@pytest.mark.slow
@pytest.mark.numerics
@pytest.mark.parametrize("model", COUNTS)
def test_loss_and_gradients_match_a_reference_and_leave_the_policys(
    model: str, folders: dict[str, Path], world_of_one: None
) -> None:
    batch, folder = rows(), folders[model]
    losses, accuracies, wanted = by_hand(
        family_of(model), folder, batch, 0.3, norms_of(batch).tokens, count=COUNTS[model]
    )
    with_layers, without = engine(folder), engine(folder, "keep")
    plan = [[0, 4, 1], [2, 3, 5], []]
    assert torch.equal(with_layers.logprobs(batch, plan, 1.0), without.logprobs(batch, plan, 1.0))
    policy, of_mtp, metrics = gradients(with_layers, batch, plan, batch)
    assert worst_difference(of_mtp, wanted) < 1e-5
    for number, (loss, accuracy) in enumerate(zip(losses, accuracies, strict=True), 1):
        end = "" if number == 1 else f"_{number}"
        assert metrics[f"actor/mtp_loss{end}"] == pytest.approx(loss, rel=1e-5)
        assert metrics[f"actor/mtp_accuracy{end}"] == pytest.approx(accuracy)
    alone, nothing, others = gradients(without, batch, plan, batch)
    assert not nothing and policy.keys() == alone.keys()
    assert all(torch.equal(policy[name], alone[name]) for name in alone)
    assert others == {name: value for name, value in metrics.items() if "mtp" not in name}


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"packing": "off"}, {"activation_checkpointing": True}, {"cpu_offload": True}],
    ids=["unpacked", "recomputed", "sharded"],
)
def test_every_setting_gives_the_same_gradients(
    settings: dict[str, Any], folders: dict[str, Path], world_of_one: None
) -> None:
    batch, folder = rows(), folders["deepseek_v3 x 3"]
    wanted = by_hand("deepseek_v3", folder, batch, 0.3, norms_of(batch).tokens, 3)[2]
    found = gradients(engine(folder, own=settings), batch, [[0, 4, 1], [2, 3, 5]], batch)[1]
    assert worst_difference(found, wanted) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("model", ["glm4_moe", "deepseek_v3 x 3"])
def test_segments_of_a_row_are_predicted_separately(model: str, folders: dict[str, Path], world_of_one: None) -> None:
    batch, folder = by_steps(make_batch(LENGTHS), (2, 1, 3)), folders[model]
    wanted = by_hand(family_of(model), folder, batch, 0.3, norms_of(batch).tokens, COUNTS[model])[2]
    assert worst_difference(gradients(engine(folder), batch, [[0, 1, 2]], batch)[1], wanted) < 1e-5


def step(trainer: FSDP2Engine) -> dict[str, float]:
    batch = rows()
    return flatten(trainer.train_step(batch, [[0, 1, 2], [3, 4, 5]], Weighted(), norms_of(batch)))


def of_layer(trainer: FSDP2Engine) -> dict[str, Tensor]:
    assert trainer.model.mtp is not None
    return {name: tensor.detach().clone() for name, tensor in trainer.model.mtp.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_policys_steps_are_the_same_and_the_layer_learns(
    optimizer: str, folders: dict[str, Path], world_of_one: None
) -> None:
    """Also if the layer's gradients, or only the policy's, are clipped."""
    settings: dict[str, Any] = {"optimizer": optimizer, "weight_decay": 0.1, "max_grad_norm": 0.01}
    with_layer, without = (engine(folders["qwen3_5_moe_text"], mtp, **settings) for mtp in ("train", "keep"))
    before = of_layer(with_layer)
    metrics = [(step(with_layer), step(without)) for _ in range(5)]
    for mine, other in metrics:
        assert mine["actor/grad_norm"] == other["actor/grad_norm"] > 0.01
    for (name, one), (_, other) in zip(with_layer.named_weights(), without.named_weights(), strict=True):
        assert torch.equal(one, other), name
    moved = [name for name, tensor in of_layer(with_layer).items() if not torch.equal(tensor, before[name])]
    assert sorted(moved) == sorted(name for name, _ in with_layer.model.mtp.named_parameters())
    assert metrics[-1][0]["actor/mtp_loss"] < metrics[0][0]["actor/mtp_loss"]


def _two_ranks(folder: Path, scratch: Path) -> dict[str, Any]:
    """Everything that needs two ranks, in one world."""
    whole, results = rows(), {}
    mine = whole.select([[0, 1, 5], [2, 3, 4]][dist.get_rank()])
    for name, own in {"sharded": {}, "copies": {"replicas": 2}}.items():
        results[name] = gradients(engine(folder, own=own), mine, [[0, 2], [1]], whole)
    empty = whole.select([[], list(range(6))][dist.get_rank()])
    results["a rank without rows"] = gradients(
        engine(folder), empty, [[[], []], [[0, 4], [1, 2, 3, 5]]][dist.get_rank()], whole
    )
    fsdp2.SMALL_MODEL_BYTES = 0
    trainer = engine(folder)
    results["by layer"] = gradients(trainer, mine, [[0, 2], [1]], whole)
    assert trainer.load(scratch / "one")[0].startswith("checkpoint")
    trainer.train_step(mine, [[0, 2], [1]], Weighted(), norms_of(whole))
    trainer.export_hf(scratch / "two")
    return results


@pytest.mark.slow
def test_two_ranks_match_one(folders: dict[str, Path], world_of_one: None, tmp_path: Path) -> None:
    """Gradients, metrics, and the next step from one rank's checkpoint."""
    trainer, batch = engine(folders["deepseek_v3 x 3"]), rows()
    policy, wanted, metrics = gradients(trainer, batch, [list(range(6))], batch)
    step(trainer)
    (tmp_path / "one").mkdir()
    write_files(tmp_path / "one", trainer.snapshot())
    trainer.train_step(batch, [list(range(6))], Weighted(), norms_of(batch))
    trainer.export_hf(tmp_path / "next")
    for result in run_ranks(2, _two_ranks, folders["deepseek_v3 x 3"], tmp_path):
        for name, (of_policy, of_mtp, found) in result.items():
            assert worst_difference(of_mtp, wanted) < 1e-5, name
            assert worst_difference(of_policy, policy) < 1e-5, name
            for key in ("actor/mtp_loss", "actor/mtp_accuracy", "actor/mtp_loss_3", "actor/mtp_accuracy_3"):
                assert found[key] == pytest.approx(metrics[key], rel=1e-5), name
    one, two = (
        {name: t for file in (tmp_path / each).glob("*.safetensors") for name, t in load_file(file).items()}
        for each in ("next", "two")
    )
    assert one.keys() == two.keys()
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 2e-5


@pytest.mark.slow
def test_gradients_of_the_layer_that_are_not_finite_skip_its_step_alone(
    folders: dict[str, Path], world_of_one: None
) -> None:
    trainer = engine(folders["glm4_moe"])
    before, policy = of_layer(trainer), {name: tensor.clone() for name, tensor in trainer.named_weights()}
    batch = rows()
    trainer.accumulate(batch, [list(range(6))], Weighted(), norms_of(batch))
    next(trainer.model.mtp.parameters()).grad.fill_(float("nan"))
    assert flatten(trainer._update())["actor/grad_norm"] > 0 and trainer.optimizer_step == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in of_layer(trainer).items())
    assert not all(torch.equal(tensor, policy[name]) for name, tensor in trainer.named_weights())


@pytest.mark.slow
def test_resume_continues_bit_for_bit(folders: dict[str, Path], world_of_one: None, tmp_path: Path) -> None:
    first, second = engine(folders["qwen3_5_text x 2"]), engine(folders["qwen3_5_text x 2"])
    step(first)
    write_files(tmp_path, first.snapshot())
    step(first)
    assert second.load(tmp_path) == []
    step(second)
    saved, resumed = of_layer(first), of_layer(second)
    assert all(torch.equal(saved[name], resumed[name]) for name in saved)
    keeps = engine(folders["qwen3_5_text x 2"], "keep")
    with pytest.raises(ValueError, match="of another model"):
        keeps.load(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("model", [*COUNTS, "qwen3_5_moe_text stacked"])
def test_exports_and_conversions_have_the_trained_layers(
    model: str, folders: dict[str, Path], world_of_one: None, tmp_path: Path
) -> None:
    """Under the names of the source's files, with copies of the embedding of the trained policy; loaded again, they
    have the same loss."""
    stacked = model not in folders
    folder = folder_with_mtp("qwen3_5_moe_text", tmp_path / "stacked", stacked=True) if stacked else folders[model]
    trainer = engine(folder, param_dtype="float32")
    step(trainer)
    trainer.export_hf(tmp_path / "exported")
    (tmp_path / "step").mkdir()
    write_files(tmp_path / "step", trainer.snapshot())
    words = ["--checkpoint", str(tmp_path / "step"), "--model", str(folder), "--output", str(tmp_path / "converted")]
    assert convert(words) == 0
    source, *found = (
        {name: t for file in each.glob("*.safetensors") for name, t in load_file(file).items()}
        for each in (folder, tmp_path / "exported", tmp_path / "converted")
    )
    for tensors in found:
        assert tensors.keys() == source.keys()
        assert {name: t.shape for name, t in tensors.items()} == {name: t.shape for name, t in source.items()}
        assert all(torch.equal(tensors[name], found[0][name]) for name in tensors)
    unmoved = [name for name in source if torch.equal(source[name], found[0][name])]
    assert all("e_score_correction_bias" in name or ".experts." in name for name in unmoved), unmoved
    for name in [name for name in source if name.endswith((".embed_tokens.weight", ".shared_head.head.weight"))]:
        assert torch.equal(found[0][name], found[0]["model.embed_tokens.weight"])
    again = engine(tmp_path / "exported")
    batch = rows()
    wanted = gradients(trainer, batch, [list(range(6))], batch)[2]["actor/mtp_loss"]
    assert gradients(again, batch, [list(range(6))], batch)[2]["actor/mtp_loss"] == pytest.approx(wanted, rel=1e-6)


@pytest.mark.slow
def test_stacked_and_separate_experts_are_the_same_layer(
    folders: dict[str, Path], world_of_one: None, tmp_path: Path
) -> None:
    batch, family = rows(), "qwen3_5_moe_text"
    stacked = engine(folder_with_mtp(family, tmp_path / "stacked", stacked=True))
    apart = engine(folders[family])
    assert all(torch.equal(of_layer(stacked)[name], tensor) for name, tensor in of_layer(apart).items())
    one, other = (gradients(each, batch, [list(range(6))], batch)[1] for each in (stacked, apart))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_pairs_of_rows_that_begin_alike_are_shared_while_their_next_tokens_are_equal() -> None:
    """By hand: rows 5 6 7 8 and 5 6 9, of which 7 and 8, and 9, are to be learned."""
    batch = make_batch((4, 3), 2)
    batch.token_ids = torch.tensor([5, 6, 7, 8, 5, 6, 9], dtype=torch.int32)
    training = MTPTraining(1.0, 1, "auto", torch.device("cpu"))
    (found,) = training.inputs(batch, None, None)
    assert found.states.tolist() == [0, 1, 2, 5]  # tokens 5 6 7, and the second 6; the pair 5 6 is shared
    assert found.token_ids.tolist() == [6, 7, 8, 9]
    assert found.positions.tolist() == [1, 2, 3, 2]
    assert found.targets.tolist() == [7, 8, 9] and found.before.tolist() == [0, 1, 0]
    (apart,) = training.inputs(batch, None, [0, 0])
    assert apart.states.tolist() == [0, 1, 2, 4, 5] and apart.before.tolist() == [0, 1, 3]


def test_later_layers_share_pairs_whose_states_and_tokens_are_equal() -> None:
    """By hand: rows 5 6 7 and 5 8 7 have the pair 5, 7 of the second layer, but not its state after the first."""
    batch = make_batch((3, 3, 3), 1)
    batch.token_ids = torch.tensor([5, 6, 7, 5, 8, 7, 5, 6, 7], dtype=torch.int32)
    first, second = MTPTraining(1.0, 2, "auto", torch.device("cpu")).inputs(batch, None, None)
    assert first.states.tolist() == [0, 1, 3, 4] and first.token_ids.tolist() == [6, 7, 8, 7]
    assert first.targets.tolist() == [7, 7, 7] and first.before.tolist() == [0, 2, 0]
    assert second.states.tolist() == [0, 2] and second.token_ids.tolist() == [7, 7]
    assert second.positions.tolist() == [2, 2]
    assert second.weights.tolist() == [0.0]  # rows of three tokens have none for it to predict


DEEPSEEK = {"model_type": "deepseek_v3", "num_hidden_layers": 2, "num_nextn_predict_layers": 1}


def test_models_without_a_layer_that_can_be_trained() -> None:
    name = "model.layers.2.eh_proj.weight"
    names = [name, "model.layers.2.input_layernorm.weight"]
    assert untrainable(DEEPSEEK, names) == untrainable(DEEPSEEK, None) == ""
    assert untrainable(DEEPSEEK, []) == f"the weights lack {name} of the MTP layers"
    assert untrainable(DEEPSEEK | {"num_nextn_predict_layers": 2}, names).startswith("the weights lack model.layers.3.")
    assert "has 0 MTP layers, and 1 to 1000 are" in untrainable(DEEPSEEK | {"num_nextn_predict_layers": 0}, None)
    assert "MTP layers of mimo are not trained" in untrainable({"model_type": "mimo"}, None)
    of_qwen = ["mtp.fc.weight", "mtp.layers.0.input_layernorm.weight"]
    assert untrainable({"model_type": "qwen3_next"}, of_qwen) == ""
    qwen = {"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1}
    assert untrainable(qwen, of_qwen) == "" and "lack mtp.layers.0." in untrainable(qwen, of_qwen[:1])
    more = [*of_qwen, "mtp.layers.1.input_layernorm.weight"]
    assert "more MTP layers than config.json, 1" in untrainable(qwen, more)
    assert untrainable(qwen | {"mtp_num_hidden_layers": 2}, more) == ""
    assert "embeddings of their own" in untrainable(qwen | {"mtp_use_dedicated_embeddings": True}, of_qwen)
    assert "trained (model.mtp=train), counted below" in mtp_line(DEEPSEEK, [name], "train")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trainer": {"engine": "megatron"}}, "the megatron trainer trains no MTP layers; use keep"),
        ({"trainer": {"engine": "deepspeed"}}, r"the deepspeed trainer .*trainer\.engine=fsdp2"),
        ({"trainer": {"lora": {"rank": 4}}}, "without trainer.lora"),
        ({"trainer": {"freeze": ["embeddings"]}}, "without trainer.freeze"),
        ({"trainer": {"fsdp2": {"tensor_parallel": 2}}}, "without trainer.fsdp2.tensor_parallel"),
        ({"trainer": {"fsdp2": {"context_parallel": 2}}}, "without trainer.fsdp2.context_parallel"),
        ({"model": {"mtp": "train"}}, "model.tiny has no MTP layer to train"),
    ],
    ids=["megatron", "deepspeed", "lora", "freeze", "tensor", "context", "tiny"],
)
def test_what_training_does_not_support_is_refused_before_the_start(settings: dict[str, Any], message: str) -> None:
    given = {"model": {"path": "/models/deepseek", "mtp": "train"}} | settings
    with pytest.raises(ConfigError) as error:
        parse(given)
    assert [line for line in error.value.problems if line.startswith("model.mtp: ") and re.search(message, line)]


def test_the_coefficient_without_training_is_reported() -> None:
    given = {("trainer", "fsdp2", "mtp_loss"): True}
    trains = parse({"model": {"path": "/models/deepseek", "mtp": "train"}})
    assert check_unused_keys(trains, given) == []
    (problem,) = check_unused_keys(parse({}), given)
    assert problem.text == "trainer.fsdp2.mtp_loss: not read here, model.mtp is keep"
