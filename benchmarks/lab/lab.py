"""A cluster in one machine: its nodes are network namespaces, plugged into a bridge that is in one of its own.

Each node has a loopback, an interface (`eth0`), an address (10.77.0.1 is node 0's), a host name (`node0`) and, for each
command that runs on it, a view of /etc/hosts of its own. As on Debian, a node's own name resolves to 127.0.1.1 there,
and the names of the others to their addresses. No node has a way out of the lab.

What a lab consists of is found by its name alone, so that a lab whose maker was killed can be taken away too.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
SPACES = Path("/run/netns")
STATES = Path("/run/evenly-lab")  # a folder for each lab that is up
GROUPS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))  # of version 1, else 2
PERIOD_US, LEAST_QUOTA_US = 2_000, 1_000  # short, as a slow processor is slow all the time; Linux takes no less
QUEUE = "100ms"  # that a link holds, beyond which packets are dropped
LEAST_BURST, BURST_S = 16_384, 5e-4  # bytes that pass at once after a pause
MOST_NODES = 200
RATE = re.compile(r"(\d+)([kmg])bit")
FACTORS = {"k": 1e3, "m": 1e6, "g": 1e9}
ENTER = """
hostname "$1"
mount --bind "$2/hosts$3" /etc/hosts
[ ! -e /etc/resolv.conf ] || mount --bind "$2/resolv.conf" /etc/resolv.conf
[ -z "$4" ] || echo $$ > "$4"
shift 4
exec "$@"
"""
NO_NAMES = "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n"  # where nobody is: refused at once


class LabError(Exception):
    """A lab cannot be made as asked, or is not there."""


def why_not() -> str:
    """'' where this process may make labs; else why not."""
    if os.geteuid():
        return "network namespaces need root"
    if missing := [tool for tool in ("ip", "tc", "nsenter", "unshare") if not shutil.which(tool)]:
        return f"{', '.join(missing)} is not installed"
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, text=True)
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


@dataclass(frozen=True, kw_only=True)
class Lab:
    """What a lab is to be like.

    devices:  of a node; a number for those who start ranks on it. bandwidth: of every node's link, both ways, in the
    words of tc (200mbit); '' for no limit. delay: of every packet that a node sends (1ms), where the kernel has netem.
    cores: that every node may use, 0.5 for half of one; 0 for no limit, where nodes that wait lend theirs to others.
    slow_links: node -> its bandwidth. slow_nodes: node -> its cores.
    """

    name: str = "lab"
    nodes: int
    devices: int = 1
    bandwidth: str = ""
    delay: str = ""
    cores: float = 0.0
    slow_links: dict[int, str] = field(default_factory=dict[int, str])
    slow_nodes: dict[int, float] = field(default_factory=dict[int, float])

    def __post_init__(self) -> None:
        problems = [
            text
            for wrong, text in (
                (not re.fullmatch(r"[a-z0-9]{1,12}", self.name), f"{self.name!r} is no name of up to 12 letters"),
                (not 1 <= self.nodes <= MOST_NODES, f"{self.nodes} nodes"),
                (self.devices < 1, f"{self.devices} devices"),
                *((not RATE.fullmatch(rate), f"{rate!r} is no rate as 200mbit") for rate in self._rates if rate),
                (any(node >= self.nodes for node in (*self.slow_links, *self.slow_nodes)), "no such node"),
                (any(cores < 0.02 for cores in self._limits.values()), "less than 0.02 cores"),
            )
            if wrong
        ]
        if problems:
            raise LabError("; ".join(problems))

    @property
    def _rates(self) -> list[str]:
        return [self.bandwidth, *self.slow_links.values()]

    @property
    def _limits(self) -> dict[int, float]:
        """Node -> the cores that it may use, where they are limited."""
        return (dict.fromkeys(range(self.nodes), self.cores) if self.cores else {}) | self.slow_nodes

    @property
    def state(self) -> Path:
        """Where the lab keeps its hosts files, and what it is like."""
        return STATES / self.name

    @property
    def switch(self) -> str:
        """The namespace of what is between the nodes."""
        return f"{prefix(self.name)}s"

    def space(self, node: int) -> str:
        """The namespace of a node."""
        return f"{prefix(self.name)}{node}"

    def within(self, node: int) -> list[str]:
        """The words before a command that runs on `node`."""
        enter = ["nsenter", f"--net={SPACES / self.space(node)}", "unshare", "--uts", "--mount", "sh", "-c", ENTER]
        group = str(cpu_group(self.name, node) / "cgroup.procs") if node in self._limits else ""
        return [*enter, "sh", f"node{node}", str(self.state), str(node), group]

    # ------------------------------------------------------------------------------------------------ up
    def up(self) -> None:
        """Makes it. Raises `LabError`; what was made by then is there still: `down` takes it away."""
        if reason := why_not():
            raise LabError(reason)
        self._write_state()
        _ip(f"netns add {self.switch}")
        _ip(f"-n {self.switch} link add br0 type bridge")
        _ip(f"-n {self.switch} link set br0 up")
        for node in range(self.nodes):
            self._plug_in(node)
        for node, cores in self._limits.items():
            _limit(cpu_group(self.name, node), cores)

    def _write_state(self) -> None:
        try:
            self.state.mkdir(parents=True)
        except FileExistsError:
            raise LabError(f"a lab {self.name!r} is up: take it down, or name another") from None
        (self.state / "lab.json").write_text(json.dumps(asdict(self)))
        (self.state / "resolv.conf").write_text(NO_NAMES)
        for node in range(self.nodes):
            (self.state / f"hosts{node}").write_text(self.hosts(node))

    def hosts(self, node: int) -> str:
        """/etc/hosts as `node` has it."""
        others = [f"{address(other)} node{other}" for other in range(self.nodes) if other != node]
        return "\n".join(["127.0.0.1 localhost", f"127.0.1.1 node{node}", *others, ""])

    def _plug_in(self, node: int) -> None:
        space, port = self.space(node), f"port{node}"
        _ip(f"netns add {space}")
        _ip(f"link add eth0 netns {space} type veth peer name {port} netns {self.switch}")
        _ip(f"-n {space} addr add {address(node)}/24 dev eth0")
        for interface in ("eth0", "lo"):
            _ip(f"-n {space} link set {interface} up")
        _ip(f"-n {self.switch} link set {port} master br0")
        _ip(f"-n {self.switch} link set {port} up")
        rate = self.slow_links.get(node, self.bandwidth)
        if rate:
            _shape(space, "eth0", rate)
            _shape(self.switch, port, rate)
        if self.delay:
            where = "parent 1:1" if rate else "root"
            _tc(f"-n {space} qdisc add dev eth0 {where} handle 10: netem delay {self.delay} limit 100000")

    # ------------------------------------------------------------------------------------------------ cables
    def pull_out(self, node: int) -> None:
        """Nothing comes through to `node` or from it, and nobody is told."""
        _ip(f"-n {self.switch} link set port{node} nomaster")

    def plug_back(self, node: int) -> None:
        """Inverse of `pull_out`."""
        _ip(f"-n {self.switch} link set port{node} master br0")


def prefix(name: str) -> str:
    """With which the names of all namespaces of the lab `name` begin."""
    return f"evenly-lab-{name}-"


def address(node: int) -> str:
    """Of a node, in the lab."""
    return f"10.77.0.{node + 1}"


def cpu_group(name: str, node: int) -> Path:
    """The control group of a node whose cores are limited."""
    folder = next((folder for folder in GROUPS if (folder / "cgroup.procs").exists()), GROUPS[-1])
    return folder / f"{prefix(name)}{node}"


def bits_per_s(rate: str) -> float:
    """200mbit -> 2e8."""
    match = RATE.fullmatch(rate)
    assert match is not None
    return int(match[1]) * FACTORS[match[2]]


def _shape(space: str, interface: str, rate: str) -> None:
    burst = max(LEAST_BURST, int(bits_per_s(rate) / 8 * BURST_S))
    _tc(f"-n {space} qdisc add dev {interface} root handle 1: tbf rate {rate} burst {burst} latency {QUEUE}")


def _limit(group: Path, cores: float) -> None:
    period = max(PERIOD_US, math.ceil(LEAST_QUOTA_US / cores))
    quota = max(LEAST_QUOTA_US, int(cores * period))
    try:
        group.mkdir()
        if (group / "cpu.max").exists():
            (group / "cpu.max").write_text(f"{quota} {period}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(period))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
    except OSError as problem:
        raise LabError(f"no control group for a slow node: {problem}") from None


# ---------------------------------------------------------------------------------------------------- down
def names() -> list[str]:
    """All labs of which there is anything."""
    spaces = [path.name.removeprefix("evenly-lab-").rpartition("-")[0] for path in SPACES.glob("evenly-lab-*")]
    return sorted({*spaces, *(path.name for path in STATES.glob("*"))})


def found(name: str) -> Lab:
    """The lab that is up as `name`. Raises `LabError`."""
    try:
        stated = json.loads((STATES / name / "lab.json").read_text())
    except (OSError, ValueError):
        raise LabError(f"no lab {name!r} is up, only: {', '.join(names()) or 'none'}") from None
    for nodes in ("slow_links", "slow_nodes"):
        stated[nodes] = {int(node): value for node, value in stated[nodes].items()}
    return Lab(**stated)


def down(name: str) -> None:
    """Ends what runs on the nodes of the lab `name`, and takes away all there is of it; also of one half made."""
    spaces = [path.name for path in SPACES.glob(f"{prefix(name)}*")]
    for space in spaces:
        _end_all(space)
        subprocess.run(["ip", "netns", "del", space], capture_output=True)
    for folder in GROUPS:
        for group in folder.glob(f"{prefix(name)}*"):
            _remove_group(group)
    shutil.rmtree(STATES / name, ignore_errors=True)
    with suppress(OSError):
        STATES.rmdir()  # where it was the last


def _end_all(space: str) -> None:
    """Kills what runs in a namespace, until nothing does."""
    until_s = time.monotonic() + 10
    while time.monotonic() < until_s:
        pids = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True).stdout.split()
        if not pids:
            return
        for pid in map(int, pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _remove_group(group: Path) -> None:
    for _ in range(100):  # processes that were killed leave it a moment later
        try:
            group.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.05)


# --------------------------------------------------------------------------------------------------- guarded
@contextmanager
def guarded(lab: Lab, *, keep: bool = False) -> Generator[Lab]:
    """The lab, up; it is taken down at the end, however that comes: by another process where this one is killed.

    keep: whether a lab that was made as asked stays.
    """
    if lab.name in names():
        raise LabError(f"there is something of a lab {lab.name!r}: take it down, or name another")
    guard = subprocess.Popen(
        ["sh", "-c", 'read word; [ "$word" = kept ] || exec "$@"', "sh", *lab_command("down", "--name", lab.name)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    assert guard.stdin is not None
    try:
        lab.up()
        yield lab
        if keep:
            guard.stdin.write(b"kept\n")
    finally:
        with suppress(KeyboardInterrupt):
            guard.stdin.close()
        while guard.poll() is None:
            with suppress(KeyboardInterrupt, subprocess.TimeoutExpired):  # a second Ctrl-C does not keep it here
                guard.wait(1.0)


def lab_command(*words: str) -> list[str]:
    """A command of this module, for a process of its own."""
    return [sys.executable, "-m", "benchmarks.lab", *words]


def _ip(words: str) -> None:
    _checked(["ip", *words.split()])


def _tc(words: str) -> None:
    _checked(["tc", *words.split()])


def _checked(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise LabError(f"{' '.join(command)}: {done.stderr.strip()}")
