"""The checked and submitted configuration runs, even if its files change later."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.config import ConfigError, load, parse
from hpcrl.config.config_file import read_config_file, write_config
from hpcrl.config.folders import conf_dir
from hpcrl.launch.__main__ import main
from hpcrl.launch.frozen import SUBMITTED_CONFIG, _merge
from hpcrl.launch.job import begin
from hpcrl.launch.prepare import prepare
from hpcrl.run_folder import CONFIG, close_run, open_run, stored_config
from hpcrl.run_folder.changes import differences
from hpcrl.system import log
from hpcrl.system.exit_codes import ExitCode
from tests.conftest import ROOT
from tests.launch.test_hub import COMMIT, add, cache  # noqa: F401
from tests.launch.test_submission import make_slurm
from tests.test_launch import SHORT

MINE = """\
# @package _global_
# An experiment of one's own.
max_steps: 10
data:
  train: task:sort_digits
reward:
  default:
    name: sort_digits
trainer:
  lr: {lr}
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of an experiment, in a copy of conf/; commands run in an empty folder beside stand-ins for Slurm."""
    folder = tmp_path / "conf"
    shutil.copytree(conf_dir(), folder)
    monkeypatch.setattr("hpcrl.config.folders.conf_dir", lambda: folder)
    make_slurm(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    file = folder / "experiment" / "mine.yaml"
    file.write_text(MINE.format(lr=1e-4))
    return file


EDITS = {
    "edited": lambda file: file.write_text(MINE.format(lr=9e-4)),
    "broken": lambda file: file.write_text("trainer: {lr: [fast\n"),
    "wrong": lambda file: file.write_text(MINE.format(lr="fast")),
    "removed": lambda file: file.unlink(),
}


def in_job(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """`job begin` with these words in job 9, as at each of its starts; closes the attempt."""
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    log.start("launch", console="stderr")
    code = begin(words)
    for folder in Path("runs").iterdir():
        if (folder / CONFIG).exists():
            close_run(folder, len(list((folder / "owners").iterdir())), how="requeue")
    monkeypatch.delenv("SLURM_JOB_ID")
    return code


def script_words(run: Path) -> list[str]:
    """The words that the batch script of a run hands to `job begin`."""
    (line,) = re.findall(r"^args=\((.*) \"\$@\"\)$", (run / "slurm/job.sbatch").read_text(), re.MULTILINE)
    return shlex.split(line)


@pytest.mark.slow
@pytest.mark.parametrize("edit", EDITS)
def test_editing_an_experiment_neither_changes_a_queued_job_nor_stops_its_requeue(
    mine: Path, edit: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["+cluster=slurm", "+experiment=mine", "cluster.time=60"]) == ExitCode.DONE
    run = Path("runs/mine")
    words = script_words(run)
    assert words == ["--config", str(run.absolute() / SUBMITTED_CONFIG)]
    EDITS[edit](mine)
    capsys.readouterr()
    for attempt in (1, 2):
        assert in_job(monkeypatch, *words) == ExitCode.DONE
        shown = capsys.readouterr()
        assert shown.out.split()[0] == str(attempt) and "changed" not in shown.err
        config = stored_config(run)
        assert (config.trainer.lr, config.max_steps, config.cluster.time) == (1e-4, 10, "60")
    made = ("+cluster=slurm", "+experiment=mine", "cluster.time=60")
    assert read_config_file(run / CONFIG).arguments == made


@pytest.mark.slow
def test_a_submission_before_the_first_start_uses_the_current_files(mine: Path) -> None:
    """Nothing has run, so the files count as they are."""
    words = ["+cluster=slurm", "+experiment=mine"]
    assert main(words) == ExitCode.DONE
    make_slurm(mine.parents[2], state="CANCELLED")
    EDITS["edited"](mine)
    assert main(words) == ExitCode.DONE
    assert load(script_words(Path("runs/mine"))).trainer.lr == 9e-4


@pytest.mark.slow
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("place", [(), ("run_dir=runs/there",)])
def test_the_first_start_freezes_a_script_submitted_by_hand(
    mine: Path, edit: str, place: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["+cluster=slurm", "+experiment=mine", "save_every=2", *place]
    assert in_job(monkeypatch, *words) == ExitCode.DONE
    EDITS[edit](mine)
    capsys.readouterr()
    assert in_job(monkeypatch, *words) == ExitCode.DONE
    shown = capsys.readouterr()
    config = stored_config(Path("runs/there" if place else "runs/mine"))
    assert shown.out.split()[0] == "2" and (config.trainer.lr, config.save_every) == (1e-4, 2)
    told = "trainer.lr: 0.0001 -> 0.0009" if edit == "edited" else "no longer valid: "
    assert f"and ignored: {told}" in shown.err


def started(*words: str) -> Path:
    """A run of the experiment that was started on this machine and has stopped."""
    config, *_, run, _ = prepare(["+experiment=mine", *words])
    opened = open_run(config.model_dump(mode="json"), config.run_dir, "auto", arguments=run.arguments)
    close_run(opened.run_dir, opened.attempt)
    return opened.run_dir


@pytest.mark.slow
def test_a_resume_changes_only_permitted_keys_given_as_overrides(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started("save_every=5")
    mine.write_text(MINE.format(lr=9e-4).replace("max_steps: 10", "max_steps: 20"))
    config, *_, run, _ = prepare(["+experiment=mine", "save_every=2", "max_steps=30"])
    assert (config.trainer.lr, config.save_every, config.max_steps) == (1e-4, 2, 30)
    assert run.changes == ["max_steps: 10 -> 30", "save_every: 5 -> 2"]
    assert run.ignored == ["trainer.lr: 0.0001 -> 0.0009"]
    config, *_, run, _ = prepare(["+experiment=mine", "save_every=5"])
    assert (config.max_steps, run.changes) == (10, []), "an edit is no command, though the key may change"
    assert run.ignored == ["max_steps: 10 -> 20", "trainer.lr: 0.0001 -> 0.0009"]
    assert main(["+experiment=mine", "save_every=5", "dry_run=true"]) == ExitCode.DONE
    plan = capsys.readouterr().out
    assert "note: changed in files since this run began, and ignored: max_steps: 10 -> 20; trainer.lr" in plan
    assert "max_steps may change in a run: to change it, give it on the command line" in plan
    assert "another run_name or resume=fresh starts a run with the current files" in plan


@pytest.mark.parametrize("word", ["trainer.lr=9e-4", "trainer={lr: 9e-4}", "+trainer.lr=9e-4", "data.train.0=task:add"])
@pytest.mark.parametrize("edited", [True, False])
def test_an_override_of_a_fixed_key_is_refused_even_if_the_file_agrees(mine: Path, word: str, edited: bool) -> None:
    mine.write_text(MINE.format(lr=1e-4).replace("task:sort_digits", "[task:sort_digits]"))
    started()
    if edited:
        mine.write_text(MINE.format(lr=9e-4).replace("task:sort_digits", "[task:add]"))
    with pytest.raises(ConfigError) as refused:
        prepare(["+experiment=mine", word])
    assert "holds a run of another configuration" in refused.value.problems[0]
    changed = "trainer.lr: 0.0001 -> 0.0009" if "lr" in word else 'data.train: ["task:sort_digits"] -> ["task:add"]'
    assert refused.value.problems[1:] == [changed]


def test_overrides_left_out_at_a_resume_also_count_as_changes(mine: Path) -> None:
    """Started on Slurm and resumed on this machine, also without a component."""
    parts = "{node: {roles: [controller, trainer]}, spare: {roles: [reward], partition: cpu}}"
    layout = ["layout.reward.num_ranks=1", "layout.reward.colocate_with=null"]
    started("+cluster=slurm", f"cluster.components={parts}", "max_steps=12", *layout)
    config, *_, run, _ = prepare(["+experiment=mine"])
    assert (config.cluster.name, config.cluster.components, config.max_steps) == ("local", {}, 10)
    assert {line.partition(": ")[0] for line in run.changes} >= {"cluster.name", "max_steps"}


def test_resume_fresh_uses_the_current_files(mine: Path) -> None:
    run_dir = started()
    EDITS["edited"](mine)
    config, *_, run, _ = prepare(["+experiment=mine", "resume=fresh"])
    assert (config.trainer.lr, run.kind, config.run_dir) == (9e-4, "fresh", f"{run_dir}-2")


def test_a_run_with_unknown_overrides_is_compared_as_a_whole(mine: Path) -> None:
    """A run folder of a version of hpcrl that stored no overrides."""
    run_dir = started()
    text = (run_dir / CONFIG).read_text()
    (run_dir / CONFIG).write_text(text.partition("\n")[2])
    assert prepare(["+experiment=mine"])[3].kind == "resume"
    EDITS["edited"](mine)
    with pytest.raises(ConfigError, match=r"trainer.lr: 0.0001 -> 0.0009"):
        prepare(["+experiment=mine"])


@pytest.mark.parametrize("moved", [True, False])
def test_a_runs_configuration_can_start_another_run(mine: Path, moved: bool) -> None:
    """In another folder under another name, with unchanged texts and numbers."""
    prologue = 'cluster.prologue="export A=\\${HOME}/1e5 \\\\\\${x}"'
    run_dir = started("run_name=1e5", prologue, "rollout.stop=['1e6','yes']", "resume=fresh", "~seed")
    mine.unlink()
    if moved:
        run_dir = run_dir.rename(run_dir.parent.parent / "kept")
    config, *_, run, _ = prepare(["--config", f"{run_dir}/{CONFIG}", "run_name=again"])
    old = parse(yaml.safe_load((run_dir / CONFIG).read_text()))
    assert (run.kind, config.run_name, Path(config.run_dir)) == ("fresh", "again", Path("runs/again").absolute())
    assert old.cluster.prologue == "export A=${HOME}/1e5 \\${x}" and old.run_name == "1e5"
    same = {"run_name": "again", "run_dir": config.run_dir, "resume": "auto"}
    assert config.model_dump() == old.model_dump() | same


@pytest.mark.slow
def test_a_runs_configuration_resumes_it(mine: Path) -> None:
    run_dir = started()
    EDITS["edited"](mine)
    config, *_, run, _ = prepare([f"--config={run_dir}/{CONFIG}", "max_steps=20"])
    assert (run.kind, run.changes, run.ignored) == ("resume", ["max_steps: 10 -> 20"], [])
    assert run.arguments == ("+experiment=mine", "max_steps=20"), "as if the command was repeated with the new word"
    assert config.trainer.lr == 1e-4
    with pytest.raises(ConfigError, match="holds a run of another configuration"):
        prepare([f"--config={run_dir}/{CONFIG}", "trainer.lr=1"])


def test_a_hub_name_resolves_to_the_same_files_at_a_resume(
    mine: Path,
    cache: Path,  # noqa: F811
) -> None:
    snapshot = add(cache, "org/tiny")
    run_dir = started("model.path=org/tiny", *SHORT)
    words = ["+experiment=mine", "model.path=org/tiny", *SHORT]
    assert prepare(words)[3].ignored == []
    newer = shutil.copytree(snapshot, snapshot.with_name(COMMIT[::-1]))
    (snapshot.parents[1] / "refs/main").write_text(newer.name)
    config, *_, run, _ = prepare(words)
    assert (config.model.path, run.changes) == (str(snapshot), [])
    assert run.ignored == [f'model.path: "{snapshot}" -> "org/tiny"']
    assert stored_config(run_dir).model.path == str(snapshot)


def test_sweeps_and_executors_submit_frozen_configurations(
    mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("submitit")
    from hpcrl.launch.executor import HpcrlExecutor, run

    executor = HpcrlExecutor("runs")
    jobs = [executor.submit(run, "+experiment=mine", f"seed={seed}", f"run_name=s{seed}") for seed in (1, 2)]
    EDITS["removed"](mine)
    for seed, job in enumerate(jobs, 1):
        config = load(script_words(job.run_dir))
        assert (config.seed, config.trainer.lr, config.cluster.name) == (seed, 1e-4, "slurm")


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        ("trainer: {lr: 1e-4}\nmax_steps: 0", [], "max_steps: expected at least 1, got 0 (mine.yaml, line 2)"),
        (
            "trainer:\n  betas: [.9, .95]\n  lrr: 2",
            [],
            "trainer.lrr: unknown key; did you mean trainer.lr? (mine.yaml, line 3)",
        ),
        ("data:\n- x", [], "data: expected a section of keys, got ['x'] (mine.yaml, line 1)"),
        (
            "data:\n  train:\n  - x\n  - {path: y, size: big}",
            [],
            "data.train.1.size: expected an integer, got 'big' (mine.yaml, line 4)",
        ),
        ("seed: 1\nseed: 2", [], "--config mine.yaml: cannot be read: while constructing a mapping"),
        ("", [], "--config mine.yaml: expected a configuration, keys with their values"),
        ("- 1", [], "--config mine.yaml: expected a configuration, keys with their values"),
        ("a: [", [], "--config mine.yaml: cannot be read: while parsing"),
        ("defaults: []", [], "--config mine.yaml: a file with `defaults` chooses groups, and is an experiment: put it"),
        ("algorithm: dapo", [], "algorithm: a section of keys, not the name of an option; on the command line give "),
        ("seed: 1", ["--config"], "--config: the file is missing; write --config FILE"),
        ("seed: 1", ["--config=b.yaml"], "--config: mine.yaml and b.yaml; give one file, and additional values"),
        ("seed: 1", ["+experiment=demo"], "+experiment=demo: --config mine.yaml replaces an experiment"),
        (
            "generator: {native: {block_tokens: 48}, engine: vllm}",
            [],
            "generator.native.block_tokens: not read here, the e",
        ),
        ("1: 2\n? [a]\n: 3", [], "--config mine.yaml: "),
    ],
)
def test_an_error_in_a_file_is_one_line_with_its_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        load(["--config", "mine.yaml", *words])
    (line,) = refused.value.problems
    assert line.startswith(said) and "\n" not in line


def test_a_file_replaces_groups_and_overrides_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "my own.yaml"
    file.write_text("trainer: {lr: 1e-4}\nlayout: {trainer: {num_ranks: 3}}\nalgorithm: {pg_clip_high: .3}\n")
    config = load(["--config", str(file)])
    assert (config.run_name, config.trainer.lr, config.algorithm.pg_clip_high) == ("my-own", 1e-4, 0.3)
    assert config.layout.trainer.num_ranks == 3
    config = load(["--config", str(file), "algorithm=dapo", "trainer.lr=2e-4", "seed=${max_steps}", "max_steps=7"])
    assert (config.algorithm.pg_clip_high, config.rollout.filter_std, config.seed) == (0.28, True, 7)
    assert (config.trainer.lr, config.layout.trainer.num_ranks) == (2e-4, 3)
    assert load(["--config", str(file), "layout=single"]).layout.trainer.num_ranks is None


def test_a_copied_configuration_may_state_defaults_of_unused_keys(tmp_path: Path) -> None:
    """A copy of a run's configuration whose first line was removed."""
    file = tmp_path / "mine.yaml"
    file.write_bytes(write_config(load(["+experiment=demo"]).model_dump(mode="json"), None).partition(b"\n")[2])
    assert load(["--config", str(file)]) == load(["+experiment=demo"])


