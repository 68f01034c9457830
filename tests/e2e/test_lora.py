"""Whole runs that train adapters: on one rank, on two with generators on the same or on other ranks, and after a
kill."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hpcrl.metrics.log import read_metrics
from hpcrl.system.exit_codes import ExitCode
from hpcrl.system.files import step_name
from tests.e2e.program import Start
from tests.e2e.test_parity import LOGPROBS, WORDS, Outcome, compare, deviation, outcome

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 3
LAYOUTS = {
    "vllm": (
        3,
        ["layout=colocated", "layout.generator.tensor_parallel=2", "generator.engine=vllm", "deterministic=false"],
    ),
    "megatron": (3, ["layout=colocated", "trainer.engine=megatron", "trainer.megatron.tensor_parallel=2"]),
    "single": (1, ["layout=single"]),
    "colocated": (3, ["layout=colocated"]),
    "deepspeed": (3, ["layout=colocated", "trainer.engine=deepspeed"]),
    "apart": (
        4,
        """layout=disaggregated layout.generator.num_ranks=1 layout.reward.colocate_with=generator
        layout.env.colocate_with=generator""".split(),  # noqa: SIM905
    ),
}
COMPARED = ("single", "colocated", "apart")
"""Layouts whose runs all tests share."""
LORA = [
    "trainer.lora.rank=4",
    "trainer.lora.alpha=8",
    "check_weights=true",
    "deterministic=true",
    f"max_steps={STEPS}",
    "keep_checkpoints=4",
    "trainer.lr=1e-2",
]


def start(folder: Path, layout: str, model: Path, data: Path, environ: dict[str, str] | None = None) -> Start:
    num_ranks, words = LAYOUTS[layout]
    started = Start(folder / layout, [f"model.path={model}", f"data.train={data}", *WORDS, *LORA, *words], environ)
    assert started.wait(200) == (ExitCode.DONE if environ is None else ExitCode.RANK_KILLED), started.text
    assert len(list((folder / layout / "logs" / "attempt_0001").glob("rank_*.log"))) == num_ranks
    return started


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, wide_digit_model: Path, digit_data: Path) -> Path:
    """The run folders, by layout."""
    folder = tmp_path_factory.mktemp("lora")
    for layout in COMPARED:
        start(folder, layout, wide_digit_model, digit_data)
    return folder


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, Outcome]:
    return {layout: outcome(folder / layout) for layout in COMPARED}


def check_metrics(one: Path, other: Path) -> None:
    rows, others = read_metrics(one), read_metrics(other)
    for step in range(1, STEPS + 1):
        for name in ("critic/score/mean", "actor/grad_norm", "actor/total_loss", "critic/kl", "critic/entropy/mean"):
            assert others[step][name] == pytest.approx(rows[step][name], rel=2e-3, abs=1e-6), f"{name} of step {step}"
    assert rows[STEPS]["critic/kl"] > 10 * LOGPROBS  # there is something to compare


@pytest.mark.parametrize("layout", ["colocated", "apart"])
def test_every_layout_computes_the_same_numbers(outcomes: dict[str, Outcome], layout: str, folder: Path) -> None:
    assert compare(outcomes["single"], outcomes[layout]) == []
    check_metrics(folder / "single", folder / layout)


def test_vllm_generates_with_adapters(folder: Path, wide_digit_model: Path, digit_data: Path) -> None:
    pytest.importorskip("vllm")
    start(folder, "vllm", wide_digit_model, digit_data)
    check_metrics(folder / "single", folder / "vllm")


@pytest.mark.soak
def test_megatron_trains_as_fsdp2(folder: Path, wide_digit_model: Path, digit_data: Path) -> None:
    start(folder, "megatron", wide_digit_model, digit_data)
    check_metrics(folder / "single", folder / "megatron")


@pytest.mark.soak
def test_deepspeed_trains_as_fsdp2(
    folder: Path, outcomes: dict[str, Outcome], wide_digit_model: Path, digit_data: Path
) -> None:
    start(folder, "deepspeed", wide_digit_model, digit_data)
    found = outcome(folder / "deepspeed")
    assert compare(outcomes["single"], found) == []
    check_metrics(folder / "single", folder / "deepspeed")
    check_reference(found, wide_digit_model)


def test_the_reference_is_the_model_without_adapters(outcomes: dict[str, Outcome], wide_digit_model: Path) -> None:
    for result in outcomes.values():
        check_reference(result, wide_digit_model)


def check_reference(result: Outcome, model: Path) -> None:
    assert max(deviation(model, batch) for batch in result.batches.values()) < LOGPROBS
    assert not torch.allclose(result.batches[2].old_logprobs, result.batches[2].ref_logprobs, atol=100 * LOGPROBS)
    assert all("lora_" in name for name in result.gradients)


@pytest.mark.soak
def test_a_killed_run_ends_with_the_same_result(
    folder: Path, tmp_path: Path, wide_digit_model: Path, digit_data: Path
) -> None:
    start(tmp_path, "colocated", wide_digit_model, digit_data, {"HPCRL_FAILPOINT": "renamed:2"})
    start(tmp_path, "colocated", wide_digit_model, digit_data)
    killed, undisturbed = tmp_path / "colocated", folder / "colocated"
    shards = [sorted((run / "checkpoints" / step_name(STEPS)).glob("*.distcp")) for run in (killed, undisturbed)]
    assert len(shards[0]) == len(shards[1]) == 2
    assert all(one.read_bytes() == other.read_bytes() for one, other in zip(*shards, strict=True))
    exported = [load_file(run / "hf" / "model.safetensors") for run in (killed, undisturbed)]
    given = load_file(wide_digit_model / "model.safetensors")
    assert exported[0].keys() == given.keys() and all(torch.equal(exported[0][n], exported[1][n]) for n in given)
    changed = {name for name in given if not torch.equal(given[name], exported[0][name])}
    assert {name.split(".")[-2] for name in changed} == {
        f"{n}_proj" for n in ("q", "k", "v", "o", "gate", "up", "down")
    }
