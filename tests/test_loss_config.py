"""The sections loss and imitation: what is refused before anything starts, with the way out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hpcrl.config import Config, ConfigError, load, parse
from hpcrl.launch.prepare import prepare
from hpcrl.spec.tables import PIPELINES

DEMO = ["+experiment=demo", "model=tiny", "cluster.device=cpu"]
WRONG = {
    "loss.default.ce=-1": "loss.default.ce: expected at least 0, got -1",
    "loss.default.policy=0": "loss.default: all weights are 0, so the domain would learn nothing; raise one",
    "loss.default.divergence=.5": "teacher.path: there is no model to learn from; give a folder in HF layout",
    "loss.default.ce_above=0": "loss.default.ce_above: 0, but loss.default.ce is 0; raise it, or use ce_above=null",
    "loss.default.policy=0 loss.default.ce=1 algorithm.kl_loss_coef=.1": "algorithm.kl_loss_coef: 0.1 is a part of the "
    "policy loss, whose weight is 0 in every domain; use 0",
    "loss.default.pg=1": "loss.default.pg: unknown key",
    "pipeline=sft loss.default.ce=.1": "loss.default.ce: not read here, the sft pipeline has no loss",
    "pipeline=sft imitation.data=task:add": "imitation.data: not read here, the sft pipeline has no imitation",
    "debug=rollout_only loss.default.ce=.1": "loss.default.ce: not read here, debug=rollout_only does not train",
    "imitation.num_rows=4": "imitation.num_rows: not read here, imitation.data is null",
    "imitation.ce=2": "imitation.ce: not read here, imitation.data is null and imitation.expert_turns is 0",
    "imitation.expert_decay_prompts=9": "imitation.expert_decay_prompts: not read here, imitation.expert_turns is 0",
    "imitation.expert_turns=1.5": "imitation.expert_turns: expected at most 1, got 1.5",
    "imitation.expert_turns=.5": "imitation.expert_turns: 0.5, but the run has no environment, so no expert; give "
    "env.default.name, or use imitation.expert_turns=0",
    "pipeline=sft imitation.expert_turns=.5": "imitation.expert_turns: not read here, the sft pipeline has no ",
    "debug=rollout_only imitation.expert_turns=.5": "imitation.expert_turns: not read here, debug=rollout_only does ",
    "imitation.data=task:add imitation.ce=0": "imitation.ce: expected greater than 0, got 0",
    "algorithm=null algorithm.advantage_estimator=tests.test_loss_config:OWN loss.default.ce=.1": "loss: "
    "tests.test_loss_config:OWN has an objective of its own, which reads no weights; leave the section out",
    "algorithm=null algorithm.advantage_estimator=tests.test_loss_config:OWN imitation.data=task:add": "imitation: "
    "tests.test_loss_config:OWN has an objective of its own, which reads no weights; leave the section out",
    "algorithm=null algorithm.advantage_estimator=tests.test_loss_config:OWN imitation.expert_turns=.5 "
    "+env.default.name=frozen_lake": "imitation: tests.test_loss_config:OWN has an objective of its own, which reads "
    "no weights; leave the section out",
}


def __getattr__(name: str) -> object:
    """OWN, an algorithm with an objective of its own; made where it is read, since it is not for other tests."""
    if name != "OWN":
        raise AttributeError(name)
    from dataclasses import replace

    from hpcrl.algorithms.spec import GRPO_SPEC
    from hpcrl.spec.policy_loss import PolicyLoss

    return replace(GRPO_SPEC, objective="my_lab:Objective", section=PolicyLoss)


@pytest.mark.parametrize("words", WRONG)
def test_impossible_weights_are_refused(words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(WRONG[words])):
        load([*DEMO, *words.split()])


def test_a_domain_without_rows_is_refused_with_the_domains(tmp_path: Path) -> None:
    words = [*DEMO, f"run_dir={tmp_path}/run", "dry_run=true", "loss.sort_digit.ce=.1"]
    text = r"loss.sort_digit: no row of data.train is of domain sort_digit .*did you mean loss.sort_digits\?"
    with pytest.raises(ConfigError, match=text):
        prepare(words)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, r"rows.jsonl: no such file"),
        ('{"prompt": "a", "answer": "b"}\n{"prompt": "c"}\n', r"rows.jsonl:2: .*1 of 2 rows of imitation.data are so"),
        ('{"prompt": "a", "answer": "b"}\n{"prompt": \n', r"rows.jsonl:2"),
    ],
)
def test_rows_that_cannot_be_imitated_are_refused_with_their_line(
    tmp_path: Path, content: str | None, text: str
) -> None:
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=text):
        prepare([*DEMO, f"run_dir={tmp_path}/run", "dry_run=true", f"imitation.data={path}"])


def test_an_expert_does_not_know_a_rows_own_task(tmp_path: Path) -> None:
    """Swe's knows the repairs of generated tasks; without its turns the row is played."""
    task = {"files": {"a.py": "x = 1"}, "hidden_tests": {"test_a.py": "def test_a():\n    assert False"}}
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "Repair.", **task}) + "\n")
    words = [*DEMO, f"run_dir={tmp_path}/run", "dry_run=true", f"data.train={rows}", "+env.default.name=swe"]
    words += ["data.val=null", "eval_every=0", "data.max_prompt_tokens=64", "rollout.max_new_tokens=8"]
    prepare(words)
    text = (
        r"rows.jsonl:1: the expert \(imitation.expert_turns\) plays only generated tasks .*data.train has 1 such rows"
    )
    with pytest.raises(ConfigError, match=text):
        prepare([*words, "imitation.expert_turns=.1"])


