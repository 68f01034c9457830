"""The world: a store and a rank table, not one process group.

Commands create process groups over exactly the named ranks: an engine's default group, or an explicit group between
roles.
"""

from __future__ import annotations

import hmac
import os
import random
import secrets
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hpcrl.messaging import network, queues
from hpcrl.messaging.abortable import AbortableGroup, make_nccl
from hpcrl.messaging.bootstrap import WORLD_KEY, ProcessInfo, make_key_file, share_endpoint
from hpcrl.messaging.dead_host_watch import DeadHostWatch
from hpcrl.messaging.mailbox import Mailbox, mail_queue
from hpcrl.messaging.mailbox_server import Dialer, MailboxServer, SenderEnded
from hpcrl.messaging.messages import Command, Event, Post
from hpcrl.messaging.trace import LEAVING, Trace
from hpcrl.messaging.watch import StoreWatch
from hpcrl.system.clock import UNCOUNTED

CONTROLLER_QUEUE = "controller"
LOST_KEY = "lost"
"""Store key for the ranks that the controller treats as lost, separated by commas."""
PUSH_SHARE = 1 / 8
"""Fraction of a command's time in which a rank must accept data on its full connection. A sender other than rank 0
blocks meanwhile, and several ranks in turn may not accept its data."""
PEER_SHARE = 0.8
"""Fraction of a command's time that a rank waits for another rank; the rest is time to report that rank."""


def rank_queue(rank: int) -> str:
    return f"rank/{rank}"


@dataclass
class World:
    """A rank's view of the world.

    Args:
        host: The node's name.
        address: The node's address for connections from other ranks.
        mailbox_server: Receives all messages to this rank.
        events: The controller's inbox, only on rank 0.
        watch: Only on ranks other than 0.
        token: Authorizes requests to a rank of the run.
    """

    rank: int
    size: int
    host: str
    address: str
    place: ProcessInfo
    folder: Path
    store: dist.TCPStore
    mailbox_server: MailboxServer
    sender: queues.Sender
    commands: queues.Inbox
    events: queues.Inbox | None
    mailbox: Mailbox
    trace: Trace
    watch: StoreWatch | None
    vanished: DeadHostWatch
    timeout_s: float
    token: str = ""

    def leave(self) -> None:
        """Prepare for the end of this process and the store; call it before the last answer."""
        self.trace.enter(LEAVING)
        if self.watch is not None:
            self.watch.stop()
        self.vanished.stop()
        self.mailbox_server.close()

    @cached_property
    def _rendezvous_store(self) -> dist.Store:
        """The store for the rendezvous of group members. NCCL fetches a communicator's id at its group's first use,
        also for each group that an engine makes inside its default group, with this store's timeout; a later pipeline
        stage comes minutes after the first. It has its own connection, which a waiting member occupies."""
        own: Any = self.store  # torch's stubs lack clone()
        store: dist.Store = own.clone()
        store.set_timeout(timedelta(seconds=self.timeout_s))
        return store

    def group(self, name: str, ranks: Sequence[int], epoch: int, *, of_engine: bool = False) -> Any:
        """An explicit dist.ProcessGroupGloo between roles. Collective over `ranks`, in which this rank must be.

        Pairs connect at their first communication, so there is no full mesh. A higher epoch makes a new group.
        With `of_engine`, only the controller's deadline for the command, without the job's pauses, limits collectives.
        """
        store = dist.PrefixStore(f"group/{name}/{epoch}", self._rendezvous_store)
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=self.address, lazy_init=True)]
        options._timeout = UNCOUNTED if of_engine else timedelta(seconds=PEER_SHARE * self.timeout_s)
        return gloo(store, list(ranks).index(self.rank), len(ranks), options)

    def weights_group(self, name: str, ranks: Sequence[int], epoch: int) -> Any:
        """A group for large tensors: NCCL if each of `ranks` has its own GPU, else group(). Both survive the loss of a
        member, with a RuntimeError. Collective over `ranks`.

        NCCL makes the communicator and its connections later (hpcrl.comm.weight_transfer.connect), with only the
        store's timeout: if a rank dies before that, the controller's deadline ends the attempt.
        """
        store = dist.PrefixStore(f"gpus/{name}/{epoch}", self._rendezvous_store)
        own = str(torch.cuda.get_device_properties(0).uuid) if torch.cuda.is_available() else ""
        store.set(str(self.rank), own)
        gpus = [store.get(str(rank)) for rank in ranks]
        if not all(gpus) or len(set(gpus)) < len(gpus):
            return self.group(name, ranks, epoch)
        store = dist.PrefixStore(f"group/{name}/{epoch}", self._rendezvous_store)
        nccl = make_nccl(store, list(ranks).index(self.rank), len(ranks))
        return AbortableGroup(nccl, name, ranks, PEER_SHARE * self.timeout_s, self.lost_ranks)

    def tell_lost(self, ranks: Collection[int]) -> None:
        """Publish the lost ranks, for every rank that waits in an AbortableGroup. Called by the controller."""
        self.store.set(LOST_KEY, ",".join(map(str, sorted(ranks))))

    def lost_ranks(self) -> set[int]:
        """The ranks that the last tell_lost() published."""
        return set(map(int, self.store.get(LOST_KEY).split(b","))) if self.store.check([LOST_KEY]) else set()

    def default_group(self, name: str, ranks: Sequence[int], epoch: int) -> None:
        """Make the process's default group over `ranks` for an engine. Collective over them."""
        if dist.is_initialized():
            raise RuntimeError(f"rank {self.rank} has a default group already; {name} cannot have another")
        # Timeouts of other groups that engines make.
        distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = UNCOUNTED
        # NCCL's monitor may treat a suspended process as stuck. The agent and the controller monitor ranks.
        os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            store=dist.PrefixStore(f"default/{name}/{epoch}", self._rendezvous_store),
            rank=list(ranks).index(self.rank),
            world_size=len(ranks),
            timeout=UNCOUNTED,
        )


