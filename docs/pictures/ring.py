"""Draws docs/pictures/ring.svg: every step of a ring all-reduce, from a run of four ranks.

    python docs/pictures/ring.py

Rank r adds 2**r to every element, so that the bits of a value tell whose values are in it.
"""

from __future__ import annotations

from pathlib import Path

import torch

from evenly.comm.connect import connect, disconnect
from evenly.comm.ring import Ran, ring_all_reduce
from evenly.comm.transport import even_sizes
from evenly.launcher.agent import Launch, start_ranks
from evenly.launcher.environment import find_here

RANKS, LENGTH = 4, 4096
COLOURS = ["#4477aa", "#ee6677", "#228833", "#ccbb44"]
CELL, GAP, LEFT, TOP = 26, 34, 60, 60


def run() -> list[tuple[str, int | None, int, list[int]]]:
    """Per state of this rank, the first before any step: (phase, chunk just sent, bytes sent, bits of each chunk)."""
    world = connect(find_here())
    tensor = torch.full((LENGTH,), 2**world.rank, dtype=torch.int64)
    states = [("start", None, 0, _bits(tensor))]

    def watch(ran: Ran) -> None:
        states.append((ran.step.phase, ran.step.sent, ran.sent_bytes, _bits(tensor)))

    ring_all_reduce(tensor, world.group("data"), watch=watch)
    disconnect(world)
    return states


def _bits(tensor: torch.Tensor) -> list[int]:
    return [int(chunk[0]) for chunk in tensor.split(even_sizes(LENGTH, RANKS))]


def draw(ranks: list[list[tuple[str, int | None, int, list[int]]]]) -> str:
    """One column per state, one row per rank; a cell is a chunk, striped in the colours of whose values it holds."""
    width = LEFT + len(ranks[0]) * (RANKS * CELL + GAP)
    height = TOP + RANKS * (CELL + GAP) + 20
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">']
    parts.append(f'<rect width="{width}" height="{height}" fill="white"/>')
    for rank, states in enumerate(ranks):
        y = TOP + rank * (CELL + GAP)
        parts.append(f'<text x="4" y="{y + 18}" font-size="13" fill="{COLOURS[rank]}">rank {rank}</text>')
        for column, (phase, sent, sent_bytes, chunks) in enumerate(states):
            x = LEFT + column * (RANKS * CELL + GAP)
            if rank == 0:
                title = phase if column == 0 else f"{column}. {phase}"
                parts.append(f'<text x="{x}" y="30" font-size="13">{title}</text>')
            for chunk, bits in enumerate(chunks):
                parts += _cell(x + chunk * CELL, y, bits)
            if sent is not None:
                after = (rank + 1) % RANKS
                parts.append(
                    f'<text x="{x}" y="{y + CELL + 13}" font-size="10" fill="#555">'
                    f"chunk {sent} to rank {after}, {sent_bytes >> 10} KiB</text>"
                )
    return "\n".join([*parts, "</svg>", ""])


def _cell(x: int, y: int, bits: int) -> list[str]:
    stripe = (CELL - 4) / RANKS
    stripes = [
        f'<rect x="{x + 2 + owner * stripe:.1f}" y="{y + 2}" width="{stripe:.1f}" height="{CELL - 4}" '
        f'fill="{COLOURS[owner]}"/>'
        for owner in range(RANKS)
        if bits >> owner & 1
    ]
    return [f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" fill="none" stroke="#999"/>', *stripes]


if __name__ == "__main__":
    results = start_ranks(run, (), Launch(devices=RANKS))
    Path(__file__).with_suffix(".svg").write_text(draw([results[rank] for rank in range(RANKS)]))
