"""The text of --help, from the schema and the first lines of the files under conf/."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from hpcrl.config import Config, ConfigError
from hpcrl.config.folders import FOLDERS, conf_dir, conf_dirs, groups, options_of, shown
from hpcrl.launch.key_docs import meaning
from hpcrl.spec.table import SpecTable
from hpcrl.spec.tables import ALGORITHMS, ENVS, GEN_ENGINES, PIPELINES, REWARDS, TRACKERS, TRAIN_ENGINES
from hpcrl.system.exit_codes import ExitCode

USAGE = """\
usage: python -m hpcrl.launch [+cluster=local|slurm] [+experiment=NAME | --config FILE] [key=value ...]
       python -m hpcrl.launch -m ... key=a,b         a sweep: a run with each value
       python -m hpcrl.launch --help [SECTION[.KEY]]

Checks a run, prints its plan and starts it. Every setting is key=value; lists are [a,b]; ~key unsets a key.

examples
  python -m hpcrl.launch +experiment=demo_sft
      supervised warm-up of a tiny model on digit sorting
  python -m hpcrl.launch +experiment=demo model.path=runs/demo_sft/hf
      reinforcement learning from there
  python -m hpcrl.launch +experiment=rlvr_gsm8k data.train=train.jsonl data.val=test.jsonl max_steps=3
      three steps on your own files
  python -m hpcrl.launch +experiment=demo layout=disaggregated trainer.lr=1e-4 run_name=far dry_run=true
      check everything and print the plan, start nothing
  python -m hpcrl.launch +experiment=demo
      the same command again resumes a run that was stopped
  python -m hpcrl.launch --config runs/demo/config.yaml run_name=again
      the same run again; FILE may also be your own, with any of the keys
  python -m hpcrl.launch -m +cluster=slurm +experiment=rlvr_7b trainer.lr=1e-6,5e-6 seed=0,1
      four jobs in the queue, each with its own run folder; waits for the jobs and prints a table
