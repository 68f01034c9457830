"""Runs that generate with vLLM: the same prompts and seeds give what the native engine gives, on every layout."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from hpcrl.metrics.log import read_metrics
from hpcrl.rollout.store import RolloutReader
from hpcrl.system.exit_codes import ExitCode
from hpcrl.system.files import committed_step
from tests.conftest import ROOT
from tests.e2e.program import Start
from tests.e2e.test_resume import WORDS, check_accounts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Which responses end first may decide what a step trains on only where prompts are left over.
ALL = [
    *WORDS,
    "rollout.filter_std=false",
    "rollout.extra_prompts=0",
    "max_steps=3",
    "eval_every=1",
    "check_weights=true",
]
APART = """
layout=disaggregated layout.trainer.num_ranks=1 layout.reference.colocate_with=trainer layout.reference.num_ranks=null
layout.reward.colocate_with=trainer layout.reward.num_ranks=null
""".split()  # noqa: SIM905
"""Rank 1 trains and scores, those from 2 on generate."""
LAYOUTS = {
    "single": ["layout=single"],
    "colocated": ["layout=colocated", "layout.offload=always"],
    "colocated_split": ["layout=colocated", "layout.generator.tensor_parallel=2"],
    "apart_split": [*APART, "layout.generator.num_ranks=2", "layout.generator.tensor_parallel=2"],
}
AHEAD = [*ALL, *APART, "layout.generator.num_ranks=1", "rollout.max_staleness=1"]
EXPERTS = """
layout=single model.tiny.architecture=qwen3_moe model.tiny.num_experts=8 model.tiny.hidden_size=64
model.tiny.num_heads=2 model.tiny.num_kv_heads=1 trainer.param_dtype=bfloat16 generator.dtype=bfloat16
trainer.router_replay=true data.train=task:sort_digits data.max_prompt_tokens=64 rollout.num_prompts=8
rollout.group_size=4 rollout.max_new_tokens=8 rollout.filter_std=false max_steps=2 save_every=0 eval_every=0
""".split()  # noqa: SIM905
SAME = ("critic/score/mean", "token/response_length/mean", "token/response_length/max", "domain/default/score")
CLOSE = ("actor/pg_loss", "actor/grad_norm", "critic/entropy/mean", "actor/ratio_mean")


class Runs:
    """Starts in a folder."""

    def __init__(self, folder: Path, model: Path, data: Path):
        self.folder, self._inputs = folder, [f"model.path={model}", f"data.train={data}", f"data.val={data}"]

    def start(
        self, name: str, words: list[str], dies: str = "", slow: str = "", inputs: bool = True
    ) -> tuple[int, str]:
        """One start of a run to its end: exit code and what it printed."""
        environment = {"PYTHONPATH": f"{ROOT}:{ROOT}/tests/e2e/dies", "HPCRL_TEST_DIES": dies, "HPCRL_TEST_SLOW": slow}
        start = Start(self.folder / name, [*(self._inputs if inputs else ()), *words], environment)
        return start.wait(300.0), start.text

    def preempt(self, name: str, words: list[str]) -> tuple[int, str]:
        """One start that gets Slurm's warning of a preemption after its first step: exit code and what it printed."""
        start = Start(self.folder / name, [*self._inputs, *words])
        start.wait_until(lambda: start.step >= 1, 300.0)
        start.process.send_signal(signal.SIGUSR1)
        return start.wait(300.0), start.text


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, wide_digit_model: Path, digit_data: Path) -> Runs:
    pytest.importorskip("vllm")
    return Runs(tmp_path_factory.mktemp("vllm"), wide_digit_model, digit_data)


@pytest.fixture(scope="module")
def native(runs: Runs) -> list[dict[str, Any]]:
    code, text = runs.start("native", [*ALL, "layout=single"])
    assert code == ExitCode.DONE, text
    return read_metrics(runs.folder / "native")


def check_same(run_dir: Path, native: list[dict[str, Any]], same: Collection[str] = SAME) -> None:
    rows = read_metrics(run_dir)
    assert len(rows) == len(native) == 4
    for row, wanted in zip(rows, native, strict=True):
        for name in same:
            assert row.get(name) == wanted.get(name), (row["step"], name)
        for name in CLOSE if row["step"] else ():
            assert row.get(name) == pytest.approx(wanted.get(name), rel=2e-3, abs=1e-5), (row["step"], name)
    assert len({row["critic/score/mean"] for row in rows[1:]}) > 1, "scores that can differ"


