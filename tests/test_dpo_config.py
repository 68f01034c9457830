"""The keys of pipeline=dpo and online_dpo: which losses have a reference, what is validated, and what is refused before
a start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import ConfigError, load
from hpcrl.launch.plan import describe
from hpcrl.launch.prepare import prepare
from hpcrl.spec.tables import DPO_LOSSES
from tests.test_config import problems

DPO = ["pipeline=dpo", "layout=colocated", "cluster.device=cpu"]
ONLINE = ["pipeline=online_dpo", "layout=colocated", "cluster.device=cpu"]


def ranks(role: str, *words: str) -> tuple[int, ...]:
    return RoleLayout.from_config(load([*DPO, *words])).ranks[role]


@pytest.mark.parametrize("loss", [*DPO_LOSSES])
def test_only_losses_that_read_it_have_a_reference(loss: str) -> None:
    has = loss in ("sigmoid", "ipo", "robust", "kto")
    assert bool(ranks("reference", f"dpo.loss={loss}")) == has == load([*DPO, f"dpo.loss={loss}"]).uses_reference
    if loss in ("sigmoid", "ipo", "robust"):
        assert not ranks("reference", f"dpo.loss={loss}", "dpo.reference_free=true")


def test_with_adapters_the_trainer_without_them_is_the_reference() -> None:
    lora = ["trainer.lora.rank=4", "trainer.lora.alpha=8"]
    assert load([*DPO, *lora]).uses_reference and not ranks("reference", *lora)


def test_held_out_pairs_need_no_generator_and_prompts_do() -> None:
    val = ["data.val=task:sort_digits", "eval_every=2"]
    assert not ranks("generator", *val) and load([*DPO, *val]).validates_rows
    config = load([*DPO, *val, "dpo.validation=responses"])
    assert config.evaluates and not config.validates_rows and ranks("generator", *val, "dpo.validation=responses")
    assert load([*DPO, *val, "keep_best.metric=val/rewards/accuracies", "keep_best.mode=max"]).keep_best.metric


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["dpo.loss=sigmod"],
            "dpo.loss: expected 'sigmoid', 'ipo', 'robust', 'simpo', 'orpo', 'cpo' or 'kto', got 'sigmod'",
        ),
        (["dpo.loss=robust", "dpo.label_smoothing=.5"], "dpo.label_smoothing: expected less than 0.5, got 0.5"),
        (["dpo.beta=0"], "dpo.beta: expected greater than 0, got 0"),
        (["dpo.loss=ipo", "dpo.label_smoothing=.1"], "dpo.label_smoothing: not read here, dpo.loss is ipo"),
        (["dpo.gamma=1"], "dpo.gamma: not read here, dpo.loss is sigmoid"),
        (["dpo.desirable_weight=2"], "dpo.desirable_weight: not read here, dpo.loss is sigmoid"),
        (["dpo.loss=simpo", "reference.path=other"], "reference.path: not read here, with dpo.loss=simpo there is"),
        (["dpo.reference_free=true", "reference.path=other"], "reference.path: not read here, with dpo.reference_free"),
        (["dpo.loss=kto", "dpo.reference_free=true"], "dpo.reference_free: not read here, dpo.loss is kto"),
        (["dpo.loss=kto", "dpo.batch_size=1"], "dpo.batch_size: 1, but the KL term of kto pairs each prompt"),
        (["dpo.validation=responses"], "dpo.validation: not read here, data.val is null"),
        (["data.val=task:add", "eval.samples=4"], "eval.samples: not read here, nothing is generated, since dpo."),
        (["data.val=task:add", "rollout.temperature=.5"], "rollout.temperature: not read here, nothing is generated"),
        (["algorithm.pg_clip_low=.1"], "algorithm.pg_clip_low: not read here, the dpo pipeline has no algorithm"),
        (["dpo.pairs_per_group=2"], "dpo.pairs_per_group: not read here, the rows of the dpo pipeline are pairs"),
        (["pipeline=sft", "dpo.beta=1"], "dpo.beta: not read here, the pipeline is sft"),
        ([*ONLINE, "dpo.loss=kto"], "dpo.loss: kto needs answers that are labelled good or bad, and a group's rewards"),
        ([*ONLINE, "rollout.group_size=1"], "rollout.group_size: 1 pair of a prompt's responses need at least 2, got"),
        (
            [*ONLINE, "rollout.group_size=5", "dpo.pairs_per_group=3"],
            "rollout.group_size: 3 pairs of a prompt's responses need at least 6, got 5",
        ),
        ([*ONLINE, "rollout.temperature=0"], "rollout.temperature: 0 makes the responses of a group equal"),
        (
            [*ONLINE, "dpo.batch_size=8"],
            "dpo.batch_size: not read here, a step of the online_dpo pipeline has",
        ),
        ([*ONLINE, "dpo.validation=responses"], "dpo.validation: not read here, the online_dpo pipeline validates on"),
        ([*ONLINE, "algorithm.pg_clip_low=.1"], "algorithm.pg_clip_low: not read here, the online_dpo pipeline has a"),
        ([*ONLINE, "loss.default.ce=1"], "loss.default.ce: not read here, the online_dpo pipeline has a loss of its"),
        ([*ONLINE, "imitation.num_rows=2"], "imitation.num_rows: not read here, the online_dpo pipeline has a loss"),
        ([*ONLINE, "trainer.max_mismatch=.1"], "trainer.max_mismatch: not read here, the online_dpo pipeline does not"),
        ([*ONLINE, "dpo.loss=simpo", "reference.path=x"], "reference.path: not read here, with dpo.loss=simpo there"),
        ([*ONLINE, "reference.cache=x"], "reference.cache: not read here, every step of the online_dpo pipeline has"),
        ([*ONLINE, "teacher.path=x"], "teacher.path: not read here, online_dpo has no teacher"),
        ([*ONLINE, "data.chosen_key=x"], "data.chosen_key: not read here, the online_dpo pipeline does not learn from"),
    ],
)
def test_keys_that_cannot_be_used_are_refused_in_one_line(words: list[str], expected: str) -> None:
    (line,) = problems(*DPO, *words)
    assert line.startswith(expected), line


def test_the_plan_counts_the_reference(tmp_path: Path) -> None:
    row = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")

    def roles(*words: str) -> str:
        own = [*DPO, "model=tiny", f"data.train={tmp_path}/train.jsonl", f"run_dir={tmp_path / 'run'}", *words]
        config, layout, model, run, shown = prepare(own)
        return describe(config, layout, model, run, shown)

    assert "reference: weights" in roles() and "reference: " not in roles("dpo.loss=simpo")


def test_a_row_of_held_out_pairs_that_is_none_is_named(tmp_path: Path) -> None:
    row = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "val.jsonl").write_text(json.dumps(row) + '\n{"prompt": "1+1=", "answer": "2"}\n')
    words = [*DPO, f"data.train={tmp_path}/train.jsonl", f"data.val={tmp_path}/val.jsonl", f"run_dir={tmp_path}/run"]
    with pytest.raises(ConfigError, match=r"val.jsonl:2: no chosen: a pair has the columns chosen and"):
        prepare(words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("loss", [name for name, spec in DPO_LOSSES.items() if not spec.labelled])
def test_online_dpo_has_reference_and_generator_of_its_loss(loss: str) -> None:
    layout = RoleLayout.from_config(load([*ONLINE, f"dpo.loss={loss}"]))
    assert bool(layout.ranks["reference"]) == (loss in ("sigmoid", "ipo", "robust")) and layout.ranks["generator"]
    assert not load([*ONLINE, f"dpo.loss={loss}", "debug=rollout_only"]).uses_reference


def test_an_experiments_algorithm_is_left_out_of_online_dpo() -> None:
    """Of the demonstration: mini-batches, a clip, and with rollouts made ahead a correction."""
    given = ["+experiment=demo", "rollout.max_staleness=1", "layout=disaggregated"]
    config, rlvr = load([*given, "pipeline=online_dpo"]), load(given)
    assert rlvr.algorithm.num_mini_batches == 4 and rlvr.algorithm.correction == "truncate" and rlvr.has_algorithm
    assert config.algorithm == type(config.algorithm)() and not config.has_algorithm and config.uses_reference
    assert not config.uses_critic and not config.uses_teacher and not config.imitates


def test_the_plan_of_online_dpo_names_loss_and_pairs(tmp_path: Path) -> None:
    words = [*ONLINE, "model=tiny", "data.train=task:sort_digits", f"run_dir={tmp_path / 'run'}"]
    config, layout, model, run, shown = prepare([*words, "rollout.group_size=4", "dpo.loss=ipo"])
    plan = describe(config, layout, model, run, shown)
    assert "online_dpo, loss ipo, beta 0.1, " in plan and "grpo" not in plan and "reference: weights" in plan
    assert "1 optimizer step over 2 trainer rank(s), on pairs of a prompt's responses: its best and its worst" in plan
