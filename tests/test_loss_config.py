"""The sections loss and imitation: what is refused before anything starts, with the way out."""

from __future__ import annotations

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
    "imitation.data=task:add imitation.ce=0": "imitation.ce: expected greater than 0, got 0",
    "algorithm=null algorithm.advantage_estimator=tests.test_loss_config:OWN loss.default.ce=.1": "loss: "
    "tests.test_loss_config:OWN has an objective of its own, which reads no weights; leave the section out",
    "algorithm=null algorithm.advantage_estimator=tests.test_loss_config:OWN imitation.data=task:add": "imitation: "
    "tests.test_loss_config:OWN has an objective of its own, which reads no weights; leave the section out",
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