# Of the others, killed or preempted: below.
@pytest.mark.parametrize("layout", [pytest.param("single", marks=pytest.mark.soak), "colocated_split"])
def test_a_run_matches_the_native_engine(runs: Runs, layout: str, native: list[dict[str, Any]]) -> None:
    code, text = runs.start(layout, [*ALL, "generator.engine=vllm", *LAYOUTS[layout]])
    assert code == ExitCode.DONE, text
    check_same(runs.folder / layout, native)


@pytest.mark.soak
def test_an_asynchronous_run_matches_the_native_engine(runs: Runs) -> None:
    """The trainer is slow, so every batch but the first is generated with the previous weights."""
    for engine in ("native", "vllm"):
        code, text = runs.start(f"ahead_{engine}", [*AHEAD, f"generator.engine={engine}"], slow="1:TrainStep:2")
        assert code == ExitCode.DONE, text
        for step in (1, 2, 3):
            batch = RolloutReader(runs.folder / f"ahead_{engine}").batch(step)
            assert batch.versions[batch.loss_mask].unique().tolist() == [max(0, step - 2)]
    of_the_batch = {*SAME} - {"domain/default/score"}  # over everything scored meanwhile, including later steps
    check_same(runs.folder / "ahead_vllm", read_metrics(runs.folder / "ahead_native"), of_the_batch)


def test_replayed_experts_and_bfloat16_match_the_native_engine(runs: Runs) -> None:
    steps = {}
    for engine in ("native", "vllm"):
        name = f"experts_{engine}"
        code, text = runs.start(name, [*EXPERTS, f"generator.engine={engine}"], inputs=False)
        assert code == ExitCode.DONE, text
        batch = RolloutReader(runs.folder / name).batch(2)
        assert batch.routes.shape == (batch.num_tokens, 4)  # 2 layers of 2 experts
        assert (batch.routes[batch.loss_mask] < 8).all() and (batch.routes[~batch.loss_mask] == 255).all()
        steps[engine] = read_metrics(runs.folder / name)[-2:]
    for ours, theirs in zip(steps["vllm"], steps["native"], strict=True):
        assert 1e-7 < ours["mismatch/diff/mean"] < 2 * theirs["mismatch/diff/mean"] < 1e-4, "of tokens of about 1/320"
        assert 1e-8 < ours["mismatch/kl_k3"] < 4 * theirs["mismatch/kl_k3"] < 1e-4


@pytest.mark.soak
def test_a_run_continues_after_a_kill_of_the_second_rank_of_a_replica(runs: Runs, native: list[dict[str, Any]]) -> None:
    words = [*ALL, "generator.engine=vllm", *LAYOUTS["apart_split"], "save_every=1"]
    code, text = runs.start("killed", words, "3:UpdateWeights:4:SIGKILL")
    assert code == ExitCode.RANK_KILLED and re.search(r"hpcrl: rank 3 .*killed by SIGKILL", text), text
    assert committed_step(runs.folder / "killed") in (1, 2), text
    code, text = runs.start("killed", [*ALL, "generator.engine=vllm", *LAYOUTS["single"]])  # fewer starts of vLLM
    assert code == ExitCode.DONE and "resumed from" in text, text
    check_same(runs.folder / "killed", native)


def test_a_preempted_run_resumes(runs: Runs, native: list[dict[str, Any]]) -> None:
    words = [*ALL, "generator.engine=vllm"]
    code, text = runs.preempt("preempted", [*words, *LAYOUTS["colocated"]])
    assert code == ExitCode.REQUEUE, text
    assert committed_step(runs.folder / "preempted") in (1, 2), text
    code, text = runs.start("preempted", [*words, *LAYOUTS["single"]])
    assert code == ExitCode.DONE and "resumed from" in text, text
    check_same(runs.folder / "preempted", native)


@pytest.mark.soak
def test_an_asynchronous_run_names_lost_replicas_with_their_last_log_lines(runs: Runs) -> None:
    words = [*WORDS, *APART, "generator.engine=vllm", "layout.generator.num_ranks=3", "rollout.max_staleness=1"]
    words += ["rollout.on_new_weights=recompute", "timeouts.command_s=30"]
    code, text = runs.start("lost", words, "2:DecodeChunk:12:SIGKILL 3:DecodeChunk:24:SIGSTOP")
    assert code == ExitCode.DONE, text
    lost = dict(re.findall(r"rank (\d) \(generator\).* is lost: (.*); the run continues without it", text))
    assert lost.keys() == {"2", "3"}, text
    assert re.search(
        r"killed by SIGKILL in DecodeChunk #\d+; its log ends: .*at the end: SIGKILL before DecodeChunk", lost["2"]
    )
    silent = r"sent no heartbeat for \d+ s in DecodeChunk #\d+ and was killed"
    assert re.search(rf"{silent}; its log ends: .*at the end: SIGSTOP before DecodeChunk", lost["3"])
    check_accounts(runs.folder / "lost")
