"""The weights of what a trained token learns from: the policy loss (p), the cross-entropy (c), the divergence from a
teacher (d). They are fields of the batch; a field that no domain's section `loss` needs is None: p is 1, c and d are 0.

The form `sampled` of the divergence is an advantage of the token, D = teacher - old: the reverse KL, estimated at the
token that the policy drew (thinkingmachines.ai/blog/on-policy-distillation). So the surrogate's weight is p + d, and
its advantage the weighted mean (p A + d D) / (p + d): a clip, a correction or a mask acts on it as on any advantage.
With the other forms the surrogate's weight is p.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hpcrl.algorithms.interface import model_tokens, required
from hpcrl.config import Config
from hpcrl.config.teacher_paths import DEFAULT, teacher_of, teachers
from hpcrl.rollout.batch import Batch
from hpcrl.spec.divergence import Divergence


def fill_weights(config: Config, batch: Batch, domains: Mapping[str, Sequence[int]]) -> None:
    """Fill policy_weights, ce_weights and divergence_weights [T], 0 outside loss_mask; a field stays None if its weight
    is the default in every domain. Tokens of an expert's turns have p = d = 0 and c = imitation.ce. domains: name ->
    ids of its groups; all other groups have the section `default`. The same fields are filled on all ranks. ValueError
    for such tokens in a run without imitation.expert_turns."""
    sections = [config.loss_of("default"), *config.loss.values()]
    names = [name for name, default in DEFAULTS.items() if any(getattr(each, name) != default for each in sections)]
    if config.expert_plays:
        names = [name for name in DEFAULTS if name in {*names, "policy", "ce"}]
    expert = batch.loss_mask & (batch.versions < 0)
    if not config.expert_plays and bool(expert.any()):
        count = int(expert.sum())
        raise ValueError(
            f"imitation.expert_turns: 0, but the rollouts have {count} tokens of an expert's turns; give the value of "
            "the run that generated them"
        )
    if not names:
        return
    rows = {name: torch.empty(batch.num_sequences) for name in names}
    others = torch.ones(batch.num_sequences, dtype=torch.bool)
    for domain, groups in [("default", None), *domains.items()]:
        weights = config.loss_of(domain)
        chosen = others if groups is None else torch.isin(batch.group_ids, batch.group_ids.new_tensor(list(groups)))
        for name in names:
            rows[name][chosen] = getattr(weights, name)
        if "ce" in names and weights.ce_above is not None:
            rows["ce"][chosen & (batch.rewards <= weights.ce_above)] = 0.0
    for name in names:
        of_expert = config.imitation.ce if name == "ce" else 0.0
        of_tokens = rows[name][batch.row_ids] * batch.loss_mask
        setattr(batch, f"{name}_weights", of_tokens.masked_fill(expert, of_expert))


def fill_teachers(config: Config, batch: Batch, domains: Mapping[str, Sequence[int]]) -> None:
    """Fill teachers [B], 0 for rows that none judges, if the divergence needs it; arguments as above."""
    if batch.teacher_states is None or len(teachers(config.teacher)) < 2:
        return
    batch.teachers = torch.full((batch.num_sequences,), teacher_of(config.teacher, DEFAULT) or 0, dtype=torch.int32)
    for domain, groups in domains.items():
        chosen = torch.isin(batch.group_ids, batch.group_ids.new_tensor(list(groups)))
        batch.teachers[chosen] = teacher_of(config.teacher, domain) or 0


DEFAULTS = {"policy": 1.0, "ce": 0.0, "divergence": 0.0}
"""The weights of a token without fields of weights."""


def is_sampled(divergence: Divergence | None) -> bool:
    """Whether the divergence is part of the advantages."""
    return divergence is not None and divergence.form == "sampled"


def surrogate_weights(batch: Batch, divergence: Divergence | None) -> Tensor | None:
    """float32 [T]: the weight of each token's surrogate, 0 outside loss_mask; None if it is 1 in loss_mask."""
    weights, added = batch.policy_weights, batch.divergence_weights
    if added is None or not is_sampled(divergence):
        return weights
    return added + (batch.loss_mask.to(added.dtype) if weights is None else weights)


def surrogate_tokens(batch: Batch, divergence: Divergence | None) -> Tensor:
    """int64 [M]: positions of the model tokens whose surrogate has a weight above 0."""
    index, weights = model_tokens(batch), surrogate_weights(batch, divergence)
    return index if weights is None else index[weights[index] > 0]


def weighted_advantages(batch: Batch, index: Tensor, old: Tensor, divergence: Divergence | None) -> Tensor:
    """float32 [M]: the advantages of the surrogate at these tokens, whose surrogates have weights above 0.

    Args:
        index: int64 [M], positions of the tokens.
        old: float32 [M], their log-probs under the policy before the step.
    """
    advantages = required(batch, "advantages", "the policy loss")[index]
    if batch.divergence_weights is None or not is_sampled(divergence):
        return advantages
    teacher = required(batch, "teacher_logprobs", "a divergence from the teacher (loss.DOMAIN.divergence)")[index]
    added = batch.divergence_weights[index]
    own = torch.ones_like(added) if batch.policy_weights is None else batch.policy_weights[index]
    return (own * advantages + added * (teacher - old.detach())) / (own + added)
