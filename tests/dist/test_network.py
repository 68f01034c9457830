"""The node's address on which a world listens."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from hpcrl.messaging import queues
from hpcrl.messaging.bootstrap import ProcessInfo
from hpcrl.messaging.network import NoInterfaceError, choose, interfaces, is_loopback, listen, own_network, unreachable
from hpcrl.messaging.world import World, join

TWO = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.5", "fd00::5"], "ib0": ["10.1.0.5"]}


@pytest.mark.parametrize(
    ("resolved", "routed", "chosen"),
    [
        (["10.1.0.5"], "10.0.0.5", ("ib0", "10.1.0.5")),  # the host name decides
        (["fd00::5"], "10.1.0.5", ("eth0", "fd00::5")),
        (["127.0.1.1"], "10.1.0.5", ("ib0", "10.1.0.5")),  # Debian's /etc/hosts
        (["127.0.0.1"], None, ("eth0", "10.0.0.5")),
        (["10.9.9.9"], "10.0.0.5", ("eth0", "10.0.0.5")),  # of another host
        ([], None, ("eth0", "10.0.0.5")),  # a host name that nobody knows
    ],
)
def test_an_address_reachable_from_other_hosts_is_preferred(
    resolved: list[str], routed: str | None, chosen: tuple[str, str]
) -> None:
    assert choose(TWO, resolved, routed) == chosen


@pytest.mark.parametrize("resolved", [["127.0.0.1"], ["127.0.1.1"], []])
def test_a_host_without_a_network_uses_loopback(resolved: list[str]) -> None:
    assert choose({"lo": ["127.0.0.1"]}, resolved, None) == ("lo", "127.0.0.1")


def test_a_missing_interface_is_named_with_the_existing_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert own_network("lo") == own_network("lo,lo") == ("lo", "127.0.0.1")
    with pytest.raises(NoInterfaceError, match=r"has no interface ib9 that .*; it has .*lo"):
        own_network("lo,ib9")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib8")  # of the site or the user's shell
    with pytest.raises(NoInterfaceError, match="no interface ib8"):
        own_network(None)


def listening() -> set[str]:
    """Addresses on which this process listens, as ip:port."""
    found = psutil.Process().net_connections(kind="inet")
    return {f"{c.laddr.ip}:{c.laddr.port}" for c in found if c.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("interface", ["lo", "lo,lo", None])
def test_everything_listens_only_on_the_chosen_interface(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interface: str | None
) -> None:
    """Two ranks on two nodes: store, mailboxes, a group between roles, and the interface of groups that torch makes."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # restored at the end
        monkeypatch.delenv(name)
    own = own_network(interface)
    assert own.address == "127.0.0.1" if interface else own.address in interfaces()[own.interface]
    others = [address for found in interfaces().values() for address in found if not is_loopback(address)]
    assert interface or is_loopback(own.address) is not bool(others)
    before = listening()

    def rank(number: int) -> World:
        place = ProcessInfo("rank", "agent", number, number, 2)
        world = join(place, 2, tmp_path, start_s=30, store_s=30, command_s=30, interface=interface)
        group = world.group("between", [0, 1], 0)
        tensor = torch.tensor([float(number)])
        group.allreduce([tensor]).wait()
        assert tensor.item() == 1.0
        return world

    with ThreadPoolExecutor(2) as pool:
        worlds = list(pool.map(rank, range(2)))
    new = {address.rpartition(":")[0] for address in listening() - before}
    assert new == {own.address}
    for world in worlds:
        world.leave()
    assert os.environ["GLOO_SOCKET_IFNAME"] == interface or own.interface
    exactly = interface and f"={interface}"
    assert os.environ.get("NCCL_SOCKET_IFNAME") == exactly, "left to NCCL where none is asked for"


def test_foreign_bytes_at_the_ports_of_a_group_have_no_effect(threads: Any) -> None:
    """Before and after its pairs connect, on connections that stay open and on others that are closed."""
    before, noise = listening(), random.Random(0)
    groups = threads.every(lambda rank: threads.worlds[rank].group("noise", range(3), 0))
    places = [place.rpartition(":") for place in listening() - before]
    assert len(places) == 3, "one for each rank"

    def total(rank: int) -> float:
        tensor = torch.tensor([1.0 + rank])
        groups[rank].allreduce([tensor]).wait()
        return tensor.item()

    with contextlib.ExitStack() as open_ones:
        for _ in range(2):
            for address, _, port in places:
                for num_bytes in (1, 4, 8, 16, 64, 4096, 100_000):
                    for stays in (True, False):
                        connection = socket.create_connection((address, int(port)), timeout=5)
                        open_ones.enter_context(connection)
                        with contextlib.suppress(ConnectionError):  # gloo may close it before all has arrived
                            connection.sendall(noise.randbytes(num_bytes))
                        if not stays:
                            connection.close()
            assert threads.every(total) == [6.0] * 3


def test_a_store_listens_only_on_its_address() -> None:
    for address, other in (("127.0.0.1", "127.0.0.2"), ("127.0.0.2", "127.0.0.1")):  # both are this host
        stores = [queues.serve(address, 5) for _ in range(3)]
        for store in stores:
            socket.create_connection((address, store.port), timeout=2).close()
        refused = 0  # of three ports, as another program may listen on the other address with one of them
        for store in stores:
            try:
                socket.create_connection((other, store.port), timeout=2).close()
            except ConnectionRefusedError:
                refused += 1
        assert refused >= 2


def test_an_unreachable_address_is_named() -> None:
    with listen("127.0.0.1") as listener:
        port = listener.getsockname()[1]
        assert unreachable("127.0.0.1", port) == ""
    assert unreachable("127.0.0.1", port).startswith("127.0.0.1 (")
