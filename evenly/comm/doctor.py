"""The doctor: what this machine offers to a run, and what would prevent one from working.

One function per check; each returns findings and raises nothing that a machine can cause.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from evenly.errors import EvenlyError, UserError
from evenly.hardware.cluster_text import local_gpus
from evenly.launcher.agent import Launch, start_ranks
from evenly.launcher.allocator import cgroup_limit_bytes
from evenly.launcher.environment import LOOPBACK, LOOPBACK_INTERFACE, available_cores, find_process, process_environment
from evenly.launcher.interfaces import ELSEWHERE, local_address, socket_interface

if TYPE_CHECKING:
    from evenly.comm.groups import Group

Verdict = Literal["ok", "note", "problem"]

GIB = 2**30
SMALL_SHM_BYTES = GIB // 4
SMALL_DISK_BYTES = 5 * GIB
SMALL_MEMORY_BYTES = 2 * GIB
RESOLVE_TIMEOUT_S = 5.0
PROBE_BYTES = 4 << 20
WANTED_TORCH = "install torch>=2.11,<2.16"


@dataclass(frozen=True)
class Finding:
    """One thing found. `advice` says what to do, or why it matters; empty where all is well."""

    name: str
    value: str
    verdict: Verdict = "ok"
    advice: str = ""


def finding(name: str, value: str, *, note: str = "", problem: str = "") -> Finding:
    """A finding with advice on what is wrong: a `problem` prevents runs from working, a `note` does not."""
    return Finding(name, value, "problem" if problem else "note" if note else "ok", problem or note)


def examine(environ: Mapping[str, str], *, probe: bool = True, world: int | None = None) -> list[Finding]:
    """All findings, in the order in which to read them.

    `probe` starts `world` ranks that try every operation, which is the one test that proves a run can work; by default
    two, or one where there is one GPU, which two ranks cannot share.
    """
    has_torch = find_spec("torch") is not None
    checks: list[Callable[[], Iterable[Finding]]] = [
        _python,
        _torch,
        *((_devices, _backends, _gpu_links) if has_torch else ()),
        lambda: _cores(environ),
        _memory,
        _shared_memory,
        lambda: _disk(Path.cwd()),
        _links,
        _port,
        lambda: _hostname(environ),
        _listening,
        lambda: _process(environ),
        lambda: _variables(environ),
        *((lambda: _ranks(world or min(2, local_gpus() or 2)),) if probe and has_torch else ()),
    ]
    return [one for check in checks for one in check()]


def as_version(text: str) -> tuple[int, int]:
    """Major and minor number: '2.13.0+cpu' -> (2, 13)."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def _python() -> Iterable[Finding]:
    value = f"{platform.python_version()} ({sys.executable}), {platform.system()} {platform.machine()}"
    old = sys.version_info < (3, 11)
    yield finding("python", value, problem="evenly needs Python 3.11 or later" if old else "")
    if platform.system() != "Linux":
        note = "runs are tested on Linux only; elsewhere gloo on the CPU is what can work"
        yield finding("system", platform.system(), note=note)


def _torch() -> Iterable[Finding]:
    if find_spec("torch") is None:
        yield finding("torch", "missing", problem=WANTED_TORCH)
        return
    import torch

    cuda = torch.version.cuda
    value = f"{torch.__version__}, " + (f"built for CUDA {cuda}" if cuda else "built for the CPU")
    yield torch_version(str(torch.__version__), value)


def torch_version(version: str, value: str) -> Finding:
    supported = (2, 11) <= as_version(version) < (2, 16)
    return finding("torch", value, problem="" if supported else WANTED_TORCH)


def _devices() -> Iterable[Finding]:
    import torch

    if not torch.cuda.is_available():
        note = "this torch is built for CUDA but finds no GPU: check the driver (nvidia-smi)"
        yield finding("devices", "no GPU; ranks are CPU processes", note=note if torch.version.cuda else "")
        return
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        value = f"{about.name}, {_gib(free_bytes)} free of {_gib(total_bytes)}"
        busy = free_bytes < total_bytes / 2
        yield finding(f"cuda:{index}", value, note="another process holds more than half of its memory" if busy else "")


def _backends() -> Iterable[Finding]:
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        problem = "install a torch that has torch.distributed"
        yield finding("backends", "torch.distributed is missing", problem=problem)
        return
    have = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    value = ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in have.items())
    needed = "nccl" if torch.cuda.is_available() else "gloo"
    problem = "" if have[needed] else f"ranks here talk through {needed}; install a torch that has it"
    yield finding("backends", value, problem=problem)


def _cores(environ: Mapping[str, str]) -> Iterable[Finding]:
    usable, all_cores = available_cores(), os.cpu_count() or 1
    yield finding("cores", f"{usable} usable of {all_cores}")
    threads = environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > usable:
        problem = f"threads of one rank would wait for each other; unset it or set at most {usable}"
        yield finding("OMP_NUM_THREADS", threads, problem=problem)


