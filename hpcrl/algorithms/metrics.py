"""Statistics of a batch and of a loss."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hpcrl.algorithms.correction import Correction
from hpcrl.algorithms.functional import LOG_RATIO_LIMIT, Aggregation, kl_divergence, row_sums
from hpcrl.algorithms.interface import RewardTable, policy_tokens
from hpcrl.metrics.stats import Stat, Stats, stat
from hpcrl.rollout.batch import STATUS, Batch, oldest_versions
from hpcrl.spec.media import IMAGES


def batch_stats(batch: Batch, table: RewardTable) -> Stats:
    """Scores, rewards and lengths of this rank's rows; outcomes of all groups (equal on every rank)."""
    prompts = row_sums((batch.turn_ids < 0).long(), batch.row_ids, batch.num_sequences)
    valid = row_sums(batch.loss_mask.long(), batch.row_ids, batch.num_sequences).bool() & (batch.weights > 0)
    return (
        {
            "critic/score/*": stat(batch.scores),
            "critic/rewards/*": stat(batch.rewards),
            "actor/valid_sample_ratio": stat(valid),
            "token/prompt_length/*": stat(prompts),
            "token/response_length/*": stat(batch.lengths - prompts),
            "token/total_length/*": stat(batch.lengths),
            "token/response_length/clip_ratio": stat(batch.status == STATUS.index("length")),
            "token/mixed_weights_ratio": stat(_mixed(batch)),
        }
        | group_outcomes(table)
        | _image_stats(batch)
    )


def _image_stats(batch: Batch) -> Stats:
    """Images of this rank's rows, their tokens, and image tokens that the model wrote itself, which are not trained on
    (hpcrl.workers.exchange)."""
    if batch.images is None:
        return {}
    counts = batch.columns[IMAGES.counts.name]
    tokens = torch.zeros_like(counts).index_add(0, torch.repeat_interleave(counts), batch.images[:, 1])
    written = row_sums(((batch.versions >= 0) & ~batch.loss_mask).long(), batch.row_ids, batch.num_sequences)
    return {
        "images/per_row/*": stat(counts),
        "images/tokens_per_row/*": stat(tokens),
        "images/written_by_model/*": stat(written),
    }


def advantage_stats(batch: Batch) -> Stats:
    """Advantages, returns and a critic's values of this rank's tokens of the policy, after the advantage estimator, and
    the teacher's log-probs of those that learn from it."""
    index = policy_tokens(batch)
    filled = {"advantages": batch.advantages, "returns": batch.returns, "values": batch.values}
    stats = {f"critic/{name}/*": stat(values[index]) for name, values in filled.items() if values is not None}
    if batch.teacher_logprobs is not None:
        learns = _learning_from_teacher(batch, index)
        stats["distill/teacher_logprob"] = stat(batch.teacher_logprobs[learns])
    return stats


def domain_stats(batch: Batch, table: RewardTable) -> Stats:
    """`domain/DOMAIN/...`: for this rank's rows of each domain, the statistics of batch_stats() and
    advantage_stats(), the KL divergence to the reference (k3), and the sampled one from the teacher. Called after the
    advantage estimator and the weights. Empty for a step of one domain."""
    stats: Stats = {}
    names, ids = table.domain_ids()
    for number, name in enumerate(names):
        chosen = ids == number
        rows = torch.isin(batch.group_ids, table.group_ids[chosen]).nonzero()[:, 0].tolist()
        if not name or not rows or len(table.domains) < 2:
            continue
        narrow = {field: tensor for field, tensor in batch.columns.items() if tensor.dim() == 1}  # the small ones
        own = replace(batch, columns=narrow, texts={}).select(rows)
        found = batch_stats(own, table.select(chosen)) | advantage_stats(own)
        if own.ref_logprobs is not None and own.old_logprobs is not None:
            index = policy_tokens(own)
            kl = kl_divergence(own.old_logprobs[index], own.ref_logprobs[index], "k3")
            weights = own.weights[own.row_ids[index]]
            found["critic/kl"] = Stat((weights * kl).sum().item(), weights.sum().item())
        if own.teacher_logprobs is not None and own.old_logprobs is not None:
            learns = _learning_from_teacher(own, policy_tokens(own))
            gap, weights = (own.old_logprobs - own.teacher_logprobs)[learns], own.weights[own.row_ids[learns]]
            found["distill/reverse_kl"] = Stat((weights * gap).sum().item(), weights.sum().item())
        stats |= {f"domain/{name}/{key}": value for key, value in found.items()}
    return stats


