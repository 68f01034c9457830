"""Section `overview`: what the run is, its attempts and what ended them, what was lost, where its hours went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpcrl.cluster.layout import RoleLayout
from hpcrl.cluster.placement import Placement
from hpcrl.config import Config, ConfigError
from hpcrl.config.config_file import arguments_in
from hpcrl.report.alerts import anomalies_of
from hpcrl.report.anomalies import Anomaly
from hpcrl.report.attempt_history import AttemptHistory, histories
from hpcrl.report.hours_text import energy_in_words
from hpcrl.report.landmarks import (
    abandoned_metrics,
    best_checkpoint,
    branches,
    evaluation,
    hang_reports,
    profiled_steps,
    steps_lost,
)
from hpcrl.report.phases import phase_hours
from hpcrl.report.run_files import RunAttempt, RunFiles
from hpcrl.report.run_hours import run_hours
from hpcrl.report.section import ReportSection
from hpcrl.run_folder import CONFIG

WORKERS = {
    "generation": "generator",
    "waiting for rewards": "reward",
    "training": "trainer",
    "validation": "generator",
    "saves": "trainer",
}
"""Phase -> the role whose ranks work in it; other phases have no single role."""
FACTS_COMPARED = ("host", "python", "git_commit", "cpu")


def section(run: RunFiles) -> ReportSection:
    """Never empty: a run that did not start has a configuration or a plan."""
    past = histories(run)
    layout, nodes, gpus = _resources(run.checked)
    lost, left = abandoned_metrics(run, past)
    hours = phase_hours(run.metrics, lost, past, nodes, gpus, left) if _trains(run) else []
    data = {
        "what": [[label, str(value)] for label, value in _what(run, layout, past) if value not in (None, "", [])],
        "attempts": [_attempt(run.attempts, place, this) for place, this in enumerate(past)],
        "hours": [vars(phase) | {"ranks": _at_work(phase.name, layout)} for phase in hours],
        "branches": branches(run),
        "evaluation": evaluation(run),
        "nodes": nodes,
        "gpus": gpus,
        "layout_changed": any("layout" in change for attempt in run.attempts for change in _changes(attempt)),
        "errors": _errors(run),
        "plan": run.text("plan.txt", 1 << 20),
        "arguments": list(arguments_in(run.text(CONFIG, 1 << 20)) or ()),
    }
    return ReportSection("overview", "Overview", data, "overview.js")


def _what(run: RunFiles, layout: RoleLayout | None, past: Sequence[AttemptHistory]) -> list[tuple[str, Any]]:
    facts = run.attempts[-1].facts if run.attempts else {}
    versions = facts.get("versions")
    steps = f"{run.metrics.last_step} of {run.key('max_steps', '?')}" if run.config else ""
    if not _trains(run):
        steps = ""
    return [
        ("folder", run.path),
        ("state", run.state or ("" if past else "never started")),
        ("steps", steps),
        ("pipeline", run.key("pipeline")),
        ("model", run.key("model.path") or (run.key("model.tiny") and f"tiny {run.key('model.tiny.architecture')}")),
        ("algorithm", _algorithm(run)),
        ("training data", _sources(run.key("data.train"))),
        ("validation data", _sources(run.key("data.val"))),
        ("engines", ", ".join(f"{role} {run.key(f'{role}.engine')}" for role in _engines(run))),
        ("ranks", _ranks(layout)),
        ("machine", _machine(run, facts)),
        ("versions", ", ".join(f"{k} {v}" for k, v in versions.items()) if isinstance(versions, dict) else ""),
        ("commit", facts.get("git_commit")),
        ("lost", steps_lost(run, past)),
        ("best checkpoint", best_checkpoint(run)),
        ("hangs", ", ".join(hang_reports(run))),
        ("profiles", "; ".join(profiled_steps(run))),
        ("warnings", "; ".join(_in_short(each) for each in anomalies_of(run))),
        ("ends without a new checkpoint", _in_a_row(run)),
        ("energy", energy_in_words(run_hours(run))),
    ]


def _algorithm(run: RunFiles) -> str:
    """The preset that the launch named, else the parts."""
    if run.key("pipeline") == "sft" or not _trains(run):
        return ""
    words = arguments_in(run.text(CONFIG, 1 << 20)) or ()
    preset = next((word.partition("=")[2] for word in words if word.lstrip("+").startswith("algorithm=")), "")
    parts = [run.key("algorithm.advantage_estimator"), run.key("algorithm.surrogate")]
    text = ", ".join(str(part) for part in parts if part)
    return f"{preset} ({text})" if preset else text


def _engines(run: RunFiles) -> list[str]:
    roles = ("trainer", "generator") if _trains(run) else ("generator",)
    return [role for role in roles if run.key(f"{role}.engine")]


def _trains(run: RunFiles) -> bool:
    """False for an evaluation alone; True if the configuration cannot be checked here."""
    return run.checked is None or run.checked.pipeline_spec.trains


def _sources(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(_sources(each) for each in value)
    if isinstance(value, dict):
        return str(value.get("path") or value.get("task") or value)
    return "" if value is None else str(value)


def _ranks(layout: RoleLayout | None) -> str:
    if layout is None:
        return ""
    parts = [f"{role} {_span(ranks)}" for role, ranks in layout.ranks.items() if ranks]
    return f"{layout.world_size}: {', '.join(parts)}"


def _span(ranks: Sequence[int]) -> str:
    whole = len(ranks) > 1 and ranks[-1] - ranks[0] + 1 == len(ranks)
    return f"{ranks[0]}-{ranks[-1]}" if whole else " ".join(map(str, ranks))


def _machine(run: RunFiles, facts: Mapping[str, Any]) -> str:
    cluster = run.key("cluster.name", "")
    where = [str(facts[key]) for key in ("host", "cpu") if facts.get(key)]
    return ", ".join([*([f"cluster={cluster}"] if cluster else []), *where])


def _in_a_row(run: RunFiles) -> str:
    """Crashes and too short jobs since the newest checkpoint (restarts.json); empty without one."""
    counts = run.json("restarts.json")
    words = {"crashes": "crash(es)", "short": "job(s) that were too short"}
    found = [f"{counts[key]} {word}" for key, word in words.items() if isinstance(counts.get(key), int) and counts[key]]
    limit = run.key("cluster.max_restarts")
    return ", ".join(found) + (f"; cluster.max_restarts is {limit}" if found and limit is not None else "")


def _in_short(anomaly: Anomaly) -> str:
    if anomaly.step is None:
        return anomaly.title
    when = f"since step {anomaly.step}" if anomaly.until is None else f"in steps {anomaly.step} to {anomaly.until}"
    return f"{anomaly.title} {when}"


def _resources(config: Config | None) -> tuple[RoleLayout | None, int, int]:
    """(layout, nodes, GPUs); one node without a GPU if the configuration does not say."""
    if config is None:
        return None, 1, 0
    try:
        layout = RoleLayout.from_config(config)
        components = Placement.from_config(config, layout).components
    except ConfigError:
        return None, 1, 0
    if config.cluster.name == "local":
        return layout, 1, len(layout.ranks_with_model) if config.cluster.device == "cuda" else 0
    nodes = sum(len(component.nodes) for component in components)
    return layout, nodes, sum(len(each.nodes) * each.config.gpus_per_node for each in components)


def _at_work(phase: str, layout: RoleLayout | None) -> str:
    ranks = {str(role): found for role, found in layout.ranks.items()} if layout is not None else {}
    mine = ranks.get(WORKERS.get(phase, ""), ())
    return f"{len(mine)} of {layout.world_size}" if mine and layout is not None else ""


def _attempt(attempts: Sequence[RunAttempt], place: int, this: AttemptHistory) -> dict[str, Any]:
    """A line of the table of attempts."""
    attempt = attempts[place]
    owner = attempt.owner
    job = f"job {owner['job']}, restart {owner.get('restarts', 0)}" if "job" in owner else ""
    process = f"process {owner['pid']}" if "pid" in owner and not job else ""
    host = owner.get("host") or attempt.facts.get("host") or ""
    return vars(this) | {
        "lost_steps": list(this.lost_steps),
        "where": " on ".join(str(text) for text in (job or process, host) if text),
        "changes": [*_changes(attempt), *(_facts_changed(*attempts[place - 1 : place + 1]) if place else [])],
    }


def _changes(attempt: RunAttempt) -> list[str]:
    changes = attempt.facts.get("changes")
    return [str(change) for change in changes] if isinstance(changes, list) else []


def _facts_changed(before: RunAttempt, now: RunAttempt) -> list[str]:
    """`name: old -> new` for versions, host and commit that differ; both must be known."""
    old, new = ({**_versions(each), **_known(each)} for each in (before, now))
    return [f"{name}: {old[name]} -> {new[name]}" for name in new if name in old and old[name] != new[name]]


def _versions(attempt: RunAttempt) -> dict[str, Any]:
    versions = attempt.facts.get("versions")
    return versions if isinstance(versions, dict) else {}


def _known(attempt: RunAttempt) -> dict[str, Any]:
    return {name: attempt.facts[name] for name in FACTS_COMPARED if attempt.facts.get(name)}


def _errors(run: RunFiles) -> list[list[Any]]:
    """[count, whose, text, first, last] for each kind of error in errors.json, the most frequent first."""
    return [
        [
            kind["count"],
            " of domain ".join(filter(None, (kind["source"], kind["domain"]))),
            kind["error"],
            kind["first"],
            kind["last"],
        ]
        for kind in run.user_errors
    ]
