"""Who am I: the place of this process among the ranks, found from what its launcher set.

The only file of the package that reads or changes the process environment. Everything but the last
functions is pure: it takes the environment as a mapping.

A launcher may have been started by another, so the nearest one wins. From near to far: torchrun (which
leaves TORCHELASTIC_RUN_ID), Open MPI and Hydra (whose daemons srun may have started), srun, a bare PMI.
RANK and WORLD_SIZE without torchrun's mark were set by hand and must agree with the launcher.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Literal

from evenly.errors import UserError
from evenly.launcher.slurm import first_host, tasks_per_node

Launcher = Literal["torchrun", "srun", "mpirun", "pmi", "ray", "plain"]

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
PORTS = range(20000, 40000)

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
ADDRESS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class ProcessInfo:
    """Where one process stands among all ranks.

    rank, size, local_rank, local_size, node, nodes: as in `World`.
    address, port: where all ranks connect to rank 0's node.
    launcher:      what started the process.
    """

    rank: int
    local_rank: int
    size: int
    local_size: int
    node: int
    nodes: int
    address: str
    port: int
    launcher: Launcher


def find_process(environ: Mapping[str, str]) -> ProcessInfo:
    """The place that `environ` gives this process; one rank alone where no launcher is found.

    Raises `UserError`, naming variables and values, where the environment is half-set or contradicts itself.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        return _checked(_by_variables(environ, None), environ, (*RANK_VARIABLES, "GROUP_RANK"))
    launched = _launched(environ)
    if any(name in environ for name in RANK_VARIABLES[:3]):
        return _checked(_by_variables(environ, launched), environ, (*RANK_VARIABLES, "GROUP_RANK"))
    return launched or _alone(environ)


def _launched(environ: Mapping[str, str]) -> ProcessInfo | None:
    """The place given by a launcher other than torchrun, None where there is none."""
    if "OMPI_COMM_WORLD_RANK" in environ or "OMPI_COMM_WORLD_SIZE" in environ:
        return _by_mpi(environ, OPEN_MPI, "mpirun")
    if "MPI_LOCALRANKID" in environ:
        return _by_mpi(environ, PMI, "pmi")
    if "SLURM_STEP_ID" in environ:
        return _by_srun(environ)
    if "PMI_RANK" in environ or "PMI_SIZE" in environ:
        return _by_mpi(environ, PMI, "pmi")
    return None


def _alone(environ: Mapping[str, str]) -> ProcessInfo:
    port = _number(environ, "MASTER_PORT") if "MASTER_PORT" in environ else _port_of("plain")
    return ProcessInfo(
        rank=0, local_rank=0, size=1, local_size=1, node=0, nodes=1, address=LOOPBACK, port=port, launcher="plain"
    )


# --- torchrun's variables ------------------------------------------------------------------------------


def _by_variables(environ: Mapping[str, str], launched: ProcessInfo | None) -> ProcessInfo:
    """The place of RANK, WORLD_SIZE and their like; `launched` supplies what was not set by hand."""
    values = dict(_as_variables(launched)) if launched else {}
    values |= {name: environ[name] for name in (*RANK_VARIABLES, *ADDRESS_VARIABLES) if name in environ}
    # What RANK and WORLD_SIZE must come with is never guessed from the launcher.
    _require(environ, ("RANK", "WORLD_SIZE"))
    _require(values, (*RANK_VARIABLES, *ADDRESS_VARIABLES), found=environ)
    rank, size = _number(values, "RANK"), _number(values, "WORLD_SIZE")
    local_size = _number(values, "LOCAL_WORLD_SIZE")
    place = ProcessInfo(
        rank=rank,
        local_rank=_number(values, "LOCAL_RANK"),
        size=size,
        local_size=local_size,
        node=_node(environ, launched, rank, local_size),
        nodes=_nodes(environ, launched, size, local_size),
        address=values["MASTER_ADDR"],
        port=_number(values, "MASTER_PORT"),
        launcher=launched.launcher if launched else "torchrun",
    )
    if launched:
        _agree(environ, place, launched)
    return place


def _node(environ: Mapping[str, str], launched: ProcessInfo | None, rank: int, local_size: int) -> int:
    if "GROUP_RANK" in environ:
        return _number(environ, "GROUP_RANK")
    return launched.node if launched else rank // max(local_size, 1)


