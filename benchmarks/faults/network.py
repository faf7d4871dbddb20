"""Two nodes on this machine: network namespaces, plugged into a switch, out of which one can be pulled."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass


def may_be_made() -> str:
    """'' where this process may make network namespaces; else why not."""
    if os.geteuid() or not shutil.which("ip"):
        return "network namespaces need root and ip"
    name = f"evenly-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"no network namespaces: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


@dataclass(frozen=True)
class Cable:
    """The two ends, in namespaces whose names begin with `name`; addresses 10.77.0.1 and 10.77.0.2."""

    name: str

    @property
    def namespaces(self) -> tuple[str, str]:
        return f"{self.name}-0", f"{self.name}-1"

    @property
    def address(self) -> str:
        """Of node 0."""
        return "10.77.0.1"

    @property
    def switch(self) -> str:
        """The namespace of what is between them."""
        return f"{self.name}-s"

    def lay(self) -> None:
        _ip(f"netns add {self.switch}")
        _ip(f"-n {self.switch} link add br0 type bridge")
        _ip(f"-n {self.switch} link set br0 up")
        for number, space in enumerate(self.namespaces):
            _ip(f"netns add {space}")
            _ip(f"link add veth0 netns {space} type veth peer name port{number} netns {self.switch}")
            _ip(f"-n {space} addr add 10.77.0.{number + 1}/24 dev veth0")
            for what in ("veth0", "lo"):
                _ip(f"-n {space} link set {what} up")
            _ip(f"-n {self.switch} link set port{number} master br0")
            _ip(f"-n {self.switch} link set port{number} up")

    def cut(self) -> None:
        """From now on nothing comes through, and nobody is told."""
        _ip(f"-n {self.switch} link set port1 nomaster")

    def mend(self) -> None:
        _ip(f"-n {self.switch} link set port1 master br0")

    def take_away(self) -> None:
        for space in (*self.namespaces, self.switch):
            subprocess.run(["ip", "netns", "del", space], capture_output=True)

    def within(self, node: int) -> list[str]:
        """The words before a command that runs on `node`."""
        return ["ip", "netns", "exec", self.namespaces[node]]


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)
