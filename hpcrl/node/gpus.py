"""Checks that a node's ranks can use its GPUs: visible GPUs, driver, CUDA versions of torch and engines, free memory.

Runs before any rank starts, with neither torch nor CUDA in this process: torch's build is read from its version.py, and
a separate process, which creates no context, queries the driver.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import Distribution
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config
from hpcrl.config.abilities import chosen
from hpcrl.node.amd import processes_on
from hpcrl.node.devices import (
    BY_BUS,
    HIP_VISIBLE,
    NO_FILES,
    ORDER,
    VISIBLE,
    amd_names,
    misnamed,
    num_amd,
    num_nvidia,
    visible_amd,
    visible_by,
    visible_gpus,
)
from hpcrl.spec.extras import DAMAGED, install, packages_of
from hpcrl.spec.kinds import GenEngineSpec, TrainEngineSpec
from hpcrl.spec.problems import dotted

MIN_DRIVERS = {12: "driver 525 or newer", 13: "driver 580 or newer"}
"""Major version of CUDA -> the first driver that runs all builds for it
(https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html)."""
MAX_TAKEN = 0.1
"""Share of a GPU that other processes may use: vLLM needs the remaining nine tenths."""
FREED_S, ANSWERS_S, POLL_S = 20.0, 120.0, 0.2
"""Maximum time until the run's previous processes have left a GPU; maximum time for the driver's answer, which may
include loading the driver; interval between checks for signals meanwhile."""
ASK_CUDA = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
version, count, text = ctypes.c_int(), ctypes.c_int(), ctypes.c_char_p()
cuda.cuDriverGetVersion(ctypes.byref(version))
if error := cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
    cuda.cuGetErrorString(error, ctypes.byref(text))
print(version.value, count.value, (text.value or b"").decode(errors="replace") or ("error %d" % error if error else ""))
"""
CPU = "or set cluster.device=cpu"
HIDING = ("", "-1", "none", "void")
"""Lists of GPUs with which a user selects the CPU."""


class AskedToStopError(Exception):
    """A stop signal arrived before the ranks were started."""


@dataclass(frozen=True)
class GpuNeeds:
    """A run's requirements for a node's GPUs.

    Args:
        ranks: Number of the node's ranks that hold a model; 0 if no GPU is used.
        required: Whether GPUs are required; otherwise the CPU is a fallback.
        engines: The engines' modules, each with the extra or package that installs it.
        not_on_amd: Engines that do not run on AMD GPUs, each with the reason.
        wait_s: Maximum wait for GPUs that other processes use.
        shares: Whether other processes may use the GPUs too.
    """

    ranks: int = 0
    required: bool = False
    engines: Mapping[str, str] = field(default_factory=dict)
    not_on_amd: tuple[str, ...] = ()
    wait_s: float = FREED_S
    shares: bool = False

    @classmethod
    def of(cls, config: Config, layout: RoleLayout, ranks: Collection[int], requested: int = 0) -> GpuNeeds:
        """Requirements for the node with these ranks, for which the job requests this many GPUs."""
        uses = config.cluster.device != "cpu" and config.debug != "fake"
        specs = [one for one in chosen(config) if isinstance(one[2], (TrainEngineSpec, GenEngineSpec))]
        return cls(
            uses * len(layout.ranks_with_model & {*ranks}),
            config.cluster.device == "cuda" or requested > 0,
            {
                module: extra
                for _, _, spec in specs
                for module, extra in (*spec.needs.items(), *((name, name) for name in spec.needs_on_gpu))
            },
            tuple(f"{dotted(path)}={name}: {spec.not_on_amd}" for path, name, spec in specs if spec.not_on_amd),
            min(FREED_S, config.timeouts.start_s / 2),
            config.cluster.oversubscribe,
        )


