"""The keys of pipeline=dpo: which losses have a reference, what is validated, and what is refused before a start."""

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
        (["pipeline=sft", "dpo.beta=1"], "dpo.beta: not read here, the pipeline is sft"),
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
