"""Checks whether a text follows one of the 25 verifiable instructions of IFEval (arXiv 2311.07911).

As in the published checker, except that sentences and words are found by regular expressions instead of NLTK's models,
and that keywords are plain text, not regular expressions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

Follows = Callable[..., bool]

_SENTENCE_END = re.compile(
    r"(?<!\b[A-Z]\.)(?<!\bMr\.)(?<!\bMrs\.)(?<!\bMs\.)(?<!\bDr\.)(?<!\be\.g\.)(?<!\bi\.e\.)(?<!\bvs\.)(?<!\betc\.)"
    r"(?<=[.!?])[\"'”’)\]*_]*\s+(?=\S)"
)
_TOKEN = re.compile(r"\w+(?:[-'’.]\w+)*|[^\w\s]")
_FENCE = re.compile(r"```(?:json)?", re.IGNORECASE)
_FIRST_WORD_END = frozenset(".,?!'\"")
MOST = 1_000_000
"""Numbers among an instruction's arguments must be below this."""
CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def _related(count: int, relation: str, bound: int) -> bool:
    return count < bound if relation == "less than" else count >= bound


def _keywords(text: str, keywords: list[str]) -> bool:
    return all(keyword.casefold() in text.casefold() for keyword in keywords)


def _keyword_frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return _related(text.casefold().count(keyword.casefold()), relation, frequency)


def _forbidden_words(text: str, forbidden_words: list[str]) -> bool:
    return not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)


def _letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _related(text.lower().count(letter.lower()), let_relation, let_frequency)


def language_of(text: str) -> str | None:
    """The language of a text as an ISO 639-1 code; None for a text without words."""
    from langdetect import DetectorFactory, LangDetectException, detect

    DetectorFactory.seed = 0
    try:
        return str(detect(text)).partition("-")[0]  # zh-cn, zh-tw
    except LangDetectException:
        return None


def _language(text: str, language: str) -> bool:
    """Whether the text is in this language; also true if its language cannot be detected."""
    return language_of(text) in (language, None)


def _sentences(text: str, num_sentences: int, relation: str) -> bool:
    return _related(count_sentences(text), relation, num_sentences)


def count_sentences(text: str) -> int:
    """Sentences end with a punctuation mark before white space; abbreviations and initials do not end one."""
    return len([part for part in _SENTENCE_END.split(text) if part.strip()])


def _paragraphs(text: str, num_paragraphs: int) -> bool:
    """Paragraphs are separated by ***."""
    parts = [part.strip() for part in re.split(r"\s?\*\*\*\s?", text)]
    inner = parts[1:-1]
    return all(inner) and len([part for part in parts if part]) == num_paragraphs


def _words(text: str, num_words: int, relation: str) -> bool:
    return _related(len(re.findall(r"\w+", text)), relation, num_words)


