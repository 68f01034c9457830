"""Runs without trainer ranks (PipelineSpec.trains): their layout, and the sections that they have no use for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from hpcrl.config.rollout import DomainRolloutConfig, RolloutConfig
from hpcrl.spec.kinds import PipelineSpec
from hpcrl.spec.problems import Path, Problem
from hpcrl.spec.table import SpecError
from hpcrl.spec.tables import PIPELINES, ROLES

SECTIONS = ("algorithm", "loss", "imitation", "trainer", "reference", "teacher", "critic")
"""Sections that have their defaults in such a run."""
OF_COMPARED = ("chosen_key", "rejected_key", "label_key")
ANSWER_KEYS = (*OF_COMPARED, "max_sequence_tokens", "overlong_sequences", "unusable_rows")
"""Keys of data that only a pipeline that learns from answers reads, OF_COMPARED only from pairs and labelled ones."""
OTHERS = (
    ("max_steps",),
    ("save_every",),
    ("eval_every",),
    ("keep_checkpoints",),
    ("prune_when_full",),
    ("max_failed_saves",),
    ("check_weights",),
    ("keep_best",),
    ("resume_from",),
    ("resume_reason",),
    ("timeline",),
    ("profile",),
    ("model", "dtype"),
    ("model", "mtp"),
    ("data", "shuffle"),
    ("data", "domain_interleave_probs"),
    *(("data", key) for key in ANSWER_KEYS),
    ("eval", "num_examples"),
    ("layout", "offload"),
    ("trackers",),
    ("tracking",),
)
OF_EVALUATION: tuple[Path, ...] = (("data", "train"), ("eval", "num_examples"))
OF_GENERATION: tuple[Path, ...] = (("data", "val"), ("eval",))
"""Further keys that only one of such pipelines has no use for."""
READ = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "domains", "min_replicas")
"""The keys of rollout that such a run reads."""


def as_untrained(data: dict[str, Any]) -> dict[str, Any]:
    """The unchecked values of a run without trainer ranks: without SECTIONS and the split of data, and the mix of its
    domains, that it does not read. A generator that would
    share the trainer's ranks gets them, and roles that would share them share the generator's. Values of other runs
    are unchanged."""
    if (spec := _untrained(data.get("pipeline"))) is None:
        return data
    data = {name: value for name, value in data.items() if name not in SECTIONS}
    given = data.get("data", {})
    if isinstance(given, Mapping):
        unread: dict[str, Any] = {"train": None}
        if spec.writes_responses:
            unread = {"val": None, "domain_interleave_probs": {}}
        data["data"] = {**given, **unread}
    layout = data.get("layout", {})
    if isinstance(layout, Mapping):
        data["layout"] = _without_trainer(layout)
    return data


def _untrained(pipeline: Any) -> PipelineSpec | None:
    """The pipeline's specification if it has no trainer ranks."""
    if isinstance(pipeline, str):
        with contextlib.suppress(SpecError):  # reported as an unknown pipeline
            return None if PIPELINES[pipeline].trains else PIPELINES[pipeline]
    return None


def _without_trainer(layout: Mapping[str, Any]) -> dict[str, Any]:
    changed = dict(layout)
    trainer = layout.get("trainer", {})
    for name, role in ROLES.items():
        own = layout.get(name, {})
        if name == "trainer" or not isinstance(own, Mapping):
            continue
        if own.get("colocate_with", role.colocate_with) != "trainer":
            continue
        if name == "generator" and isinstance(trainer, Mapping):
            default = ROLES["trainer"]
            count = own.get("num_ranks", role.num_ranks) or trainer.get("num_ranks", default.num_ranks)
            place = {"num_ranks": count, "colocate_with": trainer.get("colocate_with", default.colocate_with)}
        else:
            place = {"colocate_with": "generator"}
        changed[name] = {**own, **place}
    return changed


def unread_without_trainer(config: Any) -> Iterator[tuple[Path, Path, str]]:
    """(prefix of unread keys, key whose value is the cause, reason) in such a run."""
    filters = [key for key in DomainRolloutConfig.model_fields if key not in READ]
    paths: list[Path] = [*((section,) for section in SECTIONS), *OTHERS]
    paths += OF_GENERATION if config.writes_responses else OF_EVALUATION
    paths += [("rollout", key) for key in RolloutConfig.model_fields if key not in READ]
    paths += [("rollout", "domains", name, key) for name in config.rollout.domains for key in filters]
    for path in paths:
        does = "generates" if config.writes_responses else "evaluates"
        yield path, ("pipeline",), f"the {config.pipeline} pipeline only {does}"


def check_training_data(config: Any) -> Iterator[Problem]:
    """Refuses data.train=null in a run that reads it."""
    spec = config.pipeline_spec
    if config.data.train is None and (spec.trains or spec.writes_responses) and not spec.rank0_only:
        text = f"null, but the {config.pipeline} pipeline draws rows from it; give files or a generated source"
        yield Problem(("data", "train"), f"data.train: {text}", (("pipeline",),))
