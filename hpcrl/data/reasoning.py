"""The text of a model's turn for rewards and environments, without control tokens, and with its reasoning within
<think> and </think> for every model family's marks.

Text from a model is hostile: nothing here takes quadratic time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from hpcrl.data.template_forms import TemplateRefusal, apply_template, chat_template

OPEN, CLOSE = "<think>", "</think>"
REASONING = {
    OPEN: CLOSE,
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "<mm:think>": "</mm:think>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|channel>thought": "<channel|>",
    "<|inner_prefix|>": "<|inner_suffix|>",
    "Here are my reasoning steps:": "[BEGIN FINAL RESPONSE]",
}
"""Marks around reasoning: Qwen, DeepSeek, GLM and others; Magistral; Seed-OSS; MiniMax-M3; Command; Gemma 4; Apertus;
Apriel. Other families' marks are found in the text that their template renders."""
ANSWER = {"<response></response>": ("<response>", "</response>"), "[END FINAL RESPONSE]": ("[END FINAL RESPONSE]",)}
"""Text in a template that mentions the marks of an answer -> the marks: Granite 3.3; Apriel."""
MESSAGE, HEADER_CHARS = "<|message|>", 1000
END = re.compile(r"<\|(?:end|return|call|start)\|>")
CHANNEL = re.compile(r"<\|channel\|>\s*(\w{1,32})")
TAIL_TOKENS = 32
"""Number of a prompt's last tokens that are searched for a mark that begins the reasoning; every mark is shorter."""
ASKED, THOUGHT, SAID = "0ASKED0", "0THOUGHT0", "0SAID0"
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking", "thought")


class TurnTexts:
    """Texts of turns for a tokenizer and its chat template."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        template = chat_template(tokenizer)
        added = tokenizer.added_tokens_decoder
        texts = [token.content for token in added.values()]
        known = {**_rendered_marks(tokenizer, template), **REASONING}
        # A mark counts only if the model's folder has it: other marks are text of the task.
        self._marks = {
            begin: end
            for begin, end in known.items()
            if begin in template or end in template or any(text.startswith((begin, end)) for text in texts)
        }
        self._others = {begin: end for begin, end in self._marks.items() if begin != OPEN}
        self._begins = (OPEN, *self._others)
        self._answer = [mark for said, marks in ANSWER.items() if said in template for mark in marks]
        self._has_channels = {"<|channel|>", MESSAGE} <= {*texts}
        self._special = {number: token.content for number, token in added.items() if token.special}
        marks = "".join([*self._marks, *self._marks.values()])
        wanted = {number: text for number, text in self._special.items() if self._has_channels or text in marks}
        self._wanted = wanted.keys()
        longest_first = sorted({*wanted.values()} - {OPEN, CLOSE}, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @property
    def marks(self) -> dict[str, str]:
        """The marks that the model's folder has: what begins reasoning -> what ends it."""
        return dict(self._marks)

    def of(self, turns: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]]) -> list[str]:
        """The text of each turn. `prompts` has at least the last TAIL_TOKENS tokens before each turn. If a prompt has
        begun the reasoning (<think> at its end), its turn's text begins with <think>."""
        if not turns:  # transformers would decode an empty list to one text
            return []
        decode = self._tokenizer.batch_decode
        texts = decode([list(turn) for turn in turns], skip_special_tokens=True)
        tails = [tuple(prompt[-TAIL_TOKENS:]) for prompt in prompts]
        different = list(dict.fromkeys(tails))  # the responses of a group follow one prompt
        decoded = dict(zip(different, decode(list(map(list, different)), skip_special_tokens=False), strict=True))
        found = []
        for turn, text, tail in zip(turns, texts, map(decoded.__getitem__, tails), strict=True):
            if not self._wanted.isdisjoint(turn):  # some special tokens are marks
                kept = [number for number in turn if number in self._wanted or number not in self._special]
                text = self._marked(decode([kept], skip_special_tokens=False)[0], tail)
                found.append(self._control.sub("", text))
            else:
                found.append(self._marked(text, tail))
        return found

    def _marked(self, text: str, tail: str) -> str:
        if self._has_channels and MESSAGE in text:
            return "".join(_channels(text))
        begun = tail.rstrip().endswith(self._begins) and not text.lstrip().startswith(self._begins)
        if others := {begin: end for begin, end in self._others.items() if begin in text or end in text}:
            text = _without(text, OPEN, CLOSE)  # <think> is text of the task for such a model
            for begin, end in others.items():
                text = text.replace(begin, OPEN).replace(end, CLOSE)
        text = f"{OPEN}\n{text}" if begun else text
        _, closed, answer = text.rpartition(CLOSE)
        if self._answer and (closed or OPEN not in text):
            text = text.removesuffix(answer) + _without(answer, *self._answer)
        return text


def _channels(text: str) -> Iterable[str]:
    """The messages of a gpt-oss response (github.com/openai/harmony): the channel analysis as reasoning, other messages
    unchanged, calls with their headers."""
    at = 0
    while (begins := text.find(MESSAGE, at)) >= 0:
        header = END.split(text[max(at, begins - HEADER_CHARS) : begins])[-1]
        end = END.search(text, begins + len(MESSAGE))
        body = text[begins + len(MESSAGE) : end.start() if end else len(text)]
        channel = CHANNEL.search(header)
        if " to=" in header:
            yield header + body
        elif channel is not None and channel[1] == "analysis":
            yield OPEN + _without(body, OPEN, CLOSE) + (CLOSE if end else "")
        else:
            yield body
        at = end.end() if end else len(text)


def _without(text: str, *marks: str) -> str:
    for mark in marks:
        text = text.replace(mark, "")
    return text


def _rendered_marks(tokenizer: Any, template: str) -> dict[str, str]:
    """The marks that the template writes before and after a turn's reasoning; empty if it shows no reasoning."""
    asked = {"role": "user", "content": ASKED}
    turn = {"role": "assistant", "content": SAID, **dict.fromkeys(THOUGHT_KEYS, THOUGHT)}
    try:
        prompt = apply_template(tokenizer, [asked], None, ask=True) if template else ""
        text = apply_template(tokenizer, [asked, turn], None, ask=False) if template else ""
    except TemplateRefusal:
        return {}
    if not text.startswith(prompt.rstrip()) or THOUGHT not in text:
        return {}
    begin, _, rest = text[len(prompt.rstrip()) :].partition(THOUGHT)
    end, shown, _ = rest.partition(SAID)
    return {begin.strip(): end.strip()} if shown and begin.strip() and end.strip() else {}
