"""Which GPU a rank gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import parse
from hpcrl.node.devices import bind_gpus, check_device, show_peers, visible_gpus
from hpcrl.run import gpus_of_node


def test_ranks_with_a_model_get_a_gpu_each_and_the_others_none() -> None:
    bound = bind_gpus([4, 5, 6, 7], [1, 2, 5, 6], ["2", "GPU-7f", "3"], "auto")
    assert bound == {4: "", 5: "2", 6: "GPU-7f", 7: ""}


def test_a_rank_sees_the_gpus_of_its_replica_behind_its_own() -> None:
    bound = {3: "", 4: "0", 5: "1", 6: "2", 7: "3", 8: "4"}
    groups = [(4, 5, 6), (7, 20), (21, 22)]  # of which some ranks are on another node
    assert show_peers(bound, groups) == {3: "", 4: "0,1,2", 5: "1,0,2", 6: "2,0,1", 7: "3", 8: "4"}


@pytest.mark.parametrize("shown", [False, True])
def test_ranks_see_other_gpus_only_where_their_engine_needs_it(shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    generator = {"engine": "vllm", "vllm": {"custom_all_reduce": shown}}
    layout = {"trainer": {"num_ranks": 2}, "generator": {"colocate_with": "trainer", "tensor_parallel": 2}}
    config = parse({"layout": layout, "generator": generator})
    gpus = gpus_of_node(config, RoleLayout.from_config(config), 0, 1)
    assert sorted(filter(None, gpus.values())) == (["2,3", "3,2"] if shown else ["2", "3"])


@pytest.mark.parametrize(("device", "gpus"), [("auto", []), ("cpu", ["0"]), ("cpu", ["0", "1"])])
def test_all_ranks_of_a_node_use_the_cpu_where_there_is_no_gpu_or_none_is_wanted(device: str, gpus: list[str]) -> None:
    assert bind_gpus([0, 1, 2], [1, 2], gpus, device) == {0: "", 1: "", 2: ""}


@pytest.mark.parametrize(("device", "gpus"), [("auto", ["0"]), ("cuda", ["0"]), ("cuda", [])])
def test_too_few_gpus_are_an_error(device: str, gpus: list[str]) -> None:
    """Not the CPU in silence, where a model would take a thousand times as long."""
    match = rf"cluster.device: {device}, but this node has {len(gpus)} GPU\(s\) for 2 ranks .*cluster.device=cpu"
    with pytest.raises(ValueError, match=match):
        bind_gpus([0, 1, 2], [1, 2], gpus, device)


def test_a_gpu_that_torch_does_not_find_is_an_error() -> None:
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
        ("0,-1,2", ["0"]),
        ("GPU-1,,2", ["GPU-1"]),
        ("NoDevFiles", []),
        ("0,NoDevFiles", ["0"]),
        ("MIG-GPU-1/2/0", ["MIG-GPU-1/2/0"]),
        ("none", []),
        ("void", []),
    ],
)
def test_the_variable_is_read_as_cuda_reads_it(value: str, names: list[str]) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": value}) == names


def test_without_the_variable_the_nodes_device_files_count(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "tty0"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ["0", "1"]
