"""A command of hpcrl in the process of the test: what it prints and its exit code, without the seconds of a start."""

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
    """What `main` made of a command line in the folder `at`, as subprocess.run() tells it; what it raises is raised."""
    out, err = io.StringIO(), io.StringIO()
    around = patch.dict(os.environ, environ, clear=True) if environ is not None else contextlib.nullcontext()
    with around, contextlib.chdir(at), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    return CompletedProcess(words, code, out.getvalue(), err.getvalue())