class TorchBuild(NamedTuple):
    """Torch's version, and the versions of CUDA and HIP that it is built for; empty if for neither."""

    version: str
    cuda: str
    hip: str

    @classmethod
    def installed(cls) -> TorchBuild:
        """The installed build, from the file that torch itself reads."""
        spec = find_spec("torch")
        text = (Path(spec.origin).parent / "version.py").read_text() if spec is not None and spec.origin else ""
        found = dict(re.findall(r"^(__version__|cuda|hip)\b.*= '(.*)'$", text, re.MULTILINE))
        return cls(*(found.get(name, "") for name in ("__version__", "cuda", "hip")))

    def __str__(self) -> str:
        kind = f"CUDA {self.cuda}" if self.cuda else f"ROCm {self.hip}" if self.hip else "CPUs only"
        return f"torch {self.version or '(none)'}, a build for {kind},"


class Findings(NamedTuple):
    """GPU findings, as "this node ..." or empty. `problem` is why the node's ranks must not start."""

    problem: str = ""
    note: str = ""


def look(
    needs: GpuNeeds,
    environ: Mapping[str, str],
    signals: Sequence[int],
    say: Callable[[str], None],
    devices: Path = Path("/dev"),
    torch: TorchBuild | None = None,
) -> Findings:
    """Check this node's GPUs. Call it before the ranks start, since they fill GPUs themselves.

    Args:
        say: Prints a line if the node waits.
        devices: The folder of device files.
        torch: Torch's build; None: the installed build.

    Raises:
        AskedToStopError: If `signals` has one.
    """
    problem = unusable(needs, environ, devices, torch, signals)
    if problem or not needs.ranks:
        return Findings(problem)
    gpus = visible_gpus(environ, devices)[: needs.ranks]
    if not gpus:
        there, name = num_amd(devices) or num_nvidia(devices), visible_by(environ, devices)
        return Findings("", f"computes on the CPU: {name}={environ[name]!r} hides its {there} GPU(s)" if there else "")
    unseen = _unseen(gpus, environ, devices)
    problem, told = ("", unseen) if unseen else _memory(needs, gpus, _Watch(environ, devices, signals), say)
    if problem:
        return Findings(problem)
    compiles = _nvcc_note(needs, environ, torch or TorchBuild.installed(), signals)
    return Findings("", " and ".join(filter(None, (told, compiles))))


def unusable(
    needs: GpuNeeds,
    environ: Mapping[str, str],
    devices: Path = Path("/dev"),
    torch: TorchBuild | None = None,
    signals: Sequence[int] = (),
) -> str:
    """Why this node's ranks could not compute on its GPUs, or would use the CPU although it has GPUs, with the remedy,
    as "this node ..."; empty if they can, or if the node has no GPUs and none are required. `torch` is by default the
    installed build. AskedToStopError if `signals` has one."""
    gpus, amd = visible_gpus(environ, devices), num_amd(devices)
    if (problem := mislisted(needs, environ, devices)) or not (needs.ranks and gpus):
        return problem
    torch = torch or TorchBuild.installed()
    names = f" ({told})" if (told := amd_names(devices)) else ""
    what = f"{len(gpus)} {'AMD' if amd else 'NVIDIA'} GPU(s){names}"
    if not (torch.hip if amd else torch.cuda):
        build = "ROCm" if amd else "CUDA"
        return f"has {what}, and {torch} finds none of them: install torch for {build}, {CPU}"
    if amd and needs.not_on_amd:
        return f"has {what}, which {'; '.join(needs.not_on_amd)}: choose another engine"
    problem = next(_engine_problems(needs.engines, torch), "")
    return problem or ("" if amd else _driver_problem(gpus, environ, torch, signals))


