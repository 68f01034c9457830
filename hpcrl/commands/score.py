"""Try a reward on responses, without a run.

    python -m hpcrl score --reward math --answer 18 "The answer is **18**."
    python -m hpcrl score --reward math --file rows.jsonl
    python -m hpcrl score --reward rewards.py:my_reward --options bonus=0.5 --answer 18 "It is 18." "It is 17."

Prints for each response its reward and score, the extracted answer, and the reward's metrics. A file has one JSON
object per line with "response" (a text, or a list of the model's turns), optionally "answer", "prompt" and "domain";
other keys are columns of the row; a judge with images=true sees the images of `images` or `image`. Responses of one
command, or rows with the same prompt, form a group for a reward that scores groups. Does not import torch itself.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from pydantic import ValidationError

from hpcrl.config import RewardConfig
from hpcrl.data.media import image_column, images_of, read_parts
from hpcrl.data.pictures import decode
from hpcrl.rewards.reward import ModelTurn, Reward, RewardItem, Score, make_reward
from hpcrl.rewards.serving.guarded import score_each
from hpcrl.spec.media import IMAGE, Medium
from hpcrl.spec.tables import REWARDS
from hpcrl.system.cli import ArgumentParser, use_utf8
from hpcrl.system.exit_codes import ExitCode

KEYS = ("response", "answer", "prompt", "domain")
MAX_SHOWN_CHARS = 200


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 if a response could not be scored, or 2 on bad input. Ends when the output's reader has ended."""
    try:
        arguments = _parser().parse_args(argv)
        reward = _reward(arguments)
        rows = _rows_of(arguments)
        reward.start()
    except (ValueError, OSError) as error:
        print(f"hpcrl score: {' '.join(str(error).split())} (see --help)", file=sys.stderr)
        return ExitCode.BAD_INPUT
    scores: list[Score] = []
    try:
        for place, item, score in _scored(reward, rows):
            scores.append(score)
            _print(_shown(place, item, score, arguments.json))
        if len(scores) > 1 and not arguments.json:
            _print(f"\n{_summary(scores)}")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python's last flush fails again
    return 1 if any(score.error for score in scores) else ExitCode.DONE


def _scored(reward: Reward, rows: Sequence[tuple[str, RewardItem]]) -> Iterator[tuple[str, RewardItem, Score]]:
    """(place, row, score) of each response."""
    for group in _calls(reward, rows):
        places, items = zip(*group, strict=True)
        found = score_each(reward, items)
        found = found if found is not None else [score_each(reward, [item])[0] for item in items]  # type: ignore[index]
        yield from zip(places, items, found, strict=True)


def _summary(scores: Sequence[Score]) -> str:
    mean = [sum(values) / len(scores) for values in ([s.reward for s in scores], [s.score for s in scores])]
    errors = sum(bool(score.error) for score in scores)
    return f"{len(scores)} responses: mean reward {mean[0]:.4g}, mean score {mean[1]:.4g}, {errors} errors"


