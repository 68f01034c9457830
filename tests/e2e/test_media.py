"""Images of rows reach the engine of every generator rank bit for bit, also in later turns and after a resume."""

from __future__ import annotations

import hashlib
import json
import random
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from hpcrl.rollout.types import is_validation
from hpcrl.system.exit_codes import ExitCode
from tests.e2e.program import Start
from tests.e2e.test_split_replicas import APART

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PNG, JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
WORDS = """
save_every=1 eval_every=2 eval.num_prompts=4 rollout.num_prompts=4 rollout.group_size=3 rollout.max_new_tokens=3
rollout.max_staleness=1 data.max_prompt_tokens=32 reward.default.name=exact_match reward.default.timeout_s=100
layout.generator.num_ranks=4 layout.generator.tensor_parallel=2 env.played.name=scripted
""".split()  # noqa: SIM905
ENGINE = "generator.engine=tests.e2e.media:SPEC"
REPLICAS = ((2, 3), (4, 5))


@pytest.fixture
def contents(tmp_path: Path) -> dict[int, list[bytes]]:
    """Number of a row -> its images; of 8 rows with paths and 8 with bytes. One image needs several frames."""
    rng = random.Random(0)
    found = {row: [PNG + rng.randbytes(rng.randrange(2000)) for _ in range(row % 3)] for row in range(16)}
    found[1] = [JPEG + rng.randbytes(3 << 20)]
    (tmp_path / "images").mkdir()
    lines: list[dict[str, Any]] = []
    for row in range(8):
        names = [f"images/{row}-{n}.png" for n in range(len(found[row]))]
        for name, content in zip(names, found[row], strict=True):
            (tmp_path / name).write_bytes(content)
        lines.append({"prompt": f"digit {row}", "answer": "1", "images": names})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [
        {
            "prompt": f"digit {row}",
            "answer": "1",
            "images": [{"bytes": content, "path": None} for content in found[row]],
        }
        for row in range(8, 16)
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    return found


def words(folder: Path, model: Path) -> list[str]:
    train = f"[{{path:{folder}/rows.jsonl,domain:played}},{{path:{folder}/rows.parquet,domain:plain}}]"
    return [f"model.path={model}", f"data.train={train}", f"data.val={folder}/rows.parquet", *APART, *WORDS]


def test_images_reach_every_generator_rank(tmp_path: Path, digit_model: Path, contents: dict[int, list[bytes]]) -> None:
    for steps in (2, 4):
        start = Start(tmp_path / "run", [*words(tmp_path, digit_model), ENGINE, f"max_steps={steps}"])
        assert start.wait(200) == ExitCode.DONE, start.text
        seen = {
            rank: [json.loads(line) for line in (tmp_path / f"run/requests-{rank}.jsonl").read_text().splitlines()]
            for ranks in REPLICAS
            for rank in ranks
        }
        for first, second in REPLICAS:
            assert seen[first] == seen[second] and len(seen[first]) > 12 * (steps // 2) / len(REPLICAS)
    digests = {
        row: [["image", len(content), hashlib.sha256(content).hexdigest()] for content in images]
        for row, images in contents.items()
    }
    requests = [request for ranks in REPLICAS for request in seen[ranks[0]]]
    for request in requests:
        found = re.search(r"digit (\d+)<\|im_end\|>", request["text"])
        assert found and request["media"] == digests[int(found[1])], request
    texts = [request["text"] for request in requests if request["media"]]
    assert any(text.count("assistant") > 1 for text in texts), "a later turn"
    assert any(is_validation(request["id"]) for request in requests if request["media"])
    assert any(size > 3 << 20 for request in requests for _, size, _ in request["media"])


def test_the_run_folder_contains_no_media(tmp_path: Path, digit_model: Path, contents: dict[int, list[bytes]]) -> None:
    start = Start(tmp_path / "run", [*words(tmp_path, digit_model), ENGINE, "max_steps=2"])
    assert start.wait(200) == ExitCode.DONE, start.text
    marks = [content[100:140] for images in contents.values() for content in images if len(content) > 140]
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert marks and len(files) > 5 and not any(mark in path.read_bytes() for path in files for mark in marks)


def test_an_engine_without_media_support_is_refused(
    tmp_path: Path, digit_model: Path, contents: dict[int, list[bytes]]
) -> None:
    start = Start(tmp_path / "run", [*words(tmp_path, digit_model), "layout.generator.tensor_parallel=1"])
    assert start.wait() == ExitCode.BAD_INPUT, start.text
    line = f"{tmp_path}/rows.jsonl:2: the row has images, which the native generator does not take; leave such rows out"
    assert line in start.text and not (tmp_path / "run").exists()
