"""Every example under every family of plans, verified against one device; what is there is not run again.

    python benchmarks/equality/run.py                                                   goes on where it was cut off
    python benchmarks/equality/run.py --again --only gpt2,t5 --plans "zero3;tensor=2"   some rows again

Each example is made small by its settings, and trains `STEPS` steps in float64 (with `exact=bitwise` in float32) in
a plain loop on one device, then under each plan, as `evenly verify` does. A row is kept in
benchmarks/results/equality.json as soon as it is known. At the end docs/equality.md is written; the exit code is 1 if
a row is neither equal nor refused.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from evenly.cli.verify import PRELOAD
from evenly.job import Precision
from evenly.jobfile import libraries_of
from evenly.launcher.agent import warm_up
from evenly.plan.schedule import SCHEDULES
from evenly.verify.compare import Row
from evenly.verify.verify import VerifyRequest, verify

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "equality.json"
PAGE = ROOT / "docs" / "equality.md"
STEPS = 3
WORDS = {"unsupported": "refused", "rounding": "not shown"}
# Small, with as many blocks as the schedules have stages.
SETTINGS: dict[str, dict[str, Any]] = {
    "bert": {"hidden": 32, "layers": 4},
    "digits": {"epochs": 1, "width": 8},
    "gpt2": {"width": 32, "layers": 4, "length": 33},
    "llama": {"width": 32, "layers": 4, "length": 33},
    "recurrent": {"hidden": 16, "layers": 4},
    "resnet": {"width": 4, "blocks": 2},
    "stdlib_lm": {"width": 32, "layers": 4, "batch": 8},
    "t5": {"width": 32, "layers": 2},
    "vit": {"epochs": 1, "width": 32, "layers": 4},
}
PLANS = [
    "single",
    "single recompute=full",
    "ddp",
    "ddp recompute=selective",
    "zero1",
    "zero2",
    "zero3",
    "zero3 recompute=full",
    "hsdp",
    "tensor=2",
    "tensor=2 sequence_parallel=on",
    "tensor=2 recompute=selective",
    "tensor=4",
    "data=2 tensor=2",
    "data=2 tensor=2 zero=3",
    *(f"pipeline=2 schedule={schedule}" for schedule in SCHEDULES),
    "pipeline=2 recompute=full",
    "2d",
    "data=2 pipeline=2 zero=1 schedule=interleaved",
    "tensor=2 pipeline=2",
    "3d",
    "3d zero=2 recompute=full",
    "dp",
    "balanced-dp",
    "zero1 offload=optimizer",
    "zero3 offload=parameters",
    "ddp exact=bitwise",
    "zero1 exact=bitwise",
    "zero2 exact=bitwise",
    "zero3 exact=bitwise",
    "tensor=2 exact=bitwise",
    "pipeline=2 exact=bitwise",
    "2d exact=bitwise",
    "ddp>zero3>pipeline=2",
]


def main() -> None:
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    asked = arguments()
    rows = read_rows()
    commit = commit_of_tree()
    for example in asked.only:
        known = rows.setdefault(example, {})
        due = [plan for plan in asked.plans if asked.again or plan not in known]
        for dtype, of_dtype in by_dtype(due).items():
            verify_example(example, of_dtype, dtype, known, commit, rows)
    PAGE.write_text("\n".join(page(rows)) + "\n", encoding="utf-8")
    sys.exit(any(row["status"] not in ("equal", "unsupported") for of in rows.values() for row in of.values()))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[*SETTINGS], help="examples, by name")
    parser.add_argument("--plans", type=lambda text: text.split(";"), default=PLANS, help="separated by ';'")
    parser.add_argument("--again", action="store_true", help="whether rows that are there are run again")
    asked = parser.parse_args()
    if unknown := {*asked.only} - SETTINGS.keys():
        parser.error(f"{', '.join(sorted(unknown))}: not among {', '.join(SETTINGS)}")
    return asked


def by_dtype(plans: list[str]) -> dict[Precision, list[str]]:
    """What plans are verified in: `exact=bitwise` adds in a wider type than the gradients', and float64 has none."""
    found: dict[Precision, list[str]] = {}
    for plan in plans:
        found.setdefault("float32" if "exact=bitwise" in plan else "float64", []).append(plan)
    return found