"""

IMPORTANT = (
    *("pipeline", "run_name", "run_dir", "max_steps", "save_every", "eval_every", "resume", "deterministic", "dry_run"),
    *("seed", "model.path", "data.train", "data.val"),
    *("rollout.num_prompts", "rollout.group_size", "rollout.max_new_tokens", "rollout.temperature"),
    *("algorithm.num_mini_batches", "trainer.lr", "trainer.max_tokens_per_micro_batch"),
    *("generator.max_num_seqs", "timeouts.command_s"),
)

CHOICES: dict[str, tuple[str, SpecTable[Any]]] = {
    "pipeline": ("pipeline", PIPELINES),
    "algorithm": ("algorithm.advantage_estimator", ALGORITHMS),
    "trainer": ("trainer.engine", TRAIN_ENGINES),
    "generator": ("generator.engine", GEN_ENGINES),
    "reward": ("reward.NAME.name", REWARDS),
    "env": ("env.NAME.name", ENVS),
    "trackers": ("trackers", TRACKERS),
}
"""Section, or key at the top -> the key that selects a part by its name, and the parts."""

EXIT_CODES = {
    ExitCode.DONE: "done, or finished before",
    ExitCode.FAILED: "failed for another reason",
    ExitCode.BAD_INPUT: "bad input, nothing started",
    ExitCode.RANK_FAILED: "a rank failed",
    ExitCode.RANK_KILLED: "a rank was killed",
    ExitCode.DEADLINE: "a deadline passed",
    ExitCode.STORE_LOST: "the store was lost",
    ExitCode.REQUEUE: "saved, start again",
    ExitCode.INTERRUPTED: "interrupted",
}


def overview() -> str:
    """The text of --help."""
    parts = [USAGE, "groups (group=option)"]
    for group in groups():
        if group != "experiment":
            parts += [f"  {group}", *(f"  {line}" for line in _options_in(group))]
    parts += ["", "experiments (+experiment=NAME)", *_options_in("experiment")]
    parts += ["", f"folders of groups, a later one wins: {', '.join(map(str, conf_dirs()))}"]
    parts += [f"(built-in, the `:`-separated folders in {FOLDERS}, ./conf)"]
    parts += ["", "important keys and their defaults"]
    parts += [_line(key, *_lookup(key)) for key in IMPORTANT]
    parts += ["", "all keys of a section, or one: --help SECTION[.KEY]; sections: " + ", ".join(_sections())]
    codes = ", ".join(f"{int(code)} {text}" for code, text in EXIT_CODES.items())
    parts += ["", f"exit codes: {codes}; all in docs/exit_codes.md"]
    return "\n".join(parts)


def section(name: str) -> str:
    """The text of --help SECTION (every key with its default and meaning), --help SECTION.KEY or --help KEY (only this
    key). For any other name, ConfigError lists the sections."""
    sections = _sections()
    top, _, below = name.partition(".")
    if name in Config.model_fields and name not in sections and name not in CHOICES:
        return _line(name, *_lookup(name))
    if top not in sections and (below or top not in CHOICES):
        raise ConfigError([f"--help {name}: no such section or key; there are {', '.join(Config.model_fields)}"])
    if below:
        return _keys_at(top, below)
    parts = []
    for title, entries in _parts(name):
        parts.append("\n".join([title, *(f"  {entry:<24} {about}" for entry, about in entries)]))
    for title, rows in (*_blocks(name, sections.get(name, [])), *_options(name)):
        parts.append("\n".join([title, *(_line(*row) for row in rows)]))
    return "\n\n".join(parts)


def _keys_at(top: str, below: str) -> str:
    """A key of a section, and the keys below it; in a mapping, with or without the user's name."""
    rows = [row for _, block in (*_blocks(top, _sections()[top]), *_options(top)) for row in block]
    for key in (f"{top}.{below}", f"{top}.NAME.{below}", ".".join([top, "NAME", *below.split(".")[1:]])):
        if lines := [_line(*row) for row in rows if f"{row[0]}.".startswith(f"{key}.")]:
            return "\n".join(dict.fromkeys(lines))
    raise ConfigError([f"--help {top}.{below}: no such key; all keys of {top}: --help {top}"])


def reference() -> str:
    """docs/configuration.md: every key of every section."""
    made = "Made by `make docs` from `hpcrl/config/` and the specifications of all parts."
    lines = ["# Every key", "", made, ""]
    for key in CHOICES:
        for title, entries in _parts(key):
            lines += [f"## {title}", "", "| Name | Part |", "|---|---|"]
            lines += [f"| `{entry}` | {_prose(about)} |" for entry, about in entries]
            lines.append("")
    top = [(key, *_lookup(key)) for key in Config.model_fields if key not in _sections()]
    blocks = (block for n, models in _sections().items() for block in (*_blocks(n, models), *_options(n)))
    for title, rows in (("run", top), *blocks):
        head, _, about = title.partition(": ") if title.endswith(".") else (title, "", "")
        lines += [f"## {head}", "", *([_prose(about), ""] if about else [])]
        lines += ["| Key | Default | Meaning |", "|---|---|---|"]
        lines += [
            f"| `{key}` | {f'`{shown}`' if (shown := _show(default)) else ''} | {_prose(text)} |"
            for key, default, text in rows
        ]
        lines.append("")
    return "\n".join(lines).rstrip()


def _prose(text: str) -> str:
    """A text for Markdown, in which words such as <think> outside of code are not parsed as HTML tags."""
    return re.sub(r"`[^`]*`|<", lambda found: "&lt;" if found[0] == "<" else found[0], " ".join(text.split()))


