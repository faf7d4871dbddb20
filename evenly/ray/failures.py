"""How workers have failed, and which of them was the first; without Ray."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from evenly.launcher.agent import FailedRank, failed_rank
from evenly.launcher.rank import LESS_MEMORY, RankExit

NO_MEMORY = "low on memory"  # as Ray says it of a worker that it has killed


class FailedWorker(Exception):
    """What a rank raises to Ray; found: how it has failed."""

    def __init__(self, found: RankExit) -> None:
        super().__init__(found)
        self.found = found

    def __str__(self) -> str:
        return f"rank {self.found.rank}: {self.found.text}"


def first_failure(failures: Mapping[int, BaseException]) -> FailedRank:
    """The error of the run whose workers Ray says to have failed so, by rank; at least one."""
    exits = [_exit_of(rank, error) for rank, error in failures.items()]
    first = min(exits, key=lambda found: found.order)
    failed = failed_rank(first)
    if first.kind == "peer" and not first.is_mistake:
        failed.asked = "the ranks lost one of them"
    return failed


def _exit_of(rank: int, error: BaseException) -> RankExit:
    if isinstance(error, FailedWorker):
        return error.found
    if NO_MEMORY in str(error):
        found = "Ray has killed its worker, since the node was low on memory"
        return RankExit(rank=rank, time_s=time.time(), kind="memory", found=found, do=LESS_MEMORY)
    node = re.search(r"node_ip='([^']+)'", str(error))
    found = f"its worker{f' on {node[1]}' if node else ''} is gone, perhaps with its node"
    return RankExit(rank=rank, time_s=time.time(), kind="killed", found=found)
