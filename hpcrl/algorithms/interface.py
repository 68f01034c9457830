"""The interfaces of an algorithm: an advantage estimator, which computes advantages, and an objective, which computes a
loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from hpcrl.metrics.stats import Stat, Stats
from hpcrl.rollout.batch import STATUS, Batch, Norms
from hpcrl.spec.divergence import Divergence

Coefficients = Mapping[str, float]
"""Numbers by name that an algorithm changes from step to step, such as the KL scale. Rank 0 holds them, sends them with
every command and saves them in every checkpoint."""

AllSum = Callable[[Tensor], Tensor]
"""Sum of a tensor over all ranks that hold a part of the batch (identity on one rank); collective over these ranks."""


@dataclass(frozen=True)
class RewardTable:
    """Rewards of the whole step, on all ranks, sorted by sample id.

    Attributes:
        rewards: float32 [N].
        scores: float32 [N].
        group_ids: int64 [N].
        sample_ids: int64 [N].
        lengths: int64 [N], tokens of the response.
        truncated: bool [N], whether the token limit ended the response.
        domains: Name of each domain -> ids of its groups; all other groups form one more domain without a name.
        baselines: float32 [N], the reward of the prompt's greedy response; only for an advantage estimator with a
            greedy baseline (AlgorithmSpec).
        decoupled: float32 [N], the decoupled rewards (hpcrl.rollout.scheduling.policies); only for an advantage
            estimator that reads them.
    """

    rewards: Tensor
    group_ids: Tensor
    sample_ids: Tensor
    scores: Tensor
    lengths: Tensor
    truncated: Tensor
    domains: Mapping[str, list[int]] = field(default_factory=dict)
    baselines: Tensor | None = None
    decoupled: Tensor | None = None

    @classmethod
    def of(cls, batch: Batch) -> RewardTable:
        """The table of a batch's rows, in their order, without domains."""
        lengths = torch.zeros_like(batch.lengths).index_add(0, batch.row_ids, (batch.turn_ids >= 0).long())
        truncated = batch.status == STATUS.index("length")
        return cls(
            batch.rewards,
            batch.group_ids,
            batch.sample_ids,
            batch.scores,
            lengths,
            truncated,
            baselines=batch.baselines,
            decoupled=batch.decoupled_rewards,
        )

    def select(self, chosen: Tensor) -> RewardTable:
        """The table of some rows; chosen bool [N]."""
        return RewardTable(
            self.rewards[chosen],
            self.group_ids[chosen],
            self.sample_ids[chosen],
            self.scores[chosen],
            self.lengths[chosen],
            self.truncated[chosen],
            self.domains,
            None if self.baselines is None else self.baselines[chosen],
            None if self.decoupled is None else self.decoupled[chosen],
        )

    def domain_ids(self) -> tuple[list[str], Tensor]:
        """(names, ids int64 [N]): the domains' names, and for each row the index of its domain; index 0, named "", for
        rows in no domain."""
        names = ["", *sorted(self.domains)]
        ids = torch.zeros_like(self.group_ids)
        for number, name in enumerate(names[1:], 1):
            groups = torch.tensor(self.domains[name], dtype=torch.int64, device=ids.device)
            ids[torch.isin(self.group_ids, groups)] = number
        return names, ids


@dataclass(frozen=True)
class Outputs:
    """Model outputs for the T tokens of a micro-batch. A field that the objective did not request is None.

    Attributes:
        logprobs: float32 [T], log-softmax(logits / temperature) of the tokens, 0 outside loss_mask; always present,
            with gradients.
        entropy: float32 [T], nats, of softmax(logits / temperature), without top-p, top-k and min-p.
        values: float32 [T], from a critic; [T, heads] from a model with several heads.
        divergence: float32 [T], nats, of the student from the teacher (Objective.divergence), 0 outside loss_mask.
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    values: Tensor | None = None
    divergence: Tensor | None = None


@dataclass(frozen=True)
class TeacherHead:
    """A teacher's output head: softcap(states @ weight.T + bias) * scale, with softcap(z) = cap * tanh(z / cap).

    Args:
        weight: [V, D], of the teacher's vocabulary and width.
        bias: [V].
    """

    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0


class Adaptive:
    """The base of advantage estimators and objectives, with coefficients that change from step to step. An algorithm's
    estimator and objective read the same coefficients."""

    coefficients: Coefficients = MappingProxyType({})
    """The step's coefficients, set before each command; empty in the first step of a run."""

    def adapt(self, stats: Mapping[str, Stat]) -> Coefficients:
        """The coefficients for the next step, from `coefficients` and this step's statistics over all ranks. Called on
        rank 0; the same arguments give the same bits."""
        return {}


