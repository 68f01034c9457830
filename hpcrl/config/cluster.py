"""The machines of a run and the roles on them: the sections `layout` and `cluster`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator

from hpcrl.spec.fields import NUMBER, Count, Natural, Positive, PositiveFloat, Section, with_fields
from hpcrl.spec.tables import ROLES

MAX_RANKS = 1 << 16
"""Maximum ranks of a role."""

if TYPE_CHECKING:
    RoleName = str
else:
    RoleName = Literal[("controller", *ROLES)]


class RoleConfig(Section):
    """The ranks of a role: its own, or shared with another role."""

    num_ranks: Annotated[int, Field(ge=1, le=MAX_RANKS), NUMBER] | None = None
    """Number of ranks; with colocate_with, the number of the other role's first ranks to share; null: all of them."""
    colocate_with: RoleName | None = None
    """Role whose ranks this role shares."""
    tensor_parallel: Positive = 1
    """Ranks per replica."""
    min_ranks: Positive = 1
    """Continue while this many ranks remain (reward, env, judge and reward_model only); with domains, while each domain
    has this many."""
    domains: dict[str, Positive] = {}
    """Domain -> number of ranks that score only this domain (reward only); the remaining ranks score all other
    domains."""


class LayoutConfig(Section):
    """The roles of each rank. Rank 0 is the controller."""

    name: str = "colocated"
    """Name of the layout, for display only."""

    offload: Literal["auto", "never", "always"] = "auto"
    """Free memory between phases where trainer and generator share ranks and rollout.max_staleness=0: the generator
    sleeps during training; optimizer, gradients and then weights are in host memory during generation. auto: on GPUs,
    if the engine can sleep or the plan does not fit 80 GB cards otherwise."""

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
    return with_fields(LayoutConfig, **sections)


def _not_a_number(value: Any) -> Any:
    # YAML reads 01:30:00 as 5400 and 90 as a number, whereas sbatch reads a number as minutes.
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
    """Turn [--exclusive, --mail-type=END] into {exclusive: true, mail-type: END}."""
    if not isinstance(value, list | tuple):
        return value
    found: dict[str, Any] = {}
    for option in value:
        name, given, text = str(option).removeprefix("--").partition("=")
        if name in found:
            raise ValueError(f"--{name} may be given only once")
        found[name] = text if given else True
    return found


def _one_line(value: Any) -> str | bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float | str) and len(str(value).splitlines()) == 1:
        return str(value)
    raise ValueError("expected text on one line, true or false")