EXPERT = [*DEMO, "dry_run=true", "imitation.expert_turns=.5", "data.max_prompt_tokens=64", "rollout.max_new_tokens=8"]
LAKE = ["+env.lake.name=frozen_lake", "data.train=[{path: 'env:lake', size: 8}]", "data.val=null", "eval_every=0"]
ADDS = "data.train=[{path: 'env:lake', size: 8}, {path: 'task:add', size: 8, domain: sums}]"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("+env.default.name=scripted", "but env.default.name=scripted has no expert (frozen_lake, sokoban, "),
        (
            "+env.default.name=tools +env.default.options.tools=[python]",
            "but the expert of env.default cannot play: tools: only [guess] has an expert; or use ",
        ),
    ],
)
def test_training_prompts_without_an_expert_are_refused(tmp_path: Path, words: str, text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"imitation.expert_turns: 0.5, {text}")):
        prepare([*EXPERT, f"run_dir={tmp_path}/run", *words.split()])


def test_an_environment_of_validation_alone_needs_no_expert(tmp_path: Path) -> None:
    """Validation never plays an expert."""
    words = [*EXPERT, f"run_dir={tmp_path}/run", "+env.shown.name=scripted", "eval_every=1"]
    val = "data.val=[{path: 'task:add', size: 8, domain: shown}]"
    prepare([*words, *LAKE[:2], val])
    with pytest.raises(ConfigError, match=r"0.5, but no domain of data.train has an environment, so no expert; use"):
        prepare([*words, "data.train=[{path: 'task:add', size: 8, domain: sums}]", val])


def test_a_domain_may_learn_from_its_experts_turns_alone(tmp_path: Path) -> None:
    words = [*EXPERT, f"run_dir={tmp_path}/run", *LAKE]
    prepare([*words, "loss.default.policy=0"])
    prepare([*words, ADDS, "loss.lake.policy=0"])
    text = "loss.default: all weights are 0, and domain sums has no environment, so no expert's turns: it would learn "
    with pytest.raises(ConfigError, match=re.escape(text)):
        prepare([*words, ADDS, "loss.default.policy=0"])


def test_a_domain_takes_its_own_section_or_the_default() -> None:
    config = parse({"loss": {"maths": {"ce": 0.1}, "default": {"policy": 0.5}}})
    assert [config.loss_of(name).policy for name in ("maths", "code")] == [1.0, 0.5] and config.weighs_losses
    assert not parse({"loss": {"maths": {"policy": 1}}}).weighs_losses and not Config().weighs_losses


def test_a_pipeline_has_defaults_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """For every domain and key that is not given."""
    monkeypatch.setitem(PIPELINES["rlvr"].loss_weights, "policy", 0.0)  # type: ignore[index]
    monkeypatch.setitem(PIPELINES["rlvr"].loss_weights, "ce", 0.5)  # type: ignore[index]
    config = parse({"loss": {"maths": {"ce": 0.1}}})
    found = {name: (weights.policy, weights.ce) for name, weights in config.loss.items()}
    assert found == {"maths": (0.0, 0.1), "default": (0.0, 0.5)}
    assert config.loss_of("code").ce == 0.5


def test_imitation_reads_the_keys_of_rows_with_answers(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "answer": "2"}\n')
    words = ["+experiment=demo", f"data.train={tmp_path}/rows.jsonl", "data.unusable_rows=drop"]
    with pytest.raises(ConfigError, match=r"data.unusable_rows"):
        load(words)
    found = load([*words, f"imitation.data={tmp_path}/rows.jsonl", "data.overlong_sequences=keep_end"])
    assert found.of_imitation().data.overlong_sequences == "keep_end"
