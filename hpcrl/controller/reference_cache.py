"""The reference of a pipeline that learns from answers, whose log-probs are computed once (reference.cache)."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpcrl.algorithms.factory import make_algorithm
from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config
from hpcrl.controller.batches import BatchHandle
from hpcrl.controller.clients import Trainer
from hpcrl.controller.reference_client import Reference
from hpcrl.controller.supervised import AnswerRows
from hpcrl.data.stored_logprobs import merge, write_part
from hpcrl.messaging import messages
from hpcrl.messaging.dispatcher import Controller
from hpcrl.metrics.stats import Stats

logger = logging.getLogger(__name__)

FIELD = "ref_logprobs"
VERSION = 1
"""Of the folder's files."""
NUM_DIGITS = 16
READ_BYTES = 16 << 20
TOKENIZER_FILES = (
    "*token*.json",
    "*.jinja",
    "chat_template*",
    "vocab*",
    "merges*",
    "*processor_config.json",
    "*.model",
)
NOT_OF_ROWS = {
    *("train", "val", "shuffle", "domain_interleave_probs", "max_prompt_tokens", "overlong_prompts"),
    *("max_sequence_tokens",),  # the limit itself counts
}
"""Keys of data that do not change a row's tokens; of train, the content counts."""


class CachedReference(Reference):
    """Before the first step, computes the log-probs of all rows that the run will draw and that the folder lacks, batch
    by batch as the steps will draw them; then the reference's weights are freed, and steps read the folder. The folder
    has one subfolder for each set of facts that the values depend on."""

    def __init__(
        self,
        controller: Controller,
        layout: RoleLayout,
        config: Config,
        run_dir: Path,
        trainer: Trainer,
        rows: AnswerRows,
        model_path: Path,
    ):
        super().__init__(controller, layout, config, run_dir)
        assert config.reference.cache is not None, "else there is nothing to read"
        self._trainer, self._rows, self._has_own = trainer, rows, bool(layout.ranks["reference"])
        self._model_path, self._is_free = model_path, False
        self._facts = facts_of(config, rows, model_path)
        digest = hashlib.blake2b(json.dumps(self._facts, sort_keys=True).encode()).hexdigest()
        self.folder = Path(config.reference.cache).absolute() / digest[:NUM_DIGITS]

    def fill(self, first_step: int) -> Iterator[int]:
        """Compute what is missing for the steps after this one; yields the number of batches so far before each one.
        If the caller leaves it there, these are kept. At the end the reference's weights are freed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (path := self.folder / "facts.json").exists():  # a complete folder may be another user's
            path.write_text(json.dumps(self._facts, indent=1, sort_keys=True) + "\n")
        stored, num_done = merge(self.folder), 0
        known = set() if stored is None else set(stored.sequences.tolist())
        most = first_step + 2 * self._rows.steps_per_epoch  # the rest of an epoch, and all of the next one
        for step in range(first_step + 1, min(self._config.max_steps, most) + 1):
            if not known.issuperset(firsts := self._rows.first_sequences(step)):
                yield num_done
                self._compute(step, firsts)
                known.update(firsts)
                num_done += 1
        if num_done:
            merge(self.folder)
            logger.info("the reference's log-probs of %d batches are stored in %s", num_done, self.folder)
        else:
            logger.info("the reference's log-probs are read from %s", self.folder)
        if self._has_own:
            self._controller.call(dict.fromkeys(self.ranks, messages.ReleaseReference()))
            self._is_free = True

    def _compute(self, step: int, firsts: Sequence[int]) -> None:
        """Store the log-probs of a step's rows; `firsts` are the rows' first sequences."""
        batch = self._rows.next(step)
        skipped = [sequence for sequence in firsts if sequence not in batch.sizes]  # stored without values, as done
        write_part(self.folder, step, 0, skipped, [np.empty(0, np.float32)] * len(skipped))
        super().logprobs(batch, FIELD)
        store = messages.StoreLogprobs(batch.id, FIELD, str(self.folder))
        self._controller.call(dict.fromkeys(self._trainers.leaders, store))
        self._trainer.drop(batch)

    def logprobs(self, batch: BatchHandle, into: str) -> Stats:
        """Fill a token field with the stored log-probs. A batch beside the step's (with an id of 0 or less) has other
        rows, which are computed; the weights are loaded again for the first such batch, and then kept."""
        if batch.id <= 0:
            if self._is_free:
                load = messages.LoadReference(str(self._model_path))
                self._controller.call(dict.fromkeys(self.ranks, load), self._config.timeouts.start_s)
                self._is_free = False
            return super().logprobs(batch, into)
        read = messages.ReadLogprobs(batch.id, into, str(self.folder))
        self._controller.call(dict.fromkeys(self._trainers.ranks, read))
        return {}


def facts_of(config: Config, rows: AnswerRows, model_path: Path) -> dict[str, Any]:
    """What the log-probs of row n depend on; JSON-able."""
    cursor = rows.state_dict()["cursor"]
    reference = Path(config.reference.path or model_path)
    return {
        "version": VERSION,
        "weights": [_digest(reference, pattern) for pattern in ("config.json", "*.safetensors")],
        "tokenizer": [_digest(model_path, pattern) for pattern in TOKENIZER_FILES],
        "rows": [value for name, value in cursor.items() if name != "seed"],
        "kind": config.row_kind,
        "max_tokens": rows.max_tokens,
        "data": {key: value for key, value in config.data.model_dump(mode="json").items() if key not in NOT_OF_ROWS},
        "temperature": make_algorithm(config).objective.temperature,
        "engine": config.train_engine,
        "dtypes": [config.model.dtype, config.trainer.param_dtype, config.trainer.head_dtype],
    }


def _digest(folder: Path, pattern: str) -> str:
    """Hash of the contents of a folder's files that match, in the order of their names."""
    found = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.glob(pattern)):
        found.update(f"{path.name} {path.stat().st_size}\n".encode())
        with open(path, "rb") as file:
            while data := file.read(READ_BYTES):
                found.update(data)
    return found.hexdigest()
