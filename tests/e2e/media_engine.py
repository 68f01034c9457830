"""The engine of tests.e2e.media."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcrl.config import Config
from hpcrl.engines.gen.fake_generator.engine import FakeEngine
from hpcrl.engines.gen.generation_engine import ReplicaRanks, Request
from tests.e2e.split_engine import SplitEngine


def make(config: Config, model_path: Path, tokenizer: Any, replica: ReplicaRanks) -> SplitEngine:
    """A WritingEngine on each rank of a replica; the ranks run in lockstep, as with a split model."""
    file = Path(config.run_dir) / f"requests-{replica.ranks[replica.index]}.jsonl"
    sizes = {"max_num_seqs": config.generator.max_num_seqs, "max_length": config.max_sequence_tokens}
    return SplitEngine(WritingEngine(file, tokenizer, vocab_size=len(tokenizer), **sizes), replica)


class WritingEngine(FakeEngine):
    """Writes a line per request: the text before the next turn, and place, size and digest of each medium."""

    def __init__(self, file: Path, tokenizer: Any, **sizes: int):
        super().__init__(**sizes)
        self._file, self._tokenizer = file, tokenizer

    def add(self, requests: Sequence[Request]) -> None:
        """See GenEngine."""
        super().add(requests)
        with self._file.open("a") as file:
            for request in requests:
                assert all(type(medium.content) is bytes for medium in request.media)
                media = [(m.start, len(m.content), m.digest.hex()) for m in request.media]
                text = self._tokenizer.decode(request.prompt_ids)
                file.write(json.dumps({"id": request.id, "text": text, "media": media}) + "\n")