def _memory() -> Iterable[Finding]:
    import psutil

    memory = psutil.virtual_memory()
    limit_bytes = cgroup_limit_bytes()
    free_bytes, total_bytes = int(memory.available), int(memory.total)
    value = f"{_gib(free_bytes)} free of {_gib(total_bytes)}"
    if limit_bytes is not None and limit_bytes < total_bytes:
        value += f"; this process's group may use {_gib(limit_bytes)}"
        free_bytes = min(free_bytes, limit_bytes)
    note = "each rank needs about 0.5 GiB before its model; the kernel kills what exceeds the rest"
    yield finding("memory", value, note=note if free_bytes < SMALL_MEMORY_BYTES else "")


def _shared_memory() -> Iterable[Finding]:
    path = Path("/dev/shm")
    if not path.is_dir():
        return
    total_bytes = shutil.disk_usage(path).total
    problem = "data workers pass batches through it and die with a bus error: give the container --shm-size=8g"
    yield finding("/dev/shm", _gib(total_bytes), problem=problem if total_bytes < SMALL_SHM_BYTES else "")


def _disk(folder: Path) -> Iterable[Finding]:
    free_bytes = shutil.disk_usage(folder).free
    if not os.access(folder, os.W_OK):
        problem = "a run keeps its folder here; name another with --out"
        yield finding("disk", f"{folder} cannot be written", problem=problem)
        return
    note = "a checkpoint holds about 12 bytes per parameter" if free_bytes < SMALL_DISK_BYTES else ""
    yield finding("disk", f"{_gib(free_bytes)} free in {folder}", note=note)


def _links() -> Iterable[Finding]:
    import psutil

    up = [name for name, state in psutil.net_if_stats().items() if state.isup]
    others = [name for name in up if name != LOOPBACK_INTERFACE]
    if LOOPBACK_INTERFACE in up:
        yield finding("loopback", LOOPBACK_INTERFACE)
    else:
        problem = f"ranks of one machine talk over it: ip link set {LOOPBACK_INTERFACE} up"
        yield finding("loopback", "down", problem=problem)
    note = "" if others else "one machine is enough for a run; several need a network"
    yield finding("network", ", ".join(others) or "none", note=note)


def _gpu_links() -> Iterable[Finding]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    if not pairs:
        return
    direct = [pair for pair in pairs if torch.cuda.can_device_access_peer(*pair)]
    value = f"{len(direct)} of {len(pairs)} pairs reach each other's memory (NVLink or PCI)"
    note = "the other pairs go through the host, which is slower" if len(direct) < len(pairs) else ""
    yield finding("gpu links", value, note=note)


def _port() -> Iterable[Finding]:
    with socket.socket() as server:
        try:
            server.bind((LOOPBACK, 0))
            server.listen()
        except OSError as error:
            problem = "ranks find each other through a TCP port: allow this user to listen on loopback"
            yield finding("port", str(error), problem=problem)
        else:
            yield finding("port", f"can listen on {LOOPBACK} (got {server.getsockname()[1]})")


def _hostname(environ: Mapping[str, str]) -> Iterable[Finding]:
    host = socket.gethostname()
    address, took_s = _resolved(host)
    interface = environ.get("GLOO_SOCKET_IFNAME")
    if address:
        note = f"looking it up took {took_s:.1f} s, at every start: add it to /etc/hosts" if took_s >= 1 else ""
    elif interface:
        note = f"gloo uses {interface} instead (GLOO_SOCKET_IFNAME)"
    else:
        note = "one node works over loopback; several need GLOO_SOCKET_IFNAME or a line in /etc/hosts"
    yield finding("hostname", f"{host} is {address}" if address else f"{host} does not resolve", note=note)


def _listening() -> Iterable[Finding]:
    try:
        between = f"at {local_address(ELSEWHERE, 1)} ({socket_interface(ELSEWHERE, 1)}) for nodes of the run"
    except UserError as error:
        between = f"nowhere: {error.found}"
    yield finding("listens", f"on one machine at {LOOPBACK}; between nodes {between}")


def _resolved(host: str) -> tuple[str, float]:
    """The address of `host` ('' if there is none in time) and the seconds it took."""
    found: list[str] = []
    began_s = time.monotonic()
    # A name server that does not answer would hold the doctor for minutes.
    thread = threading.Thread(target=_resolve, args=(host, found), daemon=True)
    thread.start()
    thread.join(RESOLVE_TIMEOUT_S)
    return (found[0] if found else ""), time.monotonic() - began_s


def _resolve(host: str, found: list[str]) -> None:
    try:
        found.append(socket.gethostbyname(host))
    except OSError:
        pass


def _process(environ: Mapping[str, str]) -> Iterable[Finding]:
    try:
        place = find_process(environ)
    except UserError as error:
        yield Finding("rank", error.found, "problem", error.do)
        return
    value = f"rank {place.rank} of {place.size}, node {place.node} of {place.nodes} ({place.launcher})"
    yield finding("rank", value)


