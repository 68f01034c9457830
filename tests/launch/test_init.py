"""`hpcrl init DIR`: the project that it writes works with the words of its README."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.launch.init import main
from hpcrl.metrics.log import read_metrics


def run(folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=240, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def commands_of(readme: str) -> list[list[str]]:
    """The commands of a README, without their first word."""
    [block] = re.findall(r"```\n(.*?)```", readme, re.DOTALL)
    lines = [shlex.split(line) for line in block.splitlines()]
    return [words[1:] if words[0] == "python" else ["-m", *words] for words in lines]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_project_learns_with_the_commands_of_its_readme(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    assert main([str(folder)]) == 0
    *commands, status = commands_of((folder / "README.md").read_text())
    data, rows, score, sft, rl = commands
    run(folder, *data)
    run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    told = json.loads(run(folder, *rows, "--json"))
    assert (told["overlap"], told["data.train"]["repeated"], told["data.val"]["num_refused"]) == (0, 0, 0)
    assert "2 responses: mean reward 0.6667, mean score 0.5, 0 errors" in run(folder, *score)
    run(folder, *sft, "sft.stop_score=0.1", "eval.num_prompts=100")
    run(folder, *rl, "max_steps=10", "eval_every=5", "layout=single")
    scores = [row["val/score/mean"] for row in read_metrics(folder / "runs" / "rl") if "val/score/mean" in row]
    assert len(scores) == 3
    assert scores[-1] > scores[0] + 0.05
    assert run(folder, *status).count("finished") == 2


def test_a_folder_with_files_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes").write_text("mine")
    for folder in (tmp_path, tmp_path / "notes"):
        assert main([str(folder)]) == 2
        assert f"{folder} is not empty; name a new folder" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["notes"]


def test_the_next_commands_are_those_of_this_interpreter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "with space"
    folder.mkdir()
    assert main([str(folder)]) == 0
    out = capsys.readouterr().out
    assert f"cd '{folder}'\n" in out
    assert f"{shlex.quote(sys.executable)} make_data.py\n" in out
