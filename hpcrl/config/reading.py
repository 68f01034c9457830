"""Reads plain data, or the arguments of a command line, as a checked Config."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from hpcrl.config.assembling import Named, config_class, unloadable
from hpcrl.config.checks import check, check_placeholders
from hpcrl.config.cluster import COMPONENT, IMAGE, MEMORY, OPTION, WALL_TIME, WORD
from hpcrl.config.compose import Composition, compose, leaves
from hpcrl.config.domains import EnvConfig, RewardConfig
from hpcrl.config.folders import groups
from hpcrl.config.foreign_keys import FOREIGN
from hpcrl.config.part_names import UNAVAILABLE
from hpcrl.config.renamed_keys import RENAMED_VALUES, new_name
from hpcrl.config.schema import Config
from hpcrl.config.unused_keys import check_unused_keys
from hpcrl.spec.problems import ConfigError, Path, Problem, dotted, shortened
from hpcrl.spec.table import SpecError, SpecTable
from hpcrl.spec.tables import ENVS, PIPELINES, REWARDS

PLAIN_WORDS = {
    "Value error, ": "",
    "Input should be ": "",
    "a valid dictionary": "a section of keys",
    "a valid ": "a ",
    "a string": "text",
    "a boolean": "true or false",
    "a integer": "an integer",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
}
"""Phrases of pydantic -> their replacements for users, applied in this order."""

PATTERNS = {
    WALL_TIME: "a wall time: MINUTES, HH:MM:SS or D-HH:MM:SS",
    MEMORY: "a memory size: a number and K, M, G or T, such as 500G",
    WORD: "one word for sbatch, without spaces and quotes",
    IMAGE: "a file or an image's address, without spaces and quotes",
    COMPONENT: "a name of lower-case letters, digits and '_'",
    OPTION: "the long name of an option, such as mail-user",
}
"""Pattern of the schema -> description of valid values for users."""

SPLIT: dict[Path, str] = {
    ("algorithm", "kl_estimator"): "there are two keys: algorithm.kl_reward_estimator (default k1) for the KL in the "
    "reward, algorithm.kl_loss_estimator (default k2) for the KL in the loss"
}
"""Keys that were split into two -> explanation for users."""


@dataclass
class LoadedConfig:
    """The result of reading arguments: `config` is complete if there are no problems.

    With problems, `config` has defaults in place of unreadable values (`unread`), which allows further checks; it is
    None if nothing could be read.
    """

    config: Config | None
    composition: Composition
    problems: list[Problem] = field(default_factory=list)
    unread: list[Path] = field(default_factory=list)

    def add(self, problems: Sequence[Problem]) -> None:
        """Add problems, except problems that may only result from an unreadable value."""
        self.problems += [p for p in problems if not p.touches(self.unread)]

    def lines(self) -> list[str]:
        """One line per problem, with the source of the value."""
        lines = []
        for problem in self.problems:
            source = self.composition.source(problem.path) if problem.path else ""
            lines.append(" ".join(problem.text.split()) + (f" ({shortened(source)})" if source else ""))
        return list(dict.fromkeys(lines))


def load(argv: Sequence[str]) -> Config:
    """The configuration of these command-line arguments. ConfigError lists every problem, one line each.

    Reads only files of conf/ and the file of --config; hpcrl.launch checks data, model and run folder.
    """
    reading = read(argv)
    if reading.problems or reading.config is None:
        raise ConfigError(reading.lines())
    return reading.config


def parse(data: Mapping[str, Any]) -> Config:
    """The configuration of this plain data (config.yaml of a run, for example). ConfigError as in load()."""
    reading = read_data(data, Composition())
    if reading.problems or reading.config is None:
        raise ConfigError(reading.lines())
    return reading.config


def read_data(data: Mapping[str, Any], composition: Composition) -> LoadedConfig:
    """Like parse(), but collects the problems and reports their sources in this composition."""
    reading = _validate(data, composition)
    if reading.config is not None:
        reading.add(check(reading.config))
    return reading


def read(argv: Sequence[str]) -> LoadedConfig:
    """Like load(), but collects the problems, to which the caller can add more. ConfigError if a --config file cannot
    be read."""
    composition = compose(argv)
    pipeline = composition.data.get("pipeline")
    pipeline = pipeline if pipeline in list(PIPELINES) else Config.model_fields["pipeline"].default
    mode = composition.data.get("debug")
    modes = get_args(Config.model_fields["debug"].annotation)
    ending = f"_{mode}" if mode in modes and mode != "none" else ""  # separate from the run folder of the whole run
    file, experiment = composition.file, composition.choices.get("experiment", composition.experiment)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", file.path.stem) if file is not None else experiment or pipeline
    composition.data.setdefault("run_name", name + ending)
    reading = _validate(composition.data, composition)
    reading.problems[:0] = composition.problems
    reading.unread += [path for p in composition.problems for path in (p.path, *p.involves) if path]
    if reading.config is not None:
        reading.add(check(reading.config))
        reading.add(check_unused_keys(reading.config, _given(reading.config, composition), composition.chosen))
    return reading


def _given(config: Config, composition: Composition) -> dict[Path, bool]:
    """Composition.given(), except keys that a file of --config sets to their default, and data.train=null."""
    given = composition.given()
    if isinstance(data := composition.data.get("data"), Mapping) and data.get("train", "") is None:
        given.pop(("data", "train"), None)  # says what is so without it, too
    if composition.file is None:
        return given
    other = leaves(config.model_dump(mode="json", exclude_defaults=True))
    return {path: by_hand for path, by_hand in given.items() if by_hand or Problem(path, "").touches(other)}


def _validate(given: Mapping[str, Any], composition: Composition) -> LoadedConfig:
    """Check types and keys. Each round removes wrong values, until the rest can be read."""
    data: dict[str, Any] = copy.deepcopy(dict(given))
    if not data.get("run_dir"):
        data["run_dir"] = f"runs/{data.get('run_name', Config.model_fields['run_name'].default)}"
    if isinstance(data.get("algorithm"), dict):
        data["algorithm"].setdefault(
            "advantage_estimator", config_class().model_fields["algorithm"].default.advantage_estimator
        )
    reading = LoadedConfig(None, composition)
    for problem in check_placeholders(data):
        reading.problems.append(problem)
        reading.unread.append(problem.path)
        _take_out(data, problem.path)
    for path, text in unloadable(data):
        reading.problems.append(Problem(path, f"{dotted(path)}: {text}"))
        reading.unread.append(path)
        _take_out(data, path)
    for _ in range(3):
        try:
            reading.config = config_class(Named.of(data)).model_validate(data)
            return reading
        except ValidationError as error:
            found = [(_key_path(e["loc"]), e) for e in error.errors(include_url=False)]
        for path, detail in found:
            if not Problem(path, "").touches(reading.unread):
                reading.problems += _explain(path, detail, data)
        for path, _ in found:
            reading.unread.append(path)
            _take_out(data, path)
    return reading


def _explain(path: Path, detail: Any, data: Mapping[str, Any]) -> list[Problem]:
    """The meaning of a pydantic error about this data: one line, or one for each value of an unknown section."""
    if detail["type"] == "extra_forbidden":
        return _unknown(path, detail["input"], data)
    return [Problem(path, _wrong(path, detail))]


def _unknown(path: Path, value: Any, data: Mapping[str, Any]) -> list[Problem]:
    """Problems of an unknown key. Users of other libraries give whole paths, of which pydantic names only the first
    part; then every value is reported, with the meaning of the deepest known part."""
    hint = _hint(path, data)
    below = [(*path, *leaf) for leaf in leaves(value)] if isinstance(value, Mapping) else []
    foreign = {leaf: name for leaf in below if (name := _foreign(leaf, len(path)))}
    if foreign or not hint:
        hints = {foreign.get(leaf, leaf): _hint(foreign.get(leaf, leaf), data) for leaf in below}
        if any(hints.values()):
            return [Problem(key, f"{dotted(key)}: {text or 'unknown key'}") for key, text in hints.items()]
    return [Problem(path, f"{dotted(path)}: {hint or 'unknown key'}")]


def _foreign(path: Path, least: int) -> Path:
    """The part of a path, of at least this length, down to the deepest key of another library; empty if there is
    none."""
    return next((path[:end] for end in range(len(path), least - 1, -1) if path[end - 1] in FOREIGN), ())


def _hint(path: Path, data: Mapping[str, Any]) -> str:
    """The remedy for an unknown key; empty if it is not known."""
    if path in SPLIT:
        return SPLIT[path]
    if path == ("experiment",):
        return "unknown key; the file of an experiment must begin with the line # @package _global_"
    if renamed := new_name(path):
        return f"unknown key; it is now {dotted(renamed)}"
    of_algorithm = path[1] if len(path) > 1 and path[0] == "algorithm" else None
    if readers := [name for name, model in _algorithms().items() if of_algorithm in model.model_fields]:
        return f"read only by {' and '.join('algorithm=' + r for r in readers)}"
    if path[-1] in FOREIGN:
        return f"unknown key; here {FOREIGN[str(path[-1])]}"
    near = _option(path, data) or _did_you_mean(path)
    return f"unknown key; did you mean {near}?" if near else ""


def _option(path: Path, data: Mapping[str, Any]) -> str:
    """The right key for an option of a reward or environment that was written next to `options`, else empty."""
    if len(path) != 3 or path[0] not in ("reward", "env"):
        return ""
    table: SpecTable[Any] = REWARDS if path[0] == "reward" else ENVS
    section: type[BaseModel] = RewardConfig if path[0] == "reward" else EnvConfig
    name = data[str(path[0])][path[1]].get("name", section.model_fields["name"].default)
    with contextlib.suppress(SpecError):
        options = table[str(name)].section
        if options is not None and path[2] in options.model_fields:
            return dotted((*path[:2], "options", path[2]))
    return ""


def _wrong(path: Path, detail: Any) -> str:
    """One line about a value that is missing or wrong."""
    name, kind = dotted(path) or "configuration", detail["type"]
    if path[:1] == ("env",) and len(path) == 2 and path[1] in EnvConfig.model_fields:
        key = path[1]
        return f"{name}: an environment belongs to a domain; give env.default.{key}, or env.DOMAIN.{key} for one domain"
    if kind == "missing":
        return f"{name}: missing"
    if kind == UNAVAILABLE:
        return f"{name}: {detail['msg']}"
    if kind == "string_too_short" and not detail["input"]:
        return f"{name}: empty; give a value, or leave the key out"
    if kind in ("union_tag_invalid", "literal_error"):
        context = detail["ctx"]
        got = str(context.get("tag", detail["input"]))
        expected = context.get("expected_tags", context.get("expected", ""))
        options = [word.strip(" '") for word in expected.replace(" or ", ",").split(",")]
        hint = f"; did you mean {close[0]}?" if (close := get_close_matches(got, options, n=1)) else ""
        if renamed := RENAMED_VALUES.get((name, got)):
            return f"{name}: {got} is now {renamed}"
        if path == ("algorithm",) and got in groups()["algorithm"]:
            hint = f"; {got} is a preset: algorithm={got}"
        return f"{name}: expected {expected}, got {got!r}{hint}"
    if kind == "string_pattern_mismatch":
        expected = PATTERNS.get(detail["ctx"]["pattern"], "letters, digits, '.', '_' and '-' only")
        return f"{name}: expected {expected}, got {_short(detail['input'])}"
    message = detail["msg"].split(", unable to parse")[0].split(" or instance of")[0]
    for phrase, plain in PLAIN_WORDS.items():
        message = message.replace(phrase, plain)
    return f"{name}: expected {message.removeprefix('expected ')}, got {_short(detail['input'])}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _key_path(loc: tuple[int | str, ...]) -> Path:
    """The path of keys in an error's location, without branches of unions and markers of bad keys."""
    parts = [part for part in loc if not (isinstance(part, str) and (part.startswith("<") or part == "[key]"))]
    if parts[0] == "algorithm" and len(parts) > 1 and parts[1] in _algorithms():
        del parts[1]
    return tuple(parts)


