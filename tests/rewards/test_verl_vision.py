"""A row of verl's geo3k, from its parquet file to a reward function of verl's signature in a worker process."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from hpcrl.config import DataConfig, parse
from hpcrl.controller.generation import training_sampling
from hpcrl.data import PromptSource
from hpcrl.messaging.messages import Response
from hpcrl.rewards.reward import Score
from hpcrl.rewards.serving.pool import RewardPool
from hpcrl.rollout.admission import admissions
from hpcrl.rollout.types import make_sample_id
from hpcrl.workers.reward import item_of
from tests.rewards.test_grounding import GEO3K
from tests.vlm import png, seeing_tokenizer

FUNCTION = f"{Path(__file__).with_name('vision_rewards.py')}:compute_score"
RESPONSES = {"<think>As in the picture.</think>It is \\boxed{2\\sqrt 3}.": 1.0, "It is \\boxed{3}.": 0.0}


def test_a_row_of_geo3k_reaches_verls_function_unchanged(tmp_path: Path) -> None:
    row: dict[str, Any] = GEO3K | {"images": [{"bytes": png(9), "path": "images/7.png"}]}
    parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "train.parquet")
    section = {"name": "function", "function": FUNCTION, "timeout_s": 60}
    config = parse({"data": {"train": str(tmp_path / "train.parquet")}, "reward": {"default": section}})
    source = PromptSource(DataConfig(train=config.data.train), "train", seeing_tokenizer(), 0, batch_size=1)
    prompt = source.next()
    samples = [make_sample_id(prompt.uid, 0, member) for member in range(len(RESPONSES))]
    [admitted] = admissions(samples, {prompt.uid: prompt}, training_sampling(config), seed=0)
    [payload] = admitted.prompts
    assert len(payload.media) == 1
    items = [
        item_of(Response(sample, payload.domain, text, payload.meta, "stop"))
        for sample, text in zip(samples, RESPONSES, strict=True)
    ]
    assert items[0].prompt.count("<|image_pad|>") == 1 and items[0].messages[0]["content"].startswith("<image>Find x.")
    assert items[0].extra["extra_info"] == GEO3K["extra_info"], "all that verl gives to the function, and no image"
    assert not items[0].images and items[0].extra["data_source"] == "hiyouga/geometry3k"
    pool = RewardPool(config)
    found: dict[int, Score] = {}
    try:
        pool.submit(items)
        deadline = time.monotonic() + 60
        while len(found) < len(items) and time.monotonic() < deadline:
            found |= dict(pool.poll())
            time.sleep(0.01)
    finally:
        pool.close()
    assert [found[sample].reward for sample in samples] == pytest.approx([*RESPONSES.values()])
    assert [found[sample].error for sample in samples] == ["", ""]
    assert found[samples[0]].metrics == {"acc": 1.0, "index": 7.0}
