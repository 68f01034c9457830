"""Which batches of the reference's log-probs are computed before the first step, and what they depend on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import TinyModel, load
from hpcrl.controller.batches import BatchHandle
from hpcrl.controller.reference_cache import CachedReference, facts_of
from hpcrl.controller.supervised import AnswerRows
from hpcrl.data.stored_logprobs import StoredLogprobs, write_part
from hpcrl.engines.tiny import make_tiny_model
from hpcrl.messaging import messages
from hpcrl.rollout.types import Sizes
from tests.vlm import png

NUM_ROWS = 6
COMMON = ["layout=colocated", "cluster.device=cpu"]
WORDS = ["pipeline=tests.e2e.anchored_sft:SPEC", "own.batch_size=4"]


class Ranks:
    """Replaces trainer and controller: a sequence's log-probs are its number, as often as it has trained tokens."""

    def __init__(self) -> None:
        self.commands: list[Any] = []
        self.batches: dict[int, BatchHandle] = {}

    def load_rows(
        self, step: int, sequences: Sequence[int], sizes: Sequence[Sizes], keep_together: Mapping[int, int]
    ) -> BatchHandle:
        by_sequence = dict(zip(sequences, sizes, strict=True))
        shares = {1: list(sequences)[::2], 2: list(sequences)[1::2]}
        self.batches[step] = BatchHandle(step, step, by_sequence, [sorted(by_sequence)], shares)
        return self.batches[step]

    def drop(self, batch: BatchHandle) -> None:
        del self.batches[batch.id]

    def call(self, commands: Mapping[int, Any], more_s: float = 0.0) -> dict[int, messages.Done]:
        self.commands += commands.values()
        for rank, command in commands.items():
            if isinstance(command, messages.StoreLogprobs):
                batch = self.batches[command.batch]
                mine = batch.rows[rank]
                found = [np.full(batch.sizes[sequence].model, sequence, np.float32) for sequence in mine]
                write_part(Path(command.folder), command.batch, rank, mine, found)
        return {rank: messages.Done(1) for rank in commands}

    def kinds(self) -> list[str]:
        """Names of the commands since the last call, without repetitions next to each other."""
        names = [type(command).__name__ for command in self.commands]
        self.commands.clear()
        return [name for n, name in enumerate(names) if n == 0 or names[n - 1] != name]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny_model(TinyModel(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=16), folder)
    return folder


