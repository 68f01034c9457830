"""A command of hpcrl in the test's process: its output and exit code, without the seconds of a start."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from unittest.mock import patch


def run(
    main: Callable[[Sequence[str]], int], *words: str, at: Path, environ: Mapping[str, str] | None = None
) -> CompletedProcess[str]:
    """Run `main` on a command line in the folder `at`; returns the result in the form of subprocess.run()."""
    out, err = io.StringIO(), io.StringIO()
    around = patch.dict(os.environ, environ, clear=True) if environ is not None else contextlib.nullcontext()
    with around, contextlib.chdir(at), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    return CompletedProcess(words, code, out.getvalue(), err.getvalue())
