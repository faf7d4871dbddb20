"""`evenly verify`: prints the verdict on every plan as a table or as JSON."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from evenly.cli.tables import print_table, print_wrapped
from evenly.errors import UserError
from evenly.job import PRECISIONS
from evenly.jobfile import libraries_of, owns_loop, parse_settings
from evenly.launcher.agent import warm_up

if TYPE_CHECKING:
    from evenly.verify.verify import Verification

# What every rank needs; pipelining imports what the first optimizer does, which takes a second.
PRELOAD = ["evenly.verify.ranks", "evenly.train.resume", "torch.distributed.pipelining"]


def run_verify(
    job: Path,
    plans: str,
    *,
    devices: int | None,
    steps: int,
    dtype: str,
    settings: list[str],
    keep_casts: bool = False,
    json_only: bool,
) -> int:
    """Verifies; returns 0 if every plan is equal, 3 if rounding hides that of some, 1 otherwise."""
    if dtype not in PRECISIONS:
        raise UserError(f"--dtype {dtype}", "unknown", f"one of {', '.join(PRECISIONS)}")
    texts = [text.strip() for text in plans.split(";") if text.strip()]
    if not texts:
        raise UserError(f"--plans {plans!r}", "no plan", "name plans separated by semicolons, for example 'single;ddp'")
    owns_loop(job)  # refuses a file that is missing or is not Python before any process starts
    warm_up(PRELOAD, libraries_of(job))

    from evenly.verify.verify import VerifyRequest, verify

    def report(text: str) -> None:
        if not json_only:
            print(f"verify {text}", file=sys.stderr, flush=True)

    request = VerifyRequest(job, parse_settings(settings), steps, dtype, keep_casts)  # pyright: ignore[reportArgumentType]
    verdict = verify(request, texts, devices=devices, report=report)
    if json_only:
        print(json.dumps(asdict(verdict)))
    else:
        _show(verdict)
    return verdict.exit_code


def _show(verdict: Verification) -> None:
    columns: dict[str, list[str]] = {
        "plan": [row.plan for row in verdict.plans],
        "ranks": [str(row.world) if row.world else "" for row in verdict.plans],
        "status": [row.status for row in verdict.plans],
        "loss": [_number(row.loss_diff) for row in verdict.plans],
        "grad norm": [_number(row.grad_norm_diff) for row in verdict.plans],
        "parameters": [_number(row.param_diff) for row in verdict.plans],
        "rounding": [_number(row.param_rounding) for row in verdict.plans],
        "other bits": ["" if row.bits_differ is None else str(row.bits_differ) for row in verdict.plans],
    }
    filled = {head: cells for head, cells in columns.items() if any(cells)}
    title = f"{verdict.job}: {verdict.steps} steps in {verdict.dtype}, largest difference from one device"
    print_table(title, [*filled], [*zip(*filled.values(), strict=True)], wrapping=["plan"])
    counts = Counter(row.status for row in verdict.plans)
    if len(counts) > 1 or "rounding" in counts:
        print_wrapped(", ".join(f"{count} {status}" for status, count in counts.items()))
    if "rounding" in filled:
        print_wrapped("rounding: how far the parameters of one device stray where rounding is added to it")
    if verdict.note:
        print_wrapped(f"note: {verdict.note}")
    for row in verdict.plans:
        if row.worst_param and row.param_diff and row.status != "equal":
            print_wrapped(f"{row.plan}: the parameter that is farthest off is {row.worst_param}")
        if row.reason:
            print_wrapped(f"{row.plan}: {row.reason}")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"
