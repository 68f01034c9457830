"""A real Slurm on one machine, for trials and tests: slurmctld and any number of slurmd, in one folder, without root.

    python env/slurm/one_machine.py up [--folder FOLDER] [--nodes 4] [--gpus 0] [--accounting]
    export SLURM_CONF=FOLDER/slurm.conf
    python env/slurm/one_machine.py down [--folder FOLDER]

Needs Debian's slurm-wlm and slurm-client (22.05 or later). Partitions: low (default, its jobs are requeued when high
needs the nodes), high, and low and high's nodes without preemption as solo. The nodes share this machine's cores and
memory, whatever they claim; GPUs are claimed too, with terminals as their device files, so that a program sees a
CUDA_VISIBLE_DEVICES but finds no GPU. Neither a password nor munge: anybody on this machine can use it.

With --accounting it keeps accounts and enforces them: slurmdbd on a mariadbd of its own, the account physics, the qos
fast. Needs Debian's slurmdbd, mariadb-server-core and mariadb-client-core too.
"""

from __future__ import annotations

import argparse
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

START_S = 60.0
STOP_S = 20.0
SETTLE_S = 2.0  # from a daemon's start to its pid file
PORT_TRIES = 3
DEFAULT_FOLDER = Path("runs") / "one_machine_slurm"

