"""Writes docs/models.md from the rows of a campaign: what is equal, what is refused and why, counts per plan.

python benchmarks/zoo/summary.py benchmarks/results/zoo.jsonl docs/models.md
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import run
import shrink

Row = dict[str, Any]
WORDS = {
    "equal": "the numbers of one device",
    "different": "other numbers",
    "refused": "refused before the first update, in a sentence",
    "late": "refused after an update",
    "error": "a raw error, or ranks that died",
    "timeout": "no end within the limit",
}


def main() -> None:
    rows = [*run.read_rows(Path(sys.argv[1])).values()]
    Path(sys.argv[2]).write_text("\n".join(lines(rows)) + "\n", encoding="utf-8")


def lines(rows: list[Row]) -> list[str]:
    """The lines of the page."""
    built = [row for row in rows if row["status"] != "unbuilt"]
    names = {row["architecture"] for row in built}
    versions = sorted({f"transformers {v['transformers']}, torch {v['torch']}" for v in (r["versions"] for r in built)})
    return [
        "# Models that were tried",
        "",
        f"{len(names)} architectures of transformers, each made small by one rule (`benchmarks/zoo/shrink.py`) and",
        "trained for 2 steps of 3 microbatches in float64 under each plan, and held against a plain loop on one",
        f"device, tensor by tensor: `benchmarks/zoo/run.py`, {'; '.join(versions)}, on CPUs with gloo.",
        "Blocks of any size are units under `zero=3`. This page is written by `benchmarks/zoo/summary.py` from",
        "`benchmarks/results/zoo.jsonl`, and says nothing that was not run; not all rows were run on one commit.",
        "",
        *_counts(built),
        *_reasons(built),
        *_names(built),
        *_left_out(rows),
    ]


def _counts(rows: list[Row]) -> list[str]:
    counts = Counter((row["plan"], row["status"]) for row in rows)
    plans = [*dict.fromkeys(row["plan"] for row in rows)]
    heads = [status for status in WORDS if any(counts[plan, status] for plan in plans)]
    table = [
        "| plan | architectures | " + " | ".join(heads) + " | share equal |",
        "|---|---|" + "---|" * (len(heads) + 1),
    ]
    for plan in plans:
        total = sum(counts[plan, status] for status in WORDS)
        cells = " | ".join(str(counts[plan, status]) for status in heads)
        table.append(f"| `{plan}` | {total} | {cells} | {100 * counts[plan, 'equal'] / total:.1f} % |")
    return [*table, "", " · ".join(f"*{status}*: {WORDS[status]}" for status in heads), ""]


def _reasons(rows: Iterable[Row]) -> list[str]:
    """What was not equal, by plan and reason."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row["status"] != "equal":
            found.setdefault((row["plan"], row["status"], _reason(row)), []).append(row["architecture"])
    if not found:
        return []
    result = ["## What was not equal", "", "| plan | status | reason | architectures |", "|---|---|---|---|"]
    for (plan, status, reason), names in sorted(found.items(), key=lambda item: (item[0][0], -len(item[1]))):
        result.append(f"| `{plan}` | {status} | {reason} | {', '.join(names)} |")
    return [*result, ""]


def _reason(row: Row) -> str:
    """A row's reason without what differs between architectures: names in it, places in code."""
    if row["status"] in ("timeout",):
        return "no end within the limit"
    if row["status"] == "different":
        return f"first in {re.sub('first difference: | on rank.*', '', row['reason'])}; at most {_largest(row):.1e}"
    text = " ".join(line.strip() for line in row["reason"].split("\n"))
    text = re.sub(r" to do: .*", "", text)
    text = re.sub(r"\([\w ]*\w+\.py:\d+\)|\(in the call of.*", "", text)
    text = re.sub(r"\[[^\]]*\]:?\d*", "", text)
    text = re.sub(r"\b\w+(\.\w+){2,}\b", "...", text)
    return re.sub(r"\s+", " ", text).replace("|", "/").strip()[:200]


def _largest(row: Row) -> float:
    return max(row["loss_diff"], row["grad_norm_diff"], row["param_diff"])


def _names(rows: Iterable[Row]) -> list[str]:
    """The architectures that are equal under every plan that was run with them, by what they were trained for."""
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row["architecture"], []).append(row)
    by_head: dict[str, list[str]] = {}
    for name, mine in by_name.items():
        if all(row["status"] == "equal" for row in mine):
            by_head.setdefault(mine[0]["head"], []).append(name)
    result = ["## Equal under every plan that was run", ""]
    return [*result, *(f"- {h.lower().replace('_', ' ')}: {', '.join(names)}" for h, names in by_head.items()), ""]


def _left_out(rows: Iterable[Row]) -> list[str]:
    unbuilt = sorted({row["architecture"] for row in rows if row["status"] == "unbuilt"})
    result = [
        "## Not run",
        "",
        "- plans that are not in the table above; models of other libraries",
        *(f"- {name}: {reason}" for name, reason in shrink.left_out().items()),
    ]
    if unbuilt:
        result.append(f"- no batch was found that the small model runs on: {', '.join(unbuilt)}")
    return result


if __name__ == "__main__":
    main()
