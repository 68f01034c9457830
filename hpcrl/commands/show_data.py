"""Look at the rows of a data set as a run would read them: counts, lengths, a rendered prompt, duplicates, bad rows.

    python -m hpcrl data train.jsonl model.path=FOLDER
    python -m hpcrl data 'shards/*.parquet' --val test.jsonl data.prompt_key=input data.answer_key=label
    python -m hpcrl data --config my.yaml

FILE is anything that data.train takes: a file, a pattern, a folder, a cached data set of the hub, task:NAME. WORDS are
those of a launch, of which the sections data and model are read; without FILE, the data of these words are shown. With
model.path, prompts are rendered with the model's chat template and lengths are tokens, else characters. Prompts that
differ in case and white space only are duplicates. Nothing is written or started.

Exit code 0, or 1 if a row would be refused, or 2 on bad input.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hpcrl.config import ConfigError, DataConfig
from hpcrl.config.compose import compose
from hpcrl.data.chat import bind, encode, plain, render
from hpcrl.data.pairs import parse_pair
from hpcrl.data.rendering import RowCheck
from hpcrl.data.rows import ReadRow, Row, parse_row, sources
from hpcrl.data.survey import MAX_MEASURED, Pair, Survey, survey
from hpcrl.data.tasks import Split
from hpcrl.data.template_forms import TemplateRefusal
from hpcrl.data.templates import read_template
from hpcrl.spec.tables import PIPELINES
from hpcrl.system.cli import ArgumentParser, show, use_utf8
from hpcrl.system.exit_codes import ExitCode

SHARES = {"min": 0.0, "median": 0.5, "90 %": 0.9, "99 %": 0.99, "max": 1.0}
MAX_SHOWN_TOKENS = 400
LABEL = 12


@dataclass(frozen=True)
class Reading:
    """How rows are read: the keys of `data`, the seed, the parser of data.train, and the model's folder."""

    config: DataConfig
    seed: int
    read_train: ReadRow
    model: str | None

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
        read = self.read_train if split == "train" else parse_row
        return survey(self.config, split, self.seed, self.length, check, read)


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
    return 1 if any(one.num_refused for one in found.values()) else ExitCode.DONE


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
    pipeline = composition.data.get("pipeline", "rlvr")
    pairs = pipeline in PIPELINES and PIPELINES[pipeline].pairs
    return Reading(config, int(composition.data.get("seed", 0)), parse_pair if pairs else parse_row, model)


def _page(reading: Reading, found: dict[Split, Survey], overlap: tuple[int, Pair | None] | None) -> Iterator[str]:
    for split, one in found.items():
        yield f"data.{split}"
        for path, size in one.sizes.items():
            yield _line(path, _rows(size), wide=True)
        usable = one.domains.total()
        yield _line("domains", ", ".join(f"{name} {count}" for name, count in one.domains.most_common()) or "none")
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
        yield _line("refused", _rows(one.num_refused) if one.num_refused else "none")
        yield from (f"    {problem}" for problem in one.refused)
        if one.num_refused > len(one.refused):
            yield f"    and {one.num_refused - len(one.refused)} more"
        yield ""
    first = next((one.first for one in found.values() if one.first is not None), None)
    if first is not None:
        yield from _prompt(reading, *first)


def _rows(number: int) -> str:
    return "1 row" if number == 1 else f"{number} rows"


def _line(label: str, text: str, wide: bool = False) -> str:
    return f"  {label}  {text}" if wide else f"  {label:<{LABEL}}{text}"


def _example(pair: Pair | None) -> str:
    return f", first {pair.where} (as {pair.earlier})" if pair is not None else ""


def _lengths(reading: Reading, one: Survey) -> str:
    if not one.lengths:
        return "none"
    values = zip(SHARES, one.quantiles(*SHARES.values()), strict=True)
    unit = "tokens" if reading.model else "characters without a template (model.path=FOLDER: tokens)"
    text = f"{', '.join(f'{name} {value}' for name, value in values)} {unit}; longest {one.longest}"
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
    }


def _shared(overlap: tuple[int, Pair | None] | None) -> dict[str, Any]:
    if overlap is None:
        return {}
    count, pair = overlap
    return {"overlap": count, "first_overlap": list(pair) if pair is not None else None}
