"""The plan's summary of a run's rows: counts, an example prompt, notes on end-of-turn tokens. No transformers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hpcrl.config import Config, Problem
from hpcrl.config.teacher_paths import keys_of_teachers
from hpcrl.data.answers import REWRITES, LeftOut, turns_of
from hpcrl.data.chat import bind, end_of_turn, plain, render
from hpcrl.data.files import BadRow, ShardedTable, Table
from hpcrl.data.image_sizes import ImageCheck
from hpcrl.data.privileged import PrivilegedContext
from hpcrl.data.rendering import RowCheck
from hpcrl.data.rows import ChecksRows, RowSet
from hpcrl.data.tasks import Split
from hpcrl.data.template_forms import TemplateRefusal
from hpcrl.data.templates import FolderTemplate, read_template, tiny_template
from hpcrl.launch.model_folder import TOKENIZERS
from hpcrl.launch.plan import ShownRows
from hpcrl.models.families import (
    PROCESSORS,
    SEEING,
    SEEING_SCORERS,
    read_processor,
    read_vision_of,
    unseen_type,
    vision_of,
)
from hpcrl.models.vision import TINY, Vision
from hpcrl.spec.media import WRITTEN_MARK
from hpcrl.spec.options import read_options
from hpcrl.spec.problems import dotted
from hpcrl.spec.table import SpecTable
from hpcrl.spec.tables import ENVS, GEN_ENGINES, TRAIN_ENGINES

OWN_NAMES = ("messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now", "documents")
MAX_SHARDS = 8
BEGIN_CHARS, END_CHARS = 240, 100
"""Characters shown of the beginning and the end of a longer text."""
KWARGS = ("data", "chat_template_kwargs")


def find_template(config: Config) -> FolderTemplate | None:
    """The policy's chat template with the run's variables; None if the folder has no tokenizer, which another check
    reports. ValueError if the template is not valid."""
    if config.model.path is None:
        found = tiny_template(config.model.tiny.takes_images)
    else:
        folder = Path(config.model.path)
        if not any((folder / name).is_file() for name in TOKENIZERS):
            return None
        try:
            found = read_template(folder)
        except ValueError as error:
            raise ValueError(f"model.path: {error}") from error
    bound: FolderTemplate = bind(found, config.data.chat_template_kwargs)
    return bound


def check_variables(config: Config, template: FolderTemplate) -> Iterator[Problem]:
    """Refuses variables of data.chat_template_kwargs that the template does not read."""
    given = config.data.chat_template_kwargs
    if given and not template.chat_template:
        text = f"the tokenizer of {config.model.path} has no chat template that could read {', '.join(given)}"
        yield Problem(KWARGS, f"data.chat_template_kwargs: {text}", (("model", "path"),))
        return
    known = template.variables()
    offered = sorted(name for name in known if name not in OWN_NAMES and not name.endswith("_token"))
    for name in given:
        if name not in known:
            near = get_close_matches(name, offered, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it reads {', '.join(offered) or 'none'}"
            text = f"the chat template of {_named(config)} reads no variable of this name; {hint}"
            yield Problem(KWARGS, f"data.chat_template_kwargs.{name}: {text}", (("model", "path"),))


def row_checks(config: Config, template: FolderTemplate | None) -> dict[Split, RowCheck]:
    """Split -> the check of its rows; none without a template."""
    if template is None or not template.chat_template:
        return {}
    learns = _learns_from_answers(config) and not config.trains_head
    return {
        "train": RowCheck(template, _named(config), config.data, answers=learns),
        "val": RowCheck(template, _named(config), config.data, answers=learns and config.validates_rows),
    }


def find_vision(config: Config) -> Vision | None:
    """The image properties of the run's model, None if it takes no images. ValueError for unusable ones."""
    limit = config.data.max_pixels
    if config.model.path is not None:
        return vision_of(Path(config.model.path), limit)
    if not config.model.tiny.takes_images:
        return None
    return TINY if limit is None else TINY.limited(limit)


