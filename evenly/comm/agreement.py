"""Checking mode: before each collective the ranks of a group compare what they ask for.

One small gather per operation. A rank that does not come at all is not found here but by whoever watches the ranks.
"""

from __future__ import annotations

import torch

from evenly.comm.groups import Group
from evenly.errors import RunError
from evenly.observe.diagnosis import disagreement
from evenly.observe.recorder import LONGEST_TEXT, CollectiveCall, call_from, call_text
from evenly.torch_private import all_gather_single


def check_call(call: CollectiveCall, number: int, group: Group, position: int) -> None:
    """Raises the same `RunError` on every rank where the ranks of `group` do not ask for the same."""
    text = call_text(call)
    padded = text + b" " * (LONGEST_TEXT - len(text))
    mine = torch.frombuffer(bytearray(padded), dtype=torch.uint8).to(group.device)
    all_texts = torch.empty(group.size * LONGEST_TEXT, dtype=torch.uint8, device=group.device)
    all_gather_single(all_texts, mine, group=group.handle)
    texts = all_texts.cpu().view(group.size, LONGEST_TEXT)
    if bool((texts == texts[position]).all()):
        return
    calls = {rank: call_from(bytes(row.tolist())) for rank, row in zip(group.ranks, texts, strict=True)}
    if words := disagreement(calls):
        raise RunError(
            f"operation #{number} of group {group.label} on all its ranks",
            f"they ask for different things: {words}",
            "let every rank call the same operations with the same shapes, in the same order",
        )
