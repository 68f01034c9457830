"""Config groups from the user's folders: HPCRL_CONF and ./conf in addition to the built-in ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcrl.config import ConfigError, load
from hpcrl.config.folders import FOLDERS, conf_dir, groups
from hpcrl.launch.__main__ import main
from hpcrl.system.exit_codes import ExitCode

MINE = """\
# @package _global_
# An experiment of one's own.
defaults:
  - demo
  - override /algorithm: near
max_steps: 7
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder; its ./conf has an experiment and a cluster, next to groups of another project."""
    files = {
        "conf/experiment/mine.yaml": MINE,
        "conf/cluster/mine.yaml": '# My cluster.\nname: slurm\ntime: "00:10:00"\n',
        "conf/config.yaml": "foreign: 1\n",
        "conf/logger/wandb.yaml": "foreign: 1\n",
        "conf/hydra/default.yaml": "run: {dir: nowhere}\n",
    }
    for name, text in files.items():
        put(tmp_path / name, text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(FOLDERS, raising=False)
    return tmp_path


def put(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def algorithm(clip: float) -> str:
    return f"# An algorithm of one's own.\nadvantage_estimator: grpo\npg_clip_high: {clip}\n"


@pytest.mark.slow
def test_later_folders_take_precedence_and_add_files(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = work / "a b'c,=$", work / "second"
    monkeypatch.setenv(FOLDERS, f"{first}:second")
    put(first / "algorithm/near.yaml", algorithm(0.31))
    (second / "algorithm").mkdir(parents=True)
    assert load(["+experiment=mine"]).algorithm.pg_clip_high == 0.31
    put(second / "algorithm/near.yaml", algorithm(0.32))
    assert load(["+experiment=mine"]).algorithm.pg_clip_high == 0.32
    put(work / "conf/algorithm/near.yaml", algorithm(0.33))
    config = load(["+experiment=mine", "+cluster=mine"])
    assert (config.algorithm.pg_clip_high, config.max_steps, config.cluster.time) == (0.33, 7, "00:10:00")
    assert config.rollout.num_prompts == 64, "of the built-in experiment on which this one builds"
    assert config.run_name == "mine"
    put(work / "conf/algorithm/dapo.yaml", algorithm(0.34))
    assert load(["algorithm=dapo"]).algorithm.pg_clip_high == 0.34
    monkeypatch.chdir(first)
    monkeypatch.delenv(FOLDERS)
    assert load(["algorithm=dapo"]).algorithm.pg_clip_high == 0.28, "nothing of the folders is left"


def test_config_folders_are_shown_in_help_plan_and_errors(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(FOLDERS, str(work / "second"))
    put(work / "second/algorithm/near.yaml", algorithm(0.3))
    assert main(["--help"]) == ExitCode.DONE
    text = capsys.readouterr().out
    assert "  in ./second/algorithm:\n    near                   An algorithm of one's own.\n" in text
    assert "  in ./conf/experiment:\n  mine                   An experiment of one's own.\n" in text
    assert f"folders of groups, a later one wins: {conf_dir()}, {work}/second, {work}/conf\n" in text
    assert "logger" not in groups()
    words = ["+experiment=mine", "dry_run=true"]
    assert main(words) == ExitCode.DONE
    plan = capsys.readouterr().out
    assert "note: experiment=mine is from ./conf/experiment/mine.yaml\n" in plan
    assert "note: algorithm=near is from ./second/algorithm/near.yaml\n" in plan and "is from conf/" not in plan
    for word, said in {
        "+experiment=min": " (in conf/experiment, ./second/experiment, ./conf/experiment); did you mean mine?",
        "+experiment=./conf/experiment/mine.yaml": "an experiment is chosen by name; a file is given as --config ./c",
        "+experiment=mine.yaml": "an experiment is chosen by name; a file is given as --config mine.yaml",
        "--config-dir=second": "--config-dir=second: no such option; name the folder in HPCRL_CONF",
    }.items():
        assert main([word, "dry_run=true"]) == ExitCode.BAD_INPUT
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line
    put(work / "conf/experiment/mine.yaml", MINE.replace("7", "-7"))
    with pytest.raises(ConfigError, match=r"max_steps: expected .*, got -7 \(\./conf/experiment/mine\.yaml\)$"):
        load(["+experiment=mine"])


def test_an_unknown_name_names_the_searched_folders_even_if_none_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(FOLDERS, raising=False)
    with pytest.raises(ConfigError, match=r"local, lumi, slurm \(HPCRL_CONF and \./conf have no config groups\)"):
        load(["+cluster=mine"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (MINE.replace("# @package _global_\n", ""), "The file must begin with the line # @package _global_"),
        ("max_steps: 3\n", "experiment: unknown key; the file of an experiment must begin with the line # @package"),
        (MINE.replace("override /", "override "), "Write override /algorithm, with the slash"),
        (
            MINE.replace("near", "nar"),
            "mine.yaml, or an experiment in its defaults list: algorithm: nar: no such algorithm; there are",
        ),
        (MINE.replace("near", "nar"), "(in conf/algorithm, ./conf/algorithm); did you mean near?"),
        ("# @package _global_\nmax_steps: [\n", "conf"),
    ],
)
def test_an_invalid_experiment_is_reported_in_one_line(work: Path, text: str, said: str) -> None:
    put(work / "conf/algorithm/near.yaml", algorithm(0.3))
    put(work / "conf/experiment/mine.yaml", text)
    with pytest.raises(ConfigError) as refused:
        load(["+experiment=mine"])
    (line,) = refused.value.problems
    assert said in line and "\n" not in line


def test_an_invalid_config_folder_is_refused(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDERS, os.pathsep.join(["nowhere", "conf/experiment"]))
    known = "algorithm, cluster, data, env, experiment, layout, model"
    with pytest.raises(ConfigError) as refused:
        load([])
    assert refused.value.problems == [
        f"HPCRL_CONF: {work}/nowhere does not exist",
        f"HPCRL_CONF: {work}/conf/experiment has none of the folders {known}",
    ]