def _nth_paragraph(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Paragraphs are separated by empty lines."""
    parts = text.split("\n\n")
    count = len([part for part in parts if part.strip()])
    if (
        count != num_paragraphs
        or not 1 <= nth_paragraph <= len(parts)
        or not (words := parts[nth_paragraph - 1].split())
    ):
        return False
    word = words[0].lstrip("'").lstrip('"')
    end = next((i for i, letter in enumerate(word) if letter in _FIRST_WORD_END), len(word))
    return word[:end].lower() == first_word.lower()


def _placeholders(text: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]\n]*\]", text)) >= num_placeholders


def _postscript(text: str, postscript_marker: str) -> bool:
    patterns = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    pattern = patterns.get(postscript_marker, re.escape(postscript_marker.lower()))
    return re.search(pattern, text.lower()) is not None


def _bullets(text: str, num_bullets: int) -> bool:
    return len(re.findall(r"^[^\S\n]*\*[^*\n].*$|^[^\S\n]*-.*$", text, re.MULTILINE)) == num_bullets


def _constrained(text: str) -> bool:
    return any(answer in text for answer in CONSTRAINED)


def _highlights(text: str, num_highlights: int) -> bool:
    single = [part for part in re.findall(r"\*[^\n*]*\*", text) if part.strip("*").strip()]
    double = [part for part in re.findall(r"\*\*[^\n*]*\*\*", text) if part.strip("*").strip()]
    return len(single) + len(double) >= num_highlights


def _sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"{re.escape(section_spliter)}\s?\d+", text)) >= num_sections


def _json(text: str) -> bool:
    text = text.strip()
    if opened := _FENCE.match(text):
        text = text[opened.end() :].removesuffix("```")
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _title(text: str) -> bool:
    return any(line.partition("<<")[2].rpartition(">>")[0].strip("<> ") for line in text.split("\n"))


def _two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    responses = [part for part in parts if part]
    return all(parts[1:-1]) and len(responses) == 2 and responses[0] != responses[1]


def _repeats_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _ends_with(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _quoted(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def _capital(text: str) -> bool:
    return text.isupper() and _language(text, "en")


def _lowercase(text: str) -> bool:
    return text.islower() and _language(text, "en")


def _capital_words(text: str, capital_frequency: int, capital_relation: str) -> bool:
    count = len([token for token in _TOKEN.findall(text) if token.isupper()])
    return _related(count, capital_relation, capital_frequency)


def _no_comma(text: str) -> bool:
    return "," not in text


RELATION = ("less than", "at least")
INSTRUCTIONS: dict[str, tuple[Follows, Mapping[str, type | tuple[str, ...]]]] = {
    "keywords:existence": (_keywords, {"keywords": list}),
    "keywords:frequency": (_keyword_frequency, {"keyword": str, "frequency": int, "relation": RELATION}),
    "keywords:forbidden_words": (_forbidden_words, {"forbidden_words": list}),
    "keywords:letter_frequency": (
        _letter_frequency,
        {"letter": str, "let_frequency": int, "let_relation": RELATION},
    ),
    "language:response_language": (_language, {"language": str}),
    "length_constraints:number_sentences": (_sentences, {"num_sentences": int, "relation": RELATION}),
    "length_constraints:number_paragraphs": (_paragraphs, {"num_paragraphs": int}),
    "length_constraints:number_words": (_words, {"num_words": int, "relation": RELATION}),
    "length_constraints:nth_paragraph_first_word": (
        _nth_paragraph,
        {"num_paragraphs": int, "nth_paragraph": int, "first_word": str},
    ),
    "detectable_content:number_placeholders": (_placeholders, {"num_placeholders": int}),
    "detectable_content:postscript": (_postscript, {"postscript_marker": str}),
    "detectable_format:number_bullet_lists": (_bullets, {"num_bullets": int}),
    "detectable_format:constrained_response": (_constrained, {}),
    "detectable_format:number_highlighted_sections": (_highlights, {"num_highlights": int}),
    "detectable_format:multiple_sections": (_sections, {"section_spliter": str, "num_sections": int}),
    "detectable_format:json_format": (_json, {}),
    "detectable_format:title": (_title, {}),
    "combination:two_responses": (_two_responses, {}),
    "combination:repeat_prompt": (_repeats_prompt, {"prompt_to_repeat": str}),
    "startend:end_checker": (_ends_with, {"end_phrase": str}),
    "startend:quotation": (_quoted, {}),
    "change_case:english_capital": (_capital, {}),
    "change_case:english_lowercase": (_lowercase, {}),
    "change_case:capital_word_frequency": (_capital_words, {"capital_frequency": int, "capital_relation": RELATION}),
    "punctuation:no_comma": (_no_comma, {}),
}
"""Name -> (check, the names and kinds of its arguments)."""


def problem(name: str, arguments: Mapping[str, Any]) -> str:
    """Why an instruction cannot be checked; empty if it can be. Arguments that are null count as absent."""
    if name not in INSTRUCTIONS:
        return f"no instruction {name!r}; there are {', '.join(INSTRUCTIONS)}"
    kinds, given = INSTRUCTIONS[name][1], {key: value for key, value in arguments.items() if value is not None}
    if missing := [key for key in kinds if key not in given]:
        return f"the instruction {name} needs {', '.join(missing)}"
    for key, value in given.items():
        kind = kinds.get(key)
        if kind is None:
            return f"the instruction {name} has no argument {key!r}"
        if isinstance(kind, tuple):
            if value not in kind:
                return f"{key}={value!r} of {name} is not one of {', '.join(kind)}"
        elif kind is list:
            if not (isinstance(value, list) and value and all(isinstance(word, str) and word for word in value)):
                return f"{key}={value!r} of {name} is not a list of words"
        elif kind is int:
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < MOST or value % 1:
                return f"{key}={value!r} of {name} is not a count"
        elif not (isinstance(value, str) and value):
            return f"{key}={value!r} of {name} is not text"
    return ""


def follows(text: str, name: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a non-empty text follows an instruction for which problem() is empty."""
    check, kinds = INSTRUCTIONS[name]
    return bool(text.strip()) and check(text, **{key: arguments[key] for key in kinds})


def loose_variants(text: str) -> list[str]:
    """The texts of IFEval's loose reading: with and without first and last line, each with and without asterisks."""
    lines = text.split("\n")
    variants = [lines, lines[1:], lines[:-1], lines[1:-1]]
    texts = ["\n".join(variant).strip() for variant in variants]
    return [*texts, *(one.replace("*", "") for one in texts)]
