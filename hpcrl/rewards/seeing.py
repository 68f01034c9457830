"""Which rewards of a run get the images of prompts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hpcrl.config import Config, Problem
from hpcrl.data.rows import RowSet
from hpcrl.data.tasks import Split
from hpcrl.models.families import PROCESSORS, read_processor, read_vision_of, unseen_type
from hpcrl.models.vision import Vision
from hpcrl.rewards.spec import ComposedOptions, JudgeOptions, JudgeSection
from hpcrl.spec.media import IMAGE
from hpcrl.spec.options import read_options
from hpcrl.spec.problems import dotted
from hpcrl.spec.tables import GEN_ENGINES, REWARDS

QUESTION_TOKENS = 128
"""Tokens of a question at least, without the row's texts: its instructions have some 120 words."""
Judged = Iterable[Mapping[str, tuple[int, str]]]
"""By split: domain -> tokens that a row's images have for the judge at most, and the row's place."""


def why_judge_sees_nothing(config: Config) -> str:
    """Why ranks of the role judge take no images; empty if they take images. ValueError if the model's processor is
    unusable."""
    engine, path = config.judge.engine, Path(config.judge.path or "")
    if read_vision_of(path) is None:
        return f"judge.path {path} takes none"
    if IMAGE not in GEN_ENGINES[engine].media:
        return f"judge.engine={engine} takes none"
    if other := unseen_type(GEN_ENGINES[engine].media_families, path):
        return f"judge.engine={engine} takes none with {other}"
    return "" if read_processor(path) else f"judge.path {path} takes none without {PROCESSORS[0]}"


def vision_of_judge(config: Config) -> Vision | None:
    """The image properties of the run's own judge; None without one, or if it takes no images, for which
    check_judges() has the reason."""
    with contextlib.suppress(ValueError):
        if config.asks("judge") and not why_judge_sees_nothing(config):
            return read_vision_of(Path(config.judge.path or ""))
    return None


def check_judges(config: Config) -> Iterator[Problem]:
    """Refuses an unusable image processor of judge.path, and images for judges that take none."""
    key = "judge", "path"
    try:
        why = why_judge_sees_nothing(config)
    except ValueError as error:
        yield Problem(key, str(error).replace("model.path", "judge.path"))
        return
    for path, judge in _judges(config):
        if judge.role is not None and judge.images and why:
            yield Problem(path, f"{dotted(path)}.images: true, but {why}", (key, ("judge", "engine")))


def notes_on_judges(config: Config, rows: Mapping[Split, RowSet]) -> Iterator[str]:
    """Notes on judges that do not see the images of rows, unless the configuration says so."""
    for split, found in rows.items():
        count, where = found.media.get(IMAGE, (0, ""))
        for path, judge in _judges(config) if count else ():
            key = dotted(path)
            told = f"{where}: {key} does not see the images of rows (data.{split} has {count} with images)"
            if judge.images is not None:
                continue
            if judge.role is None:
                yield f"{told}; if its model takes images, set {key}.images=true"
            elif (Path(config.judge.path or "") / "config.json").is_file():
                with contextlib.suppress(ValueError):  # reported by check_judges()
                    if why := why_judge_sees_nothing(config):
                        yield f"{told}: {why}"


def check_questions(config: Config, judged: Judged) -> Iterator[Problem]:
    """Refuses images: true of judges for which a row's images are too long."""
    involved = ("judge", "max_prompt_tokens"), ("data",)
    for path, judge, text in _long_questions(config, judged):
        if judge.images:
            yield Problem(path, f"{dotted(path)}.images: true, but {text}", involved)


def notes_on_questions(config: Config, judged: Judged) -> Iterator[str]:
    """Notes on other judges for which a row's images are too long."""
    for path, judge, text in _long_questions(config, judged):
        if judge.images is None:
            yield f"{dotted(path)}: {text}"


def _long_questions(config: Config, judged: Judged) -> Iterator[tuple[tuple[str, ...], JudgeSection, str]]:
    """The run's own judges, with their keys, that would refuse questions about a row."""
    limit = config.judge.max_prompt_tokens
    for domain, (tokens, where) in (found for split in judged for found in split.items()):
        section = domain if domain in config.reward else "default"
        for path, judge in _judges(config) if tokens + QUESTION_TOKENS > limit else ():
            if judge.role is not None and path[1] == section:
                text = f"{tokens} tokens of images and at least {QUESTION_TOKENS} of text exceed"
                rest = f"judge.max_prompt_tokens={limit}, so the judge has no vote; raise it, or lower data.max_pixels"
                yield path, judge, f"the question about {where} is too long: {text} {rest}"


def _judges(config: Config) -> Iterator[tuple[tuple[str, ...], JudgeSection]]:
    """The judges of all rewards, with their keys; invalid options are reported elsewhere."""
    for name, section in config.reward.items() if config.debug != "fake" else ():
        key = "reward", name, "options"
        given: list[tuple[tuple[str, ...], Mapping[str, Any]]] = []
        with contextlib.suppress(ValueError):
            if section.name == "judge":
                given = [(key, section.options)]
            elif section.name == "composed":
                parts = read_options(ComposedOptions, section.options).parts.items()
                given = [((*key, "parts", of, "options"), part.options) for of, part in parts if part.name == "judge"]
            for path, options in given:
                judges = read_options(JudgeOptions, options).judges.items()
                yield from (((*path, "judges", judge), found) for judge, found in judges)


def rewards_with_images(config: Config) -> Callable[[str], bool]:
    """The function that tells whether the reward of a domain gets images."""
    judge_sees = bool(config.asks("judge")) and not why_judge_sees_nothing(config)
    sections = {
        name
        for name, section in config.reward.items()
        if config.debug != "fake" and REWARDS[section.name].shown_images(section.options, judge_sees)
    }
    return lambda domain: (domain if domain in config.reward else "default") in sections
