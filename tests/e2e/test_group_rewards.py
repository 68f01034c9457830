"""Rewards that score groups, in runs that lose scorers and replicas while group members wait for each other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hpcrl.checkpoint.state import read_state
from hpcrl.metrics.log import read_metrics
from hpcrl.rollout.store import RolloutReader
from hpcrl.system.exit_codes import ExitCode
from hpcrl.system.files import committed_step, step_name
from tests.conftest import ROOT
from tests.e2e.program import Start
from tests.e2e.test_resume import WORDS, check_accounts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_STEPS, COMMAND_S = 8, 14.0
# Rank 1 trains and runs environments, 2 to 4 generate, 5 and 6 score; a replica has 2 slots, a group 4 members.
LAYOUT = f"""
layout=disaggregated layout.trainer.num_ranks=1 layout.generator.num_ranks=3 layout.reward.num_ranks=2
layout.env.colocate_with=trainer layout.env.num_ranks=null layout.reference.colocate_with=trainer
layout.reference.num_ranks=null timeouts.command_s={COMMAND_S} max_steps={NUM_STEPS} generator.max_num_seqs=2
reward.default.name=function reward.default.function={ROOT}/tests/e2e/user_code.py:rank_siblings
env.played.name=scripted env.played.add_reward=true algorithm=null
algorithm.advantage_estimator=tests.e2e.user_code:STEPWISE
""".split()


@pytest.mark.parametrize(
    ("max_staleness", "scorer", "replica", "kill"),
    [(1, "5", "3", True), pytest.param(2, "6", "2", False, marks=pytest.mark.soak)],
    ids=["resumed", "max_staleness 2"],
)
def test_groups_are_scored_whole_whichever_rank_is_lost(
    tmp_path: Path, digit_model: Path, digit_data: Path, max_staleness: int, scorer: str, replica: str, kill: bool
) -> None:
    """A scorer dies with waiting group members, a replica with part of a group; in one of the runs everything is then
    killed and resumed. One of two domains has an environment, to whose rewards the group's are added."""
    train = f"[{{path:{digit_data},domain:played}},{{path:{digit_data},domain:plain}}]"
    inputs = [f"model.path={digit_model}", f"data.train={train}", f"data.val={digit_data}"]
    words, run_dir = [*inputs, *WORDS, *LAYOUT, f"rollout.max_staleness={max_staleness}"], tmp_path / "run"
    dies = f"{scorer}:ScoreGroup:9:SIGKILL {replica}:DecodeChunk:30:SIGKILL"
    start = Start(run_dir, words, {"PYTHONPATH": f"{ROOT}:{ROOT}/tests/e2e/dies", "HPCRL_TEST_DIES": dies})
    start.wait_until(lambda: kill and start.step >= 5, 200.0)
    start.kill()
    lost = re.findall(r"rank (\d) \(\w+\).* is lost: .*SIGKILL.*; the run continues without it", start.text)
    assert sorted(lost) == sorted([scorer, replica]), start.text
    if kill:
        check_accounts(run_dir)
        waiting = read_state(run_dir / "checkpoints" / step_name(committed_step(run_dir)))["scheduler"]
        assert waiting["queue"] or waiting["finished"], "the checkpoint has no unfinished or untrained group"
        start = Start(run_dir, words, {"PYTHONPATH": str(ROOT)})
    assert start.wait() == ExitCode.DONE, start.text
    check_accounts(run_dir)
    check_rewards(run_dir, digit_data)
    rows = read_metrics(run_dir)
    assert [row["step"] for row in rows] == list(range(NUM_STEPS + 1))
    assert not sum(row.get("scheduler/score_errors", 0.0) for row in rows), "each call had a whole group"
    scorers = [value for row in rows for name, value in row.items() if name.endswith("/scorer")]
    assert min(scorers) < max(scorers), "both scored"


def check_rewards(run_dir: Path, data: Path) -> None:
    """Every trained response has the rewards that follow from its group's texts, by turn and token."""
    answers = {row["prompt"]: row["answer"] for row in map(json.loads, data.read_text().splitlines())}
    reader = RolloutReader(run_dir)
    domains = {record.uid: record.domain for record in reader.outcomes()}
    seen, rewards = set(), set()
    for step in reader.steps():
        rollouts = reader.read(step)
        batch = rollouts.batch.check()
        said = [[m["content"] for m in rollouts.messages(row)] for row in range(batch.num_sequences)]
        turns = [row.tolist() for row in batch.turn_rewards.split(batch.cu_turns.diff().tolist())]
        for row, uid in enumerate(batch.group_ids.tolist()):
            siblings = [said[other][-1] for other, its in enumerate(batch.group_ids.tolist()) if its == uid]
            assert len(siblings) == 4
            share = sum(text < said[row][-1] for text in siblings) / 4
            expected = [0.125] * (len(turns[row]) - 1) + [share] if len(turns[row]) > 1 else [0.125 + share]
            if len(expected) == 2:  # the environment's
                expected[-1] += float(said[row][-1].strip() == answers[said[row][0]])
            assert turns[row] == expected and batch.rewards[row] == sum(expected), (step, row, siblings)
            at = slice(batch.cu_seqlens[row], batch.cu_seqlens[row + 1])
            tokens = batch.token_rewards[at][batch.loss_mask[at]]
            places = {0: 0.125, len(tokens) - 1: share} if len(tokens) > 1 else {0: 0.125 + share}
            if len(expected) == 1:
                assert tokens.tolist() == [places.get(place, 0.0) for place in range(len(tokens))]
            returns = batch.returns[at][batch.loss_mask[at]]
            assert returns.tolist() == tokens.flip(0).cumsum(0).flip(0).tolist(), (
                "the advantage estimator did not read these token rewards"
            )
            seen.add((domains[uid], len(expected)))
            rewards |= set(expected)
    assert seen >= {("played", 2), ("plain", 1)} and len(rewards) > 4
