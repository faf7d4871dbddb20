"""The place of each worker among the ranks, and whether the workers can be ranks of one run; without Ray."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from evenly.errors import UserError
from evenly.launcher.environment import ProcessInfo


@dataclass(frozen=True, kw_only=True)
class WorkerFacts:
    """What a worker says of itself.

    rank, local_rank, local_size, node: as Ray has numbered it. address: of its node. port: one that was free there.
    versions: of what has to be alike, by name. sees_folder: whether it sees the driver's mark in the run's folder.
    """

    rank: int
    local_rank: int
    local_size: int
    node: int
    address: str
    port: int
    versions: Mapping[str, str]
    sees_folder: bool = True


def places_of(workers: Sequence[WorkerFacts]) -> list[ProcessInfo]:
    """The place of each, in their order; all meet at rank 0's node."""
    first = next(worker for worker in workers if worker.rank == 0)
    return [
        ProcessInfo(
            rank=worker.rank,
            local_rank=worker.local_rank,
            size=len(workers),
            local_size=worker.local_size,
            node=worker.node,
            nodes=1 + max(other.node for other in workers),
            address=first.address,
            port=first.port,
            launcher="ray",
        )
        for worker in workers
    ]


def check_workers(workers: Sequence[WorkerFacts], folder: Path) -> None:
    """Raises `UserError` where they run different versions, or do not all see the run's `folder`."""
    names = dict.fromkeys(name for worker in workers for name in worker.versions)
    differing = [text for name in names if (text := _differing(name, workers))]
    if differing:
        do = "install one version on all nodes, or give the workers one environment (runtime_env)"
        raise UserError(f"a run on {len(workers)} workers of Ray", "; ".join(differing), do)
    if blind := sorted({worker.address for worker in workers if not worker.sees_folder}):
        found = f"{', '.join(blind)} {'do' if len(blind) > 1 else 'does'} not see what was written there"
        raise UserError(f"a run in {folder}", found, "name a folder on storage that all nodes see")


def _differing(name: str, workers: Sequence[WorkerFacts]) -> str:
    """Which version each node has; '' where it is one."""
    by_version: dict[str, set[str]] = {}
    for worker in workers:
        by_version.setdefault(worker.versions.get(name, "missing"), set()).add(worker.address)
    return f"{name} is {'; '.join(_where(by_version))}" if len(by_version) > 1 else ""


def _where(by_version: Mapping[str, set[str]]) -> Iterator[str]:
    return (f"{version} on {', '.join(sorted(nodes))}" for version, nodes in sorted(by_version.items()))