def mislisted(needs: GpuNeeds, environ: Mapping[str, str], devices: Path = Path("/dev")) -> str:
    """Why the node shows its ranks other GPUs than its lists of GPUs suggest, too few, or none, as "this node ...".
    Empty if showing none means the CPU: the node has none, or the user hides them, and none are required."""
    gpus, name = visible_gpus(environ, devices), visible_by(environ, devices)
    value, there = environ.get(name, ""), num_amd(devices) or num_nvidia(devices)
    if not needs.ranks:
        return ""
    if problem := misnamed(environ, devices):
        return problem
    if gpus:
        ends = value.split(",")[len(gpus) :]
        shows = f"shows {len(gpus)} GPU(s) to {needs.ranks} rank(s) that hold a model, since {name}={value!r} ends"
        return f"{shows} at {ends[0]!r}: name only GPUs, {CPU}" if ends and len(gpus) < needs.ranks else ""
    if not needs.required and not (there and value.strip() not in HIDING):
        return ""
    if not name:
        why = "it has neither /dev/nvidia0 nor /dev/kfd; in a container, start it with GPUs (apptainer --nv, --rocm)"
    elif value == NO_FILES:
        why = f"{name}={NO_FILES}: Slurm gave this job none; request them (gpus_per_node of the component)"
    else:
        why = f"{name}={value!r} names none; unset it"
    what = f"shows none of its {there} GPU(s) to" if there else "has no GPU for"
    return f"{what} {needs.ranks} rank(s) that hold a model, since {why}, {CPU}"


def _engine_problems(engines: Mapping[str, str], torch: TorchBuild) -> Iterator[str]:
    """Engines whose package requires another torch or CUDA, by its requirements, version or name."""
    for module, extra in engines.items():
        for package in packages_of(module):
            try:
                own, asked = _described(package)
            except DAMAGED:
                where = package.locate_file("")
                yield f"has {module}, whose installation is damaged ({where}): reinstall it: {install([extra])}"
                continue
            texts = [own, *map(str, asked)]
            built = {cuda for text in texts for cuda in re.findall(r"(?<![a-z0-9])cu(1\d)", text)}
            way = f"build {module} for ROCm" if torch.hip else f"use one environment for both: {install([extra])}"
            if built and torch.cuda.partition(".")[0] not in built:
                yield f"has {own}, built for CUDA {' and '.join(sorted(built))}, but {torch} with it: {way}"
            for one in asked:
                if one.name == "torch" and not one.specifier.contains(torch.version, prereleases=True):
                    yield f"has {own}, which requires {one.name}{one.specifier}, but {torch} with it: {way}"


def _described(package: Distribution) -> tuple[str, list[Requirement]]:
    """A package's name and version, and its requirements here; an error of DAMAGED if its metadata lack them."""
    asked = [Requirement(text) for text in package.requires or ()]
    if not (package.name and package.version):
        raise ValueError("no name or version")
    return f"{package.name} {package.version}", [one for one in asked if one.marker is None or one.marker.evaluate()]


def _driver_problem(gpus: Sequence[str], environ: Mapping[str, str], torch: TorchBuild, signals: Sequence[int]) -> str:
    """Why the driver does not support torch's CUDA or the visible GPUs. Queries the libcuda that ranks would load: the
    one of NVIDIA's cuda-compat supports builds for a newer CUDA on an older kernel driver."""
    # CUDA shows a process at most one MIG part, however many are named.
    for shown in gpus if gpus[0].startswith("MIG-") else [",".join(gpus)]:
        try:
            command = [sys.executable, "-S", "-X", "utf8", "-c", ASK_CUDA]
            found = _ask(command, {ORDER: BY_BUS, **environ, VISIBLE: shown}, signals)
        except subprocess.TimeoutExpired:
            silent = f"has a driver that does not answer within {ANSWERS_S:g} s (nvidia-smi)"
            return f"{silent}: add it to cluster.exclude, {CPU}"
        except subprocess.CalledProcessError as error:
            why = (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1]
            return (
                f"has GPU(s) {shown}, but its driver does not load ({why}): in a container, start it with GPUs "
                f"(apptainer --nv), else cluster.exclude the node, {CPU}"
            )
        version, count, refused = found.splitlines()[-1].split(" ", 2)
        driver, major = int(version), int(torch.cuda.partition(".")[0])
        if driver // 1000 < major:
            least = MIN_DRIVERS.get(major, "a newer driver")
            return (
                f"has a driver for CUDA {driver // 1000}.{driver % 1000 // 10}, but {torch} needs {least}: load "
                f"NVIDIA's cuda-compat-{major}, first in LD_LIBRARY_PATH (cluster.modules, cluster.prologue), install "
                f"torch for CUDA {driver // 1000}, or cluster.exclude the node"
            )
        num = len(shown.split(","))
        if int(count) < num:
            return (
                f"has a driver that finds {count} of the {num} GPU(s) {shown}{f' ({refused})' if refused else ''}: "
                f"name others in {VISIBLE} (nvidia-smi -L), or cluster.exclude the node"
            )
    return ""


