"""Which interface of this machine leads to another."""

from __future__ import annotations

import ipaddress
import os
import socket

import psutil

from evenly.errors import UserError
from evenly.launcher.environment import gloo_interface

# Bridges to what runs on this machine: no other machine reaches their addresses.
INWARD = ("docker", "br-", "veth", "virbr", "cni", "flannel", "podman", "lxc", "lxd")
ELSEWHERE = "192.0.2.1"  # an address for examples (RFC 5737): the way to it is the way out


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def local_address(host: str, port: int) -> str:
    """The address of this machine from which `host` is reached; of `host` itself, the one that others reach.

    Debian and Ubuntu have a machine's own name resolve to loopback: then the interface counts that gloo is to use
    (GLOO_SOCKET_IFNAME), else the way out of the machine, else its only interface. Raises `UserError`.
    """
    address = _route_from(host, port)
    if ipaddress.ip_address(address).is_loopback and not is_loopback(host):
        return _address_for_others(host, port)
    return address


def reachable_host(host: str, port: int) -> str:
    """What leads to `host` from here as from others: its name, or on that machine itself `local_address`."""
    return host if not ipaddress.ip_address(_route_from(host, port)).is_loopback else local_address(host, port)


def _address_for_others(host: str, port: int) -> str:
    there = outward_addresses()
    asked = f"find the address of this machine, {host}, that others reach"
    if chosen := gloo_interface():
        if chosen in there:
            return there[chosen]
        raise UserError(asked, f"GLOO_SOCKET_IFNAME is {chosen}, which has no address here", f"name one of {[*there]}")
    try:
        return _route_from(ELSEWHERE, port)
    except UserError:
        return only_address(there, asked)


def addresses() -> dict[str, str]:
    """Interface -> its address, loopback included; IPv4 where it has both."""
    found: dict[str, str] = {}
    for name, entries in psutil.net_if_addrs().items():
        texts = [entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
        found.update({name: min(texts, key=lambda text: _ip(text).version)} if texts else {})
    return found


def resolved_address(host: str) -> str:
    """The address that `host` has on this machine; '' where it has none."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)[0][4][0])
    except OSError:
        return ""


def outward_addresses() -> dict[str, str]:
    """Interface -> its address, for all that are up and may lead to other machines; IPv4 where it has both."""
    up = psutil.net_if_stats()
    inner = {name for name, text in addresses().items() if _ip(text).is_loopback or _ip(text).is_link_local}
    return {name: text for name, text in addresses().items() if name in up and up[name].isup and name not in inner}


def only_address(there: dict[str, str], asked: str) -> str:
    """The one address among those of `there` (interface -> address) at which others may reach this machine.

    Raises `UserError` where there is none, or several.
    """
    outward = {name: address for name, address in there.items() if not name.startswith(INWARD)}
    if len(outward) == 1:
        return outward.popitem()[1]
    several = ", ".join(f"{name} {address}" for name, address in outward.items())
    found = f"it has no way out, and several interfaces: {several}" if outward else "it has no interface but loopback"
    do = "set GLOO_SOCKET_IFNAME to the interface that leads to the other nodes" if outward else "connect it"
    raise UserError(asked, f"its name is loopback's, {found}", do)


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(text.partition("%")[0])


def socket_interface(host: str, port: int) -> str:
    address = local_address(host, port)
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    raise UserError(f"reach {host}", f"no interface has the address {address}", "set GLOO_SOCKET_IFNAME")


def _route_from(host: str, port: int) -> str:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # chooses a route, and sends nothing
            return str(probe.getsockname()[0]).partition("%")[0]
    except OSError as problem:
        raise UserError(
            f"reach {host}",
            f"this machine knows no way there: {words(problem)}",
            "name node 0 as this machine finds it",
        ) from None


def words(problem: OSError) -> str:
    return os.strerror(problem.errno) if problem.errno else str(problem) or type(problem).__name__
