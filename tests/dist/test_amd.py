"""AMD GPUs from a tree like /sys on a node with four MI250X: four NUMA nodes of the processor, eight GPUs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import load
from hpcrl.launch import machine
from hpcrl.node.amd import amd_gpus
from hpcrl.node.devices import amd_names, num_amd, visible_amd, visible_gpus
from hpcrl.node.gpus import GpuNeeds, TorchBuild, look, unusable

ROCM, CPU = TorchBuild("2.13.0+rocm7.2", "", "7.2"), TorchBuild("2.13.0+cpu", "", "")
NEEDS = GpuNeeds(2, wait_s=0.0)
NUM_CPUS, NUM_GPUS = 4, 8
GIB = 1 << 30


def node(root: Path, name: str = "AMD INSTINCT MI250X", total: int = 64 * GIB) -> Path:
    """The folder of device files; beside it is the folder sys. GPU i has id 100 + i and uses 11 MB."""
    devices, topology = root / "dev", root / "sys/class/kfd/kfd/topology/nodes"
    (devices / "dri").mkdir(parents=True)
    (devices / "kfd").touch()
    for number in range(NUM_CPUS):
        (topology / str(number)).mkdir(parents=True)
        (topology / str(number) / "gpu_id").write_text("0\n")
        (topology / str(number) / "properties").write_text("cpu_cores_count 16\nsimd_count 0\nvendor_id 0\n")
    for gpu in range(NUM_GPUS):
        folder, minor = topology / str(NUM_CPUS + gpu), 128 + gpu
        folder.mkdir(parents=True)
        (folder / "gpu_id").write_text(f"{100 + gpu}\n")
        (folder / "properties").write_text(
            f"cpu_cores_count 0\nsimd_count 440\nvendor_id 4098\ndevice_id 29704\ndrm_render_minor {minor}\n"
            f"unique_id {0x675BCE773A240300 + gpu}\ngfx_target_version 90010\n"
        )
        (devices / f"dri/renderD{minor}").touch()
        device = root / f"sys/class/drm/renderD{minor}/device"
        device.mkdir(parents=True)
        if name:
            (device / "product_name").write_text(f"{name}\n")
        (device / "mem_info_vram_total").write_text(f"{total}\n")
        (device / "mem_info_vram_used").write_text("11534336\n")
    return devices


def fill(devices: Path, gpu: int, used: int, pid: int = 0) -> None:
    """A process fills a GPU."""
    system = devices.parent / "sys"
    (system / f"class/drm/renderD{128 + gpu}/device/mem_info_vram_used").write_text(f"{used}\n")
    if pid:
        folder = system / f"class/kfd/kfd/proc/{pid}"
        folder.mkdir(parents=True)
        for other in range(NUM_GPUS):
            (folder / f"vram_{100 + other}").write_text(f"{used if other == gpu else 0}\n")


def hide(devices: Path, gpu: int) -> None:
    """The job's cgroup excludes a GPU, so its files in the topology cannot be read."""
    file = devices.parent / f"sys/class/kfd/kfd/topology/nodes/{NUM_CPUS + gpu}/properties"
    file.unlink()
    file.mkdir()


def test_gpus_have_the_order_names_and_memory_of_the_driver(tmp_path: Path) -> None:
    devices = node(tmp_path)
    gpus = amd_gpus(tmp_path / "sys")
    assert gpus is not None and [gpu.id for gpu in gpus] == list(range(100, 108)), "10 follows 9, not 1"
    assert gpus[1] == (101, "GPU-675bce773a240301", "AMD INSTINCT MI250X", 64 * GIB, 11534336)
    assert (num_amd(devices), amd_names(devices)) == (8, "AMD INSTINCT MI250X")
    assert visible_gpus({}, devices) == [str(number) for number in range(8)]


@pytest.mark.parametrize(("version", "name"), [(90010, "gfx90a"), (90402, "gfx942"), (110501, "gfx1151")])
def test_a_gpu_without_a_product_name_is_named_by_its_instruction_set(version: int, name: str, tmp_path: Path) -> None:
    node(tmp_path, name="")
    for file in (tmp_path / "sys/class/kfd").rglob("properties"):
        file.write_text(file.read_text().replace("90010", str(version)))
    assert {gpu.name for gpu in amd_gpus(tmp_path / "sys") or ()} == {name}


def test_gpus_that_the_jobs_cgroup_excludes_are_not_counted(tmp_path: Path) -> None:
    """Their files in /dev remain visible."""
    devices = node(tmp_path)
    for gpu in (0, 1, 4, 5, 6, 7):
        hide(devices, gpu)
    assert num_amd(devices) == 2 and len(list((devices / "dri").iterdir())) == 8
    assert [gpu.id for gpu in visible_amd({"ROCR_VISIBLE_DEVICES": "0,1"}, devices).values()] == [102, 103]
    told = unusable(NEEDS, {"ROCR_VISIBLE_DEVICES": "2,3"}, devices, ROCM)
    assert told.startswith("has 2 AMD GPU(s) to choose from, numbered from 0, but ROCR_VISIBLE_DEVICES=2,3")
    hide(devices, 2)
    hide(devices, 3)
    assert num_amd(devices) == 0 and visible_gpus({}, devices) == []


