"""Pairs with images in whole runs: a step of pipeline=dpo, with stored log-probs of the reference, and one of
online_dpo equal a step of the engine on the same pairs."""

from __future__ import annotations

import json
import random
from itertools import groupby
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from hpcrl.algorithms.pairs.objective import PairObjective
from hpcrl.algorithms.pairs.spec import DPOConfig
from hpcrl.config import DataConfig, TinyModel
from hpcrl.data import sft_rows
from hpcrl.data.chat import bind
from hpcrl.data.drawn import COLOURS, draw
from hpcrl.engines.tiny import make_tiny_model
from hpcrl.metrics.log import read_metrics
from hpcrl.models.families import vision_of
from hpcrl.rollout.batch import Batch
from hpcrl.rollout.store import RolloutReader
from hpcrl.system.exit_codes import ExitCode
from hpcrl.workers.trainer import batch_of_rows
from tests.e2e.program import Start
from tests.engines.test_images import engine_of
from tests.engines.worlds import norms_of, process_group

pytestmark = [pytest.mark.slow, pytest.mark.numerics, pytest.mark.timeout(400)]

BETA = 0.5
WORDS = f"""
layout=single save_every=0 cluster.device=cpu trackers=[] timeline.enabled=false dpo.beta={BETA}
trainer.max_tokens_per_micro_batch=64
""".split()
COMPARED = ("loss", "logps/chosen", "logps/rejected", "actor/grad_norm")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    tiny = TinyModel(architecture="qwen2_5_vl", hidden_size=32, num_heads=2, num_kv_heads=1, intermediate_size=64)
    make_tiny_model(tiny, folder)
    return folder


def first_step(folder: Path, model: Path, *words: str) -> dict[str, float]:
    """The metrics of a run's first step."""
    start = Start(folder, [f"model.path={model}", *WORDS, *words])
    assert start.wait() == ExitCode.DONE, start.text
    return next(row for row in read_metrics(folder) if row["step"] == 1)


def by_one_engine(model: Path, batch: Batch, store: Path) -> dict[str, float]:
    """The metrics of a step on these sequences, each chosen one before its rejected one."""
    plan = [[*range(batch.num_sequences)]]
    with process_group(0, 1, str(store)):
        engine = engine_of(model)
        batch.ref_logprobs = engine.logprobs(batch, plan, 1.0)
        stats = engine.train_step(batch, plan, PairObjective(DPOConfig(beta=BETA)), norms_of(batch))
    return {name: stats[name].total / stats[name].count for name in COMPARED}


def test_a_run_with_stored_log_probs_takes_the_step_of_one_engine(tmp_path: Path, model: Path) -> None:
    rng, rows, lines = random.Random(0), tmp_path / "pairs.jsonl", []
    for number in range(8):
        content, answers = draw(rng, 32)
        (tmp_path / f"{number}.png").write_bytes(content)
        wrong = rng.choice([name for name in COLOURS if name != answers["colour"]])
        asked = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "colour?"}]}
        line = {"images": [f"{number}.png"], "prompt": [asked], "chosen": answers["colour"], "rejected": wrong}
        lines.append(json.dumps(line) + "\n")
    rows.write_text("".join(lines))
    words = f"pipeline=dpo max_steps=2 eval_every=2 dpo.batch_size=8 data.train={rows} data.val={rows} trainer.lr=1e-2"
    found = first_step(tmp_path / "run", model, *words.split(), f"reference.cache={tmp_path}/cache")
    tokenizer = bind(AutoTokenizer.from_pretrained(model), {}, vision_of(model))
    pairs = sft_rows(DataConfig(train=str(rows)), "train", tokenizer, kind="pairs")
    wanted = by_one_engine(model, batch_of_rows(pairs, range(16)), tmp_path / "store")
    assert {name: found[name] for name in COMPARED} == pytest.approx(wanted, rel=1e-4)
    assert read_metrics(tmp_path / "run")[-1]["val/rewards/margins"] > 0


def test_a_step_of_online_dpo_is_that_of_one_engine_on_its_pairs(tmp_path: Path, model: Path) -> None:
    words = """
    pipeline=online_dpo max_steps=1 data.train=task:shapes data.max_prompt_tokens=32 rollout.num_prompts=6
    rollout.group_size=4 rollout.max_new_tokens=4 reward.default.name=fake generator.max_num_seqs=8
    rollout.save_rollouts=true
    """
    found = first_step(tmp_path / "run", model, *words.split())
    stored, paired = RolloutReader(tmp_path / "run").batch(1), list[int]()
    samples = zip(stored.group_ids.tolist(), stored.rewards.tolist(), range(10**6), strict=False)
    for _, members in groupby(samples, key=lambda sample: sample[0]):
        ranked = list(members)
        best, worst = max(ranked, key=lambda one: (one[1], -one[2])), min(ranked, key=lambda one: (one[1], one[2]))
        paired += [best[2], worst[2]] if best[1] > worst[1] else []
    batch = stored.select(paired)
    batch.chosen = torch.arange(len(paired)) % 2 == 0
    assert batch.num_sequences == 2 * found["pairs/count"] > 4 and len(batch.pictures) == 6
    assert {name: found[name] for name in COMPARED} == pytest.approx(
        by_one_engine(model, batch, tmp_path / "store"), rel=1e-4
    )
