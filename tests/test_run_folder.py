"""The run folder: fresh, resumed, finished, refused, and with a single owner."""

from __future__ import annotations

import functools
import json
import os
import random
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpcrl.commands import status
from hpcrl.config import Config, ConfigError
from hpcrl.run_folder import (
    MAY_CHANGE,
    SupersededError,
    check_owner,
    check_run,
    close_run,
    division_keys,
    finish_run,
    open_run,
)
from hpcrl.run_folder.models import weights_of
from hpcrl.spec.kinds import TrainEngineSpec
from hpcrl.spec.tables import TRAIN_ENGINES
from hpcrl.system.exit_codes import ExitCode

CONFIG = {
    "run_name": "demo",
    "max_steps": 10,
    "save_every": 5,
    "rollout": {"group_size": 8, "stop": ["\n"]},
    "trainer": {"betas": (0.9, 0.999), "lr": 1e-6},
    "reward": {"maths": {"name": "math", "options": {"precision": 4}}},
    "timeouts": {"start_s": 300.0},
    "eval": {},
}

WHOLE_MODELS = TrainEngineSpec(about="A plug-in.", make="none:none", lora=True, exchanges_state=True)
PLUG_IN = f"{__name__}:WHOLE_MODELS"

OPEN = """
import json, sys
from hpcrl.config import ConfigError
from hpcrl.run_folder import open_run
try:
    state = open_run(json.loads(sys.argv[1]), sys.argv[2], "auto")
    print("got", state.attempt, flush=True)
except ConfigError as error:
    print(error, flush=True)
sys.stdin.read()
"""


