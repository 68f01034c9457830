"""Images of rows reach the engine of every generator rank and the trainer bit for bit, also in later turns and after a
resume."""

from __future__ import annotations

import io
import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from hpcrl.config import TinyModel
from hpcrl.data.pictures import decode, read_picture
from hpcrl.engines.tiny import PROCESSOR, make_tiny_model
from hpcrl.models.families import vision_of
from hpcrl.rollout.store import RolloutReader
from hpcrl.rollout.types import is_validation
from hpcrl.spec.image_rows import image_spans
from hpcrl.system.exit_codes import ExitCode
from tests.e2e.program import Start
from tests.e2e.test_split_replicas import APART

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

WORDS = """
save_every=1 eval_every=2 eval.num_prompts=4 rollout.num_prompts=4 rollout.group_size=3 rollout.max_new_tokens=3
rollout.max_staleness=1 data.max_prompt_tokens=1400 reward.default.name=exact_match reward.default.timeout_s=100
layout.generator.num_ranks=4 layout.generator.tensor_parallel=2 env.played.name=scripted
""".split()  # noqa: SIM905
ENGINE = "generator.engine=tests.e2e.media:SPEC"
REPLICAS = ((2, 3), (4, 5))


def drawn(rng: random.Random, side: int) -> bytes:
    """A file of random pixels."""
    pixels = np.random.default_rng(rng.randrange(1 << 30)).integers(0, 256, (side, side + 9, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, rng.choice(["PNG", "JPEG"]))
    return file.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the model, the rows and the run."""
    return tmp_path_factory.mktemp("media")


@pytest.fixture(scope="module")
def seeing_model(folder: Path) -> Path:
    """A tiny model whose images may have as many pixels as a message needs several frames for."""
    folder = folder / "model"
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "num_kv_heads": 1}
    make_tiny_model(TinyModel(architecture="qwen2_5_vl", **sizes), folder)
    limits = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 1300}
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | {"size": limits}))
    return folder


@pytest.fixture(scope="module")
def contents(folder: Path) -> dict[int, list[bytes]]:
    """Number of a row -> its images; of 8 rows with paths and 8 with bytes. One image needs several frames."""
    rng = random.Random(0)
    found = {row: [drawn(rng, rng.randrange(20, 300)) for _ in range(row % 3)] for row in range(16)}
    found[1] = [drawn(rng, 1000)]
    (folder / "images").mkdir()
    lines: list[dict[str, Any]] = []
    for row in range(8):
        names = [f"images/{row}-{n}.png" for n in range(len(found[row]))]
        for name, content in zip(names, found[row], strict=True):
            (folder / name).write_bytes(content)
        lines.append({"prompt": f"digit {row}", "answer": "1", "images": names})
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [
        {
            "prompt": f"digit {row}",
            "answer": "1",
            "images": [{"bytes": content, "path": None} for content in found[row]],
        }
        for row in range(8, 16)
    ]
    parquet.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    return found


def words(folder: Path, model: Path) -> list[str]:
    train = f"[{{path:{folder}/rows.jsonl,domain:played}},{{path:{folder}/rows.parquet,domain:plain}}]"
    return [f"model.path={model}", f"data.train={train}", f"data.val={folder}/rows.parquet", *APART, *WORDS]


Seen = dict[int, list[dict[str, Any]]]
"""Rank -> the requests that its engine got."""


@pytest.fixture(scope="module")
def seen_at(folder: Path, seeing_model: Path, contents: dict[int, list[bytes]]) -> dict[int, Seen]:
    """Of a run that is resumed: number of steps -> what the generators' engines have got."""
    found = {}
    for steps in (2, 4):
        start = Start(folder / "run", [*words(folder, seeing_model), ENGINE, f"max_steps={steps}"])
        assert start.wait(200) == ExitCode.DONE, start.text
        found[steps] = {
            rank: [json.loads(line) for line in (folder / f"run/requests-{rank}.jsonl").read_text().splitlines()]
            for ranks in REPLICAS
            for rank in ranks
        }
    return found


def test_images_reach_every_generator_rank(
    seeing_model: Path, contents: dict[int, list[bytes]], seen_at: dict[int, Seen]
) -> None:
    for steps, seen in seen_at.items():
        for first, second in REPLICAS:
            assert seen[first] == seen[second] and len(seen[first]) > 12 * (steps // 2) / len(REPLICAS)
    vision = vision_of(seeing_model)
    assert vision is not None
    seen_images = {row: [read_picture(content, vision)[0] for content in images] for row, images in contents.items()}
    digests = {row: [(len(m.content), m.digest.hex()) for m in images] for row, images in seen_images.items()}
    requests = [request for ranks in REPLICAS for request in seen[ranks[0]]]
    for request in requests:
        found = re.search(r"digit (\d+)<\|im_end\|>", request["text"])
        assert found and [(size, digest) for _, size, digest in request["media"]] == digests[int(found[1])], request
    texts = [request["text"] for request in requests if request["media"]]
    assert any(text.count("assistant") > 1 for text in texts), "a later turn"
    assert any(is_validation(request["id"]) for request in requests if request["media"])
    assert any(size > 2.5 * 2**20 for request in requests for _, size, _ in request["media"])


def test_rollouts_keep_each_image_once(
    folder: Path, seeing_model: Path, contents: dict[int, list[bytes]], seen_at: dict[int, Seen]
) -> None:
    reader, used = RolloutReader(folder / "run", provisional=True), set()
    for step in (1, 2, 3, 4):
        batch = reader.batch(step)
        assert batch.images is not None and set(batch.pictures) >= {
            span.digest for span in image_spans(batch.images.numpy())
        }
        used |= set(batch.pictures)
    stored = list((folder / "run/rollouts/pictures").rglob("*.png"))
    assert len(stored) == len({path.name for path in stored}) >= len(used) > 3
    vision = vision_of(seeing_model)
    assert vision is not None
    known = [read_picture(content, vision)[0] for images in contents.values() for content in images]
    assert used <= {medium.digest for medium in known}
    (shown,) = [decode(path.read_bytes()) for path in stored if path.stem == known[0].digest.hex()]
    assert shown.tobytes() == known[0].content


def test_images_for_a_text_model_are_refused(
    tmp_path: Path, folder: Path, digit_model: Path, contents: dict[int, list[bytes]]
) -> None:
    start = Start(tmp_path / "run", [*words(folder, digit_model), "layout.generator.tensor_parallel=1"])
    assert start.wait() == ExitCode.BAD_INPUT, start.text
    line = f"{folder}/rows.jsonl:2: the row has images, which {digit_model} does not take; use a model with"
    assert line in start.text and not (tmp_path / "run").exists()
