"""Scores of reasoning-gym's own verifiers (arXiv 2505.24760)."""

from __future__ import annotations

import re
from typing import Any

from hpcrl.config import RewardConfig
from hpcrl.rewards.grading.extract import after_thinking
from hpcrl.rewards.reward import PerResponse, RewardItem, Score
from hpcrl.rewards.spec import ReasoningGymOptions
from hpcrl.spec.options import read_options

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGymReward(PerResponse):
    """Scores the last <answer> tag after the thinking, or the whole text after it; 0 if the verifier raises.

    `extra["reasoning_gym"]` has the arguments to recreate the entry ({name, size, seed, index, options}); rows of a
    file with reasoning-gym entries have `extra["metadata"]["source_dataset"]` instead.
    """

    def __init__(self, config: RewardConfig):
        self.options = read_options(ReasoningGymOptions, config.options)
        self._datasets: dict[str, Any] = {}

    def score_one(self, item: RewardItem) -> Score:
        dataset, entry = self._entry(item)
        text = after_thinking(item.response)
        tagged = _ANSWER.findall(text)
        answer = (tagged[-1] if tagged else text).strip()
        try:
            value = float(dataset.score_answer(answer, entry))
        except Exception:  # verifiers raise on unreadable answers, which are wrong
            return Score(0.0, 0.0, metrics={"unreadable": 1.0}, extracted=answer)
        right = float(value >= (1.0 if self.options.threshold is None else self.options.threshold))
        return Score(value if self.options.threshold is None else right, right, extracted=answer)

    def _entry(self, item: RewardItem) -> tuple[Any, dict[str, Any]]:
        recipe = item.extra.get("reasoning_gym")
        if recipe is not None:
            # Recreated from its seed: messages turn tuples into lists, and some verifiers distinguish them.
            index = recipe["index"]
            recipe = {key: value for key, value in recipe.items() if key != "index"}
            dataset = self._dataset(recipe)
            return dataset, dataset[index]
        metadata = item.extra.get("metadata")
        if not isinstance(metadata, dict) or "source_dataset" not in metadata:
            raise ValueError("the row is not a reasoning-gym entry: it has no metadata.source_dataset")
        dataset = self._dataset({"name": metadata["source_dataset"], "size": 1, "seed": 0, "options": {}})
        return dataset, {"question": item.prompt, "answer": item.answer, "metadata": metadata}

    def _dataset(self, recipe: dict[str, Any]) -> Any:
        from hpcrl.data.tasks import make_reasoning_gym

        key = repr(sorted(recipe.items()))
        if key not in self._datasets:
            self._datasets[key] = make_reasoning_gym(**recipe)
        return self._datasets[key]