def image_checks(
    config: Config,
    vision: Vision | None,
    template: FolderTemplate | None,
    checks: Mapping[Split, ChecksRows],
    judge: Vision | None = None,
) -> dict[Split, ImageCheck]:
    """Split -> the check of its rows' images, which includes the given one; none for a model without images.
    `judge` has the image properties of the run's own judge."""
    if vision is None:
        return {}
    splits: tuple[Split, ...] = ("train", "val")
    prompts, drops = config.data.max_prompt_tokens, config.data.overlong_prompts == "drop"
    answers = _learns_from_answers(config)  # their rows have no limit
    return {
        split: ImageCheck(
            vision,
            None if answers and (split == "train" or config.validates_rows) else prompts,
            "data.max_prompt_tokens",
            template,
            drops,
            checks.get(split),
            judge,
        )
        for split in splits
    }


def most_image_tokens(config: Config, rows: Mapping[Split, RowSet], checks: Mapping[Split, ImageCheck]) -> int | None:
    """Tokens of a row's images at most; None if it is not known: some rows are not read, an environment may show
    images, or generated rows, which are not all read and resemble the first, have images."""
    may_show = any(kinds is None or kinds for _, kinds in _shown_kinds(config))
    if "train" not in rows or not rows.keys() <= checks.keys() or may_show:
        return None
    for found in rows.values():
        start = 0
        for table in found.tables:
            if table.fixed_domain is not None and found.row(start).images:
                return None
            start += len(table)
    return max(checks[split].most_tokens for split in rows)


def notes_on_marks(checks: Mapping[Split, ImageCheck]) -> Iterator[str]:
    """Notes on marks of images in rows without images: a column may have an unknown name."""
    for split, check in checks.items():
        count, where = check.bare_marks
        if count:
            rows = "1 row" if count == 1 else f"{count} rows"
            yield (
                f"{where}: {WRITTEN_MARK} stays text, since the row has no images (looked for images, image); "
                f"data.{split} has {rows} of this kind"
            )


def _shown_kinds(config: Config) -> Iterator[tuple[str, frozenset[str] | None]]:
    """Names of environments, and the kinds of media that their observations have; None if not known."""
    for name, env in config.envs.items():
        spec = ENVS[env.name]
        with contextlib.suppress(ValueError):  # reported where options are checked
            yield name, spec.shows(env.options if spec.section is None else read_options(spec.section, env.options))


def check_own_variables(config: Config, rows: Mapping[Split, RowSet]) -> Iterator[str]:
    """Refuses rows with their own template variables in a domain with an environment: later turns would lack them."""
    for found in rows.values():
        for domain, (count, where) in found.own_variables.items():
            if config.env_of(domain) is not None:
                yield (
                    f"{where}: a row's chat_template_kwargs apply only to single responses, but domain {domain} has an "
                    f"environment; set data.chat_template_kwargs, or leave the column out ({count} rows have it)"
                )


def check_media(config: Config, rows: Mapping[Split, RowSet], vision: Vision | None) -> Iterator[str]:
    """Rows with media of a kind that the run's model, or an engine that would get them, does not take."""
    generates: dict[Split, bool] = {"train": config.generates, "val": config.evaluates}
    for _, where in rows["train"].media.values() if config.writes_responses and "train" in rows else ():
        yield f"{where}: the row has images, which written rows cannot hold; leave such rows out"
        return
    for split, found in rows.items():
        for kind, (count, where) in found.media.items():
            rest = f"leave such rows out ({count} of {len(found)} rows of data.{split})"
            learns = config.learns and (split == "train" or config.validates_rows)
            for who, remedy in _refusing(config, kind, vision, generates[split], learns):
                yield f"{where}: the row has {kind}s, which {who} does not take; {remedy}{rest}"


def _further_models(config: Config) -> Iterator[tuple[str, str]]:
    """(key, path) of models besides the policy's that get its rows."""
    if config.uses_reference and config.reference.path is not None:
        yield "reference.path", config.reference.path
    if config.uses_teacher:
        yield from ((dotted(keys[0]), path) for path, keys in keys_of_teachers(config.teacher).items())
    if config.uses_critic and config.critic.path is not None:
        yield "critic.path", config.critic.path


