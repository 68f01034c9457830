"""The recipes with images, small: their own keys with a tiny model, FSDP2 on two ranks and the native generator."""

from __future__ import annotations

import io
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from hpcrl.metrics.log import read_metrics
from hpcrl.rollout.store import RolloutReader
from hpcrl.spec.image_rows import image_spans
from hpcrl.system.exit_codes import ExitCode
from tests.e2e.program import Start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SMALL = """
model=tiny model.tiny.architecture=qwen2_5_vl cluster.device=cpu ~cluster.components cluster.threads_per_rank=1
cluster.oversubscribe=true layout.trainer.num_ranks=2 generator.engine=native generator.dtype=float32
generator.head_dtype=null generator.max_num_seqs=8 trainer.param_dtype=float32 trainer.head_dtype=null
trainer.max_tokens_per_micro_batch=512 rollout.num_prompts=4 rollout.group_size=2 rollout.max_new_tokens=4 max_steps=2
""".split()  # noqa: SIM905


def png(width: int, height: int, seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()


def geo3k(row: int) -> dict[str, Any]:
    """A row as verl prepares geometry3k."""
    return {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": f"<image>Find {row}."}],
        "images": [{"bytes": png(60 + row, 90, row), "path": None}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(row)},
        "extra_info": {"index": row, "split": "train"},
    }


def geoqa(row: int) -> dict[str, Any]:
    """A row of GEOQA_R1V_Train_8K."""
    image = {"bytes": png(90, 60 + row, row), "path": None}
    return {"image": image, "problem": f"Find {row}.", "solution": f"<answer> {row}° </answer>"}


ROWS = {"rlvr_vl_7b": geoqa, "rlvr_vl_qwen3_8b": geo3k}


def run(folder: Path, recipe: str, *words: str) -> list[dict[str, float | None]]:
    start = Start(folder / "run", [f"+experiment={recipe}", *SMALL, *words])
    assert start.wait(200.0) == ExitCode.DONE, start.text
    return read_metrics(folder / "run")


def images_of_rows(run_dir: Path, step: int) -> list[list[tuple[int, int]]]:
    """The sizes of each row's images."""
    batch = RolloutReader(run_dir).read(step).batch
    assert batch.images is not None
    starts = batch.cu("images").tolist()
    return [
        [(span.width, span.height) for span in image_spans(batch.images[first:last].numpy())]
        for first, last in pairwise(starts)
    ]


@pytest.mark.parametrize("recipe", ROWS)
def test_rows_with_images_are_trained_on(recipe: str, tmp_path: Path) -> None:
    data = tmp_path / "rows.parquet"
    parquet.write_table(pa.Table.from_pylist([ROWS[recipe](row) for row in range(8)]), data)
    ranks = [] if recipe == "rlvr_vl_qwen3_8b" else ["layout.reward.num_ranks=1"]
    words = [f"data.train={data}", "data.max_prompt_tokens=64", "data.max_pixels=3136", "trainer.fsdp2.replicas=2"]
    steps = run(tmp_path, recipe, *ranks, *words, "rollout.filter_std=false")
    assert [row["step"] for row in steps][-1] == 2
    assert (steps[-1]["mismatch/diff/mean"] or 0.0) < 1e-5, "the trainer sees what the generator saw"
    found = images_of_rows(tmp_path / "run", 2)
    assert len(found) == 8 and all(len(row) == 1 for row in found)
    assert all(width * height <= 3136 for row in found for width, height in row), "data.max_pixels"
    plan = (tmp_path / "run" / "plan.txt").read_text()
    counted = re.search(r"at most (\d) tokens, ([\d,]+) pixels a row, as counted in the data", plan)
    assert counted is not None, plan
    assert int(counted[2].replace(",", "")) == max(w * h for row in found for w, h in row) == int(counted[1]) * 784


def test_a_room_is_played_from_images(tmp_path: Path) -> None:
    options = "env.default.options={show: image, size: 5, tag: '', prompt: '{observation}', invalid: '{observation}'}"
    words = ["env.default.max_turns=3", options, "layout.env.num_ranks=1", "eval.num_prompts=4", "eval_every=2"]
    words += ["rollout.max_new_tokens=16", "rollout.stop=[e, a, i, o, n, t, s, r]"]  # or responses have no end
    steps = run(tmp_path, "agentic_vl_sokoban", *words, "data.max_prompt_tokens=64")
    turns = steps[-1]["env/default/turns"]
    assert turns is not None and turns > 1 and steps[-1]["env/default/failed"] == 0
    assert (steps[-1]["mismatch/diff/mean"] or 0.0) < 1e-5
    found = images_of_rows(tmp_path / "run", 2)
    assert max(map(len, found)) > 1 and {size for row in found for size in row} == {(140, 140)}
    pages = [page.read_text() for page in (tmp_path / "run/episodes").rglob("*.html")]
    assert pages and all("<img " in page and "&lt;image&gt;" in page for page in pages), "as the model saw it"
