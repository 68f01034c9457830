"""Reward ranks that score one domain only (layout.reward.domains)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpcrl.metrics.log import read_metrics
from hpcrl.system.exit_codes import ExitCode
from tests.conftest import ROOT
from tests.e2e.program import Start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NUM_PROMPTS, GROUP_SIZE = 8, 2
# Rank 1 trains, 2 generates; 3 and 4 score the domain slow, 5 all others.
WORDS = f"""
layout=disaggregated layout.trainer.num_ranks=1 layout.generator.num_ranks=1 layout.reward.num_ranks=3 max_steps=2
layout.reward.domains.slow=2 rollout.num_prompts={NUM_PROMPTS} rollout.group_size={GROUP_SIZE} rollout.max_new_tokens=3
data.max_prompt_tokens=32 data.domain_interleave_probs={{slow:.5,fast:.5}} algorithm.num_mini_batches=1
reward.default.name=function reward.default.function={ROOT}/tests/e2e/user_code.py:of_two_domains
reward.default.timeout_s=100 reward.default.options.fast={NUM_PROMPTS * GROUP_SIZE // 2}
""".split()


def test_a_slow_domain_delays_no_other_and_its_reward_ranks_replace_each_other(
    tmp_path: Path, digit_model: Path, digit_data: Path
) -> None:
    """No response of the slow domain is scored before all others of the step; one of its reward ranks is lost."""
    (notes := tmp_path / "notes").mkdir()
    train = f"[{{path:{digit_data},domain:slow}},{{path:{digit_data},domain:fast}}]"
    words = [f"model.path={digit_model}", f"data.train={train}", f"reward.default.options.folder={notes}", *WORDS]
    start = Start(tmp_path / "run", words, {"PYTHONPATH": str(ROOT)})
    assert start.wait() == ExitCode.DONE, start.text
    (lost,) = re.findall(r"rank (\d) \(reward\).* is lost: .*SIGKILL.*; the run continues without it", start.text)
    places: dict[str, set[str]] = {"slow": set(), "fast": set()}
    for name in (path.name for path in notes.glob("*.*")):
        domain, _, rank = name.split(".")
        places[domain].add(rank)
    assert places == {"slow": {"3", "4"} - {lost}, "fast": {"5"}}
    assert not sum(row.get("scheduler/score_errors", 0.0) for row in read_metrics(tmp_path / "run"))
