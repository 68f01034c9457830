"""Extraction of a response's answer: text after the thinking, tags, boxes, markers, closing phrases, code blocks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
MAX_LINE_CHARS = 1000  # maximum length of a line that is searched for an answer without a box
MAX_BETWEEN_CHARS = 60
CODE_BLOCK = re.compile(
    r"^[ \t]*+```[ \t]*+([^\s`]*+)[^\n`]*+\n(.*?)(?:^[ \t]*+```[ \t]*+$|\Z)", re.DOTALL | re.MULTILINE
)
"""(language, content) of a fenced block, which may be unclosed. Possessive quantifiers avoid quadratic time in the
length of a line."""
CLOSED_BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
"""Content of a closed fenced block in any language."""

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(r"[^\s$.,;]+")
_AND = r"(?:and|or)"
_BETWEEN_BOXES = re.compile(
    rf"(?:[\s,;$&]|\(?(?:[a-h]|i{{1,3}}|iv|v)\)"  # labels of parts
    rf"|\\[()\[\],;:! ]|\\q?quad\b|\\text(?:rm|bf|it)?\s*\{{[\s,;]*{_AND}?[\s,;]*\}}|\b{_AND}\b)*"
)
_ANSWER_IS = re.compile(
    r"(?:answer|答案|答え)(?:\*\*|__)?\s{0,9}(?:is|是|为|為|は|[:：=＝])(?:\s{0,9}[:：=＝])?(?:\*\*|__)?\s{0,99}",
    re.IGNORECASE,
)
_BOLD = re.compile(r"(?<![\w)*])(\*\*|__|\*|`)(?=[^\s*`])([^*`]+)(?<=\S)\1(?!\w)")
_WRAPPED = re.compile(r"(?<!\\)(\$\$|\$|\\\(|\\\[)(.*?)(?<!\\)(\$\$|\$|\\\)|\\\])", re.DOTALL)
_SENTENCE_END = re.compile(r"[.!?](?=\s+[A-Z*\"(\[]|\s*$)|[。！？]")
_CONNECTIVE = re.compile(
    r"(?:thus|so|hence|therefore|then|finally|we (?:get|have|find)|that is)\b[\s,:]*", re.IGNORECASE
)
_VERB = re.compile(
    r"(?:\b(?:is|are|equals?|be|to|at|gives?|becomes?"
    r"|(?:increas|decreas|reduc|chang|grow|ris|fall|drop|go)\w{0,4}(?: up| down)? by)|:)\s+"
    r"|(?:是|为|為|等于|得到|共有|还有|有|は|：)\s*",
    re.IGNORECASE,
)
_OPENING = re.compile(r"(?<![\w*_])(?:\*{1,3}|_{1,3})(?=[^\s*_]|$)")
_QUOTED = re.compile(r"[\"“]([^\"“”]+)[\"”]?\.?")
_HOPE = re.compile(r"I hope (?:it|this|that) is correct\W*$", re.IGNORECASE)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}|[\u3040-\u30ff\u4e00-\u9fff]")  # Chinese and Japanese without spaces


def json_of(answer: Any) -> Any:
    """The value of an answer that is JSON text, None for other text; answers that are not text unchanged."""
    if not isinstance(answer, str):
        return answer
    try:
        return json.loads(answer)
    except (ValueError, RecursionError):
        return None


def after_thinking(response: str) -> str:
    """The text after the last `</think>`; empty if a `<think>` is still open; the whole response without thinking."""
    _, closed, rest = response.rpartition(THINK_CLOSE)
    if THINK_OPEN in rest:
        return rest[: rest.index(THINK_OPEN)] if closed else ""
    return rest


def final_answer(response: str, require_boxed: bool = False) -> str | None:
    """The final answer of a response; None without one.

    The first of these that exists after the thinking: the last `<answer>` tag (and a box in it), the last boxes, the
    rest of the line after the last "####", the text after the last "answer is", the last line. If the last line is a
    sentence, the answer is the text after its last verb ("the total is $18"), else its last formula.
    """
    text = after_thinking(response)
    if require_boxed:
        return boxed_answer(text)
    tagged = tagged_answer(text)
    boxed = boxed_answer(text if tagged is None else tagged)
    if boxed is not None:
        return boxed
    marked = after_marker(text, "####") if tagged is None else tagged
    if marked is not None:
        return _without_quotes(_stated(marked) or without_markup(marked))
    return _without_quotes(_stated(text) or _last_line(text) or "") or None


def gold_answer(answer: str) -> str:
    """The final part of a gold answer or solution: the text after "####", or its last boxes, or all of it. Empty if
    nothing is after the marker or in the box."""
    marked = (after_marker(answer, "####"), boxed_answer(answer))
    return next(filter(None, marked), answer.strip() if marked == (None, None) else "")


def last_boxed(text: str) -> str | None:
    """Content of the last complete `\\boxed{...}` (braces balanced) or `\\boxed x`; None without one."""
    return next((content for _, _, content in _boxes(text)), None)


def boxed_answer(text: str) -> str | None:
    """The last box, with the boxes before it as one list if only commas, "and" or "or" separate them; None without."""
    contents: dict[str, None] = {}
    next_start = None
    for start, end, content in _boxes(text):
        if next_start is not None:
            between = text[end : min(next_start, end + MAX_BETWEEN_CHARS + 1)]
            if end > next_start or len(between) > MAX_BETWEEN_CHARS or not _BETWEEN_BOXES.fullmatch(between):
                break
        next_start = start
        contents.setdefault(content)
    return ", ".join(reversed(contents)) if contents else None


def _boxes(text: str) -> Iterator[tuple[int, int, str]]:
    """(start, end, content) of the complete boxes, the last one first; in linear time."""
    starts = [(match.start(), match.end()) for match in _BOX.finditer(text)]
    if not starts:
        return
    closing: dict[int, int] = {}
    opened: list[int] = []
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            closing[opened.pop()] = match.start()
    for start, inner in reversed(starts):
        if inner < len(text) and text[inner] == "{":
            if inner in closing:
                yield start, closing[inner] + 1, text[inner + 1 : closing[inner]].strip()
        elif bare := _BARE_BOX.match(text, inner):
            yield start, bare.end(), bare[0]


def after_marker(text: str, marker: str) -> str | None:
    """The rest of the line after the last `marker` (GSM8K's "####"); None without one."""
    before, found, rest = text.rpartition(marker)
    line = rest.split("\n", 1)[0].strip()
    return _without_closing_mark(line, before.rsplit("\n", 1)[-1][-MAX_BETWEEN_CHARS:]) if found else None


def without_markup(text: str) -> str:
    """Text without Markdown emphasis and without closed formula delimiters."""
    text = text.strip()
    if text.isalnum() or len(text) > MAX_LINE_CHARS:
        return text
    return _WRAPPED.sub(_content, _BOLD.sub(r"\2", text)).strip()


def _without_quotes(text: str) -> str:
    quoted = _QUOTED.fullmatch(text) if text[:1] in ('"', "“") else None
    return quoted[1] if quoted else text


def _content(match: re.Match[str]) -> str:
    opened, content, closed = match.groups()
    pairs = {"$": "$", "$$": "$$", r"\(": r"\)", r"\[": r"\]"}
    is_price = opened == "$" and _WORD.search(content)  # "$5 and $18"
    return match[0] if pairs[opened] != closed or is_price else content


def tagged_answer(text: str) -> str | None:
    """Content of the last `<answer>` tag that is closed; None without one."""
    before, closed, _ = text.rpartition("</answer>")
    _, opened, content = before.rpartition("<answer>")
    return content.strip() if closed and opened else None


def _stated(text: str) -> str | None:
    """The text after the last "answer is", up to the end of the sentence; None without it."""
    phrases = list(_ANSWER_IS.finditer(text))
    if not phrases:
        return None
    start, end = phrases[-1].span()
    rest = text[end:][:MAX_LINE_CHARS]
    if rest.startswith((r"\[", "$$")) and (block := _WRAPPED.match(rest)):
        return block[2].strip()
    before = text[max(text.rfind("\n", 0, start) + 1, start - MAX_BETWEEN_CHARS) : end]
    line = _without_closing_mark(rest.split("\n", 1)[0], before)
    if line[:1].isalpha():
        return _conclusion(_first_sentence(line))
    return _first_sentence(without_markup(line))


def _without_closing_mark(line: str, before: str) -> str:
    """The line without the end of an emphasis that begins in the text before it, as in **The answer is 18**."""
    for opening in _OPENING.finditer(before):
        mark = opening[0]
        if mark not in before[opening.end() :]:
            return re.sub(rf"(?<=\S){re.escape(mark)}(?!\w)", "", line, count=1)
    return line


def _first_sentence(text: str) -> str:
    return _SENTENCE_END.split(text, maxsplit=1)[0].strip()


def _last_line(text: str) -> str | None:
    text = text.strip()
    for opened, closed in ((r"\[", r"\]"), ("$$", "$$")):  # a formula on separate lines
        if text.endswith(closed) and opened in text[:-2]:
            return text[text.rindex(opened, 0, -2) + 2 : -2].strip()
    line = _HOPE.sub("", text.rsplit("\n", 1)[-1]).strip()
    return _conclusion(line) if len(line) <= MAX_LINE_CHARS else line


def _conclusion(line: str) -> str | None:
    """The answer in a sentence: the text after its last verb, or its last formula, or all of it."""
    plain = without_markup(line)
    if connective := _CONNECTIVE.match(plain):
        plain = plain[connective.end() :]
    verbs = list(_VERB.finditer(plain))
    if not verbs and not _WORD.search(plain):
        return plain or None
    if verbs:
        rest = _first_sentence(plain[verbs[-1].end() :])
        if re.search(r"[\d\\$]", rest) or re.fullmatch(r"\S+", rest):
            return rest
    formulas = [match for match in _WRAPPED.finditer(line) if _content(match) != match[0]]
    return formulas[-1][2].strip() if formulas else plain