class AdvantageEstimator(Adaptive, ABC):
    """Turns rewards into advantages. Built once per trainer rank from its section of the configuration."""

    reads: frozenset[str] = frozenset()
    """Fields of the batch that must be filled beforehand: any of old_logprobs, ref_logprobs, teacher_logprobs,
    values."""

    @abstractmethod
    def assign(self, batch: Batch, table: RewardTable, all_sum: AllSum) -> Stats:
        """Fill batch.advantages and batch.returns [T], 0 outside loss_mask; may change batch.weights [B]. Returns
        statistics to log. Collective over the ranks of all_sum, which may hold no rows."""


class Objective(Adaptive, ABC):
    """Turns model outputs into a loss. Built once per trainer rank; the attributes are constant."""

    temperature: float = 1.0
    """Logits are divided by this before log-probs and entropies are taken."""
    reads: frozenset[str] = frozenset()
    """Fields of the batch that must be filled beforehand: any of advantages, old_logprobs, old_entropies, ref_logprobs,
    values."""
    outputs: frozenset[str] = frozenset()
    """Optional fields of Outputs that the loss needs, with gradients."""
    logged: frozenset[str] = frozenset()
    """Optional fields of Outputs that are only logged, and computed without gradients."""
    divergence: Divergence | None = None
    """The divergence from the teacher. With the forms top_k and full, the engine computes Outputs.divergence from the
    teacher's fields of the batch."""
    teacher_head: TeacherHead | None = None
    """Of the form full. Set before the first step, on each trainer rank, on the engine's device."""
    further_heads: tuple[TeacherHead, ...] = ()
    """Of the form full with several teachers (the batch's field `teachers`): the heads of the teachers 1, 2, ...;
    teacher_head is that of teacher 0."""
    num_epochs: int = 1
    """Passes over the batch of a step."""
    num_mini_batches: int = 1
    """Optimizer steps per pass."""
    compares_rows: ClassVar[bool] = False
    """Whether the loss compares rows (preference pairs); then no engine may split a micro-batch."""

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps per step."""
        return self.num_epochs * self.num_mini_batches

    def prepare(self, batch: Batch, all_sum: AllSum) -> Stats:
        """Fill the batch's fields that the loss reads and that depend on the whole step. Called after the advantage
        estimator. Returns statistics to log. Collective over the ranks of all_sum, which may hold no rows."""
        return {}

    @abstractmethod
    def loss(self, outputs: Outputs, batch: Batch, norms: Norms) -> tuple[Tensor, Stats]:
        """(scalar, statistics) of a micro-batch.

        The scalar is a sum over this micro-batch divided by the global norms: the scalars of all micro-batches of all
        ranks add up to the mini-batch's loss, however it is split.
        """


@dataclass(frozen=True)
class Algorithm:
    """An objective and its advantage estimator; estimator is None if the objective reads no advantages."""

    objective: Objective
    estimator: AdvantageEstimator | None = None

    @property
    def reads(self) -> frozenset[str]:
        """Fields of the batch that must be filled before advantages and loss."""
        return self.objective.reads | (self.estimator.reads if self.estimator is not None else frozenset())

    def take(self, coefficients: Coefficients) -> None:
        """Set the coefficients of both parts."""
        for part in self._parts:
            part.coefficients = coefficients

    @property
    def coefficients(self) -> dict[str, float]:
        """The coefficients that both parts read."""
        return dict(self.objective.coefficients)

    def adapt(self, stats: Mapping[str, Stat]) -> dict[str, float]:
        """The coefficients of the next step, see Adaptive."""
        return {name: value for part in self._parts for name, value in part.adapt(stats).items()}

    @property
    def _parts(self) -> list[Adaptive]:
        return [part for part in (self.estimator, self.objective) if part is not None]


def model_tokens(batch: Batch) -> Tensor:
    """int64 [M]: positions of trained tokens: in the loss mask, and in rows with non-zero weight."""
    return (batch.loss_mask & (batch.weights > 0)[batch.row_ids]).nonzero().squeeze(1)


def policy_tokens(batch: Batch) -> Tensor:
    """int64 [M]: positions of the model tokens that the policy generated, without those of an expert's turns and of
    answers, which have neither log-probs of the generator nor advantages."""
    index = model_tokens(batch)
    return index[batch.versions[index] >= 0]


def is_last(rows: Tensor) -> Tensor:
    """bool [M]: whether a token is the last of its row. rows int64 [M], sorted."""
    return torch.cat([rows[1:] != rows[:-1], torch.ones_like(rows[:1], dtype=torch.bool)])


def required(batch: Batch, field: str, reason: str) -> Tensor:
    """The field; ValueError with the reason if it is not filled."""
    tensor: Tensor | None = getattr(batch, field)
    if tensor is None:
        raise ValueError(f"batch.{field} must be filled for {reason}")
    return tensor
