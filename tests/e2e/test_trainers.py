"""GRPO with every trainer and generator: a run's steps match FSDP2 with the native generator.

tests/e2e/test_vllm.py has FSDP2 with vLLM.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hpcrl.convert.__main__ import main as convert
from hpcrl.metrics.log import read_metrics
from hpcrl.rollout.store import RolloutReader
from tests.e2e.program import Start
from tests.e2e.test_parity import WORDS, reference_logprobs

pytestmark = [pytest.mark.slow, pytest.mark.numerics, pytest.mark.timeout(400)]

STEPS = (1, 2, 3)
# Nats per token. Of the model that Intel's kernels for AVX-512 warm up, transformers in float32 is itself up to 2.1e-5
# from float64 at an unlikely token, and vLLM 3.8e-5 from transformers; with kernels for AVX2 no two engines differed by
# more than 6.2e-6. One matrix rounded to bfloat16, the smallest mistake to be found here, changes 2.9e-4 or more.
LOGPROBS = 1e-4
EQUAL = ("critic/score/mean", "token/response_length/mean", "actor/lr", "actor/skipped_update")
CLOSE = ("actor/grad_norm", "actor/pg_loss", "actor/kl_loss", "actor/clipfrac", "actor/ratio_mean")
# Without the KL term in rewards: in the first step it is rounding, and whether a token's advantage is zero decides
# whether it counts as clipped.
COMMON = """
layout=colocated algorithm.kl_reward_coef=0 algorithm.num_mini_batches=2 algorithm.pg_clip_low=0.01
algorithm.pg_clip_high=0.01
""".split()  # noqa: SIM905
TRAINERS = {
    "deepspeed": ["trainer.engine=deepspeed"],
    "megatron": ["trainer.engine=megatron", "trainer.megatron.tensor_parallel=2"],
}


class Runs:
    """Two trainer ranks, on which the reference and the generators are, too."""

    def __init__(self, folder: Path, model: Path, data: Path):
        self.folder, self._words = folder, [f"model.path={model}", f"data.train={data}", *WORDS, *COMMON]

    def start(self, name: str, *words: str) -> str:
        """One start that ends with exit code 0; returns its output."""
        start = Start(self.folder / name, [*self._words, "max_steps=3", *words])
        assert start.wait(150) == 0, start.text
        return start.text


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, wide_digit_model: Path, digit_data: Path) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("trainers"), wide_digit_model, digit_data)
    runs.start("fsdp2")
    return runs


def metrics(run_dir: Path) -> dict[int, dict[str, Any]]:
    return {row["step"]: row for row in read_metrics(run_dir)}


def check_close(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    """Log-probs that differ by rounding."""
    torch.testing.assert_close(got, wanted, rtol=0, atol=LOGPROBS, msg=lambda text: f"{what}: {text}")


def check_same(runs: Runs, name: str) -> None:
    """The same responses, and log-probs, losses, clip fractions and norms within rounding, which grows with the steps:
    Adam multiplies it."""
    ours, theirs = metrics(runs.folder / name), metrics(runs.folder / "fsdp2")
    stored, wanted = (RolloutReader(runs.folder / run) for run in (name, "fsdp2"))
    for step in STEPS:
        one, other = stored.batch(step), wanted.batch(step)
        assert torch.equal(one.token_ids, other.token_ids) and torch.equal(one.rewards, other.rewards), step
        for field in ("old_logprobs", "ref_logprobs"):
            check_close(getattr(one, field), getattr(other, field), f"step {step}: {field}")
        for metric in EQUAL:
            assert ours[step][metric] == theirs[step][metric], (step, metric)
        for metric in CLOSE:
            tolerance = LOGPROBS if step == 1 else 10 * LOGPROBS
            assert ours[step][metric] == pytest.approx(theirs[step][metric], rel=tolerance, abs=1e-6), (step, metric)


def test_compared_metrics_differ_between_steps(runs: Runs) -> None:
    rows = metrics(runs.folder / "fsdp2")
    for metric in ("actor/grad_norm", "actor/clipfrac", "critic/score/mean"):
        assert len({rows[step][metric] for step in STEPS}) == len(STEPS), metric
    assert all(0 < rows[step]["actor/clipfrac"] < 1 for step in STEPS)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_three_steps_match_fsdp2(runs: Runs, trainer: str) -> None:
    """The third after a resume."""
    runs.start(trainer, *TRAINERS[trainer], "max_steps=2")
    assert "resumed from" in runs.start(trainer, *TRAINERS[trainer])
    check_same(runs, trainer)


def test_each_step_by_another_engine_matches_fsdp2(runs: Runs) -> None:
    """The first by FSDP2, the second by Megatron with split matrices, the third by DeepSpeed."""
    runs.start("switched", "max_steps=1")
    for engine, before, steps in (("megatron", "fsdp2", 2), ("deepspeed", "megatron", 3)):
        text = runs.start("switched", *TRAINERS[engine], f"max_steps={steps}")
        assert f"resumed from step_{steps - 1:06}" in text
        assert f'trainer.engine: "{before}" -> "{engine}"' in text
        assert "by another training engine: weights and optimizer are taken over, random state is not" in text
    check_same(runs, "switched")


@pytest.mark.soak
@pytest.mark.parametrize("trainer", TRAINERS)
def test_vllm_generates_the_same_responses_for_every_trainer(runs: Runs, trainer: str) -> None:
    pytest.importorskip("vllm")
    runs.start(f"{trainer}_vllm", *TRAINERS[trainer], "generator.engine=vllm")
    check_same(runs, f"{trainer}_vllm")


@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param("megatron", ["generator.engine=vllm"], marks=pytest.mark.soak),
        pytest.param("fsdp2", TRAINERS["megatron"], marks=pytest.mark.soak),
        ("deepspeed", ["trainer.megatron.pipeline_parallel=2", "trainer.engine=megatron"]),
    ],
)
def test_a_converted_checkpoint_continues_with_another_engine(
    runs: Runs, wide_digit_model: Path, first: str, then: list[str]
) -> None:
    """From the folder of hpcrl.convert a run begins where the first trainer's run ended, as its export shows."""
    if first == "megatron":
        pytest.importorskip("vllm")
    origin, target = runs.folder / first, runs.folder / f"converted_{first}"
    if not (origin / "hf").exists():
        runs.start(first, *TRAINERS[first])
    assert convert(["--checkpoint", str(origin), "--output", str(target), "--verify"]) == 0
    further = f"after_{first}"
    runs.start(further, f"model.path={target}", *then, "max_steps=1")
    batch = RolloutReader(runs.folder / further).batch(1)
    wanted, before = (reference_logprobs(model, batch) for model in (origin / "hf", wide_digit_model))
    for field in ("gen_logprobs", "old_logprobs", "ref_logprobs"):
        check_close(getattr(batch, field)[batch.loss_mask], wanted[batch.loss_mask], field)
    assert not torch.allclose(wanted, before, rtol=0, atol=10 * LOGPROBS), "training has changed the model"
    assert metrics(runs.folder / further)[1]["actor/grad_norm"] > 0
