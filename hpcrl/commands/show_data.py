"""Look at the rows of a data set as a run would read them: counts, lengths, a rendered prompt, duplicates, bad rows.

    python -m hpcrl data train.jsonl model.path=FOLDER
    python -m hpcrl data pairs.jsonl model.path=FOLDER data.max_sequence_tokens=2048
    python -m hpcrl data 'shards/*.parquet' --val test.jsonl data.prompt_key=input data.answer_key=label
    python -m hpcrl data --config my.yaml

FILE is anything that data.train takes: a file, a pattern, a folder, a cached data set of the hub, task:NAME. WORDS are
those of a launch, of which the sections data and model are read; without FILE, the data of these words are shown. With
model.path, prompts are rendered with the model's chat template and lengths are tokens, else characters. Prompts that
differ in case and white space only are duplicates. Rows are pairs or labelled answers if the pipeline of WORDS takes
them; without a pipeline, if the first row has their columns. Nothing is written or started.

Exit code 0, or 1 if a row would be refused and not left out (data.unusable_rows), or 2 on bad input.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pydantic import ValidationError

from hpcrl.config import ConfigError, DataConfig
from hpcrl.config.compose import compose
from hpcrl.config.part_names import section_name
from hpcrl.data.answers import LeftOut, turns_of
from hpcrl.data.chat import bind, encode, plain, render
from hpcrl.data.files import BadRow
from hpcrl.data.head_rows import head_row_reader
from hpcrl.data.pair_forms import is_pair
from hpcrl.data.places import open_table
from hpcrl.data.rendering import RowCheck
from hpcrl.data.row_kinds import READERS
from hpcrl.data.row_lengths import LengthLimit
from hpcrl.data.rows import RESPONSE_KEYS, ReadRow, Row, keys_of, parse_row, sources
from hpcrl.data.survey import MAX_MEASURED, Pair, Survey, quantiles, survey
from hpcrl.data.tasks import Split
from hpcrl.data.template_forms import TemplateRefusal
from hpcrl.data.templates import read_template
from hpcrl.spec.kinds import RowKind
from hpcrl.spec.tables import PIPELINES
from hpcrl.system.cli import ArgumentParser, show, use_utf8
from hpcrl.system.exit_codes import ExitCode

SHARES = {"min": 0.0, "median": 0.5, "90 %": 0.9, "99 %": 0.99, "max": 1.0}
MAX_SHOWN_TOKENS = 400
LABEL = 12


@dataclass(frozen=True)
class OwnRows:
    """The rows of data.train: their kind and parser, whether those of data.val are alike, and the longest sequence if
    the pipeline has a key of its own for it."""

    kind: RowKind
    read: ReadRow
    validates: bool = False
    limit: LengthLimit | None = None

    @classmethod
    def of(cls, kind: RowKind, validates: bool = False) -> OwnRows:
        return cls(kind, READERS[kind], validates)


@dataclass(frozen=True)
class Reading:
    """How rows are read: the keys of `data`, the seed, the pipeline's rows, and the model's folder."""

    config: DataConfig
    seed: int
    own: OwnRows
    model: str | None

    @property
    def kind(self) -> RowKind:
        return self.own.kind

    @functools.cached_property
    def template(self) -> Any:
        """The model's chat template with the run's variables; None without a model."""
        return bind(read_template(Path(self.model)), self.config.chat_template_kwargs) if self.model else None

    @functools.cached_property
    def tokenizer(self) -> Any:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from transformers import AutoTokenizer  # takes seconds

        return bind(AutoTokenizer.from_pretrained(self.model), self.config.chat_template_kwargs)

    def length(self, row: Row) -> int:
        if self.model is None:
            return sum(len(str(message["content"])) for message in row.messages)
        return len(encode(self.tokenizer, render(self.tokenizer, row.messages, row.tools, **row.variables)))

    def of(self, split: Split) -> Survey | None:
        """The survey of a split; None if it has no source."""
        if not sources(self.config, split):
            return None
        check: Callable[[Row, str], str] | None = None
        if self.template is not None and self.template.chat_template:
            check = RowCheck(self.template, str(self.model), self.config).problem_of
        own = split == "train" or self.own.validates
        parts = self.parts if own and self.kind != "answers" else None
        return survey(self.config, split, self.seed, self.length, check, self.own.read if own else parse_row, parts)

    def parts(self, row: Row) -> dict[str, int]:
        """Lengths of a row's answers by name, and of its longer sequence; empty if the template refuses the row."""
        found, whole = {}, 0
        answers = [(row, True), (row.rejected, False)] if row.rejected is not None else [(row, row.label)]
        names = ("rejected", "chosen") if row.rejected is not None else ("bad", "good")
        for part, is_good in answers:
            assert part is not None
            try:
                pieces = self._pieces(part)
            except (TemplateRefusal, LeftOut):
                return {}
            found[names[bool(is_good)]] = sum(length for length, learned in pieces if learned)
            whole = max(whole, sum(length for length, _ in pieces))
        return {**found, "whole": whole}

    def _pieces(self, row: Row) -> list[tuple[int, bool]]:
        """Lengths of a row's parts, and whether they are trained on."""
        if self.model is not None:
            turns = enumerate(turns_of(self.tokenizer, row))
            return [(len(encode(self.tokenizer, text, begins=not n)), learned) for n, (text, learned) in turns]
        said = [*row.messages, row.turn or {}]
        return [(len(str(message.get("content") or "")), n >= row.prompt_messages) for n, message in enumerate(said)]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 if a row would be refused, or 2 on bad input."""
    use_utf8()
    parser = ArgumentParser("hpcrl data", __doc__)
    parser.add_argument("given", nargs="*", metavar="FILE | WORD", help="files to read, words of a launch")
    parser.add_argument("--val", action="append", default=[], metavar="FILE", help="validation rows; may be repeated")
    parser.add_argument("--config", metavar="FILE", help="a configuration file, as for a launch")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    try:
        options = parser.parse_intermixed_args(argv)
        reading = _reading(options.given, options.val, options.config)
        splits: tuple[Split, ...] = ("train", "val")
        found = {split: one for split in splits if (one := reading.of(split)) is not None}
    except (ConfigError, ValueError, OSError) as error:
        print(f"hpcrl data: {error}", file=sys.stderr)
        return ExitCode.BAD_INPUT
    overlap = found["val"].overlap(found["train"]) if len(found) == 2 else None
    if options.json:
        show(json.dumps({f"data.{split}": _as_json(one) for split, one in found.items()} | _shared(overlap)))
    else:
        show("\n".join(_page(reading, found, overlap)))
    drops = reading.config.unusable_rows == "drop"
    return 1 if any(one.num_refused for split, one in found.items() if not (drops and split == "train")) else 0


def _reading(given: Sequence[str], val: Sequence[str], file: str | None) -> Reading:
    words = [word for word in given if "=" in word and not Path(word).exists()]
    files = [word for word in given if word not in words]
    composition = compose([*(["--config", file] if file else []), *words])
    if composition.problems:
        raise ConfigError([problem.text for problem in composition.problems])
    data: dict[str, Any] = dict(composition.data.get("data") or {})
    if files:
        data |= {"train": files, "val": None}
    elif val and "train" not in (composition.data.get("data") or {}):
        data |= {"train": None}
    if val:
        data |= {"val": list(val)}
    if not (files or val or file or words):
        raise ValueError("no file: name one, or --config FILE, or +experiment=NAME (see --help)")
    try:
        config = DataConfig.model_validate(data)
    except ValidationError as error:
        lines = [f"data.{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
        raise ValueError("; ".join(lines)) from error
    model = (composition.data.get("model") or {}).get("path")
    if model and not Path(model).is_dir():
        raise ValueError(f"model.path: {model} is no folder; lengths are in tokens of a model's tokenizer")
    seed = int(composition.data.get("seed", 0))
    own = _own_rows(composition.data) if composition.data.get("pipeline") else _first_rows(config, seed)
    return Reading(config, seed, own, model)


def _own_rows(data: Mapping[str, Any]) -> OwnRows:
    """The rows of data.train that the pipeline of these unchecked values takes."""
    pipeline = str(data["pipeline"])
    spec = PIPELINES[pipeline]
    if spec.section is None or spec.learns_from_rewards:
        return OwnRows.of(spec.row_kind(None) if isinstance(spec.rows, str) else "answers")
    name = section_name(pipeline, spec)
    try:
        section: Any = spec.section.model_validate(data.get(name) or {})
    except ValidationError as error:
        wrong = [(one["loc"], one["msg"].removeprefix("Value error, "), one["input"]) for one in error.errors()]
        lines = [f"{name}.{'.'.join(map(str, loc))}: {text}, got {value!r}" for loc, text, value in wrong]
        raise ValueError("; ".join(lines)) from error
    stand_in = SimpleNamespace(**{name: section}, section=lambda kind: section)
    own = OwnRows.of(spec.row_kind(stand_in), spec.validates_rows(stand_in))
    if not spec.trains_head:
        return own
    limit = LengthLimit(section.max_tokens, f"{name}.max_tokens={section.max_tokens}")
    return replace(own, read=head_row_reader(section), limit=limit)


def _first_rows(config: DataConfig, seed: int) -> OwnRows:
    """The rows of data.train according to the columns of the first row of data.train that can be read."""
    for source in sources(config, "train"):
        table, keys = open_table(source, seed, "train"), keys_of(source, config)
        for index in range(len(table)):
            try:
                raw = table.row(index)
            except BadRow:
                continue
            labelled = isinstance(raw.get(keys.label_key), bool) and any(raw.get(key) for key in RESPONSE_KEYS)
            return OwnRows.of("pairs" if is_pair(raw, keys) else "labelled" if labelled else "answers")
    return OwnRows.of("answers")


def _page(reading: Reading, found: dict[Split, Survey], overlap: tuple[int, Pair | None] | None) -> Iterator[str]:
    for split, one in found.items():
        yield f"data.{split}"
        for path, size in one.sizes.items():
            yield _line(path, _rows(size), wide=True)
        usable = one.domains.total()
        yield _line("domains", ", ".join(f"{name} {count}" for name, count in one.domains.most_common()) or "none")
        if (split == "train" or reading.own.validates) and reading.kind != "answers":
            yield from _parts(reading, one)
        else:
            yield _line("answers", f"in {usable - one.unanswered} of {_rows(usable)}")
        if one.with_images:
            yield _line("images", f"in {_rows(one.with_images)}; lengths leave them out")
        yield _line("prompts", _lengths(reading, one))
        count, pair = one.repeated
        yield _line("duplicates", f"{_rows(count)} with an earlier row's prompt{_example(pair)}" if count else "none")
        if split == "val" and overlap is not None:
            count, pair = overlap
            text = (
                f"{count} of {len(one.prompts)} prompts with data.train{_example(pair)}"
                if count
                else "none with data.train"
            )
            yield _line("overlap", text)
        refused = _rows(one.num_refused) if one.num_refused else "none"
        kinds = ", ".join(f"{count} {kind}" for kind, count in one.useless.most_common())
        if split == "train" and one.num_refused and reading.config.unusable_rows == "drop":
            refused += " (left out: data.unusable_rows=drop)"
        yield _line("refused", refused + (f"; of the pairs {kinds}" if kinds else ""))
        yield from (f"    {problem}" for problem in one.refused)
        if one.num_refused > len(one.refused):
            yield f"    and {one.num_refused - len(one.refused)} more"
        yield ""
    first = next((one.first for one in found.values() if one.first is not None), None)
    if first is not None:
        yield from _prompt(reading, *first)


def _parts(reading: Reading, one: Survey) -> Iterator[str]:
    """Lines about the answers of pairs and labelled rows."""
    usable, whole = one.domains.total(), one.parts.get("whole", [])
    names = {"pairs": ("chosen", "rejected"), "labelled": ("good", "bad", "chosen", "rejected")}[reading.kind]
    for name in names:
        if lengths := one.parts.get(name):
            yield _line(
                name, f"{_spread(lengths)} {'tokens' if reading.model else 'characters'}, of {_rows(len(lengths))}"
            )
    if reading.model and whole:
        limit = reading.own.limit or LengthLimit.of(reading.config, Path(reading.model))
        over = sum(length > limit.max_tokens for length in whole) if limit.max_tokens is not None else 0
        rule = (
            "which are skipped" if reading.own.limit else f"data.overlong_sequences={reading.config.overlong_sequences}"
        )
        done = f", {rule}" if over else ""
        yield _line("sequences", f"{_spread(whole)} tokens; {over} above {limit.key}{done}")
    count, pair = one.twins
    yield _line("repeated", f"{count} of {_rows(usable)} equal an earlier one{_example(pair)}" if count else "none")


def _spread(lengths: Sequence[int]) -> str:
    values = zip(SHARES, quantiles(lengths, *SHARES.values()), strict=True)
    return ", ".join(f"{name} {value}" for name, value in values)


def _rows(number: int) -> str:
    return "1 row" if number == 1 else f"{number} rows"


def _line(label: str, text: str, wide: bool = False) -> str:
    return f"  {label}  {text}" if wide else f"  {label:<{LABEL}}{text}"


def _example(pair: Pair | None) -> str:
    return f", first {pair.where} (as {pair.earlier})" if pair is not None else ""


def _lengths(reading: Reading, one: Survey) -> str:
    if not one.lengths:
        return "none"
    unit = "tokens" if reading.model else "characters without a template (model.path=FOLDER: tokens)"
    text = f"{_spread(one.lengths)} {unit}; longest {one.longest}"
    if reading.model:
        limit = reading.config.max_prompt_tokens
        over = sum(length > limit for length in one.lengths)
        done = {"drop": "dropped", "truncate": "cut", "error": "refused"}[reading.config.overlong_prompts]
        text += f"; {over} above data.max_prompt_tokens={limit}" + (f", which are {done}" if over else "")
    if len(one.lengths) < one.domains.total() and one.num_rows > MAX_MEASURED:
        text += f" (of {len(one.lengths)} rows, evenly spread)"
    return text


def _prompt(reading: Reading, where: str, row: Row) -> Iterator[str]:
    """The first prompt as the model gets it, and its tokens."""
    if reading.model is None:
        yield f"prompt of {where} (model.path=FOLDER: rendered, with its tokens)"
        yield from (f"  {message['role']}: {_printable(str(message['content']))}" for message in row.messages)
        return
    try:
        text = render(reading.tokenizer, row.messages, row.tools, **row.variables)
    except TemplateRefusal as error:
        yield f"prompt of {where}: {error.reason}"
        return
    has = reading.template.chat_template
    yield f"prompt of {where}, as the model gets it" + ("" if has else "; the model has no chat template")
    yield f"  {_printable(plain(text))}"
    ids = encode(reading.tokenizer, text)
    pieces = [reading.tokenizer.decode([number]) for number in ids[:MAX_SHOWN_TOKENS]]
    yield f"its {len(ids)} tokens" + (f", the first {MAX_SHOWN_TOKENS}" if len(ids) > MAX_SHOWN_TOKENS else "")
    yield "  " + " ".join(
        f"{number}:{json.dumps(piece, ensure_ascii=False)}" for number, piece in zip(ids, pieces, strict=False)
    )
    if isinstance(row.answer, str):
        yield f"answer {json.dumps(row.answer, ensure_ascii=False)}"


def _printable(text: str) -> str:
    """The text with line breaks, indented, and escapes for other control characters."""
    lines = ("".join(c if c.isprintable() else repr(c)[1:-1] for c in line) for line in text.split("\n"))
    return "\n  ".join(lines)


def _as_json(one: Survey) -> dict[str, Any]:
    count, pair = one.repeated
    return {
        "sizes": one.sizes,
        "domains": dict(one.domains),
        "unanswered": one.unanswered,
        "with_images": one.with_images,
        "lengths": dict(zip(SHARES, one.quantiles(*SHARES.values()), strict=False)),
        "longest": one.longest,
        "repeated": count,
        "first_repeated": list(pair) if pair is not None else None,
        "num_refused": one.num_refused,
        "refused": one.refused,
        "useless": dict(one.useless),
        "parts": {
            name: dict(zip(SHARES, quantiles(of, *SHARES.values()), strict=True)) for name, of in one.parts.items()
        },
        "num_equal": one.twins[0],
    }


def _shared(overlap: tuple[int, Pair | None] | None) -> dict[str, Any]:
    if overlap is None:
        return {}
    count, pair = overlap
    return {"overlap": count, "first_overlap": list(pair) if pair is not None else None}
