"""pipeline=online_dpo in whole runs: a step equals pipeline=dpo on the same pairs written as rows; two ranks that are
killed and resumed learn like one."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from hpcrl.algorithms.pairs.objective import CHOSEN_TOKENS, make_objective
from hpcrl.algorithms.pairs.spec import DPOConfig
from hpcrl.config import load
from hpcrl.data import sft_rows
from hpcrl.engines.train.fsdp2.engine import FSDP2Engine
from hpcrl.metrics.log import read_metrics
from hpcrl.metrics.stats import Stats
from hpcrl.rollout.store import RolloutReader
from hpcrl.system.exit_codes import ExitCode
from hpcrl.workers.trainer import batch_of_rows
from tests.e2e.program import Start
from tests.engines.worlds import norms_of, process_group

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

NUM_STEPS = 3
LOSS = ["dpo.beta=.5", "dpo.sft_weight=.1", "trainer.lr=2e-3"]
WORDS = f"""
pipeline=online_dpo max_steps={NUM_STEPS} save_every=1 eval_every=0 data.max_prompt_tokens=32 rollout.num_prompts=8
rollout.group_size=4 rollout.max_new_tokens=4 reward.default.name=exact_match generator.max_num_seqs=8
deterministic=true trainer.max_tokens_per_micro_batch=64 cluster.device=cpu trackers=[] timeline.enabled=false
""".split()
COMPARED = ("loss", "nll_loss", "rewards/", "logps/", "pairs/", "critic/score", "prompts/", "actor/grad_norm")


def metrics(run: Path) -> list[dict[str, float]]:
    """Every step's metrics of rollouts, pairs and learning."""
    return [
        {name: value for name, value in row.items() if name.startswith(COMPARED) and value is not None}
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


def dpo_step(model: Path, pairs: Path, store: Path) -> Stats:
    """The statistics of the step that pipeline=dpo takes on these rows."""
    config = load(["pipeline=dpo", f"model.path={model}", f"data.train={pairs}", *LOSS])
    rows = sft_rows(config.data, "train", AutoTokenizer.from_pretrained(model), config.seed, config.row_kind)
    batch = batch_of_rows(rows, range(2 * len(rows)))
    plan, objective = [[*range(batch.num_sequences)]], make_objective(config.section(DPOConfig))
    tokens = torch.zeros(batch.num_sequences).index_add(0, batch.row_ids, batch.loss_mask.float())
    objective.coefficients = {CHOSEN_TOKENS: float(tokens[::2].sum())}
    with process_group(0, 1, str(store)):
        engine = FSDP2Engine(config.trainer, model, dtype=torch.float32, total_steps=1)
        batch.ref_logprobs = engine.logprobs(batch, plan, 1.0)
        return engine.train_step(batch, plan, objective, norms_of(batch))


def test_a_step_is_that_of_dpo_and_kills_and_ranks_change_nothing(
    tmp_path: Path, digit_model: Path, digit_data: Path
) -> None:
    words = [f"model.path={digit_model}", f"data.train={digit_data}", *WORDS, *LOSS]
    one = Start(tmp_path / "one", [*words, "layout=single"])
    assert one.wait() == ExitCode.DONE, one.text
    wanted = metrics(tmp_path / "one")
    assert len(wanted) == NUM_STEPS and all(step["pairs/count"] > 0 for step in wanted)
    assert wanted[-1]["prompts/trained"] == 8 * NUM_STEPS and abs(wanted[-1]["rewards/margins"]) > 1e-3

    num_pairs = write_pairs(tmp_path / "one", tmp_path / "pairs.jsonl")
    assert num_pairs == wanted[0]["pairs/count"] == 8 - wanted[0]["pairs/groups_without"]
    found = dpo_step(digit_model, tmp_path / "pairs.jsonl", tmp_path / "store")
    for name in ("loss", "nll_loss", "logps/chosen", "logps/rejected", "actor/grad_norm"):
        assert found[name].total / found[name].count == pytest.approx(wanted[0][name], rel=1e-5), name

    killed = Start(tmp_path / "two", [*words, "layout=colocated"])
    killed.wait_until(lambda: killed.step >= 1)
    killed.kill()
    again = Start(tmp_path / "two", [*words, "layout=colocated"])
    assert again.wait() == ExitCode.DONE, again.text
    for mine, other in zip(metrics(tmp_path / "two"), wanted, strict=True):
        assert mine == pytest.approx(other, rel=2e-3, abs=2e-4)
