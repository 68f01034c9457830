"""`hpcrl eval` and pipeline=evaluate before anything starts: roles, unread keys, keys of a run, bad input."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpcrl.cluster import slurm
from hpcrl.cluster.layout import RoleLayout
from hpcrl.cluster.slurm import SlurmSilent
from hpcrl.config import ConfigError, load
from hpcrl.config.config_file import write_config
from hpcrl.launch.evaluation import main
from hpcrl.launch.job import _count
from hpcrl.launch.prepare import prepare
from hpcrl.metrics.evaluated import summarised
from hpcrl.metrics.responses import header, partial_file, write_responses
from hpcrl.run_folder import finish_run
from hpcrl.run_folder.changes import read_config
from hpcrl.run_folder.opening import check_run, open_run
from hpcrl.system.exit_codes import ExitCode
from tests import in_process
from tests.metrics.test_responses import response
from tests.test_launch import launch, write_model

EVALUATE = ["pipeline=evaluate", "data.val=task:sort_digits"]
ROWS = [{"prompt": f"row {n}", "answer": str(n), "tag": "ab"[n % 2]} for n in range(6)]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    (path := tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def make_run(folder: Path, words: list[str], steps: list[int]) -> Path:
    """What hpcrl eval reads of a run of these settings: configuration, final model, checkpoints."""
    config = load([*words, f"run_dir={folder}"]).model_dump(mode="json")
    for step in steps:
        (folder / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
    write_model(folder / "hf")
    (folder / "config.yaml").write_bytes(write_config(config, words))
    finish_run(folder, 7, 7, "trained 7 steps")
    return folder


def run(at: Path, *words: str) -> tuple[int, str, list[str]]:
    done = in_process.run(main, *words, at=at)
    return done.returncode, done.stdout, done.stderr.splitlines()


@pytest.mark.parametrize(
    ("words", "roles"),
    [
        ([], {"generator": (1, 2), "reward": (1, 2)}),
        (["layout.trainer.num_ranks=3"], {"generator": (1, 2, 3), "reward": (1, 2, 3)}),
        (["layout.generator.num_ranks=1"], {"generator": (1,), "reward": (1,)}),
        (["layout=single"], {"generator": (0,), "reward": (0,)}),
        (["layout=disaggregated", "env.default.name=scripted"], {"generator": (1, 2), "reward": (3,), "env": (4,)}),
        (["generator.engine=vllm", "layout.generator.tensor_parallel=2"], {"generator": (1, 2), "reward": (1, 2)}),
    ],
)
def test_no_rank_trains_and_generators_take_the_trainers_ranks(words: list[str], roles: dict[str, Any]) -> None:
    config = load([*EVALUATE, *words])
    assert {role: ranks for role, ranks in RoleLayout.from_config(config).ranks.items() if ranks} == {
        "controller": (0,),
        **roles,
    }
    again = load([*EVALUATE, *words, f"layout.generator.num_ranks={len(roles['generator'])}"])
    assert RoleLayout.from_config(again) == RoleLayout.from_config(config)


@pytest.mark.parametrize(
    "word",
    [
        "trainer.lr=1e-3",
        "critic.lr=1e-3",
        "max_steps=5",
        "save_every=1",
        "eval_every=0",
        "rollout.group_size=2",
        "rollout.domains.sort_digits.filter_std=true",
        "data.shuffle=false",
        "data.train=task:sort_digits",
        "trackers=[wandb]",
        "model.dtype=bfloat16",
        "timeline.enabled=true",
        "profile.steps=[1]",
        "keep_best.metric=val/score/mean",
        "resume_from=3",
        "resume_reason=x",
    ],
)
def test_keys_of_training_are_reported(word: str) -> None:
    with pytest.raises(ConfigError) as error:
        load([*EVALUATE, word])
    text = f"{word.partition('=')[0]}: not read here, the evaluate pipeline only evaluates (override {word!r})"
    assert text in error.value.problems


def test_keys_of_training_in_an_experiment_are_left_unread(tmp_path: Path) -> None:
    config = load(["+experiment=demo", "pipeline=evaluate", "rollout.domains.sort_digits.max_new_tokens=8"])
    assert config.data.train is None and config.trainer == load([]).trainer
    assert config.rollout.of_domain("sort_digits").max_new_tokens == 8


@pytest.mark.parametrize("pipeline", ["rlvr", "sft"])
def test_only_an_evaluation_has_no_training_data(pipeline: str) -> None:
    text = f"data.train: null, but the {pipeline} pipeline draws rows from it; give files or a generated source"
    with pytest.raises(ConfigError) as error:
        load([f"pipeline={pipeline}", "data.train=null"])
    assert [line for line in error.value.problems if line.startswith(text)] == error.value.problems
    assert load([*EVALUATE, "data.train=null"]).data.train is None


def test_an_evaluation_needs_validation_data() -> None:
    with pytest.raises(ConfigError) as error:
        load(["pipeline=evaluate"])
    assert error.value.problems == ["data.val: there is nothing to evaluate on; give files or a generated source"]


def test_the_plan_has_no_training(tmp_path: Path) -> None:
    done = launch(*EVALUATE, "dry_run=true", at=tmp_path)
    assert done.returncode == ExitCode.DONE, done.stderr
    plan = {line[:8].strip(): line[8:] for line in done.stdout.splitlines() if line[:8].strip()}
    assert plan["work"] == "evaluate on up to 256 prompts, 1 response(s) each, greedy"
    assert (
        plan["data"] == "validation task:sort_digits (1024 rows)"
        and "trained" not in done.stdout
        and "trainer" not in done.stdout
    )
    assert plan["memory"].startswith("rank 1-2 (generator)") and "saves" not in plan and not [*tmp_path.iterdir()]


def test_data_rewards_and_sampling_are_those_of_the_run(tmp_path: Path, rows: Path) -> None:
    """The run has a domain of which data.val has no row; the file of keys is no stored configuration."""
    words = [f"data.val=[{rows}]", f"data.train=[{{path:{rows},domain:c}},{rows}]", "data.max_prompt_tokens=64"]
    words += ["eval.sets.a={samples:4,temperature:0.5}", "eval.num_prompts=5", "rollout.max_new_tokens=32"]
    words += ["rollout.top_p=0.9", "rollout.domains.c={max_new_tokens:8,filter_std:true}", "generator.max_num_seqs=16"]
    words += ["reward.c.name=numeric", "reward.default={name:exact_match,timeout_s:3}", "trainer.lr=1e-3", "seed=5"]
    words += ["algorithm=gspo", "save_every=3", "layout=single"]
    make_run(tmp_path / "runs" / "one", words, [])
    code, told, errors = run(tmp_path, "one", "dry_run=true", "eval.sets.b.num_prompts=1")
    assert (code, errors) == (ExitCode.DONE, []) and "run     one_eval_step_000007, new" in told
    assert "validation of a: its part of eval.num_prompts, 4 response(s) each at temperature 0.5" in told
    assert "validation of b: 1 prompt(s), 1 response(s) each at temperature 0" in told
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["one"], "a plan writes nothing"


def test_nothing_is_left_of_a_refused_evaluation(tmp_path: Path, rows: Path) -> None:
    folder = make_run(tmp_path / "runs" / "one", [f"data.val={rows}", f"data.train={rows}"], [])
    before = sorted(folder.rglob("*"))
    code, _, errors = run(tmp_path, str(folder), "eval.sets.z.samples=2")
    assert code == ExitCode.BAD_INPUT and any(line.startswith("eval.sets.z.samples: 2 greedy") for line in errors)
    assert sorted(folder.rglob("*")) == before and sorted((tmp_path / "runs").iterdir()) == [folder]


def test_bad_input_is_one_line_with_a_way_out(tmp_path: Path, rows: Path) -> None:
    unfinished = make_run(tmp_path / "unfinished", [], [2, 4])
    (unfinished / "hf" / "config.json").unlink()
    write_model(tmp_path / "untold" / "model")
    (tmp_path / "untold" / "model" / "tokenizer.json").unlink()
    write_model(tmp_path / "whole")
    (make_run(tmp_path / "goes_on", [], [8]) / "finished.json").unlink()  # its hf/ is of an earlier end
    (tmp_path / "nothing").mkdir()
    make_run(
        tmp_path / "evaluation", ["pipeline=evaluate", "model.path=whole", "data.train=null", f"data.val={rows}"], []
    )
    (tmp_path / "empty.jsonl").write_text("")
    short = ["data.max_prompt_tokens=64", "rollout.max_new_tokens=32"]
    val = f"data.val={rows}"
    for words, line in (
        (["nothing"], "nothing: neither a model (no config.json) nor a run (no config.yaml); name one of them"),
        (["gone"], "gone: no such folder, and no run of this name in runs/"),
        (["whole", "--step", "3"], "--step 3: whole is not a run folder (no config.yaml); leave --step out"),
        (["unfinished"], "unfinished: the run has no validation data (data.val); give data.val=FILE"),
        (
            ["unfinished", val],
            "unfinished: no final model (hf/): the run has not ended; give --step N (there are: 2, 4)",
        ),
        (["unfinished", val, "--step", "3"], "--step 3: unfinished has no checkpoint of this step; there are: 2, 4"),
        (["unfinished", val, "--step", "last"], "--step last: expected a step's number or best"),
        (["unfinished", val, "--step", "best"], "--step best: unfinished names no best checkpoint (keep_best.metric)"),
        (["goes_on", val], "goes_on: no final model (hf/): the run has not ended; give --step N (there are: 8)"),
        (["evaluation"], "evaluation: the run has no model of its own, it only evaluates whole; give this folder"),
        (["untold/model", val, *short], "model.path: no tokenizer in untold/model (tokenizer.json)"),
        (["whole", "data.val=empty.jsonl", *short], "data.val: empty.jsonl: holds no rows"),
        (["whole", *short], "data.val: there is nothing to evaluate on; give files or a generated source"),
        (["whole", val, "eval.samples=2", *short], "eval.samples: 2 greedy responses to a prompt are all equal; set"),
    ):
        code, told, errors = run(tmp_path, *words)
        assert (code, told) == (ExitCode.BAD_INPUT, "")
        assert any(error.removeprefix("hpcrl eval: ").startswith(line) for error in errors), (words, errors)
    assert not (tmp_path / "runs").exists()


def test_the_best_step_is_that_of_the_run(tmp_path: Path, rows: Path) -> None:
    folder = make_run(tmp_path / "run", [f"data.val={rows}"], [2, 4])
    best = {"step": 2, "metric": "val/score/mean", "mode": "max", "value": 0.5}
    (folder / "checkpoints" / "BEST").write_text(json.dumps(best))
    code, _, errors = run(tmp_path, "run", "--step", "best", "dry_run=true")
    assert code == ExitCode.BAD_INPUT and "the checkpoint of step 2 is not converted yet" in errors[0]


def test_a_step_of_a_branch_is_another_evaluation(tmp_path: Path, rows: Path) -> None:
    """Else the results of the same step before the branch would be shown."""
    words = [f"data.val={rows}", f"data.train={rows}", "reward.default.name=exact_match"]
    words += ["data.max_prompt_tokens=64", "rollout.max_new_tokens=32"]
    folder = make_run(tmp_path / "run", words, [])
    attempts: list[dict[str, Any]] = [{"attempt": 1}, {"attempt": 2, "branch": {"from": 6}}]
    for branch, name in ((None, ""), ({"from": 6}, "_branch_3"), ({"from": 7}, "_branch_2")):
        added = [] if branch is None else [*attempts[1:], {"attempt": 3, "branch": branch}]
        (folder / "facts.json").write_text(json.dumps({"attempts": [*attempts[:1], *added]}))
        code, told, errors = run(tmp_path, "run", "dry_run=true")
        assert (code, errors) == (ExitCode.DONE, []), errors
        assert f"run     run_eval_step_000007{name}, new" in told


def test_a_finished_evaluation_shows_its_results(tmp_path: Path, rows: Path) -> None:
    write_model(tmp_path / "model")
    words = [f"data.val={rows}", "reward.default.name=exact_match", "eval.num_prompts=1"]
    words += ["data.max_prompt_tokens=64", "rollout.max_new_tokens=32"]
    made = ["run_name=model_eval", "pipeline=evaluate", f'model.path="{tmp_path}/model"']
    made += ["layout.generator.colocate_with=null", "layout.generator.num_ranks=1", *words]
    folder = tmp_path / "runs" / "model_eval"
    folder.mkdir(parents=True)
    config = prepare([*made, f"run_dir={folder}"])[0].model_dump(mode="json")
    (folder / "config.yaml").write_bytes(write_config(config, made))
    finish_run(folder, 0, config["max_steps"], "evaluated 1 responses to 1 prompts")
    head = header("model", 0, {"a": {"temperature": 0.0, "samples": 1}})
    (folder / "evaluation.json").write_text(json.dumps(summarised(head, [response("a", 0, 0, 1.0)])))
    code, told, errors = run(tmp_path, f"{tmp_path}/model", *words)
    assert (code, errors) == (ExitCode.DONE, [])
    assert "finished: evaluated 1 responses to 1 prompts; choose another run_name or resume=fresh" in told
    assert told.splitlines()[-2].split() == [
        "set",
        "prompts",
        "samples",
        "score",
        "pass@k",
        "maj@n",
        "length",
        "truncated",
        "errors",
    ]
    assert told.splitlines()[-1].split() == ["a", "1", "1", "1.000", "-", "-", "4.0", "0.0%", "0"]
    code, _, errors = run(tmp_path, f"{tmp_path}/model", *words, "eval.temperature=0.5")
    assert code == ExitCode.BAD_INPUT and errors[-1].strip() == "eval.temperature: 0.0 -> 0.5"


def test_the_keys_of_a_run_make_the_same_evaluation(tmp_path: Path, rows: Path, monkeypatch: Any) -> None:
    """The file that hpcrl eval writes, read by the launch."""
    words = [f"data.val={rows}", f"data.train={rows}", "reward.a.name=numeric", "reward.b.name=exact_match"]
    words += ["rollout.stop=['\\n']", "eval.temperature=0.7", "eval.samples=3", "rollout.min_p=0.1"]
    words += ["data.system_prompt='\\${x} and # more'", "generator.max_num_seqs=8"]
    make_run(tmp_path / "one", words, [])
    seen: list[list[str]] = []
    monkeypatch.setattr("hpcrl.launch.evaluation.start", lambda argv: seen.append(list(argv)) or ExitCode.DONE)
    assert run(tmp_path, "one")[0] == ExitCode.DONE
    monkeypatch.chdir(tmp_path)
    now, then = load(seen[0]), load(words)
    for section in ("reward", "env", "generator", "judge", "seed"):
        assert getattr(now, section) == getattr(then, section), section
    assert now.data.system_prompt == "${x} and # more" and now.data.val == str(rows) and now.data.train is None
    assert now.eval == then.eval and now.rollout.stop == then.rollout.stop != [] and now.rollout.min_p == 0.1
    assert now.model.path == "one/hf" and now.run_name == "one_eval_step_000007"
    assert yaml.safe_load((tmp_path / "runs/one_eval_step_000007/evaluated/keys.yaml").read_text())["seed"] == 0


def test_stored_responses_count_as_progress_of_a_job(tmp_path: Path) -> None:
    """Else an evaluation longer than five jobs would not be requeued."""
    words = [*EVALUATE, f"run_dir={tmp_path}"]
    (tmp_path / "config.yaml").write_bytes(write_config(load(words).model_dump(mode="json"), words))
    assert read_config(tmp_path)["pipeline"] == "evaluate"
    counted = []
    for count in (1, 1, 2, 2):
        write_responses(
            partial_file(tmp_path), header("m", 0, {}), [response("a", row, 0, 0.0) for row in range(count)]
        )
        counted.append(_count(tmp_path, "short", None))
    assert counted == [1, 2, 1, 2]


def test_a_job_without_slurm_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent() -> str:
        raise SlurmSilent("scontrol: no answer")

    monkeypatch.setattr(slurm, "cluster_name", silent)
    make_run(tmp_path / "runs" / "sft", ["data.val=task:sort_digits"], [])
    before = sorted(tmp_path.rglob("*"))
    code, told, lines = run(tmp_path, "runs/sft", "+cluster=slurm")
    assert (code, told) == (ExitCode.BAD_INPUT, "") and sorted(tmp_path.rglob("*")) == before
    assert lines == ["hpcrl eval: cluster=slurm: scontrol: no answer; on a machine without Slurm, leave it out"]


def test_a_runs_model_without_data_names_the_evaluation_of_the_run(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "sft", ["data.val=task:sort_digits"], [])
    code, _, (line,) = run(tmp_path, "runs/sft/hf")
    assert code == ExitCode.BAD_INPUT and "give data.val=FILE, or evaluate the run on its own data: " in line
    assert line.endswith("eval runs/sft")
    _, _, lines = run(tmp_path, "runs/sft/hf", "data.val=task:sort_digits", "dry_run=true")
    assert "own data" not in "".join(lines)


def test_an_evaluation_of_weights_that_changed_is_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    config = load(["pipeline=evaluate", "data.val=task:sort_digits", f"model.path={model}"]).model_dump(mode="json")
    weights = next(model.glob("*.safetensors"))
    folder = open_run(config, tmp_path / "run", "auto").run_dir
    finish_run(folder, 0, config["max_steps"], "evaluated")
    config |= {"run_dir": str(folder)}
    assert check_run(config, folder, "auto").kind == "finished"
    content = weights.read_bytes()
    weights.write_bytes(content)
    assert check_run(config, folder, "auto").kind == "finished", "copied again"
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    text = f"model.path: the weights in {model} have changed since this run began ({weights.name}); put them back"
    with pytest.raises(ConfigError, match=re.escape(text)):
        check_run(config, folder, "auto")
    assert check_run(config, folder, "fresh").kind == "fresh"
    facts = json.loads((folder / "facts.json").read_text())
    del facts["attempts"][0]["weights"]  # of an earlier version
    (folder / "facts.json").write_text(json.dumps(facts))
    assert check_run(config, folder, "auto").kind == "finished"
