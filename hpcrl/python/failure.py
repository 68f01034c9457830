"""How a call from Python reports a run that did not finish."""

from __future__ import annotations

from collections.abc import Sequence


class RunFailed(RuntimeError):
    """A run was refused, or ended without finishing.

    Attributes:
        problems: One line each; the error's text joins them.
        exit_code: As of the command (docs/exit_codes.md): 2 if nothing was started, 143 if the run was asked to stop.
    """

    def __init__(self, problems: Sequence[str], exit_code: int):
        self.problems, self.exit_code = list(problems), int(exit_code)
        super().__init__("; ".join(self.problems))