CONF = """\
ClusterName=one_machine
SlurmctldHost=localhost(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
SlurmctldParameters=preempt_send_user_signal
SlurmctldPort={port}
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
TmpFS={folder}/tmp/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/log/jobcomp.txt
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=40
MinJobAge={min_job_age_s}
EnforcePartLimits=ALL
InactiveLimit=0
Waittime=0
SlurmctldTimeout=30
SlurmdTimeout=10
MessageTimeout=10
TCPTimeout=2
UnkillableStepTimeout=30
DefMemPerCPU=256
GresTypes=gpu
"""
NO_ACCOUNTS = "AccountingStorageType=accounting_storage/none\n"
ACCOUNTS = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStorageEnforce=associations,qos,limits
"""
DBD_CONF = """\
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser={user}
AuthType=auth/none
PidFile={folder}/run/slurmdbd.pid
LogFile={folder}/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
"""
ACCOUNT, QOS = "physics", "fast"


@dataclass(frozen=True)
class Nodes:
    """Nodes that are alike: names PREFIX1..PREFIXn, and what they claim to have."""

    prefix: str = "n"
    count: int = 4
    cpus: int = 4
    memory_mb: int = 8000
    gpus: int = 0

    @property
    def hostlist(self) -> str:
        return f"{self.prefix}[1-{self.count}]"


class PortTaken(RuntimeError):
    """Another process has got a port before the daemon that it was chosen for."""


class Cluster:
    """A cluster that lives in `folder`; a context manager starts and stops it.

    accounting: keeps accounts, knows the account ACCOUNT of this user and the qos QOS, and refuses all others.
    min_job_age_s: how long scontrol knows a job that has ended, 2 at least.
    """

    def __init__(
        self, folder: Path, nodes: Sequence[Nodes] = (Nodes(),), *, accounting: bool = False, min_job_age_s: int = 300
    ):
        self.folder, self.nodes = folder.resolve(), nodes
        self.accounting, self.min_job_age_s = accounting, min_job_age_s
        self.conf = self.folder / "slurm.conf"
        self._database: subprocess.Popen[bytes] | None = None
        self._logged: dict[Path, int] = {}

    def __enter__(self) -> Cluster:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def environ(self) -> dict[str, str]:
        """This process's environment, with Slurm's commands pointed at this cluster and no job's own variables."""
        outside = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
        return outside | {"SLURM_CONF": str(self.conf)}

    @property
    def names(self) -> list[str]:
        return [f"{nodes.prefix}{i}" for nodes in self.nodes for i in range(1, nodes.count + 1)]

    def start(self) -> None:
        """Write the configuration, start the daemons, wait until every node is idle.

        RuntimeError if one is not, or programs are missing: then none runs. One that runs here already goes on.
        """
        needed, packages = ["slurmctld", "slurmd", "sbatch", "srun"], "slurm-wlm slurm-client"
        if self.accounting:
            needed += ["slurmdbd", "mariadbd", "mariadb-install-db"]
            packages += " slurmdbd mariadb-server-core mariadb-client-core"
        if missing := [name for name in needed if find_program(name) is None]:
            raise RuntimeError(f"{', '.join(missing)} not found: apt-get install {packages}")
        if self._pids():
            way = f"use it (export SLURM_CONF={self.conf}), or stop it (make slurm-down)"
            raise RuntimeError(f"a cluster runs in {self.folder}; {way}")
        for left in reversed(range(PORT_TRIES)):
            try:
                self._start()
                return
            except BaseException as error:
                self.stop()
                if not (isinstance(error, PortTaken) and left):
                    raise

    def _start(self) -> None:
        for name in ("run", "state", "spool", "log", *(f"tmp/{node}" for node in self.names)):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self._configure()
        self._logged = self._seen()
        if self.accounting:
            self._start_accounts()
        self._daemon("slurmctld", "-f", str(self.conf))
        for name in self.names:
            self.start_node(name)
        self._await(lambda: self._states() == {"idle"}, lambda: f"nodes are {self._states()}, see {self.folder}/log")

    def start_node(self, name: str) -> None:
        """Start one node's slurmd."""
        self._daemon(f"slurmd-{name}", "-f", str(self.conf), "-N", name)

    def kill_node(self, name: str) -> None:
        """End one node's slurmd without warning, as if the machine had lost its network; its tasks go on."""
        os.kill(int((self.folder / "run" / f"slurmd-{name}.pid").read_text()), signal.SIGKILL)

    def stop(self) -> None:
        """Cancel all jobs and end all daemons, by pid. Says nothing where none runs."""
        pids = self._pids()
        if "slurmctld" in pids:
            with suppress(RuntimeError, subprocess.TimeoutExpired):
                self.run("scancel", "--full", "--user", _user(), check=False)
                self.run("scancel", "--user", _user(), check=False)
                _until(lambda: not self.run("squeue", "-h", check=False).strip(), STOP_S, lambda: "jobs remain")
        storage = ("slurmdbd", "mariadbd")
        for names in (set(pids) - {*storage}, *({name} for name in storage)):  # each after those that write to it
            self._end(names)

    def _end(self, names: Collection[str]) -> None:
        """End these daemons, without mercy where they take too long."""
        pids = [pid for name, pid in self._pids().items() if name in names]

        def living() -> list[int]:  # a pid file may go before its process
            return [pid for pid in pids if self._runs(pid)]

        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in living():
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            with suppress(RuntimeError):
                _until(lambda: not living(), STOP_S, lambda: "")
        if self._database is not None:
            self._database.poll()  # a child that nobody asks for stays as a zombie

    def run(self, *command: str, check: bool = True, timeout_s: float = 30) -> str:
        """Output of one of Slurm's commands against this cluster; RuntimeError with its words if it fails."""
        done = subprocess.run(command, env=self.environ, capture_output=True, text=True, timeout=timeout_s, check=False)
        if check and done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def _configure(self) -> None:
        names = self.names
        ports = _free_ports(len(names) + 2)
        where = {"user": _user(), "folder": self.folder}
        lines = [CONF.format(port=ports[0], min_job_age_s=self.min_job_age_s, **where)]
        lines.append(ACCOUNTS.format(port=ports[1]) if self.accounting else NO_ACCOUNTS)
        at, devices = 2, []
        for nodes in self.nodes:
            gres = f" Gres=gpu:{nodes.gpus}" if nodes.gpus else ""
            for i in range(1, nodes.count + 1):
                lines.append(
                    f"NodeName={nodes.prefix}{i} NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[at]} "
                    f"CPUs={nodes.cpus} Sockets=1 CoresPerSocket={nodes.cpus} ThreadsPerCore=1 "
                    f"RealMemory={nodes.memory_mb}{gres} State=UNKNOWN\n"
                )
                at += 1
            if nodes.gpus:
                devices.append(f"NodeName={nodes.hostlist} Name=gpu File=/dev/tty[0-{nodes.gpus - 1}]\n")
        every = ",".join(nodes.hostlist for nodes in self.nodes)
        lines += [
            f"PartitionName=DEFAULT Nodes={every} MaxTime=UNLIMITED DefaultTime=10 State=UP OverSubscribe=NO\n",
            "PartitionName=low PriorityTier=1 PreemptMode=REQUEUE GraceTime=5 Default=YES\n",
            "PartitionName=high PriorityTier=10 PreemptMode=OFF\n",
            "PartitionName=solo PriorityTier=1 PreemptMode=OFF\n",
        ]
        self.conf.write_text("".join(lines))
        (self.folder / "gres.conf").write_text("".join(devices))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        if self.accounting:
            dbd = self.folder / "slurmdbd.conf"
            dbd.write_text(DBD_CONF.format(port=ports[1], **where))
            dbd.chmod(0o600)  # slurmdbd takes no other

    def _start_accounts(self) -> None:
        """A database without a password, on a socket in this folder only; slurmdbd on it; an account and a qos."""
        data, run, log = (self.folder / name for name in ("database", "run", "log"))
        options = [f"--tmpdir={self.folder}/tmp", f"--user={_user()}", "--innodb-log-file-size=8M"]
        if not data.exists():
            half = data.with_suffix(".new")  # a start that was broken off leaves no half database
            shutil.rmtree(half, ignore_errors=True)
            made = ["mariadb-install-db", "--no-defaults", f"--datadir={half}", *options]
            made += ["--auth-root-authentication-method=normal", "--skip-test-db"]
            with (
                (log / "mariadb-install-db.log").open("w") as out,
                subprocess.Popen(made, stdout=out, stderr=out, start_new_session=True) as making,
            ):
                try:
                    code = making.wait(START_S)
                except BaseException:
                    with suppress(ProcessLookupError):
                        os.killpg(making.pid, signal.SIGKILL)  # with the database that it runs
                    raise
            if code != 0:
                raise RuntimeError(f"mariadb-install-db ended with code {code}, see {out.name}")
            half.rename(data)
        options = ["--no-defaults", f"--datadir={data}", *options, "--skip-networking"]
        at, noted = run / "mariadbd.sock", run / "mariadbd.pid"
        at.unlink(missing_ok=True)
        command = [str(find_program("mariadbd")), *options, f"--socket={at}", f"--pid-file={noted}"]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # would leave one whose pid nobody knows
        try:
            with (log / "mariadbd.log").open("a") as out:
                self._database = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=self.environ, start_new_session=True
                )
            noted.write_text(f"{self._database.pid}\n")  # its own note comes late
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        ended = self._database.poll
        _until(lambda: at.exists() or ended() is not None, START_S, lambda: f"no database, see {out.name}")
        if ended() is not None:
            raise RuntimeError(f"mariadbd ended with code {ended()}, see {out.name}")
        self._daemon("slurmdbd", MYSQL_UNIX_PORT=str(at))
        self._await(self._accounts_answer, lambda: f"no accounts, see {log}/slurmdbd.log")
        for entity in (
            ["cluster", "one_machine"],
            ["qos", QOS],
            ["account", ACCOUNT],
            ["user", _user(), f"account={ACCOUNT}", f"qos=normal,{QOS}"],
        ):
            self.run("sacctmgr", "-i", "add", *entity, check=False)  # it is there where the folder was used before
        if not self.run("sacctmgr", "-n", "show", "assoc", f"account={ACCOUNT}", f"user={_user()}").strip():
            raise RuntimeError(f"{_user()} has no account, see {log}/slurmdbd.log")

    def _accounts_answer(self) -> bool:
        with suppress(RuntimeError, subprocess.TimeoutExpired):
            self.run("sacctmgr", "-n", "show", "cluster", timeout_s=5)
            return True
        return False

    def _daemon(self, name: str, *arguments: str, **environ: str) -> None:
        """Start one that leaves this process; returns when its pid is known, so that stop() finds it."""
        command = [str(find_program(name.partition("-")[0])), *arguments]
        environ = self.environ | environ
        try:
            done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30, check=False)
            if done.returncode == 0:
                self._await(lambda: name in self._pids(), lambda: f"{name} is gone, see {self.folder}/log")
        except BaseException:
            with suppress(RuntimeError):  # it may have left already
                _until(lambda: name in self._pids(), SETTLE_S, lambda: "")
            raise
        if done.returncode != 0:
            raise RuntimeError(f"{name} did not start: {done.stderr.strip()}")

    def _await(self, condition: Callable[[], bool], problem: Callable[[], str]) -> None:
        """Wait as long as a start may take; PortTaken as soon as a daemon's log tells of it."""

        def reached() -> bool:
            for path, seen in self._seen().items():
                if b"Address already in use" in path.read_bytes()[self._logged.get(path, 0) : seen]:
                    raise PortTaken(f"{path.stem} found its port taken, see {path}")
            return condition()

        _until(reached, START_S, problem)

    def _seen(self) -> dict[Path, int]:
        """Log of a daemon -> its bytes by now."""
        return {path: path.stat().st_size for path in (self.folder / "log").glob("slurm*.log")}

    def _states(self) -> set[str]:
        # Without a controller a client tries for minutes.
        with suppress(subprocess.TimeoutExpired):
            return set(self.run("sinfo", "-h", "-N", "-o", "%T", check=False, timeout_s=5).split())
        return set()

    def _pids(self) -> dict[str, int]:
        """Daemon -> its pid, of those that run."""
        found = {}
        for path in (self.folder / "run").glob("*.pid"):
            with suppress(ValueError, OSError):
                if self._runs(pid := int(path.read_text())):
                    found[path.stem] = pid
        return found

    def _runs(self, pid: int) -> bool:
        """Whether this is a process of the cluster, and none that was given its number later."""
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")  # empty of one that is only a zombie
        except OSError:
            return False
        return f"SLURM_CONF={self.conf}".encode() in environ


