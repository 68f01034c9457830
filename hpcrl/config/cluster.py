"""Which machines a run gets and which of its roles they hold: the sections `layout` and `cluster`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, create_model

from hpcrl.spec.fields import NUMBER, Count, Natural, Positive, PositiveFloat, Section
from hpcrl.spec.tables import ROLES

MOST_RANKS = 1 << 16
"""Ranks of a role."""

if TYPE_CHECKING:
    RoleName = str
else:
    RoleName = Literal[("controller", *ROLES)]


class RoleConfig(Section):
    """How many ranks a role has, or with which role it shares ranks."""

    num_ranks: Annotated[int, Field(ge=1, le=MOST_RANKS), NUMBER] | None = None
    """Ranks of its own; with colocate_with: the first so many of the other role's, null all of them."""
    colocate_with: RoleName | None = None
    """Role whose ranks it shares."""
    tensor_parallel: Positive = 1
    """Ranks of one replica."""
    min_ranks: Positive = 1
    """reward, env: go on while so many remain."""


class LayoutConfig(Section):
    """Which ranks play which role. Rank 0 is the controller."""

    name: str = "colocated"
    """Name of the layout, for people."""

    if TYPE_CHECKING:  # a field for each role of the table

        def __getattr__(self, role: str) -> RoleConfig: ...

    def of(self, role: RoleName) -> RoleConfig:
        """The section of a role."""
        section = getattr(self, role)
        assert isinstance(section, RoleConfig)
        return section


def layout_class() -> type[LayoutConfig]:
    """LayoutConfig with a section for each role."""
    sections: dict[str, Any] = {}
    for name, role in ROLES.items():
        default = RoleConfig(num_ranks=role.num_ranks, colocate_with=role.colocate_with)
        sections[name] = (RoleConfig, Field(default, description=role.about))
    return create_model("LayoutConfig", __base__=LayoutConfig, __doc__=LayoutConfig.__doc__, **sections)


def _not_a_number(value: Any) -> Any:
    # YAML reads 01:30:00 as 5400 and 90 as a number; sbatch reads a bare number as minutes.
    if isinstance(value, int | float):
        raise ValueError("expected text such as 24:00:00; put it in quotes")
    return value


WORD = r"^[A-Za-z0-9_.,:=/@%+\[\]()|&*!-]+$"
IMAGE = WORD.replace("[", "[#", 1)
WALL_TIME = r"^(\d+-\d+(:\d+){0,2}|\d+(:\d+){0,2})$"
MEMORY = r"^\d+[KMGT]?$"
COMPONENT = r"^[a-z][a-z0-9_]*$"
OPTION = r"^[a-z][a-z0-9-]*$"
Word = Annotated[str, Field(pattern=WORD)]
Image = Annotated[str, Field(pattern=IMAGE)]
WallTime = Annotated[str, Field(pattern=WALL_TIME), BeforeValidator(_not_a_number)]
Memory = Annotated[str, Field(pattern=MEMORY)]


def _as_mapping(value: Any) -> Any:
    """[--exclusive, --mail-type=END] is {exclusive: true, mail-type: END}."""
    if not isinstance(value, list | tuple):
        return value
    found: dict[str, Any] = {}
    for option in value:
        name, given, text = str(option).removeprefix("--").partition("=")
        if name in found:
            raise ValueError(f"--{name} once only")
        found[name] = text if given else True
    return found


def _one_line(value: Any) -> str | bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float | str) and len(str(value).splitlines()) == 1:
        return str(value)
    raise ValueError("expected text on one line, true or false")


OptionName = Annotated[str, Field(pattern=OPTION)]
OptionValue = Annotated[str | bool, PlainValidator(_one_line)]
Options = Annotated[dict[OptionName, OptionValue], BeforeValidator(_as_mapping)]
"""Option -> its value, true where it takes none, false to leave it out. A list as on a command line is read too."""

SET_FOR_SBATCH = {
    **{name: f"cluster.{name}" for name in ("account", "partition", "qos", "reservation", "constraint", "exclude")},
    **{"switches": "cluster.switches", "time": "cluster.time", "signal": "cluster.signal_lead_s"},
    **dict.fromkeys(("requeue", "no-requeue"), "cluster.after"),
    **dict.fromkeys(("nodes", "ntasks", "ntasks-per-node"), "layout and cluster.components"),
    "cpus-per-task": "cpus_per_node of a component",
    "mem": "memory of a component",
    "gres": "gpus_per_node and gpu_type of a component",
    "job-name": "run_name",
    **dict.fromkeys(("output", "error", "open-mode", "chdir"), "run_dir"),
    "array": "-m for a sweep",
    **dict.fromkeys(("parsable", "test-only", "wait", "wrap"), ""),
}
"""Options of sbatch that hpcrl gives itself, or cannot do with -> the key that sets them."""
SET_FOR_SRUN = {
    **dict.fromkeys(("nodes", "ntasks", "ntasks-per-node", "het-group"), "layout and cluster.components"),
    "cpus-per-task": "cpus_per_node of a component",
    **dict.fromkeys(("container-image", "container-mounts", "container-workdir"), "cluster.container"),
    **dict.fromkeys(("output", "error", "input", "chdir"), "run_dir"),
    **dict.fromkeys(("export", "kill-on-bad-exit", "no-kill", "multi-prog", "pty"), ""),
}
"""The same of the srun that starts the agents."""
GPU_OPTIONS = ("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket")
"""Options of sbatch that ask for GPUs in the place of --gres."""