def launch(run: Path, config: dict = CONFIG) -> subprocess.Popen[str]:
    """Another process that opens the run, prints the result and stays until its stdin closes."""
    command = [sys.executable, "-c", OPEN, json.dumps(config), str(run)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def said_by(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        process.communicate("")


def changed(**values) -> dict:
    return CONFIG | values


def test_a_run_starts_fresh_resumes_and_finishes(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "demo"
    first = open_run(CONFIG, run, "auto")
    assert (first.kind, first.attempt, first.run_dir) == ("fresh", 1, run)
    stored = yaml.safe_load((run / "config.yaml").read_text())
    assert stored == CONFIG | {"run_dir": str(run), "trainer": {"betas": [0.9, 0.999], "lr": 1e-6}}
    close_run(run, 1)

    second = open_run(CONFIG, run, "auto")
    assert (second.kind, second.attempt, second.changes) == ("resume", 2, [])
    finish_run(run, 10, 10, "max_steps reached")
    close_run(run, 2)

    third = open_run(CONFIG, run, "auto")
    assert third.kind == "finished" and third.finished["step"] == 10
    assert third.finished["reason"] == "max_steps reached"
    longer = open_run(changed(max_steps=20), run, "auto")
    assert (longer.kind, longer.attempt) == ("resume", 3) and not (run / "finished.json").exists()
    assert longer.changes == ["max_steps: 10 -> 20"]

    facts = json.loads((run / "facts.json").read_text())["attempts"]
    assert [entry["attempt"] for entry in facts] == [1, 2, 3] and facts[2]["changes"] == longer.changes
    assert facts[0]["versions"]["torch"] and facts[0]["host"] and facts[0]["cpu"] and facts[0]["num_cpus"] >= 1


def test_a_different_configuration_is_refused_with_the_difference(tmp_path: Path) -> None:
    run = tmp_path / "demo"
    close_run(run, open_run(CONFIG, run, "auto").attempt)
    other = changed(
        rollout={"group_size": 16, "stop": ["\n"]},
        trainer={"lr": 2e-6},
        reward={"maths": {"name": "math"}},
        max_steps=99,
        timeouts={"start_s": 5.0},
    )
    with pytest.raises(ConfigError) as refused:
        open_run(other, run, "auto")
    assert refused.value.problems[0].startswith(f"{run} holds a run of another configuration")
    assert refused.value.problems[1:] == [
        "  rollout.group_size: 8 -> 16",
        "  reward.maths.options: (not set) -> {}",
        "  trainer.lr: 1e-06 -> 2e-06",
        "  reward.maths.options.precision: 4 -> (not set)",
    ]
    # Negative control: the permitted part of the same difference resumes.
    state = open_run(changed(max_steps=99, timeouts={"start_s": 5.0}), run, "auto")
    assert state.changes == ["max_steps: 10 -> 99", "timeouts.start_s: 300.0 -> 5.0"]
    assert yaml.safe_load((run / "config.yaml").read_text())["max_steps"] == 99


def test_different_chat_template_variables_are_refused(tmp_path: Path) -> None:
    run = tmp_path / "demo"
    close_run(run, open_run(changed(data={"chat_template_kwargs": {"enable_thinking": False}}), run, "auto").attempt)
    with pytest.raises(ConfigError) as refused:
        open_run(changed(data={"chat_template_kwargs": {"enable_thinking": True}}), run, "auto")
    assert refused.value.problems[1:] == ["  data.chat_template_kwargs.enable_thinking: false -> true"]


@pytest.mark.parametrize("section", ["model", "reference"])
def test_a_different_model_in_the_same_folder_is_refused(tmp_path: Path, section: str) -> None:
    run, model = tmp_path / "demo", tmp_path / "model"
    model.mkdir()

    def holds(**keys: object) -> None:
        (model / "config.json").write_text(json.dumps({"model_type": "qwen2", "num_hidden_layers": 2} | keys))

    def start() -> None:
        close_run(run, open_run(changed(**{section: {"path": str(model)}}), run, "auto").attempt)

    holds(rope_scaling={"factor": 2.0})
    start()
    holds(rope_scaling={"factor": 4.0}, num_hidden_layers=1)
    for _ in range(2):  # the refused attempt changes nothing
        with pytest.raises(ConfigError) as refused:
            start()
        assert refused.value.problems == [
            f"{section}.path: {model}/config.json is of another model than when the run began (num_hidden_layers: "
            "2 -> 1, rope_scaling.factor: 2.0 -> 4.0); put that model back, or use another run_name or resume=fresh"
        ]
    holds(rope_scaling={"factor": 2.0}, transformers_version="9.9")  # of another writer
    start()
    (model / "config.json").unlink()  # told where the model is read
    start()
    assert [entry["attempt"] for entry in json.loads((run / "facts.json").read_text())["attempts"]] == [1, 2, 3]


@pytest.mark.parametrize("section", ["reference", "teacher", "judge", "reward_model"])
def test_other_weights_of_a_frozen_model_are_refused(tmp_path: Path, section: str) -> None:
    run, file = tmp_path / "demo", tmp_path / "model" / "model-00001-of-00002.safetensors"
    file.parent.mkdir()
    content = bytearray(random.Random(0).randbytes(1 << 20))
    config = changed(**{section: {"path": str(file.parent)}})

    def start() -> None:
        close_run(run, open_run(config, run, "auto").attempt)

    file.write_bytes(content)
    start()
    replaced = random.Random(1).randbytes(1 << 20)  # of the same size
    for other in (replaced, bytes(content[:-1]), bytes(content) + b"\0"):
        file.write_bytes(other)
        with pytest.raises(ConfigError) as refused:
            start()
        assert refused.value.problems == [
            f"{section}.path: the weights in {file.parent} have changed since this run began ({file.name}); put them "
            "back, or use another run_name or resume=fresh"
        ]
    file.write_bytes(content)  # put back, with another time
    start()
    file.unlink()  # told where the model is read
    start()


def test_other_weights_of_the_first_policy_count_only_as_reference(tmp_path: Path) -> None:
    """A resumed run has the policy's weights from its checkpoint."""
    for kl, refused in ((0.0, False), (0.1, True)):
        run, model = tmp_path / f"demo{kl}", tmp_path / f"model{kl}"
        model.mkdir()
        config = changed(model={"path": str(model)}, algorithm={"kl_loss_coef": kl})
        (model / "model.safetensors").write_bytes(b"first")
        close_run(run, open_run(config, run, "auto").attempt)
        (model / "model.safetensors").write_bytes(b"other")
        if refused:
            with pytest.raises(ConfigError, match=r"model\.path: the weights in"):
                open_run(config, run, "auto")
        else:
            close_run(run, open_run(config, run, "auto").attempt)


def test_other_weights_of_the_first_policy_count_as_its_own_teacher(tmp_path: Path) -> None:
    run, model = tmp_path / "demo", tmp_path / "model"
    model.mkdir()
    config = changed(pipeline="distill", model={"path": str(model)}, teacher={"source": "policy", "sync_every": 9})
    (model / "model.safetensors").write_bytes(b"first")
    close_run(run, open_run(config, run, "auto").attempt)
    (model / "model.safetensors").write_bytes(b"other")
    with pytest.raises(ConfigError, match=r"model\.path: the weights in"):
        open_run(config, run, "auto")
    unread = changed(teacher={"source": "policy", "path": str(model), "paths": {"math": str(model)}})
    assert weights_of(unread) == {}, "nothing reads these folders"


def test_resume_fresh_takes_the_next_free_name(tmp_path: Path) -> None:
    names = [open_run(changed(max_steps=n), tmp_path / "demo", "fresh").run_dir.name for n in (1, 2, 3)]
    assert names == ["demo", "demo-2", "demo-3"]
    assert check_run(CONFIG, tmp_path / "demo", "fresh").run_dir.name == "demo-4"
    assert sorted(p.name for p in tmp_path.iterdir()) == names


@pytest.mark.slow
def test_a_run_killed_in_an_interactive_job_is_resumed_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job stays alive, so only the process shows the end; a batch job's process shows nothing."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("PATH", "")  # Slurm cannot be asked
    for name, config in (("local", CONFIG), ("slurm", changed(cluster={"name": "slurm"}))):
        process = launch(tmp_path / name, config)
        assert said_by(process) == "got 1"
        if name == "local":
            with pytest.raises(ConfigError, match=rf"is held by pid {process.pid} on host"):
                open_run(config, tmp_path / name, "auto")
        process.kill()
        end(process)
    assert open_run(CONFIG, tmp_path / "local", "auto").attempt == 2
    with pytest.raises(ConfigError, match=r"is held by job 7 .*Slurm cannot tell whether it lives"):
        open_run(config, tmp_path / "slurm", "auto")


def test_check_run_writes_nothing(tmp_path: Path) -> None:
    assert check_run(CONFIG, tmp_path / "a" / "b", "auto").kind == "fresh"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("make", ["foreign folder", "file", "file above", "damaged config"])
def test_an_unusable_run_folder_is_named(tmp_path: Path, make: str) -> None:
    run = tmp_path / "demo"
    if make == "foreign folder":
        run.mkdir()
        (run / "thesis.tex").write_text("precious")
        said = "is not a run folder: no config.yaml, but thesis.tex"
    elif make == "file":
        run.write_text("")
        said = "is not a folder"
    elif make == "file above":
        run.write_text("")
        run = run / "below"
        said = "demo is not a folder"
    else:
        close_run(run, open_run(CONFIG, run, "auto").attempt)
        (run / "config.yaml").write_text("a: [1,")
        said = "config.yaml cannot be read"
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=said) as refused:
        open_run(CONFIG, run, "auto")
    assert len(refused.value.problems) == 1 and "\n" not in refused.value.problems[0]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["finished.json", "facts.json", "owners/0001", "slurm/submitted.json"])
@pytest.mark.parametrize(
    "content",
    [
        b'{"since": "to',
        b"\xff\xfe",
        b"[1]",
        b"null",
        b'{"jobs": [null], "attempts": 3, "since": "today"}',
        b'{"jobs": [-1], "attempts": 3, "since": "today", "pid": -1, "host": "h", "process_start": 1.5}',
        b'{"jobs": [0], "attempts": 3, "since": "today", "pid": 99999999999999, "host": "h", "process_start": 1.5}',
        b'{"jobs": [0], "attempts": 3, "since": "today", "job": -7, "restarts": 0}',
        b"[" * 100_000,
        None,
    ],
)
def test_a_damaged_record_is_named_and_not_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes | None
) -> None:
    run = tmp_path / "demo"
    opened = open_run(CONFIG, run, "auto")
    finish_run(run, 10, 10, "done")
    close_run(run, opened.attempt)
    path = run / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(content) if content is not None else path.mkdir()
    before = {entry: entry.read_bytes() for entry in run.rglob("*") if entry.is_file()}
    with pytest.raises(ConfigError) as refused:
        open_run(changed(max_steps=20), run, "auto")
    (line,) = refused.value.problems
    assert line.startswith(f"{path} cannot be read: ") and "\n" not in line and "remove it" in line
    assert {entry: entry.read_bytes() for entry in run.rglob("*") if entry.is_file()} == before
    code = status.main([str(run)])
    assert code == (0 if name == "facts.json" else ExitCode.BAD_INPUT)  # of which status says nothing
    assert capsys.readouterr().err in ("", f"hpcrl: {line}\n")


