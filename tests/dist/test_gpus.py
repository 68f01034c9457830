"""Problems of a node's GPUs that would end a run, or leave it on the CPU, are one line before a rank starts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from hpcrl import run
from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import load
from hpcrl.config.abilities import check_installed
from hpcrl.node import gpus
from hpcrl.node.gpus import HIDING, GpuNeeds, TorchBuild, look, unusable
from hpcrl.run_folder import close_run, open_run
from hpcrl.spec.extras import install, version_of
from hpcrl.system.exit_codes import ExitCode
from tests.dist.test_bootstrap import torchrun
from tests.gpu_nodes import FREE, STUCK, GpuNode

CUDA, ROCM, CPU = (
    TorchBuild("2.13.0+cu130", "13.0", ""),
    TorchBuild("2.13.0+rocm7.2", "", "7.2"),
    TorchBuild("2.13.0+cpu", "", ""),
)
NEEDS = GpuNeeds(2, wait_s=0.0)
Make = Callable[..., GpuNode]


def filled(needs: GpuNeeds, environ: Mapping[str, str], devices: Path, torch: TorchBuild = CUDA) -> str:
    return look(needs, environ, (), print, devices, torch).problem


def note(needs: GpuNeeds, environ: Mapping[str, str], devices: Path, torch: TorchBuild = CUDA) -> str:
    return look(needs, environ, (), print, devices, torch).note


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return lambda **words: GpuNode(tmp_path / "node", **words)


def amd(folder: Path, num_gpus: int = 8) -> Path:
    """The device files of a node with AMD GPUs."""
    (folder / "dri").mkdir()
    (folder / "kfd").touch()
    for number in range(num_gpus):
        (folder / f"dri/renderD{128 + number}").touch()
    return folder


def test_a_node_with_usable_gpus_has_no_problem(make: Make) -> None:
    node = make()
    assert unusable(NEEDS, node.environ, node.devices, CUDA) == ""
    assert filled(NEEDS, node.environ, node.devices) == "" and note(NEEDS, node.environ, node.devices) == ""


@pytest.mark.parametrize(
    ("value", "required", "told"),
    [
        (
            "",
            True,
            "shows none of its 2 GPU(s) to 2 rank(s) that hold a model, since CUDA_VISIBLE_DEVICES='' names none;",
        ),
        ("", False, ""),  # which note() reports
        ("NoDevFiles", True, "CUDA_VISIBLE_DEVICES=NoDevFiles: Slurm gave this job none; request them (gpus_per_node"),
        ("NoDevFiles", False, "CUDA_VISIBLE_DEVICES=NoDevFiles: Slurm gave this job none; request them (gpus_per_node"),
        (
            "0,0",
            False,
            "has CUDA_VISIBLE_DEVICES=0,0, which names a GPU twice: name each",
        ),
        ("0,GPU-10ab", False, "CUDA reads either numbers or GPU- or MIG- names: use one kind"),
        (
            "0,7",
            False,
            "has a driver that finds 1 of the 2 GPU(s) 0,7: name others in CUDA_VISIBLE_DEVICES (nvidia-smi -L)",
        ),
        ("MIG-a,MIG-b", False, ""),
        *((hiding, False, "") for hiding in ("-1", "none", "void")),
        *(
            (junk, False, f"since CUDA_VISIBLE_DEVICES='{junk}' names none; unset it")
            for junk in ("all", "+0,1", "0;1")
        ),
        ("0,-1,1", False, "shows 1 GPU(s) to 2 rank(s) that hold a model, since CUDA_VISIBLE_DEVICES='0,-1,1' ends at"),
        ("MIG-a,MIG-unknown", False, "has a driver that finds 0 of the 1 GPU(s) MIG-unknown: name others in"),
    ],
)
def test_unusable_lists_of_visible_gpus_are_named(make: Make, value: str, required: bool, told: str) -> None:
    node = make()
    node.environ["CUDA_VISIBLE_DEVICES"] = value
    line = unusable(GpuNeeds(2, required), node.environ, node.devices, CUDA)
    assert told in line and bool(told) == bool(line) and "\n" not in line
    assert unusable(GpuNeeds(0, required), node.environ, node.devices, CUDA) == "", "no rank holds a model"
    if value in HIDING:
        told = f"computes on the CPU: CUDA_VISIBLE_DEVICES={value!r} hides its 2 GPU(s)"
        assert note(NEEDS, node.environ, node.devices) == told


@pytest.mark.parametrize(
    ("driver", "torch", "told"),
    [
        (13020, CUDA, ""),
        (13000, TorchBuild("2.15.0+cu131", "13.1", ""), ""),
        (
            12080,
            CUDA,
            "has a driver for CUDA 12.8, but torch 2.13.0+cu130, a build for CUDA 13.0, needs driver 580 or newer:",
        ),
        (11080, TorchBuild("2.9.0+cu128", "12.8", ""), "a driver for CUDA 11.8, .* needs driver 525 or newer:"),
        (
            13000,
            CPU,
            r"has 2 NVIDIA GPU\(s\), and torch 2.13.0\+cpu, a build for CPUs only, finds none .*for CUDA, or",
        ),
        (13000, ROCM, r"has 2 NVIDIA GPU\(s\), and torch .*, a build for ROCm 7.2, finds none of them"),
    ],
)
def test_the_driver_must_support_torchs_cuda(make: Make, driver: int, torch: TorchBuild, told: str) -> None:
    node = make(cuda=driver)
    line = unusable(NEEDS, node.environ, node.devices, torch)
    assert (re.search(told.replace("+cu", r"\+cu"), line) and bool(told) == bool(line)) if told else line == ""
    assert "driver for" not in line or ("cuda-compat-" in line and "LD_LIBRARY_PATH" in line)


def test_a_driver_that_fails_to_load_or_start_is_named(make: Make) -> None:
    node = make()
    node.environ["FAKE_ERROR"] = "802"  # as without the fabric manager
    line = unusable(NEEDS, node.environ, node.devices, CUDA)
    assert line.startswith("has a driver that finds 0 of the 2 GPU(s) 0,1 (system not yet initialized): ")
    node.environ["FAKE_TEXT"] = "pas initialis\udce9"  # a byte of latin-1
    assert "(pas initialis\ufffd)" in unusable(NEEDS, node.environ, node.devices, CUDA)
    node.environ["LD_LIBRARY_PATH"] = ""
    line = unusable(NEEDS, node.environ, node.devices, CUDA)
    assert (
        line.startswith("has GPU(s) 0,1, but its driver does not load (OSError: libcuda.so.1: ")
        and "apptainer --nv" in line
    )


@pytest.mark.parametrize(
    ("package", "told"),
    [
        (("vllm", "0.32.0", "torch==2.13.0", "nvidia-cutlass-dsl[cu13]==4.8.0"), ""),
        (("vllm", "0.32.0", "torch==2.13.0", "x-cu12; extra == 'old'"), ""),
        (("vllm", "0.32.0", "torch==2.12.0"), "has vllm 0.32.0, which requires torch==2.12.0, but torch 2.13.0+cu130"),
        (("vllm", "0.32.0+cu129", "torch==2.13.0"), "has vllm 0.32.0+cu129, built for CUDA 12, but torch 2.13.0+cu130"),
        (("vllm", "0.32.0", "torch==2.13.0+cpu"), "has vllm 0.32.0, which requires torch==2.13.0+cpu, but"),
        (
            ("vllm", "0.32.0", "nvshmem4py-cu12"),
            "has vllm 0.32.0, built for CUDA 12, but torch 2.13.0+cu130, a build for",
        ),
    ],
)
def test_an_engine_must_match_torch_and_cuda(
    make: Make, package: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make()
    node.package(*package)
    monkeypatch.syspath_prepend(str(node.site))
    config = load(["generator.engine=vllm"])
    layout = RoleLayout.from_config(config)
    line = unusable(GpuNeeds.of(config, layout, range(layout.world_size)), node.environ, node.devices, CUDA)
    assert line.startswith(told) if told else line == ""
    assert not told or "constraints.txt 'vllm==0.32.*'" in line
    native = GpuNeeds.of(load([]), layout, range(layout.world_size))
    assert unusable(native, node.environ, node.devices, CUDA) == "", "no rank imports it"


def test_a_gpu_filled_by_another_process_is_named_with_the_process(make: Make) -> None:
    node = make()
    full = "1, GPU-10ab, 81559, 70000, Disabled, NVIDIA H100\n"
    node.smi([FREE.format(0), full], "GPU-10ab, 4242, 69990, python, of another\n")
    line = filled(NEEDS, node.environ, node.devices)
    assert line.startswith(
        "has GPUs that others use, 70000 of 81559 MiB of GPU 1 (NVIDIA H100) by pid 4242 (python, of another, 69990"
    )
    assert "CUDA_VISIBLE_DEVICES" in line and line.endswith("or set cluster.oversubscribe=true")
    config = load(["cluster.oversubscribe=true", "timeouts.start_s=8"])
    needs = GpuNeeds.of(config, RoleLayout.from_config(config), [0, 1, 2])
    assert (needs.ranks, needs.wait_s) == (2, 4.0) and filled(needs, node.environ, node.devices) == ""
    assert filled(GpuNeeds(1, wait_s=0.0), node.environ, node.devices) == "", "no rank is on GPU 1"
    for names, is_told in (("0", False), ("01", True), ("GPU-00", False), ("GPU-10AB", True)):
        node.environ["CUDA_VISIBLE_DEVICES"] = names
        assert bool(filled(NEEDS, node.environ, node.devices)) == is_told
    node.environ["CUDA_VISIBLE_DEVICES"] = "1"
    node.smi([full])
    assert "(NVIDIA H100) by a process that this one may not see: " in filled(NEEDS, node.environ, node.devices)
    node.smi([full], later=FREE.format(1))
    said: list[str] = []
    found = look(GpuNeeds(2, wait_s=2.0), node.environ, (), said.append, node.devices, CUDA)
    assert found == ("", ""), "processes of the last run were still ending"
    assert said == ["waits up to 2 s for GPUs that others use"]


def test_a_gpu_divided_by_mig_is_refused_as_a_whole(make: Make) -> None:
    node = make()
    node.smi([FREE.format(0), FREE.format(1).replace("Disabled", "Enabled")])
    assert "has GPU(s) 1 divided by MIG" in filled(NEEDS, node.environ, node.devices)
    node.environ["CUDA_VISIBLE_DEVICES"] = "MIG-a,MIG-b"
    assert filled(NEEDS, node.environ, node.devices) == ""


def test_without_nvidia_smi_the_missing_check_is_reported(make: Make) -> None:
    node = make()
    (node.folder / "bin/nvidia-smi").unlink()
    assert filled(NEEDS, node.environ, node.devices) == ""
    assert note(NEEDS, node.environ, node.devices) == "has no nvidia-smi to check whether other processes use its GPUs"


@pytest.mark.parametrize(
    ("smi", "unseen"),
    [
        ("exit 9", "0,1"),
        ("head -c 3000 /dev/urandom", "0,1"),
        ("echo '0, GPU-00ab, [N/A], [N/A], [N/A], NVIDIA GB200'; echo '1, GPU-10ab, 9, 0, Disabled, H100'", "0"),
        ("echo '1, GPU-10ab, 81559, 4, Disabled, NVIDIA H100'", "0"),
    ],
)
def test_gpus_with_unknown_free_memory_are_named(make: Make, smi: str, unseen: str) -> None:
    node = make()
    node.program("nvidia-smi", f"#!/bin/sh\n{smi}\n")
    assert filled(NEEDS, node.environ, node.devices) == ""
    told = f"has an nvidia-smi that does not show whether others use GPU(s) {unseen}"
    assert note(NEEDS, node.environ, node.devices) == told


def test_gpus_are_not_checked_if_cuda_numbers_them_unlike_nvidia_smi(make: Make) -> None:
    node = make()
    node.smi([FREE.format(0), FREE.format(1).replace(" 4,", " 9000,")])
    node.environ["CUDA_DEVICE_ORDER"] = "FASTEST_FIRST"
    assert filled(NEEDS, node.environ, node.devices) == ""
    told = "has CUDA_DEVICE_ORDER=FASTEST_FIRST, but nvidia-smi, which shows whether others use GPUs, numbers them by "
    assert note(NEEDS, node.environ, node.devices) == told + "PCI_BUS_ID"
    node.environ["CUDA_VISIBLE_DEVICES"] = "GPU-00ab,GPU-10ab"
    assert "GPU 1 (NVIDIA H100)" in filled(NEEDS, node.environ, node.devices)


@pytest.mark.parametrize(("own", "order"), [(None, "PCI_BUS_ID"), ("FASTEST_FIRST", "FASTEST_FIRST")])
def test_ranks_number_gpus_like_nvidia_smi(
    tmp_path: Path, own: str | None, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str] = []

    def agent(*_: Any, environ: dict[str, str], **__: Any) -> None:
        given.append(environ["CUDA_DEVICE_ORDER"])
        raise InterruptedError

    monkeypatch.setattr(run, "Agent", agent)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    if own is not None:
        monkeypatch.setenv("CUDA_DEVICE_ORDER", own)
    config = load([f"run_dir={tmp_path / 'run'}", "data.train=task:sort_digits"])
    open_run(config.model_dump(mode="json"), tmp_path / "run", "auto")
    with pytest.raises(InterruptedError):
        run.run_node(tmp_path / "run", 1, node=0, num_nodes=1, signals=[])
    assert given == [order]
    program = (
        "import os, sys; from hpcrl import run; run.import_for = lambda *_: sys.exit(os.environ['CUDA_DEVICE_ORDER'])"
    )
    command = [sys.executable, "-c", f"{program}; run.main()", str(tmp_path / "run")]
    environ = {**os.environ, **torchrun(rank=0, size=3)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.splitlines()[-1] == order, "a rank that torchrun starts"


def test_a_process_name_need_not_be_utf8(make: Make) -> None:
    node = make()
    node.smi([FREE.format(0), FREE.format(1).replace(" 4,", " 9000,")])
    (node.folder / "apps").write_bytes(b"GPU-10ab, 7, 8990, /home/j\xfcrgen/python\n")
    assert "by pid 7 (/home/j\ufffdrgen/python, 8990 MiB)" in filled(NEEDS, node.environ, node.devices)


@pytest.mark.slow
@pytest.mark.parametrize("program", ["libcuda", "nvidia-smi", "nvcc"])
def test_an_unkillable_program_is_not_waited_for(make: Make, program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example nvidia-smi with a GPU that has fallen off the bus."""
    node = make()
    monkeypatch.setattr(gpus, "ANSWERS_S", 1.5)
    needs = GpuNeeds(2, engines={"none-of-this-name": "x"}, wait_s=0.0)
    stuck = node.program(program, STUCK.format(python=sys.executable))
    if program == "libcuda":
        monkeypatch.setattr(sys, "executable", str(stuck))
    began = time.monotonic()
    found = look(needs, node.environ | {"CUDA_HOME": ""}, (), print, node.devices, CUDA)
    assert time.monotonic() - began < 30
    assert ("does not answer within 1.5 s" in found.problem) == (program == "libcuda")
    assert ("does not show whether others use GPU(s) 0,1" in found.note) == (program == "nvidia-smi")


