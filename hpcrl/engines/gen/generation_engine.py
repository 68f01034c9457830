"""The protocol of generation engines: continuous batching, driven by decode chunks.

One engine serves one replica. All ranks of a replica make the same calls in the same order and get the same results.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from hpcrl.rollout.types import FinishReason
from hpcrl.spec.media import Medium


@dataclass(frozen=True)
class ReplicaRanks:
    """The world ranks of a replica; this rank is at `index`.

    The default process group has the replica's ranks in this order if there are several ranks and none of them is a
    trainer or reference rank. Otherwise it is the group of all trainer or reference ranks.
    """

    ranks: tuple[int, ...]
    index: int = 0
    group: Any = None  # dist.ProcessGroupGloo of these ranks for the engine's collectives; None for a single rank


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters. Temperature 0 is greedy; top_k=0, top_p=1 and min_p=0 turn truncation off."""

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
    """A response to generate. `prompt_ids` are all tokens before the next model token, including earlier turns.

    Args:
        continues: A later request will probably begin with this prompt and its response, so an engine with a prefix
            cache should keep the response's blocks, too.
        media: The media of the tokens, in order, with their places; GenEngineSpec.media has the supported kinds. An
            engine with a prefix cache must not share prefixes between requests with different media
            (hpcrl.spec.media.prefix_keys).
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
        gen_logprobs: log-softmax(logits / temperature) without truncation. Greedy sampling counts as temperature 1.
        gen_logprobs_behaviour: Log-probs after truncation, renormalised. None without truncation.
        columns: By name, additional token fields that the engine declares (hpcrl.spec.trajectory).
    """

    id: int
    token_ids: np.ndarray  # int32 [n]
    gen_logprobs: np.ndarray  # float32 [n]
    versions: np.ndarray  # int32 [n]
    finish_reason: FinishReason
    gen_logprobs_behaviour: np.ndarray | None = None
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)


class GenEngine(Protocol):
    """The protocol of generation engines, tested by tests/contracts/test_gen_engine.py.

    Results depend only on the sequence of calls, not on clocks, order of arrival or global random state.
    """

    version: int  # version of the loaded weights, -1 before the first load
    max_num_seqs: int  # maximum number of requests decoded at once; more requests wait in the order of add()

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests. ValueError names a request whose id is in use or whose parameters are invalid, PromptRefused
        a request whose prompt can never be served (length, vocabulary, media). After an error, none is queued."""

    def abort(self, ids: Sequence[int]) -> list[Output]:
        """Stop the requests and return their partial outputs in the order of `ids`; unknown ids are ignored."""

    def step(self, num_tokens: int) -> list[Output]:
        """Run `num_tokens` decode iterations, and admit waiting requests into free slots. Returns finished requests,
        sorted by the iteration in which they finished, then by slot. Ends early only if no request remains."""

    def progress(self) -> dict[int, int]:
        """Request id -> number of tokens generated so far, for every running or waiting request."""

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace the weights by tensors under their HF names, in any dtype. An iterator's tensor is valid until the
        next one is drawn. Running requests keep their KV cache and continue.

        With Config.published_lora, the tensors are the adapters' weights (hpcrl.spec.lora), and the engine gets all
        other weights from the model's folder, also after sleep(). ValueError on an unknown or missing name or a wrong
        shape, if possible before anything is changed.
        """

    def recompute(self) -> None:
        """Recompute the running requests' KV cache with the loaded weights, so later log-probs belong to one policy.
        The requests' tokens do not change."""

    def sleep(self) -> None:
        """Free KV cache and weights (idempotent); nothing may be running."""

    def wake(self) -> None:
        """Undo sleep(); weights must be loaded again before the next step."""

    def close(self) -> None:
        """Release everything."""


NOTHING_KEPT = (
    "some weights are not in the update, and the generator has none: it slept or failed since the last update"
)


class KeepsWeights(GenEngine, Protocol):
    """An engine that can keep some of its weights in an update."""

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]], version: int, kept: Collection[str] = ()) -> None:
        """GenEngine.load_weights(), in which the weights in `kept` are missing and do not change. Their last values
        came from an earlier call, with no sleep() since; ValueError if the engine does not have them."""


@runtime_checkable
class SharesWeights(Protocol):
    """An engine that can read its weights from the parameters of a trainer in the same process."""

    def share_weights(self) -> dict[str, torch.Tensor]:
        """The engine's own uninitialised tensors by HF name, in the layout of transformers' parameters, which the
        trainer may then use as its parameters. Called before the first load_weights(). Later, load_weights() copies
        only tensors that are not already in place, and sets the version. sleep() keeps the tensors."""


@runtime_checkable
class ReadsBackWeights(Protocol):
    """A generation engine whose weights can be read back, for check_weights=true. For other engines, weights are
    checked while they are loaded."""

    def loaded_weights(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The loaded tensors under these names, bit for bit, read from the tensors with which the engine computes.
        Weights that cannot be read back are left out."""
