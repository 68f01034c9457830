"""The software engineering environment: commands until the model submits, then hidden tests."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from hpcrl.envs.environment import shortened
from hpcrl.envs.games.game import ExpertGame, Outcome
from hpcrl.envs.spec import SWEOptions
from hpcrl.envs.swe.bugs import repair
from hpcrl.envs.swe.repository import Repository, files_of, sandbox_of
from hpcrl.envs.swe.row_check import OF_ROW, problem_of_row

SUBMIT = "submit"
LIST = "find . -type f | sort | head -100"
MOST = 20_000
"""Maximum length of a command, characters."""


class SWE(ExpertGame[SWEOptions]):
    """Each turn is a bash command in a repository's folder, in a sandbox that lasts for the episode; `submit` ends the
    episode. The reward is 1 if all hidden tests pass, or, with options.partial, the share that passes; hidden tests
    are in no process or folder that a command can see. A command is effective if its exit code is 0.

    The row has `files` (path -> text) or `repository` (a folder or an archive), its prompt is the task, and
    `hidden_tests` are tests (path -> text) in pytest's form. Without these columns, the seed generates a small
    repository with a bug.
    """

    actions = ("ls", SUBMIT)

    def __init__(
        self,
        options: SWEOptions,
        prompt: str = "",
        files: Mapping[str, str] | None = None,
        repository: str | None = None,
        hidden_tests: Mapping[str, str] | None = None,
        **others: Any,
    ):
        """ValueError if the row cannot be played."""
        super().__init__(options)
        columns = {"files": files, "repository": repository, "hidden_tests": hidden_tests, **others}
        own = any(value is not None for name, value in columns.items() if name not in OF_ROW)
        if own and (problem := problem_of_row(columns)):
            raise ValueError(problem)
        self._row = (prompt, files, repository, hidden_tests or {}) if files or repository else None
        self._repository: Repository | None = None

    @property
    def described_actions(self) -> str:
        return "commands of bash, and submit"

    def start(self, seed: int) -> None:
        self.close()
        self._change: tuple[str, str, str] | None = None
        if self._row is None:
            made = repair(seed)
            self.task, files, self._tests, self._change = made.text, made.files, made.tests, made.change
        else:
            self.task, inline, place, tests = self._row
            files = dict(inline) if inline is not None else files_of(place or "")
            self._tests = dict(tests)
        self._repository = Repository(self.options, files)
        self._said = self._output(LIST)[0]

    def show(self) -> str:
        return self._said

    def act(self, action: str) -> Outcome:
        if action != SUBMIT:
            self._said, ended_well = self._output(action)
            return Outcome(0.0, effective=ended_well)
        assert self._repository is not None, "a running episode has a repository"
        passed, total = self._repository.passed(self._tests)
        self._said = f"{passed} of {total} hidden tests pass."
        whole = passed == total
        return Outcome(passed / total if self.options.partial else float(whole), ended=True, success=whole)

    def close(self) -> None:
        if self._repository is not None:
            self._repository.close()
            self._repository = None

    def best_action(self) -> str:
        """For a generated task: the repair, then submit."""
        assert self._change is not None and self._repository is not None, "only generated tasks have an expert"
        file, wrong, right = self._change
        if self._repository.run(f"grep -qxF {shlex.quote(right)} {file}").code == 0:
            return SUBMIT
        program = f"p={file!r}; t=open(p).read(); open(p,'w').write(t.replace({wrong!r}, {right!r}))"
        return f"python -c {shlex.quote(program)}"

    def _chosen(self, response: str) -> str | None:
        """The command; None if there is no executable command."""
        given = self._given(response) or ""
        valid = len(given) <= MOST and "\0" not in given and given.encode(errors="replace").decode() == given
        return given if given and valid else None

    def _output(self, command: str) -> tuple[str, bool]:
        """A command's output, cut in its middle, and whether it succeeded."""
        assert self._repository is not None, "a running episode has a repository"
        outcome = self._repository.run(command)
        text = shortened(outcome.stdout.decode(errors="replace").strip(), self.options.output_chars)
        ended = f"stopped by the {outcome.stopped} limit" if outcome.stopped else f"exit code {outcome.code}"
        well = not outcome.stopped and outcome.code == 0
        return text if well and text else f"{text}\n({ended})".strip(), well


def probe(options: SWEOptions, own_code: bool) -> None:
    """ValueError if the sandbox does not reach its level, in env ranks (own_code)."""
    if own_code:
        try:
            sandbox_of(options).close()
        except ValueError as error:
            raise ValueError(f"min_level: {error}") from error
