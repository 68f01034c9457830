"""The class of a run's configuration: the schema with the choices and sections of the parts in the tables."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from hpcrl.config.cluster import layout_class
from hpcrl.config.engines import GeneratorConfig, JudgeConfig, TrainerConfig
from hpcrl.config.part_names import section_name
from hpcrl.config.schema import Config, TrackingConfig
from hpcrl.spec.fields import Section, with_fields
from hpcrl.spec.kinds import Spec
from hpcrl.spec.problems import Path
from hpcrl.spec.table import SpecError, SpecTable, leave_out
from hpcrl.spec.tables import ALGORITHMS, GEN_ENGINES, PIPELINES, TRACKERS, TRAIN_ENGINES

S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class Named:
    """The parts that a run names by their specification's path (`module:NAME`); empty for entries of the table."""

    pipeline: str = ""
    train_engine: str = ""
    gen_engine: str = ""
    algorithm: str = ""
    trackers: tuple[str, ...] = ()

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Named:
        """The parts named in plain data."""
        pipeline, train_engine, gen_engine, algorithm = (_path(data, *keys) for keys, _, _ in NAMED)
        trackers = tuple(path for _, path in _trackers(data))
        return cls(pipeline, train_engine, gen_engine, algorithm, trackers)


NAMED: tuple[tuple[tuple[str, ...], SpecTable[Any], type[Section] | None], ...] = (
    (("pipeline",), PIPELINES, Config),
    (("trainer", "engine"), TRAIN_ENGINES, TrainerConfig),
    (("generator", "engine"), GEN_ENGINES, GeneratorConfig),
    (("algorithm", "advantage_estimator"), ALGORITHMS, None),
)
"""Keys that select a part with its own section, in the order of Named's fields, and the section that contains it."""


def unloadable(data: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    """Yields (key, error) for every part that is named by a path without a specification."""
    named: list[tuple[Path, str, SpecTable[Any], type[Section] | None]]
    named = [(keys, _path(data, *keys), table, base) for keys, table, base in NAMED]
    named += [(("trackers", index), path, TRACKERS, TrackingConfig) for index, path in _trackers(data)]
    for keys, path, table, base in named:
        if path:
            try:
                spec = table[path]
                if base is not None and (text := _clash(base, path, spec)):
                    yield keys, text
                elif table is ALGORITHMS and spec.section is None:
                    yield keys, f"{path} has no section of keys, which an algorithm needs"
            except SpecError as error:
                yield keys, str(error)


def _path(data: Any, *keys: str) -> str:
    for key in keys:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data if isinstance(data, str) and ":" in data else ""


def _trackers(data: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """(index, path) of every tracker that is named by path."""
    names = data.get("trackers")
    for index, name in enumerate(names if isinstance(names, list) else ()):
        if isinstance(name, str) and ":" in name:
            yield index, name


@lru_cache
def config_class(named: Named = Named()) -> type[Config]:
    """Config with the choices and sections of all parts in the tables, and of parts named by path.

    Raises SpecError if a specification cannot be loaded.
    """
    pipelines = _choices(PIPELINES, named.pipeline, Config)
    trainer = _engine(TrainerConfig, _choices(TRAIN_ENGINES, named.train_engine, TrainerConfig))
    generator = _engine(GeneratorConfig, _choices(GEN_ENGINES, named.gen_engine, GeneratorConfig))
    judge = _engine(JudgeConfig, _choices(GEN_ENGINES, "", JudgeConfig))
    layout = layout_class()
    trackers = _choices(TRACKERS, "", TrackingConfig) | {path: TRACKERS[path] for path in named.trackers}
    tracking = with_fields(TrackingConfig, **_sections(trackers))
    algorithms = [_named(name, spec) for name, spec in _choices(ALGORITHMS, named.algorithm).items()]
    union = functools.reduce(operator.or_, algorithms)  # with one algorithm, the class itself, without discriminator
    algorithm: Any = Annotated[union, Field(discriminator="advantage_estimator")] if len(algorithms) > 1 else union
    fields: dict[str, Any] = {
        "pipeline": (_literal(pipelines), Config.model_fields["pipeline"].default),
        "algorithm": (algorithm, Field(algorithms[0]())),
        "layout": (layout, Field(layout())),
        "tracking": (tracking, Field(tracking())),
        "trainer": (trainer, Field(trainer())),
        "generator": (generator, Field(generator())),
        "judge": (judge, Field(judge())),
        **_sections(pipelines),
    }
    return with_fields(Config, **fields)


def _choices(table: SpecTable[Any], path: str, base: type[Section] | None = None) -> dict[str, Spec]:
    """The entries that a key may select, except packages' entries whose sections would hide a key of base."""
    found: dict[str, Spec] = {}
    for name, spec in table.items():
        if base is not None and (text := _clash(base, name, spec)):
            leave_out(f"the {table.kind} {name}", text)
        elif getattr(spec, "offered", True):
            found[name] = spec
    return found | ({path: table[path]} if path else {})


def _clash(base: type[Section], name: str, spec: Spec) -> str:
    """Why a part's section conflicts with the keys of base; empty if it does not."""
    key = section_name(name, spec)
    if spec.section is None or not (key in base.model_fields or hasattr(base, key)):
        return ""
    return f"{base.__name__} already has a key or method {key}; choose another name"


def _named(name: str, spec: Spec) -> type[Section]:
    """The section of an algorithm, with the key that selects it."""
    assert spec.section is not None, f"{name} has a section"
    if "advantage_estimator" in spec.section.model_fields:
        return spec.section
    key: Any = (Literal[name], Field(name, description="The advantage estimator."))  # type: ignore[valid-type]
    return with_fields(spec.section, advantage_estimator=key)


def _engine(base: type[S], engines: Mapping[str, Spec]) -> type[S]:
    engine = (_literal(engines), base.model_fields["engine"].default)
    fields: dict[str, Any] = {"engine": engine, **_sections(engines)}
    return with_fields(base, **fields)


def _sections(entries: Mapping[str, Spec]) -> dict[str, Any]:
    """The sections of the entries that have keys."""
    return {
        section_name(name, spec): (spec.section, Field(spec.section(), description=spec.about))
        for name, spec in entries.items()
        if spec.section is not None
    }


def _literal(names: Mapping[str, Any]) -> Any:
    return Literal[tuple(names)]