def check_shown(config: Config, vision: Vision | None) -> Iterator[Problem]:
    """Environments whose observations have media of a kind that the run's model, or an engine, does not take."""
    for name, kinds in _shown_kinds(config):
        path, env = ("env", name, "options"), config.envs[name]
        for kind in kinds or ():
            if config.writes_responses:
                text = f"{env.name} shows {kind}s, which written rows cannot hold; let it show text"
                yield Problem(path, f"{dotted(path)}: {text}", (("pipeline",),))
                continue
            for who, remedy in _refusing(config, kind, vision, config.generates, config.learns):
                text = f"{env.name} shows {kind}s, which {who} does not take; {remedy}let it show text"
                yield Problem(path, f"{dotted(path)}: {text}", (("model",), ("generator", "engine")))


def _refusing(
    config: Config, kind: str, vision: Vision | None, generates: bool, learns: bool
) -> Iterator[tuple[str, str]]:
    """What does not take a kind of media, the model or else engines, and the beginning of a remedy."""
    if vision is None:
        model = config.model.path or f"model.tiny.architecture={config.model.tiny.architecture}"
        seeing = SEEING_SCORERS if config.trains_head else SEEING
        yield model, f"use a model with model_type {', '.join(seeing)}, or "
        return
    if config.model.path is not None and not read_processor(Path(config.model.path)):
        yield f"{config.model.path} without {PROCESSORS[0]}", "add the file of the published model, or "
    users: list[tuple[str, str, SpecTable[Any]]] = []
    users += [("generator", config.gen_engine, GEN_ENGINES)] if generates else []
    users += [("trainer", config.train_engine, TRAIN_ENGINES)] if learns else []
    users += [("teacher", config.teacher_engine, TRAIN_ENGINES)] if learns and config.uses_teacher else []
    users += [("critic", config.critic_engine, TRAIN_ENGINES)] if learns and config.uses_critic else []
    families = GEN_ENGINES[config.gen_engine].media_families
    if generates and config.model.path is not None and (own := unseen_type(families, Path(config.model.path))):
        yield f"the {config.gen_engine} generator with {own}", f"use one of {', '.join(families or ())}, or "
    if learns and config.teacher_endpoint is not None:
        yield "the teacher's endpoint", "use teacher.path, or "
    for role, engine, engines in users:
        if kind not in engines[engine].media:
            able = [name for name, spec in engines.items() if spec.selectable and kind in spec.media]
            yield f"the {engine} {role}", f"use {role}.engine={' or '.join(able)}, or " if able else ""
    for key, path in _further_models(config) if learns else ():
        try:
            other = read_vision_of(Path(path))
        except ValueError as error:
            yield f"{key} ({str(error).removeprefix('model.path: ')})", ""
            continue
        if other is None:
            yield f"{key} {path}", ""
        elif other.sizes != vision.sizes:
            yield f"{key} {path} of other patches than the policy's", ""
        elif key.startswith("teacher.") and (names := vision.unlike(other, config.data.max_pixels)):
            told = "; ".join(f"{name}={getattr(other, name)}, not {getattr(vision, name)}" for name in names)
            remedy = f"give it the policy's {PROCESSORS[0]}, or "
            if names == ["max_pixels"]:
                remedy = f"use data.max_pixels={min(vision.max_pixels, other.max_pixels)}, or "
            yield f"{key} {path}, whose processor makes other sizes of pictures ({told}),", remedy


def show_rows(
    config: Config,
    template: FolderTemplate | None,
    rows: Mapping[Split, RowSet],
    checks: Mapping[Split, RowCheck],
) -> ShownRows:
    """The plan's summary of the rows that were read."""
    shown = ShownRows()
    for split, found in rows.items():
        for source, table in zip(found.sources, found.tables, strict=True):
            shown.counts[split, source.path] = _count(table)
    if template is None:
        return shown
    if not template.chat_template:
        shown.notes.append(
            f"{_named(config)} has no chat template: the model gets the texts of a row's messages, one paragraph each, "
            "without roles and end-of-turn tokens"
        )
    shown.notes += _ends_note(config, template)
    train, check = rows.get("train"), checks.get("train")
    if check is not None and check.skipped[0]:
        count, where = check.skipped
        shown.notes.append(f"{where}: {REWRITES}; {count} rows of data.train are skipped for this reason")
    if train is not None and train.num_left_out:
        done = "rows of data.train are left out (data.unusable_rows=drop), the first of them:"
        shown.notes += [f"{train.num_left_out} of {len(train)} {done}", *train.left_out]
    if train is not None and not (train.unlearnable and _learns_from_answers(config)):
        shown.examples += _examples(config, template, train)
    return shown


