"""pipeline=online_dpo in whole runs: a step equals pipeline=dpo on the same pairs written as rows; two ranks that are
killed and resumed learn like one."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

import pytest

from hpcrl.metrics.log import read_metrics
from hpcrl.rollout.store import RolloutReader
from hpcrl.system.exit_codes import ExitCode
from tests.e2e.program import Start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

NUM_STEPS = 4
WORDS = """
dpo.beta=.5 dpo.sft_weight=.1 trainer.lr=2e-3 data.max_prompt_tokens=32 save_every=1 eval_every=0 cluster.device=cpu
trainer.max_tokens_per_micro_batch=64 trackers=[] timeline.enabled=false
""".split()  # noqa: SIM905
ONLINE = f"""
pipeline=online_dpo max_steps={NUM_STEPS} rollout.num_prompts=8 rollout.group_size=4 rollout.max_new_tokens=4
generator.max_num_seqs=8 deterministic=true reward.default.name=exact_match
""".split()
COMPARED = ("loss", "nll_loss", "rewards/", "logps/", "pairs/", "critic/score", "prompts/", "actor/grad_norm")


def metrics(run: Path, *names: str) -> list[dict[str, float]]:
    """Every step's metrics that begin with one of the names."""
    return [
        {name: value for name, value in row.items() if name.startswith(names) and value is not None}
        for row in read_metrics(run)
        if row["step"] > 0
    ]


def write_pairs(run: Path, path: Path) -> int:
    """Write the first best and the first worst response to each prompt of the run's first step as rows; returns the
    number of rows."""
    stored, rows = RolloutReader(run).read(1), []
    samples = zip(stored.batch.group_ids.tolist(), stored.batch.rewards.tolist(), range(10**6), strict=False)
    for _, group in groupby(samples, key=lambda sample: sample[0]):
        ranked = list(group)
        best, worst = max(ranked, key=lambda one: (one[1], -one[2])), min(ranked, key=lambda one: (one[1], one[2]))
        if best[1] > worst[1]:
            messages = [stored.messages(one[2]) for one in (best, worst)]
            rows.append({"chosen": messages[0], "rejected": messages[1]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return len(rows)


def test_a_step_is_that_of_dpo_and_kills_and_ranks_change_nothing(
    tmp_path: Path, digit_model: Path, digit_data: Path
) -> None:
    online = [f"model.path={digit_model}", f"data.train={digit_data}", *WORDS, *ONLINE]
    one = Start(tmp_path / "one", [*online, "layout=single", "rollout.save_rollouts=true"])
    assert one.wait() == ExitCode.DONE, one.text
    wanted = metrics(tmp_path / "one", *COMPARED)
    assert len(wanted) == NUM_STEPS and all(step["pairs/count"] > 0 for step in wanted)
    assert wanted[-1]["prompts/trained"] == 8 * NUM_STEPS and abs(wanted[-1]["rewards/margins"]) > 1e-3

    num_pairs = write_pairs(tmp_path / "one", tmp_path / "pairs.jsonl")
    assert num_pairs == wanted[0]["pairs/count"] == 8 - wanted[0]["pairs/groups_without"]
    words = [f"model.path={digit_model}", f"data.train={tmp_path}/pairs.jsonl", *WORDS, "layout=single"]
    rows = Start(tmp_path / "rows", [*words, "pipeline=dpo", f"dpo.batch_size={num_pairs}", "max_steps=1"])
    assert rows.wait() == ExitCode.DONE, rows.text
    (step,) = metrics(tmp_path / "rows", "loss", "nll_loss", "rewards/", "logps/", "actor/grad_norm")
    assert step == pytest.approx({name: wanted[0][name] for name in step}, rel=1e-5, abs=1e-6)
    assert step["actor/grad_norm"] > 0.1

    killed = Start(tmp_path / "two", [*online, "layout=colocated"])
    killed.wait_until(lambda: killed.step >= 2)
    killed.kill()
    again = Start(tmp_path / "two", [*online, "layout=colocated"])
    assert again.wait() == ExitCode.DONE, again.text
    for mine, other in zip(metrics(tmp_path / "two", *COMPARED), wanted, strict=True):
        assert mine == pytest.approx(other, rel=2e-3, abs=2e-4)
