"""Profiles of sites in conf/cluster: what their scripts request and set, and what they refuse. No site was tried."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from hpcrl.cluster.layout import RoleLayout
from hpcrl.cluster.placement import Placement
from hpcrl.config import ConfigError, load, parse
from hpcrl.config.compose import compose
from hpcrl.launch.render import render
from tests.conftest import ROOT

SITES = {path.stem for path in (ROOT / "conf/cluster").glob("*.yaml")} - {"local", "slurm"}
SLINGSHOT = "export GLOO_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3 NCCL_SOCKET_IFNAME==hsn0,hsn1,hsn2,hsn3"
GOLDEN = {
    "lumi": (
        ["cluster.account=project_465"],
        8,
        56,
        ["--time=24:00:00", "--account=project_465", "--gpus-per-node=8", "--partition=standard-g"],
        ["export NCCL_NET_GDR_LEVEL=PHB", SLINGSHOT],
    ),
    "alps": (
        ["cluster.account=g123", "cluster.sbatch_options.uenv=pytorch/v2.8.0:/user-environment"],
        4,
        288,
        [
            "--time=12:00:00",
            "--account=g123",
            "--gpus-per-node=4",
            "--partition=normal",
            "--uenv=pytorch/v2.8.0:/user-environment",
            "--view=default",
        ],
        [
            "export NCCL_NET='AWS Libfabric'",
            "export NCCL_NET_GDR_LEVEL=PHB",
            "export NCCL_CROSS_NIC=1",
            "export NCCL_PROTO='^LL128'",
            "export FI_CXI_DEFAULT_CQ_SIZE=131072",
            "export FI_CXI_DEFAULT_TX_SIZE=16384",
            "export FI_CXI_DISABLE_HOST_REGISTER=1",
            "export FI_CXI_RX_MATCH_MODE=software",
            "export FI_MR_CACHE_MONITOR=userfaultfd",
        ],
    ),
    "leonardo": (
        ["cluster.account=EUHPC_A01"],
        4,
        32,
        ["--time=24:00:00", "--account=EUHPC_A01", "--gres=gpu:4", "--partition=boost_usr_prod"],
        [],
    ),
    "frontier": (
        ["cluster.account=abc123"],
        8,
        56,
        ["--time=02:00:00", "--account=abc123", "--gpus-per-node=8", "--partition=batch", "--network=disable_rdzv_get"],
        [
            "type module >/dev/null 2>&1 || . /etc/profile",
            "module load rocm rccl-net-plugin || exit 2",
            SLINGSHOT,
        ],
    ),
    "juwels_booster": (
        ["cluster.account=budget"],
        4,
        96,
        ["--time=24:00:00", "--account=budget", "--gres=gpu:4", "--partition=booster"],
        ["export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME==ib0"],
    ),
}
"""Site -> the keys that it needs, GPUs and CPUs of a node, its own options of sbatch, and the script's setup."""
OF_ALL = ["--job-name=hpcrl-rlvr", "--output=hpcrl-%j.log", "--open-mode=append", "--signal=USR1@300", "--requeue"]


def script(*words: str) -> str:
    config = load(words)
    return render(config, Placement.from_config(config, RoleLayout.from_config(config)), words, "python")


def nodes(gpus: int, cpus: int, **more: object) -> list[str]:
    """Two nodes with these GPUs, each with a trainer rank."""
    keys = {"ranks_per_node": gpus, "gpus_per_node": gpus, "cpus_per_node": cpus, **more}
    inside = ", ".join(f"{key}: {value}" for key, value in keys.items())
    return [f"layout.trainer.num_ranks={2 * gpus}", f"cluster.components={{gpu: {{{inside}}}}}"]


def options(text: str) -> list[str]:
    return re.findall(r"^#SBATCH (.+)$", text, re.M)


def refusal(*words: str) -> list[str]:
    """The lines with which a start is refused."""
    with pytest.raises(ConfigError) as raised:
        script(*words)
    return str(raised.value).splitlines()