def join(
    place: ProcessInfo,
    size: int,
    folder: Path,
    *,
    start_s: float,
    store_s: float,
    command_s: float,
    interface: str | None = None,
) -> World:
    """Join the attempt's world of `size` ranks. Called by every rank; waits for rank 0's store.

    StoreLost or TimeoutError if rank 0 is not up within start_s; NoInterfaceError if the node lacks `interface`.

    Args:
        folder: The attempt's folder, shared by all ranks.
        store_s: Timeout of the store, of connections and of hosts that do not answer.
        command_s: Time allowed for a command.
        interface: Network interface for a world of several nodes; None: see network.own_network.
    """
    # torch resolves every peer's host name, at 5 s per attempt if name servers are missing or lossy.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:3")
    # torch makes default groups; with this setting, pairs connect at their first communication: no full mesh.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    rank = place.index
    folder.mkdir(parents=True, exist_ok=True)
    trace = Trace.of_process()
    several = place.num_nodes > 1
    own = network.own_network(interface) if several else network.loopback()
    network.use(own, interface if several else None)
    address, host = own.address, socket.gethostname()
    server = None
    endpoint: dict[str, Any] | None = None
    if rank == 0:
        server, name = queues.serve(address, store_s), secrets.token_hex(8)
        server.set(WORLD_KEY, name)
        endpoint = {"host": address, "port": server.port, "key_file": str(make_key_file(folder, name)), "world": name}
    endpoint = share_endpoint(place, folder, endpoint, start_s)
    key = Path(endpoint["key_file"]).read_bytes()
    mailbox_server = MailboxServer(address, key)
    at = (endpoint["host"], int(endpoint["port"]))
    store = server if server is not None else queues.connect(*at, start_s)
    store.set_timeout(timedelta(seconds=store_s))

    def inbox(name: str, types: Any) -> queues.Inbox:
        return queues.Inbox(mailbox_server.queue(name), name, key, types)

    commands, mail = inbox(rank_queue(rank), Command), inbox(mail_queue(rank), Post)
    events = inbox(CONTROLLER_QUEUE, Event) if rank == 0 else None
    try:
        mailbox_server.publish(store, rank)
    except RuntimeError as error:
        raise queues.StoreLost("the control store is gone") from error

    def unreached(other: int, why: str) -> None:
        mailbox_server.queue(CONTROLLER_QUEUE).put(SenderEnded(other, "unreached", why))

    push_s = max(store_s, PUSH_SHARE * command_s)
    dialer = Dialer(store, key, rank, store_s, push_s, unreached if rank == 0 else None)
    sender = queues.Sender(dialer, key, rank)
    watch = None
    if rank != 0:
        watch = StoreWatch(queues.connect(*at, start_s), lambda: trace.doing, store_s)
    return World(
        rank=rank,
        size=size,
        host=host,
        address=address,
        place=place,
        folder=folder,
        store=store,
        mailbox_server=mailbox_server,
        sender=sender,
        commands=commands,
        events=events,
        mailbox=Mailbox(rank, sender, mail),
        trace=trace,
        watch=watch,
        vanished=DeadHostWatch(store_s),
        timeout_s=command_s,
        token=hmac.new(key, b"requests", "sha256").hexdigest(),  # the key itself is never sent
    )


def pin_threads(threads: int) -> None:
    """Set this process's number of threads; one per rank is fastest if the ranks use all cores."""
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    torch.set_num_threads(threads)


def seed_generators(seed: int, rank: int) -> None:
    """Seed this process's global random generators: a restart repeats the first start's draws."""
    random.seed(f"{seed}/{rank}")
    np.random.seed(random.getrandbits(32))
    torch.manual_seed(random.getrandbits(63))