def find_program(name: str) -> str | None:
    """Its path, also where PATH has no place for daemons; None where it is not installed."""
    return shutil.which(name, path=os.environ.get("PATH", "") + os.pathsep + "/usr/sbin")


def _free_ports(count: int) -> list[int]:
    """Ports that nothing listens on, below those that the kernel gives to connections, so that no other process gets
    one by chance before the daemon starts."""
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = random.SystemRandom().sample(range(10_000, first_given), 50 * count)
    ports: list[int] = []
    with ExitStack() as held:
        for port in candidates:
            sock = held.enter_context(socket.socket())
            with suppress(OSError):
                sock.bind(("127.0.0.1", port))
                ports.append(port)
            if len(ports) == count:
                return ports
    raise RuntimeError(f"no {count} free ports between 10000 and {first_given}")


def _user() -> str:
    return pwd.getpwuid(os.getuid()).pw_name


def _until(condition: Callable[[], bool], seconds: float, problem: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {seconds:g} s: {problem()}")
        time.sleep(0.05)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["up", "down"])
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help=f"default: {DEFAULT_FOLDER}")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--cpus", type=int, default=4, help="that each node claims")
    parser.add_argument("--memory-mb", type=int, default=8000, help="that each node claims")
    parser.add_argument("--accounting", action="store_true", help="keep accounts, and enforce them")
    parser.add_argument("--gpus", type=int, default=0, help="that each node claims; none of them is real")
    words = parser.parse_args()
    nodes = Nodes("n", words.nodes, words.cpus, words.memory_mb, words.gpus)
    cluster = Cluster(words.folder, [nodes], accounting=words.accounting)
    if words.what == "down":
        cluster.stop()
        return 0
    try:
        cluster.start()
    except RuntimeError as error:
        print(f"one_machine: {error}", file=sys.stderr)
        return 1
    print(f"{len(cluster.names)} nodes are idle. To use them:\n  export SLURM_CONF={cluster.conf}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
