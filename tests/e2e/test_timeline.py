"""Timelines of whole runs: every command of every rank once, samples in order, nothing of an abandoned step."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from hpcrl.rollout.store import RolloutReader
from hpcrl.system.exit_codes import ExitCode
from hpcrl.timeline.step_file import ChunkRow, CommandRow, StepTimeline, path_of, read_step, recorded_steps
from hpcrl.timeline.waiting import role_shares
from tests.e2e.program import Start
from tests.report.test_samples import check_samples

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RESUMED = 2
SLACK_US = 5
"""Times of one host are rounded to microseconds one by one."""
WORDS = f"""
layout=disaggregated save_every={RESUMED} eval_every=3 eval.num_prompts=4 eval.num_examples=1 rollout.num_prompts=4
rollout.group_size=4 rollout.max_new_tokens=3 rollout.filter_std=true rollout.max_staleness=1 data.max_prompt_tokens=32
generator.max_num_seqs=8 generator.decode_chunk_tokens=2 algorithm.num_mini_batches=2 trainer.lr=1e-3
reward.default.name=exact_match reward.default.timeout_s=100 env.played.name=scripted env.played.add_reward=true
""".split()


def timelines(run_dir: Path, last: int, resumed: int | None = None) -> list[StepTimeline]:
    """The timelines of steps 0 to `last`, checked. In the steps after the resumed one, samples may be older."""
    assert recorded_steps(run_dir) == list(range(last + 1))
    steps = [read_step(path_of(run_dir, step)) for step in range(last + 1)]
    for number, step in enumerate(steps):
        header = step.header
        assert header.step == number and header.complete and not header.omitted and not step.damaged
        assert {clock.error_s for clock in header.clocks.values()} == {0.0}
        for shares in role_shares(step):
            spent = sum(shares.busy.values()) + sum(shares.waiting.values())
            assert spent == pytest.approx(header.seconds, abs=1e-5)
        for sample in step.samples:
            if sample.fate in ("trained", "validated"):
                times = sample.drawn, sample.start, sample.end, sample.scored, sample.done
                known = [time for time in times if time is not None]
                assert known == sorted(known), sample
                older = resumed is not None and resumed < number <= resumed + 2  # max_staleness=1
                assert len(known) == len(times) or (older and sample.fate == "trained"), sample
                assert sample.domain and sample.replica > 0 and sample.tokens > 0
        for work in step.works:
            assert work.duration >= 0 and work.start + work.duration <= step.length + SLACK_US
    return steps


def check_commands(steps: list[StepTimeline]) -> None:
    """Every command of every rank is in the files once, and the commands of a rank do not overlap."""
    for rank in {row.rank for step in steps for row in step.commands}:
        spans = []
        for step in steps:
            began = step.header.began * 1e6
            every: list[CommandRow | ChunkRow] = [*step.commands, *step.chunks]
            rows = [row for row in every if row.rank == rank]
            assert all(row.start + row.duration <= step.length for row in rows)
            spans += sorted((row.number, began + row.start, row.duration) for row in rows)
        numbers = [number for number, *_ in spans]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), f"rank {rank}"
        for (_, start, duration), (_, following, _) in pairwise(spans):
            assert start + duration <= following + 2000  # `began` is Unix time, read after the monotonic clock
        assert "?" not in {row.name for step in steps for row in step.commands}


def test_engines_without_a_model_leave_a_complete_timeline_and_samples(tmp_path: Path) -> None:
    words = ["+experiment=demo", "model=tiny", "debug=fake", "max_steps=3", "eval.num_prompts=16"]
    words += ["rollout.num_prompts=8", "timeline.keep_steps=3"]
    start = Start(tmp_path / "run", words)
    assert start.wait() == ExitCode.DONE, start.text
    steps = timelines(tmp_path / "run", last=3)
    check_commands(steps)
    reader = RolloutReader(tmp_path / "run")
    for step in steps[1:]:
        fates = Counter(sample.fate for sample in step.samples)
        assert fates["trained"] == 64 and {s.lag for s in step.samples if s.fate == "trained"} == {0}
        trained = {sample.prompt for sample in step.samples if sample.fate == "trained"}
        assert trained == set(reader.read(step.header.step).batch.group_ids.tolist())
        assert Counter(row.name for row in step.commands)["TrainStep"] == 2 * 4  # two ranks, four mini-batches
        scored = {work.sample for work in step.works}
        assert {sample.sample for sample in step.samples if sample.fate in ("trained", "filtered")} <= scored
    assert Counter(sample.fate for sample in steps[0].samples)["validated"] == 32  # greedy and sampled
    check_samples(tmp_path / "run", num_steps=3, per_step=64)


def test_a_killed_run_leaves_no_timeline_of_an_abandoned_step(
    tmp_path: Path, digit_model: Path, digit_data: Path
) -> None:
    """A real model, generation ahead of training, rewards and environments on ranks of their own."""
    train = f"[{{path:{digit_data},domain:played}},{{path:{digit_data},domain:plain}}]"
    words = [f"model.path={digit_model}", f"data.train={train}", f"data.val={digit_data}", *WORDS]
    start = Start(tmp_path / "run", [*words, "max_steps=50"])
    start.wait_until(lambda: (tmp_path / "run/checkpoints/step_000002").is_dir() and start.step > RESUMED)
    start.wait_until(lambda: 3 in recorded_steps(tmp_path / "run"))
    start.kill()
    abandoned = [step for step in recorded_steps(tmp_path / "run") if step > RESUMED]
    assert start.process.returncode != 0 and abandoned
    again = Start(tmp_path / "run", [*words, "max_steps=5"])
    assert again.wait() == ExitCode.DONE, again.text
    steps = timelines(tmp_path / "run", last=5, resumed=RESUMED)
    moved = [path.name for path in sorted((tmp_path / "run/abandoned").glob("*/timeline/*"))]
    assert moved == [f"step_{step:06d}.jsonl" for step in abandoned] or len(moved) > len(abandoned)
    check_commands(steps[:3])
    check_commands(steps[3:])
    roles = {role for rank in steps[-1].header.ranks for role in rank.roles}
    assert roles == {"controller", "trainer", "generator", "reward", "env"}
    assert {work.what for step in steps for work in step.works} == {"reward", "turn"}
    assert any(sample.turns > 1 for step in steps for sample in step.samples)
    lags = {sample.lag for step in steps for sample in step.samples if sample.fate == "trained"}
    assert lags <= {0, 1} and 1 in lags
    assert {chunk.rank for step in steps for chunk in step.chunks} == {
        rank.rank for rank in steps[-1].header.ranks if "generator" in rank.roles
    }
