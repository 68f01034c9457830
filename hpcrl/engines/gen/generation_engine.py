"""The protocol of generation engines: continuous batching, driven by decode chunks.

One engine serves one replica. All ranks of a replica make the same calls in the same order and see the same results.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from hpcrl.rollout.types import FinishReason
from hpcrl.spec.media import Medium


@dataclass(frozen=True)
class ReplicaRanks:
    """The world ranks of a replica; this rank is at `index`.

    Args:
        group: a dist.ProcessGroupGloo of these ranks for the engine's own collectives; None for a replica of one rank.

    The process's default group has the replica's ranks in this order if there are several and none of them is a trainer
    or reference rank; else it is the group of all trainer or reference ranks.
    """

    ranks: tuple[int, ...]
    index: int = 0
    group: Any = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 turn truncation off."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @property
    def truncates(self) -> bool:
        """Whether the behaviour distribution differs from softmax(logits / temperature)."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True, slots=True)
class Request:
    """One response to generate. `prompt_ids` are all tokens before the next model token, including earlier turns.

    Args:
        continues: a later request will probably begin with this prompt and its response, so an engine with a prefix
            cache should keep the response's blocks as well.
        media: media of the row's prompt, in order, of the kinds in GenEngineSpec.media. An engine with a prefix cache
            must not share prefixes between requests with different media.
    """

    id: int
    prompt_ids: Sequence[int]
    params: SamplingParams
    seed: int
    continues: bool = False
    media: tuple[Medium, ...] = ()


class PromptRefused(ValueError):
    """The engine can never serve this prompt, with any parameters."""


@dataclass(frozen=True, slots=True)
class Output:
    """A finished or aborted request. Arrays have one entry per generated token, including a stop token.

    Args:
        gen_logprobs: log-softmax(logits / temperature) without truncation; for greedy sampling at temperature 1.
        gen_logprobs_behaviour: log-probs after truncation, renormalised; None without truncation.
        columns: additional token fields declared by the engine (hpcrl.spec.trajectory), by name.
    """

    id: int
    token_ids: np.ndarray  # int32 [n]
    gen_logprobs: np.ndarray  # float32 [n]
    versions: np.ndarray  # int32 [n]
    finish_reason: FinishReason
    gen_logprobs_behaviour: np.ndarray | None = None
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)


class GenEngine(Protocol):
    """The contract that every generation engine passes (tests/contracts/test_gen_engine.py).

    Results are functions of the sequence of calls only: no clock, no arrival order, no global random state.
    """

    version: int  # version of the loaded weights, -1 before the first load
    max_num_seqs: int  # requests decoded at once; more wait in order of add()

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests. ValueError names a request whose id is in use or whose parameters are invalid; PromptRefused
        if its prompt can never be served (length, vocabulary, media). After an error, none of them is queued."""

    def abort(self, ids: Sequence[int]) -> list[Output]:
        """Stop the requests and return their partial outputs in the order of `ids`; unknown ids are ignored."""

    def step(self, num_tokens: int) -> list[Output]:
        """Run `num_tokens` decode iterations, admitting waiting requests into free slots. Returns the finished requests
        in order of finishing, then of slot. Ends early only if no request remains."""

    def progress(self) -> dict[int, int]:
        """Request id -> number of tokens generated so far, for every running or waiting request."""

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace the weights by tensors under their HF names, in any type. An iterator's tensor is valid until the
        next is drawn. Running requests keep their KV cache and continue.

        With trainer.lora, the tensors are the adapters' weights (hpcrl.spec.lora), and the engine has all other weights
        from the model's folder, also after sleep(). ValueError on an unknown or missing name or a wrong shape, before
        anything is changed if possible.
        """

    def recompute(self) -> None:
        """Recompute the running requests' KV cache with the loaded weights, so later log-probs belong to one policy.
        Their tokens stay."""

    def sleep(self) -> None:
        """Free KV cache and weights (idempotent); nothing may be running."""

    def wake(self) -> None:
        """Undo sleep(); weights must be loaded again before the next step."""

    def close(self) -> None:
        """Release everything."""


@runtime_checkable
class SharesWeights(Protocol):
    """An engine that can read its weights from the parameters of a trainer in the same process."""

    def share_weights(self) -> dict[str, torch.Tensor]:
        """The engine's own tensors by HF name, uninitialised, in the layout of transformers' parameters; the trainer
        may use them as its parameters from now on. Called before the first load_weights(). Every load_weights() then
        copies only tensors that are not in place already, and still sets the version. sleep() keeps the tensors."""


@runtime_checkable
class ReadsBackWeights(Protocol):
    """A generation engine that can give weights back, for check_weights=true. For other engines, the weights are
    checked while they are loaded."""

    def loaded_weights(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The loaded tensors under these names, bit for bit, taken from the tensors that it computes with; weights that
        it cannot give back are left out."""