def _algorithms() -> dict[str, type[BaseModel]]:
    return {
        get_args(m.model_fields["advantage_estimator"].annotation)[0]: m
        for m in get_args(config_class().model_fields["algorithm"].annotation)
    }


def _did_you_mean(path: Path) -> str:
    """The known key that is most similar to an unknown one: of equal name, else in its section, else anywhere; empty if
    none is similar."""
    known = dict.fromkeys(key for key in known_keys() if not _matches(key, path))
    if same := [key for key in known if key[-1] == path[-1] and len(key) > 1 and "*" not in key]:
        return dotted(min(same, key=lambda key: (-len({*key} & {*path}), len(key))))
    neighbours = {str(key[-1]): dotted((*path[:-1], key[-1])) for key in known if _matches(key[:-1], path[:-1])}
    if near := get_close_matches(str(path[-1]), list(neighbours), n=1):
        return neighbours[near[0]]
    elsewhere = {str(key[-1]): dotted(key) for key in sorted(known, key=len, reverse=True) if "*" not in key}
    near = get_close_matches(str(path[-1]), list(elsewhere), n=1, cutoff=0.8)
    return elsewhere[near[0]] if near else ""


def _matches(key: Path, path: Path) -> bool:
    """Whether a known key, in which * stands for any list position or name, matches this path."""
    return len(key) == len(path) and all(part in ("*", at) for part, at in zip(key, path, strict=True))


def known_keys(kind: Any = None, at: Path = ()) -> Iterator[Path]:
    """Every key of the schema, including sections; * stands for a position in a list or a name in a mapping."""
    kind = config_class() if kind is None and not at else kind
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        for name, info in kind.model_fields.items():
            yield (*at, name)
            yield from known_keys(info.annotation, (*at, name))
    elif get_origin(kind) in (list, dict):
        yield (*at, "*")
        yield from known_keys(get_args(kind)[-1], (*at, "*"))
    else:
        for branch in get_args(kind):
            yield from known_keys(branch, at)


def _take_out(data: Any, path: Path) -> None:
    """Remove the value at `path`, or the nearest value above it; for an item of a list, the whole list."""
    for depth, part in enumerate(path):
        inner = data.get(part) if isinstance(data, dict) else None
        if depth == len(path) - 1 or not isinstance(inner, dict):
            if isinstance(data, dict):
                data.pop(part, None)
            return
        data = inner