@pytest.mark.parametrize("home", [False, True])
def test_a_compiler_for_another_cuda_is_reported(make: Make, home: bool) -> None:
    """No reason to stop: not every engine compiles."""
    node = make()
    where = node.folder / "cuda/bin" if home else node.folder / "bin"
    where.mkdir(parents=True, exist_ok=True)
    for release in ("13.2", "12.4"):
        (where / "nvcc").write_text(f"#!/bin/sh\necho Cuda compilation tools, release {release}, V{release}.99")
        (where / "nvcc").chmod(0o755)
        environ = node.environ | ({"CUDA_HOME": str(node.folder / "cuda")} if home else {"CUDA_HOME": ""})
        line = note(GpuNeeds(2, engines={"deepspeed": "deepspeed"}), environ, node.devices, CUDA)
        told = "has nvcc for CUDA 12.4, with which deepspeed may compile, but torch 2.13.0+cu130, a build for CUDA"
        assert (
            line == "" if release == "13.2" else line.startswith(told) and line.endswith("CUDA 13.0 (cluster.modules)")
        )
        assert note(NEEDS, environ, node.devices, CUDA) == "", "no engine that may compile"


@pytest.mark.parametrize(
    ("torch", "words", "told"),
    [
        (ROCM, [], ""),
        (
            CPU,
            [],
            "has 8 AMD GPU(s), and torch 2.13.0+cpu, a build for CPUs only, finds none of them: install torch for",
        ),
        (
            CUDA,
            [],
            "has 8 AMD GPU(s), and torch 2.13.0+cu130, a build for CUDA 13.0, finds none of them: install torch for",
        ),
        (
            ROCM,
            ["trainer.engine=megatron"],
            "has 8 AMD GPU(s), which trainer.engine=megatron: its layers come from Transformer",
        ),
        (CPU, ["cluster.device=cpu"], ""),
        (CPU, ["debug=fake"], ""),
    ],
)
def test_amd_gpus_are_used_or_refused(tmp_path: Path, torch: TorchBuild, words: list[str], told: str) -> None:
    """With device=auto there is no silent fallback to the CPU."""
    config = load(words)
    layout = RoleLayout.from_config(config)
    needs = GpuNeeds.of(config, layout, range(layout.world_size))
    line = unusable(needs, {}, amd(tmp_path), torch)
    assert line.startswith(told) if told else line == ""
    assert not line or "cluster.device=cpu" in line or "choose another engine" in line
    assert filled(needs, {}, tmp_path, torch) == line


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"HIP_VISIBLE_DEVICES": "1,7"}, ""),
        (
            {"HIP_VISIBLE_DEVICES": "1,8"},
            "8 AMD GPU(s) to choose from, numbered from 0, but HIP_VISIBLE_DEVICES=1,8: ",
        ),
        ({"HIP_VISIBLE_DEVICES": "0,0"}, "has HIP_VISIBLE_DEVICES=0,0, which names a GPU twice"),
        (
            {"HIP_VISIBLE_DEVICES": "junk"},
            "none of its 8 GPU(s) to 2 rank(s) that hold a model, since HIP_VISIBLE_DEVICES=",
        ),
        ({"HIP_VISIBLE_DEVICES": "0,,1"}, "since HIP_VISIBLE_DEVICES='0,,1' ends at '': name only GPUs"),
        (
            {"ROCR_VISIBLE_DEVICES": "0,9"},
            "has 8 AMD GPU(s) to choose from, numbered from 0, but ROCR_VISIBLE_DEVICES=0,9",
        ),
        ({"ROCR_VISIBLE_DEVICES": "0,0"}, "has ROCR_VISIBLE_DEVICES=0,0, which names a GPU twice"),
        ({"HIP_VISIBLE_DEVICES": "1,2", "ROCR_VISIBLE_DEVICES": "5,6"}, "has 2 AMD GPU(s) to choose from"),
        ({"CUDA_VISIBLE_DEVICES": "5,6", "ROCR_VISIBLE_DEVICES": "5,6"}, ""),
        ({"ROCR_VISIBLE_DEVICES": "NoDevFiles"}, "since ROCR_VISIBLE_DEVICES=NoDevFiles: Slurm gave this job none"),
    ],
)
def test_lists_of_amd_gpus_are_checked(tmp_path: Path, environ: dict[str, str], told: str) -> None:
    line = unusable(NEEDS, environ, amd(tmp_path), ROCM)
    assert told in line and bool(told) == bool(line)