class _Card(NamedTuple):
    """A GPU as nvidia-smi sees it."""

    number: str
    uuid: str
    total_mib: int
    used_mib: int
    mig: str
    name: str


def _nvcc_note(needs: GpuNeeds, environ: Mapping[str, str], torch: TorchBuild, signals: Sequence[int]) -> str:
    """A note if engines would compile for another CUDA than torch's; empty if not."""
    nvcc = _nvcc(environ, signals) if needs.engines and torch.cuda else ""
    if not nvcc or nvcc.partition(".")[0] == torch.cuda.partition(".")[0]:
        return ""
    return (
        f"has nvcc for CUDA {nvcc}, with which {' or '.join(needs.engines)} may compile, but {torch} needs "
        f"code compiled with CUDA {torch.cuda}: load CUDA {torch.cuda} (cluster.modules)"
    )


def _nvcc(environ: Mapping[str, str], signals: Sequence[int]) -> str:
    """CUDA version of the compiler that torch and DeepSpeed would call; empty if there is none."""
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    command = f"{home}/bin/nvcc" if home else shutil.which("nvcc", path=environ.get("PATH"))
    if command is None:
        return ""
    try:
        release = re.search(r"release (\d+\.\d+)", _ask([command, "--version"], environ, signals))
    except (OSError, subprocess.SubprocessError):
        return ""
    return release[1] if release else ""


def _unseen(gpus: Sequence[str], environ: Mapping[str, str], devices: Path) -> str:
    """Why other processes' memory use on these GPUs is unknown; empty if nvidia-smi or AMD's driver reports it."""
    if num_amd(devices):
        sizes = visible_amd(environ, devices)
        known = all(name in sizes and sizes[name].total_bytes for name in gpus)
        return "" if known else "has a driver that does not show whether others use its GPUs (/sys/class/drm)"
    if shutil.which("nvidia-smi", path=environ.get("PATH")) is None:
        return "has no nvidia-smi to check whether other processes use its GPUs"
    if gpus[0].isdigit() and (order := environ.get(ORDER, BY_BUS)) != BY_BUS:
        return f"has {ORDER}={order}, but nvidia-smi, which shows whether others use GPUs, numbers them by {BY_BUS}"
    return ""


class _Watch(NamedTuple):
    """Reads the memory use of a node's GPUs: with nvidia-smi, or from the files of AMD's driver."""

    environ: Mapping[str, str]
    devices: Path
    signals: Sequence[int]

    def cards(self) -> list[_Card]:
        """The GPUs whose memory is known; an AMD GPU has the number in HIP's list, and the driver's id as UUID, since
        parts of one GPU share a UUID."""
        if num_amd(self.devices):
            return [
                _Card(name, str(gpu.id), gpu.total_bytes >> 20, gpu.used_bytes >> 20, "", gpu.name)
                for name, gpu in visible_amd(self.environ, self.devices).items()
            ]
        return _cards(self.environ, self.signals)

    def owners(self) -> dict[str, list[str]]:
        """UUID of a GPU -> the processes that use it."""
        found: dict[str, list[str]] = {}
        if num_amd(self.devices):
            system = self.devices.parent / "sys"
            return {str(gpu.id): processes_on(gpu, system) for gpu in visible_amd(self.environ, self.devices).values()}
        what = "compute-apps=gpu_uuid,pid,used_memory,process_name"
        for uuid, pid, used, name in _query(self.environ, self.signals, what, 4):
            found.setdefault(uuid, []).append(f"pid {pid} ({name}, {used} MiB)")
        return found


