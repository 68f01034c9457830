"""Example episodes before the first prompt of every episode (env.NAME.examples): dialogues from a file, or episodes
that the environment's expert plays from separate starts."""

from __future__ import annotations

from hpcrl.config import DataConfig, DataSource, EnvConfig
from hpcrl.data.env_sources import ExpertTask
from hpcrl.data.messages import Messages
from hpcrl.data.places import open_table
from hpcrl.data.rows import RawContext, parse_row


def example_messages(config: EnvConfig, section: str, seed: int) -> Messages:
    """The messages of all examples, each of which ends with the assistant; equal for all prompts and on all ranks.
    ValueError if the file is invalid."""
    if not config.examples:
        return []
    if config.examples_path is None:
        options = {"env": config.options, "max_turns": config.max_turns}
        task = ExpertTask(config.name, options, config.examples, seed, split="examples")
        return [message for number in range(config.examples) for message in task.row(number)["messages"]]
    try:
        return _of_file(config.examples_path, config.examples)
    except ValueError as error:
        raise ValueError(f"env.{section}.examples_path: {error}") from error


def _of_file(path: str, count: int) -> Messages:
    table = open_table(DataSource(path=path), seed=0, split="train")
    if len(table) < count:
        raise ValueError(f"{path}: has {len(table)} dialogues, fewer than examples={count}")
    messages: Messages = []
    for number in range(count):
        where = table.where(number)
        row = parse_row(table.row(number), RawContext.of(table, number, DataConfig()))
        if row.images:
            raise ValueError(f"{where}: an example from a file has no images")
        if row.messages[0]["role"] == "system":
            raise ValueError(f"{where}: an example has no system message; the row's own stands before all examples")
        if row.turn is None or not row.turn["content"]:
            raise ValueError(f"{where}: an example must end with an assistant message")
        messages += [*row.messages, row.turn]
    return messages
