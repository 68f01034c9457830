"""Which GPU a rank gets."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import parse
from hpcrl.node.devices import bind_gpus, check_device, misnamed, own_devices, show_peers, visible_gpus
from hpcrl.run import gpus_of_node


def test_each_rank_with_a_model_gets_one_gpu_and_other_ranks_none() -> None:
    bound = bind_gpus([4, 5, 6, 7], [1, 2, 5, 6], ["2", "1", "3"], "auto")
    assert bound == {4: "", 5: "2", 6: "1", 7: ""}


@pytest.mark.parametrize("gpus", [["GPU-1a", "GPU-2b"], ["MIG-1a", "MIG-GPU-1/2/0"]])
def test_gpus_and_mig_devices_are_passed_on_by_name(gpus: list[str]) -> None:
    assert bind_gpus([0, 1, 2], [1, 2], gpus, "cuda") == {0: "", 1: gpus[0], 2: gpus[1]}


@pytest.mark.parametrize(
    ("gpus", "told"),
    [
        ("0,GPU-1a", "has CUDA_VISIBLE_DEVICES=0,GPU-1a, but CUDA reads either numbers or GPU- or MIG- names"),
        ("GPU-1a,MIG-1a", "CUDA reads either numbers or GPU- or MIG- names: use one kind"),
        ("1,01", "has CUDA_VISIBLE_DEVICES=1,1, which names a GPU twice: name each GPU once"),
        ("1,0,-1", "shows 2 GPU(s) to 3 rank(s) that hold a model, since CUDA_VISIBLE_DEVICES='1,0,-1' ends at '-1'"),
    ],
)
def test_gpu_names_that_cuda_would_read_differently_are_refused(
    gpus: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also to ranks of torchrun and MPI."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    assert bool(misnamed({"CUDA_VISIBLE_DEVICES": gpus}, tmp_path)) == ("ends at" not in told)
    for device in ("auto", "cpu"):
        config = parse({"cluster": {"device": device}, "layout": {"trainer": {"num_ranks": 3}}})
        with pytest.raises(ValueError, match=re.escape(told)) if device == "auto" else contextlib.nullcontext():
            assert set(gpus_of_node(config, RoleLayout.from_config(config), 0, 1).values()) == {""}


def test_a_rank_without_a_gpu_sees_none_on_amd_either() -> None:
    """HIP prefers its own variable unless it is empty."""
    assert own_devices("") == {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1", "LOCAL_RANK": "0"}
    assert own_devices("3") == {"CUDA_VISIBLE_DEVICES": "3", "HIP_VISIBLE_DEVICES": "3", "LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({}, ["0", "1", "2", "3"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles", "ROCR_VISIBLE_DEVICES": "NoDevFiles"}, []),
        ({"CUDA_VISIBLE_DEVICES": "1,3"}, ["1", "3"]),
        ({"CUDA_VISIBLE_DEVICES": "1,3", "HIP_VISIBLE_DEVICES": "2"}, ["2"]),
        ({"CUDA_VISIBLE_DEVICES": "1,3", "HIP_VISIBLE_DEVICES": ""}, ["1", "3"]),
        ({"ROCR_VISIBLE_DEVICES": "2,3"}, ["0", "1"]),
        ({"ROCR_VISIBLE_DEVICES": "2,GPU-3f", "HIP_VISIBLE_DEVICES": "1"}, ["1"]),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "2,3", "GPU_DEVICE_ORDINAL": "2,3"}, ["0", "1"]),
    ],
)
def test_amd_gpus_are_named_as_hip_reads_them(tmp_path: Path, environ: dict[str, str], names: list[str]) -> None:
    (tmp_path / "dri").mkdir()
    for name in ("kfd", "dri/card0", "dri/renderD128", "dri/renderD129", "dri/renderD130", "dri/renderD131"):
        (tmp_path / name).touch()
    assert visible_gpus(environ, tmp_path) == names
    (tmp_path / "nvidia0").touch()
    assert visible_gpus({}, tmp_path) == ["0"], "the processor's own graphics beside a GPU of NVIDIA"


def test_a_rank_sees_its_own_gpu_first_and_then_those_of_its_replica() -> None:
    bound = {3: "", 4: "0", 5: "1", 6: "2", 7: "3", 8: "4"}
    groups = [(4, 5, 6), (7, 20), (21, 22)]  # of which some ranks are on another node
    assert show_peers(bound, groups) == {3: "", 4: "0,1,2", 5: "1,0,2", 6: "2,0,1", 7: "3", 8: "4"}


@pytest.mark.parametrize("shown", [False, True])
def test_ranks_see_other_gpus_only_if_their_engine_needs_it(shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    generator = {"engine": "vllm", "vllm": {"custom_all_reduce": shown}}
    layout = {"trainer": {"num_ranks": 2}, "generator": {"colocate_with": "trainer", "tensor_parallel": 2}}
    config = parse({"layout": layout, "generator": generator})
    gpus = gpus_of_node(config, RoleLayout.from_config(config), 0, 1)
    assert sorted(filter(None, gpus.values())) == (["2,3", "3,2"] if shown else ["2", "3"])


def test_ranks_of_another_launcher_report_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "NoDevFiles")
    config = parse({"cluster": {"device": "cuda"}})
    with pytest.raises(ValueError, match="since CUDA_VISIBLE_DEVICES=NoDevFiles: Slurm gave this job none"):
        gpus_of_node(config, RoleLayout.from_config(config), 0, 1)


@pytest.mark.parametrize(("device", "gpus"), [("auto", []), ("cpu", ["0"]), ("cpu", ["0", "1"])])
def test_all_ranks_of_a_node_use_the_cpu_if_no_gpu_is_present_or_wanted(device: str, gpus: list[str]) -> None:
    assert bind_gpus([0, 1, 2], [1, 2], gpus, device) == {0: "", 1: "", 2: ""}


@pytest.mark.parametrize(("device", "gpus"), [("auto", ["0"]), ("cuda", ["0"]), ("cuda", [])])
def test_too_few_gpus_are_an_error(device: str, gpus: list[str]) -> None:
    """No silent fallback to the CPU, which would be a thousand times slower."""
    match = rf"cluster.device: {device}, but this node has {len(gpus)} GPU\(s\) for 2 ranks .*cluster.device=cpu"
    with pytest.raises(ValueError, match=match):
        bind_gpus([0, 1, 2], [1, 2], gpus, device)


def test_a_gpu_missing_in_torch_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"cluster.device: GPU 3 .* torch 2\.0\+cpu finds none .*cluster.device=cpu"):
        check_device("3", False, "2.0+cpu")
    check_device("3", True, "2.0+cu130")
    check_device("", False, "2.0+cpu")


def test_a_node_without_a_model_needs_no_gpu() -> None:
    assert bind_gpus([0, 3], [1, 2], ["0"], "auto") == {0: "", 3: ""}


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("", []),
        ("-1", []),
        ("3, 1", ["3", "1"]),
        ("00,010", ["0", "10"]),
        ("\u0661,0", []),
        ("0,-1,2", ["0"]),
        ("GPU-1,,2", ["GPU-1"]),
        ("NoDevFiles", []),
        ("0,NoDevFiles", ["0"]),
        ("MIG-GPU-1/2/0", ["MIG-GPU-1/2/0"]),
        ("none", []),
        ("void", []),
    ],
)
def test_the_gpu_variable_is_read_as_cuda_reads_it(value: str, names: list[str]) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": value}) == names


def test_device_files_are_counted_without_the_gpu_variable(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "tty0"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ["0", "1"]
