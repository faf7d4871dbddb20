"""Trains with every optimizer of a few libraries under each plan and writes what came out as a page.

Twelve steps, saved after the sixth and gone on with in another process, against a plain loop on one device.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2] / "tests"), str(Path(__file__).parents[2])]
from kept_ranks import KeptRanks, RankFailure  # noqa: E402
from legs import HALF, STEPS, leg, plain  # noqa: E402
from makers import LIBRARIES, subjects  # noqa: E402

COLUMNS = {
    **{plan: (plan, plan) for plan in ("single", "ddp", "zero1", "zero2", "zero3", "tensor=2", "pipeline=2")},
    "zero2, then single": ("zero2", "single"),
    "tensor=2, then zero3": ("tensor=2", "zero3"),
}
TOLERANCE = 1e-9
LIMIT_S = 240.0


def judged(subject: str, column: str, ranks: KeptRanks, expected: Any) -> dict[str, Any]:
    """Return the row of `subject` under the plans of `column`."""
    row: dict[str, Any] = {"subject": subject, "plan": column}
    losses: list[float] = []
    parameters: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="evenly-optimizers-") as out:
        for plan, last in zip(COLUMNS[column], (HALF, STEPS), strict=True):
            try:
                size = 1 if plan == "single" else 2
                done, some, parameters, kind, why = ranks.run(
                    leg, subject, plan, Path(out), last, size=size, limit_s=LIMIT_S
                )[0]
            except RankFailure as problem:
                return row | {"status": "raw", "why": str(problem)[-400:]}
            if kind:
                ranks.close()  # a run that failed leaves its process groups
                refused = kind == "refused" and last == HALF
                return row | {"status": "refused" if refused else kind, "step": done, "why": why}
            losses += some
    if expected is None:
        return row | {"status": "not compared"}
    found = _difference(losses, parameters, *expected)
    if found["status"] == "different":  # does rounding alone move it as far?
        other = ranks.run(plain, subject, 2, size=1, limit_s=LIMIT_S)[0]
        apart = _difference(*other, *expected)
        rounding = apart["difference"] > found["difference"] / 100
        found |= {"status": "rounding" if rounding else "different", "rounding": apart["difference"]}
    return row | found


def _difference(losses: list[float], found: dict[str, Any], expected: list[float], whole: dict[str, Any]) -> Any:
    wrong = [float((found[name] - one).abs().max() / one.abs().max().clamp(min=1e-12)) for name, one in whole.items()]
    wrong += [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(losses, expected, strict=True)]
    worst = max(wrong)
    return {"status": "equal" if worst < TOLERANCE else "different", "difference": worst}


def campaign(out: Path, libraries: list[str], columns: list[str], only: str) -> None:
    """Append a row for each subject and column that `out` lacks."""
    known = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    there = {(row["subject"], row["plan"]) for row in known}
    ranks = KeptRanks()
    for subject in [one for one in subjects(libraries) if only in one]:
        due = [column for column in columns if (subject, column) not in there]
        if not due:
            continue
        try:
            expected = ranks.run(plain, subject, size=1, limit_s=LIMIT_S)[0]
        except RankFailure as problem:  # there is nothing to compare with
            ranks.close()
            rows = [judged(subject, one, ranks, None) | {"plain": last_line(problem)} for one in due]
        else:
            rows = [judged(subject, column, ranks, expected) for column in due]
        with out.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        print(subject, dict(Counter(row["status"] for row in rows)), flush=True)
    ranks.close()


def last_line(problem: BaseException) -> str:
    """Return the last line of a traceback that says something."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return lines[-1] if lines else type(problem).__name__


def page(rows: list[dict[str, Any]]) -> str:
    """Return the table, as a page of the design."""
    counts = Counter(row["status"] for row in rows)
    by_subject: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_subject.setdefault(row["subject"], {})[row["plan"]] = row
    text = (Path(__file__).parent / "page.md").read_text()
    lines = ["| optimizer | " + " | ".join(COLUMNS) + " |", "|---|" + "---|" * len(COLUMNS)]
    unfit: list[str] = []
    reasons: dict[str, set[str]] = {}
    for subject, found in by_subject.items():
        if plain_error := next(iter(found.values())).get("plain"):
            unfit.append(f"- `{subject}`: {plain_error[:160]}")
        cells = [found.get(column, {"status": "-"})["status"] for column in COLUMNS]
        lines.append(f"| `{subject}` | " + " | ".join(cells) + " |")
        for one in found.values():
            if one["status"] == "refused" and "pipeline" not in one["plan"]:
                why = " ".join(one["why"].split("\n  to do:")[0].split())
                reasons.setdefault(why[:240], set()).add(subject)
    refused = [f"- {', '.join(f'`{s}`' for s in sorted(who))}: {why}" for why, who in sorted(reasons.items())]
    figures = ", ".join(
        f"{counts[status]} {status}"
        for status in ("equal", "refused", "rounding", "not compared", "different", "error", "raw")
    )
    return text.format(
        count=len(by_subject), figures=figures, table="\n".join(lines),
        refused="\n".join(refused) or "None.", unfit="\n".join(unfit) or "None.",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/optimizers.jsonl"))
    parser.add_argument("--libraries", default=",".join(LIBRARIES))
    parser.add_argument("--columns", default=";".join(COLUMNS))
    parser.add_argument("--only", default="", help="part of the name of a subject")
    parser.add_argument("--page", type=Path, help="write the table of all rows there, and run nothing")
    args = parser.parse_args()
    if args.page is not None:
        args.page.write_text(page([json.loads(line) for line in args.out.read_text().splitlines()]))
        return
    warnings.simplefilter("ignore")
    campaign(args.out, args.libraries.split(","), args.columns.split(";"), args.only)


if __name__ == "__main__":
    main()