def _parts(name: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """(title, names with descriptions) of the parts that a key of a section selects."""
    if name not in CHOICES:
        return []
    key, table = CHOICES[name]
    entries = [(entry, spec.about) for entry, spec in table.items() if getattr(spec, "offered", True)]
    return [(f"{key}: one of", entries)]


def _stem(name: str) -> str:
    """Prefix of a section's keys; in a mapping, keys are below a name that the user gives."""
    return f"{name}.NAME" if get_origin(Config.model_fields[name].annotation) is dict else name


def _blocks(name: str, models: list[type[BaseModel]]) -> list[tuple[str, list[tuple[str, Any, str]]]]:
    """(title, keys) of a section's models; if a name selects among the models, first the keys common to all of them."""
    keys = {model: _keys(model, _stem(name)) for model in models}
    shared = [row for row in keys[models[0]] if all(row in rows for rows in keys.values())] if len(models) > 1 else []
    if not shared:
        return [(f"{name}: {_doc(model)}", rows) for model, rows in keys.items()]
    blocks = [(f"{name}: keys of all kinds", shared)]
    selecting, _ = CHOICES[name]
    for model, rows in keys.items():
        (chosen,) = get_args(model.model_fields[selecting.rpartition(".")[2]].annotation)
        blocks.append((f"{selecting}={chosen}: {_doc(model)}", [row for row in rows if row not in shared]))
    return blocks


def _options(name: str) -> list[tuple[str, list[tuple[str, Any, str]]]]:
    """(title, keys) of the options of each reward or environment that has options."""
    tables: dict[str, SpecTable[Any]] = {"reward": REWARDS, "env": ENVS}
    return [
        (f"{name}: options with name={entry}", _keys(spec.section, f"{name}.NAME.options"))
        for entry, spec in (tables[name].items() if name in tables else ())
        if spec.section is not None
    ]


def _sections() -> dict[str, list[type[BaseModel]]]:
    """Section -> its models (several if a name selects among them)."""
    return {key: models for key, info in Config.model_fields.items() if (models := _models(info.annotation))}


def _keys(model: type[BaseModel], at: str) -> list[tuple[str, Any, str]]:
    """(dotted key, default, meaning) of every key below a section."""
    rows = []
    for key, info in model.model_fields.items():
        if isinstance(info.default, BaseModel):
            rows += _keys(type(info.default), f"{at}.{key}")
        else:
            rows.append((f"{at}.{key}", info.get_default(call_default_factory=True), meaning(model, key)))
    return rows


def _lookup(key: str) -> tuple[Any, str]:
    """(default, meaning) of a dotted key."""
    model: type[BaseModel] = Config
    *sections, last = key.split(".")
    for part in sections:
        model = _models(model.model_fields[part].annotation)[0]
    return model.model_fields[last].get_default(call_default_factory=True), meaning(model, last)


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a key, or the values of a mapping, may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    branches = get_args(annotation)[-1:] if get_origin(annotation) is dict else get_args(annotation)
    return [] if get_origin(annotation) is list else [model for branch in branches for model in _models(branch)]


def _doc(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").split())


def _line(key: str, default: Any, text: str) -> str:
    return f"  {f'{key}={_show(default)}':<44} {' '.join(text.split())}".rstrip()


def _show(default: Any) -> str:
    """A default in the syntax of the command line."""
    if default is PydanticUndefined:
        return "(required)"
    if default is None or isinstance(default, bool):
        return "null" if default is None else str(default).lower()
    text = f"[{', '.join(map(str, default))}]" if isinstance(default, tuple) else str(default)
    return text.replace("\n", "\\n")  # a row of a table is one line


def _options_in(group: str) -> Iterator[str]:
    """The options of a group with their first comments; options of other folders below the folder's name."""
    for folder in conf_dirs():
        options = options_of(folder, group)
        if options and folder != conf_dir():
            yield f"  in {shown(folder / group)}:"
        yield from (f"  {name:<22} {_first_comment(folder / group / f'{name}.yaml')}".rstrip() for name in options)


def _first_comment(file: Path) -> str:
    """The first sentence of a conf file's comment, without Hydra's package line."""
    lines = file.read_text(errors="replace").splitlines()
    comments = [line for line in lines if not line.startswith("# @")]
    text = " ".join(line.lstrip("# ") for line in takewhile(lambda line: line.startswith("#"), comments))
    return re.split(r"(?<=[.!?])(?<!\bDr\.)\s+(?=[A-Z(])", text, maxsplit=1)[0]
