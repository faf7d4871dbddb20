"""Which interface of this machine leads to another."""

from __future__ import annotations

import ipaddress
import os
import socket

import psutil

from evenly.errors import UserError

ELSEWHERE = "192.0.2.1"  # an address for examples (RFC 5737): the way to it is the way out


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine by definition: localhost, 127.0.0.1, ..."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def local_address(host: str, port: int) -> str:
    """The address of this machine from which `host` is reached; of `host` itself, the one that others reach.

    Debian and Ubuntu have a machine's own name resolve to loopback: then the way out of the machine counts.
    """
    address = _route_from(host, port)
    if ipaddress.ip_address(address).is_loopback and not is_loopback(host):
        return _route_from(ELSEWHERE, port)
    return address


def socket_interface(host: str, port: int) -> str:
    """The name of the interface of `local_address`."""
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
    """What an error of the operating system says."""
    return os.strerror(problem.errno) if problem.errno else str(problem) or type(problem).__name__