@pytest.mark.parametrize("site", GOLDEN)
def test_the_script_of_a_site_requests_and_sets_what_its_documentation_says(site: str) -> None:
    given, gpus, cpus, own, setup = GOLDEN[site]
    text = script(f"+cluster={site}", *given, *nodes(gpus, cpus))
    assert sorted(options(text)) == sorted(
        [*OF_ALL, *own, "--nodes=2", "--ntasks-per-node=1", f"--cpus-per-task={cpus}"]
    )
    between = re.search(r"#SBATCH [^\n]+\n((?:(?!#SBATCH)[^\n]*\n)*?)set -u\n", text)
    assert between is not None and between[1].splitlines() == setup


@pytest.mark.parametrize(
    ("site", "rate"), [("lumi", 12.5), ("alps", 50.0), ("leonardo", 12.5), ("frontier", 12.5), ("juwels_booster", 25.0)]
)
def test_a_rank_has_its_share_of_the_adapters_and_a_stored_configuration_keeps_the_profile(
    site: str, rate: float
) -> None:
    """Gb/s of a node's adapters, divided by 8 bits and the node's GPUs; the default where none were found."""
    config = load([f"+cluster={site}", *GOLDEN[site][0]])
    assert config.cluster.link_gb_per_s == rate
    assert parse(config.model_dump(mode="json")).cluster == config.cluster


def test_the_later_of_profile_and_experiment_decides_on_the_time() -> None:
    words = ["+experiment=agentic_sokoban", "+cluster=frontier"]
    assert compose(words).data["cluster"]["time"] == "02:00:00"
    assert compose(words[::-1]).data["cluster"]["time"] == "12:00:00"


@pytest.mark.parametrize("site", GOLDEN)
def test_a_site_names_each_key_that_it_lacks_and_refuses_larger_nodes_in_a_line_each(site: str) -> None:
    given, gpus, cpus, *_ = GOLDEN[site]
    missing = "'???' is a placeholder; give the value (conf/cluster"
    assert refusal(f"+cluster={site}") == [f"{word.partition('=')[0]}: {missing}/{site}.yaml)" for word in given]
    at = "cluster.components.gpu"
    assert refusal(f"+cluster={site}", *given, *nodes(gpus + 1, cpus + 1)) == [
        f"{at}.gpus_per_node: {gpus + 1}, but a node has {gpus} (cluster.node_limits.gpus); set it to {gpus}, and "
        "ranks_per_node so that each rank with a model has a GPU",
        f"{at}.cpus_per_node: {cpus + 1}, but a job may request {cpus} of a node (cluster.node_limits.cpus); lower it",
    ]


def test_every_profile_is_pinned_or_refused_and_says_its_sources_and_what_was_not_tried() -> None:
    assert {*GOLDEN, "aurora"} == SITES
    for site in SITES:
        text = (ROOT / f"conf/cluster/{site}.yaml").read_text()
        assert re.search(r"Not tried by us\.|cannot run there", text.partition("\n")[0]), site
        assert "# Read in November 2026" in text and "# https://" in text, site


def test_a_site_without_slurm_refuses_every_start() -> None:
    said = "cluster: hpcrl cannot run on this site: Aurora's batch system is PBS"
    (line,) = refusal("+cluster=aurora", "dry_run=true")
    assert line.startswith(said) and line.endswith("(conf/cluster/aurora.yaml)")