def _memory(needs: GpuNeeds, gpus: Sequence[str], watch: _Watch, say: Callable[[str], None]) -> Findings:
    """A problem for GPUs of the ranks that other processes still use after needs.wait_s, or that MIG divides but a list
    names as a whole; a note for GPUs that nvidia-smi does not list."""
    for left_s in reversed(range(int(needs.wait_s) + 1)):
        cards = [card for card in watch.cards() if any(_is_named(card, gpu) for gpu in gpus)]
        if whole := [card.number for card in cards if card.mig == "Enabled"]:
            return Findings(
                f"has GPU(s) {','.join(whole)} divided by MIG, of which CUDA shows a process at most one part: name "
                f"parts, {VISIBLE}=MIG-UUID,... (nvidia-smi -L), {CPU}"
            )
        full = [card for card in cards if card.used_mib > MAX_TAKEN * card.total_mib]
        if not full or needs.shares:
            unseen = ",".join(gpu for gpu in gpus if not any(_is_named(card, gpu) for card in cards))
            return Findings(
                note=f"has an nvidia-smi that does not show whether others use GPU(s) {unseen}" * bool(unseen)
            )
        if 0 < left_s == int(needs.wait_s):
            say(f"waits up to {left_s} s for GPUs that others use")
        time.sleep(min(left_s, 1.0))
    owners = watch.owners()
    said = [
        f"{card.used_mib} of {card.total_mib} MiB of GPU {card.number} ({card.name}) by "
        f"{' and '.join(owners.get(card.uuid) or ['a process that this one may not see'])}"
        for card in full
    ]
    variable = HIP_VISIBLE if num_amd(watch.devices) else VISIBLE
    return Findings(
        f"has GPUs that others use, {', '.join(said)}: end them, name other GPUs in {variable}, cluster.exclude the "
        "node, or set cluster.oversubscribe=true"
    )


def _is_named(card: _Card, gpu: str) -> bool:
    """Whether an entry of CUDA_VISIBLE_DEVICES is this GPU. The GPU of a MIG- name is unknown."""
    return gpu == card.number or (gpu.startswith("GPU-") and card.uuid.lower().startswith(gpu.lower()))


def _cards(environ: Mapping[str, str], signals: Sequence[int]) -> list[_Card]:
    """The GPUs whose memory nvidia-smi reports."""
    rows = _query(environ, signals, "gpu=index,uuid,memory.total,memory.used,mig.mode.current,name", 6)
    return [
        _Card(number, uuid, int(total), int(used), mig, name)
        for number, uuid, total, used, mig, name in rows
        if total.isdecimal() and used.isdecimal()
    ]


def _query(environ: Mapping[str, str], signals: Sequence[int], what: str, num_columns: int) -> list[list[str]]:
    """The rows of nvidia-smi's answer; none if it fails."""
    try:
        told = _ask(["nvidia-smi", f"--query-{what}", "--format=csv,noheader,nounits"], environ, signals)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = ([cell.strip() for cell in line.split(",", num_columns - 1)] for line in told.splitlines())
    return [row for row in rows if len(row) == num_columns]


def _ask(command: Sequence[str], environ: Mapping[str, str], signals: Sequence[int]) -> str:
    """A program's output. OSError if it cannot start, SubprocessError if it fails or takes longer than ANSWERS_S,
    AskedToStopError after a signal. The program is then killed but, unlike in subprocess.run(), not waited for, since a
    process that is blocked in the kernel does not end."""
    process = subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout is not None and process.stderr is not None
    end = time.monotonic() + ANSWERS_S
    with process.stdout, process.stderr:
        try:
            while time.monotonic() < end:
                if signals:
                    raise AskedToStopError
                with contextlib.suppress(subprocess.TimeoutExpired):
                    told, error = process.communicate(timeout=POLL_S)
                    subprocess.CompletedProcess(command, process.returncode, told, error).check_returncode()
                    return told
            raise subprocess.TimeoutExpired(command, ANSWERS_S)
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