def _print(text: str) -> None:
    """Print with escapes for characters that the output's encoding lacks, such as a lone surrogate in an error."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def _parser() -> ArgumentParser:
    parser = ArgumentParser("hpcrl score", __doc__)
    names = ", ".join(name for name, spec in REWARDS.items() if not spec.imports_code)
    parser.add_argument("response", nargs="*", help="the model's text; - reads it from standard input")
    parser.add_argument(
        "--reward", default="math", metavar="NAME", help=f"{names}, or package.module:callable or file.py:callable"
    )
    parser.add_argument("--answer", help="the gold answer, as in a data row")
    parser.add_argument("--prompt", default="", help="the prompt")
    parser.add_argument("--file", metavar="JSONL", help="rows instead of responses")
    parser.add_argument(
        "--column", action="append", default=[], metavar="KEY=VALUE", help="another column of the row; may be repeated"
    )
    parser.add_argument(
        "--options", action="append", default=[], metavar="KEY=VALUE", help="of reward.*.options; may be repeated"
    )
    parser.add_argument("--signature", default="auto", help="reward.*.signature: auto, verl, trl, openrlhf or hpcrl")
    parser.add_argument("--json", action="store_true", help="a JSON object a line")
    return parser


def _reward(arguments: argparse.Namespace) -> Reward:
    """The reward that the arguments select. ValueError for invalid options."""
    if ":" not in arguments.reward and arguments.reward not in list(REWARDS):
        names = ", ".join(name for name, spec in REWARDS.items() if not spec.imports_code)
        raise ValueError(
            f"--reward {arguments.reward}: there are {names}, and package.module:callable or file.py:callable"
        )
    section: dict[str, Any] = {"name": arguments.reward, "signature": arguments.signature}
    section["options"] = _pairs("--options", arguments.options)
    if ":" in arguments.reward:
        section |= {"name": "function", "function": arguments.reward}
    try:
        return make_reward(RewardConfig.model_validate(section))
    except ValidationError as error:
        detail = error.errors()[0]
        raise ValueError(f"--{detail['loc'][0]} {detail['input']}: {detail['msg']}") from error


def _pairs(option: str, arguments: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word in arguments:
        key, equals, value = word.partition("=")
        if not (key and equals):
            raise ValueError(f"{option} {word}: expected KEY=VALUE")
        try:
            found[key] = json.loads(value)
        except json.JSONDecodeError:
            found[key] = value
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
            raise ValueError(f"{option} {key}: {error}") from error
    return found


def _rows_of(arguments: argparse.Namespace) -> list[tuple[str, RewardItem]]:
    """(place, row) of each response to score. ValueError on invalid input."""
    if arguments.file and (arguments.response or arguments.answer is not None or arguments.prompt or arguments.column):
        raise ValueError("--file excludes a response, --answer, --prompt and --column: its rows have them")
    sees = ":" not in arguments.reward and REWARDS[arguments.reward].shown_images(
        _pairs("--options", arguments.options), False
    )
    rows = list(_rows(Path(arguments.file), sees)) if arguments.file else _arguments(arguments)
    compares = ":" not in arguments.reward and REWARDS[arguments.reward].compares_answer
    if compares and all(item.answer is None for _, item in rows):
        told = f'{arguments.file}: no row has an "answer"' if arguments.file else "give --answer"
        raise ValueError(f"{told}, which the reward {arguments.reward} compares with")
    return rows


def _arguments(arguments: argparse.Namespace) -> list[tuple[str, RewardItem]]:
    if not arguments.response:
        raise ValueError("give a response, or --file with rows")
    try:
        texts = [sys.stdin.buffer.read().decode() if text == "-" else text for text in arguments.response]
        "".join([*texts, arguments.prompt, arguments.answer or ""]).encode()
    except UnicodeError as error:
        raise ValueError("a response, the prompt or the answer is not UTF-8 text") from error
    columns = _pairs("--column", arguments.column)
    return [
        ("", RewardItem(place, "default", arguments.prompt, text, arguments.answer, columns))
        for place, text in enumerate(texts)
    ]


def _rows(file: Path, with_images: bool) -> Iterator[tuple[str, RewardItem]]:
    """(place, row) of a file, with the images of its column `images` or `image` if a reward sees them; ValueError names
    file and line."""
    count = 0
    with _opened(file) as lines:
        try:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                where = f"{file}:{number}"
                row = _row(line, where)
                turns = _turns(row)
                if not turns:
                    there = ", ".join(row) if isinstance(row, dict) else type(row).__name__
                    raise ValueError(
                        f'{where}: expected an object with a text "response", there is: {there or "nothing"}'
                    )
                extra = {key: value for key, value in row.items() if key not in KEYS}
                texts = str(row.get("domain", "default")), str(row.get("prompt", "")), turns[-1]
                earlier = tuple(map(ModelTurn, turns[:-1]))
                images = _images(row, file.parent, where) if with_images else []
                yield where, RewardItem(count, *texts, row.get("answer"), extra, earlier=earlier, images=images)
                count += 1
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: not UTF-8 text") from error
    if not count:
        raise ValueError(f"{file}: no rows")


def _images(row: dict[str, Any], folder: Path, where: str) -> list[Medium]:
    """A row's images in their own size, since the size that a model sees is not known here."""
    column, found = image_column(row), []
    for file in read_parts(images_of(row[column], column, where), folder) if column else ():
        try:
            image = decode(file.read())
        except ValueError as error:
            raise ValueError(f"{file.place}: {error}") from error
        found.append(Medium(IMAGE, image.tobytes(), image.width, image.height))
    return found


def _row(line: str, where: str) -> Any:
    """The JSON value of a line. ValueError if it is not JSON, or has text that is not valid Unicode."""
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error.msg} (column {error.colno})") from error
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: a text has a lone surrogate: {error.object[error.start]!a}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise ValueError(f"{where}: {error}") from error
    return row


def _opened(file: Path) -> TextIO:
    """The file, opened. ValueError if it cannot be."""
    try:
        return file.open(encoding="utf-8", errors="strict")
    except OSError as error:
        raise ValueError(f"--file {file}: {error.strerror}") from error


def _turns(row: Any) -> list[str]:
    """The texts of a row's turns; empty without a valid response."""
    response = row.get("response") if isinstance(row, dict) else None
    turns = response if isinstance(response, list) else [response]
    texts = [turn for turn in turns if isinstance(turn, str)]
    return texts if len(texts) == len(turns) else []


def _calls(reward: Reward, rows: Sequence[tuple[str, RewardItem]]) -> Iterator[list[tuple[str, RewardItem]]]:
    """The rows of each call of the reward."""
    if reward.scores != "groups":
        yield from ([row] for row in rows)
        return
    groups: dict[tuple[str, str], list[tuple[str, RewardItem]]] = {}
    for where, item in rows:
        groups.setdefault((item.domain, item.prompt), []).append((where, item))
    yield from groups.values()


def _shown(where: str, item: RewardItem, score: Score, as_json: bool) -> str:
    if as_json:
        fields = ("reward", "score", "error", "metrics", "turn_rewards", "extracted", "ground_truth")
        return json.dumps({"where": where} | {name: getattr(score, name) for name in fields}, ensure_ascii=False)
    extracted = "nothing" if score.extracted is None else score.extracted
    ground_truth = item.answer if score.ground_truth is None else score.ground_truth
    parts = {
        "reward": f"{score.reward:.4g}, score {score.score:.4g}",
        "turns": ", ".join(f"{value:.4g}" for value in score.turn_rewards),
        "error": score.error,
        "extracted": extracted if score.ground_truth is not None or score.extracted is not None else "",
        "ground truth": "" if ground_truth is None else str(ground_truth),
        "metrics": "  ".join(f"{name} {value:.4g}" for name, value in score.metrics.items()),
    }
    lines = [f"{name:<13}{_short(text)}" for name, text in parts.items() if text]
    return "\n".join([*([where] if where else []), *lines])


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}... ({len(text)} characters)"


if __name__ == "__main__":
    use_utf8()
    sys.exit(main())