def _learning_from_teacher(batch: Batch, index: Tensor) -> Tensor:
    """Those of the tokens whose divergence from the teacher has a weight."""
    weights = batch.divergence_weights
    return index if weights is None else index[weights[index] > 0]


def _mixed(batch: Batch) -> Tensor:
    """bool [B]: rows with model tokens from several weight versions. Unless the cache was recomputed
    (rollout.on_new_weights), their later log-probs belong to no single policy."""
    drawn = batch.loss_mask & (batch.versions >= 0)
    rows, versions = batch.row_ids[drawn], batch.versions[drawn].long()
    later = (versions > oldest_versions(batch)[rows]).float()
    return row_sums(later, rows, batch.num_sequences) > 0


def expert_stats(batch: Batch) -> Stats:
    """Of this rank's rows: the shares of the turns, the model tokens and the episodes that are an expert's
    (imitation.expert_turns), an episode's if one of its turns is, and the rewards of episodes with and without it;
    those whose environment has failed are left out."""
    by_expert = (batch.versions < 0)[batch.loss_mask]
    turns = (batch.cu_turns[:-1][batch.row_ids] + batch.turn_ids)[batch.loss_mask]
    played, of_expert = torch.unique(turns), torch.unique(turns[by_expert])
    has_expert = torch.zeros(batch.num_sequences, dtype=torch.bool)
    has_expert[batch.row_ids[batch.loss_mask][by_expert]] = True
    ended = torch.ones_like(has_expert) if batch.failed is None else ~batch.failed
    return {
        "imitation/expert_turns": Stat(float(len(of_expert)), float(len(played))),
        "imitation/expert_tokens": stat(by_expert),
        "imitation/expert_episodes": stat(has_expert),
        "imitation/reward_with_expert": stat(batch.rewards, has_expert & ended),
        "imitation/reward_without_expert": stat(batch.rewards, ~has_expert & ended),
    }


def group_outcomes(table: RewardTable) -> Stats:
    """Share of groups whose scores are all at least 1, all at most 0, or neither."""
    _, groups = torch.unique(table.group_ids, return_inverse=True)
    sizes = torch.bincount(groups)
    correct = torch.bincount(groups, weights=(table.scores >= 1).double()) == sizes
    incorrect = torch.bincount(groups, weights=(table.scores <= 0).double()) == sizes
    return {
        "group/all_correct_ratio": stat(correct),
        "group/all_incorrect_ratio": stat(incorrect),
        "group/mixed_ratio": stat(~(correct | incorrect)),
    }