def test_an_unwritable_location_is_named() -> None:
    with pytest.raises(ConfigError, match=r"run folder /proc/demo cannot be (written|made)"):
        open_run(CONFIG, "/proc/demo", "auto")


def test_a_name_that_is_not_a_valid_file_name_is_named(tmp_path: Path) -> None:
    """Also below a folder that does not exist yet."""
    with pytest.raises(ConfigError, match=r"cannot be created: a name of 300 characters, limit 255"):
        check_run(CONFIG, tmp_path / "runs" / ("x" * 300), "auto")


def test_a_live_owner_is_named_and_a_dead_one_is_replaced(tmp_path: Path) -> None:
    run = tmp_path / "demo"
    holder = launch(run)
    assert said_by(holder) == "got 1"
    with pytest.raises(ConfigError, match=rf"is held by pid {holder.pid} on host .* since .*attempt 1"):
        open_run(CONFIG, run, "auto")
    holder.kill()
    holder.wait()
    assert open_run(CONFIG, run, "auto").attempt == 2
    check_owner(run, 2)
    with pytest.raises(SupersededError, match=r"attempt 1 .* may not commit: attempt 2 now owns the run"):
        check_owner(run, 1)


def test_a_removed_folder_does_not_count_as_a_takeover(tmp_path: Path) -> None:
    opened = open_run(CONFIG, tmp_path / "run", "auto")
    check_owner(opened.run_dir, opened.attempt)
    shutil.rmtree(opened.run_dir)
    with pytest.raises(FileNotFoundError, match="the run folder was removed or moved while the run used it"):
        check_owner(opened.run_dir, opened.attempt)


