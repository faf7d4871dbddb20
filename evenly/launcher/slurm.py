"""What Slurm's variables say in short notation: node lists and tasks per node."""

from __future__ import annotations

import re

from evenly.errors import UserError


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list: 'gpu[003-007,09],login1' -> 'gpu003'."""
    entry = re.split(r",(?![^\[]*\])", nodelist.strip())[0]
    host = re.sub(r"\[([0-9]+)(?:[-,][0-9,-]*)?\]", r"\1", entry)
    if not re.fullmatch(r"[\w.-]+", host):
        raise UserError(
            "the first host of a Slurm node list", f"{nodelist!r} cannot be read", "set MASTER_ADDR to rank 0's host"
        )
    return host


def tasks_per_node(counts: str) -> list[int]:
    """Slurm's tasks of each node: '4(x2),3' -> [4, 4, 3]."""
    tasks: list[int] = []
    for part in counts.split(","):
        match = re.fullmatch(r"\s*([0-9]+)(?:\(x([0-9]+)\))?\s*", part)
        if not match:
            raise UserError(
                "the tasks of each Slurm node", f"{counts!r} cannot be read", "start the ranks with torchrun instead"
            )
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks
