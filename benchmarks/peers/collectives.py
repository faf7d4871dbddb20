"""What a step asks of the process groups, counted by torch's flight recorder, which TORCH_FR_BUFFER_SIZE turns on."""

from __future__ import annotations

import json
from collections import Counter

import torch


class Collectives:
    """Of one step, from `begin` to `end`: number by operation, before, in and after calls of backward."""

    def begin(self) -> None:
        self._counts = {part: Counter() for part in ("forward", "backward", "update")}
        self._before, self._backward = _asked(), torch.autograd.backward
        torch.autograd.backward = self._noted_backward

    def end(self) -> dict[str, dict[str, int]]:
        torch.autograd.backward = self._backward
        self._add("update")
        return self._counts

    def _noted_backward(self, *arguments, **options) -> None:
        self._add("forward")
        self._backward(*arguments, **options)
        self._add("backward")

    def _add(self, part: str) -> None:
        now = _asked()
        self._counts[part].update(now[len(self._before) :])
        self._before = now


def _asked() -> list[str]:
    """Names of all operations so far."""
    entries = json.loads(torch._C._distributed_c10d._dump_fr_trace_json()).get("entries", [])
    return [entry["profiling_name"].removeprefix("gloo:") for entry in entries]