def test_a_container_without_the_topology_counts_files_of_devices(tmp_path: Path) -> None:
    devices = node(tmp_path)
    (tmp_path / "sys").rename(tmp_path / "elsewhere")
    assert (num_amd(devices), amd_names(devices), visible_amd({}, devices)) == (8, "", {})
    assert look(NEEDS, {}, (), print, devices, ROCM) == (
        "",
        "has a driver that does not show whether others use its GPUs (/sys/class/drm)",
    )


def test_another_vendors_gpu_in_the_topology_is_none_of_amds(tmp_path: Path) -> None:
    devices = node(tmp_path)
    file = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{NUM_CPUS}/properties"
    file.write_text(file.read_text().replace("vendor_id 4098", "vendor_id 4318"))
    assert num_amd(devices) == 7
    (devices / "nvidia0").touch()
    assert (num_amd(devices), amd_names(devices)) == (0, ""), "the processor's own graphics beside a GPU of NVIDIA"


def test_gpus_are_named_where_they_cannot_be_used_and_in_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = node(tmp_path)
    line = unusable(NEEDS, {}, devices, CPU)
    assert line.startswith("has 8 AMD GPU(s) (AMD INSTINCT MI250X), and torch 2.13.0+cpu, a build for CPUs only, finds")
    config = load(["layout.trainer.num_ranks=2"])
    monkeypatch.setattr(machine, "visible_gpus", lambda environ: visible_gpus({}, devices))
    monkeypatch.setattr(machine, "amd_names", lambda: amd_names(devices))
    said = machine.device_row(config, RoleLayout.from_config(config))
    assert said == "auto: 2 of 8 GPU(s), AMD INSTINCT MI250X"


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, {"0": 100, "1": 101}),
        ({"ROCR_VISIBLE_DEVICES": "6,3"}, {"0": 106, "1": 103}),
        ({"ROCR_VISIBLE_DEVICES": "6,3", "HIP_VISIBLE_DEVICES": "1"}, {"1": 103}),
        ({"ROCR_VISIBLE_DEVICES": "6,GPU-675bce773a240305"}, {"0": 106, "1": 105}),
        ({"ROCR_VISIBLE_DEVICES": "GPU-FFFF,2"}, {"1": 102}),
        ({"CUDA_VISIBLE_DEVICES": "5,2"}, {"5": 105, "2": 102}),
        ({"HIP_VISIBLE_DEVICES": "7,4", "CUDA_VISIBLE_DEVICES": "5,2"}, {"7": 107, "4": 104}),
        ({"HIP_VISIBLE_DEVICES": "9"}, {}),
    ],
)
def test_numbers_of_hip_refer_to_the_gpus_that_rocr_leaves(
    environ: dict[str, str], found: dict[str, int], tmp_path: Path
) -> None:
    gpus = visible_amd(environ, node(tmp_path))
    assert {name: gpu.id for name, gpu in list(gpus.items())[:2]} == found


def test_gpus_that_others_fill_are_refused_with_their_processes(tmp_path: Path) -> None:
    devices, environ = node(tmp_path), {"ROCR_VISIBLE_DEVICES": "6,7", "PATH": os.environ["PATH"]}
    assert look(NEEDS, environ, (), print, devices, ROCM) == ("", "")
    fill(devices, 5, 60 * GIB, pid=11)
    assert look(NEEDS, environ, (), print, devices, ROCM) == ("", ""), "a GPU that the ranks do not use"
    fill(devices, 7, 60 * GIB, pid=1234)
    problem, _ = look(NEEDS, environ, (), print, devices, ROCM)
    assert problem == (
        "has GPUs that others use, 61440 of 65536 MiB of GPU 1 (AMD INSTINCT MI250X) by pid 1234 (61440 MiB): end "
        "them, name other GPUs in HIP_VISIBLE_DEVICES, cluster.exclude the node, or set cluster.oversubscribe=true"
    )
    assert look(GpuNeeds(2, wait_s=0.0, shares=True), environ, (), print, devices, ROCM).problem == ""
    fill(devices, 6, 40 * GIB)
    assert (
        "of GPU 0 (AMD INSTINCT MI250X) by a process that this one may not see"
        in look(NEEDS, environ, (), print, devices, ROCM).problem
    )


def test_parts_of_one_gpu_share_its_uuid_but_not_their_processes(tmp_path: Path) -> None:
    devices = node(tmp_path)
    for file in (tmp_path / "sys/class/kfd").rglob("properties"):
        file.write_text("".join(line for line in file.open() if not line.startswith("unique_id")))
    fill(devices, 0, 60 * GIB, pid=7)
    problem = look(NEEDS, {}, (), print, devices, ROCM).problem
    assert "61440 of 65536 MiB of GPU 0 (AMD INSTINCT MI250X) by pid 7 (61440 MiB): end them" in problem


def test_memory_that_a_processors_graphics_reserve_is_not_judged(tmp_path: Path) -> None:
    devices = node(tmp_path, name="", total=GIB // 2)
    fill(devices, 0, GIB // 2 - 1)
    assert look(NEEDS, {}, (), print, devices, ROCM).problem == ""
