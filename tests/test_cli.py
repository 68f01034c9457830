"""The console command `hpcrl`, and hints that work as they are printed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from hpcrl.config import load
from hpcrl.config.abilities import check_installed
from hpcrl.spec.extras import EXTRAS
from hpcrl.spec.tables import GEN_ENGINES, TRAIN_ENGINES
from hpcrl.system import cli
from hpcrl.system.exit_codes import ExitCode
from tests.conftest import ROOT

PIP = [sys.executable, "-m", "pip", "install", "-c", str(ROOT / "constraints.txt")]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def run(*command: str, path: str = os.environ["PATH"], cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=60, check=False)


def hpcrl(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the function of the installed script."""
    module, _, function = PYPROJECT["project"]["scripts"]["hpcrl"].partition(":")
    code = f"import sys; from {module} import {function}; sys.argv[0] = 'hpcrl'; sys.exit({function}())"
    return run(sys.executable, "-c", code, *words)


def shown(main: Callable[[list[str]], int], words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The output of a successful command; argparse ends its help with SystemExit."""
    try:
        code = main(words)
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr()
    assert code == ExitCode.DONE and said.out and not said.err
    return said.out


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_a_command_gets_the_arguments_after_its_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    help_text = shown(cli.main, [name, "--help"], capsys)
    assert help_text == shown(import_module(cli.COMMANDS[name][0]).main, ["--help"], capsys)
    assert re.search(rf"{sys.executable} -m hpcrl[. ]{name}\b", help_text)
    assert not re.search(r"(?<!/)\bpython3? ", help_text), "a hint that fails in a shell without python"


@pytest.mark.parametrize("script", sorted((ROOT / "launch").glob("*.py")), ids=lambda script: script.stem)
def test_the_help_of_a_launch_script_names_interpreter_and_path(script: Path, tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    done = run(sys.executable, str(script), "--help", path="/usr/bin:/bin", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"    {sys.executable} {script} [" in done.stdout and not re.search(r"(?<!/)\bpython3? ", done.stdout)


def test_the_usage_of_the_rollout_reader_names_the_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    usage = " ".join(shown(import_module("hpcrl.rollout.store").main, ["--help"], capsys).split())
    assert usage.startswith(f"usage: {sys.executable} -m hpcrl.rollout.store [-h]")


def test_help_names_every_command_and_imports_none() -> None:
    done = hpcrl("--help")
    assert done.returncode == ExitCode.DONE
    assert all(f"\n  {name} " in done.stdout for name in cli.COMMANDS) and "examples" in done.stdout
    code = "import sys, hpcrl.system.cli; print([m for m in sys.modules if m in ('torch', 'hydra', 'hpcrl.launch')])"
    assert run(sys.executable, "-c", code).stdout == "[]\n"


@pytest.mark.parametrize("words", [["--help"], ["launch", "--help", "env"], ["status"]], ids=" ".join)
def test_a_closed_pipe_ends_a_command_silently(words: list[str], tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [Path(sys.executable).with_name("hpcrl"), *words]
    with open(writer, "w") as nobody:
        done = subprocess.run(command, cwd=tmp_path, stdout=nobody, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (ExitCode.DONE, "")


@pytest.mark.parametrize(
    ("words", "told"), [((), "usage: hpcrl COMMAND"), (("lunch",), "no command 'lunch'; there are")]
)
def test_a_call_without_a_command_is_refused(words: tuple[str, ...], told: str) -> None:
    done = hpcrl(*words)
    assert (done.returncode, done.stdout) == (ExitCode.BAD_INPUT, "") and told in done.stderr


def hinted(text: str) -> list[str]:
    """The command at the end of a hint, as words of a shell."""
    return shlex.split(text[text.index("run: ") + 5 :])


@pytest.mark.slow
def test_a_hint_works_in_a_shell_without_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hint = "run: python -m hpcrl status runs/x"
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    for folder in (tmp_path, Path(sys.executable).parents[1]):
        monkeypatch.chdir(folder)
        words = hinted(cli.in_shell(hint))
        assert words[1:] == ["-m", "hpcrl", "status", "runs/x"]
        done = run(*words, path="/usr/bin:/bin", cwd=folder)
        assert "runs/x is not a run folder" in done.stderr, done
    assert words[0] == f"bin/{Path(sys.executable).name}", "short where the interpreter is below the current folder"


def test_a_hint_names_the_console_command_if_it_is_the_one_on_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, others = tmp_path / "ours", tmp_path / "others"
    for folder in (ours, others):
        folder.mkdir()
        (folder / "hpcrl").write_text("#!/bin/sh\n")
        (folder / "hpcrl").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(ours / "python"))
    monkeypatch.setenv("PATH", f"{ours}:{others}")
    assert cli.in_shell("run: python -m hpcrl prefetch a/b") == "run: hpcrl prefetch a/b"
    assert cli.in_shell("python -m hpcrl.node.preflight X") == f"{ours}/python -m hpcrl.node.preflight X", (
        "no command of hpcrl"
    )
    monkeypatch.setenv("PATH", f"{others}:{ours}")
    assert cli.in_shell("python -m hpcrl.launch -m") == f"{ours}/python -m hpcrl.launch -m", "another installation's"


@pytest.mark.slow
def test_a_refusal_names_the_interpreter(tmp_path: Path) -> None:
    done = run(sys.executable, "-m", "hpcrl.launch", "model.path=org/name", path="/usr/bin:/bin", cwd=tmp_path)
    assert done.returncode == ExitCode.BAD_INPUT
    assert f"run: {sys.executable} -m hpcrl prefetch org/name" in done.stderr


def test_the_packages_of_an_extra_match_the_project_file() -> None:
    declared = PYPROJECT["project"]["optional-dependencies"]
    assert {extra: list(packages) for extra, packages in EXTRAS.items()} == {extra: declared[extra] for extra in EXTRAS}
    engines = [spec for table in (TRAIN_ENGINES, GEN_ENGINES) for _, spec in table.items()]
    assert {extra for spec in engines for extra in spec.needs.values()} <= EXTRAS.keys()


def test_an_engines_install_hint_installs_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = {"no_such_module": "megatron", "nor_this": "of-a-plugin"}
    monkeypatch.setitem(vars(TRAIN_ENGINES["fsdp2"]), "needs", needs)
    (problem,) = check_installed(load([]))
    said, _, command = problem.text.partition("; ")
    assert said == "trainer.engine: fsdp2 is not installed"
    assert shlex.split(command) == [*PIP, *EXTRAS["megatron"], "of-a-plugin"]
    assert check_installed(load(["cluster.container=apptainer", "cluster.image=x.sif"])) == [], "the image may have it"


def test_sglang_is_installed_without_pins_of_another_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(TRAIN_ENGINES["fsdp2"]), "needs", {"no_such_module": "sglang"})
    (problem,) = check_installed(load([]))
    assert shlex.split(problem.text.partition("; ")[2]) == [*PIP[:4], *EXTRAS["sglang"]]


@pytest.mark.slow
def test_a_slurm_sweeps_install_hint_installs_what_it_lacks(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['submitit'] = None\n"
        "from hpcrl.launch.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    words = ("-m", "+cluster=slurm", "data.train=task:sort_digits", "reward.default.name=sort_digits", "seed=0,1")
    done = run(sys.executable, "-c", code, *words, cwd=tmp_path)
    assert done.returncode == ExitCode.BAD_INPUT and len(done.stderr.splitlines()) == 1, done.stderr
    command = shlex.split(done.stderr.partition("not installed; ")[2])
    assert command == [*PIP, *EXTRAS["slurm"]]


def test_make_setup_installs_the_packages_of_a_sweep() -> None:
    makefile = (ROOT / "Makefile").read_text()
    core = makefile[makefile.index("$(CORE): pyproject.toml") : makefile.index("$(DEV): ")]
    assert "'.[slurm]'" in core


@pytest.mark.slow
def test_help_names_the_command_as_it_was_called(tmp_path: Path) -> None:
    """By the script's path, if PATH has no such command."""
    script = tmp_path / "bin" / "hpcrl"
    script.parent.mkdir()
    script.write_text(f"#!{sys.executable}\nimport sys\nfrom hpcrl.system.cli import main\nsys.exit(main())\n")
    script.chmod(0o755)
    for cwd, path, name in ((tmp_path, "/usr/bin:/bin", "bin/hpcrl"), (ROOT, f"{script.parent}:/usr/bin", "hpcrl")):
        done = run(str(script), "launch", "--help", path=path, cwd=cwd)
        assert done.stdout.startswith(f"usage: {name} launch [+cluster="), done.stdout[:200] + done.stderr
