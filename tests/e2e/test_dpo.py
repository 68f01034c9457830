"""pipeline=dpo in whole runs: the model learns what pairs prefer; ranks, kills and resumes change no metric."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from hpcrl.metrics.log import read_metrics
from hpcrl.system.exit_codes import ExitCode
from tests.e2e.conftest import DIGITS
from tests.e2e.program import Start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

NUM_STEPS = 8
WORDS = f"""
pipeline=dpo max_steps={NUM_STEPS} save_every=2 eval_every=4 dpo.batch_size=8 cluster.device=cpu
trainer.max_tokens_per_micro_batch=64 trackers=[] timeline.enabled=false
""".split()


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory, digit_model: Path) -> list[str]:
    """Pairs whose chosen digit is 0, of which the last ones are held out."""
    folder, rng = tmp_path_factory.mktemp("pairs"), random.Random(0)
    pairs = [{"prompt": f"digit {i}", "chosen": DIGITS[0], "rejected": rng.choice(DIGITS[1:])} for i in range(30)]
    for name, part in (("train", pairs[:20]), ("val", pairs[20:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return [*WORDS, f"model.path={digit_model}", f"data.train={folder}/train.jsonl", f"data.val={folder}/val.jsonl"]


def metrics(run: Path) -> list[dict[str, float]]:
    """Every step's metrics of rows and learning."""
    kept = ("loss", "kl", "rewards/", "logps/", "val/", "actor/", "rows/")
    return [
        {name: value for name, value in row.items() if name.startswith(kept) and value is not None}
        for row in read_metrics(run)
        if row["step"] > 0
    ]


def test_two_ranks_that_are_killed_learn_like_one(tmp_path: Path, words: list[str]) -> None:
    """With KTO and adapters, so the reference is the model without them, and every step estimates the KL term."""
    words = [*words, "dpo.loss=kto", "dpo.beta=.5", "dpo.undesirable_weight=.1", "trainer.lr=5e-3"]
    words += ["trainer.lora.rank=8", "trainer.lora.alpha=16"]
    one = Start(tmp_path / "one", [*words, "layout=single"])
    assert one.wait() == ExitCode.DONE, one.text
    wanted = metrics(tmp_path / "one")
    assert len(wanted) == NUM_STEPS and wanted[0]["loss"] == pytest.approx(0.275) and wanted[0]["kl"] == 0
    assert max(step["kl"] for step in wanted) > 0.01 and wanted[-1]["val/rewards/margins"] > 0.3

    killed = Start(tmp_path / "two", [*words, "layout=colocated"])
    killed.wait_until(lambda: killed.step >= 3)
    killed.kill()
    again = Start(tmp_path / "two", [*words, "layout=colocated"])
    assert again.wait() == ExitCode.DONE, again.text
    found = metrics(tmp_path / "two")
    for mine, other in zip(found, wanted, strict=True):
        assert mine.keys() == other.keys()
        assert mine == pytest.approx(other, rel=2e-3, abs=2e-4)


def test_the_policy_answers_prompts_of_the_validation_data(tmp_path: Path, words: list[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"digit {i}", "answer": "0"}) + "\n" for i in range(40, 56)))
    more = [f"data.val={prompts}", "dpo.validation=responses", "layout=single", "trainer.lr=5e-3"]
    more += [
        "reward.default.name=exact_match",
        "rollout.max_new_tokens=4",
        "save_every=0",
        "dpo.beta=.5",
        "dpo.sft_weight=1",
    ]
    start = Start(tmp_path / "run", [*words, *more])
    assert start.wait() == ExitCode.DONE, start.text
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows if "val/score/mean" in row] == [4, 8]
    assert rows[-1]["val/sampled/score/mean"] > 0.8 and rows[-1]["rewards/accuracies"] == 1  # a third before
    assert not any(name.startswith("val/rewards") for name in rows[-1])