def _examples(config: Config, template: FolderTemplate, rows: RowSet) -> Iterator[tuple[str, str]]:
    """The first row of data.train as text: the prompt, and the answer that is trained on."""
    row = rows.row(rows.first_usable)
    if config.env_of(row.domain) is not None:
        return  # the environment may change the first prompt
    try:
        if not _learns_from_answers(config):
            yield "example", _quoted(render(template, row.messages, row.tools, **row.variables))
            if (context := PrivilegedContext.of(config)) is not None:
                read = context.messages(row, rows.where(rows.first_usable))
                yield "", f"the teacher reads: {_quoted(render(template, read, row.tools, **row.variables))}"
        else:
            *_, (learned, _) = pieces = list(turns_of(template, row))
            yield "example", _quoted("".join(text for text, _ in pieces[:-1]))
            if row.rejected is None:
                said = {None: "trained on", True: "trained on, as good", False: "trained on, as bad"}[row.label]
                yield "", f"{said}: {_quoted(learned)}"
            else:
                yield "", f"chosen: {_quoted(learned)}"
                yield "", f"rejected: {_quoted(list(turns_of(template, row.rejected))[-1][0])}"
    except (TemplateRefusal, LeftOut, BadRow):  # reported, or skipped with a note
        return


def _learns_from_answers(config: Config) -> bool:
    return config.learns and not config.learns_from_rewards


def _quoted(text: str) -> str:
    text = plain(text)
    if len(text) > BEGIN_CHARS + END_CHARS:
        left_out = len(text) - BEGIN_CHARS - END_CHARS
        text = f"{text[:BEGIN_CHARS]} [... {left_out} characters ...] {text[-END_CHARS:]}"
    return json.dumps(text, ensure_ascii=False)


def _count(table: Table) -> str:
    if not isinstance(table, ShardedTable):
        return "1 row" if len(table) == 1 else f"{len(table)} rows"
    sizes = [str(len(shard)) for shard in table.shards]
    return f"{len(table)} rows in {len(sizes)} files" + (f": {' + '.join(sizes)}" if len(sizes) <= MAX_SHARDS else "")


def _named(config: Config) -> str:
    return config.model.path or "the tiny model"


def _ends_note(config: Config, template: FolderTemplate) -> Iterator[str]:
    """A note if the model's files name different tokens that end a response."""
    if config.model.path is None:
        return
    folder, added = Path(config.model.path), template.added_tokens_decoder
    places = {name: _end_ids(folder / name) for name in ("generation_config.json", "config.json")}
    of_engine = places["generation_config.json"] or places["config.json"]
    ends = {"tokenizer": template.eos_token, "chat template": end_of_turn(template)}
    known = {token.content: number for number, token in added.items()}
    texts = {name: text for name, text in ends.items() if text is not None}
    if not of_engine or all(known.get(text) in of_engine for text in texts.values() if text in known):
        return
    where = "generation_config.json" if places["generation_config.json"] else "config.json"
    shown = [added[number].content if number in added else f"token {number}" for number in of_engine]
    said = [f"{where} {', '.join(shown)}", *(f"{name} {text}" for name, text in texts.items())]
    yield (
        f"the files of {folder} name different end tokens ({'; '.join(said)}): generation stops at each of them, and "
        f"answers are trained with {texts.get('chat template', texts.get('tokenizer', 'none'))}"
    )


def _end_ids(path: Path) -> list[int]:
    try:
        content: Any = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return []
    given = content.get("eos_token_id") if isinstance(content, dict) else None
    return [number for number in (given if isinstance(given, list) else [given]) if isinstance(number, int)]