def test_a_reused_pid_does_not_count_as_the_owner(tmp_path: Path) -> None:
    run = tmp_path / "demo"
    open_run(CONFIG, run, "auto")
    record = json.loads((run / "owners/0001").read_text())
    with pytest.raises(ConfigError, match=f"held by pid {os.getpid()}"):
        open_run(CONFIG, run, "auto")
    (run / "owners/0001").write_text(json.dumps(record | {"process_start": record["process_start"] - 60}))
    assert open_run(CONFIG, run, "auto").attempt == 2


def test_an_owner_on_another_host_counts_as_alive(tmp_path: Path) -> None:
    run = tmp_path / "demo"
    open_run(CONFIG, run, "auto")
    record = json.loads((run / "owners/0001").read_text())
    (run / "owners/0001").write_text(json.dumps(record | {"host": "node17", "pid": 2**22}))
    with pytest.raises(ConfigError, match=r"on host node17 .*; if that process is gone, remove .*owners/0001"):
        open_run(CONFIG, run, "auto")


@pytest.mark.slow
def test_a_run_killed_before_its_first_configuration_is_written_starts_fresh(tmp_path: Path) -> None:
    run = tmp_path / "demo"
    (run / "owners").mkdir(parents=True)
    (run / "owners/0001").write_text("")  # made, never written
    (run / ".config.yaml.tmp").write_text("run_na")
    assert (open_run(CONFIG, run, "auto").kind, check_run(CONFIG, tmp_path / "x", "auto").attempt) == ("fresh", 0)