def write_rows(folder: Path, *answers: str) -> None:
    lines = [{"prompt": f"row {n}", "answer": answer} for n, answer in enumerate(answers)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def cached(tmp_path: Path, model: Path, *words: str) -> tuple[CachedReference, Ranks, AnswerRows]:
    own = [] if "pipeline=dpo" in words else WORDS
    given = [*own, *COMMON, f"model.path={model}", f"data.train={tmp_path}/rows.jsonl"]
    given.append(f"reference.cache={tmp_path}/cache")
    config, ranks = load([*given, *words]), Ranks()
    rows = AnswerRows(ranks, config, AutoTokenizer.from_pretrained(model), model)  # type: ignore[arg-type]
    layout: Any = RoleLayout.from_config(config)
    found: Any = ranks
    return CachedReference(found, layout, config, tmp_path / "run", found, rows, model), ranks, rows


COMPUTE = ["Logprobs", "StoreLogprobs"]


def test_rows_are_computed_once_before_the_first_step(tmp_path: Path, model: Path) -> None:
    write_rows(tmp_path, "a", "b" * 200, "c", "d", "e", "f")
    words = ["max_steps=9", "data.max_sequence_tokens=100"]
    reference, ranks, _ = cached(tmp_path, model, *words)
    assert list(reference.fill(0)) == [0, 1], "two batches of four have all six rows"
    assert ranks.kinds() == [*COMPUTE, *COMPUTE, "ReleaseReference"] and not ranks.batches
    stored = StoredLogprobs(reference.folder, check=True)
    counts = {int(n): stored.values(int(n)).tolist() for n in stored.sequences}
    assert counts == {n: [] if n == 1 else [n] * 2 for n in range(NUM_ROWS)}, "answer and end; the long row is skipped"
    written = {path: path.stat().st_mtime_ns for path in reference.folder.iterdir()}
    for first_step in (0, 5):
        again, ranks, _ = cached(tmp_path, model, *words)
        list(again.fill(first_step))
        assert ranks.kinds() == ["ReleaseReference"], "also at a resume"
        assert written == {path: path.stat().st_mtime_ns for path in reference.folder.iterdir()}, "only read"
    batch: Any = BatchHandle(3, 3, {}, [], {})
    again.logprobs(batch, "ref_logprobs")
    assert ranks.kinds() == ["ReadLogprobs"]
    for commands in (["LoadReference", "Logprobs"], ["Logprobs"]):
        beside = BatchHandle(-1, 3, {0: Sizes(4, 2)}, [[0]], {1: [0], 2: []})
        again.logprobs(beside, "ref_logprobs")
        assert ranks.kinds() == commands, "other rows, such as those of data.val"


def test_batches_before_a_stop_are_kept_and_a_damaged_file_is_computed_again(tmp_path: Path, model: Path) -> None:
    write_rows(tmp_path, *"abcdef")
    reference, ranks, _ = cached(tmp_path, model)
    filling = reference.fill(0)
    assert [next(filling), next(filling)] == [0, 1]
    filling.close()  # a signal arrived
    assert ranks.kinds() == COMPUTE and list(reference.folder.glob("part_*"))
    resumed, ranks, _ = cached(tmp_path, model)
    list(resumed.fill(0))
    assert ranks.kinds() == [*COMPUTE, "ReleaseReference"], "only the second batch"
    (values,) = reference.folder.glob("values_*")
    values.write_bytes(values.read_bytes()[:-4])
    repaired, ranks, _ = cached(tmp_path, model)
    list(repaired.fill(0))
    assert ranks.kinds() == [*COMPUTE, *COMPUTE, "ReleaseReference"]
    assert len(StoredLogprobs(reference.folder, check=True).sequences) == NUM_ROWS


def test_fewer_steps_need_fewer_rows_and_adapters_keep_their_weights(tmp_path: Path, model: Path) -> None:
    write_rows(tmp_path, *"abcdef")
    reference, ranks, _ = cached(tmp_path, model, "max_steps=1", "trainer.lora.rank=2")
    list(reference.fill(0))
    assert ranks.kinds() == COMPUTE, "the trainer computes them, and nothing is freed"
    more, ranks, _ = cached(tmp_path, model, "max_steps=2", "trainer.lora.rank=2")
    assert more.folder == reference.folder
    list(more.fill(1))
    assert ranks.kinds() == COMPUTE


def test_the_folder_depends_on_weights_tokenizer_rows_and_numbers(tmp_path: Path, model: Path) -> None:
    import shutil

    write_rows(tmp_path, *"abcdef")
    first, _, rows = cached(tmp_path, model)
    for word in (
        "max_steps=7",
        "own.batch_size=2",
        "trainer.lr=1e-3",
        "seed=5",
        "trainer.max_tokens_per_micro_batch=99",
    ):
        assert cached(tmp_path, model, word)[0].folder == first.folder, word
    for word in ("data.max_sequence_tokens=50", "data.system_prompt=S", "trainer.param_dtype=bfloat16"):
        assert cached(tmp_path, model, word)[0].folder != first.folder, word
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    config = load([*WORDS, *COMMON, f"data.train={tmp_path}/rows.jsonl", f"reference.cache={tmp_path}/cache"])
    same = facts_of(config, rows, model)
    assert facts_of(config, rows, copy) == same, "the folder's name does not count"
    weights, template = copy / "model.safetensors", copy / "tokenizer_config.json"
    for path in (weights, template):
        content = bytearray(path.read_bytes())
        content[-10] ^= 1
        path.write_bytes(content)
        assert facts_of(config, rows, copy) != same
        content[-10] ^= 1
        path.write_bytes(content)
    write_rows(tmp_path, *"abcdeg")
    assert cached(tmp_path, model)[0].folder != first.folder


def test_the_folder_depends_on_the_images_of_pairs(tmp_path: Path, model: Path) -> None:
    row = {"images": ["a.png"], "prompt": "what?", "chosen": "a", "rejected": "b"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")

    def folder(colour: int, *words: str) -> Path:
        (tmp_path / "a.png").write_bytes(png(colour))
        return cached(tmp_path, model, "pipeline=dpo", "dpo.batch_size=1", *words)[0].folder

    first = folder(1)
    assert folder(1) == first and folder(2) != first and folder(1, "data.max_pixels=784") != first
