"""A reward composed of other rewards: their weighted sum, their product, or a gated sum."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from hpcrl.config import RewardConfig
from hpcrl.rewards.reward import Reward, RewardItem, Score, make_reward
from hpcrl.rewards.services import Services
from hpcrl.rewards.spec import ComposedOptions
from hpcrl.spec.options import read_options
from hpcrl.spec.tables import REWARDS


class ComposedReward(Reward):
    """sum: the weighted sum of the parts' rewards. product: their product. gate: the weighted sum if every part with
    gate=true has score 1, else `closed`. The score is the first part's score. Each part's reward is a metric.

    With a part that waits for a service, such as a judge, this is an asynchronous reward; parts that compute then score
    one response at a time."""

    def __init__(self, config: RewardConfig):
        self.options = read_options(ComposedOptions, config.options)
        parts = self.options.parts
        self._parts: dict[str, Reward] = {}
        for name, part in parts.items():
            if part.name not in REWARDS or REWARDS[part.name].imports_code or part.name == "composed":
                able = ", ".join(name for name, spec in REWARDS.items() if not spec.imports_code and name != "composed")
                raise ValueError(
                    f"parts.{name}.name: {part.name!r} cannot be a part; these can: {able}. Your own function can "
                    "compose rewards itself"
                )
            try:
                limits = {"timeout_s": config.timeout_s, "concurrency": config.concurrency}
                section = {"name": part.name, "options": part.options, **limits}
                reward = make_reward(RewardConfig.model_validate(section))
            except ValueError as error:
                raise ValueError(f"parts.{name}.options: {error}") from error
            if reward.scores != "samples":
                raise ValueError(f"parts.{name}.name: {part.name} cannot be a part: it scores groups")
            self._parts[name] = reward
        if self.options.rule == "gate" and not any(part.gate for part in parts.values()):
            raise ValueError(f"rule: gate needs a part with gate=true; there are {', '.join(parts)}")
        for key, rule in (("gate", "gate"), ("weight", "sum or gate")):
            unread = [name for name, part in parts.items() if key in part.model_fields_set]
            if unread and self.options.rule not in rule:
                raise ValueError(f"parts.{unread[0]}.{key}: not read with rule={self.options.rule}, only with {rule}")
        self.inline = all(reward.inline for reward in self._parts.values())
        self.pure = all(reward.pure for reward in self._parts.values())
        if any(reward.pool == "async" for reward in self._parts.values()):
            self.pool = "async"

    def connect(self, services: Services) -> None:
        """See Reward."""
        for reward in self._parts.values():
            reward.connect(services)

    def start(self) -> None:
        """Start the parts."""
        for name, reward in self._parts.items():
            try:
                reward.start()
            except ValueError as error:
                raise ValueError(f"parts.{name}: {error}") from error

    def score(self, items: Sequence[RewardItem]) -> list[Score] | Awaitable[list[Score]]:
        by_part = {name: reward.score(items) for name, reward in self._parts.items()}
        if self.pool == "async":
            return self._awaited(by_part, len(items))
        return self._together(by_part, len(items))  # type: ignore[arg-type]

    async def _awaited(
        self, by_part: Mapping[str, Sequence[Score] | Awaitable[Sequence[Score]]], count: int
    ) -> list[Score]:
        scores = {name: await given if inspect.isawaitable(given) else given for name, given in by_part.items()}
        return self._together(scores, count)

    def _together(self, by_part: Mapping[str, Sequence[Score]], count: int) -> list[Score]:
        return [self._composed({name: scores[place] for name, scores in by_part.items()}) for place in range(count)]

    def problem_of_row(self, answer: Any, extra: Mapping[str, Any]) -> str:
        """Reports a row that one of the parts cannot score."""
        for name, reward in self._parts.items():
            kind = self.options.parts[name].name
            if answer is None and REWARDS[kind].compares_answer:
                return f"no answer (data.answer_key), which the part {name} ({kind}) compares with"
            if text := reward.problem_of_row(answer, extra):
                return f"part {name} ({kind}): {text}"
        return ""

    def _composed(self, scores: Mapping[str, Score]) -> Score:
        options, parts = self.options, self.options.parts
        if options.rule == "product":
            reward = math.prod(score.reward for score in scores.values())
        elif options.rule == "gate" and any(parts[name].gate and scores[name].score < 1 for name in scores):
            reward = options.closed
        else:
            reward = sum(parts[name].weight * score.reward for name, score in scores.items())
        first = next(iter(scores.values()))
        metrics = {f"{name}/{key}": value for name, score in scores.items() for key, value in score.metrics.items()}
        metrics |= {name: score.reward for name, score in scores.items()}
        errors = "; ".join(f"{name}: {score.error}" for name, score in scores.items() if score.error)
        if errors:
            return Score(0.0, 0.0, errors, metrics)
        return Score(reward, first.score, metrics=metrics, extracted=first.extracted, ground_truth=first.ground_truth)
