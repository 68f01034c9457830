"""This node's address for other nodes, used by everything that listens: stores, mailbox servers, gloo."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import psutil

GLOO_INTERFACE, NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
ELSEWHERE = ("192.0.2.1", 9)
"""An address reserved for documentation (RFC 5737): connecting a UDP socket to it sends nothing, but shows which of
this node's addresses is the source of traffic to other networks."""

CONNECT_S = 10.0


class NoInterfaceError(ValueError):
    """This node has no such interface, or no address on it."""


class Network(NamedTuple):
    """One of this node's interfaces and its address for other nodes."""

    interface: str
    address: str


def loopback() -> Network:
    """The loopback interface, for a world on one node."""
    names = [name for name, found in interfaces().items() if "127.0.0.1" in found]
    return Network(names[0] if names else "lo", "127.0.0.1")


def interfaces() -> dict[str, list[str]]:
    """Interfaces that are up and have addresses -> their addresses, IPv4 first, without link-local ones."""
    up = psutil.net_if_stats()
    found: dict[str, list[str]] = {}
    for name, addresses in psutil.net_if_addrs().items():
        if name in up and up[name].isup:
            for family in (socket.AF_INET, socket.AF_INET6):
                usable = [entry.address for entry in addresses if entry.family == family]
                found.setdefault(name, []).extend(a for a in usable if not ipaddress.ip_address(a).is_link_local)
    return {name: addresses for name, addresses in found.items() if addresses}


def own_network(wanted: str | None) -> Network:
    """The interface `wanted` (the first of a comma-separated list), else the interface that GLOO_SOCKET_IFNAME names,
    else the interface with this node's own address.

    NoInterfaceError if a named interface does not exist, is down or has no address.
    """
    found, wanted = interfaces(), wanted or os.environ.get(GLOO_INTERFACE)
    if not wanted:
        return choose(found, _resolved(socket.gethostname()), _routed())
    names = wanted.split(",")
    for name in names:
        if name not in found:
            has = ", ".join(found) or "none"
            raise NoInterfaceError(f"has no interface {name} that is up and has an address; it has {has}")
    return Network(names[0], found[names[0]][0])


def choose(found: Mapping[str, Sequence[str]], resolved: Sequence[str], routed: str | None) -> Network:
    """The interface with the host name's address, if other hosts can reach it. On many systems the host name resolves
    to 127.0.1.1: then the interface with the address `routed`, else any that is not loopback."""
    at = {address: name for name, addresses in found.items() for address in addresses}
    there = [address for address in (*resolved, routed, *at) if address in at]
    reachable = [address for address in there if not ipaddress.ip_address(address).is_loopback]
    address = (reachable or there or ["127.0.0.1"])[0]
    return Network(at.get(address, "lo"), address)


def is_loopback(address: str) -> bool:
    """Whether no other host reaches this address."""
    return ipaddress.ip_address(address).is_loopback


def use(network: Network, wanted: str | None) -> None:
    """Make torch's own gloo groups use this interface, and NCCL too if the configuration names one. Call it before the
    first group is made. One = before the list makes NCCL match whole names, not prefixes (ib0 would match ib01)."""
    os.environ[GLOO_INTERFACE] = wanted or os.environ.get(GLOO_INTERFACE) or network.interface
    if wanted:
        os.environ.setdefault(NCCL_INTERFACE, f"={wanted}")


def listen(address: str) -> socket.socket:
    """A socket that listens on a free port of this address only."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=1024)


def unreachable(address: str, port: int) -> str:
    """The address and why a connection to it fails; empty if it succeeds."""
    try:
        socket.create_connection((address, port), timeout=CONNECT_S).close()
    except OSError as error:
        return f"{address} ({error})"
    return ""


def _resolved(name: str) -> list[str]:
    with contextlib.suppress(OSError):
        return [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    return []


def _routed() -> str | None:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(ELSEWHERE)
        return str(probe.getsockname()[0])
    return None
