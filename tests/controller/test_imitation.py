"""Which rows of answers join a step's batch, and on which rank."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import TinyModel, load
from hpcrl.controller.batches import BatchHandle
from hpcrl.controller.imitation import Imitation
from hpcrl.engines.tiny import make_tiny_model
from hpcrl.messaging.messages import MixRows
from hpcrl.rollout.types import ANSWER_IDS, Sizes


class Called:
    """Replaces the controller: keeps its commands."""

    def __init__(self) -> None:
        self.commands: dict[int, MixRows] = {}

    def call(self, commands: dict[int, MixRows]) -> dict[int, Any]:
        self.commands = commands
        return {}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(TinyModel(hidden_size=16, num_heads=2), folder)
    return AutoTokenizer.from_pretrained(folder)


def imitation(tokenizer: Any, *words: str, model: Path | None = None) -> tuple[Imitation, Called]:
    layout = RoleLayout(MappingProxyType({"trainer": (0, 1), "generator": (0, 1), "reference": (), "critic": ()}), 2)
    config, called = load(["+experiment=demo", "cluster.device=cpu", *words]), Called()
    return Imitation(called, layout, config, None, tokenizer, model), called  # type: ignore[arg-type]


def handle(step: int) -> BatchHandle:
    sizes = {number: Sizes(10, 5) for number in (1, 2, 3, 4)}
    return BatchHandle(step, step, sizes, [[1, 3], [2, 4]], {0: [1, 2], 1: [3, 4]}, weights={1: 0.0})


def write(path: Path, answers: list[str]) -> Path:
    path.write_text("".join(f'{{"prompt": "p{n}", "answer": "{text}"}}\n' for n, text in enumerate(answers)))
    return path


def test_the_rows_of_a_step_are_divided_over_mini_batches_and_ranks(tmp_path: Path, tokenizer: Any) -> None:
    data = write(tmp_path / "rows.jsonl", ["a", "b" * 9, "c", "d" * 5, "e" * 7, "f" * 3])
    mixing, called = imitation(tokenizer, f"imitation.data={data}", "imitation.num_rows=3")
    seen: list[int] = []
    for step in (1, 2):
        batch = handle(step)
        stats = mixing.mix(batch)
        rows = {rank: [number - ANSWER_IDS for number in batch.rows[rank] if number >= ANSWER_IDS] for rank in (0, 1)}
        assert {rank: command.sequences for rank, command in called.commands.items()} == rows
        assert all(command.batch == step for command in called.commands.values())
        drawn = sorted([*rows[0], *rows[1]])
        assert stats["imitation/rows"].total == len(drawn) == 3 and all(rows.values())
        assert sorted(n for part in batch.mini_batches for n in part) == batch.samples
        assert [len(part) for part in batch.mini_batches] == [4, 3]
        model = sum(batch.sizes[ANSWER_IDS + row].model for row in drawn)
        assert stats["imitation/tokens"].total == model
        assert batch.norms(batch.samples) == (15.0 + model, 6.0), "sample 1 has weight 0"
        assert all(list(own) == sorted(own) for own in batch.rows.values())
        seen += drawn
    assert sorted(seen) == [0, 1, 2, 3, 4, 5], "an epoch has every row once"
    again = handle(2)
    imitation(tokenizer, f"imitation.data={data}", "imitation.num_rows=3")[0].mix(again)
    assert again.rows == batch.rows, "the step determines its rows"


def test_a_checkpoint_knows_the_rows(tmp_path: Path, tokenizer: Any) -> None:
    data = write(tmp_path / "rows.jsonl", ["a", "b"])
    state = imitation(tokenizer, f"imitation.data={data}")[0].state_dict()
    imitation(tokenizer, f"imitation.data={data}")[0].load_state_dict(state)
    write(data, ["a", "c"])
    with pytest.raises(ValueError, match=r"^imitation.data: .*rows.jsonl differs from the checkpoint"):
        imitation(tokenizer, f"imitation.data={data}")[0].load_state_dict(state)


@pytest.mark.parametrize(
    ("words", "num_rows", "tokens"),
    [([], 1, 3), (["data.overlong_sequences=keep_start"], 2, 3 + 54), (["data.max_sequence_tokens=300"], 2, 203)],
)
def test_rows_beyond_the_context_are_skipped_or_cut(
    tmp_path: Path, tokenizer: Any, words: list[str], num_rows: int, tokens: int
) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64}')
    data = write(tmp_path / "rows.jsonl", ["ab", "b" * 199])
    mixing, _ = imitation(tokenizer, f"imitation.data={data}", "imitation.num_rows=2", *words, model=tmp_path)
    stats = mixing.mix(handle(1))
    assert stats["imitation/rows"].total == num_rows and stats["imitation/skipped"].total == 2 - num_rows
    assert stats["imitation/tokens"].total == tokens
    assert stats["imitation/too_long"].total == 2 - num_rows
    assert stats["imitation/cut"].total == float("data.overlong_sequences=keep_start" in words)
    assert "rows/skipped" not in stats


def test_unusable_rows_are_left_out(tmp_path: Path, tokenizer: Any) -> None:
    data = write(tmp_path / "rows.jsonl", ["a", " ", "c"])
    words = [f"imitation.data={data}", "imitation.num_rows=2"]
    with pytest.raises(ValueError, match=r"rows.jsonl:2: the answer to learn from is empty"):
        imitation(tokenizer, *words)
    mixing, _ = imitation(tokenizer, *words, "data.unusable_rows=drop")
    assert mixing.mix(handle(1))["imitation/rows"].total == 2


def test_without_rows_nothing_is_done(tokenizer: Any) -> None:
    mixing, called = imitation(tokenizer)
    batch = handle(1)
    assert mixing.mix(batch) == {} == mixing.state_dict() and not called.commands and batch.samples == [1, 2, 3, 4]
    mixing.load_state_dict({})