@pytest.mark.slow
def test_of_many_concurrent_launches_one_opens_the_run(tmp_path: Path) -> None:
    run = tmp_path / "demo"
    dead = launch(run)
    assert said_by(dead) == "got 1"
    dead.kill()
    dead.wait()
    launches = [launch(run) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        said = list(threads.map(said_by, launches))
    end(*launches)
    assert said.count("got 2") == 1, said
    winner = launches[said.index("got 2")]
    assert all(f"is held by pid {winner.pid} " in line for line in said if line != "got 2"), said


def test_the_run_folder_module_imports_no_torch() -> None:
    code = "import sys, hpcrl.run_folder; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_permitted_keys_exist_and_are_documented() -> None:
    documented = (Path(__file__).parents[1] / "docs/run_folder.md").read_text()
    values = Config().model_dump()
    engines = [name for name, spec in TRAIN_ENGINES.items() if spec.selectable]
    trained_by = [values | {"trainer": values["trainer"] | {"engine": name}} for name in engines]
    for key in {*MAY_CHANGE, *(key for given in trained_by for key in division_keys(given))}:
        functools.reduce(lambda at, name: at[name], key.split("."), values)  # it exists
        section = key.rpartition(".")[0]
        assert f"`{key}`" in documented or (section.count(".") and f"`{section}`" in documented), key


def test_a_key_below_a_permitted_key_may_change(tmp_path: Path) -> None:
    """A key that only begins like it may not."""
    run = tmp_path / "demo"
    config = CONFIG | {"layout": {"trainer": {"num_ranks": 2}}, "generator": {"max_num_seqs": 8, "dtype": "float32"}}
    close_run(run, open_run(config, run, "auto").attempt)
    moved = config | {"layout": {"trainer": {"num_ranks": 4}}, "generator": {"max_num_seqs": 4, "dtype": "float32"}}
    assert check_run(moved, run, "auto").changes == [
        "generator.max_num_seqs: 8 -> 4",
        "layout.trainer.num_ranks: 2 -> 4",
    ]
    other = config | {"generator": {"max_num_seqs": 8, "max_num_seqs_2": 1, "dtype": "bfloat16"}}
    with pytest.raises(ConfigError) as refused:
        check_run(other, run, "auto")
    assert len(refused.value.problems) == 3, refused.value.problems


def test_only_the_export_of_mtp_layers_may_change(tmp_path: Path) -> None:
    run = tmp_path / "demo"
    close_run(run, open_run(CONFIG | {"model": {"mtp": "keep"}}, run, "auto").attempt)
    assert check_run(CONFIG | {"model": {"mtp": "drop"}}, run, "auto").changes == ['model.mtp: "keep" -> "drop"']
    with pytest.raises(ConfigError) as refused:
        check_run(CONFIG | {"model": {"mtp": "train"}}, run, "auto")
    assert refused.value.problems[1:] == ['  model.mtp: "keep" -> "train"']


def test_another_training_engine_may_continue_a_run(tmp_path: Path) -> None:
    """With keys of the old and the new engine's section, also for the critic; but not with other keys."""
    run = tmp_path / "demo"
    split = {"trainer": {"engine": "fsdp2", "fsdp2": {"packing": "require"}}}
    close_run(run, open_run(changed(**split), run, "auto").attempt)
    own = {"tensor_parallel": 2, "aux_loss": 0.1}
    moved = {"trainer": {"engine": "megatron", "megatron": own}, "critic": {"engine": "deepspeed"}}
    assert sorted(check_run(changed(**moved), run, "auto").changes) == [
        'critic.engine: null -> "deepspeed"',
        'trainer.engine: "fsdp2" -> "megatron"',
        'trainer.fsdp2.packing: "require" -> "auto"',
        "trainer.megatron.aux_loss: 0.0 -> 0.1",
        "trainer.megatron.tensor_parallel: 1 -> 2",
    ]
    for other in ({"engine": "fsdp2"}, {"engine": "megatron", "lr": 0.5}, {"engine": "megatron", "deepspeed": own}):
        with pytest.raises(ConfigError, match="holds a run of another configuration"):
            check_run(changed(trainer=other), run, "auto")


def test_another_engine_of_one_role_frees_no_key_of_the_other(tmp_path: Path) -> None:
    """The critic's move leaves the policy's section as it is."""
    run = tmp_path / "demo"
    adapters = {"engine": "fsdp2", "lora": {"rank": 8}}
    close_run(run, open_run(changed(trainer=adapters), run, "auto").attempt)
    moved = changed(trainer=adapters, critic={"engine": "megatron"})
    assert check_run(moved, run, "auto").changes == ['critic.engine: null -> "megatron"']
    with pytest.raises(ConfigError, match=r"trainer.fsdp2.aux_loss: .* -> 0.1"):
        check_run(changed(trainer=adapters | {"fsdp2": {"aux_loss": 0.1}}, critic={"engine": "megatron"}), run, "auto")


def test_a_teacher_has_no_state_that_another_engine_must_take_over(tmp_path: Path) -> None:
    run = tmp_path / "demo"
    of_policy: dict[str, Any] = {"engine": "fsdp2", "optimizer": "muon"}
    close_run(run, open_run(changed(trainer=of_policy), run, "auto").attempt)
    sections = of_policy | {"deepspeed": {"zero_stage": 2, "attention": "eager"}}
    moved = changed(trainer=sections, teacher={"engine": "deepspeed"})
    assert any(line.startswith("teacher.engine: ") for line in check_run(moved, run, "auto").changes)
    with pytest.raises(ConfigError, match=r"trainer.fsdp2.aux_loss: .* -> 0.1"):
        check_run(
            changed(trainer=of_policy | {"fsdp2": {"aux_loss": 0.1}}, teacher={"engine": "megatron"}), run, "auto"
        )


def test_adapters_may_move_to_any_engine_that_can_train_them(tmp_path: Path) -> None:
    engines = ("fsdp2", "deepspeed", "megatron")
    for first in engines:
        run = tmp_path / first
        close_run(run, open_run(changed(trainer={"engine": first, "lora": {"rank": 8}}), run, "auto").attempt)
        for then in set(engines) - {first}:
            moved = changed(trainer={"engine": then, "lora": {"rank": 8}})
            assert check_run(moved, run, "auto").changes == [f'trainer.engine: "{first}" -> "{then}"']


@pytest.mark.parametrize(
    ("trainer", "engine", "why"),
    [
        ({"optimizer": "muon"}, "deepspeed", "the run has trainer.optimizer=muon, and only AdamW's state goes"),
        (
            {"lora": {"rank": 8}},
            PLUG_IN,
            rf"adapters \(trainer.lora.rank=8\), which {PLUG_IN} does not exchange",
        ),
        ({}, "fake", "fake exchanges no checkpoints with other engines"),
    ],
)
def test_an_engine_that_cannot_take_over_the_state_is_refused(
    tmp_path: Path, trainer: dict, engine: str, why: str
) -> None:
    """In a line with both engines and the reason, also if the key that is the reason was changed, too."""
    run = tmp_path / "demo"
    close_run(run, open_run(changed(trainer={"engine": "fsdp2", **trainer}), run, "auto").attempt)
    for others in (trainer, {}):
        with pytest.raises(ConfigError, match="or resume=fresh") as refused:
            check_run(changed(trainer={"engine": engine, **others}), run, "auto")
        lines = [line for line in refused.value.problems if line.startswith("  trainer.engine: ")]
        (line,) = lines
        assert re.fullmatch(rf'  trainer.engine: "fsdp2" -> "{engine}": .*{why}.*', line), line


def test_a_run_of_an_earlier_version_resumes(tmp_path: Path) -> None:
    """A key missing in its configuration has its default; a key that this version no longer has is named."""
    run = tmp_path / "demo"
    close_run(run, open_run(CONFIG, run, "auto").attempt)
    stored = yaml.safe_load((run / "config.yaml").read_text())
    del stored["rollout"]["stop"], stored["eval"]
    (run / "config.yaml").write_text(yaml.safe_dump(stored))
    assert check_run(changed(rollout={"group_size": 8}), run, "auto").kind == "resume"
    (run / "config.yaml").write_text(yaml.safe_dump(stored | {"gone": 1}))
    with pytest.raises(ConfigError, match="gone: 1 -> "):
        check_run(changed(rollout={"group_size": 8}), run, "auto")


@pytest.mark.parametrize("record", ["owners/0001", "slurm/submitted.json"])
def test_a_job_of_another_cluster_may_be_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: str) -> None:
    """Here its job id is unknown or belongs to another job."""
    run, program = tmp_path / "demo", tmp_path / "bin" / "scontrol"
    close_run(run, open_run(CONFIG, run, "auto").attempt)
    program.parent.mkdir()
    answers = 'echo "ClusterName = here"', 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1'
    program.write_text(f'#!/bin/sh\nif [ "$2" = config ]; then {answers[0]}; else {answers[1]}; fi\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    (run / "slurm").mkdir()
    for cluster in ("here", "there"):
        told = {"job": 7, "restarts": 0, "since": "then", "jobs": [7], "cluster": cluster}
        (run / record).write_text(json.dumps(told))
        if cluster == "here":
            assert check_run(CONFIG, run, "auto").kind == "resume"
        else:
            with pytest.raises(ConfigError, match=f"job 7.*, on cluster there, but this is here; .* remove {run}"):
                check_run(CONFIG, run, "auto")


def test_status_lists_runs_of_sweeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b", "a/seed-1", "a/seed-0", "notes/x/deep"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    for name in ("b", "a/seed-1", "a/seed-0", "notes/x/deep"):
        (tmp_path / "runs" / name / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    assert status.main([]) == ExitCode.DONE
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["a/seed-0", "a/seed-1", "b"]
    assert status.main(["a/seed-1"]) == ExitCode.DONE
    assert "runs/a/seed-1" in capsys.readouterr().out