def _as_variable(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError('expected text; quote it, as in {NAME: "true"}')
    return str(value) if isinstance(value, int | float) else value


OptionName = Annotated[str, Field(pattern=OPTION)]
OptionValue = Annotated[str | bool, PlainValidator(_one_line)]
SlurmOptions = Annotated[dict[OptionName, OptionValue], BeforeValidator(_as_mapping)]
"""Option -> value; true if the option takes none, false to omit it. A list in command-line form is accepted as well."""

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
"""Options of sbatch that hpcrl sets itself or does not support -> the key that sets them."""
SET_FOR_SRUN = {
    **dict.fromkeys(("nodes", "ntasks", "ntasks-per-node", "het-group"), "layout and cluster.components"),
    "cpus-per-task": "cpus_per_node of a component",
    **dict.fromkeys(("container-image", "container-mounts", "container-workdir"), "cluster.container"),
    **dict.fromkeys(("output", "error", "input", "chdir"), "run_dir"),
    **dict.fromkeys(("export", "kill-on-bad-exit", "no-kill", "multi-prog", "pty"), ""),
}
"""Options of srun, for the agents, that hpcrl sets itself or does not support -> the key that sets them."""
GPU_OPTIONS = ("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket")
"""Options of sbatch with which cluster.sbatch_options replaces hpcrl's own request for GPUs."""
GpuRequest = Literal["gres", "gpus_per_node", "gpus_per_task", "none"]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
VariableValue = Annotated[str, Field(pattern=r"^[^\x00\r\n]*$"), BeforeValidator(_as_variable)]


class NodeLimits(Section):
    """The largest request for a node of cluster.partition. Slurm refuses or never starts a job that asks for more."""

    gpus: Natural | None = None
    """GPUs of a node; null: unknown, not checked."""
    cpus: Annotated[int, Field(ge=1, le=8192), NUMBER] | None = None
    """CPUs of a node that a job may request; null: unknown, not checked."""
    memory: Memory | None = None
    """Memory of a node that a job may request, such as 480G; null: unknown, not checked."""


class ComponentConfig(Section):
    """Identical nodes: a component of a heterogeneous job, or the only component of a plain job."""

    roles: list[RoleName] = []
    """Roles whose ranks are on these nodes; roles that share ranks with one of them are included."""
    ranks_per_node: Count | None = None
    """Ranks per node, without the controller; null: all on one node."""
    cpus_per_node: Annotated[int, Field(ge=1, le=8192), NUMBER] | None = None
    """CPUs per node; null: threads_per_rank for each rank of the node."""
    gpus_per_node: Natural = 0
    """GPUs per node; 0: no GPUs are requested."""
    gpu_type: Word | None = None
    """Type of the GPUs, as named by the cluster."""
    gpu_request: GpuRequest | None = None
    """Option of sbatch that requests the GPUs; null: cluster.gpu_request."""
    memory: Memory | None = None
    """Memory per node, such as 500G; null: the partition's default."""
    partition: Word | None = None
    """Partition; null: cluster.partition."""
    constraint: Word | None = None
    """Features that the nodes must have; null: cluster.constraint."""


def memory_bytes(memory: str) -> int:
    """Bytes of a memory size in sbatch's form: a number with unit K, M, G or T; without a unit, M."""
    unit = memory[-1] if memory[-1].isalpha() else "M"
    return int(memory.rstrip("KMGT")) << {"K": 10, "M": 20, "G": 30, "T": 40}[unit]


class ClusterConfig(Section):
    """Where the run executes."""

    name: Literal["local", "slurm"] = "local"
    """local: this machine; slurm: a Slurm job."""
    threads_per_rank: Count = 1
    """CPU threads per rank."""
    oversubscribe: bool = False
    """Start a run although its plan exceeds a node's memory, or other processes fill its GPUs; with name=local, also
    with more than 64 threads and processes per core of this machine."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of models; auto: GPUs, one for each rank with a model, or the CPU on nodes without GPUs. Too few GPUs are
    an error; in a Slurm job, so are ranks of one role on nodes both with and without GPUs."""
    numa: Literal["auto", "off"] = "auto"
    """CPUs of a rank with a GPU. auto: the CPUs of the GPU's NUMA node, unless it has too few, or Slurm or a launcher
    has bound the rank to one NUMA node; off: all CPUs of the job on the node."""
    components: dict[Annotated[str, Field(pattern=COMPONENT)], ComponentConfig] = {}
    """Component -> its nodes; empty: one node for all ranks. Several components make a heterogeneous job."""
    gpu_request: GpuRequest = "gres"
    """Option of sbatch that requests a component's GPUs: gres is --gres=gpu:TYPE:N, gpus_per_node is
    --gpus-per-node=TYPE:N, gpus_per_task is --gpus-per-task=TYPE:N (hpcrl starts one task per node); none: no option,
    for sites whose nodes come whole, with their GPUs."""
    node_limits: NodeLimits = NodeLimits()
    """The largest request for a node; components in another partition are not checked."""
    unsupported: str | None = None
    """Why hpcrl cannot run on this site, for its file in conf/cluster: every start is refused with this text."""
    account: Word | None = None
    """Account to charge; null: your default, or SBATCH_ACCOUNT."""
    partition: Word | None = None
    """Partition; null: the cluster's default, or SBATCH_PARTITION."""
    qos: Word | None = None
    """Quality of service (qos)."""
    reservation: Word | None = None
    """Reservation."""
    constraint: Word | None = None
    """Features that the nodes must have."""
    exclude: Word | None = None
    """Nodes to avoid."""
    switches: Word | None = None
    """Maximum number of leaf switches, COUNT or COUNT@MAX_WAIT."""
    time: WallTime = "24:00:00"
    """Wall-time limit of one job, in sbatch's form: MINUTES, HH:MM:SS, D-HH:MM:SS."""
    signal_lead_s: Annotated[int, Field(ge=1, le=65535), NUMBER] = 300
    """Lead of the signal before the wall-time limit or a preemption, seconds (Slurm may be up to 60 s early)."""
    after: Literal["requeue", "chain"] = "requeue"
    """How an unfinished run continues: the same job is requeued, or a chain of dependent jobs is submitted."""
    num_links: Annotated[int, Field(ge=1, le=100), NUMBER] = 4
    """Jobs of a chain, including the first."""
    max_restarts: Natural = 3
    """Maximum restarts in a row after crashes and hangs without a new checkpoint; other restarts do not count."""
    sbatch_options: SlurmOptions = {}
    """Additional options of sbatch, such as {exclusive: true, mail-user: me@site}, for every component."""
    srun_options: SlurmOptions = {}
    """Additional options of the srun that starts the agents, such as {mpi: pmix}."""
    modules: list[Word] = []
    """Environment modules to load on the nodes."""
    environment: dict[VariableName, VariableValue] = {}
    """Environment variables of all processes of the job, such as {NCCL_CROSS_NIC: 1}, set after the modules are loaded;
    the shell expands nothing in the values. They are stored with the configuration, so give no secrets. A run on this
    machine (name=local) keeps your shell's variables and sets none of these."""
    prologue: str = ""
    """Shell lines run on the first node before anything else, such as `source ~/venv/bin/activate`. A line that fails
    ends the job."""
    network_interface: Word | None = None
    """Network interface for stores, gloo and NCCL between nodes, such as ib0; null: the interface to which a node's
    host name resolves, and NCCL's own choice."""
    container: Literal["none", "apptainer", "pyxis"] = "none"
    """Container runtime of the ranks."""
    image: Image | None = None
    """Container image: a file, or an image address for pyxis."""
    mounts: list[Word] = []
    """Additional folders to mount in the container, as SOURCE or SOURCE:TARGET."""
    storage_gb_per_s: PositiveFloat = 2.0
    """Total write speed of all ranks to the run folder's file system, GB/s; used for the plan's checkpoint time."""
    link_gb_per_s: PositiveFloat = 50.0
    """Network speed of a rank in one direction, GB/s; used for the plan's times of a weight update and of a training
    step's communication. 50 is one adapter of 400 Gb/s per rank."""

    @property
    def time_s(self) -> int:
        """The wall-time limit in seconds. sbatch accepts MINUTES[:SECONDS], HH:MM:SS and DAYS-HH[:MM[:SS]]."""
        days, dash, rest = self.time.rpartition("-")
        numbers = [int(number) for number in rest.split(":")]
        if dash or len(numbers) == 3:
            hours, minutes, seconds = [*numbers, 0, 0][:3]
        else:
            hours, (minutes, seconds) = 0, [*numbers, 0][:2]
        return ((24 * int(days or 0) + hours) * 60 + minutes) * 60 + seconds
