"""An episode's repository in its own sandbox: files, commands, hidden tests."""

from __future__ import annotations

import ast
import json
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from hpcrl.envs.spec import SWEOptions
from hpcrl.envs.swe.hidden import split_imports, test_files, tops_of
from hpcrl.sandbox.client import Sandbox
from hpcrl.sandbox.jobs import ChildTask, JobOutcome, Limits, SandboxError
from hpcrl.sandbox.wire import decode

UNPACK = """
import json, os, sys
for name, text in json.load(sys.stdin).items():
    os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
    open(name, "w", encoding="utf-8", errors="surrogateescape").write(text)
"""
SHELL = """exec 2>&1
python() {{ PYTHONPATH=.:{packages} {python} "$@"; }}
python3() {{ python "$@"; }}
export -f python python3
{command}"""


class Repository:
    """An episode's files in the sandbox. Commands run one after the other in its folder, and their child processes end
    with them; hidden tests run in a separate process, which the code cannot see (docs/security.md)."""

    def __init__(self, options: SWEOptions, files: Mapping[str, str]):
        """ValueError if the sandbox does not reach its level, or if the files are too many or too large."""
        for name in files:
            parts = PurePosixPath(name).parts
            if not parts or PurePosixPath(name).is_absolute() or ".." in parts:
                raise ValueError(f"the file {name!r} is outside of the repository")
        self._options, self._files = options, dict(files)
        if "solution" in tops_of(files):
            raise ValueError(
                "a repository cannot have a top-level module solution: the sandbox gives its code this name"
            )
        self._sandbox = sandbox_of(options)
        unpack = ChildTask({"kind": "program", "code": UNPACK}, json.dumps(dict(files)).encode())
        try:
            outcome = self._sandbox.run([unpack], options.tests_timeout_s)
        except SandboxError:
            self.close()
            raise
        if outcome.code or outcome.stopped:
            self.close()
            raise ValueError(f"the repository cannot be unpacked: {_said(outcome)}")

    def run(self, command: str) -> JobOutcome:
        """Run a bash command. Its output and errors are in stdout."""
        packages = ":".join(dict.fromkeys(map(sysconfig.get_path, ("purelib", "platlib"))))
        text = SHELL.format(packages=packages, python=sys.executable, command=command)
        task = ChildTask({"kind": "execute", "command": ["/bin/bash", "-c", text], "files": {}})
        return self._sandbox.run([task], self._options.command_timeout_s, keep_files=True)

    def passed(self, tests: Mapping[str, str]) -> tuple[int, int]:
        """(passed, all) hidden tests. ValueError if the tests cannot judge."""
        passed = total = 0
        for name, source in test_files(tests).items():
            imports, rest = split_imports(source, self._files, name)
            code = "import sys\nsys.path.insert(0, '')\n" + imports
            what = {"kind": "tests", "style": "pytest", "source": rest, "setup": "", "entry_point": ""}
            tasks = [ChildTask({"kind": "serve", "code": code}), ChildTask(what)]
            outcome = self._sandbox.run(tasks, self._options.tests_timeout_s, keep_files=True)
            if outcome.code or outcome.stopped or not outcome.result:
                total += max(1, num_tests(rest))
                continue
            verdict = decode(outcome.result)  # from the tests' process, not the code's
            if verdict["problem"]:
                raise ValueError(f"hidden tests {name} cannot judge: {verdict['problem']}")
            passed += verdict["passed"]
            total += max(1, verdict["total"])
        return passed, total

    def close(self) -> None:
        """End the sandbox, which removes the files."""
        self._sandbox.close()


def sandbox_of(options: SWEOptions) -> Sandbox:
    """A new sandbox. ValueError if no level from min_level on works here."""
    limits = Limits(
        memory_bytes=options.memory_mib << 20,
        file_bytes=options.max_file_mib << 20,
        processes=options.max_processes,
        output_bytes=options.max_output_kib << 10,
    )
    return Sandbox(int(options.min_level[1]), limits)


def num_tests(source: str) -> int:
    """Number of test functions, without parametrisation: the total if the code never answers."""
    functions = (
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return sum(node.name.startswith("test") for node in functions)


def files_of(repository: str) -> dict[str, str]:
    """The text files of a folder, or of a .tar or .zip archive, without git's files, whose history may contain the
    repair. ValueError if there are none."""
    path = Path(repository)
    found: dict[str, bytes] = {}
    try:
        if path.is_dir():
            places = (place for place in path.rglob("*") if ".git" not in place.relative_to(path).parts)
            files = sorted(file for file in places if file.is_file())
            found = {str(file.relative_to(path)): file.read_bytes() for file in files}
        elif path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                found = {one.filename: archive.read(one) for one in archive.infolist() if not one.is_dir()}
        else:
            with tarfile.open(path) as packed:
                for member in packed:
                    if (content := packed.extractfile(member)) is not None:
                        found[member.name.removeprefix("./")] = content.read()
    # KeyError: a link to a file that the archive lacks; RuntimeError: an encrypted or unknown kind of zip
    except (OSError, EOFError, KeyError, RuntimeError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise ValueError(f"column repository: {repository!r} cannot be read: {error}") from error
    found = {name: content for name, content in found.items() if ".git" not in PurePosixPath(name).parts}
    if not found:
        raise ValueError(f"column repository: {repository!r} has no files")
    return {name: content.decode(errors="surrogateescape") for name, content in found.items()}


def _said(outcome: JobOutcome) -> str:
    if outcome.stopped:
        return f"stopped by the {outcome.stopped} limit"
    lines = outcome.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"exit code {outcome.code}"