@pytest.mark.parametrize("name", ["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"])
def test_the_list_that_hides_amd_gpus_is_named(tmp_path: Path, name: str) -> None:
    environ = {name: "-1"}
    hides = f"computes on the CPU: {name}='-1' hides its 8 GPU(s)"
    assert note(NEEDS, environ, amd(tmp_path), ROCM) == hides
    assert f"since {name}='-1' names none; unset it" in unusable(GpuNeeds(2, True), environ, tmp_path, ROCM)


@pytest.mark.parametrize(
    ("module", "version", "known"),
    [("vllm", "0.32.7", ""), ("vllm", "0.33.0", "0.32.*"), ("sglang", "0.5.23", ""), ("sglang", "0.5.9", "0.5.23*")],
)
def test_a_different_engine_version_is_refused(
    make: Make, module: str, version: str, known: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its internals may differ. In a container and on nodes the preflight checks this
    (tests/slurm/test_preflight.py)."""
    node = make()
    node.package(module, version)
    (node.site / f"{module}.py").touch()
    monkeypatch.syspath_prepend(str(node.site))
    text = f"generator.engine: {module} {version} is installed, but hpcrl supports only {known}; "
    config = load([f"generator.engine={module}"])
    lines = [problem.text for problem in check_installed(config)]
    assert lines == ([text + install([module])] if known else [])


def test_a_cuda_wheel_is_refused_on_amd(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The build for ROCm meets its requirement of torch."""
    node = make()
    node.package("vllm", "0.32.0", "torch==2.13.0", "nvidia-cutlass-dsl[cu13]==4.8.0")
    monkeypatch.syspath_prepend(str(node.site))
    (devices := tmp_path / "amd").mkdir()
    line = unusable(GpuNeeds(2, engines={"vllm": "vllm"}), {}, amd(devices), ROCM)
    assert line.startswith(
        "has vllm 0.32.0, built for CUDA 13, but torch 2.13.0+rocm7.2, a build for ROCm 7.2, with it"
    )


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        b"",
        b"Metadata-Version: 2.1\nName: vllm\n",
        b"Metadata-Version: 2.1\nVersion: 0.32.1\n",
        b"\xff\xfeName: vllm\nVersion: 0.32.1\n",
        b"Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.1\nRequires-Dist: torch ~~ broken==\n",
    ],
)
def test_a_damaged_engine_installation_is_named(
    make: Make, metadata: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make()
    folder = node.site / "vllm-0.32.1.dist-info"
    folder.mkdir()
    if metadata is not None:
        (folder / "METADATA").write_bytes(metadata)
    monkeypatch.syspath_prepend(str(node.site))
    line = unusable(GpuNeeds(2, engines={"vllm": "vllm"}), node.environ, node.devices, CUDA)
    assert line == f"has vllm, whose installation is damaged ({node.site}): reinstall it: {install(['vllm'])}"
    assert version_of("vllm") in ("", "0.32.1")


def hpcrl(module: str, environ: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"hpcrl.{module}", *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("module", ["node.preflight", "run"])
def test_no_rank_starts_on_a_node_with_bad_gpus(make: Make, tmp_path: Path, module: str) -> None:
    node, run = make(), tmp_path / "run"
    config = load(["cluster.device=cuda", "timeouts.start_s=2", f"run_dir={run}", "data.train=task:sort_digits"])
    close_run(run, open_run(config.model_dump(mode="json"), run, "auto").attempt)
    if module == "node.preflight":
        done = hpcrl(module, node.environ, str(run))
        assert done.returncode == ExitCode.DONE and "2 GPU(s)" in done.stdout, done.stderr

    def refused(told: str, **variables: str) -> None:
        done = hpcrl(module, node.environ | variables, str(run))
        assert done.returncode == ExitCode.BAD_INPUT and told in done.stderr, done.stderr
        waits = "waits up to 1 s" in done.stderr
        assert len(done.stderr.splitlines()) == 1 + waits and not list((run / "logs").rglob("rank_*.log"))
        assert waits == ("MiB of GPU" in told)

    refused("needs driver 580 or newer", FAKE_CUDA="12040")
    refused("Slurm gave this job none", CUDA_VISIBLE_DEVICES="NoDevFiles")
    node.smi([FREE.format(0), FREE.format(1).replace(" 4,", " 9000,")], "GPU-10ab, 7, 8990, python\n")
    refused("9000 of 81559 MiB of GPU 1 (NVIDIA H100) by pid 7 (python, 8990 MiB)")


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("number", "smi", "said"),
    [
        (signal.SIGTERM, "", "this node waits up to 20 s for GPUs that others use\n"),
        (signal.SIGINT, "#!/bin/sh\ntouch $FAKE_SMI/began; exec sleep 100\n", ""),
    ],
)
def test_a_signal_ends_the_gpu_check(make: Make, tmp_path: Path, number: int, smi: str, said: str) -> None:
    node, run = make(), tmp_path / "run"
    node.smi([FREE.format(0), FREE.format(1).replace(" 4,", " 9000,")])
    if smi:
        node.program("nvidia-smi", smi)
    config = load(["cluster.device=cuda", f"run_dir={run}", "data.train=task:sort_digits"])
    close_run(run, open_run(config.model_dump(mode="json"), run, "auto").attempt)
    command = [sys.executable, "-m", "hpcrl.run", str(run)]
    with subprocess.Popen(command, env=node.environ, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            line = process.stderr.readline() if said else ""
            while smi and not (node.folder / "began").exists():
                time.sleep(0.1)
            process.send_signal(number)
            sent = time.monotonic()
            rest = process.stderr.read()
            assert process.wait(30) == 128 + number and time.monotonic() - sent < 15
        finally:
            process.kill()
    name = signal.Signals(number).name
    assert line.endswith(said) and rest == f"hpcrl: ended by {name} before the ranks were started\n"


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("visible", "device", "told"),
    [
        ("", "cuda", "since CUDA_VISIBLE_DEVICES='' names none; unset it, or set cluster.device=cpu"),
        ("NoDevFiles", "cuda", "since CUDA_VISIBLE_DEVICES=NoDevFiles: Slurm gave this job none; request them"),
        ("0,0,1", "auto", "has CUDA_VISIBLE_DEVICES=0,0,1, which names a GPU twice"),
        (
            "0,1,2,3",
            "auto",
            "a build for CPUs only, finds none of them: install torch for CUDA, or set cluster.device",
        ),
    ],
)
def test_a_launch_on_bad_gpus_is_refused_before_anything_is_written(
    make: Make, tmp_path: Path, visible: str, device: str, told: str
) -> None:
    """With the torch of this machine in the last case."""
    environ = make().environ | {"CUDA_VISIBLE_DEVICES": visible}
    del environ["PYTHONPATH"]
    if "CPUs only" in told and TorchBuild.installed().cuda:
        pytest.skip("torch here is a build for CUDA")
    run = tmp_path / "run"
    done = hpcrl("launch", environ, "+experiment=demo", f"cluster.device={device}", f"run_dir={run}")
    assert done.returncode == ExitCode.BAD_INPUT and told in done.stderr, done.stderr
    assert done.stderr.startswith("cluster.device: this machine ") and len(done.stderr.splitlines()) == 1
    assert not run.exists()
