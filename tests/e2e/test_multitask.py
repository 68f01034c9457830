"""The recipe rlvr_multitask: four domains with a reward of their own each, a judge included."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from hpcrl.metrics.log import read_metrics
from hpcrl.rollout.store import RolloutReader
from hpcrl.system.exit_codes import ExitCode
from hpcrl.system.files import committed_step
from tests.e2e.program import Start
from tests.rewards.test_judge import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NUM_STEPS, SHARES = 4, {"sums": 4, "programs": 3, "gym": 2, "instructions": 1}


def test_a_preempted_run_of_four_domains_keeps_shares_and_accounting(tmp_path: Path) -> None:
    """With random weights no reward is won: the test is that each reward scores its own domain."""
    told = threading.Event()

    def grade(body: dict[str, Any], number: int) -> str:
        if number > 6:  # requests of the first evaluation and step: no second step ends before the signal
            told.wait(60)
        return str(body["messages"][-1]["content"].splitlines()[-1]).removesuffix("V") + "10"

    judge = Server(grade)
    words = f"""
    +experiment=rlvr_multitask max_steps={NUM_STEPS} save_every=1 eval_every={NUM_STEPS} eval.num_prompts=6
    eval.sets.sums={{num_prompts:2,samples:4,temperature:1.0}}
    rollout.domains.gym.max_new_tokens=7
    rollout.num_prompts=10 rollout.group_size=2 algorithm.num_mini_batches=1 generator.max_num_seqs=32
    """.split()
    part = f"name:judge,weight:.25,options:{{judges:{{one:{{url:'http://127.0.0.1:{judge.port}/v1',model:grader}}}}}}"
    words.append(f"reward.instructions.options.parts.judge={{{part}}}")
    run_dir = tmp_path / "run"
    try:
        start = Start(run_dir, words)
        start.wait_until(lambda: start.step >= 1)
        start.process.send_signal(signal.SIGUSR1)
        told.set()
        assert start.wait() == ExitCode.REQUEUE, start.text
        assert 1 <= committed_step(run_dir) < NUM_STEPS
        start = Start(run_dir, words)
        assert start.wait() == ExitCode.DONE, start.text
        judged = len(judge.bodies)
    finally:
        judge.close()
    reader = RolloutReader(run_dir)
    assert list(reader.steps()) == list(range(1, NUM_STEPS + 1))
    for step in reader.steps():
        domains, rollouts = reader.domains(step), reader.read(step)
        batch = rollouts.batch
        assert {name: len(uids) for name, uids in domains.items()} == SHARES
        lengths = [int(part.sum()) for part in batch.loss_mask.split(batch.lengths.tolist())]
        limits = [7 if uid in domains["gym"] else 32 for uid in batch.group_ids.tolist()]
        assert all(length <= limit for length, limit in zip(lengths, limits, strict=True))
        assert max(lengths) > 7
        parts = {uid: row for uid, row in zip(batch.group_ids.tolist(), rollouts.metrics, strict=True)}
        assert all(parts[uid]["judge"] == 1.0 for uid in domains["instructions"]), "each part's value is stored"
    uids = [record.uid for record in reader.outcomes()]
    assert sorted(uids) == list(range(NUM_STEPS * 10)), "each prompt ended once"
    rows = read_metrics(run_dir)
    assert [row["step"] for row in rows] == list(range(NUM_STEPS + 1))
    assert all(f"val/{name}/score" in rows[-1] and f"domain/{name}/score" in rows[-1] for name in SHARES)
    assert {"val/sums/pass@4", "val/sums/maj@4"} <= rows[-1].keys() and "val/sampled/sums/score" not in rows[-1]
    assert all(f"domain/{name}/critic/advantages/mean" in rows[-1] for name in SHARES)
    assert rows[-1]["env/programs/sandbox_level"] >= 1 and rows[-1]["env/instructions/judge"] == 1.0
    assert judged >= NUM_STEPS * 2, "every response of the instructions was judged"
    assert not sum(row.get("scheduler/score_errors", 0.0) for row in rows)
