"""PPO with a critic, as whole runs: killed and resumed, with the critic on the trainer's ranks and on its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForTokenClassification

from hpcrl.metrics.log import read_metrics
from hpcrl.rollout.store import RolloutReader
from hpcrl.system.exit_codes import ExitCode
from hpcrl.system.files import step_name
from tests.e2e.program import Start
from tests.e2e.test_resume import NUM_STEPS, WORDS, Runs, differences, remains, tensors

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Two turns, so that values skip the tokens of an environment; the reference has the critic's ranks where it can.
PPO = [
    *(word for word in WORDS if "kl_loss_coef" not in word),
    *("algorithm=ppo", "algorithm.kl_reward_coef=0.1", "algorithm.max_len_mask=true", "critic.lr=3e-3"),
    "deterministic=true",
    *("env.default.name=scripted", "env.default.add_reward=true"),
]
OWN_RANKS = ["layout.critic.colocate_with=null", "layout.critic.num_ranks=2"]
WITH_REFERENCE = [*OWN_RANKS, "layout.reference.colocate_with=critic"]


@pytest.fixture(scope="module")
def inputs(digit_model: Path, digit_data: Path) -> list[str]:
    return [f"model.path={digit_model}", f"data.train={digit_data}", f"data.val={digit_data}", *PPO]


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory, inputs: list[str]) -> Runs:
    """An undisturbed run whose critic is on ranks of its own, and the reference with it."""
    runs = Runs(tmp_path_factory.mktemp("apart"), [*inputs, *WITH_REFERENCE])
    runs.finish("undisturbed")
    return runs


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory, inputs: list[str]) -> list[dict[str, Any]]:
    """Metrics of the first steps of a run whose critic is on the trainer's ranks."""
    return first_steps(tmp_path_factory.mktemp("together") / "run", inputs)


def first_steps(run_dir: Path, words: list[str]) -> list[dict[str, Any]]:
    start = Start(run_dir, [*words, "max_steps=3"])
    assert start.wait() == ExitCode.DONE, start.text
    return metrics(run_dir)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Metrics of every step, except for time, memory and the machine."""
    kept = ("critic/", "actor/", "val/", "token/", "group/", "prompts/")
    return [{name: x for name, x in row.items() if name.startswith(kept)} for row in read_metrics(run_dir)]


def everything(run_dir: Path) -> dict[str, Any]:
    """All that `remains` returns, and the critic's state."""
    state = run_dir / "checkpoints" / step_name(NUM_STEPS) / "critic"
    left = remains(run_dir) | {f"critic {name}": tensor for name, tensor in tensors(state).items()}
    left |= {f"critic {path.name}": path.read_bytes() for path in sorted(state.glob("random_rank*.pt"))}
    return left | {f"hf_critic/{p.name}": p.read_bytes() for p in sorted((run_dir / "hf_critic").iterdir())}


@pytest.mark.parametrize(
    "own_ranks",
    [pytest.param(False, id="with the trainer", marks=pytest.mark.soak), pytest.param(True, id="on its own ranks")],
)
def test_a_kill_changes_no_bit_of_policy_and_critic(
    tmp_path: Path, inputs: list[str], apart: Runs, own_ranks: bool
) -> None:
    runs = apart if own_ranks else Runs(tmp_path, inputs)
    whole = everything(runs.folder / "undisturbed" if own_ranks else runs.finish("undisturbed"))
    assert any("score" in name and "exp_avg" in name for name in whole) and "hf_critic/config.json" in whole
    start = runs.start("killed")
    start.wait_until(lambda: start.step > 2)
    start.kill()
    found = everything(runs.finish("killed"))
    assert differences(found, whole) == []
    name = next(name for name in whole if name.startswith("critic ") and "score.weight" in name)
    assert differences({**found, name: found[name] + 1e-6}, whole) == [name], "the comparison notices"


def check_close(rows: list[dict[str, Any]], together: list[dict[str, Any]]) -> None:
    """The same rows in the same mini-batches, in other micro-batches: equal up to rounding."""
    assert [row.get("critic/clipfrac") is not None for row in rows] == [False, True, True, True]
    for here, there in zip(rows, together, strict=True):
        assert here == pytest.approx(there, rel=2e-3, abs=2e-4)


def test_a_critic_on_separate_ranks_matches_one_on_trainer_ranks(apart: Runs, together: list[dict[str, Any]]) -> None:
    folder = apart.folder / "undisturbed"
    check_close(metrics(folder)[:4], together)
    last = together[-1]
    assert last["critic/values/max"] != 0 and last["critic/grad_norm"] > 0 and last["critic/lr"] == 3e-3
    assert {"critic/values/mean", "critic/explained_variance", "critic/loss", "critic/error"} <= last.keys()
    batch = RolloutReader(folder).batch(3)
    assert batch.values is not None and batch.returns is not None
    assert bool((batch.values[~batch.loss_mask] == 0).all()) and batch.values[batch.loss_mask].std() > 0
    model = AutoModelForTokenClassification.from_pretrained(folder / "hf_critic")
    assert model.config.num_labels == 1 and model.score.weight.abs().max() > 0


@pytest.mark.parametrize(
    "words",
    [
        pytest.param([*WITH_REFERENCE, "layout.critic.num_ranks=1"], id="one", marks=pytest.mark.soak),
        pytest.param(["trainer.engine=deepspeed"], id="deepspeed", marks=pytest.mark.soak),
        pytest.param(["trainer.engine=megatron", "trainer.megatron.pipeline_parallel=2"], id="megatron"),
    ],
)
def test_critics_of_other_splits_and_engines_match(
    tmp_path: Path, inputs: list[str], together: list[dict[str, Any]], words: list[str]
) -> None:
    check_close(first_steps(tmp_path / "run", [*inputs, *words]), together)


def test_only_the_critic_is_trained_during_its_warm_up(tmp_path: Path, digit_model: Path, inputs: list[str]) -> None:
    apart = ["layout=disaggregated", *OWN_RANKS, "rollout.max_staleness=1"]
    more = ["critic.warmup_steps=2", "trainer.lr_schedule=linear", "deterministic=false", *apart]
    for last in (3, 4):
        start = Start(tmp_path / "run", [*inputs, *more, f"max_steps={last}"])
        assert start.wait() == ExitCode.DONE, start.text
    rows = metrics(tmp_path / "run")
    assert ["actor/lr" in row for row in rows] == [False, False, False, True, True]
    assert ["critic/lr" in row for row in rows] == [False, True, True, True, True]
    assert rows[-1]["actor/lr"] < rows[-2]["actor/lr"], "the schedule counts the steps in which the policy learns"
    trained, base = (load_file(path / "model.safetensors") for path in (tmp_path / "run" / "hf", digit_model))
    assert any(not torch.equal(trained[name], base[name]) for name in base)
    assert json.loads((tmp_path / "run" / "hf_critic" / "config.json").read_text())["id2label"] == {"0": "LABEL_0"}