def _variables(environ: Mapping[str, str]) -> Iterable[Finding]:
    if "CUDA_VISIBLE_DEVICES" in environ and environ["CUDA_VISIBLE_DEVICES"].strip() in ("", "-1"):
        yield finding("CUDA_VISIBLE_DEVICES", "hides all", note="it hides every GPU: unset it to use them")
    # Their values may contain secrets, as a proxy's password: only names are printed.
    overrides = sorted(name for name in environ if name.startswith(("NCCL_", "GLOO_", "TORCH_NCCL_")))
    if overrides:
        note = "these override how ranks talk: the first thing to unset if a run hangs or is slow"
        yield finding("overrides", ", ".join(overrides), note=note)
    proxies = sorted(name for name in environ if name.lower() in ("http_proxy", "https_proxy", "all_proxy"))
    if proxies:
        yield finding("proxies", ", ".join(proxies), note="ranks do not use them, downloads of data and models do")
    if environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        note = "every GPU kernel is waited for: unset it unless you are looking for a fault"
        yield finding("CUDA_LAUNCH_BLOCKING", "on", note=note)


def _ranks(world: int) -> Iterable[Finding]:
    name, began_s = f"{world} rank{'s' * (world != 1)}", time.monotonic()
    try:
        results = start_ranks(try_operations, (), Launch(devices=world))
    except EvenlyError as error:
        problem = error.do or "no run of several ranks can work before this does"
        yield finding(name, f"{error.asked}: {error.found}", problem=problem)
        return
    took_s = time.monotonic() - began_s
    reduce_s = max(outcome["all_reduce"].seconds for outcome in results.values())
    rate = PROBE_BYTES / max(reduce_s, 1e-9) / 1e9
    yield finding(name, f"done in {took_s:.1f} s; all_reduce of 4 MiB in {reduce_s * 1e3:.1f} ms ({rate:.2f} GB/s)")
    yield from operations_found(results)


def operations_found(results: Mapping[int, Mapping[str, Outcome]]) -> Iterable[Finding]:
    outcomes = results[0]
    bad = {
        operation: f"rank {rank}: {outcome[operation].problem}"
        for operation in outcomes
        for rank, outcome in results.items()
        if outcome[operation].problem
    }
    yield finding("operations", f"{len(outcomes) - len(bad)} of {len(outcomes)} work: {', '.join(outcomes)}")
    for operation, value in bad.items():
        problem = "training that needs it cannot work; see torch's build and the variables above"
        yield finding(operation, value, problem=problem)


@dataclass(frozen=True)
class Outcome:
    """What came of one operation on one rank; no problem is ''."""

    seconds: float
    problem: str


def try_operations() -> dict[str, Outcome]:
    """Runs every operation once between the ranks of this run, with results that are known; every rank calls it."""
    from evenly.comm.connect import connect, disconnect

    world = connect(find_process(process_environment()), even_alone=True)
    try:
        return try_in(world.group("data"))
    finally:
        disconnect(world)


def try_in(group: Group) -> dict[str, Outcome]:
    """Runs every operation once between the ranks of `group`."""
    import torch

    torch.manual_seed(0)  # the same numbers on all ranks
    return {name: _outcome(act) for name, act in _trials(group).items()}


def _outcome(act: Callable[[], bool]) -> Outcome:
    began_s = time.perf_counter()
    try:
        problem = "" if act() else "its result is wrong"
    except (RuntimeError, ValueError, EvenlyError) as error:
        problem = str(error).splitlines()[0]
    return Outcome(time.perf_counter() - began_s, problem)


def _trials(group: Group) -> dict[str, Callable[[], bool]]:
    """Operation -> whether its result over `group` is what it must be; pieces have one more element per rank."""
    import torch

    from evenly.comm import operations as o

    position, ranks, device = group.position, group.size, group.device

    def full(value: float, length: int) -> torch.Tensor:
        return torch.full((length,), float(value), device=device)

    sizes = [1 + rank for rank in range(ranks)]
    own, joined = full(position, 1 + position), torch.cat([full(rank, 1 + rank) for rank in range(ranks)])

    def pass_on() -> bool:
        if ranks == 1:
            return True
        before = (position - 1) % ranks
        going = o.isend(full(position, 3), (position + 1) % ranks, group)
        came = o.recv(full(-1, 3), before, group)
        going.wait()
        return came.equal(full(before, 3))

    def gathered() -> bool:
        whole = o.gather(own, 0, group)
        return whole is None if position else whole is not None and whole.equal(joined)

    return {
        "send and recv": pass_on,
        "broadcast": lambda: o.broadcast(full(position, 3), ranks - 1, group).equal(full(ranks - 1, 3)),
        "reduce": lambda: o.reduce(full(position, 3), 0, group).equal(full(position or sum(range(ranks)), 3)),
        "scatter": lambda: o.scatter(None if position else joined, 0, group, sizes=sizes).equal(own),
        "gather": gathered,
        "all_reduce": lambda: bool((o.all_reduce(full(1, PROBE_BYTES // 4), group) == ranks).all()),
        "all_gather": lambda: o.all_gather(own, group).equal(joined),
        "reduce_scatter": lambda: o.reduce_scatter(joined, group, sizes=sizes).equal(own * ranks),
        "all_to_all": lambda: o.all_to_all(full(position, ranks), group).equal(torch.arange(ranks).to(own)),
        "barrier": lambda: o.barrier(group) is None,
    }


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f} GiB"