def verify_example(
    example: str,
    plans: list[str],
    dtype: Precision,
    known: dict[str, dict[str, Any]],
    commit: str,
    rows: dict[str, dict[str, Any]],
) -> None:
    """Adds the rows of `example` under `plans` to `known`, and keeps all `rows` after each."""
    path = ROOT / "examples" / f"{example}.py"
    warm_up(PRELOAD, libraries_of(path))
    began_s = time.monotonic()

    def judged(row: Row) -> None:
        nonlocal began_s
        seconds, began_s = round(time.monotonic() - began_s, 1), time.monotonic()
        known[row.plan] = {**asdict(row), "commit": commit, "torch": torch.__version__, "seconds": seconds}
        known[row.plan]["reason"] = row.reason.replace(f"{ROOT}/", "")  # the same on every machine
        write_rows(rows)
        diff = row.param_diff or 0.0
        print(f"{example:10} {row.plan:48} {row.status:11} {diff:.1e} {seconds:5.1f} s {row.reason}", flush=True)

    request = VerifyRequest(path, SETTINGS[example], STEPS, dtype)
    verify(request, plans, devices=None, report=lambda _: None, judged=judged)


def read_rows() -> dict[str, dict[str, Any]]:
    """Rows by example and plan."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def write_rows(rows: dict[str, dict[str, Any]]) -> None:
    """Whole or not at all: the run may be cut off."""
    part = RESULTS.with_suffix(".part")
    part.write_text(json.dumps(rows, indent=1) + "\n")
    part.replace(RESULTS)


def commit_of_tree() -> str:
    """The commit that is checked out."""
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, check=True, text=True, cwd=ROOT
    ).stdout.strip()


def page(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The lines of docs/equality.md."""
    every = [row for of in rows.values() for row in of.values()]
    counts = Counter(map(word_of, every))
    numbers = ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
    commits = ", ".join(sorted({row["commit"] for row in every}))
    yield "# Examples under plans, held against one device"
    yield ""
    yield f"The job files of `examples/`, each made small by its settings, train {STEPS} steps in float64 (under"
    yield "`exact=bitwise` in float32) in a plain loop on one device, then under each plan, on CPUs over gloo. A cell"
    yield "has the largest relative difference of a parameter; losses, norms and the optimizer's state are held against"
    yield "one device's as well. *same bits*: all parameters have one device's. *refused*: before the first step, in"
    yield "a sentence, which stands below the table. *not shown*: rounding alone moves"
    yield "the job too far. An empty cell was not run. Written by `benchmarks/equality/run.py`"
    yield "from `benchmarks/results/equality.json`."
    yield ""
    yield f"{len(every)} rows: {numbers}. Commits: {commits}."
    yield ""
    yield from table(rows)


def table(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    """A line per plan, a column per example, and why what is not equal is not."""
    examples = [example for example in SETTINGS if example in rows]
    yield f"| plan | {' | '.join(examples)} |"
    yield f"|---|{'---|' * len(examples)}"
    reasons: dict[str, dict[str, list[str]]] = {}
    for plan in PLANS:
        found = [rows[example].get(plan) for example in examples]
        yield f"| `{plan}` | {' | '.join(cell(row) for row in found)} |"
        for example, row in zip(examples, found, strict=True):
            if row is not None and row["status"] != "equal":
                reasons.setdefault(row["reason"], {}).setdefault(example, []).append(f"`{plan}`")
    yield ""
    for reason, plans_of in reasons.items():
        where = "; ".join(f"{example} under {', '.join(plans)}" for example, plans in plans_of.items())
        yield f"- {where}: {reason}"


def word_of(row: dict[str, Any]) -> str:
    status: str = row["status"]
    return WORDS.get(status, status)


def cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if row["status"] != "equal":
        return word_of(row)
    return "same bits" if row["bits_differ"] == 0 else f"{row['param_diff']:.0e}"


if __name__ == "__main__":
    main()