class ComponentConfig(Section):
    """Nodes that are alike: a component of a heterogeneous job, or the only one of a plain job."""

    roles: list[RoleName] = []
    """Roles whose ranks are on these nodes; roles that share ranks with one of them come along."""
    ranks_per_node: Count | None = None
    """Ranks of a node, the controller not counted; null: all on one node."""
    cpus_per_node: Annotated[int, Field(ge=1, le=8192), NUMBER] | None = None
    """CPUs of a node; null: threads_per_rank for each of its ranks."""
    gpus_per_node: Natural = 0
    """GPUs of a node; 0: none are asked for."""
    gpu_type: Word | None = None
    """Type of the GPUs, as the cluster names it."""
    memory: Memory | None = None
    """Memory of a node, such as 500G; null: the partition's default."""
    partition: Word | None = None
    """Partition; null: cluster.partition."""
    constraint: Word | None = None
    """Features that the nodes must have; null: cluster.constraint."""


def memory_bytes(memory: str) -> int:
    """Bytes of memory as sbatch reads it: a number of K, M, G or T, without a letter of M."""
    unit = memory[-1] if memory[-1].isalpha() else "M"
    return int(memory.rstrip("KMGT")) << {"K": 10, "M": 20, "G": 30, "T": 40}[unit]


class ClusterConfig(Section):
    """Where the program runs."""

    name: Literal["local", "slurm"] = "local"
    """This machine, or a Slurm job."""
    threads_per_rank: Count = 1
    """CPU threads of each rank."""
    oversubscribe: bool = False
    """name=local: start even more than 64 threads and processes for each core of this machine."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where models are; auto: on GPUs, one for each rank with a model, or on the CPU where a node shows no GPU. Too few
    GPUs are an error."""
    components: dict[Annotated[str, Field(pattern=COMPONENT)], ComponentConfig] = {}
    """Component -> its nodes; empty: one node for all ranks. More than one makes a heterogeneous job."""
    account: Word | None = None
    """Account to charge; null: your default, or SBATCH_ACCOUNT."""
    partition: Word | None = None
    """Partition; null: the cluster's default, or SBATCH_PARTITION."""
    qos: Word | None = None
    """Quality of service."""
    reservation: Word | None = None
    """Reservation."""
    constraint: Word | None = None
    """Features that the nodes must have."""
    exclude: Word | None = None
    """Nodes to avoid."""
    switches: Word | None = None
    """Most leaf switches, COUNT or COUNT@MAX_WAIT."""
    time: WallTime = "24:00:00"
    """Wall-time limit of one job, as sbatch reads it: MINUTES, HH:MM:SS, D-HH:MM:SS."""
    signal_lead_s: Annotated[int, Field(ge=1, le=65535), NUMBER] = 300
    """Warning before the wall-time limit or a preemption, seconds (Slurm may be up to 60 s early)."""
    after: Literal["requeue", "chain"] = "requeue"
    """How an unfinished run gets its next job: the same job requeued, or a queue of dependent jobs."""
    num_links: Annotated[int, Field(ge=1, le=100), NUMBER] = 4
    """Jobs of a chain, the first included."""
    max_restarts: Natural = 3
    """Restarts in a row after crashes and hangs without a new checkpoint in between; others do not count."""
    sbatch_options: Options = {}
    """Further options of sbatch, such as {exclusive: true, mail-user: me@site}, for every component."""
    srun_options: Options = {}
    """Further options of the srun that starts the agents, such as {mpi: pmix}."""
    modules: list[Word] = []
    """Environment modules to load on the nodes."""
    prologue: str = ""
    """Shell lines to run on the first node before anything else, such as `source ~/venv/bin/activate`."""
    network_interface: Word | None = None
    """Interface on which ranks of several nodes listen and connect, such as ib0: stores, gloo and NCCL; null: the one
    that a node's host name stands for, and NCCL's own choice."""
    container: Literal["none", "apptainer", "pyxis"] = "none"
    """What the ranks run in."""
    image: Image | None = None
    """Container image: a file, or what pyxis pulls."""
    mounts: list[Word] = []
    """Folders inside the container besides the run folder and the source tree, SOURCE or SOURCE:TARGET."""
    storage_gb_per_s: PositiveFloat = 2.0
    """GB/s that all ranks together write to the run folder's file system; the plan's checkpoint time comes of it."""

    @property
    def time_s(self) -> int:
        """The wall-time limit in seconds. sbatch reads MINUTES[:SECONDS], HH:MM:SS and DAYS-HH[:MM[:SS]]."""
        days, dash, rest = self.time.rpartition("-")
        numbers = [int(number) for number in rest.split(":")]
        if dash or len(numbers) == 3:
            hours, minutes, seconds = [*numbers, 0, 0][:3]
        else:
            hours, (minutes, seconds) = 0, [*numbers, 0][:2]
        return ((24 * int(days or 0) + hours) * 60 + minutes) * 60 + seconds
