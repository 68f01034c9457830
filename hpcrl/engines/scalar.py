"""Reward models: a decoder with a linear head for one label or several, loaded with transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from hpcrl.models.head_labels import labels_in, refusal
from hpcrl.models.transformers_models import SCALAR_HEADS

HEAD = "score"


class ScalarModel:
    """A model whose score of a sequence is the head's output at the last token, or a weighted sum of the heads'.
    ValueError if the folder has none.

    Attributes:
        labels: The heads' names.

    Args:
        weights: Maps heads to their weights; a model with one head needs none.
        max_batch_tokens: Maximum number of tokens in one forward pass, including padding.
        alone: Use one sequence per forward pass, so a score's bits depend only on its sequence.
    """

    def __init__(
        self,
        path: Path,
        *,
        dtype: torch.dtype,
        device: str,
        max_batch_tokens: int,
        alone: bool = False,
        weights: Mapping[str, float] = MappingProxyType({}),
    ):
        import transformers

        config = transformers.AutoConfig.from_pretrained(path)
        named = {"architectures": config.architectures, "id2label": {str(n): of for n, of in config.id2label.items()}}
        if text := refusal(named, weights):
            raise ValueError(f"reward_model.path: {path} {text}")
        self.labels = labels_in(named)
        self._weights = [float(weights.get(label, 0.0)) for label in self.labels] if weights else [1.0]
        kind = next(f"AutoModel{ending}" for ending in SCALAR_HEADS if config.architectures[0].endswith(ending))
        model: Any = getattr(transformers, kind).from_pretrained(path, dtype=dtype)
        if not isinstance(head := getattr(model, HEAD, None), nn.Linear):
            raise ValueError(f"reward_model.path: the head of {config.model_type} is not supported")
        self._body, self._head = model.base_model.to(device).eval(), head.to(device).float()
        # transformers reads the score at the last token that is not a padding token, but a sequence may end with the
        # padding token.
        self._pad = config.pad_token_id if kind.endswith("SequenceClassification") else None
        self._device, self._most, self._alone = device, max_batch_tokens, alone
        self.vocab_size = int(config.vocab_size)

    @torch.inference_mode()
    def values(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """For each sequence of token ids, which must not be empty, what each head gives."""
        found: list[list[float]] = [[]] * len(sequences)
        for batch in self._batches(sequences):
            for place, score in zip(batch, self._forward([sequences[i] for i in batch]).tolist(), strict=True):
                found[place] = score
        return found

    def score(self, values: Sequence[float]) -> float:
        """The sum of the heads' values with their weights."""
        return sum(weight * value for weight, value in zip(self._weights, values, strict=True))

    def scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """The scores of sequences of token ids, which must not be empty."""
        return [self.score(values) for values in self.values(sequences)]

    def _batches(self, sequences: Sequence[Sequence[int]]) -> list[list[int]]:
        """Batches of indices of sequences with similar lengths, the longest first."""
        batches: list[list[int]] = []
        for place in sorted(range(len(sequences)), key=lambda i: -len(sequences[i])):
            width = len(sequences[batches[-1][0]]) if batches else 0
            if not batches or self._alone or (len(batches[-1]) + 1) * width > self._most:
                batches.append([])
            batches[-1].append(place)
        return batches

    def _forward(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """The heads' values, float32 [n, heads]. Padding is on the right, where a causal model's tokens do not attend
        to it."""
        lengths = torch.tensor([len(ids) for ids in sequences])
        ids = torch.zeros(len(sequences), int(lengths.max()), dtype=torch.long)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence)] = torch.tensor(sequence)
        mask, rows = torch.arange(ids.shape[1]) < lengths[:, None], torch.arange(len(sequences))
        last = lengths - 1
        if self._pad is not None:
            places = torch.arange(ids.shape[1]) * ((ids != self._pad) & mask)
            last = places.max(dim=1).values
        given = {"input_ids": ids.to(self._device), "attention_mask": mask.long().to(self._device)}
        states = self._body(**given, use_cache=False).last_hidden_state
        result: Tensor = self._head(states[rows, last].float())
        return result