def _nodes(environ: Mapping[str, str], launched: ProcessInfo | None, size: int, local_size: int) -> int:
    if "GROUP_WORLD_SIZE" in environ:
        return _number(environ, "GROUP_WORLD_SIZE")
    return launched.nodes if launched else -(-size // max(local_size, 1))


def _as_variables(place: ProcessInfo) -> Iterator[tuple[str, str]]:
    yield "LOCAL_RANK", str(place.local_rank)
    yield "LOCAL_WORLD_SIZE", str(place.local_size)
    yield "MASTER_ADDR", place.address
    yield "MASTER_PORT", str(place.port)


def _agree(environ: Mapping[str, str], place: ProcessInfo, launched: ProcessInfo) -> None:
    """Raise where variables set by hand say something else than the launcher."""
    differing = {
        "RANK": (place.rank, launched.rank),
        "WORLD_SIZE": (place.size, launched.size),
        "LOCAL_RANK": (place.local_rank, launched.local_rank),
        "LOCAL_WORLD_SIZE": (place.local_size, launched.local_size),
    }
    wrong = [
        f"{name}={mine} but {launched.launcher} says {its}" for name, (mine, its) in differing.items() if mine != its
    ]
    if wrong:
        raise UserError(
            f"the rank of this process, as set by {launched.launcher}",
            "; ".join(wrong),
            f"unset {', '.join(name for name in (*RANK_VARIABLES, *ADDRESS_VARIABLES) if name in environ)}",
        )


# --- srun ----------------------------------------------------------------------------------------------


def _by_srun(environ: Mapping[str, str]) -> ProcessInfo:
    size_name = _first(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    nodes_name = _first(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", size_name, nodes_name)
    _require(environ, names)
    nodes, node = _number(environ, nodes_name), _number(environ, "SLURM_NODEID")
    size = _number(environ, size_name)
    place = ProcessInfo(
        rank=_number(environ, "SLURM_PROCID"),
        local_rank=_number(environ, "SLURM_LOCALID"),
        size=size,
        local_size=_srun_local_size(environ, size=size, nodes=nodes, node=node),
        node=node,
        nodes=nodes,
        address=_srun_address(environ, nodes),
        port=_port(environ, "SLURM_JOB_ID", "SLURM_STEP_ID"),
        launcher="srun",
    )
    return _checked(place, environ, names)


def _srun_local_size(environ: Mapping[str, str], *, size: int, nodes: int, node: int) -> int:
    name = _first(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if nodes == 1:
        return size
    _require(environ, (name,))
    tasks = tasks_per_node(environ[name])
    if len(tasks) != nodes or sum(tasks) != size or not 0 <= node < nodes:
        raise _unusable(environ, (name, "SLURM_NODEID"), f"it does not share {size} tasks among {nodes} nodes")
    return tasks[node]


def _srun_address(environ: Mapping[str, str], nodes: int) -> str:
    if "MASTER_ADDR" in environ:
        return environ["MASTER_ADDR"]
    if nodes == 1:
        return LOOPBACK
    name = _first(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    _require(environ, (name,))
    return first_host(environ[name])


# --- Open MPI and PMI ----------------------------------------------------------------------------------


OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
PMI = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def _by_mpi(environ: Mapping[str, str], names: tuple[str, ...], launcher: Launcher) -> ProcessInfo:
    """The place of four variables: rank, size, local rank, local size.

    They do not number the nodes, which are taken to be filled alike and in order.
    """
    _require(environ, names)
    rank, size, local_rank, local_size = (_number(environ, name) for name in names)
    per_node = max(local_size, 1)
    place = ProcessInfo(
        rank=rank,
        local_rank=local_rank,
        size=size,
        local_size=local_size,
        node=(rank - local_rank) // per_node,
        nodes=-(-size // per_node),
        address=_mpi_address(environ, names, alone=size == local_size),
        port=_port(environ, "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID"),
        launcher=launcher,
    )
    return _checked(place, environ, names)


def _mpi_address(environ: Mapping[str, str], names: tuple[str, ...], *, alone: bool) -> str:
    if "MASTER_ADDR" in environ:
        return environ["MASTER_ADDR"]
    if alone:
        return LOOPBACK
    raise _unusable(
        environ,
        names[1::2],
        "the ranks are on several nodes and MASTER_ADDR is not set",
        "set MASTER_ADDR to rank 0's host: mpirun -x MASTER_ADDR=HOST (Open MPI), -genv MASTER_ADDR HOST (MPICH)",
    )


# --- checks --------------------------------------------------------------------------------------------


def _checked(place: ProcessInfo, environ: Mapping[str, str], names: tuple[str, ...]) -> ProcessInfo:
    problems = [
        text
        for wrong, text in (
            (place.size < 1, "the number of ranks is below 1"),
            (not 0 <= place.rank < place.size, "the rank is not below the number of ranks"),
            (not 0 <= place.local_rank < place.local_size, "the local rank is not below the ranks of its node"),
            (place.local_size > place.size, "the node has more ranks than there are"),
            (not 0 <= place.node < place.nodes, "the node's number is not below the number of nodes"),
            (not 0 < place.port < 2**16, f"port {place.port} is not between 1 and 65535"),
        )
        if wrong
    ]
    if problems:
        raise _unusable(environ, (*names, *ADDRESS_VARIABLES), "; ".join(problems))
    return place


def _require(values: Mapping[str, str], names: tuple[str, ...], found: Mapping[str, str] | None = None) -> None:
    missing = [name for name in names if name not in values]
    if missing:
        shown = values if found is None else found
        raise _unusable(shown, tuple(n for n in names if n in shown), f"{' and '.join(missing)} not set")


def _number(values: Mapping[str, str], name: str) -> int:
    if not re.fullmatch(r"[0-9]+", values[name].strip()):
        raise _unusable(values, (name,), "not a whole number")
    return int(values[name])


def _unusable(environ: Mapping[str, str], names: tuple[str, ...], why: str, do: str = "") -> UserError:
    shown = ", ".join(f"{name}={environ[name]}" for name in names if name in environ)
    return UserError(
        "the rank of this process, from its environment",
        f"{shown}: {why}" if shown else why,
        do or "start with evenly run, torchrun, srun or mpirun, or unset these variables to run one rank",
    )


def _first(environ: Mapping[str, str], *names: str) -> str:
    """The first of `names` that is set; the first of all where none is, to be named as missing."""
    return next((name for name in names if name in environ), names[0])


def _port(environ: Mapping[str, str], *names: str) -> int:
    """MASTER_PORT, else one that all ranks of the same job derive alike."""
    if "MASTER_PORT" in environ:
        return _number(environ, "MASTER_PORT")
    return _port_of("/".join(environ.get(name, "") for name in names))


def _port_of(name: str) -> int:
    digest = blake2b(name.encode(), digest_size=8).digest()
    return PORTS[int.from_bytes(digest, "big") % len(PORTS)]


# --- what ranks are given ------------------------------------------------------------------------------


SOCKET_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def rank_environment(environ: Mapping[str, str], interface: str = LOOPBACK_INTERFACE) -> dict[str, str]:
    """What to add to `environ` for ranks that talk over `interface`; never overrides what the user set.

    One thread per rank: the numbers of a run must not depend on how many ranks share the cores. Ranks of
    one node talk over loopback alone, which also works where the host's name does not resolve. Counting
    GPUs through NVML leaves a process fit to fork ranks that use CUDA.
    """
    wanted = {
        "OMP_NUM_THREADS": "1",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        **dict.fromkeys(SOCKET_VARIABLES, interface),
    }
    return {name: value for name, value in wanted.items() if name not in environ}


# --- the process's own environment: read, lent, replaced -----------------------------------------------


def process_environment() -> dict[str, str]:
    """A copy of this process's environment."""
    return dict(os.environ)


@contextmanager
def changed_environment(variables: Mapping[str, str]) -> Generator[None]:
    """This process's environment with `variables` set; on leaving, exactly what it was."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# What the elastic agent sets, besides TORCHELASTIC_*, for each rank on its own.
AGENT_VARIABLES = (
    *RANK_VARIABLES,
    *ADDRESS_VARIABLES,
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_NAME",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)


def become_environment(variables: Mapping[str, str], place: Mapping[str, str]) -> None:
    """Give a started rank its launcher's environment, whatever the process that forked it had.

    What the elastic agent set for this rank alone stays, but for its `place` among the ranks of all nodes.
    """
    of_agent = {k: v for k, v in os.environ.items() if k in AGENT_VARIABLES or k.startswith("TORCHELASTIC_")}
    os.environ.clear()
    os.environ.update({**variables, **of_agent, **place})


@contextmanager
def without_ranks() -> Generator[None]:
    """Within, the environment tells of no other rank: libraries of a job (accelerate) would connect to them."""
    of_slurm = ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS")
    names = (*RANK_VARIABLES[1:], "TORCHELASTIC_RUN_ID", *OPEN_MPI, *PMI, *of_slurm)
    hidden = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def gloo_interface() -> str:
    """The interface that the user has named for gloo; '' where none is."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]


def talk_over(interface: str) -> None:
    """Has gloo and NCCL use `interface` in this process, unless the user has named one."""
    for name in SOCKET_VARIABLES:
        os.environ.setdefault(name, interface)


def find_here() -> ProcessInfo:
    """The place of this process; see `find_process`."""
    return find_process(os.environ)


def restart_count() -> int:
    """How often torch's elastic agent has started the ranks again; 0 without one."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return int(count) if count.isdecimal() else 0


def available_cores() -> int:
    """Cores that this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def keep_primitives(count: int) -> None:
    """Has oneDNN keep `count` of its primitives, unless the user has chosen; it reads that when it makes its first."""
    if not os.environ.keys() & {"ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"}:
        os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = str(count)


def cpp_compiler() -> str | None:
    """Path of the C++ compiler that torch will use; None where it is not installed."""
    return shutil.which(os.environ.get("CXX") or "g++")


OPTIONS_VARIABLE = "EVENLY_OPTIONS"


def launcher_options() -> str | None:
    """What `evenly run` asks of the ranks that it started, as text; None elsewhere."""
    return os.environ.get(OPTIONS_VARIABLE)


CONTROL_VARIABLE = "EVENLY_CONTROL"
CHECK_VARIABLE = "EVENLY_CHECK"
PAUSE = "pause"  # a file in the control folder


PRELOAD_VARIABLE = "EVENLY_PRELOAD"
NOTEBOOK_VARIABLE = "EVENLY_NOTEBOOK"


def is_in_notebook() -> bool:
    return NOTEBOOK_VARIABLE in os.environ


def libraries_to_preload() -> list[str]:
    """What the forkserver imports of the job's own libraries; see `launch.preload`."""
    return [*filter(None, os.environ.get(PRELOAD_VARIABLE, "").split(","))]


SECRET_VARIABLE = "EVENLY_SECRET"


def run_secret(file: Path | None) -> bytes:
    """The secret of a run on several nodes: what `file` holds, else EVENLY_SECRET; empty without both."""
    if file is None:
        return os.environ.get(SECRET_VARIABLE, "").encode()
    try:
        secret = file.read_bytes().strip()
    except OSError as problem:
        raise UserError("the secret of the run", str(problem), "name a file that can be read on every node") from None
    if not secret:
        raise UserError("the secret of the run", f"{file} is empty", "write some random words to it")
    return secret


def record_file(rank: int) -> Path | None:
    """Where this rank records what it says, for the launcher that watches it; None without one."""
    folder = os.environ.get(CONTROL_VARIABLE)
    return Path(folder) / f"{rank}.record" if folder else None


def import_quiet_torch() -> None:
    """Imports torch so that it does not warn, with stacks, of a store that is gone, unless the user asks for that.

    What a launcher says of it says more.
    """
    level = os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")
    with changed_environment({"TORCH_CPP_LOG_LEVEL": level}):
        import_module("torch")  # reads it once


def pause_asked() -> bool:
    """Whether the launcher asks its ranks to pause where a checkpoint is due: a node has come."""
    folder = os.environ.get(CONTROL_VARIABLE)
    return folder is not None and Path(folder, PAUSE).exists()


def checking() -> bool:
    """Whether ranks compare what they ask for before each collective."""
    return os.environ.get(CHECK_VARIABLE, "") not in ("", "0")


def chosen_threads() -> int | None:
    """Threads per rank that the user or the launcher chose, None where nobody did."""
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    return int(chosen) if chosen.isdecimal() else None
