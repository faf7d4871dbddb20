"""`evenly verify`: prints the verdict on every plan as a table or as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from evenly.cli.tables import print_table
from evenly.errors import UserError
from evenly.job import PRECISIONS
from evenly.jobfile import owns_loop, parse_settings
from evenly.launch.agent import warm_up

if TYPE_CHECKING:
    from evenly.verify.verify import Verification

# What every rank needs; pipelining imports what the first optimizer does, which takes a second.
PRELOAD = ["evenly.verify.ranks", "torch.distributed.pipelining"]


def run_verify(
    job: Path, plans: str, *, devices: int | None, steps: int, dtype: str, settings: list[str], json_only: bool
) -> int:
    """Verifies; returns 0 if every plan is equal, 1 otherwise."""
    if dtype not in PRECISIONS:
        raise UserError(f"--dtype {dtype}", "unknown", f"one of {', '.join(PRECISIONS)}")
    texts = [text.strip() for text in plans.split(";") if text.strip()]
    if not texts:
        raise UserError(f"--plans {plans!r}", "no plan", "name plans separated by semicolons, for example 'single;ddp'")
    owns_loop(job)  # refuses a file that is missing or is not Python before any process starts
    warm_up(PRELOAD)

    from evenly.verify.verify import VerifyRequest, verify

    def report(text: str) -> None:
        if not json_only:
            print(f"verify {text}", file=sys.stderr, flush=True)

    request = VerifyRequest(job, parse_settings(settings), steps, dtype)  # pyright: ignore[reportArgumentType]
    verdict = verify(request, texts, devices=devices, report=report)
    if json_only:
        print(json.dumps(asdict(verdict)))
    else:
        _show(verdict)
    return 0 if verdict.equal else 1


def _show(verdict: Verification) -> None:
    rows: list[tuple[str, ...]] = []
    for row in verdict.plans:
        differences = ["" if d is None else f"{d:.1e}" for d in (row.loss_diff, row.grad_norm_diff, row.param_diff)]
        bits = "" if row.bits_differ is None else str(row.bits_differ)
        rows.append((row.plan, str(row.world), row.status, *differences, bits))
    title = f"{verdict.job}: {verdict.steps} steps in {verdict.dtype}, largest difference from one device"
    print_table(title, ("plan", "ranks", "status", "loss", "grad norm", "parameters", "other bits"), rows)
    if verdict.note:
        print(f"note: {verdict.note}")
    for row in verdict.plans:
        if row.worst_param and row.param_diff and row.status != "equal":
            print(f"{row.plan}: the parameter that is farthest off is {row.worst_param}")
        if row.reason:
            print(f"{row.plan}: {row.reason}")