class LossSums:
    """Weighted sums of one micro-batch, kept on the device and read in one transfer by stats().

    Means are merged from sums and counts, so they do not depend on the split into micro-batches.
    """

    def __init__(self, batch: Batch, rows: Tensor, mode: Aggregation):
        self._rows, self._num_rows = rows, batch.num_sequences
        self._token_weights = batch.weights[rows]
        counts = row_sums(torch.ones_like(rows), rows, self._num_rows)  # bincount would synchronise with the GPU
        self._row_counts = counts.clamp(min=1)
        self._row_weights = batch.weights * (counts > 0)
        self._by_token = mode == "token-mean"
        self._sums: list[tuple[str, list[Tensor]]] = []  # name, and the values of its Stat
        self._num_tokens, self._num_sequences = self._token_weights.sum(), self._row_weights.sum()

    def add_loss(self, name: str, total: Tensor) -> None:
        """A sum computed with the coefficients of the aggregation."""
        self._sums.append((name, [total.detach(), self._num_tokens if self._by_token else self._num_sequences]))

    def add_tokens(self, name: str, values: Tensor, among: Tensor | None = None) -> None:
        """Mean over tokens, or over those `among` them; values [M], among bool [M]."""
        weights, count = self._token_weights, self._num_tokens
        if among is not None:
            weights = weights * among
            count = weights.sum()
        self._sums.append((name, [(weights * values.detach()).sum(), count]))

    def add_sequences(self, name: str, values: Tensor) -> None:
        """Mean over sequences; values [B]."""
        self._sums.append((name, [(self._row_weights * values.detach()).sum(), self._num_sequences]))

    def add_policy(self, ratio: Tensor, log_ratio: Tensor, clipped: Tensor) -> None:
        """The change from the policy before the step to the current policy."""
        self.add_tokens("actor/approxkl", 0.5 * log_ratio.detach().square())
        self.add_tokens("actor/ratio_mean", ratio)
        self.add_tokens("actor/clipfrac", clipped)

    def add_correction(self, correction: Correction) -> None:
        """How the off-policy correction changed the token losses."""
        self.add_tokens("actor/correction_mean", correction.weights)
        self.add_tokens("actor/correction_clipfrac", correction.clipped)
        if correction.rejected is not None:
            self.add_tokens("actor/rejected_ratio", correction.rejected)

    def add_train_infer(self, old: Tensor, gen: Tensor) -> None:
        """Ratios of the trainer's to the generator's probabilities, and their differences, under ROLL's names. token:
        of each token; geometric: a sequence's geometric mean of ratios and mean of differences; sequence: its product
        of ratios and sum of differences."""
        diff = old.exp() - gen.exp()
        ratios, diffs = (row_sums(values, self._rows, self._num_rows) for values in (old - gen, diff))
        self.add_tokens("actor/train_infer_ratio_token_mean", _exp(old - gen))
        self.add_tokens("actor/train_infer_diff_token_mean", diff)
        for level, lengths in (("geometric", self._row_counts), ("sequence", 1)):
            self.add_sequences(f"actor/train_infer_ratio_{level}_mean", _exp(ratios / lengths))
            self.add_sequences(f"actor/train_infer_diff_{level}_mean", diffs / lengths)

    def add_mismatch(self, old: Tensor, gen: Tensor, on_policy: Tensor) -> None:
        """Absolute differences of probabilities, and estimates of KL(generator || trainer) from the generator's tokens
        (k1, and k3 with less variance: functional.kl_divergence). Tokens that the trainer's weights generated
        (on_policy, bool [M]) are reported separately from stale tokens, which other weights generated."""
        diff = (old.exp() - gen.exp()).abs()
        k1, k3 = kl_divergence(gen, old, "k1"), kl_divergence(gen, old, "k3")
        self.add_tokens("mismatch/token_ratio", on_policy.float())
        for group, chosen in (("mismatch", on_policy), ("stale", ~on_policy)):
            weights = self._token_weights * chosen
            count, none = weights.sum(), diff.new_tensor(torch.inf)
            for name, values in (("kl_k1", k1), ("kl_k3", k3)):
                self._sums.append((f"{group}/{name}", [(weights * values).sum(), count]))
            low = torch.cat([diff[chosen], none[None]]).min()
            high = torch.cat([diff[chosen], -none[None]]).max()
            self._sums.append((f"{group}/diff/*", [(weights * diff).sum(), count, low, high]))

    def stats(self) -> Stats:
        """All statistics, after the only device synchronisation."""
        flat = iter(torch.stack([value.double() for _, values in self._sums for value in values]).tolist())
        return {name: Stat(*(next(flat) for _ in values)) for name, values in self._sums}


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