def test_the_documented_files_are_valid_configurations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = (ROOT / "docs/own_experiment.md").read_text().split("```\n")
    (tmp_path / "my.yaml").write_text(blocks[1])
    config = load(["--config", str(tmp_path / "my.yaml")])
    assert config.run_name == "my" and config.trainer.lr == 1e-6 and config.data.val == "test.jsonl"
    experiment = tmp_path / "conf/experiment/my.yaml"
    experiment.parent.mkdir(parents=True)
    experiment.write_text(blocks[5])
    monkeypatch.chdir(tmp_path)
    config = load(["+experiment=my"])
    assert (config.run_name, config.trainer.lr, config.rollout.max_new_tokens) == ("my", 2e-4, 48)
    assert (config.algorithm.advantage_estimator, config.rollout.num_prompts) == ("gae", 64)


VALUES = st.recursive(
    st.none() | st.integers(0, 2) | st.lists(st.integers(0, 1), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)
TREES = st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(old=TREES, new=TREES)
def test_merging_takes_over_exactly_the_given_differences(old: Any, new: Any) -> None:
    keys = {key for key, _ in differences(old, new)}
    assert _merge(old, new, keys) == new
    assert _merge(old, new, set()) == old


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(text=st.text(st.sampled_from("${}\\#:- '\"\n1e5.~\t€"), max_size=12))
def test_any_text_is_read_back_unchanged(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("text") / CONFIG
    file.write_bytes(write_config({"data": {"system_prompt": text or "x"}}, [text]))
    assert load(["--config", str(file)]).data.system_prompt == (text or "x")
    assert read_config_file(file).arguments == (text,)
    assert json.loads(json.dumps([text])) == [text]
