"""A package installed only for these tests adds one part of every kind, without changes in hpcrl."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.metrics.log import read_metrics
from hpcrl.rollout.store import RolloutReader
from hpcrl.system.exit_codes import ExitCode
from tests.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

EXAMPLE = Path(__file__).parent / "hpcrl_example"
WORDS = [
    "pipeline=curriculum",
    "algorithm=null",
    "algorithm.advantage_estimator=leave_one_out",
    "algorithm.shrink=0.25",
    "reward.default.name=vowels",
    "reward.default.options.most=4",
    "env={sort_digits: null, other: {name: echo}}",
    "trainer.engine=noisy",
    "trainer.noisy.factor=2",
    "generator.engine=counting",
    "layout=single",
    "layout.witness.colocate_with=trainer",
    "rollout.num_prompts=4",
    "rollout.group_size=2",
    "rollout.max_new_tokens=8",
    "data.train=[{path: 'task:sort_digits'}, {path: 'task:sort_digits', domain: other}]",
    "save_every=1",
    "max_steps=2",
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of installed packages with the example in it, as pip lays it out."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(EXAMPLE, folder / "hpcrl_example", ignore=shutil.ignore_patterns("__pycache__"))
    info = folder / "hpcrl_example-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hpcrl-example\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hpcrl.plugins]\nexample = hpcrl_example:ENTRIES\n")
    return folder


def call(site: Path | None, *words: str) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT), *([str(site)] if site is not None else [])]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "hpcrl.launch", *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=False)


def test_help_and_plan_show_the_added_parts(site: Path, tmp_path: Path) -> None:
    told = call(site, "--help", "algorithm").stdout
    assert "algorithm.shrink=0.0" in told and "Share of the siblings' mean" in told
    assert "trainer.noisy.factor=1.0" in call(site, "--help", "trainer").stdout
    assert "curriculum.enough=1.0" in call(site, "--help", "curriculum").stdout
    reference = call(site, "--help", "markdown").stdout
    for name, about in {
        "curriculum": "Reinforcement learning that ends where",
        "leave_one_out": "A response is compared with the mean of its siblings.",
        "noisy": "FSDP2 with another learning rate.",
        "counting": "The native engine, which counts its bursts.",
        "vowels": "The share of vowels.",
        "echo": "Says back what it heard, once.",
    }.items():
        assert f"| `{name}` | {about}" in reference
    planned = call(site, *WORDS, f"run_dir={tmp_path / 'run'}", "dry_run=true")
    assert planned.returncode == 0, planned.stderr
    assert "curriculum, leave_one_out, 2 steps" in planned.stdout and "witness" in planned.stdout
    assert not (tmp_path / "run").exists()


often = functools.partial(pytest.param, marks=pytest.mark.soak)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["algorithm.shrink=2"], "algorithm.shrink: expected at most 1, got 2"),
        often(["algorithm.shrnk=0.1"], "algorithm.shrnk: unknown key; did you mean algorithm.shrink?"),
        often(["curriculum.enough=0"], "curriculum.enough: 0 is reached at once; use more"),
        often(["rollout.group_size=1"], "rollout.group_size: leave_one_out compares the responses of a group"),
        often(
            ["reward.default.options.least=1"], "reward.default: options: there is no option 'least' (there are: most)"
        ),
        (["model.tiny.architecture=llama"], "the counting generator supports qwen2, not llama"),
        (
            ["trainer.megatron.tensor_parallel=2"],
            "trainer.megatron.tensor_parallel: not read here, the engine is noisy",
        ),
    ],
)
def test_bad_values_of_added_parts_are_refused(site: Path, tmp_path: Path, words: list[str], line: str) -> None:
    refused = call(site, *WORDS, *words, f"run_dir={tmp_path / 'run'}", "dry_run=true")
    assert refused.returncode == ExitCode.BAD_INPUT and line in refused.stderr, refused.stderr


def test_a_run_with_added_parts_trains_and_resumes(site: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = call(site, *WORDS, f"run_dir={run}")
    assert first.returncode == 0, first.stdout + first.stderr
    refused = call(site, *WORDS, f"run_dir={run}", "max_steps=3", "algorithm.shrink=0.5")
    assert refused.returncode == ExitCode.BAD_INPUT and "algorithm.shrink: 0.25 -> 0.5" in refused.stderr
    again = call(site, *WORDS, f"run_dir={run}", "max_steps=3", "trainer.noisy.factor=1")
    assert again.returncode == 0, again.stdout + again.stderr
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    batch = RolloutReader(run).batch(1)
    written = batch.gen_logprobs[batch.loss_mask]
    assert rows[0]["witness/logprob"] == pytest.approx(float(written.mean()), abs=1e-5), "the same weights"
    assert rows[0]["actor/lr"] == 2 * rows[2]["actor/lr"] > 0, "trainer.noisy.factor may change at a resume"
    attempts = json.loads((run / "facts.json").read_text())["attempts"]
    assert [attempt["kind"] for attempt in attempts] == ["fresh", "resume"]


def test_the_status_of_its_run_is_shown_without_the_package(site: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shown = {}
    assert call(site, *WORDS, f"run_dir={run}", "debug=fake").returncode == 0
    for where, paths in (("with", [str(ROOT), str(site)]), ("without", [str(ROOT)])):
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-m", "hpcrl", "status", str(run)]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        shown[where] = done.stdout.splitlines()
    labels = {where: [line.split()[0] for line in lines] for where, lines in shown.items()}
    assert labels["without"] == ["run", "state", "step", "saved", "config"] and "config" not in labels["with"]
    assert shown["without"][:3] == [line for line in shown["with"] if line.split()[0] in labels["without"][:3]]
    assert "2 of 2" in shown["without"][2] and "config.yaml: pipeline: " in shown["without"][4]


def test_the_packages_names_are_unknown_without_it(tmp_path: Path) -> None:
    refused = call(None, "trainer.engine=noisy", f"run_dir={tmp_path / 'run'}", "dry_run=true")
    assert refused.returncode == ExitCode.BAD_INPUT and "trainer.engine: expected" in refused.stderr


def test_a_specification_can_be_given_by_its_path_without_an_entry_point(site: Path, tmp_path: Path) -> None:
    (site / "elsewhere").mkdir(exist_ok=True)
    shutil.copytree(EXAMPLE, site / "elsewhere" / "hpcrl_example", dirs_exist_ok=True)
    words = [
        "algorithm=null",
        "algorithm.advantage_estimator=hpcrl_example.specs:LEAVE_ONE_OUT",
        "algorithm.shrink=0.5",
        "trainer.engine=hpcrl_example.specs:NOISY",
        "trainer.own.factor=3",
        "reward.default.name=hpcrl_example.specs:VOWELS",
        "layout=single",
    ]
    planned = call(site / "elsewhere", *words, f"run_dir={tmp_path / 'run'}", "dry_run=true")
    assert planned.returncode == 0, planned.stdout + planned.stderr
    wrong = call(site / "elsewhere", "trainer.engine=hpcrl_example.specs:NOTHING", "dry_run=true")
    assert wrong.returncode == ExitCode.BAD_INPUT, wrong.stdout + wrong.stderr
    (line,) = wrong.stderr.splitlines()
    assert line.startswith("trainer.engine: training engine hpcrl_example.specs:NOTHING: ") and "NOTHING" in line


def test_a_name_that_would_hide_a_key_is_ignored_or_refused(site: Path, tmp_path: Path) -> None:
    clashing = tmp_path / "site"
    shutil.copytree(site, clashing)
    with open(clashing / "hpcrl_example" / "__init__.py", "a") as file:
        file.write('ENTRIES["training engine"]["lr"] = "hpcrl_example.specs:NOISY"\n')
    with open(clashing / "hpcrl_example" / "specs.py", "a") as file:
        file.write('HIDING = TrainEngineSpec(about="Noisy.", make="a:b", section=NoisyConfig, name="lr")\n')
    planned = call(clashing, "layout=single", f"run_dir={tmp_path / 'run'}", "dry_run=true")
    assert (
        planned.returncode == 0
        and "the training engine lr is ignored: TrainerConfig already has a key" in planned.stderr
    )
    refused = call(clashing, "trainer.engine=hpcrl_example.specs:HIDING", "dry_run=true")
    assert (
        refused.returncode == ExitCode.BAD_INPUT and "trainer.engine: TrainerConfig already has a key" in refused.stderr
    )


def test_parts_that_rely_on_missing_parts_are_refused(site: Path, tmp_path: Path) -> None:
    lonely = tmp_path / "site"
    shutil.copytree(site, lonely)
    with open(lonely / "hpcrl_example" / "specs.py", "a") as file:
        file.write('LONELY = PipelineSpec(about="Asks nobody.", make="a:b", roles=("witness", "nobody"))\n')
        file.write('BARE = TrainEngineSpec(about="Log-probs only.", make="a:b")\n')
    refused = call(lonely, "pipeline=hpcrl_example.specs:LONELY", "dry_run=true")
    assert refused.returncode == ExitCode.BAD_INPUT
    assert (
        "pipeline: hpcrl_example.specs:LONELY needs the unknown role nobody; known roles are trainer, "
        in refused.stderr
    )
    refused = call(lonely, "trainer.engine=hpcrl_example.specs:BARE", "dry_run=true")
    assert refused.returncode == ExitCode.BAD_INPUT
    assert "the objective needs entropy, which the hpcrl_example.specs:BARE trainer does not compute" in refused.stderr


def test_a_broken_package_is_reported_and_skipped(site: Path, tmp_path: Path) -> None:
    broken = tmp_path / "site"
    shutil.copytree(site, broken)
    (broken / "hpcrl_example" / "specs.py").write_text("import nowhere\n")
    planned = call(broken, "layout=single", f"run_dir={tmp_path / 'run'}", "dry_run=true")
    assert planned.returncode == 0, planned.stderr
    lines = planned.stderr.splitlines()
    assert "hpcrl: the pipeline curriculum is ignored: " in planned.stderr and "No module named 'nowhere'" in lines[0]
    assert len(lines) == len(set(lines)) >= 6, "each entry once"
