"""Format rewards, to be used as parts of a composed reward: length, repetition, tags and language."""

from __future__ import annotations

import re

from hpcrl.config import RewardConfig
from hpcrl.rewards.builtin.instructions import language_of
from hpcrl.rewards.grading.extract import after_thinking
from hpcrl.rewards.reward import PerResponse, RewardItem, Score
from hpcrl.rewards.spec import LanguageOptions, LengthOptions, RepetitionOptions, TagsOptions
from hpcrl.spec.options import read_options


class LengthReward(PerResponse):
    """0 up to max_tokens - buffer_tokens, then falling to -1 at max_tokens: DAPO's soft overlong punishment (arXiv
    2503.14476). The tokens of all model turns count."""

    inline = True

    def __init__(self, config: RewardConfig):
        self.options = read_options(LengthOptions, config.options)

    def score_one(self, item: RewardItem) -> Score:
        options, length = self.options, sum(len(turn.token_ids) for turn in item.turns)
        over = (length - (options.max_tokens - options.buffer_tokens)) / options.buffer_tokens
        return Score(-min(1.0, max(0.0, over)), float(over <= 0))


class RepetitionReward(PerResponse):
    """Minus the share of a response's word n-grams that are repetitions; the score is 1 without repetitions."""

    inline = True

    def __init__(self, config: RewardConfig):
        self.options = read_options(RepetitionOptions, config.options)

    def score_one(self, item: RewardItem) -> Score:
        words, size = item.response.lower().split(), self.options.ngram
        grams = list(zip(*(words[start:] for start in range(size)), strict=False))
        share = 1 - len(set(grams)) / len(grams) if grams else 0.0
        return Score(-share, float(share == 0))


class TagsReward(PerResponse):
    """1 if the response consists of the tags in this order, each once, closed and not empty, with nothing before, after
    or between them except an answer after the last tag if allowed."""

    inline = True

    def __init__(self, config: RewardConfig):
        self.options = read_options(TagsOptions, config.options)

    def score_one(self, item: RewardItem) -> Score:
        marks = [mark for tag in self.options.tags for mark in (f"<{tag}>", f"</{tag}>")]
        rest, right = item.response, all(item.response.count(mark) == 1 for mark in marks)
        for tag in self.options.tags:
            opened, closed = f"<{tag}>", f"</{tag}>"
            rest = rest.lstrip()
            content, end, rest = (
                rest.removeprefix(opened).partition(closed) if rest.startswith(opened) else ("", "", "")
            )
            right = right and bool(end) and bool(content.strip())
        right = right and (bool(rest.strip()) if self.options.answer_after else not rest.strip())
        return Score(float(right), float(right))


class LanguageReward(PerResponse):
    """1 if the response is in the language of the options, or else of the prompt, else 0. A response without words is
    in no language; if the prompt has no words either, every response is right."""

    def __init__(self, config: RewardConfig):
        self.options = read_options(LanguageOptions, config.options)

    def score_one(self, item: RewardItem) -> Score:
        wanted = self.options.language or language_of(item.prompt)
        text = item.response if self.options.with_thinking else after_thinking(item.response)
        given = language_of(re.sub(r"\$[^$]*\$|```.*?```", " ", text, flags=re.DOTALL))
        right = float(wanted is None or wanted == given)
        return Score(right, right, extracted=given, ground_truth=wanted)