def test_limits_count_the_controller_and_memory_but_no_other_partition() -> None:
    limits = ["+cluster=slurm", "cluster.partition=gpu", "cluster.node_limits={gpus: 4, cpus: 8, memory: 100G}"]
    ranks = ["layout.trainer.num_ranks=4", "cluster.threads_per_rank=2"]
    (line,) = refusal(*limits, *ranks, "cluster.components={a: {gpus_per_node: 4}}")
    assert line.startswith("cluster.components.a.cpus_per_node: 10 (5 ranks x cluster.threads_per_rank), but a job may")
    memory = "cluster.components={a: {gpus_per_node: 4, cpus_per_node: 8, memory: %s}}"
    assert refusal(*limits, *ranks, memory % "102401M") == [
        "cluster.components.a.memory: 102401M, but a job may request 100G of a node (cluster.node_limits.memory); "
        "lower it"
    ]
    assert "--mem=102400M" in script(*limits, *ranks, memory % "102400M")
    elsewhere = "cluster.components={a: {gpus_per_node: 8, cpus_per_node: 64, memory: 1T, partition: fat}}"
    assert "--partition=fat" in script(*limits, *ranks, elsewhere)


@pytest.mark.parametrize(
    ("form", "gpu_type", "option"),
    [
        ("gres", "", "--gres=gpu:4"),
        ("gres", "a100", "--gres=gpu:a100:4"),
        ("gpus_per_node", "", "--gpus-per-node=4"),
        ("gpus_per_node", "a100", "--gpus-per-node=a100:4"),
        ("gpus_per_task", "", "--gpus-per-task=4"),
        ("gpus_per_task", "a100", "--gpus-per-task=a100:4"),
        ("none", "a100", ""),
    ],
)
def test_gpus_are_requested_in_the_form_of_the_site_or_of_a_component(form: str, gpu_type: str, option: str) -> None:
    kind = {"gpu_type": gpu_type} if gpu_type else {}
    for words in (
        [f"cluster.gpu_request={form}", *nodes(4, 8, **kind)],
        ["cluster.gpu_request=gres", *nodes(4, 8, **kind, gpu_request=form)],
    ):
        found = options(script("+cluster=slurm", *words, "cluster.components.gpu.constraint=thp_never&vboost"))
        assert [each for each in found if "gpu" in each] == [option][: bool(option)]
        assert "--constraint=thp_never&vboost" in found


def test_a_form_that_nothing_reads_is_refused() -> None:
    own = "cluster.sbatch_options={gpus-per-node: 2}"
    (line,) = refusal("+cluster=slurm", own, "cluster.gpu_request=gpus_per_task")
    assert line.startswith("cluster.gpu_request: not read here, cluster.sbatch_options requests the GPUs")
    (line,) = refusal("+cluster=slurm", "cluster.components={cpu: {gpu_request: none}}")
    assert line.startswith("cluster.components.cpu.gpu_request: not read here, the component requests no GPUs")
    assert "gpu_request" in refusal("+cluster=slurm", "cluster.gpu_request=gpus")[0]


def test_variables_reach_the_job_as_written_after_the_modules_and_before_the_prologue(tmp_path: Path) -> None:
    given = 'cluster.environment={NCCL_NET: "it\'s $HOME `x`", FI_A: 1, NCCL_DEBUG: WARN}'
    text = script("+cluster=slurm", "cluster.modules=[site]", given, "cluster.prologue='SEEN=$NCCL_DEBUG'")
    (tmp_path / "job").write_text(
        "module() { export NCCL_DEBUG=of_module; }\n"
        + text.partition("set -u\n")[0]
        + "bash -c 'echo \"$NCCL_NET|$FI_A|$NCCL_DEBUG\"'; echo $SEEN\n"
    )
    done = subprocess.run(["bash", tmp_path / "job"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("it's $HOME `x`|1|WARN\nWARN\n", "")


@pytest.mark.parametrize(
    ("variables", "place"),
    [({"A B": "c"}, "cluster.environment"), ({"A": True}, "cluster.environment.A"), ({"A": "b\nc"}, "environment.A")],
)
def test_names_and_values_that_the_shell_would_misread_are_refused(variables: dict[str, object], place: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(place)) as raised:
        parse({"cluster": {"environment": variables}})
    assert "\n" not in str(raised.value)
